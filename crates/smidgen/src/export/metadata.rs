//! GGUF metadata of a model: the keys that llama.cpp's converter writes, and the small tensors that go with them.
//!
//! GGUF has defaults instead of keys for some properties, and cannot express others. So the metadata is read back, and a
//! model that it would describe wrongly is refused: llama.cpp would silently compute something else.
//! Left out: the tokenizer.

use super::like::difference;
use crate::plan::model::constant_dims;
use smidgen_compile::DecoderSpec;
use smidgen_compile::model::layer::{AttentionSpec, FeedForward, KeysAndValues, LayerSpec};
use smidgen_compile::model::read_spec;
use smidgen_compile::model::recurrent::RecurrentSpec;
use smidgen_formats::gguf::architecture::{
    Absent, AbsentWindow, Architecture, Head, Number, Pattern, QK_NORMS, ROPE_DIVISORS, ROPE_FACTORS,
    SHORT_CONVOLUTION_ROWS, SlidingTheta, Special, Windows,
};
use smidgen_formats::gguf::config::{Parts, described_model, yarn_scale};
use smidgen_formats::gguf::model_problem::GgufModelProblem;
use smidgen_formats::gguf::rope_divisors::UNROTATED;
use smidgen_formats::gguf::tensor_names::file_name;
use smidgen_formats::gguf::value::{Array, Metadata, Value};
use smidgen_ir::{RopeScaling, RopeSpec};
use std::collections::HashMap;

/// The metadata of a model, without weights and tokens.
#[derive(Clone, Debug, Default)]
pub struct Description {
    pub metadata: Metadata,
    /// Small tensors of F32 that the description needs.
    pub tensors: Vec<(String, Vec<f32>)>,
    /// Notes about differences in llama.cpp.
    pub notes: Vec<String>,
}

/// Describes a model, or returns what GGUF cannot express.
pub fn describe(
    spec: &DecoderSpec,
    architecture: &'static Architecture,
    name: &str,
) -> Result<Description, String> {
    if spec.experts().next().is_some() {
        return Err("routed experts are not written to GGUF files".into());
    }
    let attention = spec.attention().ok_or("no layer has attention")?;
    let mut describer = Describer { spec, attention, architecture, description: Description::default() };
    describer.text("general.architecture", architecture.name);
    describer.text("general.type", "model");
    describer.text("general.name", name);
    describer.sizes();
    for number in architecture.numbers {
        let none = matches!(number.absent, Absent::DefaultOrNone(_)).then_some(0.0);
        if let Some(value) = describer.number_of(number).or(none) {
            describer.float(number.key, value);
        }
    }
    describer.rope()?;
    describer.windows()?;
    describer.special()?;
    describer.check()?;
    Ok(describer.description)
}

struct Describer<'a> {
    spec: &'a DecoderSpec,
    /// That of the first layer.
    attention: &'a AttentionSpec,
    architecture: &'static Architecture,
    description: Description,
}

