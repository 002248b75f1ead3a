//! The description of a recurrent mixer: the gated delta rule, a gated short convolution, or Mamba-2.
//!
//! Which linears and other tensors a mixer has, and what generation keeps of a sequence, follow from its description. Its
//! paths are those below the layer.

use super::parts::LayerLinear;
use super::tensors::LinearKind;
use smidgen_ir::{Norm, ScanShape, Shape};

#[derive(Clone, Debug, PartialEq)]
pub enum RecurrentSpec {
    Delta(DeltaSpec),
    ShortConv(ShortConvSpec),
    Mamba(MambaSpec),
}

/// The gated delta rule. Queries, keys and values are convolved; the output is normed head by head and gated.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaSpec {
    pub heads: usize,
    pub key_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Rows that the convolution sees, the own one included.
    pub taps: usize,
    pub projections: DeltaProjections,
    /// Tokens are written with this times a sigmoid.
    pub write: f32,
    pub norm: Norm,
}

/// How the projections of the input are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// Queries, keys and values as one matrix; gate, write and decay each as their own.
    Parts,
    /// Two matrices: queries, keys, values and gate, and write and decay. Each has the rows of a key head together.
    KeyHeads,
    /// Each as its own.
    Separate,
}

/// Products around a convolution: of two parts of a projection before it, and with the third behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvSpec {
    pub taps: usize,
    /// Whether the convolution and both linears have biases.
    pub bias: bool,
}

/// Mamba-2: values, keys and queries are convolved parts of one projection, which also has a gate and the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaSpec {
    /// Path of the module below the layer.
    pub module: &'static str,
    pub heads: usize,
    pub head_dim: usize,
    /// Heads of queries and keys, and groups of the norm.
    pub groups: usize,
    pub state: usize,
    pub taps: usize,
    pub conv_bias: bool,
    /// Whether the projections of the input and of the output have biases.
    pub proj_biases: [bool; 2],
    /// Gate, values, keys, queries and steps of a projected input are multiplied by these.
    pub scales: [f32; 5],
    /// The range of steps.
    pub steps: [f32; 2],
    /// The norm of the output; `None` means that it is gated only.
    pub norm: Option<MambaNorm>,
    /// Whether PEFT adapts the projection of the output.
    pub adapts_output: bool,
}

/// The norm of Mamba-2's output, group by group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaNorm {
    pub norm: Norm,
    /// Whether the output is gated after the norm, not before it.
    pub before_gate: bool,
}

/// The convolution of a mixer: its path, channels, taps, and whether it has a bias.
struct Convolution {
    path: String,
    channels: usize,
    taps: usize,
    bias: bool,
}

/// Tokens between the states that a backward pass stores.
const CHUNK: usize = 32;

pub const DELTA: &str = "linear_attn";
pub const SHORT_CONV: &str = "conv";

/// The paths of a delta rule's projections, by how they are stored: of queries, keys and values, of the gate, of write and
/// of decay, and of the output.
pub struct DeltaPaths {
    pub qkv: &'static [&'static str],
    pub gate: &'static str,
    pub write: &'static str,
    pub decay: &'static str,
    pub norm: &'static str,
    pub output: &'static str,
}

impl DeltaProjections {
    pub fn paths(self) -> DeltaPaths {
        match self {
            DeltaProjections::Parts => DeltaPaths {
                qkv: &["linear_attn.in_proj_qkv"],
                gate: "linear_attn.in_proj_z",
                write: "linear_attn.in_proj_b",
                decay: "linear_attn.in_proj_a",
                norm: "linear_attn.norm.weight",
                output: "linear_attn.out_proj",
            },
            DeltaProjections::KeyHeads => DeltaPaths {
                qkv: &["linear_attn.in_proj_qkvz"],
                gate: "linear_attn.in_proj_qkvz",
                write: "linear_attn.in_proj_ba",
                decay: "linear_attn.in_proj_ba",
                norm: "linear_attn.norm.weight",
                output: "linear_attn.out_proj",
            },
            DeltaProjections::Separate => DeltaPaths {
                qkv: &["linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj"],
                gate: "linear_attn.g_proj",
                write: "linear_attn.b_proj",
                decay: "linear_attn.a_proj",
                norm: "linear_attn.o_norm.weight",
                output: "linear_attn.o_proj",
            },
        }
    }
}

impl DeltaSpec {
    /// Channels of queries or keys, and of values.
    pub fn channels(&self) -> [usize; 2] {
        [self.key_heads * self.key_dim, self.heads * self.value_dim]
    }

    /// Queries and keys are normed to lengths of 1, by a norm that makes the mean of squares 1; queries are also divided by
    /// the root of their size.
    pub fn scan(&self) -> ScanShape {
        let size = self.key_dim as f32;
        ScanShape {
            heads: self.heads,
            key_heads: self.key_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            delta: true,
            query_scale: 1.0 / size,
            key_scale: size.powf(-0.5),
            chunk: CHUNK,
        }
    }

    fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        let ([keys, values], paths) = (self.channels(), self.projections.paths());
        let input = |path: &str, n| LayerLinear::dense(path, n, hidden, false);
        let of_input = match self.projections {
            DeltaProjections::Parts => vec![
                input(paths.qkv[0], 2 * keys + values),
                input(paths.gate, values),
                input(paths.write, self.heads),
                input(paths.decay, self.heads),
            ],
            DeltaProjections::KeyHeads => {
                vec![input(paths.qkv[0], 2 * (keys + values)), input(paths.write, 2 * self.heads)]
            }
            DeltaProjections::Separate => vec![
                input(paths.qkv[0], keys),
                input(paths.qkv[1], keys),
                input(paths.qkv[2], values),
                input(paths.gate, values),
                input(paths.write, self.heads),
                input(paths.decay, self.heads),
            ],
        };
        [of_input, vec![LayerLinear::dense(paths.output, hidden, values, false)]].concat()
    }
}

impl MambaSpec {
    /// The path of a part below the layer.
    pub fn path(&self, part: &str) -> String {
        format!("{}.{part}", self.module)
    }

    /// Channels of values, and of queries or keys.
    pub fn channels(&self) -> [usize; 2] {
        [self.heads * self.head_dim, self.groups * self.state]
    }

    pub fn scan(&self) -> ScanShape {
        ScanShape {
            heads: self.heads,
            key_heads: self.groups,
            key_dim: self.state,
            value_dim: self.head_dim,
            delta: false,
            query_scale: 1.0,
            key_scale: 1.0,
            chunk: CHUNK,
        }
    }
}

impl RecurrentSpec {
    pub fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        match self {
            RecurrentSpec::Delta(delta) => delta.linears(hidden),
            RecurrentSpec::ShortConv(conv) => vec![
                LayerLinear::dense("conv.in_proj", 3 * hidden, hidden, conv.bias),
                LayerLinear::dense("conv.out_proj", hidden, hidden, conv.bias),
            ],
            RecurrentSpec::Mamba(mamba) => {
                let ([values, keys], biases) = (mamba.channels(), mamba.proj_biases);
                let n = 2 * values + 2 * keys + mamba.heads;
                let output = LayerLinear::dense(mamba.path("out_proj"), hidden, values, biases[1]);
                let kind = if mamba.adapts_output { output.kind } else { LinearKind::Unadapted };
                vec![
                    LayerLinear::dense(mamba.path("in_proj"), n, hidden, biases[0]),
                    LayerLinear { kind, ..output },
                ]
            }
        }
    }

    fn convolution(&self, hidden: usize) -> Convolution {
        match self {
            RecurrentSpec::Delta(delta) => {
                let [keys, values] = delta.channels();
                Convolution {
                    path: "linear_attn.conv1d".into(),
                    channels: 2 * keys + values,
                    taps: delta.taps,
                    bias: false,
                }
            }
            RecurrentSpec::ShortConv(conv) => {
                let path = "conv.conv".into();
                Convolution { path, channels: hidden, taps: conv.taps, bias: conv.bias }
            }
            RecurrentSpec::Mamba(mamba) => {
                let [values, keys] = mamba.channels();
                let (path, channels) = (mamba.path("conv1d"), values + 2 * keys);
                Convolution { path, channels, taps: mamba.taps, bias: mamba.conv_bias }
            }
        }
    }

    /// Tensors that are no linears, with their shapes.
    pub fn tensors(&self, hidden: usize) -> Vec<(String, Shape)> {
        let Convolution { path, channels, taps, bias } = self.convolution(hidden);
        let mut tensors = vec![(format!("{path}.weight"), Shape::matrix(channels, taps))];
        tensors.extend(bias.then(|| (format!("{path}.bias"), Shape::vector(channels))));
        let mut vector = |name: &str, size: usize| tensors.push((name.to_string(), Shape::vector(size)));
        match self {
            RecurrentSpec::Delta(delta) => {
                vector("linear_attn.A_log", delta.heads);
                vector("linear_attn.dt_bias", delta.heads);
                vector(delta.projections.paths().norm, delta.value_dim);
            }
            RecurrentSpec::ShortConv(_) => {}
            RecurrentSpec::Mamba(mamba) => {
                for name in ["A_log", "dt_bias", "D"] {
                    vector(&mamba.path(name), mamba.heads);
                }
                if mamba.norm.is_some() {
                    vector(&mamba.path("norm.weight"), mamba.channels()[0]);
                }
            }
        }
        tensors
    }

    /// What generation keeps of a sequence: by name, f32 numbers. The parts of a convolution have windows of their own.
    pub fn states(&self, hidden: usize) -> Vec<(&'static str, usize)> {
        let parts = match self {
            RecurrentSpec::Delta(delta) => {
                let ([keys, values], scan) = (delta.channels(), delta.scan());
                vec![("q", keys), ("k", keys), ("v", values), ("state", scan.heads * scan.state())]
            }
            RecurrentSpec::ShortConv(_) => vec![("x", hidden)],
            RecurrentSpec::Mamba(mamba) => {
                let ([values, keys], scan) = (mamba.channels(), mamba.scan());
                vec![("q", keys), ("k", keys), ("v", values), ("state", scan.heads * scan.state())]
            }
        };
        let lags = self.convolution(hidden).taps - 1;
        let floats = |(name, channels)| (name, if name == "state" { channels } else { lags * channels });
        parts.into_iter().map(floats).collect()
    }
}
