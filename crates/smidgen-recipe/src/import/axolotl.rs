//! An Axolotl configuration: LoRA, QLoRA and full fine-tuning of its kinds of datasets.
//!
//! Defaults are those of Axolotl: one sample a micro-batch, one epoch, a cosine, 512 tokens.
//! Left out: preference training, multimodal models, and plugins with settings of their own.

use super::adapters::{AdapterWords, put_adapter};
use super::deepspeed::PINNED;
use super::document::{Content, Node};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::reasons::{CHECKPOINTING, reason_for};
use super::trainer::{Saving, leave_deepspeed, put_full, put_saving};
use super::vocabulary::{
    Quantization, StepSize, put_batch, put_betas, put_compute, put_dtype, put_files, put_length, put_loss_on,
    put_model, put_number, put_optimizer, put_quantization, put_schedule, put_template, put_warmup, word,
};
use crate::value::Value;
use crate::{LossOn, Schedule};

const AXOLOTL: &str = "Axolotl";

pub fn read_axolotl(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = fields.take("rl").filter(Found::is_on) {
        draft.mistake(
            found.line,
            format!("`{}` is {}: only supervised fine-tuning is there", found.key, found.content.describe()),
        );
    }
    put_model(draft, fields.take("base_model"), fields.take_any(&["revision_of_model", "model_revision"]));
    put_weights_and_adapter(fields, draft);
    put_template(draft, fields.take("chat_template"));
    if let Some(found) = fields.take("chat_template_jinja") {
        draft.leave_out(
            &found,
            "a template in the file itself: put it into a .jinja file and name it in `data.template`",
        );
    }
    if let Some(found) = fields.take("datasets") {
        put_datasets(draft, &found, "data.train", fields.take("train_on_inputs"));
    } else if let Some(found) = fields.take("pretraining_dataset") {
        draft.put("data.format", word("text"), &[&found]);
        put_loss_on(draft, LossOn::All, &[&found]);
        draft.want("data.train", "a file with a column `text`");
    }
    if let Some(found) = fields.take("test_datasets") {
        put_datasets(draft, &found, "data.eval", None);
    }
    match fields.take("sequence_len") {
        Some(found) => put_number(draft, "data.max_tokens", Some(found)),
        None => draft.put_default("data.max_tokens", Value::Integer(512), AXOLOTL),
    }
    if let Some(found) = fields.take("excess_length_strategy")
        && let Some(way) = found.text(draft)
    {
        let way = if way == "raise" { "error" } else { &way };
        draft.put("data.overflow", word(way), &[&found]);
    } else {
        draft.put_default("data.overflow", word("drop"), AXOLOTL);
    }
    put_training(fields, draft);
    put_memory(fields, draft);
    if let Some(found) = fields.take("output_dir")
        && let Some(folder) = found.text(draft)
    {
        draft.put("output.dir", Value::Text(folder), &[&found]);
    }
}

fn put_weights_and_adapter(fields: &Fields<'_>, draft: &mut Draft) {
    let (bf16, f16) = (fields.take("bf16"), fields.take("fp16"));
    put_compute(draft, bf16.as_ref(), f16.as_ref());
    for (name, precision) in [("bfloat16", "bf16"), ("float16", "f16")] {
        if let Some(found) = fields.take(name)
            && found.boolean(draft) == Some(true)
        {
            draft.put("model.compute", word(precision), &[&found]);
        }
    }
    put_dtype(draft, fields.take("torch_dtype"));
    let switch =
        |name: &str, draft: &mut Draft| fields.take(name).filter(|found| found.boolean(draft) == Some(true));
    let (four, eight) = (switch("load_in_4bit", draft), switch("load_in_8bit", draft));
    let (mut double, mut code) = (true, None);
    if let Some(group) = fields.take_group("bnb_config_kwargs", draft) {
        if let Some(found) = group.take("bnb_4bit_use_double_quant") {
            double = found.boolean(draft) != Some(false);
        }
        code = group.take("bnb_4bit_quant_type");
        draft.leave_rest(&group);
    }
    let quantization = Quantization { four_bits: four.as_ref(), eight_bits: eight.as_ref(), code, double };
    put_quantization(draft, quantization);

    let adapter = fields.take("adapter");
    let kind = adapter.as_ref().and_then(|found| found.text(draft));
    let words = AdapterWords {
        rank: fields.take("lora_r"),
        default_rank: 8,
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(8.0),
        dropout: fields.take("lora_dropout"),
        targets: fields.take("lora_target_modules"),
        all_linear: &["all-linear"],
        target_linear: fields.take("lora_target_linear"),
        layers: fields.take("peft_layers_to_transform"),
        dora: fields.take("peft_use_dora"),
        rslora: fields.take("peft_use_rslora"),
        start: fields.take("lora_model_dir"),
        init: fields.take("peft_init_lora_weights"),
        tool: "PEFT",
        ..AdapterWords::default()
    };
    match (adapter, kind.as_deref()) {
        (Some(found), Some("lora" | "qlora")) => {
            if kind.as_deref() == Some("qlora") && four.is_none() {
                draft.mistake(found.line, "`adapter: qlora` needs `load_in_4bit: true`".to_owned());
            }
            put_adapter(draft, words, &[&found]);
        }
        (Some(found), Some(other)) => {
            draft.mistake(found.line, format!("`adapter: {other}` is not there: `lora` and `qlora` are"));
        }
        (Some(_), None) => {}
        (None, _) => {
            put_full(draft, &[], four.or(eight).as_ref());
            draft.put_default("adapter.kind", word("full"), AXOLOTL);
            draft
                .assume("no `adapter` is given, so that Axolotl trains every weight, and so does the recipe");
        }
    }
}

