//! The gradient of a whole decoder's loss with respect to every trained leaf, by finite differences.
//!
//! Curvature and rounding add up over two layers, so the tolerance is wider than for one operation.

use crate::check::check_subject;
use crate::decoder::{
    ALL_FUSED, ALL_LINEARS, Choice, LAYERS, Trained, gemma2, gemma3, llama, padded, phi3, phi4, with_head,
    without_biases,
};
use crate::decoder_kinds::{adapters, kinds};
use smidgen_compile::model::layer::NormedChannels;
use smidgen_compile::model::spec::EMBEDDING;
use smidgen_compile::{AdapterForm, DecoderSpec, TrainedBiases};
use smidgen_ir::{Activation, DType, Entry, LayerSet, Phase};

const TOLERANCE: f64 = 5e-3;

/// Checks a choice and returns the names of its trained leaves.
fn check(choice: &Choice) -> Vec<String> {
    let subject = choice.subject_with(LayerSet::from_iter([1]));
    check_subject(&subject, TOLERANCE);
    subject.trained().into_iter().map(|(leaf, _)| subject.graph.value(leaf).name.clone()).collect()
}

fn stored_as(stored: DType, spec: DecoderSpec) -> DecoderSpec {
    DecoderSpec { stored, ..spec }
}

fn in_f32(spec: DecoderSpec) -> DecoderSpec {
    stored_as(DType::F32, spec)
}

#[test]
fn adapters_on_every_linear() {
    let trained = check(&Choice::lora());
    assert_eq!(trained.len(), 2 * 2 * ALL_LINEARS.len());
}

#[test]
fn adapters_with_dropout() {
    let choice =
        Choice { name: "dropout", dropout: 0.25, spec: stored_as(DType::F16, llama()), ..Choice::lora() };
    assert_eq!(check(&choice).len(), 2 * 2 * ALL_LINEARS.len());
}

#[test]
fn adapters_on_two_linears_and_the_head() {
    let choice = Choice {
        name: "q, v and head",
        adapted: &["q_proj", "v_proj", "lm_head"],
        spec: without_biases(llama()).with_gated(|gated| gated.activation = Activation::GeluTanh),
        ..Choice::lora()
    };
    assert_eq!(check(&choice).len(), 2 * 5);
}

/// Rows of the head have separate dropout keys.
#[test]
fn adapters_with_dropout_on_the_head_too() {
    let adapted = &["gate_proj", "lm_head"];
    let choice = Choice { name: "dropout, gate and head", dropout: 0.25, adapted, ..Choice::lora() };
    assert_eq!(check(&choice).len(), 2 * 3);
}

/// Norms, biases, linears, embedding and head, together with adapters.
#[test]
fn every_tensor_of_the_model() {
    let choice =
        Choice { name: "everything", spec: in_f32(llama()), trained: Trained::Everything, ..Choice::lora() };
    let trained = check(&choice);
    let tensors = choice.request().spec.tensors().len();
    assert_eq!(trained.len(), tensors + 2 * 2 * ALL_LINEARS.len());
}

/// Normed queries and keys, whose weights are trained too, and a window shorter than the samples.
#[test]
fn every_tensor_of_a_model_with_normed_heads_and_a_window() {
    let choice = Choice {
        name: "normed heads, window",
        spec: in_f32(without_biases(llama()))
            .with_qk_norms(NormedChannels::Head)
            .with_windows(&[Some(3); LAYERS]),
        trained: Trained::Everything,
        ..Choice::lora()
    };
    let trained = check(&choice);
    assert!(trained.iter().any(|name| name.ends_with("q_norm.weight")), "{trained:?}");
}

/// Trained tensors are f32, also if the checkpoint stores another type; frozen ones keep their storage.
#[test]
fn every_tensor_of_the_last_layer() {
    let choice = Choice { name: "last layer", trained: Trained::LastLayer, ..Choice::full() };
    let trained = check(&choice);
    assert_eq!(trained.len(), 2 * 7 + 2, "{trained:?}");
    assert!(trained.iter().all(|name| name.starts_with("model.layers.1.")), "{trained:?}");
    let subject = choice.subject_with(LayerSet::none());
    let first = subject.graph.nodes(Entry::MicroStep).iter().filter(|node| node.layer == Some(0));
    assert!(first.clone().count() > 0 && first.clone().all(|node| node.phase == Phase::Forward));
}

/// The embedding is the head: both gradients add to one leaf.
#[test]
fn every_tensor_of_a_model_with_a_tied_head() {
    let choice = Choice {
        name: "everything, tied",
        spec: with_head(in_f32(without_biases(llama())), true),
        trained: Trained::Everything,
        adapted: &[],
        ..Choice::lora()
    };
    assert_eq!(check(&choice).len(), choice.request().spec.tensors().len());
}

