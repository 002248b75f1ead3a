//! Configurations of other tools: each in `fixtures/import` becomes the recipe next to it.
//! Errors name the line; a damaged file never panics and never takes much memory.
//! `UPDATE_EXPECT=1 cargo test -p smidgen-recipe --test it` rewrites the expected recipes.
//! The notes as the program prints them, and that the recipes plan, are tested in `smidgen/tests/it/importing.rs`.

use crate::mutation::{cases, mutated, mutation, peak_bytes_of};
use expect_test::expect_file;
use proptest::prelude::*;
use smidgen_recipe::import::draft::Places;
use smidgen_recipe::import::render::{render_json, render_notes, render_recipe};
use smidgen_recipe::import::{ImportError, Imported, import};
use smidgen_recipe::{RecipeSource, parse_recipe};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/import").canonicalize().unwrap()
}

/// Every configuration with its text, sorted by name.
static CONFIGURATIONS: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
    let paths = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let is_configuration = |path: &PathBuf| path.extension().is_some_and(|it| it == "json" || it == "yaml");
    let mut files: Vec<PathBuf> = paths.filter(is_configuration).collect();
    files.sort();
    let named = files.into_iter().map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    });
    named.collect()
});

/// Only the files of the fixtures' folder are found.
fn nowhere() -> Places {
    Places {
        working_directory: "/nowhere".into(),
        file_folder: folder(),
        recipe_folder: "/nowhere".into(),
        ..Places::default()
    }
}

pub fn imported(text: &str, overrides: &[&str]) -> Result<Imported, ImportError> {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    import(text, None, &overrides, nowhere())
}

pub fn refused(text: &str) -> String {
    imported(text, &[]).unwrap_err().to_string()
}

fn recipe_of(text: &str, overrides: &[&str]) -> String {
    render_recipe(&imported(text, overrides).unwrap_or_else(|error| panic!("{error}")), "x.yaml")
}

