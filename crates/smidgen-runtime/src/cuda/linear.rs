//! The products of a step: linears with their adapters, their gradients, and sums over tokens.
//!
//! A weight that is not stored in the numbers of products is decoded into scratch first. Where an adapter's operands
//! lie beside those of its linear, both are one product, `[x | h]·[W | B]ᵀ` and `[dy | dh]·[W ; A]`: h and dh are
//! copied into spare columns, B and A lie in the weight's own room or are copied beside the decoded weight.
//! Otherwise the adapter is a second product, added to the first.

use super::decode::decode_rows;
use super::matmul::{Matmul, Matrix, Sizes};
use super::stage::{Arg, KernelFile, Stage};
use super::thin;
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::plan::align_up;
use smidgen_ir::workspace_cuda::{MATMUL_BYTES, spare_columns};
use smidgen_ir::{DType, Op, Storage};

pub const FILE: KernelFile = KernelFile {
    name: "matmul.cu",
    source: include_str!("../../kernels/matmul.cu"),
    kernels: &["lay_beside", "broadcast_row", "fill_with_noise"],
};

/// The step's scratch, handed out from its begin. Products take the last part.
#[derive(Debug)]
pub struct Scratch {
    next: u64,
    end: u64,
}

impl Scratch {
    pub fn of(stage: &Stage<'_>) -> Scratch {
        let (pointer, bytes) = stage.workspace();
        Scratch { next: pointer, end: pointer + bytes as u64 }
    }

    pub fn take(&mut self, bytes: usize) -> u64 {
        let pointer = self.next;
        self.next += align_up(bytes) as u64;
        assert!(self.next <= self.end, "{bytes} bytes of scratch that were not planned");
        pointer
    }
}

/// An activation, a gradient or a weight as it lies.
pub fn matrix(stage: &Stage<'_>, operand: &Operand) -> Matrix {
    let element = operand.storage.plain().expect("only plain numbers are a matrix as they lie");
    Matrix { pointer: stage.pointer(operand), stride: operand.stride, element }
}

impl Matrix {
    /// From a row and a column on.
    pub fn at(self, row: usize, column: usize) -> Matrix {
        let elements = row * self.stride + column;
        Matrix { pointer: self.pointer + (elements * self.element.bytes()) as u64, ..self }
    }
}

