//! Settings of an adapter's config that are not supported, each with the reason.
//! All of them change the function or the base, so A and B alone would mean something else.
//! An adapter folder with one is refused when it is opened; `AdapterConfig::read` alone accepts it.
//! Left out: kinds of PEFT other than LoRA, which are refused by their `peft_type`.

use std::fmt;
use std::path::PathBuf;

use serde_json::Value;

use super::config::AdapterConfig;

/// One key of the config, and what it would mean.
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

/// Keys that are off when absent, null, false or empty.
const VARIANTS: [Unsupported; 12] = [
    Unsupported { key: "alora_invocation_tokens", reason: "the adapter acts only after certain tokens" },
    Unsupported { key: "arrow_config", reason: "a router mixes several adapters" },
    Unsupported { key: "kasa_config", reason: "the base weights lose their smallest singular values first" },
    Unsupported { key: "layer_replication", reason: "layers of the base are repeated" },
    Unsupported { key: "lora_bias", reason: "B has a bias of its own" },
    Unsupported { key: "megatron_config", reason: "the linears are Megatron's, split over devices" },
    Unsupported { key: "monteclora_config", reason: "A and B are drawn at random around what is stored" },
    Unsupported {
        key: "target_parameters",
        reason: "parameters other than the weights of linear layers are adapted",
    },
    Unsupported { key: "trainable_token_indices", reason: "single rows of the embedding were trained" },
    Unsupported { key: "use_bdlora", reason: "A or B is block-diagonal and stored as its blocks" },
    Unsupported { key: "use_qalora", reason: "the input is averaged in groups before A" },
    Unsupported { key: "velora_config", reason: "gradients pass through a compressed input" },
];

impl AdapterConfig {
    /// Keys that are set and make the adapter mean something else than what its kind says, on the unchanged base.
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
        // PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take the first adapter out of the base weights.
        let changes_base = match self.init_lora_weights.as_str() {
            None | Some("gaussian" | "orthogonal" | "eva" | "true" | "false") => false,
            Some(_) => true,
        };
        add(changes_base, "init_lora_weights", "the adapter belongs to base weights that its start changed");
        add(self.fan_in_fan_out, "fan_in_fan_out", "the base weights are stored transposed, as GPT-2's are");
        add(self.fourier.is_some() && self.use_dora, "use_dora", "LS-LoRA has no magnitudes");
        found
    }
}
