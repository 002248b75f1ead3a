//! The description of a decoder, which covers every supported model.
//!
//! Tensor and module names are those of Hugging Face checkpoints, because files, adapters and messages all use them.

use super::audio::AudioSpec;
use super::experts::ExpertsSpec;
use super::layer::{AttentionSpec, GatedSpec, LayerSpec, NormForm, NormedChannels, QkNorm, Rotation};
use super::recurrent::RecurrentSpec;
pub use super::tensors::{Linear, LinearKind, Tensor};
use smidgen_ir::{DType, Extent, Norm, RopeSpec, Shape};

#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    pub model_type: String,
    pub vocabulary: usize,
    /// Channels of the residual stream.
    pub hidden: usize,
    pub embedding: EmbeddingSpec,
    /// The rotary embeddings; each attention names the one that it uses.
    pub ropes: Vec<RopeSpec>,
    pub layers: Vec<LayerSpec>,
    pub final_norm: NormForm,
    /// The module of the final norm.
    pub final_norm_path: &'static str,
    pub head: HeadSpec,
    /// Longest sequence that the model was trained for.
    pub max_positions: usize,
    /// The element type of the checkpoint's weights, according to the config.
    pub stored: DType,
    /// The audio encoder, if there is one.
    pub audio: Option<AudioSpec>,
    /// Layers behind the last that checkpoints have to predict further tokens, and that are not read.
    pub unread_layers: usize,
}

/// How tokens become rows of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// Embedded tokens are multiplied by this.
    pub scale: f32,
    /// The token whose row of the table is not trained by lookups, as with PyTorch's `padding_idx`.
    pub padding: Option<u32>,
    /// The norm of embedded tokens, without a weight.
    pub norm: Option<Norm>,
    /// A second table, with an embedding of each token for each layer.
    pub per_layer: Option<PerLayerEmbedding>,
}

/// What each layer gets of a token besides the residual stream: its row of a table, plus a projection of the embedded token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerEmbedding {
    pub vocabulary: usize,
    /// Channels for one layer.
    pub width: usize,
    /// The norm of the projection, for each layer separately.
    pub norm: Norm,
}

impl EmbeddingSpec {
    /// One table, whose rows are used as they are.
    pub fn plain() -> EmbeddingSpec {
        EmbeddingSpec { scale: 1.0, padding: None, norm: None, per_layer: None }
    }
}

/// How the last rows of the residual stream become logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSpec {
    /// Whether the head is the embedding table.
    pub is_tied: bool,
    /// Logits are multiplied by this, before they are capped.
    pub scale: f32,
    pub softcap: Option<f32>,
}

pub const EMBEDDING: &str = "model.embed_tokens.weight";
pub const FINAL_NORM: &str = "model.norm";
/// The table of embeddings for each layer, the projection of the embedded token, and its norm.
pub const PER_LAYER_EMBEDDING: &str = "model.embed_tokens_per_layer.weight";
pub const PER_LAYER_PROJECTION: &str = "model.per_layer_model_projection";
pub const PER_LAYER_NORM: &str = "model.per_layer_projection_norm.weight";
pub const HEAD: &str = "lm_head";
/// The weight of a head that is not tied to the embedding.
pub const UNTIED_HEAD: &str = "lm_head.weight";

