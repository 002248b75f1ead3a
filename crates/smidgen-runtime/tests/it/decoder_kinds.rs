//! Small decoders with the layers of every kind that `decoder.rs` has no model for, for the lists of choices of other tests.
//!
//! Each kind is a model of today in two layers that differ where its layers differ: parallel blocks, norms after blocks only,
//! embeddings for each layer, shared keys and values, heads of two sizes, gated outputs, rotations of other kinds, latent
//! attention, and routed experts with every router and everything that may be beside them.

use crate::decoder::{Choice, llama, with_head, without_biases};
use smidgen_compile::DecoderSpec;
use smidgen_compile::model::experts::{BesideExperts, ExpertsSpec, RouterNorm, SharedExpert};
use smidgen_compile::model::layer::{
    BothMixers, GatedNames, GatedSpec, KeysAndValues, LatentSpec, LayerNorms, Mixer, NormForm, NormSpec,
    NormedChannels, OutputGate, QkNorm, Rotation, TokenInput,
};
use smidgen_compile::model::recurrent::{
    DeltaProjections, DeltaSpec, MambaNorm, MambaSpec, RecurrentSpec, ShortConvSpec,
};
use smidgen_compile::model::spec::{EmbeddingSpec, HeadSpec, LinearKind, PerLayerEmbedding};
use smidgen_ir::{
    Activation, Norm, PositionScale, RopeScaling, RopeSpec, Router, RouterGroups, RouterScores,
};

const NORM: Norm = Norm { eps: 1e-5, plus_one: false };
const RMS: NormForm = NormForm::Rms(NORM);
/// Endings of every linear but the head.
const EVERY: &[&str] = &[
    "_proj",
    "_gate",
    "_projection",
    "_proj_qkv",
    "_proj_qkvz",
    "_proj_z",
    "_proj_ba",
    "_proj_b",
    "_proj_a",
    "_proj_with_mqa",
];

/// A choice for each kind, with adapters on every linear but the head.
pub fn kinds() -> Vec<Choice> {
    let choice = |name, spec| Choice { name, spec, adapted: EVERY, ..Choice::lora() };
    vec![
        choice("parallel blocks", parallel()),
        choice("norms after blocks", norms_after()),
        choice("embeddings of layers", embeddings_of_layers()),
        choice("heads of two sizes", heads_of_two_sizes()),
        choice("gated outputs", gated()),
        choice("half of each head, interleaved", interleaved()),
        choice("scaled positions", scaled_positions()),
        choice("dynamic", dynamic()),
        choice("latent attention", latent()),
        choice("experts, shared", experts_with_shared()),
        choice("experts of groups", experts_of_groups()),
        choice("experts with biases and sinks", experts_with_biases()),
        choice("experts beside", experts_beside()),
        choice("weighed inputs of experts", weighed_inputs()),
        choice("delta rule", delta_rule(DeltaProjections::Parts)),
        choice("delta rule by key heads", delta_rule(DeltaProjections::KeyHeads)),
        choice("delta rule, separate", delta_rule(DeltaProjections::Separate)),
        choice(
            "short convolutions",
            first_layer(RecurrentSpec::ShortConv(ShortConvSpec { taps: 3, bias: true })),
        ),
        choice("mamba", first_layer(RecurrentSpec::Mamba(mamba()))),
        choice("attention and mamba", both()),
    ]
}

/// The number of adapters of a choice.
pub fn adapters(choice: &Choice) -> usize {
    let adapters = choice.request().adapters.len();
    let linears = choice.spec.all_linears().into_iter().filter(|linear| linear.kind != LinearKind::Router);
    assert_eq!(adapters + 1, linears.count(), "{}: every linear but the head and routers", choice.name);
    adapters
}

fn plain() -> DecoderSpec {
    without_biases(llama())
}

/// A recurrent mixer in the first layer.
fn first_layer(mixer: RecurrentSpec) -> DecoderSpec {
    plain().with_layers(|index, layer| {
        if index == 0 {
            layer.mixer = Mixer::Recurrent(mixer.clone());
        }
    })
}

