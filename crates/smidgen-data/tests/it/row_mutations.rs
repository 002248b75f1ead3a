//! Damaged data files: JSON, tables, text, packed files and Parquet, with bytes changed at random.
//! Reading one may fail but never panics, and never holds more memory than the file's size justifies.
//! Rows that come out anyway are read as every format, which may fail but not panic either.
//! `SMIDGEN_MUTATIONS=1000000 cargo test --release -p smidgen-data --test it` is the long run.

use crate::mutation::{self, cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use smidgen_data::format::{RowFormat, example_of, recognize};
use smidgen_data::source::{SourceError, read_json_rows};
use smidgen_ir::words::{DataFormat, OnBadRow};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::{LazyLock, Once};

const LINES: &str = r#"{"instruction": "Add 1 and 2", "input": "", "output": "3", "answer": "3"}

{"messages": [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": [{"type": "text", "text": "ä"}]}], "tools": "[]"}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b\n\"\u00e4\""}], "system": "c"}
{"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]}
{"text": "one", "input_ids": [1, 2, 3], "labels": [-100, 2, 3], "chat_template_kwargs": {"a": [1.5, null, true]}}
"#;
const TABLE: &str = "id,text,messages\r\n1,\"a, \"\"b\"\"\nc\",\"[{\"\"role\"\": \"\"assistant\"\", \"\"content\"\": \"\"x\"\"}]\"\r\n\r\n2,d,[]\n3,,\n";

/// A name and the bytes of a valid file of that name.
type ValidFile = (&'static str, Vec<u8>);

static TEXTS: LazyLock<Vec<ValidFile>> = LazyLock::new(|| {
    let array = format!(
        "[{}]",
        LINES.trim().split('\n').filter(|line| !line.is_empty()).collect::<Vec<_>>().join(",\n ")
    );
    vec![
        ("rows.jsonl", LINES.into()),
        ("rows.json", array.into()),
        ("rows.csv", TABLE.into()),
        ("rows.tsv", TABLE.replace(',', "\t").into()),
        ("rows.txt", LINES.into()),
    ]
});

static PACKED: LazyLock<Vec<ValidFile>> = LazyLock::new(|| {
    let text = LINES.repeat(20);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(text.as_bytes()).unwrap();
    vec![
        ("rows.jsonl.gz", gzip.finish().unwrap()),
        ("rows.jsonl.zst", zstd::encode_all(text.as_bytes(), 3).unwrap()),
    ]
});

static TABLES: LazyLock<Vec<ValidFile>> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/data");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".parquet"))
        .collect();
    names.sort();
    assert!(names.len() >= 5, "{names:?}");
    names.iter().map(|name| ("rows.parquet", fs::read(folder.join(name)).unwrap())).collect()
});

/// Buffers of 64 KiB for the file and its text, and the state of the decompression.
const ALLOWED_TEXT_BYTES: usize = 512 << 10;
/// Text in compressed files may be longer than the file; damage hardly makes it longer.
const ALLOWED_PACKED_BYTES: usize = 8 << 20;
/// A page may decompress to 1 MiB whatever its size, each entry of a dictionary takes 32 bytes or more, and a run of
/// nulls takes no bytes in the file.
const ALLOWED_PARQUET_BYTES: usize = 64 << 20;

/// Reads a damaged file as the program does. Returns whether it was read to its end.
fn check(folder: &Path, name: &str, bytes: &[u8], allowed_fixed_bytes: usize) -> bool {
    print_panics_without_backtrace();
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    let formats = [
        RowFormat::Alpaca,
        RowFormat::AlpacaPrompt,
        RowFormat::Chat,
        RowFormat::PromptCompletion,
        RowFormat::Text,
        RowFormat::Tokens,
    ];
    let (result, peak_bytes) = peak_bytes_of(|| {
        read_json_rows(&path, |place, row| {
            for format in formats {
                if let Err(error) = example_of(format, place, row.clone()) {
                    assert!(error.to_string().contains(name), "{error}");
                    error.hint();
                }
            }
            Ok::<(), SourceError>(())
        })
    });
    let allowed = allowed_fixed_bytes + 4 * mutation::allowed_bytes(bytes.len());
    assert!(peak_bytes <= allowed, "{peak_bytes} for {} bytes of `{name}`", bytes.len());
    let recognized = recognize(std::slice::from_ref(&path), DataFormat::Auto, &[], OnBadRow::Error);
    // A disk may be waited for if a file is overwritten, but not if it is new.
    fs::remove_file(&path).unwrap();
    match result {
        Ok(()) => true,
        Err(error) => {
            let message = error.to_string();
            assert!(message.contains(name) && message.len() <= bytes.len() + 1000, "{message}");
            error.hint();
            if let Err(error) = recognized {
                assert!(!error.to_string().is_empty());
            }
            false
        }
    }
}

/// A panic inside the Parquet reader is caught, but its backtrace would count as memory of the reader.
fn print_panics_without_backtrace() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| std::panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));
}

fn check_all(files: &[ValidFile], allowed_fixed_bytes: usize) {
    let folder = tempfile::tempdir().unwrap();
    let strategy = (any::<usize>(), prop::collection::vec(mutation(), 1..5));
    proptest!(cases(), |((which, mutations) in strategy)| {
        let (name, bytes) = &files[which % files.len()];
        check(folder.path(), name, &mutated(bytes, &mutations), allowed_fixed_bytes);
    });
}

#[test]
fn texts_with_damaged_bytes() {
    check_all(&TEXTS, ALLOWED_TEXT_BYTES);
}

#[test]
fn packed_files_with_damaged_bytes() {
    check_all(&PACKED, ALLOWED_PACKED_BYTES);
}

#[test]
fn parquet_files_with_damaged_bytes() {
    check_all(&TABLES, ALLOWED_PARQUET_BYTES);
}

/// Every byte of every Parquet file, set to a value that makes a number large, negative or unfinished.
#[test]
fn parquet_files_with_any_byte_damaged() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in TABLES.iter() {
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] = [0xFF, 0x7F, 0x80, 0x00][at % 4];
            check(folder.path(), name, &damaged, ALLOWED_PARQUET_BYTES);
        }
    }
}

/// Some damage must be accepted and some refused: otherwise the tests above would show nothing.
#[test]
fn some_damage_is_accepted_and_some_refused() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let folder = tempfile::tempdir().unwrap();
    for (files, allowed) in
        [(&*TEXTS, ALLOWED_TEXT_BYTES), (&*PACKED, ALLOWED_PACKED_BYTES), (&*TABLES, ALLOWED_PARQUET_BYTES)]
    {
        let mut accepted = 0;
        for round in 0..200 {
            let (name, bytes) = &files[round % files.len()];
            let mutation = mutation().new_tree(&mut runner).unwrap().current();
            accepted += usize::from(check(folder.path(), name, &mutated(bytes, &[mutation]), allowed));
        }
        assert!((1..199).contains(&accepted), "{accepted} of 200, such as `{}`", files[0].0);
        for (name, bytes) in files {
            // Strings in one encoding are refused, undamaged or not.
            let is_refused = bytes.windows(9).any(|bytes| bytes == b"the first") && *name == "rows.parquet";
            assert!(check(folder.path(), name, bytes, allowed) || is_refused, "{name}");
        }
    }
}
