//! The encoders of q4_k, q5_k and q6_k, which search for the scales with the least error, as ggml does without an
//! importance matrix.
//!
//! The arithmetic is ggml's, in f32 and in its order, so blocks are equal to those of its quantizer bit for bit. A scale of
//! q6_k fits codes to numbers weighted by their squares; a scale and a minimum of q4_k or q5_k are weighted by magnitude.
//! Left out: all other formats, and importance matrices.

use half::f16;

/// Numbers below this are zeros to ggml.
const NOTHING: f32 = 1e-15;
const SUB_BLOCK: usize = 32;
const SIXTEENTH: usize = 16;

/// The nearest whole number; ties go to the even one.
fn nearest(value: f32) -> i32 {
    value.round_ties_even() as i32
}

fn to_half(value: f32, target: &mut [u8]) -> f32 {
    let half = f16::from_f32(value);
    target.copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// Encodes 256 elements as q6_k: nibbles, pairs of bits, sixteen scales, and the scale of the block.
pub fn encode_q6_k(values: &[f32], target: &mut [u8]) {
    let (mut scales, mut codes) = ([0.0f32; 16], [0u8; 256]);
    for ((scale, values), codes) in
        scales.iter_mut().zip(values.chunks_exact(SIXTEENTH)).zip(codes.chunks_exact_mut(SIXTEENTH))
    {
        *scale = symmetric_scale(values, codes);
    }
    let larger = |most: f32, scale: &f32| if scale.abs() > most.abs() { *scale } else { most };
    let largest = scales.iter().fold(0.0, larger);
    target.fill(0);
    if largest.abs() < NOTHING {
        return;
    }
    let inverse = -128.0 / largest;
    let block_scale = to_half(1.0 / inverse, &mut target[208..210]);
    let parts = codes.chunks_exact_mut(SIXTEENTH).zip(values.chunks_exact(SIXTEENTH));
    for (index, (codes, values)) in parts.enumerate() {
        let small = nearest(inverse * scales[index]).min(127) as i8;
        target[192 + index] = small as u8;
        let scale = block_scale * f32::from(small);
        // With a scale of 0, the codes stay those of the search.
        if scale != 0.0 {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = (nearest(value / scale).clamp(-32, 31) + 32) as u8;
            }
        }
    }
    for (half, codes) in codes.chunks_exact(128).enumerate() {
        for lane in 0..32 {
            let [a, b, c, d] = [0, 32, 64, 96].map(|part| codes[part + lane]);
            target[64 * half + lane] = a & 15 | c << 4;
            target[64 * half + 32 + lane] = b & 15 | d << 4;
            target[128 + 32 * half + lane] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
}

/// The best scale of sixteen numbers and their codes, which stand for -32 to 31.
fn symmetric_scale(values: &[f32], codes: &mut [u8]) -> f32 {
    let larger = |most: f32, value: &f32| if value.abs() > most.abs() { *value } else { most };
    let largest = values.iter().fold(0.0, larger);
    codes.fill(0);
    if largest.abs() < NOTHING {
        return 0.0;
    }
    let code = |inverse: f32, value: f32| nearest(inverse * value).clamp(-32, 31);
    let sums = |inverse: f32| {
        let (mut with_values, mut of_squares) = (0.0f32, 0.0f32);
        for value in values {
            let (code, weight) = (code(inverse, *value) as f32, value * value);
            with_values += weight * value * code;
            of_squares += weight * code * code;
        }
        (with_values, of_squares)
    };
    let mut chosen = -32.0 / largest;
    let (with_values, of_squares) = sums(chosen);
    let mut scale = if of_squares == 0.0 { 0.0 } else { with_values / of_squares };
    let mut best = scale * with_values;
    for step in (-9..=9).filter(|step| *step != 0) {
        let inverse = -(32.0 + 0.1 * step as f32) / largest;
        let (with_values, of_squares) = sums(inverse);
        if of_squares > 0.0 && with_values * with_values > best * of_squares {
            scale = with_values / of_squares;
            (best, chosen) = (scale * with_values, inverse);
        }
    }
    codes.iter_mut().zip(values).for_each(|(target, value)| *target = (code(chosen, *value) + 32) as u8);
    scale
}

/// How scale and minimum of 32 elements are searched.
struct Search {
    most: i32,
    first: f32,
    step: f32,
    steps: usize,
}

const OF_Q4_K: Search = Search { most: 15, first: -1.0, step: 0.1, steps: 20 };
const OF_Q5_K: Search = Search { most: 31, first: -0.5, step: 0.1, steps: 15 };

/// Encodes 256 elements as q4_k: scale and minimum, small ones, and nibbles.
pub fn encode_q4_k(values: &[f32], target: &mut [u8]) {
    let codes = encode_head(values, &OF_Q4_K, target);
    put_nibbles(&codes, &mut target[16..]);
}

/// Encodes 256 elements as q5_k: as q4_k, with fifth bits before the nibbles.
pub fn encode_q5_k(values: &[f32], target: &mut [u8]) {
    let codes = encode_head(values, &OF_Q5_K, target);
    let fifths = &mut target[16..48];
    fifths.fill(0);
    for (sub, codes) in codes.chunks_exact(SUB_BLOCK).enumerate() {
        fifths.iter_mut().zip(codes).for_each(|(byte, code)| *byte |= (code >> 4 & 1) << sub);
    }
    put_nibbles(&codes, &mut target[48..]);
}

fn put_nibbles(codes: &[u8; 256], target: &mut [u8]) {
    for (target, codes) in target.chunks_exact_mut(32).zip(codes.chunks_exact(64)) {
        for (lane, byte) in target.iter_mut().enumerate() {
            *byte = codes[lane] & 15 | codes[32 + lane] << 4;
        }
    }
}

/// Writes the first sixteen bytes of a block of q4_k or q5_k, and returns its codes.
fn encode_head(values: &[f32], search: &Search, target: &mut [u8]) -> [u8; 256] {
    let (mut scales, mut minimums, mut codes) = ([0.0f32; 8], [0.0f32; 8], [0u8; 256]);
    for (sub, values) in values.chunks_exact(SUB_BLOCK).enumerate() {
        let squares: f32 = values.iter().fold(0.0, |sum, value| sum + value * value);
        let usual = (squares / 32.0).sqrt();
        let weights: [f32; SUB_BLOCK] = std::array::from_fn(|at| usual + values[at].abs());
        let codes = &mut codes[SUB_BLOCK * sub..][..SUB_BLOCK];
        (scales[sub], minimums[sub]) = scale_and_minimum(values, &weights, search, codes);
    }
    let largest = |numbers: &[f32; 8]| numbers.iter().fold(0.0f32, |most, number| most.max(*number));
    let (most_scale, most_minimum) = (largest(&scales), largest(&minimums));
    let small = |number: f32, most: f32| {
        let inverse = if most > 0.0 { 63.0 / most } else { 0.0 };
        // ggml keeps eight bits, then limits them.
        (nearest(inverse * number) as u8).min(63)
    };
    let block_scale = to_half(most_scale / 63.0, &mut target[..2]);
    let block_minimum = to_half(most_minimum / 63.0, &mut target[2..4]);
    target[4..16].fill(0);
    for sub in 0..8 {
        let (scale, minimum) = (small(scales[sub], most_scale), small(minimums[sub], most_minimum));
        let packed = &mut target[4..16];
        if sub < 4 {
            (packed[sub], packed[sub + 4]) = (scale, minimum);
        } else {
            packed[sub + 4] = scale & 15 | (minimum & 15) << 4;
            packed[sub - 4] |= scale >> 4 << 6;
            packed[sub] |= minimum >> 4 << 6;
        }
        let (scale, minimum) = (block_scale * f32::from(scale), block_minimum * f32::from(minimum));
        if scale == 0.0 {
            continue;
        }
        let part = SUB_BLOCK * sub..SUB_BLOCK * (sub + 1);
        for (code, value) in codes[part.clone()].iter_mut().zip(&values[part]) {
            *code = nearest((value + minimum) / scale).clamp(0, search.most) as u8;
        }
    }
    codes
}

/// Scale and minimum, which is subtracted, with the least weighted error of 32 elements, and their codes.
fn scale_and_minimum(values: &[f32], weights: &[f32], search: &Search, codes: &mut [u8]) -> (f32, f32) {
    let most = search.most as f32;
    let (mut low, mut high) = (values[0], values[0]);
    let (mut sum_of_weights, mut sum_of_values) = (weights[0], weights[0] * values[0]);
    for (value, weight) in values.iter().zip(weights).skip(1) {
        low = if *value < low { *value } else { low };
        high = if *value > high { *value } else { high };
        sum_of_weights += weight;
        sum_of_values += weight * value;
    }
    let mut low = if low > 0.0 { 0.0 } else { low };
    if high == low {
        codes.fill(0);
        return (0.0, -low);
    }
    let code = |inverse: f32, low: f32, value: f32| nearest(inverse * (value - low)).clamp(0, search.most);
    let inverse = most / (high - low);
    let mut scale = 1.0 / inverse;
    let mut error = 0.0f32;
    for ((target, value), weight) in codes.iter_mut().zip(values).zip(weights) {
        *target = code(inverse, low, *value) as u8;
        let difference = scale * f32::from(*target) + low - value;
        error += weight * (difference * difference);
    }
    let mut tried = [0u8; SUB_BLOCK];
    for step in 0..=search.steps {
        let inverse = (search.first + search.step * step as f32 + most) / (high - low);
        let (mut of_codes, mut of_squares, mut of_products) = (0.0f32, 0.0f32, 0.0f32);
        for ((target, value), weight) in tried.iter_mut().zip(values).zip(weights) {
            let number = code(inverse, low, *value);
            *target = number as u8;
            let number = number as f32;
            of_codes += weight * number;
            of_squares += weight * number * number;
            of_products += weight * number * value;
        }
        let determinant = sum_of_weights * of_squares - of_codes * of_codes;
        if determinant <= 0.0 {
            continue;
        }
        let mut own_scale = (sum_of_weights * of_products - sum_of_values * of_codes) / determinant;
        let mut own_low = (of_squares * sum_of_values - of_codes * of_products) / determinant;
        if own_low > 0.0 {
            (own_low, own_scale) = (0.0, of_products / of_squares);
        }
        let mut own_error = 0.0f32;
        for ((code, value), weight) in tried.iter().zip(values).zip(weights) {
            let difference = own_scale * f32::from(*code) + own_low - value;
            own_error += weight * (difference * difference);
        }
        if own_error < error {
            codes.copy_from_slice(&tried);
            (error, scale, low) = (own_error, own_scale, own_low);
        }
    }
    (scale, -low)
}
