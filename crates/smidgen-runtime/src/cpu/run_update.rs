//! The optimizer step on the CPU: the norm of all gradients, and AdamW with f32 or 8-bit moments.
//!
//! Loss, report and settings are f64 in the arena, as on every device; AdamW does nothing if the report is not finite.

use super::round_at_random::round_at_random;
use super::run::Run;
use super::{optimizer, optimizer8};
use crate::device::Operand;
use smidgen_ir::{AdamW, RandomPlace, Storage};

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
        let (gradients, squares) =
            self.step.inputs[2..].split_at(self.step.inputs.len() - 2 - usize::from(has_squares));
        let earlier_squares = squares.iter().map(|squares| {
            let squares = self.elements::<f64>(squares).src();
            (0..squares.len()).map(|index| squares.get(index)).sum::<f64>()
        });
        let earlier_squares: f64 = earlier_squares.sum();
        let norm = (self.sum_of_squares(gradients) + earlier_squares).sqrt() / scale;
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
        let [report, hyper] = [1, 2].map(|index| self.elements::<f64>(self.input(index)).src());
        optimizer::AdamwHyper::read(settings, report, hyper)
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

    pub(super) fn round_at_random(&self, place: &RandomPlace) {
        let (from, to) = (self.floats(self.input(0)), self.elements::<u16>(self.update(0)));
        let step = self.elements::<f64>(self.input(1)).src().get(1) as u64;
        round_at_random(from, self.input(0).columns, to, place, step);
    }

    /// An 8-bit moment: the largest magnitude of each block, then the codes.
    fn moment8(&self, operand: &Operand) -> optimizer8::Moment8 {
        debug_assert!(matches!(operand.storage, Storage::Dynamic8 { .. }));
        // SAFETY: as for `elements`; the operand is aligned, and its range has all parts of the moment.
        unsafe { optimizer8::Moment8::at(self.address(operand), operand.elements_at(self.extent)) }
    }
}
