//! Plans for logits give the logits from which the loss is computed.
//!
//! A decoder is compiled twice, for training and for logits, and given the same leaves by name.

use crate::decoder::{Choice, EXTENT};
use crate::decoder_cache::{choices, content, integers};
use crate::numbers::{decode_reals, encode};
use crate::subject::Subject;
use smidgen_compile::names::{input, state};
use smidgen_compile::{Request, compile_logits};
use smidgen_ir::{Entry, Extent, LayerSet, LeafKind, ValueId};
use smidgen_runtime::{Cpu, Executor, Null};

/// Logits (S, V) of the plan for logits, with the contents of a training subject.
fn logits(choice: &Choice, subject: &Subject, threads: usize) -> Vec<f32> {
    let Extent { tokens, rows, segments, .. } = EXTENT;
    let extent = Extent { tokens: tokens + 2, rows: rows + 1, segments: segments + 1, audio: 0 };
    let plan = compile_logits(&Request { extent, threads, ..choice.request() });
    let mut executor = Executor::load(plan.clone(), Cpu::new(threads).unwrap()).unwrap();
    let mut null = Executor::load(plan.clone(), Null::default()).unwrap();
    for (index, value) in plan.values.iter().enumerate() {
        let id = ValueId(index as u32);
        let leaf = |kind: LeafKind| plan.leaves(kind).any(|(leaf, _)| leaf == id);
        let bytes = if [LeafKind::Weight, LeafKind::Adapter, LeafKind::Input].into_iter().any(leaf) {
            encode(content(subject, &value.name), value.ty.storage)
        } else if leaf(LeafKind::Derived) || leaf(LeafKind::State) {
            vec![0xff; value.ty.bytes(&EXTENT)]
        } else {
            continue;
        };
        executor.write(id, &bytes);
        null.write(id, &bytes);
    }
    for entry in [Entry::Refresh, Entry::Logits] {
        let extent = Extent { audio: 0, ..EXTENT };
        null.run(entry, &extent).unwrap();
        executor.run(entry, &extent).unwrap();
    }
    let id = plan.leaf_named(state::LOGITS).unwrap();
    let mut bytes = vec![0; 4 * EXTENT.rows * choice.spec.vocabulary];
    executor.read(id, &mut bytes).unwrap();
    decode_reals(&bytes)
}

/// The summed negative log likelihood of the labels, in f64.
fn loss_of(logits: &[f32], labels: &[i32]) -> f64 {
    let row_loss = |(row, label): (&[f32], &i32)| {
        let wide = row.iter().map(|logit| f64::from(*logit));
        let sum: f64 = wide.map(f64::exp).sum();
        sum.ln() - f64::from(row[*label as usize])
    };
    logits.chunks(logits.len() / labels.len()).zip(labels).map(row_loss).sum()
}

#[test]
fn logits_give_the_loss() {
    for choice in choices() {
        let subject = choice.subject_with(LayerSet::none());
        let expected = subject.evaluate(&mut subject.load(subject.roomy_plan(1), 1));
        let one = logits(&choice, &subject, 1);
        let got = loss_of(&one, integers(&subject, input::LABELS));
        assert!((got - expected).abs() < 2e-6 * expected, "{}: {got} or {expected}", choice.name);
        let two = logits(&choice, &subject, 2);
        assert!(one.iter().zip(&two).all(|(one, two)| one.to_bits() == two.to_bits()), "{}", choice.name);
    }
}
