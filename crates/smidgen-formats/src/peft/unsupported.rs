//! Settings in an adapter's config that are not supported, each with the reason.
//! All of them change the computation or the base model, so applying A and B alone would give wrong results.
//! Adapter folders with such a setting are refused when they are opened; `AdapterConfig::read` accepts them.
//! Left out: kinds of PEFT other than LoRA, which are refused by their `peft_type`.

use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

use super::config::AdapterConfig;
use super::experts;

/// One key of the config, and the reason why it is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsupported {
    pub key: &'static str,
    pub reason: &'static str,
}

/// Everything unsupported in one adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedAdapter {
    pub path: PathBuf,
    pub found: Vec<Unsupported>,
}

impl std::error::Error for UnsupportedAdapter {}

impl fmt::Display for UnsupportedAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the adapter in `{}` cannot be read as LoRA", self.path.display())?;
        self.found.iter().try_for_each(|Unsupported { key, reason }| write!(f, "\n  `{key}`: {reason}"))
    }
}

/// These keys are off if they are absent, null, false or empty.
const VARIANTS: [Unsupported; 11] = [
    Unsupported { key: "alora_invocation_tokens", reason: "the adapter acts only after certain tokens" },
    Unsupported { key: "arrow_config", reason: "a router mixes several adapters" },
    Unsupported { key: "kasa_config", reason: "the base weights lose their smallest singular values first" },
    Unsupported { key: "layer_replication", reason: "layers of the base are repeated" },
    Unsupported { key: "lora_bias", reason: "B has a bias of its own" },
    Unsupported {
        key: "megatron_config",
        reason: "the linear layers are split over devices, as in Megatron",
    },
    Unsupported { key: "monteclora_config", reason: "A and B are drawn at random around what is stored" },
    Unsupported { key: "trainable_token_indices", reason: "single rows of the embedding were trained" },
    Unsupported { key: "use_bdlora", reason: "A or B is block-diagonal and stored as its blocks" },
    Unsupported { key: "use_qalora", reason: "the input is averaged in groups before A" },
    Unsupported { key: "velora_config", reason: "gradients pass through a compressed input" },
];

impl AdapterConfig {
    /// The keys that are set and are not supported.
    pub fn unsupported(&self) -> Vec<Unsupported> {
        let is_off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        let mut found: Vec<Unsupported> = (VARIANTS.iter().copied())
            .filter(|variant| self.other.get(variant.key).is_some_and(|value| !is_off(value)))
            .collect();
        let mut add = |set: bool, key, reason| {
            if set {
                found.push(Unsupported { key, reason });
            }
        };
        // PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract the initial adapter from the base weights.
        let changes_base = match self.init_lora_weights.as_str() {
            None | Some("gaussian" | "orthogonal" | "eva" | "true" | "false") => false,
            Some(_) => true,
        };
        add(
            changes_base,
            "init_lora_weights",
            "this initialization changed the base weights, which the adapter needs",
        );
        let is_other = |target: &String| !experts::is_parameter(target);
        add(
            self.target_parameters.iter().any(is_other),
            "target_parameters",
            "parameters other than those of experts are adapted",
        );
        add(self.fan_in_fan_out, "fan_in_fan_out", "the base weights are stored transposed, as GPT-2's are");
        add(self.fourier.is_some() && self.use_dora, "use_dora", "LS-LoRA has no magnitudes");
        found
    }
}
