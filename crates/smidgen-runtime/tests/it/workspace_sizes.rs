//! The planner's workspace sizes are exactly those that the device requires.
//!
//! Planner and device call the same functions; these tests check that they call them with the same shapes.

use crate::decoder::Choice;
use proptest::prelude::*;
use smidgen_compile::AdapterForm;
use smidgen_ir::workspace::Target;
use smidgen_ir::{
    AttentionShape, Block, Code4, DType, DeviceKind, Dim, Entry, Extent, HeadPiece, LayerSet, LossHead, Norm,
    Op, Plan, Precision, Shape, Space, Storage, Type,
};
use smidgen_runtime::{BoundStep, Cpu, Device, DeviceError, Operand};

/// A step over operands of the given types, all at offset 0.
fn bound_step(op: Op, inputs: &[Type], updates: &[Type], extent: &Extent) -> BoundStep {
    let outputs = op
        .infer(&inputs.iter().collect::<Vec<_>>(), &updates.iter().collect::<Vec<_>>())
        .expect("the example fits its operation");
    let operands = |types: &[Type]| types.iter().map(|ty| operand(ty, extent)).collect();
    BoundStep {
        entry: Entry::MicroStep,
        index: 0,
        awaits: vec![],
        inputs: operands(inputs),
        outputs: operands(&outputs),
        updates: operands(updates),
        op,
        precision: Precision::F32,
        planned: *extent,
        workspace: None,
    }
}

fn operand(ty: &Type, extent: &Extent) -> Operand {
    let rows = ty.shape.0[0];
    let columns = ty.shape.at(extent).1;
    Operand {
        space: Space::Device,
        offset: 0,
        bytes: ty.bytes(extent),
        rows,
        columns,
        storage: ty.storage,
        stride: columns,
        part: None,
        shard: None,
    }
}

