//! The steps of recurrent mixers on the CPU: turns operands into views.
//!
//! Left out: the computation (`causal_conv.rs`, `decay.rs`, `scan.rs`, `scan_gradient.rs`).

use super::causal_conv::{Reach, Taps, cached_conv, causal_conv, causal_conv_weight_grad};
use super::decay::{DecayGradients, DecayInputs, decay, decay_grad};
use super::pool::current_threads;
use super::run::Run;
use super::scan::{ScanInputs, cached_scan, scan};
use super::scan_gradient::{ScanGradients, scan_gradient};
use super::slot_runs::SlotRuns;
use smidgen_ir::{DecayShape, Dim, ScanShape};

impl Run<'_> {
    /// The weight in input `first` and the bias after it.
    fn taps(&self, first: usize, bias: bool, channels: usize) -> Taps {
        let bias = bias.then(|| self.stored(self.input(first + 1)));
        Taps::new(self.stored(self.input(first)), bias, channels, self.workspace_floats())
    }

    pub(super) fn causal_conv(&self, bias: bool, backward: bool) {
        let x = self.input_rows(0);
        let reach = match self.input(1).rows {
            Dim::Boundaries => Reach::Samples(self.integers(1)),
            Dim::Audio(_) | Dim::Tokens | Dim::Tile { .. } | Dim::Rows | Dim::Routed(_) | Dim::Const(_) => {
                Reach::Chunks(self.marks(1))
            }
        };
        causal_conv(x, reach, self.taps(2, bias, x.columns()), backward, self.output_rows(0));
    }

    pub(super) fn causal_conv_weight_grad(&self) {
        let (x, dy, dw) = (self.input_rows(0), self.input_rows(1), self.floats_mut(self.update(0)));
        causal_conv_weight_grad(x, dy, self.integers(2), dw);
    }

    /// The slots and positions of tokens from input `first` on.
    fn slot_runs(&self, first: usize) -> SlotRuns<'_> {
        SlotRuns { slots: self.integers(first), positions: self.integers(first + 1) }
    }

    pub(super) fn cached_conv(&self, bias: bool) {
        let (x, windows) = (self.input_rows(0), self.update(0));
        let (runs, windows) =
            (self.slot_runs(2 + usize::from(bias)), self.floats_mut(windows).rows(windows.columns));
        cached_conv(x, self.taps(1, bias, x.columns()), runs, windows, self.output_rows(0));
    }

    fn decay_inputs(&self, shape: &DecayShape) -> DecayInputs {
        DecayInputs {
            shape: *shape,
            a: self.input_rows(0),
            log_decay: self.stored(self.input(1)),
            dt_bias: self.stored(self.input(2)),
            b: shape.write.map(|_| self.input_rows(3)),
        }
    }

    pub(super) fn decay(&self, shape: &DecayShape) {
        decay(&self.decay_inputs(shape), self.output_rows(0), self.output_rows(1));
    }

    pub(super) fn decay_grad(&self, shape: &DecayShape, [log_decay, dt_bias]: [bool; 2]) {
        let inputs = self.decay_inputs(shape);
        let first = 3 + usize::from(shape.write.is_some());
        let gradients = DecayGradients {
            da: self.output_rows(0),
            db: shape.write.map(|_| self.output_rows(1)),
            log_decay: log_decay.then(|| self.floats_mut(self.update(0))),
            dt_bias: dt_bias.then(|| self.floats_mut(self.update(usize::from(log_decay)))),
        };
        decay_grad(&inputs, self.input_rows(first), self.input_rows(first + 1), &gradients);
    }

    fn scan_inputs(&self, shape: &ScanShape) -> ScanInputs {
        let [q, k, v, g, beta] = [0, 1, 2, 3, 4].map(|input| self.input_rows(input));
        ScanInputs { shape: *shape, q, k, v, g, beta }
    }

    pub(super) fn scan(&self, shape: &ScanShape) {
        scan(self.scan_inputs(shape), self.integers(5), self.output_rows(0), self.workspace_floats());
    }

    pub(super) fn cached_scan(&self, shape: &ScanShape) {
        let states = self.update(0);
        let states = self.floats_mut(states).rows(states.columns);
        let workspace = self.workspace_floats();
        cached_scan(self.scan_inputs(shape), self.slot_runs(5), states, self.output_rows(0), workspace);
    }

    pub(super) fn scan_grad(&self, shape: &ScanShape) {
        let [dq, dk, dv, dg, dbeta] = [0, 1, 2, 3, 4].map(|output| self.output_rows(output));
        let gradients = ScanGradients { dq, dk, dv, dg, dbeta };
        let (inputs, upstream) = (self.scan_inputs(shape), self.input_rows(5));
        scan_gradient(
            inputs,
            upstream,
            self.integers(6),
            gradients,
            self.workspace_floats(),
            current_threads(),
        );
    }
}
