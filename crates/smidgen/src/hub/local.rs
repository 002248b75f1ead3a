//! Models on this machine, given by their path.
//!
//! A folder with one .gguf file and no `config.json` means that file. Left out: what is inside the files.

use super::{Located, name_some};
use crate::failure::Failure;
use smidgen_formats::folder::FolderError;
use std::io::ErrorKind;
use std::path::Path;

const RELATIVE_TO: &str =
    "paths in a recipe are relative to the recipe, paths on the command line to the working directory";

pub fn locate_folder(path: &Path) -> Result<Located, Failure> {
    let folder = path.to_path_buf();
    let entries = std::fs::read_dir(path).map_err(|source| match source.kind() {
        ErrorKind::NotFound => {
            Failure::model(FolderError::Missing { path: folder.clone() }).hint(RELATIVE_TO)
        }
        ErrorKind::NotADirectory => Failure::model(FolderError::NotAFolder { path: folder.clone() }),
        _ => Failure::disk(FolderError::List { path: folder.clone(), source }),
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
        files => Err(Failure::model(format!(
            "`{}` has {} .gguf files: {}",
            path.display(),
            files.len(),
            name_some(files)
        ))
        .hint(format!("choose one of them, such as `{}`", path.join(&files[0]).display()))),
    }
}

pub fn locate_gguf(path: &Path) -> Result<Located, Failure> {
    match path.metadata() {
        Ok(found) if found.is_file() => Ok(Located::GgufFile(path.to_path_buf())),
        // A folder may have such a name too.
        Ok(found) if found.is_dir() => locate_folder(path),
        Ok(_) => Err(Failure::model(format!("`{}` is not a file", path.display()))),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(Failure::model(format!("the model file `{}` does not exist", path.display()))
                .hint(RELATIVE_TO))
        }
        Err(error) => Err(Failure::file("read", path, error)),
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
        let failure = locate_folder(path).unwrap_err();
        assert!(failure.message.ends_with("has 2 .gguf files: `a.gguf`, `b.GGUF`"), "{failure}");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert_eq!(locate_folder(path).unwrap(), Located::Folder(path.to_path_buf()));
    }

    #[test]
    fn what_is_missing_is_named_as_it_was_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("no.gguf");
        let failure = locate_gguf(&path).unwrap_err();
        assert_eq!(failure.message, format!("the model file `{}` does not exist", path.display()));
        let failure = locate_folder(&folder.path().join("no")).unwrap_err();
        assert!(failure.message.contains("no` does not exist"), "{failure}");
        assert_eq!(failure.hints, [RELATIVE_TO]);
        std::fs::create_dir(&path).unwrap();
        assert_eq!(locate_gguf(&path).unwrap(), Located::Folder(path));
    }
}
