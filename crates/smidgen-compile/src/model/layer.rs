//! The description of one layer: a mixer, a feed-forward, the norms around them, and how their outputs are added.
//!
//! Everything about a layer is data, and two layers of a model may differ in everything: shapes, norms, windows. Which
//! linears and norms a layer has, with their paths below the layer, follows from its description.

use super::experts::ExpertsSpec;
pub use super::parts::{GatedNames, GatedSpec, LayerLinear, MLP, NormForm, NormSpec};
use super::recurrent::RecurrentSpec;
use smidgen_ir::{Activation, AttentionShape, Norm, Shape};

#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
    pub norms: LayerNorms,
    /// What the mixer and the feed-forward add to the residual stream is multiplied by this.
    pub residual_scale: f32,
    /// Whether the feed-forward reads the same norm as the mixer, and both are added to the residual stream together.
    pub is_parallel: bool,
    /// What the layer adds from its part of the embeddings that each layer has of a token.
    pub token_input: Option<TokenInput>,
    /// Whether the output of the layer is multiplied by a stored number.
    pub has_scalar: bool,
}

/// act(gate of the residual stream)·(the layer's embedding of the token), projected to the residual stream and normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenInput {
    /// Channels of a layer's embedding.
    pub width: usize,
    pub activation: Activation,
    pub norm: NormSpec,
}

/// Moves information between tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    Attention(AttentionSpec),
    Recurrent(RecurrentSpec),
    Both(Box<BothMixers>),
}

/// An attention and a recurrent mixer of the same input, whose outputs are added.
#[derive(Clone, Debug, PartialEq)]
pub struct BothMixers {
    pub attention: AttentionSpec,
    pub recurrent: RecurrentSpec,
    /// Their inputs are multiplied by these.
    pub inputs: [f32; 2],
    /// Their outputs are multiplied by these.
    pub outputs: [f32; 2],
}

/// Works on each token separately.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    Gated(GatedSpec),
    /// Each token uses some of many gated feed-forwards.
    Experts(Box<ExpertsSpec>),
}

/// Norms of the residual stream, each before or after a block of the layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerNorms {
    pub before_mixer: Option<NormSpec>,
    pub after_mixer: Option<NormSpec>,
    pub before_feed_forward: Option<NormSpec>,
    pub after_feed_forward: Option<NormSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Number of keys that a query sees, its own included; `None` means all keys up to its own.
    pub window: Option<usize>,
    /// `None` means that queries and keys are not rotated.
    pub rope: Option<Rotation>,
    /// Scores are multiplied by this before the softmax.
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Whether q, k and v are one linear.
    pub is_fused: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether o has a bias.
    pub output_bias: bool,
    /// The norms of queries and keys before they are rotated.
    pub qk_norm: Option<QkNorm>,
    /// The norm of values, head by head and without a weight.
    pub v_norm: Option<Norm>,
    pub source: KeysAndValues,
    pub gate: OutputGate,
    /// Whether each softmax has one more score, a stored number of its head that belongs to no key.
    pub has_sinks: bool,
    pub paths: AttentionPaths,
}

/// The paths of an attention below its layer: q, k and v as one linear, each of them, the output, and the norms of queries
/// and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPaths {
    pub fused: &'static str,
    pub qkv: [&'static str; 3],
    pub output: &'static str,
    pub norms: [&'static str; 2],
}

impl AttentionPaths {
    pub const USUAL: AttentionPaths = AttentionPaths {
        fused: "self_attn.qkv_proj",
        qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        output: "self_attn.o_proj",
        norms: ["self_attn.q_norm.weight", "self_attn.k_norm.weight"],
    };
    pub const LFM2: AttentionPaths = AttentionPaths {
        output: "self_attn.out_proj",
        norms: ["self_attn.q_layernorm.weight", "self_attn.k_layernorm.weight"],
        ..AttentionPaths::USUAL
    };
}

/// Where an attention has the gate from whose sigmoid its output is multiplied by, channel by channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGate {
    None,
    /// A projection of its own.
    Projected,
    /// The projection of queries, which has for each head its queries and then its gate.
    OfQueries,
}

