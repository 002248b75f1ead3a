//! A lane: one thread that runs the collectives of a plan in order, while other threads compute.
//!
//! A collective is begun with the memory that it works on and waited for by its number. All ranks begin the same
//! collectives in the same order, so one thread per rank cannot deadlock. After a failure no collective runs any more and
//! every wait returns that failure, because the ranks no longer agree on what has been exchanged.

use crate::comm::{Comm, CommError, Number, Progress as Counts, Span};
use crate::device::{BoundStep, Operand};
use smidgen_ir::{Cut, DType, Op, Shard, Storage};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// A collective of a plan with its memory.
#[derive(Debug)]
pub enum Exchange {
    /// Each span becomes its sum over ranks.
    Sum(Vec<(Span, Number)>),
    /// Each `whole` is summed over ranks, and this rank's part of the sum is added to `part`, which may be in `whole`.
    Scatter(Vec<Scattered>),
    /// Each span holds this rank's part and receives the parts of the other ranks.
    Complete(Vec<(Span, Vec<Range<usize>>)>),
    /// This rank's part is copied into the whole, which then receives the parts of the other ranks.
    Gather { own: Span, whole: Span, parts: Vec<Range<usize>> },
}

#[derive(Debug)]
pub struct Scattered {
    pub whole: Span,
    pub parts: Vec<Range<usize>>,
    pub part: Span,
}

/// The exchange of a step; `span` returns the memory of an operand.
pub fn bind_exchange(step: &BoundStep, span: impl Fn(&Operand) -> Span) -> Exchange {
    let updates = || step.updates.iter();
    match (&step.op, &step.inputs[..]) {
        (Op::AllReduce(_), _) => Exchange::Sum(updates().map(|value| (span(value), number(value))).collect()),
        (Op::ReduceScatter(rank), wholes) => {
            let shard = Shard { rank: *rank, cut: Cut::Rows };
            let scattered = wholes.iter().zip(updates()).map(|(whole, part)| Scattered {
                whole: span(whole),
                parts: whole.parts(shard),
                part: span(part),
            });
            Exchange::Scatter(scattered.collect())
        }
        (Op::AllGather(shard), inputs) => match inputs.last() {
            None => Exchange::Complete(updates().map(|value| (span(value), value.parts(*shard))).collect()),
            // The last input is this rank's part, on the device.
            Some(own) => {
                let whole = &step.outputs[0];
                Exchange::Gather { own: span(own), whole: span(whole), parts: whole.parts(*shard) }
            }
        },
        (other, _) => unreachable!("`{}` is not a collective", other.name()),
    }
}

fn number(value: &Operand) -> Number {
    match value.storage {
        Storage::Plain(DType::F64) => Number::F64,
        _ => Number::F32,
    }
}

/// # Safety
/// Both spans are valid, equally long, and do not overlap.
unsafe fn copy(from: Span, to: Span) {
    assert_eq!(from.bytes, to.bytes);
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from.pointer, to.pointer, from.bytes) };
}

