//! A DeepSpeed configuration: batch sizes, precision, optimizer, schedule, ZeRO and its offloads.
//!
//! Offload settings say where state is stored, and stages say what ranks divide; both become pins in `[memory]`.
//! Buckets and thresholds tune an allocator, which the plan makes unnecessary. The script that the file belongs to sets
//! the model, the data and the output, and its arguments set the values that are `auto` here.
//! Not supported: inference, pipelines, mixtures of experts, compression.

use super::document::{Content, read_document_file};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_compute, put_training};
use super::mistakes::Mistakes;
use super::table::{Means, Preset, Row, Settings, TABLE as PEFT, Table};
use super::values::{Choice, PINNED, choose, put_number, word};
use crate::reasons::SPLIT;
use crate::value::Value;

const DEEPSPEED: &str = "DeepSpeed";
/// Reads a DeepSpeed file that the user imports by itself.
pub fn read_deepspeed(fields: &Fields<'_>, draft: &mut Draft) {
    read_settings(fields, draft, true);
    draft.assume(LORA_ASSUMED);
    want_from_script(draft);
}

/// Reads the DeepSpeed settings that a trainer's file names or contains.
pub fn follow(it: &Settings<'_, '_>, draft: &mut Draft) {
    if let Some(found) = it.take(Means::DeepSpeed).filter(Found::is_on) {
        follow_deepspeed(draft, &found);
    }
}

/// Reads the DeepSpeed settings that another configuration names or contains. What that configuration sets itself
/// stays, and so does what is `auto` here.
pub fn follow_deepspeed(draft: &mut Draft, found: &Found<'_>) {
    let mut inner = Draft::new(draft.places.clone());
    let Content::Text(path) = found.content else {
        let Some(group) = found.group() else { return };
        read_settings(&group, &mut inner, false);
        inner.leave_rest(&group);
        return draft.adopt(inner, "");
    };
    let candidates = draft.places.candidates(path);
    let Some(file) = candidates.iter().find(|file| file.is_file()) else {
        let why = "not found next to the imported file or in the working directory, so its offload settings are not \
                   imported; the solver chooses by `memory.budget`";
        return draft.leave_out(found, why);
    };
    let entries = match read_document_file(file) {
        Ok(entries) => entries,
        Err(reason) => return found.mistake(format!("`{}` names `{path}`: {reason}", found.key)),
    };
    let mistakes = Mistakes::default();
    let fields = Fields::of(&entries, &mistakes);
    read_settings(&fields, &mut inner, false);
    inner.leave_rest(&fields);
    drop(fields);
    for mistake in mistakes.sorted() {
        found.mistake(format!("`{}` names `{path}`: {mistake}", found.key));
    }
    let name = file.file_name().map_or_else(|| path.clone(), |name| name.to_string_lossy().into_owned());
    draft.adopt(inner, &format!("{name}: "));
}

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Micro, &["train_micro_batch_size_per_gpu"]),
    (Means::Accumulation, &["gradient_accumulation_steps"]),
    (Means::Bf16, &["bf16.enabled", "bfloat16.enabled"]),
    (Means::F16, &["fp16.enabled"]),
    (Means::Number("train.clip"), &["gradient_clipping"]),
    (Means::Optimizer, &["optimizer.type"]),
    (Means::Number("train.lr"), &["optimizer.params.lr"]),
    (Means::Number("train.eps"), &["optimizer.params.eps"]),
    (Means::Number("train.weight_decay"), &["optimizer.params.weight_decay"]),
    (Means::Betas, &["optimizer.params.betas"]),
    (Means::Nothing, &["optimizer.params.torch_adam", "optimizer.params.adam_w_mode", "optimizer.params.bias_correction",
        "optimizer.params.fused", "optimizer.params.amsgrad"]),
    (Means::Schedule, &["scheduler.type"]),
    (Means::Number("train.warmup"), &["scheduler.params.warmup_num_steps"]),
    (Means::Steps, &["scheduler.params.total_num_steps"]),
    (Means::HostActivations, &["activation_checkpointing.cpu_checkpointing"]),
];

const TABLE: Table =
    Table { tool: DEEPSPEED, rows: &[ROWS], presets: &[("train.clip", Preset::Whole(0))], ..PEFT };

