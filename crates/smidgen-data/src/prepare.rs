//! From the rows that a recipe names, or that the caller holds, to a token set: format, template, tokens, cache.
//!
//! The tokenizer is dropped afterwards: it is large, and training does not need it. For a cached set it is not even
//! loaded. Whether the model supports what the recipe asks for is checked by the caller.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::words::{DataFormat, LossOn, OnBadRow, Overflow};

use crate::bad_rows::BadRows;
use crate::cache::{CacheKey, cache_file};
use crate::clip_row::AudioOptions;
use crate::format::{Recognized, RowFormat, RowReading, recognize};
use crate::mask::RowEncoder;
pub use crate::prepare_error::PrepareError;
use crate::source::{RowSource, file_kind};
use crate::template::{DataTemplate, TemplateChoice, TemplateKind, choose_template, template_source};
use crate::token_builder::{LargeSets, TokenSetBuilder};
use crate::token_file::{open_set, write_set};
use crate::token_record::LabelForm;
use crate::token_row::TokensError;
use crate::tokenize::{RowNotes, store_token_rows, tokenize_rows};
use crate::tokens::{TokenLimits, TokenSet, TokenStats};
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::Tokenizer;

/// Sets with more bytes of records than this are read from their file, sample by sample.
const LARGE_SET_BYTES: usize = 64 << 20;

/// One source of rows.
pub type Part<'a> = RowReading<'a, DataFormat>;

/// What determines a set, apart from its rows.
#[derive(Clone, Copy, Debug)]
pub struct PrepareOptions<'a> {
    pub template: &'a TemplateChoice,
    pub loss_on: LossOn,
    /// What the objective needs rows to be.
    pub rows: RowsNeeded,
    pub limits: TokenLimits,
    pub on_bad_row: OnBadRow,
    /// The folder where tokenized sets are kept between runs, if any.
    pub cache: Option<&'a Path>,
    pub threads: usize,
    /// How clips are read, if the model has an audio encoder.
    pub audio: Option<&'a AudioOptions>,
}

/// A set, and how its rows were read.
#[derive(Debug)]
pub struct Prepared {
    pub set: TokenSet,
    /// One for each part.
    pub origins: Vec<Origin>,
    /// Likely mistakes, one line each.
    pub warnings: Vec<String>,
}

/// How the rows of a part were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub format: RowFormat,
    /// Why the rows were read in that format.
    pub reason: String,
    /// The template's name, if one was used.
    pub template: Option<String>,
}

/// The model's tokenizer.
pub fn read_tokenizer(model: &Model) -> Result<Tokenizer, PrepareError> {
    let tokenizer = match model {
        Model::Folder { folder, .. } => Tokenizer::from_folder(folder.path()),
        // The file is opened again, because the model dropped its vocabulary when it was loaded.
        Model::Gguf { file, .. } => Tokenizer::from_gguf(&GgufFile::open(file.path())?),
    };
    tokenizer.map_err(PrepareError::Tokenizer)
}

