//! The operations: a closed list, coarse enough that each can have one excellent kernel.
//!
//! Backward operations are operations too. An operation reads `inputs`, writes `outputs`, and adds to
//! or replaces `updates` (leaves such as gradients and moments); the comment at each variant names the
//! three lists in order, `[..]` marks what is there only for some attributes. Everything that a stage
//! or a device must know of an operation is a `match` without a wildcard arm, so a new operation cannot
//! be half added. Dimension letters: T tokens, S supervised rows, C/K/N channels, V vocabulary, R rank,
//! H heads, D head size, N rows of a cache, L slots of P positions each; `rows` is T or S.

use crate::rope::RopeSpec;
use crate::storage::DType;
use thiserror::Error;

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    // ── forward ────────────────────────────────────────────────────────────────────────────────
    /// ids (T), table (V, C) → (T, C) as `element`: rows of the table times `scale`
    Embed { scale: f32, element: DType },
    /// x (rows, C), weight (D) → (rows, C): x / rms(x) · weight, over each D of the C channels by itself
    /// (D = C for the norm of a layer, the head size for norms of queries and keys)
    RmsNorm(Norm),
    /// x (T, C), keys (T) → (T, C): elements zeroed with probability `p` by a hash of (key, stream,
    /// channel), the others divided by 1 - p; with `rest`, x minus that. Its gradient is itself.
    Dropout { p: f32, stream: u32, rest: bool },
    /// x (rows, K), weight (N, K), `[bias (N)]`, `[h (rows, R), b (N, R)]` → (rows, N):
    /// x·weightᵀ + bias + lora·h·bᵀ
    Linear { bias: bool, lora: Option<f32> },
    /// z (rows, N), magnitude (N), norm (N), `[bias (N)]` → (rows, N): z·magnitude/norm + bias, DoRA's gain
    ScaleColumns { bias: bool },
    /// base (rows, N), h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1) → (rows, N): base + φ(scale·h·bᵀ),
    /// φ(z) = a0 + a1·u + a2·sin(πu) + a3·cos(πu) with u = tanh(z / (|sigma| + 1e-6)), LS-LoRA
    Fourier { scale: f32 },
    /// positions (T), `[boundaries (G+1) or lengths (T)]` → (T, dim): cosines, then sines. The second where the
    /// frequencies depend on the length of a sequence: that of a segment, or each token's own
    RopeTable(RopeSpec),
    /// x (T, H·D), table (T, dim) → (T, H·D): the first dim channels of each head turned
    Rope { heads: usize, inverse: bool },
    /// q (T, H·D), k (T, Hkv·D), v (T, Hkv·D), boundaries (G+1) → o (T, H·D), lse (T, H)
    Attention(AttentionShape),
    /// gate (T, C), up (T, C) → (T, C): act(gate)·up
    GatedAct(Activation),
    /// a, b → a + b
    Add,
    /// x (T, C), rows (S) → (S, C)
    GatherRows,
    /// x (S, C), head (V, C), labels (S), weight (1), `[h (S, R), b (V, R)]` →
    /// `[dx (S, C)]`, `[dh (S, R)]`; updates loss (1), `[db]`, `[dhead]`:
    /// adds weight·Σ NLL to the loss; the gradients are formed at once, while a chunk of logits exists.
    LmHeadLoss(LossHead),
    /// x (S, C), rows of the head (N, C), labels (S), `[sums (S, 3) of the pieces before]` → sums (S, 3), f32:
    /// the largest logit so far, the sum of exp(logit - largest), and the label's logit, which is no number until the
    /// piece that has it
    HeadSums(HeadPiece),
    /// sums (S, 3) of all pieces, weight (1) → ; updates loss (1), `[losses (S)]`: as `LmHeadLoss` has them
    HeadLoss { row_losses: bool },
    /// x (S, C), head (N, C), `[h (S, R), b (N, R)]` → ; updates logits (S, V), of which columns from `first_word` on
    /// are replaced: N of them, all where the head is whole
    Logits { lora: Option<f32>, softcap: Option<f32>, first_word: usize },
    /// k (T, C), v (T, C), table (L, P), slots (T), positions (T) → ; updates keys (N, C), values (N, C):
    /// row `table[slot, position]` of both becomes that of the token
    CacheRows,
    /// q (T, H·D), keys (N, Hkv·D), values (N, Hkv·D), table (L, P), slots (T), positions (T) → o (T, H·D):
    /// attention over the cached rows of the query's slot, at positions up to its own
    CachedAttention(AttentionShape),

    // ── backward ───────────────────────────────────────────────────────────────────────────────
    /// x (S, C), rows of the head (N, C), labels (S), weight (1), sums (S, 3) of all pieces, `[dx (S, C) of the pieces
    /// before, f32]` → dx (S, C), f32 until the piece that `ends` it, which rounds it to the numbers of x
    HeadGrad { piece: HeadPiece, ends: bool },
    /// d (S, C), rows (S) → (T, C), zero in all other rows
    ScatterRows,
    /// x (rows, C), weight (D), dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    RmsNormGrad { norm: Norm, addend: bool },
    /// x (rows, C), dy (rows, C) → ; updates dweight (D)
    RmsNormWeightGrad { eps: f32 },
    /// (d_i (rows, N_i), matrix_i (N_i, K)) … → (rows, K): Σ scale_i · d_i·matrix_i
    LinearGrad { scales: Vec<f32> },
    /// dy (rows, N), x (rows, K) → ; updates dweight (N, K) by scale·dyᵀ·x
    WeightGrad { scale: f32 },
    /// dy (rows, N) → ; updates dbias (N)
    BiasGrad,
    /// dy (rows, N), z (rows, N), norm (N) → ; updates dmagnitude (N) by Σ dy·z / norm
    MagnitudeGrad,
    /// h (rows, R), b (N, R), coefficients (1, 4), sigma (1, 1), dy (rows, N) → dz (rows, N), the gradient with
    /// respect to scale·h·bᵀ; updates dcoefficients (1, 4), dsigma (1, 1)
    FourierGrad { scale: f32 },
    /// q, k, v, o, lse, do, boundaries → dq, dk, dv
    AttentionGrad(AttentionShape),
    /// gate, up, dy → dgate, dup
    GatedActGrad(Activation),
    /// ids (T), dy (T, C) → ; updates dtable (V, C)
    EmbedGrad { scale: f32 },

    // ── update and refresh ─────────────────────────────────────────────────────────────────────
    /// coefficients (M, 4), hyper (3) → ; updates loss (1) := weight · Σ (a - (0, 1, 0, 0))², dcoefficients (M, 4), to
    /// which the gradient times the loss scale is added
    FourierReg { weight: f64 },
    /// weight (N, K), a (R, K), b (N, R) → ; updates norms (N) := lengths of the rows of weight + scale·b·a
    RowNorms { scale: f32 },
    /// weight (N, K) → ; updates rounded (N, K) := scale·weight
    Round { scale: f32 },
    /// loss (1), hyper (3), gradients … → ; updates report (4): loss and norm over all gradients without the loss scale
    /// that they carry, the factor that takes it off gradients and clips their norm to `clip` (0 = never), 1 if loss and
    /// norm are finite
    GradNorm { clip: f32 },
    /// gradient, report (4), hyper (3): learning rate, step and loss scale → ; updates parameter, first and second
    /// moment. Does nothing when the report is not finite.
    AdamW(AdamW),
    /// As `AdamW`, with moments in [`crate::Storage::Dynamic8`], the first one signed. Decay comes after the step.
    AdamW8(AdamW),
    /// → ; updates value := 0
    Zero,

    // ── between spaces ─────────────────────────────────────────────────────────────────────────
    /// x, elsewhere → its copy on the device. Begun here; whoever reads the copy waits for it.
    Fetch,
    /// x → its copy elsewhere, or updates that. Begun here; x must stay as it is until `Stowed`.
    Stow,
    /// x and where it was stowed → . The copy is there, and x may go.
    Stowed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    GeluTanh,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// A query sees so many keys, itself included; `None` is all before it.
    pub window: Option<usize>,
    /// Scores s become cap·tanh(s/cap).
    pub softcap: Option<f32>,
}

