//! The fields of `plan.json` that the page shows.
//!
//! A new plan goes through the same JSON as one in a run folder, so both give the same page. Fields that an earlier
//! version did not write are empty, and the page omits them.

use super::timeline::Timeline;
use serde::{Deserialize, Serialize};
use smidgen_ir::Policy;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct PlanFacts {
    #[serde(default)]
    pub title: String,
    #[serde(default)]
    pub layers: usize,
    /// Whether the base weights are trained instead of adapters.
    #[serde(default)]
    pub trains_base: bool,
    pub fits: bool,
    pub budget_bytes: u64,
    pub peak_bytes: u64,
    #[serde(default)]
    pub peak_at: String,
    /// Bytes at the peak by category; they add up to `peak_bytes`.
    pub rows: BTreeMap<String, u64>,
    /// Bytes per memory space.
    #[serde(default)]
    pub spaces: BTreeMap<String, u64>,
    #[serde(default)]
    pub trained_parameters: Option<u64>,
    #[serde(default)]
    pub bytes_per_trained_parameter: Option<f64>,
    pub policy: PolicyFacts,
    #[serde(default)]
    pub micro_steps: f64,
    pub extent: ExtentFacts,
    /// `None` for a GPU without a profile.
    pub step_ms: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub arena: ArenaFacts,
    /// Memory of every phase of the run, per memory space.
    #[serde(default)]
    pub life: BTreeMap<String, BTreeMap<String, u64>>,
    #[serde(default)]
    pub profile: ProfileFacts,
    #[serde(default)]
    pub advice: Vec<String>,
    #[serde(default)]
    pub notes: Vec<String>,
    #[serde(default)]
    pub timeline: Timeline,
}

impl PlanFacts {
    /// The label of a row of the plan.
    pub fn label<'a>(&self, row: &'a str) -> &'a str {
        match row {
            "base_weights" => "base weights",
            "adapters" if self.trains_base => "trained weights",
            other => other,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct PolicyFacts {
    pub device: String,
    pub threads: usize,
    #[serde(flatten)]
    pub chosen: Policy,
    pub reasons: Vec<String>,
    pub prices: Vec<PriceFacts>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PriceFacts {
    pub choice: String,
    pub saved_bytes: i64,
    pub cost_ms: f64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct ExtentFacts {
    pub tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, Serialize)]
pub struct ArenaFacts {
    pub reserved_bytes: u64,
    pub peak_live_bytes: u64,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct ProfileFacts {
    pub name: String,
    pub origin: String,
}
