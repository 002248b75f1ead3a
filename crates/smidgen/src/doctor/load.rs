//! A test load: reads and converts the weights of a recipe's model as a run would, and checks their numbers.
//!
//! A small model is read completely; of a large one only the beginning and the end of every tensor, unless `--whole` is
//! given. This needs memory for a few rows, or for one weight if it is quantized. It finds problems that headers do not
//! show: read errors of the disk, numbers that are not finite, matrices of zeros from an incomplete download.
//! Left out: loading onto the device.

use super::Check;
use crate::failure::Failure;
use crate::plan::job::Job;
use serde_json::json;
use smidgen_formats::encode::{EncodeWeightError, encode_weight, rows_at_a_time};
use smidgen_formats::weight::{Weight, WeightRows};
use smidgen_ir::Storage;
use smidgen_ir::bytes::format_bytes;
use std::ops::Range;
use std::time::Instant;

pub const REMEDY: &str = "download the model again: `smidgen pull` checks every file";

/// Models up to this size are read completely; of larger ones about this many bytes are read.
const USUAL_BYTES: u64 = 1 << 30;

/// How much of the model is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// A small model completely, of a large one the ends of each tensor.
    BySize,
    Whole,
}

/// The findings of a load.
#[derive(Clone, Debug, Default, PartialEq)]
struct Loaded {
    tensors: usize,
    /// Bytes read, as stored.
    read_bytes: u64,
    model_bytes: u64,
    seconds: f64,
    /// Matrices of layers of which all numbers that were read are zero.
    zeros: Vec<String>,
}

pub fn check(job: &Job, reach: Reach) -> Check {
    load_line(load(job, if reach == Reach::Whole { u64::MAX } else { USUAL_BYTES }))
}

fn load(job: &Job, usual_bytes: u64) -> Result<Loaded, Failure> {
    let tensors = job.request.spec.tensors();
    let weight_of =
        |name: &str| job.model.weight(name).expect("the job has checked that no weight is missing");
    let model_bytes = tensors.iter().map(|tensor| stored_bytes(&weight_of(&tensor.name))).sum();
    let is_small = model_bytes <= usual_bytes;
    let share_bytes = if is_small { u64::MAX } else { usual_bytes / tensors.len().max(1) as u64 };
    let mut loaded = Loaded { tensors: tensors.len(), model_bytes, ..Loaded::default() };
    let begun = Instant::now();
    for tensor in &tensors {
        let weight = weight_of(&tensor.name);
        let reading =
            read_weight(&weight, job.request.storage_of(&tensor.name), share_bytes, job.request.threads)
                .map_err(|error| Failure::model(error).context(format!("tensor `{}`", tensor.name)))?;
        loaded.read_bytes += reading.read_bytes;
        if let Some((row, number)) = reading.not_finite {
            return Err(Failure::model(format!(
                "tensor `{}` in `{}` has {number} in row {row}",
                tensor.name,
                weight.file_path().display()
            )));
        }
        // Norms, biases and embeddings of unused tokens may be zero.
        if reading.is_zero && tensor.layer.is_some() && weight.shape().len() > 1 {
            loaded.zeros.push(tensor.name.clone());
        }
    }
    loaded.seconds = begun.elapsed().as_secs_f64();
    Ok(loaded)
}

/// Bytes of a weight in its file.
fn stored_bytes(weight: &Weight) -> u64 {
    let (rows, columns) = weight.rows_and_columns();
    weight.storage().unwrap_or(Storage::F32).bytes(rows, columns) as u64
}

/// What was read of one weight.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WeightReading {
    read_bytes: u64,
    /// The first row with a number that is not finite, and the number.
    not_finite: Option<(usize, f32)>,
    is_zero: bool,
}

impl WeightReading {
    fn add(&mut self, first_row: usize, columns: usize, numbers: &[f32]) {
        self.is_zero &= numbers.iter().all(|number| *number == 0.0);
        if self.not_finite.is_none()
            && let Some(place) = numbers.iter().position(|number| !number.is_finite())
        {
            self.not_finite = Some((first_row + place / columns.max(1), numbers[place]));
        }
    }
}

/// Reads a weight, or its ends if it is larger than `share_bytes`, and quantizes it if a run would.
fn read_weight(
    weight: &Weight,
    storage: Storage,
    share_bytes: u64,
    threads: usize,
) -> Result<WeightReading, EncodeWeightError> {
    let (rows, columns) = weight.rows_and_columns();
    let bytes = stored_bytes(weight);
    let mut reading = WeightReading { read_bytes: 0, not_finite: None, is_zero: true };
    let is_encoded = weight.storage() != Some(storage) && storage.plain().is_none();
    if is_encoded && bytes <= share_bytes {
        encode_weight(weight, storage, &mut vec![0; storage.bytes(rows, columns)], threads)?;
    }
    let step = rows_at_a_time(columns, 1);
    let mut numbers = vec![0.0; step.min(rows) * columns];
    let mut source = WeightRows::open(weight)?;
    for range in ranges(rows, bytes, share_bytes) {
        for first in range.clone().step_by(step) {
            let count = step.min(range.end - first);
            let numbers = &mut numbers[..count * columns];
            source.read(first, count, numbers)?;
            reading.add(first, columns, numbers);
        }
        reading.read_bytes += bytes * range.len() as u64 / rows.max(1) as u64;
    }
    Ok(reading)
}

