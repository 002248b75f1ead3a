//! From a typed recipe back to text: `job.toml`, the key reference, and the differences between two recipes.
//!
//! What is rendered reads back to the same recipe, so `job.toml` is itself a recipe that needs nothing else:
//! every default is filled in and every path is absolute.
//! Left out: comments and the user's own formatting, which the copy of the recipe in the run folder keeps.

use std::fmt::Write as _;

use smidgen_ir::bytes::format_bytes_exactly;

use super::keys::{KEYS, SECTIONS};
use super::sections::{
    Budget, DeviceChoice, Init, Layers, MicroTokens, ModelPath, ProfileChoice, Recipe, RecipePath, Recompute,
    Targets, Template, TileTokens, Warmup, WeightPlacement,
};
use smidgen_ir::words::{
    AdapterKind, BaseFormat, Bias, ClosedWord, Compute, DataFormat, EvalTask, LossOn, Optimizer, Overflow,
    Placement, Schedule,
};

/// A key whose value differs between two recipes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyDifference {
    /// `section.key`
    pub key: String,
    /// As TOML; `None` where the key was not in force (`train.steps` beside `train.epochs`).
    pub old: Option<String>,
    /// As TOML; `None` where the key is not in force.
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

/// A Markdown table of every key, its default, what it takes and what it means.
pub fn render_key_reference() -> String {
    let defaults = Recipe::with_defaults();
    let mut text = String::from("| key | default | takes | meaning |\n|---|---|---|---|\n");
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

/// A value as TOML.
pub(super) trait RenderValue {
    fn render(&self) -> String;
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if c.is_control() => {
                write!(quoted, "\\u{:04X}", c as u32).expect("a string takes all writes");
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

macro_rules! render_words {
    ($($word:ty),+ $(,)?) => {$(
        impl RenderValue for $word {
            fn render(&self) -> String {
                quoted(self.word())
            }
        }
    )+};
}

render_words!(
    AdapterKind,
    BaseFormat,
    Bias,
    Compute,
    DataFormat,
    EvalTask,
    LossOn,
    Optimizer,
    Overflow,
    Placement,
    Schedule,
);

impl RenderValue for f64 {
    /// The shortest digits that read back to the same number, with a point or an exponent.
    fn render(&self) -> String {
        format!("{self:?}")
    }
}

impl RenderValue for usize {
    fn render(&self) -> String {
        self.to_string()
    }
}

impl RenderValue for u64 {
    fn render(&self) -> String {
        self.to_string()
    }
}

impl RenderValue for bool {
    fn render(&self) -> String {
        self.to_string()
    }
}

impl RenderValue for String {
    fn render(&self) -> String {
        quoted(self)
    }
}

impl RenderValue for [f64; 2] {
    fn render(&self) -> String {
        self.to_vec().render()
    }
}

impl<T: RenderValue> RenderValue for Vec<T> {
    fn render(&self) -> String {
        let items: Vec<String> = self.iter().map(RenderValue::render).collect();
        format!("[{}]", items.join(", "))
    }
}

impl<T: RenderValue> RenderValue for Vec<(String, T)> {
    fn render(&self) -> String {
        let entries: Vec<String> =
            self.iter().map(|(name, value)| format!("{} = {}", quoted(name), value.render())).collect();
        match entries.as_slice() {
            [] => "{}".to_owned(),
            entries => format!("{{ {} }}", entries.join(", ")),
        }
    }
}

impl RenderValue for RecipePath {
    fn render(&self) -> String {
        quoted(&self.resolved.to_string_lossy())
    }
}

impl RenderValue for ModelPath {
    fn render(&self) -> String {
        match self {
            ModelPath::HuggingFace(name) => quoted(&format!("hf:{name}")),
            ModelPath::Pypi(name) => quoted(&format!("pypi:{name}")),
            ModelPath::Gguf(path) | ModelPath::Folder(path) => path.render(),
        }
    }
}

impl RenderValue for Targets {
    fn render(&self) -> String {
        match self {
            Targets::AllLinear => quoted("all-linear"),
            Targets::Names(names) => names.render(),
        }
    }
}

impl RenderValue for Layers {
    fn render(&self) -> String {
        match self {
            Layers::All => quoted("all"),
            Layers::Last(count) => quoted(&format!("last:{count}")),
            Layers::List(layers) => layers.render(),
        }
    }
}

impl RenderValue for Init {
    fn render(&self) -> String {
        match self {
            Init::Default => quoted("default"),
            Init::Adapter(path) => path.render(),
        }
    }
}

impl RenderValue for Template {
    fn render(&self) -> String {
        match self {
            Template::Auto => quoted("auto"),
            Template::Named(name) => quoted(name),
            Template::File(path) => path.render(),
        }
    }
}

impl RenderValue for ProfileChoice {
    fn render(&self) -> String {
        match self {
            ProfileChoice::Auto => quoted("auto"),
            ProfileChoice::Named(name) => quoted(name),
            ProfileChoice::File(path) => path.render(),
        }
    }
}

impl RenderValue for Warmup {
    fn render(&self) -> String {
        match self {
            Warmup::Steps(steps) => steps.render(),
            Warmup::Fraction(fraction) => fraction.render(),
        }
    }
}

impl RenderValue for DeviceChoice {
    fn render(&self) -> String {
        quoted(&self.to_string())
    }
}

impl RenderValue for Budget {
    fn render(&self) -> String {
        match self {
            Budget::Auto => quoted("auto"),
            Budget::Bytes(bytes) => quoted(&format_bytes_exactly(*bytes)),
        }
    }
}

impl RenderValue for Option<u64> {
    fn render(&self) -> String {
        match self {
            None => quoted(""),
            Some(bytes) => quoted(&format_bytes_exactly(*bytes)),
        }
    }
}

impl RenderValue for TileTokens {
    fn render(&self) -> String {
        match self {
            TileTokens::Auto => quoted("auto"),
            TileTokens::None => quoted("none"),
            TileTokens::Tokens(tokens) => tokens.render(),
        }
    }
}

impl RenderValue for MicroTokens {
    fn render(&self) -> String {
        match self {
            MicroTokens::Auto => quoted("auto"),
            MicroTokens::Tokens(tokens) => tokens.render(),
        }
    }
}

impl RenderValue for Recompute {
    fn render(&self) -> String {
        match self {
            Recompute::Auto => quoted("auto"),
            Recompute::None => quoted("none"),
            Recompute::All => quoted("all"),
            Recompute::Every(stride) => quoted(&format!("every:{stride}")),
            Recompute::List(layers) => layers.render(),
        }
    }
}

impl RenderValue for WeightPlacement {
    fn render(&self) -> String {
        match self {
            WeightPlacement::Auto => quoted("auto"),
            WeightPlacement::Device => quoted("device"),
            WeightPlacement::Host(1.0) => quoted("host"),
            WeightPlacement::Host(part) => quoted(&format!("host:{part}")),
            WeightPlacement::Disk => quoted("disk"),
        }
    }
}
