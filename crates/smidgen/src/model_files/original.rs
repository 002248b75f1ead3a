//! The base model of a merge: a list of its tensors, and one way to read their rows as f32.
//! Only this file knows how tensors are stored (plain numbers, 4-bit codes with scales, GGUF blocks); other files read
//! rows as f32, or copy bytes.
//! Rows are decoded a few at a time. The stored bytes of a 4-bit tensor of bitsandbytes stay in memory until all rows
//! are decoded, because the rows share its nested scales.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use smidgen_ir::quant;

use super::numbers::read_f32;
use crate::failure::Failure;
use smidgen_formats::element::Element;
use smidgen_formats::load::can_read_as;
use smidgen_formats::model::Model;
use smidgen_formats::packed::PackedWeight;
use smidgen_formats::phi4mm;
use smidgen_formats::weight::{DECODED, Weight, WeightRows};
use smidgen_ir::{Block, DType, Storage};

/// Bytes that are decoded at a time (at least one row of a GGUF tensor).
const PIECE_BYTES: usize = 32 << 10;

pub struct OriginalModel {
    model: Model,
    tensors: Vec<OriginalTensor>,
    by_name: BTreeMap<String, usize>,
}

#[derive(Clone, Debug)]
pub struct OriginalTensor {
    name: String,
    /// The name in the output.
    in_file: String,
    weight: Weight,
    /// The shape in the output.
    shape: Vec<usize>,
}

/// The matrices of experts that one parameter of transformers has.
#[derive(Clone, Debug, PartialEq)]
pub struct MatricesOfExperts {
    pub experts: usize,
    /// Of one expert.
    pub rows: usize,
    pub columns: usize,
    /// Whether each matrix is written transposed.
    pub is_turned: bool,
    /// The tensors, which have equally many rows and follow each other.
    pub names: Vec<String>,
}

impl OriginalModel {
    /// Opens a folder or a GGUF file.
    pub fn open(path: &Path) -> Result<OriginalModel, Failure> {
        OriginalModel::new(Model::open(path).map_err(Failure::model)?)
    }

    pub fn new(model: Model) -> Result<OriginalModel, Failure> {
        if !model.has_weights() {
            let place = model.path().display();
            return Err(Failure::model(format!("the model folder `{place}` has no weights")));
        }
        // In the order of the files, so that tensors of one shard stay together.
        let names: Vec<(String, String)> = match &model {
            Model::Folder { folder, packed, .. } => (folder.files().iter())
                .flat_map(|file| file.tensors())
                .map(|entry| (folder.name_of(&entry.name), entry.name.clone()))
                // A packed weight is written under its own name, where its codes are.
                .map(|(name, in_file)| match packed.weight_of_codes(&name) {
                    Some(weight) if packed.weights[weight].experts().is_some() => {
                        (weight.to_owned(), weight.trim_end_matches(".weight").to_owned())
                    }
                    Some(weight) => (weight.to_owned(), weight.to_owned()),
                    None => (name, in_file),
                })
                .collect(),
            Model::Gguf { model, .. } => {
                let mut sources: Vec<_> =
                    model.sources().map(|(name, source)| (source.position, name)).collect();
                sources.sort_unstable();
                sources.into_iter().map(|(_, name)| (name.to_string(), name.to_string())).collect()
            }
        };
        let weight_of = |(name, in_file): (String, String)| {
            model.weight(&name).map(|weight| OriginalTensor::new(name, in_file, weight))
        };
        let tensors: Vec<OriginalTensor> = names.into_iter().filter_map(weight_of).collect();
        let by_name = tensors.iter().map(|tensor| tensor.name.clone()).zip(0..).collect();
        Ok(OriginalModel { model, tensors, by_name })
    }

