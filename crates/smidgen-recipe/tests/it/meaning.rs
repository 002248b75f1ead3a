//! What settings of other tools mean: the job of a file, its prompts, its rows, its batch and its memory.
//! The recipes of whole files are in `import.rs`.

use crate::import::{imported, refused};
use serde_json::Value as Json;
use smidgen_recipe::import::render::{render_json, render_notes};

/// The values of the recipe, as `key = value` lines without their comments.
fn values(text: &str) -> Vec<String> {
    let imported = imported(text, &[]).unwrap_or_else(|error| panic!("{text}\n{error}"));
    let active = imported.draft.lines.iter().filter(|line| line.active);
    active.map(|line| format!("{} = {}", line.key, line.toml)).collect()
}

fn notes(text: &str) -> String {
    render_notes(&imported(text, &[]).unwrap_or_else(|error| panic!("{text}\n{error}")), "x.yaml")
}

#[track_caller]
fn assert_has(text: &str, lines: &[&str]) {
    let values = values(text);
    for line in lines {
        assert!(values.iter().any(|value| value == line), "{line} in {values:#?}\n{text}");
    }
}

const AXOLOTL: &str = "base_model: a/b\nadapter: lora\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n";
const FACTORY: &str =
    "model_name_or_path: a/b\nfinetuning_type: lora\nstage: sft\ndo_train: true\ndataset: a.json\n";
const TORCHTUNE: &str = "model: {_component_: torchtune.models.llama3.lora_llama3_8b}\n\
                         optimizer: {_component_: torch.optim.AdamW}\n";
const STUDIO: &str = "training: {batch_size: 1, gradient_accumulation_steps: 8, num_epochs: 0, max_steps: 30, \
                      random_seed: 3407, train_on_completions: true}\nlora: {lora_r: 16}\n";

/// Such files became supervised fine-tuning without a word.
#[test]
fn files_of_other_jobs_are_refused_by_name() {
    let torchtune_model = |model: &str| TORCHTUNE.replace("llama3.lora_llama3_8b", model);
    for (text, words) in [
        (format!("{AXOLOTL}reward_model: true\n"), "`reward_model` is true: this is a reward model"),
        (format!("{AXOLOTL}process_reward_model: true\n"), "a reward model"),
        (
            format!("{AXOLOTL}datasets: [{{path: a/b, type: bradley_terry.chat_template}}]\n"),
            "line 5: `type` is",
        ),
        (format!("{AXOLOTL}datasets: [{{path: a/b, type: chatml.argilla}}]\n"), "on preferences or rewards"),
        (format!("{AXOLOTL}model_type: AutoModelForSequenceClassification\n"), "a classifier"),
        (
            format!("{AXOLOTL}plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n"),
            "a diffusion model",
        ),
        (format!("{AXOLOTL}processor_type: AutoProcessor\n"), "images, video or sound"),
        (format!("{AXOLOTL}qat: {{weight_dtype: int4}}\n"), "quantization-aware training"),
        (
            format!("{AXOLOTL}unfrozen_parameters: [lm_head.*]\n"),
            "`unfrozen_parameters` trains the parameters",
        ),
        (AXOLOTL.replace("a/b", "openai/whisper-large-v3"), "one of the speech recognition models"),
        (AXOLOTL.replace("a/b", "org/bge-m3"), "one of the embedding models"),
        (format!("{FACTORY}image_max_pixels: 262144\n"), "images, video or sound"),
        (FACTORY.replace("sft", "rm"), "`stage: rm` is not supported"),
        (FACTORY.replace("do_train: true", "do_train: false"), "`do_train` is false"),
        ("model_name_or_path: a/b\ntemplate: x\ninfer_backend: vllm\n".into(), "a setting of inference"),
        ("model_name_or_path: a/b\ntemplate: x\nexport_dir: c\n".into(), "a setting of merging or export"),
        ("model_name_or_path: a/b\ntemplate: x\ndo_predict: true\neval_dataset: c\n".into(), "of prediction"),
        ("model_name_or_path: a/b\ntemplate: x\n".into(), "stands without a `dataset`"),
        ("model: a/b\npeft_config: {name: lora, export_dir: c}\n".into(), "there is no `train_dataset`"),
        (torchtune_model("llama2.llama2_classifier"), "this is a classifier"),
        (torchtune_model("llama3_2_vision.lora_llama3_2_vision_11b"), "this is a model of images"),
        ("audio_type: whisper\n".to_owned() + STUDIO, "a model of speech"),
        ("learning_rate: 1\noutput_dir: x\nreward_funcs: [a]\n".into(), "on preferences or rewards"),
        ("learning_rate: 1\noutput_dir: x\nteacher_model_name_or_path: a/b\n".into(), "distillation"),
        ("peft_type: LORA\nr: 8\ntask_type: SEQ_CLS\n".into(), "a classifier"),
    ] {
        let said = refused(&text);
        assert!(said.contains(words), "{text}\n{said}");
    }
}

