//! A LLaMA-Factory configuration: supervised fine-tuning and continued pre-training with LoRA, full or frozen layers.
//!
//! It takes Hugging Face's training arguments and adds its own settings for model, data and adapter.
//! Datasets are names that `dataset_info.json` in `dataset_dir` maps to files; that file is read if it exists.
//! Not supported: reward models, preference training, multimodal data, and files of other commands than `train`.

use super::adapters::{put_adapter, put_full};
use super::datasets::{NamedRows, put_rows, put_split};
use super::deepspeed::follow;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_model, put_packed, put_training, put_weights};
use super::table::{AdapterPreset, Means, Preset, Row, Settings, Table};
use super::templates::put_template;
use super::trainer::{HUGGING_FACE, TRAINING, assume_precision};
use super::values::{put_loss_on, put_number, word};
use crate::value::Value;
use crate::{ClosedWord, LossOn};
use serde_json::Value as Json;
use std::path::Path;

const TOOL: &str = "LLaMA-Factory";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Model, &["model_name_or_path"]),
    (Means::Revision, &["model_revision"]),
    (Means::Bits, &["quantization_bit"]),
    (Means::DoubleQuant, &["double_quantization"]),
    (Means::Code, &["quantization_type"]),
    (Means::Rank, &["lora_rank"]),
    (Means::Alpha, &["lora_alpha"]),
    (Means::Dropout, &["lora_dropout"]),
    (Means::Targets, &["lora_target"]),
    (Means::Saved, &["additional_target"]),
    (Means::Dora, &["use_dora"]),
    (Means::RsLora, &["use_rslora"]),
    (Means::Start, &["adapter_name_or_path"]),
    (Means::Number("data.max_tokens"), &["cutoff_len"]),
];

const TABLE: Table = Table {
    tool: TOOL,
    rows: &[ROWS, TRAINING],
    presets: &[
        ("data.max_tokens", Preset::Whole(2048)),
        ("train.lr", Preset::Number(5e-5)),
        ("train.epochs", Preset::Number(3.0)),
        ("train.schedule", Preset::Word("linear")),
        ("train.warmup", Preset::Number(0.0)),
    ],
    adapter: AdapterPreset { tool: TOOL, rank: 8, alpha: None, dropout: 0.0, all_linear: true },
    double_quant: true,
    ..HUGGING_FACE
};

pub fn read_llama_factory(fields: &Fields<'_>, draft: &mut Draft) {
    refuse_other_commands(fields);
    let it = Settings { fields, table: TABLE };
    put_model(&it, draft);
    let stage = fields.take("stage");
    let stage_word = stage.as_ref().and_then(Found::text);
    match (stage.as_ref(), stage_word.as_deref()) {
        // The objective is read before.
        _ if draft.has("train.objective") => {}
        (None, _) | (Some(_), Some("sft") | None) => {}
        (Some(found), Some("pt")) => draft.put("data.format", word("text"), &[found]),
        (Some(found), Some(other)) => {
            found.mistake(format!("`stage: {other}` is not supported (supported: `sft`, `pt`)"));
        }
    }
    let pretraining = stage.filter(|_| stage_word.as_deref() == Some("pt"));
    if let Some(found) = fields.take("quantization_method")
        && found.text().is_some_and(|method| !["bnb", "bitsandbytes"].contains(&method.as_str()))
    {
        draft.leave_out(&found, "weights are quantized the way bitsandbytes does it");
    }
    let quantized = put_weights(&it, draft);
    let kind = fields.take("finetuning_type");
    match (kind.as_ref(), kind.as_ref().and_then(Found::text).as_deref()) {
        (None, _) | (_, Some("lora")) => put_adapter(&it, draft, &kind.iter().collect::<Vec<_>>()),
        (found, Some("full")) => put_full(&it, draft, found, quantized.as_ref()),
        (found, Some("freeze")) => {
            put_full(&it, draft, found, quantized.as_ref());
            put_trained_layers(fields, "", draft);
        }
        (Some(found), Some(other)) => {
            found.mistake(format!("`{}` must be `lora`, `full` or `freeze`, got `{other}`", found.key));
        }
        (Some(_), None) => {}
    }
    put_data(fields, draft, pretraining.as_ref());
    assume_precision(&it, draft);
    put_training(&it, draft);
    follow(&it, draft);
    // Continued pre-training packs by default.
    let packing = match (fields.take("packing"), fields.take_on("neat_packing")) {
        (Some(found), neat) => Some(found).filter(|found| found.boolean() == Some(true)).or(neat),
        (None, neat) => neat.or(pretraining),
    };
    put_packed(draft, packing);
}

/// Keys of LLaMA-Factory's other commands, and what these do.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["do_predict", "predict_with_generate"], "prediction"),
    (&["export_dir", "export_size", "export_device", "export_legacy_format"], "merging or export"),
    (&["infer_backend", "infer_dtype", "vllm_enforce_eager", "api_host"], "inference"),
    (&["n_shot", "lang", "task"], "evaluation"),
];

