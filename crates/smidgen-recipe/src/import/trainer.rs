//! Hugging Face's TrainingArguments, and TRL's SFTConfig, ModelConfig and ScriptArguments on top of them.
//!
//! LLaMA-Factory and Unsloth take the same arguments, so their files call the shared parts of this one.
//! Defaults are those of transformers 5 and TRL 1.16; they are written where a recipe has other defaults.
//! Not supported: trainers other than supervised fine-tuning; their own settings are unknown here.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::{NamedRows, PartNames, put_files, put_rows, put_split};
use super::deepspeed::{LORA_ASSUMED, PINNED, follow_deepspeed};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::vocabulary::{
    Quantization, StepSize, leave_per_epoch, put_batch, put_betas, put_compute, put_compute_dtype, put_dtype,
    put_length, put_loss_on, put_max_memory, put_model, put_number, put_number_or, put_optimizer, put_packed,
    put_quantization, put_schedule, put_text, put_warmup, put_whole, word,
};
use crate::reasons::{Reason, reason_for};
use crate::value::Value;
use crate::{LossOn, Schedule};

/// Defaults of a trainer.
pub struct TrainerDefaults {
    pub tool: &'static str,
    pub lr: f64,
}

const TRL: &str = "TRL";
const HUGGING_FACE: &str = "Hugging Face's Trainer";

/// Reads arguments of TRL, or TrainingArguments alone.
pub fn read_trainer(fields: &Fields<'_>, draft: &mut Draft) {
    let is_trl = TRL_KEYS.iter().any(|key| fields.has(key));
    let defaults = match is_trl {
        true => TrainerDefaults { tool: TRL, lr: 2e-5 },
        false => TrainerDefaults { tool: HUGGING_FACE, lr: 5e-5 },
    };
    let model =
        fields.take_any(&["model_name_or_path", "pretrained_model_name_or_path", "model_name", "model"]);
    put_model(draft, model, fields.take_any(&["model_revision", "revision"]));
    put_model_config(fields, draft);
    if !is_trl && !fields.has_any(&TRAINING_KEYS) {
        put_compute_dtype(draft, fields.take("bnb_4bit_compute_dtype"));
        put_max_memory(draft, fields.take("max_memory"));
        draft.assume(NO_TRAINING);
        return;
    }
    put_dataset(fields, draft);
    match fields.take_any(&["max_length", "max_seq_length"]) {
        Some(found) => put_number(draft, "data.max_tokens", Some(found)),
        None if is_trl => draft.put_default("data.max_tokens", Value::Integer(1024), TRL),
        None => draft.assume("no length is set; assuming samples of at most 1024 tokens (`data.max_tokens`)"),
    }
    if let Some(found) = fields.take("truncation_mode")
        && found.text().is_some_and(|mode| mode != "keep_start")
    {
        draft.leave_out(&found, "long samples are cut at their end, never at their beginning");
    }
    read_training_arguments(fields, draft, &defaults);
    put_compute_dtype(draft, fields.take("bnb_4bit_compute_dtype"));
    put_packed(draft, fields.take_on("packing"));
    if is_trl && !draft.has("model.compute") {
        draft.put_default("model.compute", word("bf16"), TRL);
    }
    if let Some(found) = fields.take_on("activation_offloading") {
        draft.put_with("memory.activations", word("host"), &[&found], PINNED);
    }
    if let Some(group) = fields.take_group("env") {
        for found in group.rest() {
            let Reason { why, is_known } = reason_for(found.name());
            draft.leave_out(
                &found,
                if is_known { why.as_str() } else { "environment variables do not affect a run" },
            );
        }
    }
}

/// TrainingArguments that files set.
pub const TRAINING_KEYS: [&str; 13] = [
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "lr_scheduler_type",
    "optim",
    "output_dir",
    "model_name_or_path",
    "batch_size",
    "num_epochs",
    "train_file",
    "max_grad_norm",
];

