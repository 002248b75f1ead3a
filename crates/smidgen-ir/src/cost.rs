//! What an operation costs: arithmetic and bytes moved, from shapes alone.
//!
//! [`Operands`] offers the formulas that rows of the op table are written in. Bytes count each operand once, as an ideal
//! kernel would touch it. Weight matrices are also counted in elements, because a device may have to decode or repack
//! them for every matmul. A device profile turns a [`Cost`] into seconds; nothing here knows a device.

use crate::expert_attributes::ExpertRows;
use crate::rank::Rank;
use crate::recurrence::ScanShape;
use crate::shape::{Extent, Type};
use crate::storage::{DType, Storage};

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
    /// The part of `flops` that multiplies by a bf16 matrix, which some devices do faster.
    pub bf16_flops: f64,
    /// The part that multiplies by a matrix stored in fp8.
    pub fp8_flops: f64,
    pub bytes: f64,
    /// Elements of weight matrices that are stored as plain numbers, counted once per use.
    pub plain_operands: f64,
    /// Elements of weight matrices that are stored in a quantized format, counted once per use.
    pub coded_operands: f64,
}

impl Cost {
    /// Only bytes, no arithmetic.
    pub fn moving(bytes: usize) -> Cost {
        Cost { bytes: bytes as f64, ..Cost::default() }
    }

    fn of_flops(flops: f64) -> Cost {
        Cost { flops, ..Cost::default() }
    }
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            flops: self.flops + other.flops,
            bf16_flops: self.bf16_flops + other.bf16_flops,
            fp8_flops: self.fp8_flops + other.fp8_flops,
            bytes: self.bytes + other.bytes,
            plain_operands: self.plain_operands + other.plain_operands,
            coded_operands: self.coded_operands + other.coded_operands,
        }
    }
}

impl std::iter::Sum for Cost {
    fn sum<I: Iterator<Item = Cost>>(costs: I) -> Cost {
        costs.fold(Cost::default(), |sum, cost| sum + cost)
    }
}

/// Averages over the data. Time is predicted for a typical micro-batch; memory is planned for the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Keys that a query sees.
    pub keys_per_query: f64,
    /// Share of the tokens that carry a loss.
    pub supervised: f64,
}

impl Workload {
    /// A typical micro-batch with as many tokens as `largest`.
    pub fn extent(&self, largest: &Extent) -> Extent {
        let rows = (largest.tokens as f64 * self.supervised).ceil() as usize;
        Extent { rows: rows.min(largest.rows), ..*largest }
    }
}

/// The operands of one node at an extent, and the formulas that costs are made of.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    pub inputs: &'a [&'a Type],
    pub outputs: &'a [&'a Type],
    pub updates: &'a [&'a Type],
    pub extent: &'a Extent,
    pub keys_per_query: f64,
}

