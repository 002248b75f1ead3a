//! The compiler: it turns a decoder, its adapters and a policy into a plan.
//!
//! Start reading at [`compile_for`] (`stages.rs`), which runs one stage after the other and checks each result. Every stage
//! is pure: it uses no file, device, clock or random source, so the same request gives the same plan, byte for byte.
//! [`solve`] (`solve.rs`) finds the fastest policy whose plan fits a budget, and never changes a result: `choices.rs` says
//! which policies there are, `sketch.rs` and `propose.rs` find promising ones, `improve.rs` refines them.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod arena;
mod attempt;
mod breadth_search;
pub mod choices;
mod counts;
mod device;
pub mod error;
pub mod fitting;
mod graph;
mod improve;
mod ladder;
mod lean;
pub mod model;
pub mod names;
pub mod offloaded_weights;
pub mod passes;
mod propose;
mod purposes;
pub mod question;
pub mod request;
pub mod schedule;
mod sketch;
pub mod solution;
pub mod solve;
mod stages;

pub use device::context::{Context, Overhead};
pub use device::{cards, context, links, profile};
pub use error::ModelError;
pub use fitting::{Fitting, Look, largest};
pub use graph::{autodiff, forward, leaves, update};
pub use links::{Link, NamedLink};
pub use model::spec::DecoderSpec;
pub use profile::{DeviceProfile, Profile, Rates};
pub use question::{Budget, Demand, Question};
pub use request::{AdapterForm, DecodeShape, Purpose, Request, TrainedBiases};
pub use smidgen_ir::Choice;
pub use solution::{Price, Reason, Solution, SolveError, Why};
pub use solve::{smallest_resident, solve};
pub use stages::{compile, compile_decode, compile_eval, compile_for, compile_logits};
