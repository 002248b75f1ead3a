//! Adapters between disk and device: initial values, and reading and writing PEFT folders.
//!
//! An adapter tensor on disk is a leaf of the plan, or a row of one: LS-LoRA's coefficients of all modules are one
//! leaf.
//! A written adapter is read back and compared, so the saved adapter is the trained one.
//! Left out: full training, which has no adapter (`run_folder/trained_state.rs`).

use super::weights::{self, PIECE_BYTES, copy_out, leaf};
use crate::failure::Failure;
use crate::plan::job::Job;
use crate::plan::trained_choice::choices;
use serde_json::Value;
use smidgen_compile::adapter::{LoraModule, joined_ranks};
use smidgen_compile::leaves::{FOURIER_COEFFICIENTS, FOURIER_SIGMA, REFERENCE_COPY, trained_biases};
use smidgen_compile::model::audio::OUTSIDE_DECODER;
use smidgen_compile::model::experts::ExpertsSpec;
use smidgen_compile::model::spec::{EMBEDDING, HEAD, LinearKind};
use smidgen_compile::{AdapterForm, DecoderSpec, Request};
use smidgen_formats::element::Element;
use smidgen_formats::finite::FiniteWriter;
use smidgen_formats::load::read_tensor_into;
use smidgen_formats::peft::{
    self, AdapterConfig, AdapterFile, AdapterKey, AdapterTensor, ExpectedTensor, FourierConfig,
    is_of_experts, match_adapter, write_adapter,
};
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_formats::text_names::wrapped_name;
use smidgen_formats::weight::Weight;
use smidgen_ir::{Entry, Plan, ValueId};
use smidgen_recipe::{AdapterKind, Bias, HfName, Init, Layers, ModelPath, Targets};
use smidgen_runtime::{Device, Executor, counter};
use std::collections::{BTreeSet, HashSet};
use std::io::{self, Write};
use std::path::Path;

/// The name of the head in an adapter, also if the model ties the head to the embedding.
pub use smidgen_compile::model::spec::UNTIED_HEAD;

/// A trained tensor and its place on the device.
#[derive(Clone, Debug)]
pub struct AdapterPlace {
    pub leaf: ValueId,
    /// Byte offset in the leaf.
    pub offset: usize,
    pub bytes: usize,
    pub tensor: AdapterTensor,
    /// How the file has B of all experts.
    of_experts: Option<FactorOfExperts>,
}

/// B of all experts: (E·P, R) on the device, (P, R·E) in the file.
#[derive(Clone, Copy, Debug)]
struct FactorOfExperts {
    experts: usize,
    rows: usize,
    rank: usize,
    /// Whether the rows of gate and up take turns in the file.
    takes_turns: bool,
}

impl FactorOfExperts {
    /// The numbers as in the file, from those on the device, or the reverse.
    fn turned(&self, numbers: &[f32], to_file: bool) -> Vec<f32> {
        let FactorOfExperts { experts, rows, rank, takes_turns } = *self;
        let mut turned = vec![0.0; numbers.len()];
        for row in 0..rows {
            let half = rows / 2;
            let turn = if row < half { 2 * row } else { 2 * (row - half) + 1 };
            let in_file = if takes_turns { turn } else { row };
            for (expert, column) in
                (0..experts).flat_map(|expert| (0..rank).map(move |column| (expert, column)))
            {
                let here = (expert * rows + row) * rank + column;
                let there = in_file * rank * experts + column * experts + expert;
                let (from, to) = if to_file { (here, there) } else { (there, here) };
                turned[to] = numbers[from];
            }
        }
        turned
    }
}

impl AdapterPlace {
    /// The numbers of the tensor, or of its gradient, in the order of the file.
    pub fn in_file_order(&self, numbers: Vec<f32>) -> Vec<f32> {
        match &self.of_experts {
            Some(order) => order.turned(&numbers, true),
            None => numbers,
        }
    }

    /// The key in the adapter, or the name of the base tensor.
    pub fn name(&self) -> String {
        match &self.tensor.key {
            AdapterKey::BaseTensor(name) => name.clone(),
            key => key.to_string(),
        }
    }
}

