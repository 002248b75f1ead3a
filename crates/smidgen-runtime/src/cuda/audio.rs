//! Launches the kernels that copy rows between the audio encoder and the residual stream.
//!
//! Left out: the layers of an audio encoder (`audio_conv.rs`, `chunk_attention.rs`, `layer_norm.rs`, `plain_act.rs`).

use super::modules::KernelFile;
use super::spans::{MatrixAddress, THREADS, grid_over, int};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError};

pub const FILE: KernelFile = KernelFile {
    name: "audio.cu",
    source: include_str!("../../kernels/audio.cu"),
    kernels: &["copy_strided", "place_rows", "take_rows"],
};

/// y = x, except that row rows[a] is row a of the audio, or zero if `clear`.
pub fn place_rows(stage: &Stage<'_>, step: &BoundStep, clear: bool) -> Result<(), DeviceError> {
    let (x, rows, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (from, to) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, y));
    let (tokens, columns) = (stage.rows(y), y.columns);
    if stage.pointer(x) != stage.pointer(y)
        && let Some(grid) = grid_over(tokens * columns)
    {
        let elements = Arg::Long((tokens * columns) as i64);
        let args = [from.pointer, from.stride, to.pointer, to.stride, int(columns), elements];
        stage.launch("copy_strided", grid, THREADS, 0, &args)?;
    }
    let elements = stage.rows(rows) * columns;
    let Some(grid) = grid_over(elements) else { return Ok(()) };
    let (audio, stride) = if clear {
        (Arg::Pointer(0), Arg::Long(0))
    } else {
        let audio = MatrixAddress::of(stage, &step.inputs[2]);
        (audio.pointer, audio.stride)
    };
    let args = [
        audio,
        stride,
        stage.address(rows),
        to.pointer,
        to.stride,
        int(tokens),
        int(columns),
        Arg::Long(elements as i64),
    ];
    stage.launch("place_rows", grid, THREADS, 0, &args)
}

/// y[a] = x[rows[a]], or zero if rows[a] is negative.
pub fn take_rows(stage: &Stage<'_>, step: &BoundStep) -> Result<(), DeviceError> {
    let (x, rows, y) = (&step.inputs[0], &step.inputs[1], &step.outputs[0]);
    let (from, to) = (MatrixAddress::of(stage, x), MatrixAddress::of(stage, y));
    let elements = stage.rows(y) * y.columns;
    let Some(grid) = grid_over(elements) else { return Ok(()) };
    let args = [
        from.pointer,
        from.stride,
        int(stage.rows(x)),
        stage.address(rows),
        to.pointer,
        to.stride,
        int(y.columns),
        Arg::Long(elements as i64),
    ];
    stage.launch("take_rows", grid, THREADS, 0, &args)
}
