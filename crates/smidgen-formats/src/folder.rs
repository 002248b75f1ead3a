//! A Hugging Face model folder: `config.json`, and weights in one safetensors file or in shards with an
//! index. Opening reads only the headers and checks that the index and the shards agree, so each name has one
//! place on disk. The weights may be missing, because planning needs only the config.
//! RoPE tables (`*.rotary_emb.inv_freq`) of old checkpoints are ignored, because they follow from the config.
//! Left out: what the config means, tokenizers, GGUF, and pickled weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use thiserror::Error;

use crate::folder_files::is_read;
use crate::json_file::{JsonFileError, MAX_CONFIG_BYTES, read_json_file};
use crate::links::{LinkOut, find_link_out};
use crate::safetensors::{SafetensorsError, SafetensorsFile};
use crate::shard_index::{is_plain_file_name, read_weight_map};
use crate::some_of::some_of;
use crate::tensor_ref::TensorRef;
use crate::text_names::{is_wrapped, text_name};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

#[derive(Debug)]
pub struct ModelFolder {
    path: PathBuf,
    config_path: PathBuf,
    config: serde_json::Value,
    files: Vec<Arc<SafetensorsFile>>,
    /// By their names in a text model alone, if they belong to one.
    tensors: BTreeMap<String, TensorRef>,
}

#[derive(Debug, Error)]
pub enum FolderError {
    #[error("the model folder `{}` does not exist", path.display())]
    Missing { path: PathBuf },
    #[error("`{}` is not a folder; give the folder that holds `config.json`", path.display())]
    NotAFolder { path: PathBuf },
    #[error("the model folder `{}` could not be listed: {source}", path.display())]
    List { path: PathBuf, source: io::Error },
    #[error("`{}` has no `config.json`; give the folder of a Hugging Face model", path.display())]
    NoConfig { path: PathBuf },
    #[error(
        "`{}` holds an adapter and not a model: it has `adapter_config.json` but no `config.json`; \
         give the folder of the base model", path.display()
    )]
    AdapterFolder { path: PathBuf },
    #[error(
        "`{link}` in the model folder `{}` is a link to `{}`, outside the folder; replace it with the file itself",
        path.display(), target.display()
    )]
    LinkOut { path: PathBuf, link: String, target: PathBuf },
    #[error("`{}` is not a JSON object", path.display())]
    ConfigNotObject { path: PathBuf },
    #[error(
        "`{}` has its weights only as `{found}`, which is pickled; safetensors is needed: convert it with `python -c \
         \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{}').save_pretrained('OUT')\"`",
        path.display(), path.display()
    )]
    OnlyPickle { path: PathBuf, found: String },
    #[error(
        "`{}` has its weights only as `{found}`; GGUF is not read here: download the model's safetensors files",
        path.display()
    )]
    OnlyGguf { path: PathBuf, found: String },
    #[error(
        "`{}` has `{found}` but neither `{SINGLE_FILE}` nor `{INDEX_FILE}`; download the index as well", path.display()
    )]
    ShardsWithoutIndex { path: PathBuf, found: String },
    #[error(
        "`{}` places tensor `{tensor}` in `{shard}`, which is not a plain file name", index.display()
    )]
    ShardNameNotPlain { index: PathBuf, tensor: String, shard: String },
    #[error("`{}` names no tensors; download it again", index.display())]
    EmptyIndex { index: PathBuf },
    #[error(
        "`{}` names {} of {shards} shards that do not exist: {}; download them", index.display(), missing.len(),
        some_of(missing)
    )]
    ShardsMissing { index: PathBuf, shards: usize, missing: Vec<String> },
    #[error(
        "tensor `{tensor}` is in both `{first}` and `{second}` of `{}`; remove the file that does not belong",
        path.display()
    )]
    TensorInTwoShards { path: PathBuf, tensor: String, first: String, second: String },
    #[error(
        "`{}` places tensors in shards that do not hold them: {}; the index and the shards are of different versions",
        index.display(), some_of(tensors)
    )]
    NotInShard {
        index: PathBuf,
        /// As `name (in shard)`.
        tensors: Vec<String>,
    },
    #[error(
        "`{}` does not name tensors that the shards hold: {}; the index and the shards are of different versions",
        index.display(), some_of(tensors)
    )]
    NotInIndex {
        index: PathBuf,
        /// As `name (in shard)`.
        tensors: Vec<String>,
    },
    #[error(transparent)]
    Json(#[from] JsonFileError),
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
}

