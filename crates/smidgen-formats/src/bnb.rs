//! 4-bit tensors as bitsandbytes stores them in a Hugging Face checkpoint: codes, scales and a quantization
//! state.
//!
//! `P.weight` comes with `P.weight.absmax`, `.quant_map` and a small JSON that describes them, and with
//! double quantization also with `.nested_absmax` and `.nested_quant_map`. Training uses the codes and scales
//! as stored. Everything in the files is checked first, and the maps are compared with the known ones, number
//! by number.
//! Left out: 8-bit checkpoints, and blocks of other sizes than 64 and 256.

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::folder::ModelFolder;
use crate::safetensors::SafetensorsError;
use crate::tensor_ref::{TensorRef, read_end_to_end};
use serde::Deserialize;
use smidgen_ir::quant;
use smidgen_ir::storage::{BNB4_BLOCK, BNB4_GROUP, bnb4_parts};
use smidgen_ir::{Code4, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// The name of a state is the tensor's name, this text, and the quantization type.
const STATE: &str = ".quant_state.bitsandbytes__";
/// A state has about a hundred bytes.
const MAX_STATE_BYTES: u64 = 64 << 10;

#[derive(Debug, Error)]
pub enum BnbError {
    #[error("`{}`: the quantization state of `{tensor}` {what}", path.display())]
    State { path: PathBuf, tensor: String, what: String },
    #[error("`{}`: `{part}`, a part of the 4-bit tensor `{tensor}`, {what}", path.display())]
    Part { path: PathBuf, tensor: String, part: String, what: String },
    #[error(transparent)]
    File(#[from] SafetensorsError),
}

#[derive(Clone, Debug)]
pub struct BnbWeight {
    /// (out, in)
    pub shape: Vec<usize>,
    pub storage: Storage,
    codes: TensorRef,
    scales: TensorRef,
    nested: Option<Nested>,
}

#[derive(Clone, Debug)]
struct Nested {
    group_scales: TensorRef,
    offset: f32,
}

/// The 4-bit tensors of a folder, and the names of all tensors that are parts of one.
#[derive(Debug, Default)]
pub struct BnbWeights {
    pub weights: BTreeMap<String, BnbWeight>,
    pub parts: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

/// Finds and checks every 4-bit tensor of a folder. Reads states and maps, but no codes.
pub fn find_bnb_weights(folder: &ModelFolder) -> Result<BnbWeights, BnbError> {
    let mut found = BnbWeights::default();
    for state_name in folder.tensor_names().filter(|name| name.contains(STATE)) {
        let (name, _) = state_name.split_once(STATE).expect("filtered by it");
        let reader = StateReader { folder, name, state_name, parts: &mut found.parts };
        if found.weights.contains_key(name) {
            return Err(reader.wrong_state(format!("is there twice, the second time as `{state_name}`")));
        }
        let weight = reader.read()?;
        found.weights.insert(name.to_string(), weight);
    }
    Ok(found)
}

/// Reads and checks one tensor, and adds the names of its parts to `parts`.
struct StateReader<'a> {
    folder: &'a ModelFolder,
    name: &'a str,
    state_name: &'a str,
    parts: &'a mut BTreeSet<String>,
}

impl StateReader<'_> {
    fn read(mut self) -> Result<BnbWeight, BnbError> {
        let state = self.state()?;
        let code = match state.quant_type.as_str() {
            "nf4" => Code4::Nf4,
            "fp4" => Code4::Fp4,
            other => {
                return Err(self.wrong_state(format!("is of type `{other}`; `nf4` and `fp4` are supported")));
            }
        };
        if state.blocksize != BNB4_BLOCK {
            let what =
                format!("has blocks of {}; only blocks of {BNB4_BLOCK} are supported", state.blocksize);
            return Err(self.wrong_state(what));
        }
        let elements = state.shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n));
        let Some(elements) = elements.filter(|elements| state.shape.len() == 2 && *elements > 0) else {
            return Err(self.wrong_state(format!("has the shape {:?}, which is not a matrix", state.shape)));
        };
        let double = state.nested_blocksize.is_some() || state.nested_offset.is_some();
        let parts = bnb4_parts(elements, double);
        let codes = self.part(
            "",
            |tensor| tensor.bytes() == parts.scales as u64,
            || format!("does not have the {} bytes of {elements} codes", parts.scales),
        )?;
        let scale_element = if double { Element::U8 } else { Element::F32 };
        let scales = self.vector(".absmax", scale_element, parts.blocks)?;
        self.check_map(".quant_map", quant::bnb4::code_values(code))?;
        let nested = if double { Some(self.nested(&state, parts.blocks)?) } else { None };
        Ok(BnbWeight { shape: state.shape, storage: Storage::Bnb4 { code, double }, codes, scales, nested })
    }

    fn state(&mut self) -> Result<State, BnbError> {
        let tensor = self.folder.tensor(self.state_name).expect("it is one of the folder's names");
        self.parts.insert(self.state_name.to_string());
        if tensor.bytes() > MAX_STATE_BYTES || tensor.element() != Element::U8 {
            return Err(self.wrong_state(format!(
                "is {} of {} bytes, not JSON",
                tensor.element(),
                tensor.bytes()
            )));
        }
        let mut bytes = vec![0; tensor.bytes() as usize];
        tensor.read_at(0, &mut bytes)?;
        serde_json::from_slice(&bytes)
            .map_err(|error| self.wrong_state(format!("is not the expected JSON: {error}")))
    }

    fn nested(&mut self, state: &State, blocks: usize) -> Result<Nested, BnbError> {
        let blocksize = state.nested_blocksize.unwrap_or(0);
        if blocksize != BNB4_GROUP {
            let what = format!("has groups of {blocksize} scales; only groups of {BNB4_GROUP} are supported");
            return Err(self.wrong_state(what));
        }
        if state.nested_dtype.as_deref().is_some_and(|dtype| dtype != "float32") {
            return Err(self.wrong_state("has scales of scales that are not float32".into()));
        }
        let Some(offset) =
            state.nested_offset.map(|offset| offset as f32).filter(|offset| offset.is_finite())
        else {
            return Err(self.wrong_state("has no finite `nested_offset`".into()));
        };
        self.check_map(".nested_quant_map", &quant::dynamic_map::SIGNED_MAP)?;
        let group_scales = self.vector(".nested_absmax", Element::F32, blocks.div_ceil(BNB4_GROUP))?;
        Ok(Nested { group_scales, offset })
    }

    /// Checks that a map is the one that the decoders use.
    fn check_map(&mut self, suffix: &str, known: &[f32]) -> Result<(), BnbError> {
        let tensor = self.vector(suffix, Element::F32, known.len())?;
        let mut bytes = vec![0; 4 * known.len()];
        tensor.read_at(0, &mut bytes)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        match numbers.iter().zip(known).position(|(bytes, known)| f32::from_le_bytes(*bytes) != *known) {
            None => Ok(()),
            Some(index) => Err(self.wrong_part(
                suffix,
                format!(
                    "is not the known map: entry {index} is {}, expected {}",
                    f32::from_le_bytes(numbers[index]),
                    known[index]
                ),
            )),
        }
    }

    fn vector(&mut self, suffix: &str, element: Element, count: usize) -> Result<TensorRef, BnbError> {
        let fits = |tensor: &TensorRef| tensor.element() == element && tensor.elements() == count as u64;
        self.part(suffix, fits, || format!("does not have {count} numbers of type {element}"))
    }

    fn part(
        &mut self,
        suffix: &str,
        fits: impl Fn(&TensorRef) -> bool,
        what: impl FnOnce() -> String,
    ) -> Result<TensorRef, BnbError> {
        let part = format!("{}{suffix}", self.name);
        match self.folder.tensor(&part) {
            None => Err(self.wrong_part(suffix, "is missing".into())),
            Some(tensor) if !fits(&tensor) => Err(self.wrong_part(suffix, what())),
            Some(tensor) => {
                self.parts.insert(part);
                Ok(tensor)
            }
        }
    }

    fn wrong_state(&self, what: String) -> BnbError {
        BnbError::State { path: self.folder.path().to_path_buf(), tensor: self.name.to_string(), what }
    }

    fn wrong_part(&self, suffix: &str, what: String) -> BnbError {
        let (tensor, part) = (self.name.to_string(), format!("{}{suffix}", self.name));
        BnbError::Part { path: self.folder.path().to_path_buf(), tensor, part, what }
    }
}

