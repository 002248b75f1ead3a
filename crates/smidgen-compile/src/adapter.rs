//! Which linears have an adapter, with which rank and scale, and which tensors are trained themselves.
//!
//! Targets are matched as PEFT matches a list: a name equals the module's path, or its end after a dot. `all-linear` means
//! every linear but the head. If the base model itself is trained, it means every tensor of the layers, and with all layers
//! also the embedding, the final norm and the head.

use crate::error::ModelError;
use crate::model::audio::{AUDIO, is_of_projector};
use crate::model::layer::LAYER_SCALAR;
use crate::model::spec::{DecoderSpec, HEAD, Linear, LinearKind, PER_LAYER_PROJECTION};
use std::collections::BTreeSet;

/// The low-rank matrices of one linear: y += scale · (x·Aᵀ)·Bᵀ.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraModule {
    /// Path of the linear, as Hugging Face names it: `model.layers.0.self_attn.q_proj`.
    pub path: String,
    pub rank: usize,
    pub scale: f32,
}

impl LoraModule {
    pub fn a_name(&self) -> String {
        format!("{}.lora_A.weight", self.path)
    }

    pub fn b_name(&self) -> String {
        format!("{}.lora_B.weight", self.path)
    }

    /// DoRA's trained magnitude of each row.
    pub fn magnitude_name(&self) -> String {
        format!("{}.lora_magnitude_vector", self.path)
    }

