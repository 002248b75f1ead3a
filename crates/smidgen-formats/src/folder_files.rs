//! The files of a model folder by their names: one list of what is read, and of what a merge copies.
//!
//! A file with another name is neither read nor copied. Every file is opened beneath its folder (`links.rs`).
//! Left out: what is in the files.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::links::{OpenInsideError, open_beneath};
use crate::tokenizer::copy::is_tokenizer_file;

/// A folder with more chat templates.
pub const TEMPLATES: &str = "additional_chat_templates";

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

#[derive(Debug, Error)]
pub enum CopyFilesError {
    #[error("`{}` could not be copied: {source}", path.display())]
    Read { path: PathBuf, source: OpenInsideError },
    #[error("`{}` could not be listed: {source}", path.display())]
    List { path: PathBuf, source: io::Error },
    #[error("`{}` could not be written: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Copies the files with such names from `folder` to `target`; other folders and pipes are passed over.
pub fn copy_files(folder: &Path, target: &Path, is_copied: fn(&str) -> bool) -> Result<(), CopyFilesError> {
    copy_part(folder, Path::new(""), target, is_copied)
}

/// Copies the folder with more chat templates, if there is one.
pub fn copy_templates(folder: &Path, target: &Path) -> Result<(), CopyFilesError> {
    if !folder.join(TEMPLATES).is_dir() {
        return Ok(());
    }
    let target = target.join(TEMPLATES);
    fs::create_dir(&target).map_err(|source| CopyFilesError::Write { path: target.clone(), source })?;
    copy_part(folder, Path::new(TEMPLATES), &target, |name| name.ends_with(".jinja"))
}

fn copy_part(
    folder: &Path,
    part: &Path,
    target: &Path,
    is_copied: fn(&str) -> bool,
) -> Result<(), CopyFilesError> {
    let from = folder.join(part);
    let unlisted = |source| CopyFilesError::List { path: from.clone(), source };
    for entry in fs::read_dir(&from).map_err(unlisted)? {
        let name = entry.map_err(unlisted)?.file_name();
        if !name.to_str().is_some_and(is_copied) {
            continue;
        }
        let mut file = match open_beneath(folder, &part.join(&name)) {
            Ok(file) => file,
            Err(OpenInsideError::NotAFile) => continue,
            Err(OpenInsideError::Open(error)) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(source) => return Err(CopyFilesError::Read { path: from.join(&name), source }),
        };
        let path = target.join(&name);
        File::create(&path)
            .and_then(|mut copy| io::copy(&mut file, &mut copy).and_then(|_| copy.sync_all()))
            .map_err(|source| CopyFilesError::Write { path, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

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

    /// A model's folder beside a file and a folder that are none of its business.
    fn model() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        for folder in ["model", "copy", "private"] {
            fs::create_dir(root.join(folder)).unwrap();
        }
        fs::write(root.join("model/config.json"), "{}").unwrap();
        fs::write(root.join("private/key.jinja"), "secret").unwrap();
        (scratch, root.join("model"), root.join("copy"))
    }

    #[test]
    fn a_link_out_of_the_folder_is_not_copied() {
        let (_scratch, model, copy) = model();
        symlink("../private/key.jinja", model.join("modeling_x.py")).unwrap();
        let error = copy_files(&model, &copy, is_copied).unwrap_err().to_string();
        assert!(error.contains("modeling_x.py` could not be copied: it is a link to `"), "{error}");
        assert!(!copy.join("modeling_x.py").exists());
    }

    #[test]
    fn templates_of_another_folder_are_not_copied() {
        let (_scratch, model, copy) = model();
        symlink("../private", model.join(TEMPLATES)).unwrap();
        let error = copy_templates(&model, &copy).unwrap_err().to_string();
        assert!(error.contains("key.jinja` could not be copied: it is a link to `"), "{error}");
        assert!(!copy.join(TEMPLATES).join("key.jinja").exists());
    }

    #[test]
    fn templates_are_copied_and_nothing_beside_them() {
        let (_scratch, model, copy) = model();
        fs::create_dir_all(model.join(TEMPLATES).join("deep")).unwrap();
        for name in ["tool_use.jinja", "notes.txt"] {
            fs::write(model.join(TEMPLATES).join(name), name).unwrap();
        }
        copy_files(&model, &copy, is_copied).unwrap();
        copy_templates(&model, &copy).unwrap();
        assert_eq!(
            fs::read_to_string(copy.join(TEMPLATES).join("tool_use.jinja")).unwrap(),
            "tool_use.jinja"
        );
        assert_eq!(fs::read_dir(copy.join(TEMPLATES)).unwrap().count(), 1);
        assert_eq!(fs::read_dir(&copy).unwrap().count(), 2);
    }
}
