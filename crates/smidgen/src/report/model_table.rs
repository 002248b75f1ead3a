//! The contents of a model folder or a GGUF file: architecture and sizes from its config, and tensors by storage.
//! Sizes have the names of Hugging Face configs; missing ones are omitted.
//! Left out: whether smidgen can train the model (`smidgen plan`).

use crate::console::columns::{Side, render_columns, render_field};
use serde_json::{Map, Value, json};
use smidgen_formats::model::Model;
use smidgen_formats::weight::Weight;
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;
use std::collections::BTreeMap;

/// Keys of `config.json` and their labels.
const SIZES: [(&str, &str); 8] = [
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden"),
    ("intermediate_size", "inner"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "kv heads"),
    ("head_dim", "head size"),
    ("vocab_size", "vocabulary"),
    ("max_position_embeddings", "positions"),
];

#[derive(Clone, Copy, Default)]
struct Stored {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

pub fn render_model(model: &Model) -> String {
    let mut text = format!("model in `{}`\n", model.path().display());
    let mut field = |name: &str, value: &str| text.push_str(&render_field(name, value));
    field("architecture", &architecture(model.config()).unwrap_or("not named".to_string()));
    for (key, label) in SIZES {
        if let Some(size) = setting(model.config(), key).and_then(Value::as_u64) {
            field(label, &Grouped(size).to_string());
        }
    }
    if let Some(method) = setting(model.config(), "quantization_config").and_then(|it| it.get("quant_method"))
    {
        field("quantized", method.as_str().unwrap_or("by an unknown method"));
    }
    if !model.has_weights() {
        field("weights", "none");
        return text;
    }
    field("files", &files(model).to_string());
    text.push('\n');
    let (stored, total) = by_storage(model);
    let row = |name: &str, stored: &Stored| {
        let elements = Grouped(stored.elements).to_string();
        vec![name.to_string(), stored.tensors.to_string(), elements, format_bytes(stored.bytes)]
    };
    let mut rows: Vec<Vec<String>> = stored.iter().map(|(storage, stored)| row(storage, stored)).collect();
    rows.push(row("total", &total));
    let headings =
        [("type", Side::Left), ("tensors", Side::Right), ("elements", Side::Right), ("bytes", Side::Right)];
    text.push_str(&render_columns(&headings, &rows));
    text
}

pub fn model_json(model: &Model) -> Value {
    let (stored, total) = by_storage(model);
    let object = |stored: &Stored| json!({"tensors": stored.tensors, "elements": stored.elements, "bytes": stored.bytes});
    let sizes: Map<String, Value> = (SIZES.iter())
        .filter_map(|(key, _)| Some((key.to_string(), setting(model.config(), key)?.clone())))
        .collect();
    let elements: Map<String, Value> =
        stored.iter().map(|(storage, stored)| (storage.clone(), object(stored))).collect();
    json!({
        "path": model.path(),
        "architecture": architecture(model.config()),
        "sizes": sizes,
        "files": files(model),
        "elements": elements,
        "total": object(&total),
    })
}

fn architecture(config: &Value) -> Option<String> {
    let class = config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let kind = config.get("model_type").and_then(Value::as_str);
    match (class, kind) {
        (Some(class), Some(kind)) => Some(format!("{class} ({kind})")),
        (Some(name), None) | (None, Some(name)) => Some(name.to_string()),
        (None, None) => None,
    }
}

/// A setting of the model, or of its text part if it has several parts.
fn setting<'a>(config: &'a Value, key: &str) -> Option<&'a Value> {
    let present = |settings: &'a Value| settings.get(key).filter(|value| !value.is_null());
    present(config).or_else(|| config.get("text_config").and_then(present))
}

/// Files that hold weights.
fn files(model: &Model) -> usize {
    match model {
        Model::Folder { folder, .. } => folder.files().len(),
        Model::Gguf { .. } => 1,
    }
}

fn by_storage(model: &Model) -> (BTreeMap<String, Stored>, Stored) {
    let mut stored: BTreeMap<String, Stored> = BTreeMap::new();
    let mut total = Stored::default();
    for weight in model.weight_names().into_iter().filter_map(|name| model.weight(name)) {
        let (rows, columns) = weight.rows_and_columns();
        let bytes = match (&weight, weight.storage()) {
            (Weight::Plain(tensor), _) => tensor.bytes(),
            (_, Some(storage)) => storage.bytes(rows, columns) as u64,
            (_, None) => 0,
        };
        for sums in [stored.entry(weight.element_name().to_lowercase()).or_default(), &mut total] {
            sums.tensors += 1;
            sums.elements += (rows * columns) as u64;
            sums.bytes += bytes;
        }
    }
    (stored, total)
}