/// Attributes of an RMS norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    pub eps: f32,
    /// The factor is 1 + weight.
    pub plus_one: bool,
}

/// Attributes of [`Op::LmHeadLoss`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossHead {
    /// Rows whose logits exist at the same time.
    pub chunk: usize,
    pub gradient: bool,
    /// Scale of an adapter on the head.
    pub lora: Option<f32>,
    pub train_head: bool,
    /// Logits z become cap·tanh(z/cap).
    pub softcap: Option<f32>,
    /// The last update takes the negative log-likelihood of each row; only without a gradient.
    pub row_losses: bool,
}

/// Some rows of the head, where it is not there as a whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadPiece {
    /// Rows of x whose logits exist at the same time.
    pub chunk: usize,
    /// The word that its first row stands for.
    pub first_word: usize,
    /// Logits z become cap·tanh(z/cap).
    pub softcap: Option<f32>,
    /// Other pieces came before: the last input is what they came to.
    pub continues: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// A node whose operands do not fit its operation: always a bug of the stage that built it.
#[derive(Debug, Error, PartialEq)]
#[error("`{op}`: {what}")]
pub struct ShapeError {
    pub op: &'static str,
    pub what: String,
}

impl Op {
    /// Every operation by name, in the order of the list: what an example of each must exist for.
    pub const NAMES: [&'static str; 40] = [
        "embed",
        "rms_norm",
        "dropout",
        "linear",
        "scale_columns",
        "fourier",
        "rope_table",
        "rope",
        "attention",
        "gated_act",
        "add",
        "gather_rows",
        "lm_head_loss",
        "logits",
        "scatter_rows",
        "rms_norm_grad",
        "rms_norm_weight_grad",
        "linear_grad",
        "weight_grad",
        "bias_grad",
        "magnitude_grad",
        "fourier_grad",
        "attention_grad",
        "gated_act_grad",
        "embed_grad",
        "fourier_reg",
        "row_norms",
        "grad_norm",
        "adamw",
        "adamw_8bit",
        "zero",
        "cache_rows",
        "cached_attention",
        "round",
        "fetch",
        "stow",
        "stowed",
        "head_sums",
        "head_loss",
        "head_grad",
    ];

