//! TensorBoard's event file: records of scalars, for `tensorboard --logdir`.
//!
//! A file is a sequence of records (length, masked CRC-32C of it, data, masked CRC-32C of the data), the data a
//! protocol buffer `Event`. Written here is the little of both that scalars need.
//! Left out: which numbers are written, and under which tags.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read};
use std::path::Path;

/// What the first record of every file says.
const FILE_VERSION: &str = "brain.Event:2";
/// Longer records are not ours.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// Appends the record that a file begins with.
pub fn encode_version(wall_s: f64, out: &mut Vec<u8>) {
    let mut event = begin_event(wall_s);
    put_bytes(&mut event, 3, FILE_VERSION.as_bytes());
    put_record(out, &event);
}

/// Appends a record of tagged values.
pub fn encode_scalars(
    step: u64,
    wall_s: f64,
    scalars: impl Iterator<Item = (String, f32)>,
    out: &mut Vec<u8>,
) {
    let mut summary = Vec::new();
    for (tag, value) in scalars {
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

/// As the format masks it, so that a CRC over data that holds CRCs stays a good one.
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

/// What is left of a file after a cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// The first record says the version.
    pub begins_well: bool,
    pub last_step: Option<u64>,
}

/// Shortens a file to the records up to `step`; a record that is torn or damaged ends it too.
///
/// Shortening to the end of a record is one operation: killed before or after it, the file is sound.
pub fn cut_after(path: &Path, step: u64) -> std::io::Result<Cut> {
    let mut reader = BufReader::with_capacity(16 << 10, File::open(path)?);
    let mut data = Vec::new();
    let (mut cut, mut end) = (Cut::default(), 0);
    while read_record(&mut reader, &mut data)?.is_some() {
        match step_of(&data) {
            None if end == 0 => cut.begins_well = true,
            Some(own) if end > 0 && own <= step => cut.last_step = Some(own),
            _ => break,
        }
        end += 16 + data.len() as u64;
    }
    let file = OpenOptions::new().write(true).open(path)?;
    file.set_len(end)?;
    file.sync_all()?;
    Ok(cut)
}

/// The data of the next record, or nothing at the end and where a record is not whole.
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

/// The step of an event of ours, which begins with a time and a step.
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

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Steps of all records after the first.
    fn steps(path: &Path) -> Vec<u64> {
        let mut reader = BufReader::new(File::open(path).unwrap());
        let (mut data, mut steps) = (Vec::new(), Vec::new());
        while read_record(&mut reader, &mut data).unwrap().is_some() {
            steps.extend(step_of(&data));
        }
        steps
    }

    #[test]
    fn a_cut_keeps_the_records_up_to_a_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let mut bytes = Vec::new();
        encode_version(1.0, &mut bytes);
        for step in [1, 2, 2, 3] {
            encode_scalars(step, 1.0, [("x".to_string(), 0.5)].into_iter(), &mut bytes);
        }
        // Torn in the last record.
        std::fs::write(&path, &bytes[..bytes.len() - 3]).unwrap();
        assert_eq!(cut_after(&path, 9).unwrap(), Cut { begins_well: true, last_step: Some(2) });
        assert_eq!(steps(&path), [1, 2, 2]);
        assert_eq!(cut_after(&path, 1).unwrap().last_step, Some(1));
        assert_eq!(steps(&path), [1]);
        // Damaged in the first record: nothing is left, and it shows.
        std::fs::write(&path, &bytes[1..]).unwrap();
        assert_eq!(cut_after(&path, 9).unwrap(), Cut::default());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    /// Field by field by hand: key, then value, as protocol buffers have them.
    #[test]
    fn an_event_is_the_protocol_buffer_of_its_scalars() {
        let mut out = Vec::new();
        encode_scalars(300, 2.0, [("train/loss".to_string(), 1.5)].into_iter(), &mut out);
        let mut event = vec![0x09];
        event.extend(2f64.to_le_bytes());
        event.extend([0x10, 0xac, 0x02]); // 300 = 2·128 + 44
        event.extend([0x2a, 19, 0x0a, 17, 0x0a, 10]);
        event.extend(b"train/loss");
        event.push(0x15);
        event.extend(1.5f32.to_le_bytes());
        assert_eq!(out[..8], (event.len() as u64).to_le_bytes());
        assert_eq!(out[12..out.len() - 4], event);
        // The mask undone by its own definition: rotated left by 15 after the constant is taken off.
        let unmask = |bytes: &[u8]| {
            u32::from_le_bytes(bytes.try_into().unwrap()).wrapping_sub(0xa282_ead8).rotate_left(15)
        };
        assert_eq!(unmask(&out[8..12]), crc32c(&out[..8]));
        assert_eq!(unmask(&out[out.len() - 4..]), crc32c(&event));
    }
}
