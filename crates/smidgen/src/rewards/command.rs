//! Programs of the user's that score answers: JSON lines in, JSON lines out.
//!
//! A program is started once, several times with `workers`, and gets one line for each answer; it writes one line with a
//! number, or an object with `reward`, in the same order. An answer has a time limit. Threads write and read, so a program
//! that reads nothing or writes nothing stops nobody.
//! A program ends when its input ends; what is left of it is killed with the run.

use crate::failure::Failure;
use serde_json::Value as Json;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{self, Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// A program that scores answers failed. What was trained before is not affected.
#[derive(Debug, Error)]
pub enum RewardError {
    #[error("the reward command `{command}` cannot be started: {reason}")]
    Start { command: String, reason: String },
    #[error("the reward command `{command}` {how} after {answers} answers{last}")]
    Ended { command: String, how: String, answers: usize, last: String },
    #[error("the reward command `{command}` wrote `{said}` without being asked{last}")]
    Unasked { command: String, said: String, last: String },
    #[error("the reward command `{command}` took more than {seconds} s for one answer{last}")]
    Late { command: String, seconds: f64, last: String },
    #[error(
        "the reward command `{command}` answered `{said}`, which is neither a finite number nor an object with one as `reward`{last}"
    )]
    Nonsense { command: String, said: String, last: String },
}

impl RewardError {
    fn hint(&self) -> Option<&'static str> {
        match self {
            RewardError::Start { .. } => None,
            RewardError::Ended { .. } => Some("it must answer line by line until its input ends"),
            RewardError::Late { .. } => Some(
                "it must flush every line (Python: `print(..., flush=True)`); `timeout` of the reward allows more seconds",
            ),
            RewardError::Nonsense { .. } | RewardError::Unasked { .. } => Some(
                "print one line of JSON for each answer, such as `0.5` or `{\"reward\": 0.5}`, and all else to stderr",
            ),
        }
    }
}

fn failed(error: RewardError) -> Failure {
    let hint = error.hint();
    Failure::training(error).hint_if_some(hint)
}

/// A line of a program may have at most this many bytes.
const MOST_LINE_BYTES: u64 = 1 << 20;
/// Lines of what a program said last, for messages.
const LAST_LINES: usize = 5;
/// How long a program may take to end when its input ends.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Command {
    command: String,
    timeout_s: f64,
    count: usize,
    workers: Vec<Worker>,
}

impl Command {
    pub fn of(command: &str, workers: usize, timeout_s: f64) -> Command {
        Command { command: command.to_owned(), timeout_s, count: workers, workers: Vec::new() }
    }

    /// Starts every worker that is not running.
    pub fn start(&mut self) -> Result<(), Failure> {
        while self.workers.len() < self.count {
            self.workers.push(Worker::start(&self.command).map_err(failed)?);
        }
        Ok(())
    }

    /// The scores of answers, in their order. Workers score different answers at the same time.
    pub fn score(&mut self, requests: &[String]) -> Result<Vec<f64>, Failure> {
        self.start()?;
        let (command, timeout_s, count) = (self.command.as_str(), self.timeout_s, self.count);
        let parts: Vec<Result<Vec<f64>, RewardError>> = thread::scope(|scope| {
            let parts = self.workers.iter_mut().enumerate().map(|(index, worker)| {
                let own = requests.iter().skip(index).step_by(count);
                scope.spawn(move || own.map(|request| worker.score(command, request, timeout_s)).collect())
            });
            let parts: Vec<_> = parts.collect();
            parts.into_iter().map(|part| part.join().expect("a worker does not panic")).collect()
        });
        let mut parts = parts
            .into_iter()
            .map(|part| part.map(Vec::into_iter))
            .collect::<Result<Vec<_>, _>>()
            .inspect_err(|_| self.workers.clear())
            .map_err(failed)?;
        let scores =
            (0..requests.len()).map(|index| parts[index % count].next().expect("one for each answer"));
        Ok(scores.collect())
    }
}

