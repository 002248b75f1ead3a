//! What an operation costs: arithmetic operations and bytes moved, from shapes alone.
//!
//! Bytes count each operand once, as an ideal kernel would touch it. Matrices that products multiply by are counted
//! apart: a device may have to decode them, or lay them out anew, for every product. A device profile turns all of it
//! into seconds; here there are no seconds.

use crate::op::{AttentionShape, Op};
use crate::shape::{Extent, Type};
use std::iter::StepBy;
use std::ops::Range;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    pub flops: f64,
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
    let (mut plain_operands, mut coded_operands) = (0.0, 0.0);
    let mut bytes = bytes as f64;
    let (matrices, times) = multiplied(op, inputs, extent);
    for matrix in matrices.filter_map(|input| inputs.get(input)) {
        // It is read again each time.
        bytes += (times - 1.0).max(0.0) * matrix.bytes(extent) as f64;
        match matrix.storage.plain() {
            Some(_) => plain_operands += times * size(matrix),
            None => coded_operands += times * size(matrix),
        }
    }
    Cost { flops, bytes, plain_operands, coded_operands }
}

/// Which inputs are matrices that an operation multiplies by, and how often by each.
fn multiplied(op: &Op, inputs: &[&Type], extent: &Extent) -> (StepBy<Range<usize>>, f64) {
    let (inputs, times) = match op {
        Op::Linear { .. } | Op::Logits { .. } => (1..2, 1.0),
        Op::LinearGrad { .. } => (1..inputs.len(), 1.0),
        Op::LmHeadLoss(head) => {
            let passes = 1.0 + f64::from(u8::from(head.gradient));
            (1..2, passes * chunks(inputs[0], head.chunk, extent))
        }
        Op::HeadSums(piece) => (1..2, chunks(inputs[0], piece.chunk, extent)),
        Op::HeadGrad { piece, .. } => (1..2, 2.0 * chunks(inputs[0], piece.chunk, extent)),
        Op::RowNorms { .. } => (0..1, 1.0),
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
        | Op::Stowed => (0..0, 0.0),
    };
    // Those of a sum of products are every other one.
    (inputs.step_by(2), times)
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
