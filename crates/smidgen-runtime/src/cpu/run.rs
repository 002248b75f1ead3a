//! One step on the CPU: operands become views, and each operation calls its kernel.
//!
//! Views are built from planned offsets. `verify` has shown that they do not overlap while both are in use, except where
//! an operation works in place.

use super::arena::Arena;
#[cfg(target_arch = "x86_64")]
use super::bf16_matmul::bf16_matmul;
#[cfg(target_arch = "x86_64")]
use super::bf16_unit::F32Unit;
use super::convert::{Element, f32_to_bf16, f32_to_f16};
use super::isa::Isa;
use super::kernel::OutputView;
use super::matmul::matmul;
use super::matmul_terms::{Init, Left, Output, Term};
use super::round_fp8::round_fp8;
use super::row_matmul::{FEW_ROWS, row_matmul};
use super::spill::Spill;
#[cfg(target_arch = "x86_64")]
use super::split_matmul::{MIN_COLUMNS, split_matmul};
use super::stored::Stored;
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use super::{Units, act, audio_conv, elementwise, embed, norm, plain_act};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::storage::row_scales;
use smidgen_ir::workspace_cpu::aligned_floats;
use smidgen_ir::{DType, Extent, HeadPart, Norm, Op, Precision, Space, Storage, transfer_ops};

