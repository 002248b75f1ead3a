//! `metrics.jsonl`: one line of JSON per optimizer step and per evaluation.
//!
//! Resume drops the rows after its checkpoint.
//! Floats are written with the shortest text that reads back, so equal text means equal bits; NaN and infinity are
//! `null`. Left out: measuring (`monitor.rs`), and the reaction to a NaN.

use super::appended::{AppendedFile, keep_first};
use crate::console::progress::StepProgress;
use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::Path;
use std::time::Duration;

/// The answers of a run that generates them, with a line for each. Its lines have steps too, and are cut alike.
pub const ROLLOUTS_FILE: &str = "rollouts.jsonl";

/// One optimizer step: a line of `metrics.jsonl`. Sizes that the system does not report are `None`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricsRow {
    /// Updates done, this one included: the first row has 1.
    pub step: u64,
    /// Passes over the data so far.
    pub epoch: f64,
    /// Processes that train together. Tokens are summed over them, the time is that of the slowest.
    pub ranks: u64,
    /// The task's loss: summed over the step, divided by its supervised tokens.
    pub loss: f64,
    /// The regularizer of `ls-lora`, not part of `loss`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reg_loss: Option<f64>,
    /// What the objective reports, under TRL's names.
    #[serde(flatten)]
    pub figures: BTreeMap<String, f64>,
    /// The gradient norm before clipping.
    pub grad_norm: f64,
    /// The learning rate of this update.
    pub lr: f64,
    pub tokens: u64,
    /// Tokens that have a loss.
    pub supervised_tokens: u64,
    /// Time of the step, without evaluations and checkpoints.
    pub step_ms: f64,
    pub tokens_per_s: f64,
    /// How often the step overflowed in f16 and was repeated with a smaller loss scale.
    #[serde(skip_serializing_if = "is_zero")]
    pub overflows: u64,
    /// Measured memory in use on the device; on the CPU, memory of the process.
    pub device_bytes: Option<u64>,
    /// `device_bytes` of every rank, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rank_bytes: Vec<u64>,
    /// Free memory on the device.
    pub device_free_bytes: Option<u64>,
    /// Peak memory in use on the device so far.
    pub device_peak_bytes: Option<u64>,
    /// Percent of the last second in which the GPU was busy, for any process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_util: Option<u32>,
    /// Live bytes of the arena at the step's peak, from the plan.
    pub arena_peak_bytes: u64,
    /// Pinned host memory.
    pub pinned_bytes: u64,
    /// Resident memory of the process.
    pub host_rss_bytes: Option<u64>,
    /// Peak resident memory so far.
    pub host_peak_bytes: Option<u64>,
    /// Time spent measuring memory; it counts towards the next step.
    pub monitor_ms: f64,
}

impl MetricsRow {
    /// The part that a terminal shows.
    pub fn step_progress(&self) -> StepProgress {
        let MetricsRow { step, loss, lr, tokens_per_s, device_bytes, pinned_bytes, .. } = *self;
        let scores = [("reward", "reward"), ("rewards_accuracies", "accuracy")];
        let score = scores.into_iter().find_map(|(figure, name)| Some((name, *self.figures.get(figure)?)));
        StepProgress { step, loss, score, lr, tokens_per_s, device_bytes, pinned_bytes }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// One evaluation. The scores are written after the other fields, sorted by name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalRow {
    /// Updates done before the evaluation.
    pub step: u64,
    pub epoch: f64,
    /// Summed negative log-likelihood divided by `eval_supervised_tokens`.
    pub eval_loss: f64,
    pub eval_samples: u64,
    pub eval_tokens: u64,
    pub eval_supervised_tokens: u64,
    pub eval_ms: f64,
    #[serde(flatten)]
    pub scores: BTreeMap<String, f64>,
}

/// Opens a file to append rows after those of `step`: later rows and a torn last line are cut first.
///
/// The lock shows that the run is active ([`is_being_written`]). On file systems without locks it has no effect.
pub fn open_metrics(path: &Path, step: u64) -> Result<AppendedFile, Failure> {
    cut_after(path, step)?;
    let opened = AppendedFile::open(path)?;
    // A process that checks whether the run is active holds the lock for an instant.
    let is_held = |_: &u32| matches!(opened.file.try_lock(), Err(TryLockError::WouldBlock));
    (0..100).take_while(is_held).for_each(|_| std::thread::sleep(Duration::from_millis(1)));
    Ok(opened)
}

/// Whether a process has the file open for writing. The kernel releases the lock when the process ends or is killed.
pub fn is_being_written(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock))
}

