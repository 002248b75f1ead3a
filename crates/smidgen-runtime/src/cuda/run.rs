//! Runs steps on a GPU: a table from operations to launchers, and the rules for launching several steps at once.
//!
//! `check` refuses a step that a launcher cannot run, before any step has run.

use super::driver::NAME;
use super::fp8::Roundings;
use super::modules::KernelFile;
use super::stage::Stage;
use super::{
    act, attention, attention_hopper, audio, audio_conv, cached_attention, causal_conv, chunk_attention,
    columns, decode, elementwise, embed, experts, few_rows, fourier, fp8, grouped, head, head_pieces,
    layer_norm, linear, loss, norm, objective, operands, optimizer, plain_act, rope, scan, thin,
};
use crate::device::{BoundStep, DeviceError};
use smidgen_ir::{AttentionShape, DeviceKind, Entry, Extent, Op, Storage, transfer_ops};

/// Every file of kernels.
pub fn files() -> Vec<KernelFile> {
    let of_audio = [audio::FILE, audio_conv::FILE, layer_norm::FILE, plain_act::FILE];
    let of_attention = attention::FILES.into_iter().chain(chunk_attention::FILES);
    let of_experts = [experts::FILE, grouped::FILE, grouped::GGUF_FILE];
    let others = [few_rows::FILE, fp8::FILE, fp8::MATMUL_FILE, objective::FILE, thin::FILE];
    let of_recurrence = scan::FILES.into_iter().chain([scan::DECAY_FILE, causal_conv::FILE]);
    let of_layers = of_attention.chain(of_experts).chain(of_recurrence);
    files_of_every_plan().into_iter().chain(of_layers).chain(others).chain(of_audio).collect()
}

/// The files of kernels that every plan loads.
pub fn files_of_every_plan() -> Vec<KernelFile> {
    vec![
        act::FILE,
        cached_attention::FILE,
        columns::FILE,
        decode::FILE,
        decode::GGUF_FILE,
        elementwise::FILE,
        embed::FILE,
        fourier::FILE,
        operands::FILE,
        loss::FILE,
        norm::FILE,
        optimizer::FILE,
        rope::FILE,
    ]
}

/// The additional files that an operation needs. Attention has files per head size, and most models have no audio
/// encoder.
pub fn files_of(op: &Op) -> Vec<KernelFile> {
    if let Op::ChunkAttention(shape) | Op::ChunkAttentionGrad(shape) = op {
        return vec![chunk_attention::file(shape)];
    }
    if let Op::CachedAttention(_) = op {
        return vec![few_rows::FILE];
    }
    if let Op::Objective(_) = op {
        return vec![objective::FILE];
    }
    if let Op::PlaceRows { .. } | Op::TakeRows = op {
        return vec![audio::FILE];
    }
    if let Op::StridedConv(_) | Op::JoinPlaces { .. } | Op::MaskRows { .. } = op {
        return vec![audio_conv::FILE];
    }
    if let Op::CausalConv { .. } | Op::CausalConvWeightGrad | Op::CachedConv { .. } = op {
        return vec![causal_conv::FILE];
    }
    if let Op::Decay(_) | Op::DecayGrad { .. } = op {
        return vec![scan::DECAY_FILE];
    }
    if let Op::Scan(shape) | Op::ScanGrad(shape) | Op::CachedScan(shape) = op {
        return vec![scan::file(shape), scan::DECAY_FILE];
    }
    if let Op::LayerNorm { .. } | Op::LayerNormGrad { .. } | Op::LayerNormWeightGrad { .. } = op {
        return vec![layer_norm::FILE];
    }
    if let Op::Scale { .. } | Op::AddBias | Op::Act(_) | Op::ActGrad(_) = op {
        return vec![plain_act::FILE];
    }
    // Every layer with experts has a dispatch.
    if let Op::Dispatch { .. } = op {
        return vec![experts::FILE, grouped::FILE, grouped::GGUF_FILE];
    }
    attention_of(op).map_or_else(Vec::new, attention::files)
}

/// The files with Hopper-only kernels for an operation.
pub fn hopper_files_of(op: &Op) -> Vec<KernelFile> {
    attention_of(op).map_or_else(Vec::new, attention_hopper::files)
}

fn attention_of(op: &Op) -> Option<&AttentionShape> {
    if let Op::Attention(shape) | Op::AttentionGrad(shape) = op { Some(shape) } else { None }
}

/// The head size of attention or of a scan, and the largest that its kernels support.
fn head_size(op: &Op) -> Option<(usize, usize)> {
    if let Op::ChunkAttention(shape) | Op::ChunkAttentionGrad(shape) = op {
        return Some((shape.head_dim, chunk_attention::MOST_CHANNELS));
    }
    if let Op::Attention(shape) | Op::AttentionGrad(shape) | Op::CachedAttention(shape) = op {
        return Some((shape.head_dim, attention::MOST_CHANNELS));
    }
    if let Op::Scan(shape) | Op::ScanGrad(shape) | Op::CachedScan(shape) = op {
        return Some((shape.key_dim.max(shape.value_dim), scan::MOST_CHANNELS));
    }
    None
}

