//! From nouns to nouns: a decoder, its adapters and a policy become a plan.
//!
//! [`compile_for`] is the page to read: one line per stage, a check after each. Every stage is pure: no file, no device,
//! no clock, no random source, so the same request gives the same plan, byte for byte.
//! [`solve`] searches the policies that memory allows and never touches what changes results.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod arena;
mod attempt;
pub mod autodiff;
mod breadth_search;
pub mod cards;
pub mod choices;
pub mod context;
mod counts;
mod encoder;
pub mod error;
pub mod forward;
mod improve;
mod ladder;
mod lean;
pub mod leaves;
mod linear;
pub mod links;
pub mod model;
pub mod names;
pub mod offloaded_weights;
pub mod passes;
pub mod profile;
mod propose;
mod purposes;
pub mod question;
pub mod request;
pub mod schedule;
mod sketch;
pub mod solution;
pub mod solve;
mod stages;
pub mod update;

pub use context::{Context, Overhead};
pub use error::ModelError;
pub use links::{Link, NamedLink};
pub use model::spec::DecoderSpec;
pub use profile::{DeviceProfile, Profile, Rates};
pub use question::{Budget, Demand, Question};
pub use request::{AdapterForm, DecodeShape, Purpose, Request, TrainedBiases};
pub use smidgen_ir::Choice;
pub use solution::{Price, Reason, Solution, SolveError, Why};
pub use solve::{can_fit, peaks_by_pins, smallest_resident, solve};
pub use stages::{compile, compile_decode, compile_eval, compile_for, compile_logits};
