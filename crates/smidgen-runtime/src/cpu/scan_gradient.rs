//! The backward pass of a scan.
//!
//! A task is a sample with some heads that share a head of keys. It first stores the states at the beginnings of chunks;
//! then, from the last chunk to the first, it recomputes the states after each token and goes back through them. With r the
//! rest that a token writes, u = beta·r, P = keep·S the decayed state before it and G the gradient of the state after it:
//!
//! ```text
//! G += q·doᵀ,  dq = S·do,  du = Gᵀk,  dk = G·u,  dbeta = du·r,  dv = dr = beta·du
//! by the delta rule:  dk -= P·dr,  G -= k·drᵀ
//! dg = Σ G∘P,  and G := keep·G for the token before
//! ```

use super::chunk::for_each_row;
use super::footprint::assert_disjoint;
use super::pool::run_tasks;
use super::scan::{ScanInputs, States, Token, block_of, of_thread, step};
use super::simd::{Isa, LANES, for_each_block, kernel, sum_lanes};
use super::view::{Dst, DstRows, Src, SrcRows};
use smidgen_ir::ScanShape;
use smidgen_ir::workspace_cpu::{aligned_floats, scan_parts, scan_thread_floats};
use std::ops::Range;

/// Gradients of q, k, v, g and beta.
#[derive(Clone, Copy)]
pub struct ScanGradients {
    pub dq: DstRows,
    pub dk: DstRows,
    pub dv: DstRows,
    pub dg: DstRows,
    pub dbeta: DstRows,
}

/// One thread's part of the workspace.
#[derive(Clone, Copy)]
struct Scratch {
    /// The gradient of the state, and the state while those of chunks are stored.
    gradient: Dst<f32>,
    state: Dst<f32>,
    chunks: Dst<f32>,
    tokens: Dst<f32>,
    rests: Dst<f32>,
    written: Dst<f32>,
    of_written: Dst<f32>,
    q: Dst<f32>,
    k: Dst<f32>,
}

impl Scratch {
    fn of(own: Dst<f32>, shape: &ScanShape, tokens: usize) -> Scratch {
        let (state, chunk) = (aligned_floats(shape.state()), shape.chunk.min(tokens));
        let (values, keys) = (aligned_floats(shape.value_dim), aligned_floats(shape.key_dim));
        let mut first = 0;
        let mut take = |floats: usize| {
            first += floats;
            own.part(first - floats, floats)
        };
        Scratch {
            gradient: take(state),
            state: take(state),
            chunks: take(state * shape.chunks(tokens)),
            tokens: take(state * chunk),
            rests: take(aligned_floats(chunk * shape.value_dim)),
            written: take(values),
            of_written: take(values),
            q: take(keys),
            k: take(keys),
        }
    }
}

