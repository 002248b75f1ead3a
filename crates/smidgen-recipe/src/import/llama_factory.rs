//! A LLaMA-Factory configuration: supervised fine-tuning and continued pre-training with LoRA, full or frozen layers.
//!
//! It takes Hugging Face's training arguments and adds its own settings for model, data and adapter.
//! Datasets are names that `dataset_info.json` in `dataset_dir` maps to files; that file is read if it exists.
//! Not supported: reward models, preference training, multimodal data, and files of other commands than `train`.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::{NamedRows, put_rows, put_split};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::templates::put_template;
use super::trainer::{TrainerDefaults, put_full, read_training_arguments};
use super::vocabulary::{
    Quantization, put_loss_on, put_model, put_number, put_number_or, put_packed, put_quantization, word,
};
use crate::value::Value;
use crate::{ClosedWord, LossOn};
use serde_json::Value as Json;
use std::path::Path;

const TOOL: &str = "LLaMA-Factory";

pub fn read_llama_factory(fields: &Fields<'_>, draft: &mut Draft) {
    refuse_other_commands(fields);
    put_model(draft, fields.take("model_name_or_path"), fields.take("model_revision"));
    let stage = fields.take("stage");
    let stage_word = stage.as_ref().and_then(|found| found.text());
    match (stage.as_ref(), stage_word.as_deref()) {
        (None, _) | (Some(_), Some("sft") | None) => {}
        (Some(found), Some("pt")) => draft.put("data.format", word("text"), &[found]),
        (Some(found), Some(other)) => {
            found.mistake(format!("`stage: {other}` is not supported (supported: `sft`, `pt`)"));
        }
    }
    put_weights_and_adapter(fields, draft);
    put_data(fields, draft, stage.as_ref().filter(|_| stage_word.as_deref() == Some("pt")));
    read_training_arguments(fields, draft, &TrainerDefaults { tool: TOOL, lr: 5e-5 });
    // Continued pre-training packs by default.
    let packing = match (fields.take("packing"), fields.take_on("neat_packing")) {
        (Some(found), neat) => Some(found).filter(|found| found.boolean() == Some(true)).or(neat),
        (None, neat) => neat.or(stage.filter(|_| stage_word.as_deref() == Some("pt"))),
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
    let trains = [
        "learning_rate",
        "num_train_epochs",
        "max_steps",
        "per_device_train_batch_size",
        "stage",
        "finetuning_type",
        "lora_rank",
        "output_dir",
    ];
    if let Some(found) = fields
        .get("model_name_or_path")
        .filter(|_| !fields.has_any(&trains))
        .and_then(|_| fields.take("model_name_or_path"))
    {
        found.mistake(format!(
            "`{}` stands without a `dataset`: this configuration does not train",
            found.key
        ));
    }
}

fn put_weights_and_adapter(fields: &Fields<'_>, draft: &mut Draft) {
    let bits = fields.take("quantization_bit").and_then(|found| Some((found.number()?, found)));
    let double = fields.take("double_quantization").is_none_or(|found| found.boolean() != Some(false));
    let code = fields.take("quantization_type");
    if let Some(found) = fields.take("quantization_method")
        && found.text().is_some_and(|method| !["bnb", "bitsandbytes"].contains(&method.as_str()))
    {
        draft.leave_out(&found, "weights are quantized the way bitsandbytes does it");
    }
    let of = |wanted: f64| bits.as_ref().filter(|(bits, _)| *bits == wanted).map(|(_, found)| found);
    put_quantization(draft, Quantization { four_bits: of(4.0), eight_bits: of(8.0), code, double });
    if let Some((bits, found)) = bits.as_ref().filter(|(bits, _)| ![4.0, 8.0].contains(bits)) {
        found.mistake(format!("`{}` is {bits}; only 4 and 8 bits are supported", found.key));
    }
    let quantized = bits.as_ref().map(|(_, found)| found);
    let kind = fields.take("finetuning_type");
    let settings = AdapterSettings {
        rank: fields.take("lora_rank"),
        default_rank: 8,
        alpha: fields.take("lora_alpha"),
        default_alpha: None,
        dropout: fields.take("lora_dropout"),
        targets: fields.take("lora_target"),
        all_linear: &["all"],
        all_by_default: true,
        saved: fields.take("additional_target"),
        dora: fields.take("use_dora"),
        rslora: fields.take("use_rslora"),
        start: fields.take("adapter_name_or_path"),
        tool: TOOL,
        ..AdapterSettings::default()
    };
    let word_of = kind.as_ref().and_then(|found| found.text());
    match (kind.as_ref(), word_of.as_deref()) {
        (None, _) => put_adapter(draft, settings, &[]),
        (Some(found), Some("lora")) => put_adapter(draft, settings, &[found]),
        (Some(found), Some("full")) => put_full(draft, &[found], quantized),
        (Some(found), Some("freeze")) => {
            put_full(draft, &[found], quantized);
            put_trained_layers(fields, draft);
        }
        (Some(found), Some(other)) => {
            found.mistake(format!("`{}` must be `lora`, `full` or `freeze`, got `{other}`", found.key));
        }
        (Some(_), None) => {}
    }
}

/// The layers that `freeze` leaves trainable: the last n, or the first n if n is negative.
pub fn put_trained_layers(fields: &Fields<'_>, draft: &mut Draft) {
    match fields.take("freeze_trainable_layers") {
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
        if let Some(found) = fields.take(name)
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
    put_limits(fields, draft);
    put_number_or(draft, "data.max_tokens", fields.take("cutoff_len"), Value::Integer(2048), TOOL);
    put_template(draft, fields.take("template"));
    let (prompt, last) = (fields.take_on("train_on_prompt"), fields.take_on("mask_history"));
    match (prompt, last, pretraining) {
        (Some(prompt), Some(last), _) => last.exclude(&prompt),
        (_, _, Some(stage)) => put_loss_on(draft, LossOn::All, &[stage]),
        (Some(prompt), None, None) => put_loss_on(draft, LossOn::All, &[&prompt]),
        (None, Some(last), None) => put_loss_on(draft, LossOn::Completion, &[&last]),
        (None, None, None) => draft.put_default("data.loss_on", word(LossOn::Assistant.word()), TOOL),
    }
}

/// `max_samples` cuts every data set, those of the evaluation too.
fn put_limits(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(found) = fields.take("max_samples") else { return };
    put_number(draft, "data.limit", Some(found.clone()));
    if draft.has("data.eval") {
        put_number(draft, "eval.limit", Some(found));
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
