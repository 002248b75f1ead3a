//! What an operation costs: arithmetic operations and bytes moved, from shapes alone.
//!
//! Bytes count each operand once, as an ideal kernel would touch it. Matrices that products multiply by are counted
//! apart: a device may have to decode them, or lay them out anew, for every product. A device profile turns all of it
//! into seconds; here there are no seconds.

use crate::op::{AttentionShape, Op};
use crate::shape::{Extent, Type};
use crate::storage::{DType, Storage};
use std::iter::StepBy;
use std::ops::Range;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
    /// Of these: products with a matrix that lies in bf16, which a device may form with less work.
    pub bf16_flops: f64,
    pub bytes: f64,
    /// Elements of matrices that are multiplied by, once for each time: those that lie as plain numbers, ...
    pub plain_operands: f64,
    /// ... and those that are stored in a code.
    pub coded_operands: f64,
}

impl std::ops::Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            flops: self.flops + other.flops,
            bf16_flops: self.bf16_flops + other.bf16_flops,
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

/// What the tokens of a micro-batch are like, on average over the data: a cost is predicted for the usual
/// micro-batch of a size, memory is planned for the worst.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Keys that a query sees.
    pub keys_per_query: f64,
    /// Share of the tokens that carry a loss.
    pub supervised: f64,
}

impl Workload {
    /// The usual micro-batch of so many tokens.
    pub fn extent(&self, largest: &Extent) -> Extent {
        let rows = (largest.tokens as f64 * self.supervised).ceil() as usize;
        Extent { rows: rows.min(largest.rows), ..*largest }
    }
}

