//! Tests of every kind of data file: the rows of valid ones, and the messages about the others.

use crate::source::*;
use crate::source_error::{Compression, MAX_ROW_BYTES};
use serde_json::{Value as Json, json};
use smidgen_ir::grouped_digits::Grouped;
use std::io::Write;
use std::path::{Path, PathBuf};

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    let mut file = std::fs::File::create(&path).unwrap();
    match Compression::of(&path) {
        Compression::None => file.write_all(bytes.as_ref()).unwrap(),
        Compression::Gzip => file.write_all(&gzip(bytes.as_ref())).unwrap(),
        Compression::Zstd => file.write_all(&zstd::encode_all(bytes.as_ref(), 3).unwrap()).unwrap(),
    }
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/data").join(name)
}

fn json_rows(path: &Path) -> Result<Vec<(String, Json)>, SourceError> {
    let mut all = Vec::new();
    read_json_rows(path, |place, row| {
        all.push((format!("{} {}", place.unit, place.number), row));
        Ok::<(), SourceError>(())
    })?;
    Ok(all)
}

/// The rows of a file of this name and content, or the error message without the folder.
fn read(name: &str, bytes: impl AsRef<[u8]>) -> Result<Vec<(String, Json)>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), name, bytes);
    json_rows(&path).map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

fn said(name: &str, bytes: impl AsRef<[u8]>) -> String {
    read(name, bytes).unwrap_err()
}

fn at(place: &str, row: Json) -> (String, Json) {
    (place.to_owned(), row)
}

#[test]
fn both_formats_give_the_same_rows() {
    let folder = tempfile::tempdir().unwrap();
    let lines = write(folder.path(), "a.jsonl", "\u{feff}[1,2]\r\n\n  \n[3]");
    let array = write(folder.path(), "a.json", "\u{feff} [ [1,2],\n [3] ]\n");
    assert_eq!(json_rows(&lines).unwrap(), [at("line 1", json!([1, 2])), at("line 4", json!([3]))]);
    assert_eq!(json_rows(&array).unwrap(), [at("row 1", json!([1, 2])), at("row 2", json!([3]))]);
    let empty = write(folder.path(), "e.json", "[]");
    assert_eq!(json_rows(&empty).unwrap(), []);
}

#[test]
fn mistakes_carry_line_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let said = |name: &str, text: &str| -> String {
        let path = write(folder.path(), name, text);
        let message = json_rows(&path).unwrap_err().to_string();
        message.replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(
        said("a.jsonl", "[1]\n\n  1 2\n"),
        "`a.jsonl` line 3, column 5: broken JSON: trailing characters"
    );
    assert_eq!(
        said("a.jsonl", "[1]\n\nnul\n"),
        "`a.jsonl` line 3, column 3: broken JSON: EOF while parsing a value"
    );
    assert_eq!(
        said("a.json", "[[1],\n [2, x]]"),
        "`a.json` row 2 (line 2, column 6): broken JSON: expected value"
    );
    assert_eq!(
        said("a.json", "[[1],\n [2"),
        "`a.json` row 2 (line 2, column 3): broken JSON: EOF while parsing a list"
    );
    assert_eq!(
        said("a.json", "[[1]] x"),
        "`a.json` row 1 (line 1, column 7): broken JSON: trailing characters"
    );
    assert_eq!(
        said("a.jsonl", "[\n[1]]"),
        "`a.jsonl` line 1 starts an array, but a `.jsonl` file holds one object per line"
    );
    let error = json_rows(&folder.path().join("gone.json")).unwrap_err();
    assert!(matches!(error, SourceError::Read { .. }));
}

#[test]
fn the_callback_stops_the_reading_with_its_own_error() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("a.json", "[[1],[2],[3]]"), ("a.jsonl", "[1]\n[2]\n[3]\n")] {
        let path = write(folder.path(), name, text);
        let mut seen = 0;
        let result = read_json_rows(&path, |place, _| {
            seen += 1;
            match place.number {
                2 => anyhow::bail!("enough"),
                _ => Ok(()),
            }
        });
        assert_eq!(result.unwrap_err().to_string(), "enough");
        assert_eq!(seen, 2);
    }
}

