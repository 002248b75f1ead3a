//! Tests of this crate from outside, in one binary.
//!
//! Its allocator counts bytes per thread, so that a test can say how much memory reading a file may take.
//! Tests of one file are next to it, in `src/`.

#![allow(clippy::unwrap_used)]

mod import;
mod meaning;
#[path = "../../../smidgen-formats/tests/mutation/mod.rs"]
mod mutation;
