//! An Axolotl configuration: LoRA, QLoRA and full fine-tuning on its types of datasets.
//!
//! Defaults are Axolotl's: one sample per micro-batch, one epoch, a cosine schedule, 512 tokens.
//! Not supported: preference training, multimodal models, and plugins with their own settings.

use super::adapters::{put_adapter, put_full};
use super::datasets::{
    HUB_PART, NamedColumns, OTHER_COLUMN, TURN_FIELDS, leave_source, put_columns, put_rows, put_split,
    rows_of,
};
use super::deepspeed::{follow, put_fsdp};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::{put_model, put_training, put_weights};
use super::table::{Means, Preset, Row, Saving, Settings, TABLE as PEFT, Table};
use super::templates::{MODEL, put_template};
use super::trainer::TRAINING;
use super::values::{PINNED, per_epoch_note, put_loss_on, put_number, put_text, word};
use crate::LossOn;
use crate::reasons::{CHECKPOINTING, reason_for};
use crate::value::Value;
use smidgen_ir::words::ColumnRole;

const AXOLOTL: &str = "Axolotl";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    (Means::Model, &["base_model"]),
    (Means::Revision, &["revision_of_model", "model_revision"]),
    (Means::Bf16, &["bf16"]),
    (Means::F16, &["fp16"]),
    (Means::Dtype, &["torch_dtype"]),
    (Means::FourBits, &["load_in_4bit"]),
    (Means::EightBits, &["load_in_8bit"]),
    (Means::DoubleQuant, &["bnb_config_kwargs.bnb_4bit_use_double_quant"]),
    (Means::Code, &["bnb_config_kwargs.bnb_4bit_quant_type"]),
    (Means::Rank, &["lora_r"]),
    (Means::Alpha, &["lora_alpha"]),
    (Means::Dropout, &["lora_dropout"]),
    (Means::Targets, &["lora_target_modules"]),
    (Means::AllLinear, &["lora_target_linear"]),
    (Means::Saved, &["lora_modules_to_save"]),
    (Means::Layers, &["peft_layers_to_transform"]),
    (Means::Dora, &["peft_use_dora"]),
    (Means::RsLora, &["peft_use_rslora"]),
    (Means::Start, &["lora_model_dir"]),
    (Means::Init, &["peft_init_lora_weights"]),
    (Means::Number("data.max_tokens"), &["sequence_len"]),
    (Means::Micro, &["micro_batch_size"]),
    (Means::Packing, &["sample_packing"]),
    (Means::Epochs, &["num_epochs"]),
    (Means::Schedule, &["lr_scheduler"]),
    (Means::Left("the learning rate decays to 0"), &["lr_scheduler_kwargs", "cosine_min_lr_ratio"]),
    (Means::Optimizer, &["optimizer"]),
    (Means::HostActivations, &["activation_offloading"]),
    (Means::Left("an inline template; put it into a .jinja file and name it in `data.template`"),
        &["chat_template_jinja"]),
];

const TABLE: Table = Table {
    tool: AXOLOTL,
    rows: &[ROWS, TRAINING],
    presets: &[
        ("data.max_tokens", Preset::Whole(512)),
        ("train.epochs", Preset::Number(1.0)),
        ("train.schedule", Preset::Word("cosine")),
        ("train.warmup", Preset::Number(0.03)),
    ],
    saving: Saving::HuggingFace { save_default: true, eval_needs_strategy: false },
    ..PEFT
};

