//! Which bytes a view covers, and whether an operation's output overlaps its inputs.
//!
//! Operations work in place only where their documentation says so, and then on exactly the same view. With any
//! other overlap one thread could read what another writes, so operations panic on entry.
//! Left out: the views themselves; only addresses are compared here.

/// The bytes that a view covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    address: usize,
    rows: usize,
    row_bytes: usize,
    stride_bytes: usize,
}

impl Footprint {
    pub fn flat(address: usize, bytes: usize) -> Footprint {
        Footprint::rows(address, 1, bytes, bytes)
    }

    /// The stride of a single row is ignored.
    pub fn rows(address: usize, rows: usize, row_bytes: usize, stride_bytes: usize) -> Footprint {
        Footprint { address, rows, row_bytes, stride_bytes: if rows > 1 { stride_bytes } else { row_bytes } }
    }

    fn end(self) -> usize {
        match self.rows {
            0 => self.address,
            rows => self.address + (rows - 1) * self.stride_bytes + self.row_bytes,
        }
    }

    /// Whether no byte is in both. Column ranges of one matrix are recognized as disjoint; two interleaved
    /// matrices of different stride count as overlapping.
    fn is_disjoint_from(self, other: Footprint) -> bool {
        let empty = |view: Footprint| view.rows == 0 || view.row_bytes == 0;
        if empty(self) || empty(other) || self.end() <= other.address || other.end() <= self.address {
            return true;
        }
        if self.stride_bytes != other.stride_bytes {
            return false;
        }
        let (first, second) = if self.address <= other.address { (self, other) } else { (other, self) };
        let offset = (second.address - first.address) % self.stride_bytes;
        first.row_bytes <= offset && offset + second.row_bytes <= self.stride_bytes
    }
}

/// Panics if `output` overlaps one of `others`.
pub(crate) fn assert_disjoint<const N: usize>(
    operation: &str,
    output: impl Into<Footprint>,
    others: [Footprint; N],
) {
    let output = output.into();
    for other in others {
        assert!(output.is_disjoint_from(other), "`{operation}`: output {output:?} overlaps {other:?}");
    }
}

/// Panics if `output` overlaps one of `inputs` without being exactly the same view.
pub(crate) fn assert_disjoint_or_same<const N: usize>(
    operation: &str,
    output: impl Into<Footprint>,
    inputs: [Footprint; N],
) {
    let output = output.into();
    for input in inputs {
        assert!(
            output == input || output.is_disjoint_from(input),
            "`{operation}`: output {output:?} overlaps {input:?} without being the same view"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(address: usize, rows: usize, columns: usize, stride: usize) -> Footprint {
        Footprint::rows(address, rows, columns * 4, stride * 4)
    }

    #[test]
    fn column_halves_of_one_matrix_are_disjoint() {
        let gate = rows(1000, 5, 8, 16);
        let up = rows(1000 + 32, 5, 8, 16);
        assert!(gate.is_disjoint_from(up) && up.is_disjoint_from(gate));
        let nine_columns = rows(1000, 5, 9, 16);
        assert!(!nine_columns.is_disjoint_from(up) && !up.is_disjoint_from(nine_columns));
        let wraps = rows(1000 + 48, 5, 8, 16);
        assert!(!wraps.is_disjoint_from(gate) && !gate.is_disjoint_from(wraps));
    }

    #[test]
    fn neighbours_are_disjoint_and_shifted_rows_are_not() {
        assert!(rows(1000, 2, 8, 8).is_disjoint_from(rows(1064, 2, 8, 8)));
        assert!(!rows(1000, 2, 8, 8).is_disjoint_from(rows(1032, 2, 8, 8)));
        assert!(!rows(1000, 2, 8, 8).is_disjoint_from(rows(1000, 1, 4, 4)));
        assert!(rows(1000, 0, 8, 8).is_disjoint_from(rows(1000, 1, 8, 8)));
    }

    #[test]
    fn the_stride_of_a_single_row_is_ignored() {
        assert_eq!(rows(1000, 1, 8, 8), rows(1000, 1, 8, 16));
        assert_ne!(rows(1000, 2, 8, 8), rows(1000, 2, 8, 16));
    }

    #[test]
    #[should_panic(expected = "without being the same view")]
    fn a_shifted_output_is_refused() {
        assert_disjoint_or_same("test", rows(1000, 2, 8, 8), [rows(1004, 2, 8, 8)]);
    }
}