    pub fn path(&self) -> &Path {
        self.model.path()
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> &[OriginalTensor] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&OriginalTensor> {
        self.by_name.get(name).map(|&position| &self.tensors[position])
    }

    /// Translates a tensor's name in the layout of transformers to its name in the files.
    pub fn file_name(&self, name: &str) -> String {
        match &self.model {
            Model::Folder { folder, phi4mm: Some(_), .. } => phi4mm::file_name(folder, name),
            Model::Folder { phi4mm: None, experts, .. } => {
                experts.file_name(name).unwrap_or(name).to_string()
            }
            Model::Gguf { .. } => name.to_string(),
        }
    }

    /// The tensors that hold the matrices of experts that an adapted module names.
    pub fn matrices_of_experts(&self, module: &str) -> Option<MatricesOfExperts> {
        let Model::Folder { experts, packed, .. } = &self.model else { return None };
        let name = format!("{module}.weight");
        let (shape, count, names, is_turned) = match (experts.joined(&name), packed.weights.get(&name)) {
            (Some(joined), _) => {
                let names = joined.sources().iter().map(|source| source.name.clone()).collect();
                (joined.shape(), joined.experts(), names, joined.is_turned())
            }
            (None, Some(weight)) => (weight.shape(), weight.experts()?, vec![name], true),
            (None, None) => return None,
        };
        let (rows, columns) = (shape[0] / count.max(1), shape[1..].iter().product());
        Some(MatricesOfExperts { experts: count, rows, columns, is_turned, names })
    }

    /// Whether the model was opened without the speech adapter inside its checkpoint, because the run continued that
    /// one.
    pub fn leaves_out_speech(&self) -> bool {
        matches!(&self.model, Model::Folder { phi4mm: Some(phi4mm), .. } if !phi4mm.is_merged)
    }

    /// Whether the adapter inside the checkpoint adds to this module's weight.
    pub fn has_speech(&self, module: &str) -> bool {
        self.model.speech_factors(module).is_some()
    }

    pub fn is_quantized(&self) -> bool {
        self.tensors.iter().any(OriginalTensor::is_quantized)
    }

    /// The names of the storage formats: the quantized ones of a quantized model, else its element types.
    pub fn storages(&self) -> BTreeSet<String> {
        let quantized = self.is_quantized();
        let named = self.tensors.iter().filter(|tensor| tensor.is_quantized() == quantized);
        named
            .filter(|tensor| tensor.is_real())
            .map(|tensor| tensor.weight.element_name().to_lowercase())
            .collect()
    }
}

impl OriginalTensor {
    pub fn new(name: String, in_file: String, weight: Weight) -> OriginalTensor {
        let shape = match (weight.shape(), packed_experts(&weight)) {
            (&[rows, columns], Some((_, experts))) => vec![experts, columns, rows / experts],
            (shape, _) => shape.to_vec(),
        };
        OriginalTensor { name, in_file, weight, shape }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name in the files of the model, and in those of the merged one.
    pub fn file_name(&self) -> &str {
        &self.in_file
    }

    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The default type in the output.
    pub fn element(&self) -> Element {
        match (&self.weight, self.weight.storage()) {
            (Weight::Plain(tensor), _) => tensor.element(),
            (_, Some(Storage::Plain(DType::F32))) => Element::F32,
            (_, Some(Storage::Plain(DType::F16))) => Element::F16,
            (_, Some(Storage::Plain(DType::Bf16))) => Element::Bf16,
            // Every number of MXFP4 is one of bf16, whose range is larger than that of f16.
            (_, Some(Storage::Gguf(Block::Mxfp4))) => Element::Bf16,
            _ => DECODED,
        }
    }

    pub fn is_quantized(&self) -> bool {
        match &self.weight {
            Weight::Plain(_) => false,
            weight => !matches!(weight.storage(), Some(Storage::Plain(_))),
        }
    }

    /// Whether its rows can be read as f32.
    pub fn is_real(&self) -> bool {
        match &self.weight {
            Weight::Plain(tensor) => can_read_as(tensor.element(), Element::F32),
            Weight::Bnb(_) | Weight::Fp8(_) | Weight::Packed(_) | Weight::Gguf(_) => true,
            Weight::Merged(_) | Weight::Joined(_) => true,
        }
    }

    /// Whether its stored bytes can be copied as `element`.
    pub fn is_stored_as(&self, element: Element) -> bool {
        matches!(&self.weight, Weight::Plain(tensor) if tensor.element() == element)
    }

    /// The rows of a matrix, or of all matrices of experts; the elements of a vector; 1 for a scalar.
    pub fn rows(&self) -> usize {
        match self.shape() {
            [experts, rows, _] => experts * rows,
            shape => shape.first().copied().unwrap_or(1),
        }
    }

    /// The elements of a row.
    pub fn row_elements(&self) -> usize {
        self.shape().iter().product::<usize>().checked_div(self.rows()).unwrap_or(0)
    }

    /// Bytes that stay in memory while its rows are read.
    pub fn held_bytes(&self) -> usize {
        held_bytes(&self.weight)
    }

    /// Reads stored bytes.
    pub fn read_bytes(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), Failure> {
        self.weight.read_stored(byte_offset, destination).map_err(Failure::model)
    }
}

/// Bytes that stay in memory while rows of a weight are read: all of it if its rows share scales, or are written as columns.
pub fn held_bytes(weight: &Weight) -> usize {
    let (rows, columns) = weight.rows_and_columns();
    match weight {
        Weight::Bnb(_) | Weight::Fp8(_) => weight.storage().map_or(0, |storage| storage.bytes(rows, columns)),
        Weight::Packed(packed) if packed.experts().is_some() => packed.storage().bytes(rows, columns),
        Weight::Joined(joined) => {
            joined.sources().iter().map(|source| held_bytes(&source.weight)).max().unwrap_or(0)
        }
        Weight::Plain(_) | Weight::Packed(_) | Weight::Gguf(_) | Weight::Merged(_) => 0,
    }
}

/// A packed weight with the matrices of so many experts, which transformers has transposed.
fn packed_experts(weight: &Weight) -> Option<(&PackedWeight, usize)> {
    match weight {
        Weight::Packed(weight) => Some((weight, weight.experts()?)),
        _ => None,
    }
}

/// Rows of the transposed matrices of experts: row (expert, input) has the numbers of all outputs.
fn read_turned(
    (weight, experts): (&PackedWeight, usize),
    held: &[u8],
    first_row: usize,
    destination: &mut [f32],
) {
    let (columns, outputs) = (weight.shape()[1], weight.shape()[0] / experts);
    let (storage, block) = (weight.storage(), weight.block().elements());
    let row_bytes = storage.bytes(1, columns);
    let (mut row, mut rest) = (first_row, destination);
    while !rest.is_empty() {
        let (expert, input) = (row / columns, row % columns);
        let inputs = (columns - input).min(rest.len() / outputs);
        let (part, behind) = rest.split_at_mut(inputs * outputs);
        // Whole blocks are decoded.
        let (from, to) = (input / block * block, (input + inputs).next_multiple_of(block));
        let mut numbers = vec![0.0; to - from];
        for output in 0..outputs {
            let turn = if output % 2 == 0 { output / 2 } else { outputs / 2 + output / 2 };
            let own = if weight.takes_turns() { turn } else { output };
            let bytes = &held[(expert * outputs + own) * row_bytes..][..row_bytes];
            let blocks = storage.bytes(1, from)..storage.bytes(1, to);
            quant::decode(storage, 1, to - from, &bytes[blocks], 0, &mut numbers);
            let column = part[output..].iter_mut().step_by(outputs);
            column.zip(&numbers[input - from..]).for_each(|(target, number)| *target = *number);
        }
        (row, rest) = (row + inputs, behind);
    }
}

/// A tensor whose rows are read as f32, possibly by several threads.
pub struct OriginalRows<'a> {
    tensor: &'a OriginalTensor,
    held: &'a [u8],
}

impl<'a> OriginalRows<'a> {
    /// Reads the tensor's [`OriginalTensor::held_bytes`] into `held`.
    pub fn open(tensor: &'a OriginalTensor, held: &'a mut Vec<u8>) -> Result<OriginalRows<'a>, Failure> {
        held.clear();
        held.resize(tensor.held_bytes(), 0);
        if !held.is_empty() {
            tensor.read_bytes(0, held)?;
        }
        Ok(OriginalRows { tensor, held })
    }

