//! Sizes of the GPU kernels' scratch memory: decoded weights, tiles of attention, partial sums, cuBLASLt's workspace.
//!
//! A weight that is not stored in the plan's precision is decoded into scratch before its matmul, with room for the
//! adapter's matrices to the right and below. The kernels cut their work by the constants here, and `workspace.rs` adds
//! the sizes up for each operation. Nothing depends on the model of the GPU, so a plan is the same for all of them.

use crate::op_attributes::AttentionShape;
use crate::recurrence::ScanShape;
use crate::shape::{Extent, Type, align_up};
use crate::storage::{DType, Storage};
use crate::target::Precision;

/// Numbers that the kernels of an objective keep for each sequence. Must match `objective.cu`.
pub const OBJECTIVE_COLUMNS: usize = 16;

/// Scratch of one matmul (cuBLASLt's workspace), for sums that are split along the depth.
pub const MATMUL_BYTES: usize = 32 << 20;
/// Rows of a head that are decoded at a time.
pub const HEAD_ROWS: usize = 16_384;
/// The columns of an adapter next to a weight begin and end at multiples of this.
pub const COLUMN_STEP: usize = 8;

/// Columns that an adapter of this rank occupies next to a matrix.
pub const fn spare_columns(rank: usize) -> usize {
    rank.next_multiple_of(COLUMN_STEP)
}

/// Whether a matmul with a weight of this storage and size runs in fp8, for which cuBLASLt requires multiples of 16. Other
/// weights are decoded.
pub fn multiplies_in_fp8(precision: Precision, storage: Storage, rows: usize, columns: usize) -> bool {
    let fits = rows.is_multiple_of(16) && columns.is_multiple_of(16);
    precision == Precision::Fp8 && storage == Storage::Fp8Rows && fits
}

/// Bytes of a matrix of fp8 codes, and of a scale for each row.
const fn rounded_bytes(rows: usize, columns: usize) -> usize {
    align_up(rows * columns) + align_up(4 * rows)
}

/// The inputs of one step at the planned extent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CudaStep<'a> {
    pub inputs: &'a [&'a Type],
    pub extent: &'a Extent,
    pub precision: Precision,
}

impl CudaStep<'_> {
    /// Rows and columns of an input.
    pub fn size(&self, input: usize) -> (usize, usize) {
        self.inputs[input].shape.at(self.extent)
    }

    /// The element type of activations and of matmuls.
    pub fn element(&self) -> DType {
        match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 | Precision::Fp8 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }

    /// Bytes of a weight decoded to the element type of matmuls, with room for an adapter of this rank; 0 if the weight
    /// is stored in that type.
    pub fn decoded_bytes(&self, input: usize, rank: usize) -> usize {
        let (rows, columns) = self.size(input);
        if self.inputs[input].storage == Storage::Plain(self.element()) {
            return 0;
        }
        let spare = spare_columns(rank);
        align_up((rows + spare) * (columns + spare) * self.element().bytes())
    }

    /// Scratch for the operands of a matmul: the decoded weight ([`CudaStep::decoded_bytes`]), or in fp8 the rounded input,
    /// unless an earlier step has rounded it.
    pub fn operand_bytes(&self, input: usize, weight: usize, rank: usize) -> usize {
        let (rows, columns) = self.size(input);
        if !self.is_fp8(weight) {
            self.decoded_bytes(weight, rank)
        } else if self.inputs[input].storage == Storage::Fp8Rows {
            0
        } else {
            rounded_bytes(rows, columns)
        }
    }

    /// Scratch for the operands of the gradient of the input, which also needs a weight in fp8 transposed.
    pub fn gradient_operand_bytes(&self, gradient: usize, weight: usize, rank: usize) -> usize {
        let (rows, columns) = self.size(weight);
        let transposed = if self.is_fp8(weight) { rounded_bytes(columns, rows) } else { 0 };
        self.operand_bytes(gradient, weight, rank) + transposed
    }

    fn is_fp8(&self, weight: usize) -> bool {
        let (rows, columns) = self.size(weight);
        multiplies_in_fp8(self.precision, self.inputs[weight].storage, rows, columns)
    }

    /// Bytes of the decoded head (input 1), which is decoded at most [`HEAD_ROWS`] rows at a time.
    pub fn decoded_head_bytes(&self) -> usize {
        let (rows, columns) = self.size(1);
        if self.decoded_bytes(1, 0) == 0 {
            return 0;
        }
        align_up(rows.min(HEAD_ROWS) * columns * self.element().bytes())
    }

    /// Logits of some rows by all words of the head (input 1).
    pub fn logits_bytes(&self, rows: usize) -> usize {
        align_up(rows * logit_stride(self.size(1).0) * self.element().bytes())
    }

    /// Partial sums over the rows of input 0; see [`partial_sums_bytes`].
    pub fn partial_sums_bytes(&self, least: usize) -> usize {
        let (rows, columns) = self.size(0);
        partial_sums_bytes(rows, columns, least)
    }

    pub fn attention_bytes(&self, shape: &AttentionShape, gradient: bool) -> usize {
        attention_workspace_bytes(self.extent.tokens, self.extent.segments, shape, gradient)
    }
}

