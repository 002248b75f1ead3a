//! Commands beside planning and training: each file holds the arguments of one and what it prints.
//!
//! `cli.rs` parses the words and calls their `run`; the work is in the rooms they call, where tests reach it too.
//! Data goes to stdout and talk to stderr.
//! Left out: `plan` and `train`, which the command line holds itself.

pub mod bench;
pub mod chat;
pub mod completions;
pub mod dash;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod fit;
pub mod generate;
pub mod import;
pub mod inspect;
pub mod merge;
pub mod original;
pub mod preview;
pub mod pull;
pub mod report;

use crate::console::colour;
use crate::console::wrap::{columns, fold};
use crate::failure::Failure;
use std::io::{IsTerminal, Write};

/// Writes a text for people to stdout, its lines no wider than the terminal.
pub fn print_text(text: &str) -> Result<(), Failure> {
    let folded = fold(text, columns());
    match colour::is_wanted(std::io::stdout().is_terminal()) {
        true => print(&colour::paint(&folded)),
        false => print(&folded),
    }
}

/// Writes to stdout; a reader that went away (`| head`) is no failure.
pub fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::world(format!("stdout cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}
