//! Experts in checkpoints: which tensors of a folder hold the matrices of all experts of a layer, in each published layout;
//! and other tensors that transformers 5 renames or joins.
//!
//! Callers see one matrix of gate and up and one of down for each layer, with the rows of all experts one after the other, and
//! names as in transformers 5. Files have it fused in three dimensions, perhaps transposed with gate and up in turns
//! (gpt-oss), or as a tensor for each expert and projection (most published models), which may be quantized.
//! Left out: GGUF files (`gguf/`), whose tables name the tensors of experts.

use crate::folder::ModelFolder;
use crate::tensor_ref::TensorRef;
use crate::weight::Weight;
use crate::weight::joined::{JoinedWeight, Source, Turned};
use std::collections::{BTreeMap, BTreeSet};

/// The experts of a folder.
#[derive(Clone, Debug, Default)]
pub struct ExpertWeights {
    weights: BTreeMap<String, JoinedWeight>,
    /// Names of tensors in the files that belong to `weights`, or that callers see under another name.
    parts: BTreeSet<String>,
    /// Tensors under other names than in the files.
    renamed: BTreeMap<String, String>,
    /// Why the tensors of experts form no matrix, by its name.
    problems: BTreeMap<String, String>,
}

/// The endings of a tensor for each expert: gate, up and down.
const OF_EXPERTS: [[&str; 3]; 2] =
    [["gate_proj.weight", "up_proj.weight", "down_proj.weight"], ["w1.weight", "w3.weight", "w2.weight"]];

/// Fused tensors: the ending in the file, and the ending here.
const FUSED: [(&str, &str); 6] = [
    (".experts.gate_up_proj", ".experts.gate_up_proj.weight"),
    (".experts.down_proj", ".experts.down_proj.weight"),
    (".experts.gate_up_proj_bias", ".experts.gate_up_proj.bias"),
    (".experts.down_proj_bias", ".experts.down_proj.bias"),
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj.weight"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj.weight"),
];

/// Parts of names that transformers 5 changed: the ending in the file, and the ending here.
const RENAMED: [(&str, &str); 5] = [
    (".attention_layer_norm.weight", ".input_layernorm.weight"),
    (".feedforward_layer_norm.weight", ".post_attention_layernorm.weight"),
    (".block_sparse_moe.gate.weight", ".mlp.gate.weight"),
    (".block_sparse_moe.e_score_correction_bias", ".mlp.e_score_correction_bias"),
    (".block_sparse_moe.router.layer.weight", ".block_sparse_moe.router.weight"),
];

/// Parts of a convolution in their order: the endings in the file, and the ending here.
const CONVOLVED: ([&str; 3], &str) = (
    [".linear_attn.q_conv1d.weight", ".linear_attn.k_conv1d.weight", ".linear_attn.v_conv1d.weight"],
    ".linear_attn.conv1d.weight",
);

/// Models whose fused tensors have a column for each row of the matrix, and whether those of gate and up take turns.
const TURNED: [(&str, bool); 2] = [("gpt_oss", true), ("llama4_text", false)];

/// The tensors of each expert of a module, by their endings.
type OfExperts = BTreeMap<usize, BTreeMap<&'static str, Source>>;

