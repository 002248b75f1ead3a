//! Job to plan: the solver's answer with notes, advice and the memory of every phase of the run.
//!
//! `plan` is the one function that plans: a job and what is known about memory (`facts.rs`) in, a plan out.
//! `demand.rs` has the micro-batches that the data allows, `conditions.rs` the budget and pins that the solver must keep.
//! Left out: how advice is found if nothing fits (`advice.rs`).

use crate::failure::Failure;
use crate::plan::advice::advise;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::artifact::Artifact;
use crate::plan::conditions::{Conditions, HOST_OF_A_CARD_BYTES};
use crate::plan::context::{pinned_bytes, process_context};
use crate::plan::demand::{DemandShape, longest_together};
use crate::plan::exchange::Exchange;
use crate::plan::facts::{Before, MemoryFacts};
use crate::plan::generation::cache_bytes;
use crate::plan::job::Job;
use crate::plan::model::written_storage;
use crate::plan::phases::{OF_TRAINING, PhaseMemory, plan_phases};
use crate::plan::profiles::ChosenProfile;
use crate::plan::rank_layout::RankLayout;
use crate::plan::shapes::Shape;
use crate::plan::weight_kinds::{KindOfWeights, kinds_of_weights};
use crate::rows::data::Data;
use smidgen_compile::request::Master;
use smidgen_compile::{Budget, Choice, DecodeShape, Solution, SolveError, Why, smallest_resident};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DeviceKind, Extent, LeafKind, Pins, Plan, PlannedValue, Policy, Space, Storage};
use smidgen_recipe::{Compute, Length};
use std::collections::BTreeSet;
use std::iter::successors;

/// The plan of a job, and what to tell the user about it.
#[derive(Debug)]
pub struct Planned {
    pub solution: Solution,
    pub budget_bytes: u64,
    /// Limit on offloaded tensors of all ranks of a machine, in pinned memory or on disk.
    pub offload_budget_bytes: u64,
    /// Host memory that a plan for a GPU needs on a machine: pinned memory and the processes of its ranks.
    pub host_bytes: Option<u64>,
    /// Tokens per average optimizer step of all ranks together.
    pub step_tokens: f64,
    /// Optimizer steps of the run; `None` if the recipe counts epochs and there is no data.
    pub total_steps: Option<u64>,
    /// Optimizer steps of the first epoch, if there is data.
    pub epoch_steps: Option<u64>,
    pub fits: bool,
    /// Its choices are those of the plan before.
    pub keeps_before: bool,
    /// Base weights are trained; otherwise only adapters.
    pub trains_base: bool,
    /// What is trained and what is frozen.
    pub kinds: Vec<KindOfWeights>,
    /// What would make it fit.
    pub advice: Vec<String>,
    /// What to know about the plan.
    pub notes: Vec<String>,
    /// The device whose rates predict the time.
    pub profile: ChosenProfile,
    /// Memory of each phase of the run.
    pub life: Vec<PhaseMemory>,
    /// The ranks of the run; `solution` is the plan of each of them.
    pub world: RankLayout,
    /// What ranks send each other; `None` for a single rank.
    pub exchange: Option<Exchange>,
}

/// The predicted speed of a run, of all its ranks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    pub step_ms: f64,
    pub tokens_per_s: f64,
}

impl Planned {
    /// `None` if the rates of the device are unknown.
    pub fn speed(&self) -> Option<Speed> {
        let step_ms = self.solution.step_ms;
        let tokens_per_s = self.step_tokens / (step_ms / 1e3);
        self.profile.has_rates().then_some(Speed { step_ms, tokens_per_s })
    }

    /// Seconds of all steps, without evaluations and checkpoints.
    pub fn total_seconds(&self) -> Option<f64> {
        Some(self.speed()?.step_ms / 1e3 * self.total_steps? as f64)
    }

