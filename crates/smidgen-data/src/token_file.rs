//! A token set as a file: large sets are read from it during a run, and cached sets are loaded from it.
//!
//! The records of all samples come first; then lengths, counts and row numbers; then a JSON object with the
//! statistics and what the writer adds; then a trailer of fixed size with the sizes of these parts and the SHA-256 of
//! everything before it.
//! The file is written whole or not at all, and a file that does not match its trailer is ignored.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::row_place::RowUnit;
use crate::token_record::LabelForm;
use crate::tokens::{FileOfSamples, Records, SAMPLES_OF_A_BLOCK, TokenSet, TokenStats};
use smidgen_formats::digest::Hasher;
use smidgen_formats::whole_file::{StagedFile, WriteFileError, commit_together};
use smidgen_ir::objective::RowsNeeded;

const MAGIC: &[u8; 16] = b"smidgen tokens 2";
/// Three numbers (bytes of records, samples, bytes of JSON) and the checksum in hexadecimal.
const TRAILER_BYTES: usize = 3 * 8 + 64;
/// Far more than statistics and warnings need.
const MAX_JSON_BYTES: u64 = 16 << 20;

#[derive(Serialize, Deserialize)]
struct Description {
    form: LabelForm,
    stats: TokenStats,
    /// For each file that samples came from, its index in the list of files.
    files: Vec<usize>,
    /// See [`FileOfSamples`]: the index in `files`, whether rows are counted by lines, and the first sample.
    files_of_samples: Vec<(usize, bool, usize)>,
    /// The first sample of each source.
    sources: Vec<usize>,
    /// Whether samples have audio, which the file does not store: such a set is read from its rows each time.
    #[serde(default)]
    has_clips: bool,
    about: Json,
}

/// A file that records are appended to. If it is dropped before it is finished, no file is left.
pub struct TokenFileWriter {
    path: PathBuf,
    staged: StagedFile,
    hasher: Hasher,
    record_bytes: u64,
}

impl TokenFileWriter {
    pub fn create(path: &Path) -> Result<TokenFileWriter, WriteFileError> {
        let staged = StagedFile::create(path)?;
        let mut writer =
            TokenFileWriter { path: path.to_path_buf(), staged, hasher: Hasher::sha256(), record_bytes: 0 };
        writer.write(MAGIC)?;
        Ok(writer)
    }

    pub fn append(&mut self, records: &[u8]) -> Result<(), WriteFileError> {
        self.record_bytes += records.len() as u64;
        self.write(records)
    }

    /// Writes the rest of `set` after its records, makes the file visible and opens it.
    pub(super) fn finish(
        mut self,
        set: &TokenSet,
        files: &[PathBuf],
        about: &Json,
    ) -> Result<Records, WriteFileError> {
        let mut piece = Vec::new();
        for numbers in [&set.lengths, &set.supervised, &set.row_numbers] {
            for some in numbers.chunks(4096) {
                piece.clear();
                piece.extend(some.iter().flat_map(|number| number.to_le_bytes()));
                self.write(&piece)?;
            }
        }
        let place = |path: &PathBuf| files.iter().position(|file| file == path).unwrap_or(0);
        let description = Description {
            form: set.form,
            stats: set.stats,
            files: set.files.iter().map(place).collect(),
            files_of_samples: set
                .files_of_samples
                .iter()
                .map(|it| (it.file, it.unit == RowUnit::Line, it.first_sample))
                .collect(),
            sources: set.sources.clone(),
            has_clips: set.clips.is_some(),
            about: about.clone(),
        };
        let json = serde_json::to_vec(&description).expect("numbers and strings are JSON");
        self.write(&json)?;
        let mut trailer = Vec::with_capacity(TRAILER_BYTES);
        for number in [self.record_bytes, set.len() as u64, json.len() as u64] {
            trailer.extend(number.to_le_bytes());
        }
        self.hasher.update(&trailer);
        trailer.extend(self.hasher.finish_hex().into_bytes());
        self.staged.write(|out| out.write_all(&trailer))?;
        commit_together(vec![self.staged])?;
        let opened = File::open(&self.path);
        let file = opened.map_err(|source| WriteFileError {
            path: self.path.clone(),
            step: "opening it again",
            source,
        })?;
        Ok(Records::File { file, path: self.path, first_byte: MAGIC.len() as u64 })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), WriteFileError> {
        self.hasher.update(bytes);
        self.staged.write(|out| out.write_all(bytes))
    }
}

