//! The `audio` of a row: one clip or several, as files or as bytes inside the row.
//!
//! A path is relative to the data file, or to `data.audio_dir`. Data sets on the hub store `{"bytes", "path"}`, where
//! bytes win. A clip that is longer than `data.max_audio_seconds` drops its row, or is trimmed.
//! Leaves out where clips stand among the tokens (`token_builder.rs`) and decoding itself.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};
use smidgen_formats::audio::{
    BYTES_PREFIX, Clip, ClipError, ClipLimit, LogMel, decode_clip, decode_file, from_base64,
};
use smidgen_formats::digest::Hasher;
use thiserror::Error;

use crate::chat_row::kind_of;
use crate::clips::ClipCollector;
use crate::row_place::RowPlace;

/// The field of a row that names its clips.
pub const FIELD: &str = "audio";

/// How clips are read.
#[derive(Clone, Debug)]
pub struct AudioOptions {
    /// The token whose embeddings sound replaces.
    pub token: u32,
    pub max_seconds: f64,
    /// Longer clips lose their end instead of their row.
    pub trim: bool,
    /// Where relative paths start; the folder of the data file where there is none.
    pub folder: Option<PathBuf>,
    /// Where features are kept while the set exists.
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
    #[error("{place} has `audio`, and the model does not hear: its config has no audio encoder")]
    NoEncoder { place: String },
    #[error("{place} has {tokens} audio tokens, its {clips} clips need {needed}")]
    TokensDiffer { place: String, tokens: usize, clips: usize, needed: usize },
    #[error("{place} has {tokens} audio tokens and no `audio`")]
    NoAudio { place: String, tokens: usize },
    #[error("{place} names {placeholder}, and has {clips} clips")]
    Placeholders { place: String, placeholder: String, clips: usize },
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
                "use a model that hears, such as `hf:microsoft/Phi-4-multimodal-instruct`, or drop the field".to_owned()
            }
            AudioRowError::TokensDiffer { .. } => {
                "a clip needs one audio token for every 80 ms: ceil(frames / 8), with frames = (samples - 400) / 160 + 1 \
                 at 16 kHz"
                    .to_owned()
            }
            AudioRowError::NoAudio { .. } => "name the clip of these tokens in the field `audio`".to_owned(),
            AudioRowError::Placeholders { .. } => {
                "`<|audio_1|>` stands for the first clip of the row, `<|audio_2|>` for the second, each once".to_owned()
            }
            AudioRowError::Store { .. } => {
                "free some space, or set `SMIDGEN_CACHE` to a folder on a larger disk".to_owned()
            }
        })
    }

    /// Whether other rows can be used in spite of it.
    pub(crate) fn is_of_one_row(&self) -> bool {
        !matches!(self, AudioRowError::Store { .. })
    }
}

/// The clips of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowClips {
    /// Their numbers, none for a row without sound.
    All(Vec<u32>),
    /// One is longer than `data.max_audio_seconds`.
    TooLong,
}

/// Reads the clips of rows.
pub struct ClipReader {
    options: AudioOptions,
    log_mel: LogMel,
    /// Clips by file, or by the hash of their bytes.
    known: HashMap<String, Option<u32>>,
    features: Vec<f32>,
}

impl ClipReader {
    pub fn new(options: AudioOptions) -> ClipReader {
        ClipReader { options, log_mel: LogMel::default(), known: HashMap::new(), features: Vec::new() }
    }

    /// Decodes the clips that a row names, and stores those that are new.
    pub fn read(
        &mut self,
        place: RowPlace<'_>,
        fields: &Map<String, Json>,
        collector: &mut ClipCollector,
    ) -> Result<RowClips, AudioRowError> {
        let named = match fields.get(FIELD) {
            None | Some(Json::Null) => return Ok(RowClips::All(Vec::new())),
            Some(Json::Array(several)) => several.iter().collect(),
            Some(one) => vec![one],
        };
        let mut clips = Vec::with_capacity(named.len());
        for value in named {
            match self.read_one(place, value, collector)? {
                Some(clip) => clips.push(clip),
                None => return Ok(RowClips::TooLong),
            }
        }
        Ok(RowClips::All(clips))
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
        let limit = ClipLimit { max_seconds: self.options.max_seconds };
        let decoded = match sound.bytes {
            Some(bytes) => decode_clip(bytes, limit),
            None => decode_file(Path::new(&sound.key), limit),
        };
        let failed =
            |error| AudioRowError::Clip { place: place.to_string(), name: sound.name.clone(), error };
        let Clip { samples, is_cut } = decoded.map_err(failed)?;
        if is_cut && !self.options.trim {
            self.known.insert(sound.key, None);
            return Ok(None);
        }
        self.features.clear();
        self.log_mel.append(&samples, &mut self.features);
        let stored = collector.add(&self.features);
        let clip = stored.map_err(|error| AudioRowError::Store { place: place.to_string(), error })?;
        self.known.insert(sound.key, Some(clip));
        Ok(Some(clip))
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

/// Where a clip is.
struct Sound {
    /// For messages.
    name: String,
    /// The same for the same clip: its path, or the hash of its bytes.
    key: String,
    bytes: Option<Vec<u8>>,
}

/// Whether a row names a clip.
pub fn has_audio(fields: &Map<String, Json>) -> bool {
    match fields.get(FIELD) {
        None | Some(Json::Null) => false,
        Some(Json::Array(several)) => !several.is_empty(),
        Some(_) => true,
    }
}
