//! The audio encoder and projector of Phi-4-multimodal: sizes, and the tensors of each of its parts.
//!
//! Sound becomes rows of 80 ms: eight mel frames, which three strided convolutions join. Conformer blocks follow, then
//! the projector to the decoder's channels. Names are those of transformers' checkpoints.
//! Convolutions of width 1 are linears, and a convolution's weight is a matrix with one row per channel.
//! Left out: the second projector, which is for sound together with images, and the vision encoder.

use super::tensors::{Linear, Tensor};
use smidgen_ir::Shape;
pub use smidgen_ir::audio_rows::FRAMES_OF_ROW as FRAMES;

/// Prefix of the names of audio tensors.
pub const AUDIO: &str = "model.embed_tokens_extend.audio_embed";
/// Prefix of the names of all tensors outside the decoder, audio and vision.
pub const OUTSIDE_DECODER: &str = "model.embed_tokens_extend.";
pub const GLOBAL_MEAN: &str = "model.embed_tokens_extend.audio_embed.encoder.encoder_embedding.global_mean";
pub const GLOBAL_INVERSE_DEVIATION: &str =
    "model.embed_tokens_extend.audio_embed.encoder.encoder_embedding.global_invstd";
/// The bias that is added to attention scores, by distance and head.
pub const RELATIVE_BIAS: &str =
    "model.embed_tokens_extend.audio_embed.encoder.relative_attention_bias_layer.bias_values.weight";
/// The linears of the projector.
pub const PROJECTOR: [&str; 2] = [
    "model.embed_tokens_extend.audio_embed.up_proj_for_speech",
    "model.embed_tokens_extend.audio_embed.down_proj_for_speech",
];

/// Whether a module or a tensor belongs to the projector.
pub fn is_of_projector(path: &str) -> bool {
    PROJECTOR.iter().any(|module| path.starts_with(module))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AudioSpec {
    pub hidden: usize,
    pub intermediate: usize,
    pub blocks: usize,
    pub heads: usize,
    /// Rows that a causal convolution sees, its own included.
    pub kernel: usize,
    /// Mel bins of a frame.
    pub bins: usize,
    /// Channels of the strided convolutions.
    pub conv_channels: usize,
    /// The largest distance with a bias of its own.
    pub max_distance: usize,
    /// The token id whose embeddings are replaced by sound.
    pub token: u32,
    /// Channels of the decoder.
    pub decoder_hidden: usize,
}

/// The form of the audio rows that the host provides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AudioInput {
    /// There is no sound.
    #[default]
    None,
    /// Embeddings: outputs of the projector.
    Embeddings,
    /// Outputs of the encoder; the projector is part of the program.
    Encoded,
    /// Outputs of the strided convolutions; the blocks and the projector are part of the program.
    Subsampled,
}

impl AudioSpec {
    pub fn block_path(block: usize, module: &str) -> String {
        format!("{AUDIO}.encoder.encoders.{block}.{module}")
    }

    pub fn embed_path(module: &str) -> String {
        format!("{AUDIO}.encoder.embed.{module}")
    }

    /// Channels of an audio row of this form; 0 if there is no sound.
    pub fn width(&self, input: AudioInput) -> usize {
        match input {
            AudioInput::None => 0,
            AudioInput::Embeddings => self.decoder_hidden,
            AudioInput::Encoded | AudioInput::Subsampled => self.hidden,
        }
    }

    /// Bins that three strided convolutions leave.
    pub fn joined_bins(&self) -> usize {
        self.bins.div_ceil(FRAMES)
    }

