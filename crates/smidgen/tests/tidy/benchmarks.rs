//! Tables of figures in the documents, made from the files in `results/`.
//!
//! Every table names the version and the machine that it was measured with, and those of the README may not be old.
//! `UPDATE_EXPECT=1 cargo test -p smidgen --test tidy` rewrites them.

use crate::{expect_file, plan_recipe, read, with_block};
use regex::Regex;
use serde_json::Value;
use smidgen::internal::{fold, plain, render_table};
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

/// Figures of the README may be this many minor versions older than the program.
const MOST_MINOR_VERSIONS: u64 = 2;

fn results(name: &str) -> Value {
    let path = format!("results/{name}.json");
    serde_json::from_str(&read(&path)).unwrap_or_else(|error| panic!("`{path}`: {error}"))
}

fn missing<T>(what: &str) -> T {
    panic!("the results have no `{what}`")
}

fn text<'a>(results: &'a Value, path: &str) -> &'a str {
    results.pointer(path).and_then(Value::as_str).unwrap_or_else(|| missing(path))
}

fn number(results: &Value, path: &str) -> f64 {
    results.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| missing(path))
}

fn gib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}

/// 13284 as `13,284`.
fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
    groups.join(",")
}

/// `smidgen 0.9.1 on one NVIDIA H200`.
fn measured_with(results: &Value) -> String {
    let version = ["/smidgen", "/versions/smidgen"].iter().find_map(|path| results.pointer(path)?.as_str());
    let version = version.unwrap_or_else(|| missing("smidgen"));
    let machine = match (results.pointer("/machine/gpu"), results.pointer("/machine/cpu")) {
        (Some(gpu), _) => format!("one {}", gpu.as_str().unwrap_or_else(|| missing("machine/gpu"))),
        (None, cpu) => {
            let threads = ["/setting/threads", "/machine/threads", "/machine/cores"];
            let threads = threads.iter().find_map(|path| results.pointer(path)?.as_u64());
            let cpu = cpu.and_then(Value::as_str).unwrap_or("a CPU");
            threads.map_or(cpu.to_owned(), |threads| format!("{threads} threads of {cpu}"))
        }
    };
    format!("{version} on {machine}")
}

// ── the README ─────────────────────────────────────────────────────────────────────────────────────

#[test]
fn the_figures_of_the_readme_are_what_the_code_and_the_results_say() {
    let readme = with_block(&read("README.md"), "example", &render_example(&results("memory-h200")));
    let readme = with_block(&readme, "plan", &render_plan_example());
    expect_file("README.md", &with_block(&readme, "gpu", &render_gpu_results(&results("gpu-h200"))));
}

#[test]
fn the_figures_of_the_readme_are_recent() {
    let version = Regex::new(r"smidgen (\d+\.\d+\.\d+)").unwrap();
    let readme = read("README.md");
    let measured: Vec<&str> =
        version.captures_iter(&readme).map(|found| found.get(1).unwrap().as_str()).collect();
    assert!(measured.len() >= 2, "the README's figures name their versions: {measured:?}");
    for measured in measured {
        let behind = minor_versions_behind(measured, env!("CARGO_PKG_VERSION"));
        assert!(
            behind <= MOST_MINOR_VERSIONS,
            "the README has figures of {measured}: measure again with benches/gpu_compare.py and benches/gpu_memory.py"
        );
    }
    assert_eq!(minor_versions_behind("0.7.0", "0.10.1"), 3);
    assert_eq!(minor_versions_behind("0.9.1", "0.9.3"), 0);
    assert_eq!(minor_versions_behind("0.9.1", "1.0.0"), u64::MAX);
}

/// Another major version is further than any number of minor ones.
pub fn minor_versions_behind(measured: &str, current: &str) -> u64 {
    let [measured, current] = [measured, current].map(|version| {
        let numbers: Vec<u64> = version.split('.').map(|number| number.parse().expect("a number")).collect();
        (numbers[0], numbers[1])
    });
    if measured.0 == current.0 { current.1.saturating_sub(measured.1) } else { u64::MAX }
}

