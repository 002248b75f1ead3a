//! Examples of training objectives: the weights of rows against finite differences of the loss, through the LM head.
//!
//! Every curve and measure of pairs, both labels, and answers with ratios per token and per sequence, clipped and not. The
//! head is whole and in pieces. The weights are constants for autodiff, so a wrong one shows as a wrong gradient.

use crate::draft::Draft;
use crate::examples::{Example, gradient};
use crate::numbers::random_reals;
use crate::subject::Subject;
use smidgen_compile::passes::head_pieces;
use smidgen_ir::objective::{AnswerLoss, Curve, LabelLoss, Measure, PairLoss, PairTerm};
use smidgen_ir::{DType, Objective, verify};

pub fn examples() -> Vec<Example> {
    let plain = Curve::Logistic { right: 1.0, wrong: 0.0 };
    let smoothed = Curve::Logistic { right: 1.25, wrong: -0.25 };
    let term = |measure, scale, shift, curve| PairTerm { weight: 1.0, measure, scale, shift, curve };
    let pairs = |terms: Vec<PairTerm>, nll, reported, alpha| {
        Objective::Pairs(PairLoss { terms, nll, beta: 0.3, reported, alpha })
    };
    let answers = AnswerLoss {
        by_sequence: false,
        epsilon_low: 0.2,
        epsilon_high: 0.3,
        delta: f64::INFINITY,
        beta: 0.0,
        corrects_penalty: true,
        temperature: 1.0,
    };
    let label = LabelLoss { beta: 0.4, desirable: 1.3, undesirable: 0.8, compares_divergence: true };
    let all = [
        pairs(vec![term(Measure::Sum, 0.3, 0.0, plain)], 0.0, Measure::Sum, 0.0),
        pairs(
            vec![term(Measure::Sum, 0.3, 0.0, smoothed), term(Measure::Mean, 1.0, 0.8, Curve::Square)],
            0.7,
            Measure::Sum,
            0.0,
        ),
        pairs(vec![term(Measure::Sum, 0.05, 0.0, Curve::Hinge)], 0.0, Measure::Sum, 0.0),
        pairs(vec![term(Measure::Odds, 1.0, 0.0, plain)], 1.0, Measure::Mean, 0.0),
        pairs(vec![term(Measure::Mean, 2.0, 0.5, plain)], 0.5, Measure::Mean, 0.1),
        Objective::Labels(label),
        Objective::Labels(LabelLoss { compares_divergence: false, ..label }),
        Objective::Answers(answers),
        Objective::Answers(AnswerLoss { by_sequence: true, beta: 0.2, ..answers }),
        Objective::Answers(AnswerLoss { beta: 0.2, ..answers }),
        Objective::Answers(AnswerLoss { beta: 0.2, corrects_penalty: false, delta: 1.2, ..answers }),
    ];
    let mut examples: Vec<Example> =
        all.iter().map(|objective| gradient(&["objective", "lm_head_loss"], subject(objective))).collect();
    let mut in_pieces = subject(&all[1]);
    in_pieces.name.push_str(" in pieces");
    head_pieces::cut_head(&mut in_pieces.graph, 4);
    verify::expect_sound("head_pieces", &verify::graph(&in_pieces.graph));
    let sums = |entry: usize| {
        in_pieces.graph.entries[entry].1.iter().filter(|node| node.op.name() == "head_sums").count()
    };
    assert_eq!((sums(0), sums(1)), (4, 4), "both losses share the sums of a piece");
    examples.push(gradient(&["objective", "head_sums", "head_loss", "head_grad"], in_pieces));
    examples
}

/// Four sequences over a vocabulary of 29.
fn subject(objective: &Objective) -> Subject {
    let mut draft = Draft::new(&[4, 6, 5, 7], 1);
    let (x, table) = (draft.rows("x", 15), draft.frozen_matrix("head", 29, 15, DType::F32));
    // What precedes the completion, the reference, the share, and the number whose meaning depends on the objective.
    let roles = match objective {
        Objective::Pairs(_) => [0.1; 4],
        Objective::Labels(_) => [1.0, -1.0, -1.0, 1.0],
        Objective::Answers(_) => [1.2, -0.7, 0.4, -1.1],
    };
    let skips = if let Objective::Pairs(_) = objective { [1.0, 0.0, 2.0, 0.0] } else { [0.0; 4] };
    let shares = if let Objective::Pairs(_) = objective { [0.5; 4] } else { [0.3, 0.2, 0.4, 0.1] };
    let reals = random_reals(77, 4);
    let mut numbers = Vec::new();
    for index in 0..4 {
        let reference = -11.0 + 3.0 * f64::from(reals[index]);
        numbers.extend([skips[index], reference, shares[index], roles[index], 0.3]);
    }
    numbers.extend([0.0; 5]);
    draft.objective(objective, x, table, vec![0, 4, 10, 15, 22], numbers);
    draft.gradient_of_loss(&format!("objective {objective}"))
}
