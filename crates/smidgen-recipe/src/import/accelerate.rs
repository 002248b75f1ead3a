//! A configuration of `accelerate launch`: processes, precision, and how DeepSpeed or FSDP place memory.
//!
//! It says how a script is started. The model, the data, the batch and the learning rate are arguments of the script.
//! Not supported: Megatron, SageMaker and TPUs; their settings are reported as not carried over.

use super::deepspeed::{follow_deepspeed, put_fsdp, put_offloaded, put_stage, want_from_script};
use super::document::Content;
use super::draft::{Draft, Source};
use super::fields::{Fields, Found};
use super::interpret::{ONE_DEVICE, put_compute_dtype, put_derived};
use super::values::{put_number, word};
use crate::value::Value;

pub fn read_accelerate(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = fields.take("mixed_precision") {
        put_precision(draft, &found);
    }
    let (deepspeed, fsdp) = (fields.take("deepspeed_config"), fields.take("fsdp_config"));
    if let (Some(deepspeed), Some(fsdp)) = (&deepspeed, &fsdp) {
        fsdp.exclude(deepspeed);
    }
    if let Some(group) = deepspeed.and_then(|found| found.group()) {
        put_deepspeed_plugin(&group, draft);
    }
    if let Some(group) = fsdp.and_then(|found| found.group()) {
        put_fsdp(&group, draft);
        draft.leave_rest(&group);
    }
    if let Some(found) = fields.take_on("use_cpu") {
        draft.put("memory.device", word("cpu"), &[&found]);
    }
    let processes = fields.take("num_processes").and_then(|found| Some((found.count()?, found)));
    let accumulation = fields.take("gradient_accumulation_steps");
    leave_accumulation(draft, accumulation);
    let machines = fields.take("num_machines").and_then(|found| found.count()).unwrap_or(1);
    if let Some((count, found)) = processes.filter(|(count, _)| *count > 1) {
        put_processes(draft, count, &found);
        draft.assume(launch_note(count, machines));
    }
    assume_defaults(draft);
    want_from_script(draft);
}

/// How to start this many ranks.
fn launch_note(count: u64, machines: u64) -> String {
    let command = match machines {
        1 => format!("`smidgen train RECIPE --ranks {count}` starts {count} ranks"),
        _ => format!(
            "`srun` or `mpiexec -n {count} smidgen train RECIPE` starts {count} ranks on {machines} machines"
        ),
    };
    format!("{command}; without it one process trains, with the same losses within rounding")
}

/// `train.batch` counts the samples of all processes. A batch from a DeepSpeed file is that of one process, unless it
/// comes from `train_batch_size`.
fn put_processes(draft: &mut Draft, count: u64, found: &Found<'_>) {
    let line = draft.line("train.batch");
    let is_total = |keys: &[(String, usize)]| keys.iter().any(|(key, _)| key.ends_with(" train_batch_size"));
    let batch = line.filter(|line| matches!(&line.source, Source::Keys(keys) if !is_total(keys)));
    match batch.and_then(|line| line.toml.parse::<u64>().ok()) {
        Some(batch) => {
            let total = Value::Integer(i128::from(batch) * i128::from(count));
            put_derived(draft, "train.batch", total, found, &format!("{batch} x {count}"));
        }
        None if line.is_some() => {}
        None => draft.leave_out(
            found,
            format!(
                "`train.batch` counts the samples of all {count} devices per step: micro-batch x accumulation x {count}"
            ),
        ),
    }
    draft.assumed.retain(|assumption| assumption != ONE_DEVICE);
}

/// Notes what only the script's arguments set, and the recipe's defaults for it.
fn assume_defaults(draft: &mut Draft) {
    let (whats, defaults): (Vec<&str>, Vec<&str>) = [
        ("adapter.kind", "what is trained", "LoRA of rank 16"),
        ("train.batch", "the batch", "16 samples per step"),
        ("train.steps", "the length", "200 steps"),
        ("train.lr", "the learning rate", "2e-4"),
    ]
    .into_iter()
    .filter(|(key, ..)| !draft.has(key))
    .map(|(_, what, default)| (what, default))
    .unzip();
    draft.assume(format!(
        "the script's arguments set {}; the recipe has its own defaults ({})",
        whats.join(", "),
        defaults.join(", ")
    ));
}

fn put_precision(draft: &mut Draft, found: &Found<'_>) {
    let is_no = match found.content {
        // YAML reads `no` as a boolean.
        Content::Boolean(on) => !on,
        Content::Text(text) => text == "no",
        _ => false,
    };
    if is_no {
        return draft.put("model.compute", word("f32"), &[found]);
    }
    put_compute_dtype(draft, Some(found.clone()));
}

fn put_deepspeed_plugin(group: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = group.take("deepspeed_config_file") {
        follow_deepspeed(draft, &found);
    }
    let stage = group.take("zero_stage");
    let number = stage.as_ref().and_then(|found| found.number());
    if let (Some(found), Some(number)) = (&stage, number) {
        put_stage(draft, found, number);
    }
    for (name, key) in
        [("offload_optimizer_device", "memory.optimizer_state"), ("offload_param_device", "memory.weights")]
    {
        if let Some(found) = group.take(name)
            && let Some(place) = found.text()
        {
            put_offloaded(draft, &found, &place, key);
            if key == "memory.weights" && place != "none" && number.is_some_and(|stage| stage < 3.0) {
                found.mistake(format!("`{}` needs `zero_stage` 3", found.key));
            }
        }
    }
    put_number(draft, "train.clip", group.take("gradient_clipping"));
    leave_accumulation(draft, group.take("gradient_accumulation_steps"));
    draft.leave_rest(group);
}

fn leave_accumulation(draft: &mut Draft, found: Option<Found<'_>>) {
    draft.leave_out_if_set(found, "part of `train.batch`: micro-batch x accumulation x devices");
}
