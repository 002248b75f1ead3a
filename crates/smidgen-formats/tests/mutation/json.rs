//! Changes to JSON documents that stay valid JSON: values of other types and sizes; keys removed, added,
//! renamed, copied.
//!
//! They test a reader's own checks. Documents with random bytes seldom pass the JSON parser.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

#[derive(Clone, Debug)]
pub enum Change {
    /// Another value in place of the node.
    Replace(usize, Value),
    /// The node's value replaces another node.
    Copy(usize, usize),
    Remove(usize),
    /// The key of an entry becomes another key of the document.
    Rename(usize, usize),
    /// A known key, or one of the document's, with a value.
    Add(usize, String, Value),
    /// The value is wrapped in this many lists and tables.
    Nest(usize, usize),
    /// A list with its items repeated.
    Repeat(usize, usize),
    /// A number times, or divided by, a power of two.
    Scale(usize, i32),
}

/// Values that readers may mishandle.
fn value() -> impl Strategy<Value = Value> {
    let whole = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (0..300_i64).prop_map(Value::from),
        proptest::sample::select(vec![0, 1, 2, 255, 256, 257, 1 << 31, 1 << 32, i64::MAX, i64::MIN, -1])
            .prop_map(Value::from),
    ];
    let real = proptest::sample::select(vec![
        0.0,
        -0.0,
        0.5,
        1.0,
        2.0,
        -1.0,
        1e-40,
        1e-300,
        5e-324,
        1e38,
        1e39,
        1e300,
        f64::MAX,
    ]);
    let text = prop_oneof![
        proptest::sample::select(vec![
            "",
            "none",
            "all",
            "true",
            "LORA",
            "llama",
            "qwen2",
            "qwen3",
            "mistral",
            "silu",
            "gelu",
            "linear",
            "llama3",
            "default",
            "dynamic",
            "bfloat16",
            "float8_e4m3fn",
            ".*",
            "(",
            "a{1000}{1000}",
            "[",
            "(?=x)",
            "\u{0}",
            "é\u{301}",
            "../../x",
            "q_proj",
        ])
        .prop_map(Value::from),
        "[a-z_.*+?(){}\\[\\]|^$\\\\0-9]{0,24}".prop_map(Value::from),
        (1..4000_usize).prop_map(|length| Value::from("x".repeat(length))),
    ];
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        whole,
        real.prop_map(Value::from),
        text,
        Just(json!([])),
        Just(json!({})),
        Just(json!([null, [], {}])),
        Just(json!({ "rope_type": "llama3", "factor": 8.0 })),
        (0..600_usize).prop_map(|length| Value::from(vec![0; length])),
    ]
}

/// Changes to a document whose reader knows `keys`.
pub fn change(keys: &'static [&'static str]) -> impl Strategy<Value = Change> {
    let node = || any::<usize>();
    let key = proptest::sample::select(keys).prop_map(str::to_owned);
    prop_oneof![
        4 => (node(), value()).prop_map(|(at, value)| Change::Replace(at, value)),
        1 => (node(), node()).prop_map(|(from, to)| Change::Copy(from, to)),
        2 => node().prop_map(Change::Remove),
        1 => (node(), node()).prop_map(|(at, name)| Change::Rename(at, name)),
        3 => (node(), key, value()).prop_map(|(at, key, value)| Change::Add(at, key, value)),
        1 => (node(), 1..200_usize).prop_map(|(at, depth)| Change::Nest(at, depth)),
        1 => (node(), 1..500_usize).prop_map(|(at, times)| Change::Repeat(at, times)),
        2 => (node(), -80..80_i32).prop_map(|(at, power)| Change::Scale(at, power)),
    ]
}

/// The text of the document after these changes.
pub fn changed(valid: &Value, changes: &[Change]) -> Vec<u8> {
    let mut document = valid.clone();
    for change in changes {
        apply(&mut document, change);
    }
    serde_json::to_vec(&document).expect("JSON")
}

fn apply(document: &mut Value, change: &Change) {
    let nodes = nodes_of(document);
    let path = |at: usize| nodes[at % nodes.len()].clone();
    match change {
        Change::Replace(at, value) => *node(document, &path(*at)) = value.clone(),
        Change::Copy(from, to) => {
            let value = node(document, &path(*from)).clone();
            *node(document, &path(*to)) = value;
        }
        Change::Remove(at) => {
            let mut path = path(*at);
            let Some(last) = path.pop() else { return };
            match node(document, &path) {
                Value::Object(map) => drop(map.shift_remove(&last)),
                Value::Array(items) => drop(items.remove(last.parse().expect("an index"))),
                _ => {}
            }
        }
        Change::Rename(at, name) => {
            let Some(name) = path(*name).pop() else { return };
            let mut path = path(*at);
            let Some(last) = path.pop() else { return };
            if let Value::Object(map) = node(document, &path) {
                let value = map.shift_remove(&last).expect("a key of the map");
                map.insert(name, value);
            }
        }
        Change::Add(at, key, value) => {
            // Into the table at the node or, more often, into the document.
            let path = path(*at);
            let table = if node(document, &path).is_object() { node(document, &path) } else { document };
            if let Value::Object(map) = table {
                map.insert(key.clone(), value.clone());
            }
        }
        Change::Nest(at, depth) => {
            let place = node(document, &path(*at));
            let mut value = std::mem::take(place);
            for level in 0..*depth {
                value = match level % 2 {
                    0 => Value::Array(vec![value]),
                    _ => Value::Object(Map::from_iter([("x".to_owned(), value)])),
                };
            }
            *place = value;
        }
        Change::Repeat(at, times) => {
            if let Value::Array(items) = node(document, &path(*at)) {
                let length = items.len().saturating_mul(*times).min(4000);
                *items = items.iter().cycle().take(length).cloned().collect();
            }
        }
        Change::Scale(at, power) => {
            let place = node(document, &path(*at));
            match (place.as_u64(), place.as_f64()) {
                (Some(whole), _) if (0..64).contains(power) => *place = (whole << power).into(),
                (_, Some(real)) => *place = (real * 2_f64.powi(*power)).into(),
                _ => {}
            }
        }
    }
}

/// Paths to the values of a document, starting with the document itself.
fn nodes_of(document: &Value) -> Vec<Vec<String>> {
    fn walk(value: &Value, path: &mut Vec<String>, nodes: &mut Vec<Vec<String>>) {
        nodes.push(path.clone());
        // Limited, so that long lists and deep nests are not most of the nodes.
        if path.len() > 4 {
            return;
        }
        let mut visit = |name: String, value: &Value| {
            path.push(name);
            walk(value, path, nodes);
            path.pop();
        };
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| visit(key.clone(), value)),
            Value::Array(items) => {
                items.iter().take(8).enumerate().for_each(|(index, value)| visit(index.to_string(), value));
            }
            _ => {}
        }
    }
    let mut nodes = Vec::new();
    walk(document, &mut Vec::new(), &mut nodes);
    nodes
}

fn node<'a>(document: &'a mut Value, path: &[String]) -> &'a mut Value {
    path.iter().fold(document, |value, name| match value {
        Value::Object(map) => map.get_mut(name).expect("a key of the map"),
        Value::Array(items) => &mut items[name.parse::<usize>().expect("an index")],
        _ => unreachable!("paths lead through tables and lists"),
    })
}
