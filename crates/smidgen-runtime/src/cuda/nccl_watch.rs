//! A thread that watches NCCL's exchanges, because the host never waits for one and would not notice that one hangs.
//!
//! Two events enclose each exchange on NCCL's stream: the first happens when this rank is ready for the exchange, the
//! second when it is over. The thread aborts the communicator if an exchange does not end within a limit after this
//! rank was ready, or if NCCL reports an error. NCCL's kernels then return, the stream continues, and the failure is
//! reported before any result is read.

use super::driver::{self, Event};
use crate::comm::nccl::Handles;
use crate::comm::{CommError, Progress};
use crate::device::DeviceError;
use cudarc::driver::{result, sys};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval at which the thread queries the events.
const POLL: Duration = Duration::from_millis(100);

/// The default limit of an exchange.
const LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub struct NcclWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    handles: Handles,
    progress: Arc<Progress>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// The exchanges on the stream that are not over, in order.
    pending: VecDeque<Pending>,
    /// Events to use again.
    spare: Vec<[Event; 2]>,
    /// The events of the exchange that is being enqueued.
    begun: Option<[Event; 2]>,
    limit: Duration,
    failed: Option<CommError>,
    is_over: bool,
}

#[derive(Debug)]
struct Pending {
    /// The events before and after the exchange.
    events: [Event; 2],
    /// When the thread noticed that this rank is ready for the exchange.
    reached: Option<Instant>,
}

impl NcclWatch {
    /// Watches a communicator whose context is current.
    pub fn start(handles: Handles) -> Result<NcclWatch, DeviceError> {
        let context = driver::named(result::ctx::get_current(), "cuCtxGetCurrent")?;
        let context = Context(context.unwrap_or(std::ptr::null_mut()));
        let state = State {
            pending: VecDeque::new(),
            spare: Vec::new(),
            begun: None,
            limit: LIMIT,
            failed: None,
            is_over: false,
        };
        let progress = Arc::new(Progress::default());
        let shared =
            Arc::new(Shared { handles, progress, state: Mutex::new(state), changed: Condvar::new() });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || own.watch(context));
        let thread = thread.map_err(|error| DeviceError::Call {
            device: driver::NAME,
            call: "starting a thread",
            what: error.to_string(),
        })?;
        Ok(NcclWatch { shared, thread: Some(thread) })
    }

    /// Records the event before an exchange, which the caller enqueues next.
    pub fn begin(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let spare = self.shared.lock().spare.pop();
        let events = spare.map_or_else(|| Ok::<_, DeviceError>([Event::new()?, Event::new()?]), Ok)?;
        events[0].record_in(stream)?;
        self.shared.lock().begun = Some(events);
        Ok(())
    }

    /// Records the event after the exchange.
    pub fn end(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        let events = state.begun.take().expect("an exchange was begun");
        events[1].record_in(stream)?;
        state.pending.push_back(Pending { events, reached: None });
        Ok(())
    }

    pub fn set_limit(&self, limit: Duration) {
        self.shared.lock().limit = limit;
    }

    pub fn progress(&self) -> Arc<Progress> {
        Arc::clone(&self.shared.progress)
    }

    /// Why the communicator was aborted.
    pub fn failure(&self) -> Option<CommError> {
        self.shared.lock().failed.clone()
    }
}

impl Drop for NcclWatch {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The context of the GPU.
struct Context(sys::CUcontext);

// SAFETY: contexts may be current in several threads.
unsafe impl Send for Context {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, context: Context) {
        // SAFETY: the primary context, which is retained as long as the process lives. Without it every query fails.
        let _ = unsafe { result::ctx::set_current(context.0) };
        let mut state = self.lock();
        while !state.is_over && state.failed.is_none() {
            let polled = self.poll(&mut state).and_then(|()| self.handles.check_async());
            if let Err(error) = polled {
                state.failed = Some(error);
                drop(state);
                // This may take a while. Its own error would not help: the first one is reported.
                let _ = self.handles.abort();
                return;
            }
            let waited = self.changed.wait_timeout(state, POLL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Counts the exchanges that this rank has reached and those that are over.
    fn poll(&self, state: &mut State) -> Result<(), CommError> {
        while let Some(first) = state.pending.front_mut() {
            if first.reached.is_none() && happened(&first.events[0])? {
                first.reached = Some(Instant::now());
                self.progress.reach();
            }
            let Some(reached) = first.reached else { break };
            if happened(&first.events[1])? {
                self.progress.finish();
                let done = state.pending.pop_front().expect("it was there");
                state.spare.push(done.events);
                continue;
            }
            if reached.elapsed() > state.limit {
                let what = format!(
                    "it did not end within {} s on this rank or another; set `NCCL_DEBUG=WARN` for details from NCCL",
                    state.limit.as_secs()
                );
                return Err(CommError::Call { engine: "NCCL", call: "a collective", what });
            }
            break;
        }
        Ok(())
    }
}

fn happened(event: &Event) -> Result<bool, CommError> {
    event.has_happened().map_err(|error| CommError::Call {
        engine: "NCCL",
        call: "a collective",
        what: error.to_string(),
    })
}