/// One list of datasets; each has a path and a type.
fn put_datasets(draft: &mut Draft, found: &Found<'_>, key: &'static str, train_on_inputs: Option<Found<'_>>) {
    let Some(items) = found.items(draft) else { return };
    let mut names = Vec::new();
    let mut types: Vec<(String, usize)> = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let whole = Found { key: format!("{}.{index}", found.key), line: item.line, content: &item.content };
        let Some(group) = whole.group(draft) else { continue };
        names.extend(file_names(&group, draft));
        match group.take("type") {
            Some(kind) if matches!(kind.content, Content::Map(_)) => {
                draft.leave_out(
                    &kind,
                    "fields are known by their names: rename them (`smidgen preview` shows rows)",
                );
            }
            Some(kind) => types.extend(kind.text(draft).map(|text| (text, kind.line))),
            None => {}
        }
        put_template(draft, group.take("chat_template").filter(|_| key == "data.train"));
        let _ = group.take("ds_type");
        take_usual_names(&group);
        if let Some(roles) = group.take("roles_to_train")
            && roles.words(draft).is_some_and(|roles| roles != ["assistant"])
        {
            draft.leave_out(&roles, "the loss is on turns of the assistant");
        }
        for rest in group.rest() {
            let why = match rest.name() {
                name if name.starts_with("field") || name.starts_with("message_") => {
                    "fields are known by their names: rename them (`smidgen preview` shows rows)".to_owned()
                }
                "split" | "name" | "revision" | "shards" => {
                    "names a part of a hub's dataset: a recipe names files".to_owned()
                }
                name => reason_for(name).why,
            };
            draft.leave_out(&rest, why);
        }
    }
    put_files(draft, key, &names, found);
    if key == "data.train" {
        put_row_type(draft, found, &types, train_on_inputs);
    }
}

/// Names of fields that rows of conversations are known by need no word.
fn take_usual_names(group: &Fields<'_>) {
    let is_usual = |content: &Content| {
        let usual = ["messages", "conversations", "conversation", "role", "content", "from", "value"];
        matches!(content, Content::Text(name) if usual.contains(&name.as_str()))
    };
    let all_usual = |content: &Content| match content {
        Content::Map(entries) => entries.iter().all(|entry| is_usual(&entry.value.content)),
        content => is_usual(content),
    };
    for name in ["field_messages", "message_field_role", "message_field_content", "message_property_mappings"]
    {
        if group.get(name).is_some_and(all_usual) {
            let _ = group.take(name);
        }
    }
}

fn file_names(group: &Fields<'_>, draft: &mut Draft) -> Vec<String> {
    let path = group.take("path").and_then(|found| found.text(draft));
    match group.take("data_files") {
        Some(found) => found.words(draft).unwrap_or_default(),
        None => path.into_iter().collect(),
    }
}

fn put_row_type(
    draft: &mut Draft,
    datasets: &Found<'_>,
    types: &[(String, usize)],
    train_on_inputs: Option<Found<'_>>,
) {
    let on_inputs = train_on_inputs.as_ref().filter(|found| found.boolean(draft) == Some(true));
    let kinds: Vec<&str> =
        types.iter().map(|(kind, _)| kind.split(['.', ':']).next().unwrap_or(kind)).collect();
    let Some((first, rest)) = kinds.split_first() else { return };
    let line = types[0].1;
    let from = Found { key: format!("{}.0.type", datasets.key), line, content: datasets.content };
    if rest.iter().any(|kind| kind != first) {
        return draft.assume("the datasets have several types: each file's rows are told by their columns");
    }
    let (format, loss_on) = match *first {
        "alpaca" | "alpaca_chat" | "alpaca_w_system" => ("alpaca", LossOn::Completion),
        "sharegpt" | "chat_template" => ("chat", LossOn::Assistant),
        "completion" | "pretrain" => ("text", LossOn::All),
        "input_output" => {
            return draft.mistake(
                line,
                "rows of `input_output` have no counterpart: write `input_ids` and `labels`".to_owned(),
            );
        }
        other => {
            draft.assume(format!(
                "rows of type `{other}` are told by their columns (`smidgen preview` shows them)"
            ));
            return;
        }
    };
    draft.put("data.format", word(format), &[&from]);
    if *first == "alpaca" && !draft.has("data.template") {
        draft.put("data.template", word("alpaca"), &[&from]);
    }
    match on_inputs {
        Some(found) => put_loss_on(draft, LossOn::All, &[found]),
        None => put_loss_on(draft, loss_on, &[&from]),
    }
}

