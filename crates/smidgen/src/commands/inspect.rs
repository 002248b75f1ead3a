//! `smidgen inspect`: the contents of the folder of an adapter, a run or a model, or of a GGUF file.
//!
//! For an adapter: its kind and sizes, and the norm of each module's update. For a model: its architecture, and its
//! tensors by type. Nothing is written.
//! Left out: the history of a run (`smidgen report`).

use super::original::trained_model;
use crate::console::stdout::print_report;
use crate::failure::Failure;
use crate::model_files::original::OriginalModel;
use crate::report::adapter_summary::summarize_adapter;
use crate::report::adapter_table::{adapter_json, render_adapter};
use crate::report::model_table::{model_json, render_model};
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of an adapter, a run or a model, or a .gguf file
    path: PathBuf,
    /// The folder of the base model, to compare DoRA magnitudes with
    #[arg(long, value_name = "MODEL")]
    base: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let has = |name: &str| args.path.join(name).exists();
    let is_gguf = args.path.is_file() && args.path.extension().is_some_and(|extension| extension == "gguf");
    let is_model = has("config.json") && !has("adapter_config.json");
    let made = trained_model(&args.path);
    if is_model || is_gguf || made.is_some() {
        let model = Model::open(made.as_deref().unwrap_or(&args.path)).map_err(Failure::model)?;
        let json = || format!("{:#}\n", model_json(&model));
        return print_report(&if args.json { json() } else { render_model(&model) }, args.json);
    }
    if args.path.is_dir() && !has("adapter_config.json") && !has("adapter") {
        return Err(Failure::model(format!(
            "`{}` is not the folder of an adapter, a run or a model: it has none of `adapter_config.json`, `adapter` \
             and `config.json`",
            args.path.display()
        )));
    }
    let adapter = AdapterFile::open_adapter_or_run(&args.path).map_err(Failure::model)?;
    let original = args.base.as_deref().map(OriginalModel::open).transpose()?;
    let summary = summarize_adapter(&adapter, original.as_ref())?;
    let json = || format!("{:#}\n", adapter_json(&summary));
    print_report(&if args.json { json() } else { render_adapter(&summary) }, args.json)
}