impl Operands<'_> {
    /// Applies the formula of a row; the signature lets rows leave out the type of `step`.
    pub(crate) fn price(&self, formula: impl FnOnce(&Self) -> Cost) -> Cost {
        formula(self)
    }

    pub fn rows(&self, input: usize) -> usize {
        self.inputs[input].shape.at(self.extent).0
    }

    pub fn input_bytes(&self, input: usize) -> usize {
        self.inputs[input].bytes(self.extent)
    }

    pub fn output_bytes(&self, output: usize) -> usize {
        self.outputs[output].bytes(self.extent)
    }

    pub fn inputs_bytes(&self) -> usize {
        self.sum_bytes(self.inputs)
    }

    pub fn outputs_bytes(&self) -> usize {
        self.sum_bytes(self.outputs)
    }

    pub fn updates_bytes(&self) -> usize {
        self.sum_bytes(self.updates)
    }

    fn sum_bytes(&self, types: &[&Type]) -> usize {
        types.iter().map(|ty| ty.bytes(self.extent)).sum()
    }

    fn elements(&self, input: usize) -> f64 {
        self.inputs[input].elements(self.extent) as f64
    }

    /// Every input is read and every output written once; updates are read and written.
    pub fn traffic(&self) -> Cost {
        Cost::moving(self.inputs_bytes() + self.sum_bytes(self.outputs) + 2 * self.updates_bytes())
    }

    /// All rows of input 0 times a weight matrix.
    pub fn matmul(&self, matrix: usize) -> Cost {
        self.repeated_matmul(matrix, 1.0, 1.0)
    }

    /// `passes` such matmuls, each in chunks of rows: the matrix is read again for every chunk.
    pub fn chunked_matmul(&self, matrix: usize, chunk: usize, passes: usize) -> Cost {
        let chunks = self.rows(0).div_ceil(chunk.max(1));
        self.repeated_matmul(matrix, (passes * chunks) as f64, passes as f64)
    }

    fn repeated_matmul(&self, matrix: usize, reads: f64, passes: f64) -> Cost {
        let flops = 2.0 * passes * self.rows(0) as f64 * self.elements(matrix);
        let part = |storage| if self.inputs[matrix].storage == storage { flops } else { 0.0 };
        let (bf16_flops, fp8_flops) = (part(Storage::Plain(DType::Bf16)), part(Storage::Fp8Rows));
        // The traffic counts the first read.
        let bytes = (reads - 1.0).max(0.0) * self.input_bytes(matrix) as f64;
        Cost { flops, bf16_flops, fp8_flops, bytes, ..self.repeated_decoding(matrix, reads) }
    }

    /// Reading a weight matrix as a matmul does, without the arithmetic.
    pub fn decoding(&self, matrix: usize) -> Cost {
        self.repeated_decoding(matrix, 1.0)
    }

    fn repeated_decoding(&self, matrix: usize, reads: f64) -> Cost {
        let elements = reads * self.elements(matrix);
        match self.inputs[matrix].storage.plain() {
            Some(_) => Cost { plain_operands: elements, ..Cost::default() },
            None => Cost { coded_operands: elements, ..Cost::default() },
        }
    }

    /// Only the arithmetic of all rows of input 0 times a matrix. For adapters, whose matrices are small and plain.
    pub fn matmul_flops(&self, matrix: Option<usize>) -> Cost {
        let flops = |matrix| 2.0 * self.rows(0) as f64 * self.elements(matrix);
        Cost::of_flops(matrix.map_or(0.0, flops))
    }

    /// Matmuls of sorted rows with the matrices of their experts, as (rows, matrix, the rows of each expert's matrix). All
    /// experts are read once, since a step rarely leaves one out, and each row is multiplied by one of them.
    pub fn grouped_matmuls(&self, terms: impl Iterator<Item = (usize, usize, ExpertRows)>) -> Cost {
        let mut cost = self.traffic();
        for (rows, matrix, part) in terms {
            let (all, columns) = self.inputs[matrix].shape.at(self.extent);
            let share = (part.experts * part.rows) as f64 / all as f64;
            let flops = 2.0 * self.rows(rows) as f64 * (part.rows * columns) as f64;
            let elements = share * self.elements(matrix);
            let storage = self.inputs[matrix].storage;
            cost.bytes -= (1.0 - share) * self.input_bytes(matrix) as f64;
            cost.flops += flops;
            match storage.plain() {
                Some(dtype) => {
                    cost.plain_operands += elements;
                    cost.bf16_flops += if dtype == DType::Bf16 { flops } else { 0.0 };
                }
                None => cost.coded_operands += elements,
            }
        }
        cost
    }

    /// The arithmetic of leftᵀ·right, summed over rows.
    pub fn outer_product(&self, left: usize, right: usize) -> Cost {
        let columns = self.inputs[right].shape.at(self.extent).1;
        Cost::of_flops(2.0 * self.elements(left) * columns as f64)
    }

    /// The arithmetic of `products` products of each head's state with a row, for every token.
    pub fn scan(&self, shape: &ScanShape, products: usize) -> Cost {
        let state = (shape.heads * shape.state()) as f64;
        Cost::of_flops(2.0 * products as f64 * self.rows(0) as f64 * state)
    }

    /// The arithmetic of `matmuls` matmuls between queries (input 0) and the keys that they see.
    pub fn attention(&self, matmuls: usize, window: Option<usize>) -> Cost {
        let keys = window.map_or(self.keys_per_query, |window| self.keys_per_query.min(window as f64));
        Cost::of_flops(2.0 * matmuls as f64 * self.elements(0) * keys)
    }
}

