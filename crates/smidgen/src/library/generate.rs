//! Answers prompts with a model that is opened once, with its tokenizer and optionally an adapter.
//!
//! [`Session`] holds a plan, weights and a KV cache on a device. [`generate`] formats a prompt like those that the
//! model was trained on, and streams the answer. `smidgen generate` is built from the same pieces.
//! Left out: conversations of several turns, beams, and serving.

use crate::failure::Failure;
use crate::generate::sampler::Sampling;
use crate::generate::session::{Generated, Opening, Settings, Timing, TokenSession};
use crate::generate::stop::{StoppedBy, stop_ids};
use crate::generate::stream::TextStream;
use crate::machine::host;
use crate::plan::arithmetic::Arithmetic;
use crate::plan::budget::{JobBudget, budget_on};
use crate::plan::devices::JobDevice;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, Sizes};
use crate::plan::job::{check_bf16, check_fp8};
use crate::plan::model::open_model;
use crate::rows::prompting::{PromptChoice, prompt_template};
use serde_json::{Value as Json, json};
use smidgen_data::template::TemplateKind;
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use smidgen_hub::{Access, Want};
use smidgen_ir::DeviceKind;
use smidgen_recipe::{BaseFormat, Budget, Compute, DeviceChoice, ModelPath};
use smidgen_runtime::AnyDevice;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::SystemTime;

/// A PEFT adapter on disk, opened and checked; its tensors are read when a [`Session`] loads it.
#[derive(Debug)]
pub struct Adapter {
    pub(crate) file: AdapterFile,
}

impl Adapter {
    /// Opens the folder of an adapter, or the adapter in the folder of a run.
    ///
    /// # Errors
    /// There is no adapter, or this version does not support it.
    pub fn open(path: impl AsRef<Path>) -> Result<Adapter, Failure> {
        let file = AdapterFile::open_adapter_or_run(path.as_ref()).map_err(Failure::model)?;
        Ok(Adapter { file })
    }

    /// The folder of the adapter.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// The rank of all modules that no `rank_pattern` matches.
    pub fn rank(&self) -> usize {
        self.file.config().r
    }
}

/// Where and how a [`Session`] computes. The default is the first GPU or else the CPU, with all its free memory.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// The device.
    pub device: DeviceChoice,
    /// The memory that may be used on the device.
    pub budget: Budget,
    /// How base weights are stored in memory.
    pub base: BaseFormat,
    /// The precision of matmuls.
    pub compute: Compute,
    /// CPU threads; 0 = one per processor.
    pub threads: usize,
    /// Tokens of prompt and answer together. `None` is what the model supports, up to 4096, or less if the budget is
    /// small.
    pub context: Option<usize>,
}

impl Default for SessionOptions {
    fn default() -> SessionOptions {
        SessionOptions {
            device: DeviceChoice::Auto,
            budget: Budget::Auto,
            base: BaseFormat::AsStored,
            compute: Compute::Auto,
            threads: 0,
            context: None,
        }
    }
}

/// A model loaded on a device for generation, with or without an adapter.
#[derive(Debug)]
pub struct Session {
    tokens: TokenSession,
    tokenizer: Tokenizer,
    template: Option<TemplateKind>,
    stop_ids: BTreeSet<u32>,
}

impl Session {
    /// Plans the memory of a generation, then loads the model and the adapter. Nothing is downloaded: the model must
    /// be on this machine.
    ///
    /// # Errors
    /// The model or its tokenizer cannot be read; the adapter is for another model; the context does not fit the
    /// budget (no weight is read then).
    pub fn open(
        model: &ModelPath,
        adapter: Option<&Adapter>,
        options: &SessionOptions,
    ) -> Result<Session, Failure> {
        let model = open_model(model, Want::Weights, &Access::cache_only())?;
        let adapter = adapter.map(|adapter| &adapter.file);
        let tokenizer = open_tokenizer(&model, adapter)?;
        let template = open_template(&PromptChoice::Auto, &model, adapter, &tokenizer)?;
        let stop_ids = stop_ids(&model, &tokenizer, template.as_ref())?;
        let mut setting = Setting::of(options)?;
        let sizes = setting.sizes(1, options.context, DEFAULT_NEW_TOKENS);
        let device = setting.open_device(options)?;
        let opening = setting.opening(&model, adapter, options, sizes)?;
        let tokens = TokenSession::open(&opening, device, |_| Ok(()))?;
        Ok(Session { tokens, tokenizer, template, stop_ids })
    }

