//! The solver's choices as sentences: what was chosen, why, and what it saves and costs.
//!
//! The solver returns data (`Reason`, `Price`); all sentences about it are made here, for the table, `plan.json` and
//! the page.

use super::numbers::milliseconds;
use smidgen_compile::{Choice, Price, Reason, Solution, Why};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Entry, LayerSet, Phase, Plan, Policy, Sharding, Space};

/// One line per choice, such as `recompute: 21 of 28 layers`.
pub fn render_reasons(solution: &Solution) -> Vec<String> {
    solution.reasons.iter().map(|reason| render_reason(solution, reason)).collect()
}

/// The device memory that a choice saves, and the time that it adds to a step.
pub fn render_price(price: &Price) -> String {
    let size = format_bytes(price.saved_bytes.unsigned_abs());
    let verb = if price.saved_bytes >= 0 { "saves" } else { "needs another" };
    let time = milliseconds(price.cost_ms.abs(), 0);
    let time = if price.cost_ms > -0.5 {
        format!("adds {time} per step")
    } else {
        format!("makes a step faster by {time}")
    };
    format!("{} {verb} {size} and {time}", describe(price.choice))
}

/// A choice as the subject of a sentence.
pub fn describe(choice: Choice) -> &'static str {
    match choice {
        Choice::Recompute => "recomputing activations",
        Choice::MicroBatch => "splitting the batch",
        Choice::LossChunk => "computing the loss in chunks",
        Choice::Tiles => "tiling feed-forward blocks",
        Choice::Weights => "offloading weights",
        Choice::HeadPieces => "splitting the head",
        Choice::Embedding => "offloading the embedding",
        Choice::Activations => "offloading activations",
        Choice::OptimizerState => "offloading optimizer state",
        Choice::Gradients => "offloading gradients",
        Choice::Order => "breadth-first order",
        Choice::Laps => "running several layers per lap",
        Choice::Updates => "updating on the host",
        Choice::Sharding => "sharding over ranks",
    }
}

/// The differences between two policies of a model with this many layers.
pub fn describe_changes(before: &Policy, now: &Policy, layers: usize) -> String {
    let [counts, old] = [now, before].map(LayerCounts::of);
    let of_layers = |what: &str, is: usize, was: usize| {
        (is != was).then(|| format!("{what} of {is} of {layers} layers (were {was})"))
    };
    let [laps, old_laps] = [now, before].map(|policy| policy.layers_per_lap.max(1));
    let changes = [
        (now.micro_tokens != before.micro_tokens)
            .then(|| format!("micro-batches of {} tokens (were {})", now.micro_tokens, before.micro_tokens)),
        of_layers("recompute", counts.recomputed, old.recomputed),
        of_layers("offloaded activations", counts.activations_offloaded, old.activations_offloaded),
        of_layers("offloaded weights", counts.weights_offloaded, old.weights_offloaded),
        (now.optimizer_state != before.optimizer_state)
            .then(|| format!("optimizer state {}", describe_place(now.optimizer_state))),
        (now.gradients != before.gradients).then(|| format!("gradients {}", describe_place(now.gradients))),
        (now.order != before.order).then(|| format!("{}-first order", now.order.name())),
        (laps != old_laps).then(|| format!("{laps} layers at a time (were {old_laps})")),
        (now.sharding != before.sharding)
            .then(|| format!("sharded over ranks: {}", describe_sharding(now.sharding))),
        (now.tile_tokens != before.tile_tokens).then(|| match now.tile_tokens {
            Some(tokens) => format!("feed-forward blocks on {tokens} tokens at a time"),
            None => "feed-forward blocks on a whole micro-batch".into(),
        }),
        (now.head_pieces != before.head_pieces).then(|| match now.head_pieces {
            0 | 1 => "the LM head in one piece".into(),
            pieces => format!("the LM head in {pieces} pieces"),
        }),
    ];
    let changes: Vec<String> = changes.into_iter().flatten().collect();
    if changes.is_empty() { "the same choices".into() } else { changes.join(", ") }
}

/// How many layers a policy recomputes and offloads.
#[derive(Clone, Copy, Debug)]
pub struct LayerCounts {
    pub recomputed: usize,
    pub weights_offloaded: usize,
    pub activations_offloaded: usize,
}

impl LayerCounts {
    pub fn of(policy: &Policy) -> LayerCounts {
        LayerCounts {
            recomputed: policy.recompute.len(),
            weights_offloaded: policy.offloaded_weights.len(),
            activations_offloaded: policy.offloaded_activations.len(),
        }
    }
}

/// Whether the weights of a layer are offloaded, and prefetched for each use.
pub fn is_prefetched(policy: &Policy, layer: usize) -> bool {
    policy.offloaded_weights.contains(layer)
}

/// What happens to a layer's activations until backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationChoice {
    Kept,
    Recomputed,
    Offloaded,
    Both,
}

impl ActivationChoice {
    pub fn of(policy: &Policy, layer: usize) -> Self {
        match (policy.recompute.contains(layer), policy.offloaded_activations.contains(layer)) {
            (false, false) => Self::Kept,
            (true, false) => Self::Recomputed,
            (false, true) => Self::Offloaded,
            (true, true) => Self::Both,
        }
    }
}

fn describe_sharding(sharding: Sharding) -> &'static str {
    match sharding {
        Sharding::None => "nothing",
        Sharding::Moments => "optimizer state",
        Sharding::Gradients => "optimizer state and gradients",
        Sharding::Weights => "optimizer state, gradients and weights",
    }
}

