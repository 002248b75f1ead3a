//! `model_type = "gemma4_text"` and `"gemma4_unified_text"`: the text models of Gemma 4.
//!
//! Gemma 3 whose layers without a window have larger heads, perhaps fewer keys, and keys that are also values; scores are
//! not scaled; the last layers may use keys and values of earlier ones; each layer may have embeddings of its own, and
//! experts beside its feed-forward.

use super::config::{Config, MOST_CHANNELS};
use super::experts::{BesideExperts, ExpertNames, ExpertTargets, ExpertsSpec, RouterNorm};
use super::family::Family;
use super::gemma::read_like_gemma;
use super::layer::{
    FeedForward, KeysAndValues, LayerNorms, LayerSpec, NormForm, NormSpec, NormedChannels, TokenInput,
};
use super::llama::check_heads;
use super::routed::{activation_of, read_router_at};
use super::spec::{DecoderSpec, PerLayerEmbedding};
use crate::error::ModelError;
use smidgen_ir::{Norm, RopeScaling, RopeSpec, Router, RouterScores};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let mut spec = read_like_gemma(config, family)?;
    let (layers, norm) = (spec.layers.len(), Norm { eps: spec.norm_eps(), plus_one: false });
    let form = NormForm::Rms(norm);
    (spec.final_norm, spec.head.softcap) = (form, config.float("final_logit_softcapping")?);
    let slides = |layer: usize| !(layer + 1).is_multiple_of(6);
    let mut windows = config.windows(layers, config.size("sliding_window")?, slides)?;
    // As in transformers, the last layer sees all positions.
    windows[layers - 1] = None;
    let heads = heads_of_layers(config, &windows)?;
    let query_heads = spec.attention().map_or(0, |attention| attention.heads);
    heads.iter().try_for_each(|(head_dim, kv_heads)| check_heads(query_heads, *kv_heads, *head_dim))?;
    let has_one_projection = config.flag("attention_k_eq_v", false)?;
    let first_shared = layers - config.count("num_kv_shared_layers")?.unwrap_or(0).min(layers);
    let is_double_wide = config.flag("use_double_wide_mlp", false)?;
    let of_kind = |layer: usize| {
        let is_alike = |other: &usize| windows[*other].is_some() == windows[layer].is_some();
        let shared = (0..first_shared).rev().find(is_alike);
        shared.map(KeysAndValues::OfLayer).ok_or_else(|| ModelError::Contradiction {
            what: format!("layer {layer} shares keys and values, and no earlier layer of its kind has them"),
        })
    };
    let is_unlike = |layer: &usize| {
        of_kind(*layer).is_ok_and(|source| match source {
            KeysAndValues::OfLayer(source) => heads[source] != heads[*layer],
            _ => false,
        })
    };
    if let Some(layer) = (first_shared..layers).find(is_unlike) {
        let what = format!("layer {layer} shares keys and values with a layer whose heads have other sizes");
        return Err(ModelError::Contradiction { what });
    }
    let source = |layer: usize| match windows[layer] {
        _ if layer >= first_shared => of_kind(layer),
        None if has_one_projection => Ok(KeysAndValues::OneProjection),
        _ => Ok(KeysAndValues::Projected),
    };
    let sources = (0..layers).map(source).collect::<Result<Vec<KeysAndValues>, ModelError>>()?;
    let ropes = ropes_of_kinds(config, &windows, &heads)?;
    let width = config.count("hidden_size_per_layer_input")?.unwrap_or(0);
    if width > 0 {
        let key = "vocab_size_per_layer_input";
        let vocabulary = config.dimension(key)?.ok_or(ModelError::Missing { key })?;
        let channels = layers * width;
        if vocabulary < spec.vocabulary || channels > MOST_CHANNELS {
            let what = format!(
                "the embeddings for layers have {vocabulary} rows of {layers} x {width} channels; {} tokens need as many \
                 rows, and rows have up to {MOST_CHANNELS} channels",
                spec.vocabulary
            );
            return Err(ModelError::Contradiction { what });
        }
        spec.embedding.per_layer = Some(PerLayerEmbedding { vocabulary, width, norm });
    }
    let spec = spec.with_windows(&windows).with_qk_norms(NormedChannels::Head).with_ropes_of_kinds(ropes);
    let spec = spec.with_attention(|layer, attention| {
        (attention.head_dim, attention.kv_heads) = heads[layer];
        (attention.scale, attention.v_norm, attention.source) = (1.0, Some(norm), sources[layer]);
    });
    let after = NormSpec { path: "post_per_layer_input_norm", form };
    let experts =
        if config.flag("enable_moe_block", false)? { Some(read_experts(config, &spec)?) } else { None };
    Ok(spec.with_layers(|layer, spec| {
        (spec.norms, spec.has_scalar) = (LayerNorms::around(form), true);
        let activation = spec.gated_mut().map(|gated| {
            gated.width *= if is_double_wide && layer >= first_shared { 2 } else { 1 };
            gated.activation
        });
        let input = |activation| TokenInput { width, activation, norm: after };
        spec.token_input = activation.filter(|_| width > 0).map(input);
        if let Some(experts) = &experts {
            put_beside(spec, experts, form);
        }
    }))
}

