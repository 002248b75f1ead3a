//! One step on a GPU: the operation becomes a call of its launcher.
//!
//! Every match over operations is complete. What a launcher could not run is refused here, before any step has run.

use super::driver::NAME;
use super::stage::{KernelFile, Stage};
use super::{
    act, attention, attention_hopper, cached_attention, columns, decode, elementwise, embed, fourier, head,
    head_pieces, linear, loss, norm, optimizer, rope, thin,
};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{StepTypes, workspace_bytes};
use smidgen_ir::{Extent, Op, Shape, Storage, Type};

/// Every file of kernels.
pub fn files() -> Vec<KernelFile> {
    files_of_all().into_iter().chain(attention::FILES).chain([thin::FILE]).collect()
}

/// The files of kernels that any plan may need.
pub fn files_of_all() -> Vec<KernelFile> {
    vec![
        act::FILE,
        cached_attention::FILE,
        columns::FILE,
        decode::FILE,
        decode::GGUF_FILE,
        elementwise::FILE,
        embed::FILE,
        fourier::FILE,
        linear::FILE,
        loss::FILE,
        norm::FILE,
        optimizer::FILE,
        rope::FILE,
    ]
}

/// Those that an operation needs beside them.
pub fn files_of(op: &Op) -> Vec<KernelFile> {
    match op {
        Op::Attention(shape) | Op::AttentionGrad(shape) => attention::files(shape),
        _ => vec![],
    }
}

/// Those of Hopper GPUs that an operation may be computed by.
pub fn hopper_files_of(op: &Op) -> Vec<KernelFile> {
    match op {
        Op::Attention(shape) | Op::AttentionGrad(shape) => attention_hopper::files(shape),
        _ => vec![],
    }
}

/// Refuses a step that has too little scratch, or a weight whose rows are no whole blocks.
pub fn check(step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
    let types: Vec<Type> = step.inputs.iter().map(type_of).collect();
    let inputs: Vec<&Type> = types.iter().collect();
    let needed =
        workspace_bytes(&StepTypes { op: &step.op, inputs: &inputs, extent, precision: step.precision });
    let given = step.workspace.map_or(0, |(_, bytes)| bytes);
    if given < needed {
        return Err(DeviceError::Workspace { device: NAME, op: step.op.name(), given, needed });
    }
    if let Op::Attention(shape) | Op::AttentionGrad(shape) | Op::CachedAttention(shape) = &step.op
        && shape.head_dim > attention::MOST_CHANNELS
    {
        let what =
            format!("heads of {} channels: kernels go up to {}", shape.head_dim, attention::MOST_CHANNELS);
        return Err(DeviceError::Call { device: NAME, call: step.op.name(), what });
    }
    for operand in &step.inputs {
        if let Storage::Gguf(block) = operand.storage
            && !operand.columns.is_multiple_of(block.elements())
        {
            let (op, storage, columns) = (step.op.name(), operand.storage, operand.columns);
            return Err(DeviceError::Columns { device: NAME, op, storage, columns });
        }
    }
    Ok(())
}

fn type_of(operand: &Operand) -> Type {
    let shape = match operand.columns {
        1 => Shape::rows_of(operand.rows),
        columns => Shape::of(operand.rows, columns),
    };
    Type::new(shape, operand.storage)
}

