//! Measures the matrix product in GFLOP/s, alternating with the `gemm` crate as a yardstick.
//!
//! Arguments: number of threads (default 2), then optionally a part of a case's name and an instruction
//! set (`avx2` or `portable`; `split` for f32 by AMX; `amx` or `avx512-bf16` for products of bf16; else the best
//! vectors of the machine for f32). `pack` instead of a case times the packing
//! of every storage.
//! The first line is the peak of a loop that does nothing but multiply-adds in registers.
//! Left out: statistics; each number is the best of several runs.

use smidgen_ir::workspace_cpu::{bf16_matmul_floats, matmul_floats};
use smidgen_ir::{DType, Storage};
use smidgen_runtime::cpu::bf16_matmul::bf16_matmul;
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;
use smidgen_runtime::cpu::isa::Isa;
use smidgen_runtime::cpu::kernel::OutputView;
use smidgen_runtime::cpu::pool::Pool;
use smidgen_runtime::cpu::matmul::matmul;
use smidgen_runtime::cpu::matmul_terms::{Init, Left, Output, Term};
use smidgen_runtime::cpu::split_matmul::split_matmul;
use smidgen_runtime::cpu::stored::Stored;
use std::time::Instant;

mod pack;

struct Case {
    name: &'static str,
    m: usize,
    n: usize,
    k: usize,
    transposed: bool,
    left_transposed: bool,
    output_transposed: bool,
    element: DType,
}

/// What is measured.
#[derive(Clone, Copy)]
enum Ours {
    F32(Isa),
    Split,
    Bf16(Bf16Unit),
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let threads: usize = arguments.next().map_or(2, |text| text.parse().expect("a number"));
    let wanted = arguments.next().unwrap_or_default();
    let ours = match arguments.next().as_deref() {
        Some("avx2") if Isa::Avx2.is_supported() => Ours::F32(Isa::Avx2),
        Some("split") if Bf16Unit::Amx.is_supported() => Ours::Split,
        Some("portable") => Ours::F32(Isa::Portable),
        Some("amx") if Bf16Unit::Amx.is_supported() => Ours::Bf16(Bf16Unit::Amx),
        Some("avx512-bf16") if Bf16Unit::Avx512.is_supported() => Ours::Bf16(Bf16Unit::Avx512),
        _ => Ours::F32(Isa::detect()),
    };
    if wanted == "pack" {
        pack::measure_packing(Isa::detect());
        return;
    }
    // The yardstick takes its threads from the global pool of rayon.
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().expect("a pool");
    Pool::new(threads).expect("a pool").enter(|| {
        println!("peak of one thread {:.0} GFLOP/s", peak());
        let plain = |name, m, n, k, transposed, element| Case {
            name,
            m,
            n,
            k,
            transposed,
            left_transposed: false,
            output_transposed: false,
            element,
        };
        let mut cases = vec![];
        for (n, k) in [(576, 576), (1536, 576), (576, 1536), (192, 576)] {
            cases.push(plain("forward bf16", 1024, n, k, true, DType::Bf16));
            cases.push(plain("input gradient bf16", 1024, n, k, false, DType::Bf16));
        }
        for (n, k) in [(576, 576), (1536, 576), (576, 1536), (192, 576)] {
            cases.push(plain("forward f32", 1024, n, k, true, DType::F32));
            cases.push(plain("input gradient f32", 1024, n, k, false, DType::F32));
        }
        cases.push(plain("logits f32", 256, 49152, 576, true, DType::F32));
        cases.push(plain("logits gradient f32", 256, 576, 49152, false, DType::F32));
        cases.push(plain("logits bf16", 256, 49152, 576, true, DType::Bf16));
        cases.push(plain("logits gradient bf16", 256, 576, 49152, false, DType::Bf16));
        cases.push(plain("skinny x·Aᵀ", 1024, 16, 576, true, DType::F32));
        cases.push(plain("skinny x·Aᵀ", 1024, 16, 1536, true, DType::F32));
        cases.push(plain("skinny dy·B", 1024, 16, 576, false, DType::F32));
        cases.push(plain("small K", 1024, 576, 16, true, DType::F32));
        let mut gradient = plain("dB = dyᵀ·h", 576, 16, 1024, false, DType::F32);
        gradient.left_transposed = true;
        cases.push(gradient);
        let mut gradient = plain("dAᵀ = xᵀ·dh", 576, 16, 1024, false, DType::F32);
        gradient.left_transposed = true;
        gradient.output_transposed = true;
        cases.push(gradient);
        let mut gradient = plain("dW = dyᵀ·x", 576, 1536, 1024, false, DType::F32);
        gradient.left_transposed = true;
        cases.push(gradient);
        for case in cases.iter().filter(|case| case.name.contains(&wanted)) {
            measure(case, threads, ours);
        }
    });
}

