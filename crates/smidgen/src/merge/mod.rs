//! Folding an adapter into its base model, file to file: no device, no plan, little memory.
//!
//! One direction: a base and an adapter are matched (`fit`), every output tensor gets its place in a shard
//! (`shards`), and rows pass through in blocks (`fold`, `write`), computed in f32 and rounded once.
//! Memory is two blocks of `block_bytes` and one module's A, B and magnitude in f32, whatever the model's size; a 4-bit
//! tensor of bitsandbytes adds its stored bytes.
//! What was quantized is decoded, and stays so: nothing is quantized again here.
//! Left out: LS-LoRA, which is not linear and so has no weight that would do the same.

pub mod difference;
pub mod fit;
pub mod fold;
pub mod original;
pub mod shards;
pub mod sidecar;
pub mod write;

#[cfg(test)]
mod merge_tests;
#[cfg(test)]
mod quantized_tests;

use crate::failure::Failure;
use crate::plan::life::FILE_BLOCK_BYTES;
use fit::fit_adapter;
use original::OriginalModel;
use smidgen_formats::element::Element;
use smidgen_formats::peft::{AdapterFile, StoredKind, read_modules};
use std::path::Path;
use write::{OutputFolder, Workspace, write_shards};

#[derive(Clone, Copy, Debug)]
pub struct MergeOptions {
    /// `None` keeps each tensor's own type; one that was quantized becomes F16.
    pub element: Option<Element>,
    /// A shard is no larger, unless one tensor is.
    pub max_shard_bytes: u64,
    /// Of each of the two blocks in memory, half for rows in f32 and half for rows as written.
    pub block_bytes: usize,
}

impl Default for MergeOptions {
    fn default() -> MergeOptions {
        MergeOptions { element: None, max_shard_bytes: shards::SHARD_BYTES, block_bytes: FILE_BLOCK_BYTES }
    }
}

/// What was merged, for a report.
#[derive(Clone, Debug, PartialEq)]
pub struct Merged {
    pub kind: StoredKind,
    pub modules: usize,
    pub biases: usize,
    pub shards: usize,
    pub folded: Tally,
    /// Written in another type, or with a trained bias.
    pub converted: Tally,
    /// Byte for byte.
    pub copied: Tally,
    /// What the workspace held.
    pub memory_bytes: u64,
    /// What the user should know, such as a tokenizer that is missing.
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub tensors: usize,
    pub bytes: u64,
}

/// Writes the merged model into `output`, which appears whole or not at all.
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
             s·B·A·x to what a linear gives, and no weight W does that",
            adapter.path().display()
        ))
        .hint("keep the adapter separate from the base model"));
    }
    OutputFolder::refuse_existing(output)?;
    let read = read_modules(adapter).map_err(Failure::model)?;
    let outputs = fit_adapter(adapter, &read, original, options.element)?;
    let shards = shards::split_shards(&outputs, options.max_shard_bytes);
    let mut workspace = Workspace::new(&read.modules, &outputs, options.block_bytes);
    let folder = OutputFolder::create(output)?;
    write_shards(folder.path(), &outputs, &shards, &mut workspace)?;
    let notes = sidecar::write_sidecars(original, &outputs, folder.path(), options.element)?;
    folder.commit()?;
    let tally = |is_counted: fn(&fit::Action) -> bool| {
        let counted = outputs.iter().filter(|output| is_counted(&output.action));
        counted.fold(Tally::default(), |sum, output| Tally {
            tensors: sum.tensors + 1,
            bytes: sum.bytes + output.bytes(),
        })
    };
    Ok(Merged {
        kind,
        modules: read.modules.len(),
        biases: outputs.iter().filter(|output| matches!(output.action, fit::Action::Replace(_))).count(),
        shards: shards.len(),
        folded: tally(|action| matches!(action, fit::Action::Fold(_))),
        converted: tally(|action| matches!(action, fit::Action::Convert | fit::Action::Replace(_))),
        copied: tally(|action| matches!(action, fit::Action::Copy)),
        memory_bytes: workspace.memory_bytes(),
        notes,
    })
}
