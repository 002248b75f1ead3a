//! `smidgen fit`: every answer is the most that fits, as `smidgen plan` sees it.

use crate::scratch::Scratch;
use serde_json::{Value, json};

fn fit(scratch: &Scratch, arguments: &[&str]) -> Value {
    let ended = scratch.run(&[&["fit", "recipe.toml", "--json"], arguments].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    serde_json::from_str(&ended.stdout).unwrap()
}

fn fits(scratch: &Scratch, overrides: &[&str]) -> bool {
    // Without data: every sample has `max_tokens` tokens.
    let plan = scratch.plan(&[&["data.train=absent.jsonl", "train.batch=1"], overrides].concat());
    plan["fits"] == json!(true)
}

#[test]
fn the_answers_fit_and_one_step_more_does_not() {
    let scratch = Scratch::new();
    for pin in ["memory.weights=auto", "memory.weights=device"] {
        let least = scratch.plan(&[pin, "data.train=absent.jsonl", "train.batch=1", "memory.budget=1B"]);
        let budget = least["peak_bytes"].as_u64().unwrap() + (1 << 20);
        let budget = format!("{budget}");
        let answers = fit(&scratch, &["--budget", &budget, pin, "train.batch=1"]);
        let budget = format!("memory.budget={budget}");
        assert_eq!(answers["recipe"]["fits"], json!(true));
        let rank = answers["rank"]["most"].as_u64().unwrap();
        assert!(rank >= 1 && fits(&scratch, &[pin, &budget, &format!("adapter.rank={rank}")]), "{answers}");
        let more = format!("adapter.rank={}", rank + 1);
        let has = answers["rank"]["model_has"].as_u64().unwrap();
        assert!(rank == has || !fits(&scratch, &[pin, &budget, &more]), "{answers}");
        let tokens = answers["max_tokens"]["most"].as_u64().unwrap();
        let has = answers["max_tokens"]["model_has"].as_u64().unwrap();
        assert!(
            tokens > 0 && fits(&scratch, &[pin, &budget, &format!("data.max_tokens={tokens}")]),
            "{answers}"
        );
        let more = format!("data.max_tokens={}", tokens + 64);
        assert!(tokens + 64 > has || !fits(&scratch, &[pin, &budget, &more]), "{answers}");
        let samples = answers["batch"]["most_at_once"].as_u64().unwrap();
        let length = answers["recipe"]["max_tokens"].as_u64().unwrap();
        let at_once = |samples: u64| {
            let (batch, tokens) = (format!("train.batch={samples}"), samples * length);
            fits(&scratch, &[pin, &budget, &batch, &format!("memory.micro_tokens={tokens}")])
        };
        assert!(samples >= 1 && at_once(samples) && !at_once(samples + 1), "{answers}");
    }
}

#[test]
fn what_is_needed_fits_and_a_byte_less_does_not() {
    let scratch = Scratch::new();
    let answers = fit(&scratch, &["train.batch=1"]);
    let needs = answers["recipe"]["needs_bytes"].as_u64().unwrap();
    assert!(fits(&scratch, &[&format!("memory.budget={needs}")]), "{answers}");
    assert!(!fits(&scratch, &[&format!("memory.budget={}", needs - 1)]), "{answers}");
    assert_eq!(answers["smallest_card"]["name"], json!("gtx-1660"));
    assert!(answers["smallest_card"]["tokens_per_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn known_shapes_are_sorted_and_the_largest_that_fits_is_named() {
    let scratch = Scratch::new();
    let answers = fit(&scratch, &["--budget", "3GiB", "data.max_tokens=256"]);
    let models = answers["models"].as_array().unwrap();
    let parameters: Vec<u64> = models.iter().map(|model| model["parameters"].as_u64().unwrap()).collect();
    assert!(parameters.is_sorted() && parameters.len() >= 7);
    let last = models.iter().rev().find(|model| model["fits"] == json!(true)).unwrap();
    assert_eq!(answers["largest_model"], last["name"]);
    assert!(last["peak_bytes"].as_u64().unwrap() <= 3 << 30);
    let text = scratch.run(&["fit", "recipe.toml", "--budget", "3GiB", "data.max_tokens=256"]);
    assert_eq!(text.code, Some(0));
    assert!(
        text.stdout.contains("highest `adapter.rank`") && text.stdout.contains("smollm2-135m"),
        "{}",
        text.stdout
    );
    assert!(text.stdout.lines().all(|line| line.chars().count() <= 80), "{}", text.stdout);
}

#[test]
fn a_budget_that_is_none_is_refused() {
    let scratch = Scratch::new();
    for budget in ["much", "-3GiB", "0"] {
        let words = format!("--budget={budget}");
        scratch.refused(2, &["fit", "recipe.toml", &words], &["memory.budget"]);
    }
}

/// Gradients of trained weights are not offloaded, but ranks can divide them.
#[test]
fn the_fewest_ranks_that_fit_are_found() {
    let scratch = crate::plan_json::larger_model();
    let recipe = scratch.text("recipe.toml").replace("rank = 4\nalpha = 8\n", "kind = \"full\"\n");
    scratch.write("recipe.toml", recipe);
    // One rank could offload all of it.
    let here = ["memory.optimizer_state=device", "memory.gradients=device", "memory.weights=device"];
    let full = [&["train.batch=8", "memory.shard=gradients"], &here[..]].concat();
    let least = |ranks: &str| {
        let plan = scratch.plan(&[&full[..], &["memory.budget=1B", "--ranks", ranks]].concat());
        plan["peak_bytes"].as_u64().unwrap()
    };
    // MPI takes about 20 MiB of each rank, which two of them do not make up for here.
    let (one, two, four) = (least("1"), least("2"), least("4"));
    assert!(four < two && four < one, "{four} {two} {one}");
    let needed = |budget: u64| {
        let answers = fit(&scratch, &[&["--budget", &budget.to_string()], &full[..]].concat());
        answers["ranks"].clone()
    };
    assert_eq!(needed(one)["needed"], json!(1));
    let ranks = needed(four);
    assert_eq!((&ranks["needed"], &ranks["shard"]), (&json!(4), &json!("gradients")));
}
