//! What a plan is made under: pinned choices, memory outside the arena, the budget, and the device's rates.
//!
//! The recipe's `[memory]` keys become pins of the solver here.

use crate::failure::Failure;
use crate::plan::context::context;
use crate::plan::devices::Place;
use crate::plan::disk;
use crate::plan::host;
use crate::plan::job::{self, Job};
use crate::plan::profiles;
use smidgen_compile::choices::{Refusal, refuse};
use smidgen_compile::error::ModelError;
use smidgen_compile::{
    Budget, Choice, Context, Demand, Profile, Purpose, Question, Request, Solution, SolveError, can_fit,
    solve,
};
use smidgen_ir::{DeviceKind, Pins, Space};

/// What a plan is made under.
#[derive(Clone, Debug)]
pub struct Terms {
    pub purpose: Purpose,
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
        Terms { purpose: Purpose::Training, pins, context: context(job), budget: budget(job), profile }
    }

    /// Those of a model that is run and not trained: nothing is pinned.
    pub fn of_use(
        purpose: Purpose,
        request: &Request,
        place: &Place,
        context: Context,
        budget_bytes: u64,
    ) -> Terms {
        let profile = profiles::of_place(place, request.threads, true).device.at(request.precision);
        let budget = Budget::device(budget_bytes);
        Terms { purpose, pins: Pins::default(), context, budget, profile }
    }

    pub fn question<'a>(&'a self, request: &'a Request, demands: &'a [Demand]) -> Question<'a> {
        let Terms { purpose, pins, context, budget, profile } = self;
        Question { purpose: *purpose, request, demands, pins, context: *context, budget: *budget, profile }
    }

    pub fn solve(&self, request: &Request, demands: &[Demand]) -> Result<Solution, SolveError> {
        solve(&self.question(request, demands))
    }

    /// The same with more and more on disk, where pinned memory is what was short and the recipe leaves it open: first
    /// what is touched once in a step.
    pub fn on_disk(&self, job: &Job, error: &SolveError) -> Vec<Terms> {
        let is_short_of_host = error.leanest.peak_bytes <= self.budget.device_bytes;
        if job.request.device == DeviceKind::Cpu || !is_short_of_host {
            return vec![];
        }
        let of_trained = [Choice::OptimizerState, Choice::Gradients];
        let of_trained = of_trained.into_iter().filter(|_| !job.request.trained.is_empty());
        let (mut all, mut so_far) = (Vec::new(), self.pins.clone());
        for choice in of_trained.chain([Choice::Weights]) {
            if let Some(pins) = so_far.with_space_of(choice, Space::Disk) {
                so_far = pins;
                all.push(Terms { pins: so_far.clone(), ..self.clone() });
            }
        }
        all
    }

    pub fn can_fit(&self, request: &Request, demand: &Demand) -> bool {
        can_fit(&self.question(request, std::slice::from_ref(demand)))
    }
}

/// The budget of the device, and of pinned memory or disk for offloaded tensors.
fn budget(job: &Job) -> Budget {
    let offload = match (job.request.device, job.recipe.memory.host_budget) {
        (DeviceKind::Cuda, smidgen_recipe::Budget::Bytes(bytes)) => Some(bytes),
        // A plan may be for another machine.
        _ if job.purpose != job::Purpose::Train => None,
        (DeviceKind::Cpu, _) => disk::free_bytes(&job.recipe.output.dir.resolved),
        (DeviceKind::Cuda, smidgen_recipe::Budget::Auto) => host::free_memory_bytes(),
    };
    Budget {
        device_bytes: job.budget.bytes,
        offload_bytes: offload.unwrap_or(u64::MAX),
        local_ranks: job.world.local.of,
    }
}

/// The choices that the recipe pins, if the model has the layers that they name.
pub fn pins(job: &Job) -> Result<Pins, Failure> {
    let (mut pins, layers) = (job.recipe.memory.pins.clone(), job.request.spec.layers);
    if let Some(list) = pins.recompute_list() {
        if let Some(&layer) = list.iter().find(|layer| **layer >= layers) {
            return Err(Failure::recipe(ModelError::UnknownRecomputeLayer { layer, last: layers - 1 }));
        }
        // A list names layers of the decoder, which follow those of an audio encoder.
        list.iter_mut().for_each(|layer| *layer += job.request.encoder_layers());
    }
    refuse(&pins, &job.request).map_or(Ok(pins), |refusal| Err(describe(refusal)))
}

fn describe(refusal: Refusal) -> Failure {
    let (what, hint) = match refusal {
        Refusal::BreadthFirstOnRanks => (
            "`memory.order = \"breadth\"` is for one rank: several sum gradients as a micro-batch passes the layers",
            "write `auto` or `depth`",
        ),
        Refusal::BreadthFirstWithTiedHead => (
            "`memory.order = \"breadth\"` would sum the gradient of the embedding, which is the LM head too, in another order",
            "write `auto` or `depth`, or train only the layers (`adapter.targets` with their names)",
        ),
        Refusal::BreadthFirstWithAudio => (
            "`memory.order = \"breadth\"` is for decoders, and a part of what hears is trained",
            "write `auto` or `depth`, or leave encoder and projector out of `adapter.targets` and `adapter.train`",
        ),
        Refusal::LapsInDepthFirstOrder => (
            "`memory.layers_per_lap` has no effect in depth-first order",
            "leave it out, or write `memory.order = \"breadth\"` or `auto`",
        ),
        Refusal::MoreLayersPerLap { pinned, layers } => {
            let what = format!("`memory.layers_per_lap` is {pinned}, and the model has {layers} layers");
            return Failure::recipe(what).hint("write `auto`, 1 or 2");
        }
    };
    Failure::recipe(what).hint(hint)
}
