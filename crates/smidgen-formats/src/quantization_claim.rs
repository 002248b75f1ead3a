//! Which linears of a checkpoint are quantized according to `quantization_config`, as transformers reads it.
//!
//! A module is left out if a pattern of `llm_int8_skip_modules` (bitsandbytes) or `modules_to_not_convert`
//! (fp8) is the end of its path, or matches the beginning up to a dot or the end. The head is left out of the
//! question: whether it is quantized by default depends on the versions of the tools.
//! Left out: methods that are not supported, which are refused where the config is read.

use regex::bytes::{Regex, RegexBuilder};
use serde_json::Value;

/// The most memory that a compiled pattern may take.
const MAX_COMPILED_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub struct QuantizationClaim {
    /// `quant_method`.
    pub method: String,
    /// The key that lists modules that are not quantized.
    pub skip_key: &'static str,
    skips: Vec<Skip>,
}

#[derive(Debug)]
enum Skip {
    Path(String),
    Pattern { end: String, beginning: Regex },
}

impl QuantizationClaim {
    /// `None` if the config claims nothing; an error if a pattern cannot be read.
    pub fn of_config(config: &Value) -> Result<Option<QuantizationClaim>, String> {
        let table = &config["quantization_config"];
        // Of other methods, the names of tensors say which linears are quantized.
        let methods = |method: &&str| matches!(*method, "bitsandbytes" | "fp8");
        let Some(method) = table["quant_method"].as_str().filter(methods) else { return Ok(None) };
        let skip_key = match method {
            "bitsandbytes" => "llm_int8_skip_modules",
            _ => "modules_to_not_convert",
        };
        let keys = match &table[skip_key] {
            Value::Null => vec![],
            Value::Array(keys) => keys.iter().collect(),
            other => vec![other],
        };
        let skips = keys.into_iter().map(|key| {
            let unreadable = || {
                format!("`quantization_config.{skip_key}` has {key}, which is not a pattern of module names")
            };
            key.as_str().and_then(Skip::of_key).ok_or_else(unreadable)
        });
        Ok(Some(QuantizationClaim {
            method: method.to_owned(),
            skip_key,
            skips: skips.collect::<Result<_, _>>()?,
        }))
    }

    /// Whether the linear with this path is quantized.
    pub fn covers(&self, module_path: &str) -> bool {
        !self.skips.iter().any(|skip| skip.matches(module_path))
    }
}

impl Skip {
    fn of_key(key: &str) -> Option<Skip> {
        let is_plain = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '-' | '.');
        if key.chars().all(is_plain) {
            return Some(Skip::Path(key.to_owned()));
        }
        let border = if key.ends_with('.') { "" } else { r"(\.|$)" };
        let beginning = RegexBuilder::new(&format!("^(?:{key}){border}"))
            .unicode(false)
            .size_limit(MAX_COMPILED_BYTES)
            .dfa_size_limit(MAX_COMPILED_BYTES)
            .build()
            .ok()?;
        Some(Skip::Pattern { end: key.to_owned(), beginning })
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Skip::Path(key) => {
                let ends_a_name = |rest: &str| rest.is_empty() || rest.starts_with('.') || key.ends_with('.');
                path.ends_with(key) || path.strip_prefix(key.as_str()).is_some_and(ends_a_name)
            }
            Skip::Pattern { end, beginning } => path.ends_with(end) || beginning.is_match(path.as_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PATH: &str = "model.layers.1.mlp.down_proj";

    fn covers(skips: Value) -> bool {
        let config = json!({"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": skips}});
        QuantizationClaim::of_config(&config).unwrap().unwrap().covers(PATH)
    }

    #[test]
    fn modules_are_left_out_as_in_transformers() {
        for skipped in [
            "down_proj",
            "proj",
            "model.layers.1",
            "model.layers.1.mlp",
            PATH,
            "model.layers.*",
            "model.layers.[01].mlp",
        ] {
            assert!(!covers(json!(["lm_head", skipped])), "{skipped}");
        }
        for other in
            ["lm_head", "layers.1", "model.layers.11", "model.layers", "up_proj", "model.layers.[2-9]"]
        {
            assert_eq!(covers(json!([other])), other != "model.layers", "{other}");
        }
        assert!(covers(Value::Null) && covers(json!([])));
    }

    #[test]
    fn a_config_may_claim_nothing_or_something_unreadable() {
        assert!(QuantizationClaim::of_config(&json!({"quantization_config": null})).unwrap().is_none());
        let config = |skips: Value| json!({"quantization_config": {"quant_method": "bitsandbytes", "llm_int8_skip_modules": skips}});
        let claim = QuantizationClaim::of_config(&config(json!(["mlp.down_proj"]))).unwrap().unwrap();
        assert!(claim.method == "bitsandbytes" && !claim.covers(PATH));
        for wrong in [json!(["("]), json!([1]), json!({})] {
            let error = QuantizationClaim::of_config(&config(wrong)).unwrap_err();
            assert!(error.contains("which is not a pattern of module names"), "{error}");
        }
    }
}
