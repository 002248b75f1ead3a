//! A device that computes nothing and checks every memory access of a run.
//!
//! For each memory space it records which bytes hold a value that was written and not overwritten since. A step
//! that reads other bytes or goes beyond the reservation is a violation; so is a step that touches the bytes of a
//! pending transfer that it did not await. Tests run plans on it to check in practice what `verify` proves.

use crate::device::{
    Address, BoundStep, Destination, Device, DeviceError, Fill, FillError, Operand, Reservation,
};
use smidgen_ir::{DType, Dim, Extent, Property, Space};
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Default)]
pub struct Null {
    device: Shadow,
    host: Shadow,
    disk: Shadow,
    pending: Vec<PendingTransfer>,
    /// Number of steps run so far, for messages.
    steps: usize,
}

/// The state of one memory space.
#[derive(Debug, Default)]
struct Shadow {
    reserved_bytes: usize,
    /// Intact values: start → end.
    intact: BTreeMap<usize, usize>,
}

/// A transfer or collective that no computing step has awaited yet, and the device bytes that it reads or writes.
#[derive(Debug)]
struct PendingTransfer {
    step: usize,
    /// The transfers that it waited for.
    awaits: Vec<usize>,
    bytes: Range<usize>,
    writes: bool,
}

impl Shadow {
    fn check_reserved(&self, what: &str, end: usize) -> Result<(), DeviceError> {
        if end > self.reserved_bytes {
            let reserved = self.reserved_bytes;
            return Err(DeviceError::Violation(format!(
                "{what} ends at byte {end}, but only {reserved} bytes are reserved"
            )));
        }
        Ok(())
    }

    /// Bytes `start..end` now hold one value; values that overlapped them are gone.
    fn set(&mut self, start: usize, end: usize) {
        self.destroy(start, end);
        if end > start {
            self.intact.insert(start, end);
        }
    }

    /// Removes and returns the values that overlap `start..end`.
    fn destroy(&mut self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let overlapped: Vec<(usize, usize)> =
            self.intact.range(..end).rev().take_while(|(_, e)| **e > start).map(|(s, e)| (*s, *e)).collect();
        for (first, _) in &overlapped {
            self.intact.remove(first);
        }
        overlapped
    }

    /// Bytes `start..end` now hold a part of a value. The bytes around them stay intact.
    fn set_part(&mut self, start: usize, end: usize) {
        let overlapped = self.destroy(start, end);
        self.set(start, end);
        for (first, last) in overlapped {
            self.intact.extend([(first, start), (end, last)].into_iter().filter(|(s, e)| s < e));
        }
    }

    /// Whether all of `start..end` is intact, as one value or as adjacent parts.
    fn holds(&self, start: usize, end: usize) -> bool {
        let mut reached = start;
        while reached < end {
            match self.intact.range(..=reached).next_back() {
                Some((_, own_end)) if *own_end > reached => reached = *own_end,
                _ => return false,
            }
        }
        true
    }
}

