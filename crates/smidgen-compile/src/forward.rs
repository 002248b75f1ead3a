//! The forward graph: one builder reads the [`DecoderSpec`] and serves every model type.
//!
//! Activations are token-major without padding, `(T, C)`. The head gets only the rows that carry a loss: rows are gathered
//! before the final norm, so nothing is computed for the others. The entry points built here are the forward half of
//! `micro_step`, `eval` without dropout, `refresh`, `decode` if generation is requested, `logits` for inspecting a model,
//! and `encode` for audio. The leaves are in `leaves.rs`, a linear with its adapter in `linear.rs`.

use crate::adapter::LoraModule;
use crate::leaves::{Leaves, add_leaves, cache_names};
use crate::model::audio::{AudioInput, AudioSpec};
use crate::model::spec::{DecoderSpec, EMBEDDING, FINAL_NORM, GATE_UP, QK_NORMS, QKV};
use crate::names::{input, state};
use crate::request::{AdapterForm, Purpose, Request};
use smidgen_ir::{
    Activation, AttentionShape, DType, Entry, Graph, LossHead, Node, Op, Phase, Rounded, ValueId,
};
use std::collections::HashMap;

/// All leaves, and the forward nodes of each entry point that the purpose needs.
pub fn build_graph(request: &Request, purpose: Purpose, loss_chunk: usize) -> Graph {
    let mut graph = Graph::default();
    let mut leaves = add_leaves(&mut graph, request, purpose);
    let mut entries = match purpose {
        Purpose::Training => vec![Entry::MicroStep, Entry::Update, Entry::Refresh, Entry::Eval],
        Purpose::Evaluation => vec![Entry::Refresh, Entry::Eval],
        Purpose::Logits => vec![Entry::Refresh, Entry::Logits],
        Purpose::Generation => vec![Entry::Refresh, Entry::Decode],
        Purpose::Encoding => vec![Entry::Refresh, Entry::Encode],
    };
    if purpose == Purpose::Training && request.decode.is_some() {
        entries.push(Entry::Decode);
    }
    for entry in entries {
        let nodes = match entry {
            Entry::Update | Entry::Collect => vec![],
            Entry::Refresh => build_refresh(&mut graph, &leaves, request),
            Entry::MicroStep | Entry::Eval | Entry::Logits | Entry::Decode | Entry::Encode => {
                build_entry(&mut graph, &mut leaves, request, entry, loss_chunk)
            }
        };
        graph.entries.push((entry, nodes));
    }
    graph
}

/// Sets the chunk of the loss, an attribute on which nothing else in a graph depends.
pub fn set_loss_chunk(graph: &mut Graph, loss_chunk: usize) {
    for node in graph.entries.iter_mut().flat_map(|(_, nodes)| nodes) {
        if let Op::LmHeadLoss(head) = &mut node.op {
            head.chunk = loss_chunk;
        }
    }
}

fn build_entry(
    graph: &mut Graph,
    leaves: &mut Leaves,
    request: &Request,
    entry: Entry,
    loss_chunk: usize,
) -> Vec<Node> {
    let training = entry == Entry::MicroStep;
    let adapters = request.adapters.iter().enumerate().map(|(i, module)| (module.path.as_str(), (i, module)));
    let mut builder = Builder {
        graph,
        nodes: Vec::new(),
        leaves,
        spec: &request.spec,
        form: request.form,
        adapters: adapters.collect(),
        dropout: if training { request.dropout } else { 0.0 },
        element: request.activations(),
        prefix: match entry {
            Entry::Eval => "eval.",
            Entry::Decode => "decode.",
            Entry::MicroStep
            | Entry::Update
            | Entry::Refresh
            | Entry::Logits
            | Entry::Collect
            | Entry::Encode => "",
        },
        layer: None,
        block: None,
        encoder_layers: request.encoder_layers(),
        cached: entry == Entry::Decode,
        audio: request.audio_spec().map(|spec| (spec, request.audio)),
    };
    if entry == Entry::Encode {
        builder.encode_audio();
        return builder.nodes;
    }
    let hidden = builder.decoder();
    match entry {
        Entry::MicroStep | Entry::Eval => {
            let row_losses = request.row_losses && !training;
            builder.loss(hidden, loss_chunk, training, row_losses);
        }
        _ => builder.logits(hidden),
    }
    builder.nodes
}

