//! Builds small 4-bit checkpoints from parts with the names and types of bitsandbytes, for tests that change
//! some of them.
//!
//! Unit tests and tests of damaged files share it. The numbers do not matter here; the fixtures have real
//! checkpoints.

// Each user needs only some of these functions.
#![allow(dead_code)]

use serde_json::{Value, json};
use smidgen_ir::quant;
use smidgen_ir::storage::bnb4_parts;
use smidgen_ir::{Code4, Storage};

/// One tensor of a safetensors file.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub data: Vec<u8>,
}

pub fn part(name: impl Into<String>, dtype: &'static str, shape: &[u64], data: Vec<u8>) -> Part {
    Part { name: name.into(), dtype, shape: shape.to_vec(), data }
}

pub fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

impl Part {
    pub fn is_state(&self) -> bool {
        self.name.contains(".quant_state.")
    }

    /// Makes the shape a vector of all bytes. The type becomes U8 if the bytes are not a whole number of
    /// elements.
    pub fn make_vector(&mut self) {
        let bytes = self.data.len() as u64;
        if !bytes.is_multiple_of(type_bytes(self.dtype)) {
            self.dtype = "U8";
        }
        self.shape = vec![bytes / type_bytes(self.dtype)];
    }
}

fn type_bytes(dtype: &str) -> u64 {
    match dtype {
        "F16" | "BF16" => 2,
        "F32" | "U32" => 4,
        "I64" => 8,
        _ => 1,
    }
}

/// The parts of a 4-bit matrix of `rows` by `columns`; the last one is its state.
pub fn parts_of(name: &str, code: Code4, double: bool, rows: usize, columns: usize) -> Vec<Part> {
    let values: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.7).sin()).collect();
    parts_of_values(name, code, double, rows, columns, &values)
}

pub fn parts_of_values(
    name: &str,
    code: Code4,
    double: bool,
    rows: usize,
    columns: usize,
    values: &[f32],
) -> Vec<Part> {
    let stored = quant::encode(Storage::Bnb4 { code, double }, rows, columns, values)
        .expect("4-bit codes are encoded");
    let at = bnb4_parts(values.len(), double);
    let word = match code {
        Code4::Nf4 => "nf4",
        Code4::Fp4 => "fp4",
    };
    let mut state =
        json!({"quant_type": word, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]});
    let scales = if double { "U8" } else { "F32" };
    let blocks = at.blocks as u64;
    let mut parts = vec![
        part(name, "U8", &[at.scales as u64, 1], stored[..at.scales].to_vec()),
        part(format!("{name}.absmax"), scales, &[blocks], stored[at.scales..at.group_scales].to_vec()),
        part(format!("{name}.quant_map"), "F32", &[16], floats(quant::bnb4::code_values(code))),
    ];
    if double {
        let groups = stored[at.group_scales..at.offset].to_vec();
        let offset: [u8; 4] = stored[at.offset..].try_into().expect("an f32");
        let map = floats(&quant::dynamic_map::SIGNED_MAP);
        parts.push(part(format!("{name}.nested_absmax"), "F32", &[blocks.div_ceil(256)], groups));
        parts.push(part(format!("{name}.nested_quant_map"), "F32", &[256], map));
        state["nested_blocksize"] = json!(256);
        state["nested_dtype"] = json!("float32");
        state["nested_offset"] = json!(f32::from_le_bytes(offset));
    }
    let state = state.to_string().into_bytes();
    let state_name = format!("{name}.quant_state.bitsandbytes__{word}");
    parts.push(part(state_name, "U8", &[state.len() as u64], state));
    parts
}

/// The tensors of a safetensors file.
pub fn parts_of_file(bytes: &[u8]) -> Vec<Part> {
    parts_of_file_with(bytes, &[])
}

/// The tensors of a safetensors file that also has these types.
pub fn parts_of_file_with(bytes: &[u8], others: &[&'static str]) -> Vec<Part> {
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let tensors = header.as_object().expect("a table").iter().filter(|(name, _)| *name != "__metadata__");
    let parts = tensors.map(|(name, tensor)| {
        let number = |value: &Value| value.as_u64().expect("a number");
        let shape: Vec<u64> = tensor["shape"].as_array().expect("a list").iter().map(number).collect();
        let mut known = ["U8", "F32", "BF16", "F16"].iter().chain(others);
        let dtype = *known.find(|dtype| tensor["dtype"] == **dtype).expect("a type of the fixtures");
        let [begin, end] = [0, 1].map(|at| 8 + length + number(&tensor["data_offsets"][at]) as usize);
        part(name, dtype, &shape, bytes[begin..end].to_vec())
    });
    parts.collect()
}

/// Changes the first state among the parts.
pub fn edit_state(parts: &mut [Part], edit: impl FnOnce(&mut Value)) {
    let part = parts.iter_mut().find(|part| part.is_state()).expect("a state");
    let mut state = serde_json::from_slice(&part.data).expect("JSON");
    edit(&mut state);
    part.data = state.to_string().into_bytes();
    part.make_vector();
}

/// A safetensors file with these parts and a matching header. If two parts have the same name, the second is
/// dropped.
pub fn file_of(parts: &[Part]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for part in parts {
        if !header.contains_key(&part.name) {
            let offsets = [data.len(), data.len() + part.data.len()];
            header.insert(
                part.name.clone(),
                json!({"dtype": part.dtype, "shape": part.shape, "data_offsets": offsets}),
            );
            data.extend_from_slice(&part.data);
        }
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}
