//! Recipe to job: everything that a run needs, read and checked before any memory is reserved.
//!
//! Checks that take the least time come first: what this version cannot do, the model's config, the adapter, the data.
//! Weights are opened but not read.
//! Left out: planning the job (`planning.rs`).

use crate::failure::{Failure, FailureKind};
use crate::machine::host;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::audio::{audio_input, continue_speech};
use crate::plan::budget::{JobBudget, budget_on, refuse_above_machine};
use crate::plan::devices::JobDevice;
use crate::plan::model::{build_storage, check_weights, open_model, read_decoder};
use crate::plan::profiles::{self, ChosenProfile};
use crate::plan::rank_layout::RankLayout;
use crate::plan::shapes::Shape;
use crate::plan::trained_choice::{
    choices, chosen_tensors, chosen_words, master_of, store_trained, tensors_next_to,
};
use crate::rewards::check_rewards;
use crate::rows::data::{Data, Rows, read_data};
use crate::rows::sets::MemoryRows;
use serde_json::Value as Json;
use smidgen_compile::adapter::{self, LoraModule};
use smidgen_compile::links::Link;
use smidgen_compile::model::audio::AudioInput;
use smidgen_compile::model::overflows_f16;
use smidgen_compile::model::spec::{HEAD, Linear, LinearKind};
use smidgen_compile::request::{self, Reference};
use smidgen_compile::{AdapterForm, DecodeShape, DecoderSpec, Request, TrainedBiases};
use smidgen_data::tokens::TokenSet;
use smidgen_formats::model::Model;
use smidgen_formats::peft::{ModulePattern, is_of_experts};
use smidgen_hub::{Access, Want};
use smidgen_ir::{AdamW, DeviceKind, Extent, Objective, Precision, Rank, Workload};
use smidgen_recipe::{
    AdapterKind, AnswerSettings, Batch, Bias, Compute, EvalTask, Init, Memory, ModelPath, ObjectiveMistake,
    Optimizer, Recipe, RecipePath, ReferenceMemory, ReferenceUse,
};
use smidgen_runtime::cuda::gpu_generation::LEAST_WITH_BF16;

/// What will run: a recipe with its model opened, its rows tokenized, its device and its budget found.
///
/// No weight has been read and no device memory is reserved.
#[derive(Debug)]
#[non_exhaustive]
pub struct Job {
    /// The recipe that the job was made from.
    pub recipe: Recipe,
    #[doc(hidden)]
    pub model: Model,
    /// The math of the run. Its extent is set by planning.
    #[doc(hidden)]
    pub request: Request,
    #[doc(hidden)]
    pub arithmetic: Arithmetic,
    #[doc(hidden)]
    pub place: JobDevice,
    /// The device whose rates the solver uses.
    #[doc(hidden)]
    pub profile: ChosenProfile,
    #[doc(hidden)]
    pub data: Data,
    #[doc(hidden)]
    pub budget: JobBudget,
    #[doc(hidden)]
    pub purpose: Purpose,
    /// The ranks that train.
    #[doc(hidden)]
    pub world: RankLayout,
}

/// What a job is prepared for, which decides what must exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Planning needs only the model's config: without rows, every sample is assumed to have `data.max_tokens` tokens.
    Plan,
    /// A preview also needs rows, but no weights.
    Preview,
    /// Training needs weights and rows.
    Train,
}

/// Which device profiles a plan may use if the recipe names none.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profiles {
    /// The plan follows from the recipe and the device alone.
    BuiltIn,
    /// Also one that `smidgen doctor` measured on this machine.
    Measured,
}

impl Job {
    /// Reads and checks what the recipe names. Nothing is downloaded: the model must be on this machine.
    ///
    /// # Errors
    /// Every mistake of the recipe at once; a model, data or an adapter that cannot be read; a model and an adapter
    /// that do not fit each other.
    pub fn prepare(recipe: Recipe, purpose: Purpose) -> Result<Job, Failure> {
        check_values(&recipe, purpose)?;
        let access = Access::cache_only();
        let model = open_for(&recipe, purpose, &access)?;
        Job::prepare_data(recipe, model, None, purpose, &access, Profiles::BuiltIn, RankLayout::ALONE, None)
    }