/// The other layer has attention whose gate is in the projection of queries.
fn delta_rule(projections: DeltaProjections) -> DecoderSpec {
    let delta = DeltaSpec {
        heads: 4,
        key_heads: 2,
        key_dim: 6,
        value_dim: 5,
        taps: 3,
        projections,
        write: 1.0,
        norm: NORM,
    };
    first_layer(RecurrentSpec::Delta(delta))
        .with_attention(|_, attention| attention.gate = OutputGate::OfQueries)
}

fn mamba() -> MambaSpec {
    MambaSpec {
        module: "mamba",
        heads: 4,
        head_dim: 5,
        groups: 2,
        state: 6,
        taps: 4,
        conv_bias: true,
        proj_biases: [false; 2],
        scales: [1.0; 5],
        steps: [0.0, f32::INFINITY],
        norm: Some(MambaNorm { norm: NORM, before_gate: false }),
        adapts_output: true,
    }
}

/// Both mixers in each layer, everything multiplied, and the second layer's Mamba normed before its gate.
fn both() -> DecoderSpec {
    let spec = plain().with_gated(|gated| gated.scales = [0.7, 1.4]);
    spec.with_layers(|index, layer| {
        let norm = (index == 1).then_some(MambaNorm { norm: NORM, before_gate: true });
        let scales = [0.9, 1.2, 0.8, 1.1, 0.6];
        let mamba = MambaSpec { groups: 1 + index, norm, scales, proj_biases: [false, true], ..mamba() };
        let attention = layer.attention().expect("Llama's layers have attention").clone();
        let recurrent = RecurrentSpec::Mamba(mamba);
        let both = BothMixers { attention, recurrent, inputs: [0.8, 1.3], outputs: [1.2, 0.7] };
        layer.mixer = Mixer::Both(Box::new(both));
    })
}

/// Layer norms that attention and feed-forward share; only the layer with a window is rotated, by neighbouring channels.
fn parallel() -> DecoderSpec {
    let form = NormForm::Layer { eps: 1e-5 };
    let before_mixer = Some(NormSpec { path: "input_layernorm", form });
    DecoderSpec {
        final_norm: form,
        head: HeadSpec { is_tied: true, scale: 0.5, softcap: None },
        ..plain().with_windows(&[Some(3), None]).with_interleaved_ropes()
    }
    .with_layers(|_, layer| {
        layer.norms = LayerNorms { before_mixer, ..LayerNorms::default() };
        layer.is_parallel = true;
    })
    .with_attention(|layer, attention| attention.rope = attention.rope.filter(|_| layer == 0))
}

/// Norms after blocks only, queries and keys normed over all heads, outputs of blocks scaled.
fn norms_after() -> DecoderSpec {
    let around = LayerNorms::around(RMS);
    let norms = LayerNorms { before_mixer: None, before_feed_forward: None, ..around };
    let spec = plain().with_qk_norms(NormedChannels::AllHeads);
    spec.with_layers(|_, layer| (layer.norms, layer.residual_scale) = (norms, 0.7))
}

/// Embeddings for each layer, a scaled output of the first, and a second layer with the keys and values of the first. The
/// final norm would undo a scale of the last layer, so differences could not tell its gradient from rounding.
fn embeddings_of_layers() -> DecoderSpec {
    let (width, after) = (6, NormSpec { path: "post_per_layer_input_norm", form: RMS });
    let spec = plain().with_qk_norms(NormedChannels::Head);
    let per_layer = Some(PerLayerEmbedding { vocabulary: spec.vocabulary, width, norm: NORM });
    let embedding = EmbeddingSpec { scale: 20f32.sqrt(), per_layer, ..EmbeddingSpec::plain() };
    with_head(DecoderSpec { embedding, ..spec }, true)
        .with_layers(|index, layer| {
            (layer.norms, layer.has_scalar) = (LayerNorms::around(RMS), index == 0);
            layer.token_input = Some(TokenInput { width, activation: Activation::GeluTanh, norm: after });
            layer.gated_mut().unwrap().width *= 1 + index;
        })
        .with_attention(|layer, attention| {
            (attention.scale, attention.v_norm) = (1.0, Some(NORM));
            if layer == 1 {
                attention.source = KeysAndValues::OfLayer(0);
            }
        })
}

