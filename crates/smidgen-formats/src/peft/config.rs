//! Reads and writes `adapter_config.json` of LoRA and LS-LoRA adapters.
//! Reading follows PEFT: only `peft_type` is required, absent and null keys have PEFT's defaults, unknown
//! keys are kept. Only keys that old and new readers know are written, formatted as PEFT does (two spaces,
//! sorted, no final newline). The first matching pattern, in file order, sets the rank or alpha of a module.
//! Left out: which modules `target_modules` selects; it is kept as a JSON value.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::pattern::{ModulePattern, PatternError};
use super::python_json::render_python_json;
use crate::json_file::{Entries, JsonFileError, MAX_CONFIG_BYTES, parse_json, read_bytes};

/// The fields are named like the JSON keys.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterConfig {
    pub task_type: Option<String>,
    pub base_model_name_or_path: Option<String>,
    pub revision: Option<String>,
    pub inference_mode: bool,
    pub r: usize,
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    /// A list of suffixes or full paths, a string that is a Python regex or `all-linear`, or null.
    pub target_modules: Value,
    pub bias: Bias,
    pub fan_in_fan_out: bool,
    /// Parameters that are no weights of linears: those of all experts.
    pub target_parameters: Vec<String>,
    pub modules_to_save: Option<Vec<String>>,
    pub init_lora_weights: Value,
    pub use_rslora: bool,
    pub use_dora: bool,
    /// In file order; the first match wins.
    pub rank_pattern: Vec<(String, usize)>,
    pub alpha_pattern: Vec<(String, f64)>,
    pub layers_to_transform: Value,
    pub layers_pattern: Value,
    /// Set if `peft_type` is `LSLORA`, which applies a Fourier function to the adapter's output; otherwise it
    /// is `LORA`.
    pub fourier: Option<FourierConfig>,
    /// Whether the base has towers, so that module paths in the file have its prefix. Tensors show it, not this file.
    pub is_wrapped: bool,
    /// All other keys, as read. They are not written.
    pub other: Map<String, Value>,
}

/// The keys that LS-LoRA adds to the config of a LoRA. There is also `fourier_position`, which says where the
/// function is applied; the only supported place is after `B` and the scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FourierConfig {
    /// `fourier_reg_weight`: the weight of the regularization towards the coefficients of a plain LoRA.
    pub reg_weight: f64,
    /// `init_sigma`: the initial width of each module.
    pub init_sigma: f64,
}

/// The defaults of the public LS-LoRA, which does not write these keys.
impl Default for FourierConfig {
    fn default() -> FourierConfig {
        FourierConfig { reg_weight: 0.01, init_sigma: 1.0 }
    }
}

/// Real alphas are below a thousand. With one above this limit, rounding errors of the adapter would dominate
/// the merged weight.
const MOST_ALPHA: f64 = 1e6;

const FOURIER_POSITION: &str = "after_scaling";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bias {
    #[default]
    None,
    All,
    LoraOnly,
}

#[derive(Debug, Error)]
pub enum AdapterConfigError {
    #[error(transparent)]
    Json(#[from] JsonFileError),
    #[error("`{}` is of type `{peft_type}`; only `LORA` and `LSLORA` adapters are supported", path.display())]
    NotLora { path: PathBuf, peft_type: String },
    #[error("`{}` sets rank 0 in `{key}`; a rank must be at least 1", path.display())]
    RankZero { path: PathBuf, key: String },
    #[error(
        "`{}` sets alpha {alpha} in `{key}`; an alpha must be a number from -{MOST_ALPHA} to {MOST_ALPHA}", path.display()
    )]
    Alpha { path: PathBuf, key: String, alpha: f64 },
    #[error(
        "`{}` applies its Fourier function at `{position}`; only `{FOURIER_POSITION}` is supported", path.display()
    )]
    FourierPosition { path: PathBuf, position: String },
}

impl AdapterConfig {
    /// The config that PEFT would save for an adapter of a causal language model, with PEFT's defaults for
    /// all other keys.
    pub fn new(r: usize, lora_alpha: f64, target_modules: &[String]) -> AdapterConfig {
        AdapterConfig {
            task_type: Some("CAUSAL_LM".to_string()),
            inference_mode: true,
            r,
            lora_alpha,
            target_modules: target_modules.into(),
            ..AdapterConfig::default()
        }
    }

