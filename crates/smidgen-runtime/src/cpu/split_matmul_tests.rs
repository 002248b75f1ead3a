//! Products of f32 by AMX against sums in f64, and against what the product by vectors errs on the same operands.
//! On a machine without AMX nothing is tested here.

use super::super::bf16_unit::Bf16Unit;
use super::super::counter::uniform;
use super::super::isa::Isa;
use super::super::kernel::OutputView;
use super::super::matmul::{Init, Left, Output, Term, matmul};
use super::super::pool::Pool;
use super::super::stored::Stored;
use super::super::testing::{assert_same_bits, numbers, sane_bytes, storages_with};
use super::split_matmul;
use smidgen_ir::quant;
use smidgen_ir::workspace_cpu::matmul_floats;
use smidgen_ir::{DType, Storage};

const BF16: Storage = Storage::Plain(DType::Bf16);

/// One term of a test: how its operands lie, and their elements.
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
    fn new((rows, columns): (usize, usize), depth: usize, right_transposed: bool, storage: Storage) -> Self {
        let (r, c) = if right_transposed { (columns, depth) } else { (depth, columns) };
        let bytes = sane_bytes(storage, r, c);
        let mut right = vec![0.0; r * c];
        quant::decode(storage, r, c, &bytes, 0, &mut right);
        let left = numbers(depth as u64 + 3, rows * depth);
        let (left_transposed, scale) = (false, 1.0);
        Operands { left, left_transposed, bytes, right, storage, right_transposed, depth, scale }
    }

    /// Of f32, with the elements given.
    fn of(left: Vec<f32>, right: Vec<f32>, depth: usize) -> Operands {
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

    /// The sum at (i, j), and the sum of magnitudes. A right operand is scaled in f32, as it is where it is packed.
    fn sum(&self, i: usize, j: usize, rows: usize, columns: usize) -> (f64, f64) {
        let mut sums = (0.0, 0.0);
        for k in 0..self.depth {
            let left =
                if self.left_transposed { self.left[k * rows + i] } else { self.left[i * self.depth + k] };
            let at = if self.right_transposed { j * self.depth + k } else { k * columns + j };
            let matmul = f64::from(left) * f64::from(self.right[at] * self.scale);
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

#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Split,
    Vectors,
}

fn run(
    way: Way,
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
    let init = SendInit(match start {
        Start::Overwrite => Init::Overwrite,
        Start::Accumulate => Init::Accumulate,
        Start::Bias => Init::Bias(bias.as_ptr()),
    });
    let mut workspace = vec![f32::NAN; matmul_floats(threads)];
    Pool::new(threads).unwrap().enter(|| {
        let (init, output) = (&init, Output { view, rows, columns });
        // SAFETY: operands have the shapes of the terms, C is apart from them; AMX is there.
        unsafe {
            match way {
                Way::Split => split_matmul(&terms, init.0, output, &mut workspace),
                Way::Vectors => matmul(Isa::detect(), &terms, init.0, output, &mut workspace),
            }
        }
    });
    c
}

/// A bias is an address.
struct SendInit(Init);
// SAFETY: the bias outlives the call and is only read.
unsafe impl Sync for SendInit {}

/// Holds every element to f64, and the errors of all together to those of the product by vectors.
fn check(shape: (usize, usize), terms: &[Operands], start: Start, transposed_output: bool) {
    let (rows, columns) = shape;
    let [split, vectors] =
        [Way::Split, Way::Vectors].map(|way| run(way, 2, shape, terms, start, transposed_output));
    let (bias, old) = (numbers(77, columns), numbers(78, rows * columns));
    let mut squares = [0.0f64; 2];
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
            let errors = [&split, &vectors].map(|c| (f64::from(c[at]) - want).abs() / size.max(1e-30));
            assert!(
                errors[0] <= 1e-6,
                "{rows} × {columns}, {start:?}: element ({i}, {j}) is {}, not {want}, of {size} in all",
                split[at]
            );
            squares = [0, 1].map(|way| squares[way] + errors[way] * errors[way]);
        }
    }
    // Where sums are short, both err by less than a rounding; where one product outweighs the others, it is rounded
    // once by vectors and several times here, because it is a sum itself.
    let [split, vectors] = squares.map(|sum| (sum / (rows * columns) as f64).sqrt());
    assert!(
        split <= 2.0 * vectors.max(2e-8),
        "{rows} × {columns}: errors of {split:e}, by vectors {vectors:e}"
    );
}

fn has_amx() -> bool {
    Bf16Unit::Amx.is_supported()
}

