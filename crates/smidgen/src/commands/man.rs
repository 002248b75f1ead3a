//! `smidgen man`: manual pages, one for the program and one for each command.
//!
//! Generated from the definitions of the command line.

use crate::failure::Failure;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder to write the pages to; it is created
    folder: PathBuf,
}

pub fn run(args: &Args, command: clap::Command) -> Result<(), Failure> {
    let written =
        std::fs::create_dir_all(&args.folder).and_then(|()| clap_mangen::generate_to(command, &args.folder));
    written
        .map_err(|error| Failure::disk(error).context(format!("cannot write to `{}`", args.folder.display())))
}