/// Writes a set that is in memory.
pub fn write_set(path: &Path, set: &TokenSet, files: &[PathBuf], about: &Json) -> Result<(), WriteFileError> {
    let Records::Memory(records) = &set.records else { return Ok(()) };
    let mut writer = TokenFileWriter::create(path)?;
    writer.append(records)?;
    writer.finish(set, files, about).map(drop)
}

/// Reads a set, and the JSON that its writer added; `None` if there is no valid file.
///
/// The samples stay in the file if their records take more than `above_bytes`.
pub fn open_set(path: &Path, files: &[PathBuf], above_bytes: usize) -> Option<(TokenSet, Json)> {
    read_set(path, files, above_bytes).ok()
}

fn read_set(path: &Path, files: &[PathBuf], above_bytes: usize) -> io::Result<(TokenSet, Json)> {
    let unsound = || io::Error::from(io::ErrorKind::InvalidData);
    // Checked before opening, because opening a pipe would wait for a writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(unsound());
    }
    let file = File::open(path)?;
    let file_bytes = file.metadata()?.len();
    let trailer_at = file_bytes.checked_sub(TRAILER_BYTES as u64).ok_or_else(unsound)?;
    let mut trailer = [0; TRAILER_BYTES];
    file.read_exact_at(&mut trailer, trailer_at)?;
    let number = |index: usize| {
        let bytes = trailer[8 * index..8 * index + 8].try_into().expect("eight bytes");
        u64::from_le_bytes(bytes)
    };
    let (record_bytes, samples, json_bytes) = (number(0), number(1), number(2));
    let index_at = (MAGIC.len() as u64).checked_add(record_bytes).ok_or_else(unsound)?;
    let index_bytes = samples.checked_mul(12).ok_or_else(unsound)?;
    let json_at = index_at.checked_add(index_bytes).ok_or_else(unsound)?;
    if json_at.checked_add(json_bytes) != Some(trailer_at) || json_bytes > MAX_JSON_BYTES {
        return Err(unsound());
    }
    // From here on no size in the file can ask for more memory than the file has bytes.
    check_sum(&file, trailer_at, &trailer)?;
    let mut json = vec![0; json_bytes as usize];
    file.read_exact_at(&mut json, json_at)?;
    let description: Description = serde_json::from_slice(&json)?;
    if description.has_clips {
        return Err(unsound());
    }
    let column = |index: u64| read_numbers(&file, index_at + 4 * samples * index, samples as usize);
    let records = if record_bytes > above_bytes as u64 {
        let file = file.try_clone()?;
        Records::File { file, path: path.to_path_buf(), first_byte: MAGIC.len() as u64 }
    } else {
        let mut records = vec![0; record_bytes as usize];
        file.read_exact_at(&mut records, MAGIC.len() as u64)?;
        Records::Memory(records)
    };
    let of_samples = description.files_of_samples.into_iter().map(|(file, by_line, first_sample)| {
        let unit = if by_line { RowUnit::Line } else { RowUnit::Row };
        FileOfSamples { file, unit, first_sample }
    });
    let named: Option<Vec<PathBuf>> =
        description.files.iter().map(|&place| files.get(place).cloned()).collect();
    let mut set = TokenSet {
        records,
        form: description.form,
        lengths: column(0)?,
        supervised: column(1)?,
        row_numbers: column(2)?,
        block_starts: Vec::with_capacity((samples as usize).div_ceil(SAMPLES_OF_A_BLOCK)),
        starts: None,
        sources: description.sources,
        files: named.ok_or_else(unsound)?,
        files_of_samples: of_samples.collect(),
        stats: description.stats,
        clips: None,
        // Rows that are compared are read from their files each time.
        rows: RowsNeeded::Samples,
        marks: Vec::new(),
    };
    set.files.shrink_to_fit();
    set.files_of_samples.shrink_to_fit();
    set.index_blocks();
    let expected: u64 = set.lengths.iter().map(|&length| set.form.record_bytes(length as usize)).sum();
    let first_file = set.files_of_samples.first().map(|file| file.first_sample);
    let known = set.files_of_samples.iter().all(|file| file.file < set.files.len());
    let sources_are_sound =
        set.sources.first() == Some(&0) && set.sources.is_sorted_by(|one, next| one < next);
    let sources_are_sound = sources_are_sound && set.sources.last() < Some(&set.lengths.len());
    if expected != record_bytes || samples == 0 || first_file != Some(0) || !known || !sources_are_sound {
        return Err(unsound());
    }
    Ok((set, description.about))
}