    /// Linears that an adapter may name, in the order of the forward pass.
    pub fn linears(&self) -> Vec<Linear> {
        let (c, i) = (self.hidden, self.intermediate);
        let mut in_block = Vec::new();
        let feed_forward = |module: &str| {
            [(format!("{module}.gate_up_proj"), 2 * i, c), (format!("{module}.down_proj"), c, i)]
        };
        in_block.extend(feed_forward("feed_forward_in"));
        in_block
            .extend(["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| (format!("self_attn.{name}"), c, c)));
        in_block.extend(feed_forward("feed_forward_out"));
        let of_blocks = (0..self.blocks).flat_map(|block| {
            in_block.iter().map(move |(module, n, k)| (Self::block_path(block, module), *n, *k))
        });
        let d = self.decoder_hidden;
        let projector = [(PROJECTOR[0].to_string(), d, c), (PROJECTOR[1].to_string(), d, d)];
        let all = of_blocks.chain(projector);
        all.map(|(path, n, k)| Linear {
            path,
            n,
            k,
            bias: true,
            layer: None,
            kind: super::tensors::LinearKind::Dense,
        })
        .collect()
    }

    /// The tensors of the strided convolutions and the linear after them.
    fn subsampling_tensors(&self) -> Vec<Tensor> {
        let c = self.conv_channels;
        let convolutions = [("conv.0", 9), ("conv.2", 9), ("conv.3", c), ("conv.5", 9), ("conv.6", c)];
        let mut tensors = Vec::new();
        for (module, columns) in convolutions {
            push_linear(&mut tensors, &Self::embed_path(module), c, columns);
        }
        push_linear(&mut tensors, &Self::embed_path("out"), self.hidden, c * self.joined_bins());
        tensors
    }

    pub fn projector_tensors(&self) -> Vec<Tensor> {
        let mut tensors = Vec::new();
        for linear in self.linears().into_iter().filter(|linear| is_of_projector(&linear.path)) {
            push_linear(&mut tensors, &linear.path, linear.n, linear.k);
        }
        tensors
    }

    /// The tensors of a program that reads rows of this form.
    pub fn program_tensors(&self, input: AudioInput) -> Vec<Tensor> {
        match input {
            AudioInput::None | AudioInput::Embeddings => vec![],
            AudioInput::Encoded => self.projector_tensors(),
            AudioInput::Subsampled => {
                self.encoder_tensors().into_iter().chain(self.projector_tensors()).collect()
            }
        }
    }

    /// The tensors of the program that makes rows of this form.
    pub fn encoding_tensors(&self, input: AudioInput) -> Vec<Tensor> {
        let mut tensors = self.subsampling_tensors();
        if let AudioInput::Embeddings | AudioInput::Encoded = input {
            tensors.extend(self.encoder_tensors());
        }
        if input == AudioInput::Embeddings {
            tensors.extend(self.projector_tensors());
        }
        tensors
    }

    /// The tensors of the blocks.
    fn encoder_tensors(&self) -> Vec<Tensor> {
        let c = self.hidden;
        let mut tensors = Vec::new();
        for linear in self.linears().into_iter().filter(|linear| !is_of_projector(&linear.path)) {
            push_linear(&mut tensors, &linear.path, linear.n, linear.k);
        }
        for block in 0..self.blocks {
            for norm in ["feed_forward_in.layer_norm", "layer_norm_att", "conv.layer_norm"]
                .into_iter()
                .chain(["feed_forward_out.layer_norm", "layer_norm"])
            {
                let path = Self::block_path(block, norm);
                push(&mut tensors, format!("{path}.weight"), Shape::vector(c));
                push(&mut tensors, format!("{path}.bias"), Shape::vector(c));
            }
            for (module, n, k) in [
                ("conv.glu.ext_pw_conv_1d", 2 * c, c),
                ("conv.dw_sep_conv_1d.dw_conv", c, self.kernel),
                ("conv.dw_sep_conv_1d.pw_conv", c, c),
                ("conv.ext_pw_conv_1d", c, c),
            ] {
                push_linear(&mut tensors, &Self::block_path(block, module), n, k);
            }
            for name in ["conv.glu.b1", "conv.glu.b2"] {
                push(&mut tensors, Self::block_path(block, name), Shape::vector(c));
            }
        }
        push(&mut tensors, RELATIVE_BIAS.into(), Shape::matrix(2 * self.max_distance, self.heads));
        tensors
    }

    /// All audio tensors.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut tensors = self.encoding_tensors(AudioInput::Embeddings);
        for name in [GLOBAL_MEAN, GLOBAL_INVERSE_DEVIATION] {
            push(&mut tensors, name.into(), Shape::vector(self.bins));
        }
        tensors
    }
}

fn push(tensors: &mut Vec<Tensor>, name: String, shape: Shape) {
    tensors.push(Tensor { name, shape, layer: None });
}

fn push_linear(tensors: &mut Vec<Tensor>, path: &str, n: usize, k: usize) {
    push(tensors, format!("{path}.weight"), Shape::matrix(n, k));
    push(tensors, format!("{path}.bias"), Shape::vector(n));
}
