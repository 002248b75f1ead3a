//! What a command writes: the tensors of a model and what happens to each, the folder of the result, and totals.
//!
//! The folder has a temporary name until everything is on disk.
//! Left out: the numbers themselves (`merge/write.rs`, `run_folder/trained_weights.rs`, `export/`).

use super::original::OriginalTensor;
use crate::failure::Failure;
use serde_json::{Value, json};
use smidgen_formats::element::Element;
use smidgen_formats::peft::AdapterModule;
use smidgen_formats::tensor_ref::TensorRef;
use smidgen_formats::whole_file::{folder_of, sweep_leftovers, sync_folder};
use smidgen_ir::bytes::format_bytes;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Debug)]
pub enum Action {
    Fold(Box<Fold>),
    /// Replaced by a tensor of the adapter.
    Replace(TensorRef),
    /// Converted to another element type, or decoded from a quantized format.
    Convert,
    Copy,
}

/// A module of the adapter, and which of its rows the tensor has.
#[derive(Clone, Debug)]
pub struct Fold {
    pub module: AdapterModule,
    /// The experts whose factors the module has; 1 for a linear.
    pub experts: usize,
    /// Whether the tensor holds the matrix of each expert transposed.
    pub is_turned: bool,
    /// The row of the tensor's first row, among the rows of all experts.
    pub first_row: usize,
}

impl Fold {
    /// All rows of a linear.
    pub fn whole(module: AdapterModule) -> Fold {
        Fold { module, experts: 1, is_turned: false, first_row: 0 }
    }
}

#[derive(Clone, Debug)]
pub struct OutputTensor {
    pub original: OriginalTensor,
    /// The element type in the output.
    pub element: Element,
    pub action: Action,
}

impl OutputTensor {
    pub fn bytes(&self) -> u64 {
        let bytes = self.element.tensor_bytes(self.original.shape());
        bytes.expect("at most a small multiple of the size of an existing file")
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub tensors: usize,
    pub bytes: u64,
}

impl Tally {
    pub fn sum(tallies: impl IntoIterator<Item = Tally>) -> Tally {
        tallies.into_iter().fold(Tally::default(), |sum, tally| Tally {
            tensors: sum.tensors + tally.tensors,
            bytes: sum.bytes + tally.bytes,
        })
    }

    /// A line of a report.
    pub fn render_line(self, name: &str, note: &str) -> String {
        let (tensors, bytes) = (self.tensors, format_bytes(self.bytes));
        format!("  {name:<10}{tensors:>6} tensors {bytes:>12}   {note}").trim_end().to_owned() + "\n"
    }

    pub fn render_json(self) -> Value {
        json!({"tensors": self.tensors, "bytes": self.bytes})
    }
}

/// A folder with a temporary name until `commit` renames it; dropping it before removes it.
pub struct OutputFolder {
    target: PathBuf,
    temporary: PathBuf,
    renamed: bool,
}

impl OutputFolder {
    pub fn refuse_existing(target: &Path) -> Result<(), Failure> {
        match target.symlink_metadata() {
            Ok(_) => Err(Failure::disk(format!("`{}` already exists", target.display()))
                .hint("choose another `--output`, or remove it")),
            Err(_) => Ok(()),
        }
    }

    pub fn create(target: &Path) -> Result<OutputFolder, Failure> {
        let failed = |path: &Path, error| Failure::file("create", path, error);
        let Some(name) = target.file_name() else {
            return Err(Failure::command(format!(
                "`{}` is not a valid name for a new folder",
                target.display()
            )));
        };
        let parent = folder_of(target);
        fs::create_dir_all(parent).map_err(|error| failed(parent, error))?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.tmp", std::process::id()));
        let temporary = target.with_file_name(hidden);
        sweep_leftovers(target);
        fs::create_dir(&temporary).map_err(|error| failed(&temporary, error))?;
        Ok(OutputFolder { target: target.to_path_buf(), temporary, renamed: false })
    }

    /// The temporary folder.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    pub fn commit(mut self) -> Result<(), Failure> {
        sync_folder(&self.temporary).map_err(Failure::disk)?;
        fs::rename(&self.temporary, &self.target)
            .map_err(|error| Failure::file("rename", &self.temporary, error))?;
        self.renamed = true;
        sync_folder(folder_of(&self.target)).map_err(Failure::disk)
    }
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        if !self.renamed {
            // A failure here is ignored: the error that led here is reported.
            let _ = fs::remove_dir_all(&self.temporary);
        }
    }
}
