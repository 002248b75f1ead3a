//! Saves a tokenizer as a folder that transformers loads: `tokenizer.json`, `tokenizer_config.json`,
//! `special_tokens_map.json` and, if there is a template, `chat_template.jinja`.
//! The files are renamed into place when all of them are on disk.
//! Left out: files of other libraries, such as `tokenizer.model`.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{Tokenizer, TokenizerError};
use crate::whole_file::{StagedFile, commit_together};

impl Tokenizer {
    /// Writes the files into an existing folder. Other files in it are not touched.
    pub fn save(&self, folder: &Path) -> Result<(), TokenizerError> {
        let failed = |reason: String| TokenizerError::Serialize { reason };
        let tokenizer = self.library.to_string(true).map_err(|error| failed(error.to_string()))?;
        let special: Map<String, Json> = (self.config.iter())
            .filter(|(key, _)| key.ends_with("_token") || *key == "additional_special_tokens")
            .filter(|(key, value)| !key.starts_with("add_") && !value.is_null())
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let pretty = |map: &Map<String, Json>| {
            serde_json::to_string_pretty(map).map_err(|error| failed(error.to_string()))
        };
        let mut files = vec![
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", pretty(&self.config)?),
            ("special_tokens_map.json", pretty(&special)?),
        ];
        if let Some(template) = &self.template {
            files.push(("chat_template.jinja", template.clone()));
        }
        let mut staged = Vec::with_capacity(files.len());
        for (name, text) in &files {
            let mut file = StagedFile::create(&folder.join(name))?;
            file.write(|writer| writer.write_all(text.as_bytes()))?;
            staged.push(file);
        }
        Ok(commit_together(staged)?)
    }
}