    /// Norms of the rows of weight plus adapter, computed by `refresh`.
    pub fn norm_name(&self) -> String {
        format!("{}.row_norm", self.path)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Targets {
    AllLinear,
    Names(Vec<String>),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Layers {
    All,
    Last(usize),
    List(Vec<usize>),
}

/// Paths of the chosen linears, in the order of the forward pass.
pub fn target_paths(
    spec: &DecoderSpec,
    targets: &Targets,
    layers: &Layers,
) -> Result<Vec<String>, ModelError> {
    check_layers(spec, layers)?;
    let mut linears = spec.all_linears();
    if let Targets::Names(names) = targets {
        for name in names {
            if !linears.iter().any(|linear| is_adapted(spec, linear, name)) {
                return Err(ModelError::UnknownTarget { target: name.clone(), known: known_names(&linears) });
            }
        }
        if !names.iter().any(|name| matches_only_audio(&linears, name)) {
            linears.retain(|linear| !linear.path.starts_with(AUDIO));
        }
    }
    let chosen = linears.into_iter().filter(|linear| {
        let named = match targets {
            Targets::AllLinear => {
                linear.kind == LinearKind::Dense
                    && (linear.layer.is_some() || linear.path == PER_LAYER_PROJECTION)
            }
            Targets::Names(names) => names.iter().any(|name| is_adapted(spec, linear, name)),
        };
        named && layers.contains(linear.layer, spec.layers.len())
    });
    Ok(chosen.map(|linear| linear.path).collect())
}

/// What transformers has as buffers, which no optimizer changes.
const BUFFERS: [&str; 2] = [LAYER_SCALAR, "e_score_correction_bias"];

/// The target that means all routed experts.
const EXPERTS: &str = "experts";

/// Whether a target names a linear. As in PEFT, experts are no linears of their own: `experts` names them, or a path that
/// ends with their parameter. Where older files had a linear for each expert, PEFT reads names of these linears as names of
/// the experts' parameters, and of nothing else.
fn is_adapted(spec: &DecoderSpec, linear: &Linear, name: &str) -> bool {
    let ending = name.rsplit('.').next().unwrap_or(name);
    let old_names = spec.experts().find_map(|(_, experts)| experts.names.targets.names());
    let of_experts = old_names.and_then(|([gate, up], down)| match ending {
        _ if ending == gate || ending == up => Some(GATE_UP),
        _ if ending == down => Some(DOWN),
        _ => None,
    });
    match (linear.kind, of_experts) {
        (LinearKind::Experts(_), Some(parameter)) if !name.contains(EXPERTS) => {
            linear.path.ends_with(parameter)
        }
        (LinearKind::Experts(_), _) => {
            name == EXPERTS || (name.contains(EXPERTS) && path_matches(&linear.path, name))
        }
        (LinearKind::Dense | LinearKind::Unadapted, Some(_)) => linear.path == name,
        (LinearKind::Dense | LinearKind::Unadapted | LinearKind::Router, _) => {
            path_matches(&linear.path, name)
        }
    }
}

/// Parameters of all experts.
const GATE_UP: &str = ".gate_up_proj";
const DOWN: &str = ".down_proj";

/// By how much PEFT multiplies rank and alpha of a linear: an adapter on gate and up of experts has the ranks of both where
/// targets name them as the two linears that older files had.
pub fn joined_ranks(spec: &DecoderSpec, targets: &Targets, path: &str) -> usize {
    let old_names = spec.experts().find_map(|(_, experts)| experts.names.targets.names());
    let (Targets::Names(names), Some((gate_and_up, _))) = (targets, old_names) else { return 1 };
    let is_named = |old: &&str| {
        names.iter().any(|name| !name.contains(EXPERTS) && name.rsplit('.').next() == Some(*old))
    };
    let is_of_experts = path.contains(EXPERTS) && path.ends_with(GATE_UP);
    if is_of_experts && gate_and_up.iter().all(is_named) { gate_and_up.len() } else { 1 }
}

/// The target that means all norms.
const NORMS: &str = "norms";
/// The target that means the projector, which turns encoded sound into embeddings.
const PROJECTOR: &str = "projector";

/// Names of the trained tensors if the base model itself is trained. A target names modules by their endings, with their
/// biases; tensors by a pattern with `*`; all norms; or the projector. A tied head is the embedding. Buffers of transformers
/// stay as stored: the number that scales the output of a layer, and those that correct the scores of a router.
pub fn trained_tensors(
    spec: &DecoderSpec,
    targets: &Targets,
    layers: &Layers,
) -> Result<BTreeSet<String>, ModelError> {
    check_layers(spec, layers)?;
    let mut tensors = spec.tensors();
    tensors.retain(|tensor| !BUFFERS.iter().any(|buffer| tensor.name.ends_with(buffer)));
    let names = match targets {
        Targets::AllLinear => None,
        Targets::Names(names) => Some(names),
    };
    let audio = spec.audio.iter().filter(|_| names.is_some());
    tensors.extend(audio.flat_map(|audio| audio.projector_tensors()));
    for name in names.into_iter().flatten() {
        if !tensors.iter().any(|tensor| is_matched(spec, &tensor.name, name)) {
            let projector = if spec.audio.is_some() { "projector, " } else { "" };
            let known = format!(
                "{}, embed_tokens, {NORMS}, {}or a pattern with `*`",
                known_names(&spec.linears()),
                projector
            );
            return Err(ModelError::UnknownTarget { target: name.clone(), known });
        }
    }
    let chosen = tensors.into_iter().filter(|tensor| {
        let is_named =
            names.is_none_or(|names| names.iter().any(|name| is_matched(spec, &tensor.name, name)));
        is_named && layers.contains(tensor.layer, spec.layers.len())
    });
    Ok(chosen.map(|tensor| tensor.name).collect())
}

/// Whether a target matches a tensor.
fn is_matched(spec: &DecoderSpec, tensor: &str, target: &str) -> bool {
    let module = tensor.rsplit_once('.').map_or(tensor, |(module, _)| module);
    if target.contains('*') {
        return matches_pattern(tensor, target);
    }
    let is_norm = target == NORMS && (module.ends_with("norm") || module.ends_with("layernorm"));
    let is_head = path_matches(HEAD, target) && tensor == spec.head_tensor();
    let is_projector = target == PROJECTOR && is_of_projector(tensor);
    is_norm || is_head || is_projector || path_matches(module, target) || path_matches(tensor, target)
}

/// Whether a text matches a pattern in which each `*` stands for any text.
fn matches_pattern(text: &str, pattern: &str) -> bool {
    let (front, rest) = pattern.split_once('*').expect("a pattern has a `*`");
    let (middle, back) = rest.rsplit_once('*').unwrap_or(("", rest));
    let Some(mut text) = text.strip_prefix(front).and_then(|text| text.strip_suffix(back)) else {
        return false;
    };
    // The earliest match of each part leaves the most text for the next.
    for part in middle.split('*').filter(|part| !part.is_empty()) {
        let Some((_, after)) = text.split_once(part) else { return false };
        text = after;
    }
    true
}

impl Layers {
    /// Whether a tensor of this layer is chosen. A tensor outside the layers is chosen only with all layers.
    fn contains(&self, layer: Option<usize>, count: usize) -> bool {
        match (self, layer) {
            (Layers::All, _) => true,
            (Layers::Last(last), Some(layer)) => layer + last >= count,
            (Layers::List(list), Some(layer)) => list.contains(&layer),
            (Layers::Last(_) | Layers::List(_), None) => false,
        }
    }
}

fn check_layers(spec: &DecoderSpec, layers: &Layers) -> Result<(), ModelError> {
    match layers {
        Layers::List(list) => match list.iter().find(|layer| **layer >= spec.layers.len()) {
            Some(&layer) => Err(ModelError::UnknownLayer { layer, last: spec.layers.len() - 1 }),
            None => Ok(()),
        },
        Layers::Last(count) if *count > spec.layers.len() => {
            Err(ModelError::TooManyLayers { count: *count, layers: spec.layers.len() })
        }
        Layers::Last(_) | Layers::All => Ok(()),
    }
}

/// Whether a name matches linears of the audio encoder and no others. If one name of a list does, all names match both
/// encoder and decoder, as in PEFT. Otherwise they match the decoder only, although names such as `o_proj` occur in both.
fn matches_only_audio(linears: &[Linear], name: &str) -> bool {
    let mut matched = linears.iter().filter(|linear| path_matches(&linear.path, name));
    matched.all(|linear| linear.path.starts_with(AUDIO))
}

fn path_matches(path: &str, name: &str) -> bool {
    path == name || path.strip_suffix(name).is_some_and(|front| front.ends_with('.'))
}

fn known_names(linears: &[Linear]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for linear in linears {
        let name = linear.path.rsplit('.').next().unwrap_or(&linear.path);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::tests::{tiny, with_tied_head};

    fn paths(targets: Targets, layers: Layers) -> Vec<String> {
        target_paths(&tiny(), &targets, &layers).unwrap()
    }

    #[test]
    fn all_linear_leaves_out_the_head() {
        let all = paths(Targets::AllLinear, Layers::All);
        assert_eq!(all.len(), 2 * 7);
        assert!(!all.contains(&"lm_head".to_string()));
    }

    #[test]
    fn names_match_whole_segments() {
        let q = paths(Targets::Names(vec!["q_proj".into()]), Layers::List(vec![1]));
        assert_eq!(q, ["model.layers.1.self_attn.q_proj"]);
        let last = paths(Targets::Names(vec!["mlp.down_proj".into()]), Layers::Last(1));
        assert_eq!(last, ["model.layers.1.mlp.down_proj"]);
        let head = paths(Targets::Names(vec!["lm_head".into()]), Layers::All);
        assert_eq!(head, ["lm_head"]);
    }

    #[test]
    fn trained_tensors_are_those_of_the_layers() {
        let all = trained_tensors(&tiny(), &Targets::AllLinear, &Layers::All).unwrap();
        assert_eq!(all, tiny().tensors().into_iter().map(|tensor| tensor.name).collect());
        let last = trained_tensors(&tiny(), &Targets::AllLinear, &Layers::Last(1)).unwrap();
        assert_eq!(last.len(), 7 + 2);
        assert!(last.iter().all(|name| name.starts_with("model.layers.1.")), "{last:?}");
        let error = trained_tensors(&tiny(), &Targets::AllLinear, &Layers::Last(3)).unwrap_err();
        assert_eq!(error, ModelError::TooManyLayers { count: 3, layers: 2 });
    }

    #[test]
    fn numbers_that_scale_layers_stay_as_stored() {
        let spec = tiny().with_layers(|_, layer| layer.has_scalar = true);
        let all = trained_tensors(&spec, &Targets::AllLinear, &Layers::All).unwrap();
        assert_eq!(all, trained_tensors(&tiny(), &Targets::AllLinear, &Layers::All).unwrap());
        let named = Targets::Names(vec![LAYER_SCALAR.into()]);
        let error = trained_tensors(&spec, &named, &Layers::All).unwrap_err();
        assert!(matches!(error, ModelError::UnknownTarget { .. }), "{error}");
    }

    #[test]
    fn named_linears_are_trained_with_their_biases_and_a_tied_head_is_the_embedding() {
        let spec = with_tied_head(tiny()).with_attention(|_, attention| attention.qkv_bias = true);
        let names = |names: &[&str], layers| {
            let targets = Targets::Names(names.iter().map(|name| name.to_string()).collect());
            trained_tensors(&spec, &targets, &layers).unwrap().into_iter().collect::<Vec<_>>()
        };
        let path = "model.layers.0.self_attn.q_proj";
        let q = names(&["q_proj"], Layers::List(vec![0]));
        assert_eq!(q, [format!("{path}.bias"), format!("{path}.weight")]);
        assert_eq!(names(&["lm_head"], Layers::All), ["model.embed_tokens.weight"]);
        assert_eq!(names(&["lm_head"], Layers::Last(1)), [""; 0]);
    }

    #[test]
    fn unknown_targets_are_named() {
        let error = target_paths(&tiny(), &Targets::Names(vec!["proj".into()]), &Layers::All).unwrap_err();
        let known = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head";
        assert_eq!(error, ModelError::UnknownTarget { target: "proj".into(), known: known.into() });
        let error = target_paths(&tiny(), &Targets::AllLinear, &Layers::List(vec![2])).unwrap_err();
        assert_eq!(error, ModelError::UnknownLayer { layer: 2, last: 1 });
        let error = target_paths(&tiny(), &Targets::AllLinear, &Layers::Last(3)).unwrap_err();
        assert_eq!(error, ModelError::TooManyLayers { count: 3, layers: 2 });
    }
}
