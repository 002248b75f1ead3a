//! A configuration file, YAML or JSON, as a tree in which every value knows its line.
//!
//! JSON is parsed as YAML, so that its values have lines too. Values stay untyped until a setting asks for a type,
//! because files write `2e-4` and `"2e-4"` for the same number and every tool accepts both.
//! `yes` and `no` are booleans, as in YAML 1.1, which is what the trainers' Python reads.
//! Aliases are expanded, with limits on depth, on the number of values and on the bytes of their text, so that a small
//! file stays a small tree.
//! Not supported: tags, several documents in one file, and keys that are not text.

use super::flow::indented_flows;
use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Larger files are not configurations.
pub const MOST_BYTES: usize = 1 << 20;
const MOST_DEPTH: usize = 32;
/// Values, names and texts together, with aliases expanded.
const MOST_EXPANDED_BYTES: usize = 2 * MOST_BYTES;
/// What a value takes besides its text.
const VALUE_BYTES: usize = 100;

/// A value and its line.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// From 1.
    pub line: usize,
    pub content: Content,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    Null,
    Boolean(bool),
    /// As written: an integer or a float.
    Number(String),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a map, in the order written.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    pub line: usize,
    pub value: Node,
    /// The name in messages, if the entry was lifted out of a group (`dictionaries.rs`), else empty.
    pub shown: String,
}

impl Entry {
    /// The name in messages.
    pub fn shown(&self) -> &str {
        if self.shown.is_empty() { &self.name } else { &self.shown }
    }
}

/// Why a file could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct DocumentError {
    pub line: usize,
    pub reason: String,
}

/// The entries of the map at the top of the file.
pub fn read_document(text: &str) -> Result<Vec<Entry>, DocumentError> {
    if text.len() > MOST_BYTES {
        let reason = format!("{} bytes is too large for a configuration (limit: {MOST_BYTES})", text.len());
        return Err(DocumentError { line: 1, reason });
    }
    // A byte order mark is skipped.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // Indentation means nothing between brackets, but the parser insists on it.
    parse(text).or_else(|error| {
        let is_indentation = error.reason.contains("invalid indentation");
        if is_indentation { parse(&indented_flows(text)).map_err(|_| error) } else { Err(error) }
    })
}

fn parse(text: &str) -> Result<Vec<Entry>, DocumentError> {
    let parser = Parser::new_from_str(text);
    let mut reading = Reading { parser, anchors: HashMap::new(), bytes: 0, line: 1 };
    let mut root = None;
    loop {
        match reading.next()? {
            Event::StreamEnd => break,
            Event::DocumentStart(_) if root.is_some() => {
                return Err(reading.error("a second document starts here; only one is supported"));
            }
            Event::DocumentStart(_) => {
                let event = reading.next()?;
                root = Some(reading.node(event, 0)?);
            }
            _ => {}
        }
    }
    match root {
        Some(Node { content: Content::Map(entries), .. }) if !entries.is_empty() => Ok(entries),
        Some(Node { content: Content::Null, .. }) | None => {
            Err(DocumentError { line: 1, reason: "the file has no settings".to_owned() })
        }
        Some(node) => {
            let reason = format!("expected settings such as `key: value`, got {}", node.content.describe());
            Err(DocumentError { line: node.line, reason })
        }
    }
}

/// Reads a configuration that another one names; the error is a reason without the path.
pub fn read_document_file(path: &Path) -> Result<Vec<Entry>, String> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    let text = String::from_utf8(bytes).map_err(|_| "it is not UTF-8 text".to_owned())?;
    read_document(&text).map_err(|error| error.to_string())
}

impl Content {
    /// The value in messages, shortened if it is long.
    pub fn describe(&self) -> String {
        match self {
            Content::Null => "nothing".to_owned(),
            Content::Boolean(yes) => yes.to_string(),
            Content::Number(digits) => shortened(digits),
            Content::Text(text) => format!("{:?}", shortened(text)),
            Content::List(items) => format!("a list of length {}", items.len()),
            Content::Map(entries) => format!("a group of {} settings", entries.len()),
        }
    }
}

fn shortened(text: &str) -> String {
    const SHOWN: usize = 48;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

struct Reading<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
    anchors: HashMap<usize, Node>,
    bytes: usize,
    line: usize,
}

