//! Merges an adapter into its base model, file to file: no device, no plan, little memory.
//!
//! Tensors of base and adapter are matched (`fit`), every output tensor is assigned to a shard, and rows are processed in
//! blocks (`fold`, `write`), computed in f32 and rounded once.
//! For any model size this needs the memory of two blocks of `block_bytes` and of one module's A, B and magnitude in
//! f32; a 4-bit tensor of bitsandbytes adds its stored bytes, and so do experts in MXFP4. Quantized tensors are decoded and
//! not quantized again.
//! Left out: LS-LoRA, which is not linear and so cannot become a weight.

pub mod difference;
pub mod fit;
pub mod fold;
pub mod write;

#[cfg(test)]
mod merge_tests;
#[cfg(test)]
mod quantized_tests;

use crate::failure::Failure;
use crate::model_files::finite::refuse_not_finite;
use crate::model_files::original::OriginalModel;
use crate::model_files::output::{Action, OutputFolder, OutputTensor, Tally};
use crate::model_files::shards;
use crate::model_files::sidecar::write_sidecars;
use crate::plan::phases::FILE_BLOCK_BYTES;
use crate::session::adapters::{UNTIED_HEAD, refuse_untied};
use fit::fit_adapter;
use smidgen_formats::element::Element;
use smidgen_formats::peft::{AdapterFile, StoredKind, read_modules};
use smidgen_formats::tokenizer::prompt_file::PromptFile;
use std::path::Path;
use write::{Workspace, write_shards};

#[derive(Clone, Copy, Debug)]
pub struct MergeOptions {
    /// Element type of the output; `None` keeps the type of each tensor, and a quantized one becomes F16.
    pub element: Option<Element>,
    /// Maximum size of a shard, unless one tensor is larger.
    pub max_shard_bytes: u64,
    /// Size of each of the two blocks: half for rows in f32, half for rows as written.
    pub block_bytes: usize,
}

impl Default for MergeOptions {
    fn default() -> MergeOptions {
        MergeOptions { element: None, max_shard_bytes: shards::SHARD_BYTES, block_bytes: FILE_BLOCK_BYTES }
    }
}

/// Totals for the report.
#[derive(Clone, Debug, PartialEq)]
pub struct Merged {
    pub kind: StoredKind,
    pub modules: usize,
    pub biases: usize,
    /// Tensors of the base, other than biases, that were trained in full.
    pub saved: usize,
    pub shards: usize,
    pub folded: Tally,
    /// Written in another type, or replaced by a trained tensor.
    pub converted: Tally,
    /// Copied byte for byte.
    pub copied: Tally,
    /// Memory of the workspace.
    pub memory_bytes: u64,
    /// Notes for the user, such as a missing tokenizer.
    pub notes: Vec<String>,
}

/// Writes the merged model into `output`; a failure leaves no `output`.
pub fn merge(
    adapter: &AdapterFile,
    original: &OriginalModel,
    output: &Path,
    options: MergeOptions,
) -> Result<Merged, Failure> {
    let kind = adapter.config().kind();
    if kind == StoredKind::LsLora {
        return Err(Failure::model(format!(
            "the adapter in `{}` is LS-LoRA, which cannot be merged: it adds a Fourier function of \
             s·B·A·x to the output of a linear layer, and no weight W can do that",
            adapter.path().display()
        ))
        .hint("keep the adapter separate from the base model"));
    }
    OutputFolder::refuse_existing(output)?;
    refuse_not_finite(adapter)?;
    let read = read_modules(adapter).map_err(Failure::model)?;
    if original.tensor(UNTIED_HEAD).is_none() {
        refuse_untied(adapter)?;
    }
    let outputs = fit_adapter(adapter, &read, original, options.element)?;
    let sizes: Vec<u64> = outputs.iter().map(OutputTensor::bytes).collect();
    let shards = shards::split(&sizes, options.max_shard_bytes);
    let mut workspace = Workspace::new(&outputs, options.block_bytes);
    let folder = OutputFolder::create(output)?;
    write_shards(folder.path(), &outputs, &shards, &mut workspace)?;
    let notes = write_sidecars(original, &outputs, folder.path(), options.element)?;
    if let Some(prompt) = PromptFile::read(adapter.path()).map_err(Failure::model)? {
        prompt.write(folder.path()).map_err(Failure::writing)?;
    }
    folder.commit()?;
    let tally = |is_counted: fn(&Action) -> bool| {
        let counted = outputs.iter().filter(|output| is_counted(&output.action));
        Tally::sum(counted.map(|output| Tally { tensors: 1, bytes: output.bytes() }))
    };
    Ok(Merged {
        kind,
        modules: read.modules.len(),
        biases: outputs.iter().filter(|output| matches!(output.action, Action::Replace(_))).count()
            - read.saved.len(),
        saved: read.saved.len(),
        shards: shards.len(),
        folded: tally(|action| matches!(action, Action::Fold(_))),
        converted: tally(|action| matches!(action, Action::Convert | Action::Replace(_))),
        copied: tally(|action| matches!(action, Action::Copy)),
        memory_bytes: workspace.memory_bytes(),
        notes,
    })
}
