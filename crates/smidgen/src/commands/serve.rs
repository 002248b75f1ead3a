//! `smidgen serve MODEL|RUN`: a server with OpenAI's interface, for a base model and adapters over it.
//!
//! The memory is planned before a weight is read: the cache of keys and values decides how many sequences run at once.
//! It listens on the loopback address unless `--host` says otherwise, which needs a token.
//! Left out: audio, and adapters with different modules.

use super::generate::{Subject, Wanted, open_subject};
use super::original::open_adapter;
use crate::console::colour::NOTE;
use crate::console::downloads::hub_access;
use crate::console::progress::say;
use crate::console::stdout::print_json;
use crate::failure::{Failure, FailureKind};
use crate::generate::session::TokenSession;
use crate::generate::stop::stop_ids;
use crate::library::generate::{Setting, open_template, open_tokenizer};
use crate::plan::generation::{DEFAULT_NEW_TOKENS, Sizes, plan_generation};
use crate::report::generation_table::render_generation_table;
use crate::rows::prompting::PromptChoice;
use crate::serve::engine::Engine;
use crate::serve::http::{Server, render_start, serve};
use crate::serve::openai::{Served, now};
use crate::session::adapted::build_adapted_request;
use smidgen_compile::{AdapterForm, Request, TrainedBiases};
use smidgen_formats::peft::AdapterFile;
use std::net::{IpAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use tokio::runtime::Builder;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model (hf:org/name, pypi:package, a folder or a .gguf file), the folder of a run, or a recipe
    #[arg(value_name = "MODEL|RUN|RECIPE")]
    target: String,
    /// An adapter of the model, served under this name: NAME=DIR (may be repeated)
    #[arg(long, value_name = "NAME=DIR")]
    adapter: Vec<String>,
    /// Address to listen on; any but the loopback address needs `--token`
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to serve on (0 = any free port)
    #[arg(long, default_value_t = 7118)]
    port: u16,
    /// Token that requests have to send, as `Authorization: Bearer TOKEN`; `-` reads it from stdin
    #[arg(long)]
    token: Option<String>,
    /// Maximum sequences that are generated at the same time
    #[arg(long, default_value_t = 32)]
    sequences: usize,
    /// Tokens of a prompt and its answer together [default: the model's, up to 4096, or less if the budget is small]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Memory budget, such as 2GiB [default: the recipe's, or what is free]
    #[arg(long, value_name = "BYTES")]
    budget: Option<String>,
    /// Device: auto, cpu or cuda:N [default: the recipe's, or auto: the first GPU, else the CPU]
    #[arg(long)]
    device: Option<String>,
    /// Compute precision: auto, f32, bf16, f16 or fp8 [default: the recipe's, or auto]
    #[arg(long)]
    compute: Option<String>,
    /// CPU threads (0 = one per core)
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print the address, the models and the planned memory as a line of JSON when the server is ready
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let token = read_token(args)?;
    if args.sequences == 0 {
        return Err(Failure::command("`--sequences` must be at least 1"));
    }
    let wanted = Wanted {
        target: &args.target,
        adapter: None,
        budget: args.budget.as_deref(),
        device: args.device.as_deref(),
        compute: args.compute.as_deref(),
        threads: args.threads,
    };
    let Subject { name, model, adapter, options } = open_subject(&wanted, &hub_access(quiet))?;
    let named = adapter.map(|file| (name_of(Path::new(&args.target)), file));
    let adapters: Vec<(String, AdapterFile)> = named
        .into_iter()
        .map(Ok)
        .chain(args.adapter.iter().map(|text| open_named_adapter(text)))
        .collect::<Result<_, _>>()?;
    let first = adapters.first().map(|(_, file)| file);
    let tokenizer = open_tokenizer(&model, first)?;
    let template = open_template(&PromptChoice::Auto, &model, first, &tokenizer)?;
    let stop_ids = stop_ids(&model, &tokenizer, template.as_ref())?;
    let listener = listen(args)?;
    let mut setting = Setting::of(&options)?;
    let device = setting.open_device(&options)?;
    let sizes = setting.sizes(args.sequences, args.context, DEFAULT_NEW_TOKENS);
    let request = setting.opening(&model, first, &options, sizes)?.request()?;
    for (name, file) in adapters.iter().skip(1) {
        check_same_modules(name, &request, &build_adapted_request(&model, Some(file))?)?;
    }
    let sizes = fitting_sizes(sizes, |sizes| {
        let opening = setting.opening(&model, first, &options, *sizes)?;
        plan_generation(&request, &model, opening.place, sizes).map(|_| ())
    })?;
    let session = TokenSession::open(&setting.opening(&model, first, &options, sizes)?, device, |plan| {
        if !quiet {
            say(render_generation_table(plan).trim_end());
        }
        Ok(())
    })?;
    let mut models: Vec<(String, Option<usize>)> =
        adapters.iter().enumerate().map(|(number, (name, _))| (name.clone(), Some(number))).collect();
    if has_base(&request) {
        models.insert(0, (name, None));
    } else if !quiet {
        say(&format!("{NOTE} the base is not served: the adapter replaces parts of it"));
    }
    let mut names: Vec<&str> = models.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Failure::command(format!("two models would have the name `{}`", twice[0]))
            .hint("`--adapter NAME=DIR` names an adapter"));
    }
    let (planned_bytes, shape) = (session.planned_bytes(), session.shape());
    let tokenizer = Arc::new(tokenizer);
    let (queue, work) = channel();
    let files = adapters.into_iter().map(|(_, file)| file).collect();
    let engine = Engine { session, request, adapters: files, tokenizer: Arc::clone(&tokenizer) };
    let served = Served { models, tokenizer, template, stop_ids, shape, started: now(), count: 0.into() };
    let address = listener.local_addr().map_err(Failure::network)?.to_string();
    if args.json {
        print_json(&format!("{}\n", render_start(&address, &served, planned_bytes)))?;
    }
    if !quiet {
        let models: Vec<&str> = served.models.iter().map(|(name, _)| name.as_str()).collect();
        say(&format!(
            "serving {} at http://{address}/v1, with a page at http://{address}/ (Ctrl-C to stop)",
            models.join(", ")
        ));
    }
    let is_local = args.host.is_loopback();
    let server = Arc::new(Server { served, queue, token, is_local, answers: Arc::default() });
    std::thread::spawn(move || engine.run(&work));
    let runtime = Builder::new_current_thread().enable_io().enable_time().max_blocking_threads(4).build();
    runtime.map_err(Failure::network)?.block_on(serve(listener, server)).map_err(Failure::network)
}

