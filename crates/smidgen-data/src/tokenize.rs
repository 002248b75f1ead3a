//! Rows to a token set, on several threads.
//!
//! The calling thread reads rows and stores the results; workers tokenize chunks of rows. Chunks come back in any order
//! and are stored in the order of the rows, so a set does not depend on the number of threads.
//! Memory is bounded: a tokenizer takes up to 250 bytes per byte of the row that it works on, so the total length of
//! the rows in flight is limited. A row above the limit is tokenized alone.
//! Rows that cannot be used are noted in their order; an error that is not about one row ends the reading.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, Scope};

use crate::audio_text::{Misplaced, place_clips};
use crate::bad_rows::BadRows;
use crate::clip_row::AudioRowError;
use crate::example::{Example, ExampleRow, GroupKind};
use crate::format::{FormatError, RowReading};
use crate::mask::{EncodeError, EncodedSample, RowEncoder, TurnEnd};
use crate::prepare_error::PrepareError;
use crate::row_group::{HeldRow, read_groups};
use crate::row_place::{RowPlace, RowUnit};
use crate::token_builder::TokenSetBuilder;
use crate::token_record::NOT_SUPERVISED;
use crate::token_row::TokensError;

const ROWS_OF_A_CHUNK: usize = 32;
/// A chunk with this much text is full, even with fewer rows.
const TEXT_BYTES_OF_A_CHUNK: usize = 128 << 10;
/// The longest rows of all chunks in flight have at most this much text together.
const LONGEST_BYTES_IN_FLIGHT: usize = 256 << 10;

/// What was noticed about rows, for warnings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowNotes {
    pub rows: u64,
    pub prompt_differs: u64,
    pub turn_end_supervised: u64,
    pub turn_end_not_supervised: u64,
    pub bos_doubled: u64,
    /// Rows that needed no template.
    pub plain: u64,
    /// Conversations that became several samples.
    pub split: u64,
    pub samples_of_split: u64,
}

impl RowNotes {
    fn note(&mut self, samples: &[EncodedSample]) {
        let any = |is: fn(&EncodedSample) -> bool| u64::from(samples.iter().any(is));
        self.rows += 1;
        self.prompt_differs += any(|sample| sample.prompt_differs);
        self.turn_end_supervised += any(|sample| sample.turn_end == TurnEnd::Supervised);
        self.turn_end_not_supervised += any(|sample| sample.turn_end == TurnEnd::NotSupervised);
        self.bos_doubled += any(|sample| sample.bos_doubled);
        self.plain += any(|sample| !sample.is_templated);
        if samples.len() > 1 {
            self.split += 1;
            self.samples_of_split += samples.len() as u64;
        }
    }
}

/// Stores rows of tokens, which need no tokenizer.
pub fn store_token_rows(
    reading: RowReading<'_>,
    threads: usize,
    builder: &mut TokenSetBuilder,
    bad: &mut BadRows,
    mut on_rows: impl FnMut(u64),
) -> Result<(), PrepareError> {
    let mut store = |builder: &mut TokenSetBuilder, held: HeldRow| {
        let HeldRow { file, unit, number, row } = held;
        let place = RowPlace { file: &file, unit, number };
        bad.count(place);
        on_rows(1);
        let stored = match row.map(|row| (row.example, row.fields)) {
            Ok((Example::Tokens { ids, labels }, fields)) => {
                let clips = builder.read_clips(place, &fields).map_err(TokensError::from);
                let stored = clips.and_then(|clips| match clips {
                    Some(clips) => builder.push_with_clips(place, &ids, labels.as_deref(), &clips),
                    None => Ok(()),
                });
                stored.map_err(PrepareError::from)
            }
            Ok((Example::Group(group), _)) => {
                let members =
                    group.members.into_iter().map(|(member, mark)| (sample_of_tokens(member), mark));
                let members: Vec<(EncodedSample, f32)> = members.collect();
                builder.push_group(place, group.kind, &members).map_err(PrepareError::from)
            }
            Ok(_) => unreachable!("rows of the format `tokens` have examples of tokens"),
            Err(error) => Err(error.into()),
        };
        stored.or_else(|error| note_bad_row(bad, builder, place, error))
    };
    read_groups(reading, builder.rows_per_group(threads), |rows| {
        builder.decode_ahead(&rows, threads);
        rows.into_iter().try_for_each(|held| store(builder, held))
    })
}

