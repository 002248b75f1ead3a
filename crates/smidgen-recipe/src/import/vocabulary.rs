//! Settings that several tools share: models, files, precisions, optimizers, schedules, lengths.
//!
//! Most of them are Hugging Face's, which the other trainers build on. Each function takes the settings of a file for
//! one subject and writes the lines of the recipe for it, or notes why there are none.
//! The caller knows how its tool names these settings, and its defaults.

use super::document::Content;
use super::draft::{Draft, Source};
use super::families::judge_family;
use super::fields::Found;
use crate::value::Value;
use crate::{ClosedWord, HfName, LossOn, Schedule};

/// The recipe's default of `data.max_tokens`.
const DEFAULT_TOKENS: u64 = 1024;

/// `model.path` from a name on the hub or a folder.
pub fn put_model(draft: &mut Draft, name: Option<Found<'_>>, revision: Option<Found<'_>>) {
    let Some(name) = name else { return };
    let Some(text) = name.text() else { return };
    judge_family(draft, &name, &text);
    let is_path = text.starts_with(['/', '.', '~']) || text.ends_with(".gguf") || draft.places.exists(&text);
    if is_path || HfName::parse(&text).is_none() {
        return draft.put("model.path", Value::Text(text), &[&name]);
    }
    let revision = revision.and_then(|found| Some((found.text()?, found)));
    match revision.filter(|(revision, _)| revision != "main") {
        Some((revision, found)) => {
            draft.put("model.path", Value::Text(format!("hf:{text}@{revision}")), &[&name, &found])
        }
        None => draft.put("model.path", Value::Text(format!("hf:{text}")), &[&name]),
    }
}

/// `model.compute` from two switches.
pub fn put_compute<'f, 'a>(draft: &mut Draft, bf16: Option<&'f Found<'a>>, f16: Option<&'f Found<'a>>) {
    let switch = |found: Option<&'f Found<'a>>| found.and_then(|found| Some((found.boolean()?, found)));
    match (switch(bf16), switch(f16)) {
        (Some((true, bf16)), Some((true, f16))) => f16.exclude(bf16),
        (Some((true, found)), _) => draft.put("model.compute", word("bf16"), &[found]),
        (_, Some((true, found))) => draft.put("model.compute", word("f16"), &[found]),
        (Some((false, bf16)), Some((false, f16))) => draft.put("model.compute", word("f32"), &[bf16, f16]),
        _ => {}
    }
}

/// `model.compute` from the name of a precision, unless a switch has set it.
pub fn put_compute_dtype(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found.filter(|_| !draft.has("model.compute")) else { return };
    let Some(text) = found.text() else { return };
    match text.trim_start_matches("torch.") {
        "bfloat16" | "bf16" => draft.put("model.compute", word("bf16"), &[&found]),
        "float16" | "fp16" | "half" => draft.put("model.compute", word("f16"), &[&found]),
        "float32" | "fp32" | "float" => draft.put("model.compute", word("f32"), &[&found]),
        "auto" => {}
        other => draft.leave_out(&found, format!("`{other}` is not supported; `model.compute` is `auto`")),
    }
}

/// `model.base` from the precision that weights are loaded in; f32 means as stored, because f32 holds every format.
pub fn put_dtype(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Some(text) = found.text() else { return };
    match text.trim_start_matches("torch.") {
        "bfloat16" | "bf16" => draft.put("model.base", word("bf16"), &[&found]),
        "float16" | "fp16" | "half" => draft.put("model.base", word("f16"), &[&found]),
        "auto" | "float32" | "fp32" | "float" => {}
        other => {
            draft.leave_out(&found, format!("`{other}` is not supported for weights; they stay as stored"))
        }
    }
}

/// How weights are quantized while they load.
pub struct Quantization<'f, 'a> {
    pub four_bits: Option<&'f Found<'a>>,
    pub eight_bits: Option<&'f Found<'a>>,
    /// `nf4` or `fp4`.
    pub code: Option<Found<'a>>,
    pub double: bool,
}