/// Recomputes what depends on trained leaves after every update: their copies in the type of matmuls, and the row norms of
/// weight plus adapter by which DoRA divides.
fn build_refresh(graph: &mut Graph, leaves: &Leaves, request: &Request) -> Vec<Node> {
    let mut nodes = Vec::new();
    let place = (Phase::Update, None);
    for id in graph.ids() {
        if let Some(Rounded { of, scale }) = graph.value(id).leaf().and_then(|leaf| leaf.rounded) {
            graph.emit(&mut nodes, Op::Round { scale, to: None }, vec![of], vec![id], &[], place);
        }
    }
    if request.form == AdapterForm::Dora {
        for module in &request.adapters {
            let weight = leaves.get(&format!("{}.weight", module.path));
            let inputs = vec![weight, leaves.get(&module.a_name()), leaves.get(&module.b_name())];
            let norms = vec![leaves.get(&module.norm_name())];
            let op = Op::RowNorms { scale: module.scale };
            graph.emit(&mut nodes, op, inputs, norms, &[], place);
        }
    }
    nodes
}

pub(crate) struct Builder<'a> {
    pub graph: &'a mut Graph,
    pub nodes: Vec<Node>,
    pub leaves: &'a mut Leaves,
    pub spec: &'a DecoderSpec,
    pub form: AdapterForm,
    /// By path: index among the adapters, and the adapter.
    pub adapters: HashMap<&'a str, (usize, &'a LoraModule)>,
    pub dropout: f32,
    /// The element type of activations.
    pub element: DType,
    pub prefix: &'static str,
    /// The layer of the decoder that is being built.
    pub layer: Option<usize>,
    /// The block of the audio encoder that is being built.
    pub block: Option<usize>,
    /// Blocks of the audio encoder that come before the decoder's layers.
    pub encoder_layers: usize,
    /// Whether keys and values go through the caches.
    pub cached: bool,
    /// The audio encoder and the form of its input, if there is sound.
    pub audio: Option<(&'a AudioSpec, AudioInput)>,
}

