//! The header of a safetensors file: JSON with each tensor's element type, shape and offsets.
//! The safetensors library parses the entries. After `parse_header` returns, names are distinct, sizes match
//! shapes, and the tensors fill the data of the file without gaps or overlaps, so readers need no further
//! checks.
//! It allocates in proportion to the size of the header, never by a number found in it.
//! Left out: reading the file, and tensor data.

use std::collections::BTreeMap;

use ::safetensors::tensor::TensorInfo;
use serde_json::value::RawValue;

use super::problem::{PREFIX_BYTES, SafetensorsProblem};
use crate::element::Element;
use crate::json_file::Entries;
use crate::open_file::{FileProblem, first_duplicate};

/// One tensor of a file. Its bytes are inside the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    pub name: String,
    pub element: Element,
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub file_offset: u64,
    pub bytes: u64,
}

pub struct Header {
    /// In file order; tensors at the same offset, of which all but one are empty, by name.
    pub tensors: Vec<TensorEntry>,
    pub metadata: BTreeMap<String, String>,
}

/// Parses and checks the JSON between the length prefix and the data, for a file of `file_bytes`.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, SafetensorsProblem> {
    let Entries(entries): Entries<&RawValue> =
        serde_json::from_slice(json).map_err(SafetensorsProblem::HeaderNotJson)?;
    if let Some(name) = first_duplicate(entries.iter().map(|(name, _)| name.as_str())) {
        return Err(FileProblem::DuplicateTensor { tensor: name.to_string() }.into());
    }
    let mut metadata = BTreeMap::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, json) in entries {
        let parsed = if name == "__metadata__" {
            serde_json::from_str::<Option<_>>(json.get()).map(|found| metadata = found.unwrap_or_default())
        } else {
            serde_json::from_str(json.get()).map(|info: TensorInfo| tensors.push((name.clone(), info)))
        };
        parsed.map_err(|source| SafetensorsProblem::BadEntry { name, source })?;
    }
    tensors.sort_by(|(left_name, left), (right_name, right)| {
        (left.data_offsets, left_name).cmp(&(right.data_offsets, right_name))
    });
    let data_offset = PREFIX_BYTES + json.len() as u64;
    let mut end = 0;
    let place = |(name, info)| place_tensor(name, info, &mut end, data_offset);
    let tensors: Vec<TensorEntry> = tensors.into_iter().map(place).collect::<Result<_, _>>()?;
    let needed_bytes = data_offset.saturating_add(end);
    let incomplete = |tensor: &&TensorEntry| tensor.file_offset.saturating_add(tensor.bytes) > file_bytes;
    if let Some(tensor) = tensors.iter().find(incomplete) {
        let tensor = tensor.name.clone();
        return Err(FileProblem::Truncated { tensor, file_bytes, needed_bytes }.into());
    }
    if file_bytes != needed_bytes {
        return Err(SafetensorsProblem::TrailingBytes { file_bytes, needed_bytes });
    }
    Ok(Header { tensors, metadata })
}

