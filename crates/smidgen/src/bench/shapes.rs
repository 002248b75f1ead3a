//! Shapes of published models, known by name.
//!
//! The same files serve the recipes' tests; weights are nowhere.

/// A name, and the model's `config.json` as far as it describes sizes.
pub const SHAPES: [(&str, &str); 7] = [
    ("qwen2.5-7b", include_str!("../../../../recipes/shapes/qwen2.5-7b-instruct/config.json")),
    ("qwen2.5-1.5b", include_str!("../../../../recipes/shapes/qwen2.5-1.5b-instruct/config.json")),
    ("qwen2.5-0.5b", include_str!("../../../../recipes/shapes/qwen2.5-0.5b-instruct/config.json")),
    ("llama3.1-8b", include_str!("../../../../recipes/shapes/llama-3.1-8b-instruct/config.json")),
    ("phi3-mini", include_str!("../../../../recipes/shapes/phi-3-mini-4k-instruct/config.json")),
    ("phi4-mini", include_str!("../../../../recipes/shapes/phi-4-mini-instruct/config.json")),
    ("smollm2-135m", include_str!("../../../../recipes/shapes/smollm2-135m/config.json")),
];

pub fn find(name: &str) -> Option<&'static str> {
    SHAPES.iter().find(|(own, _)| *own == name).map(|(_, config)| *config)
}

pub fn names() -> String {
    SHAPES.map(|(name, _)| name).join(", ")
}
