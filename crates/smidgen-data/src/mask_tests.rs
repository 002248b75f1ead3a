//! Rows of every format, template and loss against what TRL recorded (`fixtures/sft`), and what TRL does not have.

use super::*;
use crate::format::{RowFormat, example_of};
use crate::source::{RowPlace, RowUnit};
use crate::template::TemplateChoice;
use crate::template::choose_template;
use serde_json::{Map, Value as Json, json};
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
        "model" => TemplateChoice::Model,
        "none" => TemplateChoice::Plain,
        name => TemplateChoice::Named(name.to_owned()),
    }
}

fn format_of(word: &str) -> RowFormat {
    match word {
        "alpaca" => RowFormat::Alpaca,
        "chat" => RowFormat::Chat,
        "prompt-completion" => RowFormat::PromptCompletion,
        "text" => RowFormat::Text,
        other => panic!("`{other}` is not a format of the record"),
    }
}

fn example(format: RowFormat, row: &Json) -> Example {
    let place = RowPlace { file: Path::new("rows.jsonl"), unit: RowUnit::Line, number: 1 };
    example_of(format, place, row.clone()).unwrap().example
}

fn one(mut samples: Vec<EncodedSample>) -> EncodedSample {
    assert_eq!(samples.len(), 1);
    samples.remove(0)
}

