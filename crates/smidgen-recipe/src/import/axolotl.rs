//! An Axolotl configuration: LoRA, QLoRA and full fine-tuning on its types of datasets.
//!
//! Defaults are Axolotl's: one sample per micro-batch, one epoch, a cosine schedule, 512 tokens.
//! Not supported: preference training, multimodal models, and plugins with their own settings.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::{
    NamedColumns, NamedRows, OTHER_COLUMN, PartNames, TURN_FIELDS, put_columns, put_rows, put_split,
};
use super::deepspeed::{PINNED, follow_deepspeed, put_fsdp};
use super::document::{Content, Node};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::templates::{MODEL, put_template};
use super::trainer::{Saving, put_saving, refuse_quantized};
use super::vocabulary::{
    Quantization, StepSize, leave_per_epoch, put_batch, put_betas, put_compute, put_dtype, put_length,
    put_loss_on, put_max_memory, put_model, put_number, put_number_or, put_optimizer, put_packed,
    put_quantization, put_schedule, put_text, put_warmup, word,
};
use crate::reasons::{CHECKPOINTING, reason_for};
use crate::value::Value;
use crate::{LossOn, Schedule};
use smidgen_ir::words::ColumnRole;

const AXOLOTL: &str = "Axolotl";

pub fn read_axolotl(fields: &Fields<'_>, draft: &mut Draft) {
    put_model(draft, fields.take("base_model"), fields.take_any(&["revision_of_model", "model_revision"]));
    put_weights_and_adapter(fields, draft);
    put_template(draft, fields.take("chat_template"));
    draft.leave_out_if_set(
        fields.take("chat_template_jinja"),
        "an inline template; put it into a .jinja file and name it in `data.template`",
    );
    if let Some(found) = fields.take("datasets") {
        put_datasets(draft, &found, "data.train", fields.take("train_on_inputs"));
    } else if let Some(found) = fields.take("pretraining_dataset") {
        put_pretraining(draft, &found);
    }
    if let Some(found) = fields.take("test_datasets") {
        put_datasets(draft, &found, "data.eval", None);
    }
    put_split(draft, fields.take("val_set_size"));
    put_number_or(draft, "data.max_tokens", fields.take("sequence_len"), Value::Integer(512), AXOLOTL);
    if let Some((strategy, found)) = fields.take_text("excess_length_strategy") {
        let overflow = if strategy == "raise" { "error" } else { &strategy };
        draft.put("data.overflow", word(overflow), &[&found]);
    } else {
        // Documents are cut into pieces, and other long rows dropped.
        let is_text = draft.line("data.format").is_some_and(|line| line.toml == "\"text\"");
        draft.put_default("data.overflow", word(if is_text { "chunk" } else { "drop" }), AXOLOTL);
    }
    put_training(fields, draft);
    put_memory(fields, draft);
    put_text(draft, "output.dir", fields.take("output_dir"));
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

fn put_weights_and_adapter(fields: &Fields<'_>, draft: &mut Draft) {
    let (bf16, f16) = (fields.take("bf16"), fields.take("fp16"));
    put_compute(draft, bf16.as_ref(), f16.as_ref());
    for (name, precision) in [("bfloat16", "bf16"), ("float16", "f16")] {
        if let Some(found) = fields.take_on(name) {
            draft.put("model.compute", word(precision), &[&found]);
        }
    }
    put_dtype(draft, fields.take("torch_dtype"));
    let (four, eight) = (fields.take_on("load_in_4bit"), fields.take_on("load_in_8bit"));
    let (mut double, mut code) = (true, None);
    if let Some(group) = fields.take_group("bnb_config_kwargs") {
        if let Some(found) = group.take("bnb_4bit_use_double_quant") {
            double = found.boolean() != Some(false);
        }
        code = group.take("bnb_4bit_quant_type");
        draft.leave_rest(&group);
    }
    let quantization = Quantization { four_bits: four.as_ref(), eight_bits: eight.as_ref(), code, double };
    put_quantization(draft, quantization);

    if let Some(found) = fields.take("unfrozen_parameters").filter(Found::is_on) {
        found.mistake(format!(
            "`{}` trains the parameters that match; `adapter.kind = \"full\"` with `adapter.layers` and \
             `adapter.targets` trains some of the weights",
            found.key
        ));
    }
    let adapter = fields.take("adapter");
    let kind = adapter.as_ref().and_then(|found| found.text());
    let settings = AdapterSettings {
        rank: fields.take("lora_r"),
        default_rank: 8,
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(8.0),
        dropout: fields.take("lora_dropout"),
        targets: fields.take("lora_target_modules"),
        all_linear: &["all-linear"],
        saved: fields.take("lora_modules_to_save"),
        target_linear: fields.take("lora_target_linear"),
        layers: fields.take("peft_layers_to_transform"),
        dora: fields.take("peft_use_dora"),
        rslora: fields.take("peft_use_rslora"),
        start: fields.take("lora_model_dir"),
        init: fields.take("peft_init_lora_weights"),
        tool: "PEFT",
        ..AdapterSettings::default()
    };
    match (adapter, kind.as_deref()) {
        (Some(found), Some("lora" | "qlora")) => {
            if kind.as_deref() == Some("qlora") && four.is_none() {
                found.mistake("`adapter: qlora` needs `load_in_4bit: true`".to_owned());
            }
            put_adapter(draft, settings, &[&found]);
        }
        (Some(found), Some(other)) => {
            found.mistake(format!("`adapter: {other}` is not supported (supported: `lora`, `qlora`)"));
        }
        (Some(_), None) => {}
        (None, _) => {
            refuse_quantized(four.or(eight).as_ref());
            draft.put_default("adapter.kind", word("full"), AXOLOTL);
            draft.assume("no `adapter` is set, so Axolotl trains every weight, and so does the recipe");
        }
    }
}

/// A list of datasets, each with a path and a type.
fn put_datasets(draft: &mut Draft, found: &Found<'_>, key: &'static str, train_on_inputs: Option<Found<'_>>) {
    let Some(items) = found.items() else { return };
    let (mut rows, mut columns) = (Vec::new(), Vec::new());
    let mut types: Vec<(String, usize)> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let whole = found.inside(format!("{}.{index}", found.key), item.line, &item.content);
        let Some(group) = whole.group() else { continue };
        rows.extend(rows_of(&group, draft));
        let kind = group.take("type");
        if let Some(kind) = &kind
            && !matches!(kind.content, Content::Map(_))
        {
            types.extend(kind.text().map(|text| (text, kind.line)));
        }
        columns.push(columns_of(&group, kind.as_ref(), draft));
        put_template(draft, group.take("chat_template").filter(|_| key == "data.train"));
        group.skip(&["ds_type"]);
        take_usual_turns(&group);
        if let Some(roles) = group.take("roles_to_train")
            && roles.words().is_some_and(|roles| roles != ["assistant"])
        {
            draft.leave_out(&roles, "the loss is on assistant turns");
        }
        for rest in group.rest() {
            let why = match rest.name() {
                name if name.starts_with("field") => OTHER_COLUMN.to_owned(),
                name if name.starts_with("message_") => TURN_FIELDS.to_owned(),
                "split" | "name" | "revision" => {
                    "selects a part of a hub dataset; a file has none".to_owned()
                }
                "shards" => "selects a part of a dataset; `data.limit` uses the first rows".to_owned(),
                name => reason_for(name).why,
            };
            draft.leave_out(&rest, why);
        }
    }
    put_rows(draft, key, &rows, found);
    put_columns(draft, key, &columns);
    if key == "data.train" {
        put_row_type(draft, found, &types, train_on_inputs);
    }
}

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
    for rest in own.rest().iter().filter(|rest| rest.is_on()) {
        let is_column = rest.name().starts_with("field");
        draft.leave_out(
            rest,
            if is_column { OTHER_COLUMN } else { "`data.template` formats the prompt; results will differ" },
        );
    }
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

