//! Rebuilds the original `tokenizer.json` from the metadata of a GGUF file.
//! There are three kinds: `gpt2`, byte-level BPE with merges, `llama`, SentencePiece with scores, from which the
//! merges are derived, and `gemma4`, pieces of SentencePiece with merges. Control and user-defined tokens are matched in the text before merging.
//! All tokens are in the vocabulary, so ids are those of the file.
//! Left out: WordPiece, unigram and RWKV vocabularies, and the normalization tables of SentencePiece.

use std::collections::HashMap;

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use super::merges::merges_from_scores;
use super::pre_tokenizer::{PreTokenizer, pre_tokenizer, split_by, supported_names};
use super::token_type::TokenType;
use super::{GgufTokenizerProblem, Tokenizer, TokenizerError, special_ids_of};
use crate::gguf::value::required;
use crate::gguf::{GgufFile, Metadata};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
/// The tokenizer model of Gemma 4.
pub(super) const GEMMA4: &str = "gemma4";
/// How SentencePiece writes a space.
const SPACE: &str = "▁";

impl Tokenizer {
    pub fn from_gguf(file: &GgufFile) -> Result<Tokenizer, TokenizerError> {
        from_metadata(file.metadata())
            .map_err(|problem| TokenizerError::Gguf { path: file.path().to_path_buf(), problem })
    }
}

/// Builds the tokenizer that the metadata describes.
pub fn from_metadata(metadata: &Metadata) -> Result<Tokenizer, GgufTokenizerProblem> {
    const MODEL: &str = "tokenizer.ggml.model";
    let model = required(MODEL, metadata.text(MODEL))?;
    let vocabulary = Vocabulary::read(metadata)?;
    let parts = match model {
        "gpt2" => byte_level_parts(metadata, &vocabulary)?,
        "llama" => {
            let prefix = metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
            sentence_piece_parts(prefix, scored_merges(metadata, &vocabulary)?)
        }
        // llama.cpp adds BOS whatever the file says, and merges no line ends with other letters.
        GEMMA4 => Parts {
            always_adds_bos: true,
            pre_tokenizer: split_by(r"\n+"),
            ..sentence_piece_parts(false, listed_merges(metadata, &vocabulary)?)
        },
        got => return Err(GgufTokenizerProblem::Model { got: got.to_string() }),
    };
    let special = Special::read(metadata, &vocabulary, [parts.add_bos, parts.always_adds_bos])?;
    let strips_right = parts.sentence_piece && metadata.text("general.architecture")? == Some("phi3");
    let file = TokenizerFile {
        version: "1.0",
        truncation: (),
        padding: (),
        added_tokens: vocabulary.added_tokens(strips_right),
        normalizer: parts.normalizer,
        pre_tokenizer: parts.pre_tokenizer,
        post_processor: special.post_processor(),
        decoder: parts.decoder,
        model: ModelJson {
            kind: "BPE",
            dropout: (),
            unk_token: if parts.sentence_piece { special.text("unk_token") } else { None },
            continuing_subword_prefix: (),
            end_of_word_suffix: (),
            fuse_unk: parts.sentence_piece,
            byte_fallback: parts.sentence_piece,
            ignore_merges: parts.ignore_merges,
            vocab: VocabularyJson(vocabulary.tokens),
            merges: MergesJson { tokens: vocabulary.tokens, merges: &parts.merges },
        },
    };
    let build = |reason: String| GgufTokenizerProblem::Build { reason };
    let json = serde_json::to_vec(&file).map_err(|error| build(error.to_string()))?;
    let library = tokenizers::Tokenizer::from_bytes(&json).map_err(|error| build(error.to_string()))?;
    let config = special.config(metadata)?;
    let template = metadata.text("tokenizer.chat_template")?.map(str::to_string);
    Ok(Tokenizer { special_ids: special_ids_of(&library, &config), library, config, template })
}

