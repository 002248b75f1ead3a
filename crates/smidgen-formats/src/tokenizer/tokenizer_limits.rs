//! What a `tokenizer.json` may ask for, checked before the library believes it.
//!
//! A tokenizer comes with a model, so it is not trusted. A replacement can make a text a million times as long, a
//! token can have the size of the file, and the library's table of characters must not be empty. The file is looked
//! through once without keeping what it holds.
//! Left out: what is merely wrong, which the library says itself.

use std::cell::Cell;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value as Json};

/// The longest tokens of published vocabularies, runs of spaces, have some hundred bytes.
const MOST_TOKEN_BYTES: usize = 64 << 10;
/// How many times as long all replacements together may make a text; a space becomes three bytes in some.
const MOST_GROWTH: usize = 16;
/// The longest entry of the table of characters of a real model has 33 bytes.
const MOST_CHARACTER_BYTES: usize = 256;
/// Values in a normalizer or decoder.
const MOST_VALUES: usize = 10_000;
/// Errors of this file, apart from those of JSON.
const MARK: &str = "limit: ";

thread_local! {
    static VALUES_LEFT: Cell<usize> = const { Cell::new(0) };
}

/// What is wrong with it, if anything that the library would not survive.
pub(super) fn check_tokenizer(json: &[u8]) -> Result<(), String> {
    VALUES_LEFT.set(MOST_VALUES);
    let outline: Outline = match serde_json::from_slice(json) {
        Ok(outline) => outline,
        Err(error) => {
            let message = error.to_string();
            // Everything else is the library's to say.
            return match message.split_once(MARK) {
                Some((_, limit)) => Err(limit.split(" at line").next().unwrap_or(limit).to_owned()),
                None => Ok(()),
            };
        }
    };
    for (part, name, list) in
        [(&outline.normalizer, "normalizer", "normalizers"), (&outline.decoder, "decoder", "decoders")]
    {
        let Some(Small(part)) = part else { continue };
        let growth = growth_of(part, list)?;
        if growth > MOST_GROWTH {
            return Err(format!(
                "the replacements of its {name} can make a text {growth} times as long, at most {MOST_GROWTH} are allowed"
            ));
        }
    }
    Ok(())
}

/// How many times as long a part can make a text.
fn growth_of(part: &Json, list: &str) -> Result<usize, String> {
    let text = |name: &str| part[name].as_str().unwrap_or_default();
    match text("type") {
        "Sequence" => {
            let parts = part[list].as_array().into_iter().flatten();
            parts
                .map(|part| growth_of(part, list))
                .try_fold(1, |product: usize, growth| Ok(product.saturating_mul(growth?)))
        }
        "Replace" => {
            // A pattern may match nothing, and then matches everywhere.
            let found = part["pattern"]["String"].as_str().map_or(1, |pattern| pattern.len().max(1));
            Ok(text("content").len().div_ceil(found).max(1))
        }
        "Prepend" if text("prepend").len() > MOST_CHARACTER_BYTES => {
            Err("its normalizer puts a very long text before every other".to_owned())
        }
        "Precompiled" => check_characters(text("precompiled_charsmap")).map(|()| 1),
        _ => Ok(1),
    }
}

/// The table of characters of SentencePiece: the size of a search tree, the tree, and texts that end with a zero.
fn check_characters(encoded: &str) -> Result<(), String> {
    let damaged =
        || "the table of characters of its normalizer (`Precompiled`) is empty or damaged".to_owned();
    let table = decode_base64(encoded).ok_or_else(damaged)?;
    let (size, rest) = table.split_at_checked(4).ok_or_else(damaged)?;
    let tree_bytes = size.iter().rev().fold(0, |size, byte| size << 8 | usize::from(*byte));
    let (_, texts) = rest.split_at_checked(tree_bytes).ok_or_else(damaged)?;
    if tree_bytes == 0 || tree_bytes % 4 != 0 {
        return Err(damaged());
    }
    match texts.split(|byte| *byte == 0).any(|text| text.len() > MOST_CHARACTER_BYTES) {
        true => Err("its normalizer (`Precompiled`) replaces a character by a very long text".to_owned()),
        false => Ok(()),
    }
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0u32, 0);
    for sign in text.trim_end_matches('=').bytes() {
        let value = match sign {
            b'A'..=b'Z' => sign - b'A',
            b'a'..=b'z' => sign - b'a' + 26,
            b'0'..=b'9' => sign - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

/// The parts of a `tokenizer.json` that are looked at.
#[derive(Deserialize)]
struct Outline {
    normalizer: Option<Small>,
    decoder: Option<Small>,
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

/// Names of a map, or the first element or `content` of each entry of a list: tokens, none of them too long.
struct Tokens;

impl<'de> Deserialize<'de> for Tokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Tokens, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
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
        deserializer.deserialize_any(Look)
    }
}

/// A text that is short enough.
struct Token;

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Token, D::Error> {
        struct Look;
        impl Visitor<'_> for Look {
            type Value = Token;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a token")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Token, E> {
                match text.len() > MOST_TOKEN_BYTES {
                    true => Err(E::custom(format!(
                        "{MARK}a token has {} bytes, at most {MOST_TOKEN_BYTES} are allowed",
                        text.len()
                    ))),
                    false => Ok(Token),
                }
            }
        }
        deserializer.deserialize_str(Look)
    }
}

