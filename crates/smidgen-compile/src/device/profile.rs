//! Device profiles: the rates of a device, which turn costs into predicted times.
//!
//! A profile is an input of the compiler; nothing here measures anything. A [`DeviceProfile`] is everything known about a
//! device, measured or stated; a [`Profile`] is the part of it that a plan of one precision needs.
//! The model is small on purpose: a step takes the longer of its arithmetic and its memory traffic, plus the time to
//! convert the operands of a matmul into the form that it needs.

use crate::context::Overhead;
use crate::links::{ETHERNET_100G, Link, SHARED_MEMORY};
use smidgen_ir::{
    BoundBy, Cost, DeviceKind, Entry, EntryPlan, Op, Phase, Plan, Precision, Property, Rank, Route, Space,
    Step,
};

/// How much faster matmuls in fp8 are than in bf16 on an H200, without the rounding, which is a step of its own.
const FP8_GAIN: f64 = 1.8;

/// The rates of a device for one element type of matmuls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Matmuls of activations with weights, the head included.
    pub matmul_flops_per_s: f64,
    /// Matmuls with weights stored in bf16. They are faster if a bf16 unit computes f32 matmuls.
    pub bf16_matmul_flops_per_s: f64,
    /// Gradients of adapters: matmuls with a thin result that sum over all tokens.
    pub weight_gradient_flops_per_s: f64,
    pub attention_flops_per_s: f64,
    /// Operations that are bound by memory.
    pub bytes_per_s: f64,
    /// The least time of a step: dispatch to threads, or a kernel launch.
    pub step_s: f64,
    /// Seconds per element of a plain matrix, each time a matmul reads it; 0 if it needs no conversion.
    pub plain_operand_s: f64,
    /// Seconds per element of a quantized matrix, each time a matmul reads it.
    pub coded_operand_s: f64,
}

/// Everything about a device that planning uses.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    pub name: String,
    pub device: DeviceKind,
    /// The memory of a GPU, as its driver reports it.
    pub memory_bytes: Option<u64>,
    /// What a run needs there outside the arena.
    pub overhead: Overhead,
    pub f32: Rates,
    /// In bf16, or f16 on a GPU.
    pub half: Rates,
    /// Transfers of offloaded values to the device: from pinned memory to a GPU, from disk to a CPU.
    pub fetch_bytes_per_s: f64,
    /// Transfers of offloaded values from the device.
    pub stow_bytes_per_s: f64,
    /// Reading from a disk; equals `fetch_bytes_per_s` with a CPU.
    pub disk_bytes_per_s: f64,
    /// Host memory traffic of processors that update weights there.
    pub update_bytes_per_s: f64,
    /// Time that computation loses per byte transferred at the same time, because the transfer uses the processor too.
    pub transfer_s_per_byte: f64,
    /// Between ranks of one machine.
    pub peers: Link,
    /// Between machines.
    pub network: Link,
}

impl DeviceProfile {
    /// A usual processor: a server core with AVX-512 sustains about 110 GFLOP/s in our f32 matmuls, one with AMX about 380
    /// in bf16. Four cores use the full memory bandwidth.
    pub fn cpu(threads: usize) -> DeviceProfile {
        let threads = threads.max(1) as f64;
        let rates = |product: f64, outer: f64, attention: f64, operand_s: f64| Rates {
            matmul_flops_per_s: threads * product,
            bf16_matmul_flops_per_s: threads * product,
            weight_gradient_flops_per_s: threads * outer,
            attention_flops_per_s: threads * attention,
            bytes_per_s: 14e9 * threads.min(4.0),
            step_s: 1e-6,
            plain_operand_s: operand_s / threads,
            coded_operand_s: operand_s / threads,
        };
        DeviceProfile {
            name: "cpu".into(),
            device: DeviceKind::Cpu,
            memory_bytes: None,
            overhead: Overhead::CPU,
            f32: rates(110e9, 46e9, 68e9, 1.05e-9),
            half: rates(380e9, 34e9, 100e9, 0.6e-9),
            fetch_bytes_per_s: 1.5e9,
            stow_bytes_per_s: 0.8e9,
            disk_bytes_per_s: 1.5e9,
            update_bytes_per_s: 14e9 * threads.min(4.0),
            transfer_s_per_byte: 0.6e-9 / threads,
            peers: SHARED_MEMORY.link(),
            network: ETHERNET_100G.link(),
        }
    }

    /// A processor that also computes f32 matmuls with AMX, where weights in bf16 are half the work of others.
    pub fn cpu_amx(threads: usize) -> DeviceProfile {
        let vectors = DeviceProfile::cpu(threads);
        let all = threads.max(1) as f64;
        let f32 =
            Rates { matmul_flops_per_s: all * 145e9, bf16_matmul_flops_per_s: all * 200e9, ..vectors.f32 };
        DeviceProfile { name: "cpu-amx".into(), f32, ..vectors }
    }

