//! The leaves of a graph: weights, adapters and trained weights with their gradients, inputs, state.
//!
//! A trained tensor of the base model is a leaf like an adapter's: in f32, with a gradient, and with a rounded copy if
//! matmuls need another type; or a matrix in bf16 that has no f32 master. A leaf is found by its name, which is that of the
//! checkpoint's tensor or one of `names::input` and `names::state`. A slice of a leaf is shared by all entry points.

use crate::adapter::LoraModule;
use crate::model::audio::{AUDIO, AudioInput, FRAMES};
use crate::model::layer::{AttentionSpec, KeysAndValues};
use crate::model::spec::{EMBEDDING, HEAD, PER_LAYER_EMBEDDING, Tensor};
use crate::names::{input, state};
use crate::request::{AdapterForm, DecodeShape, Purpose, Reference, Request, TrainedBiases};
use smidgen_ir::{
    DType, Dim, Graph, LeafKind, MARK_COLUMNS, Objective, Rounded, Shape, Storage, Type, ValueId,
};
use std::collections::{HashMap, HashSet};

/// LS-LoRA's coefficients (M, 4) and scales (M, 1) of all M modules, each one leaf.
pub const FOURIER_COEFFICIENTS: &str = "fourier_params.weight";
pub const FOURIER_SIGMA: &str = "fourier_params.sigma";

#[derive(Debug, Default)]
pub struct Leaves {
    by_name: HashMap<String, ValueId>,
    slices: HashMap<(ValueId, usize, usize), ValueId>,
}

impl Leaves {
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.by_name.get(name).copied()
    }

    pub fn get(&self, name: &str) -> ValueId {
        self.find(name).unwrap_or_else(|| panic!("no leaf `{name}`"))
    }

    /// The leaf that matmuls read for a weight: its rounded copy, if there is one.
    pub fn multiplied(&self, name: &str) -> ValueId {
        self.find(&rounded_name(name)).unwrap_or_else(|| self.get(name))
    }

    /// Some rows of a leaf, or the leaf itself for all rows.
    pub fn slice(&mut self, graph: &mut Graph, of: ValueId, first_row: usize, rows: usize) -> ValueId {
        if graph.value(of).ty.shape.0[0] == Dim::Const(rows) {
            return of;
        }
        *self.slices.entry((of, first_row, rows)).or_insert_with(|| graph.add_slice(of, first_row, rows))
    }

    fn add(&mut self, graph: &mut Graph, name: &str, ty: Type, kind: LeafKind) -> ValueId {
        let id = graph.add_leaf(name, ty, kind);
        self.by_name.insert(name.into(), id);
        id
    }
}

/// Adds every leaf that the purpose needs.
pub fn add_leaves(graph: &mut Graph, request: &Request, purpose: Purpose) -> Leaves {
    let mut leaves = Leaves::default();
    let mut trained = add_tensors(graph, &mut leaves, request, purpose);
    trained.extend(add_adapters(graph, &mut leaves, request));
    if purpose == Purpose::Encoding {
        add_encoding(graph, &mut leaves, request);
        return leaves;
    }
    if purpose == Purpose::Training {
        if request.reference == Some(Reference::Adapter) {
            copy_adapters(graph, &mut leaves);
        }
        for leaf in trained {
            train_leaf(graph, leaf);
        }
    }
    add_inputs_and_state(graph, &mut leaves, request, purpose);
    if purpose != Purpose::Logits {
        add_caches(graph, &mut leaves, request);
    }
    leaves
}