/// They do not train on preferences or pictures because a key is there: its value counts.
#[test]
fn switches_that_are_off_are_no_sign() {
    assert_has(
        &format!(
            "{AXOLOTL}rl:\nreward_model: false\nqat: {{}}\nprocessor_type:\nmodel_type: LlamaForCausalLM\n"
        ),
        &["adapter.kind = \"lora\""],
    );
    assert_has(
        &format!("{FACTORY}export_dir: x\npredict_with_generate: true\n"),
        &["data.train = \"a.json\""],
    );
}

/// torchtune writes the Alpaca text inside the turns of its tokenizer; only Gemma's has none.
#[test]
fn torchtune_rows_get_the_turns_of_the_tokenizer() {
    let dataset = "dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset}\n";
    for (tokenizer, template) in [
        ("llama3.llama3_tokenizer", "llama3"),
        ("qwen2_5.qwen2_5_tokenizer", "chatml"),
        ("mistral.mistral_tokenizer", "model"),
        ("gemma.gemma_tokenizer", "alpaca"),
        ("qwen3.qwen3_tokenizer, prompt_template: torchtune.data.ChatMLTemplate", "chatml"),
    ] {
        let text = format!("{TORCHTUNE}tokenizer: {{_component_: torchtune.models.{tokenizer}}}\n{dataset}");
        let format = if template == "alpaca" { "alpaca" } else { "alpaca-prompt" };
        assert_has(
            &text,
            &[&format!("data.template = \"{template}\""), &format!("data.format = \"{format}\"")],
        );
        assert!(!notes(&text).contains("results will differ"), "{}", notes(&text));
    }
}

/// The second half of a split was read as the whole split, so the training rows were evaluated.
#[test]
fn two_parts_of_a_split_are_training_and_evaluation() {
    let parts = |train: &str, eval: &str| {
        let set = |name: &str, split: &str| {
            format!("{name}: {{_component_: torchtune.datasets.alpaca_cleaned_dataset, split: '{split}'}}\n")
        };
        format!("{TORCHTUNE}{}{}", set("dataset", train), set("dataset_val", eval))
    };
    let set = "data.train = \"hf:yahma/alpaca-cleaned:train\"";
    assert_has(&parts("train[:95%]", "train[95%:]"), &[set, "data.split = 0.05"]);
    assert_has(&parts("train[10%:]", "train[:10%]"), &[set, "data.split = 0.1"]);
    assert_has(&parts("train[:500]", "test"), &[set, "data.limit = 500"]);
    for (train, eval) in
        [("train", "train[95%:]"), ("train[:80%]", "train[90%:]"), ("train[:100]", "train[100:]")]
    {
        let text = parts(train, eval);
        let values = values(&text);
        assert!(
            !values.iter().any(|line| line.starts_with("data.eval") || line.starts_with("data.split")),
            "{values:?}"
        );
        assert!(notes(&text).contains("selects rows by their numbers"), "{}", notes(&text));
    }
}

