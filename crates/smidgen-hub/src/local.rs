//! Models given by a path on this machine.
//!
//! A folder with one .gguf file and no `config.json` stands for that file. Left out: what is inside the files.

use crate::error::HubError;
use crate::{Located, list_names};
use smidgen_formats::folder::FolderError;
use std::io::ErrorKind;
use std::path::Path;

const RELATIVE_TO: &str =
    "paths in a recipe are relative to the recipe, paths on the command line to the working directory";

pub fn locate_folder(path: &Path) -> Result<Located, HubError> {
    let folder = path.to_path_buf();
    let entries = std::fs::read_dir(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => {
            HubError::model(FolderError::Missing { path: folder.clone() }).hint(RELATIVE_TO)
        }
        ErrorKind::NotADirectory => HubError::model(FolderError::NotAFolder { path: folder.clone() }),
        _ => HubError::disk(FolderError::List { path: folder.clone(), source }),
    })?;
    if path.join("config.json").exists() {
        return Ok(Located::Folder(folder));
    }
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut gguf: Vec<String> = names.filter(|name| name.to_ascii_lowercase().ends_with(".gguf")).collect();
    gguf.sort();
    match gguf.as_slice() {
        // The reader reports what is missing in any other folder.
        [] => Ok(Located::Folder(folder)),
        [file] => Ok(Located::GgufFile(path.join(file))),
        files => Err(HubError::model(format!(
            "`{}` has {} .gguf files: {}",
            path.display(),
            files.len(),
            list_names(files)
        ))
        .hint(format!("choose one of them, such as `{}`", path.join(&files[0]).display()))),
    }
}

pub fn locate_gguf(path: &Path) -> Result<Located, HubError> {
    match path.metadata() {
        Ok(found) if found.is_file() => Ok(Located::GgufFile(path.to_path_buf())),
        // A folder may be called `.gguf` too.
        Ok(found) if found.is_dir() => locate_folder(path),
        Ok(_) => Err(HubError::model(format!("`{}` is not a file", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(HubError::model(format!("the model file `{}` does not exist", path.display()))
                .hint(RELATIVE_TO))
        }
        Err(error) => Err(HubError::file("read", path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_stands_for_its_only_gguf_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert_eq!(locate_folder(path).unwrap(), Located::Folder(path.to_path_buf()));
        std::fs::write(path.join("a.gguf"), "").unwrap();
        assert_eq!(locate_folder(path).unwrap(), Located::GgufFile(path.join("a.gguf")));
        assert_eq!(locate_gguf(&path.join("a.gguf")).unwrap(), Located::GgufFile(path.join("a.gguf")));
        std::fs::write(path.join("b.GGUF"), "").unwrap();
        let error = locate_folder(path).unwrap_err();
        assert!(error.message.ends_with("has 2 .gguf files: `a.gguf`, `b.GGUF`"), "{error}");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert_eq!(locate_folder(path).unwrap(), Located::Folder(path.to_path_buf()));
    }

    #[test]
    fn a_missing_file_or_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no.gguf");
        let error = locate_gguf(&path).unwrap_err();
        assert_eq!(error.message, format!("the model file `{}` does not exist", path.display()));
        let error = locate_folder(&folder.path().join("no")).unwrap_err();
        assert!(error.message.contains("no` does not exist"), "{error}");
        assert_eq!(error.hints, [RELATIVE_TO]);
        std::fs::create_dir(&path).unwrap();
        assert_eq!(locate_gguf(&path).unwrap(), Located::Folder(path));
    }
}
