//! `smidgen generate MODEL|RUN|RECIPE`: text from a prompt, or a conversation in the terminal.
//!
//! The text goes to stdout while it is generated, everything else to stderr. A prompt has the format that the adapter
//! was trained on. If that is unknown, it is a user's message in the model's chat template, or unchanged if the model
//! has no template. `--template` and `--raw` override this.
//! By default decoding is greedy for a prompt, so that it can be repeated, and samples in a conversation.
//! Left out: a server, and speculative decoding.

use super::chat::{ChatOptions, render_timing, run_chat};
use super::original::{open_adapter, open_named, trained_model};
use super::recipe_args::read_recipe;
use crate::console::colour::NOTE;
use crate::console::downloads::hub_access;
use crate::console::progress::say;
use crate::console::stdout::{print_data, print_json};
use crate::failure::Failure;
use crate::generate::beam::BeamSettings;
use crate::generate::sampler::Sampling;
use crate::generate::session::{Generated, Settings, Timing, TokenSession};
use crate::generate::stop::stop_ids;
use crate::library::generate::{
    SessionOptions, Setting, encode_prompt, open_template, open_tokenizer, stream_answer,
};
use crate::plan::artifact::Artifact;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, GenerationPlan, Sizes};
use crate::plan::model::{open_model, read_decoder};
use crate::report::generation_table::render_generation_table;
use crate::rows::prompting::PromptChoice;
use crate::session::encoding::encode_files;
use serde_json::{Value as Json, json};
use smidgen_data::audio_text::{Misplaced, place_in_prompt};
use smidgen_data::template::{TemplateChoice, TemplateKind};
use smidgen_formats::json_file::read_chosen_bytes;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_hub::{Access, Want};
use smidgen_ir::bytes::{format_bytes, parse_bytes};
use smidgen_recipe::{BaseFormat, Budget, ClosedWord, Compute, DeviceChoice, Init};
use smidgen_runtime::AnyDevice;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// More than any context holds.
const MAX_PROMPT_BYTES: u64 = 16_000_000;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model (hf:org/name, pypi:package, a folder or a .gguf file), the folder of a run, or a recipe
    #[arg(value_name = "MODEL|RUN|RECIPE")]
    target: String,
    /// The folder of an adapter for the model
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// The prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_file")]
    prompt: Option<String>,
    /// A file with the prompt; `-` is stdin, which is also the default if stdin is not a terminal
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// An audio file for the prompt (may be repeated); `<|audio_1|>` in the prompt marks where the first one goes
    #[arg(long, value_name = "FILE")]
    audio: Vec<PathBuf>,
    /// System message of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Use the prompt unchanged, without a template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Chat template: `model` for the model's own, the name of a built-in one, or a .jinja file [default: the one used
    /// in training, else the model's own]
    #[arg(long, value_name = "TEMPLATE", conflicts_with = "raw")]
    template: Option<String>,
    /// Maximum tokens to generate
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    max_new: usize,
    /// Sampling temperature; 0 is greedy [default: 0 for a prompt, 0.7 in a conversation]
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample only from this many most likely tokens (0 = all)
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    top_k: usize,
    /// Sample only from the most likely tokens whose probabilities sum to this
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    top_p: f64,
    /// Penalty on the logits of tokens that already occurred (1 = none)
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Sampling seed: the same seed gives the same text
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Use beam search with this number of beams
    #[arg(long, value_name = "BEAMS", conflicts_with_all = ["temperature", "top_k", "top_p", "repetition_penalty"])]
    beams: Option<usize>,
    /// Tokens reserved for prompt and answer together
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Memory budget, such as 2GiB [default: the recipe's, or what is free]
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
    /// Device: auto, cpu or cuda:N [default: the recipe's, or auto: the first GPU, else the CPU]
    #[arg(long)]
    device: Option<String>,
    /// Compute precision: auto, f32, bf16, f16 or fp8 [default: the recipe's, or auto: bf16 on a GPU (f16 before
    /// Ampere), else f32]
    #[arg(long)]
    compute: Option<String>,
    /// CPU threads (0 = one per core)
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print the budget table before the answer
    #[arg(long)]
    plan: bool,
    /// Print the result as JSON, instead of the text
    #[arg(long)]
    json: bool,
}

