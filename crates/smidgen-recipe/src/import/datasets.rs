//! The data that other tools name: files, and data sets on the hub with a config, a split and a revision.
//!
//! A name such as `org/name` is a data set on the hub unless a file or a folder has that name. A name without an owner
//! may be anything, so the user has to say which file it is. A share of the rows to evaluate becomes `data.split`, and
//! the names of columns become `data.columns`, which is the same for all files.
//! Rows selected by their numbers (`train[:95%]`) become a limit or a share if training and evaluation divide a split.
//! Not supported: other rows of a split that are selected by their numbers.

use super::draft::Draft;
use super::fields::{Fields, Found};
use super::slices::Slice;
use crate::DatasetName;
use crate::reasons::reason_for;
use crate::value::Value;
use smidgen_ir::words::{ClosedWord, ColumnRole};

/// For a setting that names a column which the import gives no role.
pub const OTHER_COLUMN: &str = "`data.columns` gives columns their roles; name this one there if it is needed (`smidgen preview` shows the rows)";
/// For settings that name the fields of a turn.
pub const TURN_FIELDS: &str = "turns must have `role` and `content`, or `from` and `value`; `data.columns` renames columns, not the fields \
                               of a turn";
const OWN_COLUMNS: &str = "`data.columns` is the same for all files of `data.train` and `data.eval`; a table `[[data.mix]]` has `columns` of \
                           its own";
const UNCLEAR_COLUMNS: &str = "`data.columns` gives each column one role";

/// A source of rows as a tool names it.
#[derive(Clone, Debug, Default)]
pub struct NamedRows {
    /// A file, or a data set on the hub.
    pub name: String,
    pub config: Option<String>,
    pub split: Option<String>,
    pub revision: Option<String>,
    /// The rows of the split, if it names some of them.
    pub slice: Option<Slice>,
}

/// The names of the settings that choose a part of a data set.
pub struct PartNames {
    pub config: &'static [&'static str],
    pub split: &'static str,
    pub revision: &'static str,
}

/// The names that most tools give them.
pub const PARTS: PartNames = PartNames { config: &["name", "config"], split: "split", revision: "revision" };
/// For settings that choose a part of what has none.
pub const HUB_PART: &str = "selects a part of a hub dataset; a file has none";

/// The rows of a source: its files, or the data set that the first of `names` names.
pub fn rows_of(group: &Fields<'_>, names: &[&str], draft: &mut Draft) -> Vec<NamedRows> {
    let name = group.take_first(names).and_then(|found| found.text());
    match group.take("data_files") {
        Some(found) => found.words().unwrap_or_default().into_iter().map(NamedRows::of).collect(),
        None => name.into_iter().map(|name| NamedRows::of(name).with_parts(group, &PARTS, draft)).collect(),
    }
}

/// Notes the settings of a source that were not taken; `whys` are reasons by the beginning of their names.
pub fn leave_source(group: &Fields<'_>, whys: &[(&str, &str)], draft: &mut Draft) {
    for rest in group.rest().iter().filter(|rest| rest.is_on()) {
        match whys.iter().find(|(beginning, _)| rest.name().starts_with(beginning)) {
            Some((_, why)) => draft.leave_out(rest, *why),
            None => draft.leave_out(rest, reason_for(rest.name()).why),
        }
    }
}

impl NamedRows {
    pub fn of(name: impl Into<String>) -> NamedRows {
        NamedRows { name: name.into(), ..NamedRows::default() }
    }

    /// Takes the settings that choose a part, if this is a data set on the hub; a file has no parts.
    pub fn with_parts(self, fields: &Fields<'_>, names: &PartNames, draft: &mut Draft) -> NamedRows {
        if !is_hub_name(draft, &self.name) {
            return self;
        }
        let config = take_part(draft, fields.take_first(names.config), "/");
        let (split, slice) = take_split(draft, fields.take(names.split));
        // Every data set has the branch `main`, and the hub's Parquet files are made from it.
        let revision = take_part(draft, fields.take(names.revision), "@");
        NamedRows { config, split, slice, revision: revision.filter(|revision| revision != "main"), ..self }
    }

    /// The name for `data.train`; `None` if it is neither a file nor a data set on the hub.
    fn in_recipe(&self, draft: &Draft) -> Option<String> {
        if is_file(draft, &self.name) {
            return Some(self.name.clone());
        }
        let repo = is_hub_name(draft, &self.name).then(|| self.name.clone())?;
        let NamedRows { config, split, revision, .. } = self.clone();
        Some(DatasetName { repo, revision, config, split }.to_string())
    }
}

