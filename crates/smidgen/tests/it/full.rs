//! Runs that train the base itself, through the program: what is trained, what is written, and that memory, a kill
//! and a resume leave no trace in it.

use crate::scratch::{RECIPE, Scratch};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A copy of a fixture with a recipe that trains the base.
fn scratch_of(case: &str, model: &str) -> Scratch {
    let scratch = Scratch::of(case);
    let recipe = RECIPE.replace("rank = 4\nalpha = 8\n", "kind = \"full\"\n").replace("1e-2", "1e-3");
    scratch.write("recipe.toml", recipe.replace("\"model\"", &format!("\"{model}\"")));
    scratch
}

fn scratch() -> Scratch {
    scratch_of("llama-gqa-tied", "model")
}

fn tensors(bytes: &[u8]) -> Tensors {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let own = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(own).collect()
}

fn model_of(scratch: &Scratch, folder: &str) -> Tensors {
    tensors(&scratch.read(&format!("{folder}/model.safetensors")))
}

/// Names of the tensors whose bytes differ.
fn changed(before: &Tensors, after: &Tensors) -> Vec<String> {
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    for (name, (dtype, shape, _)) in before {
        assert_eq!((dtype, shape), (&after[name].0, &after[name].1), "{name}");
    }
    before.keys().filter(|name| before[*name].2 != after[*name].2).cloned().collect()
}

#[test]
fn every_tensor_is_trained_and_the_model_is_one_like_the_base() {
    let scratch = scratch();
    let ended = scratch.train("run", &["data.eval=data.jsonl", "train.eval_every=6"]);
    assert!(ended.stderr.contains("full, all layers"), "{}", ended.stderr);
    assert!(ended.stderr.contains("  trained weights "), "{}", ended.stderr);
    assert!(ended.stderr.contains(", model in `"), "{}", ended.stderr);
    let page = scratch.text("run/report.html");
    assert!(page.contains(">trained weights<") && page.contains("all trained weights"));
    assert!(!page.contains(">adapters<") && !page.contains("all adapters"));
    let base = model_of(&scratch, "model");
    assert_eq!(changed(&base, &model_of(&scratch, "run/model")).len(), base.len());
    assert_eq!(scratch.json("run/model/config.json"), scratch.json("model/config.json"));
    assert!(!scratch.exists("run/adapter"));
    let losses = scratch.losses("run");
    assert!(losses[5] < losses[0], "{losses:?}");
    // The model by itself gives the loss that the run saw last.
    let rows = scratch.metrics("run");
    let seen = rows.iter().rev().find_map(|row| row.get("eval_loss")?.as_f64()).unwrap();
    let ended = scratch.run(&["eval", "run", "--json", "data.eval=data.jsonl"]);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let measured = report["base"]["eval_loss"].as_f64().or(report["base"]["loss"].as_f64()).unwrap();
    assert!((measured - seen).abs() < 1e-6 * seen, "{measured} for {seen}");
    let inspected = scratch.run(&["inspect", "run"]);
    assert_eq!(inspected.code, Some(0), "{}", inspected.stderr);
    // And is a base for the next.
    scratch.train("next", &["model.path=run/model", "train.steps=1"]);
}

