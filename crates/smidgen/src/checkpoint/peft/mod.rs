//! LoRA adapters as the PEFT library stores them: a config, and tensors whose keys spell out module paths.
//! An adapter read here starts a run; an adapter written here loads in PEFT and in what reads its format.
//! Left out: every other kind of PEFT, matching `target_modules` against a model, and the mathematics.

mod config;
mod file;
mod key;
mod matching;
mod pattern;
mod write;

#[cfg(test)]
mod config_tests;
#[cfg(test)]
mod file_tests;

pub use config::{AdapterConfig, AdapterConfigError, Bias, ModuleScales};
pub use file::{AdapterError, AdapterFile};
pub use key::AdapterKey;
pub use matching::{AdapterMismatch, ExpectedTensor, ShapeMismatch, match_adapter};
pub use pattern::{ModulePattern, PatternError};
pub use write::{AdapterTensor, WriteAdapterError, check_agreement, write_adapter};
