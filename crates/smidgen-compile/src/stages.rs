//! The stages of a compilation, in order, with a check after each.
//!
//! [`compile_for`] is the place to start reading. `build` makes the forward graph, the backward pass and the update.
//! `run_compute_passes` decides what is recomputed, tiled and rounded, `run_memory_passes` what is divided, offloaded and
//! streamed; then come schedule and arena. The order of the passes is written here and nowhere else. The solver runs the
//! same stages without the checks, and packs only the plans that it may choose.

use crate::passes::update_early::Early;
use crate::request::{Purpose, Request};
use crate::schedule::Schedule;
use crate::{arena, autodiff, forward, passes, schedule, update};
use smidgen_ir::policy::Policy;
use smidgen_ir::{Entry, Graph, Plan, verify};

/// Compiles a training run.
pub fn compile(request: &Request, policy: &Policy) -> Plan {
    compile_for(Purpose::Training, request, policy)
}

/// Compiles the logits of whole sequences, for inspecting a model.
pub fn compile_logits(request: &Request) -> Plan {
    compile_for(Purpose::Logits, request, &Policy::default())
}

/// Compiles the loss of samples, for evaluating a model.
pub fn compile_eval(request: &Request, policy: &Policy) -> Plan {
    compile_for(Purpose::Evaluation, request, policy)
}

/// Compiles generation with the sizes in `request.decode`.
pub fn compile_decode(request: &Request, policy: &Policy) -> Plan {
    compile_for(Purpose::Generation, request, policy)
}

pub fn compile_for(purpose: Purpose, request: &Request, policy: &Policy) -> Plan {
    let graph = build(purpose, request, policy, check);
    let graph = run_compute_passes(graph, request, policy, check);
    arena::plan_memory(run_memory_passes(graph, request, policy, check))
}

fn check(stage: &str, graph: &Graph) {
    verify::expect_sound(stage, &verify::graph(graph));
}

/// The forward pass, and for training the backward pass and the update. The policy changes only the chunk of the loss.
pub(crate) fn build(
    purpose: Purpose,
    request: &Request,
    policy: &Policy,
    check: impl Fn(&str, &Graph),
) -> Graph {
    let mut graph = forward::build_graph(request, purpose, policy.loss_chunk);
    check("forward", &graph);

    if purpose == Purpose::Training {
        autodiff::append_backward(&mut graph);
        check("autodiff", &graph);

        update::append_update(&mut graph, request);
        check("update", &graph);
    }
    graph
}

/// Decides which nodes run, and when: recompute, dead code, tiles, rounding to fp8.
pub(crate) fn run_compute_passes(
    mut graph: Graph,
    request: &Request,
    policy: &Policy,
    check: impl Fn(&str, &Graph),
) -> Graph {
    if graph.has_entry(Entry::MicroStep) {
        let keep = passes::recompute::keep_set(&graph, policy);
        passes::recompute::apply(&mut graph, &keep);
        check("recompute", &graph);
    }

    passes::remove_dead::apply(&mut graph);
    check("remove_dead", &graph);

    passes::tile::apply(&mut graph, policy, &request.extent);
    check("tile", &graph);

    passes::round_fp8::apply(&mut graph, request);
    check("round_fp8", &graph);
    graph
}

/// Decides where values are stored and what is transferred, and schedules the result.
pub(crate) fn run_memory_passes(
    mut graph: Graph,
    request: &Request,
    policy: &Policy,
    check: impl Fn(&str, &Graph),
) -> Schedule {
    // The graph may have been built for another policy.
    forward::set_loss_chunk(&mut graph, policy.loss_chunk);

    passes::shard::divide_trained(&mut graph, policy, request.rank);
    check("divide_trained", &graph);

    if !policy.is_breadth_first() {
        passes::offload::apply(&mut graph, policy, &request.extent, request.device);
        check("offload", &graph);
    }

    passes::head_pieces::apply(&mut graph, policy);
    check("head_pieces", &graph);

    let target = (request.device, request.rank);
    passes::place::apply(&mut graph, policy, &request.extent, target, passes::place::FEWEST_BYTES);
    passes::shard::gather_offloaded(&mut graph);
    let is_early = passes::update_early::is_early(request, policy);
    let elements = update::PIECE_ELEMENTS;
    let squares = passes::update_in_pieces::apply(&mut graph, policy, &request.extent, elements, is_early);
    if policy.is_breadth_first() {
        let sizes = (&request.extent, &request.step);
        let early =
            if is_early { passes::update_early::take(&mut graph, &squares) } else { Early::default() };
        passes::breadth::apply(&mut graph, policy, sizes, target, &squares, early);
    }

    passes::stream::apply(&mut graph, policy, &request.extent);
    check("stream", &graph);

    passes::shard::sum_gradients(&mut graph, request.rank, &request.extent);
    check("sum_gradients", &graph);

    let shared = passes::reuse_in_place::find(&graph);
    let layout = passes::join_operands::find(&graph, request);
    schedule::plan_lifetimes(graph, &shared, &layout, request)
}
