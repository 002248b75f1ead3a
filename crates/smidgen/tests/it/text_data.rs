//! Rows of text from the command line: trained on, cached, previewed, and refused with a reason.
//!
//! The tokenizer is one of words, small enough for the vocabulary of the tiny model.

use crate::scratch::Scratch;
use serde_json::{Value, json};
use std::path::PathBuf;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}";

/// Words are tokens, and what is between marks; everything else is unknown.
pub fn with_tokenizer(scratch: &Scratch) {
    let special = ["<unk>", "<|im_start|>", "<|im_end|>"];
    let words =
        ["user", "assistant", "system", "what", "is", "the", "answer", "one", "two", "three", "a", "b", "c"];
    let vocabulary: serde_json::Map<String, Value> =
        special.iter().chain(&words).enumerate().map(|(id, word)| (word.to_string(), json!(id))).collect();
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    scratch.write("model/tokenizer.json", tokenizer.to_string());
    let config = json!({"eos_token": "<|im_end|>", "unk_token": "<unk>"});
    scratch.write("model/tokenizer_config.json", config.to_string());
    scratch.write("model/chat_template.jinja", TEMPLATE);
}

fn rows() -> String {
    let row = |number: usize| {
        let answer = ["one", "two", "three"][number % 3].to_string() + &" a b".repeat(number % 4);
        json!({"instruction": "what is the answer", "input": "", "output": answer}).to_string() + "\n"
    };
    (0..12).map(row).collect()
}

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    scratch.write("rows.jsonl", rows());
    scratch
}

const ROWS: [&str; 2] = ["data.train=rows.jsonl", "data.format=auto"];

fn overrides<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&ROWS[..], more].concat()
}

fn cached(scratch: &Scratch) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(scratch.cache().join("tokens")) else { return vec![] };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

#[test]
fn text_is_trained_on_and_its_tokens_are_kept() {
    let scratch = scratch();
    scratch.train("first", &overrides(&[]));
    let files = cached(&scratch);
    assert_eq!(files.len(), 1);
    let bytes = std::fs::read(&files[0]).unwrap();
    scratch.train("second", &overrides(&[]));
    assert_eq!(scratch.adapter("first"), scratch.adapter("second"));
    // A damaged file is written anew, and the run is the same.
    let mut damaged = bytes.clone();
    damaged[100] ^= 4;
    std::fs::write(&files[0], damaged).unwrap();
    scratch.train("third", &overrides(&["memory.threads=1"]));
    assert_eq!(scratch.adapter("first"), scratch.adapter("third"));
    assert_eq!(std::fs::read(&files[0]).unwrap(), bytes);
    // Another loss, another template and other rows are other sets; another name of the file is not.
    scratch.train("fourth", &overrides(&["data.loss_on=all"]));
    scratch.train("fifth", &overrides(&["data.template=alpaca"]));
    assert_eq!(cached(&scratch).len(), 3);
    scratch.write("renamed.jsonl", rows());
    scratch.train("sixth", &["data.train=renamed.jsonl", "data.format=alpaca"]);
    scratch.write("rows.jsonl", rows() + &rows());
    scratch.train("seventh", &overrides(&[]));
    assert_eq!(cached(&scratch).len(), 4);
}

#[test]
fn a_cache_that_cannot_be_written_stops_nobody() {
    let scratch = scratch();
    std::fs::write(scratch.cache().join("tokens"), "in the way").unwrap();
    scratch.train("run", &overrides(&[]));
}

