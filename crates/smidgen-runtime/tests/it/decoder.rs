//! A whole decoder as a subject: two layers, grouped heads, small odd sizes.
//!
//! The stages are those of `compile`, repeated here so that a test can pass any keep set to recompute.

use crate::numbers::{Content, random_integers, random_keys, random_reals, stored};
use crate::subject::{Scalar, Subject, optimizer, plain_request, plain_spec};
use smidgen_compile::adapter::{Layers, LoraModule, Targets, trained_tensors};
use smidgen_compile::forward;
use smidgen_compile::leaves::{FOURIER_COEFFICIENTS, FOURIER_SIGMA};
use smidgen_compile::model::audio::{AudioInput, AudioSpec};
use smidgen_compile::model::experts::ExpertNames;
use smidgen_compile::model::layer::{LayerNorms, LayerSpec, NormForm, NormedChannels, Rotation};
use smidgen_compile::model::spec::{EmbeddingSpec, HeadSpec};
use smidgen_compile::names::{input, state};
use smidgen_compile::passes::recompute::{self, KeepSet};
use smidgen_compile::passes::{head_pieces, remove_dead};
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::{AdapterForm, DecoderSpec, Purpose, Request, TrainedBiases, autodiff, update};
use smidgen_ir::{
    Activation, DType, DeviceKind, Entry, Extent, Graph, LayerSet, LeafKind, Norm, Policy, Precision,
    RopeScaling, RopeSpec, Storage, ValueId, Workload, quant, verify,
};
use std::collections::BTreeSet;

/// The parts of the decoder that a test chooses.
#[derive(Clone, Debug)]
pub struct Choice {
    pub name: &'static str,
    pub spec: DecoderSpec,
    /// Linears whose paths end with one of these have an adapter.
    pub adapted: &'static [&'static str],
    pub rank: usize,
    pub form: AdapterForm,
    pub biases: TrainedBiases,
    pub dropout: f32,
    pub moments: Moments,
    pub master: Master,
    /// Whether gradients are clipped by their norm.
    pub clips: bool,
    pub device: DeviceKind,
    pub precision: Precision,
    /// The base weights that are trained as well.
    pub trained: Trained,
    /// Number of pieces of the LM head; below 2 it is whole.
    pub head_pieces: usize,
}

#[derive(Clone, Copy, Debug)]
pub enum Trained {
    Nothing,
    Everything,
    LastLayer,
}

const QWEN: ExpertNames = ExpertNames::QWEN;

pub const LAYERS: usize = 2;
pub const ALL_LINEARS: &[&str] =
    &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
pub const ALL_FUSED: &[&str] = &["qkv_proj", "o_proj", "gate_up_proj", "down_proj"];

/// Three segments, one of a single token.
const SEGMENTS: [usize; 3] = [7, 1, 5];
/// Audio rows are for models with an audio encoder.
pub const EXTENT: Extent = Extent { tokens: 13, rows: 8, segments: 3, audio: 6 };
/// A clip of four rows, the last of which only fills a chunk, and a clip of two rows.
const AUDIO_TARGETS: [i32; 6] = [1, 2, 3, -1, 9, 10];
pub const LOSS_CHUNK: usize = 3;
/// Elements of a bf16 matrix that an update widens at a time: a few rows.
const PIECE_ELEMENTS: usize = 300;

/// Llama with a bias on every linear, in bf16.
pub fn llama() -> DecoderSpec {
    DecoderSpec {
        vocabulary: 23,
        hidden: 20,
        layers: vec![LayerSpec::like_llama(4, 2, 8, 28, 1e-5); LAYERS],
        max_positions: 64,
        stored: DType::Bf16,
        ..plain_spec()
    }
    .with_biases(true)
}

/// Large enough that ranks divide every matrix, into parts of different sizes.
pub fn wide() -> DecoderSpec {
    sized(llama(), 64, 96).with_attention(|_, attention| attention.head_dim = 16)
}

/// Other channels of the residual stream and of the feed-forward.
pub fn sized(spec: DecoderSpec, hidden: usize, width: usize) -> DecoderSpec {
    DecoderSpec { hidden, ..spec }.with_gated(|gated| gated.width = width)
}

pub fn without_biases(spec: DecoderSpec) -> DecoderSpec {
    spec.with_biases(false)
}

