//! The threads behind a link: they read messages, send heartbeats, and notice a rank that is lost.
//!
//! Every rank but 0 has one connection, to rank 0, which has one to each. A reader thread per connection stores
//! incoming messages; one heartbeat thread sends a beat each second and checks when each peer was last heard. None of
//! them depends on the main thread, which may compute or wait inside a collective for any time.
//! Only the first loss is reported. Rank 0 passes it on, and the heartbeat thread of every rank calls the handler once.
//! Beats have the number of tensor exchanges that a rank has reached, so that rank 0 finds one that makes no progress
//! (`standstill.rs`). Left out: what the handler does.

use super::standstill::{Counts, Standstill};
use super::wire::{Call, Loss, MOST_BYTES, Message};
use crate::failure::Failure;
use smidgen_runtime::comm::Progress;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Called when a rank is lost.
pub type OnLoss = Box<dyn FnOnce(Failure) + Send>;

/// Time limits and intervals.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// For all ranks to connect: they may start minutes apart.
    pub opening: Duration,
    /// A wait of this long is shown to the user.
    pub patience: Duration,
    /// Between two beats of a rank.
    pub beat: Duration,
    /// A rank that is silent for this long is lost.
    pub silence: Duration,
    /// For the message about a lost rank to reach everyone before the handler is called.
    pub farewell: Duration,
    /// For the other ranks to end after rank 0 has finished.
    pub closing: Duration,
}

impl Default for Times {
    fn default() -> Times {
        Times {
            opening: Duration::from_secs(600),
            patience: Duration::from_secs(5),
            beat: Duration::from_secs(1),
            silence: Duration::from_secs(6),
            farewell: Duration::from_secs(1),
            closing: Duration::from_secs(60),
        }
    }
}

/// Another rank, and the connection to it.
#[derive(Debug)]
pub(super) struct Peer {
    pub rank: usize,
    stream: TcpStream,
    writer: Mutex<TcpStream>,
}

/// What was received from a peer.
#[derive(Debug)]
struct Inbox {
    /// Call, its number and the peer's bytes for it.
    data: VecDeque<(Call, u64, Vec<u8>)>,
    last_heard: Instant,
    /// It sent that it has finished.
    has_closed: bool,
    /// Its connection has ended.
    is_gone: bool,
    counts: Counts,
}

#[derive(Debug, Default)]
struct State {
    inboxes: Vec<Inbox>,
    lost: Option<(usize, Loss)>,
    failure: Option<Failure>,
    /// This rank has closed or aborted, so that losses no longer matter.
    is_over: bool,
    /// What this rank is doing, for messages.
    place: String,
    remedy: Option<String>,
    /// Counts the tensor exchanges of this rank.
    progress: Option<Arc<Progress>>,
    standstill: Option<Standstill>,
}

