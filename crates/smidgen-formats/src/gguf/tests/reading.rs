//! Files are read back as they were written, and damaged ones are refused with the numbers.

use std::fs::{self, File};

use smidgen_ir::{Block, DType};

use super::super::header::ALIGNMENT_KEY;
use super::super::{GgufFile, GgufProblem};
use super::*;
use crate::open_file::FileProblem;

fn some_metadata() -> Metadata {
    metadata(&[
        ("u8", Value::U8(200)),
        ("i8", Value::I8(-5)),
        ("u16", Value::U16(60_000)),
        ("i16", Value::I16(-30_000)),
        ("u32", Value::U32(4_000_000_000)),
        ("i32", Value::I32(-2_000_000_000)),
        ("u64", Value::U64(u64::MAX)),
        ("i64", Value::I64(i64::MIN)),
        ("f32", Value::F32(1.5)),
        ("f64", Value::F64(-0.1)),
        ("yes", Value::Bool(true)),
        ("text", text("naïve ▁")),
        ("none", Value::Array(Array::U8(vec![]))),
        ("bools", Value::Array(Array::Bool(vec![true, false]))),
        ("words", texts(&["a", "", "ü"])),
        ("scores", Value::Array(Array::F32(vec![0.5, -1.0]))),
        ("types", Value::Array(Array::I32(vec![1, 3, 6]))),
    ])
}

fn some_specs() -> Vec<GgufTensorSpec> {
    vec![
        spec("blk.0.attn_q.weight", &[2, 64], Storage::Gguf(Block::Q4_1)),
        spec("norm", &[5], Storage::Plain(DType::F32)),
        spec("half", &[3, 2, 3], Storage::Plain(DType::Bf16)),
        spec("k", &[1, 256], Storage::Gguf(Block::Q6K)),
    ]
}

#[test]
fn what_is_written_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let specs = some_specs();
    let data = |position: usize, bytes: u64| -> Vec<u8> {
        (0..bytes).map(|byte| (byte as u8) ^ (position as u8 * 31)).collect()
    };
    for alignment in [None, Some(8_u32), Some(256)] {
        let mut metadata = some_metadata();
        if let Some(alignment) = alignment {
            metadata.insert(ALIGNMENT_KEY, Value::U32(alignment)).unwrap();
        }
        let sizes = [80, 20, 36, 210];
        write_gguf(&path, &metadata, &specs, |position, w| w.write_all(&data(position, sizes[position])))
            .unwrap();
        let mut file = GgufFile::open(&path).unwrap();
        assert_eq!(file.metadata(), &metadata);
        file.release_metadata();
        assert!(file.metadata().is_empty());
        assert_eq!(file.alignment(), u64::from(alignment.unwrap_or(32)));
        assert_eq!(file.tensors().len(), specs.len());
        for (position, (tensor, spec)) in file.tensors().iter().zip(&specs).enumerate() {
            assert_eq!((&tensor.name, &tensor.dims, tensor.storage), (&spec.name, &spec.dims, spec.storage));
            assert_eq!(tensor.bytes, sizes[position]);
            assert_eq!(tensor.file_offset % file.alignment(), 0);
            assert_eq!(file.position(&spec.name), Some(position));
            let mut read = vec![0; tensor.bytes as usize];
            file.read_at(tensor, 0, &mut read).unwrap();
            assert_eq!(read, data(position, tensor.bytes));
        }
        let mut two = [0; 2];
        file.read_at(file.tensor("norm").unwrap(), 18, &mut two).unwrap();
        assert_eq!(two, [18 ^ 31, 19 ^ 31]);
        assert_eq!(file.tensor("other"), None);
    }
}

/// A file with 24 bytes of magic, version and counts, one pair of 8 + 3 + 4 + 4 bytes, and one tensor.
fn small() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    write(
        &path,
        &metadata(&[("key", Value::U32(7))]),
        &[spec("t", &[2, 32], Storage::Gguf(Block::Q4_0))],
        &[],
    );
    fs::read(&path).unwrap()
}

