//! A LoRA configuration of mlx-lm: the YAML of `mlx_lm.lora`, or the adapter_config.json that it writes.
//!
//! Its scale multiplies the adapter directly, so alpha is scale x rank. An iteration is a micro-batch, so steps are
//! iterations ÷ accumulation. Without a schedule the learning rate is constant; gradients are not clipped.
//! Defaults are mlx-lm's: rank 8, scale 20, the last 16 layers, batches of 4, 1000 iterations, learning rate 1e-5.
//! Not supported: preference training, and weights in MLX's own quantization.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::{NamedRows, put_files, put_rows};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::vocabulary::{
    put_beta_list, put_loss_on, put_model, put_number, put_number_or, put_optimizer, put_text, put_whole,
    word,
};
use crate::LossOn;
use crate::value::Value;

const MLX: &str = "mlx-lm";

/// Keys that only mlx-lm has.
pub const MLX_KEYS: &[&str] = &[
    "lora_parameters",
    "fine_tune_type",
    "lora_layers",
    "val_batches",
    "steps_per_report",
    "steps_per_eval",
    "resume_adapter_file",
    "iters",
];

pub fn read_mlx_lm(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some((mode, found)) = fields.take_text("training_mode")
        && !["normal", "sft"].contains(&mode.as_str())
    {
        found.mistake(format!("`training_mode: {mode}` is not supported; only supervised fine-tuning is"));
    }
    put_mlx_model(fields, draft);
    put_trained(fields, draft);
    put_data(fields, draft);
    put_steps(fields, draft);
    put_rate(fields, draft);
    put_text(draft, "output.dir", fields.take("adapter_path"));
    for (name, why) in [
        ("resume_adapter_file", "adapters of mlx-lm have another layout; `adapter.init` takes a PEFT folder"),
        ("test", "`smidgen eval` scores a finished run"),
        ("test_batches", "`smidgen eval` scores a finished run"),
    ] {
        if let Some(found) = fields.take(name).filter(Found::is_on)
            && (name != "test_batches" || matches!(fields.get("test"), Some(Content::Boolean(true))))
        {
            draft.leave_out(&found, why);
        }
    }
    fields.skip(&["train"]);
}

/// Checkpoints of `mlx-community` with bits in their name are quantized in MLX's format.
fn put_mlx_model(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(found) = fields.take("model") else { return };
    let Some(name) = found.text() else { return };
    if name.starts_with("mlx-community/") && name.to_lowercase().contains("bit") {
        draft.want("model.path", format!("the model that `{name}` was converted from"));
        return draft.leave_out(
            &found,
            "weights in MLX's quantization are not supported; name the original model, and `model.base = \"nf4\"` \
             quantizes it",
        );
    }
    match name.contains('/') {
        true => put_model(draft, Some(found), None),
        // `mlx_model` is the folder that `mlx_lm.convert` writes.
        false => draft.put("model.path", Value::Text(name), &[&found]),
    }
}

fn put_trained(fields: &Fields<'_>, draft: &mut Draft) {
    let kind = fields.take("fine_tune_type");
    let kind_word = kind.as_ref().map_or(Some("lora".to_owned()), |found| found.text());
    let group = fields.take_group("lora_parameters");
    match (kind_word.as_deref(), &kind) {
        (Some("full"), Some(found)) => draft.put("adapter.kind", word("full"), &[found]),
        (Some("lora" | "dora"), _) => put_lora(group.as_ref(), draft, kind.as_ref()),
        (Some(other), Some(found)) => {
            found.mistake(format!("`{}` must be `lora`, `dora` or `full`, got `{other}`", found.key));
        }
        _ => {}
    }
    if kind_word.as_deref() == Some("dora")
        && let Some(found) = &kind
    {
        draft.put("adapter.kind", word("dora"), &[found]);
    }
    match fields.take_any(&["num_layers", "lora_layers"]) {
        None => draft.put_default("adapter.layers", word("last:16"), MLX),
        Some(found) => match found.number() {
            Some(count) if count >= 1.0 && count.fract() == 0.0 => {
                draft.put("adapter.layers", Value::Text(format!("last:{count}")), &[&found]);
            }
            Some(_) => draft.put("adapter.layers", word("all"), &[&found]),
            None => {}
        },
    }
}