#[test]
fn axolotl_types_keep_their_prompts() {
    let rows =
        |kind: &str| format!("{AXOLOTL}chat_template: llama3\ndatasets: [{{path: a.jsonl, type: {kind}}}]\n");
    for (kind, lines) in [
        ("alpaca", ["data.template = \"alpaca\"", "data.overflow = \"drop\""]),
        ("alpaca:chat", ["data.template = \"model\"", "data.format = \"alpaca\""]),
        ("alpaca:phi", ["data.template = \"phi3\"", "data.format = \"alpaca\""]),
        ("alpaca:chatml", ["data.template = \"chatml\"", "data.format = \"alpaca\""]),
        ("chat_template", ["data.template = \"llama3\"", "data.format = \"chat\""]),
        ("completion", ["data.overflow = \"chunk\"", "data.format = \"text\""]),
    ] {
        assert_has(&rows(kind), &lines);
    }
    assert!(notes(&rows("alpaca:chat")).contains("`alpaca:chat` writes `USER:`"));
    assert!(notes(&rows("jeopardy")).contains("`jeopardy` has a prompt of its own"));
    let documents = format!("{AXOLOTL}pretraining_dataset: [{{path: org/c4, name: en, type: pretrain}}]\n");
    assert_has(
        &documents,
        &["data.train = \"hf:org/c4/en\"", "data.overflow = \"chunk\"", "data.loss_on = \"all\""],
    );
}

#[test]
fn unsloth_studio_files_keep_their_batch() {
    assert_has(
        STUDIO,
        &["train.batch = 8", "train.seed = 3407", "train.steps = 30", "data.loss_on = \"assistant\""],
    );
    let full =
        STUDIO.replace("training: {", "model: a/b\ntraining: {training_type: full, load_in_4bit: false, ");
    assert_has(&full, &["adapter.kind = \"full\"", "model.path = \"hf:a/b\""]);
}

/// They were taken for Axolotl's and LLaMA-Factory's at once, or lost their adapter and batch.
#[test]
fn version_1_of_llama_factory_is_read() {
    let base = "model: a/b\nmodel_class: llm\ntrain_dataset: rows.jsonl\nmicro_batch_size: 1\ncutoff_len: 2048\nmax_steps: 9\n";
    let lora = "peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}\n";
    assert_has(
        &format!("{base}{lora}quant_config: {{name: bnb, quantization_bit: 4}}\nglobal_batch_size: 32\n"),
        &[
            "adapter.rank = 16",
            "adapter.targets = \"all-linear\"",
            "model.base = \"nf4\"",
            "train.batch = 32",
        ],
    );
    assert_has(
        base,
        &["adapter.kind = \"full\"", "train.batch = 1", "train.schedule = \"constant\"", "train.steps = 9"],
    );
    assert_has(
        &format!("{base}peft_config: {{name: freeze, freeze_trainable_layers: 3}}\n"),
        &["adapter.kind = \"full\"", "adapter.layers = \"last:3\""],
    );
}

#[test]
fn a_nested_peft_type_loses_nothing() {
    let text = "peft_config: {peft_type: LORA, r: 4}\ntraining_args: {learning_rate: 1e-4, max_steps: 5}\n";
    assert_has(text, &["adapter.rank = 4", "train.lr = 0.0001", "train.steps = 5"]);
    let said = refused(&text.replace("LORA", "IA3"));
    assert!(said.contains("`peft_config.peft_type` is \"IA3\""), "{said}");
}

#[test]
fn constants_of_a_script_are_its_arguments() {
    let text = "MODEL_NAME: a/b\nMAX_SEQ_LENGTH: 512\nTRAINING_CONFIG: {BATCH_SIZE: 2, gradient_accumulation_steps: 3}\n\
                LORA_CONFIG: {rank: 8, alpha: 16, target_modules: [q_proj]}\nOMP_NUM_THREADS: 4\n";
    assert_has(
        text,
        &[
            "model.path = \"hf:a/b\"",
            "data.max_tokens = 512",
            "train.batch = 6",
            "adapter.rank = 8",
            "adapter.alpha = 16",
        ],
    );
    assert!(notes(text).contains("`memory.threads` sets the threads"), "{}", notes(text));
}