/// Every trained tensor: the adapter's, module by module, then trained biases, then other base tensors. A tied
/// embedding appears under the names of both embedding and head, because PEFT does not tie modules that it trains.
pub fn adapter_places(plan: &Plan, request: &Request) -> Vec<AdapterPlace> {
    let mut places = Vec::new();
    for (index, module) in request.adapters.iter().enumerate() {
        let path = || module.path.clone();
        places.push(whole(plan, &module.a_name(), AdapterKey::LoraA(path())));
        places.push(factor_b(plan, request, module));
        match request.form {
            AdapterForm::Lora => {}
            AdapterForm::Dora => {
                places.push(whole(plan, &module.magnitude_name(), AdapterKey::LoraMagnitude(path())));
            }
            AdapterForm::Fourier { .. } => {
                let row = |name: &str, key: AdapterKey, shape: Vec<usize>| {
                    let bytes = 4 * shape.iter().product::<usize>();
                    let tensor = AdapterTensor { key, element: Element::F32, shape };
                    let (leaf, offset) = (leaf(plan, name), index * bytes);
                    AdapterPlace { leaf, offset, bytes, tensor, of_experts: None }
                };
                places.push(row(FOURIER_COEFFICIENTS, AdapterKey::FourierWeight(path()), vec![4]));
                places.push(row(FOURIER_SIGMA, AdapterKey::FourierSigma(path()), vec![]));
            }
        }
    }
    let adapted: HashSet<&str> = request.adapters.iter().map(|module| module.path.as_str()).collect();
    let trained = trained_biases(request);
    for linear in request.spec.linears() {
        let name = format!("{}.bias", linear.path);
        if trained.contains(&name) {
            let key = if adapted.contains(linear.path.as_str()) {
                AdapterKey::BaseLayerBias(linear.path)
            } else {
                AdapterKey::ModuleBias(linear.path)
            };
            places.push(whole(plan, &name, key));
        }
    }
    let others = request.trained.iter().filter(|name| !trained.contains(*name));
    places.extend(others.map(|name| whole(plan, name, AdapterKey::of_base(name))));
    if request.trains_tied_head() {
        places.push(whole(plan, request.spec.head_tensor(), AdapterKey::of_base(UNTIED_HEAD)));
    }
    places
}

fn whole(plan: &Plan, name: &str, key: AdapterKey) -> AdapterPlace {
    let id = leaf(plan, name);
    let ty = &plan.value(id).ty;
    let shape = ty.shape.0.iter().map(|dim| dim.at(&plan.extent)).collect();
    let tensor = AdapterTensor { key, element: Element::F32, shape };
    AdapterPlace { leaf: id, offset: 0, bytes: ty.bytes(&plan.extent), tensor, of_experts: None }
}

/// B of a module; that of all experts has another order in the file.
fn factor_b(plan: &Plan, request: &Request, module: &LoraModule) -> AdapterPlace {
    let mut place = whole(plan, &module.b_name(), AdapterKey::LoraB(module.path.clone()));
    let of_module = |(layer, experts): (usize, &ExpertsSpec)| {
        let paths = experts.paths().map(|path| DecoderSpec::layer_path(layer, &path));
        let position = paths.iter().position(|path| *path == module.path)?;
        Some((experts.router.experts, experts.names.takes_turns && position == 0))
    };
    if let Some((experts, takes_turns)) = request.spec.experts().find_map(of_module) {
        let (rows, rank) = (place.tensor.shape[0] / experts, module.rank);
        place.tensor.shape = vec![rows, rank * experts];
        place.of_experts = Some(FactorOfExperts { experts, rows, rank, takes_turns });
    }
    place
}

/// Writes a tensor as the file has it.
fn write_place<D: Device>(
    executor: &mut Executor<D>,
    place: &AdapterPlace,
    out: &mut dyn Write,
) -> io::Result<()> {
    if place.of_experts.is_none() {
        return copy_out(executor, place.leaf, place.offset..place.offset + place.bytes, out);
    }
    let numbers = weights::read_floats(executor, place.leaf, place.bytes / 4).map_err(io::Error::other)?;
    let numbers = place.in_file_order(numbers);
    numbers.iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
}

