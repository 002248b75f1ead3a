//! Recipe to job: everything that a run needs, read and checked before any memory is taken.
//!
//! The order is the order in which mistakes are cheapest to mend: what this version cannot do, the model's
//! config, the adapter, the data. Weights are opened but not read.

use crate::eval::choice::ChoiceSet;
use crate::eval::sets::read_eval_sets;
use crate::failure::Failure;
use crate::hub::environment::own_cache;
use crate::hub::{self, Access, Located, Want};
use crate::plan::arithmetic::Arithmetic;
use crate::plan::budget::{budget_within, free_budget, refuse_above_machine};
use crate::plan::devices::Place;
use crate::plan::host;
use crate::plan::profiles::{self, ChosenProfile};
use crate::plan::trained_choice::{choices, chosen_tensors, chosen_words, train_in_f32};
use crate::session::adapted::read_decoder;
use smidgen_compile::adapter::{self, LoraModule};
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::options;
use smidgen_compile::{AdapterForm, DecoderSpec, Request, TrainedBiases};
use smidgen_data::batch::{BatchOptions, BatchPlan, BatchSize, RunLength};
use smidgen_data::format::FormatError;
use smidgen_data::prepare::{Origin, PrepareError, PrepareOptions, Prepared, prepare_set};
use smidgen_data::source::find_files;
use smidgen_data::template::TemplateChoice;
use smidgen_data::token_row::TokensError;
use smidgen_data::tokens::{self, TokenLimits, TokenSet};
use smidgen_formats::model::Model;
use smidgen_formats::peft::ModulePattern;
use smidgen_formats::tokenizer::TokenizerError;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{AdamW, Code4, DType, DeviceKind, Extent, Shape, Storage, Workload};
use smidgen_recipe::{
    AdapterKind, BaseFormat, Batch, Bias, Budget, Compute, EvalTask, Length, ModelPath, Optimizer, Overflow,
    Recipe, RecipePath, Template,
};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

/// What will run.
#[derive(Debug)]
pub struct Job {
    pub recipe: Recipe,
    pub model: Model,
    /// The math; its extent is set when the job is planned.
    pub request: Request,
    pub arithmetic: Arithmetic,
    pub place: Place,
    /// Whose rates the plan is made with.
    pub profile: ChosenProfile,
    pub data: Data,
    pub budget: JobBudget,
    pub purpose: Purpose,
}

/// Rows to train on, or what a plan assumes where there are none.
#[derive(Debug)]
pub enum Data {
    Rows(Box<Rows>),
    /// Every sample has `max_tokens` tokens, all supervised.
    Assumed {
        reason: String,
    },
}

#[derive(Debug)]
pub struct Rows {
    pub train: TokenSet,
    pub eval: Option<TokenSet>,
    /// Where `eval.task` is a choice.
    pub choices: Option<ChoiceSet>,
    pub batches: BatchPlan,
    /// What the rows of `data.train` were taken for.
    pub origin: Origin,
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobBudget {
    pub bytes: u64,
    /// From `memory.budget`, rather than from what is free.
    pub stated: bool,
    /// What a GPU has free, where that is less than the budget that was stated.
    pub cut_to_free: Option<u64>,
    /// What is left to others of what is free.
    pub reserve_bytes: u64,
}

impl JobBudget {
    /// What is free on this GPU, or what the one that the recipe plans for would have: so a run takes the plan that
    /// was printed.
    fn within(self, written: Budget, profile: &ChosenProfile) -> JobBudget {
        let has = profile.device.memory_bytes.filter(|_| profile.is_named() && written == Budget::Auto);
        match has {
            Some(has) => {
                JobBudget { bytes: self.bytes.min(free_budget(profile.device.device, has).bytes), ..self }
            }
            None => self,
        }
    }

    /// What is said of a budget that is not simply the stated one.
    pub fn note(&self) -> Option<String> {
        if self.reserve_bytes > 0 {
            let reserve = format_bytes(self.reserve_bytes);
            return Some(format!("`memory.budget = \"auto\"` leaves {reserve} of what is free to others"));
        }
        let free = format_bytes(self.cut_to_free?);
        Some(format!("the GPU has {free} free, less than `memory.budget`: planned for what is free"))
    }
}

/// Whether a job may go on without its data or its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Plan,
    /// With data, without weights.
    Preview,
    Train,
}

