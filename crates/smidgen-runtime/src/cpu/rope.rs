//! Rotary position embedding: a table of cosines and sines, and the rotation that uses it.
//!
//! The convention is "rotate half": of a head's first `rotary_dim` channels, channel i of the first
//! half pairs with channel i of the second; the remaining channels are unchanged.
//! The gradient of a rotation is the rotation by the opposite angle, so there is no second function.
//! LongRoPE has two lists of frequencies; the length of a token's segment selects one.
//! Left out: how `inv_freq` and the scale follow from a model's settings.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Block, Isa, LANES, for_each_block, kernel};
use super::view::{DstRows, Src, SrcRows};

/// How the channels of a token are divided into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    pub heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
}

/// Row t of `table` becomes scale * cos(a), then scale * sin(a), with a = positions[t] * inv_freq rounded
/// to f32 as in PyTorch; the cosine and sine of that angle are computed in f64.
pub fn rope_table(
    positions: Src<i32>, // (T)
    inv_freq: &[f32],    // (half)
    scale: f32,
    table: DstRows, // (T, 2 * half)
) {
    fill_table(positions, |_| inv_freq, inv_freq.len(), scale, table);
}

/// LongRoPE's frequencies: the short list for segments of at most `original` tokens, else the long one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LongRope<'a> {
    pub short: &'a [f32], // (half)
    pub long: &'a [f32],  // (half)
    pub original: usize,
}

/// The length of each token's sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths<'a> {
    /// Segment s is the tokens `segments[s]..segments[s + 1]`; the first boundary is 0, the last one T.
    OfSegments(&'a [i32]), // (G + 1)
    OfTokens(&'a [i32]), // (T)
}

impl Lengths<'_> {
    fn check(self, tokens: usize) {
        match self {
            Lengths::OfSegments(segments) => {
                assert!(
                    segments.first() == Some(&0) && segments.is_sorted(),
                    "segment boundaries must begin at 0 and never decrease"
                );
                assert_eq!(segments.last().map(|end| *end as usize), Some(tokens));
            }
            Lengths::OfTokens(lengths) => assert_eq!(lengths.len(), tokens),
        }
    }

    fn of(self, token: usize) -> usize {
        match self {
            Lengths::OfSegments(segments) => {
                let next = segments.partition_point(|boundary| *boundary as usize <= token);
                (segments[next] - segments[next - 1]) as usize
            }
            Lengths::OfTokens(lengths) => lengths[token] as usize,
        }
    }
}

/// Like `rope_table`; the length of each token's sequence selects the list of frequencies.
pub fn rope_table_by_length(
    positions: Src<i32>, // (T)
    lengths: Lengths<'_>,
    frequencies: LongRope<'_>,
    scale: f32,
    table: DstRows, // (T, 2 * half)
) {
    let LongRope { short, long, original } = frequencies;
    assert_eq!(short.len(), long.len());
    lengths.check(positions.len());
    let of_token = |token: usize| if lengths.of(token) <= original { short } else { long };
    fill_table(positions, of_token, short.len(), scale, table);
}

fn fill_table<'a>(
    positions: Src<i32>,
    frequencies_of_token: impl Fn(usize) -> &'a [f32] + Sync,
    half: usize,
    scale: f32,
    table: DstRows,
) {
    assert_eq!((table.rows(), table.columns()), (positions.len(), 2 * half));
    assert_disjoint("rope_table", table, [positions.into()]);
    // Chunks have a sixteenth of the usual elements, because an element costs about sixteen times as much here.
    for_each_row_chunk(table.rows(), table.columns() * 16, |chunk| {
        for token in chunk.range() {
            let row = table.row(token);
            let position = positions.get(token) as f32;
            for (index, frequency) in frequencies_of_token(token).iter().enumerate() {
                let (sine, cosine) = f64::from(position * frequency).sin_cos();
                row.set(index, cosine as f32 * scale);
                row.set(half + index, sine as f32 * scale);
            }
        }
    });
}

/// Rotates every head by the angles of its token, by the opposite angles if `inverse`. `y` may be `x`.
pub fn rope(
    x: SrcRows,     // (T, heads * head_dim)
    table: SrcRows, // (T, rotary_dim)
    shape: RopeShape,
    inverse: bool,
    y: DstRows, // (T, heads * head_dim)
) {
    let columns = shape.heads * shape.head_dim;
    assert!(shape.rotary_dim.is_multiple_of(2) && shape.rotary_dim <= shape.head_dim);
    assert_eq!(x.columns(), columns);
    assert_eq!((y.rows(), y.columns()), (x.rows(), columns));
    assert_eq!((table.rows(), table.columns()), (x.rows(), shape.rotary_dim));
    assert_disjoint_or_same("rope", y, [x.into()]);
    assert_disjoint("rope", y, [table.into()]);
    let isa = Isa::current();
    for_each_row_chunk(x.rows(), columns, |chunk| {
        rotate_rows(isa, x, table, shape, inverse, y, chunk);
    });
}

