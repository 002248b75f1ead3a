//! The `Modelfile` beside an exported file, which `ollama create` reads.
//!
//! A whole model has its chat template and its end tokens in the GGUF file, so one line is enough. An adapter is loaded over
//! its base, which the user may replace by the name of the same model in Ollama.
//! Left out: parameters of sampling, which belong to whoever chats.

use crate::failure::Failure;
use smidgen_formats::whole_file::folder_of;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

fn path_beside(output: &Path) -> PathBuf {
    folder_of(output).join("Modelfile")
}

/// Refuses to replace a file.
pub fn refuse_existing(output: &Path) -> Result<(), Failure> {
    let path = path_beside(output);
    match path.exists() {
        true => Err(Failure::model(format!("`{}` already exists", path.display()))
            .hint("choose another folder for `--output`, or remove it")),
        false => Ok(()),
    }
}

/// Writes the file; `base` is the name of the base of an adapter.
pub fn write(output: &Path, base: Option<&str>) -> Result<(), Failure> {
    let path = path_beside(output);
    let file_name = output.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let text = match base {
        None => format!("FROM ./{file_name}\n"),
        Some(base) => format!("FROM {base}\nADAPTER ./{file_name}\n"),
    };
    let created = OpenOptions::new().write(true).create_new(true).open(&path);
    let written = created.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| Failure::file("write", &path, error))
}
