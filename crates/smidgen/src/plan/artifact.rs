//! The artifact of a run: an adapter, or with full training a whole model.
//!
//! Names of its folder and files, and the words for it in messages. Left out: writing it (`run_folder/`).

use smidgen_recipe::{AdapterKind, Recipe};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    Adapter,
    Model,
}

impl Artifact {
    pub fn of(recipe: &Recipe) -> Artifact {
        match recipe.adapter.kind {
            AdapterKind::Lora | AdapterKind::RsLora | AdapterKind::Dora | AdapterKind::LsLora => {
                Artifact::Adapter
            }
            AdapterKind::Full => Artifact::Model,
        }
    }

    /// Its folder inside the run's folder, which is also its name in messages.
    pub fn folder(self) -> &'static str {
        match self {
            Artifact::Adapter => "adapter",
            Artifact::Model => "model",
        }
    }

    /// The name with its article.
    pub fn one(self) -> &'static str {
        match self {
            Artifact::Adapter => "an adapter",
            Artifact::Model => "a model",
        }
    }

    /// The file that every artifact of this kind has.
    pub fn config(self) -> &'static str {
        match self {
            Artifact::Adapter => "adapter_config.json",
            Artifact::Model => "config.json",
        }
    }
}

/// Whether the state of the last step is saved even if no checkpoint is due. The state of full training is large.
pub fn saves_end(recipe: &Recipe) -> bool {
    Artifact::of(recipe) == Artifact::Adapter || recipe.train.save_every > 0
}
