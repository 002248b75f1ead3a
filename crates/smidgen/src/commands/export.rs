//! `smidgen export`: an adapter, or a model with it, as a GGUF file for llama.cpp.
//!
//! Without `--merged` the file holds only the adapter, for `llama-cli --lora`; with it the whole model. A model without
//! an adapter can be exported too.

use super::original::{Original, open_adapter, open_named, open_original, refuse_damaged, trained_model};
use crate::console::downloads::hub_access;
use crate::console::stdout::print_report;
use crate::export::lora_file::{ExportedLora, export_lora};
use crate::export::model_file::{ExportOptions, ExportedModel, MatrixType, export_model};
use crate::export::modelfile;
use crate::failure::Failure;
use crate::machine::process_memory::read_rss;
use crate::model_files::original::OriginalModel;
use crate::model_files::output::Tally;
use crate::plan::context::process_bytes;
use clap::ValueEnum;
use serde_json::{Map, Value, json};
use smidgen_formats::peft::AdapterFile;
use smidgen_hub::{Access, Want};
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of an adapter or of a run; with --merged also a model
    adapter: PathBuf,
    /// The file to create
    #[arg(long, short, alias = "out", value_name = "FILE.gguf")]
    output: PathBuf,
    /// The base model: a folder, a .gguf file or a name [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Write the whole model with the adapter merged, instead of only the adapter
    #[arg(long)]
    merged: bool,
    /// Type of the matrices of a merged model [default: f16]; Q4_K_M and Q5_K_M are mixtures as in llama.cpp
    #[arg(long = "type", requires = "merged")]
    matrices: Option<Type>,
    /// Also write a `Modelfile` beside the file, for `ollama create`
    #[arg(long)]
    modelfile: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Type {
    F32,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q6_k")]
    Q6K,
    #[value(name = "q5_k_m")]
    Q5KM,
    #[value(name = "q4_k_m")]
    Q4KM,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let access = hub_access(quiet);
    if args.modelfile {
        modelfile::refuse_existing(&args.output)?;
    }
    if !args.merged {
        let adapter = open_adapter(&args.adapter).map_err(|failure| match trained_model(&args.adapter) {
            Some(_) => failure.hint("`--merged` writes that model as a GGUF file"),
            None => failure,
        })?;
        let Original { name, model } = open_original(&adapter, args.base.as_deref(), Want::Config, &access)?;
        let exported = export_lora(&adapter, &model, &args.output)?;
        if args.modelfile {
            modelfile::write(&args.output, Some(&name))?;
        }
        return print_report(
            &if args.json {
                format!("{:#}\n", lora_json(args, &name, &exported))
            } else {
                render_lora(args, &name, &exported)
            },
            args.json,
        );
    }
    let matrices = match args.matrices {
        Some(Type::F32) => MatrixType::F32,
        Some(Type::Q8_0) => MatrixType::Q8_0,
        Some(Type::Q6K) => MatrixType::Q6K,
        Some(Type::Q5KM) => MatrixType::Q5KM,
        Some(Type::Q4KM) => MatrixType::Q4KM,
        Some(Type::F16) | None => MatrixType::F16,
    };
    let (adapter, Original { name, model }) = open_model(args, &access)?;
    let original = OriginalModel::new(model)?;
    let exported = export_model(
        &original,
        adapter.as_ref(),
        last_part(&name),
        &args.output,
        ExportOptions::new(matrices),
    )?;
    if args.modelfile {
        modelfile::write(&args.output, None)?;
    }
    print_report(
        &if args.json {
            format!("{:#}\n", model_json(args, &name, &exported))
        } else {
            render_model(args, &name, &exported)
        },
        args.json,
    )
}

/// Opens an adapter and its base, or a model without an adapter.
fn open_model(args: &Args, access: &Access) -> Result<(Option<AdapterFile>, Original), Failure> {
    let has = |name: &str| args.adapter.join(name).exists();
    let is_adapter = has("adapter_config.json") || has("adapter");
    if is_adapter {
        let adapter = open_adapter(&args.adapter)?;
        let original = open_original(&adapter, args.base.as_deref(), Want::Weights, access)?;
        return Ok((Some(adapter), original));
    }
    let model = trained_model(&args.adapter).unwrap_or_else(|| args.adapter.clone());
    refuse_damaged(&model)?;
    let name = model.to_string_lossy().into_owned();
    if args.base.is_some() {
        return Err(Failure::command(format!("`--base` needs an adapter: `{name}` is a model")));
    }
    let model = open_named(&name, Want::Weights, access)?;
    Ok((None, Original { name, model }))
}

/// The last part of a path or name, without the extension `.gguf`: the model's name in the file.
fn last_part(name: &str) -> &str {
    let name = name.trim_end_matches('/');
    let last = name.rsplit(['/', ':']).next().unwrap_or(name);
    last.strip_suffix(".gguf").unwrap_or(last)
}

fn render_lora(args: &Args, name: &str, exported: &ExportedLora) -> String {
    let ranks: Vec<String> = exported.ranks.iter().map(usize::to_string).collect();
    let rescaled = match exported.rescaled {
        0 => String::new(),
        count => format!(", scale folded into B for {count} of them"),
    };
    let text = format!(
        "exported {} for `{name}` ({})\n  adapter   {:>6} modules   rank {}, alpha {}{rescaled}\n",
        exported.kind,
        exported.architecture.name(),
        exported.modules,
        ranks.join(", "),
        exported.alpha
    );
    text + &exported.written.render_line("written", &format!("f32 in `{}`", args.output.display()))
}

fn lora_json(args: &Args, name: &str, exported: &ExportedLora) -> Value {
    json!({
        "adapter": args.adapter,
        "base": name,
        "output": args.output,
        "architecture": exported.architecture.name(),
        "kind": exported.kind.name(),
        "modules": exported.modules,
        "ranks": exported.ranks,
        "alpha": exported.alpha,
        "rescaled": exported.rescaled,
        "written": exported.written.render_json(),
    })
}

fn render_model(args: &Args, name: &str, exported: &ExportedModel) -> String {
    let mut text = format!("exported `{name}` ({})", exported.architecture.name());
    if let Some(kind) = exported.kind {
        text += &format!(" with {kind} folded into {} tensors", exported.folded);
    }
    text.push('\n');
    for (storage, tally) in &exported.tensors {
        text += &tally.render_line(storage, "");
    }
    text += &total(exported).render_line("written", &format!("`{}`", args.output.display()));
    for note in &exported.notes {
        text += &format!("note: {note}\n");
    }
    text
}

fn total(exported: &ExportedModel) -> Tally {
    Tally::sum(exported.tensors.values().copied())
}

fn model_json(args: &Args, name: &str, exported: &ExportedModel) -> Value {
    let types: Map<String, Value> =
        exported.tensors.iter().map(|(storage, tally)| (storage.clone(), tally.render_json())).collect();
    json!({
        "adapter": exported.kind.map(|_| Path::new(&args.adapter)),
        "base": name,
        "output": args.output,
        "architecture": exported.architecture.name(),
        "kind": exported.kind.map(|kind| kind.name()),
        "folded": exported.folded,
        "types": types,
        "written": total(exported).render_json(),
        "planned_bytes": process_bytes(1) + exported.memory_bytes,
        "measured_bytes": read_rss().map(|memory| memory.peak_bytes),
        "notes": exported.notes,
    })
}