    /// Like [`Job::prepare`], with rows in memory instead of `data.train` and `data.eval`.
    ///
    /// # Errors
    /// As [`Job::prepare`]; a row that is in no known format is named by its number, counted from 1.
    pub fn prepare_rows(mut recipe: Recipe, rows: &MemoryRows, purpose: Purpose) -> Result<Job, Failure> {
        let name = |rows: &[Json]| {
            let place = RecipePath::at(&recipe.output.dir.resolved.join(MemoryRows::NAME));
            if rows.is_empty() { vec![] } else { vec![place] }
        };
        (recipe.data.train, recipe.data.eval) = (name(&rows.train), name(&rows.eval));
        check_values(&recipe, purpose)?;
        let access = Access::cache_only();
        let model = open_for(&recipe, purpose, &access)?;
        Job::prepare_data(
            recipe,
            model,
            Some(rows),
            purpose,
            &access,
            Profiles::BuiltIn,
            RankLayout::ALONE,
            None,
        )
    }

    /// Like [`Job::prepare`], for a recipe that was checked when it was read. Missing files are downloaded if `access`
    /// allows it.
    #[doc(hidden)]
    pub fn prepare_with(recipe: Recipe, purpose: Purpose, access: &Access) -> Result<Job, Failure> {
        Job::prepare_in(RankLayout::ALONE, recipe, purpose, access)
    }

    /// [`Job::prepare_with`] for one of several ranks.
    #[doc(hidden)]
    pub fn prepare_in(
        world: RankLayout,
        recipe: Recipe,
        purpose: Purpose,
        access: &Access,
    ) -> Result<Job, Failure> {
        let model = open_for(&recipe, purpose, access)?;
        Job::prepare_data(recipe, model, None, purpose, access, Profiles::Measured, world, None)
    }

    /// A job to plan for ranks that may not exist. `network` replaces the profile's link between machines.
    #[doc(hidden)]
    pub fn prepare_over(
        world: RankLayout,
        network: Option<Link>,
        recipe: Recipe,
        access: &Access,
    ) -> Result<Job, Failure> {
        let model = open_for(&recipe, Purpose::Plan, access)?;
        let purpose = Purpose::Plan;
        Job::prepare_data(recipe, model, None, purpose, access, Profiles::Measured, world, network)
    }

    /// A job to plan for a model that is already open, or that is only a config.
    #[doc(hidden)]
    pub fn prepare_model(recipe: Recipe, model: Model, profiles: Profiles) -> Result<Job, Failure> {
        let access = Access::cache_only();
        Job::prepare_data(recipe, model, None, Purpose::Plan, &access, profiles, RankLayout::ALONE, None)
    }

    fn prepare_data(
        mut recipe: Recipe,
        mut model: Model,
        rows: Option<&MemoryRows>,
        purpose: Purpose,
        access: &Access,
        profiles: Profiles,
        world: RankLayout,
        network: Option<Link>,
    ) -> Result<Job, Failure> {
        let spec = read_decoder(&model)?;
        if recipe.adapter.init == Init::BuiltinSpeech {
            continue_speech(&mut recipe, &mut model)?;
        }
        if purpose == Purpose::Train && !model.has_weights() {
            let place = model.path().display();
            return Err(Failure::model(format!("`{place}` has a config but no weights"))
                .hint("`smidgen plan` needs no weights; training needs `model.safetensors` or its shards"));
        }
        check_weights(&spec, &model)?;
        let named = profiles::named(&recipe.memory)?;
        let chosen = Memory { device: world.device.unwrap_or(recipe.memory.device), ..recipe.memory.clone() };
        let mut place = profiles::place(&chosen, named.as_ref(), purpose == Purpose::Train)?;
        check_compute(recipe.model.compute, &place)?;
        let arithmetic = place.arithmetic(recipe.model.compute);
        check_range(&spec.model_type, arithmetic)?;
        let mut request = build_request(&recipe, &spec, &model, place.kind(), arithmetic)?;
        request.rank = world.rank;
        refuse_objective(&recipe, &request)?;
        check_rewards(&recipe, None)?;
        if recipe.memory.threads == 0 {
            request.threads = world.threads(request.threads);
        }
        let mut profile = match named {
            Some(named) => named,
            None => {
                let measured = profiles == Profiles::Measured;
                profiles::of_place_within(&place, request.threads, measured, recipe.memory.budget)
            }
        };
        profile.device.network = network.unwrap_or(profile.device.network);
        profile.device = profile.device.on_machines(world.machines);
        place.assume(&profile.device);
        let budget = budget_on(&place, recipe.memory.budget)?.shared_by(world.on_device);
        let budget = budget.within(recipe.memory.budget, &profile);
        if purpose == Purpose::Train {
            refuse_above_machine(&recipe, &place, &host::read_ram())?;
        }
        let data = read_data(&recipe, rows, &model, &request, purpose == Purpose::Plan, access)?;
        request.audio = audio_input(&request, &data)?;
        if let Data::Rows(rows) = &data {
            check_rewards(&recipe, Some(rows))?;
            request.workload = workload(&recipe, &rows.train);
            request.row_losses = rows.choices.is_some();
        }
        request.decode = rollout_shape(&recipe, &data);
        Ok(Job { recipe, model, request, arithmetic, place, profile, data, budget, purpose, world })
    }
}