#[test]
fn packed_files_give_the_rows_of_plain_ones() {
    let object = json!({"a": "x", "b": "y, z"});
    for (name, text, place) in [
        ("r.json", "[{\"a\": \"x\", \"b\": \"y, z\"}]", "row 1"),
        ("r.jsonl", "{\"a\": \"x\", \"b\": \"y, z\"}", "line 1"),
        ("r.ndjson", "{\"a\": \"x\", \"b\": \"y, z\"}\n", "line 1"),
        ("r.csv", "a,b\nx,\"y, z\"\n", "line 2"),
        ("r.tsv", "a\tb\nx\ty, z\n", "line 2"),
    ] {
        for packing in ["", ".gz", ".zst", ".GZ"] {
            assert_eq!(
                read(&format!("{name}{packing}"), text).unwrap(),
                [at(place, object.clone())],
                "{name}"
            );
        }
    }
    let text = json!({"text": "one line"});
    assert_eq!(read("r.txt.zst", "one line").unwrap(), [at("line 1", text)]);
}

#[test]
fn gzip_of_several_members_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.jsonl.gz");
    std::fs::write(&path, [gzip(b"[1]\n[2"), gzip(b"]\n[3]")].concat()).unwrap();
    let expected = [("line 1", 1), ("line 2", 2), ("line 3", 3)].map(|(place, id)| at(place, json!([id])));
    assert_eq!(json_rows(&path).unwrap(), expected);
}

#[test]
fn damaged_and_cut_off_compressed_files_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let text = "{\"text\": \"some words\"}\n".repeat(50_000);
    for name in ["r.jsonl.gz", "r.jsonl.zst"] {
        let path = write(folder.path(), name, &text);
        assert_eq!(json_rows(&path).unwrap().len(), 50_000);
        let whole = std::fs::read(&path).unwrap();
        let packing = if name.ends_with("gz") { "gzip" } else { "zstd" };
        for kept in [whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..kept]).unwrap();
            let error = json_rows(&path).unwrap_err();
            assert!(
                error.to_string().ends_with(&format!("{name}` ends in the middle of its {packing} data")),
                "{error}"
            );
            assert!(error.hint().unwrap().contains("half downloaded"));
        }
        std::fs::write(&path, &text).unwrap();
        let error = json_rows(&path).unwrap_err();
        assert!(error.to_string().contains(&format!("{name}` is damaged {packing} data: ")), "{error}");
    }
}

#[test]
fn names_that_say_nothing_and_folders_are_refused() {
    assert_eq!(
        said("a.bin", ""),
        "`a.bin` is none of `.json`, `.jsonl`, `.ndjson`, `.csv`, `.tsv`, `.txt`, `.md`, `.parquet`, plain or as `.gz` or `.zst`"
    );
    assert!(said("json", "[]").starts_with("`json` is none of"));
    assert!(said("a.gz", "[]").starts_with("`a.gz` is none of"));
    assert_eq!(said("a.parquet.gz", ""), "`a.parquet.gz` is a Parquet file inside gzip");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.json");
    std::fs::create_dir(&path).unwrap();
    let error = json_rows(&path).unwrap_err();
    assert!(
        error.to_string().ends_with("rows.json` is a folder without documents (`.txt`, `.md`)"),
        "{error}"
    );
    assert!(error.hint().unwrap().ends_with("rows.json/*.jsonl`"));
    let error = json_rows(&folder.path().join("gone.jsonl")).unwrap_err();
    assert!(error.to_string().starts_with("cannot read `"), "{error}");
    assert!(error.to_string().contains("No such file"), "{error}");
}

