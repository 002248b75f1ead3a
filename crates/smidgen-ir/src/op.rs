//! The op table: one row per operation, each coarse enough that one excellent kernel can compute it.
//!
//! An operation reads `inputs`, writes `outputs`, and adds to or replaces `updates` (leaves such as gradients and
//! moments). The comment above a row names the three lists in this order; `[..]` marks operands that exist only for some
//! attributes. Backward operations are operations too. `op_table.rs` explains the columns and generates the enum [`Op`]
//! and one method per column; shape rules are in `op_shapes.rs`, scratch memory in `workspace.rs`.
//!
//! Dimension letters: T tokens, S supervised rows, C/K/N channels, V vocabulary, R rank, H heads, D head size,
//! M adapted modules; in a KV cache N rows, L slots of P positions each. A rows of audio. `rows` is T, S or a multiple
//! of A.

use crate::audio_rows::{PlainActivation, StridedConv};
use crate::cost::{Cost, Operands};
use crate::loss_head::{HeadPiece, LossHead};
use crate::op_attributes::{Activation, AdamW, AttentionShape, Norm, RandomPlace};
use crate::op_table::{Batching, BoundBy, column, op_table};
use crate::rank::{Rank, Shard};
use crate::rope::RopeSpec;
use crate::storage::DType;
use thiserror::Error;

