//! Data that cannot be trained on: exit code 1, the file and line, a remedy, nothing written.
//!
//! Single rows without a supervised token are dropped, counted and told, not refused.

use crate::scratch::Scratch;

fn refused(rows: &str, words: &[&str]) {
    let scratch = Scratch::new();
    scratch.write("data.jsonl", rows);
    scratch.train_refused(1, &[], words);
}

#[test]
fn files_that_are_not_there() {
    let scratch = Scratch::new();
    let relative = "paths in a recipe are relative to the recipe";
    let words = ["`data.train`: no file matches `", "absent.jsonl`", relative];
    scratch.train_refused(1, &["data.train=absent.jsonl"], &words);
    scratch.train_refused(1, &["data.train=[data.jsonl,absent*.jsonl]"], &["absent*.jsonl"]);
    let words = ["`data.eval`: no file matches `", "absent.jsonl`", relative];
    scratch.train_refused(1, &["data.eval=absent.jsonl", "train.eval_every=1"], &words);
    scratch.write("rows.bin", "a,b\n");
    let words = ["rows.bin` is none of `.json`, `.jsonl`, ", "hint: write the rows as `.jsonl`"];
    scratch.train_refused(1, &["data.train=rows.bin"], &words);
    scratch.train_refused(
        1,
        &["data.train=model"],
        &["/model/config.json` has rows", "hint: name what is meant by a pattern"],
    );
}

/// What has no end is refused before it is opened.
#[cfg(unix)]
#[test]
fn devices_and_pipes_are_no_files() {
    use std::os::unix::fs::symlink;
    let scratch = Scratch::new();
    let made = std::process::Command::new("mkfifo").arg(scratch.path("pipe.jsonl")).status();
    let mut names = vec!["zeros.jsonl", "zeros.csv", "zeros.txt"];
    names.iter().for_each(|name| symlink("/dev/zero", scratch.path(name)).unwrap());
    names.extend(made.is_ok_and(|status| status.success()).then_some("pipe.jsonl"));
    // Not compared with the files of the folder before, as other refusals are: that would read them.
    let refused = |arguments: &[&str], words: &str| {
        let ended = scratch.run(arguments);
        assert!(ended.code.is_some_and(|code| code > 0) && ended.stderr.contains(words), "{}", ended.stderr);
    };
    for name in names {
        let train = format!("data.train={name}");
        refused(
            &["train", "recipe.toml", "data.format=auto", &train],
            &format!("{name}` is a device, a pipe or a socket, not a file"),
        );
    }
    symlink("/dev/zero", scratch.path("zeros.toml")).unwrap();
    refused(&["plan", "zeros.toml"], "cannot read the recipe `zeros.toml`: it is not a file");
    refused(&["import", "zeros.toml"], "it is not a file");
    scratch.write("large.toml", vec![b'#'; 300 << 10]);
    refused(&["plan", "large.toml"], "it has 307200 bytes, a recipe has at most 262144");
    refused(&["generate", "model", "--prompt-file", "zeros.txt"], "zeros.txt` is not a file");
}

/// Names are compared with a set: with a list, this header would take minutes.
#[test]
fn a_header_of_many_columns() {
    let scratch = Scratch::new();
    let names: Vec<String> = (0..300_000).map(|column| format!("c{column}")).collect();
    scratch.write("wide.csv", names.join(",") + ",c7\n");
    let words = ["wide.csv` line 1: the header has the column `c7` twice"];
    scratch.train_refused(1, &["data.train=wide.csv", "data.format=auto"], &words);
}

#[test]
fn files_without_rows() {
    refused("", &["`data.train`: no rows", "hint: "]);
    refused("\n\n", &["`data.train`: no rows"]);
    let scratch = Scratch::new();
    scratch.write("rows.json", "[]");
    scratch.train_refused(1, &["data.train=rows.json"], &["`data.train`: no rows"]);
    scratch.train_refused(1, &["data.eval=rows.json", "train.eval_every=1"], &["`data.eval`: no rows"]);
}

