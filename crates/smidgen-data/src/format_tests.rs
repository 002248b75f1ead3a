//! Tests of the row formats: every one recognized and read, and every mistake with its exact message.

use super::example::{Conversation, Example, ExampleRow};
use super::format::*;
use super::source::{RowPlace, RowUnit};
use serde_json::{Map, Value as Json, json};
use smidgen_ir::words::{ColumnRole, DataFormat, OnBadRow};
use std::path::{Path, PathBuf};

fn example(format: RowFormat, row: Json) -> Result<ExampleRow, FormatError> {
    example_of(format, RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number: 7 }, row)
}

fn said(format: RowFormat, row: Json) -> String {
    example(format, row).unwrap_err().to_string()
}

fn hint(format: RowFormat, row: Json) -> String {
    example(format, row).unwrap_err().hint().unwrap()
}

fn chat(row: Json) -> (Conversation, Map<String, Json>) {
    match example(RowFormat::Chat, row).unwrap() {
        ExampleRow { example: Example::Chat(conversation), fields } => (conversation, fields),
        other => panic!("{other:?}"),
    }
}

struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn shown(&self, error: FormatError) -> String {
        error.to_string().replace(&format!("{}/", self.0.path().display()), "")
    }

    fn reason(&self, name: &str, text: &str) -> String {
        self.reason_with(&[], name, text)
    }

    fn reason_with(&self, columns: &Columns, name: &str, text: &str) -> String {
        match recognize(&[self.write(name, text)], DataFormat::Auto, columns, OnBadRow::Error) {
            Ok(recognized) => recognized.reason,
            Err(error) => self.shown(error),
        }
    }

    fn examples(&self, files: &[PathBuf], format: RowFormat) -> Result<Vec<(String, Example)>, String> {
        self.examples_of(RowReading { source: files.into(), format, columns: &[], limit: 0 })
    }

    fn examples_of(&self, reading: RowReading<'_>) -> Result<Vec<(String, Example)>, String> {
        let mut all = Vec::new();
        read_examples(reading, |place, row| {
            all.push((format!("{} {}", place.unit, place.number), row?.example));
            Ok::<(), FormatError>(())
        })
        .map_err(|error| self.shown(error))?;
        Ok(all)
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/data").join(name)
}

