//! Encodes audio clips to rows once, before training, on the run's device, and caches the rows on disk.
//!
//! The cache file is named by a hash of the clips, of the encoder's weights, and of the kind of rows, so a later run
//! with the same rows reads them. It is written completely or not at all, and checked when it is opened. The encoder
//! is loaded only for this: the next plan that the device loads frees its memory.

use crate::failure::Failure;
use crate::plan::audio::{clip_stores, encoded_bytes, encoding_request, longest_clip_rows, plan_encoding};
use crate::plan::job::Job;
use crate::session::adapters::read_part;
use crate::session::weights::{WeightHashes, leaf, load_weights, read_floats, stored};
use smidgen_compile::Request;
use smidgen_compile::model::audio::{AUDIO, AudioInput, AudioSpec, GLOBAL_INVERSE_DEVIATION, GLOBAL_MEAN};
use smidgen_compile::names::{input, state};
use smidgen_data::clips::{ClipStore, EncodedClips};
use smidgen_formats::audio::{ClipLimit, LogMel, MEL_BINS, decode_file};
use smidgen_formats::digest::Hasher;
use smidgen_formats::element::Element;
use smidgen_formats::load::read_tensor_into;
use smidgen_formats::model::Model;
use smidgen_formats::peft::AdapterFile;
use smidgen_formats::weight::Weight;
use smidgen_formats::whole_file::write_whole;
use smidgen_hub::own_cache;
use smidgen_ir::audio_rows::{FRAMES_OF_ROW, filled_rows, marks_of_clip, rows_of_frames};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{DType, Entry, Extent, ValueId};
use smidgen_runtime::cpu::convert::{f32_to_bf16, f32_to_f16};
use smidgen_runtime::{AnyDevice, Executor};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The first bytes of a cache file.
const MAGIC: &[u8; 16] = b"smidgen audio  1";
/// The checksum at the end, in hexadecimal.
const TRAILER_BYTES: u64 = 64;

/// Hashes of the audio encoder's weights, if the job has audio.
pub fn hash_encoder(job: &Job) -> Result<WeightHashes, Failure> {
    match job.request.audio_spec() {
        Some(_) => read_hashes(&job.request, &job.model),
        None => Ok(WeightHashes::new()),
    }
}

fn read_hashes(request: &Request, model: &Model) -> Result<WeightHashes, Failure> {
    let hash = |name: String| Ok((name.clone(), stored(model, &name).read_hash().map_err(Failure::model)?));
    let tensors = request.spec.audio.iter().flat_map(AudioSpec::tensors);
    tensors.map(|tensor| hash(tensor.name)).collect()
}

/// Encodes the clips of a job's rows, or finds them in the cache. `hashes` come from [`hash_encoder`].
pub fn encode_job(
    job: &Job,
    hashes: &WeightHashes,
    device: AnyDevice,
    say: &dyn Fn(&str),
) -> Result<AnyDevice, Failure> {
    clip_stores(&job.data).into_iter().try_fold(device, |device, store| {
        let (encoded, device) = encode_hashed(store, &job.request, (&job.model, None), hashes, device, say)?;
        store.set_encoded(encoded);
        Ok(device)
    })
}

/// Encodes clips to the rows that `request.audio` asks for, or finds them in the cache; also returns the device.
/// Embeddings are computed by the model with its adapter.
pub fn encode_clips(
    store: &ClipStore,
    request: &Request,
    (model, adapter): (&Model, Option<&AdapterFile>),
    device: AnyDevice,
    say: &dyn Fn(&str),
) -> Result<(EncodedClips, AnyDevice), Failure> {
    let hashes = read_hashes(request, model)?;
    encode_hashed(store, request, (model, adapter), &hashes, device, say)
}

