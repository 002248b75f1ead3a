//! Sizes of the CPU kernels' scratch memory: blocks of packed operands, tiles, partial sums.
//!
//! The kernels cut their work by the constants here, and `workspace.rs` adds the sizes up for each operation.
//! Counts are in f32 unless the name or the comment says otherwise.

use crate::op_attributes::AttentionShape;
use crate::recurrence::ScanShape;
use crate::shape::{Extent, Type};
use crate::target::Precision;

/// Depth of a packed block of a matmul's right operand.
pub const DEPTH_BLOCK: usize = 640;
/// Columns of a packed block.
pub const COLUMN_BLOCK: usize = 384;
/// Rows of the left operand that one thread may copy.
pub const ROW_BLOCK: usize = 64;
/// Depth of a packed block of a bf16 matmul.
pub const BF16_DEPTH: usize = 896;
/// bf16 elements of a packed block of the left operand of a bf16 matmul.
pub const BF16_LEFT: usize = BF16_DEPTH * 512;
/// bf16 elements of a packed block of the right operand of a bf16 matmul.
pub const BF16_RIGHT: usize = BF16_DEPTH * 768;
/// Depth of a packed block of a split matmul: an f32 matmul on a bf16 unit, which splits each number into several of bf16.
pub const SPLIT_DEPTH: usize = 320;
/// Rows of a packed block of the left operand of a split matmul.
pub const SPLIT_ROWS: usize = 512;
/// Columns of the right operand of a split matmul that each thread packs for itself.
pub const SPLIT_COLUMNS: usize = 64;
/// bf16 numbers that together represent one f32.
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

/// Floats between two rows of logits. Never a multiple of 4 KiB: rows that far apart would evict each other from the
/// caches when a matmul reads them as its left operand.
pub const fn logit_stride(vocabulary: usize) -> usize {
    let stride = aligned_floats(vocabulary);
    if stride.is_multiple_of(1024) { stride + LINE_FLOATS } else { stride }
}

/// Scratch of an f32 matmul of any shape, on any instruction set.
pub const fn matmul_floats(threads: usize) -> usize {
    LINE_FLOATS + DEPTH_BLOCK * COLUMN_BLOCK + threads * ROW_BLOCK * DEPTH_BLOCK
}

// The blocks of a split matmul fit into the scratch of an ordinary one, for any number of threads.
const _: () = assert!(
    SPLIT_PLANES * SPLIT_DEPTH * SPLIT_ROWS / 2 <= DEPTH_BLOCK * COLUMN_BLOCK
        && SPLIT_PLANES * SPLIT_DEPTH * SPLIT_COLUMNS / 2 <= ROW_BLOCK * DEPTH_BLOCK
);

/// Scratch of a matmul of any shape whose operands are rounded to bf16, for any number of threads.
pub const fn bf16_matmul_floats() -> usize {
    LINE_FLOATS + (BF16_LEFT + BF16_RIGHT) / 2
}

/// Scratch of attention, forward or backward.
pub const fn attention_floats(threads: usize, group: usize, head_dim: usize) -> usize {
    LINE_FLOATS + threads * attention_thread_floats(group, head_dim)
}

/// One thread's part: six blocks of keys, values and their gradients, two of queries, two tiles of scores, and a
/// maximum and a sum for each query of a tile and each of the `group` heads that share a key head.
pub const fn attention_thread_floats(group: usize, head_dim: usize) -> usize {
    (6 * KEY_BLOCK + 2 * QUERY_BLOCK) * head_dim + 2 * QUERY_BLOCK * KEY_BLOCK + 2 * group * QUERY_BLOCK
}

/// What one thread of attention needs in addition if its matmuls are bf16: one packed operand for each side, of at most
/// `KEY_BLOCK` rows or columns and a depth of `KEY_BLOCK` or the head size.
pub const fn bf16_attention_thread_floats(head_dim: usize) -> usize {
    let depth = head_dim.next_multiple_of(32);
    KEY_BLOCK * if depth > KEY_BLOCK { depth } else { KEY_BLOCK }
}

/// Partial sums of a norm's weight gradient: one row of sums for each group of at least 32 rows, at most 64 groups.
/// The device may make fewer groups. The bound never falls as rows are added, so it holds for every micro-batch.
pub const fn norm_partials_floats(rows: usize, columns: usize) -> usize {
    let groups = rows.div_ceil(32);
    columns * if groups < 64 { groups } else { 64 }
}