    /// The profile for plans of this precision.
    pub fn at(&self, precision: Precision) -> Profile {
        Profile {
            rates: match precision {
                Precision::F32 => self.f32,
                Precision::Bf16 | Precision::F16 | Precision::Fp8 => self.half,
            },
            fp8_gain: if precision == Precision::Fp8 { FP8_GAIN } else { 1.0 },
            fetch_bytes_per_s: self.fetch_bytes_per_s,
            stow_bytes_per_s: self.stow_bytes_per_s,
            disk_bytes_per_s: self.disk_bytes_per_s,
            update_bytes_per_s: self.update_bytes_per_s,
            transfer_s_per_byte: self.transfer_s_per_byte,
            link: self.peers,
        }
    }

    /// This profile for ranks on this many machines.
    pub fn on_machines(&self, machines: usize) -> DeviceProfile {
        let peers = if machines > 1 { self.peers.slower(self.network) } else { self.peers };
        DeviceProfile { peers, ..self.clone() }
    }
}

/// The rates of a device for plans of one precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    pub rates: Rates,
    /// How much faster matmuls with weights in fp8 are than in bf16.
    pub fp8_gain: f64,
    pub fetch_bytes_per_s: f64,
    pub stow_bytes_per_s: f64,
    pub disk_bytes_per_s: f64,
    pub update_bytes_per_s: f64,
    pub transfer_s_per_byte: f64,
    /// Between ranks.
    pub link: Link,
}

impl Profile {
    /// The profile of [`DeviceProfile::cpu`].
    pub fn cpu(threads: usize, precision: Precision) -> Profile {
        DeviceProfile::cpu(threads).at(precision)
    }

    /// Bytes per second of the transfer of a fetch or a stow.
    fn transfer_rate(&self, plan: &Plan, step: &Step) -> f64 {
        let is_fetched = step.op.route() == Some(Route::ToDevice);
        let offloaded =
            if is_fetched { step.inputs.first() } else { step.outputs.first().or(step.updates.first()) };
        let space = offloaded.and_then(|id| plan.value(*id).buffer).map(|buffer| plan.buffer(buffer).space);
        match (space, is_fetched) {
            // A copy within the device reads and writes.
            (Some(Space::Device), _) => self.rates.bytes_per_s / 2.0,
            (Some(Space::Disk), true) => self.disk_bytes_per_s,
            (Some(Space::Disk), false) => self.disk_bytes_per_s.min(self.stow_bytes_per_s),
            (_, true) => self.fetch_bytes_per_s,
            (_, false) => self.stow_bytes_per_s,
        }
    }

    pub fn seconds(&self, op: &Op, cost: Cost) -> f64 {
        let rates = &self.rates;
        let flops_per_s = match op.bound_by() {
            BoundBy::OuterProduct => rates.weight_gradient_flops_per_s,
            BoundBy::Attention => rates.attention_flops_per_s,
            BoundBy::Matmul | BoundBy::Memory => rates.matmul_flops_per_s,
        };
        let flops_s = (cost.flops - cost.bf16_flops - cost.fp8_flops * (1.0 - 1.0 / self.fp8_gain))
            / flops_per_s
            + cost.bf16_flops / rates.bf16_matmul_flops_per_s;
        let operands_s =
            cost.plain_operands * rates.plain_operand_s + cost.coded_operands * rates.coded_operand_s;
        rates.step_s + operands_s + flops_s.max(cost.bytes / rates.bytes_per_s)
    }

    /// Seconds of one run of an entry point at the planned extent. Transfers overlap with computation, one value in each
    /// direction and one exchange between ranks at a time; a step that needs a transfer waits for it.
    pub fn entry_seconds(&self, plan: &Plan, entry: Entry) -> f64 {
        self.walk(plan, entry, true, 1.0, |_| {})
    }

    /// Seconds of an entry point whose laps run for this many micro-batches.
    pub fn laps_seconds(&self, plan: &Plan, entry: Entry, micro_batches: f64) -> f64 {
        self.walk(plan, entry, true, micro_batches, |_| {})
    }

    /// Seconds by which updates on the host make a step longer. They run during the next forward pass, and without clipping
    /// also during the backward pass. Each lap waits for its own update, and the last one for all that is not finished.
    pub fn waiting_for_updates(&self, plan: &Plan, entry: Entry, rounds: f64) -> f64 {
        let is_update = |step: &&Step| step.op.runs_on_host();
        let steps = plan.entries.iter().flat_map(|entry| &entry.steps);
        let bytes: f64 = steps.filter(is_update).map(|step| step.cost.bytes).sum();
        let update_s = bytes / self.update_bytes_per_s;
        let mut ends = Vec::new();
        self.walk(plan, entry, true, rounds, |now| ends.push(now));
        let is_forward = |step: &Step| step.phase == Phase::Forward && step.layer.is_some();
        let EntryPlan { steps: own, laps, .. } = plan.entry(entry);
        let forward_laps = laps.iter().filter(|lap| is_forward(&own[lap.each.start])).count().max(1);
        let last = if own.iter().any(|step| is_update(&step)) {
            own.len().checked_sub(1)
        } else {
            own.iter().rposition(is_forward)
        };
        let overlapped_s = last.map_or(0.0, |last| ends[last]);
        update_s / forward_laps as f64 + (update_s - overlapped_s).max(0.0)
    }

