//! Launches the norms and their gradients.
//!
//! A norm runs over groups of D channels; a row has one or several groups. A small group is handled by some lanes of a
//! warp, a larger one by a block that keeps it in registers, and the largest by a block that reads it twice. The choice
//! depends only on sizes and alignment.

use super::fp8::Roundings;
use super::modules::KernelFile;
use super::spans::{MatrixAddress, SPAN, count, int, stored_dtype, word};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::Norm;
use smidgen_ir::workspace_cuda::{NORM_GROUPS_PER_PARTIAL, rows_per_partial};

pub const FILE: KernelFile = KernelFile {
    name: "norm.cu",
    source: concat!(include_str!("../../kernels/fp8.cuh"), include_str!("../../kernels/norm.cu")),
    kernels: &[
        "rms_norm_heads",
        "rms_norm_two",
        "rms_norm_four",
        "rms_norm_any",
        "rms_norm_round_two",
        "rms_norm_round_four",
        "rms_norm_grad_heads",
        "rms_norm_grad_two",
        "rms_norm_grad_four",
        "rms_norm_grad_any",
        "rms_norm_grad_round_two",
        "rms_norm_grad_round_four",
        "rms_norm_weight_partials_heads",
        "rms_norm_weight_partials_two",
        "rms_norm_weight_partials_four",
        "rms_norm_weight_partials_any",
    ],
};

/// Threads per block of the `_heads` kernels.
const TEAM_THREADS: u32 = 256;

/// Which kernel handles a group, and with how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Heads { lanes: u32 },
    Two { threads: u32 },
    Four { threads: u32 },
    Any { threads: u32 },
}

impl Form {
    fn of(columns: usize, aligned: bool) -> Form {
        let warps = |threads: usize| threads.next_multiple_of(32) as u32;
        match columns {
            _ if !aligned || !columns.is_multiple_of(SPAN) => Form::Any { threads: warps(columns).min(1024) },
            0..=256 => Form::Heads { lanes: (columns / SPAN).next_power_of_two() as u32 },
            257..=8192 => Form::Two { threads: warps(columns.div_ceil(2 * SPAN)) },
            8193..=16384 => Form::Four { threads: warps(columns.div_ceil(4 * SPAN)) },
            _ => Form::Any { threads: 1024 },
        }
    }

