//! fp8 tensors with scales: per block of 128 by 128 as DeepSeek and Qwen publish them, and per row or per tensor, as
//! `compressed-tensors` does.
//!
//! `P.weight` is F8_E4M3 and comes with `P.weight_scale_inv` or `P.weight_scale`. Despite the first name, the codes are
//! multiplied by it. Training uses both as stored, with scales in f32; one scale of a tensor becomes that of each row.
//! Left out: other block sizes, and scales of activations, which are not used.

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::folder::ModelFolder;
use crate::safetensors::SafetensorsError;
use crate::tensor_ref::{TensorRef, read_end_to_end};
use smidgen_ir::quant::convert_plain;
use smidgen_ir::storage::FP8_BLOCK;
use smidgen_ir::{DType, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// The suffixes of the names of scales.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// Scales of activations, which some checkpoints have as well, by the suffix of the module's path.
const INPUT_SCALE: &str = ".input_scale";

#[derive(Debug, Error)]
pub enum Fp8Error {
    #[error("`{}`: `{tensor}` {what}", path.display())]
    Tensor { path: PathBuf, tensor: String, what: String },
    #[error(transparent)]
    File(#[from] SafetensorsError),
}

#[derive(Clone, Debug)]
pub struct Fp8Weight {
    codes: TensorRef,
    scales: TensorRef,
    /// [`Storage::Fp8Blocks`] or [`Storage::Fp8Rows`].
    storage: Storage,
}

/// The fp8 tensors of a folder by name, and the names of their scales.
#[derive(Debug, Default)]
pub struct Fp8Weights {
    pub weights: BTreeMap<String, Fp8Weight>,
    pub scales: BTreeSet<String>,
}

/// Finds and checks every fp8 tensor of a folder; reads no numbers.
pub fn find_fp8_weights(folder: &ModelFolder) -> Result<Fp8Weights, Fp8Error> {
    let mut found = Fp8Weights::default();
    for scales_name in folder.tensor_names() {
        let stems = SCALES.into_iter().filter_map(|suffix| scales_name.strip_suffix(suffix));
        let Some(name) = stems.into_iter().find(|name| name.ends_with("weight")) else { continue };
        let wrong = |tensor: &str, what: String| Fp8Error::Tensor {
            path: folder.path().to_path_buf(),
            tensor: tensor.to_string(),
            what,
        };
        let scales = folder.tensor(scales_name).expect("it is one of the folder's names");
        let codes = folder
            .tensor(name)
            .ok_or_else(|| wrong(scales_name, format!("holds the scales of `{name}`, which is missing")))?;
        if codes.element() != Element::F8E4M3 || codes.shape().len() != 2 {
            let what =
                format!("is {} of shape {:?}, not a matrix in F8_E4M3", codes.element(), codes.shape());
            return Err(wrong(name, what));
        }
        let blocks: Vec<usize> = codes.shape().iter().map(|side| side.div_ceil(FP8_BLOCK)).collect();
        let rows = codes.shape()[0];
        let storage = match scales.shape() {
            shape if scales_name.ends_with(SCALES[0]) => (shape == blocks).then_some(Storage::Fp8Blocks),
            [] | [1] => Some(Storage::Fp8Rows),
            [of_rows] | [of_rows, 1] if *of_rows == rows => Some(Storage::Fp8Rows),
            shape => (shape == blocks).then_some(Storage::Fp8Blocks),
        };
        let storage = storage.filter(|_| scales.element().dtype().is_some());
        let Some(storage) = storage else {
            let what = format!(
                "is {} of shape {:?}; expected one scale per block of {FP8_BLOCK} by {FP8_BLOCK}, {blocks:?} in all{}",
                scales.element(),
                scales.shape(),
                if scales_name.ends_with(SCALES[0]) { "" } else { ", or one per row, or one" },
            );
            return Err(wrong(scales_name, what));
        };
        found.scales.insert(scales_name.to_string());
        let module = name.trim_end_matches(".weight");
        found.scales.extend(
            folder.tensor(&format!("{module}{INPUT_SCALE}")).map(|_| format!("{module}{INPUT_SCALE}")),
        );
        found.weights.insert(name.to_string(), Fp8Weight { codes, scales, storage });
    }
    Ok(found)
}

impl Fp8Weight {
    /// The same tensor, which adds every byte that is read to `hash`, from `begin` of the hashed content on.
    pub fn hashed(self, hash: &Arc<ContentHash>, begin: u64) -> Fp8Weight {
        let scales_at = begin + self.codes.bytes();
        let (codes, scales) = (self.codes.hashed(hash, begin), self.scales.hashed(hash, scales_at));
        Fp8Weight { codes, scales, ..self }
    }

    /// Bytes of the codes in memory, which come before the scales.
    pub fn code_bytes(&self) -> u64 {
        self.codes.bytes()
    }

    pub fn storage(&self) -> Storage {
        self.storage
    }

    pub fn shape(&self) -> &[usize] {
        self.codes.shape()
    }

    pub fn file_path(&self) -> &Path {
        self.codes.file_path()
    }

    /// The name of the codes in the file.
    pub fn file_name(&self) -> &str {
        self.codes.name()
    }

    /// Size in the file.
    pub fn file_bytes(&self) -> u64 {
        self.codes.bytes() + self.scales.bytes()
    }

    /// Fills `destination` with bytes of the file: codes, then scales in their own type.
    pub fn read_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), SafetensorsError> {
        read_end_to_end(&[&self.codes, &self.scales], byte_offset, destination).map(|_| ())
    }

    /// Fills `destination` with bytes of the tensor as it is in memory: codes, then scales in f32.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), SafetensorsError> {
        let target = read_end_to_end(&[&self.codes], byte_offset, destination)?;
        if target.is_empty() {
            return Ok(());
        }
        let at = byte_offset.saturating_sub(self.codes.bytes());
        let (first, end) = (at / 4, (at + target.len() as u64).div_ceil(4));
        let element = self.scales.element();
        let dtype = element.dtype().expect("the type of scales was checked");
        let is_one = self.scales.elements() == 1;
        let (first, count) = if is_one { (0, 1) } else { (first, (end - first) as usize) };
        let (mut narrow, mut wide) = (vec![0; count * element.size_bytes()], vec![0; 4 * count]);
        self.scales.read_at(first * element.size_bytes() as u64, &mut narrow)?;
        convert_plain(dtype, &narrow, DType::F32, &mut wide);
        for (target, byte) in target.iter_mut().zip(wide.iter().cycle().skip((at % 4) as usize)) {
            *target = *byte;
        }
        Ok(())
    }
}
