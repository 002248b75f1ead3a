//! A matrix whose rows come from several tensors, or from one that holds it transposed: the experts of a layer, or the parts
//! of a convolution.
//!
//! It is read like any weight: as stored, if all tensors are stored in the same format with rows of their own, or as f32.
//! Left out: which tensors belong together (`experts.rs`).

use super::{Weight, WeightError, WeightRows};
use crate::content_hash::ContentHash;
use smidgen_ir::{Storage, quant};
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct JoinedWeight {
    sources: Vec<Weight>,
    /// Rows of the sources in the order of the matrix.
    blocks: Vec<RowsOf>,
    shape: Vec<usize>,
    turned: Option<Turned>,
}

/// Some rows of a source.
#[derive(Clone, Copy, Debug)]
pub struct RowsOf {
    pub source: usize,
    pub first: usize,
    pub rows: usize,
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

impl JoinedWeight {
    /// # Panics
    /// If the blocks have not the rows of the shape.
    pub fn new(
        sources: Vec<Weight>,
        blocks: Vec<RowsOf>,
        shape: Vec<usize>,
        turned: Option<Turned>,
    ) -> JoinedWeight {
        let rows: usize = blocks.iter().map(|block| block.rows).sum();
        assert_eq!(rows, shape[0], "rows of blocks and of the matrix");
        JoinedWeight { sources, blocks, shape, turned }
    }

    /// Whole matrices one after the other; `None` if their columns differ.
    pub fn of_whole(sources: Vec<Weight>) -> Option<JoinedWeight> {
        let columns = match sources.first()?.shape() {
            [_, columns @ ..] if !columns.is_empty() => columns.to_vec(),
            _ => return None,
        };
        let mut blocks = Vec::with_capacity(sources.len());
        for (source, weight) in sources.iter().enumerate() {
            match weight.shape() {
                [rows, others @ ..] if *others == columns => {
                    blocks.push(RowsOf { source, first: 0, rows: *rows })
                }
                _ => return None,
            }
        }
        let rows = blocks.iter().map(|block| block.rows).sum();
        Some(JoinedWeight::new(sources, blocks, [vec![rows], columns].concat(), None))
    }

    pub fn sources(&self) -> &[Weight] {
        &self.sources
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn columns(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// The name and the shape under which transformers reads the matrix as one tensor.
    pub fn as_fused(&self) -> (String, Vec<usize>) {
        let first = match &self.sources[0] {
            Weight::Plain(tensor) => tensor,
            _ => unreachable!("folders hold experts as plain tensors"),
        };
        if self.sources.len() == 1 {
            return (first.name().to_string(), first.shape().to_vec());
        }
        // A tensor for each expert, and for each of gate and up; or the parts of a convolution.
        let Some((module, rest)) = first.name().split_once(".experts.") else {
            return (first.name().replace(".q_conv1d.", ".conv1d."), self.shape.clone());
        };
        let is_down = rest.ends_with("down_proj.weight") || rest.ends_with("w2.weight");
        let experts = if is_down { self.sources.len() } else { self.sources.len() / 2 };
        let name = if is_down { "down_proj" } else { "gate_up_proj" };
        let module = module.replace(".block_sparse_moe", ".mlp");
        (format!("{module}.experts.{name}"), vec![experts, self.shape[0] / experts, self.columns()])
    }

    /// The storage that all sources share, if its rows stand by themselves.
    pub fn storage(&self) -> Option<Storage> {
        let storage = self.sources.first()?.storage()?;
        let has_own_rows = matches!(storage, Storage::Plain(_) | Storage::Gguf(_));
        let is_shared = self.sources.iter().all(|source| source.storage() == Some(storage));
        (has_own_rows && is_shared).then_some(storage)
    }

    /// Whether bytes can be read without computing them.
    pub fn is_read_as_stored(&self) -> bool {
        self.turned.is_none()
    }

    /// Bytes in memory while rows are read: an expert as stored and as f32, if its matrix is stored transposed.
    pub fn held_bytes(&self) -> usize {
        self.turned.map_or(0, |turned| 8 * turned.rows * turned.columns)
    }

    pub fn file_bytes(&self) -> u64 {
        self.sources.iter().map(Weight::file_bytes).sum()
    }

    /// The same matrix, which adds every byte that is read to `hash`.
    pub fn hashed(mut self, hash: &Arc<ContentHash>, begin: u64) -> JoinedWeight {
        let mut begin = begin;
        for source in &mut self.sources {
            let bytes = source.file_bytes();
            *source = source.clone().hashed_from(hash, begin);
            begin += bytes;
        }
        self
    }

    /// Fills `destination` with the bytes of the files, source after source.
    pub fn read_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        let (mut offset, mut rest) = (byte_offset, destination);
        for source in &self.sources {
            let bytes = source.file_bytes();
            let length = bytes.saturating_sub(offset).min(rest.len() as u64) as usize;
            let (part, behind) = rest.split_at_mut(length);
            if !part.is_empty() {
                source.read_file(offset, part)?;
            }
            (offset, rest) = (offset.saturating_sub(bytes), behind);
        }
        Ok(())
    }

    /// Fills `destination` with bytes of the matrix in the storage of its sources.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), WeightError> {
        let row_bytes = self.row_bytes();
        let (mut offset, mut rest) = (byte_offset, destination);
        for block in &self.blocks {
            let bytes = (block.rows * row_bytes) as u64;
            let length = bytes.saturating_sub(offset).min(rest.len() as u64) as usize;
            let (part, behind) = rest.split_at_mut(length);
            if !part.is_empty() {
                self.sources[block.source].read_stored((block.first * row_bytes) as u64 + offset, part)?;
            }
            (offset, rest) = (offset.saturating_sub(bytes), behind);
        }
        Ok(())
    }

