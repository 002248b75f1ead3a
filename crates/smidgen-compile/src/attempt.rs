//! One size of micro-batch under a budget: what choices take there, and the lowest rungs that fit.
//!
//! Choices are measured by a schedule, which knows what is alive and how long a step takes; only what is chosen in
//! the end is packed. Every measurement is kept, so that a search may ask twice, and is counted in a [`Workshop`]
//! that all sizes share: the work of a search is bounded by what it did, never by a clock.

use crate::context::Context;
use crate::ladder::{Choices, Freedom, Ladder, Waiting};
use crate::profile::Profile;
use crate::question::{Budget, Demand};
use crate::request::{Policy, Recompute, Request};
use crate::schedule::Schedule;
use crate::solution::elsewhere_bytes;
use crate::stages::{computed, differentiated, moved};
use crate::{arena, forward};
use smidgen_ir::{Entry, Graph, Phase, Plan, Space};
use std::cell::{Cell, RefCell};

/// What choices take, before packing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Taken {
    /// On the device: what is alive at the peak, and the context. Packing never needs less, and seldom more.
    pub bytes: u64,
    /// The same for each region; the largest of them.
    pub region_bytes: [u64; REGIONS],
    /// In pinned memory or on disk.
    pub elsewhere_bytes: u64,
    /// Of an optimizer step, as predicted.
    pub ms: f64,
    /// Of the plan.
    pub steps: usize,
}

/// Stretches of a run whose peaks are looked at apart: forward, backward by quarters of the layers, the loss, what else
/// lies outside of layers, the update, and all other entry points.
pub const REGIONS: usize = 9;
/// Those of the loss and of the other entry points.
pub const HEAD_REGION: usize = 5;
pub const OTHER_REGION: usize = 8;

impl Taken {
    /// The region that has the peak.
    pub fn peak_region(&self) -> usize {
        self.region_bytes.iter().position(|bytes| *bytes == self.bytes).unwrap_or(0)
    }
}

/// What the sizes of one request share: the graphs that their candidates are made from, and how much was done.
#[derive(Default)]
pub struct Workshop {
    /// Steps that were scheduled so far.
    steps: Cell<usize>,
    graphs: RefCell<Option<Graphs>>,
}

/// Without names: candidates are measured, not shown.
struct Graphs {
    /// What every policy of every size begins with.
    differentiated: Graph,
    /// What the last one computed when: mostly the next one does the same.
    computed: Option<(ComputedAs, Graph)>,
}

/// What a graph is the same by: what is computed again, and tiles, which are cut for so many tokens.
#[derive(Clone, Debug, PartialEq)]
struct ComputedAs {
    recompute: Recompute,
    tiles: Option<(usize, usize)>,
}

/// Steps of a model in which everything is tried. In larger ones what can be away is, since its bytes are more than what
/// it takes to bring them.
pub const STEPS_OF_SMALL: usize = 6_000;
/// How much more the last rung of a large model takes than its leanest, at most.
const NEARLY: f64 = 1.1;

/// Steps that a search may schedule: about half a second of one processor core.
const MOST_STEPS: usize = 300_000;

pub struct Attempt<'a> {
    /// Of this size.
    pub request: Request,
    pub demand: Demand,
    pub freedom: Freedom<'a>,
    pub context: Context,
    pub budget: Budget,
    pub profile: &'a Profile,
    /// Rows of logits at a time, most first.
    pub chunks: Vec<usize>,
    workshop: &'a Workshop,
    /// In the order of asking.
    seen: RefCell<Vec<(Policy, Taken)>>,
    /// Where mixtures were looked for.
    points: RefCell<Vec<Choices>>,
}

impl<'a> Attempt<'a> {
    pub fn new(
        request: &Request,
        demand: &Demand,
        freedom: Freedom<'a>,
        chunks: Vec<usize>,
        (context, budget, profile): (Context, Budget, &'a Profile),
        workshop: &'a Workshop,
    ) -> Attempt<'a> {
        let request = Request { extent: demand.extent, ..request.clone() };
        let (seen, points) = (RefCell::default(), RefCell::default());
        let demand = *demand;
        Attempt { request, demand, freedom, context, budget, profile, chunks, workshop, seen, points }
    }

    /// The fastest that is free to choose.
    pub fn start(&self) -> Choices {
        self.freedom.start(self.chunks[0])
    }

    /// What needs least in almost every model.
    pub fn leanest_choices(&self) -> Choices {
        let freedom = &self.freedom;
        Choices {
            loss_chunk: *self.chunks.last().expect("there is a chunk of logits"),
            recomputed: freedom.layers.saturating_sub(1),
            weights_away: freedom.layers,
            embedding_away: false,
            tables_away: true,
            head_in_pieces: freedom.head_pieces > 1,
            activations: Waiting::OfRecomputed,
            moments_away: true,
            tile_tokens: freedom.tile(self.demand.extent.tokens),
            window_layers: 0,
        }
    }

