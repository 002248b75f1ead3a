//! The `audio` of a row: one clip or several, as files or as bytes inside the row.
//!
//! A path is relative to the data file, or to `data.audio_dir`. Data sets on the hub store `{"bytes", "path"}`; bytes
//! take precedence. A clip that is longer than `data.max_audio_seconds` is trimmed, or its row is dropped.
//! Where clips go among the tokens is in `audio_text.rs` and `token_builder.rs`; decoding is in `smidgen-formats`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Map, Value as Json};
use smidgen_formats::audio::{
    BYTES_PREFIX, Clip, ClipError, ClipLimit, LogMel, decode_clip, decode_file, from_base64,
};
use smidgen_formats::digest::Hasher;
use thiserror::Error;

use crate::chat_row::kind_of;
use crate::clips::ClipCollector;
use crate::example::AUDIO_FIELD;
use crate::row_group::HeldRow;
use crate::row_place::RowPlace;

/// How clips are read.
#[derive(Clone, Debug)]
pub struct AudioOptions {
    /// The token whose embeddings are replaced by those of the audio encoder.
    pub token: u32,
    pub max_seconds: f64,
    /// Longer clips lose their end; otherwise their rows are dropped.
    pub trim: bool,
    /// The folder that relative paths start from; if `None`, the folder of the data file.
    pub folder: Option<PathBuf>,
    /// The folder of the temporary file for features.
    pub scratch: PathBuf,
}

#[derive(Debug, Error)]
pub enum AudioRowError {
    #[error("{place}: {name} {error}")]
    Clip { place: String, name: String, error: ClipError },
    #[error(
        "{place}: `audio` must be a path, an object with `bytes` or `path`, or a list of these, got {got}"
    )]
    WrongType { place: String, got: &'static str },
    #[error("{place}: `audio.bytes` is not base64")]
    NotBase64 { place: String },
    #[error("{place} has `audio`, but the model's config has no audio encoder")]
    NoEncoder { place: String },
    #[error(
        "{place} has {}, its {} {} {needed}",
        counted(*tokens, "audio token"),
        counted(*clips, "clip"),
        if *clips == 1 { "needs" } else { "need" }
    )]
    TokensDiffer { place: String, tokens: usize, clips: usize, needed: usize },
    #[error("{place} has {} and no `audio`", counted(*tokens, "audio token"))]
    NoAudio { place: String, tokens: usize },
    #[error(
        "{place} has {}, and its text does not fit {}: check `{placeholder}`",
        counted(*clips, "clip"),
        if *clips == 1 { "it" } else { "them" }
    )]
    Placeholders { place: String, placeholder: String, clips: usize },
    #[error(
        "{place} has {}, and no text of the user to place {} before",
        counted(*clips, "clip"),
        if *clips == 1 { "it" } else { "them" }
    )]
    NoText { place: String, clips: usize },
    #[error("{place}: the features of its clips cannot be stored: {error}")]
    Store { place: String, error: std::io::Error },
}

impl AudioRowError {
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            AudioRowError::Clip { error, .. } => error.hint().to_owned(),
            AudioRowError::WrongType { .. } | AudioRowError::NotBase64 { .. } => {
                "a row such as {\"audio\": \"clips/1.wav\", ...} names a file relative to the data file".to_owned()
            }
            AudioRowError::NoEncoder { .. } => {
                "use a model with an audio encoder, such as `hf:microsoft/Phi-4-multimodal-instruct`, or remove the field"
                    .to_owned()
            }
            AudioRowError::TokensDiffer { .. } => {
                "a clip needs one audio token for every 80 ms: ceil(frames / 8), with frames = (samples - 400) / 160 + 1 \
                 at 16 kHz"
                    .to_owned()
            }
            AudioRowError::NoAudio { .. } => "name the clip of these tokens in the field `audio`".to_owned(),
            AudioRowError::Placeholders { .. } | AudioRowError::NoText { .. } => {
                "write `<|audio_1|>` once where the first clip of the row belongs, `<|audio_2|>` once for the second; \
                 without any, all clips are placed before the user's first text"
                    .to_owned()
            }
            AudioRowError::Store { .. } => {
                "free some space, or set `SMIDGEN_CACHE` to a folder on a larger disk".to_owned()
            }
        })
    }

    /// Whether the error concerns one row only, so that other rows can still be used.
    pub(crate) fn is_of_one_row(&self) -> bool {
        !matches!(self, AudioRowError::Store { .. })
    }
}

