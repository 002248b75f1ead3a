//! Word error rate: the model continues the prompt of each sample, and its text is compared with the reference.
//!
//! The reference is the last run of supervised tokens of a sample, and the prompt is everything before it, so all
//! training rows with a prompt can be transcribed. Words are compared without case and without punctuation, except
//! apostrophes. The rate is the substitutions, deletions and insertions of all rows divided by the words of all
//! references.
//! Left out: numbers written as words, and other normalizations of a language.

use crate::failure::Failure;
use crate::generate::decoder::Sound;
use crate::generate::sampler::Sampling;
use crate::generate::session::{Settings, TokenSession};
use crate::session::likelihood::evaluated_samples;
use serde_json::{Value as Json, json};
use smidgen_data::clips::EncodedClips;
use smidgen_data::tokens::{NOT_SUPERVISED, TokenSet};
use smidgen_formats::tokenizer::Tokenizer;
use std::collections::BTreeSet;

/// Samples to transcribe.
#[derive(Debug)]
pub struct Transcripts {
    pub rows: Vec<TranscriptRow>,
    /// Maximum tokens of an answer.
    pub new_tokens: usize,
}

#[derive(Debug)]
pub struct TranscriptRow {
    pub place: String,
    pub sample: usize,
    pub prompt: Vec<u32>,
    pub reference: String,
}

impl Transcripts {
    /// Takes the first `limit` samples (0: all).
    pub fn of(set: &TokenSet, limit: usize, tokenizer: &Tokenizer) -> Result<Transcripts, Failure> {
        let count = evaluated_samples(set, limit);
        let (mut rows, mut longest) = (Vec::with_capacity(count), 0);
        for index in 0..count {
            let sample = set.sample(index).map_err(Failure::data)?;
            let is_supervised = |label: &i32| *label != NOT_SUPERVISED;
            let end = sample.labels.iter().rposition(is_supervised).map_or(0, |last| last + 1);
            let before = sample.labels[..end].iter().rposition(|label| !is_supervised(label));
            let place = set.place(index).to_string();
            let Some(before) = before else {
                return Err(Failure::data(format!("{place} has no prompt: all its tokens are supervised"))
                    .hint("rows of `text` have no transcript; write them as `prompt` and `completion`"));
            };
            let prompt = sample.ids[..=before].iter().map(|id| *id as u32).collect();
            let reference_ids: Vec<u32> =
                sample.labels[before + 1..end].iter().map(|label| *label as u32).collect();
            longest = longest.max(reference_ids.len());
            let reference = tokenizer.decode(&reference_ids, true).map_err(Failure::model)?;
            if words_of(&reference).is_empty() {
                return Err(Failure::data(format!("{place} has no words to compare with")));
            }
            rows.push(TranscriptRow { place, sample: index, prompt, reference });
        }
        // A transcript may be longer than its reference; the excess counts as insertions.
        Ok(Transcripts { rows, new_tokens: 2 * longest + 8 })
    }

    pub fn longest_prompt(&self) -> usize {
        self.rows.iter().map(|row| row.prompt.len()).max().unwrap_or(0)
    }

    /// The model's text for every row, decoded greedily. `encoded` has the embeddings of the samples' clips. Calls
    /// `on_row` with the number of rows before one that begins.
    pub fn transcribe(
        &self,
        session: &mut TokenSession,
        set: &TokenSet,
        encoded: Option<&EncodedClips>,
        (tokenizer, stop_ids): (&Tokenizer, &BTreeSet<u32>),
        on_row: &dyn Fn(usize),
    ) -> Result<Vec<String>, Failure> {
        let settings =
            Settings { sampling: Sampling::default(), max_new: self.new_tokens, stop_ids: stop_ids.clone() };
        let prompts: Vec<Vec<u32>> = self.rows.iter().map(|row| row.prompt.clone()).collect();
        let generated = session.transcribe_batch(&prompts, &settings, |prompt| {
            on_row(prompt);
            let (Some(clips), Some(encoded)) = (set.clips(), encoded) else { return Ok(None) };
            read_sound(set, clips.token as u32, self.rows[prompt].sample, encoded).map(Some)
        })?;
        let texts = generated.iter().map(|text| tokenizer.decode(&text.ids, true).map_err(Failure::model));
        texts.collect()
    }

