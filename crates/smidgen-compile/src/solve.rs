//! The budget: the fastest policy whose plan fits.
//!
//! Candidates are micro-batch sizes from the whole batch down to the longest sample; for each the fewest
//! recomputed layers (from the first) that fit are found by bisection, with a smaller chunk of logits only
//! where the usual one leaves no room, and the predicted step time decides. Every candidate is compiled and measured by its own buffer table, never estimated.
//! Only memory choices are searched: nothing here changes a result.

use crate::error::SolveError;
use crate::options::{Policy, Recompute, Request, default_loss_chunk};
use crate::profile::Profile;
use crate::{compile, scheduled};
use smidgen_ir::{Entry, Extent, Plan};

/// What the data asks for at one size of micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    pub micro_tokens: usize,
    /// Largest micro-batch at that size.
    pub extent: Extent,
    /// Micro-batches of an average optimizer step.
    pub micro_steps: f64,
}

/// What the process or the driver takes beside the reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Context {
    pub bytes: u64,
    /// For every step of the plan: the plan itself has to be somewhere.
    pub step_bytes: u64,
}

impl Context {
    pub fn bytes_for(&self, plan: &Plan) -> u64 {
        let steps: usize = plan.entries.iter().map(|entry| entry.steps.len()).sum();
        self.bytes + self.step_bytes * steps as u64
    }
}

/// Choices that the user has made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    pub recompute: Option<Recompute>,
    pub loss_chunk: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Solution {
    pub plan: Plan,
    pub policy: Policy,
    pub demand: Demand,
    /// Reservation and context.
    pub peak_bytes: u64,
    pub context_bytes: u64,
    pub step_ms: f64,
    /// Why this plan: one sentence a choice.
    pub reasons: Vec<String>,
}

/// Plans the request for the fastest of `demands` (largest micro-batch first) under `budget_bytes`.
pub fn solve(
    request: &Request,
    demands: &[Demand],
    pins: &Pins,
    context: Context,
    budget_bytes: u64,
    profile: &Profile,
) -> Result<Solution, SolveError> {
    let mut best: Option<Solution> = None;
    let mut leanest: Option<SolveError> = None;
    for demand in demands {
        let mut request = request.clone();
        request.extent = demand.extent;
        let chunks = loss_chunks(&request, pins);
        for (index, &loss_chunk) in chunks.iter().enumerate() {
            let attempt =
                Attempt { request: &request, demand, pins, loss_chunk, context, budget_bytes, profile };
            match attempt.fewest_recomputed() {
                Ok(mut solution) => {
                    // Fewer rows of logits cost less than layers computed again.
                    let smaller = chunks[index + 1..].iter().take(2);
                    let mut smaller =
                        smaller.map(|loss_chunk| Attempt { loss_chunk: *loss_chunk, ..attempt });
                    if !solution.policy.recompute.layers.is_empty()
                        && let Some(kept) = smaller.find_map(|attempt| attempt.keeping_everything())
                    {
                        solution = kept;
                    }
                    // A smaller micro-batch that also keeps everything is never faster.
                    let kept_everything = solution.policy.recompute.layers.is_empty();
                    if best.as_ref().is_none_or(|best| solution.step_ms < best.step_ms) {
                        best = Some(solution);
                    }
                    if kept_everything {
                        return Ok(best.expect("just found"));
                    }
                    break;
                }
                Err(error) => {
                    if leanest
                        .as_ref()
                        .is_none_or(|other| error.leanest.peak_bytes < other.leanest.peak_bytes)
                    {
                        leanest = Some(error);
                    }
                }
            }
        }
    }
    match (best, leanest) {
        (Some(solution), _) => Ok(solution),
        (None, Some(error)) => Err(error),
        (None, None) => panic!("solve needs at least one demand"),
    }
}

/// Rows of logits to try: the usual number, then halves of it.
fn loss_chunks(request: &Request, pins: &Pins) -> Vec<usize> {
    const FEWEST_ROWS: usize = 32;
    if let Some(pinned) = pins.loss_chunk {
        return vec![pinned];
    }
    let usual = default_loss_chunk(request.device, request.spec.vocabulary, request.extent.rows);
    let halves = std::iter::successors(Some(usual), |rows| Some(rows / 2));
    halves.take_while(|rows| *rows == usual || *rows >= FEWEST_ROWS).collect()
}

#[derive(Clone, Copy)]
struct Attempt<'a> {
    request: &'a Request,
    demand: &'a Demand,
    pins: &'a Pins,
    loss_chunk: usize,
    context: Context,
    budget_bytes: u64,
    profile: &'a Profile,
}

