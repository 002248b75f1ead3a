//! Tensors between disk and device: base weights in, adapters in and out.
//!
//! Weights go from the file into the reservation by offset, converted on the way through a small buffer
//! where the stored type differs. Nothing is ever held a second time.

use super::resume::Start;
use crate::checkpoint::element::Element;
use crate::checkpoint::folder::ModelFolder;
use crate::checkpoint::load::{MAX_PIECE_BYTES, read_tensor_into};
use crate::checkpoint::peft::{
    AdapterConfig, AdapterFile, AdapterKey, AdapterTensor, ExpectedTensor, check_agreement, match_adapter,
    write_adapter,
};
use crate::checkpoint::tensor_ref::TensorRef;
use crate::failure::Failure;
use crate::job::Job;
use crate::recipe::{AdapterKind, Init, ModelPath};
use smidgen_compile::DecoderSpec;
use smidgen_compile::adapter::LoraModule;
use smidgen_ir::{DType, LeafKind, Plan, Storage, ValueId};
use smidgen_runtime::{Device, Executor, counter};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

/// Bytes that pass through host memory at a time; below what the promise on allocations counts.
const PIECE_BYTES: usize = MAX_PIECE_BYTES / 2;

/// Fills every base weight from the checkpoint.
pub fn load_weights<D: Device>(executor: &mut Executor<D>, model: &ModelFolder) -> Result<(), Failure> {
    let mut scratch = vec![0u8; PIECE_BYTES];
    for (id, name) in leaf_names(executor.plan(), LeafKind::Weight) {
        let tensor = model.tensor(&name).expect("the job has checked that every weight is there");
        fill_from_file(executor, id, &tensor, &mut scratch)?;
    }
    Ok(())
}

/// Fills every adapter tensor: from another adapter, or A uniform in ±1/√in and B zero.
pub fn start_adapters<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    match &job.recipe.adapter.init {
        Init::Adapter(path) => read_adapter(executor, &job.request.adapters, &path.resolved),
        Init::Default => {
            init_adapters(executor, &job.request.adapters, job.recipe.train.seed);
            Ok(())
        }
    }
}

fn init_adapters<D: Device>(executor: &mut Executor<D>, modules: &[LoraModule], seed: u64) {
    for (index, module) in modules.iter().enumerate() {
        let id = leaf(executor.plan(), &module.a_name());
        let (_, columns) = executor.plan().value(id).ty.shape.at(&executor.plan().extent);
        let bound = 1.0 / (columns as f32).sqrt();
        let key = counter::token_key(seed, u64::MAX, index as u64, 0);
        let result: Result<(), std::convert::Infallible> = executor.fill(id, &mut |offset, piece| {
            for (i, bytes) in piece.chunks_exact_mut(4).enumerate() {
                let random = counter::uniform(key, (offset / 4 + i) as u64);
                bytes.copy_from_slice(&((2.0 * random - 1.0) * bound).to_le_bytes());
            }
            Ok(())
        });
        match result {
            Ok(()) => {}
        }
    }
}

/// Refuses a job whose adapter could not be saved, and a start whose adapter does not fit the job. Reads
/// headers only, so that it can be had before anything is written.
pub fn check_start(plan: &Plan, job: &Job, start: &Start) -> Result<(), Failure> {
    let tensors: Vec<AdapterTensor> =
        adapter_tensors(plan, &job.request.adapters).into_iter().map(|(_, tensor)| tensor).collect();
    check_agreement(&adapter_config(job), &tensors).map_err(Failure::recipe)?;
    let folder = match (start, &job.recipe.adapter.init) {
        (Start::Checkpoint { folder, .. }, _) => folder,
        (Start::Beginning, Init::Adapter(path)) => &path.resolved,
        (Start::Beginning, Init::Default) => return Ok(()),
    };
    let file = AdapterFile::open(folder).map_err(|error| match folder.exists() {
        true => Failure::world(error),
        false => Failure::world(error).hint("`adapter.init` is `default` or the folder of a PEFT adapter"),
    })?;
    let (found, expected) = (adapter_kind(file.config()), job.recipe.adapter.kind);
    if found != expected {
        return Err(Failure::world(format!(
            "the adapter in `{}` is `{found}`, the recipe says `{expected}`",
            folder.display()
        ))
        .hint(format!("start from an adapter that is `{expected}`, or with `adapter.init = \"default\"`")));
    }
    find_tensors(&adapter_tensors(plan, &job.request.adapters), &file).map(|_| ())
}

