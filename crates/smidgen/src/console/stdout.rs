//! Output to stdout: the data or text that a command prints.
//!
//! Messages go to stderr (`progress.rs`), so that stdout can be piped.

use super::colour;
use super::wrap::{columns, fold};
use crate::failure::Failure;
use std::io::{IsTerminal, Write};

/// Prints text, wrapped to the width of the terminal.
pub fn print_text(text: &str) -> Result<(), Failure> {
    print(&colour::for_stream(&fold(&colour::escape_controls(text), columns()), &std::io::stdout()))
}

/// Prints data unchanged, except that control characters are escaped on a terminal. A reader that closed the pipe
/// (`| head`) is not a failure.
pub fn print(text: &str) -> Result<(), Failure> {
    let text = match std::io::stdout().is_terminal() {
        true => colour::escape_controls(text),
        false => text.into(),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::disk(error).context("cannot write to stdout"))
        }
        _ => Ok(()),
    }
}
