//! Tests attention and its gradient against f64: an analytic reference for many shapes, and finite differences of the
//! reference's forward pass for a small shape. Also tests that any number of threads gives the same bytes. On a machine
//! with a bf16 unit, bf16 matmuls are compared within the error that their rounding allows.
//!
//! Buffers have rows wider than their heads, filled with a mark that must not be overwritten.
//! Left out: speed.

use smidgen_ir::workspace_cpu::{attention_floats, bf16_attention_thread_floats};
use smidgen_runtime::cpu::attention::{AttentionBuffers, AttentionOptions, Tokens, TokensMut, attention};
use smidgen_runtime::cpu::attention_gradient::{AttentionGradientBuffers, attention_gradient};
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;
use smidgen_runtime::cpu::isa::Isa;
use smidgen_runtime::cpu::pool::Pool;

const MARK: f32 = 777.0;
const PAD: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Case<'a> {
    segments: &'a [i32],
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    softcap: Option<f32>,
}

impl Case<'_> {
    fn tokens(&self) -> usize {
        self.segments[self.segments.len() - 1] as usize
    }
    fn options(&self, unit: Option<Bf16Unit>) -> AttentionOptions<'_> {
        AttentionOptions {
            unit,
            segments: self.segments,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.3 / (self.head_dim as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
            sinks: None,
        }
    }
}

/// A matrix (T, channels) with padded rows.
#[derive(Clone)]
struct Matrix {
    data: Vec<f32>,
    channels: usize,
}

impl Matrix {
    fn random(tokens: usize, channels: usize, seed: u64) -> Matrix {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut matrix = Matrix::marked(tokens, channels);
        for token in 0..tokens {
            for channel in 0..channels {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 40) as f32 / (1u64 << 24) as f32;
                matrix.data[token * (channels + PAD) + channel] = 3.0 * unit - 1.5;
            }
        }
        matrix
    }
    fn marked(tokens: usize, channels: usize) -> Matrix {
        Matrix { data: vec![MARK; tokens * (channels + PAD)], channels }
    }
    fn view(&self) -> Tokens {
        Tokens { pointer: self.data.as_ptr(), row_stride: self.channels + PAD }
    }
    fn view_mut(&mut self) -> TokensMut {
        TokensMut { pointer: self.data.as_mut_ptr(), row_stride: self.channels + PAD }
    }
    fn dense(&self) -> Vec<f64> {
        self.data
            .chunks(self.channels + PAD)
            .flat_map(|row| row[..self.channels].iter().map(|&x| f64::from(x)))
            .collect()
    }
    fn assert_padding_untouched(&self) {
        for row in self.data.chunks(self.channels + PAD) {
            assert!(row[self.channels..].iter().all(|&x| x == MARK), "wrote into padding");
        }
    }
}

struct Inputs {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o_gradient: Matrix,
}

struct Outputs {
    o: Matrix,
    lse: Vec<f32>,
    q_gradient: Matrix,
    k_gradient: Matrix,
    v_gradient: Matrix,
}

fn inputs(case: &Case<'_>) -> Inputs {
    let (wide, narrow) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    Inputs {
        q: Matrix::random(case.tokens(), wide, 1),
        k: Matrix::random(case.tokens(), narrow, 2),
        v: Matrix::random(case.tokens(), narrow, 3),
        o_gradient: Matrix::random(case.tokens(), wide, 4),
    }
}

fn run(case: &Case<'_>, inputs: &Inputs, isa: Isa, threads: usize) -> Outputs {
    run_on(None, case, inputs, isa, threads)
}

fn run_on(unit: Option<Bf16Unit>, case: &Case<'_>, inputs: &Inputs, isa: Isa, threads: usize) -> Outputs {
    let (wide, narrow) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
    let tokens = case.tokens();
    let mut out = Outputs {
        o: Matrix::marked(tokens, wide),
        lse: vec![MARK; tokens * case.heads],
        q_gradient: Matrix::marked(tokens, wide),
        k_gradient: Matrix::marked(tokens, narrow),
        v_gradient: Matrix::marked(tokens, narrow),
    };
    let tiles = unit.map_or(0, |_| threads * bf16_attention_thread_floats(case.head_dim));
    let floats = tiles + attention_floats(threads, case.heads / case.kv_heads, case.head_dim);
    Pool::new(threads).unwrap().enter(|| {
        let mut workspace = vec![f32::NAN; floats];
        let options = case.options(unit);
        let forward = AttentionBuffers {
            q: inputs.q.view(),
            k: inputs.k.view(),
            v: inputs.v.view(),
            o: out.o.view_mut(),
            lse: out.lse.as_mut_ptr(),
        };
        // SAFETY: the matrices have T rows of the channels that the options name.
        unsafe { attention(isa, &options, &forward, &mut workspace) };
        workspace.fill(f32::NAN);
        let backward = AttentionGradientBuffers {
            q: inputs.q.view(),
            k: inputs.k.view(),
            v: inputs.v.view(),
            o: out.o.view(),
            lse: out.lse.as_ptr(),
            o_gradient: inputs.o_gradient.view(),
            q_gradient: out.q_gradient.view_mut(),
            k_gradient: out.k_gradient.view_mut(),
            v_gradient: out.v_gradient.view_mut(),
        };
        // SAFETY: as above.
        unsafe { attention_gradient(isa, &options, &backward, &mut workspace) };
    });
    for matrix in [&out.o, &out.q_gradient, &out.k_gradient, &out.v_gradient] {
        matrix.assert_padding_untouched();
    }
    out
}