pub fn run_step(
    arena: &Arena,
    spill: Option<&Spill>,
    step: &BoundStep,
    extent: &Extent,
    units: Units,
) -> Result<(), DeviceError> {
    let run = Run { arena, step, extent, units };
    match &step.op {
        Op::Embed { scale, .. } => match spill.filter(|_| step.inputs[1].space != Space::Device) {
            Some(spill) => return run.embed_from_disk(*scale, spill),
            None => run.embed(*scale),
        },
        Op::RmsNorm { norm, unweighted } => {
            let (channels, weight) = run.norm_weight(norm, *unweighted);
            let (x, y) = (run.floats(run.input(0)), run.floats_mut(run.output(0)));
            norm::rms_norm(x.rows(channels), weight, norm.eps, y.rows(channels));
        }
        Op::Dropout { p, stream, rest } => {
            elementwise::dropout(run.input_rows(0), run.u64s(1), *stream, *p, *rest, run.output_rows(0));
        }
        Op::Linear { bias, lora } => run.linear(*bias, *lora),
        Op::ScaleColumns { bias } => run.scale_columns(*bias),
        Op::Route(router) => run.route(router),
        Op::RouteGrad(router) => run.route_grad(router),
        Op::Dispatch { experts } => run.dispatch(*experts),
        Op::SpreadRows { weighted } => run.spread_rows(*weighted),
        Op::CombineRows { weighted } => run.combine_rows(*weighted),
        Op::RowDots => run.row_dots(),
        Op::GroupedLinear { part, bias, lora } => run.grouped_linear(part, *bias, *lora),
        Op::GroupedLinearGrad { parts, scales } => run.grouped_linear_grad(parts, scales),
        Op::GroupedWeightGrad { part, scale } => run.grouped_weight_grad(part, *scale),
        Op::GroupedBiasGrad { part } => run.grouped_bias_grad(part),
        Op::Fourier { scale } => run.fourier(*scale),
        Op::RopeTable(spec) => run.rope_table(spec),
        Op::Rope { heads, inverse, interleaved } => run.rope(*heads, *inverse, *interleaved),
        Op::Attention(shape) => run.attention(shape),
        Op::GatedAct(kind) => act::gated_act(*kind, run.input_rows(0), run.input_rows(1), run.output_rows(0)),
        Op::Add { scale } => elementwise::add(
            run.floats(run.input(0)),
            run.floats(run.input(1)),
            *scale,
            run.floats_mut(run.output(0)),
        ),
        Op::SliceColumns { first, columns, groups } => {
            let (x, y) = (run.floats(run.input(0)), run.floats_mut(run.output(0)).rows(*columns));
            elementwise::slice_columns(x.rows(run.input(0).columns / groups), *first, y);
        }
        Op::PlaceHeads { heads, head_dim, parts } => {
            run.place_heads(*heads, *head_dim, parts);
        }
        Op::PlaceColumns { firsts, columns, groups } => run.place_columns(firsts, *columns, *groups),
        Op::ScaleBy => elementwise::scale_by(run.input_rows(0), run.stored(run.input(1)), run.output_rows(0)),
        Op::ScaleByGrad => {
            let (x, dy, ds) = (run.input_rows(0), run.input_rows(1), run.floats_mut(run.update(0)));
            elementwise::scale_by_grad(x, dy, ds, run.workspace_floats());
        }
        Op::GatherRows => elementwise::gather_rows(run.input_rows(0), run.i32s(1), run.output_rows(0)),
        Op::LmHeadLoss(head) => run.lm_head_loss(head),
        Op::Objective(objective) => run.objective(objective),
        Op::HeadSums(piece) => run.head_sums(piece),
        Op::HeadLoss { row_losses } => run.head_loss(*row_losses),
        Op::HeadGrad { piece, .. } => run.head_grad(piece),
        Op::Logits { lora, softcap, first_word } => run.all_logits(*lora, *softcap, *first_word),
        Op::CacheRows => run.cache_rows(),
        Op::CachedAttention(shape) => run.cached_attention(shape),
        Op::PlaceRows { clear } => run.place_rows(*clear),
        Op::TakeRows => elementwise::take_rows(run.input_rows(0), run.i32s(1), run.output_rows(0)),
        Op::LayerNorm { eps, bias } => run.layer_norm(*eps, *bias),
        Op::LayerNormGrad { eps, addend } => run.layer_norm_grad(*eps, *addend),
        Op::LayerNormWeightGrad { eps } => run.norm_weight_grad(*eps, true),
        Op::Scale { scale } => {
            plain_act::scale(*scale, run.floats(run.input(0)), run.floats_mut(run.output(0)));
        }
        Op::AddBias => plain_act::add_bias(run.input_rows(0), run.stored(run.input(1)), run.output_rows(0)),
        Op::Act(kind) => plain_act::act(*kind, run.floats(run.input(0)), run.floats_mut(run.output(0))),
        Op::ActGrad(kind) => run.act_grad(*kind),
        Op::ChunkAttention(shape) => run.chunk_attention(shape),
        Op::ChunkAttentionGrad(shape) => run.chunk_attention_grad(shape),
        Op::StridedConv(conv) => run.strided_conv(*conv),
        Op::JoinPlaces { places } => audio_conv::join_places(run.input_rows(0), *places, run.output_rows(0)),
        Op::MaskRows { .. } => run.mask_rows(),
        Op::CausalConv { bias, backward } => run.causal_conv(*bias, *backward),
        Op::CausalConvWeightGrad => run.causal_conv_weight_grad(),
        Op::CachedConv { bias } => run.cached_conv(*bias),
        Op::Decay(shape) => run.decay(shape),
        Op::DecayGrad { shape, trains } => run.decay_grad(shape, *trains),
        Op::Scan(shape) => run.scan(shape),
        Op::ScanGrad(shape) => run.scan_grad(shape),
        Op::CachedScan(shape) => run.cached_scan(shape),
        Op::ScatterRows => elementwise::scatter_rows(run.input_rows(0), run.i32s(1), run.output_rows(0)),
        Op::RmsNormGrad { norm, unweighted, addend } => {
            let (channels, weight) = run.norm_weight(norm, *unweighted);
            let rows = |input: usize| run.floats(run.input(input)).rows(channels);
            let dy = 1 + usize::from(unweighted.is_none());
            let addend = addend.then(|| rows(dy + 1));
            let dx = run.floats_mut(run.output(0)).rows(channels);
            norm::rms_norm_grad(rows(0), weight, norm.eps, rows(dy), addend, dx);
        }
        Op::RmsNormWeightGrad { eps } => run.norm_weight_grad(*eps, false),
        Op::LinearGrad { scales } => run.linear_grad(scales),
        Op::WeightGrad { scale } => run.weight_grad(*scale),
        Op::BiasGrad => elementwise::bias_grad(run.input_rows(0), run.floats_mut(run.update(0))),
        Op::MagnitudeGrad => run.magnitude_grad(),
        Op::FourierGrad { scale } => run.fourier_grad(*scale),
        Op::AttentionGrad(shape) => run.attention_grad(shape),
        Op::SinksGrad => run.sinks_grad(),
        Op::GatedActGrad(kind) => {
            let (gate, up, dy) = (run.input_rows(0), run.input_rows(1), run.input_rows(2));
            act::gated_act_grad(*kind, gate, up, dy, run.output_rows(0), run.output_rows(1));
        }
        Op::EmbedGrad { scale, padding } => {
            let (ids, dy, dtable) = (run.i32s(0), run.input_rows(1), run.floats_mut(run.update(0)));
            embed::embed_grad(ids, dy, *scale, *padding, dtable)
        }
        Op::FourierReg { weight } => run.fourier_reg(*weight),
        Op::RowNorms { scale } => run.row_norms(*scale),
        Op::Round { scale, .. } => run.round(*scale),
        Op::RoundFp8 { scaled } => run.round_fp8(*scaled),
        Op::Widen => run.round(1.0),
        Op::RoundAtRandom(place) => run.round_at_random(place),
        Op::SquaredNorm => run.squared_norm(),
        Op::GradNorm { clip, squares } => run.grad_norm(*clip, *squares),
        Op::AdamW(settings) => run.adamw(settings),
        Op::AdamW8(settings) => run.adamw8(settings),
        Op::Zero => run.zero(),
        transfer_ops!() => {
            unreachable!("the device itself runs transfers and collectives")
        }
        Op::Stowed => {}
    }
    Ok(())
}

