//! Checks a `tokenizer.json` for limits before the library reads it.
//!
//! A tokenizer is downloaded with a model, so it is not trusted. A replacement can make a text a million
//! times as long, a token can have the size of the file, and the library cannot handle an empty table of
//! characters. The file is parsed without keeping its contents. The library takes the last of several values of
//! a key, so a repeated key could hide a value from the check.
//! Left out: other errors, which the library reports itself.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use serde_json::value::RawValue;

/// The longest tokens of published vocabularies, runs of spaces, have a few hundred bytes.
const MOST_TOKEN_BYTES: usize = 64 << 10;
/// By how much all replacements together may lengthen a text. Some real ones turn a space into three bytes.
const MOST_GROWTH: usize = 16;
/// The longest entry in the table of characters of a real model has 33 bytes.
const MOST_CHARACTER_BYTES: usize = 256;
/// Values in the normalizer and the decoder together. Parsed, each takes many times its size in the file.
const MOST_VALUES: usize = 10_000;
/// The keys of the file and of its `model` that are checked.
const CHECKED_KEYS: [&str; 5] = ["normalizer", "decoder", "added_tokens", "model", "vocab"];
/// Prefix of this file's errors, which distinguishes them from errors of the JSON parser.
const MARK: &str = "limit: ";

/// Refuses a tokenizer that the library would not survive.
pub(super) fn check_tokenizer(json: &[u8]) -> Result<(), String> {
    check_keys(json)?;
    let outline: Outline<'_> = match serde_json::from_slice(json) {
        Ok(outline) => outline,
        Err(error) => {
            let message = error.to_string();
            // The library reports everything else.
            return match message.split_once(MARK) {
                Some((_, limit)) => Err(limit.split(" at line").next().unwrap_or(limit).to_owned()),
                None => Ok(()),
            };
        }
    };
    let mut values = 0;
    for (part, name, list) in
        [(outline.normalizer, "normalizer", "normalizers"), (outline.decoder, "decoder", "decoders")]
    {
        let Some(part) = part.map(RawValue::get) else { continue };
        // Every value but the first follows one of these characters.
        values += part.matches(['[', '{', ',']).count();
        if values > MOST_VALUES {
            return Err(format!("its normalizer and decoder have more than {MOST_VALUES} parts"));
        }
        // JSON that nests too deeply is an error in the library too.
        let Ok(part) = serde_json::from_str::<Json>(part) else { return Ok(()) };
        let growth = growth_of(&part, list)?;
        if growth > MOST_GROWTH {
            return Err(format!(
                "the replacements of its {name} can make a text {growth} times as long, at most {MOST_GROWTH} times is allowed"
            ));
        }
    }
    Ok(())
}

/// Refuses a file whose object, or whose `model`, has a key twice.
fn check_keys(json: &[u8]) -> Result<(), String> {
    let Ok(whole) = serde_json::from_slice::<Keys<'_>>(json) else { return Ok(()) };
    let inner = whole.model.and_then(|model| serde_json::from_str::<Keys<'_>>(model.get()).ok());
    let inner = inner.and_then(|model| model.repeated).map(|key| format!("model.{key}"));
    match whole.repeated.map(str::to_owned).or(inner) {
        Some(key) => Err(format!("it has the key `{key}` twice")),
        None => Ok(()),
    }
}

/// By how much a normalizer or decoder can lengthen a text. Its fields decide, because the library recognizes by
/// them a part without a type or with an unknown one.
fn growth_of(part: &Json, list: &str) -> Result<usize, String> {
    if part.is_array() {
        return Err("its normalizer or decoder has a list where an object is expected".to_owned());
    }
    let mut growth: usize = 1;
    for part in part[list].as_array().into_iter().flatten() {
        growth = growth.saturating_mul(growth_of(part, list)?);
    }
    if let (Some(content), false) = (part["content"].as_str(), part["pattern"].is_null()) {
        // A pattern that matches the empty text matches at every position.
        let found = part["pattern"]["String"].as_str().map_or(1, |pattern| pattern.len().max(1));
        growth = growth.saturating_mul(content.len().div_ceil(found).max(1));
    }
    if part["prepend"].as_str().is_some_and(|text| text.len() > MOST_CHARACTER_BYTES) {
        return Err("its normalizer puts a very long text in front of every text".to_owned());
    }
    let is_precompiled = part["type"] == "Precompiled" || !part["precompiled_charsmap"].is_null();
    if is_precompiled {
        check_characters(part["precompiled_charsmap"].as_str().unwrap_or_default())?;
    }
    Ok(growth)
}

/// Checks the table of characters of SentencePiece: the size of a search tree, the tree, and zero-terminated
/// texts.
fn check_characters(encoded: &str) -> Result<(), String> {
    let damaged =
        || "the table of characters of its normalizer (`Precompiled`) is empty or damaged".to_owned();
    let table = STANDARD_NO_PAD.decode(encoded.trim_end_matches('=')).map_err(|_| damaged())?;
    let (size, rest) = table.split_at_checked(4).ok_or_else(damaged)?;
    let tree_bytes = size.iter().rev().fold(0, |size, byte| size << 8 | usize::from(*byte));
    let (_, texts) = rest.split_at_checked(tree_bytes).ok_or_else(damaged)?;
    if tree_bytes == 0 || tree_bytes % 4 != 0 {
        return Err(damaged());
    }
    match texts.split(|byte| *byte == 0).any(|text| text.len() > MOST_CHARACTER_BYTES) {
        true => Err("its normalizer (`Precompiled`) replaces a character with a very long text".to_owned()),
        false => Ok(()),
    }
}

/// The keys of an object.
struct Keys<'a> {
    /// The first known key that occurs twice.
    repeated: Option<&'static str>,
    model: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for Keys<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Keys<'de>, D::Error> {
        struct KeyVisitor;
        impl<'de> Visitor<'de> for KeyVisitor {
            type Value = Keys<'de>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys<'de>, A::Error> {
                let mut keys = Keys { repeated: None, model: None };
                let mut seen = [false; CHECKED_KEYS.len()];
                while let Some(name) = map.next_key::<String>()? {
                    let value = map.next_value::<&RawValue>()?;
                    let Some(index) = CHECKED_KEYS.iter().position(|key| *key == name) else { continue };
                    if std::mem::replace(&mut seen[index], true) {
                        keys.repeated.get_or_insert(CHECKED_KEYS[index]);
                    }
                    if name == "model" {
                        keys.model = Some(value);
                    }
                }
                Ok(keys)
            }
        }
        deserializer.deserialize_map(KeyVisitor)
    }
}

