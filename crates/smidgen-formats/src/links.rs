//! Opens the files of a folder without following a link out of it.
//!
//! A downloaded folder could otherwise make the program read any file on the machine, and copy it into a merged model.
//! In the cache of `huggingface_hub`, the files of a snapshot are links into `blobs` next to `snapshots`, so links may
//! lead anywhere in the repository's folder.
//! Linux opens the file beneath the folder (`openat2`); elsewhere its place is checked again after it was opened, so a
//! link that is put there in between is found.
//! Left out: links in the path of the folder itself, which the user chose.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use thiserror::Error;

use crate::whole_file::folder_of;

/// Why a file of a folder was not opened.
#[derive(Debug, Error)]
pub enum OpenInsideError {
    #[error("{0}")]
    Open(io::Error),
    #[error("it is not a file")]
    NotAFile,
    #[error("it is a link to `{}`, outside its folder; replace it with the file itself", target.display())]
    LinkOut { target: PathBuf },
}

/// A link and the file outside the folder that it leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkOut {
    pub link: String,
    pub target: PathBuf,
}

/// The first link in the folder, by name, that leads out of it. Only names that are read count; files that cannot be
/// read are skipped, because reading them reports the error.
pub fn find_link_out(folder: &Path, is_read: fn(&str) -> bool) -> Option<LinkOut> {
    let home = Home::of(folder).ok()?;
    let mut links: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().and_then(OsStr::to_str).is_some_and(is_read))
        .filter(|path| path.is_symlink())
        .collect();
    links.sort();
    links.into_iter().find_map(|path| match home.place_of(&path) {
        Err(OpenInsideError::LinkOut { target }) => {
            Some(LinkOut { link: path.file_name()?.to_string_lossy().into_owned(), target })
        }
        _ => None,
    })
}

/// Opens a file of the folder that it is in.
pub fn open_inside(path: &Path) -> Result<File, OpenInsideError> {
    let name = path.file_name().ok_or(OpenInsideError::NotAFile)?;
    open_beneath(folder_of(path), Path::new(name))
}

/// Opens a file by its path relative to `folder`, which it must not leave.
pub fn open_beneath(folder: &Path, path: &Path) -> Result<File, OpenInsideError> {
    let home = Home::of(folder).map_err(OpenInsideError::Open)?;
    let place = home.place_of(&home.folder.join(path))?;
    // A path without links: one that appears now makes the call fail.
    let file = open_place(&home.limit, &place).map_err(OpenInsideError::Open)?;
    if file.metadata().map_err(OpenInsideError::Open)?.is_file() {
        Ok(file)
    } else {
        Err(OpenInsideError::NotAFile)
    }
}

/// A folder without links in its path, and the folder that its files may not leave.
struct Home {
    folder: PathBuf,
    limit: PathBuf,
}

impl Home {
    fn of(folder: &Path) -> io::Result<Home> {
        let folder = fs::canonicalize(folder)?;
        let limit = repository_of(&folder).unwrap_or(&folder).to_path_buf();
        Ok(Home { folder, limit })
    }

    /// The place of a file relative to the limit, with every link followed.
    fn place_of(&self, path: &Path) -> Result<PathBuf, OpenInsideError> {
        let target = fs::canonicalize(path).map_err(OpenInsideError::Open)?;
        match target.strip_prefix(&self.limit) {
            Ok(place) if target.is_file() => Ok(place.to_path_buf()),
            Ok(_) => Err(OpenInsideError::NotAFile),
            Err(_) => Err(OpenInsideError::LinkOut { target }),
        }
    }
}

#[cfg(target_os = "linux")]
fn open_place(limit: &Path, place: &Path) -> io::Result<File> {
    use nix::errno::Errno;
    use nix::fcntl::{OpenHow, ResolveFlag, openat2};
    let folder = OpenOptions::new().read(true).custom_flags(OFlag::O_PATH.bits()).open(limit)?;
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(&folder, place, how) {
        Ok(file) => Ok(File::from(file)),
        // Kernels before 5.6 do not have the call, and some containers refuse it.
        Err(Errno::ENOSYS | Errno::EPERM | Errno::EINVAL) => open_and_look(limit, place),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(target_os = "linux"))]
fn open_place(limit: &Path, place: &Path) -> io::Result<File> {
    open_and_look(limit, place)
}

/// Opens a path without links, and checks that it still is one.
fn open_and_look(limit: &Path, place: &Path) -> io::Result<File> {
    let path = limit.join(place);
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits()).open(&path)?;
    let (opened, there) = (file.metadata()?, fs::symlink_metadata(&path)?);
    let is_same = (opened.dev(), opened.ino()) == (there.dev(), there.ino());
    if is_same && fs::canonicalize(&path)? == path {
        Ok(file)
    } else {
        Err(io::Error::other("it was replaced while it was opened"))
    }
}

