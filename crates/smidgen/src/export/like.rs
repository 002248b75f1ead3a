//! What differs between a decoder and the one that its GGUF metadata describes.
//!
//! Numbers may differ by the rounding of a product, and rotary embeddings may be described in another way if they
//! rotate by the same angles. What a file does not say and no computation needs is not compared: the type of the model,
//! the row of padding, the type of stored weights.

use smidgen_compile::DecoderSpec;
use smidgen_compile::model::layer::{AttentionSpec, LayerSpec, Mixer};
use smidgen_compile::model::spec::EmbeddingSpec;
use smidgen_ir::{RopeScaling, RopeSpec};

/// The first difference, as the beginning of a sentence.
pub fn difference(spec: &DecoderSpec, read: &DecoderSpec) -> Option<String> {
    let sizes = |spec: &DecoderSpec| (spec.layers.len(), spec.vocabulary, spec.hidden, spec.max_positions);
    if sizes(spec) != sizes(read) {
        return Some("the sizes of the model differ".into());
    }
    let embedding = EmbeddingSpec { scale: read.embedding.scale, padding: None, ..spec.embedding };
    let of_model = [
        number("the scale of embeddings", Some(spec.embedding.scale), Some(read.embedding.scale)),
        number("the scale of logits", Some(spec.head.scale), Some(read.head.scale)),
        number("the softcap of logits", spec.head.softcap, read.head.softcap),
        other("embedding", embedding == EmbeddingSpec { padding: None, ..read.embedding }),
        other("last norm", spec.final_norm == read.final_norm),
        other("head", spec.head.is_tied == read.head.is_tied),
    ];
    of_model.into_iter().flatten().next().or_else(|| {
        let mut layers = spec.layers.iter().zip(&read.layers).enumerate();
        layers.find_map(|(index, (layer, as_read))| {
            let what = difference_of_layers((spec, layer), (read, as_read))?;
            Some(format!("in layer {index} {what}"))
        })
    })
}

fn difference_of_layers(
    (spec, layer): (&DecoderSpec, &LayerSpec),
    (read, as_read): (&DecoderSpec, &LayerSpec),
) -> Option<String> {
    let (Mixer::Attention(one), Mixer::Attention(other_one)) = (&layer.mixer, &as_read.mixer) else {
        return other("mixer", layer == as_read);
    };
    let window = |attention: &AttentionSpec| attention.window.map(|window| window as f32);
    let heads = |attention: &AttentionSpec| (attention.heads, attention.kv_heads, attention.head_dim);
    let like = AttentionSpec { scale: other_one.scale, rope: other_one.rope, ..one.clone() };
    let like =
        LayerSpec { mixer: Mixer::Attention(like), residual_scale: as_read.residual_scale, ..layer.clone() };
    let parts = [
        number("the sliding window", window(one), window(other_one)),
        number("the scale of scores", Some(one.scale), Some(other_one.scale)),
        number("the softcap of scores", one.softcap, other_one.softcap),
        number(
            "the scale of what is added to the residual stream",
            Some(layer.residual_scale),
            Some(as_read.residual_scale),
        ),
        other("shape of heads", heads(one) == heads(other_one)),
        other("rotary embedding", is_rotated_alike((spec, one), (read, other_one))),
        other("form (norms, biases, activation, shared keys)", like == *as_read),
    ];
    parts.into_iter().flatten().next()
}

fn number(what: &str, one: Option<f32>, read: Option<f32>) -> Option<String> {
    let is_like = match (one, read) {
        (Some(one), Some(read)) => is_near(one, read),
        _ => one == read,
    };
    let shown = |number: Option<f32>| number.map_or("none".to_string(), |number| number.to_string());
    (!is_like).then(|| format!("{what} is {} instead of {}", shown(one), shown(read)))
}

fn other(what: &str, is_like: bool) -> Option<String> {
    (!is_like).then(|| format!("the {what} is not that of the architecture"))
}

/// Equal but for the rounding of two products.
fn is_near(one: f32, other: f32) -> bool {
    (one - other).abs() <= 1e-6 * other.abs()
}

fn is_rotated_alike(
    (spec, one): (&DecoderSpec, &AttentionSpec),
    (read, other): (&DecoderSpec, &AttentionSpec),
) -> bool {
    match (one.rope, other.rope) {
        (Some(one), Some(other)) => {
            one.is_interleaved == other.is_interleaved
                && is_same_rope(&spec.ropes[one.queries], &read.ropes[other.queries])
                && is_same_rope(&spec.ropes[one.keys], &read.ropes[other.keys])
        }
        (one, other) => one.is_none() && other.is_none(),
    }
}

fn is_same_rope(one: &RopeSpec, other: &RopeSpec) -> bool {
    let has_divisors = |rope: &RopeSpec| match &rope.scaling {
        RopeScaling::Llama3 { .. } => true,
        RopeScaling::LongRope { short, long, .. } => short == long,
        _ => false,
    };
    let is_scaled_alike = one.scaling == other.scaling
        || (has_divisors(one) && has_divisors(other) && has_same_frequencies(one, other));
    let is_near = is_near(one.attention_scale, other.attention_scale);
    is_scaled_alike
        && is_near
        && (one.theta, one.dim, one.position_scale) == (other.theta, other.dim, other.position_scale)
}

/// Settings of Llama 3 are recovered from divisors with this tolerance.
fn has_same_frequencies(one: &RopeSpec, other: &RopeSpec) -> bool {
    let pairs = one.inverse_frequencies().into_iter().zip(other.inverse_frequencies());
    pairs.into_iter().all(|(one, other)| (one - other).abs() <= 2e-4 * other)
}