#[test]
fn bytes_that_are_not_text_are_named_in_every_kind_of_file() {
    for name in ["a.json", "a.jsonl", "a.csv", "a.txt", "a.jsonl.gz", "a.csv.zst"] {
        let said = said(name, b"[\n{\"x\": \"\xFF\"}]");
        // The place of a byte in a cell is not known.
        let column = if name.starts_with("a.csv") { "" } else { ", byte column 8" };
        assert_eq!(said, format!("`{name}` line 2{column} is not UTF-8: byte 0xFF"));
    }
    assert_eq!(said("a.jsonl", b"{}\n{\"\xC3("), "`a.jsonl` line 2, byte column 3 is not UTF-8: byte 0xC3");
}

#[test]
fn elements_are_cut_where_the_parser_would_cut_them() {
    let text = r#" [ {"a": "]},[{\\\"", "b": [1, {"c": []}]} , 7,"x" ,[ ] , null,true]  "#;
    let whole: Vec<Json> = serde_json::from_str(text).unwrap();
    let cut: Vec<Json> = read("a.json", text).unwrap().into_iter().map(|(_, row)| row).collect();
    assert_eq!(cut, whole);
    // Rows that span several buffers.
    let long = "ü\\\"]".repeat(100_000);
    let text = serde_json::to_string(&vec![json!({"a": long}), json!({"b": [long]})]).unwrap();
    let cut: Vec<Json> = read("a.json", &text).unwrap().into_iter().map(|(_, row)| row).collect();
    assert_eq!(cut, [json!({"a": long}), json!({"b": [long]})]);
}

#[test]
fn broken_arrays_are_reported_with_their_place() {
    for (text, expected) in [
        ("", "row 1 (line 1, column 1): broken JSON: EOF while parsing a value"),
        ("[", "row 1 (line 1, column 2): broken JSON: EOF while parsing a list"),
        ("[1,\n", "row 1 (line 2, column 1): broken JSON: EOF while parsing a list"),
        ("[1,]", "row 1 (line 1, column 4): broken JSON: trailing comma"),
        ("[,1]", "row 1 (line 1, column 2): broken JSON: expected value"),
        ("[1,,2]", "row 2 (line 1, column 4): broken JSON: expected value"),
        ("[{\"a\": 1}\n {\"b\": 2}]", "row 1 (line 2, column 2): broken JSON: expected `,` or `]`"),
        ("[1,\n{\"a\": [1, 2}]", "row 2 (line 2, column 12): broken JSON: expected `,` or `]`"),
        ("[1}", "row 1 (line 1, column 3): broken JSON: expected `,` or `]`"),
        ("[1,\n\n  {\"a\":\n x}]", "row 2 (line 4, column 2): broken JSON: expected value"),
        ("[\"abc]", "row 1 (line 1, column 6): broken JSON: EOF while parsing a string"),
        ("[1]\n]", "row 1 (line 2, column 1): broken JSON: trailing characters"),
    ] {
        assert_eq!(said("a.json", text), format!("`a.json` {expected}"), "{text}");
    }
    assert_eq!(said("a.json", "ü"), "`a.json` does not hold a JSON array: it starts with `ü`");
}

#[test]
fn tables_have_named_cells_and_know_their_lines() {
    let table = "\u{feff}id,text\r\n\r\n1,\"a\r\nb \"\"c\"\"\"\r\n\n2,\r\n3,x";
    assert_eq!(
        read("a.csv", table).unwrap(),
        [
            at("line 3", json!({"id": "1", "text": "a\r\nb \"c\""})),
            at("line 6", json!({"id": "2", "text": ""})),
            at("line 7", json!({"id": "3", "text": "x"})),
        ]
    );
    let unix = "id,text\n1,\"a\nb\"\n\n\n2,c\n";
    assert_eq!(
        read("a.csv", unix).unwrap(),
        [at("line 2", json!({"id": "1", "text": "a\nb"})), at("line 6", json!({"id": "2", "text": "c"}))]
    );
    assert_eq!(read("a.csv", "").unwrap(), []);
    assert_eq!(read("a.csv", "only,a,header\n").unwrap(), []);
    assert_eq!(read("a.csv", "text\nalone").unwrap(), [at("line 2", json!({"text": "alone"}))]);
}

