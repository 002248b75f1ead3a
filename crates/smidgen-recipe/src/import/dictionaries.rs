//! Nested dictionaries of arguments: groups whose settings mean the same without the group.
//!
//! Scripts keep the arguments of `TrainingArguments`, `LoraConfig` and `BitsAndBytesConfig` in one file, each in a
//! group of its own or all in one. The groups below are lifted to the top, and messages still name them.
//! Other groups, such as `deepspeed`, have a meaning of their own and stay.

use super::document::{Content, Entry};
use super::mistakes::Mistakes;
use crate::reasons::has_reason;

/// Names of groups that are lifted, in lower case without `_` and `-`.
#[rustfmt::skip]
const GROUPS: &[&str] = &[
    "args", "bitsandbytes", "bitsandbytesconfig", "bnb", "bnbconfig", "config", "data", "dataarguments",
    "dataargs", "dataconfig", "datasetconfig", "fastlanguagemodel", "frompretrained", "getpeftmodel", "lora",
    "logging", "loggingconfig", "loraargs", "loraconfig", "model", "modelargs", "modelarguments",
    "modelconfig", "modelinitkwargs", "modelkwargs", "output", "peft", "peftconfig", "quantization",
    "quantizationconfig", "scriptargs", "scriptarguments", "sft", "sftconfig", "trainer", "trainerargs",
    "training", "trainingargs", "trainingarguments", "trainingconfig", "trainconfig", "unsloth",
    "unslothconfig",
];

/// Short names inside a group (the beginning of its name, the name inside it), and the full name that they stand for.
const RENAMED: &[(&str, &str, &str)] = &[
    ("lora", "rank", "r"),
    ("lora", "alpha", "lora_alpha"),
    ("lora", "dropout", "lora_dropout"),
    ("lora", "targets", "target_modules"),
    ("peft", "rank", "r"),
    ("peft", "alpha", "lora_alpha"),
    ("peft", "dropout", "lora_dropout"),
    ("model", "name", "model_name"),
    ("model", "id", "model_name"),
    ("model", "path", "model_name"),
    ("model", "name_or_path", "model_name"),
    ("data", "path", "train_file"),
    ("data", "train", "train_file"),
    ("data", "val_file", "validation_file"),
    ("data", "eval_file", "validation_file"),
    ("output", "dir", "output_dir"),
];

/// All settings, with those of known groups lifted to the top.
pub fn flattened(entries: &[Entry]) -> Vec<Entry> {
    let mut flat = Vec::new();
    lift(entries, "", "", &mut flat);
    flat
}

/// `group` is the normalized name of the group around the entries, `before` the prefix of their names in messages.
fn lift(entries: &[Entry], group: &str, before: &str, flat: &mut Vec<Entry>) {
    for entry in entries {
        let plain = entry.name.to_lowercase().replace(['_', '-'], "");
        match &entry.value.content {
            Content::Map(inside) if GROUPS.contains(&plain.as_str()) => {
                lift(inside, &plain, &format!("{before}{}.", entry.name), flat);
            }
            _ => {
                let written = lowered(&entry.name);
                let renamed =
                    RENAMED.iter().find(|(of, short, _)| group.starts_with(of) && *short == written);
                let name = renamed.map_or(written, |(_, _, name)| (*name).to_owned());
                flat.push(Entry { name, shown: format!("{before}{}", entry.name), ..entry.clone() });
            }
        }
    }
}

/// Constants of a script (`MAX_SEQ_LENGTH`) mean the arguments of the same name; environment variables stay.
fn lowered(name: &str) -> String {
    let is_constant = name.len() > 1 && !name.contains(|c: char| c.is_ascii_lowercase());
    if is_constant && !has_reason(name) { name.to_lowercase() } else { name.to_owned() }
}

/// Notes settings that two groups give different values.
pub fn note_contradictions(flat: &[Entry], mistakes: &Mistakes) {
    for (index, entry) in flat.iter().enumerate() {
        let first = flat[..index].iter().find(|first| first.name == entry.name);
        if let Some(first) = first.filter(|first| !is_same_value(&first.value.content, &entry.value.content))
        {
            let message = format!("`{}` and `{}` (line {}) differ", entry.shown(), first.shown(), first.line);
            mistakes.note(entry.line, message);
        }
    }
}

/// Compares values, but not their lines.
fn is_same_value(one: &Content, other: &Content) -> bool {
    match (one, other) {
        (Content::List(one), Content::List(other)) => {
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| is_same_value(&one.content, &other.content))
        }
        (Content::Number(one), Content::Number(other)) => one.parse::<f64>() == other.parse::<f64>(),
        _ => one == other,
    }
}
