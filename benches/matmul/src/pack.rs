//! Times the packing of a right operand for each storage, beside f32.
//!
//! Packing is the only part of a product that a storage changes, and it happens once for each use of a
//! weight however many tokens there are. One thread, the matrix in the caches.
//! Left out: products; the caller has those.

use smidgen_ir::{Block, Code4, DType, Storage};
use smidgen_runtime::cpu::isa::Isa;
use smidgen_runtime::cpu::packing::{PACK_COLUMNS, PACK_DEPTH, RightPiece, pack_right};
use smidgen_runtime::cpu::stored::Stored;
use std::time::Instant;

const ROWS: usize = 1536;
const COLUMNS: usize = 768;
const REPEATS: usize = 60;

pub fn measure_packing(isa: Isa) {
    let mut storages = [DType::F32, DType::Bf16, DType::F16].map(Storage::Plain).to_vec();
    storages.push(Storage::Int8Rows);
    for code in Code4::ALL {
        storages.extend([false, true].map(|double| Storage::Bnb4 { code, double }));
    }
    storages.extend(Block::ALL.map(Storage::Gguf));
    // Twice 0x3c is near 1 in f16, four times it is 0.01 in f32: no scale is odd.
    let bytes_f32 = vec![0x3c; Storage::F32.bytes(ROWS, COLUMNS)];
    let mut panels = vec![0.0; PACK_DEPTH * PACK_COLUMNS];
    for storage in storages {
        let bytes = vec![0x3c; storage.bytes(ROWS, COLUMNS)];
        print!("pack {:10}:", storage.to_string());
        for (transposed, use_of_weight) in [(true, "forward"), (false, "gradient")] {
            // Alternately, so that both meet the same disturbances.
            let (mut best, mut best_f32) = (f64::MAX, f64::MAX);
            for _ in 0..REPEATS {
                best = best.min(pack_ns(isa, storage, &bytes, transposed, &mut panels));
                best_f32 = best_f32.min(pack_ns(isa, Storage::F32, &bytes_f32, transposed, &mut panels));
            }
            print!(" {use_of_weight} {best:.3} ns/element ({:.2} of f32)", best / best_f32);
        }
        println!();
    }
}

/// Nanoseconds an element, the second of two runs.
fn pack_ns(isa: Isa, storage: Storage, bytes: &[u8], transposed: bool, panels: &mut [f32]) -> f64 {
    let stored = Stored::dense(bytes.as_ptr(), storage, ROWS, COLUMNS);
    let (depth, columns) = if transposed { (COLUMNS, ROWS) } else { (ROWS, COLUMNS) };
    let mut nanoseconds = 0.0;
    for _ in 0..2 {
        let start = Instant::now();
        for first_column in (0..columns).step_by(PACK_COLUMNS) {
            for first_depth in (0..depth).step_by(PACK_DEPTH) {
                let piece = RightPiece {
                    stored,
                    transposed,
                    scale: 1.0,
                    first_column,
                    columns: PACK_COLUMNS,
                    first_depth,
                    depth: PACK_DEPTH,
                    panels: panels.as_mut_ptr(),
                    panel_depth: PACK_DEPTH,
                    panel_row: 0,
                };
                // SAFETY: the piece lies in the matrix, and the panels hold a whole piece.
                unsafe { pack_right(isa, &piece) };
            }
        }
        nanoseconds = start.elapsed().as_secs_f64() * 1e9;
    }
    nanoseconds / (ROWS * COLUMNS) as f64
}
