//! Packs the operands of a bf16 matmul into tiles, rounding to nearest even.
//!
//! A strip is 16 rows of the left operand, or 16 columns of the right one, over some depth: one tile of 1 KiB
//! per 32 of depth, padded with zeros. A left tile keeps the pairs of a row together (16 rows × 16 pairs),
//! a right tile the columns of a pair (16 pairs × 16 columns). Each is the transpose of the other in words of
//! 32 bits, so one transposition handles operands of either layout.
//! Like the units that multiply the tiles, rounding treats subnormal numbers as zero.
//! Left out: machines without AVX-512, which have no unit for the tiles.

use super::bf16_unit::{TILE, TILE_DEPTH, TILE_ELEMENTS};
use super::isa::{Avx512Lanes, prefetch};
use super::isa_x86::transpose_16x16;
use super::matmul_terms::Left;
use super::stored::{SPAN_STEP, Stored};
use smidgen_ir::{DType, Storage};
use std::arch::x86_64::*;

/// Columns of a right operand that one packing task handles: whole spans of every storage.
pub const PACK_COLUMNS: usize = SPAN_STEP;
/// Depth that one packing task handles.
pub const PACK_DEPTH: usize = 128;

/// A piece of a right operand (depth, columns) to pack into strips.
#[derive(Clone, Copy)]
pub struct RightPiece {
    pub stored: Stored,
    /// Whether the right operand is the transpose of the stored matrix.
    pub transposed: bool,
    pub scale: f32,
    /// Columns of the right operand, at most [`PACK_COLUMNS`].
    pub first_column: usize,
    pub columns: usize,
    /// Depth, at most [`PACK_DEPTH`].
    pub first_depth: usize,
    pub depth: usize,
    /// The first tile of the piece in the strip of its first column.
    pub tiles: *mut u16,
    /// Elements from a strip to the next.
    pub strip_elements: usize,
}

/// Decodes, scales, rounds and packs a piece of a right operand. Columns are padded to whole strips.
///
/// # Safety
/// The machine has AVX-512 with bf16; the piece is inside the readable stored matrix and begins where spans
/// may begin; the tiles are writable, and no other thread uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn pack_right<const P: usize>(piece: &RightPiece) {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match piece.transposed {
            true if P == 1 => pack_transposed(piece),
            true => pack_transposed_planes::<P>(piece),
            false => pack_as_stored::<P>(piece),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_transposed(piece: &RightPiece) {
    let direct = is_bf16(&piece.stored, piece.scale);
    let scale = _mm512_set1_ps(piece.scale);
    let mut decoded = [0.0f32; PACK_DEPTH];
    // Rows of words: a column of the operand, its pairs along depth.
    let mut words = [[_mm512_setzero_si512(); TILE]; PACK_DEPTH / TILE_DEPTH];
    for column in (0..piece.columns).step_by(TILE) {
        let used = TILE.min(piece.columns - column);
        for row in 0..TILE {
            if row >= used {
                for tile in &mut words {
                    tile[row] = _mm512_setzero_si512();
                }
                continue;
            }
            let stored_row = piece.first_column + column + row;
            // SAFETY: the row exists, the span is inside it; reads past the span are masked out.
            unsafe {
                if direct {
                    let at =
                        (piece.stored.first_row + stored_row) * piece.stored.row_stride + piece.first_depth;
                    let source = piece.stored.pointer.cast::<u16>().add(at);
                    for (tile, first) in words.iter_mut().zip((0..piece.depth).step_by(TILE_DEPTH)) {
                        let mask = first_mask32(piece.depth - first);
                        prefetch(source.wrapping_add(PACK_DEPTH + first));
                        tile[row] = _mm512_maskz_loadu_epi16(mask, source.add(first).cast());
                    }
                } else {
                    piece.stored.decode_span::<Avx512Lanes>(
                        stored_row,
                        piece.first_depth,
                        piece.depth,
                        decoded.as_mut_ptr(),
                    );
                    for (tile, first) in words.iter_mut().zip((0..piece.depth).step_by(TILE_DEPTH)) {
                        tile[row] = rounded(decoded.as_ptr().add(first), piece.depth - first, scale);
                    }
                }
            }
        }
        let strip = piece.tiles.wrapping_add(column / TILE * piece.strip_elements);
        for (index, tile) in words[..piece.depth.div_ceil(TILE_DEPTH)].iter().enumerate() {
            // SAFETY: the strip has a tile for each 32 steps of depth.
            unsafe { store_transposed(tile, strip.add(index * TILE_ELEMENTS)) };
        }
    }
}