/// Adds the tensors of the checkpoint that the purpose needs, and returns the trained ones. Trained tensors are leaves even
/// if nothing reads them.
fn add_tensors(graph: &mut Graph, leaves: &mut Leaves, request: &Request, purpose: Purpose) -> Vec<ValueId> {
    let audio = request.audio_spec();
    let mut tensors = match (purpose, audio) {
        (Purpose::Encoding, Some(audio)) => audio.encoding_tensors(request.audio),
        (_, Some(audio)) => [request.spec.tensors(), audio.program_tensors(request.audio)].concat(),
        (_, None) => request.spec.tensors(),
    };
    let projector = request.spec.audio.iter().flat_map(|audio| audio.projector_tensors());
    let unread = projector.filter(|tensor| request.trained.contains(&tensor.name));
    let unread: Vec<Tensor> = unread.filter(|tensor| !tensors.contains(tensor)).collect();
    tensors.extend(unread);
    let biases = trained_biases(request);
    let mut trained = Vec::new();
    for tensor in tensors {
        if biases.contains(&tensor.name) || request.trained.contains(&tensor.name) {
            let is_multiplied = tensor.shape.0.len() == 2
                && tensor.name != PER_LAYER_EMBEDDING
                && (tensor.name != EMBEDDING || request.spec.head_tensor() == EMBEDDING);
            let storage = request.optimizer.master.storage(tensor.shape.0.len());
            let ty = Type::new(tensor.shape, storage);
            let leaf = leaves.add(graph, &tensor.name, ty, LeafKind::Adapter);
            graph.leaf_mut(leaf).is_of_base = true;
            trained.push(leaf);
            if is_multiplied && storage == Storage::F32 && request.rounds_trained() {
                add_rounded(graph, leaves, request, &tensor.name, 1.0);
            }
        } else {
            let ty = Type::new(tensor.shape, request.storage_of(&tensor.name));
            leaves.add(graph, &tensor.name, ty, LeafKind::Weight);
        }
    }
    trained
}

/// Adds the input and the result of encoding.
fn add_encoding(graph: &mut Graph, leaves: &mut Leaves, request: &Request) {
    let audio = request.audio_spec().expect("the model has an audio encoder");
    let element = Storage::Plain(request.activations());
    let features = Type::new(Shape::of(Dim::Audio(FRAMES), audio.bins), element);
    leaves.add(graph, input::AUDIO_FEATURES, features, LeafKind::Input);
    leaves.add(graph, input::AUDIO_MARKS, marks_type(), LeafKind::Input);
    let rows = Type::f32(Shape::of(Dim::Audio(1), audio.width(request.audio)));
    leaves.add(graph, state::AUDIO, rows, LeafKind::State);
}

fn marks_type() -> Type {
    Type::new(Shape::of(Dim::Audio(1), MARK_COLUMNS), Storage::Plain(DType::I32))
}

/// Names of the biases that are trained.
pub fn trained_biases(request: &Request) -> HashSet<String> {
    let adapted: HashSet<&str> = request.adapters.iter().map(|module| module.path.as_str()).collect();
    let linears = request.spec.linears().into_iter().filter(|linear| linear.bias);
    let chosen = linears.filter(|linear| match request.biases {
        TrainedBiases::None => false,
        TrainedBiases::All => true,
        TrainedBiases::Adapted => adapted.contains(linear.path.as_str()),
    });
    chosen.map(|linear| format!("{}.bias", linear.path)).collect()
}

/// Adds the matrices of every adapter and what its form needs besides, and returns the trained leaves.
fn add_adapters(graph: &mut Graph, leaves: &mut Leaves, request: &Request) -> Vec<ValueId> {
    let linears = request.spec.all_linears().into_iter();
    let sizes: HashMap<String, (usize, usize, usize)> =
        linears.map(|linear| (linear.path, (linear.n, linear.k, linear.kind.matrices()))).collect();
    let mut trained = Vec::new();
    for module in &request.adapters {
        let (n, k, matrices) = sizes[&module.path];
        let mut tensors = vec![
            (module.a_name(), Shape::matrix(matrices * module.rank, k)),
            (module.b_name(), Shape::matrix(n, module.rank)),
        ];
        if request.form == AdapterForm::Dora {
            tensors.push((module.magnitude_name(), Shape::vector(n)));
            leaves.add(graph, &module.norm_name(), Type::f32(Shape::vector(n)), LeafKind::Derived);
        }
        for (name, shape) in tensors {
            trained.push(leaves.add(graph, &name, Type::f32(shape), LeafKind::Adapter));
        }
        if request.rounds_trained() {
            for (name, scale) in [(module.a_name(), 1.0), (module.b_name(), factor_in_b(request, module))] {
                add_rounded(graph, leaves, request, &name, scale);
            }
        }
    }
    if let AdapterForm::Fourier { .. } = request.form {
        let modules = request.adapters.len();
        for (name, columns) in [(FOURIER_COEFFICIENTS, 4), (FOURIER_SIGMA, 1)] {
            let ty = Type::f32(Shape::matrix(modules, columns));
            trained.push(leaves.add(graph, name, ty, LeafKind::Adapter));
        }
    }
    trained
}

