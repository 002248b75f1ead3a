//! Plans and loads models for evaluation, with the entry point `eval` only.
//!
//! Base and adapter are evaluated one after the other by plans of the same sizes, so that only the adapter differs.
//! Both are planned before either is loaded, so an evaluation that does not fit is refused before a weight is read.
//! Left out: generation, which has another plan (`generate/session.rs`).

use crate::failure::Failure;
use crate::plan::conditions::Conditions;
use crate::plan::context::{gpu_context, job_context};
use crate::plan::devices::JobDevice;
use crate::session::adapters::read_adapter;
use crate::session::feed::Feed;
use crate::session::likelihood::log_likelihoods;
use crate::session::weights::{clear, load_weights};
use smidgen_compile::{Demand, Purpose, Request, Solution, SolveError};
use smidgen_data::eval_batch::{count_eval_batches, eval_extent, largest_extent};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DeviceKind, Entry, Extent, LeafKind, Pins, Plan, Rank};
use smidgen_runtime::{AnyDevice, Executor};

/// The sizes of micro-batch that are tried. More tokens at a time are hardly faster.
const SIZES: [usize; 5] = [2048, 1024, 512, 256, 128];

/// A model to evaluate.
#[derive(Debug)]
pub struct Subject<'a> {
    pub request: Request,
    pub adapter: Option<&'a AdapterFile>,
}

/// The device and the memory of an evaluation.
#[derive(Clone, Copy, Debug)]
pub struct EvalResources<'a> {
    pub place: &'a JobDevice,
    pub budget_bytes: u64,
    /// Whether the user stated the budget; otherwise it is the free memory.
    pub stated: bool,
    /// Host memory of the samples.
    pub data_bytes: usize,
}

/// The plan of one subject.
#[derive(Debug)]
pub struct EvalPlan {
    pub plan: Plan,
    pub context_bytes: u64,
    pub peak_bytes: u64,
}

/// Plans for all subjects, in their order, with one policy: the fastest of any subject that fits them all.
pub fn plan_evaluation(
    subjects: &[Subject<'_>],
    model: &Model,
    sets: &[(&TokenSet, usize)],
    means: EvalResources<'_>,
) -> Result<Vec<EvalPlan>, Failure> {
    let longest = sets.iter().map(|(set, _)| set.longest()).max().expect("there is something to evaluate");
    let demands = demands(sets, longest);
    let questions: Vec<(Request, Conditions)> =
        subjects.iter().map(|subject| question(subject, model, means)).collect();
    let mut needed: Vec<Solution> = Vec::new();
    // The last subject is the one with an adapter, which needs more memory.
    for (request, conditions) in questions.iter().rev() {
        let solution = match conditions.solve(request, &demands) {
            Ok(solution) => solution,
            Err(error) => {
                needed.push(*error.leanest);
                continue;
            }
        };
        let demand = [solution.demand];
        let pins = Pins::from(solution.policy);
        let same = questions.iter().map(|(request, conditions)| {
            let conditions = Conditions { pins: pins.clone(), ..conditions.clone() };
            conditions.solve(request, &demand)
        });
        match same.collect::<Result<Vec<Solution>, SolveError>>() {
            Ok(solutions) => return Ok(solutions.into_iter().map(EvalPlan::of).collect()),
            Err(error) => needed.push(*error.leanest),
        }
    }
    let largest = needed.into_iter().max_by_key(|solution| solution.peak_bytes).expect("there is a subject");
    Err(refusal(&EvalPlan::of(largest), means, longest))
}

/// The micro-batches that the solver may choose from, largest first.
fn demands(sets: &[(&TokenSet, usize)], longest: usize) -> Vec<Demand> {
    let sizes = SIZES.into_iter().filter(|tokens| *tokens > longest);
    let mut demands: Vec<Demand> = Vec::new();
    for micro_tokens in sizes.chain([longest]) {
        let extents = sets.iter().map(|(set, limit)| eval_extent(set, *limit, micro_tokens));
        let extent = extents.fold(Extent::default(), largest_extent);
        let micro_steps = sets.iter().map(|(set, limit)| count_eval_batches(set, *limit, micro_tokens)).sum();
        // A larger limit than all samples need changes nothing.
        if demands.last().is_some_and(|before| before.extent == extent) {
            demands.pop();
        }
        demands.push(Demand { micro_tokens, extent, step: extent, micro_steps });
    }
    demands
}

/// The question to the solver about a subject.
fn question(subject: &Subject<'_>, model: &Model, means: EvalResources<'_>) -> (Request, Conditions) {
    let request = Request { row_losses: true, ..subject.request.clone() };
    let context = match request.device {
        DeviceKind::Cpu => job_context(&request, model, means.data_bytes as u64),
        DeviceKind::Cuda => gpu_context(means.place),
    };
    let conditions =
        Conditions::for_inference(Purpose::Evaluation, &request, means.place, context, means.budget_bytes);
    (request, conditions)
}

impl EvalPlan {
    fn of(solution: Solution) -> EvalPlan {
        let Solution { plan, peak_bytes, context_bytes, .. } = solution;
        EvalPlan { plan, context_bytes, peak_bytes }
    }
}

fn refusal(plan: &EvalPlan, means: EvalResources<'_>, longest: usize) -> Failure {
    let largest: Vec<String> = (plan.plan.peak().largest.iter().take(3))
        .map(|(name, bytes)| format!("{name} {}", format_bytes(*bytes as u64)))
        .collect();
    let budget = if means.stated { "the budget is" } else { "free memory is" };
    Failure::memory(format!(
        "the smallest evaluation needs {}, {budget} {}\n  largest at the peak: {}",
        format_bytes(plan.peak_bytes),
        format_bytes(means.budget_bytes),
        largest.join(", ")
    ))
    .hint(format!(
        "set `memory.budget = \"{}MiB\"` or more, or a `data.max_tokens` below {longest}",
        plan.peak_bytes.div_ceil(1 << 20)
    ))
}

/// A loaded model.
#[derive(Debug)]
pub struct Evaluator {
    executor: Executor<AnyDevice>,
    feed: Feed,
    micro_batch: MicroBatch,
}

impl Evaluator {
    /// Loads a subject onto a device that was opened with the request's threads and precision. The device's previous
    /// content is discarded.
    pub fn load(
        subject: &Subject<'_>,
        model: &Model,
        plan: EvalPlan,
        device: AnyDevice,
    ) -> Result<Evaluator, Failure> {
        let feed = Feed::of(&plan.plan, 0);
        let extent = plan.plan.extent;
        let mut executor = Executor::load(plan.plan, device)?;
        load_weights(&mut executor, model, subject.request.threads)?;
        clear(&mut executor, LeafKind::State)?;
        if let Some(adapter) = subject.adapter {
            read_adapter(&mut executor, &subject.request, adapter.path())?;
        }
        executor.run(Entry::Refresh, &extent)?;
        Ok(Evaluator { executor, feed, micro_batch: MicroBatch::with_capacity(extent) })
    }

    /// Returns the device for the next subject.
    pub fn into_device(self) -> AnyDevice {
        self.executor.into_device()
    }

    /// Σ log p of each of the first `limit` samples (0: all). Calls `on_samples` with the number of samples that are
    /// done.
    pub fn log_likelihoods(
        &mut self,
        set: &TokenSet,
        limit: usize,
        on_samples: &dyn Fn(usize),
    ) -> Result<Vec<f64>, Failure> {
        let Evaluator { executor, feed, micro_batch } = self;
        log_likelihoods(executor, feed, micro_batch, set, limit, Rank::ONLY, on_samples)
    }
}
