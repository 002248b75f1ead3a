//! TensorBoard's event file: the curves of a run, for `tensorboard --logdir`.
//!
//! A file is a sequence of records: length, masked CRC-32C of the length, data, masked CRC-32C of the data. The data
//! is a protocol buffer `Event`; only the fields of scalars are written. Tags are as in Hugging Face's trainer:
//! `eval_x` becomes `eval/x`, everything else `train/x`.
//! A resumed run cuts its file after the last record of its checkpoint and appends to it. A file that is missing, or
//! that ends before that record, is rebuilt from `metrics.jsonl`, whose rows have the same numbers without times.

use super::appended::{AppendedFile, keep_first};
use crate::failure::Failure;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const PREFIX: &str = "events.out.tfevents.";
/// The content of the first record of every file.
const FILE_VERSION: &str = "brain.Event:2";
/// Records written here are never longer.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// Opens the file of a run folder to append events after those of `step`. A missing file is rebuilt from the rows of
/// `metrics`, which is already cut there.
pub fn open_events(folder: &Path, metrics: &Path, step: u64) -> Result<AppendedFile, Failure> {
    if let Some(path) = find_file(folder)? {
        let last_step = cut_after(&path, step).map_err(|error| Failure::file("cut", &path, error))?;
        if last_step == Some(step) {
            return AppendedFile::open(&path);
        }
        std::fs::remove_file(&path).map_err(|error| Failure::file("remove", &path, error))?;
    }
    let path = folder.join(new_name());
    write_from_metrics(&path, metrics)?;
    AppendedFile::open(&path)
}

/// A row of `metrics.jsonl` as an event of now.
pub fn encode_now(row: &Map<String, Value>, out: &mut Vec<u8>) {
    encode_row(row, now_s(), out);
}

/// The tag and value of each number of a row that TensorBoard plots.
fn scalars(row: &Map<String, Value>) -> impl Iterator<Item = (String, f32)> + '_ {
    let is_eval = row.contains_key("eval_loss");
    row.iter().filter_map(move |(name, value)| {
        let tag = match (is_eval, name.as_str()) {
            (_, "step") => return None,
            (true, "epoch" | "eval_samples" | "eval_tokens" | "eval_supervised_tokens" | "eval_ms") => {
                return None;
            }
            (true, name) => format!("eval/{}", name.strip_prefix("eval_").unwrap_or(name)),
            (false, "lr") => "train/learning_rate".into(),
            (false, "loss" | "reg_loss" | "grad_norm" | "epoch" | "tokens_per_s") => format!("train/{name}"),
            (false, _) => return None,
        };
        Some((tag, value.as_f64()? as f32))
    })
}

fn encode_row(row: &Map<String, Value>, wall_s: f64, out: &mut Vec<u8>) {
    let step = row.get("step").and_then(Value::as_u64).unwrap_or(0);
    let mut summary = Vec::new();
    for (tag, value) in scalars(row) {
        let mut scalar = Vec::new();
        put_bytes(&mut scalar, 1, tag.as_bytes());
        put_key(&mut scalar, 2, FIXED_32);
        scalar.extend(value.to_le_bytes());
        put_bytes(&mut summary, 1, &scalar);
    }
    let mut event = begin_event(wall_s);
    put_key(&mut event, 2, VARINT);
    put_varint(&mut event, step);
    put_bytes(&mut event, 5, &summary);
    put_record(out, &event);
}

fn encode_version(wall_s: f64, out: &mut Vec<u8>) {
    let mut event = begin_event(wall_s);
    put_bytes(&mut event, 3, FILE_VERSION.as_bytes());
    put_record(out, &event);
}

fn begin_event(wall_s: f64) -> Vec<u8> {
    let mut event = Vec::new();
    put_key(&mut event, 1, FIXED_64);
    event.extend(wall_s.to_le_bytes());
    event
}

const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED_32: u64 = 5;

fn put_key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    put_varint(out, field << 3 | wire_type);
}

fn put_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_key(out, field, LENGTH);
    put_varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn put_record(out: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    out.extend(length);
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked_crc(data).to_le_bytes());
}

