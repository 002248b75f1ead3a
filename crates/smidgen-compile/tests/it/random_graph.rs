//! Random graphs of forward operations: chains and branches over two widths, ending in a loss.
//!
//! A graph is built from a list of numbers, so that proptest shrinks a failing one to few nodes. Any leaf may be trained;
//! every node obeys the shape rules by construction.

use proptest::prelude::*;
use smidgen_compile::{leaves, names};
use smidgen_ir::{
    Activation, AttentionShape, DType, Dim, Entry, Graph, LeafKind, LossHead, Node, Norm, Op, Phase, Shape,
    Storage, Type, ValueId,
};

/// Describes one new node: the operation, and the earlier values that it reads.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    kind: u8,
    first: u8,
    second: u8,
    trained: bool,
}

pub fn growths() -> impl Strategy<Value = Vec<Growth>> {
    let growth = (0u8..12, any::<u8>(), any::<u8>(), prop::bool::weighted(0.3));
    let growth = growth.prop_map(|(kind, first, second, trained)| Growth { kind, first, second, trained });
    prop::collection::vec(growth, 1..30)
}

/// Widths of the activations: 2 heads of 8 channels, and another width.
const WIDTHS: [usize; 2] = [16, 24];
const ATTENTION: AttentionShape = AttentionShape {
    heads: 2,
    kv_heads: 2,
    head_dim: 8,
    scale: 0.35,
    window: None,
    softcap: None,
    sinks: false,
};

struct Grower {
    graph: Graph,
    nodes: Vec<Node>,
    /// Activations so far, by width.
    values: [Vec<ValueId>; 2],
}

/// The forward half of `micro_step`, as `autodiff` expects it; the last leaf is always trained.
pub fn grow(growths: &[Growth]) -> Graph {
    let mut graph = Graph::default();
    let integers = |graph: &mut Graph, name: &str, dim: Dim, dtype: DType| {
        graph.add_leaf(name, Type::new(Shape::rows_of(dim), Storage::Plain(dtype)), LeafKind::Input)
    };
    let ids = integers(&mut graph, "ids", Dim::Tokens, DType::I32);
    let keys = integers(&mut graph, "keys", Dim::Tokens, DType::U64);
    let boundaries = integers(&mut graph, "boundaries", Dim::Boundaries, DType::I32);
    let mut grower = Grower { graph, nodes: Vec::new(), values: [vec![], vec![]] };
    for (index, width) in WIDTHS.into_iter().enumerate() {
        let table = grower.weight("table", Shape::matrix(10, width), false);
        let x = grower.emit(
            Op::Embed { scale: 3.0, element: DType::F32, padding: None },
            vec![ids, table],
            &["x"],
        )[0];
        grower.values[index].push(x);
    }
    for growth in growths {
        grower.grow(growth, keys, boundaries);
    }
    grower.finish()
}

impl Grower {
    fn weight(&mut self, name: &str, shape: Shape, trained: bool) -> ValueId {
        let name = format!("{name} {}", self.graph.values.len());
        let id = self.graph.add_leaf(name, Type::f32(shape), LeafKind::Weight);
        if trained {
            leaves::train_leaf(&mut self.graph, id);
        }
        id
    }

    fn emit(&mut self, op: Op, inputs: Vec<ValueId>, outputs: &[&str]) -> Vec<ValueId> {
        let names: Vec<String> =
            outputs.iter().map(|name| format!("{name} {}", self.graph.values.len())).collect();
        self.graph.emit(&mut self.nodes, op, inputs, vec![], &names, (Phase::Forward, None))
    }

    fn pick(&self, width: usize, choice: u8) -> ValueId {
        self.values[width][choice as usize % self.values[width].len()]
    }

    fn grow(&mut self, growth: &Growth, keys: ValueId, boundaries: ValueId) {
        let width = usize::from(growth.second) % 2;
        let (a, b) = (self.pick(width, growth.first), self.pick(width, growth.second));
        let (columns, other) = (WIDTHS[width], 1 - width);
        let (into, y) = match growth.kind {
            0 => (width, self.emit(Op::Add { scale: 1.0 }, vec![a, b], &["sum"])),
            1 => {
                let weight = self.weight("norm", Shape::vector(columns), growth.trained);
                (
                    width,
                    self.emit(
                        Op::RmsNorm {
                            norm: Norm { eps: 1e-5, plus_one: growth.first.is_multiple_of(2) },
                            unweighted: None,
                        },
                        vec![a, weight],
                        &["norm"],
                    ),
                )
            }
            2 => (width, self.emit(Op::GatedAct(Activation::Silu), vec![a, b], &["act"])),
            3 => {
                let rest = growth.second % 4 < 2;
                let op = Op::Dropout { p: 0.1, stream: growth.first.into(), rest };
                (width, self.emit(op, vec![a, keys], &["dropped"]))
            }
            4 => {
                let q = self.pick(0, growth.first);
                let (k, v) = (self.pick(0, growth.second), self.pick(0, growth.first.wrapping_mul(7)));
                (0, self.emit(Op::Attention(ATTENTION), vec![q, k, v, boundaries], &["o", "lse"]))
            }
            5 => (other, self.linear(a, other, growth, false)),
            6 => (width, self.gain(a, width, growth)),
            7 => (width, self.trained_function(a, b, width, growth)),
            8 => (width, self.parts_of_one_linear(a, width, growth)),
            _ => (width, self.linear(a, width, growth, true)),
        };
        self.values[into].push(y[0]);
    }