/// As in PyTorch with `padding_idx`: lookups leave out the row, and the head does not. No other gradient changes.
#[test]
fn a_padding_token_trains_its_row_only_through_a_tied_head() {
    for tied_head in [false, true] {
        let spec = with_head(in_f32(without_biases(llama())), tied_head);
        let choice = Choice { spec, ..Choice::full() };
        let padded = padded(choice.clone());
        let (padding, bytes) = (padded.spec.embedding.padding.unwrap() as usize, 4 * choice.spec.hidden);
        let row = padding * bytes..(padding + 1) * bytes;
        let gradients = |choice: Choice| {
            let subject = choice.subject_with(LayerSet::none());
            let mut executor = subject.load(subject.roomy_plan(2), 2);
            subject.run_once(&mut executor).gradients
        };
        let [mut want, mut got] = [choice, padded].map(gradients);
        let [want_row, got_row] = [&mut want, &mut got].map(|gradients| {
            let embedding = gradients.get_mut(EMBEDDING).unwrap();
            embedding.splice(row.clone(), []).collect::<Vec<u8>>()
        });
        assert_ne!(want_row, got_row, "the padding token is in the samples");
        assert_eq!(got_row.iter().all(|byte| *byte == 0), !tied_head);
        assert!(want == got, "tied: {tied_head}");
    }
}

/// Without dropout, evaluation and training compute the same loss to the last bit.
#[test]
fn evaluation_is_the_loss_of_training() {
    let subject = Choice::lora().subject_with(LayerSet::none());
    let mut executor = subject.load(subject.roomy_plan(2), 2);
    let evaluated = subject.evaluate(&mut executor);
    assert!(evaluated > 1.0, "a loss of {evaluated} over 8 rows");
    let loss = crate::decoder::leaf_named(&subject.graph, smidgen_compile::names::state::LOSS);
    executor.run(Entry::MicroStep, &subject.extent).unwrap();
    let trained = crate::numbers::decode_doubles(&subject.read_bytes(&mut executor, loss))[0];
    assert_eq!(trained.to_bits(), evaluated.to_bits());
}

/// Parts of fused linears, whose gradients add to one leaf. Half of each head is rotated, in one of the samples with the
/// long frequencies.
#[test]
fn every_tensor_of_a_model_like_phi_3() {
    let choice = Choice {
        name: "like phi 3",
        spec: in_f32(phi3()),
        adapted: ALL_FUSED,
        trained: Trained::Everything,
        ..Choice::lora()
    };
    let trained = check(&choice);
    assert_eq!(trained.len(), choice.request().spec.tensors().len() + 2 * LAYERS * ALL_FUSED.len());
    assert!(trained.iter().any(|name| name.ends_with("qkv_proj.weight")), "{trained:?}");
}

#[test]
fn adapters_of_a_model_like_phi_3_with_dropout() {
    let choice = Choice { name: "like phi 3, dropout", dropout: 0.25, ..Choice::fused() };
    assert_eq!(check(&choice).len(), 2 * LAYERS * ALL_FUSED.len());
}

/// Audio encoder, projector and decoder; one block and one layer are recomputed.
#[test]
fn adapters_of_a_model_with_audio() {
    let choice = Choice { spec: in_f32(phi4()), ..Choice::with_audio() };
    let trained = check(&choice);
    assert_eq!(trained.len(), 2 * (2 * 8 + 2 + LAYERS * ALL_FUSED.len()));
    assert!(trained.iter().any(|name| name.contains("audio_embed.encoder.encoders.0.")), "{trained:?}");
    check(&Choice { name: "hearing, dropout", dropout: 0.1, ..choice });
}

/// Four norms of 1 + weight per layer, softcaps, a scaled and tied embedding.
#[test]
fn every_tensor_of_a_model_like_gemma_2() {
    let choice = Choice {
        name: "like gemma 2",
        spec: in_f32(gemma2()),
        trained: Trained::Everything,
        ..Choice::lora()
    };
    let trained = check(&choice);
    assert!(trained.iter().any(|name| name.ends_with("pre_feedforward_layernorm.weight")), "{trained:?}");
}

/// An adapter on the head of capped logits, whose weights are bf16.
#[test]
fn adapters_of_a_model_like_gemma_2_on_the_head_too() {
    let adapted = &["k_proj", "down_proj", "lm_head"];
    let choice = Choice { name: "like gemma 2, head", spec: gemma2(), adapted, ..Choice::lora() };
    assert_eq!(check(&choice).len(), 2 * (2 * LAYERS + 1));
}

