//! Launches decays, scans and their gradients.
//!
//! Kernels are compiled for squares of several sides; a state is padded to the next one. The backward pass has its states
//! in the workspace, and there the gradients of queries and keys of each head, if heads share them.

use super::modules::KernelFile;
use super::spans::{MatrixAddress, THREADS, count, dtype_code, grid_over, int};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::shape::align_up;
use smidgen_ir::workspace_cuda::{SCAN_SIDES, scan_bytes, scan_side, scan_states};
use smidgen_ir::{DecayShape, ScanShape};

pub const DECAY_FILE: KernelFile = KernelFile {
    name: "decay.cu",
    source: include_str!("../../kernels/decay.cu"),
    kernels: &["decay", "decay_grad", "decay_vectors_grad", "sum_groups"],
};

macro_rules! file {
    ($side:literal) => {
        KernelFile {
            name: concat!("scan_", $side),
            source: concat!("#define SIDE ", $side, "\n", include_str!("../../kernels/scan.cu")),
            kernels: &[concat!("scan_", $side), concat!("scan_grad_", $side), concat!("cached_scan_", $side)],
        }
    };
}

/// The files for each side, and the largest state.
pub const FILES: [KernelFile; 4] = [file!(16), file!(64), file!(128), file!(256)];
pub const MOST_CHANNELS: usize = SCAN_SIDES[SCAN_SIDES.len() - 1];

/// The file for a state. A larger one is refused before it is asked for.
pub fn file(shape: &ScanShape) -> KernelFile {
    let side = scan_side(shape).unwrap_or(MOST_CHANNELS);
    FILES[SCAN_SIDES.iter().position(|one| *one == side).expect("a side of the list")]
}

/// A structure of the kernels, in their layout.
#[repr(C)]
#[derive(Clone, Copy)]
struct DecayArgs {
    a: u64,
    a_stride: i64,
    log_decay: u64,
    log_decay_dtype: i32,
    dt_bias: u64,
    dt_bias_dtype: i32,
    b: u64,
    b_stride: i64,
    least: f32,
    most: f32,
    write: f32,
    rows: i32,
    heads: i32,
}

impl DecayArgs {
    fn of(stage: &Stage<'_>, step: &BoundStep, shape: &DecayShape) -> DecayArgs {
        let [a, log_decay, dt_bias] = [0, 1, 2].map(|index| &step.inputs[index]);
        let b = shape.write.map(|_| &step.inputs[3]);
        DecayArgs {
            a: stage.pointer(a),
            a_stride: a.stride as i64,
            log_decay: stage.pointer(log_decay),
            log_decay_dtype: dtype_code(log_decay),
            dt_bias: stage.pointer(dt_bias),
            dt_bias_dtype: dtype_code(dt_bias),
            b: b.map_or(0, |b| stage.pointer(b)),
            b_stride: b.map_or(0, |b| b.stride as i64),
            least: shape.least,
            most: shape.most,
            write: shape.write.unwrap_or(0.0),
            rows: stage.rows(a) as i32,
            heads: a.columns as i32,
        }
    }
}

/// f32 rows without gaps, as gates are.
fn gates(stage: &Stage<'_>, operand: &Operand) -> Arg {
    assert!(operand.is_dense(), "gates are dense rows");
    stage.address(operand)
}

/// Log decays and how strongly tokens are written.
pub fn decay(stage: &Stage<'_>, step: &BoundStep, shape: &DecayShape) -> Result<(), DeviceError> {
    let args = DecayArgs::of(stage, step, shape);
    let [g, beta] = [0, 1].map(|output| gates(stage, &step.outputs[output]));
    let Some(grid) = grid_over(args.rows as usize * args.heads as usize) else { return Ok(()) };
    stage.launch_structure("decay", grid, THREADS, 0, &args, &[g, beta])
}

