//! PEFT's `adapter_config.json`, which describes the adapter of a run and nothing else of it.
//!
//! Not supported: adapters other than the kinds of LoRA. The tensors next to the file are not imported; `adapter.init`
//! starts from them.

use super::adapters::{AdapterSettings, put_adapter};
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::trainer::NO_TRAINING;
use super::vocabulary::{put_model, put_number, word};
use crate::value::Value;

pub fn read_adapter_config(fields: &Fields<'_>, draft: &mut Draft) {
    let kind = fields.take("peft_type");
    let name = kind.as_ref().and_then(|found| found.text()).unwrap_or_default().to_uppercase();
    if let Some(found) = &kind
        && !["LORA", "LSLORA"].contains(&name.as_str())
    {
        found.mistake(format!("`peft_type` is {name:?}; only `LORA` and `LSLORA` adapters are supported"));
    }
    put_model(draft, fields.take("base_model_name_or_path"), fields.take("revision"));
    let settings = AdapterSettings {
        rank: fields.take("r"),
        default_rank: 8,
        alpha: fields.take("lora_alpha"),
        default_alpha: Some(8.0),
        dropout: fields.take("lora_dropout"),
        targets: fields.take("target_modules"),
        all_linear: &["all-linear"],
        saved: fields.take("modules_to_save"),
        layers: fields.take("layers_to_transform"),
        dora: fields.take("use_dora"),
        rslora: fields.take("use_rslora"),
        bias: fields.take("bias"),
        init: fields.take("init_lora_weights"),
        tool: "PEFT",
        ..AdapterSettings::default()
    };
    put_adapter(draft, settings, &kind.iter().collect::<Vec<_>>());
    if let Some(found) = kind.as_ref().filter(|_| name == "LSLORA") {
        put_fourier(fields, draft, found);
    }
    put_pattern(draft, "adapter.rank_pattern", fields.take("rank_pattern"));
    put_pattern(draft, "adapter.alpha_pattern", fields.take("alpha_pattern"));
    draft.assume(NO_TRAINING);
    draft
        .assume("training does not start from the tensors next to the file; `adapter.init=FOLDER` does that");
}

/// The settings of LS-LoRA, which applies a Fourier function to the adapter's output.
fn put_fourier(fields: &Fields<'_>, draft: &mut Draft, kind: &Found<'_>) {
    if draft.line("adapter.kind").is_some_and(|line| line.toml != "\"lora\"") {
        kind.mistake("`LSLORA` cannot be combined with `use_dora` or `use_rslora`".to_owned());
    }
    draft.put("adapter.kind", word("ls-lora"), &[kind]);
    put_number(draft, "adapter.reg", fields.take("fourier_reg_weight"));
    put_number(draft, "adapter.sigma", fields.take("init_sigma"));
    if let Some(found) = fields.take("fourier_position")
        && found.text().is_some_and(|position| position != "after_scaling")
    {
        found.mistake(format!(
            "`{}` is {}; only `after_scaling` is supported",
            found.key,
            found.content.describe()
        ));
    }
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
            _ => Value::Unsupported(digits.clone()),
        },
        other => Value::Unsupported(other.describe()),
    };
    let table = entries.iter().map(|entry| (entry.name.clone(), value(&entry.value.content)));
    if !entries.is_empty() {
        draft.put(key, Value::Table(table.collect()), &[&found]);
    }
}