impl<'a> Reading<'a> {
    fn next(&mut self) -> Result<Event<'a>, DocumentError> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => {
                self.line = span.start.line().max(1);
                Ok(event)
            }
            Some(Err(error)) => Err(unreadable(&error)),
            None => Ok(Event::StreamEnd),
        }
    }

    fn error(&self, reason: &str) -> DocumentError {
        DocumentError { line: self.line, reason: reason.to_owned() }
    }

    fn count(&mut self, bytes: usize) -> Result<(), DocumentError> {
        self.bytes += bytes;
        if self.bytes > MOST_EXPANDED_BYTES {
            let limit = format!("more than {MOST_EXPANDED_BYTES} bytes of values, with aliases expanded");
            return Err(self.error(&limit));
        }
        Ok(())
    }

    fn node(&mut self, event: Event<'a>, depth: usize) -> Result<Node, DocumentError> {
        if depth > MOST_DEPTH {
            return Err(self.error(&format!("nested more than {MOST_DEPTH} levels deep")));
        }
        self.count(VALUE_BYTES)?;
        let line = self.line;
        let (anchor, content) = match event {
            Event::Alias(anchor) => {
                let Some(size) = self.anchors.get(&anchor).map(size) else {
                    return Err(self.error("an alias refers to a value that contains it"));
                };
                // Counted before it is copied.
                self.count(size)?;
                return Ok(Node { line, ..self.anchors[&anchor].clone() });
            }
            Event::Scalar(text, style, anchor, _) => {
                self.count(text.len())?;
                (anchor, scalar(&text, style))
            }
            Event::SequenceStart(anchor, _) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        Event::SequenceEnd => break,
                        event => items.push(self.node(event, depth + 1)?),
                    }
                }
                (anchor, Content::List(items))
            }
            Event::MappingStart(anchor, _) => (anchor, Content::Map(self.entries(depth)?)),
            other => return Err(self.error(&format!("unexpected {other:?}"))),
        };
        let node = Node { line, content };
        // 0 means that there is no anchor.
        if anchor > 0 {
            self.count(size(&node))?;
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn entries(&mut self, depth: usize) -> Result<Vec<Entry>, DocumentError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut merged: Vec<Entry> = Vec::new();
        loop {
            let event = self.next()?;
            let line = self.line;
            let name = match event {
                Event::MappingEnd => break,
                Event::Scalar(name, ..) if !name.contains(char::is_control) => name.into_owned(),
                _ => return Err(self.error("a key must be text")),
            };
            self.count(name.len())?;
            let event = self.next()?;
            let value = self.node(event, depth + 1)?;
            if name == "<<" {
                merge(&mut merged, value)?;
                continue;
            }
            if let Some(first) = entries.iter().find(|entry| entry.name == name) {
                let reason = format!("`{name}` is set twice, first in line {}", first.line);
                return Err(DocumentError { line, reason });
            }
            entries.push(Entry { name, line, value, shown: String::new() });
        }
        let own: HashSet<String> = entries.iter().map(|entry| entry.name.clone()).collect();
        entries.extend(merged.into_iter().filter(|entry| !own.contains(&entry.name)));
        Ok(entries)
    }
}

/// Adds the settings that `<<` refers to; if several maps have the same key, the first one wins.
fn merge(merged: &mut Vec<Entry>, value: Node) -> Result<(), DocumentError> {
    match value.content {
        Content::Map(entries) => {
            for entry in entries {
                if !merged.iter().any(|known| known.name == entry.name) {
                    merged.push(entry);
                }
            }
            Ok(())
        }
        Content::List(items) => items.into_iter().try_for_each(|item| merge(merged, item)),
        _ => Err(DocumentError { line: value.line, reason: "`<<` must refer to settings".to_owned() }),
    }
}

/// What a value takes: itself and everything inside it.
fn size(node: &Node) -> usize {
    VALUE_BYTES
        + match &node.content {
            Content::List(items) => items.iter().map(size).sum(),
            Content::Map(entries) => entries.iter().map(|entry| entry.name.len() + size(&entry.value)).sum(),
            Content::Number(text) | Content::Text(text) => text.len(),
            Content::Null | Content::Boolean(_) => 0,
        }
}

fn scalar(text: &str, style: ScalarStyle) -> Content {
    if style != ScalarStyle::Plain {
        return Content::Text(text.to_owned());
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" | "None" => Content::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Content::Boolean(true),
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => Content::Boolean(false),
        _ if is_number(text) => Content::Number(text.to_owned()),
        _ => match without_separators(text) {
            Some(digits) => Content::Number(digits),
            None => Content::Text(text.to_owned()),
        },
    }
}

/// A number of YAML 1.1 with underscores between its digits, without them.
fn without_separators(text: &str) -> Option<String> {
    let starts_as_number = text.trim_start_matches(['-', '+']).starts_with(|c: char| c.is_ascii_digit());
    let digits = text.replace('_', "");
    (starts_as_number && digits.len() < text.len() && is_number(&digits)).then_some(digits)
}

/// Rust would also parse words such as `inf` and `nan` as floats.
fn is_number(text: &str) -> bool {
    let has_digit = text.bytes().any(|byte| byte.is_ascii_digit());
    has_digit && text.bytes().all(|byte| b"+-.eE0123456789".contains(&byte)) && text.parse::<f64>().is_ok()
}

