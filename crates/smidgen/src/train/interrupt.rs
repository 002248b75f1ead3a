//! Ctrl-C and SIGTERM: the first finishes the step and saves its state, the second quits at once.
//!
//! The handler is installed only while steps run: before that there is nothing to save, and a signal ends the program
//! as usual. Under `nohup` a hangup stays ignored, and the other signals save as everywhere.

use crate::console::progress::say;
use smidgen_runtime::signals::{EndRequest, on_end_request};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The exit code that shells report for a program ended by Ctrl-C.
const ENDED_BY_SIGNAL: i32 = 130;

/// systemd and Slurm signal every process of a run, and its launcher passes its own signal on: what arrives within this
/// time is one request.
const SAME_REQUEST: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Installs the handler. If that fails, signals end the program as usual.
    pub fn listen() -> Interrupt {
        let interrupt = Interrupt::default();
        let (requested, mut requests) = (Arc::clone(&interrupt.0), Requests::default());
        let handler = move |request| match requests.see(request, Instant::now()) {
            Answer::Save => {
                requested.store(true, Ordering::SeqCst);
                say("finishing the step and saving; press Ctrl-C again to quit now");
            }
            Answer::Nothing => {}
            // Files are written completely or not at all, so there is nothing to clean up.
            Answer::Quit => process::exit(ENDED_BY_SIGNAL),
        };
        let _ = on_end_request(handler);
        interrupt
    }

    /// Handles no signals.
    pub fn never() -> Interrupt {
        Interrupt::default()
    }

    /// Asks the run to end after the current step.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The first request, with its time.
#[derive(Debug, Default)]
struct Requests(Option<(EndRequest, Instant)>);

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Save,
    Nothing,
    Quit,
}

impl Requests {
    fn see(&mut self, request: EndRequest, now: Instant) -> Answer {
        match self.0 {
            None => {
                self.0 = Some((request, now));
                Answer::Save
            }
            Some((EndRequest::Terminate, first))
                if request == EndRequest::Terminate && now.duration_since(first) < SAME_REQUEST =>
            {
                Answer::Nothing
            }
            Some(_) => Answer::Quit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_a_launcher_passes_on_is_the_same_request() {
        let first = Instant::now();
        let answers = |requests: &[(EndRequest, u64)]| -> Vec<Answer> {
            let mut seen = Requests::default();
            let at = |ms: u64| first + Duration::from_millis(ms);
            requests.iter().map(|(request, ms)| seen.see(*request, at(*ms))).collect()
        };
        let (interrupt, terminate) = (EndRequest::Interrupt, EndRequest::Terminate);
        let twice = answers(&[(terminate, 0), (terminate, 10), (terminate, 20), (terminate, 1200)]);
        assert_eq!(twice, [Answer::Save, Answer::Nothing, Answer::Nothing, Answer::Quit]);
        assert_eq!(answers(&[(interrupt, 0), (interrupt, 10)]), [Answer::Save, Answer::Quit]);
        assert_eq!(answers(&[(interrupt, 0), (terminate, 10)]), [Answer::Save, Answer::Quit]);
        assert_eq!(answers(&[(terminate, 0), (interrupt, 10)]), [Answer::Save, Answer::Quit]);
    }
}