/// What arguments say about a model and its device.
pub struct Wanted<'a> {
    /// A model, a run or a recipe.
    pub target: &'a str,
    pub adapter: Option<&'a Path>,
    pub budget: Option<&'a str>,
    pub device: Option<&'a str>,
    pub compute: Option<&'a str>,
    pub threads: usize,
}

impl Args {
    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            target: &self.target,
            adapter: self.adapter.as_deref(),
            budget: self.budget.as_deref(),
            device: self.device.as_deref(),
            compute: self.compute.as_deref(),
            threads: self.threads,
        }
    }
}

/// The model and adapter that the arguments name, opened.
pub struct Subject {
    /// The name of the base model, without its folder or organisation.
    pub name: String,
    pub model: Model,
    pub adapter: Option<AdapterFile>,
    pub options: SessionOptions,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    check(args)?;
    let prompt = read_prompt(args)?;
    if prompt.is_none() && args.json {
        return Err(Failure::command("`--json` needs a prompt: a conversation has no JSON form"));
    }
    if prompt.is_none() && !args.audio.is_empty() {
        return Err(Failure::command(
            "`--audio` needs a prompt: a conversation in the terminal takes no audio",
        ));
    }
    let subject = open_subject(&args.wanted(), &hub_access(quiet))?;
    let tokenizer = open_tokenizer(&subject.model, subject.adapter.as_ref())?;
    let choice = prompt_choice(args);
    let template = open_template(&choice, &subject.model, subject.adapter.as_ref(), &tokenizer)?;
    let stop_ids = stop_ids(&subject.model, &tokenizer, template.as_ref())?;
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(if prompt.is_some() { 0.0 } else { 0.7 }),
        top_k: args.top_k,
        top_p: args.top_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
    };
    let settings = Settings { sampling, max_new: args.max_new, stop_ids };
    match prompt {
        Some(prompt) => {
            run_prompt(args, quiet, &subject, (&tokenizer, template.as_ref()), &settings, &prompt)
        }
        None => {
            let opened = open_device(quiet, &subject)?;
            let mut session = open_session(args, quiet, &subject, opened, args.context, DEFAULT_NEW_TOKENS)?;
            let now = SystemTime::now();
            let (tokenizer, template) = (&tokenizer, template.as_ref());
            let options = ChatOptions { tokenizer, template, system: args.system.as_deref(), quiet, now };
            run_chat(&mut session, &settings, &options)
        }
    }
}

fn prompt_choice(args: &Args) -> PromptChoice {
    match args.template.as_deref() {
        None if args.raw => PromptChoice::Raw,
        None => PromptChoice::Auto,
        Some("model") => PromptChoice::Model,
        Some(path) if path.ends_with(".jinja") => PromptChoice::Template(TemplateChoice::File(path.into())),
        Some(name) => PromptChoice::Template(TemplateChoice::Named(name.to_owned())),
    }
}

fn check(args: &Args) -> Result<(), Failure> {
    let wrong = |what: String| Err(Failure::command(what));
    match args {
        Args { temperature: Some(t), .. } if !(0.0..).contains(t) || !t.is_finite() => {
            wrong(format!("`--temperature {t}` must be at least 0"))
        }
        Args { top_p, .. } if !(*top_p > 0.0 && *top_p <= 1.0) => {
            wrong(format!("`--top-p {top_p}` must be above 0 and at most 1"))
        }
        Args { repetition_penalty: factor, .. } if !(*factor > 0.0 && factor.is_finite()) => {
            wrong(format!("`--repetition-penalty {factor}` must be above 0"))
        }
        Args { beams: Some(0), .. } => wrong("`--beams` must be at least 1".into()),
        Args { max_new: 0, .. } => wrong("`--max-new` must be at least 1".into()),
        _ => Ok(()),
    }
}

