//! The program from outside: what it prints, writes, refuses and promises, driven through its binary.
//!
//! One binary for all of it, so that it links once. Models and data are the committed fixtures, copied
//! into a folder that lives as long as the test.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic, in functions beside it too")]

mod bad_data;
mod bad_model;
mod bad_recipe;
mod benching;
mod coated_devices;
mod commands;
mod contents;
mod continuing;
mod data_sources;
mod doctor;
mod evaluating;
mod event_file;
mod examples;
mod exporting;
mod fitting;
#[path = "../../../smidgen-formats/tests/four_bit/mod.rs"]
mod four_bit;
mod full;
mod generating;
mod guards;
#[cfg(unix)]
mod hub_server;
mod importing;
mod inspecting;
mod memory;
mod merging;
mod mixtures;
mod moving_memory;
mod owner;
mod parity;
mod plan_json;
mod profiles;
#[cfg(unix)]
mod pull;
#[cfg(unix)]
mod pull_pypi;
#[cfg(unix)]
mod pull_rows;
mod quantized;
mod ranks;
mod reporting;
mod resume;
mod rollouts;
mod scratch;
mod serving;
#[cfg(unix)]
mod signals;
mod smollm2;
mod speech;
mod spoken_digits;
mod stopping;
mod text_data;
mod text_stream;
mod torture;
mod training;
mod tutorial;
mod whole_life;
mod words;
