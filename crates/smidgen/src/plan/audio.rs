//! Audio in a job: which part of the audio encoder is in the plan, and how long clips are if there is no data.
//!
//! If no part of the encoder or projector is trained, clips become embeddings once, before training, and the encoder is
//! not in memory while training. If only the projector is trained, the plan starts from the encoder's output; otherwise
//! from the output of the strided convolutions, which no adapter changes.
//! Clips are encoded on the device of the run: on a GPU in the run's precision, on a CPU in f32.

use crate::failure::Failure;
use crate::rows::data::Data;
use smidgen_compile::model::audio::{AUDIO, AudioInput, is_of_projector};
use smidgen_compile::request::Purpose;
use smidgen_compile::{Request, TrainedBiases, compile_for};
use smidgen_data::clips::ClipStore;
use smidgen_formats::audio::{SAMPLE_RATE, frame_count};
use smidgen_formats::model::Model;
use smidgen_formats::phi4mm::SpeechLora;
use smidgen_ir::audio_rows::{filled_rows, rows_of_frames};
use smidgen_ir::{DeviceKind, Extent, Plan, Policy, Precision, Rank};
use smidgen_recipe::{AdapterKind, Recipe};
use std::sync::Arc;

/// The stage of the encoder from which the plan starts.
pub fn audio_input(request: &Request, data: &Data) -> Result<AudioInput, Failure> {
    let has_sound = match data {
        Data::Rows(rows) => {
            let sets = [Some(&rows.train), rows.eval.as_ref()];
            sets.into_iter().flatten().any(|set| set.clips().is_some())
        }
        Data::Assumed { .. } => request.spec.audio.is_some(),
    };
    match (has_sound, audio_rows([request])) {
        (true, rows) => Ok(rows),
        (false, AudioInput::Encoded | AudioInput::Subsampled) => Err(Failure::data(
            "a part of the audio encoder or projector is trained, and no row has `audio`: it would get no gradient",
        )
        .hint("leave encoder and projector out of `adapter.targets` and `adapter.train`, or train on rows with `audio`")),
        (false, AudioInput::None | AudioInput::Embeddings) => Ok(AudioInput::None),
    }
}

/// The latest stage from which all of these requests can start: the input of the first trained part of the encoder.
pub fn audio_rows<'a>(requests: impl IntoIterator<Item = &'a Request>) -> AudioInput {
    let paths = |request: &'a Request| {
        request
            .adapters
            .iter()
            .map(|module| module.path.as_str())
            .chain(request.trained.iter().map(String::as_str))
    };
    let trained = requests.into_iter().flat_map(paths).filter(|path| path.starts_with(AUDIO));
    trained.fold(AudioInput::Embeddings, |rows, path| match (is_of_projector(path), rows) {
        (true, AudioInput::None | AudioInput::Embeddings) => AudioInput::Encoded,
        (true, rows) => rows,
        (false, _) => AudioInput::Subsampled,
    })
}

/// Continues to train the adapter inside a published checkpoint: it is removed from the base, and the recipe gets its
/// rank and alpha.
pub fn continue_speech(recipe: &mut Recipe, model: &mut Model) -> Result<(), Failure> {
    let default_rank = Recipe::new(recipe.model.path.clone()).adapter.rank;
    let adapter = &mut recipe.adapter;
    if !model.stop_merging_speech() {
        return Err(Failure::recipe(
            "`adapter.init = builtin:speech` needs a model that contains an adapter for speech",
        )
        .hint("`hf:microsoft/Phi-4-multimodal-instruct` has one"));
    }
    let SpeechLora { rank, alpha } = SpeechLora::of_config(model.config());
    let stated = adapter.rank != default_rank && adapter.rank != rank;
    if stated || adapter.kind != AdapterKind::Lora {
        let (kind, own) = (adapter.kind, adapter.rank);
        return Err(Failure::recipe(format!(
            "`adapter.init = builtin:speech` is a LoRA of rank {rank}, the recipe asks for {kind} of rank {own}"
        ))
        .hint("leave out `adapter.rank` and `adapter.kind`, or start with `adapter.init = \"default\"`"));
    }
    (adapter.rank, adapter.alpha) = (rank, alpha);
    Ok(())
}

/// Audio rows of a clip of this length.
pub fn longest_rows(max_seconds: f64) -> usize {
    filled_rows(rows_of_frames(frame_count((max_seconds * SAMPLE_RATE as f64) as usize)))
}

/// The clips of a job, without repetition: the two parts of a split set share theirs.
pub fn clip_stores(data: &Data) -> Vec<&Arc<ClipStore>> {
    let Data::Rows(rows) = data else { return Vec::new() };
    let mut stores: Vec<&Arc<ClipStore>> = Vec::new();
    for clips in [Some(&rows.train), rows.eval.as_ref()].into_iter().flatten().filter_map(|set| set.clips()) {
        if !stores.iter().any(|store| Arc::ptr_eq(store, clips.store())) {
            stores.push(clips.store());
        }
    }
    stores
}

/// Audio rows of the longest clip.
pub fn longest_clip_rows(store: &ClipStore) -> usize {
    (0..store.len() as u32).map(|clip| filled_rows(store.rows(clip))).max().unwrap_or(0)
}

/// Bytes of the encoded rows of all clips.
pub fn encoded_bytes(store: &ClipStore, request: &Request) -> u64 {
    let Some(audio) = request.audio_spec() else { return 0 };
    (store.all_rows() * audio.width(request.audio) * request.activations().bytes()) as u64
}

/// The plan that encodes clips of up to this many rows.
pub fn plan_encoding(request: &Request, rows: usize) -> Plan {
    compile_for(Purpose::Encoding, &encoding_request(request, rows), &Policy::default())
}

/// The request for encoding clips, with the adapters and trained tensors of the encoder if the clips become embeddings.
pub fn encoding_request(request: &Request, rows: usize) -> Request {
    let extent = Extent { audio: rows, ..Extent::default() };
    // Training starts from the output of parts that are not trained.
    let is_part = |path: &str| request.audio == AudioInput::Embeddings && path.starts_with(AUDIO);
    Request {
        adapters: request.adapters.iter().filter(|module| is_part(&module.path)).cloned().collect(),
        trained: request.trained.iter().filter(|name| is_part(name)).cloned().collect(),
        biases: TrainedBiases::None,
        extent,
        step: extent,
        precision: match request.device {
            DeviceKind::Cpu => Precision::F32,
            DeviceKind::Cuda => request.precision,
        },
        rank: Rank::ONLY,
        decode: None,
        ..request.clone()
    }
}
