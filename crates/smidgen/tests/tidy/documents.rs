//! Documents that are generated, or have generated parts: the commands, and the rows of the page on memory.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites them.

use serde_json::Value;
use smidgen::commands::command;
use smidgen::report::command_reference::render_command_reference;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn path_of(document: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(document)
}

fn read(document: &str) -> String {
    fs::read_to_string(path_of(document)).unwrap_or_else(|error| panic!("`{document}`: {error}"))
}

/// Holds a document to what the code makes of it, or rewrites it.
fn expect_document(document: &str, expected: &str) {
    expect_test::expect_file![path_of(document)].assert_eq(expected);
}

fn missing<T>(what: &str) -> T {
    panic!("the results have no `{what}`")
}

#[test]
fn the_command_reference_is_what_the_code_says() {
    let head = "# Commands\n\n\
        This page is generated from the definitions of the command line; `smidgen COMMAND --help` says the same.\n\
        Data goes to stdout and talk to stderr.\n\
        Exit codes: 0 done, 1 failed or interrupted, 2 the recipe or the command is wrong.\n\
        Lines are at most 80 columns wide, or `COLUMNS` where it is set; `NO_COLOR` switches colour off, `CLICOLOR_FORCE` on.\n";
    expect_document("docs/commands.md", &format!("{head}{}", render_command_reference(&command())));
}

/// What each way to save memory took and cost, from the committed results.
#[test]
fn the_rows_of_the_page_on_memory_are_what_the_results_say() {
    let results = |path: &str| -> Value { serde_json::from_str(&read(path)).expect("results are JSON") };
    let (gpu, cpu) = (results("results/memory-h200.json"), results("results/memory-cpu.json"));
    let (shapes, grid) = (results("results/gpu-h200.json"), results("results/grid-cpu.json"));
    let gib = |bytes: f64| format!("{:.2} GiB", bytes / f64::from(1 << 30));
    let mib = |bytes: f64| format!("{:.1} MiB", bytes / f64::from(1 << 20));
    let on_gpu = |name: &str| {
        let rows = gpu["rows"].as_array().expect("rows in order");
        let row = rows.iter().find(|row| row["name"] == name && row["model"] == "qwen2.5-7b");
        row.unwrap_or_else(|| missing(name)).clone()
    };
    let on_cpu = |name: &str| cpu["rows"].get(name).unwrap_or_else(|| missing(name)).clone();
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or_else(|| missing(key));
    let mut table = String::from(
        "| way | without | with | elsewhere | tokens/s without | with |\n|---|--:|--:|--:|--:|--:|\n",
    );
    let mut row =
        |name: &str, cells: [String; 5]| writeln!(table, "| {name} | {} |", cells.join(" | ")).unwrap();
    let speed = |row: &Value| format!("{:.0}", number(row, "tokens_per_s"));
    let all = "everything on the device";
    let again = "layers computed again";
    for (name, before, after) in [
        ("layers computed again", all, again),
        ("inputs of layers in pinned memory", again, "layers computed again, activations away"),
        ("weights, embedding and head in pinned memory", again, "layers computed again, weights away"),
        ("moments in pinned memory", again, "layers computed again, moments away"),
        ("all of these in pinned memory", again, "layers computed again, all of it away"),
        ("tiles of 4096 tokens", again, "the same, in tiles of 4096 tokens"),
        ("the solver, 6 GiB", all, "budget 6 GiB"),
    ] {
        let (before, after) = (on_gpu(before), on_gpu(after));
        let elsewhere = gib(number(&after, "elsewhere_bytes"));
        let planned = |row: &Value| gib(number(row, "planned_bytes"));
        row(
            &format!("GPU: {name}"),
            [planned(&before), planned(&after), elsewhere, speed(&before), speed(&after)],
        );
    }
    let shape = |name: &str| shapes["rows"][name]["rounds"][0]["chosen"].clone();
    let (bf16, nf4) = (shape("bf16-4x2048"), shape("nf4-4x2048-none"));
    let planned = |row: &Value| gib(number(row, "planned_bytes"));
    row(
        "GPU: base in nf4 instead of bf16, 4 x 2048 tokens",
        [planned(&bf16), planned(&nf4), String::new(), speed(&bf16), speed(&nf4)],
    );
    for (name, after) in [
        ("activations on disk", "activations on disk"),
        ("weights on disk", "weights on disk"),
        ("moments on disk", "moments on disk"),
        ("micro-batches of one sample", "micro-batches of one sample"),
        ("the solver, 150 MiB", "budget 150 MiB"),
    ] {
        let (before, after) = (on_cpu(all), on_cpu(after));
        let elsewhere = mib(number(&after, "disk_bytes"));
        let measured = |row: &Value| mib(number(row, "measured_bytes"));
        row(
            &format!("CPU: {name}"),
            [measured(&before), measured(&after), elsewhere, speed(&before), speed(&after)],
        );
    }
    let of_grid = |run: &str| {
        let rows = grid["rows"].as_array().expect("rows in order");
        rows.iter().find(|row| row["run"] == run).unwrap_or_else(|| missing(run)).clone()
    };
    let of_grid = |optimizer: &str| {
        mib(number(
            &of_grid(&format!("llama as-stored lora {optimizer} 8x512 auto 3 steps")),
            "measured_bytes",
        ))
    };
    row(
        "CPU: moments in 8 bits, a model of a few megabytes",
        [of_grid("adamw"), of_grid("adamw-8bit"), String::new(), String::new(), String::new()],
    );
    let text = read("docs/memory.md");
    let (begin, end) = ("<!-- techniques:begin -->\n", "<!-- techniques:end -->");
    let (head, rest) = text.split_once(begin).expect("the rows have a place");
    let (_, tail) = rest.split_once(end).expect("the rows have an end");
    expect_document("docs/memory.md", &format!("{head}{begin}{table}{end}{tail}"));
}

/// What looking at memory costs: the sentence is made of the results, and every run of a model is below half a percent.
#[test]
fn the_cost_of_looking_is_what_the_results_say() {
    let results: Value = serde_json::from_str(&read("results/monitor.json")).expect("results are JSON");
    let runs = results.as_object().expect("results by device and recipe");
    let number = |run: &Value, key: &str| run[key].as_f64().unwrap_or_else(|| missing(key));
    // The fixture's steps are of microseconds: there the cost shows, and means nothing.
    for (name, run) in runs.iter().filter(|(name, _)| !name.ends_with(" fixture")) {
        assert!(number(run, "monitor_of_time") < 0.005, "{name}: {run}");
    }
    let [cpu, gpu] = ["cpu smollm2-135m", "h200 smollm2-135m"].map(|name| {
        let run = runs.get(name).unwrap_or_else(|| missing(name));
        (number(run, "monitor_us"), 100.0 * number(run, "monitor_of_time"))
    });
    let sentence = format!(
        "Looking takes {:.0} microseconds, {:.3} % of the time of steps of SmolLM2-135M on two cores, and {:.0} \
         microseconds, {:.3} %, on an H200 (`results/monitor.json`).",
        cpu.0, cpu.1, gpu.0, gpu.1
    );
    assert!(read("docs/run-folder.md").contains(&sentence), "`docs/run-folder.md` is to say:\n{sentence}");
}
