//! Builds a token set from rows: unusable rows are dropped and counted, rows that are too long are cut.
//!
//! A set grows in memory up to a limit and then continues in a file, so it may be larger than memory: then only 12
//! bytes per sample stay in memory.
//! The checks of a row are in `token_row.rs`, the file is in `token_file.rs`.

use std::path::PathBuf;

use serde_json::{Map, Value as Json};

use crate::clip_row::{AudioOptions, AudioRowError, ClipReader};
use crate::clips::ClipCollector;
use crate::example::{Group, GroupKind, has_audio};
use crate::mask::EncodedSample;
use crate::row_group::HeldRow;
use crate::row_place::RowPlace;
use crate::token_file::TokenFileWriter;
use crate::token_record::{LabelForm, NOT_SUPERVISED, RowLabels};
use crate::token_row::{TokensError, check_token_row};
use crate::tokens::{Records, RowCounts, TokenLimits, TokenSet, TokenStats};
use smidgen_ir::objective::RowsNeeded;
use smidgen_ir::words::Overflow;

/// The file in which a set continues when it becomes large.
#[derive(Clone, Debug)]
pub struct LargeSets {
    /// Above this many bytes of records the set continues in the file.
    pub above_bytes: usize,
    pub path: PathBuf,
    /// A form that can represent the labels of all later rows, because records in a file cannot be rewritten.
    pub form: LabelForm,
}

/// Builds a set from rows, which are pushed one at a time.
pub struct TokenSetBuilder {
    limits: TokenLimits,
    set: TokenSet,
    large: Option<LargeSets>,
    /// The records of all rows; once the set is large, of the current row only.
    records: Vec<u8>,
    /// `Some` once the set is large.
    writer: Option<TokenFileWriter>,
    /// The first row that `Overflow::Error` refuses, and how many there are.
    first_too_long: Option<(String, usize)>,
    too_long: u64,
    longest_read: usize,
    /// `None` if the model has no audio encoder.
    audio: Option<RowAudio>,
}

/// The clips of rows, and what reads them.
struct RowAudio {
    reader: ClipReader,
    collector: ClipCollector,
}

impl TokenSetBuilder {
    /// A set in memory, whatever its size.
    pub fn new(limits: TokenLimits) -> Self {
        TokenSetBuilder {
            limits,
            set: TokenSet {
                records: Records::Memory(Vec::new()),
                form: LabelForm::Bits,
                lengths: Vec::new(),
                supervised: Vec::new(),
                row_numbers: Vec::new(),
                block_starts: Vec::new(),
                starts: None,
                sources: vec![0],
                files: Vec::new(),
                files_of_samples: Vec::new(),
                stats: TokenStats::empty(RowCounts::default()),
                clips: None,
                rows: RowsNeeded::Samples,
                marks: Vec::new(),
            },
            large: None,
            records: Vec::new(),
            writer: None,
            first_too_long: None,
            too_long: 0,
            longest_read: 0,
            audio: None,
        }
    }

    /// Accepts only rows that an objective needs.
    pub fn needing(mut self, rows: RowsNeeded) -> Self {
        self.set.rows = rows;
        self
    }

    /// Accepts rows with `audio`.
    pub fn with_audio(self, options: AudioOptions) -> Self {
        let collector = ClipCollector::new(options.token, options.scratch.clone());
        TokenSetBuilder { audio: Some(RowAudio { reader: ClipReader::new(options), collector }), ..self }
    }

    /// The number of rows whose clips should be decoded together; 1 without audio.
    pub fn rows_per_group(&self, threads: usize) -> usize {
        if self.audio.is_some() { 2 * threads.max(1) } else { 1 }
    }

    /// Decodes the clips of rows that will be read next.
    pub fn decode_ahead(&mut self, rows: &[HeldRow], threads: usize) {
        if let Some(RowAudio { reader, .. }) = &mut self.audio {
            reader.decode_ahead(rows, threads);
        }
    }

    /// Decodes and stores the clips that a row names. `None` if one of them is too long, so that the row is dropped.
    pub fn read_clips(
        &mut self,
        place: RowPlace<'_>,
        fields: &Map<String, Json>,
    ) -> Result<Option<Vec<u32>>, AudioRowError> {
        let Some(RowAudio { reader, collector }) = &mut self.audio else {
            return if has_audio(fields) {
                Err(AudioRowError::NoEncoder { place: place.to_string() })
            } else {
                Ok(Some(Vec::new()))
            };
        };
        let clips = reader.read(place, fields, collector)?;
        if clips.is_none() {
            self.set.stats.rows.read += 1;
            self.set.stats.rows.audio_too_long += 1;
        }
        Ok(clips)
    }

