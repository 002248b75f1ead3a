//! From the rows that a recipe names, or that the caller holds, to a token set: format, template, tokens, cache.
//!
//! The tokenizer is dropped afterwards: it is large, and training does not need it. For a cached set it is not even
//! loaded.
//! Leaves out what the model and the recipe allow, and batches.

use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use smidgen_ir::words::{DataFormat, LossOn};

use crate::cache::{CacheKey, cache_file};
use crate::format::{RowFormat, recognize};
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

/// Sets with more records than this are read from their file, sample by sample.
const LARGE_SET_BYTES: usize = 64 << 20;

/// What determines a set, apart from its files.
#[derive(Clone, Copy, Debug)]
pub struct PrepareOptions<'a> {
    pub format: DataFormat,
    pub template: &'a TemplateChoice,
    pub loss_on: LossOn,
    pub limits: TokenLimits,
    /// Where tokenized sets are kept between runs, if anywhere.
    pub cache: Option<&'a Path>,
    pub threads: usize,
}

/// A set and where it is from.
#[derive(Debug)]
pub struct Prepared {
    pub set: TokenSet,
    pub origin: Origin,
    /// Likely mistakes, one line each.
    pub warnings: Vec<String>,
}

/// How rows were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    pub format: RowFormat,
    /// Why that format.
    pub reason: String,
    /// The template's name, where one was used.
    pub template: Option<String>,
}

/// The model's tokenizer.
pub fn read_tokenizer(model: &Model) -> Result<Tokenizer, PrepareError> {
    let tokenizer = match model {
        Model::Folder { folder, .. } => Tokenizer::from_folder(folder.path()),
        // Opened again: the model dropped its vocabulary when it was loaded.
        Model::Gguf { file, .. } => Tokenizer::from_gguf(&GgufFile::open(file.path())?),
    };
    tokenizer.map_err(PrepareError::Tokenizer)
}

/// Reads and tokenizes rows, or reads the set from the cache, which only sets of files have. Calls `on_rows` with the
/// number of rows just done.
pub fn prepare_set(
    source: RowSource<'_>,
    model: &Model,
    options: PrepareOptions<'_>,
    on_rows: &mut dyn FnMut(u64),
) -> Result<Prepared, PrepareError> {
    let files = source.files();
    let cache = match source {
        RowSource::Files(_) => {
            files.iter().try_for_each(|file| file_kind(file).map(drop))?;
            options.cache
        }
        RowSource::Memory { .. } => None,
    };
    let recognized = recognize(source, options.format)?;
    let origin = Origin { format: recognized.format, reason: recognized.reason, template: None };
    let has_text = origin.format != RowFormat::Tokens;
    // Reading a small set of tokens again is quicker than hashing it.
    let path = match cache {
        Some(cache) if has_text || may_be_large(files) => {
            cache_file(cache, &cache_key(files, model, origin.format, options)?)
        }
        _ => None,
    };
    if let Some((set, about)) = path.as_ref().and_then(|path| open_set(path, files, LARGE_SET_BYTES)) {
        let text = |value: &Json| value.as_str().map(str::to_owned);
        let warnings = about["warnings"].as_array().into_iter().flatten().filter_map(text).collect();
        return Ok(Prepared {
            set,
            origin: Origin { template: text(&about["template"]), ..origin },
            warnings,
        });
    }
    let mut builder = match &path {
        Some(path) => {
            let form = if has_text { LabelForm::Bits } else { LabelForm::Numbers };
            let large = LargeSets { above_bytes: LARGE_SET_BYTES, path: path.clone(), form };
            TokenSetBuilder::with_large_sets(options.limits, large)
        }
        None => TokenSetBuilder::new(options.limits),
    };
    let (template, warnings) = match has_text {
        true => fill_with_text(source, model, origin.format, options, &mut builder, on_rows)?,
        false => fill_with_tokens(source, options, &mut builder, on_rows)?,
    };
    let about = json!({"warnings": warnings, "template": template});
    let set = builder.finish_with(files, &about).map_err(|error| match error {
        TokensError::NothingSupervised { counts, .. }
            if has_text && counts.unsupervised_by_truncation == 0 =>
        {
            PrepareError::NoAnswers { counts, loss_on: options.loss_on }
        }
        error => PrepareError::Tokens(error),
    })?;
    if let Some(path) = path.filter(|_| has_text) {
        // A cache that cannot be written only costs the next start some seconds.
        let _ = write_set(&path, &set, files, &about);
    }
    Ok(Prepared { set, origin: Origin { template, ..origin }, warnings })
}

