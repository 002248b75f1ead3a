//! A model's chat template: messages to the text that the model was trained on.
//! Templates are Jinja as transformers sets it up: blocks take the line's end and the space before them, values
//! print as in Python, and `raise_exception`, `strftime_now` and `tojson` are there.
//! `{% generation %}` marks what the assistant says; its body is rendered as it is and its range reported.
//! A template is not trusted: what it may make and how long it may run is limited (`template_limits.rs`).
//! Left out: reading files from a template, which the engine here cannot do, and turning text into tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use minijinja::machinery::{Instructions, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, escape_formatter};
use regex::Regex;
use serde_json::{Map, Value as Json};
use thiserror::Error;

use super::python::{json_dumps, print, strftime};
use super::template_limits::{add_limits, begin_rendering, charge, json_bytes, weigh};
use super::template_rewrite::{check_source, compile};

const NAME: &str = "chat template";
/// Of what a template says, and of what the engine says about it.
const MOST_MESSAGE_CHARACTERS: usize = 500;
const MOST_INDENT: usize = 16;
/// Marks around a rendered generation: code points that Unicode keeps out of texts.
const BEGIN: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

#[derive(Debug, Error)]
pub enum ChatTemplateError {
    #[error("the chat template cannot be read: {reason}")]
    Parse { reason: String },
    /// The template's own message.
    #[error("the chat template refuses these messages: {message}")]
    Refused { message: String },
    #[error("the chat template failed: {reason}")]
    Render { reason: String },
    #[error("the messages have the character U+{:04X}, which is reserved and used internally", *character as u32)]
    Noncharacter { character: char },
}

/// What a template is rendered with.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A list of objects with `role` and `content`.
    pub messages: &'a Json,
    pub tools: Option<&'a Json>,
    pub documents: Option<&'a Json>,
    /// Whether the text ends with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// More variables, such as `enable_thinking`.
    pub more: Option<&'a Map<String, Json>>,
    /// What `strftime_now` prints, in UTC. One moment for a whole data set keeps runs repeatable.
    pub now: SystemTime,
}

impl<'a> ChatInput<'a> {
    pub fn new(messages: &'a Json, now: SystemTime) -> ChatInput<'a> {
        ChatInput { messages, tools: None, documents: None, add_generation_prompt: false, more: None, now }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Bytes of `text` inside `{% generation %}`, in order.
    pub generated: Vec<Range<usize>>,
}

#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    instructions: Arc<Instructions<'static>>,
    special: Map<String, Json>,
    marks_generation: bool,
}

impl ChatTemplate {
    /// `special` has `bos_token` and the like as texts.
    pub fn new(source: &str, special: Map<String, Json>) -> Result<ChatTemplate, ChatTemplateError> {
        let unreadable = |error| ChatTemplateError::Parse { reason: reason_of(&error) };
        check_source(source).map_err(unreadable)?;
        let (source, marks_generation) = with_marked_generation(source);
        let mut environment = Environment::new();
        add_limits(&mut environment);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.expect("the usual delimiters are valid");
        environment.set_formatter(|out, state, value| {
            weigh(value)?;
            match value.kind() {
                ValueKind::None | ValueKind::Bool | ValueKind::Seq | ValueKind::Map => {
                    let text = print(value)?;
                    charge(text.len())?;
                    out.write_str(&text)
                        .map_err(|error| Error::new(ErrorKind::WriteFailure, error.to_string()))
                }
                _ => escape_formatter(out, state, value),
            }
        });
        environment.add_filter("tojson", to_json);
        environment.add_filter("generation_marked", |body: String| -> Result<String, Error> {
            charge(body.len())?;
            Ok(format!("{BEGIN}{body}{END}"))
        });
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            let error = Error::new(ErrorKind::InvalidOperation, message.clone());
            Err(error.with_source(RefusedByTemplate { message }))
        });
        let instructions = compile(NAME, kept_source(source), syntax).map_err(unreadable)?;
        Ok(ChatTemplate { environment, instructions: Arc::new(instructions), special, marks_generation })
    }

    /// Whether the template marks what the assistant says.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    pub fn render(&self, input: &ChatInput<'_>) -> Result<Rendered, ChatTemplateError> {
        if self.marks_generation {
            refuse_marks(input.messages)?;
        }
        let inputs = [Some(input.messages), input.tools, input.documents];
        let more_bytes: usize = input.more.into_iter().flat_map(Map::values).map(json_bytes).sum();
        begin_rendering(inputs.into_iter().flatten().map(json_bytes).sum::<usize>() + more_bytes);
        let mut variables: Vec<(&str, Value)> = vec![
            ("messages", from_json(input.messages)),
            ("tools", from_json(input.tools.unwrap_or(&Json::Null))),
            ("documents", from_json(input.documents.unwrap_or(&Json::Null))),
            ("add_generation_prompt", Value::from(input.add_generation_prompt)),
        ];
        let more = input.more.into_iter().flatten();
        variables
            .extend(self.special.iter().chain(more).map(|(key, value)| (key.as_str(), from_json(value))));
        let now = input.now;
        variables.push((
            "strftime_now",
            Value::from_function(move |format: String| {
                let is_short = format.len() <= MOST_MESSAGE_CHARACTERS;
                is_short.then(|| strftime(now, &format)).flatten().ok_or_else(|| {
                    let message = format!("`strftime_now` does not know all of `{format}`");
                    Error::new(ErrorKind::InvalidOperation, message)
                })
            }),
        ));
        let (context, blocks) = (Value::from_pairs(variables), BTreeMap::new());
        let mut text = String::new();
        eval(
            &self.environment,
            &self.instructions,
            context,
            &blocks,
            &mut make_string_output(&mut text),
            AutoEscape::None,
        )
        .map_err(|error| match refusal_of(&error) {
            Some(message) => ChatTemplateError::Refused { message: shortened(&message) },
            None => ChatTemplateError::Render { reason: reason_of(&error) },
        })?;
        Ok(if self.marks_generation {
            without_marks(&text)
        } else {
            Rendered { text, generated: Vec::new() }
        })
    }
}