/// Two rotary embeddings, and norms of 1 + weight over each head.
#[test]
fn every_tensor_of_a_model_like_gemma_3() {
    let choice = Choice {
        name: "like gemma 3",
        spec: in_f32(gemma3()),
        trained: Trained::Everything,
        ..Choice::lora()
    };
    let trained = check(&choice);
    assert!(trained.iter().any(|name| name.ends_with("k_norm.weight")), "{trained:?}");
}

/// Layers of every kind, each with all its tensors and adapters.
#[test]
fn every_tensor_of_models_of_every_kind() {
    for kind in kinds() {
        let choice = Choice { spec: in_f32(kind.spec.clone()), trained: Trained::Everything, ..kind };
        let trained = check(&choice);
        let tensors = choice.request().trained.len();
        assert_eq!(trained.len(), tensors + 2 * adapters(&choice), "{}", choice.name);
    }
}

fn dora(name: &'static str, choice: Choice) -> Choice {
    Choice { name, form: AdapterForm::Dora, ..choice }
}

/// A, B and the magnitude of every linear. Row norms are not recomputed when leaves change, because they have no
/// gradient.
#[test]
fn dora_on_linears_with_biases() {
    let choice = dora("dora", Choice::lora());
    let trained = check(&choice);
    assert_eq!(trained.len(), 3 * LAYERS * ALL_LINEARS.len());
    assert!(trained.iter().any(|name| name.ends_with("lora_magnitude_vector")), "{trained:?}");
}

#[test]
fn dora_with_dropout() {
    let choice = dora("dora, dropout", Choice { dropout: 0.25, ..Choice::lora() });
    assert_eq!(check(&choice).len(), 3 * LAYERS * ALL_LINEARS.len());
}

#[test]
fn dora_on_fused_linears() {
    for (name, dropout) in [("dora, fused", 0.0), ("dora, fused, dropout", 0.25)] {
        let choice = dora(name, Choice { dropout, ..Choice::fused() });
        assert_eq!(check(&choice).len(), 3 * LAYERS * ALL_FUSED.len());
    }
}

#[test]
fn dora_with_every_tensor_of_the_model() {
    let everything = Choice { spec: in_f32(llama()), trained: Trained::Everything, ..Choice::lora() };
    let choice = dora("dora, everything", everything);
    assert_eq!(check(&choice).len(), choice.request().spec.tensors().len() + 3 * LAYERS * ALL_LINEARS.len());
}

fn ls_lora(name: &'static str, choice: Choice) -> Choice {
    Choice { name, form: AdapterForm::Fourier { reg: 0.3 }, ..choice }
}

/// A and B of every linear, and the coefficients and sigmas, which are one leaf each with a row per linear.
#[test]
fn ls_lora_on_linears_with_biases() {
    assert_eq!(check(&ls_lora("ls-lora", Choice::lora())).len(), 2 * LAYERS * ALL_LINEARS.len() + 2);
}

#[test]
fn ls_lora_with_dropout() {
    let choice = ls_lora("ls-lora, dropout", Choice { dropout: 0.25, ..Choice::lora() });
    assert_eq!(check(&choice).len(), 2 * LAYERS * ALL_LINEARS.len() + 2);
}

/// One module, so that its row is the whole leaf.
#[test]
fn ls_lora_on_one_linear() {
    let adapted = &["layers.1.mlp.up_proj"];
    let choice = ls_lora("ls-lora, one", Choice { adapted, ..Choice::lora() });
    assert_eq!(check(&choice).len(), 2 + 2);
}

/// Three parts of a linear add to the same coefficients.
#[test]
fn ls_lora_on_fused_linears() {
    for (name, dropout) in [("ls-lora, fused", 0.0), ("ls-lora, fused, dropout", 0.25)] {
        let choice = ls_lora(name, Choice { dropout, ..Choice::fused() });
        assert_eq!(check(&choice).len(), 2 * LAYERS * ALL_FUSED.len() + 2);
    }
}

/// Trained biases are f32, also if the model is stored as bf16.
#[test]
fn trained_biases() {
    let adapted = &["v_proj", "down_proj"];
    for (biases, count) in [(TrainedBiases::All, 7), (TrainedBiases::Adapted, 2)] {
        let choice = Choice { name: "biases", biases, adapted, ..Choice::lora() };
        let trained = check(&choice);
        assert_eq!(trained.iter().filter(|name| name.ends_with(".bias")).count(), count * LAYERS);
        assert_eq!(trained.len(), (2 * adapted.len() + count) * LAYERS);
    }
}

/// A fused bias is trained in parts, also after DoRA's gain.
#[test]
fn trained_biases_of_fused_linears() {
    for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.3 }] {
        let choice = Choice { name: "biases, fused", biases: TrainedBiases::All, form, ..Choice::fused() };
        let biases = check(&choice).iter().filter(|name| name.ends_with(".bias")).count();
        assert_eq!(biases, ALL_FUSED.len() * LAYERS, "{form:?}");
    }
}