/// Reports files of commands other than `train`, which name a model and no training.
fn refuse_other_commands(fields: &Fields<'_>) {
    if let Some(found) = fields.take("do_train")
        && found.boolean() == Some(false)
    {
        return found.mistake("`do_train` is false: this configuration does not train".to_owned());
    }
    if fields.has_any(&["do_train", "dataset"]) {
        return;
    }
    for (keys, what) in COMMANDS {
        if let Some(found) = keys.iter().find_map(|key| fields.take(key)).filter(Found::is_on) {
            return found.mistake(format!(
                "`{}` is a setting of {what}, and the file names no `dataset`: this configuration does not train",
                found.key
            ));
        }
    }
    #[rustfmt::skip]
    let trains = ["learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "stage",
        "finetuning_type", "lora_rank", "output_dir"];
    if !fields.has_any(&trains)
        && let Some(found) = fields.take("model_name_or_path")
    {
        found.mistake(format!(
            "`{}` stands without a `dataset`: this configuration does not train",
            found.key
        ));
    }
}

/// The layers that `freeze` leaves trainable: the last n, or the first n if n is negative.
pub fn put_trained_layers(fields: &Fields<'_>, group: &str, draft: &mut Draft) {
    match fields.take(&format!("{group}freeze_trainable_layers")) {
        None => draft.put_default("adapter.layers", word("last:2"), TOOL),
        Some(found) => match found.number() {
            Some(count) if count >= 1.0 => {
                draft.put("adapter.layers", Value::Text(format!("last:{count}")), &[&found])
            }
            Some(count) if (-512.0..=-1.0).contains(&count) => {
                let first = (0..-count as i128).map(Value::Integer).collect();
                draft.put("adapter.layers", Value::List(first), &[&found]);
            }
            Some(count) => found.mistake(format!("`{}` is {count}; no layer would be trained", found.key)),
            None => {}
        },
    }
    for name in ["freeze_trainable_modules", "freeze_extra_modules"] {
        if let Some(found) = fields.take(&format!("{group}{name}"))
            && found.words().is_some_and(|modules| modules != ["all"])
        {
            draft.leave_out(&found, "whole layers are trained (`adapter.layers`); results will differ");
        }
    }
}

fn put_data(fields: &Fields<'_>, draft: &mut Draft, pretraining: Option<&Found<'_>>) {
    let folder = fields.take("dataset_dir").and_then(|found| found.text());
    let folder = folder.unwrap_or_else(|| "data".to_owned());
    for (name, key) in [("dataset", "data.train"), ("eval_dataset", "data.eval")] {
        if let Some(found) = fields.take(name)
            && let Some(names) = found.words()
        {
            put_named_sets(draft, &found, key, &names, &folder);
        }
    }
    put_split(draft, fields.take("val_size"));
    // It cuts every data set, those of the evaluation too.
    if let Some(found) = fields.take("max_samples") {
        put_number(draft, "data.limit", Some(found.clone()));
        put_number(draft, "eval.limit", Some(found).filter(|_| draft.has("data.eval")));
    }
    put_template(draft, fields.take("template"));
    let (prompt, last) = (fields.take_on("train_on_prompt"), fields.take_on("mask_history"));
    match (prompt, last, pretraining) {
        (Some(prompt), Some(last), _) => last.exclude(&prompt),
        (_, _, Some(stage)) => put_loss_on(draft, LossOn::All, &[stage]),
        (Some(prompt), None, None) => put_loss_on(draft, LossOn::All, &[&prompt]),
        (None, Some(last), None) => put_loss_on(draft, LossOn::Completion, &[&last]),
        (None, None, None) if draft.has("train.objective") => {}
        (None, None, None) => draft.put_default("data.loss_on", word(LossOn::Assistant.word()), TOOL),
    }
}

/// The files and hub names of named datasets, if `dataset_info.json` lists them.
fn put_named_sets(draft: &mut Draft, found: &Found<'_>, key: &'static str, names: &[String], folder: &str) {
    let info = draft.places.working_directory.join(folder).join("dataset_info.json");
    let info = read_dataset_info(&info);
    let rows_of = |name: &String| {
        let entry = |key: &str| info.as_ref().and_then(|info| info[name][key].as_str()).map(str::to_owned);
        match (entry("file_name"), entry("hf_hub_url")) {
            (Some(file), _) => NamedRows::of(format!("{folder}/{file}")),
            (None, Some(url)) => {
                NamedRows { config: entry("subset"), split: entry("split"), ..NamedRows::of(url) }
            }
            (None, None) => NamedRows::of(name),
        }
    };
    let rows: Vec<NamedRows> = names.iter().map(rows_of).collect();
    put_rows(draft, key, &rows, found);
    if info.is_none() && key == "data.train" && !draft.has(key) {
        let what = names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        draft.want(key, format!("the file that {folder}/dataset_info.json lists for {what}"));
    }
}

/// The JSON of the file, unless it is missing, broken or too large for a list of datasets.
fn read_dataset_info(path: &Path) -> Option<Json> {
    const MAX_BYTES: u64 = 1_000_000;
    let is_small_file = path.metadata().is_ok_and(|found| found.is_file() && found.len() <= MAX_BYTES);
    let text = is_small_file.then(|| std::fs::read_to_string(path).ok()).flatten()?;
    serde_json::from_str(&text).ok()
}
