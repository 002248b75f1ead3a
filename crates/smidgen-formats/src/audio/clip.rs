//! Decodes an audio file to samples at 16 kHz: WAV, FLAC, MP3 and Ogg Vorbis, any rate, channels averaged.
//!
//! Samples are f32 in [-1, 1]; 16-bit integers, for example, are divided by 32768. A file that is shorter
//! than its header promises is refused, because its transcript would contain words that are not in the audio.
//! If a decoder panics on a damaged file, that is an error like any other.

use super::log_mel::{FRAME_SAMPLES, SAMPLE_RATE};
use super::resample::Resampler;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use symphonia::core::audio::GenericAudioBufferRef;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_MP3, CODEC_ID_VORBIS};
use symphonia::core::codecs::audio::{AudioCodecId, AudioDecoderOptions};
use symphonia::core::errors::Error;
use symphonia::core::formats::TrackType;
use symphonia::core::formats::probe::Hint;
use symphonia::core::io::{MediaSource, MediaSourceStream};
use thiserror::Error;

/// Upper bound of every limit.
const LONGEST_SECONDS: f64 = 24.0 * 3600.0;

#[derive(Clone, Debug, PartialEq)]
pub struct Clip {
    /// One channel at [`SAMPLE_RATE`].
    pub samples: Vec<f32>,
    /// Whether the file is longer than the limit.
    pub is_cut: bool,
}

impl Clip {
    pub fn seconds(&self) -> f64 {
        self.samples.len() as f64 / SAMPLE_RATE as f64
    }
}

/// How much of a clip is decoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipLimit {
    pub max_seconds: f64,
}

#[derive(Debug, Error)]
pub enum ClipError {
    #[error("cannot be read: {0}")]
    Read(std::io::Error),
    #[error("is not a sound file that can be decoded: {what}")]
    UnknownFormat { what: String },
    #[error("has no audio track")]
    NoTrack,
    #[error("has an audio track in a codec that is not supported: {what}")]
    UnknownCodec { what: String },
    #[error("is damaged after {seconds:.2} s: {what}")]
    Damaged { seconds: f64, what: String },
    #[error("is cut off: its header promises {promised:.2} s, {found:.2} s are there")]
    CutOff { promised: f64, found: f64 },
    #[error("has a sample rate of {rate} Hz")]
    Rate { rate: u32 },
    #[error("changes its sample rate or its channels after {seconds:.2} s")]
    Changes { seconds: f64 },
    #[error("is empty: it has no samples")]
    Empty,
    #[error("is shorter than 25 ms, the length of one frame")]
    TooShort,
    #[error("is silent: every sample is zero")]
    Silent,
    #[error("has a sample that is not a finite number")]
    NotFinite,
}

impl ClipError {
    /// A remedy for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            ClipError::Read(_) => {
                "audio paths are relative to the data file, or to `data.audio_dir` where that is set"
            }
            ClipError::UnknownFormat { .. } | ClipError::NoTrack | ClipError::UnknownCodec { .. } => {
                "WAV, FLAC, MP3 and Ogg Vorbis are supported: convert the file, or drop its row with `data.on_bad_row = \"skip\"`"
            }
            ClipError::Damaged { .. }
            | ClipError::CutOff { .. }
            | ClipError::Rate { .. }
            | ClipError::Changes { .. }
            | ClipError::Empty
            | ClipError::TooShort
            | ClipError::Silent
            | ClipError::NotFinite => "replace the file, or drop its row with `data.on_bad_row = \"skip\"`",
        }
    }
}

pub fn decode_file(path: &Path, limit: ClipLimit) -> Result<Clip, ClipError> {
    let metadata = std::fs::metadata(path).map_err(ClipError::Read)?;
    if !metadata.is_file() {
        return Err(ClipError::Read(std::io::Error::other("it is not a regular file")));
    }
    if metadata.len() == 0 {
        return Err(ClipError::Empty);
    }
    let file = std::fs::File::open(path).map_err(ClipError::Read)?;
    let mut hint = Hint::new();
    if let Some(extension) = path.extension().and_then(|extension| extension.to_str()) {
        hint.with_extension(extension);
    }
    decode_checked(Box::new(file), &hint, limit)
}

/// Decodes a file in memory.
pub fn decode_clip(bytes: Vec<u8>, limit: ClipLimit) -> Result<Clip, ClipError> {
    if bytes.is_empty() {
        return Err(ClipError::Empty);
    }
    decode_checked(Box::new(Cursor::new(bytes)), &Hint::new(), limit)
}

