//! Scratch memory that the CPU device is given for one step: a property of the operation and the target.
//!
//! The planner reserves it and the device uses it, so the sizes live here, where both can see them; the
//! device refuses a plan that gives it less. All counts are in f32 unless the name or its comment says otherwise.

use crate::op::Op;
use crate::plan::Precision;

/// Depth of a packed block of a product's right operand.
pub const DEPTH_BLOCK: usize = 640;
/// Columns of a packed block.
pub const COLUMN_BLOCK: usize = 384;
/// Rows of the left operand that one thread may copy.
pub const ROW_BLOCK: usize = 64;
/// Depth of a packed block of a bf16 product.
pub const BF16_DEPTH: usize = 896;
/// Elements of bf16 of a packed block of its left operand, ...
pub const BF16_LEFT: usize = BF16_DEPTH * 512;
/// ... and of its right operand.
pub const BF16_RIGHT: usize = BF16_DEPTH * 768;
/// Depth of a packed block of a product of f32 that is formed of numbers of bf16, ...
pub const SPLIT_DEPTH: usize = 320;
/// ... rows of its left operand, and columns of the right one that a thread packs for itself.
pub const SPLIT_ROWS: usize = 512;
pub const SPLIT_COLUMNS: usize = 64;
/// Numbers of bf16 that together are one of f32.
pub const SPLIT_PLANES: usize = 3;
/// Queries and keys of one tile of attention.
pub const QUERY_BLOCK: usize = 128;
pub const KEY_BLOCK: usize = 192;
/// Rows of LS-LoRA's argument that exist at the same time in the forward pass.
pub const FOURIER_ROWS: usize = 128;
/// Parts of a workspace begin at multiples of this.
pub const LINE_FLOATS: usize = 16;
/// Elements that one partial sum of squares covers.
pub const SQUARES_CHUNK: usize = 16_384;

pub const fn aligned_floats(floats: usize) -> usize {
    floats.next_multiple_of(LINE_FLOATS)
}

/// Floats between two rows of logits: not a multiple of 4 KiB, or the rows of a product's left operand would
/// compete for the same places of the caches.
pub const fn logit_stride(vocabulary: usize) -> usize {
    let stride = aligned_floats(vocabulary);
    if stride.is_multiple_of(1024) { stride + LINE_FLOATS } else { stride }
}

/// Scratch of a product of any shape in f32, whatever forms it.
pub const fn product_floats(threads: usize) -> usize {
    LINE_FLOATS + DEPTH_BLOCK * COLUMN_BLOCK + threads * ROW_BLOCK * DEPTH_BLOCK
}

// The blocks of either way fit into the same floats, on any number of threads.
const _: () = assert!(
    SPLIT_PLANES * SPLIT_DEPTH * SPLIT_ROWS / 2 <= DEPTH_BLOCK * COLUMN_BLOCK
        && SPLIT_PLANES * SPLIT_DEPTH * SPLIT_COLUMNS / 2 <= ROW_BLOCK * DEPTH_BLOCK
);

/// Scratch of a product of any shape whose operands are rounded to bf16, on any number of threads.
pub const fn bf16_product_floats() -> usize {
    LINE_FLOATS + (BF16_LEFT + BF16_RIGHT) / 2
}

/// Scratch of attention, forward or backward.
pub const fn attention_floats(threads: usize, group: usize, head_dim: usize) -> usize {
    LINE_FLOATS + threads * attention_thread_floats(group, head_dim)
}

/// One thread's part: six blocks of keys, values and their gradients, two of queries, two tiles of scores,
/// and a maximum and a sum for each query of a tile and each of `group` heads that share a key head.
pub const fn attention_thread_floats(group: usize, head_dim: usize) -> usize {
    (6 * KEY_BLOCK + 2 * QUERY_BLOCK) * head_dim + 2 * QUERY_BLOCK * KEY_BLOCK + 2 * group * QUERY_BLOCK
}

/// What one thread of attention takes beside that where its products are of bf16: a packed operand on either side,
/// of at most `KEY_BLOCK` rows or columns and a depth of `KEY_BLOCK` or a head.
pub const fn bf16_attention_thread_floats(head_dim: usize) -> usize {
    let depth = head_dim.next_multiple_of(32);
    KEY_BLOCK * if depth > KEY_BLOCK { depth } else { KEY_BLOCK }
}

/// Partial sums of a norm's weight gradient: one row of them for each group of at least 32 rows, at most 64.
/// The device may make fewer groups; this bound never falls as rows are added, so it serves every micro-batch.
pub const fn norm_partials_floats(rows: usize, columns: usize) -> usize {
    let groups = rows.div_ceil(32);
    columns * if groups < 64 { groups } else { 64 }
}

