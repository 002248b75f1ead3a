//! What the compiler is asked for: the math of a run.
//!
//! How memory is used is a `Policy` of smidgen-ir. The split is the promise: two policies for one request give the same
//! losses and gradients.

use crate::adapter::LoraModule;
use crate::model::audio::{AudioInput, AudioSpec};
use crate::model::spec::{DecoderSpec, EMBEDDING};
use smidgen_ir::{AdamW, DType, DeviceKind, Extent, Pins, Precision, Rank, Storage, Workload};
use std::collections::{BTreeSet, HashMap};

/// The math of a run, and the sizes that it is compiled for.
#[derive(Clone, Debug)]
pub struct Request {
    pub title: String,
    pub spec: DecoderSpec,
    /// Storage by tensor name; tensors that are not named here have `spec.stored`.
    pub storage: HashMap<String, Storage>,
    pub adapters: Vec<LoraModule>,
    /// Tensors of the base that are trained themselves, in f32.
    pub trained: BTreeSet<String>,
    pub form: AdapterForm,
    pub biases: TrainedBiases,
    pub dropout: f32,
    pub optimizer: Optimizer,
    pub device: DeviceKind,
    pub precision: Precision,
    /// Largest micro-batch.
    pub extent: Extent,
    /// Largest optimizer step: all of its micro-batches together.
    pub step: Extent,
    /// What its tokens are usually like.
    pub workload: Workload,
    /// What the rows of sound are when they reach the program.
    pub audio: AudioInput,
    /// Generation in addition to the other entry points, if wanted.
    pub decode: Option<DecodeShape>,
    /// Whether `eval` also leaves the loss of each supervised row.
    pub row_losses: bool,
    /// Threads for which workspaces are sized.
    pub threads: usize,
    /// This process among those that train together.
    pub rank: Rank,
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Training,
    /// The loss alone, nothing is trained.
    Evaluation,
    /// The logits of whole sequences.
    Logits,
    Generation,
    /// Sound to audio rows: to embeddings, or to what the encoder starts from.
    Encoding,
}

/// The sizes of generation with cached keys and values.
///
/// A slot holds one sequence. Which row of the caches belongs to a position of a slot stands in a table that the
/// host writes, so sequences of any length share the rows, and a common beginning can be there once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Sequences at the same time; each may have the logits of one new token in a run.
    pub slots: usize,
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// Rows of the caches.
    pub cache_rows: usize,
    /// New tokens of one run.
    pub new_tokens: usize,
}

impl DecodeShape {
    /// The largest run.
    pub fn extent(&self) -> Extent {
        Extent { tokens: self.new_tokens, rows: self.slots.min(self.new_tokens), segments: 0, audio: 0 }
    }
}

impl Request {
    pub fn storage_of(&self, tensor: &str) -> Storage {
        self.storage.get(tensor).copied().unwrap_or(Storage::Plain(self.spec.stored))
    }

    /// The largest run of generation; any of its tokens may be one that sound replaces.
    pub fn decode_extent(&self) -> Option<Extent> {
        let heard = |shape: DecodeShape| if self.audio_spec().is_some() { shape.new_tokens } else { 0 };
        self.decode.map(|shape| Extent { audio: heard(shape), ..shape.extent() })
    }

    /// What turns sound into embeddings, where there is sound.
    pub fn audio_spec(&self) -> Option<&AudioSpec> {
        self.spec.audio.as_ref().filter(|_| self.audio != AudioInput::None)
    }

    /// The numbers of activations.
    pub fn activations(&self) -> DType {
        self.device.activations(self.precision)
    }

    /// Whether products take what is trained in other numbers than those they are trained in.
    pub fn rounds_trained(&self) -> bool {
        self.activations() != DType::F32
    }

    /// Whether audio rows pass through a part of the program. They are not rows of tokens, and no lap carries them.
    pub fn computes_audio(&self) -> bool {
        matches!(self.audio, AudioInput::Encoded | AudioInput::Subsampled)
    }

