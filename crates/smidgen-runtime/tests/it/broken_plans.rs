//! Plans that are broken on purpose: both `verify` and the `Null` device must find the fault.
//!
//! `verify` compares offsets and lifetimes; `Null` tracks bytes at run time. Tests say which faults only one can find.

use crate::decoder::Choice;
use crate::subject::Subject;
use smidgen_ir::LayerSet;
use smidgen_ir::plan::ALIGNMENT;
use smidgen_ir::{Dim, Entry, Lifetime, Plan, Shape, Type, ValueRole, verify};

fn subject() -> Subject {
    Choice::lora().subject_with(LayerSet::from_iter([0]))
}

fn sound_plan(subject: &Subject) -> Plan {
    let plan = subject.plan(subject.extent, 2);
    assert_eq!(verify::plan(&plan), Vec::<String>::new());
    subject.run_on_null(plan.clone()).unwrap();
    plan
}

/// First and last step of a buffer that is live for more than one step.
fn steps_of(plan: &Plan, entry: Entry, buffer: usize) -> Option<(usize, usize)> {
    match plan.buffers[buffer].lifetime {
        Lifetime::Steps { entry: own, first, last } if own == entry && first < last => Some((first, last)),
        _ => None,
    }
}

/// Moves one of two buffers, where one is written before the last read of the other, so that they partly overlap.
/// `Null` cannot distinguish two values at exactly the same bytes, so only `verify` finds a full overlap.
#[test]
fn overlapping_live_buffers_are_found() {
    let subject = subject();
    let plan = sound_plan(&subject);
    let mut pairs = 0;
    for waiting in 0..plan.buffers.len() {
        let Some((first, last)) = steps_of(&plan, Entry::MicroStep, waiting) else { continue };
        if plan.buffers[waiting].bytes <= ALIGNMENT {
            continue;
        }
        let born = (0..plan.buffers.len()).filter(|other| match plan.buffers[*other].lifetime {
            Lifetime::Steps { entry: Entry::MicroStep, first: born, .. } => first < born && born < last,
            _ => false,
        });
        // Every seventh pair is enough to cover each kind of buffer.
        for other in born.filter(|other| (other + waiting) % 7 == 0) {
            let mut broken = plan.clone();
            broken.buffers[other].offset = plan.buffers[waiting].offset + ALIGNMENT;
            let findings = verify::plan(&broken);
            let (low, high) = (waiting.min(other), waiting.max(other));
            assert!(
                findings.iter().any(|finding| finding.contains("overlap") && mentions(finding, low, high)),
                "verify is silent on buffers {low} and {high}: {findings:?}"
            );
            let violation = subject.run_on_null(broken);
            assert!(violation.is_err(), "null is silent on buffers {low} and {high}");
            pairs += 1;
        }
    }
    assert!(pairs > 100, "only {pairs} pairs were tried");
}

fn mentions(finding: &str, low: usize, high: usize) -> bool {
    let words: Vec<&str> = finding.split_whitespace().collect();
    [low, high].iter().all(|index| words.contains(&index.to_string().as_str()))
}

/// A value that is larger than its buffer.
#[test]
fn an_operand_beyond_its_buffer_is_found() {
    let subject = subject();
    let plan = sound_plan(&subject);
    let hidden = 20;
    let value = plan
        .values
        .iter()
        .position(|value| value.name == "layers.1.mid" && value.role == ValueRole::Temp)
        .expect("the decoder names its residual stream");
    let mut broken = plan.clone();
    assert_eq!(plan.values[value].ty, Type::f32(Shape::of(Dim::Tokens, hidden)));
    broken.values[value].ty = Type::f32(Shape::of(Dim::Tokens, 40 * hidden));
    let findings = verify::plan(&broken);
    assert!(findings.iter().any(|finding| finding.contains("`layers.1.mid` needs")), "{findings:?}");
    assert!(subject.run_on_null(broken).is_err());
}

/// A buffer past the end of the reservation.
#[test]
fn an_operand_beyond_the_reservation_is_found() {
    let subject = subject();
    let plan = sound_plan(&subject);
    for lifetime_of_run in [true, false] {
        let mut broken = plan.clone();
        let index = plan
            .buffers
            .iter()
            .rposition(|buffer| (buffer.lifetime == Lifetime::Run) == lifetime_of_run)
            .expect("the plan has both regions");
        broken.buffers[index].offset = plan.reserved_bytes();
        let findings = verify::plan(&broken);
        assert!(findings.iter().any(|finding| finding.contains("leaves its region")), "{findings:?}");
        let violation = subject.run_on_null(broken).unwrap_err();
        assert!(violation.contains("bytes are reserved"), "{violation}");
    }
}

/// A step that runs before the one whose result it reads.
#[test]
fn steps_out_of_order_are_found() {
    let subject = subject();
    let mut broken = sound_plan(&subject);
    let steps = &mut broken.entries[0].steps;
    let norm = steps.iter().position(|step| step.op.name() == "rms_norm").expect("a decoder has norms");
    assert!(steps[norm + 1].inputs.contains(&steps[norm].outputs[0]));
    steps.swap(norm, norm + 1);
    let findings = verify::plan(&broken);
    assert!(findings.iter().any(|finding| finding.contains("read before it is written")), "{findings:?}");
    assert!(subject.run_on_null(broken).is_err());
}

/// An output in the buffer of an input that the operation still reads: only `verify` knows the in-place rules.
#[test]
fn an_output_over_an_input_that_may_not_be_replaced_is_found() {
    let subject = subject();
    let mut broken = sound_plan(&subject);
    let step =
        broken.entries[0].steps.iter().find(|step| step.op.name() == "linear").expect("there are linears");
    let (output, input) = (step.outputs[0], step.inputs[0]);
    broken.values[output.index()].buffer = broken.values[input.index()].buffer;
    let findings = verify::plan(&broken);
    assert!(findings.iter().any(|finding| finding.contains("may not replace input")), "{findings:?}");
}
