//! Names of data sets on the hub: `hf:org/name[@revision][/config][:split]`.
//!
//! Like model names, they become parts of URLs and folder names, so only characters that are valid there are accepted.
//! Not checked here: whether the data set exists, and which configs and splits it has.

use crate::model_name::is_plain;
use std::fmt;

/// The forms of a data set name, for messages.
pub const DATASET_FORMS: &str =
    "`hf:org/name`, `hf:org/name:split`, `hf:org/name/config:split` or `hf:org/name@revision/config:split`";

/// A data set on the hub, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetName {
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: Option<String>,
    pub config: Option<String>,
    pub split: Option<String>,
}

impl DatasetName {
    /// Parses the part after `hf:`.
    pub fn parse(text: &str) -> Option<DatasetName> {
        let (text, split) = match text.split_once(':') {
            Some((text, split)) => (text, Some(split)),
            None => (text, None),
        };
        let (repo, revision, config) = match text.split_once('@') {
            Some((repo, rest)) => match rest.split_once('/') {
                Some((revision, config)) => (repo, Some(revision), Some(config)),
                None => (repo, Some(rest), None),
            },
            None => match text.match_indices('/').nth(1) {
                Some((end, _)) => (&text[..end], None, Some(&text[end + 1..])),
                None => (text, None, None),
            },
        };
        let is_part = |part: &str| !part.contains('/') && is_plain(part, "._-+");
        let named = repo.split('/').count() <= 2 && is_plain(repo, "._-");
        (named && [revision, config, split].into_iter().flatten().all(is_part)).then(|| DatasetName {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            config: config.map(str::to_owned),
            split: split.map(str::to_owned),
        })
    }
}

impl fmt::Display for DatasetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}", self.repo)?;
        for (sign, part) in [('@', &self.revision), ('/', &self.config), (':', &self.split)] {
            if let Some(part) = part {
                write!(f, "{sign}{part}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_data_sets() {
        for (text, expected) in [
            ("org/d", ("org/d", None, None, None)),
            ("gsm8k", ("gsm8k", None, None, None)),
            ("org/d:train", ("org/d", None, None, Some("train"))),
            ("org/d/main", ("org/d", None, Some("main"), None)),
            ("org/d@v1.0", ("org/d", Some("v1.0"), None, None)),
            ("org/d@v1/en-de:test", ("org/d", Some("v1"), Some("en-de"), Some("test"))),
        ] {
            let name = DatasetName::parse(text).unwrap();
            let found =
                (&*name.repo, name.revision.as_deref(), name.config.as_deref(), name.split.as_deref());
            assert_eq!(found, expected);
            assert_eq!(name.to_string(), format!("hf:{text}"));
        }
        for text in ["", "org/", "a/b/c/d", "org/d:", "org/d@", "../d", "org/d:a b", "org/d@v1/", "a/b:../c"]
        {
            assert_eq!(DatasetName::parse(text), None, "{text}");
        }
    }
}
