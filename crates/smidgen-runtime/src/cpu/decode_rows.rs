//! Decodes whole rows of a stored matrix to f32, for the few operations that need them.
//!
//! It uses the decoder of the matmuls (`decode_span.rs`) and divides the rows over threads.

use super::isa::{Isa, Lanes, on_each_isa};
use super::pool::run_tasks;
use super::stored::Stored;
use super::view::Dst;

/// Rows per task.
const TASK_ROWS: usize = 16;

/// Decodes the rows of `matrix` from `first` on that fit into `target`.
///
/// # Safety
/// The matrix is readable and the machine supports `isa`.
pub unsafe fn decode_rows(isa: Isa, matrix: Stored, first: usize, target: Dst<f32>) {
    let rows = target.len() / matrix.columns.max(1);
    assert_eq!(target.len(), rows * matrix.columns, "whole rows");
    assert!(first + rows <= matrix.rows, "rows {first}..{} of {}", first + rows, matrix.rows);
    run_tasks(rows.div_ceil(TASK_ROWS), |task| {
        for row in task * TASK_ROWS..rows.min((task + 1) * TASK_ROWS) {
            let target = target.part(row * matrix.columns, matrix.columns).address();
            // SAFETY: the row is in the readable matrix, and each task writes rows of its own.
            unsafe { decode_row(isa, &Row { matrix, row: first + row, target }) };
        }
    });
}

struct Row {
    matrix: Stored,
    row: usize,
    target: *mut f32,
}

on_each_isa! {
    /// Decodes one row.
    ///
    /// # Safety
    /// The machine supports `isa`, the row is in the readable matrix, the target holds a row.
    unsafe fn decode_row(row: &Row) = decode_row_with;
}

#[inline(always)]
unsafe fn decode_row_with<V: Lanes>(row: &Row) {
    // SAFETY: the caller's promises.
    unsafe { row.matrix.decode_span::<V>(row.row, 0, row.matrix.columns, row.target) }
}
