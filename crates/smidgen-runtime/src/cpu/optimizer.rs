//! The optimizer's element-wise work: the squared norm of gradients, and AdamW.
//!
//! AdamW follows `torch.optim.AdamW` operation by operation (decoupled decay first, the first moment as
//! a lerp, eps added after the bias correction), in f32, with scalars computed in f64 and rounded once.
//! Left out: schedules and the clipping rule; the caller passes the learning rate and the coefficient.

use super::chunk::{CHUNK_ELEMENTS, Chunk, for_each_chunk};
use super::columns::squares;
use super::footprint::assert_disjoint;
use super::simd::{Isa, LANES, for_each_block, kernel};
use super::view::{Dst, Src};
use smidgen_ir::{ACTIVITY_COLUMNS, AdamW};
use std::sync::atomic::{AtomicU32, Ordering};

/// AdamW's settings for one step; `step` counts from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwHyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub step: u64,
}

impl AdamwHyper {
    /// Reads the settings of a step and the clip coefficient; `None` if `report` says that the step is not finite.
    pub fn read(settings: &AdamW, report: Src<f64>, hyper: Src<f64>) -> Option<(AdamwHyper, f32)> {
        let values = AdamwHyper {
            lr: hyper.get(0),
            beta1: settings.beta1,
            beta2: settings.beta2,
            eps: settings.eps,
            weight_decay: settings.weight_decay,
            step: hyper.get(1) as u64,
        };
        let is_finite = report.get(3) == 1.0;
        is_finite.then(|| (values, report.get(2) as f32))
    }
}

/// `base` to a whole power by squaring, with the same operations on every device.
pub fn whole_power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent != 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

/// The sum of x², in f64. `scratch` has at least `sum_of_squares_scratch_len` elements.
pub fn sum_of_squares(x: Src<f32>, scratch: Dst<f64>) -> f64 {
    let partials = scratch.part(0, sum_of_squares_scratch_len(x.len()));
    assert_disjoint("sum_of_squares", partials, [x.into()]);
    let isa = Isa::current();
    for_each_chunk(x.len(), CHUNK_ELEMENTS, |chunk| {
        partials.set(chunk.index, squares(isa, x.part(chunk.start, chunk.len)));
    });
    let mut sum = 0.0;
    for index in 0..partials.len() {
        sum += partials.src().get(index);
    }
    sum
}

/// Partial sums that `sum_of_squares` needs for `len` elements.
pub fn sum_of_squares_scratch_len(len: usize) -> usize {
    len.div_ceil(CHUNK_ELEMENTS)
}

/// One AdamW step on parameters `p` with gradient `g * clip_coefficient` and moments `m` and `v`; also updates the
/// tensor's `activity`.
pub fn adamw(
    p: Dst<f32>,
    g: Src<f32>,
    m: Dst<f32>,
    v: Dst<f32>,
    activity: Dst<f32>,
    hyper: AdamwHyper,
    clip_coefficient: f32,
) {
    let len = p.len();
    assert_eq!((g.len(), m.len(), v.len()), (len, len, len));
    assert!(hyper.step > 0, "`adamw`: steps count from 1");
    assert_disjoint("adamw", p, [g.into(), m.into(), v.into()]);
    assert_disjoint("adamw", m, [g.into(), v.into()]);
    assert_disjoint("adamw", v, [g.into()]);
    let scalars = AdamwScalars::new(hyper, clip_coefficient);
    let isa = Isa::current();
    let shared = SharedActivity::of(activity);
    for_each_chunk(len, CHUNK_ELEMENTS, |chunk| {
        let Chunk { start, len, .. } = chunk;
        shared.raise(adamw_chunk(
            isa,
            p.part(start, len),
            g.part(start, len),
            m.part(start, len),
            v.part(start, len),
            scalars,
        ));
    });
    shared.store(activity);
}

/// The activity of a tensor while several threads update chunks of it: maxima, as the bits of f32 that are not negative,
/// which have the order of the numbers. A maximum does not depend on the order of chunks.
pub struct SharedActivity([AtomicU32; ACTIVITY_COLUMNS]);

impl SharedActivity {
    pub fn of(activity: Dst<f32>) -> SharedActivity {
        assert_eq!(activity.len(), ACTIVITY_COLUMNS);
        SharedActivity(std::array::from_fn(|column| AtomicU32::new(activity.src().get(column).to_bits())))
    }

