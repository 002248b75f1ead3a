//! `smidgen pull hf:...` against a hub on this machine: what is fetched, kept, continued and refused.
//!
//! The cache is looked at from outside, in the layout of `huggingface_hub`; every test counts the requests.

use crate::hub_server::{COMMIT, HubServer, git_id, hex_sha256};
use crate::scratch::{Ended, Scratch};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;

const MODEL: &str = "hf:org/tiny";
const FOLDER: &str = "cache/hub/models--org--tiny";

/// A folder with a cache in it, a hub that has the tiny model, and the two brought together.
pub struct Pulling {
    pub scratch: Scratch,
    pub server: HubServer,
}

impl Pulling {
    fn new() -> Pulling {
        let scratch = Scratch::new();
        let (config, weights) = (scratch.read("model/config.json"), scratch.read("model/model.safetensors"));
        Pulling::with(&[
            ("README.md", b"# tiny".to_vec()),
            ("config.json", config),
            ("consolidated.safetensors", vec![1; 2000]),
            ("model.safetensors", weights),
            ("onnx/model.onnx", vec![2; 2000]),
            ("pytorch_model.bin", vec![3; 2000]),
            ("tokenizer.json", b"{}".to_vec()),
        ])
    }

    pub fn with(files: &[(&str, Vec<u8>)]) -> Pulling {
        Pulling { scratch: Scratch::new(), server: HubServer::start(files) }
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.scratch.command(arguments);
        for variable in std::env::vars_os().map(|(name, _)| name) {
            let name = variable.to_string_lossy().to_ascii_uppercase();
            let told = ["HF_", "HUGGING", "TRANSFORMERS_", "SSL_", "REQUESTS_", "CURL_", "SMIDGEN_", "XDG_"];
            if told.iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("_PROXY") {
                command.env_remove(variable);
            }
        }
        command.env_remove("HF_HUB_OFFLINE");
        command.env("HF_HOME", self.scratch.path("cache")).env("HF_ENDPOINT", &self.server.address);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ended {
        ended(self.command(arguments))
    }

    fn pull(&self) -> Ended {
        self.run(&["pull", MODEL])
    }

    #[track_caller]
    fn pull_refused(&self, code: i32, model: &str, words: &[&str]) -> String {
        let ended = self.run(&["pull", model]);
        check_refused(&ended, code, words);
        ended.stderr
    }

    fn snapshot(&self) -> PathBuf {
        self.scratch.path(&format!("{FOLDER}/snapshots/{COMMIT}"))
    }

    /// Names in the snapshot, sorted; none where there is no snapshot.
    fn snapshot_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.snapshot()).into_iter().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// What a cut download has left, in bytes.
    fn incomplete_bytes(&self) -> Vec<u64> {
        let blobs = std::fs::read_dir(self.scratch.path(&format!("{FOLDER}/blobs"))).into_iter().flatten();
        let blobs = blobs.map(|entry| entry.unwrap().path());
        let incomplete = blobs.filter(|path| path.to_string_lossy().ends_with(".incomplete"));
        incomplete.map(|path| path.metadata().unwrap().len()).collect()
    }

    /// The model is whole, and nothing else is in its place.
    #[track_caller]
    fn check_whole(&self) {
        assert_eq!(self.snapshot_names(), ["config.json", "model.safetensors", "tokenizer.json"]);
        for name in ["config.json", "model.safetensors"] {
            let found = std::fs::read(self.snapshot().join(name)).unwrap();
            assert!(found == self.scratch.read(&format!("model/{name}")), "{name} differs");
        }
        assert_eq!(self.incomplete_bytes(), [0_u64; 0]);
        assert_eq!(self.scratch.text(&format!("{FOLDER}/refs/main")), COMMIT);
    }

