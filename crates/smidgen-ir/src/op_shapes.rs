//! The shape rule of every operation: which operands fit, and the types of the outputs.
//!
//! `Graph::emit` applies the rule when a stage builds a node, and `verify` applies it again between stages. A violation is
//! a bug of the stage, so the message names the operation and both sides.

mod attention;
mod audio;
mod fp8;
mod rows;

use crate::loss_head::{HeadPiece, LossHead};
use crate::op::{Op, ShapeError};
use crate::op_attributes::ACTIVITY_COLUMNS;
use crate::shape::{Dim, Extent, Shape, Type};
use crate::storage::{DType, Storage};

impl Op {
    /// Output types from the types of inputs and updates, or the operand that does not fit.
    pub fn infer(&self, inputs: &[&Type], updates: &[&Type]) -> Result<Vec<Type>, ShapeError> {
        let rule = Rule { op: self.name(), inputs, updates };
        match self {
            Op::Embed { element, .. } => {
                rule.count(2, 0)?;
                rule.integers(0, Dim::Tokens, DType::I32)?;
                let (_, c) = rule.weight(1)?;
                Ok(vec![Type::new(Shape::of(Dim::Tokens, c), Storage::Plain(*element))])
            }
            Op::RmsNorm { unweighted, .. } => rule.rms_norm(*unweighted),
            Op::Dropout { .. } => {
                rule.count(2, 0)?;
                let (rows, _) = rule.activation(0)?;
                rule.integers(1, rows, DType::U64)?;
                rule.same_as_first()
            }
            Op::Linear { bias, lora } => {
                rule.count(2 + usize::from(*bias) + if lora.is_some() { 2 } else { 0 }, 0)?;
                let (rows, k) = rule.matmul_input(0)?;
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
                Ok(vec![rule.matmul_output(Shape::of(rows, n))])
            }
            Op::ScaleColumns { bias } => {
                rule.count(3 + usize::from(*bias), 0)?;
                let (_, n) = rule.activation(0)?;
                rule.f32_vector(inputs[1], n)?;
                rule.f32_vector(inputs[2], n)?;
                if *bias {
                    rule.real_vector(inputs[3], n)?;
                }
                rule.same_as_first()
            }
            Op::Fourier { .. } => {
                rule.count(5, 0)?;
                let (rows, n) = rule.activation(0)?;
                rule.fourier_operands(1, rows, n)?;
                rule.same_as_first()
            }
            Op::RopeTable(rope) => rule.rope_table(rope),
            Op::Rope { heads, .. } => rule.rope(*heads),
            Op::Attention(shape) => rule.attention(shape),
            Op::GatedAct(_) => rule.gated_act(),
            Op::Add { .. } => {
                rule.count(2, 0)?;
                let shape = rule.activation(0)?;
                rule.equal("operands", shape, rule.activation(1)?)?;
                rule.same_as_first()
            }
            Op::SliceColumns { first, columns } => rule.slice_columns(*first, *columns),
            Op::PlaceColumns { firsts, columns } => rule.place_columns(firsts, *columns),
            Op::ScaleBy => rule.scale_by(),
            Op::ScaleByGrad => rule.scale_by_grad(),
            Op::GatherRows => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.equal("rows", rows, Dim::Tokens)?;
                rule.integers(1, Dim::Rows, DType::I32)?;
                Ok(vec![rule.like_first(Shape::of(Dim::Rows, c))])
            }
            Op::LmHeadLoss(head) => rule.lm_head_loss(head),
            Op::HeadSums(piece) => {
                rule.count(3 + usize::from(piece.continues), 0)?;
                rule.head_piece(piece, 3, 3)?;
                Ok(vec![Type::f32(Shape::of(Dim::Rows, 3))])
            }
            Op::HeadLoss { row_losses } => {
                rule.count(2, 1 + usize::from(*row_losses))?;
                rule.equal("sums", rule.f32_rows(0)?, (Dim::Rows, 3))?;
                rule.scalars(inputs[1], 1)?;
                rule.scalars(updates[0], 1)?;
                if *row_losses {
                    rule.f32_update(1, &Shape::rows_of(Dim::Rows))?;
                }
                Ok(vec![])
            }
            Op::HeadGrad { piece, ends } => {
                rule.count(5 + usize::from(piece.continues), 0)?;
                let c = rule.activation(0)?.1;
                rule.head_piece(piece, 5, c)?;
                rule.scalars(inputs[3], 1)?;
                rule.equal("sums", rule.f32_rows(4)?, (Dim::Rows, 3))?;
                let shape = Shape::of(Dim::Rows, c);
                Ok(vec![if *ends { rule.like_first(shape) } else { Type::f32(shape) }])
            }
            Op::Logits { lora, first_word, .. } => {
                rule.count(if lora.is_some() { 4 } else { 2 }, 1)?;
                let (rows, c) = rule.activation(0)?;
                rule.equal("rows", rows, Dim::Rows)?;
                let (n, head_c) = rule.weight(1)?;
                rule.equal("channels", c, head_c)?;
                if lora.is_some() {
                    let (h_rows, rank) = rule.activation(2)?;
                    rule.equal("rows", h_rows, Dim::Rows)?;
                    rule.equal("lora b", rule.weight(3)?, (n, rank))?;
                }
                let v = updates[0].shape.at(&Extent::default()).1;
                rule.require(first_word + n <= v, || format!("words {first_word}+{n} of {v}"))?;
                rule.f32_update(0, &Shape::of(Dim::Rows, v))?;
                Ok(vec![])
            }
            Op::CacheRows => rule.cache_rows(),
            Op::CachedAttention(shape) => rule.cached_attention(shape),
            Op::PlaceRows { clear } => rule.place_rows(*clear),
            Op::TakeRows => rule.take_rows(),
            Op::LayerNorm { bias, .. } => rule.layer_norm(*bias),
            Op::LayerNormGrad { addend, .. } => rule.layer_norm_grad(*addend),
            Op::AddBias => rule.add_bias(),
            Op::Scale { .. } | Op::Act(_) => rule.one_activation(),
            Op::ActGrad(_) => rule.act_grad(),
            Op::CausalConv { backward } => rule.causal_conv(*backward),
            Op::ChunkAttention(shape) => rule.chunk_attention(shape),
            Op::ChunkAttentionGrad(shape) => rule.chunk_attention_grad(shape),
            Op::StridedConv(conv) => rule.strided_conv(conv),
            Op::JoinPlaces { places } => rule.join_places(*places),
            Op::MaskRows { stored } => rule.mask_rows(*stored),
            Op::ScatterRows => {
                rule.count(2, 0)?;
                let (rows, c) = rule.activation(0)?;
                rule.equal("rows", rows, Dim::Rows)?;
                rule.integers(1, Dim::Rows, DType::I32)?;
                Ok(vec![rule.like_first(Shape::of(Dim::Tokens, c))])
            }
            Op::RmsNormGrad { addend, unweighted, .. } => rule.rms_norm_grad(*unweighted, *addend),
            Op::RmsNormWeightGrad { .. } | Op::LayerNormWeightGrad { .. } => rule.norm_weight_grad(),
            Op::LinearGrad { scales } => {
                rule.count(2 * scales.len(), 0)?;
                rule.require(!scales.is_empty(), || "no terms".into())?;
                let (rows, _) = rule.matmul_input(0)?;
                let (_, k) = rule.weight(1)?;
                for term in 0..scales.len() {
                    let (n, term_k) = rule.weight(2 * term + 1)?;
                    rule.equal("term", rule.matmul_input(2 * term)?, (rows, n))?;
                    rule.equal("columns", term_k, k)?;
                }
                Ok(vec![rule.matmul_output(Shape::of(rows, k))])
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
            Op::MagnitudeGrad => {
                rule.count(3, 1)?;
                let shape = rule.activation(0)?;
                rule.equal("operands", shape, rule.activation(1)?)?;
                rule.f32_vector(inputs[2], shape.1)?;
                rule.f32_update(0, &Shape::vector(shape.1))?;
                Ok(vec![])
            }
            Op::FourierGrad { .. } => {
                rule.count(5, 2)?;
                let (rows, n) = rule.activation(4)?;
                rule.fourier_operands(0, rows, n)?;
                rule.f32_update(0, &Shape::matrix(1, 4))?;
                rule.f32_update(1, &Shape::matrix(1, 1))?;
                Ok(vec![rule.like_first(Shape::of(rows, n))])
            }
            Op::AttentionGrad(shape) => rule.attention_grad(shape),
            Op::SinksGrad => rule.sinks_grad(),
            Op::GatedActGrad(_) => rule.gated_act_grad(),
            Op::EmbedGrad { .. } => {
                rule.count(2, 1)?;
                rule.integers(0, Dim::Tokens, DType::I32)?;
                let (_, c) = rule.activation(1)?;
                let table = &updates[0].shape;
                rule.require(table.0.len() == 2 && table.0[1] == Dim::Const(c), || format!("table {table}"))?;
                rule.f32_update(0, table)?;
                Ok(vec![])
            }
            Op::FourierReg { .. } => {
                rule.count(2, 2)?;
                let (modules, four) = rule.weight(0)?;
                rule.equal("coefficients", four, 4)?;
                rule.scalars(inputs[1], 3)?;
                rule.scalars(updates[0], 1)?;
                rule.f32_update(1, &Shape::matrix(modules, 4))?;
                Ok(vec![])
            }
            Op::RowNorms { .. } => {
                rule.count(3, 1)?;
                let (n, k) = rule.weight(0)?;
                let (rank, a_k) = rule.weight(1)?;
                rule.equal("columns", k, a_k)?;
                rule.equal("lora b", rule.weight(2)?, (n, rank))?;
                rule.f32_update(0, &Shape::vector(n))?;
                Ok(vec![])
            }
            Op::Round { to: Some(dtype), .. } => {
                rule.count(1, 0)?;
                let (n, k) = rule.weight(0)?;
                Ok(vec![Type::new(Shape::matrix(n, k), Storage::Plain(*dtype))])
            }
            Op::Round { to: None, .. } => {
                rule.count(1, 1)?;
                let (n, k) = rule.weight(0)?;
                let fits = updates[0].shape == Shape::matrix(n, k) && updates[0].storage.plain().is_some();
                rule.require(fits && updates[0].storage.is_real(), || format!("rounded {}", updates[0]))?;
                Ok(vec![])
            }
            Op::RoundFp8 { scaled } => rule.round_fp8(*scaled),
            Op::Widen => {
                rule.count(1, 0)?;
                let (n, k) = rule.weight(0)?;
                rule.require(inputs[0].storage == Storage::Plain(DType::Bf16), || {
                    format!("weight {}", inputs[0])
                })?;
                Ok(vec![Type::f32(Shape::matrix(n, k))])
            }
            Op::RoundAtRandom(_) => {
                rule.count(2, 1)?;
                let (n, k) = rule.weight(0)?;
                let expected = Type::new(Shape::matrix(n, k), Storage::Plain(DType::Bf16));
                rule.require(inputs[0].storage == Storage::F32 && *updates[0] == expected, || {
                    format!("{} as {}", inputs[0], updates[0])
                })?;
                rule.scalars(inputs[1], 3)?;
                Ok(vec![])
            }
            Op::SquaredNorm => {
                rule.require(!inputs.is_empty() && updates.len() == 1, || {
                    "expected at least one part and one sum".into()
                })?;
                rule.scalars(updates[0], 1)?;
                for part in inputs {
                    rule.require(part.storage == Storage::F32, || format!("part {part}"))?;
                }
                Ok(vec![])
            }
            Op::GradNorm { squares, .. } => {
                rule.require(inputs.len() >= 2 + usize::from(*squares) && updates.len() == 1, || {
                    "expected a loss, hyperparameters and one report".into()
                })?;
                let (inputs, more) = inputs.split_at(inputs.len() - usize::from(*squares));
                let is_vector = |squares: &&Type| {
                    squares.storage == Storage::Plain(DType::F64)
                        && matches!(squares.shape.0.as_slice(), [Dim::Const(_)])
                };
                rule.require(more.iter().all(is_vector), || "squares must be an f64 vector".into())?;
                rule.scalars(inputs[0], 1)?;
                rule.scalars(inputs[1], 3)?;
                rule.scalars(updates[0], 4)?;
                for gradient in &inputs[2..] {
                    rule.require(gradient.storage == Storage::F32, || format!("gradient {gradient}"))?;
                }
                Ok(vec![])
            }
            Op::AdamW(_) => rule.adamw([Storage::F32; 2]),
            Op::AdamW8(_) => rule.adamw(MOMENTS_IN_8_BITS),
            Op::AdamWOnHost(_) => {
                let in_f32 = updates.get(1).is_some_and(|moment| moment.storage == Storage::F32);
                let moments = if in_f32 { [Storage::F32; 2] } else { MOMENTS_IN_8_BITS };
                rule.adamw(moments)
            }
            Op::Zero => {
                rule.count(0, 1)?;
                Ok(vec![])
            }
            Op::Fetch => {
                rule.count(1, 0)?;
                Ok(vec![inputs[0].clone()])
            }
            Op::Stow => {
                rule.require(inputs.len() == 1 && updates.len() <= 1, || {
                    "expected one input and at most one update".into()
                })?;
                let Some(copy) = updates.first() else { return Ok(vec![inputs[0].clone()]) };
                rule.require(*copy == inputs[0], || format!("{} stowed as {copy}", inputs[0]))?;
                Ok(vec![])
            }
            Op::AllReduce(_) => {
                rule.require(inputs.is_empty() && !updates.is_empty(), || "expected only updates".into())?;
                let is_summed = |ty: &&Type| matches!(ty.storage, Storage::Plain(DType::F32 | DType::F64));
                rule.require(updates.iter().all(is_summed), || "only f32 and f64 are summed".into())?;
                Ok(vec![])
            }
            Op::ReduceScatter(_) => {
                rule.require(inputs.len() == updates.len() && !inputs.is_empty(), || {
                    "expected one part for each input".into()
                })?;
                for (whole, part) in inputs.iter().zip(updates) {
                    let fits = whole.storage == Storage::F32
                        && part.storage == Storage::F32
                        && whole.shape.0[1..] == part.shape.0[1..];
                    rule.require(fits, || format!("{part} is not a part of {whole}"))?;
                }
                Ok(vec![])
            }
            Op::AllGather(_) => match inputs {
                [] => {
                    rule.require(!updates.is_empty(), || "expected an input or updates".into())?;
                    Ok(vec![])
                }
                [divided] => {
                    rule.count(1, 0)?;
                    Ok(vec![(*divided).clone()])
                }
                [divided, part] => {
                    rule.count(2, 0)?;
                    let fits = divided.shape.0[1..] == part.shape.0[1..];
                    rule.require(fits, || format!("{part} is not a part of {divided}"))?;
                    Ok(vec![Type::new(divided.shape.clone(), part.storage)])
                }
                _ => Err(rule.error("expected at most a value and its part".into())),
            },
            Op::Stowed => {
                rule.count(2, 0)?;
                // What was scattered over ranks has fewer rows here.
                let fits = inputs[0].storage == inputs[1].storage
                    && inputs[0].shape.0[1..] == inputs[1].shape.0[1..];
                rule.require(fits, || format!("{} stowed as {}", inputs[0], inputs[1]))?;
                Ok(vec![])
            }
        }
    }
}

