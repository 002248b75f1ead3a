//! Tokenizers from GGUF metadata and from folders, compared with records of transformers and tokenizers
//! (`fixtures/tokenizers`), and, if `SMIDGEN_SMOLLM2` names the file, the real SmolLM2-135M-Instruct in Q4_1.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value as Json, json};
use smidgen_formats::gguf::model::GgufModel;
use smidgen_formats::gguf::value::{Array, Metadata, Value};
use smidgen_formats::gguf::write::write_gguf;
use smidgen_formats::gguf::{GgufFile, GgufTensor};
use smidgen_formats::tokenizer::chat_template::{ChatInput, ChatTemplate, ChatTemplateError, Rendered};
use smidgen_formats::tokenizer::from_gguf::from_metadata;
use smidgen_formats::tokenizer::{SpecialIds, Tokenizer, TokenizerError};

fn fixture(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizers").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn metadata_of(fixture: &Json) -> Metadata {
    let mut metadata = Metadata::default();
    for entry in fixture["metadata"].as_array().unwrap() {
        let value = &entry[2];
        let list = || value.as_array().unwrap().iter();
        let value = match entry[1].as_str().unwrap() {
            "string" => Value::String(value.as_str().unwrap().into()),
            "u32" => Value::U32(value.as_u64().unwrap() as u32),
            "strings" => Value::Array(Array::String(list().map(|v| v.as_str().unwrap().into()).collect())),
            "i32s" => Value::Array(Array::I32(list().map(|v| v.as_i64().unwrap() as i32).collect())),
            "f32s" => Value::Array(Array::F32(list().map(|v| v.as_f64().unwrap() as f32).collect())),
            other => panic!("`{other}` is not a kind of this fixture"),
        };
        metadata.insert(entry[0].as_str().unwrap(), value).unwrap();
    }
    metadata
}

fn ids(json: &Json) -> Vec<u32> {
    json.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn texts(json: &Json) -> Vec<&str> {
    json.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// Writes the metadata to a GGUF file and reads the tokenizer from it.
fn through_a_file(metadata: &Metadata) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    write_gguf(&path, metadata, &[], |_, _| Ok(())).unwrap();
    Tokenizer::from_gguf(&GgufFile::open(&path).unwrap()).unwrap()
}

/// Saves the tokenizer as a folder and loads it again.
fn through_a_folder(tokenizer: &Tokenizer) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    tokenizer.save(folder.path()).unwrap();
    let again = Tokenizer::from_folder(folder.path()).unwrap();
    assert_eq!(again.special_ids(), tokenizer.special_ids());
    assert_eq!(again.template_source(), tokenizer.template_source());
    assert_eq!(again.special_texts(), tokenizer.special_texts());
    again
}

#[test]
fn byte_level_ids_agree_with_the_reference_for_every_pre_tokenizer() {
    let fixture = fixture("byte_level.json");
    let names = fixture["pre"].as_object().unwrap();
    assert_eq!(names.len(), 10);
    for (name, rows) in names {
        let mut metadata = metadata_of(&fixture);
        metadata.set("tokenizer.ggml.pre", Value::String(name.clone()));
        let from_file = through_a_file(&metadata);
        let adds_bos = texts(&fixture["bos_added"]).contains(&name.as_str());
        for tokenizer in [through_a_folder(&from_file), from_file] {
            for (text, expected) in texts(&fixture["texts"]).iter().zip(rows.as_array().unwrap()) {
                let expected = ids(expected);
                assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{name}: {text:?}");
                let with_special = tokenizer.encode(text, true).unwrap();
                let bos = if adds_bos { &[0][..] } else { &[] };
                assert_eq!(with_special, [bos, &expected].concat(), "{name}: {text:?}");
            }
            let special = SpecialIds { bos: Some(0), eos: Some(2), unk: None, pad: Some(2) };
            assert_eq!(tokenizer.special_ids(), special);
        }
    }
}