/// Checks values that were set in code by the rules of a recipe file. Only training needs data and an output folder.
fn check_values(recipe: &Recipe, purpose: Purpose) -> Result<(), Failure> {
    let mut errors = match recipe.check() {
        Ok(()) => return Ok(()),
        Err(errors) => errors,
    };
    let is_needless = |key: &str| key == "data.train" || key == "output.dir";
    errors.mistakes.retain(|mistake| purpose == Purpose::Train || !is_needless(&mistake.key));
    if errors.mistakes.is_empty() { Ok(()) } else { Err(Failure::recipe(errors)) }
}

fn open_for(recipe: &Recipe, purpose: Purpose, access: &Access) -> Result<Model, Failure> {
    refuse_unsupported(recipe)?;
    let want = match purpose {
        Purpose::Plan | Purpose::Preview => Want::Config,
        Purpose::Train => Want::Weights,
    };
    let (path, is_plan) = (&recipe.model.path, purpose == Purpose::Plan);
    let shape = Shape::of(path);
    let opened = match (open_model(path, want, access), shape, path) {
        // Nothing is asked for a name that is only a name: there is no such folder.
        (Err(_), Some(shape), ModelPath::Folder(_)) if is_plan => return Ok(shape.model()),
        (Err(failure), Some(shape), _) if is_plan && failure.kind == FailureKind::Network => {
            return Ok(shape.model());
        }
        (opened, ..) => opened,
    };
    opened.map_err(|failure| match (shape, path) {
        (Some(shape), ModelPath::Folder(_)) => failure.hint(format!(
            "`{}` is a name for plans only; a run needs the weights: `model.path = \"{}\"`",
            shape.name, shape.published[0]
        )),
        (None, ModelPath::HuggingFace(_) | ModelPath::Folder(_)) if is_plan => {
            failure.hint_if_some(Shape::nearest(path).map(|shape| {
                format!("`model.path = \"{}\"` plans for that shape without network", shape.name)
            }))
        }
        _ => failure,
    })
}

impl Job {
    /// The job with another arithmetic than the recipe's.
    pub fn with_arithmetic(self, arithmetic: Arithmetic) -> Job {
        let (precision, title) = (arithmetic.precision(), title(&self.recipe, arithmetic));
        Job { arithmetic, request: Request { precision, title, ..self.request }, ..self }
    }

    /// The rows of a job that trains.
    pub fn rows(&self) -> &Rows {
        match &self.data {
            Data::Rows(rows) => rows,
            Data::Assumed { .. } => unreachable!("training without data is refused before"),
        }
    }
}

/// The sizes of generation if as many answers of a step as make sense are generated together; the planner may take fewer.
fn rollout_shape(recipe: &Recipe, data: &Data) -> Option<DecodeShape> {
    /// More sequences at the same time gain nothing on any device.
    const MOST_SLOTS: usize = 256;
    let Batch::Samples(batch) = recipe.train.batch else { return None };
    let AnswerSettings { num_generations, max_completion_length, .. } = recipe.answer_settings();
    let (batch, positions) = match data {
        Data::Rows(rows) => (batch.min(rows.train.len()), rows.train.longest() + max_completion_length),
        Data::Assumed { .. } => (batch, recipe.data.max_tokens),
    };
    let slots = (batch * num_generations).min(MOST_SLOTS);
    recipe.generates().then(|| DecodeShape::of_equal_slots(slots, positions))
}