/// The rows to read: all, or the first and the last ones.
fn ranges(rows: usize, bytes: u64, share_bytes: u64) -> Vec<Range<usize>> {
    if bytes <= share_bytes {
        return vec![0..rows];
    }
    let row_bytes = (bytes / rows.max(1) as u64).max(1);
    let end = ((share_bytes / 2 / row_bytes) as usize).max(1);
    if 2 * end < rows { vec![0..end, rows - end..rows] } else { vec![0..rows] }
}

fn load_line(loaded: Result<Loaded, Failure>) -> Check {
    const NAME: &str = "load";
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(failure) => return Check::of_failure(NAME, &failure.hint(REMEDY)),
    };
    let Loaded { tensors, read_bytes, model_bytes, seconds, zeros } = loaded;
    let bytes_per_s = read_bytes as f64 / seconds.max(1e-9);
    let is_part = read_bytes < model_bytes;
    let of = if is_part {
        format!(" of {}, the ends of each tensor", format_bytes(model_bytes))
    } else {
        String::new()
    };
    let read =
        format!("{tensors} tensors, {}{of}, at {:.1} GB/s", format_bytes(read_bytes), bytes_per_s / 1e9);
    let facts = json!({
        "tensors": tensors,
        "read_bytes": read_bytes,
        "model_bytes": model_bytes,
        "bytes_per_s": bytes_per_s,
        "zeros": zeros,
    });
    match zeros.first() {
        None => Check::pass(NAME, format!("{read}, all numbers finite")),
        Some(first) => {
            let matrices = if zeros.len() == 1 { "matrix" } else { "matrices" };
            let finding =
                format!("{read}; {} {matrices} with nothing but zeros, such as `{first}`", zeros.len());
            let remedy = format!("unless that is intended, a download is incomplete: {REMEDY}");
            Check::warn(NAME, finding, remedy)
        }
    }
    .with(facts)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use smidgen_formats::model::Model;
    use std::path::Path;

    fn fixture(path: &str) -> Model {
        Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)).unwrap()
    }

    #[test]
    fn every_storage_is_read_and_every_byte_counted() {
        for path in ["llama-bias-linear/model", "llama-bnb-nf4/model", "gguf-full/model.gguf"] {
            let model = fixture(path);
            for name in model.weight_names() {
                let weight = model.weight(name).unwrap();
                let storage = weight.storage().unwrap();
                let reading = read_weight(&weight, storage, u64::MAX, 2).unwrap();
                assert_eq!(
                    (reading.read_bytes, reading.not_finite),
                    (stored_bytes(&weight), None),
                    "{path} {name}"
                );
                // As a run would quantize it.
                if storage.plain().is_some() && weight.shape().len() == 2 {
                    let encoded = read_weight(&weight, Storage::Int8Rows, u64::MAX, 2).unwrap();
                    assert_eq!(encoded, reading, "{path} {name}");
                }
                let ends = read_weight(&weight, storage, 1, 2).unwrap();
                assert!(ends.read_bytes <= reading.read_bytes && ends.read_bytes > 0, "{path} {name}");
            }
        }
    }

    #[test]
    fn the_ends_of_what_is_large_are_read() {
        assert_eq!(ranges(10, 1000, 1000), [0..10]);
        assert_eq!(ranges(10, 1000, 999), [0..4, 6..10]);
        assert_eq!(ranges(10, 1000, 0), [0..1, 9..10]);
        assert_eq!(ranges(2, 1000, 1), [0..2]);
        assert_eq!(ranges(3, 1000, 1), [0..1, 2..3]);
    }

    #[test]
    fn numbers_that_are_not_finite_are_found_by_their_row() {
        let mut reading = WeightReading { read_bytes: 0, not_finite: None, is_zero: true };
        reading.add(0, 2, &[0.0, -0.0]);
        assert!(reading.is_zero);
        reading.add(1, 2, &[0.0, 1.0, 2.0, f32::INFINITY]);
        reading.add(3, 2, &[f32::NAN, 0.0]);
        assert_eq!((reading.not_finite, reading.is_zero), (Some((2, f32::INFINITY)), false));
    }

    #[test]
    fn lines_say_what_was_read() {
        let loaded = Loaded {
            tensors: 3,
            read_bytes: 1 << 30,
            model_bytes: 1 << 30,
            seconds: (1u64 << 30) as f64 / 2e9,
            zeros: vec![],
        };
        let fine = load_line(Ok(loaded.clone()));
        assert_eq!(
            (fine.verdict, &*fine.finding),
            (Verdict::Pass, "3 tensors, 1.00 GiB, at 2.0 GB/s, all numbers finite")
        );
        let part = load_line(Ok(Loaded { model_bytes: 8 << 30, ..loaded.clone() }));
        assert!(
            part.finding.starts_with("3 tensors, 1.00 GiB of 8.00 GiB, the ends of each tensor, at"),
            "{part:?}"
        );
        let hole = load_line(Ok(Loaded { zeros: vec!["a".into(), "b".into()], ..loaded }));
        assert!(
            hole.finding.ends_with("at 2.0 GB/s; 2 matrices with nothing but zeros, such as `a`"),
            "{hole:?}"
        );
        assert_eq!((hole.verdict, &hole.facts["zeros"]), (Verdict::Warn, &json!(["a", "b"])));
        let broken = load_line(Err(Failure::model("tensor `x` has NaN")));
        assert_eq!((broken.verdict, &*broken.remedies[0]), (Verdict::Fail, REMEDY));
    }
}