/// o, lse, dq, dk and dv in f64.
struct Reference {
    o: Vec<f64>,
    lse: Vec<f64>,
    q_gradient: Vec<f64>,
    k_gradient: Vec<f64>,
    v_gradient: Vec<f64>,
}

fn reference(case: &Case<'_>, q: &[f64], k: &[f64], v: &[f64], o_gradient: &[f64]) -> Reference {
    let (d, group) = (case.head_dim, case.heads / case.kv_heads);
    let (wide, narrow) = (case.heads * d, case.kv_heads * d);
    let scale = f64::from(case.options(None).scale);
    let mut out = Reference {
        o: vec![0.0; q.len()],
        lse: vec![0.0; case.tokens() * case.heads],
        q_gradient: vec![0.0; q.len()],
        k_gradient: vec![0.0; k.len()],
        v_gradient: vec![0.0; v.len()],
    };
    for bounds in case.segments.windows(2) {
        for i in bounds[0] as usize..bounds[1] as usize {
            for head in 0..case.heads {
                let (qi, kv) = (i * wide + head * d, head / group * d);
                let visible =
                    (bounds[0] as usize..=i).filter(|&j| case.window.is_none_or(|window| i < j + window));
                let keys: Vec<usize> = visible.collect();
                let mut scores = vec![];
                let mut slopes = vec![];
                for &j in &keys {
                    let dot: f64 = (0..d).map(|c| q[qi + c] * k[j * narrow + kv + c]).sum();
                    let raw = scale * dot;
                    match case.softcap {
                        None => {
                            scores.push(raw);
                            slopes.push(1.0);
                        }
                        Some(cap) => {
                            let t = (raw / f64::from(cap)).tanh();
                            scores.push(f64::from(cap) * t);
                            slopes.push(1.0 - t * t);
                        }
                    }
                }
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                out.lse[i * case.heads + head] = max + sum.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let mut dp = vec![0.0; keys.len()];
                for (at, &j) in keys.iter().enumerate() {
                    for c in 0..d {
                        out.o[qi + c] += p[at] * v[j * narrow + kv + c];
                        out.v_gradient[j * narrow + kv + c] += p[at] * o_gradient[qi + c];
                        dp[at] += o_gradient[qi + c] * v[j * narrow + kv + c];
                    }
                }
                let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
                for (at, &j) in keys.iter().enumerate() {
                    let ds = p[at] * (dp[at] - mean) * slopes[at] * scale;
                    for c in 0..d {
                        out.q_gradient[qi + c] += ds * k[j * narrow + kv + c];
                        out.k_gradient[j * narrow + kv + c] += ds * q[qi + c];
                    }
                }
            }
        }
    }
    out
}

/// The error of two roundings to 8 bits in each of a few matmuls, relative to the largest value; the largest measured
/// error is 8.6e-3.
const BF16_TOLERANCE: f64 = 1.5e-2;

fn units() -> impl Iterator<Item = Bf16Unit> {
    Bf16Unit::ALL.into_iter().filter(|unit| unit.is_supported())
}

fn assert_near(name: &str, got: &[f64], want: &[f64], case: &Case<'_>, unit: Bf16Unit) {
    let largest = want.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    let worst = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max);
    // `worst` ignores NaN, so the values are also checked to be finite.
    assert!(
        got.iter().all(|x| x.is_finite()) && worst <= BF16_TOLERANCE * largest,
        "{name} differs by {:.1e} of the largest value, {unit:?} in {case:?}",
        worst / largest
    );
}

fn assert_close(name: &str, got: &[f64], want: &[f64], case: &Case<'_>, isa: Isa) {
    let largest = want.iter().fold(1.0f64, |max, x| max.max(x.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= 4e-6 * largest,
            "{name}[{index}]: expected {want}, got {got}, largest {largest}, {isa:?} in {case:?}"
        );
    }
}

