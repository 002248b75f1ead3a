//! The stages of a compilation, in order, with a check after each.
//!
//! [`compile`] is the page to read: a request and a policy become forward graph, backward, update, recompute, tiles,
//! offload, streaming, schedule and arena. The order of the passes is written here and nowhere else.

use crate::request::{Away, Policy, Recompute, Request};
use crate::{arena, autodiff, forward, passes, schedule, update};
use smidgen_ir::{Graph, Plan, verify};

/// Compiles a request under a policy.
pub fn compile(request: &Request, policy: &Policy) -> Plan {
    arena::plan_memory(scheduled(request, policy))
}

/// Compiles what it takes to see the logits of a model, for looking at it rather than training it.
pub fn compile_logits(request: &Request) -> Plan {
    let mut graph = forward::build_logits_graph(request);
    check("forward", &graph);

    passes::remove_dead::apply(&mut graph);
    arena::plan_memory(placed(graph, request))
}

/// Compiles the loss of samples alone, for evaluating a model rather than training it.
pub fn compile_eval(request: &Request, policy: &Policy) -> Plan {
    let mut graph = forward::build_eval_graph(request, policy.loss_chunk);
    check("forward", &graph);

    passes::remove_dead::apply(&mut graph);
    passes::tile::apply(&mut graph, policy.tile_tokens, &request.extent);
    check("tile", &graph);

    arena::plan_memory(streamed(graph, request, &policy.away, check))
}

/// Compiles generation alone, by `request.decode`.
pub fn compile_decode(request: &Request, away: &Away) -> Plan {
    let mut graph = forward::build_decode_graph(request);
    check("forward", &graph);

    passes::remove_dead::apply(&mut graph);
    arena::plan_memory(streamed(graph, request, away, check))
}

fn check(stage: &str, graph: &Graph) {
    verify::expect_sound(stage, &verify::graph(graph));
}

/// All stages before offsets are given.
fn scheduled(request: &Request, policy: &Policy) -> schedule::Schedule {
    let graph = differentiated(request, policy.loss_chunk, check);
    let graph = computed(graph, request, &policy.recompute, policy.tile_tokens, check);
    moved(graph, request, policy, check)
}

/// Forward, backward and update, the same under every policy but for the chunk of logits.
pub(crate) fn differentiated(request: &Request, loss_chunk: usize, check: impl Fn(&str, &Graph)) -> Graph {
    let mut graph = forward::build_graph(request, loss_chunk);
    check("forward", &graph);

    autodiff::append_backward(&mut graph);
    check("autodiff", &graph);

    update::append_update(&mut graph, request);
    check("update", &graph);
    graph
}

/// What is computed when, as far as a policy chooses that.
pub(crate) fn computed(
    mut graph: Graph,
    request: &Request,
    recompute: &Recompute,
    tile_tokens: Option<usize>,
    check: impl Fn(&str, &Graph),
) -> Graph {
    let keep = passes::recompute::keep_set(&graph, recompute);
    passes::recompute::apply(&mut graph, &keep);
    check("recompute", &graph);

    passes::remove_dead::apply(&mut graph);
    check("remove_dead", &graph);

    passes::tile::apply(&mut graph, tile_tokens, &request.extent);
    check("tile", &graph);
    graph
}

/// What lies where, and the schedule.
pub(crate) fn moved(
    mut graph: Graph,
    request: &Request,
    policy: &Policy,
    check: impl Fn(&str, &Graph),
) -> schedule::Schedule {
    passes::offload::apply(&mut graph, policy, &request.extent, request.elsewhere());
    check("offload", &graph);

    streamed(graph, request, &policy.away, check)
}

/// Leaves that come and go, as a whole or in pieces, and the schedule.
fn streamed(
    mut graph: Graph,
    request: &Request,
    away: &Away,
    check: impl Fn(&str, &Graph),
) -> schedule::Schedule {
    if away.tables {
        passes::head_pieces::apply(&mut graph, away.head_pieces);
        check("head_pieces", &graph);
    }

    let fewest_bytes = passes::stream::FEWEST_BYTES;
    passes::stream::apply(&mut graph, away, &request.extent, request.elsewhere(), fewest_bytes);
    check("stream", &graph);

    placed(graph, request)
}

/// Which buffers are shared and what lies beside what, and the schedule that follows.
fn placed(graph: Graph, request: &Request) -> schedule::Schedule {
    let shared = passes::reuse_in_place::find(&graph);
    let layout = passes::join_operands::find(&graph, request);
    schedule::plan_lifetimes(graph, &shared, &layout, request)
}
