//! fp8 matmuls on a GPU, against sums over numbers that this test rounds by the rules of the format.
//!
//! The two differ only by the rounding of results to bf16. Without rounding to fp8 the results would differ by several
//! percent, so the tests would notice a matmul in bf16.

use crate::cuda_agrees::{alone, error, gpu_plan, in_numbers, open, open_as, reals};
use crate::draft::Draft;
use crate::numbers::{random_reals, stored};
use crate::subject::{Scalar, Subject, plain_request, plan_with, roomy};
use smidgen_compile::Request;
use smidgen_compile::passes::round_fp8;
use smidgen_ir::quant::fp8;
use smidgen_ir::{Activation, DType, DeviceKind, Node, Norm, Op, Precision, Storage, ValueId};
use smidgen_runtime::{Cuda, Executor};

const BF16: Storage = Storage::Plain(DType::Bf16);
const SCALE: f32 = 1.5;

/// A matrix (rows, columns), row by row.
#[derive(Clone)]
struct Numbers {
    columns: usize,
    values: Vec<f32>,
}

impl Numbers {
    fn in_bf16(&self) -> Numbers {
        let values = self.values.iter().map(|value| stored(BF16, *value)).collect();
        Numbers { values, ..self.clone() }
    }

    /// Rounded to fp8 row by row.
    fn in_fp8(&self) -> Numbers {
        let rounded = self.values.chunks(self.columns).flat_map(|row| {
            let mut codes = vec![0; row.len()];
            let scale = fp8::encode_row(row, &mut codes);
            codes.into_iter().map(move |code| fp8::decode_byte(code) * scale)
        });
        Numbers { values: rounded.collect(), ..self.clone() }
    }

    /// The matrix with column j multiplied by the j-th factor.
    fn with_columns_times(&self, factors: &[f32]) -> Numbers {
        let values = self.values.iter().zip(factors.iter().cycle()).map(|(value, factor)| value * factor);
        Numbers { values: values.collect(), ..self.clone() }
    }

    /// self · otherᵀ.
    fn times_transposed(&self, other: &Numbers) -> Vec<f64> {
        let dot = |one: &[f32], other: &[f32]| -> f64 {
            one.iter().zip(other).map(|(one, other)| f64::from(*one) * f64::from(*other)).sum()
        };
        let rows = self.values.chunks(self.columns);
        rows.flat_map(|row| other.values.chunks(other.columns).map(move |column| dot(row, column))).collect()
    }

    fn transposed(&self) -> Numbers {
        let rows = self.values.len() / self.columns;
        let values = (0..self.columns).flat_map(|column| (0..rows).map(move |row| (row, column)));
        let values = values.map(|(row, column)| self.values[row * self.columns + column]);
        Numbers { columns: rows, values: values.collect() }
    }
}

/// One linear with its adapter, and the values of its operands.
struct Case {
    subject: Subject,
    x: Numbers,
    h: Numbers,
    b: Numbers,
    bias: Vec<f32>,
    dy: Numbers,
    /// The weight (N, K) without its scales, and the scales.
    codes: Numbers,
    scales: Vec<f32>,
}

fn case([tokens, n, k]: [usize; 3]) -> Case {
    let rank = 8;
    let mut draft = Draft::new(&[tokens], 1);
    let x = draft.tokens("x", k);
    let weight = draft.quantized_matrix("weight", n, k, Storage::Fp8Rows);
    let (bias, h) = (draft.vector("bias", n, DType::Bf16), draft.tokens("h", rank));
    let b = draft.matrix("b", n, rank, DType::Bf16);
    let y = draft.op(Op::Linear { bias: true, lora: Some(SCALE) }, &[x, weight, bias, h, b], &["y"])[0];
    let subject = draft.gradient_of("linear in fp8", y);
    let named = |name: &str| -> ValueId {
        let index = subject.graph.values.iter().position(|value| value.name == name).unwrap();
        ValueId(index as u32)
    };
    let numbers = |name: &str, columns| Numbers { columns, values: subject.reals_of(named(name)).to_vec() };
    let bytes = subject.content_bytes(weight);
    let codes =
        Numbers { columns: k, values: bytes[..n * k].iter().map(|byte| fp8::decode_byte(*byte)).collect() };
    let scales: Vec<f32> =
        bytes[n * k..].chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    let Scalar::Dot { dy, .. } = &subject.scalar else { panic!("a dot product") };
    let dy = Numbers { columns: n, values: dy.clone() };
    Case {
        x: numbers("x source", k),
        h: numbers("h source", rank),
        b: numbers("b", rank),
        bias: numbers("bias", 1).values,
        dy,
        codes,
        scales,
        subject,
    }
}