const PAIR: usize = 24;
const TENSOR: usize = PAIR + 8 + 3 + 4 + 4;

fn open(bytes: &[u8]) -> Result<GgufFile, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, bytes).unwrap();
    GgufFile::open(&path).map_err(|error| {
        let text = error.to_string();
        let start = format!("`{}`: ", path.display());
        text.strip_prefix(&start).expect("the error names the file").to_string()
    })
}

/// The error after some bytes of the small file were overwritten.
fn refused(at: usize, with: &[u8]) -> String {
    let mut bytes = small();
    bytes[at..at + with.len()].copy_from_slice(with);
    open(&bytes).expect_err("refused")
}

#[test]
fn wrong_magic_numbers_and_versions_are_distinguished() {
    assert_eq!(
        refused(0, b"GGML"),
        "this is not a GGUF file: it starts with [47, 47, 4d, 4c], not with `GGUF`"
    );
    let big_endian = "the file is big-endian, only little-endian GGUF is supported; download or convert it as little-endian";
    assert_eq!(refused(0, b"FUGG"), big_endian);
    assert_eq!(refused(4, &3_u32.to_be_bytes()), big_endian);
    for version in [0_u32, 1, 4, 77] {
        let message = refused(4, &version.to_le_bytes());
        assert!(message.starts_with(&format!("the file has GGUF version {version}; versions 2 and 3")));
    }
    let mut second = small();
    second[4] = 2;
    open(&second).unwrap();
    assert!(open(b"version https://git-lfs.github.com/spec/v1\n").err().unwrap().contains("git lfs pull"));
    assert_eq!(
        open(b"GG").err().unwrap(),
        "the file is truncated: the magic needs 4 bytes at 0, the file has 2; download it again"
    );
}

#[test]
fn wrong_counts_are_refused_before_anything_is_allocated() {
    assert_eq!(
        refused(8, &u64::MAX.to_le_bytes()),
        format!(
            "the file claims 18,446,744,073,709,551,615 tensors, at least 2^64 bytes, and has {} left; \
             it is damaged",
            small().len() - TENSOR
        )
    );
    assert!(
        refused(16, &1_000_000_u64.to_le_bytes()).starts_with("the file claims 1,000,000 metadata pairs")
    );
    assert!(
        refused(PAIR, &(1_u64 << 40).to_le_bytes()).contains("metadata key 0 needs 1,099,511,627,776 bytes")
    );
}

