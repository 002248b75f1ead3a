//! Scratch that a step gets on a GPU: one function that planner, device and kernels read.
//!
//! A weight that is stored otherwise than products take it is decoded here before its product, with room for the
//! adapter's matrices beside and beneath it. Products get a workspace of their own for sums that are cut along the
//! depth. Nothing depends on the model of the GPU, so a plan is the same for all of them.

use crate::op::{AttentionShape, HeadPiece, LossHead, Op};
use crate::plan::{Precision, align_up};
use crate::shape::{Extent, Type};
use crate::storage::{DType, Storage};

/// Scratch of one product, for sums cut along the depth.
pub const PRODUCT_BYTES: usize = 32 << 20;
/// Rows of a head that are decoded at a time.
pub const HEAD_ROWS: usize = 16_384;
/// Columns that an adapter takes beside a weight begin and end at multiples of this.
pub const COLUMN_STEP: usize = 8;

/// Columns beside a matrix that a term of so many columns takes.
pub const fn spare_columns(rank: usize) -> usize {
    rank.next_multiple_of(COLUMN_STEP)
}

/// What a step is made of, at the planned extent.
#[derive(Clone, Copy, Debug)]
pub struct StepTypes<'a> {
    pub op: &'a Op,
    pub inputs: &'a [&'a Type],
    pub extent: &'a Extent,
    pub precision: Precision,
}

impl StepTypes<'_> {
    fn input(&self, index: usize) -> (usize, usize) {
        self.inputs[index].shape.at(self.extent)
    }

    fn activation(&self) -> DType {
        match self.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }

    /// Bytes of a weight in the numbers of products, if it is not stored so already.
    fn decoded_bytes(&self, input: usize, rank: usize) -> usize {
        let (rows, columns) = self.input(input);
        if self.inputs[input].storage == Storage::Plain(self.activation()) {
            return 0;
        }
        let spare = spare_columns(rank);
        align_up((rows + spare) * (columns + spare) * self.activation().bytes())
    }

    /// The same of the head, which is decoded some rows at a time.
    fn decoded_head_bytes(&self) -> usize {
        let (rows, columns) = self.input(1);
        if self.decoded_bytes(1, 0) == 0 {
            return 0;
        }
        align_up(rows.min(HEAD_ROWS) * columns * self.activation().bytes())
    }
}

/// Bytes of scratch for one step; 0 = none.
pub fn workspace_bytes(step: &StepTypes<'_>) -> usize {
    match step.op {
        Op::Linear { bias, lora } => {
            let h = 2 + usize::from(*bias);
            let (rank, b) =
                if lora.is_some() { (step.input(h).1, step.decoded_bytes(h + 1, 0)) } else { (0, 0) };
            step.decoded_bytes(1, rank) + b + PRODUCT_BYTES
        }
        Op::LinearGrad { scales } => {
            // What is not decoded beside a decoded weight is an adapter's.
            let thin = (0..scales.len()).filter(|term| step.decoded_bytes(2 * term + 1, 0) == 0);
            let rank = thin.map(|term| step.input(2 * term).1).max().unwrap_or(0);
            let decoded = (0..scales.len()).map(|term| step.decoded_bytes(2 * term + 1, rank));
            decoded.max().unwrap_or(0) + PRODUCT_BYTES
        }
        Op::WeightGrad { .. } => PRODUCT_BYTES,
        Op::LmHeadLoss(head) => loss_bytes(step, head),
        Op::HeadSums(piece) => piece_bytes(step, piece),
        Op::HeadGrad { piece, ends } => {
            let is_rounded = *ends && step.activation() != DType::F32;
            let summed = if is_rounded { align_up(piece.chunk * step.input(0).1 * 4) } else { 0 };
            piece_bytes(step, piece) + summed
        }
        Op::Logits { lora, .. } => {
            let (rows, vocabulary) = (step.input(0).0, step.input(1).0);
            let logits = align_up(rows * logit_stride(vocabulary) * step.activation().bytes());
            let b = if lora.is_some() { step.decoded_bytes(3, 0) } else { 0 };
            step.decoded_head_bytes() + logits + b + PRODUCT_BYTES
        }
        Op::Attention(shape) => attention_bytes(step.extent, shape, false),
        Op::AttentionGrad(shape) => attention_bytes(step.extent, shape, true),
        Op::RowNorms { .. } => {
            let (rows, columns) = step.input(0);
            norm_block_rows(rows, columns) * columns * 4
        }
        Op::MagnitudeGrad => {
            let (rows, columns) = step.input(0);
            magnitude_partials_bytes(rows, columns)
        }
        Op::FourierGrad { .. } => {
            let (rows, columns) = step.input(4);
            let (across, down) = fourier_blocks(rows, columns, step.activation());
            across * down * FOURIER_SUMS * 8
        }
        Op::GradNorm { .. } => {
            let elements = (2..step.inputs.len()).map(|input| step.input(input));
            8 * elements.map(|(rows, columns)| squares_chunks(rows * columns)).sum::<usize>()
        }
        Op::RmsNormWeightGrad { .. } => {
            let (rows, columns) = step.input(0);
            partial_sums_bytes(rows, columns, NORM_GROUPS_PER_PARTIAL)
        }
        Op::BiasGrad => {
            let (rows, columns) = step.input(0);
            partial_sums_bytes(rows, columns, BIAS_ROWS_PER_PARTIAL)
        }
        Op::Fourier { .. }
        | Op::FourierReg { .. }
        | Op::EmbedGrad { .. }
        | Op::Embed { .. }
        | Op::RmsNorm(_)
        | Op::ScaleColumns { .. }
        | Op::Dropout { .. }
        | Op::RopeTable(_)
        | Op::Rope { .. }
        | Op::GatedAct(_)
        | Op::Add
        | Op::GatherRows
        | Op::HeadLoss { .. }
        | Op::ScatterRows
        | Op::CacheRows
        | Op::CachedAttention(_)
        | Op::RmsNormGrad { .. }
        | Op::GatedActGrad(_)
        | Op::Round { .. }
        | Op::AdamW(_)
        | Op::AdamW8(_)
        | Op::Zero
        | Op::Fetch
        | Op::Stow
        | Op::Stowed => 0,
    }
}

