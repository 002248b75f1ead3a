//! A matrix from several tensors, or from one that holds it transposed: the experts of a layer, with a tensor for each of
//! them and each projection or with one for all, or the parts of a convolution.
//!
//! It is read like any weight: as stored, if the tensors can follow each other in their format, or as f32.
//! Left out: which tensors belong together (`experts.rs`).

use super::{Weight, WeightError, WeightRows};
use crate::content_hash::ContentHash;
use smidgen_ir::storage::FP8_BLOCK;
use smidgen_ir::{Storage, quant};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct JoinedWeight {
    /// In the order of their rows.
    sources: Vec<Source>,
    experts: usize,
    shape: Vec<usize>,
    turned: Option<Turned>,
}

/// A tensor of the files, by the name in a text model alone.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: String,
    pub weight: Weight,
}

impl Source {
    /// The name in the files, or the one that it would have there if it were not quantized.
    pub fn in_file(&self) -> String {
        match &self.weight {
            Weight::Plain(tensor) => tensor.name().to_string(),
            Weight::Fp8(weight) => weight.file_name().to_string(),
            Weight::Packed(weight) => weight.file_name(),
            Weight::Bnb(_) | Weight::Gguf(_) | Weight::Merged(_) | Weight::Joined(_) => self.name.clone(),
        }
    }
}

/// The matrix of each expert is stored transposed, (columns, rows).
#[derive(Clone, Copy, Debug)]
pub struct Turned {
    pub rows: usize,
    pub columns: usize,
    /// Whether the first half of the rows are the even columns of the source, and the second half the odd ones.
    pub takes_turns: bool,
}

impl Turned {
    /// The column of the source that holds a row.
    fn column(&self, row: usize) -> usize {
        match self.rows / 2 {
            half if self.takes_turns && row < half => 2 * row,
            half if self.takes_turns => 2 * (row - half) + 1,
            _ => row,
        }
    }
}

/// Some bytes of a source, in its storage.
struct Segment {
    source: usize,
    first: u64,
    bytes: u64,
}

impl JoinedWeight {
    /// One tensor with the matrices, or the vectors, of all experts.
    pub fn of_one(source: Source, experts: usize, shape: Vec<usize>, turned: Option<Turned>) -> JoinedWeight {
        JoinedWeight { sources: vec![source], experts, shape, turned }
    }

    /// The first source that is no matrix of the shape of the others.
    pub fn other_shape(sources: &[Source]) -> Option<&Source> {
        let first = sources.first()?.weight.shape();
        sources.iter().find(|source| source.weight.shape() != first || first.len() != 2)
    }

    /// Matrices one after the other, all of one shape.
    pub fn of_matrices(sources: Vec<Source>, experts: usize) -> JoinedWeight {
        let [rows, columns] = *sources[0].weight.shape() else { unreachable!("sources are matrices") };
        let shape = vec![sources.len() * rows, columns];
        JoinedWeight { sources, experts, shape, turned: None }
    }

    /// Tensors one after the other, with rows of one size; `None` if they have not.
    pub fn of_parts(sources: Vec<Source>) -> Option<JoinedWeight> {
        let [_, row @ ..] = sources.first()?.weight.shape() else { return None };
        let rows_of = |source: &Source| match source.weight.shape() {
            [rows, others @ ..] if others == row && !row.is_empty() => Some(*rows),
            _ => None,
        };
        let rows: usize = sources.iter().map(rows_of).collect::<Option<Vec<usize>>>()?.iter().sum();
        let shape = [&[rows], row].concat();
        Some(JoinedWeight { sources, experts: 1, shape, turned: None })
    }

    /// How many experts the tensors have matrices of.
    pub fn experts(&self) -> usize {
        self.experts
    }

    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether the matrices are stored transposed.
    pub fn is_turned(&self) -> bool {
        self.turned.is_some()
    }

