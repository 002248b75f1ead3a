//! A valid 4-bit checkpoint, and every way in which one can be invalid, each with its message.

use super::*;
use crate::four_bit::{Part, edit_state, file_of, floats, part, parts_of};
use crate::model::Model;
use expect_test::{Expect, expect};
use serde_json::json;
use std::fs;

const NAME: &str = "x.weight";

/// Opens a folder with these parts. In errors, the folder's path is replaced by `FOLDER`.
fn open(parts: &[Part]) -> (tempfile::TempDir, Result<Model, String>) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    fs::write(folder.path().join("model.safetensors"), file_of(parts)).unwrap();
    let place = folder.path().to_string_lossy().into_owned();
    let model = Model::open_folder(folder.path());
    (folder, model.map_err(|error| error.to_string().replace(&place, "FOLDER")))
}

/// A tensor whose rows end inside a block and inside a byte, with more than one group of scales.
fn valid() -> Vec<Part> {
    parts_of(NAME, Code4::Nf4, true, 401, 51)
}

fn check(edit: impl FnOnce(&mut Vec<Part>), expected: Expect) {
    let mut parts = valid();
    edit(&mut parts);
    expected.assert_eq(&open(&parts).1.unwrap_err());
}

fn check_state(edit: impl FnOnce(&mut serde_json::Value), expected: Expect) {
    check(|parts| edit_state(parts, edit), expected);
}

/// Changes the part whose name ends in `suffix`.
fn check_part(suffix: &str, edit: impl FnOnce(&mut Part), expected: Expect) {
    let name = format!("{NAME}{suffix}");
    check(|parts| edit(parts.iter_mut().find(|part| part.name == name).unwrap()), expected);
}

fn check_without(suffix: &str, expected: Expect) {
    let name = format!("{NAME}{suffix}");
    check(|parts| parts.retain(|part| part.name != name), expected);
}

#[test]
fn every_code_with_and_without_double_scales_is_found() {
    for (code, double) in [(Code4::Nf4, true), (Code4::Nf4, false), (Code4::Fp4, true), (Code4::Fp4, false)] {
        let mut parts = parts_of(NAME, code, double, 5, 51);
        parts.push(part("norm.weight", "F32", &[2], floats(&[1.0, 2.0])));
        let (_folder, model) = open(&parts);
        let model = model.unwrap();
        assert!(model.is_quantized());
        assert_eq!(model.weight_names(), ["norm.weight", NAME]);
        let weight = model.weight(NAME).unwrap();
        assert_eq!((weight.shape(), weight.storage()), (&[5, 51][..], Some(Storage::Bnb4 { code, double })));
        for part in parts.iter().filter(|part| part.name.len() > NAME.len()) {
            let is_part = part.name.starts_with(NAME);
            assert_eq!(model.weight(&part.name).is_none(), is_part, "{}", part.name);
        }
    }
}

/// `bnb_4bit_quant_storage` stores the same bytes as elements of another type.
#[test]
fn codes_may_be_stored_as_elements_of_another_type() {
    let mut parts = parts_of(NAME, Code4::Nf4, true, 8, 64);
    let (_folder, model) = open(&parts);
    let expected = stored(&model.unwrap());
    (parts[0].dtype, parts[0].shape) = ("BF16", vec![128, 1]);
    let (_folder, model) = open(&parts);
    assert_eq!(stored(&model.unwrap()), expected);
}

fn stored(model: &Model) -> Vec<u8> {
    let weight = model.weight(NAME).unwrap();
    let (rows, columns) = weight.rows_and_columns();
    let mut bytes = vec![0; weight.storage().unwrap().bytes(rows, columns)];
    weight.read_stored(0, &mut bytes).unwrap();
    bytes
}

/// The order is that of `Storage::Bnb4`: codes, scales, scales of scales, offset.
#[test]
fn the_parts_follow_each_other_in_memory() {
    let parts = valid();
    let (_folder, model) = open(&parts);
    let offset = quant::encode(
        Storage::Bnb4 { code: Code4::Nf4, double: true },
        401,
        51,
        &(0..401 * 51).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<_>>(),
    )
    .unwrap();
    let [codes, scales, _, groups] = [0, 1, 2, 3].map(|at| parts[at].data.as_slice());
    let expected = [codes, scales, groups, &offset[offset.len() - 4..]].concat();
    assert_eq!(groups.len(), 8);
    assert!(stored(&model.unwrap()) == expected);
}

#[test]
fn any_range_is_a_part_of_the_whole() {
    for double in [true, false] {
        let (_folder, model) = open(&parts_of(NAME, Code4::Fp4, double, 5, 51));
        let model = model.unwrap();
        let (whole, weight) = (stored(&model), model.weight(NAME).unwrap());
        for begin in 0..=whole.len() {
            for length in [0, 1, 2, 3, 5, 17, 131].into_iter().filter(|length| begin + length <= whole.len())
            {
                let mut piece = vec![0xAA; length];
                weight.read_stored(begin as u64, &mut piece).unwrap();
                assert_eq!(piece, whole[begin..begin + length], "{length} from {begin}");
            }
        }
    }
}

