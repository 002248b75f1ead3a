//! A linear with its bias and its adapter, as one projection or as several parts of one matrix.
//!
//! If a checkpoint stores q, k and v (or gate and up) as one matrix, each part is a matmul with some of its rows, so
//! activations are never split. B is split like W, and A is shared, so a fused linear has one `h` for all its parts.
//!
//! LoRA:    y = x·Wᵀ + bias + s·h·Bᵀ, h = dropout(x)·Aᵀ.
//! DoRA:    y = (x·Wᵀ + s·h·Bᵀ) · m/n + bias, with n the row norms of W + s·B·A, treated as constants.
//!          With dropout, x̃ = dropout(x): y = (x̃·Wᵀ + s·h·Bᵀ)·m/n + (x - x̃)·Wᵀ + bias.
//! LS-LoRA: y = x·Wᵀ + bias + φ(s·h·Bᵀ).

use crate::adapter::LoraModule;
use crate::forward::Builder;
use crate::leaves::{FOURIER_COEFFICIENTS, FOURIER_SIGMA, rounded_name};
use crate::model::audio::AUDIO;
use crate::model::spec::{DecoderSpec, HEAD};
use crate::names::input;
use crate::request::AdapterForm;
use smidgen_ir::{Op, ValueId};

/// The values of an adapter that all parts of its linear share.
#[derive(Clone, Copy)]
struct Attached {
    /// Index among the adapters.
    index: usize,
    /// Input of A: x, with dropout while training.
    input: ValueId,
    /// x minus `input`, if DoRA needs it.
    rest: Option<ValueId>,
    h: ValueId,
    b: ValueId,
    scale: f32,
}

/// Rows of a linear that compute one output.
#[derive(Clone, Copy)]
struct Part<'a> {
    output: &'a str,
    first_row: usize,
    rows: usize,
}

