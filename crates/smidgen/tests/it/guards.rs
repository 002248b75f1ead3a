//! Loud guards, through the program: a tensor that is not trained, numbers that are not finite, settings that are
//! seldom meant, and a disk that takes no more.

use crate::scratch::{Ended, Scratch};
use serde_json::Value;

/// Header and tensors of a safetensors file.
fn split(bytes: &[u8]) -> (Value, usize) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), 8 + length)
}

/// Writes f32 values into a tensor of a file, from an element on.
pub fn set_values(scratch: &Scratch, file: &str, tensor: &str, first: usize, values: &[f32]) {
    let mut bytes = scratch.read(file);
    let (header, data) = split(&bytes);
    let begin = data + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 4 * first;
    for (index, value) in values.iter().enumerate() {
        bytes[begin + 4 * index..begin + 4 * index + 4].copy_from_slice(&value.to_le_bytes());
    }
    scratch.write(file, bytes);
}

const WEIGHTS: &str = "model/model.safetensors";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn embedding_width(scratch: &Scratch) -> usize {
    split(&scratch.read(WEIGHTS)).0[EMBEDDING]["shape"][1].as_u64().unwrap() as usize
}

fn holds(row: &Value, id: u64) -> bool {
    row["input_ids"].as_array().unwrap().iter().any(|it| it.as_u64() == Some(id))
}

fn failed(scratch: &Scratch, overrides: &[&str], words: &[&str]) -> Ended {
    let ended = scratch.run(&[&["train", "recipe.toml"][..], overrides].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    for word in words {
        assert!(ended.stderr.contains(word), "does not say {word:?}: {}", ended.stderr);
    }
    ended
}

#[test]
fn every_form_of_adapter_is_alive() {
    let scratch = Scratch::of("llama-bias-linear");
    for (output, form) in [
        ("lora", &["adapter.kind=lora"][..]),
        ("rslora", &["adapter.kind=rslora"]),
        ("dora", &["adapter.kind=dora"]),
        ("ls-lora", &["adapter.kind=ls-lora", "adapter.dropout=0.3"]),
        ("bias", &["adapter.bias=all", "adapter.dropout=0.5"]),
        // Rates that begin at zero and rise so slowly that a magnitude of f32 does not move at first.
        ("warm", &["adapter.kind=lora", "train.warmup=5"]),
    ] {
        let ended = scratch.train(output, form);
        assert!(!ended.stderr.contains("warning"), "{output}: {}", ended.stderr);
    }
}

#[test]
fn an_adapter_that_cannot_learn_is_an_error_after_three_updates() {
    let scratch = Scratch::new();
    scratch.train("zero", &["train.steps=1"]);
    let file = "zero/adapter/adapter_model.safetensors";
    let (header, _) = split(&scratch.read(file));
    let names: Vec<String> = header.as_object().unwrap().keys().cloned().collect();
    let zeros = |name: &str| {
        let elements: u64 =
            header[name]["shape"].as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).product();
        vec![0.0; elements as usize]
    };
    // Both matrices of one linear: neither ever gets a gradient.
    let dead = |name: &&String| name.contains("layers.1.mlp.up_proj.lora_");
    assert_eq!(names.iter().filter(dead).count(), 2);
    for name in names.iter().filter(dead) {
        set_values(&scratch, file, name, 0, &zeros(name));
    }
    let words = [
        "error: 3 updates gave no gradient to `",
        "layers.1.mlp.up_proj.lora_A",
        "layers.1.mlp.up_proj.lora_B",
        "hint: check whether the loss is 0, or both matrices of the adapter in",
    ];
    let ended = failed(&scratch, &["adapter.init=zero/adapter", "train.warmup=2"], &words);
    let error = ended.stderr.lines().find(|line| line.starts_with("error: ")).unwrap();
    assert_eq!(error.matches("lora_").count(), 2, "{error}");
    // The first update has a rate of zero: the fourth step is the third that counts.
    assert_eq!(scratch.metrics("run").len(), 3);
    assert!(!scratch.exists("run/adapter"));
    // One zero matrix is how every adapter begins.
    let a = names.iter().find(|name| name.contains("layers.1.mlp.up_proj.lora_A")).unwrap();
    let ones = vec![0.01; zeros(a).len()];
    set_values(&scratch, file, a, 0, &ones);
    scratch.train("alive", &["adapter.init=zero/adapter"]);
}

/// Queries and keys have no part in the loss of such rows: at most rounding gives them a gradient.
#[test]
fn rows_in_which_nothing_can_be_attended_to_are_no_error() {
    let scratch = Scratch::new();
    scratch.write_rows("data.jsonl", 10, 2);
    scratch.train("run", &[]);
}