/// `alone`: the file is imported by itself, so no other configuration sets what it leaves open.
fn read_settings(fields: &Fields<'_>, draft: &mut Draft, alone: bool) {
    let micro = u64::from(!put_sizes(fields, draft, alone));
    let it = Settings { fields, table: Table { micro, ..TABLE } };
    put_compute(draft, it.take(Means::Bf16).as_ref(), it.take(Means::F16).as_ref());
    put_training(&it, draft);
    if alone {
        for (means, names) in ROWS {
            let key = match means {
                Means::Number(key) => key,
                Means::Steps => "train.steps",
                _ => continue,
            };
            if let Some(found) = fields.take(names[0]).filter(Found::is_auto) {
                ask_for(draft, &found, key);
            }
        }
    }
    put_schedule_rates(fields, draft);
    if let Some(group) = fields.take_group("zero_optimization") {
        put_zero(&group, draft);
    }
}

/// For files that do not say what is trained.
pub const LORA_ASSUMED: &str = "the script decides what is trained, not this file; assuming a LoRA adapter of rank 16 \
                                on all linear layers (`adapter.kind=full` trains the weights)";

/// Asks for the required keys that only the script's arguments set.
pub fn want_from_script(draft: &mut Draft) {
    draft.want("model.path", "the model that the script loads");
    draft.want("data.train", "the file that the script trains on");
}

/// `train_batch_size` is the product of the other two and the number of GPUs. Returns whether nothing is left to the
/// size of a micro-batch.
fn put_sizes(fields: &Fields<'_>, draft: &mut Draft, alone: bool) -> bool {
    let [whole, micro, accumulation] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
            .map(|name| fields.take(name));
    let is_given = |found: &Option<Found<'_>>| found.as_ref().is_some_and(|found| !found.is_auto());
    let Some(found) = whole.clone().filter(|found| !found.is_auto()) else {
        if is_given(&micro) {
            return false;
        }
        match [whole, micro, accumulation].into_iter().flatten().next() {
            _ if !alone => {}
            Some(found) => ask_for(draft, &found, "train.batch"),
            None => draft.assume("no batch size is set; assuming 16 samples per step (`train.batch`)"),
        }
        return true;
    };
    let Some(batch) = found.count() else { return true };
    let count = |found: &Option<Found<'_>>| found.as_ref().filter(|found| !found.is_auto())?.count();
    let share = match (count(&micro), count(&accumulation)) {
        (None, None) => None,
        (micro, accumulation) => micro.unwrap_or(1).checked_mul(accumulation.unwrap_or(1)),
    };
    let both = is_given(&micro) && is_given(&accumulation);
    match share {
        Some(share) if batch % share != 0 => {
            let parts =
                [&micro, &accumulation].map(|part| part.as_ref().map(|found| found.content.describe()));
            let parts = parts.into_iter().flatten().collect::<Vec<_>>().join(" x ");
            found.mistake(format!("`{}` is {batch}, which is not a multiple of {parts}", found.key));
        }
        Some(share) if both && batch / share > 1 => draft.put_with(
            "train.batch",
            Value::Integer(batch.into()),
            &[&found],
            &format!("on {} GPUs (`smidgen train RECIPE --ranks {}`)", batch / share, batch / share),
        ),
        _ => draft.put("train.batch", Value::Integer(batch.into()), &[&found]),
    }
    for part in [micro, accumulation].iter().flatten().filter(|found| !found.is_auto()) {
        draft.leave_out(part, SPLIT);
    }
    true
}

/// Notes that a value is `auto`, so that the trainer's arguments set it.
fn ask_for(draft: &mut Draft, found: &Found<'_>, key: &'static str) {
    draft.assume(format!(
        "`{}` is `auto`, so the trainer's arguments set it; `{key}` has the recipe's default (`{key}=...` changes it)",
        found.key
    ));
}

/// The learning rates of a schedule, and the form of its warm-up.
fn put_schedule_rates(fields: &Fields<'_>, draft: &mut Draft) {
    if !fields.has("scheduler.type") {
        return;
    }
    if let Some(found) = fields.take("scheduler.params.warmup_max_lr").filter(|found| !found.is_auto()) {
        let before: Option<f64> = draft.line("train.lr").and_then(|line| line.toml.parse().ok());
        if before.is_none() || found.number() != before {
            put_number(draft, "train.lr", Some(found));
            if before.is_some() {
                draft.assume(
                    "`warmup_max_lr` is the learning rate, because DeepSpeed's schedule overrides the optimizer's `lr`",
                );
            }
        }
    }
    let least = ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"];
    if let Some(found) = fields.take_first(&least).filter(|found| !found.is_auto())
        && found.number().is_some_and(|least| least > 0.0)
    {
        draft.leave_out(&found, "warm-up starts at 0");
    }
    match fields.take("scheduler.params.warmup_type") {
        Some(found) if found.text().as_deref() == Some("linear") => {}
        Some(found) => draft.leave_out(&found, "warm-up is linear"),
        None => draft.assume("warm-up is linear; DeepSpeed's default is logarithmic"),
    }
}

