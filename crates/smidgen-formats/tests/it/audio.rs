//! Audio files: exact samples, the features of the reference, and every way in which a clip can be invalid.
//!
//! `fixtures/audio.py` made the files. Damaged files are valid ones with bytes changed, cut or doubled;
//! decoding them may fail but must not panic, and must not need more memory than the longest allowed clip
//! justifies.

use crate::mutation::{cases, mutated, mutation, peak_bytes_of};
use proptest::prelude::*;
use smidgen_formats::audio::{
    Clip, ClipError, ClipLimit, LogMel, MEL_BINS, SAMPLE_RATE, decode_clip, decode_file, frame_count,
};
use smidgen_formats::safetensors::SafetensorsFile;
use smidgen_formats::tensor_ref::TensorRef;
use std::path::PathBuf;
use std::sync::Arc;

const LIMIT: ClipLimit = ClipLimit { max_seconds: 30.0 };

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/audio").join(name)
}

/// A WAV file with `data`, whose header promises `promised` bytes of it.
fn wav(tag: u16, channels: u16, rate: u32, bits: u16, data: &[u8], promised: usize) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + promised as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    for number in [tag, channels] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(rate.to_le_bytes());
    bytes.extend((rate * u32::from(block)).to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(bits.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend((promised as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// Half a second of noise.
fn noise() -> Vec<i16> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) as i16
    };
    (0..8000).map(|_| next()).collect()
}

fn bytes_of(samples: &[i16]) -> Vec<u8> {
    samples.iter().flat_map(|sample| sample.to_le_bytes()).collect()
}

fn mono16(samples: &[i16]) -> Vec<u8> {
    let data = bytes_of(samples);
    wav(1, 1, SAMPLE_RATE as u32, 16, &data, data.len())
}

#[test]
fn samples_of_wav_files_are_exact() {
    let (samples, rate) = (noise(), SAMPLE_RATE as u32);
    let expected: Vec<f32> = samples.iter().map(|sample| f32::from(*sample) / 32768.0).collect();
    assert_eq!(
        decode_clip(mono16(&samples), LIMIT).unwrap(),
        Clip { samples: expected.clone(), is_cut: false }
    );
    let encoded: [(u16, u16, Vec<u8>); 4] = [
        (1, 24, samples.iter().flat_map(|it| (i32::from(*it) << 8).to_le_bytes()[..3].to_vec()).collect()),
        (1, 32, samples.iter().flat_map(|it| (i32::from(*it) << 16).to_le_bytes()).collect()),
        (3, 32, expected.iter().flat_map(|it| it.to_le_bytes()).collect()),
        (3, 64, expected.iter().flat_map(|it| f64::from(*it).to_le_bytes()).collect()),
    ];
    for (tag, bits, data) in encoded {
        let clip = decode_clip(wav(tag, 1, rate, bits, &data, data.len()), LIMIT).unwrap();
        assert_eq!(clip.samples, expected, "{bits} bits, tag {tag}");
    }
    let eight: Vec<u8> = (0..8000).map(|index| (index * 7 % 256) as u8).collect();
    let clip = decode_clip(wav(1, 1, rate, 8, &eight, eight.len()), LIMIT).unwrap();
    let expected: Vec<f32> = eight.iter().map(|byte| (f32::from(*byte) - 128.0) / 128.0).collect();
    assert_eq!(clip.samples, expected);
}

#[test]
fn channels_are_averaged_and_rates_become_one() {
    let samples = noise();
    let both: Vec<i16> = samples.iter().flat_map(|sample| [*sample, -(*sample / 2)]).collect();
    let data = bytes_of(&both);
    let clip = decode_clip(wav(1, 2, SAMPLE_RATE as u32, 16, &data, data.len()), LIMIT).unwrap();
    let mixed = |pair: &[i16]| (f32::from(pair[0]) / 32768.0 + f32::from(pair[1]) / 32768.0) / 2.0;
    assert_eq!(clip.samples, both.chunks(2).map(mixed).collect::<Vec<f32>>());
    for rate in [8_000u32, 44_100, 48_000] {
        let data = bytes_of(&samples);
        let clip = decode_clip(wav(1, 1, rate, 16, &data, data.len()), LIMIT).unwrap();
        assert_eq!(clip.samples.len(), (8000 * SAMPLE_RATE).div_ceil(rate as usize), "{rate} Hz");
    }
}

/// Tones of 440 and 1200 Hz on two channels at 22.05 kHz. Lossy codecs add silence around them.
#[test]
fn flac_ogg_and_mp3_are_decoded() {
    for (name, tolerance) in [("tone.flac", 1e-3), ("tone.ogg", 0.03), ("tone.mp3", 0.03)] {
        let clip = decode_file(&fixture(name), LIMIT).unwrap();
        assert!((clip.seconds() - 0.5).abs() < 0.06, "{name}: {} s", clip.seconds());
        let share = |hertz: f64| {
            let angle = |index: usize| std::f64::consts::TAU * hertz * index as f64 / SAMPLE_RATE as f64;
            let part = &clip.samples[2000..6000];
            let products = part.iter().enumerate().map(|(index, sample)| {
                let (sine, cosine) = angle(index).sin_cos();
                (f64::from(*sample) * sine, f64::from(*sample) * cosine)
            });
            let (sine, cosine) = products.fold((0.0, 0.0), |sum, it| (sum.0 + it.0, sum.1 + it.1));
            2.0 * (sine * sine + cosine * cosine).sqrt() / part.len() as f64
        };
        assert!((share(440.0) - 0.25).abs() < tolerance, "{name}: {}", share(440.0));
        assert!((share(1200.0) - 0.125).abs() < tolerance, "{name}: {}", share(1200.0));
        assert!(share(3000.0) < tolerance, "{name}: {}", share(3000.0));
    }
}

#[test]
fn features_agree_with_the_reference() {
    let clip = decode_file(&fixture("speech.wav"), LIMIT).unwrap();
    let recorded: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("log_mel.json")).unwrap()).unwrap();
    let mut features = Vec::new();
    LogMel::default().append(&clip.samples, &mut features);
    assert_eq!(recorded["shape"], serde_json::json!([frame_count(clip.samples.len()), MEL_BINS]));
    let values = recorded["values"].as_array().unwrap();
    assert_eq!(values.len(), features.len());
    for (index, (got, want)) in features.iter().zip(values).enumerate() {
        let error = (f64::from(*got) - want.as_f64().unwrap()).abs();
        assert!(error < 1e-5, "frame {} bin {}: off by {error}", index / MEL_BINS, index % MEL_BINS);
    }
}