#[test]
fn byte_level_tokenizers_convert_to_gguf_and_back() {
    let fixture = fixture("byte_level.json");
    for name in fixture["pre"].as_object().unwrap().keys() {
        let mut metadata = metadata_of(&fixture);
        metadata.set("tokenizer.ggml.pre", Value::String(name.clone()));
        let tokenizer = from_metadata(&metadata).unwrap();
        let count = metadata.texts("tokenizer.ggml.tokens").unwrap().unwrap().len();
        let again = tokenizer.to_gguf("llama", count).unwrap();
        assert_eq!(again.text("tokenizer.ggml.pre"), Ok(Some(name.as_str())));
        for key in ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
            assert_eq!(again.get(key), metadata.get(key), "{name}: {key}");
        }
        let adds_bos = texts(&fixture["bos_added"]).contains(&name.as_str());
        assert_eq!(again.flag("tokenizer.ggml.add_bos_token"), Ok(Some(adds_bos)));
        // Rows of the embedding without a token get a placeholder.
        let padded = tokenizer.to_gguf("llama", count + 2).unwrap();
        let tokens = padded.texts("tokenizer.ggml.tokens").unwrap().unwrap();
        assert_eq!(tokens[count..], [format!("[PAD{count}]"), format!("[PAD{}]", count + 1)]);
        assert_eq!(padded.i32s("tokenizer.ggml.token_type").unwrap().unwrap()[count..], [5, 5]);
        let beyond = tokenizer.to_gguf("llama", count - 1).unwrap_err().to_string();
        assert_eq!(
            beyond,
            format!("token {} is beyond the {} rows of the model's embedding", count - 1, count - 1)
        );
    }
}

#[test]
fn sentence_piece_tokenizers_convert_to_gguf_and_back() {
    let fixture = fixture("sentence_piece.json");
    for (prefix, key) in [(true, "prefixed"), (false, "plain")] {
        let mut metadata = metadata_of(&fixture);
        metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(prefix));
        let count = metadata.texts("tokenizer.ggml.tokens").unwrap().unwrap().len();
        let again = from_metadata(&metadata).unwrap().to_gguf("llama", count).unwrap();
        assert_eq!(again.flag("tokenizer.ggml.add_space_prefix"), Ok(Some(prefix)));
        assert_eq!(again.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.tokens"));
        let tokenizer = through_a_file(&again);
        for (text, row) in texts(&fixture["texts"]).iter().zip(fixture[key].as_array().unwrap()) {
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&row["ids"]), "{text:?}");
        }
    }
}

/// The tokenizer of the fixture with this pre-tokenizer, saved, changed and read again.
fn changed(pre: &str, template: &str, change: impl FnOnce(&mut Json)) -> Tokenizer {
    let mut metadata = metadata_of(&fixture("byte_level.json"));
    metadata.set("tokenizer.ggml.pre", Value::String(pre.into()));
    metadata.set("tokenizer.chat_template", Value::String(template.into()));
    let folder = tempfile::tempdir().unwrap();
    from_metadata(&metadata).unwrap().save(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut json: Json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(&path, json.to_string()).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

#[test]
fn gemma_4_has_merges_instead_of_scores_and_always_adds_bos() {
    let fixture = fixture("sentence_piece.json");
    let mut metadata = metadata_of(&fixture);
    metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let tokens = metadata.texts("tokenizer.ggml.tokens").unwrap().unwrap();
    let count = tokens.len();
    // llama.cpp would not merge line ends with other letters, so such a vocabulary is refused. Gemma 4 has none.
    let is_mixed = |token: &String| token.contains('\n') && token.contains(|letter| letter != '\n');
    let mixed: Vec<bool> = tokens.iter().map(is_mixed).collect();
    let refused = from_metadata(&metadata).unwrap().to_gguf("gemma4", count).unwrap_err().to_string();
    assert!(refused.starts_with("the tokenizer would give different tokens as GGUF"), "{refused}");
    let types = metadata.i32s("tokenizer.ggml.token_type").unwrap().unwrap();
    let types = types.iter().zip(&mixed).map(|(kind, mixed)| if *mixed { 5 } else { *kind }).collect();
    metadata.set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    let mut gemma4 = from_metadata(&metadata).unwrap().to_gguf("gemma4", count).unwrap();
    assert_eq!(gemma4.text("tokenizer.ggml.model"), Ok(Some("gemma4")));
    assert_eq!(gemma4.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.tokens"));
    assert!(gemma4.get("tokenizer.ggml.scores").is_none() && gemma4.get("tokenizer.ggml.pre").is_none());
    gemma4.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    let tokenizer = through_a_file(&gemma4);
    let rows = texts(&fixture["texts"]).into_iter().zip(fixture["plain"].as_array().unwrap());
    let has_mixed = |row: &Json| ids(&row["ids"]).iter().any(|id| mixed[*id as usize]);
    for (text, row) in rows.filter(|(_, row)| !has_mixed(row)) {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&row["ids"]), "{text:?}");
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&row["with_special"]), "{text:?}");
        assert_eq!(tokenizer.decode(&ids(&row["ids"]), false).unwrap(), row["decoded"], "{text:?}");
    }

    metadata.set("tokenizer.ggml.add_bos_token", Value::Bool(false));
    let without = from_metadata(&metadata).unwrap();
    assert_eq!(
        without.to_gguf("gemma4", count).unwrap().flag("tokenizer.ggml.add_bos_token"),
        Ok(Some(true))
    );
    assert_eq!(
        without.gguf_notes("gemma4").unwrap(),
        ["llama.cpp adds BOS to every text for `gemma4`, and the tokenizer does not"]
    );
    metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(true));
    let prefixed = from_metadata(&metadata).unwrap().to_gguf("gemma4", count).unwrap_err().to_string();
    assert!(prefixed.starts_with("the tokenizer would give different tokens as GGUF"), "{prefixed}");
}

