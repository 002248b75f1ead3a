//! Operators, tests, filters and methods in which the template engine differs from Jinja on Python.
//!
//! Models were trained on the output of Jinja, so a template must take the same branches here and print the same
//! text. `template_rewrite.rs` replaces the operators by calls of these functions.
//! Left out: what no published template uses, such as `xmlattr`; the engine refuses it by name.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::python::print;
use super::python_types::{Method, is_dict, is_type};
use super::template_allowance::{
    charge, charge_replaced, check_format, note_work, own_bytes, refused, weigh,
};

/// Names of the functions that stand for operators. A template cannot contain them, because of the `!`.
pub(super) const ADD: &str = "add!";
pub(super) const REMAINDER: &str = "remainder!";
pub(super) const TEXT: &str = "text!";
pub(super) const ATTRIBUTE: &str = "attribute!";
pub(super) const ITEM: &str = "item!";
/// Methods of Python's `dict`. As attributes they hide the keys of the same names, and a missing key is the method.
pub(super) const DICT_METHODS: [&str; 5] = ["items", "keys", "values", "get", "copy"];
/// Methods that keep a text safe (`|safe`).
const SAFE_METHODS: [&str; 5] = ["strip", "lstrip", "rstrip", "upper", "lower"];

/// Adds them to the environment of a template.
pub(super) fn add_python(environment: &mut Environment<'static>) {
    environment.add_function(ADD, add);
    environment.add_function(REMAINDER, remainder);
    environment.add_function(TEXT, text);
    environment.add_function(ATTRIBUTE, |value: Value, name: &str| {
        if is_dict(&value) {
            Ok(Value::from_object(Method { value, name: name.to_owned() }))
        } else {
            value.get_attr(name)
        }
    });
    environment.add_function(ITEM, |value: Value, name: &str| {
        let found = value.get_item(&Value::from(name))?;
        Ok::<_, Error>(if found.is_undefined() && is_dict(&value) {
            Value::from_object(Method { value, name: name.to_owned() })
        } else {
            found
        })
    });
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        let kind = value.kind();
        matches!(kind, ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment
        .add_test("callable", |value: &Value| value.kind() == ValueKind::Plain || is_type(value, "::Macro"));
    environment.add_filter("string", |value: &Value| match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => printed(value),
    });
    for name in ["length", "count"] {
        environment.add_filter(
            name,
            |value: &Value| if value.is_undefined() { Ok(0) } else { filters::length(value) },
        );
    }
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, |value: &Value| {
            if value.is_safe() {
                Ok(value.clone())
            } else {
                escaped(&print(value)?).map(Value::from_safe_string)
            }
        });
    }
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    environment.add_filter("wordcount", |text: &str| text.split_whitespace().count());
    environment.add_filter("replace", replace);
}

/// Like `str(value)`, and not safe.
fn text(value: &Value) -> Result<Value, Error> {
    weigh(value)?;
    match value.as_str() {
        Some(text) if value.is_safe() => Ok(Value::from(text)),
        Some(_) => Ok(value.clone()),
        None => printed(value),
    }
}

pub(super) fn printed(value: &Value) -> Result<Value, Error> {
    let text = print(value)?;
    charge(text.len())?;
    Ok(Value::from(text))
}

/// `+`: a text that is added to a safe one is escaped.
fn add(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    note_work(state);
    charge(own_bytes(left))?;
    charge(own_bytes(right))?;
    match (left.as_str(), right.as_str()) {
        (Some(a), Some(b)) if left.is_safe() || right.is_safe() => {
            let a = if left.is_safe() { a.to_owned() } else { escaped(a)? };
            let b = if right.is_safe() { b.to_owned() } else { escaped(b)? };
            Ok(Value::from_safe_string(a + &b))
        }
        (Some(a), Some(b)) => Ok(Value::from([a, b].concat())),
        _ => match (whole_number(left), whole_number(right)) {
            (Some(a), Some(b)) => match a.checked_add(b) {
                Some(sum) => Ok(Value::from(sum)),
                None => by_engine(state, "left + right", left, right),
            },
            _ => by_engine(state, "left + right", left, right),
        },
    }
}

