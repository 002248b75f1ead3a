//! Everything printed: lines, tables, colours and progress bars.
//!
//! Data goes to stdout, messages to stderr. Nothing here knows the meaning of a text, only how it looks on a terminal.

pub mod colour;
pub mod columns;
pub mod downloads;
pub mod progress;
pub mod saving;
pub mod stdout;
pub mod wrap;
