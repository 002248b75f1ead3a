//! `hf:org/name[@revision][/config][:split]`: the Parquet files of a data set, in the hub's cache or downloaded into
//! it.
//!
//! Without a revision, the files are those of the branch to which the hub converts every data set as Parquet. Where
//! that branch is missing or has only a part, they are the repository's own. The config and the split of a file follow
//! from its name. The list of a commit's files is kept, so that a cached split is known to be complete without a
//! request.

use crate::error::HubError;
use crate::hf_cache::RepoCache;
use crate::hf_client::{HubClient, RemoteFile, Repo, RepoKind, RequestError};
use crate::hf_download::{Download, retry};
use crate::{Access, Fetch, environment, list_names, not_cached};
use serde::{Deserialize, Serialize};
use smidgen_formats::whole_file::write_whole;
use smidgen_recipe::DatasetName;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The branch with the Parquet files that the hub made, as `CONFIG/SPLIT/0000.parquet`.
const CONVERTED: &str = "refs/convert/parquet";
const DEFAULT_CONFIG: &str = "default";

/// Which split is taken if the name has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatasetUse {
    Train,
    Eval,
}

impl DatasetUse {
    /// The first that exists is taken.
    fn splits(self) -> &'static [&'static str] {
        match self {
            DatasetUse::Train => &["train"],
            DatasetUse::Eval => &["validation", "test"],
        }
    }
}

/// Finds the files of a data set, in order, and downloads missing ones if `access` allows it.
pub fn locate_dataset(
    name: &DatasetName,
    purpose: DatasetUse,
    access: &Access,
) -> Result<Vec<PathBuf>, HubError> {
    let cache = RepoCache::of(RepoKind::Dataset, &name.repo)?;
    let cached = revisions(name).into_iter().find_map(|revision| look_up(&cache, name, purpose, revision));
    match (access.fetch, cached) {
        (Fetch::WhenMissing | Fetch::Never { .. }, Some(files)) => Ok(files),
        (Fetch::Never { because }, None) => {
            let command = match (purpose, &name.split) {
                // Without a split in the name, `pull` takes the one to train on.
                (DatasetUse::Eval, None) => "`smidgen preview` with the same recipe".to_owned(),
                _ => format!("`smidgen pull --data {name}`"),
            };
            let what = format!("`{name}` is not in the cache `{}`", cache.root().display());
            Err(not_cached(what, because)
                .hint(format!("{command} downloads it on a machine with network access")))
        }
        (Fetch::WhenMissing, None) | (Fetch::Update, _) => fetch(&cache, name, purpose, access),
    }
}

/// The revisions that are tried, in order.
fn revisions(name: &DatasetName) -> Vec<&str> {
    match &name.revision {
        Some(revision) => vec![revision],
        None => vec![CONVERTED, "main"],
    }
}

/// A file in the list of a commit's files that is kept.
#[derive(Deserialize, Serialize)]
struct KnownFile {
    name: String,
    bytes: u64,
}

/// The files of a split if all of them are in the cache.
fn look_up(
    cache: &RepoCache,
    name: &DatasetName,
    purpose: DatasetUse,
    revision: &str,
) -> Option<Vec<PathBuf>> {
    let commit = cache.commit_of(revision)?;
    let snapshot = cache.snapshot(&commit);
    let known: Vec<KnownFile> = match std::fs::read(list_file(name, &commit)?) {
        Ok(bytes) => serde_json::from_slice(&bytes).ok()?,
        // Another program downloaded the snapshot and left no list of files.
        Err(_) => files_below(&snapshot),
    };
    let names: Vec<&str> = known.iter().map(|file| file.name.as_str()).collect();
    let chosen = choose(name, purpose, &names).ok()?;
    let is_cached = |file: &str| {
        let bytes = known.iter().find(|known| known.name == file).map(|known| known.bytes);
        snapshot.join(file).metadata().is_ok_and(|found| found.is_file() && Some(found.len()) == bytes)
    };
    let has_all = chosen.iter().all(|file| is_cached(file)) && are_all(&chosen);
    has_all.then(|| chosen.iter().map(|file| snapshot.join(file)).collect())
}

/// Where the list of a commit's files is kept.
fn list_file(name: &DatasetName, commit: &str) -> Option<PathBuf> {
    let folder = environment::own_cache().ok()?.join("datasets");
    Some(folder.join(format!("{}--{commit}.json", name.repo.replace('/', "--"))))
}

