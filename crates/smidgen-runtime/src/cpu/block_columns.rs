//! As `gguf_columns.rs`, for formats with a table of numbers, with scales in few bits, or as GPTQ has them.
//!
//! Left out: the decoding of columns, and the formats that the first GGUF files had.

use super::gguf_columns::{BlockRows, MAX_LANES, Piece, RUN, Unpack, bytes_at, split_nibbles, subtract};
pub use super::gguf_columns::{Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use super::isa::Lanes;
use smidgen_ir::Block;
use smidgen_ir::quant::blocks::{E2M1_DOUBLED, IQ4_NUMBERS, half_power, iq4_scale, q3_scale};

/// Evaluates an expression in which `$format` is the type of a block format.
macro_rules! with_format {
    ($block:expr, $format:ident => $result:expr) => {{
        use super::block_columns as formats;
        use smidgen_ir::Block;
        with_format!(@ $block, $format => $result; Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Iq4Nl Iq4Xs Mxfp4 Int4By32 Int4By128)
    }};
    (@ $block:expr, $format:ident => $result:expr; $($name:ident)*) => {
        match $block {
            $(Block::$name => {
                type $format = formats::$name;
                $result
            })*
        }
    };
}
pub(super) use with_format;

/// The codes of 32 elements, nibbles that mean the numbers of a table, from element `to` on.
#[inline(always)]
unsafe fn look_up<V: Lanes>(rows: BlockRows, at: usize, numbers: &[i8; 16], to: usize, codes: &mut [u8]) {
    let codes = &mut codes[to * V::WIDTH..][..2 * RUN * V::WIDTH];
    // SAFETY: the caller promises the sixteen bytes.
    split_nibbles::<V>(&unsafe { bytes_at::<V>(rows, at) }, 0, 16, codes);
    for code in codes {
        *code = numbers[usize::from(*code & 15)] as u8;
    }
}

/// A number of each row of a vector, from its block.
#[inline(always)]
unsafe fn each_row<V: Lanes>(rows: BlockRows, number: impl Fn(*const u8) -> f32) -> V {
    let mut numbers = [0.0f32; MAX_LANES];
    for (lane, target) in numbers.iter_mut().enumerate().take(V::WIDTH) {
        *target = number(rows.first.wrapping_add(lane * rows.stride));
    }
    // SAFETY: there is a number for each lane.
    unsafe { V::load(numbers.as_ptr()) }
}

pub struct Iq4Nl;

impl Unpack for Iq4Nl {
    const BLOCK: Block = Block::Iq4Nl;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 16 bytes of nibbles follow the scale.
        unsafe { look_up::<V>(rows, 2, &IQ4_NUMBERS, 0, &mut piece.codes) };
        piece.set_scale(halves.0);
    }
}

pub struct Iq4Xs;

impl Unpack for Iq4Xs {
    const BLOCK: Block = Block::Iq4Xs;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: eight bytes of scales, then 16 bytes of nibbles for each 32 elements.
        unsafe {
            for part in 0..2 {
                let sub = 2 * quarter + part;
                look_up::<V>(rows, 8 + 16 * sub, &IQ4_NUMBERS, 32 * part, &mut piece.codes);
                let scale: V =
                    each_row(rows, |block| f32::from(iq4_scale(&block.cast::<[u8; 8]>().read(), sub)));
                piece.scales[2 * part] = halves.0.mul(scale);
                piece.scales[2 * part + 1] = piece.scales[2 * part];
            }
        }
    }
}

pub struct Mxfp4;

impl Unpack for Mxfp4 {
    const BLOCK: Block = Block::Mxfp4;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, _halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 16 bytes of nibbles follow the byte of the scale.
        unsafe {
            look_up::<V>(rows, 1, &E2M1_DOUBLED, 0, &mut piece.codes);
            piece.set_scale(each_row(rows, |block| half_power(block.read())));
        }
    }
}

