//! Named chat templates of other tools.
//!
//! A name stands for a template that smidgen has too, or for the template of the model's family, which the model
//! brings along (`data.template = "model"`). torchtune names none: its tokenizers write the turns.
//! Not supported: templates that no model brings along and smidgen does not have; they are noted by name.

use super::draft::Draft;
use super::fields::Found;
use super::values::word;
use crate::value::Value;

/// The model's own template, for prompts with completions too.
pub const MODEL: &str = "model";
/// No template.
pub const PLAIN: &str = "none";

/// Names of LLaMA-Factory and Axolotl, and the template of smidgen that says the same.
const NAMED: &[(&[&str], &str)] = &[
    (&["chatml", "chatml_de", "hermes", "dolphin"], "chatml"),
    (&["llama3", "llama-3"], "llama3"),
    (&["gemma", "gemma2"], "gemma"),
    (&["zephyr"], "zephyr"),
    (&["phi_3", "phi_35", "phi", "phi3"], "phi3"),
    (&["phi_4", "phi4"], "phi4"),
    (&["alpaca"], "alpaca"),
    (&["empty"], PLAIN),
];

/// Names that begin like this are the template of a family of models.
#[rustfmt::skip]
const FAMILIES: &[&str] = &[
    "qwen", "llama", "mistral", "ministral", "magistral", "devstral", "codestral", "gemma", "phi", "falcon",
    "cohere", "command", "deepseek", "jamba", "granite", "glm", "chatglm", "yi", "intern", "baichuan",
    "smollm", "olmo", "exaone", "gpt_oss", "gpt", "hunyuan", "kimi", "ernie", "minicpm", "aya", "nemotron",
    "lfm", "seed", "mimo", "bailing", "ling",
];

/// Names for the template that the model has anyway.
const OWN: &[&str] = &["tokenizer_default", "auto", "jinja"];

const OWN_USED: &str = "smidgen has no template of this name; the model's own is used (`data.template` takes a built-in name or a .jinja \
                        file)";

/// `data.template` from a name.
pub fn put_template(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Some(name) = found.text() else { return };
    let plain = name.to_lowercase();
    let plain = plain.strip_prefix("tokenizer_default_fallback_").unwrap_or(&plain);
    if OWN.contains(&plain) {
        return;
    }
    if plain.ends_with(".jinja") {
        return draft.put("data.template", Value::Text(name), &[&found]);
    }
    let named = NAMED.iter().find(|(names, _)| names.contains(&plain)).map(|(_, ours)| *ours);
    match named {
        Some(ours) => draft.put("data.template", word(ours), &[&found]),
        None if FAMILIES.iter().any(|family| plain.starts_with(family)) => {
            let remark = format!("`{name}` is the model's own");
            draft.put_with("data.template", word(MODEL), &[&found], &remark);
        }
        None => draft.leave_out(&found, OWN_USED),
    }
}

/// Tokenizers of torchtune, and the template that writes the same turns. What is not listed writes those of its model.
const TOKENIZERS: &[(&str, &str)] = &[
    ("llama3_tokenizer", "llama3"),
    ("qwen2_tokenizer", "chatml"),
    ("qwen2_5_tokenizer", "chatml"),
    ("qwen3_tokenizer", "chatml"),
    ("phi3_mini_tokenizer", "phi3"),
    ("phi4_tokenizer", "phi4"),
    // Its turns have no markers.
    ("gemma_tokenizer", PLAIN),
];

/// The template of a tokenizer's component, by the last part of its name.
pub fn template_of_tokenizer(component: &str) -> &'static str {
    TOKENIZERS.iter().find(|(name, _)| *name == component).map_or(MODEL, |(_, ours)| ours)
}
