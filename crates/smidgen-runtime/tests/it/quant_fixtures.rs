//! The quantized storages against recorded outputs of bitsandbytes, torch and gguf, bit for bit.
//!
//! `fixtures/quant/README.md` describes the records.

use crate::numbers::{assert_equal, bits, decode_reals};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use smidgen_ir::quant::{self, cascade_sum, dynamic_map};
use smidgen_ir::storage::bnb4_parts;
use smidgen_ir::{Block, Code4, Storage};

const CODES: [(Code4, &str); 2] = [(Code4::Nf4, "nf4"), (Code4::Fp4, "fp4")];

fn read_fixture(name: &str) -> Vec<u8> {
    let path = format!("{}/../../fixtures/quant/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    decode_reals(tensor.data())
}

fn decoded(storage: Storage, rows: usize, columns: usize, bytes: &[u8]) -> Vec<u32> {
    let mut values = vec![0.0; rows * columns];
    quant::decode(storage, rows, columns, bytes, 0, &mut values);
    bits(&values)
}

/// The numbers of `formula` in `generate.py`.
fn formula(count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|index| {
            let hashed = (index * 2_654_435_761 % (1 << 32)) >> 8;
            let block = (index / 64 % 17) as f32;
            (hashed as f32 / 16_777_216.0 - 0.5) * (1.0 / (1.0 + block))
        })
        .collect()
}

#[test]
fn four_bits_match_bitsandbytes() {
    let file = read_fixture("bitsandbytes.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let cases: Vec<&str> = file.names().iter().filter_map(|name| name.strip_suffix(".nf4.codes")).collect();
    assert!(cases.len() >= 12, "{cases:?}");
    for case in cases {
        let (rows, columns, values) = match file.tensor(&format!("{case}.values")) {
            Ok(values) => (values.shape()[0], values.shape()[1], floats(&values)),
            Err(_) => {
                let count = case.strip_prefix("formula-").unwrap().parse().unwrap();
                (1, count, formula(count))
            }
        };
        for (code, kind) in CODES {
            let recorded = |part: &str| file.tensor(&format!("{case}.{kind}.{part}"));
            for (double, prefix) in [(false, ""), (true, "double.")] {
                let storage = Storage::Bnb4 { code, double };
                let name = format!("{case} {storage}");
                let bytes = quant::encode(storage, rows, columns, &values).unwrap();
                let parts = bnb4_parts(values.len(), double);
                assert_equal(&name, &bytes[..parts.scales], recorded("codes").unwrap().data());
                let scales = recorded(&format!("{prefix}scales")).unwrap();
                assert_equal(
                    &format!("{name} scales"),
                    &bytes[parts.scales..parts.group_scales],
                    scales.data(),
                );
                if double {
                    let groups = recorded("double.groups").unwrap();
                    let got = &bytes[parts.group_scales..parts.offset];
                    assert_equal(&format!("{name} groups"), got, groups.data());
                    let offset = recorded("double.offset").unwrap();
                    assert_equal(&format!("{name} offset"), &bytes[parts.offset..], offset.data());
                }
                if let Ok(want) = recorded(&format!("{prefix}decoded")) {
                    let want = bits(&floats(&want));
                    assert_equal(&format!("{name} decoded"), &decoded(storage, rows, columns, &bytes), &want);
                }
            }
        }
    }
}

#[test]
fn int8_matches_bitsandbytes() {
    let file = read_fixture("bitsandbytes.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let recorded = |part: &str| file.tensor(&format!("int8.{part}")).unwrap();
    let (rows, columns) = (recorded("values").shape()[0], recorded("values").shape()[1]);
    let bytes = quant::encode(Storage::Int8Rows, rows, columns, &floats(&recorded("values"))).unwrap();
    assert_equal("codes", &bytes[..rows * columns], recorded("codes").data());
    assert_equal("scales", &bytes[rows * columns..], recorded("scales").data());
    let want = bits(&floats(&recorded("decoded")));
    assert_equal("decoded", &decoded(Storage::Int8Rows, rows, columns, &bytes), &want);
}

#[test]
fn the_dynamic_map_matches_bitsandbytes() {
    let file = read_fixture("bitsandbytes.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let want = floats(&file.tensor("map").unwrap());
    assert_equal("map", &bits(&dynamic_map::SIGNED_MAP), &bits(&want));
}

#[test]
fn means_are_summed_in_the_order_of_torch() {
    let file = read_fixture("bitsandbytes.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let sizes = file.tensor("mean.sizes").unwrap();
    let sizes = sizes.data().chunks_exact(4).map(|four| i32::from_le_bytes(four.try_into().unwrap()));
    let mut compared = 0;
    for (size, want) in sizes.zip(floats(&file.tensor("mean.values").unwrap())) {
        let numbers: Vec<f32> =
            (0..size as u64).map(|index| 1.0 / (1.0 + (index * 40503 % 65536) as f32)).collect();
        assert_eq!(cascade_sum::mean(&numbers), want, "the mean of {size} numbers");
        compared += 1;
    }
    assert!(compared > 30, "{compared} sizes");
}

#[test]
fn blocks_match_gguf() {
    let file = read_fixture("gguf.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let of_gguf = |block: &Block| !matches!(block, Block::Int4By32 | Block::Int4By128);
    for block in Block::ALL.into_iter().filter(of_gguf) {
        let bytes = file.tensor(&format!("{}.bytes", block.name())).unwrap();
        let want = file.tensor(&format!("{}.decoded", block.name())).unwrap();
        let (rows, columns) = (want.shape()[0], want.shape()[1]);
        let got = decoded(Storage::Gguf(block), rows, columns, bytes.data());
        assert_equal(block.name(), &got, &bits(&floats(&want)));
    }
}

#[test]
fn q8_0_encoding_matches_gguf() {
    let file = read_fixture("gguf.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let values = file.tensor("q8_0.values").unwrap();
    let (rows, columns) = (values.shape()[0], values.shape()[1]);
    let bytes = quant::encode(Storage::Gguf(Block::Q8_0), rows, columns, &floats(&values)).unwrap();
    assert_equal("q8_0", &bytes, file.tensor("q8_0.encoded").unwrap().data());
}

#[test]
fn k_encodings_match_ggml() {
    let file = read_fixture("k_quants.safetensors");
    let file = SafeTensors::deserialize(&file).unwrap();
    let values = file.tensor("values").unwrap();
    let (rows, columns) = (values.shape()[0], values.shape()[1]);
    for block in [Block::Q4K, Block::Q5K, Block::Q6K] {
        let bytes = quant::encode(Storage::Gguf(block), rows, columns, &floats(&values)).unwrap();
        assert_equal(block.name(), &bytes, file.tensor(block.name()).unwrap().data());
    }
}
