//! Limits of a chat template: how much memory it may use, how deep values may nest, how long it may run.
//!
//! A template is downloaded with a model, so it is not trusted. The engine counts instructions, but one
//! instruction can double a string. Therefore every value that a template creates or reads through is first
//! charged to a byte allowance (`template_rewrite.rs` inserts the calls), and rendering fails when the
//! allowance is used up.
//! Left out: the allowance (`template_allowance.rs`), and limits on the source (`template_rewrite.rs`).

use minijinja::value::{Kwargs, Rest, StringInput, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions};

use super::python_operators::{call_python_method, format_arguments, keep_safe, printed};
use super::template_allowance::{
    ELEMENT_BYTES, FACTORS, FUEL, charge, charge_joined, charge_replaced, check_format, note_work, own_bytes,
    refused, weigh, weigh_at,
};

/// Nested loops, macros and calls; a macro counts five times.
const MOST_RECURSION: usize = 200;
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
    environment.add_function(BRIEF, |value: Value| {
        let is_long = own_bytes(&value) > MOST_ARGUMENT_BYTES;
        if is_long { Err(refused("an argument of a filter is too long")) } else { Ok(value) }
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

fn join(
    state: &mut State<'_, '_>,
    values: &Value,
    between: Option<StringInput<'_>>,
    attribute: Option<&str>,
    more: Kwargs,
) -> Result<Value, Error> {
    charge_joined(values, between.as_ref().map_or("", StringInput::as_str))?;
    if attribute.is_some() || !values.try_iter()?.any(|value| value.is_number()) {
        return filters::join(state, values, between, attribute, more);
    }
    // The engine prints floats in another way.
    let text = |value: Value| if value.is_number() { printed(&value) } else { Ok(value) };
    let texts = values.try_iter()?.map(text).collect::<Result<Value, _>>()?;
    filters::join(state, &texts, between, attribute, more)
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
