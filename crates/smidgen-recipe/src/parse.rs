//! Turns text and overrides into a [`Recipe`], or into the list of all mistakes in them.
//!
//! The file is read first, then overrides in their order: the last value of a key wins. Keys that exclude each other
//! share a field, so an override of one also replaces the other one from the file.
//! Reading continues after a mistake: the key keeps its default, and checks across keys skip it.
//! Nothing here needs the model, the data or a device.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::foreign::{foreign_key_hint, section_for_foreign};
use crate::keys::{KEYS, SECTIONS, find_key};
use crate::mistake::{Mistake, Place, ReadRecipeError, RecipeErrors};
use crate::objective::{APPLICABLE, DEFAULT_LR, ObjectiveMistake};
use crate::render::render_job;
use crate::sections::{Adapter, Batch, Model, Recipe, default_alpha};
use crate::suggest::{
    abbreviate, explain_syntax_error, listed, suggest_key, suggest_override, suggest_override_key,
    suggest_value,
};
use crate::value::{Given, Value, value_of_toml};
use smidgen_ir::words::nearest;
use smidgen_ir::words::{
    AdapterKind, BaseFormat, ClosedWord, Compute, Master, ObjectiveKind, Overflow, ReferenceMemory,
};

const MAX_RECIPE_BYTES: u64 = 256 << 10;

/// The text of a recipe file, before it is parsed.
#[derive(Debug, Clone)]
pub struct RecipeSource {
    /// The path as the caller gave it, for messages.
    pub file: String,
    /// The folder that relative paths in the file start from.
    pub folder: PathBuf,
    /// The text as written.
    pub text: String,
}