/// The prompt, or `None` for a conversation in the terminal.
fn read_prompt(args: &Args) -> Result<Option<String>, Failure> {
    let unreadable =
        |what: &str, error: std::io::Error| Failure::disk(error).context(format!("cannot read {what}"));
    let from_stdin = || {
        let mut text = String::new();
        let stdin = std::io::stdin().take(MAX_PROMPT_BYTES + 1).read_to_string(&mut text);
        if stdin.map_err(|error| unreadable("stdin", error))? as u64 > MAX_PROMPT_BYTES {
            return Err(Failure::command(format!("the prompt has more than {MAX_PROMPT_BYTES} bytes")));
        }
        Ok(Some(text))
    };
    match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => Ok(Some(prompt.clone())),
        (None, Some(path)) if path == Path::new("-") => from_stdin(),
        (None, Some(path)) => {
            let bytes = read_chosen_bytes(path, MAX_PROMPT_BYTES).map_err(Failure::command)?;
            let text = String::from_utf8(bytes).map_err(std::io::Error::other);
            text.map(Some).map_err(|error| unreadable(&format!("`{}`", path.display()), error))
        }
        (None, None) if std::io::stdin().is_terminal() => Ok(None),
        (None, None) => from_stdin(),
    }
}

pub fn open_subject(args: &Wanted<'_>, access: &Access) -> Result<Subject, Failure> {
    let DeviceOptions { budget, device, compute } = read_device_options(args)?;
    let last = |path: &str| path.trim_end_matches('/').rsplit(['/', ':']).next().unwrap_or(path).to_owned();
    let target = Path::new(args.target);
    let job = target.join("job.toml");
    let is_recipe = target.is_file() && target.extension().is_some_and(|extension| extension == "toml");
    if !is_recipe && !job.is_file() {
        let model = open_named(args.target, Want::Weights, access)?;
        let adapter = args.adapter.map(open_adapter).transpose()?;
        let options = SessionOptions {
            budget: budget.unwrap_or(Budget::Auto),
            device: device.unwrap_or(DeviceChoice::Auto),
            compute: compute.unwrap_or(Compute::Auto),
            threads: args.threads,
            ..SessionOptions::default()
        };
        return Ok(Subject { name: last(args.target), model, adapter, options });
    }
    let (_, recipe) = read_recipe(if is_recipe { target } else { &job }, &[])?;
    let trained = if is_recipe { recipe.output.dir.resolved.clone() } else { target.to_path_buf() };
    let artifact = Artifact::of(&recipe);
    let made = trained_model(&trained).filter(|_| artifact == Artifact::Model && args.adapter.is_none());
    let mut model = match &made {
        Some(made) => Model::open_folder(made).map_err(Failure::model)?,
        None => open_model(&recipe.model.path, Want::Weights, access)?,
    };
    let adapter = match args.adapter {
        Some(path) => Some(open_adapter(path)?),
        None if made.is_some() => None,
        None if trained.join("adapter").is_dir() => Some(open_adapter(&trained)?),
        None if is_recipe => {
            let artifact = artifact.folder();
            say(&format!("there is no {artifact} in `{}` yet: using the base model", trained.display()));
            None
        }
        None => {
            let (place, made) = (trained.display(), artifact.folder());
            return Err(Failure::model(format!("the run in `{place}` has no {made} yet")).hint(
                match artifact {
                    Artifact::Adapter => "`--adapter` names one of its checkpoints",
                    Artifact::Model => {
                        "it is written when the run ends: continue it with `smidgen train --resume`"
                    }
                },
            ));
        }
    };
    // An adapter that continued the one inside the checkpoint replaces it.
    if recipe.adapter.init == Init::BuiltinSpeech && adapter.is_some() {
        model.stop_merging_speech();
    }
    let options = SessionOptions {
        base: if made.is_some() { BaseFormat::AsStored } else { recipe.model.storage() },
        budget: budget.unwrap_or(recipe.memory.budget),
        device: device.unwrap_or(recipe.memory.device),
        compute: compute.unwrap_or(recipe.model.compute),
        threads: args.threads,
        context: None,
    };
    Ok(Subject { name: last(&recipe.model.path.to_string()), model, adapter, options })
}