/// The Parquet files of a snapshot, up to three folders deep.
fn files_below(snapshot: &Path) -> Vec<KnownFile> {
    let mut files = Vec::new();
    let mut folders = vec![(snapshot.to_path_buf(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            match path.metadata() {
                Ok(found) if found.is_dir() && depth < 3 => folders.push((path, depth + 1)),
                Ok(found) if found.is_file() => {
                    let name = path.strip_prefix(snapshot).unwrap_or(&path).to_string_lossy().into_owned();
                    files.push(KnownFile { name, bytes: found.len() });
                }
                _ => {}
            }
        }
    }
    files.sort_by(|one, other| one.name.cmp(&other.name));
    files
}

/// Whether a split has as many files as their names say: two for `train-00000-of-00002.parquet`.
fn are_all(files: &[String]) -> bool {
    files.iter().all(|file| {
        let total = file.split_once("-of-").map(|(_, rest)| {
            rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<usize>()
        });
        total.is_none_or(|total| total.is_ok_and(|total| total == files.len()))
    })
}

fn fetch(
    cache: &RepoCache,
    name: &DatasetName,
    purpose: DatasetUse,
    access: &Access,
) -> Result<Vec<PathBuf>, HubError> {
    let client = HubClient::from_environment()?;
    let (mut missing, mut refused) = (None, None);
    for revision in revisions(name) {
        let repo = Repo { kind: RepoKind::Dataset, name: &name.repo, revision };
        let what = format!("the listing of `hf:{}`", name.repo);
        let listing = retry(&*access.start_progress(0), &what, || match client.list(&repo) {
            Err(RequestError::NoRevision(error)) => Ok(Err(error)),
            Err(error) => Err((error, 0)),
            Ok(listing) => Ok(Ok(listing)),
        })?;
        let listing = match listing {
            Ok(listing) => listing,
            Err(error) => {
                missing.get_or_insert(error);
                continue;
            }
        };
        let names: Vec<&str> = listing.files.iter().map(|file| file.name.as_str()).collect();
        let chosen = match choose(name, purpose, &names) {
            Ok(chosen) => chosen,
            Err(error) => {
                refused.get_or_insert(error);
                continue;
            }
        };
        let files: Vec<&RemoteFile> =
            listing.files.iter().filter(|file| chosen.contains(&file.name)).collect();
        Download { client: &client, cache, repo, shown: name, listing: &listing, access }.place(&files)?;
        keep_list(name, &listing.commit, &listing.files);
        let snapshot = cache.snapshot(&listing.commit);
        return Ok(chosen.iter().map(|file| snapshot.join(file)).collect());
    }
    // There is at least one revision, and each of them failed.
    let no_files = || HubError::data(format!("`{name}` has no Parquet files"));
    Err(refused.or(missing).unwrap_or_else(no_files))
}

/// Keeps the list of a commit's files. Without it, the next start makes a request, so errors are ignored.
fn keep_list(name: &DatasetName, commit: &str, files: &[RemoteFile]) {
    let Some(path) = list_file(name, commit) else { return };
    let known = files.iter().map(|file| KnownFile { name: file.name.clone(), bytes: file.bytes });
    let known: Vec<KnownFile> = known.collect();
    if let (Some(folder), Ok(json)) = (path.parent(), serde_json::to_vec(&known)) {
        let _ = std::fs::create_dir_all(folder);
        let _ = write_whole(&path, |file| file.write_all(&json));
    }
}

/// The files of the split that a name means, sorted.
fn choose(name: &DatasetName, purpose: DatasetUse, files: &[&str]) -> Result<Vec<String>, HubError> {
    let mut configs: BTreeMap<&str, BTreeMap<String, Vec<&str>>> = BTreeMap::new();
    for file in files {
        if let Some((config, split)) = part_of(file) {
            configs.entry(config).or_default().entry(split).or_default().push(file);
        }
    }
    if configs.is_empty() {
        return Err(HubError::data(format!("`{name}` has no Parquet files"))
            .hint("download its files, and name them in the recipe"));
    }
    let repo = &name.repo;
    let config = match (&name.config, configs.len()) {
        (Some(config), _) => config.as_str(),
        (None, 1) => configs.keys().next().copied().unwrap_or(DEFAULT_CONFIG),
        (None, _) => DEFAULT_CONFIG,
    };
    let Some(splits) = configs.get(config) else {
        let all = list_names(&configs.keys().collect::<Vec<_>>());
        let first = configs.keys().next().copied().unwrap_or_default();
        let what = match name.config {
            Some(_) => format!("`hf:{repo}` has no config `{config}`: it has {all}"),
            None => format!("`hf:{repo}` has several configs: {all}"),
        };
        return Err(HubError::data(what).hint(format!("choose one of them, such as `hf:{repo}/{first}`")));
    };
    let split = match (&name.split, splits.len()) {
        (Some(split), _) => Some(split.as_str()),
        (None, 1) => splits.keys().next().map(String::as_str),
        (None, _) => purpose.splits().iter().copied().find(|split| splits.contains_key(*split)),
    };
    if let Some(found) = split.and_then(|split| splits.get(split)) {
        let mut files: Vec<String> = found.iter().map(|file| (*file).to_owned()).collect();
        files.sort();
        return Ok(files);
    }
    let all = list_names(&splits.keys().collect::<Vec<_>>());
    let what = match split {
        Some(split) if splits.contains_key(&format!("partial-{split}")) => {
            return Err(HubError::data(format!(
                "the hub has only a part of `{split}` of `hf:{repo}` as Parquet"
            ))
            .hint(format!("`hf:{repo}/{config}:partial-{split}` is that part")));
        }
        Some(split) => format!("`hf:{repo}` has no split `{split}`: it has {all}"),
        None => format!("`hf:{repo}` has several splits: {all}"),
    };
    let first = splits.keys().next().cloned().unwrap_or_default();
    Err(HubError::data(what).hint(format!("choose one of them, such as `hf:{repo}:{first}`")))
}

/// Config and split of a file: `CONFIG/SPLIT/0000.parquet`, `CONFIG/train-00000-of-00002.parquet`, or
/// `data/train.parquet` for the default config.
fn part_of(file: &str) -> Option<(&str, String)> {
    let (folders, stem) = match file.strip_suffix(".parquet")?.rsplit_once('/') {
        Some((folders, stem)) => (folders, stem),
        None => ("", file.strip_suffix(".parquet")?),
    };
    if stem.chars().all(|sign| sign.is_ascii_digit()) {
        let (config, split) = folders.rsplit_once('/').unwrap_or((DEFAULT_CONFIG, folders));
        let config = config.rsplit('/').next().unwrap_or(config);
        return (!split.is_empty()).then(|| (config, split.to_owned()));
    }
    let split = match stem.split_once("-of-") {
        Some((before, _)) => {
            before.trim_end_matches(|sign: char| sign.is_ascii_digit()).trim_end_matches('-')
        }
        None => stem,
    };
    let config = match folders.rsplit('/').next() {
        None | Some("" | "data") => DEFAULT_CONFIG,
        Some(folder) => folder,
    };
    (!split.is_empty()).then(|| (config, split.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(name: &str, purpose: DatasetUse, files: &[&str]) -> Result<Vec<String>, String> {
        choose(&DatasetName::parse(name).unwrap(), purpose, files)
            .map_err(|error| format!("{error}\n{}", error.hints.join("\n")))
    }

    #[test]
    fn the_config_and_split_follow_from_a_file_name() {
        for (file, expected) in [
            ("default/train/0000.parquet", Some(("default", "train"))),
            ("en/partial-train/0001.parquet", Some(("en", "partial-train"))),
            ("data/train-00000-of-00002.parquet", Some(("default", "train"))),
            ("main/test-00000-of-00001-abcdef.parquet", Some(("main", "test"))),
            ("train.parquet", Some(("default", "train"))),
            ("validation/0000.parquet", Some(("default", "validation"))),
            ("README.md", None),
            ("0000.parquet", None),
        ] {
            let expected = expected.map(|(config, split)| (config, split.to_owned()));
            assert_eq!(part_of(file), expected, "{file}");
        }
    }

    #[test]
    fn a_name_chooses_a_config_and_a_split() {
        let one = ["default/test/0000.parquet", "default/train/0000.parquet", "default/train/0001.parquet"];
        assert_eq!(chosen("o/d", DatasetUse::Train, &one).unwrap(), one[1..]);
        assert_eq!(chosen("o/d", DatasetUse::Eval, &one).unwrap(), one[..1]);
        assert_eq!(chosen("o/d:train", DatasetUse::Eval, &one).unwrap(), one[1..]);
        let several = ["en/train/0000.parquet", "de/train/0000.parquet", "de/dev/0000.parquet"];
        assert_eq!(chosen("o/d/en", DatasetUse::Eval, &several).unwrap(), several[..1]);
        let said = chosen("o/d", DatasetUse::Train, &several).unwrap_err();
        assert!(said.contains("has several configs: `de`, `en`") && said.contains("`hf:o/d/de`"), "{said}");
        let said = chosen("o/d/fr", DatasetUse::Train, &several).unwrap_err();
        assert!(said.contains("has no config `fr`: it has `de`, `en`"), "{said}");
        let said = chosen("o/d/de:test", DatasetUse::Train, &several).unwrap_err();
        assert!(said.contains("has no split `test`: it has `dev`, `train`"), "{said}");
        let said = chosen("o/d/de", DatasetUse::Eval, &several).unwrap_err();
        assert!(said.contains("has several splits: `dev`, `train`"), "{said}");
        let part = ["default/partial-train/0000.parquet", "default/test/0000.parquet"];
        let said = chosen("o/d:train", DatasetUse::Train, &part).unwrap_err();
        assert!(said.contains("the hub has only a part of `train`"), "{said}");
        assert!(chosen("o/d", DatasetUse::Train, &["a.csv"]).unwrap_err().contains("no Parquet files"));
    }

    #[test]
    fn the_names_say_how_many_files_a_split_has() {
        let names = |names: &[&str]| are_all(&names.iter().map(|name| name.to_string()).collect::<Vec<_>>());
        assert!(names(&["d/train-00000-of-00001.parquet"]));
        assert!(!names(&["d/train-00000-of-00002.parquet"]));
        assert!(names(&["d/train/0000.parquet", "d/train/0001.parquet"]));
    }
}
