//! CUDA graphs: one training step of a small model is thousands of short kernels, and launching each takes longer than
//! running it.
//!
//! Stretches of steps are captured at the planned extent before the first step runs. A micro-batch of another extent
//! launches the same kernels with other arguments: its launches are captured while the GPU still works on the previous
//! micro-batch, and the graph is updated in place. If its kernels differ, they are launched one by one.
//! In `decode`, a step with one token per sequence is captured. Prompts are launched one by one: their kernels are
//! long. The GPU gets the same launches in the same order either way, so graphs do not change the results.
//! Plans with transfers are not captured: they are bound by memory, not by launches. Exchanges between ranks, and steps
//! that wait for one, are launched between two graphs.

use super::driver::{self, Gpu};
use crate::device::{BoundStep, DeviceError};
use cudarc::driver::sys;
use smidgen_ir::{Entry, Extent};
use std::ops::Range;

/// A shorter stretch gains too little from a graph.
const FEWEST_STEPS: usize = 16;
/// After this many failed updates in a row, a stretch is launched one by one.
const MOST_MISFITS: usize = 8;

/// The graphs of a plan.
#[derive(Debug, Default)]
pub struct Graphs {
    stretches: Vec<Stretch>,
    launches: u64,
}

/// Consecutive steps of an entry point, captured as one graph.
#[derive(Debug)]
struct Stretch {
    entry: Entry,
    steps: Range<usize>,
    graph: Executable,
    /// The extent of the captured launches.
    extent: Extent,
    /// Failed updates in a row.
    misfits: usize,
}

/// The stretches to capture: all steps except exchanges between ranks, steps that wait for one, and steps of the loss,
/// whose number of launches depends on the number of rows.
fn stretches(steps: &[BoundStep]) -> Vec<Range<usize>> {
    if steps.iter().any(|step| step.transfer().is_some()) {
        return vec![];
    }
    let is_cut = |step: &BoundStep| step.op.is_loss() || step.op.is_collective() || !step.awaits.is_empty();
    let mut first = 0;
    let parts = steps.split_inclusive(is_cut).map(|part| {
        let ends_there = part.last().is_some_and(is_cut);
        let recorded = first..first + part.len() - usize::from(ends_there);
        first += part.len();
        recorded
    });
    parts.filter(|part| part.len() >= FEWEST_STEPS).collect()
}

/// The extent at which an entry point is captured.
pub fn recorded_extent(steps: &[BoundStep], planned: &Extent) -> Extent {
    match steps.first().map(|step| step.entry) {
        Some(Entry::Decode) => Extent { tokens: planned.rows.min(planned.tokens), audio: 0, ..*planned },
        _ => *planned,
    }
}

impl Graphs {
    /// Graph launches so far.
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Captures the steps of an entry point at its planned extent. Steps without a graph are launched one by one.
    pub fn prepare(
        &mut self,
        gpu: &Gpu,
        steps: &[BoundStep],
        extent: &Extent,
        mut launch: impl FnMut(&[BoundStep]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        for part in stretches(steps) {
            let recording = Recording::of(gpu, || launch(&steps[part.clone()]))?;
            if let Some(graph) = Executable::new(gpu, &recording) {
                let entry = steps[part.start].entry;
                self.stretches.push(Stretch { entry, steps: part, graph, extent: *extent, misfits: 0 });
            }
        }
        Ok(())
    }

    /// Runs the steps of an entry point: captured stretches as graphs, the rest with `launch`.
    pub fn run(
        &mut self,
        gpu: &Gpu,
        steps: &[BoundStep],
        extent: &Extent,
        mut launch: impl FnMut(&[BoundStep]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(first) = steps.first() else { return Ok(()) };
        // A single step is not a whole entry point.
        let is_whole = first.index == 0 && steps.len() > 1;
        let mut done = 0;
        for stretch in self.stretches.iter_mut().filter(|own| is_whole && own.entry == first.entry) {
            launch(&steps[done..stretch.steps.start])?;
            done = stretch.steps.end;
            let own = &steps[stretch.steps.clone()];
            if stretch.fit(gpu, extent, || launch(own))? {
                stretch.graph.launch(gpu)?;
                self.launches += 1;
            } else {
                launch(own)?;
            }
        }
        launch(&steps[done..])
    }
}

impl Stretch {
    /// Updates the graph to an extent; returns whether it now holds its launches.
    fn fit(
        &mut self,
        gpu: &Gpu,
        extent: &Extent,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        if self.extent == *extent {
            return Ok(true);
        }
        let is_prompt = self.entry == Entry::Decode && extent.tokens != extent.rows;
        if self.misfits == MOST_MISFITS || is_prompt {
            return Ok(false);
        }
        let fits = self.graph.update(&Recording::of(gpu, launch)?);
        if fits {
            (self.extent, self.misfits) = (*extent, 0)
        } else {
            self.misfits += 1
        }
        Ok(fits)
    }
}

/// Captured launches.
#[derive(Debug)]
struct Recording {
    graph: sys::CUgraph,
}

impl Recording {
    fn of(gpu: &Gpu, launch: impl FnOnce() -> Result<(), DeviceError>) -> Result<Recording, DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream belongs to this GPU, and no other capture is active on it.
        driver::check(unsafe { sys::cuStreamBeginCapture_v2(gpu.stream, mode) }, "cuStreamBeginCapture")?;
        let launched = launch();
        let mut graph = std::ptr::null_mut();
        // SAFETY: begun above; a capture has to end even if a launch failed.
        let ended = unsafe { sys::cuStreamEndCapture(gpu.stream, &mut graph) };
        let recording = Recording { graph };
        launched?;
        driver::check(ended, "cuStreamEndCapture")?;
        Ok(recording)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: made in `of`, destroyed once; executables made from it do not depend on it.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

/// An executable graph, with its memory on the GPU.
#[derive(Debug)]
struct Executable {
    handle: sys::CUgraphExec,
}

// SAFETY: a handle; see `Gpu`.
unsafe impl Send for Executable {}

impl Executable {
    /// `None` if the driver cannot instantiate or upload the graph.
    fn new(gpu: &Gpu, recording: &Recording) -> Option<Executable> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the capture has ended, and the graph lives through the call.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, recording.graph, 0) };
        driver::check(made, "cuGraphInstantiate").ok()?;
        let graph = Executable { handle };
        // Uploaded now, so that its memory is allocated before the run. SAFETY: the graph was just made.
        let uploaded = unsafe { sys::cuGraphUpload(graph.handle, gpu.stream) };
        driver::check(uploaded, "cuGraphUpload").ok()?;
        Some(graph)
    }

    /// Updates the arguments to those of a capture; returns false if its kernels differ. Launches that are already
    /// enqueued keep theirs.
    fn update(&mut self, recording: &Recording) -> bool {
        // SAFETY: a plain structure, written by the call.
        let mut why: sys::CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
        // SAFETY: both graphs are alive.
        let updated = unsafe { sys::cuGraphExecUpdate_v2(self.handle, recording.graph, &mut why) };
        updated == sys::CUresult::CUDA_SUCCESS
    }

    fn launch(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        // SAFETY: the captured launches use the reservation and kernels, which live as long as the plan.
        driver::check(unsafe { sys::cuGraphLaunch(self.handle, gpu.stream) }, "cuGraphLaunch")
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver lets a running launch finish.
        let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
    }
}
