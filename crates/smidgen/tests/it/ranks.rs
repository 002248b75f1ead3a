//! Several ranks, as people start them: the losses of one process, exact resume, and an end for all when one dies.
//!
//! Ranks here are CPU ranks over a real MPI. Without an `mpiexec` these tests say what they skip; where
//! `SMIDGEN_REQUIRE_MPI=1` is set, as in the gate, a missing one is a failure.
//! `SMIDGEN_RANK_KILLS=50` kills a rank that often, half of it with divided weights.

use crate::scratch::{RECIPE, Scratch};
use crate::speech::{self, ENCODER};
use serde_json::Value;
use smidgen::internal::find_mpiexec;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any run here, also beside other tests.
const LIMIT: Duration = Duration::from_secs(180);

const COMMON: &[&str] = &["memory.threads=1", "memory.budget=256MiB", "train.steps=20", "train.log_every=0"];

/// Whether ranks can be started; says so where not.
fn has_mpi() -> bool {
    match find_mpiexec() {
        Ok(_) => true,
        Err(error) if std::env::var("SMIDGEN_REQUIRE_MPI").is_ok_and(|value| value == "1") => {
            panic!("ranks are to be tested, and there is no MPI: {error}")
        }
        Err(error) => {
            eprintln!("skipped: ranks over MPI ({error})");
            false
        }
    }
}

/// A run of several ranks, which ends all of its processes when it is dropped.
struct Ranks {
    launcher: Child,
    /// In the command line of every process of the run, and of no other.
    mark: String,
}

impl Ranks {
    fn start(scratch: &Scratch, output: &str, ranks: usize, arguments: &[&str]) -> Ranks {
        let mark = format!("output.dir={}", scratch.path(output).display());
        let count = ranks.to_string();
        let mut all = vec!["train", "recipe.toml", &mark, "--ranks", &count];
        all.extend(COMMON);
        all.extend(arguments);
        let log = std::fs::File::create(scratch.path(&format!("{output}.log"))).unwrap();
        let errors = log.try_clone().unwrap();
        let launcher = scratch.command(&all).stdin(Stdio::null()).stdout(log).stderr(errors).spawn().unwrap();
        Ranks { launcher, mark }
    }

