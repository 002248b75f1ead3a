//! A torchtune configuration: LoRA, QLoRA, DoRA and full fine-tuning, each part a `_component_` with its arguments.
//!
//! The name of the model's component says what is trained and how weights are stored; the checkpoint folder is the
//! model.
//! `${name}` refers to another setting at the top of the file.
//! Not supported: preference training, distillation, quantization-aware training, evaluation and generation.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::{
    NamedColumns, NamedRows, OTHER_COLUMN, PartNames, TURN_FIELDS, put_columns, put_files, put_rows,
};
use super::deepspeed::PINNED;
use super::document::{Content, Entry};
use super::draft::Draft;
use super::families::judge_family;
use super::fields::{Fields, Found};
use super::templates::{MODEL, PLAIN, template_of_tokenizer};
use super::vocabulary::{
    StepSize, put_batch, put_beta_list, put_compute_dtype, put_dtype, put_loss_on, put_number, put_number_or,
    put_optimizer_named, put_packed, put_whole, word, word_list,
};
use crate::LossOn;
use crate::reasons::reason_for;
use crate::value::Value;
use smidgen_ir::words::ColumnRole;
use std::collections::HashSet;

const TORCHTUNE: &str = "torchtune";
const COMPONENT: &str = "_component_";

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
    put_checkpoint(fields, draft);
    put_trained(fields, draft);
    let dtype = fields.take("dtype");
    put_compute_dtype(draft, dtype.clone());
    if !draft.has("model.base") {
        put_dtype(draft, dtype);
    }
    let mut template = MODEL;
    if let Some(tokenizer) = fields.take_group("tokenizer") {
        template = template_of(&tokenizer, draft);
        match tokenizer.take("max_seq_len") {
            Some(found) => put_number(draft, "data.max_tokens", Some(found)),
            None => draft.assume(
                "no `max_seq_len` is set, so torchtune cuts nothing; here samples have at most 1024 tokens \
                 (`data.max_tokens`)",
            ),
        }
        tokenizer.skip(&[COMPONENT, "path", "merges_file", "special_tokens_path"]);
        draft.leave_rest(&tokenizer);
    }
    let packing = put_datasets(fields, draft, template);
    put_training(fields, draft);
    put_packed(draft, packing);
    if let Some(found) = fields.take_on("enable_activation_offloading") {
        draft.put_with("memory.activations", word("host"), &[&found], PINNED);
    }
    if let Some((device, found)) = fields.take_text("device")
        && device == "cpu"
    {
        draft.put("memory.device", word("cpu"), &[&found]);
    }
    if let Some(found) = fields.take("output_dir")
        && let Some(folder) = interpolated(fields, &found, draft)
    {
        draft.put("output.dir", Value::Text(folder), &[&found]);
    }
    // These configure logging and profiling; metrics.jsonl has what a run records.
    fields.skip(&["metric_logger", "profiler"]);
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
    if let Some(found) = fields.get("model").filter(|_| !fields.has("optimizer")).and(fields.take("model")) {
        found.mistake("there is no `optimizer`: this configuration does not train".to_owned());
    }
}

/// The last name of a component's path, in lower case.
fn last_name(path: &str) -> String {
    path.rsplit('.').next().unwrap_or(path).to_lowercase()
}

fn put_checkpoint(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(group) = fields.take_group("checkpointer") else { return };
    let kind = group.take_text(COMPONENT);
    let is_hugging_face = kind.as_ref().is_none_or(|(name, _)| last_name(name).contains("hfcheckpointer"));
    if let Some(found) = group.take("checkpoint_dir") {
        match is_hugging_face {
            true => {
                if let Some(folder) = interpolated(fields, &found, draft) {
                    draft.put("model.path", Value::Text(folder), &[&found]);
                }
            }
            false => {
                draft.want("model.path", "the same model as a Hugging Face checkpoint");
                draft.leave_out(&found, "checkpoints in Meta's or torchtune's own format are not supported");
            }
        }
    }
    draft.leave_out_if_set(
        group.take("adapter_checkpoint").filter(Found::is_on),
        "`adapter.init` starts from an adapter in PEFT's format",
    );
    group.skip(&["checkpoint_files", "output_dir", "model_type", "recipe_checkpoint", "safe_serialization"]);
    draft.leave_rest(&group);
}

