//! The description of a decoder, which covers every supported model.
//!
//! Tensor and module names are those of Hugging Face checkpoints, because files, adapters and messages all use them.

use super::audio::AudioSpec;
pub use super::tensors::{Linear, Tensor};
use smidgen_ir::{Activation, DType, Extent, Norm, RopeSpec, Shape};

#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    pub model_type: String,
    pub vocabulary: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub norm: Norm,
    /// Whether the outputs of attention and MLP are also normed, before they are added to the residual stream.
    pub sandwich_norms: bool,
    /// The rotary embeddings; `attention` says which one a layer uses.
    pub ropes: Vec<RopeSpec>,
    /// Window and rotary embedding of each layer.
    pub attention: Vec<LayerAttention>,
    /// Scores are multiplied by this before the softmax.
    pub attention_scale: f32,
    pub attention_softcap: Option<f32>,
    pub logit_softcap: Option<f32>,
    /// Embedded tokens are multiplied by this.
    pub embedding_scale: f32,
    pub activation: Activation,
    /// Whether q, k and v are one linear, and gate and up another.
    pub fused: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub output_bias: bool,
    /// Whether queries and keys are normed, head by head, before they are rotated.
    pub qk_norm: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// The token whose row of the embedding table is not trained by lookups, as with PyTorch's `padding_idx`.
    pub padding: Option<u32>,
    /// Whether the head is the embedding table.
    pub tied_head: bool,
    /// Longest sequence that the model was trained for.
    pub max_positions: usize,
    /// The element type of the checkpoint's weights, according to the config.
    pub stored: DType,
    /// The audio encoder, if there is one.
    pub audio: Option<AudioSpec>,
}

/// Attention of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerAttention {
    /// Number of keys that a query sees, its own included; `None` means all keys up to its own.
    pub window: Option<usize>,
    /// Index into `ropes`.
    pub rope: usize,
}

impl LayerAttention {
    /// The same window and the first rotary embedding for every layer.
    pub fn uniform(layers: usize, window: Option<usize>) -> Vec<LayerAttention> {
        vec![LayerAttention { window, rope: 0 }; layers]
    }

    /// A window for the layers that slide, and the first rotary embedding for every layer.
    pub fn sliding(slides: Vec<bool>, window: usize) -> Vec<LayerAttention> {
        let attention = |slides: bool| LayerAttention { window: slides.then_some(window), rope: 0 };
        slides.into_iter().map(attention).collect()
    }
}

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const FINAL_NORM: &str = "model.norm.weight";
pub const HEAD: &str = "lm_head";
/// The weight of a head that is not tied to the embedding.
pub const UNTIED_HEAD: &str = "lm_head.weight";
/// Norms of the queries and of the keys of a layer.
pub const QK_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
/// The path of projections that a checkpoint stores as one, and the paths of the separate projections in their order.
pub const QKV: (&str, [&str; 3]) =
    ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
pub const GATE_UP: (&str, [&str; 2]) = ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]);

