//! The keys of an adapter file: `base_model.model.`, a module path, and a suffix for the kind of tensor.
//! Every string parses and formats back to itself, so messages can quote unknown keys.
//! Left out: the adapter's name, which PEFT removes from keys on disk.

use std::fmt;

use crate::text_names::{text_name, wrapped_name};

const PREFIX: &str = "base_model.model.";

/// The kind of a tensor of an adapter file, with a module path such as `model.layers.0.self_attn.q_proj`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AdapterKey {
    /// `{path}.lora_A.weight`, shape (R, in).
    LoraA(String),
    /// `{path}.lora_B.weight`, shape (out, R).
    LoraB(String),
    /// `{path}.lora_B.bias`, shape (out): only with `lora_bias`.
    LoraBBias(String),
    /// `{path}.lora_embedding_A`, shape (R, V).
    LoraEmbeddingA(String),
    /// `{path}.lora_embedding_B`, shape (C, R).
    LoraEmbeddingB(String),
    /// `{path}.lora_magnitude_vector`, shape (out): DoRA.
    LoraMagnitude(String),
    /// `{path}.base_layer.bias`, the bias of an adapted module: `bias = "lora_only"` or `"all"`.
    BaseLayerBias(String),
    /// `{path}.bias`, the bias of a module without an adapter: `bias = "all"`. Releases of PEFT that had no
    /// `base_layer` also wrote the biases of adapted modules this way.
    ModuleBias(String),
    /// `{path}.fourier_params.weight`, shape (4): the coefficients of LS-LoRA.
    FourierWeight(String),
    /// `{path}.fourier_params.sigma`, shape (): the width of LS-LoRA.
    FourierSigma(String),
    /// `{path}.token_adapter.trainable_tokens_delta`: `trainable_token_indices`.
    TrainableTokens(String),
    /// A tensor of the base model under its own name: `modules_to_save`.
    BaseTensor(String),
    /// A whole key that does not have the prefix.
    Foreign(String),
}

