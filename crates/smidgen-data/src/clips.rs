//! The audio clips of a token set: their features on disk, which samples use which clip, and the encoder's output.
//!
//! A clip that several rows name is stored once. While rows are read, features go to a temporary file, so that no more
//! than one clip is in memory. After the encoder has run, its output rows for all clips are in a file of the cache, and
//! a training step reads only the rows that it needs.
//! Decoding is in `smidgen-formats`; which fields of a row name clips is in `clip_row.rs`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use smidgen_formats::audio::MEL_BINS;
use smidgen_formats::digest::Hasher;
use smidgen_ir::audio_rows::{filled_rows, rows_of_frames};

/// The clips of all samples of a set.
#[derive(Clone, Debug)]
pub struct SampleClips {
    /// The token whose embeddings are replaced by those of the audio encoder.
    pub token: i32,
    /// Sample s has the clips `clips[starts[s]..starts[s + 1]]`, in the order of its tokens.
    pub(super) starts: Vec<u32>,
    pub(super) clips: Vec<u32>,
    store: Arc<ClipStore>,
}

impl SampleClips {
    pub fn of_sample(&self, sample: usize) -> &[u32] {
        &self.clips[self.starts[sample] as usize..self.starts[sample + 1] as usize]
    }

    /// Audio rows of a sample, including those that only fill a chunk.
    pub fn rows_of_sample(&self, sample: usize) -> usize {
        self.of_sample(sample).iter().map(|clip| filled_rows(self.store.rows(*clip))).sum()
    }

    pub fn store(&self) -> &Arc<ClipStore> {
        &self.store
    }

    /// The clips of the given samples, in order.
    pub(super) fn subset(&self, samples: &[u32]) -> SampleClips {
        let (mut starts, mut clips) = (vec![0], Vec::new());
        for &sample in samples {
            clips.extend_from_slice(self.of_sample(sample as usize));
            starts.push(clips.len() as u32);
        }
        SampleClips { token: self.token, starts, clips, store: self.store.clone() }
    }
}

/// All clips that were found while rows were read.
#[derive(Debug)]
pub struct ClipStore {
    /// Mel frames of each clip.
    frames: Vec<u32>,
    /// Frames before each clip.
    starts: Vec<u64>,
    /// Embeddings before each clip.
    row_starts: Vec<u64>,
    features: File,
    /// SHA-256 of the features of all clips, in order.
    hash: String,
    encoded: OnceLock<EncodedClips>,
}

/// The encoder's output rows for all clips, in one file.
#[derive(Debug)]
pub struct EncodedClips {
    file: File,
    path: PathBuf,
    first_byte: u64,
    row_bytes: usize,
}

impl EncodedClips {
    /// The rows of the first clip begin at `first_byte`.
    pub fn open(path: &Path, first_byte: u64, row_bytes: usize) -> io::Result<EncodedClips> {
        Ok(EncodedClips { file: File::open(path)?, path: path.to_path_buf(), first_byte, row_bytes })
    }

    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Reads bytes of the rows of a clip, from `offset` on.
    pub fn read(&self, store: &ClipStore, clip: u32, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        let before = store.row_starts[clip as usize] * self.row_bytes as u64;
        self.file.read_exact_at(bytes, self.first_byte + before + offset as u64).map_err(|error| {
            io::Error::new(error.kind(), format!("the audio rows in `{}`: {error}", self.path.display()))
        })
    }
}

impl ClipStore {
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Mel frames of a clip.
    pub fn frames(&self, clip: u32) -> usize {
        self.frames[clip as usize] as usize
    }

    /// Embeddings of a clip.
    pub fn rows(&self, clip: u32) -> usize {
        rows_of_frames(self.frames(clip))
    }

    /// Embeddings of all clips.
    pub fn all_rows(&self) -> usize {
        (0..self.len() as u32).map(|clip| self.rows(clip)).sum()
    }

