//! Small graphs around one operation, in a few lines of test code.
//!
//! Every floating-point operand is a trained leaf, or rows looked up from one, so the gradient of that table is the
//! gradient of the activation. The loss that autodiff starts from is removed again and its gradient becomes an input,
//! so that a test can use any dy.

use crate::numbers::{Content, random_integers, random_keys, random_reals, stored};
use crate::subject::{Scalar, Subject};
use smidgen_compile::{autodiff, leaves};
use smidgen_ir::quant;
use smidgen_ir::{
    DType, Dim, Entry, Extent, Graph, Leaf, LeafKind, LossHead, MARK_COLUMNS, Node, Objective, Op, Phase,
    Shape, Storage, Type, ValueId, ValueRole, verify,
};
use std::collections::HashMap;

pub struct Draft {
    graph: Graph,
    nodes: Vec<Node>,
    extent: Extent,
    contents: Vec<(ValueId, Content)>,
    /// 0, 1, 2 … over the tokens.
    every_token: ValueId,
    supervised: ValueId,
    boundaries: ValueId,
}

impl Draft {
    /// Segments of the given lengths; the rows with a loss are every `stride`-th token.
    pub fn new(segments: &[usize], stride: usize) -> Draft {
        let tokens = segments.iter().sum();
        let rows: Vec<i32> = (0..tokens as i32).step_by(stride).collect();
        let mut boundaries = vec![0];
        for length in segments {
            boundaries.push(boundaries[boundaries.len() - 1] + *length as i32);
        }
        let mut draft = Draft {
            graph: Graph::default(),
            nodes: Vec::new(),
            extent: Extent { tokens, rows: rows.len(), segments: segments.len(), audio: 0 },
            contents: Vec::new(),
            every_token: ValueId(0),
            supervised: ValueId(0),
            boundaries: ValueId(0),
        };
        draft.every_token = draft.integers("every token", Dim::Tokens, (0..tokens as i32).collect());
        draft.supervised = draft.integers("rows", Dim::Rows, rows);
        draft.boundaries = draft.integers("boundaries", Dim::Boundaries, boundaries);
        draft
    }

    /// A draft with audio rows; every token has a loss.
    pub fn with_audio(segments: &[usize], audio: usize) -> Draft {
        let mut draft = Draft::new(segments, 1);
        draft.extent.audio = audio;
        draft
    }

    pub fn extent(&self) -> Extent {
        self.extent
    }

    pub fn columns(&self, value: ValueId) -> usize {
        self.graph.value(value).ty.shape.at(&self.extent).1
    }

    /// The marks of all audio rows.
    pub fn marks(&mut self, marks: Vec<i32>) -> ValueId {
        let shape = Shape::of(Dim::Audio(1), MARK_COLUMNS);
        self.input("marks", shape, DType::I32, Content::Integers(marks))
    }

    /// An activation (A, columns) whose gradient is checked: each of its elements depends on a trained matrix.
    pub fn audio(&mut self, name: &str, columns: usize) -> ValueId {
        let width = self.extent.audio;
        let reals = random_reals(self.next_seed(), width * width);
        let shape = Shape::of(Dim::Audio(1), width);
        let x = self.input(&format!("{name} input"), shape, DType::F32, Content::Reals(reals));
        let weight = self.matrix(&format!("{name} source"), columns, width, DType::F32);
        self.op(Op::Linear { bias: false, lora: None }, &[x, weight], &[name])[0]
    }

    /// A vector of numbers in (-1, 1) that is not trained.
    pub fn frozen_vector(&mut self, name: &str, n: usize, dtype: DType) -> ValueId {
        self.reals(name, Shape::vector(n), dtype)
    }

    pub fn boundaries(&self) -> ValueId {
        self.boundaries
    }

    pub fn supervised(&self) -> ValueId {
        self.supervised
    }

    fn input(&mut self, name: &str, shape: Shape, dtype: DType, content: Content) -> ValueId {
        let id = self.graph.add_leaf(name, Type::new(shape, Storage::Plain(dtype)), LeafKind::Input);
        self.contents.push((id, content));
        id
    }

    pub fn integers(&mut self, name: &str, dim: Dim, values: Vec<i32>) -> ValueId {
        self.input(name, Shape::rows_of(dim), DType::I32, Content::Integers(values))
    }

    /// Random ids below `vocabulary`, one per token or one per row.
    pub fn ids(&mut self, name: &str, dim: Dim, vocabulary: usize) -> ValueId {
        let values = random_integers(self.next_seed(), dim.at(&self.extent), vocabulary);
        self.integers(name, dim, values)
    }

