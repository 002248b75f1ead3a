//! A model loaded to be evaluated: a plan with the entry point `eval` alone, and what it takes.
//!
//! Base and adapter are evaluated one after the other by plans of the same sizes, so that only the adapter differs. Both
//! are planned before either is loaded: what does not fit is refused before a weight is read.
//! Left out: generation, which has a plan of its own.

use crate::failure::Failure;
use crate::plan::context::{gpu_context, job_context};
use crate::plan::devices::Place;
use crate::plan::terms::Terms;
use crate::session::adapters::read_adapter;
use crate::session::feed::Feed;
use crate::session::likelihood::log_likelihoods;
use crate::session::weights::clear;
use crate::session::weights::load_weights;
use smidgen_compile::{Demand, Purpose, Request, Solution, SolveError};
use smidgen_data::eval_batch::{count_eval_batches, eval_extent, largest_extent};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DeviceKind, Entry, Extent, LeafKind, Pins, Plan, Rank};
use smidgen_runtime::{AnyDevice, Executor};

/// The largest micro-batch by default: more tokens at a time are hardly faster.
const MOST_TOKENS: usize = 2048;

/// A model to evaluate.
#[derive(Debug)]
pub struct Subject<'a> {
    pub request: Request,
    pub adapter: Option<&'a AdapterFile>,
}

/// The device, the budget, and the memory that the samples take.
#[derive(Clone, Copy, Debug)]
pub struct Means<'a> {
    pub place: &'a Place,
    pub budget_bytes: u64,
    /// The budget was stated, and is not what is free.
    pub stated: bool,
    /// Of the samples.
    pub data_bytes: usize,
}

/// A plan of one subject.
#[derive(Debug)]
pub struct EvalPlan {
    pub plan: Plan,
    pub context_bytes: u64,
    pub peak_bytes: u64,
}

/// Plans for all subjects, in their order, by one policy: the fastest of one subject that all have room for.
pub fn plan_evaluation(
    subjects: &[Subject<'_>],
    model: &Model,
    sets: &[(&TokenSet, usize)],
    means: Means<'_>,
) -> Result<Vec<EvalPlan>, Failure> {
    let longest = sets.iter().map(|(set, _)| set.longest()).max().expect("there is something to evaluate");
    let demands = demands(sets, longest);
    let posed: Vec<Posed> = subjects.iter().map(|subject| Posed::new(subject, model, means)).collect();
    let mut needed: Vec<Solution> = Vec::new();
    // What has an adapter needs more, and is last.
    for first in posed.iter().rev() {
        let solution = match first.terms.solve(&first.request, &demands) {
            Ok(solution) => solution,
            Err(error) => {
                needed.push(*error.leanest);
                continue;
            }
        };
        let demand = [solution.demand];
        let pins = Pins::from(solution.policy);
        let others = posed.iter().map(|posed| {
            let terms = Terms { pins: pins.clone(), ..posed.terms.clone() };
            terms.solve(&posed.request, &demand)
        });
        match others.collect::<Result<Vec<Solution>, SolveError>>() {
            Ok(solutions) => return Ok(solutions.into_iter().map(EvalPlan::of).collect()),
            Err(error) => needed.push(*error.leanest),
        }
    }
    let largest = needed.into_iter().max_by_key(|solution| solution.peak_bytes).expect("there is a subject");
    Err(refusal(&EvalPlan::of(largest), means, longest))
}

/// Sizes of micro-batch to choose from, largest first.
fn demands(sets: &[(&TokenSet, usize)], longest: usize) -> Vec<Demand> {
    let sizes = [MOST_TOKENS, 1024, 512, 256, 128].into_iter().filter(|tokens| *tokens > longest);
    let mut demands: Vec<Demand> = Vec::new();
    for micro_tokens in sizes.chain([longest]) {
        let extents = sets.iter().map(|(set, limit)| eval_extent(set, *limit, micro_tokens));
        let extent = extents.fold(Extent::default(), largest_extent);
        let micro_steps = sets.iter().map(|(set, limit)| count_eval_batches(set, *limit, micro_tokens)).sum();
        // More room than there are tokens changes nothing.
        if demands.last().is_some_and(|before| before.extent == extent) {
            demands.pop();
        }
        demands.push(Demand { micro_tokens, extent, step: extent, micro_steps });
    }
    demands
}

/// A subject as the solver is asked about it.
struct Posed {
    request: Request,
    terms: Terms,
}

impl Posed {
    fn new(subject: &Subject<'_>, model: &Model, means: Means<'_>) -> Posed {
        let request = Request { row_losses: true, ..subject.request.clone() };
        let context = match request.device {
            DeviceKind::Cpu => job_context(&request, model, means.data_bytes as u64),
            DeviceKind::Cuda => gpu_context(means.place),
        };
        let terms = Terms::of_use(Purpose::Evaluation, &request, means.place, context, means.budget_bytes);
        Posed { request, terms }
    }
}

impl EvalPlan {
    fn of(solution: Solution) -> EvalPlan {
        let Solution { plan, peak_bytes, context_bytes, .. } = solution;
        EvalPlan { plan, context_bytes, peak_bytes }
    }
}

fn refusal(plan: &EvalPlan, means: Means<'_>, longest: usize) -> Failure {
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
        "`memory.budget = \"{}MiB\"` is the least that fits; a `data.max_tokens` below {longest} needs less",
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
    /// On a device that was opened by the request's threads and precision; whatever it held before is gone.
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

    /// Gives the device back, for the next subject.
    pub fn into_device(self) -> AnyDevice {
        self.executor.into_device()
    }

    /// Σ log p of each sample, up to `limit` of them (0: all).
    pub fn log_likelihoods(&mut self, set: &TokenSet, limit: usize) -> Result<Vec<f64>, Failure> {
        log_likelihoods(&mut self.executor, &self.feed, &mut self.micro_batch, set, limit, Rank::ONLY)
    }
}