/// A prompt and a completion that are tokens already.
fn sample_of_tokens(example: Example) -> EncodedSample {
    let Example::Tokens { ids, labels } = example else {
        unreachable!("rows of the format `tokens` have answers of tokens")
    };
    let labels = labels.unwrap_or_default();
    let first = labels.iter().take_while(|label| **label == i64::from(NOT_SUPERVISED)).count();
    EncodedSample::of_tokens(ids, first)
}

/// Tokenizes and stores rows of text.
pub fn tokenize_rows(
    reading: RowReading<'_>,
    encoder: &RowEncoder<'_>,
    threads: usize,
    builder: &mut TokenSetBuilder,
    bad: &mut BadRows,
    on_rows: impl FnMut(u64),
) -> Result<RowNotes, PrepareError> {
    thread::scope(|scope| {
        let files = reading.source.files();
        let mut pipeline = Pipeline::start(scope, files, encoder, threads.max(1), builder, bad, on_rows);
        let group_size = pipeline.builder.rows_per_group(threads);
        let read = read_groups(reading, group_size, |rows| {
            pipeline.builder.decode_ahead(&rows, threads);
            rows.into_iter().try_for_each(|HeldRow { file, unit, number, row }| {
                pipeline.push(RowPlace { file: &file, unit, number }, row)
            })
        });
        // Rows before the place where a file is broken are finished first: one of them may have the first mistake.
        pipeline.finish()?;
        read?;
        Ok(pipeline.notes)
    })
}

fn note_bad_row(
    bad: &mut BadRows,
    builder: &mut TokenSetBuilder,
    place: RowPlace<'_>,
    error: PrepareError,
) -> Result<(), PrepareError> {
    bad.note(place, error)?;
    builder.count_bad_row();
    Ok(())
}

/// A row in flight: an [`Example`] before it is tokenized, samples after.
struct Row<T> {
    /// Index in the list of files.
    file: usize,
    unit: RowUnit,
    number: u64,
    content: Result<T, RowError>,
    clips: Vec<u32>,
}

struct Chunk<T> {
    index: u64,
    rows: Vec<Row<T>>,
}

type EncodedChunk = Chunk<EncodedRow>;

/// The samples of a row; if they are compared, how, with the mark of each.
struct EncodedRow {
    samples: Vec<EncodedSample>,
    group: Option<(GroupKind, Vec<f32>)>,
}

/// Why a row has no tokens.
enum RowError {
    Format(FormatError),
    Audio(AudioRowError),
    /// A clip is too long, and the row is dropped.
    TooLong,
    Encode(EncodeError),
}

/// What a worker sends back: a chunk, or the panic that ended its work on it.
type WorkerResult = Result<EncodedChunk, Box<dyn Any + Send>>;

struct Pipeline<'a, F> {
    files: &'a [PathBuf],
    builder: &'a mut TokenSetBuilder,
    bad: &'a mut BadRows,
    on_rows: F,
    chunks: Option<Sender<Chunk<Example>>>,
    done: Receiver<WorkerResult>,
    /// Chunks that came back before their turn.
    early: BTreeMap<u64, EncodedChunk>,
    /// The chunk being filled.
    rows: Vec<Row<Example>>,
    text_bytes: usize,
    longest_bytes: usize,
    /// The text bytes of the longest row of each chunk in flight (sent and not stored), in order.
    in_flight: VecDeque<usize>,
    sent: u64,
    stored: u64,
    most_in_flight: u64,
    file: usize,
    notes: RowNotes,
    failed: bool,
    /// The text of the audio token, if the model has an audio encoder.
    audio_token: Option<String>,
}