fn put_training(fields: &Fields<'_>, draft: &mut Draft) {
    let (micro, accumulation) = (fields.take("micro_batch_size"), fields.take("gradient_accumulation_steps"));
    if let Some(found) = fields.take("batch_size") {
        put_number(draft, "train.batch", Some(found));
        for part in [&micro, &accumulation].into_iter().flatten() {
            draft.leave_out(
                part,
                "`batch_size` says what a step takes in; how it is split is the solver's choice",
            );
        }
    } else {
        let size = StepSize {
            micro: micro.as_ref(),
            default_micro: 1,
            accumulation: accumulation.as_ref(),
            world: None,
            tool: AXOLOTL,
        };
        put_batch(draft, &size);
    }
    put_length(draft, fields.take("max_steps"), fields.take("num_epochs"), (1.0, AXOLOTL));
    match fields.take("learning_rate") {
        Some(found) => put_number(draft, "train.lr", Some(found)),
        None => draft.assume("no `learning_rate` is given: 2e-4 (`train.lr`)"),
    }
    let counts = put_schedule(draft, fields.take("lr_scheduler"), Schedule::Cosine, AXOLOTL);
    for name in ["lr_scheduler_kwargs", "cosine_min_lr_ratio"] {
        if let Some(found) = fields.take(name) {
            draft.leave_out(&found, "the learning rate falls to 0");
        }
    }
    put_warmup(draft, fields.take("warmup_steps"), fields.take("warmup_ratio"), counts, (0.03, AXOLOTL));
    put_optimizer(draft, fields.take("optimizer"));
    put_number(draft, "train.weight_decay", fields.take("weight_decay"));
    put_betas(draft, fields.take("adam_beta1"), fields.take("adam_beta2"));
    put_number(draft, "train.eps", fields.take("adam_epsilon"));
    put_number(draft, "train.clip", fields.take("max_grad_norm"));
    put_number(draft, "train.seed", fields.take("seed"));
    put_number(draft, "train.log_every", fields.take("logging_steps"));
    for (name, key) in [("saves_per_epoch", "train.save_every"), ("evals_per_epoch", "train.eval_every")] {
        if let Some(found) = fields.take(name) {
            draft.leave_out(
                &found,
                format!("how many steps an epoch has is known with the data: `{key}` takes steps"),
            );
        }
    }
    let save_default = !fields.has("saves_per_epoch");
    put_saving(fields, draft, Saving { tool: AXOLOTL, save_default, eval_needs_strategy: false });
}

fn put_memory(fields: &Fields<'_>, draft: &mut Draft) {
    if let Some(found) = fields.take("gpu_memory_limit") {
        match found.content {
            // A number is of gibibytes.
            Content::Number(gibibytes) => {
                draft.put("memory.budget", Value::Text(format!("{gibibytes}GiB")), &[&found])
            }
            _ => {
                if let Some(text) = found.text(draft) {
                    draft.put("memory.budget", Value::Text(text), &[&found]);
                }
            }
        }
    }
    if let Some(found) = fields.take("deepspeed").filter(Found::is_on) {
        leave_deepspeed(draft, &found);
    }
    if let Some(group) = fields.take("fsdp_config").filter(Found::is_on).and_then(|found| found.group(draft))
    {
        if let Some(found) = group.take_any(&["offload_params", "fsdp_offload_params"])
            && found.boolean(draft) == Some(true)
        {
            draft.put_with("memory.weights", word("host"), &[&found], PINNED);
            draft.put_with("memory.optimizer_state", word("host"), &[&found], PINNED);
        }
        draft.leave_rest(&group);
    }
    // `offload` is checkpointing whose inputs wait in host memory.
    if let Some(found) = fields.take("gradient_checkpointing") {
        let offloads = matches!(found.content, Content::Text(way) if way.starts_with("offload"));
        match offloads {
            true => draft.put_with("memory.activations", word("host"), &[&found], PINNED),
            false if found.is_on() => draft.leave_out(&found, CHECKPOINTING),
            false => {}
        }
    }
    if let Some(found) = fields.take("activation_offloading").filter(Found::is_on) {
        draft.put_with("memory.activations", word("host"), &[&found], PINNED);
    }
    // An empty list says nothing.
    for name in ["fsdp", "special_tokens", "plugins"] {
        let is_empty = |content: &Content| matches!(content, Content::List(items) if items.iter().all(|Node { content, .. }| *content == Content::Null));
        if fields.has(name)
            && fields.take(name).is_some_and(|found| !is_empty(found.content) && found.is_on())
        {
            let found = fields.take(name).expect("it is there");
            draft.leave_out(&found, reason_for(name).why);
        }
    }
}
