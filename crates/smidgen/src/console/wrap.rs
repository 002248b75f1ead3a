//! Lines that fit a terminal: what is longer goes on below itself, between words.
//!
//! Part of a table goes on below its column, anything else two spaces further in. What stands in backticks stays
//! together where it is short, so that keys, values and commands can be copied; a word that is longer than a line, such
//! as a path, stays whole: it is data.
//! Left out: hyphens, and characters that take two columns.

use super::columns::LINE;

/// How wide lines may be: `COLUMNS` where it is set, as shells do it, else 80.
pub fn columns() -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|text| text.trim().parse().ok());
    set.filter(|columns| *columns >= LINE / 2).unwrap_or(LINE)
}

/// The text with every line that is wider than `width` broken between words.
pub fn fold(text: &str, width: usize) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| fold_line(line, width)).collect();
    lines.join("\n")
}

fn fold_line(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let start = line.len() - line.trim_start_matches(' ').len();
    let indent = hanging(line, start, width);
    let mut folded = " ".repeat(start);
    let mut column = start;
    for (number, word) in words(&line[start..], width).into_iter().enumerate() {
        let length = word.chars().count();
        if number > 0 && column + 1 + length > width {
            folded.truncate(folded.trim_end_matches(' ').len());
            folded.push('\n');
            folded.push_str(&" ".repeat(indent));
            column = indent;
        } else if number > 0 {
            folded.push(' ');
            column += 1;
        }
        folded.push_str(word);
        column += length;
    }
    folded
}

/// Where a line goes on: below its last column, or a little further in than it begins.
fn hanging(line: &str, start: usize, width: usize) -> usize {
    let head: String = line.chars().take(width / 2).collect();
    match head.get(start..).and_then(|inside| inside.rfind("  ")) {
        // Counted in characters, because names may have any.
        Some(gap) => head[..start + gap + 2].chars().count(),
        None => start + 2,
    }
}

/// What single spaces separate, but for those inside a short pair of backticks.
fn words(line: &str, width: usize) -> Vec<&str> {
    let mut words = Vec::new();
    // Where the present pair ends, and up to where its spaces do not separate.
    let (mut start, mut closed, mut whole) = (0, 0, 0);
    for (place, sign) in line.char_indices() {
        match sign {
            '`' if place >= closed => {
                if let Some(length) = line[place + 1..].find('`') {
                    closed = place + length + 2;
                    whole = if length <= width / 2 { closed } else { 0 };
                }
            }
            ' ' if place >= whole => {
                words.push(&line[start..place]);
                start = place + 1;
            }
            _ => {}
        }
    }
    words.push(&line[start..]);
    words
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
    fn tables_go_on_below_their_column() {
        let line = "  peak    5 MiB   fits, a lot to spare (at: somewhere in a layer)";
        assert_eq!(
            fold(line, 40),
            "  peak    5 MiB   fits, a lot to spare\n                  (at: somewhere in a\n                  layer)"
        );
    }

    #[test]
    fn what_stands_in_backticks_stays_together() {
        let text = format!("{} `train.lr = 1e-4` end", "x".repeat(70));
        assert_eq!(fold(&text, 80), format!("{}\n  `train.lr = 1e-4` end", "x".repeat(70)));
        let long = "y".repeat(100);
        assert_eq!(fold(&format!("a {long} b"), 80), format!("a\n  {long}\n  b"));
        // A long pair is no longer one word, and the pairs behind it still are.
        let text = format!("`{} z` is `a b c`, `d e f`", "y ".repeat(30));
        assert_eq!(fold(&text, 70), format!("`{} z` is\n  `a b c`, `d e f`", "y ".repeat(30)));
        // One mark without its partner is a sign like any other.
        let odd = format!("it`s {}", ["word"; 20].join(" "));
        assert!(fold(&odd, 80).lines().all(|line| line.chars().count() <= 80));
    }
}
