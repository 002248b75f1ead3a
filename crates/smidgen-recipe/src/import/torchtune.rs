//! A torchtune configuration: LoRA, QLoRA, DoRA and full fine-tuning, each part a `_component_` with its arguments.
//!
//! The name of the model's component says what is trained and how weights are stored; the checkpoint folder is the
//! model.
//! `${name}` refers to another setting at the top of the file.
//! Not supported: preference training, distillation, quantization-aware training, evaluation and generation.

use super::adapters::put_adapter;
use super::datasets::{
    HUB_PART, NamedColumns, NamedRows, OTHER_COLUMN, PARTS, TURN_FIELDS, leave_source, put_columns,
    put_files, put_rows,
};
use super::document::{Content, Entry};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{judge_family, put_compute_dtype, put_dtype, put_packed, put_training};
use super::table::{AdapterPreset, Means, Preset, Row, Settings, TABLE as PEFT, Table};
use super::templates::{MODEL, PLAIN, template_of_tokenizer};
use super::values::{put_loss_on, put_whole, word, word_list};
use crate::LossOn;
use crate::value::Value;
use smidgen_ir::words::ColumnRole;
use std::collections::HashSet;

const TORCHTUNE: &str = "torchtune";
const COMPONENT: &str = "_component_";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Rank, &["model.lora_rank"]),
    (Means::Alpha, &["model.lora_alpha"]),
    (Means::Dropout, &["model.lora_dropout"]),
    (Means::Dora, &["model.use_dora"]),
    (Means::ComputeDtype, &["dtype"]),
    (Means::Number("data.max_tokens"), &["tokenizer.max_seq_len"]),
    (Means::Number("train.eval_every"), &["run_val_every_n_steps"]),
    (Means::Micro, &["batch_size"]),
    (Means::Accumulation, &["gradient_accumulation_steps"]),
    (Means::Optimizer, &["optimizer._component_"]),
    (Means::Number("train.lr"), &["optimizer.lr"]),
    (Means::Number("train.eps"), &["optimizer.eps"]),
    (Means::Number("train.weight_decay"), &["optimizer.weight_decay"]),
    (Means::Betas, &["optimizer.betas"]),
    (Means::Schedule, &["lr_scheduler._component_"]),
    (Means::Number("train.warmup"), &["lr_scheduler.num_warmup_steps"]),
    (Means::Number("train.clip"), &["clip_grad_norm"]),
    (Means::Number("train.seed"), &["seed"]),
    (Means::Number("train.save_every"), &["save_every_n_steps"]),
    (Means::OnCpu, &["device"]),
    (Means::HostActivations, &["enable_activation_offloading"]),
    (Means::Left("`adapter.init` starts from an adapter in PEFT's format"), &["checkpointer.adapter_checkpoint"]),
    (Means::Left("the LM head is never adapted; results will differ"), &["model.apply_lora_to_output"]),
    // These configure logging and profiling, among others; metrics.jsonl has what a run records.
    (Means::Nothing, &["metric_logger", "profiler", "loss", "optimizer.fused", "tokenizer._component_", "tokenizer.path",
        "tokenizer.merges_file", "tokenizer.special_tokens_path", "checkpointer.checkpoint_files",
        "checkpointer.output_dir", "checkpointer.model_type", "checkpointer.recipe_checkpoint",
        "checkpointer.safe_serialization"]),
];

const TABLE: Table = Table {
    tool: TORCHTUNE,
    rows: &[ROWS],
    presets: &[
        ("train.epochs", Preset::Number(1.0)),
        ("train.schedule", Preset::Word("constant")),
        ("train.warmup", Preset::Whole(0)),
        ("train.clip", Preset::Whole(0)),
    ],
    adapter: AdapterPreset { tool: TORCHTUNE, rank: 8, alpha: Some(16.0), dropout: 0.0, all_linear: true },
    constant_warmup: true,
    ..PEFT
};

/// Settings that are components.
pub fn components(entries: &[Entry]) -> Vec<&Entry> {
    let is_component = |entry: &&Entry| match &entry.value.content {
        Content::Map(inside) => inside.iter().any(|inner| inner.name == COMPONENT),
        _ => false,
    };
    entries.iter().filter(is_component).collect()
}

