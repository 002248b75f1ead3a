//! Tests of the bf16 matmul on every unit of this machine, against sums in f64 over rounded operands.
//!
//! On a machine without a unit for bf16 they test nothing.

use super::super::matmul_testing::{Operands, Start, Sum, check_not_finite};
use super::super::testing::{assert_same_bits, storages_with};
use super::{Bf16Unit, bf16_matmul};
use half::bf16;
use smidgen_ir::Storage;
use smidgen_ir::workspace_cpu::bf16_matmul_floats;

fn supported() -> Vec<Bf16Unit> {
    Bf16Unit::ALL.into_iter().filter(|unit| unit.is_supported()).collect()
}

fn run(unit: Bf16Unit, threads: usize, sum: Sum<'_>) -> Vec<f32> {
    sum.run(threads, bf16_matmul_floats(), |terms, init, output, workspace| {
        // SAFETY: the unit is supported, operands have the shapes of their terms, and C overlaps none of them.
        unsafe { bf16_matmul(unit, terms, init, output, workspace) }
    })
}

fn check(unit: Bf16Unit, shape: (usize, usize), terms: &[Operands], start: Start, transposed_output: bool) {
    let sum = Sum { shape, terms, start, transposed_output };
    let got = run(unit, 2, sum);
    let round = |x: f32| bf16::from_f32(x).to_f32();
    sum.for_each_expected(round, |element, at, want, size| {
        let difference = (f64::from(got[at]) - want).abs();
        assert!(
            difference <= 1e-6 * size + 1e-30,
            "{unit:?} {shape:?}, {start:?}: element {element:?} is {}, not {want}",
            got[at]
        );
    });
}

#[test]
fn many_shapes_match_the_reference() {
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
                for start in Start::ALL {
                    let mut operands = Operands::new((rows, columns), depth, right_transposed, Storage::F32);
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
                let mut operands = Operands::new((rows, columns), depth, right_transposed, storage);
                operands.scale = scale;
                check(unit, (rows, columns), &[operands], Start::Overwrite, false);
            }
        }
    }
}

/// A block of columns that is rounded up to whole groups still fits its part of the workspace.
#[test]
fn blocks_of_any_size_stay_in_their_workspace() {
    for (columns, depth) in [(1137, 1152), (900, 1400), (2041, 640), (700, 1900)] {
        for unit in supported() {
            let operands = Operands::new((33, columns), depth, true, Storage::F32);
            check(unit, (33, columns), &[operands], Start::Overwrite, false);
        }
    }
}

#[test]
fn several_terms_are_one_sum() {
    let shape = (70, 66);
    for unit in supported() {
        let mut terms: Vec<Operands> = [640, 16, 1500, 7, 130]
            .map(|depth| Operands::new(shape, depth, depth != 130, Storage::F32))
            .into();
        terms[1].scale = 2.0;
        terms[3].scale = -0.5;
        check(unit, shape, &terms, Start::Bias, false);
        check(unit, shape, &[], Start::Bias, false);
    }
}

#[test]
fn threads_do_not_change_the_bytes() {
    let shape = (170, 130);
    for unit in supported() {
        let terms = [Operands::new(shape, 2500, true, Storage::F32)];
        let sum = Sum { shape, terms: &terms, start: Start::Overwrite, transposed_output: false };
        let one = run(unit, 1, sum);
        for threads in [2, 3, 5] {
            assert_same_bits(&format!("{unit:?} on {threads} threads"), &run(unit, threads, sum), &one);
        }
    }
}

/// Sums over several chunks of depth continue in the same way in rows that fill a square and in rows that do not.
#[test]
fn other_rows_do_not_change_the_bytes() {
    let columns = 70;
    for unit in supported() {
        for start in Start::ALL {
            let matmul = |rows: usize| {
                let terms = [Operands::new((rows, columns), 2500, true, Storage::F32)];
                run(unit, 2, Sum { shape: (rows, columns), terms: &terms, start, transposed_output: false })
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
fn nan_and_infinity_stay_in_their_row() {
    for unit in supported() {
        check_not_finite(Storage::F32, |sum| run(unit, 1, sum));
    }
}
