//! An AdamW step on memory outside the arena: parameters and optimizer state that a GPU run keeps in host memory and
//! updates on the CPU.
//!
//! It uses the kernels of the CPU device. They round as the GPU kernels do, so both give the same bytes.

use super::optimizer::{self, AdamwHyper};
use super::optimizer8::{self, Moment8};
use super::pool::Pool;
use super::view::{Dst, Src};
use smidgen_ir::AdamW;
use std::time::Instant;

/// The addresses of one step. Report and settings are f64; the rest is f32, except moments in 8 bits.
#[derive(Clone, Copy, Debug)]
pub struct UpdateAt {
    pub settings: AdamW,
    pub elements: usize,
    pub in_8_bits: bool,
    pub gradient: *const f32,
    pub report: *const f64,
    pub hyper: *const f64,
    pub parameter: *mut f32,
    pub moments: [*mut u8; 2],
    pub activity: *mut f32,
}

// SAFETY: only addresses; `run` states the conditions for using them.
unsafe impl Send for UpdateAt {}

impl UpdateAt {
    /// # Safety
    /// All addresses are aligned and valid for their elements, no two tensors overlap, and nothing else touches them
    /// during the call.
    pub unsafe fn run(&self, pool: &Pool) {
        // SAFETY: the caller's promise.
        unsafe {
            let (report, hyper) = (Src::new(self.report, 4), Src::new(self.hyper, 3));
            let Some((hyper, factor)) = AdamwHyper::read(&self.settings, report, hyper) else { return };
            let gradient = Src::new(self.gradient, self.elements);
            let parameter = Dst::new(self.parameter, self.elements);
            let activity = Dst::new(self.activity, smidgen_ir::ACTIVITY_COLUMNS);
            if self.in_8_bits {
                let [m, v] = self.moments.map(|begin| Moment8::at(begin, self.elements));
                pool.enter(|| optimizer8::adamw8(parameter, gradient, m, v, activity, hyper, factor));
            } else {
                let [m, v] = self.moments.map(|begin| Dst::new(begin.cast(), self.elements));
                pool.enter(|| optimizer::adamw(parameter, gradient, m, v, activity, hyper, factor));
            }
        }
    }
}

/// Measures the bytes per second that `threads` threads read and write in f32 updates.
pub fn measure_update_rate(threads: usize) -> std::io::Result<f64> {
    const ELEMENTS: usize = 16 << 20;
    const ROUNDS: usize = 4;
    const BYTES_OF_ELEMENT: usize = 28;
    let pool = Pool::new(threads)?;
    let mut tensors = [0.5f32, 0.25, 0.0, 0.0].map(|number| vec![number; ELEMENTS]);
    let [gradient, parameter, m, v] = tensors.each_mut().map(|tensor| tensor.as_mut_ptr());
    let (report, hyper) = ([1.0f64, 1.0, 1.0, 1.0], [1e-4f64, 1.0, 1.0]);
    let mut activity = [0f32; smidgen_ir::ACTIVITY_COLUMNS];
    let update = UpdateAt {
        settings: AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 },
        elements: ELEMENTS,
        in_8_bits: false,
        gradient,
        report: report.as_ptr(),
        hyper: hyper.as_ptr(),
        parameter,
        moments: [m.cast(), v.cast()],
        activity: activity.as_mut_ptr(),
    };
    // SAFETY: vectors and arrays of these sizes, which nothing else uses.
    let run = || unsafe { update.run(&pool) };
    run();
    let begin = Instant::now();
    (0..ROUNDS).for_each(|_| run());
    Ok((ROUNDS * ELEMENTS * BYTES_OF_ELEMENT) as f64 / begin.elapsed().as_secs_f64())
}