impl State {
    fn own_counts(&self) -> Counts {
        let (reached, done) = self.progress.as_ref().map_or((0, 0), |progress| progress.counts());
        Counts { reached, done }
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    pub rank: usize,
    pub peers: Vec<Peer>,
    pub times: Times,
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Starts the threads.
    pub fn start(
        rank: usize,
        connections: Vec<(usize, TcpStream)>,
        times: Times,
        on_loss: OnLoss,
    ) -> io::Result<Arc<Shared>> {
        let mut peers = Vec::new();
        for (rank, stream) in connections {
            stream.set_nodelay(true)?;
            stream.set_read_timeout(None)?;
            // A peer that accepts no bytes for this long counts as silent.
            stream.set_write_timeout(Some(times.silence))?;
            peers.push(Peer { rank, writer: Mutex::new(stream.try_clone()?), stream });
        }
        let last_heard = Instant::now();
        let inbox = |_| Inbox {
            data: VecDeque::new(),
            last_heard,
            has_closed: false,
            is_gone: false,
            counts: Counts::default(),
        };
        let state = State { inboxes: peers.iter().map(inbox).collect(), ..State::default() };
        let shared =
            Arc::new(Shared { rank, peers, times, state: Mutex::new(state), changed: Condvar::new() });
        for peer in 0..shared.peers.len() {
            let shared = Arc::clone(&shared);
            thread::Builder::new().name(format!("rank {peer}")).spawn(move || shared.read_from(peer))?;
        }
        let beating = Arc::clone(&shared);
        thread::Builder::new().name("heartbeat".into()).spawn(move || beating.beat(on_loss))?;
        Ok(shared)
    }

    /// Sends to a peer, which is lost if that fails.
    pub fn send(&self, peer: usize, message: &Message) -> Result<(), Failure> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let sent = message.write(&mut *lock(&self.peers[peer].writer));
        let loss = match sent {
            Ok(()) => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Loss::Silent
            }
            Err(error) if error.kind() == io::ErrorKind::Other => Loss::Aborted(error.to_string()),
            Err(_) => Loss::Died,
        };
        Err(self.lose(self.peers[peer].rank, loss))
    }

    /// Waits for a peer's bytes for a call.
    pub fn receive(&self, peer: usize, call: Call, number: u64) -> Result<Vec<u8>, Failure> {
        let mut state = lock(&self.state);
        loop {
            let inbox = &mut state.inboxes[peer];
            let rank = self.peers[peer].rank;
            // Data that came before a loss is valid: the call was complete.
            if let Some((theirs, count, bytes)) = inbox.data.pop_front() {
                if (theirs, count) == (call, number) {
                    return Ok(bytes);
                }
                drop(state);
                let words = format!("it is not in step: {theirs:?} {count} instead of {call:?} {number}");
                return Err(self.lose(rank, Loss::Aborted(words)));
            }
            let has_closed = inbox.has_closed;
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if has_closed {
                drop(state);
                return Err(self.lose(rank, Loss::Aborted("it ended before the others".into())));
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that a rank is lost, unless another one was lost before. Returns the failure of the first.
    pub fn lose(&self, rank: usize, loss: Loss) -> Failure {
        let mut state = lock(&self.state);
        if let Some(failure) = &state.failure {
            return failure.clone();
        }
        let failure = describe(rank, &loss, &state, self.times);
        if !state.is_over {
            state.failure = Some(failure.clone());
            state.lost = Some((rank, loss));
            self.changed.notify_all();
        }
        failure
    }

    pub fn failure(&self) -> Option<Failure> {
        lock(&self.state).failure.clone()
    }

    /// Waits for a loss to be noticed.
    pub fn failure_within(&self, time: Duration) -> Option<Failure> {
        self.wait(time, |state| state.failure.is_some());
        self.failure()
    }

    pub fn set_place(&self, place: String) {
        lock(&self.state).place = place;
    }

    pub fn set_remedy(&self, remedy: String) {
        lock(&self.state).remedy = Some(remedy);
    }

    /// From now on, a rank that keeps the others waiting in tensor exchanges for longer than the limit is lost.
    pub fn watch(&self, progress: Arc<Progress>, limit: Duration) {
        let mut state = lock(&self.state);
        (state.progress, state.standstill) = (Some(progress), Some(Standstill::new(limit)));
    }

    /// The rank that makes no progress, if all ranks are still connected. Only rank 0 looks for one.
    fn find_standstill(&self, now: Instant) -> Option<(usize, Loss)> {
        if self.rank != 0 {
            return None;
        }
        let mut state = lock(&self.state);
        if state.inboxes.iter().any(|inbox| inbox.has_closed || inbox.is_gone) {
            return None;
        }
        let others = state.inboxes.iter().map(|inbox| inbox.counts);
        let counts: Vec<Counts> = std::iter::once(state.own_counts()).chain(others).collect();
        let (at, loss) = state.standstill.as_mut()?.look(&counts, now)?;
        Some((if at == 0 { 0 } else { self.peers[at - 1].rank }, loss))
    }

    /// From now on, nothing that peers do is a loss. Returns whether this was called before.
    pub fn end(&self) -> bool {
        let mut state = lock(&self.state);
        self.changed.notify_all();
        std::mem::replace(&mut state.is_over, true)
    }

    /// Waits until every peer's connection has ended.
    pub fn wait_until_gone(&self, time: Duration) {
        self.wait(time, |state| state.inboxes.iter().all(|inbox| inbox.is_gone));
    }

    /// Waits until every peer has finished, or a rank is lost. Returns the ranks that have not finished.
    pub fn wait_until_closed(&self, time: Duration) -> Vec<usize> {
        self.wait(time, |state| {
            state.failure.is_some() || state.inboxes.iter().all(|inbox| inbox.has_closed)
        });
        let state = lock(&self.state);
        let open = self.peers.iter().zip(&state.inboxes).filter(|(_, inbox)| !inbox.has_closed);
        open.map(|(peer, _)| peer.rank).collect()
    }

    /// Closes the connections, which ends the reader threads.
    pub fn disconnect(&self) {
        for peer in &self.peers {
            let _ = peer.stream.shutdown(Shutdown::Both);
        }
    }

    /// Sends to every peer that is still connected except one, and ignores errors.
    pub fn send_to_all(&self, message: &Message, except: Option<usize>) {
        for (at, peer) in self.peers.iter().enumerate() {
            if Some(peer.rank) != except && !lock(&self.state).inboxes[at].is_gone {
                let _ = message.write(&mut *lock(&peer.writer));
            }
        }
    }

    /// Closes the sending direction: peers see the end after the last message.
    pub fn finish_sending(&self) {
        for peer in &self.peers {
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
    }

    fn wait(&self, time: Duration, is_over: impl Fn(&State) -> bool) {
        let state = lock(&self.state);
        let waited = self.changed.wait_timeout_while(state, time, |state| !is_over(state));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// The thread that reads one connection.
    fn read_from(&self, at: usize) {
        let peer = &self.peers[at];
        let mut reader = PeerReader { shared: self, at };
        let loss = loop {
            match Message::read(&mut reader, MOST_BYTES) {
                Ok(Message::Data { call, number, bytes }) => {
                    lock(&self.state).inboxes[at].data.push_back((call, number, bytes));
                    self.changed.notify_all();
                }
                Ok(Message::Beat { reached, done }) => {
                    lock(&self.state).inboxes[at].counts = Counts { reached, done };
                }
                Ok(Message::Lost { rank, loss }) => break Some((rank as usize, loss)),
                Ok(Message::Close) => break None,
                Ok(_) => {}
                Err(_) => break Some((peer.rank, Loss::Died)),
            }
        };
        match loss {
            Some((rank, loss)) => drop(self.lose(rank, loss)),
            None => lock(&self.state).inboxes[at].has_closed = true,
        }
        // The other side waits for this before it exits: it shows that everything was read.
        let _ = peer.stream.shutdown(Shutdown::Both);
        lock(&self.state).inboxes[at].is_gone = true;
        self.changed.notify_all();
    }

    /// The heartbeat thread.
    fn beat(&self, on_loss: OnLoss) {
        let tick = self.times.beat / 4;
        let (mut awake, mut beaten) = (Instant::now(), Instant::now());
        loop {
            self.wait(tick, |state| state.failure.is_some() || state.is_over);
            let (is_over, lost) = {
                let state = lock(&self.state);
                (state.is_over, state.failure.clone().zip(state.lost.clone()))
            };
            if let Some((failure, (rank, loss))) = lost {
                if self.rank == 0 {
                    let except = (loss == Loss::Silent).then_some(rank);
                    self.send_to_all(&Message::Lost { rank: rank as u32, loss }, except);
                    self.finish_sending();
                    self.wait_until_gone(self.times.farewell);
                }
                return on_loss(failure);
            }
            if is_over {
                return;
            }
            let now = Instant::now();
            if now - awake > self.times.silence / 2 {
                // This process was stopped, or its machine slept, so it could not hear the others.
                lock(&self.state).inboxes.iter_mut().for_each(|inbox| inbox.last_heard = now);
            }
            awake = now;
            if now - beaten >= self.times.beat {
                beaten = now;
                let Counts { reached, done } = lock(&self.state).own_counts();
                for peer in &self.peers {
                    // If it is locked, another message is being sent, which serves as a beat.
                    if let Ok(mut writer) = peer.writer.try_lock() {
                        // The reader thread notices a closed connection.
                        let _ = Message::Beat { reached, done }.write(&mut *writer);
                    }
                }
            }
            let silent = lock(&self.state).inboxes.iter().position(|inbox| {
                !inbox.has_closed
                    && !inbox.is_gone
                    && now.saturating_duration_since(inbox.last_heard) > self.times.silence
            });
            if let Some(at) = silent {
                self.lose(self.peers[at].rank, Loss::Silent);
            } else if let Some((rank, loss)) = self.find_standstill(now) {
                self.lose(rank, loss);
            }
        }
    }
}

/// Reads a connection and records when bytes arrive.
struct PeerReader<'a> {
    shared: &'a Shared,
    at: usize,
}

impl Read for PeerReader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = (&self.shared.peers[self.at].stream).read(bytes)?;
        lock(&self.shared.state).inboxes[self.at].last_heard = Instant::now();
        Ok(count)
    }
}

fn describe(rank: usize, loss: &Loss, state: &State, times: Times) -> Failure {
    let during = if state.place.is_empty() { String::new() } else { format!(" during {}", state.place) };
    let (message, hint) = match loss {
        Loss::Died => (
            format!("rank {rank} died{during} (its connection closed)"),
            Some(format!(
                "the output of rank {rank} may say why; `dmesg` shows a process that ran out of memory"
            )),
        ),
        Loss::Silent => (
            format!("rank {rank} does not answer{during} (nothing came for {} s)", times.silence.as_secs()),
            Some(format!("the process of rank {rank} is stopped, or its machine or network is down")),
        ),
        Loss::Behind(seconds) => (
            format!(
                "rank {rank} makes no progress{during} (it answers, and the others have waited for it for {seconds} s)"
            ),
            Some(format!(
                "a GPU or a file system of rank {rank} hangs: `nvidia-smi` and `dmesg` on its machine may say why"
            )),
        ),
        Loss::Stalled(seconds) => (
            format!("an exchange that all ranks have reached does not end{during} (after {seconds} s)"),
            Some(
                "the network between the machines or NCCL hangs: `NCCL_DEBUG=WARN` makes NCCL print why"
                    .into(),
            ),
        ),
        Loss::Aborted(reason) => (format!("rank {rank} failed{during}: {reason}"), None),
    };
    Failure::ranks(message).hint_if_some(hint).hint_if_some(state.remedy.as_ref())
}

/// Ignores that another thread panicked: it cannot have left the state half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