/// Cost of one node at an extent.
pub fn node_cost(
    op: &Op,
    inputs: &[&Type],
    outputs: &[&Type],
    updates: &[&Type],
    extent: &Extent,
    keys_per_query: f64,
) -> Cost {
    let moved: usize = inputs.iter().chain(outputs).map(|ty| ty.bytes(extent)).sum::<usize>()
        + updates.iter().map(|ty| 2 * ty.bytes(extent)).sum::<usize>();
    let size = |ty: &Type| ty.elements(extent) as f64;
    let columns = |ty: &Type| ty.shape.at(extent).1 as f64;
    let flops = match op {
        Op::Linear { lora, .. } => {
            let adapter = if lora.is_some() { columns(inputs[inputs.len() - 1]) } else { 0.0 };
            2.0 * size(outputs[0]) * (columns(inputs[0]) + adapter)
        }
        Op::LinearGrad { .. } => inputs.chunks(2).map(|term| 2.0 * size(term[0]) * columns(outputs[0])).sum(),
        Op::WeightGrad { .. } => 2.0 * size(inputs[0]) * columns(inputs[1]),
        Op::LmHeadLoss(head) => {
            let vocabulary = inputs[1].shape.at(extent).0 as f64;
            let adapter = if head.lora.is_some() { columns(inputs[4]) } else { 0.0 };
            let passes = 1.0 + f64::from(u8::from(head.gradient)) + f64::from(u8::from(head.train_head));
            2.0 * passes * vocabulary * (size(inputs[0]) + adapter * inputs[0].shape.at(extent).0 as f64)
        }
        // Two products forward; backward forms the scores again and four gradients.
        Op::Attention(shape) | Op::CachedAttention(shape) => {
            4.0 * size(inputs[0]) * visible(shape, keys_per_query)
        }
        Op::AttentionGrad(shape) => 10.0 * size(inputs[0]) * visible(shape, keys_per_query),
        Op::HeadSums(_) => 2.0 * size(inputs[0]) * inputs[1].shape.at(extent).0 as f64,
        Op::HeadGrad { .. } => 4.0 * size(inputs[0]) * inputs[1].shape.at(extent).0 as f64,
        Op::Logits { lora, .. } => {
            let adapter = if lora.is_some() { columns(inputs[2]) } else { 0.0 };
            2.0 * logits(inputs, extent) as f64 * (columns(inputs[0]) + adapter)
        }
        Op::Fourier { .. } => 2.0 * size(outputs[0]) * columns(inputs[1]),
        Op::FourierGrad { .. } => 2.0 * size(outputs[0]) * columns(inputs[0]),
        Op::RowNorms { .. } => 2.0 * size(inputs[0]) * columns(inputs[2]),
        Op::Embed { .. }
        | Op::RmsNorm(_)
        | Op::Dropout { .. }
        | Op::ScaleColumns { .. }
        | Op::RopeTable(_)
        | Op::Rope { .. }
        | Op::GatedAct(_)
        | Op::Add
        | Op::GatherRows
        | Op::HeadLoss { .. }
        | Op::ScatterRows
        | Op::CacheRows
        | Op::RmsNormGrad { .. }
        | Op::RmsNormWeightGrad { .. }
        | Op::BiasGrad
        | Op::MagnitudeGrad
        | Op::GatedActGrad(_)
        | Op::EmbedGrad { .. }
        | Op::FourierReg { .. }
        | Op::Round { .. }
        | Op::GradNorm { .. }
        | Op::AdamW(_)
        | Op::AdamW8(_)
        | Op::Zero
        | Op::Fetch
        | Op::Stow
        | Op::Stowed => 0.0,
    };
    let bytes = match op {
        // Only the rows of the new tokens are written, not the whole caches.
        Op::CacheRows => 2 * (inputs[0].bytes(extent) + inputs[1].bytes(extent)),
        // Only the rows that are looked up are read, not the whole table.
        Op::Embed { .. } => 2 * outputs[0].bytes(extent),
        Op::EmbedGrad { .. } => 3 * inputs[1].bytes(extent),
        // What passes between the spaces, once.
        Op::Fetch | Op::Stow => inputs[0].bytes(extent),
        Op::Stowed => 0,
        // The columns of its own words.
        Op::Logits { .. } => {
            inputs.iter().map(|ty| ty.bytes(extent)).sum::<usize>() + 8 * logits(inputs, extent)
        }
        Op::RmsNorm(_)
        | Op::Dropout { .. }
        | Op::Linear { .. }
        | Op::ScaleColumns { .. }
        | Op::Fourier { .. }
        | Op::RopeTable(_)
        | Op::Rope { .. }
        | Op::Attention(_)
        | Op::GatedAct(_)
        | Op::Add
        | Op::GatherRows
        | Op::LmHeadLoss(_)
        | Op::HeadSums(_)
        | Op::HeadLoss { .. }
        | Op::HeadGrad { .. }
        | Op::ScatterRows
        | Op::CachedAttention(_)
        | Op::RmsNormGrad { .. }
        | Op::RmsNormWeightGrad { .. }
        | Op::LinearGrad { .. }
        | Op::WeightGrad { .. }
        | Op::BiasGrad
        | Op::MagnitudeGrad
        | Op::FourierGrad { .. }
        | Op::AttentionGrad(_)
        | Op::GatedActGrad(_)
        | Op::FourierReg { .. }
        | Op::RowNorms { .. }
        | Op::Round { .. }
        | Op::GradNorm { .. }
        | Op::AdamW(_)
        | Op::AdamW8(_)
        | Op::Zero => moved,
    };
    let mut cost = Cost { flops, bytes: bytes as f64, ..Cost::default() };
    let Multiplied { matrices, times, passes } = multiplied(op, inputs, extent);
    for matrix in matrices.filter_map(|input| inputs.get(input)) {
        // It is read again each time.
        cost.bytes += (times - 1.0).max(0.0) * matrix.bytes(extent) as f64;
        match matrix.storage.plain() {
            Some(_) => cost.plain_operands += times * size(matrix),
            None => cost.coded_operands += times * size(matrix),
        }
        if matrix.storage == Storage::Plain(DType::Bf16) {
            cost.bf16_flops += 2.0 * passes * inputs[0].shape.at(extent).0 as f64 * size(matrix);
        }
    }
    cost
}

