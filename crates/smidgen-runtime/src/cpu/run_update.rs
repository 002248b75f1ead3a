//! The optimizer step on the CPU: the norm of all gradients, and AdamW with f32 or 8-bit moments.
//!
//! Loss, report and settings are f64 in the arena, as on every device; AdamW does nothing if the report is not finite.

use super::run::Run;
use super::view::Dst;
use super::{optimizer, optimizer8};
use crate::device::Operand;
use smidgen_ir::storage::dynamic8_codes;
use smidgen_ir::{AdamW, Storage};

impl Run<'_> {
    pub(super) fn squared_norm(&self) {
        self.elements::<f64>(self.update(0)).set(0, self.sum_of_squares(&self.step.inputs));
    }

    fn sum_of_squares(&self, gradients: &[Operand]) -> f64 {
        let (_, bytes) = self.step.workspace.unwrap_or((0, 0));
        let scratch = self.workspace_doubles(bytes / 8);
        gradients.iter().map(|gradient| optimizer::sum_of_squares(self.floats(gradient), scratch)).sum()
    }

    pub(super) fn grad_norm(&self, clip: f32, has_squares: bool) {
        let scale = self.loss_scale(self.input(1));
        let loss = self.elements::<f64>(self.input(0)).src().get(0) / scale;
        let (gradients, more) =
            self.step.inputs[2..].split_at(self.step.inputs.len() - 2 - usize::from(has_squares));
        let more = more.iter().map(|squares| {
            let squares = self.elements::<f64>(squares).src();
            (0..squares.len()).map(|index| squares.get(index)).sum::<f64>()
        });
        let more: f64 = more.sum();
        let norm = (self.sum_of_squares(gradients) + more).sqrt() / scale;
        let factor = if clip > 0.0 { (f64::from(clip) / (norm + 1e-6)).min(1.0) } else { 1.0 } / scale;
        let finite = norm.is_finite() && loss.is_finite();
        let report = self.elements::<f64>(self.update(0));
        for (index, number) in [loss, norm, factor, f64::from(u8::from(finite))].into_iter().enumerate() {
            report.set(index, number);
        }
    }

    /// The factor by which the loss and its gradients were scaled.
    pub(super) fn loss_scale(&self, hyper: &Operand) -> f64 {
        self.elements::<f64>(hyper).src().get(2)
    }

    /// The settings of an AdamW step and the factor of its gradients; `None` if the report is not finite.
    fn adamw_hyper(&self, settings: &AdamW) -> Option<(optimizer::AdamwHyper, f32)> {
        let report = self.elements::<f64>(self.input(1)).src();
        let (factor, finite) = (report.get(2), report.get(3) == 1.0);
        let hyper = self.elements::<f64>(self.input(2)).src();
        let hyper = optimizer::AdamwHyper {
            lr: hyper.get(0),
            beta1: settings.beta1,
            beta2: settings.beta2,
            eps: settings.eps,
            weight_decay: settings.weight_decay,
            step: hyper.get(1) as u64,
        };
        finite.then_some((hyper, factor as f32))
    }

    pub(super) fn adamw(&self, settings: &AdamW) {
        let Some((hyper, factor)) = self.adamw_hyper(settings) else { return };
        let [parameter, first, second] = [0, 1, 2].map(|index| self.floats_mut(self.update(index)));
        let activity = self.floats_mut(self.update(3));
        optimizer::adamw(parameter, self.floats(self.input(0)), first, second, activity, hyper, factor);
    }

    pub(super) fn adamw8(&self, settings: &AdamW) {
        let Some((hyper, factor)) = self.adamw_hyper(settings) else { return };
        let [first, second] = [1, 2].map(|index| self.moment8(self.update(index)));
        let parameter = self.floats_mut(self.update(0));
        let activity = self.floats_mut(self.update(3));
        optimizer8::adamw8(parameter, self.floats(self.input(0)), first, second, activity, hyper, factor);
    }

    /// An 8-bit moment: the largest magnitude of each block, then the codes.
    fn moment8(&self, operand: &Operand) -> optimizer8::Moment8 {
        debug_assert!(matches!(operand.storage, Storage::Dynamic8 { .. }));
        let elements = operand.elements_at(self.extent);
        let codes = dynamic8_codes(elements);
        // SAFETY: as for `elements`; the two parts follow each other in the operand's range, the floats at its
        // aligned start.
        unsafe {
            let begin: *mut u8 = self.address(operand);
            optimizer8::Moment8 {
                largest: Dst::new(begin.cast(), codes / 4),
                codes: Dst::new(begin.add(codes), elements),
            }
        }
    }
}
