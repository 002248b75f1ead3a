//! `--ranks N`: starts the ranks of one machine.
//!
//! GPU ranks are copies of this program with the same arguments and our own variables; CPU ranks are started by
//! `mpiexec`, because they need its MPI. This process then only waits. Rank 0 has the terminal; lines of other ranks on
//! stderr are shown with their number, and their stdout is shown only if they fail.
//! Every child has its own process group, so that Ctrl-C reaches it once, through this process. `follow` connects this
//! process and the ranks, so that each notices the end of the other.
//! Left out: other machines, which need a launcher such as `mpiexec`, torchrun or srun.

use super::follow::{LAUNCHER_VARIABLE, Watch};
use super::launch::{
    JOB_VARIABLE, LOCAL_RANK_VARIABLE, LOCAL_RANKS_VARIABLE, MASTER_VARIABLE, RANK_VARIABLE, RANKS_VARIABLE,
};
use super::rendezvous::new_job;
use crate::console::progress::say;
use crate::failure::Failure;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use smidgen_runtime::comm::mpi_places::{MPIEXEC_VARIABLE, find_mpiexec};
use smidgen_runtime::signals::on_end_request;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The exit code of a rank that was interrupted and has saved its state. The other ranks are saving, too.
const INTERRUPTED: u8 = 130;

/// Bytes of a rank's stdout that are kept, from its end.
const KEPT_BYTES: usize = 64 << 10;

/// Variables that an outer launcher may have set and that would contradict those of `mpiexec`.
const OUTER_VARIABLES: [&str; 9] = [
    RANK_VARIABLE,
    RANKS_VARIABLE,
    LOCAL_RANK_VARIABLE,
    LOCAL_RANKS_VARIABLE,
    MASTER_VARIABLE,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
];

/// What exchanges tensors between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// GPU ranks.
    Nccl,
    /// CPU ranks, and GPU ranks without NCCL.
    Mpi,
}

/// The ranks to start.
#[derive(Clone, Debug)]
pub struct Spawn {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub count: usize,
    /// After a rank has failed, the others are killed when they have not ended within this time.
    pub grace: Duration,
}

impl Spawn {
    /// Ranks that run this program with its arguments, without `--ranks`.
    pub fn this_program(count: usize) -> Result<Spawn, Failure> {
        if count == 0 {
            return Err(Failure::command("`--ranks 0`: a run has at least one rank"));
        }
        let program = std::env::current_exe()
            .map_err(|error| Failure::ranks(error).context("cannot find this program"))?;
        let arguments = without_ranks(std::env::args_os().skip(1));
        Ok(Spawn { program, arguments, count, grace: Duration::from_secs(12) })
    }

    /// Starts the ranks and waits for them. Returns the exit code of the first that failed, or 0.
    pub fn run(&self, engine: Engine) -> Result<u8, Failure> {
        let (sender, signals) = channel();
        // Without a handler a signal ends this process, and the ranks then exit by themselves.
        let _ = on_end_request(move |_| {
            let _ = sender.send(());
        });
        match engine {
            Engine::Nccl => self.run_copies(&signals),
            Engine::Mpi => self.run_mpiexec(&signals),
        }
    }

    pub(super) fn run_copies(&self, signals: &Receiver<()>) -> Result<u8, Failure> {
        let (port, job, watch) = (free_port()?, new_job(), start_watch()?);
        let mut ranks: Vec<Started> = Vec::new();
        for rank in 0..self.count {
            let mut command = Command::new(&self.program);
            command
                .args(&self.arguments)
                .env(RANK_VARIABLE, rank.to_string())
                .env(RANKS_VARIABLE, self.count.to_string())
                .env(LOCAL_RANK_VARIABLE, rank.to_string())
                .env(LOCAL_RANKS_VARIABLE, self.count.to_string())
                .env(MASTER_VARIABLE, format!("127.0.0.1:{port}"))
                .env(JOB_VARIABLE, &job)
                .env(LAUNCHER_VARIABLE, &watch.address);
            if rank > 0 {
                command.stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            match start(command, Some(rank)) {
                Ok(started) => ranks.push(started),
                Err(error) => {
                    ranks.iter_mut().for_each(Started::kill);
                    let doing = format!("cannot start rank {rank} (`{}`)", self.program.display());
                    return Err(Failure::ranks(error).context(doing));
                }
            }
        }
        Ok(wait_for(ranks, self.grace, signals))
    }

    pub(super) fn run_mpiexec(&self, signals: &Receiver<()>) -> Result<u8, Failure> {
        let mpiexec = find_mpiexec().map_err(|error| {
            Failure::from(error).context(format!("{} ranks need an MPI launcher", self.count))
        })?;
        let watch = start_watch()?;
        let mut command = Command::new(&mpiexec.path);
        // On this machine. In an allocation of Slurm it would otherwise use the nodes of the allocation.
        command.args(["-launcher", "fork", "-hosts", "localhost", "-n", &self.count.to_string()]);
        command.arg(&self.program).args(&self.arguments);
        for name in OUTER_VARIABLES {
            command.env_remove(name);
        }
        // The ranks load the MPI library that belongs to this `mpiexec`.
        command.env(MPIEXEC_VARIABLE, &mpiexec.path).env(LAUNCHER_VARIABLE, &watch.address);
        let started = start(command, None);
        let started = started
            .map_err(|error| Failure::ranks(error).context(format!("`{}`", mpiexec.path.display())))?;
        let code = wait_for(vec![started], self.grace, signals);
        // If a rank dies, `mpiexec` kills the others before they can report which one it was.
        match watch.first_that_died().filter(|_| !matches!(code, 0 | INTERRUPTED)) {
            Some(rank) => Err(Failure::ranks(format!("rank {rank} died, and `mpiexec` ended the others"))
                .hint("`dmesg` shows a process that ran out of memory")
                .hint("`smidgen resume RUN` continues from the last checkpoint")),
            None => Ok(code),
        }
    }
}

/// The arguments without `--ranks N` and `--ranks=N`. Arguments after `--` are kept.
pub fn without_ranks(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        if argument == "--" {
            kept.push(argument);
            kept.extend(arguments);
            break;
        }
        if argument == "--ranks" {
            arguments.next();
        } else if !argument.as_encoded_bytes().starts_with(b"--ranks=") {
            kept.push(argument);
        }
    }
    kept
}

