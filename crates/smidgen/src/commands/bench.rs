//! `smidgen bench`: tokens per second and memory for a model of a named shape, without downloading anything.
//!
//! Figures are medians over the steps after the warm-up. FLOPs are counted as 4 per token and parameter of a linear
//! layer, the LM head included (forward and the gradient of the input; a frozen weight has no gradient), and 12 per
//! visible score and channel of attention; recomputed work does not count.
//! Memory is the drop in free memory since before the device was opened, without the driver's context as planned.
//! `--write-model` writes a checkpoint of random weights instead.

use super::recipe_args::working_directory;
use crate::bench::decode::{DecodeBench, Decoding, bytes_per_step};
use crate::bench::synthetic::{self, Synthetic};
use crate::bench::timing::{Batch, Bench, Times};
use crate::console::stdout::{print_lines, print_report};
use crate::failure::Failure;
use crate::generate::session::Opening;
use crate::plan::generation::{DEFAULT_NEW_TOKENS, GenerationPlan, Sizes, plan_generation};
use crate::plan::job::{Job, Profiles, check_compute, check_range};
use crate::plan::planning::plan_job;
use crate::plan::shapes::{self, Shape};
use crate::report::choices::LayerCounts;
use clap::builder::RangedU64ValueParser;
use serde_json::{Value, json};
use smidgen_compile::DecoderSpec;
use smidgen_compile::model::audio::AudioSpec;
use smidgen_compile::model::layer::AttentionSpec;
use smidgen_compile::model::read_spec;
use smidgen_formats::element::Element;
use smidgen_formats::json_file::{MAX_CONFIG_BYTES, read_json_file};
use smidgen_formats::model::Model;
use smidgen_formats::phi4mm::{self, Phi4mm};
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DType, Extent, Rank, Storage};
use smidgen_recipe::{self as recipe, BaseFormat, Compute, ModelPath, Recipe, RecipePath};
use smidgen_runtime::AnyDevice;
use smidgen_runtime::comm::Nccl;
use smidgen_runtime::cuda::gpu_generation::Capability;
use smidgen_runtime::cuda::peers::Peers;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keys of a recipe, such as `memory.recompute=all`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// A shape by name (qwen2.5-7b, qwen2.5-1.5b, llama3.1-8b ...), or a folder with a config.json
    #[arg(long, default_value = "smollm2-135m")]
    model: String,
    /// Storage of the base weights: as-stored, f32, bf16, f16, fp8, int8, nf4, nf4-single [default: bf16, or fp8 with
    /// `--compute fp8`]
    #[arg(long)]
    base: Option<String>,
    /// Kind of adapter: lora, dora or ls-lora
    #[arg(long, default_value = "lora")]
    adapter: String,
    /// Rank of the adapter
    #[arg(long, default_value_t = 16, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rank: usize,
    /// Optimizer: adamw or adamw-8bit
    #[arg(long, default_value = "adamw")]
    optimizer: String,
    /// Samples per step
    #[arg(long, default_value_t = 4, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    batch: usize,
    /// Tokens per sample
    #[arg(long, default_value_t = 2048, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    tokens: usize,
    /// Samples per micro-batch [default: all of them, if they fit]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    together: Option<usize>,
    /// Memory budget, such as 8GiB; auto is what is free
    #[arg(long, default_value = "auto")]
    budget: String,
    /// Device: auto, cpu or cuda:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Compute precision: auto, f32, bf16, f16, fp8
    #[arg(long, default_value = "auto")]
    compute: String,
    /// Steps to measure
    #[arg(long, default_value_t = 10, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    steps: usize,
    /// Steps before the measurement
    #[arg(long, default_value_t = 3)]
    warm_up: usize,
    /// Measure generation instead of training: `--batch` sequences of `--tokens` tokens, then `--steps` more tokens
    /// each
    #[arg(long, conflicts_with_all = ["launch_singly", "sum_through_nccl", "together"])]
    decode: bool,
    /// Also print the time of each operation
    #[arg(long)]
    profile: bool,
    /// On a GPU, launch kernels one by one instead of as CUDA graphs: same results, to compare speed
    #[arg(long)]
    launch_singly: bool,
    /// On a GPU, run the kernels for this compute capability, from 7.0 up to the GPU's own: tests the code paths of an
    /// older GPU, not its speed
    #[arg(long, value_name = "MAJOR.MINOR", value_parser = parse_capability)]
    as_capability: Option<Capability>,
    /// On a GPU, plan for two ranks and sum gradients through NCCL with a single rank: same results, to measure the
    /// overhead
    #[arg(long)]
    sum_through_nccl: bool,
    /// Print the measurements as JSON
    #[arg(long)]
    json: bool,
    /// Write a checkpoint of random weights into this folder instead of measuring
    #[arg(long, value_name = "DIR")]
    write_model: Option<PathBuf>,
}

