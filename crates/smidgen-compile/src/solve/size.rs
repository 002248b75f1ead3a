//! What policies need at one size of micro-batch, by their schedules.
//!
//! A schedule gives the bytes in use and the time of a step; only chosen policies are packed. Measurements are kept, so a
//! search may ask twice. A [`SearchState`] that all sizes share counts the scheduled steps: the effort of a search is
//! limited by that count and not by a clock, so the result is always the same.

use super::choices::{Freedom, compute_key};
use super::question::{Budget, Demand, Question};
use super::solution::offloaded_bytes;
use crate::arena;
use crate::request::{Purpose, Request};
use crate::schedule::Schedule;
use crate::stages::{build, compile_for, run_compute_passes, run_memory_passes};
use smidgen_ir::policy::Policy;
use smidgen_ir::{Entry, Graph, Plan, Space};
use std::cell::{Cell, RefCell};

/// What a policy needs, before packing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// On the device: the bytes in use at the peak, and the context. The packed plan never needs less, and seldom more.
    pub bytes: u64,
    /// In host RAM or on disk, by all ranks of a machine together.
    pub offloaded_bytes: u64,
    /// Predicted time of an optimizer step, or of the whole work if nothing is trained.
    pub ms: f64,
    /// Bytes that are transferred in that time.
    pub moved_bytes: f64,
    /// Steps of the plan.
    pub steps: usize,
}

/// What the searches of one question share: the graphs that candidates are made from, and the effort so far.
#[derive(Default)]
pub struct SearchState {
    /// Steps that were scheduled so far.
    steps: Cell<usize>,
    graphs: RefCell<Option<Graphs>>,
}

/// Graphs without names, which only plans that are shown need.
struct Graphs {
    /// The graph that every policy starts from, at every size.
    built: Graph,
    /// The last graph after [`run_compute_passes`], with its key. The next candidate mostly has the same key.
    computed: Option<((Policy, Option<usize>), Graph)>,
}

/// Steps that a search may schedule: about half a second of one processor core.
const MOST_STEPS: usize = 300_000;

/// A policy that was measured.
#[derive(Clone, Debug)]
pub struct Seen {
    pub policy: Policy,
    pub measured: Measured,
}

/// A size of micro-batch, with everything that was measured at it.
pub struct Size<'a> {
    pub question: &'a Question<'a>,
    /// The request of the question with the extents of this size.
    pub request: Request,
    pub demand: Demand,
    pub freedom: Freedom<'a>,
    state: &'a SearchState,
    /// In the order of the measurements.
    seen: RefCell<Vec<Seen>>,
}

impl<'a> Size<'a> {
    pub fn new(question: &'a Question<'a>, demand: &Demand, state: &'a SearchState) -> Size<'a> {
        let request = Request { extent: demand.extent, step: demand.step, ..question.request.clone() };
        let freedom = Freedom::of(&request, demand, question.pins);
        Size { question, request, demand: *demand, freedom, state, seen: RefCell::default() }
    }

    /// What a policy needs. It must be one that obeys the pins, or the policy of a plan without one choice.
    pub fn measure(&self, policy: &Policy) -> Measured {
        if let Some(seen) = self.seen.borrow().iter().find(|seen| seen.policy == *policy) {
            return seen.measured;
        }
        let mut schedule = self.scheduled(policy);
        let space = self.request.device.offload_space();
        let size = schedule.size_in(space);
        let offloaded_bytes = size.of_machine(self.question.budget.local_ranks) as u64;
        // Packing would set it, and the context may depend on it.
        if space == Space::Host {
            schedule.plan.host = size;
        }
        let bytes = self.peak_of_schedule(&mut schedule);
        let ms = 1e3 * self.step_seconds(&schedule.plan);
        let steps = schedule.plan.entries.iter().map(|entry| entry.steps.len()).sum();
        let moved_bytes = self.moved_bytes(&schedule.plan);
        let measured = Measured { bytes, offloaded_bytes, ms, moved_bytes, steps };
        self.seen.borrow_mut().push(Seen { policy: policy.clone(), measured });
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

    /// The bytes in use at the peak of all entry points, and those outside the arena.
    fn peak_of_schedule(&self, schedule: &mut Schedule) -> u64 {
        let persistent_bytes = schedule.persistent_bytes();
        let plan = &mut schedule.plan;
        let live = plan.entries.iter().flat_map(|entry| plan.live_bytes(entry.entry)).max().unwrap_or(0);
        // Packing would set them, and a driver rounds them up.
        (plan.persistent_bytes, plan.transient_bytes) = (persistent_bytes, live);
        self.peak_bytes(plan)
    }

    /// Every measured policy that may fit, the fastest first, and equally fast ones in the order of their measurement.
    pub fn candidates(&self) -> Vec<Seen> {
        let seen = self.seen.borrow();
        let mut all: Vec<_> = seen.iter().filter(|seen| self.is_within(&seen.measured)).cloned().collect();
        all.sort_by(|one, other| one.measured.ms.total_cmp(&other.measured.ms));
        all
    }

    pub fn is_within(&self, measured: &Measured) -> bool {
        let offload_bytes = self.question.budget.offload_bytes;
        measured.bytes <= self.question.budget.device_bytes && measured.offloaded_bytes <= offload_bytes
    }

    /// Every measured policy that offloads at most this many bytes.
    pub fn seen_within(&self, offload_bytes: u64) -> Vec<Seen> {
        let seen = self.seen.borrow();
        seen.iter().filter(|seen| seen.measured.offloaded_bytes <= offload_bytes).cloned().collect()
    }

    /// Whether the effort of a search is used up.
    pub fn is_spent(&self) -> bool {
        self.effort_steps() > MOST_STEPS
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

    /// Whether the packed plan of a policy fits. If not, the bytes of the plan replace those of its schedule.
    pub fn packs(&self, policy: &Policy) -> bool {
        if !self.is_within(&self.measure(policy)) {
            return false;
        }
        let plan = arena::plan_memory_unchecked(self.scheduled(policy));
        if self.holds(&plan) {
            return true;
        }
        if let Some(seen) = self.seen.borrow_mut().iter_mut().find(|seen| seen.policy == *policy) {
            seen.measured.bytes = self.peak_bytes(&plan);
            seen.measured.offloaded_bytes = offloaded_bytes(&plan, self.question.budget.local_ranks);
        }
        false
    }

    /// Device bytes that the packed plan of a policy needs; `None` if it exceeds the budget.
    pub fn packed_peak_bytes(&self, policy: &Policy, budget: Budget) -> Option<u64> {
        let mut schedule = self.scheduled(policy);
        // The packed plan never needs less.
        if self.peak_of_schedule(&mut schedule) > budget.device_bytes {
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
    pub fn entries(&self) -> (Entry, Option<Entry>) {
        match self.question.purpose {
            Purpose::Training => (Entry::MicroStep, Some(Entry::Update)),
            Purpose::Evaluation => (Entry::Eval, None),
            Purpose::Generation => (Entry::Decode, None),
            Purpose::Logits => (Entry::Logits, None),
            Purpose::Encoding => (Entry::Encode, None),
        }
    }
}
