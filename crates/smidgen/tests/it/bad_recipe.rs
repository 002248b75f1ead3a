//! Recipes and commands that are wrong: exit code 2, all mistakes at once with their places, nothing written.
//!
//! Also the output folder and the choices that only the model can prove wrong. What each reader of a key
//! accepts is tested beside it.

use crate::scratch::{RECIPE, Scratch};
use expect_test::expect;

#[test]
fn all_mistakes_are_told_at_once_with_their_lines() {
    let scratch = Scratch::new();
    let recipe = r#"[model]
pth = "model"
base = "nf5"

[adapter]
rank = "four"
dropout = 2

[data]
train = "data.jsonl"

[train]
steps = 5
epochs = 2
learning_rate = 1e-3
batch = 2
batch_tokens = 100
"#;
    scratch.write("recipe.toml", recipe);
    let said = scratch.train_refused(2, &["memory.budget=lots", "train.stepz=3"], &[]);
    expect![[r#"
        error: recipe.toml has 11 mistakes
          line 2: unknown key `model.pth`
            hint: did you mean `model.path`?
          line 3: `model.base` must be one of `as-stored`, `f32`, `bf16`, `f16`, `fp8`, `int8`, `nf4`, `nf4-single`, got "nf5"
            hint: did you mean `nf4`?
          line 6: `adapter.rank` must be a whole number from 1 to 65536, got "four"
          line 7: `adapter.dropout` must be a number of at least 0 and below 1, got 2
          line 14: `train.epochs` and `train.steps` in line 13 exclude each other
            hint: keep one of them
          line 15: unknown key `train.learning_rate`
            hint: write `train.lr`
          line 17: `train.batch_tokens` and `train.batch` in line 16 exclude each other
            hint: keep one of them
          `memory.budget=lots`: `memory.budget` must be `auto`, or a size above 0 such as `24GiB`, `512MiB` or `8GB`, got `lots`
          `train.stepz=3`: unknown key `train.stepz`
            hint: did you mean `train.steps`?
          missing key `model.path`
            hint: it must be `hf:org/name`, `pypi:package`, a folder or a .gguf file
          missing key `output.dir`
            hint: it must be a folder
    "#]].assert_eq(&said);
    // A plan of it is refused with the same words.
    assert_eq!(
        scratch.refused(2, &["plan", "recipe.toml", "memory.budget=lots", "train.stepz=3"], &[]),
        said
    );
}

#[test]
fn unknown_keys_get_the_nearest_one() {
    let scratch = Scratch::new();
    for (given, meant) in [
        ("train.stepps=3", "did you mean `train.steps`?"),
        ("memory.buget=8GiB", "did you mean `memory.budget`?"),
        ("adapter.r=8", "`adapter.rank`"),
        ("train.per_device_train_batch_size=8", "`train.batch`"),
        ("lora_alpha=8", "`adapter.alpha`"),
        ("train.num_train_epochs=3", "`train.epochs`"),
        ("data.max_seq_length=99", "`data.max_tokens`"),
    ] {
        let key = given.split('=').next().unwrap();
        scratch.train_refused(2, &[given], &[&format!("unknown key `{key}`"), "hint: ", meant]);
    }
    scratch.train_refused(2, &["nonsense"], &["`nonsense`: an override is written `section.key=value`"]);
}

#[test]
fn values_of_the_wrong_kind_say_what_is_accepted() {
    let scratch = Scratch::new();
    for (given, words) in [
        ("train.steps=many", "`train.steps` must be a whole number of at least 1, got `many`"),
        ("train.steps=0", "a whole number of at least 1"),
        ("train.steps=1.5", "a whole number of at least 1"),
        ("train.lr=-1", "`train.lr` must be "),
        ("train.lr=nan", "`train.lr` must be "),
        ("adapter.dropout=1", "at least 0 and below 1"),
        ("adapter.layers=last", "`last:8`"),
        ("memory.recompute=some", "`auto`, `none`, `all`, `every:2`"),
        ("memory.budget=0", "a size above 0"),
        ("memory.budget=0GiB", "a size above 0"),
        ("memory.budget=-1GiB", "a size above 0"),
        ("memory.budget=-1", "a size above 0"),
        ("memory.host_budget=-1", "a size above 0"),
        ("memory.adapt=sometimes", "true or false"),
        ("data.shuffle=maybe", "true or false"),
        ("train.betas=[0.9]", "`train.betas` must be "),
    ] {
        scratch.train_refused(2, &[given], &[given, words]);
    }
}

#[test]
fn keys_that_exclude_each_other() {
    let scratch = Scratch::new();
    scratch.write("recipe.toml", RECIPE.replace("steps = 6", "steps = 6\nepochs = 2"));
    let words =
        ["line 17: `train.epochs` and `train.steps` in line 16 exclude each other", "keep one of them"];
    scratch.train_refused(2, &[], &words);
    scratch.write("recipe.toml", RECIPE);
    scratch.train_refused(2, &["train.batch=2", "train.batch_tokens=90"], &["exclude each other"]);
}

#[test]
fn what_is_not_toml_names_line_and_column() {
    let scratch = Scratch::new();
    scratch.write("recipe.toml", "[model]\npath = \n");
    scratch.train_refused(2, &[], &["line 2, column "]);
    scratch.write("recipe.toml", b"[model]\npath = \"\xff\xfe\"\n");
    scratch.train_refused(2, &[], &["recipe.toml"]);
}

#[test]
fn a_recipe_that_is_not_there() {
    let scratch = Scratch::new();
    scratch.refused(2, &["train", "absent.toml"], &["cannot read the recipe `absent.toml`"]);
    scratch.refused(2, &["plan", "model"], &["cannot read the recipe `model`"]);
}

#[test]
fn choices_that_this_version_lacks_are_named_at_once() {
    let scratch = Scratch::new();
    let overrides = ["model.compute=f16", "memory.device=cuda:0", "eval.task=generate"];
    let said = scratch.train_refused(2, &overrides, &[]);
    expect![[r#"
        error: this version cannot run the recipe
          `eval.task = generate` is not supported (supported: loss, choice; `smidgen eval` generates after training)
    "#]]
    .assert_eq(&said);
}

#[test]
fn targets_and_layers_that_the_model_lacks() {
    let scratch = Scratch::new();
    let all = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
    scratch.train_refused(
        2,
        &["adapter.targets=[q_proj,wq]"],
        &["adapter target `wq` matches no linear", all],
    );
    let words = ["adapter layer 2 does not exist, the model has layers 0 to 1"];
    scratch.train_refused(2, &["adapter.layers=[0,2]"], &words);
    let words = ["recompute layer 7 does not exist, the model has layers 0 to 1"];
    scratch.train_refused(2, &["memory.recompute=[0,7]"], &words);
    scratch.refused(2, &["plan", "recipe.toml", "memory.recompute=[0,7]"], &words);
}

#[test]
fn patterns_that_are_none() {
    let scratch = Scratch::new();
    scratch.train_refused(
        2,
        &["adapter.rank_pattern={ \"q_(proj\" = 2 }"],
        &["`adapter.rank_pattern`", "q_(proj"],
    );
    let words = ["`adapter.alpha_pattern`: `w_proj` matches no adapted linear", "hint: a pattern is a name"];
    scratch.train_refused(2, &["adapter.alpha_pattern={ w_proj = 2 }"], &words);
    // PEFT sorts the keys it saves: what would then mean another rank is refused before the run, not after it.
    let two = "adapter.rank_pattern={ q_proj = 3, \"layers.1.self_attn.q_proj\" = 2 }";
    scratch.train_refused(2, &[two], &["`rank_pattern` sets", "once its keys are sorted"]);
}

#[test]
fn more_layers_than_there_are() {
    let words = ["`adapter.layers = last:7` asks for more than the model's 2 layers"];
    Scratch::new().train_refused(2, &["adapter.layers=last:7"], &words);
}

#[test]
fn micro_batches_below_the_longest_sample() {
    let scratch = Scratch::new();
    let said = scratch.train_refused(2, &["memory.micro_tokens=39"], &[]);
    expect![[r#"
        error: `memory.micro_tokens = 39` is below the longest sample, which has 40 tokens

        hint: `memory.micro_tokens = 40`, or `data.max_tokens = 39` to shorten the samples
    "#]]
    .assert_eq(&said);
    scratch.train("run", &["memory.micro_tokens=40"]);
}

#[test]
fn evaluation_without_data_for_it() {
    let scratch = Scratch::new();
    let words = ["`train.eval_every` has no effect: `data.eval` names no file", "hint: set `data.eval`"];
    scratch.train_refused(2, &["train.eval_every=2"], &words);
}

#[test]
fn a_run_that_does_not_fit_writes_nothing() {
    let scratch = Scratch::new();
    let words = ["error: the smallest plan needs ", "hint: `memory.budget = \"", "is the least that fits"];
    scratch.train_refused(1, &["memory.budget=1MiB"], &words);
}

#[test]
fn output_folders_that_cannot_be() {
    let scratch = Scratch::new();
    scratch.write("taken", "a file");
    scratch.train_refused(1, &["output.dir=taken"], &["taken` is a file, not a folder", "`output.dir`"]);
    let ended = scratch.run(&["train", "recipe.toml", "output.dir=taken/below"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("cannot create `"), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint: choose another `output.dir`"), "{}", ended.stderr);
    assert_eq!(scratch.text("taken"), "a file");
}

/// Values are checked in the precision that is used.
#[test]
fn numbers_that_f32_cannot_hold_are_mistakes_of_the_recipe() {
    let scratch = Scratch::new();
    for (key, value, there) in [
        ("train.lr", "1e39", "infinite"),
        ("train.lr", "1e-300", "0"),
        ("train.weight_decay", "1e39", "infinite"),
        ("train.clip", "1e39", "infinite"),
        ("train.eps", "1e-60", "0"),
        ("train.betas", "[0.9,0.9999999999]", "1"),
        ("adapter.dropout", "0.9999999999", "1"),
        ("adapter.alpha", "1e40", "infinite"),
        ("adapter.sigma", "1e40", "infinite"),
        ("adapter.reg", "1e40", "infinite"),
    ] {
        let words =
            [&format!("`{key}` must be ")[..], &format!(" is {there}"), "hint: it is used in f32, where "];
        scratch.train_refused(2, &[&format!("{key}={value}")], &words);
    }
    scratch.train("run", &["adapter.dropout=0.9999999", "train.steps=2"]);
}

#[test]
fn a_size_without_a_unit_is_refused() {
    let scratch = Scratch::new();
    for key in ["memory.budget", "memory.host_budget", "expect.peak"] {
        let words = [&format!("`{key}` must be ")[..], "hint: it has no unit: write `12GiB` or `12MiB`"];
        scratch.train_refused(2, &[&format!("{key}=12")], &words);
    }
    // A number of bytes.
    scratch.train("run", &["memory.budget=67108864", "train.steps=1"]);
}