/// With a head that is the embedding, or not.
pub fn with_head(mut spec: DecoderSpec, is_tied: bool) -> DecoderSpec {
    spec.head.is_tied = is_tied;
    spec
}

/// One of the tokens is padding.
pub fn padded(choice: Choice) -> Choice {
    let subject = choice.subject_with(LayerSet::none());
    let ids = leaf_named(&subject.graph, input::IDS);
    let token = subject.contents.iter().find_map(|(id, content)| match content {
        Content::Integers(ids_of_tokens) if *id == ids => Some(ids_of_tokens[1] as u32),
        _ => None,
    });
    let mut spec = choice.spec;
    spec.embedding.padding = token;
    Choice { spec, ..choice }
}

/// Fused projections, half of each head rotated, a window, and longrope: the first segment is just long enough for the
/// long frequencies, the third is just too short.
pub fn phi3() -> DecoderSpec {
    let scaling = RopeScaling::LongRope {
        short: vec![1.0, 1.3],
        long: vec![1.7, 4.0],
        original_max_positions: SEGMENTS[2],
    };
    DecoderSpec {
        ropes: vec![RopeSpec { scaling, attention_scale: 1.2, ..RopeSpec::plain(1e2, 4) }],
        ..without_biases(llama())
    }
    .with_attention(|_, attention| (attention.is_fused, attention.window) = (true, Some(4)))
    .with_gated(|gated| gated.is_fused = true)
}

/// A decoder with an audio encoder of two blocks in front of it.
pub fn phi4() -> DecoderSpec {
    let audio = AudioSpec {
        hidden: 16,
        intermediate: 24,
        blocks: 2,
        heads: 2,
        kernel: 3,
        bins: 80,
        conv_channels: 8,
        max_distance: 3,
        token: 5,
        decoder_hidden: 20,
    };
    DecoderSpec { audio: Some(audio), ..phi3() }
}

/// Sandwich norms of 1 + weight, softcaps on scores and logits, a sliding window in every other layer. The softcaps are
/// about as large as the values that they cap.
pub fn gemma2() -> DecoderSpec {
    let form = NormForm::Rms(Norm { eps: 1e-5, plus_one: true });
    DecoderSpec {
        embedding: EmbeddingSpec { scale: 20f32.sqrt(), ..EmbeddingSpec::plain() },
        final_norm: form,
        head: HeadSpec { is_tied: true, scale: 1.0, softcap: Some(2.0) },
        ..without_biases(llama())
    }
    .with_layers(|_, layer| layer.norms = LayerNorms::around(form))
    .with_windows(&[Some(3), None])
    .with_attention(|_, attention| (attention.scale, attention.softcap) = (5f32.powf(-0.5), Some(1.5)))
    .with_gated(|gated| gated.activation = Activation::GeluTanh)
}

/// Gemma 2 without softcaps, with norms of queries and keys, and another rotary embedding in sliding-window layers.
pub fn gemma3() -> DecoderSpec {
    let full = RopeSpec { scaling: RopeScaling::Linear { factor: 4.0 }, ..RopeSpec::plain(1e3, 8) };
    DecoderSpec {
        ropes: vec![full, RopeSpec::plain(10.0, 8)],
        head: HeadSpec { is_tied: true, scale: 1.0, softcap: None },
        ..gemma2()
    }
    .with_qk_norms(NormedChannels::Head)
    .with_attention(|layer, attention| {
        (attention.rope, attention.softcap) = (Some(Rotation::by(1 - layer)), None)
    })
}

impl Choice {
    pub fn lora() -> Choice {
        Choice {
            name: "lora",
            spec: llama(),
            adapted: ALL_LINEARS,
            rank: 3,
            form: AdapterForm::Lora,
            biases: TrainedBiases::None,
            dropout: 0.0,
            moments: Moments::F32,
            master: Master::F32,
            clips: true,
            device: DeviceKind::Cpu,
            precision: Precision::F32,
            trained: Trained::Nothing,
            head_pieces: 0,
        }
    }

    /// Fused linears with biases. No Phi model has these biases, but DoRA must split them too.
    pub fn fused() -> Choice {
        let spec = phi3().with_biases(true);
        Choice { name: "fused", spec, adapted: ALL_FUSED, ..Choice::lora() }
    }

    /// Linears of sizes that a GPU multiplies in fp8.
    pub fn fp8() -> Choice {
        Choice { name: "fp8", spec: wide(), precision: Precision::Fp8, ..Choice::lora() }
    }

