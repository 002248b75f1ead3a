//! `smidgen schema`: a JSON schema of recipes, for editors that complete and check TOML files.
//!
//! With `#:schema smidgen.schema.json` in its first line, a recipe is checked while it is written.

use crate::console::stdout::print_json;
use crate::failure::Failure;
use smidgen_recipe::schema::render_schema;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Accepted as in every other command: the output is always JSON
    #[arg(long)]
    json: bool,
}

pub fn run(_: &Args) -> Result<(), Failure> {
    print_json(&format!("{:#}\n", render_schema()))
}