    /// A linear with an adapter of rank 4 and, if asked, a bias.
    fn linear(&mut self, x: ValueId, into: usize, growth: &Growth, bias: bool) -> Vec<ValueId> {
        let k = self.graph.value(x).ty.shape.at(&Default::default()).1;
        let n = WIDTHS[into];
        let a = self.weight("a", Shape::matrix(4, k), growth.trained);
        let h = self.emit(Op::Linear { bias: false, lora: None }, vec![x, a], &["h"])[0];
        let mut inputs = vec![x, self.weight("weight", Shape::matrix(n, k), growth.first.is_multiple_of(4))];
        if bias {
            inputs.push(self.weight("bias", Shape::vector(n), growth.first.is_multiple_of(3)));
        }
        inputs.extend([h, self.weight("b", Shape::matrix(n, 4), growth.trained)]);
        self.emit(Op::Linear { bias, lora: Some(2.0) }, inputs, &["y"])
    }

    /// DoRA's scaling of columns, whose norm is never trained.
    fn gain(&mut self, z: ValueId, width: usize, growth: &Growth) -> Vec<ValueId> {
        let shape = Shape::vector(WIDTHS[width]);
        let mut inputs = vec![z, self.weight("magnitude", shape.clone(), growth.trained)];
        inputs.push(self.weight("row norm", shape.clone(), false));
        let bias = growth.first.is_multiple_of(2);
        if bias {
            inputs.push(self.weight("bias", shape, growth.first.is_multiple_of(3)));
        }
        self.emit(Op::ScaleColumns { bias }, inputs, &["gained"])
    }

    /// LS-LoRA on an earlier base; coefficients and sigma are rows of leaves with two.
    fn trained_function(&mut self, x: ValueId, base: ValueId, width: usize, growth: &Growth) -> Vec<ValueId> {
        let n = WIDTHS[width];
        let a = self.weight("a", Shape::matrix(4, n), growth.trained);
        let h = self.emit(Op::Linear { bias: false, lora: None }, vec![x, a], &["h"])[0];
        let b = self.weight("b", Shape::matrix(n, 4), growth.trained);
        // The gradient operation always updates both.
        let leaves = [("coefficients", 4), ("sigma", 1)].map(|(name, columns)| {
            let leaf = self.weight(name, Shape::matrix(2, columns), true);
            self.graph.add_slice(leaf, usize::from(growth.second) % 2, 1)
        });
        self.emit(Op::Fourier { scale: 0.5 }, vec![base, h, b, leaves[0], leaves[1]], &["bent"])
    }

    /// The sum of two parts of one linear. Both use rows of the same adapter and bias.
    fn parts_of_one_linear(&mut self, x: ValueId, width: usize, growth: &Growth) -> Vec<ValueId> {
        let n = WIDTHS[width];
        let a = self.weight("a", Shape::matrix(4, n), growth.trained);
        let h = self.emit(Op::Linear { bias: false, lora: None }, vec![x, a], &["h"])[0];
        let weight = self.weight("fused weight", Shape::matrix(2 * n, n), growth.first.is_multiple_of(4));
        let bias = self.weight("fused bias", Shape::vector(2 * n), growth.first.is_multiple_of(3));
        let b = self.weight("fused b", Shape::matrix(2 * n, 4), growth.trained);
        let parts = [0, n].map(|first_row| {
            let [weight, bias, b] = [weight, bias, b].map(|leaf| self.graph.add_slice(leaf, first_row, n));
            self.emit(Op::Linear { bias: true, lora: Some(2.0) }, vec![x, weight, bias, h, b], &["part"])[0]
        });
        self.emit(Op::Add { scale: 1.0 }, parts.to_vec(), &["sum of parts"])
    }

    /// The loss of the newest activation.
    fn finish(mut self) -> Graph {
        let newest = *self.values.iter().flatten().max().expect("there is an activation");
        let leaf = |graph: &mut Graph, name: &str, shape: Shape, dtype: DType, kind: LeafKind| {
            graph.add_leaf(name, Type::new(shape, Storage::Plain(dtype)), kind)
        };
        let graph = &mut self.graph;
        let rows = leaf(graph, "rows", Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
        let labels = leaf(graph, "labels", Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
        let weight = leaf(graph, names::input::LOSS_WEIGHT, Shape::vector(1), DType::F64, LeafKind::Input);
        leaf(graph, names::input::HYPER, Shape::vector(3), DType::F64, LeafKind::Input);
        let loss = leaf(graph, names::state::LOSS, Shape::vector(1), DType::F64, LeafKind::State);
        leaf(graph, names::state::REPORT, Shape::vector(4), DType::F64, LeafKind::State);
        let x = self.emit(Op::GatherRows, vec![newest, rows], &["rows"])[0];
        let columns = self.graph.value(x).ty.shape.at(&Default::default()).1;
        let head = self.weight("head", Shape::matrix(10, columns), true);
        let updates: Vec<ValueId> = [loss].into_iter().chain(self.graph.gradient_of(head)).collect();
        let op = Op::LmHeadLoss(LossHead {
            chunk: 2,
            gradient: true,
            lora: None,
            train_head: true,
            softcap: None,
            row_losses: false,
        });
        let names = ["d x".to_string()];
        let place = (Phase::Forward, None);
        self.graph.emit(&mut self.nodes, op, vec![x, head, labels, weight], updates, &names, place);
        self.graph.entries = vec![(Entry::MicroStep, self.nodes), (Entry::Update, vec![])];
        self.graph
    }
}
