//! A whole decoder as a subject: two layers, grouped heads, small odd sizes.
//!
//! The stages are those of `compile`, written out here so that a test can mark any leaf as trained and
//! hand any keep set to recompute.

use crate::numbers::{Content, random_integers, random_keys, random_reals, stored};
use crate::subject::{Scalar, Subject, optimizer};
use smidgen_compile::adapter::LoraModule;
use smidgen_compile::forward::{self, input, state};
use smidgen_compile::passes::recompute::{self, KeepSet};
use smidgen_compile::passes::remove_dead;
use smidgen_compile::{DecoderSpec, Policy, Recompute, Request, autodiff, update};
use smidgen_ir::{
    Activation, DType, Entry, Extent, Graph, LeafKind, LossHead, Op, RopeScaling, RopeSpec, Storage, ValueId,
    Workload, verify,
};
use std::collections::HashMap;

/// What a test chooses of the decoder.
#[derive(Clone, Debug)]
pub struct Choice {
    pub name: &'static str,
    pub activation: Activation,
    pub biases: bool,
    pub tied_head: bool,
    pub qk_norm: bool,
    pub window: Option<usize>,
    pub stored: DType,
    /// Ends of the paths that carry an adapter of rank 3.
    pub adapted: &'static [&'static str],
    pub dropout: f32,
    /// Whether every tensor of the model is trained as well.
    pub train_everything: bool,
}

pub const LAYERS: usize = 2;
pub const ALL_LINEARS: &[&str] =
    &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

/// Three segments, one of a single token.
const SEGMENTS: [usize; 3] = [7, 1, 5];
pub const EXTENT: Extent = Extent { tokens: 13, rows: 8, segments: 3 };
const LOSS_CHUNK: usize = 3;

impl Choice {
    pub fn lora() -> Choice {
        Choice {
            name: "lora",
            activation: Activation::Silu,
            biases: true,
            tied_head: false,
            qk_norm: false,
            window: None,
            stored: DType::Bf16,
            adapted: ALL_LINEARS,
            dropout: 0.0,
            train_everything: false,
        }
    }

    pub fn request(&self) -> Request {
        let spec = DecoderSpec {
            model_type: "llama".into(),
            vocabulary: 23,
            hidden: 20,
            intermediate: 28,
            layers: LAYERS,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            norm_eps: 1e-5,
            rope: RopeSpec { theta: 1e4, dim: 8, scaling: RopeScaling::Default },
            activation: self.activation,
            qkv_bias: self.biases,
            output_bias: self.biases,
            qk_norm: self.qk_norm,
            window: self.window,
            mlp_bias: self.biases,
            tied_head: self.tied_head,
            max_positions: 64,
            stored: self.stored,
        };
        let linears = spec.linears();
        let adapted =
            linears.iter().filter(|linear| self.adapted.iter().any(|end| linear.path.ends_with(end)));
        let adapters =
            adapted.map(|linear| LoraModule { path: linear.path.clone(), rank: 3, scale: 0.7 }).collect();
        Request {
            title: self.name.into(),
            spec,
            storage: HashMap::new(),
            adapters,
            dropout: self.dropout,
            optimizer: optimizer(),
            extent: EXTENT,
            workload: Workload { keys_per_query: 4.0, supervised: 0.5 },
            threads: 1,
        }
    }

    /// Forward and backward, before any pass.
    pub fn differentiated(&self) -> Graph {
        let policy = Policy { recompute: Recompute::none(), loss_chunk: LOSS_CHUNK };
        let mut graph = forward::build_graph(&self.request(), &policy);
        if self.train_everything {
            train_all_weights(&mut graph);
        }
        verify::expect_sound("forward", &verify::graph(&graph));
        autodiff::append_backward(&mut graph);
        verify::expect_sound("autodiff", &verify::graph(&graph));
        graph
    }

    /// The decoder under a keep set that is chosen when the graph is known.
    pub fn subject(&self, keep: impl Fn(&Graph) -> KeepSet) -> Subject {
        let mut graph = self.differentiated();
        let keep = keep(&graph);
        recompute::apply(&mut graph, &keep);
        verify::expect_sound("recompute", &verify::graph(&graph));
        remove_dead::apply(&mut graph);
        verify::expect_sound("remove_dead", &verify::graph(&graph));
        update::append_update(&mut graph, &optimizer());
        verify::expect_sound("update", &verify::graph(&graph));
        let contents = contents(&graph);
        // Dropout exists in training alone, so there the loss of `micro_step` is what is differentiated.
        let (entry, leaf) = match self.dropout > 0.0 {
            true => (Entry::MicroStep, state::LOSS),
            false => (Entry::Eval, state::EVAL_LOSS),
        };
        let scalar = Scalar::Loss { entry, leaf: leaf_named(&graph, leaf) };
        Subject { name: self.name.into(), graph, extent: EXTENT, contents, scalar }
    }

