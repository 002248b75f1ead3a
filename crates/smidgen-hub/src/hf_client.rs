//! Requests to the hub: the file list of a repository, and the bytes of one file from an offset on.
//!
//! The token is sent only to the scheme, host and port of the endpoint, never to the storage that a download is
//! redirected to. A connection on which nothing or very little arrives for a while is aborted
//! (`paced.rs`). Temporary errors (a broken connection,
//! a busy server) are separate from permanent ones (no such model, no access).
//! Everything that the hub states is checked before it becomes a path. Left out: uploads, retries.

use crate::environment;
use crate::error::HubError;
use crate::paced::Paced;
use serde::Deserialize;
use smidgen_formats::digest::{Checksum, is_hex};
use std::io::Read;
use std::time::Duration;
use ureq::http::{Response, StatusCode, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

/// Redirects of one request.
const MAX_REDIRECTS: usize = 8;
const CONNECT_WITHIN: Duration = Duration::from_secs(30);
/// A listing has about 300 bytes per file.
const MAX_LISTING_BYTES: u64 = 64_000_000;

pub struct HubClient {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// A repository at a revision.
#[derive(Clone, Copy, Debug)]
pub struct Repo<'a> {
    pub kind: RepoKind,
    /// `org/name`
    pub name: &'a str,
    pub revision: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepoKind {
    Model,
    Dataset,
}

impl RepoKind {
    /// What it is called in a sentence.
    fn noun(self) -> &'static str {
        match self {
            RepoKind::Model => "model",
            RepoKind::Dataset => "data set",
        }
    }

    /// The part of an address before the name.
    fn folder(self) -> &'static str {
        match self {
            RepoKind::Model => "",
            RepoKind::Dataset => "datasets/",
        }
    }

    /// As the hub's API and its cache write it.
    pub fn plural(self) -> &'static str {
        match self {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        }
    }

    fn error(self, message: String) -> HubError {
        match self {
            RepoKind::Model => HubError::model(message),
            RepoKind::Dataset => HubError::data(message),
        }
    }
}

/// A repository at one commit.
#[derive(Debug)]
pub struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

#[derive(Clone, Debug)]
pub struct RemoteFile {
    pub name: String,
    pub bytes: u64,
    pub checksum: Checksum,
}

/// The bytes of a file from an offset on.
pub struct Content {
    /// Offset of the first byte: the one asked for, or 0 if the server does not support ranges.
    pub offset: u64,
    pub reader: Box<dyn Read>,
}

pub enum RequestError {
    /// Another attempt may succeed.
    Temporary(HubError),
    /// The repository has no such branch, tag or commit.
    NoRevision(HubError),
    Final(HubError),
}