impl DecoderSpec {
    /// Name of the weight of the head.
    pub fn head_tensor(&self) -> &'static str {
        if self.head.is_tied { EMBEDDING } else { UNTIED_HEAD }
    }

    /// Name of the weight of the final norm.
    pub fn final_norm_tensor(&self) -> String {
        format!("{}.weight", self.final_norm_path)
    }

    pub fn layer_path(layer: usize, module: &str) -> String {
        format!("model.layers.{layer}.{module}")
    }

    /// Changes the attention of every layer that has one; the function gets the number of the layer.
    pub fn with_attention(self, mut change: impl FnMut(usize, &mut AttentionSpec)) -> DecoderSpec {
        self.with_layers(|index, layer| {
            if let Some(attention) = layer.attention_mut() {
                change(index, attention);
            }
        })
    }

    /// Sets whether q, k, v and o have biases.
    pub fn with_attention_biases(self, biases: bool) -> DecoderSpec {
        self.with_attention(|_, attention| {
            (attention.qkv_bias, attention.output_bias) = (biases, biases);
        })
    }

    /// Sets whether all linears of the layers have biases.
    pub fn with_biases(self, biases: bool) -> DecoderSpec {
        self.with_attention_biases(biases).with_gated(|gated| gated.bias = biases)
    }

    /// Sets the window of each layer.
    pub fn with_windows(self, windows: &[Option<usize>]) -> DecoderSpec {
        self.with_attention(|index, attention| attention.window = windows[index])
    }

    /// Two rotary embeddings: of layers without a window and of those with one.
    pub fn with_ropes_of_kinds(self, ropes: [RopeSpec; 2]) -> DecoderSpec {
        let spec = DecoderSpec { ropes: ropes.into(), ..self };
        spec.with_attention(|_, attention| {
            attention.rope = Some(Rotation::by(usize::from(attention.window.is_some())));
        })
    }

    /// Rotates neighbouring channels together.
    pub fn with_interleaved_ropes(self) -> DecoderSpec {
        self.with_attention(|_, attention| {
            attention.rope = attention.rope.map(|rope| Rotation { is_interleaved: true, ..rope });
        })
    }

    /// Norms queries and keys as the residual stream is normed.
    pub fn with_qk_norms(self, over: NormedChannels) -> DecoderSpec {
        let NormForm::Rms(norm) = self.final_norm else { unreachable!("queries are normed as the stream") };
        self.with_attention(|_, attention| {
            attention.qk_norm = Some(QkNorm { norm, over, has_weights: true });
        })
    }

    /// Channels of a head of the first layer with attention.
    pub fn head_dim(&self) -> usize {
        self.attention().map_or(0, |attention| attention.head_dim)
    }

    /// The small number that keeps the final norm from dividing by zero.
    pub fn norm_eps(&self) -> f32 {
        match self.final_norm {
            NormForm::Rms(norm) => norm.eps,
            NormForm::Layer { eps } => eps,
        }
    }

    /// The first attention, which stands for all of them where all are alike.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        self.attentions().next().map(|(_, attention)| attention)
    }

    /// The layers with attention, by their numbers.
    pub fn attentions(&self) -> impl Iterator<Item = (usize, &AttentionSpec)> {
        self.layers.iter().enumerate().filter_map(|(index, layer)| Some((index, layer.attention()?)))
    }

    /// The layers with a recurrent mixer, by their numbers.
    pub fn recurrents(&self) -> impl Iterator<Item = (usize, &RecurrentSpec)> {
        self.layers.iter().enumerate().filter_map(|(index, layer)| Some((index, layer.recurrent()?)))
    }

    /// Changes the gated feed-forward of every layer that has one.
    pub fn with_gated(self, mut change: impl FnMut(&mut GatedSpec)) -> DecoderSpec {
        self.with_layers(|_, layer| {
            if let Some(gated) = layer.gated_mut() {
                change(gated);
            }
        })
    }

    /// The experts of every layer that has some, by its number.
    pub fn experts(&self) -> impl Iterator<Item = (usize, &ExpertsSpec)> {
        self.layers.iter().enumerate().filter_map(|(index, layer)| Some((index, layer.experts()?)))
    }

    /// Changes every layer; the function gets the number of the layer.
    pub fn with_layers(mut self, mut change: impl FnMut(usize, &mut LayerSpec)) -> DecoderSpec {
        self.layers.iter_mut().enumerate().for_each(|(index, layer)| change(index, layer));
        self
    }

    /// All linears, the head included, in the order of the forward pass.
    pub fn linears(&self) -> Vec<Linear> {
        let of_layers = self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let linears = layer.linears(self.hidden).into_iter();
            linears.map(move |linear| Linear {
                path: Self::layer_path(index, &linear.path),
                n: linear.n,
                k: linear.k,
                bias: linear.bias,
                layer: Some(index),
                kind: linear.kind,
            })
        });
        let (n, k) = (self.vocabulary, self.hidden);
        let projection = self.embedding.per_layer.map(|per_layer| Linear {
            path: PER_LAYER_PROJECTION.into(),
            n: self.layers.len() * per_layer.width,
            k,
            bias: false,
            layer: None,
            kind: LinearKind::Dense,
        });
        let head = Linear { path: HEAD.into(), n, k, bias: false, layer: None, kind: LinearKind::Dense };
        projection.into_iter().chain(of_layers).chain([head]).collect()
    }

    /// The linears of the decoder, then those of the audio encoder.
    pub fn all_linears(&self) -> Vec<Linear> {
        let audio = self.audio.iter().flat_map(AudioSpec::linears);
        self.linears().into_iter().chain(audio).collect()
    }

    /// Every tensor of the decoder. A tied head is the embedding and is not listed again.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = vec![tensor(EMBEDDING.into(), Shape::matrix(self.vocabulary, self.hidden), None)];
        for linear in self.linears() {
            if linear.path == HEAD && self.head.is_tied {
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
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, shape) in layer.tensors(self.hidden) {
                tensors.push(tensor(Self::layer_path(index, &name), shape, Some(index)));
            }
        }
        if let Some(PerLayerEmbedding { vocabulary, width, .. }) = self.embedding.per_layer {
            let shape = Shape::matrix(vocabulary, self.layers.len() * width);
            tensors.push(tensor(PER_LAYER_EMBEDDING.into(), shape, None));
            tensors.push(tensor(PER_LAYER_NORM.into(), Shape::vector(width), None));
        }
        tensors.push(tensor(self.final_norm_tensor(), Shape::vector(self.hidden), None));
        tensors
    }

    /// Whether published checkpoints have this tensor, and no layer reads it. Layers that predict further tokens stay on disk.
    pub fn is_unread(&self, name: &str) -> bool {
        let of_layer = |(index, attention): (usize, &AttentionSpec)| {
            attention.unread().iter().any(|path| {
                let module = Self::layer_path(index, path);
                name.strip_prefix(&module).is_some_and(|rest| rest.starts_with('.'))
            })
        };
        let further = self.layers.len()..self.layers.len() + self.unread_layers;
        let is_further = |layer: usize| name.starts_with(&Self::layer_path(layer, ""));
        name.starts_with("mtp.") || self.attentions().any(of_layer) || further.into_iter().any(is_further)
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
    use smidgen_ir::Norm;

    pub(crate) fn tiny() -> DecoderSpec {
        DecoderSpec {
            model_type: "llama".into(),
            vocabulary: 32,
            hidden: 16,
            embedding: EmbeddingSpec::plain(),
            ropes: vec![RopeSpec::plain(1e4, 8)],
            layers: vec![LayerSpec::like_llama(4, 2, 8, 24, 1e-5); 2],
            final_norm: NormForm::Rms(Norm { eps: 1e-5, plus_one: false }),
            final_norm_path: FINAL_NORM,
            head: HeadSpec { is_tied: false, scale: 1.0, softcap: None },
            max_positions: 64,
            stored: DType::F32,
            audio: None,
            unread_layers: 0,
        }
    }

    pub(crate) fn with_tied_head(mut spec: DecoderSpec) -> DecoderSpec {
        spec.head.is_tied = true;
        spec
    }

    /// 134,515,008 parameters, as the published checkpoint of SmolLM2-135M counts.
    #[test]
    fn parameters_of_smollm2() {
        let layers = vec![LayerSpec::like_llama(9, 3, 64, 1536, 1e-5); 30];
        let spec = DecoderSpec { vocabulary: 49152, hidden: 576, layers, ..with_tied_head(tiny()) };
        assert_eq!(spec.parameters(), 134_515_008);
    }
}
