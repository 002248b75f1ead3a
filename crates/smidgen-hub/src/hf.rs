//! `hf:org/name[@revision][:FILE.gguf]`: found in the hub's cache, or downloaded into it.
//!
//! A complete model in the cache is used without a request. Otherwise the hub is asked once for the file list, missing
//! blobs are downloaded, and only when all of them are complete are they linked into the snapshot: a reader sees the
//! old state or the new one.

use crate::error::HubError;
use crate::hf_cache::{RepoCache, missing_files};
use crate::hf_choice::{Weights, choose_files, choose_gguf, is_tokenizer};
use crate::hf_client::{HubClient, RemoteFile, Repo, RepoKind};
use crate::hf_download::{Download, retry};
use crate::progress::Silent;
use crate::{Access, Fetch, Located, Want, model_not_cached};
use smidgen_formats::shard_index::read_weight_map;
use smidgen_recipe::HfName;
use std::collections::BTreeSet;
use std::path::Path;

pub fn locate(name: &HfName, want: Want, access: &Access) -> Result<Located, HubError> {
    let cache = RepoCache::of(RepoKind::Model, &name.repo)?;
    let cached = look_up(&cache, name, want);
    match (access.fetch, cached) {
        (Fetch::WhenMissing, Cached::Complete { located, has_tokenizer: true })
        | (Fetch::Never { .. }, Cached::Complete { located, .. }) => Ok(located),
        // Another program may have downloaded only the weights. The model may also have no tokenizer, or there may be
        // no network: the cached weights are used in both cases.
        (Fetch::WhenMissing, Cached::Complete { located, has_tokenizer: false }) => {
            Ok(fetch(&cache, name, want, access).unwrap_or(located))
        }
        (Fetch::Never { because }, Cached::Missing(files)) => {
            Err(model_not_cached(name, cache.root(), &files, because))
        }
        (Fetch::WhenMissing, Cached::Missing(_)) | (Fetch::Update, _) => fetch(&cache, name, want, access),
    }
}

enum Cached {
    Complete {
        located: Located,
        has_tokenizer: bool,
    },
    /// These files are missing; an empty list means all.
    Missing(Vec<String>),
}

fn look_up(cache: &RepoCache, name: &HfName, want: Want) -> Cached {
    let Some(commit) = cache.commit_of(name.revision_or_main()) else { return Cached::Missing(vec![]) };
    let snapshot = cache.snapshot(&commit);
    if !snapshot.is_dir() {
        return Cached::Missing(vec![]);
    }
    if let Some(file) = &name.file {
        let path = snapshot.join(file);
        return if path.is_file() {
            Cached::Complete { located: Located::GgufFile(path), has_tokenizer: true }
        } else {
            Cached::Missing(vec![file.clone()])
        };
    }
    match missing_files(&snapshot, want) {
        missing if missing.is_empty() => {
            let has_tokenizer = has_tokenizer(&snapshot);
            Cached::Complete { located: Located::Folder(snapshot), has_tokenizer }
        }
        missing => Cached::Missing(missing),
    }
}

fn has_tokenizer(snapshot: &Path) -> bool {
    let mut entries = std::fs::read_dir(snapshot).into_iter().flatten().flatten();
    entries.any(|entry| is_tokenizer(&entry.file_name().to_string_lossy()))
}

fn fetch(cache: &RepoCache, name: &HfName, want: Want, access: &Access) -> Result<Located, HubError> {
    let client = HubClient::from_environment()?;
    let repo = Repo { kind: RepoKind::Model, name: &name.repo, revision: name.revision_or_main() };
    let what = format!("the listing of `hf:{}`", name.repo);
    let listing =
        retry(&*access.start_progress(0), &what, || client.list(&repo).map_err(|error| (error, 0)))?;
    let download = Download { client: &client, cache, repo, shown: name, listing: &listing, access };
    if let Some(wanted) = &name.file {
        let file = choose_gguf(name, wanted, &listing.files)?;
        download.place(&[file])?;
        return Ok(Located::GgufFile(cache.snapshot(&listing.commit).join(wanted)));
    }
    let choice = choose_files(name, &listing.files)?;
    let mut files = choice.small;
    match (want, choice.weights) {
        (Want::Config, _) => {}
        (Want::Weights, Weights::Single(file)) => files.push(file),
        (Want::Weights, Weights::Sharded(index)) => {
            files.extend(shards(&download, index)?);
            files.push(index);
        }
    }
    download.place(&files)?;
    Ok(Located::Folder(cache.snapshot(&listing.commit)))
}

/// The shards of an index. The index itself is downloaded, but not yet linked.
fn shards<'a>(download: &Download<'a>, index: &RemoteFile) -> Result<Vec<&'a RemoteFile>, HubError> {
    let Download { cache, listing, repo, .. } = download;
    cache.make_folders(&listing.commit)?;
    download.fetch_blob(index, &Silent)?;
    let map = read_weight_map(&cache.blob(index.checksum.hex())).map_err(HubError::model)?;
    let shards: BTreeSet<String> = map.into_values().collect();
    let find = |shard: String| {
        listing.files.iter().find(|file| file.name == shard).ok_or_else(|| {
            HubError::model(format!(
                "`{}` of `hf:{}` names `{shard}`, but the repository does not have it",
                index.name, repo.name
            ))
        })
    };
    shards.into_iter().map(find).collect()
}
