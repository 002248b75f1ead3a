//! What transformers knows about a `model_type` without its config: one row per family.
//!
//! A key that is absent means the default of the family's class; `null` means none. Keys that no class of the family
//! reads are ignored there too, which [`ignored_keys`] says, and so is a key that has no meaning here.
//! Left out: how the config becomes a decoder, which is the function of the row (`read`).

use super::config::Config;
use super::spec::DecoderSpec;
use super::{gemma2, gemma3, llama, mistral, phi3, phi4_multimodal, phi4mm, qwen2, qwen3};
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
    /// `sliding_window`; `None` means all keys.
    pub window: Option<usize>,
    /// `pad_token_id`; `None` means no padding.
    pub pad_token: Option<u32>,
    /// Whether `partial_rotary_factor` decides how many channels of a head are rotated.
    pub partial_rotary: bool,
}

/// Llama's class. The other rows say what differs.
const LLAMA: Family = Family {
    name: "llama",
    read: llama::read_spec,
    norm_eps: 1e-6,
    tied_head: false,
    max_positions: 2048,
    window: None,
    pad_token: None,
    partial_rotary: false,
};
const QWEN2: Family =
    Family { name: "qwen2", read: qwen2::read_spec, max_positions: 32_768, window: Some(4096), ..LLAMA };
const MISTRAL: Family =
    Family { name: "mistral", read: mistral::read_spec, max_positions: 131_072, window: Some(4096), ..LLAMA };
const PHI3: Family = Family {
    name: "phi3",
    read: phi3::read_spec,
    norm_eps: 1e-5,
    max_positions: 4096,
    pad_token: Some(32_000),
    partial_rotary: true,
    ..LLAMA
};
const PHI4_MULTIMODAL: Family = Family {
    name: "phi4_multimodal",
    read: phi4_multimodal::read_spec,
    max_positions: 131_072,
    pad_token: Some(199_999),
    ..PHI3
};
const GEMMA2: Family = Family {
    name: "gemma2",
    read: gemma2::read_spec,
    tied_head: true,
    max_positions: 8192,
    window: Some(4096),
    pad_token: Some(0),
    ..LLAMA
};

pub const FAMILIES: [Family; 9] = [
    LLAMA,
    QWEN2,
    Family { name: "qwen3", read: qwen3::read_spec, ..QWEN2 },
    MISTRAL,
    PHI3,
    PHI4_MULTIMODAL,
    Family { name: "phi4mm", read: phi4mm::read_spec, ..PHI4_MULTIMODAL },
    GEMMA2,
    Family { name: "gemma3_text", read: gemma3::read_spec, max_positions: 131_072, ..GEMMA2 },
];

/// The family of a config.
pub fn family_of(config: &Config<'_>) -> Result<&'static Family, ModelError> {
    const ALL: &[Family] = &FAMILIES;
    let model_type = config.text("model_type")?.ok_or(ModelError::Missing { key: "model_type" })?;
    ALL.iter().find(|family| family.name == model_type).ok_or_else(|| ModelError::UnknownArchitecture {
        model_type: model_type.to_string(),
        supported: FAMILIES.map(|family| family.name).join(", "),
    })
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

/// Keys of a config that say something and change nothing, each with the reason; transformers ignores them too.
pub fn ignored_keys(config: &serde_json::Value) -> Result<Vec<String>, ModelError> {
    let config = Config::new(config)?;
    let family = family_of(&config)?;
    let mut ignored = Vec::new();
    let key = "partial_rotary_factor";
    if !family.partial_rotary && config.rotary_shares()?.iter().any(|share| *share != 1.0) {
        let name = family.name;
        ignored.push(format!(
            "`{key}` in config.json is ignored, as in transformers: {name} models rotate whole heads"
        ));
    }
    Ok(ignored)
}
