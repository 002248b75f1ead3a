//! Colour for whoever looks at a terminal: the word of a line that says how things stand, and nothing else.
//!
//! Painted last, when lines are broken already, so that what is said is the same with and without it. `NO_COLOR` turns
//! it off and `CLICOLOR_FORCE` on, as elsewhere; a file or a pipe gets none.

use std::ffi::OsStr;

/// Whether what goes to a stream is painted.
pub fn is_wanted(is_terminal: bool) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0");
    let is_dumb = std::env::var_os("TERM").as_deref() == Some(OsStr::new("dumb"));
    decide(is_terminal && !is_dumb, is_set("NO_COLOR"), is_set("CLICOLOR_FORCE"))
}

fn decide(is_terminal: bool, is_off: bool, is_forced: bool) -> bool {
    !is_off && (is_terminal || is_forced)
}

const RED: &str = "1;31";
const YELLOW: &str = "33";
const GREEN: &str = "32";
const CYAN: &str = "36";

/// Words at the beginning of a line.
const BEGINNINGS: [(&str, &str); 8] = [
    ("error:", RED),
    ("warning:", YELLOW),
    ("hint:", CYAN),
    ("note:", CYAN),
    ("remedy:", CYAN),
    ("pass  ", GREEN),
    ("warn  ", YELLOW),
    ("fail  ", RED),
];

/// The verdict of a table, behind a gap.
const VERDICTS: [(&str, &str); 2] = [("   fits", GREEN), ("   does not fit", RED)];

/// The text with the word of each line painted that says how things stand.
pub fn paint(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(paint_line).collect();
    lines.join("\n")
}

fn paint_line(line: &str) -> String {
    let begin = line.len() - line.trim_start_matches(' ').len();
    let beginning = BEGINNINGS.iter().find(|(word, _)| line[begin..].starts_with(word));
    let verdict = || VERDICTS.iter().find_map(|(word, colour)| Some((line.find(word)?, word, colour)));
    let (place, word, colour) = match beginning {
        Some((word, colour)) => (begin, word, colour),
        None => match verdict() {
            Some(found) => found,
            None => return line.to_owned(),
        },
    };
    // Spaces stay as they are: a mark in them could be cut off.
    let gap = word.len() - word.trim_start().len();
    let (from, to) = (place + gap, place + word.trim_end().len());
    format!("{}\x1b[{colour}m{}\x1b[0m{}", &line[..from], &line[from..to], &line[to..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_that_matters_is_painted() {
        let red = "\x1b[1;31m";
        assert_eq!(
            paint("error: no\n\nhint: try"),
            format!("{red}error:\x1b[0m no\n\n\x1b[36mhint:\x1b[0m try")
        );
        assert_eq!(paint("  fail  gpu   none"), format!("  {red}fail\x1b[0m  gpu   none"));
        let table = "  peak            20.00 MiB   does not fit, 1.00 MiB too much";
        assert_eq!(paint(table), table.replace("does not fit", &format!("{red}does not fit\x1b[0m")));
        for plain in ["", "the error: inside", "passes", "it fits well", "  failed  x"] {
            assert_eq!(paint(plain), plain);
        }
    }

    #[test]
    fn a_terminal_has_colour_unless_it_is_off() {
        assert!(decide(true, false, false) && decide(false, false, true));
        assert!(!decide(false, false, false) && !decide(true, true, false) && !decide(true, true, true));
    }
}
