//! Wraps lines to the width of the terminal, between words.
//!
//! A row of a table continues below its last column, any other line two spaces further in. Short text in backticks is
//! not broken, so that keys, values and commands can be copied. Words longer than a line, such as paths, are not
//! broken.
//! Left out: hyphenation.

use super::colour::plain;
use super::columns::LINE;
use textwrap::core::{Word, display_width};
use textwrap::{Options, WordSeparator, WordSplitter, WrapAlgorithm};

/// Maximum width of a line: the environment variable `COLUMNS`, else 80.
pub fn columns() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|text| text.trim().parse().ok());
    set.filter(|columns| *columns >= LINE / 2).unwrap_or(LINE)
}

/// Breaks lines that are wider than `width`.
pub fn fold(text: &str, width: usize) -> String {
    let is_short = |line: &str| display_width(line) <= width;
    let fold = |line: &str| if is_short(line) { line.to_owned() } else { fold_line(line, width) };
    text.split('\n').map(fold).collect::<Vec<_>>().join("\n")
}

fn fold_line(line: &str, width: usize) -> String {
    let start = line.len() - line.trim_start_matches(' ').len();
    let [first, later] = [start, hanging(&plain(line), start, width)].map(|spaces| " ".repeat(spaces));
    let options = Options::new(width)
        .initial_indent(&first)
        .subsequent_indent(&later)
        .break_words(false)
        .word_separator(WordSeparator::Custom(words))
        .word_splitter(WordSplitter::NoHyphenation)
        .wrap_algorithm(WrapAlgorithm::FirstFit);
    textwrap::fill(&line[start..], options)
}

/// The indentation of continuation lines: that of the last column, or two more than the line's own.
fn hanging(line: &str, start: usize, width: usize) -> usize {
    let head: String = line.chars().take(width / 2).collect();
    match head.get(start..).and_then(|inside| inside.rfind("  ")) {
        Some(gap) => display_width(&head[..start + gap + 2]),
        None => start + 2,
    }
}

/// Splits a line at spaces, except at those inside a short pair of backticks.
fn words(line: &str) -> Box<dyn Iterator<Item = Word<'_>> + '_> {
    let (mut words, mut start, mut in_word) = (Vec::new(), 0, true);
    // The end of the current pair of backticks, and the end of the text that is not split.
    let (mut pair_end, mut unsplit_end) = (0, 0);
    for (place, sign) in line.char_indices() {
        if sign == '`'
            && place >= pair_end
            && let Some(length) = line[place + 1..].find('`')
        {
            pair_end = place + length + 2;
            unsplit_end = if length <= LINE / 2 { pair_end } else { 0 };
        }
        let is_gap = sign == ' ' && place >= unsplit_end;
        if !is_gap && !in_word {
            words.push(Word::from(&line[start..place]));
            start = place;
        }
        in_word = !is_gap;
    }
    words.push(Word::from(&line[start..]));
    Box::new(words.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_between_words() {
        let text = format!("hint: {}", ["word"; 40].join(" "));
        let folded = fold(&text, 80);
        assert!(folded.lines().all(|line| line.chars().count() <= 80), "{folded}");
        assert!(folded.lines().skip(1).all(|line| line.starts_with("  word")), "{folded}");
        assert_eq!(folded.split_whitespace().collect::<Vec<_>>().join(" "), text);
    }

    #[test]
    fn short_lines_stay_as_they_are() {
        for text in ["", "a\n\n  b\n", "a  b   c", "ends\n"] {
            assert_eq!(fold(text, 80), text);
        }
    }

    #[test]
    fn table_rows_continue_below_their_column() {
        let line = "  peak    5 MiB   fits, a lot to spare (at: somewhere in a layer)";
        assert_eq!(
            fold(line, 40),
            "  peak    5 MiB   fits, a lot to spare\n                  (at: somewhere in a\n                  layer)"
        );
    }

    #[test]
    fn short_text_in_backticks_is_not_broken() {
        let text = format!("{} `train.lr = 1e-4` end", "x".repeat(70));
        assert_eq!(fold(&text, 80), format!("{}\n  `train.lr = 1e-4` end", "x".repeat(70)));
        let long = "y".repeat(100);
        assert_eq!(fold(&format!("a {long} b"), 80), format!("a\n  {long}\n  b"));
        // Long text in backticks is broken; shorter pairs after it are not.
        let text = format!("`{} z` is `a b c`, `d e f`", "y ".repeat(30));
        assert_eq!(fold(&text, 70), format!("`{} z` is\n  `a b c`, `d e f`", "y ".repeat(30)));
        // A single backtick has no effect.
        let odd = format!("it`s {}", ["word"; 20].join(" "));
        assert!(fold(&odd, 80).lines().all(|line| line.chars().count() <= 80));
    }
}
