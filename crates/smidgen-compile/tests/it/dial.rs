//! The solver's plan compared with the best plan that was found by pinning choices.
//!
//! Each case is a real shape on a built-in card with a budget that is too small to keep everything on the device. Its
//! policy is the fastest of a grid of pinned policies at every size of micro-batch. Plans are compared by predicted time.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{
    Budget, Context, DecoderSpec, Demand, Profile, Purpose, Question, Request, Solution, cards, solve,
    solve::AS_FAST,
};
use smidgen_ir::{Code4, DeviceKind, Extent, LayerSet, Pins, Policy, Precision, Space, Storage, Workload};

/// The share of the speed of the grid's best policy that the solver must reach. A plan that offloads less may be slower by
/// `AS_FAST`, within which plans count as equally fast.
const LEAST_SHARE: f64 = 0.98;

struct Case {
    request: Request,
    demands: Vec<Demand>,
    context: Context,
    budget: Budget,
    profile: Profile,
}

/// A training run on a card.
struct Run {
    spec: DecoderSpec,
    is_nf4: bool,
    rank: usize,
    max_tokens: usize,
    batch: usize,
    card: &'static str,
    budget_gib: f64,
    /// The limit for offloaded tensors, if there is one.
    host_gib: Option<f64>,
}

/// A policy of the grid, described by a few numbers; layers are spread as the solver spreads them.
#[derive(Clone, Copy, Default)]
struct Grid {
    samples: usize,
    loss_chunk: usize,
    recomputed: usize,
    weights: usize,
    /// Layers with offloaded activations; the recomputed layers if the two numbers are equal.
    activations: usize,
    embedding: bool,
    tables: bool,
    optimizer_state: bool,
    window_layers: usize,
}

fn bytes(gib: f64) -> u64 {
    (gib * f64::from(1 << 30)) as u64
}

impl Run {
    fn case(self) -> Case {
        let mut request = shapes::request(self.spec, Targets::AllLinear, Layers::All, self.max_tokens, 1);
        request.adapters.iter_mut().for_each(|module| module.rank = self.rank);
        if self.is_nf4 {
            let linears = request.spec.linears().into_iter().filter(|linear| linear.layer.is_some());
            let nf4 = Storage::Bnb4 { code: Code4::Nf4, double: true };
            request.storage = linears.map(|linear| (format!("{}.weight", linear.path), nf4)).collect();
        }
        request.workload = Workload { keys_per_query: self.max_tokens as f64 / 2.0, supervised: 1.0 };
        (request.device, request.precision) = (DeviceKind::Cuda, Precision::Bf16);
        let profile = cards::find(self.card).unwrap().profile();
        let context = Context { device: DeviceKind::Cuda, overhead: profile.overhead, ..Context::default() };
        let budget = Budget {
            offload_bytes: self.host_gib.map_or(u64::MAX, bytes),
            ..Budget::device(bytes(self.budget_gib))
        };
        let mut samples: Vec<usize> = [1, 2, 3, 4, 6, 8, 12, 16].map(|parts| self.batch / parts).to_vec();
        samples.dedup();
        let demand = |samples: usize| {
            let tokens = samples * self.max_tokens;
            let extent = Extent { tokens, rows: tokens - samples, segments: samples, audio: 0 };
            Demand {
                micro_tokens: tokens,
                extent,
                step: extent,
                micro_steps: self.batch as f64 / samples as f64,
            }
        };
        let demands = samples.into_iter().filter(|samples| *samples > 0).map(demand).collect();
        Case { request, demands, context, budget, profile: profile.at(Precision::Bf16) }
    }
}

impl Case {
    fn solved(&self, demands: &[Demand], pins: &Pins) -> Solution {
        solve(&Question {
            purpose: Purpose::Training,
            request: &self.request,
            demands,
            pins,
            context: self.context,
            budget: self.budget,
            profile: &self.profile,
        })
        .unwrap()
    }