/// The head in the numbers of products, a chunk of logits, the loss of each row, and a product's own.
fn loss_bytes(step: &StepTypes<'_>, head: &LossHead) -> usize {
    let (rows, vocabulary) = (step.input(0).0, step.input(1).0);
    let logits = align_up(head.chunk * logit_stride(vocabulary) * step.activation().bytes());
    let b = if head.lora.is_some() { step.decoded_bytes(5, 0) } else { 0 };
    step.decoded_head_bytes() + logits + b + align_up(rows * 4) + PRODUCT_BYTES
}

/// Rows of the head in the numbers of products, a chunk of their logits, and a product's own.
fn piece_bytes(step: &StepTypes<'_>, piece: &HeadPiece) -> usize {
    let logits = piece.chunk * logit_stride(step.input(1).0) * step.activation().bytes();
    step.decoded_head_bytes() + align_up(logits) + PRODUCT_BYTES
}

/// Most partial sums of a column.
const MOST_PARTIALS: usize = 256;
/// Groups of channels, of a norm whose weight learns, that one partial sum covers at least.
pub const NORM_GROUPS_PER_PARTIAL: usize = 32;
/// Rows that one partial sum of a bias covers at least.
pub const BIAS_ROWS_PER_PARTIAL: usize = 128;

/// Rows that one partial sum covers, of so many.
pub const fn rows_per_partial(rows: usize, least: usize) -> usize {
    let even = rows.div_ceil(MOST_PARTIALS);
    if even > least { even } else { least }
}

/// Partial sums of columns in f32. It bounds the sums over groups of a row's columns too: there are more of these
/// rows, and they are narrower by as much. It never falls as rows are added.
pub const fn partial_sums_bytes(rows: usize, columns: usize, least: usize) -> usize {
    let partials = rows.div_ceil(least);
    align_up(4 * columns * if partials < MOST_PARTIALS { partials } else { MOST_PARTIALS })
}

/// Elements from one row of logits to the next.
pub const fn logit_stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(64)
}

/// How the attention kernels cut their work, by head size; `kernels/attention.cu` and `attention_grad.cu` say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionTiles {
    /// The head size that kernels are compiled for; what is missing is zeros in shared memory.
    pub padded_head: usize,
    /// Queries of a block, forward and for the gradient of q.
    pub queries: usize,
    /// Keys of a block for the gradients of k and v.
    pub keys: usize,
}