/// Reads the clips of rows.
pub struct ClipReader {
    options: AudioOptions,
    log_mel: LogMel,
    /// The numbers of stored clips by [`Sound::key`]; `None` for a clip that is too long.
    known: HashMap<String, Option<u32>>,
    /// Clips of the next rows that are decoded but not stored, by [`Sound::key`].
    decoded: HashMap<String, Result<Decoded, ClipError>>,
}

/// A decoded clip.
struct Decoded {
    features: Vec<f32>, // (frames, 80)
    /// Whether the clip is longer than `data.max_audio_seconds`.
    is_cut: bool,
}

impl ClipReader {
    pub fn new(options: AudioOptions) -> ClipReader {
        ClipReader { options, log_mel: LogMel::default(), known: HashMap::new(), decoded: HashMap::new() }
    }

    /// Decodes the clips that a row names, stores those that are new, and returns the numbers of all. `None` if one of
    /// them is longer than `data.max_audio_seconds`, so that the row is dropped.
    pub fn read(
        &mut self,
        place: RowPlace<'_>,
        fields: &Map<String, Json>,
        collector: &mut ClipCollector,
    ) -> Result<Option<Vec<u32>>, AudioRowError> {
        let named = match fields.get(AUDIO_FIELD) {
            None | Some(Json::Null) => &[],
            Some(Json::Array(several)) => several.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        let mut clips = Vec::with_capacity(named.len());
        for value in named {
            match self.read_one(place, value, collector)? {
                Some(clip) => clips.push(clip),
                None => return Ok(None),
            }
        }
        Ok(Some(clips))
    }

    fn read_one(
        &mut self,
        place: RowPlace<'_>,
        value: &Json,
        collector: &mut ClipCollector,
    ) -> Result<Option<u32>, AudioRowError> {
        let sound = self.find(place, value)?;
        if let Some(known) = self.known.get(&sound.key) {
            return Ok(*known);
        }
        let decoded = match self.decoded.remove(&sound.key) {
            Some(decoded) => decoded,
            None => decode(&sound, &self.options, &mut self.log_mel),
        };
        let failed =
            |error| AudioRowError::Clip { place: place.to_string(), name: sound.name.clone(), error };
        let Decoded { features, is_cut } = decoded.map_err(failed)?;
        if is_cut && !self.options.trim {
            self.known.insert(sound.key, None);
            return Ok(None);
        }
        let stored = collector.add(&features);
        let clip = stored.map_err(|error| AudioRowError::Store { place: place.to_string(), error })?;
        self.known.insert(sound.key, Some(clip));
        Ok(Some(clip))
    }

    /// Decodes the clips of rows that will be read next, on several threads, each of which decodes one clip at a time.
    pub fn decode_ahead(&mut self, rows: &[HeldRow], threads: usize) {
        self.decoded.clear();
        let mut sounds: Vec<Sound> = Vec::new();
        for HeldRow { file, unit, number, row } in rows {
            let place = RowPlace { file, unit: *unit, number: *number };
            let values = row.as_ref().ok().and_then(|row| row.fields.get(AUDIO_FIELD)).into_iter();
            let values =
                values.flat_map(|value| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice));
            // A wrong value is reported when its row is read.
            for sound in values.filter_map(|value| self.find(place, value).ok()) {
                let is_new = !self.known.contains_key(&sound.key);
                if is_new && sounds.iter().all(|other| other.key != sound.key) {
                    sounds.push(sound);
                }
            }
        }
        if sounds.len() < 2 || threads < 2 {
            return;
        }
        let (next, options, sounds) = (AtomicUsize::new(0), &self.options, &sounds);
        let work = || {
            let (mut log_mel, mut done) = (LogMel::default(), Vec::new());
            while let Some(sound) = sounds.get(next.fetch_add(1, Ordering::Relaxed)) {
                done.push((sound.key.clone(), decode(sound, options, &mut log_mel)));
            }
            done
        };
        let done = thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.min(sounds.len())).map(|_| scope.spawn(work)).collect();
            let joined = workers.into_iter().map(|worker| worker.join().expect("decoding does not panic"));
            joined.flatten().collect::<Vec<_>>()
        });
        self.decoded.extend(done);
    }

    fn find(&self, place: RowPlace<'_>, value: &Json) -> Result<Sound, AudioRowError> {
        let bytes = match value {
            Json::Object(fields) => fields.get("bytes").and_then(Json::as_str),
            Json::String(text) if text.starts_with(BYTES_PREFIX) => Some(text.as_str()),
            _ => None,
        };
        if let Some(text) = bytes {
            let text = text.strip_prefix(BYTES_PREFIX).unwrap_or(text);
            let bytes =
                from_base64(text).ok_or_else(|| AudioRowError::NotBase64 { place: place.to_string() })?;
            let mut hasher = Hasher::sha256();
            hasher.update(&bytes);
            let key = format!("bytes {}", hasher.finish_hex());
            return Ok(Sound { name: "the clip in `audio.bytes`".to_owned(), key, bytes: Some(bytes) });
        }
        let path = match value {
            Json::String(path) => Some(path.as_str()),
            Json::Object(fields) => fields.get("path").and_then(Json::as_str),
            _ => None,
        };
        let Some(path) = path else {
            return Err(AudioRowError::WrongType { place: place.to_string(), got: kind_of(value) });
        };
        let start = self.options.folder.as_deref().or(place.file.parent()).unwrap_or(Path::new(""));
        let path = start.join(path);
        Ok(Sound {
            name: format!("`{}`", path.display()),
            key: path.to_string_lossy().into_owned(),
            bytes: None,
        })
    }
}

