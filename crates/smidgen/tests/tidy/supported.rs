//! The table of model families in `docs/supported.md`, made from the list of families and from what the fixtures record.
//!
//! A family is tested by the recorded runs of its `model_type`; its GGUF architecture is that of the rows which read and
//! write such files.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites the table.

use crate::{expect_file, read, root, with_block};
use serde_json::Value;
use smidgen_compile::model::checkpoints::{Checkpoints, checkpoints};
use smidgen_formats::gguf::architecture::Architecture;
use smidgen_formats::model::Model;
use std::collections::BTreeMap;
use std::fs;

/// The recorded runs of each `model_type`: the folders of fixtures. A model beside towers is a run of its text model too.
fn recorded() -> BTreeMap<String, Vec<String>> {
    let mut runs: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let folders = fs::read_dir(root().join("fixtures")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|folder| folder.join("expected.json").exists()).collect();
    folders.sort();
    for folder in folders {
        let gguf = folder.join("model.gguf");
        let model =
            if gguf.exists() { Model::open_gguf(&gguf) } else { Model::open_folder(&folder.join("model")) };
        let model = model.unwrap_or_else(|error| panic!("{error}"));
        let config = model.config();
        let types = [&config["model_type"], &config["text_config"]["model_type"]];
        for model_type in types.into_iter().filter_map(Value::as_str) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_string();
            runs.entry(model_type.into()).or_default().push(name);
        }
    }
    runs
}

fn in_code<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

#[test]
fn the_table_of_families_is_what_the_code_says() {
    let runs = recorded();
    let row = |family: &Checkpoints| {
        let Checkpoints { model_type, names, left_out } = family;
        let of_type = runs.get(*model_type).map_or(&[][..], Vec::as_slice);
        let named = in_code(of_type.iter().map(String::as_str));
        let gguf = in_code(Architecture::of_model_type(model_type).map(|row| row.name).into_iter());
        format!("| `{model_type}` | {} | {named} | {gguf} | {left_out} |\n", names.join(", "))
    };
    let rows: String = checkpoints().into_iter().map(row).collect();
    let table = format!(
        "| `model_type` | checkpoints | recorded runs | GGUF | left out |\n|---|---|---|---|---|\n{rows}"
    );
    let page = read("docs/supported.md");
    expect_file("docs/supported.md", &with_block(&page, "families", &table));
}

/// Each family has a recorded run of its own, or is read as one that has.
#[test]
fn every_family_is_recorded() {
    // Their files differ from those of the named type in names only, or in towers.
    let alike = [
        ("phi4_multimodal", "phi3"),
        ("phi4mm", "phi3"),
        ("gemma4_unified_text", "gemma4_text"),
        ("gemma4", "gemma4_text"),
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("gemma4_unified", "gemma4_text"),
    ];
    let runs = recorded();
    let is_recorded = |model_type: &str| {
        let like = alike.iter().find(|(one, _)| *one == model_type).map_or(model_type, |(_, like)| *like);
        runs.contains_key(like)
    };
    let missing: Vec<&str> =
        checkpoints().iter().map(|row| row.model_type).filter(|name| !is_recorded(name)).collect();
    assert!(missing.is_empty(), "without a recorded run: {missing:?}");
}
