//! Linear layers with their adapters, their gradients, and sums over tokens.
//!
//! A weight that is not stored in the matmul type is decoded into the workspace first. If the operands of an adapter
//! are adjacent to those of its linear, both are one matmul, `[x | h]·[W | B]ᵀ` and `[dy | dh]·[W ; A]`: h and dh are
//! copied into spare columns of x and dy, and B and A are stored next to the weight or copied next to the decoded
//! weight. Otherwise the adapter is a second matmul, added to the first. fp8 matmuls are launched by `fp8.rs`.

use super::few_rows;
use super::fp8;
use super::matmul::{Matmul, Matrix, Sizes, Tokens};
use super::operands::{
    AdapterRoom, Addends, Scratch, add_adapter, bias_fits_epilogue, copy_rows, is_matmul_type, weight_matrix,
};
use super::stage::Stage;
use super::thin;
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::Op;
use smidgen_ir::workspace_cuda::{MATMUL_BYTES, spare_columns};

/// y = x·Wᵀ + bias + lora·h·Bᵀ; or `scale` times that plus `residual`, if there is one.
pub fn linear(
    stage: &Stage<'_>,
    step: &BoundStep,
    residual: Option<&Operand>,
    scale: f32,
) -> Result<(), DeviceError> {
    let linear = few_rows_linear(stage, step, residual).expect("the caller passes linears only");
    if few_rows::fits(stage, &linear) {
        debug_assert_eq!(scale, 1.0, "`residual_of` leaves out scaled sums");
        return few_rows::few_rows(stage, &[linear]);
    }
    let few_rows::Linear { x, weight, addends: few_rows::Addends { bias, adapter, .. }, .. } = linear;
    let y = &step.outputs[0];
    let is_alone = bias.is_none() && adapter.is_none() && residual.is_none();
    if is_alone && thin::thin_matmul_fits(stage, x, weight, y) {
        return thin::thin_matmul(stage, x, weight, y);
    }
    if fp8::is_fp8(stage, weight) {
        return fp8::linear(stage, [x, weight, y], bias, adapter, residual);
    }
    let mut scratch = Scratch::of(stage);
    let rank = adapter.map_or(0, |(h, _, _)| h.columns);
    let spare = spare_columns(rank);
    let has_room = rank > 0 && x.stride >= x.columns + spare;
    let stored = is_matmul_type(stage, weight);
    let w = weight_matrix(
        stage,
        &mut scratch,
        weight,
        if has_room { AdapterRoom::Columns(spare) } else { AdapterRoom::None },
    )?;
    let addends = Addends::of(stage, bias, residual, y)?;
    let b_apart =
        adapter.map(|(_, b, _)| weight_matrix(stage, &mut scratch, b, AdapterRoom::None)).transpose()?;
    let scratch = scratch.take(MATMUL_BYTES);
    let (left, tokens) = (stage.matrix(x), stage.tokens(y));
    let mut depth = x.columns;
    let mut apart = adapter;
    if let Some((h, b, lora)) = adapter
        && has_room
        && lora == 1.0
        && is_matmul_type(stage, b)
    {
        let spare_of_w = w.at(0, x.columns);
        let is_adjacent = b.stride == w.stride && stage.pointer(b) == spare_of_w.pointer;
        if !stored {
            copy_rows(stage, stage.matrix(b), spare_of_w, y.columns, rank, spare)?;
        }
        if is_adjacent || !stored {
            copy_rows(stage, stage.matrix(h), left.at(0, x.columns), tokens.rows, rank, spare)?;
            (depth, apart) = (x.columns + spare, None);
        }
    }
    let output = stage.matrix(y);
    let matmul = Matmul {
        right_transposed: true,
        addend: addends.matrix,
        bias: addends.bias,
        alpha: scale,
        ..Matmul::of_tokens([left, w, output], tokens, y.columns, depth, scratch)
    };
    stage.cublas.run(stage.gpu, &matmul)?;
    let (Some((h, _, lora)), Some(b)) = (apart, b_apart) else { return Ok(()) };
    add_adapter(stage, (h, b, scale * lora), Some(output), y, scratch)
}

/// The operands of a linear layer, in the form that `few_rows.rs` expects; `None` if the step is something else.
fn few_rows_linear<'a>(
    stage: &Stage<'_>,
    step: &'a BoundStep,
    residual: Option<&'a Operand>,
) -> Option<few_rows::Linear<'a>> {
    let Op::Linear { bias, lora } = step.op else { return None };
    let first = 2 + usize::from(bias);
    let adapter = lora.map(|scale| (&step.inputs[first], &step.inputs[first + 1], scale));
    let addends = few_rows::Addends { bias: bias.then(|| &step.inputs[2]), residual, adapter };
    Some(few_rows::Linear {
        x: &step.inputs[0],
        weight: &step.inputs[1],
        addends,
        y: stage.matrix(&step.outputs[0]),
    })
}

/// The linears at the start of `steps` that can share one launch, such as q, k and v: few rows of the same input.
pub fn linears_of_one_launch<'a>(stage: &Stage<'_>, steps: &'a [BoundStep]) -> Vec<few_rows::Linear<'a>> {
    let mut linears: Vec<few_rows::Linear<'a>> = Vec::new();
    for (index, step) in steps.iter().take(few_rows::MOST_LINEARS).enumerate() {
        let Some(linear) = few_rows_linear(stage, step, None) else { break };
        let joins = |first: &few_rows::Linear<'_>| {
            first.x == linear.x && first.weight.storage == linear.weight.storage
        };
        let is_independent = steps[..index].iter().all(|before| step.is_independent_of(before));
        if !(few_rows::fits(stage, &linear) && is_independent && linears.first().is_none_or(joins)) {
            break;
        }
        linears.push(linear);
    }
    linears
}

