//! Rows of a split that are selected by their numbers: `train[:95%]`, `train[1000:]`.
//!
//! A recipe takes the first rows of a source (`data.limit`) or holds out a share of them (`data.split`). The two halves
//! of one split, one for training and one for evaluation, are such a share.
//! Not supported: rows from the middle; evaluating them would evaluate rows that are trained on, so they are left out.

/// The rows between two bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    from: Bound,
    to: Bound,
    /// As written, such as `train[:95%]`.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    Percent(f64),
    Row(u64),
    End,
}

impl Slice {
    /// The split and the slice of it.
    pub fn parse(text: &str) -> Option<(String, Slice)> {
        let (split, rest) = text.split_once('[')?;
        let (from, to) = rest.strip_suffix(']')?.split_once(':')?;
        let bound = |text: &str, open: Bound| match (text.trim(), text.trim().strip_suffix('%')) {
            ("", _) => Some(open),
            (_, Some(percent)) => percent.parse().ok().map(Bound::Percent),
            (row, None) => row.parse().ok().map(Bound::Row),
        };
        let slice =
            Slice { from: bound(from, Bound::Row(0))?, to: bound(to, Bound::End)?, text: text.to_owned() };
        Some((split.to_owned(), slice))
    }

    /// The bounds in percent, if both are.
    fn percents(&self) -> Option<(f64, f64)> {
        let percent = |bound: Bound| match bound {
            Bound::Percent(percent) => Some(percent),
            Bound::Row(0) => Some(0.0),
            Bound::End => Some(100.0),
            Bound::Row(_) => None,
        };
        Some((percent(self.from)?, percent(self.to)?))
    }

    /// The number of rows, if these are the first ones.
    pub fn first_rows(&self) -> Option<u64> {
        match (self.from, self.to) {
            (Bound::Row(0), Bound::Row(rows)) => Some(rows),
            _ => None,
        }
    }

    /// The share that `eval` has, if both make up a whole split.
    pub fn share_of_rest(&self, eval: &Slice) -> Option<f64> {
        let ((start, end), (eval_start, eval_end)) = (self.percents()?, eval.percents()?);
        let is_rest = (start == 0.0 && end == eval_start && eval_end == 100.0)
            || (eval_start == 0.0 && eval_end == start && end == 100.0);
        is_rest.then_some((eval_end - eval_start) / 100.0)
    }
}
