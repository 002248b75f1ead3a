//! Output to stdout: the data or text that a command prints.
//!
//! Messages go to stderr (`progress.rs`), so that stdout can be piped.

use super::colour;
use super::wrap::{columns, fold};
use crate::failure::Failure;
use std::io::{IsTerminal, Write};

/// Prints text, wrapped to the width of the terminal.
pub fn print_text(text: &str) -> Result<(), Failure> {
    write(&colour::for_stream(&fold(&colour::escape_controls(text), columns()), &std::io::stdout()))
}

/// Prints text whose lines are as long as they should be.
pub fn print_lines(text: &str) -> Result<(), Failure> {
    write(&colour::for_stream(&colour::escape_controls(text), &std::io::stdout()))
}

/// Prints rendered JSON, without a control character even for a pipe.
pub fn print_json(text: &str) -> Result<(), Failure> {
    write(&colour::escape_json(text))
}

/// Prints what a command reports, as JSON or as lines.
pub fn print_report(text: &str, is_json: bool) -> Result<(), Failure> {
    if is_json { print_json(text) } else { print_lines(text) }
}

/// Prints data that programs read, such as generated text, byte for byte, except that control characters are escaped on
/// a terminal.
pub fn print_data(text: &str) -> Result<(), Failure> {
    if std::io::stdout().is_terminal() { write(&colour::escape_controls(text)) } else { write(text) }
}

/// A reader that closed the pipe (`| head`) is not a failure.
fn write(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::disk(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}
