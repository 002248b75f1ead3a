//! The graph of routed experts: router, rows sorted by expert, one matmul for all experts, and their sum for each token.
//!
//! An adapter on experts has a pair A and B for each of them. A of all experts is one leaf, B another, with the rows of an
//! expert in the order of its matrix, so that gate and up share A, and each uses its rows of B.

use crate::forward::Builder;
use crate::model::experts::{ExpertsSpec, RouterNorm};
use crate::model::layer::NormForm;
use crate::model::spec::DecoderSpec;
use smidgen_ir::{Activation, ExpertRows, Op, ValueId};

impl Builder<'_> {
    /// What the experts add to the residual stream `mid` (T, C), whose norm is `n` (T, C).
    pub fn experts(&mut self, spec: &ExpertsSpec, n: ValueId, mid: ValueId) -> ValueId {
        let dense = spec.beside.as_ref().map(|beside| {
            let y = self.gated_feed_forward(&beside.gated, n, "mlp");
            self.stream_norm(y, Some(beside.after_gated), "mlp.normed")
        });
        let (weights, choices) = self.routing(spec, n, mid); // (T, J) both
        let dispatch = Op::Dispatch { experts: spec.router.experts };
        let dispatched = self.emit(dispatch, vec![choices], &["experts.places", "experts.of_rows"]);
        let [places, of_rows] = dispatched[..] else { unreachable!("a dispatch has two outputs") };
        let x = match &spec.beside {
            Some(beside) => self.stream_norm(mid, Some(beside.before_experts), "experts.norm"),
            None => n,
        };
        let weighted = |inputs: [ValueId; 2], is_weighted: bool| {
            inputs.into_iter().chain(is_weighted.then_some(weights)).collect()
        };
        let inputs = weighted([x, places], spec.weighs_inputs);
        let rows = self.emit1(Op::SpreadRows { weighted: spec.weighs_inputs }, inputs, "experts.in"); // (J·T, C)
        let [gate_part, up_part, down_part] = spec.rows(self.spec.hidden);
        let [gate_up, down] = spec.paths();
        let [gate, up] =
            self.grouped(rows, of_rows, &gate_up, [("experts.gate", gate_part), ("experts.up", up_part)]);
        let a = self.gated(spec.activation, gate, up, "experts.act"); // (J·T, I)
        let [y] = self.grouped(a, of_rows, &down, [("experts.out", down_part)]); // (J·T, C)
        let inputs = weighted([y, places], !spec.weighs_inputs);
        let mut sum = self.emit1(Op::CombineRows { weighted: !spec.weighs_inputs }, inputs, "experts.sum"); // (T, C)
        if let Some(shared) = &spec.shared {
            let mut y = self.gated_feed_forward(&shared.gated, n, "shared");
            if let Some(gate) = shared.gate {
                let gate = self.linear(n, gate, "shared.share"); // (T, 1)
                y = self.gated(Activation::Sigmoid, gate, y, "shared.gated");
            }
            sum = self.add(sum, y, 1.0, "experts.with_shared");
        }
        if let Some((dense, beside)) = dense.zip(spec.beside.as_ref()) {
            sum = self.stream_norm(sum, Some(beside.after_experts), "experts.normed");
            sum = self.add(dense, sum, 1.0, "experts.with_mlp");
        }
        sum
    }

    /// The weights and numbers of the experts of each token, (T, J) both.
    fn routing(&mut self, spec: &ExpertsSpec, n: ValueId, mid: ValueId) -> (ValueId, ValueId) {
        let input = match spec.router_norm {
            Some(RouterNorm { norm, weight, scale }) => {
                let normed = self.norm(mid, NormForm::Rms(norm), weight, "router.norm");
                self.scaled(normed, scale, "router.in")
            }
            None => n,
        };
        let logits = self.linear(input, spec.names.router, "router.logits"); // (T, E)
        let layer = self.layer.expect("experts belong to a layer");
        let vector =
            |is_used: bool, path: &str| is_used.then(|| self.leaf(&DecoderSpec::layer_path(layer, path)));
        let correction = vector(spec.router.is_corrected, spec.names.correction);
        let scales = vector(spec.router.has_expert_scales, spec.names.scales);
        let inputs = [logits].into_iter().chain(correction).chain(scales).collect();
        let names = ["router.weights", "router.choices"];
        match self.emit(Op::Route(spec.router), inputs, &names)[..] {
            [weights, choices] => (weights, choices),
            _ => unreachable!("a route has two outputs"),
        }
    }

    /// Sorted rows times the matrices of their experts: each output from some rows of every expert's matrix.
    fn grouped<const N: usize>(
        &mut self,
        x: ValueId,
        of_rows: ValueId,
        module: &str,
        parts: [(&str, ExpertRows); N],
    ) -> [ValueId; N] {
        let path = DecoderSpec::layer_path(self.layer.expect("experts belong to a layer"), module);
        let weight = self.leaves.multiplied(&format!("{path}.weight"));
        let bias = self.leaves.find(&format!("{path}.bias"));
        let (experts, name) = (parts[0].1.experts, parts[0].0);
        let adapter = self.adapters.get(path.as_str()).map(|(_, module)| *module).map(|module| {
            let (a, b, scale) = self.factors(module);
            let part = ExpertRows { experts, first: 0, rows: module.rank };
            let h = self.grouped_linear([x, a, of_rows], part, None, None, &format!("{name}.h")); // (J·T, R)
            (h, b, scale)
        });
        parts.map(|(output, part)| self.grouped_linear([x, weight, of_rows], part, bias, adapter, output))
    }

    fn grouped_linear(
        &mut self,
        inputs: [ValueId; 3],
        part: ExpertRows,
        bias: Option<ValueId>,
        adapter: Option<(ValueId, ValueId, f32)>,
        output: &str,
    ) -> ValueId {
        let op = Op::GroupedLinear { part, bias: bias.is_some(), lora: adapter.map(|(_, _, scale)| scale) };
        let factors = adapter.into_iter().flat_map(|(h, b, _)| [h, b]);
        self.emit1(op, inputs.into_iter().chain(bias).chain(factors).collect(), output)
    }
}
