//! The product of a run: an adapter, or with full training a whole model.
//!
//! Names of its folder and files, and the words for it in messages. Left out: writing it (`train/`).

use smidgen_recipe::{AdapterKind, Recipe};

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

    /// Its folder inside the run's folder, which is also its name in messages.
    pub fn folder(self) -> &'static str {
        match self {
            Product::Adapter => "adapter",
            Product::Model => "model",
        }
    }

    /// The name with its article.
    pub fn one(self) -> &'static str {
        match self {
            Product::Adapter => "an adapter",
            Product::Model => "a model",
        }
    }

    /// The file that every product of this kind has.
    pub fn config(self) -> &'static str {
        match self {
            Product::Adapter => "adapter_config.json",
            Product::Model => "config.json",
        }
    }
}

/// Whether the state of the last step is saved even if no checkpoint is due. The state of full training is large.
pub fn saves_end(recipe: &Recipe) -> bool {
    Product::of(recipe) == Product::Adapter || recipe.train.save_every > 0
}