impl ExpertWeights {
    /// `quantized` has the weights that are no plain tensors, by their names.
    pub fn find<'a>(
        folder: &'a ModelFolder,
        quantized_names: impl Iterator<Item = &'a str>,
        quantized: impl Fn(&str) -> Option<Weight>,
    ) -> ExpertWeights {
        let mut found = ExpertWeights::default();
        let config = folder.config();
        let text = config.get("text_config").unwrap_or(config);
        let model_type = text.get("model_type").and_then(|kind| kind.as_str()).unwrap_or_default();
        let turned = TURNED.iter().find(|(name, _)| *name == model_type).map(|(_, turns)| *turns);
        let mut single: BTreeMap<String, OfExperts> = BTreeMap::new();
        for name in folder.tensor_names().chain(quantized_names) {
            let weight = || quantized(name).or_else(|| folder.tensor(name).map(Weight::Plain));
            if let Some((module, expert, ending)) = split_expert(name)
                && let Some(weight) = weight()
            {
                let source = Source { name: name.to_string(), weight };
                let of_module = single.entry(module.to_string()).or_default();
                of_module.entry(expert).or_default().insert(ending, source);
                continue;
            }
            if let Some((front, to)) = renamed(name, &RENAMED) {
                found.renamed.insert(format!("{front}{to}"), name.to_string());
                found.parts.insert(name.to_string());
            }
            if let Some(front) = name.strip_suffix(CONVOLVED.0[0]) {
                found.add_convolution(folder, front);
            }
            if let Some((front, to)) = renamed(name, &FUSED)
                && let Some(weight) = folder.tensor(name).and_then(|tensor| fused(name, tensor, to, turned))
            {
                found.weights.insert(format!("{front}{to}"), weight);
                found.parts.insert(name.to_string());
            }
        }
        for (module, experts) in single {
            found.add_single(&module, &experts);
        }
        found
    }

    /// Joins the parts of a convolution.
    fn add_convolution(&mut self, folder: &ModelFolder, front: &str) {
        let names = CONVOLVED.0.map(|ending| format!("{front}{ending}"));
        let source = |name: &String| {
            let weight = Weight::Plain(folder.tensor(name)?);
            Some(Source { name: name.clone(), weight })
        };
        let parts = names.iter().map(source).collect::<Option<Vec<Source>>>();
        if let Some(weight) = parts.and_then(JoinedWeight::of_parts) {
            self.weights.insert(format!("{front}{}", CONVOLVED.1), weight);
            self.parts.extend(names);
        }
    }

    /// Joins the tensors of each expert of a module.
    fn add_single(&mut self, module: &str, experts: &OfExperts) {
        let count = experts.keys().next_back().map_or(0, |last| last + 1);
        let of_any = |endings: &&[&str; 3]| experts.values().any(|tensors| tensors.contains_key(endings[0]));
        let Some([gate, up, down]) = OF_EXPERTS.iter().find(of_any) else { return };
        let target = module.replace(".block_sparse_moe.", ".mlp.");
        for (name, endings) in [("gate_up_proj", &[*gate, *up][..]), ("down_proj", &[*down][..])] {
            let name = format!("{target}.{name}.weight");
            let (mut sources, mut problem) = (Vec::new(), None);
            for expert in 0..count {
                for ending in endings {
                    let in_file = format!("{module}.{expert}.{ending}");
                    match experts.get(&expert).and_then(|tensors| tensors.get(ending)) {
                        Some(source) => sources.push(source.clone()),
                        None => problem = problem.or(Some(format!("`{in_file}` is missing"))),
                    }
                    self.parts.insert(in_file);
                }
            }
            let twice = || {
                let is_there = self.weights.contains_key(&name);
                is_there.then(|| {
                    format!("`{name}` is there twice: as one tensor and as a tensor for each expert")
                })
            };
            let other = || {
                let Source { name, weight } = JoinedWeight::other_shape(&sources)?;
                Some(format!("`{name}` is {:?}, and other experts have another shape", weight.shape()))
            };
            let problem = problem.or_else(twice).or_else(other);
            match problem {
                None => drop(self.weights.insert(name, JoinedWeight::of_matrices(sources, count))),
                Some(problem) => {
                    self.weights.remove(&name);
                    self.problems.insert(name, problem);
                }
            }
        }
    }

    /// The matrix of all experts with this name, or a tensor that has another name in the file.
    pub fn weight(&self, folder: &ModelFolder, name: &str) -> Option<Weight> {
        let renamed = || self.renamed.get(name).and_then(|name| folder.tensor(name)).map(Weight::Plain);
        self.weights.get(name).map(|weight| Weight::Joined(Box::new(weight.clone()))).or_else(renamed)
    }

    /// Whether a tensor of the files is seen under another name.
    pub fn is_part(&self, in_file: &str) -> bool {
        self.parts.contains(in_file)
    }

    /// The names under which callers see experts and renamed tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.weights.keys().chain(self.renamed.keys()).map(String::as_str)
    }

    /// Why the tensors in the files do not form a matrix of experts.
    pub fn problem(&self, name: &str) -> Option<&str> {
        self.problems.get(name).map(String::as_str)
    }

    /// The matrix of all experts with this name.
    pub fn joined(&self, name: &str) -> Option<&JoinedWeight> {
        self.weights.get(name)
    }

    /// The name in the files of a tensor that callers see under another one.
    pub fn file_name(&self, name: &str) -> Option<&str> {
        self.renamed.get(name).map(String::as_str)
    }
}

/// Splits `model.layers.0.mlp.experts.3.up_proj.weight` into its module, its expert and its ending.
fn split_expert(name: &str) -> Option<(&str, usize, &'static str)> {
    let ending = OF_EXPERTS.iter().flatten().find(|ending| name.ends_with(**ending))?;
    let front = name.strip_suffix(ending)?.strip_suffix('.')?;
    let (module, expert) = front.rsplit_once('.')?;
    let is_number =
        expert.bytes().all(|digit| digit.is_ascii_digit()) && (expert == "0" || !expert.starts_with('0'));
    let expert = if is_number { expert.parse().ok()? } else { return None };
    // The limit keeps a hostile name from making long lists.
    (module.ends_with(".experts") && expert < 1 << 16).then_some((module, expert, ending))
}

fn renamed<'a>(name: &'a str, table: &[(&str, &'static str)]) -> Option<(&'a str, &'static str)> {
    table.iter().find_map(|(from, to)| Some((name.strip_suffix(from)?, *to)))
}

/// A fused tensor as the matrix, or the vector of biases, that it holds. `turned` tells whether gate and up take turns in the
/// columns of a tensor with a column for each row of the matrix.
fn fused(name: &str, tensor: TensorRef, to: &str, turned: Option<bool>) -> Option<JoinedWeight> {
    let takes_turns = turned == Some(true) && to.contains("gate_up_proj");
    let (experts, shape, turn) = match (tensor.shape(), turned) {
        (&[experts, rows], _) => (
            experts,
            vec![experts.checked_mul(rows)?],
            takes_turns.then_some(Turned { rows, columns: 1, takes_turns }),
        ),
        (&[experts, rows, columns], None) => (experts, vec![experts.checked_mul(rows)?, columns], None),
        (&[experts, columns, rows], Some(_)) => {
            let turned = Turned { rows, columns, takes_turns };
            (experts, vec![experts.checked_mul(rows)?, columns], Some(turned))
        }
        _ => return None,
    };
    let source = Source { name: name.to_string(), weight: Weight::Plain(tensor) };
    Some(JoinedWeight::of_one(source, experts, shape, turn))
}

#[cfg(test)]
#[path = "experts_tests.rs"]
mod tests;
