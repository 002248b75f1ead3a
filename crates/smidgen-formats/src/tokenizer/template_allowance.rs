//! The allowance of a rendering: the bytes that a template may still make, and the instructions it took.
//!
//! One instruction of the engine can double a string, so every value that a template creates or reads through is charged
//! before it is made. The allowance is a thread-local variable, because a rendering stays on one thread.
//! Left out: which functions and filters charge what, which is in `template_limits.rs` and `python_operators.rs`.

use std::cell::{Cell, RefCell};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Value as Json;

/// Instructions per rendering; a conversation of a thousand messages needs some hundred thousand.
pub(super) const FUEL: u64 = 5_000_000;
/// Nested lists and maps.
const MOST_DEPTH: usize = 64;
/// The charge for a value in a list.
pub(super) const ELEMENT_BYTES: usize = 32;
/// The allowance of a rendering is this plus a multiple of its input.
const ALLOWANCE_BYTES: usize = 96 << 20;
const ALLOWANCE_PER_INPUT_BYTE: usize = 256;
/// Instructions that any rendering may take, and those that its input explains. Charged bytes count as instructions.
const WORK: u64 = 300_000;
const WORK_PER_INPUT_BYTE: u64 = 16;
const BYTES_PER_INSTRUCTION: u64 = 32;

thread_local! {
    static LEFT_BYTES: Cell<usize> = const { Cell::new(ALLOWANCE_BYTES) };
    /// The allowance of this rendering, and the instructions it took, as far as they were noted.
    static ALLOWED_BYTES: Cell<usize> = const { Cell::new(0) };
    static SPENT_FUEL: Cell<u64> = const { Cell::new(0) };
    /// Left operands of multiplications whose right operand is being evaluated.
    pub(super) static FACTORS: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
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

pub(super) fn weigh_at(value: &Value, depth: usize, is_kept: bool) -> Result<(), Error> {
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

/// Charges the text after a replacement.
pub(super) fn charge_replaced(text: &str, from: &str, to: &str) -> Result<(), Error> {
    charge(text.len().saturating_add(text.matches(from).count().saturating_mul(to.len())))
}

/// Charges all elements and the text between them.
pub(super) fn charge_joined(values: &Value, between: &str) -> Result<(), Error> {
    weigh(values)?;
    let count = values.try_iter()?.count();
    charge(count.saturating_mul(between.len()))
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