/// Refuses a step with too little workspace, heads that are too large, or a weight whose rows are not whole blocks.
pub fn check(step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
    let needed = step.workspace_bytes(DeviceKind::Cuda, 0, extent);
    let given = step.workspace.map_or(0, |(_, bytes)| bytes);
    if given < needed {
        return Err(DeviceError::Workspace { device: NAME, op: step.op.name(), given, needed });
    }
    if let Some((head_dim, most)) = head_size(&step.op).filter(|(head_dim, most)| head_dim > most) {
        let what = format!("a head size of {head_dim}: kernels support up to {most}");
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

/// Launches `steps`, which are the same operation on different tensors: one step, or several of an operation whose
/// launcher accepts several. Some kernels also round their outputs to fp8.
fn run_joined(stage: &Stage<'_>, steps: &[BoundStep], roundings: &Roundings) -> Result<(), DeviceError> {
    let step = &steps[0];
    match &step.op {
        Op::Embed { scale, .. } => embed::embed(stage, step, *scale),
        Op::RmsNorm { norm, unweighted } => norm::rms_norm(stage, step, norm, *unweighted, roundings),
        Op::Dropout { p, stream, rest } => elementwise::dropout(stage, step, *p, *stream, *rest),
        Op::Linear { .. } => linear::linear(stage, step, None, 1.0),
        Op::Route(router) => experts::route(stage, step, router),
        Op::RouteGrad(router) => experts::route_grad(stage, step, router),
        Op::Dispatch { experts: count } => experts::dispatch(stage, step, *count),
        Op::SpreadRows { weighted } => experts::spread_rows(stage, step, *weighted),
        Op::CombineRows { weighted } => experts::combine_rows(stage, step, *weighted),
        Op::RowDots => experts::row_dots(stage, step),
        Op::GroupedLinear { part, bias, lora } => grouped::grouped_linear(stage, step, part, *bias, *lora),
        Op::GroupedLinearGrad { parts, scales } => grouped::grouped_linear_grad(stage, step, parts, scales),
        Op::GroupedWeightGrad { part, scale } => grouped::grouped_weight_grad(stage, step, part, *scale),
        Op::GroupedBiasGrad { part } => grouped::grouped_bias_grad(stage, step, part),
        Op::ScaleColumns { bias } => columns::scale_columns(stage, step, *bias),
        Op::Fourier { scale } => fourier::fourier(stage, step, *scale),
        Op::RopeTable(spec) => rope::rope_table(stage, step, spec),
        Op::Rope { .. } => rope::rope(stage, &steps[..1]),
        Op::Attention(shape) => attention::attention(stage, step, shape),
        Op::GatedAct(kind) => act::gated_act(stage, step, *kind, roundings),
        Op::Add { scale } => elementwise::add(stage, step, *scale),
        Op::PlaceHeads { heads, head_dim, parts } => {
            elementwise::place_heads(stage, step, *heads, *head_dim, parts)
        }
        Op::ScaleBy => elementwise::scale_by(stage, step),
        Op::ScaleByGrad => elementwise::scale_by_grad(stage, step),
        Op::GatherRows => elementwise::gather_rows(stage, step),
        Op::LmHeadLoss(head) => head::lm_head_loss(stage, step, head),
        Op::Objective(objective) => objective::objective(stage, step, objective),
        Op::HeadSums(piece) => head_pieces::head_sums(stage, step, piece),
        Op::HeadLoss { row_losses } => head_pieces::head_loss(stage, step, *row_losses),
        Op::HeadGrad { piece, ends } => head_pieces::head_grad(stage, step, piece, *ends),
        Op::Logits { lora, softcap, first_word } => {
            head::all_logits(stage, step, *lora, *softcap, *first_word)
        }
        Op::CacheRows => cached_attention::cache_rows(stage, step),
        Op::CachedAttention(shape) => cached_attention::cached_attention(stage, step, shape),
        Op::PlaceRows { clear } => audio::place_rows(stage, step, *clear),
        Op::TakeRows => audio::take_rows(stage, step),
        Op::LayerNorm { eps, .. } => layer_norm::layer_norm(stage, step, *eps),
        Op::LayerNormGrad { eps, .. } => layer_norm::layer_norm_grad(stage, step, *eps),
        Op::LayerNormWeightGrad { eps } => layer_norm::layer_norm_weight_grad(stage, step, *eps),
        Op::Scale { scale } => plain_act::scale(stage, step, *scale),
        Op::AddBias => plain_act::add_bias(stage, step),
        Op::Act(kind) => plain_act::act(stage, step, *kind),
        Op::ActGrad(kind) => plain_act::act_grad(stage, step, *kind),
        Op::ChunkAttention(shape) => chunk_attention::chunk_attention(stage, step, shape),
        Op::ChunkAttentionGrad(shape) => chunk_attention::chunk_attention_grad(stage, step, shape),
        Op::StridedConv(conv) => audio_conv::strided_conv(stage, step, conv),
        Op::JoinPlaces { places } => audio_conv::join_places(stage, step, *places),
        Op::MaskRows { .. } => audio_conv::mask_rows(stage, step),
        Op::CausalConv { bias, backward } => causal_conv::causal_conv(stage, step, *bias, *backward),
        Op::CausalConvWeightGrad => causal_conv::causal_conv_weight_grad(stage, step),
        Op::CachedConv { bias } => causal_conv::cached_conv(stage, step, *bias),
        Op::Decay(shape) => scan::decay(stage, step, shape),
        Op::DecayGrad { shape, trains } => scan::decay_grad(stage, step, shape, *trains),
        Op::Scan(shape) => scan::scan(stage, step, shape),
        Op::ScanGrad(shape) => scan::scan_grad(stage, step, shape),
        Op::CachedScan(shape) => scan::cached_scan(stage, step, shape),
        Op::ScatterRows => elementwise::scatter_rows(stage, step),
        Op::RmsNormGrad { norm, unweighted, addend } => {
            norm::rms_norm_grad(stage, step, norm, *unweighted, *addend, roundings)
        }
        Op::RmsNormWeightGrad { eps } => norm::rms_norm_weight_grad(stage, step, *eps),
        Op::LinearGrad { scales } => linear::linear_grad(stage, step, scales),
        Op::WeightGrad { scale } => linear::weight_grad(stage, step, *scale),
        Op::BiasGrad => elementwise::bias_grad(stage, step),
        Op::MagnitudeGrad => columns::magnitude_grad(stage, step),
        Op::FourierGrad { scale } => fourier::fourier_grad(stage, step, *scale),
        Op::AttentionGrad(shape) => attention::attention_grad(stage, step, shape),
        Op::SinksGrad => elementwise::sinks_grad(stage, step),
        Op::SliceColumns { first, columns, groups } => {
            operands::slice_columns(stage, step, *first, *columns, *groups)
        }
        Op::PlaceColumns { firsts, columns, groups } => {
            operands::place_columns(stage, step, firsts, *columns, *groups)
        }
        Op::GatedActGrad(kind) => act::gated_act_grad(stage, step, *kind, roundings),
        Op::EmbedGrad { scale, padding } => embed::embed_grad(stage, step, *scale, *padding),
        Op::FourierReg { weight } => optimizer::fourier_reg(stage, step, *weight),
        Op::RowNorms { scale } => columns::row_norms(stage, step, *scale),
        Op::SquaredNorm => optimizer::squared_norm(stage, step),
        Op::GradNorm { clip, squares } => optimizer::grad_norm(stage, step, *clip, *squares),
        Op::Round { .. } => optimizer::round(stage, steps),
        Op::RoundFp8 { .. } => fp8::round_fp8(stage, step),
        Op::Widen => optimizer::widen(stage, step),
        Op::RoundAtRandom(place) => optimizer::round_at_random(stage, step, place),
        Op::AdamW(settings) => optimizer::adamw(stage, steps, settings),
        Op::AdamW8(settings) => optimizer::adamw8(stage, steps, settings),
        Op::Zero => optimizer::zero(stage, steps),
        transfer_ops!() => {
            unreachable!("the device itself starts transfers")
        }
        Op::Stowed => Ok(()),
    }
}

/// How many steps at the front of `steps` can be launched together.
fn count_joined(steps: &[BoundStep]) -> usize {
    let Some(first) = steps.first() else { return 0 };
    1 + steps[1..].iter().take_while(|step| step.op.joins(&first.op)).count()
}

/// Launches the first step, together with those after it that can share its launch, and returns how many steps were
/// launched. These can share a launch: the same operation on several tensors; a matmul and the in-place sum after it;
/// the gradients of B and of h; a step and the rounding of its outputs; and, in generation, linears or rotations that
/// are short on their own.
pub fn run_first(stage: &Stage<'_>, steps: &[BoundStep]) -> Result<usize, DeviceError> {
    if let [matmul, sum, ..] = steps
        && let Some((residual, scale)) = linear::residual_of(stage, matmul, sum)
    {
        return linear::linear(stage, matmul, Some(residual), scale).map(|()| 2);
    }
    if stage.step.entry == Entry::Decode {
        let linears = linear::linears_of_one_launch(stage, steps);
        if linears.len() > 1 {
            return few_rows::few_rows(stage, &linears).map(|()| linears.len());
        }
    }
    if let [first, second, ..] = steps
        && rope::are_one_launch(stage, first, second)
    {
        return rope::rope(stage, &steps[..2]).map(|()| 2);
    }
    if let [outer, inner, ..] = steps
        && let Op::WeightGrad { scale } = outer.op
        && linear::is_adapter_grad(stage, outer, inner)
    {
        let (dy, h, b) = (&outer.inputs[0], &outer.inputs[1], &inner.inputs[1]);
        return thin::adapter_grad(stage, dy, h, b, &inner.outputs[0], &outer.updates[0], scale).map(|()| 2);
    }
    let (count, roundings) = (count_joined(steps), Roundings::after_first(stage, steps));
    run_joined(stage, &steps[..count], &roundings)?;
    Ok(count + roundings.count_done())
}