type Suffix = (&'static str, fn(String) -> AdapterKey);

/// The first matching suffix counts, so the plain bias comes after the other biases.
const SUFFIXES: [Suffix; 11] = [
    (".lora_A.weight", AdapterKey::LoraA),
    (".lora_B.weight", AdapterKey::LoraB),
    (".lora_B.bias", AdapterKey::LoraBBias),
    (".lora_embedding_A", AdapterKey::LoraEmbeddingA),
    (".lora_embedding_B", AdapterKey::LoraEmbeddingB),
    (".lora_magnitude_vector", AdapterKey::LoraMagnitude),
    (".base_layer.bias", AdapterKey::BaseLayerBias),
    (".bias", AdapterKey::ModuleBias),
    (".fourier_params.weight", AdapterKey::FourierWeight),
    (".fourier_params.sigma", AdapterKey::FourierSigma),
    (".token_adapter.trainable_tokens_delta", AdapterKey::TrainableTokens),
];

/// A key of a file with the module path of a text model alone, also if the base has towers.
pub(super) fn unwrapped_key(key: &str) -> String {
    let name = key.strip_prefix(PREFIX).and_then(text_name);
    name.map_or_else(|| key.to_string(), |name| format!("{PREFIX}{name}"))
}

/// The key of a file for a base with towers.
pub(super) fn wrapped_key(key: &AdapterKey) -> String {
    let key = key.to_string();
    match key.strip_prefix(PREFIX) {
        Some(name) => format!("{PREFIX}{}", wrapped_name(name)),
        None => key,
    }
}

impl AdapterKey {
    pub fn parse(key: &str) -> AdapterKey {
        let Some(name) = key.strip_prefix(PREFIX) else {
            return AdapterKey::Foreign(key.to_string());
        };
        SUFFIXES
            .iter()
            .find_map(|(suffix, make)| {
                let path = name.strip_suffix(suffix)?;
                (!path.is_empty()).then(|| make(path.to_string()))
            })
            .unwrap_or_else(|| AdapterKey::BaseTensor(name.to_string()))
    }

    /// The key of a trained tensor of the base model, by its name there.
    pub fn of_base(name: &str) -> AdapterKey {
        AdapterKey::parse(&format!("{PREFIX}{name}"))
    }

    /// The path of the adapted module; `None` for tensors of the base model and unknown keys.
    pub fn module(&self) -> Option<&str> {
        match self {
            AdapterKey::BaseTensor(_) | AdapterKey::ModuleBias(_) | AdapterKey::Foreign(_) => None,
            AdapterKey::LoraA(path)
            | AdapterKey::LoraB(path)
            | AdapterKey::LoraBBias(path)
            | AdapterKey::LoraEmbeddingA(path)
            | AdapterKey::LoraEmbeddingB(path)
            | AdapterKey::LoraMagnitude(path)
            | AdapterKey::BaseLayerBias(path)
            | AdapterKey::FourierWeight(path)
            | AdapterKey::FourierSigma(path)
            | AdapterKey::TrainableTokens(path) => Some(path),
        }
    }

    /// The rank of a tensor of this kind and shape; `None` for kinds that do not have one.
    pub fn rank_of(&self, shape: &[usize]) -> Option<usize> {
        match (self, shape) {
            (AdapterKey::LoraA(_) | AdapterKey::LoraEmbeddingA(_), &[rank, _]) => Some(rank),
            (AdapterKey::LoraB(_) | AdapterKey::LoraEmbeddingB(_), &[_, rank]) => Some(rank),
            _ => None,
        }
    }
}

/// The key in the file.
impl fmt::Display for AdapterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdapterKey::LoraA(path) => write!(f, "{PREFIX}{path}.lora_A.weight"),
            AdapterKey::LoraB(path) => write!(f, "{PREFIX}{path}.lora_B.weight"),
            AdapterKey::LoraBBias(path) => write!(f, "{PREFIX}{path}.lora_B.bias"),
            AdapterKey::LoraEmbeddingA(path) => write!(f, "{PREFIX}{path}.lora_embedding_A"),
            AdapterKey::LoraEmbeddingB(path) => write!(f, "{PREFIX}{path}.lora_embedding_B"),
            AdapterKey::LoraMagnitude(path) => write!(f, "{PREFIX}{path}.lora_magnitude_vector"),
            AdapterKey::BaseLayerBias(path) => write!(f, "{PREFIX}{path}.base_layer.bias"),
            AdapterKey::ModuleBias(path) => write!(f, "{PREFIX}{path}.bias"),
            AdapterKey::FourierWeight(path) => write!(f, "{PREFIX}{path}.fourier_params.weight"),
            AdapterKey::FourierSigma(path) => write!(f, "{PREFIX}{path}.fourier_params.sigma"),
            AdapterKey::TrainableTokens(path) => {
                write!(f, "{PREFIX}{path}.token_adapter.trainable_tokens_delta")
            }
            AdapterKey::BaseTensor(name) => write!(f, "{PREFIX}{name}"),
            AdapterKey::Foreign(key) => f.write_str(key),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_parse_to_their_kind_and_format_back() {
        let check = |key: &str, expected: AdapterKey| {
            let parsed = AdapterKey::parse(key);
            assert_eq!(parsed, expected);
            assert_eq!(parsed.to_string(), key);
        };
        let q = || "model.layers.0.self_attn.q_proj".to_string();
        let at = "base_model.model.model.layers.0.self_attn.q_proj";
        check(&format!("{at}.lora_A.weight"), AdapterKey::LoraA(q()));
        check(&format!("{at}.lora_B.weight"), AdapterKey::LoraB(q()));
        check(&format!("{at}.lora_B.bias"), AdapterKey::LoraBBias(q()));
        check(&format!("{at}.lora_magnitude_vector"), AdapterKey::LoraMagnitude(q()));
        check(&format!("{at}.base_layer.bias"), AdapterKey::BaseLayerBias(q()));
        check(
            "base_model.model.model.embed_tokens.lora_embedding_A",
            AdapterKey::LoraEmbeddingA("model.embed_tokens".to_string()),
        );
        check(
            "base_model.model.model.embed_tokens.lora_embedding_B",
            AdapterKey::LoraEmbeddingB("model.embed_tokens".to_string()),
        );
        check(
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            AdapterKey::TrainableTokens("model.embed_tokens".to_string()),
        );
        check("base_model.model.lm_head.weight", AdapterKey::BaseTensor("lm_head.weight".to_string()));
        check(&format!("{at}.bias"), AdapterKey::ModuleBias(q()));
        check(&format!("{at}.fourier_params.weight"), AdapterKey::FourierWeight(q()));
        check(&format!("{at}.fourier_params.sigma"), AdapterKey::FourierSigma(q()));
        check(
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            AdapterKey::Foreign("model.layers.0.self_attn.q_proj.lora_A.weight".to_string()),
        );
        check("base_model.model..lora_A.weight", AdapterKey::BaseTensor(".lora_A.weight".to_string()));
        check("base_model.model.lora_A.weight", AdapterKey::BaseTensor("lora_A.weight".to_string()));
    }

    #[test]
    fn the_rank_is_the_first_extent_of_a_and_the_second_of_b() {
        let path = || "x".to_string();
        assert_eq!(AdapterKey::LoraA(path()).rank_of(&[8, 64]), Some(8));
        assert_eq!(AdapterKey::LoraB(path()).rank_of(&[64, 8]), Some(8));
        assert_eq!(AdapterKey::LoraA(path()).rank_of(&[8]), None);
        assert_eq!(AdapterKey::LoraMagnitude(path()).rank_of(&[64]), None);
        assert_eq!(AdapterKey::LoraMagnitude(path()).module(), Some("x"));
        assert_eq!(AdapterKey::BaseTensor(path()).module(), None);
    }
}
