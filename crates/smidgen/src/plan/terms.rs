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
use smidgen_compile::error::ModelError;
use smidgen_compile::{
    Budget, Context, Demand, Profile, Purpose, Question, Request, Solution, SolveError, can_fit, solve,
};
use smidgen_ir::{DeviceKind, LayerRule, Order, Pins, Space};

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
        let mut choices: Vec<Pins> = Vec::new();
        let mut so_far = self.pins.clone();
        if !job.request.trained.is_empty() {
            if so_far.optimizer_state.is_none() {
                so_far.optimizer_state = Some(Space::Disk);
                choices.push(so_far.clone());
            }
            if so_far.gradients.is_none() {
                so_far.gradients = Some(Space::Disk);
                choices.push(so_far.clone());
            }
        }
        if so_far.weights.is_none() {
            so_far.weights = Some(Space::Disk);
            choices.push(so_far);
        }
        choices.into_iter().map(|pins| Terms { pins, ..self.clone() }).collect()
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
    if let Some(LayerRule::List(list)) = &mut pins.recompute {
        if let Some(&layer) = list.iter().find(|layer| **layer >= layers) {
            return Err(Failure::recipe(ModelError::UnknownRecomputeLayer { layer, last: layers - 1 }));
        }
        // A list names layers of the decoder, which follow those of an audio encoder.
        list.iter_mut().for_each(|layer| *layer += job.request.encoder_layers());
    }
    let request = &job.request;
    let refused = |what: &str, hint: &str| Err(Failure::recipe(what).hint(hint));
    if pins.order == Some(Order::Breadth) && !request.rank.is_only() {
        return refused(
            "`memory.order = \"breadth\"` is for one rank: several sum gradients as a micro-batch passes the layers",
            "write `auto` or `depth`",
        );
    }
    if pins.order == Some(Order::Breadth) && request.trains_tied_head() {
        return refused(
            "`memory.order = \"breadth\"` would sum the gradient of the embedding, which is the LM head too, in another order",
            "write `auto` or `depth`, or train only the layers (`adapter.targets` with their names)",
        );
    }
    if pins.order == Some(Order::Breadth) && request.computes_audio() {
        return refused(
            "`memory.order = \"breadth\"` is for decoders, and a part of what hears is trained",
            "write `auto` or `depth`, or leave encoder and projector out of `adapter.targets` and `adapter.train`",
        );
    }
    if pins.order == Some(Order::Depth) && pins.layers_per_lap.is_some_and(|count| count > 1) {
        return refused(
            "`memory.layers_per_lap` has no effect in depth-first order",
            "leave it out, or write `memory.order = \"breadth\"` or `auto`",
        );
    }
    if let Some(count) = pins.layers_per_lap.filter(|count| *count > layers) {
        return refused(
            &format!("`memory.layers_per_lap` is {count}, and the model has {layers} layers"),
            "write `auto`, 1 or 2",
        );
    }
    Ok(pins)
}
