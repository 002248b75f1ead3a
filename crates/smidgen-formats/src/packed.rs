//! Weights that other libraries publish in 4 bits, read as blocks: MXFP4 as gpt-oss has it, GPTQ and AWQ.
//!
//! The bytes of a weight are brought into the order of [`Block`]s, row by row, while they are read; no number changes.
//! MXFP4 has a byte of scale for each sixteen bytes of codes, in a tensor of its own. GPTQ and AWQ store codes, scales and
//! the numbers to subtract with the inputs of the linear first, so a row is a column there: eight rows are read at a time.
//! Left out: other widths than 4 bits, groups whose columns do not follow each other (`desc_act`), and scales in bf16.

use crate::content_hash::ContentHash;
use crate::element::Element;
use crate::folder::ModelFolder;
use crate::safetensors::SafetensorsError;
use crate::tensor_ref::{TensorRef, read_end_to_end};
use smidgen_ir::{Block, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum PackedError {
    #[error("`{}`: `{tensor}` {what}", path.display())]
    Tensor { path: PathBuf, tensor: String, what: String },
    #[error(transparent)]
    File(#[from] SafetensorsError),
}

/// The packed weights of a folder by name, and the names of all tensors that are parts of one.
#[derive(Debug, Default)]
pub struct PackedWeights {
    pub weights: BTreeMap<String, PackedWeight>,
    pub parts: BTreeSet<String>,
}

impl PackedWeights {
    /// The name of the weight whose codes a tensor holds.
    pub fn weight_of_codes(&self, tensor: &str) -> Option<&str> {
        let stem = tensor.strip_suffix(".qweight").or_else(|| tensor.strip_suffix("_blocks"))?;
        self.weights.get_key_value(&format!("{stem}.weight")).map(|(name, _)| name.as_str())
    }

    /// A weight in MXFP4 that holds experts, if there is one.
    pub fn mxfp4_experts(&self) -> Option<&str> {
        let experts = self.weights.iter().filter(|(name, _)| name.contains(".experts."));
        experts.filter(|(_, weight)| weight.block == Block::Mxfp4).map(|(name, _)| name.as_str()).next()
    }
}

#[derive(Clone, Debug)]
pub struct PackedWeight {
    shape: Vec<usize>,
    block: Block,
    codes: TensorRef,
    scales: TensorRef,
    /// Rows of an expert, of which the even ones come first.
    turns: Option<usize>,
    /// Of GPTQ and AWQ.
    grouped: Option<Grouped>,
}

#[derive(Clone, Debug)]
struct Grouped {
    zeros: TensorRef,
    method: Method,
    /// Columns that share a scale.
    group: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// Words hold eight neighbouring columns of a row; the stored number is less by one than the one to subtract.
    Gptq,
    /// As `Gptq`, with the number to subtract itself.
    GptqV2,
    /// Words hold eight neighbouring rows of a column, in an order of their own.
    Awq,
}

/// Rows of a word of AWQ, from its lowest four bits on.
const AWQ_ROWS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
const GPTQ_ROWS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];
/// Rows that share a word of AWQ, or of the numbers to subtract.
const ROWS: usize = 8;
/// Rows that are read at a time, a multiple of [`ROWS`]: their words in the file are neighbours.
const ROWS_AT_ONCE: usize = 256;

/// Finds and checks every packed weight of a folder; reads no numbers.
pub fn find_packed_weights(folder: &ModelFolder) -> Result<PackedWeights, PackedError> {
    let claim = &folder.config()["quantization_config"];
    let mut found = PackedWeights::default();
    let names: Vec<&str> = folder.tensor_names().collect();
    for name in names {
        let finder = Finder { folder, claim };
        let (weight, parts) = if let Some(stem) = name.strip_suffix("_blocks") {
            (finder.mxfp4(stem)?, vec![format!("{stem}_blocks"), format!("{stem}_scales")])
        } else if let Some(module) = name.strip_suffix(".qweight") {
            let parts = ["qweight", "qzeros", "scales", "g_idx"].map(|part| format!("{module}.{part}"));
            (finder.grouped(module)?, parts.into())
        } else {
            continue;
        };
        let stem = name.strip_suffix(".qweight").or_else(|| name.strip_suffix("_blocks")).unwrap_or(name);
        found.parts.extend(parts);
        found.weights.insert(format!("{stem}.weight"), weight);
    }
    Ok(found)
}

struct Finder<'a> {
    folder: &'a ModelFolder,
    claim: &'a serde_json::Value,
}

