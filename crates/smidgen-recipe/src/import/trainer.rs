//! Hugging Face's TrainingArguments, and TRL's SFTConfig, ModelConfig and ScriptArguments on top of them.
//!
//! LLaMA-Factory and Unsloth take the same arguments, so their tables have the rows of this one.
//! Defaults are those of transformers 5 and TRL 1.16; they are written where a recipe has other defaults.
//! Not supported: trainers other than supervised fine-tuning; their own settings are unknown here.

use super::adapters::{put_adapter, put_full};
use super::datasets::{NamedRows, PartNames, leave_source, put_files, put_rows, put_split, rows_of};
use super::deepspeed::{LORA_ASSUMED, follow};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_compute_dtype, put_memory, put_model, put_training, put_weights};
use super::table::{AdapterPreset, Means, Preset, Row, Saving, Settings, TABLE, Table};
use super::values::{put_loss_on, put_number};
use crate::LossOn;
use crate::reasons::{Reason, reason_for};
use crate::value::Value;

/// TrainingArguments.
#[rustfmt::skip]
pub const TRAINING: &[Row] = &[
    (Means::Bf16, &["bf16", "pure_bf16"]),
    (Means::F16, &["fp16"]),
    (Means::Micro, &["per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"]),
    (Means::Accumulation, &["gradient_accumulation_steps", "gradient_accumulation"]),
    (Means::Steps, &["max_steps"]),
    (Means::Epochs, &["num_train_epochs", "num_epochs", "epochs"]),
    (Means::Number("train.lr"), &["learning_rate", "lr"]),
    (Means::Schedule, &["lr_scheduler_type", "lr_scheduler"]),
    (Means::WarmupSteps, &["warmup_steps"]),
    (Means::WarmupRatio, &["warmup_ratio"]),
    (Means::Optimizer, &["optim", "optimizer"]),
    (Means::Number("train.weight_decay"), &["weight_decay"]),
    (Means::Beta1, &["adam_beta1"]),
    (Means::Beta2, &["adam_beta2"]),
    (Means::Number("train.eps"), &["adam_epsilon"]),
    (Means::Number("train.clip"), &["max_grad_norm"]),
    (Means::Number("train.seed"), &["seed", "random_seed"]),
    (Means::LogSteps, &["logging_steps", "log_frequency"]),
    (Means::SaveStrategy, &["save_strategy"]),
    (Means::SaveSteps, &["save_steps"]),
    (Means::EvalStrategy, &["eval_strategy", "evaluation_strategy"]),
    (Means::EvalSteps, &["eval_steps"]),
    (Means::Number("train.keep"), &["save_total_limit"]),
    (Means::Number("train.early_stop"), &["early_stopping_patience"]),
    (Means::Text("output.dir"), &["output_dir"]),
    (Means::MaxMemory, &["max_memory"]),
    (Means::DeepSpeed, &["deepspeed"]),
    (Means::OnCpu, &["use_cpu", "no_cuda"]),
];

/// PEFT's LoraConfig.
#[rustfmt::skip]
pub const LORA_CONFIG: &[Row] = &[
    (Means::Rank, &["lora_r", "lora_rank", "r"]),
    (Means::Alpha, &["lora_alpha"]),
    (Means::Dropout, &["lora_dropout"]),
    (Means::Targets, &["lora_target_modules", "target_modules"]),
    (Means::Saved, &["lora_modules_to_save", "modules_to_save"]),
    (Means::Layers, &["layers_to_transform"]),
    (Means::Dora, &["use_dora"]),
    (Means::RsLora, &["use_rslora"]),
    (Means::Bias, &["bias"]),
    (Means::Init, &["init_lora_weights"]),
];