#[test]
fn mistakes_in_tables_are_reported_with_their_line() {
    assert_eq!(said("a.csv", "a,b\n1,2\n\n1,2,3\n"), "`a.csv` line 4 has 3 cells, the header has 2");
    assert_eq!(said("a.csv", "a,b\r\n1,2\r\n1\r\n"), "`a.csv` line 3 has 1 cells, the header has 2");
    assert_eq!(said("a.tsv", "a\tb\n1\n"), "`a.tsv` line 2 has 1 cells, the header has 2");
    assert_eq!(said("a.csv", "a,b,a\n"), "`a.csv` line 1: the header has the column `a` twice");
    let open = "a,b\n1,2\n3,\"four\n5,6\n7,8\n";
    assert_eq!(said("a.csv", open), "`a.csv` line 3: a quote that opens in this row is never closed");
    assert_eq!(said("a.csv", "\"a,b\n1,2"), "`a.csv` line 1: a quote that opens in this row is never closed");
}

#[test]
fn a_text_file_is_one_document() {
    let text = "# one\r\n\n  \t\n two \nthree";
    for name in ["a.txt", "a.md", "a.MD.gz", "a.markdown"] {
        assert_eq!(read(name, text).unwrap(), [at("line 1", json!({"text": text}))], "{name}");
    }
    assert_eq!(read("a.txt", " \n\n").unwrap(), []);
}

#[test]
fn a_folder_is_its_documents() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| write(folder.path(), name, name);
    for name in ["docs/b.md", "docs/a/z.txt", "docs/picture.png", "docs/.hidden.md", "docs/.git/c.md"] {
        std::fs::create_dir_all(folder.path().join(name).parent().unwrap()).unwrap();
        at(name);
    }
    let files = find_files(&["docs"], folder.path()).unwrap();
    assert_eq!(files, ["docs/a/z.txt", "docs/b.md"].map(|name| folder.path().join(name)));
    let refused = |name: &str| {
        let path = at(name);
        let error = find_files(&["docs"], folder.path()).unwrap_err();
        std::fs::remove_file(path).unwrap();
        format!("{error}; {}", error.hint().unwrap())
    };
    assert!(refused("docs/page.html").contains("`pandoc -t markdown "));
    assert!(refused("docs/paper.pdf").contains("`pdftotext "));
    assert!(refused("docs/rows.jsonl").contains("docs/*.jsonl` or `"));
    assert!(said("a.docx", "").contains("is a document of another kind"));
}

#[test]
fn a_million_tokens_in_a_row_are_a_row() {
    let long = "word ".repeat(1_000_000);
    let row = json!({"text": long});
    assert_eq!(read("a.jsonl", row.to_string()).unwrap(), [at("line 1", row.clone())]);
    assert_eq!(read("a.json.zst", json!([row]).to_string()).unwrap(), [at("row 1", row.clone())]);
    assert_eq!(read("a.csv.gz", format!("text\n\"{long}\"\n")).unwrap(), [at("line 2", row)]);
}

#[test]
fn a_row_without_an_end_is_refused_before_memory_runs_out() {
    let endless = "x".repeat((MAX_ROW_BYTES + (1 << 20)) as usize);
    assert_eq!(said("a.txt.zst", &endless), "`a.txt.zst` line 1: the row is longer than 16 MiB");
    assert_eq!(
        said("a.csv.zst", format!("a,b\n1,2\n3,\"{endless}")),
        "`a.csv.zst` line 3: the row is longer than 16 MiB"
    );
    assert_eq!(
        said("a.jsonl.zst", format!("{{\"{endless}")),
        "`a.jsonl.zst` line 1: the row is longer than 16 MiB"
    );
    // The parser knows better why an element has no end.
    assert_eq!(
        said("a.json.zst", format!("[{{\"a\": [1}}, \"{endless}\"]")),
        "`a.json.zst` row 1 (line 1, column 10): broken JSON: expected `,` or `]`"
    );
}