/// Gradients of the projections, and of the two vectors if they are trained.
pub fn decay_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &DecayShape,
    trains: [bool; 2],
) -> Result<(), DeviceError> {
    let args = DecayArgs::of(stage, step, shape);
    let first = 3 + usize::from(shape.write.is_some());
    let upstream = [first, first + 1].map(|input| gates(stage, &step.inputs[input]));
    let Some(grid) = grid_over(args.rows as usize * args.heads as usize) else { return Ok(()) };
    let da = MatrixAddress::of(stage, &step.outputs[0]);
    let db = step.outputs.get(1).map_or(MatrixAddress::NONE, |db| MatrixAddress::of(stage, db));
    let outputs = [da.pointer, da.stride, db.pointer, db.stride];
    stage.launch_structure("decay_grad", grid, THREADS, 0, &args, &[&upstream[..], &outputs].concat())?;
    if trains == [false; 2] {
        return Ok(());
    }
    let mut updates = step.updates.iter();
    let vectors = trains.map(|trains| {
        let update = if trains { updates.next() } else { None };
        update.map_or(Arg::Pointer(0), |update| stage.address(update))
    });
    let heads = [count(args.heads as usize), 1, 1];
    stage.launch_structure(
        "decay_vectors_grad",
        heads,
        THREADS,
        0,
        &args,
        &[upstream.as_slice(), &vectors].concat(),
    )
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ShapeArgs {
    heads: i32,
    group: i32,
    key_dim: i32,
    value_dim: i32,
    delta: i32,
    query_scale: f32,
    key_scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RowsArgs {
    q: u64,
    q_stride: i64,
    k: u64,
    k_stride: i64,
    v: u64,
    v_stride: i64,
    g: u64,
    beta: u64,
}

/// The first two arguments of every kernel on states.
#[repr(C)]
#[derive(Clone, Copy)]
struct ScanArgs {
    shape: ShapeArgs,
    rows: RowsArgs,
}

impl ScanArgs {
    fn of(stage: &Stage<'_>, step: &BoundStep, shape: &ScanShape) -> ScanArgs {
        let [q, k, v, g, beta] = [0, 1, 2, 3, 4].map(|index| &step.inputs[index]);
        assert!(g.is_dense() && beta.is_dense(), "gates are dense rows");
        ScanArgs {
            shape: ShapeArgs {
                heads: shape.heads as i32,
                group: shape.group() as i32,
                key_dim: shape.key_dim as i32,
                value_dim: shape.value_dim as i32,
                delta: i32::from(shape.delta),
                query_scale: shape.query_scale,
                key_scale: shape.key_scale,
            },
            rows: RowsArgs {
                q: stage.pointer(q),
                q_stride: q.stride as i64,
                k: stage.pointer(k),
                k_stride: k.stride as i64,
                v: stage.pointer(v),
                v_stride: v.stride as i64,
                g: stage.pointer(g),
                beta: stage.pointer(beta),
            },
        }
    }
}

/// The kernel of a state's side: the one of a list in the order of the sides.
fn of_side(shape: &ScanShape, kernels: [&'static str; 4]) -> &'static str {
    let side = scan_side(shape).expect("`check` refuses larger states");
    kernels[SCAN_SIDES.iter().position(|one| *one == side).expect("a side of the list")]
}

/// o of all samples.
pub fn scan(stage: &Stage<'_>, step: &BoundStep, shape: &ScanShape) -> Result<(), DeviceError> {
    let (boundaries, o) = (&step.inputs[5], MatrixAddress::of(stage, &step.outputs[0]));
    let samples = stage.rows(boundaries) - 1;
    if samples == 0 {
        return Ok(());
    }
    let kernel = of_side(shape, ["scan_16", "scan_64", "scan_128", "scan_256"]);
    let (grid, args) = ([count(shape.heads), count(samples), 1], ScanArgs::of(stage, step, shape));
    stage.launch_structure(kernel, grid, THREADS, 0, &args, &[stage.address(boundaries), o.pointer, o.stride])
}

/// o of new tokens, from the states of their slots.
pub fn cached_scan(stage: &Stage<'_>, step: &BoundStep, shape: &ScanShape) -> Result<(), DeviceError> {
    let [slots, positions] = [5, 6].map(|index| stage.address(&step.inputs[index]));
    let (o, tokens) = (MatrixAddress::of(stage, &step.outputs[0]), stage.rows(&step.outputs[0]));
    if tokens == 0 {
        return Ok(());
    }
    let kernel = of_side(shape, ["cached_scan_16", "cached_scan_64", "cached_scan_128", "cached_scan_256"]);
    let states = stage.address(&step.updates[0]);
    let rest = [slots, positions, states, o.pointer, o.stride, int(tokens)];
    let args = ScanArgs::of(stage, step, shape);
    stage.launch_structure(kernel, [count(shape.heads), 1, 1], THREADS, 0, &args, &rest)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GradientArgs {
    upstream: u64,
    upstream_stride: i64,
    dv: u64,
    dv_stride: i64,
    dg: u64,
    dbeta: u64,
    states: u64,
    stored_chunks: i32,
    states_of_head: i32,
    chunk: i32,
    dq: u64,
    dq_stride: i64,
    dk: u64,
    dk_stride: i64,
    shared_dq: u64,
    shared_dk: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScanGradArgs {
    scan: ScanArgs,
    gradients: GradientArgs,
}

/// Gradients of all inputs.
pub fn scan_grad(stage: &Stage<'_>, step: &BoundStep, shape: &ScanShape) -> Result<(), DeviceError> {
    let (boundaries, tokens) = (&step.inputs[6], stage.rows(&step.inputs[0]));
    let samples = stage.rows(boundaries) - 1;
    if samples == 0 || tokens == 0 {
        return Ok(());
    }
    let side = scan_side(shape).expect("`check` refuses larger states");
    let [stored_chunks, chunk] = scan_states(shape, tokens, samples);
    let workspace = stage.workspace_of(scan_bytes(shape, tokens, samples));
    let states_bytes = 4 * shape.heads * side * side * (stored_chunks + chunk);
    let shared_floats = tokens * shape.heads * shape.key_dim;
    let shared_dq = workspace + align_up(states_bytes) as u64;
    let shared_dk = shared_dq + 4 * shared_floats as u64;
    let is_shared = shape.group() > 1;
    let [upstream, dq, dk, dv] =
        [&step.inputs[5], &step.outputs[0], &step.outputs[1], &step.outputs[2]].map(|of| stage.matrix(of));
    let [dg, dbeta] = [3, 4].map(|output| &step.outputs[output]);
    assert!(dg.is_dense() && dbeta.is_dense(), "gates are dense rows");
    let gradients = GradientArgs {
        upstream: upstream.pointer,
        upstream_stride: upstream.stride as i64,
        dv: dv.pointer,
        dv_stride: dv.stride as i64,
        dg: stage.pointer(dg),
        dbeta: stage.pointer(dbeta),
        states: workspace,
        stored_chunks: stored_chunks as i32,
        states_of_head: (stored_chunks + chunk) as i32,
        chunk: shape.chunk as i32,
        dq: dq.pointer,
        dq_stride: dq.stride as i64,
        dk: dk.pointer,
        dk_stride: dk.stride as i64,
        shared_dq: if is_shared { shared_dq } else { 0 },
        shared_dk: if is_shared { shared_dk } else { 0 },
    };
    let args = ScanGradArgs { scan: ScanArgs::of(stage, step, shape), gradients };
    let kernel = of_side(shape, ["scan_grad_16", "scan_grad_64", "scan_grad_128", "scan_grad_256"]);
    let rest = [stage.address(boundaries), int(samples)];
    stage.launch_structure(kernel, [count(shape.heads), 1, 1], THREADS, 0, &args, &rest)?;
    if !is_shared {
        return Ok(());
    }
    for (from, to) in [(shared_dq, dq), (shared_dk, dk)] {
        let Some(grid) = grid_over(tokens * shape.channels().0) else { return Ok(()) };
        let mut args = vec![Arg::Pointer(from), Arg::Pointer(to.pointer), Arg::Long(to.stride as i64)];
        args.push(Arg::Long(tokens as i64));
        args.extend([shape.key_heads, shape.group(), shape.key_dim].map(int));
        stage.launch("sum_groups", grid, THREADS, 0, &args)?;
    }
    Ok(())
}
