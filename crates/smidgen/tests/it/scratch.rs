//! A folder to run the program in: a tiny model, its data and a recipe, gone when the test ends.
//!
//! Every run states its budget and its threads, so that what is printed does not depend on the machine.
//! Leaves out what a test asserts, but for the one shape that all refusals share.

use serde_json::Value;
use smidgen::internal::fold;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The recipe of every test; overrides say what a test is about.
pub const RECIPE: &str = r#"[model]
path = "model"
compute = "f32"

[adapter]
rank = 4
alpha = 8

[data]
train = "data.jsonl"
format = "tokens"
max_tokens = 64

[train]
batch = 4
steps = 6
lr = 1e-2
seed = 7

[memory]
device = "cpu"
threads = 2
budget = "64MiB"

[output]
dir = "run"
"#;

pub struct Scratch {
    folder: tempfile::TempDir,
    /// Outside, because what a refused command leaves in it is not the user's.
    cache: tempfile::TempDir,
}

/// How a run of the program ended.
pub struct Ended {
    /// `None` where a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A committed fixture: a model, an adapter, data and what PyTorch made of them.
pub fn fixture(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(case)
}

impl Scratch {
    /// Two layers, f32, 211 tokens of vocabulary, ten rows of data of up to 40 tokens.
    pub fn new() -> Scratch {
        Scratch::of("llama-gqa-tied")
    }

    /// A copy of a fixture (`model/`, `adapter/`, `data.jsonl`, `expected.json`) and `recipe.toml`.
    pub fn of(case: &str) -> Scratch {
        let scratch = Scratch { folder: tempfile::tempdir().unwrap(), cache: tempfile::tempdir().unwrap() };
        copy_folder(&fixture(case), scratch.root());
        scratch.write("recipe.toml", RECIPE);
        scratch
    }

    pub fn root(&self) -> &Path {
        self.folder.path()
    }

    /// Where the program keeps what it can make again.
    pub fn cache(&self) -> &Path {
        self.cache.path()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    pub fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// Rows of arbitrary tokens, all supervised.
    pub fn write_rows(&self, name: &str, rows: usize, tokens: usize) {
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (random >> 33) % 211
        };
        let ids = |_| std::iter::repeat_with(&mut next).take(tokens).collect::<Vec<u64>>();
        let lines: Vec<String> =
            (0..rows).map(ids).map(|ids| format!("{{\"input_ids\":{ids:?}}}\n")).collect();
        self.write(name, lines.concat());
    }

    /// Steps of the checkpoints in a run folder, ascending.
    pub fn checkpoints(&self, output: &str) -> Vec<u64> {
        let entries = std::fs::read_dir(self.path(output)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut steps: Vec<u64> = names
            .filter_map(|name| name.strip_prefix("checkpoint-").map(|step| step.parse().unwrap()))
            .collect();
        steps.sort();
        steps
    }

    /// Makes a finished run look like one that was killed after a checkpoint: its result and the later ones go.
    pub fn forget_end(&self, output: &str, step: u64) {
        for name in ["adapter", "model"].map(|name| format!("{output}/{name}")) {
            if self.exists(&name) {
                std::fs::remove_dir_all(self.path(&name)).unwrap();
            }
        }
        for later in self.checkpoints(output).into_iter().filter(|own| *own > step) {
            std::fs::remove_dir_all(self.path(&format!("{output}/checkpoint-{later}"))).unwrap();
        }
    }

    /// Makes a checkpoint look like one of an older program, whose files a test may change.
    pub fn forget_checksums(&self, folder: &str) {
        std::fs::remove_file(self.path(&format!("{folder}/SHA256SUMS"))).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).unwrap()
    }

    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap()
    }

