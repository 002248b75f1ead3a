//! Which files of a repository make up its model.
//!
//! Config, tokenizer and chat template, and weights in safetensors: the single file, or the shards of the index.
//! Pickled weights, weights of other frameworks, second copies (`consolidated.*`) and subfolders are not downloaded. If
//! a repository has no such model, the error lists its files.

use crate::error::HubError;
use crate::hf_cache::{INDEX_FILE, SINGLE_FILE};
use crate::hf_client::RemoteFile;
use crate::list_names;
use smidgen_recipe::HfName;

/// The files of a model.
#[derive(Debug)]
pub struct ModelFiles<'a> {
    /// Everything but weights.
    pub small: Vec<&'a RemoteFile>,
    pub weights: Weights<'a>,
}

#[derive(Debug)]
pub enum Weights<'a> {
    Single(&'a RemoteFile),
    /// The index; it names the shards.
    Sharded(&'a RemoteFile),
}

pub fn choose_files<'a>(name: &HfName, files: &'a [RemoteFile]) -> Result<ModelFiles<'a>, HubError> {
    let find = |wanted: &str| files.iter().find(|file| file.name == wanted);
    let weights = find(SINGLE_FILE).map(Weights::Single).or_else(|| find(INDEX_FILE).map(Weights::Sharded));
    match (find("config.json"), weights) {
        (Some(_), Some(weights)) => {
            Ok(ModelFiles { small: files.iter().filter(|file| is_small(&file.name)).collect(), weights })
        }
        (config, _) => Err(no_model(name, files, config.is_some())),
    }
}

/// The single file that the name asks for.
pub fn choose_gguf<'a>(
    name: &HfName,
    wanted: &str,
    files: &'a [RemoteFile],
) -> Result<&'a RemoteFile, HubError> {
    files.iter().find(|file| file.name == wanted).ok_or_else(|| {
        let error = HubError::model(format!("`hf:{}` has no file `{wanted}`", name.repo));
        match gguf_files(files).as_slice() {
            [] => error,
            names => error.hint(format!("it has {}", list_names(names))),
        }
    })
}

/// Whether a file is needed besides the weights.
fn is_small(name: &str) -> bool {
    let tokenizer = name.starts_with("tokenizer") && (name.ends_with(".json") || name.ends_with(".model"));
    tokenizer
        || matches!(
            name,
            "config.json"
                | "generation_config.json"
                | "special_tokens_map.json"
                | "added_tokens.json"
                | "vocab.json"
                | "vocab.txt"
                | "merges.txt"
                | "spiece.model"
                | "sentencepiece.bpe.model"
                | "chat_template.jinja"
                | "chat_template.json"
        )
}

/// Whether a file is a tokenizer or a part of one.
pub fn is_tokenizer(name: &str) -> bool {
    is_small(name)
        && !matches!(
            name,
            "config.json"
                | "generation_config.json"
                | "tokenizer_config.json"
                | "special_tokens_map.json"
                | "added_tokens.json"
                | "chat_template.jinja"
                | "chat_template.json"
        )
}

fn gguf_files(files: &[RemoteFile]) -> Vec<String> {
    let names = files.iter().map(|file| &file.name);
    names.filter(|name| name.to_ascii_lowercase().ends_with(".gguf")).cloned().collect()
}

/// The error for a repository without a model: what it has instead.
fn no_model(name: &HfName, files: &[RemoteFile], has_config: bool) -> HubError {
    let repo = format!("`hf:{}`", name.repo);
    let gguf = gguf_files(files);
    if let Some(first) = gguf.first() {
        let example = HfName { file: Some(first.clone()), ..name.clone() };
        return HubError::model(format!("{repo} has only .gguf files: {}", list_names(&gguf)))
            .hint(format!("choose one of them, such as `{example}`"));
    }
    let has = |wanted: &str| files.iter().any(|file| file.name == wanted);
    if !has_config && has("adapter_config.json") {
        return HubError::model(format!("{repo} is an adapter, not a model: it has no `config.json`"))
            .hint("set `model.path` to the base model, and `adapter.init` to an adapter to start from");
    }
    if !has_config {
        let mut names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
        names.sort();
        return if names.is_empty() {
            HubError::model(format!("{repo} has no files"))
        } else {
            HubError::model(format!("{repo} has no `config.json`; it has {}", list_names(&names)))
        };
    }
    let other = files.iter().find(|file| {
        let endings = [".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".safetensors", ".onnx"];
        endings.iter().any(|ending| file.name.ends_with(ending))
    });
    match other {
        Some(file) => HubError::model(format!(
            "{repo} has its weights as `{}`, but neither `{SINGLE_FILE}` nor `{INDEX_FILE}`",
            file.name
        ))
        .hint("look for a revision or a copy of the model with safetensors weights"),
        None => HubError::model(format!("{repo} has no weights: neither `{SINGLE_FILE}` nor `{INDEX_FILE}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_formats::digest::Checksum;

    fn files(names: &[&str]) -> Vec<RemoteFile> {
        let checksum = Checksum::git_blob(&"0".repeat(40)).unwrap();
        let file = |name: &&str| RemoteFile { name: name.to_string(), bytes: 1, checksum: checksum.clone() };
        names.iter().map(file).collect()
    }

    fn refused(names: &[&str]) -> String {
        let name = HfName::parse("o/n@v2").unwrap();
        let error = choose_files(&name, &files(names)).unwrap_err();
        format!("{error}\n{}", error.hints.join("\n"))
    }

    #[test]
    fn only_needed_files_are_chosen() {
        let name = HfName::parse("o/n").unwrap();
        let all = files(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/tokenizer.model",
            "pytorch_model.bin",
            "tf_model.h5",
            "tokenizer.json",
            "tokenizer_config.json",
        ]);
        let choice = choose_files(&name, &all).unwrap();
        let names: Vec<&str> = choice.small.iter().map(|file| &*file.name).collect();
        assert_eq!(names, ["config.json", "tokenizer.json", "tokenizer_config.json"]);
        assert!(matches!(choice.weights, Weights::Sharded(_)));
        let both = files(&["config.json", "model.safetensors", "model.safetensors.index.json"]);
        assert!(matches!(choose_files(&name, &both).unwrap().weights, Weights::Single(_)));
    }

    #[test]
    fn repositories_without_a_model_are_refused() {
        let said = refused(&["README.md", "m-Q4_0.gguf", "m-Q8_0.gguf", "config.json"]);
        assert!(said.contains("has only .gguf files: `m-Q4_0.gguf`, `m-Q8_0.gguf`"), "{said}");
        assert!(said.contains("choose one of them, such as `hf:o/n@v2:m-Q4_0.gguf`"), "{said}");
        let said = refused(&["adapter_config.json", "adapter_model.safetensors"]);
        assert!(said.contains("is an adapter, not a model"), "{said}");
        let said = refused(&["config.json", "pytorch_model.bin"]);
        assert!(said.contains("has its weights as `pytorch_model.bin`"), "{said}");
        assert!(refused(&["config.json"]).contains("has no weights"));
        assert!(refused(&["data.csv", "README.md"]).contains("it has `README.md`, `data.csv`"));
        assert!(refused(&[]).contains("has no files"));
    }
}