    pub fn score(&self, texts: Vec<String>) -> WordScores {
        assert_eq!(texts.len(), self.rows.len());
        let mut scores = WordScores { errors: 0, words: 0, rows: Vec::new() };
        for (row, text) in self.rows.iter().zip(texts) {
            let reference = words_of(&row.reference);
            let errors = word_errors(&reference, &words_of(&text));
            scores.errors += errors;
            scores.words += reference.len();
            scores.rows.push((text.trim().to_owned(), errors));
        }
        scores
    }

    /// One question per row, for the results file.
    pub fn questions(&self) -> Vec<Json> {
        let row = |row: &TranscriptRow| json!({"place": row.place, "prompt_tokens": row.prompt.len(), "reference": row.reference});
        self.rows.iter().map(row).collect()
    }
}

/// The embeddings of a sample's clips, one after the other.
fn read_sound(set: &TokenSet, token: u32, sample: usize, encoded: &EncodedClips) -> Result<Sound, Failure> {
    let clips = set.clips().expect("the set has sound");
    let row_bytes = encoded.row_bytes();
    let mut rows = Vec::new();
    for &clip in clips.of_sample(sample) {
        let begin = rows.len();
        rows.resize(begin + clips.store().rows(clip) * row_bytes, 0);
        encoded.read(clips.store(), clip, 0, &mut rows[begin..]).map_err(Failure::disk)?;
    }
    Ok(Sound { token, rows, row_bytes })
}

/// Errors of all rows, and the text and the errors of each.
#[derive(Debug, PartialEq, Eq)]
pub struct WordScores {
    pub errors: usize,
    /// Words of all references.
    pub words: usize,
    pub rows: Vec<(String, usize)>,
}

impl WordScores {
    pub fn rate(&self) -> f64 {
        self.errors as f64 / self.words as f64
    }
}

/// Lower-case words without punctuation other than apostrophes.
fn words_of(text: &str) -> Vec<String> {
    let kept = |letter: &char| letter.is_alphanumeric() || *letter == '\'';
    let word = |word: &str| word.chars().filter(kept).flat_map(char::to_lowercase).collect::<String>();
    text.split_whitespace().map(word).filter(|word| !word.is_empty()).collect()
}

/// The edit distance of two lists of words: substitutions, deletions and insertions.
fn word_errors(reference: &[String], heard: &[String]) -> usize {
    let mut row: Vec<usize> = (0..=heard.len()).collect();
    for (index, word) in reference.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (place, other) in heard.iter().enumerate() {
            let substituted = diagonal + usize::from(word != other);
            diagonal = row[place + 1];
            row[place + 1] = substituted.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row[heard.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_fewest_changes_of_words() {
        let errors = |reference: &str, heard: &str| word_errors(&words_of(reference), &words_of(heard));
        assert_eq!(errors("the cat sat", "The cat, sat."), 0);
        assert_eq!(errors("the cat sat", "the bat sat"), 1);
        assert_eq!(errors("the cat sat on it", "cat sat upon it all"), 3);
        assert_eq!(errors("it's one", "its one"), 1);
        assert_eq!((errors("one two", ""), errors("", "one two")), (2, 2));
    }

    #[test]
    fn the_rate_is_over_the_words_of_all_rows() {
        let row = |reference: &str| TranscriptRow {
            place: String::new(),
            sample: 0,
            prompt: vec![1],
            reference: reference.to_owned(),
        };
        let transcripts = Transcripts { rows: vec![row("one two three"), row("four")], new_tokens: 9 };
        let scores = transcripts.score(vec![" one too three\n".into(), "four five".into()]);
        assert_eq!((scores.errors, scores.words, scores.rate()), (2, 4, 0.5));
        assert_eq!(scores.rows, [("one too three".to_owned(), 1), ("four five".to_owned(), 1)]);
    }
}