    /// The token whose embeddings are replaced by those of the audio encoder, if the model has one.
    pub fn audio_token(&self) -> Option<u32> {
        self.audio.as_ref().map(|audio| audio.collector.token() as u32)
    }

    /// The number of audio tokens of a clip: one for each of its embeddings.
    pub fn tokens_of_clip(&self, clip: u32) -> usize {
        self.audio.as_ref().map_or(0, |audio| audio.collector.rows(clip))
    }

    /// How many of its row's clips a sample has: the first ones, as far as its audio tokens reach.
    fn clips_of_sample(
        &self,
        place: RowPlace<'_>,
        ids: &[i64],
        clips: &[u32],
    ) -> Result<usize, AudioRowError> {
        let Some(audio) = &self.audio else { return Ok(0) };
        let token = i64::from(audio.collector.token());
        let tokens = ids.iter().filter(|id| **id == token).count();
        let (mut count, mut needed) = (0, 0);
        while needed < tokens && count < clips.len() {
            needed += audio.collector.rows(clips[count]);
            count += 1;
        }
        let place = || place.to_string();
        match clips {
            _ if needed == tokens && (tokens > 0 || clips.is_empty()) => Ok(count),
            [] => Err(AudioRowError::NoAudio { place: place(), tokens }),
            _ => {
                let needed = clips.iter().map(|clip| audio.collector.rows(*clip)).sum();
                Err(AudioRowError::TokensDiffer { place: place(), tokens, clips: clips.len(), needed })
            }
        }
    }

    /// A set that continues in a file when it becomes large.
    pub fn with_large_sets(limits: TokenLimits, large: LargeSets) -> Self {
        TokenSetBuilder { large: Some(large), ..TokenSetBuilder::new(limits) }
    }

    /// The statistics of the rows so far; the mean is set at the end.
    pub fn stats(&self) -> &TokenStats {
        &self.set.stats
    }

    /// The rows that follow belong to another source, with its own `overflow`.
    pub fn begin_source(&mut self, overflow: Overflow) {
        let first = self.set.lengths.len();
        if self.set.sources.last() != Some(&first) {
            self.set.sources.push(first);
        }
        self.limits.overflow = overflow;
    }

    /// Counts a row that is left out.
    pub fn count_bad_row(&mut self) {
        self.set.stats.rows.read += 1;
        self.set.stats.rows.bad += 1;
    }

    /// Checks a row, then keeps or drops it. Without labels every token is supervised.
    pub fn push(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: Option<&[i64]>,
    ) -> Result<(), TokensError> {
        self.push_with_clips(place, ids, labels, &[])
    }

    /// The same for a row with clips: it must have one audio token for each embedding of its clips.
    pub fn push_with_clips(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: Option<&[i64]>,
        clips: &[u32],
    ) -> Result<(), TokensError> {
        self.refuse_other_rows(place, None)?;
        check_token_row(self.limits.vocab_size, place, ids, labels)?;
        let own = self.clips_of_sample(place, ids, clips)?;
        if own < clips.len() {
            let needed = clips.iter().map(|clip| self.tokens_of_clip(*clip)).sum();
            let tokens = clips[..own].iter().map(|clip| self.tokens_of_clip(*clip)).sum();
            let (place, clips) = (place.to_string(), clips.len());
            return Err(AudioRowError::TokensDiffer { place, tokens, clips, needed }.into());
        }
        self.push_checked(place, ids, labels.map_or(RowLabels::All, RowLabels::Given), clips)
    }

    /// The same for a row whose supervised tokens are those of `spans`.
    pub fn push_spans(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        spans: &[std::ops::Range<usize>],
    ) -> Result<(), TokensError> {
        self.refuse_other_rows(place, None)?;
        check_token_row(self.limits.vocab_size, place, ids, None)?;
        self.push_checked(place, ids, RowLabels::Spans(spans), &[])
    }