fn labels(row: &EncodedSample) -> Vec<i64> {
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
                // Such a row is refused when it is read; TRL trains its completion.
                let example = if row["prompt"] == "" {
                    let completion = row["completion"].as_str().unwrap().to_owned();
                    Example::PromptCompletion { prompt: String::new(), completion }
                } else {
                    example(format, row)
                };
                let encoded = one(encoder.encode(&example).unwrap());
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
        let encoder = RowEncoder::new(&tokenizer, template.as_ref(), loss_on);
        let encoded = one(encoder.encode(&example).unwrap());
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

/// The text of a pair, with what is supervised in brackets.
fn pair_text(template: &str, loss_on: LossOn) -> String {
    let tokenizer = tokenizer("byte_level");
    let pair = example(RowFormat::PromptCompletion, &json!({"question": "2+2?", "answer": "4"}));
    let template = choose_template(&template_of(template), RowFormat::PromptCompletion, &tokenizer).unwrap();
    let encoded = one(RowEncoder::new(&tokenizer, template.as_ref(), loss_on).encode(&pair).unwrap());
    let text = |ids: &[i64]| {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        tokenizer.decode(&ids, false).unwrap()
    };
    let [span] = &encoded.spans[..] else { panic!("one span") };
    format!("{}[{}]", text(&encoded.ids[..span.start]), text(&encoded.ids[span.clone()]))
}

#[test]
fn a_template_that_is_asked_for_renders_pairs_of_strings() {
    let turns = "<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>\n]";
    assert_eq!(pair_text("model", LossOn::Auto), turns);
    assert_eq!(pair_text("model", LossOn::Completion), turns);
    assert!(pair_text("chatml", LossOn::Auto).ends_with("assistant\n[4<|im_end|>\n]"));
    let alpaca = pair_text("alpaca", LossOn::Auto);
    assert!(alpaca.contains("### Instruction:\n2+2?\n\n### Response:\n[4"), "{alpaca}");
    for plain in ["auto", "none"] {
        assert_eq!(pair_text(plain, LossOn::Auto), "2+2?[4<|im_end|>]", "{plain}");
    }
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

/// The texts of all samples, with supervised parts in brackets.
fn marked(tokenizer: &Tokenizer, template: &str, loss_on: LossOn, example: &Example) -> Vec<String> {
    let template = choose_template(&template_of(template), RowFormat::Chat, tokenizer).unwrap();
    let samples = RowEncoder::new(tokenizer, template.as_ref(), loss_on).encode(example).unwrap();
    let text_of = |sample: &EncodedSample| {
        let mut text = String::new();
        let decode = |range: Range<usize>| {
            let ids: Vec<u32> = sample.ids[range].iter().map(|&id| id as u32).collect();
            tokenizer.decode(&ids, false).unwrap()
        };
        let mut at = 0;
        for span in &sample.spans {
            text += &format!("{}[{}]", decode(at..span.start), decode(span.clone()));
            at = span.end;
        }
        text + &decode(at..sample.ids.len())
    };
    samples.iter().map(text_of).collect()
}

/// Like templates that remove the reasoning from all answers except those after the last question.
const FORGETFUL: &str = "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}\
    {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role[0] }}:\
    {% if m.reasoning_content and loop.index0 > ns.last %}({{ m.reasoning_content }}){% endif %}\
    {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}";

fn thinking() -> Json {
    json!({"messages": [
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "reasoning_content": "x"},
        {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"}, {"role": "assistant", "content": "6", "reasoning_content": "z"},
    ]})
}

#[test]
fn a_turn_that_is_rewritten_later_is_a_sample_of_its_own() {
    let tokenizer = with_template(FORGETFUL);
    let example = example(RowFormat::Chat, &thinking());
    for loss_on in [LossOn::Auto, LossOn::Assistant] {
        let samples = marked(&tokenizer, "auto", loss_on, &example);
        assert_eq!(
            samples,
            [
                "u:1<|im_end|>a:[(x)2<|im_end|>]",
                "u:1<|im_end|>a:2<|im_end|>u:3<|im_end|>a:[4<|im_end|>]u:5<|im_end|>a:[(z)6<|im_end|>]",
            ]
        );
    }
    let last = "u:1<|im_end|>a:2<|im_end|>u:3<|im_end|>a:4<|im_end|>u:5<|im_end|>a:[(z)6<|im_end|>]";
    assert_eq!(marked(&tokenizer, "auto", LossOn::Completion, &example), [last]);
}

/// Such as a prompt that opens the reasoning of a turn that has none.
#[test]
fn a_turn_that_does_not_begin_with_its_prompt_is_what_differs_from_it() {
    let source =
        FORGETFUL.replace("{% if add_generation_prompt %}a:", "{% if add_generation_prompt %}a:(think)");
    let samples =
        marked(&with_template(&source), "auto", LossOn::Auto, &example(RowFormat::Chat, &two_turns()));
    assert_eq!(
        samples,
        ["u:a<|im_end|>a:[b<|im_end|>]", "u:a<|im_end|>a:b<|im_end|>u:c<|im_end|>a:[d<|im_end|>]"]
    );
}

#[test]
fn what_is_supervised_by_default() {
    let tokenizer = tokenizer("byte_level");
    let with = |template: &str, format: RowFormat, row: Json| {
        marked(&tokenizer, template, LossOn::Auto, &example(format, &row)).concat()
    };
    let of = |format: RowFormat, row: Json| with("llama3", format, row);
    let chat = of(RowFormat::Chat, two_turns());
    assert!(chat.contains("[b<|eot_id|>]") && chat.contains("[d<|eot_id|>]"), "{chat}");
    assert_eq!(of(RowFormat::Text, json!({"text": "one"})), "[one<|im_end|>]");
    let pair = json!({"prompt": "a b", "completion": " c"});
    assert_eq!(with("auto", RowFormat::PromptCompletion, pair), "a b[ c<|im_end|>]");
    let turns = &two_turns()["messages"];
    let pair = json!({"prompt": [turns[0], turns[1], turns[2]], "completion": [turns[3]]});
    let chat = of(RowFormat::PromptCompletion, pair);
    assert!(chat.matches(']').count() == 1 && chat.ends_with("d<|eot_id|>]"), "{chat}");
}

/// The supervised text, and the rest of the text.
fn split(tokenizer: &Tokenizer, template: &str, loss_on: LossOn, row: &Json) -> (String, String) {
    let template = choose_template(&template_of(template), RowFormat::Chat, tokenizer).unwrap();
    let encoder = RowEncoder::new(tokenizer, template.as_ref(), loss_on);
    let sample = one(encoder.encode(&example(RowFormat::Chat, row)).unwrap());
    let text = |is_wanted: bool| {
        let has_loss = |t: &usize| sample.spans.iter().any(|span| span.contains(t));
        let positions = (0..sample.ids.len()).filter(|t| has_loss(t) == is_wanted);
        let ids: Vec<u32> = positions.map(|t| sample.ids[t] as u32).collect();
        tokenizer.decode(&ids, false).unwrap()
    };
    (text(true), text(false))
}

#[test]
fn an_answer_of_weight_0_carries_no_loss() {
    let tokenizer = tokenizer("byte_level");
    let rows = |silent: usize| {
        let mut row = two_turns();
        row["messages"][1]["content"] = json!("QQ");
        row["messages"][3]["content"] = json!("ZZ");
        row["messages"][silent]["weight"] = json!(0);
        row["messages"][4 - silent]["weight"] = json!(1);
        row
    };
    let mut row = rows(1);
    for template in ["auto", "chatml", "llama3", "phi3", "phi4-mini", "gemma", "mistral", "zephyr"] {
        for loss_on in [LossOn::Auto, LossOn::All] {
            let (heard, rest) = split(&tokenizer, template, loss_on, &row);
            assert!(heard.contains("ZZ") && !heard.contains("QQ"), "{template}: {heard}");
            assert!(rest.contains("QQ") && !rest.contains("ZZ"), "{template}: {rest}");
        }
        let (heard, rest) = split(&tokenizer, template, LossOn::Auto, &rows(3));
        assert!(heard.contains("QQ") && rest.contains("ZZ"), "{template}: {heard} {rest}");
        // The last answer that counts, and nothing after it.
        let (heard, rest) = split(&tokenizer, template, LossOn::Completion, &rows(3));
        assert!(heard.contains("QQ") && !rest.contains("ZZ"), "{template}: {heard} {rest}");
    }
    for message in [1, 3] {
        row["messages"][message]["weight"] = json!(0);
    }
    let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
    let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::Auto);
    let nothing = one(encoder.encode(&example(RowFormat::Chat, &row)).unwrap());
    assert!(nothing.spans.is_empty() && !nothing.ids.is_empty());
    let turns = &row["messages"];
    let pair = json!({"prompt": [turns[0], turns[1], turns[2]], "completion": [turns[3]]});
    let error = encoder.encode(&example(RowFormat::PromptCompletion, &pair)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "message 4 has `weight` 0, but it is a part of a completion, which carries a loss as a whole"
    );
}

#[test]
fn a_weight_in_a_turn_that_is_rewritten_is_refused_where_blocks_mark_turns() {
    let source = FORGETFUL
        .replace("{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}");
    let mut row = thinking();
    row["messages"][1]["weight"] = json!(0);
    let error = chat_error(&source, LossOn::Auto, row);
    assert_eq!(
        error.to_string(),
        "message 2 has `weight` 0, but the chat template renders it differently when others follow, so its tokens \
         cannot be found"
    );
}

#[test]
fn what_a_template_leaves_out_of_an_answer_is_refused_by_name() {
    let call = json!({"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}});
    let rows = |content: Json| {
        json!({"messages": [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "12:00"}, {"role": "assistant", "content": "noon"},
        ]})
    };
    let tokenizer = tokenizer("byte_level");
    let refused = |template: &str, row: Json| {
        let template = choose_template(&template_of(template), RowFormat::Chat, &tokenizer).unwrap();
        let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::Auto);
        let error = encoder.encode(&example(RowFormat::Chat, &row)).unwrap_err();
        (error.to_string(), error.hint().unwrap())
    };
    let (error, hint) = refused("chatml", rows(json!("")));
    assert_eq!(error, "message 2: the chat template does not render `tool_calls`");
    assert_eq!(
        hint,
        "set `data.template` to a template that renders `tool_calls`, write it into `content` as the model should \
         say it, or remove it"
    );
    assert_eq!(refused("chatml", rows(Json::Null)).0, error);
    let failing =
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.no.no }}{% endif %}{% endfor %}";
    let error = chat_error(failing, LossOn::Auto, rows(Json::Null)).to_string();
    assert!(
        error.starts_with("message 2: the chat template fails on a message with `tool_calls`: "),
        "{error}"
    );
    let (error, _) = refused("llama3", thinking());
    assert_eq!(error, "message 2: the chat template does not render `reasoning_content`");
    // A template that renders all fields trains all of them.
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\
        {% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}\
        {% if add_generation_prompt %}assistant: {% endif %}";
    let tokenizer = with_template(source);
    for content in [Json::Null, json!(""), json!([])] {
        let text =
            marked(&tokenizer, "auto", LossOn::Auto, &example(RowFormat::Chat, &rows(content))).concat();
        let called = "assistant: [{\"name\": \"clock\", \"arguments\": {\"zone\": \"UTC\"}}<|im_end|>]";
        assert!(text.contains(called), "{text}");
    }
}

