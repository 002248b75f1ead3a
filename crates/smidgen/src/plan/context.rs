//! Memory outside the arena: the process or the driver, data in RAM, and pinned memory.
//!
//! The device profile's `Overhead` has what every process needs; this file adds what depends on the job.
//! Left out: measuring it in a run (`train/free_memory.rs`).

use crate::plan::devices::JobDevice;
use crate::plan::job::{Job, Purpose};
use crate::rows::choice::ChoiceSet;
use crate::rows::data::Data;
use crate::rows::prompts::Prompt;
use smidgen_compile::{Context, DecodeShape, Overhead, Request};
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_formats::encode::{at_once_bytes, load_scratch_bytes, save_scratch_bytes};
use smidgen_formats::model::Model;
use smidgen_ir::{DeviceKind, Plan, Rank};
use smidgen_runtime::cpu::spill::PIECE_BYTES;
use smidgen_runtime::cuda::DISK_SLOT_BYTES;

/// Pinned host memory: offloaded tensors, and the slot through which tensors on disk reach a GPU.
pub fn pinned_bytes(plan: &Plan) -> u64 {
    let is_slot_used = plan.device == DeviceKind::Cuda && plan.disk.bytes() > 0;
    plan.host.bytes() as u64 + if is_slot_used { DISK_SLOT_BYTES as u64 } else { 0 }
}

/// RAM of the process outside the arena, without data.
pub fn process_bytes(threads: usize) -> u64 {
    let Overhead { fixed_bytes, thread_bytes, margin_bytes, .. } = Overhead::CPU;
    fixed_bytes + thread_bytes * threads as u64 + margin_bytes
}

/// Memory of the device outside the arena while training.
pub fn context(job: &Job, place: &JobDevice) -> Context {
    match job.request.device {
        DeviceKind::Cuda => {
            let mut context = gpu_context(place);
            // In a run the memory of NCCL is measured.
            if !job.world.is_alone() && job.purpose != Purpose::Train {
                context.overhead.fixed_bytes += ASSUMED_NCCL_BYTES;
            }
            context
        }
        DeviceKind::Cpu => process_context(job),
    }
}

/// Assumed for NCCL's buffers where they cannot be measured.
const ASSUMED_NCCL_BYTES: u64 = 512 << 20;

pub fn gpu_context(place: &JobDevice) -> Context {
    Context { device: DeviceKind::Cuda, overhead: place.overhead(), ..Context::default() }
}

/// RAM of the process outside the arena while training.
pub fn process_context(job: &Job) -> Context {
    let data_bytes = match &job.data {
        Data::Rows(rows) => {
            let eval = rows.eval.as_ref().map_or(0, TokenSet::heap_bytes);
            let choices = rows.choices.as_ref().map_or(0, ChoiceSet::heap_bytes);
            let prompts = rows.prompts.iter().flat_map(|prompts| &prompts.rows);
            let prompts: usize = prompts.map(Prompt::heap_bytes).sum();
            rows.train.heap_bytes() + eval + choices + prompts + rows.batches.heap_bytes()
        }
        Data::Assumed { .. } => 0,
    };
    let rollouts = job.request.decode.map_or(0, |shape| generation_bytes(&job.request, &shape));
    job_context(&job.request, &job.model, data_bytes as u64 + rollouts)
}

/// Memory of a tokenizer per token of its vocabulary, merges included. Measured.
pub const TOKENIZER_TOKEN_BYTES: u64 = 320;
/// Memory of templates, arguments and the terminal.
const CHAT_BYTES: u64 = 1 << 20;
/// The sampler keeps an id and a logit for each token of the vocabulary.
const CANDIDATE_BYTES: usize = 8;

/// RAM of a decoder: the tables of its slots and a row of logits.
fn decoder_heap_bytes(shape: &DecodeShape, vocabulary: usize) -> usize {
    4 * shape.slots * shape.positions + 8 * shape.slots + 8 * shape.cache_rows + 8 * vocabulary
}

/// RAM of the process for generation besides its arena.
pub fn generation_bytes(request: &Request, shape: &DecodeShape) -> u64 {
    let vocabulary = request.spec.vocabulary;
    let sampling = (vocabulary * CANDIDATE_BYTES) as u64;
    let sequences = 4 * (shape.slots * shape.positions) as u64;
    decoder_heap_bytes(shape, vocabulary) as u64
        + sampling
        + sequences
        + TOKENIZER_TOKEN_BYTES * vocabulary as u64
        + CHAT_BYTES
}

/// RAM of a process for MPI: its library, buffers for each rank, and our scratch for sums.
fn exchange_bytes(rank: Rank) -> u64 {
    const MPI_BYTES: u64 = 16 << 20;
    const PEER_BYTES: u64 = 2 << 20;
    if rank.is_only() { 0 } else { MPI_BYTES + PEER_BYTES * rank.of as u64 }
}

/// RAM of the process outside the arena with this much data. The buffers for loading and saving weights count as data.
pub fn job_context(request: &Request, model: &Model, data_bytes: u64) -> Context {
    let (mut scratch, mut at_once) = (0, 0);
    for tensor in &request.spec.tensors() {
        let Some(weight) = model.weight(&tensor.name) else { continue };
        let storage = request.storage_of(&tensor.name);
        scratch = scratch.max(load_scratch_bytes(&weight, storage, request.threads));
        at_once = at_once.max(at_once_bytes(&weight, storage));
        if !request.trained.is_empty() {
            scratch = scratch.max(save_scratch_bytes(&weight));
        }
    }
    let mut overhead = Overhead::CPU;
    overhead.fixed_bytes += exchange_bytes(request.rank);
    Context {
        device: DeviceKind::Cpu,
        overhead,
        threads: request.threads,
        data_bytes: data_bytes + scratch as u64,
        token_bytes: MicroBatch::TOKEN_BYTES,
        spill_bytes: at_once.max(PIECE_BYTES) as u64,
    }
}
