//! A device that computes nothing and believes nothing: it checks every access of a run.
//!
//! It keeps a shadow of the reservation: which bytes hold a value that was written and not overwritten
//! since. A step that reads anything else, or leaves the reservation, is a violation. Tests run plans on
//! it to see what `verify` proves on paper happen in order.

use crate::device::{BoundStep, Destination, Device, DeviceError, Fill, FillError, Operand};
use smidgen_ir::Extent;
use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub struct Null {
    reserved_bytes: usize,
    /// Intact values: start → end.
    intact: BTreeMap<usize, usize>,
    /// End of the highest byte that any access touched.
    touched_bytes: usize,
    steps: usize,
}

impl Null {
    /// End of the highest byte touched: the peak of the run.
    pub fn touched_bytes(&self) -> usize {
        self.touched_bytes
    }

    pub fn steps(&self) -> usize {
        self.steps
    }

    fn touch(&mut self, what: &str, start: usize, end: usize) -> Result<(), DeviceError> {
        if end > self.reserved_bytes {
            let reserved = self.reserved_bytes;
            return Err(DeviceError::Violation(format!(
                "{what} ends at {end}, the reservation at {reserved}"
            )));
        }
        self.touched_bytes = self.touched_bytes.max(end);
        debug_assert!(start <= end);
        Ok(())
    }

    /// Bytes `start..end` now hold one value; whatever they overlapped is gone.
    fn set(&mut self, start: usize, end: usize) {
        self.destroy(start, end);
        if end > start {
            self.intact.insert(start, end);
        }
    }

    /// No value that overlaps `start..end` is intact any more.
    fn destroy(&mut self, start: usize, end: usize) {
        let overlapped: Vec<usize> = self
            .intact
            .range(..end)
            .rev()
            .take_while(|(_, other_end)| **other_end > start)
            .map(|(other, _)| *other)
            .collect();
        for other in overlapped {
            self.intact.remove(&other);
        }
    }

    fn holds(&self, start: usize, end: usize) -> bool {
        start == end || self.intact.range(..=start).next_back().is_some_and(|(_, own_end)| *own_end >= end)
    }

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
        self.touch(&what, start, end)?;
        Ok((start, end))
    }
}

impl Device for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), DeviceError> {
        *self = Null { reserved_bytes: bytes, ..Null::default() };
        Ok(())
    }

    fn check(&self, _step: &BoundStep, _extent: &Extent) -> Result<(), DeviceError> {
        Ok(())
    }

    fn write(&mut self, offset: usize, from: &[u8]) {
        self.set(offset, offset + from.len());
    }

    fn read(&mut self, _offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        into.fill(0);
        Ok(())
    }

    fn fill<E>(&mut self, to: Destination, _fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        let gaps = to.rows.map_or(0, |(row, stride)| (to.bytes / row).saturating_sub(1) * (stride - row));
        self.set(to.offset, to.offset + to.bytes + gaps);
        Ok(())
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.steps += 1;
        for (kind, operands) in [("input", &step.inputs), ("update", &step.updates)] {
            for (index, operand) in operands.iter().enumerate() {
                let (start, end) = self.operand(step, kind, operand, extent)?;
                if !self.holds(start, end) {
                    return Err(DeviceError::Violation(format!(
                        "step {} (`{}`) reads {kind} {index} at {start}..{end}, which nobody wrote or somebody overwrote",
                        self.steps,
                        step.op.name()
                    )));
                }
            }
        }
        if let Some((offset, bytes)) = step.workspace {
            self.touch(&format!("workspace of `{}`", step.op.name()), offset, offset + bytes)?;
            // Scratch destroys what lay there; no operand may lie there.
            self.destroy(offset, offset + bytes);
            for (index, operand) in step.inputs.iter().chain(&step.updates).chain(&step.outputs).enumerate() {
                let (start, end) = (operand.offset, operand.offset + operand.span_at(extent));
                if start < offset + bytes && offset < end {
                    let what = format!("workspace of `{}` lies over operand {index}", step.op.name());
                    return Err(DeviceError::Violation(what));
                }
            }
        }
        for operand in &step.outputs {
            let (start, end) = self.operand(step, "output", operand, extent)?;
            self.set(start, end);
        }
        Ok(())
    }
}
