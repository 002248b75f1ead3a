//! Colour, put on words where a text is made, and taken off again where a stream or a file shows none.
//!
//! Only the word that says how things stand is coloured. `NO_COLOR` turns colour off and `CLICOLOR_FORCE` on, as
//! elsewhere; a pipe gets none.

use anstream::adapter::strip_str;
use anstream::{AutoStream, ColorChoice};

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

/// The text without colour.
pub fn plain(text: &str) -> String {
    strip_str(text).to_string()
}

/// The text as a stream shows it.
pub fn for_stream(text: &str, stream: &impl anstream::stream::RawStream) -> String {
    if is_shown(stream) { text.to_owned() } else { plain(text) }
}

pub fn is_shown(stream: &impl anstream::stream::RawStream) -> bool {
    AutoStream::choice(stream) != ColorChoice::Never
}
