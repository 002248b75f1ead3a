//! The budget: the fastest policy whose plan fits.
//!
//! Candidates are micro-batch sizes from the whole batch down to the longest sample. For each there are two ladders of
//! policies, from the fastest to the leanest: one computes layers again before it sends weights away, one the other
//! way round; the lowest rung that fits is searched, with the usual chunk of logits and with the smallest, and
//! the predicted step time decides among them. Every candidate is compiled and measured by its own
//! buffer table, never estimated. Only memory choices are searched: nothing here changes a result.

use crate::error::SolveError;
use crate::ladder::{self, Ladder};
use crate::options::{Away, Policy, Recompute, Request, default_loss_chunk};
use crate::profile::Profile;
use crate::schedule::Schedule;
use crate::{arena, compile, differentiated, with_policy};
use smidgen_ir::{Entry, Extent, Graph, Plan, Space};

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
    /// Where a plan has values on disk: what passes on the way there.
    pub spill_bytes: u64,
    /// A byte of the device for so many of the host within its reach: its tables of where they are. 0 = none.
    pub host_bytes_a_table_byte: u64,
}

/// Tables of a device are taken in steps of this.
const TABLE_STEP_BYTES: u64 = 2 << 20;

impl Context {
    pub fn bytes_for(&self, plan: &Plan) -> u64 {
        let steps: usize = plan.entries.iter().map(|entry| entry.steps.len()).sum();
        let spills = plan.buffers.iter().any(|buffer| buffer.space == Space::Disk);
        let spill_bytes = if spills { self.spill_bytes } else { 0 };
        let host_bytes = plan.host.bytes() as u64;
        let tables = host_bytes.checked_div(self.host_bytes_a_table_byte).unwrap_or(0);
        self.bytes + self.step_bytes * steps as u64 + spill_bytes + tables.next_multiple_of(TABLE_STEP_BYTES)
    }
}

/// Bytes that a plan may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Reservation and context on the device.
    pub device_bytes: u64,
    /// What may lie elsewhere: pinned memory beside a GPU, disk beside a CPU.
    pub elsewhere_bytes: u64,
}

impl Budget {
    /// So much on the device, and room enough elsewhere.
    pub fn device(device_bytes: u64) -> Budget {
        Budget { device_bytes, elsewhere_bytes: u64::MAX }
    }
}

/// Choices that the user has made.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pins {
    /// All of them, as in a plan that was made before.
    pub policy: Option<Policy>,
    pub recompute: Option<Recompute>,
    pub loss_chunk: Option<usize>,
    /// Tokens for which wide activations exist at the same time; 0 = all.
    pub tile_tokens: Option<usize>,
    /// How many layers' weights lie elsewhere, and whether the tables do.
    pub weights_away: Option<usize>,
    pub tables_away: Option<bool>,
    /// Whether those that are away are on disk, also beside a GPU.
    pub weights_on_disk: bool,
    /// Whether activations for the backward pass wait elsewhere.
    pub activations_away: Option<bool>,
    pub moments_away: Option<bool>,
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
    /// What each choice saves and costs; only of what [`solve`] returns.
    pub prices: Vec<Price>,
}

/// A choice, against the same plan without it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Price {
    pub choice: &'static str,
    /// Of the device; below zero where it takes more.
    pub saved_bytes: i64,
    /// Of a step, as predicted.
    pub cost_ms: f64,
}

impl Solution {
    /// Bytes that lie in pinned memory or on disk.
    pub fn elsewhere_bytes(&self) -> u64 {
        elsewhere_bytes(&self.plan)
    }
}

