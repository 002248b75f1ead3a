//! Tests the f32 matmul against a naive one in f64: odd shapes, strides, formats, sums of terms, inits and
//! instruction sets. Also tests that any number of threads gives the same bytes.
//!
//! Operands are small multiples of 1/16, which every element format represents exactly, so one tolerance
//! suits all formats.
//! Left out: speed.

use crate::numbers::{Content, bits, encode};
use smidgen_ir::workspace_cpu::matmul_floats;
use smidgen_ir::{DType, Storage};
use smidgen_runtime::cpu::isa::Isa;
use smidgen_runtime::cpu::kernel::OutputView;
use smidgen_runtime::cpu::matmul::matmul;
use smidgen_runtime::cpu::matmul_terms::{Init, Left, Output, Term};
use smidgen_runtime::cpu::pool::Pool;
use smidgen_runtime::cpu::stored::Stored;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Start {
    Overwrite,
    Accumulate,
    Bias,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    depth: usize,
    element: DType,
    right_transposed: bool,
    left_rows_contiguous: bool,
    scale: f32,
}

#[derive(Clone, Copy, Debug)]
struct Sum<'a> {
    rows: usize,
    columns: usize,
    terms: &'a [Shape],
    start: Start,
    output_transposed: bool,
    isa: Isa,
    threads: usize,
}

