//! `plan --json`: the fields of the contract, sums that add up, and advice whose numbers are true.
//!
//! Where a larger model is needed, only its config is there: a plan reads no weights.

use crate::scratch::{Ended, Scratch};
use serde_json::{Value, json};

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number of bytes"))
}

fn row_sum(plan: &Value) -> u64 {
    plan["rows"].as_object().unwrap().values().map(bytes).sum()
}

/// A model whose activations and weights outweigh the fixed costs; its folder holds a config alone.
pub fn larger_model() -> Scratch {
    let scratch = Scratch::new();
    let config = json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 4096, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "attention_bias": false, "mlp_bias": false, "torch_dtype": "float32",
    });
    scratch.write("model-of-25M/config.json", config.to_string());
    let recipe = crate::scratch::RECIPE
        .replace("path = \"model\"", "path = \"model-of-25M\"")
        .replace("data.jsonl", "absent.jsonl")
        .replace("max_tokens = 64", "max_tokens = 512");
    scratch.write("recipe.toml", recipe);
    scratch
}

#[test]
fn every_field_of_the_contract_is_there() {
    let scratch = Scratch::new();
    let plan = scratch.plan(&[]);
    assert_eq!(plan["fits"], json!(true));
    assert_eq!(bytes(&plan["budget_bytes"]), 64 << 20);
    assert!(bytes(&plan["peak_bytes"]) > 0);
    let mut spaces: Vec<&String> = plan["spaces"].as_object().unwrap().keys().collect();
    spaces.sort();
    assert_eq!(spaces, ["device", "disk", "host", "pinned"]);
    plan["spaces"].as_object().unwrap().values().for_each(|space| assert!(space.is_u64()));
    let mut rows: Vec<&String> = plan["rows"].as_object().unwrap().keys().collect();
    rows.sort();
    let expected =
        ["activations", "adapters", "base_weights", "context", "gradients", "optimizer", "workspace"];
    assert_eq!(rows, expected);
    assert_eq!(plan["policy"]["device"], json!("cpu"));
    assert_eq!(plan["policy"]["threads"], json!(2));
    assert_eq!(plan["policy"]["recompute"], json!([]));
    assert!(bytes(&plan["policy"]["micro_tokens"]) >= 40);
    assert!(plan["step_ms"].as_f64().unwrap() > 0.0);
    assert!(plan["tokens_per_s"].as_f64().unwrap() > 0.0);
    let arena = &plan["arena"];
    let [reserved, live, transient, transient_live] =
        ["reserved_bytes", "peak_live_bytes", "transient_reserved_bytes", "transient_peak_live_bytes"]
            .map(|name| bytes(&arena[name]));
    assert!(live <= reserved && transient_live <= transient && transient < reserved);
    assert_eq!(reserved - transient, live - transient_live);
    let phases = plan["phases"].as_object().unwrap();
    assert!(!phases.is_empty());
    assert!(phases.values().all(|phase| bytes(phase) <= bytes(&plan["peak_bytes"])));
    assert_eq!(plan["advice"], json!([]));
}

/// By hand, for rank 16: in each of six layers 70,656 elements of matrices with at least 4096, and 4096 of B of k and
/// v, which keep f32. Each block of 256 in 8 bits has a scale of four bytes.
#[test]
fn the_optimizer_row_in_8_bits_is_exact() {
    let scratch = larger_model();
    let row = |optimizer: &str| {
        let plan =
            scratch.plan(&["adapter.rank=16", &format!("train.optimizer={optimizer}"), "memory.budget=4GiB"]);
        assert_eq!(row_sum(&plan), bytes(&plan["peak_bytes"]));
        bytes(&plan["rows"]["optimizer"])
    };
    let (large, small) = (6 * 70_656, 6 * 4096);
    assert_eq!(row("adamw"), 8 * (large + small));
    assert_eq!(row("adamw-8bit"), 2 * (large + 4 * large / 256) + 8 * small);
}