#[test]
fn formats_are_recognized_by_their_fields() {
    let files = Files::new();
    for (row, reason) in [
        (r#"{"instruction": "", "input": "", "output": ""}"#, "alpaca: rows have `instruction` and `output`"),
        (
            r#"{"instruction": "", "context": "", "response": ""}"#,
            "alpaca: rows have `instruction` and `response`",
        ),
        (r#"{"messages": [{"role": "user"}], "prompt": ""}"#, "chat: rows have `messages`"),
        (
            r#"{"conversations": [{"from": "human", "value": ""}]}"#,
            "chat: rows have `conversations` with `from` and `value`",
        ),
        (r#"{"conversation": []}"#, "chat: rows have `conversation`"),
        (r#"{"prompt": "", "completion": ""}"#, "prompt-completion: rows have `prompt` and `completion`"),
        (r#"{"prompt": "", "response": ""}"#, "prompt-completion: rows have `prompt` and `response`"),
        (
            r#"{"question": "", "answer": "", "id": 1}"#,
            "prompt-completion: rows have `question` and `answer`, which are taken as `prompt` and `completion`",
        ),
        (
            r#"{"input": "", "output": "", "answer": ""}"#,
            "prompt-completion: rows have `input` and `output`, which are taken as `prompt` and `completion`",
        ),
        (r#"{"text": "", "question": "", "answer": ""}"#, "text: rows have `text`"),
        (
            r#"{"question": "", "choices": [], "answer": 1}"#,
            "`a.jsonl` line 1 matches no known format: found `question`, `choices`, `answer`",
        ),
        (r#"{"text": "", "label": 1}"#, "text: rows have `text`"),
        (r#"{"instruction": "", "output": "", "text": ""}"#, "alpaca: rows have `instruction` and `output`"),
        (r#"{"input_ids": [], "text": ""}"#, "tokens: rows have `input_ids`"),
        (r#"{"a": 1, "b": 2}"#, "`a.jsonl` line 1 matches no known format: found `a`, `b`"),
        (r#"{}"#, "`a.jsonl` line 1 matches no known format: found no fields"),
        (r#""words""#, "`a.jsonl` line 1 is a string, not an object with named fields"),
        ("", "no rows"),
    ] {
        assert_eq!(files.reason("a.jsonl", row), reason);
    }
    assert_eq!(files.reason("a.txt", "words"), "text: a `.txt` or `.md` file is a document");
    assert_eq!(files.reason("a.csv", "text,id\na,b\n"), "text: rows have `text`");
    let unknown = |name: &str, text: &str| {
        recognize(&[files.write(name, text)], DataFormat::Auto, &[], OnBadRow::Error)
            .unwrap_err()
            .hint()
            .unwrap()
    };
    assert!(unknown("a.jsonl", r#"{"prompt": 1, "chosen": 2}"#).starts_with("pairs have both `chosen`"));
    assert!(unknown("a.jsonl", r#"{"question": 1}"#).starts_with("the formats are alpaca (`instruction`"));
    let hint = unknown("a.csv", "id,frage,antwort\n1,a,b\n");
    assert!(
        hint.ends_with(
            "; `data.columns = { prompt = \"frage\", completion = \"antwort\" }` reads `frage` as prompt and \
             `antwort` as completion, and `data.template = \"model\"` makes turns of them in the model's chat template"
        ),
        "{hint}"
    );
    let hint = unknown("b.csv", "id,body\n1,a\n");
    assert!(hint.ends_with("; `data.columns = { text = \"body\" }` reads `body` as text"), "{hint}");
}

#[test]
fn the_format_that_the_recipe_names_is_not_looked_for() {
    let gone = [PathBuf::from("gone.jsonl")];
    let recognized = recognize(&gone, DataFormat::PromptCompletion, &[], OnBadRow::Error).unwrap();
    assert_eq!(recognized.format, RowFormat::PromptCompletion);
    assert_eq!(recognized.reason, "prompt-completion: set by `data.format`");
    assert!(
        recognize(&gone, DataFormat::Auto, &[], OnBadRow::Error)
            .unwrap_err()
            .to_string()
            .starts_with("cannot read `gone.jsonl`")
    );
}

#[test]
fn files_have_to_agree() {
    let files = Files::new();
    let alpaca = files.write("a.jsonl", r#"{"instruction": "", "output": ""}"#);
    let empty = files.write("b.jsonl", "\n");
    let other_alpaca = files.write("c.json", r#"[{"instruction": "", "response": ""}]"#);
    let chat = files.write("d.json", r#"[{"messages": []}]"#);
    let recognized =
        recognize(&[empty, alpaca.clone(), other_alpaca], DataFormat::Auto, &[], OnBadRow::Error).unwrap();
    assert_eq!(recognized.format, RowFormat::Alpaca);
    assert_eq!(
        files.shown(recognize(&[alpaca, chat], DataFormat::Auto, &[], OnBadRow::Error).unwrap_err()),
        "`a.jsonl` looks like alpaca (rows have `instruction` and `output`), \
         `d.json` like chat (rows have `messages`)"
    );
}

#[test]
fn alpaca_rows() {
    let row = json!({"instruction": "do", "input": "", "output": "done", "answer": "x"});
    let read = example(RowFormat::Alpaca, row).unwrap();
    assert_eq!(
        read.example,
        Example::Alpaca {
            before: vec![],
            instruction: "do".to_owned(),
            input: None,
            output: "done".to_owned()
        }
    );
    assert_eq!(Json::Object(read.fields), json!({"answer": "x"}));
    let row = json!({"instruction": "do", "context": "this", "response": "done"});
    let read = example(RowFormat::Alpaca, row).unwrap();
    assert_eq!(
        read.example,
        Example::Alpaca {
            before: vec![],
            instruction: "do".to_owned(),
            input: Some("this".to_owned()),
            output: "done".to_owned()
        }
    );
    assert!(read.fields.is_empty());
    let row = json!({"instruction": "do", "output": "done", "system": "", "history": null});
    assert!(example(RowFormat::Alpaca, row).unwrap().fields.is_empty());
    for (row, expected) in [
        (json!({"instruction": "a"}), "`output` is missing, found no fields"),
        (json!({"output": "a", "id": 1}), "`instruction` is missing, found `output`, `id`"),
        (json!({"instruction": "a", "output": " \n"}), "`output` is empty"),
        (json!({"instruction": "a", "response": ""}), "`response` is empty"),
        (json!({"instruction": "", "input": null, "output": "a"}), "`instruction` is empty"),
        (json!({"instruction": "a", "output": 5}), "`output` is a number, expected a string"),
        (json!({"instruction": null, "output": "a"}), "`instruction` is null, expected a string"),
        (json!({"instruction": "a", "input": [1], "output": "a"}), "`input` is a list, expected a string"),
        (json!({"instruction": "a", "text": "b"}), "`output` is missing, found `text`"),
        (
            json!({"instruction": "a", "output": "b", "system": ["c"]}),
            "`system` is a list, expected a string",
        ),
        (
            json!({"instruction": "a", "output": "b", "history": "earlier"}),
            "`history` is a string, expected a list of pairs",
        ),
        (
            json!({"instruction": "a", "output": "b", "history": [["c", "d"], ["e"]]}),
            "`history[1]` is a list, expected a pair of an instruction and its answer, both strings",
        ),
    ] {
        assert_eq!(said(RowFormat::Alpaca, row), format!("`a.jsonl` line 7: {expected}"));
    }
    assert_eq!(
        hint(RowFormat::Alpaca, json!({"instruction": "a", "output": ""})),
        "remove the row, or fill the field"
    );
    assert!(hint(RowFormat::Alpaca, json!({"instruction": "a"})).starts_with("an alpaca row is `{"));
    assert_eq!(
        hint(RowFormat::Alpaca, json!({"instruction": "a", "output": 5})),
        "write the value as a string, in quotes"
    );
    assert_eq!(
        said(RowFormat::Alpaca, json!([1])),
        "`a.jsonl` line 7 is a list, not an object with named fields"
    );
}

#[test]
fn chat_rows() {
    let (conversation, fields) = chat(json!({
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": ", you"}], "name": null},
            {"role": "assistant", "content": null, "tool_calls": [{"id": 1, "name": "f"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is 42", "weight": 1},
        ],
        "tools": "[{\"type\": \"function\"}]",
        "chat_template_kwargs": {"enable_thinking": false},
        "id": 9,
    }));
    assert_eq!(
        Json::Array(conversation.messages),
        json!([
            {"role": "system", "content": ""},
            {"role": "user", "content": "Hello, you"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": 1, "name": "f"}]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is 42"},
        ])
    );
    assert!(conversation.silent.is_empty());
    assert_eq!(conversation.prompt_messages, None);
    assert_eq!(conversation.tools, Some(json!([{"type": "function"}])));
    assert_eq!(Json::Object(conversation.more), json!({"enable_thinking": false}));
    assert_eq!(Json::Object(fields), json!({"id": 9}));
    let turns = json!([{"role": "assistant", "content": "x"}]);
    let (conversation, _) = chat(json!({"messages": turns, "tools": null, "chat_template_kwargs": null}));
    assert_eq!((conversation.tools, conversation.more.len()), (None, 0));
}

#[test]
fn sharegpt_rows_get_the_names_that_templates_know() {
    let from = |names: &[&str]| -> Json {
        names.iter().map(|name| json!({"from": name, "value": name})).collect::<Vec<_>>().into()
    };
    let names = [
        "system",
        "human",
        "gpt",
        "user",
        "assistant",
        "chatgpt",
        "model",
        "bing",
        "tool",
        "function",
        "observation",
    ];
    for field in ["conversations", "conversation", "messages"] {
        let (conversation, _) = chat(json!({field: from(&names)}));
        let roles: Vec<&str> =
            conversation.messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
        let expected = [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
            "assistant",
            "assistant",
            "assistant",
            "tool",
            "tool",
            "tool",
        ];
        assert_eq!(roles, expected);
        assert_eq!(conversation.messages[1], json!({"role": "user", "content": "human"}));
    }
    let row = json!({"conversations": from(&["human", "gpt"]), "system": "Be kind."});
    let (conversation, fields) = chat(row);
    assert_eq!(conversation.messages[0], json!({"role": "system", "content": "Be kind."}));
    assert_eq!((conversation.messages.len(), fields.len()), (3, 0));
    let row = json!({"conversations": from(&["human", "bot"])});
    assert_eq!(
        said(RowFormat::Chat, row.clone()),
        "`a.jsonl` line 7: `conversations[1].from` is `bot`, which is not a role"
    );
    assert_eq!(
        hint(RowFormat::Chat, row),
        "the roles are `system`, `developer`, `user` (`human`), \
         `assistant` (`gpt`, `chatgpt`, `model`, `bing`), `tool` (`function`, `observation`) and `ipython`"
    );
}

#[test]
fn mistakes_in_conversations_name_the_message() {
    let user = || json!({"role": "user", "content": "hi"});
    for (messages, expected) in [
        (json!([]), "`messages` is empty"),
        (json!("hi"), "`messages` is a string, expected a list of messages"),
        (json!({"role": "user"}), "`messages` is an object, expected a list of messages"),
        (json!(["hi"]), "`messages[0]` is a string, expected a message"),
        (json!([user()]), "`messages` has no assistant message, so there is nothing to learn"),
        (
            json!([user(), {"role": "asistant", "content": "x"}]),
            "`messages[1].role` is `asistant`, which is not a role",
        ),
        (json!([{"role": 1, "content": "x"}]), "`messages[0].role` is a number, expected a string"),
        (json!([user(), {"role": "assistant", "content": " "}]), "`messages[1].content` is empty"),
        (
            json!([user(), {"role": "assistant", "content": "x", "weight": 0.5}]),
            "`messages[1].weight` is a number, expected 0 or 1",
        ),
        (
            json!([user(), {"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}]),
            "`messages[1].tool_calls[0]` is an object, expected a call with a function's `name`",
        ),
        (json!([user(), {"from": "gpt", "value": ""}]), "`messages[1].value` is empty"),
        (
            json!([user(), {"role": "assistant", "content": null}]),
            "`messages[1].content` is null, expected a string or a list of text parts",
        ),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            "`messages[0].content[0]` is a part of type `image_url`, only text is supported",
        ),
        (
            json!([{"role": "user", "content": [5]}]),
            "`messages[0].content[0]` is a number, expected a part `{\"type\": \"text\", \"text\": ...}`",
        ),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": 1}]}]),
            "`messages[0].content[0].text` is a number, expected a string",
        ),
    ] {
        assert_eq!(
            said(RowFormat::Chat, json!({"messages": messages})),
            format!("`a.jsonl` line 7: {expected}")
        );
    }
    for (message, expected) in [
        (json!({"content": "x"}), "`role` (or `from`) is missing, found `content`"),
        (json!({"role": "user", "text": "x"}), "`content` is missing, found `text`"),
        (json!({"from": "human"}), "`value` is missing, found no fields"),
        (json!({"role": "assistant", "tool_calls": []}), "`content` is missing, found `tool_calls`"),
    ] {
        let row = json!({"messages": [message]});
        assert_eq!(said(RowFormat::Chat, row), format!("`a.jsonl` line 7, `messages[0]`: {expected}"));
    }
    let answer = json!([{"role": "assistant", "content": "x"}]);
    assert_eq!(
        said(RowFormat::Chat, json!({"messages": answer, "tools": {"a": 1}})),
        "`a.jsonl` line 7: `tools` is an object, expected a list of tools"
    );
    assert_eq!(
        said(RowFormat::Chat, json!({"messages": answer, "chat_template_kwargs": "yes"})),
        "`a.jsonl` line 7: `chat_template_kwargs` is a string, expected an object"
    );
    assert!(
        said(RowFormat::Chat, json!({"messages": answer, "tools": "[{"}))
            .contains("`tools` is not JSON: EOF")
    );
    let python = json!({"messages": "[{'role': 'user', 'content': 'hi'}]"});
    assert!(
        said(RowFormat::Chat, python.clone())
            .starts_with("`a.jsonl` line 7: `messages` is not JSON: key must be")
    );
    assert_eq!(hint(RowFormat::Chat, python), "this is a Python literal: write the column with `json.dumps`");
}

#[test]
fn prompt_completion_rows() {
    let row = json!({"prompt": "a", "completion": "b", "id": 1});
    let read = example(RowFormat::PromptCompletion, row).unwrap();
    let (prompt, completion) = ("a".to_owned(), "b".to_owned());
    assert_eq!(read.example, Example::PromptCompletion { prompt, completion });
    assert_eq!(read.fields.len(), 1);
    let (user, assistant) =
        (json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"}));
    let row = json!({"prompt": [assistant, user], "response": [assistant], "tools": [1]});
    let read = example(RowFormat::PromptCompletion, row).unwrap();
    let messages = vec![assistant.clone(), user.clone(), assistant.clone()];
    let conversation = Conversation {
        messages,
        parts: vec![],
        silent: vec![],
        prompt_messages: Some(2),
        tools: Some(json!([1])),
        more: Map::new(),
    };
    assert_eq!(read.example, Example::Chat(conversation));
    for (row, expected) in [
        (json!({"prompt": "a", "completion": ""}), "`completion` is empty"),
        (json!({"prompt": " \n", "completion": "b"}), "`prompt` is empty"),
        (json!({"question": "", "answer": "b"}), "`question` is empty"),
        (json!({"prompt": "a"}), "`completion` is missing, found no fields"),
        (json!({"completion": "a"}), "`prompt` is missing, found `completion`"),
        (
            json!({"prompt": "a", "completion": [assistant]}),
            "`completion` is a list, expected a string, as `prompt` is",
        ),
        (
            json!({"prompt": [user], "completion": "b"}),
            "`completion` is a string, expected a list of messages, as `prompt` is",
        ),
        (
            json!({"prompt": 1, "completion": "b"}),
            "`prompt` is a number, expected a string or a list of messages",
        ),
        (json!({"prompt": [], "completion": [assistant]}), "`prompt` is empty"),
        (
            json!({"prompt": [user], "completion": [user]}),
            "`completion` has no assistant message, so there is nothing to learn",
        ),
    ] {
        assert_eq!(said(RowFormat::PromptCompletion, row), format!("`a.jsonl` line 7: {expected}"));
    }
}

/// The clips of such a row are its prompt.
#[test]
fn the_prompt_of_a_row_with_audio_may_be_empty() {
    let row = json!({"audio": "a.wav", "prompt": "", "completion": "b"});
    assert!(example(RowFormat::PromptCompletion, row).is_ok());
}

#[test]
fn text_and_tokens_rows() {
    let read = example(RowFormat::Text, json!({"text": "a", "id": 1})).unwrap();
    assert_eq!((read.example, read.fields.len()), (Example::Text("a".to_owned()), 1));
    assert_eq!(said(RowFormat::Text, json!({"text": ""})), "`a.jsonl` line 7: `text` is empty");
    assert_eq!(
        said(RowFormat::Text, json!({"texts": ""})),
        "`a.jsonl` line 7: `text` is missing, found `texts`"
    );
    let read = example(RowFormat::Tokens, json!({"input_ids": [1, 2], "labels": "[-100, 2]"})).unwrap();
    assert_eq!(read.example, Example::Tokens { ids: vec![1, 2], labels: Some(vec![-100, 2]) });
    let read = example(RowFormat::Tokens, json!({"input_ids": [], "labels": null})).unwrap();
    assert_eq!(read.example, Example::Tokens { ids: vec![], labels: None });
    for (row, expected) in [
        (json!({"input_ids": [1, 2.5]}), "`input_ids[1]` is a number, expected a whole number"),
        (json!({"input_ids": [1], "labels": ["2"]}), "`labels[0]` is a string, expected a whole number"),
        (json!({"input_ids": 1}), "`input_ids` is a number, expected a list of whole numbers"),
        (json!({"labels": [1]}), "`input_ids` is missing, found `labels`"),
    ] {
        assert_eq!(said(RowFormat::Tokens, row), format!("`a.jsonl` line 7: {expected}"));
    }
}

#[test]
fn rows_of_another_format_are_reported_with_the_row_that_set_it() {
    let files = Files::new();
    let rows = "{\"instruction\": \"a\", \"output\": \"b\"}\n\n{\"messages\": []}\n";
    let path = files.write("a.jsonl", rows);
    assert_eq!(
        files.examples(&[path], RowFormat::Alpaca).unwrap_err(),
        "`a.jsonl` line 3 looks like chat, line 1 like alpaca"
    );
    let path = files.write("b.json", r#"[{"text": "a"}]"#);
    assert_eq!(
        files.examples(&[path], RowFormat::Tokens).unwrap_err(),
        "`b.json` row 1 looks like text, but is read as tokens"
    );
}

#[test]
fn examples_come_in_the_order_of_the_files() {
    let files = Files::new();
    let table = "id,messages\n1,\"[{\"\"role\"\": \"\"assistant\"\", \"\"content\"\": \"\"a, b\"\"}]\"\n";
    let paths = [files.write("b.csv", table), fixture("chat_zstd.parquet"), fixture("chat_snappy.parquet")];
    assert_eq!(recognize(&paths, DataFormat::Auto, &[], OnBadRow::Error).unwrap().format, RowFormat::Chat);
    let examples = files.examples(&paths, RowFormat::Chat).unwrap();
    let places: Vec<&str> = examples.iter().map(|(place, _)| place.as_str()).collect();
    assert_eq!(places, ["line 2", "row 1", "row 2", "row 1", "row 2"]);
    let Example::Chat(first) = &examples[0].1 else { panic!() };
    assert_eq!(first.messages, [json!({"role": "assistant", "content": "a, b"})]);
    // The nulls that a table fills in are gone.
    let Example::Chat(second) = &examples[1].1 else { panic!() };
    assert_eq!(second.messages[2], json!({"role": "assistant", "content": "4"}));
    assert_eq!(examples[1].1, examples[3].1);
}

#[test]
fn a_parquet_file_of_another_schema_is_reported_with_its_columns() {
    let error = example_of(
        RowFormat::Chat,
        RowPlace { file: Path::new("t.parquet"), unit: RowUnit::Row, number: 1 },
        json!({"question": "a", "answers": ["b"]}),
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "`t.parquet` row 1: `messages` is missing, found `question`, `answers`"
    );
    let files = Files::new();
    assert_eq!(
        files.examples(&[fixture("tokens_lz4.parquet")], RowFormat::Tokens).unwrap()[1],
        ("row 2".to_owned(), Example::Tokens { ids: vec![4, 5, 6, 7], labels: None })
    );
}

#[test]
fn the_callers_error_ends_the_reading() {
    let files = Files::new();
    let path = files.write("a.jsonl", &"{\"text\": \"one\"}\n".repeat(3));
    let mut seen = 0;
    let files = [path];
    let reading = RowReading { source: (&files).into(), format: RowFormat::Text, columns: &[], limit: 0 };
    let result = read_examples(reading, |place, _| {
        seen += 1;
        match place.number {
            2 => anyhow::bail!("enough"),
            _ => Ok(()),
        }
    });
    assert_eq!((result.unwrap_err().to_string().as_str(), seen), ("enough", 2));
}

fn columns<const N: usize>(pairs: [(ColumnRole, &str); N]) -> Vec<(ColumnRole, String)> {
    pairs.map(|(role, column)| (role, column.to_owned())).to_vec()
}

fn pair(prompt: &str, completion: &str) -> Example {
    Example::PromptCompletion { prompt: prompt.to_owned(), completion: completion.to_owned() }
}

#[test]
fn columns_are_renamed_to_their_roles() {
    use ColumnRole::{Completion, Prompt};
    let files = Files::new();
    let text = "{\"messages\": 1, \"q\": \"a\", \"prompt\": \"b\", \"completion\": \"c\"}\n";
    let given = columns([(Prompt, "q")]);
    assert_eq!(
        files.reason_with(&given, "a.jsonl", text),
        "prompt-completion: `data.columns` takes `q` as `prompt`"
    );
    let paths = [files.write("a.jsonl", text)];
    let read = |columns: &Columns, limit| {
        let reading =
            RowReading { source: (&paths).into(), format: RowFormat::PromptCompletion, columns, limit };
        files.examples_of(reading)
    };
    assert_eq!(read(&given, 0).unwrap()[0].1, pair("a", "c"));
    // Both at once, not one after the other.
    let swapped = columns([(Prompt, "completion"), (Completion, "prompt")]);
    assert_eq!(read(&swapped, 0).unwrap()[0].1, pair("c", "b"));
    let unknown = columns([(Prompt, "q"), (Completion, "answr")]);
    assert_eq!(read(&unknown, 0).unwrap_err(), "`a.jsonl` line 1: `completion` is missing, found `messages`");
}

#[test]
fn a_column_that_no_row_has_is_named_after_all_rows() {
    use ColumnRole::{Completion, Prompt, System};
    let files = Files::new();
    let paths = [files.write("a.jsonl", "{\"q\": \"a\", \"answer\": \"b\"}\n".repeat(2).as_str())];
    let reading = |columns| RowReading {
        source: (&paths).into(),
        format: RowFormat::PromptCompletion,
        columns,
        limit: 0,
    };
    let mut bad = 0;
    let given = columns([(Prompt, "q"), (Completion, "answr")]);
    let read = read_examples(reading(&given), |_, row| {
        bad += usize::from(row.is_err());
        Ok::<(), FormatError>(())
    });
    let error = read.unwrap_err();
    assert_eq!(bad, 2);
    assert_eq!(error.to_string(), "`data.columns`: no row has the column `answr`, found `q`, `answer`");
    assert_eq!(error.hint().unwrap(), "did you mean `completion = \"answer\"`?");
    let given = columns([(Prompt, "q"), (Completion, "answer"), (System, "persona")]);
    let error = files.examples_of(reading(&given)).unwrap_err();
    assert!(error.contains("no row has the column `persona`"), "{error}");
    let mixed = columns([(Prompt, "q"), (ColumnRole::Text, "answer")]);
    let said = files.reason_with(&mixed, "b.jsonl", "{}");
    assert_eq!(said, "`data.columns`: `prompt` and `text` are columns of different formats");
}

#[test]
fn a_limit_is_of_all_files_together() {
    let files = Files::new();
    let paths = ["a.jsonl", "b.jsonl"].map(|name| files.write(name, &"{\"text\": \"a\"}\n".repeat(2)));
    let read = |limit| {
        let reading = RowReading { source: (&paths).into(), format: RowFormat::Text, columns: &[], limit };
        files.examples_of(reading).unwrap().len()
    };
    assert_eq!([0, 1, 2, 3, 9].map(read), [4, 1, 2, 3, 4]);
}

#[test]
fn the_first_row_that_is_an_object_says_the_format() {
    let files = Files::new();
    let path = [files.write("a.jsonl", "nonsense\n7\n{\"a\": 1}\n{\"text\": \"b\"}\n")];
    let found = |on_bad_row| recognize(&path, DataFormat::Auto, &[], on_bad_row);
    let error = files.shown(found(OnBadRow::Error).unwrap_err());
    assert_eq!(error, "`a.jsonl` line 3 matches no known format: found `a`");
    assert_eq!(found(OnBadRow::Skip).unwrap().format, RowFormat::Text);
}