/// Gradients of all inputs.
pub fn scan_gradient(
    inputs: ScanInputs,
    o_gradient: SrcRows,
    boundaries: &[i32],
    gradients: ScanGradients,
    workspace: Dst<f32>,
    threads: usize,
) {
    let (shape, rows) = (inputs.shape, inputs.q.rows());
    let ScanGradients { dq, dk, dv, .. } = gradients;
    for output in [dq, dk, dv] {
        let read = [inputs.q.into(), inputs.k.into(), inputs.v.into(), o_gradient.into(), workspace.into()];
        assert_disjoint("scan_gradient", output, read);
    }
    // Parts of equally many heads, but for the last.
    let heads_of_part = shape.group().div_ceil(scan_parts(&shape));
    let parts = shape.group().div_ceil(heads_of_part);
    let sums = workspace.part(
        threads * scan_thread_floats(&shape, rows, true),
        if parts > 1 { 2 * parts * rows * shape.channels().0 } else { 0 },
    );
    let part_of = |part: usize, which: usize, output: DstRows| {
        let floats = rows * output.columns();
        if parts == 1 {
            output
        } else {
            sums.part((2 * part + which) * floats, floats).rows(output.columns())
        }
    };
    let isa = Isa::current();
    run_tasks((boundaries.len() - 1) * shape.key_heads * parts, |task| {
        let (sample, of_sample) = (task / (shape.key_heads * parts), task % (shape.key_heads * parts));
        let (key_head, part) = (of_sample / parts, of_sample % parts);
        let (first, end) = (part * heads_of_part, ((part + 1) * heads_of_part).min(shape.group()));
        let heads = key_head * shape.group() + first..key_head * shape.group() + end;
        let own = of_thread(workspace, &shape, rows, true);
        let scratch = Scratch::of(own, &shape, rows);
        let sample = boundaries[sample] as usize..boundaries[sample + 1] as usize;
        let gradients = ScanGradients { dq: part_of(part, 0, dq), dk: part_of(part, 1, dk), ..gradients };
        for head in heads.clone() {
            let adds = head != heads.start;
            sample_gradient(isa, inputs, o_gradient, head, sample.clone(), adds, gradients, scratch);
        }
    });
    if parts == 1 {
        return;
    }
    for (which, output) in [dq, dk].into_iter().enumerate() {
        for_each_row(rows, output.columns(), |row| {
            let of_part = |part: usize| part_of(part, which, output).src().row(row);
            sum_parts(isa, parts, &of_part, output.row(row));
        });
    }
}

kernel! {
    fn sum_parts(parts: usize, of_part: &dyn Fn(usize) -> Src<f32>, y: Dst<f32>) {
        for_each_block!(block in y.len() => {
            let mut sum = [0.0; LANES];
            for part in 0..parts {
                let lanes = of_part(part).lanes(block);
                for lane in 0..LANES {
                    sum[lane] += lanes[lane];
                }
            }
            y.set_lanes(block, sum);
        });
    }
}

kernel! {
    fn sample_gradient(
        inputs: ScanInputs,
        o_gradient: SrcRows,
        head: usize,
        rows: Range<usize>,
        adds: bool,
        gradients: ScanGradients,
        scratch: Scratch,
    ) {
        let shape = &inputs.shape;
        let (floats, columns, keys) = (shape.state(), shape.value_dim, shape.key_dim);
        let stored = |states: Dst<f32>, index: usize| states.part(index * aligned_floats(floats), floats);
        let chunks = shape.chunks(rows.len());
        let chunk_of = |chunk: usize| {
            let first = rows.start + chunk * shape.chunk;
            first..(first + shape.chunk).min(rows.end)
        };
        let state = stored(scratch.state, 0);
        state.fill_zero();
        for chunk in 0..chunks {
            stored(scratch.chunks, chunk).copy_from(state.src());
            // Nothing reads the state after the last chunk.
            for row in chunk_of(chunk).take_while(|_| chunk + 1 < chunks) {
                let rest = scratch.rests.part(0, columns);
                let states = States { before: state.src(), after: state, rest };
                step(shape, inputs.token(row, head), states, None);
            }
        }
        let gradient = stored(scratch.gradient, 0);
        gradient.fill_zero();
        for chunk in (0..chunks).rev() {
            let chunk_rows = chunk_of(chunk);
            let before = |index: usize| match index {
                0 => stored(scratch.chunks, chunk).src(),
                _ => stored(scratch.tokens, index - 1).src(),
            };
            let rest = |index: usize| scratch.rests.part(index * columns, columns);
            for (index, row) in chunk_rows.clone().enumerate() {
                let after = stored(scratch.tokens, index);
                let states = States { before: before(index), after, rest: rest(index) };
                step(shape, inputs.token(row, head), states, None);
            }
            for (index, row) in chunk_rows.enumerate().rev() {
                let states = States { before: before(index), after: stored(scratch.tokens, index), rest: rest(index) };
                let key_head = head / shape.group();
                let of_key_head = |rows: DstRows| rows.row(row).part(key_head * keys, keys);
                let of_head = |rows: DstRows| rows.row(row).part(head * columns, columns);
                let upstream = o_gradient.row(row).part(head * columns, columns);
                let dv = of_head(gradients.dv);
                let (dg, dbeta) = token_gradient(
                    shape, inputs.token(row, head), states, upstream, gradient, dv, scratch,
                );
                for (own, target) in [(scratch.q, gradients.dq), (scratch.k, gradients.dk)] {
                    let (own, target) = (own.part(0, keys), of_key_head(target));
                    for_each_block!(block in keys => {
                        let mut lanes = own.lanes(block);
                        if adds {
                            let before = target.lanes(block);
                            for lane in 0..LANES {
                                lanes[lane] += before[lane];
                            }
                        }
                        target.set_lanes(block, lanes);
                    });
                }
                gradients.dg.row(row).set(head, dg);
                gradients.dbeta.row(row).set(head, dbeta);
            }
        }
    }
}

