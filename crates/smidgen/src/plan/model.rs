//! The model of a job: opens it, checks it against its config, and decides how each tensor is stored in memory.
//!
//! Weights are opened but not read, except a head that the config ties to the embedding. A checkpoint that contradicts its config is refused here, with every difference.
//! Left out: downloading (`smidgen-hub`) and loading (`session/weights.rs`).

use super::missing;
use crate::failure::Failure;
use smidgen_compile::error::ModelError;
use smidgen_compile::model::audio::{AudioSpec, OUTSIDE_DECODER};
use smidgen_compile::model::spec::{EMBEDDING, HeadSpec, Linear, LinearKind, UNTIED_HEAD};
use smidgen_compile::{DecoderSpec, Request, model as decoder_model};
use smidgen_formats::element::Element;
use smidgen_formats::model::Model;
use smidgen_formats::quantization_claim::QuantizationClaim;
use smidgen_formats::weight::Weight;
use smidgen_hub::{Access, Located, Want};
use smidgen_ir::{Block, Code4, DType, Extent, Shape, Storage};
use smidgen_recipe::{BaseFormat, ModelPath};
use std::collections::{HashMap, HashSet};

pub fn open_model(path: &ModelPath, want: Want, access: &Access) -> Result<Model, Failure> {
    match smidgen_hub::locate(path, want, access)? {
        Located::Folder(folder) => Model::open_folder(&folder).map_err(Failure::model),
        Located::GgufFile(file) => Model::open_gguf(&file).map_err(Failure::model),
    }
}

/// The decoder that a model's config describes.
pub fn read_decoder(model: &Model) -> Result<DecoderSpec, Failure> {
    let spec = decoder_model::read_spec(model.config()).map_err(|error| {
        refused_model(error, model).context(format!("`{}`", model.config_path().display()))
    })?;
    let is_tied = spec.head.is_tied && !has_own_head(model)?;
    Ok(DecoderSpec { head: HeadSpec { is_tied, ..spec.head }, ..spec })
}

/// Whether the file has a head that is not a copy of the embedding. Transformers does not tie such a head, whatever the
/// config says.
fn has_own_head(model: &Model) -> Result<bool, Failure> {
    match (model.weight(UNTIED_HEAD), model.weight(EMBEDDING)) {
        (Some(head), Some(embedding)) => Ok(!head.equals(&embedding).map_err(Failure::model)?),
        _ => Ok(false),
    }
}

/// What a config says and the model does not follow, as in transformers.
pub fn warnings(model: &Model, spec: &DecoderSpec) -> Vec<String> {
    let mut warnings = decoder_model::ignored_keys(model.config()).unwrap_or_default();
    let says_tied = decoder_model::read_spec(model.config()).is_ok_and(|by_config| by_config.head.is_tied);
    if says_tied && !spec.head.is_tied {
        warnings.push(format!(
            "config.json ties the head to the embedding, but the file has another `{UNTIED_HEAD}`, which is used, as in \
             transformers"
        ));
    }
    warnings
}

/// Refuses an export of a model with an audio encoder, for which GGUF files have no place.
pub fn refuse_audio(spec: &DecoderSpec) -> Result<(), Failure> {
    match spec.audio {
        None => Ok(()),
        Some(_) => Err(Failure::model(format!(
            "a {} model has an audio encoder, and GGUF files have no place for it",
            spec.model_type
        ))
        .hint("use the adapter with transformers and PEFT")),
    }
}

/// The error for a config that is not supported, with a hint for kinds of checkpoints that people often try.
fn refused_model(error: ModelError, model: &Model) -> Failure {
    let hint = match &error {
        ModelError::Unsupported { key, .. } if key == "quantization_config.quant_method" => Some(
            "use the checkpoint before its quantization: `model.base = \"nf4\"` or `\"int8\"` quantizes it while it \
             loads; 4-bit checkpoints of bitsandbytes, GPTQ and AWQ, MXFP4, fp8 and GGUF files are read as stored"
                .to_string(),
        ),
        ModelError::UnknownArchitecture { .. } => Some(missing::hint(model.config())),
        _ => None,
    };
    Failure::model(error).hint_if_some(hint)
}