impl Describer<'_> {
    fn text(&mut self, key: &str, text: &str) {
        self.description.metadata.set(key, Value::String(text.to_string()));
    }

    fn set(&mut self, key: &str, value: Value) {
        self.description.metadata.set(&format!("{}.{key}", self.architecture.name), value);
    }

    fn whole(&mut self, key: &str, number: usize) {
        self.set(key, Value::U32(number as u32));
    }

    fn float(&mut self, key: &str, number: f32) {
        self.set(key, Value::F32(number));
    }

    fn tensor(&mut self, name: &str, numbers: Vec<f32>) {
        self.description.tensors.push((name.to_string(), numbers));
    }

    /// One number if all layers have the same, or a list.
    fn of_layers(&mut self, key: &str, numbers: Vec<usize>) {
        if numbers.iter().all(|number| *number == numbers[0]) {
            self.whole(key, numbers[0])
        } else {
            self.set(key, Value::Array(Array::I32(numbers.into_iter().map(|number| number as i32).collect())))
        }
    }

    fn refuse<T>(&self, what: &str) -> Result<T, String> {
        Err(format!("{what}, which GGUF cannot express for `{}`", self.architecture.name))
    }

    /// The first attention with a window, or without one.
    fn of_kind(&self, slides: bool) -> &AttentionSpec {
        let mut attentions = self.spec.attentions().map(|(_, attention)| attention);
        attentions.find(|attention| attention.window.is_some() == slides).unwrap_or(self.attention)
    }

    fn sizes(&mut self) {
        let (spec, full, sliding) = (self.spec, self.of_kind(false).head_dim, self.of_kind(true).head_dim);
        for (key, size) in [
            ("block_count", spec.layers.len()),
            ("context_length", spec.max_positions),
            ("embedding_length", spec.hidden),
            ("attention.head_count", self.attention.heads),
            ("attention.key_length", full),
            ("attention.value_length", full),
            ("rope.dimension_count", spec.ropes[0].dim),
            ("vocab_size", spec.vocabulary),
        ] {
            self.whole(key, size);
        }
        let kv_heads = |layer: &LayerSpec| layer.attention().map_or(0, |attention| attention.kv_heads);
        let kv_heads = spec.layers.iter().map(kv_heads).collect();
        self.of_layers("attention.head_count_kv", kv_heads);
        let width = |feed_forward: &FeedForward| match feed_forward {
            FeedForward::Gated(gated) => gated.width,
            FeedForward::Experts(experts) => experts.width,
        };
        let widths = spec.layers.iter().map(|layer| width(&layer.feed_forward)).collect();
        self.of_layers("feed_forward_length", widths);
        if self.architecture.special == Special::Gemma4 {
            for key in ["attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"]
            {
                self.whole(key, sliding);
            }
        }
    }

    fn number_of(&self, number: &Number) -> Option<f32> {
        let (spec, attention) = (self.spec, self.attention);
        match number.config {
            "rms_norm_eps" | "layer_norm_eps" | "norm_eps" => Some(spec.norm_eps()),
            "logits_scaling" => Some(1.0 / spec.head.scale),
            "logit_scale" | "output_multiplier" => Some(spec.head.scale),
            "residual_multiplier" => Some(spec.layers[0].residual_scale),
            "embedding_multiplier" => Some(spec.embedding.scale),
            "attention_multiplier" => Some(attention.scale),
            "attn_logit_softcapping" => attention.softcap,
            "final_logit_softcapping" => spec.head.softcap,
            other => unreachable!("`{other}` is in no row of an architecture"),
        }
    }

    /// The rotary embedding of layers with full attention, and that of layers with a window.
    fn rope(&mut self) -> Result<(), String> {
        let (rope, special) = (&self.spec.ropes[0], self.architecture.special);
        self.float("rope.freq_base", rope.theta);
        if let (Some(sliding), SlidingTheta::Default(_)) =
            (self.spec.ropes.get(1), self.architecture.sliding_theta)
        {
            self.float("rope.freq_base_swa", sliding.theta);
        }
        let has_divisors = self.architecture.rope_tensors.contains(&ROPE_DIVISORS);
        match &rope.scaling {
            RopeScaling::Default if special == Special::LongRope => {
                self.whole("rope.scaling.original_context_length", self.spec.max_positions);
            }
            RopeScaling::Default => {}
            RopeScaling::Linear { factor } => {
                self.text_of_rope("linear");
                self.float("rope.scaling.factor", *factor);
            }
            RopeScaling::LongRope { short, long, original_max_positions } if special == Special::LongRope => {
                self.whole("rope.scaling.original_context_length", *original_max_positions);
                self.float("rope.scaling.attn_factor", rope.attention_scale);
                let [long_name, short_name] = ROPE_FACTORS;
                self.tensor(long_name, long.clone());
                self.tensor(short_name, short.clone());
            }
            RopeScaling::LongRope { short, long, .. }
                if has_divisors && short == long && rope.attention_scale == 1.0 =>
            {
                self.tensor(ROPE_DIVISORS, long.clone());
            }
            RopeScaling::Llama3 { .. } if has_divisors => self.tensor(ROPE_DIVISORS, divisors(rope)),
            RopeScaling::Proportional { rotated_pairs, .. } if special == Special::Gemma4 => {
                let divisor = |pair: usize| if pair < *rotated_pairs { 1.0 } else { UNROTATED };
                self.tensor(ROPE_DIVISORS, (0..rope.dim / 2).map(divisor).collect());
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, .. } => {
                self.yarn(rope, *factor, [*beta_fast, *beta_slow], *original_max_positions)?;
            }
            other => {
                let kind = match other {
                    RopeScaling::Llama3 { .. } => "llama3",
                    RopeScaling::LongRope { .. } => "longrope",
                    RopeScaling::Dynamic { .. } => "dynamic",
                    _ => "proportional",
                };
                return self.refuse(&format!("the rotary embedding is scaled as `{kind}`"));
            }
        }
        let has_tensor = self.description.tensors.iter().any(|(name, _)| name == ROPE_DIVISORS);
        if special == Special::Gemma4 && !has_tensor {
            // llama.cpp requires the tensor.
            self.tensor(ROPE_DIVISORS, vec![1.0; rope.dim / 2]);
        }
        Ok(())
    }

    fn text_of_rope(&mut self, kind: &str) {
        self.set("rope.scaling.type", Value::String(kind.into()));
    }

    /// llama.cpp scales cosines and sines by 1 + 0.1·ln(factor), or by a ratio of such numbers, then by `attn_factor`.
    fn yarn(
        &mut self,
        rope: &RopeSpec,
        factor: f32,
        [fast, slow]: [f32; 2],
        original: usize,
    ) -> Result<(), String> {
        let grows = self.architecture.special == Special::GrowingQueries;
        if [fast, slow] != [32.0, 1.0] && !grows {
            return self.refuse(&format!("YaRN has `beta_fast = {fast}` and `beta_slow = {slow}`"));
        }
        self.text_of_rope("yarn");
        self.float("rope.scaling.factor", factor);
        self.whole("rope.scaling.original_context_length", original);
        self.float("rope.scaling.yarn_beta_fast", fast);
        self.float("rope.scaling.yarn_beta_slow", slow);
        let mut common = yarn_scale(f64::from(factor), 1.0);
        if grows {
            self.float("rope.scaling.yarn_log_multiplier", 1.0);
            common = 1.0;
        }
        let ratio = f64::from(rope.attention_scale) / common;
        if (ratio - 1.0).abs() > 1e-6 {
            self.float("rope.scaling.attn_factor", ratio as f32);
        }
        Ok(())
    }

    fn windows(&mut self) -> Result<(), String> {
        let windows: Vec<Option<usize>> =
            self.spec.attentions().map(|(_, attention)| attention.window).collect();
        let window = windows.iter().copied().flatten().next();
        let key = "attention.sliding_window";
        match (self.architecture.windows, window) {
            (Windows::EveryLayer, None) if self.architecture.special == Special::LongRope => {
                self.whole(key, 0);
            }
            (Windows::Periodic { period, absent: AbsentWindow::Refused, pattern }, None) => {
                self.whole(key, self.spec.max_positions);
                self.pattern(&windows, period as usize, pattern)?;
            }
            (Windows::Never, _) | (_, None) => {}
            (Windows::EveryLayer, Some(window)) => {
                self.whole(key, window);
                if window < self.spec.max_positions {
                    self.description.notes.push(format!(
                        "llama.cpp has no sliding window for `{}`: beyond {window} tokens its results differ",
                        self.architecture.name
                    ));
                }
            }
            (Windows::Periodic { period, pattern, .. }, Some(window)) => {
                self.whole(key, window);
                self.pattern(&windows, period as usize, pattern)?;
            }
        }
        Ok(())
    }

    /// Every n-th layer has full attention, or those that a list names.
    fn pattern(&mut self, windows: &[Option<usize>], default: usize, pattern: Pattern) -> Result<(), String> {
        let key = "attention.sliding_window_pattern";
        if pattern != Pattern::Period {
            let slides = windows.iter().map(Option::is_some).collect();
            self.set(key, Value::Array(Array::Bool(slides)));
            return Ok(());
        }
        let is_period = |period: &usize| {
            let is_full = |layer: usize| (layer + 1).is_multiple_of(*period);
            windows.iter().enumerate().all(|(layer, window)| window.is_none() == is_full(layer))
        };
        if is_period(&default) {
            return Ok(());
        }
        // A period beyond the last layer means that every layer has the window, and 1 that none has it.
        match (1..=windows.len() + 1).find(is_period) {
            Some(period) => {
                self.whole(key, period);
                Ok(())
            }
            None => self.refuse("the layers with a sliding window are not periodic"),
        }
    }

    fn special(&mut self) -> Result<(), String> {
        let (spec, attention) = (self.spec, self.attention);
        match self.architecture.special {
            Special::GrowingQueries => {
                if let Some(scale) = spec.ropes.iter().find_map(|rope| rope.position_scale) {
                    self.float("attention.temperature_scale", scale.beta);
                }
            }
            Special::QueryFactor => {
                let factor = attention.scale * (attention.head_dim as f32).sqrt();
                for layer in 0..spec.layers.len() {
                    for (norm, weight) in QK_NORMS.into_iter().zip([factor, 1.0]) {
                        self.tensor(&format!("blk.{layer}.{norm}"), vec![weight; attention.head_dim]);
                    }
                }
            }
            Special::Gemma4 => {
                let source = |attention: &AttentionSpec| match attention.source {
                    KeysAndValues::OfLayer(source) => Some(source),
                    KeysAndValues::Projected | KeysAndValues::OneProjection | KeysAndValues::Latent(_) => {
                        None
                    }
                };
                let shared = spec.attentions().filter(|(_, attention)| source(attention).is_some()).count();
                let first = spec.layers.len() - shared;
                for (layer, attention) in spec.attentions().filter(|_| first >= 2) {
                    let expected = first - if attention.window.is_some() { 2 } else { 1 };
                    if let Some(source) = source(attention).filter(|source| *source != expected) {
                        return self.refuse(&format!(
                            "layer {layer} uses the keys and values of layer {source} instead of layer {expected}"
                        ));
                    }
                }
                self.whole("attention.shared_kv_layers", shared);
                let width = spec.embedding.per_layer.map_or(0, |per_layer| per_layer.width);
                self.whole("embedding_length_per_layer_input", width);
            }
            Special::ShortConvolutions => {
                let conv = spec.recurrents().find_map(|(_, recurrent)| match recurrent {
                    RecurrentSpec::ShortConv(conv) => Some(conv),
                    RecurrentSpec::Delta(_) | RecurrentSpec::Mamba(_) => None,
                });
                // A model without such layers has any number of rows.
                self.whole(SHORT_CONVOLUTION_ROWS, conv.map_or(3, |conv| conv.taps));
            }
            Special::None | Special::LongRope | Special::QueryScalar { .. } | Special::RopeSwitch => {}
        }
        Ok(())
    }

    /// Reads the description back.
    fn check(&self) -> Result<(), String> {
        match (self.architecture.head, self.spec.head.is_tied) {
            (Head::Tied, false) => return self.refuse("the head is not tied to the embedding"),
            (Head::Own, true) => return self.refuse("the head is tied to the embedding"),
            _ => {}
        }
        let described = described_model(&Written::new(self)).map_err(|problem| problem.to_string())?;
        let read = read_spec(&described.config).map_err(|problem| problem.to_string())?;
        difference(self.spec, &read).map_or(Ok(()), |what| self.refuse(&what))
    }
}

