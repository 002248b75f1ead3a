//! The bytes that ranks exchange per step, and how much they slow the run down.
//!
//! Ranks form a ring: every link carries the same bytes, so the slowest link sets the speed. Bytes are those that one
//! rank receives; it sends as many. Efficiency compares with ranks that exchange nothing and have equal shares of the
//! batch. Left out: exchanges of evaluations and checkpoints, which are not part of every step.

use crate::plan::demand::DemandShape;
use crate::plan::rank_layout::RankLayout;
use serde_json::{Value, json};
use smidgen_compile::links::{LINKS, Link};
use smidgen_compile::{Profile, Solution};
use smidgen_ir::{Entry, Op, Plan};

/// Bytes of each kind that a rank receives per step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Sums of gradients, and of the loss.
    pub gradient_bytes: f64,
    /// Layers of weights that are sharded over ranks, gathered for every micro-batch.
    pub weight_bytes: f64,
    /// Trained weights that other ranks have updated, if optimizer state is sharded and weights are not.
    pub update_bytes: f64,
    /// The slowest link of the ring.
    pub link: Link,
    /// Speed of all ranks, divided by the speed of as many ranks that exchange nothing.
    pub efficiency: f64,
}

impl Exchange {
    /// `None` for a single rank.
    pub fn of(
        world: RankLayout,
        shape: &DemandShape,
        solution: &Solution,
        profile: &Profile,
    ) -> Option<Exchange> {
        if world.is_alone() {
            return None;
        }
        let (plan, micro_steps) = (&solution.plan, solution.demand.micro_steps);
        let mut exchange = Exchange {
            gradient_bytes: 0.0,
            weight_bytes: 0.0,
            update_bytes: 0.0,
            link: profile.link,
            efficiency: 1.0,
        };
        for entry in [Entry::MicroStep, Entry::Update] {
            // In breadth-first order an exchange serves all micro-batches.
            let is_repeated = entry == Entry::MicroStep && plan.entry(entry).laps.is_empty();
            let times = if is_repeated { micro_steps.max(1.0) } else { 1.0 };
            for step in &plan.entry(entry).steps {
                let bytes = step.cost.bytes;
                if step.op.is_sum() {
                    // Runs only after the last micro-batch.
                    exchange.gradient_bytes += bytes;
                } else if matches!(step.op, Op::ReduceScatter(_)) {
                    exchange.gradient_bytes += times * bytes;
                } else if matches!(step.op, Op::AllGather(_)) {
                    let gathered = if entry == Entry::MicroStep {
                        &mut exchange.weight_bytes
                    } else {
                        &mut exchange.update_bytes
                    };
                    *gathered += times * bytes;
                }
            }
        }
        let alone_ms = step_ms_without_exchange(plan, profile, micro_steps);
        let balance = shape.all_tokens / (world.rank.of as f64 * shape.step_tokens);
        exchange.efficiency = balance * alone_ms / solution.step_ms;
        Some(exchange)
    }

    pub fn bytes(&self) -> f64 {
        self.gradient_bytes + self.weight_bytes + self.update_bytes
    }

    /// The name of the slowest link, if it is in the table of links.
    pub fn link_name(&self) -> Option<&'static str> {
        LINKS.iter().find(|named| named.link() == self.link).map(|named| named.name)
    }

    pub fn render_json(&self) -> Value {
        let bytes = |bytes: f64| bytes.round() as u64;
        json!({
            "gradient_bytes": bytes(self.gradient_bytes),
            "weight_bytes": bytes(self.weight_bytes),
            "update_bytes": bytes(self.update_bytes),
            "bytes_per_step": bytes(self.bytes()),
            "link": self.link_name(),
            "link_bytes_per_s": self.link.bytes_per_s,
            "link_latency_s": self.link.latency_s,
        })
    }
}

/// Milliseconds per step of the same plan without its exchanges.
fn step_ms_without_exchange(plan: &Plan, profile: &Profile, micro_steps: f64) -> f64 {
    let mut silent = plan.clone();
    for step in silent.entries.iter_mut().flat_map(|entry| &mut entry.steps) {
        if step.op.is_collective() {
            step.cost.bytes = 0.0;
        }
    }
    let profile = Profile { link: Link { bytes_per_s: f64::INFINITY, latency_s: 0.0 }, ..*profile };
    let seconds = |entry: Entry| profile.entry_seconds(&silent, entry);
    let micro_steps_s = if silent.entry(Entry::MicroStep).laps.is_empty() {
        micro_steps * seconds(Entry::MicroStep)
    } else {
        profile.laps_seconds(&silent, Entry::MicroStep, micro_steps)
            + profile.waiting_for_updates(&silent, Entry::MicroStep, micro_steps)
    };
    1e3 * (micro_steps_s + seconds(Entry::Update))
}
