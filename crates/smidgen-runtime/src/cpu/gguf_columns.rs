//! Decodes blocks of neighbouring rows element by element: each vector holds one element of several rows.
//!
//! A transposed right operand of a matmul is needed in this order. The codes are transposed as bytes, with a quarter of
//! the shuffles of transposing floats, and are then widened and scaled. The results have the bits of `stored_gguf.rs`.
//! Each decoded vector goes to a [`Sink`], which stores it in a panel or multiplies it immediately.
//! Rows come as whole vectors; columns of a matmul that do not fill a vector are packed in another way (`packing.rs`).
//! Layouts are those of ggml; `quant/blocks.rs` decodes the same ones element by element.

use super::isa::{Lanes, prefetch};
use super::stored::{SPAN_STEP, Stored};
use smidgen_ir::Block;
use smidgen_ir::workspace_cpu::DEPTH_BLOCK;

/// Vectors of rows that are decoded together.
pub const VECTORS: usize = 3;
/// Lanes of the widest vector.
pub(super) const MAX_LANES: usize = 16;
/// Maximum elements of a row that are unpacked at once.
const MAX_ELEMENTS: usize = SPAN_STEP;
/// Minimum elements with one scale.
pub(super) const RUN: usize = 16;
/// Maximum pieces of 32 elements in the depth of [`Columns`].
const MAX_PIECES: usize = DEPTH_BLOCK / 32;
const LINE_BYTES: usize = 64;

/// Part of a matrix of GGUF blocks: elements `first..first + depth` of some rows.
#[derive(Clone, Copy)]
pub struct Columns {
    pub stored: Stored,
    pub first_row: usize,
    /// Whole vectors, at most `VECTORS`.
    pub rows: usize,
    /// A multiple of [`SPAN_STEP`].
    pub first: usize,
    /// A multiple of [`SPAN_STEP`], or up to the end of the row; at most [`DEPTH_BLOCK`].
    pub depth: usize,
    /// The first of the equally many rows that will be decoded next, for prefetching; the matrix may end before the last.
    pub next_row: Option<usize>,
}

/// Receives decoded weights.
pub trait Sink<V> {
    /// Receives the weights of all rows at `element`, which counts from the first element of [`Columns`].
    ///
    /// # Safety
    /// The machine supports the instruction set of `V`; `element` is below the depth of the columns.
    unsafe fn take(&mut self, element: usize, weights: [V; VECTORS]);
}

/// Decodes columns of blocks of one format into a sink.
///
/// # Safety
/// The columns are inside the readable matrix, and the machine supports the instruction set of `V`.
#[inline(always)]
pub unsafe fn decode_columns<V: Lanes, B: Unpack>(columns: &Columns, sink: &mut impl Sink<V>) {
    let Columns { stored, first_row, rows, first, depth, .. } = *columns;
    let (elements, bytes) = (B::BLOCK.elements(), B::BLOCK.bytes());
    debug_assert!(0 < rows && rows <= VECTORS * V::WIDTH && first_row + rows <= stored.rows);
    debug_assert!(rows.is_multiple_of(V::WIDTH));
    debug_assert!(first.is_multiple_of(SPAN_STEP) && depth.is_multiple_of(B::ELEMENTS));
    debug_assert!(depth <= DEPTH_BLOCK);
    // SAFETY: rows are whole blocks, and every piece is inside one; the words hold as many pieces as the depth has.
    unsafe {
        let row_bytes = stored.columns / elements * bytes;
        let start = stored.pointer.add((stored.first_row + first_row) * row_bytes);
        // Vectors beyond the last one repeat it.
        let mut vectors = [start; VECTORS];
        for (index, vector) in vectors.iter_mut().enumerate() {
            *vector = start.add((index * V::WIDTH).min(rows - V::WIDTH) * row_bytes);
        }
        // All scales are collected first: loading a vector right after storing its words would stall.
        let mut words = [[[0u32; MAX_LANES]; VECTORS]; MAX_PIECES];
        for (index, words) in words.iter_mut().enumerate().take(depth / B::ELEMENTS) {
            let at = (first + index * B::ELEMENTS) / elements * bytes + B::HALVES_AT;
            for (words, vector) in words.iter_mut().zip(&vectors) {
                let mut row = vector.add(at);
                for word in &mut words[..V::WIDTH] {
                    *word = row.cast::<u32>().read_unaligned();
                    row = row.wrapping_add(row_bytes);
                }
            }
        }
        let next = Next::of(columns, row_bytes, B::ELEMENTS);
        // Hidden from the compiler, which would unroll the loop and hold more weights than there are registers.
        let run_length = std::hint::black_box(RUN);
        let mut pieces = [Piece::<V>::empty(); VECTORS];
        for (index, words) in words.iter().enumerate().take(depth / B::ELEMENTS) {
            let (done, at) = (index * B::ELEMENTS, first + index * B::ELEMENTS);
            next.prefetch(at / B::ELEMENTS);
            for ((piece, vector), words) in pieces.iter_mut().zip(&vectors).zip(words) {
                let rows = BlockRows { first: vector.add(at / elements * bytes), stride: row_bytes };
                let halves = V::from_f16_pairs(words.as_ptr());
                B::unpack(rows, at % elements / SPAN_STEP, halves, piece);
            }
            for run in 0..B::ELEMENTS / RUN {
                for element in run * RUN..run * RUN + run_length {
                    let mut weights = [V::splat(0.0); VECTORS];
                    for (weight, piece) in weights.iter_mut().zip(&pieces) {
                        let code = V::from_words(V::widen_i8(piece.codes.as_ptr().add(element * V::WIDTH)));
                        *weight = if B::HAS_MINIMUM {
                            code.mul_add(piece.scales[run], piece.minimums[run])
                        } else {
                            code.mul(piece.scales[run])
                        };
                    }
                    sink.take(done + element, weights);
                }
            }
        }
    }
}