/// Plans the request for the fastest of `demands` (largest micro-batch first) under a budget.
pub fn solve(
    request: &Request,
    demands: &[Demand],
    pins: &Pins,
    context: Context,
    budget: Budget,
    profile: &Profile,
) -> Result<Solution, SolveError> {
    let mut best: Option<Solution> = None;
    let mut leanest: Option<SolveError> = None;
    for demand in demands {
        let mut request = request.clone();
        request.extent = demand.extent;
        let chunks = loss_chunks(&request, pins);
        let attempt = |loss_chunk| Attempt {
            request: &request,
            demand,
            pins,
            loss_chunk,
            graph: differentiated(&request, loss_chunk, |_, _| {}),
            context,
            budget,
            profile,
        };
        // The usual chunk of logits, and the smallest where that lets more be kept.
        let mut found: Option<Solution> = None;
        for loss_chunk in [Some(chunks[0]), chunks[1..].last().copied()].into_iter().flatten() {
            match attempt(loss_chunk).fastest() {
                Ok(solution) => {
                    let is_faster = |other: &Solution| solution.step_ms < other.step_ms;
                    if found.as_ref().is_none_or(is_faster) {
                        found = Some(solution);
                    }
                }
                Err(error) => {
                    let is_leaner = |other: &SolveError| error.leanest.peak_bytes < other.leanest.peak_bytes;
                    if leanest.as_ref().is_none_or(is_leaner) {
                        leanest = Some(error);
                    }
                }
            }
            if found.as_ref().is_some_and(|found| keeps_everything(&found.policy)) {
                break;
            }
        }
        let Some(mut solution) = found else { continue };
        // As many rows of logits as the same choices leave room for.
        let more = chunks.iter().copied().filter(|rows| *rows > solution.policy.loss_chunk);
        let mut larger = more.map(|rows| attempt(rows).with(&solution.policy));
        if let Some(larger) = larger.find_map(|larger| larger) {
            solution = larger;
        }
        // A smaller micro-batch that also keeps everything is never faster.
        let kept_everything = keeps_everything(&solution.policy);
        if best.as_ref().is_none_or(|best| solution.step_ms < best.step_ms) {
            best = Some(solution);
        }
        if kept_everything {
            break;
        }
    }
    match (best, leanest) {
        (Some(solution), _) => {
            let request = Request { extent: solution.demand.extent, ..request.clone() };
            let (demand, loss_chunk) = (&solution.demand, solution.policy.loss_chunk);
            let graph = differentiated(&request, loss_chunk, |_, _| {});
            let attempt =
                Attempt { request: &request, demand, pins, loss_chunk, graph, context, budget, profile };
            let prices = attempt.prices(&solution.policy);
            // Through every check; the same plan comes out.
            Ok(Solution { plan: compile(&request, &solution.policy), prices, ..solution })
        }
        (None, Some(error)) => Err(error),
        (None, None) => panic!("solve needs at least one demand"),
    }
}

/// Whether any policy fits, which takes less time than finding the fastest: the leanest is looked at.
pub fn can_fit(
    request: &Request,
    demand: &Demand,
    pins: &Pins,
    context: Context,
    budget: Budget,
    profile: &Profile,
) -> bool {
    let request = Request { extent: demand.extent, ..request.clone() };
    let loss_chunk = *loss_chunks(&request, pins).last().expect("there is a chunk of logits");
    let graph = differentiated(&request, loss_chunk, |_, _| {});
    let attempt = Attempt { request: &request, demand, pins, loss_chunk, graph, context, budget, profile };
    let leanest = attempt.ladders().into_iter().filter_map(|mut ladder| ladder.rungs.pop());
    // Where room elsewhere is short or the model tiny, a policy that is less lean may fit.
    leanest.filter_map(|policy| attempt.fits(&policy)).any(|plan| attempt.fits_elsewhere(&plan))
        || attempt.fastest().is_ok()
}

fn keeps_everything(policy: &Policy) -> bool {
    policy.recompute.layers.is_empty() && policy.tile_tokens.is_none() && policy.away.is_empty()
}

fn elsewhere_bytes(plan: &Plan) -> u64 {
    [Space::Host, Space::Disk].map(|space| plan.size(space).bytes() as u64).iter().sum()
}

/// Rows of logits to try: the usual number, then halves of it.
fn loss_chunks(request: &Request, pins: &Pins) -> Vec<usize> {
    const FEWEST_ROWS: usize = 32;
    if let Some(pinned) = pins.policy.as_ref().map(|policy| policy.loss_chunk).or(pins.loss_chunk) {
        return vec![pinned];
    }
    let usual = default_loss_chunk(request.device, request.spec.vocabulary, request.extent.rows);
    let halves = std::iter::successors(Some(usual), |rows| Some(rows / 2));
    halves.take_while(|rows| *rows == usual || *rows >= FEWEST_ROWS).collect()
}

struct Attempt<'a> {
    request: &'a Request,
    demand: &'a Demand,
    pins: &'a Pins,
    loss_chunk: usize,
    /// What every policy begins with.
    graph: Graph,
    context: Context,
    budget: Budget,
    profile: &'a Profile,
}