    fn requested(&self) -> Vec<String> {
        let prefix = format!("/org/tiny/resolve/{COMMIT}/");
        let name = |path: String| path.strip_prefix(&prefix).unwrap_or("listing").to_owned();
        self.server.take_requests().into_iter().map(|request| name(request.path)).collect()
    }
}

fn ended(mut command: Command) -> Ended {
    let output = command.output().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[track_caller]
pub fn check_refused(ended: &Ended, code: i32, words: &[&str]) {
    let said = &ended.stderr;
    assert_eq!(ended.code, Some(code), "{said}");
    assert!(said.lines().any(|line| line.starts_with("error: ")), "{said}");
    for word in words {
        assert!(said.contains(word), "not said: {word:?}: {said}");
    }
    assert_eq!(ended.stdout, "");
}

#[test]
fn a_model_is_fetched_once_and_then_used_without_a_call() {
    let pulling = Pulling::new();
    let ended = pulling.run(&["pull", MODEL, "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let said: Value = serde_json::from_str(&ended.stdout).unwrap();
    let bytes: usize = ["config.json", "model.safetensors"]
        .iter()
        .map(|name| pulling.scratch.read(&format!("model/{name}")).len())
        .sum();
    let expected = json!({
        "path": pulling.snapshot().to_str().unwrap(),
        "files": ["config.json", "model.safetensors", "tokenizer.json"],
        "bytes": bytes + 2,
    });
    assert_eq!(said, expected);
    assert!(ended.stderr.contains("downloading `hf:org/tiny` at 0123456: 3 files, "), "{}", ended.stderr);
    pulling.check_whole();
    assert_eq!(pulling.requested(), ["listing", "config.json", "tokenizer.json", "model.safetensors"]);

    // As `huggingface_hub` lays it out.
    for (name, sum) in [
        ("config.json", git_id(&pulling.scratch.read("model/config.json"))),
        ("model.safetensors", hex_sha256(&pulling.scratch.read("model/model.safetensors"))),
    ] {
        let target = std::fs::read_link(pulling.snapshot().join(name)).unwrap();
        assert_eq!(target, PathBuf::from(format!("../../blobs/{sum}")));
    }

    for arguments in [&["pull", MODEL][..], &["pull", MODEL, "--offline"], &["pull", "hf:org/tiny@main"]] {
        let ended = pulling.run(arguments);
        assert_eq!((ended.code, &*ended.stdout), (Some(0), ""), "{}", ended.stderr);
        assert!(ended.stderr.contains("3 files, ") && ended.stderr.lines().count() == 1, "{}", ended.stderr);
    }
    let quiet = pulling.run(&["pull", MODEL, "--quiet"]);
    assert_eq!((quiet.code, &*quiet.stdout, &*quiet.stderr), (Some(0), "", ""));
    let train = ["train", "recipe.toml", "model.path=hf:org/tiny", "train.steps=1", "--quiet"];
    let ended = pulling.run(&train);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let config = pulling.scratch.json("run/adapter/adapter_config.json");
    assert_eq!(config["base_model_name_or_path"], "org/tiny");
    assert_eq!(pulling.requested(), [""; 0]);

    let ended = pulling.run(&["pull", MODEL, "--update"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(pulling.requested(), ["listing"]);
    pulling.check_whole();
}

#[test]
fn a_plan_fetches_no_weights_and_training_does() {
    let pulling = Pulling::new();
    let plan = ["plan", "recipe.toml", "model.path=hf:org/tiny@v1"];
    let ended = pulling.run(&plan);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(pulling.requested(), ["listing", "config.json", "tokenizer.json"]);
    assert_eq!(pulling.run(&plan).code, Some(0));
    assert_eq!(pulling.requested(), [""; 0]);
    assert_eq!(pulling.snapshot_names(), ["config.json", "tokenizer.json"]);

    let mut command = pulling.command(&["train", "recipe.toml", "model.path=hf:org/tiny@v1"]);
    let words = [
        "`hf:org/tiny@v1` is in the cache `",
        "` without `model.safetensors`, and nothing is downloaded: `HF_HUB_OFFLINE` is set",
        "hint: `smidgen pull hf:org/tiny@v1` downloads it",
    ];
    check_refused(&ended_with(&mut command, "HF_HUB_OFFLINE", "1"), 1, &words);
    let train = ["train", "recipe.toml", "model.path=hf:org/tiny@v1", "train.steps=1"];
    let ended = pulling.run(&train);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(pulling.requested(), ["listing", "model.safetensors"]);
    assert_eq!(pulling.scratch.text(&format!("{FOLDER}/refs/v1")), COMMIT);
}

pub fn ended_with(command: &mut Command, variable: &str, value: &str) -> Ended {
    let output = command.env(variable, value).output().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn offline_calls_nothing_and_says_what_is_missing() {
    let pulling = Pulling::new();
    let words = [
        "`hf:org/tiny` is not in the cache `",
        "cache/hub`, and nothing is downloaded: `--offline` is given",
    ];
    check_refused(&pulling.run(&["pull", MODEL, "--offline"]), 1, &words);
    let ended = ended_with(&mut pulling.command(&["pull", MODEL]), "HF_HUB_OFFLINE", "true");
    check_refused(
        &ended,
        1,
        &["nothing is downloaded: `HF_HUB_OFFLINE` is set", "hint: `smidgen pull hf:org/tiny`"],
    );
    let ended = ended_with(&mut pulling.command(&["pull", MODEL, "--update"]), "HF_HUB_OFFLINE", "1");
    check_refused(&ended, 2, &["`--update` needs the network, and `HF_HUB_OFFLINE` is set"]);
    assert_eq!(pulling.requested(), [""; 0]);
    assert!(!pulling.scratch.exists("cache"));
}

#[test]
fn a_cut_download_goes_on_where_it_was_cut() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| shelf.cuts.extend([50_000, 0, 60_000]));
    let ended = pulling.pull();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("warning: the download of `model.safetensors` broke off after 48.83 KiB"),
        "{}",
        ended.stderr
    );
    pulling.check_whole();
    let ranges: Vec<Option<String>> =
        pulling.server.take_requests().into_iter().skip(3).map(|request| request.range).collect();
    let expected = [None, Some("bytes=50000-"), Some("bytes=50000-"), Some("bytes=110000-")];
    assert_eq!(ranges, expected.map(|range| range.map(str::to_owned)));
}

/// No byte for a while: the connection is given up, and the download goes on from there.
#[test]
fn a_stalled_download_goes_on_where_it_stalled() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| shelf.stalls.push_back(50_000));
    let ended = ended_with(&mut pulling.command(&["pull", MODEL]), "HF_HUB_DOWNLOAD_TIMEOUT", "1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("warning: the download of `model.safetensors` broke off"),
        "{}",
        ended.stderr
    );
    pulling.check_whole();
    let last = pulling.server.take_requests().pop().unwrap();
    assert!(last.range.is_some_and(|range| range != "bytes=0-"), "it starts over");
}

/// A byte now and then: the same, although the connection is never silent.
#[test]
fn a_trickling_download_goes_on_where_it_was_given_up() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| shelf.trickles.push_back(50_000));
    // The first window has the first part of the file.
    let ended = ended_with(&mut pulling.command(&["pull", MODEL]), "HF_HUB_DOWNLOAD_TIMEOUT", "1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let said = ended.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = "warning: the download of `model.safetensors` broke off after 48.";
    assert!(said.contains(words) && said.contains("less than 1 KiB/s for 1 s"), "{said}");
    pulling.check_whole();
    let last = pulling.server.take_requests().pop().unwrap();
    assert!(last.range.is_some_and(|range| range != "bytes=0-"), "it starts over");
}