pub fn read_axolotl(fields: &Fields<'_>, draft: &mut Draft) {
    let mut table = TABLE;
    if fields.has("saves_per_epoch") {
        table.saving = Saving::HuggingFace { save_default: false, eval_needs_strategy: false };
    }
    let it = Settings { fields, table };
    put_model(&it, draft);
    put_trained(&it, draft);
    put_template(draft, fields.take("chat_template"));
    if let Some(found) = fields.take("datasets") {
        put_datasets(draft, &found, "data.train", fields.take("train_on_inputs"));
    } else if let Some(found) = fields.take("pretraining_dataset") {
        put_pretraining(draft, &found);
    }
    if let Some(found) = fields.take("test_datasets") {
        put_datasets(draft, &found, "data.eval", None);
    }
    put_split(draft, fields.take("val_set_size"));
    if let Some((strategy, found)) = fields.take_text("excess_length_strategy") {
        let overflow = if strategy == "raise" { "error" } else { &strategy };
        draft.put("data.overflow", word(overflow), &[&found]);
    } else {
        // Documents are cut into pieces, and other long rows dropped.
        let is_text = draft.line("data.format").is_some_and(|line| line.toml == "\"text\"");
        draft.put_default("data.overflow", word(if is_text { "chunk" } else { "drop" }), AXOLOTL);
    }
    if let Some(found) = fields.take("batch_size") {
        put_number(draft, "train.batch", Some(found));
        for means in [Means::Micro, Means::Accumulation] {
            let why = "`batch_size` sets the samples per step; the solver chooses how it is split";
            draft.leave_out_if_set(it.take(means), why);
        }
    }
    if it.fields.get("learning_rate").is_none_or(|rate| *rate == Content::Null) {
        draft.assume("no `learning_rate` is set; assuming 2e-4 (`train.lr`)");
    }
    put_training(&it, draft);
    follow(&it, draft);
    for (name, key) in [("saves_per_epoch", "train.save_every"), ("evals_per_epoch", "train.eval_every")] {
        if let Some(found) = fields.take(name)
            && let Some(times) = found.number()
        {
            per_epoch_note(draft, key, &found, times);
        }
    }
    put_memory(fields, draft);
}

/// Documents to continue pre-training on: a list like `datasets`, or one name.
fn put_pretraining(draft: &mut Draft, found: &Found<'_>) {
    match found.content {
        Content::List(_) => put_datasets(draft, found, "data.train", None),
        _ => draft.want("data.train", "a file with a `text` column"),
    }
    draft.put("data.format", word("text"), &[found]);
    put_loss_on(draft, LossOn::All, &[found]);
}

fn put_trained(it: &Settings<'_, '_>, draft: &mut Draft) {
    let quantized = put_weights(it, draft);
    for (name, precision) in [("bfloat16", "bf16"), ("float16", "f16")] {
        if let Some(found) = it.fields.take_on(name) {
            draft.put("model.compute", word(precision), &[&found]);
        }
    }
    if let Some(found) = it.fields.take("unfrozen_parameters").filter(Found::is_on) {
        found.mistake(format!(
            "`{}` trains the parameters that match; `adapter.kind = \"full\"` with `adapter.layers` and \
             `adapter.targets` trains some of the weights",
            found.key
        ));
    }
    let Some(found) = it.fields.take("adapter") else {
        put_full(it, draft, None, quantized.as_ref());
        return draft.assume("no `adapter` is set, so Axolotl trains every weight, and so does the recipe");
    };
    match found.text().as_deref() {
        Some("qlora") if quantized.is_none_or(|found| found.name() != "load_in_4bit") => {
            found.mistake("`adapter: qlora` needs `load_in_4bit: true`".to_owned());
        }
        Some("lora" | "qlora") => put_adapter(it, draft, &[&found]),
        Some(other) => {
            found.mistake(format!("`adapter: {other}` is not supported (supported: `lora`, `qlora`)"));
        }
        None => {}
    }
}

/// A list of datasets, each with a path and a type.
fn put_datasets(draft: &mut Draft, found: &Found<'_>, key: &'static str, train_on_inputs: Option<Found<'_>>) {
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    let mut types: Vec<Found<'_>> = Vec::new();
    for whole in found.each() {
        let Some(group) = whole.group() else { continue };
        rows.extend(rows_of(&group, &["path"], draft));
        let kind = group.take("type");
        columns.push(columns_of(&group, kind.as_ref(), draft));
        types.extend(kind.filter(|kind| !matches!(kind.content, Content::Map(_)) && kind.text().is_some()));
        put_template(draft, group.take("chat_template").filter(|_| key == "data.train"));
        group.skip(&["ds_type"]);
        take_usual_turns(&group);
        if let Some(roles) = group.take("roles_to_train")
            && roles.words().is_some_and(|roles| roles != ["assistant"])
        {
            draft.leave_out(&roles, "the loss is on assistant turns");
        }
        leave_source(&group, WHYS, draft);
    }
    put_rows(draft, key, &rows, found);
    put_columns(draft, key, &columns);
    if key == "data.train" {
        put_row_type(draft, &types, train_on_inputs);
    }
}