/// `["token", -1.5]`, or `{"content": "token", ...}`.
struct TokenEntry;

impl<'de> Deserialize<'de> for TokenEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TokenEntry, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
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
        deserializer.deserialize_any(Look)
    }
}

/// A value of few parts.
struct Small(Json);

impl<'de> Deserialize<'de> for Small {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Small, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Small;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a value")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Small, E> {
                Ok(Small(Json::Bool(value)))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Small, E> {
                Ok(Small(Json::from(value)))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Small, E> {
                Ok(Small(Json::from(value)))
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Small, E> {
                Ok(Small(Number::from_f64(value).map_or(Json::Null, Json::Number)))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Small, E> {
                Ok(Small(Json::from(value)))
            }

            fn visit_unit<E: Error>(self) -> Result<Small, E> {
                Ok(Small(Json::Null))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Small, A::Error> {
                let mut values = Vec::new();
                while let Some(Small(value)) = list.next_element()? {
                    values.push(value);
                    count_value()?;
                }
                Ok(Small(Json::Array(values)))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Small, A::Error> {
                let mut values = Map::new();
                while let Some((name, Small(value))) = map.next_entry()? {
                    values.insert(name, value);
                    count_value()?;
                }
                Ok(Small(Json::Object(values)))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

fn count_value<E: Error>() -> Result<(), E> {
    match VALUES_LEFT.get().checked_sub(1) {
        Some(left) => {
            VALUES_LEFT.set(left);
            Ok(())
        }
        None => {
            Err(E::custom(format!("{MARK}its normalizer and decoder have more than {MOST_VALUES} parts")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(part: Json) -> String {
        check_tokenizer(part.to_string().as_bytes()).unwrap_err()
    }

    fn replace(pattern: &str, content: &str) -> Json {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    #[test]
    fn replacements_that_explode_are_refused() {
        let bomb = json!({"normalizer": replace("a", &"b".repeat(1000))});
        assert_eq!(
            said(bomb),
            "the replacements of its normalizer can make a text 1000 times as long, at most 16 are allowed"
        );
        let steps = [replace("a", "bbbbb"), replace("b", "ccccc"), replace("c", "ddddd")];
        let chain = json!({"normalizer": {"type": "Sequence", "normalizers": steps}});
        assert!(said(chain).contains("125 times"));
        let decoder = json!({"decoder": {"type": "Sequence", "decoders": [replace("a", &"b".repeat(99))]}});
        assert!(said(decoder).contains("its decoder can make a text 99 times"));
        let regex =
            json!({"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x".repeat(20)}});
        assert!(said(regex).contains("20 times"));
        assert!(
            said(json!({"normalizer": {"type": "Prepend", "prepend": "x".repeat(999)}}))
                .contains("very long")
        );
        let usual = json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), replace("``", "\""), {"type": "NFKC"}]});
        check_tokenizer(json!({"normalizer": usual}).to_string().as_bytes()).unwrap();
    }

    #[test]
    fn tables_of_characters_are_whole() {
        let with =
            |table: &str| json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}});
        // A tree of four bytes and the texts `a` and none.
        check_tokenizer(with("BAAAAAAAAABhAAA=").to_string().as_bytes()).unwrap();
        for table in ["", "AAAA", "AAAAAA==", "BAAAAA==", "no base 64", "AwAAAAAAAGEA"] {
            assert!(said(with(table)).contains("is empty or damaged"), "{table}");
        }
        let mut long = vec![4, 0, 0, 0, 0, 0, 0, 0];
        long.extend([b'a'; 300]);
        let signs = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut encoded = String::new();
        for three in long.chunks(3) {
            let bits =
                three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            (0..=three.len()).for_each(|i| encoded.push(signs[(bits >> (18 - 6 * i)) as usize & 63] as char));
        }
        assert!(said(with(&encoded)).contains("by a very long text"));
    }

    #[test]
    fn tokens_without_end_are_refused() {
        let long = "x".repeat(100_000);
        let expected = "a token has 100000 bytes, at most 65536 are allowed";
        assert_eq!(said(json!({"model": {"vocab": {"a": 0, &long: 1}}})), expected);
        assert_eq!(said(json!({"model": {"vocab": [["a", 0.0], [&long, -1.5]]}})), expected);
        assert_eq!(said(json!({"added_tokens": [{"id": 0, "content": &long}]})), expected);
        let many = vec![json!([]); 20_000];
        assert!(said(json!({"normalizer": many})).contains("more than 10000 parts"));
        for other in ["", "[]", "{\"model\": 3}", "{\"model\": {\"vocab\": 3}}", "{\"added_tokens\": null}"] {
            check_tokenizer(other.as_bytes()).unwrap();
        }
    }
}
