//! Limits of a chat template: how much memory it may use, how deep values may nest, how long it may run.
//!
//! A template is downloaded with a model, so it is not trusted. The engine counts instructions, but one
//! instruction can double a string. Therefore every value that a template creates or reads through is first
//! charged to a byte allowance (`template_rewrite.rs` inserts the calls), and rendering fails when the
//! allowance is used up.
//! The allowance is a thread-local variable, because a rendering stays on one thread.
//! Left out: limits on the source of a template, which are in `template_rewrite.rs`.

use std::cell::{Cell, RefCell};

use minijinja::value::{Kwargs, Rest, StringInput, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};
use serde_json::Value as Json;

use super::python_operators::{call_python_method, format_arguments, keep_safe, printed};

/// Instructions per rendering; a conversation of a thousand messages needs some hundred thousand.
const FUEL: u64 = 5_000_000;
/// Nested loops, macros and calls; a macro counts five times.
const MOST_RECURSION: usize = 200;
/// Nested lists and maps.
const MOST_DEPTH: usize = 64;
/// The charge for a value in a list.
const ELEMENT_BYTES: usize = 32;
/// The allowance of a rendering is this plus a multiple of its input.
const ALLOWANCE_BYTES: usize = 96 << 20;
const ALLOWANCE_PER_INPUT_BYTE: usize = 256;
/// Instructions that any rendering may take, and those that its input explains. Charged bytes count as instructions.
const WORK: u64 = 300_000;
const WORK_PER_INPUT_BYTE: u64 = 16;
const BYTES_PER_INSTRUCTION: u64 = 32;
const MOST_INDENT: usize = 200;
/// Size of an argument that a filter uses for every element.
const MOST_ARGUMENT_BYTES: usize = 4096;

/// Names of the functions that the rewritten template calls. A template cannot contain them, because of the
/// `!`.
pub(super) const CHARGE: &str = "charge!";
pub(super) const EACH: &str = "each!";
pub(super) const WEIGH: &str = "weigh!";
pub(super) const KEEP: &str = "keep!";
pub(super) const BRIEF: &str = "brief!";
pub(super) const FACTOR: &str = "factor!";
pub(super) const TIMES: &str = "times!";
pub(super) const SPENT: &str = "spent!";

thread_local! {
    static LEFT_BYTES: Cell<usize> = const { Cell::new(ALLOWANCE_BYTES) };
    /// The allowance of this rendering, and the instructions it took, as far as they were noted.
    static ALLOWED_BYTES: Cell<usize> = const { Cell::new(0) };
    static SPENT_FUEL: Cell<u64> = const { Cell::new(0) };
    /// Left operands of multiplications whose right operand is being evaluated.
    static FACTORS: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
}

/// Resets the allowance of this thread for a new rendering.
pub(super) fn begin_rendering(input_bytes: usize) {
    let allowed = input_bytes.saturating_mul(ALLOWANCE_PER_INPUT_BYTE).saturating_add(ALLOWANCE_BYTES);
    LEFT_BYTES.set(allowed);
    ALLOWED_BYTES.set(allowed);
    SPENT_FUEL.set(0);
    FACTORS.take();
}

/// Notes the instructions that the rendering took up to here.
pub(super) fn note_work(state: &State<'_, '_>) {
    SPENT_FUEL.set(state.fuel_levels().map_or(0, |(spent, _)| spent));
}

/// What the rendering that just ended did beyond what its input explains.
pub(super) fn work_beyond(input_bytes: usize, is_out_of_fuel: bool) -> u64 {
    let charged = ALLOWED_BYTES.get().saturating_sub(LEFT_BYTES.get()) as u64;
    let instructions = if is_out_of_fuel { FUEL } else { SPENT_FUEL.get() };
    let work = instructions + charged / BYTES_PER_INSTRUCTION;
    work.saturating_sub(WORK + WORK_PER_INPUT_BYTE * input_bytes as u64)
}

/// The charged size of an input.
pub(super) fn json_bytes(json: &Json) -> usize {
    match json {
        Json::String(text) => text.len(),
        Json::Array(items) => items.iter().map(json_bytes).sum::<usize>() + ELEMENT_BYTES * items.len(),
        Json::Object(fields) => fields.iter().map(|(name, value)| name.len() + json_bytes(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => ELEMENT_BYTES,
    }
}

/// Subtracts bytes from the allowance, or fails if too few are left.
pub(super) fn charge(bytes: usize) -> Result<(), Error> {
    match LEFT_BYTES.get().checked_sub(bytes) {
        Some(left) => {
            LEFT_BYTES.set(left);
            Ok(())
        }
        None => Err(refused("it produces too much text and may be malicious")),
    }
}

pub(super) fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.to_owned())
}

