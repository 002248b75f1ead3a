//! Decodes audio files, mixes them to one channel, resamples them to 16 kHz, and computes log-mel features.
//!
//! A clip is decoded packet by packet up to a maximum length, so a file of several hours needs no more memory
//! than the longest clip that is allowed.
//! Left out: what a model does with the features.

use base64::Engine;

mod clip;
mod fft;
mod log_mel;
mod resample;

pub use clip::{Clip, ClipError, ClipLimit, decode_clip, decode_file};
pub use log_mel::{FRAME_SAMPLES, HOP_SAMPLES, LogMel, MEL_BINS, SAMPLE_RATE, frame_count};

/// The prefix of audio bytes that a row holds as base64.
pub const BYTES_PREFIX: &str = "data:application/octet-stream;base64,";

/// Decodes the bytes of a clip that is stored as text.
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    base64::engine::general_purpose::STANDARD.decode(text).ok()
}

pub fn to_base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