/// The sentence that people remember.
fn render_example(results: &Value) -> String {
    let row = |name: &str| {
        let rows = results["rows"].as_array().expect("rows in order");
        let row = rows.iter().find(|row| row["name"] == name && row["model"] == "qwen2.5-7b");
        row.unwrap_or_else(|| missing(name))
    };
    let (small, whole) = (row("budget 6 GiB"), row("everything on the GPU"));
    // The budget holds the driver's context as well, which the rows do not.
    let taken = |row: &Value| gib(number(row, "/planned_bytes") + number(row, "/context_bytes"));
    assert!(taken(small) <= 6.0 && taken(whole) > 6.0);
    format!(
        "**Qwen2.5-7B in bf16, LoRA r={}, {} x {} tokens per step, in 6 GiB of an H200 with {:.0} GiB of host memory: \
         {} tokens/s.**\nThe same run without a budget takes {:.0} GiB of the H200 and reaches {} tokens/s.\nBoth were \
         measured with {} (random weights of that shape, `benches/gpu_memory.py`).\n",
        small["rank"],
        small["batch"],
        small["tokens"],
        gib(number(small, "/elsewhere_bytes")),
        grouped(number(small, "/tokens_per_s")),
        taken(whole),
        grouped(number(whole, "/tokens_per_s")),
        measured_with(results),
    )
}

/// The table of a plan, without the lines below it that explain the choices.
fn render_plan_example() -> String {
    const RECIPE: &str = "recipes/qwen2.5-7b-6gib.toml";
    let (job, planned) = plan_recipe(RECIPE, &["memory.profile=h200"]);
    let table = plain(&render_table(&job, &planned));
    let table: Vec<&str> = table.lines().take_while(|line| !line.is_empty()).collect();
    format!("```\n$ smidgen plan {RECIPE} memory.profile=h200\n{}\n```\n", fold(&table.join("\n"), 80))
}

/// The file that `benches/gpu_compare.py` writes, as a table.
fn render_gpu_results(results: &Value) -> String {
    let mut table = format!(
        "Measured with {}, driver {}; HF + PEFT: torch {}, transformers {}, peft {}.\n\n\
         | Qwen2.5 | tokens/s: smidgen | Unsloth | HF + PEFT | GiB: smidgen | Unsloth | HF + PEFT |\n|---|--:|--:|--:|--:|--:|--:|\n",
        measured_with(results),
        text(results, "/machine/driver"),
        text(results, "/versions/torch"),
        text(results, "/versions/transformers"),
        text(results, "/versions/peft"),
    );
    let rows = results["rows"].as_object().expect("rows by name");
    for (name, row) in rows.iter().filter(|(_, row)| row["row"]["unsloth"].is_object()) {
        let (round, recorded) = (&row["rounds"][0], &row["row"]["unsloth"]);
        // Unsloth computes in bf16.
        let in_bf16 = rows.get(&name.replace("fp8-", "bf16-")).map_or(round, |row| &row["rounds"][0]);
        let unsloth = &in_bf16["unsloth"];
        // The same command may have run for another row: the faster one counts.
        let runs = rows.values().map(|row| &row["rounds"][0]["peer"]);
        let same = runs.filter(|run| run["command"] == round["peer"]["command"]);
        let speed_of = |run: &&Value| run["tokens_per_s"].as_f64().unwrap_or(0.0);
        let peer = same.max_by(|a, b| speed_of(a).total_cmp(&speed_of(b))).expect("its own");
        let memory = |of: &Value, key: &str| of[key].as_f64().map(|gib| format!("{gib:.1}"));
        // Speed and memory as measured with smidgen, or else as recorded earlier.
        let cells = |run: &Value, recorded: &Value| match run["tokens_per_s"].as_f64() {
            Some(speed) => [Some(grouped(speed)), memory(run, "peak_allocated_gib")],
            None => [recorded["tokens_per_s"].as_f64().map(grouped), memory(recorded, "gib")]
                .map(|figure| figure.map(|figure| format!("{figure} \\*"))),
        };
        let [unsloth, peer] = [cells(unsloth, recorded), cells(peer, &row["row"]["peer"])]
            .map(|cells| cells.map(Option::unwrap_or_default));
        let own = number(round, "/chosen/planned_gib");
        let title = text(row, "/title");
        writeln!(
            table,
            "| {} | {} | {} | {} | {own:.1} | {} | {} |",
            title.strip_prefix("qwen2.5-").unwrap_or(title),
            grouped(number(round, "/chosen/tokens_per_s")),
            unsloth[0],
            peer[0],
            unsloth[1],
            peer[1],
        )
        .unwrap();
    }
    table
}

// ── docs/benchmarks.md ─────────────────────────────────────────────────────────────────────────────

