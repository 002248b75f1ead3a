//! The optimizer state of a checkpoint: `optimizer.safetensors`, the same whether ranks divide it or not.
//!
//! A rank that has only its part reads that part. To write, all ranks gather one tensor after the other, in the order of
//! the file: the first of them writes, the others only take part. Nothing is held in memory but one piece at a time.

use super::gathered::{self, Gathered, in_file_order};
use crate::failure::Failure;
use crate::session::weights;
use smidgen_formats::element::Element;
use smidgen_formats::finite::FiniteWriter;
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_ir::storage::dynamic8_codes;
use smidgen_ir::{DType, Extent, LeafKind, Plan, Shard, Storage, Type, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

const FILE: &str = "optimizer.safetensors";
const PIECE_BYTES: usize = 256 << 10;

/// Writes the optimizer state into a folder.
pub fn write<D: Device>(executor: &mut Executor<D>, folder: &Path) -> Result<(), Failure> {
    let (places, specs): (Vec<Place>, Vec<TensorSpec>) = tensors(executor.plan()).into_iter().unzip();
    write_safetensors(&folder.join(FILE), &pytorch_metadata(), &specs, |index, out| {
        let spec = &specs[index];
        places[index].write(executor, &mut FiniteWriter::new(out, &spec.name, spec.element))
    })
    .map_err(Failure::writing)
}

/// Takes part while another rank writes.
pub fn help_write<D: Device>(executor: &mut Executor<D>) -> Result<(), Failure> {
    let (places, specs): (Vec<Place>, Vec<TensorSpec>) = tensors(executor.plan()).into_iter().unzip();
    let order = in_file_order(&specs)?;
    gathered::help(executor, order.into_iter().map(|index| places[index].gathered))
}

/// Fills the optimizer state from a folder.
pub fn read<D: Device>(executor: &mut Executor<D>, folder: &Path) -> Result<(), Failure> {
    let path = folder.join(FILE);
    let file = Arc::new(SafetensorsFile::open(&path).map_err(Failure::model)?);
    let mut scratch = vec![0u8; PIECE_BYTES];
    for (place, spec) in tensors(executor.plan()) {
        let broken = |what: &str| {
            Failure::model(format!("`{}`: tensor `{}` {what}", path.display(), spec.name))
                .hint("remove that checkpoint folder to continue from the one before")
        };
        let position = file.position(&spec.name).ok_or_else(|| broken("is missing"))?;
        let tensor = TensorRef::new(&file, position);
        let (element, shape) = (tensor.element(), tensor.shape());
        if (element, shape) != (spec.element, spec.shape.as_slice()) {
            let expected = format!("is {element} {shape:?}, expected {} {:?}", spec.element, spec.shape);
            return Err(broken(&expected));
        }
        for done in (0..place.own.len()).step_by(PIECE_BYTES) {
            let piece = PIECE_BYTES.min(place.own.len() - done);
            let piece = &mut scratch[..piece];
            tensor.read_at((place.in_tensor + done) as u64, piece).map_err(Failure::model)?;
            executor.write_at(place.leaf, place.own.start + done, piece);
        }
    }
    Ok(())
}

/// Where a tensor of the file is on the device.
#[derive(Debug)]
struct Place {
    leaf: ValueId,
    /// Bytes of the leaf, as far as this rank stores it.
    own: Range<usize>,
    /// Where they begin in the tensor.
    in_tensor: usize,
    gathered: Option<Gathered>,
    /// Bytes of what is gathered that are the tensor, in order.
    parts: Vec<Range<usize>>,
}

impl Place {
    fn write<D: Device>(&self, executor: &mut Executor<D>, out: &mut dyn Write) -> io::Result<()> {
        let Some(gathered) = self.gathered else {
            return weights::copy_out(executor, self.leaf, self.own.clone(), out);
        };
        gathered.run(executor)?;
        let mut parts = self.parts.iter().cloned();
        parts.try_for_each(|part| weights::copy_out(executor, gathered.whole, part, out))
    }
}

/// The tensors of the optimizer state; for 8-bit state the codes as U8 and each block's largest magnitude.
fn tensors(plan: &Plan) -> Vec<(Place, TensorSpec)> {
    let mut tensors = Vec::new();
    for (leaf, name) in weights::leaf_names(plan, LeafKind::Moment) {
        let value = plan.value(leaf);
        let shape: Vec<usize> = value.ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
        let elements = value.ty.elements(&plan.extent);
        let mut add = |name: String, element: Element, shape: Vec<usize>, half: Half| {
            let place = place(plan, leaf, &value.ty, value.role.shard(), half);
            tensors.push((place, TensorSpec { name, element, shape }));
        };
        match value.ty.storage {
            Storage::Plain(DType::F32) => add(name, Element::F32, shape, Half::All),
            Storage::Dynamic8 { .. } => {
                let scales = dynamic8_codes(elements) / 4;
                add(format!("{name}.absmax"), Element::F32, vec![scales], Half::Scales);
                add(name, Element::U8, shape, Half::Codes);
            }
            storage => unreachable!("no optimizer keeps its moments in {storage}"),
        }
    }
    tensors
}

/// What of a leaf a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    All,
    /// Of 8-bit state, where scales come first.
    Scales,
    Codes,
}

impl Half {
    /// Its bytes among those of a matrix with this many elements.
    fn of(self, elements: usize, bytes: usize) -> Range<usize> {
        match self {
            Half::All => 0..bytes,
            Half::Scales => 0..dynamic8_codes(elements),
            Half::Codes => dynamic8_codes(elements)..bytes,
        }
    }
}

fn place(plan: &Plan, leaf: ValueId, ty: &Type, shard: Option<Shard>, half: Half) -> Place {
    let extent = Extent::default();
    let Some(shard) = shard else {
        let own = half.of(ty.elements(&extent), ty.bytes(&extent));
        return Place { leaf, own, in_tensor: 0, gathered: None, parts: vec![] };
    };
    let (_, columns) = ty.shape.at(&extent);
    let ranks = shard.bytes(ty).into_iter().zip(shard.rows(ty));
    let parts: Vec<Range<usize>> = ranks
        .map(|(bytes, rows)| {
            let half = half.of(rows.len() * columns, bytes.len());
            bytes.start + half.start..bytes.start + half.end
        })
        .collect();
    let own = &parts[shard.rank.index];
    let first = shard.own_bytes(ty).start;
    Place {
        leaf,
        own: own.start - first..own.end - first,
        in_tensor: parts[..shard.rank.index].iter().map(Range::len).sum(),
        gathered: Gathered::of(plan, leaf),
        parts,
    }
}
