//! bitsandbytes' 4-bit storages: what the codes mean, and how weights become codes and scales.
//!
//! A block's scale is its largest magnitude; a scaled weight takes the nearest code, and the lower value at a tie. As in
//! the library, whole blocks are multiplied by the reciprocal of the scale, a short last block is divided by it, and the
//! scale of a short block is at least 1e-38: each of these can decide a tie. This follows the library's CPU path, not its
//! CUDA path.

use super::dynamic_map::{SIGNED_MAP, encode_group};
use super::{cascade_sum, largest_magnitude, read_f32};
use crate::Code4;
use crate::storage::{BNB4_BLOCK, BNB4_GROUP, bnb4_parts};

static NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// 0, 1/192, 2/3, 1, 1/3, 1/2, 1/6, 1/4, and their negatives.
static FP4: [f32; 16] = [
    0.0,
    0.005_208_333_5,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_5,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// Codes by ascending value. FP4 has two zeros: the library uses code 0 up to zero and code 8 above.
static NF4_ORDER: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
static FP4_ORDER: [u8; 16] = [11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3];

static NF4_THRESHOLDS: [f32; 15] = thresholds(&NF4, &NF4_ORDER);
static FP4_THRESHOLDS: [f32; 15] = thresholds(&FP4, &FP4_ORDER);

const fn thresholds(values: &[f32; 16], order: &[u8; 16]) -> [f32; 15] {
    let mut between = [0.0; 15];
    let mut at = 0;
    while at < 15 {
        between[at] = (values[order[at] as usize] + values[order[at + 1] as usize]) / 2.0;
        at += 1;
    }
    between
}

const LEAST_SCALE: f32 = 1e-38;

/// The values of the sixteen codes, for a scale of 1.
pub fn code_values(code: Code4) -> &'static [f32; 16] {
    match code {
        Code4::Nf4 => &NF4,
        Code4::Fp4 => &FP4,
    }
}

/// The scale of a block in a tensor of this many elements.
pub fn block_scale(double: bool, elements: usize, bytes: &[u8], block: usize) -> f32 {
    let parts = bnb4_parts(elements, double);
    if !double {
        return read_f32(bytes, parts.scales + 4 * block);
    }
    let group = read_f32(bytes, parts.group_scales + 4 * (block / BNB4_GROUP));
    SIGNED_MAP[usize::from(bytes[parts.scales + block])] * group + read_f32(bytes, parts.offset)
}

/// Decodes elements `first..first + target.len()` of the flattened tensor.
pub fn decode(code: Code4, double: bool, elements: usize, bytes: &[u8], first: usize, target: &mut [f32]) {
    let values = code_values(code);
    let mut scale = 0.0;
    let mut block = usize::MAX;
    for (element, value) in (first..).zip(target) {
        if element / BNB4_BLOCK != block {
            block = element / BNB4_BLOCK;
            scale = block_scale(double, elements, bytes, block);
        }
        let byte = bytes[element / 2];
        let nibble = if element % 2 == 0 { byte >> 4 } else { byte & 15 };
        *value = values[usize::from(nibble)] * scale;
    }
}

/// Some groups of scales that are to be encoded as bytes.
#[derive(Debug)]
pub struct ScalePart<'a> {
    scales: &'a [f32],
    /// The mean of all scales of the tensor.
    offset: f32,
    codes: &'a mut [u8],
    group_scales: &'a mut [u8],
}

/// The scales of a tensor of this many elements in parts of `groups` groups; their offset is written here.
pub fn scale_parts<'a>(
    scales: &'a [f32],
    groups: usize,
    elements: usize,
    bytes: &'a mut [u8],
) -> Vec<ScalePart<'a>> {
    let parts = bnb4_parts(elements, true);
    assert_eq!(scales.len(), parts.blocks, "blocks of {elements} elements");
    let offset = cascade_sum::mean(scales);
    let (before, rest) = bytes.split_at_mut(parts.offset);
    rest[..4].copy_from_slice(&offset.to_le_bytes());
    let (codes, group_scales) = before[parts.scales..].split_at_mut(parts.blocks);
    let most = groups.clamp(1, parts.blocks.max(1)) * BNB4_GROUP;
    let targets = codes.chunks_mut(most).zip(group_scales.chunks_mut(most / BNB4_GROUP * 4));
    let parts = scales.chunks(most).zip(targets);
    parts.map(|(scales, (codes, group_scales))| ScalePart { scales, offset, codes, group_scales }).collect()
}

