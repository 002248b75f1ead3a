//! Rows of every format, template and loss against what TRL recorded (`fixtures/sft`), and what it has no word for.

use super::*;
use crate::format::{RowFormat, example_of};
use crate::source::{RowPlace, RowUnit};
use crate::template::TemplateChoice;
use crate::template::choose_template;
use serde_json::{Map, json};
use smidgen_ir::words::ClosedWord;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/sft").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_folder(&fixture(name)).unwrap()
}

fn template_of(word: &str) -> TemplateChoice {
    match word {
        "auto" => TemplateChoice::Auto,
        name => TemplateChoice::Named(name.to_owned()),
    }
}

fn format_of(word: &str) -> RowFormat {
    match word {
        "alpaca" => RowFormat::Alpaca,
        "chat" => RowFormat::Chat,
        "prompt-completion" => RowFormat::PromptCompletion,
        "text" => RowFormat::Text,
        other => panic!("`{other}` is no format of the record"),
    }
}

fn example(format: RowFormat, row: &Json) -> Example {
    let place = RowPlace { file: Path::new("rows.jsonl"), unit: RowUnit::Line, number: 1 };
    example_of(format, place, row.clone()).unwrap().example
}

fn labels(row: &EncodedRow) -> Vec<i64> {
    let supervised = |t: usize| row.spans.iter().any(|span| span.contains(&t));
    (0..row.ids.len()).map(|t| if supervised(t) { row.ids[t] } else { -100 }).collect()
}

