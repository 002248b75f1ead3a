//! Ranks that are shell scripts: which variables each gets, and what happens if one of them fails.

use super::spawn::{Spawn, without_ranks};
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Runs a script as this many ranks.
fn run(script: &str, count: usize, grace: Duration) -> u8 {
    spawn(script, count, grace).run_copies(&channel().1).unwrap()
}

fn spawn(script: &str, count: usize, grace: Duration) -> Spawn {
    let arguments = ["-c", script].map(OsString::from).to_vec();
    Spawn { program: PathBuf::from("/bin/sh"), arguments, count, grace }
}

const GRACE: Duration = Duration::from_secs(12);

#[test]
fn every_rank_gets_its_variables() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "echo $SMIDGEN_RANKS $SMIDGEN_LOCAL_RANK $SMIDGEN_MASTER $SMIDGEN_JOB > {}/$SMIDGEN_RANK",
        folder.path().display()
    );
    assert_eq!(run(&script, 3, GRACE), 0);
    let texts: Vec<String> =
        (0..3).map(|rank| fs::read_to_string(folder.path().join(rank.to_string())).unwrap()).collect();
    let words = |text: &String| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for (rank, text) in texts.iter().enumerate() {
        let words = words(text);
        assert_eq!(words[..2], ["3".to_owned(), rank.to_string()], "{text}");
        assert!(words[2].starts_with("127.0.0.1:") && words.len() == 4, "{text}");
    }
    assert_eq!(words(&texts[0])[2..], words(&texts[2])[2..]);
}

#[test]
fn the_first_failure_is_the_exit_code() {
    let script = "case $SMIDGEN_RANK in 1) exit 7;; *) sleep 1; exit 1;; esac";
    assert_eq!(run(script, 3, GRACE), 7);
    assert_eq!(run("[ $SMIDGEN_RANK != 2 ] || kill -9 $$; sleep 1; exit 1", 3, GRACE), 137);
}

#[test]
fn ranks_that_do_not_end_after_a_failure_are_killed() {
    let start = Instant::now();
    let script = "case $SMIDGEN_RANK in 1) exit 3;; *) exec sleep 100;; esac";
    assert_eq!(run(script, 2, Duration::from_millis(300)), 3);
    assert!(start.elapsed() < Duration::from_secs(50));
}

#[test]
fn ranks_that_save_after_an_interruption_are_not_killed() {
    let script = "[ $SMIDGEN_RANK = 1 ] || sleep 1; exit 130";
    assert_eq!(run(script, 2, Duration::ZERO), 130);
}

#[test]
fn a_signal_reaches_every_rank() {
    let (sender, signals) = channel();
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "trap 'exit 130' TERM; touch {}/$SMIDGEN_RANK; while :; do sleep 0.1; done",
        folder.path().display()
    );
    let ready = folder.path().to_owned();
    std::thread::spawn(move || {
        while !(ready.join("0").exists() && ready.join("1").exists()) {
            std::thread::sleep(Duration::from_millis(20));
        }
        sender.send(()).unwrap();
    });
    assert_eq!(spawn(&script, 2, GRACE).run_copies(&signals).unwrap(), 130);
}

#[test]
fn the_option_itself_is_not_passed_on() {
    let kept = |arguments: &[&str]| {
        let kept = without_ranks(arguments.iter().map(OsString::from));
        kept.into_iter().map(|argument| argument.into_string().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(kept(&["train", "r.toml", "--ranks", "4", "--quiet"]), "train r.toml --quiet");
    assert_eq!(kept(&["train", "--ranks=4", "r.toml"]), "train r.toml");
    assert_eq!(kept(&["train", "--", "--ranks", "4"]), "train -- --ranks 4");
}

#[test]
fn zero_ranks_are_refused() {
    let failure = Spawn::this_program(0).unwrap_err();
    assert_eq!(failure.exit_code(), 2);
}

#[test]
fn mpiexec_starts_ranks_or_the_error_names_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("echo $PMI_SIZE $RANK > {}/$PMI_RANK", folder.path().display());
    match spawn(&script, 2, GRACE).run_mpiexec(&channel().1) {
        Ok(code) => {
            assert_eq!(code, 0);
            for rank in ["0", "1"] {
                assert_eq!(fs::read_to_string(folder.path().join(rank)).unwrap(), "2\n");
            }
            assert_eq!(spawn("exit 5", 2, GRACE).run_mpiexec(&channel().1).unwrap(), 5);
            // Like a rank, it keeps the connection to the launcher open while it runs.
            let script = r#"exec 3<>/dev/tcp/${SMIDGEN_LAUNCHER/://}; printf "\\x$PMI_RANK\0\0\0" >&3
                sleep 1; [ $PMI_RANK = 0 ] || kill -9 $$; sleep 30"#;
            let spawn = Spawn { program: PathBuf::from("bash"), ..spawn(script, 2, GRACE) };
            // `mpiexec` kills the others within milliseconds, so on a busy machine connections may close in another
            // order.
            let messages = (0..3).map(|_| spawn.run_mpiexec(&channel().1).unwrap_err().message);
            let messages: Vec<String> = messages.collect();
            assert!(messages.iter().all(|message| message.contains("died")), "{messages:?}");
            assert!(messages.iter().any(|message| message.starts_with("rank 1 died")), "{messages:?}");
        }
        Err(failure) => {
            let is_required = std::env::var_os("SMIDGEN_REQUIRE_MPI").is_some_and(|value| value == "1");
            assert!(!is_required, "{failure}");
            assert!(failure.hints.iter().any(|hint| hint.contains("pip install mpich")), "{failure}");
            println!("skipped: ranks by mpiexec ({})", failure.message);
        }
    }
}