op_table! {
    // ── forward ────────────────────────────────────────────────────────────────────────────────

    /// ids (T), table (V, C) → (T, C) as `element`: rows of the table times `scale`; the gradient leaves out row `padding`
    Embed { scale: f32, element: DType, padding: Option<u32> } => {
        name: "embed",
        decodes: |input| input == 1,
        reads_offloaded: |input| input == 1,
        // Only the rows that are looked up are read, not the whole table.
        cost: |step| Cost::moving(2 * step.output_bytes(0)),
        text: scale_text(*scale),
    }
    /// x (rows, C), `[weight (D)]` → (rows, C): x / rms(x) · weight, over each group of D channels separately
    /// (D = C for the norm of a layer, the head size for norms of queries and keys). With `unweighted`, which is D, there
    /// is no weight.
    RmsNorm { norm: Norm, unweighted: Option<usize> } => {
        name: "rms_norm",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
        rounds: true,
        text: norm_text(norm, *unweighted),
    }
    /// x (T, C), keys (T) → (T, C): elements zeroed with probability `p` by a hash of (key, stream, channel), the
    /// others divided by 1 - p; with `rest`, x minus that. Its gradient is the same operation.
    Dropout { p: f32, stream: u32, rest: bool } => {
        name: "dropout",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
        text: format!("p={p} stream={stream}{}", if *rest { " rest" } else { "" }),
    }
    /// x (rows, K), weight (N, K), `[bias (N)]`, `[h (rows, R), b (N, R)]` → (rows, N):
    /// x·weightᵀ + bias + lora·h·bᵀ
    Linear { bias: bool, lora: Option<f32> } => {
        name: "linear",
        token_local: true,
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            let b = lora.map(|_| 3 + usize::from(*bias));
            step.traffic() + step.matmul(1) + step.matmul_flops(b)
        },
        text: lora.map(|scale| format!("lora={scale}")).unwrap_or_default(),
    }
    /// z (rows, N), magnitude (N), norm (N), `[bias (N)]` → (rows, N): z·magnitude/norm + bias, DoRA's gain
    ScaleColumns { bias: bool } => {
        name: "scale_columns",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
    }
    /// base (rows, N), h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1) → (rows, N): base + φ(scale·h·bᵀ),
    /// φ(z) = a0 + a1·u + a2·sin(πu) + a3·cos(πu) with u = tanh(z / (|sigma| + 1e-6)), LS-LoRA
    Fourier { scale: f32 } => {
        name: "fourier",
        token_local: true,
        in_place: &[(0, 0)],
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.matmul_flops(Some(2)),
        text: format!("scale={scale}"),
    }
    /// positions (T), `[boundaries (G+1) or lengths (T)]` → (T, dim): cosines, then sines. The second input exists if the
    /// frequencies depend on the sequence length: segment boundaries, or one length per token
    RopeTable(rope: RopeSpec) => {
        name: "rope_table",
        text: rope.to_string(),
    }
    /// x (T, H·D), table (T, dim) → (T, H·D): the first dim channels of each head rotated. Channel i is paired with
    /// channel dim/2 + i; if `interleaved`, channel 2i with 2i + 1.
    Rope { heads: usize, inverse: bool, interleaved: bool } => {
        name: "rope",
        in_place: &[(0, 0)],
        text: {
            let (pairs, direction) = (["", " interleaved"], ["", " inverse"]);
            format!("heads={heads}{}{}", pairs[usize::from(*interleaved)], direction[usize::from(*inverse)])
        },
    }
    /// q (T, H·D), k (T, Hkv·D), v (T, Hkv·D), boundaries (G+1), `[sinks (H)]` → o (T, H·D), lse (T, H)
    Attention(shape: AttentionShape) => {
        name: "attention",
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }
    /// gate (T, G), up (T, C) → (T, C): act(gate)·up. C is a multiple of G: a gate is that of C/G neighbouring channels, a
    /// single one or those of a head.
    GatedAct(activation: Activation) => {
        name: "gated_act",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0), (0, 1)],
        rounds: true,
        feed_forward: true,
        text: format!("{activation:?}"),
    }
    /// a, b → a + scale·b
    Add { scale: f32 } => {
        name: "add",
        token_local: true,
        // Input 1 is what a block adds to the residual. Writing the sum over it leaves the residual in place, so a device
        // can always fuse this sum with the matmul before it.
        in_place: &[(0, 1), (0, 0)],
        text: scale_text(*scale),
    }
    /// x (rows, C), s (1) → s·x
    ScaleBy => {
        name: "scale_by",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
    }
    /// x (rows, C) → (rows, columns): columns `first` to `first + columns` of x
    SliceColumns { first: usize, columns: usize } => {
        name: "slice_columns",
        cheap: true,
        token_local: true,
        cost: |step| Cost::moving(2 * step.output_bytes(0)),
        text: format!("{first}+{columns}"),
    }
    /// x (T, C), rows (S) → (S, C)
    GatherRows => {
        name: "gather_rows",
    }
    /// x (S, C), head (V, C), labels (S), weight (1), `[h (S, R), b (V, R)]` →
    /// `[dx (S, C)]`, `[dh (S, R)]`; updates loss (1), `[db]`, `[dhead]`:
    /// adds weight·Σ NLL to the loss. The gradients are computed in the same pass, while a chunk of logits exists.
    LmHeadLoss(head: LossHead) => {
        name: "lm_head_loss",
        decodes: |input| input == 1,
        head: true,
        loss: true,
        bound_by: BoundBy::Matmul,
        cost: |step| head.cost(step),
        text: head.to_string(),
    }
    /// x (S, C), rows of the head (N, C), labels (S), `[sums (S, 3) of the pieces before]` → sums (S, 3), f32:
    /// the largest logit so far, the sum of exp(logit - largest), and the label's logit, which is NaN before the piece
    /// that contains the label
    HeadSums(piece: HeadPiece) => {
        name: "head_sums",
        in_place: if piece.continues { &[(0, 3)] } else { &[] },
        decodes: |input| input == 1,
        head: true,
        loss: true,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.chunked_matmul(1, piece.chunk, 1),
        text: piece.to_string(),
    }
    /// sums (S, 3) of all pieces, weight (1) → ; updates loss (1), `[losses (S)]`, as for `LmHeadLoss`
    HeadLoss { row_losses: bool } => {
        name: "head_loss",
        loss: true,
        text: if *row_losses { "rows".into() } else { String::new() },
    }
    /// x (S, C), head (N, C), `[h (S, R), b (N, R)]` → ; updates logits (S, V): writes the N columns that start at
    /// `first_word`, which are all columns if the head is whole
    Logits { lora: Option<f32>, softcap: Option<f32>, first_word: usize } => {
        name: "logits",
        decodes: |input| input == 1,
        head: true,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            // Only these columns of the logits are read and written.
            let columns_bytes = 8 * step.rows(0) * step.rows(1);
            Cost::moving(step.inputs_bytes() + columns_bytes)
                + step.matmul(1)
                + step.matmul_flops(lora.map(|_| 3))
        },
        text: {
            let first = (*first_word > 0).then(|| format!("from={first_word}"));
            let cap = softcap.map(|cap| format!("cap={cap}"));
            first.into_iter().chain(cap).collect::<Vec<_>>().join(" ")
        },
    }
    /// k (T, C), v (T, C), table (L, P), slots (T), positions (T) → ; updates keys (N, C), values (N, C):
    /// writes k and v of each token to row `table[slot, position]` of the two caches
    CacheRows => {
        name: "cache_rows",
        // Only the rows of the new tokens are written, not the whole caches.
        cost: |step| Cost::moving(2 * (step.input_bytes(0) + step.input_bytes(1))),
    }
    /// q (T, H·D), keys (N, Hkv·D), values (N, Hkv·D), table (L, P), slots (T), positions (T), `[sinks (H)]` → o (T, H·D):
    /// attention over the cached rows of the query's slot, at positions up to its own
    CachedAttention(shape: AttentionShape) => {
        name: "cached_attention",
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }

    // ── audio, forward ─────────────────────────────────────────────────────────────────────────

    /// x (T, C), rows (A), `[y (A, C)]` → (T, C): x with row `rows[a]` replaced by row a of y, or by zeros if there is no
    /// y. Row a is skipped if `rows[a]` is negative.
    PlaceRows { clear: bool } => {
        name: "place_rows",
        in_place: &[(0, 0)],
        text: if *clear { "clear".into() } else { String::new() },
    }
    /// x (rows, C), weight (C), `[bias (C)]` → (rows, C): (x - mean) / deviation · weight + bias
    LayerNorm { eps: f32, bias: bool } => {
        name: "layer_norm",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
        text: format!("eps={eps}"),
    }
    /// x (rows, C) → scale·x. Its gradient is the same operation.
    Scale { scale: f32 } => {
        name: "scale",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
        text: scale_text(*scale),
    }
    /// x (rows, C), bias (C) → x + bias
    AddBias => {
        name: "add_bias",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
    }
    /// x (rows, C) → act(x)
    Act(kind: PlainActivation) => {
        name: "act",
        cheap: true,
        token_local: true,
        in_place: &[(0, 0)],
        text: format!("{kind:?}"),
    }
    /// x (A, C), marks (A, 4), weight (C, K), bias (C) → (A, C): a depthwise convolution over the K rows that end with the
    /// row itself, within a chunk; or, without a bias, its gradient with respect to x
    CausalConv { backward: bool } => {
        name: "causal_conv",
        text: if *backward { "backward".into() } else { String::new() },
    }
    /// q (A, H·D), k (A, H·D), v (A, H·D), marks (A, 4), bias (2·M, H) → o (A, H·D), lse (A, H): attention to all rows of
    /// a chunk, with `bias[clamp(key - query, -M, M - 1) + M, head]` added to the scores
    ChunkAttention(shape: AttentionShape) => {
        name: "chunk_attention",
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }
    /// x (2f·A, 2b) or (2f·2b·A, C), marks (A, 4), weight (C, 9), bias (C) → (f·b·A, C): a 3 x 3 convolution with a stride
    /// of 2 over the mel frames of a clip and their bins; x has one channel, or C channels with their own weights each
    StridedConv(conv: StridedConv) => {
        name: "strided_conv",
        text: conv.to_string(),
    }
    /// x (b·A, C) → (A, C·b): concatenates the b places of each row, channel by channel
    JoinPlaces { places: usize } => {
        name: "join_places",
        text: format!("places={places}"),
    }
    /// x (A, C), marks (A, 4) → (A, C): x with zeros in the rows that only pad a chunk; or, if it is `stored` for the host,
    /// → ; updates y (A, C) := the same in f32
    MaskRows { stored: bool } => {
        name: "mask_rows",
        in_place: if *stored { &[] } else { &[(0, 0)] },
        text: if *stored { "stored".into() } else { String::new() },
    }

    // ── audio, backward ────────────────────────────────────────────────────────────────────────

    /// x (T, C), rows (A) → (A, C): row `rows[a]` of x, or zeros if `rows[a]` is negative
    TakeRows => {
        name: "take_rows",
    }
    /// x (rows, C), weight (C), dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    LayerNormGrad { eps: f32, addend: bool } => {
        name: "layer_norm_grad",
        token_local: true,
        in_place: if *addend { &[(0, 3), (0, 2), (0, 0)] } else { &[(0, 2), (0, 0)] },
        text: format!("eps={eps}"),
    }
    /// x (rows, C), dy (rows, C) → ; updates dweight (C)
    LayerNormWeightGrad { eps: f32 } => {
        name: "layer_norm_weight_grad",
        token_local: true,
        text: format!("eps={eps}"),
    }
    /// x (rows, C), dy (rows, C) → dx
    ActGrad(kind: PlainActivation) => {
        name: "act_grad",
        token_local: true,
        in_place: &[(0, 1), (0, 0)],
        text: format!("{kind:?}"),
    }
    /// q, k, v, o, lse, do, marks, bias → dq, dk, dv
    ChunkAttentionGrad(shape: AttentionShape) => {
        name: "chunk_attention_grad",
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(5, shape.window),
        text: shape.to_string(),
    }

    // ── backward ───────────────────────────────────────────────────────────────────────────────

    /// x (S, C), rows of the head (N, C), labels (S), weight (1), sums (S, 3) of all pieces, `[dx (S, C) of the pieces
    /// before, f32]` → dx (S, C): in f32, except that the piece that `ends` it rounds it to the element type of x
    HeadGrad { piece: HeadPiece, ends: bool } => {
        name: "head_grad",
        in_place: if piece.continues { &[(0, 5)] } else { &[] },
        decodes: |input| input == 1,
        head: true,
        loss: true,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.chunked_matmul(1, piece.chunk, 2),
        text: piece.to_string(),
    }
    /// d (S, C), rows (S) → (T, C), zero in all other rows
    ScatterRows => {
        name: "scatter_rows",
    }
    /// x (rows, C), `[weight (D)]`, dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    RmsNormGrad { norm: Norm, unweighted: Option<usize>, addend: bool } => {
        name: "rms_norm_grad",
        token_local: true,
        in_place: match (*addend, unweighted) {
            (true, None) => &[(0, 3), (0, 2), (0, 0)],
            (false, None) => &[(0, 2), (0, 0)],
            (true, Some(_)) => &[(0, 2), (0, 1), (0, 0)],
            (false, Some(_)) => &[(0, 1), (0, 0)],
        },
        rounds: true,
        text: norm_text(norm, *unweighted),
    }
    /// x (rows, C), dy (rows, C) → ; updates dweight (D)
    RmsNormWeightGrad { eps: f32 } => {
        name: "rms_norm_weight_grad",
        token_local: true,
        text: format!("eps={eps}"),
    }
    /// (d_i (rows, N_i), matrix_i (N_i, K)) … → (rows, K): Σ scale_i · d_i·matrix_i
    LinearGrad { scales: Vec<f32> } => {
        name: "linear_grad",
        token_local: true,
        decodes: |input| input % 2 == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            let matrices = (1..step.inputs.len()).step_by(2);
            step.traffic() + matrices.map(|matrix| step.matmul(matrix)).sum()
        },
        text: if scales.iter().any(|scale| *scale != 1.0) { format!("scales={scales:?}") } else { String::new() },
    }
    /// dy (rows, N), x (rows, K) → ; updates dweight (N, K) by scale·dyᵀ·x
    WeightGrad { scale: f32 } => {
        name: "weight_grad",
        token_local: true,
        bound_by: BoundBy::OuterProduct,
        cost: |step| step.traffic() + step.outer_product(0, 1),
        text: scale_text(*scale),
    }
    /// x (rows, C), dy (rows, C) → ; updates ds (1) by Σ dy·x
    ScaleByGrad => {
        name: "scale_by_grad",
        token_local: true,
    }
    /// dy (rows, N) → ; updates dbias (N)
    BiasGrad => {
        name: "bias_grad",
        token_local: true,
    }
    /// dy (rows, N), z (rows, N), norm (N) → ; updates dmagnitude (N) by Σ dy·z / norm
    MagnitudeGrad => {
        name: "magnitude_grad",
        token_local: true,
    }
    /// h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1), dy (rows, N) → dz (rows, N), the gradient with
    /// respect to scale·h·bᵀ; updates dcoefficients (1, 4), dsigma (1, 1)
    FourierGrad { scale: f32 } => {
        name: "fourier_grad",
        token_local: true,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.matmul_flops(Some(1)),
        text: format!("scale={scale}"),
    }
    /// q, k, v, o, lse, do, boundaries → dq, dk, dv
    AttentionGrad(shape: AttentionShape) => {
        name: "attention_grad",
        bound_by: BoundBy::Attention,
        // One matmul recomputes the scores, four form gradients.
        cost: |step| step.traffic() + step.attention(5, shape.window),
        text: shape.to_string(),
    }
    /// o (T, H·D), lse (T, H), do (T, H·D), sinks (H) → ; updates dsinks (H)
    SinksGrad => {
        name: "sinks_grad",
    }
    /// d_i (rows, P_i) … → (rows, columns): part i in the columns from `firsts[i]` on, and zeros between parts
    PlaceColumns { firsts: Vec<usize>, columns: usize } => {
        name: "place_columns",
        token_local: true,
        text: format!("{firsts:?} of {columns}"),
    }
    /// gate, up, dy → dgate, dup
    GatedActGrad(activation: Activation) => {
        name: "gated_act_grad",
        token_local: true,
        in_place: &[(0, 0), (1, 1), (0, 2), (1, 2)],
        rounds: true,
        feed_forward: true,
        text: format!("{activation:?}"),
    }
    /// ids (T), dy (T, C) → ; updates dtable (V, C) in all rows but `padding`
    EmbedGrad { scale: f32, padding: Option<u32> } => {
        name: "embed_grad",
        // Only the rows of these tokens are read and written.
        cost: |step| Cost::moving(3 * step.input_bytes(1)),
        text: match padding {
            None => scale_text(*scale),
            Some(row) => format!("{} padding={row}", scale_text(*scale)).trim_start().to_string(),
        },
    }

    // ── update and refresh ─────────────────────────────────────────────────────────────────────

    /// coefficients (M, 4), hyper (3) → ; updates loss (1) := weight · Σ (a - (0, 1, 0, 0))², and dcoefficients (M, 4) by
    /// the gradient times the loss scale
    FourierReg { weight: f64 } => {
        name: "fourier_reg",
        text: format!("weight={weight}"),
    }
    /// weight (N, K), a (R, K), b (N, R) → ; updates norms (N) := norms of the rows of weight + scale·b·a
    RowNorms { scale: f32 } => {
        name: "row_norms",
        decodes: |input| input == 0,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.decoding(0) + step.matmul_flops(Some(1)),
        text: format!("scale={scale}"),
    }
    /// weight (N, K) → ; updates rounded (N, K) := scale·weight; or, with `to`, → scale·weight in that type
    Round { scale: f32, to: Option<DType> } => {
        name: "round",
        batching: Batching::AnyAttributes,
        text: scale_text(*scale),
    }
    /// x (rows, N), `[weight (N, K) in fp8]` → (rows, N) in fp8, with a scale for each row; with a weight, column j is first
    /// multiplied by the scale of the weight's row j
    RoundFp8 { scaled: bool } => {
        name: "round_fp8",
        cheap: true,
        token_local: true,
        decodes: |input| input == 1,
        cost: |step| Cost::moving(step.input_bytes(0) + step.output_bytes(0)),
        text: if *scaled { "scaled".into() } else { String::new() },
    }
    /// weight (N, K) in bf16 → the same in f32
    Widen => {
        name: "widen",
    }
    /// wide (N, K) in f32, hyper (3) → ; updates weight (N, K) := wide in bf16, rounded up or down at random so that errors
    /// average out. The random bits depend only on the optimizer step and the position of an element.
    RoundAtRandom(place: RandomPlace) => {
        name: "round_at_random",
        text: place.to_string(),
    }
    /// parts of gradients … → ; updates squares (1) := the sum of the squares of all their elements, tensor by tensor
    SquaredNorm => {
        name: "squared_norm",
    }
    /// loss (1), hyper (3), gradients …, `[squares (M) of other gradients]` → ; updates report (4): loss and norm over all
    /// gradients, both without the loss scale; the factor that removes the loss scale from gradients and clips their norm
    /// to `clip` (0 = never); 1 if loss and norm are finite. Squares are added up tensor by tensor, in this order.
    GradNorm { clip: f32, squares: bool } => {
        name: "grad_norm",
        text: format!("clip={clip}"),
    }
    /// gradient, report (4), hyper (3): learning rate, step and loss scale → ; updates parameter, first and second
    /// moment, and activity (1, 3): the largest gradient after clipping and the largest parameter of all updates so
    /// far, 1 once an element has moved. Does nothing when the report is not finite.
    AdamW(settings: AdamW) => {
        name: "adamw",
        batching: Batching::EqualAttributes,
        text: settings.to_string(),
    }
    /// As `AdamW`, with moments in [`crate::Storage::Dynamic8`], the first one signed. Decay comes after the step.
    AdamW8(settings: AdamW) => {
        name: "adamw_8bit",
        batching: Batching::EqualAttributes,
        text: settings.to_string(),
    }
    /// As `AdamW` or `AdamW8`, depending on the storage of the moments, but computed on the host with all operands in host
    /// memory. Only starts the update; a step that touches an operand waits for it, also in the next entry point.
    AdamWOnHost(settings: AdamW) => {
        name: "adamw_on_host",
        reads_offloaded: |_| true,
        transfer: true,
        text: settings.to_string(),
    }
    /// → ; updates value := 0
    Zero => {
        name: "zero",
        batching: Batching::EqualAttributes,
    }

    // ── between memory spaces ──────────────────────────────────────────────────────────────────

    /// offloaded or carried x → its copy on the device. Only starts the copy; the first step that reads it waits.
    Fetch => {
        name: "fetch",
        reads_offloaded: |input| input == 0,
        transfer: true,
        cost: |step| Cost::moving(step.input_bytes(0)),
    }
    /// x → its copy in host memory or on disk, or updates an offloaded or carried value. Only starts the copy; x must
    /// not change until `Stowed`.
    Stow => {
        name: "stow",
        transfer: true,
        cost: |step| Cost::moving(step.input_bytes(0)),
    }
    /// x and its offloaded copy, or the value it was scattered into → . Waits for that transfer; then the memory of x is free.
    Stowed => {
        name: "stowed",
        reads_offloaded: |input| input == 1,
        cost: |_| Cost::moving(0),
    }

    // ── between ranks ──────────────────────────────────────────────────────────────────────────

    /// → ; updates values …: each becomes its sum over all ranks. Only starts the exchange; in `micro_step` it runs only
    /// with the last micro-batch of a step.
    AllReduce(rank: Rank) => {
        name: "all_reduce",
        transfer: true,
        collective: true,
        cost: |step| Cost::moving(2 * others_share(*rank, step.updates_bytes())),
        text: rank_text(*rank),
    }
    /// x … → ; updates parts …: adds to each part this rank's rows of the sum of x over all ranks. A part that is a slice
    /// of x itself becomes these rows of the sum.
    ReduceScatter(rank: Rank) => {
        name: "reduce_scatter",
        transfer: true,
        collective: true,
        cost: |step| Cost::moving(others_share(*rank, step.inputs_bytes())),
        text: rank_text(*rank),
    }
    /// a divided x → the whole x; a divided x that is offloaded comes with a fetched copy of this rank's rows, whose type
    /// the whole has. Or, without an input, updates values …: each rank has changed its own rows and receives the other
    /// rows from their ranks. Only starts the exchange.
    AllGather(shard: Shard) => {
        name: "all_gather",
        reads_offloaded: |input| input == 0,
        transfer: true,
        collective: true,
        cost: |step| Cost::moving(others_share(shard.rank, step.outputs_bytes() + step.updates_bytes())),
        text: rank_text(shard.rank),
    }
}

