//! One step being run on a GPU: where its operands are, and how a kernel is started for it.
//!
//! A launcher turns a bound step into launches. It sees device addresses and actual rows, never host memory:
//! nothing here waits for the GPU. The stream runs the launches in order.

use super::driver::{self, Gpu};
use super::matmul::CublasLt;
use super::modules::Kernels;
use crate::device::{BoundStep, DeviceError, Operand};
use cudarc::driver::sys;
use smidgen_ir::{DType, Extent, Space};
use std::ffi::c_void;

/// A file of kernels, compiled as one module.
#[derive(Clone, Copy, Debug)]
pub struct KernelFile {
    pub name: &'static str,
    pub source: &'static str,
    pub kernels: &'static [&'static str],
}

/// An argument of a kernel, in exactly the type that the kernel declares.
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

/// A step with the memory it works on.
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
    /// The planned extent, by which products choose how they are formed.
    pub(super) planned: &'a Extent,
    /// The numbers of activations.
    pub(super) activations: DType,
}

impl Stage<'_> {
    /// Address of an operand's first element.
    pub fn pointer(&self, operand: &Operand) -> u64 {
        let start = match operand.space {
            Space::Device => self.arena,
            Space::Host => self.host,
            Space::Disk => unreachable!("what lies on disk is brought before it is used"),
        };
        start + operand.offset as u64
    }

    /// Actual rows of this micro-batch.
    pub fn rows(&self, operand: &Operand) -> usize {
        operand.rows_at(self.extent)
    }

    /// Device address and bytes of the step's scratch.
    pub fn workspace(&self) -> (u64, usize) {
        let (offset, bytes) = self.step.workspace.unwrap_or((0, 0));
        (self.arena + offset as u64, bytes)
    }

    /// Multiprocessors of the GPU: for speed only, never for results.
    pub fn multiprocessors(&self) -> usize {
        self.gpu.multiprocessors
    }

    /// Whether the kernels of `attention_hopper.rs` can be launched.
    pub fn has_hopper_kernels(&self) -> bool {
        self.kernels.has_hopper()
    }

    pub fn planned(&self) -> &Extent {
        self.planned
    }

    pub fn activations(&self) -> DType {
        self.activations
    }

    /// Starts a kernel; nothing while products are timed.
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

    /// The same with a structure as the first argument, laid out as the kernel declares it.
    pub fn launch_with<T>(
        &self,
        kernel: &'static str,
        blocks: u32,
        block: u32,
        structure: &T,
        args: &[Arg],
    ) -> Result<(), DeviceError> {
        let place = std::ptr::from_ref(structure).cast_mut().cast();
        self.launch_places(kernel, [blocks, 1, 1], block, 0, Some(place), args)
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
        // SAFETY: the function belongs to a module of this context, the arguments are of the types that it
        // declares and live through the call, and the addresses among them lie in the reservation.
        let code = unsafe {
            sys::cuLaunchKernel(
                function,
                grid[0],
                grid[1],
                grid[2],
                block,
                1,
                1,
                shared_bytes,
                self.gpu.stream,
                places.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver::check(code, kernel)
    }

    /// Writes zeros.
    pub fn clear(&self, pointer: u64, bytes: usize) -> Result<(), DeviceError> {
        if self.cublas.is_timing() {
            return Ok(());
        }
        // SAFETY: the range lies in the reservation.
        let code = unsafe { sys::cuMemsetD8Async(pointer, 0, bytes, self.gpu.stream) };
        driver::check(code, "cuMemsetD8Async")
    }
}