/// What is trained, by the name and the arguments of the model's component.
fn put_trained(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(group) = fields.take_group("model") else { return };
    let Some((path, component)) = group.take_text(COMPONENT) else { return };
    let name = last_name(&path);
    judge_family(draft, &component, &name);
    if name.starts_with("qlora_") || group.take_on("quantize_base").is_some() {
        draft.put("model.base", word("nf4"), &[&component]);
    }
    if !name.starts_with("lora_") && !name.starts_with("qlora_") {
        draft.put("adapter.kind", word("full"), &[&component]);
        return draft.leave_rest(&group);
    }
    let (attention, mlp) = (group.take("lora_attn_modules"), group.take_on("apply_lora_to_mlp"));
    let settings = AdapterSettings {
        rank: group.take("lora_rank"),
        default_rank: 8,
        alpha: group.take("lora_alpha"),
        default_alpha: Some(16.0),
        dropout: group.take("lora_dropout"),
        all_by_default: true,
        dora: group.take("use_dora"),
        tool: TORCHTUNE,
        ..AdapterSettings::default()
    };
    put_adapter(draft, settings, &[&component]);
    put_modules(draft, attention, mlp);
    draft.leave_out_if_set(
        group.take_on("apply_lora_to_output"),
        "the LM head is never adapted; results will differ",
    );
    draft.leave_rest(&group);
}

fn put_modules(draft: &mut Draft, attention: Option<Found<'_>>, mlp: Option<Found<'_>>) {
    let Some(found) = attention else { return };
    let Some(names) = found.words() else { return };
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

/// The rows; returns the switch that packs them, if it is on.
fn put_datasets<'a>(fields: &Fields<'a>, draft: &mut Draft, template: &'static str) -> Option<Found<'a>> {
    let packing = put_dataset(fields, draft, "dataset", "data.train", template);
    put_dataset(fields, draft, "dataset_val", "data.eval", template);
    put_number(draft, "train.eval_every", fields.take("run_val_every_n_steps"));
    if let Some(found) = fields.take("shuffle")
        && let Some(shuffle) = found.boolean()
    {
        draft.put("data.shuffle", Value::Boolean(shuffle), &[&found]);
    }
    packing
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
    let source = group.take("source").and_then(|found| Some((found.text()?, found)));
    let files = group.take("data_files").and_then(|found| Some((found.words()?, found)));
    match (files, source, default_source(&kind)) {
        (Some((names, found)), ..) => put_files(draft, key, &names, &found),
        (None, Some((name, found)), _) => {
            let rows = NamedRows::of(name).with_parts(&group, &PARTS, draft);
            put_rows(draft, key, &[rows], &found);
        }
        (None, None, Some(name)) => {
            let rows = NamedRows::of(name).with_parts(&group, &PARTS, draft);
            put_rows(draft, key, &[rows], &component);
        }
        (None, None, None) => put_files(draft, key, std::slice::from_ref(&kind), &component),
    }
    let on_input = group.take("train_on_input").and_then(|found| Some((found.boolean()?, found)));
    if key == "data.train" {
        put_row_format(draft, &kind, &component, on_input);
        put_row_template(draft, &kind, &component, template);
    }
    let columns = columns_of(&group, &kind, draft);
    put_columns(draft, key, &[columns]);
    for rest in group.rest() {
        let why = match rest.name() {
            "conversation_style" => match rest.content {
                Content::Text(style) if style == "sharegpt" || style == "openai" => continue,
                _ => TURN_FIELDS.to_owned(),
            },
            "column_map" | "conversation_column" | "column" => OTHER_COLUMN.to_owned(),
            "split" => "selects a part of a hub dataset; a file has none".to_owned(),
            "packed" => continue,
            name => reason_for(name).why,
        };
        if rest.is_on() {
            draft.leave_out(&rest, why);
        }
    }
    group.take_on("packed")
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

const PARTS: PartNames = PartNames { config: &["name"], split: "split", revision: "revision" };

/// The data set that torchtune uses by default for a component that names none.
fn default_source(kind: &str) -> Option<&'static str> {
    match kind {
        "alpaca_dataset" => Some("tatsu-lab/alpaca"),
        "alpaca_cleaned_dataset" => Some("yahma/alpaca-cleaned"),
        _ => None,
    }
}

fn put_row_format(draft: &mut Draft, kind: &str, component: &Found<'_>, on_input: Option<(bool, Found<'_>)>) {
    let (format, all_by_default) = match kind {
        kind if kind.starts_with("alpaca") => (Some("alpaca"), true),
        "chat_dataset" => (Some("chat"), false),
        "text_completion_dataset" => (Some("text"), true),
        _ => (None, false),
    };
    if let Some(format) = format {
        draft.put("data.format", word(format), &[component]);
    }
    let completion = if format == Some("chat") { LossOn::Assistant } else { LossOn::Completion };
    match on_input {
        Some((true, found)) => put_loss_on(draft, LossOn::All, &[&found]),
        Some((false, found)) => put_loss_on(draft, completion, &[&found]),
        None if all_by_default => put_loss_on(draft, LossOn::All, &[component]),
        None => put_loss_on(draft, completion, &[component]),
    }
}