fn numbers(json: &Json) -> Vec<i64> {
    json.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

#[test]
fn ids_and_labels_are_those_of_trl() {
    let record: Json = serde_json::from_slice(&std::fs::read(fixture("rows.json")).unwrap()).unwrap();
    let mut seen = 0;
    for (name, cases) in record.as_object().unwrap() {
        let tokenizer = tokenizer(name);
        for case in cases.as_array().unwrap() {
            let word = |key: &str| case[key].as_str().unwrap();
            let what = format!("{name} {} {} {}", word("format"), word("template"), word("loss_on"));
            let format = format_of(word("format"));
            let template = choose_template(&template_of(word("template")), format, &tokenizer).unwrap();
            let loss_on = LossOn::from_word(word("loss_on")).unwrap();
            let encoder = RowEncoder::new(&tokenizer, template.as_ref(), loss_on);
            let expected = case["expected"].as_array().unwrap();
            let rows = case["rows"].as_array().unwrap();
            assert_eq!(expected.len(), rows.len(), "{what}");
            for (row, expected) in rows.iter().zip(expected) {
                let encoded = encoder.encode(&example(format, row)).unwrap();
                assert_eq!(encoded.ids, numbers(&expected["ids"]), "{what}: ids of {row}");
                assert_eq!(labels(&encoded), numbers(&expected["labels"]), "{what}: labels of {row}");
                assert_eq!(encoded.turn_end, TurnEnd::Supervised, "{what}: {row}");
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 269);
}

/// The template of this tokenizer has no generation blocks.
#[test]
fn turns_without_generation_blocks_are_found_by_rendering() {
    let tokenizer = tokenizer("byte_level");
    let row = json!({"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
    ]});
    let example = example(RowFormat::Chat, &row);
    let supervised = |template: &str, loss_on: LossOn| {
        let template = choose_template(&template_of(template), RowFormat::Chat, &tokenizer).unwrap();
        let encoded = RowEncoder::new(&tokenizer, template.as_ref(), loss_on).encode(&example).unwrap();
        let texts = encoded.spans.iter().map(|span| {
            let ids: Vec<u32> = encoded.ids[span.clone()].iter().map(|&id| id as u32).collect();
            tokenizer.decode(&ids, false).unwrap()
        });
        texts.collect::<Vec<String>>()
    };
    assert_eq!(supervised("auto", LossOn::Assistant), ["Hello<|im_end|>\n", "2<|im_end|>\n"]);
    assert_eq!(supervised("chatml", LossOn::Assistant), ["\nHello<|im_end|>\n", "\n2<|im_end|>\n"]);
    assert_eq!(supervised("auto", LossOn::Completion), ["2<|im_end|>\n"]);
}

fn with_template(source: &str) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    tokenizer("byte_level").save(folder.path()).unwrap();
    std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

fn chat_error(source: &str, loss_on: LossOn, row: Json) -> EncodeError {
    let tokenizer = with_template(source);
    let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
    RowEncoder::new(&tokenizer, template.as_ref(), loss_on)
        .encode(&example(RowFormat::Chat, &row))
        .unwrap_err()
}

fn two_turns() -> Json {
    json!({"messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]})
}

#[test]
fn templates_that_rewrite_earlier_turns_are_refused() {
    // As templates do that take the reasoning out of all answers but the last.
    let source = "{% for m in messages %}{{ m.role }}:{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}\n{% endfor %}";
    let error = chat_error(source, LossOn::Assistant, two_turns());
    assert_eq!(
        error.to_string(),
        "message 2: the template renders the conversation up to here differently than the whole one, \
         so the assistant's turns cannot be found"
    );
    assert_eq!(
        error.hint().unwrap(),
        "use a template with `{% generation %}` blocks: a built-in one, such as `data.template = \"chatml\"`, \
         or a `.jinja` file; or `data.loss_on = \"completion\"`"
    );
}

#[test]
fn what_a_template_refuses_is_said_in_its_words() {
    let error = chat_error("{{ raise_exception('only haiku') }}", LossOn::All, two_turns());
    assert_eq!(error.to_string(), "the chat template refuses these messages: only haiku");
}

#[test]
fn the_end_of_a_turn_is_noticed() {
    let end = |source: &str| {
        let tokenizer = with_template(source);
        let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
        let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::Assistant);
        encoder.encode(&example(RowFormat::Chat, &two_turns())).unwrap().turn_end
    };
    let turn = |inside: &str| {
        format!(
            "{{% for m in messages %}}{{% if m.role == 'assistant' %}}{inside}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
        )
    };
    let supervised = turn("{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}");
    assert_eq!(end(&supervised), TurnEnd::Supervised);
    let behind = turn("{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n");
    assert_eq!(end(&behind), TurnEnd::NotSupervised);
    assert_eq!(end(&turn("{% generation %}{{ m.content }}{% endgeneration %}")), TurnEnd::Missing);
}

#[test]
fn conversations_without_an_answer_teach_nothing() {
    let tokenizer = tokenizer("byte_level");
    let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
    let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::Completion);
    let example = Example::Chat(Conversation {
        messages: vec![json!({"role": "user", "content": "a"})],
        prompt_messages: None,
        tools: None,
        more: Map::new(),
    });
    let row = encoder.encode(&example).unwrap();
    assert_eq!((row.spans.len(), row.ids.is_empty()), (0, false));
}

#[test]
fn a_doubled_beginning_is_noticed() {
    let tokenizer = tokenizer("sentence_piece");
    let encoder = RowEncoder::new(&tokenizer, None, LossOn::All);
    assert!(encoder.encode(&Example::Text("<s>hello".into())).unwrap().bos_doubled);
    assert!(!encoder.encode(&Example::Text("hello".into())).unwrap().bos_doubled);
}

#[test]
fn spans_of_bytes_become_tokens() {
    let ranges = [0..0, 0..3, 3..5, 5..5, 5..9, 9..10];
    let check = |turns: &[Range<usize>], expected: &[Range<usize>]| {
        assert_eq!(tokens_of_turns(&ranges, turns), expected, "{turns:?}");
    };
    check(&[0..3], &[1..2]);
    check(&[2..4], &[1..3]);
    check(&[3..9, 9..10], &[2..6]);
    // Both touch the second token, which the first keeps.
    check(&[1..2, 2..4], &[1..3]);
    check(&[4..4], &[]);
    check(&[20..30], &[]);
    check(&[0..3, 9..10], &[1..2, 5..6]);
}