pub fn read_torchtune(fields: &Fields<'_>, draft: &mut Draft) {
    refuse_others(fields);
    let it = Settings { fields, table: TABLE };
    put_checkpoint(fields, draft);
    put_trained(&it, draft);
    let dtype = it.take(Means::ComputeDtype);
    put_compute_dtype(draft, dtype.clone());
    put_dtype(draft, dtype.filter(|_| !draft.has("model.base")));
    if fields.has("tokenizer") && !it.sets("data.max_tokens") {
        draft.assume(
            "no `max_seq_len` is set, so torchtune cuts nothing; here samples have at most 1024 tokens \
             (`data.max_tokens`)",
        );
    }
    let template = template_of(fields, draft);
    let packing = put_dataset(fields, draft, "dataset", "data.train", template);
    put_dataset(fields, draft, "dataset_val", "data.eval", template);
    if let Some(found) = fields.take("shuffle")
        && let Some(shuffle) = found.boolean()
    {
        draft.put("data.shuffle", Value::Boolean(shuffle), &[&found]);
    }
    put_length(fields, draft);
    put_training(&it, draft);
    // The default weight decay of PyTorch's AdamW, and of those that follow it.
    let optimizer = fields.take_text("optimizer._component_");
    if !draft.has("train.weight_decay")
        && optimizer.is_some_and(|(name, _)| last_name(&name).contains("adamw"))
    {
        draft.put_default("train.weight_decay", Value::Float(0.01), "the optimizer");
    }
    put_packed(draft, packing);
    if let Some(found) = fields.take("output_dir")
        && let Some(folder) = interpolated(fields, &found, draft)
    {
        draft.put("output.dir", Value::Text(folder), &[&found]);
    }
}

/// Parts of components' names that are not a text model's or its data's.
const OTHER_PARTS: &[(&str, &str)] = &[
    ("classifier", "a classifier"),
    ("vision", "a model of images"),
    ("multimodal", "a model of images"),
    ("clip", "a model of images"),
    ("llama4", "Llama 4, which smidgen does not load"),
    ("preference_dataset", "training on preferences"),
    ("paired_dataset", "training on preferences"),
];

/// Reports configurations that are not supervised fine-tuning; they have losses and components of their own.
fn refuse_others(fields: &Fields<'_>) {
    let loss = fields.take_group("loss");
    let loss = loss.as_ref().and_then(|loss| loss.take(COMPONENT));
    if let Some(found) = &loss
        && let Some(name) = found.text()
        && ["dpo", "rso", "simpo", "ppo", "grpo", "kl", "kd"]
            .iter()
            .any(|word| last_name(&name).contains(word))
    {
        found.mistake(format!("`{}` is `{name}`; only supervised fine-tuning is supported", found.key));
    }
    for name in ["kd_loss", "teacher_model", "quantizer", "ref_policy_model", "reward_and_value_model"] {
        if let Some(found) = fields.take(name) {
            found.mistake(format!(
                "`{name}` belongs to another recipe; only supervised fine-tuning is supported"
            ));
        }
    }
    for name in ["model", "dataset"] {
        if let Some(Content::Map(inside)) = fields.get(name)
            && let Some(entry) = inside.iter().find(|entry| entry.name == COMPONENT)
            && let Content::Text(path) = &entry.value.content
            && let Some((_, what)) = OTHER_PARTS.iter().find(|(part, _)| path.to_lowercase().contains(part))
            && let Some(found) = fields.take(name)
        {
            found.mistake(format!("`{name}` is `{path}`: this is {what}; only text models are fine-tuned"));
        }
    }
    if !fields.has("optimizer")
        && let Some(found) = fields.take("model")
    {
        found.mistake("there is no `optimizer`: this configuration does not train".to_owned());
    }
}

/// The last name of a component's path, in lower case.
fn last_name(path: &str) -> String {
    path.rsplit('.').next().unwrap_or(path).to_lowercase()
}

fn put_checkpoint(fields: &Fields<'_>, draft: &mut Draft) {
    let kind = fields.take_text("checkpointer._component_");
    let is_hugging_face = kind.as_ref().is_none_or(|(name, _)| last_name(name).contains("hfcheckpointer"));
    let Some(found) = fields.take("checkpointer.checkpoint_dir") else { return };
    if !is_hugging_face {
        draft.want("model.path", "the same model as a Hugging Face checkpoint");
        draft.leave_out(&found, "checkpoints in Meta's or torchtune's own format are not supported");
    } else if let Some(folder) = interpolated(fields, &found, draft) {
        draft.put("model.path", Value::Text(folder), &[&found]);
    }
}