    /// The same for all samples of one row.
    pub fn push_samples(
        &mut self,
        place: RowPlace<'_>,
        samples: &[EncodedSample],
        clips: &[u32],
    ) -> Result<(), TokensError> {
        self.refuse_other_rows(place, None)?;
        // A row is stored with all its samples or not at all.
        let mut own = Vec::with_capacity(samples.len());
        for sample in samples {
            check_token_row(self.limits.vocab_size, place, &sample.ids, None)?;
            own.push(self.clips_of_sample(place, &sample.ids, clips)?);
        }
        for (sample, own) in samples.iter().zip(own) {
            self.push_checked(place, &sample.ids, RowLabels::Spans(&sample.spans), &clips[..own])?;
        }
        let more = samples.len().saturating_sub(1) as u64;
        self.set.stats.rows.read -= more;
        self.set.stats.rows.split_off += more;
        Ok(())
    }

    /// Checks the answers of a row, then keeps all of them or none. Supervised are the completions.
    pub fn push_group(
        &mut self,
        place: RowPlace<'_>,
        kind: GroupKind,
        answers: &[(EncodedSample, f32)],
    ) -> Result<(), TokensError> {
        self.refuse_other_rows(place, Some(kind))?;
        if let (RowsNeeded::Answers { count }, given) = (self.set.rows, answers.len())
            && count != given
        {
            return Err(TokensError::Answers { place: place.to_string(), given, count });
        }
        let max_tokens = self.limits.max_tokens as usize;
        let cut = |answer: &EncodedSample| answer.ids.len().min(max_tokens);
        for (answer, _) in answers {
            check_token_row(self.limits.vocab_size, place, &answer.ids, None)?;
        }
        let rows = &mut self.set.stats.rows;
        rows.read += 1;
        let longest = answers.iter().map(|(answer, _)| answer.ids.len()).max().unwrap_or(0);
        self.longest_read = self.longest_read.max(longest);
        let is_too_long = longest > max_tokens;
        if is_too_long && matches!(self.limits.overflow, Overflow::Drop | Overflow::Error) {
            self.too_long += 1;
            rows.too_long += 1;
            self.first_too_long.get_or_insert_with(|| (place.to_string(), longest));
            return Ok(());
        }
        let supervised =
            |answer: &EncodedSample, end: usize| RowLabels::Spans(&answer.spans).supervised_before(end);
        if answers.iter().any(|(answer, _)| supervised(answer, cut(answer)) == 0) {
            match is_too_long {
                true => rows.unsupervised_by_truncation += 1,
                false => rows.unsupervised += 1,
            }
            return Ok(());
        }
        rows.kept += 1;
        rows.truncated += u64::from(is_too_long);
        for (index, (answer, mark)) in answers.iter().enumerate() {
            let kept = cut(answer);
            self.set.stats.cut_tokens += (answer.ids.len() - kept) as u64;
            let count = supervised(answer, kept);
            let counts_prompt = self.set.rows == RowsNeeded::Pairs { counts_prompt: true } && index == 0;
            let labels = if counts_prompt { RowLabels::All } else { RowLabels::Spans(&answer.spans) };
            let all = labels.supervised_before(kept);
            self.set.marks.push(if counts_prompt { (all - count) as f32 } else { *mark });
            self.push_sample(place, &answer.ids[..kept], labels, all, &[])?;
        }
        Ok(())
    }

    /// Refuses rows that the objective cannot be trained on; `None` is a plain sample.
    fn refuse_other_rows(&self, place: RowPlace<'_>, kind: Option<GroupKind>) -> Result<(), TokensError> {
        let needed = self.set.rows;
        let suits = match kind {
            None => matches!(needed, RowsNeeded::Samples | RowsNeeded::Prompts),
            Some(kind) => Group { kind, members: vec![] }.suits(needed),
        };
        if suits {
            return Ok(());
        }
        let found = match kind {
            None => "is a sample to imitate",
            Some(GroupKind::Pair) => "has a chosen and a rejected answer",
            Some(GroupKind::Labelled) => "has a completion with a label",
            Some(GroupKind::Rewarded) => "has completions with rewards",
        };
        Err(TokensError::OtherRows { place: place.to_string(), found, needed: needed.describe() })
    }

