//! The LM head in pieces gives the losses and gradients of the whole head, except for the order of sums.
//!
//! Whole decoders run several updates with a head on disk in two pieces, in many, and in one per token of the
//! vocabulary; tied to the embedding or not, with softcapped logits, in several chunks of rows, with and without memory
//! to prefetch. A head that is trained or has an adapter is not cut into pieces.

use crate::decoder::{Choice, LAYERS, Trained, gemma2, llama, with_head};
use crate::offload_changes_nothing::{by_policy, nothing_offloaded, offload_everything, outcome};
use crate::tiles_change_rounding::difference;
use smidgen_compile::DecoderSpec;
use smidgen_ir::{DType, Entry, LayerSet, Lifetime, Op, Plan, Policy};

/// The error of a loss from the order of sums over a vocabulary of 23.
const LOSS_TOLERANCE: f64 = 1e-6;
/// The error of trained leaves after three updates, which divide gradients by their size.
const TOLERANCE: f64 = 1e-4;

fn count(plan: &Plan, entry: Entry, is_it: impl Fn(&Op) -> bool) -> usize {
    plan.entry(entry).steps.iter().filter(|step| is_it(&step.op)).count()
}

#[test]
fn pieces_of_any_size_agree() {
    let tied = |spec| with_head(spec, true);
    let choices = [
        Choice::lora(),
        Choice { name: "tied", spec: tied(llama()), ..Choice::lora() },
        Choice { name: "gemma2", spec: gemma2(), dropout: 0.25, ..Choice::lora() },
    ];
    for choice in choices {
        for layers in [LayerSet::none(), LayerSet::first(LAYERS)] {
            let recomputed = |policy: Policy| Policy { recompute: layers.clone(), ..policy };
            let want = outcome(&by_policy(&choice, &recomputed(nothing_offloaded())));
            for (head_pieces, offloads) in [
                (2, Policy { tables_offloaded: true, ..nothing_offloaded() }),
                (3, offload_everything(0)),
                (8, offload_everything(4000)),
                (23, offload_everything(usize::MAX)),
            ] {
                let subject = by_policy(&choice, &recomputed(Policy { head_pieces, ..offloads }));
                let name = format!("{}: {layers:?} in {head_pieces} pieces", choice.name);
                let plan = subject.roomy_plan(2);
                for entry in [Entry::MicroStep, Entry::Eval] {
                    let sums = count(&plan, entry, |op| matches!(op, Op::HeadSums(_)));
                    assert_eq!(sums, head_pieces, "{name}: {entry}");
                    assert_eq!(
                        count(&plan, entry, |op| matches!(op, Op::LmHeadLoss(_))),
                        0,
                        "{name}: {entry}"
                    );
                }
                let got = outcome(&subject);
                assert!(got != want, "{name}: nothing is rounded differently");
                let error = |got: f64, want: f64| (got - want).abs() / want.abs();
                assert!(error(got.0[0], want.0[0]) <= LOSS_TOLERANCE, "{name}: {} {}", got.0[0], want.0[0]);
                for (got, want) in got.0.iter().zip(&want.0) {
                    assert!(error(*got, *want) <= TOLERANCE, "{name}: loss {got}, not {want}");
                }
                for (got, want) in got.1.iter().zip(&want.1).filter(|(got, _)| got.len() % 4 == 0) {
                    let error = difference(got, want);
                    assert!(error <= TOLERANCE, "{name}: a leaf differs by {error:.1e}");
                }
            }
        }
    }
}

#[test]
fn a_trained_or_adapted_head_is_not_cut() {
    const HEAD_TOO: &[&str] = &["q_proj", "lm_head"];
    let stored = DecoderSpec { stored: DType::F32, ..llama() };
    let choices = [
        Choice { name: "adapted", adapted: HEAD_TOO, ..Choice::lora() },
        Choice { name: "trained", trained: Trained::Everything, spec: stored, ..Choice::lora() },
    ];
    for choice in choices {
        let whole = offload_everything(4000);
        let pieces = Policy { head_pieces: 4, ..offload_everything(4000) };
        let [whole, pieces] = [whole, pieces].map(|policy| by_policy(&choice, &policy));
        assert_eq!(count(&pieces.roomy_plan(2), Entry::MicroStep, |op| matches!(op, Op::HeadSums(_))), 0);
        assert!(outcome(&whole) == outcome(&pieces), "{}", choice.name);
    }
}

/// The maximum number of pieces that are on the device at the same time.
fn max_resident_pieces(plan: &Plan) -> usize {
    let steps = &plan.entry(Entry::MicroStep).steps;
    let pieces = steps.iter().filter(|step| step.op == Op::Fetch).filter_map(|step| {
        let is_piece = plan.value(step.inputs[0]).name.starts_with("lm_head.weight[");
        plan.value(step.outputs[0]).buffer.filter(|_| is_piece)
    });
    let lifetimes: Vec<Lifetime> = pieces.map(|buffer| plan.buffer(buffer).lifetime).collect();
    let live = |step: usize| lifetimes.iter().filter(|life| life.covers(Entry::MicroStep, step)).count();
    (0..steps.len()).map(live).max().unwrap()
}

/// The last piece is still on the device when gradients begin, and the prefetch window limits the pieces on the device.
#[test]
fn the_device_holds_a_piece_or_two() {
    let wide = DecoderSpec { vocabulary: 512, ..llama() };
    let choice = Choice { spec: wide, ..Choice::lora() };
    let piece_bytes = 64 * 20 * 2;
    let plan = |head_pieces: usize, window_bytes: usize| {
        let policy = Policy { tables_offloaded: true, head_pieces, window_bytes, ..nothing_offloaded() };
        by_policy(&choice, &policy).roomy_plan(1)
    };
    let whole = plan(0, 0);
    for (window_bytes, resident) in [(0, 1), (2 * piece_bytes, 2), (3 * piece_bytes, 3)] {
        let plan = plan(8, window_bytes);
        assert_eq!(count(&plan, Entry::MicroStep, |op| *op == Op::Fetch), 2 * 8 - 1);
        assert_eq!(count(&plan, Entry::Eval, |op| *op == Op::Fetch), 8);
        assert_eq!(max_resident_pieces(&plan), resident);
        assert!(plan.transient_bytes + (8 - 1 - resident) * piece_bytes <= whole.transient_bytes);
        assert_eq!(plan.disk.bytes(), whole.disk.bytes());
    }
}
