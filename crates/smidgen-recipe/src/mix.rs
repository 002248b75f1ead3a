//! Reads the keys that describe sources of data: `data.columns` and the tables of `data.mix`.
//!
//! In a recipe file each source is a table `[[data.mix]]`; `job.toml` and overrides have a list of inline tables.
//! [`explain_refusal`] says which part of such a value is wrong.
//! Not checked here: whether a column exists.

use smidgen_ir::words::{ClosedWord, ColumnRole, DataFormat, nearest};

use crate::dataset_name::DATASET_FORMS;
use crate::read::{ABOVE_ZERO, Reader, TRAIN_FILES, reader, words};
use crate::reward_tables::explain_reward;
use crate::sections::MixSource;
use crate::value::{Given, Value};

pub(crate) const COLUMNS: Reader<Vec<(ColumnRole, String)>> = reader(
    "a table of roles and columns, such as `{ prompt = \"question\", completion = \"answer\" }`",
    &[],
    |given| read_columns(given).ok(),
);

pub(crate) const MIX: Reader<Vec<MixSource>> = reader(
    "a list of tables with `path` and `weight`, and optionally `format` and `columns`",
    &[],
    |given| given.list()?.iter().map(|item| read_source(&given.with(item)).ok()).collect(),
);

/// The hint for a refused value of a key that takes tables or names data, if it is clear which part of the value is wrong.
pub(crate) fn explain_refusal(path: &str, given: &Given<'_>) -> Option<String> {
    match path {
        "data.columns" => read_columns(given).err().flatten(),
        "data.mix" => {
            let items = given.list()?;
            let mut refusals = items.iter().map(|item| read_source(&given.with(item)).err().flatten());
            refusals.find_map(|refusal| refusal)
        }
        "train.reward" => explain_reward(given),
        "data.train" | "data.eval" => {
            let is_on_hub = given.value.to_string().contains("hf:");
            is_on_hub.then(|| format!("a data set on the hub is written {DATASET_FORMS}"))
        }
        _ => None,
    }
}

/// What was expected instead; `None` if the message of the key says enough.
type Refusal = Option<String>;

fn read_columns(given: &Given<'_>) -> Result<Vec<(ColumnRole, String)>, Refusal> {
    let mut columns: Vec<(ColumnRole, String)> = Vec::new();
    for (name, value) in given.fields().ok_or(None)? {
        let role = ColumnRole::from_word(&name).ok_or_else(|| {
            let roles = ColumnRole::WORDS.join("`, `");
            Some(match nearest(&name, ColumnRole::WORDS.iter().copied()) {
                Some(near) => format!("`{name}` is not a role: did you mean `{near}`?"),
                None => format!("`{name}` is not a role; the roles are `{roles}`"),
            })
        })?;
        let column = given.with(&value).text().filter(|column| !column.is_empty());
        let column =
            column.ok_or_else(|| Some(format!("`{name}` must be the name of a column, as a string")))?;
        if columns.iter().any(|(taken, _)| *taken == role) {
            return Err(Some(format!("the role `{role}` is given twice")));
        }
        if columns.iter().any(|(_, taken)| *taken == column) {
            return Err(Some(format!("the column `{column}` has two roles")));
        }
        columns.push((role, column));
    }
    Ok(columns)
}

fn read_source(given: &Given<'_>) -> Result<MixSource, Refusal> {
    let mut source =
        MixSource { path: Vec::new(), weight: 0.0, format: DataFormat::Auto, columns: Vec::new() };
    let mut columns = Vec::new();
    for (name, value) in given.fields().ok_or(None)? {
        let given = given.with(&value);
        let must_be = |phrase: String| Some(format!("`{name}` of a source must be {phrase}"));
        match name.split_once('.').map_or((name.as_str(), None), |(name, role)| (name, Some(role))) {
            ("path", None) => {
                source.path =
                    (TRAIN_FILES.read)(&given).ok_or_else(|| must_be(TRAIN_FILES.accepts.describe()))?;
            }
            ("weight", None) => {
                source.weight =
                    (ABOVE_ZERO.read)(&given).ok_or_else(|| must_be(ABOVE_ZERO.accepts.describe()))?;
            }
            ("format", None) => {
                let words = words::<DataFormat>();
                source.format = (words.read)(&given).ok_or_else(|| must_be(words.accepts.describe()))?;
            }
            ("columns", None) => columns = given.fields().ok_or_else(|| must_be("a table".to_owned()))?,
            // Tables of the file are flattened: an inner table arrives as dotted names.
            ("columns", Some(role)) => columns.push((role.to_owned(), value.clone())),
            _ => {
                return Err(Some(format!(
                    "a source has `path`, `weight`, `format` and `columns`, not `{name}`"
                )));
            }
        }
    }
    source.columns = read_columns(&given.with(&Value::Table(columns)))?;
    match (source.path.is_empty(), source.weight > 0.0) {
        (false, true) => Ok(source),
        (true, _) => Err(Some("a source needs a `path`".to_owned())),
        (_, false) => Err(Some("a source needs a `weight` above 0".to_owned())),
    }
}
