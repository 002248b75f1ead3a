//! The input of the compiler that decides results: the math of a run.
//!
//! How memory is used is a separate input, the `Policy` of smidgen-ir. Two policies for one request give the same losses
//! and gradients.

use crate::adapter::LoraModule;
use crate::model::audio::{AudioInput, AudioSpec};
use crate::model::spec::{DecoderSpec, EMBEDDING};
use crate::names::input;
use smidgen_ir::{
    AdamW, DType, DeviceKind, Extent, Objective, Pins, Plan, Precision, Rank, Storage, Workload,
};
use std::collections::{BTreeSet, HashMap};

/// The math of a run, and the sizes that it is compiled for.
#[derive(Clone, Debug)]
pub struct Request {
    pub title: String,
    pub spec: DecoderSpec,
    /// Storage by tensor name; other tensors are stored as `spec.stored`.
    pub storage: HashMap<String, Storage>,
    pub adapters: Vec<LoraModule>,
    /// Tensors of the base model that are trained themselves.
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
    /// Averages over the data, for predicting time.
    pub workload: Workload,
    /// The form of the audio rows that the host provides.
    pub audio: AudioInput,
    /// Sizes of generation, if it is planned; it can be added to the entry points of training.
    pub decode: Option<DecodeShape>,
    /// What a step minimizes; `None` is the mean negative log-likelihood.
    pub objective: Option<Objective>,
    /// The model of `reference`, if the plan has that entry point.
    pub reference: Option<Reference>,
    /// Whether `eval` also leaves the loss of each supervised row.
    pub row_losses: bool,
    /// Threads for which workspaces are sized.
    pub threads: usize,
    pub rank: Rank,
}

/// The model whose log-probabilities an objective compares with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The base without its adapters.
    Base,
    /// The base with a frozen copy of the adapters.
    Adapter,
}

/// What a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Training,
    /// Only the loss; nothing is trained.
    Evaluation,
    /// The logits of whole sequences.
    Logits,
    Generation,
    /// Turns sound into audio rows, in the form that `Request::audio` names.
    Encoding,
}

/// The sizes of generation with cached keys and values.
///
/// A slot holds one sequence. A table that the host writes maps each position of a slot to a row of the caches, so
/// sequences of any length share the rows, and a common prefix can be stored once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Sequences at the same time; a run computes the logits of at most one new token for each.
    pub slots: usize,
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// Rows of the caches.
    pub cache_rows: usize,
    /// New tokens of one run.
    pub new_tokens: usize,
}

impl DecodeShape {
    /// Prompts are read in runs of at least this many tokens.
    const FEWEST_NEW_TOKENS: usize = 64;

    /// The sizes of generation in a plan that also trains, which were those of [`DecodeShape::of_equal_slots`].
    pub fn planned(plan: &Plan) -> Option<DecodeShape> {
        let table = &plan.value(plan.leaf_named(input::CACHE_TABLE)?).ty;
        let (slots, positions) = table.shape.at(&Extent::default());
        let new_tokens = plan.decode_extent?.tokens;
        Some(DecodeShape { slots, positions, cache_rows: slots * positions, new_tokens })
    }

    /// Every slot has room for a whole sequence.
    pub fn of_equal_slots(slots: usize, positions: usize) -> DecodeShape {
        let cache_rows = slots * positions;
        let new_tokens = slots.max(Self::FEWEST_NEW_TOKENS.min(cache_rows));
        DecodeShape { slots, positions, cache_rows, new_tokens }
    }

    /// The largest run.
    pub fn extent(&self) -> Extent {
        Extent { tokens: self.new_tokens, rows: self.slots.min(self.new_tokens), segments: 0, audio: 0 }
    }
}

impl Request {
    pub fn storage_of(&self, tensor: &str) -> Storage {
        self.storage.get(tensor).copied().unwrap_or(Storage::Plain(self.spec.stored))
    }