/// Why settings of a source are not carried over.
const WHYS: &[(&str, &str)] = &[
    ("field", OTHER_COLUMN),
    ("message_", TURN_FIELDS),
    ("split", HUB_PART),
    ("name", HUB_PART),
    ("revision", HUB_PART),
    ("shards", "selects a part of a dataset; `data.limit` uses the first rows"),
];

/// The columns of a source. A type of the user's own is a group that names the columns and formats the prompt.
fn columns_of<'a>(group: &Fields<'a>, kind: Option<&Found<'a>>, draft: &mut Draft) -> NamedColumns<'a> {
    use ColumnRole::{Input, Instruction, Messages, Output, System, Text, Tools};
    const CONVERSATION: &[(&str, ColumnRole)] =
        &[("field_messages", Messages), ("field_tools", Tools), ("field_system", System)];
    let Some(kind) = kind else { return NamedColumns::of(group, CONVERSATION) };
    let own = match kind.content {
        Content::Map(_) => kind.group(),
        Content::Text(name) => {
            return match name.split(['.', ':']).next().unwrap_or_default() {
                "completion" | "pretrain" => {
                    NamedColumns::of(group, &[("field", Text), ("text_column", Text)])
                }
                "chat_template" | "sharegpt" => NamedColumns::of(group, CONVERSATION),
                // Other types read columns of fixed names.
                _ => NamedColumns::default(),
            };
        }
        _ => None,
    };
    let Some(own) = own else { return NamedColumns::default() };
    let names = [
        ("field_instruction", Instruction),
        ("field_input", Input),
        ("field_output", Output),
        ("field_system", System),
    ];
    let columns = NamedColumns::of(&own, &names);
    let prompt = "`data.template` formats the prompt; results will differ";
    leave_source(&own, &[("field", OTHER_COLUMN), ("", prompt)], draft);
    columns
}

/// Takes the usual field names of turns, which need no note.
fn take_usual_turns(group: &Fields<'_>) {
    let is_usual = |content: &Content| {
        let usual = ["role", "content", "from", "value"];
        matches!(content, Content::Text(name) if usual.contains(&name.as_str()))
    };
    let all_usual = |content: &Content| match content {
        Content::Map(entries) => entries.iter().all(|entry| is_usual(&entry.value.content)),
        content => is_usual(content),
    };
    for name in ["message_field_role", "message_field_content", "message_property_mappings"] {
        if group.get(name).is_some_and(all_usual) {
            group.skip(&[name]);
        }
    }
}

/// Format, template and loss of the training rows, from the types of their sources.
fn put_row_type(draft: &mut Draft, types: &[Found<'_>], train_on_inputs: Option<Found<'_>>) {
    let Some(from) = types.first() else { return };
    if draft.has("train.objective") {
        return draft.leave_out(
            from,
            "rows of preferences are recognized by their columns (check with `smidgen preview`)",
        );
    }
    let name = from.text().unwrap_or_default();
    let kinds: Vec<Option<&RowType>> =
        types.iter().map(|kind| row_type(&kind.text().unwrap_or_default())).collect();
    if let Some(kind) = types.iter().find(|kind| kind.text().as_deref() == Some("input_output")) {
        return kind
            .mistake("`input_output` rows are not supported; write `input_ids` and `labels`".to_owned());
    }
    let meaning = |kind: &Option<&RowType>| kind.map(|kind| (kind.format, kind.template));
    if kinds.iter().any(|kind| meaning(kind) != meaning(&kinds[0])) {
        return draft
            .assume("the datasets have several types; the format of each file is detected from its columns");
    }
    let Some(RowType { format, template, loss_on, why, .. }) = kinds[0] else {
        draft.leave_out(from, format!("`{name}` has a prompt of its own; {OWN_PROMPT}"));
        return draft.assume(format!(
            "the format of `{name}` rows is detected from their columns (check with `smidgen preview`)"
        ));
    };
    draft.put("data.format", word(format), &[from]);
    if !template.is_empty() {
        draft.put("data.template", word(template), &[from]);
    }
    if !why.is_empty() {
        draft.leave_out(from, format!("`{name}` {why}; {OWN_PROMPT}"));
    }
    match train_on_inputs.filter(|found| found.boolean() == Some(true)) {
        Some(found) => put_loss_on(draft, LossOn::All, &[&found]),
        None => put_loss_on(draft, *loss_on, &[from]),
    }
}

const OWN_PROMPT: &str = "results will differ (a .jinja file in `data.template` writes any prompt)";

/// A type of rows, and what it means.
struct RowType {
    /// A name with its style (`alpaca:chat`), or without it and without what loads the rows (`sharegpt`).
    names: &'static [&'static str],
    format: &'static str,
    /// Empty for the model's own.
    template: &'static str,
    loss_on: LossOn,
    /// What smidgen does otherwise; may be empty.
    why: &'static str,
}

