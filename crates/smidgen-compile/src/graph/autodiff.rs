//! Reverse mode over the coarse operations: appends to `micro_step` the gradients that trainable leaves need, and no more.
//!
//! The forward nodes are visited in reverse order. Each value collects contributions to its gradient; when its producer is
//! reached they are complete and become one value. A contribution is either a value or a *term* `scale · d·matrix`: all
//! terms of one value (q, k, v and their adapters on one norm output) are summed inside one matmul, so no sum of
//! activations ever passes through memory. A value that depends on no trainable leaf gets no gradient: nothing is built
//! below the lowest adapted layer, and no weight gradient for frozen weights.

use smidgen_ir::{
    ByValue, DecayShape, Entry, ExpertRows, Extent, Graph, HeadPart, Node, Norm, Op, Phase, Router,
    ScanShape, ValueId, ValueSet, ops_without_gradient,
};

/// A part of the gradient of a value, times a factor. A factor is carried through linears to their matmuls, so that a
/// scaled branch of the residual costs no pass over memory.
struct Contribution {
    part: Part,
    factor: f32,
}

enum Part {
    Value(ValueId),
    /// `layer` is that of the matrix: its gradient and the last use of the matrix are in the same layer, although the value
    /// may come from the layer below, as the input of an audio projector does.
    Term {
        d: ValueId,
        matrix: ValueId,
        scale: f32,
        layer: Option<usize>,
        /// If the matrix holds those of all experts: its rows, and the expert of each row of `d`.
        experts: Option<(ExpertRows, ValueId)>,
    },
    /// The gradient of the columns from `first` on of each of `groups` equal parts.
    Columns {
        d: ValueId,
        first: usize,
        groups: usize,
    },
    /// The gradient of some columns of each head, in `d`.
    Heads {
        d: ValueId,
        part: HeadPart,
        heads: usize,
    },
}

impl Contribution {
    fn value(d: ValueId) -> Contribution {
        Contribution { part: Part::Value(d), factor: 1.0 }
    }
}

pub fn append_backward(graph: &mut Graph) {
    let mut nodes = graph.take_nodes(Entry::MicroStep).expect("the forward stage builds micro_step");
    let mut backward = Backward {
        needs_gradient: values_that_need_gradients(graph, &nodes),
        graph,
        nodes: Vec::new(),
        pending: ByValue::default(),
        layer: None,
    };
    for node in nodes.iter().rev() {
        backward.layer = node.layer;
        backward.node(node);
    }
    nodes.append(&mut backward.nodes);
    graph.set_nodes(Entry::MicroStep, nodes);
}

/// Values that depend on a trainable leaf, the leaves included.
fn values_that_need_gradients(graph: &Graph, nodes: &[Node]) -> ValueSet {
    let mut needs: ValueSet = graph.ids().filter(|id| graph.gradient_of(*id).is_some()).collect();
    for node in nodes {
        if node.inputs.iter().any(|input| needs.contains(input)) {
            needs.extend(&node.outputs);
        }
    }
    needs
}

struct Backward<'a> {
    graph: &'a mut Graph,
    needs_gradient: ValueSet,
    nodes: Vec<Node>,
    pending: ByValue<Vec<Contribution>>,
    layer: Option<usize>,
}

