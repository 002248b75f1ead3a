//! Names of a text model inside a checkpoint that also has towers for images or sound.
//!
//! Such a config has its text model in `text_config`, and its tensors are below `model.language_model.`, or below
//! `language_model.` in uploads of older releases. Everything else here uses the names of a text model alone, `model.layers.…`;
//! they are translated where checkpoints and adapters are read and written.
//! Left out: what the config means.

use serde_json::Value;

const PREFIXES: [(&str, &str); 4] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
];

/// Whether a config describes a text model beside towers.
pub fn is_wrapped(config: &Value) -> bool {
    config.get("text_config").is_some_and(Value::is_object)
}

/// The name in a text model alone of a tensor or module of a wrapped one; `None` for a part of a tower.
pub fn text_name(wrapped: &str) -> Option<String> {
    PREFIXES.iter().find_map(|(from, to)| Some(format!("{to}{}", wrapped.strip_prefix(from)?)))
}

/// The name that transformers gives to a tensor or module of the text model in a wrapped one.
pub fn wrapped_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated_both_ways() {
        for (wrapped, name) in [
            ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
            ("model.language_model.norm.weight", "model.norm.weight"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(text_name(wrapped).as_deref(), Some(name));
            assert_eq!(wrapped_name(name), wrapped);
        }
        let older = ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"];
        assert_eq!(
            older.map(text_name),
            ["model.embed_tokens.weight", "lm_head.weight"].map(|name| Some(name.into()))
        );
        for tower in
            ["model.vision_tower.layers.0.weight", "multi_modal_projector.linear.weight", "visual.pos_embed"]
        {
            assert_eq!(text_name(tower), None, "{tower}");
        }
    }
}
