//! What is trained and what is frozen, for each kind of weight: attention, experts, routers and so on.
//!
//! A target such as `gate_proj` may adapt experts in one model and the feed-forward in another, and `all-linear` leaves
//! experts out, so a plan says what the recipe's names came to. Left out: bytes (`planning.rs`).

use serde_json::{Value, json};
use smidgen_compile::leaves::trained_biases;
use smidgen_compile::model::audio::AudioSpec;
use smidgen_compile::model::kinds::WeightKind;
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::{AdapterForm, Request};
use smidgen_ir::Extent;
use std::collections::{BTreeMap, HashMap};

/// Weights of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KindOfWeights {
    pub kind: WeightKind,
    pub linears: usize,
    /// Linears with an adapter.
    pub adapted: usize,
    pub tensors: usize,
    /// Tensors of the base that are trained.
    pub trained: usize,
    /// Parameters of adapters and of trained tensors.
    pub trained_parameters: u64,
    pub frozen_parameters: u64,
}

/// The kinds that the model has, in the order of [`WeightKind`].
pub fn kinds_of_weights(request: &Request) -> Vec<KindOfWeights> {
    let spec = &request.spec;
    let mut kinds: BTreeMap<WeightKind, KindOfWeights> = BTreeMap::new();
    let biases = trained_biases(request);
    let of_audio = request.audio_spec().into_iter().flat_map(AudioSpec::tensors);
    for tensor in spec.tensors().into_iter().chain(of_audio) {
        let (rows, columns) = tensor.shape.at(&Extent::default());
        let entry = entry(&mut kinds, spec.kind_of(&tensor.name));
        let is_trained = request.trained.contains(&tensor.name) || biases.contains(&tensor.name);
        entry.tensors += 1;
        entry.trained += usize::from(is_trained);
        let parameters =
            if is_trained { &mut entry.trained_parameters } else { &mut entry.frozen_parameters };
        *parameters += (rows * columns) as u64;
    }
    let ranks: HashMap<&str, usize> =
        request.adapters.iter().map(|module| (module.path.as_str(), module.rank)).collect();
    for linear in spec.all_linears() {
        let rank = ranks.get(linear.path.as_str());
        if linear.path == HEAD && spec.head.is_tied && rank.is_none() {
            continue;
        }
        let entry = entry(&mut kinds, spec.kind_of(&linear.path));
        entry.linears += 1;
        let Some(rank) = rank else { continue };
        entry.adapted += 1;
        // A for each matrix of the linear, B, and what the form of the adapter has besides.
        let besides = match request.form {
            AdapterForm::Lora => 0,
            AdapterForm::Dora => linear.n,
            AdapterForm::Fourier { .. } => 5,
        };
        entry.trained_parameters += (rank * (linear.kind.matrices() * linear.k + linear.n) + besides) as u64;
    }
    kinds.into_values().collect()
}

fn entry(kinds: &mut BTreeMap<WeightKind, KindOfWeights>, kind: WeightKind) -> &mut KindOfWeights {
    kinds.entry(kind).or_insert(KindOfWeights {
        kind,
        linears: 0,
        adapted: 0,
        tensors: 0,
        trained: 0,
        trained_parameters: 0,
        frozen_parameters: 0,
    })
}

/// One line: the kinds that are adapted, trained and frozen. A kind of which some weights are may be named twice.
pub fn describe_weights(kinds: &[KindOfWeights]) -> String {
    let some = |kind: &KindOfWeights, some: usize, all: usize, what: &str| {
        let name = kind.kind.name();
        if some == all { name.to_string() } else { format!("{name} ({some} of {all} {what})") }
    };
    let adapted = kinds.iter().filter(|kind| kind.adapted > 0);
    let trained = kinds.iter().filter(|kind| kind.trained > 0);
    let frozen = kinds.iter().filter(|kind| kind.adapted == 0 && kind.trained == 0);
    let parts = [
        ("adapted", adapted.map(|kind| some(kind, kind.adapted, kind.linears, "linears")).collect()),
        ("trained", trained.map(|kind| some(kind, kind.trained, kind.tensors, "tensors")).collect()),
        ("frozen", frozen.map(|kind| kind.kind.name().to_string()).collect::<Vec<String>>()),
    ];
    let parts = parts.into_iter().filter(|(_, names)| !names.is_empty());
    parts.map(|(what, names)| format!("{what}: {}", names.join(", "))).collect::<Vec<_>>().join("; ")
}

impl KindOfWeights {
    pub fn render_json(&self) -> Value {
        json!({
            "kind": self.kind.name(),
            "linears": self.linears,
            "adapted": self.adapted,
            "tensors": self.tensors,
            "trained": self.trained,
            "trained_parameters": self.trained_parameters,
            "frozen_parameters": self.frozen_parameters,
        })
    }
}
