//! Finds symbolic links that lead out of a model folder.
//!
//! A downloaded folder could otherwise make the program read any file on the machine. In the cache of
//! `huggingface_hub`, the files of a snapshot are links into `blobs` next to `snapshots`, so links may lead
//! anywhere in the repository's folder.
//! Left out: links in the path of the folder itself, which the user chose.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Extensions of the files that are read from a model folder.
const EXTENSIONS: [&str; 6] = ["json", "safetensors", "jinja", "model", "txt", "gguf"];

/// A link and the file outside the folder that it leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOut {
    pub link: String,
    pub target: PathBuf,
}

/// The first link in the folder, by name, that leads out of it. Files that cannot be read are skipped;
/// reading them reports the error.
pub fn find_link_out(folder: &Path) -> Option<LinkOut> {
    let home = fs::canonicalize(folder).ok()?;
    let mut links: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().and_then(OsStr::to_str).is_some_and(|it| EXTENSIONS.contains(&it)))
        .filter(|path| path.is_symlink())
        .collect();
    links.sort();
    let limit = repository_of(&home).unwrap_or(&home);
    links.into_iter().find_map(|path| {
        let target = fs::canonicalize(&path).ok()?;
        let link = path.file_name()?.to_string_lossy().into_owned();
        (!target.starts_with(limit)).then_some(LinkOut { link, target })
    })
}

/// Returns `models--org--name` for `models--org--name/snapshots/COMMIT`.
fn repository_of(folder: &Path) -> Option<&Path> {
    let snapshots = folder.parent().filter(|parent| parent.file_name() == Some(OsStr::new("snapshots")))?;
    let repository = snapshots.parent()?;
    let is_cached = repository.file_name()?.to_string_lossy().starts_with("models--");
    is_cached.then_some(repository)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_may_stay_inside_and_in_the_hubs_cache() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        fs::write(root.join("secret.json"), "{}").unwrap();
        let folder = root.join("model");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("config.json"), "{}").unwrap();
        symlink("config.json", folder.join("other.json")).unwrap();
        symlink(&root, folder.join("data")).unwrap();
        symlink("nowhere", folder.join("dangling.json")).unwrap();
        assert_eq!(find_link_out(&folder), None);
        symlink("../secret.json", folder.join("tokenizer.json")).unwrap();
        let out = find_link_out(&folder).unwrap();
        assert_eq!(out, LinkOut { link: "tokenizer.json".into(), target: root.join("secret.json") });

        let repository = root.join("models--org--name");
        let snapshot = repository.join("snapshots/abc");
        fs::create_dir_all(repository.join("blobs")).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(repository.join("blobs/1"), "{}").unwrap();
        symlink("../../blobs/1", snapshot.join("config.json")).unwrap();
        assert_eq!(find_link_out(&snapshot), None);
        symlink("../../../secret.json", snapshot.join("tokenizer.json")).unwrap();
        assert_eq!(find_link_out(&snapshot).unwrap().target, root.join("secret.json"));
        let lookalike = root.join("model/snapshots/abc");
        fs::create_dir_all(&lookalike).unwrap();
        symlink("../../config.json", lookalike.join("config.json")).unwrap();
        assert!(find_link_out(&lookalike).is_some());
    }
}
