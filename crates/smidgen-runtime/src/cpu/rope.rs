//! Rotary position embedding: a table of cosines and sines, and the rotation that uses it.
//!
//! Of a head's first `rotary_dim` channels, channel i of the first half pairs with channel i of the second, or channel
//! 2i with channel 2i + 1; the remaining channels are unchanged.
//! The gradient of a rotation is the rotation by the opposite angle, so there is no second function.
//! Frequencies may depend on the length of a token's segment: a second list for long ones, or a formula.
//! Left out: how frequencies and scales follow from a model's settings.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Block, Isa, LANES, for_each_block, kernel};
use super::view::{Dst, DstRows, Src, SrcRows};
use smidgen_ir::{PositionScale, Stretch};

/// How the channels of a token are divided into heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    pub heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    /// Channels 2i and 2i + 1 are a pair, instead of i and rotary_dim/2 + i.
    pub interleaved: bool,
}

/// What cosines and sines are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TableScale {
    pub all: f32,
    pub of_position: Option<PositionScale>,
}

impl TableScale {
    fn at(self, position: i32) -> f32 {
        self.of_position.map_or(self.all, |scale| self.all * scale.at(position))
    }
}

/// How the frequencies of a token follow from the length of its sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Frequencies<'a> {
    Same,
    /// Another list if the sequence has more than `original` tokens.
    Long {
        long: &'a [f32], // (half)
        original: usize,
        lengths: Lengths<'a>,
    },
    Stretched {
        stretch: Stretch,
        lengths: Lengths<'a>,
    },
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

/// Row t of `table` becomes scale * cos(a), then scale * sin(a), with a = positions[t] * frequency rounded
/// to f32 as in PyTorch; the cosine and sine of that angle are computed in f64.
pub fn rope_table(
    positions: Src<i32>, // (T)
    inv_freq: &[f32],    // (half)
    rule: Frequencies<'_>,
    scale: TableScale,
    table: DstRows, // (T, 2 * half)
) {
    let half = inv_freq.len();
    assert_eq!((table.rows(), table.columns()), (positions.len(), 2 * half));
    assert_disjoint("rope_table", table, [positions.into()]);
    match rule {
        Frequencies::Same => {}
        Frequencies::Long { long, lengths, .. } => {
            assert_eq!(long.len(), half);
            lengths.check(positions.len());
        }
        Frequencies::Stretched { lengths, .. } => lengths.check(positions.len()),
    }
    // Chunks have a sixteenth of the usual elements, because an element costs about sixteen times as much here.
    for_each_row_chunk(table.rows(), table.columns() * 16, |chunk| {
        for token in chunk.range() {
            let scale = scale.at(positions.get(token));
            let place = (positions.get(token) as f32, scale, table.row(token));
            match rule {
                Frequencies::Same => fill_row(place, half, |pair| inv_freq[pair]),
                Frequencies::Long { long, original, lengths } => {
                    let list = if lengths.of(token) <= original { inv_freq } else { long };
                    fill_row(place, half, |pair| list[pair]);
                }
                Frequencies::Stretched { stretch, lengths } => {
                    let length = lengths.of(token);
                    fill_row(place, half, |pair| stretch.frequency(inv_freq[pair], pair, 2 * half, length));
                }
            }
        }
    });
}

