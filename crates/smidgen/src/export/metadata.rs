//! GGUF metadata of a model: the keys that llama.cpp's converter writes, and the rotary factors, which are tensors.
//!
//! GGUF has defaults instead of keys for some properties, and cannot express others. A model that it would describe
//! wrongly is refused, because llama.cpp would silently compute something else.
//! Left out: the tokenizer.

use smidgen_compile::DecoderSpec;
use smidgen_formats::gguf::architecture::Architecture;
use smidgen_formats::gguf::tensor_names::{ROPE_DIVISORS, ROPE_FACTORS};
use smidgen_formats::gguf::value::{Metadata, Value};
use smidgen_ir::{RopeScaling, RopeSpec};

/// The metadata of a model, without weights and tokens.
#[derive(Clone, Debug, Default)]
pub struct Description {
    pub metadata: Metadata,
    /// Small tensors of F32 that the description needs.
    pub tensors: Vec<(&'static str, Vec<f32>)>,
    /// Notes about differences in llama.cpp.
    pub notes: Vec<String>,
}

/// Describes a model, or returns what GGUF cannot express.
pub fn describe(spec: &DecoderSpec, architecture: Architecture, name: &str) -> Result<Description, String> {
    let mut describer = Describer { spec, architecture, description: Description::default() };
    describer.text("general.architecture", architecture.name());
    describer.text("general.type", "model");
    describer.text("general.name", name);
    describer.sizes();
    describer.rope()?;
    describer.windows()?;
    describer.caps()?;
    describer.refuse_other_scale()?;
    Ok(describer.description)
}

struct Describer<'a> {
    spec: &'a DecoderSpec,
    architecture: Architecture,
    description: Description,
}

