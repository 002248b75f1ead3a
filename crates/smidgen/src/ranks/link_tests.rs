//! Links between threads of one process, over real sockets: every rank is a thread.
//!
//! Time limits are shorter than in a run. No test measures time: a busy machine is only waited for longer.

use super::heartbeat::{OnLoss, Times};
use super::launch::{Launch, Launcher, MasterAddress};
use super::link::Link;
use super::rendezvous::{Listener, Member};
use super::wire::Message;
use crate::failure::Failure;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use smidgen_runtime::comm::Progress;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn times() -> Times {
    Times {
        opening: Duration::from_secs(8),
        patience: Duration::from_secs(2),
        beat: Duration::from_millis(100),
        silence: Duration::from_millis(1500),
        farewell: Duration::from_millis(500),
        closing: Duration::from_secs(5),
    }
}

fn member(rank: usize, size: usize) -> Member {
    Member { rank, size, job: "test".into() }
}

fn launch(rank: usize, size: usize, port: u16) -> Launch {
    let master = Some(MasterAddress { host: "127.0.0.1".into(), port, named_by: "MASTER_PORT" });
    Launch {
        rank,
        size,
        local_rank: rank,
        local_size: size,
        launcher: Launcher::Torchrun,
        master,
        job: "test".into(),
    }
}

/// A handler, and the receiver of its failures.
fn handler() -> (OnLoss, Receiver<Failure>) {
    let (sender, losses) = channel();
    (Box::new(move |failure| drop(sender.send(failure))), losses)
}

fn ignore() -> OnLoss {
    Box::new(|_| {})
}

/// A port that no other test of this process gets, and that the system gives to nobody who asks for any port.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 21_000 + (std::process::id() % 70) as u16 * 100;
    (0..1000)
        .map(|_| first + NEXT.fetch_add(1, Ordering::Relaxed) % 1000)
        .find(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
        .expect("one of a thousand ports is free")
}

/// Runs a function once per rank, each with its link and the losses that its handler gets.
pub fn as_ranks<T: Send + 'static>(
    size: usize,
    run: impl Fn(Link, Receiver<Failure>) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let port = free_port();
    // Rank 0 starts last: the others wait for it.
    let mut threads: Vec<_> = (0..size)
        .rev()
        .map(|rank| {
            let run = run.clone();
            thread::spawn(move || {
                let (on_loss, losses) = handler();
                run(Link::open(&launch(rank, size, port), times(), on_loss).unwrap(), losses)
            })
        })
        .collect();
    threads.reverse();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn small_results_reach_every_rank() {
    let results = as_ranks(4, |mut link, losses| {
        let own = format!("rank {}", link.rank()).into_bytes();
        let all = link.gather(&own).unwrap();
        link.barrier().unwrap();
        let news = link.broadcast(own).unwrap();
        // Larger than the buffer of a socket.
        let large = link.gather(&vec![link.rank() as u8; 1 << 20]).unwrap();
        assert!(large.iter().enumerate().all(|(rank, part)| *part == vec![rank as u8; 1 << 20]));
        assert_eq!(link.failure().map(|failure| failure.message), None);
        link.close().unwrap();
        // A rank that has finished is not reported as lost.
        assert!(losses.recv_timeout(times().silence * 2).is_err());
        (all, news)
    });
    let expected: Vec<Vec<u8>> = (0..4).map(|rank| format!("rank {rank}").into_bytes()).collect();
    for (all, news) in results {
        assert_eq!(all, expected);
        assert_eq!(news, b"rank 0");
    }
}

#[test]
fn ranks_that_differ_are_named_on_every_rank() {
    let messages = as_ranks(3, |mut link, _| {
        let data = if link.rank() == 2 { "other" } else { "same" };
        link.agree(&[("version", "1".into())]).unwrap();
        let failure = link.agree(&[("version", "1".into()), ("data", data.into())]).unwrap_err();
        link.close().unwrap();
        failure.message
    });
    for message in messages {
        assert!(message.contains("rank 2 differs in the data: `other`, not `same`"), "{message}");
    }
}