/// Most partial sums of a column.
const MOST_PARTIALS: usize = 256;
/// Groups of channels that one partial sum of a norm's weight gradient covers at least.
pub const NORM_GROUPS_PER_PARTIAL: usize = 32;
/// Rows that one partial sum of a bias gradient covers at least.
pub const BIAS_ROWS_PER_PARTIAL: usize = 128;
/// Rows, and columns, of a tile of a matmul of sorted rows.
pub const GROUP_TILE: usize = 64;

/// Most tiles of rows that are sorted by expert: the last tile of each expert may have few rows.
pub const fn group_tiles(rows: usize, experts: usize) -> usize {
    rows.div_ceil(GROUP_TILE) + experts
}

/// Choices of experts that one block of threads counts.
pub const DISPATCH_BLOCK: usize = 256;

/// Rows that one partial sum covers.
pub const fn rows_per_partial(rows: usize, least: usize) -> usize {
    let even = rows.div_ceil(MOST_PARTIALS);
    if even > least { even } else { least }
}

/// Partial sums of columns in f32. The bound also holds for sums over groups of a row's columns: those rows are more and
/// narrower by the same factor. It never falls as rows are added.
pub const fn partial_sums_bytes(rows: usize, columns: usize, least: usize) -> usize {
    let partials = rows.div_ceil(least);
    align_up(4 * columns * if partials < MOST_PARTIALS { partials } else { MOST_PARTIALS })
}

/// The sizes that tiles of a scan's state are padded to: each of 16 x 16 threads has a square of elements.
pub const SCAN_SIDES: [usize; 4] = [16, 64, 128, 256];

/// The side of a padded state; `None` if it is larger than the kernels support.
pub fn scan_side(shape: &ScanShape) -> Option<usize> {
    SCAN_SIDES.into_iter().find(|side| shape.key_dim.max(shape.value_dim) <= *side)
}

/// States that the backward pass of a scan stores for a head: those at the beginnings of chunks of all samples, and those
/// of the tokens of a chunk.
pub fn scan_states(shape: &ScanShape, tokens: usize, segments: usize) -> [usize; 2] {
    [tokens / shape.chunk + segments, shape.chunk.min(tokens)]
}

/// Scratch of the backward pass of a scan: states, and gradients of queries and keys for each head that shares them.
pub fn scan_bytes(shape: &ScanShape, tokens: usize, segments: usize) -> usize {
    let side = scan_side(shape).unwrap_or(0);
    let states = shape.heads * side * side * scan_states(shape, tokens, segments).iter().sum::<usize>();
    let gradients = if shape.group() > 1 { 2 * tokens * shape.heads * shape.key_dim } else { 0 };
    align_up(4 * states) + align_up(4 * gradients)
}