impl Attempt<'_> {
    fn policy(&self, recompute: Recompute) -> Policy {
        Policy::resident(recompute, self.loss_chunk)
    }

    /// Peak before packing: a lower bound that is cheap to have.
    fn least_bytes(&self, policy: &Policy) -> u64 {
        let schedule = scheduled(self.request, policy);
        self.context.bytes_for(&schedule.plan) + schedule.least_bytes() as u64
    }

    /// The plan of a policy if it fits. Packing never needs less than what is alive, so a policy that
    /// is too large by that is not packed at all.
    fn fits(&self, policy: &Policy) -> Option<Plan> {
        if self.least_bytes(policy) > self.budget_bytes {
            return None;
        }
        let plan = compile(self.request, policy);
        (self.peak_bytes(&plan) <= self.budget_bytes).then_some(plan)
    }

    fn peak_bytes(&self, plan: &Plan) -> u64 {
        self.context.bytes_for(plan) + plan.reserved_bytes() as u64
    }

    fn keeping_everything(&self) -> Option<Solution> {
        if self.pins.recompute.is_some() {
            return None;
        }
        let policy = self.policy(Recompute::none());
        self.fits(&policy).map(|plan| self.solution(plan, policy))
    }

    fn fewest_recomputed(&self) -> Result<Solution, SolveError> {
        if let Some(recompute) = &self.pins.recompute {
            let policy = self.policy(recompute.clone());
            return match self.fits(&policy) {
                Some(plan) => Ok(self.solution(plan, policy)),
                None => Err(self.error(policy)),
            };
        }
        let none = self.policy(Recompute::none());
        if let Some(plan) = self.fits(&none) {
            return Ok(self.solution(plan, none));
        }
        let most = self.leanest_count();
        let leanest = self.policy(Recompute::first(most));
        let mut found = match self.fits(&leanest) {
            Some(plan) => (plan, leanest),
            None => return Err(self.error(leanest)),
        };
        // `low` layers are too few, `high` are enough.
        let (mut low, mut high) = (0, most);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            let policy = self.policy(Recompute::first(middle));
            match self.fits(&policy) {
                Some(plan) => (found, high) = ((plan, policy), middle),
                None => low = middle,
            }
        }
        Ok(self.solution(found.0, found.1))
    }

    /// How many recomputed layers need least. Backward begins with the last layer, beside the kept inputs
    /// of all the others: running it again there can take more than keeping it does.
    fn leanest_count(&self) -> usize {
        let layers = self.request.spec.layers;
        let bytes = |count: usize| self.least_bytes(&self.policy(Recompute::first(count)));
        if bytes(layers - 1) < bytes(layers) { layers - 1 } else { layers }
    }

    fn solution(&self, plan: Plan, policy: Policy) -> Solution {
        let micro_step = self.profile.entry_seconds(&plan, Entry::MicroStep);
        let update = self.profile.entry_seconds(&plan, Entry::Update);
        let seconds = micro_step * self.demand.micro_steps + update;
        let (peak_bytes, context_bytes) = (self.peak_bytes(&plan), self.context.bytes_for(&plan));
        let reasons = self.reasons(&policy, peak_bytes <= self.budget_bytes);
        let step_ms = seconds * 1e3;
        Solution { plan, policy, demand: *self.demand, peak_bytes, context_bytes, step_ms, reasons }
    }

    fn reasons(&self, policy: &Policy, fits: bool) -> Vec<String> {
        let (recomputed, layers) = (policy.recompute.layers.len(), self.request.spec.layers);
        let recompute = match (&self.pins.recompute, recomputed) {
            (Some(_), _) => format!("recompute: {recomputed} of {layers} layers, as pinned"),
            (None, 0) => "recompute: none, all activations fit".into(),
            (None, _) if fits => {
                format!("recompute: the first {recomputed} of {layers} layers, the fewest that fit")
            }
            (None, _) => format!("recompute: the first {recomputed} of {layers} layers, which needs least"),
        };
        let (tokens, steps) = (self.demand.extent.tokens, self.demand.micro_steps);
        let micro = match steps {
            steps if steps <= 1.0 => format!("micro-batch: a step in one, at most {tokens} tokens"),
            steps => format!("micro-batch: at most {tokens} tokens, {steps:.1} a step"),
        };
        vec![recompute, micro, format!("loss: {} rows of logits at a time", policy.loss_chunk)]
    }

    fn error(&self, policy: Policy) -> SolveError {
        let leanest = Box::new(self.solution(compile(self.request, &policy), policy));
        SolveError { budget_bytes: self.budget_bytes, leanest }
    }
}