    fn layer_bytes(&self) -> usize {
        let tensors =
            self.request.spec.tensors().into_iter().filter(|tensor| tensor.name.contains("layers.0."));
        let bytes = tensors.map(|tensor| {
            let (rows, columns) = tensor.shape.at(&Extent::default());
            self.request.storage_of(&tensor.name).bytes(rows, columns)
        });
        bytes.filter(|bytes| *bytes >= 1 << 16).sum()
    }

    fn policy(&self, grid: &Grid) -> Policy {
        let layers = self.request.spec.layers.len();
        let space = |is_offloaded: bool| if is_offloaded { Space::Host } else { Space::Device };
        Policy {
            micro_tokens: grid.samples * self.request.extent.tokens,
            recompute: LayerSet::first(grid.recomputed),
            loss_chunk: grid.loss_chunk,
            activations: space(grid.activations > 0),
            offloaded_activations: if grid.activations == grid.recomputed {
                LayerSet::first(grid.recomputed)
            } else {
                LayerSet::spread(grid.activations, layers)
            },
            weights: space(grid.weights > 0 || grid.embedding || grid.tables),
            offloaded_weights: if grid.tables {
                LayerSet::spread(grid.weights, layers).mirrored(layers)
            } else {
                LayerSet::spread(grid.weights, layers)
            },
            embedding_offloaded: grid.embedding || grid.tables,
            tables_offloaded: grid.tables,
            optimizer_state: space(grid.optimizer_state),
            window_bytes: grid.window_layers * self.layer_bytes(),
            ..Policy::default()
        }
    }

    /// Compares the solver's plan with the one of the grid, and returns it.
    fn check(&self, name: &str, grid: &Grid) -> Solution {
        let samples = |demand: &&Demand| demand.extent.segments == grid.samples;
        let demand = self.demands.iter().find(samples).unwrap();
        let pinned = self.solved(&[*demand], &Pins::from(self.policy(grid)));
        let auto = self.solved(&self.demands, &Pins::default());
        let share = pinned.step_ms / auto.step_ms;
        let offloads_less = auto.offloaded_bytes(1) < pinned.offloaded_bytes(1);
        let least_share = if offloads_less { LEAST_SHARE / AS_FAST } else { LEAST_SHARE };
        assert!(share >= least_share, "{name}: {share:.3} of the best that pins find\n{:?}", auto.policy);
        assert!(auto.peak_bytes <= self.budget.device_bytes);
        auto
    }
}

fn qwen2_7b(card: &'static str, budget_gib: f64) -> Run {
    run(shapes::qwen2_7b(), card, budget_gib)
}

fn llama_8b(card: &'static str, budget_gib: f64) -> Run {
    run(shapes::llama_8b(), card, budget_gib)
}

fn run(spec: DecoderSpec, card: &'static str, budget_gib: f64) -> Run {
    let (is_nf4, host_gib) = (false, None);
    Run { spec, is_nf4, rank: 16, max_tokens: 2048, batch: 16, card, budget_gib, host_gib }
}

const USUAL: Grid = Grid {
    samples: 1,
    loss_chunk: 1024,
    recomputed: 0,
    weights: 0,
    activations: 0,
    embedding: false,
    tables: false,
    optimizer_state: false,
    window_layers: 2,
};

/// The solver's plans for these cases were once up to 21 % slower.
#[test]
fn auto_is_as_fast_as_pins_where_it_was_not() {
    let case = Run { rank: 128, host_gib: Some(40.0), ..qwen2_7b("rtx-4090", 18.0) }.case();
    let grid = Grid {
        recomputed: 1,
        weights: 12,
        embedding: true,
        optimizer_state: true,
        window_layers: 1,
        ..USUAL
    };
    case.check("Qwen2.5-7B of rank 128 in 18 GiB", &grid);
    let case = Run { is_nf4: true, rank: 32, max_tokens: 4096, batch: 4, ..llama_8b("rtx-4090", 8.0) }.case();
    let grid = Grid { samples: 2, weights: 21, activations: 32, embedding: true, ..USUAL };
    let auto = case.check("Llama-3.1-8B in NF4 and 8 GiB", &grid);
    // The solver once left almost 3 GiB free while it fetched 31 of 32 layers.
    let free_bytes = case.budget.device_bytes - auto.peak_bytes;
    assert!(free_bytes < bytes(0.5), "{free_bytes} bytes are free: {:?}", auto.policy);
    let case = Run { is_nf4: true, ..run(shapes::phi4_mini(), "rtx-3060", 3.0) }.case();
    let grid = Grid {
        samples: 2,
        loss_chunk: 128,
        weights: 32,
        activations: 32,
        optimizer_state: true,
        window_layers: 1,
        ..USUAL
    };
    case.check("Phi-4-mini in NF4 and 3 GiB", &grid);
}