/// What precedes the name of an adapter's leaf in the name of its frozen copy.
pub const REFERENCE_COPY: &str = "reference ";

/// Adds a leaf of the same type for everything that an adapter is made of. The host fills it.
fn copy_adapters(graph: &mut Graph, leaves: &mut Leaves) {
    let is_copied = |id: &ValueId| {
        graph.value(*id).leaf().is_some_and(|leaf| {
            matches!(leaf.kind, LeafKind::Adapter | LeafKind::Derived) && !leaf.is_of_base
        })
    };
    let copied: Vec<ValueId> = graph.ids().filter(is_copied).collect();
    for id in copied {
        let (name, ty) = (format!("{REFERENCE_COPY}{}", graph.value(id).name), graph.value(id).ty.clone());
        leaves.add(graph, &name, ty, LeafKind::Derived);
    }
}

/// Adds the copy of a trained leaf in the type of matmuls, which `refresh` fills.
fn add_rounded(graph: &mut Graph, leaves: &mut Leaves, request: &Request, name: &str, scale: f32) {
    let of = leaves.get(name);
    let ty = Type::new(graph.value(of).ty.shape.clone(), Storage::Plain(request.activations()));
    let rounded = leaves.add(graph, &rounded_name(name), ty, LeafKind::Derived);
    graph.leaf_mut(rounded).rounded = Some(Rounded { of, scale });
}

/// The name of the copy of a trained matrix in the type of matmuls.
pub fn rounded_name(name: &str) -> String {
    format!("{name} rounded")
}

/// The factor by which B is multiplied when it is rounded: the adapter's scale, if B is used in matmuls alone.
pub fn factor_in_b(request: &Request, module: &LoraModule) -> f32 {
    match request.form {
        AdapterForm::Lora | AdapterForm::Dora if module.path != HEAD => module.scale,
        AdapterForm::Lora | AdapterForm::Dora | AdapterForm::Fourier { .. } => 1.0,
    }
}