/// Compares the file with its checksum, which covers all bytes before it.
fn check_sum(file: &File, trailer_at: u64, trailer: &[u8; TRAILER_BYTES]) -> io::Result<()> {
    let mut magic = [0; MAGIC.len()];
    file.read_exact_at(&mut magic, 0)?;
    let mut hasher = Hasher::sha256();
    io::copy(&mut BufReader::with_capacity(256 << 10, file).take(trailer_at), &mut hasher)?;
    hasher.update(&trailer[..24]);
    if &magic == MAGIC && hasher.finish_hex().as_bytes() == &trailer[24..] {
        Ok(())
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

fn read_numbers(file: &File, start: u64, count: usize) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::with_capacity(count);
    let mut piece = [0; 16 << 10];
    while numbers.len() < count {
        let wanted = (4 * (count - numbers.len())).min(piece.len());
        file.read_exact_at(&mut piece[..wanted], start + 4 * numbers.len() as u64)?;
        let read = piece[..wanted].chunks_exact(4);
        numbers.extend(read.map(|four| u32::from_le_bytes([four[0], four[1], four[2], four[3]])));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::RowPlace;
    use crate::token_builder::TokenSetBuilder;
    use crate::tokens::TokenLimits;
    use serde_json::json;
    use smidgen_ir::words::Overflow;

    fn set() -> (TokenSet, Vec<PathBuf>) {
        let limits = TokenLimits { vocab_size: 100, max_tokens: 64, overflow: Overflow::Truncate };
        let mut builder = TokenSetBuilder::new(limits);
        let files = ["empty.jsonl", "a.jsonl", "b.json"].map(PathBuf::from).to_vec();
        for row in 0..40_usize {
            let (file, unit) = if row < 30 { (1, RowUnit::Line) } else { (2, RowUnit::Row) };
            let ids: Vec<i64> = (0..2 + row as i64 % 9).collect();
            let place = RowPlace { file: &files[file], unit, number: row as u64 + 1 };
            builder.push_spans(place, &ids, &[1..ids.len()]).unwrap();
        }
        (builder.finish().unwrap(), files)
    }

    #[test]
    fn a_set_is_read_back_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("set");
        let (set, files) = set();
        let about = json!({"warnings": ["one"]});
        write_set(&path, &set, &files, &about).unwrap();
        for (above_bytes, on_disk) in [(1 << 20, false), (0, true)] {
            // The files have been moved and renamed.
            let moved = ["x", "y", "z"].map(PathBuf::from);
            let (again, said) = open_set(&path, &moved, above_bytes).unwrap();
            assert_eq!((said, again.is_on_disk()), (about.clone(), on_disk));
            assert_eq!(again.stats(), set.stats());
            for index in 0..set.len() {
                assert_eq!(again.sample(index).unwrap(), set.sample(index).unwrap());
                assert_eq!(again.supervised(index), set.supervised(index));
            }
            assert_eq!(again.place(29).to_string(), "`y` line 30");
            assert_eq!(again.place(30).to_string(), "`z` row 31");
            if !on_disk {
                let names =
                    |files: &[PathBuf]| files.iter().map(|file| file.as_os_str().len()).sum::<usize>();
                assert_eq!(again.heap_bytes() - 2, set.heap_bytes() - names(&files[1..]));
            }
        }
    }

    #[test]
    fn a_damaged_file_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("set");
        let (set, files) = set();
        write_set(&path, &set, &files, &Json::Null).unwrap();
        let sound = std::fs::read(&path).unwrap();
        for position in 0..sound.len() {
            let mut damaged = sound.clone();
            damaged[position] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert!(open_set(&path, &files, 0).is_none(), "byte {position}");
        }
        for length in [0, 10, TRAILER_BYTES, sound.len() - 1] {
            std::fs::write(&path, &sound[..length]).unwrap();
            assert!(open_set(&path, &files, 0).is_none(), "{length} bytes");
        }
        std::fs::write(&path, &sound).unwrap();
        assert!(open_set(&path, &files, 0).is_some());
        // Samples of a file that is no longer in the list.
        assert!(open_set(&path, &files[..2], 0).is_none());
        assert!(open_set(folder.path(), &files, 0).is_none());
        assert!(open_set(&folder.path().join("gone"), &files, 0).is_none());
    }

    #[test]
    fn a_file_that_shrinks_in_use_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("set");
        let (set, files) = set();
        write_set(&path, &set, &files, &Json::Null).unwrap();
        let (again, _) = open_set(&path, &files, 0).unwrap();
        std::fs::write(&path, "").unwrap();
        let error = again.sample(3).unwrap_err().to_string();
        let expected =
            format!("the tokens in `{}` cannot be read: failed to fill whole buffer", path.display());
        assert_eq!(error, expected);
    }
}
