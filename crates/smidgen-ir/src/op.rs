//! The op table: one row per operation, each coarse enough that one excellent kernel can compute it.
//!
//! An operation reads `inputs`, writes `outputs`, and adds to or replaces `updates` (leaves such as gradients and
//! moments). The comment above a row names the three lists in this order; `[..]` marks operands that exist only for some
//! attributes. Backward operations are operations too. `op_table.rs` explains sections and columns.
//!
//! Dimension letters: T tokens, S supervised rows, C/K/N channels, V vocabulary, R rank, H heads, D head size,
//! M adapted modules; in a KV cache N rows, L slots of P positions each. A rows of audio. E experts, of which a token
//! chooses J. `rows` is T, J·T, S or a multiple of A.

use crate::audio_rows::{PlainActivation, StridedConv};
use crate::cost::{Cost, Operands, others_share};
use crate::expert_attributes::{ExpertRows, Router, expert_rows_text};
use crate::loss_head::{HeadPiece, LossHead};
use crate::objective::Objective;
use crate::op_attributes::{
    Activation, AdamW, AttentionShape, HeadPart, Norm, RandomPlace, embed_grad_text, flag_text, groups_text,
    logits_text, norm_grad_in_place, norm_text, rank_text, scale_text,
};
use crate::op_shapes::{MOMENTS_IN_8_BITS, Rule, ShapeError};
use crate::op_table::{Batching, BoundBy, Fusion, Property, Route, column, op_pattern, op_table};
use crate::rank::{Rank, Shard};
use crate::recurrence::{DecayShape, ScanShape};
use crate::rope::RopeSpec;
use crate::shape::{Extent, Type};
use crate::storage::{DType, Storage};
use crate::workspace::{StepInputs, Target};