/// A row of the table for a position and a scale.
fn fill_row((position, scale, row): (f32, f32, Dst<f32>), half: usize, frequency: impl Fn(usize) -> f32) {
    for pair in 0..half {
        let (sine, cosine) = f64::from(position * frequency(pair)).sin_cos();
        row.set(pair, cosine as f32 * scale);
        row.set(half + pair, sine as f32 * scale);
    }
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
        let RopeShape { heads, head_dim, rotary_dim, interleaved } = shape;
        let half = rotary_dim / 2;
        let direction = if inverse { -1.0 } else { 1.0 };
        for token in chunk.range() {
            let (x, table, y) = (x.row(token), table.row(token), y.row(token));
            for head in 0..heads {
                let x = x.part(head * head_dim, head_dim);
                let y = y.part(head * head_dim, head_dim);
                let blocked = if interleaved { 0 } else { half };
                for pair in blocked..half {
                    let (cosine, sine) = (table.get(pair), table.get(half + pair) * direction);
                    let (a, b) = (x.get(2 * pair), x.get(2 * pair + 1));
                    y.set(2 * pair, a * cosine - b * sine);
                    y.set(2 * pair + 1, b * cosine + a * sine);
                }
                for_each_block!(first in blocked => {
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
        RopeShape { heads, head_dim, rotary_dim, interleaved: false }
    }

    const PLAIN: TableScale = TableScale { all: 1.19, of_position: None };

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
            let scale = TableScale { all: scale, of_position: None };
            rope_table(src(&positions(tokens)), &frequencies(half), Frequencies::Same, scale, view);
            table
        })
    }

    /// Rotates pairs as complex numbers.
    fn reference(x: &[f64], angles: &[Vec<f64>], shape: RopeShape, scale: f64) -> Vec<f64> {
        let mut y = x.to_vec();
        let half = shape.rotary_dim / 2;
        for (head, start) in (0..x.len()).step_by(shape.head_dim).enumerate() {
            for (index, angle) in angles[head / shape.heads].iter().enumerate() {
                let (first, second) = if shape.interleaved {
                    (start + 2 * index, start + 2 * index + 1)
                } else {
                    (start + index, start + half + index)
                };
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
            let by = |lengths| {
                let rule = Frequencies::Long { long: &long, original, lengths };
                filled(&|table| rope_table(src(&positions), &short, rule, PLAIN, table))
            };
            let of_tokens: Vec<i32> = segments
                .windows(2)
                .flat_map(|bounds| vec![bounds[1] - bounds[0]; (bounds[1] - bounds[0]) as usize])
                .collect();
            let table = by(Lengths::OfSegments(&segments));
            assert_same_bits("length per token", &by(Lengths::OfTokens(&of_tokens)), &table);
            table
        };
        let all_short = filled(&|table| rope_table(src(&positions), &short, Frequencies::Same, PLAIN, table));
        let all_long = filled(&|table| rope_table(src(&positions), &long, Frequencies::Same, PLAIN, table));
        let middle = 300 * 2 * half..601 * 2 * half;
        let mut want = all_short.clone();
        want[middle.clone()].copy_from_slice(&all_long[middle]);
        assert_same_bits("mixed", &by_length(original), &want);
        assert_same_bits("all short", &by_length(301), &all_short);
        assert_same_bits("all long", &by_length(0), &all_long);
    }

    /// A sample of 300 tokens is not stretched, one of 400 is, and positions from 256 on are scaled.
    #[test]
    fn stretched_frequencies_and_scaled_positions() {
        let (half, tokens) = (3, 700);
        let positions: Vec<i32> = (0..300).chain(0..400).collect();
        let plain = frequencies(half);
        let stretch = Stretch { factor: 2.0, original: 300 };
        let of_position = Some(PositionScale { beta: 0.5, original: 256 });
        let got = on_every_isa(|| {
            let mut table = vec![f32::NAN; tokens * 2 * half];
            let rule = Frequencies::Stretched { stretch, lengths: Lengths::OfSegments(&[0, 300, 700]) };
            let scale = TableScale { all: 1.5, of_position };
            rope_table(src(&positions), &plain, rule, scale, dst(&mut table).rows(2 * half));
            table
        });
        // 2 · 400/300 - 1 is 5/3, and the last of three pairs has the exponent 1.
        let divisors = [1.0, (5.0f64 / 3.0).sqrt(), 5.0 / 3.0];
        for (token, row) in got.chunks(2 * half).enumerate() {
            let scale = if positions[token] < 256 { 1.5 } else { 1.5 * (1.0 + 0.5 * 2f64.ln()) };
            let angles = (0..half).map(|pair| {
                let divisor = if token < 300 { 1.0 } else { divisors[pair] };
                f64::from(positions[token]) * f64::from(plain[pair]) / divisor
            });
            let (cosines, sines): (Vec<f64>, Vec<f64>) =
                angles.map(|angle| (scale * angle.cos(), scale * angle.sin())).unzip();
            assert_close("cos", &row[..half], &cosines, 1.0, 1e-4);
            assert_close("sin", &row[half..], &sines, 1.0, 1e-4);
        }
    }

    #[test]
    #[should_panic(expected = "must begin at 0 and never decrease")]
    fn falling_boundaries_are_refused() {
        let mut table = vec![0.0; 8];
        let lengths = Lengths::OfSegments(&[0, 3, 2, 4]);
        let rule = Frequencies::Long { long: &[0.5], original: 2, lengths };
        rope_table(src(&[0, 1, 0, 1]), &[1.0], rule, PLAIN, dst(&mut table).rows(2));
    }

    #[test]
    fn rotation_matches_the_reference_both_ways_and_in_place() {
        let interleaved = SHAPES.map(|shape| RopeShape { interleaved: true, ..shape });
        for shape in SHAPES.into_iter().chain(interleaved) {
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
        let interleaved = RopeShape { interleaved: true, ..SHAPES[2] };
        for shape in [SHAPES[0], SHAPES[1], SHAPES[2], interleaved] {
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