    /// The planned memory of the session on its device.
    pub fn planned_bytes(&self) -> u64 {
        self.tokens.planned_bytes()
    }

    /// The maximum tokens of a prompt and its answer together.
    pub fn context(&self) -> usize {
        self.tokens.shape().positions
    }
}

/// How [`generate`] continues a prompt.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Maximum tokens of the answer.
    pub max_new_tokens: usize,
    /// A system message in front of the prompt.
    pub system: Option<String>,
    /// Uses the prompt without a template.
    pub raw: bool,
}

impl Default for GenerateOptions {
    fn default() -> GenerateOptions {
        GenerateOptions { sampling: Sampling::default(), max_new_tokens: 512, system: None, raw: false }
    }
}

/// The answer of [`generate`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Answer {
    /// The text, without the stop token.
    pub text: String,
    /// The tokens of the text.
    pub token_ids: Vec<u32>,
    /// Why the text ended.
    pub stopped_by: StoppedBy,
}

/// Answers a prompt. The prompt is formatted like those that the adapter or model was trained on; if that is not
/// known, it is a user's message in the model's chat template, if it has one. Calls `on_text` with each piece of the
/// answer.
///
/// # Errors
/// The prompt is longer than the session's context; there is a system message but no chat template; logits are NaN.
pub fn generate(
    session: &mut Session,
    prompt: &str,
    options: &GenerateOptions,
    mut on_text: impl FnMut(&str),
) -> Result<Answer, Failure> {
    let Session { tokens, tokenizer, template, stop_ids } = session;
    let template = template.as_ref().filter(|_| !options.raw);
    let ids = encode_prompt(tokenizer, template, options.system.as_deref(), prompt)?;
    let GenerateOptions { sampling, max_new_tokens: max_new, .. } = *options;
    let settings = Settings { sampling, max_new, stop_ids: stop_ids.clone() };
    let (generated, _, text) = stream_answer(tokens, tokenizer, &ids, &settings, |piece| {
        on_text(piece);
        Ok(())
    })?;
    Ok(Answer { text, token_ids: generated.ids, stopped_by: generated.stopped_by })
}

/// A device with the budget and the arithmetic of a generation.
pub struct Setting {
    place: JobDevice,
    arithmetic: Arithmetic,
    pub budget: JobBudget,
}

impl Setting {
    pub fn of(options: &SessionOptions) -> Result<Setting, Failure> {
        let device = options.device;
        let place = JobDevice::detect(device).map_err(|error| {
            Failure::from(error).context(format!("`{device}`")).hint("`--device cpu` generates without a GPU")
        })?;
        let arithmetic = match (options.compute, place.kind()) {
            (Compute::F16, DeviceKind::Cpu) => {
                return Err(Failure::command("f16 needs a GPU: the CPU computes in f32 or bf16")
                    .hint("`--compute f32` is the default on a CPU"));
            }
            (Compute::Bf16, _) => {
                check_bf16(&place).map_err(|why| {
                    Failure::command(why).hint("`--compute f16` is the default on this GPU")
                })?;
                place.arithmetic(Compute::Bf16).token_by_token()
            }
            (Compute::Fp8, _) => {
                check_fp8(&place).map_err(|why| {
                    Failure::command(why)
                        .hint("`--compute bf16` or `--compute f32` generates from the same stored weights")
                })?;
                place.arithmetic(Compute::Fp8)
            }
            // Decoding is bound by reading the weights: rounding operands to bf16 gains nothing on a CPU.
            (Compute::Auto, DeviceKind::Cpu) => place.arithmetic(Compute::F32).token_by_token(),
            (compute, _) => place.arithmetic(compute).token_by_token(),
        };
        let budget = budget_on(&place, options.budget)
            .map_err(|failure| failure.without_hints().hint("set a budget: `--budget 8GiB`"))?;
        Ok(Setting { place, arithmetic, budget })
    }

    pub fn sizes(&self, slots: usize, context: Option<usize>, new_tokens: usize) -> Sizes {
        Sizes { slots, context, cache_tokens: None, new_tokens, budget: self.budget, has_audio: false }
    }

