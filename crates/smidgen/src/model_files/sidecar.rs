//! The files of a model folder other than its weights: config, generation settings, tokenizer, chat template, licence.
//! Those in the list of `folder_files.rs` are copied unchanged, except `config.json` if the output has another element
//! type or the base was quantized: then it names the new type and no quantization. For a GGUF file, config and tokenizer
//! are written in the format of Hugging Face.
//! Not copied: pickled weights, other formats of the weights, images and model cards.

use std::path::Path;

use serde_json::{Value, json};

use super::original::OriginalModel;
use super::output::OutputTensor;
use crate::failure::Failure;
use smidgen_formats::copy_files::{CopyFilesError, copy_files, copy_templates};
use smidgen_formats::element::Element;
use smidgen_formats::folder_files::is_copied;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::copy::copy_tokenizer;
use smidgen_formats::whole_file::write_whole;

/// Writes config, tokenizer and the other files; returns notes for the user.
pub fn write_sidecars(
    original: &OriginalModel,
    outputs: &[OutputTensor],
    folder: &Path,
    element: Option<Element>,
) -> Result<Vec<String>, Failure> {
    let (mut config_changes, mut notes) = (element.is_some(), Vec::new());
    match original.model() {
        Model::Folder { .. } => {
            copy_sidecars(original.path(), folder)?;
            config_changes |= original.is_quantized();
        }
        Model::Gguf { .. } => {
            config_changes = true;
            // A model without a tokenizer is still usable.
            let unsaved = copy_tokenizer(original.model(), folder).err();
            notes.extend(unsaved.map(|error| format!("no tokenizer was written: {error}")));
        }
    }
    if config_changes {
        let text = format!("{:#}\n", with_element(original.model().config(), most_common(outputs)));
        write_whole(&folder.join("config.json"), |out| out.write_all(text.as_bytes()))
            .map_err(Failure::disk)?;
    }
    Ok(notes)
}

/// The element type with the most bytes.
fn most_common(outputs: &[OutputTensor]) -> Element {
    let candidates = [Element::F32, Element::Bf16, Element::F16];
    let bytes = |element: &Element| -> u64 {
        outputs.iter().filter(|output| output.element == *element).map(OutputTensor::bytes).sum()
    };
    candidates.into_iter().max_by_key(bytes).unwrap_or(Element::F32)
}

fn copy_sidecars(original: &Path, folder: &Path) -> Result<(), Failure> {
    let failed = |error: CopyFilesError| match error {
        CopyFilesError::Write { .. } => Failure::disk(error),
        CopyFilesError::Read { .. } | CopyFilesError::List { .. } => Failure::model(error),
    };
    copy_files(original, folder, is_copied).map_err(failed)?;
    copy_templates(original, folder).map_err(failed)
}

/// The config with the element type of the weights, for the model and for its text part. The key is `dtype` since
/// transformers 5, and `torch_dtype` before.
fn with_element(config: &Value, element: Element) -> Value {
    let word = match element {
        Element::F32 => "float32",
        Element::F16 => "float16",
        Element::Bf16 => "bfloat16",
        other => unreachable!("nothing is written as {other}"),
    };
    let mut config = config.clone();
    if let Some(settings) = config.as_object_mut() {
        settings.remove("quantization_config");
    }
    let set = |settings: &mut Value| {
        let present = ["dtype", "torch_dtype"].into_iter().filter(|key| settings.get(key).is_some());
        let present: Vec<&str> = present.collect();
        present.iter().for_each(|key| settings[key] = json!(word));
        !present.is_empty()
    };
    let in_text = config.get_mut("text_config").is_some_and(set);
    if !set(&mut config) && !in_text {
        // `rope_parameters` is a key of transformers 5.
        let key = if config.get("rope_parameters").is_some() { "dtype" } else { "torch_dtype" };
        config[key] = json!(word);
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_names_the_type_under_the_same_key() {
        let check = |config: Value, expected: Value| {
            assert_eq!(with_element(&config, Element::F16), expected);
        };
        check(json!({"a": 1, "dtype": "float32"}), json!({"a": 1, "dtype": "float16"}));
        check(json!({"torch_dtype": "bfloat16"}), json!({"torch_dtype": "float16"}));
        check(json!({"a": 1}), json!({"a": 1, "torch_dtype": "float16"}));
        check(
            json!({"text_config": {"dtype": "float32", "torch_dtype": "float32"}}),
            json!({"text_config": {"dtype": "float16", "torch_dtype": "float16"}}),
        );
        check(
            json!({"quantization_config": {"load_in_4bit": true}, "dtype": "bfloat16"}),
            json!({"dtype": "float16"}),
        );
    }
}
