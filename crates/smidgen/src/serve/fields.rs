//! Reads the fields of a request's JSON, with errors in OpenAI's form.
//!
//! A field that would change the answer and that is not done is refused by its name, and so is an unknown one. Fields that
//! only describe the caller are accepted.

use hyper::StatusCode;
use serde_json::{Map, Value, json};

/// An error as OpenAI's clients read it.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None }
    }

    /// A field with a wrong value.
    pub fn field(name: &str, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::BAD_REQUEST, message);
        ApiError { param: Some(name.to_owned()), ..error }
    }

    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    pub fn render(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

/// The object of a request. Fields are taken out of it; what is left is unknown.
pub struct Fields(Map<String, Value>);

/// Fields that change no answer.
const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];
/// Fields that are done only at the value that means nothing, each with that value.
const ONLY_AT: &[(&str, f64)] = &[("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("best_of", 1.0)];

impl Fields {
    pub fn read(body: &[u8]) -> Result<Fields, ApiError> {
        let bad = |what: String| ApiError::new(StatusCode::BAD_REQUEST, what);
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(bad("the body must be a JSON object".to_owned())),
            Err(error) => Err(bad(format!("the body is not JSON: {error}"))),
        }
    }

    /// A field, if it is there and not null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.take(name)
            .map(|value| match value {
                Value::String(text) => Ok(text),
                _ => Err(ApiError::field(name, format!("`{name}` must be a string"))),
            })
            .transpose()
    }

    pub fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        self.take(name).map_or(Ok(false), |value| {
            value.as_bool().ok_or_else(|| ApiError::field(name, format!("`{name}` must be true or false")))
        })
    }

    /// A number from `least` to `most`.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let wrong = || ApiError::field(name, format!("`{name}` must be a number from {least} to {most}"));
        let of = |value: Value| value.as_f64().filter(|it| (least..=most).contains(it)).ok_or_else(wrong);
        self.take(name).map(of).transpose()
    }

    /// A whole number from `least` to `most`.
    pub fn count(&mut self, name: &str, least: usize, most: usize) -> Result<Option<usize>, ApiError> {
        let wrong =
            || ApiError::field(name, format!("`{name}` must be a whole number from {least} to {most}"));
        let of = |value: Value| {
            let number = value.as_u64().and_then(|it| usize::try_from(it).ok());
            number.filter(|it| (least..=most).contains(it)).ok_or_else(wrong)
        };
        self.take(name).map(of).transpose()
    }

    /// One text, or a list of texts.
    pub fn texts(&mut self, name: &str, most: usize) -> Result<Vec<String>, ApiError> {
        let wrong =
            || ApiError::field(name, format!("`{name}` must be a string or a list of up to {most} strings"));
        match self.take(name) {
            None => Ok(vec![]),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(items)) if items.len() <= most => {
                items.into_iter().map(|item| item.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
        }
    }

    /// Refuses fields that are left.
    pub fn finish(mut self) -> Result<(), ApiError> {
        IGNORED.iter().for_each(|name| drop(self.take(name)));
        for (name, value) in ONLY_AT {
            if self.take(name).is_some_and(|given| given.as_f64() != Some(*value)) {
                return Err(ApiError::field(name, format!("`{name}` is not supported (supported: {value})")));
            }
        }
        if self.take("logit_bias").is_some_and(|bias| bias.as_object().is_none_or(|bias| !bias.is_empty())) {
            return Err(ApiError::field("logit_bias", "`logit_bias` is not supported"));
        }
        let format = self.take("response_format");
        if format.is_some_and(|format| format["type"] != "text") {
            return Err(ApiError::field(
                "response_format",
                "`response_format` is not supported (supported: text)",
            ));
        }
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                Err(ApiError::field(name, format!("`{name}` is not supported by this server"))
                    .with_code("unknown_parameter"))
            }
        }
    }
}
