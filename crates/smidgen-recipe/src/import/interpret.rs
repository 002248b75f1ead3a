//! Writes the recipe of a file from the table of its tool: model, precision, batch, length, optimizer, saving, memory.
//!
//! Each function takes the settings of one subject and writes the lines of the recipe for it, or notes why there are
//! none. The tool's file calls them in the order that its meaning needs; the adapter is in `adapters.rs`, data sets in
//! `datasets.rs`.

use super::document::Content;
use super::draft::{Draft, Source};
use super::families::{Family, Kind, family_of};
use super::fields::Found;
use super::table::{Means, Saving, Settings};
use super::values::{
    Choice, PINNED, choose, per_epoch_note, put_beta_list, put_betas, put_max_memory, put_number, put_text,
    put_whole, word,
};
use crate::HfName;
use crate::value::Value;

/// The recipe's default of `data.max_tokens`.
const DEFAULT_TOKENS: u64 = 1024;
/// For files that do not say how many devices they run on.
pub const ONE_DEVICE: &str =
    "the number of devices is not set; assuming 1, so that `train.batch` is micro-batch x accumulation";
/// Hugging Face's trainer saves this often.
const SAVE_STEPS: i128 = 500;

/// `model.path` from a name on the hub or a folder.
pub fn put_model(it: &Settings<'_, '_>, draft: &mut Draft) {
    let revision = it.take(Means::Revision);
    if let Some(name) = it.take(Means::Model) {
        put_model_named(draft, &name, revision);
    }
}

/// Notes the family that a name shows; what is no language model is a mistake at `found`.
pub fn judge_family(draft: &mut Draft, found: &Found<'_>, name: &str) {
    match family_of(name) {
        Some(Family { kind: Kind::NotText, name: family, .. }) => found.mistake(format!(
            "`{}`: `{name}` is one of the {family} models; smidgen fine-tunes language models",
            found.key
        )),
        Some(family) => draft.families.push((name.to_owned(), family)),
        None => {}
    }
}

pub fn put_model_named(draft: &mut Draft, name: &Found<'_>, revision: Option<Found<'_>>) {
    let Some(text) = name.text() else { return };
    judge_family(draft, name, &text);
    let is_path = text.starts_with(['/', '.', '~']) || text.ends_with(".gguf") || draft.places.exists(&text);
    if is_path || HfName::parse(&text).is_none() {
        return draft.put("model.path", Value::Text(text), &[name]);
    }
    let revision = revision.and_then(|found| Some((found.text()?, found)));
    match revision.filter(|(revision, _)| revision != "main") {
        Some((revision, found)) => {
            draft.put("model.path", Value::Text(format!("hf:{text}@{revision}")), &[name, &found])
        }
        None => draft.put("model.path", Value::Text(format!("hf:{text}")), &[name]),
    }
}

/// Names of precisions, without `torch.`.
#[rustfmt::skip]
const PRECISIONS: &[Choice] = &[
    (&["bfloat16", "bf16"], "bf16", ""),
    (&["float16", "fp16", "half"], "f16", ""),
    (&["float32", "fp32", "float"], "f32", ""),
];

/// `model.compute` from two switches.
pub fn put_compute(draft: &mut Draft, bf16: Option<&Found<'_>>, f16: Option<&Found<'_>>) {
    let is = |found: Option<&Found<'_>>, on: bool| found.is_some_and(|found| found.boolean() == Some(on));
    match (bf16, f16) {
        (Some(bf16), Some(f16)) if is(Some(bf16), true) && is(Some(f16), true) => f16.exclude(bf16),
        (Some(found), _) if is(Some(found), true) => draft.put("model.compute", word("bf16"), &[found]),
        (_, Some(found)) if is(Some(found), true) => draft.put("model.compute", word("f16"), &[found]),
        (Some(bf16), Some(f16)) if is(Some(bf16), false) && is(Some(f16), false) => {
            draft.put("model.compute", word("f32"), &[bf16, f16])
        }
        _ => {}
    }
}

/// `model.compute` from the name of a precision, unless a switch has set it.
pub fn put_compute_dtype(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found.filter(|_| !draft.has("model.compute")) else { return };
    let Some(text) = found.text() else { return };
    match choose(PRECISIONS, text.trim_start_matches("torch.")) {
        Some((_, ours, _)) => draft.put("model.compute", word(ours), &[&found]),
        None if text == "auto" => {}
        None => draft.leave_out(&found, format!("`{text}` is not supported; `model.compute` is `auto`")),
    }
}