/// Rank 2 of 3 calls `of` while the others wait for it. Both must get the expected failure.
fn the_others_learn(of: fn(Link), expected: &'static str) {
    let results = as_ranks(3, move |mut link, losses| {
        link.set_place("step 7");
        link.set_remedy("continue with `smidgen resume RUN`");
        link.barrier().unwrap();
        if link.rank() == 2 {
            of(link);
            return None;
        }
        let waited = link.gather(b"next").unwrap_err();
        let handled = losses.recv_timeout(LIMIT).expect("the handler is called");
        assert_eq!(waited.message, handled.message);
        assert_eq!(link.failure().unwrap().message, handled.message);
        assert!(link.barrier().is_err());
        drop(link);
        // It is called only once.
        assert!(losses.recv_timeout(Duration::from_millis(300)).is_err());
        Some(handled)
    });
    for failure in results.into_iter().flatten() {
        assert!(failure.message.contains(expected), "{failure}");
        assert!(failure.hints.iter().any(|hint| hint.contains("smidgen resume")), "{failure}");
        assert_eq!(failure.exit_code(), 1);
    }
}

#[test]
fn an_abort_reaches_every_rank() {
    the_others_learn(|link| link.abort("the disk is full"), "rank 2 failed during step 7: the disk is full");
}

#[test]
fn a_rank_that_drops_its_link_has_failed() {
    the_others_learn(drop, "rank 2 failed during step 7: it ended early");
}

#[test]
fn a_rank_that_ends_before_the_others_is_named() {
    the_others_learn(|link| link.close().unwrap(), "rank 2 failed during step 7: it ended before the others");
}

/// The failures of the ranks if each has reached this many exchanges and makes no more progress.
fn learned_at_a_standstill(reached: [usize; 3], done: [usize; 3]) -> Vec<Failure> {
    as_ranks(3, move |mut link, losses| {
        let (rank, progress) = (link.rank(), Arc::new(Progress::default()));
        link.set_place("step 7");
        link.set_remedy("continue with `smidgen resume RUN`");
        link.barrier().unwrap();
        link.watch(Arc::clone(&progress), Duration::from_millis(700));
        (0..reached[rank]).for_each(|_| progress.reach());
        (0..done[rank]).for_each(|_| progress.finish());
        // Every rank sends beats, and no main thread does anything.
        losses.recv_timeout(LIMIT).expect("the handler is called")
    })
}

#[test]
fn a_rank_that_makes_no_progress_is_named() {
    for late in 0..3 {
        let mut reached = [4; 3];
        reached[late] = 3;
        for failure in learned_at_a_standstill(reached, [3; 3]) {
            let expected = format!("rank {late} makes no progress during step 7");
            assert!(failure.message.starts_with(&expected), "{failure}");
            let hints = failure.hints.join(" ");
            assert!(hints.contains("nvidia-smi") && hints.contains("smidgen resume"), "{failure}");
        }
    }
}

#[test]
fn an_exchange_that_never_ends_is_noticed() {
    for failure in learned_at_a_standstill([4; 3], [3; 3]) {
        assert!(failure.message.contains("all ranks have reached does not end during step 7"), "{failure}");
    }
}

/// Opens a link as rank 0 of 3, with a real rank 1 and a raw connection as rank 2.
fn with_a_raw_rank(act: impl FnOnce(TcpStream) -> Option<TcpStream> + Send + 'static) -> (Failure, Failure) {
    let port = free_port();
    let raw = thread::spawn(move || {
        let mut stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        };
        let version = env!("CARGO_PKG_VERSION").into();
        Message::Hello { version, job: "test".into(), rank: 2, size: 3 }.write(&mut stream).unwrap();
        while Message::read(&mut stream, 1000).unwrap() != Message::Welcome {}
        act(stream)
    });
    let one = thread::spawn(move || {
        let (on_loss, losses) = handler();
        let _link = Link::open(&launch(1, 3, port), times(), on_loss).unwrap();
        losses.recv_timeout(LIMIT).expect("rank 1 learns it")
    });
    let (on_loss, losses) = handler();
    let link = Link::open(&launch(0, 3, port), times(), on_loss).unwrap();
    // The main thread does nothing at all.
    let zero = losses.recv_timeout(LIMIT).expect("rank 0 notices");
    assert_eq!(link.failure_within(Duration::ZERO).unwrap().message, zero.message);
    let _stream = raw.join().unwrap();
    (zero, one.join().unwrap())
}