#[test]
fn a_rate_too_small_to_move_anything_is_a_warning() {
    let scratch = Scratch::new();
    let ended = scratch.train("run", &["train.lr=1e-30"]);
    assert!(ended.stderr.contains("is low for an adapter"), "{}", ended.stderr);
    assert!(ended.stderr.contains("warning: 3 updates did not change `"), "{}", ended.stderr);
    // Zero is the one number that any update moves.
    assert!(ended.stderr.contains("lora_A") && !ended.stderr.contains("lora_B"), "{}", ended.stderr);
}

#[test]
fn a_resumed_run_is_not_judged_by_its_last_steps() {
    let scratch = Scratch::new();
    let overrides = ["train.save_every=4", "train.steps=12"];
    scratch.train("run", &overrides);
    scratch.forget_end("run", 8);
    let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
    assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
}

#[test]
fn settings_that_are_seldom_meant_are_told_before_the_first_step() {
    let scratch = Scratch::new();
    let overrides = ["train.lr=0.05", "train.batch=11", "train.warmup=6", "adapter.dropout=0.6"];
    let ended = scratch.train("run", &overrides);
    let first_step = ended.stderr.find("step 1/").unwrap();
    for words in [
        "warning: `train.lr = 0.05` is high",
        "warning: `train.batch = 11` is more than the 10 samples",
        "warning: `train.warmup` takes 6 steps of a run of 6",
        "warning: `adapter.dropout = 0.6` drops most",
    ] {
        assert!(ended.stderr.find(words).is_some_and(|at| at < first_step), "{words}: {}", ended.stderr);
    }
}

#[test]
fn the_first_number_that_is_not_finite_is_traced_to_its_sample() {
    let scratch = Scratch::new();
    let rows: Vec<Value> =
        scratch.text("data.jsonl").lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let (id, row) = (0..211)
        .find_map(|id| {
            let holders: Vec<usize> = (0..rows.len()).filter(|row| holds(&rows[*row], id)).collect();
            matches!(holders[..], [row] if row > 2).then(|| (id, holders[0]))
        })
        .expect("some token stands in one row only");
    set_values(&scratch, WEIGHTS, EMBEDDING, id as usize * embedding_width(&scratch) + 3, &[f32::NAN]);
    let place = format!("data.jsonl` line {}", row + 1);
    let ended = failed(
        &scratch,
        &["train.batch=10", "memory.micro_tokens=400"],
        &["error: step 1 is not finite: loss NaN"],
    );
    let first = ended.stderr.lines().find(|line| line.contains("the first NaN is in `")).unwrap();
    assert!(first.contains("written by `forward, embed`"), "{first}");
    assert!(first.contains(&place), "{place}: {first}");
    assert!(first.ends_with("the weight `model.embed_tokens.weight` is not finite"), "{first}");
    // Weights that are fine and a rate that is not: some layer, some sample, no weight of the base.
    let scratch = Scratch::new();
    let wild = ["train.lr=1e30", "train.schedule=constant", "train.warmup=0"];
    let ended = failed(&scratch, &wild, &["error: step 2 is not finite"]);
    let first = ended.stderr.lines().find(|line| line.trim_start().starts_with("the first ")).unwrap();
    assert!(first.contains("forward of layers.0, ") && first.contains("data.jsonl` line "), "{first}");
    assert!(ended.stderr.contains("hint: a lower `train.lr`"), "{}", ended.stderr);
}

#[test]
fn an_evaluation_that_is_not_finite_names_its_row() {
    // The head is not the embedding: a token that training does not meet can be broken for itself.
    let scratch = Scratch::of("llama-dora");
    let rows: Vec<Value> =
        scratch.text("data.jsonl").lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let used = |id: u64| rows.iter().any(|row| holds(row, id));
    let id = (3..107).find(|id| !used(*id)).expect("some token is not used");
    scratch.write("other.jsonl", format!("{{\"input_ids\":[1,2,1]}}\n{{\"input_ids\":[1,{id},1]}}\n"));
    set_values(&scratch, WEIGHTS, EMBEDDING, id as usize * embedding_width(&scratch), &[f32::INFINITY]);
    let overrides = ["data.eval=other.jsonl", "train.eval_every=2"];
    let words = [
        "error: the evaluation after step 2 is not finite",
        "written by `forward, embed`",
        "other.jsonl` line 2",
    ];
    failed(&scratch, &overrides, &words);
    assert_eq!(scratch.metrics("run").len(), 2);
}