#[test]
fn invalid_metadata_is_refused() {
    let kind = PAIR + 8 + 3;
    assert_eq!(
        refused(kind, &13_u32.to_le_bytes()),
        "metadata key `key` has the unknown value type 13 (known: 0 to 12)"
    );
    assert_eq!(
        refused(kind, &7_u32.to_le_bytes()),
        "metadata key `key` is a bool with the byte 7, not 0 or 1"
    );
    assert_eq!(refused(PAIR + 8, &[0xff]), "metadata key 0 at 32 is not UTF-8 text");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    write(&path, &metadata(&[("key", Value::U32(7)), ("kez", Value::U32(7))]), &[], &[]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[TENSOR + 8 + 2] = b'y';
    assert_eq!(open(&bytes).err().unwrap(), "metadata key `key` is in the header twice");
    write(&path, &metadata(&[("list", Value::Array(Array::U64(vec![9])))]), &[], &[]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[PAIR + 8 + 4 + 4] = 9;
    assert_eq!(
        open(&bytes).err().unwrap(),
        "metadata key `list` is an array of arrays, which is not supported"
    );
}

#[test]
fn alignments_are_powers_of_two() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let misspelled = metadata(&[("general.alignmen_", Value::U32(0))]);
    for (alignment, sound) in [(0_u32, false), (4, false), (24, false), (64, true), (1 << 31, false)] {
        write(&path, &misspelled, &[], &[]);
        let mut bytes = fs::read(&path).unwrap();
        bytes[PAIR + 8 + 16] = b't';
        bytes[PAIR + 8 + 17 + 4..][..4].copy_from_slice(&alignment.to_le_bytes());
        match open(&bytes) {
            Ok(file) => assert_eq!((sound, file.alignment()), (true, 64)),
            Err(message) => {
                assert!(!sound);
                let start = format!("`general.alignment` is {alignment}, not a power of two");
                assert!(message.starts_with(&start), "{message}");
            }
        }
    }
}

#[test]
fn invalid_tensors_are_refused() {
    let dims = TENSOR + 8 + 1;
    let number = dims + 4 + 16;
    let offset = number + 4;
    assert_eq!(refused(dims, &5_u32.to_le_bytes()), "tensor `t` has 5 dimensions; 1 to 4 are allowed");
    assert_eq!(refused(dims, &0_u32.to_le_bytes()), "tensor `t` has 0 dimensions; 1 to 4 are allowed");
    assert_eq!(refused(dims + 4, &0_u64.to_le_bytes()), "tensor `t` of dimensions [0, 2] has no elements");
    assert_eq!(
        refused(dims + 4, &48_u64.to_le_bytes()),
        "tensor `t` has rows of 48 elements, not a multiple of the Q4_0 block size 32"
    );
    assert_eq!(
        refused(dims + 12, &(1_u64 << 60).to_le_bytes()),
        "tensor `t` of dimensions [32, 1152921504606846976] takes more than 2^64 bytes"
    );
    assert!(
        refused(number, &16_u32.to_le_bytes()).starts_with(
            "tensor `t` has the type IQ2_XXS (16), which is not supported (supported: F32, F16,"
        )
    );
    assert!(
        refused(number, &99_u32.to_le_bytes())
            .starts_with("tensor `t` has the unknown type 99 (supported: F32")
    );
    assert_eq!(
        refused(offset, &8_u64.to_le_bytes()),
        "tensor `t` begins at 8, which is not a multiple of the alignment 32"
    );
    assert!(refused(offset, &(u64::MAX - 31).to_le_bytes()).contains("ends beyond 2^64"));
    assert!(refused(offset, &64_u64.to_le_bytes()).starts_with("the file is truncated: "));
}

#[test]
fn tensors_with_the_same_name_or_the_same_bytes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    write(&path, &Metadata::default(), &[spec("a", &[16], Storage::F32), spec("b", &[1], Storage::F32)], &[]);
    let bytes = fs::read(&path).unwrap();
    let second = 24 + 8 + 1 + 4 + 8 + 4 + 8;
    let mut twice = bytes.clone();
    twice[second + 8] = b'a';
    assert_eq!(open(&twice).err().unwrap(), "tensor `a` is in the header twice");
    let mut overlapping = bytes;
    overlapping[second + 8 + 1 + 4 + 8 + 4] = 32;
    assert_eq!(
        open(&overlapping).err().unwrap(),
        "tensor `b` begins at 32 inside tensor `a`, which ends at 64"
    );
}

#[test]
fn folders_missing_files_and_shrunken_files_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| GgufFile::open(path).unwrap_err().problem;
    assert!(matches!(open(folder.path()), GgufProblem::File(FileProblem::NotAFile)));
    assert!(matches!(open(&folder.path().join("no")), GgufProblem::File(FileProblem::Open(_))));
    let path = folder.path().join("m.gguf");
    fs::write(&path, small()).unwrap();
    let file = GgufFile::open(&path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(64).unwrap();
    let error = file.read_at(file.tensor("t").unwrap(), 0, &mut [0; 36]).unwrap_err();
    assert_eq!(
        error.problem.to_string(),
        "reading 36 bytes at offset 0 of tensor `t` failed: failed to fill whole buffer"
    );
}

#[test]
#[should_panic(expected = "the range of 36 bytes at 1 reaches beyond the 36 bytes of tensor `t`")]
fn reading_beyond_the_tensor_panics() {
    let file = open(&small()).unwrap();
    let _ = file.read_at(file.tensor("t").unwrap(), 1, &mut [0; 36]);
}