/// Checks that the device accepts the planned size and refuses one byte less.
fn check_exact(cpu: &Cpu, op: Op, inputs: &[Type], updates: &[Type], extent: &Extent) {
    let target = Target { device: DeviceKind::Cpu, precision: Precision::F32, threads: cpu.threads() };
    let planned = op.workspace_bytes(&inputs.iter().collect::<Vec<_>>(), extent, target);
    let mut step = bound_step(op, inputs, updates, extent);
    if planned > 0 {
        step.workspace = Some((0, planned));
    }
    let name = step.op.name();
    assert!(cpu.check(&step, extent).is_ok(), "`{name}` is planned {planned} bytes, which are too few");
    if planned == 0 {
        return;
    }
    step.workspace = Some((0, planned - 1));
    match cpu.check(&step, extent) {
        Err(DeviceError::Workspace { given, needed, .. }) => {
            assert_eq!((given, needed), (planned - 1, planned))
        }
        other => panic!("`{name}` with one byte less than {planned}: {other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn planned_sizes_are_what_kernels_need(
        threads in 1usize..9,
        tokens in 1usize..3000,
        rows in 1usize..3000,
        (n, k, rank) in (1usize..2000, 1usize..2000, 1usize..80),
        (groups, kv_heads, head_dim) in (1usize..9, 1usize..5, 1usize..33),
        chunk in 1usize..300,
    ) {
        let extent = Extent { tokens, rows: rows.min(tokens), segments: 1, audio: 0 };
        let cpu = Cpu::new(threads).unwrap();
        let x = |columns| Type::f32(Shape::of(Dim::Tokens, columns));
        let s = |columns| Type::f32(Shape::of(Dim::Rows, columns));
        let weight = |n, k| Type::new(Shape::matrix(n, k), Storage::Plain(DType::Bf16));
        let gradient = |n, k| Type::f32(Shape::matrix(n, k));
        let double = |n| Type::new(Shape::vector(n), Storage::Plain(DType::F64));
        let integers = |dim| Type::new(Shape::rows_of(dim), Storage::Plain(DType::I32));
        let bias = Type::new(Shape::vector(n), Storage::Plain(DType::F16));

        check_exact(&cpu, Op::Linear { bias: false, lora: None }, &[x(k), weight(n, k)], &[], &extent);
        check_exact(&cpu, Op::Linear { bias: true, lora: None }, &[x(k), weight(n, k), bias.clone()], &[], &extent);
        check_exact(
            &cpu,
            Op::Linear { bias: true, lora: Some(1.0) },
            &[s(k), weight(n, k), bias.clone(), s(rank), gradient(n, rank)],
            &[],
            &extent,
        );
        check_exact(&cpu, Op::LinearGrad { scales: vec![1.0] }, &[x(n), weight(n, k)], &[], &extent);
        check_exact(&cpu, Op::WeightGrad { scale: 1.0 }, &[x(n), x(k)], &[gradient(n, k)], &extent);
        check_exact(&cpu, Op::RmsNormWeightGrad { eps: 1e-5 }, &[x(k), x(k)], &[Type::f32(Shape::vector(k))], &extent);
        let vector = |n| Type::f32(Shape::vector(n));
        check_exact(&cpu, Op::ScaleColumns { bias: false }, &[x(n), vector(n), vector(n)], &[], &extent);
        let gains = [x(n), vector(n), vector(n), bias.clone()];
        check_exact(&cpu, Op::ScaleColumns { bias: true }, &gains, &[], &extent);
        check_exact(&cpu, Op::MagnitudeGrad, &[x(n), x(n), vector(n)], &[vector(n)], &extent);
        let module = [x(rank), gradient(n, rank), gradient(1, 4), gradient(1, 1)];
        let forward = [&[x(n)], module.as_slice()].concat();
        check_exact(&cpu, Op::Fourier { scale: 1.0 }, &forward, &[], &extent);
        let backward = [module.as_slice(), &[x(n)]].concat();
        let sums = [gradient(1, 4), gradient(1, 1)];
        check_exact(&cpu, Op::FourierGrad { scale: 1.0 }, &backward, &sums, &extent);
        let row_norms = [weight(n, k), gradient(rank, k), gradient(n, rank)];
        check_exact(&cpu, Op::RowNorms { scale: 1.0 }, &row_norms, &[vector(n)], &extent);
        let logits = [Type::f32(Shape::of(Dim::Rows, n))];
        let operands = [s(k), weight(n, k), s(rank), gradient(n, rank)];
        check_exact(&cpu, Op::Logits { lora: None, softcap: None, first_word: 0 }, &operands[..2], &logits, &extent);
        let adapted = Op::Logits { lora: Some(1.0), softcap: Some(30.0), first_word: 0 };
        check_exact(&cpu, adapted, &operands, &logits, &extent);
        let piece = |continues| HeadPiece { chunk, first_word: 7, softcap: None, continues };
        let head = [s(k), weight(n, k), integers(Dim::Rows), double(1), s(3), s(k)];
        let sums = [&head[..3], &[s(3)]].concat();
        check_exact(&cpu, Op::HeadSums(piece(true)), &sums, &[], &extent);
        check_exact(&cpu, Op::HeadLoss { row_losses: false }, &[s(3), double(1)], &[double(1)], &extent);
        check_exact(&cpu, Op::HeadGrad { piece: piece(false), ends: false }, &head[..5], &[], &extent);
        check_exact(&cpu, Op::HeadGrad { piece: piece(true), ends: true }, &head, &[], &extent);
        check_exact(&cpu, Op::BiasGrad, &[x(n)], &[Type::f32(Shape::vector(n))], &extent);
        check_exact(
            &cpu,
            Op::GradNorm { clip: 1.0, squares: false },
            &[double(1), double(3), gradient(n, k), gradient(n, rank)],
            &[double(4)],
            &extent,
        );
        let loss = |lora, train_head| Op::LmHeadLoss(LossHead { chunk, gradient: true, lora, train_head, softcap: None, row_losses: false });
        let operands = [s(k), weight(n, k), integers(Dim::Rows), double(1)];
        check_exact(&cpu, loss(None, false), &operands, &[double(1)], &extent);
        check_exact(&cpu, loss(None, true), &operands, &[double(1), gradient(n, k)], &extent);
        let adapted = [operands.as_slice(), &[s(rank), gradient(n, rank)]].concat();
        check_exact(&cpu, loss(Some(1.0), false), &adapted, &[double(1), gradient(n, rank)], &extent);

        let heads = groups * kv_heads;
        let shape = AttentionShape { heads, kv_heads, head_dim: 8 * head_dim, scale: 1.0, window: None, softcap: None, sinks: false };
        let (q, kv) = shape.channels();
        check_exact(
            &cpu,
            Op::Attention(shape),
            &[x(q), x(kv), x(kv), integers(Dim::Boundaries)],
            &[],
            &extent,
        );
        check_exact(
            &cpu,
            Op::AttentionGrad(shape),
            &[x(q), x(kv), x(kv), x(q), x(heads), x(q), integers(Dim::Boundaries)],
            &[],
            &extent,
        );
    }
}

/// Every step of a whole plan is refused if its workspace is one byte short.
#[test]
fn a_plan_with_a_short_workspace_is_refused_at_load() {
    for form in [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.1 }] {
        for choice in [Choice::lora(), Choice::fused()] {
            short_workspaces_are_refused(&Choice { form, ..choice });
        }
    }
}