fn put_lora(group: Option<&Fields<'_>>, draft: &mut Draft, kind: Option<&Found<'_>>) {
    let take = |name: &str| group.and_then(|group| group.take(name));
    let (rank, scale, alpha) = (take("rank"), take("scale"), take("alpha"));
    let rank_number = rank.as_ref().map_or(Some(8.0), |found| found.number());
    let settings = AdapterSettings {
        rank,
        default_rank: 8,
        default_alpha: Some(160.0),
        dropout: take("dropout"),
        targets: take("keys"),
        all_by_default: true,
        tool: MLX,
        ..AdapterSettings::default()
    };
    put_adapter(draft, settings, &kind.into_iter().collect::<Vec<_>>());
    let number = |found: &Option<Found<'_>>| found.as_ref().and_then(|found| found.number());
    match (number(&scale), number(&alpha), rank_number) {
        (Some(factor), _, Some(rank)) => {
            let from = scale.as_ref().expect("it has a number");
            draft.put_with("adapter.alpha", Value::Float(factor * rank), &[from], "scale x rank");
            if let Some(alpha) = &alpha {
                draft.leave_out(alpha, "mlx-lm multiplies by `scale` alone");
            }
        }
        (None, Some(value), _) => {
            draft.put("adapter.alpha", Value::Float(value), &[alpha.as_ref().expect("it has a number")]);
        }
        (None, None, Some(rank)) => {
            draft.put_default("adapter.alpha", Value::Float(20.0 * rank), MLX);
        }
        (_, _, None) => {}
    }
    if let Some(group) = group {
        draft.leave_rest(group);
    }
}

/// A folder with train.jsonl and valid.jsonl.
fn put_data(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some((folder, found)) = fields.take_text("data") {
        let is_hub_name = folder.split('/').count() == 2 && !folder.starts_with(['.', '/']);
        if is_hub_name && !draft.places.exists(&folder) && !folder.ends_with('/') {
            put_files(draft, "data.train", &[folder], &found);
        } else {
            let file = |name: &str| Value::Text(format!("{}/{name}.jsonl", folder.trim_end_matches('/')));
            draft.put("data.train", file("train"), &[&found]);
            draft.put_with("data.eval", file("valid"), &[&found], "remove it if there is none");
        }
    }
    if let Some(found) = fields.take("hf_dataset") {
        put_hub_sets(draft, &found);
    }
    match fields.take_on("mask_prompt") {
        Some(found) => put_loss_on(draft, LossOn::Completion, &[&found]),
        None => draft.put_default("data.loss_on", word("all"), MLX),
    }
    // mlx-lm puts prompts and completions into the chat template of the model.
    draft.put_default("data.template", word("model"), MLX);
    put_number_or(draft, "data.max_tokens", fields.take("max_seq_length"), Value::Integer(2048), MLX);
}

/// Data sets on the hub. A split is often a part of one, such as `train[:1000]`, so it is not carried over.
fn put_hub_sets(draft: &mut Draft, found: &Found<'_>) {
    let sets = match found.content {
        Content::List(items) => items.iter().map(|item| (item.line, &item.content)).collect(),
        content => vec![(found.line, content)],
    };
    let mut rows = Vec::new();
    for (line, content) in sets {
        let Some(group) = found.inside(found.key.clone(), line, content).group() else { return };
        let name = group.take_any(&["path", "name"]).and_then(|name| name.text());
        rows.extend(name.map(NamedRows::of));
        for rest in group.rest() {
            draft.leave_out(
                &rest,
                "`hf:org/name:split`, `data.limit` and `data.columns` choose rows and columns",
            );
        }
    }
    put_rows(draft, "data.train", &rows, found);
}

