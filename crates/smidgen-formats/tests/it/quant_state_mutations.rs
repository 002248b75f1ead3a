//! Damaged 4-bit checkpoints: quantization states with other values, parts that are missing, renamed, cut or
//! of other types, and files with changed bytes.
//! Opening one may fail but must not panic, and must not need more memory than the file's size justifies.
//! Checkpoints that are accepted can be read to their end, as stored in any ranges, and row by row.
//! `SMIDGEN_MUTATIONS=100000 cargo test --release -p smidgen-formats --test it quant_state_mutations` is the
//! long run.

use crate::four_bit::{Part, edit_state, file_of, floats, part, parts_of};
use crate::mutation::json::{Change, change, changed};
use crate::mutation::{Mutation, allowed_bytes, cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use serde_json::json;
use smidgen_formats::model::Model;
use smidgen_formats::weight::{Weight, WeightRows};
use smidgen_ir::Code4;
use smidgen_ir::quant;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// One tensor of each code, whose rows end inside a block and inside a byte, and a plain one.
static VALID: LazyLock<Vec<Part>> = LazyLock::new(|| {
    let mut parts = parts_of("a.weight", Code4::Nf4, true, 3, 51);
    parts.extend(parts_of("b.weight", Code4::Fp4, false, 2, 33));
    parts.push(part("norm.weight", "F32", &[3], floats(&[1.0, 2.0, 3.0])));
    parts
});

#[derive(Clone, Debug)]
enum PartChange {
    Remove(usize),
    /// The part takes the name of another part, which is removed.
    Rename(usize, usize),
    /// The same bytes with another type.
    Retype(usize, &'static str),
    /// This many bytes more or fewer, as a vector.
    Resize(usize, isize),
    Bytes(usize, Vec<Mutation>),
    /// A second state with another quantization type.
    SecondState(usize, &'static str),
    /// The same elements with another dimension.
    Reshape(usize),
}

fn part_change() -> impl Strategy<Value = PartChange> {
    let at = || any::<usize>();
    let types = vec!["U8", "I8", "F16", "BF16", "F32", "I64", "BOOL", "F8_E4M3"];
    let words = vec!["nf4", "fp4", "", "nf4x"];
    prop_oneof![
        2 => at().prop_map(PartChange::Remove),
        1 => (at(), at()).prop_map(|(at, to)| PartChange::Rename(at, to)),
        2 => (at(), proptest::sample::select(types)).prop_map(|(at, dtype)| PartChange::Retype(at, dtype)),
        2 => (at(), -80..80_isize).prop_map(|(at, by)| PartChange::Resize(at, by)),
        3 => (at(), prop::collection::vec(mutation(), 1..4)).prop_map(|(at, all)| PartChange::Bytes(at, all)),
        1 => (at(), proptest::sample::select(words)).prop_map(|(at, word)| PartChange::SecondState(at, word)),
        1 => at().prop_map(PartChange::Reshape),
    ]
}

fn changed_parts(changes: &[PartChange]) -> Vec<Part> {
    let mut parts = VALID.clone();
    for change in changes {
        if parts.is_empty() {
            break;
        }
        let count = parts.len();
        match change {
            PartChange::Remove(at) => drop(parts.remove(at % count)),
            PartChange::Rename(at, to) if at % count != to % count => {
                let name = parts[to % count].name.clone();
                parts[at % count].name = name;
                parts.remove(to % count);
            }
            PartChange::Rename(..) => {}
            PartChange::Retype(at, dtype) => {
                parts[at % count].dtype = dtype;
                parts[at % count].make_vector();
            }
            PartChange::Resize(at, by) => {
                let part = &mut parts[at % count];
                part.data.resize(part.data.len().saturating_add_signed(*by), 7);
                part.make_vector();
            }
            PartChange::Bytes(at, mutations) => {
                let part = &mut parts[at % count];
                part.data = mutated(&part.data, mutations);
                part.make_vector();
            }
            PartChange::SecondState(at, word) => {
                let mut state = parts[at % count].clone();
                let name = state.name.split(".quant_state.").next().unwrap().to_string();
                state.name = format!("{name}.quant_state.bitsandbytes__{word}");
                parts.push(state);
            }
            PartChange::Reshape(at) => parts[at % count].shape.insert(0, 1),
        }
    }
    parts
}

/// Opens the checkpoint as the program does, and reads all of it. Returns the number of 4-bit tensors, or
/// `None` if the checkpoint was refused.
#[track_caller]
fn check_folder(folder: &Path, bytes: &[u8]) -> Option<usize> {
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let allowed = allowed_bytes(bytes.len());
    let (opened, peak_bytes) = peak_bytes_of(|| Model::open_folder(folder));
    assert!(peak_bytes <= allowed, "{peak_bytes} for {} bytes", bytes.len());
    let model = match opened {
        Ok(model) => model,
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains(&*folder.to_string_lossy()), "{error}");
            return None;
        }
    };
    let (found, peak_bytes) = peak_bytes_of(|| {
        let weights =
            model.weight_names().into_iter().map(|name| model.weight(name).expect("a name it gave"));
        weights.filter(|weight| check_weight(weight, bytes.len())).count()
    });
    assert!(peak_bytes <= allowed, "{peak_bytes} for {} bytes", bytes.len());
    Some(found)
}

/// Returns whether it is a 4-bit tensor, and checks it if so.
fn check_weight(weight: &Weight, file_bytes: usize) -> bool {
    let Weight::Bnb(bnb) = weight else { return false };
    let (rows, columns) = weight.rows_and_columns();
    assert_eq!(weight.shape(), [rows, columns]);
    let stored_bytes = bnb.storage.bytes(rows, columns);
    // The offset is not a tensor of its own but in the state.
    assert!(stored_bytes <= file_bytes + 4, "{stored_bytes} bytes of a file of {file_bytes}");
    let mut whole = vec![0; stored_bytes];
    weight.read_stored(0, &mut whole).unwrap();
    let mut pieced = vec![0; stored_bytes];
    for (index, piece) in pieced.chunks_mut(37).enumerate() {
        weight.read_stored(37 * index as u64, piece).unwrap();
    }
    assert!(whole == pieced);
    let (mut row, mut expected) = (vec![0.0; columns], vec![0.0; columns]);
    let mut reader = WeightRows::open(weight).unwrap();
    for index in [0, rows / 2, rows - 1] {
        reader.read(index, 1, &mut row).unwrap();
        quant::decode(bnb.storage, rows, columns, &whole, index * columns, &mut expected);
        let bits = |row: &[f32]| row.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&row), bits(&expected));
    }
    true
}

