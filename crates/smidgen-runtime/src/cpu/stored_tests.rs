//! Tests of every storage on every instruction set, bit for bit: spans against the plain decoders of `quant`, and matmuls
//! against matmuls over decoded weights.

use super::isa::{Isa, Lanes, on_each_isa};
use super::kernel::OutputView;
use super::matmul::matmul;
use super::matmul_terms::{Init, Left, Output, Term};
use super::pool::Pool;
use super::row_matmul::row_matmul;
use super::stored::{SPAN_STEP, Stored};
use super::testing::{assert_same_bits, numbers, sane_bytes, storages_with};
use smidgen_ir::Storage;
use smidgen_ir::quant;
use smidgen_ir::workspace_cpu::matmul_floats;

on_each_isa! {
    /// # Safety
    /// As for `Stored::decode_span`.
    unsafe fn decode(stored: &Stored, row: usize, first: usize, count: usize, target: *mut f32) = decode_with;
}

#[inline(always)]
unsafe fn decode_with<V: Lanes>(stored: &Stored, row: usize, first: usize, count: usize, target: *mut f32) {
    // SAFETY: the caller's promises.
    unsafe { stored.decode_span::<V>(row, first, count, target) }
}

fn supported() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_supported())
}

/// The bytes of a tensor behind one extra byte, so that nothing is aligned, and its elements.
fn tensor(storage: Storage, rows: usize, columns: usize) -> (Vec<u8>, Vec<f32>) {
    let bytes = sane_bytes(storage, rows, columns);
    let mut elements = vec![0.0; rows * columns];
    quant::decode(storage, rows, columns, &bytes, 0, &mut elements);
    assert!(elements.iter().all(|value| value.is_finite()), "{storage}");
    ([vec![0], bytes].concat(), elements)
}

fn view(storage: Storage, rows: usize, columns: usize, bytes: &[u8]) -> Stored {
    Stored::dense(bytes[1..].as_ptr(), storage, rows, columns)
}

/// Both patterns of NaN in fp8, in whole vectors and behind them.
#[test]
fn nan_in_fp8_decodes_to_nan() {
    const COLUMNS: usize = 40;
    for storage in [Storage::Fp8Rows, Storage::Fp8Blocks] {
        let mut bytes = [vec![0], sane_bytes(storage, 1, COLUMNS)].concat();
        let places = [0, 17, COLUMNS - 1];
        for (place, code) in places.into_iter().zip([0x7F, 0xFF, 0xFF]) {
            bytes[1 + place] = code;
        }
        for isa in supported() {
            let mut got = vec![0.0f32; COLUMNS];
            let whole = view(storage, 1, COLUMNS, &bytes);
            // SAFETY: the span is in the tensor, which `bytes` holds.
            unsafe { decode(isa, &whole, 0, 0, COLUMNS, got.as_mut_ptr()) };
            let found: Vec<usize> = (0..COLUMNS).filter(|at| got[*at].is_nan()).collect();
            assert_eq!(found, places, "{storage} {isa:?}");
        }
    }
}

#[test]
fn every_span_decodes_as_the_reference_does() {
    const ROWS: usize = 7;
    const UNTOUCHED: f32 = 777.0;
    for columns in [1, 7, 63, 64, 65, 96, 130, 193, 512, 768] {
        for storage in storages_with(columns) {
            let (bytes, elements) = tensor(storage, ROWS, columns);
            let whole = view(storage, ROWS, columns, &bytes);
            for (isa, first_row) in supported().flat_map(|isa| [0, 3].map(|row| (isa, row))) {
                let slice = whole.row_slice(first_row, ROWS - first_row);
                for row in 0..slice.rows {
                    for first in (0..columns).step_by(SPAN_STEP) {
                        let ends = (first + SPAN_STEP..columns).step_by(SPAN_STEP).chain([columns]);
                        for count in ends.map(|end| end - first) {
                            let mut got = vec![UNTOUCHED; count + 1];
                            // SAFETY: the span is in the tensor, which `bytes` holds.
                            unsafe { decode(isa, &slice, row, first, count, got.as_mut_ptr()) };
                            assert_eq!(got.pop(), Some(UNTOUCHED), "{storage}, {isa:?}: wrote too far");
                            let start = (first_row + row) * columns + first;
                            let want = elements[start..start + count].to_vec();
                            let name =
                                format!("{storage}, {columns} columns, {isa:?}, row {row} from {first}");
                            assert_same_bits(&name, &got, &want);
                        }
                    }
                }
            }
        }
    }
}