/// Parses a compute capability such as `7.5`.
fn parse_capability(text: &str) -> Result<Capability, String> {
    let parts =
        text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parts.ok_or_else(|| "expected a compute capability such as 7.5".to_owned())
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let config = read_config(&args.model)?;
    match &args.write_model {
        Some(folder) => write_model(&config, folder),
        None if args.decode => measure_decoding(args, Model::from_config(&args.model, config)),
        None => measure(args, Model::from_config(&args.model, config)),
    }
}

/// Reads the config of a known shape or of a folder.
fn read_config(model: &str) -> Result<Value, Failure> {
    if let Some(shape) = Shape::find(model) {
        return Ok(shape.model().config().clone());
    }
    let path = Path::new(model).join("config.json");
    read_json_file(&path, MAX_CONFIG_BYTES).map_err(|error| {
        Failure::command(error)
            .context(format!("`--model {model}` is neither a known shape nor a folder with a config.json"))
            .hint(format!("known shapes: {}", shapes::names()))
    })
}

/// The recipe of the run that is measured.
fn build_recipe(args: &Args) -> Result<Recipe, Failure> {
    let mut recipe = Recipe::new(ModelPath::folder(Path::new(&args.model)));
    recipe.output.dir = RecipePath::at(&std::env::temp_dir());
    recipe.set_rank(args.rank);
    recipe.data.max_tokens = args.tokens;
    recipe.train.batch = recipe::Batch::Samples(args.batch);
    if let Some(together) = args.together {
        let most = (together * args.tokens).to_string();
        recipe.set("memory.micro_tokens", &most, Path::new("")).map_err(Failure::recipe)?;
    }
    let usual = if args.compute == Compute::Fp8.to_string() { BaseFormat::Fp8 } else { BaseFormat::Bf16 };
    let base = args.base.clone().unwrap_or_else(|| usual.to_string());
    for (key, text) in [
        ("model.base", &base),
        ("model.compute", &args.compute),
        ("adapter.kind", &args.adapter),
        ("train.optimizer", &args.optimizer),
        ("memory.device", &args.device),
        ("memory.budget", &args.budget),
    ] {
        recipe.set(key, text, Path::new("")).map_err(Failure::recipe)?;
    }
    for pin in &args.overrides {
        let (key, text) = pin
            .split_once('=')
            .ok_or_else(|| Failure::command(format!("`{pin}` is not of the form `section.key=value`")))?;
        recipe.set(key, text, &working_directory()?).map_err(Failure::recipe)?;
    }
    Ok(recipe)
}

fn measure(args: &Args, model: Model) -> Result<(), Failure> {
    let recipe = build_recipe(args)?;
    // The prediction uses measured profiles, as in a run.
    let mut job = Job::prepare_model(recipe, model, Profiles::Measured)?;
    if let Some(capability) = args.as_capability {
        job.place.set_capability(capability).map_err(|failure| failure.context("`--as-capability`"))?;
        check_compute(job.recipe.model.compute, &job.place)?;
        let arithmetic = job.place.arithmetic(job.recipe.model.compute);
        check_range(&job.request.spec.model_type, arithmetic)?;
        job = job.with_arithmetic(arithmetic);
    }
    if args.sum_through_nccl {
        // Each of two ranks takes half of the batch, so this one measures `--batch` samples.
        job.request.rank = Rank { index: 0, of: 2 };
        job.recipe.train.batch = recipe::Batch::Samples(2 * args.batch);
    }
    let begin = Instant::now();
    let before = job.place.free_bytes();
    let device = job.place.open_and_measure(job.request.threads, job.arithmetic)?;
    let device = device.with_spill_folder(std::env::temp_dir());
    let device = if args.launch_singly { device.without_graphs() } else { device };
    let device = if args.sum_through_nccl { with_nccl_of_one(device)? } else { device };
    let opened_s = begin.elapsed().as_secs_f64();
    let planned = plan_job(&job)?;
    if !planned.fits {
        return Err(planned.refusal());
    }
    let together = planned.solution.demand.micro_tokens / args.tokens;
    let batch = Batch { samples: args.batch, tokens: args.tokens, together: together.max(1) };
    let plan = planned.solution.plan.clone();
    let mut bench = Bench::load(plan, device, batch, job.request.spec.vocabulary)?;
    let (mut times, mut losses) = (Times::loaded(begin), Vec::new());
    times.add_steps(begin, args.warm_up, args.steps, || {
        losses.push(bench.step()?);
        Ok(())
    })?;
    let context_bytes = planned.solution.context_bytes;
    let (after, context_bytes) = match bench.executor.device() {
        AnyDevice::Cuda(cuda) => (cuda.gpu().free_bytes(), Some(context_bytes)),
        AnyDevice::Cpu(_) => (None, None),
    };
    let used = |(before, after): (u64, u64)| before.saturating_sub(after + context_bytes.unwrap_or(0));
    let used_bytes = before.zip(after).map(used);
    if args.profile {
        times.profile = bench.profile()?;
    }
    let (solution, spec) = (&planned.solution, &job.request.spec);
    let ms = times.median_ms();
    let tokens_per_s = batch.step_tokens() as f64 / (ms / 1e3);
    let reserved = solution.plan.reserved_bytes() as u64;
    let figures = json!({
        "model": args.model,
        "base": job.recipe.model.storage().to_string(),
        "adapter": args.adapter,
        "rank": args.rank,
        "batch": args.batch,
        "tokens": args.tokens,
        "micro_tokens": batch.together * batch.tokens,
        "recompute": LayerCounts::of(&solution.policy).recomputed,
        "policy": solution.policy,
        "elsewhere_bytes": solution.offloaded_bytes(1),
        "compute": job.arithmetic.name(),
        "step_ms": ms,
        "step_ms_all": times.step_ms,
        "tokens_per_s": tokens_per_s,
        "model_tflops": flops_per_token(spec, args.tokens) * tokens_per_s / 1e12,
        "predicted_step_ms": solution.step_ms,
        "predicted_by": planned.profile.describe(),
        "planned_bytes": reserved,
        "planned_gib": reserved as f64 / f64::from(1 << 30),
        "measured_bytes": used_bytes,
        "context_bytes": context_bytes,
        "open_s": opened_s,
        "load_s": times.load_s,
        "first_step_s": times.first_step_s,
        "losses": losses,
        "profile": times.profile,
    });
    print_report(&if args.json { format!("{figures}\n") } else { render(&figures) }, args.json)
}