/// Where an attention has its keys and values from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeysAndValues {
    Projected,
    /// Values are the projected keys, before these are normed and rotated.
    OneProjection,
    /// Those of an earlier layer, normed and rotated.
    OfLayer(usize),
    /// Projected from a few channels, the latent, which the projection of the input makes.
    Latent(LatentSpec),
}

/// Latent attention: keys and values of all heads are projected from a normed latent of few channels, and queries may be
/// too. Channels of a head that are rotated are apart from the others: those of keys are projected from the input, once
/// for all heads. Heads are as large as the larger of queries and values; the other ones end with zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentSpec {
    /// Channels of the latent of queries; `None` means that queries are projected from the input.
    pub query_rank: Option<usize>,
    /// Channels of the latent of keys and values.
    pub rank: usize,
    /// Channels of a query or key that are not rotated, and of those that are.
    pub plain: usize,
    pub rotated: usize,
    /// Channels of a value.
    pub value: usize,
    /// The norm of the latents.
    pub norm: Norm,
    /// The rotary embedding, of two channels without a frequency, that scales queries by their position.
    pub query_scale: Option<usize>,
}

/// Rotary embeddings by their index in the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    pub queries: usize,
    pub keys: usize,
    /// Whether neighbouring channels are rotated together, not channels of the two halves of a head.
    pub is_interleaved: bool,
}

impl Rotation {
    /// Queries and keys rotated alike, in halves.
    pub fn by(index: usize) -> Rotation {
        Rotation { queries: index, keys: index, is_interleaved: false }
    }
}

/// The norms of queries and of keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    pub norm: Norm,
    /// Channels that are normed together: one head, or all heads.
    pub over: NormedChannels,
    pub has_weights: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormedChannels {
    Head,
    AllHeads,
}

