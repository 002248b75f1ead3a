//! Maps tensors of a GGUF file to tensors of a Hugging Face checkpoint, with the changes that must be undone.
//! Converters rename all tensors, reorder the rows of queries and keys of some architectures, and add 1 to the weights of
//! norms that multiply by 1 + weight (Gemma, Muse Glimmer). A tensor that does not belong to the architecture is an error, because a model
//! without it would silently compute something else.
//! Left out: whether the set is complete, which the compiled model checks.

use std::collections::BTreeMap;

use super::GgufFile;
use super::architecture::{Architecture, QK_NORMS, Special};
use super::model_problem::GgufModelProblem;
use smidgen_ir::grouped_digits::Grouped;

/// Where a Hugging Face tensor is in a GGUF file, and how it differs there.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSource {
    /// Position in the file's `tensors()`.
    pub position: usize,
    pub rows: RowOrder,
    /// The converter added this to every element: 1 for the norms of Gemma 1 to 3 and in the layers of Muse Glimmer.
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

/// The sources of all tensors by their Hugging Face names, without tensors that become keys of the config.
pub(super) fn map_tensors(
    file: &GgufFile,
    architecture: &'static Architecture,
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

/// Whether the tensor with this name in the file is no tensor of a checkpoint, but becomes keys of the config.
pub fn becomes_config(architecture: &Architecture, name: &str) -> bool {
    let is_factor = architecture.special == Special::QueryFactor
        && QK_NORMS.iter().any(|norm| name.strip_suffix(norm).is_some_and(|layer| layer.starts_with("blk.")));
    is_factor || architecture.rope_tensors.contains(&name)
}

/// The name in a checkpoint of a file's tensor; `None` if the architecture has no such tensor.
fn checkpoint_name(architecture: &Architecture, layers: usize, name: &str) -> Option<String> {
    if let Some((_, checkpoint)) = architecture.outer_tensors().find(|(in_file, _)| *in_file == name) {
        return Some(checkpoint.to_string());
    }
    let (layer, in_layer) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = layer.parse::<usize>().ok().filter(|layer| *layer < layers)?;
    let (_, checkpoint) = architecture.layer_tensors().find(|(in_file, _)| *in_file == in_layer)?;
    // `blk.007.` must not be accepted as `blk.7.`.
    (name == format!("blk.{layer}.{in_layer}")).then(|| format!("model.layers.{layer}.{checkpoint}"))
}

/// The name in a file of a checkpoint's tensor; `None` if the architecture has no such tensor.
pub fn file_name(architecture: &Architecture, checkpoint: &str) -> Option<String> {
    if let Some((in_file, _)) = architecture.outer_tensors().find(|(_, outer)| *outer == checkpoint) {
        return Some(in_file.to_string());
    }
    let (layer, in_layer) = checkpoint.strip_prefix("model.layers.")?.split_once('.')?;
    let (in_file, _) = architecture.layer_tensors().find(|(_, in_checkpoint)| *in_checkpoint == in_layer)?;
    Some(format!("blk.{layer}.{in_file}"))
}

/// What converters add to every element of the tensor with this name in the file.
pub fn added(architecture: &Architecture, name: &str) -> f32 {
    if architecture.shifted.iter().any(|end| name.ends_with(end)) { 1.0 } else { 0.0 }
}

/// The order of the rows of the tensor with this name in the file.
pub fn row_order(architecture: &Architecture, name: &str, head_dim: usize) -> RowOrder {
    let is_rotated = [".attn_q.", ".attn_k."].iter().any(|part| name.contains(part));
    if architecture.has_paired_rows && is_rotated {
        RowOrder::PairsOfHeads { head_dim }
    } else {
        RowOrder::AsStored
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

    fn of(name: &str) -> &'static Architecture {
        Architecture::named(name).unwrap()
    }

    #[test]
    fn names_are_mapped_by_architecture() {
        let check = |architecture: &str, name: &str, expected: Option<&str>| {
            assert_eq!(checkpoint_name(of(architecture), 12, name).as_deref(), expected, "{name}");
            if let Some(checkpoint) = expected {
                assert_eq!(file_name(of(architecture), checkpoint).as_deref(), Some(name), "{checkpoint}");
            }
        };
        let layer = |layer: usize, path: &str| Some(format!("model.layers.{layer}.{path}"));
        check("llama", "blk.11.attn_q.weight", layer(11, "self_attn.q_proj.weight").as_deref());
        check("llama", "blk.12.attn_q.weight", None);
        check("llama", "blk.07.attn_q.weight", None);
        check("llama", "blk.0.attn_q_norm.weight", None);
        check("qwen3", "blk.0.attn_q_norm.weight", layer(0, "self_attn.q_norm.weight").as_deref());
        check("qwen2", "blk.0.attn_k.bias", layer(0, "self_attn.k_proj.bias").as_deref());
        check("qwen3", "blk.0.attn_k.bias", None);
        check("phi3", "blk.3.ffn_up.weight", layer(3, "mlp.gate_up_proj.weight").as_deref());
        check("phi3", "blk.3.ffn_gate.weight", None);
        check("llama", "blk.3.ffn_norm.weight", layer(3, "post_attention_layernorm.weight").as_deref());
        check("gemma2", "blk.3.ffn_norm.weight", layer(3, "pre_feedforward_layernorm.weight").as_deref());
        check(
            "gemma3",
            "blk.3.post_ffw_norm.weight",
            layer(3, "post_feedforward_layernorm.weight").as_deref(),
        );
        check("gemma3", "output.weight", Some("lm_head.weight"));
        check("gemma3", "per_layer_token_embd.weight", None);
        check("gemma4", "per_layer_token_embd.weight", Some("model.embed_tokens_per_layer.weight"));
        check("gemma4", "blk.2.layer_output_scale.weight", layer(2, "layer_scalar").as_deref());
        check(
            "glm4",
            "blk.2.post_attention_norm.weight",
            layer(2, "post_self_attn_layernorm.weight").as_deref(),
        );
        check("glm4", "blk.2.ffn_norm.weight", layer(2, "post_attention_layernorm.weight").as_deref());
        check(
            "seed_oss",
            "blk.2.post_attention_norm.weight",
            layer(2, "post_attention_layernorm.weight").as_deref(),
        );
        check("seed_oss", "blk.2.ffn_norm.weight", None);
        check("olmo2", "blk.2.attn_norm.weight", None);
        check("lfm2", "blk.2.shortconv.conv.weight", layer(2, "conv.conv.weight").as_deref());
        check("lfm2", "token_embd_norm.weight", Some("model.embedding_norm.weight"));
        check("lfm2", "output_norm.weight", None);
        check("muse-glimmer", "blk.2.attn_gate.weight", layer(2, "self_attn.gate_proj.weight").as_deref());
        check("muse-glimmer", "blk.2.attn_q_norm.weight", None);
        assert_eq!(file_name(of("phi3"), "model.layers.0.self_attn.q_proj.weight"), None);
        assert_eq!(file_name(of("qwen3"), "model.layers.0.self_attn.q_proj.bias"), None);
    }

    #[test]
    fn queries_and_keys_are_reordered_and_norms_shifted_by_architecture() {
        let paired = RowOrder::PairsOfHeads { head_dim: 64 };
        for name in ["llama", "smollm3", "granite", "mistral3", "muse-glimmer"] {
            assert_eq!(row_order(of(name), "blk.0.attn_k.weight", 64), paired);
            assert_eq!(row_order(of(name), "blk.0.attn_q.bias", 64), paired);
            assert_eq!(row_order(of(name), "blk.0.attn_v.weight", 64), RowOrder::AsStored);
        }
        for name in ["qwen2", "gemma", "gemma4", "olmo2", "glm4", "cohere2", "seed_oss"] {
            assert_eq!(row_order(of(name), "blk.0.attn_q.weight", 64), RowOrder::AsStored);
        }
        let shifts = |name, tensor| added(of(name), tensor) == 1.0;
        assert!(shifts("gemma", "output_norm.weight") && shifts("gemma3", "blk.0.attn_q_norm.weight"));
        assert!(!shifts("gemma4", "blk.0.attn_norm.weight") && !shifts("llama", "output_norm.weight"));
        assert!(shifts("muse-glimmer", "blk.0.post_attention_norm.weight"));
        assert!(!shifts("muse-glimmer", "output_norm.weight"));
    }
}
