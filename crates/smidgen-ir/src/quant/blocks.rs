//! Blocks element by element, and the encoder of q8_0.
//!
//! Layouts and arithmetic are ggml's: one scale, or a scale and a minimum, in f16 for 32 elements; the K
//! formats have 256 with a small scale for each 16 or 32 of them. Nibbles hold element j low and
//! element j + 16 (or + 32) high; in the blocks of GPTQ, neighbouring elements share a byte.
//! Left out: the encoders that search for the best scales (`k_blocks.rs`).

use super::{largest_magnitude, read_f16};
use crate::Block;
use half::f16;

/// What the codes of iq4_nl and iq4_xs mean.
pub const IQ4_NUMBERS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the codes of mxfp4 mean.
pub const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The numbers of a table as floats.
pub const fn floats_of(numbers: &[i8; 16]) -> [f32; 16] {
    let (mut floats, mut at) = ([0.0; 16], 0);
    while at < 16 {
        floats[at] = numbers[at] as f32;
        at += 1;
    }
    floats
}

/// Half of the power of two that a byte means: 2^(byte - 128), so that it multiplies doubled codes.
pub const fn half_power(byte: u8) -> f32 {
    f32::from_bits(if byte < 2 { 0x0020_0000 << byte } else { (byte as u32 - 1) << 23 })
}

/// Decodes elements `first..first + target.len()` of blocks that follow each other.
pub fn decode(block: Block, bytes: &[u8], first: usize, target: &mut [f32]) {
    let (elements, width) = (block.elements(), block.bytes());
    let mut whole = [0.0; 256];
    let mut done = 0;
    while done < target.len() {
        let (index, inside) = ((first + done) / elements, (first + done) % elements);
        let count = (elements - inside).min(target.len() - done);
        decode_block(block, &bytes[index * width..][..width], &mut whole[..elements]);
        target[done..done + count].copy_from_slice(&whole[inside..inside + count]);
        done += count;
    }
}