/// The rows that will be decoded next: contiguous memory, prefetched at the pace of the decoding.
#[derive(Clone, Copy)]
struct Next {
    start: *const u8,
    /// Bytes to prefetch for each piece of a row that is decoded.
    bytes: usize,
}

impl Next {
    fn of(columns: &Columns, row_bytes: usize, piece_elements: usize) -> Next {
        let stored = &columns.stored;
        let first = columns.next_row.unwrap_or(stored.rows).min(stored.rows);
        let rows = columns.rows.min(stored.rows - first);
        let start = stored.pointer.wrapping_add((stored.first_row + first) * row_bytes);
        Next { start, bytes: rows * row_bytes * piece_elements / stored.columns }
    }

    /// Prefetches the bytes that belong to one piece.
    #[inline(always)]
    fn prefetch(self, piece: usize) {
        let start = self.start.wrapping_add(piece * self.bytes);
        for at in (0..self.bytes).step_by(LINE_BYTES) {
            prefetch(start.wrapping_add(at));
        }
    }
}

/// Elements of one vector of rows: signed codes by element and row, and for each run a scale and a minimum to add.
#[derive(Clone, Copy)]
pub struct Piece<V> {
    pub(super) codes: [u8; MAX_ELEMENTS * MAX_LANES],
    pub(super) scales: [V; MAX_ELEMENTS / RUN],
    pub(super) minimums: [V; MAX_ELEMENTS / RUN],
}

impl<V: Lanes> Piece<V> {
    #[inline(always)]
    unsafe fn empty() -> Piece<V> {
        // SAFETY: the caller promises the instruction set.
        let zeros = unsafe { [V::splat(0.0); MAX_ELEMENTS / RUN] };
        Piece { codes: [0; MAX_ELEMENTS * MAX_LANES], scales: zeros, minimums: zeros }
    }

    #[inline(always)]
    pub(super) fn set_scale(&mut self, scale: V) {
        self.scales = [scale; MAX_ELEMENTS / RUN];
    }
}

/// One block of each row of a vector.
#[derive(Clone, Copy)]
pub struct BlockRows {
    pub(super) first: *const u8,
    /// Bytes from one row to the next.
    pub(super) stride: usize,
}

/// A format whose codes can be unpacked. A code times its scale, plus a minimum if there is one, is exact or rounded
/// once, so fused and separate arithmetic agree.
pub trait Unpack {
    const BLOCK: Block;
    /// Elements that are unpacked at once: a block of 32, or 64 of a larger one, its `quarter`.
    const ELEMENTS: usize;
    const HAS_MINIMUM: bool;
    /// The byte of a block at which it has two f16, at least one of them a scale.
    const HALVES_AT: usize = 0;

    /// Unpacks one block, or one `quarter` of it, of each row. `halves` are the two f16 of each block.
    ///
    /// # Safety
    /// The blocks are readable, and the machine supports the instruction set of `V`.
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>);
}

/// Sixteen bytes of each row, transposed.
type Bytes = [u8; RUN * MAX_LANES];