/// TRL's arguments, and BitsAndBytesConfig.
#[rustfmt::skip]
const ARGUMENTS: &[Row] = &[
    (Means::Model, &["model_name_or_path", "pretrained_model_name_or_path", "model_name", "model"]),
    (Means::Revision, &["model_revision", "revision"]),
    (Means::Dtype, &["dtype", "torch_dtype"]),
    (Means::FourBits, &["load_in_4bit"]),
    (Means::EightBits, &["load_in_8bit"]),
    (Means::DoubleQuant, &["use_bnb_nested_quant", "bnb_4bit_use_double_quant"]),
    (Means::Code, &["bnb_4bit_quant_type"]),
    (Means::ComputeDtype, &["bnb_4bit_compute_dtype"]),
    (Means::Number("data.max_tokens"), &["max_length", "max_seq_length"]),
    (Means::Packing, &["packing"]),
    (Means::HostActivations, &["activation_offloading"]),
];

/// Hugging Face's defaults.
pub const HUGGING_FACE: Table = Table {
    tool: "Hugging Face's Trainer",
    rows: &[ARGUMENTS, LORA_CONFIG, TRAINING],
    presets: &[
        ("train.lr", Preset::Number(5e-5)),
        ("train.epochs", Preset::Number(3.0)),
        ("train.schedule", Preset::Word("linear")),
        ("train.warmup", Preset::Number(0.0)),
    ],
    double_quant: false,
    micro: 8,
    saving: Saving::HuggingFace { save_default: true, eval_needs_strategy: true },
    ..TABLE
};

const TRL: Table = Table {
    tool: "TRL",
    presets: &[
        ("train.lr", Preset::Number(2e-5)),
        ("train.epochs", Preset::Number(3.0)),
        ("train.schedule", Preset::Word("linear")),
        ("train.warmup", Preset::Number(0.0)),
        ("data.max_tokens", Preset::Whole(1024)),
        ("model.compute", Preset::Word("bf16")),
    ],
    ..HUGGING_FACE
};

/// Reads arguments of TRL, or TrainingArguments alone.
pub fn read_trainer(fields: &Fields<'_>, draft: &mut Draft) {
    let is_trl = fields.has_any(&TRL_KEYS);
    let mut table = if is_trl { TRL } else { HUGGING_FACE };
    // TRL's arguments and PEFT's name the rank differently and have different defaults.
    let is_peft = fields.has_any(&["r", "target_modules"]);
    if !is_peft {
        table.adapter =
            AdapterPreset { tool: "TRL", rank: 16, alpha: Some(32.0), dropout: 0.05, all_linear: false };
    }
    let it = Settings { fields, table };
    put_model(&it, draft);
    put_trained(&it, draft, is_peft);
    if !is_trl && !fields.has_any(&TRAINING_KEYS) {
        put_compute_dtype(draft, it.take(Means::ComputeDtype));
        put_memory(&it, draft);
        return draft.assume(NO_TRAINING);
    }
    put_dataset(fields, draft);
    if !is_trl && !it.sets("data.max_tokens") {
        draft.assume("no length is set; assuming samples of at most 1024 tokens (`data.max_tokens`)");
    }
    if let Some(found) = fields.take("truncation_mode")
        && found.text().is_some_and(|mode| mode != "keep_start")
    {
        draft.leave_out(&found, "long samples are cut at their end, never at their beginning");
    }
    put_compute_dtype(draft, it.take(Means::ComputeDtype));
    if !is_trl {
        assume_precision(&it, draft);
    }
    put_training(&it, draft);
    follow(&it, draft);
    if let Some(group) = fields.take_group("env") {
        for found in group.rest() {
            let Reason { why, is_known } = reason_for(found.name());
            let other = "environment variables do not affect a run";
            draft.leave_out(&found, if is_known { &why } else { other });
        }
    }
}

/// For trainers that choose f32 if the file chooses nothing.
pub fn assume_precision(it: &Settings<'_, '_>, draft: &mut Draft) {
    if !draft.has("model.compute") && !it.has(Means::Bf16) && !it.has(Means::F16) {
        draft.assume(
            "neither `bf16` nor `fp16` is set; assuming the device's best precision (`model.compute`)",
        );
    }
}

/// TrainingArguments that files set.
#[rustfmt::skip]
pub const TRAINING_KEYS: [&str; 13] = [
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "num_train_epochs", "max_steps",
    "lr_scheduler_type", "optim", "output_dir", "model_name_or_path", "batch_size", "num_epochs", "train_file",
    "max_grad_norm",
];