/// `data.train` or `data.eval` from names without a config, a split or a revision.
pub fn put_files(draft: &mut Draft, key: &'static str, names: &[String], from: &Found<'_>) {
    put_rows(draft, key, &names.iter().map(NamedRows::of).collect::<Vec<_>>(), from);
}

/// `data.train` or `data.eval`. If a name is neither a file nor a data set on the hub, the user is asked for the file.
pub fn put_rows(draft: &mut Draft, key: &'static str, rows: &[NamedRows], from: &Found<'_>) {
    if !put_slices(draft, key, rows, from) {
        return;
    }
    let named: Vec<Option<String>> = rows.iter().map(|rows| rows.in_recipe(draft)).collect();
    if let Some(text) =
        named.iter().flatten().find(|name| name.ends_with(".txt") && !is_hub_name(draft, name))
    {
        draft.warn(format!("`{text}` is one document here; other tools make a row of each of its lines"));
    }
    if let Some(named) = named.iter().cloned().collect::<Option<Vec<String>>>()
        && !named.is_empty()
    {
        let named = named.into_iter().map(Value::Text).collect();
        return draft.put(key, Value::List(named), &[from]);
    }
    let unknown = rows.iter().zip(&named).filter(|(_, named)| named.is_none());
    let listed = unknown.map(|(rows, _)| format!("`{}`", rows.name)).collect::<Vec<_>>().join(", ");
    draft.want(key, format!("a file with the rows of {listed}"));
    draft.leave_out(
        from,
        format!(
            "`{key}` takes files, and data sets of the hub as `hf:org/name`; write one of these for {listed}"
        ),
    );
}

/// The settings of one source that name columns, with the roles of the columns.
#[derive(Default)]
pub struct NamedColumns<'a>(Vec<(ColumnRole, String, Found<'a>)>);

