//! Adapters on the parameters that hold all experts of a layer, as PEFT writes them with `target_parameters`.
//!
//! PEFT wraps the module of the experts once for each parameter, one wrapper around the other: the keys of gate and up have
//! `base_layer` in their path, those of down end with the module. Here both have the path of their parameter. A is (E·R, in)
//! with the rows of an expert together, B is (out, R·E) with the columns of a rank together.

use super::key::AdapterKey;
use std::collections::BTreeSet;

const GATE_UP: &str = ".gate_up_proj";
const DOWN: &str = ".down_proj";
const INNER: &str = ".base_layer";

/// Whether the path of an adapted module is that of a parameter of all experts.
pub fn is_of_experts(path: &str) -> bool {
    [GATE_UP, DOWN].iter().any(|name| path.strip_suffix(name).is_some_and(is_module))
}

/// Whether PEFT can adapt what a target names as a parameter of experts.
pub(super) fn is_parameter(target: &str) -> bool {
    let name = target.rsplit('.').next().unwrap_or(target);
    [GATE_UP, DOWN].iter().any(|parameter| parameter[1..] == *name)
}

fn is_module(path: &str) -> bool {
    path == "experts" || path.ends_with(".experts")
}

/// The path of the parameter that a path of the file adapts.
pub(super) fn parameter_path(path: &str, targets: &[String]) -> Option<String> {
    if let Some(front) = path.strip_suffix(INNER).filter(|front| is_module(front)) {
        return Some(format!("{front}{GATE_UP}"));
    }
    let has_down = targets.iter().any(|target| target.rsplit('.').next() == Some(&DOWN[1..]));
    is_module(path).then(|| format!("{path}{}", if has_down { DOWN } else { GATE_UP }))
}

/// The path in the file of an adapted parameter, among all adapted modules.
pub(super) fn path_in_file(path: &str, modules: &BTreeSet<&str>) -> Option<String> {
    if let Some(front) = path.strip_suffix(GATE_UP).filter(|front| is_module(front)) {
        let is_inner = modules.contains(format!("{front}{DOWN}").as_str());
        return Some(if is_inner { format!("{front}{INNER}") } else { front.to_string() });
    }
    path.strip_suffix(DOWN).filter(|front| is_module(front)).map(str::to_string)
}

/// The key in the file of a tensor of an adapter with these modules.
pub fn key_in_file(key: &AdapterKey, modules: &BTreeSet<&str>) -> AdapterKey {
    with_path(key, |path| path_in_file(path, modules)).unwrap_or_else(|| key.clone())
}

/// A key of A or B with another path.
pub(super) fn with_path(key: &AdapterKey, path: impl FnOnce(&str) -> Option<String>) -> Option<AdapterKey> {
    match key {
        AdapterKey::LoraA(old) => path(old).map(AdapterKey::LoraA),
        AdapterKey::LoraB(old) => path(old).map(AdapterKey::LoraB),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_experts_are_nested_in_files() {
        let [gate_up, down] =
            ["gate_up_proj", "down_proj"].map(|name| format!("model.layers.1.mlp.experts.{name}"));
        let both = BTreeSet::from([gate_up.as_str(), down.as_str()]);
        let targets = ["mlp.experts.gate_up_proj".to_string(), "down_proj".to_string()];
        for (path, in_file) in
            [(&gate_up, "model.layers.1.mlp.experts.base_layer"), (&down, "model.layers.1.mlp.experts")]
        {
            assert_eq!(path_in_file(path, &both).as_deref(), Some(in_file));
            assert_eq!(parameter_path(in_file, &targets).as_ref(), Some(path));
        }
        let one = BTreeSet::from([gate_up.as_str()]);
        assert_eq!(path_in_file(&gate_up, &one).as_deref(), Some("model.layers.1.mlp.experts"));
        assert_eq!(parameter_path("model.layers.1.mlp.experts", &targets[..1]), Some(gate_up.clone()));
        for other in ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj.base_layer"] {
            assert!(path_in_file(other, &both).is_none() && parameter_path(other, &targets).is_none());
            assert!(!is_of_experts(other));
        }
        assert!(is_of_experts(&gate_up) && is_of_experts(&down));
    }
}
