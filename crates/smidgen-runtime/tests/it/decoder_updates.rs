//! Tests `refresh` and LS-LoRA's `update` with whole decoders.
//!
//! Gradients are tested in `decoder_gradients`, the optimizer alone in `update_examples`.

use crate::decoder::{Choice, leaf_named};
use crate::numbers::{decode_doubles, decode_reals, random_reals};
use crate::subject::{Subject, optimizer};
use smidgen_compile::AdapterForm;
use smidgen_compile::leaves::FOURIER_COEFFICIENTS;
use smidgen_compile::names::state;
use smidgen_ir::{Entry, LayerSet, Op, ValueId};
use smidgen_runtime::{Cpu, Executor};

fn reals(subject: &Subject, executor: &mut Executor<Cpu>, name: &str) -> Vec<f32> {
    decode_reals(&subject.read_bytes(executor, leaf_named(&subject.graph, name)))
}

/// Row norms of weight + scale·B·A, in f64, from the current leaves.
fn expected_norms(subject: &Subject, executor: &mut Executor<Cpu>, path: &str, scale: f32) -> Vec<f64> {
    let weight = subject.reals_of(leaf_named(&subject.graph, &format!("{path}.weight")));
    let a = reals(subject, executor, &format!("{path}.lora_A.weight")); // (R, K)
    let b = reals(subject, executor, &format!("{path}.lora_B.weight")); // (N, R)
    let (rank, n) = (3, b.len() / 3);
    let k = a.len() / rank;
    let element = |row: usize, column: usize| {
        let low = |r: usize| f64::from(b[row * rank + r]) * f64::from(a[r * k + column]);
        f64::from(weight[row * k + column]) + f64::from(scale) * (0..rank).map(low).sum::<f64>()
    };
    (0..n).map(|row| (0..k).map(|column| element(row, column).powi(2)).sum::<f64>().sqrt()).collect()
}

#[test]
fn refresh_follows_the_adapters() {
    for choice in [Choice::lora(), Choice::fused()] {
        let choice = Choice { form: AdapterForm::Dora, ..choice };
        let subject = choice.subject_with(LayerSet::none());
        let mut executor = subject.load(subject.roomy_plan(2), 2);
        for (index, module) in choice.request().adapters.iter().enumerate() {
            let compare = |executor: &mut Executor<Cpu>| -> Vec<f32> {
                let got = reals(&subject, executor, &module.norm_name());
                let want = expected_norms(&subject, executor, &module.path, module.scale);
                assert_eq!(got.len(), want.len());
                for (row, (got, want)) in got.iter().zip(&want).enumerate() {
                    let error = (f64::from(*got) - want).abs() / want;
                    assert!(error < 1e-6, "{} [{row}]: got {got}, want {want}", module.path);
                }
                got
            };
            let before = compare(&mut executor);
            for (name, seed) in [(module.a_name(), 1), (module.b_name(), 2)] {
                let leaf = leaf_named(&subject.graph, &name);
                let values = random_reals(seed + index as u64, subject.reals_of(leaf).len());
                subject.write_reals(&mut executor, leaf, &values);
            }
            executor.run(Entry::MicroStep, &subject.extent).unwrap();
            executor.run(Entry::Eval, &subject.extent).unwrap();
            let kept = reals(&subject, &mut executor, &module.norm_name());
            assert_eq!(kept, before, "only `refresh` changes norms");
            executor.run(Entry::Refresh, &subject.extent).unwrap();
            let after = compare(&mut executor);
            assert!(before.iter().zip(&after).all(|(before, after)| before != after), "{}", module.path);
        }
    }
}

/// With any number of micro-batches, the regularizer counts once per step: in the averaged and clipped gradient, and
/// in its reported value.
#[test]
fn an_update_regularizes_once() {
    const REG: f64 = 8.0;
    for choice in [Choice::lora(), Choice::fused()] {
        let choice = Choice { form: AdapterForm::Fourier { reg: REG }, ..choice };
        let modules = choice.request().adapters.len();
        let subject = choice.subject_with(LayerSet::none());
        let regularizers = |entry: Entry| {
            let nodes = subject.graph.nodes(entry).iter();
            nodes.filter(|node| matches!(node.op, Op::FourierReg { .. })).count()
        };
        assert_eq!(Entry::ALL.map(regularizers), [0, 1, 0, 0, 0, 0, 0, 0, 0]);

        let mut executor = subject.load(subject.roomy_plan(2), 2);
        let coefficients = leaf_named(&subject.graph, FOURIER_COEFFICIENTS);
        let point = subject.reals_of(coefficients);
        let difference = |index: usize| f64::from(point[index]) - if index % 4 == 1 { 1.0 } else { 0.0 };
        let value =
            REG * (0..4 * modules).map(|index| difference(index).powi(2)).sum::<f64>() / (4 * modules) as f64;
        for _ in 0..2 {
            executor.run(Entry::MicroStep, &subject.extent).unwrap();
        }
        let mut squares = 0.0;
        let mut expected = Vec::new();
        for (leaf, gradient) in subject.trained() {
            let mut all: Vec<f64> = decode_reals(&subject.read_bytes(&mut executor, gradient))
                .into_iter()
                .map(f64::from)
                .collect();
            if leaf == coefficients {
                for (index, slope) in all.iter_mut().enumerate() {
                    *slope += 2.0 * REG * difference(index) / (4 * modules) as f64;
                }
                expected = all.clone();
            }
            squares += all.iter().map(|value| value * value).sum::<f64>();
        }
        let double =
            |executor: &mut Executor<Cpu>, leaf: ValueId| decode_doubles(&subject.read_bytes(executor, leaf));
        let loss = double(&mut executor, leaf_named(&subject.graph, state::LOSS))[0];
        executor.run(Entry::Update, &subject.extent).unwrap();

        let report = double(&mut executor, leaf_named(&subject.graph, state::REPORT));
        assert_eq!(report[0], loss, "the loss excludes the regularizer");
        assert!(
            (report[1] - squares.sqrt()).abs() < 1e-6 * squares.sqrt(),
            "{} or {}",
            report[1],
            squares.sqrt()
        );
        let reg_loss = double(&mut executor, leaf_named(&subject.graph, state::REG_LOSS))[0];
        assert!((reg_loss - value).abs() < 1e-9 * value, "got {reg_loss}, want {value}");
        let moments = reals(&subject, &mut executor, &format!("m {FOURIER_COEFFICIENTS}"));
        let factor = (1.0 - optimizer().adamw.beta1) * report[2];
        for (index, (got, want)) in moments.iter().zip(&expected).enumerate() {
            let error = (f64::from(*got) - factor * want).abs();
            assert!(
                error < 1e-6 * factor * squares.sqrt(),
                "moment {index}: got {got}, want {}",
                factor * want
            );
        }
    }
}