    /// Changes a JSON file of the folder.
    pub fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut value = self.json(name);
        edit(&mut value);
        self.write(name, value.to_string());
    }

    /// Every file of the folder with its bytes.
    pub fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        collect_files(self.root(), &mut files);
        files
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_smidgen"));
        // What is said stays in one line, so that tests can look for it; `words.rs` holds lines to 80 columns.
        command.env("COLUMNS", "10000");
        command.args(arguments).current_dir(self.root()).stdin(Stdio::null());
        // No test calls a server but its own.
        command.env("HF_HUB_OFFLINE", "1").env("SMIDGEN_CACHE", self.cache());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Ended {
        let output = self.command(arguments).output().unwrap();
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The same, with the peak of its memory as the kernel shows it to others; none where there is no `/proc`.
    pub fn run_measured(&self, arguments: &[&str]) -> (Ended, Option<u64>) {
        let names = ["stdout", "stderr"].map(|name| self.cache().join(name));
        let [stdout, stderr] = names.each_ref().map(|name| std::fs::File::create(name).unwrap());
        let mut child = self.command(arguments).stdout(stdout).stderr(stderr).spawn().unwrap();
        let mut peak_bytes = None;
        let status = loop {
            peak_bytes = peak_bytes.max(read_peak(child.id()));
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        };
        let [stdout, stderr] = names.map(|name| std::fs::read_to_string(name).unwrap());
        (Ended { code: status.code(), stdout, stderr }, peak_bytes)
    }

    /// Starts the program and lets it talk to nobody.
    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// `train` with overrides; it has to succeed.
    pub fn train(&self, output: &str, overrides: &[&str]) -> Ended {
        let dir = format!("output.dir={output}");
        let ended = self.run(&[&["train", "recipe.toml", &dir][..], overrides].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended
    }

    /// `train` with overrides; it has to succeed, and to take what its plan says.
    pub fn train_measured(&self, output: &str, overrides: &[&str]) {
        let dir = format!("output.dir={output}");
        let arguments = [&["train", "recipe.toml", &dir][..], overrides].concat();
        let (ended, peak_bytes) = self.run_measured(&arguments);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let planned = self.json(&format!("{output}/plan.json"))["peak_bytes"].as_u64().unwrap();
        assert_as_planned(planned, peak_bytes, &arguments.join(" "));
    }

    /// `plan --json` with overrides, whether it fits or not.
    pub fn plan(&self, overrides: &[&str]) -> Value {
        let ended = self.run(&[&["plan", "recipe.toml", "--json"][..], overrides].concat());
        serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr))
    }

    /// The final adapter of a run, byte for byte.
    pub fn adapter(&self, output: &str) -> Vec<u8> {
        self.read(&format!("{output}/adapter/adapter_model.safetensors"))
    }

    /// Rows of `metrics.jsonl`.
    pub fn metrics(&self, output: &str) -> Vec<Value> {
        let text = self.text(&format!("{output}/metrics.jsonl"));
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The losses of all optimizer steps, in order.
    pub fn losses(&self, output: &str) -> Vec<f64> {
        self.metrics(output).iter().filter_map(|row| row.get("loss")?.as_f64()).collect()
    }

    /// Text without what differs from machine to machine: this folder, speeds and measured losses.
    pub fn neutral(&self, text: &str) -> String {
        let text = text.replace(&*self.root().to_string_lossy(), "FOLDER");
        let replace = |text: String, pattern: &str, with: &str| {
            regex::Regex::new(pattern).unwrap().replace_all(&text, with).into_owned()
        };
        // What forms products is the machine's.
        let text = text.replace("f32 (AMX)", "f32").replace("`cpu-amx`", "`cpu`");
        let text = replace(text, r"\d+ tok/s", "N tok/s");
        let text = replace(text, r" mem \d+\.\d+/", " mem N/");
        let text = replace(text, r" eta \w+", " eta N");
        let text = replace(text, r"[\d.]+ m?s per step, \d+ tokens/s", "N ms per step, N tokens/s");
        let text = replace(text, r"per epoch: .* without evaluations", "per epoch: N without evaluations");
        let text = replace(text, r"loss \d+\.\d{4}( to \d+\.\d{4})?", "loss X");
        let text = replace(text, r"memory: peak .*", "memory: N");
        replace(text, r"free \d+\.\d+ [KMGT]iB", "free N GiB")
    }

    /// Runs a command that has to be refused: the exit code, an `error:` that holds all of `words`, nothing
    /// on stdout, and not a file made or changed.
    pub fn refused(&self, code: i32, arguments: &[&str], words: &[&str]) -> String {
        let before = self.files();
        let ended = self.run(arguments);
        let said = &ended.stderr;
        assert_eq!(ended.code, Some(code), "{arguments:?}: {said}");
        assert!(said.starts_with("error: "), "{said}");
        for word in words {
            assert!(said.contains(word), "{arguments:?} does not say {word:?}: {said}");
        }
        assert_eq!(ended.stdout, "");
        assert_fits(&fold(said, 80), 80);
        assert!(self.files() == before, "{arguments:?} changed files");
        assert!(before.keys().any(|path| path.starts_with(self.path("run"))) || !self.exists("run"));
        ended.stderr
    }

    /// `train` with overrides that has to be refused.
    pub fn train_refused(&self, code: i32, overrides: &[&str], words: &[&str]) -> String {
        self.refused(code, &[&["train", "recipe.toml"][..], overrides].concat(), words)
    }
}

/// The highest resident memory of a process so far.
fn read_peak(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// The rule on a CPU: never above the plan, and below it by at most 3 % or 32 MiB.
pub fn assert_as_planned(planned: u64, measured: Option<u64>, run: &str) {
    let Some(measured) = measured else {
        let is_measurable = cfg!(target_os = "linux");
        assert!(!is_measurable, "{run}: there is no measurement");
        eprintln!("skipped: this system does not say how much memory a process takes");
        return;
    };
    assert!(measured <= planned, "{run}: {} bytes above its plan of {planned}", measured - planned);
    let allowed = (3 * planned / 100).max(32 << 20);
    assert!(planned - measured <= allowed, "{run}: {} bytes below its plan of {planned}", planned - measured);
}

/// Every line is as wide as a terminal or one long word, such as a path, and ends in no space.
pub fn assert_fits(text: &str, width: usize) {
    for line in text.lines() {
        let longest = line.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0);
        let length = line.chars().count();
        // A long word goes to a line of its own, with what is in front of it.
        assert!(length <= width || longest > width / 2, "{length} columns: {line:?}\n{text}");
        assert_eq!(line, line.trim_end(), "ends in spaces:\n{text}");
        assert!(!line.contains(['\x1b', '\t', '\r']), "{line:?}");
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display())) {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            // A new file, so that a copy of a read-only file can be changed.
            std::fs::write(target, std::fs::read(entry.path()).unwrap()).unwrap();
        }
    }
}

fn collect_files(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_files(&path, files)
        } else {
            drop(files.insert(path.clone(), std::fs::read(&path).unwrap()))
        }
    }
}