impl HubClient {
    pub fn from_environment() -> Result<HubClient, HubError> {
        let silence = environment::download_timeout();
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // Redirects are followed here, where it is known who may see the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_WITHIN))
            .timeout_recv_response(Some(silence))
            .timeout_per_read(Some(silence))
            .user_agent(concat!("smidgen/", env!("CARGO_PKG_VERSION")));
        if let Some(certificates) = read_certificates()? {
            config = config.tls_config(TlsConfig::builder().root_certs(certificates).build());
        }
        let endpoint = environment::hf_endpoint();
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(HubError::network(format!("`HF_ENDPOINT` is `{endpoint}`: not an http address")));
        }
        Ok(HubClient { agent: config.build().into(), endpoint, token: environment::hf_token() })
    }

    /// The files of a repository at a revision, with sizes and checksums.
    pub fn list(&self, repo: &Repo<'_>) -> Result<Listing, RequestError> {
        let revision = percent_encoded(repo.revision);
        let kind = repo.kind.plural();
        let url = format!("{}/api/{kind}/{}/revision/{revision}?blobs=true", self.endpoint, repo.name);
        let mut response = self.get(&url, None)?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(&response, repo, None));
        }
        let mut bytes = Vec::new();
        let body = Paced::new(response.body_mut().as_reader(), environment::download_timeout());
        let read = body.take(MAX_LISTING_BYTES).read_to_end(&mut bytes);
        read.map_err(|error| self.temporary(error.into()))?;
        let listing: ListingJson = serde_json::from_slice(&bytes).map_err(|error| {
            RequestError::Final(
                HubError::network(error)
                    .context(format!("`{}` does not answer like a model hub", self.endpoint)),
            )
        })?;
        self.check_listing(repo, listing).map_err(RequestError::Final)
    }

    /// Requests a file from `offset` on.
    pub fn open(
        &self,
        repo: &Repo<'_>,
        commit: &str,
        file: &RemoteFile,
        offset: u64,
    ) -> Result<Content, RequestError> {
        let path = percent_encoded(&file.name).replace("%2F", "/");
        let url = format!("{}/{}{}/resolve/{commit}/{path}", self.endpoint, repo.kind.folder(), repo.name);
        let response = self.get(&url, (offset > 0).then_some(offset))?;
        let offset = match response.status() {
            StatusCode::OK => 0,
            StatusCode::PARTIAL_CONTENT if range_begin(&response) == Some(offset) => offset,
            StatusCode::PARTIAL_CONTENT => {
                return Err(RequestError::Temporary(HubError::network(
                    "the server sent another range than requested",
                )));
            }
            _ => return Err(self.refusal(&response, repo, Some(&file.name))),
        };
        let body = response.into_body().into_reader();
        Ok(Content { offset, reader: Box::new(Paced::new(body, environment::download_timeout())) })
    }

    fn get(&self, url: &str, offset: Option<u64>) -> Result<Response<Body>, RequestError> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let response = self.request(&url, offset)?;
            let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            let location = response.headers().get("location").and_then(|value| value.to_str().ok());
            match location.filter(|_| is_redirect) {
                Some(location) => url = self.next_url(&url, location)?,
                None => return Ok(response),
            }
        }
        Err(RequestError::Final(HubError::network(format!("`{}` redirects in circles", self.endpoint))))
    }

    /// The address that a redirect leads to. It may be a path on the same server; from https it must stay https.
    fn next_url(&self, url: &str, location: &str) -> Result<String, RequestError> {
        let next = match (location.starts_with('/') && !location.starts_with("//"), Origin::of(url)) {
            (true, Some(origin)) => format!("{}://{}:{}{location}", origin.scheme, origin.host, origin.port),
            _ => location.to_owned(),
        };
        let scheme = |url: &str| Origin::of(url).map(|origin| origin.scheme);
        match (scheme(url).as_deref(), scheme(&next).as_deref()) {
            (_, Some("https")) | (Some("http"), Some("http")) => Ok(next),
            _ => Err(RequestError::Final(HubError::network(format!(
                "`{}` redirects to `{location}`, which is not an encrypted address",
                self.endpoint
            )))),
        }
    }

    /// One request, without following a redirect.
    fn request(&self, url: &str, offset: Option<u64>) -> Result<Response<Body>, RequestError> {
        let mut request = self.agent.get(url);
        let is_endpoint = Origin::of(url).is_some_and(|origin| Some(origin) == Origin::of(&self.endpoint));
        if let Some(token) = self.token.as_ref().filter(|_| is_endpoint) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(offset) = offset {
            request = request.header("Range", format!("bytes={offset}-"));
        }
        request.call().map_err(|error| match error {
            // The library's error would print the header, and with it the token.
            ureq::Error::Http(_) => RequestError::Final(
                HubError::network("the access token has invalid characters").hint(self.token_hint()),
            ),
            error => self.temporary(error),
        })
    }

    fn temporary(&self, error: ureq::Error) -> RequestError {
        let endpoint = &self.endpoint;
        RequestError::Temporary(match error {
            ureq::Error::HostNotFound => HubError::network(format!("`{endpoint}` was not found")),
            error => HubError::network(error).context(format!("`{endpoint}`")),
        })
    }

    fn token_hint(&self) -> String {
        let file = environment::hf_token_file();
        let file = file.map(|file| format!(", or write it to `{}`", file.display())).unwrap_or_default();
        format!("set `HF_TOKEN` to a token of yours from `{}/settings/tokens`{file}", self.endpoint)
    }

    /// The error for a status other than success.
    fn refusal(&self, response: &Response<Body>, repo: &Repo<'_>, file: Option<&str>) -> RequestError {
        let header = |key: &str| response.headers().get(key).and_then(|value| value.to_str().ok());
        let code = header("x-error-code").unwrap_or_default();
        let Repo { kind, name, revision } = *repo;
        let (status, repo, noun) = (response.status().as_u16(), format!("`hf:{name}`"), kind.noun());
        if matches!(status, 408 | 416 | 429 | 500..=599) {
            return RequestError::Temporary(HubError::network(format!(
                "`{}` answered with status {status}",
                self.endpoint
            )));
        }
        let error = match (status, code) {
            (_, "RevisionNotFound") => {
                return RequestError::NoRevision(
                    kind.error(format!("{repo} has no revision `{revision}`"))
                        .hint("a revision is a branch, a tag or a commit of the repository"),
                );
            }
            (_, "GatedRepo") | (403, _) => {
                let page = format!("{}/{}{name}", self.endpoint, kind.folder());
                let gated = HubError::network(format!("{repo} is gated: you do not have access"))
                    .hint(format!("request access at `{page}`"));
                gated.hint(match self.token {
                    Some(_) => {
                        format!("the token must belong to that account and allow reading gated {noun}s")
                    }
                    None => self.token_hint(),
                })
            }
            (401 | 404, "EntryNotFound") => {
                kind.error(format!("{repo} has no file `{}`", file.unwrap_or_default()))
            }
            (401 | 404, _) => match &self.token {
                Some(_) => kind
                    .error(format!("{noun} {repo} not found at `{}` with the current token", self.endpoint)),
                None => kind
                    .error(format!("no public {noun} {repo} found at `{}`", self.endpoint))
                    .hint(format!("check the name; for a private or gated {noun} {}", self.token_hint())),
            },
            _ => HubError::network(format!("`{}` answered with status {status} for {repo}", self.endpoint)),
        };
        RequestError::Final(match header("x-error-message") {
            Some(message) if !message.is_empty() => error.detail(format!("the hub says: {message}")),
            _ => error,
        })
    }

    /// Drops files that are never needed, and refuses a listing with a malformed commit, size or checksum.
    fn check_listing(&self, repo: &Repo<'_>, listing: ListingJson) -> Result<Listing, HubError> {
        let wrong = |what: String| {
            HubError::network(format!("the listing of `hf:{}` at `{}` {what}", repo.name, self.endpoint))
        };
        if !is_hex(&listing.sha, 40) {
            return Err(wrong(format!("has `{}` as its commit", listing.sha)));
        }
        let mut files = Vec::new();
        for file in listing.siblings {
            // No model or data set needs a name with unusual parts.
            let plain = |part: &str| smidgen_formats::shard_index::is_plain_file_name(part);
            if !file.rfilename.split('/').all(plain) {
                continue;
            }
            let checksum = match (&file.lfs, &file.blob_id) {
                (Some(lfs), _) => Checksum::sha256(&lfs.sha256),
                (None, Some(id)) => Checksum::git_blob(id),
                (None, None) => None,
            };
            let bytes = file.lfs.as_ref().map(|lfs| lfs.size).or(file.size);
            let (Some(checksum), Some(bytes)) = (checksum, bytes) else {
                return Err(wrong(format!("has no size and checksum for `{}`", file.rfilename)));
            };
            files.push(RemoteFile { name: file.rfilename, bytes, checksum });
        }
        Ok(Listing { commit: listing.sha, files })
    }
}

