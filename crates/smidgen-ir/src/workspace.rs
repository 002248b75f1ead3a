//! Scratch memory of one step: its size on a CPU and on a GPU, next to each other.
//!
//! The planner reserves the scratch and a device refuses a plan that gives it less, so both call `Op::workspace_bytes`. The op
//! table says which of these sizes an operation needs; most need none. The parts that they are made of are in
//! `workspace_cpu.rs` and `workspace_cuda.rs`, where kernels read them too.

use crate::expert_attributes::{ExpertRows, Router};
use crate::loss_head::{HeadPiece, LossHead};
use crate::op_attributes::AttentionShape;
use crate::recurrence::ScanShape;
use crate::shape::{Extent, Type, align_up};
use crate::target::{DeviceKind, Precision};
use crate::workspace_cpu::{self as cpu_sizes, CpuStep, aligned_floats};
use crate::workspace_cuda::{self as gpu_sizes, CudaStep, MATMUL_BYTES};
use std::ops::Range;

/// The properties of a plan that scratch sizes depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub device: DeviceKind,
    pub precision: Precision,
    /// Threads of a CPU; unused on a GPU.
    pub threads: usize,
}

/// The inputs of one step, and the sizes that rows of the op table name.
#[derive(Clone, Copy)]
pub(crate) struct StepInputs<'a> {
    pub inputs: &'a [&'a Type],
    pub extent: &'a Extent,
    pub target: Target,
}

impl<'a> StepInputs<'a> {
    /// Applies the formula of a row; the signature lets rows leave out the type of `step`.
    pub fn apply(&self, formula: impl FnOnce(&Self) -> usize) -> usize {
        formula(self)
    }

    pub fn linear(&self, bias: bool, lora: bool) -> usize {
        self.scratch(
            |cpu| aligned_floats(if bias { cpu.size(2).0 } else { 0 }) + cpu.matmul_floats(),
            |gpu| {
                let h = 2 + usize::from(bias);
                let (rank, b) = if lora { (gpu.size(h).1, gpu.decoded_bytes(h + 1, 0)) } else { (0, 0) };
                gpu.operand_bytes(0, 1, rank) + b + MATMUL_BYTES
            },
        )
    }

    pub fn linear_grad(&self, terms: usize) -> usize {
        self.scratch(|cpu| cpu.matmul_floats(), |gpu| linear_grad_bytes(gpu, terms))
    }

    pub fn matmul(&self) -> usize {
        self.scratch(|cpu| cpu.matmul_floats(), |_| MATMUL_BYTES)
    }

    /// Counts of each block of choices and expert.
    pub fn dispatch(&self, experts: usize) -> usize {
        self.scratch(
            |_| experts + 1,
            |gpu| {
                let (rows, columns) = gpu.size(0);
                4 * experts * ((rows * columns).div_ceil(gpu_sizes::DISPATCH_BLOCK) + 1)
            },
        )
    }

    /// The share of each choice in the gradient of its expert's scale.
    pub fn route_grad(&self, router: &Router) -> usize {
        let has_scales = router.has_expert_scales;
        self.scratch(|_| 0, |gpu| if has_scales { 4 * gpu.size(0).0 * router.chosen } else { 0 })
    }

    /// A matmul of sorted rows with some rows of each expert's matrix.
    pub fn grouped(&self, part: &ExpertRows, bias: bool) -> usize {
        self.scratch(
            |cpu| aligned_floats(if bias { part.rows } else { 0 }) + cpu.matmul_floats(),
            |gpu| {
                // Where the rows of each expert and its tiles begin, and the expert of each tile.
                let (rows, experts) = (gpu.size(0).0, part.experts);
                4 * (2 * (experts + 1) + gpu_sizes::group_tiles(rows, experts))
            },
        )
    }

    pub fn lm_head_loss(&self, head: &LossHead) -> usize {
        self.scratch(
            |cpu| {
                let logits = head.chunk * cpu_sizes::logit_stride(cpu.size(1).0);
                logits + aligned_floats(head.chunk) + cpu.matmul_floats()
            },
            |gpu| loss_bytes(gpu, head),
        )
    }