#[test]
fn rows_add_up_to_the_peak() {
    let cases = ["llama-gqa-tied", "llama-bias-linear", "llama-f16-some-layers"];
    let choices = [
        &[][..],
        &["memory.recompute=all"],
        &["memory.recompute=[1]", "memory.micro_tokens=48"],
        &["adapter.dropout=0.1", "adapter.targets=[q_proj,down_proj]", "train.batch=1"],
        &["data.train=absent.jsonl", "data.max_tokens=300"],
        &["model.base=bf16", "data.eval=data.jsonl", "train.eval_every=1"],
        &["memory.budget=1MiB"],
    ];
    for case in cases {
        let scratch = Scratch::of(case);
        for overrides in choices {
            let plan = scratch.plan(overrides);
            let peak = bytes(&plan["peak_bytes"]);
            assert_eq!(row_sum(&plan), peak, "{case} {overrides:?}");
            assert_eq!(bytes(&plan["spaces"]["device"]), peak, "{case} {overrides:?}");
            let context = bytes(&plan["rows"]["context"]);
            assert_eq!(bytes(&plan["arena"]["reserved_bytes"]) + context, peak, "{case} {overrides:?}");
        }
    }
}

#[test]
fn a_plan_that_does_not_fit_is_still_printed() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["plan", "recipe.toml", "--json", "memory.budget=1MiB"]);
    assert_eq!(ended.code, Some(1));
    let plan: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(plan["fits"], json!(false));
    assert!(bytes(&plan["peak_bytes"]) > bytes(&plan["budget_bytes"]));
    assert!(ended.stderr.starts_with("error: the smallest plan needs "), "{}", ended.stderr);
    let hints: Vec<&str> = ended.stderr.lines().filter_map(|line| line.strip_prefix("hint: ")).collect();
    let advice: Vec<&str> =
        plan["advice"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    assert_eq!(hints, advice);
    assert!(!hints.is_empty());
}

/// Budgets from the least to the most that a plan can use.
fn budgets_between(scratch: &Scratch, count: u64) -> Vec<u64> {
    let most = bytes(&scratch.plan(&["memory.budget=1TiB"])["peak_bytes"]);
    let least = bytes(&scratch.plan(&["memory.budget=1B"])["peak_bytes"]);
    assert!(least < most);
    (0..=count).map(|part| least + (most - least) * part / count).collect()
}

#[test]
fn a_budget_between_the_extremes_is_kept() {
    for scratch in [Scratch::new(), larger_model()] {
        let mut choices = Vec::new();
        for budget in budgets_between(&scratch, 6) {
            let plan = scratch.plan(&[&format!("memory.budget={budget}")]);
            assert_eq!(plan["fits"], json!(true), "{budget}");
            assert!(bytes(&plan["peak_bytes"]) <= budget, "{budget}");
            assert_eq!(row_sum(&plan), bytes(&plan["peak_bytes"]));
            let choice = (plan["policy"]["recompute"].clone(), plan["policy"]["micro_tokens"].clone());
            if !choices.contains(&choice) {
                choices.push(choice);
            }
        }
        assert_eq!(choices.last().unwrap().0, json!([]));
        assert!(choices.len() >= 3, "{choices:?}");
    }
}

/// What fits a budget fits a larger one.
#[test]
fn a_larger_budget_is_never_slower() {
    for scratch in [Scratch::new(), larger_model()] {
        let mut last_step_ms = f64::INFINITY;
        for budget in budgets_between(&scratch, 6) {
            let plan = scratch.plan(&[&format!("memory.budget={budget}")]);
            let step_ms = plan["step_ms"].as_f64().unwrap();
            assert!(step_ms <= last_step_ms, "{budget}: {step_ms} after {last_step_ms}");
            last_step_ms = step_ms;
        }
    }
}

#[test]
fn pinned_choices_are_taken_as_they_are() {
    let scratch = Scratch::new();
    for (pin, layers) in
        [("none", json!([])), ("all", json!([0, 1])), ("every:2", json!([0])), ("[1]", json!([1]))]
    {
        let plan = scratch.plan(&[&format!("memory.recompute={pin}")]);
        assert_eq!(plan["policy"]["recompute"], layers, "{pin}");
    }
    let plan = scratch.plan(&["memory.micro_tokens=50"]);
    assert_eq!(plan["policy"]["micro_tokens"], json!(50));
    assert!(bytes(&plan["extent"]["tokens"]) <= 50);
}