/// Measures generation without an adapter.
fn measure_decoding(args: &Args, model: Model) -> Result<(), Failure> {
    let mut job = Job::prepare_model(build_recipe(args)?, model, Profiles::Measured)?;
    let begin = Instant::now();
    let arithmetic = job.arithmetic.token_by_token();
    let device = job.place.open_and_measure(job.request.threads, arithmetic)?;
    let Args { batch: sequences, tokens, warm_up, steps, .. } = *args;
    let decoding = Decoding { sequences, tokens, warm_up, steps };
    let sizes = Sizes {
        slots: sequences,
        context: Some(decoding.context()),
        cache_tokens: None,
        new_tokens: DEFAULT_NEW_TOKENS.max(sequences),
        has_audio: false,
        budget: job.budget,
    };
    let (base, threads) = (job.recipe.model.storage(), job.request.threads);
    let opening =
        Opening { model: &job.model, adapter: None, base, place: &job.place, arithmetic, threads, sizes };
    let request = opening.request()?;
    let GenerationPlan { plan, shape, .. } = plan_generation(&request, &job.model, &job.place, &sizes)?;
    let read_bytes = bytes_per_step(&plan);
    let planned_bytes = plan.reserved_bytes();
    let mut bench = DecodeBench::load(plan, device, &request.spec, shape, decoding)?;
    let (mut times, prompt_tokens_per_s) = bench.time(begin)?;
    if args.profile {
        times.profile = bench.profile()?;
    }
    let ms = times.median_ms();
    let figures = json!({
        "model": args.model,
        "base": base.to_string(),
        "batch": sequences,
        "tokens": tokens,
        "compute": arithmetic.name(),
        "threads": threads,
        "decode_tokens_per_s": sequences as f64 / (ms / 1e3),
        "decode_step_ms": ms,
        "decode_step_ms_all": times.step_ms,
        "prompt_tokens_per_s": prompt_tokens_per_s,
        "weight_bytes_per_step": read_bytes,
        "weight_gb_per_s": read_bytes as f64 / (ms / 1e3) / 1e9,
        "planned_bytes": planned_bytes,
        "load_s": times.load_s,
        "first_step_s": times.first_step_s,
        "profile": times.profile,
    });
    print_report(&if args.json { format!("{figures}\n") } else { render_decoding(&figures) }, args.json)
}

fn render_decoding(figures: &Value) -> String {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
    let text = format!(
        "{} · {} · {} sequences of {} tokens\n\
         {:>10.1} tokens/s   {:.2} ms per token   {:.1} GB/s of weights   prompt {:.0} tokens/s\n",
        figures["model"].as_str().unwrap_or_default(),
        figures["base"].as_str().unwrap_or_default(),
        figures["batch"],
        figures["tokens"],
        number("decode_tokens_per_s"),
        number("decode_step_ms"),
        number("weight_gb_per_s"),
        number("prompt_tokens_per_s"),
    );
    text + &render_profile(figures)
}