/// Fills every adapter tensor from the adapter that the recipe names, or with initial values.
pub fn start_adapters<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    match &job.recipe.adapter.init {
        Init::Adapter(path) => {
            let file = AdapterFile::open_adapter_or_run(&path.resolved).map_err(Failure::model)?;
            return read_adapter(executor, &job.request, file.path());
        }
        Init::BuiltinSpeech => read_speech(executor, job)?,
        Init::Default => init_adapters(executor, job)?,
    }
    let (request, model) = (&job.request, &job.model);
    request.trained.iter().try_for_each(|name| weights::load_weight(executor, model, name, request.threads))
}

/// Fills the adapter of every adapted module from the speech adapter inside the base model.
fn read_speech<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    let mut scratch = vec![0u8; PIECE_BYTES];
    for module in &job.request.adapters {
        let factors = job.model.speech_factors(&module.path).ok_or_else(|| {
            let place = job.model.path().display();
            Failure::model(format!("`{place}` has no speech adapter for `{}`", module.path))
                .hint("leave the module out of `adapter.targets`")
        })?;
        for (tensor, name) in factors.iter().zip([module.a_name(), module.b_name()]) {
            let id = leaf(executor.plan(), &name);
            let (rows, columns) = executor.plan().value(id).ty.shape.at(&executor.plan().extent);
            if tensor.shape() != [rows, columns] {
                let (found, shape) = (tensor.name(), tensor.shape());
                return Err(Failure::model(format!("`{found}` is {shape:?}, expected [{rows}, {columns}]")));
            }
            weights::fill_from_file(executor, id, tensor, &mut scratch)?;
        }
    }
    Ok(())
}

/// Initial values: A is uniform in ±1/√in and B is zero; DoRA's magnitudes are the norms of the weight's rows;
/// LS-LoRA's functions are the identity; biases are those of the base.
fn init_adapters<D: Device>(executor: &mut Executor<D>, job: &Job) -> Result<(), Failure> {
    let request = &job.request;
    for (index, module) in request.adapters.iter().enumerate() {
        let id = leaf(executor.plan(), &module.a_name());
        let (_, columns) = executor.plan().value(id).ty.shape.at(&executor.plan().extent);
        let bound = 1.0 / (columns as f32).sqrt();
        let key = counter::token_key(job.recipe.train.seed, u64::MAX, index as u64, 0);
        fill_floats(executor, id, |element| (2.0 * counter::uniform(key, element as u64) - 1.0) * bound)?;
    }
    for name in trained_biases(request) {
        weights::load_weight(executor, &job.model, &name, request.threads)?;
    }
    match request.form {
        AdapterForm::Lora => {}
        AdapterForm::Dora => {
            let extent = executor.plan().extent;
            executor.run(Entry::Refresh, &extent)?;
            for module in &request.adapters {
                let norms = leaf(executor.plan(), &module.norm_name());
                let magnitudes = leaf(executor.plan(), &module.magnitude_name());
                copy_leaf(executor, norms, magnitudes)?;
            }
        }
        AdapterForm::Fourier { .. } => {
            let (coefficients, sigma) = (FOURIER_COEFFICIENTS, FOURIER_SIGMA);
            let identity = |element: usize| if element % 4 == 1 { 1.0 } else { 0.0 };
            let id = leaf(executor.plan(), coefficients);
            fill_floats(executor, id, identity)?;
            let (id, width) = (leaf(executor.plan(), sigma), job.recipe.adapter.sigma as f32);
            fill_floats(executor, id, |_| width)?;
        }
    }
    Ok(())
}

fn fill_floats<D: Device>(
    executor: &mut Executor<D>,
    id: ValueId,
    number: impl Fn(usize) -> f32,
) -> Result<(), Failure> {
    weights::fill_with(executor, id, |offset, piece| {
        for (i, bytes) in piece.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&number(offset / 4 + i).to_le_bytes());
        }
    })
}

fn copy_leaf<D: Device>(executor: &mut Executor<D>, from: ValueId, to: ValueId) -> Result<(), Failure> {
    let bytes = executor.plan().value(from).ty.bytes(&executor.plan().extent);
    let mut piece = [0u8; 4096];
    for offset in (0..bytes).step_by(piece.len()) {
        let length = piece.len().min(bytes - offset);
        executor.read_at(from, offset, &mut piece[..length])?;
        executor.write_at(to, offset, &piece[..length]);
    }
    Ok(())
}