    fn columns(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Rows of each source, if it holds a matrix of an expert.
    pub fn source_rows(&self) -> usize {
        self.shape[0] / self.sources.len()
    }

    /// The name and the shape under which transformers reads the matrix as one tensor.
    pub fn as_fused(&self) -> (String, Vec<usize>) {
        let name = self.sources[0].in_file();
        if self.sources.len() == 1 {
            return (name, self.sources[0].weight.shape().to_vec());
        }
        // A tensor for each expert, and for each of gate and up; or the parts of a convolution.
        let Some((module, _)) = name.split_once(".experts.") else {
            return (name.replace(".q_conv1d.", ".conv1d."), self.shape.clone());
        };
        let parameter = if self.sources.len() == self.experts { "down_proj" } else { "gate_up_proj" };
        let module = module.replace(".block_sparse_moe", ".mlp");
        (
            format!("{module}.experts.{parameter}"),
            vec![self.experts, self.shape[0] / self.experts, self.columns()],
        )
    }

    /// The storage that all sources share, if they can follow each other in it.
    pub fn storage(&self) -> Option<Storage> {
        let storage = self.sources.first()?.weight.storage()?;
        let is_joinable = match storage {
            Storage::Plain(_) | Storage::Gguf(_) | Storage::Fp8Rows => true,
            // A square that shares a scale belongs to one expert.
            Storage::Fp8Blocks => self.sources.len() == 1 || self.source_rows().is_multiple_of(FP8_BLOCK),
            Storage::Bnb4 { .. } | Storage::Int8Rows | Storage::Dynamic8 { .. } => false,
        };
        let is_shared = self.sources.iter().all(|source| source.weight.storage() == Some(storage));
        (is_joinable && is_shared).then_some(storage)
    }

    /// Whether the bytes of a row follow each other.
    fn has_own_rows(&self) -> bool {
        matches!(self.storage(), Some(Storage::Plain(_) | Storage::Gguf(_)))
    }

    /// Whether bytes can be read without computing them.
    pub fn is_read_as_stored(&self) -> bool {
        self.turned.is_none()
    }

    /// Bytes in memory while rows are read: a matrix as stored and as f32, if its rows cannot be read one by one.
    pub fn held_bytes(&self) -> usize {
        match self.turned {
            Some(turned) => 8 * turned.rows * turned.columns,
            None if self.has_own_rows() => 0,
            None => 8 * self.source_rows() * self.columns(),
        }
    }

    pub fn file_bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.weight.file_bytes()).sum()
    }

    /// The same matrix, which adds every byte that is read to `hash`.
    pub fn hashed(mut self, hash: &Arc<ContentHash>, begin: u64) -> JoinedWeight {
        let mut begin = begin;
        for Source { weight, .. } in &mut self.sources {
            let bytes = weight.file_bytes();
            *weight = weight.clone().hashed_from(hash, begin);
            begin += bytes;
        }
        self
    }

    /// Fills `destination` with the bytes of the files, source after source.
    pub fn read_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        let (mut offset, mut rest) = (byte_offset, destination);
        for Source { weight, .. } in &self.sources {
            let bytes = weight.file_bytes();
            let length = bytes.saturating_sub(offset).min(rest.len() as u64) as usize;
            let (part, behind) = rest.split_at_mut(length);
            if !part.is_empty() {
                weight.read_file(offset, part)?;
            }
            (offset, rest) = (offset.saturating_sub(bytes), behind);
        }
        Ok(())
    }

    /// The bytes of the matrix in the storage of its sources, in their order: of fp8, all codes come before all scales.
    fn segments(&self) -> Vec<Segment> {
        let mut segments = Vec::with_capacity(2 * self.sources.len());
        let mut scales = Vec::new();
        for (source, Source { weight, .. }) in self.sources.iter().enumerate() {
            let (rows, columns) = weight.rows_and_columns();
            let bytes = weight.storage().map_or(0, |storage| storage.bytes(rows, columns)) as u64;
            let codes = if let Weight::Fp8(weight) = weight { weight.code_bytes() } else { bytes };
            segments.push(Segment { source, first: 0, bytes: codes });
            scales.push(Segment { source, first: codes, bytes: bytes - codes });
        }
        segments.extend(scales.into_iter().filter(|segment| segment.bytes > 0));
        segments
    }

    /// Fills `destination` with bytes of the matrix in the storage of its sources.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        let (mut offset, mut rest) = (byte_offset, destination);
        for Segment { source, first, bytes } in self.segments() {
            let length = bytes.saturating_sub(offset).min(rest.len() as u64) as usize;
            let (part, behind) = rest.split_at_mut(length);
            if !part.is_empty() {
                self.sources[source].weight.read_stored(first + offset, part)?;
            }
            (offset, rest) = (offset.saturating_sub(bytes), behind);
        }
        Ok(())
    }

    /// Fills `target` with rows as f32. `held` keeps a matrix whose rows cannot be read one by one between calls.
    pub fn read_rows(
        &self,
        first: usize,
        target: &mut [f32],
        held: &mut HeldMatrix,
    ) -> Result<(), WeightError> {
        let columns = self.columns();
        let rows = target.len().checked_div(columns).unwrap_or(0);
        if let (Some(storage), None) = (self.storage().filter(|_| self.has_own_rows()), self.turned) {
            let row_bytes = storage.bytes(1, columns);
            let mut bytes = vec![0; rows * row_bytes];
            self.read_stored((first * row_bytes) as u64, &mut bytes)?;
            quant::decode(storage, rows, columns, &bytes, 0, target);
            return Ok(());
        }
        for (row, target) in (first..first + rows).zip(target.chunks_exact_mut(columns)) {
            let Some(turned) = self.turned else {
                let (number, row) = (row / self.source_rows(), row % self.source_rows());
                held.load_source(&self.sources[number].weight, number)?;
                target.copy_from_slice(&held.numbers[row * columns..][..columns]);
                continue;
            };
            held.load_expert(&self.sources[0].weight, row / turned.rows, turned)?;
            let column = turned.column(row % turned.rows);
            let stored = held.numbers[column..].iter().step_by(turned.rows);
            target.iter_mut().zip(stored).for_each(|(number, stored)| *number = *stored);
        }
        Ok(())
    }
}

/// A matrix of one expert as f32, as it is in the file.
#[derive(Debug, Default)]
pub struct HeldMatrix {
    number: Option<usize>,
    numbers: Vec<f32>,
}

impl HeldMatrix {
    fn load_source(&mut self, source: &Weight, number: usize) -> Result<(), WeightError> {
        if self.number == Some(number) {
            return Ok(());
        }
        let (rows, columns) = source.rows_and_columns();
        self.numbers.resize(rows * columns, 0.0);
        WeightRows::open(source)?.read(0, rows, &mut self.numbers)?;
        self.number = Some(number);
        Ok(())
    }

    fn load_expert(&mut self, source: &Weight, expert: usize, turned: Turned) -> Result<(), WeightError> {
        if self.number == Some(expert) {
            return Ok(());
        }
        let count = turned.rows * turned.columns;
        let storage = source.storage().unwrap_or(Storage::F32);
        let mut bytes = vec![0; storage.bytes(1, count)];
        source.read_stored((expert * bytes.len()) as u64, &mut bytes)?;
        self.numbers.resize(count, 0.0);
        quant::decode(storage, 1, count, &bytes, 0, &mut self.numbers);
        self.number = Some(expert);
        Ok(())
    }
}