/// For files about weights or adapters.
pub const NO_TRAINING: &str =
    "the file says nothing about training; batch, learning rate and length have the recipe's defaults";

/// Settings that only TRL has.
#[rustfmt::skip]
pub const TRL_KEYS: [&str; 14] = [
    "use_peft", "lora_r", "dataset_name", "max_seq_length", "max_length", "packing", "assistant_only_loss",
    "completion_only_loss", "dataset_text_field", "chat_template_path", "attn_implementation", "model_init_kwargs",
    "padding_free", "lora_target_modules",
];

/// ModelConfig, LoraConfig and BitsAndBytesConfig: the weights and the adapter.
fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft, is_peft: bool) {
    let fields = it.fields;
    let is_model_config = fields.has_any(&["use_peft", "lora_r", "model_name_or_path"]);
    let has_code = matches!(fields.get("bnb_4bit_quant_type"), Some(code) if *code != Content::Null);
    let quantized = put_weights(it, draft);
    if let Some(four) = quantized.as_ref().filter(|found| found.name() == "load_in_4bit")
        && !has_code
        && !is_model_config
    {
        draft.assume(format!(
            "`{}` is set without `bnb_4bit_quant_type`, whose default is `fp4`; NF4 is used, so results will differ",
            four.key
        ));
    }
    if let Some(found) = fields.take("quant_method")
        && found.text().is_some_and(|method| method != "bitsandbytes")
    {
        found.mistake(format!(
            "`{}` is {}; only bitsandbytes is supported (`model.base` quantizes plain weights while they load)",
            found.key,
            found.content.describe()
        ));
    }
    if let Some((kind, found)) = fields.take_text("peft_type")
        && !kind.eq_ignore_ascii_case("lora")
    {
        found.mistake(format!("`{}` is {kind:?}; only `LORA` adapters are supported", found.key));
    }
    let peft = fields.take("use_peft");
    let on = peft.as_ref().and_then(Found::boolean);
    let given = [Means::Rank, Means::Alpha, Means::Targets].into_iter().find_map(|means| it.take(means));
    match (peft, given) {
        (Some(found), _) if on == Some(true) => put_adapter(it, draft, &[&found]),
        (Some(found), _) => put_full(it, draft, Some(&found), quantized.as_ref()),
        (None, Some(given)) => {
            put_adapter(it, draft, &[&given]);
            // Without `use_peft`, TRL trains the weights even if a rank is set.
            if !is_peft {
                draft.assume("a rank is set without `use_peft`; assuming an adapter");
            }
        }
        (None, None) if quantized.is_some() => draft
            .assume("quantized weights are frozen; assuming a LoRA adapter of rank 16 on all linear layers"),
        (None, None) if fields.has("model_name_or_path") => {
            put_full(it, draft, None, None);
            draft.assume("`use_peft` is not set, so TRL trains every weight, and so does the recipe");
        }
        (None, None) => draft.assume(LORA_ASSUMED),
    }
}

/// The arguments of TRL that choose a part of a data set.
const PARTS: PartNames = PartNames {
    config: &["dataset_config", "dataset_config_name"],
    split: "dataset_train_split",
    revision: "dataset_revision",
};
/// Why settings of a source are not carried over.
const WHYS: &[(&str, &str)] = &[
    ("weight", "`[[data.mix]]` sets the weight of each source"),
    ("columns", "columns are recognized by name; `data.columns` maps columns with other names"),
];

