//! Sound files: decoded, mixed to one channel, resampled to 16 kHz, and turned into log-mel features.
//!
//! A clip is decoded packet by packet and never beyond the longest clip that is allowed, so a file of hours costs no
//! more memory than one of seconds.
//! Left out: what a model does with features.

use base64::Engine;

mod clip;
mod fft;
mod log_mel;
mod resample;

pub use clip::{Clip, ClipError, ClipLimit, decode_clip, decode_file};
pub use log_mel::{FRAME_SAMPLES, HOP_SAMPLES, LogMel, MEL_BINS, SAMPLE_RATE, frame_count};

/// In front of bytes that a row holds as base64.
pub const BYTES_PREFIX: &str = "data:application/octet-stream;base64,";

/// The bytes of a clip that is stored as text.
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    base64::engine::general_purpose::STANDARD.decode(text).ok()
}

/// The other way.
pub fn to_base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
