//! Experts in every layout and storage, and what is wrong with tensors that form no matrix.

use crate::element::Element;
use crate::model::Model;
use crate::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use crate::weight::Weight;
use smidgen_ir::{Storage, quant};
use std::path::Path;

const MODULE: &str = "model.layers.0.mlp.experts";
const ENDINGS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

struct Made {
    spec: TensorSpec,
    bytes: Vec<u8>,
}

fn made(name: String, element: Element, shape: &[usize], bytes: Vec<u8>) -> Made {
    Made { spec: TensorSpec { name, element, shape: shape.into() }, bytes }
}

/// Bytes that are neither equal nor in a short cycle.
fn noise(seed: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| ((seed * 7919 + at * 104_729) % 251) as u8).collect()
}

fn floats(seed: usize, count: usize) -> Vec<u8> {
    (0..count).flat_map(|at| ((seed * 31 + at * 17) as f32 * 0.731).sin().to_le_bytes()).collect()
}

fn write(folder: &Path, config: &str, tensors: &[Made]) -> Model {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), config).unwrap();
    let specs: Vec<TensorSpec> = tensors.iter().map(|made| made.spec.clone()).collect();
    let path = folder.join("model.safetensors");
    write_safetensors(&path, &pytorch_metadata(), &specs, |at, out| out.write_all(&tensors[at].bytes))
        .unwrap();
    Model::open_folder(folder).unwrap()
}

/// A tensor for each expert and projection, made by a function of its name, a number, its rows and its columns.
fn of_each(rows: usize, columns: usize, make: impl Fn(&str, usize, usize, usize) -> Vec<Made>) -> Vec<Made> {
    let mut tensors = Vec::new();
    for expert in 0..3 {
        for (place, ending) in ENDINGS.iter().enumerate() {
            let name = format!("{MODULE}.{expert}.{ending}");
            let (rows, columns) = if place == 2 { (columns, rows) } else { (rows, columns) };
            tensors.extend(make(&name, 10 * expert + place, rows, columns));
        }
    }
    tensors
}

/// Every number and every range of bytes of the joined matrices is that of the tensors one after the other.
#[track_caller]
fn is_joined(model: &Model, storage: Storage) {
    for (parameter, endings) in [("gate_up_proj", &ENDINGS[..2]), ("down_proj", &ENDINGS[2..])] {
        let name = format!("{MODULE}.{parameter}.weight");
        let weight = model.weight(&name).unwrap_or_else(|| panic!("{:?}", model.problem_of(&name)));
        assert_eq!((weight.storage(), weight.experts()), (Some(storage), Some(3)), "{name}");
        let names = (0..3).flat_map(|expert| {
            endings.iter().map(move |ending| format!("{MODULE}.{expert}.{ending}.weight"))
        });
        let want: Vec<f32> = names.flat_map(|name| model.weight_values(&name)).collect();
        assert_eq!(model.weight_values(&name), want, "{name}");
        let (rows, columns) = weight.rows_and_columns();
        let mut whole = vec![0; storage.bytes(rows, columns)];
        weight.read_stored(0, &mut whole).unwrap();
        let mut decoded = vec![0.0; rows * columns];
        quant::decode(storage, rows, columns, &whole, 0, &mut decoded);
        assert_eq!(decoded, want, "{name}");
        for first in [1, whole.len() / 3, whole.len() - 7] {
            let mut part = vec![0; (whole.len() - first).min(5000)];
            weight.read_stored(first as u64, &mut part).unwrap();
            assert_eq!(part, whole[first..first + part.len()], "{name} from {first}");
        }
        assert_eq!(weight.read_hash().unwrap(), weight.clone().read_hash().unwrap());
    }
    assert!(model.weight_names().iter().all(|name| !name.contains(".experts.0.")));
}

