//! Token tiles do not change the losses of a step by a bit, and change gradients only by the order of their sums.
//!
//! Whole decoders run several updates in tiles that divide the tokens and in tiles that do not. Plans are for more tokens
//! than there are, so tiles are short or empty; some have recomputed layers, some offload everything.

use crate::decoder::{ALL_FUSED, Choice, LAYERS, LOSS_CHUNK, gemma2, phi3};
use crate::decoder_kinds::kinds;
use crate::numbers::decode_reals;
use crate::offload_changes_nothing::{by_policy, nothing_offloaded, offload_everything, outcome};
use smidgen_compile::AdapterForm;
use smidgen_ir::{Entry, LayerSet, Op, Policy};

/// The largest difference after three updates that is due to the order of sums of a few dozen terms.
const TOLERANCE: f64 = 1e-4;

fn choices() -> Vec<Choice> {
    let mut choices = vec![
        Choice::lora(),
        Choice { name: "phi3", spec: phi3(), adapted: ALL_FUSED, ..Choice::lora() },
        Choice { name: "gemma2", spec: gemma2(), dropout: 0.25, ..Choice::lora() },
        Choice { name: "dora", form: AdapterForm::Dora, ..Choice::fused() },
        Choice { name: "ls-lora", form: AdapterForm::Fourier { reg: 0.1 }, ..Choice::lora() },
        Choice::with_audio(),
        Choice::full(),
    ];
    choices.extend(kinds());
    choices
}

#[test]
fn tiles_of_any_size_agree() {
    for choice in choices() {
        for layers in [LayerSet::none(), LayerSet::first(LAYERS)] {
            let whole = Policy::resident(layers.clone(), LOSS_CHUNK);
            let want = outcome(&by_policy(&choice, &whole));
            for (tile, offloads) in [
                (1, nothing_offloaded()),
                (4, nothing_offloaded()),
                (5, offload_everything(4000)),
                (12, offload_everything(usize::MAX)),
                (13, nothing_offloaded()),
            ] {
                let policy = Policy { tile_tokens: Some(tile), recompute: layers.clone(), ..offloads };
                let got = outcome(&by_policy(&choice, &policy));
                let name = format!("{}: {layers:?} in tiles of {tile}", choice.name);
                assert_eq!(got.0[0], want.0[0], "{name}: the loss before any update");
                for (got, want) in got.0.iter().zip(&want.0) {
                    assert!((got - want).abs() <= TOLERANCE * want.abs(), "{name}: loss {got}, not {want}");
                }
                for (got, want) in got.1.iter().zip(&want.1).filter(|(got, _)| got.len() % 4 == 0) {
                    let error = difference(got, want);
                    assert!(error <= TOLERANCE, "{name}: a leaf differs by {error:.1e}");
                }
            }
        }
    }
}

/// ‖got - want‖ / ‖want‖ of bytes read as f32; 0 for equal bytes.
pub fn difference(got: &[u8], want: &[u8]) -> f64 {
    if got == want {
        return 0.0;
    }
    let [got, want] = [got, want].map(decode_reals);
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let distance = norm(&mut got.iter().zip(&want).map(|(got, want)| f64::from(*got) - f64::from(*want)));
    distance / norm(&mut want.iter().map(|value| f64::from(*value)))
}

/// Feed-forward blocks process one tile at a time: the plan is smaller, and every block runs once for each tile.
#[test]
fn wide_activations_exist_for_one_tile() {
    let choice = Choice::lora();
    let whole = Policy::resident(LayerSet::first(LAYERS), LOSS_CHUNK);
    let plans = [None, Some(4)]
        .map(|tile_tokens| by_policy(&choice, &Policy { tile_tokens, ..whole.clone() }).roomy_plan(2));
    let blocks = plans.each_ref().map(|plan| {
        let steps = &plan.entry(Entry::MicroStep).steps;
        steps.iter().filter(|step| matches!(step.op, Op::GatedAct(_))).count()
    });
    assert_eq!(blocks[1], blocks[0] * plans[0].extent.tokens.div_ceil(4), "{blocks:?}");
    assert!(plans[1].transient_bytes < plans[0].transient_bytes);
}