/// Reads and tokenizes rows, or reads the set from the cache, which holds only sets of files. Calls `on_rows` with the
/// number of rows that were just done.
pub fn prepare_set(
    parts: &[Part<'_>],
    model: &Model,
    options: PrepareOptions<'_>,
    on_rows: &mut dyn FnMut(u64),
) -> Result<Prepared, PrepareError> {
    let files: Vec<PathBuf> = parts.iter().flat_map(|part| part.source.files()).cloned().collect();
    let is_held = |part: &Part<'_>| matches!(part.source, RowSource::Memory { .. });
    for part in parts.iter().filter(|part| !is_held(part)) {
        part.source.files().iter().try_for_each(|file| file_kind(file).map(drop))?;
    }
    let mut readings = Vec::new();
    let mut origins = Vec::new();
    for &Part { source, format, columns, limit } in parts {
        let Recognized { mut format, reason } = recognize(source, format, columns, options.on_bad_row)?;
        // A label makes a completion a row to compare, if the objective compares.
        if options.rows != RowsNeeded::Samples && format == RowFormat::PromptCompletion {
            format = RowFormat::Preference;
        }
        readings.push(RowReading { source, format, columns, limit });
        origins.push(Origin { format, reason, template: None });
    }
    let has_text = origins.iter().any(|origin| origin.format != RowFormat::Tokens);
    let has_tokens = origins.iter().any(|origin| origin.format == RowFormat::Tokens);
    // A small set of tokens is read from its rows each time, which is quicker than hashing them.
    let path = match options.cache {
        // The file has no place for labels and rewards.
        Some(_) if options.rows != RowsNeeded::Samples => None,
        Some(cache) if !parts.iter().any(is_held) && (has_text || may_be_large(&files)) => {
            cache_file(cache, &cache_key(&readings, model, options)?)
        }
        _ => None,
    };
    if let Some((set, about)) = path.as_ref().and_then(|path| open_set(path, &files, LARGE_SET_BYTES)) {
        let text = |value: &Json| value.as_str().map(str::to_owned);
        let warnings = about["warnings"].as_array().into_iter().flatten().filter_map(text).collect();
        for (index, origin) in origins.iter_mut().enumerate() {
            origin.template = text(&about["templates"][index]);
        }
        return Ok(Prepared { set, origins, warnings });
    }
    let mut builder = match &path {
        Some(path) => {
            let form = if has_tokens { LabelForm::Numbers } else { LabelForm::Bits };
            let large = LargeSets { above_bytes: LARGE_SET_BYTES, path: path.clone(), form };
            TokenSetBuilder::with_large_sets(options.limits, large)
        }
        None => TokenSetBuilder::new(options.limits),
    };
    builder = builder.needing(options.rows);
    if let Some(audio) = options.audio {
        builder = builder.with_audio(audio.clone());
    }
    let mut warnings = Vec::new();
    let mut tokenizer = None;
    for (reading, origin) in readings.iter().zip(&mut origins) {
        let filled = fill(*reading, model, &mut tokenizer, options, &mut builder, on_rows)?;
        let name = (parts.len() > 1).then(|| name_of(reading.source));
        let named = |warning: String| match &name {
            Some(name) => format!("`{name}`: {warning}"),
            None => warning,
        };
        warnings.extend(filled.warnings.into_iter().map(named));
        origin.template = filled.template;
        if let Some(name) = name.filter(|_| filled.is_empty) {
            return Err(PrepareError::EmptySource { name });
        }
    }
    drop(tokenizer);
    warnings.extend(warnings_of_counts(builder.stats()));
    let templates: Vec<_> = origins.iter().map(|origin| &origin.template).collect();
    let about = json!({"warnings": warnings, "templates": templates});
    let set = builder.finish_with(&files, &about).map_err(|error| match error {
        TokensError::NothingSupervised { counts, .. }
            if has_text && counts.unsupervised_by_truncation == 0 =>
        {
            PrepareError::NoAnswers { counts, loss_on: options.loss_on }
        }
        error => PrepareError::Tokens(error),
    })?;
    if let Some(path) = path.filter(|_| has_text && set.clips().is_none()) {
        // If the cache cannot be written, the next start only takes some seconds longer.
        let _ = write_set(&path, &set, &files, &about);
    }
    Ok(Prepared { set, origins, warnings })
}

/// The files of a source, for messages.
fn name_of(source: RowSource<'_>) -> String {
    let files = source.files();
    let first = files.first().map(|file| file.display().to_string()).unwrap_or_default();
    if files.len() > 1 { format!("{first}, ...") } else { first }
}

/// Whether rows of tokens may make a set above [`LARGE_SET_BYTES`]: a token is at least two bytes of text, and
/// compressed files may decompress to any size.
fn may_be_large(files: &[PathBuf]) -> bool {
    let plain = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "jsonl");
    let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    !files.iter().all(plain) || files.iter().map(bytes).sum::<u64>() > LARGE_SET_BYTES as u64 / 4
}

/// What was noticed while the rows of a part were stored.
struct Filled {
    /// The name of the template, if one was used.
    template: Option<String>,
    warnings: Vec<String>,
    /// Whether no row became a sample.
    is_empty: bool,
}