fn workload(recipe: &Recipe, set: &TokenSet) -> Workload {
    if recipe.generates() {
        // As if every answer were as long as it may be.
        let answer = recipe.answer_settings().max_completion_length as f64;
        let whole = set.stats().mean_tokens + answer;
        return Workload { keys_per_query: whole / 2.0, supervised: answer / whole };
    }
    let pairs: f64 = (0..set.len()).map(|sample| f64::from(set.length(sample)).powi(2) / 2.0).sum();
    let stats = set.stats();
    let tokens = stats.tokens as f64;
    Workload { keys_per_query: pairs / tokens, supervised: stats.supervised_tokens as f64 / tokens }
}

/// Refuses evaluation tasks that only `smidgen eval` supports.
fn refuse_unsupported(recipe: &Recipe) -> Result<(), Failure> {
    match recipe.eval.task {
        EvalTask::Loss | EvalTask::Choice => Ok(()),
        task @ (EvalTask::Generate | EvalTask::Wer) => Err(Failure::recipe(format!(
            "this version cannot run the recipe\n  \
             `eval.task = {task}` is not supported (supported: loss, choice; `smidgen eval` generates after training)"
        ))),
    }
}

fn build_request(
    recipe: &Recipe,
    spec: &DecoderSpec,
    model: &Model,
    device: DeviceKind,
    arithmetic: Arithmetic,
) -> Result<Request, Failure> {
    if let Some(name) = model.mxfp4_experts().filter(|_| recipe.adapter.kind == AdapterKind::Full) {
        return Err(Failure::recipe(format!(
            "`adapter.kind = \"full\"` writes a whole model, and `{name}` in MXFP4 is not written in another type"
        ))
        .hint("train an adapter: `adapter.kind = \"lora\"`, or start from a copy of the model in bf16"));
    }
    let (adapters, trained) = match recipe.adapter.kind {
        AdapterKind::Full => (vec![], chosen_tensors(recipe, spec)?),
        AdapterKind::Lora | AdapterKind::RsLora | AdapterKind::Dora | AdapterKind::LsLora => {
            let adapters = build_adapters(recipe, spec)?;
            let trained = tensors_next_to(recipe, spec, &adapters)?;
            (adapters, trained)
        }
    };
    let mut storage = build_storage(recipe.model.storage(), spec, model);
    store_trained(&mut storage, spec, &trained, master_of(recipe));
    let spec = spec.clone();
    let train = &recipe.train;
    Ok(Request {
        title: title(recipe, arithmetic),
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
        optimizer: request::Optimizer {
            adamw: AdamW {
                beta1: train.betas[0],
                beta2: train.betas[1],
                eps: train.eps,
                weight_decay: train.weight_decay,
            },
            moments: match train.optimizer {
                Optimizer::AdamW => request::Moments::F32,
                Optimizer::AdamW8Bit => request::Moments::Bits8,
            },
            master: master_of(recipe),
            clip: train.clip as f32,
        },
        device,
        precision: arithmetic.precision(),
        extent: Extent::default(),
        step: Extent::default(),
        workload: Workload { keys_per_query: recipe.data.max_tokens as f64 / 2.0, supervised: 1.0 },
        audio: AudioInput::None,
        decode: None,
        objective: recipe.objective().map_err(refused_objective)?,
        reference: reference_entry(recipe),
        row_losses: false,
        rank: Rank::ONLY,
        threads: host::threads(recipe.memory.threads)?,
        spec,
    })
}

fn refused_objective(mistake: ObjectiveMistake) -> Failure {
    Failure::recipe(mistake.message).hint(mistake.hint)
}