/// Reads a PEFT adapter that has exactly the tensors of the request.
pub fn read_adapter<D: Device>(
    executor: &mut Executor<D>,
    request: &Request,
    folder: &Path,
) -> Result<(), Failure> {
    let file = AdapterFile::open(folder).map_err(Failure::model)?;
    let places = adapter_places(executor.plan(), request);
    let found = find_tensors(&places, &file)?;
    if request.trains_tied_head() {
        refuse_untied(&file)?;
    }
    fill_places(executor, &places, &found)
}

/// Makes LoRA modules add nothing: their B is zero.
pub fn clear_adapters<D: Device>(executor: &mut Executor<D>, request: &Request) -> Result<(), Failure> {
    request.adapters.iter().try_for_each(|module| {
        let id = leaf(executor.plan(), &module.b_name());
        // A leaf that no step reads has no memory.
        let is_read = executor.plan().value(id).buffer.is_some();
        if is_read { fill_floats(executor, id, |_| 0.0) } else { Ok(()) }
    })
}

/// Reads only those tensors of an adapter that the request has.
pub fn read_part<D: Device>(
    executor: &mut Executor<D>,
    request: &Request,
    file: &AdapterFile,
) -> Result<(), Failure> {
    let places = adapter_places(executor.plan(), request);
    let find = |place: &AdapterPlace| {
        let key = &place.tensor.key;
        let missing = || Failure::model(format!("the adapter in `{}` has no `{key}`", file.path().display()));
        file.tensor(key).ok_or_else(missing)
    };
    let found: Vec<TensorRef> = places.iter().map(find).collect::<Result<_, _>>()?;
    fill_places(executor, &places, &found)
}

/// Refuses an adapter whose embedding and head differ, for a model that ties them.
pub fn refuse_untied(file: &AdapterFile) -> Result<(), Failure> {
    let tensor = |name: &str| file.tensor(&AdapterKey::of_base(name));
    let (Some(embedding), Some(head)) = (tensor(EMBEDDING), tensor(UNTIED_HEAD)) else { return Ok(()) };
    let hash = |tensor: TensorRef| Weight::Plain(tensor).read_hash().map_err(Failure::model);
    if hash(embedding)? == hash(head)? {
        return Ok(());
    }
    let place = file.path().display();
    Err(Failure::model(format!(
        "embedding and head of the adapter in `{place}` differ, but the model ties them"
    ))
    .hint("untie the model first: `tie_word_embeddings = false` and a separate `lm_head.weight`"))
}

fn fill_places<D: Device>(
    executor: &mut Executor<D>,
    places: &[AdapterPlace],
    found: &[TensorRef],
) -> Result<(), Failure> {
    let (mut piece, mut scratch) = (vec![0u8; PIECE_BYTES], vec![0u8; PIECE_BYTES]);
    for (place, tensor) in places.iter().zip(found) {
        // No step reads this leaf: it adapts the audio encoder, which is not part of this plan.
        if executor.plan().value(place.leaf).buffer.is_none() {
            continue;
        }
        if let Some(order) = &place.of_experts {
            let mut bytes = vec![0u8; place.bytes];
            read_tensor_into(tensor, 0, Element::F32, &mut bytes, &mut scratch).map_err(Failure::model)?;
            let numbers: Vec<f32> =
                bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
            let turned = order.turned(&numbers, false);
            fill_floats(executor, place.leaf, |element| turned[element])?;
            continue;
        }
        for offset in (0..place.bytes).step_by(piece.len()) {
            let piece = &mut piece[..PIECE_BYTES.min(place.bytes - offset)];
            read_tensor_into(tensor, (offset / 4) as u64, Element::F32, piece, &mut scratch)
                .map_err(Failure::model)?;
            executor.write_at(place.leaf, place.offset + offset, piece);
        }
    }
    Ok(())
}