#[test]
fn states_with_unsupported_settings() {
    check_state(
        |state| state["quant_type"] = json!("int4"),
        expect![
            "`FOLDER`: the quantization state of `x.weight` is of type `int4`; `nf4` and `fp4` are supported"
        ],
    );
    check_state(
        |state| state["blocksize"] = json!(128),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has blocks of 128; only blocks of 64 are supported"
        ],
    );
    check_state(
        |state| state["nested_blocksize"] = json!(128),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has groups of 128 scales; only groups of 256 are supported"
        ],
    );
    check_state(
        |state| drop(state.as_object_mut().unwrap().remove("nested_blocksize")),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has groups of 0 scales; only groups of 256 are supported"
        ],
    );
    check_state(
        |state| state["nested_dtype"] = json!("float16"),
        expect!["`FOLDER`: the quantization state of `x.weight` has scales of scales that are not float32"],
    );
}

#[test]
fn states_without_a_usable_offset() {
    check_state(
        |state| drop(state.as_object_mut().unwrap().remove("nested_offset")),
        expect!["`FOLDER`: the quantization state of `x.weight` has no finite `nested_offset`"],
    );
    check_state(
        |state| state["nested_offset"] = json!(null),
        expect!["`FOLDER`: the quantization state of `x.weight` has no finite `nested_offset`"],
    );
    check_state(
        |state| state["nested_offset"] = json!(1e300),
        expect!["`FOLDER`: the quantization state of `x.weight` has no finite `nested_offset`"],
    );
    check_state(
        |state| state["nested_offset"] = json!("0.1"),
        expect![[
            r#"`FOLDER`: the quantization state of `x.weight` is not the expected JSON: invalid type: string "0.1", expected f64 at line 1 column 140"#
        ]],
    );
}