#[test]
fn glm_4_has_its_own_name_and_a_prefix_that_only_its_template_has() {
    let special = |text: &str| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let prefixed = |template: &str| {
        changed("glm4", template, |json| {
            let single =
                [special("<|im_start|>"), special("<tool>"), json!({"Sequence": {"id": "A", "type_id": 0}})];
            let token = |text: &str, id: u32| json!({"id": text, "ids": [id], "tokens": [text]});
            let id = json["model"]["vocab"]["<tool>"].as_u64().unwrap() as u32;
            json["post_processor"] = json!({
                "type": "TemplateProcessing", "single": single, "pair": single,
                "special_tokens": {"<|im_start|>": token("<|im_start|>", 1), "<tool>": token("<tool>", id)},
            });
        })
    };
    let tokenizer = prefixed("<|im_start|><tool>{{ messages }}");
    let metadata = tokenizer.to_gguf("glm4", 1 << 10).unwrap();
    assert_eq!(metadata.text("tokenizer.ggml.pre"), Ok(Some("glm4")));
    assert_eq!(metadata.flag("tokenizer.ggml.add_bos_token"), Ok(Some(false)));
    assert_eq!(
        tokenizer.gguf_notes("glm4").unwrap(),
        ["the tokenizer adds `<|im_start|><tool>` to every text; in llama.cpp only the chat template does"]
    );
    let refused = prefixed("{{ messages }}").to_gguf("glm4", 1 << 10).unwrap_err().to_string();
    assert_eq!(
        refused,
        "the tokenizer adds `<|im_start|><tool>` to every text, for which GGUF has no key, and there is no chat template with it"
    );
    // It has another name elsewhere, and the tokenizer of earlier models is not the same.
    let elsewhere = changed("glm4", "", |_| {}).to_gguf("olmo2", 1 << 10).unwrap();
    assert_eq!(elsewhere.text("tokenizer.ggml.pre"), Ok(Some("llama-bpe")));
    let older = changed("chatglm-bpe", "", |_| {}).to_gguf("glm4", 1 << 10).unwrap();
    assert_eq!(older.text("tokenizer.ggml.pre"), Ok(Some("dbrx")));
    let (fixture, tokenizer) = (fixture("byte_level.json"), changed("glm4", "", |_| {}));
    for (text, row) in texts(&fixture["texts"]).iter().zip(fixture["pre"]["llama-bpe"].as_array().unwrap()) {
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(row), "{text:?}");
    }
}