/// The other summand of `sum` and the factor of the output of `matmul`, if that is a linear and `sum` adds in place to its
/// output: then one matmul does both. Only a plain matmul has a factor for all that it sums.
/// With any other output the matmul might overwrite its own input. The planner always makes such a sum in place if
/// nothing else reads the linear's output (see the order in `Op::in_place`). So this depends only on the graph, and a
/// recomputed layer gives the same bits.
pub fn residual_of<'a>(
    stage: &Stage<'_>,
    matmul: &BoundStep,
    sum: &'a BoundStep,
) -> Option<(&'a Operand, f32)> {
    let Op::Add { scale } = sum.op else { return None };
    let linear = few_rows_linear(stage, matmul, None)?;
    let (y, bias) = (&matmul.outputs[0], linear.addends.bias);
    if bias.is_some_and(|bias| !bias_fits_epilogue(stage, bias)) {
        return None;
    }
    let is_plain = || bias.is_none() && !few_rows::fits(stage, &linear) && !fp8::is_fp8(stage, linear.weight);
    if scale != 1.0 && !is_plain() {
        return None;
    }
    let is_y = |operand: &Operand| operand.offset == y.offset && operand.stride == y.stride;
    let [addend, added] = &sum.inputs[..] else { return None };
    (is_y(added) && !is_y(addend) && is_y(&sum.outputs[0])).then_some((addend, scale))
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
    let (tokens, target) = (stage.tokens(output), stage.matrix(output));
    let mut addend = None;
    for (index, &(d, weight, scale)) in terms.iter().enumerate() {
        if partners.contains(&Some(index)) {
            continue;
        }
        if fp8::is_fp8(stage, weight) {
            fp8::linear_grad_term(stage, (d, weight, scale), output, addend)?;
            addend = Some(target);
            continue;
        }
        let mut scratch = Scratch::of(stage);
        let partner = partners[index].map(|other| terms[other]);
        let rank = partner.map_or(0, |(dh, _, _)| dh.columns);
        let spare = spare_columns(rank);
        let stored = is_matmul_type(stage, weight);
        let right = weight_matrix(stage, &mut scratch, weight, AdapterRoom::Rows(spare))?;
        let mut depth = d.columns;
        if let Some((dh, a, _)) = partner {
            if !stored {
                copy_rows_of_a(stage, a, right.at(d.columns, 0), spare)?;
            }
            copy_rows(stage, stage.matrix(dh), stage.matrix(d).at(0, d.columns), tokens.rows, rank, spare)?;
            depth += spare;
        }
        let (matrices, scratch) = ([stage.matrix(d), right, target], scratch.take(MATMUL_BYTES));
        let matmul = Matmul {
            addend,
            alpha: scale,
            ..Matmul::of_tokens(matrices, tokens, output.columns, depth, scratch)
        };
        stage.cublas.run(stage.gpu, &matmul)?;
        addend = Some(target);
    }
    Ok(())
}

/// Copies the rows of A below a decoded weight, and zeros the spare rows that A does not fill.
fn copy_rows_of_a(stage: &Stage<'_>, a: &Operand, to: Matrix, spare: usize) -> Result<(), DeviceError> {
    let rank = stage.rows(a);
    if rank < spare {
        let rest = to.at(rank, 0);
        stage.clear(rest.pointer, (spare - rank) * to.stride * to.element.bytes())?;
    }
    copy_rows(stage, stage.matrix(a), to, rank, a.columns, a.columns)
}

/// For each term, the index of the low-rank term that can be part of its matmul: A is below the weight, and dh is
/// copied to spare columns of dy.
fn pair_terms(stage: &Stage<'_>, terms: &[(&Operand, &Operand, f32)]) -> Vec<Option<usize>> {
    let mut partners = vec![None; terms.len()];
    for (thin, &(dh, a, scale)) in terms.iter().enumerate() {
        let spare = spare_columns(dh.columns);
        if !is_matmul_type(stage, a) {
            continue;
        }
        let fits = |index: &usize| {
            let (d, weight, of_weight) = terms[*index];
            let has_room = d.stride >= d.columns + spare && of_weight == scale && !fp8::is_fp8(stage, weight);
            let is_adjacent = if is_matmul_type(stage, weight) {
                let end = stage.matrix(weight).at(stage.rows(weight), 0);
                weight.stride == a.stride && stage.pointer(a) == end.pointer
            } else {
                true
            };
            *index != thin && has_room && is_adjacent && partners[*index].is_none()
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
    let tokens = stage.tokens(dy);
    let scratch = Scratch::of(stage).take(MATMUL_BYTES);
    outer_sum(stage, stage.matrix(dy), stage.matrix(x), tokens, scale, &step.updates[0], scratch)
}

/// Whether two steps are the gradients of B and of h from the same dy, and can be computed in one pass over it.
/// The planner gives such steps the same workspace.
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
    let target = stage.matrix(gradient);
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
            fp8: None,
            alpha: scale,
            sizes: whole(tokens.rows),
            planned: whole(tokens.planned),
            scratch,
        },
    )
}