/// The options that override `memory.budget`, `memory.device` and `model.compute` of a recipe.
struct DeviceOptions {
    budget: Option<Budget>,
    device: Option<DeviceChoice>,
    compute: Option<Compute>,
}

fn read_device_options(args: &Wanted<'_>) -> Result<DeviceOptions, Failure> {
    let device = |text: &str| {
        DeviceChoice::parse(text).ok_or_else(|| {
            Failure::command(format!("`--device {text}` is not a device"))
                .hint("write `auto`, `cpu` or `cuda:0`")
        })
    };
    let compute = |text: &str| {
        Compute::from_word(text).ok_or_else(|| {
            Failure::command(format!("`--compute {text}` is not a precision"))
                .hint("write `auto`, `f32`, `bf16`, `f16` or `fp8`")
        })
    };
    Ok(DeviceOptions {
        budget: args.budget.map(read_budget).transpose()?.map(Budget::Bytes),
        device: args.device.map(device).transpose()?,
        compute: args.compute.map(compute).transpose()?,
    })
}

fn read_budget(text: &str) -> Result<u64, Failure> {
    parse_bytes(text).ok_or_else(|| {
        Failure::command(format!("`--budget {text}` is not a size")).hint("write it as `2GiB` or `800MB`")
    })
}

fn open_device(quiet: bool, subject: &Subject) -> Result<(Setting, AnyDevice), Failure> {
    let mut setting = Setting::of(&subject.options)?;
    if let Some(free) = setting.budget.cut_to_free.filter(|_| !quiet) {
        say(&format!("{NOTE} the GPU has only {} free, less than the budget", format_bytes(free)));
    }
    let device = setting.open_device(&subject.options)?;
    Ok((setting, device))
}

fn open_session(
    args: &Args,
    quiet: bool,
    subject: &Subject,
    (setting, device): (Setting, AnyDevice),
    context: Option<usize>,
    new_tokens: usize,
) -> Result<TokenSession, Failure> {
    let sizes = setting.sizes(args.beams.unwrap_or(1), context, new_tokens);
    let sizes = Sizes { has_audio: !args.audio.is_empty(), ..sizes };
    let (model, adapter) = (&subject.model, subject.adapter.as_ref());
    let opening = setting.opening(model, adapter, &subject.options, sizes)?;
    TokenSession::open(&opening, device, |plan: &GenerationPlan| {
        if args.plan && !quiet {
            say(render_generation_table(plan).trim_end());
        }
        Ok(())
    })
}

/// A prompt with encoded audio clips.
struct AudioPrompt {
    /// The text with one audio token per embedding.
    prompt: String,
    /// The id of the audio token.
    token: u32,
    tokens: usize,
    embeddings: Vec<f32>,
}

