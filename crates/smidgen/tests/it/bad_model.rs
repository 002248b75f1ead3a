//! Models and adapters that are damaged, contradict themselves or are not what the recipe says.
//!
//! Exit code 1, the file and the tensor by name, nothing written. Damage of every other byte of a header
//! is the business of `checkpoint_mutations.rs`; here it goes through the program.

use crate::scratch::{Scratch, fixture};
use serde_json::{Value, json};

const WEIGHTS: &str = "model/model.safetensors";

/// Header and data of a safetensors file.
pub fn split(bytes: &[u8]) -> (Value, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + length]).unwrap(), bytes[8 + length..].to_vec())
}

pub fn join(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Changes the header of the model's weights and leaves the data as it is.
fn with_header(edit: impl FnOnce(&mut Value)) -> Scratch {
    let scratch = Scratch::new();
    let (mut header, data) = split(&scratch.read(WEIGHTS));
    edit(&mut header);
    scratch.write(WEIGHTS, join(&header, &data));
    scratch
}

/// Changes the values of one tensor of the model's weights.
fn with_values(scratch: &Scratch, tensor: &str, value: f32) {
    let (header, mut data) = split(&scratch.read(WEIGHTS));
    let offsets = &header[tensor]["data_offsets"];
    let [begin, end] = [0, 1].map(|index| offsets[index].as_u64().unwrap() as usize);
    data[begin..end].chunks_exact_mut(4).for_each(|bytes| bytes.copy_from_slice(&value.to_le_bytes()));
    scratch.write(WEIGHTS, join(&header, &data));
}

const NORM: &str = "model.norm.weight";

#[test]
fn folders_that_hold_no_model() {
    let scratch = Scratch::new();
    let words =
        ["the model folder `", "absent` does not exist", "paths in a recipe are relative to the recipe"];
    scratch.train_refused(1, &["model.path=absent"], &words);
    scratch.refused(1, &["plan", "recipe.toml", "model.path=absent"], &words);
    scratch.train_refused(1, &["model.path=data.jsonl"], &["data.jsonl` is not a folder"]);
    scratch.write("bare/readme.txt", "");
    scratch.train_refused(1, &["model.path=bare"], &["bare` has no `config.json`"]);
    scratch.train_refused(
        1,
        &["model.path=adapter"],
        &["holds an adapter and not a model", "the base model"],
    );
    scratch.write("only/config.json", scratch.text("model/config.json"));
    let words = ["only` has a config but no weights", "hint: `smidgen plan` needs no weights"];
    scratch.train_refused(1, &["model.path=only"], &words);
    scratch.write("only/config.json", "{\"model_type\": ");
    scratch.train_refused(1, &["model.path=only"], &["only/config.json"]);
}

#[test]
fn truncated_weights() {
    let scratch = Scratch::new();
    let whole = scratch.read(WEIGHTS);
    let total = "190,976 bytes";
    for (kept, words) in [
        (
            whole.len() - 1,
            &["the file is truncated: 190,975 of ", total, "is incomplete; download it again"][..],
        ),
        (100_000, &["the file is truncated: 100,000 of ", total, "tensor `model."]),
        (1_000, &["the file is truncated: 1,000 of at least "]),
        (5, &["the file is truncated: 5 of at least 8 bytes"]),
        (0, &["the file is truncated: 0 of at least 8 bytes"]),
    ] {
        scratch.write(WEIGHTS, &whole[..kept]);
        scratch.train_refused(1, &[], &[&["model/model.safetensors`: "], words].concat());
    }
}

#[test]
fn shards_that_are_not_all_there() {
    let scratch = Scratch::of("llama-mha");
    std::fs::remove_file(scratch.path("model/model-00002-of-00002.safetensors")).unwrap();
    let words =
        ["model.safetensors.index.json` names 1 of 2 shards that do not exist", "model-00002-of-00002"];
    scratch.train_refused(1, &[], &words);
    std::fs::remove_file(scratch.path("model/model.safetensors.index.json")).unwrap();
    scratch.train_refused(1, &[], &["download the index as well"]);
}

#[test]
fn headers_that_lie() {
    let begin_of = |header: &Value| header[NORM]["data_offsets"][0].as_u64().unwrap();
    let beyond = with_header(|header| {
        let begin = begin_of(header);
        header[NORM] =
            json!({"dtype": "F32", "shape": [1 << 20], "data_offsets": [begin, begin + (4 << 20)]});
    });
    beyond.train_refused(1, &[], &["model.safetensors`: "]);
    let last = with_header(|header| {
        let ends = header.as_object().unwrap().values().filter_map(|it| it["data_offsets"][1].as_u64());
        let end = ends.max().unwrap();
        header["more"] = json!({"dtype": "F32", "shape": [1000], "data_offsets": [end, end + 4000]});
    });
    last.train_refused(1, &[], &["the file is truncated", "tensor `more` is incomplete"]);
    let overlapping = with_header(|header| {
        let begin = begin_of(header) - 64;
        header[NORM]["data_offsets"] = json!([begin, begin + 192]);
    });
    overlapping.train_refused(1, &[], &["begins at ", ", the tensors before it end at "]);
    let sized = with_header(|header| header[NORM]["shape"] = json!([49]));
    sized.train_refused(1, &[], &["`model.norm.weight` of shape [49] and type F32 does not fit its offsets"]);
    let huge = with_header(|header| header[NORM]["shape"] = json!([u64::MAX >> 1, u64::MAX >> 1]));
    huge.train_refused(1, &[], &["`model.norm.weight`"]);
    let scratch = Scratch::new();
    let mut bytes = scratch.read(WEIGHTS);
    for (claim, words) in
        [(u64::MAX, "the header claims "), (99_999_999, "the file is truncated"), (0, "header")]
    {
        bytes[..8].copy_from_slice(&claim.to_le_bytes());
        scratch.write(WEIGHTS, &bytes);
        scratch.train_refused(1, &[], &["model.safetensors`: ", words]);
    }
}

#[test]
fn a_config_that_contradicts_the_weights() {
    let contradiction =
        ["config.json contradicts the weights in `", "hint: config.json and the safetensors files"];
    for (key, value, words) in [
        ("hidden_size", 64, "`model.embed_tokens.weight` is [211, 48], the config says [211, 64]"),
        ("vocab_size", 212, "`model.embed_tokens.weight` is [211, 48], the config says [212, 48]"),
        (
            "intermediate_size",
            72,
            "`model.layers.0.mlp.gate_proj.weight` is [64, 48], the config says [72, 48]",
        ),
        ("num_hidden_layers", 3, "`model.layers.2.self_attn.q_proj.weight` is missing"),
        ("num_hidden_layers", 1, "`model.layers.1.mlp.up_proj.weight` is in the file but not in the config"),
    ] {
        let scratch = Scratch::new();
        scratch.edit_json("model/config.json", |config| config[key] = json!(value));
        scratch.train_refused(1, &[], &[&contradiction[..], &[words]].concat());
        scratch.refused(1, &["plan", "recipe.toml"], &[&contradiction[..], &[words]].concat());
    }
    let untied = Scratch::new();
    untied.edit_json("model/config.json", |config| config["tie_word_embeddings"] = json!(false));
    untied.train_refused(1, &[], &[&contradiction[..], &["`lm_head.weight` is missing"]].concat());
    let biased = Scratch::of("llama-bias-linear");
    biased.edit_json("model/config.json", |config| config["attention_bias"] = json!(false));
    let words = "`model.layers.0.self_attn.q_proj.bias` is in the file but not in the config's model";
    biased.train_refused(1, &[], &[&contradiction[..], &[words]].concat());
}

/// Transformers does not tie a head that differs from the embedding, whatever the config says. A copy stays tied.
#[test]
fn a_head_in_the_file_is_used_unless_it_is_a_copy_of_the_embedding() {
    let with_head = |factor: f32| {
        let scratch = Scratch::of("llama-gqa-tied");
        let (mut header, mut data) = split(&scratch.read(WEIGHTS));
        let embedding = header["model.embed_tokens.weight"].clone();
        let [begin, end] = [0, 1].map(|index| embedding["data_offsets"][index].as_u64().unwrap() as usize);
        let numbers = data[begin..end].as_chunks::<4>().0.to_vec();
        let first = data.len();
        data.extend(numbers.iter().flat_map(|four| (f32::from_le_bytes(*four) * factor).to_le_bytes()));
        header["lm_head.weight"] = embedding;
        header["lm_head.weight"]["data_offsets"] = json!([first, data.len()]);
        scratch.write(WEIGHTS, join(&header, &data));
        scratch
    };
    let said =
        "warning: config.json ties the head to the embedding, but the file has another `lm_head.weight`";
    let losses = |scratch: &Scratch| {
        let ended = scratch.run(&["train", "recipe.toml", "train.steps=2"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        (scratch.losses("run"), ended.stderr.contains(said))
    };
    let tied = losses(&Scratch::of("llama-gqa-tied"));
    assert_eq!(losses(&with_head(1.0)), tied);
    let other = losses(&with_head(-1.0));
    assert!(other.0 != tied.0 && other.1, "{other:?}");
    let untied = with_head(-1.0);
    untied.edit_json("model/config.json", |config| config["tie_word_embeddings"] = json!(false));
    assert_eq!(losses(&untied), (other.0, false));
}

#[test]
fn configs_that_cannot_be_compiled() {
    for (key, value, words) in [
        ("model_type", json!("mamba"), "the architecture `mamba` is not supported (supported: "),
        ("model_type", Value::Null, "`model_type`"),
        ("hidden_act", json!("relu"), "`hidden_act = "),
        ("hidden_size", json!("wide"), "`hidden_size` in config.json must be "),
        ("hidden_size", json!(-1), "`hidden_size` in config.json must be "),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_key_value_heads", json!(3), "4 attention heads cannot share 3 key-value heads"),
        (
            "rope_parameters",
            json!({"rope_type": "yarn", "rope_theta": 1e4}),
            "`rope_scaling.factor` is missing",
        ),
    ] {
        let scratch = Scratch::new();
        scratch.edit_json("model/config.json", |config| config[key] = value.clone());
        scratch.train_refused(1, &[], &["model/config.json`: ", words]);
    }
}

#[test]
fn weights_that_are_not_finite_end_the_first_step() {
    let scratch = Scratch::new();
    with_values(&scratch, NORM, f32::NAN);
    let ended = scratch.run(&["train", "recipe.toml"]);
    assert_eq!((ended.code, &*ended.stdout), (Some(1), ""));
    let error = ended.stderr.lines().find(|line| line.starts_with("error: ")).unwrap();
    assert!(error.starts_with("error: step 1 is not finite: loss NaN"), "{error}");
    assert!(error.contains("data.jsonl` line "), "{error}");
    assert!(ended.stderr.contains("\nhint: "));
    assert!(!scratch.exists("run/adapter") && !scratch.exists("run/.adapter.tmp"));
    assert_eq!(scratch.text("run/metrics.jsonl"), "");
}

#[test]
fn a_later_step_that_is_not_finite_leaves_the_checkpoint_before_it() {
    let scratch = Scratch::new();
    // The first update throws the adapter far beyond what the second step can compute with.
    let overrides = ["train.lr=1e30", "train.schedule=constant", "train.warmup=0", "train.save_every=1"];
    let ended = scratch.run(&[&["train", "recipe.toml"][..], &overrides].concat());
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("error: step 2 is not finite"), "{}", ended.stderr);
    assert!(!scratch.exists("run/adapter") && !scratch.exists("run/checkpoint-2"));
    assert_eq!(scratch.metrics("run").len(), 1);
    scratch.train("short", &[&overrides[..], &["train.steps=1"]].concat());
    for file in ["adapter_model.safetensors", "optimizer.safetensors"] {
        let [run, short] = ["run", "short"].map(|name| scratch.read(&format!("{name}/checkpoint-1/{file}")));
        assert!(run == short, "{file}");
    }
}

#[test]
fn adapters_to_start_from_that_do_not_fit() {
    let scratch = Scratch::new();
    let unfit = ["the adapter in `", "does not fit the recipe"];
    let words = [&unfit[..], &["hint: the adapter has rank 6, the recipe says 4"]].concat();
    let said = scratch.train_refused(1, &["adapter.init=adapter"], &words);
    assert_eq!(said.matches("hint: ").count(), 1, "{said}");
    let words = [&unfit[..], &["another base model"]].concat();
    let other = format!("adapter.init={}", fixture("llama-mha").join("adapter").display());
    scratch.train_refused(1, &[&other], &words);
    let words = [&unfit[..], &["unexpected", "the recipe targets `q_proj`"]].concat();
    scratch.train_refused(1, &["adapter.init=adapter", "adapter.rank=6", "adapter.targets=q_proj"], &words);
    let words = [&unfit[..], &["14 unexpected", "layers.0."]].concat();
    scratch.train_refused(1, &["adapter.init=adapter", "adapter.rank=6", "adapter.layers=[1]"], &words);
    let words = [
        "absent` does not exist",
        "hint: `adapter.init` is `default`, or the folder of a PEFT adapter or of a run",
    ];
    scratch.train_refused(1, &["adapter.init=absent"], &words);
    scratch.train_refused(1, &["adapter.init=model"], &["holds a model and not an adapter"]);
    let words =
        ["is of kind `lora`, the recipe asks for `rslora`", "hint: start from an adapter of kind `rslora`"];
    scratch.train_refused(1, &["adapter.init=adapter", "adapter.rank=6", "adapter.kind=rslora"], &words);
    scratch.edit_json("adapter/adapter_config.json", |config| config["use_dora"] = json!(true));
    let words = ["is of kind `dora`, the recipe asks for `lora`"];
    scratch.train_refused(1, &["adapter.init=adapter", "adapter.rank=6"], &words);
    scratch.edit_json("adapter/adapter_config.json", |config| config["use_dora"] = json!(false));
    let cut = &scratch.read("adapter/adapter_model.safetensors")[..9_000];
    scratch.write("adapter/adapter_model.safetensors", cut);
    scratch.train_refused(1, &["adapter.init=adapter", "adapter.rank=6"], &["the file is truncated"]);
}

/// Kinds of checkpoints that people try: what to use instead.
#[test]
fn checkpoints_of_other_kinds_get_a_hint() {
    let scratch = Scratch::new();
    let said = |arguments: &[&str]| {
        let ended = scratch.run(&[&["plan", "recipe.toml"], arguments].concat());
        assert_eq!(ended.code, Some(1), "{}", ended.stderr);
        ended.stderr.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let named = said(&["model.path=Qwen/Qwen2.5-7B-Instruct"]);
    assert!(
        named.contains("hint: for the model of Hugging Face write `hf:Qwen/Qwen2.5-7B-Instruct`"),
        "{named}"
    );
    assert!(!said(&["model.path=./Qwen/Qwen2.5-7B-Instruct"]).contains("hf:Qwen"));
    let config = scratch.json("model/config.json");
    for method in ["hqq", "quanto"] {
        let mut quantized = config.clone();
        quantized["quantization_config"] = serde_json::json!({ "quant_method": method });
        scratch.write("model/config.json", quantized.to_string());
        let said = said(&[]);
        assert!(
            said.contains(&format!("quant_method = {method}` in config.json is not supported")),
            "{said}"
        );
        assert!(
            said.contains("hint: use the checkpoint before its quantization: `model.base = \"nf4\"`"),
            "{said}"
        );
    }
    let mut experts = config.clone();
    experts["model_type"] = "dbrx".into();
    experts["ffn_config"] = serde_json::json!({"moe_num_experts": 16});
    scratch.write("model/config.json", experts.to_string());
    let said = said(&[]);
    assert!(said.contains("hint: this version has no reader of `dbrx` configs"), "{said}");
}

/// A name inside a file cannot speak to the terminal, and a link cannot show a file of the machine.
#[test]
fn names_are_escaped_and_links_stay_inside() {
    let scratch = Scratch::new();
    let config = scratch.json("model/config.json");
    let mut hostile = config.clone();
    hostile["model_type"] = "\u{1b}]0;owned\u{7}\u{1b}[2Jllama".into();
    scratch.write("model/config.json", hostile.to_string());
    let ended = scratch.run(&["plan", "recipe.toml"]);
    assert_eq!(ended.code, Some(1), "{}", ended.stderr);
    assert!(!ended.stderr.contains(['\u{1b}', '\u{7}']), "{:?}", ended.stderr);
    assert!(ended.stderr.contains("\\u{1b}]0;owned\\u{7}"), "{}", ended.stderr);

    scratch.write("model/config.json", config.to_string());
    scratch.write("outside.json", "{}");
    std::os::unix::fs::symlink("../outside.json", scratch.path("model/generation_config.json")).unwrap();
    let said = scratch.run(&["plan", "recipe.toml"]);
    assert_eq!(said.code, Some(1), "{}", said.stderr);
    let said = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("`generation_config.json` in the model folder"), "{said}");
}
