//! The metadata of a GGUF file: keys with numbers, booleans, strings, or arrays of these.
//! Values keep their exact kind, so metadata can be written again as it was read.
//! Getters accept every kind that represents the value exactly, because converters disagree: one writes a
//! count as `u32`, another as `u64` or `i32`.
//! Left out: arrays of arrays, which no model file has.

use std::collections::HashMap;
use std::fmt;

use thiserror::Error;

/// Declares the kinds of numbers: variant, Rust type, number in the file, name in messages.
macro_rules! scalars {
    ($($variant:ident $rust:ty, $number:literal $name:literal;)*) => {
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($variant($rust),)*
            Bool(bool),
            String(String),
            Array(Array),
        }

        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($variant(Vec<$rust>),)*
            Bool(Vec<bool>),
            String(Vec<String>),
        }

        /// The kind of a value, or of the elements of an array.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $($variant,)*
            Bool,
            String,
            Array,
        }

        impl Kind {
            pub fn from_number(number: u32) -> Option<Kind> {
                match number {
                    $($number => Some(Kind::$variant),)*
                    7 => Some(Kind::Bool),
                    8 => Some(Kind::String),
                    9 => Some(Kind::Array),
                    _ => None,
                }
            }

            pub fn number(self) -> u32 {
                match self {
                    $(Kind::$variant => $number,)*
                    Kind::Bool => 7,
                    Kind::String => 8,
                    Kind::Array => 9,
                }
            }

            pub fn name(self) -> &'static str {
                match self {
                    $(Kind::$variant => $name,)*
                    Kind::Bool => "bool",
                    Kind::String => "string",
                    Kind::Array => "array",
                }
            }

            /// The smallest size of a value in a file.
            pub fn least_bytes(self) -> u64 {
                match self {
                    $(Kind::$variant => size_of::<$rust>() as u64,)*
                    Kind::Bool => 1,
                    Kind::String => 8,
                    Kind::Array => 12,
                }
            }
        }

        impl Value {
            pub fn kind(&self) -> Kind {
                match self {
                    $(Value::$variant(_) => Kind::$variant,)*
                    Value::Bool(_) => Kind::Bool,
                    Value::String(_) => Kind::String,
                    Value::Array(_) => Kind::Array,
                }
            }

            /// Appends the value in its file form, without its kind.
            pub fn append_to(&self, bytes: &mut Vec<u8>) {
                match self {
                    $(Value::$variant(value) => bytes.extend_from_slice(&value.to_le_bytes()),)*
                    Value::Bool(value) => bytes.push(u8::from(*value)),
                    Value::String(value) => append_string(value, bytes),
                    Value::Array(array) => {
                        bytes.extend_from_slice(&array.kind().number().to_le_bytes());
                        bytes.extend_from_slice(&(array.len() as u64).to_le_bytes());
                        array.append_elements_to(bytes);
                    }
                }
            }
        }

        impl Array {
            pub fn kind(&self) -> Kind {
                match self {
                    $(Array::$variant(_) => Kind::$variant,)*
                    Array::Bool(_) => Kind::Bool,
                    Array::String(_) => Kind::String,
                }
            }

            pub fn len(&self) -> usize {
                match self {
                    $(Array::$variant(values) => values.len(),)*
                    Array::Bool(values) => values.len(),
                    Array::String(values) => values.len(),
                }
            }

            /// The number at a position. `None` beyond the end, and for other kinds.
            fn number_at(&self, position: usize) -> Option<Value> {
                match self {
                    $(Array::$variant(values) => values.get(position).map(|value| Value::$variant(*value)),)*
                    Array::Bool(_) | Array::String(_) => None,
                }
            }

            fn append_elements_to(&self, bytes: &mut Vec<u8>) {
                match self {
                    $(Array::$variant(values) => {
                        values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
                    })*
                    Array::Bool(values) => bytes.extend(values.iter().map(|&value| u8::from(value))),
                    Array::String(values) => values.iter().for_each(|value| append_string(value, bytes)),
                }
            }

            /// An array of numbers from its bytes in a file. `None` for other kinds.
            pub(super) fn of_numbers(kind: Kind, bytes: &[u8]) -> Option<Array> {
                match kind {
                    $(Kind::$variant => {
                        let (elements, _) = bytes.as_chunks();
                        let read = |element: &[u8; size_of::<$rust>()]| <$rust>::from_le_bytes(*element);
                        Some(Array::$variant(elements.iter().map(read).collect()))
                    })*
                    Kind::Bool | Kind::String | Kind::Array => None,
                }
            }
        }

        impl Value {
            /// A number from its bytes in a file. `None` for other kinds.
            pub(super) fn of_number(kind: Kind, bytes: [u8; 8]) -> Option<Value> {
                match kind {
                    $(Kind::$variant => {
                        let (first, _) = bytes.split_first_chunk()?;
                        Some(Value::$variant(<$rust>::from_le_bytes(*first)))
                    })*
                    Kind::Bool | Kind::String | Kind::Array => None,
                }
            }
        }

        /// The value as error messages show it; long strings and arrays only by their size.
        impl fmt::Display for Value {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    Value::Bool(value) => write!(f, "{value}"),
                    Value::String(text) if text.len() > 60 => write!(f, "a string of {} bytes", text.len()),
                    Value::String(text) => write!(f, "{text:?}"),
                    Value::Array(array) => write!(f, "an array of {} x {}", array.len(), array.kind().name()),
                    $(Value::$variant(value) => write!(f, "{value}"),)*
                }
            }
        }
    };
}