/// `count` codes of blocks of GPTQ from byte `at` on, two in a byte, minus the number that the block has in its third byte.
#[inline(always)]
unsafe fn int4_codes<V: Lanes>(rows: BlockRows, at: usize, count: usize, codes: &mut [u8]) {
    // SAFETY: the caller promises the block.
    unsafe {
        let head = bytes_at::<V>(rows, 0);
        let zeros = &head[2 * V::WIDTH..3 * V::WIDTH];
        for run in 0..count / 32 {
            let bytes = bytes_at::<V>(rows, at + RUN * run);
            let pairs = codes[32 * run * V::WIDTH..].chunks_exact_mut(2 * V::WIDTH);
            for (byte, pair) in bytes.chunks_exact(V::WIDTH).zip(pairs).take(RUN) {
                let (high, low) = pair.split_at_mut(V::WIDTH);
                for (lane, byte) in byte.iter().enumerate() {
                    high[lane] = (byte >> 4).wrapping_sub(zeros[lane]);
                    low[lane] = (byte & 15).wrapping_sub(zeros[lane]);
                }
            }
        }
    }
}

pub struct Int4By32;

impl Unpack for Int4By32 {
    const BLOCK: Block = Block::Int4By32;
    const ELEMENTS: usize = 32;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, _quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 16 bytes of codes follow scale and zero.
        unsafe { int4_codes::<V>(rows, 4, 32, &mut piece.codes) };
        piece.set_scale(halves.0);
    }
}

pub struct Int4By128;

impl Unpack for Int4By128 {
    const BLOCK: Block = Block::Int4By128;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = false;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: 64 bytes of codes follow scale and zero.
        unsafe { int4_codes::<V>(rows, 4 + 32 * quarter, 64, &mut piece.codes) };
        piece.set_scale(halves.0);
    }
}

/// The pairs of bits of a quarter of a q2_k or q3_k block, as codes; `at` is where the pairs of the block begin.
#[inline(always)]
unsafe fn quarter_pairs<V: Lanes>(rows: BlockRows, at: usize, quarter: usize, codes: &mut [u8]) {
    // SAFETY: the caller promises the block.
    unsafe {
        for run in 0..2 {
            let bytes = bytes_at::<V>(rows, at + quarter / 2 * 32 + RUN * run);
            for part in 0..2 {
                let shift = (quarter % 2 * 2 + part) * 2;
                let codes = &mut codes[(32 * part + RUN * run) * V::WIDTH..][..RUN * V::WIDTH];
                for (code, byte) in codes.iter_mut().zip(&bytes) {
                    *code = byte >> shift & 3;
                }
            }
        }
    }
}

pub struct Q2K;

impl Unpack for Q2K {
    const BLOCK: Block = Block::Q2K;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = true;
    const HALVES_AT: usize = 80;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: sixteen bytes of scales and minimums come first, then pairs of bits.
        unsafe {
            quarter_pairs::<V>(rows, 16, quarter, &mut piece.codes);
            for run in 0..4 {
                let sub = |block: *const u8| block.add(4 * quarter + run).read();
                let scale: V = each_row(rows, |block| f32::from(sub(block) & 15));
                let minimum: V = each_row(rows, |block| f32::from(sub(block) >> 4));
                piece.scales[run] = halves.0.mul(scale);
                piece.minimums[run] = V::splat(-0.0).sub(halves.1.mul(minimum));
            }
        }
    }
}

pub struct Q3K;

impl Unpack for Q3K {
    const BLOCK: Block = Block::Q3K;
    const ELEMENTS: usize = 64;
    const HAS_MINIMUM: bool = false;
    const HALVES_AT: usize = 106;

    #[inline(always)]
    unsafe fn unpack<V: Lanes>(rows: BlockRows, quarter: usize, halves: (V, V), piece: &mut Piece<V>) {
        // SAFETY: third bits, a bit for each 32 elements, then pairs of bits, then scales and the scale of the block.
        unsafe {
            quarter_pairs::<V>(rows, 32, quarter, &mut piece.codes);
            for run in 0..2 {
                let thirds = bytes_at::<V>(rows, RUN * run);
                for part in 0..2 {
                    let codes = &mut piece.codes[(32 * part + RUN * run) * V::WIDTH..][..RUN * V::WIDTH];
                    for (code, byte) in codes.iter_mut().zip(&thirds) {
                        *code |= (byte >> (2 * quarter + part) & 1) << 2;
                    }
                }
            }
            subtract::<V>(4, 64, &mut piece.codes);
            for run in 0..4 {
                let scale: V = each_row(rows, |block| {
                    f32::from(q3_scale(&block.add(96).cast::<[u8; 12]>().read(), 4 * quarter + run))
                });
                piece.scales[run] = halves.1.mul(scale);
            }
        }
    }
}
