//! Turns tokens into text while they are generated: a piece is returned when no later token can change it.
//!
//! A token may be part of a character, and some tokenizers decode a token differently at the beginning of a text than
//! inside it. So a token is decoded together with the tokens of the piece before it, and text that ends in the
//! replacement character is held back. All pieces together are the text of all tokens.
//! Left out: special tokens, which have no text.

use smidgen_formats::tokenizer::{Tokenizer, TokenizerError};

#[derive(Clone, Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// Tokens from here on are decoded together.
    context: usize,
    /// The text of the tokens from here on has not been returned.
    pending: usize,
}

const BROKEN: char = '\u{fffd}';

impl TextStream {
    /// Adds a token; returns the text that it completes, which may be empty.
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

    /// The text that is still held back.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let (known, text) = self.decode(tokenizer)?;
        self.context = self.pending;
        self.pending = self.ids.len();
        Ok(text[common_length(&known, &text)..].to_string())
    }

    /// Text of the context, and of the context with the pending tokens.
    fn decode(&self, tokenizer: &Tokenizer) -> Result<(String, String), TokenizerError> {
        let known = tokenizer.decode(&self.ids[self.context..self.pending], true)?;
        let text = tokenizer.decode(&self.ids[self.context..], true)?;
        Ok((known, text))
    }
}

/// Length in bytes of the common prefix of two texts, in whole characters.
fn common_length(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
