//! The planned memory of every phase of a run: on the device, in pinned memory, on the host and on disk.
//!
//! A run reserves all of its memory when it loads and frees it when it ends, so the phases in between differ only in
//! disk space; saving copies tensor by tensor through a small buffer. Merging, exporting and generating are separate
//! commands; generation is planned for a prompt and answer as long as the longest sample.
//! On a CPU, RAM is the device. Left out: host memory of a GPU driver.

use crate::model_files::original::held_bytes;
use crate::plan::artifact::Artifact;
use crate::plan::audio::{clip_stores, encoded_bytes, longest_clip_rows, longest_rows, plan_encoding};
use crate::plan::budget::JobBudget;
use crate::plan::context::{
    TOKENIZER_TOKEN_BYTES, gpu_context, pinned_bytes, process_bytes, process_context,
};
use crate::plan::disk::Footprint;
use crate::plan::facts::MemoryFacts;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, Sizes, plan_generation};
use crate::plan::job::Job;
use crate::plan::model::written_storage;
use crate::rows::data::Data;
use serde_json::{Value, json};
use smidgen_compile::{AdapterForm, Request, Solution};
use smidgen_formats::weight::Weight;
use smidgen_ir::{DType, DeviceKind, Extent, Storage};
use smidgen_recipe::Length;

/// Bytes of a model that a merge worker or an export holds at a time.
pub const FILE_BLOCK_BYTES: usize = 16 << 20;
/// Threads of a merge.
pub const MERGE_WORKERS: usize = 2;

/// Bytes of each kind of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spaces {
    /// RAM if the device is the CPU.
    pub device: u64,
    pub pinned: u64,
    pub host: u64,
    pub disk: u64,
}

impl Spaces {
    /// The larger of each kind.
    pub fn max(self, other: Spaces) -> Spaces {
        Spaces {
            device: self.device.max(other.device),
            pinned: self.pinned.max(other.pinned),
            host: self.host.max(other.host),
            disk: self.disk.max(other.disk),
        }
    }

