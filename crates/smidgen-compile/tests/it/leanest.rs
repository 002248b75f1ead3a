//! If nothing fits, the error states the least memory that any policy needs, to the byte.
//!
//! For small models on both devices all combinations of choices are compiled: recomputed layers, offloaded weights, tables,
//! moments and activations, tiles and loss chunks. None needs less than the error states; with that budget the run fits,
//! and with one byte less it does not. Left out: recomputed layers other than the first ones, which `exhaustive.rs` has.

use crate::shapes;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::request::default_loss_chunk;
use smidgen_compile::{
    Budget, Context, DecoderSpec, Demand, Profile, Purpose, Question, Request, SolveError, compile, solve,
};
use smidgen_ir::{DeviceKind, Extent, LayerSet, Pins, Policy, Precision, Space, Storage};

struct Case {
    request: Request,
    demands: Vec<Demand>,
    context: Context,
}

impl Case {
    fn new(spec: DecoderSpec, device: DeviceKind, tokens: &[usize], context: Context) -> Case {
        let precision = match device {
            DeviceKind::Cpu => Precision::F32,
            DeviceKind::Cuda => Precision::Bf16,
        };
        let request = shapes::request(spec, Targets::AllLinear, Layers::All, tokens[0], 4);
        let demand = |tokens: &usize| Demand {
            micro_tokens: *tokens,
            extent: Extent { tokens: *tokens, rows: tokens - 2, segments: 2, audio: 0 },
            step: Extent { tokens: *tokens, rows: tokens - 2, segments: 2, audio: 0 },
            micro_steps: 1.0,
        };
        let demands = tokens.iter().map(demand).collect();
        Case { request: Request { device, precision, ..request }, demands, context }
    }

    fn solved(&self, budget: Budget) -> Result<u64, SolveError> {
        let profile = Profile::cpu(2, self.request.precision);
        let solution = solve(&Question {
            purpose: Purpose::Training,
            request: &self.request,
            demands: &self.demands,
            pins: &Pins::default(),
            context: self.context,
            budget,
            profile: &profile,
        })?;
        assert!(solution.peak_bytes <= budget.device_bytes);
        Ok(solution.peak_bytes)
    }

    /// The least peak of all plans, and its policy.
    fn least(&self) -> (u64, Policy) {
        let of_size = |demand: &Demand| {
            let request = Request { extent: demand.extent, ..self.request.clone() };
            let peak_of = |policy: &Policy| {
                let plan = compile(&request, policy);
                self.context.bytes_for(&plan) + plan.reserved_bytes() as u64
            };
            let all = policies(&request).into_iter().map(|policy| (peak_of(&policy), policy));
            all.min_by_key(|(peak, _)| *peak).unwrap()
        };
        self.demands.iter().map(of_size).min_by_key(|(peak, _)| *peak).unwrap()
    }

    fn check(&self) {
        let leanest = self.solved(Budget::device(1)).unwrap_err().leanest;
        let (least, policy) = self.least();
        let stated = leanest.peak_bytes;
        assert!(
            stated <= least,
            "the error states {stated} bytes for {:?}\n{least} bytes are enough for {policy:?}",
            leanest.policy
        );
        assert_eq!(self.solved(Budget::device(stated)).unwrap(), stated);
        assert_eq!(self.solved(Budget::device(stated - 1)).unwrap_err().leanest.peak_bytes, stated);
    }
}

