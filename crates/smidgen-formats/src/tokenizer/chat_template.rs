//! Renders messages with a model's chat template, to the text format that the model was trained on.
//! Templates are Jinja with the settings of transformers: block tags remove the whitespace around them,
//! values print as in Python, and `raise_exception`, `strftime_now` and `tojson` exist.
//! `{% generation %}` marks the text of the assistant; its byte range is reported.
//! Templates are not trusted: their output and running time are limited (`template_limits.rs`).
//! Left out: file access from templates, which is not possible here, and turning text into tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use minijinja::machinery::{Instructions, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value, escape_formatter};
use regex::Regex;
use serde_json::{Map, Value as Json};
use thiserror::Error;

use super::python::{JsonOptions, json_dumps, print, strftime};
use super::python_operators::add_python;
use super::template_allowance::{begin_rendering, charge, json_bytes, note_work, weigh, work_beyond};
use super::template_limits::add_limits;
use super::template_rewrite::{check_source, compile};

const NAME: &str = "chat template";
/// Longer messages of templates, and of the engine, are cut.
const MOST_MESSAGE_CHARACTERS: usize = 500;
const MOST_INDENT: usize = 16;
/// A schema as indented JSON, or with every character escaped, is up to six times as long.
const TEXT_PER_INPUT_BYTE: usize = 8;
/// What all renderings of a run together may do beyond what their inputs explain; about ten seconds.
const SPARE_WORK: u64 = 64_000_000;
/// Marks around the assistant's text. Unicode reserves these code points for internal use.
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
    #[error(
        "the chat template makes {bytes} bytes of text of a row of {input_bytes} bytes, at most {most} are allowed"
    )]
    TooLong { bytes: usize, input_bytes: usize, most: usize },
    #[error("the chat template does far more work than its rows need and may be malicious")]
    TooMuchWork,
    #[error("the messages have the character U+{:04X}, which is reserved and used internally", *character as u32)]
    Noncharacter { character: char },
}

/// The variables of a template.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// A list of objects with `role` and `content`.
    pub messages: &'a Json,
    pub tools: Option<&'a Json>,
    pub documents: Option<&'a Json>,
    /// Whether to end the text with the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Additional variables, such as `enable_thinking`.
    pub more: Option<&'a Map<String, Json>>,
    /// The time for `strftime_now`, in UTC. Use one time for a whole data set, so that runs are repeatable.
    pub now: SystemTime,
    /// How long the text may be, in addition to a multiple of the input.
    pub most_text_bytes: usize,
}

