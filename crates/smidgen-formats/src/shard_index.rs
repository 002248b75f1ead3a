//! Reads `model.safetensors.index.json`, which says which shard holds which tensor.
//! The index is a downloaded file and not trusted: a tensor that is listed twice is refused, and shard names
//! are checked before they are used as paths.
//! Left out: the index's `metadata`, which repeats what is in the shards.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde::de::Error as _;

use crate::json_file::{Entries, JsonFileError, MAX_INDEX_BYTES, read_json_file};

/// Returns the shard of each tensor by the tensor's name.
pub fn read_weight_map(index: &Path) -> Result<BTreeMap<String, String>, JsonFileError> {
    let IndexJson { weight_map: Entries(entries) } = read_json_file(index, MAX_INDEX_BYTES)?;
    let mut shards = BTreeMap::new();
    for (tensor, shard) in entries {
        if let Some(first) = shards.get(&tensor) {
            let what = format!("tensor `{tensor}` is placed twice, in `{first}` and in `{shard}`");
            let source = serde_json::Error::custom(what);
            return Err(JsonFileError::Json { path: index.to_path_buf(), source });
        }
        shards.insert(tensor, shard);
    }
    Ok(shards)
}

/// Whether joining the name to a folder stays inside the folder.
pub fn is_plain_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: Entries<String>,
}

#[cfg(test)]
mod tests {
    use super::is_plain_file_name;

    #[test]
    fn plain_names_have_no_path_in_them() {
        for plain in ["model-00001-of-00002.safetensors", "a..b", "...", "a b"] {
            assert!(is_plain_file_name(plain), "{plain}");
        }
        for path in ["", ".", "..", "a/b", "/a", "a/", "..\\a", "a\0"] {
            assert!(!is_plain_file_name(path), "{path}");
        }
    }
}