fn check(case: Case<'_>) {
    let given = inputs(&case);
    let want =
        reference(&case, &given.q.dense(), &given.k.dense(), &given.v.dense(), &given.o_gradient.dense());
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let got = run(&case, &given, isa, 2);
        let lse: Vec<f64> = got.lse.iter().map(|&x| f64::from(x)).collect();
        assert_close("lse", &lse, &want.lse, &case, isa);
        assert_close("o", &got.o.dense(), &want.o, &case, isa);
        assert_close("dv", &got.v_gradient.dense(), &want.v_gradient, &case, isa);
        assert_close("dq", &got.q_gradient.dense(), &want.q_gradient, &case, isa);
        assert_close("dk", &got.k_gradient.dense(), &want.k_gradient, &case, isa);
    }
    for unit in units() {
        let got = run_on(Some(unit), &case, &given, Isa::detect(), 2);
        let lse: Vec<f64> = got.lse.iter().map(|&x| f64::from(x)).collect();
        assert_near("lse", &lse, &want.lse, &case, unit);
        assert_near("o", &got.o.dense(), &want.o, &case, unit);
        assert_near("dv", &got.v_gradient.dense(), &want.v_gradient, &case, unit);
        assert_near("dq", &got.q_gradient.dense(), &want.q_gradient, &case, unit);
        assert_near("dk", &got.k_gradient.dense(), &want.k_gradient, &case, unit);
    }
}

#[test]
fn every_head_size() {
    for head_dim in [2, 8, 12, 16, 18, 24, 64, 80, 96, 112, 128, 160, 192, 256, 268, 320, 512] {
        check(Case {
            segments: &[0, 1, 40, 150],
            heads: 3,
            kv_heads: 1,
            head_dim,
            window: None,
            softcap: None,
        });
    }
}

#[test]
fn segments_of_any_length() {
    for segments in
        [&[0, 0, 1, 1, 2, 99, 99, 163, 260, 260][..], &[0, 64, 160, 256], &[0, 333], &[0, 1], &[0, 0], &[0]]
    {
        check(Case { segments, heads: 4, kv_heads: 2, head_dim: 16, window: None, softcap: None });
    }
}

#[test]
fn many_heads_in_rows_of_4_kib() {
    // 127 heads of 8 channels and the padding of 8 are 1024 floats.
    check(Case { segments: &[0, 33, 40], heads: 127, kv_heads: 1, head_dim: 8, window: None, softcap: None });
}

#[test]
fn windows_and_softcaps() {
    for window in [None, Some(1), Some(2), Some(33), Some(96), Some(130), Some(10_000)] {
        for softcap in [None, Some(0.7), Some(30.0)] {
            check(Case { segments: &[0, 300, 317], heads: 2, kv_heads: 2, head_dim: 24, window, softcap });
        }
    }
}

#[test]
fn gradients_are_finite_differences_of_the_reference() {
    let case = Case {
        segments: &[0, 7, 7, 12],
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        window: Some(4),
        softcap: Some(0.9),
    };
    let given = inputs(&case);
    let got = run(&case, &given, Isa::detect(), 1);
    let weights = given.o_gradient.dense();
    let loss = |q: &[f64], k: &[f64], v: &[f64]| -> f64 {
        let o = reference(&case, q, k, v, &weights).o;
        o.iter().zip(&weights).map(|(o, w)| o * w).sum()
    };
    let start = [given.q.dense(), given.k.dense(), given.v.dense()];
    let gradients = [&got.q_gradient, &got.k_gradient, &got.v_gradient].map(Matrix::dense);
    for which in 0..3 {
        for index in 0..start[which].len() {
            let [above, below] = [1e-5, -1e-5].map(|step| {
                let mut moved = start.clone();
                moved[which][index] += step;
                loss(&moved[0], &moved[1], &moved[2])
            });
            let slope = (above - below) / 2e-5;
            let gradient = gradients[which][index];
            assert!(
                (slope - gradient).abs() < 1e-5,
                "operand {which}, element {index}: slope {slope}, gradient {gradient}"
            );
        }
    }
}

#[test]
fn the_same_bytes_for_any_number_of_threads() {
    let case = Case {
        segments: &[0, 130, 131, 300],
        heads: 6,
        kv_heads: 3,
        head_dim: 32,
        window: Some(120),
        softcap: None,
    };
    let given = inputs(&case);
    let bits = |matrix: &Matrix| -> Vec<u32> { matrix.data.iter().map(|x| x.to_bits()).collect() };
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let runs = [1, 2, 4].map(|threads| run(&case, &given, isa, threads));
        for other in &runs[1..] {
            assert_eq!(runs[0].lse, other.lse);
            assert_eq!(bits(&runs[0].o), bits(&other.o));
            assert_eq!(bits(&runs[0].q_gradient), bits(&other.q_gradient));
            assert_eq!(bits(&runs[0].k_gradient), bits(&other.k_gradient));
            assert_eq!(bits(&runs[0].v_gradient), bits(&other.v_gradient));
        }
    }
}
