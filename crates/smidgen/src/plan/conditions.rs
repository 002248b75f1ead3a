//! The conditions that a plan must meet: pinned choices, memory outside the arena, the budget, and the device's rates.
//!
//! The recipe's `[memory]` section becomes pins of the solver here, and pins that the model cannot have are refused.
//! Left out: the micro-batches that the solver may choose from (`demand.rs`).

use crate::failure::Failure;
use crate::machine::host;
use crate::plan::context::context;
use crate::plan::devices::JobDevice;
use crate::plan::disk;
use crate::plan::facts::MemoryFacts;
use crate::plan::job::{self, Job};
use crate::plan::profiles;
use smidgen_compile::choices::{Refusal, refuse};
use smidgen_compile::error::ModelError;
use smidgen_compile::{
    Budget, Choice, Context, DecodeShape, Demand, Fitting, Profile, Purpose, Question, Request, Solution,
    SolveError, fits_with_little_offloaded, solve, solve_quickly,
};
use smidgen_ir::{DeviceKind, Entry, Pins, Plan, Space};
use smidgen_recipe::{AnswerSettings, Batch};

/// The conditions of one question to the solver.
#[derive(Clone, Debug)]
pub struct Conditions {
    pub purpose: Purpose,
    pub pins: Pins,
    /// Memory outside the arena.
    pub context: Context,
    pub budget: Budget,
    /// The rates of the device in the precision of the run.
    pub profile: Profile,
    /// If training generates its answers.
    pub rollout: Option<Rollout>,
}

/// The answers that a batch of prompts gets.
#[derive(Clone, Copy, Debug)]
pub struct Rollout {
    pub answers: usize,
    /// Tokens of each, as if all were as long as they may be.
    pub tokens: usize,
    /// Updates that they serve.
    pub updates: u64,
}

impl Rollout {
    fn of(job: &Job) -> Option<Rollout> {
        let Batch::Samples(batch) = job.recipe.train.batch else { return None };
        let AnswerSettings { num_generations, num_iterations, max_completion_length, .. } =
            job.recipe.answer_settings();
        job.request.decode.map(|_| Rollout {
            answers: batch * num_generations,
            tokens: max_completion_length,
            updates: num_iterations,
        })
    }

    /// Milliseconds that generating adds to each update.
    fn step_ms(&self, profile: &Profile, plan: &Plan, shape: DecodeShape) -> f64 {
        let rounds = self.answers.div_ceil(shape.slots) * self.tokens;
        // The planned run also has room for the tokens of prompts.
        let share = (shape.slots as f64 / shape.new_tokens as f64).min(1.0);
        let run_ms = 1e3 * profile.entry_seconds(plan, Entry::Decode);
        let is_bound_by_tokens = plan.device == DeviceKind::Cpu;
        rounds as f64 * run_ms * if is_bound_by_tokens { share } else { 1.0 } / self.updates as f64
    }
}

impl Conditions {
    /// Training with the pins of the recipe's `[memory]` section.
    pub fn of(job: &Job, facts: &MemoryFacts) -> Result<Conditions, Failure> {
        Ok(Conditions::with(job, facts, pins(job)?))
    }

    /// Training with other pins than the recipe's.
    pub fn with(job: &Job, facts: &MemoryFacts, pins: Pins) -> Conditions {
        let profile = job.profile.device.at(job.request.precision);
        let (context, budget) = (context(job, &facts.place), budget(job, facts.budget.bytes));
        Conditions { purpose: Purpose::Training, pins, context, budget, profile, rollout: Rollout::of(job) }
    }

    /// Evaluating or generating, with nothing pinned.
    pub fn for_inference(
        purpose: Purpose,
        request: &Request,
        place: &JobDevice,
        context: Context,
        budget_bytes: u64,
    ) -> Conditions {
        let profile = profiles::of_place(place, request.threads, true).device.at(request.precision);
        let budget = Budget::device(budget_bytes);
        Conditions { purpose, pins: Pins::default(), context, budget, profile, rollout: None }
    }