/// For files about weights or adapters.
pub const NO_TRAINING: &str =
    "the file says nothing about training; batch, learning rate and length have the recipe's defaults";

/// Settings that only TRL has.
pub const TRL_KEYS: [&str; 14] = [
    "use_peft",
    "lora_r",
    "dataset_name",
    "max_seq_length",
    "max_length",
    "packing",
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_text_field",
    "chat_template_path",
    "attn_implementation",
    "model_init_kwargs",
    "padding_free",
    "lora_target_modules",
];

/// ModelConfig, LoraConfig and BitsAndBytesConfig: the weights and the adapter.
fn put_model_config(fields: &Fields<'_>, draft: &mut Draft) {
    // TRL's arguments and PEFT's name the rank differently and have different defaults.
    let is_peft = fields.has_any(&["r", "target_modules"]);
    let is_model_config = fields.has_any(&["use_peft", "lora_r", "model_name_or_path"]);
    put_dtype(draft, fields.take_any(&["dtype", "torch_dtype"]));
    let (four, eight) = (fields.take_on("load_in_4bit"), fields.take_on("load_in_8bit"));
    let double = fields.take_any_on(&["use_bnb_nested_quant", "bnb_4bit_use_double_quant"]).is_some();
    let code = fields.take("bnb_4bit_quant_type");
    if let Some(four) = four.as_ref().filter(|_| code.is_none() && !is_model_config) {
        draft.assume(format!(
            "`{}` is set without `bnb_4bit_quant_type`, whose default is `fp4`; NF4 is used, so results will differ",
            four.key
        ));
    }
    put_quantization(
        draft,
        Quantization { four_bits: four.as_ref(), eight_bits: eight.as_ref(), code, double },
    );
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
    let settings = AdapterSettings {
        rank: fields.take_any(&["lora_r", "lora_rank", "r"]),
        default_rank: if is_peft { 8 } else { 16 },
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(if is_peft { 8.0 } else { 32.0 }),
        dropout: fields.take("lora_dropout"),
        default_dropout: if is_peft { 0.0 } else { 0.05 },
        targets: fields.take_any(&["lora_target_modules", "target_modules"]),
        all_linear: &["all-linear", "all_linear"],
        saved: fields.take_any(&["lora_modules_to_save", "modules_to_save"]),
        all_by_default: false,
        layers: fields.take("layers_to_transform"),
        dora: fields.take("use_dora"),
        rslora: fields.take("use_rslora"),
        bias: fields.take("bias"),
        init: fields.take("init_lora_weights"),
        tool: if is_peft { "PEFT" } else { TRL },
        ..AdapterSettings::default()
    };
    let on = peft.as_ref().and_then(|found| found.boolean());
    let main_settings = [&settings.rank, &settings.alpha, &settings.targets];
    let given = main_settings.into_iter().flatten().next().cloned();
    let quantized = four.or(eight);
    match (peft, on) {
        (Some(found), Some(true)) => put_adapter(draft, settings, &[&found]),
        (Some(found), _) => {
            put_full(draft, &[&found], quantized.as_ref());
            leave_adapter_settings(draft, &settings, &found);
        }
        (None, _) => match given {
            Some(given) => {
                put_adapter(draft, settings, &[&given]);
                // Without `use_peft`, TRL trains the weights even if a rank is set.
                if !is_peft {
                    draft.assume("a rank is set without `use_peft`; assuming an adapter");
                }
            }
            None if quantized.is_none() && fields.has("model_name_or_path") => {
                draft.put_default("adapter.kind", word("full"), TRL);
                draft.assume("`use_peft` is not set, so TRL trains every weight, and so does the recipe");
            }
            None if quantized.is_some() => draft.assume(
                "quantized weights are frozen; assuming a LoRA adapter of rank 16 on all linear layers",
            ),
            None => draft.assume(LORA_ASSUMED),
        },
    }
}

