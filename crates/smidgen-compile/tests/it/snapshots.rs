//! Snapshots: the text of a tiny graph and its plans, and the bytes of real shapes.
//!
//! A change here is a change of plans: read the diff, then run with `UPDATE_EXPECT=1`.

use crate::shapes;
use expect_test::{expect, expect_file};
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::model::spec::HEAD;
use smidgen_compile::request::Moments;
use smidgen_compile::{AdapterForm, DecoderSpec, Purpose, Request, autodiff, compile, forward};
use smidgen_ir::text::{render_graph, render_plan};
use smidgen_ir::{Category, Code4, LayerSet, LeafKind, Policy, Storage};
use std::fmt::Write;

/// One layer with adapters on q and down.
fn tiny_request() -> Request {
    let targets = Targets::Names(vec!["q_proj".into(), "down_proj".into()]);
    shapes::request(shapes::llama(16, 24, 1, (2, 1), 32, false), targets, Layers::All, 12, 2)
}

fn policy(recompute: LayerSet) -> Policy {
    Policy::resident(recompute, 4)
}

#[test]
fn tiny_graph() {
    let mut graph =
        forward::build_graph(&tiny_request(), Purpose::Training, policy(LayerSet::none()).loss_chunk);
    autodiff::append_backward(&mut graph);
    expect_file!["snapshots/tiny_graph.txt"].assert_eq(&render_graph(&graph));
}

#[test]
fn tiny_plan_without_recompute() {
    let plan = compile(&tiny_request(), &policy(LayerSet::none()));
    expect_file!["snapshots/tiny_plan_recompute_none.txt"].assert_eq(&render_plan(&plan));
}

#[test]
fn tiny_plan_with_recompute() {
    let plan = compile(&tiny_request(), &policy(LayerSet::first(1)));
    expect_file!["snapshots/tiny_plan_recompute_all.txt"].assert_eq(&render_plan(&plan));
}

/// One fused layer with adapters on q, k and v together and on down.
#[test]
fn tiny_plan_of_phi3() {
    let targets = Targets::Names(vec!["qkv_proj".into(), "down_proj".into()]);
    let request = shapes::request(shapes::small_phi3(1), targets, Layers::All, 12, 2);
    let plan = compile(&request, &policy(LayerSet::none()));
    expect_file!["snapshots/tiny_plan_phi3.txt"].assert_eq(&render_plan(&plan));
}

/// With dropout the plan has both parts of an input; `refresh` has the row norms.
#[test]
fn tiny_plan_of_dora() {
    let request = Request { form: AdapterForm::Dora, dropout: 0.1, ..tiny_request() };
    let plan = compile(&request, &policy(LayerSet::none()));
    expect_file!["snapshots/tiny_plan_dora.txt"].assert_eq(&render_plan(&plan));
}

/// Reservation and bytes by category at the peak, with nothing and with everything recomputed.
fn summary(spec: DecoderSpec) -> String {
    let layers = spec.layers.len();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 2048, 1);
    let mut text = String::new();
    for recompute in [LayerSet::none(), LayerSet::first(layers)] {
        let count = recompute.len();
        let plan = compile(&request, &Policy::resident(recompute, 128));
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
          reserved 6144156672 = persistent 2652020992 + transient 3492135680
          peak at forward, lm_head_loss
          base_weights     2471628800
          adapters           45088768
          gradients          45088768
          optimizer          90177536
          activations      3425148928
          workspace          67023872
        recompute 16 of 16
          reserved 3233849856 = persistent 2652020992 + transient 581828864
          peak at recompute of layers.15, linear
          base_weights     2471628800
          adapters           45088768
          gradients          45088768
          optimizer          90177536
          activations       580517888
          workspace           1348096
    "#]]
    .assert_eq(&summary(shapes::llama_1b()));
}