/// The tensors of an adapter on disk, in the order of `places`.
pub fn find_tensors(places: &[AdapterPlace], file: &AdapterFile) -> Result<Vec<TensorRef>, Failure> {
    let expected: Vec<ExpectedTensor> = places
        .iter()
        .map(|place| ExpectedTensor { key: place.tensor.key.clone(), shape: place.tensor.shape.clone() })
        .collect();
    match_adapter(&expected, file).map_err(Failure::model)
}

/// Writes the adapter in PEFT's format, then reads it back and compares every byte.
pub fn save_adapter<D: Device>(executor: &mut Executor<D>, job: &Job, folder: &Path) -> Result<(), Failure> {
    let places = adapter_places(executor.plan(), &job.request);
    let listed: Vec<AdapterTensor> = places.iter().map(|place| place.tensor.clone()).collect();
    write_adapter(folder, &adapter_config(job), &listed, |index, out| {
        let place = &places[index];
        let name = place.name();
        let mut out = FiniteWriter::new(out, &name, place.tensor.element);
        write_place(executor, place, &mut out)
    })
    .map_err(Failure::writing)?;
    let file = AdapterFile::open(folder).map_err(Failure::model)?;
    let context = format!("the adapter saved in `{}` does not read back", folder.display());
    for place in &places {
        let key = &place.tensor.key;
        check_saved(file.tensor(key), &key.to_string(), &context, |out| write_place(executor, place, out))?;
    }
    Ok(())
}

/// Fails unless a tensor that was just saved has exactly the bytes that `write` writes.
pub fn check_saved(
    stored: Option<TensorRef>,
    name: &str,
    context: &str,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), Failure> {
    let differs = |what: &str| Failure::model(format!("`{name}` {what}")).context(context);
    let stored = stored.ok_or_else(|| differs("is missing"))?;
    let mut comparison = Comparison { stored: &stored, offset: 0, same: true };
    write(&mut comparison)
        .map_err(|error| Failure::writing(error).context(format!("{context}: `{name}`")))?;
    if comparison.same && comparison.offset == stored.bytes() {
        Ok(())
    } else {
        Err(differs("has different values"))
    }
}

/// A writer that compares its input with a stored tensor.
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
pub fn adapter_config(job: &Job) -> AdapterConfig {
    let adapter = &job.recipe.adapter;
    let mut config = AdapterConfig::new(
        adapter.rank,
        adapter.alpha,
        &target_modules(&job.request.adapters, &job.request.spec),
    );
    let (name, revision) = base_name(&job.recipe.model.path);
    config.base_model_name_or_path = Some(name);
    config.revision = revision;
    config.lora_dropout = adapter.dropout;
    config.use_rslora = adapter.kind == AdapterKind::RsLora;
    config.use_dora = adapter.kind == AdapterKind::Dora;
    config.fourier = (adapter.kind == AdapterKind::LsLora)
        .then_some(FourierConfig { reg_weight: adapter.reg, init_sigma: adapter.sigma });
    config.bias = match adapter.bias {
        Bias::None => peft::Bias::None,
        Bias::All => peft::Bias::All,
        Bias::LoraOnly => peft::Bias::LoraOnly,
    };
    config.is_wrapped = job.model.is_wrapped();
    if let Some(expression) = whole_expression(job, config.is_wrapped) {
        config.target_modules = expression.into();
    } else if config.is_wrapped {
        config.target_modules = wrapped_targets(config.target_modules);
    }
    config.modules_to_save =
        (!job.request.trained.is_empty()).then(|| modules_to_save(&job.request, config.is_wrapped));
    config.rank_pattern = adapter.rank_pattern.clone();
    config.alpha_pattern = adapter.alpha_pattern.clone();
    config.target_parameters = target_parameters(job, config.is_wrapped);
    // PEFT writes the ranks of gate and up that it joined as a pattern.
    let is_joined = |module: &&LoraModule| {
        choices(&job.recipe, &job.request.spec)
            .is_ok_and(|(targets, _)| joined_ranks(&job.request.spec, &targets, &module.path) > 1)
    };
    if let Some(module) = job.request.adapters.iter().find(is_joined) {
        let joined = module.rank as f64 / adapter.rank as f64;
        config.rank_pattern.push((JOINED_RANKS.to_string(), module.rank));
        config.alpha_pattern.push((JOINED_RANKS.to_string(), joined * adapter.alpha));
    }
    config
}