    /// Counts trained parameters and all their bytes: values, copies in the type of matmuls, gradients and optimizer
    /// state.
    pub fn trained(&self) -> Trained {
        let plan = &self.solution.plan;
        let elements = |(_, value): (_, &PlannedValue)| value.ty.elements(&Extent::default());
        let parameters = plan.leaves(LeafKind::Gradient).map(elements).sum::<usize>();
        let kinds = [LeafKind::Adapter, LeafKind::Derived, LeafKind::Gradient, LeafKind::Moment];
        // A copy that is made when its weight is fetched has no memory of its own.
        let leaves =
            kinds.into_iter().flat_map(|kind| plan.leaves(kind)).filter(|(_, value)| value.buffer.is_some());
        let bytes = leaves.map(|(_, value)| value.ty.bytes(&Extent::default())).sum::<usize>();
        Trained { parameters: parameters as u64, bytes: bytes as u64 }
    }
}

/// Trained parameters, and their bytes in all memory spaces together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trained {
    pub parameters: u64,
    pub bytes: u64,
}

impl Trained {
    pub fn bytes_per_parameter(&self) -> f64 {
        self.bytes as f64 / self.parameters.max(1) as f64
    }
}

/// Plans the job with what was known when it was made.
pub fn plan_job(job: &Job) -> Result<Planned, Failure> {
    plan(job, &MemoryFacts::of(job))
}

/// Like [`plan_job`], without a search for changes that would make it fit: the search takes longer than the plan.
pub fn plan_without_advice(job: &Job) -> Result<Planned, Failure> {
    solve(job, &MemoryFacts::of(job), |_, _, _| vec![])
}

/// A plan is preferred to the plan before if it is predicted to be faster by this factor.
pub const WORTHWHILE: f64 = 1.05;

/// Plans the job; `Ok` with `fits == false` if even the leanest plan is too large. Asked again with other facts when
/// memory changed.
pub fn plan(job: &Job, facts: &MemoryFacts) -> Result<Planned, Failure> {
    match &facts.before {
        Before::Nothing => solve(job, facts, advise),
        Before::Checkpoint(policy) => match keep(job, facts, policy)? {
            Some(kept) => Ok(Planned { keeps_before: true, ..kept }),
            None => solve(job, facts, advise),
        },
        Before::MemoryChanged(policy) => {
            let similar = match keep(job, facts, policy)? {
                Some(kept) => Some(Planned { keeps_before: true, ..kept }),
                None => halve_micro_batches(job, facts, policy)?,
            };
            let solved = solve(job, facts, advise)?;
            let is_close =
                |planned: &Planned| planned.solution.step_ms <= WORTHWHILE * solved.solution.step_ms;
            Ok(match similar {
                Some(similar) if !solved.fits || is_close(&similar) => similar,
                _ => solved,
            })
        }
        Before::FirstRank(policy) => keep(job, facts, policy)?
            .ok_or_else(|| Failure::memory("the plan of rank 0 does not fit this rank")),
    }
}

/// The plan with the choices of an earlier one; `None` if they no longer fit.
fn keep(job: &Job, facts: &MemoryFacts, policy: &Policy) -> Result<Option<Planned>, Failure> {
    let conditions = Conditions::with(job, facts, Pins::from(policy.clone()));
    let shape = DemandShape::of(job, Some(policy))?;
    let solution = conditions.solve(&job.request, &shape.demands).ok();
    Ok(solution.map(|solution| Planned::of(job, facts, &shape, &conditions, solution, true, vec![])))
}

/// Halves the micro-batches until the plan fits, with all other choices unchanged. Results change only by rounding: the
/// batch is the same, only its sums are split differently.
fn halve_micro_batches(job: &Job, facts: &MemoryFacts, before: &Policy) -> Result<Option<Planned>, Failure> {
    let Data::Rows(rows) = &job.data else { return Ok(None) };
    if job.recipe.memory.pins.sets(Choice::MicroBatch) {
        return Ok(None);
    }
    let longest = longest_together(job, rows);
    let halves = |policy: &Policy| policy.with_halved_micro_batches(longest);
    for policy in successors(halves(before), halves) {
        if let Some(planned) = keep(job, facts, &policy)? {
            return Ok(Some(planned));
        }
    }
    Ok(None)
}