#[test]
fn line_ends_in_an_expression_may_be_escaped_or_not() {
    let tokenizer = changed("seed-coder", "", |json| {
        let regex = &mut json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
        let unescaped = regex.as_str().unwrap().replace(r"\r", "\r").replace(r"\n", "\n");
        *regex = json!(unescaped);
    });
    let metadata = tokenizer.to_gguf("seed_oss", 1 << 10).unwrap();
    assert_eq!(metadata.text("tokenizer.ggml.pre"), Ok(Some("seed-coder")));
}

#[test]
fn a_pre_tokenizer_without_a_name_is_refused() {
    let tokenizer = changed("gpt-2", "", |json| json["pre_tokenizer"] = json!({"type": "Whitespace"}));
    let refused = tokenizer.to_gguf("llama", 1 << 16).unwrap_err();
    let message = refused.to_string();
    assert!(message.starts_with("the pre-tokenizer has no name in GGUF (supported: gpt-2, "), "{message}");
    assert!(message.contains("Whitespace"), "{message}");
}

#[test]
fn byte_level_ids_decode_to_the_text() {
    let fixture = fixture("byte_level.json");
    let mut metadata = metadata_of(&fixture);
    metadata.set("tokenizer.ggml.pre", Value::String("gpt-2".into()));
    let tokenizer = through_a_file(&metadata);
    let rows = fixture["pre"]["gpt-2"].as_array().unwrap();
    for (position, row) in rows.iter().enumerate() {
        let ids = ids(row);
        let text = tokenizer.decode(&ids, false).unwrap();
        assert_eq!(text, fixture["decoded"][position].as_str().unwrap());
        assert_eq!(text, fixture["texts"][position].as_str().unwrap());
        let without = tokenizer.decode(&ids, true).unwrap();
        assert_eq!(without, fixture["decoded_without_special"][position].as_str().unwrap());
    }
}

#[test]
fn sentence_piece_ids_agree_with_the_reference_with_and_without_a_prefix() {
    let fixture = fixture("sentence_piece.json");
    for (prefix, key) in [(true, "prefixed"), (false, "plain")] {
        let mut metadata = metadata_of(&fixture);
        if !prefix {
            metadata.set("tokenizer.ggml.add_space_prefix", Value::Bool(false));
        }
        let from_file = through_a_file(&metadata);
        for tokenizer in [through_a_folder(&from_file), from_file] {
            for (text, row) in texts(&fixture["texts"]).iter().zip(fixture[key].as_array().unwrap()) {
                let expected = ids(&row["ids"]);
                assert_eq!(tokenizer.encode(text, false).unwrap(), expected, "{key}: {text:?}");
                assert_eq!(
                    tokenizer.encode(text, true).unwrap(),
                    ids(&row["with_special"]),
                    "{key}: {text:?}"
                );
                assert_eq!(tokenizer.decode(&expected, false).unwrap(), row["decoded"], "{key}");
                assert_eq!(
                    tokenizer.decode(&expected, true).unwrap(),
                    row["decoded_without_special"],
                    "{key}"
                );
            }
            let special = SpecialIds { bos: Some(1), eos: Some(2), unk: Some(0), pad: None };
            assert_eq!(tokenizer.special_ids(), special);
        }
    }
}

#[test]
fn bos_and_eos_are_added_if_the_file_says_so() {
    let fixture = fixture("sentence_piece.json");
    let encode = |more: &[(&str, bool)]| {
        let mut metadata = metadata_of(&fixture);
        for (key, value) in more {
            metadata.set(&format!("tokenizer.ggml.{key}"), Value::Bool(*value));
        }
        from_metadata(&metadata).unwrap().encode("", true).unwrap()
    };
    assert_eq!(encode(&[]), [1]);
    assert!(encode(&[("add_bos_token", false)]).is_empty());
    assert_eq!(encode(&[("add_eos_token", true)]), [1, 2]);
    assert_eq!(encode(&[("add_bos_token", false), ("add_eos_token", true)]), [2]);
}