/// The charge for a value without the values in it.
pub(super) fn own_bytes(value: &Value) -> usize {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => text.len(),
        (None, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) => {
            value.len().unwrap_or(1).saturating_mul(ELEMENT_BYTES)
        }
        _ => ELEMENT_BYTES,
    }
}

/// Charges a value with everything in it. Refuses a value that nests too deeply, such as one that contains
/// itself.
pub(super) fn weigh(value: &Value) -> Result<(), Error> {
    weigh_at(value, 0, false)
}

fn weigh_at(value: &Value, depth: usize, is_kept: bool) -> Result<(), Error> {
    charge(own_bytes(value).max(ELEMENT_BYTES))?;
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth == MOST_DEPTH {
        return Err(refused("its values are nested too deeply"));
    }
    if is_kept && value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace")) {
        return Err(refused("a namespace cannot be inside another value"));
    }
    for item in value.try_iter()? {
        weigh_at(&item, depth + 1, is_kept)?;
        if kind == ValueKind::Map {
            weigh_at(&value.get_item(&item)?, depth + 1, is_kept)?;
        }
    }
    Ok(())
}

/// Adds the limits to the environment of a template.
pub(super) fn add_limits(environment: &mut Environment<'static>) {
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MOST_RECURSION);
    // These are not in Jinja. They can nest values without being charged, or show internals of the engine.
    ["chain", "zip", "pprint"].iter().for_each(|name| environment.remove_filter(name));
    environment.remove_global("debug");
    environment.add_function(CHARGE, |value: Value| charge(own_bytes(&value)).map(|()| value));
    environment.add_function(EACH, |state: &State<'_, '_>, value: Value| {
        note_work(state);
        // Iterating over a text makes a value of each character.
        let factor = if value.as_str().is_some() { ELEMENT_BYTES } else { 1 };
        charge(own_bytes(&value).saturating_mul(factor)).map(|()| value)
    });
    environment.add_function(WEIGH, |value: Value| weigh(&value).map(|()| value));
    environment.add_function(KEEP, keep);
    environment.add_function(BRIEF, |value: Value| match own_bytes(&value) > MOST_ARGUMENT_BYTES {
        true => Err(refused("an argument of a filter is too long")),
        false => Ok(value),
    });
    environment.add_function(FACTOR, |value: Value| {
        FACTORS.with_borrow_mut(|factors| factors.push(value.clone()));
        value
    });
    environment.add_function(TIMES, times);
    environment.add_function(SPENT, |state: &State<'_, '_>, nothing: Value| {
        note_work(state);
        nothing
    });
    environment.add_function("dict", |value: Option<Value>, more: Kwargs| {
        let made = functions::dict(value, more)?;
        weigh_at(&made, 0, true).map(|()| made)
    });
    environment.add_function("namespace", |defaults: Option<ValueOrKwargs>| {
        let defaults = defaults.map(ValueOrKwargs::into_value);
        if let Some(defaults) = &defaults {
            weigh_at(defaults, 0, true)?;
        }
        functions::namespace(defaults.map(ValueOrKwargs::from))
    });
    environment.add_filter("join", join);
    environment.add_filter("indent", indent);
    environment.add_filter("batch", batch);
    environment.add_filter("slice", slice);
    environment.add_filter("sum", sum);
    environment.add_filter("format", format);
    environment.set_unknown_method_callback(call_method);
}

/// Checks a value that outlives its statement: it must not nest too deeply or contain a namespace. Iterators
/// become lists.
fn keep(value: Value) -> Result<Value, Error> {
    weigh_at(&value, 0, true)?;
    match value.kind() {
        ValueKind::Iterable => Ok(value.try_iter()?.collect::<Value>()),
        _ => Ok(value),
    }
}

/// Charges the product of the right operand and the left one, which `FACTOR` stored.
fn times(right: Value) -> Result<Value, Error> {
    let left = FACTORS.with_borrow_mut(Vec::pop).unwrap_or_default();
    for (many, number) in [(&left, &right), (&right, &left)] {
        if let (false, Some(count)) = (many.is_number(), number.as_usize()) {
            charge(own_bytes(many).saturating_mul(count))?;
        }
    }
    Ok(right)
}

/// Charges the text after a replacement.
pub(super) fn charge_replaced(text: &str, from: &str, to: &str) -> Result<(), Error> {
    charge(text.len().saturating_add(text.matches(from).count().saturating_mul(to.len())))
}