/// Multiples of 1/16 in -1..=1, without a pattern that rows or columns could share.
fn value(seed: usize, index: usize) -> f32 {
    let mixed = (index as u64 + 1)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add((seed as u64).wrapping_mul(0xD1B5_4A32_D192_ED03));
    let bits = (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40;
    (bits % 33) as f32 / 16.0 - 1.0
}

/// Runs the sum, compares every element with the naive result and returns all bytes of the buffer of C.
fn check(sum: Sum<'_>) -> Vec<u32> {
    let Sum { rows, columns, .. } = sum;
    const PAD: usize = 3;
    const UNTOUCHED: f32 = 777.0;
    let mut lefts = vec![];
    let mut rights = vec![];
    let mut expected = vec![0.0f64; rows * columns];
    let (out_row, out_column) = if sum.output_transposed { (1, rows + PAD) } else { (columns + PAD, 1) };
    let mut c = vec![UNTOUCHED; rows.max(columns) * (rows.max(columns) + PAD)];
    let bias: Vec<f32> = (0..columns).map(|j| value(90, j)).collect();
    for i in 0..rows {
        for j in 0..columns {
            let old = value(91, i * columns + j);
            c[i * out_row + j * out_column] = old;
            expected[i * columns + j] = match sum.start {
                Start::Overwrite => 0.0,
                Start::Accumulate => f64::from(old),
                Start::Bias => f64::from(bias[j]),
            };
        }
    }
    let mut weight = 0.0f64;
    for (seed, shape) in sum.terms.iter().enumerate() {
        let depth = shape.depth;
        let (left_row, left_depth, left_len) = if shape.left_rows_contiguous {
            (1, rows + PAD, depth * (rows + PAD))
        } else {
            (depth + PAD, 1, rows * (depth + PAD))
        };
        let left: Vec<f32> = (0..left_len).map(|x| value(seed, x)).collect();
        let (stored_rows, stored_columns) =
            if shape.right_transposed { (columns, depth) } else { (depth, columns) };
        let stride = stored_columns + PAD;
        // The last row has no padding after it, so reading past it would leave the buffer.
        let stored_len = stored_rows * stride - if stored_rows > 0 { PAD } else { 0 };
        let right: Vec<f32> = (0..stored_len).map(|x| value(seed + 40, x)).collect();
        for i in 0..rows {
            for j in 0..columns {
                let mut total = 0.0;
                for k in 0..depth {
                    let at = if shape.right_transposed { j * stride + k } else { k * stride + j };
                    let factor = left[i * left_row + k * left_depth];
                    total += f64::from(factor) * f64::from(right[at]);
                }
                expected[i * columns + j] += f64::from(shape.scale) * total;
            }
        }
        weight += (depth as f64).sqrt() * f64::from(shape.scale.abs());
        let right = encode(&Content::Reals(right), Storage::Plain(shape.element));
        rights.push((right, stored_rows, stored_columns, stride));
        lefts.push((left, left_row, left_depth));
    }
    let terms: Vec<Term> = sum
        .terms
        .iter()
        .zip(lefts.iter().zip(&rights))
        .map(|(shape, (left, right))| Term {
            left: Left { pointer: left.0.as_ptr(), row_stride: left.1, depth_stride: left.2 },
            right: Stored {
                row_stride: right.3,
                ..Stored::dense(right.0.as_ptr(), Storage::Plain(shape.element), right.1, right.2)
            },
            right_transposed: shape.right_transposed,
            scale: shape.scale,
        })
        .collect();
    let init = match sum.start {
        Start::Overwrite => Init::Overwrite,
        Start::Accumulate => Init::Accumulate,
        Start::Bias => Init::Bias(bias.as_ptr()),
    };
    let output = Output {
        view: OutputView { pointer: c.as_mut_ptr(), row_stride: out_row, column_stride: out_column },
        rows,
        columns,
    };
    let mut workspace = vec![f32::NAN; matmul_floats(sum.threads)];
    Pool::new(sum.threads).unwrap().enter(|| {
        // SAFETY: all views were made from buffers of these shapes, and C overlaps none of them.
        unsafe { matmul(sum.isa, &terms, init, output, &mut workspace) }
    });
    let tolerance = 1e-6 * (1.0 + weight);
    let mut is_element = vec![false; c.len()];
    for i in 0..rows {
        for j in 0..columns {
            is_element[i * out_row + j * out_column] = true;
            let (got, want) = (c[i * out_row + j * out_column], expected[i * columns + j]);
            assert!(
                (f64::from(got) - want).abs() <= tolerance,
                "({i}, {j}): expected {want}, got {got}, in {sum:?}"
            );
        }
    }
    for (index, got) in c.iter().enumerate() {
        assert!(is_element[index] || *got == UNTOUCHED, "wrote outside C at {index} in {sum:?}");
    }
    bits(&c)
}

fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

const PLAIN: Shape =
    Shape { depth: 0, element: DType::F32, right_transposed: true, left_rows_contiguous: false, scale: 1.0 };

#[test]
fn every_small_shape() {
    for isa in supported() {
        for rows in [1, 2, 3, 5, 7, 8, 9, 17] {
            for columns in [1, 4, 7, 15, 16, 17, 31, 33, 47, 48, 49, 80, 97] {
                for depth in [1, 3, 16, 21] {
                    for right_transposed in [false, true] {
                        let shape = Shape { depth, right_transposed, ..PLAIN };
                        check(Sum {
                            rows,
                            columns,
                            terms: &[shape],
                            start: Start::Overwrite,
                            output_transposed: false,
                            isa,
                            threads: 1,
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn every_layout_format_and_init() {
    for isa in supported() {
        for element in [DType::F32, DType::Bf16, DType::F16] {
            for start in [Start::Overwrite, Start::Accumulate, Start::Bias] {
                for choice in 0..8 {
                    let shape = Shape {
                        depth: 150,
                        element,
                        right_transposed: choice & 1 > 0,
                        left_rows_contiguous: choice & 2 > 0,
                        scale: -0.75,
                    };
                    for (rows, columns) in [(21, 13), (70, 201), (101, 16)] {
                        check(Sum {
                            rows,
                            columns,
                            terms: &[shape],
                            start,
                            output_transposed: choice & 4 > 0,
                            isa,
                            threads: 2,
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_terms() {
    let mixed = [
        Shape { depth: 700, element: DType::Bf16, ..PLAIN },
        Shape { depth: 16, scale: 2.0, ..PLAIN },
        Shape { depth: 0, ..PLAIN },
        Shape { depth: 100, element: DType::F16, right_transposed: false, ..PLAIN },
        Shape { depth: 4, left_rows_contiguous: true, scale: 0.5, ..PLAIN },
        Shape { depth: 1301, right_transposed: false, ..PLAIN },
    ];
    let many = [Shape { depth: 37, scale: 0.25, ..PLAIN }; 37];
    for isa in supported() {
        for terms in [&mixed[..], &mixed[..2], &many[..], &[]] {
            for start in [Start::Overwrite, Start::Accumulate, Start::Bias] {
                for (rows, columns) in [(19, 50), (33, 230)] {
                    check(Sum { rows, columns, terms, start, output_transposed: false, isa, threads: 2 });
                }
            }
        }
    }
}

#[test]
fn narrow_sums_over_tokens() {
    let gradient =
        Shape { depth: 700, right_transposed: false, left_rows_contiguous: true, scale: 1.5, ..PLAIN };
    for isa in supported() {
        for output_transposed in [false, true] {
            for (rows, columns) in [(130, 16), (97, 4), (48, 47), (7, 9)] {
                check(Sum {
                    rows,
                    columns,
                    terms: &[gradient, Shape { depth: 30, ..gradient }],
                    start: Start::Accumulate,
                    output_transposed,
                    isa,
                    threads: 2,
                });
            }
        }
    }
}

#[test]
fn rows_that_compete_for_the_same_cache_sets_are_copied_right() {
    // A row stride of 1024 floats: depth 1021 and the padding of 3.
    let shape = Shape { depth: 1021, ..PLAIN };
    check(Sum {
        rows: 37,
        columns: 200,
        terms: &[shape],
        start: Start::Overwrite,
        output_transposed: false,
        isa: Isa::detect(),
        threads: 1,
    });
}

#[test]
fn the_same_bytes_for_any_number_of_threads() {
    let base = Shape { depth: 650, element: DType::Bf16, ..PLAIN };
    let adapter = Shape { depth: 16, scale: 2.0, ..PLAIN };
    let gradient = Shape { depth: 650, right_transposed: false, left_rows_contiguous: true, ..PLAIN };
    for isa in supported() {
        for (rows, columns, terms) in
            [(150, 930, &[base, adapter][..]), (300, 16, &[gradient]), (300, 200, &[gradient, base])]
        {
            let bytes = [1, 2, 4].map(|threads| {
                check(Sum {
                    rows,
                    columns,
                    terms,
                    start: Start::Bias,
                    output_transposed: false,
                    isa,
                    threads,
                })
            });
            assert_eq!(bytes[0], bytes[1]);
            assert_eq!(bytes[0], bytes[2]);
        }
    }
}

#[test]
fn an_empty_output_is_left_alone() {
    for (rows, columns) in [(0, 5), (5, 0)] {
        check(Sum {
            rows,
            columns,
            terms: &[Shape { depth: 3, ..PLAIN }],
            start: Start::Overwrite,
            output_transposed: false,
            isa: Isa::detect(),
            threads: 1,
        });
    }
}