#[test]
fn products_of_many_shapes_are_those_of_f32() {
    if !has_amx() {
        return;
    }
    for (rows, columns, depth) in
        [(1, 1, 1), (3, 17, 5), (16, 16, 32), (33, 47, 100), (130, 70, 577), (40, 200, 2100), (550, 96, 64)]
    {
        for (right_transposed, left_transposed) in
            [(true, false), (false, false), (true, true), (false, true)]
        {
            for start in [Start::Overwrite, Start::Accumulate, Start::Bias] {
                let mut operands = Operands::new((rows, columns), depth, right_transposed, Storage::F32);
                operands.left_transposed = left_transposed;
                check((rows, columns), &[operands], start, left_transposed);
            }
        }
    }
}

#[test]
fn every_storage_is_decoded_and_scaled() {
    if !has_amx() {
        return;
    }
    let shape = (18, 256);
    for storage in storages_with(shape.1) {
        for (right_transposed, scale) in [(true, 0.37), (false, 0.37), (true, 1.0), (false, 1.0)] {
            let mut operands = Operands::new(shape, 512, right_transposed, storage);
            operands.scale = scale;
            check(shape, &[operands], Start::Overwrite, false);
        }
    }
}

#[test]
fn several_terms_are_one_sum() {
    if !has_amx() {
        return;
    }
    let shape = (70, 66);
    let mut terms: Vec<Operands> = [640, 16, 1500, 7, 130]
        .map(|depth| {
            Operands::new(shape, depth, depth != 130, if depth == 1500 { BF16 } else { Storage::F32 })
        })
        .into();
    terms[1].scale = 2.0;
    terms[3].scale = -0.5;
    check(shape, &terms, Start::Bias, false);
    check(shape, &[], Start::Bias, false);
}

/// Numbers of magnitudes from 1e-18 to 1e18 side by side.
#[test]
fn badly_scaled_operands_err_as_in_f32() {
    if !has_amx() {
        return;
    }
    let scaled = |seed: u64, len: usize| -> Vec<f32> {
        let exponent = |index: usize| 36.0 * uniform(seed + 1, index as u64) - 18.0;
        numbers(seed, len).iter().enumerate().map(|(index, x)| x * 10f32.powf(exponent(index))).collect()
    };
    let (shape, depth) = ((40, 70), 700);
    let operands = Operands::of(scaled(1, shape.0 * depth), scaled(5, shape.1 * depth), depth);
    check(shape, &[operands], Start::Overwrite, false);
    // One number apart, so that nothing hides in a larger one.
    let operands = Operands::of(scaled(9, 300), scaled(11, 300), 1);
    check((300, 300), &[operands], Start::Overwrite, false);
}

#[test]
fn what_cancels_out_errs_as_in_f32() {
    if !has_amx() {
        return;
    }
    let (shape, half) = ((33, 65), 400);
    let (mut left, mut right) = (vec![], vec![]);
    for row in numbers(3, shape.0 * half).chunks(half) {
        left.extend(row.iter().copied().chain(row.iter().map(|x| -x)));
    }
    for row in numbers(4, shape.1 * half).chunks(half) {
        right.extend(row.iter().chain(row));
    }
    check(shape, &[Operands::of(left, right, 2 * half)], Start::Overwrite, false);
}

/// The largest numbers of f32 are above those of bf16.
#[test]
fn the_largest_numbers_stay_finite() {
    if !has_amx() {
        return;
    }
    let left = vec![f32::MAX, -f32::MAX, 3.3961e38, 3.39e38, 1.5, 3.0];
    let right = vec![0.3, 1e-9, -0.7, 1.0, 1e-20, 0.9];
    check((6, 6), &[Operands::of(left, right, 1)], Start::Overwrite, false);
}

#[test]
fn neither_threads_nor_other_rows_show() {
    if !has_amx() {
        return;
    }
    let (columns, depth) = (130, 2500);
    for (storage, start) in
        [(Storage::F32, Start::Overwrite), (BF16, Start::Bias), (Storage::F32, Start::Accumulate)]
    {
        let matmul = |rows: usize, threads: usize| {
            let mut terms = [
                Operands::new((rows, columns), depth, true, storage),
                Operands::new((rows, columns), 16, true, Storage::F32),
            ];
            terms[1].scale = 2.0;
            run(Way::Split, threads, (rows, columns), &terms, start, false)
        };
        let all = matmul(1100, 1);
        for threads in [2, 3, 5] {
            assert_same_bits(&format!("{threads} threads"), &matmul(1100, threads), &all);
        }
        for rows in [1, 17, 33, 170] {
            assert_same_bits(&format!("{rows} rows"), &matmul(rows, 2), &all[..rows * columns].to_vec());
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    if !has_amx() {
        return;
    }
    for storage in [Storage::F32, BF16] {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut operands = Operands::new((20, 20), 40, true, storage);
            operands.left[3 * 40 + 7] = bad;
            let c = run(Way::Split, 1, (20, 20), &[operands], Start::Overwrite, false);
            for (index, value) in c.iter().enumerate() {
                assert_eq!(value.is_finite(), index / 20 != 3, "element {index}");
            }
        }
    }
}