/// The format masks CRCs, because a CRC over data that contains CRCs is weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C: the reflected Castagnoli polynomial.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| CRC_TABLE[usize::from(crc as u8 ^ byte)] ^ crc >> 8)
}

const CRC_TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Truncates a file after the records up to `step`, or before a torn or damaged record if that comes first.
/// Returns the last step (0 if there is none), or `None` if the file does not begin with the version.
fn cut_after(path: &Path, step: u64) -> std::io::Result<Option<u64>> {
    let mut reader = BufReader::with_capacity(16 << 10, File::open(path)?);
    let mut data = Vec::new();
    let (mut last_step, mut end) = (None, 0);
    while read_record(&mut reader, &mut data)?.is_some() {
        match step_of(&data) {
            None if end == 0 => last_step = Some(0),
            Some(own) if end > 0 && own <= step => last_step = Some(own),
            _ => break,
        }
        end += 16 + data.len() as u64;
    }
    keep_first(path, end)?;
    Ok(last_step)
}

/// The data of the next record, or `None` at the end and at an incomplete record.
fn read_record(reader: &mut impl Read, data: &mut Vec<u8>) -> std::io::Result<Option<()>> {
    let mut head = [0u8; 12];
    if !read_whole(reader, &mut head)? {
        return Ok(None);
    }
    let (length, length_crc) = head.split_at(8);
    let bytes = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    if masked_crc(length).to_le_bytes() != length_crc || bytes > MAX_RECORD_BYTES {
        return Ok(None);
    }
    data.resize(bytes as usize, 0);
    let mut crc = [0u8; 4];
    let whole = read_whole(reader, data)? && read_whole(reader, &mut crc)?;
    Ok((whole && masked_crc(data).to_le_bytes() == crc).then_some(()))
}

fn read_whole(reader: &mut impl Read, into: &mut [u8]) -> std::io::Result<bool> {
    match reader.read_exact(into) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

/// The step of an event. Events written here begin with a time and a step.
fn step_of(event: &[u8]) -> Option<u64> {
    let [0x10, rest @ ..] = event.get(9..)? else { return None };
    let mut step = 0;
    for (index, byte) in rest.iter().take(10).enumerate() {
        step |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some(step);
        }
    }
    None
}

fn find_file(folder: &Path) -> Result<Option<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(|error| Failure::file("read", folder, error))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let newest = names.filter(|name| name.starts_with(PREFIX) && !name.ends_with(".tmp")).max();
    Ok(newest.map(|name| folder.join(name)))
}

fn new_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.chars().filter(|it| it.is_ascii_alphanumeric() || "-_".contains(*it)).collect();
    let host = if host.is_empty() { "localhost" } else { &host };
    format!("{PREFIX}{}.{host}.{}.0", now_s() as u64, std::process::id())
}