    /// The hash of all features, which identifies the clips and their order.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Appends the features (frames, 80) of a clip to `features`.
    pub fn read_features(&self, clip: u32, features: &mut Vec<f32>) -> io::Result<()> {
        let mut bytes = vec![0; 4 * MEL_BINS * self.frames(clip)];
        self.features.read_exact_at(&mut bytes, 4 * MEL_BINS as u64 * self.starts[clip as usize])?;
        features.extend(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)));
        Ok(())
    }

    /// Sets the file that encoded rows are read from.
    pub fn set_encoded(&self, encoded: EncodedClips) {
        // Encoding the same clips again gives the same rows, so the first file stays.
        let _ = self.encoded.set(encoded);
    }

    /// Bytes of an encoded row.
    pub fn row_bytes(&self) -> usize {
        self.encoded().row_bytes
    }

    /// Reads bytes of the encoded rows of a clip, from `offset` on.
    pub fn read_encoded(&self, clip: u32, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        self.encoded().read(self, clip, offset, bytes)
    }

    fn encoded(&self) -> &EncodedClips {
        self.encoded.get().expect("clips are encoded before they are trained on")
    }
}

/// Collects clips while rows are read.
pub struct ClipCollector {
    token: i32,
    starts: Vec<u32>,
    clips: Vec<u32>,
    frames: Vec<u32>,
    all_frames: u64,
    features: Option<File>,
    folder: PathBuf,
    hasher: Option<Hasher>,
    bytes: Vec<u8>,
}

impl ClipCollector {
    /// Features go to a temporary file in `folder`.
    pub fn new(token: u32, folder: PathBuf) -> ClipCollector {
        ClipCollector {
            token: token as i32,
            starts: vec![0],
            clips: Vec::new(),
            frames: Vec::new(),
            all_frames: 0,
            features: None,
            folder,
            hasher: None,
            bytes: Vec::new(),
        }
    }

    pub fn token(&self) -> i32 {
        self.token
    }

    /// Embeddings of a clip.
    pub fn rows(&self, clip: u32) -> usize {
        rows_of_frames(self.frames[clip as usize] as usize)
    }

    /// Stores the features (frames, 80) of another clip, and returns its number.
    pub fn add(&mut self, features: &[f32]) -> io::Result<u32> {
        let file = match &mut self.features {
            Some(file) => file,
            none => none.insert(unnamed_file(&self.folder)?),
        };
        self.bytes.clear();
        self.bytes.extend(features.iter().flat_map(|number| number.to_le_bytes()));
        file.write_all_at(&self.bytes, 4 * MEL_BINS as u64 * self.all_frames)?;
        let frames = features.len() / MEL_BINS;
        let hasher = self.hasher.get_or_insert_with(Hasher::sha256);
        hasher.update(format!("clip of {frames} frames\n").as_bytes());
        hasher.update(&self.bytes);
        self.frames.push(frames as u32);
        self.all_frames += frames as u64;
        Ok(self.frames.len() as u32 - 1)
    }

    /// Adds a sample with these clips.
    pub fn push_sample(&mut self, clips: &[u32]) {
        self.clips.extend_from_slice(clips);
        self.starts.push(self.clips.len() as u32);
    }

    /// `None` if no sample has a clip.
    pub fn finish(self) -> Option<SampleClips> {
        let features = self.features.filter(|_| !self.clips.is_empty())?;
        let (mut starts, mut row_starts) = (Vec::new(), Vec::new());
        let (mut frames_before, mut rows_before) = (0, 0);
        for &frames in &self.frames {
            starts.push(frames_before);
            row_starts.push(rows_before);
            frames_before += u64::from(frames);
            rows_before += rows_of_frames(frames as usize) as u64;
        }
        let hash = self.hasher.map(Hasher::finish_hex).unwrap_or_default();
        let (frames, encoded) = (self.frames, OnceLock::new());
        let store = Arc::new(ClipStore { frames, starts, row_starts, features, hash, encoded });
        Some(SampleClips { token: self.token, starts: self.starts, clips: self.clips, store })
    }
}

/// A temporary file whose name is removed at once, so that it is deleted when it is closed.
fn unnamed_file(folder: &Path) -> io::Result<File> {
    std::fs::create_dir_all(folder)?;
    for number in 0.. {
        let path = folder.join(format!(".features-{}-{number}.tmp", std::process::id()));
        match File::options().read(true).write(true).create_new(true).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("a name is free")
}
