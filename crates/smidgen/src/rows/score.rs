//! Scores of rows: the most likely choice, the accuracy, and its standard error.
//!
//! As in lm-evaluation-harness, the first of equally likely choices is picked, and the standard error of a mean is the
//! sample's standard deviation over √n. `acc_norm` divides a log-likelihood by the characters of the choice,
//! `acc_bytes` by its bytes in UTF-8.

/// A mean over rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    pub value: f64,
    /// `None` for a single row.
    pub stderr: Option<f64>,
    pub rows: usize,
}

/// The share of rows that are right.
///
/// # Panics
/// Without rows: every evaluation refuses that first.
pub fn mean_of(right: &[bool]) -> Mean {
    let rows = right.len();
    assert!(rows > 0, "a mean over no rows");
    let n = rows as f64;
    let value = right.iter().filter(|right| **right).count() as f64 / n;
    let squares: f64 = right.iter().map(|right| (f64::from(u8::from(*right)) - value).powi(2)).sum();
    let stderr = (rows > 1).then(|| (squares / (n - 1.0)).sqrt() / n.sqrt());
    Mean { value, stderr, rows }
}

/// The index of the largest number, the first if several are equal.
pub fn first_largest(numbers: impl IntoIterator<Item = f64>) -> usize {
    let mut best = (0, f64::NEG_INFINITY);
    for (place, number) in numbers.into_iter().enumerate() {
        if number > best.1 {
            best = (place, number);
        }
    }
    best.0
}

/// The choices picked by the three scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picked {
    pub by_likelihood: usize,
    pub by_characters: usize,
    pub by_bytes: usize,
}

pub fn pick<T: AsRef<str>>(texts: &[T], log_likelihoods: &[f64]) -> Picked {
    assert_eq!(texts.len(), log_likelihoods.len());
    let each = || texts.iter().map(AsRef::as_ref).zip(log_likelihoods);
    Picked {
        by_likelihood: first_largest(log_likelihoods.iter().copied()),
        by_characters: first_largest(each().map(|(text, sum)| sum / text.chars().count() as f64)),
        by_bytes: first_largest(each().map(|(text, sum)| sum / text.len() as f64)),
    }
}

/// Rows that one model has right and another has wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flips {
    pub to_right: usize,
    pub to_wrong: usize,
}

pub fn count_flips(before: &[bool], after: &[bool]) -> Flips {
    assert_eq!(before.len(), after.len());
    let count = |from: bool| before.iter().zip(after).filter(|(b, a)| **b == from && **a != from).count();
    Flips { to_right: count(false), to_wrong: count(true) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_their_errors_are_those_computed_by_hand() {
        // Three of four: mean 3/4, squares 3·(1/16) + 9/16 = 12/16, variance 1/4, deviation 1/2, over √4.
        let mean = mean_of(&[true, false, true, true]);
        assert_eq!(mean, Mean { value: 0.75, stderr: Some(0.25), rows: 4 });
        assert_eq!(mean_of(&[true]), Mean { value: 1.0, stderr: None, rows: 1 });
        assert_eq!(mean_of(&[true, true]).stderr, Some(0.0));
    }

    #[test]
    fn the_length_of_a_choice_changes_the_pick() {
        // -6 / 2 = -3 loses to -8 / 4 = -2; in bytes `éé` has 4 and -6 / 4 = -1.5 wins over -8 / 4.
        let picked = pick(&["éé", "long"], &[-6.0, -8.0]);
        assert_eq!(picked, Picked { by_likelihood: 0, by_characters: 1, by_bytes: 0 });
    }

    #[test]
    fn the_first_of_equals_is_taken() {
        assert_eq!(first_largest([-2.0, -1.0, -1.0]), 1);
        let picked = pick(&["a", "bb", "cc"], &[-1.0, -2.0, -2.0]);
        assert_eq!(picked, Picked { by_likelihood: 0, by_characters: 0, by_bytes: 0 });
    }

    #[test]
    fn flips_are_counted_each_way() {
        let flips = count_flips(&[true, false, false, true], &[false, true, true, true]);
        assert_eq!(flips, Flips { to_right: 2, to_wrong: 1 });
    }
}