impl BnbWeight {
    /// The same tensor, which adds every byte that is read to `hash`, from `begin` of the hashed content on.
    pub fn hashed(self, hash: &Arc<ContentHash>, begin: u64) -> BnbWeight {
        let scales_at = begin + self.codes.bytes();
        let groups_at = scales_at + self.scales.bytes();
        let nested = self.nested.map(|Nested { group_scales, offset }| {
            // The offset was read when the folder was opened.
            hash.add(groups_at + group_scales.bytes(), &offset.to_le_bytes());
            Nested { group_scales: group_scales.hashed(hash, groups_at), offset }
        });
        let (codes, scales) = (self.codes.hashed(hash, begin), self.scales.hashed(hash, scales_at));
        BnbWeight { codes, scales, nested, ..self }
    }

    pub fn file_path(&self) -> &std::path::Path {
        self.codes.file_path()
    }

    /// Fills `destination` with bytes of the tensor as it is in memory: codes, scales, scales of scales,
    /// offset.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), BnbError> {
        let Some(Nested { group_scales, offset }) = &self.nested else {
            read_end_to_end(&[&self.codes, &self.scales], byte_offset, destination)?;
            return Ok(());
        };
        let tensors = [&self.codes, &self.scales, group_scales];
        let rest = read_end_to_end(&tensors, byte_offset, destination)?;
        let tensor_bytes: u64 = tensors.iter().map(|tensor| tensor.bytes()).sum();
        let skipped = byte_offset.saturating_sub(tensor_bytes) as usize;
        rest.copy_from_slice(&offset.to_le_bytes()[skipped..][..rest.len()]);
        Ok(())
    }
}

#[cfg(test)]
#[path = "bnb_tests.rs"]
mod tests;