#[test]
fn system_and_history_of_an_alpaca_row_come_before_it() {
    let row = json!({"system": "brief", "history": [["1", "2"], ["3", "4"]], "instruction": "5", "input": "",
        "output": "6"});
    let example = example(RowFormat::Alpaca, &row);
    let tokenizer = with_template(FORGETFUL);
    let before = "s:brief<|im_end|>u:1<|im_end|>a:2<|im_end|>u:3<|im_end|>a:4<|im_end|>u:5<|im_end|>a:";
    assert_eq!(marked(&tokenizer, "auto", LossOn::Auto, &example), [format!("{before}[6<|im_end|>]")]);
    let every = marked(&tokenizer, "auto", LossOn::Assistant, &example).concat();
    assert!(every.contains("a:[2<|im_end|>]") && every.contains("a:[4<|im_end|>]"), "{every}");
    let prompt = choose_template(&template_of("alpaca"), RowFormat::Alpaca, &tokenizer).unwrap();
    let error = RowEncoder::new(&tokenizer, prompt.as_ref(), LossOn::Auto).encode(&example).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the row has `system` or `history`, which the prompt `alpaca` cannot render"
    );
}

/// As torchtune's `alpaca_dataset` writes rows: the sentences of the Alpaca prompt inside the user's turn.
#[test]
fn an_alpaca_prompt_is_the_turn_of_the_user() {
    let row = json!({"instruction": "Add", "input": "1 2", "output": "3"});
    let tokenizer = with_template(FORGETFUL);
    let sentences = crate::template::TextPrompt::Alpaca.render("Add", Some("1 2"));
    let read = example(RowFormat::AlpacaPrompt, &row);
    let turns = format!("u:{sentences}<|im_end|>a:[3<|im_end|>]");
    assert_eq!(marked(&tokenizer, "auto", LossOn::Auto, &read), [turns]);
    for name in ["alpaca", "llm-adapters"] {
        let error = choose_template(&template_of(name), RowFormat::AlpacaPrompt, &tokenizer).unwrap_err();
        let said = format!(
            "`data.template = {name}` is a prompt, and `data.format = alpaca-prompt` has one already"
        );
        assert_eq!(error.to_string(), said);
        assert!(error.hint().unwrap().contains("`data.format = \"alpaca\"`"));
    }
}

