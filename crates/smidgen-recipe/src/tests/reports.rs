//! What is refused, and with which message: whole reports as snapshots.
//!
//! `UPDATE_EXPECT=1 cargo test` rewrites the snapshots; read the diff as a user would.

use expect_test::expect;

use super::super::foreign::{FOREIGN_KEYS, FOREIGN_WORDS};
use super::super::keys::{KEYS, SECTIONS, find_key};
use super::*;

#[test]
fn values_out_of_range_are_refused() {
    for line in [
        "adapter.rank = 0",
        "adapter.rank = 1.5",
        "adapter.rank = 99999999999",
        "adapter.alpha = 0",
        "adapter.dropout = 1.0",
        "adapter.dropout = -0.1",
        "adapter.targets = []",
        "adapter.targets = [\"q\", \"q\"]",
        "adapter.targets = [\"q\", \"\"]",
        "adapter.targets = \"all\"",
        "adapter.layers = []",
        "adapter.layers = [1, 1]",
        "adapter.layers = [-1]",
        "adapter.layers = \"last:0\"",
        "adapter.init = \"\"",
        "adapter.rank_pattern = { q_proj = 0 }",
        "adapter.rank_pattern = { q_proj = 1.5 }",
        "adapter.rank_pattern = [\"q_proj\"]",
        "adapter.alpha_pattern = { q_proj = 0 }",
        "adapter.bias = \"some\"",
        "adapter.reg = -1",
        "adapter.sigma = 0",
        "data.max_tokens = 1",
        "data.template = \"\"",
        "data.eval = [1]",
        "train.batch = 0",
        "train.batch_tokens = 0",
        "train.steps = 0",
        "train.steps = 5.0",
        "train.epochs = 0",
        "train.lr = 0",
        "train.lr = inf",
        "train.lr = nan",
        "train.lr = \"2e-4\"",
        "train.warmup = 1.5",
        "train.warmup = 1.0",
        "train.warmup = -1",
        "train.weight_decay = -0.1",
        "train.betas = [0.9]",
        "train.betas = [0.9, 1.0]",
        "train.betas = [0.9, 0.99, 0.999]",
        "train.eps = 0",
        "train.clip = -1",
        "train.seed = -1",
        "train.keep = 0",
        "train.log_every = -1",
        "eval.limit = -1",
        "eval.answer = 5",
        "memory.threads = -1",
        "memory.budget = \"24 gigs\"",
        "memory.budget = 1.5",
        "memory.budget = 0",
        "memory.budget = -5",
        "memory.micro_tokens = 0",
        "memory.recompute = \"every:0\"",
        "memory.recompute = \"every:\"",
        "memory.recompute = [1, 1]",
        "memory.recompute = true",
        "memory.weights = \"host:0\"",
        "memory.weights = \"host:1.5\"",
        "memory.weights = \"host:nan\"",
        "memory.device = \"cuda:\"",
        "memory.device = \"cuda:+1\"",
        "memory.device = \"gpu\"",
        "memory.profile = \"\"",
        "memory.adapt = 1",
        "expect.peak = \"big\"",
        "data.shuffle = \"yes\"",
        "train.seed = 2020-01-01",
    ] {
        let key = line.split(' ').next().expect("a key");
        let text = format!("model.path = \"m\"\ndata.train = \"t\"\noutput.dir = \"o\"\n{line}\n");
        let errors = parse(&text, &[]).err().unwrap_or_else(|| panic!("accepted: {line}"));
        assert_eq!(errors.mistakes.len(), 1, "{errors}");
        assert_eq!(errors.mistakes[0].key, key, "{errors}");
        assert_eq!(errors.mistakes[0].place, Place::Line(4), "{errors}");
        assert!(errors.mistakes[0].message.starts_with(&format!("`{key}` must be ")), "{errors}");
    }
    for path in ["", "hf:", "hf:a/b/c", "hf:/b", "pypi:", "pypi:a/b", "https://huggingface.co/a/b"] {
        let text = REQUIRED.replace("models/tiny", path);
        assert!(parse(&text, &[]).is_err(), "accepted: {path}");
    }
}