#[test]
fn only_what_is_chosen_changes_and_the_rest_is_copied() {
    let scratch = scratch_of("llama-bias-linear", "model");
    let base = model_of(&scratch, "model");
    let check = |output: &str, overrides: &[&str], is_trained: fn(&str) -> bool| {
        scratch.train(output, &[overrides, &["train.lr=1e-2"]].concat());
        let after = model_of(&scratch, &format!("{output}/model"));
        let expected: Vec<String> = base.keys().filter(|name| is_trained(name)).cloned().collect();
        assert!(!expected.is_empty());
        assert_eq!(changed(&base, &after), expected, "{overrides:?}");
    };
    check("last", &["adapter.layers=last:1"], |name| name.starts_with("model.layers.1."));
    check("named", &["adapter.layers=[0]", "adapter.targets=[\"q_proj\", \"down_proj\"]"], |name| {
        name.starts_with("model.layers.0.self_attn.q_proj")
            || name.starts_with("model.layers.0.mlp.down_proj")
    });
    check("head", &["adapter.targets=[\"lm_head\"]"], |name| name == "lm_head.weight");
    check("norms", &["adapter.targets=[\"norms\"]"], |name| name.contains("norm"));
    check("embedding", &["adapter.targets=[\"embed_tokens\"]"], |name| name.contains("embed_tokens"));
    check("pattern", &["adapter.targets=[\"*.0.mlp.*\", \"lm_head\"]"], |name| {
        name.starts_with("model.layers.0.mlp.") || name == "lm_head.weight"
    });
    let said = scratch.text("last/plan.txt");
    assert!(said.contains("trained weights, bf16 in the base, are f32 while they are trained"), "{said}");
}

/// Towers are not trained, and every name stays as the base has it: also of tensors that nothing reads.
#[test]
fn tensors_beside_the_text_model_are_copied_with_their_names() {
    let unread = |case: &str, name: &str| match case {
        "gemma4-e" => ["layers.2.self_attn.", "layers.3.self_attn."].iter().any(|layer| {
            ["k_proj", "v_proj", "k_norm"].iter().any(|module| name.contains(&format!("{layer}{module}")))
        }),
        _ => !name.contains("language_model."),
    };
    for case in ["gemma3-wrapped", "gemma4-e"] {
        let scratch = scratch_of(case, "model");
        scratch.train("run", &["train.lr=1e-2"]);
        let base = model_of(&scratch, "model");
        let changed = changed(&base, &model_of(&scratch, "run/model"));
        assert!(changed.len() > 10, "{case}: {changed:?}");
        assert!(base.keys().any(|name| unread(case, name)), "{case}");
        assert!(!changed.iter().any(|name| unread(case, name)), "{case}: {changed:?}");
        assert_eq!(scratch.json("run/model/config.json"), scratch.json("model/config.json"));
        scratch.train("next", &["model.path=run/model", "train.steps=1"]);
        let (ended, next) = (scratch.losses("run"), scratch.losses("next"));
        assert!(next[0] < ended[0], "{case}: {ended:?}, then {next:?}");
    }
}

/// What was quantized is decoded where it is trained, and stays quantized where it is not.
#[test]
fn a_quantized_base_is_trained_on() {
    let scratch = scratch_of("gguf-full", "model.gguf");
    let ended = scratch.train("run", &["adapter.layers=[2]"]);
    assert!(ended.stderr.contains("q8_0 in the base, are f32 while they are trained"), "{}", ended.stderr);
    let plan = scratch.json("run/plan.json");
    let model = model_of(&scratch, "run/model");
    assert_eq!(model["model.layers.2.mlp.up_proj.weight"].0, Dtype::F16);
    assert_eq!(model["model.layers.2.input_layernorm.weight"].0, Dtype::F32);
    assert!(scratch.exists("run/model/config.json"));
    let frozen = plan["rows"]["base_weights"].as_u64().unwrap();
    let decoded: usize = model
        .iter()
        .filter(|(name, _)| !name.contains("layers.2."))
        .map(|(_, (_, shape, _))| 4 * shape.iter().product::<usize>())
        .sum();
    assert!(frozen < decoded as u64 / 3, "{frozen} of {decoded}");
    // A folder of a model that has no quantization any more.
    scratch.train("next", &["model.path=run/model", "adapter.layers=all", "train.steps=1"]);
    let nf4 = scratch_of("llama-nf4-single", "model");
    nf4.train("run", &["model.base=nf4", "adapter.layers=last:1"]);
    let base = model_of(&nf4, "model");
    let names = changed(&base, &model_of(&nf4, "run/model"));
    assert!(names.iter().all(|name| name.contains("layers.1.")), "{names:?}");
}