fn encode_hashed(
    store: &ClipStore,
    request: &Request,
    (model, adapter): (&Model, Option<&AdapterFile>),
    hashes: &WeightHashes,
    mut device: AnyDevice,
    say: &dyn Fn(&str),
) -> Result<(EncodedClips, AnyDevice), Failure> {
    let folder = own_cache().map_or_else(|_| std::env::temp_dir(), |cache| cache.join("audio"));
    std::fs::create_dir_all(&folder).map_err(Failure::disk)?;
    let audio = request.audio_spec().expect("there are clips, so the request has audio");
    let (width, dtype) = (audio.width(request.audio), request.activations());
    let path = folder.join(format!("{}.rows", key(store, request, (hashes, adapter), dtype)?));
    let bytes = encoded_bytes(store, request);
    let row_bytes = width * dtype.bytes();
    if !is_intact(&path, bytes) {
        let mut encoder = Encoder::load(request, (model, adapter), longest_clip_rows(store), device)?;
        let needed = format_bytes(encoder.executor.plan().reserved_bytes() as u64);
        let noun = if store.len() == 1 { "clip" } else { "clips" };
        say(&format!(
            "encoding {} {noun} once ({needed} of memory, {} in `{}`)",
            store.len(),
            format_bytes(bytes),
            folder.display()
        ));
        write_rows(&path, store, &mut encoder, dtype)?;
        device = encoder.executor.into_device();
    }
    let encoded = EncodedClips::open(&path, MAGIC.len() as u64, row_bytes).map_err(Failure::disk)?;
    Ok((encoded, device))
}

/// Encodes audio files with the encoder of a model and its adapter. Returns the embeddings of each, (rows, C), and
/// the device.
pub fn encode_files(
    request: &Request,
    (model, adapter): (&Model, Option<&AdapterFile>),
    files: &[PathBuf],
    device: AnyDevice,
) -> Result<(Vec<Vec<f32>>, AnyDevice), Failure> {
    let mut log_mel = LogMel::default();
    let mut all = Vec::new();
    for file in files {
        let limit = ClipLimit { max_seconds: f64::INFINITY };
        let clip = decode_file(file, limit).map_err(|error| {
            let hint = error.hint();
            Failure::data(format!("`{}` {error}", file.display())).hint(hint)
        })?;
        let mut features = Vec::new();
        log_mel.append(&clip.samples, &mut features);
        all.push(features);
    }
    let request = Request { audio: AudioInput::Embeddings, ..request.clone() };
    let rows = |features: &Vec<f32>| filled_rows(rows_of_frames(features.len() / MEL_BINS));
    let longest = all.iter().map(rows).max().unwrap_or(0);
    let mut encoder = Encoder::load(&request, (model, adapter), longest, device)?;
    let embeddings: Result<_, Failure> = all.iter_mut().map(|features| encoder.encode(features)).collect();
    Ok((embeddings?, encoder.executor.into_device()))
}

/// A hash of everything that determines the rows.
fn key(
    store: &ClipStore,
    request: &Request,
    (hashes, adapter): (&WeightHashes, Option<&AdapterFile>),
    dtype: DType,
) -> Result<String, Failure> {
    let mut hasher = Hasher::sha256();
    let kind = match request.audio {
        AudioInput::None | AudioInput::Embeddings => "embeddings",
        AudioInput::Encoded => "encoded",
        AudioInput::Subsampled => "subsampled",
    };
    hasher.update(format!("audio rows 2 {kind} {dtype} {}\n", store.hash()).as_bytes());
    for (name, hash) in hashes {
        hasher.update(format!("{name} {} {hash}\n", request.storage_of(name)).as_bytes());
    }
    // The scale of an adapter changes the rows too.
    let encoding = encoding_request(request, 0);
    for module in &encoding.adapters {
        hasher.update(format!("{} {}\n", module.path, module.scale).as_bytes());
    }
    let is_read = !encoding.adapters.is_empty() || !encoding.trained.is_empty();
    for (key, tensor) in adapter.filter(|_| is_read).into_iter().flat_map(AdapterFile::tensors) {
        if key.to_string().contains(AUDIO) {
            let hash = Weight::Plain(tensor).read_hash().map_err(Failure::model)?;
            hasher.update(format!("{key} {hash}\n").as_bytes());
        }
    }
    Ok(hasher.finish_hex())
}

/// Whether a cache file has the expected size and the checksum of its content.
fn is_intact(path: &Path, bytes: u64) -> bool {
    let check = || -> io::Result<bool> {
        let mut file = File::open(path)?;
        let content_bytes = MAGIC.len() as u64 + bytes;
        if file.metadata()?.len() != content_bytes + TRAILER_BYTES {
            return Ok(false);
        }
        let mut hasher = Hasher::sha256();
        io::copy(&mut (&mut file).take(content_bytes), &mut hasher)?;
        let mut trailer = Vec::new();
        file.read_to_end(&mut trailer)?;
        Ok(hasher.finish_hex().as_bytes() == trailer)
    };
    check().unwrap_or(false)
}