    /// Reads a config file of any name.
    pub fn read(path: &Path) -> Result<AdapterConfig, AdapterConfigError> {
        let bytes = read_bytes(path, MAX_CONFIG_BYTES)?;
        let json: ConfigJson = parse_json(path, &bytes)?;
        let is_fourier = match json.peft_type.as_str() {
            "LORA" => false,
            "LSLORA" => true,
            _ => {
                return Err(AdapterConfigError::NotLora {
                    path: path.to_path_buf(),
                    peft_type: json.peft_type,
                });
            }
        };
        let mut config = with_defaults(json);
        config.other = parse_json(path, &bytes)?;
        config.other.retain(|key, _| !KNOWN_KEYS.contains(&key.as_str()));
        if is_fourier {
            config.fourier = Some(read_fourier(path, &bytes)?);
            config.other.retain(|key, _| !FOURIER_KEYS.contains(&key.as_str()));
        }
        check_numbers(path, &config)?;
        Ok(config)
    }

    /// The text of `adapter_config.json`. Patterns are sorted by key, as in PEFT.
    pub fn to_json(&self) -> String {
        let ranks: BTreeMap<_, _> = self.rank_pattern.iter().map(|(key, rank)| (key, *rank)).collect();
        let alphas: BTreeMap<_, _> =
            self.alpha_pattern.iter().map(|(key, alpha)| (key, number(*alpha))).collect();
        let mut keys: BTreeMap<&str, Value> = BTreeMap::from([
            ("alpha_pattern", json!(alphas)),
            ("base_model_name_or_path", self.base_model_name_or_path.clone().into()),
            ("bias", json!(self.bias)),
            ("fan_in_fan_out", self.fan_in_fan_out.into()),
            ("inference_mode", self.inference_mode.into()),
            ("init_lora_weights", self.init_lora_weights.clone()),
            ("layers_pattern", self.layers_pattern.clone()),
            ("layers_to_transform", self.layers_to_transform.clone()),
            ("lora_alpha", number(self.lora_alpha)),
            ("lora_dropout", self.lora_dropout.into()),
            ("modules_to_save", self.modules_to_save.clone().into()),
            ("peft_type", "LORA".into()),
            ("r", self.r.into()),
            ("rank_pattern", json!(ranks)),
            ("revision", self.revision.clone().into()),
            ("target_modules", self.target_modules.clone()),
            ("task_type", self.task_type.clone().into()),
            ("use_dora", self.use_dora.into()),
            ("use_rslora", self.use_rslora.into()),
        ]);
        if !self.target_parameters.is_empty() {
            keys.insert("target_parameters", self.target_parameters.clone().into());
        }
        if let Some(FourierConfig { reg_weight, init_sigma }) = self.fourier {
            keys.insert("peft_type", "LSLORA".into());
            keys.insert("fourier_position", FOURIER_POSITION.into());
            keys.insert("fourier_reg_weight", reg_weight.into());
            keys.insert("init_sigma", init_sigma.into());
        }
        render_python_json(&keys)
    }

    pub fn module_scales(&self) -> Result<ModuleScales, PatternError> {
        fn compile<T: Copy>(entries: &[(String, T)]) -> Result<Vec<(ModulePattern, T)>, PatternError> {
            let compiled = entries.iter().map(|(key, value)| Ok((ModulePattern::new(key)?, *value)));
            compiled.collect()
        }
        Ok(ModuleScales {
            ranks: compile(&self.rank_pattern)?,
            rank: self.r,
            alphas: compile(&self.alpha_pattern)?,
            alpha: self.lora_alpha,
            use_rslora: self.use_rslora,
        })
    }
}

fn check_numbers(path: &Path, config: &AdapterConfig) -> Result<(), AdapterConfigError> {
    let path = || path.to_path_buf();
    let ranks = config.rank_pattern.iter().map(|(key, rank)| (key.as_str(), *rank));
    if let Some((key, _)) = [("r", config.r)].into_iter().chain(ranks).find(|(_, rank)| *rank == 0) {
        return Err(AdapterConfigError::RankZero { path: path(), key: key.to_string() });
    }
    let alphas = config.alpha_pattern.iter().map(|(key, alpha)| (key.as_str(), *alpha));
    let is_too_large = |alpha: f64| !alpha.is_finite() || alpha.abs() > MOST_ALPHA;
    let mut alphas = [("lora_alpha", config.lora_alpha)].into_iter().chain(alphas);
    match alphas.find(|(_, alpha)| is_too_large(*alpha)) {
        Some((key, alpha)) => Err(AdapterConfigError::Alpha { path: path(), key: key.to_string(), alpha }),
        None => Ok(()),
    }
}