/// Where values lie and what is computed again shows in nothing that is written.
#[test]
fn memory_changes_bytes_and_seconds_alone() {
    let scratch = scratch();
    let optimizers = ["adamw", "adamw-8bit"];
    for optimizer in optimizers {
        let kept = format!("kept-{optimizer}");
        let optimizer = format!("train.optimizer={optimizer}");
        scratch.train(&kept, &[&optimizer, "memory.micro_tokens=64"]);
        let want = scratch.read(&format!("{kept}/model/model.safetensors"));
        for (name, overrides) in [
            ("recompute", &["memory.recompute=all"][..]),
            ("away", &["memory.optimizer_state=host", "memory.activations=host", "memory.weights=disk"]),
            ("gradients", &["memory.gradients=disk"]),
            ("all", &["memory.gradients=disk", "memory.optimizer_state=disk", "memory.weights=disk"]),
            ("threads", &["memory.threads=1"]),
        ] {
            let output = format!("{name}-{kept}");
            scratch.train(&output, &[&[optimizer.as_str(), "memory.micro_tokens=64"], overrides].concat());
            assert!(scratch.read(&format!("{output}/model/model.safetensors")) == want, "{output}");
        }
    }
}

/// The micro-batches of a step may pass the layers in another order: the bytes are the same.
#[test]
fn breadth_first_order_shows_in_nothing_that_is_written() {
    let scratch = scratch_of("llama-bias-linear", "model");
    let pinned = ["memory.micro_tokens=64", "train.steps=4"];
    scratch.train("depth", &[&pinned[..], &["memory.order=depth"]].concat());
    let want = scratch.read("depth/model/model.safetensors");
    let away = ["memory.weights=disk", "memory.gradients=disk", "memory.optimizer_state=disk"];
    let pairs = [&away[..], &["memory.layers_per_lap=2", "memory.activations=disk"]].concat();
    for (name, overrides) in [
        ("here", &[][..]),
        ("away", &away[..]),
        ("kept", &["memory.activations=disk"]),
        ("pairs", &pairs[..]),
    ] {
        scratch.train(name, &[&pinned[..], &["memory.order=breadth"], overrides].concat());
        assert_eq!(scratch.json(&format!("{name}/plan.json"))["policy"]["order"], "breadth");
        assert!(scratch.read(&format!("{name}/model/model.safetensors")) == want, "{name}");
        assert_eq!(scratch.losses(name), scratch.losses("depth"), "{name}");
    }
    // Adapters with streamed weights, too.
    let adapter = ["adapter.kind=lora", "memory.weights=disk", "memory.order=breadth"];
    scratch.train("lora", &[&pinned[..], &adapter[..1], &["memory.order=depth"]].concat());
    scratch.train("lora-breadth", &[&pinned[..], &adapter].concat());
    assert_eq!(scratch.losses("lora-breadth"), scratch.losses("lora"));
    scratch.train("lora-pairs", &[&pinned[..], &adapter, &["memory.layers_per_lap=2"]].concat());
    assert_eq!(scratch.losses("lora-pairs"), scratch.losses("lora"));
    assert_eq!(scratch.json("lora-pairs/plan.json")["policy"]["layers_per_lap"], 2);
    let said = scratch.text("lora-pairs/plan.txt");
    assert!(said.contains("laps: 2 layers at a time"), "{said}");
}

/// A tied head adds up its two gradients in another order there, so results differ by rounding.
#[test]
fn a_tied_head_is_trained_in_breadth_first_order_within_rounding() {
    let scratch = scratch();
    let pinned = ["memory.micro_tokens=64", "train.steps=4"];
    scratch.train("depth", &[&pinned[..], &["memory.gradients=disk"]].concat());
    assert_eq!(scratch.json("depth/plan.json")["policy"]["order"], "depth");
    for (name, own) in [("here", &[][..]), ("away", &["memory.gradients=disk", "memory.weights=disk"])] {
        scratch.train(name, &[&pinned[..], &["memory.order=breadth"], own].concat());
        for (one, other) in scratch.losses(name).iter().zip(scratch.losses("depth")) {
            assert!((one - other).abs() / other < 1e-6, "{name}: {one} and {other}");
        }
    }
}

