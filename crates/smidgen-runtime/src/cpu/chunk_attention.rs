//! Attention to all rows of a chunk, with a learned bias per head and distance, and its gradient.
//!
//! A query's softmax is computed over its keys one by one, with a running maximum, so no row of scores is stored.
//! Backward recomputes the scores: once per query for the gradient of the queries, once per key for the other two. With
//! p the probabilities, D = do·o and s the scale,
//!
//! ```text
//! ds = p (do·v - D)      dq = s Σ ds k      dk = s Σ ds q      dv = Σ p do
//! ```
//!
//! Left out: the gradient of the bias, which is never trained.

use super::audio_conv::Marks;
use super::chunk::for_each_chunk;
use super::footprint::assert_disjoint;
use super::simd::{Isa, LANES, for_each_block, kernel, sum_lanes};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use smidgen_ir::AttentionShape;

/// The inputs of the scores.
#[derive(Clone, Copy)]
pub struct Scores<'a> {
    pub shape: AttentionShape,
    pub q: SrcRows, // (A, H·D)
    pub k: SrcRows, // (A, H·D)
    pub marks: Marks<'a>,
    pub bias: StoredVector, // (2·M, H)
}

/// Rows of one task.
const ROWS: usize = 8;

impl Scores<'_> {
    #[inline(always)]
    fn part(&self, rows: SrcRows, row: usize, head: usize) -> Src<f32> {
        let width = self.shape.head_dim;
        rows.row(row).part(head * width, width)
    }

    #[inline(always)]
    fn score(&self, query: usize, key: usize, head: usize) -> f32 {
        let heads = self.shape.heads;
        let max_distance = (self.bias.len() / heads / 2) as isize;
        let distance = (key as isize - query as isize).clamp(-max_distance, max_distance - 1) + max_distance;
        let product = dot(self.part(self.q, query, head), self.part(self.k, key, head));
        product * self.shape.scale + self.bias.get(distance as usize * heads + head)
    }

    fn check(&self) {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        assert_eq!(heads, kv_heads, "every head has its own keys");
        for rows in [self.q, self.k] {
            assert_eq!((rows.rows(), rows.columns()), (self.marks.rows(), heads * head_dim));
        }
        assert!(self.bias.len() >= 2 * heads && self.bias.len().is_multiple_of(2 * heads));
    }
}

/// o = softmax(scores)·v, and the log of the sum of exponentials for each row and head.
pub fn chunk_attention(scores: Scores<'_>, v: SrcRows, o: DstRows, lse: DstRows) {
    scores.check();
    assert_eq!((v.rows(), v.columns()), (scores.q.rows(), scores.q.columns()));
    assert_eq!((o.rows(), o.columns()), (v.rows(), v.columns()));
    assert_eq!((lse.rows(), lse.columns()), (v.rows(), scores.shape.heads));
    assert_disjoint("chunk_attention", o, [scores.q.into(), scores.k.into(), v.into()]);
    assert_disjoint("chunk_attention", lse, [scores.q.into(), scores.k.into(), v.into(), o.into()]);
    let isa = Isa::current();
    for_each_chunk(o.rows(), ROWS, |chunk| {
        for row in chunk.range() {
            for head in 0..scores.shape.heads {
                attend(isa, scores, v, row, head, o, lse);
            }
        }
    });
}

/// The inputs of the backward pass besides those of the scores.
#[derive(Clone, Copy)]
pub struct Upstream {
    pub v: SrcRows,
    pub o: SrcRows,
    pub lse: SrcRows,
    pub o_gradient: SrcRows,
}

