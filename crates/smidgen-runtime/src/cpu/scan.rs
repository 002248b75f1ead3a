//! Scans: the states of recurrent mixers, token by token.
//!
//! Every sample and head is a task of its own, and a token's result depends on the tokens before it alone. So neither
//! packing nor the chunks of the backward pass change a bit, and generation computes what training computed.
//! Columns of a state are lanes. The state of a head of 128 x 128 channels is 64 KiB, so a token's two passes over it stay
//! in the cache; together they are a few hundredths of the matmuls of a layer.

use super::footprint::assert_disjoint;
use super::pool::{current_thread, run_tasks};
use super::simd::{Block, Isa, LANES, Lanes, exp, for_each_block, kernel};
use super::slot_runs::SlotRuns;
use super::view::{Dst, DstRows, Src, SrcRows};
use smidgen_ir::ScanShape;
use smidgen_ir::workspace_cpu::{aligned_floats, scan_thread_floats};
use std::ops::Range;

/// Inputs of a scan.
#[derive(Clone, Copy)]
pub struct ScanInputs {
    pub shape: ScanShape,
    pub q: SrcRows,    // (T, Hk·K)
    pub k: SrcRows,    // (T, Hk·K)
    pub v: SrcRows,    // (T, H·V)
    pub g: SrcRows,    // (T, H)
    pub beta: SrcRows, // (T, H)
}

/// One token of one head.
#[derive(Clone, Copy)]
pub struct Token {
    pub q: Src<f32>, // (K)
    pub k: Src<f32>, // (K)
    pub v: Src<f32>, // (V)
    pub keep: f32,
    pub beta: f32,
}

impl ScanInputs {
    pub fn token(&self, row: usize, head: usize) -> Token {
        let ScanShape { key_dim, value_dim, .. } = self.shape;
        let key_head = head / self.shape.group();
        let of_key_head = |rows: SrcRows| rows.row(row).part(key_head * key_dim, key_dim);
        Token {
            q: of_key_head(self.q),
            k: of_key_head(self.k),
            v: self.v.row(row).part(head * value_dim, value_dim),
            keep: exp(self.g.row(row).get(head)),
            beta: self.beta.row(row).get(head),
        }
    }
}

/// The state (K, V) after a token from the one before it, which may be in the same place, and what the token writes before
/// it is multiplied by beta.
#[derive(Clone, Copy)]
pub struct States {
    pub before: Src<f32>,
    pub after: Dst<f32>,
    pub rest: Dst<f32>, // (V)
}

/// The lanes of a block in row `row` of a state with so many columns.
#[inline(always)]
pub fn block_of(row: usize, columns: usize, block: Block) -> Block {
    Block { start: row * columns + block.start, count: block.count }
}

/// rest = v - keep·kᵀS by the delta rule, or v; S = keep·S + beta·k·restᵀ; o = qᵀS, if there is an o.
#[inline(always)]
pub fn step(shape: &ScanShape, token: Token, states: States, o: Option<Dst<f32>>) {
    let (keys, columns) = (shape.key_dim, shape.value_dim);
    let States { before, after, rest } = states;
    for_each_block!(block in columns => {
        let mut rest_lanes = token.v.lanes(block);
        if shape.delta {
            let held = product(token.k, before, keys, columns, block);
            for lane in 0..LANES {
                rest_lanes[lane] -= token.keep * shape.key_scale * held[lane];
            }
        }
        rest.set_lanes(block, rest_lanes);
        let mut written = [0.0; LANES];
        for lane in 0..LANES {
            written[lane] = token.beta * shape.key_scale * rest_lanes[lane];
        }
        for row in 0..keys {
            let (at, k) = (block_of(row, columns, block), token.k.get(row));
            let mut state = before.lanes(at);
            for lane in 0..LANES {
                state[lane] = token.keep * state[lane] + k * written[lane];
            }
            after.set_lanes(at, state);
        }
        if let Some(o) = o {
            let mut read = product(token.q, after.src(), keys, columns, block);
            for lane in 0..LANES {
                read[lane] *= shape.query_scale;
            }
            o.set_lanes(block, read);
        }
    });
}

/// Some columns of kᵀS. Two sums, because each addition waits for the one before it.
#[inline(always)]
fn product(k: Src<f32>, state: Src<f32>, keys: usize, columns: usize, block: Block) -> Lanes {
    let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
    for pair in 0..keys / 2 {
        let (one, other) = (k.get(2 * pair), k.get(2 * pair + 1));
        let of_one = state.lanes(block_of(2 * pair, columns, block));
        let of_other = state.lanes(block_of(2 * pair + 1, columns, block));
        for lane in 0..LANES {
            even[lane] += one * of_one[lane];
            odd[lane] += other * of_other[lane];
        }
    }
    if !keys.is_multiple_of(2) {
        let (last, of_last) = (k.get(keys - 1), state.lanes(block_of(keys - 1, columns, block)));
        for lane in 0..LANES {
            even[lane] += last * of_last[lane];
        }
    }
    for lane in 0..LANES {
        even[lane] += odd[lane];
    }
    even
}

kernel! {
    fn scan_rows(inputs: ScanInputs, head: usize, rows: Range<usize>, state: Dst<f32>, rest: Dst<f32>, o: DstRows) {
        let columns = inputs.shape.value_dim;
        for row in rows {
            let states = States { before: state.src(), after: state, rest };
            let o = o.row(row).part(head * columns, columns);
            step(&inputs.shape, inputs.token(row, head), states, Some(o));
        }
    }
}

/// The part of a workspace that belongs to the calling thread.
pub fn of_thread(workspace: Dst<f32>, shape: &ScanShape, tokens: usize, gradient: bool) -> Dst<f32> {
    let floats = scan_thread_floats(shape, tokens, gradient);
    workspace.part(current_thread() * floats, floats)
}

/// o of all samples.
pub fn scan(inputs: ScanInputs, boundaries: &[i32], o: DstRows, workspace: Dst<f32>) {
    let shape = inputs.shape;
    assert_disjoint("scan", o, [inputs.q.into(), inputs.k.into(), inputs.v.into(), workspace.into()]);
    let isa = Isa::current();
    run_tasks((boundaries.len() - 1) * shape.heads, |task| {
        let (sample, head) = (task / shape.heads, task % shape.heads);
        let own = of_thread(workspace, &shape, 0, false);
        let (state, rest) = state_and_rest(own, &shape);
        state.fill_zero();
        let rows = boundaries[sample] as usize..boundaries[sample + 1] as usize;
        scan_rows(isa, inputs, head, rows, state, rest, o);
    });
}

fn state_and_rest(own: Dst<f32>, shape: &ScanShape) -> (Dst<f32>, Dst<f32>) {
    (own.part(0, shape.state()), own.part(aligned_floats(shape.state()), shape.value_dim))
}

/// o of new tokens, from the states (L, H·K·V) of their slots, which are replaced.
pub fn cached_scan(inputs: ScanInputs, runs: SlotRuns<'_>, slots: DstRows, o: DstRows, workspace: Dst<f32>) {
    let shape = inputs.shape;
    assert_disjoint("cached_scan", o, [inputs.q.into(), inputs.k.into(), inputs.v.into(), workspace.into()]);
    let isa = Isa::current();
    run_tasks(shape.heads, |head| {
        let (_, rest) = state_and_rest(of_thread(workspace, &shape, 0, false), &shape);
        for run in runs.iter() {
            let state = slots.row(run.slot).part(head * shape.state(), shape.state());
            if run.begins {
                state.fill_zero();
            }
            scan_rows(isa, inputs, head, run.first..run.first + run.count, state, rest, o);
        }
    });
}
