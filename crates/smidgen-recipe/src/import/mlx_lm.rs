//! A LoRA configuration of mlx-lm: the YAML of `mlx_lm.lora`, or the adapter_config.json that it writes.
//!
//! Its scale multiplies the adapter directly, so alpha is scale x rank. An iteration is a micro-batch, so steps are
//! iterations ÷ accumulation. Without a schedule the learning rate is constant; gradients are not clipped.
//! Defaults are mlx-lm's: rank 8, scale 20, the last 16 layers, batches of 4, 1000 iterations, learning rate 1e-5.
//! Not supported: preference training, and weights in MLX's own quantization.

use super::adapters::put_adapter;
use super::datasets::{NamedRows, leave_source, put_files, put_rows};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_model_named, put_training};
use super::table::{AdapterPreset, Means, Preset, Row, Settings, TABLE as PEFT, Table};
use super::values::{put_beta_list, put_loss_on, put_number, put_whole, word};
use crate::LossOn;
use crate::value::Value;

const MLX: &str = "mlx-lm";

/// Keys that only mlx-lm has.
#[rustfmt::skip]
pub const MLX_KEYS: &[&str] = &[
    "lora_parameters", "fine_tune_type", "lora_layers", "val_batches", "steps_per_report", "steps_per_eval",
    "resume_adapter_file", "iters",
];

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Rank, &["lora_parameters.rank"]),
    (Means::Dropout, &["lora_parameters.dropout"]),
    (Means::Targets, &["lora_parameters.keys"]),
    (Means::Number("data.max_tokens"), &["max_seq_length"]),
    (Means::Micro, &["batch_size"]),
    (Means::Accumulation, &["grad_accumulation_steps"]),
    (Means::LogSteps, &["steps_per_report"]),
    (Means::Number("train.eval_every"), &["steps_per_eval"]),
    (Means::Number("train.save_every"), &["save_every"]),
    (Means::Number("train.seed"), &["seed"]),
    (Means::Optimizer, &["optimizer"]),
    (Means::Schedule, &["lr_schedule.name"]),
    (Means::Number("train.warmup"), &["lr_schedule.warmup"]),
    (Means::Text("output.dir"), &["adapter_path"]),
    (Means::Left("adapters of mlx-lm have another layout; `adapter.init` takes a PEFT folder"), &["resume_adapter_file"]),
    (Means::Nothing, &["train"]),
];

const TABLE: Table = Table {
    tool: MLX,
    rows: &[ROWS],
    presets: &[
        ("adapter.layers", Preset::Word("last:16")),
        ("data.loss_on", Preset::Word("all")),
        // mlx-lm puts prompts and completions into the chat template of the model.
        ("data.template", Preset::Word("model")),
        ("data.max_tokens", Preset::Whole(2048)),
        ("train.lr", Preset::Number(1e-5)),
        ("train.schedule", Preset::Word("constant")),
        ("train.warmup", Preset::Whole(0)),
        ("train.clip", Preset::Whole(0)),
        ("train.eval_every", Preset::Whole(200)),
    ],
    adapter: AdapterPreset { tool: MLX, rank: 8, alpha: None, dropout: 0.0, all_linear: true },
    micro: 4,
    constant_warmup: true,
    ..PEFT
};

pub fn read_mlx_lm(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some((mode, found)) = fields.take_text("training_mode")
        && !["normal", "sft"].contains(&mode.as_str())
    {
        found.mistake(format!("`training_mode: {mode}` is not supported; only supervised fine-tuning is"));
    }
    let it = Settings { fields, table: TABLE };
    put_mlx_model(fields, draft);
    put_trained(&it, draft);
    put_data(fields, draft);
    put_rate(fields, draft);
    put_training(&it, draft);
    put_steps(&it, draft);
    put_optimizer_config(fields, draft);
    let test = "`smidgen eval` scores a finished run";
    if fields.take("test").is_some_and(|found| found.is_on()) {
        draft.leave_out_if_set(fields.take("test"), test);
        draft.leave_out_if_set(fields.take("test_batches").filter(Found::is_on), test);
    }
    fields.skip(&["test_batches"]);
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
    if name.contains('/') {
        return put_model_named(draft, &found, None);
    }
    // `mlx_model` is the folder that `mlx_lm.convert` writes.
    draft.put("model.path", Value::Text(name), &[&found]);
}

fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft) {
    let kind = it.fields.take("fine_tune_type");
    match (kind.as_ref().and_then(Found::text).as_deref(), &kind) {
        (Some("full"), Some(found)) => draft.put("adapter.kind", word("full"), &[found]),
        (Some("lora" | "dora") | None, kind) => put_lora(it, draft, kind.as_ref()),
        (Some(other), Some(found)) => {
            found.mistake(format!("`{}` must be `lora`, `dora` or `full`, got `{other}`", found.key));
        }
        (Some(_), None) => {}
    }
    if let Some(found) = it.fields.take_first(&["num_layers", "lora_layers"])
        && let Some(count) = found.number()
    {
        let is_part = count >= 1.0 && count.fract() == 0.0;
        let layers = if is_part { format!("last:{count}") } else { "all".to_owned() };
        draft.put("adapter.layers", Value::Text(layers), &[&found]);
    }
}

