//! `smidgen completions`: a script that teaches a shell the commands and their options.
//!
//! Made from the definitions of the command line itself, so that it never lags behind them.
//! Left out: where shells look for such scripts, which their manuals say.

use crate::console::stdout::print;
use crate::failure::Failure;
use clap_complete::Shell;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell that is to read it
    shell: Shell,
}

pub fn run(args: &Args, mut command: clap::Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "smidgen", &mut script);
    print(&String::from_utf8(script).expect("shells read text"))
}
