//! Parts of layers that descriptions of layers and of experts share: norms, linears and the gated feed-forward.
//!
//! Paths are below the layer. Left out: which parts a layer has (`layer.rs`, `experts.rs`).

use super::tensors::LinearKind;
use smidgen_ir::{Activation, Norm};

/// The module of a feed-forward in most layers.
pub const MLP: &str = "mlp";

/// A norm and its path below the layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub path: &'static str,
    pub form: NormForm,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormForm {
    Rms(Norm),
    /// (x - mean) / deviation · weight.
    Layer {
        eps: f32,
    },
}

impl NormForm {
    /// Whether values are multiplied by 1 + weight.
    pub fn adds_one(&self) -> bool {
        match self {
            NormForm::Rms(norm) => norm.plus_one,
            NormForm::Layer { .. } => false,
        }
    }
}

/// act(gate)·up, projected down.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedSpec {
    /// Path of the module below the layer.
    pub module: &'static str,
    pub names: GatedNames,
    /// Channels of gate and of up.
    pub width: usize,
    pub activation: Activation,
    /// Whether gate and up are one linear.
    pub is_fused: bool,
    /// Whether gate, up and down have biases.
    pub bias: bool,
    /// Gate, before its activation, and the output are multiplied by these.
    pub scales: [f32; 2],
}

/// The names of a feed-forward's linears below its module: gate and up as one linear, each of them, and down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedNames {
    pub fused: &'static str,
    pub separate: [&'static str; 2],
    pub down: &'static str,
}

impl GatedNames {
    pub const USUAL: GatedNames =
        GatedNames { fused: "gate_up_proj", separate: ["gate_proj", "up_proj"], down: "down_proj" };
    pub const NUMBERED: GatedNames = GatedNames { fused: "w13", separate: ["w1", "w3"], down: "w2" };
    pub const INPUT_OUTPUT: GatedNames =
        GatedNames { fused: "input_linear", down: "output_linear", ..GatedNames::USUAL };
}

impl GatedSpec {
    /// Paths of gate and up as one linear, of each, and of down.
    pub fn paths(&self) -> (String, [String; 2], String) {
        let path = |name: &str| format!("{}.{name}", self.module);
        (path(self.names.fused), self.names.separate.map(path), path(self.names.down))
    }

    pub fn linears(&self, hidden: usize) -> Vec<LayerLinear> {
        let input = |path: String, n| LayerLinear::dense(path, n, hidden, self.bias);
        let (fused, separate, down) = self.paths();
        let mut linears = if self.is_fused {
            vec![input(fused, 2 * self.width)]
        } else {
            separate.map(|path| input(path, self.width)).into()
        };
        linears.push(LayerLinear::dense(down, hidden, self.width, self.bias));
        linears
    }
}

/// A linear of a layer, by its path below the layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerLinear {
    pub path: String,
    pub n: usize,
    pub k: usize,
    pub bias: bool,
    pub kind: LinearKind,
}

impl LayerLinear {
    pub fn dense(path: impl Into<String>, n: usize, k: usize, bias: bool) -> LayerLinear {
        LayerLinear { path: path.into(), n, k, bias, kind: LinearKind::Dense }
    }
}
