//! Tests of GGUF: files that are written and read back, damaged files, and configs made from metadata.

mod model;
mod reading;

use std::path::Path;

use smidgen_ir::Storage;

use super::value::{Array, Metadata, Value};
use super::write::{GgufTensorSpec, write_gguf};

pub fn metadata(pairs: &[(&str, Value)]) -> Metadata {
    let mut metadata = Metadata::default();
    for (key, value) in pairs {
        metadata.insert(key, value.clone()).unwrap();
    }
    metadata
}

pub fn text(text: &str) -> Value {
    Value::String(text.to_string())
}

pub fn texts(texts: &[&str]) -> Value {
    Value::Array(Array::String(texts.iter().map(|text| text.to_string()).collect()))
}

pub fn spec(name: &str, dims: &[usize], storage: Storage) -> GgufTensorSpec {
    GgufTensorSpec { name: name.to_string(), dims: dims.to_vec(), storage }
}

/// Writes a file whose tensors hold zeros, except those in `given`.
pub fn write(path: &Path, metadata: &Metadata, specs: &[GgufTensorSpec], given: &[(&str, Vec<u8>)]) {
    write_gguf(path, metadata, specs, |position, writer| {
        let spec = &specs[position];
        let rows: usize = spec.dims[..spec.dims.len() - 1].iter().product();
        let zeros = vec![0; spec.storage.bytes(rows, spec.dims[spec.dims.len() - 1])];
        let given = given.iter().find(|(name, _)| *name == spec.name);
        writer.write_all(given.map_or(&zeros, |(_, bytes)| bytes))
    })
    .unwrap();
}
