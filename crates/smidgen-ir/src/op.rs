//! The operations: a closed list, coarse enough that each can have one excellent kernel.
//!
//! Backward operations are operations too. An operation reads `inputs`, writes `outputs`, and adds to
//! or replaces `updates` (leaves such as gradients and moments); the comment at each variant names the
//! three lists in order, `[..]` marks what is there only for some attributes. Everything that a stage
//! or a device must know of an operation is a `match` without a wildcard arm, so a new operation cannot
//! be half added. Dimension letters: T tokens, S supervised rows, C/K/N channels, V vocabulary, R rank,
//! H heads, D head size; `rows` is T or S.

use crate::rope::RopeSpec;
use crate::shape::{Dim, Shape, Type};
use crate::storage::{DType, Storage};
use thiserror::Error;

#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    // ── forward ────────────────────────────────────────────────────────────────────────────────
    /// ids (T), table (V, C) → (T, C)
    Embed,
    /// x (rows, C), weight (D) → (rows, C): x / rms(x) · weight, over each D of the C channels by itself
    /// (D = C for the norm of a layer, the head size for norms of queries and keys)
    RmsNorm { eps: f32 },
    /// x (T, C), keys (T) → (T, C): elements zeroed with probability `p` by a hash of (key, stream,
    /// channel), the others divided by 1 - p. Its gradient is itself.
    Dropout { p: f32, stream: u32 },
    /// x (rows, K), weight (N, K), `[bias (N)]`, `[h (rows, R), b (N, R)]` → (rows, N):
    /// x·weightᵀ + bias + lora·h·bᵀ
    Linear { bias: bool, lora: Option<f32> },
    /// positions (T) → (T, dim): cosines, then sines
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

    // ── backward ───────────────────────────────────────────────────────────────────────────────
    /// d (S, C), rows (S) → (T, C), zero in all other rows
    ScatterRows,
    /// x (rows, C), weight (D), dy (rows, C), `[addend (rows, C)]` → dx = addend + gradient
    RmsNormGrad { eps: f32, addend: bool },
    /// x (rows, C), dy (rows, C) → ; updates dweight (D)
    RmsNormWeightGrad { eps: f32 },
    /// (d_i (rows, N_i), matrix_i (N_i, K)) … → (rows, K): Σ scale_i · d_i·matrix_i
    LinearGrad { scales: Vec<f32> },
    /// dy (rows, N), x (rows, K) → ; updates dweight (N, K) by scale·dyᵀ·x
    WeightGrad { scale: f32 },
    /// dy (rows, N) → ; updates dbias (N)
    BiasGrad,
    /// q, k, v, o, lse, do, boundaries → dq, dk, dv
    AttentionGrad(AttentionShape),
    /// gate, up, dy → dgate, dup
    GatedActGrad(Activation),
    /// ids (T), dy (T, C) → ; updates dtable (V, C)
    EmbedGrad,

    // ── update ─────────────────────────────────────────────────────────────────────────────────
    /// loss (1), gradients … → ; updates report (4): loss, norm over all gradients, the factor that
    /// clips it to `clip` (0 = never), 1 if loss and norm are finite
    GradNorm { clip: f32 },
    /// gradient, report (4), hyper (2): learning rate and step → ; updates parameter, first and second
    /// moment. Does nothing when the report is not finite.
    AdamW(AdamW),
    /// → ; updates value := 0
    Zero,
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
    pub const NAMES: [&'static str; 23] = [
        "embed",
        "rms_norm",
        "dropout",
        "linear",
        "rope_table",
        "rope",
        "attention",
        "gated_act",
        "add",
        "gather_rows",
        "lm_head_loss",
        "scatter_rows",
        "rms_norm_grad",
        "rms_norm_weight_grad",
        "linear_grad",
        "weight_grad",
        "bias_grad",
        "attention_grad",
        "gated_act_grad",
        "embed_grad",
        "grad_norm",
        "adamw",
        "zero",
    ];

    /// A new operation cannot be named without a place in [`Op::NAMES`].
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed => Self::NAMES[0],
            Op::RmsNorm { .. } => Self::NAMES[1],
            Op::Dropout { .. } => Self::NAMES[2],
            Op::Linear { .. } => Self::NAMES[3],
            Op::RopeTable(_) => Self::NAMES[4],
            Op::Rope { .. } => Self::NAMES[5],
            Op::Attention(_) => Self::NAMES[6],
            Op::GatedAct(_) => Self::NAMES[7],
            Op::Add => Self::NAMES[8],
            Op::GatherRows => Self::NAMES[9],
            Op::LmHeadLoss(_) => Self::NAMES[10],
            Op::ScatterRows => Self::NAMES[11],
            Op::RmsNormGrad { .. } => Self::NAMES[12],
            Op::RmsNormWeightGrad { .. } => Self::NAMES[13],
            Op::LinearGrad { .. } => Self::NAMES[14],
            Op::WeightGrad { .. } => Self::NAMES[15],
            Op::BiasGrad => Self::NAMES[16],
            Op::AttentionGrad(_) => Self::NAMES[17],
            Op::GatedActGrad(_) => Self::NAMES[18],
            Op::EmbedGrad => Self::NAMES[19],
            Op::GradNorm { .. } => Self::NAMES[20],
            Op::AdamW(_) => Self::NAMES[21],
            Op::Zero => Self::NAMES[22],
        }
    }

    /// Whether the operation is bound by memory and costs less to run again than to keep.
    /// A matrix product and attention never are.
    pub fn is_cheap(&self) -> bool {
        match self {
            Op::RmsNorm { .. } | Op::Dropout { .. } | Op::GatedAct(_) => true,
            Op::Embed
            | Op::Linear { .. }
            | Op::RopeTable(_)
            | Op::Rope { .. }
            | Op::Attention(_)
            | Op::Add
            | Op::GatherRows
            | Op::LmHeadLoss(_)
            | Op::ScatterRows
            | Op::RmsNormGrad { .. }
            | Op::RmsNormWeightGrad { .. }
            | Op::LinearGrad { .. }
            | Op::WeightGrad { .. }
            | Op::BiasGrad
            | Op::AttentionGrad(_)
            | Op::GatedActGrad(_)
            | Op::EmbedGrad
            | Op::GradNorm { .. }
            | Op::AdamW(_)
            | Op::Zero => false,
        }
    }

    /// Pairs (output, input) that may share one buffer: each kernel reads an element, or a whole row,
    /// before it writes it.
    pub fn in_place(&self) -> &'static [(usize, usize)] {
        match self {
            Op::RmsNorm { .. } | Op::Dropout { .. } | Op::Rope { .. } => &[(0, 0)],
            Op::GatedAct(_) | Op::Add => &[(0, 0), (0, 1)],
            Op::RmsNormGrad { addend: true, .. } => &[(0, 3), (0, 2), (0, 0)],
            Op::RmsNormGrad { addend: false, .. } => &[(0, 2), (0, 0)],
            Op::GatedActGrad(_) => &[(0, 0), (1, 1), (0, 2), (1, 2)],
            Op::Embed
            | Op::Linear { .. }
            | Op::RopeTable(_)
            | Op::Attention(_)
            | Op::GatherRows
            | Op::LmHeadLoss(_)
            | Op::ScatterRows
            | Op::RmsNormWeightGrad { .. }
            | Op::LinearGrad { .. }
            | Op::WeightGrad { .. }
            | Op::BiasGrad
            | Op::AttentionGrad(_)
            | Op::EmbedGrad
            | Op::GradNorm { .. }
            | Op::AdamW(_)
            | Op::Zero => &[],
        }
    }

    /// The shape rule: output types from input types, or what does not fit.
    pub fn infer(&self, inputs: &[&Type], updates: &[&Type]) -> Result<Vec<Type>, ShapeError> {
        let rule = Rule { op: self.name(), inputs, updates };
        match self {
            Op::Embed => {
                rule.count(2, 0)?;
                rule.integers(0, Dim::Tokens, DType::I32)?;
                let (_, c) = rule.weight(1)?;
                Ok(vec![Type::f32(Shape::of(Dim::Tokens, c))])
            }
            Op::RmsNorm { .. } => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.norm_weight(inputs[1], c)?;
                Ok(vec![Type::f32(Shape::of(rows, c))])
            }
            Op::Dropout { .. } => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.integers(1, rows, DType::U64)?;
                Ok(vec![Type::f32(Shape::of(rows, c))])
            }
            Op::Linear { bias, lora } => {
                rule.count(2 + usize::from(*bias) + if lora.is_some() { 2 } else { 0 }, 0)?;
                let (rows, k) = rule.activation(0)?;
                let (n, weight_k) = rule.weight(1)?;
                rule.equal("inner size", k, weight_k)?;
                if *bias {
                    rule.real_vector(inputs[2], n)?;
                }
                if lora.is_some() {
                    let first = 2 + usize::from(*bias);
                    let (h_rows, rank) = rule.activation(first)?;
                    rule.equal("rows", rows, h_rows)?;
                    rule.equal("lora b", rule.weight(first + 1)?, (n, rank))?;
                }
                Ok(vec![Type::f32(Shape::of(rows, n))])
            }
            Op::RopeTable(rope) => {
                rule.count(1, 0)?;
                rule.integers(0, Dim::Tokens, DType::I32)?;
                Ok(vec![Type::f32(Shape::of(Dim::Tokens, rope.dim))])
            }
            Op::Rope { heads, .. } => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                let (table_rows, dim) = rule.activation(1)?;
                rule.equal("rows", rows, table_rows)?;
                rule.require(c % heads == 0 && dim <= c / heads && dim % 2 == 0, || {
                    format!("{c} channels in {heads} heads, {dim} of each turned")
                })?;
                Ok(vec![Type::f32(Shape::of(rows, c))])
            }
            Op::Attention(shape) => {
                rule.count(4, 0)?;
                rule.attention_operands(shape)?;
                rule.integers(3, Dim::Boundaries, DType::I32)?;
                let (q, _) = shape.channels();
                Ok(vec![Type::f32(Shape::of(Dim::Tokens, q)), Type::f32(Shape::of(Dim::Tokens, shape.heads))])
            }
            Op::GatedAct(_) | Op::Add => {
                rule.count(2, 0)?;
                let shape = rule.activation(0)?;
                rule.equal("operands", shape, rule.activation(1)?)?;
                Ok(vec![Type::f32(Shape::of(shape.0, shape.1))])
            }
            Op::GatherRows => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.equal("rows", rows, Dim::Tokens)?;
                rule.integers(1, Dim::Rows, DType::I32)?;
                Ok(vec![Type::f32(Shape::of(Dim::Rows, c))])
            }
            Op::LmHeadLoss(head) => rule.lm_head_loss(head),
            Op::ScatterRows => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.equal("rows", rows, Dim::Rows)?;
                rule.integers(1, Dim::Rows, DType::I32)?;
                Ok(vec![Type::f32(Shape::of(Dim::Tokens, c))])
            }
            Op::RmsNormGrad { addend, .. } => {
                rule.count(3 + usize::from(*addend), 0)?;
                let shape = rule.activation(0)?;
                rule.norm_weight(inputs[1], shape.1)?;
                for operand in 2..inputs.len() {
                    rule.equal("operands", shape, rule.activation(operand)?)?;
                }
                Ok(vec![Type::f32(Shape::of(shape.0, shape.1))])
            }
            Op::RmsNormWeightGrad { .. } => {
                rule.count(2, 1)?;
                let shape = rule.activation(0)?;
                rule.equal("operands", shape, rule.activation(1)?)?;
                rule.norm_weight(updates[0], shape.1)?;
                rule.f32_update(0, &updates[0].shape)?;
                Ok(vec![])
            }
            Op::LinearGrad { scales } => {
                rule.count(2 * scales.len(), 0)?;
                rule.require(!scales.is_empty(), || "no terms".into())?;
                let (rows, _) = rule.activation(0)?;
                let (_, k) = rule.weight(1)?;
                for term in 0..scales.len() {
                    let (n, term_k) = rule.weight(2 * term + 1)?;
                    rule.equal("term", rule.activation(2 * term)?, (rows, n))?;
                    rule.equal("columns", term_k, k)?;
                }
                Ok(vec![Type::f32(Shape::of(rows, k))])
            }
            Op::WeightGrad { .. } => {
                rule.count(2, 1)?;
                let (rows, n) = rule.activation(0)?;
                let (x_rows, k) = rule.activation(1)?;
                rule.equal("rows", rows, x_rows)?;
                rule.f32_update(0, &Shape::matrix(n, k))?;
                Ok(vec![])
            }
            Op::BiasGrad => {
                rule.count(1, 1)?;
                let (_, n) = rule.activation(0)?;
                rule.f32_update(0, &Shape::vector(n))?;
                Ok(vec![])
            }
            Op::AttentionGrad(shape) => {
                rule.count(7, 0)?;
                rule.attention_operands(shape)?;
                let (q, kv) = shape.channels();
                rule.equal("o", rule.activation(3)?, (Dim::Tokens, q))?;
                rule.equal("lse", rule.activation(4)?, (Dim::Tokens, shape.heads))?;
                rule.equal("do", rule.activation(5)?, (Dim::Tokens, q))?;
                rule.integers(6, Dim::Boundaries, DType::I32)?;
                Ok([q, kv, kv].map(|c| Type::f32(Shape::of(Dim::Tokens, c))).to_vec())
            }
            Op::GatedActGrad(_) => {
                rule.count(3, 0)?;
                let shape = rule.activation(0)?;
                rule.equal("up", rule.activation(1)?, shape)?;
                rule.equal("dy", rule.activation(2)?, shape)?;
                Ok(vec![Type::f32(Shape::of(shape.0, shape.1)); 2])
            }
            Op::EmbedGrad => {
                rule.count(2, 1)?;
                rule.integers(0, Dim::Tokens, DType::I32)?;
                let (_, c) = rule.activation(1)?;
                let table = &updates[0].shape;
                rule.require(table.0.len() == 2 && table.0[1] == Dim::Const(c), || format!("table {table}"))?;
                rule.f32_update(0, table)?;
                Ok(vec![])
            }
            Op::GradNorm { .. } => {
                rule.require(!inputs.is_empty() && updates.len() == 1, || "a loss and a report".into())?;
                rule.scalars(inputs[0], 1)?;
                rule.scalars(updates[0], 4)?;
                for gradient in &inputs[1..] {
                    rule.require(gradient.storage == Storage::F32, || format!("gradient {gradient}"))?;
                }
                Ok(vec![])
            }
            Op::AdamW(_) => {
                rule.count(3, 3)?;
                for state in 0..3 {
                    rule.f32_update(state, &inputs[0].shape)?;
                }
                rule.scalars(inputs[1], 4)?;
                rule.scalars(inputs[2], 2)?;
                Ok(vec![])
            }
            Op::Zero => {
                rule.count(0, 1)?;
                Ok(vec![])
            }
        }
    }
}

