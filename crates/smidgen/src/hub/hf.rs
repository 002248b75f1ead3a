//! `hf:org/name[@revision][:FILE.gguf]`: found in the hub's cache, or downloaded into it.
//!
//! A complete model in the cache is used without a request. Otherwise the hub is asked once for the file list, missing
//! blobs are downloaded, and only when all of them are complete are they linked into the snapshot: a reader sees the old
//! state or the new one.

use super::hf_cache::{RepoCache, lacking_files};
use super::hf_choice::{Weights, choose_files, choose_gguf, is_tokenizer};
use super::hf_client::{HubClient, Listing, RemoteFile, Repo, RepoKind};
use super::hf_download::{fetch_blob, is_whole, persist};
use super::meter::Meter;
use super::{Access, Fetch, Located, Want, not_cached};
use crate::failure::Failure;
use smidgen_formats::shard_index::read_weight_map;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::HfName;
use std::collections::BTreeSet;
use std::path::Path;

pub fn locate(name: &HfName, want: Want, access: &Access) -> Result<Located, Failure> {
    let cache = RepoCache::of(&name.repo)?;
    let cached = look_up(&cache, name, want);
    match (access.fetch, cached) {
        (Fetch::WhenMissing, Cached::Whole { located, has_tokenizer: true })
        | (Fetch::Never { .. }, Cached::Whole { located, .. }) => Ok(located),
        // Another program may have downloaded only the weights. The model may also have no tokenizer, or there may be no
        // network: the cached weights are used in both cases.
        (Fetch::WhenMissing, Cached::Whole { located, has_tokenizer: false }) => {
            Ok(fetch(&cache, name, want, access.quiet).unwrap_or(located))
        }
        (Fetch::Never { because }, Cached::Lacking(files)) => {
            Err(not_cached(name, cache.root(), &files, because))
        }
        (Fetch::WhenMissing, Cached::Lacking(_)) | (Fetch::Update, _) => {
            fetch(&cache, name, want, access.quiet)
        }
    }
}

enum Cached {
    Whole {
        located: Located,
        has_tokenizer: bool,
    },
    /// These files are missing; an empty list means all.
    Lacking(Vec<String>),
}

fn look_up(cache: &RepoCache, name: &HfName, want: Want) -> Cached {
    let Some(commit) = cache.commit_of(name.revision_or_main()) else { return Cached::Lacking(vec![]) };
    let snapshot = cache.snapshot(&commit);
    if !snapshot.is_dir() {
        return Cached::Lacking(vec![]);
    }
    if let Some(file) = &name.file {
        let path = snapshot.join(file);
        return match path.is_file() {
            true => Cached::Whole { located: Located::GgufFile(path), has_tokenizer: true },
            false => Cached::Lacking(vec![file.clone()]),
        };
    }
    match lacking_files(&snapshot, want) {
        lacking if lacking.is_empty() => {
            let has_tokenizer = has_tokenizer(&snapshot);
            Cached::Whole { located: Located::Folder(snapshot), has_tokenizer }
        }
        lacking => Cached::Lacking(lacking),
    }
}

fn has_tokenizer(snapshot: &Path) -> bool {
    let entries = std::fs::read_dir(snapshot).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| is_tokenizer(&entry.file_name().to_string_lossy()))
}

fn fetch(cache: &RepoCache, name: &HfName, want: Want, quiet: bool) -> Result<Located, Failure> {
    let client = HubClient::from_environment()?;
    let talk = Meter::new(0, quiet);
    let repo = Repo { kind: RepoKind::Model, name: &name.repo, revision: name.revision_or_main() };
    let what = format!("the listing of `hf:{}`", name.repo);
    let listing = persist(&talk, &what, || client.list(&repo).map_err(|trouble| (trouble, 0)))?;
    drop(talk);
    let fetch = Fetching { client: &client, cache, repo, shown: name, listing: &listing, quiet };
    if let Some(wanted) = &name.file {
        let file = choose_gguf(name, wanted, &listing.files)?;
        fetch.place(&[file])?;
        return Ok(Located::GgufFile(cache.snapshot(&listing.commit).join(wanted)));
    }
    let choice = choose_files(name, &listing.files)?;
    let mut files = choice.small;
    match (want, choice.weights) {
        (Want::Config, _) => {}
        (Want::Weights, Weights::Single(file)) => files.push(file),
        (Want::Weights, Weights::Sharded(index)) => {
            files.extend(fetch.shards(index)?);
            files.push(index);
        }
    }
    fetch.place(&files)?;
    Ok(Located::Folder(cache.snapshot(&listing.commit)))
}

/// Files of a repository on their way into the cache.
pub struct Fetching<'a> {
    pub client: &'a HubClient,
    pub cache: &'a RepoCache,
    pub repo: Repo<'a>,
    /// What is downloaded, for messages.
    pub shown: &'a dyn std::fmt::Display,
    pub listing: &'a Listing,
    pub quiet: bool,
}

impl<'a> Fetching<'a> {
    /// The shards of an index. The index itself is downloaded, but not yet linked.
    fn shards(&self, index: &RemoteFile) -> Result<Vec<&'a RemoteFile>, Failure> {
        self.cache.make_folders(&self.listing.commit)?;
        self.fetch_blobs(&[index], &Meter::new(0, true))?;
        let map = read_weight_map(&self.cache.blob(index.checksum.hex())).map_err(Failure::model)?;
        let shards: BTreeSet<String> = map.into_values().collect();
        let find = |shard: String| {
            self.listing.files.iter().find(|file| file.name == shard).ok_or_else(|| {
                let repo = self.repo.name;
                Failure::model(format!(
                    "`{}` of `hf:{repo}` names `{shard}`, but the repository does not have it",
                    index.name
                ))
            })
        };
        shards.into_iter().map(find).collect()
    }

    /// Downloads missing files, then links all of them and records the revision.
    pub fn place(&self, files: &[&RemoteFile]) -> Result<(), Failure> {
        let commit = &self.listing.commit;
        self.cache.make_folders(commit)?;
        let blob_missing = |file: &&&RemoteFile| !is_whole(&self.cache.blob(file.checksum.hex()), file.bytes);
        let missing: Vec<&RemoteFile> = files.iter().filter(blob_missing).copied().collect();
        if !missing.is_empty() {
            let total_bytes = missing.iter().map(|file| file.bytes).sum();
            let meter = Meter::new(total_bytes, self.quiet);
            meter.say(&format!(
                "downloading `{}` at {}: {} files, {}",
                self.shown,
                &commit[..7],
                missing.len(),
                format_bytes(total_bytes)
            ));
            self.fetch_blobs(&missing, &meter)?;
        }
        for file in files {
            self.cache.link(commit, &file.name, file.checksum.hex())?;
        }
        self.cache.write_ref(self.repo.revision, commit)
    }

    fn fetch_blobs(&self, files: &[&RemoteFile], meter: &Meter) -> Result<(), Failure> {
        for file in files {
            fetch_blob(self.client, self.cache, &self.repo, &self.listing.commit, file, meter)?;
        }
        Ok(())
    }
}
