//! What a run makes: an adapter, or with full training a whole model.
//!
//! Names of folders and files, and the words for it; what is inside is written by `train/`.

use smidgen_recipe::{AdapterKind, Recipe};

/// What a run makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    Adapter,
    Model,
}

impl Product {
    pub fn of(recipe: &Recipe) -> Product {
        match recipe.adapter.kind {
            AdapterKind::Lora | AdapterKind::RsLora | AdapterKind::Dora | AdapterKind::LsLora => {
                Product::Adapter
            }
            AdapterKind::Full => Product::Model,
        }
    }

    /// Its folder in that of the run, which is also the word for it.
    pub fn folder(self) -> &'static str {
        match self {
            Product::Adapter => "adapter",
            Product::Model => "model",
        }
    }

    /// The word with its article.
    pub fn one(self) -> &'static str {
        match self {
            Product::Adapter => "an adapter",
            Product::Model => "a model",
        }
    }

    /// The file without which it is none.
    pub fn config(self) -> &'static str {
        match self {
            Product::Adapter => "adapter_config.json",
            Product::Model => "config.json",
        }
    }
}