/// The token is sent only where the origin is that of the endpoint.
#[derive(Debug, PartialEq, Eq)]
struct Origin {
    scheme: String,
    host: String,
    port: u16,
}

impl Origin {
    /// `None` unless it is an http or https address.
    fn of(url: &str) -> Option<Origin> {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let default_port = match scheme.as_str() {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host()?.to_ascii_lowercase();
        Some(Origin { scheme, host, port: uri.port_u16().unwrap_or(default_port) })
    }
}

#[derive(Deserialize)]
struct ListingJson {
    sha: String,
    siblings: Vec<SiblingJson>,
}

#[derive(Deserialize)]
struct SiblingJson {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<LfsJson>,
}

#[derive(Deserialize)]
struct LfsJson {
    sha256: String,
    size: u64,
}

/// The first byte that `Content-Range: bytes BEGIN-END/TOTAL` announces.
fn range_begin(response: &Response<Body>) -> Option<u64> {
    let range = response.headers().get("content-range")?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(char::from(byte))
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

fn read_certificates() -> Result<Option<RootCerts>, HubError> {
    let Some((variable, path)) = environment::certificate_file() else { return Ok(None) };
    let unusable =
        |error: HubError| error.context(format!("`{variable}`")).hint("set it to a file of PEM certificates");
    let pem = std::fs::read(&path).map_err(|error| unusable(HubError::file("read", &path, error)))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| {
            unusable(HubError::network(error).context(format!("`{}` is not PEM", path.display())))
        })? {
            certificates.push(certificate);
        }
    }
    if certificates.is_empty() {
        Err(unusable(HubError::network(format!("`{}` has no certificate", path.display()))))
    } else {
        Ok(Some(certificates.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |one: &str, other: &str| Origin::of(one).unwrap() == Origin::of(other).unwrap();
        assert!(same("https://hub.example/a", "https://HUB.example:443/b?c"));
        assert!(!same("https://hub.example", "http://hub.example"));
        assert!(!same("https://hub.example", "https://hub.example:8443"));
        assert!(!same("https://hub.example", "https://cdn.hub.example"));
        assert!(!same("https://hub.example", "https://hub.example.evil"));
        assert!(
            ["ftp://hub.example", "/path", "hub.example", ""].iter().all(|url| Origin::of(url).is_none())
        );
    }

    #[test]
    fn redirects_stay_encrypted() {
        let endpoint = "https://hub.example".to_owned();
        let client = HubClient { agent: Agent::new_with_defaults(), endpoint, token: None };
        let next = |url: &str, location: &str| client.next_url(url, location).ok();
        assert_eq!(next("https://hub.example/a", "/b").unwrap(), "https://hub.example:443/b");
        assert_eq!(next("https://hub.example/a", "https://cdn.example/b").unwrap(), "https://cdn.example/b");
        assert_eq!(next("http://localhost:1/a", "http://localhost:2/b").unwrap(), "http://localhost:2/b");
        for location in ["http://hub.example/b", "//cdn.example/b", "file:///etc/passwd", "b"] {
            assert_eq!(next("https://hub.example/a", location), None, "{location}");
        }
    }
}
