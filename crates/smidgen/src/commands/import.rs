//! `smidgen import`: converts another tool's configuration into a recipe.
//!
//! The recipe goes to stdout or into a file, notes about it to stderr; no file is overwritten.
//! The recipe is parsed before it is written, so it is valid except for missing keys, which the notes list.

use super::recipe_args::working_directory;
use crate::console::progress;
use crate::console::stdout::{print_data, print_json};
use crate::failure::Failure;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use smidgen_compile::error::ModelError;
use smidgen_compile::model::read_spec;
use smidgen_formats::json_file::read_json_file;
use smidgen_recipe::import::draft::Places;
use smidgen_recipe::import::origin::Tool;
use smidgen_recipe::import::render::{render_json, render_notes, render_recipe};
use smidgen_recipe::import::{ImportError, Imported, import};
use smidgen_recipe::{RecipeSource, parse_recipe};
use std::io::Read;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// A JSON or YAML configuration of DeepSpeed, accelerate, Transformers, TRL, Axolotl, LLaMA-Factory, torchtune,
    /// Unsloth or mlx-lm, or an adapter_config.json
    file: PathBuf,
    /// Keys of the recipe to add or override, as `section.key=value`
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// File for the recipe [default: stdout]
    #[arg(long, value_name = "RECIPE")]
    out: Option<PathBuf>,
    /// The tool of the configuration [default: detected from its keys]
    #[arg(long, value_name = "TOOL", value_parser = tools())]
    from: Option<Tool>,
    /// Print the recipe and all notes as JSON
    #[arg(long)]
    json: bool,
}

/// The names of the tools, each with a description of its file.
fn tools() -> impl TypedValueParser<Value = Tool> {
    let words = Tool::ALL.map(|tool| PossibleValue::new(tool.word()).help(tool.file()));
    let of_word = |word: String| Tool::ALL.into_iter().find(|tool| tool.word() == word).ok_or("unknown tool");
    PossibleValuesParser::new(words).try_map(of_word)
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let here = working_directory()?;
    let file = args.file.display().to_string();
    let text = read_text(&args.file)?;
    let recipe_folder = match args.out.as_deref().and_then(Path::parent) {
        Some(folder) if folder != Path::new("") => here.join(folder).components().collect(),
        _ => here.clone(),
    };
    let file_folder = args.file.parent().map_or_else(|| here.clone(), |folder| here.join(folder));
    let file_name =
        args.file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let places = Places {
        working_directory: here.clone(),
        file_name,
        file_folder,
        recipe_folder: recipe_folder.clone(),
    };
    let mut imported =
        import(&text, args.from, &args.overrides, places).map_err(|error| failure(&file, error))?;
    imported.warn_of_families(loads);
    warn_of_config(&mut imported, &recipe_folder);
    let recipe = render_recipe(&imported, &file);
    check(&imported, &recipe, recipe_folder, &here)?;
    if let Some(out) = &args.out {
        write_recipe(out, &recipe)?;
    }
    match (args.json, &args.out) {
        (true, _) => print_json(&format!("{:#}\n", render_json(&imported, &file)))?,
        (false, None) => print_data(&recipe)?,
        (false, Some(_)) => {}
    }
    if !quiet && !args.json {
        progress::say(&render_notes(&imported, &file));
    }
    Ok(())
}

/// Whether models of this `model_type` load.
fn loads(model_type: &str) -> bool {
    let config = serde_json::json!({ "model_type": model_type });
    !matches!(read_spec(&config), Err(ModelError::UnknownArchitecture { .. }))
}

/// Warns if the model is a folder here whose config smidgen does not load.
fn warn_of_config(imported: &mut Imported, recipe_folder: &Path) {
    const MAX_BYTES: u64 = 1_000_000;
    let Some(line) = imported.draft.line("model.path") else { return };
    let path = line.toml.trim_matches('"').to_owned();
    let config = recipe_folder.join(&path).join("config.json");
    let Ok(config) = read_json_file::<serde_json::Value>(&config, MAX_BYTES) else { return };
    if let Err(error) = read_spec(&config) {
        imported.draft.warn(format!("`{path}`: {error}"));
    }
}

fn read_text(path: &Path) -> Result<String, Failure> {
    let unreadable = |error: std::io::Error| {
        Failure::command(error).context(format!("cannot read the configuration `{}`", path.display()))
    };
    // One byte more than the limit, so that a longer file is noticed.
    let most = smidgen_recipe::import::document::MOST_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    // Checked before opening, because opening a pipe would wait for a writer.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(unreadable(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a file")));
    }
    std::fs::File::open(path).map_err(unreadable)?.take(most).read_to_end(&mut bytes).map_err(unreadable)?;
    String::from_utf8(bytes)
        .map_err(|_| Failure::command(format!("`{}` is not text: it is not UTF-8", path.display())))
}

fn failure(file: &str, error: ImportError) -> Failure {
    match &error {
        ImportError::Override(_) => Failure::command(error),
        ImportError::Unrecognized(_) => Failure::command(error)
            .context(format!("`{file}`"))
            .hint(format!("name the tool with `--from`: {}", Tool::ALL.map(Tool::word).join(", "))),
        ImportError::Document(_) if file.ends_with(".toml") => Failure::command(error)
            .context(format!("`{file}`"))
            .hint("a .toml file may be a recipe already: `smidgen plan` reads it"),
        ImportError::Document(_) => Failure::command(error).context(format!("`{file}`")),
        ImportError::Mistakes(_) => {
            let message = format!("`{file}` has {error}");
            Failure::command(error).reworded(message)
        }
    }
}

/// Parses the recipe to find settings that contradict each other; missing keys get stand-ins.
fn check(imported: &Imported, recipe: &str, folder: PathBuf, here: &Path) -> Result<(), Failure> {
    let stand_ins = imported.missing.iter().map(|missing| format!("{}=stand-in", missing.key));
    let source = RecipeSource { file: "the recipe".to_owned(), folder, text: recipe.to_owned() };
    parse_recipe(&source, &stand_ins.collect::<Vec<_>>(), here).map_err(Failure::recipe)?;
    Ok(())
}

fn write_recipe(out: &Path, recipe: &str) -> Result<(), Failure> {
    use std::io::Write;
    let place = out.display();
    let file = std::fs::OpenOptions::new().write(true).create_new(true).open(out);
    let mut file = file.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => Failure::command(format!("`{place}` already exists"))
            .hint("name another file in `--out`, or remove this one"),
        _ => Failure::file("write", out, error),
    })?;
    file.write_all(recipe.as_bytes()).map_err(|error| Failure::file("write", out, error))
}