    pub fn keys(&mut self, name: &str) -> ValueId {
        let values = random_keys(self.next_seed(), self.extent.tokens);
        self.input(name, Shape::rows_of(Dim::Tokens), DType::U64, Content::Keys(values))
    }

    pub fn double(&mut self, name: &str, value: f64) -> ValueId {
        self.input(name, Shape::vector(1), DType::F64, Content::Doubles(vec![value]))
    }

    /// A state of one f64, zero before every run.
    pub fn state(&mut self, name: &str) -> ValueId {
        self.graph.add_leaf(name, Type::new(Shape::vector(1), Storage::Plain(DType::F64)), LeafKind::State)
    }

    /// A trained matrix of numbers in (-1, 1).
    pub fn matrix(&mut self, name: &str, n: usize, k: usize, dtype: DType) -> ValueId {
        self.weight(name, Shape::matrix(n, k), dtype)
    }

    /// A matrix of numbers in (-1, 1) that is not trained.
    pub fn frozen_matrix(&mut self, name: &str, n: usize, k: usize, dtype: DType) -> ValueId {
        self.reals(name, Shape::matrix(n, k), dtype)
    }

    /// A matrix of numbers in (-1, 1) that is not trained, encoded as `storage`.
    pub fn quantized_matrix(&mut self, name: &str, n: usize, k: usize, storage: Storage) -> ValueId {
        let values = random_reals(self.next_seed(), n * k);
        let bytes = quant::encode(storage, n, k, &values).unwrap();
        let id = self.graph.add_leaf(name, Type::new(Shape::matrix(n, k), storage), LeafKind::Weight);
        self.contents.push((id, Content::Bytes(bytes)));
        id
    }

    /// A trained vector of numbers in (-1, 1).
    pub fn vector(&mut self, name: &str, n: usize, dtype: DType) -> ValueId {
        self.weight(name, Shape::vector(n), dtype)
    }

    fn weight(&mut self, name: &str, shape: Shape, dtype: DType) -> ValueId {
        let id = self.reals(name, shape, dtype);
        leaves::train_leaf(&mut self.graph, id);
        id
    }

    fn reals(&mut self, name: &str, shape: Shape, dtype: DType) -> ValueId {
        let ty = Type::new(shape, Storage::Plain(dtype));
        let reals = random_reals(self.next_seed(), ty.elements(&self.extent));
        self.leaf_of(name, ty.shape, dtype, &reals)
    }

    fn leaf_of(&mut self, name: &str, shape: Shape, dtype: DType, values: &[f32]) -> ValueId {
        let ty = Type::new(shape, Storage::Plain(dtype));
        let reals = values.iter().map(|value| stored(ty.storage, *value)).collect();
        let id = self.graph.add_leaf(name, ty, LeafKind::Weight);
        self.contents.push((id, Content::Reals(reals)));
        id
    }

    /// A trained matrix of the given numbers.
    pub fn matrix_of(&mut self, name: &str, [n, k]: [usize; 2], dtype: DType, values: &[f32]) -> ValueId {
        let id = self.leaf_of(name, Shape::matrix(n, k), dtype, values);
        leaves::train_leaf(&mut self.graph, id);
        id
    }

    /// A trained vector of the given numbers.
    pub fn vector_of(&mut self, name: &str, dtype: DType, values: &[f32]) -> ValueId {
        let id = self.leaf_of(name, Shape::vector(values.len()), dtype, values);
        leaves::train_leaf(&mut self.graph, id);
        id
    }

    /// A vector of the given numbers that is not trained.
    pub fn frozen_vector_of(&mut self, name: &str, values: &[f32]) -> ValueId {
        self.leaf_of(name, Shape::vector(values.len()), DType::F32, values)
    }

    /// Rows of a leaf; their gradient is part of the leaf's.
    pub fn rows_of(&mut self, leaf: ValueId, first_row: usize, rows: usize) -> ValueId {
        self.graph.add_slice(leaf, first_row, rows)
    }

    /// An activation (T, columns) whose gradient is checked.
    pub fn tokens(&mut self, name: &str, columns: usize) -> ValueId {
        let table = self.matrix(&format!("{name} source"), self.extent.tokens, columns, DType::F32);
        self.op(
            Op::Embed { scale: 1.0, element: DType::F32, padding: None },
            &[self.every_token, table],
            &[name],
        )[0]
    }