/// Like `pack_transposed`, for several planes: numbers are transposed once, before they are split into planes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_transposed_planes<const P: usize>(piece: &RightPiece) {
    let scale = _mm512_set1_ps(piece.scale);
    let is_f32 = piece.stored.storage == Storage::Plain(DType::F32);
    let mut decoded = [[0.0f32; PACK_DEPTH]; TILE];
    for column in (0..piece.columns).step_by(TILE) {
        let used = TILE.min(piece.columns - column);
        let first_row = piece.first_column + column;
        let (source, stride) = if is_f32 {
            let row = piece.stored.first_row + first_row;
            let start = piece.stored.pointer.cast::<f32>();
            (start.wrapping_add(row * piece.stored.row_stride + piece.first_depth), piece.stored.row_stride)
        } else {
            for (row, decoded) in decoded[..used].iter_mut().enumerate() {
                let target = decoded.as_mut_ptr();
                // SAFETY: the row exists and the span is in it.
                unsafe {
                    piece.stored.decode_span::<Avx512Lanes>(
                        first_row + row,
                        piece.first_depth,
                        piece.depth,
                        target,
                    );
                }
            }
            (decoded.as_ptr().cast(), PACK_DEPTH)
        };
        let strip = piece.tiles.wrapping_add(column / TILE * piece.strip_elements);
        for first in (0..piece.depth).step_by(TILE_DEPTH) {
            // Sixteen steps of depth of sixteen columns, twice.
            let steps = [first, first + TILE].map(|first| {
                let mask = first_mask16(piece.depth.saturating_sub(first));
                let mut rows = [_mm512_setzero_si512(); TILE];
                for (row, words) in rows.iter_mut().enumerate() {
                    let start = source.wrapping_add(row * stride + first);
                    prefetch(start.wrapping_add(PACK_DEPTH));
                    let mask = if row < used { mask } else { 0 };
                    // SAFETY: masked lanes are not read.
                    *words = _mm512_castps_si512(unsafe { _mm512_maskz_loadu_ps(mask, start) });
                }
                transposed(&rows)
            });
            let steps = steps.as_flattened();
            for pair in 0..TILE {
                let numbers = [steps[2 * pair], steps[2 * pair + 1]]
                    .map(|step| _mm512_mul_ps(_mm512_castsi512_ps(step), scale));
                for (plane, words) in split_in_pairs::<P>(numbers).into_iter().enumerate() {
                    let at = place_of_pair::<P>(first + 2 * pair) + plane * TILE_ELEMENTS;
                    // SAFETY: the strip has P tiles for each 32 steps of depth.
                    unsafe { _mm512_storeu_si512(strip.add(at).cast(), words) };
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_as_stored<const P: usize>(piece: &RightPiece) {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match piece.stored.storage {
            _ if P == 1 && is_bf16(&piece.stored, piece.scale) => pack_bf16_as_stored(piece),
            Storage::Plain(DType::F32) => pack_f32_as_stored::<P>(piece),
            _ => pack_decoded::<P>(piece),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_decoded<const P: usize>(piece: &RightPiece) {
    let mut decoded = [[0.0f32; PACK_COLUMNS]; 2];
    for first in (0..piece.depth.next_multiple_of(TILE_DEPTH)).step_by(2) {
        for (step, row) in decoded.iter_mut().enumerate() {
            if first + step < piece.depth {
                // SAFETY: the stored row exists and the span is in it.
                unsafe {
                    piece.stored.decode_span::<Avx512Lanes>(
                        piece.first_depth + first + step,
                        piece.first_column,
                        piece.columns,
                        row.as_mut_ptr(),
                    );
                }
            } else {
                row.fill(0.0);
            }
        }
        // SAFETY: the rows have PACK_COLUMNS floats; strips have a tile for these steps of depth.
        unsafe { store_pair::<P>(piece, first, decoded[0].as_ptr(), Some(decoded[1].as_ptr())) };
    }
}

/// The element of a strip of P planes at which the pair of depths `first` and `first + 1` begins.
const fn place_of_pair<const P: usize>(first: usize) -> usize {
    first / TILE_DEPTH * P * TILE_ELEMENTS + first % TILE_DEPTH / 2 * TILE_DEPTH
}

/// Whether a right operand is exact in bf16: stored as bf16, and not scaled.
pub fn is_bf16(stored: &Stored, scale: f32) -> bool {
    stored.storage == Storage::Plain(DType::Bf16) && scale == 1.0
}

/// The address of the first stored element of the piece.
fn stored_start<T>(piece: &RightPiece) -> *const T {
    let first_row = piece.stored.first_row + piece.first_depth;
    let start = piece.stored.pointer.cast::<T>().wrapping_add(first_row * piece.stored.row_stride);
    start.wrapping_add(piece.first_column)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_f32_as_stored<const P: usize>(piece: &RightPiece) {
    let (start, stride) = (stored_start::<f32>(piece), piece.stored.row_stride);
    for first in (0..piece.depth).step_by(2) {
        let row = start.wrapping_add(first * stride);
        for step in [0, 1] {
            for column in (0..piece.columns).step_by(TILE) {
                prefetch(row.wrapping_add((PREFETCH_ROWS + step) * stride + column));
            }
        }
        let second = (first + 1 < piece.depth).then(|| row.wrapping_add(stride));
        // SAFETY: the rows exist; strips have tiles for this depth.
        unsafe { store_pair::<P>(piece, first, row, second) };
    }
    clear_rest::<P>(piece);
}

/// Stores a pair of rows of f32, times the scale; a missing second row is zeros.
///
/// # Safety
/// The rows are readable for the columns of the piece.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn store_pair<const P: usize>(
    piece: &RightPiece,
    first: usize,
    row: *const f32,
    second: Option<*const f32>,
) {
    let scale = _mm512_set1_ps(piece.scale);
    let at = place_of_pair::<P>(first);
    for strip in 0..piece.columns.div_ceil(TILE) {
        let mask = first_mask16(piece.columns - strip * TILE);
        // SAFETY: masked lanes are not read; the strip has a tile for these steps of depth.
        unsafe {
            let load = |row: *const f32| {
                _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, row.wrapping_add(strip * TILE)), scale)
            };
            let planes = split_in_pairs::<P>([load(row), second.map_or(_mm512_setzero_ps(), load)]);
            let target = piece.tiles.add(strip * piece.strip_elements + at);
            for (plane, words) in planes.into_iter().enumerate() {
                _mm512_storeu_si512(target.add(plane * TILE_ELEMENTS).cast(), words);
            }
        }
    }
}

/// Zeros after the last pair of rows, up to whole tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn clear_rest<const P: usize>(piece: &RightPiece) {
    for first in (piece.depth.next_multiple_of(2)..piece.depth.next_multiple_of(TILE_DEPTH)).step_by(2) {
        let at = place_of_pair::<P>(first);
        for strip in 0..piece.columns.div_ceil(TILE) {
            let target = piece.tiles.wrapping_add(strip * piece.strip_elements + at);
            for plane in 0..P {
                // SAFETY: the strip has P tiles for these steps of depth.
                unsafe {
                    _mm512_storeu_si512(target.add(plane * TILE_ELEMENTS).cast(), _mm512_setzero_si512());
                }
            }
        }
    }
}

/// Two stored rows and two strips at a time: 32 columns of both rows become words of pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_bf16_as_stored(piece: &RightPiece) {
    let (start, stride) = (stored_start::<u16>(piece), piece.stored.row_stride);
    let low = load_halves(&PAIRS_LOW);
    let high = load_halves(&PAIRS_HIGH);
    for first in (0..piece.depth).step_by(2) {
        let at = place_of_pair::<1>(first);
        for column in (0..piece.columns).step_by(2 * TILE) {
            let mask = first_mask32(piece.columns - column);
            let source = start.wrapping_add(first * stride + column);
            prefetch(source.wrapping_add(PREFETCH_ROWS * stride));
            prefetch(source.wrapping_add((PREFETCH_ROWS + 1) * stride));
            let second_mask = if first + 1 < piece.depth { mask } else { 0 };
            let target = piece.tiles.wrapping_add(column / TILE * piece.strip_elements + at);
            // SAFETY: masked lanes are not read; the strips have a tile for these steps of depth.
            unsafe {
                let row = _mm512_maskz_loadu_epi16(mask, source.cast());
                let second = _mm512_maskz_loadu_epi16(second_mask, source.wrapping_add(stride).cast());
                _mm512_storeu_si512(target.cast(), _mm512_permutex2var_epi16(row, low, second));
                if piece.columns - column > TILE {
                    let next_strip = target.add(piece.strip_elements).cast();
                    _mm512_storeu_si512(next_strip, _mm512_permutex2var_epi16(row, high, second));
                }
            }
        }
    }
    clear_rest::<1>(piece);
}

/// Permutations that pair the halves of two registers (the second counts from 32), for columns 0 to 15 and 16 to 31.
static PAIRS_LOW: [u16; 32] = alternating(0, 32);
static PAIRS_HIGH: [u16; 32] = alternating(16, 48);
/// Pairs the halves of the low and the high part of one register.
static INTERLEAVED: [u16; 32] = alternating(0, 16);

/// `first`, `second`, `first + 1`, `second + 1`, …
const fn alternating(first: u16, second: u16) -> [u16; 32] {
    let mut indices = [0; 32];
    let mut column = 0;
    while column < 16 {
        indices[2 * column] = first + column as u16;
        indices[2 * column + 1] = second + column as u16;
        column += 1;
    }
    indices
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn load_halves(halves: &[u16; 32]) -> __m512i {
    // SAFETY: 32 halves are a register.
    unsafe { _mm512_loadu_si512(halves.as_ptr().cast()) }
}

/// Rows of a right operand, or tiles of a left one, to prefetch: they are too far apart for the hardware prefetcher.
const PREFETCH_ROWS: usize = 24;

/// Depth of a left operand to prefetch.
const PREFETCH_DEPTH: usize = 4 * TILE_DEPTH;

/// A piece of a left operand (rows, depth) to pack into strips.
#[derive(Clone, Copy)]
pub struct LeftPiece {
    /// Points to the first row and depth of the piece.
    pub left: Left,
    pub rows: usize,
    pub depth: usize,
    /// The first tile of the piece in the strip of its first row.
    pub tiles: *mut u16,
    /// Elements from a strip to the next.
    pub strip_elements: usize,
}

/// Rounds and packs a piece of a left operand. Rows are padded to whole strips.
///
/// # Safety
/// The machine has AVX-512 with bf16; the rows are readable; the tiles are writable, and no other thread uses them.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub unsafe fn pack_left<const P: usize>(piece: &LeftPiece) {
    // SAFETY: the caller's promises; every strip has a tile for each 32 steps of depth.
    unsafe {
        if piece.left.depth_stride == 1 {
            pack_rows::<P>(piece);
        } else {
            pack_columns::<P>(piece);
        }
    }
}

/// Packs rows that are contiguous along depth, tile by tile, so that the written tile stays in the L1 cache.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_rows<const P: usize>(piece: &LeftPiece) {
    for first_row in (0..piece.rows).step_by(TILE) {
        let rows = TILE.min(piece.rows - first_row);
        let strip = piece.tiles.wrapping_add(first_row / TILE * piece.strip_elements);
        let source = piece.left.pointer.wrapping_add(first_row * piece.left.row_stride);
        let next_rows = (TILE * piece.left.row_stride + PREFETCH_DEPTH)
            .wrapping_sub(piece.depth.next_multiple_of(TILE_DEPTH));
        for (tile, first) in (0..piece.depth).step_by(TILE_DEPTH).enumerate() {
            let masks =
                (first_mask16(piece.depth - first), first_mask16((piece.depth - first).saturating_sub(16)));
            // Past the end of these rows, prefetch the next sixteen.
            let ahead = if first + PREFETCH_DEPTH < piece.depth { PREFETCH_DEPTH } else { next_rows };
            for row in 0..TILE {
                let start = source.wrapping_add(row * piece.left.row_stride + first);
                prefetch(start.wrapping_add(ahead));
                prefetch(start.wrapping_add(ahead + TILE));
                // SAFETY: the row is readable for its depth, masked lanes are not read; the strip has this tile.
                unsafe {
                    let planes = if row < rows {
                        let low = _mm512_maskz_loadu_ps(masks.0, start);
                        let high = _mm512_maskz_loadu_ps(masks.1, start.wrapping_add(TILE));
                        split_in_order::<P>([low, high])
                    } else {
                        [_mm512_setzero_si512(); P]
                    };
                    let target = strip.add(tile * P * TILE_ELEMENTS + row * TILE_DEPTH);
                    for (plane, words) in planes.into_iter().enumerate() {
                        _mm512_storeu_si512(target.add(plane * TILE_ELEMENTS).cast(), words);
                    }
                }
            }
        }
    }
}

/// Packs a left operand whose neighbours in memory are in the same column, or scattered. All rows of one depth come
/// before the next depth.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_columns<const P: usize>(piece: &LeftPiece) {
    let Left { pointer, row_stride, depth_stride } = piece.left;
    let offsets = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(row_stride as i32),
    );
    for (tile, first) in (0..piece.depth).step_by(TILE_DEPTH).enumerate() {
        for first_row in (0..piece.rows).step_by(TILE) {
            let mask = first_mask16(piece.rows - first_row);
            let source = pointer.wrapping_add(first_row * row_stride);
            let column = |step: usize| {
                if step >= piece.depth {
                    return _mm512_setzero_ps();
                }
                let start = source.wrapping_add(step * depth_stride);
                // SAFETY: the rows are readable at this step of depth.
                unsafe {
                    match row_stride {
                        1 => _mm512_maskz_loadu_ps(mask, start),
                        _ => _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), mask, offsets, start.cast()),
                    }
                }
            };
            let mut words = [[_mm512_setzero_si512(); TILE]; P];
            for pair in 0..TILE {
                let columns = [column(first + 2 * pair), column(first + 2 * pair + 1)];
                for (plane, pairs) in words.iter_mut().zip(split_in_pairs::<P>(columns)) {
                    plane[pair] = pairs;
                }
            }
            let strip = piece.tiles.wrapping_add(first_row / TILE * piece.strip_elements);
            for (plane, words) in words.iter().enumerate() {
                // SAFETY: the strip has these tiles.
                unsafe { store_transposed(words, strip.add((tile * P + plane) * TILE_ELEMENTS)) };
            }
        }
    }
}

