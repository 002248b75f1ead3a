//! Snapshots: the text of a tiny graph and its plans, and the bytes of real shapes.
//!
//! A change here is a change of plans: read the diff, then run with `UPDATE_EXPECT=1`.

use crate::shapes;
use expect_test::{expect, expect_file};
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::{DecoderSpec, Policy, Recompute, Request, autodiff, compile, forward};
use smidgen_ir::text::{render_graph, render_plan};
use std::fmt::Write;

/// One layer with adapters on q and down.
fn tiny_request() -> Request {
    let targets = Targets::Names(vec!["q_proj".into(), "down_proj".into()]);
    shapes::request(shapes::llama(16, 24, 1, (2, 1), 32, false), targets, Layers::All, 12, 2)
}

fn policy(recompute: Recompute) -> Policy {
    Policy { recompute, loss_chunk: 4 }
}

#[test]
fn tiny_graph() {
    let mut graph = forward::build_graph(&tiny_request(), &policy(Recompute::none()));
    autodiff::append_backward(&mut graph);
    expect_file!["snapshots/tiny_graph.txt"].assert_eq(&render_graph(&graph));
}

#[test]
fn tiny_plan_without_recompute() {
    let plan = compile(&tiny_request(), &policy(Recompute::none()));
    expect_file!["snapshots/tiny_plan_recompute_none.txt"].assert_eq(&render_plan(&plan));
}

#[test]
fn tiny_plan_with_recompute() {
    let plan = compile(&tiny_request(), &policy(Recompute::first(1)));
    expect_file!["snapshots/tiny_plan_recompute_all.txt"].assert_eq(&render_plan(&plan));
}

/// Reservation and the rows at the peak, with nothing and with everything recomputed.
fn summary(spec: DecoderSpec) -> String {
    let layers = spec.layers;
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 2048, 1);
    let mut text = String::new();
    for recompute in [Recompute::none(), Recompute::first(layers)] {
        let count = recompute.layers.len();
        let plan = compile(&request, &Policy { recompute, loss_chunk: 128 });
        let peak = plan.peak();
        let (reserved, persistent, transient) =
            (plan.reserved_bytes(), plan.persistent_bytes, plan.transient_bytes);
        writeln!(text, "recompute {count} of {layers}").unwrap();
        writeln!(text, "  reserved {reserved} = persistent {persistent} + transient {transient}").unwrap();
        writeln!(text, "  peak at {}", plan.place(peak.entry, peak.step)).unwrap();
        for (category, bytes) in &peak.rows {
            writeln!(text, "  {:<13}{bytes:>14}", category.name()).unwrap();
        }
        assert_eq!(peak.rows.iter().map(|(_, bytes)| bytes).sum::<usize>(), reserved);
    }
    text
}

#[test]
fn bytes_of_llama_1b() {
    expect![[r#"
        recompute 0 of 16
          reserved 6144153856 = persistent 2652018176 + transient 3492135680
          peak at forward, lm_head_loss
          base_weights     2471628800
          adapters           45088768
          gradients          45088768
          optimizer          90177536
          activations      3425148928
          workspace          67021056
        recompute 16 of 16
          reserved 3233847040 = persistent 2652018176 + transient 581828864
          peak at recompute of layers.15, linear
          base_weights     2471628800
          adapters           45088768
          gradients          45088768
          optimizer          90177536
          activations       580517888
          workspace           1345280
    "#]]
    .assert_eq(&summary(shapes::llama_1b()));
}

#[test]
fn bytes_of_llama_8b() {
    expect![[r#"
        recompute 0 of 32
          reserved 29303006720 = persistent 16731645440 + transient 12571361280
          peak at forward, lm_head_loss
          base_weights    16060522496
          adapters          167772160
          gradients         167772160
          optimizer         335544320
          activations     12487442432
          workspace          83953152
        recompute 32 of 32
          reserved 18379351808 = persistent 16731645440 + transient 1647706368
          peak at recompute of layers.31, linear
          base_weights    16060522496
          adapters          167772160
          gradients         167772160
          optimizer         335544320
          activations      1646395392
          workspace           1345280
    "#]]
    .assert_eq(&summary(shapes::llama_8b()));
}

#[test]
fn bytes_of_llama_70b() {
    expect![[r#"
        recompute 0 of 80
          reserved 205238617856 = persistent 144420947456 + transient 60817670400
          peak at forward of layers.79, linear
          base_weights   141107412992
          adapters          828375040
          gradients         828375040
          optimizer        1656750080
          activations     60816359424
          workspace           1345280
        recompute 80 of 80
          reserved 150917531392 = persistent 144420947456 + transient 6496583936
          peak at recompute of layers.79, linear
          base_weights   141107412992
          adapters          828375040
          gradients         828375040
          optimizer        1656750080
          activations      6495272960
          workspace           1345280
    "#]]
    .assert_eq(&summary(shapes::llama_70b()));
}