/// Matrices that an operation multiplies by.
struct Multiplied {
    /// Which inputs they are.
    matrices: StepBy<Range<usize>>,
    /// How often each is taken, for some or all rows, ...
    times: f64,
    /// ... and how often all rows of the first input are multiplied by it.
    passes: f64,
}

fn multiplied(op: &Op, inputs: &[&Type], extent: &Extent) -> Multiplied {
    let (matrices, chunks, passes) = match op {
        Op::Linear { .. } | Op::Logits { .. } => (1..2, 1.0, 1.0),
        Op::LinearGrad { .. } => (1..inputs.len(), 1.0, 1.0),
        Op::LmHeadLoss(head) => {
            (1..2, chunks(inputs[0], head.chunk, extent), 1.0 + f64::from(u8::from(head.gradient)))
        }
        Op::HeadSums(piece) => (1..2, chunks(inputs[0], piece.chunk, extent), 1.0),
        Op::HeadGrad { piece, .. } => (1..2, chunks(inputs[0], piece.chunk, extent), 2.0),
        // It is read as the products of others are, and added to one.
        Op::RowNorms { .. } => return Multiplied { matrices: (0..1).step_by(2), times: 1.0, passes: 0.0 },
        Op::WeightGrad { .. }
        | Op::Attention(_)
        | Op::CachedAttention(_)
        | Op::AttentionGrad(_)
        | Op::Fourier { .. }
        | Op::FourierGrad { .. }
        | Op::Embed { .. }
        | Op::RmsNorm(_)
        | Op::Dropout { .. }
        | Op::ScaleColumns { .. }
        | Op::RopeTable(_)
        | Op::Rope { .. }
        | Op::GatedAct(_)
        | Op::Add
        | Op::GatherRows
        | Op::HeadLoss { .. }
        | Op::ScatterRows
        | Op::CacheRows
        | Op::RmsNormGrad { .. }
        | Op::RmsNormWeightGrad { .. }
        | Op::BiasGrad
        | Op::MagnitudeGrad
        | Op::GatedActGrad(_)
        | Op::EmbedGrad { .. }
        | Op::FourierReg { .. }
        | Op::Round { .. }
        | Op::GradNorm { .. }
        | Op::AdamW(_)
        | Op::AdamW8(_)
        | Op::Zero
        | Op::Fetch
        | Op::Stow
        | Op::Stowed => (0..0, 0.0, 0.0),
    };
    // Those of a sum of products are every other one.
    Multiplied { matrices: matrices.step_by(2), times: passes * chunks, passes }
}

/// Logits that a product of x with rows of the head gives.
fn logits(inputs: &[&Type], extent: &Extent) -> usize {
    inputs[0].shape.at(extent).0 * inputs[1].shape.at(extent).0
}

/// Times that the head is multiplied by for one product over all rows of x.
fn chunks(x: &Type, chunk: usize, extent: &Extent) -> f64 {
    x.shape.at(extent).0.div_ceil(chunk.max(1)) as f64
}

/// Keys that a query sees, where a window may hide some.
fn visible(shape: &AttentionShape, keys_per_query: f64) -> f64 {
    shape.window.map_or(keys_per_query, |window| keys_per_query.min(window as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::LossHead;
    use crate::shape::{Dim, Shape};

    const EXTENT: Extent = Extent { tokens: 10, rows: 7, segments: 1 };
    const BF16: Storage = Storage::Plain(DType::Bf16);

    fn matrix(rows: Dim, columns: usize, storage: Storage) -> Type {
        Type::new(Shape::of(rows, columns), storage)
    }

    fn cost(op: &Op, inputs: &[Type], output: &Type) -> Cost {
        let inputs: Vec<&Type> = inputs.iter().collect();
        node_cost(op, &inputs, &[output], &[], &EXTENT, 1.0)
    }

    /// An adapter beside a weight is no matrix of bf16; it is the weight's numbers that count.
    #[test]
    fn products_with_matrices_of_bf16_are_told_apart() {
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

    /// In chunks of rows the head is taken more often, for the same arithmetic.
    #[test]
    fn the_head_is_taken_for_every_chunk_and_pass() {
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
