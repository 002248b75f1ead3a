//! The forward graph: one builder reads the [`DecoderSpec`] and serves every dialect.
//!
//! Activations are tokens-major and padding-free, `(T, C)`. The head sees only the rows that carry a
//! loss: rows are gathered before the final norm, so nothing is computed for the others.
//! Two entry points are built: the forward half of `micro_step`, and `eval` without dropout.

use crate::adapter::LoraModule;
use crate::model::spec::{DecoderSpec, EMBEDDING, FINAL_NORM, HEAD, QK_NORMS};
use crate::options::{Policy, Request};
use smidgen_ir::{
    AttentionShape, DType, Dim, Entry, Graph, LeafKind, LossHead, Node, Op, Phase, Shape, Storage, Type,
    ValueId, ValueRole,
};
use std::collections::HashMap;

/// Names of the inputs that the host writes.
pub mod input {
    pub const IDS: &str = "ids";
    pub const POSITIONS: &str = "positions";
    pub const BOUNDARIES: &str = "boundaries";
    pub const ROWS: &str = "rows";
    pub const LABELS: &str = "labels";
    pub const DROPOUT_KEYS: &str = "dropout_keys";
    /// The dropout keys of the rows that carry a loss; there when the head has an adapter.
    pub const DROPOUT_ROW_KEYS: &str = "dropout_row_keys";
    /// 1 ÷ supervised tokens of the whole optimizer step.
    pub const LOSS_WEIGHT: &str = "loss_weight";
    /// Learning rate and number of the update, counted from 1.
    pub const HYPER: &str = "hyper";
}

/// Names of the state that the host reads.
pub mod state {
    /// Loss of the micro-steps so far; the host clears it before a step.
    pub const LOSS: &str = "loss";
    /// Loss, gradient norm, clip factor, 1 if finite.
    pub const REPORT: &str = "report";
    /// Summed NLL of an evaluation; the host clears it before.
    pub const EVAL_LOSS: &str = "eval_loss";
}

/// All leaves, and the forward nodes of `micro_step` and `eval`.
pub fn build_graph(request: &Request, policy: &Policy) -> Graph {
    let mut graph = Graph::default();
    let leaves = add_leaves(&mut graph, request);
    let micro_step = build_entry(&mut graph, &leaves, request, policy, Entry::MicroStep);
    let eval = build_entry(&mut graph, &leaves, request, policy, Entry::Eval);
    graph.entries = vec![
        (Entry::MicroStep, micro_step),
        (Entry::Update, vec![]),
        (Entry::Refresh, vec![]),
        (Entry::Eval, eval),
    ];
    graph
}

type Leaves = HashMap<String, ValueId>;

