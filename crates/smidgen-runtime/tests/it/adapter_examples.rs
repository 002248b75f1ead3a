//! Examples of the operations that DoRA and LS-LoRA add to a linear: column gains, a trained function, and row norms.
//!
//! Row norms have no gradient; they are compared with f64.

use crate::check::same_bytes_everywhere;
use crate::draft::Draft;
use crate::examples::{Example, Proof, gradient};
use crate::numbers::{Content, decode_reals, encode, random_reals, stored};
use crate::subject::{Scalar, Subject};
use smidgen_ir::workspace_cpu::{FOURIER_ROWS, norm_block_rows};
use smidgen_ir::{DType, Entry, Extent, Graph, LeafKind, Op, Phase, Shape, Storage, Type, ValueId};
use std::collections::BTreeSet;

pub fn examples() -> Vec<Example> {
    vec![
        scale_columns(None, [11, 37]),
        scale_columns(Some(DType::F32), [11, 37]),
        scale_columns(Some(DType::Bf16), [9, 16]),
        scale_columns(Some(DType::F16), [150, 5]),
        fourier(0.9, 3, [11, 37]),
        fourier(-1.5, 3, [11, 37]),
        fourier(1.1, 1, [1, 16]),
        fourier(-0.8, 2, [FOURIER_ROWS + 9, 7]),
        two_fourier_modules_on_one_input(),
        Example { covers: &["row_norms"], proof: Proof::Values(row_norms_match_f64) },
        Example { covers: &["round"], proof: Proof::Values(rounding_matches_storing) },
    ]
}

/// scale·weight, rounded to the stored type.
fn rounding_matches_storing() -> BTreeSet<&'static str> {
    const SCALE: f32 = 0.3;
    let values = random_reals(5, 7 * 13);
    let extent = Extent { tokens: 1, rows: 1, segments: 1, audio: 0 };
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let storage = Storage::Plain(dtype);
        let mut graph = Graph::default();
        let shape = Shape::matrix(7, 13);
        let weight = graph.add_leaf("weight", Type::f32(shape.clone()), LeafKind::Adapter);
        let rounded = graph.add_leaf("rounded", Type::new(shape, storage), LeafKind::Derived);
        let mut nodes = Vec::new();
        let op = Op::Round { scale: SCALE, to: None };
        graph.emit(&mut nodes, op, vec![weight], vec![rounded], &[], (Phase::Update, None));
        graph.entries = vec![(Entry::Refresh, nodes)];
        let contents = vec![(weight, Content::Reals(values.clone()))];
        let scalar = Scalar::Loss { entry: Entry::Refresh, leaf: rounded };
        let subject = Subject { name: "round".into(), graph, extent, contents, scalar };
        let mut executor = subject.load(subject.plan(extent, 1), 1);
        let got = subject.read_bytes(&mut executor, rounded);
        let scaled = values.iter().map(|value| SCALE * value).collect();
        assert_eq!(got, encode(&Content::Reals(scaled), storage), "{dtype}");
    }
    BTreeSet::from(["round"])
}

/// z, the magnitude and the bias have gradients; the norm has none.
fn scale_columns(bias: Option<DType>, [tokens, n]: [usize; 2]) -> Example {
    let mut draft = Draft::new(&[tokens], 1);
    let z = draft.tokens("z", n);
    let magnitude = draft.vector("magnitude", n, DType::F32);
    let norms: Vec<f32> = random_reals(41, n).iter().map(|value| value.abs() + 0.5).collect();
    let mut inputs = vec![z, magnitude, draft.frozen_vector_of("norm", &norms)];
    inputs.extend(bias.map(|dtype| draft.vector("bias", n, dtype)));
    let y = draft.op(Op::ScaleColumns { bias: bias.is_some() }, &inputs, &["y"])[0];
    let covers: &[&str] = match bias {
        None => &["scale_columns", "magnitude_grad"],
        Some(_) => &["scale_columns", "magnitude_grad", "bias_grad"],
    };
    gradient(covers, draft.gradient_of(&format!("scale columns bias={bias:?} T={tokens} N={n}"), y))
}

const COEFFICIENTS: [f32; 4] = [0.3, 1.2, -0.4, 0.25];

/// base, h, B, the four coefficients and sigma.
fn fourier(sigma: f32, rank: usize, [tokens, n]: [usize; 2]) -> Example {
    let mut draft = Draft::new(&[tokens], 1);
    let (base, h) = (draft.tokens("base", n), draft.tokens("h", rank));
    let inputs = [
        base,
        h,
        draft.matrix("b", n, rank, DType::F32),
        draft.matrix_of("coefficients", [1, 4], DType::F32, &COEFFICIENTS),
        draft.matrix_of("sigma", [1, 1], DType::F32, &[sigma]),
    ];
    let y = draft.op(Op::Fourier { scale: 0.7 }, &inputs, &["y"])[0];
    let name = format!("fourier sigma={sigma} rank={rank} T={tokens} N={n}");
    gradient(&["fourier", "fourier_grad", "weight_grad", "linear_grad"], draft.gradient_of(&name, y))
}

