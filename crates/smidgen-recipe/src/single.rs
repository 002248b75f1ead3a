//! A single value or override of a recipe, checked by its key and rendered as TOML.
//!
//! Relative paths are joined to the given folder, which may be relative too; `output.dir` stays unchanged.
//! Checks across keys need a whole recipe, so they are not done here.

use std::path::Path;

use crate::keys::find_key;
use crate::mistake::RecipeErrors;
use crate::parse::read_override;
use crate::sections::Recipe;
use crate::value::{Given, Value};

/// The value as TOML, or a message that says what the key accepts.
///
/// # Panics
/// If there is no such key: the caller passes constants.
pub(crate) fn render_value(path: &str, value: &Value, folder: &Path) -> Result<String, String> {
    let (section, name) = path.split_once('.').expect("a key has a section");
    let key = find_key(section, name).unwrap_or_else(|| panic!("there is no key `{path}`"));
    let mut recipe = Recipe::with_defaults();
    match (key.set)(&mut recipe, &Given { value, folder, working_directory: Path::new("") }) {
        Some(()) => Ok(without_needless_point((key.show)(&recipe).expect("the key was just set"))),
        None => Err(format!("`{path}` must be {}", key.accepts.describe())),
    }
}

/// Splits `section.key=value` into the key and its value as TOML.
pub(crate) fn render_override(text: &str, folder: &Path) -> Result<(String, String), RecipeErrors> {
    let recipe = read_override(text, folder)?;
    let path = text.split('=').next().unwrap_or_default().trim();
    let (section, name) = path.split_once('.').expect("an override that was read has a section");
    let key = find_key(section.trim(), name.trim()).expect("an override that was read has a key");
    let value = (key.show)(&recipe).expect("the key was just set");
    Ok((key.path(), without_needless_point(value)))
}

/// Turns `3.0` into `3`, which every key that accepts a number reads as the same value.
fn without_needless_point(toml: String) -> String {
    match toml.strip_suffix(".0") {
        Some(whole) if whole.bytes().all(|byte| byte.is_ascii_digit()) => whole.to_owned(),
        _ => toml,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_by_their_key() {
        let shown = |path: &str, value: Value| render_value(path, &value, Path::new("")).unwrap();
        assert_eq!(shown("adapter.alpha", Value::Float(32.0)), "32");
        assert_eq!(shown("train.lr", Value::Float(2e-5)), "2e-5");
        assert_eq!(shown("data.train", Value::Text("a/b.json".into())), "[\"a/b.json\"]");
        assert_eq!(shown("train.epochs", Value::Float(1.5)), "1.5");
        let wrong = render_value("adapter.rank", &Value::Integer(0), Path::new("")).unwrap_err();
        assert_eq!(wrong, "`adapter.rank` must be a whole number from 1 to 65536");
    }

    #[test]
    fn overrides_as_toml() {
        let render = |text: &str| render_override(text, Path::new(".."));
        let shown = |text: &str| render(text).unwrap();
        assert_eq!(shown("model.path=a/b"), ("model.path".into(), "\"../a/b\"".into()));
        assert_eq!(shown("data.train=[a.json, b.json]").1, "[\"../a.json\", \"../b.json\"]");
        assert_eq!(shown("output.dir=runs/x").1, "\"runs/x\"");
        assert_eq!(shown("memory.budget=8GiB").1, "\"8GiB\"");
        let said = render("lora_r=8").unwrap_err().to_string();
        assert!(said.contains("adapter.rank"), "{said}");
        assert!(render("train.steps").is_err());
        assert!(render("train.steps=-1").is_err());
    }
}