#[test]
fn the_tables_of_the_page_on_benchmarks_are_what_the_results_say() {
    let mut page = read("docs/benchmarks.md");
    let comparisons = [results("cpu-smollm2-135m"), results("cpu-smollm2-135m-bf16")];
    let grids = [results("grid-cpu"), results("grid-cpu16"), results("grid-h200")];
    for (name, table) in [
        ("gpu-memory", render_gpu_memory_results(&results("memory-h200"))),
        ("gpu-decode", render_generation(&results("decode-h200"))),
        ("cpu", render_comparisons(&comparisons)),
        ("cpu-memory", render_memory_results(&results("memory-cpu"))),
        ("grid", render_grids(&grids)),
        ("planning", render_planning_times(&results("planning"))),
        ("real-task", render_real_task(&results("real-task"))),
    ] {
        page = with_block(&page, name, &table);
    }
    expect_file("docs/benchmarks.md", &page);
}

/// The file that `benches/gpu_memory.py` writes, as a table.
fn render_gpu_memory_results(results: &Value) -> String {
    let mut table = format!(
        "Measured with {}.\n\n| | planned | measured | pinned host memory | tokens/s | predicted |\n\
         |---|--:|--:|--:|--:|--:|\n",
        measured_with(results)
    );
    for row in results["rows"].as_array().expect("rows in order") {
        let gib = |path: &str| gib(number(row, path));
        writeln!(
            table,
            "| {} {}: {} | {:.2} GiB | {:.2} GiB | {:.1} GiB | {} | {} |",
            text(row, "/model"),
            text(row, "/base"),
            text(row, "/name"),
            gib("/planned_bytes"),
            gib("/measured_bytes"),
            gib("/elsewhere_bytes"),
            grouped(number(row, "/tokens_per_s")),
            grouped(number(row, "/predicted_tokens_per_s")),
        )
        .unwrap();
    }
    table
}

/// The file that `benches/gpu_decode.py` writes, as a table.
fn render_generation(results: &Value) -> String {
    let mut table = format!(
        "Measured with {}: {}.\n\n| weights | sequences | tokens before | tokens/s | per step | weights read |\n\
         |---|--:|--:|--:|--:|--:|\n",
        measured_with(results),
        text(results, "/model"),
    );
    for row in results["rows"].as_array().expect("rows in order") {
        writeln!(
            table,
            "| {} | {} | {} | {} | {:.2} ms | {} GB/s |",
            text(row, "/base"),
            number(row, "/sequences"),
            grouped(number(row, "/tokens")),
            grouped(number(row, "/decode_tokens_per_s")),
            number(row, "/decode_step_ms"),
            grouped(number(row, "/weight_gb_per_s")),
        )
        .unwrap();
    }
    table
}

/// The file that `benches/memory.py` writes, as a table.
fn render_memory_results(results: &Value) -> String {
    let mut table = format!(
        "Measured with {}: {}, {}.\n\n| | planned | measured | on disk | tokens/s | predicted |\n\
         |---|--:|--:|--:|--:|--:|\n",
        measured_with(results),
        text(results, "/model"),
        text(results, "/batch"),
    );
    for (name, row) in results["rows"].as_object().expect("rows by name") {
        let mib = |path: &str| mib(number(row, path));
        writeln!(
            table,
            "| {name} | {:.0} MiB | {:.0} MiB | {:.0} MiB | {:.0} | {:.0} |",
            mib("/planned_bytes"),
            mib("/measured_bytes"),
            mib("/disk_bytes"),
            number(row, "/tokens_per_s"),
            number(row, "/predicted_tokens_per_s"),
        )
        .unwrap();
    }
    table
}

/// The files that `benches/compare.py` writes, as a table and a line for each.
fn render_comparisons(comparisons: &[Value]) -> String {
    let mut table = String::from("| | | tokens/s | peak memory | planned |\n|---|---|--:|--:|--:|\n");
    let mut lines = String::new();
    for results in comparisons {
        let number = |path: &str| number(results, path);
        let bytes = |path: &str| format_bytes(number(path) as u64);
        let rounds = results["rounds"].as_array().unwrap_or_else(|| missing("/rounds"));
        let planned = rounds.iter().filter_map(|round| round["smidgen"]["planned_peak_bytes"].as_u64()).max();
        let compute = text(results, "/setting/compute");
        writeln!(
            table,
            "| {} | {compute} | {:.0} | {} | {} |",
            text(results, "/versions/smidgen"),
            number("/medians/smidgen/tokens_per_s"),
            bytes("/medians/smidgen/peak_bytes"),
            format_bytes(planned.unwrap_or_else(|| missing("/rounds/0/smidgen/planned_peak_bytes")))
        )
        .unwrap();
        writeln!(
            table,
            "| torch {} + peft {} | {compute} | {:.0} | {} | |",
            text(results, "/versions/torch"),
            text(results, "/versions/peft"),
            number("/medians/peer/tokens_per_s"),
            bytes("/medians/peer/peak_bytes")
        )
        .unwrap();
        writeln!(
            lines,
            "{compute}: {:.2} x the speed in {:.2} x the memory, losses within {:.1e}; rank {}, {} x {} tokens per \
             step, budget {}, medians of {} rounds.",
            number("/speed_ratio"),
            number("/memory_ratio"),
            number("/losses_max_relative_difference"),
            number("/setting/rank"),
            number("/setting/batch"),
            number("/setting/max_tokens"),
            text(results, "/setting/budget"),
            rounds.len(),
        )
        .unwrap();
    }
    let first = &comparisons[0];
    format!("Measured with {}: {}.\n\n{table}\n{lines}", measured_with(first), text(first, "/setting/model"))
}