    pub fn raise(&self, found: [f32; ACTIVITY_COLUMNS]) {
        for (top, number) in self.0.iter().zip(found) {
            top.fetch_max(number.to_bits(), Ordering::Relaxed);
        }
    }

    pub fn store(self, activity: Dst<f32>) {
        for (column, top) in self.0.into_iter().enumerate() {
            activity.set(column, f32::from_bits(top.into_inner()));
        }
    }
}

/// The larger of two magnitudes; `top` if `magnitude` is NaN.
#[inline(always)]
pub fn larger(top: f32, magnitude: f32) -> f32 {
    if magnitude > top { magnitude } else { top }
}

/// The activity of a chunk from the maxima of its lanes.
#[inline(always)]
pub fn activity_of(
    gradients: [f32; LANES],
    parameters: [f32; LANES],
    moved: [f32; LANES],
) -> [f32; ACTIVITY_COLUMNS] {
    [gradients, parameters, moved].map(largest_of)
}

#[inline(always)]
pub fn largest_of(lanes: [f32; LANES]) -> f32 {
    lanes.into_iter().fold(0.0, larger)
}

#[derive(Clone, Copy)]
struct AdamwScalars {
    clip: f32,
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    bias_correction2_root: f32,
    eps: f32,
    minus_step_size: f32,
}

impl AdamwScalars {
    fn new(hyper: AdamwHyper, clip: f32) -> AdamwScalars {
        let bias_correction1 = 1.0 - whole_power(hyper.beta1, hyper.step);
        let bias_correction2 = 1.0 - whole_power(hyper.beta2, hyper.step);
        AdamwScalars {
            clip,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            one_minus_beta1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            one_minus_beta2: (1.0 - hyper.beta2) as f32,
            bias_correction2_root: bias_correction2.sqrt() as f32,
            eps: hyper.eps as f32,
            minus_step_size: -(hyper.lr / bias_correction1) as f32,
        }
    }
}