fn read_token(args: &Args) -> Result<Option<String>, Failure> {
    let token = match args.token.as_deref() {
        Some("-") => {
            let mut line = String::new();
            let read = std::io::stdin().read_line(&mut line);
            read.map_err(|error| Failure::disk(error).context("cannot read the token from stdin"))?;
            Some(line.trim().to_owned())
        }
        token => token.map(str::to_owned),
    };
    match &token {
        Some(token) if token.is_empty() => Err(Failure::command("the token is empty")),
        None if !args.host.is_loopback() => Err(Failure::command(format!(
            "`--host {}` is reached by other machines, and there is no token",
            args.host
        ))
        .hint("`--token TEXT` sets one; clients send it as their API key")),
        _ => Ok(token),
    }
}

fn listen(args: &Args) -> Result<TcpListener, Failure> {
    let listener = TcpListener::bind((args.host, args.port)).map_err(|error| {
        Failure::network(error)
            .context(format!("cannot listen on port {} of {}", args.port, args.host))
            .hint("`--port 0` uses any free port")
    })?;
    listener.set_nonblocking(true).map_err(Failure::network)?;
    Ok(listener)
}

/// The name of an adapter is that of its folder, or of its run.
fn name_of(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_stem().map_or_else(|| "adapter".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn open_named_adapter(text: &str) -> Result<(String, AdapterFile), Failure> {
    let (name, path) = match text.split_once('=') {
        Some((name, path)) if !name.is_empty() => (name.to_owned(), PathBuf::from(path)),
        _ => (name_of(Path::new(text)), PathBuf::from(text)),
    };
    Ok((name, open_adapter(&path)?))
}

/// Adapters share one plan, so they must adapt the same modules in the same way.
fn check_same_modules(name: &str, first: &Request, other: &Request) -> Result<(), Failure> {
    let is_same = first.adapters == other.adapters
        && first.form == other.form
        && first.trained == other.trained
        && first.biases == other.biases;
    if is_same {
        return Ok(());
    }
    Err(Failure::model(format!(
        "the adapter `{name}` has other modules, ranks, scales or trained tensors than the first one"
    ))
    .hint("serve it with a server of its own, or merge it first"))
}

/// Whether the base can be had from the plan of the adapters, by adding nothing.
fn has_base(request: &Request) -> bool {
    request.form == AdapterForm::Lora && request.trained.is_empty() && request.biases == TrainedBiases::None
}

/// The sizes with the largest cache that fits: room for all sequences at their longest, or for half as many, and so on.
fn fitting_sizes(sizes: Sizes, plan: impl Fn(&Sizes) -> Result<(), Failure>) -> Result<Sizes, Failure> {
    let mut last = sizes;
    let mut at_once = sizes.slots;
    loop {
        last = Sizes { slots: at_once, ..last };
        match plan(&last) {
            Err(failure) if failure.kind == FailureKind::Memory && at_once > 1 => at_once /= 2,
            Err(failure) => return Err(failure),
            Ok(()) => return Ok(last),
        }
    }
}
