//! Tests of rendering: the text of a recipe reads back to the same recipe.
//!
//! It is read back in another folder and another working directory: a job must not depend on either.

use std::path::{Path, PathBuf};

use expect_test::expect;

use super::super::keys::KEYS;
use super::*;

#[test]
fn job_reads_back_to_the_same_recipe() {
    let rich = [
        "model.path=hf:org/name",
        "model.base=nf4",
        "adapter.kind=dora",
        "adapter.rank=5",
        "adapter.alpha=7.25",
        "adapter.targets=[q_proj,v_proj]",
        "adapter.layers=[3,1]",
        "adapter.init=start",
        "adapter.rank_pattern={z_proj=8,a_proj=4}",
        "adapter.alpha_pattern={\"a \\\"quoted\\\" one\"=0.1}",
        "data.train=[a.json,'b \"c\".json']",
        "data.eval=e.json",
        "data.limit=7",
        "data.columns={prompt=the question, completion=\"a=b, c\"}",
        "data.mix=[{path=m.json,weight=0.3},{path=[n.json,'o p.json'],weight=2,format=chat,columns={messages=turns}}]",
        "data.on_bad_row=skip",
        "data.template=t.jinja",
        "train.batch_tokens=4096",
        "train.epochs=2.5",
        "train.lr=1.2345e-7",
        "train.warmup=12",
        "eval.answer=\\d+\t(x)",
        "memory.device=cuda:1",
        "memory.budget=1234567891",
        "memory.host_budget=1.5GiB",
        "memory.micro_tokens=77",
        "memory.recompute=every:3",
        "memory.weights=host:0.25",
        "expect.peak=22.42GiB",
    ];
    for recipe in [over(&[]), over(&rich), over(&["memory.recompute=[2,0]", "adapter.layers=last:4"])] {
        let job = render_job(&recipe);
        let elsewhere = RecipeSource {
            file: "job.toml".to_owned(),
            folder: PathBuf::from("/some/run"),
            text: job.clone(),
        };
        let again = parse_recipe(&elsewhere, &[], Path::new("/elsewhere"))
            .unwrap_or_else(|errors| panic!("{errors}\n{job}"));
        assert_eq!(again, recipe);
        assert_eq!(render_job(&again), job);
        assert_eq!(differences(&recipe, &again), vec![]);
    }
}

#[test]
fn job_is_every_key_in_order() {
    expect![[r#"
        [model]
        path = "/recipes/models/tiny"
        base = "as-stored"
        compute = "auto"

        [adapter]
        kind = "lora"
        rank = 16
        alpha = 32.0
        dropout = 0.0
        targets = "all-linear"
        layers = "all"
        init = "default"
        train = []
        rank_pattern = {}
        alpha_pattern = {}
        bias = "none"
        reg = 0.01
        sigma = 1.0

        [data]
        train = ["/here/a.json", "/here/b.json"]
        eval = []
        split = 0.0
        limit = 0
        columns = {}
        on_bad_row = "error"
        format = "auto"
        template = "auto"
        loss_on = "auto"
        max_tokens = 1024
        overflow = "auto"
        max_audio_seconds = 30.0
        audio_overflow = "drop"
        audio_dir = ""
        mix = []
        shuffle = true

        [train]
        objective = "sft"
        batch = 16
        epochs = 1.0
        lr = 0.0002
        schedule = "linear"
        warmup = 0.03
        optimizer = "adamw"
        master = "f32"
        weight_decay = 0.0
        betas = [0.9, 0.999]
        eps = 1e-8
        clip = 1.0
        seed = 42
        log_every = 10
        eval_every = 0
        save_every = 100
        keep = 3
        early_stop = 0

        [eval]
        task = "loss"
        limit = 0
        answer = ""

        [memory]
        device = "auto"
        profile = "auto"
        budget = "8GiB"
        host_budget = "auto"
        threads = 0
        micro_tokens = "auto"
        tile_tokens = "auto"
        recompute = "auto"
        activations = "auto"
        weights = "auto"
        optimizer_state = "auto"
        gradients = "auto"
        order = "auto"
        layers_per_lap = "auto"
        shard = "auto"
        reference = "auto"
        adapt = false

        [expect]
        peak = ""

        [output]
        dir = "/here/runs/one"
    "#]]
    .assert_eq(&render_job(&over(&["data.train=[a.json,b.json]", "memory.budget=8GiB", "train.epochs=1"])));
}

#[test]
fn differences_name_the_keys() {
    let old = over(&["train.steps=100", "memory.budget=8GiB"]);
    let new = over(&["train.epochs=2", "memory.budget=24GiB"]);
    let difference = |key: &str, old: Option<&str>, new: Option<&str>| KeyDifference {
        key: key.to_owned(),
        old: old.map(String::from),
        new: new.map(String::from),
    };
    assert_eq!(
        differences(&old, &new),
        [
            difference("train.steps", Some("100"), None),
            difference("train.epochs", None, Some("2.0")),
            difference("memory.budget", Some("\"8GiB\""), Some("\"24GiB\"")),
        ]
    );
}

#[test]
fn reference_has_a_row_for_every_key() {
    let reference = render_key_reference();
    assert_eq!(reference.lines().count(), KEYS.len() + 2);
    for row in reference.lines() {
        assert_eq!(row.matches('|').count(), 5, "a cell must not hold a bar: {row}");
    }
    expect![[r#"
        | key | default | accepts | meaning |
        |---|---|---|---|
        | `model.path` | required | `hf:org/name`, `pypi:package`, a folder or a .gguf file | the base model; paths start at the recipe's folder; `plan`, `fit` and `bench` also take short names such as `qwen2.5-7b` |
        | `model.base` | `"as-stored"` | one of `as-stored`, `f32`, `bf16`, `f16`, `fp8`, `int8`, `nf4`, `nf4-single` | storage of the frozen weights on the device; all but as-stored may change results |
        | `model.compute` | `"auto"` | one of `auto`, `f32`, `bf16`, `f16`, `fp8` | precision of matmuls and activations; auto = the device's best |
        | `adapter.kind` | `"lora"` | one of `lora`, `rslora`, `dora`, `ls-lora`, `full` | what is trained: an adapter, or with `full` the base weights |
        | `adapter.rank` | `16` | a whole number from 1 to 65536 | rank of the adapter |
        | `adapter.alpha` | `32.0` | a number above 0 | scale is alpha / rank; the default is twice the rank |"#]].assert_eq(&reference.lines().take(8).collect::<Vec<_>>().join("\n"));
}