#[test]
fn a_closed_connection_means_a_dead_rank() {
    let (zero, one) = with_a_raw_rank(|_| None);
    assert_eq!(zero.message, "rank 2 died (its connection closed)");
    assert_eq!(one.message, zero.message);
}

#[test]
fn a_silent_rank_does_not_answer() {
    // Its connection stays open, as for a stopped process or a machine without power.
    let (zero, one) = with_a_raw_rank(Some);
    assert!(zero.message.starts_with("rank 2 does not answer"), "{zero}");
    assert_eq!(one.message, zero.message);
}

#[test]
fn others_notice_the_death_of_rank_0() {
    let results = as_ranks(3, |link, losses| {
        if link.rank() == 0 {
            link.sever();
            std::mem::forget(link);
            return None;
        }
        Some(losses.recv_timeout(LIMIT).expect("it is noticed").message)
    });
    assert_eq!(results[1].as_deref(), Some("rank 0 died (its connection closed)"));
    assert_eq!(results[2], results[1]);
}

/// Set for the process that [`as_a_process`] runs in: the port of rank 0.
const PORT_VARIABLE: &str = "SMIDGEN_TEST_PORT";

/// Rank 1 of the test below, which starts this test as a process. Otherwise it does nothing.
#[test]
fn as_a_process() {
    let Ok(port) = std::env::var(PORT_VARIABLE) else { return };
    let _link = Link::open(&launch(1, 2, port.parse().unwrap()), Times::default(), ignore()).unwrap();
    thread::sleep(2 * LIMIT);
}

#[test]
fn a_process_that_is_stopped_or_killed_is_noticed() {
    let Times { silence, beat, farewell, .. } = Times::default();
    assert!(silence + beat + farewell < Duration::from_secs(10), "a run waits no longer for a lost rank");
    let cases = [(Signal::SIGSTOP, "rank 1 does not answer"), (Signal::SIGKILL, "rank 1 died")];
    let threads = cases.map(|(signal, expected)| {
        thread::spawn(move || {
            let port = free_port();
            let mut process = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "ranks::link_tests::as_a_process"])
                .env(PORT_VARIABLE, port.to_string())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let (on_loss, losses) = handler();
            let _link = Link::open(&launch(0, 2, port), Times::default(), on_loss).unwrap();
            kill(Pid::from_raw(process.id() as i32), signal).unwrap();
            let loss = losses.recv_timeout(LIMIT);
            process.kill().unwrap();
            process.wait().unwrap();
            let loss = loss.expect("it is noticed");
            assert!(loss.message.starts_with(expected), "{loss}");
        })
    });
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn strangers_are_ignored_by_rank_0() {
    let port = free_port();
    let zero = thread::spawn(move || Link::open(&launch(0, 2, port), times(), ignore()).map(Link::close));
    let mut web = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    };
    web.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    // Its connection is closed without a message.
    assert_eq!(web.read(&mut [0; 10]).unwrap_or(0), 0);
    // A connection that sends nothing does not delay the ranks.
    let _silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    Link::open(&launch(1, 2, port), times(), ignore()).unwrap().close().unwrap();
    zero.join().unwrap().unwrap().unwrap();
}

#[test]
fn another_program_at_the_address_of_rank_0_is_an_error_that_names_the_variable() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH\r\n").unwrap();
        thread::sleep(Duration::from_secs(1));
    });
    let failure = Link::open(&launch(1, 2, port), times(), ignore()).unwrap_err();
    assert!(failure.message.contains("(MASTER_PORT) is not rank 0"), "{failure}");
}

#[test]
fn a_port_in_use_is_an_error() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let failure = Link::open(&launch(0, 2, port), times(), ignore()).unwrap_err();
    assert_eq!(failure.message, format!("port {port} (MASTER_PORT) is in use on this machine"));
    // Also when it listens at all addresses.
    let everywhere = MasterAddress { host: "some.host".into(), port, named_by: "MASTER_PORT" };
    let failure = Listener::bind(&everywhere).unwrap_err();
    assert!(failure.message.contains("is in use"), "{failure}");
}