#[test]
fn experts_of_every_storage_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let plain = |name: &str, seed: usize, rows: usize, columns: usize| {
        let bytes = floats(seed, rows * columns);
        vec![made(format!("{name}.weight"), Element::F32, &[rows, columns], bytes)]
    };
    let config = r#"{"model_type": "qwen3_moe"}"#;
    is_joined(&write(&folder.path().join("plain"), config, &of_each(5, 6, plain)), Storage::F32);

    let fp8 = |per_row: bool| {
        move |name: &str, seed: usize, rows: usize, columns: usize| {
            let codes = noise(seed, rows * columns).into_iter().map(|byte| byte % 120).collect();
            let shape = if per_row { [rows, 1] } else { [rows.div_ceil(128), columns.div_ceil(128)] };
            let scale = if per_row { "weight_scale" } else { "weight_scale_inv" };
            let scales = floats(seed, shape[0] * shape[1]);
            vec![
                made(format!("{name}.weight"), Element::F8E4M3, &[rows, columns], codes),
                made(format!("{name}.{scale}"), Element::F32, &shape, scales),
            ]
        }
    };
    let rows = write(&folder.path().join("rows"), config, &of_each(5, 6, fp8(true)));
    is_joined(&rows, Storage::Fp8Rows);
    let blocks = write(&folder.path().join("blocks"), config, &of_each(128, 256, fp8(false)));
    is_joined(&blocks, Storage::Fp8Blocks);
    // A square of scales may not reach into the next expert.
    let ragged = write(&folder.path().join("ragged"), config, &of_each(100, 256, fp8(false)));
    assert_eq!(ragged.weight(&format!("{MODULE}.gate_up_proj.weight")).unwrap().storage(), None);

    let gptq = |name: &str, seed: usize, rows: usize, columns: usize| {
        let groups = columns / 32;
        let scales = (0..groups * rows).flat_map(|at| [(at % 256) as u8, 0x2c]).collect();
        let part = |part: &str| format!("{name}.{part}");
        vec![
            made(part("qweight"), Element::I32, &[columns / 8, rows], noise(seed, columns / 2 * rows)),
            made(part("qzeros"), Element::I32, &[groups, rows / 8], noise(seed + 1, groups * rows / 2)),
            made(part("scales"), Element::F16, &[groups, rows], scales),
        ]
    };
    let config =
        r#"{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "gptq", "group_size": 32}}"#;
    let model = write(&folder.path().join("gptq"), config, &of_each(64, 96, gptq));
    let storage = model.weight(&format!("{MODULE}.0.up_proj.weight")).unwrap().storage().unwrap();
    is_joined(&model, storage);
}

#[test]
fn what_forms_no_matrix_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let all = || {
        of_each(5, 6, |name, seed, rows, columns| {
            let bytes = floats(seed, rows * columns);
            vec![made(format!("{name}.weight"), Element::F32, &[rows, columns], bytes)]
        })
    };
    let problem = |place: &str, change: &dyn Fn(&mut Vec<Made>)| {
        let mut tensors = all();
        change(&mut tensors);
        let model = write(&folder.path().join(place), r#"{"model_type": "qwen3_moe"}"#, &tensors);
        let name = format!("{MODULE}.gate_up_proj.weight");
        assert!(model.weight(&name).is_none());
        model.problem_of(&name).unwrap().to_string()
    };
    let at = |tensors: &[Made], ending: &str| {
        tensors.iter().position(|made| made.spec.name.ends_with(ending)).unwrap()
    };
    let missing = problem("missing", &|tensors| {
        let place = at(tensors, "1.up_proj.weight");
        tensors.remove(place);
    });
    assert_eq!(missing, format!("`{MODULE}.1.up_proj.weight` is missing"));
    let other = problem("other", &|tensors| {
        let place = at(tensors, "2.gate_proj.weight");
        tensors[place].spec.shape = vec![6, 5];
    });
    let what = "is [6, 5], and other experts have another shape";
    assert_eq!(other, format!("`{MODULE}.2.gate_proj.weight` {what}"));
    let twice = problem("twice", &|tensors| {
        tensors.push(made(format!("{MODULE}.gate_up_proj"), Element::F32, &[3, 10, 6], floats(1, 180)));
    });
    assert!(twice.ends_with("is there twice: as one tensor and as a tensor for each expert"), "{twice}");
    let vector = problem("vector", &|tensors| {
        tensors.iter_mut().for_each(|made| made.spec.shape = vec![30]);
    });
    assert!(vector.contains("is [30]"), "{vector}");
}

/// A fused tensor says how many experts it has.
#[test]
fn fused_experts_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        made(format!("{MODULE}.gate_up_proj"), Element::F32, &[3, 10, 6], floats(1, 180)),
        made(format!("{MODULE}.down_proj"), Element::F32, &[3, 6, 5], floats(2, 90)),
    ];
    let model = write(folder.path(), r#"{"model_type": "qwen3_moe"}"#, &tensors);
    let weight = model.weight(&format!("{MODULE}.down_proj.weight")).unwrap();
    assert_eq!((weight.shape(), weight.experts()), (&[18, 5][..], Some(3)));
    assert!(matches!(weight, Weight::Joined(_)));
}