fn adapter_kind(config: &AdapterConfig) -> AdapterKind {
    match (config.use_dora, config.use_rslora) {
        (true, _) => AdapterKind::Dora,
        (false, true) => AdapterKind::RsLora,
        (false, false) => AdapterKind::Lora,
    }
}

/// Reads a PEFT adapter whose tensors are exactly those of the job.
pub fn read_adapter<D: Device>(
    executor: &mut Executor<D>,
    modules: &[LoraModule],
    folder: &Path,
) -> Result<(), Failure> {
    let file = AdapterFile::open(folder).map_err(Failure::world)?;
    let tensors = adapter_tensors(executor.plan(), modules);
    let found = find_tensors(&tensors, &file)?;
    let mut scratch = vec![0u8; PIECE_BYTES];
    for ((id, _), tensor) in tensors.iter().zip(&found) {
        fill_from_file(executor, *id, tensor, &mut scratch)?;
    }
    Ok(())
}

/// The tensors of an adapter on disk, in the order of `tensors`.
fn find_tensors(tensors: &[(ValueId, AdapterTensor)], file: &AdapterFile) -> Result<Vec<TensorRef>, Failure> {
    let variants = file.config().active_variants();
    if !variants.is_empty() {
        let place = file.path().display();
        return Err(Failure::world(format!(
            "the adapter `{place}` uses {}, which is not LoRA",
            variants.join(", ")
        )));
    }
    let expected: Vec<ExpectedTensor> = tensors
        .iter()
        .map(|(_, tensor)| ExpectedTensor { key: tensor.key.clone(), shape: tensor.shape.clone() })
        .collect();
    // The mismatch says its hints itself.
    match_adapter(&expected, file).map_err(Failure::world)
}

/// Writes the adapter as PEFT has it, then reads it back and compares every byte.
pub fn save_adapter<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    let tensors = adapter_tensors(executor.plan(), &job.request.adapters);
    let listed: Vec<AdapterTensor> = tensors.iter().map(|(_, tensor)| tensor.clone()).collect();
    write_adapter(folder, &adapter_config(job), &listed, |index, out| {
        copy_out(executor, tensors[index].0, out)
    })
    .map_err(Failure::world)?;
    verify_adapter(executor, &tensors, folder)
}

fn verify_adapter<D: Device>(
    executor: &mut Executor<D>,
    tensors: &[(ValueId, AdapterTensor)],
    folder: &Path,
) -> Result<(), Failure> {
    let file = AdapterFile::open(folder).map_err(Failure::world)?;
    for (id, tensor) in tensors {
        let differs = |what: &str| {
            let (key, place) = (&tensor.key, folder.display());
            Failure::world(format!("the adapter saved in `{place}` does not read back: `{key}` {what}"))
        };
        let stored = file.tensor(&tensor.key).ok_or_else(|| differs("is missing"))?;
        let mut comparison = Comparison { stored: &stored, offset: 0, same: true };
        copy_out(executor, *id, &mut comparison).map_err(|error| differs(&error.to_string()))?;
        if !comparison.same || comparison.offset != stored.bytes() {
            return Err(differs("has other values"));
        }
    }
    Ok(())
}

/// A sink that compares what is written to it with a stored tensor.
struct Comparison<'a> {
    stored: &'a TensorRef,
    offset: u64,
    same: bool,
}

impl Write for Comparison<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut piece = [0u8; 4096];
        let length = bytes.len().min(piece.len());
        let piece = &mut piece[..length];
        self.stored.read_at(self.offset, piece).map_err(io::Error::other)?;
        self.same &= piece == &bytes[..length];
        self.offset += length as u64;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The `adapter_config.json` of a job.
