//! The form of a tool's table: names of settings, what each means, and the tool's defaults.
//!
//! A row maps the names of one setting to its meaning; the first name that has a value counts, and the others are
//! noted. A name with dots is a path into groups. `interpret.rs` writes the recipe of any table; what a row cannot say
//! (data sets, components, sharding) is in the tool's own file.

use super::document::Content;
use super::fields::{Fields, Found};
use crate::value::Value;

/// What a setting means. Those without a key are read together with others by `interpret.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// A number that this key of the recipe takes as it is.
    Number(&'static str),
    /// A text, such as a path.
    Text(&'static str),
    /// It is not carried over if it is on; the reason.
    Left(&'static str),
    /// It needs neither a line nor a note.
    Nothing,
    Model,
    Revision,
    Bf16,
    F16,
    /// The name of the precision of the arithmetic.
    ComputeDtype,
    /// The name of the precision of the weights.
    Dtype,
    FourBits,
    EightBits,
    /// 4 or 8.
    Bits,
    /// `nf4` or `fp4`.
    Code,
    DoubleQuant,
    Rank,
    Alpha,
    Dropout,
    Targets,
    /// A switch for all linear layers.
    AllLinear,
    /// Parts of the base model that are trained in full.
    Saved,
    Layers,
    Dora,
    RsLora,
    Bias,
    /// The folder of an adapter to continue from.
    Start,
    /// How tensors are initialized.
    Init,
    /// Samples per micro-batch and device.
    Micro,
    Accumulation,
    /// Packs samples into rows of the maximum length.
    Packing,
    Steps,
    Epochs,
    Schedule,
    WarmupSteps,
    WarmupRatio,
    Optimizer,
    Beta1,
    Beta2,
    Betas,
    LogSteps,
    SaveStrategy,
    SaveSteps,
    EvalStrategy,
    EvalSteps,
    MaxMemory,
    DeepSpeed,
    /// A switch, or the name of a device.
    OnCpu,
    /// Offloads activations to host memory.
    HostActivations,
}

pub type Row = (Means, &'static [&'static str]);

/// A default of a tool that differs from the recipe's.
#[derive(Clone, Copy, Debug)]
pub enum Preset {
    Whole(i128),
    Number(f64),
    Word(&'static str),
}

impl Preset {
    pub fn value(self) -> Value {
        match self {
            Preset::Whole(number) => Value::Integer(number),
            Preset::Number(number) => Value::Float(number),
            Preset::Word(word) => Value::Text(word.to_owned()),
        }
    }
}

/// Defaults of an adapter.
#[derive(Clone, Copy, Debug)]
pub struct AdapterPreset {
    /// Whose defaults they are.
    pub tool: &'static str,
    pub rank: u64,
    /// `None` is twice the rank, as in a recipe.
    pub alpha: Option<f64>,
    pub dropout: f64,
    /// Whether all linear layers are the default targets; PEFT's default is q and v.
    pub all_linear: bool,
}

/// How a tool saves and evaluates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saving {
    /// Only by the keys of the table.
    Rows,
    /// By a strategy or a number of steps. `save_default`: every 500 steps; `eval_needs_strategy`: a number of steps
    /// alone does not make it evaluate.
    HuggingFace { save_default: bool, eval_needs_strategy: bool },
}

/// What a tool's settings mean.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    pub tool: &'static str,
    /// Earlier rows win over later ones with the same meaning.
    pub rows: &'static [&'static [Row]],
    pub presets: &'static [(&'static str, Preset)],
    pub adapter: AdapterPreset,
    pub double_quant: bool,
    /// Samples per micro-batch by default; 0 if the file may leave the batch to another one.
    pub micro: u64,
    pub saving: Saving,
    /// Whether a constant schedule has a warm-up; Hugging Face's `constant` has none.
    pub constant_warmup: bool,
}

/// PEFT's defaults; the tables of tools say what differs.
pub const TABLE: Table = Table {
    tool: "PEFT",
    rows: &[],
    presets: &[],
    adapter: AdapterPreset { tool: "PEFT", rank: 8, alpha: Some(8.0), dropout: 0.0, all_linear: false },
    double_quant: true,
    micro: 1,
    saving: Saving::Rows,
    constant_warmup: false,
};

/// The settings of a file by their meaning.
pub struct Settings<'f, 'a> {
    pub fields: &'f Fields<'a>,
    pub table: Table,
}

impl<'a> Settings<'_, 'a> {
    /// The rows, without those that an earlier one replaces.
    fn rows(&self) -> impl Iterator<Item = &'static Row> {
        self.table.rows.iter().copied().flatten()
    }

    /// The setting that means this, if it has a value.
    pub fn take(&self, means: Means) -> Option<Found<'a>> {
        let (_, names) = self.rows().find(|(known, _)| *known == means)?;
        self.fields.take_first(names)
    }

    /// A switch that is on.
    pub fn take_on(&self, means: Means) -> Option<Found<'a>> {
        self.take(means).filter(|found| found.boolean() == Some(true))
    }

    /// Whether the file has such a setting, even without a value.
    pub fn has(&self, means: Means) -> bool {
        self.rows().any(|(known, names)| *known == means && self.fields.has_any(names))
    }

    /// Whether the file sets this key of the recipe, if only to `auto`.
    pub fn sets(&self, key: &str) -> bool {
        let is_set = |name: &&str| self.fields.get(name).is_some_and(|content| *content != Content::Null);
        self.rows().any(|(means, names)| {
            matches!(means, Means::Number(known) | Means::Text(known) if *known == key)
                && names.iter().any(is_set)
        })
    }

    /// Rows whose meaning is complete.
    pub fn alone(&self) -> impl Iterator<Item = &'static Row> {
        let is_alone =
            |means| matches!(means, Means::Number(_) | Means::Text(_) | Means::Left(_) | Means::Nothing);
        self.rows().filter(move |(means, _)| is_alone(*means))
    }
}