    pub fn taken(&self, choices: &Choices) -> Taken {
        self.taken_by(&self.freedom.policy(choices))
    }

    /// What choices take, if it was asked before.
    pub fn known(&self, choices: &Choices) -> Option<Taken> {
        self.known_by(&self.freedom.policy(choices))
    }

    fn known_by(&self, policy: &Policy) -> Option<Taken> {
        self.seen.borrow().iter().find(|(seen, _)| seen == policy).map(|(_, taken)| *taken)
    }

    pub fn taken_by(&self, policy: &Policy) -> Taken {
        if let Some(taken) = self.known_by(policy) {
            return taken;
        }
        let mut schedule = self.scheduled(policy);
        let elsewhere_bytes = schedule.elsewhere_bytes(self.request.elsewhere()) as u64;
        // Before packing a plan does not know it, and the context may depend on it.
        if self.request.elsewhere() == Space::Host {
            schedule.plan.host.persistent_bytes = elsewhere_bytes as usize;
        }
        let region_bytes = self.region_bytes(&schedule);
        let bytes = region_bytes.into_iter().max().unwrap_or(0);
        let ms = 1e3 * self.step_seconds(&schedule.plan);
        let steps = schedule.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        let taken = Taken { bytes, region_bytes, elsewhere_bytes, ms, steps };
        self.seen.borrow_mut().push((policy.clone(), taken));
        taken
    }

    fn region_bytes(&self, schedule: &Schedule) -> [u64; REGIONS] {
        let plan = &schedule.plan;
        let always = self.context.bytes_for(plan) + schedule.persistent_bytes() as u64;
        let mut regions = [always; REGIONS];
        for entry in &plan.entries {
            for (step, live) in entry.steps.iter().zip(plan.live_bytes(entry.entry)) {
                let region = match (entry.entry, step.phase, step.layer) {
                    (Entry::MicroStep, Phase::Forward, Some(_)) => 0,
                    (Entry::MicroStep, _, Some(layer)) => 1 + 4 * layer / self.freedom.layers,
                    (Entry::MicroStep, _, None) if step.op.is_of_loss() => HEAD_REGION,
                    (Entry::MicroStep, _, None) => 6,
                    (Entry::Update, ..) => 7,
                    _ => OTHER_REGION,
                };
                regions[region] = regions[region].max(always + live as u64);
            }
        }
        regions
    }

    /// Everything seen that may fit, the fastest first, and among equals what was asked for first.
    pub fn candidates(&self) -> Vec<(Policy, Taken)> {
        let seen = self.seen.borrow();
        let mut all: Vec<_> = seen.iter().filter(|(_, taken)| self.is_within(taken)).cloned().collect();
        all.sort_by(|one, other| one.1.ms.total_cmp(&other.1.ms));
        all
    }

    pub fn is_within(&self, taken: &Taken) -> bool {
        taken.bytes <= self.budget.device_bytes && taken.elsewhere_bytes <= self.budget.elsewhere_bytes
    }

    pub fn is_first_time_at(&self, point: &Choices) -> bool {
        let mut points = self.points.borrow_mut();
        let is_first = !points.contains(point);
        points.push(*point);
        is_first
    }

    /// Everything seen that has at most so much elsewhere.
    pub fn seen_within(&self, elsewhere_bytes: u64) -> Vec<(Policy, Taken)> {
        let seen = self.seen.borrow();
        seen.iter().filter(|(_, taken)| taken.elsewhere_bytes <= elsewhere_bytes).cloned().collect()
    }

    /// Whether this share of the effort is used up.
    pub fn is_spent(&self, share: f64) -> bool {
        self.effort_steps() as f64 > share * MOST_STEPS as f64
    }

    pub fn effort_steps(&self) -> usize {
        self.workshop.steps.get()
    }

    pub fn set_effort_steps(&self, steps: usize) {
        self.workshop.steps.set(steps);
    }

