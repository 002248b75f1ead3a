//! Tests of the split matmul against sums in f64, and of its errors against those of the f32 matmul.
//!
//! On a machine without AMX they test nothing.

use super::super::bf16_unit::Bf16Unit;
use super::super::counter::uniform;
use super::super::isa::Isa;
use super::super::matmul::matmul;
use super::super::matmul_testing::{Operands, Start, Sum, check_not_finite};
use super::super::testing::{assert_same_bits, numbers, storages_with};
use super::split_matmul;
use smidgen_ir::workspace_cpu::matmul_floats;
use smidgen_ir::{DType, Storage};

const BF16: Storage = Storage::Plain(DType::Bf16);

fn run_split(threads: usize, sum: Sum<'_>) -> Vec<f32> {
    sum.run(threads, matmul_floats(threads), |terms, init, output, workspace| {
        // SAFETY: the machine has AMX, operands have the shapes of their terms, and C overlaps none of them.
        unsafe { split_matmul(terms, init, output, workspace) }
    })
}

fn run_vectors(threads: usize, sum: Sum<'_>) -> Vec<f32> {
    sum.run(threads, matmul_floats(threads), |terms, init, output, workspace| {
        // SAFETY: as above.
        unsafe { matmul(Isa::detect(), terms, init, output, workspace) }
    })
}

/// Compares every element with f64, and the errors of all elements together with those of the f32 matmul.
fn check(shape: (usize, usize), terms: &[Operands], start: Start, transposed_output: bool) {
    let sum = Sum { shape, terms, start, transposed_output };
    let (split, vectors) = (run_split(2, sum), run_vectors(2, sum));
    let mut squares = [0.0f64; 2];
    sum.for_each_expected(
        |x| x,
        |element, at, want, size| {
            let errors = [&split, &vectors].map(|c| (f64::from(c[at]) - want).abs() / size.max(1e-30));
            assert!(
                errors[0] <= 1e-6,
                "{shape:?}, {start:?}: element {element:?} is {}, not {want}; magnitudes sum to {size}",
                split[at]
            );
            squares = [0, 1].map(|which| squares[which] + errors[which] * errors[which]);
        },
    );
    // Errors of short sums are below one rounding with both. Where one product outweighs the others, vectors round it
    // once, but here it is itself a sum and is rounded several times.
    let [split, vectors] = squares.map(|sum| (sum / (shape.0 * shape.1) as f64).sqrt());
    assert!(split <= 2.0 * vectors.max(2e-8), "{shape:?}: errors of {split:e}, with vectors {vectors:e}");
}

fn has_amx() -> bool {
    Bf16Unit::Amx.is_supported()
}

#[test]
fn many_shapes_match_the_reference() {
    if !has_amx() {
        return;
    }
    for (rows, columns, depth) in
        [(1, 1, 1), (3, 17, 5), (16, 16, 32), (33, 47, 100), (130, 70, 577), (40, 200, 2100), (550, 96, 64)]
    {
        for (right_transposed, left_transposed) in
            [(true, false), (false, false), (true, true), (false, true)]
        {
            for start in Start::ALL {
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

/// Magnitudes from 1e-18 to 1e18 in one operand.
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
    // Depth 1: no small product hides behind a larger one.
    let operands = Operands::of(scaled(9, 300), scaled(11, 300), 1);
    check((300, 300), &[operands], Start::Overwrite, false);
}

#[test]
fn cancellation_errs_as_in_f32() {
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

/// The largest f32 numbers are above the largest bf16 numbers.
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
fn neither_threads_nor_other_rows_change_the_bytes() {
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
            run_split(threads, Sum { shape: (rows, columns), terms: &terms, start, transposed_output: false })
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
fn nan_and_infinity_stay_in_their_row() {
    if !has_amx() {
        return;
    }
    for storage in [Storage::F32, BF16] {
        check_not_finite(storage, |sum| run_split(1, sum));
    }
}
