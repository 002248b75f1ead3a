//! `smidgen merge`: an adapter folded into its base model, as a model folder of its own.
//!
//! The base is the one the adapter names, a path from the current folder, unless `--base` gives another.
//! Left out: downloading a base that is named but not here.

use super::print;
use crate::bytes::format_bytes;
use crate::checkpoint::element::Element;
use crate::checkpoint::peft::AdapterFile;
use crate::failure::Failure;
use crate::merge::original::OriginalModel;
use crate::merge::{MergeOptions, Merged, Tally, merge};
use clap::ValueEnum;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// An adapter's folder, or that of a run
    adapter: PathBuf,
    /// The folder to make
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// The base model's folder, instead of the one the adapter names
    #[arg(long, value_name = "MODEL")]
    base: Option<PathBuf>,
    /// The element type of all tensors, instead of each one's own
    #[arg(long)]
    dtype: Option<Dtype>,
    /// The report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let adapter = AdapterFile::open_adapter_or_run(&args.adapter).map_err(Failure::world)?;
    let path = find_original(&adapter, args.base.as_deref())?;
    let original = OriginalModel::open(&path)?;
    let element = args.dtype.map(|dtype| match dtype {
        Dtype::F32 => Element::F32,
        Dtype::Bf16 => Element::Bf16,
        Dtype::F16 => Element::F16,
    });
    let options = MergeOptions { element, ..MergeOptions::default() };
    let merged = merge(&adapter, &original, &args.output, options)?;
    print(&match args.json {
        true => format!("{:#}\n", render_json(&merged, &adapter, &path, &args.output)),
        false => render_report(&merged, &path, &args.output),
    })
}

/// The folder of the base model that an adapter belongs to: the one given, or the one the adapter names.
pub fn find_original(adapter: &AdapterFile, given: Option<&Path>) -> Result<PathBuf, Failure> {
    if let Some(given) = given {
        return Ok(given.to_path_buf());
    }
    let hint = "`--base` gives the base model's folder";
    let place = adapter.path().display();
    match &adapter.config().base_model_name_or_path {
        None => Err(Failure::recipe(format!("the adapter in `{place}` names no base model")).hint(hint)),
        Some(name) if !Path::new(name).is_dir() => Err(Failure::recipe(format!(
            "the adapter in `{place}` names the base model `{name}`, which is no folder here"
        ))
        .hint(hint)),
        Some(name) => Ok(PathBuf::from(name)),
    }
}

fn render_report(merged: &Merged, original: &Path, output: &Path) -> String {
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{content}").expect("writing to a string");
    line(format!("merged {} into `{}`", merged.kind, original.display()));
    let mut tally = |what: &str, tally: &Tally, note: String| {
        if tally.tensors > 0 {
            let bytes = format_bytes(tally.bytes);
            line(
                format!("  {what:<10}{:>6} tensors {bytes:>12}   {note}", tally.tensors)
                    .trim_end()
                    .to_string(),
            );
        }
    };
    tally("folded", &merged.folded, format!("{}, rounded once", formula(merged)));
    let biases =
        if merged.biases > 0 { format!("{} of them trained biases", merged.biases) } else { String::new() };
    tally("converted", &merged.converted, biases);
    tally("copied", &merged.copied, "byte for byte".to_string());
    let total = total(merged);
    let shards =
        if merged.shards == 1 { "one file".to_string() } else { format!("{} shards", merged.shards) };
    tally("written", &total, format!("{shards} in `{}`", output.display()));
    text
}

fn formula(merged: &Merged) -> &'static str {
    if merged.kind.has_magnitude() { "(m/n)·(W + s·B·A)" } else { "W + s·B·A" }
}

fn total(merged: &Merged) -> Tally {
    let all = [merged.folded, merged.converted, merged.copied];
    Tally {
        tensors: all.iter().map(|tally| tally.tensors).sum(),
        bytes: all.iter().map(|tally| tally.bytes).sum(),
    }
}

fn render_json(merged: &Merged, adapter: &AdapterFile, original: &Path, output: &Path) -> Value {
    let tally = |tally: Tally| json!({"tensors": tally.tensors, "bytes": tally.bytes});
    json!({
        "adapter": adapter.path(),
        "base": original,
        "output": output,
        "kind": merged.kind.name(),
        "modules": merged.modules,
        "biases": merged.biases,
        "shards": merged.shards,
        "folded": tally(merged.folded),
        "converted": tally(merged.converted),
        "copied": tally(merged.copied),
        "written": tally(total(merged)),
        "memory_bytes": merged.memory_bytes,
    })
}