/// Without clipping a layer is updated behind its backward pass, and no gradient is kept: the bytes are the same, and so
/// they are after a resume.
#[test]
fn early_updates_show_in_nothing_that_is_written() {
    let scratch = scratch_of("llama-bias-linear", "model");
    let pinned = ["memory.micro_tokens=64", "train.steps=6", "train.clip=0", "train.save_every=4"];
    scratch.train("depth", &[&pinned[..], &["memory.order=depth"]].concat());
    let weights = |output: &str| scratch.read(&format!("{output}/model/model.safetensors"));
    let away = ["memory.order=breadth", "memory.weights=disk", "memory.optimizer_state=disk"];
    let early = [&pinned[..], &away].concat();
    let ended = scratch.train("early", &early);
    let said: Vec<&str> = ended.stderr.split_whitespace().collect();
    assert!(
        said.join(" ").contains("each layer is updated right after its backward pass"),
        "{}",
        ended.stderr
    );
    assert!(weights("early") == weights("depth"));
    assert_eq!(scratch.losses("early"), scratch.losses("depth"));
    let norms = |output: &str| -> Vec<f64> {
        scratch.metrics(output).iter().filter_map(|row| row["grad_norm"].as_f64()).collect()
    };
    assert_eq!(norms("early"), norms("depth"));
    let gradients = |output: &str| scratch.json(&format!("{output}/plan.json"))["rows"]["gradients"].clone();
    assert!(gradients("early").as_u64() < gradients("depth").as_u64());
    scratch.forget_end("early", 4);
    scratch.train("early", &[&early[..], &["--resume"]].concat());
    assert!(weights("early") == weights("depth"));
    // Two layers at a time: both are updated behind their lap.
    scratch.train("pairs", &[&early[..], &["memory.layers_per_lap=2"]].concat());
    assert!(weights("pairs") == weights("depth"));
    assert_eq!(norms("pairs"), norms("depth"));
    // The longest rows come last, so a dry step of theirs comes first: it updates nothing.
    let text = scratch.text("data.jsonl");
    let mut rows: Vec<&str> = text.lines().collect();
    rows.sort_by_key(|row| row.matches(',').count());
    scratch.write("ordered.jsonl", rows.join("\n"));
    let ordered = ["data.train=ordered.jsonl", "data.shuffle=false", "train.batch=2"];
    scratch.train("ordered", &[&pinned[..], &ordered, &["memory.order=depth"]].concat());
    scratch.train("ordered-early", &[&early[..], &ordered].concat());
    assert!(weights("ordered-early") == weights("ordered"));
}

/// Weights in bf16 learn, and a killed run ends with the bytes of one that was not.
#[test]
fn bf16_masters_learn_and_resume() {
    let scratch = scratch_of("llama-bias-linear", "model");
    let run = ["train.master=bf16", "train.steps=12", "train.save_every=5", "train.optimizer=adamw-8bit"];
    let ended = scratch.train("clean", &run);
    assert!(ended.stderr.contains("rounded at random"), "{}", ended.stderr);
    let losses = scratch.losses("clean");
    assert!(losses[11] < losses[0], "{losses:?}");
    let saved = tensors(&scratch.read("clean/checkpoint-10/trained.safetensors"));
    let is_as_trained = |(dtype, shape, _): &(Dtype, Vec<usize>, Vec<u8>)| {
        *dtype == if shape.len() == 2 { Dtype::BF16 } else { Dtype::F32 }
    };
    assert!(saved.values().all(is_as_trained));
    scratch.train("other", &[&run[..], &["memory.gradients=disk", "memory.threads=1"]].concat());
    let weights = |output: &str| scratch.read(&format!("{output}/model/model.safetensors"));
    assert!(weights("other") == weights("clean"));
    scratch.forget_end("other", 5);
    scratch.train("other", &[&run[..], &["--resume"]].concat());
    assert!(weights("other") == weights("clean"));
    // Each weight takes half.
    let trained = |master: &str| scratch.plan(&[master])["rows"]["adapters"].as_u64().unwrap();
    assert!(trained("train.master=bf16") < trained("train.master=f32") * 6 / 10);
}

