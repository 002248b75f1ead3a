//! A configuration of LLaMA-Factory's version 1, whose settings have other names than those of version 0.
//!
//! Adapter, quantization, optimizer and sharding are groups with a `name`; without `peft_config` every weight is
//! trained. The batch is `global_batch_size`, or one micro-batch; a rate without a schedule is constant.
//! Not supported: sampling, merging and evaluation, which such files also configure; they are refused.

use super::adapters::{AdapterSettings, put_adapter};
use super::datasets::put_files;
use super::deepspeed::follow_deepspeed;
use super::document::{Content, Entry};
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::llama_factory::put_trained_layers;
use super::trainer::put_full;
use super::vocabulary::{
    ONE_DEVICE, Quantization, leave_per_epoch, put_compute, put_length, put_model, put_number, put_number_or,
    put_optimizer_named, put_quantization, put_text, word,
};
use crate::value::Value;

const TOOL: &str = "LLaMA-Factory";

/// Keys of version 1 that nothing else has.
const V1_KEYS: &[&str] = &["model_class", "kernel_config", "dist_config", "sample_backend", "init_config"];

/// Whether the file is one of version 1.
pub fn is_v1(entries: &[Entry]) -> bool {
    entries.iter().any(|entry| shows_v1(entry) || entry.name == "train_dataset")
}

/// Whether this entry alone shows version 1: one of its keys, or its group for the adapter.
pub fn shows_v1(entry: &Entry) -> bool {
    let is_named = |inside: &[Entry]| inside.iter().any(|inner| inner.name == "name");
    match &entry.value.content {
        Content::Map(inside) if entry.name == "peft_config" => is_named(inside),
        _ => V1_KEYS.contains(&entry.name.as_str()),
    }
}

pub fn read_llama_factory_v1(fields: &Fields<'_>, draft: &mut Draft) {
    let trained = ["train_dataset", "max_steps", "num_train_epochs", "learning_rate"];
    if !fields.has_any(&trained)
        && let Some(found) = fields.take("model")
    {
        return found.mistake(format!(
            "there is no `train_dataset` next to `{}`: this configuration does not train",
            found.key
        ));
    }
    put_model(draft, fields.take("model"), None);
    put_weights(fields, draft);
    if let Some(found) = fields.take("train_dataset")
        && let Some(names) = found.words()
    {
        match names.iter().any(|name| name.ends_with(".yaml") || name.ends_with(".yml")) {
            true => {
                let listed = names.join("`, `");
                draft.want("data.train", format!("the files that `{listed}` lists"));
                draft.leave_out(&found, "a list of data sets; `data.train` takes the files themselves");
            }
            false => put_files(draft, "data.train", &names, &found),
        }
    }
    put_number_or(draft, "data.max_tokens", fields.take("cutoff_len"), Value::Integer(2048), TOOL);
    put_steps(fields, draft);
    put_optimizer_group(fields, draft);
    put_saving(fields, draft);
    put_text(draft, "output.dir", fields.take("output_dir"));
    if let Some(group) = fields.take_group("dist_config") {
        if let Some(found) = group.take("config_file") {
            follow_deepspeed(draft, &found);
        }
        group.skip(&["name", "dcp_path"]);
        draft.leave_rest(&group);
    }
    if let Some(group) = fields.take_group("kernel_config") {
        group.skip(&["name", "include_kernels"]);
        draft.leave_rest(&group);
    }
    // These choose classes, and settings of answers that version 1 samples after training.
    fields.skip(&["model_class", "init_config", "sample_backend", "max_new_tokens"]);
}

fn put_weights(fields: &Fields<'_>, draft: &mut Draft) {
    let quantization = fields.take_group("quant_config");
    let bits = quantization.as_ref().and_then(|group| group.take("quantization_bit"));
    let number = bits.as_ref().and_then(|found| found.number());
    if let (Some(found), Some(bits)) = (&bits, number.filter(|bits| ![4.0, 8.0].contains(bits))) {
        found.mistake(format!("`{}` is {bits}; only 4 and 8 bits are supported", found.key));
    }
    let of = |wanted: f64| bits.as_ref().filter(|_| number == Some(wanted));
    put_quantization(
        draft,
        Quantization { four_bits: of(4.0), eight_bits: of(8.0), code: None, double: true },
    );
    let Some(whole) = fields.take("peft_config") else {
        if let Some(found) = &bits {
            found.mistake(format!("`{}` freezes the weights, but every weight is to be trained", found.key));
        }
        draft.put_default("adapter.kind", word("full"), TOOL);
        return draft.assume("no `peft_config` is set, so LLaMA-Factory trains every weight");
    };
    let Some(group) = whole.group() else { return };
    let name = group.take("name");
    match (name.as_ref().and_then(|found| found.text()).as_deref(), &name) {
        (Some("lora") | None, name) => put_lora(&group, draft, name.as_ref().unwrap_or(&whole)),
        (Some("freeze"), Some(found)) => {
            put_full(draft, &[found], bits.as_ref());
            put_trained_layers(&group, draft);
        }
        (Some(other), Some(found)) => {
            found.mistake(format!("`{}` must be `lora` or `freeze`, got `{other}`", found.key));
        }
        (Some(_), None) => {}
    }
    draft.leave_rest(&group);
}