    /// The decoder as `compile` would keep its activations.
    pub fn subject_with(&self, layers: Recompute) -> Subject {
        let policy = Policy { recompute: layers, loss_chunk: LOSS_CHUNK };
        self.subject(|graph| recompute::keep_set(graph, &policy))
    }
}

pub fn leaf_named(graph: &Graph, name: &str) -> ValueId {
    let found = graph.values.iter().position(|value| value.name == name && !value.is_temp());
    ValueId(found.unwrap_or_else(|| panic!("no leaf `{name}`")) as u32)
}

/// Marks every weight, and asks the loss for the head's gradient.
fn train_all_weights(graph: &mut Graph) {
    let weights: Vec<ValueId> = (0..graph.values.len() as u32)
        .map(ValueId)
        .filter(|id| graph.value(*id).leaf().is_some_and(|leaf| leaf.kind == LeafKind::Weight))
        .collect();
    for weight in weights {
        forward::train_leaf(graph, weight);
    }
    let values = graph.clone();
    let micro_step = graph.entries.iter_mut().find(|(entry, _)| *entry == Entry::MicroStep);
    for node in &mut micro_step.expect("the forward stage builds micro_step").1 {
        if let Op::LmHeadLoss(LossHead { train_head, .. }) = &mut node.op {
            *train_head = true;
            node.updates.extend(values.gradient_of(node.inputs[1]));
        }
    }
}

/// Contents at which every part of the model matters: norms near 1, products of size 1.
fn contents(graph: &Graph) -> Vec<(ValueId, Content)> {
    let mut contents = Vec::new();
    for (index, value) in graph.values.iter().enumerate() {
        let Some(leaf) = value.leaf() else { continue };
        let (rows, columns) = value.ty.shape.at(&EXTENT);
        let (id, seed) = (ValueId(index as u32), 500 + index as u64);
        let content = match leaf.kind {
            LeafKind::Weight | LeafKind::Adapter => {
                Content::Reals(weight_values(&value.name, value.ty.storage, rows, columns, seed))
            }
            LeafKind::Input => input_values(&value.name, seed),
            LeafKind::Gradient | LeafKind::Moment | LeafKind::State => continue,
        };
        contents.push((id, content));
    }
    contents
}

fn weight_values(name: &str, storage: Storage, rows: usize, columns: usize, seed: u64) -> Vec<f32> {
    let (middle, size) = match name {
        name if name.contains("norm") => (1.0, 0.4),
        name if name.ends_with(".bias") => (0.0, 0.3),
        name if name.contains("embed_tokens") => (0.0, 1.0),
        // Uniform numbers of this size make rows of unit variance.
        _ => (0.0, (3.0 / columns as f32).sqrt()),
    };
    random_reals(seed, rows * columns).iter().map(|value| stored(storage, middle + size * value)).collect()
}

fn input_values(name: &str, seed: u64) -> Content {
    match name {
        input::IDS => Content::Integers(random_integers(seed, EXTENT.tokens, 23)),
        input::POSITIONS => Content::Integers(SEGMENTS.iter().flat_map(|length| 0..*length as i32).collect()),
        input::BOUNDARIES => Content::Integers(vec![0, 7, 8, 13]),
        input::ROWS => Content::Integers(vec![0, 1, 3, 4, 7, 8, 9, 11]),
        input::LABELS => Content::Integers(random_integers(seed, EXTENT.rows, 23)),
        input::DROPOUT_KEYS => Content::Keys(random_keys(seed, EXTENT.tokens)),
        input::DROPOUT_ROW_KEYS => Content::Keys(random_keys(seed, EXTENT.rows)),
        input::LOSS_WEIGHT => Content::Doubles(vec![1.0]),
        input::HYPER => Content::Doubles(vec![1e-3, 1.0]),
        other => panic!("the decoder has a new input `{other}`"),
    }
}