    /// Opens the device. This comes before planning, because a plan includes the memory of the driver's context.
    pub fn open_device(&mut self, options: &SessionOptions) -> Result<AnyDevice, Failure> {
        self.place.open_and_measure(host::threads(options.threads)?, self.arithmetic)
    }

    pub fn opening<'a>(
        &'a self,
        model: &'a Model,
        adapter: Option<&'a AdapterFile>,
        options: &SessionOptions,
        sizes: Sizes,
    ) -> Result<Opening<'a>, Failure> {
        let (arithmetic, threads) = (self.arithmetic, host::threads(options.threads)?);
        Ok(Opening {
            model,
            adapter,
            base: options.base.for_compute(options.compute),
            place: &self.place,
            arithmetic,
            threads,
            sizes,
        })
    }
}

/// The tokenizer of the adapter if it has one, because the adapter was trained with its chat template; else the
/// model's.
pub fn open_tokenizer(model: &Model, adapter: Option<&AdapterFile>) -> Result<Tokenizer, Failure> {
    let own = adapter.map(AdapterFile::path).filter(|folder| folder.join("tokenizer.json").is_file());
    match (own, model) {
        (Some(folder), _) => Tokenizer::from_folder(folder).map_err(Failure::model),
        (None, Model::Folder { folder, .. }) => Tokenizer::from_folder(folder.path()).map_err(Failure::model),
        (None, Model::Gguf { file, .. }) => {
            let file = GgufFile::open(file.path()).map_err(Failure::model)?;
            Tokenizer::from_gguf(&file).map_err(Failure::model)
        }
    }
}

/// The template of prompts: the adapter's, the model's, or none.
pub fn open_template(
    choice: &PromptChoice,
    model: &Model,
    adapter: Option<&AdapterFile>,
    tokenizer: &Tokenizer,
) -> Result<Option<TemplateKind>, Failure> {
    let model_folder = match model {
        Model::Folder { folder, .. } => Some(folder.path()),
        Model::Gguf { .. } => None,
    };
    prompt_template(choice, tokenizer, adapter.map(AdapterFile::path).into_iter().chain(model_folder))
}

/// The ids of one prompt, formatted by the template if there is one.
pub fn encode_prompt(
    tokenizer: &Tokenizer,
    template: Option<&TemplateKind>,
    system: Option<&str>,
    prompt: &str,
) -> Result<Vec<u32>, Failure> {
    let chat = match template {
        Some(TemplateKind::Chat(chat)) => chat,
        None | Some(TemplateKind::Text(_)) if system.is_some() => {
            return Err(Failure::command("`--system` needs a chat template, but the prompts have none")
                .hint("`--template` names one; `--template model` is the model's own"));
        }
        Some(TemplateKind::Text(text)) => {
            return tokenizer.encode(&text.render(prompt, None), true).map_err(Failure::model);
        }
        None => return tokenizer.encode(prompt, true).map_err(Failure::model),
    };
    let mut messages = Vec::new();
    messages.extend(system.map(|text| json!({"role": "system", "content": text})));
    messages.push(json!({"role": "user", "content": prompt}));
    let messages = Json::Array(messages);
    let input = ChatInput { add_generation_prompt: true, ..ChatInput::new(&messages, SystemTime::now()) };
    let text = chat.render(&input).map_err(Failure::model)?.text;
    tokenizer.encode(&text, false).map_err(Failure::model)
}

/// Continues a sequence and calls `on_text` with each piece of the text. A failure of `on_text` stops the generation.
pub fn stream_answer(
    session: &mut TokenSession,
    tokenizer: &Tokenizer,
    ids: &[u32],
    settings: &Settings,
    mut on_text: impl FnMut(&str) -> Result<(), Failure>,
) -> Result<(Generated, Timing, String), Failure> {
    let (mut stream, mut text, mut failure) = (TextStream::default(), String::new(), None);
    let mut show = |piece: Result<String, _>| {
        let shown = piece.map_err(Failure::model).and_then(|piece| {
            text.push_str(&piece);
            on_text(&piece)
        });
        failure = failure.take().or(shown.err());
        failure.is_none()
    };
    let (generated, timing) =
        session.continue_sequence(ids, settings, |id| show(stream.push(tokenizer, id)))?;
    show(stream.finish(tokenizer));
    match failure {
        Some(failure) => Err(failure),
        None => Ok((generated, timing, text)),
    }
}