#[test]
fn all_mistakes_at_once() {
    check_report(
        r#"[model]
path = "models/tiny"
[adapter]
rnak = 8
kind = "lorra"
[data]
train = "train.json"
[train]
lr = "fast"
rank = 8
steps = 5
epochs = 2
[trian]
batch = 0
[optimiser]
name = "adam"
"#,
        &["memory.budgt=8GiB", "train.steps=5", "train.epochs=1", "rank=4", "memory.budget", "train.seed=x"],
        expect![[r#"
            recipe.toml has 14 mistakes
              line 4: unknown key `adapter.rnak`
                hint: did you mean `adapter.rank`?
              line 5: `adapter.kind` must be one of `lora`, `rslora`, `dora`, `ls-lora`, `full`, got "lorra"
                hint: did you mean `lora`?
              line 9: `train.lr` must be a number above 0, got "fast"
              line 10: unknown key `train.rank`
                hint: did you mean `adapter.rank`?
              line 12: `train.epochs` and `train.steps` in line 11 exclude each other
                hint: keep one of them
              line 13: unknown section `[trian]`
                hint: did you mean `[train]`?
              line 14: `train.batch` must be a whole number of at least 1, got 0
              line 15: unknown section `[optimiser]`
                hint: the sections are `model`, `adapter`, `data`, `train`, `eval`, `memory`, `expect`, `output`
              `memory.budgt=8GiB`: unknown key `memory.budgt`
                hint: did you mean `memory.budget`?
              `train.epochs=1`: `train.epochs` and `train.steps=5` exclude each other
                hint: keep one of them
              `rank=4`: unknown key `rank`
                hint: did you mean `adapter.rank`?
              `memory.budget`: an override is written `section.key=value`
                hint: it must be `auto`, or a size above 0 such as `24GiB`, `512MiB` or `8GB`
              `train.seed=x`: `train.seed` must be a whole number of at least 0, got `x`
              missing key `output.dir`
                hint: it must be a folder"#]],
    );
}

#[test]
fn one_mistake_is_singular() {
    check_report(
        &format!("{REQUIRED}[memory]\nbudget = \"24 gigs\""),
        &[],
        expect![[r#"
            recipe.toml has 1 mistake
              line 9: `memory.budget` must be `auto`, or a size above 0 such as `24GiB`, `512MiB` or `8GB`, got "24 gigs""#]],
    );
}

#[test]
fn nothing_at_all() {
    check_report(
        "",
        &[],
        expect![[r#"
        recipe.toml has 3 mistakes
          missing key `model.path`
            hint: it must be `hf:org/name`, `pypi:package`, a folder or a .gguf file
          missing key `data.train`
            hint: it must be a file, or a list of files
          missing key `output.dir`
            hint: it must be a folder"#]],
    );
}

#[test]
fn names_from_other_trainers() {
    check_report(
        r#"base_model = "org/name"
learning_rate = 2e-4
load_in_4bit = true
adapter = "lora"
[[datasets]]
path = "x"
[lora]
r = 16
lora_alpha = 32
[train]
per_device_train_batch_size = 2
gradient_accumulation_steps = 8
num_train_epochs = 3
max_grad_norm = 1.0
Learning-Rate = 1
learning_rates = 1
[memory]
gradient_checkpointing = true
[data]
max_seq_length = 512
path = "x"
"#,
        &["max_steps=5", "output_dir=x", "adapter.lora_r=5"],
        expect![[r#"
            recipe.toml has 23 mistakes
              line 1: unknown key `base_model`
                hint: write `model.path`: `hf:org/name`, `pypi:package`, a folder or a .gguf file
              line 2: unknown key `learning_rate`
                hint: write `train.lr`
              line 3: unknown key `load_in_4bit`
                hint: write `model.base = "nf4"`
              line 4: `adapter` must be a section, got "lora"
                hint: write `[adapter]`, then `kind`, `rank`, `alpha`, `dropout`, `targets`, `layers`, `init`, `train`, `rank_pattern`, `alpha_pattern`, `bias`, `reg`, `sigma`
              line 5: unknown key `datasets`
                hint: write `data.train`: a file, a glob, or a list of them
              line 7: unknown section `[lora]`
                hint: did you mean `[adapter]`?
              line 8: unknown key `r`
                hint: write `adapter.rank`
              line 9: unknown key `lora_alpha`
                hint: write `adapter.alpha`
              line 11: unknown key `train.per_device_train_batch_size`
                hint: `train.batch` is samples per optimizer step over all devices (per-device size x devices x accumulation); the solver chooses how it is split (pin it with `memory.micro_tokens`)
              line 12: unknown key `train.gradient_accumulation_steps`
                hint: `train.batch` is samples per optimizer step; the solver chooses how it is split (pin it with `memory.micro_tokens`)
              line 13: unknown key `train.num_train_epochs`
                hint: write `train.epochs` (instead of `train.steps`)
              line 14: unknown key `train.max_grad_norm`
                hint: write `train.clip` (0 = no clipping)
              line 15: unknown key `train.Learning-Rate`
                hint: write `train.lr`
              line 16: unknown key `train.learning_rates`
                hint: write `train.lr`
              line 18: unknown key `memory.gradient_checkpointing`
                hint: write `memory.recompute` (`"all"` for true, `"none"` for false), or leave it `"auto"`: the solver recomputes only as much as the budget requires
              line 20: unknown key `data.max_seq_length`
                hint: write `data.max_tokens`; `data.overflow` says what happens to longer samples
              line 21: unknown key `data.path`
                hint: write `data.train`: a file, a glob, or a list of them
              `max_steps=5`: unknown key `max_steps`
                hint: write `train.steps`
              `output_dir=x`: unknown key `output_dir`
                hint: write `output.dir`
              `adapter.lora_r=5`: unknown key `adapter.lora_r`
                hint: write `adapter.rank`
              missing key `model.path`
                hint: it must be `hf:org/name`, `pypi:package`, a folder or a .gguf file
              missing key `data.train`
                hint: it must be a file, or a list of files
              missing key `output.dir`
                hint: it must be a folder"#]],
    );
}

#[test]
fn words_from_other_trainers() {
    check_report(
        &format!(
            "{REQUIRED}{}",
            r#"[adapter]
kind = "qlora"
targets = "all"
layers = "lst:8"
[train]
optimizer = "adamw_torch"
schedule = "constant_with_warmup"
steps = 100.0
lr = "2e-4"
batch = 5000000000
[memory]
recompute = true
weights = "cpu"
device = "gpu"
"#
        ),
        &[
            "model.base=bfloat16",
            "model.base=4bit",
            "model.path=https://huggingface.co/a/b",
            "data.format=Chat",
        ],
        expect![[r#"
            recipe.toml has 15 mistakes
              line 9: `adapter.kind` must be one of `lora`, `rslora`, `dora`, `ls-lora`, `full`, got "qlora"
                hint: write `lora`, with `model.base = "nf4"`
              line 10: `adapter.targets` must be `all-linear`, a list of different module names or a regular expression, got "all"
                hint: write `all-linear`
              line 11: `adapter.layers` must be `all`, `last:8`, or a list of different layer numbers, got "lst:8"
                hint: did you mean `last:8`?
              line 13: `train.optimizer` must be one of `adamw`, `adamw-8bit`, got "adamw_torch"
                hint: write `adamw`
              line 14: `train.schedule` must be one of `constant`, `linear`, `cosine`, got "constant_with_warmup"
                hint: write `constant`; `train.warmup` works with every schedule
              line 15: `train.steps` must be a whole number of at least 1, got 100.0
                hint: write it without a decimal point: 100
              line 16: `train.lr` must be a number above 0, got "2e-4"
                hint: write it without quotes: 2e-4
              line 17: `train.batch` must be a whole number of at least 1, got 5000000000
                hint: the largest accepted number is 2147483647
              line 19: `memory.recompute` must be `auto`, `none`, `all`, `every:2`, or a list of different layer numbers, got true
                hint: write `all`
              line 20: `memory.weights` must be `auto`, `device`, `host`, `host:0.5` (a fraction above 0, at most 1) or `disk`, got "cpu"
                hint: write `host`
              line 21: `memory.device` must be `auto`, `cpu` or `cuda:N` with the number of a GPU, got "gpu"
                hint: write `cuda:0`
              `model.base=bfloat16`: `model.base` must be one of `as-stored`, `f32`, `bf16`, `f16`, `fp8`, `int8`, `nf4`, `nf4-single`, got `bfloat16`
                hint: write `bf16`
              `model.base=4bit`: `model.base` must be one of `as-stored`, `f32`, `bf16`, `f16`, `fp8`, `int8`, `nf4`, `nf4-single`, got `4bit`
                hint: write `nf4`
              `model.path=https://huggingface.co/a/b`: `model.path` must be `hf:org/name`, `pypi:package`, a folder or a .gguf file, got `https://huggingface.co/a/b`
                hint: write `hf:org/name` for a model on Hugging Face
              `data.format=Chat`: `data.format` must be one of `auto`, `alpaca`, `alpaca-prompt`, `chat`, `prompt-completion`, `text`, `tokens`, `preference`, got `Chat`
                hint: did you mean `chat`?"#]],
    );
}

#[test]
fn syntax_errors_within_a_line_hide_nothing_else() {
    check_report(
        r#"[model]
path = models/tiny
[adapter]
rank = 8
rank = 9
[data]
train = "train.json"
shuffle = True
[train]
schedule = constant
warmup = none
lr = "fast"
eps = .5
[memory]
budget = 8GiB
device =
[output]
dir = "o
"#,
        &["train.stepz=5"],
        expect![[r#"
            recipe.toml has 11 mistakes
              line 2, column 8: a string needs quotes
                hint: write "models/tiny"
              line 5, column 1: `rank` is set twice
              line 8, column 11: `True` is not a value
                hint: write true
              line 10, column 12: a string needs quotes
                hint: write "constant"
              line 11, column 10: a string needs quotes
                hint: write "none"
              line 12: `train.lr` must be a number above 0, got "fast"
              line 13, column 7: not a number
                hint: a decimal point needs digits on both sides, an exponent needs digits after it
              line 15, column 10: a string needs quotes
                hint: write "8GiB"
              line 16, column 9: a value is missing after the `=`
              line 18, column 9: the string has no closing quote
              `train.stepz=5`: unknown key `train.stepz`
                hint: did you mean `train.steps`?"#]],
    );
}

#[test]
fn a_value_with_a_syntax_error_inside_is_reported_once() {
    check_report(
        &format!("{REQUIRED}[adapter.rank_pattern]\nq_proj = 4\nv_proj = eight\n"),
        &[],
        expect![[r#"
            recipe.toml has 1 mistake
              line 10, column 10: a string needs quotes
                hint: write "eight""#]],
    );
    check_report(
        &format!("{REQUIRED}[adapter]\nlayers = [\n  0,\n  last,\n]\nrank = 0\n"),
        &[],
        expect![[r#"
            recipe.toml has 2 mistakes
              line 11, column 3: a string needs quotes
                hint: write "last"
              line 13: `adapter.rank` must be a whole number from 1 to 65536, got 0"#]],
    );
}

#[test]
fn an_open_bracket_ends_the_report() {
    check_report(
        "[model]\npath = x\nbase = 5\n[adapter\nrank = 0\n",
        &["train.steps=0"],
        expect![[r#"
            recipe.toml has 3 mistakes
              line 2, column 8: a string needs quotes
                hint: write "x"
              line 4, column 9: unclosed table, expected `]`
              `train.steps=0`: `train.steps` must be a whole number of at least 1, got `0`"#]],
    );
    check_report(
        "# ä\n[train]\nbetas = [0.9, 0.99\nlr = 1\n",
        &[],
        expect![[r#"
            recipe.toml has 1 mistake
              line 4, column 1: missing comma between array elements, expected `,`"#]],
    );
    check_report(
        "train:\n  steps: 5\n",
        &[],
        expect![[r#"
            recipe.toml has 1 mistake
              line 1, column 6: invalid unquoted key, expected letters, numbers, `-`, `_`
                hint: a recipe is TOML: lines of `key = value` below a `[section]`"#]],
    );
}

#[test]
fn sections_of_the_wrong_kind() {
    check_report(
        &format!(
            "eval = 5\n[[train]]\nsteps = 5\n{REQUIRED}[wandb]\nproject = \"x\"\n[banana]\nx = 1\n[adapter.lora]\nr = 1"
        ),
        &[],
        expect![[r#"
            recipe.toml has 5 mistakes
              line 1: `eval` must be a section, got 5
                hint: write `[eval]`, then `task`, `limit`, `answer`
              line 2: `[[train]]` is a list of sections
                hint: write `[train]`, once
              line 11: unknown section `[wandb]`
                hint: remove it: a run writes metrics.jsonl and report.html into `output.dir`
              line 13: unknown section `[banana]`
                hint: the sections are `model`, `adapter`, `data`, `train`, `eval`, `memory`, `expect`, `output`
              line 15: unknown key `adapter.lora`
                hint: write `adapter.rank`"#]],
    );
}

#[test]
fn settings_that_do_nothing_together() {
    check_report(
        &format!("{REQUIRED}[train]\neval_every = 10"),
        &["train.early_stop=2", "train.eval_every=0"],
        expect![[r#"
            recipe.toml has 1 mistake
              `train.early_stop=2`: `train.early_stop` has no effect: `train.eval_every` is 0
                hint: set `train.eval_every`, or `train.early_stop = 0`"#]],
    );
    check_report(
        &format!("{REQUIRED}[train]\neval_every = 10\nearly_stop = 2"),
        &[],
        expect![[r#"
            recipe.toml has 1 mistake
              line 9: `train.eval_every` has no effect: `data.eval` names no file
                hint: set `data.eval`, or `train.eval_every = 0`"#]],
    );
    // A refused `data.eval` is one mistake, not two.
    let text = format!("{REQUIRED}[train]\neval_every = 10").replace("[data]", "[data]\neval = 5");
    assert_eq!(parse(&text, &[]).expect_err("a mistake").mistakes.len(), 1);
}

#[test]
fn windows_line_ends_and_a_byte_order_mark_are_fine() {
    let text = format!("\u{feff}{}", REQUIRED.replace('\n', "\r\n"));
    assert!(parse(&text, &[]).is_ok());
    let errors = parse(&format!("{text}[train]\r\nlr = 0\r\n"), &[]).expect_err("a mistake");
    assert_eq!(errors.mistakes[0].place, Place::Line(9));
}

#[test]
fn hints_name_keys_that_exist() {
    let hints =
        FOREIGN_KEYS.iter().map(|(_, hint)| hint).chain(FOREIGN_WORDS.iter().map(|(_, _, hint)| hint));
    let mut named = 0;
    for hint in hints {
        assert_eq!(hint.matches('`').count() % 2, 0, "{hint}");
        for quoted in hint.split('`').skip(1).step_by(2) {
            let path = quoted.split(' ').next().expect("a word");
            if let Some((section, name)) = path.split_once('.')
                && SECTIONS.contains(&section)
            {
                assert!(find_key(section, name).is_some(), "`{path}` in: {hint}");
                named += 1;
            }
        }
    }
    assert!(named > 50, "{named}");
    for (keys, _, _) in FOREIGN_WORDS {
        for key in *keys {
            assert!(KEYS.iter().any(|known| known.path() == *key), "{key}");
        }
    }
    let mut names: Vec<&str> = FOREIGN_KEYS.iter().flat_map(|(names, _)| names.iter().copied()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a foreign name is listed twice");
}

#[test]
fn every_foreign_name_is_refused_everywhere_with_its_hint() {
    let hint_for = |text: &str, overrides: &[&str]| {
        let errors = parse(text, overrides).expect_err("a mistake");
        assert_eq!(errors.mistakes.len(), 1, "{errors}");
        errors.mistakes[0].hint.clone()
    };
    for (names, hint) in FOREIGN_KEYS {
        for name in names.iter().filter(|name| !name.contains('.')) {
            let top_level = hint_for(&format!("{name} = 1\n{REQUIRED}"), &[]);
            assert_eq!(top_level.as_deref(), Some(*hint), "{name}");
        }
        for name in *names {
            // A name with a section has this hint in that section; any other name has it in every section without it.
            let (section, name) = name.split_once('.').unwrap_or(("expect", name));
            let elsewhere = hint_for(REQUIRED, &[&format!("{section}.{name}=1")]);
            assert_eq!(elsewhere.as_deref(), Some(*hint), "{section}.{name}");
        }
    }
}

/// Several values without brackets, and settings that only other trainers have.
#[test]
fn hints_for_lists_without_brackets_and_for_settings_of_other_trainers() {
    let hint_for = |text: &str| {
        let errors = parse(REQUIRED, &[text]).expect_err(text);
        errors.mistakes[0].hint.clone().unwrap_or_default()
    };
    assert_eq!(hint_for("adapter.targets=q_proj,v_proj"), "write a list in brackets: `[q_proj,v_proj]`");
    assert_eq!(hint_for("adapter.layers=1,2"), "write a list in brackets: `[1,2]`");
    assert_eq!(hint_for("train.betas=0.9,0.95"), "write a list in brackets: `[0.9,0.95]`");
    assert_eq!(parse(REQUIRED, &["adapter.targets=[q_proj,v_proj]"]).unwrap().adapter.targets, {
        Targets::Names(vec!["q_proj".into(), "v_proj".into()])
    });
    assert!(hint_for("memory.contiguous_gradients=true").starts_with("remove it: reduces fragmentation"));
    assert!(hint_for("train.label_smoothing=0.1").starts_with("remove it; it is a setting of"));
    // A misspelt key of ours is still found.
    assert_eq!(hint_for("adapter.rnak=3"), "did you mean `adapter.rank`?");
}

/// Overrides as Hydra and other scripts take them get the command or the key that does it.
#[test]
fn overrides_of_other_tools_get_a_hint() {
    let hint = |text: &str| {
        let text_of = "[model]\npath = \"a\"\n[data]\ntrain = \"a.json\"\n[output]\ndir = \"x\"\n";
        let source = RecipeSource { file: "r.toml".into(), folder: "/".into(), text: text_of.into() };
        parse_recipe(&source, &[text.to_owned()], Path::new("/")).unwrap_err().to_string()
    };
    for (text, words) in [
        ("+trainer.args.bf16=true", "without Hydra's `+` and groups; write `model.compute`"),
        ("++model.use_cache=false", "remove it: caches keys and values for generation"),
        ("trainer.args.learning_rate=1", "write `train.lr`"),
        ("cmd=train", "`smidgen train RECIPE section.key=value`"),
        ("data=rows.jsonl", "write `data.train=...`"),
        ("model=a/b", "write `model.path=...`"),
        ("train=3", "`[train]` has `objective`"),
        ("model.low_cpu_mem_usage=true", "remove it: weights are read straight into their places"),
    ] {
        let said = hint(text);
        assert!(said.contains(words), "{text}: {said}");
    }
}
