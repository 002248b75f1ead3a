//! A LoRA adapter as the GGUF file that llama.cpp loads on top of its base: `--lora FILE`.
//!
//! `NAME.lora_a` (R, in) and `NAME.lora_b` (out, R) are F32, where NAME is the base's tensor; rows of B are in the
//! order of the base's rows. llama.cpp multiplies B·A by alpha / R with one alpha for the whole file, so the most
//! common alpha is written, and B of a module with another scale is multiplied by the difference.
//! Left out: DoRA and trained biases, which the format does not support, and LS-LoRA.

use super::{architecture_of, prepare_output, refuse_ls_lora};
use crate::failure::Failure;
use crate::model_files::finite::refuse_not_finite;
use crate::model_files::numbers::read_f32;
use crate::model_files::output::Tally;
use crate::plan::model::{read_decoder, refuse_audio};
use smidgen_compile::DecoderSpec;
use smidgen_compile::model::spec::HEAD;
use smidgen_formats::element::Element;
use smidgen_formats::finite::FiniteWriter;
use smidgen_formats::gguf::architecture::Architecture;
use smidgen_formats::gguf::tensor_names::{RowOrder, file_name, row_order};
use smidgen_formats::gguf::value::{Metadata, Value};
use smidgen_formats::gguf::write::{GgufTensorSpec, write_gguf};
use smidgen_formats::model::Model;
use smidgen_formats::peft::{AdapterFile, AdapterModule, StoredKind, read_modules};
use smidgen_ir::Storage;
use std::io;
use std::path::Path;

/// The linear layer to which llama.cpp applies no adapter.
const WITHOUT_ADAPTERS: &str = "per_layer_model_proj.weight";
/// Maximum number of modules that an error names.
const NAMED_AT_MOST: usize = 8;

#[derive(Clone, Debug, PartialEq)]
pub struct ExportedLora {
    pub architecture: &'static Architecture,
    pub kind: StoredKind,
    pub modules: usize,
    pub ranks: Vec<usize>,
    /// The alpha in the file.
    pub alpha: f32,
    /// Number of modules whose B was multiplied, because their alpha is another one.
    pub rescaled: usize,
    pub written: Tally,
}