type Multiply = unsafe fn(Isa, &[Term], Init, Output, &mut [f32]);

/// left (M, K) times the view (K, N), or its transpose (N, K).
fn multiply(isa: Isa, right: Stored, right_transposed: bool) -> Vec<f32> {
    multiply_rows(matmul, 11, 0.5, isa, right, right_transposed)
}

fn multiply_rows(
    function: Multiply,
    m: usize,
    scale: f32,
    isa: Isa,
    right: Stored,
    right_transposed: bool,
) -> Vec<f32> {
    let (n, k) = if right_transposed { (right.rows, right.columns) } else { (right.columns, right.rows) };
    let left = numbers(5, m * k);
    let mut c = vec![f32::NAN; m * n];
    let mut workspace = vec![f32::NAN; matmul_floats(2)];
    let left = Left { pointer: left.as_ptr(), row_stride: k, depth_stride: 1 };
    let term = Term { left, right, right_transposed, scale };
    let view = OutputView { pointer: c.as_mut_ptr(), row_stride: n, column_stride: 1 };
    let output = Output { view, rows: m, columns: n };
    Pool::new(2).unwrap().enter(|| {
        // SAFETY: the buffers have the shapes of the matmul, and C overlaps nothing.
        unsafe { function(isa, &[term], Init::Overwrite, output, &mut workspace) }
    });
    c
}

#[test]
fn matmuls_equal_those_over_decoded_weights() {
    // Deeper and wider than one block of the matmul, and rows that share blocks of 64.
    for (rows, columns) in [(9, 50), (210, 768), (700, 224)] {
        for storage in storages_with(columns) {
            let (bytes, elements) = tensor(storage, rows, columns);
            let whole = view(storage, rows, columns, &bytes);
            let decoded = Stored::dense_f32(elements.as_ptr(), rows, columns);
            for (first, count) in [(0, rows), (rows / 3, rows / 2)] {
                for (isa, transposed) in supported().flat_map(|isa| [false, true].map(|t| (isa, t))) {
                    let got = multiply(isa, whole.row_slice(first, count), transposed);
                    let want = multiply(isa, decoded.row_slice(first, count), transposed);
                    let name = format!("{storage}, {rows} × {columns} from {first}, {isa:?}, {transposed}");
                    assert_same_bits(&name, &got, &want);
                }
            }
        }
    }
}

/// Generation multiplies few rows, directly from blocks where the storage has them.
#[test]
fn matmuls_of_few_rows_equal_those_over_decoded_weights() {
    // Panels that are full, that end inside a vector and that are narrower than one; deeper than one chunk.
    for (rows, columns) in [(5, 96), (49, 768), (110, 224), (64, 1536)] {
        for storage in storages_with(columns) {
            let (bytes, elements) = tensor(storage, rows, columns);
            let whole = view(storage, rows, columns, &bytes);
            let decoded = Stored::dense_f32(elements.as_ptr(), rows, columns);
            for (first, count) in [(0, rows), (rows / 3, rows / 2)] {
                for isa in supported() {
                    for (m, scale) in [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0), (1, 0.5)] {
                        let part = whole.row_slice(first, count);
                        let got = multiply_rows(row_matmul, m, scale, isa, part, true);
                        let want =
                            multiply_rows(matmul, m, scale, isa, decoded.row_slice(first, count), true);
                        let name = format!("{storage}, {rows} × {columns} from {first}, {isa:?}, {m} rows");
                        assert_same_bits(&name, &got, &want);
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "rows of 96 in q6_k, whose blocks hold 256")]
fn rows_of_broken_blocks_are_refused() {
    let bytes = [0; 210];
    Stored::dense(bytes.as_ptr(), Storage::Gguf(smidgen_ir::Block::Q6K), 1, 96);
}