impl AttentionShape {
    /// Channels of a query row and of a key or value row.
    pub fn channels(&self) -> (usize, usize) {
        (self.heads * self.head_dim, self.kv_heads * self.head_dim)
    }
}

/// The operands of one node and the ways in which they can be wrong.
struct Rule<'a> {
    op: &'static str,
    inputs: &'a [&'a Type],
    updates: &'a [&'a Type],
}

impl Rule<'_> {
    fn error(&self, what: String) -> ShapeError {
        ShapeError { op: self.op, what }
    }

    fn require(&self, holds: bool, what: impl FnOnce() -> String) -> Result<(), ShapeError> {
        if holds { Ok(()) } else { Err(self.error(what())) }
    }

    fn count(&self, inputs: usize, updates: usize) -> Result<(), ShapeError> {
        self.require(self.inputs.len() == inputs && self.updates.len() == updates, || {
            format!(
                "expected {inputs} inputs and {updates} updates, got {} and {}",
                self.inputs.len(),
                self.updates.len()
            )
        })
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&self, what: &str, left: T, right: T) -> Result<(), ShapeError> {
        self.require(left == right, || format!("{what}: {left:?} against {right:?}"))
    }

    /// An f32 matrix over T or S rows.
    fn activation(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [rows @ (Dim::Tokens | Dim::Rows), Dim::Const(c)] if operand.storage == Storage::F32 => {
                Ok((*rows, *c))
            }
            _ => Err(self.error(format!("input {input} must be f32 rows, got {operand}"))),
        }
    }

    /// A constant matrix of any storage.
    fn weight(&self, input: usize) -> Result<(usize, usize), ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [Dim::Const(n), Dim::Const(k)] if operand.storage.is_real() => Ok((*n, *k)),
            _ => Err(self.error(format!("input {input} must be a matrix, got {operand}"))),
        }
    }

    fn real_vector(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let fits = operand.shape == Shape::vector(n) && operand.storage.is_real();
        self.require(fits, || format!("expected {n} numbers, got {operand}"))
    }

    /// A vector as long as all channels, or as one of several equal groups of them.
    fn norm_weight(&self, operand: &Type, channels: usize) -> Result<(), ShapeError> {
        let fits = match operand.shape.0.as_slice() {
            [Dim::Const(n)] => operand.storage.is_real() && *n > 0 && channels.is_multiple_of(*n),
            _ => false,
        };
        self.require(fits, || format!("a norm over {channels} channels cannot have the weight {operand}"))
    }

    fn integers(&self, input: usize, dim: Dim, dtype: DType) -> Result<(), ShapeError> {
        let expected = Type::new(Shape::rows_of(dim), Storage::Plain(dtype));
        let got = self.inputs[input];
        self.require(*got == expected, || format!("input {input} must be {expected}, got {got}"))
    }

    fn scalars(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let expected = Type::new(Shape::vector(n), Storage::Plain(DType::F64));
        self.require(*operand == expected, || format!("expected {expected}, got {operand}"))
    }

    fn f32_update(&self, update: usize, shape: &Shape) -> Result<(), ShapeError> {
        let got = self.updates[update];
        self.require(got.storage == Storage::F32 && got.shape == *shape, || {
            format!("update {update} must be f32 {shape}, got {got}")
        })
    }

    fn attention_operands(&self, shape: &AttentionShape) -> Result<(), ShapeError> {
        let (q, kv) = shape.channels();
        self.require(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads), || {
            format!("{shape:?}")
        })?;
        self.equal("q", self.activation(0)?, (Dim::Tokens, q))?;
        self.equal("k", self.activation(1)?, (Dim::Tokens, kv))?;
        self.equal("v", self.activation(2)?, (Dim::Tokens, kv))
    }

    fn lm_head_loss(&self, head: &LossHead) -> Result<Vec<Type>, ShapeError> {
        let adapted = head.lora.is_some();
        let gradients = usize::from(head.gradient && adapted) + usize::from(head.train_head);
        self.count(if adapted { 6 } else { 4 }, 1 + gradients)?;
        self.require(head.gradient || !head.train_head, || "a trained head without a gradient".into())?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        let (v, head_c) = self.weight(1)?;
        self.equal("channels", c, head_c)?;
        self.integers(2, Dim::Rows, DType::I32)?;
        self.scalars(self.inputs[3], 1)?;
        self.scalars(self.updates[0], 1)?;
        let mut outputs = if head.gradient { vec![Type::f32(Shape::of(Dim::Rows, c))] } else { vec![] };
        if adapted {
            let (h_rows, rank) = self.activation(4)?;
            self.equal("rows", h_rows, Dim::Rows)?;
            self.equal("lora b", self.weight(5)?, (v, rank))?;
            if head.gradient {
                outputs.push(Type::f32(Shape::of(Dim::Rows, rank)));
                self.f32_update(1, &Shape::matrix(v, rank))?;
            }
        }
        if head.train_head {
            self.f32_update(gradients, &Shape::matrix(v, c))?;
        }
        Ok(outputs)
    }
}