    /// The largest run of generation. Sound may replace any of its tokens.
    pub fn decode_extent(&self) -> Option<Extent> {
        self.decode.map(|shape| {
            let audio = if self.audio_spec().is_some() { shape.new_tokens } else { 0 };
            Extent { audio, ..shape.extent() }
        })
    }

    /// The audio encoder, if the run has sound.
    pub fn audio_spec(&self) -> Option<&AudioSpec> {
        self.spec.audio.as_ref().filter(|_| self.audio != AudioInput::None)
    }

    /// Whether losses of rows are kept: for the host, or for an objective.
    pub fn keeps_row_losses(&self) -> bool {
        self.row_losses || self.objective.is_some()
    }

    /// The element type of activations.
    pub fn activations(&self) -> DType {
        self.device.activations(self.precision)
    }

    /// Whether matmuls use rounded copies of trained tensors.
    pub fn rounds_trained(&self) -> bool {
        self.activations() != DType::F32
    }

    /// Blocks of the audio encoder in the program. They count as the layers before those of the decoder.
    pub fn encoder_layers(&self) -> usize {
        self.audio_spec().filter(|_| self.audio == AudioInput::Subsampled).map_or(0, |audio| audio.blocks)
    }

    /// Layers that memory choices apply to: blocks of the audio encoder, then layers of the decoder.
    pub fn layers(&self) -> usize {
        self.encoder_layers() + self.spec.layers.len()
    }

    /// Whether the head is trained and is also the embedding. In breadth-first order the sums of its gradient have another
    /// order: the head's parts of all micro-batches come before the embedding's.
    pub fn trains_tied_head(&self) -> bool {
        self.spec.head.is_tied && self.trained.contains(self.spec.head_tensor())
    }
}

/// How the low-rank matrices change their linear.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum AdapterForm {
    /// Added to the weight.
    #[default]
    Lora,
    /// Added to the weight, whose rows are then scaled to a trained length.
    Dora,
    /// Through a trained function; the regularizer `reg` pulls it towards the identity.
    Fourier { reg: f64 },
}

/// Biases of the base model that are trained with the adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedBiases {
    #[default]
    None,
    All,
    /// The biases of adapted linears.
    Adapted,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Optimizer {
    pub adamw: AdamW,
    pub moments: Moments,
    pub master: Master,
    /// Gradients are clipped to this norm; 0 = never.
    pub clip: f32,
}

/// How trained matrices of the base model are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Master {
    #[default]
    F32,
    /// In bf16: updated in f32 and rounded at random, with random bits from this seed.
    Bf16 { seed: u64 },
}

impl Master {
    /// The storage of a trained tensor with this many dimensions. Vectors are small and stay in f32.
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
    /// A byte per element and a scale per block, as in bitsandbytes. In f32 for embeddings and for parameters of fewer than
    /// [`Moments::FEWEST_IN_8_BIT`] elements.
    Bits8,
}

impl Moments {
    /// The default of `min_8bit_size` in bitsandbytes.
    pub const FEWEST_IN_8_BIT: usize = 4096;

    /// Storages of the first and the second moment of a parameter with this name and number of elements. Those of an
    /// embedding stay in f32, as the Trainer of transformers configures bitsandbytes.
    pub fn storage(self, name: &str, elements: usize) -> [Storage; 2] {
        match self {
            Moments::Bits8 if elements >= Self::FEWEST_IN_8_BIT && name != EMBEDDING => {
                [true, false].map(|signed| Storage::Dynamic8 { signed })
            }
            Moments::F32 | Moments::Bits8 => [Storage::F32; 2],
        }
    }
}

/// Rows whose logits exist at the same time if memory is not short. On a CPU the logits of a chunk are about 96 MiB: enough
/// rows that the weights of the head are rarely packed, and a multiple of 64 so that threads share them evenly. On a GPU
/// enough rows to keep it busy.
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