/// Partial sums, in f64, of the gradients of a Fourier module's parameters: five for each group of rows. Groups
/// have about `SQUARES_CHUNK` elements, and are at most 512; fewer rows never need more of them.
pub const fn fourier_partials(rows: usize, columns: usize) -> usize {
    let by_size = (rows * columns).div_ceil(SQUARES_CHUNK);
    let groups = if by_size < rows { by_size } else { rows };
    5 * if groups < 512 { groups } else { 512 }
}

/// Rows of a weight whose sum with its adapter exists at the same time, about 1 MiB of them.
pub const fn norm_block_rows(rows: usize, columns: usize) -> usize {
    let block = (1 << 18) / columns / 64 * 64;
    let block = if block < 64 { 64 } else { block };
    if block < rows { block } else { rows }
}

/// Bytes of scratch for one step on the CPU with `threads` threads; 0 = none. `inputs` are rows and columns
/// of the operands at the planned extent.
pub fn workspace_bytes(op: &Op, inputs: &[(usize, usize)], precision: Precision, threads: usize) -> usize {
    let product = match precision {
        Precision::F32 => product_floats(threads),
        // No processor of this device multiplies f16; it refuses such a plan.
        Precision::Bf16 | Precision::F16 => bf16_product_floats(),
    };
    let floats = match op {
        Op::Linear { bias, .. } => {
            let bias = if *bias { inputs[2].0 } else { 0 };
            aligned_floats(bias) + product
        }
        Op::LinearGrad { .. } | Op::WeightGrad { .. } => product,
        Op::LmHeadLoss(head) => {
            let (vocabulary, _) = inputs[1];
            head.chunk * logit_stride(vocabulary) + aligned_floats(head.chunk) + product
        }
        Op::HeadSums(piece) | Op::HeadGrad { piece, .. } => piece.chunk * logit_stride(inputs[1].0) + product,
        Op::RmsNormWeightGrad { .. } => norm_partials_floats(inputs[0].0, inputs[0].1),
        Op::GradNorm { .. } => {
            let largest = inputs[2..].iter().map(|(rows, columns)| rows * columns).max().unwrap_or(0);
            2 * largest.div_ceil(SQUARES_CHUNK)
        }
        Op::Attention(shape) | Op::AttentionGrad(shape) => {
            let tiles = match precision {
                Precision::F32 => 0,
                Precision::Bf16 | Precision::F16 => threads * bf16_attention_thread_floats(shape.head_dim),
            };
            tiles + attention_floats(threads, shape.heads / shape.kv_heads, shape.head_dim)
        }
        Op::CachedAttention(shape) => attention_floats(threads, shape.heads / shape.kv_heads, shape.head_dim),
        Op::Logits { .. } => product,
        Op::ScaleColumns { bias: true } => inputs[3].0,
        Op::Fourier { .. } => {
            let (rows, n) = inputs[0];
            aligned_floats(FOURIER_ROWS.min(rows) * n) + product
        }
        Op::FourierGrad { .. } => {
            let (rows, n) = inputs[4];
            aligned_floats(2 * fourier_partials(rows, n)) + product
        }
        Op::RowNorms { .. } => {
            let (n, k) = inputs[0];
            aligned_floats(norm_block_rows(n, k) * k) + product_floats(threads)
        }
        Op::Embed { .. }
        | Op::RmsNorm(_)
        | Op::ScaleColumns { bias: false }
        | Op::MagnitudeGrad
        | Op::FourierReg { .. }
        | Op::Dropout { .. }
        | Op::RopeTable(_)
        | Op::Rope { .. }
        | Op::GatedAct(_)
        | Op::Add
        | Op::GatherRows
        | Op::HeadLoss { .. }
        | Op::ScatterRows
        | Op::CacheRows
        | Op::RmsNormGrad { .. }
        | Op::BiasGrad
        | Op::GatedActGrad(_)
        | Op::EmbedGrad { .. }
        | Op::Round { .. }
        | Op::AdamW(_)
        | Op::AdamW8(_)
        | Op::Zero
        | Op::Fetch
        | Op::Stow
        | Op::Stowed => 0,
    };
    4 * floats
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A micro-batch may have fewer rows than the plan; what the plan gave must then still be enough.
    #[test]
    fn partial_sums_never_fall_as_rows_are_added() {
        for rows in 0..5000 {
            assert!(norm_partials_floats(rows, 3) <= norm_partials_floats(rows + 1, 3), "{rows} rows");
            assert!(fourier_partials(rows, 576) <= fourier_partials(rows + 1, 576), "{rows} rows");
        }
    }
}