/// Decodes with panics turned into errors, and checks the samples.
fn decode_checked(source: Box<dyn MediaSource>, hint: &Hint, limit: ClipLimit) -> Result<Clip, ClipError> {
    let decoded = catch_unwind(AssertUnwindSafe(|| decode(source, hint, limit)));
    let clip = decoded.unwrap_or_else(|_| {
        let what = "the decoder failed on it".to_owned();
        Err(ClipError::Damaged { seconds: 0.0, what })
    })?;
    match &clip.samples[..] {
        [] => Err(ClipError::Empty),
        samples if !samples.iter().all(|sample| sample.is_finite()) => Err(ClipError::NotFinite),
        samples if samples.iter().all(|sample| *sample == 0.0) => Err(ClipError::Silent),
        samples if samples.len() < FRAME_SAMPLES => Err(ClipError::TooShort),
        _ => Ok(clip),
    }
}

fn decode(source: Box<dyn MediaSource>, hint: &Hint, limit: ClipLimit) -> Result<Clip, ClipError> {
    let stream = MediaSourceStream::new(source, Default::default());
    let probe = symphonia::default::get_probe();
    let opened = probe.probe(hint, stream, Default::default(), Default::default());
    let mut format = opened.map_err(|error| match error {
        Error::IoError(error) if error.kind() != std::io::ErrorKind::UnexpectedEof => ClipError::Read(error),
        error => ClipError::UnknownFormat { what: error.to_string() },
    })?;
    let track = format.default_track(TrackType::Audio).ok_or(ClipError::NoTrack)?;
    let (id, promised) = (track.id, track.num_frames);
    let parameters = track.codec_params.as_ref().and_then(|parameters| parameters.audio());
    let parameters = parameters.ok_or(ClipError::NoTrack)?.clone();
    let mut decoder = symphonia::default::get_codecs()
        .make_audio_decoder(&parameters, &AudioDecoderOptions::default())
        .map_err(|error| ClipError::UnknownCodec { what: error.to_string() })?;
    let mut mono = Mono::default();
    let max_seconds = limit.max_seconds.min(LONGEST_SECONDS);
    let mut ended = None;
    while !mono.is_longer_than(max_seconds) {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(error) => {
                ended = Some(error);
                break;
            }
        };
        if packet.track_id != id {
            continue;
        }
        let decoded = decoder.decode(&packet);
        let decoded = decoded
            .map_err(|error| ClipError::Damaged { seconds: mono.seconds(), what: error.to_string() })?;
        mono.add(&decoded)?;
    }
    let is_cut = mono.is_longer_than(max_seconds);
    let frames = mono.samples.len() as u64;
    let rate = f64::from(mono.rate.max(1));
    if let Some(promised) = promised.filter(|promised| {
        !is_cut && counts_frames(parameters.codec) && *promised > frames && *promised < u64::from(u32::MAX)
    }) {
        return Err(ClipError::CutOff { promised: promised as f64 / rate, found: frames as f64 / rate });
    }
    if let Some(error) = ended.filter(|_| !is_cut) {
        return Err(ClipError::Damaged { seconds: mono.seconds(), what: error.to_string() });
    }
    let mut samples = if mono.rate as usize == SAMPLE_RATE || mono.samples.is_empty() {
        mono.samples
    } else {
        Resampler::new(mono.rate, SAMPLE_RATE as u32).resample(&mono.samples)
    };
    if is_cut {
        samples.truncate((max_seconds * SAMPLE_RATE as f64) as usize);
    }
    Ok(Clip { samples, is_cut })
}

/// Whether headers of this codec have the exact number of frames.
fn counts_frames(codec: AudioCodecId) -> bool {
    ![CODEC_ID_MP3, CODEC_ID_VORBIS].contains(&codec)
}

/// The samples decoded so far, averaged to one channel.
#[derive(Default)]
struct Mono {
    rate: u32,
    channels: usize,
    samples: Vec<f32>,
    /// Scratch memory for a packet.
    packet: Vec<f32>,
}

impl Mono {
    fn seconds(&self) -> f64 {
        self.samples.len() as f64 / f64::from(self.rate.max(1))
    }

    fn is_longer_than(&self, seconds: f64) -> bool {
        self.rate > 0 && self.seconds() > seconds
    }

    fn add(&mut self, decoded: &GenericAudioBufferRef<'_>) -> Result<(), ClipError> {
        let (rate, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if decoded.is_empty() {
            return Ok(());
        }
        if self.rate == 0 {
            if !(1000..=768_000).contains(&rate) || channels == 0 {
                return Err(ClipError::Rate { rate });
            }
            (self.rate, self.channels) = (rate, channels);
        }
        if (self.rate, self.channels) != (rate, channels) {
            return Err(ClipError::Changes { seconds: self.seconds() });
        }
        decoded.copy_to_vec_interleaved::<f32>(&mut self.packet);
        let mixed = self.packet.chunks_exact(channels);
        match channels {
            1 => self.samples.extend_from_slice(&self.packet),
            _ => self.samples.extend(mixed.map(|frame| frame.iter().sum::<f32>() / channels as f32)),
        }
        Ok(())
    }
}