    fn row_bytes(&self) -> usize {
        self.storage().map_or(0, |storage| storage.bytes(1, self.columns()))
    }

    /// Fills `target` with rows as f32. `held` keeps a transposed matrix between calls.
    pub fn read_rows(
        &self,
        first: usize,
        target: &mut [f32],
        held: &mut HeldExpert,
    ) -> Result<(), WeightError> {
        let columns = self.columns();
        let rows = target.len().checked_div(columns).unwrap_or(0);
        if let Some(turned) = self.turned {
            for (row, target) in (first..first + rows).zip(target.chunks_exact_mut(columns)) {
                let expert = row / turned.rows;
                held.load(&self.sources[0], expert, turned)?;
                let column = turned.column(row % turned.rows);
                for (number, stored) in
                    target.iter_mut().zip(held.numbers[column..].iter().step_by(turned.rows))
                {
                    *number = *stored;
                }
            }
            return Ok(());
        }
        if let Some(storage) = self.storage() {
            let row_bytes = self.row_bytes();
            let mut bytes = vec![0; rows * row_bytes];
            self.read_stored((first * row_bytes) as u64, &mut bytes)?;
            quant::decode(storage, rows, columns, &bytes, 0, target);
            return Ok(());
        }
        let (mut before, mut rest) = (0, target);
        for block in &self.blocks {
            let from = first.max(before);
            let until = (before + block.rows).min(first + rows);
            if from < until {
                let (part, behind) = rest.split_at_mut((until - from) * columns);
                let source = &self.sources[block.source];
                WeightRows::open(source)?.read(block.first + from - before, until - from, part)?;
                rest = behind;
            }
            before += block.rows;
        }
        Ok(())
    }
}

/// The stored matrix of one expert as f32, (columns, rows).
#[derive(Debug, Default)]
pub struct HeldExpert {
    expert: Option<usize>,
    numbers: Vec<f32>,
}

impl HeldExpert {
    fn load(&mut self, source: &Weight, expert: usize, turned: Turned) -> Result<(), WeightError> {
        if self.expert == Some(expert) {
            return Ok(());
        }
        let count = turned.rows * turned.columns;
        let storage = source.storage().unwrap_or(Storage::F32);
        let mut bytes = vec![0; storage.bytes(1, count)];
        source.read_stored((expert * bytes.len()) as u64, &mut bytes)?;
        self.numbers.resize(count, 0.0);
        quant::decode(storage, 1, count, &bytes, 0, &mut self.numbers);
        self.expert = Some(expert);
        Ok(())
    }
}