fn adapter_config(job: &Job) -> AdapterConfig {
    let adapter = &job.recipe.adapter;
    let mut config = AdapterConfig::new(
        adapter.rank,
        adapter.alpha,
        &target_modules(&job.request.adapters, &job.request.spec),
    );
    config.base_model_name_or_path = Some(match &job.recipe.model.path {
        ModelPath::Folder(path) | ModelPath::Gguf(path) => path.resolved.to_string_lossy().into_owned(),
        other => other.to_string(),
    });
    config.lora_dropout = adapter.dropout;
    config.use_rslora = adapter.kind == AdapterKind::RsLora;
    config.rank_pattern = adapter.rank_pattern.clone();
    config.alpha_pattern = adapter.alpha_pattern.clone();
    config
}

/// Names where they say exactly which linears are adapted, as every reader of the format understands them;
/// full paths where only some layers are.
fn target_modules(modules: &[LoraModule], spec: &DecoderSpec) -> Vec<String> {
    let name = |path: &str| path.rsplit('.').next().unwrap_or(path).to_string();
    let names: BTreeSet<String> = modules.iter().map(|module| name(&module.path)).collect();
    let named = spec.linears().into_iter().filter(|linear| names.contains(&name(&linear.path))).count();
    if named == modules.len() {
        return names.into_iter().collect();
    }
    modules.iter().map(|module| module.path.clone()).collect::<BTreeSet<String>>().into_iter().collect()
}

fn adapter_tensors(plan: &Plan, modules: &[LoraModule]) -> Vec<(ValueId, AdapterTensor)> {
    let tensor = |name: String, key: AdapterKey| {
        let id = leaf(plan, &name);
        let shape = plan.value(id).ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
        (id, AdapterTensor { key, element: Element::F32, shape })
    };
    let both = modules.iter().flat_map(|module| {
        [
            tensor(module.a_name(), AdapterKey::LoraA(module.path.clone())),
            tensor(module.b_name(), AdapterKey::LoraB(module.path.clone())),
        ]
    });
    both.collect()
}

/// Streams a value from the device to a writer.
pub fn copy_out<D: Device>(executor: &mut Executor<D>, id: ValueId, out: &mut dyn Write) -> io::Result<()> {
    let bytes = executor.plan().value(id).ty.bytes(&executor.plan().extent);
    let mut piece = [0u8; 16 << 10];
    let mut offset = 0;
    while offset < bytes {
        let length = piece.len().min(bytes - offset);
        executor.read_at(id, offset, &mut piece[..length]);
        out.write_all(&piece[..length])?;
        offset += length;
    }
    Ok(())
}

/// Fills a value from a tensor of a file, converted to the value's storage.
pub fn fill_from_file<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    tensor: &TensorRef,
    scratch: &mut [u8],
) -> Result<(), Failure> {
    let storage = executor.plan().value(id).ty.storage;
    let Some(to) = element_of(storage) else {
        return Err(Failure::world(format!("`{}` cannot be loaded as {storage}", tensor.name())));
    };
    executor
        .fill(id, &mut |offset, piece| {
            read_tensor_into(tensor, (offset / to.size_bytes()) as u64, to, piece, scratch)
        })
        .map_err(Failure::world)
}

fn element_of(storage: Storage) -> Option<Element> {
    match storage.plain()? {
        DType::F32 => Some(Element::F32),
        DType::Bf16 => Some(Element::Bf16),
        DType::F16 => Some(Element::F16),
        DType::F64 | DType::I32 | DType::U64 => None,
    }
}

pub fn leaf_names(plan: &Plan, kind: LeafKind) -> Vec<(ValueId, String)> {
    plan.leaves(kind).map(|(id, value)| (id, value.name.clone())).collect()
}

fn leaf(plan: &Plan, name: &str) -> ValueId {
    plan.leaf_named(name).unwrap_or_else(|| panic!("the plan has no leaf `{name}`"))
}
