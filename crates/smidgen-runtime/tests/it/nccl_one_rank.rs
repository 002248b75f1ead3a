//! NCCL with one rank on a GPU: every collective keeps the bytes.
//!
//! This shows that the library is found, that its functions are called correctly, and that its work ends. Sums over
//! several ranks are tested with MPI, which implements the same trait.

use cudarc::driver::result;
use smidgen_runtime::comm::{Comm, Nccl, Number, Span};
use smidgen_runtime::cuda::driver::{Event, Gpu, call_in_order};
use smidgen_runtime::cuda::libraries;
use smidgen_runtime::cuda::peers::Peers;
use smidgen_runtime::lane::Exchange;
use std::time::Duration;

#[test]
#[ignore = "needs a GPU"]
fn one_rank_keeps_its_bytes() {
    libraries::require().unwrap();
    let gpu = Gpu::open(0).unwrap();
    // SAFETY: the stream of a GPU whose context is current.
    let mut nccl = unsafe { Nccl::new(Nccl::unique_id().unwrap(), 0, 1, gpu.stream.cast()) }.unwrap();
    println!("{}", nccl.name());
    let values: Vec<f32> = (0..1000).map(|i| 0.37 * i as f32 - 100.0).collect();
    // SAFETY: the context is current; the copy is as long as the memory.
    let memory = unsafe {
        let memory = result::malloc_sync(4000).unwrap();
        result::memcpy_htod_sync(memory, &values).unwrap();
        memory
    };
    result::ctx::synchronize().unwrap();
    let span = Span { pointer: memory as *mut u8, bytes: 4000 };
    // SAFETY: memory of this test.
    unsafe {
        nccl.all_reduce(&[(span, Number::F32)]).unwrap();
        nccl.all_reduce(&[(span, Number::F64)]).unwrap();
        nccl.reduce_scatter(span, &[0..4000]).unwrap();
        nccl.all_gather(span, &[0..4000]).unwrap();
        nccl.broadcast(span, 0).unwrap();
    }
    nccl.barrier().unwrap();
    nccl.check_async().unwrap();
    let mut back = vec![0.0f32; 1000];
    // SAFETY: the copy is as long as the memory, which is not used again.
    unsafe {
        result::memcpy_dtoh_sync(&mut back, memory).unwrap();
        result::free_sync(memory).unwrap();
    }
    assert_eq!(back, values);
    nccl.handles().abort().unwrap();
}

/// An exchange that does not end is aborted after the limit.
#[test]
#[ignore = "needs a GPU"]
fn an_exchange_that_does_not_end_is_aborted() {
    libraries::require().unwrap();
    let gpu = Gpu::open(0).unwrap();
    let mut peers = Peers::nccl(Nccl::unique_id().unwrap(), 0, 1).unwrap();
    peers.set_limit(Duration::from_millis(300));
    // SAFETY: the context is current.
    let memory = unsafe { result::malloc_sync(4000).unwrap() };
    let exchange = Exchange::Sum(vec![(Span { pointer: memory as *mut u8, bytes: 4000 }, Number::F32)]);
    let finished = Event::new().unwrap();
    // SAFETY: memory of this test, which nothing else uses.
    unsafe { peers.begin(&gpu, &exchange, &[], &finished, &|_, _, _| Ok(())).unwrap() };
    finished.wait().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(peers.progress().counts(), (1, 1));
    assert!(peers.failure().is_none());
    // For the stream, a callback that sleeps looks like a peer that does not answer.
    if let Peers::Nccl { watch, stream, .. } = &peers {
        watch.begin(stream.handle).unwrap();
        call_in_order(stream, || std::thread::sleep(Duration::from_secs(2))).unwrap();
        watch.end(stream.handle).unwrap();
    }
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(peers.progress().counts(), (2, 1));
    let error = peers.failure().expect("it took longer than the limit").to_string();
    assert!(error.contains("did not end within"), "{error}");
    // SAFETY: nothing uses the memory any more.
    unsafe { result::free_sync(memory).unwrap() };
}
