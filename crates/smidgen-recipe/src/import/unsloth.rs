//! Arguments of Unsloth's `FastLanguageModel` and of the trainer that goes with it, as a dictionary.
//!
//! `from_pretrained` sets the weights and `get_peft_model` the adapter; the rest are Hugging Face's TrainingArguments.
//! Defaults are Unsloth's: 4-bit weights, rank 16, alpha 16, every linear layer, 2048 tokens.
//! Not supported: vision models, reinforcement learning, and what Unsloth saves after training.

use super::adapters::{AdapterSettings, put_adapter};
use super::draft::Draft;
use super::families::judge_family;
use super::fields::{Fields, Found};
use super::trainer::{
    TrainerDefaults, leave_adapter_settings, put_dataset, put_full, read_training_arguments,
};
use super::vocabulary::{
    Quantization, put_compute_dtype, put_loss_on, put_model, put_number, put_number_or, put_packed,
    put_quantization, word,
};
use crate::LossOn;
use crate::value::Value;

const UNSLOTH: &str = "Unsloth";

/// Arguments that only Unsloth has.
pub const UNSLOTH_KEYS: &[&str] = &[
    "use_gradient_checkpointing",
    "full_finetuning",
    "fast_inference",
    "finetune_vision_layers",
    "finetune_language_layers",
    "finetune_attention_modules",
    "finetune_mlp_modules",
    "use_exact_model_name",
    "max_lora_rank",
    "train_on_completions",
    "use_loftq",
    "log_frequency",
];

pub fn read_unsloth(fields: &Fields<'_>, draft: &mut Draft) {
    put_weights_and_adapter(fields, draft);
    put_dataset(fields, draft);
    if let Some(found) = fields.take("dataset")
        && let Some(names) = found.words()
    {
        super::datasets::put_files(draft, "data.train", &names, &found);
    }
    let length = fields.take_any(&["max_seq_length", "max_length"]);
    put_number_or(draft, "data.max_tokens", length, Value::Integer(2048), UNSLOTH);
    read_training_arguments(fields, draft, &TrainerDefaults { tool: UNSLOTH, lr: 2e-4 });
    if let Some(found) = fields.take("train_on_completions")
        && let Some(on) = found.boolean()
    {
        put_loss_on(draft, if on { LossOn::Assistant } else { LossOn::All }, &[&found]);
    }
    put_compute_dtype(draft, fields.take_any(&["dtype", "torch_dtype"]));
    put_packed(draft, fields.take_on("packing"));
    // The seed of the adapter; the trainer has its own.
    if let Some(found) = fields.take("random_state") {
        match draft.has("train.seed") {
            true => draft.leave_out(&found, "one seed controls every random choice (`train.seed`)"),
            false => put_number(draft, "train.seed", Some(found)),
        }
    }
    for name in ["finetune_vision_layers", "fast_inference", "max_lora_rank", "use_exact_model_name"] {
        draft.leave_out_if_set(
            fields.take(name).filter(|found| found.is_on()),
            "text models are trained, and nothing is generated during training",
        );
    }
}

/// Unsloth Studio's files name no model; each is named after its model, as `owner_name.yaml`.
fn put_named_after(fields: &Fields<'_>, draft: &mut Draft) {
    let file = draft.places.file_name.rsplit("__").next().unwrap_or_default().to_owned();
    let Some((owner, name)) = file.rsplit_once('.').and_then(|(stem, _)| stem.split_once('_')) else {
        return;
    };
    let Some(found) = fields.rest().into_iter().next() else { return };
    let model = format!("{owner}/{name}");
    judge_family(draft, &found.inside(draft.places.file_name.clone(), 1, found.content), &model);
    draft.want("model.path", format!("the model; after the file's name `hf:{model}`"));
}

fn put_weights_and_adapter(fields: &Fields<'_>, draft: &mut Draft) {
    let model = fields.take_any(&["model_name", "model_name_or_path", "model"]);
    // The names of checkpoints that Unsloth has already quantized end in `bnb-4bit`.
    let is_quantized = model
        .as_ref()
        .and_then(|found| found.text())
        .is_some_and(|name| name.to_lowercase().ends_with("bnb-4bit"));
    match model {
        Some(_) => put_model(draft, model, fields.take("revision")),
        None => put_named_after(fields, draft),
    }
    let (four, eight) = (fields.take("load_in_4bit"), fields.take_on("load_in_8bit"));
    let kind = fields.take("training_type").filter(|found| found.text().as_deref() == Some("full"));
    let full = fields.take_on("full_finetuning").or(kind);
    let four_is_on = four.as_ref().is_none_or(|found| found.boolean() != Some(false));
    match four {
        _ if is_quantized => draft.assume(
            "the checkpoint is stored in 4 bits, so its weights stay as stored (`model.base = \"as-stored\"`)",
        ),
        None if eight.is_none() && full.is_none() => {
            draft.put_default("model.base", word("nf4"), UNSLOTH);
        }
        four => {
            let four_bits = four.as_ref().filter(|_| four_is_on);
            let quantization =
                Quantization { four_bits, eight_bits: eight.as_ref(), code: None, double: true };
            put_quantization(draft, quantization);
        }
    }
    let settings = AdapterSettings {
        rank: fields.take_any(&["r", "lora_r"]),
        default_rank: 16,
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(16.0),
        dropout: fields.take("lora_dropout"),
        targets: fields.take("target_modules").filter(Found::is_on),
        all_linear: &["all-linear"],
        saved: fields.take("modules_to_save"),
        all_by_default: true,
        layers: fields.take("layers_to_transform"),
        rslora: fields.take("use_rslora"),
        dora: fields.take("use_dora"),
        bias: fields.take("bias"),
        init: fields.take("init_lora_weights"),
        tool: UNSLOTH,
        ..AdapterSettings::default()
    };
    match full {
        Some(found) => {
            put_full(draft, &[&found], eight.as_ref());
            leave_adapter_settings(draft, &settings, &found);
        }
        None => {
            let from = settings.rank.clone();
            put_adapter(draft, settings, &from.iter().collect::<Vec<_>>());
            leave_parts(fields, draft);
        }
    }
}

/// Notes switches that exclude a part of the linear layers.
fn leave_parts(fields: &Fields<'_>, draft: &mut Draft) {
    for name in ["finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"] {
        if let Some(found) = fields.take(name)
            && found.boolean() == Some(false)
        {
            draft.leave_out(&found, "`adapter.targets` names the linear layers that are adapted");
        }
    }
}
