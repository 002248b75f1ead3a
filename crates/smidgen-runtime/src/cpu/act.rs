//! Gated activations, act(gate) * up, and their gradients.
//!
//! Most activations are m s with a sigmoid s: for SiLU s = sigmoid(x); for the tanh form of GELU
//! s = (1 + tanh u) / 2 = sigmoid(2u), which loses no digits where tanh is near -1. So the slope is
//! s + m s (1 - s) z', where z is the argument of the sigmoid. The erf form of GELU is x F(x) with the distribution
//! function F of the standard normal distribution, whose density is the slope of F.
//! Gate and up may be column halves of one matrix: views carry a row stride. A gate may be that of several neighbouring
//! channels of up; its gradient is then a sum over them.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, Lanes, exp, for_each_block, kernel, sigmoid_lanes, sum_lanes};
use super::view::{DstRows, SrcRows};
use smidgen_ir::Activation;

/// y = act(gate) * up. `y` may be `gate` or `up`.
pub fn gated_act(kind: Activation, gate: SrcRows, up: SrcRows, y: DstRows) {
    let shape = (up.rows(), up.columns());
    assert!(gate.rows() == shape.0 && shape.1.is_multiple_of(gate.columns()));
    assert_eq!((y.rows(), y.columns()), shape);
    assert_disjoint_or_same("gated_act", y, [gate.into(), up.into()]);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| {
        if gate.columns() == shape.1 {
            activate_rows(isa, kind, gate, up, y, chunk)
        } else {
            activate_groups(isa, kind, gate, up, y, chunk)
        }
    });
}

/// dgate = dy * up * act'(gate) and dup = dy * act(gate). Each output may overwrite any one input.
pub fn gated_act_grad(
    kind: Activation,
    gate: SrcRows,
    up: SrcRows,
    dy: SrcRows,
    dgate: DstRows,
    dup: DstRows,
) {
    let shape = (up.rows(), up.columns());
    assert!(gate.rows() == shape.0 && shape.1.is_multiple_of(gate.columns()));
    assert_eq!((dy.rows(), dy.columns()), shape);
    for (output, like) in [(dgate, gate), (dup, up)] {
        assert_eq!((output.rows(), output.columns()), (like.rows(), like.columns()));
        assert_disjoint_or_same("gated_act_grad", output, [gate.into(), up.into(), dy.into()]);
    }
    assert_disjoint("gated_act_grad", dgate, [dup.into()]);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| {
        if gate.columns() == shape.1 {
            gradient_rows(isa, kind, [gate, up, dy], [dgate, dup], chunk)
        } else {
            gradient_groups(isa, kind, [gate, up, dy], [dgate, dup], chunk)
        }
    });
}

/// sqrt(2 / pi) and the cubic coefficient of GELU's tanh form, both for the sigmoid's argument 2u.
const TWICE_SLOPE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// The value of act(gate) and its slope, for each lane.
#[inline(always)]
fn gate_lanes(kind: Activation, x: Lanes) -> (Lanes, Lanes) {
    let (mut value, mut slope) = ([0.0; LANES], [0.0; LANES]);
    match kind {
        Activation::Silu => {
            let s = sigmoid_lanes(x);
            for lane in 0..LANES {
                (value[lane], slope[lane]) = times_sigmoid(x[lane], s[lane], 1.0);
            }
        }
        Activation::GeluTanh => {
            let mut argument = [0.0; LANES];
            for lane in 0..LANES {
                let square = x[lane] * x[lane];
                argument[lane] = TWICE_SLOPE * (x[lane] + CUBIC * (square * x[lane]));
            }
            let s = sigmoid_lanes(argument);
            for lane in 0..LANES {
                let z_slope = TWICE_SLOPE * (1.0 + 3.0 * CUBIC * (x[lane] * x[lane]));
                (value[lane], slope[lane]) = times_sigmoid(x[lane], s[lane], z_slope);
            }
        }
        Activation::Gelu => {
            for lane in 0..LANES {
                let (share, density) = normal(x[lane]);
                value[lane] = x[lane] * share;
                slope[lane] = share + x[lane] * density;
            }
        }
        Activation::Sigmoid => {
            value = sigmoid_lanes(x);
            for lane in 0..LANES {
                slope[lane] = value[lane] * (1.0 - value[lane]);
            }
        }
        Activation::Identity => (value, slope) = (x, [1.0; LANES]),
        Activation::ClampedSwiglu { limit, alpha } => {
            let (mut clamped, mut argument) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                clamped[lane] = if x[lane] > limit { limit } else { x[lane] };
                argument[lane] = alpha * clamped[lane];
            }
            let s = sigmoid_lanes(argument);
            for lane in 0..LANES {
                (value[lane], slope[lane]) = times_sigmoid(clamped[lane], s[lane], alpha);
                slope[lane] = if x[lane] > limit { 0.0 } else { slope[lane] };
            }
        }
    }
    (value, slope)
}

