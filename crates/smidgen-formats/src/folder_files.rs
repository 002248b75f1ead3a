//! The files of a model folder by their names: one list of what is read, and of what a merge copies.
//!
//! A file with another name is neither read nor copied. Every file is opened beneath its folder (`links.rs`).
//! Left out: what is in the files.

use crate::copy_files::TEMPLATES;

/// The prompt format that a model was trained with.
pub const PROMPT_FILE: &str = "prompt.json";

/// Prefixes of the names of tokenizer files.
const PREFIXES: [&str; 4] = ["tokenizer", "special_tokens", "added_tokens", "chat_template"];
const NAMES: [&str; 7] = [
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    PROMPT_FILE,
];

/// Beginnings of the names that a merged model keeps, besides those of the tokenizer: settings, and terms of use.
const SETTINGS: [&str; 3] = ["generation_config", "preprocessor_config", "processor_config"];
const TERMS: [&str; 5] = ["LICENSE", "LICENCE", "NOTICE", "Notice", "USE_POLICY"];
/// Endings of other names that are read: weights, and their index.
const WEIGHTS: [&str; 3] = [".safetensors", ".safetensors.index.json", ".gguf"];

/// Whether a merged model has the file too. Code is copied because `config.json` may name it.
pub fn is_copied(name: &str) -> bool {
    let begins = |with: &&str| name.starts_with(with);
    name == "config.json"
        || (SETTINGS.iter().any(begins) && name.ends_with(".json"))
        || TERMS.iter().any(begins)
        || name.ends_with(".py")
        || is_tokenizer_file(name)
}

/// Whether a file of a model's or an adapter's folder is read or copied.
pub fn is_read(name: &str) -> bool {
    is_copied(name)
        || WEIGHTS.iter().any(|ending| name.ends_with(ending))
        || ["adapter_config.json", TEMPLATES].contains(&name)
}

/// Whether a file of a model folder belongs to its tokenizer.
pub fn is_tokenizer_file(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || NAMES.contains(&name)
        || name.ends_with(".jinja")
        || name.ends_with(".tiktoken")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_tokenizer_code_and_terms_are_copied() {
        for name in [
            "config.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "chat_template.jinja",
            "merges.txt",
            "generation_config.json",
            "preprocessor_config.json",
            "modeling_phi4mm.py",
            "LICENSE",
            "NOTICE.md",
        ] {
            assert!(is_copied(name) && is_read(name), "{name}");
        }
        for name in ["model.safetensors", "model.safetensors.index.json", "adapter_config.json", TEMPLATES] {
            assert!(is_read(name) && !is_copied(name), "{name}");
        }
        for name in ["README.md", "pytorch_model.bin", "notes.txt", ".env", "config.json.bak", "id_rsa"] {
            assert!(!is_read(name), "{name}");
        }
    }
}