    /// A piece of the head; with `rounds`, its f32 result is rounded.
    pub fn head_piece(&self, piece: &HeadPiece, rounds: bool) -> usize {
        self.scratch(
            |cpu| piece.chunk * cpu_sizes::logit_stride(cpu.size(1).0) + cpu.matmul_floats(),
            |gpu| {
                let is_rounded = rounds && gpu.precision != Precision::F32;
                let sums = if is_rounded { align_up(piece.chunk * gpu.size(0).1 * 4) } else { 0 };
                // The decoded rows of the head, a chunk of their logits, and the scratch of a matmul.
                gpu.decoded_head_bytes() + gpu.logits_bytes(piece.chunk) + MATMUL_BYTES + sums
            },
        )
    }

    pub fn logits(&self, lora: bool) -> usize {
        self.scratch(
            |cpu| cpu.matmul_floats(),
            |gpu| {
                let logits = gpu.logits_bytes(gpu.size(0).0);
                let b = if lora { gpu.decoded_bytes(3, 0) } else { 0 };
                gpu.decoded_head_bytes() + logits + b + MATMUL_BYTES
            },
        )
    }

    pub fn attention(&self, shape: &AttentionShape, gradient: bool) -> usize {
        self.scratch(|cpu| cpu.attention_floats(shape), |gpu| gpu.attention_bytes(shape, gradient))
    }

    pub fn chunk_attention_grad(&self, shape: &AttentionShape) -> usize {
        self.scratch(|_| 0, |gpu| gpu_sizes::attention_floats_bytes(gpu.extent.audio, shape))
    }

    pub fn cached_attention(&self, shape: &AttentionShape) -> usize {
        self.scratch(
            |cpu| cpu.f32_attention_floats(shape),
            |gpu| gpu_sizes::cached_attention_bytes(gpu.size(0).0, gpu.size(3).1, shape),
        )
    }

    /// The weight of a convolution, which is that input, tap by tap, and its bias.
    pub fn causal_conv(&self, weight: usize) -> usize {
        self.scratch(
            |cpu| {
                let (channels, taps) = cpu.size(weight);
                (taps + 1) * channels
            },
            |_| 0,
        )
    }

    pub fn scan(&self, shape: &ScanShape, gradient: bool) -> usize {
        self.scratch(
            |cpu| cpu_sizes::scan_floats(shape, cpu.size(0).0, cpu.threads, gradient),
            |gpu| if gradient { gpu_sizes::scan_bytes(shape, gpu.size(0).0, gpu.extent.segments) } else { 0 },
        )
    }

    pub fn cached_scan(&self, shape: &ScanShape) -> usize {
        self.scratch(|cpu| cpu_sizes::scan_floats(shape, 0, cpu.threads, false), |_| 0)
    }

    pub fn norm_weight_grad(&self) -> usize {
        self.scratch(
            |cpu| cpu_sizes::norm_partials_floats(cpu.size(0).0, cpu.size(0).1),
            |gpu| gpu.partial_sums_bytes(gpu_sizes::NORM_GROUPS_PER_PARTIAL),
        )
    }

    pub fn bias_grad(&self) -> usize {
        self.scratch(|_| 0, |gpu| gpu.partial_sums_bytes(gpu_sizes::BIAS_ROWS_PER_PARTIAL))
    }

    pub fn sinks_grad(&self) -> usize {
        self.scratch(
            |cpu| cpu.size(1).0 * cpu.size(1).1,
            |gpu| {
                let (rows, heads) = gpu.size(1);
                gpu_sizes::partial_sums_bytes(rows, heads, gpu_sizes::NORM_GROUPS_PER_PARTIAL)
            },
        )
    }

    /// A sum for each row and factor on a CPU; on a GPU for groups of rows. The number of factors is that of the update,
    /// which is at most the number of columns.
    pub fn scale_by_grad(&self) -> usize {
        self.scratch(|cpu| cpu.size(0).0, |gpu| gpu.partial_sums_bytes(gpu_sizes::NORM_GROUPS_PER_PARTIAL))
    }