#[test]
fn what_a_failed_run_has_fetched_serves_the_next_one() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| shelf.cuts.extend([70_000, 0, 0, 0, 0]));
    let words = ["cannot download `model.safetensors` of `hf:org/tiny`", "hint: run the same command again"];
    pulling.pull_refused(1, MODEL, &words);
    assert_eq!(pulling.incomplete_bytes(), [70_000]);
    assert_eq!(pulling.snapshot_names(), [""; 0], "nothing half-written is visible");
    assert!(!pulling.scratch.exists(&format!("{FOLDER}/refs/main")));
    pulling.server.take_requests();

    let ended = pulling.pull();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let last = pulling.server.take_requests().pop().unwrap();
    assert_eq!(last.range.as_deref(), Some("bytes=70000-"));
    pulling.check_whole();
}

#[test]
fn a_server_without_ranges_and_a_damaged_part_are_started_over() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| {
        shelf.cuts.push_back(50_000);
        shelf.ignores_ranges = true;
    });
    assert_eq!(pulling.pull().code, Some(0));
    pulling.check_whole();

    let pulling = Pulling::new();
    let sum = hex_sha256(&pulling.scratch.read("model/model.safetensors"));
    let part = format!("{FOLDER}/blobs/{sum}.smidgen.incomplete");
    pulling.scratch.write(&part, vec![9; 5000]);
    let ended = pulling.pull();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("is damaged: downloading it again"), "{}", ended.stderr);
    pulling.check_whole();
    std::fs::remove_dir_all(pulling.scratch.path("cache")).unwrap();
    pulling.scratch.write(&part, vec![9; 500_000]);
    assert_eq!(pulling.pull().code, Some(0), "a part longer than the file");
    pulling.check_whole();
}

