//! Terminal output: lines, tables, colours and progress bars.
//!
//! Data goes to stdout, messages to stderr. Code here does not know what a text means, only how to print it.

pub mod colour;
pub mod columns;
pub mod downloads;
pub mod progress;
pub mod saving;
pub mod stdout;
pub mod wrap;
