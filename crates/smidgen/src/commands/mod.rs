//! Commands that stand for themselves: each file holds the arguments of one and what it does.
//!
//! `cli.rs` parses the words and calls them; data goes to stdout and talk to stderr.

pub mod pull;
