//! What a plan is made under: pinned choices, memory outside the arena, the budget, and the device's rates.
//!
//! The recipe's `[memory]` keys become pins of the solver here.

use crate::failure::Failure;
use crate::plan::context::context;
use crate::plan::disk;
use crate::plan::host;
use crate::plan::job::{Job, Purpose};
use smidgen_compile::error::ModelError;
use smidgen_compile::{
    Budget, Context, Demand, Pins, Profile, Request, Solution, SolveError, can_fit, options, solve,
};
use smidgen_ir::DeviceKind;
use smidgen_recipe::{Placement, Recompute, TileTokens, WeightPlacement};

/// What a plan is made under.
#[derive(Clone, Debug)]
pub struct Terms {
    pub pins: Pins,
    pub context: Context,
    pub budget: Budget,
    pub profile: Profile,
}

impl Terms {
    /// Those of the recipe.
    pub fn of(job: &Job) -> Result<Terms, Failure> {
        Ok(Terms::with(job, pins(job)?))
    }

    pub fn with(job: &Job, pins: Pins) -> Terms {
        let profile = job.profile.device.at(job.request.precision);
        Terms { pins, context: context(job), budget: budget(job), profile }
    }

    pub fn solve(&self, request: &Request, demands: &[Demand]) -> Result<Solution, SolveError> {
        solve(request, demands, &self.pins, self.context, self.budget, &self.profile)
    }

    /// The same with weights on disk, where pinned memory is what was short and the recipe leaves it open.
    pub fn with_weights_on_disk(&self, job: &Job, error: &SolveError) -> Option<Terms> {
        let is_open = job.recipe.memory.weights == WeightPlacement::Auto && !self.pins.weights_on_disk;
        let is_short_of_host = error.leanest.peak_bytes <= self.budget.device_bytes;
        let pins = Pins { weights_on_disk: true, ..self.pins.clone() };
        let is_gpu = job.request.device == DeviceKind::Cuda;
        (is_gpu && is_open && is_short_of_host).then(|| Terms { pins, ..self.clone() })
    }

    pub fn can_fit(&self, request: &Request, demand: &Demand) -> bool {
        can_fit(request, demand, &self.pins, self.context, self.budget, &self.profile)
    }
}

/// The budget of the device, and of pinned memory or disk for offloaded tensors.
fn budget(job: &Job) -> Budget {
    let elsewhere = match (job.request.device, job.recipe.memory.host_budget) {
        (DeviceKind::Cuda, smidgen_recipe::Budget::Bytes(bytes)) => Some(bytes),
        // A plan may be for another machine.
        _ if job.purpose != Purpose::Train => None,
        (DeviceKind::Cpu, _) => disk::free_bytes(&job.recipe.output.dir.resolved),
        (DeviceKind::Cuda, smidgen_recipe::Budget::Auto) => host::free_memory_bytes(),
    };
    Budget { device_bytes: job.budget.bytes, elsewhere_bytes: elsewhere.unwrap_or(u64::MAX) }
}

/// The choices that the recipe pins.
pub fn pins(job: &Job) -> Result<Pins, Failure> {
    let (memory, layers) = (&job.recipe.memory, job.request.spec.layers);
    let away = |placement: Placement| match placement {
        Placement::Auto => None,
        Placement::Device => Some(false),
        Placement::Host => Some(true),
    };
    let (weights_away, tables_away) = match memory.weights {
        WeightPlacement::Auto => (None, None),
        WeightPlacement::Device => (Some(0), Some(false)),
        WeightPlacement::Host(share) if share < 1.0 => {
            // A share of the layers; embedding and head are nobody's share.
            (Some((share * layers as f64).round() as usize), None)
        }
        WeightPlacement::Host(_) | WeightPlacement::Disk => (Some(layers), Some(true)),
    };
    Ok(Pins {
        policy: None,
        recompute: pinned_recompute(job)?,
        loss_chunk: None,
        tile_tokens: match memory.tile_tokens {
            TileTokens::Auto => None,
            TileTokens::None => Some(0),
            TileTokens::Tokens(tokens) => Some(tokens),
        },
        weights_away,
        tables_away,
        weights_on_disk: memory.weights == WeightPlacement::Disk && job.request.device == DeviceKind::Cuda,
        activations_away: away(memory.activations),
        moments_away: away(memory.optimizer_state),
    })
}

fn pinned_recompute(job: &Job) -> Result<Option<options::Recompute>, Failure> {
    let layers = job.request.spec.layers;
    Ok(match &job.recipe.memory.recompute {
        Recompute::Auto => None,
        Recompute::None => Some(options::Recompute::none()),
        Recompute::All => Some(options::Recompute::first(layers)),
        Recompute::Every(n) => Some(options::Recompute::every(*n, layers)),
        Recompute::List(list) => {
            let mut list = list.clone();
            list.sort_unstable();
            list.dedup();
            if let Some(&layer) = list.iter().find(|layer| **layer >= layers) {
                return Err(Failure::recipe(ModelError::UnknownRecomputeLayer { layer, last: layers - 1 }));
            }
            Some(options::Recompute { layers: list })
        }
    })
}