#[derive(Deserialize)]
struct StepOfRow {
    step: u64,
}

/// Drops rows after `step` (0 drops all) and a torn last line. A file that needs no cut is not touched.
///
/// Rows are in the order of steps, so what stays is the beginning of the file. Every line but the last was written
/// whole, so a line that is not a row is an error.
fn cut_after(path: &Path, step: u64) -> Result<(), Failure> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Failure::file("read", path, error)),
    };
    let mut reader = BufReader::with_capacity(16 * 1024, file);
    let (mut line, mut kept_bytes, mut is_kept) = (Vec::new(), 0, true);
    for number in 1.. {
        line.clear();
        let bytes =
            reader.read_until(b'\n', &mut line).map_err(|error| Failure::file("read", path, error))?;
        if line.last() != Some(&b'\n') {
            break;
        }
        let row: StepOfRow = serde_json::from_slice(&line).map_err(|error| {
            Failure::disk(error).context(format!("`{}` line {number} is not a metrics row", path.display()))
        })?;
        is_kept &= row.step <= step;
        kept_bytes += if is_kept { bytes as u64 } else { 0 };
    }
    keep_first(path, kept_bytes).map_err(|error| Failure::file("cut", path, error))
}

/// The step of the last complete row of a file, if there is one.
pub fn last_step(path: &Path) -> Option<u64> {
    let reader = BufReader::new(File::open(path).ok()?);
    let rows = reader.split(b'\n').map_while(Result::ok);
    rows.filter_map(|line| serde_json::from_slice::<StepOfRow>(&line).ok()).last().map(|row| row.step)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::UNIX_EPOCH;

    pub fn row(step: u64) -> MetricsRow {
        MetricsRow {
            step,
            epoch: 0.1,
            ranks: 1,
            loss: 1.0 / 3.0,
            reg_loss: None,
            figures: BTreeMap::new(),
            grad_norm: 2.0,
            lr: 2e-4,
            tokens: 1000,
            supervised_tokens: 10,
            step_ms: 12.5,
            tokens_per_s: 80000.0,
            overflows: 0,
            device_bytes: Some(5),
            rank_bytes: vec![],
            device_free_bytes: None,
            device_peak_bytes: Some(6),
            gpu_util: None,
            arena_peak_bytes: 4,
            pinned_bytes: 0,
            host_rss_bytes: Some(7),
            host_peak_bytes: Some(8),
            monitor_ms: 9.5,
        }
    }

    pub fn eval_row(step: u64) -> EvalRow {
        EvalRow {
            step,
            epoch: 1.0,
            eval_loss: 0.5,
            eval_samples: 3,
            eval_tokens: 30,
            eval_supervised_tokens: 20,
            eval_ms: 1.5,
            scores: BTreeMap::from([("eval_accuracy".to_owned(), 0.75)]),
        }
    }

    fn append(file: &mut AppendedFile, row: &impl Serialize) {
        file.append(format!("{}\n", serde_json::to_string(row).unwrap()).as_bytes()).unwrap();
    }

    pub fn steps_in(path: &Path) -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines()
            .map(|line| {
                let row: serde_json::Value = serde_json::from_str(line).unwrap();
                row["step"].as_u64().unwrap()
            })
            .collect()
    }

    #[test]
    fn rows_have_these_names_in_this_order() {
        assert_eq!(
            serde_json::to_string(&row(3)).unwrap(),
            "{\"step\":3,\"epoch\":0.1,\"ranks\":1,\"loss\":0.3333333333333333,\"grad_norm\":2.0,\"lr\":0.0002,\
             \"tokens\":1000,\"supervised_tokens\":10,\"step_ms\":12.5,\"tokens_per_s\":80000.0,\
             \"device_bytes\":5,\"device_free_bytes\":null,\"device_peak_bytes\":6,\"arena_peak_bytes\":4,\
             \"pinned_bytes\":0,\
             \"host_rss_bytes\":7,\"host_peak_bytes\":8,\"monitor_ms\":9.5}"
        );
        let again = serde_json::to_string(&MetricsRow { overflows: 2, ..row(3) }).unwrap();
        assert!(again.contains("\"tokens_per_s\":80000.0,\"overflows\":2,\"device_bytes\""));
        let on_gpu = serde_json::to_string(&MetricsRow { gpu_util: Some(97), ..row(3) }).unwrap();
        assert!(on_gpu.contains("\"device_peak_bytes\":6,\"gpu_util\":97,\"arena_peak_bytes\""));
        let with_reg = MetricsRow { reg_loss: Some(0.25), ..row(3) };
        let text = serde_json::to_string(&with_reg).unwrap();
        assert!(text.contains("\"loss\":0.3333333333333333,\"reg_loss\":0.25,\"grad_norm\""));
        assert_eq!(
            serde_json::to_string(&eval_row(3)).unwrap(),
            "{\"step\":3,\"epoch\":1.0,\"eval_loss\":0.5,\"eval_samples\":3,\"eval_tokens\":30,\
             \"eval_supervised_tokens\":20,\"eval_ms\":1.5,\"eval_accuracy\":0.75}"
        );
    }

    #[test]
    fn non_finite_numbers_are_null() {
        let broken = MetricsRow { loss: f64::NAN, grad_norm: f64::INFINITY, ..row(1) };
        let text = serde_json::to_string(&broken).unwrap();
        assert!(text.contains("\"loss\":null,\"grad_norm\":null"));
        let mut broken = eval_row(1);
        broken.scores.insert("score".to_owned(), f64::NAN);
        assert!(serde_json::to_string(&broken).unwrap().contains("\"score\":null"));
    }

    #[test]
    fn rows_are_appended_and_a_file_is_continued() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = open_metrics(&path, 0).unwrap();
        append(&mut file, &row(1));
        append(&mut file, &eval_row(1));
        append(&mut file, &row(2));
        file.sync().unwrap();
        assert_eq!(steps_in(&path), [1, 1, 2]);
        drop(file);
        append(&mut open_metrics(&path, 2).unwrap(), &row(3));
        assert_eq!(steps_in(&path), [1, 1, 2, 3]);
    }

    #[test]
    fn a_file_is_being_written_while_its_writer_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert!(!is_being_written(&path));
        let file = open_metrics(&path, 0).unwrap();
        assert!(is_being_written(&path));
        drop(file);
        assert!(!is_being_written(&path));
        // Two readers at the same time do not mistake each other for a writer.
        let other = File::open(&path).unwrap();
        other.try_lock_shared().unwrap();
        assert!(!is_being_written(&path));
    }

    #[test]
    fn resume_cuts_later_rows_and_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = open_metrics(&path, 0).unwrap();
        for step in 1..=5 {
            append(&mut file, &row(step));
            append(&mut file, &eval_row(step));
        }
        let whole = std::fs::read(&path).unwrap();
        let kept: Vec<u8> = whole.split_inclusive(|&byte| byte == b'\n').take(6).flatten().copied().collect();
        // Torn in many places after the row that ends the checkpoint's step; each cut waits for the disk.
        let torn = (kept.len()..whole.len()).step_by(41);
        for end in torn.chain([whole.len()]) {
            std::fs::write(&path, &whole[..end]).unwrap();
            open_metrics(&path, 3).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), kept);
        }
        open_metrics(&path, 0).unwrap();
        assert!(steps_in(&path).is_empty());
    }

    #[test]
    fn a_file_without_later_rows_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        cut_after(&path, 1).unwrap();
        assert_eq!(steps_in(&path), [1]);
        assert_eq!(std::fs::metadata(&path).unwrap().modified().unwrap(), UNIX_EPOCH);
        cut_after(&folder.path().join("gone"), 1).unwrap();
    }

    #[test]
    fn a_line_that_is_not_a_row_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let text = "{\"step\":1}\n{\"loss\":2}\n{\"step\":3}\n";
        std::fs::write(&path, text).unwrap();
        let error = format!("{:#}", cut_after(&path, 1).unwrap_err());
        assert!(error.contains("line 2 is not a metrics row"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    proptest! {
        #[test]
        fn floats_come_back_bit_for_bit(bits: u64) {
            let loss = f64::from_bits(bits);
            prop_assume!(loss.is_finite());
            let text = serde_json::to_string(&MetricsRow { loss, ..row(1) }).unwrap();
            let (_, rest) = text.split_once("\"loss\":").unwrap();
            let (number, _) = rest.split_once(',').unwrap();
            prop_assert_eq!(number.parse::<f64>().unwrap().to_bits(), bits);
        }
    }
}
