//! Signals that ask the program to end, and the one that a file size limit sends.
//!
//! A handler may do next to nothing, so it writes the number of its signal into a pipe, and a thread calls the
//! program's function. SIGINT and SIGTERM are always handled, even where a shell that starts a background job ignores
//! them. SIGHUP is handled unless it is ignored already: `nohup` asks for that.
//! Left out: what the program does about a signal.

use std::io::{self, Read};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// A request to end, by the signal that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndRequest {
    /// SIGINT: Ctrl-C.
    Interrupt,
    /// SIGTERM: `kill`, systemd, Slurm.
    Terminate,
    /// SIGHUP: the terminal was closed.
    Hangup,
}

const REQUESTS: [(libc::c_int, EndRequest); 3] = [
    (libc::SIGINT, EndRequest::Interrupt),
    (libc::SIGTERM, EndRequest::Terminate),
    (libc::SIGHUP, EndRequest::Hangup),
];

/// The pipe that the handler writes to; -1 until there is one.
static PIPE: AtomicI32 = AtomicI32::new(-1);

/// Calls `act` in a thread of its own for every request to end. A process can do this once.
pub fn on_end_request(mut act: impl FnMut(EndRequest) + Send + 'static) -> io::Result<()> {
    let (mut reader, writer) = io::pipe()?;
    set_nonblocking(&writer)?;
    let listen = move || {
        let mut number = [0];
        while reader.read_exact(&mut number).is_ok() {
            let request = REQUESTS.iter().find(|(signal, _)| *signal == libc::c_int::from(number[0]));
            request.into_iter().for_each(|(_, request)| act(*request));
        }
    };
    if PIPE.load(Ordering::SeqCst) != -1 {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "signals are handled already"));
    }
    std::thread::Builder::new().name("signals".into()).spawn(listen)?;
    // Open as long as the process: a handler may run at any time.
    PIPE.store(writer.into_raw_fd(), Ordering::SeqCst);
    for (signal, request) in REQUESTS {
        if request != EndRequest::Hangup || !is_ignored(signal)? {
            set_action(signal, write_number as *const () as libc::sighandler_t)?;
        }
    }
    Ok(())
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) fail with an error instead of killing the process.
pub fn make_file_limits_errors() {
    // A failure leaves the signal as it was.
    let _ = set_action(libc::SIGXFSZ, libc::SIG_IGN);
}

/// Only calls that are allowed in a handler; a full pipe already holds enough requests.
extern "C" fn write_number(signal: libc::c_int) {
    let number = signal as u8;
    // SAFETY: `errno` belongs to this thread, and `write` reads one byte that lives until it returns.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(PIPE.load(Ordering::SeqCst), (&raw const number).cast(), 1);
        *errno = before;
    }
}

fn is_ignored(signal: libc::c_int) -> io::Result<bool> {
    // SAFETY: all-zero bytes are a valid `sigaction`, and the call only writes to it.
    let now = unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        check(libc::sigaction(signal, std::ptr::null(), &raw mut now))?;
        now
    };
    Ok(now.sa_sigaction == libc::SIG_IGN)
}

fn set_action(signal: libc::c_int, action: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid `sigaction`; the handler makes only calls that are allowed in one.
    unsafe {
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = action;
        new.sa_flags = libc::SA_RESTART;
        libc::sigemptyset(&raw mut new.sa_mask);
        check(libc::sigaction(signal, &raw const new, std::ptr::null_mut()))
    }
}

fn set_nonblocking(file: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the calls have no pointers.
    unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        check(flags)?;
        check(libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK))
    }
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