/// What is trained, by the name and the arguments of the model's component.
fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft) {
    let fields = it.fields;
    let Some((path, component)) = fields.take_text("model._component_") else { return };
    let name = last_name(&path);
    judge_family(draft, &component, &name);
    if name.starts_with("qlora_") || fields.take_on("model.quantize_base").is_some() {
        draft.put("model.base", word("nf4"), &[&component]);
    }
    if !name.starts_with("lora_") && !name.starts_with("qlora_") {
        return draft.put("adapter.kind", word("full"), &[&component]);
    }
    put_adapter(it, draft, &[&component]);
    put_modules(draft, fields.take("model.lora_attn_modules"), fields.take_on("model.apply_lora_to_mlp"));
}

fn put_modules(draft: &mut Draft, attention: Option<Found<'_>>, mlp: Option<Found<'_>>) {
    let Some((names, found)) = attention.and_then(|found| Some((found.words()?, found))) else { return };
    let ours = |name: String| if name == "output_proj" { "o_proj".to_owned() } else { name };
    let mut names: Vec<String> = names.into_iter().map(ours).collect();
    if mlp.is_some() {
        names.extend(["gate_proj", "up_proj", "down_proj"].map(str::to_owned));
    }
    let mut seen = HashSet::new();
    names.retain(|name| seen.insert(name.clone()));
    let from: Vec<&Found<'_>> = [&found].into_iter().chain(&mlp).collect();
    draft.put("adapter.targets", word_list(&names), &from);
}

fn put_dataset<'a>(
    fields: &Fields<'a>,
    draft: &mut Draft,
    name: &str,
    key: &'static str,
    template: &'static str,
) -> Option<Found<'a>> {
    let whole = fields.take(name)?;
    if matches!(whole.content, Content::List(_)) {
        draft.want(key, "the files of the datasets, as a list");
        draft.leave_out(&whole, "several datasets; name their files in a list");
        return None;
    }
    let group = whole.group()?;
    let (path, component) = group.take_text(COMPONENT)?;
    let kind = last_name(&path);
    let (_, format, all_by_default, default_source) =
        KINDS.iter().find(|(name, ..)| kind.starts_with(name)).expect("the last row fits every name");
    let source = group.take_text("source");
    let files = group.take("data_files").and_then(|found| Some((found.words()?, found)));
    match (files, source, default_source) {
        (Some((names, found)), ..) => put_files(draft, key, &names, &found),
        (None, None, None) => put_files(draft, key, std::slice::from_ref(&kind), &component),
        (None, source, default) => {
            let name = source.as_ref().map_or(default.unwrap_or_default(), |(name, _)| name);
            let rows = NamedRows::of(name).with_parts(&group, &PARTS, draft);
            put_rows(draft, key, &[rows], source.as_ref().map_or(&component, |(_, found)| found));
        }
    }
    let on_input = group.take("train_on_input");
    if key == "data.train" {
        put_rows_of(draft, (format, *all_by_default), &component, on_input, template);
    }
    let columns = columns_of(&group, &kind, draft);
    put_columns(draft, key, &[columns]);
    let packing = group.take_on("packed");
    if matches!(group.get("conversation_style"), Some(Content::Text(style)) if style == "sharegpt" || style == "openai")
    {
        group.skip(&["conversation_style"]);
    }
    leave_source(&group, WHYS, draft);
    packing
}

/// The columns that a data set's component reads. The names in a `column_map` are those of the component.
fn columns_of<'a>(group: &Fields<'a>, kind: &str, draft: &mut Draft) -> NamedColumns<'a> {
    use ColumnRole::{Completion, Input, Instruction, Messages, Output, Prompt, Text};
    let mapped: &[(&str, ColumnRole)] = match kind {
        kind if kind.starts_with("alpaca") => {
            &[("instruction", Instruction), ("input", Input), ("output", Output)]
        }
        "chat_dataset" => return NamedColumns::of(group, &[("conversation_column", Messages)]),
        "text_completion_dataset" => return NamedColumns::of(group, &[("column", Text)]),
        _ => &[("input", Prompt), ("output", Completion)],
    };
    let Some(map) = group.take_group("column_map") else { return NamedColumns::default() };
    let columns = NamedColumns::of(&map, mapped);
    map.rest().iter().for_each(|rest| draft.leave_out(rest, OTHER_COLUMN));
    columns
}