#[test]
fn a_preview_for_people() {
    let scratch = scratch();
    let ended = scratch.run(&[&["preview", "recipe.toml", "--rows", "2"][..], &overrides(&[])].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let text = scratch.neutral(&ended.stdout);
    let bar = "█".repeat(50);
    for words in [
        "format     alpaca: ",
        "prompted   with the chat template: the model's own\nloss on    completion (auto)\nrows       12 rows read, 12 kept\n\n",
        "`FOLDER/rows.jsonl` line 1: 11 tokens, 2 supervised\n  \
         <|im_start|> user what is the answer <|im_end|> <|im_start|> assistant⟦ one <|im_end|>⟧\n\n",
        "`FOLDER/rows.jsonl` line 2: 13 tokens, 4 supervised\n",
        "assistant⟦ two a b <|im_end|>⟧\n",
        "tokens     168, 60 supervised (35.7 %), 0 cut off\nlengths    11 to 17, 14.0 on average\n",
        &format!(
            "\n          10-11 {bar} 3\n          12-13 {bar} 3\n          14-15 {bar} 3\n          16-17 {bar} 3\n"
        ),
        "steps      6 total, 3 per epoch\nper step   4.0 samples, 56 tokens, ",
    ] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    assert!(!scratch.exists("run"));
}

#[test]
fn a_preview_for_programs() {
    let scratch = scratch();
    let more = ["data.loss_on=all", "data.max_tokens=8"];
    let ended = scratch.run(&[&["preview", "recipe.toml", "--json"][..], &overrides(&more)].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let preview: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(preview["format"], "alpaca");
    assert_eq!(preview["rows"]["read"], 12);
    assert_eq!(preview["samples"].as_array().unwrap().len(), 3);
    let first = &preview["samples"][0];
    // <|im_start|> user what is the answer <|im_end|> <|im_start|>, and no more than eight.
    assert_eq!(first["ids"], json!([1, 3, 6, 7, 8, 9, 2, 1]));
    assert_eq!(first["labels"], first["ids"]);
    assert_eq!(preview["batches"]["steps_per_epoch"], 3);
    let warnings = preview["warnings"].as_array().unwrap();
    assert!(
        warnings
            .iter()
            .any(|warning| warning == "`data.train`: every sample is truncated: raise `data.max_tokens`")
    );
}

fn long_chat(turns: usize) -> String {
    let turn = json!([{"role": "user", "content": "what"}, {"role": "assistant", "content": "one"}]);
    let messages: Vec<&Value> = (0..turns).flat_map(|_| turn.as_array().unwrap()).collect();
    json!({"messages": messages}).to_string() + "\n"
}

#[test]
fn every_turn_of_the_assistant_is_trained() {
    let scratch = scratch();
    scratch.write("rows.jsonl", long_chat(3));
    let ended = scratch.run(&[&["preview", "recipe.toml"][..], &overrides(&[])].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    for words in ["loss on    assistant (auto)\n", "line 1: 24 tokens, 6 supervised\n"] {
        assert!(ended.stdout.contains(words), "{words:?} is not in\n{}", ended.stdout);
    }
    let ended = scratch.run(&[&["preview", "recipe.toml", "--json"][..], &overrides(&[])].concat());
    let preview: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&preview["loss_on"], &preview["supervised_tokens"]), (&json!("assistant"), &json!(6)));
}

/// The ids that `generate` continues.
fn prompt_ids(scratch: &Scratch, arguments: &[&str]) -> Value {
    let common = ["--prompt", "what is", "--max-new", "1", "--json", "--quiet"];
    let ended = scratch.run(&[&["generate"][..], arguments, &common].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str::<Value>(&ended.stdout).unwrap()["prompt_ids"].clone()
}

#[test]
fn a_prompt_is_asked_as_it_was_trained() {
    let scratch = scratch();
    let plain = json!([6, 7]);
    // <|im_start|> user what is <|im_end|> <|im_start|> assistant
    let chat = json!([1, 3, 6, 7, 2, 1, 4]);
    let pairs = json!({"prompt": "what is the", "completion": " answer"}).to_string() + "\n";
    scratch.write("rows.jsonl", pairs.repeat(4));
    let ended = scratch.run(&[&["preview", "recipe.toml"][..], &overrides(&[])].concat());
    assert!(ended.stdout.contains("\nprompted   without a template\n"), "{}", ended.stdout);
    scratch.train("plain", &overrides(&["train.save_every=3"]));
    assert_eq!(prompt_ids(&scratch, &["plain"]), plain);
    assert_eq!(prompt_ids(&scratch, &["model", "--adapter", "plain/adapter"]), plain);
    assert_eq!(prompt_ids(&scratch, &["model", "--adapter", "plain/checkpoint-3"]), plain);
    assert_eq!(prompt_ids(&scratch, &["plain", "--template", "model"]), chat);
    assert_eq!(prompt_ids(&scratch, &["model"]), chat);
    let merged = scratch.run(&["merge", "plain", "--output", "merged"]);
    assert_eq!(merged.code, Some(0), "{}", merged.stderr);
    assert_eq!(prompt_ids(&scratch, &["merged"]), plain);
    scratch.refused(
        2,
        &["generate", "plain", "--prompt", "a", "--system", "b"],
        &["`--system` needs a chat template, but the prompts have none", "hint: `--template` names one"],
    );
    // <|im_start|> user what is <|im_end|> <|im_start|> assistant
    scratch.train("turns", &overrides(&["data.template=model"]));
    assert_eq!(prompt_ids(&scratch, &["turns"]), chat);
    let messages = json!({"prompt": [{"role": "user", "content": "what"}],
        "completion": [{"role": "assistant", "content": "one"}]});
    scratch.write("rows.jsonl", format!("{messages}\n"));
    scratch.train("chat", &overrides(&[]));
    assert_eq!(prompt_ids(&scratch, &["chat"]), chat);
    assert_eq!(prompt_ids(&scratch, &["chat", "--raw"]), plain);
    let other = "{% for m in messages %}{{ m.content }} <|im_end|> {% endfor %}";
    scratch.write("other.jinja", other);
    scratch.train("other", &overrides(&["data.template=other.jinja"]));
    assert_eq!(prompt_ids(&scratch, &["other"]), json!([6, 7, 2]));
    assert_eq!(scratch.text("other/adapter/chat_template.jinja"), other);
    scratch.write("rows.jsonl", rows());
    scratch.train("alpaca", &overrides(&["data.template=alpaca"]));
    let instruction = prompt_ids(&scratch, &["alpaca"]);
    assert_eq!(instruction, prompt_ids(&scratch, &["model", "--template", "alpaca"]));
    assert!(instruction.as_array().unwrap().len() > 10, "{instruction}");
}

/// Scores of a model that was trained on strings are those of the strings.
#[test]
fn evaluations_ask_strings_without_a_template() {
    let scratch = scratch();
    let pair =
        |prompt: &str, answer: &str| json!({"prompt": prompt, "completion": answer}).to_string() + "\n";
    scratch.write("rows.jsonl", [pair("what is", " one"), pair("is what", " two")].concat());
    scratch.write(
        "same.jsonl",
        [
            json!({"prompt": "what is", "completion": " one"}).to_string(),
            "\n".into(),
            json!({"prompt": "is what", "completion": " two"}).to_string(),
        ]
        .concat(),
    );
    scratch.train("run", &overrides(&[]));
    let mut found = Vec::new();
    for template in ["auto", "none"] {
        for task in ["generate", "choice"] {
            let template = format!("data.template={template}");
            let out = format!("{task}.json");
            let ended = scratch.run(&[
                "eval",
                "run",
                "data.eval=same.jsonl",
                &template,
                "--task",
                task,
                "--out",
                &out,
                "--quiet",
            ]);
            assert_eq!(ended.code, Some(0), "{task}: {}", ended.stderr);
            found.push(scratch.json(&out)["adapter"].clone());
        }
    }
    assert_eq!(found[..2], found[2..]);
}

const UNDECIDED: &str = "prompts and completions are trained without the model's chat template; \
    `data.template = \"model\"` makes a turn of the user and one of the assistant of each, and \
    `data.template = \"none\"` confirms that they stay as they are";

/// An Instruct model was once trained on `What is 2+2?4` without a word, whatever `data.template` said.
#[test]
fn prompts_and_completions_ask_for_a_decision_about_the_template() {
    let scratch = scratch();
    scratch.write("rows.csv", "question,answer\nwhat is the,answer\nis the,one\n");
    let asked = |command: &str, more: &[&str]| {
        let rows = ["data.train=rows.csv", "data.format=auto"];
        let ended = scratch.run(&[&[command, "recipe.toml"][..], &rows, more].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended
    };
    let ended = asked("preview", &[]);
    for words in [
        "\nprompted   without a template\n",
        "rows.csv` line 2 with `data.template = \"none\"`, as now: 4 tokens, 2 supervised\n  what is⟦ <unk> <|im_end|>⟧",
        "\nthe same row with `data.template = \"model\"`: 10 tokens, 2 supervised\n  \
         <|im_start|> user what is the <|im_end|> <|im_start|> assistant⟦ answer <|im_end|>⟧\n",
        &format!("warning: `data.train`: {UNDECIDED}"),
    ] {
        assert!(ended.stdout.contains(words), "{words:?} is not in\n{}", ended.stdout);
    }
    let json: Value = serde_json::from_str(&asked("preview", &["--json"]).stdout).unwrap();
    assert_eq!(json["forms"]["model"][1], json!({"text": " answer <|im_end|>", "supervised": true}));
    for command in ["train", "plan"] {
        let ended = asked(command, &["output.dir=undecided"]);
        assert_eq!(ended.stderr.matches(UNDECIDED).count(), 1, "{command}: {}", ended.stderr);
    }
    let with = "\nprompted   with the chat template: ";
    for (choice, prompted) in [
        ("data.template=none", "\nprompted   without a template\n"),
        ("data.template=model", with),
        ("data.template=chatml", with),
        ("data.template=alpaca", "\nprompted   with the prompt `alpaca`\n"),
    ] {
        let shown = asked("preview", &[choice]).stdout;
        let is_silent = !shown.contains("trained without") && !shown.contains("the same row");
        assert!(is_silent && shown.contains(prompted), "{choice}: {shown}");
    }
    let refused = |more: &[&str], words: &[&str]| {
        let rows = ["data.train=rows.csv", "data.format=auto"];
        scratch.train_refused(2, &[&rows[..], more].concat(), words);
    };
    std::fs::remove_file(scratch.path("model/chat_template.jinja")).unwrap();
    let words =
        ["`data.template = model`: the model has no chat template", "hint: `data.template` is one of "];
    refused(&["data.template=model"], &words);
    assert!(!asked("preview", &[]).stdout.contains("trained without"));
}

#[test]
fn empty_prompts_are_counted_and_never_kept() {
    let scratch = scratch();
    scratch.write("rows.csv", "question,answer\nwhat is the,answer\n,one\nis the,\n  ,two\n");
    let rows = ["data.train=rows.csv", "data.format=auto", "data.template=none"];
    let words = [
        "3 of 4 rows are bad",
        "2 rows: `question` is empty (lines 3, 5)",
        "1 row: `answer` is empty (line 4)",
        "hint: remove the row, or fill the field; `data.on_bad_row = \"skip\"`",
    ];
    scratch.train_refused(1, &rows, &words);
    let skip = [&["preview", "recipe.toml", "data.on_bad_row=skip"][..], &rows].concat();
    let shown = scratch.run(&skip).stdout;
    for words in ["2 × `question` is empty (lines 3, 5)", "4 rows read, 3 skipped as bad, 1 kept"] {
        assert!(shown.contains(words), "{words:?} is not in\n{shown}");
    }
}

/// The hint names columns and the template, and does what it says.
#[test]
fn the_hint_about_unknown_columns_works() {
    let scratch = scratch();
    scratch.write("rows.csv", "id,frage,antwort\n1,what is the,answer\n2,is the,one\n");
    let words = [
        "matches no known format: found `id`, `frage`, `antwort`",
        "`data.columns = { prompt = \"frage\", completion = \"antwort\" }` reads `frage` as prompt",
        "`data.template = \"model\"` makes turns of them",
    ];
    scratch.train_refused(1, &["data.train=rows.csv", "data.format=auto"], &words);
    let shown = scratch.run(&[
        "preview",
        "recipe.toml",
        "data.train=rows.csv",
        "data.format=auto",
        "data.columns={ prompt = \"frage\", completion = \"antwort\" }",
        "data.template=model",
    ]);
    assert!(
        shown.stdout.contains("<|im_start|> user what is the <|im_end|>"),
        "{}{}",
        shown.stdout,
        shown.stderr
    );
}

#[test]
fn a_folder_of_documents_is_cut_into_pieces_that_are_all_used() {
    let scratch = scratch();
    scratch.write("notes/a.md", "one two three a b\n\nwhat is the answer\n\n".repeat(4));
    scratch.write("notes/more/b.txt", "what is the answer");
    let shown = |train: &str| {
        let train = format!("data.train={train}");
        let ended = scratch.run(&["preview", "recipe.toml", &train, "data.format=auto", "data.max_tokens=8"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        ended.stdout
    };
    assert!(shown("notes").contains("2 rows read, 1 cut into"), "{}", shown("notes"));
    assert_eq!(shown("notes").split("rows  ").nth(1), shown("notes/**/*.*").split("rows  ").nth(1));
}

#[test]
fn packing_says_how_many_rows_became_how_many_sequences() {
    let scratch = scratch();
    let more = ["memory.micro_tokens=34", "train.batch=12"];
    let ended = scratch.run(&[&["preview", "recipe.toml"][..], &overrides(&more)].concat());
    let packing = "12 rows in 6 sequences of up to 34 tokens per epoch (82 % full)\n";
    assert!(ended.stdout.contains(&format!("\npacking    {packing}")), "{}{}", ended.stdout, ended.stderr);
    // One of three steps of an epoch.
    let less = ["memory.micro_tokens=34", "train.batch=4", "train.steps=1"];
    let ended = scratch.run(&[&["preview", "recipe.toml"][..], &overrides(&less)].concat());
    assert!(
        ended.stdout.contains("\npacking    4 rows in 2 sequences of up to 34 tokens in this run"),
        "{}",
        ended.stdout
    );
    let ended = scratch.train("run", &overrides(&more));
    assert_eq!(ended.stderr.matches(&format!("packing: {packing}")).count(), 1, "{}", ended.stderr);
}

#[test]
fn mistakes_that_people_make_get_warnings() {
    let warned_with = |template: &str, rows: &str, more: &[&str], words: &str| {
        let scratch = scratch();
        scratch.write("model/chat_template.jinja", template);
        scratch.write("rows.jsonl", rows);
        let ended = scratch.run(&[&["preview", "recipe.toml"][..], &overrides(more)].concat());
        assert!(
            ended.stdout.contains(&format!("warning: `data.train`: {words}\n")),
            "{words}: {}{}",
            ended.stdout,
            ended.stderr
        );
        let ended = scratch.train("run", &overrides(more));
        assert_eq!(ended.stderr.matches(words).count(), 1, "{}", ended.stderr);
    };
    let warned = |rows: &str, more: &[&str], words: &str| warned_with(TEMPLATE, rows, more, words);
    let chat = "{\"messages\":[{\"role\":\"user\",\"content\":\"what\"},{\"role\":\"assistant\",\"content\":\"one two\"}]}\n";
    // The last answer is a shout, all others are not: the first answer of each row is a sample of its own.
    let shout = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ 'c' if loop.last }} <|im_end|> {% endfor %}\
        {% if add_generation_prompt %}assistant {% endif %}";
    warned_with(
        shout,
        &format!("{}{chat}", long_chat(2)),
        &[],
        "the chat template renders earlier turns differently when others follow: 1 of 2 conversations became 2 \
         samples, in which every turn is trained as it is generated",
    );
    warned_with(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}",
        chat,
        &[],
        "no answer ends with a special token of the tokenizer (template: the model's own): the model will not learn \
         where to stop",
    );
    warned(
        "{\"text\":\"one two three\"}\n",
        &["data.loss_on=assistant"],
        "`data.loss_on = assistant` is ignored: rows of `text` have no turns, every token is supervised",
    );
    warned(
        "{\"input_ids\":[1,2,3]}\n",
        &["data.loss_on=all"],
        "`data.loss_on = all` is ignored: rows of `tokens` have their own labels",
    );
    warned(
        &("{\"text\":\"one two three\"}\n".repeat(9) + "{\"text\":\"one two three a b c a b c\"}\n"),
        &["data.max_tokens=5", "data.overflow=truncate"],
        "10 % of the samples are truncated, so the model does not see their end: raise `data.max_tokens`",
    );
}

#[test]
fn what_cannot_be_tokenized_is_refused() {
    let refused = |rows: &str, code: i32, more: &[&str], words: &[&str]| {
        let scratch = scratch();
        scratch.write("rows.jsonl", rows);
        scratch.train_refused(code, &overrides(more), words);
    };
    let chat =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n";
    let words =
        ["unknown template `chatmil`", "hint: did you mean `chatml`? the built-in templates are chatml, "];
    refused(chat, 2, &["data.template=chatmil"], &words);
    let system = "{\"messages\":[{\"role\":\"system\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}\n";
    let words = [
        "`data.template = gemma`: the tokenizer has no token for `<start_of_turn>`, `<end_of_turn>`",
        "hint: `data.template = \"auto\"` uses the model's own; it has the markers of chatml, zephyr; a `.jinja` file",
    ];
    refused(chat, 2, &["data.template=gemma"], &words);
    let picky = scratch();
    picky.write("rows.jsonl", format!("{chat}{system}"));
    picky.write("picky.jinja", format!("{{% if messages[0].role == 'system' %}}{{{{ raise_exception('No system') }}}}{{% endif %}}{TEMPLATE}"));
    let words = ["rows.jsonl` line 2: the chat template refuses these messages: No system"];
    picky.train_refused(1, &overrides(&["data.template=picky.jinja"]), &words);
    let late = json!({"prompt": "a b c ".repeat(10), "completion": "one"}).to_string();
    let words = ["`data.train`: no supervised token anywhere: 1 rows read", "raise `data.max_tokens`"];
    refused(&late, 1, &["data.max_tokens=8"], &words);
    let words = [
        "`data.train`: no supervised token anywhere: 1 rows read, 1 dropped without a supervised token",
        "hint: no row has anything that `data.loss_on = assistant` supervises",
    ];
    let asked = "{\"prompt\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}],\"completion\":[{\"role\":\"assistant\",\"content\":\"c\"}]}\n";
    let scratch = scratch();
    scratch.write("rows.jsonl", asked);
    // It marks nothing, although it has a block.
    let source = "{% for m in messages %}{{ m.content }} {% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}";
    scratch.write("model/chat_template.jinja", source);
    scratch.train_refused(1, &overrides(&["data.loss_on=assistant"]), &words);
}

#[test]
fn a_model_without_a_tokenizer() {
    let scratch = Scratch::new();
    scratch.write("rows.jsonl", rows());
    let words = [
        "error: the rows are text, and `",
        "model` has no `tokenizer.json`",
        "hint: rows of `tokens` (`input_ids`",
    ];
    scratch.train_refused(1, &ROWS, &words);
    scratch.refused(1, &[&["preview", "recipe.toml"][..], &ROWS].concat(), &words[..2]);
    // A plan needs no data.
    let ended = scratch.run(&[&["plan", "recipe.toml"][..], &ROWS].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(ended.stdout.contains("planned without data (the rows are text, and `"), "{}", ended.stdout);
}

/// While it is tokenized a document takes much more than its text: the plan is made for training, so a run whose data
/// took more says so.
#[test]
fn long_documents_that_take_more_than_the_plan_are_named() {
    let scratch = scratch();
    let document = "what is the answer one two three ".repeat(4_000);
    scratch.write("long.jsonl", format!("{}\n", json!({"text": document})).repeat(16));
    let (ended, peak_bytes) = scratch.run_measured(&[
        "train",
        "recipe.toml",
        "output.dir=run",
        "data.train=long.jsonl",
        "data.format=text",
        "train.batch=256",
        "train.steps=2",
        "memory.threads=16",
        "memory.budget=256MiB",
    ]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let planned_bytes = scratch.json("run/plan.json")["peak_bytes"].as_u64().unwrap();
    let is_above = peak_bytes.is_some_and(|peak_bytes| peak_bytes > planned_bytes);
    let is_named = ended.stderr.contains("warning: preparing the data took ");
    assert!(!is_above || is_named, "{peak_bytes:?} of {planned_bytes}: {}", ended.stderr);
}