/// Launches a step.
pub fn run_step(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    match &step.op {
        Op::Embed { scale, .. } => embed::embed(stage, step, *scale),
        Op::RmsNorm(norm) => norm::rms_norm(stage, step, norm),
        Op::Dropout { p, stream, rest } => elementwise::dropout(stage, step, *p, *stream, *rest),
        Op::Linear { bias, lora } => linear::linear(stage, step, *bias, *lora, None),
        Op::ScaleColumns { bias } => columns::scale_columns(stage, step, *bias),
        Op::Fourier { scale } => fourier::fourier(stage, step, *scale),
        Op::RopeTable(spec) => rope::rope_table(stage, step, spec),
        Op::Rope { heads, inverse } => rope::rope(stage, step, *heads, *inverse),
        Op::Attention(shape) => attention::attention(stage, step, shape),
        Op::GatedAct(kind) => act::gated_act(stage, step, *kind),
        Op::Add => elementwise::add(stage, step),
        Op::GatherRows => elementwise::gather_rows(stage, step),
        Op::LmHeadLoss(head) => head::lm_head_loss(stage, step, head),
        Op::HeadSums(piece) => head_pieces::head_sums(stage, step, piece),
        Op::HeadLoss { row_losses } => head_pieces::head_loss(stage, step, *row_losses),
        Op::HeadGrad { piece, ends } => head_pieces::head_grad(stage, step, piece, *ends),
        Op::Logits { lora, softcap, first_word } => {
            head::all_logits(stage, step, *lora, *softcap, *first_word)
        }
        Op::CacheRows => cached_attention::cache_rows(stage, step),
        Op::CachedAttention(shape) => cached_attention::cached_attention(stage, step, shape),
        Op::ScatterRows => elementwise::scatter_rows(stage, step),
        Op::RmsNormGrad { norm, addend } => norm::rms_norm_grad(stage, step, norm, *addend),
        Op::RmsNormWeightGrad { eps } => norm::rms_norm_weight_grad(stage, step, *eps),
        Op::LinearGrad { scales } => linear::linear_grad(stage, step, scales),
        Op::WeightGrad { scale } => linear::weight_grad(stage, step, *scale),
        Op::BiasGrad => elementwise::bias_grad(stage, step),
        Op::MagnitudeGrad => columns::magnitude_grad(stage, step),
        Op::FourierGrad { scale } => fourier::fourier_grad(stage, step, *scale),
        Op::AttentionGrad(shape) => attention::attention_grad(stage, step, shape),
        Op::GatedActGrad(kind) => act::gated_act_grad(stage, step, *kind),
        Op::EmbedGrad { scale } => embed::embed_grad(stage, step, *scale),
        Op::FourierReg { weight } => optimizer::fourier_reg(stage, step, *weight),
        Op::RowNorms { scale } => columns::row_norms(stage, step, *scale),
        Op::GradNorm { clip } => optimizer::grad_norm(stage, step, *clip),
        Op::Round { .. } | Op::AdamW(_) | Op::AdamW8(_) | Op::Zero => {
            run_alike(stage, std::slice::from_ref(step))
        }
        Op::Fetch | Op::Stow => unreachable!("transfers are begun by the device"),
        Op::Stowed => Ok(()),
    }
}

/// How many steps at the begin of `steps` do the same to other tensors, so that they can be launched together.
fn count_alike(steps: &[BoundStep]) -> usize {
    let Some(first) = steps.first() else { return 0 };
    1 + steps[1..].iter().take_while(|step| step.op.is_alike(&first.op)).count()
}

/// Launches the first steps of some as one, and says how many they were: tensors that are treated alike, a product
/// and the sum that follows it in place, or the gradients of B and of h.
pub fn run_first(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<usize, DeviceError> {
    if let [product, sum, ..] = steps
        && let Op::Linear { bias, lora } = product.op
        && let Some(residual) = linear::residual_of(stage, product, bias, sum)
    {
        return linear::linear(stage, product, bias, lora, Some(residual)).map(|()| 2);
    }
    if let [outer, inner, ..] = steps
        && let Op::WeightGrad { scale } = outer.op
        && linear::is_adapter_grad(stage, outer, inner)
    {
        let (dy, h, b) = (&outer.inputs[0], &outer.inputs[1], &inner.inputs[1]);
        return thin::adapter_grad(stage, dy, h, b, &inner.outputs[0], &outer.updates[0], scale).map(|()| 2);
    }
    let count = count_alike(steps);
    run_alike(stage, &steps[..count]).map(|()| count)
}

/// Launches steps that do the same to other tensors.
fn run_alike(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<(), DeviceError> {
    match &steps[0].op {
        Op::Round { .. } => optimizer::round(stage, steps),
        Op::AdamW(settings) => optimizer::adamw(stage, steps, settings),
        Op::AdamW8(settings) => optimizer::adamw8(stage, steps, settings),
        Op::Zero => optimizer::zero(stage, steps),
        _ => run_step(stage, &steps[0]),
    }
}