/// A running program.
#[derive(Debug)]
struct Worker {
    child: Child,
    /// Closed to end the program.
    requests: Option<Sender<String>>,
    replies: Receiver<String>,
    last: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected once all of stderr was read.
    stderr_is_read: Receiver<()>,
    answers: usize,
}

impl Worker {
    fn start(command: &str) -> Result<Worker, RewardError> {
        let mut shell =
            if cfg!(windows) { process::Command::new("cmd") } else { process::Command::new("sh") };
        shell.args([if cfg!(windows) { "/C" } else { "-c" }, command]);
        #[cfg(unix)]
        {
            // A signal to the run must not reach it: the run scores the step that it is in before it saves and stops.
            use std::os::unix::process::CommandExt;
            shell.process_group(0);
        }
        let mut child =
            shell.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(
                |error| RewardError::Start { command: command.to_owned(), reason: error.to_string() },
            )?;
        let (requests, waiting) = channel::<String>();
        let (reply, replies) = channel();
        let (reads_stderr, stderr_is_read) = channel::<()>();
        let last: Arc<Mutex<VecDeque<String>>> = Arc::default();
        if let Some(mut stdin) = child.stdin.take() {
            thread::spawn(move || {
                for request in waiting {
                    // A program that has ended is noticed by its missing answer.
                    if stdin.write_all(request.as_bytes()).and_then(|()| stdin.flush()).is_err() {
                        return;
                    }
                }
            });
        }
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || for_each_line(stdout, |line| reply.send(line).is_ok()));
        }
        if let Some(stderr) = child.stderr.take() {
            let last = Arc::clone(&last);
            thread::spawn(move || {
                let _reads = reads_stderr;
                for_each_line(stderr, |line| {
                    let mut last = locked(&last);
                    last.push_back(line);
                    if last.len() > LAST_LINES {
                        last.pop_front();
                    }
                    true
                });
            });
        }
        Ok(Worker { child, requests: Some(requests), replies, last, stderr_is_read, answers: 0 })
    }

    fn score(&mut self, command: &str, request: &str, timeout_s: f64) -> Result<f64, RewardError> {
        let command = command.to_owned();
        let shortened = |said: String| said.chars().take(200).collect();
        // A second line for an answer would be taken for the score of the next one.
        if let Ok(said) = self.replies.try_recv() {
            return Err(RewardError::Unasked { command, said: shortened(said), last: self.last_words() });
        }
        if let Some(requests) = &self.requests {
            // The thread is gone if the program is; the answer is then missing.
            let _ = requests.send(format!("{request}\n"));
        }
        let limit = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        let said = match self.replies.recv_timeout(limit) {
            Ok(said) => said,
            Err(RecvTimeoutError::Timeout) => {
                return Err(RewardError::Late { command, seconds: timeout_s, last: self.last_words() });
            }
            Err(RecvTimeoutError::Disconnected) => {
                let (how, answers) = (self.how_it_ended(), self.answers);
                return Err(RewardError::Ended { command, how, answers, last: self.last_words() });
            }
        };
        match number_in(&said) {
            Some(number) => {
                self.answers += 1;
                Ok(number)
            }
            None => Err(RewardError::Nonsense { command, said: shortened(said), last: self.last_words() }),
        }
    }

    /// The end of what the program wrote to stderr, as lines below a message.
    fn last_words(&self) -> String {
        locked(&self.last).iter().map(|line| format!("\n  {}", line.trim_end())).collect()
    }

    fn how_it_ended(&mut self) -> String {
        let status = self.wait_for_end();
        // Its last words may come after its end is known.
        let _ = self.stderr_is_read.recv_timeout(GRACE);
        match status {
            Some(status) => format!("ended with {status}"),
            None => "closed its output".to_owned(),
        }
    }

    fn wait_for_end(&mut self) -> Option<process::ExitStatus> {
        let begun = Instant::now();
        while begun.elapsed() < GRACE {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                Ok(Some(status)) => return Some(status),
                Err(_) => return None,
            }
        }
        None
    }
}