/// m·s and its slope, where the argument of the sigmoid s has the slope `z_slope`.
#[inline(always)]
fn times_sigmoid(m: f32, s: f32, z_slope: f32) -> (f32, f32) {
    let value = m * s;
    (value, s + value * (1.0 - s) * z_slope)
}

/// The factor that up becomes and its slope, for each lane.
#[inline(always)]
fn up_lanes(kind: Activation, up: Lanes) -> (Lanes, Lanes) {
    let Activation::ClampedSwiglu { limit, .. } = kind else { return (up, [1.0; LANES]) };
    let (mut value, mut slope) = ([0.0; LANES], [0.0; LANES]);
    for lane in 0..LANES {
        let below = if up[lane] > limit { limit } else { up[lane] };
        value[lane] = 1.0 + if below < -limit { -limit } else { below };
        slope[lane] = if up[lane] > limit || up[lane] < -limit { 0.0 } else { 1.0 };
    }
    (value, slope)
}

/// The standard normal distribution function and its density. With z = |x| / sqrt(2) the tail is erfc(z) / 2, and
/// erfc(z) = t exp(-z² + p(t)), t = 1 / (1 + z / 2), p a Chebyshev fit (relative error 1.2e-7; Press et al., Numerical
/// Recipes, 6.2).
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    const FIT: [f32; 10] = [
        0.170_872_77,
        -0.822_152_2,
        1.488_515_9,
        -1.135_204,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_7,
        -1.265_512_2,
    ];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.0;
    for coefficient in FIT {
        p = p * t + coefficient;
    }
    let tail = 0.5 * t * exp(p - z * z);
    let share = if x < 0.0 { tail } else { 1.0 - tail };
    (share, 0.398_942_3 * exp(-0.5 * (x * x)))
}

kernel! {
    fn activate_rows(kind: Activation, gate: SrcRows, up: SrcRows, y: DstRows, chunk: Chunk) {
        for row in chunk.range() {
            let (gate, up, y) = (gate.row(row), up.row(row), y.row(row));
            for_each_block!(block in gate.len() => {
                let (value, _) = gate_lanes(kind, gate.lanes(block));
                let (up, _) = up_lanes(kind, up.lanes(block));
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    out[lane] = value[lane] * up[lane];
                }
                y.set_lanes(block, out);
            });
        }
    }
}

kernel! {
    fn activate_groups(kind: Activation, gate: SrcRows, up: SrcRows, y: DstRows, chunk: Chunk) {
        let width = up.columns() / gate.columns();
        for row in chunk.range() {
            let (gate, up, y) = (gate.row(row), up.row(row), y.row(row));
            for group in 0..gate.len() {
                let (value, _) = gate_lanes(kind, [gate.get(group); LANES]);
                let (up, y) = (up.part(group * width, width), y.part(group * width, width));
                for_each_block!(block in width => {
                    let (up, _) = up_lanes(kind, up.lanes(block));
                    let mut out = [0.0; LANES];
                    for lane in 0..LANES {
                        out[lane] = value[lane] * up[lane];
                    }
                    y.set_lanes(block, out);
                });
            }
        }
    }
}

