//! `smidgen completions`: a shell's completion script for the commands and their options.
//!
//! Generated from the definitions of the command line.
//! Left out: installing the script, which differs between shells.

use crate::console::stdout::print_data;
use crate::failure::Failure;
use clap_complete::Shell;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell to write the script for
    shell: Shell,
}

pub fn run(args: &Args, mut command: clap::Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "smidgen", &mut script);
    print_data(&String::from_utf8(script).expect("completion scripts are UTF-8"))
}