/// `%`: of a text, its format.
fn remainder(state: &mut State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(format) = left.as_str() {
        let arguments: Vec<Value> =
            if is_type(right, "::Tuple") { right.try_iter()?.collect() } else { vec![right.clone()] };
        check_format(format, &arguments)?;
        let arguments = format_arguments(format, &arguments)?;
        return filters::format(state, left, Rest(arguments.into_iter().map(ValueOrKwargs::from).collect()));
    }
    match (whole_number(left), whole_number(right)) {
        (Some(a), Some(b)) if b > 0 => Ok(Value::from(a.rem_euclid(b))),
        _ => by_engine(state, "left % right", left, right),
    }
}

/// The arguments of a format: all but numbers and texts as Python prints them. Numbers may have a code of their own;
/// without one, large and small ones are printed as in Python too.
pub(super) fn format_arguments(format: &str, arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let codes = [":", "%d", "%i", "%.", "%f", "%g", "%e", "%x", "%0"];
    let has_codes = codes.iter().any(|code| format.contains(code));
    let shown = |value: &Value| match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Seq | ValueKind::Iterable => printed(value),
        ValueKind::Number if !has_codes => printed(value),
        _ => Ok(value.clone()),
    };
    arguments.iter().map(shown).collect()
}

fn whole_number(value: &Value) -> Option<i64> {
    if value.is_integer() { value.as_i64() } else { None }
}

/// The operator as the engine has it.
fn by_engine(
    state: &State<'_, '_>,
    operation: &'static str,
    left: &Value,
    right: &Value,
) -> Result<Value, Error> {
    let variables = Value::from_pairs([("left", left.clone()), ("right", right.clone())]);
    let result = state.env().compile_expression(operation)?.eval(variables);
    // The line of the template is added to an error without one.
    result.map_err(|error| Error::new(error.kind(), error.detail().unwrap_or_default().to_owned()))
}

fn escaped(text: &str) -> Result<String, Error> {
    charge(text.len().saturating_mul(5))?;
    let mut out = String::with_capacity(text.len());
    for sign in text.chars() {
        match sign {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            sign => out.push(sign),
        }
    }
    Ok(out)
}

/// Without a default, what is not a number is 0.
fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    more: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(more.get("default")?).unwrap_or_else(|| Value::from(0));
    filters::int(state, &trimmed(value), Some(default), base, more)
}

fn float(state: &State<'_, '_>, value: &Value, default: Option<Value>, more: Kwargs) -> Result<Value, Error> {
    let default = default.or(more.get("default")?).unwrap_or_else(|| Value::from(0.0));
    filters::float(state, &trimmed(value), Some(default), more)
}

fn trimmed(value: &Value) -> Value {
    value.as_str().map_or_else(|| value.clone(), |text| Value::from(text.trim()))
}

