//! One step on a GPU: the operation becomes a call of its launcher.

use super::stage::{KernelFile, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::{Extent, Op};

pub fn files() -> Vec<KernelFile> {
    vec![]
}

pub fn is_product(op: &Op) -> bool {
    matches!(op, Op::Linear { .. })
}

pub fn check(_step: &BoundStep, _extent: &Extent) -> Result<(), DeviceError> {
    Ok(())
}

pub fn run_step(_stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    unreachable!("`{}`", step.op.name())
}