impl Builder<'_> {
    pub fn leaf(&self, name: &str) -> ValueId {
        self.leaves.get(name)
    }

    pub fn emit(&mut self, op: Op, inputs: Vec<ValueId>, outputs: &[&str]) -> Vec<ValueId> {
        let prefix = match self.layer {
            Some(layer) => format!("{}layers.{layer}.", self.prefix),
            None => self.prefix.to_string(),
        };
        let names: Vec<String> = outputs.iter().map(|name| format!("{prefix}{name}")).collect();
        let place = (Phase::Forward, self.place());
        self.graph.emit(&mut self.nodes, op, inputs, vec![], &names, place)
    }

    /// The layer of the nodes that are being built, counting blocks of the audio encoder first.
    fn place(&self) -> Option<usize> {
        self.layer.map(|layer| self.encoder_layers + layer).or(self.block)
    }

    pub fn emit1(&mut self, op: Op, inputs: Vec<ValueId>, output: &str) -> ValueId {
        self.emit(op, inputs, &[output])[0]
    }

    /// Embedding and all layers: ids to the residual stream (T, C).
    fn decoder(&mut self) -> ValueId {
        let (scale, padding) = (self.spec.embedding_scale, self.spec.padding);
        let embed = Op::Embed { scale, element: self.element, padding };
        // The encoder comes first, so that no embeddings wait for it.
        let audio = self.audio.map(|(spec, from)| self.audio_embeddings(spec, from)); // (A, C)
        let mut x = self.emit1(embed, vec![self.leaf(input::IDS), self.leaf(EMBEDDING)], "x");
        if let Some(audio) = audio {
            let inputs = vec![x, self.leaf(input::AUDIO_TARGETS), audio];
            x = self.emit1(Op::PlaceRows { clear: false }, inputs, "x_heard");
        }
        let tables = self.rope_tables();
        for layer in 0..self.spec.layers {
            self.layer = Some(layer);
            x = self.attention_block(x, tables[self.spec.attention[layer].rope]);
            x = self.mlp_block(x);
        }
        self.layer = None;
        x
    }

    /// One table (T, dim) for each rotary embedding of the model.
    fn rope_tables(&mut self) -> Vec<ValueId> {
        let spec = self.spec;
        let tables = spec.ropes.iter().enumerate().map(|(index, rope)| {
            let mut inputs = vec![self.leaf(input::POSITIONS)];
            if rope.depends_on_length() {
                inputs.push(self.leaf(if self.cached { input::LENGTHS } else { input::BOUNDARIES }));
            }
            let name = if index == 0 { "rope".to_string() } else { format!("rope{index}") };
            self.emit1(Op::RopeTable(rope.clone()), inputs, &name)
        });
        tables.collect()
    }

    fn attention_block(&mut self, x: ValueId, table: ValueId) -> ValueId {
        let spec = self.spec;
        let layer = self.layer.expect("attention belongs to a layer");
        let shape = AttentionShape {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            scale: spec.attention_scale,
            window: spec.attention[layer].window,
            softcap: spec.attention_softcap,
        };
        let [q_rows, kv_rows] = spec.projection_rows();
        let n = self.norm(x, spec.layer_norms()[0], "attn.norm"); // (T, C)
        let parts = [("attn.q", q_rows), ("attn.k", kv_rows), ("attn.v", kv_rows)];
        let [mut q, mut k, v] = self.projections(n, QKV, parts); // (T, H·D), (T, Hkv·D), (T, Hkv·D)
        if spec.qk_norm {
            let [q_norm, k_norm] = QK_NORMS;
            q = self.norm(q, q_norm, "attn.q_normed"); // (T, H·D), each head by itself
            k = self.norm(k, k_norm, "attn.k_normed"); // (T, Hkv·D)
        }
        let q = self.emit1(Op::Rope { heads: spec.heads, inverse: false }, vec![q, table], "attn.q_turned");
        let k =
            self.emit1(Op::Rope { heads: spec.kv_heads, inverse: false }, vec![k, table], "attn.k_turned");
        let o = self.attention(shape, q, k, v); // (T, H·D)
        let mut y = self.linear(o, "self_attn.o_proj", "attn.out"); // (T, C)
        if spec.sandwich_norms {
            y = self.norm(y, spec.layer_norms()[1], "attn.out_normed"); // (T, C)
        }
        self.emit1(Op::Add, vec![x, y], "mid")
    }

    fn attention(&mut self, shape: AttentionShape, q: ValueId, k: ValueId, v: ValueId) -> ValueId {
        if !self.cached {
            let boundaries = self.leaf(input::BOUNDARIES);
            return self.emit(Op::Attention(shape), vec![q, k, v, boundaries], &["attn.o", "attn.lse"])[0];
        }
        let layer = self.layer.expect("attention belongs to a layer");
        let caches = cache_names(layer).map(|name| self.leaf(&name)); // (N, Hkv·D) both
        let places = [input::CACHE_TABLE, input::SLOTS, input::POSITIONS].map(|name| self.leaf(name));
        let new = [k, v].into_iter().chain(places).collect();
        let place = (Phase::Forward, self.place());
        self.graph.emit(&mut self.nodes, Op::CacheRows, new, caches.to_vec(), &[], place);
        let read = [q].into_iter().chain(caches).chain(places).collect();
        self.emit1(Op::CachedAttention(shape), read, "attn.o")
    }

    fn mlp_block(&mut self, x: ValueId) -> ValueId {
        let spec = self.spec;
        let [.., before, after] = *spec.layer_norms() else { unreachable!("a layer has two norms or four") };
        let n = self.norm(x, if spec.sandwich_norms { before } else { after }, "mlp.norm"); // (T, C)
        let parts = [("mlp.gate", spec.intermediate), ("mlp.up", spec.intermediate)];
        let [gate, up] = self.projections(n, GATE_UP, parts); // (T, I) both
        let a = self.gated(spec.activation, gate, up, "mlp.act"); // (T, I)
        let mut y = self.linear(a, "mlp.down_proj", "mlp.out"); // (T, C)
        if spec.sandwich_norms {
            y = self.norm(y, after, "mlp.out_normed"); // (T, C)
        }
        self.emit1(Op::Add, vec![x, y], "x")
    }

    /// act(gate)·up.
    pub fn gated(&mut self, activation: Activation, gate: ValueId, up: ValueId, output: &str) -> ValueId {
        self.emit1(Op::GatedAct(activation), vec![gate, up], output)
    }

    fn norm(&mut self, x: ValueId, weight: &str, output: &str) -> ValueId {
        let weight = match self.layer {
            Some(layer) => self.leaf(&DecoderSpec::layer_path(layer, weight)),
            None => self.leaf(weight),
        };
        self.emit1(Op::RmsNorm(self.spec.norm), vec![x, weight], output)
    }

    /// The normed rows that carry a loss, and h, B and scale of an adapter on the head.
    fn head_input(&mut self, x: ValueId) -> (ValueId, Option<(ValueId, ValueId, f32)>) {
        let rows = self.emit1(Op::GatherRows, vec![x, self.leaf(input::ROWS)], "head.rows"); // (S, C)
        let n = self.norm(rows, FINAL_NORM, "head.norm"); // (S, C)
        (n, self.head_adapter(n))
    }

    /// Final norm, head and loss over the supervised rows.
    fn loss(&mut self, x: ValueId, chunk: usize, gradient: bool, row_losses: bool) {
        let (n, adapter) = self.head_input(x);
        let head = self.leaves.multiplied(self.spec.head_tensor());
        let mut inputs = vec![n, head, self.leaf(input::LABELS), self.leaf(input::LOSS_WEIGHT)];
        let loss = self.leaf(if gradient { state::LOSS } else { state::EVAL_LOSS });
        let (mut updates, mut outputs) = (vec![loss], Vec::new());
        if gradient {
            outputs.push("head.d_norm".to_string());
        }
        if let Some((h, b, _)) = adapter {
            inputs.extend([h, b]);
            if gradient {
                outputs.push("head.d_h".to_string());
                updates.extend(self.graph.gradient_of(b));
            }
        }
        let head_gradient = self.graph.gradient_of(head).filter(|_| gradient);
        updates.extend(head_gradient);
        if row_losses {
            updates.push(self.leaf(state::ROW_LOSSES));
        }
        let op = Op::LmHeadLoss(LossHead {
            chunk,
            gradient,
            lora: adapter.map(|(_, _, scale)| scale),
            train_head: head_gradient.is_some(),
            softcap: self.spec.logit_softcap,
            row_losses,
        });
        self.graph.emit(&mut self.nodes, op, inputs, updates, &outputs, (Phase::Forward, None));
    }

    /// The logits of the chosen rows, for the host to read.
    fn logits(&mut self, x: ValueId) {
        let (n, adapter) = self.head_input(x);
        let mut inputs = vec![n, self.leaves.multiplied(self.spec.head_tensor())];
        if let Some((h, b, _)) = adapter {
            inputs.extend([h, b]);
        }
        let lora = adapter.map(|(_, _, scale)| scale);
        let op = Op::Logits { lora, softcap: self.spec.logit_softcap, first_word: 0 };
        let logits = vec![self.leaf(if self.cached { state::DECODED_LOGITS } else { state::LOGITS })];
        self.graph.emit(&mut self.nodes, op, inputs, logits, &[], (Phase::Forward, None));
    }
}
