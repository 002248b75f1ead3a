//! PEFT's `adapter_config.json`, which describes the adapter of a run and nothing else of it.
//!
//! Not supported: adapters other than the kinds of LoRA. The tensors next to the file are not imported; `adapter.init`
//! starts from them.

use super::adapters::put_adapter;
use super::document::Content;
use super::draft::Draft;
use super::fields::{Fields, Found};
use super::interpret::put_model;
use super::table::{Means, Row, Settings, TABLE, Table};
use super::trainer::{LORA_CONFIG, NO_TRAINING};
use super::values::{put_number, word};
use crate::value::Value;

const MODEL: &[Row] = &[(Means::Model, &["base_model_name_or_path"]), (Means::Revision, &["revision"])];

pub fn read_adapter_config(fields: &Fields<'_>, draft: &mut Draft) {
    let kind = fields.take("peft_type");
    let name = kind.as_ref().and_then(|found| found.text()).unwrap_or_default().to_uppercase();
    if let Some(found) = &kind
        && !["LORA", "LSLORA"].contains(&name.as_str())
    {
        found.mistake(format!("`peft_type` is {name:?}; only `LORA` and `LSLORA` adapters are supported"));
    }
    let it = Settings { fields, table: Table { rows: &[MODEL, LORA_CONFIG], ..TABLE } };
    put_model(&it, draft);
    put_adapter(&it, draft, &kind.iter().collect::<Vec<_>>());
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