#[test]
fn special_tokens_of_phi_3_absorb_the_space_behind_them() {
    let fixture = fixture("sentence_piece.json");
    let mut metadata = metadata_of(&fixture);
    let encode =
        |metadata: &Metadata, text: &str| from_metadata(metadata).unwrap().encode(text, false).unwrap();
    let text = "<|end|>\n<s>";
    let kept = encode(&metadata, text);
    assert!(kept.len() > 2 && kept.ends_with(&[1]), "{kept:?}");
    metadata.set("general.architecture", Value::String("phi3".into()));
    assert_eq!(encode(&metadata, text), [kept[0], 1]);
    assert!(encode(&metadata, "<s>\n").len() > 1, "the beginning of a text keeps it");
}

#[test]
fn ranges_are_bytes_of_the_text() {
    let fixture = fixture("byte_level.json");
    let mut metadata = metadata_of(&fixture);
    metadata.set("tokenizer.ggml.pre", Value::String("llama-bpe".into()));
    let tokenizer = from_metadata(&metadata).unwrap();
    let text = "<|im_start|>üser 日";
    let (ids, ranges) = tokenizer.encode_with_ranges(text, true).unwrap();
    assert_eq!(ids, tokenizer.encode(text, true).unwrap());
    assert_eq!((ranges[0].clone(), ranges[1].clone()), (0..0, 0..12));
    assert_eq!(ranges.last().unwrap().end, text.len());
}

#[test]
fn invalid_metadata_is_refused() {
    let fixture = fixture("byte_level.json");
    let sound = metadata_of(&fixture);
    let count = sound.texts("tokenizer.ggml.tokens").unwrap().unwrap().len();
    let refused = |key: &str, value: Value| {
        let mut metadata = sound.clone();
        metadata.set("tokenizer.ggml.pre", Value::String("gpt-2".into()));
        metadata.set(&format!("tokenizer.ggml.{key}"), value);
        from_metadata(&metadata).unwrap_err().to_string()
    };
    let text = |text: &str| Value::String(text.into());
    assert_eq!(
        refused("model", text("bert")),
        "the tokenizer model `bert` is not supported (supported: gpt2, llama, gemma4)"
    );
    let message = refused("pre", text("chameleon"));
    assert!(message.starts_with("the pre-tokenizer `chameleon` is not supported (supported: gpt-2, phi-2,"));
    let unnamed = from_metadata(&sound).unwrap_err().to_string();
    assert!(
        unnamed.starts_with("the file does not name its pre-tokenizer (`tokenizer.ggml.pre`)"),
        "{unnamed}"
    );
    assert_eq!(
        refused("token_type", Value::Array(Array::I32(vec![1, 2]))),
        format!("`tokenizer.ggml.token_type` has 2 elements for {count} tokens")
    );
    let types = Value::Array(Array::I32(vec![9; count]));
    assert_eq!(refused("token_type", types), "token 0 has the unknown type 9 (known: 1 to 6)");
    assert_eq!(
        refused("eos_token_id", Value::U32(100_000)),
        format!("`tokenizer.ggml.eos_token_id` is 100000, there are {count} tokens")
    );
    let merges = Value::Array(Array::String(vec!["a b".into(), "ab".into()]));
    assert_eq!(refused("merges", merges), "merge 1 is \"ab\", not two tokens with a space between");
    let twice = Value::Array(Array::String(vec!["a".into(); count]));
    assert_eq!(refused("tokens", twice), "tokens 0 and 1 are both \"a\"");
    let llama = refused("model", text("llama"));
    assert_eq!(llama, "the metadata has no `tokenizer.ggml.scores`");
    let mut metadata = metadata_of(&json!({"metadata": [
        ["tokenizer.ggml.model", "string", "gpt2"], ["tokenizer.ggml.pre", "string", "gpt-2"],
        ["tokenizer.ggml.tokens", "strings", ["a"]], ["tokenizer.ggml.merges", "strings", []],
    ]}));
    metadata.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    assert_eq!(
        from_metadata(&metadata).unwrap_err().to_string(),
        "`tokenizer.ggml.add_bos_token` is true and there is no `tokenizer.ggml.bos_token_id`"
    );
}