    fn push_checked(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: RowLabels<'_>,
        clips: &[u32],
    ) -> Result<(), TokensError> {
        let max_tokens = self.limits.max_tokens as usize;
        let cuts_audio = !clips.is_empty() && self.has_audio_tokens(ids.get(max_tokens..).unwrap_or(&[]));
        let rows = &mut self.set.stats.rows;
        rows.read += 1;
        self.longest_read = self.longest_read.max(ids.len());
        if ids.len() < 2 {
            rows.too_short += 1;
            return Ok(());
        }
        let too_long = ids.len() > max_tokens;
        match self.limits.overflow {
            // A clip is never cut here: a part of it would be paired with the whole transcript.
            Overflow::Truncate | Overflow::Chunk | Overflow::Auto if cuts_audio => {
                rows.audio_too_long += 1;
                return Ok(());
            }
            Overflow::Chunk if too_long && clips.is_empty() => return self.push_pieces(place, ids, labels),
            Overflow::Drop | Overflow::Error if too_long => {
                self.too_long += 1;
                rows.too_long += 1;
                if self.first_too_long.is_none() {
                    self.first_too_long = Some((place.to_string(), ids.len()));
                }
                return Ok(());
            }
            _ => {}
        }
        let kept = ids.len().min(max_tokens);
        let supervised = labels.supervised_before(kept);
        if supervised == 0 {
            if too_long && labels.supervised_before(ids.len()) > 0 {
                rows.unsupervised_by_truncation += 1
            } else {
                rows.unsupervised += 1
            }
            return Ok(());
        }
        rows.kept += 1;
        rows.truncated += u64::from(too_long);
        self.set.stats.cut_tokens += (ids.len() - kept) as u64;
        self.push_sample(place, &ids[..kept], labels, supervised, clips)
    }

    fn has_audio_tokens(&self, ids: &[i64]) -> bool {
        let token = self.audio.as_ref().map(|audio| i64::from(audio.collector.token()));
        token.is_some_and(|token| ids.contains(&token))
    }

    /// Cuts a row into pieces of at most `max_tokens`; pieces without a supervised token are left out.
    fn push_pieces(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: RowLabels<'_>,
    ) -> Result<(), TokensError> {
        let (before, mut first) = (self.set.lengths.len(), 0);
        while first < ids.len() {
            let end = end_of_piece(first, ids.len(), self.limits.max_tokens as usize);
            let spans = labels.spans_within(first..end);
            let piece = match labels {
                RowLabels::All => RowLabels::All,
                RowLabels::Spans(_) => RowLabels::Spans(&spans),
                RowLabels::Given(labels) => RowLabels::Given(&labels[first..end]),
            };
            match piece.supervised_before(end - first) {
                0 => self.set.stats.cut_tokens += (end - first) as u64,
                supervised => self.push_sample(place, &ids[first..end], piece, supervised, &[])?,
            }
            first = end;
        }
        let pieces = (self.set.lengths.len() - before) as u64;
        let rows = &mut self.set.stats.rows;
        match pieces {
            0 => rows.unsupervised += 1,
            _ => {
                rows.kept += 1;
                rows.chunked += 1;
                rows.pieces += pieces;
            }
        }
        Ok(())
    }

    fn push_sample(
        &mut self,
        place: RowPlace<'_>,
        ids: &[i64],
        labels: RowLabels<'_>,
        supervised: usize,
        clips: &[u32],
    ) -> Result<(), TokensError> {
        self.store(ids, labels)?;
        if let Some(audio) = &mut self.audio {
            audio.collector.push_sample(clips);
        }
        let (set, kept) = (&mut self.set, ids.len());
        set.lengths.push(kept as u32);
        set.supervised.push(supervised as u32);
        set.note_file(place.file, place.unit);
        set.row_numbers.push(u32::try_from(place.number).unwrap_or(u32::MAX));
        set.stats.add_sample(kept, supervised);
        Ok(())
    }

    /// Appends the record of a row that was checked, so that every value fits an i32.
    fn store(&mut self, ids: &[i64], labels: RowLabels<'_>) -> Result<(), TokensError> {
        if self.set.form == LabelForm::Bits && !labels.are_bits(ids) {
            self.write_labels_as_numbers();
        }
        self.set.form.encode(ids, labels, &mut self.records);
        if let Some(writer) = &mut self.writer {
            writer.append(&self.records)?;
            self.records.clear();
            return Ok(());
        }
        let Some(large) = self.large.take_if(|large| self.records.len() > large.above_bytes) else {
            return Ok(());
        };
        if large.form != self.set.form {
            // The current row is not among the lengths yet, so it is removed and encoded again.
            let row_bytes = self.set.form.record_bytes(ids.len()) as usize;
            self.records.truncate(self.records.len() - row_bytes);
            self.write_labels_as_numbers();
            self.set.form.encode(ids, labels, &mut self.records);
        }
        let mut writer = TokenFileWriter::create(&large.path)?;
        writer.append(&std::mem::take(&mut self.records))?;
        self.writer = Some(writer);
        Ok(())
    }