/// PEFT's defaults.
impl Default for AdapterConfig {
    fn default() -> AdapterConfig {
        AdapterConfig {
            task_type: None,
            base_model_name_or_path: None,
            revision: None,
            inference_mode: false,
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            target_modules: Value::Null,
            bias: Bias::None,
            fan_in_fan_out: false,
            target_parameters: Vec::new(),
            modules_to_save: None,
            init_lora_weights: Value::Bool(true),
            use_rslora: false,
            use_dora: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            layers_to_transform: Value::Null,
            layers_pattern: Value::Null,
            fourier: None,
            is_wrapped: false,
            other: Map::new(),
        }
    }
}

/// The rank and alpha of each module, with compiled patterns.
#[derive(Clone, Debug)]
pub struct ModuleScales {
    ranks: Vec<(ModulePattern, usize)>,
    rank: usize,
    alphas: Vec<(ModulePattern, f64)>,
    alpha: f64,
    use_rslora: bool,
}

impl ModuleScales {
    pub fn rank_for(&self, module_path: &str) -> usize {
        first_match(&self.ranks, module_path).unwrap_or(self.rank)
    }

    pub fn alpha_for(&self, module_path: &str) -> f64 {
        first_match(&self.alphas, module_path).unwrap_or(self.alpha)
    }

    /// The factor of B·A.
    pub fn scaling_for(&self, module_path: &str) -> f64 {
        let rank = self.rank_for(module_path) as f64;
        self.alpha_for(module_path) / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

fn first_match<T: Copy>(patterns: &[(ModulePattern, T)], module_path: &str) -> Option<T> {
    let found = patterns.iter().find(|(pattern, _)| pattern.matches(module_path));
    found.map(|(_, value)| *value)
}

macro_rules! config_json {
    ($($key:ident: $type:ty,)*) => {
        #[derive(Deserialize)]
        #[serde(expecting = "an object of settings")]
        struct ConfigJson {
            peft_type: String,
            $($key: Option<$type>,)*
        }

        const KNOWN_KEYS: &[&str] = &["peft_type", $(stringify!($key),)*];

        /// Absent and null keys take the default.
        fn with_defaults(json: ConfigJson) -> AdapterConfig {
            let mut config = AdapterConfig::default();
            $(if let Some(value) = json.$key {
                config.$key = value.into();
            })*
            config
        }
    };
}

config_json! {
    task_type: String,
    base_model_name_or_path: String,
    revision: String,
    inference_mode: bool,
    r: usize,
    lora_alpha: f64,
    lora_dropout: f64,
    target_modules: Value,
    bias: Bias,
    fan_in_fan_out: bool,
    target_parameters: Vec<String>,
    modules_to_save: Vec<String>,
    init_lora_weights: Value,
    use_rslora: bool,
    use_dora: bool,
    rank_pattern: Entries<usize>,
    alpha_pattern: Entries<f64>,
    layers_to_transform: Value,
    layers_pattern: Value,
}

const FOURIER_KEYS: [&str; 3] = ["fourier_position", "fourier_reg_weight", "init_sigma"];

#[derive(Deserialize)]
struct FourierJson {
    fourier_position: Option<String>,
    fourier_reg_weight: Option<f64>,
    init_sigma: Option<f64>,
}

fn read_fourier(path: &Path, bytes: &[u8]) -> Result<FourierConfig, AdapterConfigError> {
    let json: FourierJson = parse_json(path, bytes)?;
    match json.fourier_position {
        Some(position) if position != FOURIER_POSITION => {
            Err(AdapterConfigError::FourierPosition { path: path.to_path_buf(), position })
        }
        _ => {
            let default = FourierConfig::default();
            Ok(FourierConfig {
                reg_weight: json.fourier_reg_weight.unwrap_or(default.reg_weight),
                init_sigma: json.init_sigma.unwrap_or(default.init_sigma),
            })
        }
    }
}

/// Whole numbers become integers, because old readers expect an integer alpha.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { Value::from(value as i64) } else { Value::from(value) }
}
