//! Weights of every kind: ranges and rows agree with the whole weight, and the changes of GGUF converters are
//! undone. Models are the committed fixtures, and files whose numbers encode their position.

use super::*;
use crate::gguf::value::{Metadata, Value};
use crate::gguf::write::{GgufTensorSpec, write_gguf};
use crate::model::Model;
use half::f16;
use std::path::PathBuf;

fn fixture(place: &str) -> Model {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(place);
    Model::open(&path).unwrap_or_else(|error| panic!("{error}"))
}

/// Plain weights of two types, 4-bit weights with one and with two levels of scales, GGUF files of all
/// architectures.
const MODELS: [&str; 13] = [
    "llama-gqa-tied/model",
    "qwen2-nf4/model",
    "llama-f16-some-layers/model",
    "llama-bnb-nf4/model",
    "llama-bnb-fp4/model",
    "gguf-gemma2/model.gguf",
    "gguf-gemma3/model.gguf",
    "gguf-kquants/model.gguf",
    "gguf-llama/model.gguf",
    "gguf-llama3-rope/model.gguf",
    "gguf-phi3/model.gguf",
    "gguf-qwen2/model.gguf",
    "gguf-qwen3/model.gguf",
];

fn stored(weight: &Weight) -> Vec<u8> {
    let (rows, columns) = weight.rows_and_columns();
    let mut bytes = vec![0; weight.storage().unwrap().bytes(rows, columns)];
    weight.read_stored(0, &mut bytes).unwrap();
    bytes
}

fn every_weight(mut check: impl FnMut(&str, &Weight)) {
    for place in MODELS {
        let model = fixture(place);
        assert!(!model.weight_names().is_empty(), "{place}");
        for name in model.weight_names() {
            check(&format!("{place}: {name}"), &model.weight(name).unwrap());
        }
    }
}

#[test]
fn any_range_is_a_part_of_the_whole() {
    every_weight(|name, weight| {
        let whole = stored(weight);
        // Primes, so that pieces begin inside elements, rows and blocks.
        for length in [7, 61, 1009, 4099] {
            let mut pieced = vec![0xAA; whole.len()];
            for (index, piece) in pieced.chunks_mut(length).enumerate() {
                weight.read_stored((index * length) as u64, piece).unwrap();
            }
            assert!(pieced == whole, "{name} in pieces of {length}");
        }
        let mut last = [0];
        weight.read_stored(whole.len() as u64 - 1, &mut last).unwrap();
        assert_eq!(Some(&last[0]), whole.last(), "{name}");
        weight.read_stored(whole.len() as u64, &mut []).unwrap();
    });
}

#[test]
fn rows_are_equal_to_the_decoded_whole() {
    every_weight(|name, weight| {
        let (rows, columns) = weight.rows_and_columns();
        let mut expected = vec![0.0; rows * columns];
        quant::decode(weight.storage().unwrap(), rows, columns, &stored(weight), 0, &mut expected);
        let mut reader = WeightRows::open(weight).unwrap();
        for step in [1, 3, rows] {
            let mut found = vec![0.0; rows * columns];
            for first in (0..rows).step_by(step) {
                let count = step.min(rows - first);
                let target = &mut found[first * columns..(first + count) * columns];
                reader.read(first, count, target).unwrap();
            }
            assert!(found == expected, "{name}, {step} rows at a time");
        }
        // Rows can be read in any order: a reader has no position.
        let mut last = vec![0.0; columns];
        reader.read(rows - 1, 1, &mut last).unwrap();
        assert!(last == expected[(rows - 1) * columns..], "{name}");
    });
}

#[test]
fn element_types_without_training_support_have_no_dtype() {
    let known: Vec<_> = Element::ALL.iter().filter_map(|element| element.dtype()).collect();
    assert_eq!(known.len(), 3);
    assert_eq!(Element::U8.dtype(), None);
    assert_eq!(Element::I64.dtype(), None);
}

/// A model with eight channels, two query heads of four channels, and one key head.
fn gguf(architecture: &str, tensors: &[(&str, &[usize], Storage, Vec<u8>)]) -> (tempfile::TempDir, Model) {
    let mut metadata = Metadata::default();
    metadata.insert("general.architecture", Value::String(architecture.into())).unwrap();
    for (key, number) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 8),
        ("feed_forward_length", 8),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 4),
        ("attention.value_length", 4),
    ] {
        metadata.insert(&format!("{architecture}.{key}"), Value::U32(number)).unwrap();
    }
    let epsilon = format!("{architecture}.attention.layer_norm_rms_epsilon");
    metadata.insert(&epsilon, Value::F32(1e-5)).unwrap();
    let spec = |(name, dims, storage, _): &(&str, &[usize], Storage, Vec<u8>)| GgufTensorSpec {
        name: name.to_string(),
        dims: dims.to_vec(),
        storage: *storage,
    };
    let embedding = ("token_embd.weight", &[3, 8][..], Storage::F32, vec![0; 96]);
    let all: Vec<_> = [&[embedding][..], tensors].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let specs: Vec<GgufTensorSpec> = all.iter().map(spec).collect();
    write_gguf(&path, &metadata, &specs, |position, writer| writer.write_all(&all[position].3)).unwrap();
    let model = Model::open(&path).unwrap();
    (folder, model)
}

