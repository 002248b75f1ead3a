//! Recurrent mixers of the forward graph: the gated delta rule, a gated short convolution, Mamba-2.
//!
//! Each part of a projection is convolved with its own rows of the convolution's weight, so no activation is split or
//! joined. In generation, convolutions and scans continue from what the caches hold of the slot of each token.

use crate::forward::Builder;
use crate::leaves::state_name;
use crate::model::layer::NormForm;
use crate::model::recurrent::{
    DELTA, DeltaProjections, DeltaSpec, MambaNorm, MambaSpec, RecurrentSpec, SHORT_CONV, ShortConvSpec,
};
use crate::model::spec::DecoderSpec;
use crate::names::input;
use smidgen_ir::{Activation, DecayShape, Norm, Op, Phase, PlainActivation, ScanShape, ValueId};

/// The small number that keeps the norms of queries and keys from dividing by zero; of a sum of squares, not of a mean.
const LENGTH_EPS: f32 = 1e-6;

/// A part of what is convolved: its name, and its rows of the weight.
struct Convolved<'a> {
    path: &'a str,
    name: &'static str,
    first: usize,
    rows: usize,
}

impl Builder<'_> {
    /// The output (T, C) of a mixer for the input n (T, C).
    pub fn recurrent_mixer(&mut self, mixer: &RecurrentSpec, n: ValueId) -> ValueId {
        match mixer {
            RecurrentSpec::Delta(delta) => self.delta_mixer(delta, n),
            RecurrentSpec::ShortConv(conv) => self.short_conv(conv, n),
            RecurrentSpec::Mamba(mamba) => self.mamba(mamba, n),
        }
    }

    fn layer_leaf(&self, name: &str) -> ValueId {
        self.leaf(&DecoderSpec::layer_path(self.layer.expect("a mixer belongs to a layer"), name))
    }

    fn delta_mixer(&mut self, delta: &DeltaSpec, n: ValueId) -> ValueId {
        let ([keys, values], paths) = (delta.channels(), delta.projections.paths());
        let parts = [("delta.q", keys), ("delta.k", keys), ("delta.v", values)];
        let (qkv, z, b, a) = match delta.projections {
            DeltaProjections::Parts | DeltaProjections::Separate => {
                let qkv = match *paths.qkv {
                    [q, k, v] => self.projections(n, false, ("", [q, k, v]), parts),
                    _ => self.projections(n, true, (paths.qkv[0], [""; 3]), parts),
                };
                let z = self.linear(n, paths.gate, "delta.z"); // (T, H·V)
                let b = self.linear(n, paths.write, "delta.b"); // (T, H)
                (qkv, z, b, self.linear(n, paths.decay, "delta.a"))
            }
            DeltaProjections::KeyHeads => self.parts_of_key_heads(delta, n),
        };
        let mut first = 0;
        let [q, k, v] = std::array::from_fn(|index| {
            let (name, rows) =
                ([("q", keys), ("k", keys), ("v", values)] as [(&'static str, usize); 3])[index];
            let convolved = Convolved { path: "linear_attn.conv1d", name, first, rows };
            first += rows;
            self.convolved(convolved, qkv[index], false, Some(PlainActivation::Silu), DELTA)
        });
        let length = Norm { eps: LENGTH_EPS / delta.key_dim as f32, plus_one: false };
        let q = self.plain_norm(q, length, delta.key_dim, "delta.q_normed"); // (T, Hk·K)
        let k = self.plain_norm(k, length, delta.key_dim, "delta.k_normed"); // (T, Hk·K)
        let decay = DecayShape { least: 0.0, most: f32::INFINITY, write: Some(delta.write) };
        let gates = self.decay(decay, a, Some(b), DELTA);
        let o = self.scan(delta.scan(), [q, k, v], gates); // (T, H·V)
        let normed = self.norm(o, NormForm::Rms(delta.norm), paths.norm, "delta.normed");
        let gated = self.gated(Activation::Silu, z, normed, "delta.gated");
        self.linear(gated, paths.output, "delta.out")
    }

    /// q, k and v, then gate, write and decay, of matrices with the rows of a key head together.
    fn parts_of_key_heads(
        &mut self,
        delta: &DeltaSpec,
        n: ValueId,
    ) -> ([ValueId; 3], ValueId, ValueId, ValueId) {
        let (groups, group) = (delta.key_heads, delta.heads / delta.key_heads);
        let (paths, values) = (delta.projections.paths(), group * delta.value_dim);
        let qkvz = self.linear(n, paths.qkv[0], "delta.qkvz"); // (T, 2·Hk·K + 2·H·V)
        let ba = self.linear(n, paths.write, "delta.ba"); // (T, 2·H)
        let mut first = 0;
        let mut slice = |builder: &mut Self, of: ValueId, columns: usize, output: &str| {
            first += columns;
            builder.columns(of, first - columns, columns, groups, output)
        };
        let q = slice(self, qkvz, delta.key_dim, "delta.q");
        let k = slice(self, qkvz, delta.key_dim, "delta.k");
        let v = slice(self, qkvz, values, "delta.v");
        let z = slice(self, qkvz, values, "delta.z");
        let b = self.columns(ba, 0, group, groups, "delta.b");
        ([q, k, v], z, b, self.columns(ba, group, group, groups, "delta.a"))
    }

    fn short_conv(&mut self, conv: &ShortConvSpec, n: ValueId) -> ValueId {
        let hidden = self.spec.hidden;
        let parts = [("conv.b", hidden), ("conv.c", hidden), ("conv.x", hidden)];
        let [b, c, x] = self.projections(n, true, ("conv.in_proj", [""; 3]), parts); // (T, C) all
        let x = self.gated(Activation::Identity, b, x, "conv.bx");
        let convolved = Convolved { path: "conv.conv", name: "x", first: 0, rows: hidden };
        let x = self.convolved(convolved, x, conv.bias, None, SHORT_CONV);
        let y = self.gated(Activation::Identity, c, x, "conv.y");
        self.linear(y, "conv.out_proj", "conv.out")
    }

    fn mamba(&mut self, mamba: &MambaSpec, n: ValueId) -> ValueId {
        let [values, keys] = mamba.channels();
        let parts = [
            ("mamba.gate", values),
            ("mamba.v", values),
            ("mamba.k", keys),
            ("mamba.q", keys),
            ("mamba.dt", mamba.heads),
        ];
        let projected = self.projections(n, true, (&mamba.path("in_proj"), [""; 5]), parts);
        let scaled: [ValueId; 5] = std::array::from_fn(|part| {
            self.times(projected[part], mamba.scales[part], &format!("{}_scaled", parts[part].0))
        });
        let ([gate, v, k, q, dt], path) = (scaled, mamba.path("conv1d"));
        let mut first = 0;
        let [v, k, q] = [("v", v, values), ("k", k, keys), ("q", q, keys)].map(|(name, x, rows)| {
            let convolved = Convolved { path: &path, name, first, rows };
            first += rows;
            self.convolved(convolved, x, mamba.conv_bias, Some(PlainActivation::Silu), mamba.module)
        });
        let [least, most] = mamba.steps;
        let gates = self.decay(DecayShape { least, most, write: None }, dt, None, mamba.module);
        let o = self.scan(mamba.scan(), [q, k, v], gates); // (T, H·P)
        let skip = self.layer_leaf(&mamba.path("D"));
        let skipped = self.scaled_by(v, skip, "mamba.skipped");
        let mut o = self.add(o, skipped, 1.0, "mamba.o");
        if let Some(MambaNorm { norm, before_gate: true }) = mamba.norm {
            o = self.grouped_norm(mamba, norm, o);
        }
        o = self.gated(Activation::Silu, gate, o, "mamba.gated");
        if let Some(MambaNorm { norm, before_gate: false }) = mamba.norm {
            o = self.grouped_norm(mamba, norm, o);
        }
        self.linear(o, &mamba.path("out_proj"), "mamba.out")
    }

    /// x (T, H·P) normed group by group.
    fn grouped_norm(&mut self, mamba: &MambaSpec, norm: Norm, x: ValueId) -> ValueId {
        let weight = mamba.path("norm.weight");
        if mamba.groups == 1 {
            return self.norm(x, NormForm::Rms(norm), &weight, "mamba.normed");
        }
        let normed = self.plain_norm(x, norm, mamba.channels()[0] / mamba.groups, "mamba.grouped");
        let weight = self.layer_leaf(&weight);
        self.scaled_by(normed, weight, "mamba.normed")
    }

    /// x (T, rows) after its part of a convolution, and after an activation.
    fn convolved(
        &mut self,
        part: Convolved<'_>,
        x: ValueId,
        bias: bool,
        act: Option<PlainActivation>,
        of: &str,
    ) -> ValueId {
        let Convolved { path, name, first, rows } = part;
        let mut operands = vec![self.layer_leaf(&format!("{path}.weight"))];
        if bias {
            operands.push(self.layer_leaf(&format!("{path}.bias")));
        }
        for operand in &mut operands {
            *operand = self.leaves.slice(self.graph, *operand, first, rows);
        }
        let output = format!("{of}.{name}_convolved");
        let y = if self.cached {
            let inputs = [vec![x], operands, self.slot_places()].concat();
            self.emit_cached(Op::CachedConv { bias }, inputs, name, &output)
        } else {
            let inputs = [vec![x, self.leaf(input::BOUNDARIES)], operands].concat();
            self.causal_conv(inputs, bias, &output)
        };
        match act {
            Some(kind) => self.emit1(Op::Act(kind), vec![y], &format!("{of}.{name}_act")),
            None => y,
        }
    }

    /// How much of its state each head keeps, and how strongly a token is written.
    fn decay(&mut self, shape: DecayShape, a: ValueId, b: Option<ValueId>, of: &str) -> [ValueId; 2] {
        let vectors = ["A_log", "dt_bias"].map(|name| self.layer_leaf(&format!("{of}.{name}")));
        let inputs = [a].into_iter().chain(vectors).chain(b).collect();
        let gates = self.emit(Op::Decay(shape), inputs, &[&format!("{of}.g"), &format!("{of}.beta")]);
        [gates[0], gates[1]]
    }

    fn scan(&mut self, shape: ScanShape, qkv: [ValueId; 3], gates: [ValueId; 2]) -> ValueId {
        let mut inputs = [qkv.as_slice(), &gates].concat();
        if self.cached {
            inputs.extend(self.slot_places());
            return self.emit_cached(Op::CachedScan(shape), inputs, "state", "scan.o");
        }
        inputs.push(self.leaf(input::BOUNDARIES));
        self.emit1(Op::Scan(shape), inputs, "scan.o")
    }

    fn slot_places(&self) -> Vec<ValueId> {
        vec![self.leaf(input::SLOTS), self.leaf(input::POSITIONS)]
    }

    /// An operation that continues from a state of the layer and replaces it.
    fn emit_cached(&mut self, op: Op, inputs: Vec<ValueId>, state: &str, output: &str) -> ValueId {
        let layer = self.layer.expect("a mixer belongs to a layer");
        let updates = vec![self.leaf(&state_name(layer, state))];
        let name = format!("{}layers.{layer}.{output}", self.prefix);
        let place = (Phase::Forward, self.place());
        self.graph.emit(&mut self.nodes, op, inputs, updates, &[name], place)[0]
    }
}