/// Stores the rows of a part.
fn fill(
    reading: RowReading<'_>,
    model: &Model,
    tokenizer: &mut Option<Tokenizer>,
    options: PrepareOptions<'_>,
    builder: &mut TokenSetBuilder,
    on_rows: &mut dyn FnMut(u64),
) -> Result<Filled, PrepareError> {
    let before = builder.stats().rows;
    builder.begin_source(match (options.limits.overflow, reading.format) {
        (Overflow::Auto, RowFormat::Text) => Overflow::Chunk,
        (Overflow::Auto, _) => Overflow::Truncate,
        (overflow, _) => overflow,
    });
    let mut bad = BadRows::default();
    let filled = match (reading.format, &mut *tokenizer) {
        (RowFormat::Tokens, _) => fill_with_tokens(reading, options, builder, &mut bad, on_rows),
        (_, tokenizer) => {
            if tokenizer.is_none() {
                *tokenizer = Some(read_tokenizer(model)?);
            }
            let tokenizer = tokenizer.as_ref().expect("it was just read");
            fill_with_text(reading, tokenizer, options, builder, &mut bad, on_rows)
        }
    };
    let (template, mut warnings) = match filled {
        Ok(filled) => filled,
        Err(error) => return Err(bad.error_with_bad_rows(error, options.on_bad_row)),
    };
    warnings.extend(bad.finish(options.on_bad_row)?);
    Ok(Filled { template, warnings, is_empty: builder.stats().rows.kept == before.kept })
}

/// The name of the template, if one was used, and warnings.
type TemplateAndWarnings = (Option<String>, Vec<String>);

fn fill_with_tokens(
    reading: RowReading<'_>,
    options: PrepareOptions<'_>,
    builder: &mut TokenSetBuilder,
    bad: &mut BadRows,
    on_rows: &mut dyn FnMut(u64),
) -> Result<TemplateAndWarnings, PrepareError> {
    store_token_rows(reading, options.threads, builder, bad, on_rows)?;
    let mut warnings = Vec::new();
    if !matches!(options.loss_on, LossOn::Auto | LossOn::Completion) {
        let loss_on = options.loss_on;
        warnings
            .push(format!("`data.loss_on = {loss_on}` is ignored: rows of `tokens` have their own labels"));
    }
    Ok((None, warnings))
}

fn fill_with_text(
    reading: RowReading<'_>,
    tokenizer: &Tokenizer,
    options: PrepareOptions<'_>,
    builder: &mut TokenSetBuilder,
    bad: &mut BadRows,
    on_rows: &mut dyn FnMut(u64),
) -> Result<TemplateAndWarnings, PrepareError> {
    let format = reading.format;
    let template = choose_template(options.template, format, tokenizer)?;
    let loss_on = if options.rows == RowsNeeded::Samples { options.loss_on } else { LossOn::Completion };
    let encoder = RowEncoder::new(tokenizer, template.as_ref(), loss_on)
        .with_max_tokens(options.limits.max_tokens as usize);
    let notes = tokenize_rows(reading, &encoder, options.threads, builder, bad, on_rows)?;
    let warnings = warnings_of(&notes, tokenizer, template.as_ref(), format, options);
    // With `auto`, prompts and completions that are strings have no template.
    let template = template.filter(|_| notes.plain < notes.rows);
    Ok((template.map(|template| template.name), warnings))
}

