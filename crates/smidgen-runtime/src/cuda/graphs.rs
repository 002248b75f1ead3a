//! Launches recorded as a graph of the driver's: a small model's step is thousands of short kernels, and handing over
//! each by itself takes longer than running it.
//!
//! A stretch of steps is recorded before the first one runs, at the planned extent. A micro-batch of another extent
//! launches the same kernels with other numbers: it is recorded again while the GPU still works on the one before, and
//! the graph takes its numbers over, in the memory that it has. One that launches other kernels is launched one by one.
//! Either way the GPU is given the same launches in the same order, so the bytes of a run do not depend on it.
//! Plans with transfers are launched one by one: they wait for memory, not for launches.

use super::driver::{self, Gpu};
use crate::device::{BoundStep, DeviceError};
use cudarc::driver::sys;
use smidgen_ir::{Entry, Extent};
use std::ops::Range;

/// Shorter stretches gain too little.
const FEWEST_STEPS: usize = 16;
/// Extents in a row that did not fit their graph, after which it is left alone.
const MOST_MISFITS: usize = 8;

/// The graphs of a plan.
#[derive(Debug, Default)]
pub struct Graphs {
    stretches: Vec<Stretch>,
    launches: u64,
}

/// One stretch of an entry point's steps.
#[derive(Debug)]
struct Stretch {
    entry: Entry,
    steps: Range<usize>,
    graph: Executable,
    /// That of the launches it holds.
    extent: Extent,
    misfits: usize,
}

/// The stretches that can be recorded: all steps but those of the head, whose number of launches follows that of rows.
fn stretches(steps: &[BoundStep]) -> Vec<Range<usize>> {
    if steps.iter().any(|step| step.op.is_transfer()) {
        return vec![];
    }
    let mut first = 0;
    let parts = steps.split_inclusive(|step| step.op.is_of_loss()).map(|part| {
        let ends_there = part.last().is_some_and(|step| step.op.is_of_loss());
        let recorded = first..first + part.len() - usize::from(ends_there);
        first += part.len();
        recorded
    });
    parts.filter(|part| part.len() >= FEWEST_STEPS).collect()
}

impl Graphs {
    /// Graphs launched so far, each in the place of many kernels.
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Records the steps of an entry point at its planned extent. What cannot be recorded is launched one by one.
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

    /// Runs the steps of an entry point, recorded stretches as graphs and the rest by `launch`.
    pub fn run(
        &mut self,
        gpu: &Gpu,
        steps: &[BoundStep],
        extent: &Extent,
        mut launch: impl FnMut(&[BoundStep]) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(first) = steps.first() else { return Ok(()) };
        // A step by itself is no entry point.
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
    /// Whether the graph now holds the launches of this extent.
    fn fit(
        &mut self,
        gpu: &Gpu,
        extent: &Extent,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        if self.extent == *extent {
            return Ok(true);
        }
        if self.misfits == MOST_MISFITS {
            return Ok(false);
        }
        let fits = self.graph.update(&Recording::of(gpu, launch)?);
        match fits {
            true => (self.extent, self.misfits) = (*extent, 0),
            false => self.misfits += 1,
        }
        Ok(fits)
    }
}

/// Launches that were written down instead of run.
#[derive(Debug)]
struct Recording {
    graph: sys::CUgraph,
}

impl Recording {
    fn of(gpu: &Gpu, launch: impl FnOnce() -> Result<(), DeviceError>) -> Result<Recording, DeviceError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is this GPU's own, and no other recording is under way in it.
        driver::check(unsafe { sys::cuStreamBeginCapture_v2(gpu.stream, mode) }, "cuStreamBeginCapture")?;
        let launched = launch();
        let mut graph = std::ptr::null_mut();
        // SAFETY: begun above; it has to end even where a launch failed.
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
            // SAFETY: made in `of`, destroyed once; what was made of it lives by itself.
            let _ = unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

/// A graph that can be launched, with its memory on the GPU.
#[derive(Debug)]
struct Executable {
    handle: sys::CUgraphExec,
}

// SAFETY: a handle; see `Gpu`.
unsafe impl Send for Executable {}

impl Executable {
    /// None where the driver makes none of it, for want of memory or of knowledge.
    fn new(gpu: &Gpu, recording: &Recording) -> Option<Executable> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: the recording is whole and lives through the call.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut handle, recording.graph, 0) };
        driver::check(made, "cuGraphInstantiate").ok()?;
        let graph = Executable { handle };
        // So that its memory is taken now. SAFETY: the graph was just made.
        let uploaded = unsafe { sys::cuGraphUpload(graph.handle, gpu.stream) };
        driver::check(uploaded, "cuGraphUpload").ok()?;
        Some(graph)
    }

    /// Takes over the numbers of a recording; false where its launches are others. What is under way keeps its own.
    fn update(&mut self, recording: &Recording) -> bool {
        // SAFETY: a plain structure, written by the call.
        let mut why: sys::CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
        // SAFETY: both graphs are alive.
        let updated = unsafe { sys::cuGraphExecUpdate_v2(self.handle, recording.graph, &mut why) };
        updated == sys::CUresult::CUDA_SUCCESS
    }

    fn launch(&self, gpu: &Gpu) -> Result<(), DeviceError> {
        // SAFETY: the launches in it name the reservation and kernels that live as long as the plan.
        driver::check(unsafe { sys::cuGraphLaunch(self.handle, gpu.stream) }, "cuGraphLaunch")
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver lets a launch that is under way end.
        let _ = unsafe { sys::cuGraphExecDestroy(self.handle) };
    }
}