fn solve(
    job: &Job,
    facts: &MemoryFacts,
    advise: impl Fn(&Job, &Conditions, &Solution) -> Vec<String>,
) -> Result<Planned, Failure> {
    let mut conditions = Conditions::of(job, facts)?;
    let shape = DemandShape::of(job, None)?;
    let mut result = conditions.solve(&job.request, &shape.demands);
    let alternatives =
        result.as_ref().err().map(|error| conditions.with_more_on_disk(job, error)).unwrap_or_default();
    for on_disk in alternatives {
        if let Ok(mut other) = on_disk.solve(&job.request, &shape.demands) {
            let (asked, own) = (&conditions.pins, &on_disk.pins);
            let reasons = other.reasons.iter_mut().filter(|reason| own.differ_in(asked, reason.choice));
            reasons.for_each(|reason| reason.why = Why::HostIsShort);
            (conditions, result) = (on_disk, Ok(other));
            break;
        }
    }
    Ok(match result {
        Ok(solution) => Planned::of(job, facts, &shape, &conditions, solution, true, vec![]),
        Err(SolveError { leanest, .. }) => {
            let advice = advise(job, &conditions, &leanest);
            Planned::of(job, facts, &shape, &conditions, *leanest, false, advice)
        }
    })
}

/// Milliseconds per step with unlimited memory.
pub fn unlimited_step_ms(job: &Job, facts: &MemoryFacts) -> Result<f64, Failure> {
    let conditions = Conditions { budget: Budget::device(u64::MAX), ..Conditions::of(job, facts)? };
    let solution = conditions.solve(&job.request, &DemandShape::of(job, None)?.demands);
    Ok(solution.map_or_else(|error| error.leanest.step_ms, |solution| solution.step_ms))
}

impl Planned {
    fn of(
        job: &Job,
        facts: &MemoryFacts,
        shape: &DemandShape,
        conditions: &Conditions,
        solution: Solution,
        fits: bool,
        advice: Vec<String>,
    ) -> Planned {
        let mut notes = notes(job, facts, shape, conditions, &solution, fits);
        let budget_bytes = conditions.budget.device_bytes;
        let life = plan_phases(job, facts, &solution);
        notes.extend(later_needs(&life, budget_bytes).filter(|_| fits));
        let is_gpu = job.request.device == DeviceKind::Cuda;
        let (total_steps, epoch_steps) = match (&job.data, job.recipe.train.length) {
            (Data::Rows(rows), _) => {
                (Some(rows.batches.total_steps()), Some(rows.batches.first_epoch_steps()))
            }
            (Data::Assumed { .. }, Length::Steps(steps)) => (Some(steps), None),
            (Data::Assumed { .. }, Length::Epochs(_)) => (None, None),
        };
        Planned {
            budget_bytes,
            offload_budget_bytes: conditions.budget.offload_bytes,
            host_bytes: is_gpu.then(|| host_bytes(job, &solution)),
            step_tokens: shape.all_tokens,
            total_steps,
            epoch_steps,
            fits,
            keeps_before: false,
            trains_base: !job.request.trained.is_empty(),
            kinds: kinds_of_weights(&job.request),
            advice,
            notes,
            profile: job.profile.clone(),
            life,
            world: job.world,
            exchange: Exchange::of(job.world, shape, &solution, &conditions.profile),
            solution,
        }
    }
}

/// A note if a command after training, such as `smidgen merge`, would need more than the budget.
fn later_needs(life: &[PhaseMemory], budget_bytes: u64) -> Option<String> {
    let later = life.iter().filter(|phase| !OF_TRAINING.contains(&phase.name));
    let most = later.max_by_key(|phase| phase.needs.device)?;
    let bytes = most.needs.device;
    let needs = format_bytes(bytes);
    (bytes > budget_bytes).then(|| format!("`smidgen {}` would need {needs} afterwards", most.name))
}

