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
use smidgen_formats::phi4mm;
use smidgen_formats::weight::{DECODED, Weight, WeightRows};
use smidgen_ir::{DType, Storage};

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
        if let Some(name) = model.mxfp4_experts() {
            let place = model.path().display();
            return Err(Failure::model(format!(
                "`{place}` has experts in MXFP4 (`{name}`), which are not written in another type"
            ))
            .hint("load the adapter over the base, or merge it into a copy of the base in bf16"));
        }
        // In the order of the files, so that tensors of one shard stay together.
        let names: Vec<(String, String)> = match &model {
            Model::Folder { folder, packed, .. } => (folder.files().iter())
                .flat_map(|file| file.tensors())
                .map(|entry| (folder.name_of(&entry.name), entry.name.clone()))
                // A packed weight is written under its own name, where its codes are.
                .map(|(name, in_file)| match packed.weight_of_codes(&name) {
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
            model.weight(&name).map(|weight| OriginalTensor { name, in_file, weight })
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
            Model::Folder { phi4mm: None, .. } | Model::Gguf { .. } => name.to_string(),
        }
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
        self.weight.shape()
    }

    /// The default type in the output.
    pub fn element(&self) -> Element {
        match (&self.weight, self.weight.storage()) {
            (Weight::Plain(tensor), _) => tensor.element(),
            (_, Some(Storage::Plain(DType::F32))) => Element::F32,
            (_, Some(Storage::Plain(DType::F16))) => Element::F16,
            (_, Some(Storage::Plain(DType::Bf16))) => Element::Bf16,
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

    /// The first dimension; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape().first().copied().unwrap_or(1)
    }

    /// The elements of a row: the product of all dimensions but the first.
    pub fn row_elements(&self) -> usize {
        self.shape().iter().skip(1).product()
    }

    /// Bytes that stay in memory while its rows are read.
    pub fn held_bytes(&self) -> usize {
        match &self.weight {
            weight @ (Weight::Bnb(_) | Weight::Fp8(_)) => {
                weight.storage().map_or(0, |storage| storage.bytes(self.rows(), self.row_elements()))
            }
            Weight::Plain(_)
            | Weight::Packed(_)
            | Weight::Gguf(_)
            | Weight::Merged(_)
            | Weight::Joined(_) => 0,
        }
    }

    /// Reads stored bytes.
    pub fn read_bytes(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), Failure> {
        self.weight.read_stored(byte_offset, destination).map_err(Failure::model)
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