/// The path of projections that a checkpoint stores as one, and the paths of the separate projections in their order.
pub const QKV: (&str, [&str; 3]) =
    ("self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
pub const ATTENTION_OUTPUT: &str = "self_attn.o_proj";
pub const SINKS: &str = "self_attn.sinks";
/// The projection whose sigmoid multiplies the output of attention.
pub const OUTPUT_GATE: &str = "self_attn.gate_proj";
pub const TOKEN_GATE: &str = "per_layer_input_gate";
pub const TOKEN_PROJECTION: &str = "per_layer_projection";
pub const LAYER_SCALAR: &str = "layer_scalar";
/// The projection to the latent of queries, its norm, and the projection from it.
pub const QUERY_LATENT: [&str; 3] =
    ["self_attn.q_a_proj", "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj"];
/// The projection to the latent of keys and values and to the rotated channels of keys, the norm of the latent, and the
/// projection from it.
pub const LATENT: [&str; 3] =
    ["self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm.weight", "self_attn.kv_b_proj"];

impl LayerSpec {
    /// A layer as Llama's: a norm before each block, whole heads rotated by the first rotary embedding, no window, no
    /// biases. Families change what differs.
    pub fn like_llama(heads: usize, kv_heads: usize, head_dim: usize, width: usize, eps: f32) -> LayerSpec {
        let form = NormForm::Rms(Norm { eps, plus_one: false });
        LayerSpec {
            mixer: Mixer::Attention(AttentionSpec {
                heads,
                kv_heads,
                head_dim,
                window: None,
                rope: Some(Rotation::by(0)),
                scale: (head_dim as f32).powf(-0.5),
                softcap: None,
                is_fused: false,
                qkv_bias: false,
                output_bias: false,
                qk_norm: None,
                v_norm: None,
                source: KeysAndValues::Projected,
                gate: OutputGate::None,
                has_sinks: false,
                paths: AttentionPaths::USUAL,
            }),
            feed_forward: FeedForward::Gated(GatedSpec {
                module: MLP,
                names: GatedNames::USUAL,
                width,
                activation: Activation::Silu,
                is_fused: false,
                bias: false,
                scales: [1.0; 2],
            }),
            norms: LayerNorms::before(form),
            residual_scale: 1.0,
            is_parallel: false,
            token_input: None,
            has_scalar: false,
        }
    }

    /// The linears in the order of the forward pass, for a residual stream of `hidden` channels.
    pub fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        let of_attention = self.attention().map(|attention| attention.linears(hidden));
        let of_recurrent = self.recurrent().map(|recurrent| recurrent.linears(hidden));
        let of_feed_forward = match &self.feed_forward {
            FeedForward::Gated(gated) => gated.linears(hidden),
            FeedForward::Experts(experts) => experts.linears(hidden),
        };
        let of_mixers = of_attention.into_iter().chain(of_recurrent).flatten();
        let mut linears: Vec<LayerLinear> = of_mixers.chain(of_feed_forward).collect();
        if let Some(TokenInput { width, .. }) = self.token_input {
            linears.push(LayerLinear::dense(TOKEN_GATE, width, hidden, false));
            linears.push(LayerLinear::dense(TOKEN_PROJECTION, hidden, width, false));
        }
        linears
    }

    /// Tensors that are no linears, with their shapes, for a residual stream of `hidden` channels.
    pub fn tensors(&self, hidden: usize) -> Vec<(String, Shape)> {
        let LayerNorms { before_mixer, after_mixer, before_feed_forward, after_feed_forward } = self.norms;
        let of_input = self.token_input.map(|input| input.norm);
        let of_stream = [before_mixer, after_mixer, before_feed_forward, after_feed_forward, of_input];
        let vector = |(name, size): (String, usize)| (name, Shape::vector(size));
        let of_stream = of_stream.into_iter().flatten();
        let mut tensors: Vec<(String, Shape)> =
            of_stream.map(|norm| vector((format!("{}.weight", norm.path), hidden))).collect();
        if let Some(attention) = self.attention() {
            tensors.extend(attention.norm_tensors().into_iter().map(vector));
            tensors.extend(attention.has_sinks.then(|| vector((SINKS.to_string(), attention.heads))));
        }
        tensors.extend(self.recurrent().into_iter().flat_map(|recurrent| recurrent.tensors(hidden)));
        tensors.extend(self.experts().into_iter().flat_map(|experts| experts.vectors(hidden)).map(vector));
        tensors.extend(self.has_scalar.then(|| vector((LAYER_SCALAR.to_string(), 1))));
        tensors
    }

    /// The attention of the layer, if it has one.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Both(both) => Some(&both.attention),
            Mixer::Recurrent(_) => None,
        }
    }

    /// The recurrent mixer of the layer, if it has one.
    pub fn recurrent(&self) -> Option<&RecurrentSpec> {
        match &self.mixer {
            Mixer::Recurrent(recurrent) => Some(recurrent),
            Mixer::Both(both) => Some(&both.recurrent),
            Mixer::Attention(_) => None,
        }
    }

    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        match &mut self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::Both(both) => Some(&mut both.attention),
            Mixer::Recurrent(_) => None,
        }
    }

    /// The feed-forward that every token uses: that of the layer, or the one beside its experts.
    pub fn gated_mut(&mut self) -> Option<&mut GatedSpec> {
        match &mut self.feed_forward {
            FeedForward::Gated(gated) => Some(gated),
            FeedForward::Experts(experts) => experts.beside.as_mut().map(|beside| &mut beside.gated),
        }
    }

    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match &self.feed_forward {
            FeedForward::Gated(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }
}

impl LayerNorms {
    /// The same norms of another form.
    pub fn with_form(self, form: NormForm) -> LayerNorms {
        let formed = |norm: Option<NormSpec>| norm.map(|norm| NormSpec { form, ..norm });
        LayerNorms {
            before_mixer: formed(self.before_mixer),
            after_mixer: formed(self.after_mixer),
            before_feed_forward: formed(self.before_feed_forward),
            after_feed_forward: formed(self.after_feed_forward),
        }
    }

    /// Norms before both blocks, as Llama's.
    pub fn before(form: NormForm) -> LayerNorms {
        let norm = |path| Some(NormSpec { path, form });
        LayerNorms {
            before_mixer: norm("input_layernorm"),
            before_feed_forward: norm("post_attention_layernorm"),
            ..LayerNorms::default()
        }
    }

