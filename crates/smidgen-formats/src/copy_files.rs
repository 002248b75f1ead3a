//! Copies files of a model folder, each opened beneath it (`links.rs`).
//!
//! Left out: which files are copied (`folder_files.rs`).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::links::{OpenInsideError, open_beneath};

/// A folder with more chat templates.
pub const TEMPLATES: &str = "additional_chat_templates";

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
    use crate::folder_files::is_copied;
    use std::os::unix::fs::symlink;

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