/// Every weight is trained.
pub fn put_full(draft: &mut Draft, from: &[&Found<'_>], quantized: Option<&Found<'_>>) {
    refuse_quantized(quantized);
    draft.put("adapter.kind", word("full"), from);
}

/// Quantized weights cannot be trained.
pub fn refuse_quantized(quantized: Option<&Found<'_>>) {
    if let Some(found) = quantized {
        found.mistake(format!("`{}` freezes the weights, but every weight is to be trained", found.key));
    }
}

pub fn leave_adapter_settings(draft: &mut Draft, settings: &AdapterSettings<'_>, switch: &Found<'_>) {
    let why = format!("`{}` (line {}) turns adapters off", switch.key, switch.line);
    let all = [
        &settings.rank,
        &settings.alpha,
        &settings.dropout,
        &settings.targets,
        &settings.saved,
        &settings.dora,
        &settings.rslora,
    ];
    for found in all.into_iter().flatten() {
        draft.leave_out(found, why.clone());
    }
}

/// The arguments of TRL that choose a part of a data set.
const PARTS: PartNames = PartNames {
    config: &["dataset_config", "dataset_config_name"],
    split: "dataset_train_split",
    revision: "dataset_revision",
};
const MIXTURE_PARTS: PartNames =
    PartNames { config: &["config", "name"], split: "split", revision: "revision" };

/// ScriptArguments and SFTConfig: the rows, and which of their tokens carry a loss.
pub fn put_dataset(fields: &Fields<'_>, draft: &mut Draft) {
    let eval_names = ["eval_dataset_name", "validation_file", "test_file"];
    if let Some(found) =
        fields.take_any(&["dataset_name", "train_file", "dataset_path", "dataset_id_or_path"])
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
        put_split(draft, mixture.take_any(&["test_split_size", "test_size"]));
        draft.leave_rest(&mixture);
    }
    put_mixture(fields, draft);
    if let Some(found) = fields.take_any(&eval_names)
        && let Some(names) = found.words()
    {
        put_files(draft, "data.eval", &names, &found);
    }
    put_split(draft, fields.take_any(&["test_split_size", "test_size", "val_size", "val_set_size"]));
    put_number(draft, "data.limit", fields.take_any(&["max_samples", "max_train_samples"]));
    put_number(draft, "eval.limit", fields.take_any(&["max_eval_samples", "max_test_samples"]));
    if let Some(found) = fields.take("dataset_text_field") {
        match found.text().as_deref() {
            Some("text") | None => {}
            Some(_) => draft.leave_out(
                &found,
                "plain text is read from the column `text`; `data.columns = { text = \"...\" }` names another",
            ),
        }
    }
    if let Some(found) = fields.take("chat_template_path")
        && let Some(path) = found.text()
    {
        match path.ends_with(".jinja") {
            true => {
                draft.put("data.template", Value::Text(path), &[&found]);
                draft.assume(
                    "TRL leaves prompts that are strings as they are; `data.template` renders them too",
                );
            }
            false => draft.leave_out(&found, "`data.template` takes a .jinja file or a built-in name"),
        }
    }
    draft.leave_out_if_set(
        fields.take("shuffle_dataset"),
        "samples are reshuffled in each epoch, as the trainer's sampler does (`data.shuffle`)",
    );
    let assistant = fields.take_on("assistant_only_loss");
    let completion = fields.take("completion_only_loss").and_then(|found| Some((found.boolean()?, found)));
    match (assistant, completion) {
        (Some(found), _) => put_loss_on(draft, LossOn::Assistant, &[&found]),
        (_, Some((true, found))) => put_loss_on(draft, LossOn::Completion, &[&found]),
        (_, Some((false, found))) => put_loss_on(draft, LossOn::All, &[&found]),
        _ => draft.assume(
            "the loss is on completions, as in TRL, and in conversations on every assistant turn, where TRL uses every \
             token (`data.loss_on=all`)",
        ),
    }
}