    /// An activation (T, columns) of the given numbers, whose gradient is checked.
    pub fn tokens_of(&mut self, name: &str, columns: usize, values: &[f32]) -> ValueId {
        let size = [self.extent.tokens, columns];
        let table = self.matrix_of(&format!("{name} source"), size, DType::F32, values);
        let op = Op::Embed { scale: 1.0, element: DType::F32, padding: None };
        self.op(op, &[self.every_token, table], &[name])[0]
    }

    /// The experts that each token chooses.
    pub fn choices(&mut self, name: &str, chosen: usize, values: Vec<i32>) -> ValueId {
        self.input(name, Shape::of(Dim::Tokens, chosen), DType::I32, Content::Integers(values))
    }

    /// An activation (S, columns) whose gradient is checked.
    pub fn rows(&mut self, name: &str, columns: usize) -> ValueId {
        let x = self.tokens(&format!("{name} of all tokens"), columns);
        self.op(Op::GatherRows, &[x, self.supervised], &[name])[0]
    }

    pub fn op(&mut self, op: Op, inputs: &[ValueId], outputs: &[&str]) -> Vec<ValueId> {
        let names: Vec<String> = outputs.iter().map(|name| name.to_string()).collect();
        let place = (Phase::Forward, None);
        self.graph.emit(&mut self.nodes, op, inputs.to_vec(), vec![], &names, place)
    }

    /// The loss over `x` (S, C) with every gradient that `head` asks for.
    pub fn loss(&mut self, head: LossHead, x: ValueId, table: ValueId, adapter: Option<(ValueId, ValueId)>) {
        let vocabulary = self.graph.value(table).ty.shape.at(&self.extent).0;
        let labels = self.ids("labels", Dim::Rows, vocabulary);
        let weight = self.double("loss weight", 0.7);
        let loss = self.state("loss");
        let mut inputs = vec![x, table, labels, weight];
        let (mut updates, mut names) = (vec![loss], vec!["d x".to_string()]);
        if let Some((h, b)) = adapter {
            inputs.extend([h, b]);
            names.push("d h".to_string());
            updates.extend(self.graph.gradient_of(b));
        }
        if head.train_head {
            updates.extend(self.graph.gradient_of(table));
        }
        let op = Op::LmHeadLoss(head);
        self.graph.emit(&mut self.nodes, op, inputs, updates, &names, (Phase::Forward, None));
    }

    /// An objective over sequences that begin at `first_rows`, whose loss is that of `x` (S, C).
    pub fn objective(
        &mut self,
        objective: &Objective,
        x: ValueId,
        table: ValueId,
        first_rows: Vec<i32>,
        numbers: Vec<f64>,
    ) {
        let vocabulary = self.graph.value(table).ty.shape.at(&self.extent).0;
        let labels = self.ids("labels", Dim::Rows, vocabulary);
        let weight = self.double("loss weight", 0.7);
        let (loss, unread) = (self.state("loss"), self.state("unread"));
        let rows = Type::f32(Shape::rows_of(Dim::Rows));
        let row_losses = self.graph.add_leaf("row losses", rows, LeafKind::State);
        let figures = Type::new(Shape::vector(Objective::FIGURES), Storage::Plain(DType::F64));
        let figures = self.graph.add_leaf("figures", figures, LeafKind::State);
        let head = LossHead {
            chunk: 5,
            gradient: false,
            lora: None,
            train_head: false,
            softcap: None,
            row_losses: true,
        };
        let place = (Phase::Forward, None);
        let inputs = vec![x, table, labels, weight];
        let updates = vec![unread, row_losses];
        self.graph.emit(&mut self.nodes, Op::LmHeadLoss(head), inputs, updates, &[], place);
        let first_rows = self.integers("first rows", Dim::Boundaries, first_rows);
        let shape = Shape::of(Dim::Boundaries, Objective::SEQUENCE_COLUMNS);
        let numbers = self.input("sequences", shape, DType::F64, Content::Doubles(numbers));
        let mut inputs = vec![row_losses, weight, first_rows, numbers];
        if objective.reads_rows() {
            // About the log-probability of a uniform choice, so that some ratios are clipped and others are not.
            let reals = random_reals(self.next_seed(), Objective::BEFORE_COLUMNS * self.extent.rows);
            let before = reals.iter().map(|value| 0.4 * value - (vocabulary as f32).ln()).collect();
            let shape = Shape::of(Dim::Rows, Objective::BEFORE_COLUMNS);
            inputs.push(self.input("before", shape, DType::F32, Content::Reals(before)));
        }
        let op = Op::Objective(objective.clone());
        let names = ["row weights".to_string()];
        let weights = self.graph.emit(&mut self.nodes, op, inputs, vec![loss, figures], &names, place)[0];
        let op = Op::LmHeadLoss(LossHead { gradient: true, row_losses: false, ..head });
        let inputs = vec![x, table, labels, weights];
        self.graph.emit(&mut self.nodes, op, inputs, vec![unread], &["d x".to_string()], place);
    }