/// Partial sums, in f64, of the gradients of a Fourier module's parameters: five for each group of rows. A group has
/// about `SQUARES_CHUNK` elements, and there are at most 512. Fewer rows never need more groups.
pub const fn fourier_partials(rows: usize, columns: usize) -> usize {
    let by_size = (rows * columns).div_ceil(SQUARES_CHUNK);
    let groups = if by_size < rows { by_size } else { rows };
    5 * if groups < 512 { groups } else { 512 }
}

/// Sums over the heads that share a head of keys have up to this many parts, each by a task of its own. Few key heads, as
/// those of Mamba-2, would leave threads idle.
const SCAN_TASKS: usize = 16;

/// Parts that the heads of each key head are divided into.
pub fn scan_parts(shape: &ScanShape) -> usize {
    SCAN_TASKS.div_ceil(shape.key_heads).min(shape.group())
}

/// One thread's part of the scratch of a scan: the state of a head, and backward its gradient, the states at the beginnings
/// of chunks, the states and the written values of a chunk, and two rows of values and of keys.
pub fn scan_thread_floats(shape: &ScanShape, tokens: usize, gradient: bool) -> usize {
    let state = aligned_floats(shape.state());
    if !gradient {
        return state + aligned_floats(shape.value_dim);
    }
    let written = aligned_floats(shape.chunk.min(tokens) * shape.value_dim);
    let rows = 2 * aligned_floats(shape.value_dim) + 2 * aligned_floats(shape.key_dim);
    (2 + shape.chunks(tokens) + shape.chunk.min(tokens)) * state + written + rows
}

/// Scratch of a scan; backward also the parts of the gradients of queries and keys, if there are several.
pub fn scan_floats(shape: &ScanShape, tokens: usize, threads: usize, gradient: bool) -> usize {
    let parts = scan_parts(shape);
    let sums = if gradient && parts > 1 { 2 * parts * tokens * shape.channels().0 } else { 0 };
    LINE_FLOATS + threads * scan_thread_floats(shape, tokens, gradient) + sums
}

/// Rows of a weight plus its adapter that exist at the same time, about 1 MiB.
pub const fn norm_block_rows(rows: usize, columns: usize) -> usize {
    let block = (1 << 18) / columns / 64 * 64;
    let block = if block < 64 { 64 } else { block };
    if block < rows { block } else { rows }
}

/// The inputs of one step at the planned extent, and what the CPU device computes it with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuStep<'a> {
    pub inputs: &'a [&'a Type],
    pub extent: &'a Extent,
    pub precision: Precision,
    pub threads: usize,
}

impl CpuStep<'_> {
    /// Rows and columns of an input.
    pub fn size(&self, input: usize) -> (usize, usize) {
        self.inputs[input].shape.at(self.extent)
    }

    /// Scratch of a matmul in the plan's precision. The device refuses plans in f16.
    pub fn matmul_floats(&self) -> usize {
        match self.precision {
            Precision::F32 => matmul_floats(self.threads),
            Precision::Bf16 | Precision::F16 | Precision::Fp8 => bf16_matmul_floats(),
        }
    }

    /// Scratch of attention in the plan's precision.
    pub fn attention_floats(&self, shape: &AttentionShape) -> usize {
        let packed = match self.precision {
            Precision::F32 => 0,
            Precision::Bf16 | Precision::F16 | Precision::Fp8 => {
                self.threads * bf16_attention_thread_floats(shape.head_dim)
            }
        };
        packed + self.f32_attention_floats(shape)
    }

    pub fn f32_attention_floats(&self, shape: &AttentionShape) -> usize {
        attention_floats(self.threads, shape.heads / shape.kv_heads, shape.head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A micro-batch may have fewer rows than the plan, and must then fit into the same scratch.
    #[test]
    fn partial_sums_never_fall_as_rows_are_added() {
        for rows in 0..5000 {
            assert!(norm_partials_floats(rows, 3) <= norm_partials_floats(rows + 1, 3), "{rows} rows");
            assert!(fourier_partials(rows, 576) <= fourier_partials(rows + 1, 576), "{rows} rows");
        }
    }
}