op_table! { forward {
    /// ids (T), table (V, C) → (T, C) as `element`: rows of the table times `scale`; the gradient leaves out row `padding`
    Embed { scale: f32, element: DType, padding: Option<u32> } => {
        name: "embed",
        shape: |rule| rule.embed(*element),
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
        shape: |rule| rule.rms_norm(*unweighted),
        is: &[Cheap, TokenLocal, Rounds],
        in_place: &[(0, 0)],
        text: norm_text(norm, *unweighted),
    }
    /// x (T, C), keys (T) → (T, C): elements zeroed with probability `p` by a hash of (key, stream, channel), the
    /// others divided by 1 - p; with `rest`, x minus that. Its gradient is the same operation.
    Dropout { p: f32, stream: u32, rest: bool } => {
        name: "dropout",
        shape: |rule| rule.dropout(),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
        text: format!("p={p} stream={stream}{}", flag_text(*rest, " rest")),
    }
    /// x (rows, K), weight (N, K), `[bias (N)]`, `[h (rows, R), b (N, R)]` → (rows, N):
    /// x·weightᵀ + bias + lora·h·bᵀ
    Linear { bias: bool, lora: Option<f32> } => {
        name: "linear",
        shape: |rule| rule.linear(*bias, lora.is_some()),
        scratch: |step| step.linear(*bias, lora.is_some()),
        is: &[TokenLocal],
        decodes: |input| input == 1,
        terms: 1,
        begins: Fusion::Sum,
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
        shape: |rule| rule.scale_columns(*bias),
        scratch: |step| step.scale_columns(*bias),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
    }
    /// base (rows, N), h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1) → (rows, N): base + φ(scale·h·bᵀ),
    /// φ(z) = a0 + a1·u + a2·sin(πu) + a3·cos(πu) with u = tanh(z / (|sigma| + 1e-6)), LS-LoRA
    Fourier { scale: f32 } => {
        name: "fourier",
        shape: |rule| rule.fourier(),
        scratch: |step| step.fourier(),
        is: &[TokenLocal],
        in_place: &[(0, 0)],
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.matmul_flops(Some(2)),
        text: format!("scale={scale}"),
    }
    /// positions (T), `[boundaries (G+1) or lengths (T)]` → (T, dim): cosines, then sines. The second input exists if the
    /// frequencies depend on the sequence length: segment boundaries, or one length per token
    RopeTable(rope: RopeSpec) => {
        name: "rope_table",
        shape: |rule| rule.rope_table(rope),
        text: rope.to_string(),
    }
    /// x (T, H·D), table (T, dim) → (T, H·D): the first dim channels of each head rotated. Channel i is paired with
    /// channel dim/2 + i; if `interleaved`, channel 2i with 2i + 1.
    Rope { heads: usize, inverse: bool, interleaved: bool } => {
        name: "rope",
        shape: |rule| rule.rope(*heads),
        in_place: &[(0, 0)],
        text: format!("heads={heads}{}{}", flag_text(*interleaved, " interleaved"), flag_text(*inverse, " inverse")),
    }
    /// q (T, H·D), k (T, Hkv·D), v (T, Hkv·D), boundaries (G+1), `[sinks (H)]` → o (T, H·D), lse (T, H)
    Attention(shape: AttentionShape) => {
        name: "attention",
        shape: |rule| rule.attention(shape),
        scratch: |step| step.attention(shape, false),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }
    /// gate (T, G), up (T, C) → (T, C): act(gate)·up. C is a multiple of G: a gate is that of C/G neighbouring channels, a
    /// single one or those of a head.
    GatedAct(activation: Activation) => {
        name: "gated_act",
        shape: |rule| rule.gated_act(),
        is: &[Cheap, TokenLocal, Rounds, FeedForward],
        in_place: &[(0, 0), (0, 1)],
        text: format!("{activation:?}"),
    }
    /// a, b → a + scale·b
    Add { scale: f32 } => {
        name: "add",
        shape: |rule| rule.add(),
        is: &[TokenLocal],
        // Input 1 is what a block adds to the residual. Writing the sum over it leaves the residual in place, so a device
        // can always fuse this sum with the matmul before it.
        in_place: &[(0, 1), (0, 0)],
        ends: Fusion::Sum,
        text: scale_text(*scale),
    }
    /// x (rows, C), s (N) → s·x; each number is that of C/N neighbouring channels
    ScaleBy => {
        name: "scale_by",
        shape: |rule| rule.scale_by(),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
    }
    /// x (rows, C) → (rows, groups·columns): columns `first` to `first + columns` of each of `groups` equal parts of x
    SliceColumns { first: usize, columns: usize, groups: usize } => {
        name: "slice_columns",
        shape: |rule| rule.slice_columns(*first, *columns, *groups),
        is: &[Cheap, TokenLocal],
        cost: |step| Cost::moving(2 * step.output_bytes(0)),
        text: format!("{first}+{columns}{}", groups_text(*groups)),
    }
    /// x_i (rows, C_i) … → (rows, heads·head_dim): columns of the heads of each x, placed in every head of the result, whose
    /// other columns are zero. An x has as many heads as the result; or one, which is placed in all of them; or, if the
    /// result is one head, any number, whose sum is placed. The gradient of each x is the same operation.
    PlaceHeads { heads: usize, head_dim: usize, parts: Vec<HeadPart> } => {
        name: "place_heads",
        shape: |rule| rule.place_heads(*heads, *head_dim, parts),
        is: &[Cheap, TokenLocal],
        text: format!("{heads}x{head_dim}: {}", parts.iter().map(HeadPart::to_string).collect::<Vec<_>>().join(", ")),
    }
    /// x (T, C), rows (S) → (S, C)
    GatherRows => {
        name: "gather_rows",
        shape: |rule| rule.gather_rows(),
    }
    /// x (S, C), head (V, C), labels (S), weight (1), `[h (S, R), b (V, R)]` →
    /// `[dx (S, C)]`, `[dh (S, R)]`; updates loss (1), `[db]`, `[dhead]`:
    /// adds weight·Σ NLL to the loss. The gradients are computed in the same pass, while a chunk of logits exists.
    /// The weight may also be (S) in f32: one for each row.
    LmHeadLoss(head: LossHead) => {
        name: "lm_head_loss",
        shape: |rule| rule.lm_head_loss(head),
        scratch: |step| step.lm_head_loss(head),
        is: &[ReadsHead, Loss],
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| head.cost(step),
        text: head.to_string(),
    }

    // ── experts ───────────────────────────────────────────────────────────────────────────────────

    /// logits (T, E), `[correction (E)]`, `[expert scales (E)]` → weights (T, J) in f32, choices (T, J): the experts of each
    /// token and how much they count. Of equal scores the one of the first expert is larger.
    Route(router: Router) => {
        name: "route",
        shape: |rule| rule.route(router),
        text: router.to_string(),
    }
    /// choices (T, J) → places (T, J), experts (J·T): the rows of all tokens sorted by expert, those of an expert in the
    /// order of tokens. `places` has the sorted row of each choice, `experts` the expert of each sorted row.
    Dispatch { experts: usize } => {
        name: "dispatch",
        shape: |rule| rule.dispatch(),
        scratch: |step| step.dispatch(*experts),
        text: format!("experts={experts}"),
    }
    /// x (T, C), places (T, J), `[weights (T, J)]` → (J·T, C): row `places[t, j]` is row t of x times `weights[t, j]`
    SpreadRows { weighted: bool } => {
        name: "spread_rows",
        shape: |rule| rule.spread_rows(*weighted),
        is: &[Cheap],
        text: flag_text(*weighted, "weighted").to_owned(),
    }
    /// y (J·T, C), places (T, J), `[weights (T, J)]` → (T, C): row t is the sum over j of row `places[t, j]` of y times
    /// `weights[t, j]`, in the order of j
    CombineRows { weighted: bool } => {
        name: "combine_rows",
        shape: |rule| rule.combine_rows(*weighted),
        text: flag_text(*weighted, "weighted").to_owned(),
    }
    /// x (J·T, K), weight (E·P, K), experts (J·T), `[bias (E·P)]`, `[h (J·T, R), b (E·P, R)]` → (J·T, rows): each row
    /// times the rows of its expert's matrix, plus their biases, plus lora·h·bᵀ with the same rows of b
    GroupedLinear { part: ExpertRows, bias: bool, lora: Option<f32> } => {
        name: "grouped_linear",
        shape: |rule| rule.grouped_linear(part, *bias, lora.is_some()),
        scratch: |step| step.grouped(part, *bias),
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            let b = lora.map(|_| 4 + usize::from(*bias));
            step.grouped_matmuls([(0, 1, *part)].into_iter().chain(b.map(|b| (b - 1, b, *part))))
        },
        text: expert_rows_text(&[*part], &[lora.unwrap_or(1.0)]),
    }

    // ── objectives ────────────────────────────────────────────────────────────────────────────────

    /// NLL of rows (S), weight (1), first row of each sequence (G+1), numbers of sequences (G+1, 5),
    /// `[log-probabilities before (S, 2)]` → weights of rows (S); updates loss (1), figures (8): adds weight · loss and the
    /// figures of this micro-batch; the weights are those with which Σ weight·NLL has the gradient of weight · loss
    Objective(objective: Objective) => {
        name: "objective",
        shape: |rule| rule.objective(objective),
        scratch: |step| step.objective(),
        is: &[Loss],
        text: objective.to_string(),
    }

    // ── audio ─────────────────────────────────────────────────────────────────────────────────────

    /// x (T, C), rows (A), `[y (A, C)]` → (T, C): x with row `rows[a]` replaced by row a of y, or by zeros if there is no
    /// y. Row a is skipped if `rows[a]` is negative.
    PlaceRows { clear: bool } => {
        name: "place_rows",
        shape: |rule| rule.place_rows(*clear),
        in_place: &[(0, 0)],
        text: flag_text(*clear, "clear").to_owned(),
    }
    /// x (rows, C), weight (C), `[bias (C)]` → (rows, C): (x - mean) / deviation · weight + bias
    LayerNorm { eps: f32, bias: bool } => {
        name: "layer_norm",
        shape: |rule| rule.layer_norm(*bias),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
        text: format!("eps={eps}"),
    }
    /// x (rows, C) → scale·x. Its gradient is the same operation.
    Scale { scale: f32 } => {
        name: "scale",
        shape: |rule| rule.one_activation(),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
        text: scale_text(*scale),
    }
    /// x (rows, C), bias (C) → x + bias
    AddBias => {
        name: "add_bias",
        shape: |rule| rule.add_bias(),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
    }
    /// x (rows, C) → act(x)
    Act(kind: PlainActivation) => {
        name: "act",
        shape: |rule| rule.one_activation(),
        is: &[Cheap, TokenLocal],
        in_place: &[(0, 0)],
        text: format!("{kind:?}"),
    }
    /// q (A, H·D), k (A, H·D), v (A, H·D), marks (A, 4), bias (2·M, H) → o (A, H·D), lse (A, H): attention to all rows of
    /// a chunk, with `bias[clamp(key - query, -M, M - 1) + M, head]` added to the scores
    ChunkAttention(shape: AttentionShape) => {
        name: "chunk_attention",
        shape: |rule| rule.chunk_attention(shape),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }
    /// x (2f·A, 2b) or (2f·2b·A, C), marks (A, 4), weight (C, 9), bias (C) → (f·b·A, C): a 3 x 3 convolution with a stride
    /// of 2 over the mel frames of a clip and their bins; x has one channel, or C channels with their own weights each
    StridedConv(conv: StridedConv) => {
        name: "strided_conv",
        shape: |rule| rule.strided_conv(conv),
        text: conv.to_string(),
    }
    /// x (b·A, C) → (A, C·b): concatenates the b places of each row, channel by channel
    JoinPlaces { places: usize } => {
        name: "join_places",
        shape: |rule| rule.join_places(*places),
        text: format!("places={places}"),
    }
    /// x (A, C), marks (A, 4) → (A, C): x with zeros in the rows that only pad a chunk; or, if it is `stored` for the host,
    /// → ; updates y (A, C) := the same in f32
    MaskRows { stored: bool } => {
        name: "mask_rows",
        shape: |rule| rule.mask_rows(*stored),
        in_place: if *stored { &[] } else { &[(0, 0)] },
        text: flag_text(*stored, "stored").to_owned(),
    }

    // ── recurrent mixers ──────────────────────────────────────────────────────────────────────────

    /// x (T, C), boundaries (G+1), weight (C, K), `[bias (C)]` → (T, C): a depthwise convolution over the K rows that end
    /// with the row itself, within a sample; or, if it is `backward`, its gradient with respect to x. For audio rows x is
    /// (A, C) with marks (A, 4), and the convolution ends at chunks.
    CausalConv { bias: bool, backward: bool } => {
        name: "causal_conv",
        shape: |rule| rule.causal_conv(*bias, *backward),
        scratch: |step| step.causal_conv(2),
        text: flag_text(*backward, "backward").to_owned(),
    }
    /// a (T, H), log_decay (H), dt_bias (H), `[b (T, H)]` → g (T, H), beta (T, H), both f32: the logarithm of what a state
    /// keeps of itself at each token, and how strongly the token is written to it. With step = softplus(a + dt_bias),
    /// clamped, g = -exp(log_decay)·step; beta is the step, or a multiple of sigmoid(b).
    Decay(shape: DecayShape) => {
        name: "decay",
        shape: |rule| rule.decay(shape),
        text: shape.to_string(),
    }
    /// q (T, Hk·K), k (T, Hk·K), v (T, H·V), g (T, H), beta (T, H), boundaries (G+1) → o (T, H·V): each head keeps a state
    /// (K, V), which is zero before a sample. At each token S := exp(g)·S, u = beta·(v - kᵀS) by the delta rule or beta·v
    /// without it, S := S + k·uᵀ, and o = qᵀS. Heads share queries and keys as in attention.
    Scan(shape: ScanShape) => {
        name: "scan",
        shape: |rule| rule.scan(shape),
        scratch: |step| step.scan(shape, false),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.scan(shape, 3),
        text: shape.to_string(),
    }
} others {
    // ── the head in pieces, and generation ────────────────────────────────────────────────────────

    /// x (S, C), rows of the head (N, C), labels (S), `[sums (S, 3) of the pieces before]` → sums (S, 3), f32:
    /// the largest logit so far, the sum of exp(logit - largest), and the label's logit, which is NaN before the piece
    /// that contains the label
    HeadSums(piece: HeadPiece) => {
        name: "head_sums",
        shape: |rule| rule.head_sums(piece),
        scratch: |step| step.head_piece(piece, false),
        is: &[ReadsHead, Loss],
        in_place: if piece.continues { &[(0, 3)] } else { &[] },
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.chunked_matmul(1, piece.chunk, 1),
        text: piece.to_string(),
    }
    /// sums (S, 3) of all pieces, weight (1) or (S) → ; updates loss (1), `[losses (S)]`, as for `LmHeadLoss`
    HeadLoss { row_losses: bool } => {
        name: "head_loss",
        shape: |rule| rule.head_loss(*row_losses),
        is: &[Loss],
        text: flag_text(*row_losses, "rows").to_owned(),
    }
    /// x (S, C), rows of the head (N, C), labels (S), weight (1) or (S), sums (S, 3) of all pieces, `[dx (S, C) of the pieces
    /// before, f32]` → dx (S, C): in f32, except that the piece that `ends` it rounds it to the element type of x
    HeadGrad { piece: HeadPiece, ends: bool } => {
        name: "head_grad",
        shape: |rule| rule.head_grad(piece, *ends),
        scratch: |step| step.head_piece(piece, *ends),
        is: &[ReadsHead, Loss],
        in_place: if piece.continues { &[(0, 5)] } else { &[] },
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.chunked_matmul(1, piece.chunk, 2),
        text: piece.to_string(),
    }
    /// x (S, C), head (N, C), `[h (S, R), b (N, R)]` → ; updates logits (S, V): writes the N columns that start at
    /// `first_word`, which are all columns if the head is whole
    Logits { lora: Option<f32>, softcap: Option<f32>, first_word: usize } => {
        name: "logits",
        shape: |rule| rule.logits(lora.is_some(), *first_word),
        scratch: |step| step.logits(lora.is_some()),
        is: &[ReadsHead],
        decodes: |input| input == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            // Only these columns of the logits are read and written.
            let columns_bytes = 8 * step.rows(0) * step.rows(1);
            Cost::moving(step.inputs_bytes() + columns_bytes)
                + step.matmul(1)
                + step.matmul_flops(lora.map(|_| 3))
        },
        text: logits_text(*first_word, *softcap),
    }
    /// k (T, C), v (T, C), table (L, P), slots (T), positions (T) → ; updates keys (N, C), values (N, C):
    /// writes k and v of each token to row `table[slot, position]` of the two caches
    CacheRows => {
        name: "cache_rows",
        shape: |rule| rule.cache_rows(),
        // Only the rows of the new tokens are written, not the whole caches.
        cost: |step| Cost::moving(2 * (step.input_bytes(0) + step.input_bytes(1))),
    }
    /// q (T, H·D), keys (N, Hkv·D), values (N, Hkv·D), table (L, P), slots (T), positions (T), `[sinks (H)]` → o (T, H·D):
    /// attention over the cached rows of the query's slot, at positions up to its own
    CachedAttention(shape: AttentionShape) => {
        name: "cached_attention",
        shape: |rule| rule.cached_attention(shape),
        scratch: |step| step.cached_attention(shape),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(2, shape.window),
        text: shape.to_string(),
    }

    // ── backward ──────────────────────────────────────────────────────────────────────────────────

    /// d (S, C), rows (S) → (T, C), zero in all other rows
    ScatterRows => {
        name: "scatter_rows",
        shape: |rule| rule.scatter_rows(),
    }
    /// x (rows, C), `[weight (D)]`, dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    RmsNormGrad { norm: Norm, unweighted: Option<usize>, addend: bool } => {
        name: "rms_norm_grad",
        shape: |rule| rule.rms_norm_grad(*unweighted, *addend),
        is: &[TokenLocal, Rounds],
        in_place: norm_grad_in_place(*addend, unweighted.is_none()),
        text: norm_text(norm, *unweighted),
    }
    /// x (rows, C), dy (rows, C) → ; updates dweight (D)
    RmsNormWeightGrad { eps: f32 } => {
        name: "rms_norm_weight_grad",
        shape: |rule| rule.norm_weight_grad(),
        scratch: |step| step.norm_weight_grad(),
        is: &[TokenLocal],
        text: format!("eps={eps}"),
    }
    /// (d_i (rows, N_i), matrix_i (N_i, K)) … → (rows, K): Σ scale_i · d_i·matrix_i
    LinearGrad { scales: Vec<f32> } => {
        name: "linear_grad",
        shape: |rule| rule.linear_grad(scales.len()),
        scratch: |step| step.linear_grad(scales.len()),
        is: &[TokenLocal],
        decodes: |input| input % 2 == 1,
        terms: scales.len(),
        ends: Fusion::AdapterGradient,
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
        shape: |rule| rule.weight_grad(),
        scratch: |step| step.matmul(),
        is: &[TokenLocal],
        begins: Fusion::AdapterGradient,
        bound_by: BoundBy::OuterProduct,
        cost: |step| step.traffic() + step.outer_product(0, 1),
        text: scale_text(*scale),
    }
    /// x (rows, C), dy (rows, C) → ; updates ds (N) by Σ dy·x
    ScaleByGrad => {
        name: "scale_by_grad",
        shape: |rule| rule.scale_by_grad(),
        scratch: |step| step.scale_by_grad(),
        is: &[TokenLocal],
    }
    /// dy (rows, N) → ; updates dbias (N)
    BiasGrad => {
        name: "bias_grad",
        shape: |rule| rule.bias_grad(),
        scratch: |step| step.bias_grad(),
        is: &[TokenLocal],
    }
    /// dy (rows, N), z (rows, N), norm (N) → ; updates dmagnitude (N) by Σ dy·z / norm
    MagnitudeGrad => {
        name: "magnitude_grad",
        shape: |rule| rule.magnitude_grad(),
        scratch: |step| step.magnitude_grad(),
        is: &[TokenLocal],
    }
    /// h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1), dy (rows, N) → dz (rows, N), the gradient with
    /// respect to scale·h·bᵀ; updates dcoefficients (1, 4), dsigma (1, 1)
    FourierGrad { scale: f32 } => {
        name: "fourier_grad",
        shape: |rule| rule.fourier_grad(),
        scratch: |step| step.fourier_grad(),
        is: &[TokenLocal],
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.matmul_flops(Some(1)),
        text: format!("scale={scale}"),
    }
    /// q, k, v, o, lse, do, boundaries → dq, dk, dv
    AttentionGrad(shape: AttentionShape) => {
        name: "attention_grad",
        shape: |rule| rule.attention_grad(shape),
        scratch: |step| step.attention(shape, true),
        bound_by: BoundBy::Attention,
        // One matmul recomputes the scores, four form gradients.
        cost: |step| step.traffic() + step.attention(5, shape.window),
        text: shape.to_string(),
    }
    /// o (T, H·D), lse (T, H), do (T, H·D), sinks (H) → ; updates dsinks (H)
    SinksGrad => {
        name: "sinks_grad",
        shape: |rule| rule.sinks_grad(),
        scratch: |step| step.sinks_grad(),
    }
    /// d_i (rows, groups·P_i) … → (rows, groups·columns): in each group, part i in the columns from `firsts[i]` on, and zeros
    /// between parts
    PlaceColumns { firsts: Vec<usize>, columns: usize, groups: usize } => {
        name: "place_columns",
        shape: |rule| rule.place_columns(firsts, *columns, *groups),
        is: &[TokenLocal],
        text: format!("{firsts:?} of {columns}{}", groups_text(*groups)),
    }
    /// gate, up, dy → dgate, dup
    GatedActGrad(activation: Activation) => {
        name: "gated_act_grad",
        shape: |rule| rule.gated_act_grad(),
        is: &[TokenLocal, Rounds, FeedForward],
        in_place: &[(0, 0), (1, 1), (0, 2), (1, 2)],
        text: format!("{activation:?}"),
    }
    /// ids (T), dy (T, C) → ; updates dtable (V, C) in all rows but `padding`
    EmbedGrad { scale: f32, padding: Option<u32> } => {
        name: "embed_grad",
        shape: |rule| rule.embed_grad(),
        // Only the rows of these tokens are read and written.
        cost: |step| Cost::moving(3 * step.input_bytes(1)),
        text: embed_grad_text(*scale, *padding),
    }

    // ── experts, backward ─────────────────────────────────────────────────────────────────────────

    /// logits (T, E), choices (T, J), dweights (T, J), `[expert scales (E)]` → dlogits (T, E); updates
    /// `[dscales (E)]`
    RouteGrad(router: Router) => {
        name: "route_grad",
        shape: |rule| rule.route_grad(router),
        scratch: |step| step.route_grad(router),
        text: router.to_string(),
    }
    /// a (J·T, C), b (T, C), places (T, J) → (T, J) in f32: row `places[t, j]` of a times row t of b
    RowDots => {
        name: "row_dots",
        shape: |rule| rule.row_dots(),
    }
    /// (d_i (J·T, rows_i), matrix_i (E·P_i, K)) …, experts (J·T) → (J·T, K): Σ scale_i · d_i times the rows of the expert's
    /// matrix_i
    GroupedLinearGrad { parts: Vec<ExpertRows>, scales: Vec<f32> } => {
        name: "grouped_linear_grad",
        shape: |rule| rule.grouped_linear_grad(parts),
        scratch: |step| step.grouped(&parts[0], false),
        decodes: |input| input % 2 == 1,
        bound_by: BoundBy::Matmul,
        cost: |step| {
            step.grouped_matmuls(parts.iter().enumerate().map(|(term, part)| (2 * term, 2 * term + 1, *part)))
        },
        text: expert_rows_text(parts, scales),
    }
    /// dy (J·T, rows), x (J·T, K), experts (J·T) → ; updates dweight (E·P, K): adds scale·dyᵀ·x of each expert's rows
    GroupedWeightGrad { part: ExpertRows, scale: f32 } => {
        name: "grouped_weight_grad",
        shape: |rule| rule.grouped_weight_grad(part),
        scratch: |step| step.grouped(part, false),
        bound_by: BoundBy::OuterProduct,
        cost: |step| step.traffic() + step.outer_product(0, 1),
        text: expert_rows_text(&[*part], &[*scale]),
    }
    /// dy (J·T, rows), experts (J·T) → ; updates dbias (E·P)
    GroupedBiasGrad { part: ExpertRows } => {
        name: "grouped_bias_grad",
        shape: |rule| rule.grouped_bias_grad(part),
        scratch: |step| step.grouped(part, false),
        text: part.to_string(),
    }

    // ── audio, backward ───────────────────────────────────────────────────────────────────────────

    /// x (T, C), rows (A) → (A, C): row `rows[a]` of x, or zeros if `rows[a]` is negative
    TakeRows => {
        name: "take_rows",
        shape: |rule| rule.take_rows(),
    }
    /// x (rows, C), weight (C), dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    LayerNormGrad { eps: f32, addend: bool } => {
        name: "layer_norm_grad",
        shape: |rule| rule.layer_norm_grad(*addend),
        is: &[TokenLocal],
        in_place: norm_grad_in_place(*addend, true),
        text: format!("eps={eps}"),
    }
    /// x (rows, C), dy (rows, C) → ; updates dweight (C)
    LayerNormWeightGrad { eps: f32 } => {
        name: "layer_norm_weight_grad",
        shape: |rule| rule.norm_weight_grad(),
        scratch: |step| step.norm_weight_grad(),
        is: &[TokenLocal],
        text: format!("eps={eps}"),
    }
    /// x (rows, C), dy (rows, C) → dx
    ActGrad(kind: PlainActivation) => {
        name: "act_grad",
        shape: |rule| rule.act_grad(),
        is: &[TokenLocal],
        in_place: &[(0, 1), (0, 0)],
        text: format!("{kind:?}"),
    }
    /// q, k, v, o, lse, do, marks, bias → dq, dk, dv
    ChunkAttentionGrad(shape: AttentionShape) => {
        name: "chunk_attention_grad",
        shape: |rule| rule.chunk_attention_grad(shape),
        scratch: |step| step.chunk_attention_grad(shape),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.attention(5, shape.window),
        text: shape.to_string(),
    }

    // ── recurrent mixers, backward and in generation ──────────────────────────────────────────────

    /// x (T, C), dy (T, C), boundaries (G+1) → ; updates dweight (C, K)
    CausalConvWeightGrad => {
        name: "causal_conv_weight_grad",
        shape: |rule| rule.causal_conv_weight_grad(),
    }
    /// a, log_decay, dt_bias, `[b]`, dg (T, H), dbeta (T, H) → da (T, H), `[db (T, H)]`; updates `[dlog_decay (H)]`,
    /// `[ddt_bias (H)]`
    DecayGrad { shape: DecayShape, trains: [bool; 2] } => {
        name: "decay_grad",
        shape: |rule| rule.decay_grad(shape, *trains),
        text: shape.to_string(),
    }
    /// q, k, v, g, beta, do, boundaries → dq, dk, dv, dg, dbeta. States are recomputed from those at chunk boundaries.
    ScanGrad(shape: ScanShape) => {
        name: "scan_grad",
        shape: |rule| rule.scan_grad(shape),
        scratch: |step| step.scan(shape, true),
        bound_by: BoundBy::Attention,
        cost: |step| step.traffic() + step.scan(shape, 12),
        text: shape.to_string(),
    }
    /// x (T, C), weight (C, K), `[bias (C)]`, slots (T), positions (T) → y (T, C); updates window (L, (K-1)·C): the
    /// convolution of the tokens of a slot, which are neighbours, with the last K-1 rows of its sequence before them
    CachedConv { bias: bool } => {
        name: "cached_conv",
        shape: |rule| rule.cached_conv(*bias),
        scratch: |step| step.causal_conv(1),
        // Only the windows of the slots in use are read and written.
        cost: |step| Cost::moving(2 * step.output_bytes(0)),
    }
    /// q, k, v, g, beta, slots (T), positions (T) → o (T, H·V); updates state (L, H·K·V): `Scan` from the state of the
    /// slot of each token, which is zero before position 0
    CachedScan(shape: ScanShape) => {
        name: "cached_scan",
        shape: |rule| rule.cached_scan(shape),
        scratch: |step| step.cached_scan(shape),
        bound_by: BoundBy::Attention,
        // Only the states of the slots in use are read and written.
        cost: |step| Cost::moving(step.inputs_bytes() + step.output_bytes(0)) + step.scan(shape, 3),
        text: shape.to_string(),
    }

    // ── update and refresh ────────────────────────────────────────────────────────────────────────

    /// coefficients (M, 4), hyper (3) → ; updates loss (1) := weight · Σ (a - (0, 1, 0, 0))², and dcoefficients (M, 4) by
    /// the gradient times the loss scale
    FourierReg { weight: f64 } => {
        name: "fourier_reg",
        shape: |rule| rule.fourier_reg(),
        text: format!("weight={weight}"),
    }
    /// weight (N, K), a (R, K), b (N, R) → ; updates norms (N) := norms of the rows of weight + scale·b·a
    RowNorms { scale: f32 } => {
        name: "row_norms",
        shape: |rule| rule.row_norms(),
        scratch: |step| step.row_norms(),
        decodes: |input| input == 0,
        bound_by: BoundBy::Matmul,
        cost: |step| step.traffic() + step.decoding(0) + step.matmul_flops(Some(1)),
        text: format!("scale={scale}"),
    }
    /// weight (N, K) → ; updates rounded (N, K) := scale·weight; or, with `to`, → scale·weight in that type
    Round { scale: f32, to: Option<DType> } => {
        name: "round",
        shape: |rule| rule.round(*to),
        is: if to.is_some() { &[CopiesLeaf] } else { &[ByRows] },
        batching: Batching::AnyAttributes,
        text: scale_text(*scale),
    }
    /// x (rows, N), `[weight (N, K) in fp8]` → (rows, N) in fp8, with a scale for each row; with a weight, column j is first
    /// multiplied by the scale of the weight's row j
    RoundFp8 { scaled: bool } => {
        name: "round_fp8",
        shape: |rule| rule.round_fp8(*scaled),
        is: &[Cheap, TokenLocal],
        decodes: |input| input == 1,
        begins: Fusion::Rounding,
        ends: Fusion::Rounding,
        cost: |step| Cost::moving(step.input_bytes(0) + step.output_bytes(0)),
        text: flag_text(*scaled, "scaled").to_owned(),
    }
    /// weight (N, K) in bf16 → the same in f32
    Widen => {
        name: "widen",
        shape: |rule| rule.widen(),
        is: &[ByRows, CopiesLeaf],
    }
    /// wide (N, K) in f32, hyper (3) → ; updates weight (N, K) := wide in bf16, rounded up or down at random so that errors
    /// average out. The random bits depend only on the optimizer step and the position of an element.
    RoundAtRandom(place: RandomPlace) => {
        name: "round_at_random",
        shape: |rule| rule.round_at_random(),
        is: &[ByRows],
        text: place.to_string(),
    }
    /// parts of gradients … → ; updates squares (1) := the sum of the squares of all their elements, tensor by tensor
    SquaredNorm => {
        name: "squared_norm",
        shape: |rule| rule.squared_norm(),
        scratch: |step| step.squares(0..step.inputs.len()),
    }
    /// loss (1), hyper (3), gradients …, `[squares (M) of other gradients]` → ; updates report (4): loss and norm over all
    /// gradients, both without the loss scale; the factor that removes the loss scale from gradients and clips their norm
    /// to `clip` (0 = never); 1 if loss and norm are finite. Squares are added up tensor by tensor, in this order.
    GradNorm { clip: f32, squares: bool } => {
        name: "grad_norm",
        shape: |rule| rule.grad_norm(*squares),
        scratch: |step| step.squares(2..step.inputs.len() - usize::from(*squares)),
        is: &[Reports],
        text: format!("clip={clip}"),
    }
    /// gradient, report (4), hyper (3): learning rate, step and loss scale → ; updates parameter, first and second
    /// moment, and activity (1, 3): the largest gradient after clipping and the largest parameter of all updates so
    /// far, 1 once an element has moved. Does nothing when the report is not finite.
    AdamW(settings: AdamW) => {
        name: "adamw",
        shape: |rule| rule.adamw([Storage::F32; 2]),
        is: &[ByRows, Optimizer],
        batching: Batching::EqualAttributes,
        text: settings.to_string(),
    }
    /// As `AdamW`, with moments in [`crate::Storage::Dynamic8`], the first one signed. Decay comes after the step.
    AdamW8(settings: AdamW) => {
        name: "adamw_8bit",
        shape: |rule| rule.adamw(MOMENTS_IN_8_BITS),
        is: &[ByRows, Optimizer],
        batching: Batching::EqualAttributes,
        text: settings.to_string(),
    }
    /// → ; updates value := 0
    Zero => {
        name: "zero",
        shape: |rule| rule.zero(),
        is: &[ByRows, Overwrites],
        batching: Batching::EqualAttributes,
    }
    /// x and its offloaded copy, or the value it was scattered into → . Waits for that transfer; then the memory of x is free.
    Stowed => {
        name: "stowed",
        shape: |rule| rule.stowed(),
        is: &[Waits],
        reads_offloaded: |input| input == 1,
        cost: |_| Cost::moving(0),
    }
} transfers {
    /// offloaded or carried x → its copy on the device. Only starts the copy; the first step that reads it waits.
    Fetch => {
        name: "fetch",
        shape: |rule| rule.one_copy(),
        is: &[CopiesLeaf],
        reads_offloaded: |input| input == 0,
        route: Route::ToDevice,
        cost: |step| Cost::moving(step.input_bytes(0)),
    }
    /// x → its copy in host memory or on disk, or updates an offloaded or carried value. Only starts the copy; x must
    /// not change until `Stowed`.
    Stow => {
        name: "stow",
        shape: |rule| rule.stow(),
        is: &[Overwrites],
        route: Route::FromDevice,
        cost: |step| Cost::moving(step.input_bytes(0)),
    }
    /// As `AdamW` or `AdamW8`, depending on the storage of the moments, but computed on the host with all operands in host
    /// memory. Only starts the update; a step that touches an operand waits for it, also in the next entry point.
    AdamWOnHost(settings: AdamW) => {
        name: "adamw_on_host",
        shape: |rule| rule.adamw_on_host(),
        is: &[Optimizer],
        reads_offloaded: |_| true,
        route: Route::Host,
        text: settings.to_string(),
    }
    /// → ; updates values …: each becomes its sum over all ranks. Only starts the exchange; in `micro_step` it runs only
    /// with the last micro-batch of a step.
    AllReduce(rank: Rank) => {
        name: "all_reduce",
        shape: |rule| rule.all_reduce(),
        route: Route::Ranks { rank: *rank, is_sum: true },
        cost: |step| Cost::moving(2 * others_share(*rank, step.updates_bytes())),
        text: rank_text(*rank),
    }
    /// x … → ; updates parts …: adds to each part this rank's rows of the sum of x over all ranks. A part that is a slice
    /// of x itself becomes these rows of the sum.
    ReduceScatter(rank: Rank) => {
        name: "reduce_scatter",
        shape: |rule| rule.reduce_scatter(),
        route: Route::Ranks { rank: *rank, is_sum: false },
        cost: |step| Cost::moving(others_share(*rank, step.inputs_bytes())),
        text: rank_text(*rank),
    }
    /// a divided x → the whole x; a divided x that is offloaded comes with a fetched copy of this rank's rows, whose type
    /// the whole has. Or, without an input, updates values …: each rank has changed its own rows and receives the other
    /// rows from their ranks. Only starts the exchange.
    AllGather(shard: Shard) => {
        name: "all_gather",
        shape: |rule| rule.all_gather(),
        is: &[CopiesLeaf],
        reads_offloaded: |input| input == 0,
        route: Route::Ranks { rank: shard.rank, is_sum: false },
        cost: |step| Cost::moving(others_share(shard.rank, step.outputs_bytes() + step.updates_bytes())),
        text: rank_text(shard.rank),
    }
} }