    /// Adapters on every linear of encoder, projector and decoder.
    pub fn with_audio() -> Choice {
        const ALL: &[&str] = &["_proj", "_proj_for_speech"];
        Choice { name: "hearing", spec: phi4(), adapted: ALL, ..Choice::lora() }
    }

    pub fn request(&self) -> Request {
        let linears = self.spec.all_linears();
        let adapted =
            linears.iter().filter(|linear| self.adapted.iter().any(|end| linear.path.ends_with(end)));
        let adapters = adapted
            .map(|linear| LoraModule { path: linear.path.clone(), rank: self.rank, scale: 0.7 })
            .collect();
        let in_fp8 = linears.iter().filter(|_| self.precision == Precision::Fp8);
        Request {
            title: self.name.into(),
            storage: in_fp8.map(|linear| (format!("{}.weight", linear.path), Storage::Fp8Rows)).collect(),
            spec: self.spec.clone(),
            adapters,
            trained: match self.trained {
                Trained::Nothing => BTreeSet::new(),
                // A correction of scores is for the choice of experts, which has no gradient.
                Trained::Everything => {
                    let names = self.spec.tensors().into_iter().map(|tensor| tensor.name);
                    names.filter(|name| !name.ends_with(QWEN.correction)).collect()
                }
                Trained::LastLayer => {
                    trained_tensors(&self.spec, &Targets::AllLinear, &Layers::Last(1)).unwrap()
                }
            },
            form: self.form,
            biases: self.biases,
            dropout: self.dropout,
            extent: EXTENT,
            step: EXTENT,
            device: self.device,
            precision: self.precision,
            optimizer: Optimizer {
                moments: self.moments,
                master: self.master,
                clip: if self.clips { optimizer().clip } else { 0.0 },
                ..optimizer()
            },
            workload: Workload { keys_per_query: 4.0, supervised: 0.5 },
            audio: if self.spec.audio.is_some() { AudioInput::Subsampled } else { AudioInput::None },
            ..plain_request()
        }
    }

    /// Forward and backward, before any pass.
    pub fn differentiated(&self) -> Graph {
        let mut graph = forward::build_graph(&self.request(), Purpose::Training, LOSS_CHUNK);
        verify::expect_sound("forward", &verify::graph(&graph));
        autodiff::append_backward(&mut graph);
        verify::expect_sound("autodiff", &verify::graph(&graph));
        graph
    }

    /// The decoder with a keep set that is chosen from the graph.
    pub fn subject(&self, keep: impl Fn(&Graph) -> KeepSet) -> Subject {
        let mut graph = self.differentiated();
        let keep = keep(&graph);
        recompute::apply(&mut graph, &keep);
        verify::expect_sound("recompute", &verify::graph(&graph));
        remove_dead::apply(&mut graph);
        verify::expect_sound("remove_dead", &verify::graph(&graph));
        update::append_update_in_pieces(&mut graph, &self.request(), PIECE_ELEMENTS);
        verify::expect_sound("update", &verify::graph(&graph));
        head_pieces::cut_head(&mut graph, self.head_pieces);
        verify::expect_sound("head_pieces", &verify::graph(&graph));
        let contents = contents(&graph, self.spec.final_norm.adds_one());
        // Dropout exists only in training, so the loss of `micro_step` is differentiated there.
        let (entry, leaf) = if self.dropout > 0.0 {
            (Entry::MicroStep, state::LOSS)
        } else {
            (Entry::Eval, state::EVAL_LOSS)
        };
        let scalar = Scalar::Loss { entry, leaf: leaf_named(&graph, leaf) };
        Subject { name: self.name.into(), graph, extent: EXTENT, contents, scalar }
    }

    /// Only the base is trained.
    pub fn full() -> Choice {
        Choice { name: "full", adapted: &[], trained: Trained::Everything, ..Choice::lora() }
    }

    /// The decoder with the keep set that `compile` would choose.
    pub fn subject_with(&self, layers: LayerSet) -> Subject {
        let policy = Policy::resident(layers, LOSS_CHUNK);
        self.subject(|graph| recompute::keep_set(graph, &policy))
    }
}

pub fn leaf_named(graph: &Graph, name: &str) -> ValueId {
    find_leaf(graph, name).unwrap_or_else(|| panic!("no leaf `{name}`"))
}