#[test]
fn parquet_tables_are_rows_of_json() {
    for name in ["chat_snappy.parquet", "chat_zstd.parquet"] {
        let turn = |role: &str, content: &str| json!({"role": role, "content": content, "tool_calls": null});
        assert_eq!(
            json_rows(&fixture(name)).unwrap(),
            [
                at(
                    "row 1",
                    json!({"messages": [turn("system", "Be brief."), turn("user", "What is 2 + 2?"), turn("assistant", "4")],
                           "source": "hand"})
                ),
                at(
                    "row 2",
                    json!({"messages": [turn("user", "Grüße, 世界 🦀"), turn("assistant", "Hallo!"), turn("user", "Bye"),
                                        turn("assistant", "Bye.")],
                           "source": null})
                ),
            ],
            "{name}"
        );
    }
    let groups = json_rows(&fixture("alpaca_groups.parquet")).unwrap();
    assert_eq!(groups.len(), 7);
    assert_eq!(
        groups[6],
        at(
            "row 7",
            json!({"instruction": "Add 6 and 1", "input": "", "output": "7", "difficulty": 1.5, "checked": true})
        )
    );
    assert_eq!(groups[0].1["input"], Json::Null);
    assert_eq!(
        json_rows(&fixture("types.parquet")).unwrap(),
        [at(
            "row 1",
            json!({"text": "one row", "int8": -5, "uint64": 18446744073709551615_u64, "double": 0.1, "half": 1.5,
                   "price": -12.34, "day": 2, "moment": 1000, "bytes": null, "map": {"a": 1, "b": 2},
                   "nested": [[1], [], null, [2, 3]], "empty": [], "nothing": null})
        )]
    );
    let texts: Vec<Json> =
        json_rows(&fixture("text_delta_length.parquet")).unwrap().into_iter().map(|(_, row)| row).collect();
    assert_eq!(
        texts,
        [json!({"text": "the first"}), json!({"text": "the second"}), json!({"text": "the third"})]
    );
    let error = json_rows(&fixture("text_delta.parquet")).unwrap_err();
    assert!(
        error.to_string().ends_with("strings in the encoding DELTA_BYTE_ARRAY are not supported"),
        "{error}"
    );
}

#[test]
fn files_that_are_not_parquet_are_refused() {
    assert!(said("a.parquet", "").starts_with("`a.parquet` is not a valid Parquet file: "));
    assert!(
        said("a.parquet", "{\"text\": \"not one\"}\n".repeat(9))
            .starts_with("`a.parquet` is not a valid Parquet")
    );
    let whole = std::fs::read(fixture("chat_snappy.parquet")).unwrap();
    assert!(
        said("a.parquet", &whole[..whole.len() / 2]).starts_with("`a.parquet` is not a valid Parquet file: ")
    );
}

#[test]
fn the_beginning_of_a_json_file_takes_precedence_over_its_name() {
    let rows = [json!({"text": "a"}), json!({"text": "b"})];
    let both =
        |unit: &str| [at(&format!("{unit} 1"), rows[0].clone()), at(&format!("{unit} 2"), rows[1].clone())];
    let array = serde_json::to_string_pretty(&rows).unwrap();
    assert_eq!(read("a.jsonl", &array).unwrap(), both("row"));
    assert_eq!(read("a.jsonl.gz", format!("\n {array}")).unwrap(), both("row"));
    assert_eq!(read("a.jsonl", "[]").unwrap(), []);
    let lines = format!("{}\n{}\n", rows[0], rows[1]);
    assert_eq!(read("a.json", &lines).unwrap(), both("line"));
    for wrapped in [format!("{{\"data\": {array}}}"), format!("\n{{ \"rows\" :{array}\n}}\n")] {
        assert_eq!(read("a.json", wrapped).unwrap(), both("row"));
    }
    assert_eq!(read("a.json", "{\"data\": []}").unwrap(), []);
    // A row whose first column is a list of objects.
    let chat = json!({"messages": [{"role": "user"}], "id": 1});
    assert_eq!(read("a.json", format!("{chat}\n")).unwrap(), [at("line 1", chat)]);
    assert_eq!(
        said("a.json", "{\"data\": [{\"a\": 1}], \"version\": 2}"),
        "`a.json` begins with an object whose `data` is a list, and has more after that list"
    );
    assert!(said("a.json", "{\"data\": [{\"a\": 1}]").contains("EOF while parsing an object"));
    assert!(said("a.json", "{\"data\": [{\"a\": 1}]} x").contains("trailing characters"));
}