#[test]
fn a_file_that_is_not_what_the_hub_lists_is_thrown_away() {
    for name in ["model.safetensors", "config.json"] {
        let pulling = Pulling::new();
        pulling.server.change(|shelf| shelf.lies_about = Some(name.to_owned()));
        let kind = if name == "config.json" { "git id" } else { "sha256" };
        let words =
            [&*format!("`{name}` of `hf:org/tiny` arrived damaged: its {kind} is "), ", the hub says "];
        pulling.pull_refused(1, MODEL, &words);
        assert_eq!(pulling.snapshot_names(), [""; 0]);
        assert_eq!(pulling.incomplete_bytes(), [0_u64; 0]);
        pulling.server.change(|shelf| shelf.lies_about = None);
        assert_eq!(pulling.pull().code, Some(0));
        pulling.check_whole();
    }
}

#[test]
fn no_access_no_model_no_revision() {
    let pulling = Pulling::new();
    let refuse = |status, code, message| {
        pulling.server.change(|shelf| shelf.refuses = Some((status, code, message)));
    };
    refuse(401, "GatedRepo", "Access to model org/tiny is restricted.");
    let words = [
        "error: `hf:org/tiny` is gated: you do not have access",
        "the hub says: Access to model org/tiny is restricted.",
        "hint: request access at `http",
        "hint: set `HF_TOKEN` to a token of yours",
        "cache/token`",
    ];
    pulling.pull_refused(1, MODEL, &words);
    let mut command = pulling.command(&["pull", MODEL]);
    let ended = ended_with(&mut command, "HF_TOKEN", "hf_secret");
    check_refused(&ended, 1, &["is gated", "hint: the token must belong to that account"]);
    assert!(!ended.stderr.contains("hf_secret"));
    refuse(403, "", "");
    pulling.pull_refused(1, MODEL, &["`hf:org/tiny` is gated"]);
    refuse(401, "RepoNotFound", "Repository not found");
    pulling.pull_refused(1, MODEL, &["no public model `hf:org/tiny` found at `http", "private or gated"]);
    refuse(404, "", "");
    pulling.pull_refused(1, MODEL, &["no public model `hf:org/tiny`"]);
    refuse(418, "", "");
    pulling.pull_refused(1, MODEL, &["answered with status 418 for `hf:org/tiny`"]);
    pulling.server.change(|shelf| shelf.refuses = None);
    pulling.pull_refused(1, "hf:org/tiny@v9", &["`hf:org/tiny` has no revision `v9`", "hint: a revision is"]);
    pulling.pull_refused(1, "hf:org/other", &["no public model `hf:org/other`"]);
    pulling.pull_refused(
        2,
        "hf:org/../x",
        &["`hf:org/../x` is not the name of a model", "hint: a model is `hf:org/name`"],
    );
    assert!(!pulling.scratch.exists("cache/hub"), "nothing is written for a model that is not there");
    refuse(503, "", "");
    pulling.pull_refused(
        1,
        MODEL,
        &["warning: ", "attempt 5 of 5", "cannot download the listing of `hf:org/tiny`"],
    );
}

