//! Tests a whole decoder with bf16 matmuls against the same decoder in f32: loss, gradients, threads, recompute.
//!
//! Rounding changes an operand by 1.1e-3 on average, and so a product of two by 1.6e-3. A gradient of two layers passes
//! through some fifteen matmuls, so an error of about 6e-3 is expected if nothing amplifies it. These models have narrow
//! sums, short windows and softcaps, which amplify it two to five times.
//! Left out: machines without a bf16 unit, where these tests are skipped.

use crate::decoder::{Choice, gemma2, phi3};
use crate::numbers::{decode_doubles, decode_reals};
use crate::subject::{Outcome, Subject, plain_request, plan_with};
use smidgen_compile::Request;
use smidgen_ir::{Extent, LayerSet, Plan, Precision};
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;

fn plan(subject: &Subject, precision: Precision, threads: usize) -> Plan {
    let Extent { tokens, rows, segments, audio } = subject.extent;
    let extent = Extent { tokens: tokens + 3, rows: rows + 2, segments: segments + 1, audio };
    let request = Request { extent, threads, precision, ..plain_request() };
    plan_with(&subject.graph, &request)
}

fn outcome(subject: &Subject, precision: Precision, threads: usize) -> Outcome {
    let mut executor = subject.load(plan(subject, precision, threads), threads);
    subject.run_once(&mut executor)
}

/// |a - b| ÷ |b| over all gradients together.
fn relative_distance(a: &Outcome, b: &Outcome) -> f64 {
    let (mut distance, mut length) = (0.0, 0.0);
    for (name, bytes) in &b.gradients {
        for (a, b) in decode_reals(&a.gradients[name]).iter().zip(decode_reals(bytes)) {
            distance += f64::from(a - b).powi(2);
            length += f64::from(b).powi(2);
        }
    }
    (distance / length).sqrt()
}

/// Models, each with its largest allowed distance; 1.5e-2, 2.3e-2, 1.5e-2 and 1.5e-2 were measured.
fn choices() -> Vec<(Choice, f64)> {
    vec![
        (Choice::lora(), 2e-2),
        (Choice { name: "fused, window", spec: phi3(), ..Choice::fused() }, 3.5e-2),
        (Choice { name: "caps, tied", spec: gemma2(), ..Choice::lora() }, 3.5e-2),
        (Choice { name: "the head in pieces", head_pieces: 3, ..Choice::lora() }, 2e-2),
    ]
}

#[test]
fn gradients_in_bf16_match_f32_within_rounding() {
    if Bf16Unit::detect().is_none() {
        eprintln!("skipped: this machine has no unit for bf16");
        return;
    }
    for (choice, max_distance) in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let exact = outcome(&subject, Precision::F32, 2);
        let rounded = outcome(&subject, Precision::Bf16, 2);
        let distance = relative_distance(&rounded, &exact);
        eprintln!("`{}`: {distance:.2e} of the gradient", choice.name);
        // A distance of 0 would mean that nothing was rounded.
        assert!(distance > 1e-4 && distance < max_distance, "`{}` is {distance:.2e} away", choice.name);
        let [got, want] = [&rounded, &exact].map(|outcome| decode_doubles(&outcome.result)[0]);
        assert!((got - want).abs() < 1e-2 * want, "`{}`: a loss of {got}, not {want}", choice.name);
    }
}

#[test]
fn threads_and_recompute_change_nothing_in_bf16() {
    if Bf16Unit::detect().is_none() {
        eprintln!("skipped: this machine has no unit for bf16");
        return;
    }
    let choice = Choice::lora();
    let subject = choice.subject_with(LayerSet::none());
    let first = outcome(&subject, Precision::Bf16, 1);
    for threads in [2, 3] {
        assert_eq!(outcome(&subject, Precision::Bf16, threads), first, "{threads} threads");
    }
    let again = choice.subject_with(LayerSet::from_iter([0, 1]));
    assert_eq!(outcome(&again, Precision::Bf16, 2), first, "every layer recomputed");
}
