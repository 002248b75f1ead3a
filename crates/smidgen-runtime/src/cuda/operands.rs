//! The operands of the matmuls of layers: weights in the matmul type, biases, residuals, adapters, scratch memory.
//!
//! A weight that is not stored in the matmul type is decoded into the workspace, with room for its adapter.
//! `linear.rs` and `fp8.rs` decide which of these a linear layer uses. Kernels: `kernels/matmul.cu`.

use super::decode::decode_rows;
use super::matmul::{Matmul, Matrix};
use super::modules::KernelFile;
use super::spans::{int, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::Storage;
use smidgen_ir::plan::align_up;

pub const FILE: KernelFile = KernelFile {
    name: "matmul.cu",
    source: include_str!("../../kernels/matmul.cu"),
    kernels: &["copy_rows", "copy_groups", "broadcast_row", "fill_with_noise"],
};

/// Hands out parts of the step's workspace from its start. The last part is the workspace of the matmuls.
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
        assert!(self.next <= self.end, "{bytes} more bytes do not fit the planned workspace");
        pointer
    }
}

/// Copies rows to another stride, and zeros the columns from `columns` to `padded`.
pub fn copy_rows(
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
    stage.launch("copy_rows", [blocks as u32, 1, 1], 256, 0, &args)
}

/// Rows whose columns are equal groups, from one of the columns of each group on.
#[derive(Clone, Copy)]
struct Groups {
    matrix: Matrix,
    /// Columns of a group.
    width: usize,
}

/// Copies `columns` of each group, and zeros those from there to `padded`.
fn copy_groups(
    stage: &Stage<'_>,
    [from, to]: [Groups; 2],
    [rows, groups]: [usize; 2],
    columns: usize,
    padded: usize,
) -> Result<(), DeviceError> {
    if groups == 1 {
        return copy_rows(stage, from.matrix, to.matrix, rows, columns, padded);
    }
    if rows * padded == 0 {
        return Ok(());
    }
    let place =
        |of: Groups| [Arg::Pointer(of.matrix.pointer), Arg::Long(of.matrix.stride as i64), int(of.width)];
    let args = [place(from).as_slice(), &place(to), &[rows, groups, columns, padded].map(int)].concat();
    let blocks = (rows * groups * padded).div_ceil(256);
    stage.launch("copy_groups", [blocks as u32, 1, 1], 256, 0, &args)
}

/// y = the columns of each group of x from `first` on.
pub fn slice_columns(
    stage: &Stage<'_>,
    step: &BoundStep,
    first: usize,
    columns: usize,
    groups: usize,
) -> Result<(), DeviceError> {
    let (x, y) = (&step.inputs[0], &step.outputs[0]);
    let from = Groups { matrix: stage.matrix(x).at(0, first), width: x.columns / groups };
    let to = Groups { matrix: stage.matrix(y), width: columns };
    copy_groups(stage, [from, to], [stage.rows(y), groups], columns, columns)
}

/// Copies each part to its columns of each group; the columns between parts become zero.
pub fn place_columns(
    stage: &Stage<'_>,
    step: &BoundStep,
    firsts: &[usize],
    columns: usize,
    groups: usize,
) -> Result<(), DeviceError> {
    let (y, rows) = (stage.matrix(&step.outputs[0]), [stage.rows(&step.outputs[0]), groups]);
    let to = |first: usize| Groups { matrix: y.at(0, first), width: columns };
    let of_part = |part: &Operand| Groups { matrix: stage.matrix(part), width: part.columns / groups };
    let ends = firsts[1..].iter().copied().chain([columns]);
    for ((part, first), end) in step.inputs.iter().zip(firsts).zip(ends) {
        let from = of_part(part);
        copy_groups(stage, [from, to(*first)], rows, from.width, end - first)?;
    }
    match firsts[0] {
        0 => Ok(()),
        // Copies no column, and zeros those before the first part.
        first => copy_groups(stage, [of_part(&step.inputs[0]), to(0)], rows, 0, first),
    }
}

