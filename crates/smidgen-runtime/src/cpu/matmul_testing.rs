//! Shared code of the tests of the bf16 and the split matmul: operands of random numbers, a reference in f64, and a
//! harness that runs a matmul on a thread pool.
//!
//! Compiled for tests only.

use super::kernel::OutputView;
use super::matmul_terms::{Init, Left, Output, Term};
use super::pool::Pool;
use super::stored::Stored;
use super::testing::{numbers, sane_bytes};
use smidgen_ir::Storage;
use smidgen_ir::quant;

/// One term of a test, with its elements.
pub struct Operands {
    pub left: Vec<f32>,
    pub left_transposed: bool,
    bytes: Vec<u8>,
    right: Vec<f32>,
    storage: Storage,
    right_transposed: bool,
    depth: usize,
    pub scale: f32,
}

impl Operands {
    pub fn new(
        (rows, columns): (usize, usize),
        depth: usize,
        right_transposed: bool,
        storage: Storage,
    ) -> Self {
        let (r, c) = if right_transposed { (columns, depth) } else { (depth, columns) };
        let bytes = sane_bytes(storage, r, c);
        let mut right = vec![0.0; r * c];
        quant::decode(storage, r, c, &bytes, 0, &mut right);
        let left = numbers(depth as u64 + 3, rows * depth);
        let (left_transposed, scale) = (false, 1.0);
        Operands { left, left_transposed, bytes, right, storage, right_transposed, depth, scale }
    }

    /// Operands of the given f32 elements; the right one is transposed.
    pub fn of(left: Vec<f32>, right: Vec<f32>, depth: usize) -> Operands {
        let bytes = right.iter().flat_map(|number| number.to_le_bytes()).collect();
        let (left_transposed, right_transposed, scale) = (false, true, 1.0);
        let storage = Storage::F32;
        Operands { left, left_transposed, bytes, right, storage, right_transposed, depth, scale }
    }

    fn term(&self, rows: usize, columns: usize) -> Term {
        let (row_stride, depth_stride) = if self.left_transposed { (1, rows) } else { (self.depth, 1) };
        let (r, c) = if self.right_transposed { (columns, self.depth) } else { (self.depth, columns) };
        Term {
            left: Left { pointer: self.left.as_ptr(), row_stride, depth_stride },
            right: Stored::dense(self.bytes.as_ptr(), self.storage, r, c),
            right_transposed: self.right_transposed,
            scale: self.scale,
        }
    }

    /// The sum at (i, j), and the sum of magnitudes. The right operand is scaled in f32, as packing does.
    fn sum(
        &self,
        (i, j): (usize, usize),
        (rows, columns): (usize, usize),
        round: fn(f32) -> f32,
    ) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for k in 0..self.depth {
            let left =
                if self.left_transposed { self.left[k * rows + i] } else { self.left[i * self.depth + k] };
            let at = if self.right_transposed { j * self.depth + k } else { k * columns + j };
            let product = f64::from(round(left)) * f64::from(round(self.right[at] * self.scale));
            sums = (sums.0 + product, sums.1 + product.abs());
        }
        sums
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Start {
    Overwrite,
    Accumulate,
    Bias,
}

impl Start {
    pub const ALL: [Start; 3] = [Start::Overwrite, Start::Accumulate, Start::Bias];
}

/// A sum to compute: C (rows, columns) from its terms.
#[derive(Clone, Copy)]
pub struct Sum<'a> {
    pub shape: (usize, usize),
    pub terms: &'a [Operands],
    pub start: Start,
    pub transposed_output: bool,
}

impl Sum<'_> {
    /// Computes C on a pool; `multiply` gets the arguments of a matmul, with `floats` of workspace.
    pub fn run(
        &self,
        threads: usize,
        floats: usize,
        multiply: impl FnOnce(&[Term], Init, Output, &mut [f32]),
    ) -> Vec<f32> {
        let (rows, columns) = self.shape;
        let terms: Vec<Term> = self.terms.iter().map(|operands| operands.term(rows, columns)).collect();
        let bias = numbers(77, columns);
        let mut c = match self.start {
            Start::Accumulate => numbers(78, rows * columns),
            Start::Overwrite | Start::Bias => vec![f32::NAN; rows * columns],
        };
        let (row_stride, column_stride) = if self.transposed_output { (1, rows) } else { (columns, 1) };
        let view = OutputView { pointer: c.as_mut_ptr(), row_stride, column_stride };
        let init = match self.start {
            Start::Overwrite => Init::Overwrite,
            Start::Accumulate => Init::Accumulate,
            Start::Bias => Init::Bias(bias.as_ptr()),
        };
        let mut workspace = vec![f32::NAN; floats];
        Pool::new(threads)
            .expect("a pool starts")
            .enter(|| multiply(&terms, init, Output { view, rows, columns }, &mut workspace));
        c
    }

    /// Calls `check(element, index in C, expected value, sum of magnitudes)` for every element of C, with operands
    /// rounded by `round`.
    pub fn for_each_expected(
        &self,
        round: fn(f32) -> f32,
        mut check: impl FnMut((usize, usize), usize, f64, f64),
    ) {
        let (rows, columns) = self.shape;
        let (bias, old) = (numbers(77, columns), numbers(78, rows * columns));
        for i in 0..rows {
            for j in 0..columns {
                let at = if self.transposed_output { j * rows + i } else { i * columns + j };
                let first = match self.start {
                    Start::Overwrite => 0.0,
                    Start::Accumulate => f64::from(old[at]),
                    Start::Bias => f64::from(bias[j]),
                };
                let (mut want, mut size) = (first, first.abs());
                for operands in self.terms {
                    let (sum, magnitude) = operands.sum((i, j), self.shape, round);
                    (want, size) = (want + sum, size + magnitude);
                }
                check((i, j), at, want, size);
            }
        }
    }
}

/// A row of the left operand with a NaN or an infinity makes the same row of C not finite, and no other.
pub fn check_not_finite(storage: Storage, run: impl Fn(Sum<'_>) -> Vec<f32>) {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut operands = Operands::new((20, 20), 40, true, storage);
        operands.left[3 * 40 + 7] = bad;
        let c = run(Sum {
            shape: (20, 20),
            terms: &[operands],
            start: Start::Overwrite,
            transposed_output: false,
        });
        for (index, value) in c.iter().enumerate() {
            assert_eq!(value.is_finite(), index / 20 != 3, "element {index}");
        }
    }
}
