//! Checks a `tokenizer.json` for limits before the library reads it.
//!
//! A tokenizer is downloaded with a model, so it is not trusted. A replacement can make a text a million
//! times as long, a token can have the size of the file, and the library cannot handle an empty table of
//! characters. The file is parsed without keeping its contents. The library takes the last of several values of
//! a key, so a repeated key could hide a value from the check.
//! Left out: other errors, which the library reports itself.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::tokenizer_parts::{CHAINS, Steps};

/// The longest tokens of published vocabularies, runs of spaces, have a few hundred bytes.
const MOST_TOKEN_BYTES: usize = 64 << 10;
/// All tokens of a vocabulary, and all added ones: the library takes up to a hundred times their bytes. Vocabularies of
/// 262,144 tokens have 3 MB, and up to seven thousand tokens are added to them.
const MOST_VOCABULARY_BYTES: usize = 16 << 20;
const MOST_ADDED_BYTES: usize = 2 << 20;
/// What the model puts before or after a part of a word.
const MOST_AFFIX_BYTES: usize = 256;
/// Values in all steps together. Parsed, each takes many times its size in the file.
const MOST_VALUES: usize = 10_000;
/// Prefix of this file's errors, which distinguishes them from errors of the JSON parser.
const MARK: &str = "limit: ";

/// Refuses a tokenizer that the library would not survive.
pub(super) fn check_tokenizer(json: &[u8]) -> Result<(), String> {
    let mut found = Found::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    if let Err(error) = (Walk { place: Section::File, found: &mut found }).deserialize(&mut reader) {
        let message = error.to_string();
        // The library reports everything else.
        return match message.split_once(MARK) {
            Some((_, limit)) => Err(limit.split(" at line").next().unwrap_or(limit).to_owned()),
            None => Ok(()),
        };
    }
    for (what, bytes, most) in [
        ("added tokens", found.added_bytes, MOST_ADDED_BYTES),
        ("vocabulary", found.vocabulary_bytes, MOST_VOCABULARY_BYTES),
    ] {
        if bytes > most {
            return Err(format!("the texts of its {what} have {bytes} bytes, at most {most} are allowed"));
        }
    }
    let mut values = 0;
    let mut steps = Steps::default();
    for ((name, list), part) in CHAINS.into_iter().zip(found.chains) {
        let Some(part) = part.map(RawValue::get) else { continue };
        // Every value but the first follows one of these characters.
        values += part.matches(['[', '{', ',']).count();
        if values > MOST_VALUES {
            return Err(format!("its steps have more than {MOST_VALUES} parts"));
        }
        // JSON that nests too deeply is an error in the library too.
        let Ok(part) = serde_json::from_str::<Json>(part) else { return Ok(()) };
        steps.check(name, list, &part)?;
    }
    Ok(())
}

/// What the walk through the file found.
#[derive(Default)]
struct Found<'de> {
    chains: [Option<&'de RawValue>; CHAINS.len()],
    added_bytes: usize,
    vocabulary_bytes: usize,
}

/// A place in the file that is checked. A vocabulary is a map whose keys are tokens, or a list of entries.
#[derive(Clone, Copy)]
enum Section {
    File,
    Model,
    Vocabulary,
    AddedTokens,
    /// `["token", -1.5]`, or `{"content": "token", ...}`; whether it is an added one.
    Entry(bool),
    Token(bool),
    Affix,
}

/// Reads the value at a place without keeping it.
struct Walk<'w, 'de> {
    place: Section,
    found: &'w mut Found<'de>,
}