/// A layer with a window, and one with fewer and larger heads, keys that are values, and few rotated pairs.
fn heads_of_two_sizes() -> DecoderSpec {
    let scaling = RopeScaling::Proportional { rotated_pairs: 3, factor: 1.0 };
    let full = RopeSpec { scaling, ..RopeSpec::plain(1e3, 12) };
    let spec = plain().with_qk_norms(NormedChannels::Head).with_windows(&[Some(3), None]);
    spec.with_ropes_of_kinds([full, RopeSpec::plain(10.0, 8)]).with_attention(|layer, attention| {
        attention.v_norm = Some(NORM);
        if layer == 1 {
            (attention.head_dim, attention.kv_heads) = (12, 1);
            attention.source = KeysAndValues::OneProjection;
        }
    })
}

/// Normed embeddings, queries and keys normed without weights, gated outputs of attention, a layer that is not rotated,
/// and scaled and capped logits.
fn gated() -> DecoderSpec {
    DecoderSpec {
        embedding: EmbeddingSpec { norm: Some(NORM), ..EmbeddingSpec::plain() },
        head: HeadSpec { is_tied: false, scale: 0.6, softcap: Some(2.0) },
        ..plain().with_windows(&[Some(3), None])
    }
    .with_layers(|_, layer| layer.norms = LayerNorms::around(RMS))
    .with_attention(|layer, attention| {
        attention.qk_norm = Some(QkNorm { norm: NORM, over: NormedChannels::Head, has_weights: false });
        attention.gate = OutputGate::Projected;
        attention.rope = attention.rope.filter(|_| layer == 0);
    })
}

/// Neighbouring channels of half of each head are rotated; gate and up are one linear.
fn interleaved() -> DecoderSpec {
    let spec = DecoderSpec { ropes: vec![RopeSpec::plain(1e2, 4)], ..plain() }.with_interleaved_ropes();
    let spec = spec.with_layers(|_, layer| layer.norms = LayerNorms::around(RMS));
    spec.with_gated(|gated| gated.is_fused = true)
}

/// YaRN, and queries that grow with their position.
fn scaled_positions() -> DecoderSpec {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 2.0,
        beta_slow: 0.5,
        original_max_positions: 16,
        truncate: true,
    };
    let keys = RopeSpec { scaling, attention_scale: 1.1, ..RopeSpec::plain(1e2, 8) };
    let queries = RopeSpec { position_scale: Some(PositionScale { beta: 0.5, original: 2 }), ..keys.clone() };
    let rotation = Some(Rotation { queries: 1, ..Rotation::by(0) });
    DecoderSpec { ropes: vec![keys, queries], ..plain() }
        .with_attention(|_, attention| attention.rope = rotation)
}

/// A rotary embedding that changes in the first sample only, which is longer than the others.
fn dynamic() -> DecoderSpec {
    let scaling = RopeScaling::Dynamic { factor: 3.0, max_positions: 5 };
    DecoderSpec { ropes: vec![RopeSpec { scaling, ..RopeSpec::plain(1e2, 8) }], ..plain() }
}

/// A layer whose queries come from a latent and whose values are smaller than queries, and one with the reverse. Queries of
/// the second grow with their position.
fn latent() -> DecoderSpec {
    let of_layers = [(Some(12), 4, 6, None), (None, 3, 9, Some(1))];
    let scale = RopeSpec {
        scaling: RopeScaling::Proportional { rotated_pairs: 0, factor: 1.0 },
        position_scale: Some(PositionScale { beta: 0.5, original: 2 }),
        ..RopeSpec::plain(1.0, 2)
    };
    let spec = DecoderSpec { ropes: vec![RopeSpec::plain(1e2, 4), scale], ..plain() };
    let spec = spec.with_interleaved_ropes().with_attention(|layer, attention| {
        let (query_rank, plain, value, query_scale) = of_layers[layer];
        let latent = LatentSpec { query_rank, rank: 11, plain, rotated: 4, value, norm: NORM, query_scale };
        attention.source = KeysAndValues::Latent(latent);
        attention.kv_heads = attention.heads;
        attention.head_dim = latent.query().max(value).next_multiple_of(2);
        attention.scale = (latent.query() as f32).powf(-0.5);
    });
    let router = Router { experts: 4, chosen: 4, renormalizes: true, ..SOFTMAX };
    spec.with_experts(&ExpertsSpec::like_qwen(router, 6, Activation::Silu), |layer| layer == 1)
}