#[test]
fn every_configuration_becomes_its_recipe() {
    assert!(CONFIGURATIONS.len() >= 10);
    for (name, text) in CONFIGURATIONS.iter() {
        let imported = imported(text, &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let unknown: Vec<&str> = imported
            .draft
            .left_out
            .iter()
            .filter(|left| !left.is_known)
            .map(|left| left.key.as_str())
            .collect();
        // Each name is documented by its tool.
        assert_eq!(unknown, [] as [&str; 0], "{name}");
        let stem = name.split('.').next().unwrap();
        expect_file![folder().join(format!("{stem}.recipe.toml"))].assert_eq(&render_recipe(&imported, name));
    }
}

#[test]
fn every_line_says_where_it_comes_from() {
    for (name, text) in CONFIGURATIONS.iter() {
        let recipe = render_recipe(&imported(text, &["memory.budget=8GiB"]).unwrap(), name);
        let mut keys = 0;
        let mut above = "";
        for line in recipe.lines() {
            if line.contains(" = ") {
                keys += 1;
                let explained = line.trim_start_matches("# ").contains("  # ") || above.starts_with("# ");
                assert!(explained, "{name}: {line}");
            }
            above = line;
        }
        assert!(keys >= 5, "{recipe}");
    }
}

#[test]
fn json_has_the_recipe_and_the_notes() {
    let (name, text) =
        CONFIGURATIONS.iter().find(|(name, _)| name == "deepspeed-zero3-offload.json").unwrap();
    let json = render_json(&imported(text, &[]).unwrap(), name);
    assert_eq!(json["tool"], "DeepSpeed");
    let missing: Vec<&str> =
        json["missing"].as_array().unwrap().iter().map(|missing| missing["key"].as_str().unwrap()).collect();
    assert_eq!(missing, ["model.path", "data.train", "output.dir"]);
    let lines = json["lines"].as_array().unwrap();
    let weights = lines.iter().find(|line| line["key"] == "memory.weights").unwrap();
    assert_eq!(weights["value"], "\"host\"");
    assert_eq!(weights["from"][0]["key"], "zero_optimization.offload_param.device");
    assert_eq!(weights["from"][0]["line"], 37);
    let left = json["no_counterpart"].as_array().unwrap();
    let bucket = left.iter().find(|left| left["key"] == "zero_optimization.sub_group_size").unwrap();
    assert!(bucket["why"].as_str().unwrap().contains("the plan is the allocation"));
}

#[test]
fn overrides_win_and_replace_their_rivals() {
    let file = "base_model: a/b\nadapter: lora\nnum_epochs: 3\nlearning_rate: 1e-3\nlora_r: 8\n";
    let recipe = recipe_of(file, &["train.steps=50", "adapter.rank=4"]);
    assert!(recipe.contains("steps = 50  # from the command line") && !recipe.contains("epochs"), "{recipe}");
    assert!(recipe.contains("rank = 4  # from the command line"), "{recipe}");
    let said = imported(file, &["lora_r=8"]).unwrap_err().to_string();
    assert!(said.contains("adapter.rank"), "{said}");
}

#[test]
fn a_line_without_an_effect_is_a_comment() {
    let file =
        "model_name_or_path: a/b\nuse_peft: true\neval_strategy: steps\neval_steps: 20\noutput_dir: x\n";
    let recipe = recipe_of(file, &[]);
    assert!(recipe.contains("# eval_every = 20  # eval_steps: needs `data.eval`"), "{recipe}");
    let recipe = recipe_of(file, &["data.eval=held.jsonl"]);
    assert!(recipe.contains("\neval_every = 20  # eval_steps\n"), "{recipe}");
}

#[test]
fn the_batch_counts_all_samples_of_a_step() {
    let batch = |text: &str| {
        let recipe = recipe_of(text, &[]);
        recipe.lines().find(|line| line.starts_with("batch")).unwrap().to_owned()
    };
    let trl = "learning_rate: 1e-4\nper_device_train_batch_size: 3\ngradient_accumulation_steps: 5\n";
    assert_eq!(batch(trl), "batch = 15");
    assert!(batch("learning_rate: 1e-4\noutput_dir: x\n").starts_with("batch = 8  # default of"));
    let whole = "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 2}";
    assert!(batch(whole).contains("batch = 32  # train_batch_size: on 4 GPUs"), "{}", batch(whole));
}

/// Packed rows count in tokens: rows of a step x their length.
#[test]
fn packing_makes_a_batch_of_tokens() {
    let batch = |text: &str| -> Vec<String> {
        recipe_of(text, &[]).lines().filter(|line| line.starts_with("batch")).map(str::to_owned).collect()
    };
    let axolotl = "base_model: a/b\nadapter: lora\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 512\n";
    assert_eq!(batch(&format!("{axolotl}sample_packing: true\n")), ["batch_tokens = 4096"]);
    assert!(batch(&format!("{axolotl}sample_packing: false\n"))[0].starts_with("batch = 8 "));
    let trl = "use_peft: true\nmax_length: 256\nper_device_train_batch_size: 2\n";
    let packed = batch(&format!("{trl}packing: true\n"));
    assert_eq!(packed, ["batch_tokens = 512  # packing, per_device_train_batch_size: 2 x 256 tokens"]);
    // Without batch sizes, those of the trainer.
    assert!(
        batch("use_peft: true\npacking: true\n")[0].starts_with("batch_tokens = 8192  # packing: 8 x 1024")
    );
    // A budget of tokens that the user gives replaces it.
    let recipe = recipe_of(&format!("{trl}packing: true\n"), &["train.batch=3"]);
    assert!(recipe.contains("batch = 3") && !recipe.contains("batch_tokens"), "{recipe}");
}

/// A DeepSpeed file is read from the folder of the file that names it; inline settings mean the same.
#[test]
fn deepspeed_settings_are_followed() {
    let trainer = "use_peft: true\nlearning_rate: 1e-4\noutput_dir: x\n";
    let recipe = recipe_of(&format!("{trainer}deepspeed: deepspeed-z3-offload.json\n"), &[]);
    for line in ["weights = \"host\"", "optimizer_state = \"host\"", "lr = 0.0001  # learning_rate"] {
        assert!(recipe.contains(line), "{line}: {recipe}");
    }
    assert!(recipe.contains("deepspeed-z3-offload.json: zero_optimization.offload_param.device"), "{recipe}");
    let inline = "deepspeed:\n  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\n";
    let recipe = recipe_of(&format!("{trainer}{inline}"), &[]);
    assert!(recipe.contains("optimizer_state = \"host\"") && !recipe.contains("weights ="), "{recipe}");
    let missing = imported(&format!("{trainer}deepspeed: none.json\n"), &[]).unwrap();
    let left = missing.draft.left_out.iter().find(|left| left.key == "deepspeed").unwrap();
    assert!(left.why.starts_with("not found next to the imported file"), "{}", left.why);
    let said = refused(&format!("{trainer}deepspeed: README.md\n"));
    assert!(said.contains("line 4: `deepspeed` names `README.md`: line "), "{said}");
}

/// Groups of arguments mean the same as the arguments alone, and messages name the group.
#[test]
fn nested_dictionaries_are_flat_ones() {
    let flat =
        "load_in_4bit: true\nbnb_4bit_quant_type: nf4\nr: 4\nlora_alpha: 8\ntarget_modules: [q_proj]\n";
    let nested = "quantization_config: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\n\
                  peft_config: {r: 4, lora_alpha: 8, target_modules: [q_proj]}\n";
    let values = |text: &str| -> Vec<(String, String)> {
        let imported = imported(text, &[]).unwrap_or_else(|error| panic!("{error}"));
        imported.draft.lines.iter().map(|line| (line.key.clone(), line.toml.clone())).collect()
    };
    assert_eq!(values(flat), values(nested));
    assert!(values(flat).contains(&("model.base".into(), "\"nf4-single\"".into())), "{:?}", values(flat));
    assert!(recipe_of(nested, &[]).contains("# quantization_config.load_in_4bit"));
    let said = refused(
        "a: 1\ntraining_args: {learning_rate: 1e-4, max_steps: 5, seed: 1}\npeft_config: {r: 4, seed: 2}\n",
    );
    assert!(said.contains("line 3: `peft_config.seed` and `training_args.seed` (line 2) differ"), "{said}");
}

/// The README names the source of each configuration that was taken from a real one.
#[test]
fn twenty_configurations_name_their_source() {
    let readme = fs::read_to_string(folder().join("README.md")).unwrap();
    let mut listed = 0;
    for line in readme.lines().filter(|line| line.starts_with("| `")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(CONFIGURATIONS.iter().any(|(known, _)| known == name), "{name}");
        listed += 1;
    }
    assert!(listed >= 20, "{listed}");
}

#[test]
fn dora_with_rslora_has_its_scale_in_alpha() {
    let text = "base_model: a/b\nadapter: lora\nlora_r: 16\nlora_alpha: 8\npeft_use_dora: true\npeft_use_rslora: true\n";
    let recipe = recipe_of(text, &[]);
    assert!(recipe.contains("kind = \"dora\"") && recipe.contains("alpha = 32  #"), "{recipe}");
}

/// Data sets on the hub get their names in a recipe: config, split and revision become parts of the name.
#[test]
fn data_sets_of_the_hub_keep_their_names() {
    let lines = |text: &str, overrides: &[&str]| -> Vec<String> {
        let recipe = recipe_of(text, overrides);
        let is_data = |line: &&str| {
            ["train = ", "eval = ", "split = ", "eval_every = "].iter().any(|key| line.starts_with(key))
        };
        recipe.lines().filter(is_data).map(str::to_owned).collect()
    };
    let axolotl = "base_model: a/b\nadapter: lora\ndatasets:\n  - path: org/rows\n    type: alpaca\n";
    assert_eq!(lines(axolotl, &[]), ["train = \"hf:org/rows\"  # datasets"]);
    let parts = "    name: en\n    split: train\n    revision: v2\nval_set_size: 0.05\neval_steps: 10\n";
    assert_eq!(
        lines(&format!("{axolotl}{parts}"), &[]),
        [
            "train = \"hf:org/rows@v2/en:train\"  # datasets",
            "split = 0.05  # val_set_size",
            "eval_every = 10  # eval_steps"
        ]
    );
    let several = "base_model: a/b\nadapter: lora\ndatasets:\n  - path: org/rows\n  - path: mine.jsonl\n\
                   test_datasets:\n  - path: org/rows\n    split: test\nval_set_size: 0.1\n";
    assert_eq!(
        lines(several, &[]),
        [
            "train = [\"hf:org/rows\", \"mine.jsonl\"]  # datasets",
            "eval = \"hf:org/rows:test\"  # test_datasets"
        ]
    );
    let trl = "use_peft: true\ndataset_name: org/chat\ndataset_config: en\ndataset_train_split: train_sft\n";
    assert_eq!(lines(trl, &[])[0], "train = \"hf:org/chat/en:train_sft\"  # dataset_name");
    let evaluated = format!("{trl}eval_strategy: steps\neval_steps: 5\n");
    assert_eq!(lines(&evaluated, &[])[1], "eval = \"hf:org/chat/en:test\"  # dataset_name");
    assert_eq!(
        lines(&format!("{evaluated}dataset_test_split: test_sft\n"), &[])[1].split(' ').nth(2),
        Some("\"hf:org/chat/en:test_sft\"")
    );
    let mixture = "use_peft: true\nlearning_rate: 1e-4\noutput_dir: x\ndataset_mixture:\n  datasets:\n    - id: org/one\n      config: a\n      split: train\n\
                   \x20   - path: org/two\n  test_split_size: 0.02\n";
    let found = lines(mixture, &[]);
    assert!(found[0].starts_with("train = [\"hf:org/one/a:train\", \"hf:org/two\"]"), "{found:?}");
    assert!(found[1].starts_with("split = 0.02"), "{found:?}");
    let factory = "stage: sft\nfinetuning_type: lora\ndataset: org/rows\nval_size: 0.1\n";
    assert_eq!(lines(factory, &[])[..2], ["train = \"hf:org/rows\"  # dataset", "split = 0.1  # val_size"]);
    // A number of rows is no share, and part of a split is no split.
    let left = imported(&format!("{axolotl}    split: train[:10%]\nval_set_size: 200\n"), &[])
        .unwrap()
        .draft
        .left_out;
    let why = |key: &str| left.iter().find(|left| left.key == key).map(|left| left.why.clone()).unwrap();
    assert!(why("val_set_size").contains("a number of rows"), "{left:?}");
    assert!(why("datasets").contains("`data.limit`"), "{left:?}");
}

/// Columns with other names than a recipe expects become `data.columns`, which is the same for all files.
#[test]
fn columns_of_other_names_are_mapped() {
    let read = |text: &str| -> (String, Vec<String>) {
        let imported = imported(text, &[]).unwrap_or_else(|error| panic!("{error}"));
        let recipe = render_recipe(&imported, "x.yaml");
        let line = recipe.lines().find_map(|line| line.strip_prefix("columns = "));
        let left = imported.draft.left_out.iter().map(|left| format!("{}: {}", left.key, left.why));
        (line.unwrap_or_default().split("  #").next().unwrap().to_owned(), left.collect())
    };
    let axolotl = "base_model: a/b\nadapter: lora\ndatasets:\n";
    let source = |fields: &str| format!("  - path: {fields}\n");
    for (fields, columns) in [
        ("a.jsonl\n    type: chat_template\n    field_messages: dialogue", "{ messages = \"dialogue\" }"),
        ("a.jsonl\n    type: chat_template\n    field_messages: conversations", ""),
        (
            "a.jsonl\n    type: chat_template\n    field_messages: messages\n    field_tools: functions",
            "{ messages = \"messages\", tools = \"functions\" }",
        ),
        ("a.jsonl\n    type: completion\n    field: body", "{ text = \"body\" }"),
        ("a.jsonl\n    type: completion\n    field: text", ""),
        (
            "a.jsonl\n    type: {field_output: reply, field_instruction: ask}",
            "{ instruction = \"ask\", output = \"reply\" }",
        ),
    ] {
        let (line, left) = read(&format!("{axolotl}{}", source(fields)));
        assert_eq!(line, columns, "{fields}");
        assert_eq!(left, [] as [&str; 0], "{fields}");
    }
    let dialogue = source("a.jsonl\n    type: chat_template\n    field_messages: dialogue");
    // Two sources that agree, and a source to evaluate.
    let agree = format!("{axolotl}{dialogue}{dialogue}test_datasets:\n{dialogue}");
    assert_eq!(read(&agree), ("{ messages = \"dialogue\" }".to_owned(), vec![]));
    let other = source("b.jsonl\n    type: chat_template\n    field_messages: turns");
    let (line, left) = read(&format!("{axolotl}{dialogue}{other}"));
    assert!(line.is_empty() && left.len() == 2, "{line} {left:?}");
    assert!(left[1].starts_with("datasets.1.field_messages: `data.columns` is the same"), "{left:?}");
    let (line, left) = read(&format!("{axolotl}{dialogue}test_datasets:\n{other}"));
    assert_eq!(line, "{ messages = \"dialogue\" }");
    assert!(left[0].starts_with("test_datasets.0.field_messages: `data.columns` is the same"), "{left:?}");
    let usual = format!("{axolotl}{dialogue}test_datasets:\n{}", source("b.jsonl"));
    let assumed = imported(&usual, &[]).unwrap().draft.assumed.join("\n");
    assert!(assumed.contains("`data.eval` has the same columns"), "{assumed}");
    // What `data.columns` cannot express names it.
    for fields in [
        "a.jsonl\n    type: {field_output: same, field_instruction: same}",
        "a.jsonl\n    type: chat_template\n    field_human: h",
        "a.jsonl\n    type: alpaca\n    field_messages: dialogue",
        "a.jsonl\n    type: chat_template\n    message_field_role: speaker",
    ] {
        let (line, left) = read(&format!("{axolotl}{}", source(fields)));
        assert!(line.is_empty() && !left.is_empty(), "{line} {left:?}");
        assert!(left.iter().all(|left| left.contains("`data.columns`")), "{left:?}");
    }

    let torchtune = |set: &str, val: &str| {
        let val = if val.is_empty() {
            String::new()
        } else {
            format!("dataset_val: {{_component_: torchtune.datasets.{val}}}\n")
        };
        format!(
            "model: {{_component_: torchtune.models.llama3.lora_llama3_8b}}\noptimizer: {{_component_: torch.optim.AdamW}}\n\
             dataset: {{_component_: torchtune.datasets.{set}}}\n{val}"
        )
    };
    let file = "source: json, data_files: a.json";
    for (set, columns) in [
        (
            "instruct_dataset, column_map: {input: question, output: answer}",
            "{ prompt = \"question\", completion = \"answer\" }",
        ),
        (
            "alpaca_dataset, column_map: {instruction: ask, output: output}",
            "{ instruction = \"ask\", output = \"output\" }",
        ),
        (
            "chat_dataset, conversation_column: dialogue, conversation_style: sharegpt",
            "{ messages = \"dialogue\" }",
        ),
        ("chat_dataset, conversation_column: conversations, conversation_style: openai", ""),
        ("text_completion_dataset, column: body", "{ text = \"body\" }"),
    ] {
        let set = format!("{set}, {file}");
        for val in ["", &set] {
            let (line, left) = read(&torchtune(&set, val));
            assert_eq!(line, columns, "{set}");
            assert_eq!(left, [] as [&str; 0], "{set}");
        }
    }
    let (line, left) =
        read(&torchtune(&format!("instruct_dataset, column_map: {{input: q, image: i}}, {file}"), ""));
    assert_eq!(line, "{ prompt = \"q\" }");
    assert!(left[0].starts_with("dataset.column_map.image: `data.columns`"), "{left:?}");
}

/// A name in the file cannot end a comment of the recipe or begin a key.
#[test]
fn names_stay_inside_their_comment() {
    let text = "base_model: a/b\nadapter: lora\ndatasets:\n  - path: \"x\\n[train]\\nsteps = 1\"\n    type: alpaca\n";
    let recipe = recipe_of(text, &[]);
    assert!(recipe.contains("x [train] steps = 1") && !recipe.contains("\nsteps"), "{recipe}");
}

#[test]
fn preferences_are_translated() {
    let of_tool = [
        (
            "base_model: a/b\nadapter: lora\nrl: ipo\nrl_beta: 0.2\ndatasets: [{path: c/d, type: chat_template.default}]\n",
            ["objective = \"dpo\"", "loss_type = [\"ipo\"]", "beta = 0.2"],
        ),
        (
            "model_name_or_path: a/b\nstage: dpo\nfinetuning_type: lora\npref_beta: 0.3\npref_loss: simpo\nsimpo_gamma: 0.4\n\
             dataset: x\n",
            ["objective = \"cpo\"", "simpo_gamma = 0.4", "cpo_alpha = 0"],
        ),
        (
            "model_name_or_path: a/b\nstage: kto\nfinetuning_type: lora\nkto_chosen_weight: 1.5\ndataset: x\n",
            ["objective = \"kto\"", "desirable_weight = 1.5", "[train]"],
        ),
    ];
    for (text, lines) in of_tool {
        let recipe = recipe_of(text, &[]);
        for line in lines {
            assert!(recipe.contains(line), "{line} is not in\n{recipe}");
        }
        assert!(!recipe.contains("loss_on"), "{recipe}");
    }
}

/// All mistakes at once, each with its line.
#[test]
fn contradictions_have_their_lines() {
    for (text, words) in [
        ("base_model: a/b\nadapter: qlora\n", "line 2: `adapter: qlora` needs `load_in_4bit: true`"),
        (
            "base_model: a/b\nload_in_4bit: true\n",
            "line 2: `load_in_4bit` freezes the weights, but every weight is to be trained",
        ),
        (
            "base_model: a/b\nadapter: lora\nload_in_4bit: true\nload_in_8bit: true\n",
            "line 4: `load_in_8bit` and `load_in_4bit` (line 3) cannot both be set",
        ),
        (
            "base_model: a/b\nadapter: lora\nbf16: true\nfp16: true\n",
            "line 4: `fp16` and `bf16` (line 3) cannot both be set",
        ),
        (
            "base_model: a/b\nadapter: lora\nlora_r: -4\n",
            "line 3: `lora_r` cannot be imported: `adapter.rank` must be",
        ),
        ("base_model: a/b\nadapter: lora\nlora_r: many\n", "line 3: `lora_r` must be a number, got \"many\""),
        (
            "base_model: a/b\nrl: grpo\n",
            "line 2: `rl` is \"grpo\": this is training on preferences or rewards",
        ),
        ("finetuning_type: lora\nstage: ppo\n", "line 2: `stage: ppo` is not supported"),
        ("finetuning_type: full\nquantization_bit: 4\n", "line 2: `quantization_bit` freezes the weights"),
        ("finetuning_type: lora\nmask_history: true\ntrain_on_prompt: true\n", "cannot both be set"),
        ("peft_type: IA3\n", "line 1: `peft_type` is \"IA3\""),
        (
            "zero_optimization:\n  stage: 2\n  offload_param: {device: cpu}\n",
            "line 3: `zero_optimization.offload_param` needs `stage` 3",
        ),
        ("zero_optimization: {stage: 7}\n", "line 1: `zero_optimization.stage` must be 0, 1, 2 or 3"),
        ("zero_optimization: true\n", "line 1: `zero_optimization` must be a group of settings, got true"),
        (
            "zero_optimization: {}\ntrain_batch_size: 10\ntrain_micro_batch_size_per_gpu: 4\n",
            "line 2: `train_batch_size` is 10, which is not a multiple of 4",
        ),
        (
            "zero_optimization: {stage: 0, offload_optimizer: {device: cpu}}\n",
            "line 1: `zero_optimization.offload_optimizer` needs `stage` 1",
        ),
        (
            "zero_optimization: {stage: 2}\nfp16: {enabled: true}\nbf16: {enabled: true}\n",
            "line 2: `fp16.enabled` and `bf16.enabled` (line 3) cannot both be set",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_param_device: cpu}\n",
            "line 2: `deepspeed_config.offload_param_device` needs `zero_stage` 3",
        ),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 0\n",
            "line 3: `num_processes` must be a whole number of at least 1, got 0",
        ),
        (
            "model_name_or_path: a/b\nuse_peft: false\nload_in_4bit: true\nlearning_rate: 1e-4\n",
            "line 3: `load_in_4bit` freezes the weights",
        ),
        (
            "finetuning_type: lora\nquantization_bit: 3\n",
            "line 2: `quantization_bit` is 3; only 4 and 8 bits are supported",
        ),
        (
            "finetuning_type: lora\npure_bf16: true\nfp16: true\n",
            "line 3: `fp16` and `pure_bf16` (line 2) cannot both be set",
        ),
        (
            "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_r: 16\n",
            "line 4: `lora_r` is set twice, first in line 3",
        ),
        (
            "peft_type: LSLORA\nuse_dora: true\n",
            "line 1: `LSLORA` cannot be combined with `use_dora` or `use_rslora`",
        ),
        (
            "peft_type: LSLORA\nfourier_position: before\n",
            "line 2: `fourier_position` is \"before\"; only `after_scaling` is supported",
        ),
        (
            "quantization_config: {quant_method: gptq, load_in_4bit: true}\n",
            "line 1: `quantization_config.quant_method` is \"gptq\"; only bitsandbytes is supported",
        ),
        (
            "model: {_component_: torchtune.models.llama3.lora_llama3_8b}\noptimizer: {_component_: torch.optim.AdamW}\n\
             loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n",
            "line 3: `loss._component_` is `torchtune.rlhf.loss.DPOLoss`; only supervised fine-tuning is supported",
        ),
        (
            "model: {_component_: torchtune.models.llama3.llama3_8b}\n",
            "line 1: there is no `optimizer`: this configuration does not train",
        ),
        ("lora_parameters: {rank: 8}\ntraining_mode: dpo\n", "line 2: `training_mode: dpo` is not supported"),
        (
            "distributed_type: FSDP\ndeepspeed_config: {zero_stage: 3}\nfsdp_config: {fsdp_version: 2}\n",
            "line 3: `fsdp_config` and `deepspeed_config` (line 2) cannot both be set",
        ),
    ] {
        let said = refused(text);
        assert!(said.contains(words), "{text}\n{said}");
    }
    let both = refused("base_model: a/b\nadapter: lora\nlora_r: 0\nlearning_rate: fast\n");
    assert!(both.starts_with("2 mistakes\n  line 3: ") && both.contains("\n  line 4: "), "{both}");
}