    /// Exit code, within the limit.
    fn wait(&mut self) -> Option<i32> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                return status.code();
            }
            assert!(started.elapsed() < LIMIT, "the ranks hang: {}", self.mark);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits that long, or until the run has ended.
    fn wait_at_most(&mut self, time: Duration) {
        let started = Instant::now();
        while started.elapsed() < time && self.launcher.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The processes that train.
    fn processes(&self) -> Vec<u32> {
        let launcher = self.launcher.id();
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_rank = |id: &u32| {
            let read = |name: &str| std::fs::read(format!("/proc/{id}/{name}")).unwrap_or_default();
            let holds =
                |bytes: Vec<u8>, text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
            *id != launcher && holds(read("cmdline"), &self.mark) && holds(read("environ"), "PMI_RANK=")
        };
        ids.filter(is_rank).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for id in self.processes() {
            kill(id);
        }
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn kill(id: u32) {
    let _ = Command::new("kill").args(["-9", &id.to_string()]).stderr(Stdio::null()).status();
}

fn train(scratch: &Scratch, output: &str, ranks: usize, arguments: &[&str]) {
    let code = Ranks::start(scratch, output, ranks, arguments).wait();
    let log = std::fs::read_to_string(scratch.path(&format!("{output}.log"))).unwrap();
    assert_eq!(code, Some(0), "{arguments:?} on {ranks} ranks: {log}");
}

fn rows(scratch: &Scratch, output: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(scratch.path(output).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn numbers(rows: &[Value], name: &str) -> Vec<f64> {
    rows.iter().filter_map(|row| row.get(name)?.as_f64()).collect()
}

/// The largest relative difference of the losses of two runs.
fn difference(scratch: &Scratch, one: &str, other: &str, name: &str) -> f64 {
    let [one, other] = [one, other].map(|output| numbers(&rows(scratch, output), name));
    assert!(one.len() == other.len() && !one.is_empty(), "{} and {} rows of {name}", one.len(), other.len());
    one.iter().zip(&other).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
}

fn bytes_of(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<(String, Vec<u8>)> = entries
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{}", folder.display());
    files
}

fn sizes(files: &[(String, Vec<u8>)]) -> Vec<(&str, usize)> {
    files.iter().map(|(name, bytes)| (name.as_str(), bytes.len())).collect()
}

const KINDS: &[(&str, &[&str])] = &[
    ("lora", &["adapter.dropout=0.1"]),
    ("dora", &["adapter.kind=dora"]),
    ("ls-lora", &["adapter.kind=ls-lora"]),
    ("nf4", &["model.base=nf4", "adapter.rank=32", "train.optimizer=adamw-8bit"]),
    ("full", &["adapter.kind=full", "train.lr=1e-3"]),
];

#[test]
fn ranks_have_the_losses_of_one_process() {
    if !has_mpi() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write_rows("other.jsonl", 7, 20);
    for (kind, own) in KINDS {
        if *kind == "full" {
            scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8\n", ""));
        }
        let arguments =
            [*own, &["data.eval=other.jsonl", "train.eval_every=10", "train.save_every=10"]].concat();
        train(&scratch, &format!("{kind}-1"), 1, &arguments);
        let cases =
            [(2, "none"), (2, "moments"), (2, "gradients"), (2, "weights"), (3, "weights"), (4, "auto")];
        for (ranks, shard) in cases {
            let output = format!("{kind}-{ranks}-{shard}");
            let shard = format!("memory.shard={shard}");
            train(&scratch, &output, ranks, &[&arguments[..], &[&shard]].concat());
            for name in ["loss", "eval_loss"] {
                let worst = difference(&scratch, &format!("{kind}-1"), &output, name);
                assert!(worst < 1e-6, "{output}: {name} differs by {worst:e}");
            }
            let last = &rows(&scratch, &output)[0];
            assert_eq!(last["ranks"], ranks as u64, "{last}");
            assert_eq!(last["rank_bytes"].as_array().map(Vec::len), Some(ranks));
            // Whatever ranks divide, a checkpoint is that of one.
            let [one, other] = [&format!("{kind}-1"), &output]
                .map(|output| bytes_of(&scratch.path(output).join("checkpoint-10")));
            assert_eq!(sizes(&one), sizes(&other), "{output}");
        }
    }
}

/// Full training that offloads its state, in either order, has the losses and the model of one process on several ranks,
/// and its checkpoints are those of one process.
#[test]
fn ranks_that_offload_have_the_losses_of_one_process() {
    if !has_mpi() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8\n", ""));
    let full = ["adapter.kind=full", "train.lr=1e-3", "train.save_every=10"];
    train(&scratch, "one", 1, &full);
    let offloaded = ["memory.gradients=disk", "memory.optimizer_state=disk", "memory.weights=disk"];
    for (output, ranks, own) in [
        ("depth", 2, &["memory.gradients=disk", "memory.order=depth"][..]),
        ("host", 2, &["memory.gradients=host", "memory.shard=none"]),
        ("moments", 3, &["memory.gradients=disk", "memory.shard=moments"]),
        ("gradients", 2, &["memory.optimizer_state=disk", "memory.shard=gradients", "memory.order=breadth"]),
        ("weights", 2, &["memory.shard=weights", "memory.order=depth"]),
        ("laps", 3, &["memory.shard=weights", "memory.order=breadth"]),
        ("whole", 2, &["memory.shard=none", "memory.order=breadth"]),
    ] {
        let all: &[&str] = if matches!(output, "weights" | "laps" | "whole") { &offloaded } else { &[] };
        train(&scratch, output, ranks, &[&full[..], all, own].concat());
        assert!(difference(&scratch, "one", output, "loss") < 1e-6, "{output}");
        for folder in ["checkpoint-10", "model"] {
            let far = distance(&scratch.path("one").join(folder), &scratch.path(output).join(folder));
            assert!(far < 1e-5, "{output}/{folder}: {far:e}");
        }
    }
    copy_run(&scratch, "laps", "again", &["model", "report.html"]);
    let laps =
        [&full[..], &offloaded, &["memory.shard=weights", "memory.order=breadth", "--resume"]].concat();
    train(&scratch, "again", 3, &laps);
    assert!(
        bytes_of(&scratch.path("laps/model")) == bytes_of(&scratch.path("again/model")),
        "resume is exact"
    );
}

/// Clips belong to rows, so a rank has those of its own rows, encoded once or with the encoder in the graph.
#[test]
fn ranks_hear_what_one_process_hears() {
    if !has_mpi() {
        return;
    }
    let scratch = speech::scratch();
    let laps = ["memory.order=breadth", "memory.micro_tokens=32"];
    for (kind, own, of_ranks) in [
        ("once", &[][..], &[][..]),
        ("graph", &[ENCODER], &[]),
        ("laps", &[ENCODER], &laps),
        ("divided laps", &[ENCODER], &[&laps[..], &["memory.shard=weights", "memory.weights=disk"]].concat()),
    ] {
        train(&scratch, &format!("{kind}-1"), 1, own);
        for ranks in [2, 3] {
            train(&scratch, &format!("{kind}-{ranks}"), ranks, &[own, of_ranks].concat());
            let worst = difference(&scratch, &format!("{kind}-1"), &format!("{kind}-{ranks}"), "loss");
            assert!(worst < 1e-6, "{kind}: losses of {ranks} ranks differ by {worst:e}");
        }
    }
}

#[test]
fn as_many_ranks_leave_the_same_bytes_and_resume_exactly() {
    if !has_mpi() {
        return;
    }
    let scratch = Scratch::new();
    let arguments =
        ["train.optimizer=adamw-8bit", "adapter.rank=64", "train.save_every=7", "memory.shard=moments"];
    for output in ["once", "again"] {
        train(&scratch, output, 2, &arguments);
    }
    let adapter = |output: &str| bytes_of(&scratch.path(output).join("adapter"));
    assert!(adapter("once") == adapter("again"), "the same ranks give the same bytes");
    // Stopped after step 7, and continued by two ranks, and by three.
    for (output, ranks) in [("two", 2), ("three", 3), ("one", 1)] {
        copy_run(&scratch, "once", output, &["checkpoint-14", "checkpoint-20", "adapter", "report.html"]);
        train(&scratch, output, ranks, &[&arguments[..], &["--resume"]].concat());
        let worst = difference(&scratch, "once", output, "loss");
        assert!(worst < 1e-6, "resumed by {ranks}: {worst:e}");
    }
    assert!(adapter("two") == adapter("once"), "resume is exact with as many ranks");
}

/// A run folder to be continued after an earlier checkpoint.
fn copy_run(scratch: &Scratch, from: &str, to: &str, later: &[&str]) {
    let status = Command::new("cp").arg("-r").args([scratch.path(from), scratch.path(to)]).status();
    assert!(status.unwrap().success());
    for name in later {
        let path = scratch.path(to).join(name);
        let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    }
}

/// The numbers of a safetensors file in f32.
fn values(bytes: &[u8]) -> Vec<f32> {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8 + header..].as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// The largest difference of two folders with the same tensors.
fn distance(one: &Path, other: &Path) -> f32 {
    let (one, other) = (bytes_of(one), bytes_of(other));
    assert_eq!(sizes(&one), sizes(&other));
    let pairs =
        one.iter().zip(&other).flat_map(|((_, one), (_, other))| values(one).into_iter().zip(values(other)));
    pairs.map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

/// Everything that is trained is divided, and nobody who reads the run can tell.
#[test]
fn divided_weights_leave_the_checkpoint_and_the_model_of_one_process() {
    if !has_mpi() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8\n", ""));
    scratch.write_rows("other.jsonl", 7, 20);
    let full = ["adapter.kind=full", "train.lr=1e-3", "train.save_every=10", "memory.shard=weights"];
    for (output, ranks) in [("one", 1), ("two", 2), ("three", 3)] {
        train(&scratch, output, ranks, &full);
    }
    let row = |output: &str, name: &str| {
        let text = std::fs::read_to_string(scratch.path(output).join("plan.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["rows"][name].as_f64().unwrap()
    };
    for (output, most) in [("two", 0.56), ("three", 0.45)] {
        assert!(difference(&scratch, "one", output, "loss") < 1e-6, "{output}");
        for folder in ["checkpoint-10", "model"] {
            let far = distance(&scratch.path("one").join(folder), &scratch.path(output).join(folder));
            assert!(far < 1e-5, "{output}/{folder}: {far:e}");
        }
        let share = row(output, "optimizer") / row("one", "optimizer");
        assert!(share < most, "{output}: {share} of the optimizer state");
    }
    // Continued by as many, by others, and by one that divides nothing.
    for (output, ranks, shard) in [
        ("by-two", 2, "weights"),
        ("by-three", 3, "weights"),
        ("by-two-whole", 2, "moments"),
        ("by-one", 1, "none"),
    ] {
        copy_run(&scratch, "two", output, &["model", "report.html"]);
        let shard = format!("memory.shard={shard}");
        train(&scratch, output, ranks, &[&full[..3], &[&shard, "--resume"]].concat());
        assert!(difference(&scratch, "two", output, "loss") < 1e-6, "{output}");
        let far = distance(&scratch.path("two/model"), &scratch.path(output).join("model"));
        assert!(far < 1e-5, "{output}: {far:e}");
    }
    assert!(
        bytes_of(&scratch.path("two/model")) == bytes_of(&scratch.path("by-two/model")),
        "resume is exact"
    );
    // The model of a run that stops early is that of its best evaluation, which every rank reads its part of.
    let early = ["data.eval=other.jsonl", "train.eval_every=5", "train.early_stop=1", "train.lr=3e-2"];
    for (output, ranks) in [("early-one", 1), ("early-two", 2)] {
        train(&scratch, output, ranks, &[&full[..1], &full[2..], &early[..]].concat());
        assert!(rows(&scratch, output).len() < 20, "{output} did not stop early");
    }
    let far = distance(&scratch.path("early-one/model"), &scratch.path("early-two/model"));
    assert!(far < 1e-4, "{far:e}");
}

/// Weights in bf16 are rounded at random, so a gradient that differs by rounding shows; ranks still agree on every byte.
#[test]
fn ranks_divide_weights_without_f32_masters() {
    if !has_mpi() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("recipe.toml", RECIPE.replace("rank = 4\nalpha = 8\n", ""));
    let full = ["adapter.kind=full", "train.lr=1e-3", "train.master=bf16", "train.save_every=10"];
    train(&scratch, "one", 1, &full);
    for (ranks, shard) in [(2, "none"), (2, "moments"), (3, "weights")] {
        let (output, shard) = (format!("{ranks}-{shard}"), format!("memory.shard={shard}"));
        train(&scratch, &output, ranks, &[&full[..], &[&shard]].concat());
        let far = difference(&scratch, "one", &output, "loss");
        assert!(far < 1e-2, "{output}: {far:e}");
        let [one, other] =
            ["one", &output].map(|output| bytes_of(&scratch.path(output).join("checkpoint-10")));
        assert_eq!(sizes(&one), sizes(&other), "{output}");
    }
}

#[test]
fn a_rank_that_is_killed_ends_all_and_nothing_is_lost() {
    kill_ranks("moments", 0x5eed);
}

#[test]
fn a_rank_that_is_killed_with_its_part_of_the_weights_loses_nothing() {
    kill_ranks("weights", 0xfeed);
}

/// Kills a random rank at a random instant, half as often as the environment asks for, and resumes.
fn kill_ranks(shard: &str, seed: u64) {
    if !has_mpi() {
        return;
    }
    let all: usize = std::env::var("SMIDGEN_RANK_KILLS").map_or(6, |text| text.parse().unwrap());
    let kills = all.div_ceil(2);
    let scratch = Scratch::new();
    let shard = format!("memory.shard={shard}");
    let arguments = ["train.steps=30", "train.save_every=3", "train.keep=2", &shard, "--resume"];
    let started = Instant::now();
    train(&scratch, "clean", 2, &arguments);
    let span = started.elapsed();
    let mut random: u64 = seed;
    let (mut killed, mut runs) = (0, 0);
    // A run that has ended leaves nobody to kill, so the next one begins from nothing.
    while killed < kills {
        runs += 1;
        assert!(runs <= 10 + 4 * kills, "{killed} kills hit in {runs} runs");
        let output = format!("killed-{runs}");
        loop {
            let mut ranks = Ranks::start(&scratch, &output, 2, &arguments);
            let mut victim = None;
            if killed < kills {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ranks.wait_at_most(span.mul_f64((random >> 40) as f64 / (1u64 << 24) as f64));
                let processes = ranks.processes();
                victim = processes.get((random >> 20) as usize % processes.len().max(1)).copied();
                victim.into_iter().for_each(kill);
            }
            let asked = Instant::now();
            let code = ranks.wait();
            assert!(ranks.processes().is_empty(), "a rank is left");
            // A run that was killed after its last step may have ended well.
            if code == Some(0) {
                break;
            }
            assert!(victim.is_some(), "nobody was killed, and it ended with {code:?}");
            assert!(asked.elapsed() < Duration::from_secs(15), "ended with {code:?}");
            killed += 1;
        }
        assert!(difference(&scratch, "clean", &output, "loss") == 0.0);
        let [clean, other] = ["clean", &output].map(|output| bytes_of(&scratch.path(output).join("adapter")));
        assert!(clean == other, "a run whose ranks were killed ends with the bytes of one whose were not");
        std::fs::remove_dir_all(scratch.path(&output)).unwrap();
    }
    println!("{killed} kills in {runs} runs");
}

#[test]
fn mistakes_about_ranks_are_named() {
    let scratch = Scratch::new();
    let refused = |arguments: &[&str], variables: &[(&str, &str)], code: i32, words: &str| {
        let all = [&["train", "recipe.toml"], arguments].concat();
        let output = scratch.command(&all).envs(variables.iter().copied()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(code) && stderr.contains(words),
            "{arguments:?} {variables:?}: {stderr}"
        );
        assert!(!scratch.exists("run"), "a run that is refused leaves nothing");
    };
    refused(&["--ranks", "0"], &[], 2, "a run has at least one rank");
    refused(&["--ranks", "9"], &[], 2, "`train.batch = 4` is the batch of all ranks together");
    refused(&[], &[("RANK", "1"), ("WORLD_SIZE", "2")], 2, "`LOCAL_RANK` is not set");
    refused(&[], &[("WORLD_SIZE", "2")], 2, "RANK");
    let own = [("SMIDGEN_RANK", "3"), ("SMIDGEN_RANKS", "2")];
    refused(&[], &own, 2, "SMIDGEN_RANK");
    let nowhere = [("PATH", "/nowhere"), ("SMIDGEN_MPIEXEC", "/nowhere/mpiexec")];
    refused(&["--ranks", "2"], &nowhere, 1, "mpiexec");
}