    /// Reads `rows` rows, starting at `first_row`.
    pub fn read(&self, first_row: usize, rows: usize, destination: &mut [f32]) -> Result<(), Failure> {
        let width = self.tensor.row_elements();
        assert_eq!(destination.len(), rows * width, "rows of `{}`", self.tensor.name());
        if let Some(packed) = packed_experts(&self.tensor.weight) {
            read_turned(packed, self.held, first_row, destination);
            return Ok(());
        }
        match &self.tensor.weight {
            Weight::Plain(stored) => read_f32(stored, (first_row * width) as u64, destination),
            weight @ (Weight::Bnb(_) | Weight::Fp8(_)) => {
                let all = self.tensor.rows();
                let storage = weight.storage().expect("quantized weights have a storage");
                quant::decode(storage, all, width, self.held, first_row * width, destination);
                Ok(())
            }
            weight @ (Weight::Packed(_) | Weight::Gguf(_) | Weight::Merged(_) | Weight::Joined(_)) => {
                let mut stored = WeightRows::open(weight).map_err(Failure::model)?;
                let rows_at_a_time = (PIECE_BYTES / size_of::<f32>() / width.max(1)).max(1);
                for (piece, target) in destination.chunks_mut(rows_at_a_time * width.max(1)).enumerate() {
                    let first = first_row + piece * rows_at_a_time;
                    stored.read(first, target.len() / width.max(1), target).map_err(Failure::model)?;
                }
                Ok(())
            }
        }
    }
}
