//! A whole model as a GGUF file: the base, with an adapter merged if there is one.
//!
//! Rows are read as f32 in blocks, merged, put in the order of the file, and encoded once. Vectors are F32; matrices
//! have the requested type, or a wider one if their rows are not whole blocks (`matrix_type.rs`).
//! Metadata comes from the base's GGUF file, or from its config and tokenizer.
//! This needs the memory of one block in f32 and of one module's A, B and magnitude, as in a merge.

use super::matrix_type::MatrixPlace;
pub use super::matrix_type::MatrixType;
use super::metadata::{Description, describe};
use super::{architecture_of, prepare_output, refuse_ls_lora};
use crate::failure::Failure;
use crate::merge::fit::fit_adapter;
use crate::merge::fold::Factors;
use crate::model_files::finite::refuse_not_finite;
use crate::model_files::numbers::read_f32;
use crate::model_files::original::{OriginalModel, OriginalRows, OriginalTensor};
use crate::model_files::output::{Action, OutputTensor, Tally};
use crate::plan::context::TOKENIZER_TOKEN_BYTES;
use crate::plan::model::{check_weights, read_decoder, refuse_audio};
use crate::plan::phases::FILE_BLOCK_BYTES;
use smidgen_compile::DecoderSpec;
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::gguf::architecture::Architecture;
use smidgen_formats::gguf::tensor_names::{RowOrder, added, becomes_config, file_name, row_order};
use smidgen_formats::gguf::value::{Metadata, Value};
use smidgen_formats::gguf::write::{GgufTensorSpec, write_gguf};
use smidgen_formats::model::Model;
use smidgen_formats::peft::{AdapterFile, AdapterModules, StoredKind, read_modules};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_ir::quant::Encoding;
use smidgen_ir::{Block, DType, Storage};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::path::Path;

#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    pub matrices: MatrixType,
    /// Size of the block of rows in f32.
    pub block_bytes: usize,
}

