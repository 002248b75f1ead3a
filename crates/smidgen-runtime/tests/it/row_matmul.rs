//! The matmul for few rows gives the same bits as the general one, because sums have the same order.
//!
//! With these numbers, another order of summation changes the last bits.

use crate::numbers::{Content, bits, encode, random_reals};
use smidgen_ir::workspace_cpu::matmul_floats;
use smidgen_ir::{DType, Storage};
use smidgen_runtime::cpu::isa::Isa;
use smidgen_runtime::cpu::kernel::OutputView;
use smidgen_runtime::cpu::matmul::matmul;
use smidgen_runtime::cpu::matmul_terms::{Init, Left, Output, Term};
use smidgen_runtime::cpu::pool::Pool;
use smidgen_runtime::cpu::row_matmul::row_matmul;
use smidgen_runtime::cpu::stored::Stored;

/// Two terms of these depths over one C.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    columns: usize,
    depths: [usize; 2],
    element: DType,
}

const CASES: [Case; 6] = [
    Case { rows: 1, columns: 576, depths: [576, 16], element: DType::Bf16 },
    Case { rows: 3, columns: 100, depths: [1536, 8], element: DType::F32 },
    Case { rows: 16, columns: 49, depths: [700, 64], element: DType::F16 },
    Case { rows: 2, columns: 1, depths: [1, 3], element: DType::F32 },
    Case { rows: 5, columns: 47, depths: [0, 130], element: DType::Bf16 },
    Case { rows: 1, columns: 400, depths: [641, 1300], element: DType::F32 },
];

fn run(case: Case, start: usize, isa: Isa, threads: usize, few: bool) -> Vec<u32> {
    let Case { rows, columns, depths, element } = case;
    let lefts = depths.map(|depth| random_reals(1 + depth as u64, rows * depth));
    let rights = depths.map(|depth| {
        let reals = Content::Reals(random_reals(2 + depth as u64, columns * depth));
        encode(&reals, Storage::Plain(element))
    });
    let bias = random_reals(3, columns);
    let mut c = random_reals(4, rows * columns);
    let terms: Vec<Term> = (0..2)
        .map(|term| Term {
            left: Left { pointer: lefts[term].as_ptr(), row_stride: depths[term], depth_stride: 1 },
            right: Stored::dense(rights[term].as_ptr(), Storage::Plain(element), columns, depths[term]),
            right_transposed: true,
            scale: [1.0, 0.7][term],
        })
        .collect();
    let view = OutputView { pointer: c.as_mut_ptr(), row_stride: columns, column_stride: 1 };
    let output = Output { view, rows, columns };
    let init = [Init::Overwrite, Init::Accumulate, Init::Bias(bias.as_ptr())][start];
    let mut workspace = vec![f32::NAN; matmul_floats(threads)];
    Pool::new(threads).unwrap().enter(|| {
        // SAFETY: the operands live here and have these shapes, and the machine supports the instruction set.
        unsafe {
            if few {
                row_matmul(isa, &terms, init, output, &mut workspace)
            } else {
                matmul(isa, &terms, init, output, &mut workspace)
            }
        }
    });
    bits(&c)
}

#[test]
fn few_rows_give_the_bytes_of_many() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for case in CASES {
            for start in 0..3 {
                let want = run(case, start, isa, 1, false);
                for threads in [1, 2] {
                    assert_eq!(run(case, start, isa, threads, true), want, "{case:?} {start} {isa:?}");
                }
            }
        }
    }
}