fn write_rows(path: &Path, store: &ClipStore, encoder: &mut Encoder, dtype: DType) -> Result<(), Failure> {
    let mut failed = None;
    let written = write_whole(path, |out| {
        let mut hasher = Hasher::sha256();
        let mut put = |out: &mut dyn Write, bytes: &[u8]| {
            hasher.update(bytes);
            out.write_all(bytes)
        };
        put(out, MAGIC)?;
        let mut features = Vec::new();
        for clip in 0..store.len() as u32 {
            features.clear();
            store.read_features(clip, &mut features)?;
            let rows = encoder.encode(&mut features).map_err(|failure| {
                let message = io::Error::other(failure.to_string());
                failed = Some(failure);
                message
            })?;
            put(out, &encode_numbers(&rows, dtype))?;
        }
        out.write_all(hasher.finish_hex().as_bytes())
    });
    match (written, failed) {
        (Ok(()), _) => Ok(()),
        (Err(_), Some(failure)) => Err(failure),
        (Err(error), None) => Err(Failure::disk(error)),
    }
}

/// The bytes of numbers in a type of activations.
pub fn encode_numbers(numbers: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Bf16 => numbers.iter().flat_map(|number| f32_to_bf16(*number).to_le_bytes()).collect(),
        DType::F16 => numbers.iter().flat_map(|number| f32_to_f16(*number).to_le_bytes()).collect(),
        DType::F32 | DType::F64 | DType::I32 | DType::U64 => {
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
    }
}

/// A loaded encoder.
struct Encoder {
    executor: Executor<AnyDevice>,
    /// Mean and inverse deviation of each mel bin.
    mean: Vec<f32>,
    inverse_deviation: Vec<f32>,
    result: ValueId,
    width: usize,
}

impl Encoder {
    fn load(
        request: &Request,
        (model, adapter): (&Model, Option<&AdapterFile>),
        rows: usize,
        device: AnyDevice,
    ) -> Result<Encoder, Failure> {
        let plan = plan_encoding(request, rows);
        let result = leaf(&plan, state::AUDIO);
        let width = plan.value(result).ty.shape.at(&plan.extent).1;
        let mut executor = Executor::load(plan, device)?;
        load_weights(&mut executor, model, request.threads)?;
        if let Some(adapter) = adapter {
            read_part(&mut executor, &encoding_request(request, rows), adapter)?;
        }
        let extent = executor.plan().extent;
        executor.run(Entry::Refresh, &extent)?;
        let [mean, inverse_deviation] =
            [GLOBAL_MEAN, GLOBAL_INVERSE_DEVIATION].map(|name| read_vector(model, name));
        Ok(Encoder { executor, mean: mean?, inverse_deviation: inverse_deviation?, result, width })
    }

    /// Encodes a clip's features (frames, 80), without the rows that pad its last chunk. Changes the features.
    fn encode(&mut self, features: &mut Vec<f32>) -> Result<Vec<f32>, Failure> {
        for frame in features.chunks_exact_mut(MEL_BINS) {
            for (bin, number) in frame.iter_mut().enumerate() {
                *number = (*number - self.mean[bin]) * self.inverse_deviation[bin];
            }
        }
        let frames = features.len() / MEL_BINS;
        let rows = rows_of_frames(frames);
        let audio = filled_rows(rows);
        features.resize(audio * FRAMES_OF_ROW * MEL_BINS, 0.0);
        let plan = self.executor.plan();
        let [place, marks] = [input::AUDIO_FEATURES, input::AUDIO_MARKS].map(|name| leaf(plan, name));
        let element = plan.value(place).ty.storage.plain().expect("features are plain numbers");
        self.executor.write(place, &encode_numbers(features, element));
        let numbers = marks_of_clip(0, frames).flatten();
        self.executor.write(marks, &numbers.flat_map(i32::to_le_bytes).collect::<Vec<u8>>());
        self.executor.run(Entry::Encode, &Extent { audio, ..Extent::default() })?;
        Ok(read_floats(&mut self.executor, self.result, rows * self.width)?)
    }
}

fn read_vector(model: &Model, name: &str) -> Result<Vec<f32>, Failure> {
    let Weight::Plain(tensor) = stored(model, name) else {
        return Err(Failure::model(format!("`{name}` is not stored as plain numbers")));
    };
    let mut bytes = vec![0; 4 * MEL_BINS];
    let mut scratch = vec![0; 8 * MEL_BINS];
    read_tensor_into(&tensor, 0, Element::F32, &mut bytes, &mut scratch).map_err(Failure::model)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect())
}