fn unreadable(error: &ScanError) -> DocumentError {
    let column = error.marker().col() + 1;
    DocumentError {
        line: error.marker().line().max(1),
        reason: format!("column {column}: not valid YAML or JSON: {}", error.info()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        read_document(text).unwrap_err().to_string()
    }

    #[test]
    fn values_have_their_lines() {
        let entries = read_document("a: 1\nb:\n  - yes\n  - 2e-4\n  - \"2e-4\"\nc: ~\n").unwrap();
        let lines: Vec<(&str, usize)> = entries.iter().map(|entry| (&*entry.name, entry.line)).collect();
        assert_eq!(lines, [("a", 1), ("b", 2), ("c", 6)]);
        let Content::List(items) = &entries[1].value.content else { panic!("{entries:?}") };
        assert_eq!(items[0].content, Content::Boolean(true));
        assert_eq!(items[1], Node { line: 4, content: Content::Number("2e-4".into()) });
        assert_eq!(items[2], Node { line: 5, content: Content::Text("2e-4".into()) });
        assert_eq!(entries[2].value.content, Content::Null);
    }

    #[test]
    fn json_with_tabs_is_read_too() {
        let entries =
            read_document("{\n\t\"a\": {\n\t\t\"b\": [1, 2]\n\t},\n\t\"c\": \"x\\/y\"\n}\n").unwrap();
        assert_eq!((entries[0].line, entries[1].line), (2, 5));
        assert_eq!(entries[1].value.content, Content::Text("x/y".into()));
    }

    #[test]
    fn anchors_and_merges() {
        let entries = read_document("a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  b: 3\n").unwrap();
        let Content::Map(merged) = &entries[1].value.content else { panic!("{entries:?}") };
        let values: Vec<(&str, &Content)> =
            merged.iter().map(|entry| (&*entry.name, &entry.value.content)).collect();
        let [three, two] = [Content::Number("3".into()), Content::Number("2".into())];
        assert_eq!(values, [("b", &three), ("c", &two)]);
    }

    #[test]
    fn files_that_are_not_configurations_are_refused() {
        assert_eq!(refused(""), "line 1: the file has no settings");
        assert_eq!(
            refused("- a\n- b\n"),
            "line 1: expected settings such as `key: value`, got a list of length 2"
        );
        assert_eq!(refused("a: 1\nb: 2\na: 3\n"), "line 3: `a` is set twice, first in line 1");
        assert_eq!(
            refused("a: 1\n---\nb: 2\n"),
            "line 2: a second document starts here; only one is supported"
        );
        assert!(
            refused("a: [1, 2\nb: 3\n").starts_with("line 2: column 2: "),
            "{}",
            refused("a: [1, 2\nb: 3\n")
        );
        assert_eq!(refused("? [a, b]\n: 1\n"), "line 1: a key must be text");
        assert_eq!(refused("\"a\\nb\": 1\n"), "line 1: a key must be text");
    }

    /// `1_000` is a number in YAML 1.1, and indentation means nothing between brackets.
    #[test]
    fn underscores_and_brackets_as_pyyaml_reads_them() {
        let entries = read_document("a: 500_000\nb: -1_0.5e3\nc: _1\nd: 1_a\n").unwrap();
        let values: Vec<&Content> = entries.iter().map(|entry| &entry.value.content).collect();
        let [number, text] = [|it: &str| Content::Number(it.into()), |it: &str| Content::Text(it.into())];
        assert_eq!(values, [&number("500000"), &number("-10.5e3"), &text("_1"), &text("1_a")]);
        for inside in ["list: [\n  'a', # ]\n  {x: \"}\",\n y: 2},\n]", "list: [a,\n{x: '}', y:\n2}\n    ]"] {
            let text = format!("one:\n    two:\n        {inside}\n        z: 1 # [\nlast: a[0]\n");
            let entries = read_document(&text).unwrap_or_else(|error| panic!("{text}{error}"));
            assert_eq!(entries[1].value.content, Content::Text("a[0]".into()), "{text}");
            assert_eq!(entries[1].line, text.lines().count(), "{text}");
            let Content::Map(one) = &entries[0].value.content else { panic!("{entries:?}") };
            let Content::Map(two) = &one[0].value.content else { panic!("{entries:?}") };
            let names: Vec<&str> = two.iter().map(|entry| entry.name.as_str()).collect();
            assert_eq!(names, ["list", "z"], "{text}");
        }
        assert!(refused("a:\n  b: [1,\n]\n c: 1\n").contains("line 3: column 1"));
    }

    #[test]
    fn text_is_counted_with_aliases_expanded() {
        let long = "x".repeat(MOST_BYTES / 2);
        let aliases = "- *a\n".repeat(9_000);
        let refused = refused(&format!("a: &a {long}\nb:\n{aliases}"));
        assert!(refused.contains(&format!("more than {MOST_EXPANDED_BYTES} bytes")), "{refused}");
        assert!(read_document(&format!("a: &a {long}\nb: *a\n")).is_ok());
    }

    #[test]
    fn small_files_stay_small() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            let aliases = vec![format!("*a{}", level - 1); 9].join(", ");
            bomb += &format!("a{level}: &a{level} [{aliases}]\n");
        }
        assert!(refused(&bomb).contains("with aliases expanded"), "{}", refused(&bomb));
        let nested: String = (0..200).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
        assert_eq!(refused(&nested), "line 34: nested more than 32 levels deep");
        assert!(read_document(&"[".repeat(100_000)).is_err());
        assert_eq!(refused("a: &x [*x]\n"), "line 1: an alias refers to a value that contains it");
        assert!(refused(&"a".repeat(MOST_BYTES + 1)).contains("too large for a configuration"));
    }
}