#[inline(always)]
fn first_mask16(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

#[inline(always)]
fn first_mask32(count: usize) -> __mmask32 {
    if count >= 32 { !0 } else { (1 << count) - 1 }
}

/// The first `count` of 32 floats times `scale` as bf16, then zeros.
///
/// # Safety
/// `source` is readable for min(count, 32) floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn rounded(source: *const f32, count: usize, scale: __m512) -> __m512i {
    // SAFETY: masked lanes are not read.
    let numbers = unsafe {
        let low = _mm512_maskz_loadu_ps(first_mask16(count), source);
        let high = _mm512_maskz_loadu_ps(first_mask16(count.saturating_sub(16)), source.wrapping_add(16));
        [_mm512_mul_ps(low, scale), _mm512_mul_ps(high, scale)]
    };
    let [halves] = split_in_order(numbers);
    halves
}

/// Splits 32 numbers into P planes of bf16, the largest plane first; halves of a plane keep the order of the numbers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn split_in_order<const P: usize>(numbers: [__m512; 2]) -> [__m512i; P] {
    split(numbers, |halves| {
        let widened = |half| _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half));
        let high = _mm512_extracti64x4_epi64::<1>(halves);
        (halves, [widened(_mm512_castsi512_si256(halves)), widened(high)])
    })
}