/// Charges all elements and the text between them.
fn charge_joined(values: &Value, between: &str) -> Result<(), Error> {
    weigh(values)?;
    let count = values.try_iter()?.count();
    charge(count.saturating_mul(between.len()))
}

fn join(
    state: &mut State<'_, '_>,
    values: &Value,
    between: Option<StringInput<'_>>,
    attribute: Option<&str>,
    more: Kwargs,
) -> Result<Value, Error> {
    charge_joined(values, between.as_ref().map_or("", StringInput::as_str))?;
    let has_number = |values: &Value| Ok::<_, Error>(values.try_iter()?.any(|value| value.is_number()));
    match attribute.is_none() && has_number(values)? {
        // The engine prints floats in another way.
        true => {
            let texts = values
                .try_iter()?
                .map(|value| if value.is_number() { printed(&value) } else { Ok(value) })
                .collect::<Result<Value, _>>()?;
            filters::join(state, &texts, between, attribute, more)
        }
        false => filters::join(state, values, between, attribute, more),
    }
}

fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    more: Kwargs,
) -> Result<Value, Error> {
    let width_used = width.or(more.get("width")?).unwrap_or(4);
    if width_used > MOST_INDENT {
        return Err(refused("the width of an indentation is above 200"));
    }
    charge(text.as_str().len() + (1 + text.as_str().matches('\n').count()) * width_used)?;
    filters::indent(text, width, first, blank, more)
}

fn batch(state: &State<'_, '_>, values: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    charge(count.saturating_mul(ELEMENT_BYTES))?;
    filters::batch(state, values, count, fill)
}

fn slice(state: &State<'_, '_>, values: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    charge(count.saturating_mul(2 * ELEMENT_BYTES))?;
    filters::slice(state, values, count, fill)
}

fn sum(
    state: &State<'_, '_>,
    values: Value,
    attribute: Option<&str>,
    start: Option<Value>,
    more: Kwargs,
) -> Result<Value, Error> {
    // A sum of texts or lists copies everything before each element.
    let is_large = |value: &Value| !value.is_number();
    let count = values.try_iter()?.filter(is_large).count();
    charge(count.saturating_mul(own_bytes(&values)).saturating_mul(count))?;
    filters::sum(state, values, attribute, start, more)
}

/// Refuses formats with widths that would fill the memory with spaces.
pub(super) fn check_format(text: &str, arguments: &[Value]) -> Result<(), Error> {
    let digits = text.as_bytes().windows(4).any(|window| window.iter().all(u8::is_ascii_digit));
    let mut open = 0;
    let nested = text.chars().any(|sign| {
        open = match sign {
            '{' => open + 1,
            '}' => 0,
            _ => open,
        };
        open > 1 && !text.contains("{{")
    });
    if digits || nested || text.contains('*') {
        return Err(refused("a format has a width that is too large or not constant"));
    }
    let fields = text.matches(['{', '%']).count();
    for argument in arguments {
        weigh(argument)?;
        charge(fields.saturating_mul(own_bytes(argument).saturating_add(1000)))?;
    }
    charge(text.len())
}

fn format(state: &mut State<'_, '_>, text: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    check_format(text.as_str().unwrap_or_default(), &arguments)?;
    let arguments = format_arguments(text.as_str().unwrap_or_default(), &arguments)?;
    filters::format(state, text, Rest(arguments.into_iter().map(ValueOrKwargs::from).collect()))
}

/// Python's methods of strings, maps and lists.
fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (name, value.as_str(), arguments) {
        ("replace", Some(text), [from, to, ..]) => {
            charge_replaced(text, from.as_str().unwrap_or_default(), to.as_str().unwrap_or_default())?;
        }
        ("join", Some(text), [values]) => charge_joined(values, text)?,
        ("format", Some(text), _) => check_format(text, arguments)?,
        ("count", None, [_]) => weigh(value)?,
        // Reading a field does not copy the map.
        ("get", None, _) => {}
        _ => charge(own_bytes(value).saturating_mul(2))?,
    }
    arguments.iter().try_for_each(|argument| charge(own_bytes(argument)))?;
    if let Some(result) = call_python_method(value, name, arguments) {
        return result;
    }
    let shown;
    let arguments = match name {
        "format" => {
            shown = format_arguments(value.as_str().unwrap_or_default(), arguments)?;
            &shown
        }
        _ => arguments,
    };
    let result = minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?;
    Ok(keep_safe(value, name, result))
}