impl DecoderSpec {
    /// Name of the weight of the head.
    pub fn head_tensor(&self) -> &'static str {
        if self.tied_head { EMBEDDING } else { UNTIED_HEAD }
    }

    pub fn layer_path(layer: usize, module: &str) -> String {
        format!("model.layers.{layer}.{module}")
    }

    /// Rows of the query projection, and of the key and value projections.
    pub fn projection_rows(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    /// Norms of a layer's residual stream, in the order of the forward pass.
    pub fn layer_norms(&self) -> &'static [&'static str] {
        match self.sandwich_norms {
            true => &[
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
                "pre_feedforward_layernorm.weight",
                "post_feedforward_layernorm.weight",
            ],
            false => &["input_layernorm.weight", "post_attention_layernorm.weight"],
        }
    }

    /// All linears, the head included, in the order of the forward pass.
    pub fn linears(&self) -> Vec<Linear> {
        let [q, kv] = self.projection_rows();
        let (c, i) = (self.hidden, self.intermediate);
        let mut in_layer: Vec<(&str, usize, usize, bool)> = Vec::with_capacity(7);
        if self.fused {
            in_layer.push((QKV.0, q + 2 * kv, c, self.qkv_bias));
        } else {
            let rows = [q, kv, kv].into_iter();
            in_layer.extend(QKV.1.into_iter().zip(rows).map(|(module, n)| (module, n, c, self.qkv_bias)));
        }
        in_layer.push(("self_attn.o_proj", c, q, self.output_bias));
        if self.fused {
            in_layer.push((GATE_UP.0, 2 * i, c, self.mlp_bias));
        } else {
            in_layer.extend(GATE_UP.1.map(|module| (module, i, c, self.mlp_bias)));
        }
        in_layer.push(("mlp.down_proj", c, i, self.mlp_bias));
        let mut linears = Vec::with_capacity(self.layers * in_layer.len() + 1);
        for layer in 0..self.layers {
            for &(module, n, k, bias) in &in_layer {
                linears.push(Linear {
                    path: Self::layer_path(layer, module),
                    n,
                    k,
                    bias,
                    layer: Some(layer),
                });
            }
        }
        linears.push(Linear { path: HEAD.into(), n: self.vocabulary, k: c, bias: false, layer: None });
        linears
    }

    /// The linears of the decoder, then those of the audio encoder.
    pub fn all_linears(&self) -> Vec<Linear> {
        let audio = self.audio.iter().flat_map(AudioSpec::linears);
        self.linears().into_iter().chain(audio).collect()
    }

    /// Every tensor of the decoder. A tied head is the embedding and is not listed again.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = vec![tensor(EMBEDDING.into(), Shape::matrix(self.vocabulary, self.hidden), None)];
        let norm = |name: String, layer| tensor(name, Shape::vector(self.hidden), layer);
        for linear in self.linears() {
            if linear.path == HEAD && self.tied_head {
                continue;
            }
            tensors.push(tensor(
                format!("{}.weight", linear.path),
                Shape::matrix(linear.n, linear.k),
                linear.layer,
            ));
            if linear.bias {
                tensors.push(tensor(format!("{}.bias", linear.path), Shape::vector(linear.n), linear.layer));
            }
        }
        for layer in 0..self.layers {
            for name in self.layer_norms() {
                tensors.push(norm(Self::layer_path(layer, name), Some(layer)));
            }
            for name in QK_NORMS.iter().filter(|_| self.qk_norm) {
                let name = Self::layer_path(layer, name);
                tensors.push(tensor(name, Shape::vector(self.head_dim), Some(layer)));
            }
        }
        tensors.push(norm(FINAL_NORM.into(), None));
        tensors
    }

    pub fn parameters(&self) -> usize {
        let sizes = self.tensors().into_iter().map(|tensor| tensor.shape.at(&Extent::default()));
        sizes.map(|(rows, columns)| rows * columns).sum()
    }
}

fn tensor(name: String, shape: Shape, layer: Option<usize>) -> Tensor {
    Tensor { name, shape, layer }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn tiny() -> DecoderSpec {
        DecoderSpec {
            model_type: "llama".into(),
            vocabulary: 32,
            hidden: 16,
            intermediate: 24,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            norm: Norm { eps: 1e-5, plus_one: false },
            sandwich_norms: false,
            ropes: vec![RopeSpec::plain(1e4, 8)],
            attention: LayerAttention::uniform(2, None),
            attention_scale: 8f32.powf(-0.5),
            attention_softcap: None,
            logit_softcap: None,
            embedding_scale: 1.0,
            activation: Activation::Silu,
            fused: false,
            qkv_bias: false,
            output_bias: false,
            qk_norm: false,
            mlp_bias: false,
            padding: None,
            tied_head: false,
            max_positions: 64,
            stored: DType::F32,
            audio: None,
        }
    }

    /// 134,515,008 parameters, as the published checkpoint of SmolLM2-135M counts.
    #[test]
    fn parameters_of_smollm2() {
        let spec = DecoderSpec {
            vocabulary: 49152,
            hidden: 576,
            intermediate: 1536,
            layers: 30,
            attention: LayerAttention::uniform(30, None),
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            tied_head: true,
            ..tiny()
        };
        assert_eq!(spec.parameters(), 134_515_008);
    }
}
