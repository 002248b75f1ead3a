//! Trained base weights between disk and device: initial values, checkpoints, and the final model.
//!
//! On the device and in a checkpoint they are f32, or with `train.master` their matrices are bf16. The final model
//! has every tensor in the type of the base (f16 if the base was quantized, as in a merge): trained tensors are
//! rounded once, the others are copied. Tensors pass through a small buffer one after the other; trained tensors are
//! read back and compared. Where ranks divide a tensor, all ranks gather it twice: to be written and to be compared.
//! Left out: files other than the weights (`model_files/sidecar.rs`).

use super::checkpoint_file::{self, Gathered, find_tensors, in_file_order};
use crate::failure::Failure;
use crate::model_files::numbers::{round_into, widen_into};
use crate::model_files::original::OriginalModel;
use crate::model_files::output::{Action, OutputTensor};
use crate::model_files::shards::{INDEX_FILE, SHARD_BYTES, render_index, shard_name, split};
use crate::model_files::sidecar::write_sidecars;
use crate::plan::job::Job;
use crate::session::adapters::check_saved;
use crate::session::weights::{self, leaf, load_weight};
use smidgen_compile::Request;
use smidgen_formats::element::Element;
use smidgen_formats::encode::PIECE_ELEMENTS;
use smidgen_formats::finite::FiniteWriter;
use smidgen_formats::model::Model;
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_formats::weight::{Weight, WeightRows};
use smidgen_formats::whole_file::write_whole;
use smidgen_ir::{Plan, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The trained tensors of a checkpoint, in the type in which they are trained.
pub const TRAINED_FILE: &str = "trained.safetensors";

/// Elements of a trained tensor that are copied at a time: enough that waiting for the device costs little.
const PIECE: usize = 64 << 10;

/// Fills every trained weight from the base model.
pub fn start_trained<D: Device>(
    executor: &mut Executor<D>,
    request: &Request,
    model: &Model,
) -> Result<(), Failure> {
    request.trained.iter().try_for_each(|name| load_weight(executor, model, name, request.threads))
}

/// Writes the trained tensors, then reads them back and compares every byte.
pub fn write_trained<D: Device>(
    executor: &mut Executor<D>,
    request: &Request,
    folder: &Path,
) -> Result<(), Failure> {
    write_file(executor, &trained_outputs(executor.plan(), request), &folder.join(TRAINED_FILE))
}

/// Takes part in gathering while another rank writes the trained tensors.
pub fn help_write_trained<D: Device>(executor: &mut Executor<D>, request: &Request) -> Result<(), Failure> {
    help_write_file(executor, &trained_outputs(executor.plan(), request))
}

fn trained_outputs(plan: &Plan, request: &Request) -> Vec<Output> {
    let output = |name: &String| Output::trained(plan, name.clone(), trained_element(plan, name));
    request.trained.iter().map(output).collect()
}

/// Checks that a checkpoint holds the tensors that the plan trains; reads headers only.
pub fn check_trained(plan: &Plan, request: &Request, folder: &Path) -> Result<(), Failure> {
    find_trained(plan, request, folder).map(|_| ())
}

/// Reads the trained tensors of a checkpoint.
pub fn read_trained<D: Device>(
    executor: &mut Executor<D>,
    request: &Request,
    folder: &Path,
) -> Result<(), Failure> {
    let mut scratch = vec![0u8; weights::PIECE_BYTES];
    let tensors = find_trained(executor.plan(), request, folder)?;
    request.trained.iter().zip(&tensors).try_for_each(|(name, tensor)| {
        let id = leaf(executor.plan(), name);
        weights::fill_from_file(executor, id, tensor, &mut scratch)
    })
}

fn find_trained(plan: &Plan, request: &Request, folder: &Path) -> Result<Vec<TensorRef>, Failure> {
    let specs: Vec<TensorSpec> =
        trained_outputs(plan, request).into_iter().map(|output| output.spec).collect();
    find_tensors(&folder.join(TRAINED_FILE), &specs)
}

/// The type in which a tensor is trained.
fn trained_element(plan: &Plan, name: &str) -> Element {
    element_of(plan, leaf(plan, name))
}

fn element_of(plan: &Plan, id: ValueId) -> Element {
    let dtype = plan.value(id).ty.storage.plain();
    let all = [Element::F32, Element::Bf16, Element::F16];
    all.into_iter().find(|element| element.dtype() == dtype).expect("trained tensors are plain numbers")
}

/// A tensor to be written.
struct Output {
    spec: TensorSpec,
    source: Source,
}

enum Source {
    /// From the device, rounded to the written type; gathered first if ranks divide it.
    Trained(ValueId, Option<Gathered>),
    /// From the base model.
    Frozen(Weight),
}

impl Output {
    fn trained(plan: &Plan, name: String, element: Element) -> Output {
        let id = leaf(plan, &name);
        let shape = plan.value(id).ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
        Output {
            spec: TensorSpec { name, element, shape },
            source: Source::Trained(id, Gathered::of(plan, id)),
        }
    }

    fn gathered(&self) -> Option<Gathered> {
        match self.source {
            Source::Trained(_, gathered) => gathered,
            Source::Frozen(_) => None,
        }
    }

    fn bytes(&self) -> u64 {
        self.spec
            .element
            .tensor_bytes(&self.spec.shape)
            .expect("the tensor was on a device, so its size is valid")
    }

    fn write<D: Device>(&self, executor: &mut Executor<D>, out: &mut dyn Write) -> io::Result<()> {
        let TensorSpec { name, element, .. } = &self.spec;
        let finite = &mut FiniteWriter::new(out, name, *element);
        match &self.source {
            Source::Trained(id, None) => write_rounded(executor, *id, *element, finite),
            Source::Trained(_, Some(gathered)) => {
                gathered.run(executor)?;
                write_rounded(executor, gathered.whole, *element, finite)
            }
            // Copied without a check for NaN: the base has the same values.
            Source::Frozen(weight @ Weight::Plain(_)) => copy_stored(weight, self.bytes(), out),
            Source::Frozen(weight) => write_decoded(weight, *element, finite),
        }
    }
}

/// Writes the weights of the whole model, in shards if they are large; trained tensors are compared afterwards.
pub fn write_model<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    write_shards(executor, job, folder, SHARD_BYTES)
}