const PARTS: PartNames = PartNames { config: &["name"], split: "split", revision: "revision" };

fn rows_of(group: &Fields<'_>, draft: &mut Draft) -> Vec<NamedRows> {
    let path = group.take("path").and_then(|found| found.text());
    match group.take("data_files") {
        Some(found) => found.words().unwrap_or_default().into_iter().map(NamedRows::of).collect(),
        None => path.into_iter().map(|path| NamedRows::of(path).with_parts(group, &PARTS, draft)).collect(),
    }
}

fn put_row_type(
    draft: &mut Draft,
    datasets: &Found<'_>,
    types: &[(String, usize)],
    train_on_inputs: Option<Found<'_>>,
) {
    let on_inputs = train_on_inputs.as_ref().filter(|found| found.boolean() == Some(true));
    let kinds: Vec<Option<&RowType>> = types.iter().map(|(kind, _)| row_type(kind)).collect();
    let Some((first, rest)) = kinds.split_first() else { return };
    let (name, line) = &types[0];
    let from = datasets.inside(format!("{}.0.type", datasets.key), *line, datasets.content);
    if let Some((name, line)) = types.iter().find(|(kind, _)| kind == "input_output") {
        return mistakes_at(
            &from,
            *line,
            format!("`{name}` rows are not supported; write `input_ids` and `labels`"),
        );
    }
    let is_first = |kind: &&Option<&RowType>| match (kind, first) {
        (Some(kind), Some(first)) => kind.format == first.format && kind.template == first.template,
        (None, None) => true,
        _ => false,
    };
    if !rest.iter().all(|kind| is_first(&kind)) {
        return draft
            .assume("the datasets have several types; the format of each file is detected from its columns");
    }
    let Some(RowType { format, template, loss_on, why, .. }) = first else {
        draft.leave_out(&from, format!("`{name}` has a prompt of its own; {OWN_PROMPT}"));
        return draft.assume(format!(
            "the format of `{name}` rows is detected from their columns (check with `smidgen preview`)"
        ));
    };
    draft.put("data.format", word(format), &[&from]);
    if !template.is_empty() {
        draft.put("data.template", word(template), &[&from]);
    }
    if !why.is_empty() {
        draft.leave_out(&from, format!("`{name}` {why}; {OWN_PROMPT}"));
    }
    match on_inputs {
        Some(found) => put_loss_on(draft, LossOn::All, &[found]),
        None => put_loss_on(draft, *loss_on, &[&from]),
    }
}

