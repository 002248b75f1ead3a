//! Quantizing piece by piece at load gives the same bytes as quantizing the whole tensor, for every source.

use super::*;
use crate::four_bit::{Part, file_of, floats, part, parts_of};
use smidgen_formats::encode::{PIECE_ELEMENTS, rows_at_a_time};
use smidgen_formats::weight::WeightRows;
use smidgen_ir::Code4;
use smidgen_ir::quant;
use std::path::{Path, PathBuf};

fn fixture(place: &str) -> Model {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(place);
    Model::open(&path).unwrap_or_else(|error| panic!("{error}"))
}

fn model_of(folder: &Path, parts: &[Part]) -> Model {
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    std::fs::write(folder.join("model.safetensors"), file_of(parts)).unwrap();
    Model::open(folder).unwrap()
}

const STORAGES: [Storage; 7] = [
    Storage::Int8Rows,
    Storage::Fp8Rows,
    Storage::Bnb4 { code: Code4::Nf4, double: true },
    Storage::Bnb4 { code: Code4::Nf4, double: false },
    Storage::F32,
    Storage::Plain(DType::Bf16),
    Storage::Plain(DType::F16),
];

#[track_caller]
fn check_encoding(name: &str, weight: &Weight) {
    let (rows, columns) = weight.rows_and_columns();
    let mut values = vec![0.0; rows * columns];
    WeightRows::open(weight).unwrap().read(0, rows, &mut values).unwrap();
    for storage in STORAGES {
        let expected = quant::encode(storage, rows, columns, &values).unwrap();
        for threads in [1, 3] {
            let mut found = vec![0xAA; expected.len()];
            encode_weight(weight, storage, &mut found, threads).unwrap();
            assert!(found == expected, "{name} as {storage} on {threads} threads");
        }
        if storage.plain().is_some() {
            let mut source = WeightRows::open(weight).unwrap();
            let mut found = vec![0xAA; expected.len()];
            // Pieces that end inside rows, and inside elements.
            for (index, piece) in found.chunks_mut(101).enumerate() {
                encode_part(&mut source, storage, 101 * index, piece).unwrap();
            }
            assert!(found == expected, "{name} as {storage} in pieces");
        }
    }
}

#[test]
fn every_matrix_of_every_kind_of_model_is_encoded_as_a_whole() {
    for place in [
        "qwen2-nf4/model",
        "llama-f16-some-layers/model",
        "llama-bnb-nf4/model",
        "llama-bnb-fp4/model",
        "gguf-llama/model.gguf",
        "gguf-kquants/model.gguf",
        "gguf-gemma2/model.gguf",
    ] {
        let model = fixture(place);
        for name in model.weight_names() {
            let weight = model.weight(name).unwrap();
            check_encoding(&format!("{place}: {name}"), &weight);
        }
    }
}

/// There are several pieces, the last one short, and blocks that span rows.
#[test]
fn pieces_change_no_byte() {
    let folder = tempfile::tempdir().unwrap();
    let shapes = [(40_001, 1), (1_001, 50), (700, 64), (401, 100), (3, 18_944), (130, 257)];
    let parts: Vec<Part> = shapes
        .iter()
        .map(|&(rows, columns)| {
            let values: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.37).sin() * 0.02).collect();
            part(format!("{columns}"), "F32", &[rows as u64, columns as u64], floats(&values))
        })
        .collect();
    let model = model_of(folder.path(), &parts);
    for (rows, columns) in shapes {
        let weight = model.weight(&columns.to_string()).unwrap();
        assert_eq!(weight.rows_and_columns(), (rows, columns));
        let step = rows_at_a_time(columns, 64);
        assert!(step < rows && rows % step != 0 || columns == 18_944, "{rows} rows in steps of {step}");
        check_encoding(&format!("({rows}, {columns})"), &weight);
    }
}

#[test]
fn a_4_bit_tensor_is_decoded_and_encoded_again() {
    for (code, double) in [(Code4::Nf4, true), (Code4::Fp4, false)] {
        let folder = tempfile::tempdir().unwrap();
        let model = model_of(folder.path(), &parts_of("x", code, double, 1_001, 50));
        check_encoding("x", &model.weight("x").unwrap());
    }
}

/// 16384 / columns rows, rounded up to whole blocks: gcd(50, 64) = 2 needs a multiple of 32 rows, gcd(100, 64) = 4
/// one of 16, an odd number of columns one of 64.
#[test]
fn rows_at_a_time_are_whole_blocks() {
    let of_blocks = [1, 50, 64, 100, 18_944, 18_945].map(|columns| rows_at_a_time(columns, 64));
    assert_eq!(of_blocks, [16_384, 352, 256, 176, 1, 64]);
    let of_rows = [1, 50, 64, 100, 18_944, 18_945].map(|columns| rows_at_a_time(columns, columns));
    assert_eq!(of_rows, [16_384, 327, 256, 163, 1, 1]);
    for columns in 1..400 {
        for unit in [1, 32, 64, 256, columns] {
            let rows = rows_at_a_time(columns, unit);
            assert!((rows * columns).is_multiple_of(unit), "{rows} rows of {columns} in units of {unit}");
            assert!(rows * columns <= PIECE_ELEMENTS + unit * columns, "{rows} rows of {columns}");
        }
    }
}

#[test]
fn an_unsupported_encoding_is_an_error() {
    let model = fixture("gguf-llama/model.gguf");
    let weight = model.weight("model.layers.0.mlp.up_proj.weight").unwrap();
    let storage = Storage::Gguf(smidgen_ir::Block::Iq4Nl);
    let (rows, columns) = weight.rows_and_columns();
    let error = encode_weight(&weight, storage, &mut vec![0; storage.bytes(rows, columns)], 1).unwrap_err();
    assert_eq!(error.to_string(), "nothing encodes weights as iq4_nl");
}