#[test]
fn auto_is_as_fast_as_pins_with_7b_on_small_cards() {
    let long = Run { max_tokens: 4096, batch: 4, host_gib: Some(18.0), ..qwen2_7b("rtx-4090", 6.0) };
    let grid = Grid {
        samples: 2,
        recomputed: 25,
        weights: 28,
        activations: 25,
        tables: true,
        optimizer_state: true,
        window_layers: 4,
        ..USUAL
    };
    long.case().check("6 GiB and 18 GiB of host memory", &grid);
    let short = Run { max_tokens: 1024, ..qwen2_7b("rtx-4080", 16.0) };
    short.case().check("16 GiB", &Grid { samples: 16, weights: 15, activations: 28, ..USUAL });
    let nf4 = Run { is_nf4: true, max_tokens: 512, batch: 32, ..qwen2_7b("rtx-4060", 7.5) };
    nf4.case().check("NF4 in 7.5 GiB", &Grid { samples: 16, weights: 20, activations: 28, ..USUAL });
}

#[test]
fn auto_is_as_fast_as_pins_with_8b() {
    let limited = Run { is_nf4: true, host_gib: Some(16.0), ..llama_8b("rtx-3080", 9.0) };
    limited.case().check("NF4 in 9 GiB", &Grid { samples: 2, activations: 30, ..USUAL });
    let long = Run { rank: 64, max_tokens: 8192, batch: 4, ..llama_8b("h100", 40.0) };
    long.case().check("40 GiB of an H100", &Grid { weights: 8, ..USUAL });
    let short = Run { max_tokens: 1024, batch: 8, ..llama_8b("l4", 12.0) };
    let grid = Grid { samples: 8, weights: 31, activations: 24, embedding: true, window_layers: 1, ..USUAL };
    short.case().check("12 GiB of an L4", &grid);
}

#[test]
fn auto_is_as_fast_as_pins_with_small_models() {
    let phi = Run { max_tokens: 4096, batch: 8, ..run(shapes::phi4_mini(), "rtx-4070", 8.0) };
    let grid = Grid { samples: 4, weights: 22, activations: 32, window_layers: 1, ..USUAL };
    phi.case().check("Phi-4-mini in 8 GiB", &grid);
    let laptop = run(shapes::llama_1b(), "rtx-3060-laptop", 4.0);
    laptop.case().check("Llama-1B in 4 GiB", &Grid { samples: 5, weights: 11, activations: 16, ..USUAL });
    let long = Run { rank: 64, max_tokens: 8192, batch: 8, ..run(shapes::llama_1b(), "rtx-4090", 6.0) };
    let grid = Grid {
        loss_chunk: 512,
        recomputed: 6,
        weights: 15,
        activations: 6,
        optimizer_state: true,
        window_layers: 1,
        ..USUAL
    };
    long.case().check("Llama-1B with long samples in 6 GiB", &grid);
}

/// The fastest schedules within 9 and 10 GiB do not fit when they are packed. The solver once chose plans up to 26 % slower
/// than the plan for 8 GiB instead.
#[test]
fn more_memory_is_not_slower() {
    let step_ms = [8.0, 9.0, 10.0].map(|budget_gib| {
        let case = Run { batch: 12, ..llama_8b("rtx-4090", budget_gib) }.case();
        case.solved(&case.demands, &Pins::default()).step_ms
    });
    let is_slower = step_ms.windows(2).any(|pair| pair[1] * LEAST_SHARE > pair[0]);
    assert!(!is_slower, "{step_ms:?}");
}
