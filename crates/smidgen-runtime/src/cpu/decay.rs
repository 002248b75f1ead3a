//! Log decays and steps of recurrent mixers, and their gradients.
//!
//! With z = a + dt_bias and s = softplus(z): step = clamp(s), g = -exp(log_decay)·step, and beta = step or
//! scale·sigmoid(b). Backward, ds is dg·(-exp(log_decay)), plus dbeta if beta is the step, where s was not clamped;
//! then da = ds·sigmoid(z), ddt_bias = Σ da, dlog_decay = Σ dg·g, and db = dbeta·beta·(1 - sigmoid(b)).
//! There is one number per token and head, so these are plain loops.

use super::chunk::for_each_chunk;
use super::simd::exp;
use super::view::{Dst, DstRows, SrcRows, StoredVector};
use smidgen_ir::DecayShape;

/// Inputs of both directions.
#[derive(Clone, Copy)]
pub struct DecayInputs {
    pub shape: DecayShape,
    pub a: SrcRows,              // (T, H)
    pub log_decay: StoredVector, // (H)
    pub dt_bias: StoredVector,   // (H)
    pub b: Option<SrcRows>,      // (T, H)
}

/// What both directions compute of a token and head.
struct Gate {
    step: f32,
    rate: f32,
    /// d step / d a.
    slope: f32,
    write: Option<(f32, f32)>,
}

impl DecayInputs {
    fn gate(&self, row: usize, head: usize) -> Gate {
        let DecayShape { least, most, write } = self.shape;
        let z = self.a.row(row).get(head) + self.dt_bias.get(head);
        let soft = softplus(z);
        let is_inside = soft >= least && soft <= most;
        let write = self.b.zip(write).map(|(b, scale)| (scale, sigmoid(b.row(row).get(head))));
        Gate {
            step: soft.clamp(least, most),
            rate: -exp(self.log_decay.get(head)),
            slope: if is_inside { sigmoid(z) } else { 0.0 },
            write,
        }
    }
}

/// ln(1 + e^z).
fn softplus(z: f32) -> f32 {
    if z > 20.0 { z } else { exp(z).ln_1p() }
}

fn sigmoid(z: f32) -> f32 {
    1.0 / (1.0 + exp(-z))
}

/// Rows of a task.
const ROWS: usize = 32;

pub fn decay(inputs: &DecayInputs, g: DstRows, beta: DstRows) {
    for_each_chunk(inputs.a.rows(), ROWS, |chunk| {
        for row in chunk.range() {
            for head in 0..inputs.a.columns() {
                let gate = inputs.gate(row, head);
                g.row(row).set(head, gate.rate * gate.step);
                beta.row(row).set(head, gate.write.map_or(gate.step, |(scale, share)| scale * share));
            }
        }
    });
}

/// `db` exists if b does. The last two gradients exist if their vectors are trained.
pub struct DecayGradients {
    pub da: DstRows,
    pub db: Option<DstRows>,
    pub log_decay: Option<Dst<f32>>,
    pub dt_bias: Option<Dst<f32>>,
}

pub fn decay_grad(inputs: &DecayInputs, dg: SrcRows, dbeta: SrcRows, gradients: &DecayGradients) {
    let of_step = |row: usize, head: usize| {
        let (gate, dg, dbeta) = (inputs.gate(row, head), dg.row(row).get(head), dbeta.row(row).get(head));
        let of_beta = if gate.write.is_some() { 0.0 } else { dbeta };
        (gate.rate * dg + of_beta) * gate.slope
    };
    for_each_chunk(inputs.a.rows(), ROWS, |chunk| {
        for row in chunk.range() {
            for head in 0..inputs.a.columns() {
                gradients.da.row(row).set(head, of_step(row, head));
                if let (Some(db), Some((scale, share))) = (gradients.db, inputs.gate(row, head).write) {
                    db.row(row).set(head, dbeta.row(row).get(head) * scale * share * (1.0 - share));
                }
            }
        }
    });
    let add = |target: Option<Dst<f32>>, of: &(dyn Fn(usize, usize) -> f32 + Sync)| {
        let Some(target) = target else { return };
        for_each_chunk(target.len(), 1, |chunk| {
            let sum: f64 = (0..inputs.a.rows()).map(|row| f64::from(of(row, chunk.start))).sum();
            target.set(chunk.start, target.src().get(chunk.start) + sum as f32);
        });
    };
    add(gradients.dt_bias, &of_step);
    add(gradients.log_decay, &|row, head| {
        let gate = inputs.gate(row, head);
        dg.row(row).get(head) * gate.rate * gate.step
    });
}