fn short_workspaces_are_refused(choice: &Choice) {
    let subject = choice.subject_with(LayerSet::none());
    let plan = subject.roomy_plan(2);
    let cpu = Cpu::new(2).unwrap();
    let steps: Vec<BoundStep> = plan
        .entries
        .iter()
        .flat_map(|entry| (0..entry.steps.len()).map(|index| BoundStep::of(&plan, entry.entry, index)))
        .collect();
    let mut with_workspace = 0;
    for mut step in steps {
        assert!(cpu.check(&step, &plan.extent).is_ok(), "`{}` is refused", step.op.name());
        if let Some((_, bytes)) = &mut step.workspace {
            *bytes -= 1;
            with_workspace += 1;
            let refused = matches!(cpu.check(&step, &plan.extent), Err(DeviceError::Workspace { .. }));
            assert!(refused, "`{}` with one byte less is accepted", step.op.name());
        }
    }
    assert!(with_workspace > 50, "only {with_workspace} steps have a workspace");
}

/// A device with four threads refuses a plan for two before any step runs.
#[test]
fn a_plan_for_fewer_threads_is_refused() {
    let plan: Plan = Choice::lora().subject_with(LayerSet::none()).roomy_plan(2);
    let error = smidgen_runtime::Executor::load(plan, Cpu::new(4).unwrap()).unwrap_err();
    assert!(matches!(error, DeviceError::Workspace { .. }), "{error}");
}

fn refusal(op: Op, inputs: &[Type]) -> Option<String> {
    let extent = Extent { tokens: 2, rows: 2, segments: 1, audio: 0 };
    let mut step = bound_step(op, inputs, &[], &extent);
    step.workspace = Some((0, 1 << 30));
    Cpu::new(1).unwrap().check(&step, &extent).err().map(|error| error.to_string())
}

/// An operation that decodes its weights accepts any storage; other operations refuse quantized storages by name.
#[test]
fn quantized_weights_are_accepted_where_they_are_decoded() {
    let linear = |bias| Op::Linear { bias, lora: None };
    let x = |columns| Type::f32(Shape::of(Dim::Tokens, columns));
    let nf4 = Storage::Bnb4 { code: Code4::Nf4, double: true };
    let q4_k = Storage::Gguf(Block::Q4K);
    for storage in [nf4, Storage::Int8Rows, q4_k] {
        let weight = Type::new(Shape::matrix(64, 512), storage);
        assert_eq!(refusal(linear(false), &[x(512), weight.clone()]), None);
        let ids = Type::new(Shape::rows_of(Dim::Tokens), Storage::Plain(DType::I32));
        assert_eq!(
            refusal(Op::Embed { scale: 1.0, element: DType::F32, padding: None }, &[ids, weight.clone()]),
            None
        );
        assert_eq!(refusal(Op::LinearGrad { scales: vec![1.0] }, &[x(64), weight]), None);
    }
    let weight = Type::new(Shape::matrix(64, 64), nf4);
    let bias = Type::new(Shape::vector(64), nf4);
    let refused = refusal(linear(true), &[x(64), weight, bias.clone()]).unwrap();
    assert_eq!(refused, "cpu cannot run `linear` on nf4 weights");
    let refused =
        refusal(Op::RmsNorm { norm: Norm { eps: 1e-5, plus_one: false }, unweighted: None }, &[x(64), bias])
            .unwrap();
    assert_eq!(refused, "cpu cannot run `rms_norm` on nf4 weights");
    let refused = refusal(linear(false), &[x(320), Type::new(Shape::matrix(64, 320), q4_k)]).unwrap();
    assert_eq!(
        refused,
        "cpu cannot run `linear` on q4_k weights with rows of 320: not a whole number of blocks"
    );
}
