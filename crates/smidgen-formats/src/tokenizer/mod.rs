//! Converts text to token ids and back exactly as the model's own tokenizer does.
//! A Hugging Face folder and the metadata of a GGUF file both become a `tokenizer.json` for the `tokenizers`
//! library, which does the work.
//! A `Tokenizer` also has the special ids and the chat template, and can be saved as a folder that
//! transformers loads.
//! Left out: training tokenizers, and `tokenizer.model` files without a `tokenizer.json`.

pub mod chat_template;
pub mod copy;
pub mod from_folder;
pub mod from_gguf;
mod merges;
mod pre_tokenizer;
pub mod prompt_file;
mod python;
mod python_operators;
mod python_types;
pub mod save;
mod template_allowance;
mod template_limits;
mod template_rewrite;
pub mod to_gguf;
mod token_type;
mod tokenizer_limits;
mod tokenizer_parts;

use std::cell::Cell;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::PathBuf;
use std::sync::Once;

use serde_json::{Map, Value as Json};
use thiserror::Error;

use crate::gguf::MetadataProblem;
use crate::json_file::JsonFileError;
use crate::whole_file::WriteFileError;
use chat_template::{ChatTemplate, ChatTemplateError};

#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error(transparent)]
    File(#[from] JsonFileError),
    #[error("`{}` has no `tokenizer.json`; save the tokenizer with transformers to get one", folder.display())]
    NoTokenizerJson { folder: PathBuf },
    #[error("`{}` is not the expected JSON: {what}", path.display())]
    Config { path: PathBuf, what: String },
    #[error("`{}` holds no usable tokenizer: {reason}", path.display())]
    Unusable { path: PathBuf, reason: String },
    #[error("`{}`: {problem}", path.display())]
    Gguf { path: PathBuf, problem: GgufTokenizerProblem },
    #[error("the text could not be tokenized: {reason}")]
    Encode { reason: String },
    #[error("{count} tokens could not be decoded: {reason}")]
    Decode { count: usize, reason: String },
    #[error("the tokenizer could not be written as JSON: {reason}")]
    Serialize { reason: String },
    #[error(transparent)]
    Write(#[from] WriteFileError),
}

/// Errors in the tokenizer of a GGUF file's metadata.
#[derive(Debug, Error, PartialEq)]
pub enum GgufTokenizerProblem {
    #[error(transparent)]
    Metadata(#[from] MetadataProblem),
    #[error("the tokenizer model `{got}` is not supported (supported: gpt2, llama, gemma4)")]
    Model { got: String },
    #[error("the pre-tokenizer `{got}` is not supported (supported: {supported})")]
    PreTokenizer { got: String, supported: String },
    #[error(
        "the file does not name its pre-tokenizer (`tokenizer.ggml.pre`), because it was made by an old converter; \
         convert the model again"
    )]
    NoPreTokenizer,
    #[error("`{key}` has {got} elements for {tokens} tokens")]
    Length { key: &'static str, got: usize, tokens: usize },
    #[error("`{key}` is {id}, there are {tokens} tokens")]
    IdBeyondTokens { key: String, id: u32, tokens: usize },
    #[error("tokens {first} and {second} are both {text:?}")]
    SameToken { text: String, first: u32, second: u32 },
    #[error("token {id} has the unknown type {got} (known: 1 to 6)")]
    TokenType { id: usize, got: i32 },
    #[error("merge {position} is {got:?}, not two tokens with a space between")]
    Merge { position: usize, got: String },
    #[error("`{flag}` is true and there is no `{key}`")]
    NoToken { flag: &'static str, key: &'static str },
    #[error("the tokenizer could not be built: {reason}")]
    Build { reason: String },
}

/// Special tokens by their role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialIds {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct Tokenizer {
    library: tokenizers::Tokenizer,
    special_ids: SpecialIds,
    /// The object of `tokenizer_config.json`, without a chat template.
    config: Map<String, Json>,
    template: Option<String>,
}

impl Tokenizer {
    /// The ids of a text. Special tokens in the text are recognized. `add_special` also adds those that the
    /// model expects around every text; a chat template writes them itself.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = catch_panics(|| self.library.encode_fast(text, add_special))
            .map_err(|reason| TokenizerError::Encode { reason })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids, and the byte range of the text that each covers. Added special tokens have empty ranges.
    pub fn encode_with_ranges(
        &self,
        text: &str,
        add_special: bool,
    ) -> Result<(Vec<u32>, Vec<std::ops::Range<usize>>), TokenizerError> {
        let encoding = catch_panics(|| self.library.encode(text, add_special))
            .map_err(|reason| TokenizerError::Encode { reason })?;
        let ranges = encoding.get_offsets().iter().map(|&(begin, end)| begin..end).collect();
        Ok((encoding.get_ids().to_vec(), ranges))
    }

    /// The text of the ids, with or without special tokens. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        catch_panics(|| self.library.decode(ids, skip_special))
            .map_err(|reason| TokenizerError::Decode { count: ids.len(), reason })
    }

    pub fn special_ids(&self) -> SpecialIds {
        self.special_ids
    }

    /// Ids of all special tokens, including EOS.
    pub fn special_token_ids(&self) -> HashSet<u32> {
        let added = self.library.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id);
        special.chain(self.special_ids.eos).collect()
    }

    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    pub fn token(&self, id: u32) -> Option<String> {
        self.library.id_to_token(id)
    }

    /// The Jinja source of the model's chat template.
    pub fn template_source(&self) -> Option<&str> {
        self.template.as_deref()
    }

    /// The model's chat template with its special tokens, if it has one.
    pub fn chat_template(&self) -> Option<Result<ChatTemplate, ChatTemplateError>> {
        let source = self.template.as_deref()?;
        Some(ChatTemplate::new(source, self.special_texts()))
    }

    /// The texts of `bos_token` and the like, which templates use as variables.
    pub fn special_texts(&self) -> Map<String, Json> {
        let texts = self.config.iter().filter_map(|(key, value)| {
            let text = key.ends_with("_token").then(|| token_text(value)).flatten()?;
            Some((key.clone(), Json::from(text)))
        });
        texts.collect()
    }
}

/// The library panics on some damaged tokenizers. This turns the panic into an error.
/// The panic prints nothing: its words are about the library's source.
fn catch_panics<T>(work: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, String> {
    thread_local! {
        static IS_QUIET: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !IS_QUIET.get() {
                usual(panic);
            }
        }));
    });
    let was_quiet = IS_QUIET.replace(true);
    let done = catch_unwind(AssertUnwindSafe(work));
    IS_QUIET.set(was_quiet);
    match done {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the `tokenizers` library panicked, so the tokenizer is damaged".to_owned()),
    }
}

/// A token in a config: its text, or an object that has it as `content`.
fn token_text(value: &Json) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

fn special_ids_of(library: &tokenizers::Tokenizer, config: &Map<String, Json>) -> SpecialIds {
    let id = |key: &str| config.get(key).and_then(token_text).and_then(|text| library.token_to_id(text));
    SpecialIds { bos: id("bos_token"), eos: id("eos_token"), unk: id("unk_token"), pad: id("pad_token") }
}