/// Copies rows to where a product wants them, and fills up to `padded` columns with zeros.
pub fn lay_beside(
    stage: &Stage<'_>,
    from: Matrix,
    to: Matrix,
    rows: usize,
    columns: usize,
    padded: usize,
) -> Result<(), DeviceError> {
    if rows == 0 {
        return Ok(());
    }
    let args = [
        Arg::Pointer(from.pointer),
        Arg::Long(from.stride as i64),
        Arg::Pointer(to.pointer),
        Arg::Long(to.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(columns as i32),
        Arg::Int(padded as i32),
    ];
    let blocks = (rows * padded).div_ceil(256);
    stage.launch("lay_beside", [blocks as u32, 1, 1], 256, 0, &args)
}

/// Writes a stored vector into every row.
fn broadcast_row(stage: &Stage<'_>, bias: &Operand, output: &Operand) -> Result<(), DeviceError> {
    let rows = stage.rows(output);
    if rows == 0 {
        return Ok(());
    }
    let args = [
        Arg::Pointer(stage.pointer(bias)),
        Arg::Int(stored_code(bias)),
        Arg::Pointer(stage.pointer(output)),
        Arg::Long(output.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(output.columns as i32),
    ];
    let blocks = [output.columns.div_ceil(256) as u32, rows.min(4096) as u32, 1];
    stage.launch("broadcast_row", blocks, 256, 0, &args)
}

/// The prelude's name for the numbers of a stored vector.
pub fn stored_code(operand: &Operand) -> i32 {
    match operand.storage {
        Storage::Plain(DType::F32) => 0,
        Storage::Plain(DType::Bf16) => 1,
        Storage::Plain(DType::F16) => 2,
        storage => unreachable!("`check` refuses vectors stored as {storage}"),
    }
}

fn is_as_products_take_it(stage: &Stage<'_>, operand: &Operand) -> bool {
    operand.storage == Storage::Plain(stage.activations())
}

/// Where a decoded weight leaves room for its adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    None,
    /// So many columns behind each row.
    Beside(usize),
    /// So many rows behind the last.
    Beneath(usize),
}

/// A weight in the numbers of products: as it lies, or decoded with room for its adapter.
pub fn weight_matrix(
    stage: &Stage<'_>,
    scratch: &mut Scratch,
    weight: &Operand,
    room: Room,
) -> Result<Matrix, DeviceError> {
    if is_as_products_take_it(stage, weight) {
        return Ok(matrix(stage, weight));
    }
    let (beside, beneath) = match room {
        Room::None => (0, 0),
        Room::Beside(columns) => (columns, 0),
        Room::Beneath(rows) => (0, rows),
    };
    let (rows, stride, element) = (stage.rows(weight), weight.columns + beside, stage.activations());
    let pointer = scratch.take((rows + beneath) * stride * element.bytes());
    decode_rows(stage, weight, 0, rows, pointer, stride)?;
    Ok(Matrix { pointer, stride, element })
}

/// y = x·Wᵀ + bias + scale·h·Bᵀ, and `residual` if there is one.
pub fn linear(
    stage: &Stage<'_>,
    step: &BoundStep,
    bias: bool,
    lora: Option<f32>,
    residual: Option<&Operand>,
) -> Result<(), DeviceError> {
    let (x, weight, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    if !bias && lora.is_none() && residual.is_none() && thin::thin_matmul_fits(stage, x, weight, y) {
        return thin::thin_matmul(stage, x, weight, y);
    }
    let adapter = lora.map(|scale| {
        let first = 2 + usize::from(bias);
        (&step.inputs[first], &step.inputs[first + 1], scale)
    });
    let mut scratch = Scratch::of(stage);
    let rank = adapter.map_or(0, |(h, _, _)| h.columns);
    let spare = spare_columns(rank);
    let has_room = rank > 0 && x.stride >= x.columns + spare;
    let stored = is_as_products_take_it(stage, weight);
    let w =
        weight_matrix(stage, &mut scratch, weight, if has_room { Room::Beside(spare) } else { Room::None })?;
    let mut addend = residual.map(|residual| matrix(stage, residual));
    let mut epilogue = None;
    if bias {
        let bias = &step.inputs[2];
        if bias_fits_epilogue(stage, bias) {
            epilogue = Some(stage.pointer(bias));
        } else {
            assert!(residual.is_none(), "`residual_of` has looked at the bias");
            broadcast_row(stage, bias, y)?;
            addend = Some(matrix(stage, y));
        }
    }
    let b_apart = adapter.map(|(_, b, _)| weight_matrix(stage, &mut scratch, b, Room::None)).transpose()?;
    let scratch = scratch.take(MATMUL_BYTES);
    let left = matrix(stage, x);
    let whole = |rows: usize, depth: usize| Sizes { rows, columns: y.columns, depth };
    let (rows, planned) = (stage.rows(y), y.rows_at(stage.planned()));
    let mut depth = x.columns;
    let mut apart = adapter;
    if let Some((h, b, scale)) = adapter
        && has_room
        && scale == 1.0
        && is_as_products_take_it(stage, b)
    {
        let beside = w.at(0, x.columns);
        let lies = b.stride == w.stride && stage.pointer(b) == beside.pointer;
        if !stored {
            lay_beside(stage, matrix(stage, b), beside, y.columns, rank, spare)?;
        }
        if lies || !stored {
            lay_beside(stage, matrix(stage, h), left.at(0, x.columns), rows, rank, spare)?;
            (depth, apart) = (x.columns + spare, None);
        }
    }
    let output = matrix(stage, y);
    let matmul = Matmul {
        left,
        left_transposed: false,
        right: w,
        right_transposed: true,
        output,
        addend,
        bias: epilogue,
        alpha: 1.0,
        sizes: whole(rows, depth),
        planned: whole(planned, depth),
        scratch,
    };
    stage.cublas.run(stage.gpu, &matmul)?;
    let (Some((h, _, scale)), Some(right)) = (apart, b_apart) else { return Ok(()) };
    let matmul = Matmul {
        left: matrix(stage, h),
        right,
        addend: Some(output),
        bias: None,
        alpha: scale,
        sizes: whole(rows, rank),
        planned: whole(planned, rank),
        ..matmul
    };
    stage.cublas.run(stage.gpu, &matmul)
}

/// Whether cuBLASLt can add the bias itself.
fn bias_fits_epilogue(stage: &Stage<'_>, bias: &Operand) -> bool {
    is_as_products_take_it(stage, bias) && stage.pointer(bias).is_multiple_of(16)
}

/// What `sum` adds to the product before it, if it takes the product's place: then both are one. Any other place may
/// lie over what only the product's step reads. A sum always takes it where nobody else reads the product (the order
/// in `Op::in_place`), so this follows from the graph, and a layer computed again gives the same bits.
pub fn residual_of<'a>(
    stage: &Stage<'_>,
    matmul: &BoundStep,
    bias: bool,
    sum: &'a BoundStep,
) -> Option<&'a Operand> {
    let y = &matmul.outputs[0];
    if sum.op != Op::Add || (bias && !bias_fits_epilogue(stage, &matmul.inputs[2])) {
        return None;
    }
    let is_y = |operand: &Operand| operand.offset == y.offset && operand.stride == y.stride;
    let [addend, added] = &sum.inputs[..] else { return None };
    (is_y(added) && !is_y(addend) && is_y(&sum.outputs[0])).then_some(addend)
}