/// Ends the program: its input ends, and what does not end by itself is killed with everything that it started.
impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        if self.wait_for_end().is_some() {
            return;
        }
        #[cfg(unix)]
        {
            use nix::sys::signal::{Signal, killpg};
            use nix::unistd::Pid;
            if let Ok(id) = i32::try_from(self.child.id()) {
                let _ = killpg(Pid::from_raw(id), Signal::SIGKILL);
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `take` with each line that is not blank, until it returns false or the stream ends.
fn for_each_line(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = reader.by_ref().take(MOST_LINE_BYTES).read_until(b'\n', &mut bytes);
        if !read.is_ok_and(|read| read > 0) {
            return;
        }
        let line = String::from_utf8_lossy(&bytes).trim_end_matches(['\n', '\r']).to_owned();
        if !line.trim().is_empty() && !take(line) {
            return;
        }
    }
}

/// The number of a line: the line itself, or `reward` of an object.
fn number_in(line: &str) -> Option<f64> {
    let value: Json = serde_json::from_str(line.trim()).ok()?;
    let number = value.get("reward").unwrap_or(&value).as_f64()?;
    number.is_finite().then_some(number)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn score(command: &str, workers: usize, timeout_s: f64, answers: usize) -> Result<Vec<f64>, Failure> {
        let requests: Vec<String> = (0..answers).map(|number| format!("{{\"number\": {number}}}")).collect();
        Command::of(command, workers, timeout_s).score(&requests)
    }

    fn refused(command: &str, timeout_s: f64) -> String {
        let failure = score(command, 1, timeout_s, 3).unwrap_err();
        assert!(failure.cause::<RewardError>().is_some(), "{failure}");
        failure.message
    }

    #[test]
    fn each_line_is_answered_in_order() {
        let echo = "n=0; while read -r line; do echo \"$line\" | sed 's/[^0-9]//g'; done";
        assert_eq!(score(echo, 1, 30.0, 4).unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(score(echo, 3, 30.0, 8).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let object = "while read -r line; do echo; echo '{\"reward\": 0.5, \"why\": \"half\"}'; done";
        assert_eq!(score(object, 2, 30.0, 3).unwrap(), [0.5; 3]);
        assert_eq!(score(object, 4, 30.0, 0).unwrap(), [0.0; 0]);
    }

    #[test]
    fn one_process_scores_all_answers() {
        let counting = "n=0; while read -r line; do n=$((n+1)); echo $n; done";
        let mut command = Command::of(counting, 1, 30.0);
        let requests = ["{}".to_owned(), "{}".to_owned()];
        assert_eq!(command.score(&requests).unwrap(), [1.0, 2.0]);
        assert_eq!(command.score(&requests).unwrap(), [3.0, 4.0]);
    }

    #[test]
    fn what_goes_wrong_is_said() {
        let dies = "read -r line; echo 1; echo 'no more memory' >&2; exit 3";
        let said = refused(dies, 30.0);
        assert!(said.contains("ended with exit status: 3 after 1 answers\n  no more memory"), "{said}");
        let said = refused("exit 0", 30.0);
        assert!(said.contains("ended with exit status: 0 after 0 answers"), "{said}");
        let said = refused("sleep 60", 0.1);
        assert!(said.contains("took more than 0.1 s for one answer"), "{said}");
        for nonsense in ["NaN", "good", "{\"score\": 1}", "1e999", "null"] {
            let said = refused(&format!("while read -r line; do echo '{nonsense}'; done"), 30.0);
            assert!(said.contains(&format!("answered `{nonsense}`, which is neither")), "{said}");
        }
    }

    /// Its second lines would be taken for the scores of other answers.
    #[test]
    fn a_program_that_answers_twice_is_noticed() {
        let failure = score("while read -r line; do printf '1\\n2\\n'; done", 1, 30.0, 200).unwrap_err();
        assert!(failure.message.contains("without being asked"), "{failure}");
    }

    /// Longer than the buffer of a pipe: a program that reads nothing must not block the run.
    #[test]
    fn a_program_that_reads_nothing_is_late() {
        let request = format!("\"{}\"", "x".repeat(1 << 20));
        let failure = Command::of("sleep 60", 1, 0.1).score(&[request]).unwrap_err();
        assert!(failure.message.contains("took more than"), "{failure}");
    }
}