    pub fn question<'a>(&'a self, request: &'a Request, demands: &'a [Demand]) -> Question<'a> {
        let Conditions { purpose, pins, context, budget, profile, .. } = self;
        Question { purpose: *purpose, request, demands, pins, context: *context, budget: *budget, profile }
    }

    /// Where answers are generated, how many at the same time is a choice too: fewer have smaller caches and need more
    /// runs. The time of generating is part of a step.
    pub fn solve(&self, request: &Request, demands: &[Demand]) -> Result<Solution, SolveError> {
        let Some((rollout, most)) = self.rollout.zip(request.decode) else {
            return solve(&self.question(request, demands));
        };
        let with_slots = |slots: usize| {
            let shape = DecodeShape::of_equal_slots(slots, most.positions);
            let request = Request { decode: Some(shape), ..request.clone() };
            let mut found = solve(&self.question(&request, demands));
            let solution = match &mut found {
                Ok(solution) => solution,
                Err(error) => &mut *error.leanest,
            };
            solution.step_ms += rollout.step_ms(&self.profile, &solution.plan, shape);
            found
        };
        let mut best = with_slots(most.slots);
        if best.is_err() {
            // Nothing fits if the smallest caches do not.
            with_slots(1)?;
        }
        let mut slots = most.slots;
        // With fewer at the same time nothing is faster than a plan that keeps everything.
        while slots > 1 && !best.as_ref().is_ok_and(|best| best.policy.saves_nothing()) {
            slots = slots.div_ceil(2);
            match (&best, with_slots(slots)) {
                (Ok(known), Ok(found)) if found.step_ms >= known.step_ms => break,
                (_, Ok(found)) => best = Ok(found),
                (_, Err(_)) => {}
            }
        }
        best
    }

    /// A plan that fits, without the search for the fastest.
    pub fn solve_quickly(&self, request: &Request, demands: &[Demand]) -> Option<Solution> {
        solve_quickly(&self.question(request, demands))
    }

    /// Whether a plan fits that offloads no more than it must.
    pub fn fits_with_little_offloaded(&self, request: &Request, demand: Demand) -> bool {
        fits_with_little_offloaded(&self.question(request, &[demand]))
    }

    /// Alternative conditions that move more and more state to disk, in the order in which the planner tries them when
    /// pinned memory runs short. State that a step touches once goes first; what the recipe pins stays where it is.
    pub fn with_more_on_disk(&self, job: &Job, error: &SolveError) -> Vec<Conditions> {
        let fits_the_device = error.leanest.peak_bytes <= self.budget.device_bytes;
        if job.request.device == DeviceKind::Cpu || !fits_the_device {
            return vec![];
        }
        let trains_base = !job.request.trained.is_empty();
        let of_training = [Choice::OptimizerState, Choice::Gradients].into_iter().filter(|_| trains_base);
        let (mut alternatives, mut pins) = (Vec::new(), self.pins.clone());
        for choice in of_training.chain([Choice::Weights]) {
            if let Some(more) = pins.with_space_of(choice, Space::Disk) {
                pins = more;
                alternatives.push(Conditions { pins: pins.clone(), ..self.clone() });
            }
        }
        alternatives
    }

    pub fn fitting<'a>(&'a self, request: &'a Request) -> Fitting<'a> {
        Fitting::of(self.question(request, &[]))
    }
}

/// Host memory for offloaded tensors of a machine of which only the card is known. A run with such a profile keeps within
/// it too, so that it gets the plan that was printed.
pub const HOST_OF_A_CARD_BYTES: u64 = 32 << 30;

/// The budget of the device, and of pinned memory or disk for offloaded tensors.
fn budget(job: &Job, device_bytes: u64) -> Budget {
    // A plan may be for another machine, so free memory and disk space of this one do not limit it.
    let runs_here = job.purpose == job::Purpose::Train;
    let offload = match (job.request.device, job.recipe.memory.host_budget) {
        (DeviceKind::Cuda, smidgen_recipe::Budget::Bytes(bytes)) => Some(bytes),
        (DeviceKind::Cpu, _) if runs_here => disk::free_bytes(&job.recipe.output.dir.resolved),
        (DeviceKind::Cpu, _) => None,
        (DeviceKind::Cuda, smidgen_recipe::Budget::Auto) => {
            let free_bytes = if runs_here { host::free_memory_bytes() } else { None };
            let assumed_bytes = job.profile.is_named().then_some(HOST_OF_A_CARD_BYTES);
            free_bytes.into_iter().chain(assumed_bytes).min()
        }
    };
    Budget { device_bytes, offload_bytes: offload.unwrap_or(u64::MAX), local_ranks: job.world.local.of }
}

/// The choices that the recipe pins, with layers counted as the solver counts them. Refuses pins that the model cannot
/// have.
fn pins(job: &Job) -> Result<Pins, Failure> {
    let (mut pins, layers) = (job.recipe.memory.pins.clone(), job.request.spec.layers.len());
    if let Some(list) = pins.recompute_list() {
        if let Some(&layer) = list.iter().find(|layer| **layer >= layers) {
            return Err(Failure::recipe(ModelError::UnknownRecomputeLayer { layer, last: layers - 1 }));
        }
        // A list names layers of the decoder, which follow those of an audio encoder.
        list.iter_mut().for_each(|layer| *layer += job.request.encoder_layers());
    }
    match refuse(&pins, &job.request) {
        Some(refusal) => Err(describe(refusal)),
        None => Ok(pins),
    }
}

/// The error for pins that exclude each other, or that the model cannot have.
fn describe(refusal: Refusal) -> Failure {
    let (what, hint) = match refusal {
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