fn notes(
    job: &Job,
    facts: &MemoryFacts,
    shape: &DemandShape,
    conditions: &Conditions,
    solution: &Solution,
    fits: bool,
) -> Vec<String> {
    let mut notes = match &job.data {
        Data::Rows(_) => vec![],
        Data::Assumed { reason } => {
            let max_tokens = job.recipe.data.max_tokens;
            vec![format!(
                "planned without data ({reason}): every sample is assumed to have {max_tokens} tokens"
            )]
        }
    };
    let path = &job.recipe.model.path;
    if Shape::of(path).is_some_and(|shape| shape.is(&job.model)) {
        notes.push(format!(
            "`{path}` is not downloaded: planned from its sizes, which smidgen knows, as if it were stored as {}",
            job.request.spec.stored
        ));
    }
    if job.recipe.model.compute == Compute::Bf16 && matches!(job.arithmetic, Arithmetic::F32(_)) {
        notes.push("this processor has no bf16 instructions: computing in f32".to_owned());
    }
    notes.extend(rollout_note(&solution.plan));
    notes.extend(trained_note(job));
    notes.extend(pin_notes(job));
    notes.extend(facts.budget.note());
    notes.extend(host_note(job, conditions, solution));
    notes.extend(gain_of_more_memory(job, shape, conditions, solution).filter(|_| fits));
    notes
}

/// How many answers are generated at the same time, and what their caches take of the memory of the steps.
fn rollout_note(plan: &Plan) -> Option<String> {
    let DecodeShape { slots, positions, .. } = DecodeShape::planned(plan)?;
    let (noun, bytes) =
        (if slots == 1 { "answer" } else { "answers" }, format_bytes(cache_bytes(plan) as u64));
    Some(format!(
        "generates {slots} {noun} at the same time, up to {positions} tokens with the prompt: their caches take {bytes} of the \
         memory that steps use afterwards"
    ))
}

/// The host memory that a plan for a GPU needs.
fn host_note(job: &Job, conditions: &Conditions, solution: &Solution) -> Option<String> {
    if job.request.device == DeviceKind::Cpu {
        return None;
    }
    let mut needed = format_bytes(host_bytes(job, solution));
    let (ranks, shared) = (job.world.local.of, solution.plan.host.shared_bytes);
    needed = match ranks {
        1 => needed,
        _ if shared == 0 => format!("{needed} (for {ranks} ranks)"),
        _ => format!("{needed} (for {ranks} ranks, which share {} of it)", format_bytes(shared as u64)),
    };
    Some(match conditions.budget.offload_bytes {
        u64::MAX => format!(
            "assumes a machine with {needed} of free host memory; `memory.host_budget` sets a limit for offloaded tensors"
        ),
        HOST_OF_A_CARD_BYTES if job.recipe.memory.host_budget == smidgen_recipe::Budget::Auto => format!(
            "needs {needed} of host memory; offloaded tensors keep within {}, which is assumed for a card by name: set `memory.host_budget` for another machine",
            format_bytes(HOST_OF_A_CARD_BYTES)
        ),
        limit => format!(
            "needs {needed} of host memory; offloaded tensors keep within their limit of {}",
            format_bytes(limit)
        ),
    })
}

/// Pinned memory and memory of the processes, of all ranks of a machine.
pub fn host_bytes(job: &Job, solution: &Solution) -> u64 {
    let shared = solution.plan.host.shared_bytes as u64;
    let own = pinned_bytes(&solution.plan) - shared + process_context(job).bytes_for(&solution.plan);
    shared + job.world.local.of as u64 * own
}

fn is_pinned_off_device(pins: &Pins, choice: Choice) -> bool {
    pins.space_of(choice).is_some_and(|space| space != Space::Device)
}