impl ScalePart<'_> {
    pub fn encode(self) {
        let mut centered = [0.0; BNB4_GROUP];
        let targets = self.codes.chunks_mut(BNB4_GROUP).zip(self.group_scales.chunks_exact_mut(4));
        for (scales, (codes, group_scale)) in self.scales.chunks(BNB4_GROUP).zip(targets) {
            let centered = &mut centered[..scales.len()];
            for (centered, scale) in centered.iter_mut().zip(scales) {
                *centered = scale - self.offset;
            }
            group_scale.copy_from_slice(&encode_group(centered, codes).to_le_bytes());
        }
    }
}

/// Writes the codes of a block, or of the tensor's short end, and returns its scale.
pub fn encode_block(code: Code4, values: &[f32], codes: &mut [u8]) -> f32 {
    let (thresholds, order) = match code {
        Code4::Nf4 => (&NF4_THRESHOLDS, &NF4_ORDER),
        Code4::Fp4 => (&FP4_THRESHOLDS, &FP4_ORDER),
    };
    let mut normed = [0.0; BNB4_BLOCK];
    let mut scale = largest_magnitude(values);
    if values.len() == BNB4_BLOCK {
        let reciprocal = 1.0 / if scale < LEAST_SCALE { LEAST_SCALE } else { scale };
        for (normed, value) in normed.iter_mut().zip(values) {
            *normed = value * reciprocal;
        }
    } else {
        scale = if scale < LEAST_SCALE { LEAST_SCALE } else { scale };
        for (normed, value) in normed.iter_mut().zip(values) {
            *normed = value / scale;
        }
    }
    // Counts the thresholds below each element. With the loop over thresholds outside, the inner loop is vectorized.
    let mut above = [0u8; BNB4_BLOCK];
    for threshold in thresholds {
        for (above, normed) in above.iter_mut().zip(&normed) {
            *above += u8::from(*normed > *threshold);
        }
    }
    for (pair, byte) in above.chunks_exact(2).zip(&mut codes[..values.len().div_ceil(2)]) {
        *byte = order[usize::from(pair[0])] << 4 | order[usize::from(pair[1])];
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Storage;
    use crate::quant;

    #[test]
    fn thresholds_are_halfway() {
        let expected = [
            -0.848_096_4,
            -0.610_632_9,
            -0.459_995_27,
            -0.339_679_43,
            -0.234_607_4,
            -0.137_911_74,
            -0.045_525_018,
            0.039_790_15,
            0.120_255_25,
            0.203_521_25,
            0.292_013_76,
            0.389_312_54,
            0.501_663_45,
            0.642_786_9,
            0.861_478_45,
        ];
        assert_eq!(NF4_THRESHOLDS, expected);
    }

    /// x = ((37 i mod 128) - 64) / 50, computed with bitsandbytes.
    #[test]
    fn two_blocks_of_a_known_ramp() {
        let values: Vec<f32> = (0..128).map(|i| ((37 * i % 128) as f32 - 64.0) / 50.0).collect();
        let storage = Storage::Bnb4 { code: Code4::Nf4, double: false };
        let bytes = quant::encode(storage, 2, 64, &values).unwrap();
        let codes: String = bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(codes, "039e16c039e16d04ae27d04bf27d15bf");
        assert_eq!([read_f32(&bytes, 64), read_f32(&bytes, 68)], [1.28, 1.26]);
        let mut decoded = [0.0; 6];
        quant::decode(storage, 2, 64, &bytes, 0, &mut decoded);
        // Known to eight decimals.
        let expected = [-1.28, -0.505_494_36, 0.205_990_66, 0.925_384_7, -0.891_126_75, -0.116_544_05];
        for (got, want) in decoded.into_iter().zip(expected) {
            assert!((f64::from(got) - want).abs() < 5e-8, "{decoded:?}");
        }
    }
}
