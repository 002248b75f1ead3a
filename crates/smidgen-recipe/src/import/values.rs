//! Lines of the recipe from single values: numbers, texts, sizes, lists.
//!
//! A value of the wrong type is a mistake in the file; a value that is `auto` is set elsewhere and gives no line.
//! What several settings mean together is in `interpret.rs`.

use super::document::{Content, Node};
use super::draft::Draft;
use super::fields::Found;
use crate::value::Value;
use crate::{ClosedWord, LossOn};

/// The comment at pins in `[memory]`.
pub const PINNED: &str = "remove this line to let the solver choose";

/// Names of other tools, the word of the recipe for all of them, and a remark or a reason.
pub type Choice = (&'static [&'static str], &'static str, &'static str);

/// The row with this name.
pub fn choose(choices: &'static [Choice], name: &str) -> Option<&'static Choice> {
    choices.iter().find(|(names, ..)| names.contains(&name))
}

/// Writes a whole number without a decimal point, and any other number as it is.
pub fn put_whole(draft: &mut Draft, key: &'static str, value: f64, from: &[&Found<'_>]) {
    let is_whole = value.fract() == 0.0 && value.abs() < 1e15;
    let value = if is_whole { Value::Integer(value as i128) } else { Value::Float(value) };
    draft.put(key, value, from);
}

/// Notes a number of evaluations or checkpoints per epoch, with the steps that it means.
pub fn per_epoch_note(draft: &mut Draft, key: &'static str, found: &Found<'_>, times: f64) {
    if times <= 0.0 {
        return draft.put(key, Value::Integer(0), &[found]);
    }
    let number = |key: &str| draft.line(key).and_then(|line| line.toml.parse::<f64>().ok());
    let (unit, per_step) = match (number("train.batch_tokens"), number("train.batch")) {
        (Some(tokens), _) => ("tokens of the data", tokens),
        (None, Some(rows)) => ("rows of the data", rows),
        (None, None) => return draft.leave_out(found, format!("`{key}` counts steps, not epochs")),
    };
    let per_interval = per_step * times;
    let example = 1_000_000.0 / per_interval;
    let example =
        if example >= 1.0 { format!("; for a million that is {}", example.floor()) } else { String::new() };
    draft.leave_out(
        found,
        format!("`{key}` counts steps, not epochs; set it to the {unit} / {per_interval}{example}"),
    );
}

/// A number, unless it is `auto`.
pub fn put_number(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>) {
    let Some(found) = found.filter(|found| !found.is_auto()) else { return };
    if let Some(number) = found.number() {
        put_whole(draft, key, number, &[&found]);
    }
}

/// A text, such as a path.
pub fn put_text(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>) {
    if let Some(found) = found
        && let Some(text) = found.text()
    {
        draft.put(key, Value::Text(text), &[&found]);
    }
}

/// `memory.budget` and `memory.host_budget` from the sizes by device of accelerate's `max_memory`, or from one size.
pub fn put_max_memory(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Content::Map(sizes) = found.content else {
        return put_size(draft, "memory.budget", &found, "");
    };
    let mut devices: Vec<(f64, Found<'_>)> = Vec::new();
    for entry in sizes {
        let inside = found.inside(format!("{}.{}", found.key, entry.name), entry.line, &entry.value.content);
        match entry.name.as_str() {
            "cpu" => put_size(draft, "memory.host_budget", &inside, ""),
            "disk" => draft.leave_out(&inside, "a disk has no budget"),
            _ => devices.push((size_bytes(&inside).unwrap_or(f64::MAX), inside)),
        }
    }
    let count = devices.len();
    // Every rank has one device, and one budget serves all.
    if let Some((_, least)) = devices.into_iter().min_by(|(one, _), (other, _)| one.total_cmp(other)) {
        let remark = if count > 1 { format!("the least of {count} devices") } else { String::new() };
        put_size(draft, "memory.budget", &least, &remark);
    }
}

/// A size as accelerate writes it: a text with a unit, or a number of bytes.
fn put_size(draft: &mut Draft, key: &'static str, found: &Found<'_>, remark: &str) {
    let text = match found.content {
        Content::Number(bytes) => format!("{bytes}B"),
        _ => match found.text() {
            Some(text) => text.trim().to_owned(),
            None => return,
        },
    };
    draft.put_with(key, Value::Text(text), &[found], remark);
}

/// The bytes of a size, for comparing sizes.
fn size_bytes(found: &Found<'_>) -> Option<f64> {
    let (Content::Text(text) | Content::Number(text)) = found.content else { return None };
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let factor = match text[end..].trim().to_uppercase().as_str() {
        "GB" => 1e9,
        "GIB" | "G" => 1_073_741_824.0,
        "MB" => 1e6,
        "MIB" | "M" => 1_048_576.0,
        "KB" => 1e3,
        "KIB" | "K" => 1024.0,
        _ => 1.0,
    };
    Some(text[..end].trim().parse::<f64>().ok()? * factor)
}

/// `train.betas` from a list of two numbers.
pub fn put_beta_list(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found.filter(|found| !found.is_auto()) else { return };
    let Content::List(items) = found.content else {
        return found.mistake(format!("`{}` must be a list of two numbers", found.key));
    };
    let number = |item: &Node| {
        Some(Value::Float(found.inside(found.key.clone(), found.line, &item.content).number()?))
    };
    if let Some(numbers) = items.iter().map(number).collect() {
        draft.put("train.betas", Value::List(numbers), &[&found]);
    }
}

/// `train.betas` from two numbers.
pub fn put_betas(draft: &mut Draft, first: Option<Found<'_>>, second: Option<Found<'_>>) {
    let number = |found: &Option<Found<'_>>, default: f64| match found {
        Some(found) => found.number(),
        None => Some(default),
    };
    let (Some(one), Some(two)) = (number(&first, 0.9), number(&second, 0.999)) else { return };
    let from: Vec<&Found<'_>> = first.iter().chain(&second).collect();
    if !from.is_empty() {
        draft.put("train.betas", Value::List(vec![Value::Float(one), Value::Float(two)]), &from);
    }
}

/// `data.loss_on`.
pub fn put_loss_on(draft: &mut Draft, loss_on: LossOn, from: &[&Found<'_>]) {
    draft.put("data.loss_on", word(loss_on.word()), from);
}

/// `adapter.layers` from one layer number or a list of them.
pub fn put_layers(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let number = |content: &Content| match content {
        Content::Number(digits) => digits.parse().ok().map(Value::Integer),
        _ => None,
    };
    let layers = match found.content {
        Content::List(items) => items.iter().map(|item| number(&item.content)).collect(),
        content => number(content).map(|layer| vec![layer]),
    };
    match layers {
        Some(layers) => draft.put("adapter.layers", Value::List(layers), &[&found]),
        None => found.mistake(format!("`{}` must be a list of layer numbers", found.key)),
    }
}

pub fn word(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub fn word_list<T: AsRef<str>>(words: &[T]) -> Value {
    Value::List(words.iter().map(|text| word(text.as_ref())).collect())
}
