//! Indentation for lines inside brackets, which YAML ignores and the parser does not.
//!
//! PyYAML, which most tools read their files with, accepts a closing bracket in the first column. Lines that begin
//! inside brackets are moved to the right of the bracket that opened first; no line is added or removed.
//! Brackets in quotes, comments and block scalars do not count.

/// Brackets further to the right are left alone, so that a small file stays small.
const MOST_COLUMNS: usize = 256;

/// The text with every line that begins inside brackets indented beyond the bracket.
pub fn indented_flows(text: &str) -> String {
    let mut scan = Scan::default();
    let mut indented = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if scan.depth > 0 && scan.opened_at < MOST_COLUMNS {
            indented.extend(std::iter::repeat_n(' ', scan.opened_at + 1));
        }
        indented.push_str(line);
        scan.read(line);
    }
    indented
}

#[derive(Default)]
struct Scan {
    /// Open brackets.
    depth: usize,
    /// The column of the outermost open bracket.
    opened_at: usize,
    /// The quote that is open.
    quote: Option<char>,
    /// The indentation of the line whose value is a block scalar.
    block: Option<usize>,
}

impl Scan {
    fn read(&mut self, line: &str) {
        let indent = line.len() - line.trim_start_matches(' ').len();
        if let Some(outer) = self.block {
            if line.trim().is_empty() || indent > outer {
                return;
            }
            self.block = None;
        }
        let mut before = ' ';
        // Whether a value may begin here.
        let mut is_start = true;
        let mut characters = line.char_indices().peekable();
        while let Some((at, character)) = characters.next() {
            let next = characters.peek().map(|(_, next)| *next);
            if let Some(quote) = self.quote {
                match (quote, character) {
                    ('"', '\\') => drop(characters.next()),
                    ('\'', '\'') if next == Some('\'') => drop(characters.next()),
                    _ if character == quote => self.quote = None,
                    _ => {}
                }
            } else if character == '#' && before.is_whitespace() {
                break;
            } else if !character.is_whitespace() {
                is_start = self.see(character, next, at, is_start);
            }
            before = character;
        }
        let value = line.split(" #").next().unwrap_or_default().trim_end();
        let value = value.trim_end_matches(['+', '-', '1', '2', '3', '4', '5', '6', '7', '8', '9']);
        if self.depth == 0 && (value.ends_with(": |") || value.ends_with(": >")) {
            self.block = Some(indent);
        }
    }

    /// Reads a character outside quotes; returns whether a value may begin after it.
    fn see(&mut self, character: char, next: Option<char>, at: usize, is_start: bool) -> bool {
        match character {
            '[' | '{' if is_start || self.depth > 0 => {
                if self.depth == 0 {
                    self.opened_at = at;
                }
                self.depth += 1;
                true
            }
            ']' | '}' if self.depth > 0 => {
                self.depth -= 1;
                false
            }
            '"' | '\'' if is_start => {
                self.quote = Some(character);
                false
            }
            ',' => self.depth > 0,
            ':' | '-' | '?' => next.is_none_or(char::is_whitespace) || self.depth > 0 && character == ':',
            _ => false,
        }
    }
}
