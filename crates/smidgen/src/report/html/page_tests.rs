//! Pages of made-up runs: they contain the right numbers, load nothing, and every kind of run can be drawn.
//!
//! `benches/report_page.py` checks pages in a browser.

use super::{render_comparison, render_content, render_live_page, render_page};
use crate::report::compare::compare;
use crate::report::plan_facts::PlanFacts;
use crate::report::run_folder::{EvaluationRow, RunRecord, StepRow};
use crate::run_folder::history::{History, Part, PartEnd};
use serde_json::json;
use smidgen_ir::bytes::format_bytes;

fn plan() -> PlanFacts {
    let column = |low: u64, high: u64| vec![low, high, high, low];
    let value = json!({
        "title": "a model · LoRA r=4", "layers": 3, "fits": true, "budget_bytes": 9_000_000_000u64,
        "peak_bytes": 7_000_000_000u64, "peak_at": "backward of layers.2, attention_grad",
        "rows": {"base_weights": 4_000_000_000u64, "adapters": 500_000_000, "gradients": 500_000_000,
            "optimizer": 1_000_000_000, "activations": 600_000_000, "workspace": 200_000_000, "context": 200_000_000},
        "spaces": {"device": 7_000_000_000u64},
        "policy": {"device": "cpu", "threads": 2, "recompute": [0, 1], "weights_offloaded": [1], "activations_offloaded": [2],
            "reasons": ["recompute: the first 2 of 3 layers, the fewest that fit"],
            "prices": [{"choice": "recompute", "saved_bytes": 1_000_000_000, "cost_ms": 12.0}]},
        "micro_steps": 2.5, "extent": {"tokens": 1024, "rows": 1024, "segments": 8}, "step_ms": 100.0, "tokens_per_s": 900.0,
        "arena": {"reserved_bytes": 6_800_000_000u64, "peak_live_bytes": 6_750_000_000u64,
            "transient_reserved_bytes": 10, "transient_peak_live_bytes": 9},
        "life": {"load": {"device": 7_000_000_000u64, "disk": 5}},
        "timeline": {"steps": 40, "peak": 1, "begin_ms": [0.0, 30.0, 60.0, 90.0], "end_ms": 95.0,
            "part": ["forward", "backward", "backward", "update"],
            "place": ["forward of layers.0, linear", "backward of layers.2, attention_grad", "c", "d"],
            "bytes": {"context": column(200_000_000, 200_000_000), "base_weights": column(4_000_000_000, 4_000_000_000),
                "adapters": column(500_000_000, 500_000_000), "gradients": column(500_000_000, 500_000_000),
                "optimizer": column(1_000_000_000, 1_000_000_000), "activations": column(10, 600_000_000),
                "workspace": column(7, 150_000_000)},
            "contents": [{"name": "layers.0.mlp.up", "category": "activations", "bytes": 300_000_000, "count": 1}]},
    });
    serde_json::from_value(value).unwrap()
}

fn row(step: u64) -> StepRow {
    StepRow {
        step,
        steps: 1,
        // Every number has all of its digits.
        loss: 1.0 + (step as f64).sin().abs() / 3.0,
        grad_norm: (step as f64 * 0.7).cos().abs() + 0.1,
        lr: 2e-4 / step as f64,
        tokens: 900,
        step_ms: 100.0 + (step % 13) as f64 / 7.0,
        tokens_per_s: 900.0 - (step % 17) as f64 / 3.0,
        overflows: 0,
        device_bytes: Some(6_900_000_000 + step % 5),
        device_free_bytes: None,
        device_peak_bytes: Some(6_950_000_000),
        pinned_bytes: 0,
        host_rss_bytes: Some(6_900_000_000),
        gpu_util: None,
        monitor_ms: 0.05,
    }
}

fn run(steps: u64) -> RunRecord {
    let part = Part {
        began_unix_s: 1_700_000_000,
        process_id: 1,
        first_step: 0,
        planned_bytes: 7_000_000_000,
        ended: Some(PartEnd::Done),
        accepted: vec![],
        last_step: Some(steps),
        message: None,
    };
    RunRecord {
        folder: Some("runs/example".into()),
        plan: plan(),
        rows: (1..=steps).map(row).collect(),
        evaluations: (1..=steps / 50)
            .map(|it| EvaluationRow { step: 50 * it, eval_loss: 1.1, eval_ms: 900.0 })
            .collect(),
        history: Some(History { total_steps: steps, parts: vec![part], ..History::default() }),
        job: Some("[model]\npath = \"m\"\n".into()),
        ..RunRecord::default()
    }
}