#[test]
fn the_separator_is_detected_in_the_header() {
    let row = [at("line 2", json!({"a": "1, 2", "b": "x"}))];
    assert_eq!(read("a.csv", "a;b\n1, 2;x\n").unwrap(), row);
    assert_eq!(read("a.csv", "a\tb\n1, 2\tx\n").unwrap(), row);
    assert_eq!(read("a.tsv", "a\tb\n1, 2\tx\n").unwrap(), row);
    assert_eq!(read("a.tsv", "a,b\n\"1, 2\",x\n").unwrap(), row);
    assert_eq!(read("a.csv", "\na;\"b\"\n1, 2;x\n").unwrap(), [at("line 3", row[0].1.clone())]);
    // Separators inside quotes are part of a name, and one of each leaves it at the comma.
    let quoted = json!({"a;b;c": "1", "d": "2"});
    assert_eq!(read("a.csv", "\"a;b;c\",d\n1,2\n").unwrap(), [at("line 2", quoted)]);
    assert_eq!(read("a.csv", "a,b;c\n1,2\n").unwrap(), [at("line 2", json!({"a": "1", "b;c": "2"}))]);
}

#[test]
fn broken_rows_leave_the_others_readable() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, expected) in [
        ("a.jsonl", "{\"a\": 1}\n{\"a\" 2}\n\n{\"a\": 3}\n", [1, 2, 4]),
        ("a.json", "[{\"a\": 1}, {\"a\" 2},\n {\"a\": 3}]", [1, 2, 3]),
        ("a.csv", "a,b\n1,2\n3\n4,5\n", [2, 3, 4]),
    ] {
        let path = write(folder.path(), name, text);
        let mut seen = Vec::new();
        read_rows(&path, |place, row| {
            seen.push((place.number, row.is_ok()));
            Ok::<(), SourceError>(())
        })
        .unwrap();
        assert_eq!(seen, expected.map(|number| (number, number != expected[1])), "{name}");
    }
}

/// The number of each row, or the message about it.
fn rows_and_faults(path: &Path) -> Result<Vec<Result<u64, String>>, SourceError> {
    let mut seen = Vec::new();
    read_rows(path, |place, row| {
        let folder = format!("{}/", path.parent().unwrap().display());
        seen.push(row.map(|_| place.number).map_err(|error| error.to_string().replace(&folder, "")));
        Ok::<(), SourceError>(())
    })?;
    Ok(seen)
}

#[test]
fn wrong_bytes_cost_their_row_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let bad = |said: &str| Err(said.to_owned());
    for (name, bytes, expected) in [
        (
            "a.jsonl",
            &b"\xEF\xBB\xBF{\"a\": \"\xFF\"}\n{\"a\": \"b\xC3\"}\n\n{\"a\": 3}\n"[..],
            [
                bad("`a.jsonl` line 1, byte column 11 is not UTF-8: byte 0xFF"),
                bad("`a.jsonl` line 2, byte column 9 is not UTF-8: byte 0xC3"),
                Ok(4),
            ],
        ),
        (
            "a.jsonl.gz",
            b"1\n\"\x80\"\n3\n",
            [Ok(1), bad("`a.jsonl.gz` line 2, byte column 2 is not UTF-8: byte 0x80"), Ok(3)],
        ),
        (
            "a.json",
            b"[{\"a\": 1},\n {\"a\": \"],\xE4\xB8\"}, {\"a\": 3}]",
            [Ok(1), bad("`a.json` line 2, byte column 11 is not UTF-8: byte 0xE4"), Ok(3)],
        ),
        (
            "a.csv",
            b"a,b\n1,2\n3,\"x\n\xFFy\"\n4,5\n",
            [Ok(2), bad("`a.csv` line 4 is not UTF-8: byte 0xFF"), Ok(5)],
        ),
    ] {
        let path = write(folder.path(), name, bytes);
        assert_eq!(rows_and_faults(&path).unwrap(), expected, "{name}");
    }
    // A file in another encoding is refused as a whole.
    let utf16 = write(folder.path(), "u.txt", b"\xFF\xFEa\0\n\0b\0\n\0");
    assert!(rows_and_faults(&utf16).unwrap_err().to_string().ends_with("is not UTF-8: byte 0xFF"));
    let header = write(folder.path(), "h.csv", b"a,\xFF\n1,2\n");
    assert!(rows_and_faults(&header).unwrap_err().to_string().ends_with("line 1 is not UTF-8: byte 0xFF"));
}

