//! A graph with its contents, ready to be planned, run and differentiated.
//!
//! A subject has everything that a check needs: the trained leaves, the contents that the host writes, and the scalar
//! that is differentiated.

use crate::numbers::{Content, decode_doubles, decode_reals, encode};
use smidgen_compile::model::layer::{LayerSpec, NormForm};
use smidgen_compile::model::spec::{EmbeddingSpec, FINAL_NORM, HeadSpec};
use smidgen_compile::passes::{join_operands, reuse_in_place};
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::{AdapterForm, DecoderSpec, Request, TrainedBiases, arena, schedule};
use smidgen_ir::{
    AdamW, DType, DeviceKind, Entry, Extent, Graph, LeafKind, Norm, Plan, Precision, Rank, RopeSpec, ValueId,
    Workload,
};
use smidgen_runtime::{Cpu, Device, DeviceError, Executor, Null};
use std::collections::HashMap;

/// The scalar that is differentiated.
#[derive(Clone, Debug)]
pub enum Scalar {
    /// Σ y·dy, summed here in f64; `eval` computes y.
    Dot { y: ValueId, dy: Vec<f32> },
    /// A loss that an entry point adds to a leaf.
    Loss { entry: Entry, leaf: ValueId },
}

#[derive(Clone, Debug)]
pub struct Subject {
    pub name: String,
    pub graph: Graph,
    pub extent: Extent,
    pub contents: Vec<(ValueId, Content)>,
    pub scalar: Scalar,
}

/// The results of a run of `micro_step` and `eval`.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The bytes of each gradient, by the name of its leaf.
    pub gradients: HashMap<String, Vec<u8>>,
    pub result: Vec<u8>,
}

impl Subject {
    /// A plan for micro-batches of at most `planned`.
    pub fn plan(&self, planned: Extent, threads: usize) -> Plan {
        plan_graph(&self.graph, planned, threads)
    }

    /// A plan for larger micro-batches than are run, because kernels must use run-time sizes, not planned ones.
    pub fn roomy_plan(&self, threads: usize) -> Plan {
        self.plan(roomy(self.extent), threads)
    }

    pub fn trained(&self) -> Vec<(ValueId, ValueId)> {
        self.graph.trainable().collect()
    }

    pub fn reals_of(&self, leaf: ValueId) -> &[f32] {
        let found = self.contents.iter().find(|(id, _)| *id == leaf);
        match found {
            Some((_, Content::Reals(values))) => values,
            other => panic!("`{}` holds {other:?}", self.graph.value(leaf).name),
        }
    }

    /// Runs `micro_step`, then `eval`, from zero gradients.
    pub fn run_once<D: Device>(&self, executor: &mut Executor<D>) -> Outcome {
        self.write_contents(executor);
        executor.run(Entry::MicroStep, &self.extent).unwrap();
        let mut gradients = HashMap::new();
        for (leaf, gradient) in self.trained() {
            gradients.insert(self.graph.value(leaf).name.clone(), self.read_bytes(executor, gradient));
        }
        let result = match &self.scalar {
            Scalar::Dot { y, .. } => {
                executor.run(Entry::Eval, &self.extent).unwrap();
                self.read_bytes(executor, *y)
            }
            Scalar::Loss { entry: Entry::MicroStep, leaf } => self.read_bytes(executor, *leaf),
            Scalar::Loss { entry, leaf } => {
                executor.run(*entry, &self.extent).unwrap();
                self.read_bytes(executor, *leaf)
            }
        };
        Outcome { gradients, result }
    }

    /// The scalar for the current leaves.
    pub fn evaluate(&self, executor: &mut Executor<Cpu>) -> f64 {
        match &self.scalar {
            Scalar::Dot { y, dy } => {
                executor.run(Entry::Eval, &self.extent).unwrap();
                let y = decode_reals(&self.read_bytes(executor, *y));
                assert_eq!(y.len(), dy.len());
                y.iter().zip(dy).map(|(y, dy)| f64::from(*y) * f64::from(*dy)).sum()
            }
            Scalar::Loss { entry, leaf } => {
                executor.write(*leaf, &0.0f64.to_le_bytes());
                executor.run(*entry, &self.extent).unwrap();
                decode_doubles(&self.read_bytes(executor, *leaf))[0]
            }
        }
    }

    pub fn write_reals<D: Device>(&self, executor: &mut Executor<D>, leaf: ValueId, values: &[f32]) {
        let storage = self.graph.value(leaf).ty.storage;
        executor.write(leaf, &encode(&Content::Reals(values.to_vec()), storage));
    }