fn measure(case: &Case, threads: usize, ours_is: Ours) {
    let &Case { m, n, k, .. } = case;
    let left: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
    let right: Vec<f32> = (0..n * k).map(|i| (i % 13) as f32 * 0.1 - 0.6).collect();
    let halves: Vec<u16> = right.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
    let mut ours = vec![0.0f32; m * n];
    let mut theirs = vec![0.0f32; m * n];
    let mut workspace = vec![0.0f32; matmul_floats(threads).max(bf16_matmul_floats())];
    let (rows, columns) = if case.transposed { (n, k) } else { (k, n) };
    let pointer = match case.element {
        DType::F32 => right.as_ptr().cast(),
        _ => halves.as_ptr().cast(),
    };
    let stored = Stored::dense(pointer, Storage::Plain(case.element), rows, columns);
    let (left_row, left_depth) = if case.left_transposed { (1, m) } else { (k, 1) };
    let (out_row, out_column) = if case.output_transposed { (1, m) } else { (n, 1) };
    let (right_depth, right_column) = if case.transposed { (1, k) } else { (n, 1) };
    let flops = 2.0 * m as f64 * n as f64 * k as f64;
    let repeats = ((5e8 / flops) as usize).clamp(1, 50);
    let (mut best_ours, mut best_theirs) = (f64::MAX, f64::MAX);
    let mut ratios = vec![];
    for _ in 0..if flops < 1e10 { 40 } else { 5 } {
        let start = Instant::now();
        for _ in 0..repeats {
            // SAFETY: the buffers have the shapes of the case and do not overlap.
            unsafe {
                let terms = [Term {
                    left: Left { pointer: left.as_ptr(), row_stride: left_row, depth_stride: left_depth },
                    right: stored,
                    right_transposed: case.transposed,
                    scale: 1.0,
                }];
                let view =
                    OutputView { pointer: ours.as_mut_ptr(), row_stride: out_row, column_stride: out_column };
                let output = Output { view, rows: m, columns: n };
                match ours_is {
                    Ours::Split => split_matmul(&terms, Init::Overwrite, output, &mut workspace),
                    Ours::F32(isa) => matmul(isa, &terms, Init::Overwrite, output, &mut workspace),
                    Ours::Bf16(unit) => bf16_matmul(unit, &terms, Init::Overwrite, output, &mut workspace),
                }
            }
        }
        let seconds_ours = start.elapsed().as_secs_f64() / repeats as f64;
        best_ours = best_ours.min(seconds_ours);
        let start = Instant::now();
        for _ in 0..repeats {
            // SAFETY: the buffers have the shapes of the case and do not overlap.
            unsafe {
                gemm::gemm(
                    m,
                    n,
                    k,
                    theirs.as_mut_ptr(),
                    out_column as isize,
                    out_row as isize,
                    false,
                    left.as_ptr(),
                    left_depth as isize,
                    left_row as isize,
                    right.as_ptr(),
                    right_column as isize,
                    right_depth as isize,
                    0.0f32,
                    1.0f32,
                    false,
                    false,
                    false,
                    gemm::Parallelism::Rayon(threads),
                );
            }
        }
        let seconds_theirs = start.elapsed().as_secs_f64() / repeats as f64;
        best_theirs = best_theirs.min(seconds_theirs);
        ratios.push(seconds_theirs / seconds_ours);
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{:22} M {m:5} N {n:5} K {k:5}: ours {:6.1}  gemm {:6.1} GFLOP/s  ({:.3} ms, median {:.2} times as fast)",
        case.name,
        flops / best_ours / 1e9,
        flops / best_theirs / 1e9,
        best_ours * 1e3,
        ratios[ratios.len() / 2]
    );
}

fn peak() -> f64 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn spin(count: usize) -> f32 {
            let mut sums = [_mm512_set1_ps(1.0); 16];
            let factor = std::hint::black_box(_mm512_set1_ps(0.999));
            for _ in 0..count {
                for sum in &mut sums {
                    *sum = _mm512_fmadd_ps(*sum, factor, factor);
                }
            }
            let mut total = sums[0];
            for sum in &sums[1..] {
                total = _mm512_add_ps(total, *sum);
            }
            _mm512_reduce_add_ps(total)
        }
        if Isa::Avx512.is_supported() {
            let count = 500_000;
            let mut best = f64::MAX;
            for _ in 0..30 {
                let start = Instant::now();
                // SAFETY: AVX-512 was detected.
                std::hint::black_box(unsafe { spin(count) });
                best = best.min(start.elapsed().as_secs_f64());
            }
            return count as f64 * 16.0 * 32.0 / best / 1e9;
        }
    }
    f64::NAN
}
