//! Updates on the host: the CPU runs AdamW on tensors in pinned memory while the GPU continues.
//!
//! An update is a host callback on a stream of its own, after the gradient norm of its step. It may still run when the
//! next entry point begins: everything there that touches its memory (a transfer, a kernel that reads pinned memory,
//! the host) waits for its event. So the next forward pass waits for the update of a layer only when it reaches that
//! layer.

use super::driver::{self, Event, Gpu, Stream};
use crate::cpu::pool::Pool;
use crate::cpu::update_at::UpdateAt;
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::{Entry, Extent, Op, Space, Storage};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
pub struct HostUpdates {
    pool: Arc<Pool>,
    stream: Stream,
    updates: Vec<Update>,
    /// For each step, the updates that it has to wait for, as indices of `updates`.
    waits: HashMap<(Entry, usize), Vec<usize>>,
}

#[derive(Debug)]
struct Update {
    /// Entry point and index of its step.
    place: (Entry, usize),
    /// The byte ranges of pinned memory that it reads and writes.
    touched: Vec<Range<usize>>,
    finished: Event,
}

impl HostUpdates {
    /// Prepares the host updates among all steps of a plan; `None` if there are none.
    pub fn prepare<'a>(
        steps: impl Iterator<Item = &'a BoundStep> + Clone,
        threads: usize,
    ) -> Result<Option<HostUpdates>, DeviceError> {
        let mut updates = Vec::new();
        for step in steps.clone().filter(|step| is_update(step)) {
            let touched = on_host(step).map(range).collect();
            updates.push(Update { place: (step.entry, step.index), touched, finished: Event::new()? });
        }
        if updates.is_empty() {
            return Ok(None);
        }
        let mut waits: HashMap<(Entry, usize), Vec<usize>> = HashMap::new();
        for step in steps.filter(|step| !is_update(step)) {
            for own in on_host(step).map(range) {
                let overlaps = |update: &Update| {
                    update.touched.iter().any(|other| other.start < own.end && own.start < other.end)
                };
                let found = updates.iter().enumerate().filter(|(_, update)| overlaps(update));
                waits.entry((step.entry, step.index)).or_default().extend(found.map(|(index, _)| index));
            }
        }
        waits.retain(|_, updates| !updates.is_empty());
        let pool = Pool::new(threads).map_err(|error| DeviceError::Call {
            device: driver::NAME,
            call: "threads for updates",
            what: error.to_string(),
        })?;
        Ok(Some(HostUpdates { pool: Arc::new(pool), stream: Stream::new()?, updates, waits }))
    }

    /// Enqueues the update of a step, after everything launched so far and the transfers that it awaits. `host` is the
    /// address of the pinned memory.
    pub fn begin(
        &self,
        gpu: &Gpu,
        (launched, awaited): (&Event, &[&Event]),
        host: u64,
        step: &BoundStep,
        extent: &Extent,
    ) -> Result<(), DeviceError> {
        let Op::AdamWOnHost(settings) = step.op else { unreachable!("the caller passes updates only") };
        launched.record(gpu)?;
        launched.hold(self.stream.handle)?;
        awaited.iter().try_for_each(|event| event.hold(self.stream.handle))?;
        let address = |operand: &Operand| (host + operand.offset as u64) as *mut u8;
        let update = UpdateAt {
            settings,
            elements: step.inputs[0].elements_at(extent),
            in_8_bits: matches!(step.updates[1].storage, Storage::Dynamic8 { .. }),
            gradient: address(&step.inputs[0]).cast(),
            report: address(&step.inputs[1]).cast(),
            hyper: address(&step.inputs[2]).cast(),
            parameter: address(&step.updates[0]).cast(),
            moments: [1, 2].map(|index| address(&step.updates[index])),
            activity: address(&step.updates[3]).cast(),
        };
        let pool = Arc::clone(&self.pool);
        // SAFETY: the plan reserves these ranges for the operands, and everything that touches them waits for the event
        // below.
        driver::call_in_order(&self.stream, move || unsafe { update.run(&pool) })?;
        let own = self.updates.iter().find(|update| update.place == (step.entry, step.index));
        own.expect("`prepare` has seen every update").finished.record_in(self.stream.handle)
    }

    /// Makes a stream wait for the updates of the memory that a step touches.
    pub fn hold(&self, step: &BoundStep, stream: cudarc::driver::sys::CUstream) -> Result<(), DeviceError> {
        let mut updates = self.waits.get(&(step.entry, step.index)).into_iter().flatten();
        updates.try_for_each(|update| self.updates[*update].finished.hold(stream))
    }

    /// Waits until all updates are done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.stream.wait()
    }
}

impl Drop for HostUpdates {
    fn drop(&mut self) {
        // The last callback must not be the one that drops the pool: a callback must not join the pool's threads.
        let _ = self.stream.wait();
    }
}

fn is_update(step: &BoundStep) -> bool {
    step.op.runs_on_host()
}

fn on_host(step: &BoundStep) -> impl Iterator<Item = &Operand> {
    let operands = step.inputs.iter().chain(&step.outputs).chain(&step.updates);
    operands.filter(|operand| operand.space == Space::Host)
}

fn range(operand: &Operand) -> Range<usize> {
    operand.offset..operand.offset + operand.bytes
}
