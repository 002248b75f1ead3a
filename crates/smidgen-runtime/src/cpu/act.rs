//! Gated activations, act(gate) * up, and their gradients.
//!
//! Both activations are x s with a sigmoid s: for SiLU s = sigmoid(x); for the tanh form of GELU
//! s = (1 + tanh u) / 2 = sigmoid(2u), which loses no digits where tanh is near -1. So the slope is
//! s + x s (1 - s) z', where z is the argument of the sigmoid.
//! Gate and up may be column halves of one matrix: views carry a row stride.
//! Left out: the erf form of GELU.

use super::chunk::{Chunk, for_each_row_chunk};
use super::footprint::{assert_disjoint, assert_disjoint_or_same};
use super::simd::{Isa, LANES, Lanes, for_each_block, kernel, sigmoid_lanes};
use super::view::{DstRows, SrcRows};
use smidgen_ir::Activation;

/// y = act(gate) * up. `y` may be `gate` or `up`.
pub fn gated_act(kind: Activation, gate: SrcRows, up: SrcRows, y: DstRows) {
    let shape = (gate.rows(), gate.columns());
    assert_eq!((up.rows(), up.columns()), shape);
    assert_eq!((y.rows(), y.columns()), shape);
    assert_disjoint_or_same("gated_act", y, [gate.into(), up.into()]);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| {
        activate_rows(isa, kind, gate, up, y, chunk);
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
    let shape = (gate.rows(), gate.columns());
    for input in [up, dy] {
        assert_eq!((input.rows(), input.columns()), shape);
    }
    for output in [dgate, dup] {
        assert_eq!((output.rows(), output.columns()), shape);
        assert_disjoint_or_same("gated_act_grad", output, [gate.into(), up.into(), dy.into()]);
    }
    assert_disjoint("gated_act_grad", dgate, [dup.into()]);
    let isa = Isa::current();
    for_each_row_chunk(shape.0, shape.1, |chunk| {
        gradient_rows(isa, kind, [gate, up, dy], [dgate, dup], chunk);
    });
}

/// sqrt(2 / pi) and the cubic coefficient of GELU's tanh form, both for the sigmoid's argument 2u.
const TWICE_SLOPE: f32 = 1.595_769_2;
const CUBIC: f32 = 0.044_715;

/// The value of the sigmoid and the slope of its argument, for each lane.
#[inline(always)]
fn gate_sigmoid(kind: Activation, x: Lanes) -> (Lanes, Lanes) {
    match kind {
        Activation::Silu => (sigmoid_lanes(x), [1.0; LANES]),
        Activation::GeluTanh => {
            let mut argument = [0.0; LANES];
            let mut slope = [0.0; LANES];
            for lane in 0..LANES {
                let square = x[lane] * x[lane];
                argument[lane] = TWICE_SLOPE * (x[lane] + CUBIC * (square * x[lane]));
                slope[lane] = TWICE_SLOPE * (1.0 + 3.0 * CUBIC * square);
            }
            (sigmoid_lanes(argument), slope)
        }
    }
}

kernel! {
    fn activate_rows(kind: Activation, gate: SrcRows, up: SrcRows, y: DstRows, chunk: Chunk) {
        for row in chunk.range() {
            let (gate, up, y) = (gate.row(row), up.row(row), y.row(row));
            for_each_block!(block in gate.len() => {
                let (x, up) = (gate.lanes(block), up.lanes(block));
                let (s, _) = gate_sigmoid(kind, x);
                let mut out = [0.0; LANES];
                for lane in 0..LANES {
                    out[lane] = x[lane] * s[lane] * up[lane];
                }
                y.set_lanes(block, out);
            });
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
                let (x, up, dy) = (gate.lanes(block), up.lanes(block), dy.lanes(block));
                let (s, z_slope) = gate_sigmoid(kind, x);
                let mut out_gate = [0.0; LANES];
                let mut out_up = [0.0; LANES];
                for lane in 0..LANES {
                    let value = x[lane] * s[lane];
                    let slope = s[lane] + value * (1.0 - s[lane]) * z_slope[lane];
                    out_gate[lane] = dy[lane] * up[lane] * slope;
                    out_up[lane] = dy[lane] * value;
                }
                dgate.set_lanes(block, out_gate);
                dup.set_lanes(block, out_up);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::super::view::Dst;
    use super::*;

    const KINDS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

    fn reference(kind: Activation, x: f64) -> f64 {
        match kind {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + u.tanh())
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
                    .map(|(gate, up)| reference(kind, f64::from(*gate)) * f64::from(*up))
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
                (0..len).map(|i| dy[i] * reference(kind, gate[i]) * up[i]).sum::<f64>()
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

    #[test]
    fn tails_are_flat_and_nan_is_kept() {
        for kind in KINDS {
            let gate = [-1e4_f32, -200.0, 200.0, 1e4, f32::NAN];
            let mut y = [f32::NAN; 5];
            let up = [1.0; 5];
            gated_act(kind, src(&gate).rows(5), src(&up).rows(5), dst(&mut y).rows(5));
            assert_eq!(&y[..4], &[0.0, 0.0, 200.0, 1e4]);
            assert!(y[4].is_nan());
        }
    }
}