fn model_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    folder
}

const STATE_KEYS: &[&str] =
    &["quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"];

/// The valid file with changes to one of its states.
fn with_state(which: usize, changes: &[Change]) -> Vec<u8> {
    let mut parts = VALID.clone();
    let mut states: Vec<&mut Part> = parts.iter_mut().filter(|part| part.is_state()).collect();
    let count = states.len();
    let state = &mut *states[which % count];
    state.data = changed(&serde_json::from_slice(&state.data).unwrap(), changes);
    state.make_vector();
    file_of(&parts)
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(STATE_KEYS), 1..4)
}

fn part_changes() -> impl Strategy<Value = Vec<PartChange>> {
    prop::collection::vec(part_change(), 1..4)
}

#[test]
fn quant_states_with_other_values() {
    let folder = model_folder();
    proptest!(cases(), |((which, changes) in (any::<usize>(), changes()))| {
        check_folder(folder.path(), &with_state(which, &changes));
    });
}

#[test]
fn quant_states_with_damaged_parts() {
    let folder = model_folder();
    proptest!(cases(), |(changes in part_changes())| {
        check_folder(folder.path(), &file_of(&changed_parts(&changes)));
    });
}

#[test]
fn four_bit_files_with_damaged_bytes() {
    let folder = model_folder();
    let valid = file_of(&VALID);
    proptest!(cases(), |(mutations in prop::collection::vec(mutation(), 1..5))| {
        check_folder(folder.path(), &mutated(&valid, &mutations));
    });
}

/// A state with every pair of dimensions that could overflow, wrap or cause a large allocation.
#[test]
fn wrong_shapes_allocate_nothing() {
    let folder = model_folder();
    let sizes =
        [0, 1, 2, 3, 51, 153, 1 << 16, 1 << 31, 1 << 32, 1 << 63, u64::MAX / 2, u64::MAX - 1, u64::MAX];
    let mut accepted = Vec::new();
    for (rows, columns) in sizes.iter().flat_map(|rows| sizes.iter().map(move |columns| (*rows, *columns))) {
        let mut parts = VALID.clone();
        edit_state(&mut parts, |state| state["shape"] = json!([rows, columns]));
        if check_folder(folder.path(), &file_of(&parts)).is_some() {
            accepted.push([rows, columns]);
        }
    }
    // Shapes with the right number of codes. The reader does not know the shape that the model needs.
    assert_eq!(accepted, [[1, 153], [3, 51], [51, 3], [153, 1]]);
}

/// The changes lead to accepted and to refused files; otherwise the tests above would be worthless.
#[test]
fn some_damage_is_accepted_and_some_refused() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let folder = model_folder();
    assert_eq!(check_folder(folder.path(), &file_of(&VALID)), Some(2));
    let mut accepted = [0; 2];
    for which in 0..200 {
        let changes = changes().new_tree(&mut runner).unwrap().current();
        let found = check_folder(folder.path(), &with_state(which, &changes));
        accepted[0] += usize::from(found == Some(2));
        let changes = part_changes().new_tree(&mut runner).unwrap().current();
        let found = check_folder(folder.path(), &file_of(&changed_parts(&changes)));
        accepted[1] += usize::from(found.is_some());
    }
    assert!(accepted.iter().all(|accepted| (10..190).contains(accepted)), "{accepted:?} of 200");
}
