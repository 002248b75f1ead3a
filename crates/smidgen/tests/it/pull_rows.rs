//! Data sets of a hub on this machine: which files are fetched, that they are fetched once, and what is said otherwise.
//!
//! The rows are those of the committed Parquet files of tokens.

use crate::hub_server::{HubServer, commit_of_rows, hex_sha256};
use crate::pull::{Pulling, check_refused, ended_with};
use crate::scratch::fixture;
use std::path::PathBuf;

const CONVERTED: &str = "refs/convert/parquet";
const FOLDER: &str = "cache/hub/datasets--org--rows";

fn parquet() -> Vec<u8> {
    std::fs::read(fixture("data/tokens_lz4.parquet")).unwrap()
}

/// A hub whose data set has these files on these revisions.
fn hub(revisions: &[(&str, &[&str])]) -> Pulling {
    let pulling = Pulling::with(&[]);
    let file =
        |name: &&str| (name.to_string(), if name.ends_with("parquet") { parquet() } else { b"x".to_vec() });
    pulling.server.change(|shelf| {
        let revisions = revisions.iter();
        shelf.rows = revisions
            .map(|(revision, names)| (revision.to_string(), names.iter().map(file).collect()))
            .collect();
    });
    pulling
}

const SPLITS: [&str; 3] =
    ["default/test/0000.parquet", "default/train/0000.parquet", "default/train/0001.parquet"];

/// Revision or file of each request.
fn requested(server: &HubServer) -> Vec<String> {
    let requests = server.take_requests().into_iter().map(|request| request.path.replace("%2F", "/"));
    let last = |path: String| match path.split_once("/revision/") {
        Some((_, revision)) => revision.trim_end_matches("?blobs=true").to_owned(),
        None => path.splitn(7, '/').last().unwrap().to_owned(),
    };
    requests.map(last).collect()
}

fn train(data: &str) -> [String; 3] {
    ["train".to_owned(), "recipe.toml".to_owned(), format!("data.train={data}")]
}

fn run(pulling: &Pulling, data: &str, more: &[&str]) -> crate::scratch::Ended {
    let arguments = train(data);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    pulling.run(&arguments)
}

#[test]
fn a_split_is_fetched_once_and_then_used_without_a_call() {
    let pulling = hub(&[("main", &["README.md", "rows.csv"]), (CONVERTED, &SPLITS)]);
    let more = ["train.steps=1", "data.eval=hf:org/rows", "train.eval_every=1"];
    let ended = run(&pulling, "hf:org/rows", &more);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("downloading `hf:org/rows` at 1111111: "), "{}", ended.stderr);
    // Two files of one content are one download.
    let expected = [CONVERTED, "default/train/0000.parquet", CONVERTED];
    assert_eq!(requested(&pulling.server), expected);
    let scratch = &pulling.scratch;
    assert_eq!(scratch.text(&format!("{FOLDER}/refs/{CONVERTED}")), commit_of_rows(1));
    let file = scratch.path(&format!("{FOLDER}/snapshots/{}/default/train/0001.parquet", commit_of_rows(1)));
    let target = PathBuf::from(format!("../../../../blobs/{}", hex_sha256(&parquet())));
    assert_eq!(std::fs::read_link(&file).unwrap(), target);
    assert!(scratch.text("run/job.toml").contains("train = [\"hf:org/rows\"]\neval = [\"hf:org/rows\"]\n"));

    let mut command = pulling.command(&["preview", "recipe.toml", "data.train=hf:org/rows", "--json"]);
    let ended = ended_with(&mut command, "HF_HUB_OFFLINE", "1");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let shown: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(shown["rows"]["read"], 6);
    assert_eq!(requested(&pulling.server), [""; 0]);
}