#[test]
fn max_memory_becomes_budgets() {
    let text = "use_peft: true\nlearning_rate: 1e-4\nmodel_init_kwargs: {max_memory: {0: 20GB, 1: 12GiB, cpu: 30GB}}\n";
    assert_has(text, &["memory.budget = \"12GiB\"", "memory.host_budget = \"30GB\""]);
    assert_has(&format!("{AXOLOTL}max_memory: {{0: 21474836480}}\n"), &["memory.budget = \"20GiB\""]);
    let wrong = refused(&format!("{AXOLOTL}max_memory: {{0: much}}\n"));
    assert!(wrong.contains("line 5: `max_memory.0` cannot be imported"), "{wrong}");
}

#[test]
fn a_family_that_does_not_load_is_said_at_once() {
    let warned = |text: &str, loads: &[&str]| {
        let mut imported = imported(text, &[]).unwrap();
        imported.warn_of_families(|model_type| loads.contains(&model_type));
        let json = render_json(&imported, "x");
        assert_eq!(json["warnings"].as_array().unwrap().len(), imported.draft.warnings.len());
        render_notes(&imported, "x")
    };
    let text = AXOLOTL.replace("a/b", "tiiuae/falcon-7b");
    let said = warned(&text, &["llama"]);
    assert!(said.contains("warning: `tiiuae/falcon-7b`: smidgen does not load Falcon models"), "{said}");
    assert!(!warned(&text, &["falcon"]).contains("warning"));
    assert!(!warned(AXOLOTL, &[]).contains("warning"));
    let gemma = TORCHTUNE.replace("llama3.lora_llama3_8b", "gemma.lora_gemma_2b");
    assert!(warned(&gemma, &["gemma2"]).contains("does not load Gemma (first version) models"));
}

#[test]
fn limits_and_named_templates_are_carried_over() {
    let named = |name: &str| format!("{FACTORY}max_samples: 1000\ntemplate: {name}\n");
    for (name, template) in
        [("qwen3_nothink", "model"), ("llama3", "llama3"), ("empty", "none"), ("chatml", "chatml")]
    {
        assert_has(&named(name), &["data.limit = 1000", &format!("data.template = \"{template}\"")]);
    }
    assert!(notes(&named("my_own")).contains("smidgen has no template of this name"));
    let per_epoch = format!("{AXOLOTL}evals_per_epoch: 2\nsaves_per_epoch: 0\n");
    assert!(
        notes(&per_epoch).contains("set it to the rows of the data / 16; for a million that is 62500"),
        "{}",
        notes(&per_epoch)
    );
    assert_has(&per_epoch, &["train.save_every = 0"]);
}

#[test]
fn reasons_are_those_of_the_setting() {
    let text = "use_peft: true\nlearning_rate: 1e-4\nuse_cache: true\nlow_cpu_mem_usage: true\nddp_find_unused_parameters: true\n\
                env: {TOKENIZERS_PARALLELISM: false, HF_HUB_DISABLE_TELEMETRY: 1}\naudio_gradient_checkpointing: true\n";
    let json = render_json(&imported(text, &[]).unwrap(), "x");
    let left = json["no_counterpart"].as_array().unwrap();
    for (key, words) in [
        ("use_cache", "for generation"),
        ("low_cpu_mem_usage", "second copy"),
        ("ddp_find_unused_parameters", "none is searched for"),
        ("env.TOKENIZERS_PARALLELISM", "`memory.threads`"),
        ("env.HF_HUB_DISABLE_TELEMETRY", "nothing to switch off"),
        ("audio_gradient_checkpointing", "audio encoder"),
    ] {
        let why = left.iter().find(|left| left["key"] == key).map(|left| left["why"].clone());
        assert!(why.as_ref().and_then(Json::as_str).is_some_and(|why| why.contains(words)), "{key}: {why:?}");
    }
}
