//! The optimizer state of a checkpoint: `optimizer.safetensors`, the same whether ranks divide it or not.
//!
//! Each rank reads only its own part. To write, all ranks gather one tensor after the other, in the order of the
//! file: the first rank writes, the others only take part. Only one piece is in memory at a time.

use super::checkpoint_file::{self, Gathered, find_tensors, in_file_order};
use crate::failure::Failure;
use crate::session::weights;
use smidgen_formats::element::Element;
use smidgen_formats::finite::FiniteWriter;
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use smidgen_ir::storage::dynamic8_codes;
use smidgen_ir::{DType, Extent, LeafKind, Plan, Shard, Storage, Type, ValueId};
use smidgen_runtime::{Device, Executor};
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

const FILE: &str = "optimizer.safetensors";
const PIECE_BYTES: usize = 256 << 10;

/// Writes the optimizer state into a folder.
pub fn write<D: Device>(executor: &mut Executor<D>, folder: &Path) -> Result<(), Failure> {
    let (places, specs) = tensors(executor.plan());
    write_safetensors(&folder.join(FILE), &pytorch_metadata(), &specs, |index, out| {
        let spec = &specs[index];
        places[index].write(executor, &mut FiniteWriter::new(out, &spec.name, spec.element))
    })
    .map_err(Failure::writing)
}

/// Takes part in gathering tensors while another rank writes.
pub fn help_write<D: Device>(executor: &mut Executor<D>) -> Result<(), Failure> {
    let (places, specs) = tensors(executor.plan());
    let order = in_file_order(&specs)?;
    checkpoint_file::help(executor, order.into_iter().map(|index| places[index].gathered))
}

/// Fills the optimizer state from a folder.
pub fn read<D: Device>(executor: &mut Executor<D>, folder: &Path) -> Result<(), Failure> {
    let (places, specs) = tensors(executor.plan());
    let found = find_tensors(&folder.join(FILE), &specs)?;
    let mut scratch = vec![0u8; PIECE_BYTES];
    for (place, tensor) in places.iter().zip(&found) {
        for done in (0..place.own.len()).step_by(PIECE_BYTES) {
            let piece = &mut scratch[..PIECE_BYTES.min(place.own.len() - done)];
            tensor.read_at((place.in_tensor + done) as u64, piece).map_err(Failure::model)?;
            executor.write_at(place.leaf, place.own.start + done, piece);
        }
    }
    Ok(())
}

/// The place of a file's tensor on the device.
#[derive(Debug)]
struct Destination {
    leaf: ValueId,
    /// The tensor's bytes in the part of the leaf that this rank stores.
    own: Range<usize>,
    /// Offset of these bytes in the tensor.
    in_tensor: usize,
    gathered: Option<Gathered>,
    /// The tensor's bytes in the gathered leaf, in order.
    parts: Vec<Range<usize>>,
}

impl Destination {
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
fn tensors(plan: &Plan) -> (Vec<Destination>, Vec<TensorSpec>) {
    let (mut places, mut specs) = (Vec::new(), Vec::new());
    for (leaf, name) in weights::leaf_names(plan, LeafKind::Moment) {
        let value = plan.value(leaf);
        let shape: Vec<usize> = value.ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
        let elements = value.ty.elements(&plan.extent);
        let mut add = |name: String, element: Element, shape: Vec<usize>, half: Half| {
            places.push(place(plan, leaf, &value.ty, value.role.shard(), half));
            specs.push(TensorSpec { name, element, shape });
        };
        match value.ty.storage {
            Storage::Plain(DType::F32) => add(name, Element::F32, shape, Half::All),
            Storage::Dynamic8 { .. } => {
                let scales = dynamic8_codes(elements) / 4;
                add(format!("{name}.absmax"), Element::F32, vec![scales], Half::Scales);
                add(name, Element::U8, shape, Half::Codes);
            }
            storage => unreachable!("no optimizer stores its moments as {storage}"),
        }
    }
    (places, specs)
}

/// The part of a leaf that is a tensor of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    All,
    /// In 8-bit state, which stores the scales first.
    Scales,
    Codes,
}

impl Half {
    /// The byte range of this part in a matrix with this many elements.
    fn range(self, elements: usize, bytes: usize) -> Range<usize> {
        match self {
            Half::All => 0..bytes,
            Half::Scales => 0..dynamic8_codes(elements),
            Half::Codes => dynamic8_codes(elements)..bytes,
        }
    }
}

fn place(plan: &Plan, leaf: ValueId, ty: &Type, shard: Option<Shard>, half: Half) -> Destination {
    let extent = Extent::default();
    let Some(shard) = shard else {
        let own = half.range(ty.elements(&extent), ty.bytes(&extent));
        return Destination { leaf, own, in_tensor: 0, gathered: None, parts: vec![] };
    };
    let (_, columns) = ty.shape.at(&extent);
    let ranks = shard.bytes(ty).into_iter().zip(shard.rows(ty));
    let parts: Vec<Range<usize>> = ranks
        .map(|(bytes, rows)| {
            let half = half.range(rows.len() * columns, bytes.len());
            bytes.start + half.start..bytes.start + half.end
        })
        .collect();
    let own = &parts[shard.rank.index];
    let first = shard.own_bytes(ty).start;
    Destination {
        leaf,
        own: own.start - first..own.end - first,
        in_tensor: parts[..shard.rank.index].iter().map(Range::len).sum(),
        gathered: Gathered::of(plan, leaf),
        parts,
    }
}
