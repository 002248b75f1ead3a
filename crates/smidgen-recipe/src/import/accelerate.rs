//! A configuration of `accelerate launch`: processes, precision, and how DeepSpeed or FSDP spread memory.
//!
//! It says how a script is started, not what is trained: the model, the data, the batch and the rate are arguments
//! of that script.
//! Left out: Megatron, SageMaker, TPUs, whose groups are listed as they are.

use super::deepspeed::{PINNED, put_offloaded};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::trainer::leave_deepspeed;
use super::vocabulary::{put_number, word};

pub fn read_accelerate(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = fields.take("mixed_precision") {
        put_precision(draft, &found);
    }
    let (deepspeed, fsdp) = (fields.take("deepspeed_config"), fields.take("fsdp_config"));
    if let (Some(deepspeed), Some(fsdp)) = (&deepspeed, &fsdp) {
        draft.mistake(
            fsdp.line,
            format!("`fsdp_config` and `deepspeed_config` in line {} exclude each other", deepspeed.line),
        );
    }
    if let Some(group) = deepspeed.and_then(|found| found.group(draft)) {
        put_deepspeed_plugin(&group, draft);
    }
    if let Some(group) = fsdp.and_then(|found| found.group(draft)) {
        put_fsdp(&group, draft);
    }
    if let Some(found) = fields.take("use_cpu")
        && found.boolean(draft) == Some(true)
    {
        draft.put("memory.device", word("cpu"), &[&found]);
    }
    let processes = fields.take("num_processes").and_then(|found| Some((found.count(draft)?, found)));
    let accumulation = fields.take("gradient_accumulation_steps");
    leave_accumulation(draft, accumulation);
    if let Some((count, found)) = processes.filter(|(count, _)| *count > 1) {
        let factors = format!("micro-batch x accumulation x {count}");
        draft.leave_out(&found, format!("`train.batch` is what {count} devices take in a step: {factors}"));
    }
    draft.assume(
        "the script's arguments say what is trained, the batch, the rate and the length: the recipe has its own \
         defaults (LoRA of rank 16, 16 samples a step, 200 steps, 2e-4)",
    );
    for (key, what) in [
        ("model.path", "the model that the script loads"),
        ("data.train", "the file that the script trains on"),
        ("output.dir", "the folder of the run"),
    ] {
        draft.want(key, what);
    }
}

fn put_precision(draft: &mut Draft, found: &Found<'_>) {
    // `no` is a boolean to YAML.
    let precision = match found.content {
        super::document::Content::Boolean(false) => Some("no".to_owned()),
        _ => found.text(draft),
    };
    match precision.as_deref() {
        Some("no") => draft.put("model.compute", word("f32"), &[found]),
        Some("bf16") => draft.put("model.compute", word("bf16"), &[found]),
        Some("fp16") => draft.put("model.compute", word("f16"), &[found]),
        Some(other) => {
            draft.leave_out(found, format!("`{other}` is no precision here: the device's best is taken"))
        }
        None => {}
    }
}

fn put_deepspeed_plugin(group: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = group.take("deepspeed_config_file") {
        leave_deepspeed(draft, &found);
    }
    let stage = group.take("zero_stage");
    let number = stage.as_ref().and_then(|found| found.number(draft));
    if let Some(found) = &stage {
        draft.leave_out(found, super::reasons::SHARDING);
    }
    for (name, key) in
        [("offload_optimizer_device", "memory.optimizer_state"), ("offload_param_device", "memory.weights")]
    {
        if let Some(found) = group.take(name)
            && let Some(place) = found.text(draft)
        {
            put_offloaded(draft, &found, &place, key);
            if key == "memory.weights" && place != "none" && number.is_some_and(|stage| stage < 3.0) {
                draft.mistake(found.line, format!("`{}` needs `zero_stage` 3", found.key));
            }
        }
    }
    put_number(draft, "train.clip", group.take("gradient_clipping"));
    leave_accumulation(draft, group.take("gradient_accumulation_steps"));
    draft.leave_rest(group);
}

fn leave_accumulation(draft: &mut Draft, found: Option<Found<'_>>) {
    if let Some(found) = found {
        draft.leave_out(&found, "part of `train.batch`: micro-batch x accumulation x devices");
    }
}

fn put_fsdp(group: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = group.take_any(&["fsdp_offload_params", "offload_params"])
        && found.boolean(draft) == Some(true)
    {
        // FSDP keeps gradients and moments where the parameters are.
        draft.put_with("memory.weights", word("host"), &[&found], PINNED);
        draft.put_with("memory.optimizer_state", word("host"), &[&found], PINNED);
    }
    draft.leave_rest(group);
}