/// Like `split_in_order`, but word i of a plane holds number i in its low half and number 16 + i in its high half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn split_in_pairs<const P: usize>(numbers: [__m512; 2]) -> [__m512i; P] {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let places = load_halves(&INTERLEAVED);
    split(numbers, |halves| {
        let words = _mm512_permutexvar_epi16(places, halves);
        (words, [_mm512_slli_epi32::<16>(words), _mm512_and_si512(words, upper)])
    })
}

/// Rounds the remainder of the numbers to bf16, P times. `arrange` orders a plane and widens it again.
/// Differences are exact, and three planes hold the 24 bits of every number that is not tiny.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn split<const P: usize>(
    numbers: [__m512; 2],
    arrange: impl Fn(__m512i) -> (__m512i, [__m512i; 2]),
) -> [__m512i; P] {
    let mut planes = [_mm512_setzero_si512(); P];
    let mut rest = numbers;
    for (index, plane) in planes.iter_mut().enumerate() {
        let [first, second] = if P > 1 && index == 0 { rest.map(|numbers| bounded(numbers)) } else { rest };
        // SAFETY: both types are 512 bits and accept any value.
        let halves = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) };
        let (words, widened) = arrange(halves);
        *plane = words;
        if index + 1 < P {
            rest = [0, 1].map(|half| _mm512_sub_ps(rest[half], _mm512_castsi512_ps(widened[half])));
        }
    }
    planes
}

