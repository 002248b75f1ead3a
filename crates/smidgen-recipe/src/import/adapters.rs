//! The adapter, in PEFT's terms, which every trainer adopts with its own prefixes.
//!
//! DoRA with rsLoRA scaling is not a kind of its own here: its alpha is multiplied by the square root of the rank,
//! which gives the same scale. A text of targets with the characters of a regular expression stays one.
//! How a file says that it uses no adapter differs between tools, so each tool's file handles it.

use super::document::Content;
use super::draft::Draft;
use super::fields::Found;
use super::table::{Means, Settings};
use super::values::{put_layers, put_number, put_text, word, word_list};
use crate::Targets;
use crate::value::Value;

/// The words for all linear layers.
const ALL_LINEAR: [&str; 3] = ["all-linear", "all_linear", "all"];

/// Fills the section `[adapter]` for a kind of LoRA; `from` are the settings that chose LoRA.
pub fn put_adapter(it: &Settings<'_, '_>, draft: &mut Draft, from: &[&Found<'_>]) {
    let preset = it.table.adapter;
    let (dora, rslora) = (it.take_on(Means::Dora), it.take_on(Means::RsLora));
    match (&dora, &rslora) {
        (Some(found), _) => draft.put("adapter.kind", word("dora"), &[found]),
        (None, Some(found)) => draft.put("adapter.kind", word("rslora"), &[found]),
        (None, None) if from.is_empty() => draft.put_default("adapter.kind", word("lora"), preset.tool),
        (None, None) => draft.put("adapter.kind", word("lora"), from),
    }
    let rank = it.take(Means::Rank);
    put_alpha(it, draft, rank.as_ref(), rslora.filter(|_| dora.is_some()).as_ref());
    match rank {
        Some(_) => put_number(draft, "adapter.rank", rank),
        None => draft.put_default("adapter.rank", Value::Integer(preset.rank.into()), preset.tool),
    }
    match it.take(Means::Dropout) {
        None if preset.dropout > 0.0 => {
            draft.put_default("adapter.dropout", Value::Float(preset.dropout), preset.tool)
        }
        found => put_number(draft, "adapter.dropout", found),
    }
    put_targets(it, draft);
    if let Some(found) = it.take(Means::Saved).filter(Found::is_on)
        && let Some(names) = found.words()
    {
        draft.put("adapter.train", word_list(&names), &[&found]);
    }
    put_layers(draft, it.take(Means::Layers));
    if let Some(found) = it.take(Means::Bias)
        && let Some(bias) = found.text().filter(|bias| bias != "none")
    {
        draft.put("adapter.bias", word(&bias), &[&found]);
    }
    put_text(draft, "adapter.init", it.take(Means::Start));
    // `true` is the usual initialization: A random and B zero.
    if let Some(found) = it.take(Means::Init).filter(|found| *found.content != Content::Boolean(true)) {
        draft.leave_out(&found, "A starts random and B at zero; results will differ");
    }
}

/// Every weight is trained, so none may be quantized, and the settings of an adapter are noted with the reason.
pub fn put_full(
    it: &Settings<'_, '_>,
    draft: &mut Draft,
    from: Option<&Found<'_>>,
    quantized: Option<&Found<'_>>,
) {
    if let Some(found) = quantized {
        found.mistake(format!("`{}` freezes the weights, but every weight is to be trained", found.key));
    }
    let why = match from {
        Some(found) => {
            draft.put("adapter.kind", word("full"), &[found]);
            format!("`{}` (line {}) turns adapters off", found.key, found.line)
        }
        None => {
            draft.put_default("adapter.kind", word("full"), it.table.tool);
            "no adapter is asked for, so every weight is trained".to_owned()
        }
    };
    use Means::{Alpha, Dora, Dropout, Rank, RsLora, Saved, Targets};
    for means in [Rank, Alpha, Dropout, Targets, Saved, Dora, RsLora] {
        draft.leave_out_if_set(it.take(means), why.clone());
    }
}

/// `rslora` is the switch that multiplies alpha by the square root of the rank.
fn put_alpha(it: &Settings<'_, '_>, draft: &mut Draft, rank: Option<&Found<'_>>, rslora: Option<&Found<'_>>) {
    let preset = it.table.adapter;
    let rank = rank.map_or(preset.rank as f64, |found| found.number().unwrap_or(1.0));
    let factor = if rslora.is_some() { rank.sqrt() } else { 1.0 };
    match (it.take(Means::Alpha), preset.alpha) {
        (Some(found), _) => {
            let Some(alpha) = found.number() else { return };
            let remark = if rslora.is_some() { "alpha x sqrt(rank)" } else { "" };
            let from: Vec<&Found<'_>> = [&found].into_iter().chain(rslora).collect();
            draft.put_with("adapter.alpha", Value::Float(alpha * factor), &from, remark);
        }
        (None, Some(alpha)) => draft.put_default("adapter.alpha", Value::Float(alpha * factor), preset.tool),
        (None, None) => {}
    }
}

fn put_targets(it: &Settings<'_, '_>, draft: &mut Draft) {
    let targets = it.take(Means::Targets).filter(Found::is_on);
    if let Some(found) = it.take_on(Means::AllLinear) {
        draft.put("adapter.targets", word("all-linear"), &[&found]);
        let why = format!("`{}` adapts every linear layer, including these", found.key);
        return draft.leave_out_if_set(targets, why);
    }
    let Some(found) = targets else {
        return if it.table.adapter.all_linear {
            draft.put_default("adapter.targets", word("all-linear"), it.table.adapter.tool)
        } else {
            draft.put_default("adapter.targets", word_list(&["q_proj", "v_proj"]), "PEFT")
        };
    };
    if let Content::Text(text) = found.content {
        if Targets::is_expression(text) {
            return draft.put("adapter.targets", Value::Text(text.to_string()), &[&found]);
        }
        if text.contains(['*', '?']) {
            draft.leave_out(
                &found,
                "a pattern of file names; `adapter.targets` takes names or a regular expression",
            );
            return draft.assume("every linear layer is adapted, because the targets are a pattern");
        }
    }
    let Some(names) = found.words() else { return };
    let is_all = names.iter().any(|name| ALL_LINEAR.contains(&name.as_str()));
    let value = if is_all { word("all-linear") } else { word_list(&names) };
    draft.put("adapter.targets", value, &[&found]);
}
