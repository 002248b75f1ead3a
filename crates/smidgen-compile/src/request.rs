//! What the compiler is asked for: the math ([`Request`]) and the choices that leave it alone ([`Policy`]).
//!
//! The split is the promise: two policies for one request give the same losses and gradients.

use crate::adapter::LoraModule;
use crate::model::spec::{DecoderSpec, EMBEDDING};
use smidgen_ir::{AdamW, DType, DeviceKind, Extent, Precision, Space, Storage, Workload};
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
    /// What its tokens are usually like.
    pub workload: Workload,
    /// Generation beside the other entry points, if any is wanted.
    pub decode: Option<DecodeShape>,
    /// Whether `eval` also leaves the loss of each supervised row.
    pub row_losses: bool,
    /// Threads for which workspaces are sized.
    pub threads: usize,
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
        Extent { tokens: self.new_tokens, rows: self.slots.min(self.new_tokens), segments: 0 }
    }
}

impl Request {
    pub fn storage_of(&self, tensor: &str) -> Storage {
        self.storage.get(tensor).copied().unwrap_or(Storage::Plain(self.spec.stored))
    }

    /// The numbers of activations.
    pub fn activations(&self) -> DType {
        self.device.activations(self.precision)
    }

    /// Where a value lies that is not on the device.
    pub fn elsewhere(&self) -> Space {
        self.device.elsewhere()
    }

    /// Whether products take what is trained in other numbers than those they are trained in.
    pub fn rounds_trained(&self) -> bool {
        self.activations() != DType::F32
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
    /// Largest norm of all gradients together; 0 = no limit.
    pub clip: f32,
}

/// How AdamW's moments lie.
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

    /// Storages of the first and the second moment of a parameter of that name and so many elements. Those of an
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

/// What memory may choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Layers whose activations are computed again in the backward pass.
    pub recompute: Recompute,
    /// Rows whose logits exist at the same time.
    pub loss_chunk: usize,
    /// Tokens for which wide activations exist at the same time; `None` is all of a micro-batch.
    pub tile_tokens: Option<usize>,
    pub away: Away,
}

impl Policy {
    /// Everything lies on the device.
    pub fn resident(recompute: Recompute, loss_chunk: usize) -> Policy {
        Policy { recompute, loss_chunk, tile_tokens: None, away: Away::default() }
    }
}

/// What lies elsewhere than on the device while it is not needed: in pinned memory of the host beside a GPU, on disk
/// beside a CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Away {
    /// Layers whose weights are brought when they are needed, ascending.
    pub weights: Vec<usize>,
    /// The embedding, of which rows are looked up where it lies, unless it is the head too.
    pub embedding: bool,
    /// The embedding and the head.
    pub tables: bool,
    /// Weights that are brought lie on disk, also beside a GPU.
    pub on_disk: bool,
    /// Pieces in which the head comes then, and rounds otherwise; below 2 it comes whole.
    pub head_pieces: usize,
    /// Layers whose activations for the backward pass wait there, ascending.
    pub activations: Vec<usize>,
    /// The optimizer's moments.
    pub moments: bool,
    /// Bytes of weights that may be on the device at the same time, those ahead of their use included; what one
    /// operation needs is there in any case.
    pub window_bytes: usize,
}

impl Away {
    /// Whether the embedding or the head is away.
    pub fn has_tables(&self) -> bool {
        self.embedding || self.tables
    }

    pub fn is_empty(&self) -> bool {
        self.weights.is_empty() && !self.has_tables() && self.activations.is_empty() && !self.moments
    }
}

/// `count` of `layers` layers, spread evenly: so each has the time of several to be brought.
pub fn spread(count: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1) * count / layers > layer * count / layers).collect()
}

/// A set of layers, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recompute {
    pub layers: Vec<usize>,
}

impl Recompute {
    pub fn none() -> Recompute {
        Recompute::default()
    }

    pub fn first(count: usize) -> Recompute {
        Recompute { layers: (0..count).collect() }
    }

    /// Layers 0, n, 2n ...
    pub fn every(n: usize, layers: usize) -> Recompute {
        Recompute { layers: (0..layers).step_by(n).collect() }
    }

    pub fn contains(&self, layer: usize) -> bool {
        self.layers.binary_search(&layer).is_ok()
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