fn put_lora(group: &Fields<'_>, draft: &mut Draft, from: &Found<'_>) {
    let settings = AdapterSettings {
        rank: group.take("r"),
        default_rank: 8,
        alpha: group.take("lora_alpha"),
        default_alpha: Some(16.0),
        dropout: group.take("lora_dropout"),
        default_dropout: 0.05,
        targets: group.take("target_modules"),
        all_linear: &["all", "all-linear"],
        all_by_default: true,
        saved: group.take("modules_to_save"),
        dora: group.take("use_dora"),
        rslora: group.take("use_rslora"),
        start: group.take("adapter_name_or_path"),
        tool: TOOL,
        ..AdapterSettings::default()
    };
    put_adapter(draft, settings, &[from]);
}

fn put_steps(fields: &Fields<'_>, draft: &mut Draft) {
    let (whole, micro) = (fields.take("global_batch_size"), fields.take("micro_batch_size"));
    match (&whole, micro) {
        (Some(found), micro) => {
            put_number(draft, "train.batch", Some(found.clone()));
            draft.leave_out_if_set(micro, crate::reasons::SPLIT);
        }
        (None, micro) => {
            put_number_or(draft, "train.batch", micro, Value::Integer(1), TOOL);
            draft.assume(ONE_DEVICE);
        }
    }
    put_length(draft, fields.take("max_steps"), fields.take("num_train_epochs"), (3.0, TOOL));
    put_number_or(draft, "train.lr", fields.take("learning_rate"), Value::Float(1e-4), TOOL);
    put_number(draft, "train.clip", fields.take("max_grad_norm"));
    put_number(draft, "train.seed", fields.take("seed"));
    put_number(draft, "train.log_every", fields.take("logging_steps"));
    match fields.take("bf16") {
        Some(found) if found.boolean() == Some(false) => {
            draft.put("model.compute", word("f32"), &[&found]);
        }
        found => put_compute(draft, found.as_ref(), None),
    }
}

fn put_optimizer_group(fields: &Fields<'_>, draft: &mut Draft) {
    match fields.take_group("optim_config") {
        Some(group) => {
            if let Some((name, found)) = group.take_text("name") {
                put_optimizer_named(draft, &found, &name);
            }
            put_number(draft, "train.weight_decay", group.take_any(&["wd", "weight_decay"]));
            draft.leave_rest(&group);
        }
        // The default of PyTorch's AdamW.
        None => draft.put_default("train.weight_decay", Value::Float(0.01), TOOL),
    }
    match fields.take_group("lr_scheduler_config") {
        Some(group) => {
            let ratio = group.take("warmup_ratio").or_else(|| group.take("warmup_steps"));
            super::vocabulary::put_schedule(draft, group.take("name"), crate::Schedule::Constant, TOOL);
            put_number_or(draft, "train.warmup", ratio, Value::Integer(0), TOOL);
            draft.leave_rest(&group);
        }
        None => {
            draft.put_default("train.schedule", word("constant"), TOOL);
            draft.put_default("train.warmup", Value::Integer(0), TOOL);
        }
    }
}

fn put_saving(fields: &Fields<'_>, draft: &mut Draft) {
    put_number_or(draft, "train.save_every", fields.take("save_steps"), Value::Integer(0), TOOL);
    if let Some((epochs, found)) = fields.take("save_epochs").and_then(|found| Some((found.number()?, found)))
        && epochs > 0.0
    {
        leave_per_epoch(draft, "train.save_every", Some(found), 1.0 / epochs);
    }
    put_number(draft, "train.keep", fields.take("save_total_limit"));
}
