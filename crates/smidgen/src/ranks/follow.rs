//! A connection between `--ranks` and the ranks that it started: each notices the end of the other.
//!
//! A rank exits if its launcher is gone. If a rank dies, `mpiexec` kills all others before they can report which one it
//! was; the launcher knows, because the connection of that rank closed first, without a farewell.
//! Left out: communication between ranks (`link.rs`).

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The variable with the address at which the launcher listens.
pub const LAUNCHER_VARIABLE: &str = "SMIDGEN_LAUNCHER";

const FAREWELL: u8 = 1;

/// The launcher's side.
#[derive(Debug)]
pub(super) struct Watch {
    /// The value of [`LAUNCHER_VARIABLE`].
    pub address: String,
    died: Arc<Mutex<Option<usize>>>,
}

impl Watch {
    /// Listens until the process ends.
    pub fn start() -> io::Result<Watch> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?.to_string();
        let died = Arc::new(Mutex::new(None));
        let watching = Arc::clone(&died);
        thread::Builder::new().name("ranks".into()).spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let died = Arc::clone(&watching);
                // If no thread can be started the connection closes, and the rank exits as if the launcher had ended.
                let _ = thread::Builder::new().name("rank".into()).spawn(move || watch(stream, &died));
            }
        })?;
        Ok(Watch { address, died })
    }

    /// The first rank that ended without a farewell. Waits half a second for one.
    pub fn first_that_died(&self) -> Option<usize> {
        let start = Instant::now();
        loop {
            let died = *self.died.lock().unwrap_or_else(PoisonError::into_inner);
            if died.is_some() || start.elapsed() > Duration::from_millis(500) {
                return died;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn watch(mut stream: TcpStream, died: &Mutex<Option<usize>>) {
    let mut rank = [0; 4];
    if stream.read_exact(&mut rank).is_err() {
        return;
    }
    let mut last = [0];
    let said_farewell = matches!(stream.read(&mut last), Ok(1)) && last[0] == FAREWELL;
    if !said_farewell {
        let rank = u32::from_le_bytes(rank) as usize;
        died.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(rank);
    }
}

/// A rank's side. Dropping it sends a farewell: this rank ends normally, or with an error that it has printed.
#[derive(Debug)]
pub struct Following {
    stream: TcpStream,
    is_over: Arc<AtomicBool>,
}

/// Calls back if the launcher ends before this rank. `None` if this rank was not started by `--ranks`, or the launcher
/// cannot be reached.
pub fn follow_launcher(rank: usize, on_end: impl FnOnce() + Send + 'static) -> Option<Following> {
    follow(&std::env::var(LAUNCHER_VARIABLE).ok()?, rank, on_end).ok()
}

fn follow(address: &str, rank: usize, on_end: impl FnOnce() + Send + 'static) -> io::Result<Following> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(&(rank as u32).to_le_bytes())?;
    let mut reader = stream.try_clone()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let this_rank_ended = Arc::clone(&is_over);
    thread::Builder::new().name("launcher".into()).spawn(move || {
        // The launcher never sends anything, so this returns when one of the two ends.
        let _ = reader.read(&mut [0]);
        if !this_rank_ended.load(Ordering::SeqCst) {
            on_end();
        }
    })?;
    Ok(Following { stream, is_over })
}

impl Drop for Following {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        let _ = self.stream.write_all(&[FAREWELL]);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn the_first_rank_that_ends_without_a_farewell_has_died() {
        let watch = Watch::start().unwrap();
        let well = follow(&watch.address, 0, || panic!("the launcher lives")).unwrap();
        let mut others: Vec<TcpStream> =
            (1..4).map(|_| TcpStream::connect(&watch.address).unwrap()).collect();
        for (stream, rank) in others.iter_mut().zip(1u32..) {
            stream.write_all(&rank.to_le_bytes()).unwrap();
        }
        drop(well);
        assert_eq!(watch.first_that_died(), None);
        drop(others.remove(1));
        assert_eq!(watch.first_that_died(), Some(2));
        drop(others);
        assert_eq!(watch.first_that_died(), Some(2));
    }

    #[test]
    fn ranks_notice_the_end_of_their_launcher() {
        let launcher = TcpListener::bind("127.0.0.1:0").unwrap();
        let (sender, ends) = channel();
        let address = launcher.local_addr().unwrap().to_string();
        let following = follow(&address, 3, move || sender.send(()).unwrap()).unwrap();
        let (mut stream, _) = launcher.accept().unwrap();
        let mut rank = [0; 4];
        stream.read_exact(&mut rank).unwrap();
        assert_eq!(u32::from_le_bytes(rank), 3);
        drop(stream);
        ends.recv_timeout(LIMIT).unwrap();
        drop(following);
    }
}