/// The features of twelve lossless clips with different rates, channels, lengths, bits and containers,
/// recorded with transformers.
#[test]
fn features_of_every_kind_of_clip_agree_with_transformers() {
    let recorded = Arc::new(SafetensorsFile::open(&fixture("clips/features.safetensors")).unwrap());
    assert_eq!(recorded.tensors().len(), 12);
    for (position, entry) in recorded.tensors().iter().enumerate() {
        let (name, stored) = (&entry.name, TensorRef::new(&recorded, position));
        let clip = decode_file(&fixture(&format!("clips/{name}")), LIMIT).unwrap();
        assert_eq!(stored.shape(), [frame_count(clip.samples.len()), MEL_BINS], "{name}");
        let mut bytes = vec![0; stored.bytes() as usize];
        stored.read_at(0, &mut bytes).unwrap();
        let wanted = bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four));
        let mut features = Vec::new();
        LogMel::default().append(&clip.samples, &mut features);
        for (index, (got, want)) in features.iter().zip(wanted).enumerate() {
            let (frame, bin, error) = (index / MEL_BINS, index % MEL_BINS, (got - want).abs());
            assert!(error < 1e-4, "{name}, frame {frame} bin {bin}: off by {error}");
        }
    }
}

#[test]
fn invalid_clips_are_refused_with_the_reason() {
    let (samples, rate) = (noise(), SAMPLE_RATE as u32);
    let whole = mono16(&samples);
    let message = |bytes: Vec<u8>| decode_clip(bytes, LIMIT).unwrap_err().to_string();
    assert!(matches!(decode_clip(vec![], LIMIT), Err(ClipError::Empty)));
    assert!(matches!(decode_clip(mono16(&[]), LIMIT), Err(ClipError::Empty)));
    assert!(matches!(decode_clip(mono16(&[0; 8000]), LIMIT), Err(ClipError::Silent)));
    assert!(matches!(decode_clip(mono16(&samples[..399]), LIMIT), Err(ClipError::TooShort)));
    assert_eq!(
        message(whole[..whole.len() / 2].to_vec()),
        "is cut off: its header promises 0.50 s, 0.25 s are there"
    );
    let too_short = wav(1, 1, rate, 16, &bytes_of(&samples), 16_000 + 6_400);
    assert_eq!(message(too_short), "is cut off: its header promises 0.70 s, 0.50 s are there");
    assert!(
        message(b"<!DOCTYPE html><html>".repeat(30)).starts_with("is not a sound file that can be decoded")
    );
    let unknown = wav(0x0055 + 0x1000, 1, rate, 16, &bytes_of(&samples), 16_000);
    let message = message(unknown);
    assert!(
        message.contains("is not a sound file") || message.contains("codec that is not supported"),
        "{message}"
    );
    let infinite: Vec<u8> = [f32::INFINITY; 8000].iter().flat_map(|it| it.to_le_bytes()).collect();
    let infinite = wav(3, 1, rate, 32, &infinite, infinite.len());
    assert!(matches!(decode_clip(infinite, LIMIT), Err(ClipError::NotFinite)));
    let missing = decode_file(&fixture("missing.wav"), LIMIT).unwrap_err();
    assert!(missing.to_string().starts_with("cannot be read"), "{missing}");
    assert!(matches!(decode_file(&fixture(""), LIMIT), Err(ClipError::Read(_))));
}

/// Memory depends on the part that is decoded, not on the length of the file.
#[test]
fn a_clip_of_an_hour_is_not_decoded_to_its_end() {
    let hour = bytes_of(&noise()).repeat(7200);
    let bytes = wav(1, 1, SAMPLE_RATE as u32, 16, &hour, hour.len());
    let limit = ClipLimit { max_seconds: 2.0 };
    let (clip, peak_bytes) = peak_bytes_of(|| decode_clip(bytes, limit).unwrap());
    assert_eq!((clip.samples.len(), clip.is_cut), (2 * SAMPLE_RATE, true));
    assert!(peak_bytes < 4 << 20, "{peak_bytes} bytes for two seconds");
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_damaged_clip_is_refused_or_sound(which in 0..4usize, changes in proptest::collection::vec(mutation(), 1..4)) {
        let names = ["speech.wav", "tone.flac", "tone.ogg", "tone.mp3"];
        let bytes = std::fs::read(fixture(names[which])).unwrap();
        let damaged = mutated(&bytes, &changes);
        let limit = ClipLimit { max_seconds: 4.0 };
        let (decoded, peak_bytes) = peak_bytes_of(|| decode_clip(damaged, limit));
        prop_assert!(peak_bytes < 24 << 20, "{} bytes", peak_bytes);
        if let Ok(clip) = decoded {
            prop_assert!(clip.samples.iter().all(|sample| sample.is_finite()));
            prop_assert!(clip.seconds() <= 4.0 + 1.0);
        }
    }
}