#[test]
fn a_hub_that_is_not_there() {
    let pulling = Pulling::new();
    // Bound and closed again: nobody listens.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut command = pulling.command(&["pull", MODEL]);
    let ended = ended_with(&mut command, "HF_ENDPOINT", &format!("http://{address}/"));
    check_refused(&ended, 1, &["cannot download the listing of `hf:org/tiny`: `http://127.0.0.1:"]);
    let ended = ended_with(&mut pulling.command(&["pull", MODEL]), "HF_ENDPOINT", "ftp://x");
    check_refused(&ended, 1, &["`HF_ENDPOINT` is `ftp://x`: not an http address"]);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let pulling = Pulling::new();
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("config.json", pulling.scratch.read("model/config.json")),
        ("model.safetensors", pulling.scratch.read("model/model.safetensors")),
        ("tokenizer.json", b"{}".to_vec()),
    ];
    let storage = HubServer::start(&files);
    storage.change(|shelf| shelf.cuts.push_back(50_000));
    // The same host, another port.
    pulling.server.change(|shelf| shelf.redirects_to = Some(storage.address.clone()));
    pulling.scratch.write("my-token", "hf_from_file\n");
    let mut command = pulling.command(&["pull", MODEL]);
    let ended = ended_with(&mut command, "HF_TOKEN_PATH", pulling.scratch.path("my-token").to_str().unwrap());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    pulling.check_whole();
    let sent = pulling.server.take_requests();
    assert!(sent.iter().all(|request| request.token.as_deref() == Some("Bearer hf_from_file")), "{sent:?}");
    let sent = storage.take_requests();
    assert!(sent.iter().all(|request| request.token.is_none()), "{sent:?}");
    assert_eq!(sent.last().unwrap().range.as_deref(), Some("bytes=50000-"));
}

#[test]
fn shards_come_by_their_index() {
    let scratch = Scratch::new();
    let weights = scratch.read("model/model.safetensors");
    let index = json!({ "metadata": {}, "weight_map": { "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors" } });
    let pulling = Pulling::with(&[
        ("config.json", scratch.read("model/config.json")),
        ("consolidated.00.safetensors", weights.clone()),
        ("model-00001-of-00002.safetensors", weights[..90_000].to_vec()),
        ("model-00002-of-00002.safetensors", weights[90_000..].to_vec()),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("tokenizer.model", b"x".to_vec()),
    ]);
    pulling.server.change(|shelf| shelf.cuts.extend([1000, 0, 0, 0, 0]));
    pulling.pull_refused(1, MODEL, &["`model-00001-of-00002.safetensors` of `hf:org/tiny`"]);
    assert_eq!(pulling.snapshot_names(), [""; 0], "an index without its shards would be no model");
    let ended = pulling.pull();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ];
    assert_eq!(pulling.snapshot_names(), names);
    pulling.requested();
    assert_eq!(pulling.pull().code, Some(0));
    assert_eq!(pulling.requested(), [""; 0]);
    // A shard that is gone is fetched again, and alone.
    let shard = std::fs::canonicalize(pulling.snapshot().join(names[1])).unwrap();
    std::fs::remove_file(shard).unwrap();
    check_refused(
        &pulling.run(&["pull", MODEL, "--offline"]),
        1,
        &["without `model-00001-of-00002.safetensors`"],
    );
    assert_eq!(pulling.pull().code, Some(0));
    assert_eq!(pulling.requested(), ["listing", names[1]]);
}

