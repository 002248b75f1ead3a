//! A row of the list of families (`mod.rs`): a `model_type`, the function that reads its config, and the class of
//! transformers whose defaults its absent keys have.
//!
//! The defaults are data, recorded from transformers by `fixtures/class_defaults.py`.

use super::config::Config;
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::{Map, Value};
use std::sync::LazyLock;

pub type ReadSpec = fn(&Config, &Family) -> Result<DecoderSpec, ModelError>;

#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub name: &'static str,
    pub read: ReadSpec,
    /// The `model_type` of the class whose defaults apply.
    pub class: &'static str,
    /// Whether `partial_rotary_factor` decides how many channels of a head are rotated.
    pub partial_rotary: bool,
    /// Whether the class has dropout in the base model by default. It is left out, with a note.
    pub has_dropout: bool,
    /// Whether activations of published models exceed the range of f16.
    pub overflows_f16: bool,
}

static CLASS_DEFAULTS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("class_defaults.json")).expect("the recorded defaults are an object")
});

impl Family {
    pub const fn new(name: &'static str, read: ReadSpec) -> Family {
        Family { name, read, class: name, partial_rotary: false, has_dropout: false, overflows_f16: false }
    }

    /// Only these classes of transformers read `partial_rotary_factor`.
    pub const fn with_partial_rotary(self) -> Family {
        Family { partial_rotary: true, ..self }
    }

    pub const fn with_overflow_of_f16(self) -> Family {
        Family { overflows_f16: true, ..self }
    }

    /// What absent keys of a config mean.
    pub fn defaults(&self) -> &'static Map<String, Value> {
        CLASS_DEFAULTS[self.class].as_object().expect("the defaults of a class are an object")
    }

    /// The row of the embedding that lookups do not train. As in PyTorch, an id below 0 counts from the end. An id beyond
    /// the vocabulary is never looked up.
    pub fn padding(config: &Config<'_>, vocabulary: usize) -> Result<Option<u32>, ModelError> {
        let row = |id: i64| if id < 0 { id.checked_add(vocabulary as i64) } else { Some(id) };
        let row = config.whole("pad_token_id")?.and_then(row).and_then(|row| u32::try_from(row).ok());
        Ok(row.filter(|row| (*row as usize) < vocabulary))
    }
}