    /// Seconds of one run of an entry point without sums over ranks, as for all micro-batches of a step but the last.
    pub fn unsummed_seconds(&self, plan: &Plan, entry: Entry) -> f64 {
        self.walk(plan, entry, false, 1.0, |_| {})
    }

    /// Seconds of an exchange in which each rank receives this many bytes.
    pub fn exchange_seconds(&self, rank: Rank, bytes: f64) -> f64 {
        (rank.of - 1) as f64 * self.link.latency_s + bytes / self.link.bytes_per_s
    }

    /// When each step of an entry point ends, in seconds from the start, as in [`Profile::entry_seconds`].
    pub fn step_ends(&self, plan: &Plan, entry: Entry) -> Vec<f64> {
        let mut ends = Vec::with_capacity(plan.entry(entry).steps.len());
        self.walk(plan, entry, true, 1.0, |now| ends.push(now));
        ends
    }

    /// Simulates an entry point and calls `see_end` with the end of each step. The steps of a lap run `rounds` times.
    fn walk(&self, plan: &Plan, entry: Entry, sums: bool, rounds: f64, mut see_end: impl FnMut(f64)) -> f64 {
        let EntryPlan { steps, laps, .. } = plan.entry(entry);
        let mut laps = laps.iter().peekable();
        let (mut now, mut inward, mut outward, mut between) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        // When each transfer is complete.
        let mut complete = vec![0.0; steps.len()];
        for (index, step) in steps.iter().enumerate() {
            while laps.next_if(|lap| lap.end <= index).is_some() {}
            let times = if laps.peek().is_some_and(|lap| lap.each.contains(&index)) { rounds } else { 1.0 };
            let awaited = step.awaits.iter().map(|transfer| complete[*transfer]).fold(now, f64::max);
            if let Some(Route::Ranks { rank, is_sum }) = step.op.route() {
                if sums || !is_sum {
                    between = between.max(awaited) + self.exchange_seconds(rank, step.cost.bytes);
                    complete[index] = between;
                    now += step.cost.bytes * self.transfer_s_per_byte;
                }
            } else if step.op.runs_on_host() {
                // `waiting_for_updates` counts its time.
            } else if step.op.is_transfer() {
                let lane = if step.op.route() == Some(Route::ToDevice) { &mut inward } else { &mut outward };
                *lane = lane.max(awaited) + times * step.cost.bytes / self.transfer_rate(plan, step);
                complete[index] = *lane;
                now += times * step.cost.bytes * self.transfer_s_per_byte;
            } else if step.op.has(Property::Waits) {
                now = awaited;
            } else {
                // Steps that are launched together pay for one launch.
                let before = index.checked_sub(1).map(|before| &steps[before].op);
                let is_launched = before.is_some_and(|before| step.op.joins(before));
                let saved_s = if is_launched { self.rates.step_s } else { 0.0 };
                now = awaited + times * (self.seconds(&step.op, step.cost) - saved_s);
            }
            see_end(now);
        }
        now.max(inward).max(outward).max(between)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_longer_of_arithmetic_and_traffic_and_its_operands() {
        let rates = Rates {
            matmul_flops_per_s: 100.0,
            bf16_matmul_flops_per_s: 300.0,
            weight_gradient_flops_per_s: 10.0,
            attention_flops_per_s: 50.0,
            bytes_per_s: 20.0,
            step_s: 0.5,
            plain_operand_s: 0.01,
            coded_operand_s: 0.1,
        };
        let profile = Profile { rates, ..Profile::cpu(1, Precision::F32) };
        let cost = |flops, bytes| Cost { flops, bytes, ..Cost::default() };
        let linear = Op::Linear { bias: false, lora: None };
        assert_eq!(profile.seconds(&linear, cost(300.0, 20.0)), 3.5);
        assert_eq!(profile.seconds(&linear, cost(300.0, 200.0)), 10.5);
        assert_eq!(profile.seconds(&linear, Cost { bf16_flops: 270.0, ..cost(300.0, 20.0) }), 1.7);
        assert_eq!(profile.seconds(&Op::WeightGrad { scale: 1.0 }, cost(300.0, 200.0)), 30.5);
        assert_eq!(profile.seconds(&Op::Add { scale: 1.0 }, cost(0.0, 40.0)), 2.5);
        let operands = Cost { plain_operands: 100.0, coded_operands: 10.0, ..cost(100.0, 0.0) };
        assert_eq!(profile.seconds(&linear, operands), 3.5);
    }

    #[test]
    fn a_precision_has_its_own_rates() {
        let device = DeviceProfile::cpu(2);
        assert_eq!(device.at(Precision::F32).rates, device.f32);
        assert_eq!(device.at(Precision::Bf16).rates, device.half);
        assert_eq!(device.at(Precision::F16).rates, device.half);
        assert!(device.half.matmul_flops_per_s > device.f32.matmul_flops_per_s);
    }
}