impl Finder<'_> {
    fn wrong(&self, tensor: &str, what: String) -> PackedError {
        PackedError::Tensor { path: self.folder.path().to_path_buf(), tensor: tensor.to_owned(), what }
    }

    fn tensor(&self, name: &str, whole: &str) -> Result<TensorRef, PackedError> {
        let missing = || self.wrong(name, format!("is missing; it is a part of `{whole}`"));
        self.folder.tensor(name).ok_or_else(missing)
    }

    fn check(&self, tensor: &TensorRef, element: Element, shape: &[usize]) -> Result<(), PackedError> {
        if tensor.element() == element && tensor.shape() == shape {
            return Ok(());
        }
        let what = format!(
            "is {} of shape {:?}; expected {element} of shape {shape:?}",
            tensor.element(),
            tensor.shape()
        );
        Err(self.wrong(tensor.name(), what))
    }

    /// Codes (…, rows, blocks, 16) and a scale for each block: a matrix with the rows of all experts one after the other. In
    /// the files of gpt-oss, rows of gate and of up take turns.
    fn mxfp4(&self, stem: &str) -> Result<PackedWeight, PackedError> {
        let (codes, scales) =
            (self.tensor(&format!("{stem}_blocks"), stem)?, self.tensor(&format!("{stem}_scales"), stem)?);
        let (Element::U8, [outer @ .., blocks, 16]) = (codes.element(), codes.shape()) else {
            let what = format!(
                "is {} of shape {:?}; expected U8 that ends with blocks of 16",
                codes.element(),
                codes.shape()
            );
            return Err(self.wrong(codes.name(), what));
        };
        let expected = [outer, &[*blocks]].concat();
        self.check(&scales, Element::U8, &expected)?;
        let shape = vec![outer.iter().product(), *blocks * Block::Mxfp4.elements()];
        let turns =
            outer.last().copied().filter(|rows| stem.ends_with(".experts.gate_up_proj") && rows % 2 == 0);
        Ok(PackedWeight { shape, block: Block::Mxfp4, codes, scales, turns, grouped: None })
    }

    /// Codes, zeros and scales of a linear.
    fn grouped(&self, module: &str) -> Result<PackedWeight, PackedError> {
        let part = |part: &str| self.tensor(&format!("{module}.{part}"), &format!("{module}.qweight"));
        let (codes, zeros, scales) = (part("qweight")?, part("qzeros")?, part("scales")?);
        let method = match (self.claim["quant_method"].as_str(), self.claim["checkpoint_format"].as_str()) {
            (Some("awq"), _) => Method::Awq,
            (_, Some("gptq_v2")) => Method::GptqV2,
            _ => Method::Gptq,
        };
        let words = |tensor: &TensorRef| match *tensor.shape() {
            [first, second] if first > 0 && second > 0 => Ok((first, second)),
            _ => Err(self
                .wrong(tensor.name(), format!("has the shape {:?}, which is not a matrix", tensor.shape()))),
        };
        let (first, second) = words(&codes)?;
        let (groups, _) = words(&scales)?;
        let (columns, rows) = match method {
            Method::Gptq | Method::GptqV2 => (first.saturating_mul(8), second),
            Method::Awq => (first, second.saturating_mul(8)),
        };
        self.check(&codes, Element::I32, codes.shape())?;
        self.check(&scales, Element::F16, &[groups, rows])?;
        self.check(&zeros, Element::I32, &[groups, rows / 8])?;
        let group = columns / groups;
        let block = [Block::Int4By128, Block::Int4By32]
            .into_iter()
            .find(|block| group.is_multiple_of(block.elements()));
        let block = block.filter(|_| columns.is_multiple_of(groups) && rows.is_multiple_of(ROWS));
        let Some(block) = block else {
            let what = format!(
                "has {groups} groups for {columns} columns, and {rows} rows; groups of a multiple of 32 columns and a multiple of 8 rows are supported"
            );
            return Err(self.wrong(scales.name(), what));
        };
        Ok(PackedWeight {
            shape: vec![rows, columns],
            block,
            codes,
            scales,
            turns: None,
            grouped: Some(Grouped { zeros, method, group }),
        })
    }
}

