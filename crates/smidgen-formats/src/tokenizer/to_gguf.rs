//! Converts a tokenizer to the metadata of a GGUF file: tokens with their types, merges or scores, and the
//! name of the pre-tokenizer.
//! GGUF stores only the name of the pre-tokenizer, so a tokenizer whose pre-tokenizer has no name is refused.
//! As a check, the metadata is converted back, and the result must give the same ids for texts of many kinds.
//! `tokenizer.json` does not have the scores of SentencePiece; they follow from the order of the merges. Gemma 4 has merges
//! instead.
//! Left out: WordPiece and unigram vocabularies, and normalization tables of SentencePiece.

use std::collections::HashMap;

use serde_json::Value as Json;
use thiserror::Error;

use super::from_gguf::{GEMMA4, from_metadata};
use super::pre_tokenizer::{name_of, supported_names};
use super::token_type::TokenType;
use super::{GgufTokenizerProblem, Tokenizer, TokenizerError};
use crate::gguf::value::{Array, Metadata, Value};

#[derive(Debug, Error)]
pub enum ToGgufProblem {
    #[error("the tokenizer model `{got}` is not supported (supported: BPE)")]
    Model { got: String },
    #[error("the pre-tokenizer has no name in GGUF (supported: {named}); it is {got}", named = supported_names())]
    PreTokenizer { got: String },
    #[error("token {id} is beyond the {vocabulary} rows of the model's embedding")]
    BeyondVocabulary { id: u64, vocabulary: usize },
    #[error("the tokenizer is not the expected JSON: {what}")]
    Json { what: &'static str },
    #[error("the tokenizer would give different tokens as GGUF, for example for {text:?}")]
    Differs { text: &'static str },
    #[error(
        "the tokenizer adds `{text}` to every text, for which GGUF has no key, and there is no chat template with it"
    )]
    Around { text: String },
    #[error(transparent)]
    Gguf(#[from] GgufTokenizerProblem),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Texts that tokenizers treat differently: numbers, code, spaces, lines, scripts, contractions.
const PROBES: [&str; 10] = [
    "Hello, world! It's 3.14159 and I'll pay $1,234,567.89 on 2024-02-29.",
    "The quick brown fox jumps over the lazy dog; DON'T PANIC, they've said.",
    "fn main() {\n    let mut x = vec![1u8; 0xFF];\n\n\n\treturn x[12345];\n}",
    "a  b   c    d\t\te\n f\r\n  g",
    "Grüße aus Köln – naïve café, Ärger über Öl",
    "привет мир, 12 раз",
    "你好，世界。今天是2024年",
    "こんにちは 世界 ٣٤٥ हिन्दी",
    "🙂👩‍👩‍👧 🇩🇪 ½ ²",
    "https://example.org/a_b?c=d&e=%20f#g camelCaseWords snake_case_words",
];

impl Tokenizer {
    /// The `tokenizer.*` keys for a model of this architecture whose embedding has `vocabulary` rows.
    pub fn to_gguf(&self, architecture: &str, vocabulary: usize) -> Result<Metadata, ToGgufProblem> {
        let text = self
            .library
            .to_string(false)
            .map_err(|error| TokenizerError::Serialize { reason: error.to_string() })?;
        let json: Json =
            serde_json::from_str(&text).map_err(|_| ToGgufProblem::Json { what: "it does not parse" })?;
        drop(text);
        let model = &json["model"];
        let sentence_piece = match (model["type"].as_str(), model["byte_fallback"].as_bool()) {
            (Some("BPE"), Some(true)) => true,
            (Some("BPE"), _) => false,
            (got, _) => return Err(ToGgufProblem::Model { got: got.unwrap_or("none").to_string() }),
        };
        let entries = list_tokens(&json, vocabulary, sentence_piece)?;
        let merges = list_merges(model)?;
        let mut metadata = Metadata::default();
        let mut set = |key: &str, value: Value| metadata.set(&format!("tokenizer.ggml.{key}"), value);
        let text = |text: &str| Value::String(text.to_string());
        let has_merges = !sentence_piece || architecture == GEMMA4;
        if sentence_piece {
            set("add_space_prefix", Value::Bool(has_prefix(&json)));
        }
        if !sentence_piece {
            let ignore_merges = model["ignore_merges"] == true;
            let found = name_of(&json["normalizer"], &json["pre_tokenizer"], ignore_merges, architecture);
            set("model", text("gpt2"));
            set("pre", text(found.ok_or_else(|| no_name(&json))?));
        } else if has_merges {
            set("model", text(GEMMA4));
        } else {
            set("model", text("llama"));
            set("pre", text("default"));
            set("scores", Value::Array(Array::F32(scores(&entries, &merges))));
        }
        if has_merges {
            let merges = merges.iter().map(|(left, right)| format!("{left} {right}"));
            set("merges", Value::Array(Array::String(merges.collect())));
        }
        let types = entries.iter().map(|(_, kind)| *kind as i32).collect();
        set("tokens", Value::Array(Array::String(entries.into_iter().map(|(token, _)| token).collect())));
        set("token_type", Value::Array(Array::I32(types)));
        let ids = self.special_ids();
        let roles = [("bos", ids.bos), ("eos", ids.eos), ("unknown", ids.unk), ("padding", ids.pad)];
        for (role, id) in roles {
            if let Some(id) = id {
                set(&format!("{role}_token_id"), Value::U32(id));
            }
        }
        let around = self.around()?;
        set("add_bos_token", Value::Bool(around.has_bos || (sentence_piece && has_merges)));
        set("add_eos_token", Value::Bool(around.has_eos));
        if let Some(template) = self.template_source() {
            metadata.set("tokenizer.chat_template", text(template));
        }
        let template = self.template_source().unwrap_or("");
        if let Some(text) = around.others.filter(|others| !template.contains(others)) {
            return Err(ToGgufProblem::Around { text });
        }
        self.check_against(&metadata, architecture)?;
        Ok(metadata)
    }

    /// What llama.cpp does otherwise with the tokenizer that `to_gguf` writes.
    pub fn gguf_notes(&self, architecture: &str) -> Result<Vec<String>, TokenizerError> {
        let around = self.around()?;
        let others = around.others.map(|others| {
            format!("the tokenizer adds `{others}` to every text; in llama.cpp only the chat template does")
        });
        let is_forced = architecture == GEMMA4 && !around.has_bos;
        let forced = is_forced
            .then(|| format!("llama.cpp adds BOS to every text for `{GEMMA4}`, and the tokenizer does not"));
        Ok(others.into_iter().chain(forced).collect())
    }

    /// The tokens that are added to every text.
    fn around(&self) -> Result<Around, TokenizerError> {
        let ids = self.special_ids();
        let (plain, all) = (self.encode("a", false)?, self.encode("a", true)?);
        let first = all.windows(plain.len().max(1)).position(|ids| ids == plain).unwrap_or(all.len());
        let (before, after) = (&all[..first], all.get(first + plain.len()..).unwrap_or(&[]));
        let has_bos = ids.bos.is_some() && before.first() == ids.bos.as_ref();
        let has_eos = ids.eos.is_some() && after.last() == ids.eos.as_ref();
        let others =
            before[usize::from(has_bos)..].iter().chain(&after[..after.len() - usize::from(has_eos)]);
        let text: String = others.filter_map(|id| self.library.id_to_token(*id)).collect();
        Ok(Around { has_bos, has_eos, others: Some(text).filter(|text| !text.is_empty()) })
    }

    /// Checks that a tokenizer made from the metadata gives the same ids as this one.
    fn check_against(&self, metadata: &Metadata, architecture: &str) -> Result<(), ToGgufProblem> {
        let mut whole = metadata.clone();
        whole.set("general.architecture", Value::String(architecture.to_string()));
        let again = from_metadata(&whole)?;
        drop(whole);
        let is_same_around = self.gguf_notes(architecture)?.is_empty();
        for text in PROBES {
            for add_special in [false, true].into_iter().filter(|added| !added || is_same_around) {
                if self.encode(text, add_special)? != again.encode(text, add_special)? {
                    return Err(ToGgufProblem::Differs { text });
                }
            }
        }
        Ok(())
    }
}

/// The tokens that a tokenizer adds to every text.
struct Around {
    has_bos: bool,
    has_eos: bool,
    /// The text of those between BOS and EOS.
    others: Option<String>,
}

/// Text and type of the token of every row of the embedding. Rows without a token get a placeholder.
fn list_tokens(
    json: &Json,
    vocabulary: usize,
    sentence_piece: bool,
) -> Result<Vec<(String, TokenType)>, ToGgufProblem> {
    let wrong = |what: &'static str| ToGgufProblem::Json { what };
    let mut entries: Vec<(String, TokenType)> =
        (0..vocabulary).map(|id| (format!("[PAD{id}]"), TokenType::Unused)).collect();
    let mut put = |id: Option<u64>, text: &str, kind: TokenType| {
        let id = id.ok_or(wrong("a token has no id"))?;
        let place = usize::try_from(id).ok().and_then(|id| entries.get_mut(id));
        *place.ok_or(ToGgufProblem::BeyondVocabulary { id, vocabulary })? = (text.to_string(), kind);
        Ok::<(), ToGgufProblem>(())
    };
    let is_byte =
        |text: &str| sentence_piece && text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
    for (text, id) in json["model"]["vocab"].as_object().ok_or(wrong("there is no vocabulary"))? {
        let kind = if is_byte(text) { TokenType::Byte } else { TokenType::Normal };
        put(id.as_u64(), text, kind)?;
    }
    let unknown = json["model"]["unk_token"].as_str().filter(|_| sentence_piece);
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let text = token["content"].as_str().ok_or(wrong("an added token has no text"))?;
        let kind = match token["special"] == true {
            true if unknown == Some(text) => TokenType::Unknown,
            true => TokenType::Control,
            false => TokenType::UserDefined,
        };
        put(token["id"].as_u64(), text, kind)?;
    }
    Ok(entries)
}

/// The pairs of tokens that are merged. Older files write a merge as one text with a space, newer ones as a
/// list of two.
fn list_merges(model: &Json) -> Result<Vec<(&str, &str)>, ToGgufProblem> {
    let merges = model["merges"].as_array().into_iter().flatten();
    let pairs = merges.map(|merge| match merge {
        Json::String(text) => text.split_once(' '),
        pair => Some((pair.get(0)?.as_str()?, pair.get(1)?.as_str()?)),
    });
    pairs.collect::<Option<_>>().ok_or(ToGgufProblem::Json { what: "a merge is not a pair of tokens" })
}

/// Pieces that are merged earlier have higher scores. Pieces that no merge produces have the lowest.
fn scores(entries: &[(String, TokenType)], merges: &[(&str, &str)]) -> Vec<f32> {
    let mut ranks: HashMap<String, usize> = HashMap::with_capacity(merges.len());
    for (left, right) in merges {
        let next = ranks.len();
        ranks.entry(format!("{left}{right}")).or_insert(next);
    }
    let least = -(ranks.len() as f32);
    let score = |(text, kind): &(String, TokenType)| match kind {
        TokenType::Normal => ranks.get(text).map_or(least, |rank| -(*rank as f32)),
        _ => 0.0,
    };
    entries.iter().map(score).collect()
}

/// Whether a space is put before every text.
fn has_prefix(json: &Json) -> bool {
    let steps = |step: &Json, list: &str| -> Vec<Json> {
        step[list].as_array().cloned().unwrap_or_else(|| vec![step.clone()])
    };
    let prepends = steps(&json["normalizer"], "normalizers").iter().any(|step| step["type"] == "Prepend");
    let metaspace = steps(&json["pre_tokenizer"], "pretokenizers");
    prepends || metaspace.iter().any(|step| step["type"] == "Metaspace" && step["prepend_scheme"] != "never")
}

fn no_name(json: &Json) -> ToGgufProblem {
    let mut got = format!("{} after {}", json["pre_tokenizer"], json["normalizer"]);
    if got.len() > 300 {
        got = format!("{}…", got.chars().take(300).collect::<String>());
    }
    ToGgufProblem::PreTokenizer { got }
}
