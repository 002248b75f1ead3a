//! A model loaded to be evaluated: a plan with the entry point `eval` alone, and what it takes.
//!
//! Base and adapter are evaluated one after the other by plans of the same sizes, so that only the adapter differs. Both
//! are planned before either is loaded: what does not fit is refused before a weight is read.
//! Left out: generation, which has a plan of its own.

use crate::failure::Failure;
use crate::plan::context::{gpu_context, job_context};
use crate::plan::devices::Place;
use crate::session::adapters::read_adapter;
use crate::session::feed::Feed;
use crate::session::likelihood::log_likelihoods;
use crate::session::weights::clear;
use crate::session::weights::load_weights;
use smidgen_compile::ladder::all_weights_away;
use smidgen_compile::request::default_loss_chunk;
use smidgen_compile::{Away, Policy, Recompute, Request, compile_eval};
use smidgen_data::eval_batch::{eval_extent, largest_extent};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DeviceKind, Entry, Extent, LeafKind, Plan};
use smidgen_runtime::{AnyDevice, Executor};

/// The largest micro-batch by default: more tokens at a time are hardly faster.
const MOST_TOKENS: usize = 2048;
/// Rows whose logits exist at the same time in the leanest plan.
const FEWEST_ROWS: usize = 16;

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

/// Plans for all subjects, in their order, with the largest sizes that fit.
pub fn plan_evaluation(
    subjects: &[Subject<'_>],
    model: &Model,
    sets: &[(&TokenSet, usize)],
    means: Means<'_>,
) -> Result<Vec<EvalPlan>, Failure> {
    let longest = sets.iter().map(|(set, _)| set.longest()).max().expect("there is something to evaluate");
    let mut sizes: Vec<usize> =
        [MOST_TOKENS, 1024, 512, 256, 128].into_iter().filter(|tokens| *tokens > longest).collect();
    sizes.push(longest);
    let mut leanest: Option<Vec<EvalPlan>> = None;
    let request = &subjects[0].request;
    // Offloaded weights come last: they cost the same time at every size.
    let ways = [Away::default(), all_weights_away(request, 2), all_weights_away(request, 0)];
    for away in ways {
        for &tokens in &sizes {
            let extents = sets.iter().map(|(set, limit)| eval_extent(set, *limit, tokens));
            let extent = extents.fold(Extent::default(), largest_extent);
            let first = default_loss_chunk(request.device, request.spec.vocabulary, extent.rows);
            for chunk in [first, first.min(FEWEST_ROWS)] {
                let policy = Policy { away: away.clone(), ..Policy::resident(Recompute::none(), chunk) };
                let plan = |subject: &Subject<'_>| plan_one(subject, model, extent, &policy, means);
                let plans: Vec<EvalPlan> = subjects.iter().map(plan).collect();
                if plans.iter().all(|plan| plan.peak_bytes <= means.budget_bytes) {
                    return Ok(plans);
                }
                let most = |plans: &[EvalPlan]| plans.iter().map(|plan| plan.peak_bytes).max();
                if leanest.as_ref().is_none_or(|leanest| most(&plans) < most(leanest)) {
                    leanest = Some(plans);
                }
            }
        }
    }
    let plans = leanest.expect("there is a size to try");
    let largest = plans.iter().max_by_key(|plan| plan.peak_bytes).expect("there is a subject");
    Err(refusal(largest, means, longest))
}

fn plan_one(
    subject: &Subject<'_>,
    model: &Model,
    extent: Extent,
    policy: &Policy,
    means: Means<'_>,
) -> EvalPlan {
    let request = Request { extent, row_losses: true, ..subject.request.clone() };
    let plan = compile_eval(&request, policy);
    let context = match request.device {
        DeviceKind::Cpu => job_context(&request, model, means.data_bytes as u64),
        DeviceKind::Cuda => gpu_context(means.place),
    };
    let context_bytes = context.bytes_for(&plan);
    let peak_bytes = plan.reserved_bytes() as u64 + context_bytes;
    EvalPlan { plan, context_bytes, peak_bytes }
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
        load_weights(&mut executor, model)?;
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
        log_likelihoods(&mut self.executor, &self.feed, &mut self.micro_batch, set, limit)
    }
}
