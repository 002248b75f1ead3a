//! Copies the tokenizer and chat template of a base model into the folder of an adapter or a trained model.
//!
//! The files of a Hugging Face folder are copied; for a GGUF file they are made from its metadata. The folder
//! then has the tokenizer that the model was trained with.

use super::{Tokenizer, TokenizerError};
use crate::copy_files::{CopyFilesError, copy_files};
use crate::folder_files::is_tokenizer_file;
use crate::gguf::{GgufError, GgufFile};
use crate::model::Model;
use std::fs;
use std::path::Path;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum CopyTokenizerError {
    #[error(transparent)]
    Copy(#[from] CopyFilesError),
    #[error(transparent)]
    Gguf(#[from] GgufError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Writes the model's tokenizer files, if it has any, into `folder`.
pub fn copy_tokenizer(model: &Model, folder: &Path) -> Result<(), CopyTokenizerError> {
    match model {
        Model::Folder { folder: source, .. } => Ok(copy_files(source.path(), folder, is_tokenizer_file)?),
        // The file is opened again, because the model freed the vocabulary after loading.
        Model::Gguf { file, .. } => {
            let tokenizer = Tokenizer::from_gguf(&GgufFile::open(file.path())?)?;
            Ok(tokenizer.save(folder)?)
        }
    }
}

/// Upper bound of the bytes per token in the files of a tokenizer that is made from a GGUF file.
const GGUF_TOKEN_BYTES: u64 = 160;

/// The most bytes that [`copy_tokenizer`] writes for a vocabulary of this size.
pub fn tokenizer_bytes(model: &Model, vocabulary: usize) -> u64 {
    let Model::Folder { folder, .. } = model else { return GGUF_TOKEN_BYTES * vocabulary as u64 };
    let entries = fs::read_dir(folder.path()).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_tokenizer_file));
    files
        .filter_map(|entry| fs::metadata(entry.path()).ok())
        .filter(fs::Metadata::is_file)
        .map(|file| file.len())
        .sum()
}
