//! `smidgen completions`: a script with which a shell completes the commands and their options.
//!
//! It is generated from the definitions of the command line, so it is always up to date.
//! Left out: where to install the script, which differs between shells.

use crate::console::stdout::print;
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
    print(&String::from_utf8(script).expect("shells read text"))
}