impl Describer<'_> {
    fn text(&mut self, key: &str, text: &str) {
        self.description.metadata.set(key, Value::String(text.to_string()));
    }

    fn set(&mut self, key: &str, value: Value) {
        self.description.metadata.set(&format!("{}.{key}", self.architecture.name()), value);
    }

    fn whole(&mut self, key: &str, number: usize) {
        self.set(key, Value::U32(number as u32));
    }

    fn float(&mut self, key: &str, number: f32) {
        self.set(key, Value::F32(number));
    }

    fn refuse<T>(&self, what: &str) -> Result<T, String> {
        Err(format!("{what}, which GGUF cannot express for `{}`", self.architecture.name()))
    }

    fn sizes(&mut self) {
        let spec = self.spec;
        for (key, size) in [
            ("block_count", spec.layers),
            ("context_length", spec.max_positions),
            ("embedding_length", spec.hidden),
            ("feed_forward_length", spec.intermediate),
            ("attention.head_count", spec.heads),
            ("attention.head_count_kv", spec.kv_heads),
            ("attention.key_length", spec.head_dim),
            ("attention.value_length", spec.head_dim),
            ("rope.dimension_count", spec.ropes[0].dim),
            ("vocab_size", spec.vocabulary),
        ] {
            self.whole(key, size);
        }
        self.float("attention.layer_norm_rms_epsilon", spec.norm.eps);
    }

    /// The rotary embedding of layers with full attention, and for Gemma 3 that of sliding-window layers.
    fn rope(&mut self) -> Result<(), String> {
        let rope = &self.spec.ropes[0];
        self.float("rope.freq_base", rope.theta);
        if let [_, sliding] = self.spec.ropes.as_slice() {
            if sliding.scaling != RopeScaling::Default {
                return self.refuse("sliding layers have a scaled rotary embedding");
            }
            self.float("rope.freq_base_swa", sliding.theta);
        }
        match (&rope.scaling, self.architecture) {
            (RopeScaling::Default, Architecture::Phi3) => {
                self.whole("rope.scaling.original_context_length", self.spec.max_positions);
            }
            (RopeScaling::Default, _) => {}
            (RopeScaling::Linear { factor }, _) => {
                self.set("rope.scaling.type", Value::String("linear".into()));
                self.float("rope.scaling.factor", *factor);
            }
            (RopeScaling::Llama3 { .. }, Architecture::Llama) => {
                self.description.tensors.push((ROPE_DIVISORS, divisors(rope)));
            }
            (RopeScaling::LongRope { short, long, .. }, Architecture::Llama)
                if short == long && rope.attention_scale == 1.0 =>
            {
                self.description.tensors.push((ROPE_DIVISORS, long.clone()));
            }
            (RopeScaling::LongRope { short, long, original_max_positions }, Architecture::Phi3) => {
                self.whole("rope.scaling.original_context_length", *original_max_positions);
                self.float("rope.scaling.attn_factor", rope.attention_scale);
                let [long_name, short_name] = ROPE_FACTORS;
                self.description.tensors.push((long_name, long.clone()));
                self.description.tensors.push((short_name, short.clone()));
            }
            (RopeScaling::Llama3 { .. }, _) => {
                return self.refuse("the rotary embedding is scaled as `llama3`");
            }
            (RopeScaling::LongRope { .. }, _) => {
                return self.refuse("the rotary embedding is scaled as `longrope`");
            }
            (RopeScaling::Yarn { .. }, _) => {
                return self.refuse("the rotary embedding is scaled as `yarn`");
            }
            (RopeScaling::Dynamic { .. }, _) => {
                return self.refuse("the rotary embedding is scaled as `dynamic`");
            }
            (RopeScaling::Proportional { .. }, _) => {
                return self.refuse("the rotary embedding is scaled as `proportional`");
            }
        }
        Ok(())
    }

    fn windows(&mut self) -> Result<(), String> {
        let windows: Vec<Option<usize>> = self.spec.attention.iter().map(|layer| layer.window).collect();
        let window = windows.iter().copied().flatten().next();
        let is_uniform = windows.iter().all(|found| *found == window);
        match (self.architecture, window) {
            (Architecture::Phi3, None) => self.whole("attention.sliding_window", 0),
            (Architecture::Llama | Architecture::Phi3, Some(window)) if is_uniform => {
                self.whole("attention.sliding_window", window);
                if window < self.spec.max_positions {
                    self.description.notes.push(format!(
                        "llama.cpp has no sliding window for `{}`: beyond {window} tokens its results differ",
                        self.architecture.name()
                    ));
                }
            }
            (Architecture::Gemma2 | Architecture::Gemma3, Some(window)) => {
                self.whole("attention.sliding_window", window);
                self.period(&windows)?;
            }
            (Architecture::Gemma2, None) => return self.refuse("no layer has a sliding window"),
            (_, None) => {}
            (_, Some(_)) => return self.refuse("layers have a sliding window"),
        }
        Ok(())
    }

    /// Every n-th layer has full attention; the default is every second layer for Gemma 2 and every sixth for Gemma 3.
    fn period(&mut self, windows: &[Option<usize>]) -> Result<(), String> {
        let is_period = |period: &usize| {
            let is_full = |layer: usize| (layer + 1).is_multiple_of(*period);
            windows.iter().enumerate().all(|(layer, window)| window.is_none() == is_full(layer))
        };
        let default = if self.architecture == Architecture::Gemma2 { 2 } else { 6 };
        if is_period(&default) {
            return Ok(());
        }
        match (2..=windows.len()).find(is_period) {
            Some(period) => {
                self.whole("attention.sliding_window_pattern", period);
                Ok(())
            }
            None => self.refuse("the layers with a sliding window are not periodic"),
        }
    }

    fn caps(&mut self) -> Result<(), String> {
        match (self.architecture, self.spec.attention_softcap, self.spec.logit_softcap) {
            (Architecture::Gemma2, Some(attention), Some(logits)) => {
                self.float("attn_logit_softcapping", attention);
                self.float("final_logit_softcapping", logits);
            }
            (Architecture::Gemma2, _, _) => return self.refuse("scores or logits have no softcap"),
            (Architecture::Gemma3, None, Some(logits)) => self.float("final_logit_softcapping", logits),
            (_, None, None) => {}
            _ => return self.refuse("scores or logits have a softcap"),
        }
        Ok(())
    }

    /// llama.cpp divides scores by the root of the head size, and in the largest Gemma models by the root of hidden
    /// size over heads.
    fn refuse_other_scale(&self) -> Result<(), String> {
        let spec = self.spec;
        let largest_layers = match self.architecture {
            Architecture::Gemma2 => 46,
            Architecture::Gemma3 => 62,
            _ => 0,
        };
        let divisor = if spec.layers == largest_layers { spec.hidden / spec.heads } else { spec.head_dim };
        let expected = (divisor as f32).powf(-0.5);
        match (spec.attention_scale - expected).abs() <= 1e-6 * expected {
            true => Ok(()),
            false => self
                .refuse(&format!("scores are multiplied by {} instead of {expected}", spec.attention_scale)),
        }
    }
}

/// Plain frequencies divided by scaled ones.
fn divisors(rope: &RopeSpec) -> Vec<f32> {
    let plain = RopeSpec::plain(rope.theta, rope.dim).inverse_frequencies();
    plain.iter().zip(rope.inverse_frequencies()).map(|(plain, scaled)| plain / scaled).collect()
}