fn policies(request: &Request) -> Vec<Policy> {
    let (layers, tokens) = (request.spec.layers.len(), request.extent.tokens);
    let usual = default_loss_chunk(request.device, request.spec.vocabulary, request.extent.rows);
    let fewest_tile_tokens = match request.device {
        DeviceKind::Cpu => 256,
        DeviceKind::Cuda => 2048,
    };
    let tile = Some(tokens.div_ceil(4).next_multiple_of(128)).filter(|tile| *tile >= fewest_tile_tokens);
    let mut tiles = vec![None];
    tiles.extend(tile.map(Some));
    let mut all = Vec::new();
    for loss_chunk in [usual, usual.min(32)] {
        for tile_tokens in &tiles {
            for recomputed in 0..=layers {
                let recompute = LayerSet::first(recomputed);
                for offloaded in [LayerSet::none(), recompute.clone(), LayerSet::all(layers)] {
                    let recompute = recompute.clone();
                    let resident = Policy::resident(recompute, loss_chunk);
                    let first = Policy {
                        tile_tokens: *tile_tokens,
                        activations: Space::Host,
                        offloaded_activations: offloaded,
                        ..resident
                    };
                    all.extend(offloads(request, &first));
                }
            }
        }
    }
    all
}

/// The policy with every combination of offloaded leaves.
fn offloads(request: &Request, first: &Policy) -> Vec<Policy> {
    let layers = request.spec.layers.len();
    let mut tables = vec![(false, false), (false, true)];
    tables.extend((!request.spec.head.is_tied).then_some((true, false)));
    let mut all = Vec::new();
    for count in 0..=layers {
        for (embedding, tables) in &tables {
            for moments in [false, true] {
                all.push(Policy {
                    weights: Space::Host,
                    offloaded_weights: LayerSet::spread(count, layers),
                    embedding_offloaded: *embedding,
                    tables_offloaded: *tables,
                    optimizer_state: if moments { Space::Host } else { Space::Device },
                    ..first.clone()
                });
            }
        }
    }
    all
}

const CHEAP_STEPS: Context = shapes::process(200_000, 20, 3000);
/// Overheads of a CPU process, where a small transfer needs more memory than it saves.
const EXPENSIVE_STEPS: Context = shapes::process(1_000_000, 1100, 60_000);
/// Overheads of a GPU, with page tables for pinned memory.
const TABLES: Context = Context { device: DeviceKind::Cuda, ..shapes::process(5_000_000, 3500, 0) };

#[test]
fn the_least_is_stated_if_steps_need_little() {
    let spec = shapes::llama(64, 160, 3, (4, 2), 512, false);
    Case::new(spec, DeviceKind::Cpu, &[192, 96], CHEAP_STEPS).check();
}

#[test]
fn the_least_is_stated_if_steps_need_more_than_they_save() {
    let spec = shapes::llama(64, 160, 3, (4, 2), 512, false);
    Case::new(spec, DeviceKind::Cpu, &[192, 96], EXPENSIVE_STEPS).check();
    let tied = shapes::llama(128, 256, 2, (4, 4), 2048, true);
    Case::new(tied, DeviceKind::Cpu, &[64], EXPENSIVE_STEPS).check();
}

#[test]
fn the_least_is_stated_with_stored_weights() {
    let spec = shapes::llama(128, 384, 3, (4, 2), 1024, true);
    let mut case = Case::new(spec, DeviceKind::Cpu, &[256], EXPENSIVE_STEPS);
    let linears = case.request.spec.tensors().into_iter().filter(|tensor| tensor.name.contains("proj"));
    case.request.storage = linears.map(|tensor| (tensor.name, Storage::Int8Rows)).collect();
    case.check();
}

#[test]
fn the_least_is_stated_for_a_gpu() {
    let spec = shapes::llama(64, 128, 3, (2, 1), 512, true);
    Case::new(spec, DeviceKind::Cuda, &[192, 64], TABLES).check();
    let own_head = shapes::llama(128, 256, 2, (2, 1), 4096, false);
    Case::new(own_head, DeviceKind::Cuda, &[128], TABLES).check();
}

#[test]
fn the_least_is_stated_with_tiles() {
    let spec = shapes::llama(32, 256, 2, (2, 1), 128, true);
    Case::new(spec, DeviceKind::Cpu, &[1024], CHEAP_STEPS).check();
    // The larger micro-batch, in tiles, needs less than the smaller one, which has too few tokens for any.
    let wide = shapes::llama(16, 1024, 2, (1, 1), 64, true);
    Case::new(wide, DeviceKind::Cpu, &[520, 512], CHEAP_STEPS).check();
}
