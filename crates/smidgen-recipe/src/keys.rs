//! Every key of a recipe in one table: its section, how it is read, how it is rendered, what it means.
//!
//! Parsing, nearest-key hints, `job.toml`, the key reference and the comparison on resume all use [`KEYS`];
//! defaults are in `sections.rs`. To add a key, add a field with its default there and a line here.
//! The key reference and `job.toml` have the same order.

use crate::mix::{COLUMNS, MIX};
use crate::pins;
use crate::read::{
    ABOVE_ZERO, ALPHA_PATTERN, ANY_F32, ANY_TEXT, AUDIO_FOLDER, Accepts, BOOLEAN, BUDGET, DEVICE, EPOCHS,
    EVAL_FILES, F32_ABOVE_ZERO, F32_AT_LEAST_ZERO, F32_BELOW_ONE, FRACTION_BELOW_ONE, INIT, LAYERS,
    MODEL_PATH, NUMBERS, OUTPUT_FOLDER, PARTS, PEAK, PROFILE, RANK, RANK_PATTERN, SEED, SHARE, TARGETS,
    TEMPLATE, TEXTS, TRAIN_FILES, TWO_FRACTIONS_BELOW_ONE, WARMUP, count_from, words,
};
use crate::reward_tables::REWARDS;
use crate::sections::{Batch, Length, Recipe};
use crate::toml_text::RenderValue;
use crate::value::Given;
use smidgen_ir::words::{
    AdapterKind, AudioOverflow, BaseFormat, Bias, Compute, DataFormat, EvalTask, LossOn, Master,
    ObjectiveKind, OnBadRow, Optimizer, Overflow, RatioLevel, ReferenceMemory, ReferenceUse, RewardScale,
    Schedule,
};

/// One key of a recipe.
pub(crate) struct Key {
    pub section: &'static str,
    pub name: &'static str,
    pub accepts: Accepts,
    /// One line for the reference.
    pub meaning: &'static str,
    pub required: bool,
    /// The key of the same section that excludes this one.
    pub excludes: Option<&'static str>,
    /// Writes the value into the recipe; `None` if the value is not accepted.
    pub set: fn(&mut Recipe, &Given<'_>) -> Option<()>,
    /// The value as TOML; `None` if the key that excludes this one is set.
    pub show: fn(&Recipe) -> Option<String>,
}

impl Key {
    /// `section.name`
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name)
    }
}

pub(crate) const SECTIONS: [&str; 8] =
    ["model", "adapter", "data", "train", "eval", "memory", "expect", "output"];

pub(crate) fn find_key(section: &str, name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.section == section && key.name == name)
}

macro_rules! key {
    (required $section:ident . $name:ident, $reader:expr, $meaning:literal) => {
        Key { required: true, ..key!($section.$name, $reader, $meaning) }
    };
    ($section:ident . $name:ident, $reader:expr, $meaning:literal) => {
        key!(@ $section.$name, $reader, $meaning,
            |recipe, value| recipe.$section.$name = value,
            |recipe| Some(recipe.$section.$name.render()))
    };
    // A setting of the objective, which need not be given.
    (aim $name:ident, $reader:expr, $meaning:literal) => {
        key!(@ train.$name, $reader, $meaning,
            |recipe, value| recipe.train.aim.$name = Some(value),
            |recipe| recipe.train.aim.$name.as_ref().map(RenderValue::render))
    };
    // A memory choice, stored in one pin.
    (pin $name:ident, $reader:expr, $meaning:literal) => {
        key!(@ memory.$name, $reader, $meaning,
            |recipe, value| recipe.memory.pins.$name = value,
            |recipe| Some(pins::render_pin(&recipe.memory.pins.$name)))
    };
    // A memory choice that a pair of functions writes to and reads from the pins.
    (pins $name:ident, $reader:expr, $pin:ident, $show:ident, $meaning:literal) => {
        key!(@ memory.$name, $reader, $meaning,
            |recipe, value| pins::$pin(&mut recipe.memory.pins, value),
            |recipe| Some(pins::$show(&recipe.memory.pins)))
    };
    // One of two keys that share a field.
    ($section:ident . $name:ident, $reader:expr, $meaning:literal,
     $field:ident = $variant:path, excludes $other:ident) => {
        Key {
            excludes: Some(stringify!($other)),
            ..key!(@ $section.$name, $reader, $meaning,
                |recipe, value| recipe.$section.$field = $variant(value),
                |recipe| match &recipe.$section.$field {
                    $variant(value) => Some(value.render()),
                    _ => None,
                })
        }
    };
    // The fields that all keys have.
    (@ $section:ident . $name:ident, $reader:expr, $meaning:literal,
     |$recipe:ident, $value:ident| $set:expr, |$shown:ident| $show:expr) => {
        Key {
            section: stringify!($section),
            name: stringify!($name),
            accepts: $reader.accepts,
            meaning: $meaning,
            required: false,
            excludes: None,
            set: |$recipe, given| {
                let $value = ($reader.read)(given)?;
                $set;
                Some(())
            },
            show: |$shown| $show,
        }
    };
}