#[inline(always)]
pub(super) unsafe fn bytes_at<V: Lanes>(rows: BlockRows, offset: usize) -> Bytes {
    let mut bytes = [0; RUN * MAX_LANES];
    // SAFETY: the caller promises sixteen readable bytes; the target holds them for the widest vector.
    unsafe { V::transpose_bytes(rows.first.add(offset), rows.stride, bytes.as_mut_ptr()) };
    bytes
}

/// Writes the low nibbles of sixteen bytes as codes from element `low` on, and the high ones from `high` on.
#[inline(always)]
pub(super) fn split_nibbles<V: Lanes>(bytes: &Bytes, low: usize, high: usize, codes: &mut [u8]) {
    let count = RUN * V::WIDTH;
    let (first, second) = codes.split_at_mut(high * V::WIDTH);
    let (first, second) = (&mut first[low * V::WIDTH..][..count], &mut second[..count]);
    for ((byte, low), high) in bytes[..count].iter().zip(first).zip(second) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// Adds a fifth bit to the codes from `element` on: bit number `shift` of each byte.
#[inline(always)]
fn add_fifths<V: Lanes>(bytes: &[u8], shift: usize, element: usize, codes: &mut [u8]) {
    let codes = &mut codes[element * V::WIDTH..][..bytes.len()];
    for (code, byte) in codes.iter_mut().zip(bytes) {
        *code |= (byte >> shift & 1) << 4;
    }
}

/// Makes codes of `count` elements signed.
#[inline(always)]
pub(super) fn subtract<V: Lanes>(middle: u8, count: usize, codes: &mut [u8]) {
    for code in &mut codes[..count * V::WIDTH] {
        *code = code.wrapping_sub(middle);
    }
}

pub struct Q4_0;

impl Unpack for Q4_0 {
    const BLOCK: Block = Block::Q4_0;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 16 bytes of nibbles follow the scale.
        unsafe {
            split_nibbles::<V>(&bytes_at::<V>(rows, 2), 0, 16, &mut piece.codes);
            subtract::<V>(8, 32, &mut piece.codes);
            piece.set_scale(halves.0);
        }
    }
}

pub struct Q4_1;

impl Unpack for Q4_1 {
    const BLOCK: Block = Block::Q4_1;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 16 bytes of nibbles follow scale and minimum.
        unsafe {
            split_nibbles::<V>(&bytes_at::<V>(rows, 4), 0, 16, &mut piece.codes);
            piece.set_scale(halves.0);
            piece.minimums = [halves.1; 4];
        }
    }
}

/// Codes of five bits: four bytes of fifth bits at `at`, then the nibbles.
#[inline(always)]
unsafe fn five_bits<V: Lanes>(rows: BlockRows, at: usize, codes: &mut [u8]) {
    // SAFETY: the caller promises the twenty bytes.
    unsafe {
        split_nibbles::<V>(&bytes_at::<V>(rows, at + 4), 0, 16, codes);
        let fifths = bytes_at::<V>(rows, at);
        for element in 0..32 {
            let byte = &fifths[element / 8 * V::WIDTH..][..V::WIDTH];
            add_fifths::<V>(byte, element % 8, element, codes);
        }
    }
}

pub struct Q5_0;

impl Unpack for Q5_0 {
    const BLOCK: Block = Block::Q5_0;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: fifth bits and nibbles follow the scale.
        unsafe {
            five_bits::<V>(rows, 2, &mut piece.codes);
            subtract::<V>(16, 32, &mut piece.codes);
            piece.set_scale(halves.0);
        }
    }
}

pub struct Q5_1;

impl Unpack for Q5_1 {
    const BLOCK: Block = Block::Q5_1;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: fifth bits and nibbles follow scale and minimum.
        unsafe {
            five_bits::<V>(rows, 4, &mut piece.codes);
            piece.set_scale(halves.0);
            piece.minimums = [halves.1; 4];
        }
    }
}

pub struct Q8_0;

impl Unpack for Q8_0 {
    const BLOCK: Block = Block::Q8_0;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 32 codes follow the scale; the target holds them.
        unsafe {
            let BlockRows { first, stride } = rows;
            V::transpose_bytes(first.add(2), stride, piece.codes.as_mut_ptr());
            V::transpose_bytes(first.add(18), stride, piece.codes.as_mut_ptr().add(RUN * V::WIDTH));
            piece.set_scale(halves.0);
        }
    }
}

