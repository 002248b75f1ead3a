//! Ctrl-C and its relatives: the step is finished, its state saved, the way on told; twice ends at once.
//!
//! Signals go to a real process by the shell's `kill`.

use crate::scratch::Scratch;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LONG: [&str; 4] = ["train.steps=400", "train.save_every=0", "train.log_every=0", "adapter.dropout=0.1"];

fn send(child: &Child, signal: &str) {
    let status = Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
    assert!(status.success());
}

fn wait_for_rows(scratch: &Scratch, child: &mut Child, rows: usize) {
    loop {
        let text = std::fs::read_to_string(scratch.path("run/metrics.jsonl")).unwrap_or_default();
        if text.lines().count() >= rows {
            return;
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was asked to");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Signals the command after so many rows; it ends interrupted. What it said, and the step of its newest checkpoint.
fn interrupt(scratch: &Scratch, mut command: Command, signal: &str, rows: usize) -> (String, u64) {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_rows(scratch, &mut child, rows);
    send(&child, signal);
    let ended = child.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(130), "{signal}: {said}");
    (said, *scratch.checkpoints("run").last().unwrap())
}

#[test]
fn asked_to_end_it_saves_and_says_how_to_go_on() {
    let scratch = Scratch::new();
    scratch.train("clean", &LONG);
    let arguments = [&["train", "recipe.toml", "data.template=auto"][..], &LONG].concat();
    for (signal, rows) in [("INT", 3), ("TERM", 60), ("HUP", 120)] {
        let resume: &[&str] = if rows == 3 { &[] } else { &["--resume"] };
        let command = ignoring("", &scratch.command(&[&arguments[..], resume].concat()));
        let (said, step) = interrupt(&scratch, command, signal, rows);
        assert_eq!(scratch.metrics("run").len() as u64, step, "{signal}");
        assert!(said.contains("finishing the step and saving; press Ctrl-C again to quit now\n"), "{said}");
        let words = format!(
            "error: interrupted after step {step} of 400; state saved in `checkpoint-{step}`\n\nhint: continue with `smidgen train recipe.toml data.template=auto train.steps=400 "
        );
        assert!(said.contains(&words) && said.contains(" --resume`"), "{said}");
        assert!(!scratch.exists("run/adapter"));
        let words = format!("interrupted after step {step} of 400");
        assert!(scratch.text("run/report.html").contains(&words), "{signal}");
    }
    scratch.train("run", &[&LONG[..], &["--resume"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
}

#[test]
fn asked_twice_it_ends_at_once() {
    let scratch = Scratch::new();
    let overrides = [&["train", "recipe.toml", "train.save_every=7"][..], &LONG[..1]].concat();
    let mut child = scratch.start(&overrides);
    wait_for_rows(&scratch, &mut child, 20);
    // Both are there when it goes on, so that neither comes too late.
    for signal in ["STOP", "INT", "TERM", "CONT"] {
        send(&child, signal);
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // What was there before is whole.
    scratch.train("run", &[&overrides[2..], &["--resume"]].concat());
    scratch.train("clean", &overrides[2..]);
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
}

#[test]
fn before_the_first_step_there_is_nothing_to_save() {
    let scratch = Scratch::new();
    // A hub that never answers: reading the data takes as long as it takes.
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = scratch.command(&["train", "recipe.toml", "data.train=hf:org/rows"]);
    command.env("HF_ENDPOINT", format!("http://{}", hub.local_addr().unwrap()));
    command.env("HF_HOME", scratch.path("cache")).env_remove("HF_HUB_OFFLINE");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _asked = hub.accept().unwrap();
    send(&child, "TERM");
    let status = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15), "{status}");
    // At most a lock that nobody holds: the next start works.
    let left = scratch.files();
    let left: Vec<_> = left.keys().filter(|path| path.starts_with(scratch.path("run"))).collect();
    assert!(left.iter().all(|path| path.ends_with(".lock")), "{left:?}");
    scratch.train("run", &["train.epochs=1"]);
    assert!(!scratch.exists("run/.lock"));
}

/// The command, which ignores these signals and no others: the tests themselves may run under `nohup`.
fn ignoring(signals: &str, program: &Command) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,TERM");
    command.args((!signals.is_empty()).then(|| format!("--ignore-signal={signals}")));
    command.arg(program.get_program()).args(program.get_args());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.current_dir(program.get_current_dir().unwrap());
    command
}

/// `nohup` ignores HUP, and a shell without job control ignores INT for what it starts in the background.
#[test]
fn under_nohup_it_saves_too() {
    let scratch = Scratch::new();
    scratch.train("clean", &LONG);
    let arguments = [&["train", "recipe.toml", "--resume"][..], &LONG].concat();
    for (signal, rows) in [("TERM", 10), ("INT", 100)] {
        let command = ignoring("HUP,INT", &scratch.command(&arguments));
        let (said, step) = interrupt(&scratch, command, signal, rows);
        assert!(said.contains(&format!("state saved in `checkpoint-{step}`")), "{signal}: {said}");
    }
    scratch.train("run", &[&LONG[..], &["--resume"]].concat());
    assert!(scratch.adapter("run") == scratch.adapter("clean"));
    assert_eq!(scratch.losses("run"), scratch.losses("clean"));
}

/// systemd and Slurm signal every process, and a launcher passes its own signal on.
#[test]
fn a_signal_that_arrives_twice_saves_once() {
    let scratch = Scratch::new();
    let mut child = scratch.start(&[&["train", "recipe.toml"][..], &LONG].concat());
    wait_for_rows(&scratch, &mut child, 10);
    send(&child, "TERM");
    send(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(scratch.checkpoints("run").last().is_some_and(|step| *step >= 10));
}

#[test]
fn a_run_that_ignores_hangups_goes_on_after_one() {
    let scratch = Scratch::new();
    let arguments = [&["train", "recipe.toml"][..], &LONG].concat();
    let mut command = ignoring("HUP", &scratch.command(&arguments));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_rows(&scratch, &mut child, 10);
    send(&child, "HUP");
    assert!(child.wait().unwrap().success());
    assert_eq!(scratch.losses("run").len(), 400);
}