impl Case {
    /// y, for x in the precision of the matmul.
    fn y(&self, x: &Numbers) -> Vec<f64> {
        let n = self.scales.len();
        let matmul = x.times_transposed(&self.codes);
        let adapter = self.h.in_bf16().times_transposed(&self.b.in_bf16());
        let at = |index: usize| {
            let column = index % n;
            let bias = f64::from(stored(BF16, self.bias[column]));
            matmul[index] * f64::from(self.scales[column]) + f64::from(SCALE) * adapter[index] + bias
        };
        (0..matmul.len()).map(at).collect()
    }

    /// The gradient of x, for dy times the weight's scales in the precision of the matmul.
    fn dx(&self, scaled_dy: &Numbers) -> Vec<f64> {
        scaled_dy.times_transposed(&self.codes.transposed())
    }
}

/// Tests cuBLASLt, and the kernel for GPUs of capability 8.9.
#[test]
#[ignore = "needs a GPU"]
fn products_in_fp8_are_those_of_rounded_numbers() {
    let _alone = alone();
    for capability in [None, Some((8, 9))] {
        matmuls_agree(open_as(Precision::Fp8, capability));
    }
}

fn matmuls_agree(mut device: Cuda) {
    for sizes in [[37, 48, 96], [1, 16, 16], [130, 256, 4112], [9, 528, 144]] {
        let case = case(sizes);
        let graph = in_numbers(&case.subject.graph, DType::Bf16);
        let subject = Subject { graph: graph.clone(), ..case.subject.clone() };
        let plan = gpu_plan(&graph, subject.extent, Precision::Fp8);
        let mut executor = Executor::load(plan, device).unwrap();
        let got = subject.run_once(&mut executor);
        assert_eq!(subject.run_once(&mut executor), got, "{sizes:?}: a second run gives other bytes");
        device = executor.into_device();
        let (x, dy) = (case.x.in_bf16(), case.dy.in_bf16().with_columns_times(&case.scales));
        let y = reals(&got.result, BF16);
        let dx = reals(&got.gradients["x source"], Storage::F32);
        for (name, got, rounded, plain) in
            [("y", y, case.y(&x.in_fp8()), case.y(&x)), ("dx", dx, case.dx(&dy.in_fp8()), case.dx(&dy))]
        {
            let (to_rounded, to_plain) = (error(&got, &rounded), error(&got, &plain));
            println!(
                "{sizes:?} {name}: differs by {to_rounded:.1e} from fp8, {to_plain:.1e} from bf16 operands"
            );
            assert!(to_rounded < 4e-3, "{sizes:?}: {name} differs by {to_rounded:.2e}");
            assert!(sizes[2] == 16 || to_plain > 2.0 * to_rounded, "{sizes:?}: {name} was not rounded");
        }
    }
}

/// The feed-forward part of a decoder layer: o, norm, gate and up, down, all in fp8.
fn feed_forward([tokens, hidden, wide]: [usize; 3]) -> Subject {
    let mut draft = Draft::new(&[tokens], 1);
    let x = draft.tokens("x", 64);
    let plain = Op::Linear { bias: false, lora: None };
    let linear = |draft: &mut Draft, x, n, k, name: &str| {
        let weight = draft.quantized_matrix(&format!("{name} weight"), n, k, Storage::Fp8Rows);
        draft.op(plain.clone(), &[x, weight], &[name])[0]
    };
    let o = linear(&mut draft, x, hidden, 64, "o");
    let weight = draft.vector("norm weight", hidden, DType::Bf16);
    let norm = Norm { eps: 1e-5, plus_one: false };
    let normed = draft.op(Op::RmsNorm { norm, unweighted: None }, &[o, weight], &["normed"])[0];
    let gate = linear(&mut draft, normed, wide, hidden, "gate");
    let up = linear(&mut draft, normed, wide, hidden, "up");
    let gated = draft.op(Op::GatedAct(Activation::Silu), &[gate, up], &["gated"])[0];
    let down = linear(&mut draft, gated, 64, wide, "down");
    draft.gradient_of("feed-forward in fp8", down)
}

