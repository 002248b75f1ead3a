//! Terminal colours: added to words when a text is made, and removed for pipes and files.
//!
//! Everything that is printed passes through `escape_controls` or `escape_json`, so text from files cannot act on a
//! terminal. Only words such as `error:` and `fits` are coloured. `NO_COLOR` turns colour off, `CLICOLOR_FORCE` turns it on.

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};
use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;

/// A word of this program in colour.
#[derive(Clone, Copy, Debug)]
pub struct Painted(&'static str, &'static str);

pub const ERROR: Painted = Painted(RED, "error:");
pub const WARNING: Painted = Painted(YELLOW, "warning:");
pub const HINT: Painted = Painted(CYAN, "hint:");
pub const NOTE: Painted = Painted(CYAN, "note:");
pub const REMEDY: Painted = Painted(CYAN, "remedy:");

const RED: &str = "1;31";
const GREEN: &str = "32";
const YELLOW: &str = "33";
const CYAN: &str = "36";
const NONE: &str = "0";

impl fmt::Display for Painted {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&paint(self.0, self.1))
    }
}

pub fn good(words: &str) -> String {
    paint(GREEN, words)
}

pub fn caution(words: &str) -> String {
    paint(YELLOW, words)
}

pub fn bad(words: &str) -> String {
    paint(RED, words)
}

/// What begins and ends a good part of a longer text.
pub fn around_good() -> (String, String) {
    let key = *KEY;
    (format!("\x1b[{GREEN};{key}m"), format!("\x1b[{NONE};{key}m"))
}

fn paint(colour: &str, words: &str) -> String {
    let key = *KEY;
    format!("\x1b[{colour};{key}m{words}\x1b[{NONE};{key}m")
}

/// Until a text is printed, this program's own colour sequences carry this number, which differs in every process: text
/// from a file cannot pass for them.
static KEY: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one("colour"));

/// Escapes the control characters of a text that is about to be printed, and turns this program's own colours into what
/// terminals understand. Names in files and answers of servers could otherwise move the cursor, change the title or
/// hide text. Line breaks and tabs are kept.
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let own_end = format!(";{}m", *KEY);
    let mut escaped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(place) = rest.find(is_hidden) {
        escaped.push_str(&rest[..place]);
        rest = &rest[place..];
        match own_colour(rest, &own_end) {
            Some(colour) => {
                escaped.push_str(&format!("\x1b[{colour}m"));
                rest = &rest[2 + colour.len() + own_end.len()..];
            }
            None => {
                let hidden = rest.chars().next().unwrap_or_default();
                escaped.extend(hidden.escape_unicode());
                rest = &rest[hidden.len_utf8()..];
            }
        }
    }
    escaped.push_str(rest);
    Cow::Owned(escaped)
}

/// The colour of one of this program's own sequences at the beginning of the text.
fn own_colour(text: &str, own_end: &str) -> Option<&'static str> {
    let sequence = text.strip_prefix("\x1b[")?;
    let is_here =
        |colour: &&str| sequence.strip_prefix(*colour).is_some_and(|rest| rest.starts_with(own_end));
    [RED, GREEN, YELLOW, CYAN, NONE].into_iter().find(is_here)
}

/// Escapes the same characters in JSON, which stays the same JSON: they can only be inside its strings.
pub fn escape_json(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| if is_hidden(c) { format!("\\u{:04x}", c as u32) } else { c.to_string() };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Control characters (C0, DEL, C1), and those that change the direction of the text around them.
fn is_hidden(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t')
        || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Removes colour.
pub fn plain(text: &str) -> String {
    strip_str(text).to_string()
}

/// Removes colour if the stream does not show it.
pub fn for_stream(text: &str, stream: &impl anstream::stream::RawStream) -> String {
    if is_shown(stream) { text.to_owned() } else { plain(text) }
}

/// Whether the stream shows colour.
pub fn is_shown(stream: &impl anstream::stream::RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(escape_controls("plain\n\ttext"), "plain\n\ttext");
        let own = format!("{ERROR} {}", good("fits"));
        assert_eq!(escape_controls(&own), "\x1b[1;31merror:\x1b[0m \x1b[32mfits\x1b[0m");
        assert_eq!(plain(&own), "error: fits");
        assert_eq!(escape_controls("a\x1b]0;title\x07b"), "a\\u{1b}]0;title\\u{7}b");
        assert_eq!(escape_controls("a\x1b[2Jb\r\u{9b}31m"), "a\\u{1b}[2Jb\\u{d}\\u{9b}31m");
        assert_eq!(escape_controls("\u{202e}cod.exe\x7f"), "\\u{202e}cod.exe\\u{7f}");
    }

    #[test]
    fn colours_in_a_text_from_a_file_are_not_the_programs_own() {
        for foreign in ["\x1b[1;31m", "\x1b[32m", "\x1b[0m", "\x1b[32;1m", "\x1b[1;31;7m", "\x1b["] {
            let said = format!("{WARNING} `{foreign}`");
            let expected = format!("\x1b[33mwarning:\x1b[0m `\\u{{1b}}{}`", &foreign[1..]);
            assert_eq!(escape_controls(&said), expected);
        }
    }

    #[test]
    fn escaped_json_is_the_same_json() {
        let value = serde_json::json!({"a\u{9b}": "\x1b\u{202e}\n\x7f\u{2066} é"});
        let text = format!("{value:#}\n");
        let escaped = escape_json(&text);
        assert!(!escaped.contains(is_hidden), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
    }
}