/// Bytes that a rank receives when it gathers a value of which every rank has an equal part.
pub(crate) fn others_share(rank: Rank, bytes: usize) -> usize {
    bytes / rank.of * (rank.of - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loss_head::LossHead;
    use crate::op::Op;
    use crate::shape::{Dim, Shape};

    const EXTENT: Extent = Extent { tokens: 10, rows: 7, segments: 1, audio: 0 };
    const BF16: Storage = Storage::Plain(DType::Bf16);

    fn matrix(rows: Dim, columns: usize, storage: Storage) -> Type {
        Type::new(Shape::of(rows, columns), storage)
    }

    fn cost(op: &Op, inputs: &[Type], output: &Type) -> Cost {
        let inputs: Vec<&Type> = inputs.iter().collect();
        let outputs = [output];
        op.cost(&Operands {
            inputs: &inputs,
            outputs: &outputs,
            updates: &[],
            extent: &EXTENT,
            keys_per_query: 1.0,
        })
    }

    /// The storage of the weight decides which rate applies, not that of the adapter.
    #[test]
    fn matmuls_with_bf16_weights_are_counted_separately() {
        let (x, y) = (matrix(Dim::Tokens, 6, Storage::F32), matrix(Dim::Tokens, 4, Storage::F32));
        let [a, b] =
            [(Dim::Tokens, 2), (Dim::Const(4), 2)].map(|(rows, columns)| matrix(rows, columns, Storage::F32));
        let weight = |storage| matrix(Dim::Const(4), 6, storage);
        let linear = Op::Linear { bias: false, lora: Some(1.0) };
        let of = |storage| cost(&linear, &[x.clone(), weight(storage), a.clone(), b.clone()], &y);
        let (base, adapter) = (2.0 * 10.0 * 4.0 * 6.0, 2.0 * 10.0 * 4.0 * 2.0);
        assert_eq!((of(BF16).flops, of(BF16).bf16_flops), (base + adapter, base));
        assert_eq!(of(BF16).plain_operands, 24.0);
        for storage in [Storage::F32, Storage::Int8Rows] {
            assert_eq!((of(storage).flops, of(storage).bf16_flops), (base + adapter, 0.0));
        }
        let gradient = Op::LinearGrad { scales: vec![1.0, 1.0] };
        let d = matrix(Dim::Tokens, 2, Storage::F32);
        let terms = [y.clone(), weight(BF16), d, matrix(Dim::Const(2), 6, Storage::F32)];
        assert_eq!(cost(&gradient, &terms, &x).bf16_flops, base);
    }

    /// In chunks of rows the head is read more often, with the same arithmetic.
    #[test]
    fn the_head_is_read_for_every_chunk_and_pass() {
        let x = matrix(Dim::Rows, 6, Storage::F32);
        for (gradient, train_head) in [(false, false), (true, false), (true, true)] {
            let head =
                LossHead { chunk: 3, gradient, lora: None, train_head, softcap: None, row_losses: false };
            let found = cost(&Op::LmHeadLoss(head), &[x.clone(), matrix(Dim::Const(50), 6, BF16)], &x);
            let passes = 1.0 + f64::from(u8::from(gradient));
            let one = 2.0 * 7.0 * 50.0 * 6.0;
            assert_eq!(found.bf16_flops, passes * one);
            assert_eq!(found.flops, (passes + f64::from(u8::from(train_head))) * one);
            assert_eq!(found.plain_operands, passes * 3.0 * 300.0);
        }
    }
}
