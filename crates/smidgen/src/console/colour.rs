//! Terminal colours: added to words when a text is made, and removed for pipes and files.
//!
//! Only words such as `error:` and `fits` are coloured. `NO_COLOR` turns colour off, `CLICOLOR_FORCE` turns it on.

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};
use std::borrow::Cow;

pub const ERROR: &str = "\x1b[1;31merror:\x1b[0m";
pub const WARNING: &str = "\x1b[33mwarning:\x1b[0m";
pub const HINT: &str = "\x1b[36mhint:\x1b[0m";
pub const NOTE: &str = "\x1b[36mnote:\x1b[0m";
pub const REMEDY: &str = "\x1b[36mremedy:\x1b[0m";

pub fn good(word: &str) -> String {
    format!("\x1b[32m{word}\x1b[0m")
}

pub fn caution(word: &str) -> String {
    format!("\x1b[33m{word}\x1b[0m")
}

pub fn bad(words: &str) -> String {
    format!("\x1b[1;31m{words}\x1b[0m")
}

/// The colour sequences that this program writes.
const OWN: [&str; 6] = ["\x1b[1;31m", "\x1b[33m", "\x1b[36m", "\x1b[32m", "\x1b[1m", "\x1b[0m"];

/// Escapes control characters: names in files and answers of servers could otherwise move the cursor, change the title
/// or hide text. Line breaks, tabs and this program's own colours are kept.
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let length = match OWN.iter().find(|own| rest.starts_with(**own)) {
            Some(own) => own.len(),
            None => next.len_utf8(),
        };
        match is_hidden(next) && length == next.len_utf8() {
            true => escaped.extend(next.escape_unicode()),
            false => escaped.push_str(&rest[..length]),
        }
        rest = &rest[length..];
    }
    Cow::Owned(escaped)
}

/// Control characters, and those that reverse the direction of the text around them.
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
        assert_eq!(escape_controls(&own), own);
        assert_eq!(escape_controls("a\x1b]0;title\x07b"), "a\\u{1b}]0;title\\u{7}b");
        assert_eq!(escape_controls("a\x1b[2Jb\r\u{9b}31m"), "a\\u{1b}[2Jb\\u{d}\\u{9b}31m");
        assert_eq!(escape_controls("\u{202e}cod.exe"), "\\u{202e}cod.exe");
        assert_eq!(escape_controls(&format!("{WARNING} \x1b[31mx")), format!("{WARNING} \\u{{1b}}[31mx"));
    }
}
