//! A hub of models on this machine: one repository over HTTP, with the faults that a test asks for.
//!
//! It answers as the real one does (listing with sizes and checksums, files with ranges, error codes in
//! headers) and writes down every request.

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

pub const REPO: &str = "org/tiny";
pub const ROWS: &str = "org/rows";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// What the server has and how it misbehaves.
#[derive(Default)]
pub struct Shelf {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Of the data set `org/rows`: by revision, which has a commit of its own.
    pub rows: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
    /// One after the other, for files over 1000 bytes: the bytes after which the connection ends.
    pub cuts: VecDeque<usize>,
    /// One after the other, for the weights: the bytes after which nothing more is sent, on an open connection.
    pub stalls: VecDeque<usize>,
    /// One after the other, for the weights: the bytes after which one byte is sent at a time, ten per second.
    pub trickles: VecDeque<usize>,
    /// Sends files from their beginning whatever is asked for.
    pub ignores_ranges: bool,
    /// Lists another checksum than the file has.
    pub lies_about: Option<String>,
    /// Status, `X-Error-Code` and `X-Error-Message` of every answer.
    pub refuses: Option<(u16, &'static str, &'static str)>,
    /// Sends files from another server, as the hub does with large ones.
    pub redirects_to: Option<String>,
}

pub struct HubServer {
    pub address: String,
    shelf: Arc<Mutex<Shelf>>,
    requests: Arc<Mutex<Vec<Request>>>,
}