/// Values give the same bytes whether they are rounded before every matmul, by steps of their own, or in the kernels
/// that compute them. The sizes cover every form of the norm and gate kernels, including those that cannot round.
#[test]
#[ignore = "needs a GPU"]
fn where_values_are_rounded_changes_no_bit() {
    let _alone = alone();
    let mut device = open(Precision::Fp8);
    for sizes in [[33, 64, 96], [70, 512, 1040], [5, 8208, 4112], [3, 272, 20_496]] {
        let subject = feed_forward(sizes);
        let extent = subject.extent;
        let graph = in_numbers(&subject.graph, DType::Bf16);
        let (cuda, precision) = (DeviceKind::Cuda, Precision::Fp8);
        let request = Request { device: cuda, precision, extent: roomy(extent), ..plain_request() };
        let mut rounding = graph.clone();
        round_fp8::apply(&mut rounding, &request);
        // Moves each rounding away from the step that computes its value, so that the two are launched separately.
        let mut apart = rounding.clone();
        for (_, nodes) in &mut apart.entries {
            let (roundings, mut rest): (Vec<Node>, Vec<Node>) =
                std::mem::take(nodes).into_iter().partition(|node| matches!(node.op, Op::RoundFp8 { .. }));
            for node in roundings.into_iter().rev() {
                let reader = rest.iter().position(|other| other.inputs.contains(&node.outputs[0]));
                rest.insert(reader.expect("a matmul reads it"), node);
            }
            *nodes = rest;
        }
        let mut outcomes = Vec::new();
        for graph in [graph, apart, rounding] {
            let subject = Subject { graph: graph.clone(), ..subject.clone() };
            let mut executor = Executor::load(plan_with(&graph, &request), device).unwrap();
            outcomes.push(subject.run_once(&mut executor));
            device = executor.into_device();
        }
        assert!(reals(&outcomes[0].result, BF16).iter().all(|value| value.is_finite()), "{sizes:?}");
        assert_eq!(outcomes[1], outcomes[0], "{sizes:?}: rounded by steps of their own");
        assert_eq!(outcomes[2], outcomes[0], "{sizes:?}: rounded by the kernels that compute them");
    }
}

/// Weights whose sides are not multiples of 16 are decoded and multiplied in bf16.
#[test]
#[ignore = "needs a GPU"]
fn other_sizes_are_multiplied_in_bf16() {
    let _alone = alone();
    let case = case([11, 21, 33]);
    let graph = in_numbers(&case.subject.graph, DType::Bf16);
    let subject = Subject { graph: graph.clone(), ..case.subject.clone() };
    let plan = gpu_plan(&graph, subject.extent, Precision::Fp8);
    let mut executor = Executor::load(plan, open(Precision::Fp8)).unwrap();
    let got = subject.run_once(&mut executor);
    let error = error(&reals(&got.result, BF16), &case.y(&case.x.in_bf16()));
    assert!(error < 6e-3, "y differs by {error:.2e}");
}

/// The rounding of this file has the error of e4m3, so the tests above compare with the right numbers.
#[test]
fn rounding_keeps_three_bits() {
    let numbers = Numbers { columns: 96, values: random_reals(5, 4 * 96) };
    let wide = |numbers: &Numbers| numbers.values.iter().map(|value| f64::from(*value)).collect::<Vec<f64>>();
    let error = error(&wide(&numbers.in_fp8()), &wide(&numbers));
    assert!((1e-2..4e-2).contains(&error), "{error:.2e}");
}