kernel! {
    fn gradient_rows(
        kind: Activation,
        inputs: [SrcRows; 3],
        outputs: [DstRows; 2],
        chunk: Chunk,
    ) {
        for row in chunk.range() {
            let [gate, up, dy] = inputs.map(|input| input.row(row));
            let [dgate, dup] = outputs.map(|output| output.row(row));
            for_each_block!(block in gate.len() => {
                let (value, slope) = gate_lanes(kind, gate.lanes(block));
                let ((up, up_slope), dy) = (up_lanes(kind, up.lanes(block)), dy.lanes(block));
                let mut out_gate = [0.0; LANES];
                let mut out_up = [0.0; LANES];
                for lane in 0..LANES {
                    out_gate[lane] = dy[lane] * up[lane] * slope[lane];
                    out_up[lane] = dy[lane] * value[lane] * up_slope[lane];
                }
                dgate.set_lanes(block, out_gate);
                dup.set_lanes(block, out_up);
            });
        }
    }
}

kernel! {
    fn gradient_groups(
        kind: Activation,
        inputs: [SrcRows; 3],
        outputs: [DstRows; 2],
        chunk: Chunk,
    ) {
        let width = inputs[1].columns() / inputs[0].columns();
        for row in chunk.range() {
            let [gate, up, dy] = inputs.map(|input| input.row(row));
            let [dgate, dup] = outputs.map(|output| output.row(row));
            for group in 0..gate.len() {
                let (value, slope) = gate_lanes(kind, [gate.get(group); LANES]);
                let [up, dy] = [up, dy].map(|rows| rows.part(group * width, width));
                let dup = dup.part(group * width, width);
                let mut sums = [0.0; LANES];
                for_each_block!(block in width => {
                    let ((up, up_slope), dy) = (up_lanes(kind, up.lanes(block)), dy.lanes(block));
                    let mut out_up = [0.0; LANES];
                    for lane in 0..LANES {
                        sums[lane] += dy[lane] * up[lane];
                        out_up[lane] = dy[lane] * value[lane] * up_slope[lane];
                    }
                    dup.set_lanes(block, out_up);
                });
                dgate.set(group, sum_lanes(sums) * slope[0]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::super::view::Dst;
    use super::*;

    const CLAMPED: Activation = Activation::ClampedSwiglu { limit: 1.5, alpha: 1.702 };
    const KINDS: [Activation; 6] = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::Sigmoid,
        Activation::Identity,
        CLAMPED,
    ];

    /// Phi by its series for |x| < 7, where all terms are positive.
    fn normal_share(x: f64) -> f64 {
        let (mut term, mut sum, mut odd) = (x.abs(), x.abs(), 1.0);
        while term > 1e-18 * sum && x.abs() < 7.0 {
            odd += 2.0;
            term *= x * x / odd;
            sum += term;
        }
        let half = sum * (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
        0.5 + if x.abs() < 7.0 { half } else { 0.5 }.copysign(x)
    }

    fn reference(kind: Activation, x: f64, up: f64) -> f64 {
        match kind {
            Activation::Silu => x / (1.0 + (-x).exp()) * up,
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + u.tanh()) * up
            }
            Activation::Gelu => x * normal_share(x) * up,
            Activation::Sigmoid => up / (1.0 + (-x).exp()),
            Activation::Identity => x * up,
            Activation::ClampedSwiglu { limit, alpha } => {
                let (limit, alpha) = (f64::from(limit), f64::from(alpha));
                let x = x.min(limit);
                x / (1.0 + (-alpha * x).exp()) * (up.clamp(-limit, limit) + 1.0)
            }
        }
    }

    /// A range wide enough to reach both tails.
    fn gates(len: usize) -> Vec<f32> {
        numbers(1, len).iter().map(|value| value * 5.0).collect()
    }

    #[test]
    fn forward_matches_the_reference_in_and_out_of_place() {
        for kind in KINDS {
            for columns in COLUMNS {
                let len = 61 * columns;
                let (gate, up) = (gates(len), numbers(2, len));
                // `place`: which of gate and up holds the output; 2 is a separate buffer.
                let run = |place: usize| {
                    on_every_isa(|| {
                        let mut buffers = [gate.clone(), up.clone(), vec![f32::NAN; len]];
                        let views = buffers.each_mut().map(|buffer| dst(buffer).rows(columns));
                        gated_act(kind, views[0].src(), views[1].src(), views[place]);
                        buffers[place].clone()
                    })
                };
                let y = run(2);
                let want: Vec<f64> = gate
                    .iter()
                    .zip(&up)
                    .map(|(gate, up)| reference(kind, f64::from(*gate), f64::from(*up)))
                    .collect();
                // Where act is 1e-3, the exponent is near -9, so its rounding error is ninefold.
                assert_close("y", &y, &want, 1e-3, 3e-6);
                assert_same_bits("in gate", &run(0), &y);
                assert_same_bits("in up", &run(1), &y);
            }
        }
    }

    #[test]
    fn gradients_match_finite_differences() {
        for kind in KINDS {
            let len = 3 * 33;
            let (gate, up, dy) = (gates(len), numbers(2, len), numbers(3, len));
            let (dgate, dup) = on_every_isa(|| {
                let (mut dgate, mut dup) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                gated_act_grad(
                    kind,
                    src(&gate).rows(33),
                    src(&up).rows(33),
                    src(&dy).rows(33),
                    dst(&mut dgate).rows(33),
                    dst(&mut dup).rows(33),
                );
                (dgate, dup)
            });
            let (gate, up, dy) = (widened(&gate), widened(&up), widened(&dy));
            let loss = |gate: &[f64], up: &[f64]| {
                (0..len).map(|i| dy[i] * reference(kind, gate[i], up[i])).sum::<f64>()
            };
            let want = finite_difference(&gate, |gate| loss(gate, &up));
            assert_close("dgate", &dgate, &want, 1.0, 1e-6);
            let want = finite_difference(&up, |up| loss(&gate, up));
            assert_close("dup", &dup, &want, 1.0, 1e-6);
        }
    }

    #[test]
    fn gradients_work_in_every_place() {
        for kind in KINDS {
            for columns in COLUMNS {
                let len = 61 * columns;
                let inputs = [gates(len), numbers(2, len), numbers(3, len)];
                let run = |gate_place: usize, up_place: usize| {
                    on_every_isa(|| {
                        let spare = vec![f32::NAN; len];
                        let [gate, up, dy] = inputs.clone();
                        let mut buffers = [gate, up, dy, spare.clone(), spare];
                        let views = buffers.each_mut().map(|buffer| dst(buffer).rows(columns));
                        gated_act_grad(
                            kind,
                            views[0].src(),
                            views[1].src(),
                            views[2].src(),
                            views[gate_place],
                            views[up_place],
                        );
                        (buffers[gate_place].clone(), buffers[up_place].clone())
                    })
                };
                let out_of_place = run(3, 4);
                for (gate_place, up_place) in [(0, 1), (0, 2), (2, 1), (3, 2), (2, 4), (1, 0)] {
                    assert_same_bits("in place", &run(gate_place, up_place), &out_of_place);
                }
            }
        }
    }

    #[test]
    fn column_halves_of_one_matrix_serve_as_gate_and_up() {
        let (rows, inner) = (61, 33);
        let both = gates(rows * 2 * inner);
        let dy = numbers(3, rows * inner);
        let halves = |view: Dst<f32>| {
            let view = view.rows(2 * inner);
            (view.column_part(0, inner), view.column_part(inner, inner))
        };
        let half = |start: usize| -> Vec<f32> {
            both.chunks(2 * inner).flat_map(|row| row[start..start + inner].to_vec()).collect()
        };
        for kind in KINDS {
            let strided = on_every_isa(|| {
                let mut both = both.clone();
                let (gate, up) = halves(dst(&mut both));
                let dy = src(&dy).rows(inner);
                gated_act_grad(kind, gate.src(), up.src(), dy, gate, up);
                both
            });
            let (mut gate, mut up) = (half(0), half(inner));
            let (gate_view, up_view) = (dst(&mut gate).rows(inner), dst(&mut up).rows(inner));
            let dy = src(&dy).rows(inner);
            gated_act_grad(kind, gate_view.src(), up_view.src(), dy, gate_view, up_view);
            let interleaved: Vec<f32> =
                gate.chunks(inner).zip(up.chunks(inner)).flat_map(|(gate, up)| [gate, up].concat()).collect();
            assert_same_bits("halves", &strided, &interleaved);
        }
    }

    /// Three gates for 33 channels, in and out of place.
    #[test]
    fn a_gate_of_several_channels_is_that_of_each() {
        let (rows, gates_of_row, width) = (61, 3, 11);
        let (gate, len) = (gates(rows * gates_of_row), rows * gates_of_row * width);
        let (up, dy) = (numbers(2, len), numbers(3, len));
        let spread: Vec<f32> = gate.iter().flat_map(|gate| [*gate; 11]).collect();
        for kind in KINDS {
            let columns = gates_of_row * width;
            let run = |gate: &[f32]| {
                on_every_isa(|| {
                    let mut y = vec![f32::NAN; len];
                    let (gate, up) = (src(gate).rows(gate.len() / rows), src(&up).rows(columns));
                    gated_act(kind, gate, up, dst(&mut y).rows(columns));
                    y
                })
            };
            assert_same_bits("y", &run(&gate), &run(&spread));
            let gradients = |gate: &[f32]| {
                on_every_isa(|| {
                    let (mut dgate, mut dup) = (vec![f32::NAN; gate.len()], dy.clone());
                    let of_gate = gate.len() / rows;
                    let dup_view = dst(&mut dup).rows(columns);
                    let (gate, up) = (src(gate).rows(of_gate), src(&up).rows(columns));
                    gated_act_grad(kind, gate, up, dup_view.src(), dst(&mut dgate).rows(of_gate), dup_view);
                    (dgate, dup)
                })
            };
            let ((dgate, dup), (dspread, dup_of_each)) = (gradients(&gate), gradients(&spread));
            assert_same_bits("dup", &dup, &dup_of_each);
            let want: Vec<f64> = dspread.chunks(width).map(|of_gate| widened(of_gate).iter().sum()).collect();
            assert_close("dgate", &dgate, &want, 1.0, 3e-6);
        }
    }

    #[test]
    fn tails_are_flat_and_nan_is_kept() {
        for kind in KINDS {
            let gate = [-1e4_f32, -200.0, 200.0, 1e4, f32::NAN];
            let mut y = [f32::NAN; 5];
            let up = [1.0; 5];
            gated_act(kind, src(&gate).rows(5), src(&up).rows(5), dst(&mut y).rows(5));
            let expected = match kind {
                Activation::Silu | Activation::GeluTanh | Activation::Gelu => [0.0, 0.0, 200.0, 1e4],
                Activation::Sigmoid => [0.0, 0.0, 1.0, 1.0],
                Activation::Identity => [-1e4, -200.0, 200.0, 1e4],
                // 2 · 1.5 · sigmoid(1.702 · 1.5)
                Activation::ClampedSwiglu { .. } => [0.0, 0.0, y[2], y[2]],
            };
            assert_eq!(&y[..4], &expected);
            assert!((kind != CLAMPED || (y[2] - 2.783_324).abs() < 1e-5) && y[4].is_nan(), "{kind:?}: {y:?}");
        }
    }
}
