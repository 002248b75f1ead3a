//! The adapter, in PEFT's terms, which every trainer adopts with its own prefixes.
//!
//! DoRA with rsLoRA scaling is not a kind of its own here: its alpha is multiplied by the square root of the rank,
//! which gives the same scale. Targets given as a pattern over module paths are not supported.
//! How a file says that it uses no adapter differs between tools, so each tool's file handles it.

use super::document::Content;
use super::draft::Draft;
use super::fields::Found;
use super::vocabulary::{put_layers, put_number, put_number_or, put_text, word, word_list};
use crate::value::Value;

/// The settings of an adapter, each under whatever name a tool gives it.
#[derive(Default)]
pub struct AdapterSettings<'a> {
    pub rank: Option<Found<'a>>,
    pub default_rank: usize,
    pub alpha: Option<Found<'a>>,
    /// The tool's default; `None` is twice the rank, as in a recipe.
    pub default_alpha: Option<f64>,
    pub dropout: Option<Found<'a>>,
    pub default_dropout: f64,
    pub targets: Option<Found<'a>>,
    /// The words for all linear layers.
    pub all_linear: &'static [&'static str],
    /// Whether all linear layers are the default targets; PEFT's default is q and v.
    pub all_by_default: bool,
    /// Parts of the base model that are trained in full.
    pub saved: Option<Found<'a>>,
    /// A switch for all linear layers.
    pub target_linear: Option<Found<'a>>,
    pub layers: Option<Found<'a>>,
    pub dora: Option<Found<'a>>,
    pub rslora: Option<Found<'a>>,
    pub bias: Option<Found<'a>>,
    /// The folder of an adapter to continue from.
    pub start: Option<Found<'a>>,
    /// How tensors are initialized.
    pub init: Option<Found<'a>>,
    pub tool: &'static str,
}

/// Fills the section `[adapter]` for a kind of LoRA; `from` are the settings that chose LoRA.
pub fn put_adapter(draft: &mut Draft, settings: AdapterSettings<'_>, from: &[&Found<'_>]) {
    let is_on = |found: &&Found<'_>| found.boolean() == Some(true);
    let (dora, rslora) = (settings.dora.as_ref().filter(is_on), settings.rslora.as_ref().filter(is_on));
    match (dora, rslora) {
        (Some(found), _) => draft.put("adapter.kind", word("dora"), &[found]),
        (None, Some(found)) => draft.put("adapter.kind", word("rslora"), &[found]),
        (None, None) if from.is_empty() => draft.put_default("adapter.kind", word("lora"), settings.tool),
        (None, None) => draft.put("adapter.kind", word("lora"), from),
    }
    let default_rank = Value::Integer(settings.default_rank as i128);
    put_number_or(draft, "adapter.rank", settings.rank.clone(), default_rank, settings.tool);
    put_alpha(draft, &settings, rslora.filter(|_| dora.is_some()));
    match &settings.dropout {
        Some(_) => put_number(draft, "adapter.dropout", settings.dropout.clone()),
        None if settings.default_dropout > 0.0 => {
            draft.put_default("adapter.dropout", Value::Float(settings.default_dropout), settings.tool)
        }
        None => {}
    }
    put_targets(draft, &settings);
    if let Some(found) = settings.saved.as_ref().filter(|found| found.is_on())
        && let Some(names) = found.words()
    {
        draft.put("adapter.train", word_list(&names), &[found]);
    }
    put_layers(draft, settings.layers.clone());
    if let Some(found) = &settings.bias
        && let Some(bias) = found.text().filter(|bias| bias != "none")
    {
        draft.put("adapter.bias", word(&bias), &[found]);
    }
    put_text(draft, "adapter.init", settings.start);
    // `true` is the usual initialization: A random and B zero.
    if let Some(found) = settings.init.as_ref().filter(|found| *found.content != Content::Boolean(true)) {
        draft.leave_out(found, "A starts random and B at zero; results will differ");
    }
}

/// `rslora` is the switch that multiplies alpha by the square root of the rank.
fn put_alpha(draft: &mut Draft, settings: &AdapterSettings<'_>, rslora: Option<&Found<'_>>) {
    let rank = match &settings.rank {
        Some(found) => found.number().unwrap_or(1.0),
        None => settings.default_rank as f64,
    };
    let factor = if rslora.is_some() { rank.sqrt() } else { 1.0 };
    match (&settings.alpha, settings.default_alpha) {
        (Some(found), _) => {
            let Some(alpha) = found.number() else { return };
            let alpha = Value::Float(alpha * factor);
            match rslora {
                Some(rslora) => {
                    draft.put_with("adapter.alpha", alpha, &[found, rslora], "alpha x sqrt(rank)")
                }
                None => draft.put("adapter.alpha", alpha, &[found]),
            }
        }
        (None, Some(alpha)) => {
            draft.put_default("adapter.alpha", Value::Float(alpha * factor), settings.tool)
        }
        (None, None) => {}
    }
}

fn put_targets(draft: &mut Draft, settings: &AdapterSettings<'_>) {
    if let Some(found) = &settings.target_linear
        && found.boolean() == Some(true)
    {
        draft.put("adapter.targets", word("all-linear"), &[found]);
        if let Some(targets) = &settings.targets {
            draft.leave_out(targets, format!("`{}` adapts every linear layer, including these", found.key));
        }
        return;
    }
    let Some(found) = &settings.targets else {
        return match settings.all_by_default {
            true => draft.put_default("adapter.targets", word("all-linear"), settings.tool),
            false => draft.put_default("adapter.targets", word_list(&["q_proj", "v_proj"]), "PEFT"),
        };
    };
    let is_pattern = |text: &str| text.contains(['*', '\\', '(', '[', '|', '^', '$', '+', '?']);
    if let Content::Text(text) = found.content
        && is_pattern(text)
    {
        draft.leave_out(found, "a pattern over module paths; `adapter.targets` takes names such as `q_proj`");
        return draft.assume("every linear layer is adapted, because the targets are a pattern");
    }
    let Some(names) = found.words() else { return };
    if names.iter().any(|name| settings.all_linear.contains(&name.as_str())) {
        return draft.put("adapter.targets", word("all-linear"), &[found]);
    }
    draft.put("adapter.targets", word_list(&names), &[found]);
}
