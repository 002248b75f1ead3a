//! `prompt.json` next to an adapter or a trained model: the prompt format that it was trained with.
//!
//! Generation uses the same format: a chat template, which may differ from that of the base model, a built-in
//! prompt around an instruction, or plain text. PEFT and transformers ignore the file.
//! Left out: rendering.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::json_file::{JsonFileError, MAX_TOKENIZER_CONFIG_BYTES, read_json_file};
use crate::whole_file::{WriteFileError, write_whole};

pub use crate::folder_files::PROMPT_FILE;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "prompt", rename_all = "lowercase")]
pub enum PromptFile {
    /// The prompt alone.
    Plain,
    /// A built-in prompt around an instruction.
    Instruction { name: String },
    /// The source of a chat template; `None` is the model's own.
    Chat { template: Option<String> },
}

impl PromptFile {
    /// `None` if the folder has no such file.
    pub fn read(folder: &Path) -> Result<Option<PromptFile>, JsonFileError> {
        let path = folder.join(PROMPT_FILE);
        if path.exists() { read_json_file(&path, MAX_TOKENIZER_CONFIG_BYTES).map(Some) } else { Ok(None) }
    }

    /// Writes the file, and a chat template other than the model's also as `chat_template.jinja`, which
    /// transformers reads.
    pub fn write(&self, folder: &Path) -> Result<(), WriteFileError> {
        let text = serde_json::to_string_pretty(self).expect("strings are JSON") + "\n";
        write_whole(&folder.join(PROMPT_FILE), |file| file.write_all(text.as_bytes()))?;
        if let PromptFile::Chat { template: Some(source) } = self {
            let path = folder.join("chat_template.jinja");
            write_whole(&path, |file| file.write_all(source.as_bytes()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_files_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(PromptFile::read(folder.path()).unwrap(), None);
        for (file, text) in [
            (PromptFile::Plain, "{\n  \"prompt\": \"plain\"\n}\n"),
            (
                PromptFile::Instruction { name: "alpaca".into() },
                "{\n  \"prompt\": \"instruction\",\n  \"name\": \"alpaca\"\n}\n",
            ),
            (PromptFile::Chat { template: None }, "{\n  \"prompt\": \"chat\",\n  \"template\": null\n}\n"),
        ] {
            file.write(folder.path()).unwrap();
            assert_eq!(std::fs::read_to_string(folder.path().join(PROMPT_FILE)).unwrap(), text);
            assert_eq!(PromptFile::read(folder.path()).unwrap(), Some(file));
        }
        assert!(!folder.path().join("chat_template.jinja").exists());
        PromptFile::Chat { template: Some("{{ a }}".into()) }.write(folder.path()).unwrap();
        assert_eq!(std::fs::read_to_string(folder.path().join("chat_template.jinja")).unwrap(), "{{ a }}");
        std::fs::write(folder.path().join(PROMPT_FILE), "{\"prompt\": \"odd\"}").unwrap();
        assert!(PromptFile::read(folder.path()).is_err());
    }
}