/// The pattern of modules that have the ranks of gate and up together.
const JOINED_RANKS: &str = r".*\.gate_up_proj";

/// The adapted parameters of experts: by their path in a layer if those of all layers are adapted.
fn target_parameters(job: &Job, is_wrapped: bool) -> Vec<String> {
    let request = &job.request;
    let adapted: BTreeSet<&str> = request
        .adapters
        .iter()
        .map(|module| module.path.as_str())
        .filter(|path| is_of_experts(path))
        .collect();
    let of_layers = request.spec.experts().flat_map(|(layer, experts)| {
        experts.paths().map(|path| (DecoderSpec::layer_path(layer, &path), path))
    });
    let all: Vec<(String, String)> = of_layers.collect();
    let is_whole =
        |ending: &String| all.iter().all(|(path, other)| other != ending || adapted.contains(path.as_str()));
    let named = all.iter().filter(|(path, _)| adapted.contains(path.as_str())).map(|(path, ending)| {
        if is_whole(ending) {
            return ending.clone();
        }
        if is_wrapped { wrapped_name(path) } else { path.clone() }
    });
    named.collect::<BTreeSet<String>>().into_iter().collect()
}

/// Paths of the base modules that are trained as a whole.
fn modules_to_save(request: &Request, is_wrapped: bool) -> Vec<String> {
    let untied = request.trains_tied_head().then(|| UNTIED_HEAD.to_string());
    let names = request.trained.iter().cloned().chain(untied);
    let name_of = |name: String| if is_wrapped { wrapped_name(&name) } else { name };
    let modules = names.filter_map(|name| Some(name_of(name.rsplit_once('.')?.0.to_string())));
    modules.collect::<BTreeSet<String>>().into_iter().collect()
}

/// The base model and its revision in PEFT's notation. PEFT cannot load a GGUF file inside a repository, so its name
/// stays as in the recipe.
fn base_name(path: &ModelPath) -> (String, Option<String>) {
    match path {
        ModelPath::Folder(path) | ModelPath::Gguf(path) => {
            (path.resolved.to_string_lossy().into_owned(), None)
        }
        ModelPath::HuggingFace(name) => match HfName::parse(name) {
            Some(HfName { repo, revision, file: None }) => (repo, revision),
            _ => (path.to_string(), None),
        },
        ModelPath::Pypi(_) => (path.to_string(), None),
    }
}

/// Module names if they identify the adapted linear layers exactly, because every reader of the format supports
/// those; full paths if only some layers are adapted.
fn target_modules(modules: &[LoraModule], spec: &DecoderSpec) -> Vec<String> {
    let modules: Vec<LoraModule> =
        modules.iter().filter(|module| !is_of_experts(&module.path)).cloned().collect();
    let modules = modules.as_slice();
    if spec.audio.is_some() {
        return target_endings(modules, spec);
    }
    let name = |path: &str| path.rsplit('.').next().unwrap_or(path).to_string();
    let names: BTreeSet<String> = modules.iter().map(|module| name(&module.path)).collect();
    // Parameters of experts and routers are no linears of transformers.
    let linears = spec.linears().into_iter().filter(|linear| linear.kind == LinearKind::Dense);
    let named = linears.filter(|linear| names.contains(&name(&linear.path))).count();
    if named == modules.len() {
        return names.into_iter().collect();
    }
    modules.iter().map(|module| module.path.clone()).collect::<BTreeSet<String>>().into_iter().collect()
}

/// The recipe's expression for the targets, if it matches the paths that PEFT sees, and nothing in towers.
fn whole_expression(job: &Job, is_wrapped: bool) -> Option<String> {
    let Targets::Expression(expression) = &job.recipe.adapter.targets else { return None };
    let pattern = peft::ModulePattern::whole(expression).ok()?;
    let path =
        |module: &LoraModule| if is_wrapped { wrapped_name(&module.path) } else { module.path.clone() };
    let mut paths = job.request.adapters.iter().map(path);
    let is_in_tower = |name: &&str| {
        let module = name.rsplit_once('.').map_or(*name, |(module, _)| module);
        job.model.is_beside_text(name)
            && (pattern.matches(module) || pattern.matches(&format!("model.{module}")))
    };
    let is_whole = job.recipe.adapter.layers == Layers::All && paths.all(|path| pattern.matches(&path));
    (is_whole && !job.model.weight_names().iter().any(is_in_tower)).then(|| expression.clone())
}