/// Writes the adapter as a LoRA file for `model`, of which only the config is read.
pub fn export_lora(adapter: &AdapterFile, model: &Model, output: &Path) -> Result<ExportedLora, Failure> {
    let modules = plain_modules(adapter)?;
    let spec = read_decoder(model)?;
    refuse_audio(&spec)?;
    let architecture = architecture_of(model, &spec)?;
    let placed = place_modules(adapter, model, &modules, &spec, architecture)?;
    refuse_not_finite(adapter)?;
    prepare_output(output)?;

    let alpha = most_common_alpha(&modules);
    let mut metadata = Metadata::default();
    let text = |text: &str| Value::String(text.to_string());
    metadata.set("general.architecture", text(architecture.name()));
    metadata.set("general.type", text("adapter"));
    metadata.set("general.file_type", Value::U32(0));
    metadata.set("adapter.type", text("lora"));
    metadata.set("adapter.lora.alpha", Value::F32(alpha));
    let mut specs = Vec::with_capacity(2 * modules.len());
    for (module, place) in modules.iter().zip(&placed) {
        for (half, tensor) in [("lora_a", &module.a), ("lora_b", &module.b)] {
            specs.push(GgufTensorSpec {
                name: format!("{}.{half}", place.name),
                dims: tensor.shape().to_vec(),
                storage: Storage::F32,
            });
        }
    }
    write_gguf(output, &metadata, &specs, |position, out| {
        let (module, place) = (&modules[position / 2], &placed[position / 2]);
        match position % 2 {
            0 => write_a(module, out),
            _ => {
                // A large factor may overflow f32.
                let mut out = FiniteWriter::new(out, module.b.name(), Element::F32);
                write_b(module, place.rows, b_factor(module, alpha), &mut out)
            }
        }
    })
    .map_err(Failure::writing)?;

    let mut ranks: Vec<usize> = modules.iter().map(|module| module.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    Ok(ExportedLora {
        architecture,
        kind: adapter.config().kind(),
        modules: modules.len(),
        ranks,
        alpha,
        rescaled: modules.iter().filter(|module| b_factor(module, alpha) != 1.0).count(),
        written: Tally {
            tensors: specs.len(),
            bytes: modules.iter().map(|module| 4 * (module.a.elements() + module.b.elements())).sum(),
        },
    })
}

/// Reads the modules of an adapter, and refuses what the format does not support.
fn plain_modules(adapter: &AdapterFile) -> Result<Vec<AdapterModule>, Failure> {
    let (place, kind) = (adapter.path().display(), adapter.config().kind());
    let instead = "`smidgen export --merged` writes the whole model with the adapter merged, `smidgen merge` writes it \
                   as a model folder";
    match kind {
        StoredKind::Lora | StoredKind::RsLora => {}
        StoredKind::LsLora => return Err(refuse_ls_lora(adapter)),
        StoredKind::Dora | StoredKind::RsLoraDora => {
            return Err(Failure::model(format!(
                "the adapter in `{place}` is {kind}: llama.cpp adapters do not support magnitudes"
            ))
            .hint(instead));
        }
    }
    let read = read_modules(adapter).map_err(Failure::model)?;
    let biases = read.biases.len() + read.modules.iter().filter(|module| module.bias.is_some()).count();
    match (biases, read.saved.len()) {
        (0, 0) => Ok(read.modules),
        (0, saved) => Err(Failure::model(format!(
            "the adapter in `{place}` has {saved} trained tensors of the base: llama.cpp adapters do not support them"
        ))
        .hint(instead)),
        (biases, _) => Err(Failure::model(format!(
            "the adapter in `{place}` has {biases} trained biases: llama.cpp adapters do not support them"
        ))
        .hint(instead)),
    }
}

/// The position of a module in the file: the name of the base's tensor, and the order of its rows.
struct TensorRows {
    name: String,
    rows: RowOrder,
}

fn place_modules(
    adapter: &AdapterFile,
    model: &Model,
    modules: &[AdapterModule],
    spec: &DecoderSpec,
    architecture: &'static Architecture,
) -> Result<Vec<TensorRows>, Failure> {
    let linears = spec.linears();
    let mut problems = Vec::new();
    let mut placed = Vec::with_capacity(modules.len());
    for module in modules {
        let path = &module.path;
        let name = file_name(architecture, &format!("{path}.weight"));
        let linear = linears.iter().find(|linear| linear.path == *path);
        match (linear, name) {
            (Some(_), Some(_)) if path == HEAD && spec.head.is_tied => {
                problems.push(format!(
                    "`{path}` is tied to the embedding, so adapting it would change the embedding too"
                ));
            }
            (Some(_), Some(name)) if name == WITHOUT_ADAPTERS => {
                problems.push(format!("`{path}` is adapted, and llama.cpp applies no adapter to `{name}`"));
            }
            (Some(linear), Some(name)) if [linear.n, linear.k] == [module.rows(), module.columns()] => {
                let rows = row_order(architecture, &name, spec.head_dim());
                placed.push(TensorRows { name, rows });
            }
            (Some(linear), Some(_)) => problems.push(format!(
                "`{path}` is {:?} in the base, the adapter is for {:?}",
                [linear.n, linear.k],
                [module.rows(), module.columns()]
            )),
            _ => problems.push(format!("`{path}` is not a linear layer of the base")),
        }
    }
    if problems.is_empty() {
        return Ok(placed);
    }
    let more = problems.len().saturating_sub(NAMED_AT_MOST);
    problems.truncate(NAMED_AT_MOST);
    if more > 0 {
        problems.push(format!("and {more} more"));
    }
    Err(Failure::model(format!(
        "the adapter in `{}` does not fit the base model `{}`\n  {}",
        adapter.path().display(),
        model.path().display(),
        problems.join("\n  ")
    )))
}

/// The alpha that gives a module its scale when it is divided by the rank.
fn alpha_of(module: &AdapterModule) -> f32 {
    (module.scale * module.rank as f64) as f32
}

/// The most common alpha other than zero, because llama.cpp takes zero as "no scale".
fn most_common_alpha(modules: &[AdapterModule]) -> f32 {
    let alphas: Vec<f32> = modules.iter().map(alpha_of).filter(|alpha| *alpha != 0.0).collect();
    let count = |alpha: &f32| alphas.iter().filter(|other| *other == alpha).count();
    // `max_by_key` returns the last of several that are equally common, so this returns the first.
    alphas.iter().rev().copied().max_by_key(count).unwrap_or(1.0)
}

/// The factor for B so that alpha / R gives the module's scale.
fn b_factor(module: &AdapterModule, alpha: f32) -> f64 {
    if alpha_of(module) == alpha { 1.0 } else { module.scale * module.rank as f64 / f64::from(alpha) }
}

fn write_a(module: &AdapterModule, out: &mut dyn io::Write) -> io::Result<()> {
    let mut row = vec![0.0; module.columns()]; // (in)
    for number in 0..module.rank {
        read_f32(&module.a, (number * module.columns()) as u64, &mut row).map_err(io::Error::other)?;
        write_floats(&row, 1.0, out)?;
    }
    Ok(())
}

fn write_b(module: &AdapterModule, order: RowOrder, factor: f64, out: &mut dyn io::Write) -> io::Result<()> {
    let mut b = vec![0.0; module.rows() * module.rank]; // (out, R)
    read_f32(&module.b, 0, &mut b).map_err(io::Error::other)?;
    for file_row in 0..module.rows() {
        let row = &b[order.checkpoint_row(file_row) * module.rank..][..module.rank];
        write_floats(row, factor, out)?;
    }
    Ok(())
}

fn write_floats(values: &[f32], factor: f64, out: &mut dyn io::Write) -> io::Result<()> {
    let scaled = values.iter().map(|value| (f64::from(*value) * factor) as f32);
    let bytes: Vec<u8> = scaled.flat_map(f32::to_le_bytes).collect();
    out.write_all(&bytes)
}