fn put_lora(it: &Settings<'_, '_>, draft: &mut Draft, kind: Option<&Found<'_>>) {
    put_adapter(it, draft, &kind.into_iter().collect::<Vec<_>>());
    if let Some(found) = kind.filter(|found| found.text().as_deref() == Some("dora")) {
        draft.put("adapter.kind", word("dora"), &[found]);
    }
    let rank = it.take(Means::Rank).map_or(Some(8.0), |found| found.number()).unwrap_or(1.0);
    let [scale, alpha] = ["lora_parameters.scale", "lora_parameters.alpha"].map(|name| it.fields.take(name));
    match (scale, alpha) {
        (Some(scale), alpha) => {
            let Some(factor) = scale.number() else { return };
            draft.put_with("adapter.alpha", Value::Float(factor * rank), &[&scale], "scale x rank");
            draft.leave_out_if_set(alpha, "mlx-lm multiplies by `scale` alone");
        }
        (None, Some(alpha)) => put_number(draft, "adapter.alpha", Some(alpha)),
        (None, None) => draft.put_default("adapter.alpha", Value::Float(20.0 * rank), MLX),
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
    if let Some(found) = fields.take_on("mask_prompt") {
        put_loss_on(draft, LossOn::Completion, &[&found]);
    }
}

/// Data sets on the hub. A split is often a part of one, such as `train[:1000]`, so it is not carried over.
fn put_hub_sets(draft: &mut Draft, found: &Found<'_>) {
    let mut rows = Vec::new();
    for group in found.each().iter().filter_map(Found::group) {
        let name = group.take_first(&["path", "name"]).and_then(|name| name.text());
        rows.extend(name.map(NamedRows::of));
        let why = "`hf:org/name:split`, `data.limit` and `data.columns` choose rows and columns";
        leave_source(&group, &[("", why)], draft);
    }
    put_rows(draft, "data.train", &rows, found);
}

/// Iterations are micro-batches, and so are the batches of an evaluation.
fn put_steps(it: &Settings<'_, '_>, draft: &mut Draft) {
    let count = |means, default: u64| it.take(means).map_or(Some(default), |found| found.count());
    let (Some(micro), Some(parts)) = (count(Means::Micro, 4), count(Means::Accumulation, 1)) else { return };
    match it.fields.take("iters") {
        None => draft.put_default("train.steps", Value::Integer(1000 / i128::from(parts)), MLX),
        Some(found) if parts == 1 => put_number(draft, "train.steps", Some(found)),
        Some(found) => {
            if let Some(iterations) = found.count() {
                let steps = Value::Integer(i128::from(iterations / parts));
                draft.put_with("train.steps", steps, &[&found], &format!("{iterations} / {parts}"));
            }
        }
    }
    match it.fields.take("val_batches") {
        Some(found) => {
            if let Some(batches) = found.number() {
                put_whole(draft, "eval.limit", batches.max(0.0) * micro as f64, &[&found]);
            }
        }
        None => draft.put_default("eval.limit", Value::Integer(25 * i128::from(micro)), MLX),
    }
}

/// The learning rate, which is the first argument of a schedule.
fn put_rate(fields: &Fields<'_>, draft: &mut Draft) {
    let rate = fields.take("learning_rate");
    let arguments = fields.take("lr_schedule.arguments");
    let first = arguments.as_ref().and_then(|found| {
        let item = found.items()?.first()?;
        Some(found.inside(found.key.clone(), found.line, &item.content))
    });
    if first.is_some() {
        put_number(draft, "train.lr", first);
        draft.leave_out_if_set(rate, "`lr_schedule` takes precedence");
    } else {
        put_number(draft, "train.lr", rate);
    }
    if let Some(found) = fields.take("lr_schedule.warmup_init")
        && found.number().is_some_and(|start| start > 0.0)
    {
        draft.leave_out(&found, "warm-up starts at 0");
    }
}

/// The settings of the optimizer that is used.
fn put_optimizer_config(fields: &Fields<'_>, draft: &mut Draft) {
    draft.assume("AdamW corrects the bias of its averages; mlx-lm does so only with `bias_correction`");
    let name = match fields.get("optimizer") {
        Some(Content::Text(name)) => name.clone(),
        _ => "adam".to_owned(),
    };
    if let Some(config) = fields.take_group(&format!("optimizer_config.{name}")) {
        put_beta_list(draft, config.take("betas"));
        put_number(draft, "train.eps", config.take("eps"));
        put_number(draft, "train.weight_decay", config.take("weight_decay"));
        config.skip(&["bias_correction"]);
        draft.leave_rest(&config);
    }
    fields.skip(&["optimizer_config"]);
    // The default of MLX for AdamW.
    if name.eq_ignore_ascii_case("adamw") && !draft.has("train.weight_decay") {
        draft.put_default("train.weight_decay", Value::Float(0.01), MLX);
    }
}
