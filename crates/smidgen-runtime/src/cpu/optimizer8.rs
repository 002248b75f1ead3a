//! AdamW with 8-bit moments, block by block, as in the CUDA kernel of bitsandbytes.
//!
//! A block of 256 elements is decoded, the new moments are computed in f32, the parameters are updated with these
//! unrounded moments, and then the moments are encoded with the block's new largest magnitudes. As in that kernel,
//! weight decay comes after the step (the library's CPU path and `optimizer.rs` apply it before), and β1, β2 and 1 - β
//! are f32; the other scalars are computed in f64 and rounded once.
//! Differences: divisions, roots and powers are correctly rounded, multiplies and adds are never fused, a block of
//! zeros gets code 0, and a second moment beyond the range of f32 is clamped to the largest f32, because infinity would
//! decode to NaN.

use super::chunk::{CHUNK_ELEMENTS, Chunk, for_each_chunk};
use super::footprint::assert_disjoint;
use super::optimizer::{AdamwHyper, SharedActivity, activity_of, larger, largest_of, whole_power};
use super::simd::{Isa, LANES, for_each_block, kernel};
use super::view::{Dst, Src};
use smidgen_ir::ACTIVITY_COLUMNS;
use smidgen_ir::quant::dynamic_map::{SIGNED_MAP, UNSIGNED_MAP};
use smidgen_ir::quant::nearest_code::{nearest_signed, nearest_unsigned};
use smidgen_ir::storage::{DYNAMIC8_BLOCK, dynamic8_codes};

/// A moment: one byte per element, and the largest magnitude of each block.
#[derive(Clone, Copy, Debug)]
pub struct Moment8 {
    pub largest: Dst<f32>,
    pub codes: Dst<u8>,
}

impl Moment8 {
    /// The moment of `elements` elements at an address: the magnitudes, then the codes.
    ///
    /// # Safety
    /// The address is aligned for f32, and all of the moment is valid for as long as the view is used.
    pub unsafe fn at(begin: *mut u8, elements: usize) -> Moment8 {
        let codes = dynamic8_codes(elements);
        // SAFETY: the two parts follow each other in the range that the caller promises.
        unsafe {
            Moment8 {
                largest: Dst::new(begin.cast(), codes / 4),
                codes: Dst::new(begin.add(codes), elements),
            }
        }
    }

    /// Elements `start..start + len`: whole blocks, except at the end of the moment.
    #[inline(always)]
    fn part(self, start: usize, len: usize) -> Moment8 {
        let blocks = len.div_ceil(DYNAMIC8_BLOCK);
        Moment8 {
            largest: self.largest.part(start / DYNAMIC8_BLOCK, blocks),
            codes: self.codes.part(start, len),
        }
    }
}