impl AttentionTiles {
    /// Heads of more than 256 channels have no kernel.
    pub const fn of(head_dim: usize) -> AttentionTiles {
        match head_dim {
            0..=64 => AttentionTiles { padded_head: 64, queries: 128, keys: 64 },
            65..=96 => AttentionTiles { padded_head: 96, queries: 128, keys: 64 },
            97..=128 => AttentionTiles { padded_head: 128, queries: 128, keys: 64 },
            _ => AttentionTiles { padded_head: 256, queries: 64, keys: 32 },
        }
    }
}

/// Tiles of `rows` tokens that segments can have at most, each segment its own.
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

/// Blocks for the gradients of k and v that fill a large GPU twice over, whatever the segments: a block's work is
/// then half of the mean work of 264 of them at most.
const KEY_BLOCKS: usize = 1024;

/// Parts that the query heads of a key head are in for the gradients of k and v, each part with blocks of its own.
pub const fn attention_parts(tokens: usize, shape: &AttentionShape) -> usize {
    let blocks = tokens.div_ceil(AttentionTiles::of(shape.head_dim).keys) * shape.kv_heads;
    let (group, parts) =
        (shape.heads / shape.kv_heads, if blocks == 0 { 1 } else { KEY_BLOCKS.div_ceil(blocks) });
    if parts < group { parts } else { group }
}

/// The parts' gradients of k and v in 16 bits, where there are several; f32 is never cut so.
pub const fn attention_parts_bytes(tokens: usize, shape: &AttentionShape) -> usize {
    match attention_parts(tokens, shape) {
        1 => 0,
        parts => align_up(parts * 2 * tokens * shape.kv_heads * shape.head_dim * 2),
    }
}

/// Lists of tiles; for the gradient also two floats for each query and head, and the parts of the gradients of k
/// and v. Everything lies by planned sizes: fewer tokens may be cut into more parts and so take more.
pub const fn attention_workspace_bytes(
    tokens: usize,
    segments: usize,
    shape: &AttentionShape,
    gradient: bool,
) -> usize {
    let tiles = AttentionTiles::of(shape.head_dim);
    let forward = attention_list_bytes(tokens, segments, tiles.queries);
    match gradient {
        false => forward,
        true => {
            forward
                + attention_list_bytes(tokens, segments, tiles.keys)
                + 2 * attention_floats_bytes(tokens, shape)
                + attention_parts_bytes(tokens, shape)
        }
    }
}

fn attention_bytes(extent: &Extent, shape: &AttentionShape, gradient: bool) -> usize {
    attention_workspace_bytes(extent.tokens, extent.segments, shape, gradient)
}

/// Rows that one partial sum of the gradient of DoRA's magnitudes covers.
pub const SUM_ROWS: usize = 128;

/// Partial sums, in f32, of the gradient of DoRA's magnitudes.
pub const fn magnitude_partials_bytes(rows: usize, columns: usize) -> usize {
    rows.div_ceil(SUM_ROWS) * columns * 4
}

/// Rows of a weight that are decoded to f32 at a time for their norms: about 32 MiB, which a cache may hold.
pub const fn norm_block_rows(rows: usize, columns: usize) -> usize {
    let block = (8 << 20) / columns / 8 * 8;
    let block = if block < 8 { 8 } else { block };
    if block < rows { block } else { rows }
}

/// Elements that one partial sum of squares covers.
const SQUARES_CHUNK: usize = 16_384;

/// Partial sums of squares, in f64, of so many elements.
pub const fn squares_chunks(elements: usize) -> usize {
    elements.div_ceil(SQUARES_CHUNK)
}

/// Sums, in f64, that every block of a Fourier module's gradient leaves.
pub const FOURIER_SUMS: usize = 5;
/// Rows of such a block.
const FOURIER_BLOCK_ROWS: usize = 128;

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

/// Ranks that the kernels of thin products take, in eights.
pub const MOST_THIN_RANK: usize = 32;
/// Blocks of a thin product where there is work for so many: two for each multiprocessor of a large GPU.
const THIN_BLOCKS: usize = 264;
/// Tokens that one partial sum of a thin product covers at least, and the step of their number.
const LEAST_RANGE_TOKENS: usize = 64;
const RANGE_TOKEN_STEP: usize = 32;
/// Most partial sums of a gradient: adding more takes longer than forming them.
const MOST_RANGES: usize = 64;
/// Most scratch for the partial products of an adapter's gradient; its partial sums take what is left.
const MOST_PARTIAL_PRODUCTS: usize = PRODUCT_BYTES / 4 * 3;

