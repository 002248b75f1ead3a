//! Tokens to text as they come: a piece is handed out once nothing that follows can change it.
//!
//! A token may be part of a character, and some tokenizers write a token differently at the beginning of a text than
//! inside it. So a token is decoded together with those of the piece before it, and text that ends in the mark for
//! broken UTF-8 is held back. All pieces together are the text of all tokens.
//! Left out: special tokens, which are not text.

use smidgen_formats::tokenizer::{Tokenizer, TokenizerError};

#[derive(Clone, Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// The tokens from here on are decoded again, ...
    context: usize,
    /// ... and those from here on are not handed out.
    pending: usize,
}

const BROKEN: char = '\u{fffd}';

impl TextStream {
    /// The text that the token completes; empty where it completes none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let (known, text) = self.decode(tokenizer)?;
        if text.len() <= known.len() || text.ends_with(BROKEN) {
            return Ok(String::new());
        }
        let piece = text[common_length(&known, &text)..].to_string();
        self.context = self.pending;
        self.pending = self.ids.len();
        Ok(piece)
    }

    /// What is still held back, as it is.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let (known, text) = self.decode(tokenizer)?;
        self.context = self.pending;
        self.pending = self.ids.len();
        Ok(text[common_length(&known, &text)..].to_string())
    }

    /// Text of the context alone, and with what is pending.
    fn decode(&self, tokenizer: &Tokenizer) -> Result<(String, String), TokenizerError> {
        let known = tokenizer.decode(&self.ids[self.context..self.pending], true)?;
        let text = tokenizer.decode(&self.ids[self.context..], true)?;
        Ok((known, text))
    }
}

/// Bytes that two texts begin with alike, at a character's end.
fn common_length(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