impl Job {
    /// With a model that lies on this machine: nothing is called.
    pub fn prepare(recipe: Recipe, purpose: Purpose) -> Result<Job, Failure> {
        Job::prepare_with(recipe, purpose, &Access::cache_only())
    }

    /// With a model that is fetched where `access` allows it; a plan takes no weights.
    pub fn prepare_with(recipe: Recipe, purpose: Purpose, access: &Access) -> Result<Job, Failure> {
        refuse_unsupported(&recipe, true)?;
        let want = match purpose {
            Purpose::Plan | Purpose::Preview => Want::Config,
            Purpose::Train => Want::Weights,
        };
        let model = open_model(&recipe.model.path, want, access)?;
        let spec = read_decoder(&model)?;
        if purpose == Purpose::Train && !model.has_weights() {
            let place = model.path().display();
            return Err(Failure::world(format!("`{place}` holds no weights, only a config"))
                .hint("`smidgen plan` needs no weights; training needs `model.safetensors` or its shards"));
        }
        check_weights(&spec, &model)?;
        let named = profiles::named(&recipe.memory)?;
        let place = profiles::place(&recipe.memory, named.as_ref(), purpose == Purpose::Train)?;
        check_compute(recipe.model.compute, &place)?;
        let mut request = build_request(&recipe, &spec, &model, place.kind())?;
        let profile = match named {
            Some(named) => named,
            None => profiles::of_place(&place, request.threads, access.measured_profiles),
        };
        let budget = job_budget(&recipe, &place)?.within(recipe.memory.budget, &profile);
        if purpose == Purpose::Train {
            refuse_above_machine(&recipe, &place, &host::read_ram())?;
        }
        let data = read_data(&recipe, &model, &request, purpose, access.quiet)?;
        if let Data::Rows(rows) = &data {
            request.workload = workload(&rows.train);
            request.row_losses = rows.choices.is_some();
        }
        let arithmetic = Arithmetic::of(recipe.model.compute, place.kind());
        Ok(Job { recipe, model, request, arithmetic, place, profile, data, budget, purpose })
    }
}

impl Job {
    /// The budget of a run that finds so much memory when it looks again.
    pub fn budget_for(&self, reachable_bytes: u64) -> JobBudget {
        let budget = budget_within(&self.recipe, self.request.device, reachable_bytes);
        budget.within(self.recipe.memory.budget, &self.profile)
    }

    /// Computes otherwise than the recipe alone would have it.
    pub fn set_arithmetic(&mut self, arithmetic: Arithmetic) {
        self.arithmetic = arithmetic;
        self.request.precision = arithmetic.precision();
        self.request.title = title(&self.recipe, arithmetic);
    }
}

fn workload(set: &TokenSet) -> Workload {
    let pairs: f64 = (0..set.len()).map(|sample| f64::from(set.length(sample)).powi(2) / 2.0).sum();
    let stats = set.stats();
    let tokens = stats.tokens as f64;
    Workload { keys_per_query: pairs / tokens, supervised: stats.supervised_tokens as f64 / tokens }
}

/// Everything in the recipe that this version cannot do, named at once; what is evaluated alone may do more.
pub fn refuse_unsupported(recipe: &Recipe, is_trained: bool) -> Result<(), Failure> {
    let mut refused: Vec<(&str, String, &str)> = Vec::new();
    let mut refuse = |key: &'static str, got: &dyn std::fmt::Display, supported: &'static str| {
        refused.push((key, got.to_string(), supported));
    };
    match (recipe.eval.task, is_trained) {
        (EvalTask::Loss | EvalTask::Choice, _) | (EvalTask::Generate, false) => {}
        (task @ EvalTask::Generate, true) => {
            refuse("eval.task", &task, "loss, choice; `smidgen eval` generates after training")
        }
    }
    if refused.is_empty() {
        return Ok(());
    }
    let lines = refused
        .iter()
        .map(|(key, got, supported)| format!("  `{key} = {got}` is not supported (supported: {supported})"));
    let lines: Vec<String> = lines.collect();
    Err(Failure::recipe(format!("this version cannot run the recipe\n{}", lines.join("\n"))))
}