/// The model of the plan's `reference`, if log-probabilities of the reference need a pass of their own. Before the first
/// update, the policy itself is the reference, unless an adapter was given and the base is meant.
fn reference_entry(recipe: &Recipe) -> Option<Reference> {
    let has_init = recipe.adapter.init != Init::Default;
    let reference = match recipe.train.aim.reference.unwrap_or(ReferenceUse::Auto) {
        ReferenceUse::Base => Reference::Base,
        ReferenceUse::Adapter => Reference::Adapter,
        ReferenceUse::Auto if has_init => Reference::Adapter,
        ReferenceUse::Auto => Reference::Base,
    };
    let is_pass = match recipe.memory.reference {
        ReferenceMemory::Auto => !recipe.changes_base(),
        ReferenceMemory::Pass => true,
        ReferenceMemory::Cached => has_init && reference == Reference::Base,
    };
    // Mismatched completions cannot be cached: which ones meet depends on the step.
    let compares_divergence =
        matches!(recipe.objective(), Ok(Some(Objective::Labels(loss))) if loss.compares_divergence);
    (recipe.has_reference() && (is_pass || compares_divergence)).then_some(reference)
}

/// What an objective cannot be combined with.
fn refuse_objective(recipe: &Recipe, request: &Request) -> Result<(), Failure> {
    let Some(objective) = &request.objective else { return Ok(()) };
    let kind = recipe.train.objective;
    if !request.rank.is_only() {
        return Err(Failure::recipe(format!("`train.objective = \"{kind}\"` trains on one rank"))
            .hint("start one process; a smaller `train.batch` or more micro-batches keep it in memory"));
    }
    if objective.temperature() != 1.0 && request.spec.head.softcap.is_some() {
        let model = &request.spec.model_type;
        return Err(Failure::recipe(format!(
            "`train.temperature`: `{model}` caps its logits, which cannot be divided"
        ))
        .hint("write `train.temperature = 1.0`"));
    }
    Ok(())
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

/// The adapted linears, each with the rank and scale of the first pattern that matches.
fn build_adapters(recipe: &Recipe, spec: &DecoderSpec) -> Result<Vec<LoraModule>, Failure> {
    let adapter = &recipe.adapter;
    let (targets, layers) = choices(recipe, spec)?;
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
    if let Some(path) = paths.iter().find(|path| is_of_experts(path)) {
        let kind = adapter.kind;
        if matches!(kind, AdapterKind::Dora | AdapterKind::LsLora) {
            return Err(Failure::recipe(format!(
                "`adapter.kind = {kind}` cannot adapt the experts of `{path}`"
            ))
            .hint("leave the experts out of `adapter.targets`, or adapt them with `lora` or `rslora`"));
        }
        if adapter.dropout > 0.0 {
            return Err(Failure::recipe(format!(
                "`adapter.dropout = {}` cannot be used with an adapter on the experts of `{path}`, as in PEFT",
                adapter.dropout
            ))
            .hint("set `adapter.dropout = 0`, or leave the experts out of `adapter.targets`"));
        }
    }
    let linears = spec.linears();
    let trains_bias = |linear: &Linear| {
        let is_trained = match adapter.bias {
            Bias::None => false,
            Bias::All => true,
            Bias::LoraOnly => paths.contains(&linear.path),
        };
        is_trained && linear.bias && matches!(linear.kind, LinearKind::Experts(_))
    };
    if let Some(linear) = linears.iter().find(|linear| trains_bias(linear)) {
        return Err(Failure::recipe(format!(
            "`adapter.bias` cannot train the biases of the experts of `{}`",
            linear.path
        ))
        .hint("set `adapter.bias = \"none\"`: no adapter file has a place for them"));
    }
    let named = |kind: LinearKind| {
        let is_named =
            |path: &&String| linears.iter().any(|linear| linear.path == **path && linear.kind == kind);
        paths.iter().find(is_named)
    };
    if let Some(path) = named(LinearKind::Unadapted) {
        let model_type = &spec.model_type;
        return Err(Failure::recipe(format!(
            "an adapter on `{path}` is not supported: PEFT refuses it for models of type `{model_type}`"
        ))
        .hint("leave it out of `adapter.targets`, or train it next to the adapter with `adapter.train`"));
    }
    if let Some(path) = named(LinearKind::Router) {
        return Err(Failure::recipe(format!("an adapter on the router `{path}` is not supported")).hint(
            "leave it out of `adapter.targets`, or train it next to the adapter with `adapter.train`",
        ));
    }
    let ranks = compile_patterns("adapter.rank_pattern", &adapter.rank_pattern, &paths)?;
    let alphas = compile_patterns("adapter.alpha_pattern", &adapter.alpha_pattern, &paths)?;
    let modules = paths.into_iter().map(|path| {
        let joined = adapter::joined_ranks(spec, &targets, &path);
        let rank = first_match(&ranks, &path).unwrap_or(joined * adapter.rank);
        let alpha = first_match(&alphas, &path).unwrap_or(joined as f64 * adapter.alpha);
        let scale = match adapter.kind {
            AdapterKind::RsLora => alpha / (rank as f64).sqrt(),
            _ => alpha / rank as f64,
        };
        LoraModule { path, rank, scale: scale as f32 }
    });
    Ok(modules.collect())
}

/// Compiles patterns in their order. A pattern that matches no adapted linear is an error.
fn compile_patterns<T: Copy>(
    key: &str,
    patterns: &[(String, T)],
    paths: &[String],
) -> Result<Vec<(ModulePattern, T)>, Failure> {
    let compiled = patterns.iter().map(|(text, value)| {
        let pattern =
            ModulePattern::new(text).map_err(|error| Failure::recipe(error).context(format!("`{key}`")))?;
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

/// Refuses a `model.compute` that the device does not support. A CPU without bf16 is not refused: it computes in f32.
pub fn check_compute(compute: Compute, place: &JobDevice) -> Result<(), Failure> {
    match (compute, place) {
        (Compute::F16, JobDevice::Cpu) => Err(Failure::recipe(
            "`model.compute = f16` needs a GPU: the CPU computes in f32 or bf16 (supported: auto, f32, bf16)",
        )),
        (Compute::Bf16, place) => check_bf16(place).map_err(|why| {
            Failure::recipe(format!("`model.compute = \"bf16\"`: {why}"))
                .hint("write `model.compute = \"f16\"`, or leave it `auto`, which is f16 on this GPU")
        }),
        (Compute::Fp8, place) => check_fp8(place).map_err(|why| {
            Failure::recipe(format!("`model.compute = \"fp8\"`: {why}")).hint(
                "write `model.compute = \"bf16\"`; `model.base = \"fp8\"` alone stores frozen weights in fp8 and works everywhere",
            )
        }),
        _ => Ok(()),
    }
}

/// Refuses f16 for models whose activations exceed its range.
pub fn check_range(model_type: &str, arithmetic: Arithmetic) -> Result<(), Failure> {
    if arithmetic.precision() != Precision::F16 || !overflows_f16(model_type) {
        return Ok(());
    }
    Err(Failure::model(format!(
        "`{model_type}` models do not compute in f16: their activations exceed 65504, its largest number"
    ))
    .hint(
        "compute in f32 (`model.compute = \"f32\"`, `--compute f32`), or in bf16 on a GPU that has it (Ampere, 2020, or \
         newer)",
    ))
}

/// `Err` says why the device does not multiply in bf16.
pub fn check_bf16(place: &JobDevice) -> Result<(), String> {
    match place.capability() {
        Some(capability) if capability < LEAST_WITH_BF16 => {
            let (name, (major, minor)) = (place.describe(), capability);
            Err(format!("{name} has compute capability {major}.{minor}, and bf16 needs 8.0 (Ampere, 2020)"))
        }
        _ => Ok(()),
    }
}

/// `Err` says why the device does not multiply in fp8.
pub fn check_fp8(place: &JobDevice) -> Result<(), String> {
    match (place.kind(), place.capability()) {
        (DeviceKind::Cpu, _) => Err("a CPU does not multiply in fp8".to_owned()),
        (DeviceKind::Cuda, Some((8, 9) | (9, 0)) | None) => Ok(()),
        (DeviceKind::Cuda, Some((major, minor))) => Err(format!(
            "{} has compute capability {major}.{minor}, and fp8 is implemented for 8.9 (RTX 40, L4) and 9.0 (H100, H200)",
            place.describe()
        )),
    }
}