impl Builder<'_> {
    /// Projections of one input: separate linears, or parts of one.
    pub fn projections<const N: usize>(
        &mut self,
        x: ValueId,
        is_fused: bool,
        (fused, separate): (&str, [&str; N]),
        parts: [(&str, usize); N],
    ) -> [ValueId; N] {
        if !is_fused && self.cached {
            // All h first: the matmuls that follow are independent, so a device may launch them together.
            let paths = separate.map(|module| self.path(module));
            let attached: [_; N] = std::array::from_fn(|i| self.attach(x, &paths[i], parts[i].0));
            return std::array::from_fn(|i| {
                let (output, rows) = parts[i];
                self.part(x, &paths[i], attached[i], Part { output, first_row: 0, rows })
            });
        }
        if !is_fused {
            return std::array::from_fn(|i| self.linear(x, separate[i], parts[i].0));
        }
        let path = self.path(fused);
        let attached = self.attach(x, &path, fused);
        self.each_part(x, &path, attached, parts)
    }

    /// Parts of the linear at a path, each from some of its rows.
    pub fn parts_at<const N: usize>(
        &mut self,
        x: ValueId,
        path: &str,
        parts: [(&str, usize); N],
    ) -> [ValueId; N] {
        let attached = self.attach(x, path, parts[0].0);
        self.each_part(x, path, attached, parts)
    }

    fn each_part<const N: usize>(
        &mut self,
        x: ValueId,
        path: &str,
        attached: Option<Attached>,
        parts: [(&str, usize); N],
    ) -> [ValueId; N] {
        let mut first_row = 0;
        parts.map(|(output, rows)| {
            let part = Part { output, first_row, rows };
            first_row += rows;
            self.part(x, path, attached, part)
        })
    }

    /// A linear of the current layer.
    pub fn linear(&mut self, x: ValueId, module: &str, output: &str) -> ValueId {
        let path = self.path(module);
        self.linear_at(x, &path, output)
    }

    /// The linear at a path.
    pub fn linear_at(&mut self, x: ValueId, path: &str, output: &str) -> ValueId {
        let attached = self.attach(x, path, output);
        let (rows, _) =
            self.graph.value(self.leaf(&format!("{path}.weight"))).ty.shape.at(&Default::default());
        self.part(x, path, attached, Part { output, first_row: 0, rows })
    }

    fn path(&self, module: &str) -> String {
        DecoderSpec::layer_path(self.layer.expect("linears outside the layers are the head"), module)
    }

    /// h, B and the scale of an adapter on the head, which is always LoRA.
    pub fn head_adapter(&mut self, x: ValueId) -> Option<(ValueId, ValueId, f32)> {
        let attached = self.attach(x, HEAD, "head.logits")?;
        assert_eq!(self.form, AdapterForm::Lora, "an adapter on the head is LoRA");
        Some((attached.h, attached.b, attached.scale))
    }

    fn attach(&mut self, x: ValueId, path: &str, name: &str) -> Option<Attached> {
        let (index, module) = self.adapters.get(path).copied()?;
        let (mut input, mut rest) = (x, None);
        if self.dropout > 0.0 {
            let keys = self.leaf(match path {
                HEAD => input::DROPOUT_ROW_KEYS,
                path if path.starts_with(AUDIO) => input::DROPOUT_AUDIO_KEYS,
                _ => input::DROPOUT_KEYS,
            });
            let dropout = |rest| Op::Dropout { p: self.dropout, stream: index as u32, rest };
            let (kept, left_out) = (dropout(false), dropout(true));
            input = self.emit1(kept, vec![x, keys], &format!("{name}.dropped"));
            if self.form == AdapterForm::Dora {
                rest = Some(self.emit1(left_out, vec![x, keys], &format!("{name}.rest")));
            }
        }
        let (a, b, scale) = self.factors(module);
        let h = self.matmul(input, a, None, None, &format!("{name}.h")); // (T, R)
        Some(Attached { index, input, rest, h, b, scale })
    }

    /// A and B of an adapter as matmuls read them, and the factor of h·Bᵀ.
    pub fn factors(&self, module: &LoraModule) -> (ValueId, ValueId, f32) {
        let names = [module.a_name(), module.b_name()];
        let rounded = names.each_ref().map(|name| rounded_name(name));
        let is_rounded = self.leaves.find(&rounded[0]).is_some();
        // The rounded B may include the scale.
        let is_scaled = is_rounded && self.graph.gradient_scale(self.leaf(&rounded[1])) == module.scale;
        let [a, b] = if is_rounded { rounded } else { names }.map(|name| self.adapter_leaf(&name));
        (a, b, if is_scaled { 1.0 } else { module.scale })
    }

    /// A leaf of an adapter, or its frozen copy.
    fn adapter_leaf(&self, name: &str) -> ValueId {
        self.leaf(&format!("{}{name}", self.adapter_copy))
    }

    fn rows_of(&mut self, leaf: ValueId, part: Part<'_>) -> ValueId {
        self.leaves.slice(self.graph, leaf, part.first_row, part.rows)
    }

    fn part(&mut self, x: ValueId, path: &str, attached: Option<Attached>, part: Part<'_>) -> ValueId {
        let weight = self.leaves.multiplied(&format!("{path}.weight"));
        let weight = self.rows_of(weight, part);
        let bias = self.leaves.find(&format!("{path}.bias")).map(|bias| self.rows_of(bias, part));
        let Some(attached) = attached else { return self.matmul(x, weight, bias, None, part.output) };
        let b = self.rows_of(attached.b, part);
        let lora = Some((attached.h, b, attached.scale));
        match self.form {
            AdapterForm::Lora => self.matmul(x, weight, bias, lora, part.output),
            AdapterForm::Dora => {
                let module = self.adapters[path].1;
                let names = [module.magnitude_name(), module.norm_name()];
                let [magnitude, norm] = names.map(|name| self.adapter_leaf(&name));
                let gain = [self.rows_of(magnitude, part), self.rows_of(norm, part)];
                self.dora(weight, bias, lora, attached, gain, part.output)
            }
            AdapterForm::Fourier { .. } => {
                let base = self.matmul(x, weight, bias, None, &format!("{}.base", part.output));
                let [coefficients, sigma] = [FOURIER_COEFFICIENTS, FOURIER_SIGMA].map(|name| {
                    let leaf = self.adapter_leaf(name);
                    self.leaves.slice(self.graph, leaf, attached.index, 1)
                });
                let op = Op::Fourier { scale: attached.scale };
                self.emit1(op, vec![base, attached.h, b, coefficients, sigma], part.output)
            }
        }
    }

    fn dora(
        &mut self,
        weight: ValueId,
        bias: Option<ValueId>,
        lora: Option<(ValueId, ValueId, f32)>,
        attached: Attached,
        [magnitude, norm]: [ValueId; 2],
        output: &str,
    ) -> ValueId {
        let z = self.matmul(attached.input, weight, None, lora, &format!("{output}.z"));
        let mut inputs = vec![z, magnitude, norm];
        let Some(rest) = attached.rest else {
            inputs.extend(bias);
            return self.emit1(Op::ScaleColumns { bias: bias.is_some() }, inputs, output);
        };
        let gained = self.emit1(Op::ScaleColumns { bias: false }, inputs, &format!("{output}.gained"));
        let rest = self.matmul(rest, weight, bias, None, &format!("{output}.unchanged"));
        self.add(gained, rest, 1.0, output)
    }

    fn matmul(
        &mut self,
        x: ValueId,
        weight: ValueId,
        bias: Option<ValueId>,
        lora: Option<(ValueId, ValueId, f32)>,
        output: &str,
    ) -> ValueId {
        let mut inputs = vec![x, weight];
        inputs.extend(bias);
        if let Some((h, b, _)) = lora {
            inputs.extend([h, b]);
        }
        let lora = lora.map(|(_, _, scale)| scale);
        self.emit1(Op::Linear { bias: bias.is_some(), lora }, inputs, output)
    }
}