impl PackedWeight {
    fn parts(&self) -> Vec<&TensorRef> {
        let zeros = self.grouped.iter().map(|grouped| &grouped.zeros);
        [&self.codes, &self.scales].into_iter().chain(zeros).collect()
    }

    /// The same weight, which adds every byte that is read to `hash`, from `begin` of the hashed content on.
    pub fn hashed(self, hash: &Arc<ContentHash>, begin: u64) -> PackedWeight {
        let scales_at = begin + self.codes.bytes();
        let zeros_at = scales_at + self.scales.bytes();
        PackedWeight {
            codes: self.codes.hashed(hash, begin),
            scales: self.scales.hashed(hash, scales_at),
            grouped: self
                .grouped
                .map(|grouped| Grouped { zeros: grouped.zeros.hashed(hash, zeros_at), ..grouped }),
            ..self
        }
    }

    /// The experts whose matrices it holds, if it holds several.
    pub fn experts(&self) -> Option<usize> {
        match self.codes.shape() {
            [experts, _, _, _] => Some(*experts),
            _ => None,
        }
    }

    pub fn block(&self) -> Block {
        self.block
    }

    /// Whether the rows of gate and up take turns in the file.
    pub fn takes_turns(&self) -> bool {
        self.turns.is_some()
    }

    /// Row-major, as the linear has it.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn storage(&self) -> Storage {
        Storage::Gguf(self.block)
    }

    pub fn file_path(&self) -> &Path {
        self.codes.file_path()
    }

    /// The name that the weight would have in the file if it were not packed.
    pub fn file_name(&self) -> String {
        self.codes.name().replace(".qweight", ".weight").replace("_blocks", ".weight")
    }

    /// Size in the file.
    pub fn file_bytes(&self) -> u64 {
        self.parts().iter().map(|part| part.bytes()).sum()
    }

    /// Fills `destination` with bytes of the file: codes, then scales, then zeros.
    pub fn read_file(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), SafetensorsError> {
        read_end_to_end(&self.parts(), byte_offset, destination).map(|_| ())
    }

    /// Fills `destination` with bytes of the weight as it is in memory: its blocks, row by row.
    pub fn read_stored(&self, byte_offset: u64, destination: &mut [u8]) -> Result<(), SafetensorsError> {
        let unit = if self.grouped.is_none() { self.block.bytes() } else { ROWS * self.row_bytes() };
        let (mut offset, mut rest) = (byte_offset, destination);
        while !rest.is_empty() {
            let (index, inside) = ((offset / unit as u64) as usize, (offset % unit as u64) as usize);
            let whole = rest.len() / unit * unit;
            let (part, behind) = if inside == 0 && whole > 0 {
                let (part, behind) = rest.split_at_mut(whole);
                self.read_units(index, part)?;
                (part, behind)
            } else {
                let (part, behind) = rest.split_at_mut((unit - inside).min(rest.len()));
                let mut bytes = vec![0; unit];
                self.read_units(index, &mut bytes)?;
                part.copy_from_slice(&bytes[inside..inside + part.len()]);
                (part, behind)
            };
            (offset, rest) = (offset + part.len() as u64, behind);
        }
        Ok(())
    }

    /// Whole units from one of them on: blocks of MXFP4, or eight rows.
    fn read_units(&self, first: usize, target: &mut [u8]) -> Result<(), SafetensorsError> {
        let Some(grouped) = &self.grouped else { return self.read_blocks(first, target) };
        let rows_at_once = ROWS_AT_ONCE * self.row_bytes();
        for (piece, target) in target.chunks_mut(rows_at_once).enumerate() {
            self.read_rows(grouped, ROWS * first + ROWS_AT_ONCE * piece, target)?;
        }
        Ok(())
    }

    fn row_bytes(&self) -> usize {
        let columns = self.shape.last().copied().unwrap_or(0);
        columns / self.block.elements() * self.block.bytes()
    }

    /// Blocks of MXFP4 from `first` on, in the order of the matrix.
    fn read_blocks(&self, first: usize, target: &mut [u8]) -> Result<(), SafetensorsError> {
        let Some(rows) = self.turns else { return self.read_mxfp4(first, target) };
        let (row_bytes, bytes) = (self.row_bytes(), self.block.bytes());
        let (mut at, mut rest) = (first * bytes, target);
        while !rest.is_empty() {
            let (row, inside) = (at / row_bytes, at % row_bytes);
            let (part, behind) = rest.split_at_mut((row_bytes - inside).min(rest.len()));
            let (expert, own) = (row / rows, row % rows);
            let in_file = if own < rows / 2 { 2 * own } else { 2 * (own - rows / 2) + 1 };
            self.read_mxfp4(((expert * rows + in_file) * row_bytes + inside) / bytes, part)?;
            (at, rest) = (at + part.len(), behind);
        }
        Ok(())
    }

    /// Blocks from `first` on, in the order of the file. A byte of the file has two neighbouring elements, one of the block elements j and j + 16.
    fn read_mxfp4(&self, first: usize, target: &mut [u8]) -> Result<(), SafetensorsError> {
        const AT_ONCE: usize = 1024;
        let most = AT_ONCE.min(target.len() / Block::Mxfp4.bytes());
        let (mut codes, mut scales) = (vec![0; 16 * most], vec![0; most]);
        for (piece, target) in target.chunks_mut(Block::Mxfp4.bytes() * AT_ONCE).enumerate() {
            let (start, count) = (first + piece * AT_ONCE, target.len() / Block::Mxfp4.bytes());
            self.codes.read_at(16 * start as u64, &mut codes[..16 * count])?;
            self.scales.read_at(start as u64, &mut scales[..count])?;
            let (pairs, _) = codes.as_chunks::<16>();
            for ((block, pairs), scale) in
                target.chunks_exact_mut(Block::Mxfp4.bytes()).zip(pairs).zip(&scales)
            {
                block[0] = *scale;
                let code = |at: usize| pairs[at / 2] >> (at % 2 * 4) & 15;
                for (at, byte) in block[1..].iter_mut().enumerate() {
                    *byte = code(at) | code(at + 16) << 4;
                }
            }
        }
        Ok(())
    }

    /// Rows from `first` on, eight or a multiple of eight.
    fn read_rows(&self, grouped: &Grouped, first: usize, target: &mut [u8]) -> Result<(), SafetensorsError> {
        let (rows, columns) = (self.shape[0], self.shape[1]);
        let (elements, bytes, row_bytes) = (self.block.elements(), self.block.bytes(), self.row_bytes());
        let count = target.len() / row_bytes;
        let places = if grouped.method == Method::Awq { AWQ_ROWS } else { GPTQ_ROWS };
        let (mut scales, mut words) = (vec![0u8; 2 * count], vec![0u32; count]);
        for group in 0..columns / grouped.group {
            self.scales.read_at(2 * (group * rows + first) as u64, &mut scales)?;
            read_words(&grouped.zeros, (group * rows + first) / 8, &mut words[..count / 8])?;
            let blocks = grouped.group / elements;
            for row in 0..count {
                let place = places.iter().position(|own| *own == row % 8).expect("each row has a place");
                let stored = (words[row / 8] >> (4 * place) & 15) as u8;
                // The libraries that subtract one more keep four bits of the sum.
                let zero = if grouped.method == Method::Gptq { (stored + 1) & 15 } else { stored };
                for block in group * blocks..(group + 1) * blocks {
                    let head = &mut target[row * row_bytes + block * bytes..][..4];
                    head.copy_from_slice(&[scales[2 * row], scales[2 * row + 1], zero, 0]);
                }
            }
        }
        // Columns come in ascending order, the first of two in the high half of their byte.
        let mut put = |row: usize, column: usize, code: u32| {
            let (block, inside) = (column / elements, column % elements);
            let byte = &mut target[row * row_bytes + block * bytes + 4 + inside / 2];
            *byte = if inside % 2 == 0 { (code << 4) as u8 } else { *byte | (code & 15) as u8 };
        };
        if grouped.method == Method::Awq {
            for column in 0..columns {
                let words = &mut words[..count / 8];
                read_words(&self.codes, (column * rows + first) / 8, words)?;
                for (eight, word) in words.iter().enumerate() {
                    places
                        .into_iter()
                        .enumerate()
                        .for_each(|(place, row)| put(8 * eight + row, column, word >> (4 * place)));
                }
            }
            return Ok(());
        }
        for eight in 0..columns / 8 {
            read_words(&self.codes, eight * rows + first, &mut words)?;
            for (row, word) in words.iter().enumerate() {
                (0..8).for_each(|place| put(row, 8 * eight + place, word >> (4 * place)));
            }
        }
        Ok(())
    }
}