#[test]
fn a_conversation_without_end_is_refused() {
    let messages: Vec<Json> = (0..2001).map(|_| json!({"role": "assistant", "content": "a"})).collect();
    let error = chat_error(FORGETFUL, LossOn::Auto, json!({"messages": messages}));
    assert_eq!(error.to_string(), "the conversation has 2001 messages, at most 2000 are supported");
}

#[test]
fn the_error_of_a_template_is_reported() {
    let error = chat_error("{{ raise_exception('only haiku') }}", LossOn::All, two_turns());
    assert_eq!(error.to_string(), "the chat template refuses these messages: only haiku");
}

#[test]
fn the_end_of_a_turn_is_noticed() {
    let end = |source: &str| {
        let tokenizer = with_template(source);
        let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
        let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::Assistant);
        one(encoder.encode(&example(RowFormat::Chat, &two_turns())).unwrap()).turn_end
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
        parts: vec![],
        silent: vec![],
        prompt_messages: None,
        tools: None,
        more: Map::new(),
    });
    let row = one(encoder.encode(&example).unwrap());
    assert_eq!((row.spans.len(), row.ids.is_empty()), (0, false));
}

#[test]
fn a_row_of_too_much_text_is_refused_before_it_is_tokenized() {
    let tokenizer = tokenizer("byte_level");
    let encoder = RowEncoder::new(&tokenizer, None, LossOn::All);
    let error = encoder.encode(&Example::Text("a".repeat(5_000_000))).unwrap_err();
    assert_eq!(error.to_string(), "the row has 5,000,000 bytes of text, at most 4,194,304 are supported");
    assert_eq!(error.hint().unwrap(), "split the row into several");
}

