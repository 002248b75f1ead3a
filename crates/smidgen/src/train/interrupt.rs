//! Ctrl-C and SIGTERM: the first finishes the step and saves its state, the second quits at once.
//!
//! The handler is installed only while steps run: before that there is nothing to save, and a signal ends the program
//! as usual. A run that ignores hangups (`nohup`) keeps the default handling of all signals, because the handler
//! cannot distinguish them; a killed run still resumes bit for bit.

use crate::console::progress::say;
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code that shells report for a program ended by Ctrl-C.
const ENDED_BY_SIGNAL: i32 = 130;

#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Installs the handler. If that fails, signals end the program as usual.
    pub fn listen() -> Interrupt {
        let interrupt = Interrupt::default();
        if hangup_is_ignored() {
            return interrupt;
        }
        let requested = Arc::clone(&interrupt.0);
        let handler = move || {
            if requested.swap(true, Ordering::SeqCst) {
                // Files are written completely or not at all, so there is nothing to clean up.
                process::exit(ENDED_BY_SIGNAL);
            }
            say("finishing the step and saving; press Ctrl-C again to quit now");
        };
        let _ = ctrlc::set_handler(handler);
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

fn hangup_is_ignored() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores_hangup(&status))
}

/// `SigIgn` is a mask in hexadecimal whose lowest bit is signal 1, the hangup.
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_read_as_the_kernel_writes_it() {
        assert!(ignores_hangup("Name:\tx\nSigIgn:\t0000000000001001\n"));
        assert!(!ignores_hangup("SigBlk:\t0000000000000001\nSigIgn:\t0000000000001000\n"));
        assert!(!ignores_hangup(""));
    }
}