/// The rank that a kernel of thin products is compiled for.
pub const fn padded_thin_rank(rank: usize) -> usize {
    match rank {
        0..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

/// How dB += dyᵀ·h and dh = dy·B of one reading of dy (T, N) are cut; `kernels/thin.cu` knows both widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterGradCut {
    /// Columns of a block: each has its partial dh.
    pub block_columns: usize,
    /// Tokens of a launch: more are taken one launch after the other.
    pub launch_tokens: usize,
    /// Tokens of a block: each range has its partial dB.
    pub range_tokens: usize,
}

impl AdapterGradCut {
    /// At higher ranks partial sums are so large that reading dy twice takes less: no cut.
    pub const fn of(tokens: usize, columns: usize, rank: usize) -> Option<AdapterGradCut> {
        if rank > 32 {
            return None;
        }
        // Wide blocks leave fewer partial dh and, as there are fewer of them, more partial dB.
        let elements = tokens * columns;
        let block_columns = if columns >= 1024 && elements >= 1 << 24 { 512 } else { 256 };
        let blocks = match block_columns {
            512 if rank > 16 || elements < 1 << 25 => THIN_BLOCKS / 2,
            _ => THIN_BLOCKS,
        };
        let across = columns.div_ceil(block_columns);
        let token_bytes = across * rank * 4;
        let most_tokens = MOST_PARTIAL_PRODUCTS / token_bytes / RANGE_TOKEN_STEP * RANGE_TOKEN_STEP;
        assert!(most_tokens > 0, "so many columns have no partial products");
        let launches = at_least(tokens.div_ceil(most_tokens), 1);
        let launch_tokens = at_least(tokens.div_ceil(launches), 1).next_multiple_of(RANGE_TOKEN_STEP);
        let left = PRODUCT_BYTES - align_up(launch_tokens * token_bytes);
        let range_tokens = range_tokens(launch_tokens, blocks / across, left / (columns * rank * 4));
        Some(AdapterGradCut { block_columns, launch_tokens, range_tokens })
    }

    /// Partial dB of a launch; a single one is added to the gradient at once.
    pub const fn ranges(&self) -> usize {
        self.launch_tokens.div_ceil(self.range_tokens)
    }

    /// Bytes of the partial dh, which come before the partial dB.
    pub const fn product_bytes(&self, columns: usize, rank: usize) -> usize {
        align_up(columns.div_ceil(self.block_columns) * self.launch_tokens * rank * 4)
    }
}

/// Tokens of one partial sum, where `wanted` are wanted and `most` have room.
const fn range_tokens(tokens: usize, wanted: usize, most: usize) -> usize {
    let most = if most < MOST_RANGES { most } else { MOST_RANGES };
    let ranges = at_least(if wanted < most { wanted } else { most }, 1);
    at_least(tokens.div_ceil(ranges).next_multiple_of(RANGE_TOKEN_STEP), LEAST_RANGE_TOKENS)
}

const fn at_least(number: usize, least: usize) -> usize {
    if number > least { number } else { least }
}

/// Scratch of [`AdapterGradCut`], or of the two products in its place.
pub const fn adapter_grad_bytes(tokens: usize, columns: usize, rank: usize) -> usize {
    match AdapterGradCut::of(tokens, columns, rank) {
        Some(cut) => {
            let sums = if cut.ranges() > 1 { cut.ranges() * columns * rank * 4 } else { 0 };
            cut.product_bytes(columns, rank) + align_up(sums)
        }
        None => at_least(
            outer_sum_bytes(tokens, columns, rank),
            ThinProductCut::of(tokens, columns, rank).bytes(tokens, columns, rank),
        ),
    }
}

/// Columns of a block that sums over tokens.
pub const OUTER_SUM_COLUMNS: usize = 256;

/// Tokens of a block that sums the product of a wide matrix (T, N) and a thin one over tokens.
pub const fn outer_sum_range_tokens(tokens: usize, columns: usize, rank: usize) -> usize {
    let wanted = THIN_BLOCKS / columns.div_ceil(OUTER_SUM_COLUMNS);
    range_tokens(tokens, wanted, PRODUCT_BYTES / (columns * rank * 4))
}

/// Partial sums over tokens; a single one is added to the gradient at once.
pub const fn outer_sum_bytes(tokens: usize, columns: usize, rank: usize) -> usize {
    let ranges = tokens.div_ceil(outer_sum_range_tokens(tokens, columns, rank));
    if ranges > 1 { align_up(ranges * columns * rank * 4) } else { 0 }
}

/// How the product of a wide matrix (T, N) with a thin one is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinProductCut {
    pub block_tokens: usize,
    /// Columns that a block sums over: each range has its partial product.
    pub range_columns: usize,
}