const SOFTMAX: Router = Router {
    experts: 5,
    chosen: 2,
    scores: RouterScores::Softmax,
    is_corrected: false,
    groups: None,
    renormalizes: false,
    added_to_sum: 0.0,
    scale: 1.0,
    has_expert_scales: false,
};

fn shared(gate: Option<&'static str>) -> Option<SharedExpert> {
    let gated = GatedSpec {
        module: "mlp.shared_expert",
        names: GatedNames::USUAL,
        width: 10,
        activation: Activation::Silu,
        is_fused: false,
        bias: false,
        scales: [1.0; 2],
    };
    Some(SharedExpert { gated, gate })
}

/// Weights of experts that do not add up to 1, and a gated feed-forward for every token beside them.
fn experts_with_shared() -> DecoderSpec {
    let experts = ExpertsSpec {
        shared: shared(Some("mlp.shared_expert_gate")),
        ..ExpertsSpec::like_qwen(SOFTMAX, 6, Activation::Silu)
    };
    plain().with_experts(&experts, |_| true)
}

/// Sigmoid scores, corrected for the choice among the best groups; the first layer is dense.
fn experts_of_groups() -> DecoderSpec {
    let router = Router {
        experts: 6,
        scores: RouterScores::Sigmoid,
        is_corrected: true,
        groups: Some(RouterGroups { count: 3, chosen: 2, best: 2 }),
        renormalizes: true,
        added_to_sum: 0.01,
        scale: 1.5,
        ..SOFTMAX
    };
    let experts = ExpertsSpec { shared: shared(None), ..ExpertsSpec::like_qwen(router, 6, Activation::Silu) };
    plain().with_experts(&experts, |layer| layer == 1)
}

/// As gpt-oss: sinks, biases everywhere, a clamped gate, and a window in one of the layers.
fn experts_with_biases() -> DecoderSpec {
    let experts = ExpertsSpec {
        router_bias: true,
        bias: true,
        ..ExpertsSpec::like_qwen(
            Router { renormalizes: true, ..SOFTMAX },
            6,
            Activation::ClampedSwiglu { limit: 1.5, alpha: 1.7 },
        )
    };
    let spec = plain().with_attention_biases(true).with_windows(&[Some(3), None]);
    spec.with_attention(|_, attention| attention.has_sinks = true).with_experts(&experts, |_| true)
}

/// As Gemma 4: experts beside the feed-forward, whose router norms and scales its input, and a factor for each expert.
fn experts_beside() -> DecoderSpec {
    let norm = |path| NormSpec { path, form: RMS };
    let spec = plain().with_layers(|_, layer| layer.norms = LayerNorms::around(RMS));
    let gated = spec.layers[0].clone().gated_mut().unwrap().clone();
    let experts = ExpertsSpec {
        router_norm: Some(RouterNorm { norm: NORM, weight: "router.scale", scale: 0.9 }),
        beside: Some(BesideExperts {
            gated,
            after_gated: norm("post_feedforward_layernorm_1"),
            before_experts: norm("pre_feedforward_layernorm_2"),
            after_experts: norm("post_feedforward_layernorm_2"),
        }),
        ..ExpertsSpec::like_qwen(
            Router { renormalizes: true, has_expert_scales: true, ..SOFTMAX },
            6,
            Activation::GeluTanh,
        )
    };
    spec.with_experts(&experts, |_| true)
}

/// One expert for each token, whose input is multiplied by its score.
fn weighed_inputs() -> DecoderSpec {
    let router = Router { chosen: 1, scores: RouterScores::Sigmoid, ..SOFTMAX };
    let experts = ExpertsSpec {
        weighs_inputs: true,
        shared: shared(None),
        ..ExpertsSpec::like_qwen(router, 6, Activation::Silu)
    };
    plain().with_experts(&experts, |layer| layer == 0)
}
