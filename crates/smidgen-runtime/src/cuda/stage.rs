//! The context of a launcher: one step with the addresses of its operands, and the calls that launch kernels.
//!
//! A launcher turns a bound step into kernel launches. It sees device addresses and actual row counts, never host
//! memory, and it never waits for the GPU. The stream runs the launches in order.

use super::cublas::CublasLt;
use super::driver::{self, Gpu};
use super::early::{early_start, starts_early};
use super::gpu_generation::Generation;
use super::matmul::{Element, Matrix, Tokens};
use super::modules::Kernels;
use crate::device::{BoundStep, DeviceError, Operand};
use cudarc::driver::sys;
use smidgen_ir::{DType, Extent, Space};
use std::ffi::c_void;

/// A kernel argument, of exactly the type that the kernel declares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    Pointer(u64),
    Int(i32),
    Word(u32),
    Long(i64),
    Wide(u64),
    Float(f32),
    Double(f64),
}

/// A step to launch.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) kernels: &'a Kernels,
    pub(super) cublas: &'a CublasLt,
    /// Addresses of the reservations on the device and on the host.
    pub(super) arena: u64,
    pub(super) host: u64,
    pub(super) step: &'a BoundStep,
    pub(super) extent: &'a Extent,
    /// The planned extent, which selects the algorithm of a matmul.
    pub(super) planned: &'a Extent,
    /// The element type of activations.
    pub(super) activations: DType,
    /// Whether the kernels listed in `early.rs` may start before the previous kernel has ended.
    pub(super) may_start_early: bool,
}

impl Stage<'_> {
    /// Address of an operand's first element.
    pub fn pointer(&self, operand: &Operand) -> u64 {
        let start = match operand.space {
            Space::Device => self.arena,
            Space::Host => self.host,
            Space::Disk => unreachable!("a tensor on disk is fetched before it is used"),
        };
        start + operand.offset as u64
    }

    /// The address of an operand as a kernel argument.
    pub fn address(&self, operand: &Operand) -> Arg {
        Arg::Pointer(self.pointer(operand))
    }

    /// A plain operand as a matrix.
    pub fn matrix(&self, operand: &Operand) -> Matrix {
        let dtype = operand.storage.plain().expect("quantized operands are decoded first");
        Matrix { pointer: self.pointer(operand), stride: operand.stride, element: Element::of(dtype) }
    }

    /// Rows of an operand in this micro-batch and in the plan.
    pub fn tokens(&self, operand: &Operand) -> Tokens {
        Tokens { rows: self.rows(operand), planned: operand.rows_at(self.planned) }
    }

    /// Rows of an operand in this micro-batch.
    pub fn rows(&self, operand: &Operand) -> usize {
        operand.rows_at(self.extent)
    }

    /// The first row of an operand in the tensor that it is a part of, and the rows of that tensor.
    pub fn rows_in_tensor(&self, operand: &Operand) -> (usize, usize) {
        operand.part.map_or((0, self.rows(operand)), |part| (part.first_row, part.total_rows))
    }

    /// Device address and bytes of the step's workspace.
    pub fn workspace(&self) -> (u64, usize) {
        let (offset, bytes) = self.step.workspace.unwrap_or((0, 0));
        (self.arena + offset as u64, bytes)
    }

    /// Device address of the step's workspace, which must have `needed` bytes.
    pub fn workspace_of(&self, needed: usize) -> u64 {
        let (pointer, bytes) = self.workspace();
        assert!(needed <= bytes, "`{}` needs {needed} bytes of workspace, got {bytes}", self.step.op.name());
        pointer
    }

    /// Multiprocessors of the GPU. They may change grids, never results.
    pub fn multiprocessors(&self) -> usize {
        self.gpu.multiprocessors
    }

    /// Shared memory that a block may use.
    pub fn most_shared_bytes(&self) -> u32 {
        self.kernels.most_shared_bytes()
    }

    /// The generation whose kernels are loaded.
    pub fn generation(&self) -> Generation {
        self.kernels.generation()
    }

    /// Whether the kernels of `attention_hopper.rs` can be launched.
    pub fn has_hopper_kernels(&self) -> bool {
        self.kernels.has_hopper()
    }

    /// The element type of activations, as the matmuls name it.
    pub fn element(&self) -> Element {
        Element::of(self.activations)
    }

    /// Launches a kernel; does nothing while matmuls are being timed.
    pub fn launch(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        self.launch_places(kernel, grid, block, shared_bytes, None, args)
    }

    /// Like [`Stage::launch`], with a structure as the first argument, in the layout that the kernel declares.
    pub fn launch_with<T>(
        &self,
        kernel: &'static str,
        blocks: u32,
        block: u32,
        structure: &T,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        self.launch_structure(kernel, [blocks, 1, 1], block, 0, structure, args)
    }

    /// Like [`Stage::launch_with`], on any grid and with dynamic shared memory.
    pub fn launch_structure<T>(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        structure: &T,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let place = std::ptr::from_ref(structure).cast_mut().cast();
        self.launch_places(kernel, grid, block, shared_bytes, Some(place), args)
    }

    fn launch_places(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        first: Option<*mut c_void>,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        if self.cublas.is_timing() {
            return Ok(());
        }
        debug_assert!(grid.iter().all(|side| *side > 0), "`{kernel}` with an empty grid {grid:?}");
        let function = self.kernels.function(kernel, shared_bytes)?;
        let mut places = [std::ptr::null_mut::<c_void>(); 32];
        let (before, rest) = places.split_at_mut(usize::from(first.is_some()));
        before.iter_mut().zip(first).for_each(|(place, first)| *place = first);
        assert!(args.len() <= rest.len(), "`{kernel}` has {} arguments", args.len());
        for (place, arg) in rest.iter_mut().zip(args) {
            *place = match arg {
                Arg::Pointer(value) | Arg::Wide(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Int(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Word(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Long(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Float(value) => std::ptr::from_ref(value).cast_mut().cast(),
                Arg::Double(value) => std::ptr::from_ref(value).cast_mut().cast(),
            };
        }
        let [grid_x, grid_y, grid_z] = grid;
        let mut early = early_start();
        let config = sys::CUlaunchConfig {
            gridDimX: grid_x,
            gridDimY: grid_y,
            gridDimZ: grid_z,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: self.gpu.stream,
            attrs: &mut early,
            numAttrs: u32::from(self.may_start_early && starts_early(kernel)),
        };
        // SAFETY: the function belongs to a module of this context, the arguments are of the types that it
        // declares and live through the call, and the addresses among them are inside the reservation. A kernel that
        // starts early waits for those before it (`early.rs`).
        let code =
            unsafe { sys::cuLaunchKernelEx(&config, function, places.as_mut_ptr(), std::ptr::null_mut()) };
        driver::check(code, kernel)
    }

    /// Zeros a range of the reservation.
    pub fn clear(&self, pointer: u64, bytes: usize) -> Result<(), DeviceError> {
        if self.cublas.is_timing() {
            return Ok(());
        }
        // SAFETY: the range is inside the reservation.
        let code = unsafe { sys::cuMemsetD8Async(pointer, 0, bytes, self.gpu.stream) };
        driver::check(code, "cuMemsetD8Async")
    }
}
