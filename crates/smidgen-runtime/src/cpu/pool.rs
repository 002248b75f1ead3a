//! The threads of the CPU device: each takes the next numbered task of a parallel section.
//!
//! A step of a plan is a handful of parallel sections of a few microseconds to a few milliseconds each.
//! Waking a sleeping thread takes longer than the shortest of them, so helpers spin for about a
//! millisecond before they sleep, and a section never waits for a helper that has not joined it.
//! The thread that runs a task must not change the result, so callers divide work by shape alone. A thread runs one
//! task at a time, so a task may use the part of a workspace that belongs to its thread's number.
//! Left out: nested parallelism (a task that starts tasks runs them itself), and any queue.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Spins before a helper sleeps: about a millisecond.
const PAUSES_BEFORE_SLEEP: usize = 20_000;
/// Spins between two calls of `yield_now`.
const PAUSES_BEFORE_YIELD: usize = 500;

/// The calling thread and its helpers.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's included.
    pub fn new(threads: usize) -> io::Result<Pool> {
        let shared = Arc::new(Shared::default());
        let mut pool = Pool { shared, helpers: Vec::new() };
        for number in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("smidgen-{number}")).stack_size(1 << 20);
            pool.helpers.push(builder.spawn(move || shared.help(number))?);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work` on this thread, with its [`run_tasks`] divided over the pool. The helpers work on one section at a
    /// time. A section that another thread or a task starts during that time runs only on the thread that starts it.
    pub fn enter<R>(&self, work: impl FnOnce() -> R) -> R {
        let before = CURRENT.replace(Current { shared: Arc::as_ptr(&self.shared), threads: self.threads() });
        let _restore = Restore(before);
        work()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        for helper in self.helpers.drain(..) {
            // A helper cannot panic: it catches the panics of tasks.
            let _ = helper.join();
        }
    }
}

/// Runs tasks `0..count` on the pool that the caller has entered, and returns when all are done.
pub fn run_tasks(count: usize, task: impl Fn(usize) + Sync) {
    let current = CURRENT.get();
    if count <= 1 || current.threads == 1 {
        (0..count).for_each(task);
        return;
    }
    // SAFETY: `enter` borrows the pool while it is the current one.
    let shared = unsafe { &*current.shared };
    shared.run(count, &task);
}

/// Threads of the pool that the caller has entered; 1 outside.
pub fn current_threads() -> usize {
    CURRENT.get().threads
}

/// The number of the calling thread in its pool; 0 outside, where tasks run one by one.
pub fn current_thread() -> usize {
    NUMBER.get()
}

#[derive(Clone, Copy)]
struct Current {
    shared: *const Shared,
    threads: usize,
}

const ALONE: Current = Current { shared: std::ptr::null(), threads: 1 };

thread_local! {
    static CURRENT: Cell<Current> = const { Cell::new(ALONE) };
    static NUMBER: Cell<usize> = const { Cell::new(0) };
}

/// Restores the current pool, also when a task panics.
struct Restore(Current);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

type Task = *const (dyn Fn(usize) + Sync);

/// `state` holds the number of the section, whether it is open, and how many helpers are in it.
#[derive(Debug, Default)]
struct Shared {
    state: AtomicU64,
    /// The next task of the section.
    next: AtomicUsize,
    count: AtomicUsize,
    task: Mutex<Option<SendTask>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake_up: Condvar,
    /// Whether a section is running.
    busy: AtomicBool,
}

/// Ends a section, also when a task panics.
struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[derive(Clone, Copy, Debug)]
struct SendTask(Task);

// SAFETY: the task is `Sync`, and `run` keeps it alive until every helper has left the section.
unsafe impl Send for SendTask {}

const OPEN: u64 = 1 << 31;
const HELPERS: u64 = OPEN - 1;
const SECTION: u64 = 1 << 32;

impl Shared {
    fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        if self.busy.swap(true, Ordering::Acquire) {
            return (0..count).for_each(task);
        }
        let _busy = Busy(&self.busy);
        // SAFETY: only the lifetime is erased; the section is closed and empty before this returns.
        let erased: Task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Task>(task) };
        *self.task.lock().expect("nothing panics while it is held") = Some(SendTask(erased));
        self.next.store(0, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
        let next_section = (self.state.load(Ordering::Relaxed) / SECTION + 1) * SECTION;
        self.state.store(next_section | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
        let own = catch_unwind(AssertUnwindSafe(|| self.work(task)));
        self.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut pauses = 0;
        while self.state.load(Ordering::Acquire) & HELPERS > 0 {
            pause(&mut pauses);
        }
        let theirs = self.panicked.swap(false, Ordering::Relaxed);
        match own {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => assert!(!theirs, "a task panicked on another thread"),
        }
    }

    /// Runs tasks until none is left. A task sees a pool of one thread, so the tasks that it starts run inside it.
    fn work(&self, task: &(dyn Fn(usize) + Sync)) {
        let _restore = Restore(CURRENT.replace(ALONE));
        let count = self.count.load(Ordering::Relaxed);
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            task(index);
        }
    }

    fn help(&self, number: usize) {
        NUMBER.set(number);
        let mut seen = 0;
        loop {
            let section = self.wait_for_section(seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen = section;
            if !self.join(section) {
                continue;
            }
            let task = *self.task.lock().expect("nothing panics while it is held");
            if let Some(SendTask(task)) = task {
                // SAFETY: this helper has joined an open section, and `run` returns only after it has left.
                let task = unsafe { &*task };
                if catch_unwind(AssertUnwindSafe(|| self.work(task))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Enters a section if it is still open.
    fn join(&self, section: u64) -> bool {
        let mut state = self.state.load(Ordering::Acquire);
        while state / SECTION == section && state & OPEN != 0 {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return true,
                Err(actual) => state = actual,
            }
        }
        false
    }

    /// The number of a section other than `seen`; returns early when the pool stops.
    fn wait_for_section(&self, seen: u64) -> u64 {
        let mut pauses = 0;
        loop {
            let section = self.state.load(Ordering::Acquire) / SECTION;
            if section != seen || self.stop.load(Ordering::Relaxed) {
                return section;
            }
            if pauses < PAUSES_BEFORE_SLEEP {
                pause(&mut pauses);
                continue;
            }
            let mut asleep = self.sleep.lock().expect("nothing panics while it is held");
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            while self.state.load(Ordering::SeqCst) / SECTION == seen && !self.stop.load(Ordering::SeqCst) {
                asleep = self.wake_up.wait(asleep).expect("nothing panics while it is held");
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            drop(asleep);
            pauses = 0;
        }
    }

    fn wake(&self) {
        drop(self.sleep.lock().expect("nothing panics while it is held"));
        self.wake_up.notify_all();
    }
}

fn pause(pauses: &mut usize) {
    *pauses += 1;
    if pauses.is_multiple_of(PAUSES_BEFORE_YIELD) {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(total: &AtomicUsize, amount: usize) {
        total.fetch_add(amount, Ordering::Relaxed);
    }

    /// The helpers hold one task at a time: a second section must not replace the first one's.
    #[test]
    fn a_pool_may_be_entered_again_by_its_tasks_and_by_other_threads() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        let nested = || pool.enter(|| run_tasks(20, |_| pool.enter(|| run_tasks(50, |_| add(&total, 1)))));
        std::thread::scope(|scope| {
            scope.spawn(nested);
            scope.spawn(nested);
            nested();
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 20 * 50);
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            for count in [0, 1, 2, 7, 100, 1000] {
                let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.enter(|| {
                    run_tasks(count, |task| {
                        assert!(current_thread() < threads);
                        runs[task].fetch_add(1, Ordering::Relaxed);
                    });
                });
                assert!(
                    runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {count} tasks"
                );
            }
        }
    }

    #[test]
    fn many_short_sections_and_long_pauses() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.enter(|| run_tasks(5, |task| add(&total, task)));
            if round % 500 == 0 {
                // Long enough for the helpers to go to sleep.
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        }
        assert_eq!(total.into_inner(), 2000 * 10);
    }

    #[test]
    fn a_task_that_starts_tasks_runs_them_itself() {
        let pool = Pool::new(2).unwrap();
        let total = AtomicUsize::new(0);
        pool.enter(|| {
            run_tasks(4, |_| {
                assert_eq!(current_threads(), 1);
                run_tasks(3, |_| add(&total, 1));
            });
            assert_eq!(current_threads(), 2);
        });
        assert_eq!(total.into_inner(), 12);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_still_works() {
        let pool = Pool::new(2).unwrap();
        for bad in 0..8 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                pool.enter(|| run_tasks(8, |task| assert!(task != bad, "task {task}")));
            }));
            assert!(panic.is_err());
        }
        let total = AtomicUsize::new(0);
        pool.enter(|| run_tasks(8, |_| add(&total, 1)));
        assert_eq!(total.into_inner(), 8);
    }
}