/// Base and h come from one x, and the coefficients are two rows of one leaf, as for two modules on one input.
fn two_fourier_modules_on_one_input() -> Example {
    let mut draft = Draft::new(&[6, 4], 1);
    let x = draft.tokens("x", 13);
    let coefficients = draft.matrix_of("coefficients", [2, 4], DType::F32, &[COEFFICIENTS; 2].concat());
    let sigma = draft.matrix_of("sigma", [2, 1], DType::F32, &[1.2, -0.9]);
    let plain = Op::Linear { bias: false, lora: None };
    let mut y = x;
    for module in 0..2 {
        let weight = draft.matrix(&format!("weight {module}"), 13, 13, DType::Bf16);
        let a = draft.matrix(&format!("a {module}"), 3, 13, DType::F32);
        let base = draft.op(plain.clone(), &[y, weight], &["base"])[0];
        let h = draft.op(plain.clone(), &[y, a], &["h"])[0];
        let b = draft.matrix(&format!("b {module}"), 13, 3, DType::F32);
        let [coefficients, sigma] = [coefficients, sigma].map(|leaf| draft.rows_of(leaf, module, 1));
        y = draft.op(Op::Fourier { scale: 0.3 }, &[base, h, b, coefficients, sigma], &["y"])[0];
    }
    let mut example = gradient(&["fourier", "fourier_grad"], draft.gradient_of("fourier twice", y));
    // A bf16 step of 0.05 through two modules shows curvature.
    if let Proof::Gradient(_, tolerance) = &mut example.proof {
        *tolerance = 5e-3;
    }
    example
}

const SCALE: f32 = 0.8;

/// Covers a few rows, and more than one block of rows with a remainder.
fn row_norms_match_f64() -> BTreeSet<&'static str> {
    let mut several_blocks = 0;
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for (n, k, rank) in [(5, 9, 2), (70, 33, 16), (150, 4100, 3)] {
            row_norms(dtype, [n, k, rank]);
            several_blocks += usize::from(norm_block_rows(n, k) < n);
        }
    }
    assert_eq!(several_blocks, 3, "one size of each storage has several blocks");
    BTreeSet::from(["row_norms"])
}

fn row_norms(dtype: DType, [n, k, rank]: [usize; 3]) {
    let mut graph = Graph::default();
    let mut contents: Vec<(ValueId, Content)> = Vec::new();
    let mut leaf = |name: &str, rows: usize, columns: usize, dtype: DType| -> (ValueId, Vec<f64>) {
        let storage = Storage::Plain(dtype);
        let values: Vec<f32> = random_reals(contents.len() as u64, rows * columns)
            .iter()
            .map(|value| stored(storage, *value))
            .collect();
        let wide = values.iter().map(|value| f64::from(*value)).collect();
        let id = graph.add_leaf(name, Type::new(Shape::matrix(rows, columns), storage), LeafKind::Weight);
        contents.push((id, Content::Reals(values)));
        (id, wide)
    };
    let (weight, weight_values) = leaf("weight", n, k, dtype);
    let (a, a_values) = leaf("a", rank, k, DType::F32);
    let (b, b_values) = leaf("b", n, rank, DType::F32);
    let y = graph.add_leaf("norms", Type::f32(Shape::vector(n)), LeafKind::Derived);
    let mut nodes = Vec::new();
    let op = Op::RowNorms { scale: SCALE };
    graph.emit(&mut nodes, op, vec![weight, a, b], vec![y], &[], (Phase::Update, None));
    graph.entries = vec![(Entry::MicroStep, vec![]), (Entry::Eval, nodes)];
    let extent = Extent { tokens: 1, rows: 1, segments: 1, audio: 0 };
    let name = format!("row norms {dtype} N={n} K={k} R={rank}");
    let subject =
        Subject { name: name.clone(), graph, extent, contents, scalar: Scalar::Dot { y, dy: vec![] } };
    subject.run_on_null(subject.roomy_plan(1)).unwrap();
    let got = decode_reals(&same_bytes_everywhere(&subject).result);
    for (row, got) in got.iter().enumerate() {
        let mut squares = 0.0;
        for column in 0..k {
            let low = (0..rank).map(|r| b_values[row * rank + r] * a_values[r * k + column]).sum::<f64>();
            squares += (weight_values[row * k + column] + f64::from(SCALE) * low).powi(2);
        }
        let want: f64 = squares.sqrt();
        assert!((f64::from(*got) - want).abs() < 1e-6 * want, "{name} [{row}]: {got}, want {want}");
    }
}
