//! The solver's choices in words: what was chosen, why, and what it saves and costs.
//!
//! The solver answers in data (`Reason`, `Price`); these are the only sentences about it, and the table, `plan.json` and
//! the page all show them.

use smidgen_compile::{Choice, Price, Reason, Solution, Why};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{Entry, LayerSet, Phase, Plan, Policy, Sharding, Space};

/// One line per choice: its name, a colon, and what was chosen.
pub fn render_reasons(solution: &Solution) -> Vec<String> {
    solution.reasons.iter().map(|reason| render_reason(solution, reason)).collect()
}

/// What a choice saves on the device, and adds to each step or takes from it.
pub fn render_price(price: &Price) -> String {
    let size = format_bytes(price.saved_bytes.unsigned_abs());
    let verb = if price.saved_bytes >= 0 { "saves" } else { "needs another" };
    let ms = price.cost_ms.abs();
    let time = match price.cost_ms > -0.5 {
        true => format!("adds {ms:.0} ms per step"),
        false => format!("makes a step faster by {ms:.0} ms"),
    };
    format!("{} {verb} {size} and {time}", describe(price.choice))
}

/// A choice as something that is done.
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
        Choice::Laps => "working on several layers at a time",
        Choice::Updates => "updates on the host",
        Choice::Sharding => "dividing over ranks",
    }
}

/// What differs between two policies of a model with this many layers.
pub fn describe_changes(before: &Policy, now: &Policy, layers: usize) -> String {
    let mut changes = Vec::new();
    if now.micro_tokens != before.micro_tokens {
        let (is, was) = (now.micro_tokens, before.micro_tokens);
        changes.push(format!("micro-batches of {is} tokens (were {was})"));
    }
    let mut count = |what: &str, is: usize, was: usize| {
        if is != was {
            changes.push(format!("{what} of {is} of {layers} layers (were {was})"));
        }
    };
    let [is, was] = [now, before].map(LayerCounts::of);
    count("recompute", is.recomputed, was.recomputed);
    count("offloaded activations", is.activations_away, was.activations_away);
    count("offloaded weights", is.weights_away, was.weights_away);
    if now.optimizer_state != before.optimizer_state {
        changes.push(format!("optimizer state {}", describe_place(now.optimizer_state)));
    }
    if now.gradients != before.gradients {
        changes.push(format!("gradients {}", describe_place(now.gradients)));
    }
    if now.order != before.order {
        changes.push(format!("{}-first order", now.order.name()));
    }
    let [is, was] = [now, before].map(|policy| policy.layers_per_lap.max(1));
    if is != was {
        changes.push(format!("{is} layers at a time (were {was})"));
    }
    if now.sharding != before.sharding {
        changes.push(format!("divided over ranks: {}", describe_sharding(now.sharding)));
    }
    if now.tile_tokens != before.tile_tokens {
        changes.push(match now.tile_tokens {
            Some(tokens) => format!("feed-forward blocks on {tokens} tokens at a time"),
            None => "feed-forward blocks on a whole micro-batch".into(),
        });
    }
    if now.head_pieces != before.head_pieces {
        changes.push(match now.head_pieces {
            0 | 1 => "the head as a whole".into(),
            pieces => format!("the LM head in {pieces} pieces"),
        });
    }
    if changes.is_empty() { "the same choices".into() } else { changes.join(", ") }
}

/// How many layers a policy treats in which way.
#[derive(Clone, Copy, Debug)]
pub struct LayerCounts {
    pub recomputed: usize,
    pub weights_away: usize,
    pub activations_away: usize,
}

impl LayerCounts {
    pub fn of(policy: &Policy) -> LayerCounts {
        LayerCounts {
            recomputed: policy.recompute.len(),
            weights_away: policy.offloaded_weights.len(),
            activations_away: policy.offloaded_activations.len(),
        }
    }
}

/// Whether the weights of a layer are fetched when they are needed.
pub fn is_prefetched(policy: &Policy, layer: usize) -> bool {
    policy.offloaded_weights.contains(layer)
}

/// How a layer's activations are held until backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Kept,
    Recomputed,
    Offloaded,
    Both,
}

impl Fate {
    pub const ALL: [Fate; 4] = [Fate::Kept, Fate::Recomputed, Fate::Offloaded, Fate::Both];

    pub fn of(policy: &Policy, layer: usize) -> Fate {
        match (policy.recompute.contains(layer), policy.offloaded_activations.contains(layer)) {
            (false, false) => Fate::Kept,
            (true, false) => Fate::Recomputed,
            (false, true) => Fate::Offloaded,
            (true, true) => Fate::Both,
        }
    }
}

fn describe_sharding(sharding: Sharding) -> &'static str {
    match sharding {
        Sharding::None => "nothing",
        Sharding::Moments => "the moments",
        Sharding::Gradients => "moments and gradients",
        Sharding::Weights => "weights, gradients and moments",
    }
}

/// `21 of 28 layers ` where not all of them are meant.
fn some_layers(offloaded: &LayerSet, layers: usize) -> String {
    if offloaded.is_empty() { String::new() } else { format!("{} of {layers} layers ", offloaded.len()) }
}

/// Layers of the model that a plan is for.
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
                Sharding::Weights => "divided over ranks",
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
            of_layers(LayerCounts::of(policy).activations_away),
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
        Choice::Order if updates_early(&solution.plan) => {
            "order: breadth-first, all micro-batches of a step pass a layer before the next; nothing is clipped, so a \
             layer is updated right behind its backward pass"
                .to_owned()
        }
        Choice::Order => {
            "order: breadth-first, all micro-batches of a step pass a layer before the next".to_owned()
        }
        Choice::Laps => {
            let count = policy.layers_per_lap;
            format!("laps: {count} layers at a time, and only the first one's input is kept for backward")
        }
        Choice::Updates if updates_early(&solution.plan) => {
            "updates: by the processors, where the state is, while the GPU works on".to_owned()
        }
        Choice::Updates => {
            "updates: by the processors, where the state is, while the next forward pass runs".to_owned()
        }
        Choice::Sharding => format!("ranks: each keeps its part of {}", describe_sharding(policy.sharding)),
    };
    match reason.why {
        Why::Pinned => format!("{what} (pinned)"),
        Why::HostIsShort => format!("{what}, because host memory is short"),
        Why::Fits => format!("{what}, all activations fit"),
        Why::HeadHasAdapter => format!("{what}: it has an adapter"),
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

/// Whether `micro_step` updates what it completes.
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
        let expected = "offloading weights needs another 1.00 MiB and makes a step faster by 1600 ms";
        assert_eq!(render_price(&faster), expected);
    }
}
