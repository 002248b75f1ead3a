//! Job to plan: which sizes of micro-batch the data allows, and what the solver makes of them.
//!
//! The plan is made for the largest micro-batch that the run will ever meet, found by packing every step
//! beforehand. Where there is no data, every sample is taken to be `max_tokens` long.
//! Left out: what to do where nothing fits (`advice.rs`).

use crate::failure::Failure;
use crate::plan::advice::advise;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::devices::Place;
use crate::plan::disk;
use crate::plan::host;
use crate::plan::job::{Job, Purpose};
use crate::plan::life::{LifePhase, OF_TRAINING, plan_life};
use crate::plan::model::written_storage;
use crate::plan::profiles::ChosenProfile;
use crate::rows::choice::ChoiceSet;
use crate::rows::data::{Data, Rows};
use smidgen_compile::error::ModelError;
use smidgen_compile::{
    Budget, Context, Demand, Overhead, Pins, Policy, Profile, Request, Solution, SolveError, can_fit,
    options, roomiest, solve,
};
use smidgen_data::micro_batch::{MicroBatch, largest_micro_batch};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::encode::{at_once_bytes, load_scratch_bytes, save_scratch_bytes};
use smidgen_formats::model::Model;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DeviceKind, Extent, Plan, Storage};
use smidgen_recipe::{Batch, Compute, MicroTokens, Placement, Recompute, TileTokens, WeightPlacement};
use smidgen_runtime::cpu::spill::PIECE_BYTES;
use smidgen_runtime::cuda::DISK_SLOT_BYTES;
use std::collections::BTreeSet;

/// A job and the plan it will run by.
#[derive(Debug)]
pub struct Planned {
    pub solution: Solution,
    pub budget_bytes: u64,
    /// What may lie in pinned memory or on disk.
    pub elsewhere_budget_bytes: u64,
    /// Tokens of an average optimizer step.
    pub step_tokens: f64,
    pub fits: bool,
    /// What is trained is the base itself, not adapters beside it.
    pub trains_base: bool,
    /// What would make it fit.
    pub advice: Vec<String>,
    /// What to know about the plan.
    pub notes: Vec<String>,
    /// Whose rates the predicted time is by.
    pub profile: ChosenProfile,
    /// What each phase of the run's life takes.
    pub life: Vec<LifePhase>,
}

/// Plans the job; `Ok` with `fits == false` where even the leanest plan is too large.
pub fn plan_job(job: &Job) -> Result<Planned, Failure> {
    let pins = pins(job)?;
    plan_with(job, &DemandShape::of(job, None)?, pins)
}

/// Plans the job by the choices of an earlier plan, if they still fit.
pub fn plan_job_as_before(
    job: &Job,
    micro_tokens: usize,
    policy: &Policy,
) -> Result<Option<Planned>, Failure> {
    let terms = Terms::with(job, Pins { policy: Some(policy.clone()), ..Pins::default() });
    let shape = DemandShape::of(job, Some(micro_tokens))?;
    let solution = terms.solve(&job.request, &shape.demands).ok();
    Ok(solution.map(|solution| Planned::of(job, &shape, &terms, solution, true, vec![])))
}