/// dx = Σ scale·d·matrix.
pub fn linear_grad(stage: &Stage<'_>, step: &BoundStep, scales: &[f32]) -> Result<(), DeviceError> {
    let terms: Vec<(&Operand, &Operand, f32)> = scales
        .iter()
        .enumerate()
        .map(|(i, scale)| (&step.inputs[2 * i], &step.inputs[2 * i + 1], *scale))
        .collect();
    let partners = pair_terms(stage, &terms);
    let output = &step.outputs[0];
    let (rows, planned) = (stage.rows(output), output.rows_at(stage.planned()));
    let target = matrix(stage, output);
    let mut addend = None;
    for (index, &(d, weight, scale)) in terms.iter().enumerate() {
        if partners.contains(&Some(index)) {
            continue;
        }
        let mut scratch = Scratch::of(stage);
        let partner = partners[index].map(|other| terms[other]);
        let rank = partner.map_or(0, |(dh, _, _)| dh.columns);
        let spare = spare_columns(rank);
        let stored = is_as_products_take_it(stage, weight);
        let right = weight_matrix(stage, &mut scratch, weight, Room::Beneath(spare))?;
        let mut depth = d.columns;
        if let Some((dh, a, _)) = partner {
            if !stored {
                lay_beside_rows(stage, a, right.at(d.columns, 0), spare)?;
            }
            lay_beside(stage, matrix(stage, dh), matrix(stage, d).at(0, d.columns), rows, rank, spare)?;
            depth += spare;
        }
        let whole = |rows: usize| Sizes { rows, columns: output.columns, depth };
        stage.cublas.run(
            stage.gpu,
            &Matmul {
                left: matrix(stage, d),
                left_transposed: false,
                right,
                right_transposed: false,
                output: target,
                addend,
                bias: None,
                alpha: scale,
                sizes: whole(rows),
                planned: whole(planned),
                scratch: scratch.take(MATMUL_BYTES),
            },
        )?;
        addend = Some(target);
    }
    Ok(())
}

