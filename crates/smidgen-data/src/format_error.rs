//! What can be wrong with the rows of a data file, with the place, the field, what was found and a remedy.
//!
//! What can be wrong with the file itself is in `source_error.rs`.

use thiserror::Error;

use crate::example::RowFormat;
use crate::source_error::SourceError;
use smidgen_ir::words::{ColumnRole, nearest};

/// A row that does not have what its format needs.
#[derive(Debug, Error)]
pub enum FormatError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error("no rows")]
    NoRows,
    #[error("`data.columns`: no row has the column `{column}`, found {fields}")]
    NoColumn { column: String, role: ColumnRole, fields: String },
    #[error("`data.columns`: `{first}` and `{other}` are columns of different formats")]
    RolesDiffer { first: ColumnRole, other: ColumnRole },
    #[error("{place} is {found}, not an object with named fields")]
    NotAnObject { place: String, found: &'static str },
    #[error("{place} matches no known format: found {fields}")]
    Unrecognized { place: String, fields: String },
    #[error("`{first_file}` looks like {first}, `{other_file}` like {other}")]
    FilesDiffer { first_file: String, first: String, other_file: String, other: String },
    /// `first` is an earlier row that has the format; without it the format comes from the recipe or another file.
    #[error("{place} looks like {found}, {}", because(first.as_deref(), *format))]
    MixedFormats { place: String, found: RowFormat, format: RowFormat, first: Option<String> },
    #[error("{place}: {wanted} is missing, found {fields}")]
    MissingField { place: String, format: RowFormat, wanted: &'static str, fields: String },
    #[error("{place}: the row has none of `question`, `question_stem` and `query`")]
    NoQuestion { place: String },
    #[error("{place}: `{field}` is {found}, expected {expected}")]
    WrongType { place: String, field: String, found: &'static str, expected: &'static str },
    #[error("{place}: `{field}` is not JSON: {message}")]
    NotJson { place: String, field: String, message: String, python: bool },
    #[error("{place}: `{field}` is empty")]
    Empty { place: String, field: String },
    #[error("{place}: `{field}` is `{role}`, which is not a role")]
    UnknownRole { place: String, field: String, role: String },
    #[error("{place}: `{field}` has no assistant message, so there is nothing to learn")]
    NoAssistant { place: String, field: String },
    #[error("{place}: `{field}` is a part of type `{part}`, only text is supported")]
    NotText { place: String, field: String, part: String },
    #[error("{place}: both answers are the same, so neither is preferred")]
    EqualAnswers { place: String },
    #[error("{place}: `chosen` and `rejected` do not begin with the same prompt")]
    NoSharedPrompt { place: String },
    #[error("{place}: `completions` has {completions} entries, `rewards` has {rewards}")]
    RewardsDiffer { place: String, completions: usize, rewards: usize },
    #[error("{place}: `{field}` has images, and only text is trained")]
    Images { place: String, field: &'static str },
}

impl FormatError {
    /// Whether the error concerns one row only, so that other rows can still be used.
    pub(crate) fn is_of_one_row(&self) -> bool {
        match self {
            FormatError::Source(error) => error.is_of_one_row(),
            FormatError::NoRows
            | FormatError::NoColumn { .. }
            | FormatError::RolesDiffer { .. }
            | FormatError::Unrecognized { .. }
            | FormatError::FilesDiffer { .. } => false,
            _ => true,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            FormatError::Source(source) => return source.hint(),
            FormatError::NoQuestion { .. } => "every row of a file of questions has one of these columns",
            FormatError::NoRows => "check `data.train` and `data.eval`: their files have no rows",
            FormatError::NoColumn { column, role, fields } => {
                let names: Vec<&str> = fields.split('`').skip(1).step_by(2).collect();
                return Some(match nearest(column, names.iter().copied()) {
                    Some(near) => format!("did you mean `{role} = \"{near}\"`?"),
                    None => format!("`{role} = \"{column}\"` reads the column `{column}` as `{role}`"),
                });
            }
            FormatError::RolesDiffer { .. } => "name the columns of one format only, or set `data.format`",
            FormatError::NotAnObject { .. } => "a row is an object, such as `{\"text\": \"...\"}`",
            FormatError::Unrecognized { fields, .. } => {
                if fields.contains("`chosen`") {
                    "pairs have both `chosen` and `rejected`, and usually `prompt`"
                } else {
                    return Some(format!("{FIELDS_OF_FORMATS}; {}", how_to_name(fields)));
                }
            }
            FormatError::FilesDiffer { .. } => "use one run per format, or convert the files to one format",
            FormatError::MixedFormats { .. } => {
                "all rows of a run have one format: split the file, or convert the rows to one format"
            }
            FormatError::MissingField { format, .. } => match format {
                RowFormat::Alpaca | RowFormat::AlpacaPrompt => {
                    "an alpaca row is `{\"instruction\": ..., \"input\": ..., \"output\": ...}`, `input` may be missing"
                }
                RowFormat::Chat => "a chat row is `{\"messages\": [{\"role\": ..., \"content\": ...}, ...]}`",
                RowFormat::PromptCompletion => {
                    "a prompt-completion row is `{\"prompt\": ..., \"completion\": ...}`"
                }
                RowFormat::Text => "a text row is `{\"text\": ...}`",
                RowFormat::Tokens => {
                    "a tokens row is `{\"input_ids\": [...], \"labels\": [...]}`, `labels` may be missing"
                }
                RowFormat::Preference => {
                    "a preference row is `{\"prompt\": ..., \"chosen\": ..., \"rejected\": ...}`, or `{\"prompt\": ..., \
                     \"completion\": ..., \"label\": true}`"
                }
            },
            FormatError::WrongType { expected, .. } if expected.contains("string") => {
                "write the value as a string, in quotes"
            }
            FormatError::NotJson { python: true, .. } => {
                "this is a Python literal: write the column with `json.dumps`"
            }
            FormatError::NotJson { .. } => "a list in a cell is written as JSON",
            FormatError::Empty { .. } => "remove the row, or fill the field",
            FormatError::UnknownRole { .. } => return Some(format!("the roles are {KNOWN_ROLES}")),
            FormatError::NoAssistant { .. } => "remove the row, or add what the assistant should answer",
            FormatError::NotText { .. } => "remove the row, or replace the part with text",
            FormatError::EqualAnswers { .. } => {
                "remove the row (`data.on_bad_row = \"skip\"` does), or give it two different answers"
            }
            FormatError::NoSharedPrompt { .. } => {
                "give the row a `prompt`, and only the answers as `chosen` and `rejected`"
            }
            FormatError::RewardsDiffer { .. } => "give one reward for each completion",
            FormatError::Images { .. } => {
                "remove the rows with images (`data.on_bad_row = \"skip\"` does), or the column, if the text says enough \
                 without them"
            }
            FormatError::WrongType { .. } => return None,
        };
        Some(hint.to_owned())
    }
}

fn because(first: Option<&str>, format: RowFormat) -> String {
    match first {
        Some(row) => format!("{row} like {format}"),
        None => format!("but is read as {format}"),
    }
}

const FIELDS_OF_FORMATS: &str = "the formats are alpaca (`instruction`, `output`), chat (`messages` or `conversations`), \
prompt-completion (`prompt`, `completion`), preference (`chosen`, `rejected`), text (`text`) and tokens (`input_ids`)";

/// How to read rows with other columns, which are named in a list in backticks.
fn how_to_name(fields: &str) -> String {
    let is_number = |name: &&str| {
        let name = name.to_lowercase();
        ["", "id", "idx", "index", "no", "nr"].contains(&name.as_str()) || name.starts_with("unnamed")
    };
    let names: Vec<&str> = fields.split('`').skip(1).step_by(2).filter(|name| !is_number(name)).collect();
    match names[..] {
        [] => "name other columns with `data.columns`".to_owned(),
        [only] => format!("`data.columns = {{ text = {only:?} }}` reads `{only}` as text"),
        [asks, answers, ..] => format!(
            "`data.columns = {{ prompt = {asks:?}, completion = {answers:?} }}` reads `{asks}` as prompt and \
             `{answers}` as completion, and `data.template = \"model\"` makes turns of them in the model's chat template"
        ),
    }
}

/// Every name that `role_of` (`chat_row.rs`) knows.
const KNOWN_ROLES: &str = "`system`, `developer`, `user` (`human`), \
`assistant` (`gpt`, `chatgpt`, `model`, `bing`), `tool` (`function`, `observation`) and `ipython`";