/// `model.base` from the precision that weights are loaded in; f32 means as stored, because f32 holds every format.
pub fn put_dtype(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Some(text) = found.text() else { return };
    match choose(PRECISIONS, text.trim_start_matches("torch.")) {
        Some((_, "f32", _)) => {}
        Some((_, ours, _)) => draft.put("model.base", word(ours), &[&found]),
        None if text == "auto" => {}
        None => {
            draft.leave_out(&found, format!("`{text}` is not supported for weights; they stay as stored"))
        }
    }
}

/// `model.compute` and `model.base`; returns the setting that quantizes the weights.
pub fn put_weights<'a>(it: &Settings<'_, 'a>, draft: &mut Draft) -> Option<Found<'a>> {
    put_compute(draft, it.take(Means::Bf16).as_ref(), it.take(Means::F16).as_ref());
    put_dtype(draft, it.take(Means::Dtype));
    let bits = it.take(Means::Bits);
    let number = bits.as_ref().and_then(Found::number);
    if let (Some(found), Some(number)) = (&bits, number.filter(|bits| ![4.0, 8.0].contains(bits))) {
        found.mistake(format!("`{}` is {number}; only 4 and 8 bits are supported", found.key));
    }
    let of = |wanted: f64| bits.clone().filter(|_| number == Some(wanted));
    let four = it.take_on(Means::FourBits).or_else(|| of(4.0));
    let eight = it.take_on(Means::EightBits).or_else(|| of(8.0));
    put_quantization(it, draft, four.as_ref(), eight.as_ref());
    four.or(eight).or(bits)
}

/// `model.base` from switches of bitsandbytes.
pub fn put_quantization(
    it: &Settings<'_, '_>,
    draft: &mut Draft,
    four: Option<&Found<'_>>,
    eight: Option<&Found<'_>>,
) {
    let double = it.take(Means::DoubleQuant).and_then(|found| found.boolean());
    let code = it.take(Means::Code);
    match (four, eight) {
        (Some(four), Some(eight)) => eight.exclude(four),
        (Some(four), None) => {
            let base = if double.unwrap_or(it.table.double_quant) { "nf4" } else { "nf4-single" };
            if let Some(found) = code
                && let Some(code) = found.text().filter(|code| code != "nf4")
            {
                draft.leave_out(
                    &found,
                    format!(
                        "`{code}` checkpoints can be loaded, but weights are not quantized to it; `{base}` is \
                         used, so results will differ"
                    ),
                );
            }
            draft.put("model.base", word(base), &[four]);
        }
        (None, Some(eight)) => {
            draft.put("model.base", word("int8"), &[eight]);
            draft.assume("`int8` has one scale per row and, unlike LLM.int8(), no separate outlier columns; results differ slightly");
        }
        (None, None) => {}
    }
}

/// Everything about training: keys that take settings as they are, batch, length, optimizer, the tool's defaults,
/// saving and memory.
pub fn put_training(it: &Settings<'_, '_>, draft: &mut Draft) {
    put_alone(it, draft);
    if it.table.micro > 0 {
        put_batch(it, draft);
    }
    put_length(it, draft);
    put_schedule(it, draft);
    put_optimizer(draft, it.take(Means::Optimizer));
    put_betas(draft, it.take(Means::Beta1), it.take(Means::Beta2));
    put_beta_list(draft, it.take(Means::Betas));
    let is_whole = |found: &Found<'_>| !matches!(found.content, Content::Number(digits) if digits.parse::<f64>().is_ok_and(|steps| steps < 1.0));
    put_number(draft, "train.log_every", it.take(Means::LogSteps).filter(is_whole));
    put_presets(it, draft);
    put_packed(draft, it.take_on(Means::Packing));
    if let Saving::HuggingFace { save_default, eval_needs_strategy } = it.table.saving {
        put_saving(it, draft, save_default, eval_needs_strategy);
    }
    put_memory(it, draft);
}

