//! The data that other tools name: files, and data sets on the hub with a config, a split and a revision.
//!
//! A name such as `org/name` is a data set on the hub unless a file or a folder has that name. A name without an owner
//! may be anything, so the user has to say which file it is. A share of the rows to evaluate becomes `data.split`.
//! Not supported: columns, and rows of a split that are selected by their numbers.

use super::draft::Draft;
use super::fields::{Fields, Found};
use crate::DatasetName;
use crate::value::Value;

/// A source of rows as a tool names it.
#[derive(Clone, Debug, Default)]
pub struct NamedRows {
    /// A file, or a data set on the hub.
    pub name: String,
    pub config: Option<String>,
    pub split: Option<String>,
    pub revision: Option<String>,
}

/// The names of the settings that choose a part of a data set.
pub struct PartNames {
    pub config: &'static [&'static str],
    pub split: &'static str,
    pub revision: &'static str,
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
        let config = take_part(draft, fields.take_any(names.config), "/");
        let split = take_part(draft, fields.take(names.split), ":");
        // Every data set has the branch `main`, and the hub's Parquet files are made from it.
        let revision = take_part(draft, fields.take(names.revision), "@");
        NamedRows { config, split, revision: revision.filter(|revision| revision != "main"), ..self }
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
    let named: Vec<Option<String>> = rows.iter().map(|rows| rows.in_recipe(draft)).collect();
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
            "`{key}` takes files and `hf:org/name` of the hub; name the file, or the data set, of {listed}"
        ),
    );
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

fn is_file(draft: &Draft, name: &str) -> bool {
    const ENDINGS: [&str; 9] =
        [".json", ".jsonl", ".csv", ".txt", ".parquet", ".gz", ".zst", ".json.gz", ".jsonl.zst"];
    !name.contains("://")
        && (ENDINGS.iter().any(|ending| name.ends_with(ending)) || draft.places.exists(name))
}
