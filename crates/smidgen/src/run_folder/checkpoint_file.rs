//! Tensor files of a checkpoint: checked when they are read, gathered from all ranks when they are written.
//!
//! Tensors that ranks divide are gathered one at a time. Every rank takes part, in the same order; the first one
//! reads the whole tensor and writes it. The next tensor overwrites it in memory.

use crate::failure::Failure;
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::safetensors::write::{TensorSpec, lay_out_file, pytorch_metadata};
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_ir::{Entry, Plan, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The step of the entry point `collect` that gathers a divided leaf, and the whole tensor that it writes.
#[derive(Clone, Copy, Debug)]
pub struct Gathered {
    step: usize,
    pub whole: ValueId,
}

impl Gathered {
    /// `None` for a leaf that is not divided.
    pub fn of(plan: &Plan, leaf: ValueId) -> Option<Gathered> {
        plan.value(leaf).role.shard()?;
        let steps = &plan.entry(Entry::Collect).steps;
        let step =
            steps.iter().position(|step| step.inputs[0] == leaf).expect("every divided leaf is collected");
        Some(Gathered { step, whole: steps[step].outputs[0] })
    }

    pub fn run<D: Device>(&self, executor: &mut Executor<D>) -> io::Result<()> {
        let extent = executor.plan().extent;
        // An offloaded part is fetched by the step before.
        let is_fetched = executor.plan().entry(Entry::Collect).steps[self.step].inputs.len() == 2;
        let steps = self.step - usize::from(is_fetched)..=self.step;
        let mut steps = steps.map(|step| executor.run_step(Entry::Collect, step, &extent));
        steps.try_for_each(|done| done.map_err(io::Error::other))
    }
}

/// Takes part in gathering these tensors, in order.
pub fn help<D: Device>(
    executor: &mut Executor<D>,
    all: impl IntoIterator<Item = Option<Gathered>>,
) -> Result<(), Failure> {
    all.into_iter().flatten().try_for_each(|gathered| gathered.run(executor)).map_err(Failure::disk)
}

/// Indices of the tensors in the order in which the file has them.
pub fn in_file_order(specs: &[TensorSpec]) -> Result<Vec<usize>, Failure> {
    let offsets = lay_out_file(&pytorch_metadata(), specs).map_err(Failure::writing)?.offsets;
    let mut order: Vec<usize> = (0..specs.len()).collect();
    order.sort_by_key(|index| offsets[*index]);
    Ok(order)
}

/// Opens a file and finds these tensors in it, in their order.
pub fn find_tensors(path: &Path, specs: &[TensorSpec]) -> Result<Vec<TensorRef>, Failure> {
    let file = Arc::new(SafetensorsFile::open(path).map_err(Failure::model)?);
    let find = |spec: &TensorSpec| {
        let TensorSpec { name, element, shape } = spec;
        let broken = |what: String| {
            Failure::model(format!("`{}`: tensor `{name}` {what}", path.display()))
                .hint("remove that checkpoint folder to continue from the one before")
        };
        let position = file.position(name).ok_or_else(|| broken("is missing".into()))?;
        let tensor = TensorRef::new(&file, position);
        let (found, found_shape) = (tensor.element(), tensor.shape());
        if (found, found_shape) != (*element, shape.as_slice()) {
            return Err(broken(format!("is {found} {found_shape:?}, expected {element} {shape:?}")));
        }
        Ok(tensor)
    };
    specs.iter().map(find).collect()
}