#[test]
fn ten_thousand_steps_are_a_small_page() {
    let page = render_page(&run(10_000));
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    for id in
        ["chart-loss", "chart-lr", "chart-norm", "chart-speed", "chart-memory", "timeline", "timeline-moving"]
    {
        assert!(
            page.contains(&format!(
                "<figure class=\"chart {}\" id=\"{id}\"",
                if id.starts_with("chart") { "lines" } else { "areas" }
            )),
            "{id}"
        );
    }
}

#[test]
fn the_peak_is_labelled_with_its_number_and_place() {
    let page = render_page(&run(60));
    let peak = format_bytes(7_000_000_000);
    let label = format!("<strong>peak {peak}</strong> <span>backward of layers.2, attention_grad</span>");
    assert!(page.contains(&label), "{label}");
    // Measured, planned and allowed.
    for bytes in [6_950_000_000, 7_000_000_000, 9_000_000_000] {
        assert!(page.contains(&format_bytes(bytes)));
    }
    assert!(page.contains("layers.0.mlp.up"));
    assert!(page.contains("done, 60 steps"));
    assert!(page.contains("started 2023-11-14 22:13 UTC"));
}

/// The cards answer the main questions.
#[test]
fn every_question_has_its_answer_at_the_top() {
    let card = |page: &str, question: &str| {
        let begin = page.find(&format!("<h3>{question}</h3>")).unwrap_or_else(|| panic!("{question}"));
        page[begin..].split("</div>").next().unwrap().to_owned()
    };
    let page = render_page(&run(60));
    let held = card(&page, "What uses the memory at the peak?");
    assert!(held.contains("base weights, 57 %") && held.contains("backward of layers.2"), "{held}");
    let chosen = card(&page, "Which plan, and why?");
    let mut free = run(60);
    free.plan.policy.prices.clear();
    let kept = card(&render_page(&free), "Which plan, and why?");
    assert!(kept.contains("everything is kept") && kept.contains("fits 8.38 GiB"), "{kept}");
    let price = &run(60).plan.policy.prices[0];
    assert!(
        chosen.contains(&price.choice) && chosen.contains("the fastest plan found that fits"),
        "{chosen}"
    );
    assert!(card(&page, "Did memory leak?").contains("too few steps to tell"));
    assert!(card(&render_page(&run(200)), "Did memory leak?").contains(">no<"));
    assert!(card(&page, "Was it stable?").contains(">yes<"));
    let speed = card(&page, "Speed");
    assert!(speed.contains("tok/s") && speed.contains("0.05 % of it measuring memory"), "{speed}");
    let mut apart = run(60);
    apart.rows[40..].iter_mut().for_each(|row| row.loss = 7.0);
    let unstable = card(&render_page(&apart), "Was it stable?");
    assert!(unstable.contains(">no<") && unstable.contains("the loss rose"), "{unstable}");
}

/// Marks are at the position of their numbers: the peak in the middle of its interval, the plan at its height.
#[test]
fn marks_stand_where_their_numbers_are() {
    let page = render_page(&run(60));
    // From 30 to 60 of 95 ms.
    assert!(page.contains("<div class=\"peak-line\" style=\"left:47.37%;"));
    // An axis reaches 12 % above the plan, that of the timeline 30 %.
    assert!(page.contains("<div class=\"level\" style=\"bottom:89.29%\"><span>planned 6.52 GiB</span>"));
    assert!(page.contains("<div class=\"level\" style=\"bottom:76.92%\"></div>"));
}

#[test]
fn a_peak_above_the_plan_is_a_bad_answer() {
    let peak = |measured: u64| {
        let mut record = run(60);
        record.rows.iter_mut().for_each(|row| row.device_peak_bytes = Some(measured));
        let page = render_page(&record);
        let place = page.find("<h3>Peak memory</h3>").unwrap();
        page[..place].rsplit_once("<div class=\"").unwrap().1.trim_end_matches("\">").to_owned()
    };
    assert_eq!(peak(7_000_000_000), "card good");
    // Within the measurement error, and above it.
    assert_eq!([7_000_000_001, 7_200_000_000].map(peak), ["card", "card bad"]);
}

