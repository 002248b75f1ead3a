//! Assigns tensors to files, and renders the index.
//! Names and index are those of the transformers library: one `model.safetensors`, or numbered shards in order.
//! Left out: spreading tensors evenly; a shard is filled before the next one begins.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::{Value, json};

use smidgen_formats::peft::python_json::render_python_json;

/// Maximum bytes of the tensors of a file; a larger model has several files.
pub const SHARD_BYTES: u64 = 5_000_000_000;

pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Splits tensors of these sizes into ranges of at most `max_bytes`; a larger tensor is alone.
pub fn split(sizes: &[u64], max_bytes: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut begin, mut filled) = (0, 0u64);
    for (position, &bytes) in sizes.iter().enumerate() {
        if position > begin && filled.saturating_add(bytes) > max_bytes {
            shards.push(begin..position);
            (begin, filled) = (position, 0);
        }
        filled += bytes;
    }
    shards.push(begin..sizes.len());
    shards
}

pub fn shard_name(shard: usize, shards: usize) -> String {
    match shards {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{shards:05}.safetensors", shard + 1),
    }
}

/// The text of the index for tensors with names and sizes, formatted as by transformers.
pub fn render_index(tensors: &[(&str, u64)], shards: &[Range<usize>]) -> String {
    let total_bytes: u64 = tensors.iter().map(|(_, bytes)| bytes).sum();
    let weight_map: BTreeMap<&str, String> = (shards.iter().enumerate())
        .flat_map(|(shard, range)| {
            let name = shard_name(shard, shards.len());
            tensors[range.clone()].iter().map(move |(tensor, _)| (*tensor, name.clone()))
        })
        .collect();
    let index: BTreeMap<&str, Value> =
        BTreeMap::from([("metadata", json!({"total_size": total_bytes})), ("weight_map", json!(weight_map))]);
    format!("{}\n", render_python_json(&index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_filled_in_order_and_a_large_tensor_is_alone() {
        assert_eq!(split(&[3, 3, 4, 9, 1, 1], 6), [0..2, 2..3, 3..4, 4..6]);
        assert_eq!(split(&[9, 1], 6), [0..1, 1..2]);
        assert_eq!(split(&[1, 2, 3], 6).len(), 1);
        assert_eq!(shard_name(0, 1), "model.safetensors");
        assert_eq!(shard_name(1, 12), "model-00002-of-00012.safetensors");
    }
}
