//! The library's interface: few items, each with a doc comment, and modules that are private.
//!
//! Read off `lib.rs`: every `pub use` in front of the hidden `internal` module. Links and examples in the comments are
//! checked by rustdoc itself.

use super::{expect_none, read, sources};
use regex::Regex;

const MOST_ITEMS: usize = 40;

/// Public names with the path that they are exported from.
fn public_items() -> Vec<(String, String)> {
    let text = read("crates/smidgen/src/lib.rs");
    let (facade, _) = text.split_once("#[doc(hidden)]\npub mod internal {").expect("`internal` is hidden");
    let item = Regex::new(r"(?m)^pub (use ([^;]+);|.*)").unwrap();
    let mut items = Vec::new();
    for found in item.captures_iter(facade) {
        let path = found.get(2).unwrap_or_else(|| panic!("`lib.rs` only lists: {}", &found[0])).as_str();
        let (module, names) = path.rsplit_once("::").unwrap_or_else(|| panic!("`{path}` names nothing"));
        let (module, names) = match path.split_once("::{") {
            Some((module, names)) => (module, names.trim_end_matches('}')),
            None => (module, names),
        };
        let names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        items.extend(names.map(|name| (module.to_string(), name.to_string())));
    }
    items
}

#[test]
fn the_interface_is_small_and_documented() {
    let items = public_items();
    assert!(items.len() >= 10, "`lib.rs` is read wrongly: {items:?}");
    assert!(items.len() <= MOST_ITEMS, "{} public items, at most {MOST_ITEMS}", items.len());
    let sources = sources();
    let mut violations = Vec::new();
    for (module, name) in &items {
        assert!(!name.contains(['*', ':', ' ']), "an item has one plain name: `{module}::{name}`");
        let file = format!("crates/smidgen/src/{}.rs", module.replace("::", "/"));
        let folder = match module.as_str() {
            "smidgen_recipe" => "crates/smidgen-recipe/src/",
            _ => file.as_str(),
        };
        // Closed words are rows of a macro, so that `pub enum` does not stand there.
        let definition =
            Regex::new(&format!(r"(?m)^(    {name} \{{$|pub (struct|enum|fn|trait|type) {name}\b)")).unwrap();
        let is_candidate =
            |path: &str| path.starts_with(folder) || (folder != file && path.ends_with("ir/src/words.rs"));
        let found = sources.iter().filter(|(path, _)| is_candidate(path)).find_map(|(_, text)| {
            let start = definition.find(text)?.start();
            Some(text[..start].lines().rev().map(str::trim).find(|line| !line.starts_with("#["))?.to_string())
        });
        match found {
            None => violations.push(format!("`{module}::{name}` is not found")),
            Some(before) if before.starts_with("///") => {}
            Some(before) => violations.push(format!("`{module}::{name}`: no comment, but `{before}`")),
        }
    }
    expect_none("public items of the library have a doc comment", &violations);
}
