//! Where rows come from, from the command line: columns, limits, a split, sources that are mixed, bad rows, long rows.
//!
//! Rows are tokens, which need no tokenizer; `text_data.rs` has a tokenizer of words for the rest.

use crate::scratch::Scratch;
use crate::text_data::with_tokenizer;
use serde_json::{Value, json};

fn preview(scratch: &Scratch, overrides: &[&str]) -> Value {
    let ended = scratch.run(&[&["preview", "recipe.toml", "--json"][..], overrides].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn preview_text(scratch: &Scratch, overrides: &[&str]) -> String {
    let ended = scratch.run(&[&["preview", "recipe.toml"][..], overrides].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    scratch.neutral(&ended.stdout)
}

#[test]
fn columns_of_other_names_train_the_same() {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    let rows = |prompt: &str, completion: &str| {
        let row = |number: usize| {
            let answer = ["one", "two", "three a"][number % 3];
            json!({"id": number, prompt: "what is the answer", completion: answer}).to_string() + "\n"
        };
        (0..8).map(row).collect::<String>()
    };
    scratch.write("named.jsonl", rows("prompt", "completion"));
    scratch.write("asked.jsonl", rows("question", "answer"));
    scratch.write("other.jsonl", rows("title", "body"));
    scratch.train("named", &["data.train=named.jsonl", "data.format=auto"]);
    scratch.train("asked", &["data.train=asked.jsonl", "data.format=auto"]);
    let columns = "data.columns={prompt=title,completion=body}";
    let other = ["data.train=other.jsonl", "data.format=auto", columns];
    scratch.train("other", &other);
    assert!(scratch.adapter("asked") == scratch.adapter("named"));
    assert!(scratch.adapter("other") == scratch.adapter("named"));
    let said = preview_text(&scratch, &other);
    assert!(
        said.contains(
            "format     prompt-completion: `data.columns` takes `title` as `prompt`, `body` as `completion`"
        ),
        "{said}"
    );
    let said = preview_text(&scratch, &["data.train=asked.jsonl", "data.format=auto"]);
    assert!(said.contains("rows have `question` and `answer`, which are taken as `prompt`"), "{said}");
    let job = scratch.text("other/job.toml");
    assert!(job.contains("columns = { prompt = \"title\", completion = \"body\" }\n"), "{job}");

    let words = [
        "`data.columns`: no row has the column `titel`, found `id`, `title`, `body`",
        "hint: did you mean `prompt = \"title\"`?",
    ];
    let wrong = ["data.train=other.jsonl", "data.format=auto", "data.columns={prompt=titel,completion=body}"];
    scratch.train_refused(1, &wrong, &words);
    let words = ["`data.columns` must be a table of roles", "`promt` is not a role: did you mean `prompt`?"];
    scratch.train_refused(2, &["data.columns={promt=title}"], &words);
}

#[test]
fn a_list_without_brackets_has_a_hint() {
    let scratch = Scratch::new();
    scratch.write("other.jsonl", scratch.text("data.jsonl"));
    let words = [
        "no file matches `",
        "data.jsonl,other.jsonl`",
        "hint: write several files as a list: `[data.jsonl,other.jsonl]`",
    ];
    scratch.train_refused(1, &["data.train=data.jsonl,other.jsonl"], &words);
    // A name with a comma is a name.
    scratch.write("one,two.jsonl", scratch.text("data.jsonl"));
    assert_eq!(preview(&scratch, &["data.train=one,two.jsonl"])["rows"]["read"], 10);
}

#[test]
fn a_limit_uses_the_first_rows() {
    let scratch = Scratch::new();
    let rows = scratch.text("data.jsonl");
    scratch.write("first.jsonl", rows.lines().take(5).map(|row| format!("{row}\n")).collect::<String>());
    scratch.train("limited", &["data.limit=5"]);
    scratch.train("first", &["data.train=first.jsonl"]);
    assert!(scratch.adapter("limited") == scratch.adapter("first"));
    assert_eq!(preview(&scratch, &["data.limit=5"])["rows"]["read"], 5);
    assert_eq!(preview(&scratch, &["data.limit=50"])["rows"]["read"], 10);
}

#[test]
fn a_split_is_evaluated_and_not_trained_on() {
    let scratch = Scratch::new();
    let split = ["data.split=0.25", "train.eval_every=3"];
    let shown = preview(&scratch, &split);
    assert_eq!(shown["rows"]["held_out"], 3);
    assert_eq!((&shown["rows"]["kept"], &shown["eval_samples"]), (&json!(7), &json!(3)));
    assert_eq!(shown["warnings"], json!([]));
    assert!(preview_text(&scratch, &split).contains("10 rows read, 3 held out for evaluation, 7 kept"));
    scratch.train("split", &split);
    let evaluated: Vec<Value> =
        scratch.metrics("split").into_iter().filter(|row| row.get("eval_loss").is_some()).collect();
    assert_eq!(evaluated.len(), 2);
    assert_eq!(evaluated[0]["eval_samples"], 3);
    // The same rows on each side as two files.
    let all = scratch.text("data.jsonl");
    let rows: Vec<&str> = all.lines().collect();
    let shown = preview(&scratch, &[&split[..], &["--rows", "10"]].concat());
    let places = shown["samples"].as_array().unwrap().iter();
    let lines: Vec<usize> = places
        .map(|sample| sample["place"].as_str().unwrap().rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(lines.len(), 7);
    let (train, eval): (Vec<usize>, Vec<usize>) = (1..=10).partition(|line| lines.contains(line));
    let write = |name: &str, lines: &[usize]| {
        scratch.write(name, lines.iter().map(|line| format!("{}\n", rows[line - 1])).collect::<String>());
    };
    write("train.jsonl", &train);
    write("eval.jsonl", &eval);
    scratch.train("files", &["data.train=train.jsonl", "data.eval=eval.jsonl", "train.eval_every=3"]);
    assert!(scratch.adapter("split") == scratch.adapter("files"));
    let of_files = scratch.metrics("files");
    let of_files = of_files.iter().filter_map(|row| row.get("eval_loss"));
    assert_eq!(
        of_files.collect::<Vec<_>>(),
        evaluated.iter().map(|row| &row["eval_loss"]).collect::<Vec<_>>()
    );
    // Another seed holds out other rows, and an evaluation afterwards finds the rows of the run again.
    assert_ne!(
        preview(&scratch, &["data.split=0.25", "train.seed=8", "--rows", "10"])["samples"],
        shown["samples"]
    );
    let ended = scratch.run(&["eval", "split", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let eval: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(eval["rows"], 3, "{eval}");
    // Other rows replace those that the run held out.
    scratch.write_rows("other.jsonl", 2, 12);
    let ended = scratch.run(&["eval", "split", "data.eval=other.jsonl", "--json"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let eval: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(eval["rows"], 2, "{eval}");
}

#[test]
fn a_split_that_leaves_nothing_is_refused() {
    let scratch = Scratch::new();
    let words = ["`data.split = 0.95` holds out 10 of 10 rows, which leaves none to train on", "hint: lower"];
    scratch.train_refused(1, &["data.split=0.95"], &words);
    scratch.write("eval.jsonl", scratch.text("data.jsonl"));
    let words = ["`data.split` and `data.eval` exclude each other", "hint: keep one of them"];
    scratch.train_refused(2, &["data.split=0.1", "data.eval=eval.jsonl"], &words);
    scratch.train_refused(
        2,
        &["data.split=1.0"],
        &["`data.split` must be a number of at least 0 and below 1"],
    );
    with_tokenizer(&scratch);
    let words = ["the rows of `data.train` have the format `tokens`, which has no question and no answer"];
    scratch.train_refused(2, &["data.split=0.1", "eval.task=choice", "train.eval_every=3"], &words);
}

/// A recipe with two sources in addition to `data.train`, one of them of text.
fn mixed() -> Scratch {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    scratch.write_rows("more.jsonl", 4, 12);
    scratch.write("asked.csv", "q;a\nwhat is the answer;one\nwhat is one;two\n");
    let recipe = scratch.text("recipe.toml") + MIX;
    scratch.write("recipe.toml", recipe);
    scratch
}

const MIX: &str = "
[[data.mix]]
path = \"more.jsonl\"
weight = 0.5
format = \"tokens\"

[[data.mix]]
path = [\"asked.csv\"]
weight = 0.5
columns = { prompt = \"q\", completion = \"a\" }
";

#[test]
fn sources_are_mixed_by_weight() {
    let scratch = mixed();
    let shown = preview(&scratch, &[]);
    let sources = shown["sources"].as_array().unwrap();
    let of = |key: &str| sources.iter().map(|source| source[key].clone()).collect::<Vec<Value>>();
    assert_eq!(of("name"), [json!("data.jsonl"), json!("more.jsonl"), json!("asked.csv")]);
    assert_eq!(of("format"), [json!("tokens"), json!("tokens"), json!("prompt-completion")]);
    assert_eq!(of("samples"), [json!(10), json!(4), json!(2)]);
    assert_eq!(of("samples_per_epoch"), [json!(8), json!(4), json!(4)]);
    let said = preview_text(&scratch, &[]);
    assert!(
        said.contains("source     asked.csv: 2 samples, 4 per epoch\nformat     prompt-completion: "),
        "{said}"
    );
    // Without `data.train` too, and a job reads back to the same sources.
    scratch.train("run", &["train.steps=3"]);
    let job = scratch.text("run/job.toml");
    assert!(job.contains("weight = 0.5, format = \"tokens\", columns = {} }, { path = ["), "{job}");
    scratch.write("only.toml", scratch.text("recipe.toml").replace("train = \"data.jsonl\"\n", ""));
    let ended = scratch.run(&["train", "only.toml", "output.dir=only", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(!scratch.text("only/job.toml").contains("[data]\ntrain = "));
    let ended = scratch.run(&["train", "only/job.toml", "output.dir=again", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert!(scratch.adapter("only") == scratch.adapter("again"));
}

#[test]
fn a_mixture_is_resumed_exactly() {
    let scratch = mixed();
    let run = ["train.steps=14", "train.save_every=5", "train.keep=9"];
    scratch.train("clean", &run);
    scratch.train("run", &run);
    scratch.forget_end("run", 5);
    let ended = scratch.train("run", &[&run[..], &["--resume"]].concat());
    assert!(ended.stderr.contains("continuing after step 5\n"), "{}", ended.stderr);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
}

#[test]
fn a_mixture_that_makes_no_sense_is_refused() {
    let scratch = mixed();
    let refuse =
        |value: &str, words: &[&str]| scratch.train_refused(2, &[&format!("data.mix={value}")], words);
    refuse("[{path=a.jsonl}]", &["must be a list of tables", "hint: a source needs a `weight` above 0"]);
    refuse("[{weight=1}]", &["hint: a source needs a `path`"]);
    refuse("[{path=a.jsonl,weight=-1}]", &["hint: `weight` of a source must be a number above 0"]);
    refuse("[{path=a.jsonl,weight=1,wieght=1}]", &["hint: a source has `path`, `weight`, `format` and"]);
    refuse("[{path=a.jsonl,weight=1,format=xml}]", &["hint: `format` of a source must be one of"]);
    refuse("[{path=a.jsonl,weight=1,columns={x=y}}]", &["hint: `x` is not a role"]);
    refuse("a.jsonl", &["must be a list of tables with `path` and `weight`"]);
    // An override replaces all of them.
    let shown = preview(&scratch, &["data.mix=[{path=asked.csv,weight=2,columns={prompt=q,completion=a}}]"]);
    assert_eq!(shown["sources"][1]["samples_per_epoch"], 8);
    assert_eq!(preview(&scratch, &["data.mix=[]"])["sources"].as_array().unwrap().len(), 1);
    scratch.write("more.jsonl", "{\"input_ids\":[1]}\n");
    scratch.train_refused(1, &[], &["more.jsonl`: no row can be trained on", "hint: leave the source out"]);
}

#[test]
fn bad_rows_are_reported_together_or_skipped() {
    let scratch = Scratch::new();
    let sound = scratch.text("data.jsonl");
    scratch.train("clean", &[]);
    let bad = "{\"input_ids\":[1,2\n{\"input_ids\":[1,999]}\n7\n{\"input_ids\":[1,998]}\n{\"text\":\"a\"}\n";
    scratch.write("data.jsonl", format!("{bad}{sound}"));
    scratch.write("other.jsonl", format!("{sound}nonsense\n"));
    let words = [
        "error: `data.train`: 5 of 15 rows are bad\n",
        "data.jsonl`: 5 of 15 rows\n",
        "    1 row: broken JSON: EOF while parsing a list (line 1)\n",
        "    2 rows: `input_ids[N]` is N, the model's vocabulary is N to N (lines 2, 4)\n",
        "    1 row: is a number, not an object with named fields (line 3)\n",
        "    1 row: looks like text, line N like tokens (line 5)\n",
        "`data.on_bad_row = \"skip\"` leaves bad rows out",
    ];
    scratch.train_refused(1, &[], &words);
    let skip = ["data.on_bad_row=skip"];
    let ended = scratch.train("skipped", &skip);
    assert!(scratch.adapter("skipped") == scratch.adapter("clean"));
    let words =
        ["data.jsonl`: 5 of 15 rows skipped: 1 × broken JSON", "15 rows read, 5 skipped as bad, 10 kept\n"];
    assert!(words.iter().all(|words| ended.stderr.contains(words)), "{}", ended.stderr);
    let shown = preview(&scratch, &skip);
    assert_eq!((&shown["rows"]["bad"], &shown["rows"]["kept"]), (&json!(5), &json!(10)));
    assert_eq!(shown["warnings"].as_array().unwrap().len(), 2);
    // Each file has its own count.
    let both = preview(&scratch, &["data.on_bad_row=skip", "data.train=[data.jsonl,other.jsonl]"]);
    let warnings = both["warnings"].to_string();
    assert!(
        warnings.contains("data.jsonl`: 5 of 15") && warnings.contains("other.jsonl`: 1 of 11"),
        "{warnings}"
    );
    scratch.write("data.jsonl", "nonsense\n{\"input_ids\":[1,999]}\n");
    scratch.train_refused(1, &skip, &["`data.train`: all 2 rows are bad"]);
    // One is told as it always was.
    scratch.write("data.jsonl", format!("{sound}{{\"input_ids\":[1,999]}}\n"));
    scratch.train_refused(1, &[], &["data.jsonl` line 11: `input_ids[1]` is 999", "hint: tokenize the data"]);
}

#[test]
fn damaged_bytes_and_open_quotes_are_bad_rows() {
    let scratch = Scratch::new();
    let sound = scratch.text("data.jsonl");
    scratch.train("clean", &[]);
    let mut bytes = b"{\"input_ids\":[1,2\n{\"input_ids\":[1],\"a\":\"\xFF\"}\n".to_vec();
    bytes.extend_from_slice(sound.as_bytes());
    bytes.extend_from_slice(b"\xE4\n");
    scratch.write("data.jsonl", bytes);
    let words = [
        "error: `data.train`: 3 of 13 rows are bad\n",
        "    1 row: broken JSON: EOF while parsing a list (line 1)\n",
        "    2 rows: is not UTF-8 (lines 2, 13)\n",
        "`data.on_bad_row = \"skip\"` leaves bad rows out",
    ];
    scratch.train_refused(1, &[], &words);
    scratch.train("skipped", &["data.on_bad_row=skip"]);
    assert!(scratch.adapter("skipped") == scratch.adapter("clean"));
    // Lines after an open quote are counted as lost.
    with_tokenizer(&scratch);
    scratch.write("rows.csv", b"id,text\n1,one two\n2,\xFFtwo\n3,\"three a\n4,b\n5,c\n");
    let table = ["data.train=rows.csv", "data.format=auto"];
    let words = [
        "4 of 5 rows are bad\n",
        "1 row: is not UTF-8 (line 3)",
        "1 row: a quote that opens in this row is never closed (line 4)",
        "2 rows: is lost: it comes after a quote that opens in line N and is never closed (lines 5, 6)",
    ];
    scratch.train_refused(1, &table, &words);
    let shown = preview(&scratch, &[&table[..], &["data.on_bad_row=skip"]].concat());
    assert_eq!((&shown["rows"]["bad"], &shown["rows"]["kept"]), (&json!(4), &json!(1)));
    // What ends a file is reported with the rows before it.
    scratch.write("data.jsonl", format!("{{\"input_ids\":[1,999]}}\n{sound}[1,\n"));
    let words = ["`input_ids[1]` is 999", "reading ended after it: ", "starts an array"];
    scratch.train_refused(1, &[], &words);
}

#[test]
fn long_texts_are_cut_into_pieces_that_are_all_used() {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    // 7 and 3 tokens; with EOS 8 and 4.
    scratch.write("rows.jsonl", "{\"text\": \"what is the answer one two three\"}\n{\"text\": \"a b c\"}\n");
    let text = ["data.train=rows.jsonl", "data.format=auto", "data.max_tokens=5", "--rows", "9"];
    let shown = preview(&scratch, &text);
    let ids: Vec<&Value> = shown["samples"].as_array().unwrap().iter().map(|sample| &sample["ids"]).collect();
    assert_eq!(ids, [&json!([6, 7, 8, 9, 10]), &json!([11, 12, 2]), &json!([13, 14, 15, 2])]);
    let rows = &shown["rows"];
    assert_eq!((&rows["chunked"], &rows["pieces"], &rows["truncated"]), (&json!(1), &json!(2), &json!(0)));
    assert_eq!(shown["cut_tokens"], 0);
    assert!(preview_text(&scratch, &text).contains("rows       2 rows read, 1 cut into 2 pieces, 2 kept\n"));
    // A piece of one token would teach nothing: the piece before it is shorter.
    let shown = preview(&scratch, &[&text[..2], &["data.max_tokens=7"]].concat());
    let lengths: Vec<usize> =
        shown["samples"].as_array().unwrap().iter().map(|it| it["ids"].as_array().unwrap().len()).collect();
    assert_eq!(lengths, [6, 2, 4]);
    for (overflow, kept, said) in [("truncate", 2, "1 truncated"), ("drop", 1, "1 dropped as too long")] {
        let overflow = format!("data.overflow={overflow}");
        let shown = preview(&scratch, &[&text[..3], &[overflow.as_str()]].concat());
        assert_eq!(shown["rows"]["kept"], kept);
        assert!(shown["warnings"].to_string().contains(said), "{}", shown["warnings"]);
    }
    scratch.train("run", &text[..3]);
    // Other formats lose their end, unless the recipe says otherwise.
    assert_eq!(preview(&scratch, &["data.max_tokens=20"])["rows"]["truncated"], 5);
    let shown = preview(&scratch, &["data.max_tokens=20", "data.overflow=chunk"]);
    assert_eq!((&shown["rows"]["chunked"], &shown["cut_tokens"]), (&json!(5), &json!(0)));
}

#[test]
fn what_changes_tokens_has_tokens_of_its_own_in_the_cache() {
    let scratch = Scratch::new();
    with_tokenizer(&scratch);
    let rows = "{\"q\":\"what is one\",\"a\":\"two a b c\",\"text\":\"one two three a b c a\"}\n";
    scratch.write("rows.jsonl", rows.repeat(6));
    let cached = || std::fs::read_dir(scratch.cache().join("tokens")).map_or(0, Iterator::count);
    let base = ["data.train=rows.jsonl", "data.format=auto"];
    for (count, more) in [
        (1, &[][..]),
        (1, &["data.split=0.2"]),
        (2, &["data.limit=3"]),
        (3, &["data.columns={prompt=q,completion=a}"]),
        (4, &["data.columns={prompt=q,completion=text}"]),
        (5, &["data.max_tokens=5"]),
        (6, &["data.max_tokens=5", "data.overflow=truncate"]),
        (7, &["data.on_bad_row=skip"]),
        (8, &["data.mix=[{path=rows.jsonl,weight=2}]"]),
        // The weight only orders samples.
        (8, &["data.mix=[{path=rows.jsonl,weight=3}]"]),
    ] {
        preview(&scratch, &[&base[..], more].concat());
        assert_eq!(cached(), count, "{more:?}");
        let again =
            [preview(&scratch, &[&base[..], more].concat()), preview(&scratch, &[&base[..], more].concat())];
        assert_eq!(again[0], again[1], "{more:?}");
        assert_eq!(cached(), count, "{more:?}");
    }
}