/// The files that `benches/grid.py` writes, a row each.
fn render_grids(grids: &[Value]) -> String {
    let mut table = String::from(
        "| measured with | runs | above the plan | below the plan, median | most |\n|---|--:|--:|--:|--:|\n",
    );
    for grid in grids {
        let rows = grid["rows"].as_array().expect("rows in order");
        let below = |row: &Value| {
            let planned_bytes = number(row, "/planned_bytes");
            let below_bytes = planned_bytes - number(row, "/measured_bytes");
            (
                below_bytes,
                format!("{:.1} MiB, {:.1} %", mib(below_bytes), 100.0 * below_bytes / planned_bytes),
            )
        };
        let mut below: Vec<(f64, String)> = rows.iter().map(below).collect();
        below.sort_by(|one, other| one.0.total_cmp(&other.0));
        writeln!(
            table,
            "| {} | {} | {} | {} | {} |",
            measured_with(grid),
            rows.len(),
            below.iter().filter(|below| below.0 < 0.0).count(),
            below[below.len() / 2].1,
            below[below.len() - 1].1,
        )
        .unwrap();
    }
    table
}

/// What `benches/planning.py` wrote about 70 billion parameters.
fn render_planning_times(results: &Value) -> String {
    let plans = results["budgets"].as_object().unwrap_or_else(|| missing("/budgets"));
    let mut seconds: Vec<f64> = plans.values().map(|plan| number(plan, "/seconds")).collect();
    seconds.sort_by(f64::total_cmp);
    format!(
        "Measured with {}: {} plans took {:.1} to {:.1} s, {:.1} s in the median.\n",
        measured_with(results),
        seconds.len(),
        seconds[0],
        seconds[seconds.len() - 1],
        seconds[seconds.len() / 2],
    )
}

/// The file that `benches/real_task_compare.py` writes, in words.
fn render_real_task(results: &Value) -> String {
    let mut lines = format!(
        "Measured with {}, torch {} and peft {}, {}.\n\n| | smidgen | PyTorch + PEFT | largest difference |\n\
         |---|--:|--:|--:|\n| loss, {} steps | | | {:.1e} |\n",
        text(results, "/versions/smidgen"),
        text(results, "/versions/torch"),
        text(results, "/versions/peft"),
        text(results, "/where"),
        number(results, "/steps"),
        number(results, "/loss_differences/max"),
    );
    for when in ["before", "after"] {
        let row = &results[when];
        let accuracy = |who: &str| format!("{:.1} %", 100.0 * number(row, &format!("/{who}/accuracy")));
        writeln!(
            lines,
            "| accuracy {when} training | {} | {} | {} of {} choices are the same |\n\
             | log-likelihood of an answer {when} training | | | {:.1e} |",
            accuracy("smidgen"),
            accuracy("reference"),
            number(row, "/same_prediction"),
            number(row, "/smidgen/rows"),
            number(row, "/log_likelihood_differences/max"),
        )
        .unwrap();
    }
    lines
}

// ── docs/memory.md and docs/run-folder.md ──────────────────────────────────────────────────────────

