//! Exact resume: killed at any instant, a resumed run ends in the bytes of one that was never stopped.
//!
//! Also which checkpoints are kept, and what may change between the parts of a run.

use crate::scratch::Scratch;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// Dropout, a schedule and a shuffled order: everything that a step depends on.
const RUN: [&str; 6] = [
    "train.steps=90",
    "train.save_every=4",
    "train.keep=2",
    "adapter.dropout=0.1",
    "train.schedule=cosine",
    "train.log_every=0",
];

#[test]
fn killed_at_any_instant_it_ends_the_same() {
    let scratch = Scratch::new();
    scratch.train("clean", &RUN);
    // Instants differ from one run of this test to the next; they are told when it fails.
    let mut random = SystemTime::UNIX_EPOCH.elapsed().unwrap().subsec_nanos() as u64 | 1;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    let mut instants = Vec::new();
    let mut rows_seen = 0;
    for _ in 0..3 {
        let (rows, micros) = (rows_seen + 1 + next(24) as usize, next(20_000));
        instants.push((rows, micros));
        let mut child = scratch.start(&[&["train", "recipe.toml", "--resume"][..], &RUN].concat());
        loop {
            let text = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).unwrap_or_default();
            if text.lines().count() >= rows {
                break;
            }
            assert!(child.try_wait().unwrap().is_none(), "ended before it was killed: {instants:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(micros));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!scratch.exists("run/adapter"), "it was done before it was killed: {instants:?}");
        rows_seen = scratch.text("run/metrics.jsonl").lines().count();
    }
    scratch.train("run", &[&RUN[..], &["--resume"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("clean"), "{instants:?}");
    assert_eq!(scratch.losses("run"), scratch.losses("clean"), "{instants:?}");
    let steps: Vec<u64> = scratch.metrics("run").iter().map(|row| row["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=90).collect::<Vec<u64>>(), "{instants:?}");
    assert_eq!(scratch.checkpoints("run"), [88, 90], "{instants:?}");
    let hidden = std::fs::read_dir(scratch.path("run")).unwrap();
    let hidden: Vec<_> =
        hidden.map(|it| it.unwrap().file_name()).filter(|it| it.as_encoded_bytes()[0] == b'.').collect();
    assert!(hidden.is_empty(), "{hidden:?} {instants:?}");
}

/// A run that was stopped after its checkpoint of step 4, with metrics beyond it and a torn last line.
fn stopped(overrides: &[&str]) -> Scratch {
    let scratch = Scratch::new();
    scratch.train("run", &[&["train.save_every=4"][..], overrides].concat());
    let last = scratch.metrics("run").len() as u64;
    scratch.forget_end("run", (last - 1) / 4 * 4);
    let metrics = scratch.text("run/metrics.jsonl");
    scratch.write("run/metrics.jsonl", &metrics[..metrics.len() - 30]);
    scratch
}

#[test]
fn rows_after_the_checkpoint_are_cut() {
    let scratch = stopped(&[]);
    scratch.train("clean", &["train.save_every=4"]);
    let ended = scratch.train("run", &["train.save_every=4", "--resume"]);
    assert!(ended.stderr.starts_with("continuing after step 4\n"), "{}", ended.stderr);
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

/// However steps and batches are counted, a run resumes to the same bytes, in the middle of an epoch too.
#[test]
fn steps_and_epochs_samples_and_tokens_resume_alike() {
    for counted in [
        ["train.steps=10", "train.batch=4"],
        ["train.steps=10", "train.batch_tokens=70"],
        ["train.epochs=2.5", "train.batch=4"],
        ["train.epochs=1.5", "train.batch_tokens=70"],
    ] {
        let overrides = [&counted[..], &["adapter.dropout=0.1"]].concat();
        let scratch = stopped(&overrides);
        scratch.train("clean", &overrides);
        let rows = scratch.metrics("clean").len();
        assert!(rows > 4, "{counted:?}");
        let ended = scratch.train("run", &[&overrides[..], &["--resume"]].concat());
        assert!(ended.stderr.contains("continuing after step 4") || rows > 7, "{}", ended.stderr);
        assert!(scratch.adapter("run") == scratch.adapter("clean"), "{counted:?}");
        let tokens = |output: &str| -> Vec<(f64, u64)> {
            let rows = scratch.metrics(output);
            rows.iter().map(|row| (row["epoch"].as_f64().unwrap(), row["tokens"].as_u64().unwrap())).collect()
        };
        assert_eq!(tokens("run"), tokens("clean"), "{counted:?}");
        assert_eq!(scratch.losses("run"), scratch.losses("clean"), "{counted:?}");
    }
}

/// What an adapter form keeps beside A and B, and what is derived from them, comes back to the bit.
#[test]
fn every_form_of_adapter_resumes_to_the_same_bytes() {
    for form in
        [&["adapter.kind=dora"][..], &["adapter.kind=ls-lora"], &["model.base=nf4", "adapter.kind=dora"]]
    {
        let overrides = [form, &["adapter.dropout=0.1", "train.steps=10"]].concat();
        let scratch = stopped(&overrides);
        scratch.train("clean", &overrides);
        scratch.train("run", &[&overrides[..], &["--resume"]].concat());
        assert!(scratch.adapter("run") == scratch.adapter("clean"), "{form:?}");
        assert_eq!(scratch.losses("run"), scratch.losses("clean"), "{form:?}");
    }
}

/// Adapters of this rank have matrices of 4224 and 5632 elements, which get moments in 8 bits, and smaller ones, which
/// do not.
const IN_8_BITS: [&str; 2] = ["train.optimizer=adamw-8bit", "adapter.rank=88"];

#[test]
fn moments_in_8_bits_resume_to_the_same_bytes() {
    for form in [&[][..], &["adapter.kind=dora"], &["adapter.kind=ls-lora"]] {
        let overrides = [form, &IN_8_BITS, &["adapter.dropout=0.1", "train.steps=10"]].concat();
        let scratch = stopped(&overrides);
        scratch.train("clean", &overrides);
        scratch.train("run", &[&overrides[..], &["--resume"]].concat());
        assert!(scratch.adapter("run") == scratch.adapter("clean"), "{form:?}");
        assert_eq!(scratch.losses("run"), scratch.losses("clean"), "{form:?}");
    }
}

/// The tensors of a checkpoint's moments: type, shape and bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

const MOMENTS: &str = "run/checkpoint-4/optimizer.safetensors";

fn moments(scratch: &Scratch) -> Tensors {
    let bytes = scratch.read(MOMENTS);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, tensor)| {
        (name.to_string(), (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))
    });
    tensors.collect()
}

fn write_moments(scratch: &Scratch, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    scratch.write(MOMENTS, bytes);
}

#[test]
fn moments_in_8_bits_are_saved_as_they_lie() {
    let scratch = stopped(&IN_8_BITS);
    let tensors = moments(&scratch);
    for letter in ["m", "v"] {
        let path = "model.layers.1.self_attn.q_proj";
        let (dtype, shape, _) = &tensors[&format!("{letter} {path}.lora_A.weight")];
        assert_eq!((*dtype, shape.as_slice()), (Dtype::U8, &[88, 48][..]));
        let (dtype, shape, _) = &tensors[&format!("{letter} {path}.lora_A.weight.absmax")];
        assert_eq!((*dtype, shape.as_slice()), (Dtype::F32, &[17][..]));
        let path = "model.layers.1.self_attn.k_proj";
        let (dtype, shape, _) = &tensors[&format!("{letter} {path}.lora_B.weight")];
        assert_eq!((*dtype, shape.as_slice()), (Dtype::F32, &[32, 88][..]));
    }
    // What was written by hand in the same way is read.
    write_moments(&scratch, &tensors);
    scratch.forget_checksums("run/checkpoint-4");
    scratch.train("run", &[&IN_8_BITS[..], &["train.save_every=4", "--resume"]].concat());
}

#[test]
fn tampered_moments_in_8_bits_are_named() {
    let scratch = stopped(&IN_8_BITS);
    scratch.forget_checksums("run/checkpoint-4");
    let resume = [&IN_8_BITS[..], &["train.save_every=4", "--resume"]].concat();
    let tensors = moments(&scratch);
    let codes = "m model.layers.0.self_attn.q_proj.lora_A.weight";
    let scales = format!("{codes}.absmax");
    let refused = |edit: &dyn Fn(&mut Tensors), words: &str| {
        let mut tampered = tensors.clone();
        edit(&mut tampered);
        write_moments(&scratch, &tampered);
        let ended = scratch.run(&[&["train", "recipe.toml"][..], &resume].concat());
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        for word in
            ["error: `", "checkpoint-4/optimizer.safetensors`: ", words, "hint: remove that checkpoint"]
        {
            assert!(ended.stderr.contains(word), "{word}: {}", ended.stderr);
        }
    };
    let without = |name: &str| format!("tensor `{name}` is missing");
    refused(&|tensors| drop(tensors.remove(codes)), &without(codes));
    refused(&|tensors| drop(tensors.remove(&scales)), &without(&scales));
    let short = (Dtype::U8, vec![87, 48], vec![0; 87 * 48]);
    let words = format!("tensor `{codes}` is U8 [87, 48], expected U8 [88, 48]");
    refused(&|tensors| drop(tensors.insert(codes.into(), short.clone())), &words);
    let wide = (Dtype::F32, vec![88, 48], vec![0; 4 * 88 * 48]);
    let words = format!("tensor `{codes}` is F32 [88, 48], expected U8 [88, 48]");
    refused(&|tensors| drop(tensors.insert(codes.into(), wide.clone())), &words);
    let few = (Dtype::F32, vec![16], vec![0; 64]);
    let words = format!("tensor `{scales}` is F32 [16], expected F32 [17]");
    refused(&|tensors| drop(tensors.insert(scales.clone(), few.clone())), &words);
    assert!(!scratch.exists("run/adapter"));
}

#[test]
fn the_other_optimizer_cannot_go_on() {
    let scratch = stopped(&["adapter.rank=88"]);
    let words = ["`train.optimizer` was \"adamw\", is \"adamw-8bit\""];
    scratch.train_refused(2, &[&IN_8_BITS[..], &["train.save_every=4", "--resume"]].concat(), &words);
}

#[test]
fn a_checkpoint_is_an_adapter() {
    let scratch = stopped(&[]);
    let overrides =
        ["adapter.init=run/checkpoint-4", "train.steps=1", "train.lr=1e-30", "train.save_every=0"];
    scratch.train("copy", &overrides);
    assert!(scratch.adapter("copy") == scratch.read("run/checkpoint-4/adapter_model.safetensors"));
}

#[test]
fn only_the_newest_checkpoints_are_kept() {
    let scratch = Scratch::new();
    for (keep, kept) in [(1, &[6][..]), (2, &[5, 6]), (9, &[1, 2, 3, 4, 5, 6])] {
        let output = format!("keep-{keep}");
        scratch.train(&output, &["train.save_every=1", &format!("train.keep={keep}")]);
        assert_eq!(scratch.checkpoints(&output), kept, "{keep}");
    }
    // The end is saved, so that the run can go on.
    scratch.train("never", &["train.save_every=0"]);
    assert_eq!(scratch.checkpoints("never"), [6]);
    // Checkpoints cost nothing of the result.
    assert!(scratch.adapter("never") == scratch.adapter("keep-1"));
}

#[test]
fn a_changed_recipe_is_refused_by_its_keys() {
    let scratch = stopped(&[]);
    let resume = ["train.save_every=4", "--resume"];
    let words = [
        "the recipe differs from the run in `",
        "`train.lr` was 0.01, is 0.02",
        "hint: resume with the recipe",
    ];
    scratch.train_refused(2, &[&resume[..], &["train.lr=0.02"]].concat(), &words);
    let words = ["`adapter.rank` was 4, is 8", "`train.seed` was 7, is 3"];
    scratch.train_refused(2, &[&resume[..], &["adapter.rank=8", "train.seed=3"]].concat(), &words);
    scratch.train_refused(
        2,
        &[&resume[..], &["train.steps=5"]].concat(),
        &["`train.steps` was 6, is 5: a run can only grow"],
    );
    scratch.train_refused(
        2,
        &[&resume[..], &["train.epochs=9"]].concat(),
        &["`train.epochs`", "`train.steps`"],
    );
    scratch.write("more.jsonl", scratch.text("data.jsonl"));
    scratch.train_refused(2, &[&resume[..], &["data.train=more.jsonl"]].concat(), &["`data.train` was "]);
}

#[test]
fn memory_may_change_on_resume() {
    let scratch = stopped(&[]);
    scratch.train("clean", &["train.save_every=4"]);
    let memory =
        ["train.save_every=4", "--resume", "memory.recompute=all", "memory.threads=1", "memory.budget=48MiB"];
    let ended = scratch.train("run", &memory);
    assert!(ended.stderr.contains("results equal within rounding"), "{}", ended.stderr);
    assert_eq!(scratch.json("run/plan.json")["policy"]["recompute"], json!([0, 1]));
    // Neither recompute nor threads change a bit.
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    let scratch = stopped(&[]);
    scratch.train("run", &["train.save_every=4", "--resume", "memory.micro_tokens=40"]);
    scratch.train("clean", &["train.save_every=4"]);
    for (one, other) in scratch.losses("run").iter().zip(scratch.losses("clean")) {
        assert!((one - other).abs() <= 1e-5 * other);
    }
}

#[test]
fn memory_that_was_changed_stays_changed() {
    let scratch = stopped(&["memory.micro_tokens=40"]);
    // Changed, and stopped again before a checkpoint could tell of it.
    let changed = ["train.save_every=100", "memory.micro_tokens=80", "--resume"];
    scratch.train("run", &changed);
    let (adapter, plan) = (scratch.adapter("run"), scratch.json("run/plan.json"));
    scratch.forget_end("run", 4);
    scratch.train("run", &changed);
    assert_eq!(scratch.json("run/plan.json"), plan);
    assert_eq!(plan["policy"]["micro_tokens"], json!(80));
    assert!(scratch.adapter("run") == adapter);
}

#[test]
fn an_unchanged_recipe_keeps_the_plan_of_its_checkpoint() {
    // Free memory may have changed in between: the plan must not follow it.
    let scratch = stopped(&["memory.micro_tokens=57", "memory.recompute=[1]"]);
    let plan = scratch.json("run/plan.json");
    scratch
        .train("run", &["train.save_every=4", "memory.micro_tokens=57", "memory.recompute=[1]", "--resume"]);
    assert_eq!(scratch.json("run/plan.json")["policy"]["micro_tokens"], plan["policy"]["micro_tokens"]);
    assert_eq!(scratch.json("run/plan.json")["policy"]["recompute"], plan["policy"]["recompute"]);
}

#[test]
fn how_often_is_said_and_saved_may_change() {
    let scratch = stopped(&[]);
    scratch.train("clean", &["train.save_every=4"]);
    let changed = ["train.save_every=5", "train.log_every=1", "train.keep=1", "--resume"];
    let ended = scratch.train("run", &changed);
    assert!(!ended.stderr.contains("warning"), "{}", ended.stderr);
    assert_eq!(scratch.checkpoints("run"), [6]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

#[test]
fn a_run_may_grow() {
    let scratch = Scratch::new();
    let constant = ["train.save_every=4", "train.schedule=constant", "train.warmup=0"];
    scratch.train("run", &constant);
    assert_eq!(scratch.checkpoints("run"), [4, 6]);
    let first = scratch.text("run/metrics.jsonl");
    let grown = [&constant[..], &["train.steps=9", "--resume"]].concat();
    let ended = scratch.train("run", &grown);
    let warning = "warning: `train.steps` grew from 6 to 9: the learning rate stays constant\ncontinuing after step 6\n";
    assert!(ended.stderr.starts_with(warning), "{}", ended.stderr);
    scratch.train("clean", &[&constant[..], &["train.steps=9"]].concat());
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert!(!scratch.exists("run/.adapter.old"));
    assert!(scratch.text("run/metrics.jsonl").starts_with(&first), "no step is done twice");
}

/// The state of the last step is saved whatever `save_every` is, and its decay of the rate is over.
#[test]
fn a_run_that_was_never_saved_grows_from_its_end() {
    let scratch = Scratch::new();
    let constant = ["train.save_every=0", "train.schedule=constant", "train.warmup=0"];
    scratch.train("run", &constant);
    let said = scratch.run(&["resume", "run", "train.steps=9"]).stderr;
    assert!(said.contains("continuing after step 6\n"), "{said}");
    scratch.train("clean", &[&constant[..], &["train.steps=9"]].concat());
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.checkpoints("run"), [6, 9]);

    scratch.train("linear", &[]);
    let said = scratch.run(&["resume", "linear", "train.steps=9"]).stderr;
    let warning = "warning: `train.steps` grew from 6 to 9: the learning rate follows the longer schedule from here on, so the result differs from a run that was planned for it\ncontinuing after step 6\n";
    assert!(said.starts_with(warning), "{said}");
    let rates: Vec<f64> = scratch.metrics("linear").iter().map(|row| row["lr"].as_f64().unwrap()).collect();
    assert!(rates[5] < rates[4] && rates[6] > rates[5] && rates[8] < rates[7], "{rates:?}");
}

#[test]
fn the_adapter_of_a_shorter_run_is_not_taken_for_the_result_of_a_longer_one() {
    let scratch = Scratch::new();
    // The longest batch of a longer run may be longer: pinned, so that both are split alike.
    let common =
        ["train.save_every=1", "train.schedule=constant", "train.warmup=0", "memory.micro_tokens=64"];
    scratch.train("run", &common);
    let grown = [&common[..], &["train.steps=60", "--resume"]].concat();
    let mut child = scratch.start(&[&["train", "recipe.toml"][..], &grown].concat());
    while scratch.text("run/metrics.jsonl").lines().count() < 12 {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // Whatever instant it was: there is no adapter until there is that of the longer run.
    assert!(!scratch.exists("run/adapter"));
    scratch.train("run", &grown);
    scratch.train("clean", &[&common[..], &["train.steps=60"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

#[test]
fn stopped_after_the_last_step_only_the_adapter_is_written() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.save_every=3"]);
    let adapter = scratch.adapter("run");
    std::fs::remove_dir_all(scratch.path("run/adapter")).unwrap();
    let ended = scratch.train("run", &["train.save_every=3", "--resume"]);
    assert!(scratch.adapter("run") == adapter);
    let last = scratch.neutral(ended.stderr.lines().last().unwrap());
    assert_eq!(last, "done: 6 steps, adapter in `FOLDER/run/adapter`");
}

#[test]
fn a_checkpoint_without_checksums_is_read_with_care() {
    let scratch = stopped(&[]);
    scratch.forget_checksums("run/checkpoint-4");
    let resume = ["train.save_every=4", "--resume", "--quiet"];
    let moments = scratch.read("run/checkpoint-4/optimizer.safetensors");
    scratch.write("run/checkpoint-4/optimizer.safetensors", &moments[..moments.len() / 2]);
    let ended = scratch.run(&[&["train", "recipe.toml"][..], &resume].concat());
    assert_eq!(ended.code, Some(1));
    assert!(
        ended.stderr.contains("checkpoint-4/optimizer.safetensors`: the file is truncated"),
        "{}",
        ended.stderr
    );
    assert!(!scratch.exists("run/adapter"));
    scratch.write("run/checkpoint-4/optimizer.safetensors", &moments);
    scratch.edit_json("run/checkpoint-4/smidgen_state.json", |state| state["step"] = json!(3));
    scratch.train_refused(
        1,
        &resume,
        &["smidgen_state.json", "expected version 1 to 4 of step 4", "hint: remove"],
    );
}

/// One flipped bit is named with its file and the remedy, wherever it is.
#[test]
fn a_flipped_bit_in_a_checkpoint_is_refused() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.save_every=2"]);
    scratch.forget_end("run", 4);
    let resume = ["train.save_every=2", "--resume"];
    let files = std::fs::read_dir(scratch.path("run/checkpoint-4")).unwrap();
    let mut names: Vec<String> = files.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for name in ["adapter_model.safetensors", "optimizer.safetensors", "smidgen_state.json", "job.toml"] {
        assert!(names.iter().any(|found| found == name), "{names:?}");
    }
    for name in names.iter().filter(|name| *name != "SHA256SUMS") {
        let path = format!("run/checkpoint-4/{name}");
        let whole = scratch.read(&path);
        let mut flipped = whole.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        scratch.write(&path, flipped);
        let words = [
            "checkpoint-4/",
            name,
            "` is damaged: it does not have the SHA-256",
            "hint: remove `checkpoint-4` to continue from `checkpoint-2`",
        ];
        scratch.train_refused(1, &resume, &words);
        scratch.write(&path, whole);
    }
    // The remedy works, and so does a checkpoint of an older program, with a note.
    std::fs::remove_dir_all(scratch.path("run/checkpoint-4")).unwrap();
    scratch.forget_checksums("run/checkpoint-2");
    let ended = scratch.train("run", &resume);
    let note = "note: an earlier smidgen wrote `checkpoint-2`, without `SHA256SUMS`";
    assert!(ended.stderr.contains(note), "{}", ended.stderr);
    scratch.train("clean", &["train.save_every=2"]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}