#[test]
fn a_wrong_host_is_an_error() {
    let mut wrong = launch(1, 2, 1);
    wrong.master =
        Some(MasterAddress { host: "no-such-host.invalid".into(), port: 1, named_by: "MASTER_ADDR" });
    let times = Times { opening: Duration::from_millis(300), ..times() };
    let failure = Link::open(&wrong, times, ignore()).unwrap_err();
    assert!(failure.message.contains("the host of rank 0 is not found"), "{failure}");
    assert!(failure.message.contains("(MASTER_ADDR)"), "{failure}");
    wrong.master = None;
    let failure = Link::open(&wrong, times, ignore()).unwrap_err();
    assert!(failure.message.contains("`MASTER_ADDR` is not set"), "{failure}");
    assert_eq!(failure.exit_code(), 2);
}

#[test]
fn ranks_that_do_not_connect_are_named() {
    let port = free_port();
    let times = Times { opening: Duration::from_secs(2), ..times() };
    let one = thread::spawn(move || Link::open(&launch(1, 4, port), times, ignore()).unwrap_err());
    let zero = Link::open(&launch(0, 4, port), times, ignore()).unwrap_err();
    assert!(zero.message.contains("ranks 2, 3 did not connect within 2 seconds"), "{zero}");
    let one = one.join().unwrap();
    assert!(one.message.contains("ranks 2, 3 did not connect"), "{one}");
    let alone = Link::open(&launch(1, 2, free_port()), times, ignore()).unwrap_err();
    assert!(alone.message.starts_with("rank 0 does not answer at 127.0.0.1:"), "{alone}");
}

#[test]
fn ranks_of_another_number_or_version_are_refused() {
    let port = free_port();
    let zero = thread::spawn(move || Link::open(&launch(0, 2, port), times(), ignore()).unwrap_err());
    let one = Link::open(&launch(1, 3, port), times(), ignore()).unwrap_err();
    let words = "rank 1 was started as one of 3 ranks, and rank 0 as one of 2";
    assert_eq!(zero.join().unwrap().message, words);
    assert_eq!(one.message, format!("rank 0 refused rank 1: {words}"));

    let (listener, address) = Listener::anywhere().unwrap();
    let zero = thread::spawn(move || Link::serve(listener, &member(0, 2), times(), ignore()).unwrap_err());
    let (job, places) = address.split_once('@').unwrap();
    let mut stream = TcpStream::connect(places.split(',').next().unwrap()).unwrap();
    let hello =
        |rank, version: &str| Message::Hello { version: version.into(), job: job.into(), rank, size: 2 };
    hello(1, "0.0.1").write(&mut stream).unwrap();
    let answer = Message::read(&mut stream, 1000).unwrap();
    assert!(matches!(&answer, Message::Refused(why) if why.contains("0.0.1")), "{answer:?}");
    assert!(zero.join().unwrap().message.starts_with("rank 1 runs smidgen 0.0.1"));
}

#[test]
fn another_job_is_refused_and_does_not_disturb() {
    let port = free_port();
    let zero = thread::spawn(move || Link::open(&launch(0, 2, port), times(), ignore()).unwrap().close());
    let stray =
        Link::open(&Launch { job: "other".into(), ..launch(1, 2, port) }, times(), ignore()).unwrap_err();
    assert!(stray.message.contains("another job"), "{stray}");
    Link::open(&launch(1, 2, port), times(), ignore()).unwrap().close().unwrap();
    zero.join().unwrap().unwrap();
}

#[test]
fn the_address_can_be_passed_by_other_means() {
    let (listener, address) = Listener::anywhere().unwrap();
    let one = thread::spawn(move || {
        let mut link = Link::connect(&address, &member(1, 2), times(), ignore()).unwrap();
        let all = link.gather(b"1").unwrap();
        link.close().unwrap();
        all
    });
    let mut link = Link::serve(listener, &member(0, 2), times(), ignore()).unwrap();
    assert_eq!(link.gather(b"0").unwrap(), [b"0", b"1"]);
    link.close().unwrap();
    assert_eq!(one.join().unwrap(), [b"0", b"1"]);
    assert!(Link::connect("nonsense", &member(1, 2), times(), ignore()).is_err());
}

#[test]
fn ranks_that_are_not_in_step_are_noticed() {
    let results = as_ranks(2, |mut link, _| match link.rank() {
        0 => link.broadcast(vec![]).and_then(|_| link.barrier()).unwrap_err(),
        _ => link.gather(b"").unwrap_err(),
    });
    assert!(results[1].message.contains("failed: it is not in step"), "{}", results[1]);
}
