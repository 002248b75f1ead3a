//! What ranks divide, gathered one tensor at a time: for checkpoints, and for the model that a run ends with.
//!
//! Every rank takes part, in the same order; the first one reads the whole tensor and writes it. The next tensor
//! overwrites it.

use crate::failure::Failure;
use smidgen_formats::safetensors::write::{TensorSpec, lay_out_file, pytorch_metadata};
use smidgen_ir::{Entry, Plan, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io;

/// The step of `collect` that gathers a leaf, and what it writes.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    step: usize,
    pub whole: ValueId,
}

impl Gathered {
    /// `None` for a leaf that this rank has whole.
    pub fn of(plan: &Plan, leaf: ValueId) -> Option<Gathered> {
        plan.value(leaf).role.shard()?;
        let steps = &plan.entry(Entry::Collect).steps;
        let step =
            steps.iter().position(|step| step.inputs[0] == leaf).expect("what is divided is collected");
        Some(Gathered { step, whole: steps[step].outputs[0] })
    }

    pub fn run<D: Device>(&self, executor: &mut Executor<D>) -> io::Result<()> {
        let extent = executor.plan().extent;
        executor.run_step(Entry::Collect, self.step, &extent).map_err(io::Error::other)
    }
}

/// Takes part in gathering these, in order.
pub fn help<D: Device>(
    executor: &mut Executor<D>,
    all: impl IntoIterator<Item = Option<Gathered>>,
) -> Result<(), Failure> {
    all.into_iter().flatten().try_for_each(|gathered| gathered.run(executor)).map_err(Failure::disk)
}

/// The tensors of a file in the order in which they are written.
pub fn in_file_order(specs: &[TensorSpec]) -> Result<Vec<usize>, Failure> {
    let offsets = lay_out_file(&pytorch_metadata(), specs).map_err(Failure::writing)?.offsets;
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|index| offsets[*index]);
    Ok(order)
}
