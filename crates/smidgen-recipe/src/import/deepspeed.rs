//! A DeepSpeed configuration: batch sizes, precision, optimizer, schedule, ZeRO and its offloads.
//!
//! Offload settings say where state is stored, and stages say what ranks divide; both become pins in `[memory]`.
//! Buckets and thresholds tune an allocator, which the plan makes unnecessary. The script that the file belongs to sets
//! the model, the data and the output, and its arguments set the values that are `auto` here.
//! Not supported: inference, pipelines, mixtures of experts, compression.

use super::document::{Content, read_document_file};
use super::draft::{Draft, Source};
use super::fields::{Fields, Found};
use super::mistakes::Mistakes;
use super::vocabulary::{
    StepSize, put_batch, put_betas, put_compute, put_number, put_optimizer, put_whole, word,
};
use crate::reasons::{CHECKPOINTING, SPLIT};
use crate::value::Value;

const DEEPSPEED: &str = "DeepSpeed";
/// The comment at pins in `[memory]`.
pub const PINNED: &str = "remove this line to let the solver choose";

/// Reads a DeepSpeed file that the user imports by itself.
pub fn read_deepspeed(fields: &Fields<'_>, draft: &mut Draft) {
    read_settings(fields, draft, true);
    draft.assume(LORA_ASSUMED);
    want_from_script(draft);
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

/// `alone`: the file is imported by itself, so no other configuration sets what it leaves open.
fn read_settings(fields: &Fields<'_>, draft: &mut Draft, alone: bool) {
    put_sizes(fields, draft, alone);
    let mut enabled = |name: &str| {
        let group = fields.take_group(name)?;
        let found = group.take("enabled");
        draft.leave_rest(&group);
        found
    };
    let (bf16, f16) = (enabled("bf16").or_else(|| enabled("bfloat16")), enabled("fp16"));
    put_compute(draft, bf16.as_ref(), f16.as_ref());
    match fields.take("gradient_clipping") {
        Some(found) if found.is_auto() => ask_for(draft, &found, "train.clip", alone),
        Some(found) => put_number(draft, "train.clip", Some(found)),
        None => draft.put_default("train.clip", Value::Integer(0), DEEPSPEED),
    }
    if let Some(group) = fields.take_group("optimizer") {
        put_deepspeed_optimizer(&group, draft, alone);
    }
    if let Some(group) = fields.take_group("scheduler") {
        put_scheduler(&group, draft, alone);
    }
    if let Some(group) = fields.take_group("zero_optimization") {
        put_zero(&group, draft);
    }
    if let Some(group) = fields.take_group("activation_checkpointing") {
        if let Some(found) = group.take_on("cpu_checkpointing") {
            draft.put_with("memory.activations", word("host"), &[&found], PINNED);
        }
        for found in group.rest() {
            draft.leave_out(&found, CHECKPOINTING);
        }
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

/// `train_batch_size` is the product of the other two and the number of GPUs.
fn put_sizes(fields: &Fields<'_>, draft: &mut Draft, alone: bool) {
    let [whole, micro, accumulation] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]
            .map(|name| fields.take(name));
    let is_given = |found: &Option<Found<'_>>| found.as_ref().is_some_and(|found| !found.is_auto());
    if !is_given(&whole) {
        return match is_given(&micro) {
            true => put_batch(
                draft,
                &StepSize {
                    micro: micro.as_ref(),
                    default_micro: 1,
                    accumulation: accumulation.as_ref().filter(|found| !found.is_auto()),
                    tool: DEEPSPEED,
                },
            ),
            false => {
                let auto: Vec<Found<'_>> = [whole, micro, accumulation].into_iter().flatten().collect();
                match auto.first() {
                    Some(found) => ask_for(draft, found, "train.batch", alone),
                    None if alone => {
                        draft.assume("no batch size is set; assuming 16 samples per step (`train.batch`)")
                    }
                    None => {}
                }
            }
        };
    }
    let found = whole.as_ref().expect("it is given");
    let Some(batch) = found.count() else { return };
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
            &[found],
            &format!("on {} GPUs (`smidgen train RECIPE --ranks {}`)", batch / share, batch / share),
        ),
        _ => draft.put("train.batch", Value::Integer(batch.into()), &[found]),
    }
    for part in [micro, accumulation].iter().flatten().filter(|found| !found.is_auto()) {
        draft.leave_out(part, SPLIT);
    }
}

/// Notes that a value is `auto`, so that the trainer's arguments set it.
fn ask_for(draft: &mut Draft, found: &Found<'_>, key: &'static str, alone: bool) {
    if !alone {
        return;
    }
    draft.assume(format!(
        "`{}` is `auto`, so the trainer's arguments set it; `{key}` has the recipe's default (`{key}=...` changes it)",
        found.key
    ));
}

