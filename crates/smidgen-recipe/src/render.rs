//! Renders a typed recipe: `job.toml`, the key reference, and the differences between two recipes.
//!
//! The text parses back to the same recipe, so `job.toml` is a complete recipe: every default is filled in and every
//! path is absolute. Comments and formatting are lost; the copy of the recipe in the run folder keeps them.

use crate::keys::{KEYS, SECTIONS};
use crate::sections::Recipe;

/// A key whose value differs between two recipes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyDifference {
    /// `section.key`
    pub key: String,
    /// As TOML; `None` if the key was not set, such as `train.steps` if `train.epochs` was.
    pub old: Option<String>,
    pub new: Option<String>,
}

/// The recipe as TOML, every key in order: this is `job.toml`.
pub fn render_job(recipe: &Recipe) -> String {
    let mut text = String::new();
    for (index, section) in SECTIONS.iter().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        text.push_str(&format!("[{section}]\n"));
        for key in KEYS.iter().filter(|key| key.section == *section) {
            if let Some(value) = (key.show)(recipe) {
                text.push_str(&format!("{} = {value}\n", key.name));
            }
        }
    }
    text
}

/// A Markdown table of every key, its default, what it accepts and what it means.
pub fn render_key_reference() -> String {
    let defaults = Recipe::with_defaults();
    let mut text = String::from("| key | default | accepts | meaning |\n|---|---|---|---|\n");
    for key in KEYS {
        let default = match (key.required, (key.show)(&defaults)) {
            (true, _) => "required".to_owned(),
            (false, Some(value)) => format!("`{value}`"),
            (false, None) => "none".to_owned(),
        };
        text.push_str(&format!(
            "| `{}` | {default} | {} | {} |\n",
            key.path(),
            key.accepts.describe(),
            key.meaning
        ));
    }
    text
}

/// The keys whose rendered values differ, in the order of the reference.
pub fn differences(old: &Recipe, new: &Recipe) -> Vec<KeyDifference> {
    let compared =
        KEYS.iter().map(|key| KeyDifference { key: key.path(), old: (key.show)(old), new: (key.show)(new) });
    compared.filter(|difference| difference.old != difference.new).collect()
}
