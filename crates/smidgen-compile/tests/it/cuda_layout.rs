//! The memory layout of training plans for a GPU, for several families, storages, forms and ranks.
//!
//! A device may write h into spare columns of x, and dh into those of dy, for one matmul with both matrices. So no other
//! value may use these columns while x and dy are in use, down to the last row; and if a weight is stored in the type of
//! matmuls, A and B must be stored next to it. What the matmuls compute is tested in the runtime.

use crate::shapes;
use serde_json::json;
use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::leaves::rounded_name;
use smidgen_compile::model::read_spec;
use smidgen_compile::{AdapterForm, DecoderSpec, Request, compile};
use smidgen_ir::plan::align_up;
use smidgen_ir::workspace_cuda::{COLUMN_STEP, MATMUL_BYTES, spare_columns};
use smidgen_ir::{
    Block, Code4, DType, DeviceKind, Extent, LayerSet, Lifetime, Op, Plan, PlannedValue, Policy, Precision,
    Step, Storage, ValueId, ValueRole, verify,
};
use std::ops::Range;

const LAYERS: usize = 2;
const BF16: Storage = Storage::Plain(DType::Bf16);
const NF4: Storage = Storage::Bnb4 { code: Code4::Nf4, double: true };
const Q8_0: Storage = Storage::Gguf(Block::Q8_0);
const FORMS: [AdapterForm; 3] = [AdapterForm::Lora, AdapterForm::Dora, AdapterForm::Fourier { reg: 0.5 }];

/// A model with widths that every storage supports.
fn spec(model_type: &str, intermediate: usize) -> DecoderSpec {
    let config = json!({
        "model_type": model_type, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
        "hidden_size": 64, "intermediate_size": intermediate, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 72,
        "max_position_embeddings": 64, "original_max_position_embeddings": 64, "sliding_window": 7,
        "rope_theta": 1e4,
    });
    read_spec(&config).unwrap()
}

/// Adapters on every linear of the layers, with the weights in one storage.
fn request(spec: DecoderSpec, storage: Storage, form: AdapterForm, rank: usize, dropout: f32) -> Request {
    let mut request = shapes::request(spec, Targets::AllLinear, Layers::All, 6, 2);
    for module in &mut request.adapters {
        module.rank = rank;
        request.storage.insert(format!("{}.weight", module.path), storage);
    }
    let (device, precision) = (DeviceKind::Cuda, Precision::Bf16);
    Request { form, dropout, device, precision, ..request }
}

fn plan(request: &Request, recompute: LayerSet) -> Plan {
    let plan = compile(request, &Policy::resident(recompute, 3));
    assert_eq!(verify::plan(&plan), Vec::<String>::new(), "{request:?}");
    plan
}

/// Calls `check` with a request and its plan, for every combination.
fn for_each_plan(mut check: impl FnMut(&str, &Request, &Plan)) {
    for family in ["llama", "qwen2", "phi3", "gemma2"] {
        for storage in [BF16, NF4, Q8_0] {
            for form in FORMS {
                for (rank, dropout) in [(3, 0.0), (8, 0.1), (16, 0.0), (64, 0.1)] {
                    let request = request(spec(family, 128), storage, form, rank, dropout);
                    let recompute = if rank == 16 { LayerSet::first(LAYERS) } else { LayerSet::none() };
                    let name = format!("{family} {storage} {form:?} rank {rank}");
                    check(&name, &request, &plan(&request, recompute));
                }
            }
        }
    }
}

fn is_fourier(request: &Request) -> bool {
    matches!(request.form, AdapterForm::Fourier { .. })
}

fn rounded(plan: &Plan, name: &str) -> ValueId {
    plan.leaf_named(&rounded_name(name)).unwrap_or_else(|| panic!("`{name}` is not rounded"))
}

fn steps(plan: &Plan) -> impl Iterator<Item = &Step> {
    plan.entries.iter().flat_map(|entry| &entry.steps)
}

fn columns(plan: &Plan, id: ValueId) -> usize {
    plan.value(id).ty.shape.at(&plan.extent).1
}

/// x, weight, h and B of each linear with an adapter.
fn adapted_linears(plan: &Plan) -> Vec<[ValueId; 4]> {
    let adapted = steps(plan).filter(|step| matches!(step.op, Op::Linear { lora: Some(_), .. }));
    adapted
        .map(|step| match step.inputs[..] {
            [x, weight, .., h, b] => [x, weight, h, b],
            _ => unreachable!("an adapted linear has h and B"),
        })
        .collect()
}

