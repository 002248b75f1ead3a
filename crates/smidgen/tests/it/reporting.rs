//! What a run tells of itself: the page in its folder, `report`, `plan --html` and `dash`, and folders that are broken.

use crate::scratch::Scratch;
use serde_json::{Value, json};
use smidgen_ir::bytes::format_bytes;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

fn report(scratch: &Scratch, run: &str) -> Value {
    let ended = scratch.run(&["report", run, "--json"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    serde_json::from_str(&ended.stdout).unwrap()
}

#[test]
fn a_run_ends_with_its_page() {
    let scratch = Scratch::new();
    let ended = scratch.train("run", &["train.steps=8", "data.eval=data.jsonl", "train.eval_every=4"]);
    let page = scratch.text("run/report.html");
    assert!(page.contains(">adapters<") && !page.contains("trained weights"));
    let plan = scratch.json("run/plan.json");
    let peak = plan["peak_bytes"].as_u64().unwrap();
    let place = plan["peak_at"].as_str().unwrap();
    let label = format!("<strong>peak {}</strong> <span>{place}</span>", format_bytes(peak));
    assert!(page.contains(&label), "{label}");
    assert!(page.contains("done, 8 steps"));
    assert!(ended.stderr.contains("\nmemory: peak "), "{}", ended.stderr);
    assert!(ended.stderr.contains("run/report.html`\n"), "{}", ended.stderr);

    let summary = report(&scratch, "run");
    assert_eq!((&summary["steps"], &summary["total_steps"]), (&json!(8), &json!(8)));
    assert_eq!(summary["state"], json!("done, 8 steps"));
    assert_eq!(summary["memory"]["planned_bytes"], json!(peak));
    let losses = scratch.losses("run");
    assert_eq!(summary["loss"]["first"], json!(losses[0]));
    assert_eq!(summary["loss"]["last"], json!(losses[7]));
    let rows = scratch.metrics("run");
    let measured = rows.iter().filter_map(|row| row.get("device_peak_bytes")?.as_u64()).max();
    assert_eq!(summary["memory"]["peak_bytes"], json!(measured));
    let [live, reserved] =
        ["peak_live_bytes", "reserved_bytes"].map(|name| plan["arena"][name].as_f64().unwrap());
    assert_eq!(summary["memory"]["peak_live_of_reserved"], json!(live / reserved));
    let efficiency = format!("{:.1} % of the reserved memory in use at the peak", 100.0 * live / reserved);
    let told = scratch.run(&["report", "run"]).stdout;
    for text in [&ended.stderr, &told, &page] {
        assert_eq!(text.matches(&efficiency).count(), 1, "{efficiency}: {text}");
    }
    assert!(rows.iter().all(|row| row.get("gpu_util").is_none()), "a CPU has no utilization");
    let arena = rows.iter().filter_map(|row| row.get("arena_peak_bytes")).collect::<Vec<_>>();
    assert_eq!(arena, [&plan["arena"]["peak_live_bytes"]; 8]);
    assert_eq!(summary["stability"]["resumes"], json!(0));
    let phases: Vec<&String> = summary["phases"].as_object().unwrap().keys().collect();
    assert!(phases.iter().any(|name| *name == "train"), "{phases:?}");

    // Where one says; with JSON alone nothing is written.
    std::fs::remove_file(scratch.path("run/report.html")).unwrap();
    report(&scratch, "run");
    assert!(!scratch.exists("run/report.html"));
    let ended = scratch.run(&["report", "run", "--out", "elsewhere.html"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    assert!(ended.stdout.ends_with("page: `elsewhere.html`\n"), "{}", ended.stdout);
    assert!(scratch.text("elsewhere.html") == page && !scratch.exists("run/report.html"));
}

/// The timeline is the plan's: its highest stretch is the peak, and what is listed there adds up to it.
#[test]
fn the_timeline_is_that_of_the_plan() {
    for (case, overrides) in [
        ("llama-gqa-tied", &[][..]),
        ("llama-gqa-tied", &["memory.recompute=all", "memory.micro_tokens=40"]),
        (
            "llama-bias-linear",
            &["memory.weights=disk", "memory.activations=host", "memory.optimizer_state=host"],
        ),
        ("llama-f16-some-layers", &["data.train=absent.jsonl", "data.max_tokens=300"]),
    ] {
        let scratch = Scratch::of(case);
        let plan = scratch.plan(overrides);
        let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{value} is no count"));
        let timeline = &plan["timeline"];
        let columns: Vec<Vec<u64>> = timeline["bytes"]
            .as_object()
            .unwrap()
            .values()
            .map(|column| column.as_array().unwrap().iter().map(number).collect())
            .collect();
        let length = timeline["begin_ms"].as_array().unwrap().len();
        assert!(columns.len() == 7 && columns.iter().all(|column| column.len() == length), "{case}");
        assert!((2..=220).contains(&length), "{case}: {length}");
        let total = |stretch: usize| columns.iter().map(|column| column[stretch]).sum::<u64>();
        let peak = number(&timeline["peak"]) as usize;
        let most = (0..length).map(total).max().unwrap();
        assert_eq!(total(peak), most, "{case} {overrides:?}");
        let context = number(&plan["rows"]["context"]);
        assert_eq!(most, context + number(&plan["arena"]["peak_live_bytes"]), "{case} {overrides:?}");
        assert_eq!(timeline["place"][peak], plan["peak_at"], "{case}");
        let listed: u64 =
            timeline["contents"].as_array().unwrap().iter().map(|it| number(&it["bytes"])).sum();
        assert_eq!(listed, most, "{case} {overrides:?}");
        for (row, column) in
            timeline["bytes"].as_object().unwrap().iter().filter(|(row, _)| *row != "workspace")
        {
            assert_eq!(column[peak], plan["rows"][row], "{case} {row}");
        }
        let begins: Vec<f64> =
            timeline["begin_ms"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect();
        assert!(
            begins[0] == 0.0
                && begins.is_sorted()
                && begins[length - 1] <= timeline["end_ms"].as_f64().unwrap()
        );
    }
}

#[test]
fn a_plan_alone_is_a_page() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "--html", "plan.html", "memory.recompute=[1]"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    assert_eq!(ended.stdout, scratch.run(&["plan", "recipe.toml", "memory.recompute=[1]"]).stdout);
    let page = scratch.text("plan.html");
    let plan = scratch.plan(&["memory.recompute=[1]"]);
    let peak = format_bytes(plan["peak_bytes"].as_u64().unwrap());
    assert!(page.contains(&format!("<strong>peak {peak}</strong>")));
    assert!(page.contains("planned only"));
    assert!(page.contains("layer 1: activations recomputed, weights on the device"));
    assert!(page.contains("layer 0: activations kept, weights on the device"));
    // One that does not fit is drawn too.
    let ended = scratch.run(&["plan", "recipe.toml", "--html", "large.html", "memory.budget=1MiB"]);
    assert_eq!(ended.code, Some(1));
    assert!(scratch.text("large.html").contains("does not fit the budget of 1.00 MiB"));
}

#[test]
fn a_resumed_run_is_one_run() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.steps=4", "train.save_every=2"]);
    scratch.train("run", &["train.steps=8", "train.save_every=2", "--resume"]);
    let summary = report(&scratch, "run");
    assert_eq!(summary["state"], json!("done, 8 steps"));
    assert_eq!(summary["stability"]["resumes"], json!(1));
    assert_eq!(summary["loss"]["first"], json!(scratch.losses("run")[0]));
    let page = scratch.text("run/report.html");
    assert!(page.contains("resumed once"));
    assert!(page.contains("Parts of the run"));
}

#[test]
fn a_run_that_goes_on_is_reported_as_far_as_it_got() {
    let scratch = Scratch::new();
    scratch.train("run", &[]);
    // As the writer of a run that goes on holds it, in the middle of a line.
    let rows = scratch.text("run/metrics.jsonl");
    let whole: Vec<&str> = rows.split_inclusive('\n').take(4).collect();
    scratch.write("run/metrics.jsonl", format!("{}{{\"step\":5,\"ep", whole.concat()));
    let file = std::fs::File::open(scratch.path("run/metrics.jsonl")).unwrap();
    file.lock().unwrap();
    let running = report(&scratch, "run");
    assert_eq!(running["state"], json!("running, step 4 of 6"));
    assert!(running["eta_s"].as_f64().is_some_and(|seconds| seconds > 0.0), "{running}");
    let content = Served::of(&scratch, "run").get("/content").1;
    assert!(
        content.contains("role=\"progressbar\"") && content.contains("4 of 6 steps · about "),
        "{content}"
    );
    drop(file);
    scratch.edit_json("run/run.json", |history| history["parts"][0]["ended"] = Value::Null);
    assert_eq!(report(&scratch, "run")["state"], json!("killed or crashed after step 4 of 6"));
    assert_eq!(scratch.run(&["report", "run"]).code, Some(0));
    assert!(scratch.text("run/report.html").contains("is incomplete and was skipped"));
}

#[test]
fn a_run_that_failed_says_so() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["train", "recipe.toml", "train.lr=1e30", "train.clip=0", "train.steps=30"]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(ended.stderr.contains("is not finite"), "{}", ended.stderr);
    let summary = report(&scratch, "run");
    assert!(summary["state"].as_str().unwrap().starts_with("failed after step "), "{summary}");
    assert!(summary["stability"]["failure"].as_str().unwrap().contains("is not finite"), "{summary}");
    assert!(scratch.text("run/report.html").contains("failed after step"));
}

#[test]
fn folders_that_are_no_runs_are_refused() {
    let scratch = Scratch::new();
    scratch.refused(2, &["report", "absent"], &["`absent` does not exist", "hint: "]);
    scratch.refused(2, &["report", "data.jsonl"], &["`data.jsonl` is not a folder"]);
    scratch.refused(2, &["report", "model"], &["`model` is not the folder of a run", "`plan.json`"]);
    scratch.refused(2, &["dash", "model"], &["`model` is not the folder of a run"]);
    assert_eq!(scratch.run(&["report"]).code, Some(2));
    scratch.train("run", &[]);
    let (rows, plan) = (scratch.text("run/metrics.jsonl"), scratch.text("run/plan.json"));

    std::fs::remove_file(scratch.path("run/metrics.jsonl")).unwrap();
    scratch.refused(1, &["report", "run"], &["`run` has no `metrics.jsonl`", "--html"]);
    scratch.write("run/metrics.jsonl", &rows);
    for (broken, words) in [
        ("{\"step\": 3, \"loss\": }", "line 2 is not a metrics row"),
        ("[]", "line 2"),
        ("{\"step\":3}", "neither `step_ms`"),
    ] {
        let lines: Vec<&str> = rows.lines().collect();
        scratch.write("run/metrics.jsonl", [lines[0], broken, lines[2], ""].join("\n"));
        scratch.refused(1, &["report", "run"], &["metrics.jsonl` line 2", words]);
    }
    let lines: Vec<&str> = rows.lines().collect();
    scratch.write("run/metrics.jsonl", [lines[1], lines[0], ""].join("\n"));
    scratch.refused(1, &["report", "run"], &["line 2", "step 1 comes after step 2"]);
    scratch.write("run/metrics.jsonl", &rows);

    scratch.write("run/plan.json", &plan[..plan.len() / 2]);
    scratch.refused(1, &["report", "run"], &["run/plan.json` is not the expected JSON"]);
    scratch.write("run/plan.json", "{}");
    scratch.refused(1, &["report", "run"], &["run/plan.json` is not the expected JSON", "missing field"]);
    std::fs::remove_file(scratch.path("run/plan.json")).unwrap();
    scratch.refused(1, &["report", "run"], &["`run` has no `plan.json`"]);
    scratch.write("run/plan.json", &plan);
    scratch.write("run/run.json", "[");
    scratch.refused(1, &["report", "run"], &["run/run.json` is not the expected JSON"]);
    std::fs::remove_file(scratch.path("run/run.json")).unwrap();
    scratch.write("run/phases.json", "3");
    scratch.refused(1, &["report", "run"], &["run/phases.json` is not the expected JSON"]);
    // What a report can do without.
    for name in ["phases.json", "job.toml"] {
        std::fs::remove_file(scratch.path("run").join(name)).unwrap();
    }
    assert_eq!(report(&scratch, "run")["state"], json!("6 steps"));
    // Rows that were never written are no mistake.
    scratch.write("run/metrics.jsonl", "");
    assert_eq!(scratch.run(&["report", "run"]).code, Some(0));
    assert!(scratch.text("run/report.html").contains("No step has finished yet"));
}

#[test]
fn runs_are_compared() {
    let scratch = Scratch::new();
    scratch.train("runs/a", &["data.eval=data.jsonl", "train.eval_every=3"]);
    scratch.train("runs/b", &["train.lr=0.02", "train.steps=8"]);
    scratch.train("runs/c", &[]);
    let ended = scratch.run(&["report", "runs/a", "runs/b"]);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    for words in [
        "a: done, 6 steps\nb: done, 8 steps\n",
        "\n  steps                    6          8\n",
        "\n  eval loss, best ",
        "\n  tokens/s ",
        "\n  peak memory ",
        "  train.lr: a 0.01 · b 0.02\n",
        "  train.steps: a 6 · b 8\n",
        "\npage: `compare.html`\n",
    ] {
        assert!(ended.stdout.contains(words), "{words:?} is not in\n{}", ended.stdout);
    }
    assert!(!ended.stdout.contains("output.dir"), "{}", ended.stdout);
    let page = scratch.text("compare.html");
    assert!(page.contains("2 runs compared") && page.contains("<code>train.lr</code>"));

    std::fs::remove_file(scratch.path("compare.html")).unwrap();
    let ended = scratch.run(&["report", "runs/a", "runs/b", "runs/c", "--json"]);
    assert!(!scratch.exists("compare.html"));
    let value: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(value["runs"][1], {
        let mut one = report(&scratch, "runs/b");
        one.as_object_mut().unwrap().retain(|key, _| key != "phases" && key != "page");
        (one["name"], one["folder"]) = (json!("b"), json!(scratch.path("runs/b")));
        one
    });
    assert_eq!(value["differences"]["train.lr"], json!(["0.01", "0.02", "0.01"]));
    assert_eq!(value["page"], Value::Null);
    let ended = scratch.run(&["report", "runs/a", "runs/c", "--out", "elsewhere.html"]);
    assert!(ended.stdout.ends_with("page: `elsewhere.html`\n"), "{}", ended.stdout);
    assert!(scratch.exists("elsewhere.html") && !scratch.exists("compare.html"));

    scratch.refused(2, &["report", "runs/a", "runs/../runs/a"], &["the run `runs/../runs/a` is given twice"]);
    scratch.refused(2, &["report", "runs/a", "model"], &["`model` is not the folder of a run"]);
}

/// Ends with the test, however that ends.
pub struct Served {
    child: Child,
    address: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Served {
    pub fn of(scratch: &Scratch, run: &str) -> Served {
        let mut command = scratch.command(&["dash", run, "--port", "0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split_once("http://").and_then(|(_, rest)| rest.split('/').next());
        Served { address: address.unwrap_or_else(|| panic!("{line}")).to_string(), child }
    }

    fn ask(&self, method: &str, path: &str, host: &str) -> (String, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {host}\r\nAccept: */*\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.lines().next().unwrap().strip_prefix("HTTP/1.1 ").unwrap();
        let length = format!("content-length: {}", body.len());
        assert!(head.to_lowercase().contains(&length), "{head}");
        (status.to_string(), body.to_string())
    }

    pub fn get(&self, path: &str) -> (String, String) {
        self.ask("GET", path, &self.address)
    }
}

#[test]
fn a_live_page_follows_the_run() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.steps=4"]);
    let served = Served::of(&scratch, "run");
    let (status, page) = served.get("/");
    assert!(
        status == "200 OK" && page.contains("done, 4 steps") && page.contains("fetch(\"/metrics\""),
        "{status}"
    );
    let metrics = |served: &Served| -> Value { serde_json::from_str(&served.get("/metrics").1).unwrap() };
    let before = metrics(&served);
    assert_eq!(before["steps"], json!(4));
    let more = "{\"step\":5,\"loss\":0.5,\"grad_norm\":1.0,\"lr\":0.1,\"tokens\":9,\"step_ms\":2.0,\"tokens_per_s\":4500.0}\n";
    scratch.write("run/metrics.jsonl", scratch.text("run/metrics.jsonl") + more);
    let after = metrics(&served);
    assert_eq!(after["steps"], json!(5));
    assert_ne!(after["stamp"], before["stamp"]);
    assert!(served.get("/content").1.starts_with("<header>"));
    assert_eq!(served.get("/plan.json").0, "404 Not Found");
    assert_eq!(served.get("/../recipe.toml").0, "404 Not Found");
    assert_eq!(served.ask("POST", "/", &served.address).0, "405 Method Not Allowed");
    assert_eq!(served.ask("GET", "/", "somewhere.example").0, "403 Forbidden");
    // A broken folder is said in words, and the server goes on.
    scratch.write("run/metrics.jsonl", "x\n");
    let (status, words) = served.get("/metrics");
    assert_eq!(status, "500 Internal Server Error");
    assert!(words.contains("line 1 is not a metrics row"), "{words}");
    let port = served.address.rsplit_once(':').unwrap().1;
    scratch.write("run/metrics.jsonl", more);
    scratch.refused(
        1,
        &["dash", "run", "--port", port],
        &[&format!("cannot listen on port {port}"), "hint: `--port 0`"],
    );
}

/// Clients that send half a request, read nothing, or come in a crowd keep nobody waiting.
#[test]
fn slow_and_many_clients_are_served_at_once() {
    let scratch = Scratch::new();
    scratch.train("run", &["train.steps=2"]);
    let served = Served::of(&scratch, "run");
    let connect = || TcpStream::connect(&served.address).unwrap();
    let stalled: Vec<TcpStream> = (0..40)
        .map(|index| {
            let mut stream = connect();
            let request =
                if index % 2 == 0 { "GET / HT" } else { "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" };
            stream.write_all(request.as_bytes()).unwrap();
            stream
        })
        .collect();
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..16).map(|_| scope.spawn(|| served.get("/metrics").0)).collect();
        assert!(asked.into_iter().all(|asked| asked.join().unwrap() == "200 OK"));
    });
    drop(stalled);
    // A head that never ends is cut off.
    let mut endless = connect();
    let sent = (0..64).try_for_each(|_| endless.write_all(&[b'x'; 1024]));
    let mut answer = Vec::new();
    let read = endless.read_to_end(&mut answer);
    assert!(sent.is_err() || read.is_err() || !answer.starts_with(b"HTTP/1.1 200"), "{answer:?}");
}

/// `docs/run-folder.md` names every field that is written.
#[test]
fn the_page_on_run_folders_is_complete() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/run-folder.md");
    let text = std::fs::read_to_string(path).unwrap();
    let scratch = Scratch::new();
    scratch.train("run", &["data.eval=data.jsonl", "train.eval_every=3", "train.save_every=3"]);
    let (plan, history) = (scratch.json("run/plan.json"), scratch.json("run/run.json"));
    let mut names: Vec<String> = Vec::new();
    let rows = scratch.metrics("run");
    let objects = [&plan, &plan["timeline"], &history, &history["parts"][0]].into_iter().chain(&rows);
    objects.for_each(|object| names.extend(object.as_object().unwrap().keys().cloned()));
    for entry in std::fs::read_dir(scratch.path("run")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        match name.split(['-', '/']).next().unwrap() {
            "checkpoint" => names.push("checkpoint-N/".into()),
            "adapter" => names.push("adapter/".into()),
            // TensorBoard's file has a name of its own.
            _ if name.starts_with("events.out.tfevents.") => {}
            _ => names.push(name),
        }
    }
    names.retain(|name| !text.contains(&format!("`{name}`")));
    assert_eq!(names, [""; 0], "`docs/run-folder.md` does not name these");
}