    /// Norms before and after both blocks.
    pub fn around(form: NormForm) -> LayerNorms {
        let norm = |path| Some(NormSpec { path, form });
        LayerNorms {
            before_mixer: norm("input_layernorm"),
            after_mixer: norm("post_attention_layernorm"),
            before_feed_forward: norm("pre_feedforward_layernorm"),
            after_feed_forward: norm("post_feedforward_layernorm"),
        }
    }
}

impl AttentionSpec {
    /// Rows of the query projection, and of the key and value projections.
    pub fn rows(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.kv_heads * self.head_dim]
    }

    pub fn shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            sinks: self.has_sinks,
        }
    }

    fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        if let KeysAndValues::Latent(latent) = self.source {
            return latent.linears(self, hidden);
        }
        let [q, kv] = self.rows();
        let input = |path: &str, n| LayerLinear::dense(path, n, hidden, self.qkv_bias);
        let of_queries = if self.gate == OutputGate::OfQueries { 2 * q } else { q };
        let separate = self.paths.qkv.into_iter().zip([of_queries, kv, kv]).map(|(path, n)| input(path, n));
        let mut linears = match self.source {
            KeysAndValues::Projected if self.is_fused => vec![input(self.paths.fused, q + 2 * kv)],
            KeysAndValues::Projected => separate.collect(),
            KeysAndValues::OneProjection => separate.take(2).collect(),
            KeysAndValues::OfLayer(_) => separate.take(1).collect(),
            KeysAndValues::Latent(_) => unreachable!("latent attention has its own projections"),
        };
        if self.gate == OutputGate::Projected {
            linears.push(LayerLinear::dense(OUTPUT_GATE, q, hidden, false));
        }
        linears.push(LayerLinear::dense(self.paths.output, hidden, q, self.output_bias));
        linears
    }

    /// Paths of modules that published layers have, and that are not read: projections and norms of keys and values that
    /// come from another layer.
    pub fn unread(&self) -> &'static [&'static str] {
        match self.source {
            KeysAndValues::OfLayer(_) => {
                &["self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm"]
            }
            KeysAndValues::Projected | KeysAndValues::OneProjection | KeysAndValues::Latent(_) => &[],
        }
    }

    fn norm_tensors(&self) -> Vec<(String, usize)> {
        if let KeysAndValues::Latent(latent) = self.source {
            let of_queries = latent.query_rank.map(|rank| (QUERY_LATENT[1].to_string(), rank));
            return of_queries.into_iter().chain([(LATENT[1].to_string(), latent.rank)]).collect();
        }
        let Some(QkNorm { over, has_weights: true, .. }) = self.qk_norm else { return vec![] };
        let sizes = match over {
            NormedChannels::Head => [self.head_dim; 2],
            NormedChannels::AllHeads => self.rows(),
        };
        let own = if let KeysAndValues::OfLayer(_) = self.source { 1 } else { 2 };
        self.paths.norms.into_iter().map(String::from).zip(sizes).take(own).collect()
    }
}

impl LatentSpec {
    /// Channels of a query or a key.
    pub fn query(&self) -> usize {
        self.plain + self.rotated
    }

    fn linears(&self, attention: &AttentionSpec, hidden: usize) -> Vec<LayerLinear> {
        let (heads, bias) = (attention.heads, attention.qkv_bias);
        let linear = |path: &str, n, k, bias| LayerLinear::dense(path, n, k, bias);
        let queries = heads * self.query();
        let mut linears = match self.query_rank {
            None => vec![linear(attention.paths.qkv[0], queries, hidden, false)],
            Some(rank) => {
                let [to, _, from] = QUERY_LATENT;
                vec![linear(to, rank, hidden, bias), linear(from, queries, rank, false)]
            }
        };
        let [to, _, from] = LATENT;
        linears.extend([
            linear(to, self.rank + self.rotated, hidden, bias),
            linear(from, heads * (self.plain + self.value), self.rank, false),
            linear(attention.paths.output, hidden, heads * self.value, attention.output_bias),
        ]);
        linears
    }
}