/// Writes a new file with all rows, completely or not at all.
fn write_from_metrics(path: &Path, metrics: &Path) -> Result<(), Failure> {
    let wall_s = now_s();
    smidgen_formats::whole_file::write_whole(path, |out| {
        let mut record = Vec::new();
        encode_version(wall_s, &mut record);
        out.write_all(&record)?;
        let rows = match File::open(metrics) {
            Ok(file) => BufReader::with_capacity(16 << 10, file),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        };
        for line in rows.lines() {
            let row: Map<String, Value> = serde_json::from_str(&line?)?;
            record.clear();
            encode_row(&row, wall_s, &mut record);
            out.write_all(&record)?;
        }
        Ok(())
    })
    .map_err(Failure::disk)
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn row(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    fn step_row(step: u64) -> String {
        format!("{{\"step\":{step},\"epoch\":0.5,\"loss\":{step}.25,\"lr\":0.001,\"tokens\":7}}")
    }

    /// Vectors of RFC 3720, B.4, and the check value of the catalogue of CRCs.
    #[test]
    fn the_crc_is_castagnolis() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(&(0..32).rev().collect::<Vec<u8>>()), 0x113f_db5c);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    /// The expected bytes are written by hand, field by field: key, then value, as in protocol buffers.
    #[test]
    fn an_event_is_the_protocol_buffer_of_its_row() {
        let mut out = Vec::new();
        encode_row(&row("{\"step\":300,\"loss\":1.5}"), 2.0, &mut out);
        let mut event = vec![0x09];
        event.extend(2f64.to_le_bytes());
        event.extend([0x10, 0xac, 0x02]); // 300 = 2·128 + 44
        event.extend([0x2a, 19, 0x0a, 17, 0x0a, 10]);
        event.extend(b"train/loss");
        event.push(0x15);
        event.extend(1.5f32.to_le_bytes());
        assert_eq!(out[..8], (event.len() as u64).to_le_bytes());
        assert_eq!(out[12..out.len() - 4], event);
        // Undoes the mask: subtract the constant, then rotate left by 15.
        let unmask = |bytes: &[u8]| {
            u32::from_le_bytes(bytes.try_into().unwrap()).wrapping_sub(0xa282_ead8).rotate_left(15)
        };
        assert_eq!(unmask(&out[8..12]), crc32c(&out[..8]));
        assert_eq!(unmask(&out[out.len() - 4..]), crc32c(&event));
    }

    #[test]
    fn tags_are_those_of_hugging_faces_trainer() {
        let tags = |text: &str| scalars(&row(text)).map(|(tag, _)| tag).collect::<Vec<_>>();
        let step = "{\"step\":1,\"epoch\":0.1,\"loss\":1,\"reg_loss\":1,\"grad_norm\":1,\"lr\":1,\"tokens\":5,\"tokens_per_s\":1,\"device_bytes\":null}";
        let expected = [
            "train/epoch",
            "train/loss",
            "train/reg_loss",
            "train/grad_norm",
            "train/learning_rate",
            "train/tokens_per_s",
        ];
        assert_eq!(tags(step), expected);
        let eval = "{\"step\":1,\"epoch\":0.1,\"eval_loss\":1,\"eval_samples\":3,\"eval_ms\":2,\"acc\":0.5}";
        assert_eq!(tags(eval), ["eval/loss", "eval/acc"]);
    }

    /// Steps of all records after the first.
    pub fn steps(folder: &Path) -> Vec<u64> {
        let mut reader = BufReader::new(File::open(find_file(folder).unwrap().unwrap()).unwrap());
        let (mut data, mut steps) = (Vec::new(), Vec::new());
        while read_record(&mut reader, &mut data).unwrap().is_some() {
            steps.extend(step_of(&data));
        }
        steps
    }

    fn append(file: &mut AppendedFile, text: &str) {
        let mut event = Vec::new();
        encode_now(&row(text), &mut event);
        file.append(&event).unwrap();
    }

    fn written(folder: &Path) -> PathBuf {
        let metrics = folder.join("metrics.jsonl");
        let mut file = open_events(folder, &metrics, 0).unwrap();
        for step in [1, 2, 2, 3] {
            append(&mut file, &step_row(step));
        }
        find_file(folder).unwrap().unwrap()
    }

    #[test]
    fn resume_cuts_and_continues_the_same_file() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, metrics) = (folder.path(), folder.path().join("metrics.jsonl"));
        let file = written(folder);
        // Torn in the last record.
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
        append(&mut open_events(folder, &metrics, 2).unwrap(), &step_row(3));
        assert_eq!(find_file(folder).unwrap().unwrap(), file);
        assert_eq!(steps(folder), [1, 2, 2, 3]);
        let kept = std::fs::read(&file).unwrap();
        let last = bytes.len() / 2;
        assert!(kept[..last] == bytes[..last], "what stays is not rewritten");
        open_events(folder, &metrics, 0).unwrap();
        assert_eq!(steps(folder), [0u64; 0]);
        assert_eq!(find_file(folder).unwrap().unwrap(), file);
    }

    #[test]
    fn a_missing_or_damaged_file_is_rebuilt_from_the_metrics() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, metrics) = (folder.path(), folder.path().join("metrics.jsonl"));
        std::fs::write(&metrics, format!("{}\n{}\n", step_row(1), step_row(2))).unwrap();
        open_events(folder, &metrics, 2).unwrap();
        assert_eq!(steps(folder), [1, 2]);
        let file = find_file(folder).unwrap().unwrap();
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, &bytes).unwrap();
        open_events(folder, &metrics, 2).unwrap();
        assert_eq!(steps(folder), [1, 2]);
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 2);
    }
}
