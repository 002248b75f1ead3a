//! A plan as JSON: the fields of the contract, for `plan --json` and the run folder's `plan.json`.
//!
//! Every size is in bytes, and the rows add up to `peak_bytes`.
//! Left out: buffers and steps, which the text form shows (`plan --text`).

use crate::life::must_fit;
use crate::planning::{Planned, pinned_bytes};
use serde_json::{Map, Value, json};
use smidgen_ir::{Entry, Space};

/// One object; every size in bytes. Rows add up to `peak_bytes`.
pub fn render_json(planned: &Planned) -> Value {
    let (solution, plan) = (&planned.solution, &planned.solution.plan);
    let peak = plan.peak();
    let mut rows: Map<String, Value> =
        peak.rows.iter().map(|(category, bytes)| (category.name().to_string(), json!(bytes))).collect();
    rows.insert("context".into(), json!(planned.solution.context_bytes));
    let live = |entry: Entry| plan.live_bytes(entry).into_iter().max().unwrap_or(0);
    let at_rest = planned.solution.context_bytes + plan.persistent_bytes as u64;
    let phase = |entry: Entry| at_rest + live(entry) as u64;
    let away = &solution.policy.away;
    let elsewhere = plan.device.elsewhere();
    let life: Map<String, Value> =
        planned.life.iter().map(|phase| (phase.name.to_string(), phase.needs.render_json())).collect();
    let place_of = |is_away: bool| if is_away { elsewhere } else { Space::Device }.name();
    let weights_place = match !away.weights.is_empty() || away.has_tables() {
        true if away.on_disk => Space::Disk.name(),
        is_away => place_of(is_away),
    };
    json!({
        "fits": planned.fits,
        "budget_bytes": planned.budget_bytes,
        "peak_bytes": solution.peak_bytes,
        "peak_at": plan.place(peak.entry, peak.step),
        "largest_at_peak": peak.largest.iter().map(|(name, bytes)| json!({"name": name, "bytes": bytes})).collect::<Vec<_>>(),
        "spaces": {
            "device": solution.peak_bytes,
            "pinned": pinned_bytes(plan),
            "host": 0,
            "disk": plan.disk.bytes(),
        },
        "rows": rows,
        "policy": {
            "device": plan.device.name(),
            "threads": plan.threads,
            "micro_tokens": solution.demand.micro_tokens,
            "recompute": solution.policy.recompute.layers,
            "loss_chunk": solution.policy.loss_chunk,
            "tile_tokens": solution.policy.tile_tokens,
            "activations": place_of(!away.activations.is_empty()),
            "activations_away": away.activations,
            "weights": weights_place,
            "weights_away": away.weights,
            "embedding_away": away.has_tables(),
            "tables_away": away.tables,
            "head_pieces": away.head_pieces,
            "optimizer_state": place_of(away.moments),
            "window_bytes": away.window_bytes,
            "reasons": solution.reasons,
            "prices": solution.prices.iter().map(|price| json!({
                "choice": price.choice,
                "saved_bytes": price.saved_bytes,
                "cost_ms": price.cost_ms,
            })).collect::<Vec<_>>(),
        },
        "extent": { "tokens": plan.extent.tokens, "rows": plan.extent.rows, "segments": plan.extent.segments },
        "step_ms": solution.step_ms,
        "tokens_per_s": planned.step_tokens / (solution.step_ms / 1e3),
        "arena": {
            "reserved_bytes": plan.reserved_bytes(),
            "peak_live_bytes": plan.persistent_bytes + peak.transient_live_bytes,
            "transient_reserved_bytes": plan.transient_bytes,
            "transient_peak_live_bytes": peak.transient_live_bytes,
        },
        "phases": {
            "load": at_rest,
            "micro_step": phase(Entry::MicroStep),
            "update": phase(Entry::Update),
            "refresh": phase(Entry::Refresh),
            "eval": phase(Entry::Eval),
            "save": at_rest,
        },
        "profile": planned.profile.render_json(),
        "life": life,
        "must_fit": must_fit(&planned.life).render_json(),
        "advice": planned.advice,
        "notes": planned.notes,
    })
}