/// Milliseconds of a step if memory were no question.
pub fn unlimited_step_ms(job: &Job) -> Result<f64, Failure> {
    let terms = Terms { budget: Budget::device(u64::MAX), ..Terms::of(job)? };
    let solution = terms.solve(&job.request, &DemandShape::of(job, None)?.demands);
    Ok(solution.map_or_else(|error| error.leanest.step_ms, |solution| solution.step_ms))
}

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

    fn with(job: &Job, pins: Pins) -> Terms {
        let profile = job.profile.device.at(job.request.precision);
        Terms { pins, context: context(job), budget: budget(job), profile }
    }

    pub fn solve(&self, request: &Request, demands: &[Demand]) -> Result<Solution, SolveError> {
        solve(request, demands, &self.pins, self.context, self.budget, &self.profile)
    }

    /// The same with weights on disk, where pinned memory is what was short and the recipe leaves it open.
    fn with_weights_on_disk(&self, job: &Job, error: &SolveError) -> Option<Terms> {
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

fn plan_with(job: &Job, shape: &DemandShape, pins: Pins) -> Result<Planned, Failure> {
    let mut terms = Terms::with(job, pins);
    let mut result = terms.solve(&job.request, &shape.demands);
    if let Some(on_disk) = result.as_ref().err().and_then(|error| terms.with_weights_on_disk(job, error)) {
        let other = on_disk.solve(&job.request, &shape.demands);
        if other.is_ok() {
            (terms, result) = (on_disk, other);
        }
    }
    Ok(match result {
        Ok(solution) => Planned::of(job, shape, &terms, solution, true, vec![]),
        Err(SolveError { leanest, .. }) => {
            let advice = advise(job, &terms, &leanest);
            Planned::of(job, shape, &terms, *leanest, false, advice)
        }
    })
}

impl Planned {
    fn of(
        job: &Job,
        shape: &DemandShape,
        terms: &Terms,
        solution: Solution,
        fits: bool,
        advice: Vec<String>,
    ) -> Planned {
        let mut notes = notes(job, shape, terms, &solution, fits);
        let Budget { device_bytes: budget_bytes, elsewhere_bytes: elsewhere_budget_bytes } = terms.budget;
        let step_tokens = shape.step_tokens;
        let life = plan_life(job, &solution);
        notes.extend(later_needs(&life, budget_bytes).filter(|_| fits));
        let profile = job.profile.clone();
        Planned {
            solution,
            budget_bytes,
            elsewhere_budget_bytes,
            step_tokens,
            fits,
            trains_base: !job.request.trained.is_empty(),
            advice,
            notes,
            profile,
            life,
        }
    }
}

/// What a command that follows would take, where that is more than the run may.
fn later_needs(life: &[LifePhase], budget_bytes: u64) -> Option<String> {
    let later = life.iter().filter(|phase| !OF_TRAINING.contains(&phase.name));
    let most = later.max_by_key(|phase| phase.needs.device)?;
    let bytes = most.needs.device;
    let needs = format_bytes(bytes);
    (bytes > budget_bytes).then(|| format!("`smidgen {}` would need {needs} afterwards", most.name))
}

fn notes(job: &Job, shape: &DemandShape, terms: &Terms, solution: &Solution, fits: bool) -> Vec<String> {
    let mut notes = match &job.data {
        Data::Rows(_) => vec![],
        Data::Assumed { reason } => {
            let max_tokens = job.recipe.data.max_tokens;
            vec![format!(
                "planned without data ({reason}): every sample is taken to have {max_tokens} tokens"
            )]
        }
    };
    if job.recipe.model.compute == Compute::Bf16 && matches!(job.arithmetic, Arithmetic::F32(_)) {
        notes.push("this processor does not multiply bf16: computing in f32".to_owned());
    }
    notes.extend(trained_note(job));
    notes.extend(job.budget.note());
    notes.extend(roomier(job, shape, terms, solution).filter(|_| fits));
    notes
}

/// What becomes of trained weights that the base does not have in f32.
fn trained_note(job: &Job) -> Option<String> {
    let trained = &job.request.trained;
    let stored = trained.iter().filter_map(|name| job.model.weight(name)?.storage());
    let names: BTreeSet<String> =
        stored.filter(|storage| *storage != Storage::F32).map(|storage| storage.to_string()).collect();
    let first = trained.iter().find_map(|name| {
        let storage = job.model.weight(name)?.storage()?;
        (storage != Storage::F32).then(|| written_storage(&job.model, name)).flatten()
    });
    let names: Vec<String> = names.into_iter().collect();
    let written = first?;
    Some(format!(
        "trained weights, {} in the base, are f32 while they are trained and rounded to {written} in the model",
        names.join(" and ")
    ))
}

/// What more memory would buy: the same run with everything kept on the device.
fn roomier(job: &Job, shape: &DemandShape, terms: &Terms, solution: &Solution) -> Option<String> {
    if solution.prices.is_empty() {
        return None;
    }
    let (kept_bytes, kept_ms) = roomiest(&job.request, shape.demands.first()?, terms.context, &terms.profile);
    let more = format_bytes(kept_bytes.checked_sub(solution.peak_bytes)?);
    let faster = 100.0 * (solution.step_ms / kept_ms - 1.0);
    (faster >= 0.5).then(|| format!("{more} more would keep everything on the device, {faster:.0} % faster"))
}

impl Planned {
    /// The error of a run that does not fit.
    pub fn refusal(&self) -> Failure {
        let peak = self.solution.plan.peak();
        let largest: Vec<String> = peak
            .largest
            .iter()
            .take(3)
            .map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes as u64)))
            .collect();
        let needs = match self.solution.peak_bytes > self.budget_bytes {
            true => format!(
                "the leanest plan needs {}, the budget is {}",
                format_bytes(self.solution.peak_bytes),
                format_bytes(self.budget_bytes)
            ),
            false => {
                let plan = &self.solution.plan;
                let place = match plan.device {
                    DeviceKind::Cpu => "on disk",
                    DeviceKind::Cuda => "of pinned memory",
                };
                format!(
                    "plans that fit the budget of {} need up to {} {place}, and there are {}",
                    format_bytes(self.budget_bytes),
                    format_bytes(self.solution.elsewhere_bytes()),
                    format_bytes(self.elsewhere_budget_bytes)
                )
            }
        };
        let mut failure = Failure::world(format!("{needs}\n  largest at the peak: {}", largest.join(", ")));
        failure.hints = self.advice.clone();
        failure
    }
}