/// Whether rows of tokens may take more memory than a set should: a token is at least two bytes of text, and
/// compressed files may have any size.
fn may_be_large(files: &[PathBuf]) -> bool {
    let plain = |path: &PathBuf| path.extension().is_some_and(|end| end == "json" || end == "jsonl");
    let bytes = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    !files.iter().all(plain) || files.iter().map(bytes).sum::<u64>() > LARGE_SET_BYTES as u64 / 4
}

type Filled = (Option<String>, Vec<String>);

fn fill_with_tokens(
    source: RowSource<'_>,
    options: PrepareOptions<'_>,
    builder: &mut TokenSetBuilder,
    on_rows: &mut dyn FnMut(u64),
) -> Result<Filled, PrepareError> {
    store_token_rows(source, builder, on_rows)?;
    let mut warnings = Vec::new();
    if !matches!(options.loss_on, LossOn::Auto | LossOn::Completion) {
        let loss_on = options.loss_on;
        warnings
            .push(format!("`data.loss_on = {loss_on}` is ignored: rows of `tokens` have their own labels"));
    }
    warnings.extend(warnings_of_counts(builder.stats()));
    Ok((None, warnings))
}

fn fill_with_text(
    source: RowSource<'_>,
    model: &Model,
    format: RowFormat,
    options: PrepareOptions<'_>,
    builder: &mut TokenSetBuilder,
    on_rows: &mut dyn FnMut(u64),
) -> Result<Filled, PrepareError> {
    let tokenizer = read_tokenizer(model)?;
    let template = choose_template(options.template, format, &tokenizer)?;
    let encoder = RowEncoder::new(&tokenizer, template.as_ref(), options.loss_on);
    let notes = tokenize_rows(source, format, &encoder, options.threads, builder, on_rows)?;
    let warnings = warnings_of(&notes, builder.stats(), &tokenizer, template.as_ref(), format, options);
    // Prompts and completions that are strings need no template.
    let template = template.filter(|_| notes.plain < notes.rows);
    Ok((template.map(|template| template.name), warnings))
}

fn cache_key(
    files: &[PathBuf],
    model: &Model,
    format: RowFormat,
    options: PrepareOptions<'_>,
) -> Result<String, PrepareError> {
    let unread = |(path, source)| PrepareError::Read { path, source };
    let limits = options.limits;
    let mut key = CacheKey::default();
    key.add_files(files).map_err(unread)?;
    key.add_tokenizer(model).map_err(unread)?;
    key.add("template", template_source(options.template)?.as_bytes());
    let kind = match options.template {
        TemplateChoice::Auto => "auto",
        TemplateChoice::Named(_) => "named",
        TemplateChoice::File(_) => "file",
    };
    let settings = format!(
        "{format} {kind} {} {} {} {:?}",
        options.loss_on, limits.max_tokens, limits.vocab_size, limits.overflow
    );
    key.add("settings", settings.as_bytes());
    Ok(key.finish())
}

/// Likely mistakes that the tokens show.
fn warnings_of(
    notes: &RowNotes,
    stats: &TokenStats,
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
    if format == RowFormat::Text && *options.template != TemplateChoice::Auto {
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
            "{} of {rows} rows are strings, which are trained without the chat template of the others",
            notes.plain
        ));
    }
    if rows > 0 && notes.turn_end_supervised == 0 {
        let what = match (template, notes.turn_end_not_supervised) {
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
    warnings.extend(warnings_of_counts(stats));
    warnings
}

fn warnings_of_counts(stats: &TokenStats) -> Vec<String> {
    let rows = stats.rows;
    let mut warnings: Vec<String> = rows.warning().into_iter().collect();
    if rows.kept > 0 && rows.truncated == rows.kept {
        warnings.push("every sample is truncated: raise `data.max_tokens`".to_owned());
    } else if 20 * rows.truncated > rows.kept {
        let share = 100.0 * rows.truncated as f64 / rows.kept as f64;
        warnings.push(format!(
            "{share:.0} % of the samples are truncated, and do not end as they should: raise `data.max_tokens`"
        ));
    }
    warnings
}
