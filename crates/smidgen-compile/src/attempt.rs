//! The search at one size of micro-batch: it measures what points need, and finds the lowest rungs that fit the budget.
//!
//! A point is measured by its schedule, which gives the bytes in use and the time of a step; only chosen points are packed.
//! Measurements are kept, so a search may ask twice. A [`SearchState`] that all sizes share counts the scheduled steps: the
//! effort of a search is limited by that count and not by a clock, so the result is always the same.

use crate::arena;
use crate::choices::{Freedom, Point, compute_key};
use crate::ladder::{Ladder, ladders};
use crate::question::{Budget, Demand, Question};
use crate::request::{Purpose, Request};
use crate::schedule::Schedule;
use crate::solution::offloaded_bytes;
use crate::stages::{build, compile_for, run_compute_passes, run_memory_passes};
use smidgen_ir::policy::Policy;
use smidgen_ir::{Entry, Graph, Phase, Plan, Space};
use std::cell::{Cell, RefCell};

/// What a point needs, before packing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// On the device: the bytes in use at the peak, and the context. The packed plan never needs less, and seldom more.
    pub bytes: u64,
    /// The same for each region; `bytes` is the largest of them.
    pub region_bytes: [u64; REGIONS],
    /// In host RAM or on disk, by all ranks of a machine together.
    pub offloaded_bytes: u64,
    /// Predicted time of an optimizer step, or of the whole work if nothing is trained.
    pub ms: f64,
    /// Bytes that are transferred in that time.
    pub moved_bytes: f64,
    /// Steps of the plan.
    pub steps: usize,
}

/// Regions of a run whose peaks are measured separately: 0 is forward, 1 to 4 are the backward pass by quarters of the
/// layers, 5 is the loss, 6 everything else outside the layers, 7 the update, 8 all other entry points.
pub const REGIONS: usize = 9;
pub const HEAD_REGION: usize = 5;
pub const OTHER_REGION: usize = 8;

impl Measured {
    /// The region that has the peak.
    pub fn peak_region(&self) -> usize {
        self.region_bytes.iter().position(|bytes| *bytes == self.bytes).unwrap_or(0)
    }
}

/// What the searches of one question share: the graphs that candidates are made from, and the effort so far.
#[derive(Default)]
pub struct SearchState {
    /// Steps that were scheduled so far.
    steps: Cell<usize>,
    /// Bytes of the budget that a search leaves free, because packed plans may need more than their schedules.
    packing_bytes: Cell<u64>,
    graphs: RefCell<Option<Graphs>>,
}

/// Graphs without names, which only plans that are shown need.
struct Graphs {
    /// The graph that every policy starts from, at every size.
    built: Graph,
    /// The last graph after [`run_compute_passes`], with its key. The next candidate mostly has the same key.
    computed: Option<((Policy, Option<usize>), Graph)>,
}

/// For plans of at most this many steps, the search for the leanest policy tries every choice. In larger ones everything
/// that can be offloaded is, since that saves far more memory than a transfer needs.
pub const STEPS_OF_SMALL: usize = 6_000;
/// The last rung of a large model needs at most this many times the bytes of its leanest rung.
const LAST_TO_LEANEST: f64 = 1.1;

/// Steps that a search may schedule: about half a second of one processor core.
const MOST_STEPS: usize = 300_000;

/// A policy that was measured, and its point if it was measured as one.
#[derive(Clone, Debug)]
pub struct Seen {
    pub policy: Policy,
    pub point: Option<Point>,
    pub measured: Measured,
}

pub struct Attempt<'a> {
    pub question: &'a Question<'a>,
    /// The request of the question with the extents of this size.
    pub request: Request,
    pub demand: Demand,
    pub freedom: Freedom<'a>,
    state: &'a SearchState,
    /// In the order of the measurements.
    seen: RefCell<Vec<Seen>>,
    /// Points around which mixtures were searched.
    points: RefCell<Vec<Point>>,
}