impl Backward<'_> {
    fn emit(
        &mut self,
        op: Op,
        inputs: Vec<ValueId>,
        updates: Vec<ValueId>,
        outputs: &[String],
    ) -> Vec<ValueId> {
        self.graph.emit(&mut self.nodes, op, inputs, updates, outputs, (Phase::Backward, self.layer))
    }

    fn needs(&self, value: ValueId) -> bool {
        self.needs_gradient.contains(&value)
    }

    fn name_of_gradient(&self, value: ValueId) -> String {
        format!("d {}", self.graph.value(value).name)
    }

    fn contribute(&mut self, value: ValueId, contribution: Contribution) {
        if self.needs(value) {
            self.pending.get_or_insert_with(value, Vec::new).push(contribution);
        }
    }

    fn term(&self, d: ValueId, matrix: ValueId, scale: f32) -> Part {
        Part::Term { d, matrix, scale, layer: self.layer, experts: None }
    }

    /// The complete gradient of a value, if any reached it.
    fn gradient(&mut self, value: ValueId) -> Option<ValueId> {
        let contributions = self.pending.remove(&value)?;
        Some(self.sum(value, contributions))
    }

    /// As [`Self::gradient`], but without a factor that all contributions have, which is returned.
    fn gradient_and_factor(&mut self, value: ValueId) -> Option<(ValueId, f32)> {
        let mut contributions = self.pending.remove(&value)?;
        let factor = contributions[0].factor;
        if contributions.iter().any(|contribution| contribution.factor != factor) {
            return Some((self.sum(value, contributions), 1.0));
        }
        contributions.iter_mut().for_each(|contribution| contribution.factor = 1.0);
        Some((self.sum(value, contributions), factor))
    }

    fn sum(&mut self, value: ValueId, contributions: Vec<Contribution>) -> ValueId {
        let (mut inputs, mut scales, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let (mut columns, mut of_heads) = (Vec::new(), Vec::new());
        let (own_layer, mut term_layer) = (self.layer, self.layer);
        let (mut parts, mut of_rows) = (Vec::new(), None);
        for Contribution { part, factor } in contributions {
            match part {
                Part::Value(d) => values.push((d, factor)),
                Part::Term { d, matrix, scale, layer, experts } => {
                    inputs.extend([d, matrix]);
                    scales.push(scale * factor);
                    term_layer = layer;
                    if let Some((part, rows)) = experts {
                        parts.push(part);
                        of_rows = Some(rows);
                    }
                }
                Part::Columns { d, first, groups } => columns.push((groups, first, d)),
                Part::Heads { d, part, heads } => of_heads.push((heads, part, d)),
            }
        }
        let placed = [self.placed_columns(value, columns), self.placed_heads(value, of_heads)].concat();
        values.extend(placed.into_iter().map(|d| (d, 1.0)));
        // A sum begins with a value that it need not scale.
        values.sort_by_key(|(_, factor)| *factor != 1.0);
        let (name, mut values) = (self.name_of_gradient(value), values.into_iter());
        let first = if scales.is_empty() {
            let (d, scale) = values.next().expect("a value with contributions");
            self.scaled(d, scale, &name)
        } else {
            self.layer = term_layer;
            inputs.extend(of_rows);
            let op = match of_rows {
                Some(_) => Op::GroupedLinearGrad { parts, scales },
                None => Op::LinearGrad { scales },
            };
            let sum = self.emit(op, inputs, vec![], std::slice::from_ref(&name))[0];
            self.layer = own_layer;
            sum
        };
        values.fold(first, |so_far, (d, scale)| {
            self.emit(Op::Add { scale }, vec![so_far, d], vec![], std::slice::from_ref(&name))[0]
        })
    }

    /// scale·d; `d` itself if the scale is 1.
    fn scaled(&mut self, d: ValueId, scale: f32, name: &str) -> ValueId {
        if scale == 1.0 {
            return d;
        }
        self.emit(Op::Scale { scale }, vec![d], vec![], &[name.to_owned()])[0]
    }

    /// Gradients of all columns of a value from those of some columns: one, unless some of them overlap.
    fn placed_columns(&mut self, value: ValueId, mut parts: Vec<(usize, usize, ValueId)>) -> Vec<ValueId> {
        let width = |graph: &Graph, value: ValueId| graph.value(value).ty.shape.at(&Extent::default()).1;
        let (columns, name) = (width(self.graph, value), self.name_of_gradient(value));
        let mut placed = Vec::new();
        while !parts.is_empty() {
            parts.sort();
            let (groups, mut end, mut now) = (parts[0].0, 0, Vec::new());
            parts.retain(|&(groups_of_part, first, d)| {
                let fits = groups_of_part == groups && first >= end;
                if fits {
                    end = first + width(self.graph, d) / groups;
                    now.push((first, d));
                }
                !fits
            });
            let (firsts, inputs) = now.into_iter().unzip();
            let op = Op::PlaceColumns { firsts, columns: columns / groups, groups };
            placed.push(self.emit(op, inputs, vec![], std::slice::from_ref(&name))[0]);
        }
        placed
    }

    /// Gradients of all columns of a value from those of some columns of its heads: one, unless some of them overlap.
    fn placed_heads(&mut self, value: ValueId, mut parts: Vec<(usize, HeadPart, ValueId)>) -> Vec<ValueId> {
        let (_, columns) = self.graph.value(value).ty.shape.at(&Extent::default());
        let name = self.name_of_gradient(value);
        let mut placed = Vec::new();
        while let Some(heads) = parts.iter().map(|(heads, ..)| *heads).next() {
            parts.sort_by_key(|(_, part, d)| (part.to, *d));
            let (mut end, mut now, mut inputs) = (0, Vec::new(), Vec::new());
            parts.retain(|&(own_heads, part, d)| {
                let fits = own_heads == heads && part.to >= end;
                if fits {
                    end = part.to + part.columns;
                    now.push(part);
                    inputs.push(d);
                }
                !fits
            });
            let op = Op::PlaceHeads { heads, head_dim: columns / heads, parts: now };
            placed.push(self.emit(op, inputs, vec![], std::slice::from_ref(&name))[0]);
        }
        placed
    }

    /// Adds scale · dyᵀ·x to the gradient of a trainable matrix.
    fn weight_gradient(&mut self, weight: ValueId, dy: ValueId, x: ValueId, scale: f32) {
        if let Some(gradient) = self.graph.gradient_of(weight) {
            let scale = scale * self.graph.gradient_scale(weight);
            self.emit(Op::WeightGrad { scale }, vec![dy, x], vec![gradient], &[]);
        }
    }

    fn node(&mut self, node: &Node) {
        match &node.op {
            Op::LmHeadLoss(_) => self.loss(node),
            Op::GatherRows => self.one_gradient(node, Op::ScatterRows, |_, d| vec![d, node.inputs[1]]),
            Op::Add { scale } => {
                if let Some(d) = self.gradient(node.outputs[0]) {
                    self.contribute(node.inputs[0], Contribution::value(d));
                    self.contribute(
                        node.inputs[1],
                        Contribution { factor: *scale, ..Contribution::value(d) },
                    );
                }
            }
            Op::SliceColumns { first, groups, .. } => {
                if let Some(d) = self.gradient(node.outputs[0]) {
                    let part = Part::Columns { d, first: *first, groups: *groups };
                    self.contribute(node.inputs[0], Contribution { part, factor: 1.0 });
                }
            }
            Op::PlaceHeads { heads, parts, .. } => {
                let Some(d) = self.gradient(node.outputs[0]) else { return };
                for (x, part) in node.inputs.iter().zip(parts) {
                    let part = Part::Heads { d, part: part.reversed(*heads), heads: part.heads };
                    self.contribute(*x, Contribution { part, factor: 1.0 });
                }
            }
            Op::ScaleBy => self.scale_by(node),
            Op::RmsNorm { norm, unweighted } => self.rms_norm(node, *norm, *unweighted),
            Op::Linear { bias, lora } => self.linear(node, *bias, *lora),
            Op::Route(router) => self.route(node, *router),
            Op::SpreadRows { weighted } => self.spread_rows(node, *weighted),
            Op::CombineRows { weighted } => self.combine_rows(node, *weighted),
            Op::GroupedLinear { part, bias, lora } => self.grouped_linear(node, *part, *bias, *lora),
            Op::ScaleColumns { bias } => self.scale_columns(node, *bias),
            Op::Fourier { scale } => self.fourier(node, *scale),
            Op::Dropout { .. } => self.one_gradient(node, node.op.clone(), |_, d| vec![d, node.inputs[1]]),
            Op::GatedAct(activation) => {
                if let Some(d) = self.gradient(node.outputs[0]) {
                    let (gate, up) = (node.inputs[0], node.inputs[1]);
                    let names = [self.name_of_gradient(gate), self.name_of_gradient(up)];
                    let both = self.emit(Op::GatedActGrad(*activation), vec![gate, up, d], vec![], &names);
                    self.contribute(gate, Contribution::value(both[0]));
                    self.contribute(up, Contribution::value(both[1]));
                }
            }
            Op::Rope { heads, inverse, interleaved } => {
                let op = Op::Rope { heads: *heads, inverse: !inverse, interleaved: *interleaved };
                self.one_gradient(node, op, |_, d| vec![d, node.inputs[1]]);
            }
            Op::Attention(shape) => {
                let sinks = shape.sinks.then(|| node.inputs[4]);
                self.attention(node, Op::AttentionGrad(*shape), sinks);
            }
            Op::Embed { scale, padding, .. } => {
                if let Some(table) = self.graph.gradient_of(node.inputs[1])
                    && let Some(d) = self.gradient(node.outputs[0])
                {
                    let op = Op::EmbedGrad { scale: *scale, padding: *padding };
                    self.emit(op, vec![node.inputs[0], d], vec![table], &[]);
                }
            }
            Op::PlaceRows { .. } => self.place_rows(node),
            Op::LayerNorm { eps, bias } => self.layer_norm(node, *eps, *bias),
            Op::Scale { .. } => self.one_gradient(node, node.op.clone(), |_, d| vec![d]),
            Op::Act(kind) => self.one_gradient(node, Op::ActGrad(*kind), |x, d| vec![x, d]),
            Op::CausalConv { bias, .. } => self.causal_conv(node, *bias),
            Op::Decay(shape) => self.decay(node, *shape),
            Op::Scan(shape) => self.scan(node, *shape),
            Op::AddBias => {
                if let Some(d) = self.gradient(node.outputs[0]) {
                    self.bias_gradient(node.inputs[1], d, 1.0);
                    self.contribute(node.inputs[0], Contribution::value(d));
                }
            }
            Op::ChunkAttention(shape) => self.attention(node, Op::ChunkAttentionGrad(*shape), None),
            // An objective's weights are constants: the gradient passes through the loss that they weight.
            Op::Objective(_) => {}
            // They have no trained leaves among their inputs: they only turn positions, choices or sound into inputs of the
            // layers.
            Op::Dispatch { .. }
            | Op::RopeTable(_)
            | Op::StridedConv(_)
            | Op::JoinPlaces { .. }
            | Op::MaskRows { .. } => {}
            ops_without_gradient!() => unreachable!("`{}` is not a forward operation", node.op.name()),
        }
    }

    /// Emits the gradient of a node's first input x as one operation, whose inputs are made from x and the gradient of the
    /// node's output.
    fn one_gradient(&mut self, node: &Node, op: Op, inputs: impl FnOnce(ValueId, ValueId) -> Vec<ValueId>) {
        if let Some(d) = self.gradient(node.outputs[0]) {
            let x = node.inputs[0];
            self.add_gradient(x, op, inputs(x, d));
        }
    }

    /// Emits an operation that computes the gradient of a value, if the value needs one.
    fn add_gradient(&mut self, value: ValueId, op: Op, inputs: Vec<ValueId>) {
        if self.needs(value) {
            let name = self.name_of_gradient(value);
            let d = self.emit(op, inputs, vec![], &[name])[0];
            self.contribute(value, Contribution::value(d));
        }
    }

    /// Audio rows get the gradient of the rows where they were placed; the rows that they replaced get none.
    fn place_rows(&mut self, node: &Node) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        let [x, rows, audio] = node.inputs[..] else { unreachable!("rows are placed with three inputs") };
        self.add_gradient(audio, Op::TakeRows, vec![d, rows]);
        self.add_gradient(x, Op::PlaceRows { clear: true }, vec![d, rows]);
    }

    /// Attention of either kind: the inputs are q, k, v and others, perhaps with sinks as the last; the outputs o and lse.
    fn attention(&mut self, node: &Node, op: Op, sinks: Option<ValueId>) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        if let Some(sinks) = sinks
            && let Some(gradient) = self.graph.gradient_of(sinks)
        {
            let [o, lse] = node.outputs[..] else { unreachable!("attention has two outputs") };
            self.emit(Op::SinksGrad, vec![o, lse, d, sinks], vec![gradient], &[]);
        }
        let (qkv, others) = node.inputs[..node.inputs.len() - usize::from(sinks.is_some())].split_at(3);
        let names: Vec<String> = qkv.iter().map(|value| self.name_of_gradient(*value)).collect();
        let inputs = [qkv, &node.outputs, &[d], others].concat();
        for (value, gradient) in qkv.iter().zip(self.emit(op, inputs, vec![], &names)) {
            self.contribute(*value, Contribution::value(gradient));
        }
    }

    /// The forward operation has already computed these gradients.
    fn loss(&mut self, node: &Node) {
        if let Some(&dx) = node.outputs.first() {
            self.contribute(node.inputs[0], Contribution::value(dx));
        }
        if let (Some(&dh), Some(&h)) = (node.outputs.get(1), node.inputs.get(4)) {
            self.contribute(h, Contribution::value(dh));
        }
    }

    fn rms_norm(&mut self, node: &Node, norm: Norm, unweighted: Option<usize>) {
        let (x, weight) = (node.inputs[0], node.inputs.get(1).copied());
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        if let Some(gradient) = weight.and_then(|weight| self.graph.gradient_of(weight)) {
            self.emit(Op::RmsNormWeightGrad { eps: norm.eps }, vec![x, d], vec![gradient], &[]);
        }
        let op = |addend| Op::RmsNormGrad { norm, unweighted, addend };
        self.norm_gradient(x, op, weight.into_iter(), d);
    }

    fn layer_norm(&mut self, node: &Node, eps: f32, bias: bool) {
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        if let Some(gradient) = self.graph.gradient_of(weight) {
            self.emit(Op::LayerNormWeightGrad { eps }, vec![x, d], vec![gradient], &[]);
        }
        if bias {
            self.bias_gradient(node.inputs[2], d, 1.0);
        }
        self.norm_gradient(x, |addend| Op::LayerNormGrad { eps, addend }, [weight].into_iter(), d);
    }

    /// dx of a norm, to which the kernel adds the other contributions to the gradient of x.
    fn norm_gradient(
        &mut self,
        x: ValueId,
        op: impl FnOnce(bool) -> Op,
        weight: impl Iterator<Item = ValueId>,
        d: ValueId,
    ) {
        if !self.needs(x) {
            return;
        }
        let addend = self.gradient(x);
        let inputs = [x].into_iter().chain(weight).chain([d]).chain(addend).collect();
        let name = self.name_of_gradient(x);
        let dx = self.emit(op(addend.is_some()), inputs, vec![], &[name])[0];
        self.contribute(x, Contribution::value(dx));
    }

    fn causal_conv(&mut self, node: &Node, bias: bool) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        let (x, reach, weight) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        if bias {
            self.bias_gradient(node.inputs[3], d, 1.0);
        }
        if let Some(gradient) = self.graph.gradient_of(weight) {
            self.emit(Op::CausalConvWeightGrad, vec![x, d, reach], vec![gradient], &[]);
        }
        self.add_gradient(x, Op::CausalConv { bias: false, backward: true }, vec![d, reach, weight]);
    }

    /// The gradients of both outputs come from one scan.
    fn decay(&mut self, node: &Node, shape: DecayShape) {
        let gradients: Vec<ValueId> =
            node.outputs.iter().filter_map(|output| self.gradient(*output)).collect();
        if gradients.is_empty() {
            return;
        }
        let vectors = [node.inputs[1], node.inputs[2]].map(|vector| self.graph.gradient_of(vector));
        let op = Op::DecayGrad { shape, trains: vectors.map(|gradient| gradient.is_some()) };
        let projections: Vec<ValueId> =
            [0, 3].into_iter().filter_map(|input| node.inputs.get(input)).copied().collect();
        let names: Vec<String> = projections.iter().map(|value| self.name_of_gradient(*value)).collect();
        let inputs = [node.inputs.as_slice(), &gradients].concat();
        let updates = vectors.into_iter().flatten().collect();
        for (value, d) in projections.iter().zip(self.emit(op, inputs, updates, &names)) {
            self.contribute(*value, Contribution::value(d));
        }
    }

    fn scan(&mut self, node: &Node, shape: ScanShape) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        let (operands, boundaries) = node.inputs.split_at(5);
        let names: Vec<String> = operands.iter().map(|value| self.name_of_gradient(*value)).collect();
        let inputs = [operands, &[d], boundaries].concat();
        for (value, gradient) in operands.iter().zip(self.emit(Op::ScanGrad(shape), inputs, vec![], &names)) {
            self.contribute(*value, Contribution::value(gradient));
        }
    }

    fn scale_by(&mut self, node: &Node) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        let (x, scale) = (node.inputs[0], node.inputs[1]);
        if let Some(gradient) = self.graph.gradient_of(scale) {
            self.emit(Op::ScaleByGrad, vec![x, d], vec![gradient], &[]);
        }
        self.add_gradient(x, Op::ScaleBy, vec![d, scale]);
    }

    /// y = x·Wᵀ + bias + scale·h·Bᵀ. The adapter's part comes first: it reads little and frees `h` early.
    fn linear(&mut self, node: &Node, bias: bool, lora: Option<f32>) {
        let Some((dy, factor)) = self.gradient_and_factor(node.outputs[0]) else { return };
        let layer = self.layer;
        let term = |matrix, scale| Contribution {
            part: Part::Term { d: dy, matrix, scale, layer, experts: None },
            factor,
        };
        if let Some(scale) = lora {
            let [.., h, b] = node.inputs[..] else { unreachable!("an adapted linear has h and b") };
            self.weight_gradient(b, dy, h, scale * factor);
            self.contribute(h, term(b, scale));
        }
        if bias {
            self.bias_gradient(node.inputs[2], dy, factor);
        }
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        self.weight_gradient(weight, dy, x, factor);
        self.contribute(x, term(weight, 1.0));
    }

    /// The weights of the chosen experts are a function of the logits; which experts are chosen has no gradient.
    fn route(&mut self, node: &Node, router: Router) {
        let Some(dweights) = self.gradient(node.outputs[0]) else { return };
        let logits = node.inputs[0];
        let scales = node.inputs.last().copied().filter(|_| router.has_expert_scales);
        let updates: Vec<ValueId> =
            scales.and_then(|scales| self.graph.gradient_of(scales)).into_iter().collect();
        if !self.needs(logits) && updates.is_empty() {
            return;
        }
        let inputs = [logits, node.outputs[1], dweights].into_iter().chain(scales).collect();
        let name = self.name_of_gradient(logits);
        let d = self.emit(Op::RouteGrad(router), inputs, updates, &[name])[0];
        self.contribute(logits, Contribution::value(d));
    }

    /// Row `places[t, j]` of y is `weights[t, j]` times row t of x.
    fn spread_rows(&mut self, node: &Node, weighted: bool) {
        let Some(dy) = self.gradient(node.outputs[0]) else { return };
        let (x, others) = (node.inputs[0], &node.inputs[1..]);
        if weighted {
            self.add_gradient(others[1], Op::RowDots, vec![dy, x, others[0]]);
        }
        self.add_gradient(x, Op::CombineRows { weighted }, [&[dy], others].concat());
    }

    /// Row t of the result is Σ_j `weights[t, j]` · row `places[t, j]` of y.
    fn combine_rows(&mut self, node: &Node, weighted: bool) {
        let Some(d) = self.gradient(node.outputs[0]) else { return };
        let (y, others) = (node.inputs[0], &node.inputs[1..]);
        if weighted {
            self.add_gradient(others[1], Op::RowDots, vec![y, d, others[0]]);
        }
        self.add_gradient(y, Op::SpreadRows { weighted }, [&[d], others].concat());
    }

    /// As [`Self::linear`], with the rows of each expert's matrix.
    fn grouped_linear(&mut self, node: &Node, part: ExpertRows, bias: bool, lora: Option<f32>) {
        let Some((dy, factor)) = self.gradient_and_factor(node.outputs[0]) else { return };
        let (x, weight, experts, layer) = (node.inputs[0], node.inputs[1], node.inputs[2], self.layer);
        let term = |matrix, scale| Contribution {
            part: Part::Term { d: dy, matrix, scale, layer, experts: Some((part, experts)) },
            factor,
        };
        if let Some(scale) = lora {
            let [.., h, b] = node.inputs[..] else { unreachable!("an adapted linear has h and b") };
            self.grouped_weight_gradient(b, part, [dy, h, experts], scale * factor);
            self.contribute(h, term(b, scale));
        }
        if bias && let Some(gradient) = self.graph.gradient_of(node.inputs[3]) {
            let name = format!("{} scaled", self.graph.value(dy).name);
            let dy = self.scaled(dy, factor, &name);
            self.emit(Op::GroupedBiasGrad { part }, vec![dy, experts], vec![gradient], &[]);
        }
        self.grouped_weight_gradient(weight, part, [dy, x, experts], factor);
        self.contribute(x, term(weight, 1.0));
    }

    fn grouped_weight_gradient(
        &mut self,
        weight: ValueId,
        part: ExpertRows,
        inputs: [ValueId; 3],
        scale: f32,
    ) {
        if let Some(gradient) = self.graph.gradient_of(weight) {
            let scale = scale * self.graph.gradient_scale(weight);
            self.emit(Op::GroupedWeightGrad { part, scale }, inputs.into(), vec![gradient], &[]);
        }
    }

    fn bias_gradient(&mut self, bias: ValueId, dy: ValueId, factor: f32) {
        let Some(gradient) = self.graph.gradient_of(bias) else { return };
        let name = format!("{} scaled", self.graph.value(dy).name);
        let dy = self.scaled(dy, factor, &name);
        self.emit(Op::BiasGrad, vec![dy], vec![gradient], &[]);
    }

    /// y = z·m/n + bias, where n is treated as a constant.
    fn scale_columns(&mut self, node: &Node, bias: bool) {
        let Some(dy) = self.gradient(node.outputs[0]) else { return };
        let (z, magnitude, norm) = (node.inputs[0], node.inputs[1], node.inputs[2]);
        if bias {
            self.bias_gradient(node.inputs[3], dy, 1.0);
        }
        if let Some(gradient) = self.graph.gradient_of(magnitude) {
            self.emit(Op::MagnitudeGrad, vec![dy, z, norm], vec![gradient], &[]);
        }
        self.add_gradient(z, Op::ScaleColumns { bias: false }, vec![dy, magnitude, norm]);
    }

    /// y = base + φ(s·h·Bᵀ). The gradient operation recomputes the argument of φ from h.
    fn fourier(&mut self, node: &Node, scale: f32) {
        let Some(dy) = self.gradient(node.outputs[0]) else { return };
        let [base, h, b, coefficients, sigma] = node.inputs[..] else {
            unreachable!("fourier has five inputs")
        };
        let updates: Vec<ValueId> =
            [coefficients, sigma].iter().filter_map(|leaf| self.graph.gradient_of(*leaf)).collect();
        let name = format!("d {} argument", self.graph.value(node.outputs[0]).name);
        let inputs = vec![h, b, coefficients, sigma, dy];
        let dz = self.emit(Op::FourierGrad { scale }, inputs, updates, &[name])[0];
        self.weight_gradient(b, dz, h, scale);
        self.contribute(h, Contribution { part: self.term(dz, b, scale), factor: 1.0 });
        self.contribute(base, Contribution::value(dy));
    }
}