const fn row(
    names: &'static [&'static str],
    format: &'static str,
    template: &'static str,
    loss_on: LossOn,
    why: &'static str,
) -> RowType {
    RowType { names, format, template, loss_on, why }
}

const SYSTEM_TURN: &str = "begins with a system turn, which is left out";

#[rustfmt::skip]
const ROW_TYPES: &[RowType] = &[
    row(&["alpaca", "alpaca:instruct", "alpaca_instruct"], "alpaca", "alpaca", LossOn::Completion, ""),
    row(&["alpaca:chat", "alpaca_chat"], "alpaca", MODEL, LossOn::Completion,
        "writes `USER:` and `ASSISTANT:`, and the model's own chat template is used instead"),
    row(&["alpaca:chatml"], "alpaca", "chatml", LossOn::Completion, SYSTEM_TURN),
    row(&["alpaca:phi"], "alpaca", "phi3", LossOn::Completion, SYSTEM_TURN),
    row(&["alpaca_w_system"], "alpaca", MODEL, LossOn::Completion,
        "writes `### System:` and `### User:`, and the model's own chat template is used instead"),
    row(&["sharegpt", "chat_template"], "chat", "", LossOn::Assistant, ""),
    row(&["completion", "pretrain"], "text", "", LossOn::All, ""),
];

/// The meaning of a type; a style that is not listed has none.
fn row_type(kind: &str) -> Option<&'static RowType> {
    let of = |name: &str| ROW_TYPES.iter().find(|row| row.names.contains(&name));
    let loaded = kind.split('.').next().unwrap_or(kind);
    let base = loaded.split(':').next().unwrap_or(loaded);
    of(loaded).or_else(|| of(base).filter(|row| row.format != "alpaca"))
}

fn put_memory(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = fields.take("gpu_memory_limit") {
        match found.content {
            // A number is in gibibytes.
            Content::Number(gibibytes) => {
                draft.put("memory.budget", Value::Text(format!("{gibibytes}GiB")), &[&found])
            }
            _ => put_text(draft, "memory.budget", Some(found)),
        }
    }
    if let Some(group) = fields.take("fsdp_config").filter(Found::is_on).and_then(|found| found.group()) {
        put_fsdp(&group, draft);
        draft.leave_rest(&group);
    }
    // `offload` is checkpointing with the inputs offloaded to host memory.
    if let Some(found) = fields.take("gradient_checkpointing").filter(Found::is_on) {
        if matches!(found.content, Content::Text(mode) if mode.starts_with("offload")) {
            draft.put_with("memory.activations", word("host"), &[&found], PINNED);
        } else {
            draft.leave_out(&found, CHECKPOINTING);
        }
    }
    // A list without values has no effect.
    for name in ["fsdp", "special_tokens", "plugins"] {
        let is_empty = |content: &Content| matches!(content, Content::List(items) if items.iter().all(|item| item.content == Content::Null));
        let found = fields.take(name).filter(|found| !is_empty(found.content) && found.is_on());
        draft.leave_out_if_set(found, reason_for(name).why);
    }
}