/// Clamps numbers to the range of bf16: the largest f32 numbers would be rounded to infinity. NaN and infinities
/// reach the result through the later planes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn bounded(numbers: __m512) -> __m512 {
    const LESSER_MAGNITUDE_WITH_FIRST_SIGN: i32 = 0b0010;
    let largest = _mm512_castsi512_ps(_mm512_set1_epi32(0x7f7f_0000));
    _mm512_range_ps::<LESSER_MAGNITUDE_WITH_FIRST_SIGN>(numbers, largest)
}

/// Writes the transpose of 16 × 16 words.
///
/// # Safety
/// `target` is writable for a tile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn store_transposed(rows: &[__m512i; TILE], target: *mut u16) {
    for (column, words) in transposed(rows).into_iter().enumerate() {
        // SAFETY: a tile is 16 rows of 32 elements.
        unsafe { _mm512_storeu_si512(target.add(column * TILE_DEPTH).cast(), words) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn transposed(rows: &[__m512i; TILE]) -> [__m512i; TILE] {
    // SAFETY: both vector types are 512 bits and accept any value; the features of this function include AVX-512.
    unsafe {
        let rows = std::mem::transmute::<[__m512i; TILE], [__m512; TILE]>(*rows);
        std::mem::transmute::<[__m512; TILE], [__m512i; TILE]>(transpose_16x16(rows))
    }
}