/// What each memory technique saves and costs.
#[test]
fn the_rows_of_the_page_on_memory_are_what_the_results_say() {
    let (gpu, cpu) = (results("memory-h200"), results("memory-cpu"));
    let (shapes, grid) = (results("gpu-h200"), results("grid-cpu"));
    let in_gib = |row: &Value, path: &str| format!("{:.2} GiB", gib(number(row, path)));
    let in_mib = |row: &Value, path: &str| format!("{:.1} MiB", mib(number(row, path)));
    let speed = |row: &Value| grouped(number(row, "/tokens_per_s"));
    let on_gpu = |name: &str| {
        let rows = gpu["rows"].as_array().expect("rows in order");
        let row = rows.iter().find(|row| row["name"] == name && row["model"] == "qwen2.5-7b");
        row.unwrap_or_else(|| missing(name)).clone()
    };
    let on_cpu = |name: &str| cpu["rows"].get(name).unwrap_or_else(|| missing(name)).clone();
    let mut table = format!(
        "GPU rows: {}, the nf4 row {}.\nCPU rows: {}, the 8-bit row {}.\n\n\
         | technique | memory without | with | offloaded | tokens/s without | with |\n|---|--:|--:|--:|--:|--:|\n",
        measured_with(&gpu),
        measured_with(&shapes),
        measured_with(&cpu),
        measured_with(&grid),
    );
    let mut row =
        |name: &str, cells: [String; 5]| writeln!(table, "| {name} | {} |", cells.join(" | ")).unwrap();
    let all = "everything on the GPU";
    let recompute = "recompute all layers";
    for (name, before, after) in [
        ("recompute all layers", all, recompute),
        ("offload activations", recompute, "recompute all layers, activations offloaded"),
        ("offload weights", recompute, "recompute all layers, weights offloaded"),
        ("offload optimizer state", recompute, "recompute all layers, optimizer state offloaded"),
        ("offload all of these", recompute, "recompute all layers, all of it offloaded"),
        ("tiles of 4096 tokens", recompute, "recompute all layers, tiles of 4096 tokens"),
        ("the solver's choice for 6 GiB", all, "budget 6 GiB"),
    ] {
        let (before, after) = (on_gpu(before), on_gpu(after));
        row(
            &format!("GPU: {name}"),
            [
                in_gib(&before, "/planned_bytes"),
                in_gib(&after, "/planned_bytes"),
                in_gib(&after, "/elsewhere_bytes"),
                speed(&before),
                speed(&after),
            ],
        );
    }
    let shape = |name: &str| shapes["rows"][name]["rounds"][0]["chosen"].clone();
    let (bf16, nf4) = (shape("bf16-4x2048"), shape("nf4-4x2048-none"));
    row(
        "GPU: nf4 base instead of bf16, 4 x 2048 tokens",
        [
            in_gib(&bf16, "/planned_bytes"),
            in_gib(&nf4, "/planned_bytes"),
            String::new(),
            speed(&bf16),
            speed(&nf4),
        ],
    );
    for (name, after) in [
        ("activations on disk", "activations on disk"),
        ("weights on disk", "weights on disk"),
        ("optimizer state on disk", "optimizer state on disk"),
        ("micro-batches of one sample", "micro-batches of one sample"),
        ("the solver's choice for 150 MiB", "budget 150 MiB"),
    ] {
        let (before, after) = (on_cpu("everything in RAM"), on_cpu(after));
        row(
            &format!("CPU: {name}"),
            [
                in_mib(&before, "/measured_bytes"),
                in_mib(&after, "/measured_bytes"),
                in_mib(&after, "/disk_bytes"),
                speed(&before),
                speed(&after),
            ],
        );
    }
    let of_grid = |optimizer: &str| {
        let run = format!("llama as-stored lora {optimizer} 8x512 auto 3 steps");
        let rows = grid["rows"].as_array().expect("rows in order");
        let row = rows.iter().find(|row| row["run"] == run.as_str()).unwrap_or_else(|| missing(&run));
        in_mib(row, "/measured_bytes")
    };
    row(
        "CPU: 8-bit optimizer state, a model of a few megabytes",
        [of_grid("adamw"), of_grid("adamw-8bit"), String::new(), String::new(), String::new()],
    );
    expect_file("docs/memory.md", &with_block(&read("docs/memory.md"), "techniques", &table));
}

/// What measuring memory costs: the sentence is made of the results, and every run of a model is below half a percent.
#[test]
fn the_cost_of_monitoring_is_what_the_results_say() {
    let results = results("monitor");
    let runs = results.as_object().expect("results by device and recipe");
    // The fixture's steps take microseconds: there the cost shows, and means nothing.
    for (name, run) in runs.iter().filter(|(name, _)| !name.ends_with(" fixture")) {
        assert!(number(run, "/monitor_of_time") < 0.005, "{name}: {run}");
    }
    let [cpu, gpu] = ["cpu smollm2-135m", "h200 smollm2-135m"].map(|name| {
        let run = runs.get(name).unwrap_or_else(|| missing(name));
        (number(run, "/monitor_us"), 100.0 * number(run, "/monitor_of_time"))
    });
    let sentence = format!(
        "Reading them takes {:.0} microseconds per step on two cores ({:.3} % of a step of SmolLM2-135M) and {:.0} \
         microseconds on an H200 ({:.3} %).\n",
        cpu.0, cpu.1, gpu.0, gpu.1
    );
    expect_file("docs/run-folder.md", &with_block(&read("docs/run-folder.md"), "monitor", &sentence));
}
