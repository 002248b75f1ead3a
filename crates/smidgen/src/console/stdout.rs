//! Output to stdout: data, and the text that a command was asked for.
//!
//! Messages go to stderr instead (`progress.rs`), so that stdout can be piped.

use super::colour;
use super::wrap::{columns, fold};
use crate::failure::Failure;
use std::io::{IsTerminal, Write};

/// Writes text for people, wrapped to the width of the terminal.
pub fn print_text(text: &str) -> Result<(), Failure> {
    print(&colour::for_stream(&fold(&colour::shown(text), columns()), &std::io::stdout()))
}

/// Writes data, unchanged unless a terminal would obey its control characters. A reader that closed the pipe (`| head`)
/// is not a failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let text = match std::io::stdout().is_terminal() {
        true => colour::shown(text),
        false => text.into(),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::disk(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}