    /// Candidates are not checked between their stages; the one that is chosen is.
    fn scheduled(&self, policy: &Policy) -> Schedule {
        let mut kept = self.workshop.graphs.borrow_mut();
        let Graphs { differentiated, computed: last } = kept.get_or_insert_with(|| {
            let mut differentiated = differentiated(&self.request, policy.loss_chunk, |_, _| {});
            differentiated.forget_names();
            Graphs { differentiated, computed: None }
        });
        let tiles = policy.tile_tokens.map(|tile| (tile, self.request.extent.tokens));
        let wanted = ComputedAs { recompute: policy.recompute.clone(), tiles };
        if last.as_ref().is_none_or(|(own, _)| *own != wanted) {
            *last = None;
            let (graph, recompute) = (differentiated.clone(), &policy.recompute);
            let graph = computed(graph, &self.request, recompute, policy.tile_tokens, |_, _| {});
            *last = Some((wanted, graph));
        }
        let mut graph = last.as_ref().expect("it was just made").1.clone();
        forward::set_loss_chunk(&mut graph, policy.loss_chunk);
        let schedule = moved(graph, &self.request, policy, |_, _| {});
        let steps: usize = schedule.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        self.set_effort_steps(self.effort_steps() + steps);
        schedule
    }

    /// Whether the plan of a policy fits.
    pub fn packs(&self, policy: &Policy) -> bool {
        self.is_within(&self.taken_by(policy))
            && self.holds(&arena::plan_memory_unchecked(self.scheduled(policy)))
    }

    /// What the plan of a policy takes, unless that is more than the budget.
    pub fn packed_peak_bytes(&self, policy: &Policy, budget: Budget) -> Option<u64> {
        let schedule = self.scheduled(policy);
        // No packing needs less than what is alive.
        let alive_bytes = self.region_bytes(&schedule).into_iter().max().unwrap_or(0);
        if alive_bytes > budget.device_bytes {
            return None;
        }
        let plan = arena::plan_memory_unchecked(schedule);
        let peak_bytes = self.peak_bytes(&plan);
        let fits = peak_bytes <= budget.device_bytes && elsewhere_bytes(&plan) <= budget.elsewhere_bytes;
        fits.then_some(peak_bytes)
    }

    /// Whether the budget holds a plan.
    pub fn holds(&self, plan: &Plan) -> bool {
        let fits_here = self.peak_bytes(plan) <= self.budget.device_bytes;
        fits_here && elsewhere_bytes(plan) <= self.budget.elsewhere_bytes
    }

    pub fn peak_bytes(&self, plan: &Plan) -> u64 {
        self.context.bytes_for(plan) + plan.reserved_bytes() as u64
    }

    pub fn step_seconds(&self, plan: &Plan) -> f64 {
        let micro_step = self.profile.entry_seconds(plan, Entry::MicroStep);
        micro_step * self.demand.micro_steps + self.profile.entry_seconds(plan, Entry::Update)
    }

    pub fn ladders(&self, loss_chunk: usize) -> Vec<Ladder> {
        let is_short_elsewhere = self.budget.elsewhere_bytes < u64::MAX;
        let tokens = self.demand.extent.tokens;
        self.freedom.ladders(loss_chunk, tokens, is_short_elsewhere, |choices| self.taken(choices).bytes)
    }

    /// The lowest rung of each ladder of which no more is alive than the budget allows.
    pub fn lowest_rungs(&self, loss_chunk: usize) -> Vec<Choices> {
        let ladders = self.ladders(loss_chunk);
        ladders.iter().filter_map(|ladder| Some(ladder.rungs[self.lowest_alive(ladder)?])).collect()
    }

    /// The first policy from the lowest rung of a ladder on that fits when it is packed.
    pub fn lowest_packed(&self, loss_chunk: usize) -> Option<Policy> {
        let above = |ladder: &Ladder| {
            let rungs = ladder.rungs[self.lowest_alive(ladder)?..].iter();
            let mut policies = rungs.map(|rung| self.freedom.policy(rung));
            policies.find(|policy| self.packs(policy))
        };
        self.ladders(loss_chunk).iter().find_map(above)
    }

    /// The rung of which least is alive, and how much.
    pub fn leanest(&self, ladder: &Ladder) -> (u64, usize) {
        let ends = ladder.ends.iter().map(|end| (self.taken(&ladder.rungs[*end]).bytes, *end));
        ends.min().expect("a ladder has a rung")
    }

    /// Bytes fall along a ladder in a few straight stretches, so a guess along the line between two rungs and a look
    /// beside it mostly end the search; halves are for the rest.
    fn lowest_alive(&self, ladder: &Ladder) -> Option<usize> {
        let alive = |rung: usize| self.taken(&ladder.rungs[rung]).bytes;
        let budget_bytes = self.budget.device_bytes;
        let (mut low, mut high) = (0, ladder.rungs.len() - 1);
        let mut low_bytes = alive(low);
        if low_bytes <= budget_bytes {
            return Some(low);
        }
        let mut high_bytes = alive(high);
        // In a large model the last rung is the leanest, or nearly.
        let is_large = self.taken(&ladder.rungs[high]).steps > STEPS_OF_SMALL;
        if is_large && high_bytes as f64 > NEARLY * budget_bytes as f64 {
            return None;
        }
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
}
