//! What transformers knows about a `model_type` without its config: the form of a row of `FAMILIES`.
//!
//! A key that is absent means the default of the family's class; `null` means none.
//! Left out: the rows (`mod.rs`), and how a config becomes a decoder, which is the function of a row (`read`).

use super::config::Config;
use super::spec::DecoderSpec;
use crate::error::ModelError;

pub type ReadSpec = fn(&Config, &Family) -> Result<DecoderSpec, ModelError>;

#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub name: &'static str,
    pub read: ReadSpec,
    pub norm_eps: f64,
    pub tied_head: bool,
    pub max_positions: usize,
    /// Whether `num_key_value_heads` may be absent: then there are as many as heads. Other classes have numbers of their
    /// own, which fit few models, so the key is required.
    pub has_kv_default: bool,
    /// `sliding_window`; `None` means all keys.
    pub window: Option<usize>,
    /// `pad_token_id`; `None` means no padding.
    pub pad_token: Option<u32>,
    /// Whether `partial_rotary_factor` decides how many channels of a head are rotated.
    pub partial_rotary: bool,
}

impl Family {
    /// The row of the embedding that lookups do not train. As in PyTorch, an id below 0 counts from the end. An id beyond
    /// the vocabulary is never looked up.
    pub fn padding(&self, config: &Config<'_>, vocabulary: usize) -> Result<Option<u32>, ModelError> {
        let id = match config.has("pad_token_id") {
            true => config.whole("pad_token_id")?,
            false => self.pad_token.map(i64::from),
        };
        let row = |id: i64| if id < 0 { id.checked_add(vocabulary as i64) } else { Some(id) };
        let row = id.and_then(row).and_then(|row| u32::try_from(row).ok());
        Ok(row.filter(|row| (*row as usize) < vocabulary))
    }

    /// `sliding_window`, whose absence is not the same as null.
    pub fn window(&self, config: &Config<'_>) -> Result<Option<usize>, ModelError> {
        match config.has("sliding_window") {
            true => config.size("sliding_window"),
            false => Ok(self.window),
        }
    }
}
