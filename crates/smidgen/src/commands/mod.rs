//! Commands that work on files alone: no recipe, no plan, no device.
//!
//! Each has its arguments and a `run`; the work is in the rooms they call, where tests reach it too.
//! Left out: `plan` and `train`, which the command line holds itself.

pub mod inspect;
pub mod merge;

use crate::failure::Failure;
use std::io::Write;

/// Writes to stdout; a reader that went away (`| head`) is no failure.
pub fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::world(format!("stdout cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}