pub fn hex_sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn git_id(bytes: &[u8]) -> String {
    let head = format!("blob {}\0", bytes.len());
    let sum = digest(&SHA1_FOR_LEGACY_USE_ONLY, &[head.as_bytes(), bytes].concat());
    sum.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Large files are stored by their SHA-256, small ones by git's id.
pub fn is_large(name: &str) -> bool {
    [".safetensors", ".gguf", ".parquet"].iter().any(|ending| name.ends_with(ending))
}

/// The commit of a revision of the data set: its number among them, forty times.
pub fn commit_of_rows(revision: usize) -> String {
    revision.to_string().repeat(40)
}

impl HubServer {
    pub fn start(files: &[(&str, Vec<u8>)]) -> HubServer {
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.clone())).collect();
        let shelf = Arc::new(Mutex::new(Shelf { files, ..Shelf::default() }));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = HubServer { address, shelf: shelf.clone(), requests: requests.clone() };
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shelf, requests) = (shelf.clone(), requests.clone());
                std::thread::spawn(move || answer(stream, &shelf, &requests));
            }
        });
        server
    }

    pub fn change(&self, change: impl FnOnce(&mut Shelf)) {
        change(&mut self.shelf.lock().unwrap());
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

/// One request a connection.
fn answer(stream: TcpStream, shelf: &Mutex<Shelf>, requests: &Mutex<Vec<Request>>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut request = Request { path, ..Request::default() };
    for line in lines {
        let line = line.ok()?;
        match line.split_once(": ") {
            Some((key, value)) if key.eq_ignore_ascii_case("range") => request.range = Some(value.to_owned()),
            Some((key, value)) if key.eq_ignore_ascii_case("authorization") => {
                request.token = Some(value.to_owned());
            }
            _ if line.is_empty() => break,
            _ => {}
        }
    }
    requests.lock().unwrap().push(request.clone());
    let (response, length, stall, trickle) = {
        let mut shelf = shelf.lock().unwrap();
        let (response, length) = respond(&request, &mut shelf);
        let is_weights = request.path.ends_with("/model.safetensors");
        let stall = if is_weights { shelf.stalls.pop_front() } else { None };
        let trickle = if is_weights { shelf.trickles.pop_front() } else { None };
        (response, length, stall, trickle)
    };
    let mut stream = stream;
    if let Some(sent) = stall {
        stream.write_all(&response[..sent.min(length)]).ok()?;
        // Until the client has had enough.
        let mut rest = [0];
        return std::io::Read::read(&mut stream, &mut rest).ok().map(drop);
    }
    if let Some(sent) = trickle {
        stream.write_all(&response[..sent.min(length)]).ok()?;
        return response[sent.min(length)..length].iter().try_for_each(|byte| {
            std::thread::sleep(std::time::Duration::from_millis(100));
            stream.write_all(&[*byte]).ok()
        });
    }
    stream.write_all(&response[..length]).ok()
}

/// The whole response, and how much of it is sent.
fn respond(request: &Request, shelf: &mut Shelf) -> (Vec<u8>, usize) {
    let whole = |head: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        let response = [head.as_bytes(), body].concat();
        let length = response.len();
        (response, length)
    };
    if let Some((status, code, message)) = shelf.refuses {
        return whole(&format!("{status} No\r\nX-Error-Code: {code}\r\nX-Error-Message: {message}"), b"");
    }
    let path = request.path.replace("%2F", "/");
    if let Some(revision) = path.strip_prefix(&format!("/api/models/{REPO}/revision/")) {
        return match revision.split('?').next() {
            Some("main" | "v1" | COMMIT) => whole("200 OK", listing(shelf).to_string().as_bytes()),
            _ => whole("404 Not Found\r\nX-Error-Code: RevisionNotFound", b""),
        };
    }
    if let Some(revision) = path.strip_prefix(&format!("/api/datasets/{ROWS}/revision/")) {
        let wanted = revision.split('?').next().unwrap_or_default();
        let found = shelf.rows.iter().enumerate().find(|(_, (name, _))| *name == wanted);
        return match found {
            Some((index, (_, files))) => {
                whole("200 OK", listing_of(ROWS, &commit_of_rows(index), files, None).to_string().as_bytes())
            }
            None => whole("404 Not Found\r\nX-Error-Code: RevisionNotFound", b""),
        };
    }
    let of_rows = shelf.rows.values().enumerate().find_map(|(index, files)| {
        let prefix = format!("/datasets/{ROWS}/resolve/{}/", commit_of_rows(index));
        files.get(path.strip_prefix(&prefix)?)
    });
    let file = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/"));
    let Some(body) = of_rows.or_else(|| shelf.files.get(file?)) else {
        return whole("404 Not Found\r\nX-Error-Code: RepoNotFound", b"");
    };
    if let Some(other) = &shelf.redirects_to {
        return whole(&format!("302 Found\r\nLocation: {other}{path}"), b"");
    }
    let begin = request.range.as_ref().filter(|_| !shelf.ignores_ranges).map(|range| {
        range.strip_prefix("bytes=").unwrap().strip_suffix('-').unwrap().parse::<usize>().unwrap()
    });
    let (head, body) = match begin {
        Some(begin) => {
            let (last, all) = (body.len() - 1, body.len());
            (format!("206 Partial\r\nContent-Range: bytes {begin}-{last}/{all}"), &body[begin..])
        }
        None => ("200 OK".to_owned(), &body[..]),
    };
    let (response, length) = whole(&head, body);
    let head_bytes = response.len() - body.len();
    match shelf.cuts.front() {
        Some(cut) if body.len() > 1000 => {
            let length = length.min(head_bytes + cut);
            shelf.cuts.pop_front();
            (response, length)
        }
        _ => (response, length),
    }
}

fn listing(shelf: &Shelf) -> Value {
    listing_of(REPO, COMMIT, &shelf.files, shelf.lies_about.as_ref())
}

fn listing_of(
    repo: &str,
    commit: &str,
    files: &BTreeMap<String, Vec<u8>>,
    lies_about: Option<&String>,
) -> Value {
    let sibling = |(name, bytes): (&String, &Vec<u8>)| {
        let lies = lies_about == Some(name);
        let shown: &[u8] = if lies { b"something else" } else { bytes };
        if is_large(name) {
            json!({
                "rfilename": name, "size": bytes.len(), "blobId": git_id(b"pointer"),
                "lfs": { "sha256": hex_sha256(shown), "size": bytes.len(), "pointerSize": 130 },
            })
        } else {
            json!({ "rfilename": name, "size": bytes.len(), "blobId": git_id(shown) })
        }
    };
    let siblings: Vec<Value> = files.iter().map(sibling).collect();
    json!({ "id": repo, "sha": commit, "private": false, "gated": false, "siblings": siblings })
}
