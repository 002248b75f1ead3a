//! Shapes of published models by name, without weights.
//!
//! The tests of the recipes use the same files.

use smidgen_formats::model::Model;

/// A published model without its weights.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub name: &'static str,
    /// The sizes from the model's `config.json`.
    pub config: &'static str,
}

pub const SHAPES: [Shape; 7] = [
    Shape {
        name: "qwen2.5-7b",
        config: include_str!("../../../../recipes/shapes/qwen2.5-7b-instruct/config.json"),
    },
    Shape {
        name: "qwen2.5-1.5b",
        config: include_str!("../../../../recipes/shapes/qwen2.5-1.5b-instruct/config.json"),
    },
    Shape {
        name: "qwen2.5-0.5b",
        config: include_str!("../../../../recipes/shapes/qwen2.5-0.5b-instruct/config.json"),
    },
    Shape {
        name: "llama3.1-8b",
        config: include_str!("../../../../recipes/shapes/llama-3.1-8b-instruct/config.json"),
    },
    Shape {
        name: "phi3-mini",
        config: include_str!("../../../../recipes/shapes/phi-3-mini-4k-instruct/config.json"),
    },
    Shape {
        name: "phi4-mini",
        config: include_str!("../../../../recipes/shapes/phi-4-mini-instruct/config.json"),
    },
    Shape {
        name: "smollm2-135m",
        config: include_str!("../../../../recipes/shapes/smollm2-135m/config.json"),
    },
];

impl Shape {
    pub fn find(name: &str) -> Option<&'static Shape> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// A model with this config and without weights.
    pub fn model(&self) -> Model {
        Model::from_config(self.name, serde_json::from_str(self.config).expect("shapes are JSON"))
    }
}

pub fn names() -> String {
    SHAPES.map(|shape| shape.name).join(", ")
}