/// ScriptArguments and SFTConfig: the rows, and which of their tokens carry a loss.
pub fn put_dataset(fields: &Fields<'_>, draft: &mut Draft) {
    let eval_names = ["eval_dataset_name", "validation_file", "test_file"];
    if let Some(found) =
        fields.take_first(&["dataset_name", "train_file", "dataset_path", "dataset_id_or_path"])
        && let Some(names) = found.words()
    {
        let whole = |name: &String| NamedRows::of(name);
        match &names[..] {
            [name] => {
                let rows = whole(name).with_parts(fields, &PARTS, draft);
                put_rows(draft, "data.train", std::slice::from_ref(&rows), &found);
                if !fields.has_any(&eval_names) && is_evaluated(fields) && found.name() == "dataset_name" {
                    put_test_split(fields, draft, rows, &found);
                }
            }
            names => put_rows(draft, "data.train", &names.iter().map(whole).collect::<Vec<_>>(), &found),
        }
    }
    if let Some(mixture) = fields.take_group("dataset_mixture") {
        put_mixture(&mixture, draft);
        draft.leave_out_if_set(mixture.take("seed"), "one seed controls every random choice (`train.seed`)");
        put_split(draft, mixture.take_first(&["test_split_size", "test_size"]));
        draft.leave_rest(&mixture);
    }
    put_mixture(fields, draft);
    if let Some(found) = fields.take_first(&eval_names)
        && let Some(names) = found.words()
    {
        put_files(draft, "data.eval", &names, &found);
    }
    put_split(draft, fields.take_first(&["test_split_size", "test_size", "val_size", "val_set_size"]));
    put_number(draft, "data.limit", fields.take_first(&["max_samples", "max_train_samples"]));
    put_number(draft, "eval.limit", fields.take_first(&["max_eval_samples", "max_test_samples"]));
    if let Some((_, found)) = fields.take_text("dataset_text_field").filter(|(name, _)| name != "text") {
        let why =
            "plain text is read from the column `text`; `data.columns = { text = \"...\" }` names another";
        draft.leave_out(&found, why);
    }
    if let Some(found) = fields.take("chat_template_path")
        && let Some(path) = found.text()
    {
        if path.ends_with(".jinja") {
            draft.put("data.template", Value::Text(path), &[&found]);
            draft.assume("TRL leaves prompts that are strings as they are; `data.template` renders them too");
        } else {
            draft.leave_out(&found, "`data.template` takes a .jinja file or a built-in name");
        }
    }
    draft.leave_out_if_set(
        fields.take("shuffle_dataset"),
        "samples are reshuffled in each epoch, as the trainer's sampler does (`data.shuffle`)",
    );
    let completion = fields.take("completion_only_loss");
    match (fields.take_on("assistant_only_loss"), completion.as_ref().and_then(Found::boolean), &completion) {
        (Some(found), ..) => put_loss_on(draft, LossOn::Assistant, &[&found]),
        (_, Some(on), Some(found)) => {
            put_loss_on(draft, if on { LossOn::Completion } else { LossOn::All }, &[found])
        }
        _ => draft.assume(
            "the loss is on completions, as in TRL, and in conversations on every assistant turn, where TRL uses every \
             token (`data.loss_on=all`)",
        ),
    }
}

/// Whether the trainer evaluates.
fn is_evaluated(fields: &Fields<'_>) -> bool {
    let by = |content: &Content| matches!(content, Content::Text(word) if word == "steps" || word == "epoch");
    ["eval_strategy", "evaluation_strategy"].iter().filter_map(|name| fields.get(name)).any(by)
}

/// TRL evaluates the split `test` of the data set that it trains on.
fn put_test_split(fields: &Fields<'_>, draft: &mut Draft, rows: NamedRows, from: &Found<'_>) {
    if !super::datasets::is_hub_name(draft, &rows.name) {
        return;
    }
    let given = fields.take("dataset_test_split");
    let split = given.as_ref().and_then(|found| found.text()).unwrap_or_else(|| "test".to_owned());
    put_rows(
        draft,
        "data.eval",
        &[NamedRows { split: Some(split), slice: None, ..rows }],
        given.as_ref().unwrap_or(from),
    );
}

/// A list of datasets, each with a name or a path.
fn put_mixture(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(found) = fields.take("datasets") else { return };
    let mut rows: Vec<NamedRows> = Vec::new();
    for whole in found.each() {
        if let Content::Text(name) = whole.content {
            rows.push(NamedRows::of(name));
        } else if let Some(group) = whole.group() {
            // Older files have the data set's name in `name`; in TRL's, `name` is the config.
            rows.extend(rows_of(&group, &["path", "id", "name"], draft));
            leave_source(&group, WHYS, draft);
        }
    }
    put_rows(draft, "data.train", &rows, &found);
}