#[test]
fn a_doubled_beginning_is_noticed() {
    let tokenizer = tokenizer("sentence_piece");
    let encoder = RowEncoder::new(&tokenizer, None, LossOn::All);
    assert!(encoder.encode(&Example::Text("<s>hello".into())).unwrap()[0].bos_doubled);
    assert!(!encoder.encode(&Example::Text("hello".into())).unwrap()[0].bos_doubled);
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

/// The text that a template makes of a row.
fn text_with(source: &str, row: Json) -> String {
    let tokenizer = with_template(source);
    marked(&tokenizer, "auto", LossOn::All, &example(RowFormat::Chat, &row)).concat()
}

#[test]
fn contents_in_parts_reach_templates_that_take_lists() {
    let row = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ]});
    let of_lists = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
        {% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}";
    let of_users = "{% for m in messages %}{% if m.role == 'user' %}<{{ m.content[0].text }}|{{ m.content[1].text }}>\
        {% else %}{{ m.content[0].text }}{% endif %}{% endfor %}";
    for (source, expected) in [
        (of_lists, "[<one ><two><three>]"),
        (of_users, "[<one |two>three]"),
        // These print a list, leave it out, or fail on it: they get the texts.
        ("{% for m in messages %}{{ m.content }}/{% endfor %}", "[one two/three/]"),
        (
            "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}/{% endfor %}",
            "[one two/three/]",
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}/{% endif %}{% endfor %}",
            "[one two/three/]",
        ),
        ("{% for m in messages %}{{ m.content + '/' }}{% endfor %}", "[one two/three/]"),
    ] {
        assert_eq!(text_with(source, row.clone()), expected, "{source}");
    }
}

#[test]
fn a_null_content_of_a_tool_call_is_left_out_unless_the_template_reads_it() {
    let row = json!({"messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]});
    let call = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}";
    for (source, expected) in [
        ("{% for m in messages %}{{ 'b' in m.content }}", "[FalseFalsef]"),
        ("{% for m in messages %}{{ m.content | length }}", "[10f]"),
        ("{% for m in messages %}{{ m.content is none }}", "[FalseFalsef]"),
        ("{% for m in messages %}{% if m.content is not none %}{{ '<' + m.content }}{% endif %}", "[<af]"),
        ("{% for m in messages %}{{ '<' + m.content }}", "[<a<f]"),
    ] {
        assert_eq!(text_with(&format!("{source}{call}"), row.clone()), expected, "{source}");
    }
}

#[test]
fn the_text_that_a_template_adds_is_bounded_by_the_tokens_that_are_kept() {
    let tokenizer = with_template("{{ 'a' * 100000 }}{% for m in messages %}{{ m.content }}{% endfor %}");
    let template = choose_template(&TemplateChoice::Auto, RowFormat::Chat, &tokenizer).unwrap();
    let encode = |max_tokens| {
        let encoder = RowEncoder::new(&tokenizer, template.as_ref(), LossOn::All).with_max_tokens(max_tokens);
        encoder.encode(&example(RowFormat::Chat, &two_turns())).map(|samples| samples.len())
    };
    assert_eq!(encode(2048).unwrap(), 1);
    let error = encode(128).unwrap_err().to_string();
    assert!(error.starts_with("the chat template makes 100004 bytes of text of a row of "), "{error}");
}