/// The engine refers to a source. Equal ones share a copy, which stays for the life of the process.
fn kept_source(source: String) -> &'static str {
    static SOURCES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    match sources.get(source.as_str()) {
        Some(kept) => kept,
        None => {
            let kept: &'static str = source.leak();
            sources.insert(kept);
            kept
        }
    }
}

fn from_json(json: &Json) -> Value {
    Value::from(Serde(json))
}

/// A `filter` block treats the white space around it like the tag that it replaces.
fn with_marked_generation(source: &str) -> (String, bool) {
    let tag = Regex::new(r"\{%([-+]?)[ \t\r\n]*(end)?generation[ \t\r\n]*([-+]?)%\}");
    let tag = tag.expect("the expression is valid");
    let marked = tag.replace_all(source, |found: &regex::Captures<'_>| {
        let block = if found.get(2).is_some() { "endfilter" } else { "filter generation_marked" };
        format!("{{%{} {block} {}%}}", &found[1], &found[3])
    });
    (marked.to_string(), tag.is_match(source))
}

fn refuse_marks(messages: &Json) -> Result<(), ChatTemplateError> {
    let text = messages.to_string();
    match text.chars().find(|character| [BEGIN, END].contains(character)) {
        Some(character) => Err(ChatTemplateError::Noncharacter { character }),
        None => Ok(()),
    }
}

fn without_marks(marked: &str) -> Rendered {
    let mut text = String::with_capacity(marked.len());
    let mut generated = Vec::new();
    let mut begin = None;
    for character in marked.chars() {
        match character {
            BEGIN => begin = Some(text.len()),
            END => generated.extend(begin.take().map(|begin| begin..text.len())),
            character => text.push(character),
        }
    }
    Rendered { text, generated }
}

/// transformers replaces Jinja's own filter, which would escape HTML.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Every known template asks for what is done anyway.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    weigh(value)?;
    if indent.is_some_and(|indent| indent > MOST_INDENT) {
        let message = format!("the indentation of `tojson` is above {MOST_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    match json_dumps(value, indent) {
        Ok(text) => Ok(Value::from(text)),
        Err(error) => Err(Error::new(ErrorKind::BadSerialization, error.to_string())),
    }
}

#[derive(Debug, Error)]
#[error("{message}")]
struct RefusedByTemplate {
    message: String,
}

fn refusal_of(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(RefusedByTemplate { message }) = error.downcast_ref() {
            return Some(message.clone());
        }
        next = error.source();
    }
    None
}

/// What went wrong and where, on one line.
fn reason_of(error: &Error) -> String {
    let mut reason = error.kind().to_string();
    if let Some(detail) = error.detail() {
        reason = format!("{reason}: {}", shortened(detail));
    }
    match error.line() {
        Some(line) => format!("{reason} (line {line})"),
        None => reason,
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_MESSAGE_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