impl<'a, F: FnMut(u64)> Pipeline<'a, F> {
    fn start<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        files: &'a [PathBuf],
        encoder: &'scope RowEncoder<'scope>,
        threads: usize,
        builder: &'a mut TokenSetBuilder,
        bad: &'a mut BadRows,
        on_rows: F,
    ) -> Self {
        let audio_token = builder.audio_token().and_then(|token| encoder.token_text(token));
        let (chunks, waiting) = channel::<Chunk<Example>>();
        let (send_done, done) = channel();
        let waiting = std::sync::Arc::new(Mutex::new(waiting));
        for _ in 0..threads {
            let (waiting, send_done) = (waiting.clone(), send_done.clone());
            scope.spawn(move || {
                loop {
                    let next = waiting.lock().map(|waiting| waiting.recv());
                    let Ok(Ok(chunk)) = next else { return };
                    let encoded = catch_unwind(AssertUnwindSafe(|| encode_chunk(encoder, chunk)));
                    if send_done.send(encoded).is_err() {
                        return;
                    }
                }
            });
        }
        Pipeline {
            files,
            builder,
            bad,
            on_rows,
            chunks: Some(chunks),
            done,
            early: BTreeMap::new(),
            rows: Vec::new(),
            text_bytes: 0,
            longest_bytes: 0,
            in_flight: VecDeque::new(),
            sent: 0,
            stored: 0,
            // Enough that no worker idles while this thread reads, or while another worker has a long row.
            most_in_flight: 3 * threads as u64 + 2,
            file: 0,
            notes: RowNotes::default(),
            failed: false,
            audio_token,
        }
    }

    fn push(
        &mut self,
        place: RowPlace<'_>,
        row: Result<ExampleRow, FormatError>,
    ) -> Result<(), PrepareError> {
        self.file = index_of(self.files, self.file, place.file);
        let with_clips = row.map_err(RowError::Format).and_then(|row| self.place_clips_of(place, row));
        let (content, clips) = match with_clips {
            Ok((example, clips)) => (Ok(example), clips),
            Err(error) => (Err(error), Vec::new()),
        };
        let bytes = content.as_ref().map_or(0, Example::text_bytes);
        self.text_bytes += bytes;
        self.longest_bytes = self.longest_bytes.max(bytes);
        let (unit, number) = (place.unit, place.number);
        self.rows.push(Row { file: self.file, unit, number, content, clips });
        if self.rows.len() >= ROWS_OF_A_CHUNK || self.text_bytes >= TEXT_BYTES_OF_A_CHUNK {
            self.send()
        } else {
            Ok(())
        }
    }

    /// The example with audio tokens in its texts, and its clips in the order of these tokens.
    fn place_clips_of(
        &mut self,
        place: RowPlace<'_>,
        row: ExampleRow,
    ) -> Result<(Example, Vec<u32>), RowError> {
        let ExampleRow { mut example, fields } = row;
        let clips =
            self.builder.read_clips(place, &fields).map_err(RowError::Audio)?.ok_or(RowError::TooLong)?;
        let Some(token) = &self.audio_token else { return Ok((example, clips)) };
        let tokens: Vec<usize> = clips.iter().map(|clip| self.builder.tokens_of_clip(*clip)).collect();
        let order = place_clips(&mut example, &tokens, token).map_err(|misplaced| {
            let (place, clips) = (place.to_string(), clips.len());
            RowError::Audio(match misplaced {
                Misplaced::Placeholder(placeholder) => {
                    AudioRowError::Placeholders { place, placeholder, clips }
                }
                Misplaced::NoText => AudioRowError::NoText { place, clips },
            })
        })?;
        let clips = order.into_iter().map(|index| clips[index]).collect();
        Ok((example, clips))
    }

    fn send(&mut self) -> Result<(), PrepareError> {
        let rows = std::mem::replace(&mut self.rows, Vec::with_capacity(ROWS_OF_A_CHUNK));
        self.text_bytes = 0;
        let longest_bytes = std::mem::take(&mut self.longest_bytes);
        let is_too_long = |in_flight: &VecDeque<usize>| {
            longest_bytes + in_flight.iter().sum::<usize>() > LONGEST_BYTES_IN_FLIGHT
        };
        while !self.in_flight.is_empty() && is_too_long(&self.in_flight) {
            self.wait()?;
        }
        self.in_flight.push_back(longest_bytes);
        let chunks = self.chunks.as_ref().expect("nothing is sent after the end");
        chunks.send(Chunk { index: self.sent, rows }).expect("workers wait until the sender is gone");
        self.sent += 1;
        while self.sent - self.stored >= self.most_in_flight {
            self.wait()?;
        }
        Ok(())
    }

    /// Waits for one chunk, and stores those whose turn it is.
    fn wait(&mut self) -> Result<(), PrepareError> {
        let done = self.done.recv().expect("workers answer every chunk");
        let done = done.unwrap_or_else(|panic| resume_unwind(panic));
        self.early.insert(done.index, done);
        while let Some(done) = self.early.remove(&self.stored) {
            self.stored += 1;
            self.in_flight.pop_front();
            (self.on_rows)(done.rows.len() as u64);
            for Row { file, unit, number, content, clips } in done.rows {
                let place = RowPlace { file: &self.files[file], unit, number };
                self.bad.count(place);
                let stored = match content {
                    Ok(EncodedRow { samples, group: None }) => {
                        self.notes.note(&samples);
                        self.builder.push_samples(place, &samples, &clips).map_err(PrepareError::from)
                    }
                    Ok(EncodedRow { group: Some(_), .. }) if !clips.is_empty() => {
                        Err(PrepareError::Tokens(TokensError::AudioToCompare { place: place.to_string() }))
                    }
                    Ok(EncodedRow { samples, group: Some((kind, marks)) }) => {
                        self.notes.note(&samples[..1]);
                        let members: Vec<_> = samples.into_iter().zip(marks).collect();
                        self.builder.push_group(place, kind, &members).map_err(PrepareError::from)
                    }
                    Err(RowError::Format(error)) => Err(error.into()),
                    Err(RowError::Audio(error)) => Err(PrepareError::Tokens(error.into())),
                    // Counted when it was read.
                    Err(RowError::TooLong) => Ok(()),
                    Err(RowError::Encode(error)) => {
                        Err(PrepareError::Row { place: place.to_string(), error })
                    }
                };
                let stored = stored.or_else(|error| note_bad_row(self.bad, self.builder, place, error));
                if stored.is_err() {
                    self.failed = true;
                    return stored;
                }
            }
        }
        Ok(())
    }

    /// Tokenizes and stores the remaining rows.
    fn finish(&mut self) -> Result<(), PrepareError> {
        let rest = if self.failed || self.rows.is_empty() { Ok(()) } else { self.send() };
        let rest = rest.and_then(|()| {
            while !self.failed && self.stored < self.sent {
                self.wait()?;
            }
            Ok(())
        });
        // Ends the workers; otherwise they would wait for more chunks, and the scope for them.
        self.chunks = None;
        rest
    }
}