/// `21 of 28 layers `; empty if the list of layers is empty, which means all of them.
fn some_layers(offloaded: &LayerSet, layers: usize) -> String {
    if offloaded.is_empty() { String::new() } else { format!("{} of {layers} layers ", offloaded.len()) }
}

/// Number of layers of the plan's model.
pub fn layer_count(plan: &Plan) -> usize {
    let steps = plan.entries.iter().flat_map(|entry| &entry.steps);
    steps.filter_map(|step| step.layer).max().map_or(0, |last| last + 1)
}

fn render_reason(solution: &Solution, reason: &Reason) -> String {
    let (policy, layers) = (&solution.policy, layer_count(&solution.plan));
    let of_layers = |count: usize| format!("{count} of {layers} layers");
    let what = match reason.choice {
        Choice::Recompute => match policy.recompute.len() {
            0 => "recompute: none".to_owned(),
            count => format!("recompute: {}", of_layers(count)),
        },
        Choice::MicroBatch => render_micro_batches(solution),
        Choice::LossChunk => format!("loss: computed in chunks of {} tokens", policy.loss_chunk),
        Choice::Tiles => {
            let tokens = policy.tile_tokens.unwrap_or(solution.plan.extent.tokens);
            format!("tiles: feed-forward blocks run on {tokens} tokens at a time")
        }
        Choice::Weights => {
            let place = match policy.sharding {
                Sharding::Weights => "sharded over ranks",
                _ => describe_place(policy.weights),
            };
            match (policy.offloaded_weights.len(), policy.tables_offloaded) {
                (0, _) => format!("weights: embedding and head {place}"),
                (count, false) => format!("weights: {} {place}, prefetched", of_layers(count)),
                (count, true) => {
                    format!("weights: {}, embedding and head {place}, prefetched", of_layers(count))
                }
            }
        }
        Choice::HeadPieces if reason.why == Why::HeadHasAdapter => "head: not split".to_owned(),
        Choice::HeadPieces => format!(
            "head: split into {} pieces, with one more matmul; results differ by rounding",
            policy.head_pieces
        ),
        Choice::Embedding => {
            let place = describe_place(solution.plan.device.offload_space());
            format!("embedding: {place}, rows are looked up there")
        }
        Choice::Activations => format!(
            "activations: {} offloaded until backward, {}",
            of_layers(LayerCounts::of(policy).activations_offloaded),
            describe_place(policy.activations)
        ),
        Choice::OptimizerState => {
            let place = describe_place(policy.optimizer_state);
            format!("optimizer state: {}{place}", some_layers(&policy.offloaded_moments, layers))
        }
        Choice::Gradients => {
            let place = describe_place(policy.gradients);
            format!("gradients: {}{place}", some_layers(&policy.offloaded_gradients, layers))
        }
        Choice::Order => {
            let early = "; without gradient clipping each layer is updated right after its backward pass";
            let early = if updates_early(&solution.plan) { early } else { "" };
            format!(
                "order: breadth-first, all micro-batches of a step pass each layer before the next one{early}"
            )
        }
        Choice::Laps => {
            let count = policy.layers_per_lap;
            format!("laps: {count} layers at a time, keeping only the input of the first for backward")
        }
        Choice::Updates => {
            let early = updates_early(&solution.plan);
            let when = if early { "while the GPU continues" } else { "during the next forward pass" };
            format!("updates: on the CPU, where the optimizer state is, {when}")
        }
        Choice::Sharding => {
            format!("sharding: each rank keeps its part of {}", describe_sharding(policy.sharding))
        }
    };
    match reason.why {
        Why::Pinned => format!("{what} (pinned)"),
        Why::HostIsShort => format!("{what}, because host memory is short"),
        Why::Fits => format!("{what}, all activations fit"),
        Why::HeadHasAdapter => format!("{what}, because it has an adapter"),
        Why::NeedsLeast { .. } if reason.choice == Choice::Recompute => {
            format!("{what}, which needs the least memory")
        }
        Why::NeedsLeast { .. } | Why::FastestWithin { .. } => what,
    }
}

fn render_micro_batches(solution: &Solution) -> String {
    let (tokens, per_step) = (solution.plan.extent.tokens, solution.demand.micro_steps);
    match per_step {
        one if one <= 1.0 => format!("micro-batches: 1 per step, up to {tokens} tokens"),
        many => {
            let many = format!("{many:.1}");
            let many = many.strip_suffix(".0").unwrap_or(&many);
            format!("micro-batches: {many} per step, up to {tokens} tokens each")
        }
    }
}

fn describe_place(space: Space) -> &'static str {
    match space {
        Space::Device => "on the device",
        Space::Host => "in host RAM",
        Space::Disk => "on disk",
    }
}

/// Whether `micro_step` contains the updates of tensors whose gradients it completes.
fn updates_early(plan: &Plan) -> bool {
    plan.entry(Entry::MicroStep).steps.iter().any(|step| step.phase == Phase::Update)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_read_as_sentences() {
        let price = Price { choice: Choice::Weights, saved_bytes: 3 << 20, cost_ms: 178.4 };
        assert_eq!(render_price(&price), "offloading weights saves 3.00 MiB and adds 178 ms per step");
        let larger = Price { saved_bytes: -(1 << 20), cost_ms: -0.2, ..price };
        assert_eq!(render_price(&larger), "offloading weights needs another 1.00 MiB and adds 0 ms per step");
        let faster = Price { cost_ms: -1600.0, ..larger };
        let expected = "offloading weights needs another 1.00 MiB and makes a step faster by 1.6 s";
        assert_eq!(render_price(&faster), expected);
    }
}
