//! Measures the copy bandwidth between pinned memory and a GPU, one direction at a time.
//!
//! Timed with events on the GPU, after one copy to warm up. The buffers on both sides are freed afterwards.

use super::driver::{Event, Gpu, copy_to_device, copy_to_host, named};
use super::pinned::Pinned;
use crate::device::{DeviceError, DeviceError::Reserve};
use cudarc::driver::result;

/// Bytes per second to the GPU, and from it, with copies of `bytes` bytes.
pub fn transfer_rates(gpu: &Gpu, bytes: usize) -> Result<(f64, f64), DeviceError> {
    let mut pinned = Pinned::new(bytes)?;
    // Written once, so that no page faults are timed.
    pinned.slice_mut(0, bytes).fill(1);
    // SAFETY: the memory is freed once, below.
    let device = unsafe { result::malloc_sync(bytes) };
    let device = device.map_err(|_| Reserve { device: super::NAME, bytes })?;
    let rates = time(gpu, &mut pinned, device);
    let waited = gpu.wait();
    // SAFETY: allocated above, and no work that uses it is pending.
    named(unsafe { result::free_sync(device) }, "cuMemFree")?;
    waited.and(rates)
}

fn time(gpu: &Gpu, pinned: &mut Pinned, device: u64) -> Result<(f64, f64), DeviceError> {
    const COPIES: usize = 4;
    let bytes = pinned.bytes();
    let host = pinned.slice_mut(0, bytes).as_mut_ptr();
    let rate = |copy: &dyn Fn() -> Result<(), DeviceError>| -> Result<f64, DeviceError> {
        let (begin, end) = (Event::timed()?, Event::timed()?);
        copy()?;
        begin.record(gpu)?;
        for _ in 0..COPIES {
            copy()?;
        }
        end.record(gpu)?;
        end.wait()?;
        Ok((COPIES * bytes) as f64 / (1e-3 * f64::from(begin.milliseconds_until(&end)?)))
    };
    // SAFETY: both buffers have `bytes` bytes, and the caller waits before it frees either.
    let to_device = rate(&|| unsafe { copy_to_device(gpu, device, host, bytes) })?;
    // SAFETY: as above.
    let to_host = rate(&|| unsafe { copy_to_host(gpu, host, device, bytes) })?;
    Ok((to_device, to_host))
}