fn put_steps(fields: &Fields<'_>, draft: &mut Draft) {
    let (size, accumulation) = (fields.take("batch_size"), fields.take("grad_accumulation_steps"));
    let count = |found: &Option<Found<'_>>, default: u64| found.as_ref().map_or(Some(default), Found::count);
    let (Some(micro), Some(parts)) = (count(&size, 4), count(&accumulation, 1)) else { return };
    let from: Vec<&Found<'_>> = size.iter().chain(&accumulation).collect();
    let batch = Value::Integer(i128::from(micro) * i128::from(parts));
    match from.is_empty() {
        true => draft.put_default("train.batch", batch, MLX),
        false => draft.put("train.batch", batch, &from),
    }
    match fields.take("iters") {
        None => draft.put_default("train.steps", Value::Integer(1000 / i128::from(parts).max(1)), MLX),
        Some(found) if parts == 1 => put_number(draft, "train.steps", Some(found)),
        Some(found) => {
            if let Some(iterations) = found.count() {
                let steps = Value::Integer(i128::from(iterations / parts));
                draft.put_with("train.steps", steps, &[&found], &format!("{iterations} / {parts}"));
            }
        }
    }
    put_number(draft, "train.log_every", fields.take("steps_per_report"));
    put_number_or(draft, "train.eval_every", fields.take("steps_per_eval"), Value::Integer(200), MLX);
    match fields.take("val_batches").and_then(|found| Some((found.number()?, found))) {
        Some((batches, found)) if batches > 0.0 => {
            put_whole(draft, "eval.limit", batches * micro as f64, &[&found]);
        }
        Some((_, found)) => draft.put("eval.limit", Value::Integer(0), &[&found]),
        None => draft.put_default("eval.limit", Value::Integer(25 * i128::from(micro)), MLX),
    }
    put_number(draft, "train.save_every", fields.take("save_every"));
    put_number(draft, "train.seed", fields.take("seed"));
    draft.put_default("train.clip", Value::Integer(0), MLX);
}

fn put_rate(fields: &Fields<'_>, draft: &mut Draft) {
    let optimizer = fields.take("optimizer");
    let name = optimizer.as_ref().and_then(|found| found.text()).unwrap_or_else(|| "adam".to_owned());
    put_optimizer(draft, optimizer);
    draft.assume("AdamW corrects the bias of its averages; mlx-lm does so only with `bias_correction`");
    let configs = fields.take_group("optimizer_config");
    if let Some(config) = configs.as_ref().and_then(|configs| configs.take_group(&name)) {
        put_optimizer_config(&config, draft);
    }
    // The default of MLX for AdamW.
    if name.eq_ignore_ascii_case("adamw") && !draft.has("train.weight_decay") {
        draft.put_default("train.weight_decay", Value::Float(0.01), MLX);
    }
    let rate = fields.take("learning_rate");
    let schedule = fields.take("lr_schedule").and_then(|found| found.group());
    let Some(schedule) = schedule else {
        put_number_or(draft, "train.lr", rate, Value::Float(1e-5), MLX);
        draft.put_default("train.schedule", word("constant"), MLX);
        return draft.put_default("train.warmup", Value::Integer(0), MLX);
    };
    put_schedule_group(&schedule, draft, rate);
}

fn put_optimizer_config(config: &Fields<'_>, draft: &mut Draft) {
    put_beta_list(draft, config.take("betas"));
    put_number(draft, "train.eps", config.take("eps"));
    put_number(draft, "train.weight_decay", config.take("weight_decay"));
    config.skip(&["bias_correction"]);
    draft.leave_rest(config);
}

/// A schedule with its arguments, of which the first is the learning rate.
fn put_schedule_group(schedule: &Fields<'_>, draft: &mut Draft, rate: Option<Found<'_>>) {
    let arguments = schedule.take("arguments");
    let first = arguments.as_ref().and_then(|found| {
        let item = found.items()?.first()?;
        Some(found.inside(found.key.clone(), found.line, &item.content))
    });
    if let Some(rate) = rate.filter(|_| first.is_some()) {
        draft.leave_out(&rate, "`lr_schedule` takes precedence");
    }
    put_number(draft, "train.lr", first);
    match schedule.take_text("name") {
        Some((name, found)) => match name.as_str() {
            "cosine_decay" => draft.put("train.schedule", word("cosine"), &[&found]),
            "linear_schedule" => draft.put("train.schedule", word("linear"), &[&found]),
            _ => {
                draft.leave_out(&found, format!("`{name}` is not supported; the learning rate is constant"));
                draft.put("train.schedule", word("constant"), &[&found]);
            }
        },
        None => draft.put_default("train.schedule", word("constant"), MLX),
    }
    put_number_or(draft, "train.warmup", schedule.take("warmup"), Value::Integer(0), MLX);
    if let Some(found) = schedule.take("warmup_init")
        && found.number().is_some_and(|start| start > 0.0)
    {
        draft.leave_out(&found, "warm-up starts at 0");
    }
    draft.leave_rest(schedule);
}