impl ModelFolder {
    pub fn open(path: &Path) -> Result<ModelFolder, FolderError> {
        let names = list_names(path)?;
        let path = path.to_path_buf();
        if let Some(LinkOut { link, target }) = find_link_out(&path, is_read) {
            return Err(FolderError::LinkOut { path, link, target });
        }
        let weights = find_weights(&path, &names);
        if !names.contains("config.json") {
            return Err(match weights {
                Err(error @ FolderError::OnlyGguf { .. }) => error,
                _ if names.contains("adapter_config.json") => FolderError::AdapterFolder { path },
                _ => FolderError::NoConfig { path },
            });
        }
        let config_path = path.join("config.json");
        let config: serde_json::Value = read_json_file(&config_path, MAX_CONFIG_BYTES)?;
        if !config.is_object() {
            return Err(FolderError::ConfigNotObject { path: config_path });
        }
        let (files, tensors) = match weights? {
            Weights::Absent => (Vec::new(), BTreeMap::new()),
            Weights::Single => open_single(&path)?,
            Weights::Sharded => open_shards(&path, &names)?,
        };
        let tensors = if is_wrapped(&config) {
            tensors.into_iter().map(|(name, tensor)| (text_name(&name).unwrap_or(name), tensor)).collect()
        } else {
            tensors
        };
        Ok(ModelFolder { path, config_path, config, files, tensors })
    }

    /// The name of a tensor here, by its name in the files.
    pub fn name_of(&self, in_file: &str) -> String {
        let renamed = is_wrapped(&self.config).then(|| text_name(in_file)).flatten();
        renamed.unwrap_or_else(|| in_file.to_string())
    }

    /// Whether a tensor with this name in the files belongs to no text model: to a tower, or to layers that predict several
    /// tokens at once.
    pub fn is_beside_text(&self, in_file: &str) -> bool {
        in_file.starts_with("mtp.") || (is_wrapped(&self.config) && text_name(in_file).is_none())
    }

