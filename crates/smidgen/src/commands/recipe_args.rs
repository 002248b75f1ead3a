//! The arguments that name a recipe, shared by every command that reads one.
//!
//! `KEY=VALUE` arguments override keys of the file; relative paths in them start at the working directory.

use crate::failure::Failure;
use smidgen_recipe::{Recipe, RecipeSource, parse_recipe, read_recipe_from_stdin, read_recipe_source};
use std::path::{Path, PathBuf};

/// The recipe's name if it is read from stdin.
pub const STDIN: &str = "-";

#[derive(Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file; `-` reads it from stdin
    pub recipe: PathBuf,
    /// Keys of the recipe to override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

impl RecipeArgs {
    pub fn read(&self) -> Result<(RecipeSource, Recipe), Failure> {
        read_recipe(&self.recipe, &self.overrides)
    }
}

/// Reads a recipe: its source, and the recipe with overrides and defaults. Paths in overrides start at the working
/// directory.
pub fn read_recipe(path: &Path, overrides: &[String]) -> Result<(RecipeSource, Recipe), Failure> {
    let here = working_directory()?;
    let source =
        if path == Path::new(STDIN) { read_recipe_from_stdin(&here) } else { read_recipe_source(path) }
            .map_err(Failure::recipe)?;
    let recipe = parse_recipe(&source, overrides, &here).map_err(Failure::recipe)?;
    Ok((source, recipe))
}

pub fn working_directory() -> Result<PathBuf, Failure> {
    std::env::current_dir().map_err(|error| Failure::disk(error).context("cannot read the working directory"))
}