/// The bytes of each row, without the gaps between rows.
fn rows_of(plan: &Plan, value: &PlannedValue) -> Vec<Range<usize>> {
    rows_between(plan, value, |columns, _| 0..columns)
}

/// The spare bytes after each row, which a device may use.
fn spare_of(plan: &Plan, value: &PlannedValue) -> Vec<Range<usize>> {
    rows_between(plan, value, |columns, stride| columns..stride)
}

fn rows_between(
    plan: &Plan,
    value: &PlannedValue,
    elements: impl Fn(usize, usize) -> Range<usize>,
) -> Vec<Range<usize>> {
    let buffer = plan.buffer(value.buffer.expect("only placed values"));
    let extent = plan.extent_of_lifetime(buffer.lifetime);
    let first = buffer.offset + value.first_byte;
    let (Some(dtype), Some(stride)) = (value.ty.storage.plain(), value.stride) else {
        let bytes = first..first + value.ty.bytes(&extent);
        return if elements(1, 1).is_empty() { vec![] } else { vec![bytes] };
    };
    let (rows, columns) = value.ty.shape.at(&extent);
    let part = elements(columns, stride);
    let at = |row: usize, column: usize| first + (row * stride + column) * dtype.bytes();
    (0..rows).map(|row| at(row, part.start)..at(row, part.end)).collect()
}

