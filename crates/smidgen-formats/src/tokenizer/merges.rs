//! Derives the merges of a SentencePiece vocabulary, which has scores instead: any two pieces may form a
//! third one. Merges are ordered as transformers orders them when it converts such vocabularies: by score,
//! then longer left parts first, then longer right parts first.
//! Left out: pieces that do not result from merging (control, user-defined, unknown, unused, single bytes).

use std::cmp::Ordering;
use std::collections::HashMap;

/// All merges of the pieces for which `mergeable` holds, in the order in which they are applied.
pub(super) fn merges_from_scores(
    pieces: &[String],
    scores: &[f32],
    mergeable: impl Fn(usize) -> bool,
) -> Vec<(u32, u32)> {
    let ids: HashMap<&str, u32> = (pieces.iter().enumerate().filter(|(id, _)| mergeable(*id)))
        .map(|(id, piece)| (piece.as_str(), id as u32))
        .collect();
    let mut merges = Vec::new();
    for (id, piece) in pieces.iter().enumerate().filter(|(id, _)| mergeable(*id)) {
        let first = merges.len();
        let length = piece.chars().count();
        for (left_length, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right)) {
                let lengths = (left_length, length - left_length);
                merges.push(Merge { left, right, score: scores[id], lengths });
            }
        }
        merges[first..].sort_by_key(|merge| (merge.left, merge.right));
    }
    merges.sort_by(Merge::order);
    merges.into_iter().map(|merge| (merge.left, merge.right)).collect()
}

struct Merge {
    left: u32,
    right: u32,
    score: f32,
    /// In characters.
    lengths: (usize, usize),
}

impl Merge {
    fn order(&self, other: &Merge) -> Ordering {
        other.score.total_cmp(&self.score).then_with(|| other.lengths.cmp(&self.lengths))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_scores_and_then_lengths() {
        let pieces = ["a", "b", "c", "ab", "bc", "abc", "<s>", "<", "s>", "ü", "üa"].map(String::from);
        let scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 0.0, 0.0, 0.0, 0.0, -1.0];
        let merges = merges_from_scores(&pieces, &scores, |id| id != 6);
        let named: Vec<(&str, &str)> = merges
            .iter()
            .map(|&(left, right)| (pieces[left as usize].as_str(), pieces[right as usize].as_str()))
            .collect();
        // `bc` and `üa` have equal scores and lengths, so they keep the order of the vocabulary.
        assert_eq!(named, [("b", "c"), ("ü", "a"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
    }
}
