//! The JSON schema of recipes, with which editors complete and check a TOML file.
//!
//! Types follow from the readers of the keys: each is asked about a value of every kind, so the schema accepts what a
//! recipe may hold, also of keys that are added later. Words, ranges and texts come from the table of keys.
//! Left out: what only a reader can say, such as whether a list has the same name twice; the recipe's parser says it.

use crate::keys::{KEYS, Key, SECTIONS};
use crate::sections::Recipe;
use crate::value::{Given, Value, value_of_toml};
use serde_json::{Map, Value as Json, json};
use std::path::Path;
use toml::de::DeValue;

/// The schema of a whole recipe.
pub fn render_schema() -> Json {
    let defaults = Recipe::with_defaults();
    let sections: Map<String, Json> =
        SECTIONS.iter().map(|section| ((*section).to_owned(), section_schema(section, &defaults))).collect();
    json!({
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "smidgen recipe",
        "type": "object",
        "properties": sections,
        "required": ["model", "data", "output"],
        "additionalProperties": false,
    })
}

fn section_schema(section: &str, defaults: &Recipe) -> Json {
    let keys: Vec<&Key> = KEYS.iter().filter(|key| key.section == section).collect();
    let properties: Map<String, Json> =
        keys.iter().map(|key| (key.name.to_owned(), key_schema(key, defaults))).collect();
    // `data.mix` replaces `data.train`.
    let (required, one_of): (Vec<&str>, Vec<&str>) =
        keys.iter().filter(|key| key.required).map(|key| key.name).partition(|name| *name != "train");
    let mut schema = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
    let mut conditions: Vec<Json> = Vec::new();
    conditions
        .extend(one_of.iter().map(|name| json!({"anyOf": [{"required": [name]}, {"required": ["mix"]}]})));
    let pairs = keys.iter().filter_map(|key| Some((key.name, key.excludes?)));
    let once = pairs.filter(|(name, other)| name < other);
    conditions.extend(once.map(|(name, other)| json!({"not": {"required": [name, other]}})));
    if !conditions.is_empty() {
        schema["allOf"] = json!(conditions);
    }
    schema
}

fn key_schema(key: &Key, defaults: &Recipe) -> Json {
    let mut schema = Map::new();
    schema
        .insert("description".into(), json!(format!("{}. Accepts {}.", key.meaning, key.accepts.describe())));
    let shown = (key.show)(defaults).filter(|_| !key.required);
    if let Some(default) = shown.as_deref().and_then(parse_value) {
        schema.insert("default".into(), default);
    }
    let mut kinds = kinds(key);
    match kinds.len() {
        1 => schema.extend(kinds.remove(0)),
        _ => drop(schema.insert("anyOf".into(), json!(kinds))),
    }
    Json::Object(schema)
}

/// A schema for each kind of value that the reader of a key takes.
fn kinds(key: &Key) -> Vec<Map<String, Json>> {
    let takes = |value: Value| accepts(key, &value);
    let text = |text: &str| Value::Text(text.to_owned());
    let mut kinds: Vec<Json> = Vec::new();
    if takes(Value::Boolean(true)) {
        kinds.push(json!({"type": "boolean"}));
    }
    let integers = [0, 1, 2, 64, 1 << 40];
    let least = integers.into_iter().find(|number| takes(Value::Integer(*number)));
    let is_float = [0.5, 1.5].into_iter().any(|number| takes(Value::Float(number)));
    let is_above_one = takes(Value::Float(1.5)) || takes(Value::Integer(2)) && is_float;
    match least {
        // A size in bytes.
        Some(large) if large > 2 => kinds.push(json!({"type": "integer", "minimum": 1})),
        Some(least) if !is_float || takes(Value::Integer(2)) && !takes(Value::Float(1.5)) => {
            kinds.push(json!({"type": "integer", "minimum": least}));
        }
        _ => {}
    }
    if is_float {
        let mut number = json!({"type": "number"});
        let bound = if takes(Value::Float(0.0)) { "minimum" } else { "exclusiveMinimum" };
        if !takes(Value::Float(-0.5)) {
            number[bound] = json!(0);
        }
        if !is_above_one || !takes(Value::Float(1.5)) {
            let bound = if takes(Value::Float(1.0)) { "maximum" } else { "exclusiveMaximum" };
            number[bound] = json!(1);
        }
        kinds.push(number);
    }
    let is_closed = key.accepts.phrase.is_empty();
    let samples = ["x", "a/x", "hf:org/name", "24GiB", "x.json", "cpu", "auto"];
    let is_text = samples.into_iter().chain(key.accepts.words.iter().copied()).any(|word| takes(text(word)));
    if is_text && is_closed {
        kinds.push(json!({"enum": key.accepts.words}));
    } else if is_text {
        let mut string = json!({"type": "string"});
        if !key.accepts.words.is_empty() {
            string["examples"] = json!(key.accepts.words);
        }
        kinds.push(string);
    }
    let lists = [
        (vec![text("x")], json!({"type": "string"})),
        (vec![Value::Integer(0)], json!({"type": "integer", "minimum": 0})),
        (vec![Value::Float(0.5), Value::Float(0.5)], json!({"type": "number"})),
    ];
    let found = lists.into_iter().find(|(items, _)| takes(Value::List(items.clone())));
    if let Some((_, items)) = found {
        kinds.push(json!({"type": "array", "items": items}));
    } else if takes(Value::List(vec![])) {
        kinds.push(json!({"type": "array", "items": {"type": "object"}}));
    }
    if takes(Value::Table(vec![])) {
        kinds.push(json!({"type": "object"}));
    }
    kinds.into_iter().filter_map(|kind| kind.as_object().cloned()).collect()
}