struct Vocabulary<'a> {
    tokens: &'a [String],
    types: Vec<TokenType>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Vocabulary<'a>, GgufTokenizerProblem> {
        let tokens = required(TOKENS, metadata.texts(TOKENS))?;
        let types = match metadata.i32s(TYPES)? {
            None => vec![TokenType::Normal; tokens.len()],
            Some(numbers) if numbers.len() != tokens.len() => {
                let (got, tokens) = (numbers.len(), tokens.len());
                return Err(GgufTokenizerProblem::Length { key: TYPES, got, tokens });
            }
            Some(numbers) => {
                let kind = |(id, &got): (usize, &i32)| {
                    TokenType::from_number(got).ok_or(GgufTokenizerProblem::TokenType { id, got })
                };
                numbers.iter().enumerate().map(kind).collect::<Result<_, _>>()?
            }
        };
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens) {
            if let Some(first) = ids.insert(token.as_str(), id) {
                return Err(GgufTokenizerProblem::SameToken { text: token.clone(), first, second: id });
            }
        }
        Ok(Vocabulary { tokens, types, ids })
    }

    /// Tokens that are matched in the text before merging. `strips_right` makes them absorb the space behind
    /// them.
    fn added_tokens(&self, strips_right: bool) -> Vec<AddedTokenJson<'a>> {
        // Phi 3 does not strip the space after these tokens.
        const KEEP: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];
        let added = self.tokens.iter().zip(&self.types).enumerate().filter_map(|(id, (content, kind))| {
            let special = match kind {
                TokenType::Control | TokenType::Unknown => true,
                TokenType::UserDefined => false,
                TokenType::Normal | TokenType::Unused | TokenType::Byte => return None,
            };
            Some(AddedTokenJson {
                id,
                content,
                single_word: false,
                lstrip: false,
                rstrip: strips_right && !KEEP.contains(&content.as_str()),
                normalized: false,
                special,
            })
        });
        // An empty token would match at every position.
        added.filter(|token| !token.content.is_empty()).collect()
    }
}

/// The settings that differ between the kinds.
struct Parts {
    sentence_piece: bool,
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    ignore_merges: bool,
    merges: Vec<(u32, u32)>,
    /// Whether BOS is added if the file does not say, and even if it says no.
    add_bos: bool,
    always_adds_bos: bool,
}