impl<'a> Attempt<'a> {
    pub fn new(question: &'a Question<'a>, demand: &Demand, state: &'a SearchState) -> Attempt<'a> {
        let request = Request { extent: demand.extent, step: demand.step, ..question.request.clone() };
        let freedom = Freedom::of(&request, demand, question.pins);
        let (seen, points) = (RefCell::default(), RefCell::default());
        Attempt { question, request, demand: *demand, freedom, state, seen, points }
    }

    pub fn measure(&self, point: &Point) -> Measured {
        self.measure_as(&self.freedom.policy(point), Some(*point))
    }

    /// The measurement of a point, if there is one already.
    pub fn known(&self, point: &Point) -> Option<Measured> {
        self.known_policy(&self.freedom.policy(point))
    }

    fn known_policy(&self, policy: &Policy) -> Option<Measured> {
        self.seen.borrow().iter().find(|seen| seen.policy == *policy).map(|seen| seen.measured)
    }

    pub fn measure_policy(&self, policy: &Policy) -> Measured {
        self.measure_as(policy, None)
    }

    fn measure_as(&self, policy: &Policy, point: Option<Point>) -> Measured {
        if let Some(measured) = self.known_policy(policy) {
            return measured;
        }
        let mut schedule = self.scheduled(policy);
        let space = self.request.device.offload_space();
        let size = schedule.size_in(space);
        let offloaded_bytes = size.of_machine(self.question.budget.local_ranks) as u64;
        // Packing would set it, and the context may depend on it.
        if space == Space::Host {
            schedule.plan.host = size;
        }
        let region_bytes = self.region_bytes(&schedule);
        let bytes = region_bytes.into_iter().max().unwrap_or(0);
        let ms = 1e3 * self.step_seconds(&schedule.plan);
        let steps = schedule.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        let moved_bytes = self.moved_bytes(&schedule.plan);
        let measured = Measured { bytes, region_bytes, offloaded_bytes, ms, moved_bytes, steps };
        self.seen.borrow_mut().push(Seen { policy: policy.clone(), point, measured });
        measured
    }

    /// Bytes that are transferred in an optimizer step, or in the whole work if nothing is trained.
    fn moved_bytes(&self, plan: &Plan) -> f64 {
        let (each, once) = self.entries();
        let rounds = self.demand.micro_steps;
        let moved = |entry: Entry, rounds: f64| {
            let Some(entry) = plan.entries.iter().find(|planned| planned.entry == entry) else { return 0.0 };
            let is_repeated = |index: usize| {
                entry.laps.is_empty() || entry.laps.iter().any(|lap| lap.each.contains(&index))
            };
            let transfers = entry.steps.iter().enumerate().filter(|(_, step)| plan.uses_a_link(step));
            transfers
                .map(|(index, step)| step.cost.bytes * if is_repeated(index) { rounds } else { 1.0 })
                .sum::<f64>()
        };
        moved(each, rounds) + once.map_or(0.0, |entry| moved(entry, 1.0))
    }

    fn region_bytes(&self, schedule: &Schedule) -> [u64; REGIONS] {
        let plan = &schedule.plan;
        let always = self.question.context.bytes_for(plan) + schedule.persistent_bytes() as u64;
        let mut regions = [always; REGIONS];
        for entry in &plan.entries {
            for (step, live) in entry.steps.iter().zip(plan.live_bytes(entry.entry)) {
                let region = match (entry.entry, step.phase, step.layer) {
                    (Entry::MicroStep, Phase::Forward, Some(_)) => 0,
                    (Entry::MicroStep, _, Some(layer)) => 1 + 4 * layer / self.freedom.layers,
                    (Entry::MicroStep, _, None) if step.op.is_loss() => HEAD_REGION,
                    (Entry::MicroStep, _, None) => 6,
                    (Entry::Update, ..) => 7,
                    _ => OTHER_REGION,
                };
                regions[region] = regions[region].max(always + live as u64);
            }
        }
        regions
    }

    /// Every measured policy that may fit, the fastest first, and equally fast ones in the order of their measurement.
    pub fn candidates(&self) -> Vec<Seen> {
        let seen = self.seen.borrow();
        let mut all: Vec<_> = seen.iter().filter(|seen| self.is_within(&seen.measured)).cloned().collect();
        all.sort_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
        all
    }

    /// The time of the fastest candidate.
    pub fn fastest_ms(&self) -> f64 {
        let seen = self.seen.borrow();
        let within = seen.iter().map(|seen| seen.measured).filter(|measured| self.is_within(measured));
        within.map(|measured| measured.ms).fold(f64::INFINITY, f64::min)
    }

    pub fn is_within(&self, measured: &Measured) -> bool {
        let offload_bytes = self.question.budget.offload_bytes;
        measured.bytes <= self.room_bytes() && measured.offloaded_bytes <= offload_bytes
    }

    /// Bytes that a schedule may need on the device.
    pub fn room_bytes(&self) -> u64 {
        self.question.budget.device_bytes.saturating_sub(self.state.packing_bytes.get())
    }

    /// Starts a new search that leaves this many bytes of the budget for packing.
    pub fn leave_for_packing(&self, bytes: u64) {
        self.state.packing_bytes.set(bytes);
        self.state.steps.set(0);
        self.points.borrow_mut().clear();
    }

    pub fn is_first_time_at(&self, point: &Point) -> bool {
        let mut points = self.points.borrow_mut();
        let is_first = !points.contains(point);
        points.push(*point);
        is_first
    }

    /// Every measured policy that offloads at most this many bytes.
    pub fn seen_within(&self, offload_bytes: u64) -> Vec<Seen> {
        let seen = self.seen.borrow();
        seen.iter().filter(|seen| seen.measured.offloaded_bytes <= offload_bytes).cloned().collect()
    }

    /// Whether this share of the effort is used up.
    pub fn is_spent(&self, share: f64) -> bool {
        self.effort_steps() as f64 > share * MOST_STEPS as f64
    }

    pub fn effort_steps(&self) -> usize {
        self.state.steps.get()
    }

    pub fn set_effort_steps(&self, steps: usize) {
        self.state.steps.set(steps);
    }

    /// Schedules a candidate, without the checks between stages. The plan that is chosen is compiled with them.
    pub fn scheduled(&self, policy: &Policy) -> Schedule {
        let mut kept = self.state.graphs.borrow_mut();
        let Graphs { built, computed } = kept.get_or_insert_with(|| {
            let mut graph = build(self.question.purpose, &self.request, policy, |_, _| {});
            graph.forget_names();
            Graphs { built: graph, computed: None }
        });
        let key = compute_key(policy, &self.request.extent);
        if computed.as_ref().is_none_or(|(own, _)| *own != key) {
            *computed = None;
            let graph = run_compute_passes(built.clone(), &self.request, policy, |_, _| {});
            *computed = Some((key, graph));
        }
        let graph = computed.as_ref().expect("it was just made").1.clone();
        let schedule = run_memory_passes(graph, &self.request, policy, |_, _| {});
        let steps: usize = schedule.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        self.set_effort_steps(self.effort_steps() + steps);
        schedule
    }

    /// Compiles the plan of a policy, with every check.
    pub fn compile(&self, policy: &Policy) -> Plan {
        compile_for(self.question.purpose, &self.request, policy)
    }

    /// Whether the packed plan of a policy fits.
    pub fn packs(&self, policy: &Policy) -> bool {
        self.is_within(&self.measure_policy(policy))
            && self.holds(&arena::plan_memory_unchecked(self.scheduled(policy)))
    }

    /// Device bytes that the packed plan of a policy needs; `None` if it exceeds the budget.
    pub fn packed_peak_bytes(&self, policy: &Policy, budget: Budget) -> Option<u64> {
        let schedule = self.scheduled(policy);
        // The packed plan never needs less.
        let least_bytes = self.region_bytes(&schedule).into_iter().max().unwrap_or(0);
        if least_bytes > budget.device_bytes {
            return None;
        }
        let plan = arena::plan_memory_unchecked(schedule);
        let peak_bytes = self.peak_bytes(&plan);
        let offloaded_bytes = offloaded_bytes(&plan, budget.local_ranks);
        let fits = peak_bytes <= budget.device_bytes && offloaded_bytes <= budget.offload_bytes;
        fits.then_some(peak_bytes)
    }

    /// Whether a plan is within the budget.
    pub fn holds(&self, plan: &Plan) -> bool {
        let Budget { device_bytes, offload_bytes, local_ranks } = self.question.budget;
        self.peak_bytes(plan) <= device_bytes && offloaded_bytes(plan, local_ranks) <= offload_bytes
    }

    pub fn peak_bytes(&self, plan: &Plan) -> u64 {
        self.question.context.bytes_for(plan) + plan.reserved_bytes() as u64
    }

    pub fn step_seconds(&self, plan: &Plan) -> f64 {
        let profile = self.question.profile;
        let seconds = |entry: Entry| profile.entry_seconds(plan, entry);
        let (each, once) = self.entries();
        if plan.entries.iter().any(|entry| !entry.laps.is_empty()) {
            let rounds = self.demand.micro_steps;
            let laps_s = profile.laps_seconds(plan, each, rounds);
            let waiting_s = profile.waiting_for_updates(plan, each, rounds);
            return laps_s + waiting_s + once.map_or(0.0, seconds);
        }
        let each_s = seconds(each) * self.demand.micro_steps;
        // Ranks sum the gradients only with the last micro-batch of a step.
        let unsummed_s = match self.request.rank.is_only() || self.demand.micro_steps <= 1.0 {
            true => 0.0,
            false => (seconds(each) - profile.unsummed_seconds(plan, each)) * (self.demand.micro_steps - 1.0),
        };
        each_s - unsummed_s + once.map_or(0.0, seconds)
    }

    /// The entry point that runs for each micro-batch, and the one that runs once.
    fn entries(&self) -> (Entry, Option<Entry>) {
        match self.question.purpose {
            Purpose::Training => (Entry::MicroStep, Some(Entry::Update)),
            Purpose::Evaluation => (Entry::Eval, None),
            Purpose::Generation => (Entry::Decode, None),
            Purpose::Logits => (Entry::Logits, None),
            Purpose::Encoding => (Entry::Encode, None),
        }
    }

    fn ladders(&self, loss_chunk: usize) -> Vec<Ladder> {
        let is_offload_limited = self.question.budget.offload_bytes < u64::MAX;
        ladders(&self.freedom, loss_chunk, is_offload_limited, |point| self.measure(point).bytes)
    }

    /// The lowest rung of each ladder whose schedule fits the budget.
    pub fn lowest_rungs(&self, loss_chunk: usize) -> Vec<Point> {
        let ladders = self.ladders(loss_chunk);
        ladders.iter().filter_map(|ladder| Some(ladder.rungs[self.lowest_rung(ladder)?])).collect()
    }

    /// The policy of the first rung whose packed plan fits, starting at the lowest rung whose schedule fits.
    pub fn lowest_packed(&self, loss_chunk: usize) -> Option<Policy> {
        let above = |ladder: &Ladder| {
            let rungs = ladder.rungs[self.lowest_rung(ladder)?..].iter();
            let mut policies = rungs.map(|rung| self.freedom.policy(rung));
            policies.find(|policy| self.packs(policy))
        };
        self.ladders(loss_chunk).iter().find_map(above)
    }

    /// The lowest rung of a ladder whose schedule fits the budget. Bytes fall along a ladder in a few straight lines, so
    /// interpolating between two rungs and trying its neighbour mostly ends the search; bisection does the rest.
    fn lowest_rung(&self, ladder: &Ladder) -> Option<usize> {
        let needs = |rung: usize| self.measure(&ladder.rungs[rung]).bytes;
        let budget_bytes = self.question.budget.device_bytes;
        let (mut low, mut high) = (0, ladder.rungs.len() - 1);
        let mut low_bytes = needs(low);
        if low_bytes <= budget_bytes {
            return Some(low);
        }
        let mut high_bytes = needs(high);
        // In a large model the last rung is the leanest, or nearly.
        let is_large = self.measure(&ladder.rungs[high]).steps > STEPS_OF_SMALL;
        if is_large && high_bytes as f64 > LAST_TO_LEANEST * budget_bytes as f64 {
            return None;
        }
        if high_bytes > budget_bytes {
            // The leanest rung is at the end of a kind of choice.
            let ends = ladder.ends.iter().map(|end| (needs(*end), *end));
            (high_bytes, high) = ends.min().expect("a ladder has a rung");
        }
        if high_bytes > budget_bytes {
            return None;
        }
        for turn in 0.. {
            // Rung `low` does not fit, rung `high` does.
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
            match needs(middle) {
                bytes if bytes <= budget_bytes => (high, high_bytes) = (middle, bytes),
                bytes => (low, low_bytes) = (middle, bytes),
            }
        }
        Some(high)
    }
}