/// The parts of a `tokenizer.json` that are checked.
#[derive(Deserialize)]
struct Outline<'a> {
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
    #[serde(rename = "added_tokens")]
    _added_tokens: Option<Tokens>,
    #[serde(rename = "model")]
    _model: Option<ModelOutline>,
}

#[derive(Deserialize)]
struct ModelOutline {
    #[serde(rename = "vocab")]
    _vocab: Option<Tokens>,
}

/// Tokens: the keys of a map, or the first element or `content` of each entry of a list. All are short
/// enough.
struct Tokens;

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tokens, D::Error> {
        struct LimitVisitor;
        impl<'de> Visitor<'de> for LimitVisitor {
            type Value = Tokens;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("tokens")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tokens, A::Error> {
                while map.next_entry::<Token, IgnoredAny>()?.is_some() {}
                Ok(Tokens)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Tokens, A::Error> {
                while list.next_element::<TokenEntry>()?.is_some() {}
                Ok(Tokens)
            }
        }
        deserializer.deserialize_any(LimitVisitor)
    }
}

/// A token that is short enough.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct Token;

impl TryFrom<String> for Token {
    type Error = String;

    fn try_from(text: String) -> Result<Token, String> {
        match text.len() {
            0..=MOST_TOKEN_BYTES => Ok(Token),
            bytes => Err(format!("{MARK}a token has {bytes} bytes, at most {MOST_TOKEN_BYTES} are allowed")),
        }
    }
}

/// `["token", -1.5]`, or `{"content": "token", ...}`.
struct TokenEntry;