    /// Selects the kernel of this form; `names` are in the order of the variants.
    fn kernel(self, names: [&'static str; 4]) -> &'static str {
        match self {
            Form::Heads { .. } => names[0],
            Form::Two { .. } => names[1],
            Form::Four { .. } => names[2],
            Form::Any { .. } => names[3],
        }
    }

    /// The kernel that also rounds rows to fp8, if a block handles a whole row.
    fn rounding(self, groups: &Groups, [two, four]: [&'static str; 2]) -> Option<&'static str> {
        match self {
            Form::Two { .. } if groups.of_row == 1 => Some(two),
            Form::Four { .. } if groups.of_row == 1 => Some(four),
            Form::Two { .. } | Form::Four { .. } | Form::Heads { .. } | Form::Any { .. } => None,
        }
    }

    fn threads(self) -> u32 {
        match self {
            Form::Heads { .. } => TEAM_THREADS,
            Form::Two { threads } | Form::Four { threads } | Form::Any { threads } => threads,
        }
    }

    /// Blocks for all groups: a team of lanes handles `of_team` groups; in the other forms a block handles one.
    fn blocks(self, groups: u32, of_team: u32) -> u32 {
        match self {
            Form::Heads { lanes } => groups.div_ceil(TEAM_THREADS / lanes * of_team),
            Form::Two { .. } | Form::Four { .. } | Form::Any { .. } => groups,
        }
    }
}

/// The groups of a matrix.
struct Groups {
    columns: usize,
    of_row: usize,
    all: u32,
}

impl Groups {
    fn of(stage: &Stage<'_>, x: &Operand, columns: usize) -> Groups {
        let of_row = x.columns / columns;
        Groups { columns, of_row, all: count(stage.rows(x) * of_row) }
    }
}

/// y = x / rms(x) · weight. The kernel also rounds y to fp8 if rounding steps follow and a block holds a row.
pub fn rms_norm(
    stage: &Stage<'_>,
    step: &BoundStep,
    norm: &Norm,
    unweighted: Option<usize>,
    roundings: &Roundings,
) -> Result<(), DeviceError> {
    let (x, y) = (&step.inputs[0], &step.outputs[0]);
    let weight = Weight::of(stage, step, norm, unweighted);
    let groups = Groups::of(stage, x, weight.channels);
    if groups.all == 0 {
        return Ok(());
    }
    let (x, y) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, y));
    let form = Form::of(groups.columns, x.aligned && weight.aligned && y.aligned);
    let mut args = vec![x.pointer, x.stride];
    args.extend(weight.args);
    args.extend([y.pointer, y.stride, int(groups.columns), int(groups.of_row)]);
    args.extend(lanes_args(form, &groups));
    if let Some(kernel) = form.rounding(&groups, ["rms_norm_round_two", "rms_norm_round_four"])
        && let Some([to, _]) = roundings.take()
    {
        return stage.launch_with(kernel, groups.all, form.threads(), &to, &args);
    }
    let kernel = form.kernel(["rms_norm_heads", "rms_norm_two", "rms_norm_four", "rms_norm_any"]);
    stage.launch(kernel, [form.blocks(groups.all, 2), 1, 1], form.threads(), 0, &args)
}

/// dx = the gradient through the norm, plus an addend if there is one. dx is rounded to fp8 as in [`rms_norm`].
pub fn rms_norm_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    norm: &Norm,
    unweighted: Option<usize>,
    addend: bool,
    roundings: &Roundings,
) -> Result<(), DeviceError> {
    let weight = Weight::of(stage, step, norm, unweighted);
    let groups = Groups::of(stage, &step.inputs[0], weight.channels);
    if groups.all == 0 {
        return Ok(());
    }
    let first = 1 + usize::from(unweighted.is_none());
    let [x, dy] = [0, first].map(|index| MatrixAddress::of(stage, &step.inputs[index]));
    let addend = if addend { MatrixAddress::of(stage, &step.inputs[first + 1]) } else { MatrixAddress::NONE };
    let dx = MatrixAddress::of(stage, &step.outputs[0]);
    let aligned = weight.aligned && [x, dy, addend, dx].iter().all(|place| place.aligned);
    let form = Form::of(groups.columns, aligned);
    let mut args = vec![x.pointer, x.stride];
    args.extend(weight.args);
    args.extend([dy.pointer, dy.stride, addend.pointer, addend.stride, dx.pointer, dx.stride]);
    args.extend([int(groups.columns), int(groups.of_row)]);
    args.extend(lanes_args(form, &groups));
    if let Some(kernel) = form.rounding(&groups, ["rms_norm_grad_round_two", "rms_norm_grad_round_four"])
        && let Some([to, _]) = roundings.take()
    {
        return stage.launch_with(kernel, groups.all, form.threads(), &to, &args);
    }
    let names = ["rms_norm_grad_heads", "rms_norm_grad_two", "rms_norm_grad_four", "rms_norm_grad_any"];
    let grid = [form.blocks(groups.all, 1), 1, 1];
    stage.launch(form.kernel(names), grid, form.threads(), 0, &args)
}

/// dweight += Σ dy·x / rms(x), with partial sums in the workspace.
pub fn rms_norm_weight_grad(stage: &Stage<'_>, step: &BoundStep, eps: f32) -> Result<(), DeviceError> {
    let (x, dy, dweight) = (&step.inputs[0], &step.inputs[1], &step.updates[0]);
    let columns = stage.rows(dweight) * dweight.columns;
    let groups = Groups::of(stage, x, columns);
    if groups.all == 0 {
        return Ok(());
    }
    let (x, dy) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, dy));
    let form = Form::of(columns, x.aligned && dy.aligned);
    let per_partial = rows_per_partial(groups.all as usize, NORM_GROUPS_PER_PARTIAL);
    let partials = (groups.all as usize).div_ceil(per_partial);
    let workspace = Arg::Pointer(stage.workspace_of(4 * partials * columns));
    let mut args = vec![x.pointer, x.stride, dy.pointer, dy.stride, Arg::Float(eps), workspace];
    args.extend([int(columns), int(groups.of_row), Arg::Word(groups.all), word(per_partial)]);
    if let Form::Heads { lanes } = form {
        args.push(Arg::Int(lanes as i32));
    }
    let kernel = form.kernel([
        "rms_norm_weight_partials_heads",
        "rms_norm_weight_partials_two",
        "rms_norm_weight_partials_four",
        "rms_norm_weight_partials_any",
    ]);
    stage.launch(kernel, [count(partials), 1, 1], form.threads(), 0, &args)?;
    add_partial_rows(stage, workspace, partials, columns, stage.pointer(dweight))
}