impl Op {
    /// Whether a device may launch this together with `before`, which is the same operation on other tensors.
    pub fn joins(&self, before: &Op) -> bool {
        match self.batching() {
            Batching::Alone => false,
            Batching::EqualAttributes => self == before,
            Batching::AnyAttributes => std::mem::discriminant(self) == std::mem::discriminant(before),
        }
    }
}

/// Bytes that a rank receives when it gathers a value of which every rank has an equal part.
fn others_share(rank: Rank, bytes: usize) -> usize {
    bytes / rank.of * (rank.of - 1)
}

fn rank_text(rank: Rank) -> String {
    format!("ranks={}", rank.of)
}

/// A norm in text forms.
fn norm_text(norm: &Norm, unweighted: Option<usize>) -> String {
    let groups = unweighted.map(|channels| format!(" groups={channels} unweighted"));
    format!("{norm}{}", groups.unwrap_or_default())
}

/// A factor in text forms; empty if it is 1.
fn scale_text(scale: f32) -> String {
    if scale == 1.0 { String::new() } else { format!("scale={scale}") }
}

/// A node whose operands do not fit its operation: always a bug of the stage that built it.
#[derive(Debug, Error, PartialEq)]
#[error("`{op}`: {what}")]
pub struct ShapeError {
    pub op: &'static str,
    pub what: String,
}