impl<'de> Deserialize<'de> for TokenEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenEntry, D::Error> {
        struct LimitVisitor;
        impl<'de> Visitor<'de> for LimitVisitor {
            type Value = TokenEntry;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a token with its score or settings")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut entry: A) -> Result<TokenEntry, A::Error> {
                entry.next_element::<Token>()?;
                while entry.next_element::<IgnoredAny>()?.is_some() {}
                Ok(TokenEntry)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<TokenEntry, A::Error> {
                while let Some(name) = fields.next_key::<String>()? {
                    match name.as_str() {
                        "content" => fields.next_value::<Token>().map(|_| ())?,
                        _ => fields.next_value::<IgnoredAny>().map(|_| ())?,
                    }
                }
                Ok(TokenEntry)
            }
        }
        deserializer.deserialize_any(LimitVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(part: Json) -> String {
        check_tokenizer(part.to_string().as_bytes()).unwrap_err()
    }

    fn replace(pattern: &str, content: &str) -> Json {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    #[test]
    fn replacements_that_lengthen_texts_too_much_are_refused() {
        let bomb = json!({"normalizer": replace("a", &"b".repeat(1000))});
        assert_eq!(
            refused(bomb),
            "the replacements of its normalizer can make a text 1000 times as long, at most 16 times is allowed"
        );
        let steps = [replace("a", "bbbbb"), replace("b", "ccccc"), replace("c", "ddddd")];
        let chain = json!({"normalizer": {"type": "Sequence", "normalizers": steps}});
        assert!(refused(chain).contains("125 times"));
        let decoder = json!({"decoder": {"type": "Sequence", "decoders": [replace("a", &"b".repeat(99))]}});
        assert!(refused(decoder).contains("its decoder can make a text 99 times"));
        let regex =
            json!({"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x".repeat(20)}});
        assert!(refused(regex).contains("20 times"));
        assert!(
            refused(json!({"normalizer": {"type": "Prepend", "prepend": "x".repeat(999)}}))
                .contains("very long")
        );
        let usual = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), replace("``", "\""), {"type": "NFKC"}]});
        check_tokenizer(json!({"normalizer": usual}).to_string().as_bytes()).unwrap();
    }

    #[test]
    fn repeated_keys_are_refused() {
        let bomb = replace("a", &"b".repeat(1000));
        for (text, key) in [
            (format!("{{\"normalizer\": null, \"normalizer\": {bomb}}}"), "normalizer"),
            (format!("{{\"normalizer\": null, \"norm\\u0061lizer\": {bomb}}}"), "normalizer"),
            (format!("{{\"decoder\": {bomb}, \"model\": {{}}, \"decoder\": null}}"), "decoder"),
            ("{\"added_tokens\": 3, \"added_tokens\": []}".to_owned(), "added_tokens"),
            ("{\"model\": {}, \"model\": {}}".to_owned(), "model"),
            ("{\"model\": {\"vocab\": 3, \"vocab\": {}}}".to_owned(), "model.vocab"),
        ] {
            let error = check_tokenizer(text.as_bytes()).unwrap_err();
            assert_eq!(error, format!("it has the key `{key}` twice"), "{text}");
        }
        check_tokenizer(b"{\"vocab\": 1, \"model\": {\"model\": {}, \"vocab\": {}}}").unwrap();
    }

    /// The library recognizes a normalizer without a type, or with an unknown one, by its fields.
    #[test]
    fn parts_without_a_type_are_checked() {
        for part in [json!({"pattern": {"String": "a"}, "content": "b"}), json!([{"String": "a"}, "b"])] {
            let read: tokenizers::NormalizerWrapper = serde_json::from_value(part).unwrap();
            assert!(matches!(read, tokenizers::NormalizerWrapper::Replace(_)), "{read:?}");
        }
        for kind in [None, Some("Unknown")] {
            let with = |mut part: Json| {
                match kind {
                    Some(kind) => part["type"] = json!(kind),
                    None => drop(part.as_object_mut().unwrap().remove("type")),
                }
                json!({"normalizer": {"type": "Sequence", "normalizers": [part]}})
            };
            assert!(refused(with(replace("a", &"b".repeat(99)))).contains("99 times"), "{kind:?}");
            assert!(refused(with(json!({"prepend": "x".repeat(999)}))).contains("very long"), "{kind:?}");
            let nested = json!({"normalizers": [replace("a", &"b".repeat(99))]});
            assert!(refused(with(nested)).contains("99 times"), "{kind:?}");
            assert!(refused(with(json!({"precompiled_charsmap": ""}))).contains("damaged"), "{kind:?}");
        }
        let list = json!({"normalizer": [{"String": "a"}, "b".repeat(99)]});
        assert!(refused(list).contains("has a list where an object is expected"));
        check_tokenizer(
            &json!({"decoder": {"type": "Strip", "content": " ".repeat(99)}}).to_string().into_bytes(),
        )
        .unwrap();
    }

    #[test]
    fn damaged_tables_of_characters_are_refused() {
        let with =
            |table: &str| json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}});
        // A tree of four bytes, the text `a` and an empty text.
        check_tokenizer(with("BAAAAAAAAABhAAA=").to_string().as_bytes()).unwrap();
        for table in ["", "AAAA", "AAAAAA==", "BAAAAA==", "no base 64", "AwAAAAAAAGEA"] {
            assert!(refused(with(table)).contains("is empty or damaged"), "{table}");
        }
        let mut long = vec![4, 0, 0, 0, 0, 0, 0, 0];
        long.extend([b'a'; 300]);
        assert!(refused(with(&STANDARD_NO_PAD.encode(&long))).contains("with a very long text"));
    }

    #[test]
    fn very_long_tokens_are_refused() {
        let long = "x".repeat(100_000);
        let expected = "a token has 100000 bytes, at most 65536 are allowed";
        assert_eq!(refused(json!({"model": {"vocab": {"a": 0, &long: 1}}})), expected);
        assert_eq!(refused(json!({"model": {"vocab": [["a", 0.0], [&long, -1.5]]}})), expected);
        assert_eq!(refused(json!({"added_tokens": [{"id": 0, "content": &long}]})), expected);
        let many = vec![json!([]); 20_000];
        assert!(refused(json!({"normalizer": many})).contains("more than 10000 parts"));
        for other in ["", "[]", "{\"model\": 3}", "{\"model\": {\"vocab\": 3}}", "{\"added_tokens\": null}"] {
            check_tokenizer(other.as_bytes()).unwrap();
        }
    }
}