#[test]
fn bytes_of_llama_8b() {
    expect![[r#"
        recompute 0 of 32
          reserved 29303012096 = persistent 16731650816 + transient 12571361280
          peak at forward, lm_head_loss
          base_weights    16060522496
          adapters          167772160
          gradients         167772160
          optimizer         335544320
          activations     12487442432
          workspace          83958528
        recompute 32 of 32
          reserved 18379357184 = persistent 16731650816 + transient 1647706368
          peak at recompute of layers.31, linear
          base_weights    16060522496
          adapters          167772160
          gradients         167772160
          optimizer         335544320
          activations      1646395392
          workspace           1350656
    "#]]
    .assert_eq(&summary(shapes::llama_8b()));
}

#[test]
fn bytes_of_llama_70b() {
    expect![[r#"
        recompute 0 of 80
          reserved 205238631424 = persistent 144420961024 + transient 60817670400
          peak at forward of layers.79, linear
          base_weights   141107412992
          adapters          828375040
          gradients         828375040
          optimizer        1656750080
          activations     60816359424
          workspace           1358848
        recompute 80 of 80
          reserved 150917544960 = persistent 144420961024 + transient 6496583936
          peak at recompute of layers.79, linear
          base_weights   141107412992
          adapters          828375040
          gradients         828375040
          optimizer        1656750080
          activations      6495272960
          workspace           1358848
    "#]]
    .assert_eq(&summary(shapes::llama_70b()));
}

/// Optimizer bytes for LoRA of rank 16 on all linears, with moments in f32 and in 8 bits.
fn optimizer_rows(spec: DecoderSpec) -> String {
    let layers = spec.layers.len();
    let mut request = shapes::request(spec, Targets::AllLinear, Layers::All, 256, 1);
    let mut text = String::new();
    for moments in [Moments::F32, Moments::Bits8] {
        request.optimizer.moments = moments;
        let plan = compile(&request, &Policy::resident(LayerSet::first(layers), 64));
        let trained: usize =
            plan.leaves(LeafKind::Adapter).map(|(_, value)| value.ty.elements(&plan.extent)).sum();
        let rows = plan.peak().rows;
        let row = rows.into_iter().find(|(category, _)| *category == Category::Optimizer).unwrap().1;
        let bytes = row as f64 / trained as f64;
        writeln!(text, "{moments:?}: {row} bytes for {trained} parameters, {bytes:.5} each").unwrap();
    }
    text
}

#[test]
fn optimizer_bytes_of_qwen2_7b() {
    expect![[r#"
        F32: 322961408 bytes for 40370176 parameters, 8.00000 each
        Bits8: 82001920 bytes for 40370176 parameters, 2.03125 each
    "#]]
    .assert_eq(&optimizer_rows(shapes::qwen2_7b()));
}

const NF4: Storage = Storage::Bnb4 { code: Code4::Nf4, double: true };

/// The base weights of a plan with every linear but the head in NF4, and everything else as stored in the checkpoint.
fn quantized_base(spec: DecoderSpec) -> String {
    let linears = spec.linears().into_iter().filter(|linear| linear.path != HEAD);
    let storage = linears.map(|linear| (format!("{}.weight", linear.path), NF4)).collect();
    let parameters = spec.parameters();
    let layers = spec.layers.len();
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 256, 1);
    let adapted: usize = request.adapters.len();
    let request = Request { storage, ..request };
    let plan = compile(&request, &Policy::resident(LayerSet::first(layers), 64));

    let (mut quantized_bytes, mut quantized_parameters, mut other_bytes) = (0, 0, 0);
    for (_, weight) in plan.leaves(LeafKind::Weight) {
        let bytes = weight.ty.bytes(&plan.extent);
        if weight.ty.storage == NF4 {
            quantized_bytes += bytes;
            quantized_parameters += weight.ty.elements(&plan.extent);
        } else {
            other_bytes += bytes;
        }
    }
    let row =
        plan.peak().rows.into_iter().find(|(category, _)| *category == Category::BaseWeights).unwrap().1;
    assert_eq!(row, quantized_bytes + other_bytes);
    assert_eq!(other_bytes, 2 * (parameters - quantized_parameters), "the rest is bf16");
    let bits = 8.0 * quantized_bytes as f64 / quantized_parameters as f64;
    let mut text = String::new();
    writeln!(text, "parameters            {parameters:>14}").unwrap();
    writeln!(text, "quantized parameters  {quantized_parameters:>14}").unwrap();
    writeln!(text, "quantized bytes       {quantized_bytes:>14}").unwrap();
    writeln!(text, "bits a parameter      {bits:>14.3}").unwrap();
    writeln!(text, "other bytes           {other_bytes:>14}").unwrap();
    writeln!(text, "base weights          {row:>14}").unwrap();
    writeln!(text, "adapted linears       {adapted:>14}").unwrap();
    text
}

#[test]
fn quantized_bytes_of_qwen2_7b() {
    expect![[r#"
        parameters                7615616512
        quantized parameters      6525288448
        quantized bytes           3366195728
        bits a parameter               4.127
        other bytes               2180656128
        base weights              5546851856
        adapted linears                  196
    "#]]
    .assert_eq(&quantized_base(shapes::qwen2_7b()));
}

#[test]
fn quantized_bytes_of_phi4_mini() {
    expect![[r#"
        parameters                3836021760
        quantized parameters      3221225472
        quantized bytes           1661731328
        bits a parameter               4.127
        other bytes               1229592576
        base weights              2891323904
        adapted linears                  128
    "#]]
    .assert_eq(&quantized_base(shapes::phi4_mini()));
}

#[test]
fn quantized_bytes_of_llama_8b() {
    expect![[r#"
        parameters                8030261248
        quantized parameters      6979321856
        quantized bytes           3600417664
        bits a parameter               4.127
        other bytes               2101878784
        base weights              5702296448
        adapted linears                  224
    "#]]
    .assert_eq(&quantized_base(shapes::llama_8b()));
}