fn decode_block(block: Block, bytes: &[u8], target: &mut [f32]) {
    let scale = match block {
        Block::Q2K => read_f16(bytes, 80),
        Block::Q3K => read_f16(bytes, 108),
        Block::Q6K => read_f16(bytes, 208),
        Block::Mxfp4 => half_power(bytes[0]),
        _ => read_f16(bytes, 0),
    };
    let minimum = || read_f16(bytes, 2);
    for (at, value) in target.iter_mut().enumerate() {
        *value = match block {
            Block::Q4_0 => scale * (f32::from(nibble_of_32(&bytes[2..], at)) - 8.0),
            Block::Q4_1 => scale * f32::from(nibble_of_32(&bytes[4..], at)) + minimum(),
            Block::Q5_0 => scale * (f32::from(five_bits(&bytes[2..], at)) - 16.0),
            Block::Q5_1 => scale * f32::from(five_bits(&bytes[4..], at)) + minimum(),
            Block::Q8_0 => scale * f32::from(bytes[2 + at] as i8),
            Block::Q4K => {
                let (sub_scale, sub_minimum) = six_bit_scales(&bytes[4..16], at / 32);
                scale * sub_scale * f32::from(nibble_of_64(&bytes[16..], at)) - minimum() * sub_minimum
            }
            Block::Q5K => {
                let (sub_scale, sub_minimum) = six_bit_scales(&bytes[4..16], at / 32);
                let fifth = bytes[16 + at % 32] >> (at / 32) & 1;
                let code = nibble_of_64(&bytes[48..], at) | fifth << 4;
                scale * sub_scale * f32::from(code) - minimum() * sub_minimum
            }
            Block::Q2K => {
                let sub = bytes[at / 16];
                let code = bytes[16 + at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3;
                let minimum = read_f16(bytes, 82) * f32::from(sub >> 4);
                scale * f32::from(sub & 15) * f32::from(code) - minimum
            }
            Block::Q3K => {
                let pair = bytes[32 + at / 128 * 32 + at % 32] >> (at % 128 / 32 * 2) & 3;
                let third = bytes[at % 32] >> (at / 32) & 1;
                let sub_scale = f32::from(q3_scale(&bytes[96..108], at / 16));
                scale * sub_scale * (f32::from(pair | third << 2) - 4.0)
            }
            Block::Iq4Nl => scale * f32::from(IQ4_NUMBERS[usize::from(nibble_of_32(&bytes[2..], at))]),
            Block::Iq4Xs => {
                let code = nibble_of_32(&bytes[8 + at / 32 * 16..], at % 32);
                scale * f32::from(iq4_scale(bytes, at / 32)) * f32::from(IQ4_NUMBERS[usize::from(code)])
            }
            Block::Mxfp4 => scale * f32::from(E2M1_DOUBLED[usize::from(nibble_of_32(&bytes[1..], at))]),
            Block::Int4By32 | Block::Int4By128 => {
                let code = bytes[4 + at / 2] >> (4 - at % 2 * 4) & 15;
                scale * (f32::from(code) - f32::from(bytes[2]))
            }
            Block::Q6K => {
                // In a half of 128, parts of 32 share bytes: low nibbles for two of them, high for two.
                let (half, part, lane) = (at / 128, at % 128 / 32, at % 32);
                let byte = bytes[64 * half + 32 * (part % 2) + lane];
                let low = if part < 2 { byte & 15 } else { byte >> 4 };
                let pair = bytes[128 + 32 * half + lane] >> (2 * part) & 3;
                let sub_scale = f32::from(bytes[192 + at / 16] as i8);
                scale * sub_scale * (f32::from(low | pair << 4) - 32.0)
            }
        };
    }
}

fn nibble_of_32(nibbles: &[u8], at: usize) -> u8 {
    if at < 16 { nibbles[at] & 15 } else { nibbles[at - 16] >> 4 }
}

fn nibble_of_64(nibbles: &[u8], at: usize) -> u8 {
    let byte = nibbles[at / 64 * 32 + at % 32];
    if at % 64 < 32 { byte & 15 } else { byte >> 4 }
}

/// Four bytes of fifth bits, then nibbles.
fn five_bits(bytes: &[u8], at: usize) -> u8 {
    nibble_of_32(&bytes[4..], at) | (bytes[at / 8] >> (at % 8) & 1) << 4
}

/// Scale and minimum of a sub-block, six bits each.
fn six_bit_scales(bytes: &[u8], index: usize) -> (f32, f32) {
    let (scale, minimum) = if index < 4 {
        (bytes[index] & 63, bytes[index + 4] & 63)
    } else {
        let low = bytes[index + 4];
        (low & 15 | bytes[index - 4] >> 6 << 4, low >> 4 | bytes[index] >> 6 << 4)
    };
    (f32::from(scale), f32::from(minimum))
}

/// Scale of a sub-block of q3_k: six bits in twelve bytes, minus 32.
pub fn q3_scale(bytes: &[u8], index: usize) -> i8 {
    let low = bytes[index % 8] >> (index / 8 * 4) & 15;
    let high = bytes[8 + index % 4] >> (index / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Scale of a sub-block of iq4_xs: four bits and two bits, which follow the scale of the block, minus 32.
pub fn iq4_scale(bytes: &[u8], index: usize) -> i8 {
    let low = bytes[4 + index / 2] >> (index % 2 * 4) & 15;
    let high = bytes[2 + index / 4] >> (index % 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Encodes 32 elements. Codes come from the scale before it is rounded to f16.
pub fn encode_q8_0(values: &[f32], target: &mut [u8]) {
    let scale = largest_magnitude(values) / 127.0;
    let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    target[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (value, code) in values.iter().zip(&mut target[2..]) {
        *code = round_half_away(value * reciprocal) as u8;
    }
}

/// The nearest whole number; ties go to the larger magnitude.
fn round_half_away(value: f32) -> i8 {
    let magnitude = value.abs();
    let whole = magnitude as i32;
    let rounded = whole + i32::from(magnitude - whole as f32 >= 0.5);
    (if value < 0.0 { -rounded } else { rounded }) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(hexadecimal: &str) -> Vec<u8> {
        let digits = hexadecimal.as_bytes().chunks(2);
        digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    /// The first block of `blk.0.attn_q.weight` of SmolLM2-135M-Instruct in q4_1.
    #[test]
    fn a_block_of_a_published_model_in_q4_1() {
        let bytes = bytes_of("0f30d8b9458765406f65164b677664502267655a");
        let mut decoded = [0.0; 4];
        decode(Block::Q4_1, &bytes, 0, &mut decoded);
        assert_eq!(decoded, [-0.096_313_48, 0.157_348_63, -0.096_313_48, -0.730_468_75]);
    }

    /// The first elements of `token_embd.weight` of the same model in q8_0.
    #[test]
    fn a_block_of_a_published_model_in_q8_0() {
        let mut bytes = bytes_of("3219d60d13f7");
        bytes.resize(34, 0);
        let mut decoded = [0.0; 4];
        decode(Block::Q8_0, &bytes, 0, &mut decoded);
        // Known to eight decimals.
        for (got, want) in decoded.into_iter().zip([-0.106_544_49, 0.032_978_06, 0.048_198_7, -0.022_830_96])
        {
            assert!((f64::from(got) - want).abs() < 6e-9, "{decoded:?}");
        }
    }
}
