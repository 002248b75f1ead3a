//! What is trained, in PEFT's words, which every trainer takes over with prefixes of its own.
//!
//! DoRA with rsLoRA's scale has no kind of its own here: its alpha is multiplied by the root of the rank, which is
//! the same product. Targets by a pattern over module paths have no counterpart.
//! Left out: how a file says that nothing is adapted, which differs from tool to tool.

use super::document::Content;
use super::draft::Draft;
use super::fields::Found;
use super::vocabulary::{put_layers, put_number, word};
use crate::value::Value;

/// The settings of an adapter, however a tool calls them.
#[derive(Default)]
pub struct AdapterWords<'a> {
    pub rank: Option<Found<'a>>,
    pub default_rank: usize,
    pub alpha: Option<Found<'a>>,
    /// Where none is given; `None`: twice the rank, as here.
    pub default_alpha: Option<f64>,
    pub dropout: Option<Found<'a>>,
    pub default_dropout: f64,
    pub targets: Option<Found<'a>>,
    /// The words that stand for all linears.
    pub all_linear: &'static [&'static str],
    /// Whether all linears are meant where no targets are given; PEFT's own choice are q and v.
    pub all_by_default: bool,
    /// A switch that means all linears.
    pub target_linear: Option<Found<'a>>,
    pub layers: Option<Found<'a>>,
    pub dora: Option<Found<'a>>,
    pub rslora: Option<Found<'a>>,
    pub bias: Option<Found<'a>>,
    /// The folder of an adapter to go on from.
    pub start: Option<Found<'a>>,
    /// How tensors begin.
    pub init: Option<Found<'a>>,
    pub tool: &'static str,
}

/// The section `[adapter]` of one of the kinds of LoRA; `from` said that it is one.
pub fn put_adapter(draft: &mut Draft, words: AdapterWords<'_>, from: &[&Found<'_>]) {
    let on = |draft: &mut Draft, found: &Option<Found<'_>>| {
        found.as_ref().is_some_and(|found| found.boolean(draft) == Some(true))
    };
    let (dora, rslora) = (on(draft, &words.dora), on(draft, &words.rslora));
    let switch = |found: &Option<Found<'_>>, kind: &str, draft: &mut Draft| {
        draft.put("adapter.kind", word(kind), &[found.as_ref().expect("it is on")]);
    };
    match (dora, rslora) {
        (true, _) => switch(&words.dora, "dora", draft),
        (false, true) => switch(&words.rslora, "rslora", draft),
        (false, false) if from.is_empty() => draft.put_default("adapter.kind", word("lora"), words.tool),
        (false, false) => draft.put("adapter.kind", word("lora"), from),
    }
    match &words.rank {
        Some(_) => put_number(draft, "adapter.rank", words.rank.clone()),
        None => draft.put_default("adapter.rank", Value::Integer(words.default_rank as i128), words.tool),
    }
    put_alpha(draft, &words, dora && rslora);
    match &words.dropout {
        Some(_) => put_number(draft, "adapter.dropout", words.dropout.clone()),
        None if words.default_dropout > 0.0 => {
            draft.put_default("adapter.dropout", Value::Float(words.default_dropout), words.tool)
        }
        None => {}
    }
    put_targets(draft, &words);
    put_layers(draft, words.layers.clone());
    if let Some(found) = &words.bias
        && let Some(bias) = found.text(draft).filter(|bias| bias != "none")
    {
        draft.put("adapter.bias", word(&bias), &[found]);
    }
    if let Some(found) = &words.start
        && let Some(folder) = found.text(draft)
    {
        draft.put("adapter.init", Value::Text(folder), &[found]);
    }
    // True is the usual beginning: A random and B zero.
    if let Some(found) = words.init.as_ref().filter(|found| *found.content != Content::Boolean(true)) {
        draft.leave_out(found, "A begins at random and B at zero: results will differ");
    }
}

fn put_alpha(draft: &mut Draft, words: &AdapterWords<'_>, scaled: bool) {
    let rank = match &words.rank {
        Some(found) => found.number(&mut Draft::default()).unwrap_or(1.0),
        None => words.default_rank as f64,
    };
    let factor = if scaled { rank.sqrt() } else { 1.0 };
    match (&words.alpha, words.default_alpha) {
        (Some(found), _) => {
            let Some(alpha) = found.number(draft) else { return };
            match (scaled, &words.rslora) {
                (true, Some(rslora)) => draft.put_with(
                    "adapter.alpha",
                    Value::Float(alpha * factor),
                    &[found, rslora],
                    "alpha x root of the rank",
                ),
                _ => draft.put("adapter.alpha", Value::Float(alpha), &[found]),
            }
        }
        (None, Some(alpha)) => draft.put_default("adapter.alpha", Value::Float(alpha * factor), words.tool),
        (None, None) => {}
    }
}

fn put_targets(draft: &mut Draft, words: &AdapterWords<'_>) {
    if let Some(found) = &words.target_linear
        && found.boolean(draft) == Some(true)
    {
        draft.put("adapter.targets", word("all-linear"), &[found]);
        if let Some(targets) = &words.targets {
            draft.leave_out(targets, format!("`{}` adapts every linear layer, these among them", found.key));
        }
        return;
    }
    let Some(found) = &words.targets else {
        match words.all_by_default {
            true => draft.put_default("adapter.targets", word("all-linear"), words.tool),
            false => {
                let names = ["q_proj", "v_proj"].map(word).to_vec();
                draft.put_default("adapter.targets", Value::List(names), "PEFT");
            }
        }
        return;
    };
    let is_pattern = |text: &str| text.contains(['*', '\\', '(', '[', '|', '^', '$', '+', '?']);
    if let Content::Text(text) = found.content
        && is_pattern(text)
    {
        draft
            .leave_out(found, "a pattern over module paths: `adapter.targets` takes names, such as `q_proj`");
        return draft.assume("every linear layer is adapted, because the targets are given by a pattern");
    }
    let Some(names) = found.words(draft) else { return };
    if names.iter().any(|name| words.all_linear.contains(&name.as_str())) {
        return draft.put("adapter.targets", word("all-linear"), &[found]);
    }
    draft.put("adapter.targets", Value::List(names.iter().map(|name| word(name)).collect()), &[found]);
}