impl ThinProductCut {
    pub const fn of(tokens: usize, columns: usize, rank: usize) -> ThinProductCut {
        let padded = padded_thin_rank(rank);
        let (block_tokens, tile_columns) = if padded <= 32 { (64, 128) } else { (128, 64) };
        let blocks = at_least(tokens.div_ceil(block_tokens), 1);
        let ranges = at_least(THIN_BLOCKS / blocks, 1);
        // What a partial product takes stays a small part of what is read for it.
        let least = at_least(128, 8 * padded);
        let even = columns.div_ceil(ranges).next_multiple_of(tile_columns);
        ThinProductCut { block_tokens, range_columns: at_least(even, least) }
    }

    /// Partial products; a single one is the result.
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
    fn partial_sums_fit_whatever_the_rows_and_the_groups_of_a_row() {
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

    /// A micro-batch may have fewer rows than the plan; what the plan gave must then still be enough.
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
        assert_eq!((fourier(1), fourier(129)), ((5, 1), (5, 2)));
    }

    /// Whole tiles of eight rows, never none, and no more rows than there are.
    #[test]
    fn blocks_of_rows_for_norms() {
        assert_eq!(norm_block_rows(3584, 18944), 440);
        assert_eq!(norm_block_rows(100, 18944), 100);
        assert_eq!(norm_block_rows(100, 1 << 24), 8);
    }
    /// Whatever the segments are, each has its own tiles, and the list was planned before they were known.
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

    const GROUPED: AttentionShape =
        AttentionShape { heads: 28, kv_heads: 4, head_dim: 128, scale: 1.0, window: None, softcap: None };

    /// 4 · 32 blocks without parts, 4 · 64, 4 · 128 and 4 · 256; seven heads are seven parts at most.
    #[test]
    fn few_long_blocks_of_keys_are_cut_into_parts() {
        let parts = [1, 2048, 4096, 8192, 16_384].map(|tokens| attention_parts(tokens, &GROUPED));
        assert_eq!(parts, [7, 7, 4, 2, 1]);
        assert_eq!(attention_parts(2048, &AttentionShape { kv_heads: 28, ..GROUPED }), 1);
        assert_eq!(attention_parts(0, &GROUPED), 1);
    }

    /// Fewer than 2048 tiles of keys and of values, of 64 rows each.
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

    /// But for the parts, which lie by planned sizes.
    #[test]
    fn attention_scratch_never_falls_as_tokens_and_segments_are_added() {
        let shape = AttentionShape { heads: 3, kv_heads: 3, head_dim: 256, ..GROUPED };
        let bytes = |tokens, segments| attention_workspace_bytes(tokens, segments, &shape, true);
        for tokens in 0..2000 {
            assert!(bytes(tokens, 7) <= bytes(tokens + 1, 7), "{tokens} tokens");
            assert!(bytes(500, tokens) <= bytes(500, tokens + 1), "{tokens} segments");
        }
    }

    /// Thin products live in the scratch that the library's products have, whatever their sizes.
    #[test]
    fn thin_products_fit_the_scratch_of_products() {
        for tokens in [0, 1, 63, 64, 1000, 2048, 6144, 8192, 20_000, 32_768, 131_072] {
            for columns in [8, 248, 512, 1536, 3584, 8960, 18_944, 65_536, 262_144] {
                for rank in [8, 16, 24, 32, 48, 64] {
                    let what = format!("{tokens} tokens, {columns} columns, rank {rank}");
                    let product = ThinProductCut::of(tokens, columns, rank);
                    assert!(product.bytes(tokens, columns, rank) <= PRODUCT_BYTES, "product of {what}");
                    assert!(outer_sum_bytes(tokens, columns, rank) <= PRODUCT_BYTES, "sum of {what}");
                    assert!(adapter_grad_bytes(tokens, columns, rank) <= PRODUCT_BYTES, "gradient of {what}");
                    let tile = if rank <= 32 { 128 } else { 64 };
                    assert!(product.range_columns.is_multiple_of(tile), "{product:?} of {what}");
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