/// The rows of the table whose meaning is complete.
pub fn put_alone(it: &Settings<'_, '_>, draft: &mut Draft) {
    for (means, names) in it.alone() {
        if let Means::Number(key) | Means::Text(key) = means
            && draft.is_given(key)
        {
            continue;
        }
        match means {
            Means::Number(key) => put_number(draft, key, it.fields.take_first(names)),
            Means::Text(key) => put_text(draft, key, it.fields.take_first(names)),
            Means::Left(why) => {
                for name in *names {
                    if let Some(found) = it.fields.take(name).filter(Found::is_on) {
                        draft.leave_out(&found, *why);
                    }
                }
            }
            _ => it.fields.skip(names),
        }
    }
}

/// The tool's defaults for keys that the file does not set.
pub fn put_presets(it: &Settings<'_, '_>, draft: &mut Draft) {
    for (key, preset) in it.table.presets {
        if draft.line(key).is_none() && !draft.is_given(key) && !it.sets(key) {
            draft.put_default(key, preset.value(), it.table.tool);
        }
    }
}

/// `train.batch`: micro-batch x accumulation on one device.
fn put_batch(it: &Settings<'_, '_>, draft: &mut Draft) {
    if draft.is_given("train.batch") {
        return;
    }
    let setting = |means| {
        let found = it.take(means).filter(|found| !found.is_auto())?;
        Some((found.count()?, found))
    };
    let (micro, accumulation) = (setting(Means::Micro), setting(Means::Accumulation));
    let from: Vec<&Found<'_>> = micro.iter().chain(&accumulation).map(|(_, found)| found).collect();
    let default = it.table.micro;
    if micro.is_none() {
        draft.assume(format!(
            "no micro-batch size is set; assuming {default} sample{} per device, the default of {}",
            if default == 1 { "" } else { "s" },
            it.table.tool
        ));
    }
    let count = |setting: &Option<(u64, Found<'_>)>| setting.as_ref().map(|(count, _)| *count);
    let (micro, accumulation) = (count(&micro).unwrap_or(default), count(&accumulation).unwrap_or(1));
    let batch = Value::Integer(micro.checked_mul(accumulation).map_or(i128::MAX, i128::from));
    if from.is_empty() {
        draft.put_default("train.batch", batch, it.table.tool);
    } else {
        draft.put_with("train.batch", batch, &from, &format!("{micro} x {accumulation} x 1"));
    }
    draft.assume(ONE_DEVICE);
}

/// `train.steps` if steps are set, else `train.epochs`.
fn put_length(it: &Settings<'_, '_>, draft: &mut Draft) {
    // `auto`: the trainer's arguments say.
    let given = |means| it.take(means).filter(|found| !found.is_auto());
    let steps = given(Means::Steps).and_then(|found| Some((found.number()?, found)));
    match (steps.filter(|(steps, _)| *steps > 0.0), given(Means::Epochs)) {
        (Some((steps, found)), epochs) => {
            put_whole(draft, "train.steps", steps, &[&found]);
            draft.leave_out_if_set(
                epochs,
                format!("`{}` (line {}) sets the length in steps", found.key, found.line),
            );
        }
        (None, Some(found)) => {
            if let Some(epochs) = found.number() {
                draft.put("train.epochs", Value::Float(epochs), &[&found]);
            }
        }
        (None, None) => {}
    }
}

/// Schedules, without what PyTorch's and MLX's functions add to the name: the nearest of smidgen's, and how it differs.
#[rustfmt::skip]
const SCHEDULES: &[Choice] = &[
    (&["linear", "warmupdecaylr"], "linear", ""),
    (&["cosine", "cosine_decay", "warmupcosinelr"], "cosine", ""),
    (&["constant", "constant_with_warmup", "warmuplr"], "constant", ""),
    (&["polynomial"], "linear", "decays linearly to 0 instead"),
    (&["cosine_with_min_lr", "cosine_with_restarts", "cosine_warmup_with_min_lr", "one_cycle", "rex"], "cosine",
        "decays to 0 along half a cosine instead"),
    (&["inverse_sqrt", "warmup_stable_decay", "reduce_lr_on_plateau"], "constant",
        "stays at `train.lr` after warm-up instead"),
];

/// `train.schedule` and `train.warmup`.
fn put_schedule(it: &Settings<'_, '_>, draft: &mut Draft) {
    let found = it.take(Means::Schedule).filter(|found| !found.is_auto());
    let name = found.as_ref().and_then(Found::text);
    if let (Some(found), Some(name)) = (&found, &name) {
        put_schedule_named(draft, found, name, if it.table.constant_warmup { "constant" } else { "linear" });
    }
    // Hugging Face's `constant` has no warm-up; `constant_with_warmup` has.
    let is_constant = name.is_some_and(|name| name.eq_ignore_ascii_case("constant"));
    put_warmup(it, draft, it.table.constant_warmup || !is_constant);
}

/// `train.schedule` from its name in any tool.
fn put_schedule_named(draft: &mut Draft, found: &Found<'_>, name: &str, other: &'static str) {
    let plain = name.rsplit('.').next().unwrap_or(name).to_lowercase();
    let plain = plain.trim_start_matches("get_").split("_schedule").next().unwrap_or_default();
    let ours = match choose(SCHEDULES, plain) {
        Some((_, ours, "")) => ours,
        Some((_, ours, why)) => {
            draft.leave_out(found, format!("`{name}` is not supported; the learning rate {why}"));
            ours
        }
        None => {
            draft.leave_out(found, format!("`{name}` is not supported; `{other}` is used"));
            other
        }
    };
    draft.put("train.schedule", word(ours), &[found]);
}

/// `train.warmup` from a number of steps, which takes precedence if it is above 0, or from a ratio.
fn put_warmup(it: &Settings<'_, '_>, draft: &mut Draft, counts: bool) {
    let numbered = |means| {
        let found = it.take(means).filter(|found| !found.is_auto())?;
        Some((found.number()?, found))
    };
    let (steps, ratio) = (numbered(Means::WarmupSteps), numbered(Means::WarmupRatio));
    if !counts {
        for (_, found) in steps.iter().chain(&ratio).filter(|(value, _)| *value > 0.0) {
            draft.leave_out(
                found,
                "a constant schedule has no warm-up in Hugging Face, so the recipe has none",
            );
        }
        return draft.put_default("train.warmup", Value::Integer(0), it.table.tool);
    }
    let given = match (steps, ratio) {
        (Some((value, found)), other) if value > 0.0 => {
            if let Some((_, other)) = other.filter(|(value, _)| *value > 0.0) {
                draft.leave_out(&other, format!("`{}` takes precedence", found.name()));
            }
            Some((value, found))
        }
        (steps, ratio) => ratio.or(steps),
    };
    // A fraction is a ratio under either name.
    if let Some((value, found)) = given {
        put_whole(draft, "train.warmup", value, &[&found]);
    }
}

/// The comment at paged optimizers.
const PLACED: &str = "the plan places the optimizer state";

/// Names of optimizers in lower case without `_` and `-`, and the comment at the line.
#[rustfmt::skip]
const OPTIMIZERS: &[Choice] = &[
    (&["adamw", "adam", "adamwtorch", "adamwtorchfused", "adamwhf", "adamwapexfused", "fusedadam", "deepspeedcpuadam",
       "adamwanyprecision", "adamwtorchxla", "adamwtorchnpufused"], "adamw", ""),
    (&["pagedadamw", "pagedadamw32bit"], "adamw", PLACED),
    (&["adamwbnb8bit", "adamw8bit", "adam8bit", "adamwtorch8bit"], "adamw-8bit", ""),
    (&["pagedadamw8bit"], "adamw-8bit", PLACED),
];

/// `train.optimizer` from a name, or from a component of that name.
pub fn put_optimizer(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Some(path) = found.text() else { return };
    let name = if found.name() == "_component_" { path.rsplit('.').next().unwrap_or(&path) } else { &path };
    match choose(OPTIMIZERS, &name.to_lowercase().replace(['_', '-'], "")) {
        Some((_, ours, remark)) => draft.put_with("train.optimizer", word(ours), &[&found], remark),
        None => draft.leave_out(
            &found,
            format!("`{name}` is not supported; AdamW is used and may need another `train.lr`"),
        ),
    }
}

/// `train.batch_tokens`, if samples are packed into rows of the maximum length: the tokens of all rows of a step.
pub fn put_packed(draft: &mut Draft, packing: Option<Found<'_>>) {
    let Some(packing) = packing else { return };
    let number = |key: &str| draft.line(key).and_then(|line| line.toml.parse::<u64>().ok());
    let Some(rows) = number("train.batch") else { return };
    let length = number("data.max_tokens").unwrap_or(DEFAULT_TOKENS);
    let tokens = Value::Integer(i128::from(rows) * i128::from(length));
    put_derived(draft, "train.batch_tokens", tokens, &packing, &format!("{rows} x {length} tokens"));
}

/// A key whose value is computed from `train.batch` and a setting; the line names the settings of both.
pub fn put_derived(draft: &mut Draft, key: &'static str, value: Value, from: &Found<'_>, remark: &str) {
    let batch = draft.line("train.batch").map(|line| line.source.clone());
    draft.put_with(key, value, &[from], remark);
    let line = draft.lines.iter_mut().find(|line| line.key == key);
    if let (Some(Source::Keys(keys)), Some(Source::Keys(more))) = (line.map(|line| &mut line.source), batch) {
        keys.extend(more);
    }
}

/// How often to save and evaluate, in steps or epochs.
fn put_saving(it: &Settings<'_, '_>, draft: &mut Draft, save_default: bool, eval_needs_strategy: bool) {
    let tool = it.table.tool;
    let default = save_default.then_some((SAVE_STEPS, tool));
    put_every(draft, "train.save_every", it.take(Means::SaveStrategy), it.take(Means::SaveSteps), default);
    let strategy = it.take(Means::EvalStrategy);
    // Without a strategy, Hugging Face's trainer never evaluates, even if a number of steps is set.
    if strategy.is_some() || !eval_needs_strategy {
        put_every(draft, "train.eval_every", strategy, it.take(Means::EvalSteps), None);
    } else {
        draft.leave_out_if_set(
            it.take(Means::EvalSteps),
            "no `eval_strategy` is set, so the trainer never evaluates",
        );
    }
    if draft.line("train.keep").is_none() {
        draft.assume(format!("3 checkpoints are kept; {tool} would keep all of them (`train.keep`)"));
    }
}

fn put_every(
    draft: &mut Draft,
    key: &'static str,
    strategy: Option<Found<'_>>,
    steps: Option<Found<'_>>,
    default: Option<(i128, &'static str)>,
) {
    let word = strategy.as_ref().map(|found| match found.content {
        // YAML reads `no` as a boolean.
        Content::Boolean(false) => "no".to_owned(),
        Content::Text(text) => text.clone(),
        other => other.describe(),
    });
    match (word.as_deref(), strategy, steps) {
        (Some("no"), Some(strategy), steps) => {
            draft.put(key, Value::Integer(0), &[&strategy]);
            let why = format!("`{}` (line {}) turns it off", strategy.key, strategy.line);
            draft.leave_out_if_set(steps, why);
        }
        (Some("epoch"), Some(strategy), _) => per_epoch_note(draft, key, &strategy, 1.0),
        (Some("steps") | None, _, Some(steps)) => {
            let Some(number) = steps.number() else { return };
            if number < 1.0 && number != 0.0 {
                let why = format!("a fraction of all steps; `{key}` takes a number of steps");
                return draft.leave_out(&steps, why);
            }
            put_whole(draft, key, number, &[&steps]);
        }
        (Some("steps") | None, _, None) => {
            if let Some((steps, tool)) = default {
                draft.put_default(key, Value::Integer(steps), tool);
            }
        }
        (Some(_), Some(strategy), _) => {
            draft.leave_out(&strategy, format!("not supported; `{key}` takes a number of steps"));
        }
        (Some(_), None, _) => unreachable!("the word comes from the setting"),
    }
}

/// `[memory]`: budgets, what is offloaded, and where it runs.
pub fn put_memory(it: &Settings<'_, '_>, draft: &mut Draft) {
    put_max_memory(draft, it.take(Means::MaxMemory));
    let is_cpu = |found: &Found<'_>| match found.content {
        Content::Text(device) => device == "cpu" || device.eq_ignore_ascii_case("true"),
        Content::Number(_) => false,
        _ => found.boolean() == Some(true),
    };
    if let Some(found) = it.take(Means::OnCpu).filter(is_cpu) {
        draft.put("memory.device", word("cpu"), &[&found]);
    }
    if let Some(found) = it.take(Means::HostActivations).filter(Found::is_on) {
        draft.put_with("memory.activations", word("host"), &[&found], PINNED);
    }
}
