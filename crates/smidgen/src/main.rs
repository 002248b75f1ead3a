//! The `smidgen` program.
//!
//! Everything it does is in the library, so that tests can do it too.

use std::process::ExitCode;

fn main() -> ExitCode {
    smidgen::internal::run()
}