impl<'a> ChatInput<'a> {
    pub fn new(messages: &'a Json, now: SystemTime) -> ChatInput<'a> {
        ChatInput {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: false,
            more: None,
            now,
            most_text_bytes: usize::MAX,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    pub text: String,
    /// Byte ranges of `text` inside `{% generation %}`, in order.
    pub generated: Vec<Range<usize>>,
}

#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    instructions: Arc<Instructions<'static>>,
    special: Map<String, Json>,
    marks_generation: bool,
    /// What all renderings together may still do beyond what their inputs explain.
    spare_work: Arc<AtomicU64>,
}

impl ChatTemplate {
    /// `special` has the texts of `bos_token` and the like.
    pub fn new(source: &str, special: Map<String, Json>) -> Result<ChatTemplate, ChatTemplateError> {
        let unreadable = |error| ChatTemplateError::Parse { reason: reason_of(&error) };
        check_source(source).map_err(unreadable)?;
        // Jinja does the same: the end of a line is one character, whatever system the file is from.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, marks_generation) = with_marked_generation(&source);
        let mut environment = Environment::new();
        add_limits(&mut environment);
        add_python(&mut environment);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.expect("the usual delimiters are valid");
        environment.set_formatter(|out, state, value| {
            note_work(state);
            weigh(value)?;
            match value.kind() {
                ValueKind::None
                | ValueKind::Bool
                | ValueKind::Number
                | ValueKind::Seq
                | ValueKind::Iterable
                | ValueKind::Map
                | ValueKind::Plain => {
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
        let instructions = compile(NAME, leaked_source(source), syntax).map_err(unreadable)?;
        let spare_work = Arc::new(AtomicU64::new(SPARE_WORK));
        Ok(ChatTemplate {
            environment,
            instructions: Arc::new(instructions),
            special,
            marks_generation,
            spare_work,
        })
    }

    /// Whether the template marks the text of the assistant.
    pub fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    pub fn render(&self, input: &ChatInput<'_>) -> Result<Rendered, ChatTemplateError> {
        if self.marks_generation {
            refuse_marks(input.messages)?;
        }
        let inputs = [Some(input.messages), input.tools, input.documents];
        let more_bytes: usize = input.more.into_iter().flat_map(Map::values).map(json_bytes).sum();
        let input_bytes = inputs.into_iter().flatten().map(json_bytes).sum::<usize>() + more_bytes;
        if self.spare_work.load(Ordering::Relaxed) == 0 {
            return Err(ChatTemplateError::TooMuchWork);
        }
        begin_rendering(input_bytes);
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
                    let message = format!("`strftime_now` does not support the format `{format}`");
                    Error::new(ErrorKind::InvalidOperation, message)
                })
            }),
        ));
        let (context, blocks) = (Value::from_pairs(variables), BTreeMap::new());
        let mut text = String::new();
        let done = eval(
            &self.environment,
            &self.instructions,
            context,
            &blocks,
            &mut make_string_output(&mut text),
            AutoEscape::None,
        );
        let is_out_of_fuel = done.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfFuel);
        let spare = work_beyond(input_bytes, is_out_of_fuel);
        let _ = self
            .spare_work
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(spare)));
        done.map_err(|error| match refusal_of(&error) {
            Some(message) => ChatTemplateError::Refused { message: shortened(&message) },
            None => ChatTemplateError::Render { reason: reason_of(&error) },
        })?;
        let most = input_bytes.saturating_mul(TEXT_PER_INPUT_BYTE).saturating_add(input.most_text_bytes);
        if text.len() > most {
            return Err(ChatTemplateError::TooLong { bytes: text.len(), input_bytes, most });
        }
        Ok(if self.marks_generation {
            without_marks(&text)
        } else {
            Rendered { text, generated: Vec::new() }
        })
    }
}

/// The engine needs a `'static` source, so it is leaked. Equal sources share one copy.
fn leaked_source(source: String) -> &'static str {
    static SOURCES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut sources = SOURCES.lock().unwrap_or_else(PoisonError::into_inner);
    match sources.get(source.as_str()) {
        Some(known) => known,
        None => {
            let leaked: &'static str = source.leak();
            sources.insert(leaked);
            leaked
        }
    }
}

fn from_json(json: &Json) -> Value {
    Value::from(Serde(json))
}

/// Replaces `generation` blocks by `filter` blocks, which treat the whitespace around them in the same way.
/// Returns whether there are any.
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

/// `tojson` as in transformers, which replaces Jinja's own filter because that one escapes HTML.
fn to_json(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let indent = indent.filter(|indent| !indent.is_none());
    let separators: Option<Vec<String>> = options.get("separators")?;
    let read = JsonOptions {
        ensure_ascii: ensure_ascii.or(options.get("ensure_ascii")?).unwrap_or(false),
        indent: match indent.as_ref().map(|indent| (indent.as_str(), indent.as_usize())) {
            None => None,
            Some((Some(text), _)) if text.len() <= MOST_INDENT => Some(text.to_owned()),
            Some((_, Some(spaces))) if spaces <= MOST_INDENT => Some(" ".repeat(spaces)),
            Some(_) => {
                let message = format!("the indentation of `tojson` is above {MOST_INDENT}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        },
        separators: match separators.as_deref() {
            None => None,
            Some([item, key]) if item.len() + key.len() <= MOST_INDENT => Some((item.clone(), key.clone())),
            Some(_) => {
                let message = "the separators of `tojson` are not two short texts";
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        },
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    weigh(value)?;
    json_dumps(value, &read).map(Value::from)
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

/// The error and its line number, on one line.
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