/// One AdamW step on parameters `p` with gradient `g * clip_coefficient`, first moment `m` (codes of the signed
/// map) and second moment `v` (codes of the unsigned one); also updates the tensor's `activity`.
pub fn adamw8(
    p: Dst<f32>,
    g: Src<f32>,
    m: Moment8,
    v: Moment8,
    activity: Dst<f32>,
    hyper: AdamwHyper,
    clip_coefficient: f32,
) {
    const { assert!(CHUNK_ELEMENTS.is_multiple_of(DYNAMIC8_BLOCK) && DYNAMIC8_BLOCK.is_multiple_of(LANES)) };
    let (len, blocks) = (p.len(), p.len().div_ceil(DYNAMIC8_BLOCK));
    assert_eq!((g.len(), m.codes.len(), v.codes.len()), (len, len, len));
    assert_eq!((m.largest.len(), v.largest.len()), (blocks, blocks));
    assert!(hyper.step > 0, "`adamw8`: steps count from 1");
    let moments = [m.codes.into(), v.codes.into(), m.largest.into(), v.largest.into(), g.into()];
    assert_disjoint("adamw8", p, moments);
    assert_disjoint("adamw8", m.codes, [g.into(), v.codes.into(), m.largest.into(), v.largest.into()]);
    assert_disjoint("adamw8", v.codes, [g.into(), m.largest.into(), v.largest.into()]);
    assert_disjoint("adamw8", m.largest, [g.into(), v.largest.into()]);
    assert_disjoint("adamw8", v.largest, [g.into()]);
    let scalars = Adamw8Scalars::new(hyper, clip_coefficient);
    let isa = Isa::current();
    let shared = SharedActivity::of(activity);
    for_each_chunk(len, CHUNK_ELEMENTS, |Chunk { start, len, .. }| {
        shared.raise(adamw8_chunk(
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

#[derive(Clone, Copy)]
struct Adamw8Scalars {
    clip: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    minus_step_size: f32,
    eps: f32,
    keep: f32,
}

impl Adamw8Scalars {
    /// With c1 = 1 - β1^t and c2 = √(1 - β2^t): p - lr·(m/c1) / (√v/c2 + eps) = p - (lr·c2/c1) · m / (√v + c2·eps).
    fn new(hyper: AdamwHyper, clip: f32) -> Adamw8Scalars {
        let (beta1, beta2) = (hyper.beta1 as f32, hyper.beta2 as f32);
        let correction = |beta: f32| 1.0 - whole_power(f64::from(beta), hyper.step);
        let (correction1, correction2) = (correction(beta1), correction(beta2).sqrt());
        Adamw8Scalars {
            clip,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2,
            one_minus_beta2: 1.0 - beta2,
            minus_step_size: -(hyper.lr * correction2 / correction1) as f32,
            eps: (correction2 * hyper.eps) as f32,
            keep: (1.0 - hyper.lr * hyper.weight_decay) as f32,
        }
    }
}

kernel! {
    fn adamw8_chunk(
        p: Dst<f32>,
        g: Src<f32>,
        m: Moment8,
        v: Moment8,
        scalars: Adamw8Scalars,
    ) -> [f32; ACTIVITY_COLUMNS] {
        let mut activity = [0.0; ACTIVITY_COLUMNS];
        let mut start = 0;
        while start < p.len() {
            let len = (p.len() - start).min(DYNAMIC8_BLOCK);
            let (p, g) = (p.part(start, len), g.part(start, len));
            let found = step_block(p, g, m.part(start, len), v.part(start, len), scalars);
            for (top, number) in activity.iter_mut().zip(found) {
                *top = larger(*top, number);
            }
            start += len;
        }
        activity
    }
}

#[inline(always)]
fn step_block(
    p: Dst<f32>,
    g: Src<f32>,
    m: Moment8,
    v: Moment8,
    scalars: Adamw8Scalars,
) -> [f32; ACTIVITY_COLUMNS] {
    // A short block is padded with zeros, which change neither largest magnitude.
    let mut first = decoded(m, &SIGNED_MAP);
    let mut second = decoded(v, &UNSIGNED_MAP);
    let [mut first_tops, mut second_tops, mut g_tops, mut p_tops, mut changed] = [[0.0_f32; LANES]; 5];
    for_each_block!(block in p.len() => {
        let g_lanes = g.lanes(block);
        let mut p_lanes = p.lanes(block);
        let first = &mut first[block.start..][..LANES];
        let second = &mut second[block.start..][..LANES];
        for lane in 0..LANES {
            let g = g_lanes[lane] * scalars.clip;
            let m = first[lane] * scalars.beta1 + scalars.one_minus_beta1 * g;
            let v = second[lane] * scalars.beta2 + scalars.one_minus_beta2 * g * g;
            let v = if v < f32::MAX { v } else { f32::MAX };
            let moved = p_lanes[lane] + scalars.minus_step_size * (m / (v.sqrt() + scalars.eps));
            let next = moved * scalars.keep;
            g_tops[lane] = larger(g_tops[lane], g.abs());
            p_tops[lane] = larger(p_tops[lane], p_lanes[lane].abs());
            changed[lane] = if next == p_lanes[lane] { changed[lane] } else { 1.0 };
            p_lanes[lane] = next;
            first[lane] = m;
            second[lane] = v;
            first_tops[lane] = larger(first_tops[lane], m.abs());
            second_tops[lane] = larger(second_tops[lane], v);
        }
        p.set_lanes(block, p_lanes);
    });
    encode(m, first, largest_of(first_tops), nearest_of_its_sign);
    encode(v, second, largest_of(second_tops), nearest_unsigned);
    activity_of(g_tops, p_tops, changed)
}

#[inline(always)]
fn decoded(moment: Moment8, map: &[f32; 256]) -> [f32; DYNAMIC8_BLOCK] {
    let (codes, largest) = (moment.codes.src(), moment.largest.src().get(0));
    let mut values = [0.0; DYNAMIC8_BLOCK];
    for (index, value) in values.iter_mut().enumerate().take(codes.len()) {
        *value = map[usize::from(codes.get(index))] * largest;
    }
    values
}

/// Encodes a block: `nearest` returns the code of each value divided by the largest.
#[inline(always)]
fn encode(moment: Moment8, mut values: [f32; DYNAMIC8_BLOCK], largest: f32, nearest: impl Fn(f32) -> u8) {
    moment.largest.set(0, largest);
    let codes = moment.codes;
    if largest == 0.0 {
        (0..codes.len()).for_each(|index| codes.set(index, 0));
        return;
    }
    values.iter_mut().for_each(|value| *value /= largest);
    for (index, value) in values.iter().enumerate().take(codes.len()) {
        codes.set(index, nearest(*value));
    }
}

/// A first moment keeps its sign: a negative value is never encoded as 0.
#[inline(always)]
fn nearest_of_its_sign(value: f32) -> u8 {
    let code = nearest_signed(value);
    let other_sign = SIGNED_MAP[usize::from(code)].is_sign_negative() != value.is_sign_negative();
    match (other_sign, value > 0.0) {
        (false, _) => code,
        (true, true) => code + 1,
        (true, false) => code - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;

    const HYPER: AdamwHyper =
        AdamwHyper { lr: 3e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1 };

    /// Parameters, and both moments as magnitudes and codes.
    #[derive(Clone)]
    struct State {
        p: Vec<f32>,
        largest: [Vec<f32>; 2],
        codes: [Vec<u8>; 2],
    }

    impl State {
        fn new(p: Vec<f32>) -> State {
            let (len, blocks) = (p.len(), p.len().div_ceil(DYNAMIC8_BLOCK));
            State { p, largest: [vec![0.0; blocks], vec![0.0; blocks]], codes: [vec![0; len], vec![0; len]] }
        }

        fn step(&mut self, g: &[f32], hyper: AdamwHyper, clip: f32) {
            let [m_largest, v_largest] = &mut self.largest;
            let [m_codes, v_codes] = &mut self.codes;
            let m = Moment8 { largest: dst(m_largest), codes: dst(m_codes) };
            let v = Moment8 { largest: dst(v_largest), codes: dst(v_codes) };
            adamw8(dst(&mut self.p), src(g), m, v, dst(&mut [0.0; ACTIVITY_COLUMNS]), hyper, clip);
        }

        fn decoded(&self, moment: usize, index: usize) -> f32 {
            let map = if moment == 0 { &SIGNED_MAP } else { &UNSIGNED_MAP };
            map[usize::from(self.codes[moment][index])] * self.largest[moment][index / DYNAMIC8_BLOCK]
        }
    }

    #[test]
    fn every_isa_gives_the_same_bytes() {
        for len in [1, 17, 256, 257, 5000, CHUNK_ELEMENTS + 300] {
            on_every_isa(|| {
                let mut state = State::new(numbers(1, len));
                for step in 1..=3 {
                    state.step(&numbers(10 + step, len), AdamwHyper { step, ..HYPER }, 0.625);
                }
                let [m, v] = state.codes;
                let [m_largest, v_largest] = state.largest;
                (state.p, ((m, v), (m_largest, v_largest)))
            });
        }
    }

    /// The first step decodes no codes, so it is exact, and its codes are the nearest to the exact moments.
    #[test]
    fn the_first_step_is_adamw() {
        let len = 700;
        let (start, g, clip) = (numbers(1, len), numbers(2, len), 0.5);
        let mut state = State::new(start.clone());
        state.step(&g, HYPER, clip);
        for index in 0..len {
            let gradient = f64::from(g[index]) * f64::from(clip);
            let moved = f64::from(start[index]) - HYPER.lr * gradient / (gradient.abs() + HYPER.eps);
            let want = moved * (1.0 - HYPER.lr * HYPER.weight_decay);
            assert!((f64::from(state.p[index]) - want).abs() < 3e-7, "{index}: {} {want}", state.p[index]);
            for (moment, fresh) in [(0, 0.1 * gradient), (1, 0.05 * gradient * gradient)] {
                let largest = f64::from(state.largest[moment][index / DYNAMIC8_BLOCK]);
                let error = (f64::from(state.decoded(moment, index)) - fresh).abs() / largest;
                // Half the widest gap of the map.
                assert!(error < [0.00704, 0.00353][moment], "{moment} {index}: off by {error}");
            }
        }
    }

    #[test]
    fn blocks_of_zeros_stay_zero_until_they_get_a_gradient() {
        let mut state = State::new(vec![1.0; 512]);
        let mut g = vec![0.0; 512];
        g[300] = 2.0;
        state.step(&g, AdamwHyper { weight_decay: 0.0, ..HYPER }, 1.0);
        assert_eq!((state.largest[0][0], state.largest[1][0]), (0.0, 0.0));
        assert!(state.codes.iter().all(|codes| codes[..256].iter().all(|code| *code == 0)));
        assert!(state.p[..256].iter().all(|p| *p == 1.0));
        // In a block that is not zero, 0 has the code of 0.
        assert_eq!((state.codes[0][299], state.codes[1][299]), (127, 0));
        assert_eq!((state.codes[0][300], state.codes[1][300]), (255, 255));
        let g = vec![1.0; 512];
        state.step(&g, AdamwHyper { step: 2, ..HYPER }, 1.0);
        assert!((0..512).all(|index| state.decoded(0, index) > 0.0 && state.p[index] < 1.0));
    }

    /// A small negative value is not encoded as 0, which has the other sign.
    #[test]
    fn a_first_moment_keeps_its_sign() {
        let mut state = State::new(vec![0.0; 256]);
        let mut g = vec![1e-9; 256];
        (g[0], g[1], g[2]) = (1.0, -1e-9, -1e-6);
        state.step(&g, HYPER, 1.0);
        assert_eq!(state.codes[0][..4], [255, 126, 126, 127]);
    }

    /// Squares beyond f32 must not become NaN later.
    #[test]
    fn a_second_moment_beyond_f32_stays_finite() {
        let mut state = State::new(vec![1.0; 300]);
        for step in 1..=4 {
            let g: Vec<f32> = numbers(step, 300).into_iter().map(|value| value * 1e30).collect();
            state.step(&g, AdamwHyper { step, ..HYPER }, 1.0);
            assert!(state.p.iter().all(|p| p.is_finite()), "step {step}");
            assert!((0..300).all(|index| state.decoded(1, index).is_finite()), "step {step}");
        }
    }
}
