//! The types of tokens in a GGUF file, by their numbers in `tokenizer.ggml.token_type`.
//!
//! Control, unknown and user-defined tokens are matched in the text directly; the others result from merging.

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl TokenType {
    pub fn from_number(number: i32) -> Option<TokenType> {
        use TokenType::{Byte, Control, Normal, Unknown, Unused, UserDefined};
        [Normal, Unknown, Control, UserDefined, Unused, Byte].into_iter().find(|kind| *kind as i32 == number)
    }
}