/// An expression for targets that are modules of a text model: towers have modules with the same names.
fn wrapped_targets(targets: Value) -> Value {
    let names: Vec<&str> = targets.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if names.is_empty() {
        return targets;
    }
    let (head, inside): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| *name == HEAD);
    let inside = inside.iter().map(|name| name.strip_prefix("model.").unwrap_or(name).replace('.', r"\."));
    let inside = format!(r".*language_model\.(.*\.)?({})", inside.collect::<Vec<_>>().join("|"));
    Value::from(if head.is_empty() { inside } else { format!("{inside}|{HEAD}") })
}

/// For each adapted linear layer, the shortest path ending that matches only adapted ones. In a model with audio,
/// `o_proj` ends paths of the decoder and of the audio encoder, and the vision encoder may use the same names.
fn target_endings(modules: &[LoraModule], spec: &DecoderSpec) -> Vec<String> {
    let adapted: HashSet<&str> = modules.iter().map(|module| module.path.as_str()).collect();
    let mut paths: Vec<String> = spec.all_linears().into_iter().map(|linear| linear.path).collect();
    // The linear layers of the vision encoder, which is not part of the spec.
    let vision = ["image_embed.img_processor.layers.0.self_attn", "image_embed.img_processor.head.attention"];
    let others = vision.iter().flat_map(|module| {
        ["q_proj", "k_proj", "v_proj", "out_proj"].map(|name| format!("{OUTSIDE_DECODER}{module}.{name}"))
    });
    paths.extend(others);
    let ending = |path: &str| {
        let starts = path.match_indices('.').map(|(at, _)| at + 1).collect::<Vec<usize>>();
        let endings = starts.iter().rev().map(|start| &path[*start..]);
        let matches = |path: &str, end: &str| path == end || path.ends_with(&format!(".{end}"));
        let is_exact =
            |end: &&str| paths.iter().all(|other| !matches(other, end) || adapted.contains(other.as_str()));
        endings.into_iter().find(is_exact).unwrap_or(path).to_string()
    };
    modules.iter().map(|module| ending(&module.path)).collect::<BTreeSet<String>>().into_iter().collect()
}

/// Copies everything that the adapters are made of to the frozen copies of the reference.
pub fn copy_to_reference<D: Device>(executor: &mut Executor<D>) -> Result<(), Failure> {
    let plan = executor.plan();
    let names = plan.values.iter().filter_map(|value| {
        let of = value.name.strip_prefix(REFERENCE_COPY)?;
        Some((plan.leaf_named(of)?, plan.leaf_named(&value.name)?, value.ty.bytes(&plan.extent)))
    });
    let copies: Vec<(ValueId, ValueId, usize)> = names.collect();
    let mut piece = vec![0u8; 64 << 10];
    for (from, to, bytes) in copies {
        for offset in (0..bytes).step_by(piece.len()) {
            let piece = &mut piece[..(64 << 10).min(bytes - offset)];
            executor.read_at(from, offset, piece)?;
            executor.write_at(to, offset, piece);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_recipe::parse_model_path;

    #[test]
    fn the_base_is_named_as_peft_names_it() {
        let check = |text: &str, expected: &str, revision: Option<&str>| {
            let path = parse_model_path(text, Path::new("/here")).unwrap();
            assert_eq!(base_name(&path), (expected.to_string(), revision.map(str::to_string)), "{text}");
        };
        check("hf:org/name", "org/name", None);
        check("hf:org/name@v2", "org/name", Some("v2"));
        check("hf:org/name:q4.gguf", "hf:org/name:q4.gguf", None);
        check("pypi:package", "pypi:package", None);
        check("models/x", "/here/models/x", None);
        check("x.gguf", "/here/x.gguf", None);
    }
}