    pub fn render_json(&self) -> Value {
        json!({"device": self.device, "pinned": self.pinned, "host": self.host, "disk": self.disk})
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseMemory {
    pub name: &'static str,
    pub needs: Spaces,
}

/// The phases of `smidgen train` itself; the others are commands that may follow.
pub const OF_TRAINING: [&str; 7] = ["encode", "load", "rollout", "train", "eval", "save", "resume"];

/// What the run itself needs: the most of each kind of memory over its phases.
pub fn must_fit(life: &[PhaseMemory]) -> Spaces {
    let own = life.iter().filter(|phase| OF_TRAINING.contains(&phase.name));
    own.fold(Spaces::default(), |most, phase| most.max(phase.needs))
}

/// The phases of the recipe's run and of the commands that may follow, in order.
pub fn plan_phases(job: &Job, facts: &MemoryFacts, solution: &Solution) -> Vec<PhaseMemory> {
    let (plan, device) = (&solution.plan, job.request.device);
    let footprint = Footprint::of(plan, job, total_steps(job));
    let reserved = Spaces {
        device: solution.peak_bytes,
        pinned: pinned_bytes(plan),
        host: match device {
            DeviceKind::Cpu => 0,
            DeviceKind::Cuda => process_context(job).bytes_for(plan),
        },
        disk: plan.disk.bytes() as u64,
    };
    let checkpoints = footprint.total_bytes() - footprint.artifact_bytes;
    let with_files = |bytes: u64| Spaces { disk: reserved.disk + bytes, ..reserved };
    let mut life = Vec::new();
    let mut add = |name, needs| life.push(PhaseMemory { name, needs });
    let in_ram = |bytes: u64, disk: u64| match device {
        DeviceKind::Cpu => Spaces { device: bytes, disk, ..Spaces::default() },
        DeviceKind::Cuda => Spaces { host: bytes, disk, ..Spaces::default() },
    };
    if job.request.audio_spec().is_some() {
        let (rows, disk) = match &job.data {
            Data::Rows(_) => {
                let stores = clip_stores(&job.data);
                let longest = stores.iter().map(|store| longest_clip_rows(store)).max().unwrap_or(0);
                (longest, stores.iter().map(|store| encoded_bytes(store, &job.request)).sum())
            }
            // The number of clips is unknown.
            Data::Assumed { .. } => (longest_rows(job.recipe.data.max_audio_seconds), 0),
        };
        let encoding = plan_encoding(&job.request, rows);
        let (process, arena) = (process_bytes(job.request.threads), encoding.reserved_bytes() as u64);
        let needs = match device {
            DeviceKind::Cpu => in_ram(process + arena, disk),
            DeviceKind::Cuda => {
                let context = gpu_context(&facts.place).bytes_for(&encoding);
                Spaces { device: context + arena, ..in_ram(process, disk) }
            }
        };
        add("encode", needs);
    }
    add("load", reserved);
    // Answers are generated in the memory that steps use afterwards.
    if job.request.decode.is_some() {
        add("rollout", with_files(checkpoints));
    }
    add("train", with_files(checkpoints));
    if job.recipe.train.eval_every > 0 {
        add("eval", with_files(checkpoints));
    }
    add("save", with_files(footprint.total_bytes()));
    if footprint.checkpoints > 0 {
        add("resume", with_files(checkpoints));
    }
    let tensors = TensorSizes::of(job);
    let factors = factor_bytes(&job.request);
    let blocks = (MERGE_WORKERS * FILE_BLOCK_BYTES) as u64;
    // Full training writes a model, which has no adapter to merge.
    if Artifact::of(&job.recipe) == Artifact::Adapter {
        let merge = process_bytes(MERGE_WORKERS) + blocks + factors + tensors.held_bytes;
        add("merge", in_ram(merge, tensors.merged_bytes));
    }
    let block = FILE_BLOCK_BYTES as u64;
    let tokenizer = TOKENIZER_TOKEN_BYTES * job.request.spec.vocabulary as u64;
    let export = process_bytes(1) + block + factors + tensors.held_bytes + tokenizer;
    add("export", in_ram(export, tensors.exported_bytes));
    if let Some(needs) = generation(job, facts) {
        add("generate", needs);
    }
    life
}

fn total_steps(job: &Job) -> u64 {
    match (&job.data, job.recipe.train.length) {
        (Data::Rows(rows), _) => rows.batches.total_steps(),
        (Data::Assumed { .. }, Length::Steps(steps)) => steps,
        // Unknown without data: enough steps for every checkpoint that is kept.
        (Data::Assumed { .. }, Length::Epochs(_)) => {
            ((job.recipe.train.keep as u64 + 1) * job.recipe.train.save_every).max(1)
        }
    }
}

/// Memory for one answer, which with its prompt is as long as the longest sample.
fn generation(job: &Job, facts: &MemoryFacts) -> Option<Spaces> {
    let context = job.recipe.data.max_tokens.min(job.request.spec.max_positions);
    let sizes = |budget| Sizes {
        slots: 1,
        context: Some(context),
        cache_tokens: None,
        new_tokens: DEFAULT_NEW_TOKENS,
        budget,
        has_audio: false,
    };
    let request = made_request(job);
    let plan =
        |bytes| plan_generation(&request, &job.model, &facts.place, &sizes(JobBudget::of_bytes(bytes)));
    let plan = plan(facts.budget.bytes).or_else(|_| plan(u64::MAX)).ok()?;
    let (pinned, disk) = (pinned_bytes(&plan.plan), plan.plan.disk.bytes() as u64);
    Some(Spaces { device: plan.peak_bytes, pinned, host: 0, disk })
}

/// The request for generating with what the run makes: the base with its adapter, or the model that it writes.
fn made_request(job: &Job) -> Request {
    let mut request = Request { objective: None, reference: None, decode: None, ..job.request.clone() };
    if Artifact::of(&job.recipe) == Artifact::Model {
        let tensors = request.spec.tensors().into_iter();
        let written = tensors.filter_map(|tensor| {
            let storage = written_storage(&job.model, &tensor.name)?;
            Some((tensor.name, storage))
        });
        request.storage = written.collect();
        request.trained.clear();
    }
    request
}

/// Sizes of the model's tensors in a merge and an export.
struct TensorSizes {
    /// Bytes of the largest tensor that has to stay in memory as a whole while its rows are read.
    held_bytes: u64,
    /// Bytes of all tensors as a merge writes them.
    merged_bytes: u64,
    /// Bytes of all tensors as an export writes them.
    exported_bytes: u64,
}

impl TensorSizes {
    /// The files are read in their stored format, which may differ from the format in memory during training.
    fn of(job: &Job) -> TensorSizes {
        let tensors = job.request.spec.tensors();
        let mut sizes = TensorSizes { held_bytes: 0, merged_bytes: 0, exported_bytes: 0 };
        for tensor in &tensors {
            let (rows, columns) = tensor.shape.at(&Extent::default());
            let weight = job.model.weight(&tensor.name);
            let stored = weight.as_ref().and_then(Weight::storage);
            let storage = stored.unwrap_or(job.request.storage_of(&tensor.name));
            // Numbers that are decoded are written in 16 bits.
            let merged = if storage.plain().is_some() { storage } else { Storage::Plain(DType::F16) };
            let is_matrix = tensor.shape.0.len() == 2;
            let exported = if is_matrix { Storage::Plain(DType::F16) } else { Storage::F32 };
            let held = match &weight {
                Some(weight) => held_bytes(weight),
                None if matches!(storage, Storage::Bnb4 { .. }) => storage.bytes(rows, columns),
                None => 0,
            };
            sizes.held_bytes = sizes.held_bytes.max(held as u64);
            sizes.merged_bytes += merged.bytes(rows, columns) as u64;
            sizes.exported_bytes += exported.bytes(rows, columns) as u64;
        }
        sizes
    }
}

/// Bytes of A and B of the largest modules in f32, with DoRA's magnitudes.
fn factor_bytes(request: &Request) -> u64 {
    let linears = request.spec.linears();
    let sizes = request.adapters.iter().filter_map(|module| {
        let linear = linears.iter().find(|linear| linear.path == module.path)?;
        let magnitudes = usize::from(request.form == AdapterForm::Dora);
        Some((module.rank * linear.k * linear.kind.matrices(), (module.rank + magnitudes) * linear.n))
    });
    let (a, b) = sizes.fold((0, 0), |(a, b), (of_a, of_b)| (a.max(of_a), b.max(of_b)));
    4 * (a + b) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_of_each_space_must_fit() {
        let phase = |name, device, disk| PhaseMemory {
            name,
            needs: Spaces { device, disk, pinned: 1, ..Spaces::default() },
        };
        let life = [phase("load", 5, 0), phase("save", 3, 9), phase("generate", 99, 99)];
        assert_eq!(must_fit(&life), Spaces { device: 5, pinned: 1, host: 0, disk: 9 });
    }
}
