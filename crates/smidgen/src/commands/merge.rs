//! `smidgen merge`: an adapter merged into its base model, written as a model folder.
//!
//! The base is the one that the adapter names, or `--base`: a folder, a GGUF file or a name. Quantized tensors are
//! decoded, and the report compares the logits of the merged model with those of base + adapter.

use super::original::{Original, continues_speech, open_adapter, open_original};
use crate::console::downloads::hub_access;
use crate::console::stdout::print_report;
use crate::failure::Failure;
use crate::machine::process_memory::read_rss;
use crate::merge::difference::{LogitsDifference, compare_logits};
use crate::merge::{MergeOptions, Merged, merge};
use crate::model_files::original::OriginalModel;
use crate::model_files::output::Tally;
use crate::plan::context::process_bytes;
use crate::plan::phases::MERGE_WORKERS;
use clap::ValueEnum;
use serde_json::{Value, json};
use smidgen_formats::element::Element;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::weight::DECODED;
use smidgen_hub::Want;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of an adapter or of a run
    adapter: PathBuf,
    /// The folder to create
    #[arg(long, short, alias = "out", value_name = "DIR")]
    output: PathBuf,
    /// The base model: a folder, a .gguf file or a name [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Element type of all tensors [default: the type of each tensor, f16 if it was quantized]
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Compare the logits with those of base + adapter (always done for a quantized base)
    #[arg(long)]
    check: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    Bf16,
    F16,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let adapter = open_adapter(&args.adapter)?;
    let access = hub_access(quiet);
    let Original { name, mut model } = open_original(&adapter, args.base.as_deref(), Want::Weights, &access)?;
    if continues_speech(&adapter)? {
        model.stop_merging_speech();
    }
    let original = OriginalModel::new(model)?;
    let element = args.dtype.map(|dtype| match dtype {
        Dtype::F32 => Element::F32,
        Dtype::Bf16 => Element::Bf16,
        Dtype::F16 => Element::F16,
    });
    let options = MergeOptions { element, ..MergeOptions::default() };
    let merged = merge(&adapter, &original, &args.output, options)?;
    // Measured before the logits are compared, because that loads both models.
    let measured_bytes = read_rss().map(|memory| memory.peak_bytes);
    let mut report = Report {
        base_name: name,
        merged,
        measured_bytes,
        difference: None,
        args,
        original: &original,
        adapter: &adapter,
    };
    let mut failed = None;
    if args.check || original.is_quantized() {
        match compare_logits(&original, &adapter, &args.output) {
            Ok(difference) => report.difference = Some(difference),
            Err(failure) if args.check => failed = Some(failure),
            Err(failure) => {
                report.merged.notes.push(format!("the logits were not compared: {}", failure.message))
            }
        }
    }
    print_report(&if args.json { format!("{:#}\n", report.json()) } else { report.text() }, args.json)?;
    match failed {
        None => Ok(()),
        Some(failure) => Err(failure.context("merged, but not checked")),
    }
}

struct Report<'a> {
    base_name: String,
    merged: Merged,
    /// Peak memory of the process after the merge.
    measured_bytes: Option<u64>,
    difference: Option<LogitsDifference>,
    args: &'a Args,
    original: &'a OriginalModel,
    adapter: &'a AdapterFile,
}

impl Report<'_> {
    fn text(&self) -> String {
        let merged = &self.merged;
        let mut text =
            format!("merged {} into `{}`\n  base: {}\n", merged.kind, self.base_name, self.storages_text());
        let trained = match (merged.biases, merged.saved) {
            (0, 0) => String::new(),
            (biases, 0) => format!("{biases} of them trained biases"),
            (biases, saved) => format!("{} of them trained in full", biases + saved),
        };
        let shards =
            if merged.shards == 1 { "one file".to_string() } else { format!("{} shards", merged.shards) };
        for (name, tally, note) in [
            ("folded", merged.folded, format!("{}, rounded once", self.formula())),
            ("converted", merged.converted, trained),
            ("copied", merged.copied, "byte for byte".to_string()),
            ("written", self.total(), format!("{shards} in `{}`", self.args.output.display())),
        ] {
            if tally.tensors > 0 {
                text += &tally.render_line(name, &note);
            }
        }
        if let Some(LogitsDifference { max, mean, relative, tokens }) = self.difference {
            text += &format!(
                "  logits of base + adapter and of the merged model, {tokens} tokens: largest difference \
                 {max:.2e}, mean {mean:.2e}, relative {relative:.2e}\n"
            );
        }
        for note in &merged.notes {
            text += &format!("note: {note}\n");
        }
        text
    }

    fn storages_text(&self) -> String {
        let storages: Vec<String> = self.original.storages().into_iter().collect();
        let named = match storages.as_slice() {
            [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
            storages => storages.concat(),
        };
        match (self.original.is_quantized(), self.args.dtype) {
            (false, _) => named,
            (true, Some(_)) => format!("{named}, decoded"),
            (true, None) => format!(
                "{named}, decoded to {} (`--dtype` chooses another type)",
                DECODED.name().to_lowercase()
            ),
        }
    }

    fn formula(&self) -> &'static str {
        if self.merged.kind.has_magnitude() { "(m/n)·(W + s·B·A)" } else { "W + s·B·A" }
    }

    fn total(&self) -> Tally {
        Tally::sum([self.merged.folded, self.merged.converted, self.merged.copied])
    }

    fn json(&self) -> Value {
        let merged = &self.merged;
        let difference = self.difference.map(|LogitsDifference { max, mean, relative, tokens }| {
            json!({"max": max, "mean": mean, "relative": relative, "tokens": tokens})
        });
        json!({
            "adapter": self.adapter.path(),
            "base": self.base_name,
            "base_storages": self.original.storages(),
            "base_quantized": self.original.is_quantized(),
            "output": self.args.output,
            "kind": merged.kind.name(),
            "modules": merged.modules,
            "biases": merged.biases,
            "trained": merged.saved,
            "shards": merged.shards,
            "folded": merged.folded.render_json(),
            "converted": merged.converted.render_json(),
            "copied": merged.copied.render_json(),
            "written": self.total().render_json(),
            "memory_bytes": merged.memory_bytes,
            "planned_bytes": process_bytes(MERGE_WORKERS) + merged.memory_bytes,
            "measured_bytes": self.measured_bytes,
            "logits_difference": difference,
            "notes": merged.notes,
        })
    }
}