#[test]
fn killed_at_some_instant_it_ends_in_the_same_model() {
    for overrides in [
        &["adapter.layers=last:1"][..],
        &["train.optimizer=adamw-8bit", "memory.optimizer_state=host", "train.weight_decay=0.1"],
    ] {
        let scratch = scratch();
        let run = [&["train.steps=40", "train.save_every=3", "train.keep=2"][..], overrides].concat();
        scratch.train("clean", &run);
        for rows in [5, 17] {
            let mut child = scratch.start(&[&["train", "recipe.toml", "--resume"][..], &run].concat());
            loop {
                let text = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).unwrap_or_default();
                if text.lines().count() >= rows {
                    break;
                }
                assert!(child.try_wait().unwrap().is_none(), "ended before it was killed");
                std::thread::sleep(Duration::from_millis(1));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(!scratch.exists("run/model"), "it was done before it was killed");
        }
        scratch.train("run", &[&run[..], &["--resume"]].concat());
        let weights = |output: &str| scratch.read(&format!("{output}/model/model.safetensors"));
        assert!(weights("run") == weights("clean"), "{overrides:?}");
        assert_eq!(scratch.losses("run"), scratch.losses("clean"), "{overrides:?}");
        // A checkpoint holds what is trained, in f32, and nothing else of the model.
        let checkpoint = scratch.checkpoints("clean").pop().unwrap();
        let saved = tensors(&scratch.read(&format!("clean/checkpoint-{checkpoint}/trained.safetensors")));
        let is_trained = |name: &&String| overrides.len() > 1 || name.starts_with("model.layers.1.");
        let base = model_of(&scratch, "model");
        assert_eq!(saved.keys().collect::<Vec<_>>(), base.keys().filter(is_trained).collect::<Vec<_>>());
        assert!(saved.values().all(|(dtype, _, _)| *dtype == Dtype::F32));
        let again = scratch.run(&[&["train", "recipe.toml", "--resume"][..], &run].concat());
        assert!(again.stderr.contains("is finished"), "{}", again.stderr);
        // A broken one is refused with its name.
        std::fs::remove_dir_all(scratch.path("run/model")).unwrap();
        let newest = scratch.checkpoints("run").pop().unwrap();
        scratch.write(&format!("run/checkpoint-{newest}/trained.safetensors"), "no tensors");
        let refused = scratch.run(&[&["train", "recipe.toml", "--resume"][..], &run].concat());
        assert_eq!(refused.code, Some(1), "{}", refused.stderr);
        assert!(refused.stderr.contains("trained.safetensors"), "{}", refused.stderr);
    }
}

#[test]
fn early_stopping_saves_the_best_model() {
    let scratch = scratch();
    let stopping = [
        "data.eval=data.jsonl",
        "train.eval_every=1",
        "train.early_stop=2",
        "train.lr=0.5",
        "train.steps=20",
    ];
    let ended = scratch.train("run", &stopping);
    assert!(ended.stderr.contains("model of step"), "{}", ended.stderr);
}