impl Null {
    fn shadow(&mut self, space: Space) -> &mut Shadow {
        match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
            Space::Disk => &mut self.disk,
        }
    }

    /// Checks an access to an operand, and returns its first byte and its end.
    fn operand(
        &mut self,
        step: &BoundStep,
        kind: &str,
        operand: &Operand,
        extent: &Extent,
    ) -> Result<(usize, usize), DeviceError> {
        let bytes = operand.bytes_at(extent);
        let what = format!("{kind} of `{}`", step.op.name());
        if bytes > operand.bytes {
            return Err(DeviceError::Violation(format!("{what} needs {bytes} bytes of {}", operand.bytes)));
        }
        let (start, end) = (operand.offset, operand.offset + operand.span_at(extent));
        self.shadow(operand.space).check_reserved(&what, end)?;
        let writes = kind != "input";
        let conflicts = |transfer: &&PendingTransfer| {
            let meets = transfer.bytes.start < end && start < transfer.bytes.end;
            (writes || transfer.writes) && meets && !step.awaits.contains(&transfer.step)
        };
        match self.pending.iter().find(conflicts).filter(|_| operand.space == Space::Device) {
            None => Ok((start, end)),
            Some(transfer) => {
                let other = transfer.step;
                Err(DeviceError::Violation(format!(
                    "{what} at {start}..{end} overlaps the pending transfer of step {other}"
                )))
            }
        }
    }

    /// Removes pending transfers, and with each the transfers that it waited for.
    fn finish(&mut self, transfers: &[usize]) {
        let mut finished = transfers.to_vec();
        while let Some(step) = finished.pop() {
            let removed = self.pending.extract_if(.., |transfer| transfer.step == step);
            finished.extend(removed.flat_map(|transfer| transfer.awaits));
        }
    }

    fn run_one(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.steps += 1;
        if !step.op.is_transfer() {
            self.finish(&step.awaits);
        }
        if step.is_idle(extent) {
            return Ok(());
        }
        for (kind, operands) in [("input", &step.inputs), ("update", &step.updates)] {
            for (index, operand) in operands.iter().enumerate() {
                let (start, end) = self.operand(step, kind, operand, extent)?;
                // An operand that is cleared or overwritten need not hold a value.
                if kind == "update" && step.op.has(Property::Overwrites) {
                    self.shadow(operand.space).set_part(start, end);
                } else if !self.shadow(operand.space).holds(start, end) {
                    return Err(DeviceError::Violation(format!(
                        "step {} (`{}`) reads {kind} {index} at {start}..{end}, which was never written or was overwritten",
                        self.steps,
                        step.op.name()
                    )));
                }
            }
        }
        if let Some((offset, bytes)) = step.workspace {
            self.device.check_reserved(&format!("workspace of `{}`", step.op.name()), offset + bytes)?;
            // A workspace overwrites its bytes, and must not overlap an operand or a pending transfer.
            self.device.destroy(offset, offset + bytes);
            let operands = step.inputs.iter().chain(&step.updates).chain(&step.outputs).enumerate();
            for (index, operand) in operands.filter(|(_, operand)| operand.space == Space::Device) {
                let (start, end) = (operand.offset, operand.offset + operand.span_at(extent));
                if start < offset + bytes && offset < end {
                    let what = format!("workspace of `{}` overlaps operand {index}", step.op.name());
                    return Err(DeviceError::Violation(what));
                }
            }
            if self.pending.iter().any(|other| other.bytes.start < offset + bytes && offset < other.bytes.end)
            {
                let what = format!("workspace of `{}` overlaps a pending transfer", step.op.name());
                return Err(DeviceError::Violation(what));
            }
        }
        for operand in &step.outputs {
            let (start, end) = self.operand(step, "output", operand, extent)?;
            match operand.rows {
                // The gap after the last row belongs to the tile too.
                Dim::Tile { .. } => {
                    let row_bytes = operand.stride * operand.storage.plain().map_or(0, DType::bytes);
                    let end = start + operand.rows_at(extent) * row_bytes;
                    self.shadow(operand.space).set_part(start, end);
                }
                Dim::Const(_)
                | Dim::Tokens
                | Dim::Routed(_)
                | Dim::Rows
                | Dim::Boundaries
                | Dim::Audio(_) => {
                    self.shadow(operand.space).set(start, end);
                }
            }
        }
        let mut moved = Vec::new();
        if step.op.is_collective() {
            let on_device = step.inputs.iter().filter(|operand| operand.space == Space::Device);
            moved.extend(on_device.map(|operand| (operand, false)));
            moved.extend(step.outputs.iter().chain(&step.updates).map(|operand| (operand, true)));
        }
        moved.extend(step.transfer().map(|transfer| (transfer.on_device, transfer.to_device)));
        self.pending.extend(moved.into_iter().map(|(operand, writes)| PendingTransfer {
            step: step.index,
            awaits: step.awaits.clone(),
            bytes: operand.offset..operand.offset + operand.span_at(extent),
            writes,
        }));
        Ok(())
    }
}

impl Device for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        let shadow = |reserved_bytes| Shadow { reserved_bytes, ..Shadow::default() };
        let [device, host, disk] = [spaces.device, spaces.host, spaces.disk].map(shadow);
        *self = Null { device, host, disk, ..Null::default() };
        Ok(())
    }

    fn check(&self, _step: &BoundStep, _extent: &Extent) -> Result<(), DeviceError> {
        Ok(())
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        self.shadow(at.space).set(at.offset, at.offset + from.len());
    }

    fn read(&mut self, _at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        into.fill(0);
        Ok(())
    }

    fn fill<E>(&mut self, to: Destination, _fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        let gaps = to.rows.map_or(0, |(row, stride)| (to.bytes / row).saturating_sub(1) * (stride - row));
        self.shadow(to.at.space).set(to.at.offset, to.at.offset + to.bytes + gaps);
        Ok(())
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.run_all(std::slice::from_ref(step), extent, true)
    }

    fn run_part(&mut self, steps: &[BoundStep], extent: &Extent) -> Result<(), DeviceError> {
        steps.iter().try_for_each(|step| self.run_one(step, extent))
    }

    fn finish_parts(&mut self, _steps: &[BoundStep]) -> Result<(), DeviceError> {
        self.pending.clear();
        Ok(())
    }

    fn run_all(&mut self, steps: &[BoundStep], extent: &Extent, sums: bool) -> Result<(), DeviceError> {
        let is_run = |step: &&BoundStep| sums || !step.is_sum();
        steps.iter().filter(is_run).try_for_each(|step| self.run_one(step, extent))?;
        self.pending.clear();
        Ok(())
    }
}