kernel! {
    fn adamw_chunk(
        p: Dst<f32>,
        g: Src<f32>,
        m: Dst<f32>,
        v: Dst<f32>,
        scalars: AdamwScalars,
    ) -> [f32; ACTIVITY_COLUMNS] {
        let [mut g_tops, mut p_tops, mut moved] = [[0.0_f32; LANES]; 3];
        for_each_block!(block in p.len() => {
            let mut p_lanes = p.lanes(block);
            let mut m_lanes = m.lanes(block);
            let mut v_lanes = v.lanes(block);
            let g_lanes = g.lanes(block);
            for lane in 0..LANES {
                let g = g_lanes[lane] * scalars.clip;
                let first = m_lanes[lane] + scalars.one_minus_beta1 * (g - m_lanes[lane]);
                let second = v_lanes[lane] * scalars.beta2 + scalars.one_minus_beta2 * g * g;
                let denominator = second.sqrt() / scalars.bias_correction2_root + scalars.eps;
                let decayed = p_lanes[lane] * scalars.decay;
                let next = decayed + scalars.minus_step_size * first / denominator;
                g_tops[lane] = larger(g_tops[lane], g.abs());
                p_tops[lane] = larger(p_tops[lane], p_lanes[lane].abs());
                moved[lane] = if next == p_lanes[lane] { moved[lane] } else { 1.0 };
                p_lanes[lane] = next;
                m_lanes[lane] = first;
                v_lanes[lane] = second;
            }
            p.set_lanes(block, p_lanes);
            m.set_lanes(block, m_lanes);
            v.set_lanes(block, v_lanes);
        });
        activity_of(g_tops, p_tops, moved)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const HYPER: AdamwHyper =
        AdamwHyper { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 0 };

    #[test]
    fn sum_of_squares_matches_the_reference() {
        for len in [0, 1, 7, 16, 33, 576, 3 * CHUNK_ELEMENTS + 5] {
            let x = numbers(1, len);
            let got = on_every_isa(|| {
                let mut scratch = vec![f64::NAN; sum_of_squares_scratch_len(len)];
                sum_of_squares(src(&x), dst(&mut scratch))
            });
            let want: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            assert!((got - want).abs() <= 1e-12 * want, "{len}: {got} against {want}");
        }
    }

    #[test]
    fn sum_of_squares_survives_the_edges_of_f32() {
        for magnitude in [1e-30_f32, 1e30] {
            let x = [magnitude; 4];
            let got = sum_of_squares(src(&x), dst(&mut [0.0]));
            let want = 4.0 * f64::from(magnitude).powi(2);
            assert!((got / want - 1.0).abs() < 1e-12);
        }
    }

    /// Five steps against the formula in f64.
    #[test]
    fn adamw_matches_the_reference_over_steps() {
        for len in [1, 7, 16, 33, 576, CHUNK_ELEMENTS + 3] {
            let (start, clip) = (numbers(1, len), 0.625_f32);
            let got = on_every_isa(|| {
                let (mut p, mut m, mut v) = (start.clone(), vec![0.0; len], vec![0.0; len]);
                let mut activity = [0.0; ACTIVITY_COLUMNS];
                for step in 1..=5 {
                    let g = numbers(10 + step, len);
                    let hyper = AdamwHyper { step, ..HYPER };
                    let views = (dst(&mut p), dst(&mut m), dst(&mut v));
                    adamw(views.0, src(&g), views.1, views.2, dst(&mut activity), hyper, clip);
                }
                (p, (m, v))
            });
            let (mut p, mut m, mut v) = (widened(&start), vec![0.0; len], vec![0.0; len]);
            for step in 1..=5_i32 {
                for (i, g) in numbers(10 + step as u64, len).iter().enumerate() {
                    let g = f64::from(*g) * f64::from(clip);
                    p[i] *= 1.0 - HYPER.lr * HYPER.weight_decay;
                    m[i] = HYPER.beta1 * m[i] + (1.0 - HYPER.beta1) * g;
                    v[i] = HYPER.beta2 * v[i] + (1.0 - HYPER.beta2) * g * g;
                    let root = (1.0 - HYPER.beta2.powi(step)).sqrt();
                    let rate = HYPER.lr / (1.0 - HYPER.beta1.powi(step));
                    p[i] -= rate * m[i] / (v[i].sqrt() / root + HYPER.eps);
                }
            }
            assert_close("p", &got.0, &p, 0.1, 1e-6);
            assert_close("m", &got.1.0, &m, 0.01, 1e-5);
            assert_close("v", &got.1.1, &v, 0.01, 1e-5);
        }
    }

    /// Three steps recorded from PyTorch 2.15 (`torch.optim.AdamW(foreach=False)`, gradients times 0.8), which may
    /// fuse a multiply and an add. So four units in the last place are allowed; the difference is largest where a
    /// moment's terms cancel.
    #[test]
    fn adamw_matches_recorded_pytorch() {
        let mut p = [0.5_f32, -1.25, 3.0, 1e-3, 0.0, -0.75, 2.5, -1e-2];
        let gradients: [[f32; 8]; 3] = [
            [0.1, -0.2, 0.3, 1e-4, 0.5, -1.5, 1e-6, 0.25],
            [-0.3, 0.1, 0.2, -1e-4, 0.5, 1.25, 1e-5, -0.75],
            [0.7, 0.9, -0.6, 3e-4, -0.5, 0.125, -1e-6, 0.0],
        ];
        let (mut m, mut v) = ([0.0_f32; 8], [0.0_f32; 8]);
        for (g, step) in gradients.iter().zip(1..) {
            let hyper = AdamwHyper { lr: 2e-3, step, ..HYPER };
            adamw(
                dst(&mut p),
                src(g),
                dst(&mut m),
                dst(&mut v),
                dst(&mut [0.0; ACTIVITY_COLUMNS]),
                hyper,
                0.8,
            );
        }
        let recorded: [(&str, [f32; 8], [u32; 8]); 3] = [
            (
                "p",
                p,
                [
                    0x3efee5b2, 0xbf9fb8e7, 0x403fa70a, 0xbb02c35c, 0xbb9433e0, 0xbf3f5c05, 0x401f9ac4,
                    0xbc27e99e,
                ],
            ),
            (
                "m",
                m,
                [
                    0x3d2771c9, 0x3d87a8d6, 0xbc67ff56, 0x37c3496c, 0x3ce8a720, 0x3b37802d, 0x353d317c,
                    0xbd1ad42c,
                ],
            ),
            (
                "v",
                v,
                [
                    0x3c993ad0, 0x3ce04a57, 0x3c7b407f, 0x316ea626, 0x3cbaf103, 0x3de76210, 0x2c5a347d,
                    0x3c9adea9,
                ],
            ),
        ];
        for (name, got, want) in recorded {
            for (got, want) in got.iter().zip(want) {
                let units = got.to_bits().abs_diff(want);
                assert!(units <= 4, "{name}: {got:e}, {units} units from the record");
            }
        }
    }
}