#[rustfmt::skip]
pub(crate) static KEYS: &[Key] = &[
    key!(required model.path, MODEL_PATH, "the base model; paths start at the recipe's folder; `plan`, `fit` and `bench` also take short names such as `qwen2.5-7b`"),
    key!(model.base, words::<BaseFormat>(), "storage of the frozen weights on the device; all but as-stored may change results"),
    key!(model.compute, words::<Compute>(), "precision of matmuls and activations; auto = the device's best"),
    //
    key!(adapter.kind, words::<AdapterKind>(), "what is trained: an adapter, or with `full` the base weights"),
    key!(adapter.rank, RANK, "rank of the adapter"),
    key!(adapter.alpha, F32_ABOVE_ZERO, "scale is alpha / rank; the default is twice the rank"),
    key!(adapter.dropout, F32_BELOW_ONE, "dropout on the adapter's input"),
    key!(adapter.targets, TARGETS, "which linear layers are adapted; `all-linear` = all except the LM head; a regular expression matches whole module paths, as in PEFT; with `full`, a list trains these linear layers and their biases, and `all-linear` trains every weight of the decoder layers"),
    key!(adapter.layers, LAYERS, "which decoder layers are adapted or trained, counted from 0; with `full`, `all` also trains embedding, final norm and LM head"),
    key!(adapter.init, INIT, "initial values: `default`, the folder of a PEFT adapter, or of a run that made one, with the same kind, rank and targets, or `builtin:speech` (the speech adapter that Phi-4-multimodal ships with; rank and alpha are then those of the checkpoint)"),
    key!(adapter.train, PARTS, "parts of the base model that are trained in full in addition to the adapter and saved with it, like PEFT's `modules_to_save`: names such as `embed_tokens`, `lm_head`, `norms` or `projector`"),
    key!(adapter.rank_pattern, RANK_PATTERN, "ranks of modules that match a pattern; the first match wins"),
    key!(adapter.alpha_pattern, ALPHA_PATTERN, "alphas of modules that match a pattern; the first match wins"),
    key!(adapter.bias, words::<Bias>(), "which biases are trained"),
    key!(adapter.reg, F32_AT_LEAST_ZERO, "strength of the regularizer of ls-lora"),
    key!(adapter.sigma, F32_ABOVE_ZERO, "initial width of the functions of ls-lora"),
    //
    Key {
        // A job whose rows all come from `data.mix` has no `data.train`.
        show: |recipe| Some(recipe.data.train.render()).filter(|_| !recipe.data.train.is_empty()),
        ..key!(required data.train, TRAIN_FILES, "training data: .json, .jsonl, .csv or .parquet; .txt, .md and folders of them as documents; one file, a list, or globs; `hf:org/name[@revision][/config][:split]` on the hub; not needed with `data.mix`")
    },
    key!(data.eval, EVAL_FILES, "evaluation data, like `data.train`"),
    key!(data.split, FRACTION_BELOW_ONE, "share of the training rows that is held out for evaluation when there is no `data.eval`, rounded up, chosen by `train.seed`; 0 = none"),
    key!(data.limit, count_from::<usize, 0>(), "maximum rows of each source of training data, from the first; 0 = all"),
    key!(data.columns, COLUMNS, "the column for each role, if the columns have other names than the format expects, such as `{ prompt = \"question\", completion = \"answer\" }`"),
    key!(data.on_bad_row, words::<OnBadRow>(), "what happens if rows cannot be used: `error` reports all of them and refuses the run, `skip` leaves them out and counts them"),
    key!(data.format, words::<DataFormat>(), "format of the rows; auto = detected from the columns"),
    key!(data.template, TEMPLATE, "chat template; `model` = the model's own, for every format with an answer; `none` = prompts and completions stay as they are; auto = the model's own, but prompts and completions that are strings stay as they are, with a warning"),
    key!(data.loss_on, words::<LossOn>(), "which tokens carry a loss; auto = every assistant turn of chat rows, all tokens of text rows, else the completion"),
    key!(data.max_tokens, count_from::<usize, 2>(), "longest sample in tokens"),
    key!(data.overflow, words::<Overflow>(), "what happens to longer samples; `chunk` cuts them into pieces and uses every piece; auto = `chunk` for text rows, else `truncate`"),
    key!(data.max_audio_seconds, ABOVE_ZERO, "longest audio clip in seconds, for models with an audio encoder"),
    key!(data.audio_overflow, words::<AudioOverflow>(), "what happens to longer clips: `drop` drops their rows and counts them, `trim` cuts their end off"),
    key!(data.audio_dir, AUDIO_FOLDER, "folder that audio paths in rows are relative to; empty = the folder of the data file"),
    key!(data.mix, MIX, "more sources of training data: tables `[[data.mix]]` with `path`, `weight` and optionally `format` and `columns`; `data.train` has weight 1; an epoch has as many samples as all sources together"),
    key!(data.shuffle, BOOLEAN, "reshuffle the samples in each epoch, with `train.seed`"),
    //
    key!(train.objective, words::<ObjectiveKind>(), "what a step minimizes; all but `sft` need rows of their own and have TRL's keys and defaults, a learning rate of 1e-6 among them"),
    key!(aim reference, words::<ReferenceUse>(), "dpo, kto, grpo: the model to compare with; auto = the base, or the start of the adapter where `adapter.init` names one"),
    key!(aim beta, F32_AT_LEAST_ZERO, "strength of the preference, or of the penalty for leaving the reference; default 0.1, for grpo 0"),
    key!(aim loss_type, TEXTS, "dpo: `sigmoid`, `robust`, `hinge`, `ipo`, `sigmoid_norm`, `sft`, or a list of them; cpo: `sigmoid`, `hinge`, `ipo`, `simpo`, `alphapo`; kto: `kto`, `apo_zero_unpaired`; grpo: `dapo`, `grpo`, `bnpo`, `dr_grpo`"),
    key!(aim loss_weights, NUMBERS, "dpo: the weight of each loss type; default 1"),
    key!(aim label_smoothing, F32_BELOW_ONE, "dpo with `robust`, and cpo: assumed share of pairs whose answers are swapped; default 0"),
    key!(aim simpo_gamma, F32_AT_LEAST_ZERO, "cpo with `simpo`: the margin; default 0.5"),
    key!(aim cpo_alpha, F32_AT_LEAST_ZERO, "cpo: weight of the negative log-likelihood of chosen answers; default 1"),
    key!(aim alpha, ANY_F32, "cpo: the exponent of AlphaPO; default 0"),
    key!(aim desirable_weight, F32_AT_LEAST_ZERO, "kto: weight of desirable completions; default 1"),
    key!(aim undesirable_weight, F32_AT_LEAST_ZERO, "kto: weight of undesirable completions; default 1"),
    key!(aim num_generations, count_from::<usize, 2>(), "grpo: answers of a prompt; default 8"),
    key!(aim num_iterations, count_from::<usize, 1>(), "grpo: updates with the same answers; default 1"),
    key!(aim max_completion_length, count_from::<usize, 1>(), "grpo: longest answer in tokens; default 512"),
    key!(aim temperature, F32_ABOVE_ZERO, "grpo: logits are divided by this; default 1"),
    key!(aim top_k, count_from::<usize, 0>(), "grpo with `train.reward`: answers are drawn from this many of the most likely tokens; default 0 = all"),
    key!(aim top_p, SHARE, "grpo with `train.reward`: answers are drawn from the fewest most likely tokens whose probabilities sum to this; default 1 = all"),
    key!(aim stop, TEXTS, "grpo with `train.reward`: texts that end an answer, which then has them at its end"),
    key!(aim reward, REWARDS, "grpo: how generated answers are scored: tables `[[train.reward]]` with `kind` (`exact`, `number`, `regex`, `format`, `length`, `json` or `command`), `weight` and the keys of the kind; without it, rows have answers with rewards"),
    key!(aim epsilon, F32_AT_LEAST_ZERO, "grpo: how far a ratio may fall below 1; default 0.2"),
    key!(aim epsilon_high, F32_AT_LEAST_ZERO, "grpo: how far a ratio may rise above 1; default `epsilon`"),
    key!(aim delta, F32_ABOVE_ZERO, "grpo: upper limit of a ratio outside the clip; default none"),
    key!(aim scale_rewards, words::<RewardScale>(), "grpo: what rewards are divided by; default `group`"),
    key!(aim importance_sampling_level, words::<RatioLevel>(), "grpo: one ratio per token or per answer; default `token`"),
    key!(aim use_bias_correction_kl, BOOLEAN, "grpo: whether the penalty is multiplied by the ratio; default true"),
    key!(train.batch, count_from::<usize, 1>(), "rows per optimizer step, over all ranks: samples, pairs, or prompts with their answers",
        batch = Batch::Samples, excludes batch_tokens),
    key!(train.batch_tokens, count_from::<usize, 1>(), "instead of `train.batch`: tokens per optimizer step",
        batch = Batch::Tokens, excludes batch),
    key!(train.steps, count_from::<u64, 1>(), "optimizer steps", length = Length::Steps, excludes epochs),
    key!(train.epochs, EPOCHS, "instead of `train.steps`: passes over the data",
        length = Length::Epochs, excludes steps),
    key!(train.lr, F32_ABOVE_ZERO, "peak learning rate"),
    key!(train.schedule, words::<Schedule>(), "learning rate schedule after warm-up"),
    key!(train.warmup, WARMUP, "warm-up steps, or a fraction below 1 of all steps"),
    key!(train.optimizer, words::<Optimizer>(), "the optimizer; 8-bit optimizer state changes results"),
    key!(train.master, words::<Master>(), "how trained weights are stored with `adapter.kind = \"full\"`; bf16 = no f32 master weights, with stochastic rounding, which changes results"),
    key!(train.weight_decay, F32_AT_LEAST_ZERO, "decoupled weight decay"),
    key!(train.betas, TWO_FRACTIONS_BELOW_ONE, "decay rates of AdamW's two moments"),
    key!(train.eps, F32_ABOVE_ZERO, "added to the square root of the second moment"),
    key!(train.clip, F32_AT_LEAST_ZERO, "largest global gradient norm; 0 = no clipping"),
    key!(train.seed, SEED, "seed of every random choice"),
    key!(train.log_every, count_from::<u64, 0>(), "steps between progress lines (0 = none); metrics.jsonl does not depend on it"),
    key!(train.eval_every, count_from::<u64, 0>(), "steps between evaluations; 0 = never"),
    key!(train.save_every, count_from::<u64, 0>(), "steps between checkpoints; 0 = save only the best evaluated state, the final adapter or model, and for adapters the last state"),
    key!(train.keep, count_from::<usize, 1>(), "number of checkpoints to keep, in addition to the best evaluated one"),
    key!(train.early_stop, count_from::<u64, 0>(), "evaluations without improvement before the run ends; 0 = off"),
    //
    key!(eval.task, words::<EvalTask>(), "what an evaluation measures"),
    key!(eval.limit, count_from::<usize, 0>(), "maximum samples to evaluate; 0 = all"),
    key!(eval.answer, ANY_TEXT, "regular expression that finds the answer in an output"),
    //
    key!(memory.device, DEVICE, "the device that trains; `cuda` is `cuda:0`"),
    key!(memory.profile, PROFILE, "plan for another device: `rtx-4090`, `h200`, ..., or a saved profile"),
    key!(memory.budget, BUDGET, "device memory (RAM when the device is the CPU); auto = what is free; `GB` is 10^9, `GiB` and `G` are 2^30"),
    key!(memory.host_budget, BUDGET, "host and pinned memory; auto = what is free, and at most 32 GiB with a GPU that `memory.profile` names"),
    key!(memory.threads, count_from::<usize, 0>(), "CPU threads; 0 = all"),
    key!(pin micro_tokens, pins::TOKENS, "tokens of the largest micro-batch"),
    key!(pin tile_tokens, pins::TOKENS_OR_NONE, "tokens that feed-forward blocks compute at a time; none = a whole micro-batch"),
    key!(pin recompute, pins::LAYERS, "layers whose activations are recomputed in the backward pass, counted from 0; `every:2` is layers 0, 2, 4, ..."),
    key!(pins activations, pins::SPACE, pin_activations, show_activations, "where activations are kept until the backward pass: on the device, in host memory, or in a file in the run folder; if the device is the CPU, `device` and `host` are the same memory"),
    key!(pins weights, pins::WEIGHTS, pin_weights, show_weights, "where weights are kept, frozen and trained; `host:0.5` offloads half of the layers, spread evenly and including the last (of 28 layers: 1, 3, 5, ..., 27), and leaves embedding and LM head to the solver"),
    key!(pin optimizer_state, pins::SPACE, "where optimizer state is kept"),
    key!(pin gradients, pins::SPACE, "where gradients of trained weights are kept (`adapter.kind = \"full\"`)"),
    key!(pin order, pins::ORDER, "depth: each micro-batch runs through all layers before the next one starts; breadth: all micro-batches of a step run through a layer before the next layer starts, so offloaded weights are fetched once for all of them"),
    key!(pin layers_per_lap, pins::TOKENS, "in breadth-first order, the number of layers that all micro-batches run through before the next ones start; with 2, only every second layer's input is kept for the backward pass, and the weights of two layers are on the device at the same time"),
    key!(pins shard, pins::SHARD, pin_shard, show_shard, "what is divided over ranks; `gradients` includes AdamW's moments, `weights` includes both"),
    key!(memory.reference, words::<ReferenceMemory>(), "how log-probabilities of the reference come about: by a forward pass in every step, or computed once and kept in the run folder; auto = pass, and cached where the base itself is trained"),
    key!(memory.adapt, BOOLEAN, "replan at a checkpoint if free memory has changed"),
    //
    Key {
        section: "expect",
        name: "peak",
        accepts: PEAK.accepts,
        meaning: "largest peak that a test accepts when it plans this recipe",
        required: false,
        excludes: None,
        set: |recipe, given| {
            recipe.expect.peak_bytes = (PEAK.read)(given)?;
            Some(())
        },
        show: |recipe| Some(recipe.expect.peak_bytes.render()),
    },
    //
    key!(required output.dir, OUTPUT_FOLDER, "folder of the run, relative to the working directory"),
];