/// Pins that have another effect on this device than they say, or none.
fn pin_notes(job: &Job) -> Vec<String> {
    let pins = &job.recipe.memory.pins;
    let keys = [
        ("memory.activations", Choice::Activations),
        ("memory.weights", Choice::Weights),
        ("memory.optimizer_state", Choice::OptimizerState),
        ("memory.gradients", Choice::Gradients),
    ];
    let is_cpu = job.request.device == DeviceKind::Cpu;
    let on_host = keys.iter().filter(|(_, choice)| is_cpu && pins.space_of(*choice) == Some(Space::Host));
    let mut notes: Vec<String> = on_host
        .map(|(key, _)| {
            format!(
                "the device is the CPU, whose memory is the host's: `{key} = \"host\"` is taken as `disk`"
            )
        })
        .collect();
    if job.request.trained.is_empty() && is_pinned_off_device(pins, Choice::Gradients) {
        notes
            .push("adapters keep their gradients on the device: `memory.gradients` has no effect".to_owned());
    }
    notes
}

/// The types of trained base weights, if the checkpoint does not store them as f32.
fn trained_note(job: &Job) -> Option<String> {
    if Artifact::of(&job.recipe) == Artifact::Adapter {
        return None;
    }
    let stored =
        job.request.trained.iter().filter_map(|name| Some((name, job.model.weight(name)?.storage()?)));
    let not_f32: Vec<(&String, Storage)> = stored.filter(|(_, storage)| *storage != Storage::F32).collect();
    let written = not_f32.iter().find_map(|(name, _)| written_storage(&job.model, name))?;
    if job.request.optimizer.master != Master::F32 {
        return Some("trained matrices are bf16 and rounded at random after each update".to_owned());
    }
    let names: BTreeSet<String> = not_f32.iter().map(|(_, storage)| storage.to_string()).collect();
    Some(format!(
        "trained weights, {} in the base, are f32 while they are trained and rounded to {written} in the model",
        Vec::from_iter(names).join(" and ")
    ))
}

/// How much more memory would keep everything on the device, if that is faster.
fn gain_of_more_memory(
    job: &Job,
    shape: &DemandShape,
    conditions: &Conditions,
    solution: &Solution,
) -> Option<String> {
    const LEAST_GAIN: f64 = 1.005;
    if solution.prices.is_empty() {
        return None;
    }
    let question = conditions.question(&job.request, &shape.demands);
    let (kept_bytes, kept_ms) = smallest_resident(&question, solution.step_ms / LEAST_GAIN)?;
    let more = format_bytes(kept_bytes.checked_sub(conditions.budget.device_bytes)?);
    let faster = 100.0 * (solution.step_ms / kept_ms - 1.0);
    let gain = if job.profile.has_rates() { format!(", {faster:.0} % faster") } else { String::new() };
    Some(format!("{more} more would keep everything on the device{gain}"))
}

impl Planned {
    /// # Errors
    /// A plan that does not fit.
    pub fn or_refuse(self) -> Result<Planned, Failure> {
        if self.fits { Ok(self) } else { Err(self.refusal()) }
    }

    /// The error of a run that does not fit.
    pub fn refusal(&self) -> Failure {
        let peak = self.solution.plan.peak();
        let largest: Vec<String> = peak
            .largest
            .iter()
            .take(3)
            .map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes as u64)))
            .collect();
        let needs = if self.solution.peak_bytes > self.budget_bytes {
            format!(
                "the smallest plan needs {}, the budget is {}",
                format_bytes(self.solution.peak_bytes),
                format_bytes(self.budget_bytes)
            )
        } else {
            let plan = &self.solution.plan;
            let place = match plan.device {
                DeviceKind::Cpu => "on disk",
                DeviceKind::Cuda => "of pinned memory",
            };
            format!(
                "plans that fit the budget of {} need up to {} {place}, the limit is {}",
                format_bytes(self.budget_bytes),
                format_bytes(self.solution.offloaded_bytes(self.world.local.of)),
                format_bytes(self.offload_budget_bytes)
            )
        };
        let mut failure = Failure::memory(format!("{needs}\n  largest at the peak: {}", largest.join(", ")));
        failure.hints = self.advice.clone();
        failure
    }
}
