//! Pinned memory that ranks share, on a GPU: a rank computes with the weights that another rank has written.
//!
//! Both ranks are this process, one after the other. The second one writes no frozen weights, and must find them.

use crate::decoder::{Choice, LAYERS, LOSS_CHUNK};
use crate::subject::{Outcome, Subject, plain_request, plan_with, roomy};
use smidgen_compile::Request;
use smidgen_compile::passes::{place, stream};
use smidgen_ir::{DeviceKind, LayerSet, LeafKind, Plan, Policy, Precision, Rank, Space, verify};
use smidgen_runtime::cuda::CudaOptions;
use smidgen_runtime::{Cuda, Device, Executor, SharedHost};

fn offloaded() -> Subject {
    let policy = Policy {
        weights: Space::Host,
        offloaded_weights: LayerSet::all(LAYERS),
        optimizer_state: Space::Host,
        window_bytes: 4000,
        ..Policy::resident(LayerSet::first(1), LOSS_CHUNK)
    };
    let mut subject = Choice { device: DeviceKind::Cuda, ..Choice::lora() }.subject_with(LayerSet::first(1));
    place::apply(&mut subject.graph, &policy, &subject.extent, (DeviceKind::Cuda, Rank::ONLY), 1);
    stream::apply(&mut subject.graph, &policy, &subject.extent);
    verify::expect_sound("stream", &verify::graph(&subject.graph));
    subject
}

/// The plan of the first of two ranks.
fn shared_plan(subject: &Subject) -> Plan {
    let rank = Rank { index: 0, of: 2 };
    let request =
        Request { device: DeviceKind::Cuda, rank, extent: roomy(subject.extent), ..plain_request() };
    plan_with(&subject.graph, &request)
}

fn outcome(subject: &Subject, shared: Option<SharedHost>) -> (Outcome, u64) {
    let plan = shared_plan(subject);
    let (host, is_shared) = (plan.host, shared.is_some());
    assert!(host.shared_bytes > 0 && host.bytes() > host.shared_bytes, "{host:?}");
    let cache = Some(std::env::temp_dir().join("smidgen-test-kernels"));
    let mut device =
        Cuda::open(&CudaOptions { ordinal: 0, precision: Precision::F32, cache, capability: None }).unwrap();
    let is_filler = shared.as_ref().is_none_or(SharedHost::is_filler);
    shared.into_iter().for_each(|shared| device.share_host(shared));
    let mut executor = Executor::load(plan, device).unwrap();
    let plan = executor.plan();
    let weights = plan
        .leaves(LeafKind::Weight)
        .filter(|(_, value)| value.buffer.is_some_and(|buffer| plan.buffer(buffer).space == Space::Host));
    for (id, _) in weights.collect::<Vec<_>>() {
        assert_eq!(executor.fills(id), is_filler);
    }
    let outcome = subject.run_once(&mut executor);
    let mapped = executor.device_mut().memory().unwrap().mapped_bytes;
    assert_eq!(mapped, if is_shared { host.bytes() as u64 } else { 0 });
    (outcome, host.shared_bytes as u64)
}

#[test]
fn the_plan_of_shared_memory_is_sound() {
    let subject = offloaded();
    subject.run_on_null(shared_plan(&subject)).unwrap();
}

#[test]
#[ignore = "needs a GPU"]
fn cuda_computes_with_weights_that_another_rank_wrote() {
    let subject = offloaded();
    let (own, bytes) = outcome(&subject, None);
    let shared = SharedHost::create(bytes as usize).unwrap();
    let opened = SharedHost::open(&shared.address(), bytes as usize).unwrap();
    let (filled, _) = outcome(&subject, Some(shared));
    let mut second = offloaded();
    let graph = second.graph.clone();
    second.contents.retain(|(leaf, _)| graph.value(*leaf).space != Space::Host);
    assert!(second.contents.len() + 7 * LAYERS <= subject.contents.len());
    let (found, _) = outcome(&second, Some(opened));
    for (what, other) in [("the rank that writes", filled), ("the other rank", found)] {
        assert_eq!(own.result, other.result, "{what}");
        for (name, gradient) in &own.gradients {
            assert_eq!(gradient, &other.gradients[name], "{what}: `{name}`");
        }
    }
}
