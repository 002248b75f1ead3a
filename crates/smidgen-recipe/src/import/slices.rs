//! Rows of a split that are selected by their numbers: `train[:95%]`, `train[1000:]`.
//!
//! A recipe takes the first rows of a source (`data.limit`) or holds out a share of them (`data.split`). The two halves
//! of one split, one for training and one for evaluation, are such a share.
//! Not supported: rows from the middle; evaluating them would evaluate rows that are trained on, so they are left out.

use super::datasets::{NamedRows, take_part};
use super::draft::Draft;
use super::fields::Found;
use crate::value::Value;

/// The rows between two bounds.
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    from: Bound,
    to: Bound,
    /// As written, such as `train[:95%]`.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Bound {
    Percent(f64),
    Row(u64),
    End,
}

impl Slice {
    /// The split and the slice of it.
    fn parse(text: &str) -> Option<(String, Slice)> {
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
    fn first_rows(&self) -> Option<u64> {
        match (self.from, self.to) {
            (Bound::Row(0), Bound::Row(rows)) => Some(rows),
            _ => None,
        }
    }

    /// The share that `eval` has, if both make up a whole split.
    fn share_of_rest(&self, eval: &Slice) -> Option<f64> {
        let ((start, end), (eval_start, eval_end)) = (self.percents()?, eval.percents()?);
        let is_rest = (start == 0.0 && end == eval_start && eval_end == 100.0)
            || (eval_start == 0.0 && eval_end == start && end == 100.0);
        is_rest.then_some((eval_end - eval_start) / 100.0)
    }
}

/// A split without its slice, and the slice.
pub fn take_split(draft: &mut Draft, found: Option<Found<'_>>) -> (Option<String>, Option<Slice>) {
    let sliced = found.as_ref().and_then(|found| Slice::parse(&found.text()?));
    match sliced {
        Some((split, slice)) => (Some(split), Some(slice)),
        None => (take_part(draft, found, ":"), None),
    }
}

/// Writes what slices mean; returns whether the sources are to be named.
pub fn put_slices(draft: &mut Draft, key: &'static str, rows: &[NamedRows], from: &Found<'_>) -> bool {
    let sliced: Vec<&NamedRows> = rows.iter().filter(|rows| rows.slice.is_some()).collect();
    if key == "data.train" {
        draft.trained_slice = match rows {
            [rows] => rows.slice.clone().map(|slice| (whole_name(rows), slice)),
            _ => None,
        };
        return put_trained_slices(draft, rows, &sliced, from);
    }
    let ([rows], [_]) = (rows, &sliced[..]) else {
        sliced.iter().for_each(|rows| leave_slice(draft, rows, from));
        return sliced.is_empty();
    };
    let slice = rows.slice.as_ref().expect("it is sliced");
    let trained = draft.trained_slice.clone().filter(|(name, _)| *name == whole_name(rows));
    match trained.and_then(|(_, trained)| trained.share_of_rest(slice)) {
        Some(share) => {
            draft.left_out.retain(|left| !left.why.starts_with(A_PART));
            let remark = format!("{}; `train.seed` chooses the rows", slice.text);
            draft.put_with("data.split", Value::Float(share), &[from], &remark);
        }
        None => leave_slice(draft, rows, from),
    }
    false
}

fn put_trained_slices(
    draft: &mut Draft,
    rows: &[NamedRows],
    sliced: &[&NamedRows],
    from: &Found<'_>,
) -> bool {
    let first = |rows: &NamedRows| rows.slice.as_ref().and_then(Slice::first_rows);
    // `data.limit` is the same for every source.
    let counts: Vec<Option<u64>> = rows.iter().map(first).collect();
    if let Some(Some(count)) = counts.first()
        && counts.iter().all(|other| *other == Some(*count))
    {
        draft.put("data.limit", Value::Integer((*count).into()), &[from]);
        return true;
    }
    for rows in sliced {
        let text = &rows.slice.as_ref().expect("it is sliced").text;
        draft.leave_out(
            from,
            format!(
                "{A_PART}, so all rows of `{text}`'s split are trained on; `data.limit` uses the first ones"
            ),
        );
    }
    true
}

const A_PART: &str = "a recipe has no part of a split";

fn leave_slice(draft: &mut Draft, rows: &NamedRows, from: &Found<'_>) {
    let text = &rows.slice.as_ref().expect("it is sliced").text;
    let why = format!(
        "`{text}` selects rows by their numbers, and the split is trained on too; `data.split` holds out a share of \
         the training rows, or name another split"
    );
    draft.leave_out(from, why);
}

/// The data set and the split that a slice belongs to.
fn whole_name(rows: &NamedRows) -> String {
    format!("{}/{:?}:{:?}", rows.name, rows.config, rows.split)
}