fn cache_key(
    readings: &[RowReading<'_>],
    model: &Model,
    options: PrepareOptions<'_>,
) -> Result<String, PrepareError> {
    let unread = |(path, source)| PrepareError::Read { path, source };
    let limits = options.limits;
    let mut key = CacheKey::default();
    for RowReading { source, format, columns, limit } in readings {
        key.add("source", format!("{format} {limit} {columns:?}").as_bytes());
        key.add_files(source.files()).map_err(unread)?;
    }
    key.add_tokenizer(model).map_err(unread)?;
    key.add("template", template_source(options.template)?.as_bytes());
    let kind = match options.template {
        TemplateChoice::Auto => "auto",
        TemplateChoice::Model => "model",
        TemplateChoice::Plain => "none",
        TemplateChoice::Named(_) => "named",
        TemplateChoice::File(_) => "file",
    };
    let settings = format!(
        "{kind} {} {} {} {:?} {}",
        options.loss_on, limits.max_tokens, limits.vocab_size, limits.overflow, options.on_bad_row
    );
    key.add("settings", settings.as_bytes());
    Ok(key.finish())
}

/// Likely mistakes that the tokens show.
fn warnings_of(
    notes: &RowNotes,
    tokenizer: &Tokenizer,
    template: Option<&DataTemplate>,
    format: RowFormat,
    options: PrepareOptions<'_>,
) -> Vec<String> {
    let mut warnings = Vec::new();
    let (loss_on, rows) = (options.loss_on, notes.rows);
    if format == RowFormat::Text && loss_on == LossOn::Assistant {
        warnings.push(format!(
            "`data.loss_on = {loss_on}` is ignored: rows of `text` have no turns, every token is supervised"
        ));
    }
    if format == RowFormat::Text && !matches!(options.template, TemplateChoice::Auto | TemplateChoice::Plain)
    {
        warnings.push("`data.template` is ignored: rows of `text` are used as they are".to_owned());
    }
    if notes.split > 0 {
        warnings.push(format!(
            "the chat template renders earlier turns differently when others follow: {} of {rows} conversations \
             became {} samples, in which every turn is trained as it is generated",
            notes.split, notes.samples_of_split
        ));
    }
    if (1..rows).contains(&notes.plain) {
        warnings.push(format!(
            "{} of {rows} rows are strings, which are trained without the chat template of the others; {RENDERS_PAIRS}",
            notes.plain
        ));
    }
    if rows > 0 && notes.plain == rows && template.is_some() {
        warnings.push(format!(
            "prompts and completions are trained without the model's chat template; {RENDERS_PAIRS}, and \
             `data.template = \"none\"` confirms that they stay as they are (`smidgen preview` shows both)"
        ));
    }
    if rows > 0 && notes.turn_end_supervised == 0 {
        let used = template.filter(|_| notes.plain < rows);
        let what = match (used, notes.turn_end_not_supervised) {
            (_, 1..) => {
                "the token that ends a turn comes after the answers and is never supervised".to_owned()
            }
            (Some(DataTemplate { name, kind: TemplateKind::Chat(_), .. }), 0) => {
                format!("no answer ends with a special token of the tokenizer (template: {name})")
            }
            (_, 0) if tokenizer.special_ids().eos.is_none() => {
                "the tokenizer has no token that ends a text (EOS)".to_owned()
            }
            (_, 0) => "no supervised text ends with a special token".to_owned(),
        };
        warnings.push(format!("{what}: the model will not learn where to stop"));
    }
    if notes.bos_doubled > 0 {
        warnings.push(format!(
            "{} of {rows} rows begin with two BOS tokens: remove the one in the data",
            notes.bos_doubled
        ));
    }
    if notes.prompt_differs > 0 {
        warnings.push(format!(
            "in {} of {rows} rows the end of the prompt is tokenized differently when the answer follows; \
             supervision begins there",
            notes.prompt_differs
        ));
    }
    warnings
}

const RENDERS_PAIRS: &str =
    "`data.template = \"model\"` makes a turn of the user and one of the assistant of each";

fn warnings_of_counts(stats: &TokenStats) -> Vec<String> {
    let rows = stats.rows;
    let mut warnings: Vec<String> = rows.warning().into_iter().collect();
    if rows.kept > 0 && rows.truncated == rows.kept {
        warnings.push("every sample is truncated: raise `data.max_tokens`".to_owned());
    } else if 20 * rows.truncated > rows.kept {
        let share = 100.0 * rows.truncated as f64 / rows.kept as f64;
        warnings.push(format!(
            "{share:.0} % of the samples are truncated, so the model does not see their end: raise `data.max_tokens`"
        ));
    }
    warnings
}