/// Of two settings for the same thing, the one that the tool uses is imported, and the other one is noted.
#[test]
fn the_setting_that_the_tool_uses_is_imported() {
    let left = |text: &str| -> Vec<String> {
        imported(text, &[])
            .unwrap()
            .draft
            .left_out
            .iter()
            .map(|left| format!("{}: {}", left.key, left.why))
            .collect()
    };
    let both = "base_model: a/b\nadapter: lora\nwarmup_steps: 10\nwarmup_ratio: 0.1\n";
    assert!(recipe_of(both, &[]).contains("warmup = 10  # warmup_steps"));
    assert!(
        left(both).contains(&"warmup_ratio: `warmup_steps` takes precedence".to_owned()),
        "{:?}",
        left(both)
    );
    let rates = |optimizer: &str, schedule: &str| {
        format!(
            "zero_optimization: {{stage: 2}}\noptimizer: {{type: Adam, params: {{lr: {optimizer}}}}}\n\
             scheduler: {{type: WarmupLR, params: {{warmup_max_lr: {schedule}}}}}\n"
        )
    };
    let recipe = recipe_of(&rates("1e-4", "5e-4"), &[]);
    assert!(recipe.contains("lr = 0.0005  # scheduler.params.warmup_max_lr"), "{recipe}");
    let assumed = imported(&rates("1e-4", "5e-4"), &[]).unwrap().draft.assumed.join("\n");
    assert!(assumed.contains("`warmup_max_lr` is the learning rate"), "{assumed}");
    assert!(recipe_of(&rates("1e-4", "1e-4"), &[]).contains("lr = 0.0001  # optimizer.params.lr"));
    assert!(recipe_of(&rates("1e-4", "auto"), &[]).contains("lr = 0.0001  # optimizer.params.lr"));
}