pub fn open_model(path: &ModelPath, want: Want, access: &Access) -> Result<Model, Failure> {
    match hub::locate(path, want, access)? {
        Located::Folder(folder) => Model::open_folder(&folder).map_err(Failure::world),
        Located::GgufFile(file) => Model::open_gguf(&file).map_err(Failure::world),
    }
}

fn with_hint(failure: Failure, hint: Option<String>) -> Failure {
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// The checkpoint holds exactly the tensors that the config describes, in their shapes.
pub fn check_weights(spec: &DecoderSpec, model: &Model) -> Result<(), Failure> {
    if !model.has_weights() {
        return Ok(());
    }
    let mut problems: Vec<String> = Vec::new();
    let mut known: HashSet<String> = HashSet::from(["lm_head.weight".to_string()]);
    for tensor in spec.tensors() {
        let expected = constant_dims(&tensor.shape);
        match model.weight(&tensor.name) {
            None => problems.push(format!("`{}` is missing", tensor.name)),
            Some(found) if found.shape() != expected => {
                problems.push(format!(
                    "`{}` is {:?}, the config says {expected:?}",
                    tensor.name,
                    found.shape()
                ));
            }
            Some(found) if !is_trainable_on(&tensor.shape, found.storage()) => {
                problems.push(format!("`{}` is stored as {}", tensor.name, found.element_name()));
            }
            Some(_) => {}
        }
        known.insert(tensor.name);
    }
    let unknown = model.weight_names().into_iter().filter(|name| !known.contains(*name));
    problems.extend(unknown.map(|name| format!("`{name}` is in the file but not in the config's model")));
    if problems.is_empty() {
        return Ok(());
    }
    let place = model.path().display();
    let more = problems.len().saturating_sub(8);
    problems.truncate(8);
    if more > 0 {
        problems.push(format!("and {more} more"));
    }
    let problems = problems.join("\n  ");
    Err(match model {
        Model::Folder { .. } => {
            Failure::world(format!("config.json contradicts the weights in `{place}`\n  {problems}"))
                .hint("config.json and the safetensors files have to come from the same model")
        }
        Model::Gguf { .. } => {
            Failure::world(format!("the metadata of `{place}` contradicts its tensors\n  {problems}"))
        }
    })
}

/// Whether operations can read a tensor as it lies: matrices in any storage, vectors as plain numbers.
fn is_trainable_on(shape: &Shape, storage: Option<Storage>) -> bool {
    storage.is_some_and(|storage| shape.0.len() == 2 || storage.plain().is_some())
}

fn constant_dims(shape: &Shape) -> Vec<usize> {
    shape.0.iter().map(|dim| dim.at(&Extent::default())).collect()
}

/// How every tensor of the model will lie in memory.
pub fn build_storage(base: BaseFormat, spec: &DecoderSpec, model: &Model) -> HashMap<String, Storage> {
    let linears: HashSet<String> = spec
        .linears()
        .into_iter()
        .filter(|linear| linear.layer.is_some())
        .map(|linear| format!("{}.weight", linear.path))
        .collect();
    let assumed = assumed_storage(spec, model);
    let storage = spec.tensors().into_iter().map(|tensor| {
        let is_linear = linears.contains(&tensor.name);
        let stored = match model.weight(&tensor.name).and_then(|weight| weight.storage()) {
            Some(storage) => storage,
            None if is_linear => assumed,
            None => Storage::Plain(spec.stored),
        };
        let nf4 = |double| Storage::Bnb4 { code: Code4::Nf4, double };
        let storage = match base {
            BaseFormat::AsStored => stored,
            BaseFormat::F32 => Storage::F32,
            BaseFormat::Bf16 => Storage::Plain(DType::Bf16),
            BaseFormat::F16 => Storage::Plain(DType::F16),
            BaseFormat::Int8 if is_linear => Storage::Int8Rows,
            BaseFormat::Nf4 if is_linear => nf4(true),
            BaseFormat::Nf4Single if is_linear => nf4(false),
            BaseFormat::Int8 | BaseFormat::Nf4 | BaseFormat::Nf4Single => stored,
        };
        (tensor.name, storage)
    });
    storage.collect()
}

/// How linears lie where there are no weights to look at: as the config says.
fn assumed_storage(spec: &DecoderSpec, model: &Model) -> Storage {
    let quantization = &model.config()["quantization_config"];
    if model.has_weights() || quantization["load_in_4bit"] != true {
        return Storage::Plain(spec.stored);
    }
    let code = if quantization["bnb_4bit_quant_type"] == "nf4" { Code4::Nf4 } else { Code4::Fp4 };
    Storage::Bnb4 { code, double: quantization["bnb_4bit_use_double_quant"] == true }
}

fn build_request(
    recipe: &Recipe,
    spec: &DecoderSpec,
    model: &Model,
    device: DeviceKind,
) -> Result<Request, Failure> {
    let (adapters, trained) = match recipe.adapter.kind {
        AdapterKind::Full => (vec![], chosen_tensors(recipe, spec)?),
        AdapterKind::Lora | AdapterKind::RsLora | AdapterKind::Dora | AdapterKind::LsLora => {
            (build_adapters(recipe, spec)?, BTreeSet::new())
        }
    };
    let mut storage = build_storage(recipe.model.base, spec, model);
    train_in_f32(&mut storage, &trained);
    let spec = spec.clone();
    let train = &recipe.train;
    Ok(Request {
        title: title(recipe, Arithmetic::of(recipe.model.compute, device)),
        adapters,
        trained,
        form: match recipe.adapter.kind {
            AdapterKind::Dora => AdapterForm::Dora,
            AdapterKind::LsLora => AdapterForm::Fourier { reg: recipe.adapter.reg },
            AdapterKind::Lora | AdapterKind::RsLora | AdapterKind::Full => AdapterForm::Lora,
        },
        biases: match recipe.adapter.bias {
            Bias::None => TrainedBiases::None,
            Bias::All => TrainedBiases::All,
            Bias::LoraOnly => TrainedBiases::Adapted,
        },
        storage,
        dropout: recipe.adapter.dropout as f32,
        optimizer: options::Optimizer {
            adamw: AdamW {
                beta1: train.betas[0],
                beta2: train.betas[1],
                eps: train.eps,
                weight_decay: train.weight_decay,
            },
            moments: match train.optimizer {
                Optimizer::AdamW => options::Moments::F32,
                Optimizer::AdamW8Bit => options::Moments::Bits8,
            },
            clip: train.clip as f32,
        },
        device,
        precision: Arithmetic::of(recipe.model.compute, device).precision(),
        extent: Extent::default(),
        workload: Workload { keys_per_query: recipe.data.max_tokens as f64 / 2.0, supervised: 1.0 },
        decode: None,
        row_losses: false,
        threads: match recipe.memory.threads {
            0 => host::processors(),
            threads => threads,
        },
        spec,
    })
}

fn title(recipe: &Recipe, arithmetic: Arithmetic) -> String {
    let written = recipe.model.path.to_string();
    let name = written.trim_end_matches('/').rsplit('/').next().unwrap_or(&written);
    let batch = match recipe.train.batch {
        Batch::Samples(samples) => format!("batch {samples}"),
        Batch::Tokens(tokens) => format!("batch of {tokens} tokens"),
    };
    let rank = recipe.adapter.rank;
    let kind = match recipe.adapter.kind {
        AdapterKind::Lora => format!("LoRA r={rank}"),
        AdapterKind::RsLora => format!("rsLoRA r={rank}"),
        AdapterKind::Dora => format!("DoRA r={rank}"),
        AdapterKind::LsLora => format!("LS-LoRA r={rank}"),
        AdapterKind::Full => format!("full, {}", chosen_words(recipe)),
    };
    format!("{name} · {kind} · {} · {batch}", arithmetic.name())
}

/// The linears that carry an adapter, each with the rank and scale of the first pattern that matches.
fn build_adapters(recipe: &Recipe, spec: &DecoderSpec) -> Result<Vec<LoraModule>, Failure> {
    let adapter = &recipe.adapter;
    let (targets, layers) = choices(recipe);
    let paths = adapter::target_paths(spec, &targets, &layers).map_err(Failure::recipe)?;
    if paths.is_empty() {
        return Err(Failure::recipe("`adapter.targets` and `adapter.layers` together choose no linear"));
    }
    if paths.iter().any(|path| path == HEAD)
        && matches!(adapter.kind, AdapterKind::Dora | AdapterKind::LsLora)
    {
        let kind = adapter.kind;
        return Err(Failure::recipe(format!("`adapter.kind = {kind}` cannot adapt `{HEAD}`"))
            .hint("leave the head out of `adapter.targets`, or adapt it with `lora` or `rslora`"));
    }
    let ranks = compile_patterns("adapter.rank_pattern", &adapter.rank_pattern, &paths)?;
    let alphas = compile_patterns("adapter.alpha_pattern", &adapter.alpha_pattern, &paths)?;
    let modules = paths.into_iter().map(|path| {
        let rank = first_match(&ranks, &path).unwrap_or(adapter.rank);
        let alpha = first_match(&alphas, &path).unwrap_or(adapter.alpha);
        let scale = match adapter.kind {
            AdapterKind::RsLora => alpha / (rank as f64).sqrt(),
            _ => alpha / rank as f64,
        };
        LoraModule { path, rank, scale: scale as f32 }
    });
    Ok(modules.collect())
}

/// Patterns in order; one that matches no adapted linear is a mistake, not a pattern.
fn compile_patterns<T: Copy>(
    key: &str,
    patterns: &[(String, T)],
    paths: &[String],
) -> Result<Vec<(ModulePattern, T)>, Failure> {
    let compiled = patterns.iter().map(|(text, value)| {
        let pattern =
            ModulePattern::new(text).map_err(|error| Failure::recipe(format!("`{key}`: {error}")))?;
        if !paths.iter().any(|path| pattern.matches(path)) {
            return Err(Failure::recipe(format!("`{key}`: `{text}` matches no adapted linear")).hint(
                "a pattern is a name such as `q_proj`, or the end of a path such as `layers.2.mlp.up_proj`",
            ));
        }
        Ok((pattern, *value))
    });
    compiled.collect()
}

fn first_match<T: Copy>(patterns: &[(ModulePattern, T)], path: &str) -> Option<T> {
    patterns.iter().find(|(pattern, _)| pattern.matches(path)).map(|(_, value)| *value)
}

/// No processor of ours multiplies f16.
pub fn check_compute(compute: Compute, place: &Place) -> Result<(), Failure> {
    match (compute, place) {
        (Compute::F16, Place::Cpu) => Err(Failure::recipe(
            "`model.compute = f16` needs a GPU: the CPU computes in f32 or bf16 (supported: auto, f32, bf16)",
        )),
        _ => Ok(()),
    }
}

pub fn job_budget(recipe: &Recipe, place: &Place) -> Result<JobBudget, Failure> {
    budget_on(place, recipe.memory.budget)
}

/// What a budget comes to on a device.
pub fn budget_on(place: &Place, budget: Budget) -> Result<JobBudget, Failure> {
    let is_gpu = place.kind() == DeviceKind::Cuda;
    match budget {
        Budget::Bytes(bytes) => {
            let cut_to_free = place.free_bytes().filter(|free| *free < bytes);
            Ok(JobBudget { bytes: cut_to_free.unwrap_or(bytes), stated: true, cut_to_free, reserve_bytes: 0 })
        }
        Budget::Auto if is_gpu && place.free_bytes().is_none() => {
            Err(Failure::world("how much memory the GPU has free cannot be read on this machine")
                .hint("name a budget: `memory.budget = \"24GiB\"`"))
        }
        Budget::Auto if let Some(free) = place.free_bytes() => Ok(free_budget(place.kind(), free)),
        Budget::Auto => match host::free_memory_bytes() {
            Some(free) => Ok(free_budget(place.kind(), free)),
            None => Err(Failure::world("how much memory is free cannot be read on this machine")
                .hint("name a budget: `memory.budget = \"8GiB\"`")),
        },
    }
}

fn read_data(
    recipe: &Recipe,
    model: &Model,
    request: &Request,
    purpose: Purpose,
    quiet: bool,
) -> Result<Data, Failure> {
    if recipe.data.train.is_empty() && purpose == Purpose::Plan {
        return Ok(Data::Assumed { reason: "none is looked at".into() });
    }
    let read = |paths, key| read_set(recipe, paths, key, model, request, quiet);
    let train = match read(&recipe.data.train, "data.train") {
        Ok(prepared) => prepared,
        Err(ReadData::Absent(reason)) if purpose == Purpose::Plan => {
            return Ok(Data::Assumed { reason: reason.message });
        }
        Err(ReadData::Absent(failure) | ReadData::Wrong(failure)) => return Err(failure),
    };
    let evaluated = read_eval_sets(recipe, recipe.eval.task, model, request, quiet)?;
    let eval = evaluated.loss;
    let mut warnings = Vec::new();
    for (key, prepared) in [("data.train", Some(&train)), ("data.eval", eval.as_ref())] {
        let of_set = prepared.into_iter().flat_map(|prepared| &prepared.warnings);
        warnings.extend(of_set.map(|warning| format!("`{key}`: {warning}")));
    }
    let of_choices = evaluated.choices.iter().flat_map(|choices| &choices.warnings);
    warnings.extend(of_choices.map(|warning| format!("`data.eval`: {warning}")));
    let Prepared { set: train, origin, .. } = train;
    let eval = eval.map(|prepared| prepared.set);
    let options = BatchOptions {
        batch: match recipe.train.batch {
            Batch::Samples(samples) => BatchSize::Samples(samples as u64),
            Batch::Tokens(tokens) => BatchSize::Tokens(tokens as u64),
        },
        run_length: match recipe.train.length {
            Length::Steps(steps) => RunLength::Steps(steps),
            Length::Epochs(epochs) => RunLength::Epochs(epochs),
        },
        seed: recipe.train.seed,
        shuffle: recipe.data.shuffle,
    };
    let batches = BatchPlan::new(&train, options).map_err(Failure::recipe)?;
    Ok(Data::Rows(Box::new(Rows { train, eval, choices: evaluated.choices, batches, origin, warnings })))
}

#[derive(Debug)]
pub enum ReadData {
    /// No file of that name, or no tokenizer for its text.
    Absent(Failure),
    Wrong(Failure),
}

pub fn read_set(
    recipe: &Recipe,
    paths: &[RecipePath],
    key: &str,
    model: &Model,
    request: &Request,
    quiet: bool,
) -> Result<Prepared, ReadData> {
    let files = data_files(paths, key).map_err(ReadData::Absent)?;
    let limits = token_limits(recipe, request);
    let (template, cache) = (template_choice(&recipe.data.template), own_cache().ok());
    let options = PrepareOptions {
        format: recipe.data.format,
        template: &template,
        loss_on: recipe.data.loss_on,
        limits,
        cache: cache.as_deref(),
        threads: request.threads,
        quiet,
    };
    prepare_set(&files, model, options).map_err(|error| {
        let absent = matches!(&error, PrepareError::Tokenizer(TokenizerError::NoTokenizerJson { .. }));
        let failure = match &error {
            // The recipe names a template that is not there or does not suit the rows.
            PrepareError::Template(error) => Failure::recipe(error),
            PrepareError::Tokens(
                TokensError::NoRows | TokensError::NoRowsLeft { .. } | TokensError::NothingSupervised { .. },
            )
            | PrepareError::NoAnswers { .. }
            | PrepareError::Format(FormatError::NoRows) => Failure::world(format!("`{key}`: {error}")),
            _ => Failure::world(&error),
        };
        let failure = with_hint(failure, error.hint());
        if absent { ReadData::Absent(failure) } else { ReadData::Wrong(failure) }
    })
}

pub fn template_choice(template: &Template) -> TemplateChoice {
    match template {
        Template::Auto => TemplateChoice::Auto,
        Template::Named(name) => TemplateChoice::Named(name.clone()),
        Template::File(path) => TemplateChoice::File(path.resolved.clone()),
    }
}

/// The files that a key names.
pub fn data_files(paths: &[RecipePath], key: &str) -> Result<Vec<PathBuf>, Failure> {
    let patterns: Vec<String> =
        paths.iter().map(|path| path.resolved.to_string_lossy().into_owned()).collect();
    find_files(&patterns, std::path::Path::new("/"))
        .map_err(|error| with_hint(Failure::world(format!("`{key}`: {error}")), error.hint()))
}

pub fn token_limits(recipe: &Recipe, request: &Request) -> TokenLimits {
    TokenLimits {
        vocab_size: request.spec.vocabulary as u32,
        max_tokens: recipe.data.max_tokens as u32,
        overflow: match recipe.data.overflow {
            Overflow::Truncate => tokens::Overflow::Truncate,
            Overflow::Drop => tokens::Overflow::Drop,
            Overflow::Error => tokens::Overflow::Error,
        },
    }
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