#[test]
fn a_plan_fetches_nothing_and_says_what_does() {
    let pulling = hub(&[(CONVERTED, &SPLITS)]);
    let ended = pulling.run(&["plan", "recipe.toml", "data.train=hf:org/rows:train"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let words = [
        "planned without data (",
        "`hf:org/rows:train` is not in the cache `",
        "`smidgen preview` downloads it",
    ];
    assert!(words.iter().all(|word| ended.stdout.contains(word)), "{}", ended.stdout);
    assert_eq!(requested(&pulling.server), [""; 0]);
    let arguments = train("hf:org/rows:train");
    let mut command = pulling.command(&arguments.each_ref().map(String::as_str));
    let words = [
        "`data.train`: `hf:org/rows:train` is not in the cache `",
        "and nothing is downloaded: `HF_HUB_OFFLINE` is set",
        "hint: `smidgen pull --data hf:org/rows:train` downloads it",
    ];
    check_refused(&ended_with(&mut command, "HF_HUB_OFFLINE", "1"), 1, &words);
}

#[test]
fn a_download_that_breaks_off_is_continued() {
    let pulling = hub(&[(CONVERTED, &SPLITS)]);
    pulling.server.change(|shelf| shelf.cuts.push_back(300));
    let ended = run(&pulling, "hf:org/rows", &["train.steps=1"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let requests = pulling.server.take_requests();
    let ranges: Vec<Option<&str>> = requests.iter().map(|request| request.range.as_deref()).collect();
    assert_eq!(ranges, [None, None, Some("bytes=300-")]);
}

#[test]
fn a_repository_has_its_own_files_at_a_revision_and_where_none_are_converted() {
    let own: [&str; 2] = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"];
    let pulling = hub(&[("main", &own), ("v2", &["en/train.parquet", "de/train.parquet"])]);
    let ended = run(&pulling, "hf:org/rows", &["train.steps=1"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(requested(&pulling.server), [CONVERTED, "main", own[0]]);
    let ended = run(&pulling, "hf:org/rows@v2/en", &["train.steps=1", "output.dir=other"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // The bytes are in the cache already.
    assert_eq!(requested(&pulling.server), ["v2"]);
    let of_v2 = format!("{FOLDER}/snapshots/{}/en/train.parquet", commit_of_rows(1));
    assert!(pulling.scratch.exists(&of_v2) && !pulling.scratch.exists(&of_v2.replace("/en/", "/de/")));
}

#[test]
fn what_a_data_set_does_not_have_is_said_with_what_it_has() {
    let pulling = hub(&[("main", &["rows.csv"]), (CONVERTED, &SPLITS)]);
    for (name, code, words) in [
        (
            "hf:org/rows:dev",
            1,
            ["`data.train`: `hf:org/rows` has no split `dev`: it has `test`, `train`", "hint: choose"],
        ),
        ("hf:org/rows/en", 1, ["`hf:org/rows` has no config `en`: it has `default`", "hint: choose one"]),
        ("hf:org/rows@v9", 1, ["`hf:org/rows` has no revision `v9`", "hint: a revision is"]),
        ("hf:org/other", 1, ["no public data set `hf:org/other` found at `", "hint: check the name"]),
        (
            "hf:org/rows:",
            2,
            ["`data.train` must be a file", "hint: a data set on the hub is written `hf:org/name`"],
        ),
    ] {
        check_refused(&run(&pulling, name, &[]), code, &words);
    }
}

#[test]
fn a_data_set_is_pulled_by_its_own_name() {
    let pulling = hub(&[(CONVERTED, &SPLITS)]);
    let ended = pulling.run(&["pull", "--data", "hf:org/rows:train"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("`hf:org/rows:train`: 2 files, "), "{}", ended.stderr);
    assert_eq!(requested(&pulling.server), [CONVERTED, "default/train/0000.parquet"]);
    let ended = pulling.run(&["pull", "--data", "hf:org/rows:train", "--offline", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let shown: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(shown["files"].as_array().unwrap().len(), 2);
    assert!(shown["path"].as_str().unwrap().ends_with("/default/train"), "{shown}");
    assert_eq!(shown["files"][1], "0001.parquet");
    assert_eq!(requested(&pulling.server), [""; 0]);
    // A run finds what was pulled.
    let mut command = pulling.command(&["train", "recipe.toml", "data.train=hf:org/rows", "train.steps=1"]);
    assert_eq!(ended_with(&mut command, "HF_HUB_OFFLINE", "1").code, Some(0));
    let words = ["`hf:org/rows:test` is not in the cache `", "hint: `smidgen pull --data hf:org/rows:test`"];
    let evaluated = ["preview", "recipe.toml", "data.train=hf:org/rows:test"];
    let other = hub(&[(CONVERTED, &SPLITS)]);
    check_refused(&ended_with(&mut other.command(&evaluated), "HF_HUB_OFFLINE", "1"), 1, &words);
    let words = ["`org/rows` is not the name of a data set", "hint: a data set is `hf:org/name`"];
    check_refused(&pulling.run(&["pull", "--data", "org/rows"]), 2, &words);
}