/// Memory of the host that a GPU reaches: what lies there, and the slot by which values on disk come.
pub fn pinned_bytes(plan: &Plan) -> u64 {
    let is_slot_used = plan.device == DeviceKind::Cuda && plan.disk.bytes() > 0;
    plan.host.bytes() as u64 + if is_slot_used { DISK_SLOT_BYTES as u64 } else { 0 }
}

/// What the process takes outside the arena, without data.
pub fn process_bytes(threads: usize) -> u64 {
    let Overhead { fixed_bytes, thread_bytes, margin_bytes, .. } = Overhead::CPU;
    fixed_bytes + thread_bytes * threads as u64 + margin_bytes
}

/// What is taken of the device outside the arena while training.
fn context(job: &Job) -> Context {
    match job.request.device {
        DeviceKind::Cuda => gpu_context(&job.place),
        DeviceKind::Cpu => process_context(job),
    }
}

pub fn gpu_context(place: &Place) -> Context {
    Context { device: DeviceKind::Cuda, overhead: place.overhead(), ..Context::default() }
}

/// What the process takes outside the arena while training.
pub fn process_context(job: &Job) -> Context {
    let data_bytes = match &job.data {
        Data::Rows(rows) => {
            let eval = rows.eval.as_ref().map_or(0, TokenSet::heap_bytes);
            let choices = rows.choices.as_ref().map_or(0, ChoiceSet::heap_bytes);
            rows.train.heap_bytes() + eval + choices + rows.batches.heap_bytes()
        }
        Data::Assumed { .. } => 0,
    };
    job_context(&job.request, &job.model, data_bytes as u64)
}

/// What the process takes outside the arena with this much data in RAM; the buffers of loading and saving weights count
/// as data.
pub fn job_context(request: &Request, model: &Model, data_bytes: u64) -> Context {
    let (mut scratch, mut at_once) = (0, 0);
    for tensor in &request.spec.tensors() {
        let Some(weight) = model.weight(&tensor.name) else { continue };
        let storage = request.storage_of(&tensor.name);
        scratch = scratch.max(load_scratch_bytes(&weight, storage));
        at_once = at_once.max(at_once_bytes(&weight, storage));
        if !request.trained.is_empty() {
            scratch = scratch.max(save_scratch_bytes(&weight));
        }
    }
    Context {
        device: DeviceKind::Cpu,
        overhead: Overhead::CPU,
        threads: request.threads,
        data_bytes: data_bytes + scratch as u64,
        token_bytes: MicroBatch::TOKEN_BYTES,
        spill_bytes: at_once.max(PIECE_BYTES) as u64,
    }
}

/// What the run may take: the device's budget, and what pinned memory or the disk can hold beside it.
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