#[test]
fn a_folder_is_read_as_transformers_reads_it() {
    let fixture = fixture("byte_level.json");
    let mut metadata = metadata_of(&fixture);
    metadata.set("tokenizer.ggml.pre", Value::String("smollm".into()));
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let load = || Tokenizer::from_folder(folder.path());
    assert!(matches!(load(), Err(TokenizerError::NoTokenizerJson { .. })));
    from_metadata(&metadata).unwrap().save(folder.path()).unwrap();
    assert!(!path("chat_template.jinja").exists());

    // Older folders: a token as an object, a list of templates, and special tokens in their own file.
    let config = json!({
        "bos_token": {"content": "<|im_start|>", "special": true}, "eos_token": null, "add_bos_token": false,
        "chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "{{ bos_token }}"}],
    });
    fs::write(path("tokenizer_config.json"), config.to_string()).unwrap();
    fs::write(path("special_tokens_map.json"), r#"{"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"}"#)
        .unwrap();
    let tokenizer = load().unwrap();
    let special = SpecialIds { bos: Some(1), eos: Some(2), unk: None, pad: None };
    assert_eq!(tokenizer.special_ids(), special);
    assert_eq!(tokenizer.template_source(), Some("{{ bos_token }}"));
    let template = tokenizer.chat_template().unwrap().unwrap();
    let rendered = template.render(&ChatInput::new(&json!([]), SystemTime::UNIX_EPOCH)).unwrap();
    assert_eq!(rendered.text, "<|im_start|>");

    fs::write(path("chat_template.jinja"), "newer").unwrap();
    assert_eq!(load().unwrap().template_source(), Some("newer"));
    fs::remove_file(path("chat_template.jinja")).unwrap();
    fs::write(path("tokenizer_config.json"), r#"{"chat_template": [{"name": "tool", "template": "T"}]}"#)
        .unwrap();
    let message = load().unwrap_err().to_string();
    assert!(message.ends_with("neither a string nor a list with the name `default`"), "{message}");
    fs::remove_file(path("tokenizer_config.json")).unwrap();
    fs::write(path("chat_template.json"), r#"{"chat_template": "oldest"}"#).unwrap();
    assert_eq!(load().unwrap().template_source(), Some("oldest"));
    fs::write(path("tokenizer.json"), "{}").unwrap();
    assert!(matches!(load(), Err(TokenizerError::Unusable { .. })));
}

fn map(json: &Json) -> Map<String, Json> {
    json.as_object().unwrap().clone()
}

#[test]
fn rendered_chats_agree_with_the_reference() {
    // 2024-07-26 12:00:00 UTC, the date in the recorded texts.
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_995_200);
    let cases = fixture("chat.json");
    for case in cases.as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let template = ChatTemplate::new(case["template"].as_str().unwrap(), map(&case["special"])).unwrap();
        let more = map(&case["more"]);
        let input = ChatInput {
            tools: (!case["tools"].is_null()).then_some(&case["tools"]),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            more: Some(&more),
            ..ChatInput::new(&case["messages"], now)
        };
        let Rendered { text, generated } =
            template.render(&input).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(text, case["text"].as_str().unwrap(), "{name}");
        let generated: Vec<[usize; 2]> = generated.iter().map(|range| [range.start, range.end]).collect();
        assert_eq!(json!(generated), case["generated"], "{name}");
        assert_eq!(template.marks_generation(), name == "generation");
    }
}

#[test]
fn errors_of_templates_have_the_reason() {
    let template = |source: &str| ChatTemplate::new(source, Map::new());
    let broken = template("line\n{% for %}").unwrap_err().to_string();
    assert!(broken.starts_with("the chat template cannot be read: syntax error"), "{broken}");
    assert!(broken.ends_with("(line 2)"), "{broken}");
    let messages = json!([{"role": "user", "content": "x"}]);
    let render = |source: &str, messages: &Json| {
        template(source).unwrap().render(&ChatInput::new(messages, SystemTime::UNIX_EPOCH)).unwrap_err()
    };
    let refused = render("{{ raise_exception('roles must ' + 'alternate') }}", &messages);
    assert!(matches!(refused, ChatTemplateError::Refused { .. }));
    assert_eq!(refused.to_string(), "the chat template refuses these messages: roles must alternate");
    let nested = render("{% macro m() %}{{ raise_exception('inside') }}{% endmacro %}{{ m() }}", &messages);
    assert_eq!(nested.to_string(), "the chat template refuses these messages: inside");
    let failed = render("{{ missing.attribute }}", &messages).to_string();
    assert!(failed.starts_with("the chat template failed: undefined value"), "{failed}");
    let failed = render("{{ strftime_now('%Q') }}", &messages).to_string();
    assert!(failed.contains("`strftime_now` does not support the format `%Q`"), "{failed}");
    let marked = json!([{"role": "user", "content": "\u{fdd0}"}]);
    let failed = render("{% generation %}{% endgeneration %}", &marked).to_string();
    assert!(failed.contains("U+FDD0"), "{failed}");
}

// ── the real SmolLM2 ───────────────────────────────────────────────────────────────────────────────

fn smollm2() -> Option<PathBuf> {
    let path = std::env::var_os("SMIDGEN_SMOLLM2").map(PathBuf::from);
    if path.is_none() {
        eprintln!("skipped: `SMIDGEN_SMOLLM2` does not name SmolLM2-135M-Instruct.Q4_1.gguf");
    }
    path
}

fn first_bytes(file: &GgufFile, name: &str, count: usize) -> String {
    let tensor: &GgufTensor = file.tensor(name).unwrap();
    let mut bytes = vec![0; count];
    file.read_at(tensor, 0, &mut bytes).unwrap();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Numbers and ids were computed with numpy and transformers, independently of this project.
#[test]
fn the_real_smollm2_agrees_with_numpy_and_transformers() {
    let Some(path) = smollm2() else { return };
    let file = GgufFile::open(&path).unwrap();
    assert_eq!((file.file_bytes(), file.data_offset()), (98_362_432, 1_785_664));
    assert_eq!((file.tensors().len(), file.metadata().len(), file.alignment()), (272, 33, 32));
    assert_eq!(first_bytes(&file, "blk.0.attn_q.weight", 20), "0f30d8b9458765406f65164b677664502267655a");
    assert_eq!(first_bytes(&file, "token_embd.weight", 6), "3219d60d13f7");

    let model = GgufModel::read(&file).unwrap();
    let spec = smidgen_compile::model::read_spec(&model.config).unwrap();
    assert_eq!(spec.parameters(), 134_515_008);
    assert_eq!((spec.ropes[0].theta, spec.max_positions), (1e5, 8192));
    assert_eq!(spec.tensors().len(), model.sources().count());
    for tensor in spec.tensors() {
        assert!(model.source(&tensor.name).is_some(), "{}", tensor.name);
    }

    let tokenizer = Tokenizer::from_gguf(&file).unwrap();
    let special = SpecialIds { bos: Some(1), eos: Some(2), unk: Some(0), pad: Some(2) };
    assert_eq!(tokenizer.special_ids(), special);
    assert!(tokenizer.token(49_151).is_some() && tokenizer.token(49_152).is_none());
    let sentence = "The capital of France is Paris. In 2024, the city hosted the Summer Olympics, \
                    and millions of visitors came to see it.";
    let expected = [
        504, 3575, 282, 4649, 314, 7042, 30, 533, 216, 34, 32, 34, 36, 28, 260, 2240, 17475, 260, 15937,
        22255, 28, 284, 5711, 282, 7803, 2422, 288, 963, 357, 30,
    ];
    for add_special in [false, true] {
        assert_eq!(tokenizer.encode(sentence, add_special).unwrap(), expected);
    }
    assert_eq!(tokenizer.decode(&expected, true).unwrap(), sentence);

    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let input =
        ChatInput { add_generation_prompt: true, ..ChatInput::new(&messages, SystemTime::UNIX_EPOCH) };
    let chat = tokenizer.chat_template().unwrap().unwrap().render(&input).unwrap();
    let expected = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
    ];
    assert_eq!(tokenizer.encode(&chat.text, false).unwrap(), expected);
    println!("{} tensors, {} ids of the sentence and {} of the chat agree", 272, 30, expected.len());

    if let Some(folder) = std::env::var_os("SMIDGEN_SMOLLM2_SAVE") {
        fs::create_dir_all(&folder).unwrap();
        tokenizer.save(Path::new(&folder)).unwrap();
        fs::write(Path::new(&folder).join("config.json"), model.config.to_string()).unwrap();
    }
}
