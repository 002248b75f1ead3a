//! Checks the steps of a tokenizer (normalizer, pre-tokenizer, post-processor, decoder) before the library builds them.
//!
//! Steps are chained, so what each one adds to a text is multiplied: forty byte-level steps make a text 2^40 times as
//! long. The fields of a step decide what it is, because the library recognizes by them a step without a type or with
//! an unknown one.
//! Left out: tokens and vocabularies, which `tokenizer_limits.rs` checks.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::Value as Json;

/// By how much all steps together may lengthen a text. Some real ones turn a space into three bytes.
const MOST_GROWTH: usize = 16;
/// The longest entry in the table of characters of a real model has 33 bytes.
const MOST_CHARACTER_BYTES: usize = 256;
/// Steps in a chain, and chains in chains; published tokenizers have up to twenty steps and one level.
const MOST_STEPS: usize = 64;
const MOST_LEVELS: usize = 4;
const MOST_PATTERN_BYTES: usize = 64 << 10;
/// Pieces of the text around a sequence, tokens of a special token, and all tokens that are added.
const MOST_PIECES: usize = 64;

/// The fields of a file that hold steps, with the names of the lists of a chain.
pub(super) const CHAINS: [(&str, &str); 4] = [
    ("normalizer", "normalizers"),
    ("pre_tokenizer", "pretokenizers"),
    ("post_processor", "processors"),
    ("decoder", "decoders"),
];

/// What all steps of a tokenizer do together.
#[derive(Debug)]
pub(super) struct Steps {
    /// By how much the steps before the model lengthen a text.
    growth: usize,
    tables: usize,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps { growth: 1, tables: 0 }
    }
}

impl Steps {
    /// Checks the step or chain of a field.
    pub fn check(&mut self, name: &str, list: &str, step: &Json) -> Result<(), String> {
        let before = self.growth;
        if name == "decoder" || name == "post_processor" {
            self.growth = 1;
        }
        let mut count = 0;
        self.check_step(name, list, step, 0, &mut count)?;
        let growth = self.growth;
        if growth > MOST_GROWTH {
            return Err(format!(
                "its {name} can make a text {growth} times as long, at most {MOST_GROWTH} times is allowed"
            ));
        }
        if name == "decoder" || name == "post_processor" {
            self.growth = before;
        }
        Ok(())
    }

    fn check_step(
        &mut self,
        name: &str,
        list: &str,
        step: &Json,
        level: usize,
        count: &mut usize,
    ) -> Result<(), String> {
        if step.is_array() {
            return Err(format!("its {name} has a list where an object is expected"));
        }
        *count += 1;
        if *count > MOST_STEPS || level > MOST_LEVELS {
            return Err(format!(
                "its {name} has more than {MOST_STEPS} steps, or chains that are nested more than {MOST_LEVELS} deep"
            ));
        }
        for inner in step[list].as_array().into_iter().flatten() {
            self.check_step(name, list, inner, level + 1, count)?;
        }
        if let (Some(content), false) = (step["content"].as_str(), step["pattern"].is_null()) {
            // A pattern that matches the empty text matches at every position.
            let found = step["pattern"]["String"].as_str().map_or(1, |pattern| pattern.len().max(1));
            self.grow(content.len().div_ceil(found));
        }
        if step["type"] == "ByteLevel" && (name == "normalizer" || name == "pre_tokenizer") {
            // A byte that is no ASCII becomes a character of two.
            self.grow(2);
        }
        if let Some(replacement) = step["replacement"].as_str().filter(|_| name == "pre_tokenizer") {
            self.grow(replacement.len());
        }
        if step["length"] == 0 {
            return Err(format!("its {name} splits texts into parts of no characters"));
        }
        for field in ["prepend", "prefix", "suffix", "unk_token"] {
            if step[field].as_str().is_some_and(|text| text.len() > MOST_CHARACTER_BYTES) {
                return Err(format!("its {name} adds a very long text (`{field}`)"));
            }
        }
        let pattern = &step["pattern"];
        if [&pattern["String"], &pattern["Regex"]]
            .iter()
            .any(|text| text.as_str().is_some_and(|text| text.len() > MOST_PATTERN_BYTES))
        {
            return Err(format!("its {name} has a pattern of more than {MOST_PATTERN_BYTES} bytes"));
        }
        if step["type"] == "Precompiled" || !step["precompiled_charsmap"].is_null() {
            self.tables += 1;
            check_characters(step["precompiled_charsmap"].as_str().unwrap_or_default())?;
            if self.tables > 1 {
                return Err("its normalizer has more than one table of characters (`Precompiled`)".to_owned());
            }
        }
        self.check_pieces(step)
    }

    fn grow(&mut self, times: usize) {
        self.growth = self.growth.saturating_mul(times.max(1));
    }

    /// The tokens around a text (`TemplateProcessing`).
    fn check_pieces(&mut self, step: &Json) -> Result<(), String> {
        let refused = |what: &str| Err(format!("its post_processor (`TemplateProcessing`) {what}"));
        let special = &step["special_tokens"];
        let length = |list: &Json| list.as_array().map_or(0, Vec::len);
        let mut added = 0;
        for token in special.as_object().into_iter().flat_map(|tokens| tokens.values()) {
            if length(&token["ids"]) != length(&token["tokens"]) {
                return refused("has a special token with another number of ids than of texts");
            }
            added += length(&token["ids"]);
        }
        for (field, sequences) in [("single", &["A"][..]), ("pair", &["A", "B"])] {
            let pieces = step[field].as_array().map_or(&[][..], Vec::as_slice);
            if pieces.len() > MOST_PIECES || added > MOST_PIECES {
                return refused(&format!("adds more than {MOST_PIECES} tokens to a text"));
            }
            let mut copies = 0;
            for piece in pieces {
                if let Some(id) = piece["SpecialToken"]["id"].as_str()
                    && special.get(id).is_none()
                {
                    return refused(&format!("names a special token that it does not define (`{field}`)"));
                }
                if let Some(id) = piece["Sequence"]["id"].as_str() {
                    copies += 1;
                    if !sequences.contains(&id) {
                        return refused(&format!("has a second text in `{field}`"));
                    }
                }
            }
            if field == "single" {
                self.grow(copies);
            }
        }
        Ok(())
    }
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
    if texts.split(|byte| *byte == 0).any(|text| text.len() > MOST_CHARACTER_BYTES) {
        return Err("its normalizer (`Precompiled`) replaces a character with a very long text".to_owned());
    }
    Ok(())
}