#[test]
fn what_cannot_be_written_is_refused_and_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    fs::write(&path, "old").unwrap();
    let attempt = |metadata: &Metadata, specs: &[GgufTensorSpec], bytes: usize| {
        let error = write_gguf(&path, metadata, specs, |_, w| w.write_all(&vec![0; bytes])).unwrap_err();
        error.to_string()
    };
    let none = Metadata::default();
    let x = spec("x", &[2], Storage::F32);
    assert!(
        attempt(&none, std::slice::from_ref(&x), 7).ends_with("the source of tensor `x` gave 7 of 8 bytes")
    );
    assert!(attempt(&none, std::slice::from_ref(&x), 9).ends_with("gave more bytes than its shape needs"));
    assert_eq!(attempt(&none, &[x.clone(), x.clone()], 8), "tensor `x` is listed twice");
    assert_eq!(
        attempt(&none, &[spec("x", &[2, 33], Storage::Gguf(Block::Q8_0))], 8),
        "tensor `x` has rows of 33 elements, not a multiple of the `q8_0` block size 32"
    );
    assert_eq!(
        attempt(&none, &[spec("x", &[2], Storage::Int8Rows)], 8),
        "tensor `x` cannot be written as `int8`, which GGUF does not have"
    );
    assert!(
        attempt(&none, &[spec("x", &[], Storage::F32)], 8)
            .contains("1 to 4 dimensions of at least 1 are allowed")
    );
    assert!(attempt(&none, &[spec("x", &[usize::MAX, 2], Storage::F32)], 8).contains("more than 2^64 bytes"));
    let odd = metadata(&[(ALIGNMENT_KEY, Value::U32(12))]);
    assert!(attempt(&odd, &[x], 8).starts_with("`general.alignment` is not a power of two"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// Writes the parts of a split model and returns the path of the first.
fn write_split(folder: &Path, count: u16, tensors: u64) -> std::path::PathBuf {
    let path = |part: u16| folder.join(format!("m-{:05}-of-{count:05}.gguf", part + 1));
    for part in 0..count {
        let metadata = metadata(&[
            ("split.no", Value::U16(part)),
            ("split.count", Value::U16(count)),
            ("split.tensors.count", Value::U64(tensors)),
        ]);
        let specs = [spec(&format!("t{part}"), &[3], Storage::Plain(DType::F32))];
        write_gguf(&path(part), &metadata, &specs, |_, w| w.write_all(&[part as u8; 12])).unwrap();
    }
    path(0)
}

#[test]
fn the_files_of_a_split_model_are_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = GgufFile::open(&write_split(folder.path(), 3, 3)).unwrap();
    assert_eq!(file.tensors().len(), 3);
    for part in 0..3u8 {
        let mut read = [9; 12];
        file.read_at(file.tensor(&format!("t{part}")).unwrap(), 0, &mut read).unwrap();
        assert_eq!(read, [part; 12]);
    }
}

#[test]
fn split_models_that_are_not_whole_are_refused() {
    let said = |path: &Path| GgufFile::open(path).unwrap_err().problem.to_string();
    let folder = tempfile::tempdir().unwrap();
    let first = write_split(folder.path(), 2, 2);
    let second = folder.path().join("m-00002-of-00002.gguf");
    assert_eq!(
        said(&second),
        "this is file 2 of 2 of a split model; name the first one, `m-00001-of-00002.gguf`"
    );
    let renamed = folder.path().join("m.gguf");
    fs::copy(&first, &renamed).unwrap();
    assert!(said(&renamed).contains("does not end with `-00001-of-00002.gguf`"), "{}", said(&renamed));
    fs::copy(&first, &second).unwrap();
    assert!(said(&first).contains("is file 2 of 2 of a split model"), "{}", said(&first));
    fs::remove_file(&second).unwrap();
    assert!(said(&first).starts_with("`m-00002-of-00002.gguf` beside it"), "{}", said(&first));
    let folder = tempfile::tempdir().unwrap();
    let other = said(&write_split(folder.path(), 2, 5));
    assert_eq!(other, "the files of the split model have 2 tensors, and `split.tensors.count` is 5");
}