#[test]
fn the_loss_is_the_first_chart() {
    let page = render_page(&run(60));
    let first = page.find("<figure").unwrap();
    assert!(page[first..].starts_with("<figure class=\"chart lines\" id=\"chart-loss\""));
    let place = |words: &str| page.find(words).unwrap_or_else(|| panic!("{words}"));
    assert!(place("class=\"controls\" hidden") < first && first < place("<h3>Peak memory</h3>"));
    assert!(place("<h3>Loss</h3>") < place("<h3>Speed</h3>"));
    // The switches need a second axis and the averaged values.
    let data = |id: &str| -> serde_json::Value {
        let chart = &page[place(&format!("id=\"{id}\""))..];
        let text = chart.split_once("class=\"points\">").unwrap().1.split_once("</script>").unwrap().0;
        serde_json::from_str(text).unwrap()
    };
    let loss = data("chart-loss");
    assert_eq!((&loss["y"]["log"], &loss["log"]["log"]), (&json!(false), &json!(true)));
    assert_eq!(loss["lines"][1]["averaged"], loss["lines"][0]["points"]);
    assert_eq!(data("chart-memory")["log"], json!(null));
    assert!(page.contains("data-spans=\"1,2,5,10,20\"") && page.contains("max=\"4\" value=\"2\""));
}

#[test]
fn a_run_that_goes_on_shows_how_far_it_is() {
    let mut record = run(60);
    record.history.as_mut().unwrap().total_steps = 240;
    record.is_running = true;
    let page = render_page(&record);
    let bar = "aria-valuemax=\"240\" aria-valuenow=\"60\"><b style=\"width:25.00%\"></b></div>";
    assert!(page.contains(bar), "{page}");
    // 180 steps of 101 ms and 15 ms of evaluation.
    assert!(page.contains("60 of 240 steps · about 21 s left</p>"));
    record.is_running = false;
    record.history.as_mut().unwrap().parts[0].ended = Some(PartEnd::Interrupted);
    let stopped = render_page(&record);
    assert!(stopped.contains(bar) && stopped.contains("60 of 240 steps</p>"));
    assert!(!render_page(&run(60)).contains("progressbar"));
    assert!(!render_page(&RunRecord::of_plan(plan(), String::new())).contains("progressbar"));
}

#[test]
fn system_memory_and_utilization_stand_next_to_the_memory_of_a_gpu() {
    let on_cpu = render_page(&run(60));
    assert!(!on_cpu.contains("utilization") && !on_cpu.to_lowercase().contains("system memory"));
    let mut record = run(60);
    record.plan.policy.device = "cuda".into();
    for row in &mut record.rows {
        (row.gpu_util, row.pinned_bytes) = (Some(90 + (row.step % 5) as u32), 3 << 30);
        row.host_rss_bytes = Some((4 << 30) + row.step);
    }
    let page = render_page(&record);
    let figures: Vec<&str> =
        page.split("<figure ").skip(1).filter_map(|it| it.split("id=\"").nth(1)?.split('"').next()).collect();
    let memory = figures.iter().position(|id| *id == "chart-memory").unwrap();
    assert_eq!(figures[memory + 1..memory + 3], ["chart-system", "chart-load"], "{figures:?}");
    assert!(page.contains("budget 8.38 GiB; system memory 4.00 GiB, pinned 3.00 GiB"));
    assert!(render_live_page(&record).contains("the process at most 4.00 GiB, pinned 3.00 GiB"));
    assert!(page.contains("over the last second: mean 92 %") && page.contains("GPU 92 % busy"));
}

fn comparison(names: [&str; 2]) -> String {
    let mut other = run(90);
    other.rows.iter_mut().for_each(|row| (row.loss, row.device_bytes) = (row.loss / 2.0, None));
    other.job = Some(format!("[model]\npath = \"{}\"\n", names[1]));
    let [one, two] = names.map(str::to_owned);
    render_comparison(&compare(vec![(one, run(60)), (two, other)]))
}

#[test]
fn runs_are_drawn_over_each_other() {
    let page = comparison(["first", "second"]);
    let loss = page.split("id=\"chart-loss\"").nth(1).unwrap().split("</figure>").next().unwrap();
    assert_eq!(
        loss.matches("<path class=\"line ").count(),
        4,
        "two runs, each with its values and their average"
    );
    assert!(loss.contains("<li class=\"main c0\">first</li><li class=\"main c1\">second</li>"), "{loss}");
    assert!(loss.contains("\"x\":{\"name\":\"step\",\"low\":0.0,\"high\":90.0}"), "{loss}");
    // The first run ended at step 60.
    assert!(loss.contains("<th scope=\"row\">90</th><td></td><td>0.6177</td>"), "{loss}");
    let first = page.find("<figure").unwrap();
    assert!(page[first..].starts_with("<figure class=\"chart lines\" id=\"chart-loss\""));
    let time = page.split("id=\"chart-loss-time\"").nth(1).unwrap();
    assert!(time.contains("\"name\":\"s\""), "nine seconds");
    // A run that was not measured has no line.
    let memory = page.split("id=\"chart-memory\"").nth(1).unwrap().split("</figure>").next().unwrap();
    assert_eq!(memory.matches("<path class=\"line ").count(), 1);
    assert!(page.contains("<code>model.path</code></th><td><code>&quot;m&quot;</code></td>"));
    assert!(page.contains("<td class=\"best\">"));
}