fn default(
    value: Value,
    default: Option<Value>,
    boolean: Option<bool>,
    more: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(more.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let is_false_too = boolean.or(more.get("boolean")?).unwrap_or(false);
    more.assert_all_used()?;
    Ok(if value.is_undefined() || (is_false_too && !value.is_true()) { default } else { value })
}

fn replace(text: &Value, from: &Value, to: &Value, count: Option<usize>) -> Result<String, Error> {
    let (text, from, to) = (print(text)?, print(from)?, print(to)?);
    charge_replaced(&text, &from, &to)?;
    Ok(match count {
        Some(count) => text.replacen(&from, &to, count),
        None => text.replace(&from, &to),
    })
}

/// Methods of Python's strings, lists and dicts that the engine lacks or has in another form.
pub(super) fn call_python_method(
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    let texts: Vec<&str> = arguments.iter().map_while(Value::as_str).collect();
    let number = |index: usize| arguments.get(index).and_then(Value::as_i64);
    let Some(text) = value.as_str() else {
        return match (name, arguments) {
            ("copy", []) if matches!(value.kind(), ValueKind::Map | ValueKind::Seq) => {
                Some(Ok(value.clone()))
            }
            ("index", [wanted]) if value.kind() == ValueKind::Seq => {
                let place = value.try_iter().ok()?.position(|item| item == *wanted);
                Some(place.map(Value::from).ok_or_else(|| refused("the value is not in the list")))
            }
            _ => None,
        };
    };
    let parts = |parts: [&str; 3]| Value::from(Tuple::from(parts.map(Value::from).to_vec()));
    Some(Ok(match (name, texts.as_slice(), arguments.len()) {
        ("rsplit", [by], 1 | 2) if !by.is_empty() => {
            let most = number(1).and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX - 1);
            let mut found: Vec<&str> = text.rsplitn(most.saturating_add(1), by).collect();
            found.reverse();
            found.into_iter().map(Value::from).collect()
        }
        ("partition", [by], 1) => match text.split_once(by) {
            Some((before, after)) => parts([before, by, after]),
            None => parts([text, "", ""]),
        },
        ("rpartition", [by], 1) => match text.rsplit_once(by) {
            Some((before, after)) => parts([before, by, after]),
            None => parts(["", "", text]),
        },
        ("removeprefix", [part], 1) => Value::from(text.strip_prefix(part).unwrap_or(text)),
        ("removesuffix", [part], 1) => Value::from(text.strip_suffix(part).unwrap_or(text)),
        ("index", [part], 1) => match text.find(part) {
            Some(place) => Value::from(text[..place].chars().count()),
            None => return Some(Err(refused("the text to find is not in the text"))),
        },
        ("casefold", [], 0) => Value::from(text.to_lowercase()),
        ("title", [], 0) => Value::from(titled(text)),
        ("zfill" | "ljust" | "rjust" | "center", _, 1 | 2) => {
            let width = number(0)?;
            let fill = match (name, arguments.get(1).and_then(Value::as_str)) {
                ("zfill", _) => "0",
                (_, fill) => fill.unwrap_or(" "),
            };
            return Some(padded(text, name, usize::try_from(width).unwrap_or(0), fill));
        }
        _ => return None,
    }))
}

/// The text with spaces, or another character, around it.
fn padded(text: &str, method: &str, width: usize, fill: &str) -> Result<Value, Error> {
    charge(width.saturating_mul(fill.len()).saturating_add(text.len()))?;
    let missing = width.saturating_sub(text.chars().count());
    let before = match method {
        "ljust" => 0,
        // As in Python, the odd space goes to the left if the width is odd.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    let (sign, rest) = match (method, text.chars().next()) {
        ("zfill", Some('-' | '+')) => text.split_at(1),
        _ => ("", text),
    };
    Ok(Value::from([sign, &fill.repeat(before), rest, &fill.repeat(missing - before)].concat()))
}

/// Every letter after a sign that is no letter in upper case, the others in lower case.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut follows_letter = false;
    for sign in text.chars() {
        if follows_letter {
            out.extend(sign.to_lowercase())
        } else {
            out.extend(sign.to_uppercase())
        }
        follows_letter = sign.is_alphabetic();
    }
    out
}

