//! The steps of audio models on the CPU: turns operands into views.
//!
//! Left out: the computation (`layer_norm.rs`, `plain_act.rs`, `audio_conv.rs`, `chunk_attention.rs`, `elementwise.rs`).

use super::audio_conv::{self, Marks};
use super::chunk_attention::{Scores, Upstream, chunk_attention, chunk_attention_grad};
use super::run::Run;
use super::{elementwise, layer_norm, plain_act};
use smidgen_ir::{AttentionShape, PlainActivation, StridedConv};

impl Run<'_> {
    pub(super) fn place_rows(&self, clear: bool) {
        let audio = (!clear).then(|| self.input_rows(2));
        elementwise::place_rows(self.input_rows(0), self.i32s(1), audio, self.output_rows(0));
    }

    pub(super) fn layer_norm(&self, eps: f32, bias: bool) {
        let (weight, bias) = (self.stored(self.input(1)), bias.then(|| self.stored(self.input(2))));
        layer_norm::layer_norm(self.input_rows(0), weight, bias, eps, self.output_rows(0));
    }

    pub(super) fn layer_norm_grad(&self, eps: f32, addend: bool) {
        let (x, weight, dy) = (self.input_rows(0), self.stored(self.input(1)), self.input_rows(2));
        let addend = addend.then(|| self.input_rows(3));
        layer_norm::layer_norm_grad(x, weight, eps, dy, addend, self.output_rows(0));
    }

    pub(super) fn act_grad(&self, kind: PlainActivation) {
        let (x, dy) = (self.floats(self.input(0)), self.floats(self.input(1)));
        plain_act::act_grad(kind, x, dy, self.floats_mut(self.output(0)));
    }

    pub(super) fn marks(&self, input: usize) -> Marks<'_> {
        Marks(self.integers(input))
    }

    pub(super) fn strided_conv(&self, conv: StridedConv) {
        let (x, y) = (self.floats(self.input(0)), self.floats_mut(self.output(0)));
        let (weight, bias) = (self.stored(self.input(2)), self.stored(self.input(3)));
        audio_conv::strided_conv(conv, x, self.marks(1), weight, bias, y);
    }

    pub(super) fn mask_rows(&self) {
        let to = self.step.outputs.first().unwrap_or_else(|| self.update(0));
        audio_conv::mask_rows(self.input_rows(0), self.marks(1), self.floats_mut(to).rows(to.columns));
    }

    fn scores(&self, shape: &AttentionShape, marks: usize) -> Scores<'_> {
        Scores {
            shape: *shape,
            q: self.input_rows(0),
            k: self.input_rows(1),
            marks: self.marks(marks),
            bias: self.stored(self.input(marks + 1)),
        }
    }

    pub(super) fn chunk_attention(&self, shape: &AttentionShape) {
        let (o, lse) = (self.output_rows(0), self.output_rows(1));
        chunk_attention(self.scores(shape, 3), self.input_rows(2), o, lse);
    }

    pub(super) fn chunk_attention_grad(&self, shape: &AttentionShape) {
        let upstream = Upstream {
            v: self.input_rows(2),
            o: self.input_rows(3),
            lse: self.input_rows(4),
            o_gradient: self.input_rows(5),
        };
        let outputs = [0, 1, 2].map(|output| self.output_rows(output));
        chunk_attention_grad(self.scores(shape, 6), upstream, outputs);
    }
}