/// The storages of the first and second moment in 8 bits.
const MOMENTS_IN_8_BITS: [Storage; 2] =
    [Storage::Dynamic8 { signed: true }, Storage::Dynamic8 { signed: false }];

/// The operands of one node, with the checks that rules are made of.
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

    /// For operations with one output of the type of their first input.
    fn same_as_first(&self) -> Result<Vec<Type>, ShapeError> {
        Ok(vec![self.inputs[0].clone()])
    }

    /// The type of an output with the storage of the first input.
    fn like_first(&self, shape: Shape) -> Type {
        Type::new(shape, self.inputs[0].storage)
    }

    /// A matrix over T, S or audio rows or a tile of T, stored like the other activations.
    fn activation(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        let (operand, first) = (self.inputs[input], self.inputs[0]);
        let is_number =
            |ty: &Type| matches!(ty.storage, Storage::Plain(DType::F32 | DType::Bf16 | DType::F16));
        match self.rows_and_columns(input) {
            Some(size) if is_number(operand) && (operand.storage == first.storage || !is_number(first)) => {
                Ok(size)
            }
            _ => Err(self.error(format!("input {input} must be rows of numbers, got {operand}"))),
        }
    }

    fn rows_and_columns(&self, input: usize) -> Option<(Dim, usize)> {
        match self.inputs[input].shape.0.as_slice() {
            [rows @ (Dim::Tokens | Dim::Tile { .. } | Dim::Rows | Dim::Audio(_)), Dim::Const(c)] => {
                Some((*rows, *c))
            }
            _ => None,
        }
    }

    /// An f32 matrix over T, S or audio rows, independent of the storage of activations.
    fn f32_rows(&self, input: usize) -> Result<(Dim, usize), ShapeError> {
        let operand = self.inputs[input];
        match operand.shape.0.as_slice() {
            [rows @ (Dim::Tokens | Dim::Rows | Dim::Audio(_)), Dim::Const(c)]
                if operand.storage == Storage::F32 =>
            {
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

    fn f32_vector(&self, operand: &Type, n: usize) -> Result<(), ShapeError> {
        let expected = Type::f32(Shape::vector(n));
        self.require(*operand == expected, || format!("expected {expected}, got {operand}"))
    }

    /// h, b, coefficients and sigma, from input `first` on, for activations (rows, n).
    fn fourier_operands(&self, first: usize, rows: Dim, n: usize) -> Result<(), ShapeError> {
        let (h_rows, rank) = self.activation(first)?;
        self.equal("rows", rows, h_rows)?;
        self.equal("lora b", self.weight(first + 1)?, (n, rank))?;
        self.equal("coefficients", self.inputs[first + 2], &Type::f32(Shape::matrix(1, 4)))?;
        self.equal("sigma", self.inputs[first + 3], &Type::f32(Shape::matrix(1, 1)))
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

    /// x, rows of the head and labels; input `before` is the result (S, `columns`) of earlier pieces.
    fn head_piece(&self, piece: &HeadPiece, before: usize, columns: usize) -> Result<(), ShapeError> {
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        self.equal("channels", c, self.weight(1)?.1)?;
        self.integers(2, Dim::Rows, DType::I32)?;
        if piece.continues {
            self.equal("pieces before", self.f32_rows(before)?, (Dim::Rows, columns))?;
        }
        Ok(())
    }

    /// `moments` are the storages of the first and the second moment.
    fn adamw(&self, moments: [Storage; 2]) -> Result<Vec<Type>, ShapeError> {
        self.count(3, 4)?;
        let gradient = self.inputs[0];
        self.require(gradient.storage == Storage::F32, || format!("gradient {gradient}"))?;
        self.f32_update(0, &gradient.shape)?;
        for (moment, storage) in moments.into_iter().enumerate() {
            let (got, expected) = (self.updates[1 + moment], Type::new(gradient.shape.clone(), storage));
            self.require(*got == expected, || {
                format!("update {} must be {expected}, got {got}", 1 + moment)
            })?;
        }
        self.f32_update(3, &Shape::matrix(1, ACTIVITY_COLUMNS))?;
        self.scalars(self.inputs[1], 4)?;
        self.scalars(self.inputs[2], 3)?;
        Ok(vec![])
    }

    fn lm_head_loss(&self, head: &LossHead) -> Result<Vec<Type>, ShapeError> {
        let adapted = head.lora.is_some();
        let gradients = usize::from(head.gradient && adapted) + usize::from(head.train_head);
        self.count(if adapted { 6 } else { 4 }, 1 + gradients + usize::from(head.row_losses))?;
        self.require(head.gradient || !head.train_head, || "a trained head without a gradient".into())?;
        self.require(!(head.gradient && head.row_losses), || "row losses together with a gradient".into())?;
        let (rows, c) = self.activation(0)?;
        self.equal("rows", rows, Dim::Rows)?;
        let (v, head_c) = self.weight(1)?;
        self.equal("channels", c, head_c)?;
        self.integers(2, Dim::Rows, DType::I32)?;
        self.scalars(self.inputs[3], 1)?;
        self.scalars(self.updates[0], 1)?;
        let mut outputs = if head.gradient { vec![self.like_first(Shape::of(Dim::Rows, c))] } else { vec![] };
        if adapted {
            let (h_rows, rank) = self.activation(4)?;
            self.equal("rows", h_rows, Dim::Rows)?;
            self.equal("lora b", self.weight(5)?, (v, rank))?;
            if head.gradient {
                outputs.push(self.like_first(Shape::of(Dim::Rows, rank)));
                self.f32_update(1, &Shape::matrix(v, rank))?;
            }
        }
        if head.train_head {
            self.f32_update(gradients, &Shape::matrix(v, c))?;
        }
        if head.row_losses {
            self.f32_update(1, &Shape::rows_of(Dim::Rows))?;
        }
        Ok(outputs)
    }
}
