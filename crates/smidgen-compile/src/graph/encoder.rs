//! The audio encoder as part of a graph: mel frames to audio rows, conformer blocks, and the projector.
//!
//! A block is two half feed-forwards around attention and a convolution. Everything works on audio rows (A, C) of all
//! clips together; attention and causal convolutions stay within a chunk, which the marks define.
//! Left out: leaves (`leaves.rs`) and placing the embeddings among those of tokens (`forward.rs`).

use crate::forward::Builder;
use crate::model::audio::{AudioInput, AudioSpec, PROJECTOR, RELATIVE_BIAS};
use crate::names::{input, state};
use smidgen_ir::{Activation, AttentionShape, Op, Phase, PlainActivation, StridedConv, ValueId};

/// The default of PyTorch's layer norm.
const NORM_EPS: f32 = 1e-5;

impl Builder<'_> {
    /// The embeddings (A, C) of all clips, from the audio rows that the host writes.
    pub fn audio_embeddings(&mut self, spec: &AudioSpec, from: AudioInput) -> ValueId {
        let x = self.leaf(input::AUDIO_ROWS);
        match from {
            AudioInput::None | AudioInput::Embeddings => x,
            AudioInput::Encoded => self.project(x),
            AudioInput::Subsampled => {
                let x = self.encode(spec, x);
                self.project(x)
            }
        }
    }

    /// The entry point `encode`: turns clips into audio rows of the form that `request.audio` names.
    pub fn encode_audio(&mut self) {
        let (spec, to) = self.audio.expect("the model has an audio encoder");
        let rows = self.subsample(spec); // (A, C)
        let encoded = match to {
            AudioInput::None | AudioInput::Subsampled => rows,
            AudioInput::Encoded => self.encode(spec, rows),
            AudioInput::Embeddings => {
                let encoded = self.encode(spec, rows);
                self.project(encoded)
            }
        };
        let marks = self.leaf(input::AUDIO_MARKS);
        let (op, place) = (Op::MaskRows { stored: true }, (Phase::Forward, None));
        let updates = vec![self.leaf(state::AUDIO)];
        self.graph.emit(&mut self.nodes, op, vec![encoded, marks], updates, &[], place);
    }

    /// Normalized mel frames (8A, 80) to audio rows (A, C).
    fn subsample(&mut self, spec: &AudioSpec) -> ValueId {
        let marks = self.leaf(input::AUDIO_MARKS);
        let mut x = self.leaf(input::AUDIO_FEATURES);
        let mut bins = spec.bins;
        for (stage, frames) in [4, 2, 1].into_iter().enumerate() {
            bins = bins.div_ceil(2);
            let conv = StridedConv { frames, bins, depthwise: stage > 0 };
            let path = AudioSpec::embed_path(["conv.0", "conv.2", "conv.5"][stage]);
            let inputs =
                vec![x, marks, self.leaf(&format!("{path}.weight")), self.leaf(&format!("{path}.bias"))];
            x = self.emit1(Op::StridedConv(conv), inputs, &format!("audio.conv{stage}"));
            if stage > 0 {
                let path = AudioSpec::embed_path(["conv.3", "conv.6"][stage - 1]);
                x = self.linear_at(x, &path, &format!("audio.pointwise{stage}"));
            }
            x = self.act(x, PlainActivation::Relu, &format!("audio.act{stage}"));
        }
        x = self.emit1(Op::JoinPlaces { places: bins }, vec![x], "audio.joined"); // (A, C·bins)
        x = self.linear_at(x, &AudioSpec::embed_path("out"), "audio.subsampled"); // (A, C)
        self.emit1(Op::MaskRows { stored: false }, vec![x, marks], "audio.rows")
    }

    /// All blocks.
    fn encode(&mut self, spec: &AudioSpec, mut x: ValueId) -> ValueId {
        for block in 0..spec.blocks {
            // In `encode` blocks are not layers: there are no memory choices for them.
            self.block = (self.encoder_layers > 0).then_some(block);
            x = self.block(spec, block, x);
        }
        self.block = None;
        x
    }

    /// The projector: (A, C) to the decoder's channels.
    fn project(&mut self, x: ValueId) -> ValueId {
        let up = self.linear_at(x, PROJECTOR[0], "projector.up");
        let act = self.act(up, PlainActivation::Gelu, "projector.act");
        self.linear_at(act, PROJECTOR[1], "projector.out")
    }

    fn block(&mut self, spec: &AudioSpec, block: usize, x: ValueId) -> ValueId {
        let name = |what: &str| format!("encoder.{block}.{what}");
        let y = self.half_feed_forward(spec, block, "feed_forward_in", x);
        let mut x = self.add(x, y, 1.0, &name("after_in"));
        let y = self.block_attention(spec, block, x);
        x = self.add(x, y, 1.0, &name("after_attn"));
        let y = self.block_convolution(spec, block, x);
        x = self.add(x, y, 1.0, &name("after_conv"));
        let y = self.half_feed_forward(spec, block, "feed_forward_out", x);
        x = self.add(x, y, 1.0, &name("after_out"));
        self.layer_norm(x, block, "layer_norm", &name("x"))
    }

    /// 0.5 · down(up · silu(gate)); the first half of the fused linear is the value, the second the gate.
    fn act(&mut self, x: ValueId, kind: PlainActivation, output: &str) -> ValueId {
        self.emit1(Op::Act(kind), vec![x], output)
    }

    fn half_feed_forward(&mut self, spec: &AudioSpec, block: usize, module: &str, x: ValueId) -> ValueId {
        let name = |what: &str| format!("encoder.{block}.{module}.{what}");
        let n = self.layer_norm(x, block, &format!("{module}.layer_norm"), &name("norm"));
        let path = AudioSpec::block_path(block, &format!("{module}.gate_up_proj"));
        let (up, gate) = (name("up"), name("gate"));
        let parts = [(up.as_str(), spec.intermediate), (gate.as_str(), spec.intermediate)];
        let [up, gate] = self.parts_at(n, &path, parts); // (A, I) both
        let act = self.gated(Activation::Silu, gate, up, &name("act"));
        let path = AudioSpec::block_path(block, &format!("{module}.down_proj"));
        let y = self.linear_at(act, &path, &name("out"));
        self.scaled(y, 0.5, &name("half"))
    }

    fn block_attention(&mut self, spec: &AudioSpec, block: usize, x: ValueId) -> ValueId {
        let name = |what: &str| format!("encoder.{block}.attn.{what}");
        let head_dim = spec.hidden / spec.heads;
        let shape = AttentionShape {
            heads: spec.heads,
            kv_heads: spec.heads,
            head_dim,
            scale: (head_dim as f32).powf(-0.5),
            window: None,
            softcap: None,
            sinks: false,
        };
        let n = self.layer_norm(x, block, "layer_norm_att", &name("norm"));
        let [q, k, v] = ["q", "k", "v"].map(|part| {
            let path = AudioSpec::block_path(block, &format!("self_attn.{part}_proj"));
            self.linear_at(n, &path, &name(part))
        });
        let inputs = vec![q, k, v, self.leaf(input::AUDIO_MARKS), self.leaf(RELATIVE_BIAS)];
        let o = self.emit(Op::ChunkAttention(shape), inputs, &[&name("o"), &name("lse")])[0];
        self.linear_at(o, &AudioSpec::block_path(block, "self_attn.o_proj"), &name("out"))
    }

    fn block_convolution(&mut self, spec: &AudioSpec, block: usize, x: ValueId) -> ValueId {
        let name = |what: &str| format!("encoder.{block}.conv.{what}");
        let path = |module: &str| AudioSpec::block_path(block, &format!("conv.{module}"));
        let n = self.layer_norm(x, block, "conv.layer_norm", &name("norm"));
        let (value, gate) = (name("value"), name("gate"));
        let parts = [(value.as_str(), spec.hidden), (gate.as_str(), spec.hidden)];
        let [value, gate] = self.parts_at(n, &path("glu.ext_pw_conv_1d"), parts); // (A, C) both
        let halves = [(value, "glu.b1", "value_biased"), (gate, "glu.b2", "gate_biased")];
        let [value, gate] = halves.map(|(half, bias, output)| {
            let bias = self.leaf(&path(bias));
            self.emit1(Op::AddBias, vec![half, bias], &name(output))
        });
        let glu = self.gated(Activation::Silu, gate, value, &name("glu"));
        let depthwise = path("dw_sep_conv_1d.dw_conv");
        let inputs = vec![
            glu,
            self.leaf(input::AUDIO_MARKS),
            self.leaf(&format!("{depthwise}.weight")),
            self.leaf(&format!("{depthwise}.bias")),
        ];
        let y = self.causal_conv(inputs, true, &name("depthwise"));
        let y = self.linear_at(y, &path("dw_sep_conv_1d.pw_conv"), &name("pointwise"));
        let y = self.act(y, PlainActivation::Silu, &name("act"));
        self.linear_at(y, &path("ext_pw_conv_1d"), &name("out"))
    }

    fn layer_norm(&mut self, x: ValueId, block: usize, module: &str, output: &str) -> ValueId {
        let path = AudioSpec::block_path(block, module);
        let [weight, bias] = ["weight", "bias"].map(|part| self.leaf(&format!("{path}.{part}")));
        self.emit1(Op::LayerNorm { eps: NORM_EPS, bias: true }, vec![x, weight, bias], output)
    }
}
