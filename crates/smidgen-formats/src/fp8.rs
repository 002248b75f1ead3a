//! fp8 tensors as DeepSeek and Qwen publish them: codes, and one scale per block of 128 by 128.
//!
//! `P.weight` is F8_E4M3 and comes with `P.weight_scale_inv` in f32 or bf16. Despite its name, the codes are
//! multiplied by it. Training uses both as stored.
//! Left out: scales of whole tensors or rows, other block sizes, and scales of activations, which are not
//! used.

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::folder::ModelFolder;
use crate::safetensors::SafetensorsError;
use crate::tensor_ref::{TensorRef, read_end_to_end};
use smidgen_ir::storage::FP8_BLOCK;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

/// The suffix of the name of the scales.
const SCALES: &str = "_scale_inv";

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
    for scales_name in folder.tensor_names().filter(|name| name.ends_with(SCALES)) {
        let name = scales_name.strip_suffix(SCALES).expect("filtered by it");
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
        if scales.shape() != blocks || ![Element::F32, Element::Bf16].contains(&scales.element()) {
            let what = format!(
                "is {} of shape {:?}; expected one scale in f32 or bf16 per block of {FP8_BLOCK} by {FP8_BLOCK}, {blocks:?} in all",
                scales.element(),
                scales.shape(),
            );
            return Err(wrong(scales_name, what));
        }
        found.scales.insert(scales_name.to_string());
        found.weights.insert(name.to_string(), Fp8Weight { codes, scales });
    }
    Ok(found)
}

impl Fp8Weight {
    /// The same tensor, which adds every byte that is read to `hash`.
    pub fn hashed(self, hash: &Arc<ContentHash>) -> Fp8Weight {
        let scales_at = self.codes.bytes();
        Fp8Weight { codes: self.codes.hashed(hash, 0), scales: self.scales.hashed(hash, scales_at) }
    }

    pub fn shape(&self) -> &[usize] {
        self.codes.shape()
    }

    pub fn file_path(&self) -> &Path {
        self.codes.file_path()
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
        if self.scales.element() == Element::F32 {
            return self.read_file(byte_offset, destination);
        }
        let target = read_end_to_end(&[&self.codes], byte_offset, destination)?;
        if target.is_empty() {
            return Ok(());
        }
        let at = byte_offset.saturating_sub(self.codes.bytes());
        // A bf16 is the upper half of an f32.
        let (first, end) = (at / 4, (at + target.len() as u64).div_ceil(4));
        let mut halves = vec![0; 2 * (end - first) as usize];
        self.scales.read_at(2 * first, &mut halves)?;
        let wide = halves.as_chunks::<2>().0.iter().flat_map(|[low, high]| [0, 0, *low, *high]);
        for (target, byte) in target.iter_mut().zip(wide.skip((at % 4) as usize)) {
            *target = byte;
        }
        Ok(())
    }
}
