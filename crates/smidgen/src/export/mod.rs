//! Exports models and adapters for llama.cpp: GGUF files from Hugging Face folders or from other GGUF files.
//!
//! An adapter becomes a LoRA file that llama.cpp loads next to the base (`lora_file`), or is merged into the base and
//! written as a whole model (`model_file`, with `metadata` if the base is not a GGUF file).
//! Rows are processed in blocks, as in a merge. A failed export leaves no file.
//! Left out: importance matrices, with which llama.cpp has smaller types too, and LS-LoRA, which no weight can represent.

mod like;
pub mod lora_file;
mod matrix_type;
pub mod metadata;
pub mod model_file;
pub mod modelfile;

#[cfg(test)]
pub mod export_tests;
#[cfg(test)]
mod family_tests;

use crate::failure::Failure;
use crate::model_files::output::OutputFolder;
use smidgen_compile::DecoderSpec;
use smidgen_formats::gguf::architecture::Architecture;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::whole_file::{folder_of, sweep_leftovers};
use std::path::Path;

/// The GGUF architecture of a model.
pub fn architecture_of(model: &Model, spec: &DecoderSpec) -> Result<&'static Architecture, Failure> {
    if let Model::Gguf { model, .. } = model {
        return Ok(model.architecture);
    }
    Architecture::of_model_type(&spec.model_type).ok_or_else(|| {
        Failure::model(format!(
            "cannot write `{}` as GGUF: the model type `{}` is not supported",
            model.path().display(),
            spec.model_type
        ))
    })
}

fn refuse_ls_lora(adapter: &AdapterFile) -> Failure {
    Failure::model(format!(
        "the adapter in `{}` is LS-LoRA, which cannot be exported: it adds a Fourier function of s·B·A·x to the \
         output of a linear layer, and llama.cpp does not support that",
        adapter.path().display()
    ))
    .hint("keep the adapter separate from the base model")
}

/// Creates the folder of an output file; an existing file is refused.
fn prepare_output(output: &Path) -> Result<(), Failure> {
    OutputFolder::refuse_existing(output)?;
    sweep_leftovers(output);
    let folder = folder_of(output);
    std::fs::create_dir_all(folder).map_err(|error| Failure::file("create", folder, error))
}
