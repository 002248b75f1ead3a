//! The header of a safetensors file: JSON that names each tensor's element type, shape and place.
//! `parse_header` believes nothing: after it returns, the tensors are distinct, correctly sized, inside the file,
//! and tile the data without a hole or an overlap, so that readers need no checks of their own.
//! It allocates in proportion to the header's bytes and never by a number found in it.
//! Left out: reading the file, and tensor data.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::problem::{PREFIX_BYTES, SafetensorsProblem};
use crate::element::Element;

/// One tensor of a file; its bytes are known to lie inside the file.
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
    /// In the order of their bytes in the file; empty tensors at one place by name.
    pub tensors: Vec<TensorEntry>,
    pub metadata: BTreeMap<String, String>,
}

/// Parses and checks the JSON between the length prefix and the data, for a file of `file_bytes`.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, SafetensorsProblem> {
    let text = std::str::from_utf8(json).map_err(|error| SafetensorsProblem::HeaderNotUtf8 {
        at: PREFIX_BYTES + error.valid_up_to() as u64,
    })?;
    if !text.starts_with('{') {
        return Err(SafetensorsProblem::HeaderNotObject { starts_with: text.chars().next() });
    }
    let mut collected = Collected::default();
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let parsed = deserializer.deserialize_map(&mut collected).and_then(|()| deserializer.end());
    match (collected.problem, parsed) {
        (Some(problem), _) => return Err(problem),
        (None, Err(error)) => return Err(SafetensorsProblem::HeaderNotJson(error)),
        (None, Ok(())) => {}
    }
    let mut placed = collected.placed;
    placed.sort_by(|left, right| {
        (left.begin, left.end, &left.name).cmp(&(right.begin, right.end, &right.name))
    });
    check_names_are_distinct(&placed)?;
    check_tiling(&placed, PREFIX_BYTES + json.len() as u64, file_bytes)?;
    let data_offset = PREFIX_BYTES + json.len() as u64;
    let tensors = placed
        .into_iter()
        .map(|tensor| TensorEntry {
            name: tensor.name,
            element: tensor.element,
            shape: tensor.shape,
            file_offset: data_offset + tensor.begin,
            bytes: tensor.end - tensor.begin,
        })
        .collect();
    Ok(Header { tensors, metadata: collected.metadata })
}

/// A tensor whose own numbers agree; offsets are relative to the data.
struct Placed {
    name: String,
    element: Element,
    shape: Vec<usize>,
    begin: u64,
    end: u64,
}

#[derive(Deserialize)]
#[serde(expecting = "an object of `dtype`, `shape` and `data_offsets`")]
struct EntryJson<'a> {
    #[serde(borrow)]
    dtype: std::borrow::Cow<'a, str>,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// Filled while the JSON is walked; `problem` carries what serde's own error type cannot.
#[derive(Default)]
struct Collected {
    placed: Vec<Placed>,
    metadata: BTreeMap<String, String>,
    problem: Option<SafetensorsProblem>,
}

impl<'de> Visitor<'de> for &mut Collected {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            let value: &'de RawValue = map.next_value()?;
            let outcome = if name == "__metadata__" {
                if std::mem::replace(&mut metadata_seen, true) {
                    self.problem = Some(SafetensorsProblem::DuplicateMetadata);
                    return Err(A::Error::custom("metadata twice"));
                }
                parse_metadata(value.get()).map(|metadata| self.metadata = metadata)
            } else {
                parse_entry(name, value.get()).map(|placed| self.placed.push(placed))
            };
            if let Err(problem) = outcome {
                self.problem = Some(problem);
                return Err(A::Error::custom("a tensor is wrong"));
            }
        }
        Ok(())
    }
}

fn parse_metadata(json: &str) -> Result<BTreeMap<String, String>, SafetensorsProblem> {
    serde_json::from_str::<Option<BTreeMap<String, String>>>(json)
        .map(Option::unwrap_or_default)
        .map_err(SafetensorsProblem::MetadataNotStrings)
}

fn parse_entry(name: String, json: &str) -> Result<Placed, SafetensorsProblem> {
    let entry: EntryJson<'_> = match serde_json::from_str(json) {
        Ok(entry) => entry,
        Err(source) => {
            return Err(SafetensorsProblem::BadEntry { tensor: name, source });
        }
    };
    let Some(element) = Element::from_name(&entry.dtype) else {
        return Err(SafetensorsProblem::UnknownElement { tensor: name, dtype: entry.dtype.into_owned() });
    };
    let shape = entry.shape;
    let (begin, end) = entry.data_offsets;
    let Some(needed_bytes) = element.tensor_bytes(&shape) else {
        return Err(SafetensorsProblem::ShapeOverflow { tensor: name, shape, element });
    };
    if begin > end {
        return Err(SafetensorsProblem::OffsetsReversed { tensor: name, begin, end });
    }
    if needed_bytes != end - begin {
        return Err(SafetensorsProblem::SizeMismatch {
            tensor: name,
            shape,
            element,
            needed_bytes,
            begin,
            end,
        });
    }
    Ok(Placed { name, element, shape, begin, end })
}

fn check_names_are_distinct(placed: &[Placed]) -> Result<(), SafetensorsProblem> {
    let mut names: Vec<&str> = placed.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(SafetensorsProblem::DuplicateName { tensor: pair[0].to_string() }),
        None => Ok(()),
    }
}