/// A's rows beneath a decoded weight, and zeros where they do not fill the step of columns.
fn lay_beside_rows(stage: &Stage<'_>, a: &Operand, to: Matrix, spare: usize) -> Result<(), DeviceError> {
    let rank = stage.rows(a);
    if rank < spare {
        let rest = to.at(rank, 0);
        stage.clear(rest.pointer, (spare - rank) * to.stride * to.element.bytes())?;
    }
    lay_beside(stage, matrix(stage, a), to, rank, a.columns, a.columns)
}

/// For each term the thin one that becomes part of its product: A beneath the weight, dh in the spare columns of dy.
fn pair_terms(stage: &Stage<'_>, terms: &[(&Operand, &Operand, f32)]) -> Vec<Option<usize>> {
    let mut partners = vec![None; terms.len()];
    for (thin, &(dh, a, scale)) in terms.iter().enumerate() {
        let spare = spare_columns(dh.columns);
        if scale != 1.0 || !is_as_products_take_it(stage, a) {
            continue;
        }
        let fits = |index: &usize| {
            let (d, weight, scale) = terms[*index];
            let has_room = d.stride >= d.columns + spare && scale == 1.0;
            let beneath = if is_as_products_take_it(stage, weight) {
                let end = matrix(stage, weight).at(stage.rows(weight), 0);
                weight.stride == a.stride && stage.pointer(a) == end.pointer
            } else {
                true
            };
            *index != thin && has_room && beneath && partners[*index].is_none()
        };
        let wide = (0..terms.len()).find(fits);
        if let Some(wide) = wide {
            partners[wide] = Some(thin);
        }
    }
    partners
}

/// dW (N, K) += scale·dyᵀ·x.
pub fn weight_grad(stage: &Stage<'_>, step: &BoundStep, scale: f32) -> Result<(), DeviceError> {
    let (dy, x) = (&step.inputs[0], &step.inputs[1]);
    let tokens = Tokens { rows: stage.rows(dy), planned: dy.rows_at(stage.planned()) };
    let scratch = Scratch::of(stage).take(MATMUL_BYTES);
    outer_sum(stage, matrix(stage, dy), matrix(stage, x), tokens, scale, &step.updates[0], scratch)
}

/// Whether the two steps are the gradient of B and that of h, from the same dy, and can be formed in one pass over it.
/// The planner gives such steps one scratch together.
pub fn is_adapter_grad(stage: &Stage<'_>, outer: &BoundStep, inner: &BoundStep) -> bool {
    let (Op::WeightGrad { .. }, Op::LinearGrad { scales }) = (&outer.op, &inner.op) else { return false };
    let ([dy, h], [other_dy, b], [dh]) = (&outer.inputs[..], &inner.inputs[..], &inner.outputs[..]) else {
        return false;
    };
    scales[..] == [1.0]
        && dy == other_dy
        && outer.workspace == inner.workspace
        && thin::adapter_grad_fits(stage, [dy, h, b, dh], &outer.updates[0])
}

/// Rows of a micro-batch, and the most that are planned.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    pub rows: usize,
    pub planned: usize,
}

/// Adds scale·leftᵀ·right, summed over tokens, to a gradient.
pub fn outer_sum(
    stage: &Stage<'_>,
    left: Matrix,
    right: Matrix,
    tokens: Tokens,
    scale: f32,
    gradient: &Operand,
    scratch: u64,
) -> Result<(), DeviceError> {
    if tokens.rows == 0 {
        return Ok(());
    }
    if thin::outer_sum_fits(stage, left, right, gradient) {
        return thin::outer_sum(stage, left, right, tokens, scale, gradient, scratch);
    }
    let target = matrix(stage, gradient);
    let whole = |depth: usize| Sizes { rows: stage.rows(gradient), columns: gradient.columns, depth };
    stage.cublas.run(
        stage.gpu,
        &Matmul {
            left,
            left_transposed: true,
            right,
            right_transposed: false,
            output: target,
            addend: Some(target),
            bias: None,
            alpha: scale,
            sizes: whole(tokens.rows),
            planned: whole(tokens.planned),
            scratch,
        },
    )
}
