//! How ranks find each other: rank 0 listens, the others connect, and everyone waits until all are connected.
//!
//! Ranks may start minutes apart, so the others keep trying, and show that they wait after a while. The first message
//! has the version, the job, the rank and the number of ranks; rank 0 refuses one that does not match, with a reason.
//! Rank 0 ignores programs that are not ranks; another program at the address of rank 0 is an error.
//! Left out: the address of rank 0, which comes from `launch` or MPI.

use super::heartbeat::Times;
use super::launch::MasterAddress;
use super::wire::{Message, ReadError};
use crate::console::progress::say;
use crate::failure::Failure;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The first message is not longer than this.
const HELLO_BYTES: usize = 4096;

/// How long the lookup of an unknown host is repeated: a name service may start late, but a wrong name stays wrong.
const NAME_TIME: Duration = Duration::from_secs(10);

/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(200);

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The identity of a rank.
#[derive(Clone, Debug)]
pub struct Member {
    pub rank: usize,
    pub size: usize,
    /// Equal for all ranks of a job.
    pub job: String,
}

/// Rank 0, listening.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    place: String,
    named_by: Option<&'static str>,
    /// A new name for the job, if the launcher has none.
    job: Option<String>,
}

impl Listener {
    /// Listens at the address from the launcher.
    pub fn bind(master: &MasterAddress) -> Result<Listener, Failure> {
        let MasterAddress { host, port, named_by } = master;
        let place = format!("{host}:{port}");
        // At all addresses, because the host name may resolve to another address here than on the other machines. A
        // loopback address is only for ranks of this machine.
        let is_local = host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        let socket =
            if is_local { TcpListener::bind((host.as_str(), *port)) } else { bind_everywhere(*port) };
        let socket = socket.map_err(|error| {
            let failure = match error.kind() {
                io::ErrorKind::AddrInUse => Failure::ranks(format!(
                    "port {port} ({named_by}) is in use on this machine"
                ))
                .hint(format!("another run may be using it: choose another port ({named_by}) for all ranks")),
                _ => Failure::ranks(error).context(format!("rank 0 cannot listen at {place} ({named_by})")),
            };
            failure.hint_if_some((*port < 1024).then_some("ports below 1024 need privileges"))
        })?;
        Ok(Listener { socket, place, named_by: Some(named_by), job: None })
    }

    /// Listens at a free port. Returns also the address for [`super::link::Link::connect`], which includes the job's
    /// name.
    pub fn anywhere() -> Result<(Listener, String), Failure> {
        let listen = || {
            let socket = bind_everywhere(0)?;
            let port = socket.local_addr()?.port();
            Ok((socket, port))
        };
        let (socket, port) =
            listen().map_err(|error: io::Error| Failure::ranks(error).context("rank 0 cannot listen"))?;
        let places: Vec<String> =
            local_addresses().iter().map(|ip| SocketAddr::new(*ip, port).to_string()).collect();
        let place = places.join(",");
        let job = new_job();
        let address = format!("{job}@{place}");
        Ok((Listener { socket, place, named_by: None, job: Some(job) }, address))
    }