/// The result of a method of a safe text, which some methods keep safe.
pub(super) fn keep_safe(value: &Value, method: &str, result: Value) -> Value {
    match (value.is_safe() && SAFE_METHODS.contains(&method), result.as_str()) {
        (true, Some(text)) => Value::from_safe_string(text.to_owned()),
        _ => result,
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use serde_json::{Map, json};

    use crate::tokenizer::chat_template::{ChatInput, ChatTemplate};

    fn rendered(source: &str) -> Result<String, String> {
        let template = ChatTemplate::new(source, Map::new()).map_err(|error| error.to_string())?;
        let more = json!({"f": [1e-7, 1e16, 0.0001, 1e22, -0.0], "t": {"a": ["it's", true]}, "m": {"a": 1},
            "k": {"items": 0, "get": 2}, "s": "a'\u{a0}\u{200b}\u{e9}"});
        let messages = json!([]);
        let input = ChatInput { more: more.as_object(), ..ChatInput::new(&messages, SystemTime::UNIX_EPOCH) };
        template.render(&input).map(|rendered| rendered.text).map_err(|error| error.to_string())
    }

    /// Every text is what Jinja 3.1.6 prints with the settings of transformers.
    #[test]
    fn templates_print_and_branch_as_jinja_does() {
        for (source, expected) in [
            ("{{ none is iterable }} {{ 'a' is iterable }} {{ nope is iterable }}", "False True True"),
            (
                "{{ 'a' is sequence }} {{ m is sequence }} {{ none is sequence }} {{ 3 is sequence }}",
                "True True False False",
            ),
            ("{{ range is callable }} {{ m is callable }} {{ m.get is callable }}", "True False True"),
            ("{{ nope|length }} {{ 'x'|int }} {{ ' 3 '|int }} {{ 'x'|float }}", "0 0 3 0.0"),
            ("{{ f }}", "[1e-07, 1e+16, 0.0001, 1e+22, -0.0]"),
            (
                "{{ f[0] }} {{ f[0]|string }} {{ 'a' ~ f[1] }} {{ f|join(' ') }}",
                "1e-07 1e-07 a1e+16 1e-07 1e+16 0.0001 1e+22 -0.0",
            ),
            ("{{ f|tojson }}", "[1e-07, 1e+16, 0.0001, 1e+22, -0.0]"),
            (
                "{{ '%s %s'|format('a', f[0]) }} {{ '{}'.format(f[:1]) }} {{ '%.2f' % 1.5 }}",
                "a 1e-07 [1e-07] 1.50",
            ),
            ("{{ '%s-%d' % ('a', 3) }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7.5 % 2 }}", "a-3 1 2 1.5"),
            ("{{ t ~ '' }} {{ t|string }}", "{'a': [\"it's\", True]} {'a': [\"it's\", True]}"),
            ("{{ [s] }}", "[\"a'\\xa0\\u200bé\"]"),
            ("{{ (1,) }} {{ (1, 'a') }} {{ m.items()|list }}", "(1,) (1, 'a') [('a', 1)]"),
            (
                "{{ {'b': 'é🤖', 'a': 1}|tojson(ensure_ascii=true, sort_keys=true) }}",
                r#"{"a": 1, "b": "\u00e9\ud83e\udd16"}"#,
            ),
            ("{{ 'é'|tojson(true) }} {{ m|tojson(separators=(',', ':')) }}", r#""\u00e9" {"a":1}"#),
            (
                "{{ [1]|tojson(indent='-') }} {{ {1: 2, none: []}|tojson }}",
                "[\n-1\n] {\"1\": 2, \"null\": []}",
            ),
            ("{{ 'a<'|safe + 'b<' }} {{ '\"' + '<'|safe }} {{ 'a<'|safe ~ 'b<' }}", "a<b&lt; &#34;< a<b<"),
            ("{{ ('<'|safe).strip() + '<' }} {{ \"'\"|e + '<' }}", "<&lt; &#39;&lt;"),
            (
                "{{ m.items is defined }} {{ m['items'] is mapping }} {{ k.items is number }} {{ k['items'] }}",
                "True False False 0",
            ),
            ("{{ k.items()|length }} {{ k.get('get') }} {{ 'yes' if m['items'] }}", "2 2 yes"),
            (
                "{{ 'aXbXc'.rsplit('X', 1) }} {{ 'ab'.zfill(4) }} {{ 'ab'.center(5) }}|{{ 'a_b'.title() }}",
                "['aXb', 'c'] 00ab   ab |A_B",
            ),
            (
                "{{ 'abc'.removeprefix('a') }} {{ 'aaa'|replace('a', 'b', 2) }} {{ 'a.b'.partition('.')[2] }}",
                "bc bba b",
            ),
            (
                "{{ 1 + 2 }} {{ 1 + 1.5 }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ m.b|d('q', boolean=true) }}",
                "3 2.5 [1, 2] ab q",
            ),
            ("a\r\nb\rc\r\n{% if true %}\r\n{{ 'd\r\n'|tojson }}\r\n{% endif %}\r\n", "a\nb\nc\n\"d\\n\"\n"),
        ] {
            assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
        }
        for (source, reason) in [
            ("{{ nope|tojson }}", "`tojson` of a value that is not defined"),
            ("{{ m.items }}", "it prints a method of a dict that it does not call"),
            ("{{ 'a' + none }}", "tried to use + operator on unsupported types string and none"),
        ] {
            let refused = rendered(source).unwrap_err();
            assert!(refused.contains(reason), "{source}: {refused}");
        }
    }
}
