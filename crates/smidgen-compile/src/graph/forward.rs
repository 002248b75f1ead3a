//! The forward graph: one builder reads the [`DecoderSpec`] and serves every model type.
//!
//! Activations are token-major without padding, `(T, C)`. The head gets only the rows that carry a loss: rows are gathered
//! before the final norm, so nothing is computed for the others. The entry points built here are the forward half of
//! `micro_step`, `eval` without dropout, `refresh`, `decode` if generation is requested, `logits` for inspecting a model,
//! and `encode` for audio. The leaves are in `leaves.rs`, a linear with its adapter in `linear.rs`.

use crate::adapter::LoraModule;
use crate::leaves::{Leaves, REFERENCE_COPY, add_leaves, cache_names};
use crate::model::audio::{AudioInput, AudioSpec};
use crate::model::layer::{
    AttentionSpec, BothMixers, FeedForward, GatedSpec, KeysAndValues, LAYER_SCALAR, LayerSpec, Mixer,
    NormForm, NormSpec, NormedChannels, OUTPUT_GATE, OutputGate, QkNorm, Rotation, SINKS, TOKEN_GATE,
    TOKEN_PROJECTION, TokenInput,
};
use crate::model::spec::{
    DecoderSpec, EMBEDDING, EmbeddingSpec, PER_LAYER_EMBEDDING, PER_LAYER_NORM, PER_LAYER_PROJECTION,
    PerLayerEmbedding,
};
use crate::names::{input, state};
use crate::request::{AdapterForm, Purpose, Reference, Request};
use smidgen_ir::{
    Activation, DType, Entry, Graph, LossHead, Node, Norm, Objective, Op, Phase, Rounded, ValueId,
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
    if purpose == Purpose::Training && request.reference.is_some() {
        entries.push(Entry::Reference);
    }
    if purpose == Purpose::Training && request.decode.is_some() {
        entries.push(Entry::Decode);
    }
    for entry in entries {
        let nodes = match entry {
            Entry::Update | Entry::Collect => vec![],
            Entry::Refresh => build_refresh(&mut graph, &leaves, request),
            Entry::MicroStep
            | Entry::Eval
            | Entry::Reference
            | Entry::Logits
            | Entry::Decode
            | Entry::Encode => build_entry(&mut graph, &mut leaves, request, entry, loss_chunk),
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
    let is_reference = entry == Entry::Reference;
    let is_adapted = !is_reference || request.reference == Some(Reference::Adapter);
    let adapters = request.adapters.iter().filter(|_| is_adapted).enumerate();
    let adapters = adapters.map(|(i, module)| (module.path.as_str(), (i, module)));
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
            Entry::Reference => "reference.",
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
        adapter_copy: if is_reference { REFERENCE_COPY } else { "" },
        keys_and_values: HashMap::new(),
        audio: request.audio_spec().map(|spec| (spec, request.audio)),
    };
    if entry == Entry::Encode {
        builder.encode_audio();
        return builder.nodes;
    }
    let hidden = builder.decoder();
    match entry {
        Entry::MicroStep | Entry::Eval | Entry::Reference => {
            builder.loss(hidden, loss_chunk, entry, request);
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
    /// What precedes the names of the adapters' tensors: nothing, or a copy's prefix.
    pub adapter_copy: &'static str,
    /// Normed and rotated keys, and values, of each layer so far.
    pub keys_and_values: HashMap<usize, [ValueId; 2]>,
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
    pub fn place(&self) -> Option<usize> {
        self.layer.map(|layer| self.encoder_layers + layer).or(self.block)
    }

    pub fn emit1(&mut self, op: Op, inputs: Vec<ValueId>, output: &str) -> ValueId {
        self.emit(op, inputs, &[output])[0]
    }

    /// x + scale·y
    pub fn add(&mut self, x: ValueId, y: ValueId, scale: f32, output: &str) -> ValueId {
        self.emit1(Op::Add { scale }, vec![x, y], output)
    }

    /// x times stored numbers, each that of several neighbouring channels.
    pub fn scaled_by(&mut self, x: ValueId, numbers: ValueId, output: &str) -> ValueId {
        self.emit1(Op::ScaleBy, vec![x, numbers], output)
    }

    /// Columns `first` to `first + columns` of each of `groups` equal parts of x.
    pub fn columns(
        &mut self,
        x: ValueId,
        first: usize,
        columns: usize,
        groups: usize,
        output: &str,
    ) -> ValueId {
        self.emit1(Op::SliceColumns { first, columns, groups }, vec![x], output)
    }

    /// The causal convolution of its inputs.
    pub fn causal_conv(&mut self, inputs: Vec<ValueId>, bias: bool, output: &str) -> ValueId {
        self.emit1(Op::CausalConv { bias, backward: false }, inputs, output)
    }

    /// scale·x, or x itself if the factor is 1.
    pub fn times(&mut self, x: ValueId, scale: f32, output: &str) -> ValueId {
        if scale == 1.0 { x } else { self.scaled(x, scale, output) }
    }

    /// scale·x
    pub fn scaled(&mut self, x: ValueId, scale: f32, output: &str) -> ValueId {
        self.emit1(Op::Scale { scale }, vec![x], output)
    }

    /// Embedding and all layers: ids to the residual stream (T, C).
    fn decoder(&mut self) -> ValueId {
        let spec = self.spec;
        let EmbeddingSpec { scale, padding, norm, per_layer } = spec.embedding;
        // The encoder comes first, so that no embeddings wait for it.
        let audio = self.audio.map(|(spec, from)| self.audio_embeddings(spec, from)); // (A, C)
        let mut x = self.embed(EMBEDDING, scale, padding, "x");
        if let Some(norm) = norm {
            x = self.plain_norm(x, norm, spec.hidden, "x_normed"); // (T, C)
        }
        let per_layer = per_layer.map(|per_layer| self.embeddings_of_layers(x, per_layer)); // (T, L·P)
        if let Some(audio) = audio {
            let inputs = vec![x, self.leaf(input::AUDIO_TARGETS), audio];
            x = self.emit1(Op::PlaceRows { clear: false }, inputs, "x_heard");
        }
        let tables = self.rope_tables();
        for (index, layer) in spec.layers.iter().enumerate() {
            self.layer = Some(index);
            x = self.decoder_layer(layer, x, &tables);
            if let Some((input, embeddings)) = layer.token_input.zip(per_layer) {
                x = self.token_input(index, input, x, embeddings);
            }
            if layer.has_scalar {
                let scalar = self.leaf(&DecoderSpec::layer_path(index, LAYER_SCALAR));
                x = self.scaled_by(x, scalar, "x_scaled");
            }
        }
        self.layer = None;
        x
    }

    /// Rows of a table, for the tokens of the micro-batch.
    fn embed(&mut self, table: &str, scale: f32, padding: Option<u32>, output: &str) -> ValueId {
        let embed = Op::Embed { scale, element: self.element, padding };
        self.emit1(embed, vec![self.leaf(input::IDS), self.leaf(table)], output)
    }

    /// What each layer gets of a token besides the residual stream (T, L·P): its row of a table, and a projection of the
    /// embedded token x (T, C), which is normed for each layer separately.
    fn embeddings_of_layers(&mut self, x: ValueId, per_layer: PerLayerEmbedding) -> ValueId {
        let PerLayerEmbedding { width, norm, .. } = per_layer;
        let (scale, padding) = ((width as f32).sqrt(), self.spec.embedding.padding);
        let rows = self.embed(PER_LAYER_EMBEDDING, scale, padding, "tokens"); // (T, L·P)
        let projected = self.linear_at(x, PER_LAYER_PROJECTION, "tokens.projected"); // (T, L·P)
        let scale = (self.spec.hidden as f32).powf(-0.5);
        let projected = self.scaled(projected, scale, "tokens.scaled");
        let projected = self.norm(projected, NormForm::Rms(norm), PER_LAYER_NORM, "tokens.normed");
        let sum = self.add(projected, rows, 1.0, "tokens.sum");
        self.scaled(sum, std::f32::consts::FRAC_1_SQRT_2, "tokens.of_layers")
    }

    /// Adds to x (T, C) what a layer makes of its part of `embeddings` (T, L·P).
    fn token_input(&mut self, layer: usize, input: TokenInput, x: ValueId, embeddings: ValueId) -> ValueId {
        let TokenInput { width, activation, norm } = input;
        let token = self.columns(embeddings, layer * width, width, 1, "token"); // (T, P)
        let gate = self.linear(x, TOKEN_GATE, "token.gate"); // (T, P)
        let a = self.gated(activation, gate, token, "token.act"); // (T, P)
        let y = self.linear(a, TOKEN_PROJECTION, "token.out"); // (T, C)
        let y = self.stream_norm(y, Some(norm), "token.out_normed");
        self.add(x, y, 1.0, "x_token")
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

    /// Mixer and feed-forward, each added to the residual stream x (T, C).
    fn decoder_layer(&mut self, layer: &LayerSpec, x: ValueId, tables: &[ValueId]) -> ValueId {
        let norms = &layer.norms;
        let n = self.stream_norm(x, norms.before_mixer, "attn.norm"); // (T, C)
        let y = match &layer.mixer {
            Mixer::Attention(attention) => self.attention_mixer(attention, n, tables), // (T, C)
            Mixer::Recurrent(recurrent) => self.recurrent_mixer(recurrent, n),         // (T, C)
            Mixer::Both(both) => self.both_mixers(both, n, tables),                    // (T, C)
        };
        let y = self.stream_norm(y, norms.after_mixer, "attn.out_normed");
        let mid = self.add(x, y, layer.residual_scale, "mid");
        let n =
            if layer.is_parallel { n } else { self.stream_norm(mid, norms.before_feed_forward, "mlp.norm") };
        let y = match &layer.feed_forward {
            FeedForward::Gated(gated) => self.gated_feed_forward(gated, n, "mlp"), // (T, C)
            FeedForward::Experts(experts) => self.experts(experts, n, mid),        // (T, C)
        };
        let y = self.stream_norm(y, norms.after_feed_forward, "mlp.out_normed");
        self.add(mid, y, layer.residual_scale, "x")
    }

    fn both_mixers(&mut self, both: &BothMixers, n: ValueId, tables: &[ValueId]) -> ValueId {
        let ([of_attention, of_recurrent], [scale, recurrent_scale]) = (both.inputs, both.outputs);
        let input = self.times(n, of_recurrent, "recurrent.in");
        let recurrent = self.recurrent_mixer(&both.recurrent, input); // (T, C)
        let recurrent = self.times(recurrent, recurrent_scale, "recurrent.scaled");
        let input = self.times(n, of_attention, "attn.in");
        let attention = self.attention_mixer(&both.attention, input, tables); // (T, C)
        self.add(recurrent, attention, scale, "mixers")
    }

    fn attention_mixer(&mut self, attention: &AttentionSpec, n: ValueId, tables: &[ValueId]) -> ValueId {
        let [q_rows, kv_rows] = attention.rows();
        let (layer, head_dim) = (self.layer.expect("attention belongs to a layer"), attention.head_dim);
        let (path, [q_path, k_path, v_path]) = (attention.paths.fused, attention.paths.qkv);
        let is_doubled = attention.gate == OutputGate::OfQueries;
        let q_part = if is_doubled { ("attn.q_and_gate", 2 * q_rows) } else { ("attn.q", q_rows) };
        let (k_part, v_part) = (("attn.k", kv_rows), ("attn.v", kv_rows));
        let (mut q, projected) = match attention.source {
            KeysAndValues::Projected => {
                let paths = (path, [q_path, k_path, v_path]);
                let [q, k, v] = self.projections(n, attention.is_fused, paths, [q_part, k_part, v_part]);
                (q, Some((k, v)))
            }
            KeysAndValues::OneProjection => {
                let [q, k] = self.projections(n, false, (path, [q_path, k_path]), [q_part, k_part]);
                (q, Some((k, k)))
            }
            KeysAndValues::OfLayer(_) => (self.linear(n, q_path, q_part.0), None),
            KeysAndValues::Latent(latent) => return self.latent_attention(attention, &latent, n, tables),
        };
        let mut gate = None;
        if is_doubled {
            let (both, heads) = (q, attention.heads);
            q = self.columns(both, 0, head_dim, heads, "attn.q"); // (T, H·D)
            gate = Some(self.columns(both, head_dim, head_dim, heads, "attn.gate")); // (T, H·D)
        }
        q = self.head_norm(attention, q, 0, "attn.q_normed"); // (T, H·D)
        q = self.rotated(
            attention.rope.map(|rope| (rope.queries, rope)),
            attention.heads,
            q,
            tables,
            "attn.q_turned",
        );
        if let Some((mut k, mut v)) = projected {
            k = self.head_norm(attention, k, 1, "attn.k_normed"); // (T, Hkv·D)
            k = self.rotated(
                attention.rope.map(|rope| (rope.keys, rope)),
                attention.kv_heads,
                k,
                tables,
                "attn.k_turned",
            );
            if let Some(norm) = attention.v_norm {
                v = self.plain_norm(v, norm, head_dim, "attn.v_normed"); // (T, Hkv·D)
            }
            self.keys_and_values.insert(layer, [k, v]);
        }
        let mut o = self.attention(attention, q, projected.is_some()); // (T, H·D)
        if attention.gate == OutputGate::Projected {
            gate = Some(self.linear(n, OUTPUT_GATE, "attn.gate")); // (T, H·D)
        }
        if let Some(gate) = gate {
            o = self.gated(Activation::Sigmoid, gate, o, "attn.gated"); // (T, H·D)
        }
        self.linear(o, attention.paths.output, "attn.out") // (T, C)
    }

    /// Queries or keys after their norm, if they have one.
    fn head_norm(&mut self, attention: &AttentionSpec, x: ValueId, which: usize, output: &str) -> ValueId {
        match attention.qk_norm {
            Some(QkNorm { norm, has_weights: true, .. }) => {
                self.norm(x, NormForm::Rms(norm), attention.paths.norms[which], output)
            }
            Some(QkNorm { norm, over, .. }) => {
                let channels = match over {
                    NormedChannels::Head => attention.head_dim,
                    NormedChannels::AllHeads => attention.rows()[which],
                };
                self.plain_norm(x, norm, channels, output)
            }
            None => x,
        }
    }

    /// x with its heads rotated by a table.
    pub fn rotated(
        &mut self,
        rotation: Option<(usize, Rotation)>,
        heads: usize,
        x: ValueId,
        tables: &[ValueId],
        output: &str,
    ) -> ValueId {
        let Some((table, Rotation { is_interleaved: interleaved, .. })) = rotation else { return x };
        self.emit1(Op::Rope { heads, inverse: false, interleaved }, vec![x, tables[table]], output)
    }

    /// Attention of q to the keys and values of its layer, or of the layer that it shares them with.
    pub fn attention(&mut self, spec: &AttentionSpec, q: ValueId, has_own_keys: bool) -> ValueId {
        let layer = self.layer.expect("attention belongs to a layer");
        let source = if let KeysAndValues::OfLayer(source) = spec.source { source } else { layer };
        let [k, v] = self.keys_and_values[&source];
        let sinks = spec.has_sinks.then(|| self.leaf(&DecoderSpec::layer_path(layer, SINKS)));
        if !self.cached {
            let inputs = [q, k, v, self.leaf(input::BOUNDARIES)].into_iter().chain(sinks).collect();
            return self.emit(Op::Attention(spec.shape()), inputs, &["attn.o", "attn.lse"])[0];
        }
        let caches = cache_names(source).map(|name| self.leaf(&name)); // (N, Hkv·D) both
        let places = [input::CACHE_TABLE, input::SLOTS, input::POSITIONS].map(|name| self.leaf(name));
        if has_own_keys {
            let new = [k, v].into_iter().chain(places).collect();
            let place = (Phase::Forward, self.place());
            self.graph.emit(&mut self.nodes, Op::CacheRows, new, caches.to_vec(), &[], place);
        }
        let read = [q].into_iter().chain(caches).chain(places).chain(sinks).collect();
        self.emit1(Op::CachedAttention(spec.shape()), read, "attn.o")
    }

    /// A gated feed-forward of n (T, C), whose values are named after `name`.
    pub fn gated_feed_forward(&mut self, gated: &GatedSpec, n: ValueId, name: &str) -> ValueId {
        let (fused, separate, down) = gated.paths();
        let [gate, up, act, out] = ["gate", "up", "act", "out"].map(|part| format!("{name}.{part}"));
        let paths = (fused.as_str(), separate.each_ref().map(String::as_str));
        let parts = [(gate.as_str(), gated.width), (up.as_str(), gated.width)];
        let [gate, up] = self.projections(n, gated.is_fused, paths, parts); // (T, I) both
        let [gate_scale, scale] = gated.scales;
        let gate = self.times(gate, gate_scale, &format!("{name}.gate_scaled"));
        let a = self.gated(gated.activation, gate, up, &act); // (T, I)
        let y = self.linear(a, &down, &out); // (T, C)
        self.times(y, scale, &format!("{name}.out_scaled"))
    }

    /// act(gate)·up.
    pub fn gated(&mut self, activation: Activation, gate: ValueId, up: ValueId, output: &str) -> ValueId {
        self.emit1(Op::GatedAct(activation), vec![gate, up], output)
    }

    /// A norm of the current layer, or the value itself if there is none.
    pub fn stream_norm(&mut self, x: ValueId, norm: Option<NormSpec>, output: &str) -> ValueId {
        match norm {
            Some(NormSpec { path, form }) => self.norm(x, form, &format!("{path}.weight"), output),
            None => x,
        }
    }

    pub fn norm(&mut self, x: ValueId, form: NormForm, weight: &str, output: &str) -> ValueId {
        let weight = match self.layer {
            Some(layer) => self.leaf(&DecoderSpec::layer_path(layer, weight)),
            None => self.leaf(weight),
        };
        let op = match form {
            NormForm::Rms(norm) => Op::RmsNorm { norm, unweighted: None },
            NormForm::Layer { eps } => Op::LayerNorm { eps, bias: false },
        };
        self.emit1(op, vec![x, weight], output)
    }

    /// A norm without a weight, of groups of so many channels.
    pub fn plain_norm(&mut self, x: ValueId, norm: Norm, channels: usize, output: &str) -> ValueId {
        self.emit1(Op::RmsNorm { norm, unweighted: Some(channels) }, vec![x], output)
    }

    /// The normed rows that carry a loss, and h, B and scale of an adapter on the head.
    fn head_input(
        &mut self,
        x: ValueId,
        objective: Option<&Objective>,
    ) -> (ValueId, Option<(ValueId, ValueId, f32)>) {
        let rows = self.emit1(Op::GatherRows, vec![x, self.leaf(input::ROWS)], "head.rows"); // (S, C)
        let mut n = self.norm(rows, self.spec.final_norm, &self.spec.final_norm_tensor(), "head.norm"); // (S, C)
        let temperature = objective.map_or(1.0, Objective::temperature);
        let scale = (f64::from(self.spec.head.scale) / temperature) as f32;
        if scale != 1.0 {
            n = self.scaled(n, scale, "head.scaled"); // (S, C)
        }
        (n, self.head_adapter(n))
    }

    /// Final norm, head and loss over the supervised rows. An objective first needs the log-probability of every row,
    /// which it turns into weights; then the same loss is taken with these weights.
    fn loss(&mut self, x: ValueId, chunk: usize, entry: Entry, request: &Request) {
        let (n, adapter) = self.head_input(x, request.objective.as_ref());
        let training = entry == Entry::MicroStep;
        let weight = self.leaf(input::LOSS_WEIGHT);
        let sum = if training { state::LOSS } else { state::EVAL_LOSS };
        let Some(objective) = &request.objective else {
            let rows = request.row_losses && !training;
            return self.head_loss(
                (n, adapter),
                chunk,
                training,
                weight,
                sum,
                rows.then_some(state::ROW_LOSSES),
            );
        };
        self.head_loss((n, adapter), chunk, false, weight, state::UNREAD_LOSS, Some(state::ROW_LOSSES));
        if entry == Entry::Reference {
            return;
        }
        let inputs = [state::ROW_LOSSES, input::LOSS_WEIGHT, input::SEQUENCE_ROWS, input::SEQUENCES];
        let before = objective.reads_rows().then_some(input::ROWS_BEFORE);
        let inputs = inputs.into_iter().chain(before).map(|name| self.leaf(name)).collect();
        let updates = [sum, state::FIGURES].map(|name| self.leaf(name)).to_vec();
        let names = [format!("{}row_weights", self.prefix)];
        let place = (Phase::Forward, None);
        let op = Op::Objective(objective.clone());
        let weights = self.graph.emit(&mut self.nodes, op, inputs, updates, &names, place)[0];
        if training {
            self.head_loss((n, adapter), chunk, true, weights, state::UNREAD_LOSS, None);
        }
    }

    /// Adds weight·Σ NLL to a sum, perhaps with gradients, perhaps with the NLL of each row.
    fn head_loss(
        &mut self,
        (n, adapter): (ValueId, Option<(ValueId, ValueId, f32)>),
        chunk: usize,
        gradient: bool,
        weight: ValueId,
        sum: &str,
        rows: Option<&str>,
    ) {
        let head = self.leaves.multiplied(self.spec.head_tensor());
        let mut inputs = vec![n, head, self.leaf(input::LABELS), weight];
        let (mut updates, mut outputs) = (vec![self.leaf(sum)], Vec::new());
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
        updates.extend(rows.map(|rows| self.leaf(rows)));
        let op = Op::LmHeadLoss(LossHead {
            chunk,
            gradient,
            lora: adapter.map(|(_, _, scale)| scale),
            train_head: head_gradient.is_some(),
            softcap: self.spec.head.softcap,
            row_losses: rows.is_some(),
        });
        self.graph.emit(&mut self.nodes, op, inputs, updates, &outputs, (Phase::Forward, None));
    }

    /// The logits of the chosen rows, for the host to read.
    fn logits(&mut self, x: ValueId) {
        let (n, adapter) = self.head_input(x, None);
        let mut inputs = vec![n, self.leaves.multiplied(self.spec.head_tensor())];
        if let Some((h, b, _)) = adapter {
            inputs.extend([h, b]);
        }
        let lora = adapter.map(|(_, _, scale)| scale);
        let op = Op::Logits { lora, softcap: self.spec.head.softcap, first_word: 0 };
        let logits = vec![self.leaf(if self.cached { state::DECODED_LOGITS } else { state::LOGITS })];
        self.graph.emit(&mut self.nodes, op, inputs, logits, &[], (Phase::Forward, None));
    }
}