fn mistakes_at(found: &Found<'_>, line: usize, message: String) {
    found.inside(found.key.clone(), line, found.content).mistake(message);
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

const ROW_TYPES: &[RowType] = &[
    RowType {
        names: &["alpaca", "alpaca:instruct", "alpaca_instruct"],
        format: "alpaca",
        template: "alpaca",
        loss_on: LossOn::Completion,
        why: "",
    },
    RowType {
        names: &["alpaca:chat", "alpaca_chat"],
        format: "alpaca",
        template: MODEL,
        loss_on: LossOn::Completion,
        why: "writes `USER:` and `ASSISTANT:`, and the model's own chat template is used instead",
    },
    RowType {
        names: &["alpaca:chatml"],
        format: "alpaca",
        template: "chatml",
        loss_on: LossOn::Completion,
        why: "begins with a system turn, which is left out",
    },
    RowType {
        names: &["alpaca:phi"],
        format: "alpaca",
        template: "phi3",
        loss_on: LossOn::Completion,
        why: "begins with a system turn, which is left out",
    },
    RowType {
        names: &["alpaca_w_system"],
        format: "alpaca",
        template: MODEL,
        loss_on: LossOn::Completion,
        why: "writes `### System:` and `### User:`, and the model's own chat template is used instead",
    },
    RowType {
        names: &["sharegpt", "chat_template"],
        format: "chat",
        template: "",
        loss_on: LossOn::Assistant,
        why: "",
    },
    RowType {
        names: &["completion", "pretrain"],
        format: "text",
        template: "",
        loss_on: LossOn::All,
        why: "",
    },
];

/// The meaning of a type; a style that is not listed has none.
fn row_type(kind: &str) -> Option<&'static RowType> {
    let of = |name: &str| ROW_TYPES.iter().find(|row| row.names.contains(&name));
    let loaded = kind.split('.').next().unwrap_or(kind);
    let base = loaded.split(':').next().unwrap_or(loaded);
    of(loaded).or_else(|| of(base).filter(|row| row.format != "alpaca"))
}

