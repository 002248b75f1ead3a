//! What the process or the driver takes beside the reservation, in a few terms.
//!
//! Whoever plans fills in the numbers; here they become bytes for one plan.

use smidgen_ir::{Plan, Space, Step};

/// What the process or the driver takes beside the reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Context {
    pub bytes: u64,
    /// Whether the plan itself is there, ...
    pub holds_plan: bool,
    /// ... and for every step of it, and every value of a step: what the runtime makes of them.
    pub step_bytes: u64,
    pub operand_bytes: u64,
    /// For every step of an entry point without transfers: a device's record of what it launches.
    pub recorded_step_bytes: u64,
    /// For those of them that multiply with a coded matrix beside it: they launch more.
    pub recorded_code_bytes: u64,
    /// For every token of a micro-batch: the batch itself, before it is on the device.
    pub token_bytes: u64,
    /// Where a plan has values on disk: what that takes, ...
    pub spill_bytes: u64,
    /// ... and beside it the largest of them on its way there, in pieces of this.
    pub spill_piece_bytes: u64,
    /// A byte of the device for so many of the host within its reach: its tables of where they are. 0 = none.
    pub host_bytes_a_table_byte: u64,
    /// The reservation and such tables are taken in steps of this; 0 = to the byte.
    pub granule_bytes: u64,
}

impl Context {
    pub fn bytes_for(&self, plan: &Plan) -> u64 {
        let count = |steps: &[Step]| steps.len() as u64;
        let is_recorded = |steps: &[Step]| !steps.iter().any(|step| step.op.is_transfer());
        let recorded = || plan.entries.iter().filter(|entry| is_recorded(&entry.steps));
        let codes = recorded().flat_map(|entry| &entry.steps).filter(|step| step.cost.coded_operands > 0.0);
        let recorded_bytes = self.recorded_step_bytes
            * recorded().map(|entry| count(&entry.steps)).sum::<u64>()
            + self.recorded_code_bytes * codes.count() as u64;
        let on_disk = plan.buffers.iter().filter(|buffer| buffer.space == Space::Disk);
        let largest_on_disk = on_disk.map(|buffer| buffer.bytes as u64).max();
        let spill_bytes =
            largest_on_disk.map_or(0, |largest| self.spill_bytes + self.spill_piece_bytes.min(largest));
        let host_bytes = plan.host.bytes() as u64;
        let tables = host_bytes.checked_div(self.host_bytes_a_table_byte).unwrap_or(0);
        let whole = |bytes: u64| bytes.next_multiple_of(self.granule_bytes.max(1));
        let reserved = plan.reserved_bytes() as u64;
        let rounded_up = whole(reserved) - reserved;
        let of_steps = self.plan_bytes(plan) + recorded_bytes;
        let of_tokens = self.token_bytes * plan.extent.tokens as u64;
        self.bytes + of_steps + of_tokens + spill_bytes + whole(tables) + rounded_up
    }

    /// The plan, and what the runtime makes of it.
    fn plan_bytes(&self, plan: &Plan) -> u64 {
        let own_bytes = if self.holds_plan { plan.own_bytes() as u64 } else { 0 };
        // Its lists lie between what was freed while planning; measured.
        let gaps = own_bytes / 12;
        let steps = plan.entries.iter().flat_map(|entry| &entry.steps);
        let operands = |step: &Step| (step.inputs.len() + step.outputs.len() + step.updates.len()) as u64;
        let of_step = |step: &Step| self.step_bytes + self.operand_bytes * operands(step);
        own_bytes + gaps + steps.map(of_step).sum::<u64>()
    }
}