/// The keys that a piece of advice names, as overrides, and the size that it promises.
fn overrides_of(advice: &str) -> (Vec<String>, Option<String>) {
    let key = regex::Regex::new(r#"`([a-z_]+\.[a-z_]+) = "?([^`"]+)"?`"#).unwrap();
    let overrides = key.captures_iter(advice).map(|found| format!("{}={}", &found[1], &found[2])).collect();
    let need = regex::Regex::new(r"would need ([0-9.]+ [KMGT]iB)").unwrap();
    (overrides, need.captures(advice).map(|found| found[1].to_string()))
}

/// Follows each piece of advice of a plan that does not fit; each has to make it fit, in what it said.
fn follow_advice(scratch: &Scratch, overrides: &[&str]) -> Vec<String> {
    let plan = scratch.plan(overrides);
    assert_eq!(plan["fits"], json!(false), "{overrides:?}");
    let mut followed = Vec::new();
    for advice in plan["advice"].as_array().unwrap() {
        let advice = advice.as_str().unwrap();
        let (changes, need) = overrides_of(advice);
        if changes.is_empty() {
            assert!(advice.starts_with("planned without data"), "{advice}");
            continue;
        }
        let mut arguments: Vec<&str> = vec!["plan", "recipe.toml"];
        let is_changed =
            |text: &&&str| !changes.iter().any(|it| it.split('=').next() == text.split('=').next());
        arguments.extend(overrides.iter().filter(is_changed));
        arguments.extend(changes.iter().map(String::as_str));
        let Ended { code, stdout, stderr } = scratch.run(&arguments);
        assert_eq!(code, Some(0), "{overrides:?}: {advice}: {stderr}");
        let peak = stdout.lines().find(|line| line.starts_with("  peak")).unwrap();
        if let Some(need) = need {
            assert!(peak.contains(&format!("{need}   fits")), "{advice}: {peak}");
        }
        followed.push(changes.join(" "));
    }
    followed
}

#[test]
fn the_advice_is_true() {
    let scratch = larger_model();
    // With weights on disk a smaller storage is no remedy.
    let here = "memory.weights=device";
    let least = bytes(&scratch.plan(&[here, "memory.budget=1B"])["peak_bytes"]);
    for missing in [64 << 10, 1 << 20, 3 << 20] {
        let followed = follow_advice(&scratch, &[here, &format!("memory.budget={}", least - missing)]);
        assert!(followed.contains(&"memory.weights=auto".to_string()), "{missing}: {followed:?}");
        assert!(followed.iter().any(|change| change.contains("data.max_tokens=")), "{missing}: {followed:?}");
        assert!(followed.iter().any(|change| change.contains("model.base=bf16")), "{missing}: {followed:?}");
        assert!(followed.iter().any(|change| change.contains("memory.budget=")), "{missing}: {followed:?}");
    }
}

#[test]
fn the_least_budget_is_the_least() {
    let scratch = larger_model();
    let advice = scratch.plan(&["memory.budget=1B"])["advice"].clone();
    let words =
        advice.as_array().unwrap().iter().filter_map(Value::as_str).find(|it| it.contains("least that fits"));
    let number = regex::Regex::new(r#""(\d+)MiB""#).unwrap();
    let mebibytes: u64 = number.captures(words.unwrap()).unwrap()[1].parse().unwrap();
    assert_eq!(scratch.plan(&[&format!("memory.budget={mebibytes}MiB")])["fits"], json!(true));
    assert_eq!(scratch.plan(&[&format!("memory.budget={}MiB", mebibytes - 1)])["fits"], json!(false));
}

#[test]
fn a_pinned_choice_that_costs_the_budget_is_named() {
    let scratch = larger_model();
    let none = bytes(&scratch.plan(&["memory.recompute=none", "memory.budget=1B"])["peak_bytes"]);
    let budget = format!("memory.budget={}", none - (64 << 10));
    let plan = scratch.plan(&["memory.recompute=none", &budget]);
    let first = plan["advice"][0].as_str().unwrap();
    assert!(first.starts_with("`memory.recompute = \"auto\"` would need "), "{first}");
    assert_eq!(scratch.plan(&["memory.recompute=auto", &budget])["fits"], json!(true));
}

#[test]
fn the_advice_beside_a_pinned_choice_is_true() {
    let scratch = larger_model();
    let below = |pin: &str| {
        let least = bytes(&scratch.plan(&[pin, "memory.budget=1B"])["peak_bytes"]);
        format!("memory.budget={}", least - (1 << 20))
    };
    let budget = below("memory.recompute=none");
    let followed = follow_advice(&scratch, &["memory.recompute=none", &budget]);
    assert!(followed.contains(&"memory.recompute=auto".to_string()), "{followed:?}");
    // Samples have 512 tokens: the pin is what is too large, and no sample needs to be cut.
    let budget = below("memory.micro_tokens=2048");
    let followed = follow_advice(&scratch, &["memory.micro_tokens=2048", &budget]);
    assert!(followed.iter().any(|change| change.starts_with("memory.micro_tokens=")), "{followed:?}");
}

#[test]
fn the_plan_of_a_run_is_the_plan_that_was_printed() {
    let scratch = Scratch::new();
    let least = bytes(&scratch.plan(&["memory.budget=1B"])["peak_bytes"]);
    let tight = format!("memory.budget={}", least + 4096);
    for (output, overrides) in [
        ("wide", vec![]),
        ("tight", vec![&*tight]),
        ("pinned", vec!["memory.micro_tokens=60", "memory.recompute=[0]", "adapter.dropout=0.1"]),
    ] {
        scratch.train(output, &overrides);
        assert_eq!(scratch.json(&format!("{output}/plan.json")), scratch.plan(&overrides), "{output}");
    }
}

/// By hand: 448,512 elements of A and B in six layers; value, gradient and two moments in f32.
#[test]
fn trained_parameters_are_counted_with_their_bytes() {
    let scratch = larger_model();
    let plan = scratch.plan(&["adapter.rank=16", "memory.budget=4GiB"]);
    assert_eq!(plan["trained_parameters"], json!(448_512));
    assert_eq!(plan["bytes_per_trained_parameter"], json!(16.0));
    let table = scratch.run(&["plan", "recipe.toml", "adapter.rank=16", "memory.budget=4GiB"]);
    let line = "trained: 448,512 parameters, 16.0 bytes each with gradient and optimizer state";
    assert!(table.stdout.contains(line), "{}", table.stdout);
}

/// A GPU holds copies in bf16 next to the weights, with padding; the weights alone are base weights.
#[test]
fn copies_of_adapters_are_adapters() {
    let scratch = larger_model();
    let of = |overrides: &[&str]| {
        let gpu = [
            "memory.device=auto",
            "memory.profile=rtx-4090",
            "memory.budget=8GiB",
            "model.base=bf16",
            "model.compute=bf16",
        ];
        scratch.plan(&[&gpu[..], overrides].concat())
    };
    let (plan, without) = (of(&["adapter.rank=16"]), of(&["adapter.rank=1"]));
    assert_eq!(plan["rows"]["base_weights"], without["rows"]["base_weights"]);
    assert!(bytes(&plan["rows"]["adapters"]) >= 6 * 448_512, "{}", plan["rows"]);
    assert_eq!(row_sum(&plan), bytes(&plan["peak_bytes"]));
    assert_eq!(plan["bytes_per_trained_parameter"], json!(18.0));
}

#[test]
fn no_speed_is_predicted_for_a_gpu_of_which_nothing_is_known() {
    let scratch = Scratch::new();
    let unknown = ["memory.device=cuda:77", "memory.budget=2GiB"];
    let plan = scratch.plan(&unknown);
    assert_eq!(
        (&plan["fits"], &plan["step_ms"], &plan["tokens_per_s"]),
        (&json!(true), &json!(null), &json!(null))
    );
    assert_eq!(plan["profile"]["origin"], json!("assumed"));
    let said = scratch.run(&[&["plan", "recipe.toml"], &unknown[..]].concat()).stdout;
    assert!(
        said.contains("predicted: no speed (an unknown GPU, ") && said.contains("memory.profile"),
        "{said}"
    );
    let page = scratch.run(&[&["plan", "recipe.toml", "--html", "page.html"], &unknown[..]].concat());
    assert_eq!(page.code, Some(0), "{}", page.stderr);
}

#[test]
fn a_plan_for_a_gpu_says_which_host_memory_it_assumes() {
    let scratch = larger_model();
    let card =
        ["memory.device=auto", "memory.profile=rtx-4090", "memory.budget=700MiB", "memory.weights=host"];
    let open = scratch.plan(&card);
    let needed = bytes(&open["host_memory"]["needed_bytes"]);
    assert!(needed > bytes(&open["spaces"]["pinned"]), "{}", open["host_memory"]);
    assert_eq!(open["host_memory"]["offload_limit_bytes"], json!(32u64 << 30));
    let note = |plan: &Value, words: &str| {
        plan["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().contains(words))
    };
    assert!(note(&open, "within 32.00 GiB, which is assumed for a card by name"), "{}", open["notes"]);
    let unknown = scratch.plan(&["memory.device=cuda:63", "memory.budget=700MiB", "memory.weights=host"]);
    assert_eq!(unknown["host_memory"]["offload_limit_bytes"], json!(null));
    assert!(note(&unknown, "assumes a machine with "), "{}", unknown["notes"]);
    let limited = scratch.plan(&[&card[..], &["memory.host_budget=1GiB"]].concat());
    assert_eq!(limited["host_memory"]["offload_limit_bytes"], json!(1 << 30));
    assert!(note(&limited, "within their limit of 1.00 GiB"), "{}", limited["notes"]);
    assert_eq!(scratch.plan(&[])["host_memory"], json!(null));
}

/// Tests have no network and an empty cache: what README's first command does on such a machine.
#[test]
fn a_published_model_is_planned_without_network() {
    let scratch = Scratch::new();
    let card = ["memory.device=auto", "memory.profile=rtx-4090", "memory.budget=12GiB"];
    let of = |path: &str| scratch.plan(&[&card[..], &[path]].concat());
    let shapes = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/shapes");
    let known = of("model.path=hf:Qwen/Qwen2.5-7B-Instruct");
    let from_file = of(&format!("model.path={shapes}/qwen2.5-7b-instruct"));
    for field in ["policy", "rows", "peak_bytes", "step_ms"] {
        assert_eq!(known[field], from_file[field], "{field}");
    }
    let note = "`hf:Qwen/Qwen2.5-7B-Instruct` is not downloaded: planned from its sizes, which smidgen knows, as if \
                it were stored as bf16";
    assert!(known["notes"].as_array().unwrap().contains(&json!(note)), "{}", known["notes"]);
    // Rows of text need a tokenizer, which the program does not have.
    scratch.write("rows.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let with_text = ["model.path=hf:Qwen/Qwen2.5-7B-Instruct", "data.train=rows.jsonl", "data.format=auto"];
    let notes = scratch.plan(&[&card[..], &with_text[..]].concat())["notes"].to_string();
    assert!(notes.contains("planned without data (there is no tokenizer for `qwen2.5-7b` here"), "{notes}");
    // A model that the program does not know, and a run, still need the network.
    let words = ["`hf:org/unknown` is not in the cache"];
    scratch.refused(1, &["plan", "recipe.toml", "model.path=hf:org/unknown"], &words);
    scratch.train_refused(1, &["model.path=hf:Qwen/Qwen2.5-7B-Instruct"], &["is not in the cache"]);
}

/// Frozen weights in pinned memory exist once per machine; all else is counted for each of its ranks.
#[test]
fn ranks_of_a_machine_share_pinned_weights() {
    let scratch = larger_model();
    let card = [
        "memory.device=auto",
        "memory.profile=rtx-4090",
        "memory.weights=host",
        "memory.budget=4GiB",
        "memory.shard=none",
        "train.batch=8",
    ];
    let plan = |more: &[&str]| scratch.plan(&[&card[..], more].concat());
    let [one, four, nodes] = [&[][..], &["--ranks", "4"], &["--ranks", "4", "--nodes", "2"]].map(plan);
    let host = |plan: &Value, name: &str| bytes(&plan["host_memory"][name]);
    assert_eq!(host(&one, "shared_bytes"), 0);
    let shared = host(&four, "shared_bytes");
    assert!(shared > 0 && shared <= bytes(&four["spaces"]["pinned"]));
    // By hand: ranks on two machines are two on each, so two ranks less are two private parts less.
    let own = (host(&four, "needed_bytes") - host(&nodes, "needed_bytes")) / 2;
    assert_eq!(host(&four, "needed_bytes"), shared + 4 * own);
    // Room for one copy and for what is not shared, and not for two copies.
    let enough = format!("memory.host_budget={}", shared + shared / 2);
    assert_eq!(plan(&["--ranks", "4", &enough])["fits"], json!(true));
    let short = format!("memory.host_budget={}", shared / 2);
    let refused = plan(&["--ranks", "4", &short]);
    assert_eq!(refused["fits"], json!(false));
    let advice = refused["advice"].as_array().unwrap().iter().filter_map(Value::as_str);
    let line = advice.filter_map(|line| line.strip_prefix("`memory.host_budget = \"")).next();
    let (enough, _) = line.and_then(|line| line.split_once("\"` is enough")).expect("a line of advice");
    let advised = format!("memory.host_budget={enough}");
    assert_eq!(plan(&["--ranks", "4", &advised])["fits"], json!(true), "{advised}");
    let arguments = [&["plan", "recipe.toml", "--ranks", "4"], &card[..]].concat();
    let table = scratch.run(&arguments).stdout;
    assert!(
        table.contains("shared by the ranks of a machine") && table.contains("(for 4 ranks, which share "),
        "{table}"
    );
}

/// Samples are whole, and the first token of each carries no loss.
#[test]
fn without_data_a_micro_batch_is_one_that_can_occur() {
    let scratch = larger_model();
    let check = |overrides: &[&str], samples: u64| {
        let plan = scratch.plan(&[overrides, &["memory.budget=4GiB"]].concat());
        let extent = json!({"tokens": 512 * samples, "rows": 511 * samples, "segments": samples});
        assert_eq!(plan["extent"], extent, "{overrides:?}");
    };
    check(&["train.batch=6"], 6);
    check(&["train.batch=6", "memory.micro_tokens=1300"], 2);
    scratch.write("recipe.toml", scratch.text("recipe.toml").replace("batch = 4", "batch_tokens = 1700"));
    check(&[], 3);
}

/// What the note about more memory says is enough, and does keep everything on the device.
#[test]
fn the_memory_that_would_keep_everything_is_enough() {
    let scratch = larger_model();
    let roomy = scratch.plan(&["train.batch=16", "memory.budget=8GiB"]);
    let one = scratch.plan(&["train.batch=16", "memory.budget=8GiB", "memory.micro_tokens=512"]);
    let (whole, least) = (bytes(&roomy["peak_bytes"]), bytes(&one["peak_bytes"]));
    assert!(whole > 2 * least, "a whole batch needs far more than one sample");
    let budget = least - (least >> 4);
    let tight = scratch.plan(&["train.batch=16", &format!("memory.budget={budget}")]);
    let notes: Vec<&str> = tight["notes"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let note = notes.iter().find_map(|note| note.split_once(" MiB more would keep everything on the device"));
    let more: f64 = note.unwrap_or_else(|| panic!("{notes:?}")).0.parse().unwrap();
    let enough = budget + ((more + 0.01) * f64::from(1 << 20)) as u64;
    assert!(enough < whole, "{more} MiB more for {budget} bytes, {whole} for a whole batch");
    let plan = scratch.plan(&["train.batch=16", &format!("memory.budget={enough}")]);
    assert_eq!(plan["policy"]["recompute"], json!([]));
    assert_eq!(plan["spaces"]["disk"], json!(0));
}

#[test]
fn two_plans_are_compared() {
    let scratch = Scratch::new();
    let compare = |other: &[&str]| {
        let ended = scratch.run(&[&["plan", "recipe.toml", "--json"], other].concat());
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        serde_json::from_str::<Value>(&ended.stdout).unwrap()
    };
    let rank = compare(&["adapter.rank=4", "--against", "adapter.rank=8"]);
    let differences = &rank["differences"];
    assert_eq!(
        differences["trained_parameters"]["this"].as_f64().map(|one| 2.0 * one),
        differences["trained_parameters"]["other"].as_f64()
    );
    assert_eq!(rank["against"]["peak_bytes"], scratch.plan(&["adapter.rank=8"])["peak_bytes"]);
    let text = scratch.text("recipe.toml");
    scratch.write("other.toml", text);
    scratch.train("run", &[]);
    for other in ["other.toml", "run", "run/plan.json"] {
        let same = compare(&["--against", other]);
        assert_eq!(same["differences"], json!({}), "{other}");
    }
    let table = scratch.run(&["plan", "recipe.toml", "--against", "memory.recompute=all"]);
    assert!(
        table.stdout.contains("this - other") && table.stdout.contains("recompute of 0 of"),
        "{}",
        table.stdout
    );
    scratch.refused(
        2,
        &["plan", "recipe.toml", "--against", "run", "--against", "other.toml"],
        &["takes one recipe, plan or run"],
    );
    scratch.refused(
        1,
        &["plan", "recipe.toml", "--against", "absent.json"],
        &["cannot read the plan `absent.json`"],
    );
}

/// By hand: of gradients that take G bytes, a ring of N ranks passes 2 G (N - 1) / N over each of its links.
#[test]
fn a_plan_for_ranks_states_what_they_exchange() {
    let scratch = larger_model();
    let card = ["memory.device=auto", "memory.budget=auto", "memory.profile=rtx-4090", "train.batch=8"];
    let plan = |arguments: &[&str]| scratch.plan(&[&card[..], arguments].concat());
    let alone = plan(&[]);
    assert_eq!((&alone["ranks"], &alone["nodes"]), (&json!(1), &json!(1)));
    assert_eq!((&alone["exchange"], &alone["efficiency"]), (&Value::Null, &Value::Null));
    let ranks = plan(&["--ranks", "4", "memory.shard=none"]);
    assert_eq!((&ranks["ranks"], &ranks["nodes"]), (&json!(4), &json!(1)));
    let exchange = &ranks["exchange"];
    let gradients = 4 * bytes(&ranks["trained_parameters"]);
    let summed = bytes(&exchange["gradient_bytes"]);
    assert!(summed >= gradients * 6 / 4 && summed < gradients * 6 / 4 + 1024, "{summed} of {gradients}");
    assert_eq!((bytes(&exchange["weight_bytes"]), bytes(&exchange["update_bytes"])), (0, 0));
    assert_eq!(exchange["link"], json!("pcie-4"));
    let efficiency = ranks["efficiency"].as_f64().unwrap();
    assert!(0.0 < efficiency && efficiency <= 1.0, "{efficiency}");
    // All ranks together: eight samples of 512 tokens per step.
    let tokens = ranks["tokens_per_s"].as_f64().unwrap() * ranks["step_ms"].as_f64().unwrap() / 1e3;
    assert!((tokens - 4096.0).abs() < 0.01, "{tokens}");

    let divided = plan(&["--ranks", "4", "memory.shard=weights"]);
    assert!(
        bytes(&divided["exchange"]["weight_bytes"]) > 0 && bytes(&divided["exchange"]["update_bytes"]) > 0
    );
    assert!(bytes(&divided["rows"]["base_weights"]) < bytes(&ranks["rows"]["base_weights"]));
    let far = plan(&["--ranks", "4", "--nodes", "2", "--network", "ethernet-25g", "memory.shard=none"]);
    assert_eq!(far["exchange"]["link"], json!("ethernet-25g"));
    assert!(far["efficiency"].as_f64().unwrap() < efficiency, "{far:#}");
    // Nine samples on four ranks: three for one of them, two for the others.
    let uneven = plan(&["--ranks", "4", "train.batch=9", "memory.shard=none"]);
    assert!(uneven["efficiency"].as_f64().unwrap() <= 0.75, "{uneven:#}");
    let shown = scratch.run(&["plan", "recipe.toml", "train.batch=8", "--ranks", "4", "--nodes", "2"]).stdout;
    for words in
        ["per rank, 4 ranks on 2 machines", "over each link per step: ", "efficiency: ", "of all ranks"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    let scratch = larger_model();
    for (arguments, words) in [
        (&["--ranks", "0"][..], "at least one rank"),
        (
            &["--ranks", "3", "--nodes", "2", "train.batch=8"],
            "3 ranks cannot be spread evenly over 2 machines",
        ),
        (
            &["--ranks", "4", "train.batch=3"],
            "`train.batch = 3` is the batch of all ranks together, and there are 4",
        ),
        (&["--ranks", "2", "--nodes", "2", "--network", "pigeon"], "known: nvlink-4, nvlink-3, pcie-5"),
        (&["--network", "pcie-4"], "the link between machines"),
    ] {
        let ended = scratch.run(&[&["plan", "recipe.toml"], arguments].concat());
        assert_eq!(ended.code, Some(2), "{arguments:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(words), "{arguments:?}: {}", ended.stderr);
    }
}