/// Refuses a checkpoint that has not exactly the tensors that the config describes, in their shapes.
pub fn check_weights(spec: &DecoderSpec, model: &Model) -> Result<(), Failure> {
    if !model.has_weights() {
        return Ok(());
    }
    let mut problems: Vec<String> = contradicted_claims(spec, model);
    let mut known: HashSet<String> = HashSet::from([UNTIED_HEAD.to_string()]);
    let decoder = spec.tensors().into_iter().map(|tensor| (tensor, false));
    let audio = spec.audio.iter().flat_map(AudioSpec::tensors).map(|tensor| (tensor, true));
    let experts = matrices_of_experts(spec);
    for (tensor, is_audio) in decoder.chain(audio) {
        let expected = constant_dims(&tensor.shape);
        let name = tensor.name;
        match model.weight(&name) {
            None => problems
                .push(model.problem_of(&name).map_or_else(|| format!("`{name}` is missing"), str::to_owned)),
            Some(found) => {
                let (shape, storage) = (found.shape(), found.storage());
                // Matrices of the audio encoder may be convolutions in the file, and are not quantized.
                let (has_shape, is_readable) = if is_audio {
                    let elements = |dims: &[usize]| dims.iter().product::<usize>();
                    let is_plain = storage.is_some_and(|storage| storage.plain().is_some());
                    (elements(shape) == elements(&expected), is_plain)
                } else {
                    (is_shaped(shape, &expected), is_trainable_on(&tensor.shape, storage))
                };
                let (here, in_file) = (experts.get(&name).copied(), found.experts());
                if let (Some(here), Some(in_file)) = (here, in_file.filter(|count| here != Some(*count))) {
                    problems.push(format!("`{name}` has {in_file} experts, the config says {here}"));
                } else if !has_shape {
                    problems.push(format!("`{name}` is {shape:?}, the config says {expected:?}"));
                } else if !is_readable {
                    problems.push(format!("`{name}` is stored as {}", found.element_name()));
                }
            }
        }
        known.insert(name);
    }
    // Tensors for images, for audio together with images, and of projections whose result is shared are never loaded.
    let is_unread = |name: &str| {
        let is_of_adapter = [".base_layer.", ".lora_A.", ".lora_B."].iter().any(|part| name.contains(part));
        let is_unread_audio = spec.audio.is_some() && (name.starts_with(OUTSIDE_DECODER) || is_of_adapter);
        is_unread_audio || model.is_beside_text(name) || spec.is_unread(name)
    };
    let unknown = model.weight_names().into_iter().filter(|name| !known.contains(*name) && !is_unread(name));
    problems.extend(unknown.map(|name| format!("`{name}` is in the file but not in the config's model")));
    if problems.is_empty() {
        return Ok(());
    }
    let place = model.path().display();
    let more = problems.len().saturating_sub(8);
    problems.truncate(8);
    if more > 0 {
        problems.push(format!("and {more} more"));
    }
    let problems = problems.join("\n  ");
    Err(match model {
        Model::Folder { .. } => {
            Failure::model(format!("config.json contradicts the weights in `{place}`\n  {problems}"))
                .hint("config.json and the safetensors files have to come from the same model")
        }
        Model::Gguf { .. } => {
            Failure::model(format!("the metadata of `{place}` contradicts its tensors\n  {problems}"))
        }
    })
}

/// The number of experts of each weight and bias that has those of several.
fn matrices_of_experts(spec: &DecoderSpec) -> HashMap<String, usize> {
    let of_linear = |linear: Linear| match linear.kind {
        LinearKind::Experts(count) => Some((linear.path, count)),
        LinearKind::Dense | LinearKind::Router | LinearKind::Unadapted => None,
    };
    let linears = spec.linears().into_iter().filter_map(of_linear);
    linears
        .flat_map(|(path, count)| ["weight", "bias"].map(|tensor| (format!("{path}.{tensor}"), count)))
        .collect()
}

/// Linears that are quantized although `quantization_config` does not say so, and the reverse.
fn contradicted_claims(spec: &DecoderSpec, model: &Model) -> Vec<String> {
    if let Model::Gguf { .. } = model {
        return vec![];
    }
    let claim = match QuantizationClaim::of_config(model.config()) {
        Ok(claim) => claim,
        Err(problem) => return vec![problem],
    };
    let is_quantized = |linear: &Linear| linear.layer.is_some() && linear.kind != LinearKind::Router;
    let linears = spec.linears().into_iter().filter(is_quantized);
    let problem = |linear: Linear| {
        let name = format!("{}.weight", linear.path);
        // What no device can read is refused elsewhere.
        let weight = model.weight(&name).filter(|weight| weight.storage().is_some())?;
        let one = if let Weight::Joined(joined) = &weight { &joined.sources()[0].weight } else { &weight };
        let method = match one {
            Weight::Bnb(_) => Some("bitsandbytes"),
            Weight::Fp8(weight) if weight.storage() == Storage::Fp8Blocks => Some("fp8"),
            // Their tensors say what they are, by their names.
            Weight::Fp8(_) | Weight::Packed(_) => None,
            Weight::Plain(_) | Weight::Merged(_) | Weight::Gguf(_) | Weight::Joined(_) => None,
        };
        let stored = weight.element_name();
        match (claim.as_ref().filter(|claim| claim.covers(&linear.path)), method) {
            (None, None) => None,
            (Some(claim), Some(method)) if claim.method == method => None,
            (Some(QuantizationClaim { method, skip_key, .. }), _) => Some(format!(
                "`{name}` is stored as {stored}, `quantization_config` says {method} (`{skip_key}` would name exceptions)"
            )),
            (None, Some(_)) => Some(match &claim {
                Some(claim) => format!("`{name}` is stored as {stored}, but `{}` names it", claim.skip_key),
                None => {
                    format!("`{name}` is stored as {stored}, but config.json has no `quantization_config`")
                }
            }),
        }
    };
    linears.filter_map(problem).collect()
}

