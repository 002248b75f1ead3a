//! LoRA, DoRA and LS-LoRA adapters in the format of the PEFT library: a config, and tensors whose keys
//! contain module paths. Adapters that are read here can start a run; adapters that are written here load in
//! PEFT and in other readers of its format.
//! Left out: other kinds of PEFT, matching `target_modules` against a model, and the math.

mod config;
mod experts;
mod file;
mod key;
mod kind;
mod matching;
mod modules;
mod pattern;
pub mod python_json;
mod unsupported;
mod write;

#[cfg(test)]
mod config_tests;
#[cfg(test)]
mod file_tests;

pub use config::{AdapterConfig, AdapterConfigError, Bias, FourierConfig, ModuleScales};
pub use experts::{is_of_experts, key_in_file};
pub use file::{AdapterError, AdapterFile};
pub use key::AdapterKey;
pub use kind::StoredKind;
pub use matching::{AdapterMismatch, ExpectedTensor, ShapeMismatch, match_adapter};
pub use modules::{
    AdapterModule, AdapterModules, IncompleteAdapter, is_saved_module, read_modules, split_layer,
};
pub use pattern::{ModulePattern, PatternError};
pub use unsupported::{Unsupported, UnsupportedAdapter};
pub use write::{AdapterTensor, WriteAdapterError, check_agreement, write_adapter};
