//! Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, and the files with the special tokens and
//! the chat template.
//! Newer files override older ones: `chat_template.jinja` over `tokenizer_config.json` over
//! `chat_template.json`, and `tokenizer_config.json` over `special_tokens_map.json`.
//! Left out: `tokenizer.model`, `vocab.json` with `merges.txt`, and changes that Python classes make after
//! loading.

use std::io;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::tokenizer_limits::check_tokenizer;
use super::{Tokenizer, TokenizerError, catch_panics, special_ids_of, token_text};
use crate::json_file::{JsonFileError, MAX_TOKENIZER_CONFIG_BYTES, parse_json, read_bytes};

/// The largest published files, with 262,144 tokens and their merges, have 33 MB.
const MAX_TOKENIZER_BYTES: u64 = 100_000_000;

impl Tokenizer {
    pub fn from_folder(folder: &Path) -> Result<Tokenizer, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let Some(json) = read_if_exists(&path, MAX_TOKENIZER_BYTES)? else {
            return Err(TokenizerError::NoTokenizerJson { folder: folder.to_path_buf() });
        };
        let unusable = |reason| TokenizerError::Unusable { path: path.clone(), reason };
        check_tokenizer(&json).map_err(unusable)?;
        let mut library = catch_panics(|| tokenizers::Tokenizer::from_bytes(&json)).map_err(unusable)?;
        drop(json);
        // Some files contain truncation and padding settings of the run that saved them.
        library.with_padding(None);
        library
            .with_truncation(None)
            .map_err(|error| TokenizerError::Unusable { path: path.clone(), reason: error.to_string() })?;
        let mut config = read_object(folder, "tokenizer_config.json")?.unwrap_or_default();
        for (key, value) in read_object(folder, "special_tokens_map.json")?.unwrap_or_default() {
            if key.ends_with("_token") && token_text(&value).is_some() {
                let is_set = config.get(&key).is_some_and(|value| token_text(value).is_some());
                if !is_set {
                    config.insert(key, value);
                }
            }
        }
        let in_config = config.remove("chat_template");
        let template = read_template(folder, in_config)?;
        Ok(Tokenizer { special_ids: special_ids_of(&library, &config), library, config, template })
    }
}

fn read_template(folder: &Path, in_config: Option<Json>) -> Result<Option<String>, TokenizerError> {
    let path = folder.join("chat_template.jinja");
    if let Some(bytes) = read_if_exists(&path, MAX_TOKENIZER_CONFIG_BYTES)? {
        let text = String::from_utf8(bytes);
        return text
            .map(Some)
            .map_err(|_| TokenizerError::Config { path, what: "it is not UTF-8 text".into() });
    }
    let path = folder.join("tokenizer_config.json");
    if let Some(value) = in_config.filter(|value| !value.is_null()) {
        return match default_template(&value) {
            Some(template) => Ok(Some(template.to_string())),
            None => Err(TokenizerError::Config {
                path,
                what: "`chat_template` is neither a string nor a list with the name `default`".into(),
            }),
        };
    }
    let older = read_object(folder, "chat_template.json")?;
    Ok(older.and_then(|object| object.get("chat_template")?.as_str().map(str::to_string)))
}

/// A single template, or the one named `default` in a list.
fn default_template(value: &Json) -> Option<&str> {
    let named = |entry: &&Json| entry.get("name").and_then(Json::as_str) == Some("default");
    value.as_str().or_else(|| value.as_array()?.iter().find(named)?.get("template")?.as_str())
}

fn read_object(folder: &Path, name: &str) -> Result<Option<Map<String, Json>>, TokenizerError> {
    let path = folder.join(name);
    let bytes = read_if_exists(&path, MAX_TOKENIZER_CONFIG_BYTES)?;
    Ok(bytes.map(|bytes| parse_json(&path, &bytes)).transpose()?)
}

fn read_if_exists(path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, TokenizerError> {
    match read_bytes(path, max_bytes) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(JsonFileError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}