/// Adds the rows of `partials` (count, columns) to `target` (columns), in order.
pub(super) fn add_partial_rows(
    stage: &Stage<'_>,
    partials: Arg,
    count_of_partials: usize,
    columns: usize,
    target: u64,
) -> Result<(), DeviceError> {
    let args = [partials, int(count_of_partials), int(columns), Arg::Pointer(target)];
    stage.launch("add_partial_rows", [count(columns.div_ceil(32)), 1, 1], 256, 0, &args)
}

/// The weight of a norm; without one, the kernel sees a null pointer and adds 1 to zeros.
struct Weight {
    channels: usize,
    aligned: bool,
    /// Address, type, what is added to it, and the norm's epsilon.
    args: [Arg; 4],
}

impl Weight {
    fn of(stage: &Stage<'_>, step: &BoundStep, norm: &Norm, unweighted: Option<usize>) -> Weight {
        let eps = Arg::Float(norm.eps);
        if let Some(channels) = unweighted {
            let args = [MatrixAddress::NONE.pointer, Arg::Int(0), Arg::Float(1.0), eps];
            return Weight { channels, aligned: true, args };
        }
        let (weight, shift) = (&step.inputs[1], if norm.plus_one { 1.0 } else { 0.0 });
        let place = MatrixAddress::of_vector(stage, weight);
        let args = [place.pointer, stored_dtype(weight), Arg::Float(shift), eps];
        Weight { channels: stage.rows(weight), aligned: place.aligned, args }
    }
}

/// The last arguments of the `_heads` kernels.
fn lanes_args(form: Form, groups: &Groups) -> impl Iterator<Item = Arg> {
    let lanes = match form {
        Form::Heads { lanes } => Some([Arg::Word(groups.all), Arg::Int(lanes as i32)]),
        Form::Two { .. } | Form::Four { .. } | Form::Any { .. } => None,
    };
    lanes.into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The registers or lanes of the chosen form hold every group.
    #[test]
    fn forms_hold_their_groups() {
        for columns in 1..20_000 {
            for aligned in [false, true] {
                let form = Form::of(columns, aligned);
                let held = match form {
                    Form::Heads { lanes } => {
                        assert!(lanes.is_power_of_two() && lanes <= 32, "{columns}: {lanes} lanes");
                        SPAN * lanes as usize
                    }
                    Form::Two { threads } => 2 * SPAN * threads as usize,
                    Form::Four { threads } => 4 * SPAN * threads as usize,
                    Form::Any { .. } => usize::MAX,
                };
                assert!(held >= columns, "{form:?} for {columns}");
                let most = if matches!(form, Form::Any { .. }) { 1024 } else { 512 };
                assert!(form.threads().is_multiple_of(32) && form.threads() <= most, "{form:?}");
                let whole_spans = aligned && columns.is_multiple_of(SPAN);
                assert!(whole_spans || matches!(form, Form::Any { .. }), "{form:?} for {columns}");
            }
        }
    }
}