#[test]
fn a_quote_that_is_never_closed_costs_every_line_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.csv", "a,b\n1,2\n\"x\ny\",\"four\n5,6\n\n7,8\n");
    assert_eq!(
        rows_and_faults(&path).unwrap(),
        [
            Ok(2),
            Err("`a.csv` line 3: a quote that opens in this row is never closed".to_owned()),
            Err("`a.csv` line 5 is lost: it comes after a quote that opens in line 3 and is never closed"
                .to_owned()),
            Err("`a.csv` line 7 is lost: it comes after a quote that opens in line 3 and is never closed"
                .to_owned()),
        ]
    );
}

#[test]
fn a_damaged_row_group_costs_its_rows() {
    let folder = tempfile::tempdir().unwrap();
    let sound = std::fs::read(fixture("alpaca_groups.parquet")).unwrap();
    let all = json_rows(&fixture("alpaca_groups.parquet")).unwrap();
    // The first page of the file: a header that is no Thrift struct.
    let mut bytes = sound.clone();
    bytes[4..12].fill(0xFF);
    let path = write(folder.path(), "a.parquet", bytes);
    let seen = rows_and_faults(&path).unwrap();
    assert_eq!(seen.len(), all.len());
    let lost = seen.iter().take_while(|row| row.is_err()).count();
    assert!((1..all.len()).contains(&lost), "{seen:?}");
    assert_eq!(seen[lost..], (lost as u64 + 1..=7).map(Ok).collect::<Vec<_>>());
    assert!(seen[0].as_ref().unwrap_err().starts_with("`a.parquet` row 1 cannot be read: "), "{seen:?}");
    assert!(seen[lost - 1].as_ref().unwrap_err().starts_with(&format!("`a.parquet` row {lost} cannot")));
}

/// Equal rows take no space: twenty million of them in 109 KB would take minutes.
#[test]
fn a_small_parquet_file_cannot_claim_millions_of_rows() {
    use parquet::data_type::Int32Type;
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    let folder = tempfile::tempdir().unwrap();
    let write_rows = |name: &str, group: usize, groups: usize| {
        let path = folder.path().join(name);
        let schema = parse_message_type("message rows { required int32 a; }").unwrap().into();
        let properties = WriterProperties::builder().build().into();
        let file = std::fs::File::create(&path).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
        for _ in 0..groups {
            let mut rows = writer.next_row_group().unwrap();
            let mut column = rows.next_column().unwrap().unwrap();
            column.typed::<Int32Type>().write_batch(&vec![7; group], None, None).unwrap();
            column.close().unwrap();
            rows.close().unwrap();
        }
        writer.close().unwrap();
        (path.clone(), std::fs::metadata(path).unwrap().len())
    };
    let (path, bytes) = write_rows("many.parquet", 600_000, 2);
    assert!(bytes < 100_000, "{bytes}");
    let error = json_rows(&path).unwrap_err();
    let most = Grouped((1 << 20) + bytes);
    let expected = format!(
        "`{}` claims 1,200,000 rows in {} bytes; a file of this size may have {most}",
        path.display(),
        Grouped(bytes)
    );
    assert_eq!(error.to_string(), expected);
    assert!(error.hint().is_some_and(|hint| hint.contains("`train.epochs`")));
    assert_eq!(json_rows(&write_rows("some.parquet", 500, 2).0).unwrap().len(), 1000);
}