impl<'a> NamedColumns<'a> {
    pub fn of(fields: &Fields<'a>, names: &[(&str, ColumnRole)]) -> NamedColumns<'a> {
        let found = names.iter().filter_map(|(name, role)| Some((*role, fields.take(name)?)));
        NamedColumns(found.filter_map(|(role, found)| Some((role, found.text()?, found))).collect())
    }

    /// The value of `data.columns`; `None` if every column is recognized by its name.
    fn in_recipe(&self) -> Option<Value> {
        let is_usual = |(role, column, _): &(ColumnRole, String, Found<'_>)| match role {
            ColumnRole::Messages => ["messages", "conversations", "conversation"].contains(&column.as_str()),
            role => column == role.word(),
        };
        let mut named: Vec<_> = self.0.iter().collect();
        named.sort_by_key(|(role, ..)| ColumnRole::WORDS.iter().position(|word| *word == role.word()));
        let table =
            named.iter().map(|(role, column, _)| (role.word().to_owned(), Value::Text(column.clone())));
        (!self.0.iter().all(is_usual)).then(|| Value::Table(table.collect()))
    }
}

/// `data.columns` from the sources of `data.train`. The sources of `data.eval`, which come later, must agree with it.
pub fn put_columns(draft: &mut Draft, key: &str, sources: &[NamedColumns<'_>]) {
    let values: Vec<Option<Value>> = sources.iter().map(NamedColumns::in_recipe).collect();
    let found = || sources.iter().flat_map(|source| source.0.iter().map(|(.., found)| found));
    let Some(first) = values.first() else { return };
    let why = match first {
        first if values.iter().any(|value| value != first) => OWN_COLUMNS,
        Some(value) => match draft.render("data.columns", value) {
            None => UNCLEAR_COLUMNS,
            Some(_) if key == "data.train" => {
                return draft.put("data.columns", value.clone(), &found().collect::<Vec<_>>());
            }
            Some(toml) if draft.line("data.columns").is_some_and(|line| line.toml == toml) => return,
            Some(_) => OWN_COLUMNS,
        },
        None if draft.has("data.columns") => {
            return draft.assume("`data.eval` has the same columns as `data.train` (`data.columns`)");
        }
        None => return,
    };
    found().for_each(|found| draft.leave_out(found, why));
}

/// `data.split` from a share of the rows that is evaluated.
pub fn put_split(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    match found.number() {
        Some(share) if share > 0.0 && share < 1.0 && draft.has("data.eval") => {
            draft.leave_out(&found, "the rows of `data.eval` are evaluated");
        }
        Some(share) if share > 0.0 && share < 1.0 => draft.put("data.split", Value::Float(share), &[&found]),
        Some(rows) if rows >= 1.0 => {
            draft.leave_out(&found, "a number of rows; `data.split` takes the share of the training rows");
        }
        Some(_) | None => {}
    }
}

/// Whether a name has the form `org/name` and no file or folder on this machine has it.
pub fn is_hub_name(draft: &Draft, name: &str) -> bool {
    let is_named =
        name.split('/').count() == 2 && !name.contains(['@', ':']) && !name.starts_with(['.', '~']);
    is_named && !is_file(draft, name) && DatasetName::parse(name).is_some()
}

/// The text of a setting, if a data set's name can hold it after this sign.
fn take_part(draft: &mut Draft, found: Option<Found<'_>>, sign: &str) -> Option<String> {
    let found = found?;
    let text = found.text()?;
    if DatasetName::parse(&format!("a/b{sign}{text}")).is_some() {
        return Some(text);
    }
    draft.leave_out(&found, "a part of a split; `data.limit` uses the first rows of it");
    None
}

/// A split without its slice, and the slice.
fn take_split(draft: &mut Draft, found: Option<Found<'_>>) -> (Option<String>, Option<Slice>) {
    let sliced = found.as_ref().and_then(|found| Slice::parse(&found.text()?));
    match sliced {
        Some((split, slice)) => (Some(split), Some(slice)),
        None => (take_part(draft, found, ":"), None),
    }
}

/// Writes what slices mean; returns whether the sources are to be named.
fn put_slices(draft: &mut Draft, key: &'static str, rows: &[NamedRows], from: &Found<'_>) -> bool {
    let sliced: Vec<&NamedRows> = rows.iter().filter(|rows| rows.slice.is_some()).collect();
    if key == "data.train" {
        draft.trained_slice = match rows {
            [rows] => rows.slice.clone().map(|slice| (whole_name(rows), slice)),
            _ => None,
        };
        return put_trained_slices(draft, rows, &sliced, from);
    }
    let ([rows], [_]) = (rows, &sliced[..]) else {
        sliced.iter().for_each(|rows| leave_slice(draft, rows, from));
        return sliced.is_empty();
    };
    let slice = rows.slice.as_ref().expect("it is sliced");
    let trained = draft.trained_slice.clone().filter(|(name, _)| *name == whole_name(rows));
    match trained.and_then(|(_, trained)| trained.share_of_rest(slice)) {
        Some(share) => {
            draft.left_out.retain(|left| !left.why.starts_with(A_PART));
            let remark = format!("{}; `train.seed` chooses the rows", slice.text);
            draft.put_with("data.split", Value::Float(share), &[from], &remark);
        }
        None => leave_slice(draft, rows, from),
    }
    false
}

fn put_trained_slices(
    draft: &mut Draft,
    rows: &[NamedRows],
    sliced: &[&NamedRows],
    from: &Found<'_>,
) -> bool {
    let first = |rows: &NamedRows| rows.slice.as_ref().and_then(Slice::first_rows);
    // `data.limit` is the same for every source.
    let counts: Vec<Option<u64>> = rows.iter().map(first).collect();
    if let Some(Some(count)) = counts.first()
        && counts.iter().all(|other| *other == Some(*count))
    {
        draft.put("data.limit", Value::Integer((*count).into()), &[from]);
        return true;
    }
    for rows in sliced {
        let text = &rows.slice.as_ref().expect("it is sliced").text;
        draft.leave_out(
            from,
            format!(
                "{A_PART}, so all rows of `{text}`'s split are trained on; `data.limit` uses the first ones"
            ),
        );
    }
    true
}

const A_PART: &str = "a recipe has no part of a split";

fn leave_slice(draft: &mut Draft, rows: &NamedRows, from: &Found<'_>) {
    let text = &rows.slice.as_ref().expect("it is sliced").text;
    let why = format!(
        "`{text}` selects rows by their numbers, and the split is trained on too; `data.split` holds out a share of \
         the training rows, or name another split"
    );
    draft.leave_out(from, why);
}

/// The data set and the split that a slice belongs to.
fn whole_name(rows: &NamedRows) -> String {
    format!("{}/{:?}:{:?}", rows.name, rows.config, rows.split)
}

fn is_file(draft: &Draft, name: &str) -> bool {
    const ENDINGS: [&str; 9] =
        [".json", ".jsonl", ".csv", ".txt", ".parquet", ".gz", ".zst", ".json.gz", ".jsonl.zst"];
    !name.contains("://")
        && (ENDINGS.iter().any(|ending| name.ends_with(ending)) || draft.places.exists(name))
}