/// Adds the f32 of `from` to those of `to`; if both are the same memory, nothing remains to be added.
///
/// # Safety
/// Both spans are valid and equally long, and overlap only if they are the same.
unsafe fn add(from: Span, to: Span) {
    assert_eq!(from.bytes, to.bytes);
    if from.pointer == to.pointer {
        return;
    }
    let floats = from.bytes / size_of::<f32>();
    // SAFETY: as the caller promises; plans align every value to at least an f32.
    let (from, to) = unsafe {
        let from = std::slice::from_raw_parts(from.pointer.cast::<f32>(), floats);
        (from, std::slice::from_raw_parts_mut(to.pointer.cast::<f32>(), floats))
    };
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[derive(Debug)]
pub struct Lane {
    jobs: Option<Sender<(u64, Exchange)>>,
    progress: Arc<(Mutex<Progress>, Condvar)>,
    thread: Option<JoinHandle<()>>,
    begun: u64,
    limit: Duration,
    counts: Arc<Counts>,
}

/// The default time limit for an exchange.
const LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
struct Progress {
    done: u64,
    failed: Option<CommError>,
}

impl Lane {
    pub fn start(comm: Box<dyn Comm>) -> Lane {
        let (jobs, inbox) = channel();
        let progress = Arc::new((Mutex::new(Progress::default()), Condvar::new()));
        let counts = Arc::new(Counts::default());
        let (own, own_counts) = (Arc::clone(&progress), Arc::clone(&counts));
        let thread = std::thread::Builder::new().name("exchange".into());
        let thread = thread.spawn(move || run_all(comm, &own, &inbox, &own_counts));
        Lane { jobs: Some(jobs), progress, thread: thread.ok(), begun: 0, limit: LIMIT, counts }
    }

    /// Counts the exchanges of this rank.
    pub fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }

    /// Sets the time limit for an exchange.
    pub fn set_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Begins an exchange and returns its number.
    ///
    /// # Safety
    /// All spans stay valid, and nothing else touches them, until `wait` has returned for this exchange.
    pub unsafe fn begin(&mut self, exchange: Exchange) -> u64 {
        self.begun += 1;
        let sent = self.jobs.as_ref().map(|jobs| jobs.send((self.begun, exchange)));
        if !matches!(sent, Some(Ok(()))) {
            let ended = CommError::Call { engine: "exchange", call: "send", what: "its thread ended".into() };
            lock(&self.progress.0).failed.get_or_insert(ended);
        }
        self.begun
    }

    /// Returns when the exchange with this number has finished.
    pub fn wait(&self, number: u64) -> Result<(), CommError> {
        let is_pending = |progress: &mut Progress| progress.done < number && progress.failed.is_none();
        let waited = self.progress.1.wait_timeout_while(lock(&self.progress.0), self.limit, is_pending);
        let (progress, ended) = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        if ended.timed_out() {
            let what = format!("another rank did not take part for {} s", self.limit.as_secs());
            return Err(CommError::Call { engine: "exchange", call: "a collective", what });
        }
        progress.failed.clone().map_or(Ok(()), Err)
    }

    pub fn wait_for_all(&self) -> Result<(), CommError> {
        self.wait(self.begun)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Without a sender the thread ends after its last exchange. It is joined only if nothing is pending, because a
        // pending exchange may wait for a dead rank.
        self.jobs = None;
        if lock(&self.progress.0).done == self.begun
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn run_all(
    mut comm: Box<dyn Comm>,
    progress: &(Mutex<Progress>, Condvar),
    inbox: &Receiver<(u64, Exchange)>,
    counts: &Counts,
) {
    for (number, exchange) in inbox {
        let failed = lock(&progress.0).failed.is_some();
        counts.reach();
        let result = if failed { Ok(()) } else { run(comm.as_mut(), exchange) };
        counts.finish();
        let mut now = lock(&progress.0);
        now.done = number;
        if let Err(error) = result {
            now.failed.get_or_insert(error);
        }
        progress.1.notify_all();
    }
}

fn run(comm: &mut dyn Comm, exchange: Exchange) -> Result<(), CommError> {
    let own = comm.rank();
    // SAFETY: the caller of `begin` promised that the memory is valid and that nothing else touches it.
    unsafe {
        match exchange {
            Exchange::Sum(spans) => comm.all_reduce(&spans),
            Exchange::Scatter(all) => all.into_iter().try_for_each(|Scattered { whole, parts, part }| {
                comm.reduce_scatter(whole, &parts)?;
                add(whole.part(&parts[own]), part);
                Ok(())
            }),
            Exchange::Complete(all) => {
                all.into_iter().try_for_each(|(span, parts)| comm.all_gather(span, &parts))
            }
            Exchange::Gather { own: part, whole, parts } => {
                copy(part, whole.part(&parts[own]));
                comm.all_gather(whole, &parts)
            }
        }
    }
}

fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A communicator whose sums never return and whose gathers fail.
    #[derive(Debug)]
    struct Unanswered;

    impl Comm for Unanswered {
        fn name(&self) -> String {
            "nobody".into()
        }

        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        unsafe fn all_reduce(&mut self, _: &[(Span, Number)]) -> Result<(), CommError> {
            loop {
                std::thread::park();
            }
        }

        unsafe fn reduce_scatter(&mut self, _: Span, _: &[Range<usize>]) -> Result<(), CommError> {
            Ok(())
        }

        unsafe fn all_gather(&mut self, _: Span, _: &[Range<usize>]) -> Result<(), CommError> {
            Err(CommError::Again)
        }

        unsafe fn broadcast(&mut self, _: Span, _: usize) -> Result<(), CommError> {
            Ok(())
        }

        fn barrier(&mut self) -> Result<(), CommError> {
            Ok(())
        }
    }

    #[test]
    fn an_exchange_that_nobody_answers_ends_after_the_limit() {
        let mut lane = Lane::start(Box::new(Unanswered));
        lane.set_limit(Duration::from_millis(20));
        // SAFETY: no memory is passed.
        let number = unsafe { lane.begin(Exchange::Sum(vec![])) };
        let error = lane.wait(number).unwrap_err().to_string();
        assert!(error.contains("did not take part"), "{error}");
        assert_eq!(lane.counts().counts(), (1, 0), "reached but not finished");
    }

    #[test]
    fn after_a_failure_nothing_more_is_exchanged() {
        let mut lane = Lane::start(Box::new(Unanswered));
        let mut bytes = [0u8; 8];
        let span = Span { pointer: bytes.as_mut_ptr(), bytes: bytes.len() };
        // SAFETY: the array outlives the exchanges, which have ended.
        let (failed, after) = unsafe {
            let failed = lane.begin(Exchange::Complete(vec![(span, vec![0..8, 8..8])]));
            (failed, lane.begin(Exchange::Sum(vec![(span, Number::F64)])))
        };
        assert_eq!(lane.wait(failed), Err(CommError::Again));
        assert_eq!(lane.wait(after), Err(CommError::Again), "and does not hang");
    }
}
