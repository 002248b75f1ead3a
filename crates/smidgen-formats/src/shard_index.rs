//! `model.safetensors.index.json`: which shard holds which tensor.
//! The index is a downloaded file, so a tensor placed twice is refused and shard names are checked
//! before they become paths.
//! Left out: the index's `metadata`, which repeats what the shards say.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::json_file::{JsonFileError, MAX_INDEX_BYTES, read_json_file};

/// Tensor name to shard.
pub fn read_weight_map(index: &Path) -> Result<BTreeMap<String, String>, JsonFileError> {
    let parsed: IndexJson = read_json_file(index, MAX_INDEX_BYTES)?;
    Ok(parsed.weight_map.0)
}

/// Whether joining the name to a folder stays inside the folder.
pub fn is_plain_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\\', '\0'])
}

#[derive(Deserialize)]
struct IndexJson {
    weight_map: WeightMap,
}

/// Unlike serde's own maps it refuses a name given twice.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut collected = BTreeMap::new();
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    if let Some(first) = collected.get(&tensor) {
                        return Err(A::Error::custom(format!(
                            "tensor `{tensor}` is placed twice, in `{first}` and in `{shard}`"
                        )));
                    }
                    collected.insert(tensor, shard);
                }
                Ok(WeightMap(collected))
            }
        }
        deserializer.deserialize_map(Collect)
    }
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