fn accepts(key: &Key, value: &Value) -> bool {
    let given = Given { value, folder: Path::new("/"), working_directory: Path::new("/") };
    (key.set)(&mut Recipe::with_defaults(), &given).is_some()
}

/// A value that is written as TOML, as JSON.
fn parse_value(text: &str) -> Option<Json> {
    to_json(&value_of_toml(DeValue::parse(text).ok()?.get_ref()))
}

fn to_json(value: &Value) -> Option<Json> {
    Some(match value {
        Value::Text(text) => json!(text),
        Value::Integer(number) => json!(i64::try_from(*number).ok()?),
        Value::Float(number) => json!(number),
        Value::Boolean(flag) => json!(flag),
        Value::List(items) => Json::Array(items.iter().map(to_json).collect::<Option<_>>()?),
        Value::Table(entries) => Json::Object(
            entries
                .iter()
                .map(|(name, value)| Some((name.clone(), to_json(value)?)))
                .collect::<Option<_>>()?,
        ),
        Value::Unsupported(_) | Value::Bare(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key<'a>(schema: &'a Json, section: &str, name: &str) -> &'a Json {
        &schema["properties"][section]["properties"][name]
    }

    #[test]
    fn every_key_has_a_kind_and_a_default_of_that_kind() {
        let schema = render_schema();
        for entry in KEYS {
            let found = key(&schema, entry.section, entry.name);
            let kinds = kinds(entry);
            assert!(!kinds.is_empty(), "{} takes nothing that was tried", entry.path());
            let Some(default) = found.get("default").filter(|default| !default.is_null()) else { continue };
            let fits = |kind: &Map<String, Json>| match kind.get("type").and_then(Json::as_str) {
                Some("boolean") => default.is_boolean(),
                Some("integer") => default.is_i64(),
                Some("number") => default.is_number(),
                Some("string") => default.is_string(),
                Some("array") => default.is_array(),
                Some("object") => default.is_object(),
                _ => kind["enum"].as_array().is_some_and(|words| words.contains(default)),
            };
            assert!(kinds.iter().any(fits), "{}: {default} is none of {kinds:?}", entry.path());
        }
    }

    #[test]
    fn kinds_follow_from_the_readers() {
        let schema = render_schema();
        let of = |section, name| key(&schema, section, name);
        assert_eq!(of("model", "base")["enum"][0], "as-stored");
        assert_eq!(
            (&of("train", "steps")["type"], &of("train", "steps")["minimum"]),
            (&json!("integer"), &json!(1))
        );
        assert_eq!(of("train", "eval_every")["minimum"], json!(0));
        assert_eq!(of("train", "lr")["exclusiveMinimum"], json!(0));
        assert_eq!(of("data", "split")["exclusiveMaximum"], json!(1));
        assert_eq!(
            of("data", "shuffle"),
            &json!({
                "description": of("data", "shuffle")["description"], "default": true, "type": "boolean",
            })
        );
        let kinds = |section, name| -> Vec<String> {
            let kinds = of(section, name)["anyOf"].as_array().unwrap();
            kinds.iter().map(|kind| kind["type"].as_str().unwrap_or("enum").to_owned()).collect()
        };
        assert_eq!(kinds("train", "warmup"), ["integer", "number"]);
        assert_eq!(kinds("memory", "budget"), ["integer", "string"]);
        assert_eq!(kinds("data", "train"), ["string", "array"]);
        assert_eq!(kinds("memory", "recompute"), ["string", "array"]);
        assert_eq!(schema["properties"]["train"]["allOf"].as_array().unwrap().len(), 2);
        assert_eq!(schema["properties"]["model"]["required"], json!(["path"]));
    }
}