fn byte_level_parts(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Result<Parts, GgufTokenizerProblem> {
    let name = metadata.text("tokenizer.ggml.pre")?.ok_or(GgufTokenizerProblem::NoPreTokenizer)?;
    let Some(PreTokenizer { normalizer, pre_tokenizer, ignore_merges, add_bos }) = pre_tokenizer(name) else {
        let (got, supported) = (name.to_string(), supported_names());
        return Err(GgufTokenizerProblem::PreTokenizer { got, supported });
    };
    let merges = listed_merges(metadata, vocabulary)?;
    let decoder =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    Ok(Parts {
        sentence_piece: false,
        normalizer,
        pre_tokenizer,
        decoder,
        ignore_merges,
        merges,
        add_bos,
        always_adds_bos: false,
    })
}

fn listed_merges(
    metadata: &Metadata,
    vocabulary: &Vocabulary<'_>,
) -> Result<Vec<(u32, u32)>, GgufTokenizerProblem> {
    let mut merges = Vec::new();
    for (position, merge) in required(MERGES, metadata.texts(MERGES))?.iter().enumerate() {
        let id = |token: &str| vocabulary.ids.get(token).copied();
        let parts = merge.split_once(' ').and_then(|(left, right)| Some((id(left)?, id(right)?)));
        let wrong = || GgufTokenizerProblem::Merge { position, got: merge.clone() };
        merges.push(parts.ok_or_else(wrong)?);
    }
    Ok(merges)
}

fn scored_merges(
    metadata: &Metadata,
    vocabulary: &Vocabulary<'_>,
) -> Result<Vec<(u32, u32)>, GgufTokenizerProblem> {
    let scores = required(SCORES, metadata.f32s(SCORES))?;
    if scores.len() != vocabulary.tokens.len() {
        let (got, tokens) = (scores.len(), vocabulary.tokens.len());
        return Err(GgufTokenizerProblem::Length { key: SCORES, got, tokens });
    }
    let mergeable = |id: usize| vocabulary.types[id] == TokenType::Normal;
    Ok(merges_from_scores(vocabulary.tokens, scores, mergeable))
}

fn sentence_piece_parts(prefix: bool, merges: Vec<(u32, u32)>) -> Parts {
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Parts {
        sentence_piece: true,
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Json::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        ignore_merges: false,
        merges,
        add_bos: true,
        always_adds_bos: false,
    }
}

/// Special tokens by their role, and those that are added around every text.
struct Special<'a> {
    /// Key in `tokenizer_config.json`, id and text.
    tokens: Vec<(&'static str, u32, &'a str)>,
    begin: Option<(u32, &'a str)>,
    end: Option<(u32, &'a str)>,
}

impl<'a> Special<'a> {
    fn read(
        metadata: &Metadata,
        vocabulary: &Vocabulary<'a>,
        [default_add_bos, always_adds_bos]: [bool; 2],
    ) -> Result<Special<'a>, GgufTokenizerProblem> {
        const ROLES: [(&str, &str); 6] = [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("sep_token", "seperator"),
            ("pad_token", "padding"),
            ("mask_token", "mask"),
        ];
        let mut tokens = Vec::new();
        for (name, role) in ROLES {
            let key = format!("tokenizer.ggml.{role}_token_id");
            let Some(id) = metadata.token_id(&key)? else { continue };
            let Some(text) = vocabulary.tokens.get(id as usize) else {
                let tokens = vocabulary.tokens.len();
                return Err(GgufTokenizerProblem::IdBeyondTokens { key, id, tokens });
            };
            tokens.push((name, id, text.as_str()));
        }
        let around = |flag, key, name, default| -> Result<Option<(u32, &'a str)>, GgufTokenizerProblem> {
            let is_forced = always_adds_bos && name == "bos_token";
            if !metadata.flag(flag)?.unwrap_or(default) && !is_forced {
                return Ok(None);
            }
            match tokens.iter().find(|(known, ..)| *known == name) {
                Some(&(_, id, text)) => Ok(Some((id, text))),
                // The default is ignored if the file has no such token.
                None if metadata.get(flag).is_none() => Ok(None),
                None => Err(GgufTokenizerProblem::NoToken { flag, key }),
            }
        };
        let begin = around(
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.bos_token_id",
            "bos_token",
            default_add_bos,
        )?;
        let end = around("tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", "eos_token", false)?;
        Ok(Special { tokens, begin, end })
    }

    fn text(&self, name: &str) -> Option<&'a str> {
        self.tokens.iter().find(|(known, ..)| *known == name).map(|&(.., text)| text)
    }

    fn post_processor(&self) -> Json {
        if self.begin.is_none() && self.end.is_none() {
            return Json::Null;
        }
        let special =
            |(_, text): (u32, &str), part: u32| json!({"SpecialToken": {"id": text, "type_id": part}});
        let around = |part: u32, name: &str| -> Vec<Json> {
            let begin = self.begin.map(|token| special(token, part));
            let end = self.end.map(|token| special(token, part));
            let text = json!({"Sequence": {"id": name, "type_id": part}});
            begin.into_iter().chain([text]).chain(end).collect()
        };
        let tokens: Map<String, Json> = (self.begin.into_iter().chain(self.end))
            .map(|(id, text)| (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]})))
            .collect();
        let pair: Vec<Json> = around(0, "A").into_iter().chain(around(1, "B")).collect();
        json!({
            "type": "TemplateProcessing", "single": around(0, "A"), "pair": pair, "special_tokens": tokens,
        })
    }

    /// The `tokenizer_config.json`.
    fn config(&self, metadata: &Metadata) -> Result<Map<String, Json>, GgufTokenizerProblem> {
        let mut config = Map::new();
        for (name, _, text) in &self.tokens {
            config.insert(name.to_string(), json!(text));
        }
        config.insert("add_bos_token".into(), json!(self.begin.is_some()));
        config.insert("add_eos_token".into(), json!(self.end.is_some()));
        config.insert("clean_up_tokenization_spaces".into(), json!(false));
        if let Some(architecture) = metadata.text("general.architecture")?
            && let Some(length) = metadata.whole(&format!("{architecture}.context_length"))?
        {
            config.insert("model_max_length".into(), json!(length));
        }
        // This class uses `tokenizer.json` unchanged; classes of model families would modify it.
        config.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
        Ok(config)
    }
}

/// `tokenizer.json`. It borrows from the metadata, because copies of the vocabulary would be large.
#[derive(Serialize)]
struct TokenizerFile<'a> {
    version: &'static str,
    truncation: (),
    padding: (),
    added_tokens: Vec<AddedTokenJson<'a>>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Json,
    decoder: Json,
    model: ModelJson<'a>,
}

#[derive(Serialize)]
struct AddedTokenJson<'a> {
    id: usize,
    content: &'a String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct ModelJson<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: (),
    unk_token: Option<&'a str>,
    continuing_subword_prefix: (),
    end_of_word_suffix: (),
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: VocabularyJson<'a>,
    merges: MergesJson<'a>,
}

struct VocabularyJson<'a>(&'a [String]);

impl Serialize for VocabularyJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (id, token) in self.0.iter().enumerate() {
            map.serialize_entry(token, &id)?;
        }
        map.end()
    }
}

struct MergesJson<'a> {
    tokens: &'a [String],
    merges: &'a [(u32, u32)],
}

impl Serialize for MergesJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.merges.len()))?;
        for &(left, right) in self.merges {
            seq.serialize_element(&[&self.tokens[left as usize], &self.tokens[right as usize]])?;
        }
        seq.end()
    }
}