/// Why settings of a data set are not carried over.
const WHYS: &[(&str, &str)] = &[
    ("conversation_style", TURN_FIELDS),
    ("column", OTHER_COLUMN),
    ("conversation_column", OTHER_COLUMN),
    ("split", HUB_PART),
];

/// What a data set's component reads: the beginning of its name, the format (empty: prompts and completions), whether
/// every token carries a loss by default, and the data set that is used if none is named.
#[rustfmt::skip]
const KINDS: &[(&str, &str, bool, Option<&str>)] = &[
    ("alpaca_dataset", "alpaca", true, Some("tatsu-lab/alpaca")),
    ("alpaca_cleaned_dataset", "alpaca", true, Some("yahma/alpaca-cleaned")),
    ("alpaca", "alpaca", true, None),
    ("chat_dataset", "chat", false, None),
    ("text_completion_dataset", "text", true, None),
    ("", "", false, None),
];

/// Format, loss and template of the rows. Every row but plain text becomes turns, which the tokenizer writes.
fn put_rows_of(
    draft: &mut Draft,
    (format, all_by_default): (&'static str, bool),
    component: &Found<'_>,
    on_input: Option<Found<'_>>,
    template: &'static str,
) {
    // torchtune writes the sentences of the Alpaca prompt inside the user's turn. Turns without markers leave the bare
    // prompt.
    let (format, template) = match (format, template) {
        ("alpaca", PLAIN) => ("alpaca", "alpaca"),
        ("alpaca", template) => ("alpaca-prompt", template),
        ("text", _) | ("chat", PLAIN | MODEL) => (format, ""),
        _ => (format, template),
    };
    if !format.is_empty() {
        draft.put("data.format", word(format), &[component]);
    }
    if !template.is_empty() {
        let remark = if format == "alpaca" { "" } else { "turns of the tokenizer" };
        draft.put_with("data.template", word(template), &[component], remark);
    }
    let is_all = on_input.as_ref().map_or(Some(all_by_default), Found::boolean);
    let loss_on = match (is_all, format) {
        (Some(true), _) => LossOn::All,
        (_, "chat") => LossOn::Assistant,
        _ => LossOn::Completion,
    };
    put_loss_on(draft, loss_on, &[on_input.as_ref().unwrap_or(component)]);
}

/// The template that the tokenizer writes turns with, or the one that the file gives it.
fn template_of(fields: &Fields<'_>, draft: &mut Draft) -> &'static str {
    if let Some(found) = fields.take("tokenizer.prompt_template") {
        match found.content {
            Content::Text(path) if last_name(path) == "chatmltemplate" => return "chatml",
            Content::Text(path) if last_name(path).ends_with("chattemplate") => {}
            _ => draft.leave_out(&found, "writes texts around turns; the model's own chat template is used"),
        }
        return MODEL;
    }
    match fields.get("tokenizer._component_") {
        Some(Content::Text(path)) => template_of_tokenizer(&last_name(path)),
        _ => MODEL,
    }
}

/// `max_steps_per_epoch` cuts each epoch short, so the length becomes a number of steps.
fn put_length(fields: &Fields<'_>, draft: &mut Draft) {
    let (epochs, limit) = (fields.take("epochs"), fields.take("max_steps_per_epoch"));
    let count = epochs.as_ref().map_or(Some(1.0), |found| found.number());
    match (count, limit.as_ref().and_then(|found| found.count()), epochs) {
        (Some(count), Some(most), epochs) => {
            let from: Vec<&Found<'_>> = limit.iter().chain(&epochs).collect();
            put_whole(draft, "train.steps", count * most as f64, &from);
        }
        (Some(count), None, Some(found)) => draft.put("train.epochs", Value::Float(count), &[&found]),
        (Some(count), None, None) => draft.put_default("train.epochs", Value::Float(count), TORCHTUNE),
        (None, _, _) => {}
    }
}

/// A text with `${name}` replaced by the settings at the top of the file.
fn interpolated(fields: &Fields<'_>, found: &Found<'_>, draft: &mut Draft) -> Option<String> {
    let mut text = found.text()?;
    // A limited number of rounds, because settings may refer to each other in a circle.
    for _ in 0..8 {
        let Some((before, rest)) = text.split_once("${") else { return Some(text) };
        let Some((name, after)) = rest.split_once('}') else { break };
        let Some(Content::Text(value) | Content::Number(value)) = fields.get(name) else { break };
        text = format!("{before}{value}{after}");
    }
    draft.leave_out(found, "refers to a setting that is not in the file");
    None
}
