//! Products of bf16 on every unit of the machine against sums in f64 over operands that are rounded one by one.
//! On a machine without a unit for bf16 nothing is tested here.

use super::super::kernel::OutputView;
use super::super::matmul::{Init, Left, Output, Term};
use super::super::pool::Pool;
use super::super::stored::Stored;
use super::super::testing::{assert_same_bits, numbers, sane_bytes, storages_with};
use super::{Bf16Unit, bf16_matmul};
use smidgen_ir::quant;
use half::bf16;
use smidgen_ir::Storage;
use smidgen_ir::workspace_cpu::bf16_matmul_floats;

fn supported() -> Vec<Bf16Unit> {
    Bf16Unit::ALL.into_iter().filter(|unit| unit.is_supported()).collect()
}

/// One term of a test: shapes, how its operands lie, and their elements.
struct Operands {
    left: Vec<f32>,
    left_transposed: bool,
    bytes: Vec<u8>,
    right: Vec<f32>,
    storage: Storage,
    right_transposed: bool,
    depth: usize,
    scale: f32,
}

impl Operands {
    fn new(rows: usize, columns: usize, depth: usize, right_transposed: bool, storage: Storage) -> Operands {
        let (r, c) = if right_transposed { (columns, depth) } else { (depth, columns) };
        let bytes = sane_bytes(storage, r, c);
        let mut right = vec![0.0; r * c];
        quant::decode(storage, r, c, &bytes, 0, &mut right);
        Operands {
            left: numbers(depth as u64 + 3, rows * depth),
            left_transposed: false,
            bytes,
            right,
            storage,
            right_transposed,
            depth,
            scale: 1.0,
        }
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

    /// The sum at (i, j), and the sum of magnitudes.
    fn sum(&self, i: usize, j: usize, rows: usize, columns: usize) -> (f64, f64) {
        let round = |x: f32| f64::from(bf16::from_f32(x).to_f32());
        let mut sums = (0.0, 0.0);
        for k in 0..self.depth {
            let left =
                if self.left_transposed { self.left[k * rows + i] } else { self.left[i * self.depth + k] };
            let at = if self.right_transposed { j * self.depth + k } else { k * columns + j };
            let matmul = round(left) * round(self.right[at] * self.scale);
            sums = (sums.0 + matmul, sums.1 + matmul.abs());
        }
        sums
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Start {
    Overwrite,
    Accumulate,
    Bias,
}

fn run(
    unit: Bf16Unit,
    threads: usize,
    (rows, columns): (usize, usize),
    terms: &[Operands],
    start: Start,
    transposed_output: bool,
) -> Vec<f32> {
    let terms: Vec<Term> = terms.iter().map(|operands| operands.term(rows, columns)).collect();
    let bias = numbers(77, columns);
    let mut c = match start {
        Start::Accumulate => numbers(78, rows * columns),
        Start::Overwrite | Start::Bias => vec![f32::NAN; rows * columns],
    };
    let (row_stride, column_stride) = if transposed_output { (1, rows) } else { (columns, 1) };
    let view = OutputView { pointer: c.as_mut_ptr(), row_stride, column_stride };
    let init = match start {
        Start::Overwrite => Init::Overwrite,
        Start::Accumulate => Init::Accumulate,
        Start::Bias => Init::Bias(bias.as_ptr()),
    };
    let init = SendInit(init);
    let mut workspace = vec![f32::NAN; bf16_matmul_floats()];
    Pool::new(threads).unwrap().enter(|| {
        let init = &init;
        // SAFETY: operands have the shapes of the terms, C is apart from them.
        unsafe { bf16_matmul(unit, &terms, init.0, Output { view, rows, columns }, &mut workspace) }
    });
    c
}

/// A bias is an address.
struct SendInit(Init);
// SAFETY: the bias outlives the call and is only read.
unsafe impl Sync for SendInit {}

fn check(unit: Bf16Unit, shape: (usize, usize), terms: &[Operands], start: Start, transposed_output: bool) {
    let (rows, columns) = shape;
    let got = run(unit, 2, shape, terms, start, transposed_output);
    let (bias, old) = (numbers(77, columns), numbers(78, rows * columns));
    for i in 0..rows {
        for j in 0..columns {
            let at = if transposed_output { j * rows + i } else { i * columns + j };
            let first = match start {
                Start::Overwrite => 0.0,
                Start::Accumulate => f64::from(old[at]),
                Start::Bias => f64::from(bias[j]),
            };
            let (mut want, mut size) = (first, first.abs());
            for operands in terms {
                let (sum, magnitude) = operands.sum(i, j, rows, columns);
                (want, size) = (want + sum, size + magnitude);
            }
            let difference = (f64::from(got[at]) - want).abs();
            assert!(
                difference <= 1e-6 * size + 1e-30,
                "{unit:?} {rows} × {columns}, {start:?}: element ({i}, {j}) is {}, not {want}",
                got[at]
            );
        }
    }
}

#[test]
fn products_of_many_shapes_are_right() {
    for unit in supported() {
        for (rows, columns, depth) in [
            (1, 1, 1),
            (3, 17, 5),
            (16, 16, 32),
            (33, 47, 100),
            (130, 70, 577),
            (40, 200, 2100),
            (64, 96, 64),
        ] {
            for (right_transposed, left_transposed) in
                [(true, false), (false, false), (true, true), (false, true)]
            {
                for start in [Start::Overwrite, Start::Accumulate, Start::Bias] {
                    let mut operands = Operands::new(rows, columns, depth, right_transposed, Storage::F32);
                    operands.left_transposed = left_transposed;
                    check(unit, (rows, columns), &[operands], start, left_transposed);
                }
            }
        }
    }
}

#[test]
fn every_storage_is_decoded_and_scaled() {
    let (rows, columns, depth) = (18, 256, 256);
    for unit in supported() {
        for storage in storages_with(columns) {
            for (right_transposed, scale) in [(true, 0.37), (false, 0.37), (true, 1.0), (false, 1.0)] {
                let mut operands = Operands::new(rows, columns, depth, right_transposed, storage);
                operands.scale = scale;
                check(unit, (rows, columns), &[operands], Start::Overwrite, false);
            }
        }
    }
}

/// A block of columns that is rounded up to whole groups still lies inside its part of the workspace.
#[test]
fn blocks_of_any_size_stay_in_their_workspace() {
    for (columns, depth) in [(1137, 1152), (900, 1400), (2041, 640), (700, 1900)] {
        for unit in supported() {
            let operands = Operands::new(33, columns, depth, true, Storage::F32);
            check(unit, (33, columns), &[operands], Start::Overwrite, false);
        }
    }
}

#[test]
fn several_terms_are_one_sum() {
    let shape = (70, 66);
    for unit in supported() {
        let mut terms: Vec<Operands> = [640, 16, 1500, 7, 130]
            .map(|depth| Operands::new(shape.0, shape.1, depth, depth != 130, Storage::F32))
            .into();
        terms[1].scale = 2.0;
        terms[3].scale = -0.5;
        check(unit, shape, &terms, Start::Bias, false);
        check(unit, shape, &[], Start::Bias, false);
    }
}

#[test]
fn the_number_of_threads_does_not_show() {
    let shape = (170, 130);
    for unit in supported() {
        let terms = [Operands::new(shape.0, shape.1, 2500, true, Storage::F32)];
        let one = run(unit, 1, shape, &terms, Start::Overwrite, false);
        for threads in [2, 3, 5] {
            let many = run(unit, threads, shape, &terms, Start::Overwrite, false);
            assert_same_bits(&format!("{unit:?} on {threads} threads"), &many, &one);
        }
    }
}

/// Sums over several blocks of depth go on in rows that fill no square as they do in those that do.
#[test]
fn other_rows_do_not_show() {
    let columns = 70;
    for unit in supported() {
        for start in [Start::Overwrite, Start::Accumulate, Start::Bias] {
            let matmul = |rows: usize| {
                let terms = [Operands::new(rows, columns, 2500, true, Storage::F32)];
                run(unit, 2, (rows, columns), &terms, start, false)
            };
            let all = matmul(160);
            for rows in [1, 20, 33, 130] {
                assert_same_bits(
                    &format!("{unit:?} {rows} rows"),
                    &matmul(rows),
                    &all[..rows * columns].to_vec(),
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    for unit in supported() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut operands = Operands::new(20, 20, 40, true, Storage::F32);
            operands.left[3 * 40 + 7] = bad;
            let c = run(unit, 1, (20, 20), &[operands], Start::Overwrite, false);
            for (index, value) in c.iter().enumerate() {
                assert_eq!(value.is_finite(), index / 20 != 3, "element {index}");
            }
        }
    }
}