kernel! {
    fn rotate_rows(
        x: SrcRows,
        table: SrcRows,
        shape: RopeShape,
        inverse: bool,
        y: DstRows,
        chunk: Chunk,
    ) {
        let RopeShape { heads, head_dim, rotary_dim } = shape;
        let half = rotary_dim / 2;
        let direction = if inverse { -1.0 } else { 1.0 };
        for token in chunk.range() {
            let (x, table, y) = (x.row(token), table.row(token), y.row(token));
            for head in 0..heads {
                let x = x.part(head * head_dim, head_dim);
                let y = y.part(head * head_dim, head_dim);
                for_each_block!(first in half => {
                    let second = Block { start: half + first.start, count: first.count };
                    let (cosine, sine) = (table.lanes(first), table.lanes(second));
                    let (a, b) = (x.lanes(first), x.lanes(second));
                    let mut out_a = [0.0; LANES];
                    let mut out_b = [0.0; LANES];
                    for lane in 0..LANES {
                        let sine = sine[lane] * direction;
                        out_a[lane] = a[lane] * cosine[lane] - b[lane] * sine;
                        out_b[lane] = b[lane] * cosine[lane] + a[lane] * sine;
                    }
                    y.set_lanes(first, out_a);
                    y.set_lanes(second, out_b);
                });
                if rotary_dim < head_dim {
                    let rest = head_dim - rotary_dim;
                    y.part(rotary_dim, rest).copy_from(x.part(rotary_dim, rest));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::super::view::Dst;
    use super::*;

    const SHAPES: [RopeShape; 5] =
        [shape(1, 2, 2), shape(3, 14, 14), shape(2, 33, 20), shape(9, 64, 64), shape(1, 7, 0)];

    const fn shape(heads: usize, head_dim: usize, rotary_dim: usize) -> RopeShape {
        RopeShape { heads, head_dim, rotary_dim }
    }

    fn frequencies(half: usize) -> Vec<f32> {
        (0..half).map(|index| 10_000_f32.powf(-(index as f32) / half as f32)).collect()
    }

    fn positions(tokens: usize) -> Vec<i32> {
        (0..tokens as i32).map(|token| token * 37 % 4096).collect()
    }

    fn table(tokens: usize, half: usize, scale: f32) -> Vec<f32> {
        on_every_isa(|| {
            let mut table = vec![f32::NAN; tokens * 2 * half];
            // SAFETY: the vector has this shape and is used only through the view.
            let view = unsafe { DstRows::new(table.as_mut_ptr(), tokens, 2 * half, 2 * half) };
            rope_table(src(&positions(tokens)), &frequencies(half), scale, view);
            table
        })
    }

    /// Rotates pairs as complex numbers.
    fn reference(x: &[f64], angles: &[Vec<f64>], shape: RopeShape, scale: f64) -> Vec<f64> {
        let mut y = x.to_vec();
        let half = shape.rotary_dim / 2;
        for (head, start) in (0..x.len()).step_by(shape.head_dim).enumerate() {
            for (index, angle) in angles[head / shape.heads].iter().enumerate() {
                let (first, second) = (start + index, start + half + index);
                y[first] = scale * (x[first] * angle.cos() - x[second] * angle.sin());
                y[second] = scale * (x[first] * angle.sin() + x[second] * angle.cos());
            }
        }
        y
    }

    fn angles(tokens: usize, half: usize, sign: f64) -> Vec<Vec<f64>> {
        positions(tokens)
            .iter()
            .map(|position| {
                frequencies(half)
                    .iter()
                    .map(|frequency| sign * f64::from(*position as f32 * frequency))
                    .collect()
            })
            .collect()
    }

    fn rotate(x: &[f32], table: &[f32], shape: RopeShape, inverse: bool, in_place: bool) -> Vec<f32> {
        let columns = shape.heads * shape.head_dim;
        let tokens = x.len() / columns;
        on_every_isa(|| {
            // SAFETY: the vector has this shape and is not written.
            let table = unsafe { SrcRows::new(table.as_ptr(), tokens, shape.rotary_dim, shape.rotary_dim) };
            let mut y = if in_place { x.to_vec() } else { vec![f32::NAN; x.len()] };
            let view: Dst<f32> = dst(&mut y);
            let input = if in_place { view.src() } else { src(x) };
            rope(input.rows(columns), table, shape, inverse, view.rows(columns));
            y
        })
    }

    #[test]
    fn table_holds_cosines_then_sines() {
        let (tokens, half) = (600, 5);
        let table = table(tokens, half, 1.25);
        for (row, angles) in table.chunks(2 * half).zip(angles(tokens, half, 1.0)) {
            let cosines: Vec<f64> = angles.iter().map(|angle| 1.25 * angle.cos()).collect();
            let sines: Vec<f64> = angles.iter().map(|angle| 1.25 * angle.sin()).collect();
            assert_close("cos", &row[..half], &cosines, 1e-3, 2e-7);
            assert_close("sin", &row[half..], &sines, 1e-3, 2e-7);
        }
    }

    /// Segments of 300, 0, 301, 299 and 100 tokens with a threshold of 300: only the third uses the long list.
    #[test]
    fn the_length_of_a_segment_chooses_the_list() {
        let (half, original) = (5, 300);
        let segments = [0, 300, 300, 601, 900, 1000];
        let positions: Vec<i32> = segments.windows(2).flat_map(|bounds| 0..bounds[1] - bounds[0]).collect();
        let short = frequencies(half);
        let long: Vec<f32> = short.iter().map(|frequency| frequency / 3.0).collect();
        let filled = |fill: &(dyn Fn(DstRows) + Sync)| {
            on_every_isa(|| {
                let mut table = vec![f32::NAN; positions.len() * 2 * half];
                fill(dst(&mut table).rows(2 * half));
                table
            })
        };
        let by_length = |original: usize| {
            let lists = LongRope { short: &short, long: &long, original };
            let by =
                |lengths| filled(&|table| rope_table_by_length(src(&positions), lengths, lists, 1.19, table));
            let of_tokens: Vec<i32> = segments
                .windows(2)
                .flat_map(|bounds| vec![bounds[1] - bounds[0]; (bounds[1] - bounds[0]) as usize])
                .collect();
            let table = by(Lengths::OfSegments(&segments));
            assert_same_bits("length per token", &by(Lengths::OfTokens(&of_tokens)), &table);
            table
        };
        let all_short = filled(&|table| rope_table(src(&positions), &short, 1.19, table));
        let all_long = filled(&|table| rope_table(src(&positions), &long, 1.19, table));
        let middle = 300 * 2 * half..601 * 2 * half;
        let mut want = all_short.clone();
        want[middle.clone()].copy_from_slice(&all_long[middle]);
        assert_same_bits("mixed", &by_length(original), &want);
        assert_same_bits("all short", &by_length(301), &all_short);
        assert_same_bits("all long", &by_length(0), &all_long);
    }

    #[test]
    #[should_panic(expected = "must begin at 0 and never decrease")]
    fn falling_boundaries_are_refused() {
        let mut table = vec![0.0; 8];
        let lists = LongRope { short: &[1.0], long: &[0.5], original: 2 };
        let boundaries = Lengths::OfSegments(&[0, 3, 2, 4]);
        rope_table_by_length(src(&[0, 1, 0, 1]), boundaries, lists, 1.0, dst(&mut table).rows(2));
    }

    #[test]
    fn rotation_matches_the_reference_both_ways_and_in_place() {
        for shape in SHAPES {
            let tokens = 61;
            let half = shape.rotary_dim / 2;
            let table = table(tokens, half, 1.5);
            let x = numbers(1, tokens * shape.heads * shape.head_dim);
            for (inverse, sign) in [(false, 1.0), (true, -1.0)] {
                let y = rotate(&x, &table, shape, inverse, false);
                let want = reference(&widened(&x), &angles(tokens, half, sign), shape, 1.5);
                assert_close("y", &y, &want, 1.0, 5e-7);
                assert_same_bits("in place", &rotate(&x, &table, shape, inverse, true), &y);
            }
        }
    }

    #[test]
    fn the_inverse_is_the_gradient() {
        for shape in [SHAPES[0], SHAPES[1], SHAPES[2]] {
            let tokens = 3;
            let half = shape.rotary_dim / 2;
            let len = tokens * shape.heads * shape.head_dim;
            let (x, dy) = (numbers(1, len), numbers(2, len));
            let got = rotate(&dy, &table(tokens, half, 1.5), shape, true, false);
            let (dy, angles) = (widened(&dy), angles(tokens, half, 1.0));
            let want = finite_difference(&widened(&x), |x| {
                let y = reference(x, &angles, shape, 1.5);
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            });
            assert_close("dx", &got, &want, 1.0, 1e-6);
        }
    }
}