    pub fn scale_columns(&self, bias: bool) -> usize {
        self.scratch(|cpu| if bias { cpu.size(3).0 } else { 0 }, |_| 0)
    }

    pub fn magnitude_grad(&self) -> usize {
        self.scratch(|_| 0, |gpu| gpu_sizes::magnitude_partials_bytes(gpu.size(0).0, gpu.size(0).1))
    }

    pub fn row_norms(&self) -> usize {
        self.scratch(
            |cpu| {
                let (n, k) = cpu.size(0);
                let block = cpu_sizes::norm_block_rows(n, k);
                aligned_floats(block * k) + cpu_sizes::matmul_floats(cpu.threads)
            },
            |gpu| {
                let (n, k) = gpu.size(0);
                4 * gpu_sizes::norm_block_rows(n, k) * k
            },
        )
    }

    pub fn fourier(&self) -> usize {
        self.scratch(
            |cpu| {
                let (rows, n) = cpu.size(0);
                aligned_floats(cpu_sizes::FOURIER_ROWS.min(rows) * n) + cpu.matmul_floats()
            },
            |_| 0,
        )
    }

    pub fn fourier_grad(&self) -> usize {
        self.scratch(
            |cpu| {
                let (rows, n) = cpu.size(4);
                aligned_floats(2 * cpu_sizes::fourier_partials(rows, n)) + cpu.matmul_floats()
            },
            |gpu| {
                let (rows, n) = gpu.size(4);
                let (across, down) = gpu_sizes::fourier_blocks(rows, n, gpu.element());
                8 * across * down * gpu_sizes::FOURIER_SUMS
            },
        )
    }

    /// A GPU needs the numbers of each sequence until all sequences of a micro-batch are done.
    pub fn objective(&self) -> usize {
        self.scratch(|_| 0, |gpu| 8 * gpu.size(3).0 * gpu_sizes::OBJECTIVE_COLUMNS)
    }

    /// Scratch for the sum of the squares of some inputs.
    pub fn squares(&self, summed: Range<usize>) -> usize {
        self.scratch(
            |cpu| {
                let elements = summed.clone().map(|input| cpu.size(input).0 * cpu.size(input).1);
                2 * elements.max().unwrap_or(0).div_ceil(cpu_sizes::SQUARES_CHUNK)
            },
            |gpu| {
                let elements = summed.clone().map(|input| gpu.size(input).0 * gpu.size(input).1);
                8 * (elements.map(gpu_sizes::squares_chunks).sum::<usize>() + summed.len())
            },
        )
    }

    /// Scratch on the target, in bytes: `cpu` counts floats, `gpu` counts bytes.
    fn scratch(
        &self,
        cpu: impl FnOnce(&CpuStep<'a>) -> usize,
        gpu: impl FnOnce(&CudaStep<'a>) -> usize,
    ) -> usize {
        let StepInputs { inputs, extent, target: Target { device, precision, threads } } = *self;
        match device {
            DeviceKind::Cpu => 4 * cpu(&CpuStep { inputs, extent, precision, threads }),
            DeviceKind::Cuda => gpu(&CudaStep { inputs, extent, precision }),
        }
    }
}

fn linear_grad_bytes(gpu: &CudaStep<'_>, terms: usize) -> usize {
    // The terms whose matrix needs no decoding belong to adapters.
    let thin = (0..terms).filter(|term| gpu.decoded_bytes(2 * term + 1, 0) == 0);
    let rank = thin.map(|term| gpu.size(2 * term).1).max().unwrap_or(0);
    let operands = (0..terms).map(|term| gpu.gradient_operand_bytes(2 * term, 2 * term + 1, rank));
    operands.max().unwrap_or(0) + MATMUL_BYTES
}

/// The decoded head, a chunk of logits, the loss of each row, and the scratch of a matmul.
fn loss_bytes(gpu: &CudaStep<'_>, head: &LossHead) -> usize {
    let b = if head.lora.is_some() { gpu.decoded_bytes(5, 0) } else { 0 };
    let row_losses = align_up(gpu.size(0).0 * 4);
    gpu.decoded_head_bytes() + gpu.logits_bytes(head.chunk) + b + row_losses + MATMUL_BYTES
}