/// Reads a text file of limited size. Devices and pipes are refused: they could go on for ever.
fn read_small_file(file: &Path) -> std::io::Result<String> {
    let refused = |what: String| Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, what));
    let metadata = std::fs::metadata(file)?;
    if !metadata.is_file() {
        return refused("it is not a file".to_owned());
    }
    if metadata.len() > MAX_RECIPE_BYTES {
        return refused(format!("it has {} bytes, a recipe has at most {MAX_RECIPE_BYTES}", metadata.len()));
    }
    let mut text = String::new();
    std::fs::File::open(file)?.take(MAX_RECIPE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// Reads a recipe from stdin; relative paths in it start at `folder`.
pub fn read_recipe_from_stdin(folder: &Path) -> Result<RecipeSource, ReadRecipeError> {
    let file = "stdin".to_owned();
    let mut text = String::new();
    if let Err(source) = std::io::stdin().take(MAX_RECIPE_BYTES).read_to_string(&mut text) {
        return Err(ReadRecipeError::Unreadable { file, source });
    }
    Ok(RecipeSource { file, folder: folder.to_owned(), text })
}

/// Reads a recipe file. Its folder is made canonical, so that a recipe has the same paths however the user wrote its
/// path.
pub fn read_recipe_source(file: &Path) -> Result<RecipeSource, ReadRecipeError> {
    let unreadable = |source| ReadRecipeError::Unreadable { file: file.display().to_string(), source };
    let text = read_small_file(file).map_err(unreadable)?;
    let folder = match file.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    Ok(RecipeSource {
        file: file.display().to_string(),
        folder: folder.canonicalize().map_err(unreadable)?,
        text,
    })
}

/// Reads a recipe file, with overrides `section.key=value` and every default filled in.
///
/// Paths in the file are relative to the file; those in overrides, and `output.dir`, to the working directory.
///
/// # Errors
/// A file that cannot be read, or every mistake in it at once, each with its line.
pub fn read_recipe(file: &Path, overrides: &[String]) -> Result<Recipe, ReadRecipeError> {
    let source = read_recipe_source(file)?;
    let working_directory = std::env::current_dir()
        .map_err(|source| ReadRecipeError::Unreadable { file: file.display().to_string(), source })?;
    Ok(parse_recipe(&source, overrides, &working_directory)?)
}

/// Parses a recipe. `overrides` are `section.key=value`; `working_directory` should be absolute.
pub fn parse_recipe(
    source: &RecipeSource,
    overrides: &[String],
    working_directory: &Path,
) -> Result<Recipe, RecipeErrors> {
    let folder = working_directory.join(&source.folder);
    let mut reading = Reading::new(Recipe::with_defaults(), working_directory);
    let (document, errors) = DeTable::parse_recoverable(&source.text);
    let syntax = reading.note_syntax_errors(&source.text, errors);
    if syntax.understood {
        reading.read_document(document.get_ref(), &source.text, &syntax.lines, &folder);
    }
    reading.read_overrides(overrides, working_directory);
    if syntax.understood {
        if !reading.seen.contains_key("adapter.alpha") {
            reading.recipe.adapter.alpha = default_alpha(reading.recipe.adapter.rank);
        }
        if !reading.seen.contains_key("train.lr") && reading.recipe.train.objective != ObjectiveKind::Sft {
            reading.recipe.train.lr = DEFAULT_LR;
        }
        reading.check_across_keys();
        reading.check_objective();
        reading.check_split();
        reading.check_size();
        reading.check_fp8();
        reading.check_full();
        reading.check_required();
    }

    let mut mistakes = reading.mistakes;
    if mistakes.is_empty() {
        return Ok(reading.recipe);
    }
    mistakes.sort_by_key(|mistake| mistake.place.rank());
    Err(RecipeErrors { file: source.file.clone(), mistakes })
}

/// Whether a recipe or its overrides set a key, such as `data.loss_on`. A text that is not valid TOML sets none.
pub fn gives_key(text: &str, overrides: &[String], path: &str) -> bool {
    let (section, name) = path.split_once('.').unwrap_or(("", path));
    let (document, _) = DeTable::parse_recoverable(text);
    let in_text = match document.get_ref().get(section).map(|section| section.get_ref()) {
        Some(DeValue::Table(keys)) => keys.contains_key(name),
        _ => false,
    };
    let sets_it = |text: &String| text.split_once('=').is_some_and(|(given, _)| given.trim() == path);
    in_text || overrides.iter().any(sets_it)
}

impl Recipe {
    /// Checks values that were set in code by the rules of a recipe file: those of each key, and those across keys.
    pub fn check(&self) -> Result<(), RecipeErrors> {
        let source =
            RecipeSource { file: "the recipe".to_owned(), folder: "/".into(), text: render_job(self) };
        let checked = parse_recipe(&source, &[], Path::new("/")).map(drop);
        checked.map_err(|mut errors| {
            // The lines are those of a rendered text that the user has never seen.
            errors.mistakes.iter_mut().for_each(|mistake| mistake.place = Place::Missing);
            errors
        })
    }

    /// Sets one key from text, like an override on the command line: `recipe.set("memory.budget", "8GiB")`.
    /// Relative paths start at `folder`.
    pub fn set(&mut self, key: &str, text: &str, folder: &Path) -> Result<(), RecipeErrors> {
        let mut reading = Reading::new(self.clone(), folder);
        let place = Place::Override(format!("{key}={text}"));
        let (section, name) = key.split_once('.').unwrap_or(("", key));
        reading.read_key(place, section, name, &Value::Bare(text.to_owned()), folder);
        if !reading.mistakes.is_empty() {
            return Err(RecipeErrors { file: "the command line".to_owned(), mistakes: reading.mistakes });
        }
        if self.adapter.alpha == default_alpha(self.adapter.rank) && key == "adapter.rank" {
            reading.recipe.adapter.alpha = default_alpha(reading.recipe.adapter.rank);
        }
        if key == "train.objective" && self.train.lr == Recipe::with_defaults().train.lr {
            let is_other = reading.recipe.train.objective != ObjectiveKind::Sft;
            reading.recipe.train.lr = if is_other { DEFAULT_LR } else { self.train.lr };
        }
        *self = reading.recipe;
        Ok(())
    }
}

/// The defaults with one override. Its paths start at `folder`, except `output.dir`.
pub(crate) fn read_override(text: &str, folder: &Path) -> Result<Recipe, RecipeErrors> {
    let mut reading = Reading::new(Recipe::with_defaults(), Path::new(""));
    reading.read_overrides(&[text.to_owned()], folder);
    if reading.mistakes.is_empty() {
        Ok(reading.recipe)
    } else {
        Err(RecipeErrors { file: "the command line".to_owned(), mistakes: reading.mistakes })
    }
}

/// A recipe while it is read.
struct Reading<'a> {
    recipe: Recipe,
    /// Keys that were given, by `section.key`.
    seen: HashMap<String, Seen>,
    mistakes: Vec<Mistake>,
    working_directory: &'a Path,
}

