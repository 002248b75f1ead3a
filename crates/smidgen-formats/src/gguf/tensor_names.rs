//! Maps tensors of a GGUF file to tensors of a Hugging Face checkpoint, with the changes that must be undone.
//! Converters rename all tensors, reorder the rows of queries and keys of `llama`, and add the 1 of Gemma's
//! norms to the weights. A tensor that does not belong to the architecture is an error, because a model
//! without it would silently compute something else.
//! Left out: whether the set is complete, which the compiled model checks.

use std::collections::BTreeMap;

use super::GgufFile;
use super::architecture::Architecture;
use super::model_problem::GgufModelProblem;
use smidgen_ir::grouped_digits::Grouped;

/// Where a Hugging Face tensor is in a GGUF file, and how it differs there.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// Position in the file's `tensors()`.
    pub position: usize,
    pub rows: RowOrder,
    /// The converter added this to every element: 1 for Gemma's norms.
    pub added: f32,
}

/// The order of a tensor's rows in the file. In a bias, every element is a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    AsStored,
    /// In each head, row `j` of the first half is followed by row `j` of the second half, because llama.cpp
    /// rotates adjacent channels, while Hugging Face rotates channel `j` with channel `j + D/2`.
    PairsOfHeads {
        head_dim: usize,
    },
}

impl RowOrder {
    /// The row in the file of a row of the checkpoint.
    pub fn file_row(self, row: usize) -> usize {
        match self {
            RowOrder::AsStored => row,
            RowOrder::PairsOfHeads { head_dim } => {
                let (head, in_head) = (row / head_dim, row % head_dim);
                let (half, channel) = (in_head / (head_dim / 2), in_head % (head_dim / 2));
                head * head_dim + 2 * channel + half
            }
        }
    }

    /// The row in the checkpoint of a row of the file.
    pub fn checkpoint_row(self, row: usize) -> usize {
        match self {
            RowOrder::AsStored => row,
            RowOrder::PairsOfHeads { head_dim } => {
                let (head, in_head) = (row / head_dim, row % head_dim);
                head * head_dim + (in_head % 2) * (head_dim / 2) + in_head / 2
            }
        }
    }
}

pub const EMBEDDING: &str = "token_embd.weight";
pub const HEAD: &str = "output.weight";
/// Divisors of Llama 3's rotary frequencies. They become keys of the config.
pub const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// Factors of Phi 3's rotary frequencies for long and for short sequences. They become keys of the config.
pub const ROPE_FACTORS: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];

/// Pairs of names in the file (without `blk.N.`) and in the checkpoint (without `model.layers.N.`).
type Names = &'static [(&'static str, &'static str)];

const ATTENTION: Names = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
];
const SEPARATE: Names = &[
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
];
const FUSED: Names =
    &[("attn_qkv.weight", "self_attn.qkv_proj.weight"), ("ffn_up.weight", "mlp.gate_up_proj.weight")];
const TWO_NORMS: Names = &[("ffn_norm.weight", "post_attention_layernorm.weight")];
const FOUR_NORMS: Names = &[
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
];
const HEAD_NORMS: Names =
    &[("attn_q_norm.weight", "self_attn.q_norm.weight"), ("attn_k_norm.weight", "self_attn.k_norm.weight")];
const QKV_BIASES: Names = &[
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
];
const OTHER_BIASES: Names = &[
    ("attn_output.bias", "self_attn.o_proj.bias"),
    ("ffn_gate.bias", "mlp.gate_proj.bias"),
    ("ffn_up.bias", "mlp.up_proj.bias"),
    ("ffn_down.bias", "mlp.down_proj.bias"),
];

fn names_of(architecture: Architecture) -> &'static [Names] {
    match architecture {
        Architecture::Llama => &[ATTENTION, SEPARATE, TWO_NORMS, QKV_BIASES, OTHER_BIASES],
        Architecture::Qwen2 => &[ATTENTION, SEPARATE, TWO_NORMS, QKV_BIASES],
        Architecture::Qwen3 => &[ATTENTION, SEPARATE, TWO_NORMS, HEAD_NORMS],
        Architecture::Phi3 => &[ATTENTION, FUSED, TWO_NORMS],
        Architecture::Gemma2 => &[ATTENTION, SEPARATE, FOUR_NORMS],
        Architecture::Gemma3 => &[ATTENTION, SEPARATE, FOUR_NORMS, HEAD_NORMS],
    }
}

/// The sources of all tensors by their Hugging Face names, without tensors that become keys of the config.
pub(super) fn map_tensors(
    file: &GgufFile,
    architecture: Architecture,
    layers: usize,
    head_dim: usize,
) -> Result<BTreeMap<String, TensorSource>, GgufModelProblem> {
    let mut sources = BTreeMap::new();
    let mut unknown = Vec::new();
    for (position, tensor) in file.tensors().iter().enumerate() {
        let name = tensor.name.as_str();
        if becomes_config(architecture, name) {
            continue;
        }
        match checkpoint_name(architecture, layers, name) {
            Some(checkpoint) => {
                let rows = row_order(architecture, name, head_dim);
                let added = added(architecture, name);
                sources.insert(checkpoint, TensorSource { position, rows, added });
            }
            None => unknown.push(name),
        }
    }
    if unknown.is_empty() {
        return Ok(sources);
    }
    let count = Grouped(unknown.len() as u64).to_string();
    let first = unknown.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    Err(GgufModelProblem::UnknownTensors { count, architecture: architecture.name(), layers, first })
}

