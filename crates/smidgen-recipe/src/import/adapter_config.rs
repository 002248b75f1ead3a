//! PEFT's `adapter_config.json`: the adapter of a run, and nothing else of that run.
//!
//! Left out: adapters other than the kinds of LoRA, and the tensors next to the file (`adapter.init` starts from them).

use super::adapters::{AdapterWords, put_adapter};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::vocabulary::put_model;
use crate::value::Value;

pub fn read_adapter_config(fields: &Fields<'_>, draft: &mut Draft) {
    let kind = fields.take("peft_type");
    if let Some(found) = &kind
        && let Some(name) = found.text()
        && !name.eq_ignore_ascii_case("lora")
    {
        found.mistake(format!("`peft_type` is {name:?}; only LoRA adapters are supported"));
    }
    put_model(draft, fields.take("base_model_name_or_path"), fields.take("revision"));
    let words = AdapterWords {
        rank: fields.take("r"),
        default_rank: 8,
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(8.0),
        dropout: fields.take("lora_dropout"),
        targets: fields.take("target_modules"),
        all_linear: &["all-linear"],
        layers: fields.take("layers_to_transform"),
        dora: fields.take("use_dora"),
        rslora: fields.take("use_rslora"),
        bias: fields.take("bias"),
        init: fields.take("init_lora_weights"),
        tool: "PEFT",
        ..AdapterWords::default()
    };
    put_adapter(draft, words, &kind.iter().collect::<Vec<_>>());
    put_pattern(draft, "adapter.rank_pattern", fields.take("rank_pattern"));
    put_pattern(draft, "adapter.alpha_pattern", fields.take("alpha_pattern"));
    draft.assume(
        "an adapter's config says nothing about training; batch, learning rate and length have the recipe's defaults",
    );
    draft
        .assume("training does not start from the tensors next to the file; `adapter.init=FOLDER` does that");
}

fn put_pattern(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Content::Map(entries) = found.content else {
        return found.mistake(format!("`{}` must be a group of patterns", found.key));
    };
    let value = |content: &Content| match content {
        Content::Number(digits) => match (digits.parse(), digits.parse()) {
            (Ok(whole), _) => Value::Integer(whole),
            (_, Ok(number)) => Value::Float(number),
            _ => Value::Foreign(digits.clone()),
        },
        other => Value::Foreign(other.describe()),
    };
    let table = entries.iter().map(|entry| (entry.name.clone(), value(&entry.value.content)));
    if !entries.is_empty() {
        draft.put(key, Value::Table(table.collect()), &[&found]);
    }
}