/// Takes part in gathering while another rank writes the whole model.
pub fn help_write_model<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    let (outputs, shards) = model_outputs(executor.plan(), job, SHARD_BYTES)?;
    shards.into_iter().try_for_each(|range| help_write_file(executor, &outputs[range]))
}

/// Every tensor of the model with its name in the files, towers included, and the range of tensors of each file.
fn model_outputs(
    plan: &Plan,
    job: &Job,
    shard_bytes: u64,
) -> Result<(Vec<Output>, Vec<Range<usize>>), Failure> {
    let original = OriginalModel::open(job.model.path())?;
    let frozen = |name: String, element: Element, weight: Weight| {
        let shape = weight.shape().to_vec();
        Output { spec: TensorSpec { name, element, shape }, source: Source::Frozen(weight) }
    };
    let of_decoder = job.request.spec.tensors().into_iter().flat_map(|tensor| {
        let weight = job.model.weight(&tensor.name).expect("the job has checked that no weight is missing");
        let element = weight.written_element();
        if let Weight::Joined(joined) = &weight {
            if job.request.trained.contains(&tensor.name) {
                let mut output = Output::trained(plan, tensor.name, element);
                (output.spec.name, output.spec.shape) = joined.as_fused();
                return vec![output];
            }
            let sources = joined.sources().iter();
            return sources.map(|source| frozen(source.in_file(), element, source.weight.clone())).collect();
        }
        let in_file = original.tensor(&tensor.name).map(|original| original.file_name().to_string());
        let name = in_file.unwrap_or_else(|| tensor.name.clone());
        if job.request.trained.contains(&tensor.name) {
            let mut output = Output::trained(plan, tensor.name, element);
            output.spec.name = name;
            // The weight of a convolution has a dimension more in files.
            if let [_, 1, _] = weight.shape() {
                output.spec.shape = weight.shape().to_vec();
            }
            return vec![output];
        }
        vec![frozen(name, element, weight)]
    });
    let is_beside = |name: &str| job.model.is_beside_text(name) || job.request.spec.is_unread(name);
    let beside = original
        .tensors()
        .iter()
        .filter(|tensor| is_beside(tensor.name()))
        .map(|tensor| frozen(tensor.file_name().to_string(), tensor.element(), tensor.weight().clone()));
    let outputs: Vec<Output> = of_decoder.chain(beside).collect();
    let sizes: Vec<u64> = outputs.iter().map(Output::bytes).collect();
    let shards = split(&sizes, shard_bytes);
    Ok((outputs, shards))
}