/// The scales and minimums of the two sub-blocks of a quarter of a q4_k or q5_k block: six bits each in twelve bytes.
#[inline(always)]
unsafe fn set_six_bit_scales<V: Lanes>(
    rows: BlockRows,
    quarter: usize,
    (scale, minimum): (V, V),
    piece: &mut Piece<V>,
) {
    // SAFETY: the caller promises a block, which begins with sixteen bytes of scales.
    unsafe {
        let header = bytes_at::<V>(rows, 0);
        for half in 0..2 {
            let index = 2 * quarter + half;
            let (mut scales, mut minimums) = ([0u8; MAX_LANES], [0u8; MAX_LANES]);
            for lane in 0..V::WIDTH {
                let byte = |at: usize| header[(4 + at) * V::WIDTH + lane];
                (scales[lane], minimums[lane]) = if quarter < 2 {
                    (byte(index) & 63, byte(index + 4) & 63)
                } else {
                    let low = byte(index + 4);
                    (low & 15 | byte(index - 4) >> 6 << 4, low >> 4 | byte(index) >> 6 << 4)
                };
            }
            let scale = scale.mul(V::from_words(V::widen_u8(scales.as_ptr())));
            let minimum = minimum.mul(V::from_words(V::widen_u8(minimums.as_ptr())));
            for run in 2 * half..2 * half + 2 {
                piece.scales[run] = scale;
                piece.minimums[run] = V::splat(-0.0).sub(minimum);
            }
        }
    }
}

/// The 64 codes of a quarter: low nibbles of 32 bytes, then high ones.
#[inline(always)]
unsafe fn quarter_nibbles<V: Lanes>(rows: BlockRows, at: usize, codes: &mut [u8]) {
    // SAFETY: the caller promises the 32 bytes.
    unsafe {
        split_nibbles::<V>(&bytes_at::<V>(rows, at), 0, 32, codes);
        split_nibbles::<V>(&bytes_at::<V>(rows, at + 16), 16, 48, codes);
    }
}

pub struct Q4K;

impl Unpack for Q4K {
    const BLOCK: Block = Block::Q4K;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: a quarter has 32 bytes of nibbles behind the scales.
        unsafe {
            quarter_nibbles::<V>(rows, 16 + 32 * quarter, &mut piece.codes);
            set_six_bit_scales(rows, quarter, halves, piece);
        }
    }
}

pub struct Q5K;

impl Unpack for Q5K {
    const BLOCK: Block = Block::Q5K;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = true;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: as for q4_k, with 32 bytes of fifth bits in front of the nibbles, a bit for each sub-block.
        unsafe {
            quarter_nibbles::<V>(rows, 48 + 32 * quarter, &mut piece.codes);
            for part in 0..2 {
                let fifths = bytes_at::<V>(rows, 16 + RUN * part);
                let fifths = &fifths[..RUN * V::WIDTH];
                add_fifths::<V>(fifths, 2 * quarter, RUN * part, &mut piece.codes);
                add_fifths::<V>(fifths, 2 * quarter + 1, 32 + RUN * part, &mut piece.codes);
            }
            set_six_bit_scales(rows, quarter, halves, piece);
        }
    }
}

pub struct Q6K;

impl Unpack for Q6K {
    const BLOCK: Block = Block::Q6K;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = false;
    const HALVES_AT: usize = 206;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: a half of 128 elements has 64 bytes of nibbles, whose low ones are its first quarter, 32 bytes of bit
        // pairs and 8 scales; the scale of the block is behind the sixteen scales, at the end of the block.
        unsafe {
            let (half, upper) = (quarter / 2, quarter % 2);
            for part in 0..2 {
                let pairs = bytes_at::<V>(rows, 128 + 32 * half + RUN * part);
                for sub_block in 0..2 {
                    let nibbles = bytes_at::<V>(rows, 64 * half + 32 * sub_block + RUN * part);
                    let codes = &mut piece.codes[(32 * sub_block + RUN * part) * V::WIDTH..];
                    let shift = 4 * upper + 2 * sub_block;
                    for ((code, nibble), pair) in
                        codes.iter_mut().zip(&nibbles).zip(&pairs).take(RUN * V::WIDTH)
                    {
                        *code = (nibble >> (4 * upper) & 15) | (pair >> shift & 3) << 4;
                    }
                }
            }
            subtract::<V>(32, 64, &mut piece.codes);
            let scales = bytes_at::<V>(rows, 192);
            for (run, target) in piece.scales.iter_mut().enumerate() {
                let scale = V::widen_i8(scales.as_ptr().add((4 * quarter + run) * V::WIDTH));
                *target = halves.1.mul(V::from_words(scale));
            }
        }
    }
}