/// `model.base` from switches of bitsandbytes.
pub fn put_quantization(draft: &mut Draft, quantization: Quantization<'_, '_>) {
    let Quantization { four_bits, eight_bits, code, double } = quantization;
    match (four_bits, eight_bits) {
        (Some(four), Some(eight)) => eight.exclude(four),
        (Some(four), None) => {
            let base = if double { "nf4" } else { "nf4-single" };
            let code = code.and_then(|found| Some((found.text()?, found)));
            if let Some((code, found)) = code.filter(|(code, _)| code != "nf4") {
                let why = format!(
                    "`{code}` checkpoints can be loaded, but weights are not quantized to it; `{base}` is used, so \
                     results will differ"
                );
                draft.leave_out(&found, why);
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

/// The comment at paged optimizers.
const PLACED: &str = "the plan places the optimizer state";

/// `train.optimizer` from a name.
pub fn put_optimizer(draft: &mut Draft, found: Option<Found<'_>>) {
    if let Some(found) = found
        && let Some(name) = found.text()
    {
        put_optimizer_named(draft, &found, &name);
    }
}

/// `train.optimizer` from the name that a setting stands for.
pub fn put_optimizer_named(draft: &mut Draft, found: &Found<'_>, name: &str) {
    let plain = name.to_lowercase().replace('-', "_");
    match plain.as_str() {
        "adamw"
        | "adam"
        | "adamw_torch"
        | "adamw_torch_fused"
        | "adamw_hf"
        | "adamw_apex_fused"
        | "fusedadam"
        | "deepspeedcpuadam"
        | "adamw_anyprecision"
        | "adamw_torch_xla"
        | "adamw_torch_npu_fused" => draft.put("train.optimizer", word("adamw"), &[found]),
        "paged_adamw" | "paged_adamw_32bit" | "pagedadamw" | "pagedadamw32bit" => {
            draft.put_with("train.optimizer", word("adamw"), &[found], PLACED)
        }
        "adamw_bnb_8bit" | "adamw_8bit" | "adamw8bit" | "adam8bit" | "adamw_torch_8bit" => {
            draft.put("train.optimizer", word("adamw-8bit"), &[found])
        }
        "paged_adamw_8bit" | "pagedadamw8bit" => {
            draft.put_with("train.optimizer", word("adamw-8bit"), &[found], PLACED)
        }
        _ => draft.leave_out(
            found,
            format!("`{name}` is not supported; AdamW is used and may need another `train.lr`"),
        ),
    }
}

/// `train.schedule` from Hugging Face's name for it. Returns whether warm-up applies.
pub fn put_schedule(
    draft: &mut Draft,
    found: Option<Found<'_>>,
    default: Schedule,
    tool: &'static str,
) -> bool {
    let Some(found) = found.filter(|found| !found.is_auto()) else {
        draft.put_default("train.schedule", word(default.word()), tool);
        return true;
    };
    let Some(name) = found.text() else { return true };
    let (schedule, why) = match name.to_lowercase().as_str() {
        "linear" => (Schedule::Linear, None),
        "cosine" => (Schedule::Cosine, None),
        "constant" | "constant_with_warmup" => (Schedule::Constant, None),
        "polynomial" => (Schedule::Linear, Some("decays linearly to 0 instead")),
        "cosine_with_min_lr" | "cosine_with_restarts" | "cosine_warmup_with_min_lr" | "one_cycle" | "rex" => {
            (Schedule::Cosine, Some("decays to 0 along half a cosine instead"))
        }
        "inverse_sqrt" | "warmup_stable_decay" | "reduce_lr_on_plateau" => {
            (Schedule::Constant, Some("stays at `train.lr` after warm-up instead"))
        }
        _ => {
            draft.leave_out(&found, format!("`{name}` is not supported; `linear` is used"));
            (Schedule::Linear, None)
        }
    };
    if let Some(why) = why {
        draft.leave_out(&found, format!("`{name}` is not supported; the learning rate {why}"));
    }
    draft.put("train.schedule", word(schedule.word()), &[&found]);
    // Hugging Face's `constant` has no warm-up; `constant_with_warmup` has.
    !name.eq_ignore_ascii_case("constant")
}

/// `train.warmup` from a number of steps, which takes precedence if it is above 0, or from a ratio.
pub fn put_warmup(
    draft: &mut Draft,
    steps: Option<Found<'_>>,
    ratio: Option<Found<'_>>,
    counts: bool,
    default: (f64, &'static str),
) {
    let (steps, ratio) = (numbered(steps), numbered(ratio));
    if !counts {
        for (_, found) in steps.iter().chain(&ratio).filter(|(value, _)| *value > 0.0) {
            draft.leave_out(
                found,
                "a constant schedule has no warm-up in Hugging Face, so the recipe has none",
            );
        }
        return draft.put_default("train.warmup", Value::Integer(0), default.1);
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
    match given {
        // A fraction is a ratio under either name.
        Some((value, found)) if value > 0.0 && value < 1.0 => {
            draft.put("train.warmup", Value::Float(value), &[&found])
        }
        Some((value, found)) if value.fract() == 0.0 => {
            draft.put("train.warmup", Value::Integer(value as i128), &[&found])
        }
        Some((value, found)) => draft.put("train.warmup", Value::Float(value), &[&found]),
        None => draft.put_default("train.warmup", Value::Float(default.0), default.1),
    }
}

/// A setting with its number, unless it is `auto`.
fn numbered<'a>(found: Option<Found<'a>>) -> Option<(f64, Found<'a>)> {
    let found = found.filter(|found| !found.is_auto())?;
    Some((found.number()?, found))
}

/// `train.steps` if steps are set, else `train.epochs`.
pub fn put_length(
    draft: &mut Draft,
    steps: Option<Found<'_>>,
    epochs: Option<Found<'_>>,
    default: (f64, &'static str),
) {
    let steps = steps.and_then(|found| Some((found.number()?, found))).filter(|(steps, _)| *steps > 0.0);
    match (steps, epochs) {
        (Some((steps, found)), epochs) => {
            put_whole(draft, "train.steps", steps, &[&found]);
            if let Some(epochs) = epochs {
                draft.leave_out(
                    &epochs,
                    format!("`{}` (line {}) sets the length in steps", found.key, found.line),
                );
            }
        }
        (None, Some(found)) => {
            if let Some(epochs) = found.number() {
                draft.put("train.epochs", Value::Float(epochs), &[&found]);
            }
        }
        (None, None) => draft.put_default("train.epochs", Value::Float(default.0), default.1),
    }
}

/// The samples of one optimizer step.
pub struct StepSize<'f, 'a> {
    /// Samples per micro-batch and device.
    pub micro: Option<&'f Found<'a>>,
    pub default_micro: u64,
    pub accumulation: Option<&'f Found<'a>>,
    pub tool: &'static str,
}

/// For files that do not say how many devices they run on.
pub const ONE_DEVICE: &str =
    "the number of devices is not set; assuming 1, so that `train.batch` is micro-batch x accumulation";

/// `train.batch`: micro-batch x accumulation on one device.
pub fn put_batch(draft: &mut Draft, size: &StepSize<'_, '_>) {
    let count = |found: Option<&Found<'_>>| found.filter(|found| !found.is_auto())?.count();
    let (micro, accumulation) = (count(size.micro), count(size.accumulation));
    let from: Vec<&Found<'_>> =
        micro.and(size.micro).into_iter().chain(accumulation.and(size.accumulation)).collect();
    if micro.is_none() {
        draft.assume(format!(
            "no micro-batch size is set; assuming {} sample{} per device, the default of {}",
            size.default_micro,
            if size.default_micro == 1 { "" } else { "s" },
            size.tool
        ));
    }
    let (micro, accumulation) = (micro.unwrap_or(size.default_micro), accumulation.unwrap_or(1));
    let batch = Value::Integer(micro.checked_mul(accumulation).map_or(i128::MAX, i128::from));
    match from.is_empty() {
        true => draft.put_default("train.batch", batch, size.tool),
        false => draft.put_with("train.batch", batch, &from, &format!("{micro} x {accumulation} x 1")),
    }
    draft.assume(ONE_DEVICE);
}

/// `train.batch_tokens`, if samples are packed into rows of the maximum length: the tokens of all rows of a step.
pub fn put_packed(draft: &mut Draft, packing: Option<Found<'_>>) {
    let Some(packing) = packing else { return };
    let number = |key: &str| draft.line(key).and_then(|line| line.toml.parse::<u64>().ok());
    let Some(rows) = number("train.batch") else { return };
    let length = number("data.max_tokens").unwrap_or(DEFAULT_TOKENS);
    let tokens = Value::Integer(i128::from(rows) * i128::from(length));
    let remark = format!("{rows} x {length} tokens");
    put_derived(draft, "train.batch_tokens", tokens, &packing, &remark);
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

/// Writes a whole number without a decimal point, and any other number as it is.
pub fn put_whole(draft: &mut Draft, key: &'static str, value: f64, from: &[&Found<'_>]) {
    let value = match value.fract() == 0.0 && value.abs() < 1e15 {
        true => Value::Integer(value as i128),
        false => Value::Float(value),
    };
    draft.put(key, value, from);
}

/// Notes a number of evaluations or checkpoints per epoch, with the steps that it means.
pub fn leave_per_epoch(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>, times: f64) {
    let Some(found) = found else { return };
    if times <= 0.0 {
        return draft.put(key, Value::Integer(0), &[&found]);
    }
    let number = |key: &str| draft.line(key).and_then(|line| line.toml.parse::<f64>().ok());
    let (unit, per_step) = match (number("train.batch_tokens"), number("train.batch")) {
        (Some(tokens), _) => ("tokens of the data", tokens),
        (None, Some(rows)) => ("rows of the data", rows),
        (None, None) => return draft.leave_out(&found, format!("`{key}` counts steps, not epochs")),
    };
    let per_interval = per_step * times;
    let example = 1_000_000.0 / per_interval;
    let example = if example >= 1.0 { format!(": {} for a million", example.floor()) } else { String::new() };
    draft.leave_out(
        &found,
        format!("`{key}` counts steps, not epochs; write the {unit} / {per_interval}{example}"),
    );
}

/// A number, unless it is `auto`.
pub fn put_number(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>) {
    let Some(found) = found.filter(|found| !found.is_auto()) else { return };
    if let Some(number) = found.number() {
        put_whole(draft, key, number, &[&found]);
    }
}

/// The same, or the tool's default if the file does not have the setting.
pub fn put_number_or(
    draft: &mut Draft,
    key: &'static str,
    found: Option<Found<'_>>,
    default: Value,
    tool: &'static str,
) {
    match found {
        Some(_) => put_number(draft, key, found),
        None => draft.put_default(key, default, tool),
    }
}

/// A text, such as a path.
pub fn put_text(draft: &mut Draft, key: &'static str, found: Option<Found<'_>>) {
    if let Some(found) = found
        && let Some(text) = found.text()
    {
        draft.put(key, Value::Text(text), &[&found]);
    }
}

/// `memory.budget` and `memory.host_budget` from the sizes by device of accelerate's `max_memory`, or from one size.
pub fn put_max_memory(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let Content::Map(sizes) = found.content else {
        return put_size(draft, "memory.budget", &found, "");
    };
    let mut devices: Vec<(f64, Found<'_>)> = Vec::new();
    for entry in sizes {
        let inside = found.inside(format!("{}.{}", found.key, entry.name), entry.line, &entry.value.content);
        match entry.name.as_str() {
            "cpu" => put_size(draft, "memory.host_budget", &inside, ""),
            "disk" => draft.leave_out(&inside, "a disk has no budget"),
            _ => devices.push((size_bytes(&inside).unwrap_or(f64::MAX), inside)),
        }
    }
    let count = devices.len();
    // Every rank has one device, and one budget serves all.
    if let Some((_, least)) = devices.into_iter().min_by(|(one, _), (other, _)| one.total_cmp(other)) {
        let remark = if count > 1 { format!("the least of {count} devices") } else { String::new() };
        put_size(draft, "memory.budget", &least, &remark);
    }
}

/// A size as accelerate writes it: a text with a unit, or a number of bytes.
fn put_size(draft: &mut Draft, key: &'static str, found: &Found<'_>, remark: &str) {
    let text = match found.content {
        Content::Number(bytes) => format!("{bytes}B"),
        _ => match found.text() {
            Some(text) => text.trim().to_owned(),
            None => return,
        },
    };
    draft.put_with(key, Value::Text(text), &[found], remark);
}

/// The bytes of a size, for comparing sizes.
fn size_bytes(found: &Found<'_>) -> Option<f64> {
    let (Content::Text(text) | Content::Number(text)) = found.content else { return None };
    let end = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let factor = match text[end..].trim().to_uppercase().as_str() {
        "GB" => 1e9,
        "GIB" | "G" => 1_073_741_824.0,
        "MB" => 1e6,
        "MIB" | "M" => 1_048_576.0,
        "KB" => 1e3,
        "KIB" | "K" => 1024.0,
        _ => 1.0,
    };
    Some(text[..end].trim().parse::<f64>().ok()? * factor)
}

/// `train.betas` from a list of two numbers.
pub fn put_beta_list(draft: &mut Draft, found: Option<Found<'_>>) {
    if let Some(found) = found
        && let Some([first, second]) = found.items()
    {
        let part = |content| Some(found.inside(found.key.clone(), found.line, content));
        put_betas(draft, part(&first.content), part(&second.content));
    }
}

/// `train.betas` from two numbers.
pub fn put_betas(draft: &mut Draft, first: Option<Found<'_>>, second: Option<Found<'_>>) {
    let number = |found: &Option<Found<'_>>, default: f64| match found {
        Some(found) => found.number(),
        None => Some(default),
    };
    let (Some(one), Some(two)) = (number(&first, 0.9), number(&second, 0.999)) else { return };
    let from: Vec<&Found<'_>> = first.iter().chain(&second).collect();
    if !from.is_empty() {
        draft.put("train.betas", Value::List(vec![Value::Float(one), Value::Float(two)]), &from);
    }
}

/// `data.loss_on`.
pub fn put_loss_on(draft: &mut Draft, loss_on: LossOn, from: &[&Found<'_>]) {
    draft.put("data.loss_on", word(loss_on.word()), from);
}

/// `adapter.layers` from one layer number or a list of them.
pub fn put_layers(draft: &mut Draft, found: Option<Found<'_>>) {
    let Some(found) = found else { return };
    let number = |content: &Content| match content {
        Content::Number(digits) => digits.parse().ok().map(Value::Integer),
        _ => None,
    };
    let layers = match found.content {
        Content::List(items) => items.iter().map(|item| number(&item.content)).collect(),
        content => number(content).map(|layer| vec![layer]),
    };
    match layers {
        Some(layers) => draft.put("adapter.layers", Value::List(layers), &[&found]),
        None => found.mistake(format!("`{}` must be a list of layer numbers", found.key)),
    }
}

pub fn word(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub fn word_list<T: AsRef<str>>(words: &[T]) -> Value {
    Value::List(words.iter().map(|text| word(text.as_ref())).collect())
}