#[test]
fn a_repository_of_gguf_files_wants_a_name() {
    let pulling = Pulling::with(&[
        ("README.md", vec![]),
        ("q/t-Q4_0.gguf", vec![4; 3000]),
        ("t-Q8_0.gguf", vec![8; 3000]),
    ]);
    let words = [
        "`hf:org/tiny` has only .gguf files: `q/t-Q4_0.gguf`, `t-Q8_0.gguf`",
        "hint: choose one of them, such as `hf:org/tiny:q/t-Q4_0.gguf`",
    ];
    pulling.pull_refused(1, MODEL, &words);
    pulling.pull_refused(1, "hf:org/tiny:x.gguf", &["has no file `x.gguf`", "hint: it has `q/t-Q4_0.gguf`"]);
    for (file, byte) in [("t-Q8_0.gguf", 8), ("q/t-Q4_0.gguf", 4)] {
        let ended = pulling.run(&["pull", &format!("{MODEL}:{file}"), "--json"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let said: Value = serde_json::from_str(&ended.stdout).unwrap();
        let path = said["path"].as_str().unwrap();
        assert!(path.ends_with(file) && std::fs::read(path).unwrap() == [byte; 3000], "{path}");
        assert_eq!(said["bytes"], 3000);
    }
    pulling.requested();
    assert_eq!(pulling.run(&["pull", "hf:org/tiny:q/t-Q4_0.gguf"]).code, Some(0));
    assert_eq!(pulling.requested(), [""; 0]);
}

#[test]
fn two_processes_that_pull_one_model_fetch_it_once() {
    let pulling = Pulling::new();
    pulling.server.change(|shelf| shelf.cuts.extend([40_000, 40_000]));
    let spawn = || pulling.command(&["pull", MODEL]).spawn().unwrap();
    let children = [spawn(), spawn(), spawn()];
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    pulling.check_whole();
    let requests = pulling.server.take_requests();
    let whole = requests
        .iter()
        .filter(|request| request.path.ends_with("model.safetensors") && request.range.is_none());
    assert_eq!(whole.count(), 1, "{requests:?}");
}

#[test]
fn a_disk_that_takes_no_more_is_no_half_model() {
    let pulling = Pulling::new();
    // 64 blocks of 512 bytes: the write of a larger file fails, as on a full disk.
    let program = pulling.command(&["pull", MODEL]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' 25; ulimit -f 64; exec \"$0\" pull hf:org/tiny"]).arg(program.get_program());
    shell.current_dir(pulling.scratch.root());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let refused = ended(shell);
    let words = [".incomplete`: ", " of 186.50 KiB of `model.safetensors` downloaded"];
    check_refused(&refused, 1, &words);
    assert_eq!(pulling.snapshot_names(), [""; 0]);
    assert_eq!(pulling.pull().code, Some(0));
    pulling.check_whole();
}

#[test]
fn models_by_their_path() {
    let pulling = Pulling::new();
    let ended = pulling.run(&["pull", "model", "--json"]);
    let said: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(said["files"], json!(["config.json", "model.safetensors"]));
    pulling.pull_refused(1, "absent", &["the model folder `", "absent` does not exist"]);
    pulling.pull_refused(1, "absent.gguf", &["the model file `", "absent.gguf` does not exist"]);
    pulling.pull_refused(2, "https://x.org/m", &["`https://x.org/m` is not the name of a model"]);
    assert_eq!(pulling.requested(), [""; 0]);
}