    /// Rewrites the records in memory, with a number for each label instead of a bit.
    fn write_labels_as_numbers(&mut self) {
        assert!(self.writer.is_none(), "the label form of a set in a file can represent every row");
        let mut rewritten = Vec::with_capacity(2 * self.records.len());
        let (mut ids, mut wide, mut labels) = (Vec::new(), Vec::new(), Vec::new());
        let mut rest = &self.records[..];
        for &length in &self.set.lengths {
            let length = length as usize;
            let (record, after) = rest.split_at(LabelForm::Bits.record_bytes(length) as usize);
            ids.clear();
            labels.clear();
            labels.resize(length, i64::from(NOT_SUPERVISED));
            LabelForm::Bits.decode(record, length, &mut ids, |t, label| labels[t] = i64::from(label));
            wide.clear();
            wide.extend(ids.iter().map(|&id| i64::from(id)));
            LabelForm::Numbers.encode(&wide, RowLabels::Given(&labels), &mut rewritten);
            rest = after;
        }
        self.set.form = LabelForm::Numbers;
        self.records = rewritten;
    }

    pub fn finish(self) -> Result<TokenSet, TokensError> {
        self.finish_with(&[], &Json::Null)
    }

    /// Finishes the set. If it is in a file, the file also stores `about` and which of `files` the samples came from.
    pub fn finish_with(self, files: &[PathBuf], about: &Json) -> Result<TokenSet, TokensError> {
        let mut set = self.set;
        let rows = set.stats.rows;
        let max_tokens = self.limits.max_tokens;
        if let (Overflow::Error, Some((place, tokens))) = (self.limits.overflow, self.first_too_long) {
            return Err(TokensError::TooLong {
                place,
                tokens,
                max_tokens,
                rows: self.too_long,
                rows_read: rows.read,
                longest: self.longest_read,
            });
        }
        if rows.read == 0 {
            return Err(TokensError::NoRows);
        }
        if rows.kept == 0 {
            return Err(match rows.unsupervised + rows.unsupervised_by_truncation {
                0 => TokensError::NoRowsLeft { counts: rows, max_tokens, longest: self.longest_read },
                _ => TokensError::NothingSupervised { counts: rows, max_tokens },
            });
        }
        if set.rows == RowsNeeded::Labels {
            let first = set.marks[0];
            if set.marks.iter().all(|mark| *mark == first) {
                return Err(TokensError::OneClass { label: first > 0.0 });
            }
        }
        set.stats.mean_tokens = set.stats.tokens as f64 / set.lengths.len() as f64;
        set.lengths.shrink_to_fit();
        set.supervised.shrink_to_fit();
        set.row_numbers.shrink_to_fit();
        set.files.shrink_to_fit();
        set.files_of_samples.shrink_to_fit();
        set.index_blocks();
        set.clips = self.audio.and_then(|audio| audio.collector.finish());
        set.records = match self.writer {
            Some(writer) => writer.finish(&set, files, about)?,
            None => {
                let mut records = self.records;
                records.shrink_to_fit();
                Records::Memory(records)
            }
        };
        Ok(set)
    }
}

/// Where the piece that begins at `first` ends. A last piece of one token could not be trained on, so the piece before
/// it is one token shorter.
fn end_of_piece(first: usize, tokens: usize, max_tokens: usize) -> usize {
    let end = tokens.min(first + max_tokens);
    match tokens - end {
        1 if max_tokens > 2 => end - 1,
        _ => end,
    }
}

/// Sets for tests of other files.
#[cfg(test)]
pub(crate) mod test_sets {
    use super::*;
    use crate::row_place::RowUnit;
    use std::path::Path;

    pub fn set_of_rows(rows: &[(Vec<i64>, Vec<i64>)]) -> TokenSet {
        let mut builder = TokenSetBuilder::new(TokenLimits {
            vocab_size: u32::MAX,
            max_tokens: u32::MAX,
            overflow: Overflow::Error,
        });
        for (row, (ids, labels)) in rows.iter().enumerate() {
            let place =
                RowPlace { file: Path::new("rows.jsonl"), unit: RowUnit::Line, number: row as u64 + 1 };
            builder.push(place, ids, Some(labels)).unwrap();
        }
        builder.finish().unwrap()
    }

    /// Every token supervised.
    pub fn set_of_lengths(lengths: &[usize]) -> TokenSet {
        let rows: Vec<_> = lengths.iter().map(|&length| (vec![0; length], vec![0; length])).collect();
        set_of_rows(&rows)
    }
}

#[cfg(test)]
#[path = "token_builder_tests.rs"]
mod tests;