/// The choices that the recipe makes itself.
fn pins(job: &Job) -> Result<Pins, Failure> {
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

/// The sizes of micro-batch to choose from, largest first.
pub struct DemandShape {
    pub demands: Vec<Demand>,
    step_tokens: f64,
}

impl DemandShape {
    /// `pinned` overrides the recipe's own choice of `micro_tokens`.
    pub fn of(job: &Job, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        let pinned = pinned.or(match job.recipe.memory.micro_tokens {
            MicroTokens::Tokens(tokens) => Some(tokens),
            MicroTokens::Auto => None,
        });
        DemandShape::with(job, pinned)
    }

    /// As if the recipe left `micro_tokens` to the solver.
    pub fn unpinned(job: &Job) -> Result<DemandShape, Failure> {
        DemandShape::with(job, None)
    }

    fn with(job: &Job, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        match &job.data {
            Data::Rows(rows) => DemandShape::of_rows(job, rows, pinned),
            Data::Assumed { .. } => DemandShape::assumed(job, pinned),
        }
    }

    fn of_rows(job: &Job, rows: &Rows, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        let longest = rows.train.longest();
        let whole = largest_micro_batch(&rows.batches, &rows.train, usize::MAX).map_err(Failure::world)?;
        let stats = rows.train.stats();
        let mean = stats.tokens as f64 / rows.train.len() as f64;
        let step_tokens = match job.recipe.train.batch {
            Batch::Samples(samples) => (mean * samples as f64).min(whole.step_tokens as f64),
            Batch::Tokens(_) => whole.step_tokens as f64,
        };
        let mut demands = Vec::new();
        for micro_tokens in micro_token_choices(pinned, whole.step_tokens, longest)? {
            let largest =
                largest_micro_batch(&rows.batches, &rows.train, micro_tokens).map_err(Failure::world)?;
            let mut extent = largest.micro_batch;
            let evaluated = rows.eval.iter().chain(rows.choices.as_ref().map(|choices| &choices.set));
            let longest = evaluated.clone().map(TokenSet::longest).max().unwrap_or(0);
            let tokens = extent.tokens.max(longest);
            for set in evaluated {
                extent = largest_extent(extent, eval_extent(set, 0, tokens));
            }
            let micro_steps = step_tokens / largest.micro_batch.tokens as f64;
            demands.push(Demand { micro_tokens, extent, micro_steps });
        }
        Ok(DemandShape { demands, step_tokens })
    }

    fn assumed(job: &Job, pinned: Option<usize>) -> Result<DemandShape, Failure> {
        let max_tokens = job.recipe.data.max_tokens;
        let (step_tokens, samples) = match job.recipe.train.batch {
            Batch::Samples(samples) => (samples * max_tokens, samples),
            Batch::Tokens(tokens) => (tokens.max(max_tokens), tokens.div_ceil(max_tokens)),
        };
        let demands = micro_token_choices(pinned, step_tokens, max_tokens)?
            .into_iter()
            .map(|micro_tokens| Demand {
                micro_tokens,
                extent: Extent { tokens: micro_tokens, rows: micro_tokens, segments: samples },
                micro_steps: step_tokens as f64 / micro_tokens as f64,
            })
            .collect();
        Ok(DemandShape { demands, step_tokens: step_tokens as f64 })
    }
}

fn micro_token_choices(
    pinned: Option<usize>,
    step_tokens: usize,
    longest: usize,
) -> Result<Vec<usize>, Failure> {
    if let Some(pinned) = pinned {
        if pinned < longest {
            return Err(Failure::recipe(format!(
                "`memory.micro_tokens = {pinned}` is below the longest sample, which has {longest} tokens"
            ))
            .hint(format!(
                "`memory.micro_tokens = {longest}`, or `data.max_tokens = {pinned}` to shorten the samples"
            )));
        }
        return Ok(vec![pinned.min(step_tokens)]);
    }
    let mut choices: Vec<usize> = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
        .into_iter()
        .map(|parts| step_tokens.div_ceil(parts))
        .filter(|tokens| *tokens > longest)
        .collect();
    choices.push(longest);
    Ok(choices)
}

pub fn largest_extent(one: Extent, other: Extent) -> Extent {
    Extent {
        tokens: one.tokens.max(other.tokens),
        rows: one.rows.max(other.rows),
        segments: one.segments.max(other.segments),
    }
}

/// Calls `visit` with the samples of each evaluation micro-batch: in order, until the next would exceed
/// `micro_tokens`.
pub fn for_each_eval_batch<E>(
    set: &TokenSet,
    limit: usize,
    micro_tokens: usize,
    mut visit: impl FnMut(std::ops::Range<u32>) -> Result<(), E>,
) -> Result<(), E> {
    let samples = if limit == 0 { set.len() } else { limit.min(set.len()) } as u32;
    let mut first = 0;
    while first < samples {
        let (mut end, mut tokens) = (first, 0);
        while end < samples && (end == first || tokens + set.length(end as usize) as usize <= micro_tokens) {
            tokens += set.length(end as usize) as usize;
            end += 1;
        }
        visit(first..end)?;
        first = end;
    }
    Ok(())
}

/// The largest evaluation micro-batch of the first `limit` samples (0: all).
pub fn eval_extent(set: &TokenSet, limit: usize, micro_tokens: usize) -> Extent {
    let mut largest = Extent::default();
    let result: Result<(), std::convert::Infallible> =
        for_each_eval_batch(set, limit, micro_tokens, |samples| {
            let mut extent = Extent::default();
            for sample in samples {
                extent.tokens += set.length(sample as usize) as usize;
                extent.rows += set.supervised(sample as usize) as usize;
                extent.segments += 1;
            }
            largest = largest_extent(largest, extent);
            Ok(())
        });
    match result {
        Ok(()) => largest,
    }
}