fn add_inputs_and_state(graph: &mut Graph, leaves: &mut Leaves, request: &Request, purpose: Purpose) {
    let mut add = |name: &str, shape: Shape, dtype: DType, kind: LeafKind| {
        leaves.add(graph, name, Type::new(shape, Storage::Plain(dtype)), kind);
    };
    add(input::IDS, Shape::rows_of(Dim::Tokens), DType::I32, LeafKind::Input);
    add(input::POSITIONS, Shape::rows_of(Dim::Tokens), DType::I32, LeafKind::Input);
    if purpose != Purpose::Generation {
        add(input::BOUNDARIES, Shape::rows_of(Dim::Boundaries), DType::I32, LeafKind::Input);
    }
    add(input::ROWS, Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
    if let Some(audio) = request.audio_spec() {
        let rows = Shape::of(Dim::Audio(1), audio.width(request.audio));
        add(input::AUDIO_ROWS, rows, request.activations(), LeafKind::Input);
        add(input::AUDIO_TARGETS, Shape::rows_of(Dim::Audio(1)), DType::I32, LeafKind::Input);
        if request.audio == AudioInput::Subsampled {
            let Type { shape, .. } = marks_type();
            add(input::AUDIO_MARKS, shape, DType::I32, LeafKind::Input);
        }
    }
    match purpose {
        Purpose::Encoding => unreachable!("encoding has no tokens"),
        Purpose::Training | Purpose::Evaluation => {}
        Purpose::Logits => {
            let logits = Shape::of(Dim::Rows, request.spec.vocabulary);
            add(state::LOGITS, logits, DType::F32, LeafKind::State);
            return;
        }
        Purpose::Generation => return,
    }
    add(input::LABELS, Shape::rows_of(Dim::Rows), DType::I32, LeafKind::Input);
    add(input::LOSS_WEIGHT, Shape::vector(1), DType::F64, LeafKind::Input);
    if request.keeps_row_losses() {
        add(state::ROW_LOSSES, Shape::rows_of(Dim::Rows), DType::F32, LeafKind::State);
    }
    if let Some(objective) = &request.objective {
        let numbers = Shape::of(Dim::Boundaries, Objective::SEQUENCE_COLUMNS);
        add(input::SEQUENCE_ROWS, Shape::rows_of(Dim::Boundaries), DType::I32, LeafKind::Input);
        add(input::SEQUENCES, numbers, DType::F64, LeafKind::Input);
        if objective.reads_rows() {
            let before = Shape::of(Dim::Rows, Objective::BEFORE_COLUMNS);
            add(input::ROWS_BEFORE, before, DType::F32, LeafKind::Input);
        }
        add(state::FIGURES, Shape::vector(Objective::FIGURES), DType::F64, LeafKind::State);
        add(state::UNREAD_LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    }
    if purpose == Purpose::Evaluation {
        add(state::EVAL_LOSS, Shape::vector(1), DType::F64, LeafKind::State);
        return;
    }
    add(input::HYPER, Shape::vector(3), DType::F64, LeafKind::Input);
    if request.dropout > 0.0 {
        add(input::DROPOUT_KEYS, Shape::rows_of(Dim::Tokens), DType::U64, LeafKind::Input);
        if request.adapters.iter().any(|module| module.path.starts_with(AUDIO)) {
            add(input::DROPOUT_AUDIO_KEYS, Shape::rows_of(Dim::Audio(1)), DType::U64, LeafKind::Input);
        }
        if request.adapters.iter().any(|module| module.path == HEAD) {
            add(input::DROPOUT_ROW_KEYS, Shape::rows_of(Dim::Rows), DType::U64, LeafKind::Input);
        }
    }
    add(state::LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    add(state::REPORT, Shape::vector(4), DType::F64, LeafKind::State);
    add(state::EVAL_LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    if let AdapterForm::Fourier { .. } = request.form {
        add(state::REG_LOSS, Shape::vector(1), DType::F64, LeafKind::State);
    }
}

/// Adds the caches of every layer, the logits of `decode`, and the inputs that locate each token in the caches.
fn add_caches(graph: &mut Graph, leaves: &mut Leaves, request: &Request) {
    let Some(DecodeShape { slots, positions, cache_rows, .. }) = request.decode else { return };
    let spec = &request.spec;
    let integers = |shape: Shape| Type::new(shape, Storage::Plain(DType::I32));
    leaves.add(graph, input::CACHE_TABLE, integers(Shape::matrix(slots, positions)), LeafKind::Input);
    leaves.add(graph, input::SLOTS, integers(Shape::rows_of(Dim::Tokens)), LeafKind::Input);
    if spec.ropes.iter().any(|rope| rope.depends_on_length()) {
        leaves.add(graph, input::LENGTHS, integers(Shape::rows_of(Dim::Tokens)), LeafKind::Input);
    }
    let has_own_keys = |attention: &AttentionSpec| !matches!(attention.source, KeysAndValues::OfLayer(_));
    for (layer, attention) in spec.attentions().filter(|(_, attention)| has_own_keys(attention)) {
        let [_, channels] = attention.rows();
        for name in cache_names(layer) {
            let ty = Type::new(Shape::matrix(cache_rows, channels), Storage::Plain(request.activations()));
            leaves.add(graph, &name, ty, LeafKind::Cache);
        }
    }
    for (layer, recurrent) in spec.recurrents() {
        for (name, floats) in recurrent.states(spec.hidden) {
            let ty = Type::f32(Shape::matrix(slots, floats));
            leaves.add(graph, &state_name(layer, name), ty, LeafKind::Cache);
        }
    }
    let logits = Type::f32(Shape::of(Dim::Rows, spec.vocabulary));
    leaves.add(graph, state::DECODED_LOGITS, logits, LeafKind::Cache);
}

/// The names of the leaves that hold keys and values of a layer.
pub fn cache_names(layer: usize) -> [String; 2] {
    ["keys", "values"].map(|what| format!("cache.{layer}.{what}"))
}

/// The name of the leaf that holds a state of a recurrent layer, with a row for each slot.
pub fn state_name(layer: usize, state: &str) -> String {
    format!("cache.{layer}.{state}")
}

/// Gives a leaf a gradient: from here on it is trained.
pub fn train_leaf(graph: &mut Graph, leaf: ValueId) {
    let (name, shape) = (format!("grad {}", graph.value(leaf).name), graph.value(leaf).ty.shape.clone());
    let gradient = graph.add_leaf(name, Type::f32(shape), LeafKind::Gradient);
    graph.leaf_mut(leaf).gradient = Some(gradient);
}
