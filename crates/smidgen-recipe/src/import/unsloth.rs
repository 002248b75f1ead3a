//! Arguments of Unsloth's `FastLanguageModel` and of the trainer that goes with it, as a dictionary.
//!
//! `from_pretrained` sets the weights and `get_peft_model` the adapter; the rest are Hugging Face's TrainingArguments.
//! Defaults are Unsloth's: 4-bit weights, rank 16, alpha 16, every linear layer, 2048 tokens.
//! Not supported: vision models, reinforcement learning, and what Unsloth saves after training.

use super::adapters::{put_adapter, put_full};
use super::deepspeed::follow;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{
    judge_family, put_compute, put_compute_dtype, put_model, put_quantization, put_training,
};
use super::table::{AdapterPreset, Means, Preset, Row, Settings, Table};
use super::trainer::{HUGGING_FACE, LORA_CONFIG, TRAINING, assume_precision, put_dataset};
use super::values::{put_loss_on, put_number, word};
use crate::LossOn;

const UNSLOTH: &str = "Unsloth";

/// Arguments that only Unsloth has.
#[rustfmt::skip]
pub const UNSLOTH_KEYS: &[&str] = &[
    "use_gradient_checkpointing", "full_finetuning", "fast_inference", "finetune_vision_layers",
    "finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules", "use_exact_model_name",
    "max_lora_rank", "train_on_completions", "use_loftq", "log_frequency",
];

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Model, &["model_name", "model_name_or_path", "model"]),
    (Means::Revision, &["revision"]),
    (Means::ComputeDtype, &["dtype", "torch_dtype"]),
    (Means::FourBits, &["load_in_4bit"]),
    (Means::EightBits, &["load_in_8bit"]),
    (Means::Number("data.max_tokens"), &["max_seq_length", "max_length"]),
    (Means::Packing, &["packing"]),
];

const TABLE: Table = Table {
    tool: UNSLOTH,
    rows: &[ROWS, LORA_CONFIG, TRAINING],
    presets: &[
        ("data.max_tokens", Preset::Whole(2048)),
        ("train.lr", Preset::Number(2e-4)),
        ("train.epochs", Preset::Number(3.0)),
        ("train.schedule", Preset::Word("linear")),
        ("train.warmup", Preset::Number(0.0)),
    ],
    adapter: AdapterPreset { tool: UNSLOTH, rank: 16, alpha: Some(16.0), dropout: 0.0, all_linear: true },
    double_quant: true,
    ..HUGGING_FACE
};

pub fn read_unsloth(fields: &Fields<'_>, draft: &mut Draft) {
    let it = Settings { fields, table: TABLE };
    put_trained(&it, draft);
    put_dataset(fields, draft);
    if let Some(found) = fields.take("dataset")
        && let Some(names) = found.words()
    {
        super::datasets::put_files(draft, "data.train", &names, &found);
    }
    if let Some(found) = fields.take("train_on_completions")
        && let Some(on) = found.boolean()
    {
        put_loss_on(draft, if on { LossOn::Assistant } else { LossOn::All }, &[&found]);
    }
    assume_precision(&it, draft);
    put_compute_dtype(draft, it.take(Means::ComputeDtype));
    put_training(&it, draft);
    follow(&it, draft);
    // The seed of the adapter; the trainer has its own.
    if let Some(found) = fields.take("random_state") {
        if draft.has("train.seed") {
            draft.leave_out(&found, "one seed controls every random choice (`train.seed`)");
        } else {
            put_number(draft, "train.seed", Some(found));
        }
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

fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft) {
    let fields = it.fields;
    let model = it.take(Means::Model).as_ref().and_then(Found::text);
    match &model {
        Some(_) => put_model(it, draft),
        None => put_named_after(fields, draft),
    }
    put_compute(draft, it.take(Means::Bf16).as_ref(), it.take(Means::F16).as_ref());
    let (four, eight) = (it.take(Means::FourBits), it.take_on(Means::EightBits));
    let kind = fields.take("training_type").filter(|found| found.text().as_deref() == Some("full"));
    let full = fields.take_on("full_finetuning").or(kind);
    // The names of checkpoints that Unsloth has already quantized end in `bnb-4bit`.
    if model.is_some_and(|name| name.to_lowercase().ends_with("bnb-4bit")) {
        draft.assume(
            "the checkpoint is stored in 4 bits, so its weights stay as stored (`model.base = \"as-stored\"`)",
        );
    } else if four.is_none() && eight.is_none() && full.is_none() {
        draft.put_default("model.base", word("nf4"), UNSLOTH);
    } else {
        let four = four.filter(|found| found.boolean() != Some(false));
        put_quantization(it, draft, four.as_ref(), eight.as_ref());
    }
    if let Some(found) = full {
        return put_full(it, draft, Some(&found), eight.as_ref());
    }
    put_adapter(it, draft, &it.take(Means::Rank).iter().collect::<Vec<_>>());
    // Switches that exclude a part of the linear layers.
    for name in ["finetune_language_layers", "finetune_attention_modules", "finetune_mlp_modules"] {
        if let Some(found) = fields.take(name)
            && found.boolean() == Some(false)
        {
            draft.leave_out(&found, "`adapter.targets` names the linear layers that are adapted");
        }
    }
}