fn becomes_config(architecture: Architecture, name: &str) -> bool {
    match architecture {
        Architecture::Llama => name == ROPE_DIVISORS,
        Architecture::Phi3 => ROPE_FACTORS.contains(&name),
        _ => false,
    }
}

fn checkpoint_name(architecture: Architecture, layers: usize, name: &str) -> Option<String> {
    match name {
        EMBEDDING => Some("model.embed_tokens.weight".into()),
        "output_norm.weight" => Some("model.norm.weight".into()),
        HEAD => Some("lm_head.weight".into()),
        _ => {
            let (layer, in_layer) = name.strip_prefix("blk.")?.split_once('.')?;
            let layer = layer.parse::<usize>().ok().filter(|layer| *layer < layers)?;
            let mut names = names_of(architecture).iter().copied().flatten();
            let (_, checkpoint) = names.find(|(in_file, _)| *in_file == in_layer)?;
            // `blk.007.` must not be accepted as `blk.7.`.
            (name == format!("blk.{layer}.{in_layer}")).then(|| format!("model.layers.{layer}.{checkpoint}"))
        }
    }
}

/// The name in a file of a checkpoint's tensor; `None` if the architecture has no such tensor.
pub fn file_name(architecture: Architecture, checkpoint: &str) -> Option<String> {
    match checkpoint {
        "model.embed_tokens.weight" => Some(EMBEDDING.into()),
        "model.norm.weight" => Some("output_norm.weight".into()),
        "lm_head.weight" => Some(HEAD.into()),
        _ => {
            let (layer, in_layer) = checkpoint.strip_prefix("model.layers.")?.split_once('.')?;
            let mut names = names_of(architecture).iter().copied().flatten();
            let (in_file, _) = names.find(|(_, in_checkpoint)| *in_checkpoint == in_layer)?;
            Some(format!("blk.{layer}.{in_file}"))
        }
    }
}

/// What converters add to every element of the tensor with this name in the file.
pub fn added(architecture: Architecture, name: &str) -> f32 {
    let of_gemma = matches!(architecture, Architecture::Gemma2 | Architecture::Gemma3);
    if of_gemma && name.ends_with("norm.weight") { 1.0 } else { 0.0 }
}

/// The order of the rows of the tensor with this name in the file.
pub fn row_order(architecture: Architecture, name: &str, head_dim: usize) -> RowOrder {
    let is_rotated = [".attn_q.", ".attn_k."].iter().any(|part| name.contains(part));
    match architecture {
        Architecture::Llama if is_rotated => RowOrder::PairsOfHeads { head_dim },
        _ => RowOrder::AsStored,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The converter transposes [2, D/2] to [D/2, 2] within each head. This is the result for two heads of 6.
    #[test]
    fn pairs_of_heads_undo_the_reordering_of_the_converter() {
        let order = RowOrder::PairsOfHeads { head_dim: 6 };
        let converted = [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11];
        for (file_row, &checkpoint_row) in converted.iter().enumerate() {
            assert_eq!(order.checkpoint_row(file_row), checkpoint_row);
            assert_eq!(order.file_row(checkpoint_row), file_row);
        }
        assert_eq!(RowOrder::AsStored.file_row(5), 5);
    }

    #[test]
    fn names_are_mapped_by_architecture() {
        let check = |architecture, name: &str, expected: Option<&str>| {
            assert_eq!(checkpoint_name(architecture, 12, name).as_deref(), expected, "{name}");
            if let Some(checkpoint) = expected {
                assert_eq!(file_name(architecture, checkpoint).as_deref(), Some(name), "{checkpoint}");
            }
        };
        use Architecture::*;
        check(Llama, "blk.11.attn_q.weight", Some("model.layers.11.self_attn.q_proj.weight"));
        check(Llama, "blk.12.attn_q.weight", None);
        check(Llama, "blk.07.attn_q.weight", None);
        check(Llama, "blk.0.attn_q_norm.weight", None);
        check(Qwen3, "blk.0.attn_q_norm.weight", Some("model.layers.0.self_attn.q_norm.weight"));
        check(Qwen2, "blk.0.attn_k.bias", Some("model.layers.0.self_attn.k_proj.bias"));
        check(Qwen3, "blk.0.attn_k.bias", None);
        check(Phi3, "blk.3.ffn_up.weight", Some("model.layers.3.mlp.gate_up_proj.weight"));
        check(Phi3, "blk.3.ffn_gate.weight", None);
        check(Llama, "blk.3.ffn_norm.weight", Some("model.layers.3.post_attention_layernorm.weight"));
        check(Gemma2, "blk.3.ffn_norm.weight", Some("model.layers.3.pre_feedforward_layernorm.weight"));
        check(Gemma3, "blk.3.post_ffw_norm.weight", Some("model.layers.3.post_feedforward_layernorm.weight"));
        check(Gemma3, "output.weight", Some("lm_head.weight"));
        assert_eq!(file_name(Phi3, "model.layers.0.self_attn.q_proj.weight"), None);
        assert_eq!(file_name(Qwen3, "model.layers.0.self_attn.q_proj.bias"), None);
    }

    #[test]
    fn only_queries_and_keys_of_llama_are_reordered() {
        let paired = RowOrder::PairsOfHeads { head_dim: 64 };
        assert_eq!(row_order(Architecture::Llama, "blk.0.attn_k.weight", 64), paired);
        assert_eq!(row_order(Architecture::Llama, "blk.0.attn_q.bias", 64), paired);
        assert_eq!(row_order(Architecture::Llama, "blk.0.attn_v.weight", 64), RowOrder::AsStored);
        assert_eq!(row_order(Architecture::Qwen2, "blk.0.attn_q.weight", 64), RowOrder::AsStored);
    }
}
