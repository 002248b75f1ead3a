//! A configuration of LLaMA-Factory's version 1, whose settings have other names than those of version 0.
//!
//! Adapter, quantization, optimizer and sharding are groups with a `name`; without `peft_config` every weight is
//! trained. The batch is `global_batch_size`, or one micro-batch; a rate without a schedule is constant.
//! Not supported: sampling, merging and evaluation, which such files also configure; they are refused.

use super::adapters::{put_adapter, put_full};
use super::datasets::put_files;
use super::deepspeed::follow;
use super::document::{Content, Entry};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_model, put_training, put_weights};
use super::llama_factory::put_trained_layers;
use super::table::{AdapterPreset, Means, Preset, Row, Settings, TABLE as PEFT, Table};
use super::values::{per_epoch_note, put_number, word};

const TOOL: &str = "LLaMA-Factory";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Model, &["model"]),
    (Means::Bits, &["quant_config.quantization_bit"]),
    (Means::Rank, &["peft_config.r"]),
    (Means::Alpha, &["peft_config.lora_alpha"]),
    (Means::Dropout, &["peft_config.lora_dropout"]),
    (Means::Targets, &["peft_config.target_modules"]),
    (Means::Saved, &["peft_config.modules_to_save"]),
    (Means::Dora, &["peft_config.use_dora"]),
    (Means::RsLora, &["peft_config.use_rslora"]),
    (Means::Start, &["peft_config.adapter_name_or_path"]),
    (Means::Number("data.max_tokens"), &["cutoff_len"]),
    (Means::Micro, &["micro_batch_size"]),
    (Means::Steps, &["max_steps"]),
    (Means::Epochs, &["num_train_epochs"]),
    (Means::Number("train.lr"), &["learning_rate"]),
    (Means::Number("train.clip"), &["max_grad_norm"]),
    (Means::Number("train.seed"), &["seed"]),
    (Means::LogSteps, &["logging_steps"]),
    (Means::Optimizer, &["optim_config.name"]),
    (Means::Number("train.weight_decay"), &["optim_config.wd", "optim_config.weight_decay"]),
    (Means::Schedule, &["lr_scheduler_config.name"]),
    (Means::Number("train.warmup"), &["lr_scheduler_config.warmup_ratio", "lr_scheduler_config.warmup_steps"]),
    (Means::Number("train.save_every"), &["save_steps"]),
    (Means::Number("train.keep"), &["save_total_limit"]),
    (Means::Text("output.dir"), &["output_dir"]),
    (Means::DeepSpeed, &["dist_config.config_file"]),
    // These choose classes, and settings of answers that version 1 samples after training.
    (Means::Nothing, &["model_class", "init_config", "sample_backend", "max_new_tokens", "dist_config.name",
        "dist_config.dcp_path", "kernel_config.name", "kernel_config.include_kernels", "quant_config"]),
];

const TABLE: Table = Table {
    tool: TOOL,
    rows: &[ROWS],
    presets: &[
        ("data.max_tokens", Preset::Whole(2048)),
        ("train.lr", Preset::Number(1e-4)),
        ("train.epochs", Preset::Number(3.0)),
        ("train.schedule", Preset::Word("constant")),
        ("train.warmup", Preset::Whole(0)),
        ("train.save_every", Preset::Whole(0)),
    ],
    adapter: AdapterPreset { tool: TOOL, rank: 8, alpha: Some(16.0), dropout: 0.05, all_linear: true },
    constant_warmup: true,
    ..PEFT
};

/// Keys of version 1 that nothing else has.
const V1_KEYS: &[&str] = &["model_class", "kernel_config", "dist_config", "sample_backend", "init_config"];

/// Whether the file is one of version 1.
pub fn is_v1(entries: &[Entry]) -> bool {
    entries.iter().any(|entry| shows_v1(entry) || entry.name == "train_dataset")
}

/// Whether this entry alone shows version 1: one of its keys, or its group for the adapter.
pub fn shows_v1(entry: &Entry) -> bool {
    let is_named = |inside: &[Entry]| inside.iter().any(|inner| inner.name == "name");
    match &entry.value.content {
        Content::Map(inside) if entry.name == "peft_config" => is_named(inside),
        _ => V1_KEYS.contains(&entry.name.as_str()),
    }
}

pub fn read_llama_factory_v1(fields: &Fields<'_>, draft: &mut Draft) {
    let trained = ["train_dataset", "max_steps", "num_train_epochs", "learning_rate"];
    if !fields.has_any(&trained)
        && let Some(found) = fields.take("model")
    {
        return found.mistake(format!(
            "there is no `train_dataset` next to `{}`: this configuration does not train",
            found.key
        ));
    }
    let it = Settings { fields, table: TABLE };
    put_model(&it, draft);
    put_trained(&it, draft);
    if let Some(found) = fields.take("train_dataset")
        && let Some(names) = found.words()
    {
        if names.iter().any(|name| name.ends_with(".yaml") || name.ends_with(".yml")) {
            let listed = names.join("`, `");
            draft.want("data.train", format!("the files that `{listed}` lists"));
            draft.leave_out(&found, "a list of data sets; `data.train` takes the files themselves");
        } else {
            put_files(draft, "data.train", &names, &found);
        }
    }
    if let Some(found) = fields.take("global_batch_size") {
        draft.leave_out_if_set(fields.take("micro_batch_size"), crate::reasons::SPLIT);
        put_number(draft, "train.batch", Some(found));
    }
    if let Some(found) = fields.take("bf16")
        && let Some(on) = found.boolean()
    {
        let precision = if on { "bf16" } else { "f32" };
        draft.put("model.compute", word(precision), &[&found]);
    }
    put_training(&it, draft);
    follow(&it, draft);
    if !fields.has("optim_config") {
        // The default of PyTorch's AdamW.
        draft.put_default("train.weight_decay", crate::value::Value::Float(0.01), TOOL);
    }
    if let Some(found) = fields.take("save_epochs")
        && let Some(epochs) = found.number().filter(|epochs| *epochs > 0.0)
    {
        per_epoch_note(draft, "train.save_every", &found, 1.0 / epochs);
    }
}

fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft) {
    let quantized = put_weights(it, draft);
    let Some(whole) = it.fields.take("peft_config") else {
        put_full(it, draft, None, quantized.as_ref());
        return draft.assume("no `peft_config` is set, so LLaMA-Factory trains every weight");
    };
    let name = it.fields.take("peft_config.name");
    match (name.as_ref().and_then(Found::text).as_deref(), &name) {
        (Some("lora") | None, name) => put_adapter(it, draft, &[name.as_ref().unwrap_or(&whole)]),
        (Some("freeze"), Some(found)) => {
            put_full(it, draft, Some(found), quantized.as_ref());
            put_trained_layers(it.fields, "peft_config.", draft);
        }
        (Some(other), Some(found)) => {
            found.mistake(format!("`{}` must be `lora` or `freeze`, got `{other}`", found.key));
        }
        (Some(_), None) => {}
    }
}