/// Whether a stored tensor has a shape. A convolution's weight is stored with its channels of a group, of which there is
/// one.
fn is_shaped(stored: &[usize], expected: &[usize]) -> bool {
    matches!((stored, expected), ([n, 1, k], [rows, taps]) if (n, k) == (rows, taps)) || stored == expected
}

/// Whether operations can read a tensor as stored: matrices in any storage format, vectors only as plain numbers.
fn is_trainable_on(shape: &Shape, storage: Option<Storage>) -> bool {
    storage.is_some_and(|storage| shape.0.len() == 2 || storage.plain().is_some())
}

pub fn constant_dims(shape: &Shape) -> Vec<usize> {
    shape.0.iter().map(|dim| dim.at(&Extent::default())).collect()
}

/// The storage format of every tensor of the model in memory.
pub fn build_storage(base: BaseFormat, spec: &DecoderSpec, model: &Model) -> HashMap<String, Storage> {
    let linears: HashSet<String> = spec
        .linears()
        .into_iter()
        .filter(|linear| linear.layer.is_some() && linear.kind != LinearKind::Router)
        .map(|linear| format!("{}.weight", linear.path))
        .collect();
    // `None` keeps a tensor as stored. Only linears of the decoder are quantized: an audio encoder is small.
    let (of_linears, of_others) = match base {
        BaseFormat::AsStored => (None, None),
        BaseFormat::F32 => (Some(Storage::F32), Some(Storage::F32)),
        BaseFormat::Bf16 => (Some(Storage::Plain(DType::Bf16)), Some(Storage::Plain(DType::Bf16))),
        BaseFormat::F16 => (Some(Storage::Plain(DType::F16)), Some(Storage::Plain(DType::F16))),
        BaseFormat::Fp8 => (Some(Storage::Fp8Rows), None),
        BaseFormat::Int8 => (Some(Storage::Int8Rows), None),
        BaseFormat::Nf4 => (Some(Storage::Bnb4 { code: Code4::Nf4, double: true }), None),
        BaseFormat::Nf4Single => (Some(Storage::Bnb4 { code: Code4::Nf4, double: false }), None),
    };
    let assumed = assumed_storage(spec, model);
    let mxfp4 = experts_in_mxfp4(spec, model);
    let tensors = spec.tensors().into_iter().chain(spec.audio.iter().flat_map(AudioSpec::tensors));
    let storage = tensors.map(|tensor| {
        let (wanted, assumed) = if mxfp4.contains(&tensor.name) {
            (of_linears, Storage::Gguf(Block::Mxfp4))
        } else if linears.contains(&tensor.name) {
            (of_linears, assumed)
        } else {
            (of_others, Storage::Plain(spec.stored))
        };
        let stored = || model.weight(&tensor.name).and_then(|weight| weight.storage());
        let storage = wanted.or_else(stored).unwrap_or(assumed);
        (tensor.name, storage)
    });
    storage.collect()
}

/// The weights of experts, if the config of a model without weights says that these are MXFP4.
fn experts_in_mxfp4(spec: &DecoderSpec, model: &Model) -> HashSet<String> {
    if model.has_weights() || model.config()["quantization_config"]["quant_method"] != "mxfp4" {
        return HashSet::new();
    }
    let experts = spec.linears().into_iter().filter(|linear| matches!(linear.kind, LinearKind::Experts(_)));
    experts.map(|linear| format!("{}.weight", linear.path)).collect()
}

/// The storage format of linear layers according to the config, for a model without weights.
fn assumed_storage(spec: &DecoderSpec, model: &Model) -> Storage {
    let quantization = &model.config()["quantization_config"];
    if !model.has_weights() {
        match quantization["quant_method"].as_str() {
            Some("fp8") => return Storage::Fp8Blocks,
            Some("compressed-tensors") => return Storage::Fp8Rows,
            Some("gptq" | "awq") => {
                let group = quantization["group_size"].as_i64().unwrap_or(128);
                let block = if group < 0 || group % 128 == 0 { Block::Int4By128 } else { Block::Int4By32 };
                return Storage::Gguf(block);
            }
            _ => {}
        }
    }
    if model.has_weights() || quantization["load_in_4bit"] != true {
        return Storage::Plain(spec.stored);
    }
    let code = if quantization["bnb_4bit_quant_type"] == "nf4" { Code4::Nf4 } else { Code4::Fp4 };
    Storage::Bnb4 { code, double: quantization["bnb_4bit_use_double_quant"] == true }
}

/// The storage format of a base tensor in the model that full training writes; `None` if the model has no weights.
pub fn written_storage(model: &Model, name: &str) -> Option<Storage> {
    model.weight(name).map(|weight| match weight.written_element() {
        Element::Bf16 => Storage::Plain(DType::Bf16),
        Element::F16 => Storage::Plain(DType::F16),
        _ => Storage::F32,
    })
}

/// Bytes of the tensors of the model that full training writes.
pub fn model_bytes(request: &Request, model: &Model) -> u64 {
    let tensors = request.spec.tensors().into_iter().map(|tensor| {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        let assumed = request.storage_of(&tensor.name);
        written_storage(model, &tensor.name).unwrap_or(assumed).bytes(rows, columns) as u64
    });
    tensors.sum()
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