impl Attempt<'_> {
    /// Candidates are not checked between their stages; the one that is chosen is.
    fn scheduled(&self, policy: &Policy) -> Schedule {
        with_policy(self.graph.clone(), self.request, policy, |_, _| {})
    }

    /// Peak before packing: a lower bound that is cheap to have.
    fn least_bytes(&self, schedule: &Schedule) -> u64 {
        self.context.bytes_for(&schedule.plan) + schedule.least_bytes() as u64
    }

    /// The plan of a policy, if it fits the device.
    fn fits(&self, policy: &Policy) -> Option<Plan> {
        let schedule = self.scheduled(policy);
        if self.least_bytes(&schedule) > self.budget.device_bytes {
            return None;
        }
        let plan = arena::plan_memory_unchecked(schedule);
        (self.peak_bytes(&plan) <= self.budget.device_bytes).then_some(plan)
    }

    fn fits_elsewhere(&self, plan: &Plan) -> bool {
        elsewhere_bytes(plan) <= self.budget.elsewhere_bytes
    }

    fn peak_bytes(&self, plan: &Plan) -> u64 {
        self.context.bytes_for(plan) + plan.reserved_bytes() as u64
    }

    /// The choices of another attempt with this chunk of logits, if they fit.
    fn with(&self, policy: &Policy) -> Option<Solution> {
        let policy = Policy { loss_chunk: self.loss_chunk, ..policy.clone() };
        let plan = self.fits(&policy).filter(|plan| self.fits_elsewhere(plan))?;
        Some(self.solution(plan, policy))
    }

    fn ladders(&self) -> Vec<Ladder> {
        ladder::all(self.request, self.pins, self.loss_chunk, |count| {
            self.least_bytes(&self.scheduled(&Policy::resident(Recompute::first(count), self.loss_chunk)))
        })
    }

    /// The faster of the lowest rungs that fit, or the leanest policy there is.
    fn fastest(&self) -> Result<Solution, SolveError> {
        let ladders = self.ladders();
        let mut best: Option<Solution> = None;
        for ladder in &ladders {
            let Some((plan, policy)) = self.lowest_that_fits(ladder) else { continue };
            let solution = self.solution(plan, policy);
            if best.as_ref().is_none_or(|best| solution.step_ms < best.step_ms) {
                best = Some(solution);
            }
            if best.as_ref().is_some_and(|best| keeps_everything(&best.policy)) {
                break;
            }
        }
        best.ok_or_else(|| {
            let leanest = ladders.iter().map(|ladder| ladder.rungs[self.leanest(ladder).1].clone());
            let solutions = leanest.map(|policy| self.solution(compile(self.request, &policy), policy));
            let leanest = solutions.min_by_key(|solution| solution.peak_bytes);
            let leanest = Box::new(leanest.expect("a ladder has a rung"));
            SolveError { budget_bytes: self.budget.device_bytes, leanest }
        })
    }

    /// Higher rungs have less on the device and more elsewhere, so if the lowest that fits the device does not fit
    /// there, none does.
    fn lowest_that_fits(&self, ladder: &Ladder) -> Option<(Plan, Policy)> {
        self.lowest_on_device(ladder).filter(|(plan, _)| self.fits_elsewhere(plan))
    }

    /// Packing never needs less than what is alive, and seldom more: rungs are searched by what is alive, and from the
    /// lowest on packed until one fits.
    fn lowest_on_device(&self, ladder: &Ladder) -> Option<(Plan, Policy)> {
        let first = self.lowest_alive(ladder)?;
        ladder.rungs[first..].iter().find_map(|policy| Some((self.fits(policy)?, policy.clone())))
    }

    fn alive(&self, policy: &Policy) -> u64 {
        self.least_bytes(&self.scheduled(policy))
    }

    /// The rung of which least is alive, and how much.
    fn leanest(&self, ladder: &Ladder) -> (u64, usize) {
        let ends = ladder.ends.iter().map(|end| (self.alive(&ladder.rungs[*end]), *end));
        ends.min().expect("a ladder has a rung")
    }

    /// The first rung of which no more is alive than the budget allows. Bytes fall along a ladder in a few straight
    /// stretches, so a guess along the line between two rungs and a look beside it mostly end the search; halves are
    /// for the rest.
    fn lowest_alive(&self, ladder: &Ladder) -> Option<usize> {
        let alive = |rung: usize| self.alive(&ladder.rungs[rung]);
        let budget_bytes = self.budget.device_bytes;
        let (mut low, mut high) = (0, ladder.rungs.len() - 1);
        let mut low_bytes = alive(low);
        if low_bytes <= budget_bytes {
            return Some(low);
        }
        let mut high_bytes = alive(high);
        if high_bytes > budget_bytes {
            (high_bytes, high) = self.leanest(ladder);
        }
        if high_bytes > budget_bytes {
            return None;
        }
        for turn in 0.. {
            // Rung `low` is too large, rung `high` is not.
            if high - low <= 1 {
                break;
            }
            let along = (low_bytes - budget_bytes) as f64 / (low_bytes - high_bytes) as f64;
            let middle = match turn % 3 {
                0 => low + (along * (high - low) as f64).ceil() as usize,
                1 => high - 1,
                _ => low + (high - low) / 2,
            };
            let middle = middle.clamp(low + 1, high - 1);
            match alive(middle) {
                bytes if bytes <= budget_bytes => (high, high_bytes) = (middle, bytes),
                bytes => (low, low_bytes) = (middle, bytes),
            }
        }
        Some(high)
    }

    fn solution(&self, plan: Plan, policy: Policy) -> Solution {
        let seconds = self.step_seconds(&plan);
        let (peak_bytes, context_bytes) = (self.peak_bytes(&plan), self.context.bytes_for(&plan));
        let reasons = self.reasons(&policy, peak_bytes <= self.budget.device_bytes);
        let step_ms = seconds * 1e3;
        let (demand, prices) = (*self.demand, vec![]);
        Solution { plan, policy, demand, peak_bytes, context_bytes, step_ms, reasons, prices }
    }

    /// What each choice of a policy saves and costs, by what is alive without it.
    fn prices(&self, policy: &Policy) -> Vec<Price> {
        let away = &policy.away;
        let without = |change: Away| Policy { away: change, ..policy.clone() };
        let choices = [
            (
                "recompute",
                !policy.recompute.layers.is_empty(),
                Policy { recompute: Recompute::none(), ..policy.clone() },
            ),
            (
                "weights away",
                !away.weights.is_empty() || away.tables,
                without(Away { weights: vec![], tables: false, ..away.clone() }),
            ),
            ("embedding away", away.embedding, without(Away { embedding: false, ..away.clone() })),
            (
                "activations away",
                !away.activations.is_empty(),
                without(Away { activations: vec![], ..away.clone() }),
            ),
            ("tiles", policy.tile_tokens.is_some(), Policy { tile_tokens: None, ..policy.clone() }),
            ("moments away", away.moments, without(Away { moments: false, ..away.clone() })),
        ];
        let made: Vec<(&'static str, Policy)> =
            choices.into_iter().filter(|choice| choice.1).map(|(name, _, policy)| (name, policy)).collect();
        if made.is_empty() {
            return vec![];
        }
        let measure = |policy: &Policy| {
            let schedule = self.scheduled(policy);
            (self.least_bytes(&schedule) as i64, 1e3 * self.step_seconds(&schedule.plan))
        };
        let (bytes, ms) = measure(policy);
        let price = |(choice, other): (&'static str, Policy)| {
            let (other_bytes, other_ms) = measure(&other);
            Price { choice, saved_bytes: other_bytes - bytes, cost_ms: ms - other_ms }
        };
        made.into_iter().map(price).collect()
    }

    fn step_seconds(&self, plan: &Plan) -> f64 {
        let micro_step = self.profile.entry_seconds(plan, Entry::MicroStep);
        micro_step * self.demand.micro_steps + self.profile.entry_seconds(plan, Entry::Update)
    }

    fn reasons(&self, policy: &Policy, fits: bool) -> Vec<String> {
        let (recomputed, layers) = (policy.recompute.layers.len(), self.request.spec.layers);
        let is_pinned = self.pins.recompute.is_some() || self.pins.policy.is_some();
        let recompute = match recomputed {
            _ if is_pinned => format!("recompute: {recomputed} of {layers} layers, as pinned"),
            0 if policy.away.activations.is_empty() => "recompute: none, all activations fit".into(),
            0 => "recompute: none".into(),
            _ if fits => {
                format!("recompute: the first {recomputed} of {layers} layers, the fewest that fit")
            }
            _ => format!("recompute: the first {recomputed} of {layers} layers, which needs least"),
        };
        let (tokens, steps) = (self.demand.extent.tokens, self.demand.micro_steps);
        let micro = match steps {
            steps if steps <= 1.0 => format!("micro-batch: a step in one, at most {tokens} tokens"),
            steps => format!("micro-batch: at most {tokens} tokens, {steps:.1} a step"),
        };
        let mut reasons =
            vec![recompute, micro, format!("loss: {} rows of logits at a time", policy.loss_chunk)];
        let place = match self.request.elsewhere() {
            Space::Disk => "on disk",
            Space::Host | Space::Device => "in pinned memory of the host",
        };
        if let Some(tokens) = policy.tile_tokens {
            reasons.push(format!("tiles: wide activations for {tokens} tokens at a time"));
        }
        let away = &policy.away;
        if !away.weights.is_empty() {
            let (count, tables) =
                (away.weights.len(), if away.tables { ", and embedding and head" } else { "" });
            reasons.push(format!(
                "weights: those of {count} of {layers} layers {place}{tables}, brought ahead of use"
            ));
        } else if away.tables {
            reasons.push(format!("weights: embedding and head {place}"));
        }
        if away.embedding {
            reasons.push(format!("embedding: {place}, its rows looked up there"));
        }
        if !away.activations.is_empty() {
            let count = away.activations.len();
            reasons
                .push(format!("activations: those of {count} of {layers} layers wait {place} for backward"));
        }
        if away.moments {
            reasons.push(format!("optimizer: its moments lie {place}"));
        }
        reasons
    }
}