/// Returns `models--org--name` for `models--org--name/snapshots/COMMIT` and the folders in it.
fn repository_of(folder: &Path) -> Option<&Path> {
    folder.ancestors().find_map(|snapshot| {
        let snapshots =
            snapshot.parent().filter(|parent| parent.file_name() == Some(OsStr::new("snapshots")))?;
        let repository = snapshots.parent()?;
        let is_cached = repository.file_name()?.to_string_lossy().starts_with("models--");
        is_cached.then_some(repository)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn is_json(name: &str) -> bool {
        name.ends_with(".json")
    }

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
        assert_eq!(find_link_out(&folder, is_json), None);
        symlink("../secret.json", folder.join("tokenizer.json")).unwrap();
        let out = find_link_out(&folder, is_json).unwrap();
        assert_eq!(out, LinkOut { link: "tokenizer.json".into(), target: root.join("secret.json") });

        let repository = root.join("models--org--name");
        let snapshot = repository.join("snapshots/abc");
        fs::create_dir_all(repository.join("blobs")).unwrap();
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(repository.join("blobs/1"), "{}").unwrap();
        symlink("../../blobs/1", snapshot.join("config.json")).unwrap();
        assert_eq!(find_link_out(&snapshot, is_json), None);
        symlink("../../../secret.json", snapshot.join("tokenizer.json")).unwrap();
        assert_eq!(find_link_out(&snapshot, is_json).unwrap().target, root.join("secret.json"));
        let lookalike = root.join("model/snapshots/abc");
        fs::create_dir_all(&lookalike).unwrap();
        symlink("../../config.json", lookalike.join("config.json")).unwrap();
        assert!(find_link_out(&lookalike, is_json).is_some());
    }

    fn said(path: &Path) -> String {
        open_inside(path).expect_err("refused").to_string()
    }

    #[test]
    fn a_file_is_opened_only_inside_its_folder() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        fs::write(root.join("secret"), "secret").unwrap();
        let folder = root.join("model");
        fs::create_dir_all(folder.join("deep")).unwrap();
        fs::write(folder.join("deep/a"), "a").unwrap();
        symlink("deep/a", folder.join("inside")).unwrap();
        symlink(folder.join("deep/a"), folder.join("absolute")).unwrap();
        symlink("../secret", folder.join("out")).unwrap();
        symlink("out", folder.join("twice")).unwrap();
        symlink("..", folder.join("up")).unwrap();
        for name in ["inside", "absolute"] {
            assert_eq!(io::read_to_string(open_inside(&folder.join(name)).unwrap()).unwrap(), "a");
        }
        let out = format!(
            "it is a link to `{}`, outside its folder; replace it with the file itself",
            root.join("secret").display()
        );
        assert_eq!((said(&folder.join("out")), said(&folder.join("twice"))), (out.clone(), out.clone()));
        assert_eq!(open_beneath(&folder, Path::new("up/secret")).unwrap_err().to_string(), out);
        assert_eq!(open_beneath(&folder, Path::new("../secret")).unwrap_err().to_string(), out);
        assert_eq!(said(&folder.join("deep")), "it is not a file");
        // A link to the folder is the user's own.
        symlink("model", root.join("chosen")).unwrap();
        assert!(open_inside(&root.join("chosen/inside")).is_ok());
    }

    #[test]
    fn files_of_the_hubs_cache_are_links_to_blobs() {
        let scratch = tempfile::tempdir().unwrap();
        let repository = scratch.path().canonicalize().unwrap().join("models--org--name");
        let snapshot = repository.join("snapshots/abc");
        fs::create_dir_all(repository.join("blobs")).unwrap();
        fs::create_dir_all(snapshot.join("original")).unwrap();
        fs::write(repository.join("blobs/1"), "1").unwrap();
        symlink("../../blobs/1", snapshot.join("config.json")).unwrap();
        symlink("../../../blobs/1", snapshot.join("original/params.json")).unwrap();
        symlink(repository.join("blobs/1"), snapshot.join("absolute.json")).unwrap();
        fs::write(repository.with_file_name("other"), "2").unwrap();
        for name in ["config.json", "original/params.json", "absolute.json"] {
            assert_eq!(
                io::read_to_string(open_inside(&snapshot.join(name)).unwrap()).unwrap(),
                "1",
                "{name}"
            );
        }
        symlink("../../../other", snapshot.join("out2.json")).unwrap();
        assert!(
            said(&snapshot.join("out2.json"))
                .ends_with("outside its folder; replace it with the file itself")
        );
    }

    #[test]
    fn without_the_system_call_a_file_is_looked_at_after_it_was_opened() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().canonicalize().unwrap();
        fs::create_dir_all(root.join("model/deep")).unwrap();
        fs::create_dir(root.join("other")).unwrap();
        for name in ["model/deep/a", "other/a"] {
            fs::write(root.join(name), name).unwrap();
        }
        let limit = root.join("model");
        for open in [open_and_look, open_place] {
            assert_eq!(
                io::read_to_string(open(&limit, Path::new("deep/a")).unwrap()).unwrap(),
                "model/deep/a"
            );
        }
        // As if links had been put there after the place was checked.
        symlink("../other/a", limit.join("a")).unwrap();
        symlink("../other", limit.join("b")).unwrap();
        for open in [open_and_look, open_place] {
            for place in ["a", "b/a"] {
                assert!(open(&limit, Path::new(place)).is_err(), "{place}");
            }
        }
    }
}