    /// Blocks of the audio encoder in the program: the layers in front of those of the decoder.
    pub fn encoder_layers(&self) -> usize {
        self.audio_spec().filter(|_| self.audio == AudioInput::Subsampled).map_or(0, |audio| audio.blocks)
    }

    /// Layers that memory choices are about: blocks of an audio encoder, then those of the decoder.
    pub fn layers(&self) -> usize {
        self.encoder_layers() + self.spec.layers
    }

    /// Whether the head is trained and is the embedding too. In breadth-first order its gradient would be summed in another
    /// order: those of the head over all micro-batches come before those of the embedding.
    pub fn trains_tied_head(&self) -> bool {
        self.spec.tied_head && self.trained.contains(self.spec.head_tensor())
    }
}

/// How the low-rank matrices take part in their linear.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AdapterForm {
    /// Added to the weight.
    #[default]
    Lora,
    /// Added to the weight, whose rows then get a trained length.
    Dora,
    /// Through a trained function; `reg` pulls it towards the straight line.
    Fourier { reg: f64 },
}

/// Biases of the base that are trained along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedBiases {
    #[default]
    None,
    All,
    /// Those of adapted linears.
    Adapted,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    pub adamw: AdamW,
    pub moments: Moments,
    pub master: Master,
    /// Largest norm of all gradients together; 0 = no limit.
    pub clip: f32,
}

/// How trained matrices of the base are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Master {
    #[default]
    F32,
    /// Updated in f32 and rounded at random, with random bits of this seed.
    Bf16 { seed: u64 },
}

impl Master {
    /// The storage of a trained tensor with this many dimensions: vectors are small, and stay f32.
    pub fn storage(self, dimensions: usize) -> Storage {
        match self {
            Master::Bf16 { .. } if dimensions == 2 => Storage::Plain(DType::Bf16),
            Master::F32 | Master::Bf16 { .. } => Storage::F32,
        }
    }
}

/// How AdamW's moments are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moments {
    #[default]
    F32,
    /// A byte an element and a scale for each block of them, as bitsandbytes has it; in f32 where a
    /// parameter has fewer than [`Moments::FEWEST_IN_8_BIT`] elements, and for embeddings.
    Bits8,
}

impl Moments {
    /// What bitsandbytes calls `min_8bit_size`, by default.
    pub const FEWEST_IN_8_BIT: usize = 4096;

    /// Storages of the first and the second moment of a parameter with this name and number of elements. Those of an
    /// embedding stay f32, as the Trainer of transformers asks of bitsandbytes.
    pub fn storage(self, name: &str, elements: usize) -> [Storage; 2] {
        match self {
            Moments::Bits8 if elements >= Self::FEWEST_IN_8_BIT && name != EMBEDDING => {
                [true, false].map(|signed| Storage::Dynamic8 { signed })
            }
            Moments::F32 | Moments::Bits8 => [Storage::F32; 2],
        }
    }
}

/// Rows whose logits exist at the same time where memory does not press. On a CPU a chunk of about 96 MiB: enough
/// rows that the head's weights are packed seldom, and a multiple of 64 so that threads share them evenly. On a GPU
/// as many as fill it.
pub fn default_loss_chunk(device: DeviceKind, vocabulary: usize, rows: usize) -> usize {
    const CHUNK_BYTES: usize = 96 << 20;
    const GPU_ROWS: usize = 1024;
    let chunk = match device {
        DeviceKind::Cpu => (CHUNK_BYTES / (4 * vocabulary) / 64 * 64).clamp(64, 512),
        DeviceKind::Cuda => GPU_ROWS,
    };
    chunk.min(rows.max(1))
}

/// Chunks of the loss to try, in rows: the usual one, then halves of it down to the fewest.
pub fn loss_chunks(request: &Request, pins: &Pins) -> Vec<usize> {
    const FEWEST_ROWS: usize = 32;
    if let Some(pinned) = pins.loss_chunk {
        return vec![pinned];
    }
    let usual = default_loss_chunk(request.device, request.spec.vocabulary, request.extent.rows);
    let half = |rows: &usize| (*rows > FEWEST_ROWS).then_some((rows / 2).max(FEWEST_ROWS));
    std::iter::successors(Some(usual), half).collect()
}