/// Where a key was last given, and whether its value was accepted.
struct Seen {
    place: Place,
    accepted: bool,
}

/// The result of the syntax check.
struct Syntax {
    /// Every error is confined to its line, so the rest of the document can be trusted.
    understood: bool,
    /// Lines with mistakes that are already reported.
    lines: Vec<usize>,
}

impl Reading<'_> {
    fn new(recipe: Recipe, working_directory: &Path) -> Reading<'_> {
        Reading { recipe, seen: HashMap::new(), mistakes: Vec::new(), working_directory }
    }

    fn note(&mut self, place: Place, key: &str, message: String, hint: Option<String>) {
        self.mistakes.push(Mistake { place, key: key.to_owned(), message, hint });
    }

    /// Notes a mistake at the place where the key was given; none if it was not given.
    fn note_given(&mut self, key: &str, message: String, hint: &str) {
        if let Some(seen) = self.seen.get(key) {
            self.note(seen.place.clone(), key, message, Some(hint.to_owned()));
        }
    }

    /// Whether a key has its default because its value was refused.
    fn is_refused(&self, key: &str) -> bool {
        self.seen.get(key).is_some_and(|seen| !seen.accepted)
    }

    /// Errors within a line are all reported, and the rest of the document is read as usual.
    /// The first error that affects other lines, such as an open bracket, ends the report.
    fn note_syntax_errors(&mut self, text: &str, errors: Vec<toml::de::Error>) -> Syntax {
        let mut lines = Vec::new();
        let mut errors: Vec<(usize, toml::de::Error)> =
            errors.into_iter().map(|error| (error.span().map_or(0, |span| span.start), error)).collect();
        errors.sort_by_key(|(start, _)| *start);
        for (start, error) in errors {
            let (line, column) = line_and_column(text, start);
            if !lines.contains(&line) {
                lines.push(line);
                let written = error.span().and_then(|span| text.get(span)).unwrap_or("").trim();
                let (message, hint) = explain_syntax_error(error.message(), written);
                self.note(Place::LineColumn(line, column), "", message, hint);
            }
            if !ERRORS_WITHIN_A_LINE.iter().any(|known| error.message().starts_with(known)) {
                return Syntax { understood: false, lines };
            }
        }
        Syntax { understood: true, lines }
    }

    fn read_document(&mut self, document: &DeTable<'_>, text: &str, lines_to_skip: &[usize], folder: &Path) {
        let line_of = |offset: usize| line_and_column(text, offset).0;
        for (name, value) in document.iter() {
            let (name, line) = (name.get_ref().as_ref(), line_of(name.span().start));
            let place = Place::Line(line);
            let known_section = SECTIONS.contains(&name);
            let DeValue::Table(table) = value.get_ref() else {
                if !lines_to_skip.contains(&line) {
                    self.note_stray_value(place, name, value.get_ref(), known_section);
                }
                continue;
            };
            // A mistyped section is read as the nearest known one, so that its keys are checked too.
            let meant = if known_section { Some(name) } else { self.note_unknown_section(place, name) };
            let mut entries: Vec<_> = table.iter().collect();
            entries.sort_by_key(|(name, _)| name.span().start);
            for (name, value) in entries {
                let line = line_of(name.span().start);
                let (name, place) = (name.get_ref().as_ref(), Place::Line(line));
                let end = line_of(end_of(value).saturating_sub(1));
                let reported = lines_to_skip.iter().any(|skip| (line..=end).contains(skip));
                match meant {
                    Some(section) if reported => {
                        let seen = Seen { place, accepted: false };
                        self.seen.insert(format!("{section}.{name}"), seen);
                    }
                    Some(section) => {
                        self.read_key(place, section, name, &value_of_toml(value.get_ref()), folder)
                    }
                    None => {
                        if let Some(hint) = foreign_key_hint("", name).filter(|_| !reported) {
                            self.note_unknown_key(place, name, Some(hint.to_owned()));
                        }
                    }
                }
            }
        }
    }

    /// A value at the top level, where only sections belong.
    fn note_stray_value(&mut self, place: Place, name: &str, value: &DeValue<'_>, known_section: bool) {
        if !known_section {
            return self.note_unknown_key(place, name, suggest_key("", name));
        }
        let (message, hint) = match value {
            DeValue::Array(items) if items.iter().any(|item| item.get_ref().is_table()) => {
                (format!("`[[{name}]]` is a list of sections"), format!("write `[{name}]`, once"))
            }
            other => {
                let keys: Vec<&str> =
                    KEYS.iter().filter(|key| key.section == name).map(|key| key.name).collect();
                let got = abbreviate(&value_of_toml(other));
                (
                    format!("`{name}` must be a section, got {got}"),
                    format!("write `[{name}]`, then {}", listed(&keys)),
                )
            }
        };
        self.note(place, name, message, Some(hint));
    }

    /// Notes the mistake; returns the nearest known section, if there is one.
    fn note_unknown_section(&mut self, place: Place, name: &str) -> Option<&'static str> {
        let lower = name.to_lowercase().replace('-', "_");
        let near = nearest(&lower, SECTIONS);
        let hint = match near.or_else(|| section_for_foreign(&lower)) {
            Some(section) => format!("did you mean `[{section}]`?"),
            None => match foreign_key_hint("", name) {
                Some(hint) => hint.to_owned(),
                None => format!("the sections are {}", listed(&SECTIONS)),
            },
        };
        self.note(place, name, format!("unknown section `[{name}]`"), Some(hint));
        near
    }

    fn note_unknown_key(&mut self, place: Place, key: &str, hint: Option<String>) {
        self.note(place, key, format!("unknown key `{key}`"), hint);
    }

    fn read_overrides(&mut self, overrides: &[String], folder: &Path) {
        // The file's keys no longer exclude others: an override of `steps` replaces the file's `epochs`.
        for key in KEYS.iter().filter(|key| key.excludes.is_some()) {
            self.seen.remove(&key.path());
        }
        for text in overrides {
            let place = Place::Override(text.clone());
            let Some((path, value)) = text.split_once('=') else {
                let message = "an override is written `section.key=value`".to_owned();
                self.note(place, text, message, suggest_override_key(text));
                continue;
            };
            let (path, value) = (path.trim(), Value::Bare(value.trim().to_owned()));
            let is_hydra = path.starts_with(['+', '~']) || path.matches('.').count() > 1;
            match path.split_once('.').filter(|_| !is_hydra) {
                Some((section, name)) => self.read_key(place, section.trim(), name.trim(), &value, folder),
                None => self.note_unknown_key(place, path, suggest_override(path)),
            }
        }
    }

    /// Reads one key of the file or of an override into the recipe.
    fn read_key(&mut self, place: Place, section: &str, name: &str, value: &Value, folder: &Path) {
        let path = format!("{section}.{name}");
        let Some(key) = find_key(section, name) else {
            return self.note_unknown_key(place, &path, suggest_key(section, name));
        };
        if let Some(rival) = key.excludes.map(|rival| format!("{section}.{rival}"))
            && let Some(seen) = self.seen.get(&rival)
        {
            let other = match &seen.place {
                Place::Line(line) | Place::LineColumn(line, _) => {
                    format!("`{rival}` in line {line}")
                }
                Place::Override(text) => format!("`{text}`"),
                Place::Missing => format!("`{rival}`"),
            };
            let message = format!("`{path}` and {other} exclude each other");
            self.note(place.clone(), &path, message, Some("keep one of them".to_owned()));
        }
        let given = Given { value, folder, working_directory: self.working_directory };
        let accepted = (key.set)(&mut self.recipe, &given).is_some();
        if !accepted {
            let message = format!("`{path}` must be {}, got {}", key.accepts.describe(), abbreviate(value));
            self.note(place.clone(), &path, message, suggest_value(key, &given));
        }
        self.seen.insert(path, Seen { place, accepted });
    }

    /// Values that are valid alone and have no effect together.
    fn check_across_keys(&mut self) {
        let Recipe { train, data, memory, .. } = &self.recipe;
        let no_eval_data = data.eval.is_empty() && data.split == 0.0 && !self.is_refused("data.eval");
        let eval_never = train.eval_every == 0 && !self.is_refused("train.eval_every");
        let never_saved = train.save_every == 0 && !self.is_refused("train.save_every");
        let inert = [
            (train.eval_every > 0 && no_eval_data, "train.eval_every", "0", "data.eval", "names no file"),
            (train.early_stop > 0 && eval_never, "train.early_stop", "0", "train.eval_every", "is 0"),
            (memory.adapt && never_saved, "memory.adapt", "false", "train.save_every", "is 0"),
        ];
        for (_, key, off, needed, but) in inert.into_iter().filter(|(is_inert, ..)| *is_inert) {
            let message = format!("`{key}` has no effect: `{needed}` {but}");
            self.note_given(key, message, &format!("set `{needed}`, or `{key} = {off}`"));
        }
    }

    /// Keys that the objective does not read, and values that do not suit it.
    fn check_objective(&mut self) {
        let kind = self.recipe.train.objective;
        if self.is_refused("train.objective") {
            return;
        }
        for (name, kinds) in APPLICABLE {
            if !kinds.contains(&kind) {
                let read_by: Vec<&str> = kinds.iter().map(|kind| kind.word()).collect();
                self.note_given(
                    &format!("train.{name}"),
                    format!("`train.{name}` has no effect with `train.objective = \"{kind}\"`"),
                    &format!("remove it; it is a setting of {}", read_by.join(", ")),
                );
            }
        }
        if let Err(ObjectiveMistake { key, message, hint }) = self.recipe.objective()
            && !self.is_refused(key)
        {
            let place = self.seen.get(key).map_or(Place::Missing, |seen| seen.place.clone());
            self.note(place, key, message, Some(hint));
        }
        let Recipe { train, data, memory, .. } = &self.recipe;
        let mut inert = Vec::new();
        if memory.reference != ReferenceMemory::Auto && !self.recipe.has_reference() {
            let message = format!("`memory.reference` has no effect: `{kind}` as set here has no reference");
            inert.push(("memory.reference", message, "remove it"));
        } else if memory.reference == ReferenceMemory::Pass && self.recipe.changes_base() {
            let message =
                "`memory.reference = \"pass\"`: training changes the base, so no pass computes the reference";
            inert.push(("memory.reference", message.into(), "write `memory.reference = \"cached\"`"));
        }
        if let Some((key, message, hint)) = self.recipe.refused_reference() {
            inert.push((key, message, hint));
        }
        let counts_tokens = kind != ObjectiveKind::Sft && matches!(train.batch, Batch::Tokens(_));
        if kind != ObjectiveKind::Sft && data.overflow == Overflow::Chunk {
            let message = "`data.overflow = \"chunk\"` would cut an answer into pieces".to_owned();
            let hint = "`truncate` cuts the end of an answer, `drop` leaves its row out";
            inert.push(("data.overflow", message, hint));
        }
        inert.extend(self.recipe.refused_generation());
        inert.into_iter().for_each(|(key, message, hint)| self.note_given(key, message, hint));
        let max_tokens = self.recipe.data.max_tokens;
        let longest = self.recipe.answer_settings().max_completion_length;
        if self.recipe.generates() && longest >= max_tokens {
            let key = if self.seen.contains_key("data.max_tokens") {
                "data.max_tokens"
            } else {
                "train.max_completion_length"
            };
            let place = self.seen.get(key).map_or(Place::Missing, |seen| seen.place.clone());
            let message = format!(
                "`data.max_tokens = {max_tokens}` leaves no room for a prompt: `train.max_completion_length` is {longest}"
            );
            let hint = "a prompt and its answer together have at most `data.max_tokens`".to_owned();
            self.note(place, key, message, Some(hint));
        }
        if counts_tokens {
            let place = self.seen.get("train.batch_tokens").map_or(Place::Missing, |seen| seen.place.clone());
            let message = format!("`train.batch_tokens` cannot be used with `train.objective = \"{kind}\"`");
            self.note(place, "train.batch_tokens", message, Some("count rows: `train.batch`".into()));
        }
    }

    /// Matmuls in fp8 need weights in fp8.
    fn check_fp8(&mut self) {
        let Model { base, compute, .. } = self.recipe.model;
        if compute == Compute::Fp8 && !matches!(base, BaseFormat::AsStored | BaseFormat::Fp8) {
            self.note_given(
                "model.compute",
                format!("`model.compute = \"fp8\"` needs weights in fp8, and `model.base` is `{base}`"),
                "remove `model.base`, or write `model.base = \"fp8\"`",
            );
        }
    }

    /// Byte counts of a step with more tokens could overflow.
    fn check_size(&mut self) {
        const MOST_TOKENS: usize = 1 << 32;
        let Recipe { train, data, .. } = &self.recipe;
        let Batch::Samples(rows) = train.batch else { return };
        let answers = self.recipe.answer_settings().num_generations;
        let samples =
            if train.objective == ObjectiveKind::Grpo { rows.saturating_mul(answers) } else { rows };
        if samples.saturating_mul(data.max_tokens) > MOST_TOKENS {
            self.note_given(
                "train.batch",
                format!("`train.batch` x `data.max_tokens` is more than {MOST_TOKENS} tokens per step"),
                "lower one of them",
            );
        }
    }

    /// Evaluation data comes from files or from the training data.
    fn check_split(&mut self) {
        let data = &self.recipe.data;
        if data.split > 0.0 && !data.eval.is_empty() {
            self.note_given(
                "data.split",
                "`data.split` and `data.eval` exclude each other".to_owned(),
                "keep one of them: `data.eval=` or `data.split=0` on the command line removes the other",
            );
        }
    }

    /// Keys that apply only to adapters, or only without one.
    fn check_full(&mut self) {
        if self.recipe.adapter.kind != AdapterKind::Full {
            if self.recipe.train.master != Master::F32 {
                self.note_given(
                    "train.master",
                    "`train.master` has no effect: adapters are trained in f32".to_owned(),
                    "remove it, or write `adapter.kind = \"full\"`",
                );
            }
            return;
        }
        for (key, is_default) in keys_of_adapters(&self.recipe.adapter) {
            if !is_default && !self.is_refused(key) {
                self.note_given(
                    key,
                    format!("`{key}` has no effect: `adapter.kind = \"full\"` trains the base weights"),
                    "remove it, or choose a kind of adapter",
                );
            }
        }
    }

    fn check_required(&mut self) {
        for key in KEYS.iter().filter(|key| key.required) {
            let path = key.path();
            let is_mixed = !self.recipe.data.mix.is_empty() || self.is_refused("data.mix");
            let is_replaced = path == "data.train" && is_mixed;
            if !self.seen.contains_key(&path) && !is_replaced {
                let hint = format!("it must be {}", key.accepts.describe());
                self.note(Place::Missing, &path, format!("missing key `{path}`"), Some(hint));
            }
        }
    }
}