fn put_deepspeed_optimizer(group: &Fields<'_>, draft: &mut Draft, alone: bool) {
    let kind = group.take("type");
    put_optimizer(draft, kind);
    let Some(params) = group.take_group("params") else {
        return draft.leave_rest(group);
    };
    for (name, key) in [("lr", "train.lr"), ("eps", "train.eps"), ("weight_decay", "train.weight_decay")] {
        match params.take(name) {
            Some(found) if found.is_auto() => ask_for(draft, &found, key, alone),
            found => put_number(draft, key, found),
        }
    }
    match params.take("betas") {
        Some(found) if found.is_auto() => {}
        Some(found) => match found.content {
            Content::List(items) if items.len() == 2 => {
                let part =
                    |index: usize| Some(found.inside(found.key.clone(), found.line, &items[index].content));
                put_betas(draft, part(0), part(1));
                // Both parts are one setting.
                if let Some(line) = draft.lines.iter_mut().find(|line| line.key == "train.betas") {
                    line.source = Source::Keys(vec![(found.key.clone(), found.line)]);
                }
            }
            _ => found.mistake(format!("`{}` must be a list of two numbers", found.key)),
        },
        None => {}
    }
    params.skip(&["torch_adam", "adam_w_mode", "bias_correction", "fused", "amsgrad"]);
    draft.leave_rest(&params);
    draft.leave_rest(group);
}

fn put_scheduler(group: &Fields<'_>, draft: &mut Draft, alone: bool) {
    let Some(kind) = group.take("type") else { return draft.leave_rest(group) };
    let name = kind.text().unwrap_or_default();
    let schedule = match name.as_str() {
        "WarmupLR" => "constant",
        "WarmupDecayLR" => "linear",
        "WarmupCosineLR" => "cosine",
        _ => {
            draft.leave_out(&kind, format!("`{name}` is not supported; `linear` is used"));
            return;
        }
    };
    draft.put("train.schedule", word(schedule), &[&kind]);
    let Some(params) = group.take_group("params") else { return };
    match params.take("warmup_num_steps") {
        Some(found) if found.is_auto() => ask_for(draft, &found, "train.warmup", alone),
        found => put_number(draft, "train.warmup", found),
    }
    match params.take("total_num_steps") {
        Some(found) if found.is_auto() => ask_for(draft, &found, "train.steps", alone),
        Some(found) => {
            if let Some(steps) = found.number() {
                put_whole(draft, "train.steps", steps, &[&found]);
            }
        }
        None => {}
    }
    if let Some(found) = params.take("warmup_max_lr").filter(|found| !found.is_auto()) {
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
    if let Some(found) =
        params.take_any(&["warmup_min_lr", "warmup_min_ratio"]).filter(|found| !found.is_auto())
        && found.number().is_some_and(|least| least > 0.0)
    {
        draft.leave_out(&found, "warm-up starts at 0");
    }
    match params.take("warmup_type") {
        Some(found) if found.text().as_deref() == Some("linear") => {}
        Some(found) => draft.leave_out(&found, "warm-up is linear"),
        None => draft.assume("warm-up is linear; DeepSpeed's default is logarithmic"),
    }
    draft.leave_rest(&params);
    draft.leave_rest(group);
}

fn put_zero(group: &Fields<'_>, draft: &mut Draft) {
    let stage = group.take("stage");
    let number = stage.as_ref().and_then(|found| found.number());
    if let (Some(found), Some(number)) = (&stage, number) {
        match (0.0..=3.0).contains(&number) && number.fract() == 0.0 {
            true => put_stage(draft, found, number),
            false => found.mistake(format!("`{}` must be 0, 1, 2 or 3", found.key)),
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

/// What FSDP divides and offloads. Gradients and optimizer state are stored where the parameters are.
pub fn put_fsdp(group: &Fields<'_>, draft: &mut Draft) {
    let strategy = group.take_any(&[
        "fsdp_sharding_strategy",
        "sharding_strategy",
        "fsdp_reshard_after_forward",
        "reshard_after_forward",
    ]);
    if let Some(found) = strategy {
        // A word, its number in PyTorch, or whether weights are divided again after the forward pass.
        let written = match found.content {
            Content::Boolean(again) => Some(if *again { "FULL_SHARD" } else { "SHARD_GRAD_OP" }.to_owned()),
            _ => found.text().map(|text| text.to_uppercase()),
        };
        let divided = match written.as_deref() {
            None => None,
            Some("FULL_SHARD" | "HYBRID_SHARD" | "TRUE" | "1" | "4") => Some("weights"),
            Some("SHARD_GRAD_OP" | "HYBRID_SHARD_ZERO2" | "FALSE" | "2" | "5") => Some("gradients"),
            Some("NO_SHARD" | "3") => Some("none"),
            Some(_) => {
                draft.leave_out(&found, "unknown strategy; the solver chooses what ranks divide");
                None
            }
        };
        if let Some(divided) = divided {
            draft.put_with("memory.shard", word(divided), &[&found], SHARDED);
        }
    }
    if let Some(found) = group.take_any_on(&["fsdp_offload_params", "offload_params"]) {
        draft.put_with("memory.weights", word("host"), &[&found], PINNED);
        draft.put_with("memory.optimizer_state", word("host"), &[&found], PINNED);
    }
}