/// Gradients of queries, keys and values.
pub fn chunk_attention_grad(scores: Scores<'_>, upstream: Upstream, outputs: [DstRows; 3]) {
    scores.check();
    let Upstream { v, o, o_gradient, lse } = upstream;
    for rows in [v, o, o_gradient] {
        assert_eq!((rows.rows(), rows.columns()), (scores.q.rows(), scores.q.columns()));
    }
    for (index, output) in outputs.iter().enumerate() {
        assert_eq!((output.rows(), output.columns()), (v.rows(), v.columns()));
        let inputs = [scores.q.into(), scores.k.into(), v.into(), o.into(), o_gradient.into(), lse.into()];
        assert_disjoint("chunk_attention_grad", *output, inputs);
        assert_disjoint("chunk_attention_grad", *output, [outputs[(index + 1) % 3].into()]);
    }
    let isa = Isa::current();
    for_each_chunk(v.rows(), ROWS, |chunk| {
        for row in chunk.range() {
            for head in 0..scores.shape.heads {
                query_gradient(isa, scores, upstream, row, head, outputs[0]);
                key_gradient(isa, scores, upstream, row, head, outputs[1], outputs[2]);
            }
        }
    });
}

#[inline(always)]
fn dot(a: Src<f32>, b: Src<f32>) -> f32 {
    let mut sums = [0.0; LANES];
    for_each_block!(block in a.len() => {
        let (a, b) = (a.lanes(block), b.lanes(block));
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    });
    sum_lanes(sums)
}

/// y = keep * y + factor * x.
#[inline(always)]
fn accumulate(y: Dst<f32>, keep: f32, factor: f32, x: Src<f32>) {
    for_each_block!(block in x.len() => {
        let (mut sums, x) = (y.lanes(block), x.lanes(block));
        for lane in 0..LANES {
            sums[lane] = keep * sums[lane] + factor * x[lane];
        }
        y.set_lanes(block, sums);
    });
}

kernel! {
    fn attend(scores: Scores<'_>, v: SrcRows, row: usize, head: usize, o: DstRows, lse: DstRows) {
        let width = scores.shape.head_dim;
        let out = o.row(row).part(head * width, width);
        out.fill_zero();
        let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0f32);
        for key in scores.marks.chunk(row) {
            let score = scores.score(row, key, head);
            let new = if score > largest || score.is_nan() { score } else { largest };
            let (keep, weight) = ((largest - new).exp(), (score - new).exp());
            largest = new;
            sum = sum * keep + weight;
            accumulate(out, keep, weight, scores.part(v, key, head));
        }
        accumulate(out, 0.0, 1.0 / sum, out.src());
        lse.row(row).set(head, largest + sum.ln());
    }
}

kernel! {
    fn query_gradient(scores: Scores<'_>, upstream: Upstream, row: usize, head: usize, dq: DstRows) {
        let width = scores.shape.head_dim;
        let out = dq.row(row).part(head * width, width);
        out.fill_zero();
        let gradient = scores.part(upstream.o_gradient, row, head);
        let delta = dot(gradient, scores.part(upstream.o, row, head));
        let lse = upstream.lse.row(row).get(head);
        for key in scores.marks.chunk(row) {
            let probability = (scores.score(row, key, head) - lse).exp();
            let slope = probability * (dot(gradient, scores.part(upstream.v, key, head)) - delta);
            accumulate(out, 1.0, scores.shape.scale * slope, scores.part(scores.k, key, head));
        }
    }
}

kernel! {
    fn key_gradient(
        scores: Scores<'_>,
        upstream: Upstream,
        key: usize,
        head: usize,
        dk: DstRows,
        dv: DstRows,
    ) {
        let width = scores.shape.head_dim;
        let [dk, dv] = [dk, dv].map(|rows| rows.row(key).part(head * width, width));
        dk.fill_zero();
        dv.fill_zero();
        let value = scores.part(upstream.v, key, head);
        for row in scores.marks.chunk(key) {
            let gradient = scores.part(upstream.o_gradient, row, head);
            let delta = dot(gradient, scores.part(upstream.o, row, head));
            let probability = (scores.score(row, key, head) - upstream.lse.row(row).get(head)).exp();
            let slope = probability * (dot(gradient, value) - delta);
            accumulate(dk, 1.0, scores.shape.scale * slope, scores.part(scores.q, row, head));
            accumulate(dv, 1.0, probability, gradient);
        }
    }
}
