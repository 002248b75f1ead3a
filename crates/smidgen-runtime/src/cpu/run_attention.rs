//! Rotary positions and attention on the CPU: turns operands into views, and segment boundaries and cache rows into
//! slices.
//!
//! Left out: the computation (`rope.rs`, `attention.rs`, `attention_gradient.rs`, `cached_attention.rs`).

use super::attention::{AttentionBuffers, AttentionOptions, Tokens, TokensMut, attention};
use super::attention_gradient::{AttentionGradientBuffers, attention_gradient};
use super::bf16_unit::Bf16Unit;
use super::cached_attention::{self, CachePlaces};
use super::isa::Isa;
use super::rope;
use super::run::Run;
use crate::device::Operand;
use smidgen_ir::{AttentionShape, Dim, Precision, RopeSpec};

impl Run<'_> {
    pub(super) fn rope_table(&self, spec: &RopeSpec) {
        let table = self.output_rows(0);
        let frequencies = spec.inverse_frequencies();
        match spec.long_frequencies() {
            None => rope::rope_table(self.i32s(0), &frequencies, spec.attention_scale, table),
            Some((long, original)) => {
                let choice = rope::LongRope { short: &frequencies, long: &long, original };
                let lengths = match self.input(1).rows {
                    Dim::Tokens => rope::Lengths::OfTokens(self.integers(1)),
                    Dim::Boundaries | Dim::Tile { .. } | Dim::Rows | Dim::Const(_) | Dim::Audio(_) => {
                        rope::Lengths::OfSegments(self.integers(1))
                    }
                };
                rope::rope_table_by_length(self.i32s(0), lengths, choice, spec.attention_scale, table);
            }
        }
    }

    pub(super) fn rope(&self, heads: usize, inverse: bool) {
        let (x, table) = (self.input_rows(0), self.input_rows(1));
        let shape = rope::RopeShape {
            heads,
            head_dim: self.input(0).columns / heads,
            rotary_dim: self.input(1).columns,
        };
        rope::rope(x, table, shape, inverse, self.output_rows(0));
    }

    fn tokens(&self, operand: &Operand) -> Tokens {
        Tokens { pointer: self.address(operand), row_stride: operand.columns }
    }

    fn tokens_mut(&self, operand: &Operand) -> TokensMut {
        TokensMut { pointer: self.address(operand), row_stride: operand.columns }
    }

    fn attention_options<'b>(
        shape: &AttentionShape,
        segments: &'b [i32],
        unit: Option<Bf16Unit>,
    ) -> AttentionOptions<'b> {
        AttentionOptions {
            unit,
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
        let options = Self::attention_options(shape, self.integers(3), self.unit_of_plan());
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
        let options = Self::attention_options(shape, &[0], None);
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
        let options = Self::attention_options(shape, self.integers(6), self.unit_of_plan());
        // SAFETY: operands are views of planned memory, the outputs overlap nothing.
        unsafe { attention_gradient(Isa::detect(), &options, &buffers, self.workspace_from(0)) }
    }
}