fn meet(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

#[test]
fn a_weight_in_the_type_of_matmuls_has_its_adapter_next_to_it() {
    for_each_plan(|name, request, plan| {
        for module in &request.adapters {
            let weight = plan.leaf_named(&format!("{}.weight", module.path)).unwrap();
            let [a, b] = [module.a_name(), module.b_name()].map(|name| plan.value(rounded(plan, &name)));
            let (rows, columns) = plan.value(weight).ty.shape.at(&Extent::default());
            let weight = plan.value(weight);
            let has_room = weight.ty.storage == BF16 && !is_fourier(request);
            let place = format!("{name}: {}", module.path);
            if !has_room {
                assert_eq!(weight.stride, None, "{place}");
                for matrix in [a, b] {
                    assert_eq!((matrix.stride, matrix.first_byte), (None, 0), "{place}");
                    let shares = |other: &PlannedValue| {
                        other.buffer == matrix.buffer && !matches!(other.role, ValueRole::Slice(_))
                    };
                    let sharing = plan.values.iter().filter(|other| shares(other)).count();
                    assert_eq!(sharing, 1, "{place}: `{}` shares its buffer", matrix.name);
                }
                continue;
            }
            let spare = spare_columns(module.rank);
            let stride = columns + spare;
            assert_eq!((weight.stride, weight.first_byte), (Some(stride), 0), "{place}");
            assert_eq!(
                (b.buffer, b.stride, b.first_byte),
                (weight.buffer, Some(stride), 2 * columns),
                "{place}"
            );
            let beneath = 2 * rows * stride;
            assert_eq!((a.buffer, a.stride, a.first_byte), (weight.buffer, Some(stride), beneath), "{place}");
            // The device multiplies with all spare columns and rows, so the buffer must include them.
            let bytes = plan.buffer(weight.buffer.unwrap()).bytes;
            assert_eq!(bytes, 2 * (rows + spare) * stride, "{place}");
            for matrix in [weight, a, b] {
                assert!(stride.is_multiple_of(8) && matrix.first_byte.is_multiple_of(16), "{place}");
            }
        }
    });
}

#[test]
fn operands_that_are_multiplied_with_an_adapter_have_spare_columns() {
    for_each_plan(|name, request, plan| {
        let adapted = adapted_linears(plan);
        assert_eq!(adapted.is_empty(), is_fourier(request), "{name}");
        let spare = spare_columns(request.adapters[0].rank);
        let has_room = |id: ValueId| {
            let value = plan.value(id);
            let stride = value.stride.unwrap_or(0);
            assert!(stride >= columns(plan, id) + spare, "{name}: `{}` has rows of {stride}", value.name);
            let buffer = plan.buffer(value.buffer.unwrap());
            let rows = value.ty.shape.at(&plan.extent_of_lifetime(buffer.lifetime)).0;
            assert!(buffer.bytes >= 2 * rows * stride, "{name}: the last row of `{}` is short", value.name);
        };
        for [x, ..] in &adapted {
            has_room(*x);
        }
        let mut gradients = 0;
        for step in steps(plan).filter(|step| matches!(step.op, Op::LinearGrad { .. })) {
            let terms: Vec<(ValueId, ValueId)> =
                step.inputs.chunks(2).map(|term| (term[0], term[1])).collect();
            for module in &request.adapters {
                let a = rounded(plan, &module.a_name());
                let weight = plan.leaf_named(&format!("{}.weight", module.path)).unwrap();
                if is_fourier(request) || !terms.iter().any(|(_, matrix)| *matrix == a) {
                    continue;
                }
                // The gradient of x is dy·W + dh·A; for a fused linear, A is stored below the rows of its last part.
                let parts =
                    terms.iter().filter(|(_, matrix)| plan.value(*matrix).role.whole(*matrix) == weight);
                let first_row = |id: ValueId| plan.value(id).role.first_row();
                // With dropout, the adapter's part of the gradient passes the mask separately.
                if let Some((d, _)) = parts.max_by_key(|(_, matrix)| first_row(*matrix)) {
                    has_room(*d);
                    gradients += 1;
                }
            }
        }
        let together = !is_fourier(request) && (request.dropout == 0.0 || request.form == AdapterForm::Dora);
        assert_eq!(gradients > 0, together, "{name}: {gradients} gradients with A in them");
    });
}

/// Only operands of matmuls have spare columns, and no more than the rank needs.
#[test]
fn nothing_else_has_gaps_between_its_rows() {
    for_each_plan(|name, request, plan| {
        let spare = spare_columns(request.adapters[0].rank);
        for value in &plan.values {
            let Some(stride) = value.stride else { continue };
            assert!(!is_fourier(request), "{name}: `{}` has rows of {stride}", value.name);
            let (_, columns) = value.ty.shape.at(&plan.extent);
            match value.role {
                ValueRole::Temp => assert_eq!(stride, columns + spare, "{name}: `{}`", value.name),
                ValueRole::Leaf(_) | ValueRole::Slice(_) => assert_eq!(value.ty.storage, BF16, "{name}"),
            }
        }
    });
}

/// A weight in another storage is decoded into scratch, with the same room for the adapter; a weight in the type of matmuls
/// needs no such scratch.
#[test]
fn weights_in_other_storages_have_scratch_to_be_decoded_in() {
    for_each_plan(|name, request, plan| {
        let spare = spare_columns(request.adapters[0].rank);
        for step in steps(plan).filter(|step| matches!(step.op, Op::Linear { lora: Some(_), .. })) {
            let weight = plan.value(step.inputs[1]);
            let (rows, columns) = weight.ty.shape.at(&plan.extent);
            let given = step.workspace.map_or(0, |id| plan.buffer(id).bytes);
            let decoded =
                if weight.ty.storage == BF16 { 0 } else { align_up(2 * (rows + spare) * (columns + spare)) };
            assert_eq!(given, decoded + MATMUL_BYTES, "{name}: `{}`", weight.name);
        }
    });
}

/// No leaves share bytes, and at every step no value in use shares bytes with the spare columns of another.
#[test]
fn spare_columns_belong_to_nobody_else() {
    for (family, storage, form, dropout) in [
        ("llama", BF16, AdapterForm::Lora, 0.0),
        ("phi3", BF16, AdapterForm::Dora, 0.1),
        ("gemma2", NF4, AdapterForm::Lora, 0.1),
        ("qwen2", Q8_0, AdapterForm::Dora, 0.0),
    ] {
        for recompute in [LayerSet::none(), LayerSet::first(LAYERS)] {
            let request = request(spec(family, 128), storage, form, 3, dropout);
            let plan = plan(&request, recompute);
            leaves_are_apart(family, &plan);
            let spares = spare_columns_are_free(family, &plan);
            assert!(spares > 100, "{family}: only {spares} values have spare columns");
        }
    }
}

fn leaves_are_apart(name: &str, plan: &Plan) {
    let leaves = plan.values.iter().filter(|value| matches!(value.role, ValueRole::Leaf(_)));
    let placed = leaves
        .filter(|value| value.buffer.is_some_and(|buffer| plan.buffer(buffer).lifetime == Lifetime::Run));
    let mut rows: Vec<(Range<usize>, &str)> = placed
        .flat_map(|value| rows_of(plan, value).into_iter().map(|row| (row, value.name.as_str())))
        .collect();
    rows.sort_by_key(|(row, _)| row.start);
    for pair in rows.windows(2) {
        assert!(!meet(&pair[0].0, &pair[1].0), "{name}: `{}` and `{}` share bytes", pair[0].1, pair[1].1);
    }
}

/// Returns how many values with spare columns were checked.
fn spare_columns_are_free(name: &str, plan: &Plan) -> usize {
    let mut checked = 0;
    for entry in &plan.entries {
        for (index, step) in entry.steps.iter().enumerate() {
            let is_in_use = |value: &&PlannedValue| {
                value.buffer.is_some_and(|id| plan.buffer(id).lifetime.covers(entry.entry, index))
            };
            let mut taken: Vec<(Range<usize>, &str)> = plan
                .values
                .iter()
                .filter(is_in_use)
                .flat_map(|value| rows_of(plan, value).into_iter().map(|row| (row, value.name.as_str())))
                .collect();
            taken.extend(step.workspace.map(|id| {
                let buffer = plan.buffer(id);
                (buffer.offset..buffer.end(), "workspace")
            }));
            taken.sort_by_key(|(row, _)| row.start);
            let ends: Vec<usize> = taken
                .iter()
                .scan(0, |end, (row, _)| {
                    *end = row.end.max(*end);
                    Some(*end)
                })
                .collect();
            let temps = plan.values.iter().filter(is_in_use).filter(|value| value.role == ValueRole::Temp);
            for value in temps.filter(|value| value.stride.is_some()) {
                checked += 1;
                for spare in spare_of(plan, value) {
                    let before = taken.partition_point(|(row, _)| row.start < spare.end);
                    // The furthest end among all that begin before the spare columns end.
                    if before > 0 && ends[before - 1] > spare.start {
                        let (_, other) =
                            taken[..before].iter().rfind(|(row, _)| row.end > spare.start).unwrap();
                        panic!(
                            "{name}, {} {index}: `{other}` uses spare columns of `{}`",
                            entry.entry, value.name
                        );
                    }
                }
            }
        }
    }
    checked
}

/// A GPU may compute the gradients of B and of h in one kernel, some tokens at a time: it still reads h when it writes the
/// first rows of dh, and both steps share their scratch.
#[test]
fn values_of_fused_gradients_do_not_overlap() {
    let mut pairs = 0;
    for_each_plan(|name, _, plan| {
        for pair in plan.entries.iter().flat_map(|entry| entry.steps.windows(2)) {
            let [outer, inner] = pair else { unreachable!("windows of two") };
            let is_pair = matches!(outer.op, Op::WeightGrad { .. })
                && matches!(&inner.op, Op::LinearGrad { scales } if scales.len() == 1)
                && outer.inputs[0] == inner.inputs[0];
            if !is_pair {
                continue;
            }
            pairs += 1;
            let buffer = |id: ValueId| plan.buffer(plan.value(id).buffer.unwrap());
            let (h, dh) = (buffer(outer.inputs[1]), buffer(inner.outputs[0]));
            assert!(h.end() <= dh.offset || dh.end() <= h.offset, "{name}: dh overlaps h");
            assert_eq!(outer.workspace, inner.workspace, "{name}: two scratches");
        }
    });
    assert!(pairs > 100, "{pairs} pairs");
}

/// If spare columns would not keep rows at multiples of 16 bytes, nothing is stored next to a weight.
#[test]
fn rows_that_would_not_stay_aligned_get_no_spare_columns() {
    let width: usize = 100;
    assert!(!width.is_multiple_of(COLUMN_STEP));
    let plan = plan(&request(spec("llama", width), BF16, AdapterForm::Lora, 8, 0.0), LayerSet::none());
    let mut narrow = 0;
    for value in plan.values.iter().filter(|value| value.stride.is_some()) {
        let columns = value.ty.shape.at(&plan.extent).1;
        assert_ne!(columns, width, "`{}` has a stride", value.name);
        narrow += 1;
    }
    assert!(narrow > 0);
    let weight = plan.leaf_named("model.layers.0.mlp.down_proj.weight").unwrap();
    let b = rounded(&plan, "model.layers.0.mlp.down_proj.lora_B.weight");
    assert_ne!(plan.value(weight).buffer, plan.value(b).buffer);
}

/// Nothing is joined on a CPU, nor with matmuls in f32.
#[test]
fn other_plans_of_the_same_requests_have_no_gaps() {
    for family in ["llama", "phi3"] {
        for form in FORMS {
            let cuda = request(spec(family, 128), BF16, form, 8, 0.1);
            for (device, precision) in [
                (DeviceKind::Cpu, Precision::F32),
                (DeviceKind::Cpu, Precision::Bf16),
                (DeviceKind::Cuda, Precision::F32),
            ] {
                let plan = plan(&Request { device, precision, ..cuda.clone() }, LayerSet::none());
                let strided = plan.values.iter().filter(|value| value.stride.is_some());
                let shifted = plan.values.iter().filter(|value| value.first_byte > 0);
                assert_eq!((strided.count(), shifted.count()), (0, 0), "{family} {device:?} {precision:?}");
                assert!(plan.values.iter().all(|value| !value.name.ends_with(" rounded")));
            }
        }
    }
}