/// Writes a stored vector to every row.
fn broadcast_row(stage: &Stage<'_>, bias: &Operand, output: &Operand) -> Result<(), DeviceError> {
    let rows = stage.rows(output);
    if rows == 0 {
        return Ok(());
    }
    let args = [
        stage.address(bias),
        stored_dtype(bias),
        stage.address(output),
        Arg::Long(output.stride as i64),
        Arg::Int(rows as i32),
        Arg::Int(output.columns as i32),
    ];
    let blocks = [output.columns.div_ceil(256) as u32, rows.min(4096) as u32, 1];
    stage.launch("broadcast_row", blocks, 256, 0, &args)
}

/// Whether an operand is stored in the type of matmuls.
pub fn is_matmul_type(stage: &Stage<'_>, operand: &Operand) -> bool {
    operand.storage == Storage::Plain(stage.activations)
}

/// Where a decoded weight has room for its adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterRoom {
    None,
    /// Spare columns at the end of each row.
    Columns(usize),
    /// Spare rows after the last.
    Rows(usize),
}

/// A weight in the matmul type: as stored, or decoded with room for its adapter.
pub fn weight_matrix(
    stage: &Stage<'_>,
    scratch: &mut Scratch,
    weight: &Operand,
    room: AdapterRoom,
) -> Result<Matrix, DeviceError> {
    if is_matmul_type(stage, weight) {
        return Ok(stage.matrix(weight));
    }
    let (spare_columns, spare_rows) = match room {
        AdapterRoom::None => (0, 0),
        AdapterRoom::Columns(columns) => (columns, 0),
        AdapterRoom::Rows(rows) => (0, rows),
    };
    let (rows, stride, element) = (stage.rows(weight), weight.columns + spare_columns, stage.element());
    let pointer = scratch.take((rows + spare_rows) * stride * element.bytes());
    decode_rows(stage, weight, 0, rows, pointer, stride)?;
    Ok(Matrix { pointer, stride, element })
}

/// The terms that a matmul adds to left·right: a matrix, and a bias (by address) in every row.
#[derive(Clone, Copy, Debug)]
pub struct Addends {
    pub matrix: Option<Matrix>,
    pub bias: Option<u64>,
}

impl Addends {
    /// The addends of a linear layer. A bias that cuBLASLt cannot add is written to every row of `y` first.
    pub fn of(
        stage: &Stage<'_>,
        bias: Option<&Operand>,
        residual: Option<&Operand>,
        y: &Operand,
    ) -> Result<Addends, DeviceError> {
        let mut addends = Addends { matrix: residual.map(|residual| stage.matrix(residual)), bias: None };
        match bias {
            Some(bias) if bias_fits_epilogue(stage, bias) => addends.bias = Some(stage.pointer(bias)),
            Some(bias) => {
                assert!(residual.is_none(), "`residual_of` allows no residual with this bias");
                broadcast_row(stage, bias, y)?;
                addends.matrix = Some(stage.matrix(y));
            }
            None => {}
        }
        Ok(addends)
    }
}

/// y = scale·h·Bᵀ + `addend`.
pub fn add_adapter(
    stage: &Stage<'_>,
    (h, b, scale): (&Operand, Matrix, f32),
    addend: Option<Matrix>,
    y: &Operand,
    scratch: u64,
) -> Result<(), DeviceError> {
    let matrices = [stage.matrix(h), b, stage.matrix(y)];
    let matmul = Matmul {
        right_transposed: true,
        addend,
        alpha: scale,
        ..Matmul::of_tokens(matrices, stage.tokens(y), y.columns, h.columns, scratch)
    };
    stage.cublas.run(stage.gpu, &matmul)
}

/// Whether cuBLASLt can add the bias itself.
pub fn bias_fits_epilogue(stage: &Stage<'_>, bias: &Operand) -> bool {
    is_matmul_type(stage, bias) && stage.pointer(bias).is_multiple_of(16)
}