/// Cached positions per block, if several blocks share a query.
pub const CACHE_PIECE: usize = 256;
/// Up to this many queries, several blocks share each query.
pub const MOST_SHARED_QUERIES: usize = 8;

/// Partial results of attention over a cache of `positions` per sequence: the sums of each piece of a shared query, its
/// largest score and the sum of its weights.
pub fn cached_attention_bytes(queries: usize, positions: usize, shape: &AttentionShape) -> usize {
    let pieces = positions.div_ceil(CACHE_PIECE);
    let shared = if pieces > 1 { queries.min(MOST_SHARED_QUERIES) } else { 0 };
    align_up(4 * shared * shape.heads * pieces * (shape.head_dim + 2))
}

/// Elements from one row of logits to the next.
pub const fn logit_stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(64)
}

/// How the attention kernels cut their work, by head size; `kernels/attention.cu` and `attention_grad.cu` have the same
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTiles {
    /// The head size that kernels are compiled for; smaller heads are padded with zeros in shared memory.
    pub padded_head: usize,
    /// Queries of a block, forward and for the gradient of q.
    pub queries: usize,
    /// Keys of a block for the gradients of k and v.
    pub keys: usize,
}

impl AttentionTiles {
    /// Heads of more than 512 channels have no kernel.
    pub const fn of(head_dim: usize) -> AttentionTiles {
        match head_dim {
            0..=64 => AttentionTiles { padded_head: 64, queries: 128, keys: 64 },
            65..=96 => AttentionTiles { padded_head: 96, queries: 128, keys: 64 },
            97..=128 => AttentionTiles { padded_head: 128, queries: 128, keys: 64 },
            129..=256 => AttentionTiles { padded_head: 256, queries: 64, keys: 32 },
            _ => AttentionTiles { padded_head: 512, queries: 32, keys: 16 },
        }
    }
}

/// The most tiles of `rows` tokens that segments can have; a tile never spans two segments.
pub const fn attention_tile_bound(tokens: usize, segments: usize, rows: usize) -> usize {
    tokens.div_ceil(rows) + segments
}

/// A list of tiles: their number, and four integers for each.
pub const fn attention_list_bytes(tokens: usize, segments: usize, rows: usize) -> usize {
    align_up(16 * (1 + attention_tile_bound(tokens, segments, rows)))
}

/// One float for each query and head.
pub const fn attention_floats_bytes(tokens: usize, shape: &AttentionShape) -> usize {
    align_up(4 * shape.heads * tokens)
}

/// The wanted number of blocks for the gradients of k and v. It keeps a large GPU busy for any segments: one block then has
/// at most half of the average work of 264 blocks.
const KEY_BLOCKS: usize = 1024;

/// Into how many parts the query heads of a key head are split for the gradients of k and v; each part has its own blocks.
pub const fn attention_parts(tokens: usize, shape: &AttentionShape) -> usize {
    let blocks = tokens.div_ceil(AttentionTiles::of(shape.head_dim).keys) * shape.kv_heads;
    let (group, parts) =
        (shape.heads / shape.kv_heads, if blocks == 0 { 1 } else { KEY_BLOCKS.div_ceil(blocks) });
    if parts < group { parts } else { group }
}

/// The gradients of k and v of each part in 16 bits, if there are several parts; f32 is never split.
pub const fn attention_parts_bytes(tokens: usize, shape: &AttentionShape) -> usize {
    match attention_parts(tokens, shape) {
        1 => 0,
        parts => align_up(parts * 2 * tokens * shape.kv_heads * shape.head_dim * 2),
    }
}