/// Whether the trainer evaluates.
fn is_evaluated(fields: &Fields<'_>) -> bool {
    let strategies = ["eval_strategy", "evaluation_strategy"].iter().filter_map(|name| fields.get(name));
    strategies
        .into_iter()
        .any(|strategy| matches!(strategy, Content::Text(word) if word == "steps" || word == "epoch"))
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
    let Some(items) = found.items() else { return };
    let mut rows: Vec<NamedRows> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let whole = found.inside(format!("{}.{index}", found.key), item.line, &item.content);
        match whole.content {
            Content::Text(name) => rows.push(NamedRows::of(name)),
            Content::Map(_) => {
                let Some(group) = whole.group() else { continue };
                // Older files have the data set's name in `name`; in TRL's, `name` is the config.
                let name = ["path", "id"].iter().find_map(|key| group.take(key));
                let Some(name) = name.or_else(|| group.take("name")).and_then(|name| name.text()) else {
                    continue;
                };
                rows.push(NamedRows::of(name).with_parts(&group, &MIXTURE_PARTS, draft));
                for rest in group.rest() {
                    let why = match rest.name() {
                        "weight" => "`[[data.mix]]` sets the weight of each source".to_owned(),
                        "columns" => {
                            "columns are recognized by name; `data.columns` maps columns with other names"
                                .to_owned()
                        }
                        name => reason_for(name).why,
                    };
                    draft.leave_out(&rest, why);
                }
            }
            _ => {}
        }
    }
    put_rows(draft, "data.train", &rows, &found);
}

/// TrainingArguments: batch, length, optimizer, saving, seeds.
pub fn read_training_arguments(fields: &Fields<'_>, draft: &mut Draft, defaults: &TrainerDefaults) {
    let tool = defaults.tool;
    let (bf16, f16) = (fields.take_any(&["bf16", "pure_bf16"]), fields.take("fp16"));
    put_compute(draft, bf16.as_ref(), f16.as_ref());
    if !draft.has("model.compute") && bf16.is_none() && f16.is_none() && tool != TRL {
        draft.assume(
            "neither `bf16` nor `fp16` is set; assuming the device's best precision (`model.compute`)",
        );
    }
    let micro = fields.take_first(&["per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"]);
    let accumulation = fields.take_first(&["gradient_accumulation_steps", "gradient_accumulation"]);
    let size =
        StepSize { micro: micro.as_ref(), default_micro: 8, accumulation: accumulation.as_ref(), tool };
    put_batch(draft, &size);
    put_length(
        draft,
        fields.take("max_steps"),
        fields.take_first(&["num_train_epochs", "num_epochs", "epochs"]),
        (3.0, tool),
    );
    put_number_or(
        draft,
        "train.lr",
        fields.take_first(&["learning_rate", "lr"]),
        Value::Float(defaults.lr),
        tool,
    );
    let counts = put_schedule(
        draft,
        fields.take_first(&["lr_scheduler_type", "lr_scheduler"]),
        Schedule::Linear,
        tool,
    );
    draft.leave_out_if_set(
        fields.take("lr_scheduler_kwargs").filter(Found::is_on),
        "schedules have no settings other than `train.warmup`",
    );
    put_warmup(draft, fields.take("warmup_steps"), fields.take("warmup_ratio"), counts, (0.0, tool));
    put_optimizer(draft, fields.take_first(&["optim", "optimizer"]));
    put_number(draft, "train.weight_decay", fields.take("weight_decay"));
    put_betas(draft, fields.take("adam_beta1"), fields.take("adam_beta2"));
    put_number(draft, "train.eps", fields.take("adam_epsilon"));
    put_number(draft, "train.clip", fields.take("max_grad_norm"));
    let (seed, data_seed) = (fields.take_first(&["seed", "random_seed"]), fields.take("data_seed"));
    put_number(draft, "train.seed", seed);
    draft.leave_out_if_set(data_seed, "one seed controls every random choice (`train.seed`)");
    put_number(
        draft,
        "train.log_every",
        fields.take_first(&["logging_steps", "log_frequency"]).filter(is_whole),
    );
    put_saving(fields, draft, Saving { tool, save_default: true, eval_needs_strategy: true });
    put_text(draft, "output.dir", fields.take("output_dir"));
    put_max_memory(draft, fields.take("max_memory"));
    if let Some(found) = fields.take("deepspeed").filter(Found::is_on) {
        follow_deepspeed(draft, &found);
    }
    if let Some(found) = fields.take_any_on(&["use_cpu", "no_cuda"]) {
        draft.put("memory.device", word("cpu"), &[&found]);
    }
}

