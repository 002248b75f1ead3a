//! The description of routed experts: a router, many gated feed-forwards of which each token uses some, and what runs beside
//! them for every token.
//!
//! The matrices of all experts are one linear with their rows one after the other: gate and up of each expert, and down of
//! each expert. Families differ in the router, in names, and in what is beside the experts; all of that is data here.
//! Left out: how checkpoints lay experts out in their files.

use super::parts::{GatedSpec, LayerLinear, NormSpec};
use super::tensors::LinearKind;
use smidgen_ir::{Activation, ExpertRows, Norm, Router};

#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    pub router: Router,
    pub names: ExpertNames,
    /// Whether the router has a bias.
    pub router_bias: bool,
    /// The norm of the router's input, which is then the residual stream itself; else it is that of the experts.
    pub router_norm: Option<RouterNorm>,
    /// Channels of gate and of up of one expert.
    pub width: usize,
    pub activation: Activation,
    /// Whether experts have biases.
    pub bias: bool,
    /// Whether the input of an expert is multiplied by its weight, not its output.
    pub weighs_inputs: bool,
    pub shared: Option<SharedExpert>,
    pub beside: Option<BesideExperts>,
}

/// Paths below the layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertNames {
    pub router: &'static str,
    /// The module of all experts.
    pub experts: &'static str,
    /// Added to scores for the choice of experts.
    pub correction: &'static str,
    /// The factor of each expert.
    pub scales: &'static str,
    /// Whether transformers and PEFT have the rows of gate and up in turns.
    pub takes_turns: bool,
    /// What PEFT adapts in place of linears that a target names, where files had a linear for each expert.
    pub targets: ExpertTargets,
}

/// Names of linears of experts in older files, which PEFT reads as names of the fused parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertTargets {
    /// Only the fused parameters have names.
    Fused,
    /// `gate_proj`, `up_proj` and `down_proj`.
    Projections,
    /// `w1`, `w3` and `w2`.
    Numbered,
}

impl ExpertTargets {
    /// The names of gate and up, and of down.
    pub fn names(self) -> Option<([&'static str; 2], &'static str)> {
        match self {
            ExpertTargets::Fused => None,
            ExpertTargets::Projections => Some((["gate_proj", "up_proj"], "down_proj")),
            ExpertTargets::Numbered => Some((["w1", "w3"], "w2")),
        }
    }
}

/// An RMS norm of the residual stream, whose weight is a vector of its own, times a factor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouterNorm {
    pub norm: Norm,
    pub weight: &'static str,
    pub scale: f32,
}

/// A feed-forward that every token uses, added to the experts.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    pub gated: GatedSpec,
    /// Its output is multiplied by the sigmoid of this projection to one channel.
    pub gate: Option<&'static str>,
}

/// The feed-forward of the layer, beside experts that read the residual stream through a norm of their own. Both outputs are
/// normed before they are added.
#[derive(Clone, Debug, PartialEq)]
pub struct BesideExperts {
    pub gated: GatedSpec,
    pub after_gated: NormSpec,
    pub before_experts: NormSpec,
    pub after_experts: NormSpec,
}

impl ExpertNames {
    /// The names of Qwen's models.
    pub const QWEN: ExpertNames = ExpertNames {
        router: "mlp.gate",
        experts: "mlp.experts",
        correction: "mlp.gate.e_score_correction_bias",
        scales: "mlp.gate.per_expert_scale",
        takes_turns: false,
        targets: ExpertTargets::Projections,
    };
}

impl ExpertsSpec {
    /// Experts as Qwen's: a softmax over all of them, no biases, and nothing beside them. Families change what differs.
    pub fn like_qwen(router: Router, width: usize, activation: Activation) -> ExpertsSpec {
        ExpertsSpec {
            router,
            names: ExpertNames::QWEN,
            router_bias: false,
            router_norm: None,
            width,
            activation,
            bias: false,
            weighs_inputs: false,
            shared: None,
            beside: None,
        }
    }

    /// Paths of gate and up of all experts, and of down.
    pub fn paths(&self) -> [String; 2] {
        ["gate_up_proj", "down_proj"].map(|name| format!("{}.{name}", self.names.experts))
    }

    /// The rows of gate, of up, and of down in the linears that hold them.
    pub fn rows(&self, hidden: usize) -> [ExpertRows; 3] {
        let part = |first, rows| ExpertRows { experts: self.router.experts, first, rows };
        [part(0, self.width), part(self.width, self.width), part(0, hidden)]
    }

    pub fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        let Self { width, router, bias, .. } = self;
        let [gate_up, down] = self.paths();
        let experts = |path, rows, k| LayerLinear {
            kind: LinearKind::Experts(router.experts),
            ..LayerLinear::dense(path, router.experts * rows, k, *bias)
        };
        let router = LayerLinear {
            kind: LinearKind::Router,
            ..LayerLinear::dense(self.names.router, router.experts, hidden, self.router_bias)
        };
        let mut linears: Vec<LayerLinear> =
            self.beside.iter().flat_map(|beside| beside.gated.linears(hidden)).collect();
        linears.extend([router, experts(gate_up, 2 * width, hidden), experts(down, hidden, *width)]);
        if let Some(SharedExpert { gated, gate }) = &self.shared {
            linears.extend(gated.linears(hidden));
            linears.extend(gate.map(|path| LayerLinear::dense(path, 1, hidden, false)));
        }
        linears
    }

    /// Tensors that are no linears, with their sizes.
    pub fn vectors(&self, hidden: usize) -> Vec<(String, usize)> {
        let (names, experts) = (&self.names, self.router.experts);
        let of_norm = self.router_norm.map(|norm| (norm.weight.to_string(), hidden));
        let correction = self.router.is_corrected.then(|| (names.correction.to_string(), experts));
        let scales = self.router.has_expert_scales.then(|| (names.scales.to_string(), experts));
        let beside = self.beside.iter().flat_map(|beside| {
            [beside.after_gated, beside.before_experts, beside.after_experts]
                .map(|norm| (format!("{}.weight", norm.path), hidden))
        });
        of_norm.into_iter().chain(correction).chain(scales).chain(beside).collect()
    }
}