    /// Writes the contents and zeros to all gradients, moments and state, and then runs `refresh`.
    pub fn write_contents<D: Device>(&self, executor: &mut Executor<D>) {
        for (index, value) in self.graph.values.iter().enumerate() {
            // A rounded copy of an offloaded weight has no buffer; it is rounded after each fetch.
            if executor.plan().value(ValueId(index as u32)).buffer.is_none() {
                continue;
            }
            let kind = value.leaf().map(|leaf| leaf.kind);
            let cleared = [LeafKind::Gradient, LeafKind::Moment, LeafKind::State, LeafKind::Derived];
            if kind.is_some_and(|kind| cleared.contains(&kind)) {
                executor.write(ValueId(index as u32), &vec![0; value.stored_bytes(&self.extent)]);
            }
        }
        for (leaf, content) in &self.contents {
            let value = self.graph.value(*leaf);
            let bytes = encode(content, value.ty.storage);
            assert_eq!(bytes.len(), value.ty.bytes(&self.extent), "contents of `{}`", value.name);
            let own = value.role.shard().map_or(0..bytes.len(), |shard| shard.own_bytes(&value.ty));
            executor.write(*leaf, &bytes[own]);
        }
        executor.run(Entry::Refresh, &self.extent).unwrap();
    }

    pub fn read_bytes<D: Device>(&self, executor: &mut Executor<D>, value: ValueId) -> Vec<u8> {
        let mut bytes = vec![0; self.graph.value(value).ty.bytes(&self.extent)];
        executor.read(value, &mut bytes).unwrap();
        bytes
    }

    /// The bytes that the host writes into a leaf.
    pub fn content_bytes(&self, leaf: ValueId) -> Vec<u8> {
        let (_, content) = self.contents.iter().find(|(id, _)| *id == leaf).unwrap();
        encode(content, self.graph.value(leaf).ty.storage)
    }

    pub fn load(&self, plan: Plan, threads: usize) -> Executor<Cpu> {
        let mut executor = Executor::load(plan, Cpu::new(threads).unwrap()).unwrap();
        self.write_contents(&mut executor);
        executor
    }

    /// Runs every entry point on the device that checks accesses, `micro_step` and `update` more than once.
    pub fn run_on_null(&self, plan: Plan) -> Result<(), String> {
        let mut executor = Executor::load(plan, Null::default()).map_err(|error| error.to_string())?;
        self.write_contents(&mut executor);
        let order = [Entry::MicroStep, Entry::MicroStep, Entry::Update, Entry::Refresh, Entry::Eval];
        for entry in order.into_iter().chain([Entry::MicroStep, Entry::Update]) {
            let ran = if entry == Entry::MicroStep && executor.has_laps() {
                executor.run_laps(&[self.extent; 2], |_, _| Ok(()))
            } else {
                executor.run(entry, &self.extent)
            };
            ran.map_err(|error: DeviceError| error.to_string())?;
        }
        Ok(())
    }
}

/// A larger extent than the given one.
pub fn roomy(Extent { tokens, rows, segments, audio }: Extent) -> Extent {
    let audio = if audio > 0 { audio + 2 } else { 0 };
    Extent { tokens: tokens + 3, rows: rows + 2, segments: segments + 1, audio }
}

/// Makes a plan of a graph as `compile` does after its passes.
pub fn plan_graph(graph: &Graph, planned: Extent, threads: usize) -> Plan {
    let request = Request { extent: planned, threads, ..plain_request() };
    plan_with(graph, &request)
}

/// Like `plan_graph`, for any request.
pub fn plan_with(graph: &Graph, request: &Request) -> Plan {
    let shared = reuse_in_place::find(graph);
    let layout = join_operands::find(graph, request);
    arena::plan_memory(schedule::plan_lifetimes(graph.clone(), &shared, &layout, request))
}

/// A request without a model, for stages that need only sizes and settings.
pub fn plain_request() -> Request {
    Request {
        title: "test".into(),
        spec: plain_spec(),
        storage: HashMap::new(),
        adapters: vec![],
        form: AdapterForm::Lora,
        trained: Default::default(),
        biases: TrainedBiases::None,
        dropout: 0.0,
        optimizer: optimizer(),
        extent: Extent { tokens: 1, rows: 1, segments: 1, audio: 0 },
        step: Extent { tokens: 1, rows: 1, segments: 1, audio: 0 },
        device: DeviceKind::Cpu,
        precision: Precision::F32,
        workload: Workload { keys_per_query: 1.0, supervised: 1.0 },
        audio: Default::default(),
        decode: None,
        objective: None,
        reference: None,
        row_losses: false,
        rank: Rank::ONLY,
        threads: 1,
    }
}

pub fn optimizer() -> Optimizer {
    let adamw = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    Optimizer { adamw, moments: Moments::F32, master: Master::F32, clip: 1.0 }
}

/// One small layer without the extras of any model family.
pub fn plain_spec() -> DecoderSpec {
    DecoderSpec {
        model_type: "llama".into(),
        vocabulary: 1,
        hidden: 8,
        embedding: EmbeddingSpec::plain(),
        ropes: vec![RopeSpec::plain(1e4, 8)],
        layers: vec![LayerSpec::like_llama(1, 1, 8, 1, 1e-5)],
        final_norm: NormForm::Rms(Norm { eps: 1e-5, plus_one: false }),
        final_norm_path: FINAL_NORM,
        head: HeadSpec { is_tied: false, scale: 1.0, softcap: None },
        max_positions: 1,
        stored: DType::F32,
        audio: None,
        unread_layers: 0,
    }
}