#[test]
fn damaged_files_never_panic() {
    let strategy = (any::<usize>(), prop::collection::vec(mutation(), 1..5));
    proptest!(cases(), |((which, mutations) in strategy)| {
        let (name, text) = &CONFIGURATIONS[which % CONFIGURATIONS.len()];
        let bytes = mutated(text.as_bytes(), &mutations);
        let text = String::from_utf8_lossy(&bytes);
        let (result, peak_bytes) = peak_bytes_of(|| imported(&text, &[]).map(|imported| {
            let (recipe, notes) = (render_recipe(&imported, name), render_notes(&imported, name));
            (recipe, notes, render_json(&imported, name).to_string(), imported.missing)
        }));
        assert!(peak_bytes <= (4 << 20) + 400 * bytes.len(), "{peak_bytes} for {} bytes", bytes.len());
        // The result is a valid recipe once the missing keys are given.
        if let Ok((recipe, _, _, missing)) = result {
            let given: Vec<String> = missing.iter().map(|missing| format!("{}=x", missing.key)).collect();
            let source = RecipeSource { file: name.clone(), folder: "/nowhere".into(), text: recipe.clone() };
            if let Err(errors) = parse_recipe(&source, &given, Path::new("/nowhere")) {
                panic!("{errors}\n{recipe}");
            }
        }
    });
}