/// Writes scale·number, rounded to the type of `to`.
fn round_each<T: Copy>(from: StoredVector, scale: f32, to: Dst<T>, round: impl Fn(f32) -> T) {
    for index in 0..from.len() {
        to.set(index, round(scale * from.get(index)));
    }
}

/// A step with the memory that it uses.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    arena: &'a Arena,
    pub(super) step: &'a BoundStep,
    pub(super) extent: &'a Extent,
    pub(super) units: Units,
}

impl Run<'_> {
    pub(super) fn input(&self, index: usize) -> &Operand {
        &self.step.inputs[index]
    }

    pub(super) fn output(&self, index: usize) -> &Operand {
        &self.step.outputs[index]
    }

    pub(super) fn update(&self, index: usize) -> &Operand {
        &self.step.updates[index]
    }

    pub(super) fn rows_of(&self, operand: &Operand) -> usize {
        operand.rows_at(self.extent)
    }

    pub(super) fn address<T>(&self, operand: &Operand) -> *mut T {
        self.arena.pointer(operand.offset, operand.bytes_at(self.extent)).cast()
    }

    /// All elements of an operand of plain `T`.
    pub(super) fn elements<T: Copy>(&self, operand: &Operand) -> Dst<T> {
        debug_assert_eq!(operand.storage.plain().map(DType::bytes), Some(size_of::<T>()));
        // SAFETY: the range is inside the arena and aligned while the step runs; operands overlap only if
        // the operation may work in place on them.
        unsafe { Dst::new(self.address(operand), operand.elements_at(self.extent)) }
    }

    pub(super) fn floats(&self, operand: &Operand) -> Src<f32> {
        self.elements(operand).src()
    }

    pub(super) fn floats_mut(&self, operand: &Operand) -> Dst<f32> {
        self.elements(operand)
    }

    pub(super) fn i32s(&self, input: usize) -> Src<i32> {
        self.elements(self.input(input)).src()
    }

    fn u64s(&self, input: usize) -> Src<u64> {
        self.elements(self.input(input)).src()
    }

    pub(super) fn input_rows(&self, index: usize) -> SrcRows {
        self.floats(self.input(index)).rows(self.input(index).columns)
    }

    pub(super) fn output_rows(&self, index: usize) -> DstRows {
        self.floats_mut(self.output(index)).rows(self.output(index).columns)
    }

    /// Groups are rows of their own.
    fn place_columns(&self, firsts: &[usize], columns: usize, groups: usize) {
        let (y, mut end) = (self.floats_mut(self.output(0)).rows(columns), 0);
        for (part, first) in firsts.iter().enumerate() {
            let x = self.floats(self.input(part)).rows(self.input(part).columns / groups);
            elementwise::place_columns(x, (end, *first), y);
            end = first + x.columns();
        }
        for row in 0..y.rows() {
            y.row(row).part(end, columns - end).fill_zero();
        }
    }

    fn place_heads(&self, heads: usize, head_dim: usize, parts: &[HeadPart]) {
        let (y, mut end) = (self.output_rows(0), 0);
        for (index, part) in parts.iter().enumerate() {
            elementwise::place_heads(self.input_rows(index), part, end, y, heads);
            end = part.to + part.columns;
        }
        for row in (0..y.rows()).filter(|_| end < head_dim) {
            (0..heads).for_each(|head| y.row(row).part(head * head_dim + end, head_dim - end).fill_zero());
        }
    }

    /// The channels of a group, and the weight, which is input 1 unless the norm is unweighted.
    fn norm_weight(&self, norm: &Norm, unweighted: Option<usize>) -> (usize, norm::NormWeight) {
        let weight = unweighted.is_none().then(|| self.stored(self.input(1)));
        let channels = unweighted.unwrap_or_else(|| self.rows_of(self.input(1)));
        (channels, norm::NormWeight { weight, plus_one: norm.plus_one })
    }

    fn norm_weight_grad(&self, eps: f32, centered: bool) {
        let dw = self.floats_mut(self.update(0));
        let rows = |input: usize| self.floats(self.input(input)).rows(dw.len());
        norm::norm_weight_grad(rows(0), eps, centered, rows(1), dw, self.workspace_floats());
    }

    fn embed(&self, scale: f32) {
        embed::embed(self.i32s(0), self.matrix(self.input(1)), scale, self.output_rows(0));
    }

    /// Reads the rows of an embedding table on disk, some at a time.
    fn embed_from_disk(&self, scale: f32, spill: &Spill) -> Result<(), DeviceError> {
        const ROWS_BYTES: usize = 32 << 10;
        let (ids, table, y) = (self.i32s(0), self.input(1), self.output_rows(0));
        let (vocabulary, row_bytes) = (self.rows_of(table), table.storage.bytes(1, table.columns));
        let max_rows = (ROWS_BYTES / row_bytes).max(1);
        let rows_of_buffer: Vec<i32> = (0..max_rows as i32).collect();
        // A buffer of u64, so that its rows are aligned.
        let mut words = vec![0u64; (max_rows * row_bytes).div_ceil(8)];
        for first in (0..ids.len()).step_by(max_rows) {
            let count = max_rows.min(ids.len() - first);
            // SAFETY: the buffer has at least this many bytes, and bytes have no alignment.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), max_rows * row_bytes) };
            for (row, bytes) in bytes.chunks_exact_mut(row_bytes).take(count).enumerate() {
                let id = ids.get(first + row) as usize;
                assert!(id < vocabulary, "id {id} is outside a vocabulary of {vocabulary}");
                spill.file().read(table.offset + id * row_bytes, bytes)?;
            }
            let rows = Stored::dense(words.as_ptr().cast(), table.storage, count, table.columns);
            // SAFETY: `rows_of_buffer` has `count` elements, and y has rows `first..first + count`.
            let (ids, y) = unsafe {
                let target = Dst::new(y.row(first).address(), count * y.columns());
                (Src::new(rows_of_buffer.as_ptr(), count), target.rows(y.columns()))
            };
            embed::embed(ids, rows, scale, y);
        }
        Ok(())
    }

    fn element(operand: &Operand) -> Element {
        match operand.storage {
            Storage::Plain(DType::F32) => Element::F32,
            Storage::Plain(DType::Bf16) => Element::Bf16,
            Storage::Plain(DType::F16) => Element::F16,
            storage => unreachable!("`check` refuses vectors stored as {storage}"),
        }
    }

    /// A plain weight, as stored.
    pub(super) fn stored(&self, operand: &Operand) -> StoredVector {
        // SAFETY: as for `elements`.
        unsafe {
            let pointer: *const u8 = self.address(operand);
            StoredVector::new(pointer, Self::element(operand), operand.elements_at(self.extent))
        }
    }

    /// A matrix as the right operand of a matmul, or as a table of rows.
    pub(super) fn matrix(&self, operand: &Operand) -> Stored {
        let (pointer, rows) = (self.address(operand), self.rows_of(operand));
        match operand.part {
            None => Stored::dense(pointer, operand.storage, rows, operand.columns),
            Some(part) => Stored::dense(pointer, operand.storage, part.total_rows, operand.columns)
                .row_slice(part.first_row, rows),
        }
    }

    /// An activation as the left operand of a matmul.
    fn left(&self, operand: &Operand) -> Left {
        Left { pointer: self.address(operand), row_stride: operand.columns, depth_stride: 1 }
    }

    pub(super) fn matmul_output(&self, operand: &Operand) -> Output {
        Output {
            view: OutputView {
                pointer: self.address(operand),
                row_stride: operand.columns,
                column_stride: 1,
            },
            rows: self.rows_of(operand),
            columns: operand.columns,
        }
    }

    /// The whole workspace.
    pub(super) fn workspace_floats(&self) -> Dst<f32> {
        let (offset, bytes) = self.step.workspace.unwrap_or((0, 0));
        // SAFETY: the plan gives this range to this step alone.
        unsafe { Dst::new(self.arena.pointer(offset, bytes).cast(), bytes / 4) }
    }

    /// The workspace after its first `floats` floats.
    #[expect(clippy::mut_from_ref, reason = "the plan gives the workspace to this step alone")]
    pub(super) fn workspace_from(&self, floats: usize) -> &mut [f32] {
        let (offset, bytes) = self.step.workspace.unwrap_or((0, 0));
        let first = 4 * floats;
        assert!(first <= bytes, "a workspace of {bytes} bytes, of which {first} are in use");
        // SAFETY: the plan gives this range to this step alone, and each step makes one such slice at a
        // time, behind the floats that are in use.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.arena.pointer(offset + first, bytes - first).cast(),
                (bytes - first) / 4,
            )
        }
    }

    pub(super) fn matmul(&self, terms: &[Term], init: Init, output: Output, used_floats: usize) {
        match self.step.precision {
            Precision::F32 => {
                #[cfg(target_arch = "x86_64")]
                if self.units.f32 == F32Unit::Amx && output.columns >= MIN_COLUMNS {
                    // SAFETY: operands are views of planned memory, the output overlaps none of them, and AMX was
                    // detected.
                    return unsafe { split_matmul(terms, init, output, self.workspace_from(used_floats)) };
                }
                self.f32_matmul(terms, init, output, used_floats)
            }
            Precision::F16 | Precision::Fp8 => unreachable!("`check` refuses {}", self.step.precision.name()),
            Precision::Bf16 => {
                let unit = self.units.bf16.expect("`check` refuses bf16 without a unit for it");
                #[cfg(target_arch = "x86_64")]
                // SAFETY: operands are views of planned memory, the output overlaps none of them, and the
                // unit is one that was detected.
                unsafe {
                    bf16_matmul(unit, terms, init, output, self.workspace_from(used_floats))
                }
                #[cfg(not(target_arch = "x86_64"))]
                unreachable!("{} was not detected", unit.name());
            }
        }
    }

    /// A matmul on f32 vectors, at any precision of the plan.
    pub(super) fn f32_matmul(&self, terms: &[Term], init: Init, output: Output, used_floats: usize) {
        // SAFETY: operands are views of planned memory, the output overlaps none of them, and the
        // instruction set is the one detected.
        unsafe {
            let (isa, workspace) = (Isa::detect(), self.workspace_from(used_floats));
            if output.rows <= FEW_ROWS && terms.iter().all(|term| term.right_transposed) {
                row_matmul(isa, terms, init, output, workspace);
            } else {
                matmul(isa, terms, init, output, workspace);
            }
        }
    }

    /// y = x·Wᵀ + bias + scale·h·Bᵀ as one matmul over both terms.
    fn linear(&self, bias: bool, lora: Option<f32>) {
        let weight = self.transposed_term(self.input(0), self.input(1), 1.0);
        let first = 2 + usize::from(bias);
        let adapter = lora.map(|scale| self.transposed_term(self.input(first), self.input(first + 1), scale));
        let (init, used) = if bias {
            let row = self.decoded_vector(self.input(2));
            (Init::Bias(row.address()), aligned_floats(row.len()))
        } else {
            (Init::Overwrite, 0)
        };
        self.adapted_matmul(weight, adapter, init, self.matmul_output(self.output(0)), used);
    }

    /// A matmul of one term, plus the term of an adapter if there is one.
    pub(super) fn adapted_matmul(
        &self,
        term: Term,
        adapter: Option<Term>,
        init: Init,
        output: Output,
        used_floats: usize,
    ) {
        match adapter {
            None => self.matmul(&[term], init, output, used_floats),
            Some(adapter) => self.matmul(&[term, adapter], init, output, used_floats),
        }
    }

    pub(super) fn transposed_term(&self, left: &Operand, right: &Operand, scale: f32) -> Term {
        Term { left: self.left(left), right: self.matrix(right), right_transposed: true, scale }
    }

    pub(super) fn plain_term(&self, left: &Operand, right: &Operand, scale: f32) -> Term {
        Term { left: self.left(left), right: self.matrix(right), right_transposed: false, scale }
    }

    /// A vector as f32, decoded to the start of the workspace.
    pub(super) fn decoded_vector(&self, operand: &Operand) -> Dst<f32> {
        let stored = self.stored(operand);
        let row = self.workspace_floats().part(0, stored.len());
        for index in 0..stored.len() {
            row.set(index, stored.get(index));
        }
        row
    }

    /// The start of the workspace as f64.
    pub(super) fn workspace_doubles(&self, count: usize) -> Dst<f64> {
        let (offset, bytes) = self.step.workspace.unwrap_or((0, 0));
        assert!(8 * count <= bytes, "a workspace of {bytes} bytes for {count} doubles");
        // SAFETY: the plan gives this range to this step alone.
        unsafe { Dst::new(self.arena.pointer(offset, 8 * count).cast(), count) }
    }

    /// dx = Σ scale·d·matrix.
    fn linear_grad(&self, scales: &[f32]) {
        let mut terms = [Term::EMPTY; MAX_TERMS];
        assert!(scales.len() <= MAX_TERMS, "{} terms in one matmul", scales.len());
        for (index, scale) in scales.iter().enumerate() {
            terms[index] = self.plain_term(self.input(2 * index), self.input(2 * index + 1), *scale);
        }
        self.matmul(&terms[..scales.len()], Init::Overwrite, self.matmul_output(self.output(0)), 0);
    }

    /// dW (N, K) += scale·dyᵀ·x.
    fn weight_grad(&self, scale: f32) {
        let (dy, x) = (self.input(0), self.input(1));
        self.accumulate_outer(
            self.factor(dy, 0),
            self.factor(x, 0),
            self.rows_of(dy),
            scale,
            self.update(0),
            0,
        );
    }

    /// An activation from `row` on as a factor of [`Self::accumulate_outer`].
    pub(super) fn factor(&self, operand: &Operand, row: usize) -> Factor {
        Factor { pointer: self.row_address(operand, row), columns: operand.columns, stride: operand.columns }
    }

    /// Adds scale·leftᵀ·right over `rows` rows to `gradient`. In gradients of LoRA factors one side has only R columns.
    /// In f32 that side is packed; in bf16, where both sides are packed, the wide side is packed without transposing it.
    pub(super) fn accumulate_outer(
        &self,
        left: Factor,
        right: Factor,
        rows: usize,
        scale: f32,
        gradient: &Operand,
        used_floats: usize,
    ) {
        self.accumulate_outer_at(left, right, rows, scale, self.address(gradient), used_floats);
    }

    /// As [`Self::accumulate_outer`], for a gradient that begins at an address.
    pub(super) fn accumulate_outer_at(
        &self,
        left: Factor,
        right: Factor,
        rows: usize,
        scale: f32,
        pointer: *mut f32,
        used_floats: usize,
    ) {
        let (n, k) = (left.columns, right.columns);
        let plain = OutputView { pointer, row_stride: k, column_stride: 1 };
        let transposed = OutputView { pointer, row_stride: 1, column_stride: k };
        let keep_order = match self.step.precision {
            Precision::F32 => k <= n,
            Precision::Bf16 | Precision::F16 | Precision::Fp8 => n <= k,
        };
        let (first, second, view) = if keep_order { (left, right, plain) } else { (right, left, transposed) };
        let term = Term {
            left: Left { pointer: first.pointer, row_stride: 1, depth_stride: first.stride },
            right: Stored {
                row_stride: second.stride,
                ..Stored::dense_f32(second.pointer, rows, second.columns)
            },
            right_transposed: false,
            scale,
        };
        let output = Output { view, rows: first.columns, columns: second.columns };
        self.matmul(&[term], Init::Accumulate, output, used_floats);
    }

    /// A matrix times `scale`, rounded to another type.
    fn round(&self, scale: f32) {
        let to = self.step.outputs.first().unwrap_or_else(|| self.update(0));
        let from = self.stored(self.input(0));
        match Self::element(to) {
            Element::F32 => round_each(from, scale, self.elements(to), |number| number),
            Element::Bf16 => round_each(from, scale, self.elements(to), f32_to_bf16),
            Element::F16 => round_each(from, scale, self.elements(to), f32_to_f16),
        }
    }

    fn round_fp8(&self, scaled: bool) {
        // SAFETY: as for `elements`; bytes have no alignment.
        let bytes = |operand: &Operand| unsafe {
            Dst::<u8>::new(self.address(operand), operand.bytes_at(self.extent))
        };
        let factors = scaled.then(|| {
            let (weight, rows) = (self.input(1), self.rows_of(self.input(1)));
            let (first, total) = weight.part.map_or((0, rows), |part| (part.first_row, part.total_rows));
            bytes(weight).src().part(row_scales(total, weight.columns) + 4 * first, 4 * rows)
        });
        round_fp8(self.input_rows(0), factors, bytes(self.output(0)));
    }

    fn zero(&self) {
        let operand = self.update(0);
        let bytes = operand.bytes_at(self.extent);
        // SAFETY: as for `elements`; f64 state is a whole number of floats.
        elementwise::zero(unsafe { Dst::new(self.address(operand), bytes / 4) });
    }

    pub(super) fn row_address(&self, operand: &Operand, row: usize) -> *mut f32 {
        self.floats_mut(operand).part(row * operand.columns, 0).address()
    }
}

/// Rows of activations as one side of a weight gradient.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub pointer: *const f32,
    pub columns: usize,
    /// Floats between two rows.
    pub stride: usize,
}

/// Maximum terms of one matmul: more than q, k, v, gate and up with their adapters.
pub(super) const MAX_TERMS: usize = 16;
