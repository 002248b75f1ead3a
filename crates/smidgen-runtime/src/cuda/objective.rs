//! Launches the kernels of training objectives: log-probabilities of rows to a loss, figures and weights of rows.
//!
//! Every sequence has a row of numbers in the workspace. Kernels: `kernels/objective.cu`; the math is explained in
//! `cpu/objective.rs`.

use super::modules::KernelFile;
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::Objective;
use smidgen_ir::objective::{AnswerLoss, Curve, LabelLoss, Measure, PairLoss};
use smidgen_ir::workspace_cuda::OBJECTIVE_COLUMNS;

pub const FILE: KernelFile = KernelFile {
    name: "objective.cu",
    source: include_str!("../../kernels/objective.cu"),
    kernels: &[
        "objective_sums",
        "objective_pair_term",
        "objective_pair_end",
        "objective_label",
        "objective_weights",
        "objective_answer",
        "objective_total",
    ],
};

// The kernels have these numbers of columns as constants.
const _: () = assert!(OBJECTIVE_COLUMNS == 16 && Objective::SEQUENCE_COLUMNS == 5 && Objective::FIGURES == 8);

/// Must match `objective.cu`.
const THREADS: u32 = 256;

pub fn objective(stage: &Stage<'_>, step: &BoundStep, objective: &Objective) -> Result<(), DeviceError> {
    let [nll, weight, first_rows, given] = [0, 1, 2, 3].map(|input| stage.address(&step.inputs[input]));
    let before = step.inputs.get(4).map_or(Arg::Pointer(0), |before| stage.address(before));
    let sequences = stage.rows(&step.inputs[3]).saturating_sub(1);
    if sequences == 0 {
        return Ok(());
    }
    let kept = Arg::Pointer(stage.workspace_of(8 * OBJECTIVE_COLUMNS * sequences));
    let weights = stage.address(&step.outputs[0]);
    let (by_block, count) = ([sequences as u32, 1, 1], Arg::Int(sequences as i32));
    let by_thread = |threads: usize| [threads.div_ceil(THREADS as usize) as u32, 1, 1];
    let sums = [nll, first_rows, given, before, kept];
    stage.launch("objective_sums", by_block, THREADS, 0, &sums)?;
    let write_weights = || {
        let args = [first_rows, given, kept, weight, weights];
        stage.launch("objective_weights", by_block, THREADS, 0, &args)
    };
    match objective {
        Objective::Pairs(PairLoss { terms, nll, beta, reported, alpha }) => {
            let pairs = Arg::Int((sequences / 2) as i32);
            for term in terms {
                let (curve, right, wrong) = match term.curve {
                    Curve::Logistic { right, wrong } => (0, right, wrong),
                    Curve::Hinge => (1, 0.0, 0.0),
                    Curve::Square => (2, 0.0, 0.0),
                };
                let integers = [pairs, measure(term.measure), Arg::Int(curve)];
                let reals = [term.weight, term.scale, term.shift, right, wrong, *alpha].map(Arg::Double);
                let args = [&[given, kept], &integers[..], &reals[..]].concat();
                stage.launch("objective_pair_term", by_thread(sequences / 2), THREADS, 0, &args)?;
            }
            let [nll, beta, alpha] = [*nll, *beta, *alpha].map(Arg::Double);
            let args = [given, kept, pairs, nll, measure(*reported), beta, alpha];
            stage.launch("objective_pair_end", by_thread(sequences / 2), THREADS, 0, &args)?;
            write_weights()?;
        }
        Objective::Labels(LabelLoss { beta, desirable, undesirable, compares_divergence }) => {
            let reals = [*beta, *desirable, *undesirable].map(Arg::Double);
            let compares = Arg::Int(i32::from(*compares_divergence));
            let args = [&[given, kept, count], &reals[..], &[compares]].concat();
            stage.launch("objective_label", by_thread(sequences), THREADS, 0, &args)?;
            write_weights()?;
        }
        Objective::Answers(AnswerLoss {
            by_sequence,
            epsilon_low,
            epsilon_high,
            delta,
            beta,
            corrects_penalty,
            ..
        }) => {
            let operands = [nll, first_rows, given, before, kept, weight, weights];
            let reals = [*epsilon_low, *epsilon_high, *delta, *beta].map(Arg::Double);
            let [by_sequence, corrects] =
                [*by_sequence, *corrects_penalty].map(|flag| Arg::Int(i32::from(flag)));
            let args = [&operands[..], &[by_sequence], &reals[..], &[corrects]].concat();
            stage.launch("objective_answer", by_block, THREADS, 0, &args)?;
        }
    }
    let [loss, figures] = [0, 1].map(|update| stage.address(&step.updates[update]));
    stage.launch("objective_total", [1, 1, 1], 32, 0, &[kept, count, weight, loss, figures])
}

fn measure(measure: Measure) -> Arg {
    Arg::Int(Measure::ALL.iter().position(|known| *known == measure).unwrap_or(0) as i32)
}