fn encode_audio(
    args: &Args,
    subject: &Subject,
    (setting, device): (Setting, AnyDevice),
    tokenizer: &Tokenizer,
    prompt: &str,
) -> Result<(Option<AudioPrompt>, (Setting, AnyDevice)), Failure> {
    if args.audio.is_empty() {
        return Ok((None, (setting, device)));
    }
    let model = &subject.model;
    let sizes = setting.sizes(1, None, DEFAULT_NEW_TOKENS);
    let request = setting.opening(model, subject.adapter.as_ref(), &subject.options, sizes)?.request()?;
    let Some(audio) = request.spec.audio.as_ref() else {
        let place = model.path().display();
        return Err(Failure::command(format!("`{place}` takes no audio: its config has no audio encoder"))
            .hint("`--audio` needs a model such as `hf:microsoft/Phi-4-multimodal-instruct`"));
    };
    let token = audio.token;
    let Some(text) = tokenizer.token(token) else {
        return Err(Failure::model(format!(
            "the tokenizer has no token {token}, the audio token of the model"
        )));
    };
    let width = audio.decoder_hidden;
    let (clips, device) = encode_files(&request, (model, subject.adapter.as_ref()), &args.audio, device)?;
    let tokens: Vec<usize> = clips.iter().map(|clip| clip.len() / width).collect();
    let (prompt, order) = place_in_prompt(prompt, &tokens, &text).map_err(|misplaced| {
        let what = match misplaced {
            Misplaced::Placeholder(placeholder) => {
                let noun = if clips.len() == 1 { "clip" } else { "clips" };
                format!("`{placeholder}` and {} {noun}", clips.len())
            }
            Misplaced::NoText => "no text".to_owned(),
        };
        Failure::command(format!("the prompt has {what}"))
            .hint("`<|audio_1|>` stands for the first clip, `<|audio_2|>` for the second, each once")
    })?;
    let tokens = tokens.iter().sum();
    let embeddings = order.into_iter().flat_map(|clip| clips[clip].iter().copied()).collect();
    Ok((Some(AudioPrompt { prompt, token, tokens, embeddings }), (setting, device)))
}

fn run_prompt(
    args: &Args,
    quiet: bool,
    subject: &Subject,
    (tokenizer, template): (&Tokenizer, Option<&TemplateKind>),
    settings: &Settings,
    prompt: &str,
) -> Result<(), Failure> {
    let opened = open_device(quiet, subject)?;
    let (audio, opened) = encode_audio(args, subject, opened, tokenizer, prompt)?;
    let prompt = audio.as_ref().map_or(prompt, |audio| &audio.prompt);
    let ids = encode_prompt(tokenizer, template, args.system.as_deref(), prompt)?;
    if let Some(AudioPrompt { token, tokens, .. }) = audio
        && ids.iter().filter(|id| **id == token).count() != tokens
    {
        return Err(Failure::model("the tokenizer or the template changes the audio tokens of the prompt"));
    }
    // Reserves exactly what prompt and answer can need.
    let longest = read_decoder(&subject.model)?.max_positions;
    let context = args.context.unwrap_or_else(|| (ids.len() + args.max_new).min(longest.max(ids.len())));
    let new_tokens = DEFAULT_NEW_TOKENS.min(ids.len().max(1));
    let mut session = open_session(args, quiet, subject, opened, Some(context), new_tokens)?;
    if let Some(AudioPrompt { token, embeddings, .. }) = &audio {
        session.set_audio(*token, embeddings);
    }
    let show = |piece: &str| if args.json { Ok(()) } else { print_data(piece) };
    let (generated, timing, text) = match args.beams {
        Some(beams) => {
            let settings = BeamSettings {
                beams,
                max_new: args.max_new,
                length_penalty: 1.0,
                stop_ids: settings.stop_ids.clone(),
            };
            let generated = session.search_beams(&ids, &settings)?;
            let text = tokenizer.decode(&generated.ids, true).map_err(Failure::model)?;
            show(&text)?;
            (generated, Timing::default(), text)
        }
        None => stream_answer(&mut session, tokenizer, &ids, settings, show)?,
    };
    if args.json {
        return print_json(&format!("{:#}\n", report(&mut session, &ids, &generated, &text, &timing)));
    }
    print_data("\n")?;
    if !quiet {
        say(&render_timing(&generated, &timing));
    }
    Ok(())
}

fn report(
    session: &mut TokenSession,
    prompt: &[u32],
    generated: &Generated,
    text: &str,
    timing: &Timing,
) -> Json {
    json!({
        "prompt_ids": prompt,
        "ids": generated.ids,
        "text": text,
        "stopped_by": generated.stopped_by.name(),
        "prompt_tokens_per_s": timing.prompt_tokens_per_s(),
        "tokens_per_s": timing.answer_tokens_per_s(),
        "context": session.shape().positions,
        "planned_bytes": session.planned_bytes(),
        "measured_bytes": session.measured_bytes(),
    })
}