#[test]
fn what_cannot_be_is_refused() {
    let scratch = scratch();
    let refused = |overrides: &[&str], words: &[&str]| scratch.train_refused(2, overrides, words);
    refused(&["adapter.rank=8"], &["`adapter.rank` has no effect", "trains the base weights"]);
    let all = refused(&["adapter.dropout=0.1", "adapter.sigma=2", "adapter.bias=all"], &["adapter.dropout"]);
    assert!(all.contains("adapter.sigma") && all.contains("adapter.bias"), "{all}");
    refused(&["adapter.layers=last:3"], &["3", "2"]);
    refused(&["adapter.targets=[\"proj\"]"], &["proj", "q_proj"]);
    refused(&["adapter.layers=last:1", "adapter.targets=[\"lm_head\"]"], &["choose no weight"]);
    refused(&["adapter.targets=[\"*.9.*\"]"], &["*.9.*", "norms"]);
    let depth = ["memory.layers_per_lap=2", "memory.order=depth", "train.lr=1e-5"];
    refused(&depth, &["memory.layers_per_lap", "depth-first"]);
    refused(&["memory.layers_per_lap=3", "train.lr=1e-5"], &["memory.layers_per_lap", "3", "has 2 layers"]);
    refused(&["memory.layers_per_lap=0"], &["memory.layers_per_lap", "at least 1"]);
    refused(&["adapter.kind=lora", "train.master=bf16"], &["`train.master` has no effect"]);
    // What the run makes would take the place of its base, or of somebody's model.
    scratch.train("made", &["train.steps=1"]);
    let overrides = ["output.dir=made", "model.path=made/model", "--resume"];
    scratch.train_refused(1, &overrides, &["would replace", "made/model"]);
    scratch.write("other/model/config.json", "{}");
    scratch.refused(1, &["train", "recipe.toml", "output.dir=other"], &["would replace"]);
    scratch.refused(1, &["train", "recipe.toml", "output.dir=other", "--resume"], &["would replace"]);
}

/// Where the whole model does not fit, fewer layers may, and it is said how many.
#[test]
fn a_budget_that_is_too_small_is_answered_with_layers() {
    let scratch = scratch();
    let least = |layers: &str| {
        let plan = scratch.plan(&["memory.budget=1MiB", &format!("adapter.layers={layers}")]);
        assert_eq!(plan["fits"], Value::Bool(false));
        plan["peak_bytes"].as_u64().unwrap()
    };
    let (all, last) = (least("all"), least("last:1"));
    assert!(last < all, "{last} {all}");
    let budget = format!("memory.budget={}", (last + all) / 2);
    let said =
        scratch.train_refused(1, &[&budget, "train.lr=1e-4"], &["`adapter.layers = \"last:1\"` would need"]);
    assert!(!said.contains("adapter.rank"), "{said}");
    scratch.train("run", &[&budget, "adapter.layers=last:1"]);
}

#[test]
fn commands_for_adapters_say_that_there_is_a_model() {
    let scratch = scratch();
    scratch.train("run", &["train.steps=1"]);
    let words = ["has no adapter", "run/model"];
    scratch.refused(1, &["merge", "run", "--output", "merged"], &words);
    scratch.refused(1, &["export", "run", "--output", "x.gguf"], &["has no adapter", "--merged"]);
    let plan = scratch.json("run/plan.json");
    assert!(plan["life"].get("merge").is_none());
    assert!(plan["life"].get("generate").is_some());
}

/// Zeros between a weight and the loss leave it without a gradient, which is said and not trained on.
#[test]
fn a_weight_without_a_gradient_is_named() {
    let scratch = scratch();
    let mut model = model_of(&scratch, "model");
    model.get_mut("model.layers.1.self_attn.o_proj.weight").unwrap().2.fill(0);
    let views = model.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let written = safetensors::serialize(views, None).unwrap();
    scratch.write("model/model.safetensors", written);
    let overrides = ["adapter.layers=[1]", "adapter.targets=[\"v_proj\"]"];
    let ended = scratch.run(&[&["train", "recipe.toml"][..], &overrides].concat());
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    let words = "gave no gradient to `model.layers.1.self_attn.v_proj.weight`";
    assert!(ended.stderr.contains(words), "{}", ended.stderr);
}
