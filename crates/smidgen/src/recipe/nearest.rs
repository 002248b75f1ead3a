//! The nearest word to a mistyped one, for "did you mean" hints.
//!
//! Distance counts insertions, deletions, replacements and swaps of neighbours (optimal string alignment).
//! A word is near if at most a third of its letters (at least one) would change;
//! anything looser gives hints that mislead more than they help.

/// The first of the nearest candidates, or `None` if all are far.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let mut best: Option<(usize, &str)> = None;
    for candidate in candidates {
        let distance = edit_distance(word, candidate);
        let limit = (word.chars().count().max(candidate.chars().count()) / 3).max(1);
        if distance <= limit && best.is_none_or(|(least, _)| distance < least) {
            best = Some((distance, candidate));
        }
    }
    best.map(|(_, candidate)| candidate)
}

/// Edits that turn `from` into `to`.
pub(super) fn edit_distance(from: &str, to: &str) -> usize {
    let from: Vec<char> = from.chars().collect();
    let to: Vec<char> = to.chars().collect();
    let width = to.len() + 1;
    let mut table = vec![0usize; (from.len() + 1) * width]; // (from + 1, to + 1)
    for i in 0..=from.len() {
        for j in 0..=to.len() {
            table[i * width + j] = if i == 0 || j == 0 {
                i + j
            } else {
                let replaced = table[(i - 1) * width + j - 1] + usize::from(from[i - 1] != to[j - 1]);
                let deleted = table[(i - 1) * width + j] + 1;
                let inserted = table[i * width + j - 1] + 1;
                let swapped = if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                    table[(i - 2) * width + j - 2] + 1
                } else {
                    usize::MAX
                };
                replaced.min(deleted).min(inserted).min(swapped)
            };
        }
    }
    table[table.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (from, to, distance) in [
            ("", "", 0),
            ("rank", "rank", 0),
            ("rnak", "rank", 1),
            ("budgt", "budget", 1),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("größe", "grosse", 3),
        ] {
            assert_eq!(edit_distance(from, to), distance, "{from} {to}");
            assert_eq!(edit_distance(to, from), distance, "{to} {from}");
        }
    }

    #[test]
    fn near_and_far() {
        let words = ["rank", "alpha", "dropout"];
        assert_eq!(nearest("rnak", words), Some("rank"));
        assert_eq!(nearest("drop_out", words), Some("dropout"));
        assert_eq!(nearest("banana", words), None);
    }
}
