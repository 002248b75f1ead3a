//! Packed samples give the loss and the gradients of the same samples one by one, but for the order of sums.
//!
//! Nothing of a sample may reach another: neither keys nor rows of a convolution nor the state of a recurrent mixer.
//! Some samples are shorter than a convolution, one is a single token, and some layers are recomputed.

use crate::decoder::{Choice, leaf_named};
use crate::decoder_cache::{integers, write_integers};
use crate::decoder_kinds::kinds;
use crate::numbers::decode_doubles;
use crate::subject::Subject;
use crate::tiles_change_rounding::difference;
use smidgen_compile::names::{input, state};
use smidgen_ir::{Entry, Extent, LayerSet};
use smidgen_runtime::{Cpu, Executor};
use std::collections::HashMap;
use std::ops::Range;

/// The largest difference that is due to the order of sums.
const TOLERANCE: f64 = 1e-5;

#[test]
fn packed_samples_are_those_of_one_by_one() {
    for choice in [Choice::lora()].into_iter().chain(kinds()) {
        let subject = choice.subject_with(LayerSet::first(1));
        let mut executor = subject.load(subject.roomy_plan(2), 2);
        let (packed_loss, packed) = run(&subject, &mut executor, &[0..3]);
        for batches in [[0..1, 1..2, 2..3].as_slice(), &[0..2, 2..3], &[1..3, 0..1]] {
            let name = format!("{}: {batches:?}", choice.name);
            let (loss, gradients) = run(&subject, &mut executor, batches);
            assert!(
                (loss - packed_loss).abs() <= 1e-6 * packed_loss,
                "{name}: loss {loss}, not {packed_loss}"
            );
            for (leaf, want) in &packed {
                let error = difference(&gradients[leaf], want);
                assert!(error <= TOLERANCE, "{name}: the gradient of `{leaf}` differs by {error:.1e}");
            }
        }
    }
}

/// The loss and all gradients after these micro-batches, each of neighbouring samples.
fn run(
    subject: &Subject,
    executor: &mut Executor<Cpu>,
    batches: &[Range<usize>],
) -> (f64, HashMap<String, Vec<u8>>) {
    subject.write_contents(executor);
    let names = [input::IDS, input::POSITIONS, input::LABELS, input::ROWS, input::BOUNDARIES];
    let [ids, positions, labels, rows, boundaries] = names.map(|name| integers(subject, name));
    for batch in batches {
        let [first, end] = [batch.start, batch.end].map(|sample| boundaries[sample]);
        let tokens = first as usize..end as usize;
        let (own_rows, own_labels): (Vec<i32>, Vec<i32>) =
            rows.iter().zip(labels).filter(|(row, _)| (first..end).contains(*row)).unzip();
        let moved = |numbers: &[i32]| numbers.iter().map(|number| number - first).collect::<Vec<i32>>();
        write_integers(executor, input::IDS, &ids[tokens.clone()]);
        write_integers(executor, input::POSITIONS, &positions[tokens.clone()]);
        write_integers(executor, input::BOUNDARIES, &moved(&boundaries[batch.start..=batch.end]));
        write_integers(executor, input::ROWS, &moved(&own_rows));
        write_integers(executor, input::LABELS, &own_labels);
        let extent = Extent { tokens: tokens.len(), rows: own_rows.len(), segments: batch.len(), audio: 0 };
        executor.run(Entry::MicroStep, &extent).unwrap();
    }
    let loss = subject.read_bytes(executor, leaf_named(&subject.graph, state::LOSS));
    let gradients = subject.trained().into_iter().map(|(leaf, gradient)| {
        (subject.graph.value(leaf).name.clone(), subject.read_bytes(executor, gradient))
    });
    (decode_doubles(&loss)[0], gradients.collect())
}
