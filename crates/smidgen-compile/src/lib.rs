//! The compiler: it turns a decoder, its adapters and a policy into a plan.
//!
//! Start reading at [`compile_for`] (`stages.rs`), which runs one stage after the other and checks each result. Every stage
//! is pure: it uses no file, device, clock or random source, so the same request gives the same plan, byte for byte.
//! [`solve`] (`solve/mod.rs`) finds the fastest policy whose plan fits a budget, and never changes a result.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod arena;
mod device;
pub mod error;
mod graph;
pub mod model;
pub mod names;
pub mod passes;
pub mod request;
pub mod schedule;
pub mod solve;
mod stages;

pub use device::context::{Context, Overhead};
pub use device::{cards, context, links, profile};
pub use error::ModelError;
pub use graph::{autodiff, forward, leaves, update};
pub use links::{Link, NamedLink};
pub use model::spec::DecoderSpec;
pub use profile::{DeviceProfile, Profile, Rates};
pub use request::{AdapterForm, DecodeShape, Purpose, Request, TrainedBiases};
pub use smidgen_ir::Choice;
pub use solve::fitting::{Fitting, Look, largest};
pub use solve::question::{Budget, Demand, Question};
pub use solve::solution::{Price, Reason, Solution, SolveError, Why};
pub use solve::{
    choices, fits_with_little_offloaded, fitting, offloaded_weights, question, smallest_resident, solution,
    solve, solve_quickly,
};
pub use stages::{compile, compile_decode, compile_eval, compile_for, compile_logits};
