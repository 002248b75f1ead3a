//! The audio encoder on a GPU against the CPU: encoding clips, and attention over several tiles.
//!
//! Most tests need a GPU. The tolerances are those of `cuda_agrees.rs`, which also trains with an encoder.

use crate::audio_examples::long_attention;
use crate::cuda_agrees::{alone, compare, error, gpu_plan, in_numbers, open, reals, tolerance};
use crate::decoder::{Choice, phi4};
use crate::numbers::{Content, encode, random_reals, stored};
use crate::subject::Subject;
use smidgen_compile::model::audio::{AudioInput, AudioSpec};
use smidgen_compile::names::{input, state};
use smidgen_compile::{DecoderSpec, Purpose, Request, compile_for};
use smidgen_ir::audio_rows::{FRAMES_OF_ROW, filled_rows, marks_of_clip, rows_of_frames};
use smidgen_ir::{DeviceKind, Entry, Extent, LeafKind, Plan, Policy, Precision, Storage, ValueRole};
use smidgen_runtime::{Cpu, Device, Executor};

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::F16];

/// Mel frames of the clips: a short clip, one of several tiles whose last row is not full, and one of two chunks.
const CLIPS: [usize; 3] = [9, 8 * 150 - 3, 8 * 503];

fn request(device: DeviceKind, precision: Precision, audio: AudioInput) -> Request {
    let spec = phi4();
    let encoder = spec.audio.clone().map(|audio| AudioSpec { hidden: 64, conv_channels: 24, ..audio });
    let extent = Extent { audio: filled_rows(rows_of_frames(CLIPS[2])), ..Extent::default() };
    let spec = DecoderSpec { audio: encoder, ..spec };
    Request { spec, audio, extent, device, precision, adapters: vec![], ..Choice::lora().request() }
}

/// The encoded rows of all clips.
fn encode_clips<D: Device>(plan: Plan, device: D) -> (Vec<f64>, D) {
    let leaf = |plan: &Plan, name: &str| plan.leaf_named(name).unwrap();
    let mut executor = Executor::load(plan.clone(), device).unwrap();
    for (index, value) in plan.values.iter().enumerate() {
        if !matches!(&value.role, ValueRole::Leaf(leaf) if leaf.kind == LeafKind::Weight) {
            continue;
        }
        let (rows, columns) = value.ty.shape.at(&plan.extent);
        let (middle, size) = match value.name.as_str() {
            name if name.contains("norm") => (1.0, 0.4),
            name if name.ends_with(".bias") => (0.0, 0.3),
            _ => (0.0, (3.0 / columns as f32).sqrt()),
        };
        let numbers = random_reals(index as u64, rows * columns).into_iter();
        let numbers = numbers.map(|number| stored(value.ty.storage, middle + size * number)).collect();
        let id = leaf(&plan, &value.name);
        executor.write(id, &encode(&Content::Reals(numbers), value.ty.storage));
    }
    let mut all = Vec::new();
    for (clip, frames) in CLIPS.into_iter().enumerate() {
        let (rows, audio) = (rows_of_frames(frames), filled_rows(rows_of_frames(frames)));
        let mut features = random_reals(100 + clip as u64, 80 * frames);
        features.resize(80 * FRAMES_OF_ROW * audio, 0.0);
        let marks = marks_of_clip(0, frames).flatten().collect();
        for (name, content) in [
            (input::AUDIO_FEATURES, Content::Reals(features)),
            (input::AUDIO_MARKS, Content::Integers(marks)),
        ] {
            let id = leaf(&plan, name);
            executor.write(id, &encode(&content, plan.value(id).ty.storage));
        }
        executor.run(Entry::Encode, &Extent { audio, ..Extent::default() }).unwrap();
        let result = leaf(&plan, state::AUDIO);
        let columns = plan.value(result).ty.shape.at(&plan.extent).1;
        let mut bytes = vec![0; 4 * rows * columns];
        executor.read(result, &mut bytes).unwrap();
        all.extend(reals(&bytes, Storage::F32));
    }
    (all, executor.into_device())
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_encodes_clips_as_the_cpu_does() {
    let _alone = alone();
    for audio in [AudioInput::Subsampled, AudioInput::Embeddings] {
        let plan = |device, precision| {
            compile_for(Purpose::Encoding, &request(device, precision, audio), &Policy::default())
        };
        let (want, _) = encode_clips(plan(DeviceKind::Cpu, Precision::F32), Cpu::new(1).unwrap());
        assert!(want.iter().any(|number| *number != 0.0));
        for precision in PRECISIONS {
            let (got, device) = encode_clips(plan(DeviceKind::Cuda, precision), open(precision));
            let apart = error(&got, &want);
            let most = tolerance(precision);
            assert!(apart <= most, "{audio:?} in {}: rows differ by {apart:.2e}", precision.name());
            let (again, _) = encode_clips(plan(DeviceKind::Cuda, precision), device);
            assert!(again == got, "{audio:?} in {}: a second run gives other rows", precision.name());
        }
    }
}

/// Heads as large as a tile, heads padded to a tile, a head size that is not a multiple of 8, and one larger than a
/// tile.
#[test]
#[ignore = "needs a GPU"]
fn cuda_attends_to_chunks_of_several_tiles() {
    let _alone = alone();
    for precision in PRECISIONS {
        let element = DeviceKind::Cuda.activations(precision);
        let mut device = open(precision);
        for (heads, head_dim) in [(2, 64), (3, 24), (2, 19), (1, 80)] {
            let subject = long_attention(heads, head_dim);
            let want = subject.run_once(&mut subject.load(subject.roomy_plan(1), 1));
            let graph = in_numbers(&subject.graph, element);
            let on_gpu = Subject { graph: graph.clone(), ..subject.clone() };
            let mut executor = Executor::load(gpu_plan(&graph, subject.extent, precision), device).unwrap();
            let got = on_gpu.run_once(&mut executor);
            let wrong = compare(&subject, &graph, &got, &want, tolerance(precision));
            assert!(wrong.is_empty(), "in {}: {}", precision.name(), wrong.join("\n  "));
            assert!(on_gpu.run_once(&mut executor) == got, "a second run gives other bytes");
            device = executor.into_device();
        }
    }
}

/// A GPU accepts every step of encoding, with exactly the planned workspace.
#[test]
fn a_gpu_would_accept_every_step_of_encoding() {
    for audio in [AudioInput::Subsampled, AudioInput::Embeddings] {
        for precision in PRECISIONS {
            let request = request(DeviceKind::Cuda, precision, audio);
            let plan = compile_for(Purpose::Encoding, &request, &Policy::default());
            crate::cuda_plans::check(&format!("encoding in {}", precision.name()), &plan);
            let features = plan.value(plan.leaf_named(input::AUDIO_FEATURES).unwrap());
            assert_eq!(features.ty.storage, Storage::Plain(request.activations()));
        }
    }
}