/// Gives the device a communicator of which this process is the only rank.
fn with_nccl_of_one(device: AnyDevice) -> Result<AnyDevice, Failure> {
    match device {
        AnyDevice::Cuda(cuda) => {
            let peers = Peers::nccl(Nccl::unique_id().map_err(Failure::from)?, 0, 1)?;
            Ok(AnyDevice::Cuda(Box::new(cuda.with_peers(peers))))
        }
        AnyDevice::Cpu(_) => Err(Failure::command("`--sum-through-nccl` needs a GPU")),
    }
}

/// FLOPs per token of forward and backward, without recompute.
fn flops_per_token(spec: &DecoderSpec, tokens: usize) -> f64 {
    let linears: usize = spec.linears().iter().map(|linear| linear.n * linear.k).sum();
    let head = spec.vocabulary * spec.hidden;
    let has_head = spec.linears().iter().any(|linear| linear.n == spec.vocabulary);
    let parameters = linears + if has_head { 0 } else { head };
    // Keys that a query sees, on average.
    let visible = |window: Option<usize>| {
        let window = window.unwrap_or(tokens).min(tokens) as f64;
        window * (1.0 - (window - 1.0) / (2.0 * tokens as f64))
    };
    let of_layer = |attention: &AttentionSpec| 12.0 * visible(attention.window) * attention.rows()[0] as f64;
    let attention: f64 = spec.attentions().map(|(_, attention)| of_layer(attention)).sum();
    4.0 * parameters as f64 + attention
}

fn render(figures: &Value) -> String {
    let number = |name: &str| figures[name].as_f64().unwrap_or(f64::NAN);
    let bytes = |name: &str| figures[name].as_u64().map_or("unknown".to_owned(), format_bytes);
    let [model, base, adapter] =
        ["model", "base", "adapter"].map(|name| figures[name].as_str().unwrap_or_default());
    let [rank, batch, tokens, micro_tokens] =
        ["rank", "batch", "tokens", "micro_tokens"].map(|name| &figures[name]);
    let [planned, measured, context] = ["planned_bytes", "measured_bytes", "context_bytes"].map(bytes);
    let text = format!(
        "{model} · {base} · {adapter} r={rank} · {batch} x {tokens} tokens, micro-batches of {micro_tokens} tokens\n\
         {:>10.0} tokens/s   {:.1} ms per step   {:.0} TFLOP/s   predicted {:.1} ms\n\
         {planned:>10} planned, {measured} measured; context {context}; loaded in {:.1} s, first step after {:.1} s\n",
        number("tokens_per_s"),
        number("step_ms"),
        number("model_tflops"),
        number("predicted_step_ms"),
        number("load_s"),
        number("first_step_s"),
    );
    text + &render_profile(figures)
}

fn render_profile(figures: &Value) -> String {
    let rows = figures["profile"].as_array().into_iter().flatten();
    let row = |row: &Value| {
        let ms = row[1].as_f64().unwrap_or(0.0);
        format!("{ms:>10.3} ms  {:>5} x {}\n", row[2], row[0].as_str().unwrap_or_default())
    };
    rows.map(row).collect()
}

/// Writes a checkpoint of random weights in bf16, one file.
fn write_model(config: &Value, folder: &Path) -> Result<(), Failure> {
    let spec = read_spec(config).map_err(|error| Failure::model(error).context("cannot read the config"))?;
    let path = folder.join("config.json");
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, format!("{config:#}\n")))
        .map_err(|error| Failure::file("write", &path, error))?;
    let stored_name = |name: &str| match Phi4mm::of_config(config) {
        Some(_) => phi4mm::stored_name(name),
        None => name.to_owned(),
    };
    let audio = spec.audio.iter().flat_map(AudioSpec::tensors);
    let tensors = spec.tensors().into_iter().chain(audio).map(|tensor| {
        let shape = tensor.shape.0.iter().map(|dim| dim.at(&Extent::default())).collect();
        let spec = TensorSpec { name: stored_name(&tensor.name), element: Element::Bf16, shape };
        (spec, tensor.shape.at(&Extent::default()))
    });
    let (specs, sizes): (Vec<TensorSpec>, Vec<(usize, usize)>) = tensors.unzip();
    let path = folder.join("model.safetensors");
    write_safetensors(&path, &pytorch_metadata(), &specs, |index, out| {
        let (rows, columns) = sizes[index];
        let storage = Storage::Plain(DType::Bf16);
        let source = Synthetic::of(storage, rows, columns);
        let total = storage.bytes(rows, columns);
        let mut piece = vec![0u8; synthetic::PERIOD.min(total)];
        for first in (0..total).step_by(piece.len().max(1)) {
            let bytes = piece.len().min(total - first);
            source.fill(first, &mut piece[..bytes]);
            out.write_all(&piece[..bytes])?;
        }
        Ok(())
    })
    .map_err(Failure::disk)?;
    print_lines(&format!("{} tensors of random weights in `{}`\n", specs.len(), folder.display()))
}