    /// Waits for all other ranks. Returns their connections in the order of ranks.
    pub(super) fn accept(self, member: &Member, times: Times) -> Result<Vec<(usize, TcpStream)>, Failure> {
        let member =
            &Member { job: self.job.clone().unwrap_or_else(|| member.job.clone()), ..member.clone() };
        let failed = |error: io::Error| {
            Failure::ranks(error).context(format!("rank 0 cannot listen at {}", self.place))
        };
        self.socket.set_nonblocking(true).map_err(failed)?;
        let (start, mut said, mut last_message) = (Instant::now(), false, Instant::now());
        let (sender, arrivals) = channel();
        let mut present: Vec<Option<TcpStream>> = (0..member.size).map(|_| None).collect();
        loop {
            self.accept_connections(&sender, times);
            if let Err(failure) = admit(&arrivals, member, &mut present) {
                refuse_all(&mut present, &failure.message);
                return Err(failure);
            }
            let missing: Vec<usize> = (1..member.size).filter(|rank| present[*rank].is_none()).collect();
            if missing.is_empty() {
                // If one has died meanwhile, the wait continues.
                send_to_present(&mut present, &Message::Welcome);
                if present.iter().skip(1).all(Option::is_some) {
                    return Ok((0..)
                        .zip(present)
                        .filter_map(|(rank, stream)| Some((rank, stream?)))
                        .collect());
                }
                continue;
            }
            if start.elapsed() > times.opening {
                let words =
                    format!("{} did not connect within {}", ranks_text(&missing), time_text(times.opening));
                refuse_all(&mut present, &words);
                return Err(Failure::ranks(words)
                    .context(format!("rank 0 waits at {}", self.place))
                    .hint("look at their output; every rank must be started, and must reach rank 0 over the network")
                    .hint_if_some(self.named_by.map(|names| format!("{names} say where rank 0 is"))));
            }
            if !said && start.elapsed() > times.patience {
                said = true;
                say(&format!("waiting for {} of {} at {}", ranks_text(&missing), member.size, self.place));
            }
            if last_message.elapsed() > times.beat {
                last_message = Instant::now();
                send_to_present(&mut present, &Message::Waiting);
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Accepts new connections. Each has a thread that reads its first message, so that a silent one delays nobody.
    fn accept_connections(&self, sender: &Sender<Arrival>, times: Times) {
        while let Ok((stream, from)) = self.socket.accept() {
            let sender = sender.clone();
            let greet = move || {
                let mut stream = stream;
                let hello = stream
                    .set_nonblocking(false)
                    .and_then(|()| stream.set_read_timeout(Some(times.silence)))
                    .and_then(|()| stream.set_write_timeout(Some(times.silence)))
                    .map_err(ReadError::Io)
                    .and_then(|()| Message::read(&mut stream, HELLO_BYTES));
                let _ = sender.send(Arrival { stream, from, hello: hello.ok() });
            };
            // If no thread can be started the connection closes, and the other side tries again.
            let _ = thread::Builder::new().name("greeting".into()).spawn(greet);
        }
    }
}

/// A new connection, with its first message if it was one of ours.
struct Arrival {
    stream: TcpStream,
    from: SocketAddr,
    hello: Option<Message>,
}

/// Admits the ranks that have connected. A rank of this job that does not match is an error for all.
fn admit(
    arrivals: &Receiver<Arrival>,
    member: &Member,
    present: &mut [Option<TcpStream>],
) -> Result<(), Failure> {
    while let Ok(Arrival { mut stream, from, hello }) = arrivals.try_recv() {
        let Some(Message::Hello { version, job, rank, size }) = hello else {
            say(&format!("ignored a connection from {} that is not a rank", from.ip()));
            continue;
        };
        if job != member.job {
            let words = format!("rank 0 belongs to another job (`{}`, not `{job}`)", member.job);
            let _ = Message::Refused(words).write(&mut stream);
            continue;
        }
        let (rank, size) = (rank as usize, size as usize);
        let wrong = if version != VERSION {
            Some(format!("rank {rank} runs smidgen {version}, and rank 0 runs {VERSION}"))
        } else if size != member.size {
            Some(format!(
                "rank {rank} was started as one of {size} ranks, and rank 0 as one of {}",
                member.size
            ))
        } else if rank == 0 || rank >= size {
            Some(format!("a process at {} says that it is rank {rank} of {size}, which is taken", from.ip()))
        } else if present[rank].is_some() {
            Some(format!("two processes say that they are rank {rank} of {size}; one is at {}", from.ip()))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            let _ = Message::Refused(wrong.clone()).write(&mut stream);
            return Err(Failure::ranks(wrong));
        }
        present[rank] = Message::Waiting.write(&mut stream).is_ok().then_some(stream);
    }
    Ok(())
}

/// Sends to all connected ranks, and removes those whose connection has ended.
fn send_to_present(present: &mut [Option<TcpStream>], message: &Message) {
    for place in present {
        let is_gone = place.as_mut().is_some_and(|stream| message.write(stream).is_err());
        if is_gone {
            *place = None;
        }
    }
}

fn refuse_all(present: &mut [Option<TcpStream>], why: &str) {
    send_to_present(present, &Message::Refused(why.to_owned()));
}

/// Connects to rank 0 at one of these addresses, and waits until all ranks are connected.
pub(super) fn connect(
    places: &str,
    named_by: Option<&'static str>,
    member: &Member,
    times: Times,
) -> Result<TcpStream, Failure> {
    let start = Instant::now();
    let mut said = false;
    let name = || named_by.map(|names| format!(" ({names})")).unwrap_or_default();
    loop {
        let mut last = String::new();
        for place in places.split(',') {
            match attempt(place, member, times) {
                Ok(stream) => return Ok(stream),
                Err(NotJoined::Refused(why)) => {
                    return Err(Failure::ranks(format!("rank 0 refused rank {}: {why}", member.rank)));
                }
                // Of several addresses only one needs to be rank 0's.
                Err(NotJoined::Stranger) if !places.contains(',') => {
                    return Err(Failure::ranks(format!("the program at {place}{} is not rank 0", name()))
                        .hint("another program has that port: choose another one for all ranks"));
                }
                Err(NotJoined::Stranger) => last = "another program has that port".into(),
                Err(NotJoined::NoName(error)) if start.elapsed() > NAME_TIME.min(times.opening) => {
                    return Err(Failure::ranks(format!(
                        "the host of rank 0 is not found: {place}{}: {error}",
                        name()
                    ))
                    .hint_if_some(named_by.map(|names| {
                        format!("{names} must name the machine of rank 0 so that this machine finds it")
                    })));
                }
                Err(NotJoined::NoName(error)) | Err(NotJoined::Failed(error)) => last = error,
            }
        }
        if start.elapsed() > times.opening {
            let limit = time_text(times.opening);
            return Err(Failure::ranks(format!(
                "rank 0 does not answer at {places}{} for {limit}: {last}",
                name()
            ))
            .hint("look at the output of rank 0; a firewall between the machines has the same effect"));
        }
        if !said && start.elapsed() > times.patience {
            said = true;
            say(&format!("waiting for rank 0 at {places}{}: {last}", name()));
        }
        thread::sleep(PAUSE);
    }
}

/// Why an attempt to connect failed.
enum NotJoined {
    /// The host name is not found.
    NoName(String),
    Failed(String),
    /// Another program listens there.
    Stranger,
    Refused(String),
}

fn attempt(place: &str, member: &Member, times: Times) -> Result<TcpStream, NotJoined> {
    let addresses = place.to_socket_addrs().map_err(|error| NotJoined::NoName(error.to_string()))?;
    let mut last = NotJoined::NoName("it has no address".into());
    for address in addresses {
        match TcpStream::connect_timeout(&address, times.patience) {
            Ok(stream) => return join(stream, member, times),
            Err(error) => last = NotJoined::Failed(error.to_string()),
        }
    }
    Err(last)
}

/// Sends the identity of this rank, and waits for the others.
fn join(mut stream: TcpStream, member: &Member, times: Times) -> Result<TcpStream, NotJoined> {
    let failed = |error: io::Error| NotJoined::Failed(error.to_string());
    stream.set_read_timeout(Some(times.silence)).map_err(failed)?;
    stream.set_write_timeout(Some(times.silence)).map_err(failed)?;
    let hello = Message::Hello {
        version: VERSION.to_owned(),
        job: member.job.clone(),
        rank: member.rank as u32,
        size: member.size as u32,
    };
    hello.write(&mut stream).map_err(failed)?;
    let start = Instant::now();
    let mut said = false;
    loop {
        match Message::read(&mut stream, HELLO_BYTES) {
            Ok(Message::Welcome) => return Ok(stream),
            Ok(Message::Refused(why)) => return Err(NotJoined::Refused(why)),
            Ok(Message::Waiting) if !said && start.elapsed() > times.patience => {
                said = true;
                say("connected to rank 0; waiting for the other ranks");
            }
            Ok(Message::Waiting) => {}
            Ok(_) | Err(ReadError::Stranger) => return Err(NotJoined::Stranger),
            Err(ReadError::Closed) => return Err(NotJoined::Failed("rank 0 closed the connection".into())),
            Err(error) if error.is_timeout() => {
                return Err(NotJoined::Failed("it accepts connections and does not answer".into()));
            }
            Err(ReadError::Io(error)) => return Err(failed(error)),
        }
    }
}

/// A name for a job that no other job has.
pub(super) fn new_job() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", std::process::id(), now.as_nanos())
}

/// Binds to all addresses of this machine, IPv6 and IPv4 if it has both.
fn bind_everywhere(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind(("::", port)) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => TcpListener::bind(("0.0.0.0", port)),
        bound => bound,
    }
}

/// Addresses at which others may reach this machine. Loopback comes first, for ranks on this machine.
fn local_addresses() -> Vec<IpAddr> {
    let mut addresses = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
    let table = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    addresses.extend(addresses_of_table(&table));
    addresses
}

/// The addresses of this machine in the kernel's table: lines with an address, followed by one with `host LOCAL`.
fn addresses_of_table(table: &str) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    let mut above: Option<Ipv4Addr> = None;
    for line in table.lines() {
        match line.trim().strip_prefix("|-- ") {
            Some(address) => above = address.parse().ok(),
            None if line.contains("/32 host LOCAL") => {
                let address = above.filter(|address| !address.is_loopback() && !address.is_link_local());
                found.extend(address.map(IpAddr::V4).filter(|address| !found.contains(address)));
            }
            None => {}
        }
    }
    found
}

/// `rank 2` or `ranks 1, 3`.
pub(super) fn ranks_text(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("rank{} {list}", if ranks.len() == 1 { "" } else { "s" })
}

fn time_text(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds >= 120 => format!("{} minutes", seconds / 60),
        seconds => format!("{seconds} seconds"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_read_from_the_kernels_table() {
        let table = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.1.2.3\n        /32 host LOCAL\n     |-- 10.1.2.255\n        \
                     /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.1.2.3\n        \
                     /32 host LOCAL\n";
        assert_eq!(addresses_of_table(table), [IpAddr::from([10, 1, 2, 3])]);
    }

    #[test]
    fn ranks_are_listed() {
        assert_eq!(ranks_text(&[2]), "rank 2");
        assert_eq!(ranks_text(&[1, 3]), "ranks 1, 3");
    }
}