fn is_whole(found: &Found<'_>) -> bool {
    matches!(found.content, Content::Number(digits) if digits.parse::<f64>().is_ok_and(|steps| steps >= 1.0))
}

/// How a tool saves and evaluates.
pub struct Saving {
    pub tool: &'static str,
    /// Whether it saves every 500 steps by default.
    pub save_default: bool,
    /// Whether a number of steps alone does not make it evaluate.
    pub eval_needs_strategy: bool,
}

/// How often to save and evaluate, in steps or epochs.
pub fn put_saving(fields: &Fields<'_>, draft: &mut Draft, saving: Saving) {
    let Saving { tool, save_default, eval_needs_strategy } = saving;
    let default = save_default.then_some((500, tool));
    put_every(draft, "train.save_every", fields.take("save_strategy"), fields.take("save_steps"), default);
    let strategy = fields.take_any(&["eval_strategy", "evaluation_strategy"]);
    // Without a strategy, Hugging Face's trainer never evaluates, even if a number of steps is set.
    match strategy.is_some() || !eval_needs_strategy {
        true => put_every(draft, "train.eval_every", strategy, fields.take("eval_steps"), None),
        false => {
            if let Some(steps) = fields.take("eval_steps") {
                draft.leave_out(&steps, "no `eval_strategy` is set, so the trainer never evaluates");
            }
        }
    }
    match fields.take("save_total_limit") {
        Some(found) => put_number(draft, "train.keep", Some(found)),
        None => draft.assume(format!("3 checkpoints are kept; {tool} would keep all of them (`train.keep`)")),
    }
    draft.leave_out_if_set(
        fields.take_on("load_best_model_at_end"),
        "the best evaluated state is kept; with `train.early_stop` it becomes the adapter",
    );
    put_number(draft, "train.early_stop", fields.take("early_stopping_patience"));
}

fn put_every(
    draft: &mut Draft,
    key: &'static str,
    strategy: Option<Found<'_>>,
    steps: Option<Found<'_>>,
    default: Option<(i128, &'static str)>,
) {
    let word = strategy.as_ref().map(|found| match found.content {
        // YAML reads `no` as a boolean.
        Content::Boolean(false) => "no".to_owned(),
        Content::Text(text) => text.clone(),
        other => other.describe(),
    });
    match (word.as_deref(), strategy, steps) {
        (Some("no"), Some(strategy), steps) => {
            draft.put(key, Value::Integer(0), &[&strategy]);
            if let Some(steps) = steps {
                draft.leave_out(&steps, format!("`{}` (line {}) turns it off", strategy.key, strategy.line));
            }
        }
        (Some("epoch"), Some(strategy), _) => leave_per_epoch(draft, key, Some(strategy), 1.0),
        (Some("steps") | None, _, Some(steps)) => {
            let Some(number) = steps.number() else { return };
            match number < 1.0 && number != 0.0 {
                true => draft
                    .leave_out(&steps, format!("a fraction of all steps; `{key}` takes a number of steps")),
                false => put_whole(draft, key, number, &[&steps]),
            }
        }
        (Some("steps") | None, _, None) => {
            if let Some((steps, tool)) = default {
                draft.put_default(key, Value::Integer(steps), tool);
            }
        }
        (Some(_), Some(strategy), _) => {
            draft.leave_out(&strategy, format!("not supported; `{key}` takes a number of steps"));
        }
        (Some(_), None, _) => unreachable!("the word comes from the setting"),
    }
}