/// Decodes a clip and computes its features, unless it is too long and not trimmed.
fn decode(sound: &Sound, options: &AudioOptions, log_mel: &mut LogMel) -> Result<Decoded, ClipError> {
    let limit = ClipLimit { max_seconds: options.max_seconds };
    let Clip { samples, is_cut } = match &sound.bytes {
        Some(bytes) => decode_clip(bytes.clone(), limit),
        None => decode_file(Path::new(&sound.key), limit),
    }?;
    let mut features = Vec::new();
    if !is_cut || options.trim {
        log_mel.append(&samples, &mut features);
    }
    Ok(Decoded { features, is_cut })
}

/// The source of a clip.
struct Sound {
    /// For messages.
    name: String,
    /// Identifies the clip: its path, or the hash of its bytes.
    key: String,
    bytes: Option<Vec<u8>>,
}

/// "1 clip", "2 clips".
fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_clip_is_not_called_several() {
        let place = || "line 2".to_owned();
        let differ = |tokens, clips| AudioRowError::TokensDiffer { place: place(), tokens, clips, needed: 3 };
        assert_eq!(differ(7, 1).to_string(), "line 2 has 7 audio tokens, its 1 clip needs 3");
        assert_eq!(differ(1, 2).to_string(), "line 2 has 1 audio token, its 2 clips need 3");
        assert_eq!(
            AudioRowError::NoAudio { place: place(), tokens: 1 }.to_string(),
            "line 2 has 1 audio token and no `audio`"
        );
        let placeholder = "<|audio_2|>".to_owned();
        assert_eq!(
            AudioRowError::Placeholders { place: place(), placeholder, clips: 1 }.to_string(),
            "line 2 has 1 clip, and its text does not fit it: check `<|audio_2|>`"
        );
        assert_eq!(
            AudioRowError::NoText { place: place(), clips: 1 }.to_string(),
            "line 2 has 1 clip, and no text of the user to place it before"
        );
    }
}