fn put_training(fields: &Fields<'_>, draft: &mut Draft) {
    let (micro, accumulation) = (fields.take("micro_batch_size"), fields.take("gradient_accumulation_steps"));
    if let Some(found) = fields.take("batch_size") {
        put_number(draft, "train.batch", Some(found));
        for part in [&micro, &accumulation].into_iter().flatten() {
            draft.leave_out(
                part,
                "`batch_size` sets the samples per step; the solver chooses how it is split",
            );
        }
    } else {
        let size = StepSize {
            micro: micro.as_ref(),
            default_micro: 1,
            accumulation: accumulation.as_ref(),
            tool: AXOLOTL,
        };
        put_batch(draft, &size);
    }
    put_packed(draft, fields.take_on("sample_packing"));
    put_length(draft, fields.take("max_steps"), fields.take("num_epochs"), (1.0, AXOLOTL));
    match fields.take("learning_rate") {
        Some(found) => put_number(draft, "train.lr", Some(found)),
        None => draft.assume("no `learning_rate` is set; assuming 2e-4 (`train.lr`)"),
    }
    let counts = put_schedule(draft, fields.take("lr_scheduler"), Schedule::Cosine, AXOLOTL);
    for name in ["lr_scheduler_kwargs", "cosine_min_lr_ratio"] {
        draft.leave_out_if_set(fields.take(name), "the learning rate decays to 0");
    }
    put_warmup(draft, fields.take("warmup_steps"), fields.take("warmup_ratio"), counts, (0.03, AXOLOTL));
    put_optimizer(draft, fields.take("optimizer"));
    put_number(draft, "train.weight_decay", fields.take("weight_decay"));
    put_betas(draft, fields.take("adam_beta1"), fields.take("adam_beta2"));
    put_number(draft, "train.eps", fields.take("adam_epsilon"));
    put_number(draft, "train.clip", fields.take("max_grad_norm"));
    put_number(draft, "train.seed", fields.take("seed"));
    put_number(draft, "train.log_every", fields.take("logging_steps"));
    let save_default = !fields.has("saves_per_epoch");
    for (name, key) in [("saves_per_epoch", "train.save_every"), ("evals_per_epoch", "train.eval_every")] {
        let times = fields.take(name).and_then(|found| Some((found.number()?, found)));
        if let Some((times, found)) = times {
            leave_per_epoch(draft, key, Some(found), times);
        }
    }
    put_saving(fields, draft, Saving { tool: AXOLOTL, save_default, eval_needs_strategy: false });
}

fn put_memory(fields: &Fields<'_>, draft: &mut Draft) {
    put_max_memory(draft, fields.take("max_memory"));
    if let Some(found) = fields.take("gpu_memory_limit") {
        match found.content {
            // A number is in gibibytes.
            Content::Number(gibibytes) => {
                draft.put("memory.budget", Value::Text(format!("{gibibytes}GiB")), &[&found])
            }
            _ => put_text(draft, "memory.budget", Some(found)),
        }
    }
    if let Some(found) = fields.take("deepspeed").filter(Found::is_on) {
        follow_deepspeed(draft, &found);
    }
    if let Some(group) = fields.take("fsdp_config").filter(Found::is_on).and_then(|found| found.group()) {
        put_fsdp(&group, draft);
        draft.leave_rest(&group);
    }
    // `offload` is checkpointing with the inputs offloaded to host memory.
    if let Some(found) = fields.take("gradient_checkpointing") {
        let offloads = matches!(found.content, Content::Text(mode) if mode.starts_with("offload"));
        match offloads {
            true => draft.put_with("memory.activations", word("host"), &[&found], PINNED),
            false if found.is_on() => draft.leave_out(&found, CHECKPOINTING),
            false => {}
        }
    }
    if let Some(found) = fields.take("activation_offloading").filter(Found::is_on) {
        draft.put_with("memory.activations", word("host"), &[&found], PINNED);
    }
    // An empty list has no effect.
    for name in ["fsdp", "special_tokens", "plugins"] {
        let is_empty = |content: &Content| matches!(content, Content::List(items) if items.iter().all(|Node { content, .. }| *content == Content::Null));
        draft.leave_out_if_set(
            fields.take(name).filter(|found| !is_empty(found.content) && found.is_on()),
            reason_for(name).why,
        );
    }
}