fn encode_chunk(encoder: &RowEncoder<'_>, chunk: Chunk<Example>) -> EncodedChunk {
    let encode = |row: Row<Example>| {
        let Row { file, unit, number, content, clips } = row;
        let content = content.and_then(|example| encode_row(encoder, &example).map_err(RowError::Encode));
        Row { file, unit, number, content, clips }
    };
    Chunk { index: chunk.index, rows: chunk.rows.into_iter().map(encode).collect() }
}

fn encode_row(encoder: &RowEncoder<'_>, example: &Example) -> Result<EncodedRow, EncodeError> {
    let Example::Group(group) = example else {
        return Ok(EncodedRow { samples: encoder.encode(example)?, group: None });
    };
    let mut samples = Vec::new();
    for (member, _) in &group.members {
        // A conversation whose prompt is known becomes one sample.
        samples.extend(encoder.encode(member)?);
    }
    let marks = group.members.iter().map(|(_, mark)| *mark).collect();
    Ok(EncodedRow { samples, group: Some((group.kind, marks)) })
}

/// The index of a file in the list, which is read in order.
fn index_of(files: &[PathBuf], from: usize, file: &Path) -> usize {
    (from..files.len()).find(|index| files[*index] == file).unwrap_or(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::RowFormat;
    use crate::tokens::{TokenLimits, TokenSet};
    use smidgen_formats::tokenizer::Tokenizer;
    use smidgen_ir::words::{LossOn, OnBadRow, Overflow};
    use std::fmt::Write;

    fn reading(files: &[PathBuf], format: RowFormat) -> RowReading<'_> {
        RowReading { source: files.into(), format, columns: &[], limit: 0 }
    }

    fn tokenize(text: &str, threads: usize) -> Result<(TokenSet, RowNotes), String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, text).unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/sft");
        let tokenizer = Tokenizer::from_folder(&fixtures.join("byte_level")).unwrap();
        let encoder = RowEncoder::new(&tokenizer, None, LossOn::Completion);
        let limits = TokenLimits { vocab_size: 1000, max_tokens: 50, overflow: Overflow::Truncate };
        let mut builder = TokenSetBuilder::new(limits);
        let mut rows = 0;
        let files = [path];
        let reading = reading(&files, RowFormat::PromptCompletion);
        let mut bad = BadRows::default();
        let notes = tokenize_rows(reading, &encoder, threads, &mut builder, &mut bad, |some| rows += some);
        let shown =
            |error: PrepareError| error.to_string().replace(&format!("{}/", folder.path().display()), "");
        let notes = match notes {
            Ok(notes) => bad.finish(OnBadRow::Error).map(|_| notes).map_err(shown)?,
            Err(error) => return Err(shown(bad.error_with_bad_rows(error, OnBadRow::Error))),
        };
        let set = builder.finish().unwrap();
        assert_eq!(rows, set.stats().rows.read);
        Ok((set, notes))
    }

    /// Some rows are much longer than others, so that chunks overtake each other.
    fn rows(count: usize) -> String {
        let mut text = String::new();
        for row in 0..count {
            let words = if row % 37 == 0 { 3000 } else { row % 5 + 1 };
            let prompt = "lazy dog ".repeat(words);
            writeln!(text, "{{\"prompt\": \"{row} {prompt}\", \"completion\": \"fox {row}\"}}").unwrap();
        }
        text
    }

    #[test]
    fn the_number_of_threads_changes_nothing() {
        let text = rows(400);
        let (one, notes) = tokenize(&text, 1).unwrap();
        assert_eq!((notes.rows, notes.turn_end_supervised), (400, 400));
        assert!(one.stats().rows.unsupervised_by_truncation > 0);
        for threads in [2, 5] {
            let (several, again) = tokenize(&text, threads).unwrap();
            assert_eq!((several.stats(), again), (one.stats(), notes));
            for index in 0..one.len() {
                assert_eq!(several.sample(index).unwrap(), one.sample(index).unwrap());
                assert_eq!(several.place(index).number, one.place(index).number);
            }
        }
    }

    #[test]
    fn the_first_mistake_is_reported_whatever_else_is_wrong() {
        // A conversation with `data.template = "none"`, then a line that is not JSON: found by workers and by the reader.
        let chat = "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"completion\": [{\"role\": \"assistant\", \"content\": \"b\"}]}\n";
        let expected = "`rows.jsonl` line 101: `data.template = none`: rows of `chat` need a template";
        for threads in [1, 3] {
            let error = tokenize(&format!("{}{chat}{}{chat}", rows(100), rows(100)), threads).unwrap_err();
            assert_eq!(error, expected);
            let error = tokenize(&format!("{}{chat}nonsense\n", rows(100)), threads).unwrap_err();
            assert_eq!(error, expected);
            let error = tokenize(&format!("{}nonsense\n{chat}", rows(100)), threads).unwrap_err();
            assert!(error.starts_with("`rows.jsonl` line 101, column 2: broken JSON"), "{error}");
        }
    }

    fn store(files: &[(&str, &str)]) -> Result<TokenSet, String> {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<PathBuf> = files.iter().map(|(name, _)| folder.path().join(name)).collect();
        for (path, (_, text)) in paths.iter().zip(files) {
            std::fs::write(path, text).unwrap();
        }
        let limits = TokenLimits { vocab_size: 100, max_tokens: 1024, overflow: Overflow::Truncate };
        let mut builder = TokenSetBuilder::new(limits);
        let mut bad = BadRows::default();
        let stored = store_token_rows(reading(&paths, RowFormat::Tokens), 2, &mut builder, &mut bad, |_| {})
            .and_then(|()| bad.finish(OnBadRow::Error))
            .and_then(|_| builder.finish().map_err(PrepareError::from));
        stored.map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
    }

    #[test]
    fn rows_of_tokens_from_several_files_make_one_set() {
        let set = store(&[
            (
                "a.jsonl",
                "{\"input_ids\": [1, 2], \"attention_mask\": [1, 1], \"labels\": null}\n\n{\"labels\": [-100, 4], \"input_ids\": [3, 4]}\n",
            ),
            ("b.json", "[{\"input_ids\": [5, 6, 7], \"note\": {\"a\": [1.5]}}]"),
        ])
        .unwrap();
        let samples: Vec<_> = (0..set.len())
            .map(|index| set.sample(index).unwrap())
            .map(|sample| (sample.ids, sample.labels))
            .collect();
        assert_eq!(
            samples,
            [(vec![1, 2], vec![1, 2]), (vec![3, 4], vec![-100, 4]), (vec![5, 6, 7], vec![5, 6, 7]),]
        );
        assert!(set.place(1).to_string().ends_with("a.jsonl` line 3"));
        assert!(set.place(2).to_string().ends_with("b.json` row 1"));
    }

    #[test]
    fn broken_rows_of_tokens_are_named() {
        let said = |text: &str| store(&[("a.jsonl", text)]).unwrap_err();
        assert_eq!(
            said("{\"input_ids\": [1, 2]}\n{\"input_ids\": [1, 2}\n"),
            "`a.jsonl` line 2, column 20: broken JSON: expected `,` or `]`"
        );
        assert_eq!(
            said("\n{\"input_ids\": [1, 2.5]}"),
            "`a.jsonl` line 2: `input_ids[1]` is a number, expected a whole number"
        );
        assert_eq!(
            store(&[("a.json", "[{\"input_ids\": [1, 2]}, {\"input_ids\": [1, 200]}]")]).unwrap_err(),
            "`a.json` row 2: `input_ids[1]` is 200, the model's vocabulary is 0 to 99"
        );
        assert_eq!(said("\n"), "no rows");
        assert_eq!(store(&[("a.json", "[]")]).unwrap_err(), "no rows");
    }
}
