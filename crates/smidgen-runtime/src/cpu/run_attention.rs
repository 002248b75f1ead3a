//! Rotary positions and attention on the CPU: turns operands into views, and segment boundaries and cache rows into
//! slices.
//!
//! Left out: the computation (`rope.rs`, `attention.rs`, `attention_gradient.rs`, `cached_attention.rs`).

use super::attention::{AttentionBuffers, AttentionOptions, Tokens, TokensMut, attention};
use super::attention_gradient::{AttentionGradientBuffers, attention_gradient, sinks_gradient};
use super::bf16_unit::Bf16Unit;
use super::cached_attention::{self, CachePlaces};
use super::isa::Isa;
use super::rope;
use super::run::Run;
use crate::device::Operand;
use smidgen_ir::{AttentionShape, Dim, Precision, RopeSpec};

impl Run<'_> {
    pub(super) fn rope_table(&self, spec: &RopeSpec) {
        let (table, frequencies, long) =
            (self.output_rows(0), spec.inverse_frequencies(), spec.long_frequencies());
        let scale = rope::TableScale { all: spec.attention_scale, of_position: spec.position_scale };
        let by_length = || match self.input(1).rows {
            Dim::Tokens => rope::Lengths::OfTokens(self.integers(1)),
            Dim::Boundaries
            | Dim::Tile { .. }
            | Dim::Routed(_)
            | Dim::Rows
            | Dim::Const(_)
            | Dim::Audio(_) => rope::Lengths::OfSegments(self.integers(1)),
        };
        let rule = match (&long, spec.stretch()) {
            (Some((long, original)), _) => {
                rope::Frequencies::Long { long, original: *original, lengths: by_length() }
            }
            (None, Some(stretch)) => rope::Frequencies::Stretched { stretch, lengths: by_length() },
            (None, None) => rope::Frequencies::Same,
        };
        rope::rope_table(self.i32s(0), &frequencies, rule, scale, table);
    }

    pub(super) fn rope(&self, heads: usize, inverse: bool, interleaved: bool) {
        let (x, table) = (self.input_rows(0), self.input_rows(1));
        let shape = rope::RopeShape {
            heads,
            head_dim: self.input(0).columns / heads,
            rotary_dim: self.input(1).columns,
            interleaved,
        };
        rope::rope(x, table, shape, inverse, self.output_rows(0));
    }

    fn tokens(&self, operand: &Operand) -> Tokens {
        Tokens { pointer: self.address(operand), row_stride: operand.columns }
    }

    fn tokens_mut(&self, operand: &Operand) -> TokensMut {
        TokensMut { pointer: self.address(operand), row_stride: operand.columns }
    }

    /// `sinks` is the input with the sinks, if there are any.
    fn attention_options<'b>(
        &self,
        shape: &AttentionShape,
        segments: &'b [i32],
        unit: Option<Bf16Unit>,
        sinks: usize,
    ) -> AttentionOptions<'b> {
        AttentionOptions {
            unit,
            sinks: shape.sinks.then(|| self.stored(self.input(sinks))),
            segments,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            scale: shape.scale,
            window: shape.window,
            softcap: shape.softcap,
        }
    }

    /// The bf16 unit, if the plan computes in bf16.
    fn unit_of_plan(&self) -> Option<Bf16Unit> {
        match self.step.precision {
            Precision::F32 | Precision::F16 | Precision::Fp8 => None,
            Precision::Bf16 => self.units.bf16,
        }
    }

    /// An integer input, such as segment boundaries.
    pub(super) fn integers(&self, input: usize) -> &[i32] {
        let operand = self.input(input);
        // SAFETY: the range is inside the arena, and nothing writes it during the step.
        unsafe { std::slice::from_raw_parts(self.address(operand), operand.elements_at(self.extent)) }
    }

    pub(super) fn attention(&self, shape: &AttentionShape) {
        let buffers = AttentionBuffers {
            q: self.tokens(self.input(0)),
            k: self.tokens(self.input(1)),
            v: self.tokens(self.input(2)),
            o: self.tokens_mut(self.output(0)),
            lse: self.address(self.output(1)),
        };
        let options = self.attention_options(shape, self.integers(3), self.unit_of_plan(), 4);
        // SAFETY: operands are views of planned memory, the outputs overlap nothing.
        unsafe { attention(Isa::detect(), &options, &buffers, self.workspace_from(0)) }
    }

    /// Table, slots and positions from input `first` on.
    fn cache_places(&self, first: usize, cache: &Operand) -> CachePlaces<'_> {
        CachePlaces {
            table: self.integers(first),
            positions_of_slot: self.input(first).columns,
            slots: self.integers(first + 1),
            positions: self.integers(first + 2),
            cache_rows: self.rows_of(cache),
        }
    }

    pub(super) fn cache_rows(&self) {
        let places = self.cache_places(2, self.update(0));
        for (new, cache) in [0, 1].map(|index| (self.input_rows(index), self.update(index))) {
            cached_attention::write_rows(&places, new, self.floats_mut(cache).rows(cache.columns));
        }
    }

    pub(super) fn cached_attention(&self, shape: &AttentionShape) {
        let buffers = AttentionBuffers {
            q: self.tokens(self.input(0)),
            k: self.tokens(self.input(1)),
            v: self.tokens(self.input(2)),
            o: self.tokens_mut(self.output(0)),
            lse: std::ptr::null_mut(),
        };
        let places = self.cache_places(3, self.input(1));
        let options = self.attention_options(shape, &[0], None, 6);
        // SAFETY: operands are views of planned memory, the output overlaps nothing.
        unsafe {
            cached_attention::cached_attention(
                Isa::detect(),
                &options,
                &places,
                &buffers,
                self.workspace_from(0),
            )
        }
    }

    pub(super) fn attention_grad(&self, shape: &AttentionShape) {
        let buffers = AttentionGradientBuffers {
            q: self.tokens(self.input(0)),
            k: self.tokens(self.input(1)),
            v: self.tokens(self.input(2)),
            o: self.tokens(self.input(3)),
            lse: self.address(self.input(4)),
            o_gradient: self.tokens(self.input(5)),
            q_gradient: self.tokens_mut(self.output(0)),
            k_gradient: self.tokens_mut(self.output(1)),
            v_gradient: self.tokens_mut(self.output(2)),
        };
        // The backward pass has the sinks in lse.
        let shape = &AttentionShape { sinks: false, ..*shape };
        let options = self.attention_options(shape, self.integers(6), self.unit_of_plan(), 0);
        // SAFETY: operands are views of planned memory, the outputs overlap nothing.
        unsafe { attention_gradient(Isa::detect(), &options, &buffers, self.workspace_from(0)) }
    }

    pub(super) fn sinks_grad(&self) {
        let [o, lse, o_gradient] = [0, 1, 2].map(|input| self.input_rows(input));
        let (sinks, target) = (self.stored(self.input(3)), self.floats_mut(self.update(0)));
        sinks_gradient(o, lse, o_gradient, sinks, target, self.workspace_floats());
    }
}