fn write_shards<D: Device>(
    executor: &mut Executor<D>,
    job: &Job,
    folder: &Path,
    shard_bytes: u64,
) -> Result<(), Failure> {
    let (outputs, shards) = model_outputs(executor.plan(), job, shard_bytes)?;
    for (shard, range) in shards.iter().enumerate() {
        let path = folder.join(shard_name(shard, shards.len()));
        write_file(executor, &outputs[range.clone()], &path)?;
    }
    if shards.len() > 1 {
        let named = outputs.iter().map(|output| (output.spec.name.as_str(), output.bytes()));
        let text = render_index(&named.collect::<Vec<_>>(), &shards);
        write_whole(&folder.join(INDEX_FILE), |out| out.write_all(text.as_bytes())).map_err(Failure::disk)?;
    }
    Ok(())
}

/// Writes config, tokenizer and the other files of the model folder; returns warnings.
pub fn write_beside(model: &Model, folder: &Path) -> Result<Vec<String>, Failure> {
    let original = OriginalModel::open(model.path())?;
    let outputs = original.tensors().iter().map(|tensor| OutputTensor {
        element: tensor.element(),
        original: tensor.clone(),
        action: Action::Convert,
    });
    write_sidecars(&original, &outputs.collect::<Vec<_>>(), folder, None)
}

fn write_file<D: Device>(executor: &mut Executor<D>, outputs: &[Output], path: &Path) -> Result<(), Failure> {
    let specs: Vec<TensorSpec> = outputs.iter().map(|output| output.spec.clone()).collect();
    write_safetensors(path, &pytorch_metadata(), &specs, |index, out| outputs[index].write(executor, out))
        .map_err(Failure::writing)?;
    let file = Arc::new(SafetensorsFile::open(path).map_err(Failure::model)?);
    let context = format!("`{}` does not read back", path.display());
    outputs.iter().filter(|output| matches!(output.source, Source::Trained(..))).try_for_each(|output| {
        let name = &output.spec.name;
        let stored = file.position(name).map(|position| TensorRef::new(&file, position));
        check_saved(stored, name, &context, |out| output.write(executor, out))
    })
}

/// Takes part in [`write_file`]: tensors are gathered to be written, in the order of the file, then to be compared.
fn help_write_file<D: Device>(executor: &mut Executor<D>, outputs: &[Output]) -> Result<(), Failure> {
    let specs: Vec<TensorSpec> = outputs.iter().map(|output| output.spec.clone()).collect();
    let order = in_file_order(&specs)?;
    checkpoint_file::help(executor, order.into_iter().map(|index| outputs[index].gathered()))?;
    checkpoint_file::help(executor, outputs.iter().map(Output::gathered))
}

fn write_rounded<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    element: Element,
    out: &mut dyn Write,
) -> io::Result<()> {
    let elements = executor.plan().value(id).ty.elements(&executor.plan().extent);
    let own = element_of(executor.plan(), id);
    let (mut bytes, mut floats) = (vec![0u8; 4 * PIECE], vec![0f32; PIECE]);
    for first in (0..elements).step_by(PIECE) {
        let count = PIECE.min(elements - first);
        let stored = &mut bytes[..own.size_bytes() * count];
        executor.read_at(id, own.size_bytes() * first, stored).map_err(io::Error::other)?;
        if element == own {
            out.write_all(stored)?;
            continue;
        }
        widen_into(stored, own, &mut floats[..count]);
        let rounded = &mut bytes[..count * element.size_bytes()];
        round_into(&floats[..count], element, rounded);
        out.write_all(rounded)?;
    }
    Ok(())
}

fn copy_stored(weight: &Weight, bytes: u64, out: &mut dyn Write) -> io::Result<()> {
    let mut piece = vec![0u8; weights::PIECE_BYTES];
    let mut offset = 0;
    while offset < bytes {
        let length = (piece.len() as u64).min(bytes - offset) as usize;
        weight.read_stored(offset, &mut piece[..length]).map_err(io::Error::other)?;
        out.write_all(&piece[..length])?;
        offset += length as u64;
    }
    Ok(())
}

/// Writes a weight that the base has quantized or in another row order.
fn write_decoded(weight: &Weight, element: Element, out: &mut dyn Write) -> io::Result<()> {
    let (rows, columns) = weight.rows_and_columns();
    let step = (PIECE_ELEMENTS / columns.max(1)).max(1);
    let (mut floats, mut bytes) =
        (vec![0f32; step.min(rows) * columns], vec![0u8; step.min(rows) * columns * element.size_bytes()]);
    let mut source = WeightRows::open(weight).map_err(io::Error::other)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first);
        let floats = &mut floats[..count * columns];
        source.read(first, count, floats).map_err(io::Error::other)?;
        let bytes = &mut bytes[..floats.len() * element.size_bytes()];
        round_into(floats, element, bytes);
        out.write_all(bytes)?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "trained_weights_tests.rs"]
mod tests;