    /// A new operation cannot be named without a place in [`Op::NAMES`].
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => Self::NAMES[0],
            Op::RmsNorm(_) => Self::NAMES[1],
            Op::Dropout { .. } => Self::NAMES[2],
            Op::Linear { .. } => Self::NAMES[3],
            Op::ScaleColumns { .. } => Self::NAMES[4],
            Op::Fourier { .. } => Self::NAMES[5],
            Op::RopeTable(_) => Self::NAMES[6],
            Op::Rope { .. } => Self::NAMES[7],
            Op::Attention(_) => Self::NAMES[8],
            Op::GatedAct(_) => Self::NAMES[9],
            Op::Add => Self::NAMES[10],
            Op::GatherRows => Self::NAMES[11],
            Op::LmHeadLoss(_) => Self::NAMES[12],
            Op::Logits { .. } => Self::NAMES[13],
            Op::ScatterRows => Self::NAMES[14],
            Op::RmsNormGrad { .. } => Self::NAMES[15],
            Op::RmsNormWeightGrad { .. } => Self::NAMES[16],
            Op::LinearGrad { .. } => Self::NAMES[17],
            Op::WeightGrad { .. } => Self::NAMES[18],
            Op::BiasGrad => Self::NAMES[19],
            Op::MagnitudeGrad => Self::NAMES[20],
            Op::FourierGrad { .. } => Self::NAMES[21],
            Op::AttentionGrad(_) => Self::NAMES[22],
            Op::GatedActGrad(_) => Self::NAMES[23],
            Op::EmbedGrad { .. } => Self::NAMES[24],
            Op::FourierReg { .. } => Self::NAMES[25],
            Op::RowNorms { .. } => Self::NAMES[26],
            Op::GradNorm { .. } => Self::NAMES[27],
            Op::AdamW(_) => Self::NAMES[28],
            Op::AdamW8(_) => Self::NAMES[29],
            Op::Zero => Self::NAMES[30],
            Op::CacheRows => Self::NAMES[31],
            Op::CachedAttention(_) => Self::NAMES[32],
            Op::Round { .. } => Self::NAMES[33],
            Op::Fetch => Self::NAMES[34],
            Op::Stow => Self::NAMES[35],
            Op::Stowed => Self::NAMES[36],
            Op::HeadSums(_) => Self::NAMES[37],
            Op::HeadLoss { .. } => Self::NAMES[38],
            Op::HeadGrad { .. } => Self::NAMES[39],
        }
    }

    /// Whether bytes are on their way between spaces behind it.
    pub fn is_transfer(&self) -> bool {
        matches!(self, Op::Fetch | Op::Stow)
    }

    /// Whether the operation reads that input where it lies, also elsewhere than on the device.
    pub fn reads_elsewhere(&self, input: usize) -> bool {
        // Of a table it needs a few rows.
        matches!((self, input), (Op::Fetch, _) | (Op::Stowed, 1) | (Op::Embed { .. }, 1))
    }

    /// Whether each token's results follow from that token alone, but for sums that are added to an update: then some
    /// tokens can be worked on after the others.
    pub fn treats_tokens_alone(&self) -> bool {
        match self {
            Op::RmsNorm(_)
            | Op::Dropout { .. }
            | Op::Linear { .. }
            | Op::ScaleColumns { .. }
            | Op::Fourier { .. }
            | Op::GatedAct(_)
            | Op::Add
            | Op::RmsNormGrad { .. }
            | Op::RmsNormWeightGrad { .. }
            | Op::LinearGrad { .. }
            | Op::WeightGrad { .. }
            | Op::BiasGrad
            | Op::MagnitudeGrad
            | Op::FourierGrad { .. }
            | Op::GatedActGrad(_) => true,
            // Tables of angles and ids are short.
            Op::Embed { .. } | Op::RopeTable(_) | Op::Rope { .. } | Op::EmbedGrad { .. } => false,
            Op::Attention(_)
            | Op::AttentionGrad(_)
            | Op::GatherRows
            | Op::ScatterRows
            | Op::LmHeadLoss(_)
            | Op::HeadSums(_)
            | Op::HeadLoss { .. }
            | Op::HeadGrad { .. }
            | Op::Logits { .. }
            | Op::CacheRows
            | Op::CachedAttention(_)
            | Op::FourierReg { .. }
            | Op::RowNorms { .. }
            | Op::Round { .. }
            | Op::GradNorm { .. }
            | Op::AdamW(_)
            | Op::AdamW8(_)
            | Op::Zero
            | Op::Fetch
            | Op::Stow
            | Op::Stowed => false,
        }
    }

    /// Whether it is the head or its loss, which work on chunks of rows.
    pub fn is_of_head(&self) -> bool {
        matches!(self, Op::LmHeadLoss(_) | Op::HeadSums(_) | Op::HeadLoss { .. } | Op::HeadGrad { .. })
    }

    /// Whether this does to other tensors what the operation before it does, so that a device may begin both at once.
    pub fn is_alike(&self, before: &Op) -> bool {
        match (before, self) {
            (Op::Round { .. }, Op::Round { .. }) => true,
            (Op::AdamW(_) | Op::AdamW8(_) | Op::Zero, _) => before == self,
            _ => false,
        }
    }

    /// Whether the operation is bound by memory and costs less to run again than to keep.
    /// A matrix product and attention never are.
    pub fn is_cheap(&self) -> bool {
        match self {
            Op::RmsNorm(_) | Op::Dropout { .. } | Op::ScaleColumns { .. } | Op::GatedAct(_) => true,
            Op::Embed { .. }
            | Op::Linear { .. }
            | Op::Fourier { .. }
            | Op::RopeTable(_)
            | Op::Rope { .. }
            | Op::Attention(_)
            | Op::Add
            | Op::GatherRows
            | Op::LmHeadLoss(_)
            | Op::HeadSums(_)
            | Op::HeadLoss { .. }
            | Op::HeadGrad { .. }
            | Op::Logits { .. }
            | Op::CacheRows
            | Op::CachedAttention(_)
            | Op::ScatterRows
            | Op::RmsNormGrad { .. }
            | Op::RmsNormWeightGrad { .. }
            | Op::LinearGrad { .. }
            | Op::WeightGrad { .. }
            | Op::BiasGrad
            | Op::MagnitudeGrad
            | Op::FourierGrad { .. }
            | Op::AttentionGrad(_)
            | Op::GatedActGrad(_)
            | Op::EmbedGrad { .. }
            | Op::FourierReg { .. }
            | Op::RowNorms { .. }
            | Op::Round { .. }
            | Op::GradNorm { .. }
            | Op::AdamW(_)
            | Op::AdamW8(_)
            | Op::Zero
            | Op::Fetch
            | Op::Stow
            | Op::Stowed => false,
        }
    }

    /// Pairs (output, input) that may share one buffer: each kernel reads an element, or a whole row,
    /// before it writes it.
    pub fn in_place(&self) -> &'static [(usize, usize)] {
        match self {
            Op::RmsNorm(_)
            | Op::Dropout { .. }
            | Op::Rope { .. }
            | Op::ScaleColumns { .. }
            | Op::Fourier { .. } => &[(0, 0)],
            Op::GatedAct(_) => &[(0, 0), (0, 1)],
            // The second is what a block adds to its residual: a device that forms product and sum as one then finds
            // the residual elsewhere, whatever else is kept.
            Op::Add => &[(0, 1), (0, 0)],
            Op::RmsNormGrad { addend: true, .. } => &[(0, 3), (0, 2), (0, 0)],
            Op::RmsNormGrad { addend: false, .. } => &[(0, 2), (0, 0)],
            Op::GatedActGrad(_) => &[(0, 0), (1, 1), (0, 2), (1, 2)],
            Op::HeadSums(HeadPiece { continues: true, .. }) => &[(0, 3)],
            Op::HeadGrad { piece: HeadPiece { continues: true, .. }, .. } => &[(0, 5)],
            Op::Embed { .. }
            | Op::Linear { .. }
            | Op::RopeTable(_)
            | Op::Attention(_)
            | Op::GatherRows
            | Op::LmHeadLoss(_)
            | Op::HeadSums(HeadPiece { continues: false, .. })
            | Op::HeadLoss { .. }
            | Op::HeadGrad { piece: HeadPiece { continues: false, .. }, .. }
            | Op::Logits { .. }
            | Op::CacheRows
            | Op::CachedAttention(_)
            | Op::ScatterRows
            | Op::RmsNormWeightGrad { .. }
            | Op::LinearGrad { .. }
            | Op::WeightGrad { .. }
            | Op::BiasGrad
            | Op::MagnitudeGrad
            | Op::FourierGrad { .. }
            | Op::AttentionGrad(_)
            | Op::EmbedGrad { .. }
            | Op::FourierReg { .. }
            | Op::RowNorms { .. }
            | Op::Round { .. }
            | Op::GradNorm { .. }
            | Op::AdamW(_)
            | Op::AdamW8(_)
            | Op::Zero
            | Op::Fetch
            | Op::Stow
            | Op::Stowed => &[],
        }
    }
}

impl AttentionShape {
    /// Channels of a query row and of a key or value row.
    pub fn channels(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}