/// Checks that a tensor's offsets fit its shape, and that it begins at `end`, where the previous tensor ends.
fn place_tensor(
    name: String,
    TensorInfo { dtype, shape, data_offsets: (from, to) }: TensorInfo,
    end: &mut u64,
    data_offset: u64,
) -> Result<TensorEntry, SafetensorsProblem> {
    let Some(element) = Element::from_name(&dtype.to_string()) else {
        return Err(SafetensorsProblem::UnsupportedElement { tensor: name, dtype });
    };
    let (begin, previous_end) = (from as u64, std::mem::replace(end, to as u64));
    let Some(bytes) = element.tensor_bytes(&shape).filter(|bytes| begin.checked_add(*bytes) == Some(*end))
    else {
        return Err(SafetensorsProblem::Size { tensor: name, shape, element, begin, end: *end });
    };
    if begin != previous_end {
        return Err(SafetensorsProblem::NotContiguous { tensor: name, begin, previous_end });
    }
    Ok(TensorEntry { name, element, shape, file_offset: data_offset.saturating_add(begin), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_ir::grouped_digits::Grouped;

    /// Parses `json` as the header of a file with `data_bytes` of data.
    fn parse(json: &str, data_bytes: u64) -> Result<Header, SafetensorsProblem> {
        parse_header(json.as_bytes(), 8 + json.len() as u64 + data_bytes)
    }

    #[track_caller]
    fn check(json: &str, data_bytes: u64, expected: &str) {
        match parse(json, data_bytes) {
            Ok(_) => panic!("accepted; expected: {expected}"),
            Err(problem) => assert_eq!(problem.to_string(), expected),
        }
    }

    #[test]
    fn tensors_come_in_file_order_with_absolute_offsets() {
        let json = concat!(
            r#"{"b":{"dtype":"F32","shape":[],"data_offsets":[6,10]},"#,
            r#""empty":{"dtype":"U8","shape":[0,3],"data_offsets":[6,6]},"#,
            r#""a":{"dtype":"BF16","shape":[3,1],"data_offsets":[0,6],"later":{"x":[1]}},"#,
            r#""__metadata__":{"format":"pt"}}   "#
        );
        let header = parse(json, 10).unwrap();
        let data = 8 + json.len() as u64;
        let found: Vec<_> = header
            .tensors
            .iter()
            .map(|t| (t.name.as_str(), t.element, t.shape.as_slice(), t.file_offset - data, t.bytes))
            .collect();
        assert_eq!(
            found,
            [
                ("a", Element::Bf16, &[3, 1][..], 0, 6),
                ("empty", Element::U8, &[0, 3][..], 6, 0),
                ("b", Element::F32, &[][..], 6, 4),
            ]
        );
        assert_eq!(header.metadata["format"], "pt");
    }

    #[test]
    fn no_tensors_and_null_metadata_are_fine() {
        assert!(parse("{}", 0).unwrap().tensors.is_empty());
        assert!(parse(r#"{"__metadata__":null}"#, 0).unwrap().metadata.is_empty());
    }

    #[test]
    fn a_header_that_is_not_the_expected_json_is_refused() {
        let broken = "the header is not the expected JSON: ";
        assert!(parse_header(b"{\"a\":\xff}", 100).err().unwrap().to_string().starts_with(broken));
        for (json, reason) in [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[1]", "invalid type: sequence, expected an object at line 1 column 0"),
            ("{\"a\"", "EOF while parsing an object at line 1 column 4"),
            ("{} {}", "trailing characters at line 1 column 4"),
        ] {
            check(json, 0, &format!("{broken}{reason}"));
        }
        check(
            r#"{"__metadata__":{"a":1}}"#,
            0,
            "the header's entry `__metadata__` is invalid: \
             invalid type: integer `1`, expected a string at line 1 column 6",
        );
    }

    #[test]
    fn errors_in_an_entry_name_its_tensor() {
        let entry = |text: &str| parse(&format!(r#"{{"x":{text}}}"#), 4).err().expect("refused").to_string();
        let start = "the header's entry `x` is invalid: ";
        for (text, end) in [
            ("7", "invalid type: integer `7`, expected struct TensorInfo at line 1 column 1"),
            (r#"{"dtype":"F32","shape":[1]}"#, "missing field `data_offsets` at line 1 column 27"),
            (
                r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#,
                "invalid value: integer `-1`, expected usize at line 1 column 26",
            ),
            (
                r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#,
                "invalid type: floating point `1.5`, expected usize at line 1 column 27",
            ),
            (
                r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}"#,
                "trailing characters at line 1 column 48",
            ),
            (
                r#"{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}"#,
                "duplicate field `dtype` at line 1 column 22",
            ),
        ] {
            assert_eq!(entry(text), format!("{start}{end}"));
        }
        let unknown = entry(r#"{"dtype":"F9","shape":[8],"data_offsets":[0,4]}"#);
        assert!(
            unknown.starts_with(&format!("{start}unknown variant `F9`, expected one of `BOOL`")),
            "{unknown}"
        );
        let unsupported = entry(r#"{"dtype":"F4","shape":[8],"data_offsets":[0,4]}"#);
        assert_eq!(unsupported, "tensor `x` has the element type F4, which is not supported");
    }

    #[test]
    fn sizes_that_disagree_are_refused() {
        check(
            r#"{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}"#,
            20,
            "tensor `x` of shape [2, 3] and type F32 does not fit its offsets 0..20",
        );
        check(
            r#"{"x":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}}"#,
            0,
            "tensor `x` of shape [4611686018427387904, 2] and type F32 does not fit its offsets 0..0",
        );
        check(
            r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            4,
            "tensor `x` of shape [1] and type F32 does not fit its offsets 4..0",
        );
    }

    #[test]
    fn tensors_must_tile_the_data() {
        let two = |first: &str, second: &str| {
            format!(
                r#"{{"x":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"y":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
            )
        };
        check(&two("[0,4]", "[2,6]"), 8, "tensor `y` begins at 2, the tensors before it end at 4");
        check(&two("[0,4]", "[0,4]"), 8, "tensor `y` begins at 0, the tensors before it end at 4");
        check(&two("[0,4]", "[5,9]"), 9, "tensor `y` begins at 5, the tensors before it end at 4");
        check(&two("[5,9]", "[1,5]"), 9, "tensor `y` begins at 1, the tensors before it end at 0");
        let json = two("[0,4]", "[4,8]");
        let needed_bytes = 8 + json.len() as u64 + 8;
        check(
            &json,
            7,
            &format!(
                "the file is truncated: {} of at least {needed_bytes} bytes, tensor `y` is incomplete; download it again",
                needed_bytes - 1
            ),
        );
        check(
            &json,
            1_000_000,
            &format!(
                "the file has {} bytes but its tensors end at {needed_bytes}; it is damaged, download it again",
                Grouped(needed_bytes + 999_992)
            ),
        );
    }

    #[test]
    fn offsets_near_the_end_of_u64_do_not_wrap() {
        let json =
            r#"{"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#;
        let truncated =
            FileProblem::Truncated { tensor: "x".into(), file_bytes: 103, needed_bytes: u64::MAX };
        check(json, 4, &truncated.to_string());
    }

    #[test]
    fn a_repeated_name_is_refused_even_at_different_offsets() {
        check(
            r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
            2,
            "tensor `x` is in the header twice",
        );
        check(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "tensor `__metadata__` is in the header twice");
    }
}
