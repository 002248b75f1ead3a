//! Whether a `.txt` file looks like documents, of which each line would be a sample of its own.
//!
//! It does if its paragraphs are separated by blank lines, or if its lines are wrapped: of similar length, and going on
//! in the next line. Only the beginning of a file is looked at.
//! Left out: joining lines. The user knows where a document ends.

use std::path::{Path, PathBuf};

use crate::source::{FileKind, file_kind};
use crate::source_error::SourceError;
use crate::utf8_reader::{for_each_line, open_text};

/// Lines that are looked at.
const MOST_LINES: usize = 2000;
/// Shorter files show too little.
const LEAST_LINES: usize = 6;
/// Longer lines were not wrapped.
const LONGEST_WRAPPED: usize = 200;
const SHORTEST_WRAPPED: usize = 40;

/// A hint if one of the files looks like documents.
pub fn hint_about_documents(files: &[PathBuf]) -> Option<String> {
    let is_text = |file: &&PathBuf| matches!(file_kind(file), Ok(FileKind::Text));
    let found = files.iter().filter(is_text).find(|file| are_documents(&first_lines(file)))?;
    Some(format!(
        "`{}` looks like documents of several lines, and each line is a sample: write each document as a row \
         `{{\"text\": \"...\"}}` of a `.jsonl` file",
        found.display()
    ))
}

/// The first lines of a file, without those that cannot be read: reading the rows has reported them.
fn first_lines(file: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let Ok(reader) = open_text(file) else { return lines };
    // An error ends the loop at the last line that is wanted.
    let _ = for_each_line(file, reader, |_, line| {
        lines.extend(line.ok().map(|line| line.trim().to_owned()));
        if lines.len() < MOST_LINES { Ok(()) } else { Err(SourceError::NoMatch { pattern: String::new() }) }
    });
    lines
}

fn are_documents(lines: &[String]) -> bool {
    let filled = lines.iter().filter(|line| !line.is_empty()).count();
    if filled < LEAST_LINES {
        return false;
    }
    let pairs = || lines.iter().zip(&lines[1..]);
    let paragraphs = pairs().filter(|(line, next)| !line.is_empty() && next.is_empty()).count();
    let longest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let is_full = |line: &str| 3 * line.chars().count() >= 2 * longest;
    let continued = || pairs().filter(|(line, next)| goes_on(line, next)).map(|(line, _)| line);
    let is_wrapped = (SHORTEST_WRAPPED..=LONGEST_WRAPPED).contains(&longest)
        && 5 * continued().count() >= filled
        && 5 * continued().filter(|line| is_full(line)).count() >= 4 * continued().count();
    is_wrapped || 10 * paragraphs >= filled
}

/// Whether a sentence goes on in the next line.
fn goes_on(line: &str, next: &str) -> bool {
    let last = line.chars().next_back();
    last.is_some_and(|last| last.is_alphanumeric() || last == ',' || last == '-')
        && next.chars().next().is_some_and(char::is_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks_like_documents(text: &str) -> bool {
        are_documents(&text.lines().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn wrapped_lines_and_paragraphs_are_documents() {
        let wrapped = "It was a bright cold day in spring, and all the clocks of the\n\
            town were striking, one after the other, as they had done for\n\
            years. Nobody counted them. The streets were empty, and a dog\n\
            slept on the steps of the church, where the sun came first and\n\
            stayed longest. Then the train arrived.\n";
        assert!(looks_like_documents(&wrapped.repeat(3)));
        let paragraphs = "A paragraph that is one long line of its own.\n\nAnother one.\n\n";
        assert!(looks_like_documents(&paragraphs.repeat(4)));
    }

    #[test]
    fn a_sample_per_line_is_not() {
        assert!(!looks_like_documents(
            &"A whole sentence on its line.\nAnd the next one is here.\n".repeat(20)
        ));
        let lowercase =
            "turn on the light in the kitchen\nplay music\nwhat is the weather like in the town of my aunt\n";
        assert!(!looks_like_documents(&lowercase.repeat(20)));
        assert!(!looks_like_documents("one\n\ntwo\n"));
        assert!(!looks_like_documents(""));
    }
}