/// Leaves the gradients of q and k in the scratch, writes that of v, and returns those of g and beta.
#[inline(always)]
fn token_gradient(
    shape: &ScanShape,
    token: Token,
    states: States,
    upstream: Src<f32>,
    gradient: Dst<f32>,
    dv: Dst<f32>,
    scratch: Scratch,
) -> (f32, f32) {
    let (keys, columns) = (shape.key_dim, shape.value_dim);
    let States { before, after, rest } = states;
    let (written, of_written) = (scratch.written.part(0, columns), scratch.of_written.part(0, columns));
    for_each_block!(block in columns => {
        let mut lanes = rest.lanes(block);
        for lane in 0..LANES {
            lanes[lane] *= token.beta;
        }
        written.set_lanes(block, lanes);
        of_written.set_lanes(block, [0.0; LANES]);
    });
    for row in 0..keys {
        let (q, k) = (shape.query_scale * token.q.get(row), shape.key_scale * token.k.get(row));
        let (mut dq, mut dk) = ([0.0; LANES], [0.0; LANES]);
        for_each_block!(block in columns => {
            let at = block_of(row, columns, block);
            let (mut of_state, upstream, state) = (gradient.lanes(at), upstream.lanes(block), after.lanes(at));
            let (written, mut sum) = (written.lanes(block), of_written.lanes(block));
            for lane in 0..LANES {
                of_state[lane] += q * upstream[lane];
                dq[lane] += state[lane] * upstream[lane];
                dk[lane] += of_state[lane] * written[lane];
                sum[lane] += k * of_state[lane];
            }
            gradient.set_lanes(at, of_state);
            of_written.set_lanes(block, sum);
        });
        scratch.q.set(row, shape.query_scale * sum_lanes(dq));
        scratch.k.set(row, shape.key_scale * sum_lanes(dk));
    }
    let mut dbeta = [0.0; LANES];
    for_each_block!(block in columns => {
        let (mut lanes, rest) = (of_written.lanes(block), rest.lanes(block));
        for lane in 0..LANES {
            dbeta[lane] += lanes[lane] * rest[lane];
            lanes[lane] *= token.beta;
        }
        dv.set_lanes(block, lanes);
    });
    let mut dg = [0.0; LANES];
    for row in 0..keys {
        let (k, mut dk) = (shape.key_scale * token.k.get(row), [0.0; LANES]);
        for_each_block!(block in columns => {
            let at = block_of(row, columns, block);
            let (mut of_state, before, dv) = (gradient.lanes(at), before.lanes(at), dv.lanes(block));
            for lane in 0..LANES {
                let decayed = token.keep * before[lane];
                if shape.delta {
                    dk[lane] += decayed * dv[lane];
                    of_state[lane] -= k * dv[lane];
                }
                dg[lane] += of_state[lane] * decayed;
                of_state[lane] *= token.keep;
            }
            gradient.set_lanes(at, of_state);
        });
        if shape.delta {
            scratch.k.set(row, scratch.k.src().get(row) - shape.key_scale * sum_lanes(dk));
        }
    }
    (sum_lanes(dg), sum_lanes(dbeta))
}