/// The template that the tokenizer writes turns with, or the one that the file gives it.
fn template_of(tokenizer: &Fields<'_>, draft: &mut Draft) -> &'static str {
    if let Some(found) = tokenizer.take("prompt_template") {
        match found.content {
            Content::Text(path) if last_name(path) == "chatmltemplate" => return "chatml",
            Content::Text(path) if last_name(path).ends_with("chattemplate") => {}
            _ => draft.leave_out(&found, "writes texts around turns; the model's own chat template is used"),
        }
        return MODEL;
    }
    let component = tokenizer.get(COMPONENT);
    match component {
        Some(Content::Text(path)) => template_of_tokenizer(&last_name(path)),
        _ => MODEL,
    }
}

/// Every row but plain text becomes turns, which the tokenizer writes.
fn put_row_template(draft: &mut Draft, kind: &str, component: &Found<'_>, template: &'static str) {
    let is_alpaca = kind.starts_with("alpaca");
    match (kind, template) {
        ("text_completion_dataset", _) | ("chat_dataset", PLAIN | MODEL) => {}
        // Turns without markers leave the bare prompt.
        (_, PLAIN) if is_alpaca => draft.put("data.template", word("alpaca"), &[component]),
        _ => {
            draft.put_with("data.template", word(template), &[component], "turns of the tokenizer");
            if is_alpaca {
                let why = "torchtune writes the sentences of the Alpaca prompt inside the user's turn, which here has the \
                           instruction and its input alone; results will differ";
                draft.leave_out(component, why);
            }
        }
    }
}

fn put_training(fields: &Fields<'_>, draft: &mut Draft) {
    let (micro, accumulation) = (fields.take("batch_size"), fields.take("gradient_accumulation_steps"));
    let size = StepSize {
        micro: micro.as_ref(),
        default_micro: 1,
        accumulation: accumulation.as_ref(),
        tool: TORCHTUNE,
    };
    put_batch(draft, &size);
    put_length(fields, draft);
    put_optimizer_group(fields, draft);
    match fields.take("lr_scheduler").and_then(|found| found.group()) {
        Some(group) => put_schedule_group(&group, draft),
        None => {
            draft.put_default("train.schedule", word("constant"), TORCHTUNE);
            draft.put_default("train.warmup", Value::Integer(0), TORCHTUNE);
        }
    }
    put_number_or(draft, "train.clip", fields.take("clip_grad_norm"), Value::Integer(0), TORCHTUNE);
    put_number(draft, "train.seed", fields.take("seed"));
    put_number(draft, "train.save_every", fields.take("save_every_n_steps"));
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

fn put_optimizer_group(fields: &Fields<'_>, draft: &mut Draft) {
    let Some(group) = fields.take_group("optimizer") else { return };
    let component = group.take(COMPONENT);
    let name = component.as_ref().and_then(|found| found.text()).map(|path| last_name(&path));
    if let (Some(found), Some(name)) = (&component, &name) {
        put_optimizer_named(draft, found, name);
    }
    put_number(draft, "train.lr", group.take("lr"));
    put_number(draft, "train.eps", group.take("eps"));
    match group.take("weight_decay") {
        Some(found) => put_number(draft, "train.weight_decay", Some(found)),
        // The default weight decay of PyTorch's AdamW, and of those that follow it, is 0.01.
        None if name.is_some_and(|name| name.contains("adamw")) => {
            draft.put_default("train.weight_decay", Value::Float(0.01), "the optimizer");
        }
        None => {}
    }
    put_beta_list(draft, group.take("betas"));
    group.skip(&["fused"]);
    draft.leave_rest(&group);
}

fn put_schedule_group(group: &Fields<'_>, draft: &mut Draft) {
    if let Some((path, found)) = group.take_text(COMPONENT) {
        match last_name(&path).as_str() {
            name if name.contains("cosine") => draft.put("train.schedule", word("cosine"), &[&found]),
            name if name.contains("linear") => draft.put("train.schedule", word("linear"), &[&found]),
            name if name.contains("constant") => draft.put("train.schedule", word("constant"), &[&found]),
            name => {
                draft.leave_out(&found, format!("`{name}` is not supported; the learning rate is constant"));
                draft.put("train.schedule", word("constant"), &[&found]);
            }
        }
    }
    put_number_or(draft, "train.warmup", group.take("num_warmup_steps"), Value::Integer(0), TORCHTUNE);
    draft.leave_rest(group);
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