#[test]
fn nothing_is_loaded_from_anywhere() {
    for page in [render_page(&run(60)), render_live_page(&run(60)), comparison(["a", "b"])] {
        for word in ["http://", "https://", "src=", "@import", "url(", "<link", "<img", "<iframe"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.contains("default-src 'none'"));
    }
    assert!(!render_page(&run(60)).contains("connect-src"));
}

#[test]
fn what_files_say_stays_text() {
    let evil = "</script><script>alert('x')</script><b a=\"";
    let mut record = run(60);
    record.folder = Some(format!("runs/{evil}").into());
    record.plan.title = evil.into();
    record.plan.policy.reasons = vec![format!("{evil}: {evil}")];
    record.plan.policy.prices[0].choice = evil.into();
    record.plan.policy.device = evil.into();
    record.plan.notes = vec![evil.into()];
    record.plan.timeline.place = vec![evil.into(); 4];
    record.plan.timeline.part = vec![evil.into(); 4];
    record.plan.timeline.contents[0].name = evil.into();
    record.plan.timeline.contents[0].category = evil.into();
    record.job = Some(evil.into());
    let history = record.history.as_mut().unwrap();
    history.parts[0].message = Some(evil.into());
    history.parts.push(history.parts[0].clone());
    let compared = (comparison(["a", evil]), comparison(["a", "b"]));
    for (page, clean) in [(render_page(&record), render_page(&run(60))), compared] {
        assert!(!page.contains("<script>alert"));
        assert!(!page.contains("<b a="));
        let scripts = |page: &str| page.matches("<script").count();
        assert_eq!(scripts(&page), scripts(&clean));
        assert_eq!(scripts(&page), page.matches("</script>").count());
    }
}

#[test]
fn runs_of_every_kind_are_drawn() {
    let mut not_finite = run(40);
    for row in &mut not_finite.rows[10..20] {
        (row.loss, row.grad_norm) = (f64::NAN, f64::NAN);
    }
    let mut unmeasured = run(40);
    for row in &mut unmeasured.rows {
        (row.device_bytes, row.device_peak_bytes, row.host_rss_bytes) = (None, None, None);
    }
    let mut old = run(40);
    (old.plan.timeline, old.history, old.plan.layers) = (Default::default(), None, 0);
    let mut all_bad = run(5);
    all_bad.rows.iter_mut().for_each(|row| (row.loss, row.grad_norm) = (f64::NAN, f64::NAN));
    let only_planned = RunRecord::of_plan(plan(), String::new());
    for (name, record, words) in [
        ("none", run(0), "No step has finished yet"),
        ("one", run(1), "too few steps to tell"),
        ("two", run(2), "done, 2 steps"),
        ("not finite", not_finite, "10 steps not finite"),
        ("unmeasured", unmeasured, "not measured on this system"),
        ("old", old, "has no timeline"),
        ("all bad", all_bad, "5 steps not finite"),
        ("planned", only_planned, "Peak memory, planned"),
    ] {
        let content = render_content(&record);
        assert!(content.contains(words), "{name}");
        assert!(!content.contains("NaN") && !content.contains("inf%"), "{name}");
        assert_eq!(content.matches("<section").count(), content.matches("</section>").count(), "{name}");
    }
}

#[test]
fn a_timeline_that_was_changed_is_not_drawn() {
    let mut record = run(10);
    record.plan.timeline.peak = 99;
    assert!(render_page(&record).contains("has no timeline"));
    let mut record = run(10);
    record.plan.timeline.place.pop();
    assert!(render_page(&record).contains("has no timeline"));
}

#[test]
fn every_rank_has_a_row_of_memory() {
    assert!(!render_page(&run(60)).contains("Memory by rank"));
    let record = RunRecord { rank_bytes: vec![6_900_000_000, 7_100_000_000], ..run(60) };
    let page = render_page(&record);
    let [fine, above] = [6_900_000_000, 7_100_000_000].map(format_bytes);
    let planned = format_bytes(7_000_000_000);
    for cells in [
        format!("rank 0</th><td>{planned}</td><td>{fine}</td>"),
        format!("rank 1</th><td>{planned}</td><td class=\"above\">{above}</td>"),
    ] {
        assert!(page.contains(&cells), "{cells}");
    }
}