/// `placed` is sorted by place.
fn check_tiling(placed: &[Placed], data_offset: u64, file_bytes: u64) -> Result<(), SafetensorsProblem> {
    let mut covered_to = 0;
    let mut previous: Option<&Placed> = None;
    for tensor in placed {
        match (tensor.begin.cmp(&covered_to), previous) {
            (std::cmp::Ordering::Equal, _) => {}
            (std::cmp::Ordering::Less, Some(other)) => {
                return Err(SafetensorsProblem::Overlap {
                    tensor: tensor.name.clone(),
                    begin: tensor.begin,
                    other: other.name.clone(),
                    other_end: other.end,
                });
            }
            (std::cmp::Ordering::Greater, _) | (std::cmp::Ordering::Less, None) => {
                return Err(SafetensorsProblem::Hole {
                    tensor: tensor.name.clone(),
                    hole_begin: covered_to,
                    begin: tensor.begin,
                });
            }
        }
        covered_to = tensor.end;
        previous = Some(tensor);
    }
    let needed_bytes = data_offset.saturating_add(covered_to);
    match file_bytes.cmp(&needed_bytes) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(SafetensorsProblem::TrailingBytes { file_bytes, needed_bytes }),
        std::cmp::Ordering::Less => {
            let incomplete = placed
                .iter()
                .find(|tensor| data_offset.saturating_add(tensor.end) > file_bytes)
                .expect("the last tensor ends beyond the file");
            Err(SafetensorsProblem::Truncated { tensor: incomplete.name.clone(), file_bytes, needed_bytes })
        }
    }
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
    fn a_file_of_no_tensors_is_fine_and_null_metadata_too() {
        assert!(parse("{}", 0).unwrap().tensors.is_empty());
        assert!(parse(r#"{"__metadata__":null}"#, 0).unwrap().metadata.is_empty());
    }

    #[test]
    fn text_that_is_no_header_is_named_for_what_it_is() {
        let problem = parse_header(b"{\"a\":\xff}", 100).err().unwrap();
        assert_eq!(problem.to_string(), "the header is not UTF-8 text: the byte at 13 is wrong");
        check("", 0, "the header is not a JSON object: it starts with None, not '{'");
        check("[1]", 0, "the header is not a JSON object: it starts with Some('['), not '{'");
        check(
            "{\"a\"",
            0,
            "the header is not the JSON it should be: EOF while parsing an object at line 1 column 4",
        );
        check("{} {}", 0, "the header is not the JSON it should be: trailing characters at line 1 column 4");
        check(
            r#"{"__metadata__":{"a":1}}"#,
            0,
            "the header's `__metadata__` is not a map of strings: \
             invalid type: integer `1`, expected a string at line 1 column 6",
        );
    }

    #[test]
    fn an_entry_that_is_wrong_names_its_tensor() {
        let entry = |text: &str| parse(&format!(r#"{{"x":{text}}}"#), 4).err().expect("refused").to_string();
        let start = "the header's entry for tensor `x` is not what it should be: ";
        for (text, end) in [
            (
                "7",
                "invalid type: integer `7`, expected an object of `dtype`, `shape` and `data_offsets` at line 1 column 1",
            ),
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
        let unknown = entry(r#"{"dtype":"F4","shape":[8],"data_offsets":[0,4]}"#);
        assert!(
            unknown.starts_with("tensor `x` has the unknown element type `F4`; known are BOOL, U8,"),
            "{unknown}"
        );
    }

    #[test]
    fn sizes_that_disagree_are_refused() {
        check(
            r#"{"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,20]}}"#,
            20,
            "tensor `x` of shape [2, 3] and type F32 needs 24 bytes, its offsets 0..20 hold 20",
        );
        check(
            r#"{"x":{"dtype":"F32","shape":[4611686018427387904,2],"data_offsets":[0,0]}}"#,
            0,
            "tensor `x` of shape [4611686018427387904, 2] and type F32 has more bytes than can be counted",
        );
        check(
            r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            4,
            "tensor `x` begins at 4 and ends before it, at 0",
        );
    }

    #[test]
    fn tensors_must_tile_the_data() {
        let two = |first: &str, second: &str| {
            format!(
                r#"{{"x":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"y":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
            )
        };
        check(&two("[0,4]", "[2,6]"), 8, "tensor `y` begins at 2 inside tensor `x`, which ends at 4");
        check(&two("[0,4]", "[0,4]"), 8, "tensor `y` begins at 0 inside tensor `x`, which ends at 4");
        check(&two("[0,4]", "[5,9]"), 9, "the bytes 4..5 before tensor `y` belong to no tensor");
        check(&two("[5,9]", "[1,5]"), 9, "the bytes 0..1 before tensor `y` belong to no tensor");
        let json = two("[0,4]", "[4,8]");
        let needed_bytes = 8 + json.len() as u64 + 8;
        check(
            &json,
            7,
            &format!(
                "the file is truncated: {} of {needed_bytes} bytes, tensor `y` is incomplete; download it again",
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
        assert!(matches!(parse(json, 4), Err(SafetensorsProblem::Truncated { needed_bytes: u64::MAX, .. })));
    }

    #[test]
    fn a_name_given_twice_is_refused_also_when_the_places_differ() {
        check(
            r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
            2,
            "tensor `x` stands twice in the header",
        );
        check(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "`__metadata__` stands twice in the header");
    }
}