    /// Differentiates Σ y·dy for a random dy.
    pub fn gradient_of(mut self, name: &str, y: ValueId) -> Subject {
        let last = &self.nodes[self.nodes.len() - 1];
        assert!(last.outputs.contains(&y), "y is read after `eval`, so it must be computed last");
        let (eval, y_of_eval) = self.copy_for_eval(Some(y));
        let columns = self.graph.value(y).ty.shape.at(&self.extent).1;
        let gathered = match self.graph.value(y).ty.shape.0[0] {
            Dim::Tokens => {
                assert_eq!(self.extent.rows, self.extent.tokens, "y over tokens needs a loss on each");
                self.op(Op::GatherRows, &[y, self.supervised], &["y of all tokens"])[0]
            }
            _ => y,
        };
        let table = self.graph.add_leaf("head", Type::f32(Shape::matrix(2, columns)), LeafKind::Weight);
        let head = LossHead {
            chunk: 1,
            gradient: true,
            lora: None,
            train_head: false,
            softcap: None,
            row_losses: false,
        };
        self.loss(head, gathered, table, None);
        let seed = self.nodes[self.nodes.len() - 1].outputs[0];
        let mut graph = self.differentiated(eval);
        let micro_step = &mut graph.entries[0].1;
        micro_step.retain(|node| !matches!(node.op, Op::LmHeadLoss(_)));
        let role = ValueRole::Leaf(Leaf::new(LeafKind::Input));
        let seed_value = &mut graph.values[seed.index()];
        (seed_value.name, seed_value.role) = ("dy".into(), role);
        verify::expect_sound("seeding", &verify::graph(&graph));
        let dy = random_reals(0xd, self.extent.rows * columns);
        self.contents.push((seed, Content::Reals(dy.clone())));
        self.subject(name, graph, Scalar::Dot { y: y_of_eval, dy })
    }

    /// Differentiates the loss that the draft ends with.
    pub fn gradient_of_loss(mut self, name: &str) -> Subject {
        let (eval, _) = self.copy_for_eval(None);
        let leaf = eval[eval.len() - 1].updates[0];
        let graph = self.differentiated(eval);
        self.subject(name, graph, Scalar::Loss { entry: Entry::Eval, leaf })
    }

    fn subject(self, name: &str, graph: Graph, scalar: Scalar) -> Subject {
        Subject { name: name.into(), graph, extent: self.extent, contents: self.contents, scalar }
    }

    fn differentiated(&mut self, eval: Vec<Node>) -> Graph {
        let mut graph = std::mem::take(&mut self.graph);
        graph.entries = vec![(Entry::MicroStep, std::mem::take(&mut self.nodes)), (Entry::Eval, eval)];
        verify::expect_sound("draft", &verify::graph(&graph));
        autodiff::append_backward(&mut graph);
        verify::expect_sound("autodiff", &verify::graph(&graph));
        graph
    }

    /// Copies the nodes with new temporaries and without gradients. Also returns the copy of `y`.
    fn copy_for_eval(&mut self, y: Option<ValueId>) -> (Vec<Node>, ValueId) {
        let mut copies: HashMap<ValueId, ValueId> = HashMap::new();
        let mut eval = Vec::new();
        for mut node in self.nodes.clone() {
            for input in &mut node.inputs {
                *input = copies.get(input).copied().unwrap_or(*input);
            }
            if let Op::Objective(_) = node.op {
                node.updates[0] = self.state("eval loss");
            }
            if let Op::LmHeadLoss(head) = &mut node.op
                && !head.row_losses
            {
                // An objective has added its loss already.
                if self.graph.value(node.inputs[3]).ty.storage == Storage::F32 {
                    continue;
                }
                (head.gradient, head.train_head) = (false, false);
                node.outputs.clear();
                node.updates = vec![self.state("eval loss")];
            }
            for output in &mut node.outputs {
                let original = self.graph.value(*output).clone();
                let copy =
                    self.graph.add_value(format!("eval {}", original.name), original.ty, ValueRole::Temp);
                copies.insert(*output, copy);
                *output = copy;
            }
            eval.push(node);
        }
        let y = y.map_or(ValueId(0), |y| copies[&y]);
        (eval, y)
    }

    fn next_seed(&self) -> u64 {
        1000 + self.graph.values.len() as u64
    }
}