/// Runs the program where no file may be longer than `blocks` of 512 bytes.
#[cfg(unix)]
fn run_with_limit(scratch: &Scratch, blocks: u64, arguments: &[&str]) -> Ended {
    let program = scratch.command(arguments);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -f \"$0\" && exec \"$@\"", &blocks.to_string()]);
    command.arg(program.get_program()).args(program.get_args()).current_dir(scratch.root());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Blocks of 512 bytes in some shells and of 1024 in others: the limit holds for both.
#[cfg(unix)]
fn blocks_between(fits: u64, too_long: u64) -> u64 {
    let blocks = fits.div_ceil(512) + 1;
    assert!(blocks * 1024 < too_long, "{fits} and {too_long} bytes are too close");
    blocks
}

#[cfg(unix)]
fn longest_file(scratch: &Scratch, folder: &str) -> u64 {
    let root = scratch.path(folder);
    let lengths = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
    lengths.filter(|it| it.is_file()).map(|it| it.len()).max().unwrap()
}

#[cfg(unix)]
#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_one_before() {
    let scratch = Scratch::new();
    let common = ["adapter.rank=64", "train.save_every=2", "train.schedule=constant", "train.warmup=0"];
    scratch.train("run", &[&common[..], &["train.steps=4"]].concat());
    let before = scratch.checkpoints("run");
    let moments = scratch.read("run/checkpoint-4/optimizer.safetensors").len() as u64;
    let blocks = blocks_between(longest_file(&scratch, "run"), moments);
    let grown = [&common[..], &["train.steps=8", "--resume"]].concat();
    let ended = run_with_limit(&scratch, blocks, &[&["train", "recipe.toml"][..], &grown].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let needed = regex::Regex::new(
        r"(?s)error: .*could not be written.*\n  a checkpoint needs \d+\.\d\d MiB, the disk of `.*run` has \d+\.\d\d .iB free\n\nhint: earlier checkpoints are intact",
    );
    assert!(needed.unwrap().is_match(&ended.stderr), "{}", ended.stderr);
    assert_eq!(scratch.checkpoints("run"), before);
    let hidden: Vec<_> = std::fs::read_dir(scratch.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with(".checkpoint"))
        .collect();
    assert!(hidden.is_empty(), "{hidden:?}");
    // With room it goes on as if nothing had been.
    scratch.train("run", &grown);
    scratch.train("clean", &[&common[..], &["train.steps=8"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
}

#[cfg(unix)]
#[test]
fn a_disk_without_room_for_what_the_plan_puts_there_is_found_before_the_first_step() {
    let scratch = Scratch::new();
    let away = ["adapter.rank=64", "memory.optimizer_state=host", "train.save_every=0"];
    scratch.train("short", &away);
    let spilled = scratch.json("short/plan.json")["spaces"]["disk"].as_u64().unwrap();
    let text = scratch.read("short/plan.txt").len().max(scratch.read("short/plan.json").len()) as u64;
    let blocks = blocks_between(text, spilled);
    let ended = run_with_limit(&scratch, blocks, &[&["train", "recipe.toml"][..], &away].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let words = regex::Regex::new(
        r"error: not enough disk space for the offload file .*\n  the offload file needs \d+\.\d\d .iB, the disk of `.*run` has \d+\.\d\d .iB free",
    );
    assert!(words.unwrap().is_match(&ended.stderr), "{}", ended.stderr);
    assert!(!scratch.exists("run"));
}

#[cfg(unix)]
#[test]
fn rows_that_cannot_be_written_end_the_run() {
    let scratch = Scratch::new();
    let overrides = ["train.steps=4000", "train.save_every=100", "train.log_every=0"];
    scratch.train("short", &["train.steps=1"]);
    // Every file of the beginning fits, and the checkpoints do; some day the metrics do not.
    let fits = longest_file(&scratch, "short").max(longest_file(&scratch, "short/adapter") * 3);
    let blocks = blocks_between(fits, 1 << 40);
    let ended = run_with_limit(&scratch, blocks, &[&["train", "recipe.toml"][..], &overrides].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("error: cannot write to `"), "{}", ended.stderr);
    assert!(ended.stderr.contains("\n  a row needs "), "{}", ended.stderr);
    let rows = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).unwrap().lines().count() as u64;
    assert!(rows > 100 && rows < 4000, "{rows}");
    assert_eq!(scratch.checkpoints("run").last(), Some(&(rows.saturating_sub(1) / 100 * 100)));
}

/// A rate times a decay that f32 cannot hold: every weight is infinite after one update, with a gradient that is finite.
const FAST: [&str; 2] = ["train.lr=3e38", "train.weight_decay=1e3"];

#[test]
fn an_update_that_overflows_is_not_saved() {
    let scratch = Scratch::new();
    let words = [
        "error: nothing was saved: tensor `",
        "lora_",
        "` is not finite: element ",
        "hint: a lower `train.lr`",
    ];
    let ended =
        failed(&scratch, &["train.steps=1", FAST[0], FAST[1], "train.warmup=0", "train.log_every=0"], &words);
    assert!(!ended.stderr.contains("free"), "the disk is not to blame: {}", ended.stderr);
    assert!(!scratch.exists("run/adapter") && !scratch.exists("run/.adapter.tmp"));
    // The rate of the first update is 0.
    let later = [FAST[0], FAST[1], "train.warmup=2", "train.save_every=1", "output.dir=later"];
    failed(&scratch, &later, &words);
    assert_eq!(scratch.checkpoints("later"), [1]);
    assert!(!scratch.exists("later/.checkpoint-2.tmp") && !scratch.exists("later/adapter"));
    scratch
        .write("recipe.toml", scratch.text("recipe.toml").replace("rank = 4\nalpha = 8", "kind = \"full\""));
    let full = ["train.steps=1", FAST[0], FAST[1], "train.warmup=0", "output.dir=full"];
    failed(&scratch, &full, &["error: nothing was saved: tensor `model.", "` is not finite"]);
    assert!(!scratch.exists("full/model"));
}

const ADAPTER: &str = "adapter/adapter_model.safetensors";
const A: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
const B: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";

#[test]
fn an_adapter_that_is_not_finite_is_neither_merged_nor_exported() {
    let scratch = Scratch::new();
    let commands = [&["merge", "adapter", "--output", "m"][..], &["export", "adapter", "--output", "m.gguf"]];
    let whole = [ADAPTER, "adapter/adapter_config.json"].map(|name| scratch.read(name));
    for (value, said) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        set_values(&scratch, ADAPTER, B, 5, &[value]);
        for command in commands {
            let words = format!(
                "the adapter in `adapter` cannot be used: tensor `{B}` is not finite: element 5 is {said}"
            );
            scratch.refused(1, command, &[&words]);
        }
        scratch.write(ADAPTER, &whole[0]);
    }
    // Finite, and every activation that it reaches is NaN.
    set_values(&scratch, ADAPTER, B, 5, &[-3e38]);
    for command in commands {
        let words = format!(
            "the adapter in `adapter` cannot be used: tensor `{B}` is too large: element 5 is -3.00e38"
        );
        scratch.refused(1, command, &[&words]);
    }
    scratch.write(ADAPTER, &whole[0]);
    // Tensors that can be used, whose product is not finite or too large.
    for (size, said) in [(1.8e19, "is not finite: element "), (1e12, "is too large: element 0 is ")] {
        set_values(&scratch, ADAPTER, A, 0, &[size; 16]);
        set_values(&scratch, ADAPTER, B, 0, &[size; 8]);
        let words =
            format!("the result cannot be written: tensor `model.layers.0.self_attn.q_proj.weight` {said}");
        scratch.refused(1, commands[0], &[&words]);
        scratch.write(ADAPTER, &whole[0]);
    }
    set_values(&scratch, ADAPTER, A, 0, &[3e3; 16]);
    set_values(&scratch, ADAPTER, B, 0, &[3e3; 8]);
    let f16 = [commands[0], &["--dtype", "f16"]].concat();
    scratch.refused(1, &f16, &["is not finite", "hint: the largest f16 is 65504"]);
    scratch.write(ADAPTER, &whole[0]);
    for alpha in ["1e300", "1e7", "-1e9"] {
        let text = String::from_utf8(whole[1].clone()).unwrap();
        let (before, after) = text.split_once("\"lora_alpha\": ").unwrap();
        let (_, after) = after.split_once(',').unwrap();
        scratch.write("adapter/adapter_config.json", format!("{before}\"lora_alpha\": {alpha},{after}"));
        for command in commands {
            scratch.refused(1, command, &["adapter_config.json` sets alpha ", "in `lora_alpha`"]);
        }
    }
    assert!(!scratch.exists("m") && !scratch.exists("m.gguf"));
}

#[test]
fn an_initial_adapter_of_another_scale_is_noted() {
    let scratch = Scratch::new();
    scratch.train("first", &["train.steps=1"]);
    let start = ["train.steps=1", "adapter.init=first/adapter"];
    let same = scratch.train("same", &start);
    assert!(!same.stderr.contains("note:"), "{}", same.stderr);
    let other = scratch.train("other", &[&start[..], &["adapter.alpha=32"]].concat());
    let words = "first/adapter` was trained with a scale of 2 (its `alpha` is 8), this run uses a scale of 8 (`adapter.alpha` is 32)";
    assert!(
        other.stderr.contains("note: the adapter in `") && other.stderr.contains(words),
        "{}",
        other.stderr
    );
}
