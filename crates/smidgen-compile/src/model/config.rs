//! Typed reading of a `config.json`: each key is checked where it is read, and named when it is wrong.
//!
//! Both spellings are understood: `rope_theta` + `rope_scaling` + `torch_dtype`, and the newer
//! `rope_parameters` + `dtype`. `null` means absent.

use crate::error::ModelError;
use serde_json::{Map, Value};
use smidgen_ir::{DType, RopeScaling, RopeSpec};

#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    map: &'a Map<String, Value>,
    /// What stands before a key in messages: empty, or the name of the table that holds it.
    prefix: &'static str,
}

impl<'a> Config<'a> {
    pub fn new(value: &'a Value) -> Result<Config<'a>, ModelError> {
        match value {
            Value::Object(map) => Ok(Config { map, prefix: "" }),
            other => Err(wrong("config.json", "an object", other)),
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    pub fn flag(&self, key: &str, default: bool) -> Result<bool, ModelError> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number above 0", |value| value.as_f64().filter(|n| *n > 0.0 && n.is_finite()))
    }

    /// A size: a whole number from 1 to 2^31.
    pub fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number above 0", |value| {
            value.as_u64().filter(|n| (1..=1 << 31).contains(n)).and_then(|n| usize::try_from(n).ok())
        })
    }

    pub fn required_size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or(ModelError::Missing { key })
    }

    fn table(&self, key: &'static str, prefix: &'static str) -> Result<Option<Config<'a>>, ModelError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Config { map, prefix }))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.key(key), expected, value))
    }

    /// Refuses a key that is present with any value but those that change nothing.
    pub fn refuse(&self, key: &str, harmless: &[Value], supported: &'static str) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if !harmless.contains(value) => {
                Err(ModelError::Unsupported { key: self.key(key), got: value.to_string(), supported })
            }
            _ => Ok(()),
        }
    }

    /// The element type that the weights are stored in, `f32` where nothing says so.
    pub fn stored_dtype(&self) -> Result<DType, ModelError> {
        let key = if self.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        match self.text(key)? {
            None | Some("float32") => Ok(DType::F32),
            Some("bfloat16") => Ok(DType::Bf16),
            Some("float16") => Ok(DType::F16),
            Some(other) => Err(ModelError::Unsupported {
                key: key.into(),
                got: other.into(),
                supported: "float32, bfloat16, float16",
            }),
        }
    }

    /// The rotary embedding for heads of `head_dim` channels, in either spelling.
    pub fn rope(&self, head_dim: usize) -> Result<RopeSpec, ModelError> {
        let newer = self.table("rope_parameters", "rope_parameters.")?;
        let older = self.table("rope_scaling", "rope_scaling.")?;
        let theta = match newer.map(|table| table.number("rope_theta")).transpose()?.flatten() {
            Some(theta) => theta,
            None => self.number("rope_theta")?.unwrap_or(10_000.0),
        };
        let scaling = newer.or(older).map_or(Ok(RopeScaling::Default), |table| table.rope_scaling(self))?;
        Ok(RopeSpec { theta: theta as f32, dim: head_dim, scaling })
    }

    fn rope_scaling(&self, config: &Config<'_>) -> Result<RopeScaling, ModelError> {
        let key = if self.get("rope_type").is_some() { "rope_type" } else { "type" };
        let factor = || -> Result<f32, ModelError> {
            Ok(self.number("factor")?.ok_or(ModelError::Missing { key: "rope_scaling.factor" })? as f32)
        };
        match self.text(key)?.unwrap_or("default") {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: self.number("low_freq_factor")?.unwrap_or(1.0) as f32,
                high_freq_factor: self.number("high_freq_factor")?.unwrap_or(4.0) as f32,
                original_max_positions: match self.size("original_max_position_embeddings")? {
                    Some(positions) => positions,
                    None => config.required_size("max_position_embeddings")?,
                },
            }),
            other => Err(ModelError::Unsupported {
                key: self.key(key),
                got: other.into(),
                supported: "default, linear, llama3",
            }),
        }
    }
}

fn wrong(key: &str, expected: &'static str, value: &Value) -> ModelError {
    let mut got = value.to_string();
    if got.len() > 60 {
        got = format!("{}…", got.chars().take(60).collect::<String>());
    }
    ModelError::WrongType { key: key.into(), expected, got }
}
