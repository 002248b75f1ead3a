//! `SHA256SUMS`: the hash of every file of a checkpoint and of the result, in the format of `sha256sum`.
//!
//! It is written last, before the folder gets its name, so a folder has it completely or not at all. Resume checks a
//! checkpoint with it; merge, export and generation check an adapter. Older checkpoints have none.
//! It finds damage, not an attacker: whoever can change a file can change this one.

use crate::failure::Failure;
use smidgen_formats::digest::{Hasher, is_hex};
use smidgen_formats::whole_file::write_whole;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

pub const FILE_NAME: &str = "SHA256SUMS";
/// Enough for ten thousand files.
const MAX_BYTES: u64 = 2 << 20;
const SHA256_DIGITS: usize = 64;

/// Hashes all files of a folder, and writes the list into it.
pub fn write_checksums(folder: &Path) -> Result<(), Failure> {
    let mut names = Vec::new();
    collect_names(folder, Path::new(""), &mut names)?;
    names.sort();
    let mut text = String::new();
    for name in names {
        let hash = hash_file(&folder.join(&name))
            .map_err(|error| Failure::file("read", &folder.join(&name), error))?;
        text += &format!("{hash}  {}\n", name.display());
    }
    write_whole(&folder.join(FILE_NAME), |out| out.write_all(text.as_bytes())).map_err(Failure::disk)
}

/// Compares all files of a folder with their hashes. Returns whether the folder has hashes.
pub fn verify_checksums(folder: &Path) -> Result<bool, Failure> {
    let list = folder.join(FILE_NAME);
    let text = match std::fs::metadata(&list) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(false);
        }
        Ok(metadata) if metadata.len() > MAX_BYTES => return Err(unreadable(&list, "it is too long")),
        Ok(_) | Err(_) => {
            std::fs::read_to_string(&list).map_err(|error| unreadable(&list, &error.to_string()))?
        }
    };
    for (index, line) in text.lines().enumerate() {
        let is_inside =
            |name: &str| Path::new(name).components().all(|it| matches!(it, Component::Normal(_)));
        let is_entry = |(hash, name): &(&str, &str)| is_hex(hash, SHA256_DIGITS) && is_inside(name);
        let entry = line.split_once("  ").filter(is_entry);
        let Some((expected, name)) = entry else {
            return Err(unreadable(&list, &format!("line {} is not a hash and a file name", index + 1)));
        };
        let path = folder.join(name);
        match hash_file(&path) {
            Ok(hash) if hash == expected => {}
            Ok(_) => {
                return Err(Failure::model(format!(
                    "`{}` is damaged: it does not have the SHA-256 that `{FILE_NAME}` lists",
                    path.display()
                )));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Failure::model(format!(
                    "`{}` is missing: `{FILE_NAME}` lists it",
                    path.display()
                )));
            }
            Err(error) => return Err(Failure::file("read", &path, error)),
        }
    }
    Ok(true)
}

fn unreadable(list: &Path, why: &str) -> Failure {
    Failure::model(format!("`{}` is damaged: {why}", list.display()))
}

fn hash_file(path: &Path) -> std::io::Result<String> {
    let mut hasher = Hasher::sha256();
    std::io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hasher.finish_hex())
}

/// Adds the names of all files below a folder, relative to it.
fn collect_names(folder: &Path, below: &Path, names: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let place = folder.join(below);
    let unreadable = |error| Failure::file("read", &place, error);
    for entry in std::fs::read_dir(&place).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let name = below.join(entry.file_name());
        if entry.path().is_dir() { collect_names(folder, &name, names)? } else { names.push(name) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("templates")).unwrap();
        for (name, text) in [("state.json", "abc"), ("templates/tool.jinja", "")] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    /// As `sha256sum` prints it.
    #[test]
    fn the_list_has_the_format_of_sha256sum() {
        let folder = folder();
        assert!(!verify_checksums(folder.path()).unwrap());
        write_checksums(folder.path()).unwrap();
        let text = std::fs::read_to_string(folder.path().join(FILE_NAME)).unwrap();
        assert_eq!(
            text,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  state.json\n\
             e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  templates/tool.jinja\n"
        );
        assert!(verify_checksums(folder.path()).unwrap());
    }

    #[test]
    fn every_damage_is_named() {
        let folder = folder();
        let refused = |words: &str| {
            let failure = verify_checksums(folder.path()).unwrap_err().to_string();
            assert!(failure.contains(words), "{failure}");
        };
        write_checksums(folder.path()).unwrap();
        let state = folder.path().join("state.json");
        std::fs::write(&state, "abb").unwrap();
        refused("state.json` is damaged: it does not have the SHA-256");
        std::fs::remove_file(&state).unwrap();
        refused("state.json` is missing");
        let list = folder.path().join(FILE_NAME);
        std::fs::write(&list, "ba7816  state.json\n").unwrap();
        refused("SHA256SUMS` is damaged: line 1 is not a hash and a file name");
        std::fs::write(&list, format!("{}  ../state.json\n", "0".repeat(64))).unwrap();
        refused("line 1 is not a hash and a file name");
        std::fs::write(&list, [0xff; 9]).unwrap();
        refused("SHA256SUMS` is damaged: ");
    }
}
