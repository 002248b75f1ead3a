//! The two forms of a row whose prompt and completion are strings: as it is, and in the model's chat template.
//!
//! With `data.template = "auto"` such rows are trained as they are, and a warning asks for a decision. `preview` shows
//! both forms. Left out: rows with audio, whose clips are found from the file that names them.

use super::data::{Rows, Source};
use super::keys::training_sources;
use super::sets::read_templated_row;
use crate::failure::Failure;
use serde_json::Value as Json;
use smidgen_compile::Request;
use smidgen_data::format::RowFormat;
use smidgen_data::prepare::Prepared;
use smidgen_data::source::{RowPlace, SourceError, read_rows};
use smidgen_formats::model::Model;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_hub::Access;
use smidgen_recipe::{Recipe, Template};

/// A row that is trained as it is, although the model has a template.
pub struct Undecided {
    /// Its sample in the training set.
    pub sample: usize,
    /// A set with the templated row alone, or why the template refuses it.
    pub templated: Result<Prepared, Failure>,
}

/// The first row that waits for a decision about `data.template`.
pub fn first_undecided(
    recipe: &Recipe,
    (model, request): (&Model, &Request),
    rows: &Rows,
    tokenizer: &Tokenizer,
    access: &Access,
) -> Result<Option<Undecided>, Failure> {
    let asks = recipe.data.template == Template::Auto && tokenizer.template_source().is_some();
    let is_plain = |source: &Source| {
        source.origin.format == RowFormat::PromptCompletion && source.origin.template.is_none()
    };
    let sources = training_sources(&recipe.data);
    let each = rows.sources.iter().zip(&sources).zip(rows.train.sources());
    let found = each.into_iter().find(|((source, _), samples)| is_plain(source) && !samples.is_empty());
    let Some(((_, source), samples)) = found.filter(|_| asks && rows.train.clips().is_none()) else {
        return Ok(None);
    };
    let sample = samples.start;
    let Some(row) = read_row(rows.train.place(sample))? else { return Ok(None) };
    let templated = read_templated_row(recipe, source, row, model, request, access);
    Ok(Some(Undecided { sample, templated }))
}

/// Why reading ends.
enum End {
    Found(Json),
    Failed(SourceError),
}

impl From<SourceError> for End {
    fn from(error: SourceError) -> End {
        End::Failed(error)
    }
}

fn read_row(wanted: RowPlace<'_>) -> Result<Option<Json>, Failure> {
    let ended = read_rows(wanted.file, |place, row| match row {
        Ok(row) if place.number == wanted.number => Err(End::Found(row)),
        _ => Ok(()),
    });
    match ended {
        Ok(()) => Ok(None),
        Err(End::Found(row)) => Ok(Some(row)),
        Err(End::Failed(error)) => Err(Failure::data(error)),
    }
}