/// Experts beside the feed-forward of each layer, which is put into place later. The router norms the residual stream, whose
/// norm for the experts is another.
fn read_experts(config: &Config<'_>, spec: &DecoderSpec) -> Result<ExpertsSpec, ModelError> {
    let norm = Norm { eps: spec.norm_eps(), plus_one: false };
    let router = Router {
        renormalizes: true,
        has_expert_scales: true,
        ..read_router_at(config, &["num_experts"], "top_k_experts", RouterScores::Softmax)?
    };
    let width = config.required_dimension("moe_intermediate_size")?;
    let scale = (spec.hidden as f32).powf(-0.5);
    Ok(ExpertsSpec {
        names: EXPERT_NAMES,
        router_norm: Some(RouterNorm { norm, weight: "router.scale", scale }),
        ..ExpertsSpec::like_qwen(router, width, activation_of(spec))
    })
}

const EXPERT_NAMES: ExpertNames = ExpertNames {
    router: "router.proj",
    experts: "experts",
    scales: "router.per_expert_scale",
    targets: ExpertTargets::Fused,
    ..ExpertNames::QWEN
};

/// Puts experts beside the feed-forward of a layer.
fn put_beside(layer: &mut LayerSpec, experts: &ExpertsSpec, form: NormForm) {
    let Some(gated) = layer.gated_mut().cloned() else { return };
    let norm = |path| NormSpec { path, form };
    let beside = BesideExperts {
        gated,
        after_gated: norm("post_feedforward_layernorm_1"),
        before_experts: norm("pre_feedforward_layernorm_2"),
        after_experts: norm("post_feedforward_layernorm_2"),
    };
    let experts = ExpertsSpec { beside: Some(beside), ..experts.clone() };
    layer.feed_forward = FeedForward::Experts(Box::new(experts));
}

/// Head size and key-value heads of each layer: in `per_layer_config`, or in older keys for layers without a window.
fn heads_of_layers(
    config: &Config<'_>,
    windows: &[Option<usize>],
) -> Result<Vec<(usize, usize)>, ModelError> {
    let (head_dim, kv_heads) =
        (config.required_size("head_dim")?, config.required_size("num_key_value_heads")?);
    let mut heads = vec![(head_dim, kv_heads); windows.len()];
    if let Some(layers) = config.table("per_layer_config", "per_layer_config.")? {
        for (layer, table) in layers.tables("per_layer_config.*.")? {
            table.refuse_others(&["head_dim", "num_key_value_heads"])?;
            let place = layer.parse::<usize>().ok().and_then(|layer| heads.get_mut(layer));
            let place = place.ok_or_else(|| ModelError::Contradiction {
                what: format!("`per_layer_config` has `{layer}`, and the model has {} layers", windows.len()),
            })?;
            *place = (
                table.size("head_dim")?.unwrap_or(head_dim),
                table.size("num_key_value_heads")?.unwrap_or(kv_heads),
            );
        }
        return Ok(heads);
    }
    let full_dim = config.size("global_head_dim")?.unwrap_or(512);
    let full_heads = if config.flag("attention_k_eq_v", false)? {
        config.size("num_global_key_value_heads")?.unwrap_or(kv_heads)
    } else {
        kv_heads
    };
    for (heads, _) in heads.iter_mut().zip(windows).filter(|(_, window)| window.is_none()) {
        *heads = (full_dim, full_heads);
    }
    Ok(heads)
}

/// The rotary embeddings of layers without a window and of those with one, each for heads of its own size.
fn ropes_of_kinds(
    config: &Config<'_>,
    windows: &[Option<usize>],
    heads: &[(usize, usize)],
) -> Result<[RopeSpec; 2], ModelError> {
    let head_dim = |slides: bool| {
        let of_kind = windows.iter().zip(heads).filter(|(window, _)| window.is_some() == slides);
        let mut sizes: Vec<usize> = of_kind.map(|(_, (head_dim, _))| *head_dim).collect();
        sizes.dedup();
        match sizes[..] {
            [] => Ok(heads[0].0),
            [size] => Ok(size),
            [one, other, ..] => Err(ModelError::Contradiction {
                what: format!("layers of one kind have heads of {one} and of {other} channels"),
            }),
        }
    };
    let [full, sliding] = [head_dim(false)?, head_dim(true)?];
    if config.has_own("rope_parameters") {
        return config.ropes_of_kinds([1_000_000.0, 10_000.0], [full, sliding]);
    }
    // A quarter of the pairs of a head is rotated.
    let scaling = RopeScaling::Proportional { rotated_pairs: full / 8, factor: 1.0 };
    Ok([RopeSpec { scaling, ..RopeSpec::plain(1e6, full) }, RopeSpec::plain(1e4, sliding)])
}