#[test]
fn shapes_that_are_not_the_matrix() {
    check_state(
        |state| state["shape"] = json!([u64::MAX, 2]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has the shape [18446744073709551615, 2], which is not a matrix"
        ],
    );
    check_state(
        |state| state["shape"] = json!([1u64 << 40, 1u64 << 40]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has the shape [1099511627776, 1099511627776], which is not a matrix"
        ],
    );
    check_state(
        |state| state["shape"] = json!([0, 51]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has the shape [0, 51], which is not a matrix"
        ],
    );
    check_state(
        |state| state["shape"] = json!([20451]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has the shape [20451], which is not a matrix"
        ],
    );
    check_state(
        |state| state["shape"] = json!([401, 51, 1]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` has the shape [401, 51, 1], which is not a matrix"
        ],
    );
    check_state(
        |state| state["shape"] = json!([-401, 51]),
        expect![
            "`FOLDER`: the quantization state of `x.weight` is not the expected JSON: invalid value: integer `-401`, expected usize at line 1 column 67"
        ],
    );
    check_state(
        |state| state["shape"] = json!([401, 52]),
        expect![
            "`FOLDER`: `x.weight`, a part of the 4-bit tensor `x.weight`, does not have the 10426 bytes of 20852 codes"
        ],
    );
    check_state(
        |state| state["shape"] = json!([u64::MAX, 1]),
        expect![
            "`FOLDER`: `x.weight`, a part of the 4-bit tensor `x.weight`, does not have the 9223372036854775808 bytes of 18446744073709551615 codes"
        ],
    );
}

#[test]
fn states_that_are_not_the_expected_json() {
    check_state(
        |state| *state = json!(null),
        expect![
            "`FOLDER`: the quantization state of `x.weight` is not the expected JSON: invalid type: null, expected struct State at line 1 column 4"
        ],
    );
    check_state(
        |state| drop(state.as_object_mut().unwrap().remove("shape")),
        expect![
            "`FOLDER`: the quantization state of `x.weight` is not the expected JSON: missing field `shape` at line 1 column 136"
        ],
    );
    let state = ".quant_state.bitsandbytes__nf4";
    check_part(
        state,
        |part| {
            part.data.truncate(40);
            part.make_vector();
        },
        expect![
            "`FOLDER`: the quantization state of `x.weight` is not the expected JSON: EOF while parsing a string at line 1 column 40"
        ],
    );
    check_part(
        state,
        |part| {
            part.data = vec![b' '; (64 << 10) + 1];
            part.make_vector();
        },
        expect!["`FOLDER`: the quantization state of `x.weight` is U8 of 65537 bytes, not JSON"],
    );
    check_part(
        state,
        |part| {
            part.dtype = "I8";
            part.make_vector();
        },
        expect!["`FOLDER`: the quantization state of `x.weight` is I8 of 153 bytes, not JSON"],
    );
    check_part(
        state,
        |part| {
            part.data = vec![0xff; 8];
            part.make_vector();
        },
        expect![
            "`FOLDER`: the quantization state of `x.weight` is not the expected JSON: expected value at line 1 column 1"
        ],
    );
}

#[test]
fn parts_that_are_missing() {
    check_without("", expect!["`FOLDER`: `x.weight`, a part of the 4-bit tensor `x.weight`, is missing"]);
    check_without(
        ".absmax",
        expect!["`FOLDER`: `x.weight.absmax`, a part of the 4-bit tensor `x.weight`, is missing"],
    );
    check_without(
        ".quant_map",
        expect!["`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, is missing"],
    );
    check_without(
        ".nested_absmax",
        expect!["`FOLDER`: `x.weight.nested_absmax`, a part of the 4-bit tensor `x.weight`, is missing"],
    );
    check_without(
        ".nested_quant_map",
        expect!["`FOLDER`: `x.weight.nested_quant_map`, a part of the 4-bit tensor `x.weight`, is missing"],
    );
}

#[test]
fn parts_that_are_too_short_or_too_long() {
    let resize = |by: isize| {
        move |part: &mut Part| {
            part.data.resize(part.data.len().saturating_add_signed(by), 0);
            part.make_vector();
        }
    };
    check_part(
        "",
        resize(-1),
        expect![
            "`FOLDER`: `x.weight`, a part of the 4-bit tensor `x.weight`, does not have the 10226 bytes of 20451 codes"
        ],
    );
    check_part(
        "",
        resize(1),
        expect![
            "`FOLDER`: `x.weight`, a part of the 4-bit tensor `x.weight`, does not have the 10226 bytes of 20451 codes"
        ],
    );
    check_part(
        ".absmax",
        resize(-1),
        expect![
            "`FOLDER`: `x.weight.absmax`, a part of the 4-bit tensor `x.weight`, does not have 320 numbers of type U8"
        ],
    );
    check_part(
        ".quant_map",
        resize(4),
        expect![
            "`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, does not have 16 numbers of type F32"
        ],
    );
    check_part(
        ".nested_absmax",
        resize(-4),
        expect![
            "`FOLDER`: `x.weight.nested_absmax`, a part of the 4-bit tensor `x.weight`, does not have 2 numbers of type F32"
        ],
    );
    check_part(
        ".nested_quant_map",
        resize(-1024),
        expect![
            "`FOLDER`: `x.weight.nested_quant_map`, a part of the 4-bit tensor `x.weight`, does not have 256 numbers of type F32"
        ],
    );
}

#[test]
fn parts_of_another_type() {
    let retype = |dtype: &'static str| {
        move |part: &mut Part| {
            part.dtype = dtype;
            part.make_vector();
        }
    };
    check_part(
        ".absmax",
        retype("I8"),
        expect![
            "`FOLDER`: `x.weight.absmax`, a part of the 4-bit tensor `x.weight`, does not have 320 numbers of type U8"
        ],
    );
    check_part(
        ".quant_map",
        retype("BF16"),
        expect![
            "`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, does not have 16 numbers of type F32"
        ],
    );
    check_part(
        ".nested_absmax",
        retype("I64"),
        expect![
            "`FOLDER`: `x.weight.nested_absmax`, a part of the 4-bit tensor `x.weight`, does not have 2 numbers of type F32"
        ],
    );
    // Scales of one byte, but a state without the second level.
    check_state(
        |state| {
            let state = state.as_object_mut().unwrap();
            state.retain(|key, _| !key.starts_with("nested_"));
        },
        expect![
            "`FOLDER`: `x.weight.absmax`, a part of the 4-bit tensor `x.weight`, does not have 320 numbers of type F32"
        ],
    );
}

#[test]
fn unknown_maps() {
    let replace = |at: usize, number: f32| {
        move |part: &mut Part| part.data[4 * at..4 * at + 4].copy_from_slice(&number.to_le_bytes())
    };
    check_part(
        ".quant_map",
        replace(3, -0.5),
        expect![
            "`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, is not the known map: entry 3 is -0.5, expected -0.3949175"
        ],
    );
    check_part(
        ".quant_map",
        replace(15, f32::NAN),
        expect![
            "`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, is not the known map: entry 15 is NaN, expected 1"
        ],
    );
    check_part(
        ".nested_quant_map",
        replace(255, 0.5),
        expect![
            "`FOLDER`: `x.weight.nested_quant_map`, a part of the 4-bit tensor `x.weight`, is not the known map: entry 255 is 0.5, expected 1"
        ],
    );
    // Codes of one type under the map of another.
    check(
        |parts| {
            edit_state(parts, |state| state["quant_type"] = json!("fp4"));
        },
        expect![
            "`FOLDER`: `x.weight.quant_map`, a part of the 4-bit tensor `x.weight`, is not the known map: entry 0 is -1, expected 0"
        ],
    );
}

#[test]
fn a_tensor_has_one_state() {
    check(
        |parts| {
            let mut second = parts.last().unwrap().clone();
            second.name = format!("{NAME}.quant_state.bitsandbytes__fp4");
            parts.push(second);
        },
        expect![
            "`FOLDER`: the quantization state of `x.weight` is there twice, the second time as `x.weight.quant_state.bitsandbytes__nf4`"
        ],
    );
}