    /// A model without files, for planning and measuring. `name` is used as its path.
    pub fn from_config(name: &str, config: serde_json::Value) -> ModelFolder {
        let path = PathBuf::from(name);
        let config_path = path.join("config.json");
        ModelFolder { path, config_path, config, files: Vec::new(), tensors: BTreeMap::new() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The parsed `config.json`, a JSON object.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    pub fn config_path(&self) -> &Path {
        &self.config_path
    }

    pub fn has_weights(&self) -> bool {
        !self.files.is_empty()
    }

    /// The weight files, sorted by name.
    pub fn files(&self) -> &[Arc<SafetensorsFile>] {
        &self.files
    }

    pub fn tensor(&self, name: &str) -> Option<TensorRef> {
        self.tensors.get(name).cloned()
    }

    /// Sorted by name.
    pub fn tensor_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}

enum Weights {
    Absent,
    Single,
    Sharded,
}

type Opened = (Vec<Arc<SafetensorsFile>>, BTreeMap<String, TensorRef>);

fn list_names(path: &Path) -> Result<BTreeSet<String>, FolderError> {
    let unlisted = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => FolderError::Missing { path: path.to_path_buf() },
        io::ErrorKind::NotADirectory => FolderError::NotAFolder { path: path.to_path_buf() },
        _ => FolderError::List { path: path.to_path_buf(), source },
    };
    fs::read_dir(path)
        .map_err(unlisted)?
        .map(|entry| Ok(entry.map_err(unlisted)?.file_name()))
        // Names that are not UTF-8 are skipped: no file of a model has such a name.
        .filter_map(|name: Result<OsString, FolderError>| name.map(|n| n.into_string().ok()).transpose())
        .collect()
}

fn find_weights(path: &Path, names: &BTreeSet<String>) -> Result<Weights, FolderError> {
    if names.contains(SINGLE_FILE) {
        return Ok(Weights::Single);
    }
    if names.contains(INDEX_FILE) {
        return Ok(Weights::Sharded);
    }
    let find = |wanted: fn(&str) -> bool| names.iter().find(|name| wanted(name)).cloned();
    let path = path.to_path_buf();
    if let Some(found) = find(|name| name.starts_with("model-") && name.ends_with(".safetensors")) {
        return Err(FolderError::ShardsWithoutIndex { path, found });
    }
    if let Some(found) = find(|name| {
        name.starts_with("pytorch_model") && (name.ends_with(".bin") || name.ends_with(".bin.index.json"))
    }) {
        return Err(FolderError::OnlyPickle { path, found });
    }
    if let Some(found) = find(|name| name.ends_with(".gguf")) {
        return Err(FolderError::OnlyGguf { path, found });
    }
    Ok(Weights::Absent)
}

fn open_single(path: &Path) -> Result<Opened, FolderError> {
    let file = Arc::new(SafetensorsFile::open(&path.join(SINGLE_FILE))?);
    let tensors = kept_tensors(&file).collect();
    Ok((vec![file], tensors))
}

fn open_shards(path: &Path, names: &BTreeSet<String>) -> Result<Opened, FolderError> {
    let index = path.join(INDEX_FILE);
    let mut weight_map = read_weight_map(&index)?;
    if let Some((tensor, shard)) = weight_map.iter().find(|(_, shard)| !is_plain_file_name(shard)) {
        return Err(FolderError::ShardNameNotPlain { index, tensor: tensor.clone(), shard: shard.clone() });
    }
    weight_map.retain(|name, _| !is_ignored(name));
    if weight_map.is_empty() {
        return Err(FolderError::EmptyIndex { index });
    }
    let shards: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    let missing: Vec<String> =
        (shards.iter().filter(|&&shard| !names.contains(shard))).map(|shard| shard.to_string()).collect();
    if !missing.is_empty() {
        return Err(FolderError::ShardsMissing { index, shards: shards.len(), missing });
    }
    let files = shards
        .iter()
        .map(|shard| SafetensorsFile::open(&path.join(shard)).map(Arc::new))
        .collect::<Result<Vec<_>, _>>()?;
    let mut tensors: BTreeMap<String, TensorRef> = BTreeMap::new();
    for (name, tensor) in files.iter().flat_map(kept_tensors) {
        let second = shard_name(&tensor);
        if let Some(first) = tensors.insert(name.clone(), tensor) {
            return Err(FolderError::TensorInTwoShards {
                path: path.to_path_buf(),
                tensor: name,
                first: shard_name(&first),
                second,
            });
        }
    }
    let not_in_shard: Vec<String> = weight_map
        .iter()
        .filter(|(name, shard)| tensors.get(*name).is_none_or(|found| shard_name(found) != **shard))
        .map(|(name, shard)| format!("`{name}` (in `{shard}`)"))
        .collect();
    if !not_in_shard.is_empty() {
        return Err(FolderError::NotInShard { index, tensors: not_in_shard });
    }
    let not_in_index: Vec<String> = (tensors.iter())
        .filter(|(name, _)| !weight_map.contains_key(*name))
        .map(|(name, tensor)| format!("`{name}` (in `{}`)", shard_name(tensor)))
        .collect();
    if !not_in_index.is_empty() {
        return Err(FolderError::NotInIndex { index, tensors: not_in_index });
    }
    Ok((files, tensors))
}

fn kept_tensors(file: &Arc<SafetensorsFile>) -> impl Iterator<Item = (String, TensorRef)> {
    (0..file.tensors().len())
        .map(|position| TensorRef::new(file, position))
        .filter(|tensor| !is_ignored(tensor.name()))
        .map(|tensor| (tensor.name().to_string(), tensor))
}

fn is_ignored(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

fn shard_name(tensor: &TensorRef) -> String {
    let name = tensor.file_path().file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};

    /// A temporary model folder; tensors are U8 vectors filled with a byte.
    struct TestFolder(tempfile::TempDir);

    impl TestFolder {
        fn new() -> TestFolder {
            let made = TestFolder(tempfile::tempdir().unwrap());
            made.text("config.json", r#"{"model_type":"llama"}"#)
        }

        fn text(self, name: &str, text: &str) -> TestFolder {
            fs::write(self.0.path().join(name), text).unwrap();
            self
        }

        fn weights(self, file: &str, tensors: &[(&str, u8)]) -> TestFolder {
            let specs: Vec<TensorSpec> = tensors
                .iter()
                .map(|(name, _)| TensorSpec { name: name.to_string(), element: Element::U8, shape: vec![4] })
                .collect();
            let path = self.0.path().join(file);
            write_safetensors(&path, &pytorch_metadata(), &specs, |i, w| w.write_all(&[tensors[i].1; 4]))
                .unwrap();
            self
        }

        fn index(self, weight_map: &str) -> TestFolder {
            self.text(INDEX_FILE, &format!(r#"{{"metadata":{{"total_size":8}},"weight_map":{weight_map}}}"#))
        }

        fn open(&self) -> Result<ModelFolder, FolderError> {
            ModelFolder::open(self.0.path())
        }

        /// The error's text, with the folder's path as `DIR`.
        #[track_caller]
        fn refused(&self, expected: &str) {
            let text = self.open().expect_err("refused").to_string();
            assert_eq!(text.replace(&self.0.path().display().to_string(), "DIR"), expected);
        }
    }

    fn first_byte(folder: &ModelFolder, name: &str) -> u8 {
        let mut byte = [0];
        let tensor = folder.tensor(name).unwrap();
        tensor.read_at(2, &mut byte).unwrap();
        byte[0]
    }

    #[test]
    fn a_config_alone_is_enough_to_plan() {
        let folder = TestFolder::new().open().unwrap();
        assert!(!folder.has_weights());
        assert_eq!(folder.config()["model_type"], "llama");
        assert_eq!(folder.tensor_names().len(), 0);
        assert!(folder.config_path().ends_with("config.json"));
    }

    #[test]
    fn one_file_without_rotary_tables() {
        let inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq";
        let made = TestFolder::new().weights(SINGLE_FILE, &[("b", 2), ("a", 1), (inv_freq, 9)]);
        let folder = made.open().unwrap();
        assert!(folder.has_weights());
        assert_eq!(folder.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
        assert!(folder.tensor(inv_freq).is_none());
        assert_eq!(first_byte(&folder, "b"), 2);
    }

    #[test]
    fn shards_are_found_through_the_index() {
        let made = TestFolder::new()
            .weights("one.safetensors", &[("a", 1), ("x.rotary_emb.inv_freq", 9)])
            .weights("two.safetensors", &[("b", 2)])
            .index(
                r#"{"a":"one.safetensors","b":"two.safetensors","y.rotary_emb.inv_freq":"two.safetensors"}"#,
            );
        let folder = made.open().unwrap();
        assert_eq!(folder.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!((first_byte(&folder, "a"), first_byte(&folder, "b")), (1, 2));
        assert_eq!(folder.files().len(), 2);
    }

    #[test]
    fn folders_without_a_model_are_refused_with_the_reason() {
        let made = TestFolder(tempfile::tempdir().unwrap());
        made.refused("`DIR` has no `config.json`; give the folder of a Hugging Face model");
        let made = made.text("adapter_config.json", "{}");
        made.refused(
            "`DIR` holds an adapter and not a model: it has `adapter_config.json` but no `config.json`; \
             give the folder of the base model",
        );
        let missing = ModelFolder::open(&made.0.path().join("no")).unwrap_err();
        assert!(matches!(missing, FolderError::Missing { .. }), "{missing}");
        let file = ModelFolder::open(&made.0.path().join("adapter_config.json")).unwrap_err();
        assert!(file.to_string().ends_with("is not a folder; give the folder that holds `config.json`"));
    }

    #[test]
    fn invalid_configs_are_refused() {
        TestFolder::new().text("config.json", "[]").refused("`DIR/config.json` is not a JSON object");
        TestFolder::new().text("config.json", "{").refused(
            "`DIR/config.json` is not the expected JSON: EOF while parsing an object at line 1 column 1",
        );
    }

    #[test]
    fn weights_in_other_formats_are_refused_with_a_remedy() {
        TestFolder::new().text("pytorch_model.bin", "").refused(
            "`DIR` has its weights only as `pytorch_model.bin`, which is pickled; safetensors is needed: convert it \
             with `python -c \"from transformers import AutoModelForCausalLM as M; \
             M.from_pretrained('DIR').save_pretrained('OUT')\"`",
        );
        TestFolder::new()
            .text("pytorch_model.bin", "")
            .weights(SINGLE_FILE, &[("a", 1)])
            .open()
            .expect("safetensors next to a pickle is fine");
        let gguf = "`DIR` has its weights only as `m.Q4_1.gguf`; GGUF is not read here: \
                    download the model's safetensors files";
        TestFolder::new().text("m.Q4_1.gguf", "").refused(gguf);
        TestFolder(tempfile::tempdir().unwrap()).text("m.Q4_1.gguf", "").refused(gguf);
        TestFolder::new().weights("model-00001-of-00002.safetensors", &[("a", 1)]).refused(
            "`DIR` has `model-00001-of-00002.safetensors` but neither `model.safetensors` nor \
             `model.safetensors.index.json`; download the index as well",
        );
    }

    #[test]
    fn shard_names_must_not_lead_out_of_the_folder() {
        for shard in ["../a.safetensors", "/etc/passwd", "..", "", "a/b", "a\\\\b"] {
            let error = TestFolder::new().index(&format!(r#"{{"a":"{shard}"}}"#)).open().unwrap_err();
            assert!(matches!(error, FolderError::ShardNameNotPlain { .. }), "{shard}: {error}");
        }
        TestFolder::new().index(r#"{"a":"../x"}"#).refused(
            "`DIR/model.safetensors.index.json` places tensor `a` in `../x`, which is not a plain file name",
        );
    }

    #[test]
    fn all_missing_shards_are_named() {
        let made =
            TestFolder::new().weights("one", &[("a", 1)]).index(r#"{"a":"one","b":"two","c":"three"}"#);
        made.refused(
            "`DIR/model.safetensors.index.json` names 2 of 3 shards that do not exist: three, two; download them",
        );
    }

    #[test]
    fn index_and_shards_must_agree() {
        let made = || TestFolder::new().weights("one", &[("a", 1), ("b", 1)]).weights("two", &[("c", 2)]);
        made().index(r#"{"a":"one","b":"two","c":"two","d":"two"}"#).refused(
            "`DIR/model.safetensors.index.json` places tensors in shards that do not hold them: \
             `b` (in `two`), `d` (in `two`); the index and the shards are of different versions",
        );
        made().index(r#"{"a":"one","c":"two"}"#).refused(
            "`DIR/model.safetensors.index.json` does not name tensors that the shards hold: `b` (in `one`); \
             the index and the shards are of different versions",
        );
        made()
            .weights("two", &[("b", 2), ("c", 2)])
            .index(r#"{"a":"one","b":"one","c":"two"}"#)
            .refused("tensor `b` is in both `one` and `two` of `DIR`; remove the file that does not belong");
        made().index(r#"{"a":"one","a":"two"}"#).refused(
            "`DIR/model.safetensors.index.json` is not the expected JSON: \
             tensor `a` is placed twice, in `one` and in `two`",
        );
        made().index("{}").refused("`DIR/model.safetensors.index.json` names no tensors; download it again");
        made().text(INDEX_FILE, "{}").refused(
            "`DIR/model.safetensors.index.json` is not the expected JSON: \
             missing field `weight_map` at line 1 column 2",
        );
    }

    #[test]
    fn a_damaged_shard_is_reported_with_its_path() {
        TestFolder::new()
            .text("one", "short")
            .index(r#"{"a":"one"}"#)
            .refused("`DIR/one`: the file is truncated: 5 of at least 8 bytes; download it again");
    }
}