fn floats(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// The checkpoint rows in file order: the two halves of each head of four rows are interleaved.
const FILE_ROWS: [usize; 8] = [0, 2, 1, 3, 4, 6, 5, 7];

#[test]
fn rows_of_queries_and_keys_are_in_the_order_of_the_checkpoint() {
    // Row r of the checkpoint holds r, r + 0.125, ...
    let row = |row: usize| (0..8).map(move |column| row as f32 + column as f32 / 8.0);
    let interleaved: Vec<f32> = FILE_ROWS.iter().flat_map(|r| row(*r)).collect();
    let straight: Vec<f32> = (0..8).flat_map(row).collect();
    let bias: Vec<f32> = FILE_ROWS.iter().map(|r| *r as f32).collect();
    let halves = |numbers: &[f32]| numbers.iter().flat_map(|n| f16::from_f32(*n).to_le_bytes()).collect();
    let f16 = Storage::Plain(DType::F16);
    let (_folder, model) = gguf(
        "llama",
        &[
            ("blk.0.attn_q.weight", &[8, 8], Storage::F32, floats(&interleaved)),
            ("blk.0.attn_k.weight", &[4, 8], f16, halves(&interleaved[..32])),
            ("blk.0.attn_v.weight", &[4, 8], f16, halves(&straight[..32])),
            ("blk.0.attn_q.bias", &[8], Storage::F32, floats(&bias)),
        ],
    );
    let weight = |name: &str| model.weight(&format!("model.layers.0.self_attn.{name}")).unwrap();
    assert!(stored(&weight("q_proj.weight")) == floats(&straight));
    assert!(stored(&weight("k_proj.weight")) == halves(&straight[..32]));
    assert!(stored(&weight("v_proj.weight")) == halves(&straight[..32]));
    assert!(stored(&weight("q_proj.bias")) == floats(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
    for name in ["q_proj.weight", "k_proj.weight", "q_proj.bias"] {
        let weight = weight(name);
        let whole = stored(&weight);
        for begin in 0..whole.len() {
            let length = (whole.len() - begin).min(2 * 32 + 5);
            let mut piece = vec![0; length];
            weight.read_stored(begin as u64, &mut piece).unwrap();
            assert!(piece == whole[begin..begin + length], "{name} from {begin}");
        }
    }
    let mut two_rows = [0.0; 16];
    WeightRows::open(&weight("k_proj.weight")).unwrap().read(1, 2, &mut two_rows).unwrap();
    assert_eq!(two_rows.to_vec(), straight[8..24]);
}

#[test]
fn the_one_that_converters_add_to_norms_of_gemma_is_subtracted() {
    let numbers = [0.5f32, -0.25, 0.0, 2.0, -1.0, 0.125, 3.0, -0.5];
    let stored_numbers: Vec<f32> = numbers.iter().map(|number| number + 1.0).collect();
    let halves: Vec<u8> = stored_numbers.iter().flat_map(|n| f16::from_f32(*n).to_le_bytes()).collect();
    let (_folder, model) = gguf(
        "gemma2",
        &[
            ("output_norm.weight", &[8], Storage::F32, floats(&stored_numbers)),
            ("blk.0.attn_norm.weight", &[8], Storage::Plain(DType::F16), halves),
        ],
    );
    let expected = floats(&numbers);
    for name in ["model.norm.weight", "model.layers.0.input_layernorm.weight"] {
        let weight = model.weight(name).unwrap();
        // Subtracting 1 can give a number that f16 cannot represent, so norms are f32 whatever the file has.
        assert_eq!(weight.storage(), Some(Storage::F32));
        assert!(stored(&weight) == expected, "{name}");
        for begin in 0..expected.len() {
            for end in begin..=expected.len() {
                let mut piece = vec![0; end - begin];
                weight.read_stored(begin as u64, &mut piece).unwrap();
                assert!(piece == expected[begin..end], "{name} {begin}..{end}");
            }
        }
        let mut rows = [0.0; 3];
        WeightRows::open(&weight).unwrap().read(4, 3, &mut rows).unwrap();
        assert_eq!(rows, [-1.0, 0.125, 3.0]);
    }
}

/// No model uses a vector stored in blocks, so nothing is subtracted from it.
#[test]
fn a_norm_in_blocks_keeps_its_storage() {
    let blocks = Storage::Gguf(smidgen_ir::Block::Q8_0);
    for architecture in ["llama", "gemma2"] {
        let (_folder, model) =
            gguf(architecture, &[("output_norm.weight", &[32], blocks, vec![0; blocks.bytes(1, 32)])]);
        let weight = model.weight("model.norm.weight").unwrap();
        assert_eq!(weight.storage(), Some(blocks), "{architecture}");
        assert_eq!(weight.element_name(), "q8_0");
    }
}

/// A weight has the same hash whether it is read whole, in pieces or row by row.
#[test]
fn the_hash_does_not_depend_on_how_a_weight_is_read() {
    every_weight(|name, weight| {
        let expected = weight.read_hash().unwrap();
        let check = |read: &dyn Fn(&Weight)| {
            let hash = Arc::new(ContentHash::default());
            read(&weight.clone().hashed(&hash));
            assert_eq!(hash.finish(weight.file_bytes()).as_ref(), Some(&expected), "{name}");
        };
        check(&|weight| drop(stored(weight)));
        let (rows, columns) = weight.rows_and_columns();
        check(&|weight| {
            let mut reader = WeightRows::open(weight).unwrap();
            let mut row = vec![0.0; columns];
            (0..rows).rev().for_each(|number| reader.read(number, 1, &mut row).unwrap());
        });
        if let Weight::Plain(tensor) = weight {
            let (hash, mut bytes) = (ContentHash::default(), vec![0; tensor.bytes() as usize]);
            tensor.read_at(0, &mut bytes).unwrap();
            hash.add(0, &bytes);
            assert_eq!(hash.finish(tensor.bytes()), Some(expected), "{name}");
        }
    });
}