/// The model that is going to be written.
struct Written<'a> {
    description: &'a Description,
    dims: HashMap<String, Vec<usize>>,
}

impl<'a> Written<'a> {
    fn new(describer: &'a Describer<'_>) -> Written<'a> {
        let tensors = describer.spec.tensors().into_iter();
        let named = tensors.filter_map(|tensor| {
            Some((file_name(describer.architecture, &tensor.name)?, constant_dims(&tensor.shape)))
        });
        let small = describer.description.tensors.iter();
        let small = small.map(|(name, numbers)| (name.clone(), vec![numbers.len()]));
        Written { description: &describer.description, dims: named.chain(small).collect() }
    }
}

impl Parts for Written<'_> {
    fn metadata(&self) -> &Metadata {
        &self.description.metadata
    }

    fn dims(&self, tensor: &str) -> Option<&[usize]> {
        self.dims.get(tensor).map(Vec::as_slice)
    }

    fn small(&self, tensor: &str, _: usize) -> Result<Vec<f32>, GgufModelProblem> {
        let found = self.description.tensors.iter().find(|(name, _)| name == tensor);
        let missing = || GgufModelProblem::MissingTensor { tensor: tensor.to_string() };
        found.map(|(_, numbers)| numbers.clone()).ok_or_else(missing)
    }
}

/// Plain frequencies divided by scaled ones.
fn divisors(rope: &RopeSpec) -> Vec<f32> {
    let plain = RopeSpec::plain(rope.theta, rope.dim).inverse_frequencies();
    plain.iter().zip(rope.inverse_frequencies()).map(|(plain, scaled)| plain / scaled).collect()
}