impl ExportOptions {
    pub fn new(matrices: MatrixType) -> ExportOptions {
        ExportOptions { matrices, block_bytes: FILE_BLOCK_BYTES }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct ExportedModel {
    pub architecture: &'static Architecture,
    pub kind: Option<StoredKind>,
    /// Tensors by the name of their type.
    pub tensors: BTreeMap<String, Tally>,
    pub folded: usize,
    /// Memory of the block, one module's factors, a quantized tensor, and the tokenizer.
    pub memory_bytes: u64,
    pub notes: Vec<String>,
}

/// Writes the model; `name` is its name in the file.
pub fn export_model(
    original: &OriginalModel,
    adapter: Option<&AdapterFile>,
    name: &str,
    output: &Path,
    options: ExportOptions,
) -> Result<ExportedModel, Failure> {
    let kind = adapter.map(|adapter| adapter.config().kind());
    if let Some(adapter) = adapter.filter(|_| kind == Some(StoredKind::LsLora)) {
        return Err(refuse_ls_lora(adapter));
    }
    let spec = read_decoder(original.model())?;
    refuse_audio(&spec)?;
    check_weights(&spec, original.model())?;
    let architecture = architecture_of(original.model(), &spec)?;
    let read = match adapter {
        Some(adapter) => read_modules(adapter).map_err(Failure::model)?,
        None => AdapterModules { modules: vec![], biases: vec![], saved: vec![] },
    };
    let fitted = match adapter {
        Some(adapter) => {
            refuse_not_finite(adapter)?;
            fit_adapter(adapter, &read, original, None)?
        }
        None => unadapted(original),
    };
    let tensors = place_tensors(&spec, architecture, fitted, options.matrices, original)?;
    let described = describe_model(original.model(), &spec, architecture, name)?;
    prepare_output(output)?;
    let mut metadata = described.metadata;
    metadata.set("general.file_type", Value::U32(options.matrices.file_type()));
    metadata.set("general.quantization_version", Value::U32(2));

    let mut specs: Vec<GgufTensorSpec> = (described.tensors.iter())
        .map(|(name, values)| spec_of(name, vec![values.len()], Storage::F32))
        .collect();
    let described_tensors = specs.len();
    specs.extend(tensors.iter().map(|tensor| {
        // The weight of a convolution has a dimension less than in folders.
        let dims = match *tensor.output.original.shape() {
            [channels, 1, taps] => vec![channels, taps],
            ref others => others.to_vec(),
        };
        spec_of(&tensor.name, dims, tensor.storage)
    }));
    let folds = tensors.iter().filter_map(|tensor| match &tensor.output.action {
        Action::Fold(fold) => Some(&**fold),
        Action::Replace(_) | Action::Convert | Action::Copy => None,
    });
    let mut factors = Factors::with_room_for(folds);
    let mut buffers =
        Buffers { block_elements: options.block_bytes / size_of::<f32>(), ..Buffers::default() };
    write_gguf(output, &metadata, &specs, |position, out| match position.checked_sub(described_tensors) {
        None => {
            let (_, values) = &described.tensors[position];
            out.write_all(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
        }
        Some(position) => {
            write_tensor(&tensors[position], &mut factors, &mut buffers, out).map_err(io::Error::other)
        }
    })
    .map_err(Failure::disk)?;

    let held = buffers.held.capacity() + options.block_bytes;
    let tokenizer = TOKENIZER_TOKEN_BYTES * spec.vocabulary as u64;
    let mut notes = described.notes;
    notes.extend(note_on_types(&tensors));
    Ok(ExportedModel {
        architecture,
        kind,
        tensors: count_by_type(&specs),
        folded: tensors.iter().filter(|tensor| matches!(tensor.output.action, Action::Fold(_))).count(),
        memory_bytes: factors.room_bytes() + held as u64 + tokenizer,
        notes,
    })
}

fn spec_of(name: &str, dims: Vec<usize>, storage: Storage) -> GgufTensorSpec {
    GgufTensorSpec { name: name.to_string(), dims, storage }
}

fn unadapted(original: &OriginalModel) -> Vec<OutputTensor> {
    let convert = |tensor: &OriginalTensor| OutputTensor {
        original: tensor.clone(),
        element: tensor.element(),
        action: Action::Convert,
    };
    original.tensors().iter().map(convert).collect()
}

/// A tensor of the file and its source.
struct PlacedTensor {
    name: String,
    storage: Storage,
    /// Whether that is the storage that the type of the file has for it.
    is_wanted: bool,
    rows: RowOrder,
    /// Added to all values: 1 for the norms of Gemma.
    added: f32,
    output: OutputTensor,
}

fn place_tensors(
    spec: &DecoderSpec,
    architecture: &'static Architecture,
    fitted: Vec<OutputTensor>,
    matrices: MatrixType,
    original: &OriginalModel,
) -> Result<Vec<PlacedTensor>, Failure> {
    let mut by_name: HashMap<String, OutputTensor> =
        fitted.into_iter().map(|output| (output.original.name().to_string(), output)).collect();
    let placed = spec.tensors().into_iter().map(|tensor| {
        let Some(name) = file_name(architecture, &tensor.name) else {
            return Err(Failure::model(format!(
                "`{}` has the tensor `{}`, which GGUF does not support for `{}`",
                original.path().display(),
                tensor.name,
                architecture.name()
            )));
        };
        let output = by_name.remove(&tensor.name).expect("`check_weights` has found every tensor");
        let (storage, is_wanted) = match *output.original.shape() {
            [_, columns] => {
                let (layers, is_tied) = (spec.layers.len(), spec.head.is_tied);
                let place = MatrixPlace { name: &name, columns, layers, is_tied };
                let storage = matrices.storage(&place);
                (storage, storage == matrices.wanted(&place))
            }
            _ => (Storage::F32, true),
        };
        let rows = row_order(architecture, &name, spec.head_dim());
        Ok(PlacedTensor { rows, added: added(architecture, &name), name, storage, is_wanted, output })
    });
    placed.collect()
}

/// Metadata from the base's GGUF file, or from its config and tokenizer.
fn describe_model(
    model: &Model,
    spec: &DecoderSpec,
    architecture: &'static Architecture,
    name: &str,
) -> Result<Description, Failure> {
    let folder = match model {
        Model::Gguf { file, .. } => return copy_description(file, architecture),
        Model::Folder { folder, .. } => folder.path(),
    };
    let mut described = describe(spec, architecture, name)
        .map_err(|what| Failure::model(format!("`{}`: {what}", folder.display())))?;
    let tokenizer = Tokenizer::from_folder(folder).map_err(Failure::model)?;
    let keys = tokenizer.to_gguf(architecture.name(), spec.vocabulary).map_err(|problem| {
        Failure::model(format!("cannot write the tokenizer in `{}` as GGUF: {problem}", folder.display()))
            .hint("`smidgen merge` writes a model folder with the tokenizer unchanged")
    })?;
    for (key, value) in keys.iter() {
        described.metadata.set(key, value.clone());
    }
    described.notes.extend(tokenizer.gguf_notes(architecture.name()).map_err(Failure::model)?);
    Ok(described)
}

fn copy_description(file: &GgufFile, architecture: &Architecture) -> Result<Description, Failure> {
    // Opened again, because `Model` does not keep the metadata.
    let file = GgufFile::open(file.path()).map_err(Failure::model)?;
    let mut metadata = Metadata::default();
    // Keys about the quantization of the base do not apply to this file.
    for (key, value) in file.metadata().iter().filter(|(key, _)| !key.starts_with("quantize.")) {
        metadata.set(key, value.clone());
    }
    let mut tensors = Vec::new();
    for tensor in file.tensors().iter().filter(|tensor| becomes_config(architecture, &tensor.name)) {
        let mut bytes = vec![0; tensor.bytes as usize];
        file.read_at(tensor, 0, &mut bytes).map_err(Failure::model)?;
        let (numbers, _) = bytes.as_chunks::<4>();
        let numbers = numbers.iter().map(|number| f32::from_le_bytes(*number)).collect();
        tensors.push((tensor.name.clone(), numbers));
    }
    Ok(Description { metadata, tensors, notes: vec![] })
}

#[derive(Default)]
struct Buffers {
    block_elements: usize,
    values: Vec<f32>,
    row: Vec<u8>,
    held: Vec<u8>,
}

fn write_tensor(
    tensor: &PlacedTensor,
    factors: &mut Factors,
    buffers: &mut Buffers,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let original = &tensor.output.original;
    let (rows, width) = (original.rows(), original.row_elements());
    let Buffers { block_elements, values, row, held } = buffers;
    let at_a_time = rows_at_a_time(*block_elements, width, tensor.rows).min(rows);
    values.resize(at_a_time * width, 0.0);
    row.resize(tensor.storage.bytes(1, width), 0);
    let stored = OriginalRows::open(original, held)?;
    if let Action::Fold(fold) = &tensor.output.action {
        factors.load(fold)?;
    }
    for first in (0..rows).step_by(at_a_time) {
        let count = at_a_time.min(rows - first);
        let values = &mut values[..count * width];
        match &tensor.output.action {
            Action::Replace(bias) => read_f32(bias, (first * width) as u64, values)?,
            Action::Fold(fold) => {
                stored.read(first, count, values)?;
                factors.fold_rows(fold.first_row + first, values);
            }
            Action::Convert | Action::Copy => stored.read(first, count, values)?,
        }
        if tensor.added != 0.0 {
            values.iter_mut().for_each(|value| *value += tensor.added);
        }
        refuse_overflow(tensor, values)?;
        for file_row in first..first + count {
            let position = tensor.rows.checkpoint_row(file_row) - first;
            let numbers = &values[position * width..][..width];
            let mut encoding = Encoding::begin(tensor.storage, 1, width, row).map_err(Failure::model)?;
            encoding.parts(1).iter_mut().for_each(|part| part.append(numbers));
            encoding.finish();
            out.write_all(row).map_err(Failure::disk)?;
        }
    }
    Ok(())
}

/// Rows of a block; whole heads if rows are reordered within heads.
fn rows_at_a_time(block_elements: usize, width: usize, order: RowOrder) -> usize {
    let unit = match order {
        RowOrder::AsStored => 1,
        RowOrder::PairsOfHeads { head_dim } => head_dim,
    };
    (block_elements / width.max(1) / unit).max(1) * unit
}

/// Refuses numbers that are not finite, or would not be finite in the type of the tensor.
fn refuse_overflow(tensor: &PlacedTensor, values: &[f32]) -> Result<(), Failure> {
    /// Halfway above the largest F16: this and larger numbers round to infinity.
    const BEYOND_F16: f32 = 65_520.0;
    // The scale of a block of Q8_0 is an F16: its largest value divided by 127. Those of K blocks are smaller.
    const BEYOND_Q8_0: f32 = 127.0 * BEYOND_F16;
    let beyond = match tensor.storage {
        Storage::Plain(DType::F16) => BEYOND_F16,
        Storage::Gguf(_) => BEYOND_Q8_0,
        _ => f32::INFINITY,
    };
    let Some(value) = values.iter().find(|value| value.is_nan() || value.abs() >= beyond) else {
        return Ok(());
    };
    let name = tensor.output.original.name();
    Err(if value.is_finite() {
        Failure::model(format!(
            "`{name}` has the value {value}, which is too large for {}",
            tensor.storage.to_string().to_uppercase()
        ))
        .hint("use `--type f32`")
    } else {
        Failure::model(format!("`{name}` has the value {value}, which cannot be exported"))
            .hint("the adapter's alpha or weights are too large, or the base is damaged")
    })
}

fn note_on_types(tensors: &[PlacedTensor]) -> Vec<String> {
    let others = tensors.iter().filter(|tensor| !tensor.is_wanted);
    let mut by_type: BTreeMap<String, Vec<&PlacedTensor>> = BTreeMap::new();
    others.for_each(|tensor| by_type.entry(tensor.storage.to_string()).or_default().push(tensor));
    let note = |(storage, tensors): (String, Vec<&PlacedTensor>)| {
        let block = if storage == Block::Q8_0.name() { Block::Q6K } else { Block::Q8_0 };
        format!(
            "{} tensors are {storage}: their rows are not a multiple of {} elements, for example `{}`",
            tensors.len(),
            block.elements(),
            tensors[0].output.original.name()
        )
    };
    by_type.into_iter().map(note).collect()
}

fn count_by_type(specs: &[GgufTensorSpec]) -> BTreeMap<String, Tally> {
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    for spec in specs {
        let columns = spec.dims.last().copied().unwrap_or(1);
        let rows: usize = spec.dims.iter().rev().skip(1).product();
        let tally = tallies.entry(spec.storage.to_string()).or_default();
        tally.tensors += 1;
        tally.bytes += spec.storage.bytes(rows, columns) as u64;
    }
    tallies
}