#[test]
fn tokens_and_labels_outside_the_vocabulary() {
    let sound = "{\"input_ids\":[1,2,3]}\n";
    refused(
        &format!("{sound}{{\"input_ids\":[1,211,3]}}\n"),
        &["data.jsonl` line 2: `input_ids[1]` is 211, the model's vocabulary is 0 to 210", "hint: tokenize"],
    );
    refused(
        &format!("{sound}\n{{\"input_ids\":[1,2,3],\"labels\":[1,2,-99]}}\n"),
        &["data.jsonl` line 3: `labels[2]` is -99, neither -100 nor in the model's vocabulary", "with -100"],
    );
    refused("{\"input_ids\":[1,2,3],\"labels\":[1,2,5000]}\n", &["line 1: `labels[2]` is 5000"]);
}

#[test]
fn rows_of_another_shape() {
    refused("{\"text\":\"hello\"}\n", &["line 1 looks like text, but is read as tokens", "hint: "]);
    refused("{\"input_ids\":[1,2,3],\"labels\":[1,2]}\n", &["`input_ids` has 3 entries, `labels` has 2"]);
    refused("{\"input_ids\":[1,2,3],\"labels\":\"x\"}\n", &["line 1: `labels` is "]);
    refused("{\"input_ids\":[1,2\n", &["line 1, column ", "broken JSON"]);
    refused("[[1,2]]\n", &["line 1 is a list, not an object with named fields", "hint: a row is an object"]);
}

#[test]
fn nothing_supervised_anywhere() {
    let row = "{\"input_ids\":[1,2,3],\"labels\":[1,-100,-100]}\n";
    let words =
        ["`data.train`: no supervised token anywhere: 2 rows read, 2 dropped", "hint: `labels` are -100"];
    refused(&row.repeat(2), &words);
    let scratch = Scratch::new();
    let mut labels = ["-100"; 40];
    labels[39] = "1";
    scratch.write(
        "data.jsonl",
        format!("{{\"input_ids\":[{}],\"labels\":[{}]}}\n", ["1"; 40].join(","), labels.join(",")),
    );
    let words = ["truncation left no supervised token", "raise `data.max_tokens`"];
    scratch.train_refused(1, &["data.max_tokens=39"], &words);
    scratch.train("run", &["data.max_tokens=40", "train.batch=1", "train.steps=1"]);
}

#[test]
fn rows_that_cannot_train_are_dropped_and_counted() {
    let scratch = Scratch::new();
    let sound = scratch.text("data.jsonl");
    scratch.train("clean", &[]);
    let broken =
        "{\"input_ids\":[1,2,3],\"labels\":[1,-100,-100]}\n{\"input_ids\":[1]}\n{\"input_ids\":[]}\n";
    scratch.write("data.jsonl", format!("{sound}{broken}"));
    let ended = scratch.train("dropped", &[]);
    let warning = "warning: `data.train`: 13 rows read, 2 dropped with fewer than two tokens, \
                   1 dropped without a supervised token, 10 kept\n";
    assert!(ended.stderr.starts_with(warning), "{}", ended.stderr);
    assert!(scratch.adapter("clean") == scratch.adapter("dropped"));
    let ended = scratch.run(&["plan", "recipe.toml"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), warning));
    // The same of evaluation data.
    scratch.write("eval.jsonl", broken.to_string() + &sound);
    scratch.write("data.jsonl", sound);
    let ended = scratch.train("eval", &["data.eval=eval.jsonl", "train.eval_every=6"]);
    assert!(ended.stderr.starts_with("warning: `data.eval`: 13 rows read, "), "{}", ended.stderr);
    assert_eq!(scratch.metrics("eval").last().unwrap()["eval_samples"], 10);
}

#[test]
fn samples_that_are_too_long() {
    let scratch = Scratch::new();
    let words = [
        "line 1 has 30 tokens, `data.max_tokens` is 20; 5 of 10 rows are longer",
        "hint: `data.max_tokens = 40` keeps every row whole",
    ];
    scratch.train_refused(1, &["data.max_tokens=20", "data.overflow=error"], &words);
    let ended = scratch.train("dropped", &["data.max_tokens=20", "data.overflow=drop"]);
    assert!(ended.stderr.contains("10 rows read, 5 dropped as too long, 5 kept"), "{}", ended.stderr);
    let ended = scratch.train("cut", &["data.max_tokens=20"]);
    assert!(ended.stderr.contains("10 rows read, 5 truncated, 10 kept"), "{}", ended.stderr);
    let words = ["no rows left: 10 rows read, 10 dropped as too long", "`data.max_tokens = 40`"];
    scratch.train_refused(1, &["data.max_tokens=3", "data.overflow=drop"], &words);
}