fn add_leaves(graph: &mut Graph, request: &Request) -> Leaves {
    let mut leaves = Leaves::new();
    for tensor in request.spec.tensors() {
        let ty = Type::new(tensor.shape, request.storage_of(&tensor.name));
        let id = graph.add_leaf(tensor.name.as_str(), ty, LeafKind::Weight);
        leaves.insert(tensor.name, id);
    }
    let sizes: HashMap<String, (usize, usize)> =
        request.spec.linears().into_iter().map(|linear| (linear.path, (linear.n, linear.k))).collect();
    let mut trained = Vec::new();
    for module in &request.adapters {
        let (n, k) = sizes[&module.path];
        for (name, shape) in [
            (module.a_name(), Shape::matrix(module.rank, k)),
            (module.b_name(), Shape::matrix(n, module.rank)),
        ] {
            let id = graph.add_leaf(name.as_str(), Type::f32(shape), LeafKind::Adapter);
            trained.push(id);
            leaves.insert(name, id);
        }
    }
    for leaf in trained {
        train_leaf(graph, leaf);
    }
    let mut add = |name: &str, shape: Shape, dtype: DType, kind: LeafKind| {
        leaves.insert(name.into(), graph.add_leaf(name, Type::new(shape, Storage::Plain(dtype)), kind));
    };
    add(input::IDS, Shape::rows_of(Dim::Tokens), DType::I32, LeafKind::Input);
    add(input::POSITIONS, Shape::rows_of(Dim::Tokens), DType::I32, LeafKind::Input);
    add(input::BOUNDARIES, Shape::rows_of(Dim::Boundaries), DType::I32, LeafKind::Input);
    add(input::ROWS, Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
    add(input::LABELS, Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
    add(input::LOSS_WEIGHT, Shape::vector(1), DType::F64, LeafKind::Input);
    add(input::HYPER, Shape::vector(2), DType::F64, LeafKind::Input);
    if request.dropout > 0.0 {
        add(input::DROPOUT_KEYS, Shape::rows_of(Dim::Tokens), DType::U64, LeafKind::Input);
        if request.adapters.iter().any(|module| module.path == HEAD) {
            add(input::DROPOUT_ROW_KEYS, Shape::rows_of(Dim::Rows), DType::U64, LeafKind::Input);
        }
    }
    add(state::LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    add(state::REPORT, Shape::vector(4), DType::F64, LeafKind::State);
    add(state::EVAL_LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    leaves
}

/// Gives a leaf a gradient: from here on it is trained.
pub fn train_leaf(graph: &mut Graph, leaf: ValueId) {
    let (name, shape) = (format!("grad {}", graph.value(leaf).name), graph.value(leaf).ty.shape.clone());
    let gradient = graph.add_leaf(name, Type::f32(shape), LeafKind::Gradient);
    if let ValueRole::Leaf(leaf) = &mut graph.values[leaf.index()].role {
        leaf.gradient = Some(gradient);
    }
}

fn build_entry(
    graph: &mut Graph,
    leaves: &Leaves,
    request: &Request,
    policy: &Policy,
    entry: Entry,
) -> Vec<Node> {
    let training = entry == Entry::MicroStep;
    let adapters = request.adapters.iter().enumerate().map(|(i, module)| (module.path.as_str(), (i, module)));
    let mut builder = Builder {
        graph,
        nodes: Vec::new(),
        leaves,
        spec: &request.spec,
        adapters: adapters.collect(),
        dropout: if training { request.dropout } else { 0.0 },
        prefix: if training { "" } else { "eval." },
        layer: None,
    };
    let hidden = builder.decoder();
    builder.loss(hidden, policy.loss_chunk, training);
    builder.nodes
}

struct Builder<'a> {
    graph: &'a mut Graph,
    nodes: Vec<Node>,
    leaves: &'a Leaves,
    spec: &'a DecoderSpec,
    adapters: HashMap<&'a str, (usize, &'a LoraModule)>,
    dropout: f32,
    prefix: &'static str,
    layer: Option<usize>,
}

impl Builder<'_> {
    fn leaf(&self, name: &str) -> ValueId {
        self.leaves[name]
    }

    fn emit(&mut self, op: Op, inputs: Vec<ValueId>, outputs: &[&str]) -> Vec<ValueId> {
        let place = match self.layer {
            Some(layer) => format!("{}layers.{layer}.", self.prefix),
            None => self.prefix.to_string(),
        };
        let names: Vec<String> = outputs.iter().map(|name| format!("{place}{name}")).collect();
        self.graph.emit(&mut self.nodes, op, inputs, vec![], &names, (Phase::Forward, self.layer))
    }

    fn emit1(&mut self, op: Op, inputs: Vec<ValueId>, output: &str) -> ValueId {
        self.emit(op, inputs, &[output])[0]
    }

    /// Embedding and all layers: ids to the residual stream (T, C).
    fn decoder(&mut self) -> ValueId {
        let mut x = self.emit1(Op::Embed, vec![self.leaf(input::IDS), self.leaf(EMBEDDING)], "x");
        let table = self.emit1(Op::RopeTable(self.spec.rope), vec![self.leaf(input::POSITIONS)], "rope");
        for layer in 0..self.spec.layers {
            self.layer = Some(layer);
            x = self.attention_block(x, table);
            x = self.mlp_block(x);
        }
        self.layer = None;
        x
    }

    fn attention_block(&mut self, x: ValueId, table: ValueId) -> ValueId {
        let spec = self.spec;
        let shape = AttentionShape {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            scale: (spec.head_dim as f32).powf(-0.5),
            window: spec.window,
        };
        let n = self.norm(x, "input_layernorm.weight", "attn.norm"); // (T, C)
        let q = self.linear(n, "self_attn.q_proj", "attn.q"); // (T, H·D)
        let k = self.linear(n, "self_attn.k_proj", "attn.k"); // (T, Hkv·D)
        let v = self.linear(n, "self_attn.v_proj", "attn.v"); // (T, Hkv·D)
        let (mut q, mut k) = (q, k);
        if spec.qk_norm {
            let [q_norm, k_norm] = QK_NORMS;
            q = self.norm(q, q_norm, "attn.q_normed"); // (T, H·D), each head by itself
            k = self.norm(k, k_norm, "attn.k_normed"); // (T, Hkv·D)
        }
        let q = self.emit1(Op::Rope { heads: spec.heads, inverse: false }, vec![q, table], "attn.q_turned");
        let k =
            self.emit1(Op::Rope { heads: spec.kv_heads, inverse: false }, vec![k, table], "attn.k_turned");
        let boundaries = self.leaf(input::BOUNDARIES);
        let o = self.emit(Op::Attention(shape), vec![q, k, v, boundaries], &["attn.o", "attn.lse"])[0];
        let y = self.linear(o, "self_attn.o_proj", "attn.out"); // (T, C)
        self.emit1(Op::Add, vec![x, y], "mid")
    }

    fn mlp_block(&mut self, x: ValueId) -> ValueId {
        let n = self.norm(x, "post_attention_layernorm.weight", "mlp.norm"); // (T, C)
        let gate = self.linear(n, "mlp.gate_proj", "mlp.gate"); // (T, I)
        let up = self.linear(n, "mlp.up_proj", "mlp.up"); // (T, I)
        let a = self.emit1(Op::GatedAct(self.spec.activation), vec![gate, up], "mlp.act"); // (T, I)
        let y = self.linear(a, "mlp.down_proj", "mlp.out"); // (T, C)
        self.emit1(Op::Add, vec![x, y], "x")
    }

    fn norm(&mut self, x: ValueId, weight: &str, output: &str) -> ValueId {
        let weight = match self.layer {
            Some(layer) => self.leaf(&DecoderSpec::layer_path(layer, weight)),
            None => self.leaf(weight),
        };
        self.emit1(Op::RmsNorm { eps: self.spec.norm_eps }, vec![x, weight], output)
    }

    /// A linear of the current layer with its bias and its adapter, where it has them.
    fn linear(&mut self, x: ValueId, module: &str, output: &str) -> ValueId {
        let layer = self.layer.expect("linears outside the layers are the head");
        let path = DecoderSpec::layer_path(layer, module);
        let mut inputs = vec![x, self.leaf(&format!("{path}.weight"))];
        let bias = self.leaves.get(&format!("{path}.bias")).copied();
        inputs.extend(bias);
        let adapter = self.adapter(x, &path, output);
        if let Some((h, b, _)) = adapter {
            inputs.extend([h, b]);
        }
        let lora = adapter.map(|(_, _, scale)| scale);
        self.emit1(Op::Linear { bias: bias.is_some(), lora }, inputs, output)
    }

    /// h = dropout(x)·Aᵀ, B and the scale of the adapter on `path`.
    fn adapter(&mut self, x: ValueId, path: &str, output: &str) -> Option<(ValueId, ValueId, f32)> {
        let (index, module) = self.adapters.get(path).copied()?;
        let x = if self.dropout > 0.0 {
            let op = Op::Dropout { p: self.dropout, stream: index as u32 };
            let keys = if path == HEAD { input::DROPOUT_ROW_KEYS } else { input::DROPOUT_KEYS };
            self.emit1(op, vec![x, self.leaf(keys)], &format!("{output}.dropped"))
        } else {
            x
        };
        let a = self.leaf(&module.a_name());
        let h = self.emit1(Op::Linear { bias: false, lora: None }, vec![x, a], &format!("{output}.h")); // (T, R)
        Some((h, self.leaf(&module.b_name()), module.scale))
    }

    /// Final norm, head and loss over the supervised rows.
    fn loss(&mut self, x: ValueId, chunk: usize, gradient: bool) {
        let rows = self.emit1(Op::GatherRows, vec![x, self.leaf(input::ROWS)], "head.rows"); // (S, C)
        let n = self.norm(rows, FINAL_NORM, "head.norm"); // (S, C)
        let head = self.leaf(self.spec.head_tensor());
        let mut inputs = vec![n, head, self.leaf(input::LABELS), self.leaf(input::LOSS_WEIGHT)];
        let loss = self.leaf(if gradient { state::LOSS } else { state::EVAL_LOSS });
        let (mut updates, mut outputs) = (vec![loss], Vec::new());
        if gradient {
            outputs.push("head.d_norm".to_string());
        }
        let adapter = self.adapter(n, HEAD, "head.logits");
        if let Some((h, b, _)) = adapter {
            inputs.extend([h, b]);
            if gradient {
                outputs.push("head.d_h".to_string());
                updates.extend(self.graph.gradient_of(b));
            }
        }
        let head_gradient = self.graph.gradient_of(head).filter(|_| gradient);
        updates.extend(head_gradient);
        let op = Op::LmHeadLoss(LossHead {
            chunk,
            gradient,
            lora: adapter.map(|(_, _, scale)| scale),
            train_head: head_gradient.is_some(),
        });
        self.graph.emit(&mut self.nodes, op, inputs, updates, &outputs, (Phase::Forward, None));
    }
}