/// Lists of tiles; for the gradient also two floats for each query and head, and the parts of the gradients of k and v.
/// Offsets follow from the planned sizes, because fewer tokens may be split into more parts and so need more.
pub const fn attention_workspace_bytes(
    tokens: usize,
    segments: usize,
    shape: &AttentionShape,
    gradient: bool,
) -> usize {
    let tiles = AttentionTiles::of(shape.head_dim);
    let forward = attention_list_bytes(tokens, segments, tiles.queries);
    if gradient {
        forward
            + attention_list_bytes(tokens, segments, tiles.keys)
            + 2 * attention_floats_bytes(tokens, shape)
            + attention_parts_bytes(tokens, shape)
    } else {
        forward
    }
}

/// Rows that one partial sum of the gradient of DoRA's magnitudes covers.
pub const SUM_ROWS: usize = 128;

/// Partial sums, in f32, of the gradient of DoRA's magnitudes.
pub const fn magnitude_partials_bytes(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * columns * 4
}

/// Rows of a weight that are decoded to f32 at a time for their norms: about 32 MiB, which fits a large cache.
pub const fn norm_block_rows(rows: usize, columns: usize) -> usize {
    let block = (8 << 20) / columns / 8 * 8;
    let block = if block < 8 { 8 } else { block };
    if block < rows { block } else { rows }
}

/// Elements that one partial sum of squares covers.
const SQUARES_CHUNK: usize = 16_384;

/// Number of partial sums of squares, in f64.
pub const fn squares_chunks(elements: usize) -> usize {
    elements.div_ceil(SQUARES_CHUNK)
}

/// Sums, in f64, that every block of a Fourier module's gradient writes.
pub const FOURIER_SUMS: usize = 5;
/// Rows of such a block.
const FOURIER_BLOCK_ROWS: usize = 256;

/// Columns of such a block: the tile of B must fit the shared memory at any rank.
pub const fn fourier_block_columns(activations: DType) -> usize {
    match activations {
        DType::Bf16 | DType::F16 => 128,
        DType::F32 | DType::F64 | DType::I32 | DType::U64 => 64,
    }
}

/// Blocks side by side, and one below the other.
pub const fn fourier_blocks(rows: usize, columns: usize, activations: DType) -> (usize, usize) {
    (columns.div_ceil(fourier_block_columns(activations)), rows.div_ceil(FOURIER_BLOCK_ROWS))
}

/// The largest rank of the thin matmul kernels; ranks are multiples of eight.
pub const MOST_THIN_RANK: usize = 32;
/// Blocks of a thin matmul, if there is enough work: two for each multiprocessor of a large GPU.
const THIN_BLOCKS: usize = 264;
/// Tokens that one partial sum of a thin matmul covers at least, and their granularity.
const LEAST_RANGE_TOKENS: usize = 64;
const RANGE_TOKEN_STEP: usize = 32;
/// Most partial sums of a gradient: adding up more takes longer than computing them.
const MOST_RANGES: usize = 64;
/// Most scratch for the partial dh of an adapter's gradient; its partial dB get the rest.
const MOST_PARTIAL_BYTES: usize = MATMUL_BYTES / 4 * 3;

