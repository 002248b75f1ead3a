//! `smidgen inspect`: what is in an adapter's folder, a run's, or a model's.
//!
//! Left out for the moment of writing.
use crate::failure::Failure;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of an adapter, a run or a model
    path: PathBuf,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    Err(Failure::world(args.path.display()))
}