scalars! {
    U8 u8, 0 "u8";
    I8 i8, 1 "i8";
    U16 u16, 2 "u16";
    I16 i16, 3 "i16";
    U32 u32, 4 "u32";
    I32 i32, 5 "i32";
    F32 f32, 6 "f32";
    U64 u64, 10 "u64";
    I64 i64, 11 "i64";
    F64 f64, 12 "f64";
}

pub(super) fn append_string(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

impl Array {
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Value {
    fn as_u64(&self) -> Option<u64> {
        match self {
            Value::U8(value) => Some(u64::from(*value)),
            Value::U16(value) => Some(u64::from(*value)),
            Value::U32(value) => Some(u64::from(*value)),
            Value::U64(value) => Some(*value),
            Value::I8(value) => u64::try_from(*value).ok(),
            Value::I16(value) => u64::try_from(*value).ok(),
            Value::I32(value) => u64::try_from(*value).ok(),
            Value::I64(value) => u64::try_from(*value).ok(),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => None,
        }
    }

    fn as_f64(&self) -> Option<f64> {
        match self {
            Value::F32(value) => Some(shortest_decimal(*value)),
            Value::F64(value) => Some(*value),
            _ => self.as_u64().map(|value| value as f64),
        }
    }
}

/// The shortest decimal that reads back as this `f32`: a stored 1e-5 becomes 1e-5 and not 0.00000999999974.
pub(super) fn shortest_decimal(value: f32) -> f64 {
    value.to_string().parse().expect("a float prints as a float")
}

#[derive(Debug, Error, PartialEq)]
pub enum MetadataProblem {
    #[error("the metadata has no `{key}`")]
    Missing { key: String },
    #[error("`{key}` is {got}, not {expected}")]
    WrongKind { key: String, got: String, expected: &'static str },
}

/// The key-value pairs of a file, in file order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
}

impl Metadata {
    /// Adds a pair, or returns the value if the key exists.
    pub fn insert(&mut self, key: &str, value: Value) -> Result<(), Value> {
        if self.by_key.contains_key(key) {
            return Err(value);
        }
        self.by_key.insert(key.to_string(), self.entries.len());
        self.entries.push((key.to_string(), value));
        Ok(())
    }

    /// Adds a pair, or replaces the value if the key exists.
    pub fn set(&mut self, key: &str, value: Value) {
        if let Err(value) = self.insert(key, value) {
            self.entries[self.by_key[key]].1 = value;
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&position| &self.entries[position].1)
    }

    pub fn text(&self, key: &str) -> Result<Option<&str>, MetadataProblem> {
        self.typed(key, "a string", |value| match value {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, MetadataProblem> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    pub fn whole(&self, key: &str) -> Result<Option<u64>, MetadataProblem> {
        self.typed(key, "a whole number from 0", Value::as_u64)
    }

    /// A whole number, or an array of such numbers.
    pub fn wholes(&self, key: &str) -> Result<Option<Vec<u64>>, MetadataProblem> {
        self.typed(key, "whole numbers from 0", |value| match value {
            Value::Array(array) => {
                (0..array.len()).map(|position| array.number_at(position)?.as_u64()).collect()
            }
            value => value.as_u64().map(|number| vec![number]),
        })
    }

    /// A token id.
    pub fn token_id(&self, key: &str) -> Result<Option<u32>, MetadataProblem> {
        self.typed(key, "a whole number below 2^32", |value| {
            value.as_u64().and_then(|value| u32::try_from(value).ok())
        })
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, MetadataProblem> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub fn texts(&self, key: &str) -> Result<Option<&[String]>, MetadataProblem> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::String(texts)) => Some(texts.as_slice()),
            _ => None,
        })
    }

    pub fn f32s(&self, key: &str) -> Result<Option<&[f32]>, MetadataProblem> {
        self.typed(key, "an array of f32", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    pub fn i32s(&self, key: &str) -> Result<Option<&[i32]>, MetadataProblem> {
        self.typed(key, "an array of i32", |value| match value {
            Value::Array(Array::I32(numbers)) => Some(numbers.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, MetadataProblem> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => {
                let got = value.to_string();
                Err(MetadataProblem::WrongKind { key: key.to_string(), got, expected })
            }
        }
    }
}

/// The value, or an error if it is missing.
pub fn required<T>(key: &str, value: Result<Option<T>, MetadataProblem>) -> Result<T, MetadataProblem> {
    value?.ok_or_else(|| MetadataProblem::Missing { key: key.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_one_number_and_the_numbers_are_those_of_the_format() {
        let names: Vec<&str> = (0..13).map(|number| Kind::from_number(number).unwrap().name()).collect();
        assert_eq!(
            names,
            ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"]
        );
        for number in 0..13 {
            assert_eq!(Kind::from_number(number).unwrap().number(), number);
        }
        assert_eq!(Kind::from_number(13), None);
    }

    #[test]
    fn getters_accept_exact_values_and_refuse_others() {
        let mut metadata = Metadata::default();
        let values = [
            ("count", Value::I32(7)),
            ("negative", Value::I64(-1)),
            ("epsilon", Value::F32(1e-5)),
            ("name", Value::String("smol".into())),
            ("tokens", Value::Array(Array::String(vec!["a".into(), "b".into()]))),
        ];
        for (key, value) in values {
            metadata.insert(key, value).unwrap();
        }
        assert_eq!(metadata.whole("count"), Ok(Some(7)));
        assert_eq!(metadata.whole("absent"), Ok(None));
        assert_eq!(metadata.number("epsilon"), Ok(Some(1e-5)));
        assert_eq!(metadata.number("count"), Ok(Some(7.0)));
        assert_eq!(metadata.texts("tokens").unwrap().unwrap().len(), 2);
        let message = |problem: MetadataProblem| problem.to_string();
        assert_eq!(
            message(metadata.whole("negative").unwrap_err()),
            "`negative` is -1, not a whole number from 0"
        );
        assert_eq!(message(metadata.flag("name").unwrap_err()), "`name` is \"smol\", not true or false");
        assert_eq!(
            message(metadata.f32s("tokens").unwrap_err()),
            "`tokens` is an array of 2 x string, not an array of f32"
        );
        let absent = required("absent", metadata.text("absent")).unwrap_err();
        assert_eq!(message(absent), "the metadata has no `absent`");
    }

    #[test]
    fn a_key_is_inserted_once_and_set_in_its_place() {
        let mut metadata = Metadata::default();
        metadata.insert("a", Value::U8(1)).unwrap();
        metadata.insert("b", Value::U8(2)).unwrap();
        assert_eq!(metadata.insert("a", Value::U8(3)), Err(Value::U8(3)));
        metadata.set("a", Value::U8(4));
        let pairs: Vec<(&str, &Value)> = metadata.iter().collect();
        assert_eq!(pairs, [("a", &Value::U8(4)), ("b", &Value::U8(2))]);
    }
}