/// Keys that apply only to adapters, and whether they have their defaults. A `job.toml` sets all of them.
fn keys_of_adapters(adapter: &Adapter) -> [(&'static str, bool); 10] {
    let default = Recipe::with_defaults().adapter;
    [
        ("adapter.rank", adapter.rank == default.rank),
        ("adapter.alpha", adapter.alpha == default_alpha(adapter.rank)),
        ("adapter.dropout", adapter.dropout == default.dropout),
        ("adapter.init", adapter.init == default.init),
        ("adapter.train", adapter.train.is_empty()),
        ("adapter.rank_pattern", adapter.rank_pattern.is_empty()),
        ("adapter.alpha_pattern", adapter.alpha_pattern.is_empty()),
        ("adapter.bias", adapter.bias == default.bias),
        ("adapter.reg", adapter.reg == default.reg),
        ("adapter.sigma", adapter.sigma == default.sigma),
    ]
}

/// Offset after the last character of a value.
fn end_of(value: &toml::Spanned<DeValue<'_>>) -> usize {
    let inside = match value.get_ref() {
        DeValue::Table(table) => table.iter().map(|(_, inner)| end_of(inner)).max(),
        _ => None,
    };
    inside.unwrap_or(0).max(value.span().end)
}

/// Both from 1; the column counts characters.
fn line_and_column(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// Messages of the TOML parser for errors after which the next line can be read as usual.
/// If the parser changes a message, reports get shorter but never wrong.
const ERRORS_WITHIN_A_LINE: [&str; 10] = [
    "string values must be quoted",
    "duplicate key",
    "invalid boolean",
    "invalid float",
    "invalid integer",
    "invalid mantissa",
    "invalid fraction",
    "invalid exponent",
    "invalid basic string",
    "invalid literal string",
];