/// A child process, and the threads that read its output.
#[derive(Debug)]
struct Started {
    /// `None` for `mpiexec`, which stands for all ranks.
    rank: Option<usize>,
    child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

impl Started {
    fn signal(&self) {
        if self.ended.is_none()
            && let Ok(id) = i32::try_from(self.child.id())
        {
            // Ranks treat it like Ctrl-C, and `mpiexec` passes it on silently.
            let _ = kill(Pid::from_raw(id), Signal::SIGTERM);
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Whether it has ended since the last call.
    fn has_just_ended(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
            return self.ended.is_some();
        }
        false
    }

    fn code(&self) -> u8 {
        self.ended.map_or(0, code_of)
    }

    /// Waits until all its lines on stderr are shown, and shows its stdout if it failed.
    fn finish(self) {
        let code = self.code();
        let name = self.rank.map_or("mpiexec".to_owned(), |rank| format!("rank {rank}"));
        if let Some(reader) = self.stderr {
            let _ = reader.join();
        }
        let output = self.stdout.and_then(|reader| reader.join().ok()).unwrap_or_default();
        if code != 0 && code != INTERRUPTED {
            for line in String::from_utf8_lossy(&output).lines() {
                say(&format!("[{name}] {line}"));
            }
        }
    }
}

fn start(mut command: Command, rank: Option<usize>) -> std::io::Result<Started> {
    let mut child = command.stdin(Stdio::null()).process_group(0).spawn()?;
    let name = rank.unwrap_or(0);
    let stdout = child.stdout.take().map(|stdout| thread::spawn(move || read_end(stdout)));
    let stderr = child.stderr.take().map(|stderr| {
        thread::spawn(move || {
            let mut lines = BufReader::new(stderr);
            let mut line = Vec::new();
            while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
                say(&format!("[rank {name}] {}", String::from_utf8_lossy(&line).trim_end()));
                line.clear();
            }
        })
    });
    Ok(Started { rank, child, stdout, stderr, ended: None })
}

/// Waits for all of them, and returns the exit code of the first that failed. After a failure the others are killed if
/// they do not end within `grace`.
fn wait_for(mut ranks: Vec<Started>, grace: Duration, signals: &Receiver<()>) -> u8 {
    let mut first: Option<u8> = None;
    let mut deadline: Option<Instant> = None;
    loop {
        while signals.try_recv().is_ok() {
            ranks.iter().for_each(Started::signal);
        }
        let ended: Vec<usize> = (0..ranks.len()).filter(|rank| ranks[*rank].has_just_ended()).collect();
        // Of several that ended together, one that was killed by a signal did not end because of another.
        let killed =
            ended.iter().find(|rank| ranks[**rank].ended.is_some_and(|status| status.signal().is_some()));
        let failed = killed.or_else(|| ended.iter().find(|rank| ranks[**rank].code() != 0));
        if let Some(failed) = failed.filter(|_| first.is_none()) {
            let started = &ranks[*failed];
            first = Some(started.code());
            if let (Some(rank), Some(signal)) =
                (started.rank, started.ended.and_then(|status| status.signal()))
            {
                say(&format!("rank {rank} was ended by signal {signal}"));
            }
        }
        // There is no time limit after Ctrl-C, because saving the state may take longer.
        let has_failed = ended.iter().any(|rank| !matches!(ranks[*rank].code(), 0 | INTERRUPTED));
        if has_failed && deadline.is_none() {
            deadline = Some(Instant::now() + grace);
        }
        if ranks.iter().all(|started| started.ended.is_some()) {
            break;
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            for started in ranks.iter_mut().filter(|started| started.ended.is_none()) {
                if let Some(rank) = started.rank {
                    say(&format!("rank {rank} did not end by itself and was killed"));
                }
                started.kill();
            }
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    ranks.into_iter().for_each(Started::finish);
    first.unwrap_or(0)
}

/// The exit code; for a signal 128 plus its number, as in shells.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Reads to the end, and returns the last part.
fn read_end(mut from: impl Read) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        kept.extend(&bytes[..count]);
        if kept.len() > 2 * KEPT_BYTES {
            kept.drain(..kept.len() - KEPT_BYTES);
        }
    }
    kept
}

fn start_watch() -> Result<Watch, Failure> {
    Watch::start().map_err(|error| Failure::ranks(error).context("cannot watch the ranks"))
}

/// A port that no program uses at the moment.
fn free_port() -> Result<u16, Failure> {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).map_err(|error| Failure::ranks(error).context("no free port"))
}