pub fn find_leaf(graph: &Graph, name: &str) -> Option<ValueId> {
    let found = graph.values.iter().position(|value| value.name == name && !value.is_temp());
    found.map(|index| ValueId(index as u32))
}

/// Contents with which every part of the model affects the loss: norms and magnitudes near 1, activations of size 1,
/// sigmas of both signs.
fn contents(graph: &Graph, norms_add_one: bool) -> Vec<(ValueId, Content)> {
    let mut contents = Vec::new();
    for (index, value) in graph.values.iter().enumerate() {
        let Some(leaf) = value.leaf() else { continue };
        let (rows, columns) = value.ty.shape.at(&EXTENT);
        let (id, seed, storage) = (ValueId(index as u32), 500 + index as u64, value.ty.storage);
        let content = match leaf.kind {
            LeafKind::Weight | LeafKind::Adapter => {
                let (middle, size) = match value.name.as_str() {
                    FOURIER_COEFFICIENTS => (0.2, 0.6),
                    FOURIER_SIGMA => {
                        let sigmas = random_reals(seed, rows);
                        contents.push((id, Content::Reals(sigmas.into_iter().map(away_from_zero).collect())));
                        continue;
                    }
                    name if name.ends_with("layer_scalar") || name.ends_with("scale") => (1.0, 0.4),
                    name if name.ends_with(QWEN.correction) => (0.0, 0.2),
                    name if name.contains("norm") => (if norms_add_one { 0.0 } else { 1.0 }, 0.4),
                    name if name.ends_with("lora_magnitude_vector") => (1.0, 0.4),
                    name if name.ends_with(".bias") => (0.0, 0.3),
                    name if name.contains("embed_tokens") => (0.0, 1.0),
                    // Uniform numbers of this size make rows of unit variance.
                    _ => (0.0, (3.0 / columns as f32).sqrt()),
                };
                let reals = random_reals(seed, rows * columns);
                let mut reals: Vec<f32> = reals.iter().map(|value| middle + size * value).collect();
                if storage.plain().is_some() {
                    reals.iter_mut().for_each(|value| *value = stored(storage, *value));
                    Content::Reals(reals)
                } else {
                    Content::Bytes(quant::encode(storage, rows, columns, &reals).unwrap())
                }
            }
            LeafKind::Input => input_values(&value.name, (rows, columns), seed),
            LeafKind::Gradient
            | LeafKind::Partial(_)
            | LeafKind::Moment
            | LeafKind::State
            | LeafKind::Derived
            | LeafKind::Cache
            | LeafKind::Carried(_) => continue,
        };
        contents.push((id, content));
    }
    contents
}

fn away_from_zero(value: f32) -> f32 {
    value + value.signum()
}

fn input_values(name: &str, (rows, columns): (usize, usize), seed: u64) -> Content {
    match name {
        input::IDS => Content::Integers(random_integers(seed, EXTENT.tokens, 23)),
        input::POSITIONS => Content::Integers(SEGMENTS.iter().flat_map(|length| 0..*length as i32).collect()),
        input::BOUNDARIES => Content::Integers(vec![0, 7, 8, 13]),
        input::ROWS => Content::Integers(vec![0, 1, 3, 4, 7, 8, 9, 11]),
        input::LABELS => Content::Integers(random_integers(seed, EXTENT.rows, 23)),
        input::DROPOUT_KEYS => Content::Keys(random_keys(seed, EXTENT.tokens)),
        input::DROPOUT_ROW_KEYS => Content::Keys(random_keys(seed, EXTENT.rows)),
        input::DROPOUT_AUDIO_KEYS => Content::Keys(random_keys(seed, EXTENT.audio)),
        input::AUDIO_ROWS => Content::Reals(random_reals(seed, rows * columns)),
        input::AUDIO_TARGETS => Content::Integers(AUDIO_TARGETS.to_vec()),
        input::AUDIO_MARKS => {
            let frames = [8, 8, 3, 0, 8, 1];
            let chunks = [[0, 4, 0]; 4].into_iter().chain([[4, 6, 4]; 2]);
            let marks = frames.into_iter().zip(chunks).flat_map(|(frames, [a, b, c])| [frames, a, b, c]);
            Content::Integers(marks.collect())
        }
        input::LOSS_WEIGHT => Content::Doubles(vec![1.0]),
        input::HYPER => Content::Doubles(vec![1e-3, 1.0, 1.0]),
        other => panic!("the decoder has a new input `{other}`"),
    }
}