fn put_zero(group: &Fields<'_>, draft: &mut Draft) {
    let stage = group.take("stage");
    let number = stage.as_ref().and_then(|found| found.number());
    if let (Some(found), Some(number)) = (&stage, number) {
        if (0.0..=3.0).contains(&number) && number.fract() == 0.0 {
            put_stage(draft, found, number);
        } else {
            found.mistake(format!("`{}` must be 0, 1, 2 or 3", found.key));
        }
    }
    let stage = number.unwrap_or(0.0);
    put_offload(group, draft, "offload_optimizer", "memory.optimizer_state", stage, 1.0);
    put_offload(group, draft, "offload_param", "memory.weights", stage, 3.0);
    // The name of the setting before 2021.
    if let Some(found) = group.take_on("cpu_offload") {
        draft.put_with("memory.optimizer_state", word("host"), &[&found], PINNED);
    }
    draft.leave_out_if_set(
        group.take_on("zero_quantized_nontrainable_weights"),
        "frozen weights can be quantized while they load (`model.base=int8` or `nf4`)",
    );
    draft.leave_rest(group);
}

/// `memory.shard` from a stage of ZeRO.
pub fn put_stage(draft: &mut Draft, found: &Found<'_>, stage: f64) {
    let divided = match stage {
        1.0 => "moments",
        2.0 => "gradients",
        3.0 => "weights",
        _ => return,
    };
    draft.put_with("memory.shard", word(divided), &[found], SHARDED);
}

/// The comment at `memory.shard`.
const SHARDED: &str = "matters with several ranks; remove this line to let the solver choose";

fn put_offload(zero: &Fields<'_>, draft: &mut Draft, name: &str, key: &'static str, stage: f64, needed: f64) {
    let Some(whole) = zero.take(name) else { return };
    let Some(group) = whole.group() else { return };
    let device = group.take("device");
    let place = device.as_ref().and_then(|found| found.text());
    if let (Some(found), Some(place)) = (&device, place) {
        put_offloaded(draft, found, &place, key);
        if place != "none" && stage < needed {
            whole.mistake(format!("`{}` needs `stage` {needed}, but the stage is {stage}", whole.key));
        }
    }
    draft.leave_rest(&group);
}

/// A pin in `[memory]` from DeepSpeed's name of a device.
pub fn put_offloaded(draft: &mut Draft, found: &Found<'_>, place: &str, key: &'static str) {
    match place {
        "none" => {}
        "cpu" => draft.put_with(key, word("host"), &[found], PINNED),
        "nvme" => {
            draft.put_with(key, word("host"), &[found], "pinned memory instead of disk");
            draft.assume(format!("`{}` is a disk; on a GPU, `{key}` uses pinned memory instead", found.key));
        }
        _ => found.mistake(format!("`{}` must be `none`, `cpu` or `nvme`, got `{place}`", found.key)),
    }
}

/// What FSDP's strategies divide: a word, its number in PyTorch, or whether weights are divided again after the forward
/// pass.
#[rustfmt::skip]
const STRATEGIES: &[Choice] = &[
    (&["full_shard", "hybrid_shard", "true", "1", "4"], "weights", SHARDED),
    (&["shard_grad_op", "hybrid_shard_zero2", "false", "2", "5"], "gradients", SHARDED),
    (&["no_shard", "3"], "none", SHARDED),
];

/// What FSDP divides and offloads. Gradients and optimizer state are stored where the parameters are.
pub fn put_fsdp(group: &Fields<'_>, draft: &mut Draft) {
    #[rustfmt::skip]
    let names = ["fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward"];
    if let Some(found) = group.take_first(&names) {
        let written = match found.content {
            Content::Boolean(again) => Some(again.to_string()),
            _ => found.text().map(|text| text.to_lowercase()),
        };
        match written.map(|written| choose(STRATEGIES, &written)) {
            Some(Some((_, divided, remark))) => {
                draft.put_with("memory.shard", word(divided), &[&found], remark)
            }
            Some(None) => draft.leave_out(&found, "unknown strategy; the solver chooses what ranks divide"),
            None => {}
        }
    }
    if let Some(found) = group.take_first(&["fsdp_offload_params", "offload_params"])
        && found.boolean() == Some(true)
    {
        draft.put_with("memory.weights", word("host"), &[&found], PINNED);
        draft.put_with("memory.optimizer_state", word("host"), &[&found], PINNED);
    }
}