/// Fills `words` with words of a tensor from one of them on.
fn read_words(tensor: &TensorRef, first: usize, words: &mut [u32]) -> Result<(), SafetensorsError> {
    let mut bytes = vec![0; 4 * words.len()];
    tensor.read_at(4 * first as u64, &mut bytes)?;
    let (read, _) = bytes.as_chunks::<4>();
    words.iter_mut().zip(read).for_each(|(word, bytes)| *word = u32::from_le_bytes(*bytes));
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::model::Model;
    use crate::weight::Weight;
    use smidgen_ir::quant;
    use std::path::PathBuf;

    fn fixture(name: &str) -> Model {
        let path = PathBuf::from(format!("{}/../../fixtures/quant/{name}", env!("CARGO_MANIFEST_DIR")));
        Model::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    const CASES: [(&str, &str, &str); 7] = [
        ("mxfp4", "x.w.weight", "mxfp4"),
        ("mxfp4-experts", "x.experts.gate_up_proj.weight", "mxfp4"),
        ("gptq", "x.weight", "int4-128"),
        ("gptq-32", "x.weight", "int4-32"),
        ("awq", "x.weight", "int4-128"),
        ("fp8-rows", "x.weight", "fp8"),
        ("fp8-tensor", "x.weight", "fp8"),
    ];

    #[test]
    fn the_numbers_are_those_of_the_libraries() {
        for (case, name, storage) in CASES {
            let model = fixture(case);
            let weight = model.weight(name).unwrap();
            assert_eq!((weight.element_name().as_str(), model.is_quantized()), (storage, true), "{case}");
            assert_eq!(model.weight_values(name), model.weight_values("decoded"), "{case}");
            assert_eq!(weight.shape(), model.weight("decoded").unwrap().shape(), "{case}");
            assert_eq!(model.weight_names(), ["decoded", name], "{case}");
        }
    }

    /// A merge writes a packed weight where its codes are, and refuses experts in MXFP4, which have another layout.
    #[test]
    fn weights_are_found_by_their_codes() {
        let Model::Folder { packed, .. } = fixture("gptq") else { panic!("a folder") };
        assert_eq!(packed.weight_of_codes("x.qweight"), Some("x.weight"));
        assert_eq!([packed.weight_of_codes("x.scales"), packed.mxfp4_experts()], [None; 2]);
        assert_eq!(fixture("mxfp4").mxfp4_experts(), None);
        assert_eq!(fixture("mxfp4-experts").mxfp4_experts(), Some("x.experts.gate_up_proj.weight"));
    }

    #[test]
    fn any_range_of_bytes_is_that_of_the_whole() {
        for (case, name, _) in CASES {
            let model = fixture(case);
            let weight = model.weight(name).unwrap();
            let (rows, columns) = weight.rows_and_columns();
            let storage = weight.storage().unwrap();
            let mut whole = vec![0; storage.bytes(rows, columns)];
            weight.read_stored(0, &mut whole).unwrap();
            for (first, count) in
                [(0, 1), (3, 50), (16, 18), (whole.len() - 9, 9), (whole.len() / 2, 200), (5, 0)]
            {
                let count = count.min(whole.len() - first);
                let mut part = vec![0; count];
                weight.read_stored(first as u64, &mut part).unwrap();
                assert_eq!(part, whole[first..first + count], "{case} from {first}");
            }
            let mut values = vec![0.0; rows * columns];
            quant::decode(storage, rows, columns, &whole, 0, &mut values);
            assert_eq!(values, model.weight_values("decoded"), "{case}");
            assert_eq!(weight.read_hash().unwrap(), weight.clone().read_hash().unwrap());
            assert!(matches!(weight, Weight::Packed(_) | Weight::Fp8(_)));
        }
    }
}