/// The rank that a thin matmul kernel is compiled for.
pub const fn padded_thin_rank(rank: usize) -> usize {
    match rank {
        0..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

/// How dB += dyᵀ·h and dh = dy·B are split when one kernel reads dy (T, N) once for both; `kernels/thin.cu` has the same
/// two widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterGradCut {
    /// Columns of a block: each has its partial dh.
    pub block_columns: usize,
    /// Tokens of a launch; more tokens take several launches.
    pub launch_tokens: usize,
    /// Tokens of a block: each range has its partial dB.
    pub range_tokens: usize,
}

impl AdapterGradCut {
    /// `None` at higher ranks: their partial sums are so large that reading dy twice is faster.
    pub const fn of(tokens: usize, columns: usize, rank: usize) -> Option<AdapterGradCut> {
        if rank > 32 {
            return None;
        }
        // Wide blocks mean fewer partial dh and, because there are fewer blocks, more partial dB.
        let elements = tokens * columns;
        let block_columns = if columns >= 1024 && elements >= 1 << 24 { 512 } else { 256 };
        let blocks = match block_columns {
            512 if rank > 16 || elements < 1 << 25 => THIN_BLOCKS / 2,
            _ => THIN_BLOCKS,
        };
        let across = columns.div_ceil(block_columns);
        let token_bytes = across * rank * 4;
        let most_tokens = MOST_PARTIAL_BYTES / token_bytes / RANGE_TOKEN_STEP * RANGE_TOKEN_STEP;
        assert!(most_tokens > 0, "the partial sums of one token exceed the scratch");
        let launches = at_least(tokens.div_ceil(most_tokens), 1);
        let launch_tokens = at_least(tokens.div_ceil(launches), 1).next_multiple_of(RANGE_TOKEN_STEP);
        let left = MATMUL_BYTES - align_up(launch_tokens * token_bytes);
        let range_tokens = range_tokens(launch_tokens, blocks / across, left / (columns * rank * 4));
        Some(AdapterGradCut { block_columns, launch_tokens, range_tokens })
    }

    /// Partial dB of a launch; a single one is added to the gradient directly.
    pub const fn ranges(&self) -> usize {
        self.launch_tokens.div_ceil(self.range_tokens)
    }

    /// Bytes of the partial dh, which come before the partial dB.
    pub const fn matmul_bytes(&self, columns: usize, rank: usize) -> usize {
        align_up(columns.div_ceil(self.block_columns) * self.launch_tokens * rank * 4)
    }
}

/// Tokens per partial sum, for up to `wanted` sums if there is room for `most`.
const fn range_tokens(tokens: usize, wanted: usize, most: usize) -> usize {
    let most = if most < MOST_RANGES { most } else { MOST_RANGES };
    let ranges = at_least(if wanted < most { wanted } else { most }, 1);
    at_least(tokens.div_ceil(ranges).next_multiple_of(RANGE_TOKEN_STEP), LEAST_RANGE_TOKENS)
}

const fn at_least(number: usize, least: usize) -> usize {
    if number > least { number } else { least }
}

/// Scratch of [`AdapterGradCut`], or of the two matmuls that replace it.
pub const fn adapter_grad_bytes(tokens: usize, columns: usize, rank: usize) -> usize {
    match AdapterGradCut::of(tokens, columns, rank) {
        Some(cut) => {
            let sums = if cut.ranges() > 1 { cut.ranges() * columns * rank * 4 } else { 0 };
            cut.matmul_bytes(columns, rank) + align_up(sums)
        }
        None => at_least(
            outer_sum_bytes(tokens, columns, rank),
            ThinMatmulCut::of(tokens, columns, rank).bytes(tokens, columns, rank),
        ),
    }
}

/// Columns of a block that sums over tokens.
pub const OUTER_SUM_COLUMNS: usize = 256;

/// Tokens of a block that multiplies a wide matrix (T, N) with a thin one and sums over tokens.
pub const fn outer_sum_range_tokens(tokens: usize, columns: usize, rank: usize) -> usize {
    let wanted = THIN_BLOCKS / columns.div_ceil(OUTER_SUM_COLUMNS);
    range_tokens(tokens, wanted, MATMUL_BYTES / (columns * rank * 4))
}

/// Partial sums over tokens; a single one is added to the gradient directly.
pub const fn outer_sum_bytes(tokens: usize, columns: usize, rank: usize) -> usize {
    let ranges = tokens.div_ceil(outer_sum_range_tokens(tokens, columns, rank));
    if ranges > 1 { align_up(ranges * columns * rank * 4) } else { 0 }
}

/// How the matmul of a wide matrix (T, N) with a thin one is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinMatmulCut {
    pub block_tokens: usize,
    /// Columns that a block sums over: each range has its own partial result.
    pub range_columns: usize,
}