impl<'de> Walk<'_, 'de> {
    fn to(&mut self, place: Section) -> Walk<'_, 'de> {
        Walk { place, found: self.found }
    }

    /// The place of a value by its key, if it is checked.
    fn inside(&self, key: &str) -> Option<Section> {
        match (self.place, key) {
            (Section::File, "model") => Some(Section::Model),
            (Section::File, "added_tokens") => Some(Section::AddedTokens),
            (Section::Model, "vocab") => Some(Section::Vocabulary),
            (Section::Model, "continuing_subword_prefix" | "end_of_word_suffix") => Some(Section::Affix),
            (Section::Entry(is_added), "content") => Some(Section::Token(is_added)),
            _ => None,
        }
    }

    fn count<E: Error>(&mut self, text: &str) -> Result<(), E> {
        let bytes = text.len();
        match self.place {
            Section::Affix if bytes > MOST_AFFIX_BYTES => Err(E::custom(format!(
                "{MARK}the model adds {bytes} bytes to parts of words, at most {MOST_AFFIX_BYTES} are allowed"
            ))),
            Section::Token(_) if bytes > MOST_TOKEN_BYTES => Err(E::custom(format!(
                "{MARK}a token has {bytes} bytes, at most {MOST_TOKEN_BYTES} are allowed"
            ))),
            Section::Token(true) => {
                self.found.added_bytes += bytes;
                Ok(())
            }
            Section::Token(false) => {
                self.found.vocabulary_bytes += bytes;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Walk<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

/// A value of another type is none of ours: the library reports it.
impl<'de> Visitor<'de> for Walk<'_, 'de> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a part of a tokenizer")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: Error>(mut self, text: &str) -> Result<(), E> {
        self.count(text)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        match self.place {
            Section::Vocabulary | Section::AddedTokens => {
                let is_added = matches!(self.place, Section::AddedTokens);
                while list.next_element_seed(self.to(Section::Entry(is_added)))?.is_some() {}
            }
            Section::Entry(is_added) => {
                list.next_element_seed(self.to(Section::Token(is_added)))?;
            }
            _ => {}
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut seen: Vec<String> = Vec::new();
        while let Some(key) = map.next_key::<Cow<'_, str>>()? {
            if let Section::Vocabulary | Section::AddedTokens = self.place {
                self.to(Section::Token(matches!(self.place, Section::AddedTokens)))
                    .count::<A::Error>(&key)?;
            }
            let inside = self.inside(&key);
            let chain =
                CHAINS.iter().position(|(name, _)| *name == key && matches!(self.place, Section::File));
            if inside.is_some() || chain.is_some() {
                if seen.iter().any(|known| *known == key) {
                    let prefix = if let Section::Model = self.place { "model." } else { "" };
                    return Err(A::Error::custom(format!("{MARK}it has the key `{prefix}{key}` twice")));
                }
                seen.push(key.into_owned());
            }
            match (inside, chain) {
                (Some(place), _) => map.next_value_seed(self.to(place))?,
                (None, Some(index)) => self.found.chains[index] = map.next_value()?,
                (None, None) => map.next_value::<IgnoredAny>().map(|_| ())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD_NO_PAD;
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
            "its normalizer can make a text 1000 times as long, at most 16 times is allowed"
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

    #[test]
    fn chains_that_multiply_a_text_are_refused() {
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let chain =
            |name: &str, list: &str, steps: Vec<Json>| json!({name: {"type": "Sequence", list: steps}});
        let many = refused(chain("pre_tokenizer", "pretokenizers", vec![bytes.clone(); 40]));
        assert!(many.starts_with("its pre_tokenizer can make a text 1099511627776 times as long"), "{many}");
        let nested = (0..40)
            .fold(bytes.clone(), |inner, _| json!({"type": "Sequence", "pretokenizers": [inner, bytes]}));
        assert!(refused(json!({"pre_tokenizer": nested})).contains("nested more than 4 deep"));
        let together = json!({"normalizer": {"type": "Sequence", "normalizers": vec![json!({"type": "ByteLevel"}); 3]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": vec![bytes.clone(); 2]}});
        assert!(refused(together).contains("its pre_tokenizer can make a text 32 times as long"));
        let splits = vec![json!({"type": "Digits", "individual_digits": true}); 65];
        assert!(refused(chain("pre_tokenizer", "pretokenizers", splits)).contains("more than 64 steps"));
        assert!(
            refused(json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}})).contains("no characters")
        );
        let usual = vec![
            json!({"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": false}),
            bytes,
        ];
        check_tokenizer(chain("pre_tokenizer", "pretokenizers", usual).to_string().as_bytes()).unwrap();
    }

    #[test]
    fn post_processors_that_copy_texts_or_name_nothing_are_refused() {
        let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let special = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        let with = |single: Vec<Json>, ids: usize| {
            json!({"post_processor": {"type": "TemplateProcessing", "single": single, "pair": [],
                "special_tokens": {"<s>": {"id": "<s>", "ids": vec![0; ids], "tokens": vec!["<s>"; ids]}}}})
        };
        check_tokenizer(with(vec![special.clone(), text("A")], 1).to_string().as_bytes()).unwrap();
        assert!(refused(with(vec![text("A"); 17], 1)).contains("17 times as long"));
        assert!(refused(with(vec![text("A"), text("B")], 1)).contains("has a second text in `single`"));
        assert!(refused(with(vec![special.clone(); 65], 1)).contains("adds more than 64 tokens"));
        assert!(refused(with(vec![special], 1_000)).contains("adds more than 64 tokens"));
        let unknown = json!({"SpecialToken": {"id": "</s>", "type_id": 0}});
        assert!(refused(with(vec![unknown], 1)).contains("does not define"));
        let mut uneven = with(vec![], 2);
        uneven["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([1]);
        assert!(refused(uneven).contains("another number of ids"));
        let chain = json!({"post_processor": {"type": "Sequence",
            "processors": vec![with(vec![text("A"); 4], 1)["post_processor"].clone(); 3]}});
        assert!(refused(chain).contains("64 times as long"));
    }

    #[test]
    fn vocabularies_with_too_much_text_are_refused() {
        let token = |index: usize| format!("{index}{}", "x".repeat(60_000));
        let added: Vec<Json> = (0..40).map(|index| json!({"id": index, "content": token(index)})).collect();
        assert!(
            refused(json!({"added_tokens": added})).starts_with("the texts of its added tokens have 24000")
        );
        let vocabulary: serde_json::Map<String, Json> =
            (0..300).map(|index| (token(index), json!(index))).collect();
        assert!(
            refused(json!({"model": {"vocab": vocabulary}}))
                .starts_with("the texts of its vocabulary have 18000")
        );
        let affix = json!({"model": {"vocab": {}, "continuing_subword_prefix": "x".repeat(999)}});
        assert_eq!(refused(affix), "the model adds 999 bytes to parts of words, at most 256 are allowed");
    }
}
