//! A base model with an adapter folder, without a recipe: the request that computes them, and their logits.
//!
//! The adapter's tensors tell which modules are adapted; its config has the scales and the kind. The base keeps its
//! stored format, so the logits equal those during training.
//! Left out: LS-LoRA's regularization and everything else that only training needs.

use crate::failure::Failure;
use crate::machine::host;
use crate::plan::model::{build_storage, check_weights, read_decoder};
use crate::session::adapters::{UNTIED_HEAD, read_adapter};
use crate::session::logits::LogitsRun;
use smidgen_compile::adapter::LoraModule;
use smidgen_compile::model::audio::AudioInput;
use smidgen_compile::model::spec::{EMBEDDING, HEAD};
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::{AdapterForm, DecoderSpec, Request, TrainedBiases, compile_logits};
use smidgen_formats::model::Model;
use smidgen_formats::peft::{AdapterFile, Bias, StoredKind, is_saved_module, read_modules};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{AdamW, DeviceKind, Extent, Precision, Rank, Workload};
use smidgen_recipe::BaseFormat;
use std::collections::BTreeSet;

/// The request that computes `model` in its stored format, with the adapter if there is one.
pub fn build_adapted_request(model: &Model, adapter: Option<&AdapterFile>) -> Result<Request, Failure> {
    let spec = read_decoder(model)?;
    check_weights(&spec, model)?;
    let (adapters, form, biases) = match adapter {
        None => (vec![], AdapterForm::Lora, TrainedBiases::None),
        Some(adapter) => (adapted_modules(&spec, adapter)?, form_of(adapter), biases_of(adapter)),
    };
    let trained = adapter.map(|adapter| saved_tensors(&spec, adapter)).transpose()?.unwrap_or_default();
    Ok(Request {
        title: model.path().display().to_string(),
        storage: build_storage(BaseFormat::AsStored, &spec, model),
        spec,
        adapters,
        trained,
        form,
        biases,
        dropout: 0.0,
        optimizer: Optimizer {
            adamw: AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
            moments: Moments::F32,
            clip: 0.0,
            master: Master::F32,
        },
        extent: Extent::default(),
        step: Extent::default(),
        device: DeviceKind::Cpu,
        precision: Precision::F32,
        workload: Workload { keys_per_query: 1.0, supervised: 1.0 },
        audio: AudioInput::None,
        decode: None,
        objective: None,
        reference: None,
        row_losses: false,
        rank: Rank::ONLY,
        threads: host::processors(),
    })
}

/// Logits after every token of one sequence, (T, V).
pub fn logits_of(model: &Model, adapter: Option<&AdapterFile>, ids: &[u32]) -> Result<Vec<f32>, Failure> {
    let extent = Extent { tokens: ids.len(), rows: ids.len(), segments: 1, audio: 0 };
    let request = Request { extent, ..build_adapted_request(model, adapter)? };
    let needed_bytes = compile_logits(&request).reserved_bytes() as u64;
    if let Some(free_bytes) = host::free_memory_bytes().filter(|free_bytes| *free_bytes < needed_bytes) {
        return Err(Failure::memory(format!(
            "the logits of `{}` need {}, only {} is free",
            model.path().display(),
            format_bytes(needed_bytes),
            format_bytes(free_bytes)
        )));
    }
    let mut run = LogitsRun::load(&request, model, extent)?;
    if let Some(adapter) = adapter {
        read_adapter(run.executor_mut(), &request, adapter.path())?;
        run.refresh()?;
    }
    let rows: Vec<u32> = (0..ids.len() as u32).collect();
    run.logits(ids, &rows)
}

/// The adapter's modules in the order of the model's linears.
fn adapted_modules(spec: &DecoderSpec, adapter: &AdapterFile) -> Result<Vec<LoraModule>, Failure> {
    let place = adapter.path().display();
    let read = read_modules(adapter).map_err(Failure::model)?;
    let linears = spec.all_linears();
    let position = |path: &str| linears.iter().position(|linear| linear.path == path);
    let mut modules = Vec::with_capacity(read.modules.len());
    for module in &read.modules {
        let path = module.path.clone();
        let Some(position) = position(&path) else {
            let kind = &spec.model_type;
            return Err(Failure::model(format!(
                "the adapter in `{place}` adapts `{path}`, which is not a linear layer of a {kind} model"
            )));
        };
        if path == HEAD && form_of(adapter) != AdapterForm::Lora {
            let kind = adapter.config().kind();
            return Err(Failure::model(format!(
                "the adapter in `{place}` adapts `{HEAD}` with {kind}, which is not supported"
            )));
        }
        modules.push((position, LoraModule { path, rank: module.rank, scale: module.scale as f32 }));
    }
    modules.sort_by_key(|(position, _)| *position);
    Ok(modules.into_iter().map(|(_, module)| module).collect())
}

/// Names of the base tensors that were trained together with the adapter.
fn saved_tensors(spec: &DecoderSpec, adapter: &AdapterFile) -> Result<BTreeSet<String>, Failure> {
    let read = read_modules(adapter).map_err(Failure::model)?;
    let projector = spec.audio.iter().flat_map(|audio| audio.projector_tensors());
    let known: BTreeSet<String> =
        spec.tensors().into_iter().chain(projector).map(|tensor| tensor.name).collect();
    let mut names: BTreeSet<String> = read.saved.into_iter().map(|(name, _)| name).collect();
    if names.contains(EMBEDDING) && spec.head.is_tied {
        names.remove(UNTIED_HEAD);
    }
    // Biases of modules that were trained as a whole; all other biases come from the `bias` setting.
    let modules = adapter.config().modules_to_save.iter().flatten();
    let is_saved = |path: &str| modules.clone().any(|module| is_saved_module(path, module));
    let biases = read.biases.into_iter().filter(|(path, _)| is_saved(path));
    names.extend(biases.map(|(path, _)| format!("{path}.bias")));
    match names.iter().find(|name| !known.contains(*name)) {
        None => Ok(names),
        Some(name) => Err(Failure::model(format!(
            "the adapter in `{}` contains `{name}`, which is not a trainable tensor of a {} model",
            adapter.path().display(),
            spec.model_type
        ))),
    }
}

fn form_of(adapter: &AdapterFile) -> AdapterForm {
    let config = adapter.config();
    match config.kind() {
        StoredKind::Lora | StoredKind::RsLora => AdapterForm::Lora,
        StoredKind::Dora | StoredKind::RsLoraDora => AdapterForm::Dora,
        StoredKind::LsLora => AdapterForm::Fourier { reg: config.fourier.unwrap_or_default().reg_weight },
    }
}

fn biases_of(adapter: &AdapterFile) -> TrainedBiases {
    match adapter.config().bias {
        Bias::None => TrainedBiases::None,
        Bias::All => TrainedBiases::All,
        Bias::LoraOnly => TrainedBiases::Adapted,
    }
}