impl ThinMatmulCut {
    pub const fn of(tokens: usize, columns: usize, rank: usize) -> ThinMatmulCut {
        let padded = padded_thin_rank(rank);
        let (block_tokens, tile_columns) = if padded <= 32 { (64, 128) } else { (128, 64) };
        let blocks = at_least(tokens.div_ceil(block_tokens), 1);
        let ranges = at_least(THIN_BLOCKS / blocks, 1);
        // A partial result stays small compared to what is read for it.
        let least = at_least(128, 8 * padded);
        let even = columns.div_ceil(ranges).next_multiple_of(tile_columns);
        ThinMatmulCut { block_tokens, range_columns: at_least(even, least) }
    }

    /// Number of partial results; a single one is the result.
    pub const fn ranges(&self, columns: usize) -> usize {
        columns.div_ceil(self.range_columns)
    }

    pub const fn bytes(&self, tokens: usize, columns: usize, rank: usize) -> usize {
        let ranges = self.ranges(columns);
        if ranges > 1 { align_up(ranges * tokens * rank * 4) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_sums_fit_for_any_rows_and_groups() {
        let columns = 24;
        for least in [NORM_GROUPS_PER_PARTIAL, BIAS_ROWS_PER_PARTIAL] {
            let mut before = 0;
            for rows in (1..3 * least).chain(250 * least..260 * least).chain([1 << 15, 1 << 17]) {
                let bytes = partial_sums_bytes(rows, columns, least);
                assert!(before <= bytes, "{rows} rows take {bytes}, fewer take {before}");
                before = bytes;
                for groups in [1, 2, 3, 4, 6, 8, 12, 24] {
                    let all = rows * groups;
                    let partials = all.div_ceil(rows_per_partial(all, least));
                    let needed = 4 * partials * (columns / groups);
                    assert!(needed <= bytes, "{rows} rows of {groups} groups need {needed} of {bytes}");
                }
            }
        }
    }

    /// A micro-batch may have fewer rows than the plan, and must then fit into the same scratch.
    #[test]
    fn partial_sums_never_fall_as_rows_are_added() {
        let fourier = |rows| fourier_blocks(rows, 576, DType::Bf16);
        for rows in 0..5000 {
            assert!(
                magnitude_partials_bytes(rows, 3) <= magnitude_partials_bytes(rows + 1, 3),
                "{rows} rows"
            );
            assert!(fourier(rows).1 <= fourier(rows + 1).1 && fourier(rows).0 == 5, "{rows} rows");
        }
        assert_eq!((fourier(1), fourier(257)), ((5, 1), (5, 2)));
    }

    /// Whole tiles of eight rows, never none, and no more rows than there are.
    #[test]
    fn blocks_of_rows_for_norms() {
        assert_eq!(norm_block_rows(3584, 18944), 440);
        assert_eq!(norm_block_rows(100, 18944), 100);
        assert_eq!(norm_block_rows(100, 1 << 24), 8);
    }

    /// Each segment has its own tiles, and the list is planned before the segments are known.
    #[test]
    fn a_list_holds_the_tiles_of_any_segments() {
        for rows in [32_usize, 64, 128] {
            for lengths in [vec![1; 200], vec![rows + 1; 9], vec![rows; 4], vec![5000, 1, 0, 3, rows - 1]] {
                let tiles: usize = lengths.iter().map(|length| length.div_ceil(rows)).sum();
                let (tokens, segments) = (lengths.iter().sum(), lengths.len());
                assert!(tiles <= attention_tile_bound(tokens, segments, rows), "{rows} rows, {lengths:?}");
            }
        }
    }

    const GROUPED: AttentionShape = AttentionShape {
        heads: 28,
        kv_heads: 4,
        head_dim: 128,
        scale: 1.0,
        window: None,
        softcap: None,
        sinks: false,
    };

    /// There are 4 · 32 blocks without parts, 4 · 64, 4 · 128 and 4 · 256. Seven heads give at most seven parts.
    #[test]
    fn few_long_blocks_of_keys_are_cut_into_parts() {
        let parts = [1, 2048, 4096, 8192, 16_384].map(|tokens| attention_parts(tokens, &GROUPED));
        assert_eq!(parts, [7, 7, 4, 2, 1]);
        assert_eq!(attention_parts(2048, &AttentionShape { kv_heads: 28, ..GROUPED }), 1);
        assert_eq!(attention_parts(0, &GROUPED), 1);
    }

    /// There are fewer than 2048 tiles of keys and of values, of 64 rows each.
    #[test]
    fn parts_take_a_bounded_scratch() {
        for tokens in (0..40_000).step_by(37) {
            for kv_heads in [1, 2, 4, 7, 14, 28] {
                let shape = AttentionShape { kv_heads, ..GROUPED };
                let bytes = attention_parts_bytes(tokens, &shape);
                assert!(bytes <= 2 * 2048 * 64 * 128 * 2, "{tokens} tokens of {kv_heads} heads take {bytes}");
                assert_eq!(bytes == 0, attention_parts(tokens, &shape) == 1);
            }
        }
    }

    /// Except for the parts, whose offsets follow from the planned sizes.
    #[test]
    fn attention_scratch_never_falls_as_tokens_and_segments_are_added() {
        let shape = AttentionShape { heads: 3, kv_heads: 3, head_dim: 256, ..GROUPED };
        let bytes = |tokens, segments| attention_workspace_bytes(tokens, segments, &shape, true);
        for tokens in 0..2000 {
            assert!(bytes(tokens, 7) <= bytes(tokens + 1, 7), "{tokens} tokens");
            assert!(bytes(500, tokens) <= bytes(500, tokens + 1), "{tokens} segments");
        }
    }

    /// Thin matmuls use the scratch of cuBLASLt's matmuls, whatever their sizes.
    #[test]
    fn thin_matmuls_fit_the_workspace_of_matmuls() {
        for tokens in [0, 1, 63, 64, 1000, 2048, 6144, 8192, 20_000, 32_768, 131_072] {
            for columns in [8, 248, 512, 1536, 3584, 8960, 18_944, 65_536, 262_144] {
                for rank in [8, 16, 24, 32, 48, 64] {
                    let what = format!("{tokens} tokens, {columns} columns, rank {rank}");
                    let matmul = ThinMatmulCut::of(tokens, columns, rank);
                    assert!(matmul.bytes(tokens, columns, rank) <= MATMUL_BYTES, "matmul of {what}");
                    assert!(outer_sum_bytes(tokens, columns, rank) <= MATMUL_BYTES, "sum of {what}");
                    assert!(adapter_grad_bytes(tokens, columns, rank) <= MATMUL_BYTES, "gradient of {what}");
                    let tile = if rank <= 32 { 128 } else { 64 };
                    assert!(matmul.range_columns.is_multiple_of(tile), "{matmul:?} of {what}");
                    if let Some(cut) = AdapterGradCut::of(tokens, columns, rank) {
                        let tile = 8192 / cut.block_columns;
                        assert!(cut.range_tokens.is_multiple_of(tile), "{cut:?} of {what}");
                    }
                }
            }
        }
    }

    /// The sizes of a 7B model at two lengths: few partial sums, and enough blocks for 132 multiprocessors.
    #[test]
    fn adapter_gradients_are_cut_for_a_large_gpu() {
        let cut = |tokens, columns| {
            AdapterGradCut::of(tokens, columns, 16).map(|cut| (cut.block_columns, cut.ranges()))
        };
        assert_eq!(cut(2048, 3584), Some((256, 16)));
        assert_eq!(cut(8192, 3584), Some((512, 18)));
        assert_eq!(cut(8192, 18_944), Some((512, 7)));
        assert_eq!(AdapterGradCut::of(8192, 3584, 64), None);
    }
}
