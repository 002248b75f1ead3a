//! Pinned staging buffers between host and GPU: a ring for small writes, a double buffer for weights.
//!
//! A write copies the caller's bytes into the ring and returns. The GPU fetches them in stream order, and the host
//! waits only when the ring wraps around to bytes that the GPU has not fetched yet. Weights are read into one half of
//! the double buffer while the GPU copies from the other half.

use super::driver::{self, Event, Gpu};
use super::pinned::Pinned;
use crate::device::{Destination, DeviceError, Fill, FillError, READ_SLOTS, SLOT_BYTES};

/// Bytes of each half.
const HALF_BYTES: usize = 16 << 20;
/// Parts of the ring, each with an event of its own.
const RING_PARTS: usize = 8;
const PART_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub struct Staging {
    halves: [(Pinned, Event); 2],
    ring: Pinned,
    events: Vec<Event>,
    /// The part of the ring that is being written, and how many bytes of it are used.
    part: usize,
    filled: usize,
    /// Buffers of pending small reads, and an event for each.
    slots: Pinned,
    arrivals: Vec<Event>,
    /// How often the host waited for the GPU.
    waits: u64,
}

impl Staging {
    pub fn new() -> Result<Staging, DeviceError> {
        let half = || Ok::<_, DeviceError>((Pinned::new(HALF_BYTES)?, Event::new()?));
        Ok(Staging {
            halves: [half()?, half()?],
            ring: Pinned::new(RING_PARTS * PART_BYTES)?,
            events: (0..RING_PARTS).map(|_| Event::new()).collect::<Result<_, _>>()?,
            part: 0,
            filled: 0,
            slots: Pinned::new(READ_SLOTS * SLOT_BYTES)?,
            arrivals: (0..READ_SLOTS).map(|_| Event::new()).collect::<Result<_, _>>()?,
            waits: 0,
        })
    }

    /// How often the host has waited for the GPU.
    pub fn waits(&self) -> u64 {
        self.waits
    }

    pub fn bytes(&self) -> usize {
        2 * HALF_BYTES + self.ring.bytes() + self.slots.bytes()
    }

    /// Enqueues a copy of a few bytes to the host, after everything launched so far.
    pub fn begin_read(&mut self, gpu: &Gpu, slot: usize, from: u64, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= SLOT_BYTES, "an asynchronous read of {bytes} bytes, at most {SLOT_BYTES}");
        let place = self.slots.slice_mut(slot * SLOT_BYTES, bytes).as_mut_ptr();
        // SAFETY: the slot is read after its event and not written before; the caller's range is reserved.
        unsafe { driver::copy_to_host(gpu, place, from, bytes)? };
        self.arrivals[slot].record(gpu)
    }

    /// Waits for a copy that [`Staging::begin_read`] enqueued, but not for anything launched after it.
    pub fn finish_read(&mut self, slot: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        self.arrivals[slot].wait()?;
        into.copy_from_slice(self.slots.slice_mut(slot * SLOT_BYTES, into.len()));
        Ok(())
    }

    /// Writes in stream order; the caller may reuse its buffer when this returns.
    pub fn write(&mut self, gpu: &Gpu, to: u64, from: &[u8]) -> Result<(), DeviceError> {
        let mut done = 0;
        while done < from.len() {
            if self.filled == PART_BYTES {
                self.next_part(gpu)?;
            }
            let bytes = (PART_BYTES - self.filled).min(from.len() - done);
            let first = self.part * PART_BYTES + self.filled;
            self.ring.slice_mut(first, bytes).copy_from_slice(&from[done..done + bytes]);
            let place = self.ring.pointer().wrapping_add(first);
            // SAFETY: a part of the ring is reused only after its event; the caller's range is reserved.
            unsafe { driver::copy_to_device(gpu, to + done as u64, place, bytes)? };
            // Copies from aligned addresses are faster.
            self.filled = (self.filled + bytes).next_multiple_of(16).min(PART_BYTES);
            done += bytes;
        }
        Ok(())
    }

    fn next_part(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        self.events[self.part].record(gpu)?;
        self.part = (self.part + 1) % RING_PARTS;
        self.filled = 0;
        // An event that was never recorded has happened.
        if !self.events[self.part].has_happened()? {
            self.waits += 1;
            self.events[self.part].wait()?;
        }
        Ok(())
    }

    /// Waits for the GPU and reads.
    pub fn read(&mut self, gpu: &Gpu, from: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        for half in &self.halves {
            half.1.wait()?;
        }
        self.waits += 1;
        let mut done = 0;
        while done < into.len() {
            let bytes = HALF_BYTES.min(into.len() - done);
            let half = &mut self.halves[0].0;
            let place = half.slice_mut(0, bytes).as_mut_ptr();
            // SAFETY: the half is pinned and waited for; the caller's range is reserved.
            unsafe { driver::copy_to_host(gpu, place, from + done as u64, bytes)? };
            gpu.wait()?;
            into[done..done + bytes].copy_from_slice(half.slice_mut(0, bytes));
            done += bytes;
        }
        Ok(())
    }

    /// Fills a value piece by piece, or through a temporary buffer if the source can only deliver it in one piece.
    pub fn fill<E>(
        &mut self,
        gpu: &Gpu,
        arena: u64,
        to: Destination,
        fill: Fill<'_, E>,
    ) -> Result<(), FillError<E>> {
        let mut whole = if to.in_one_piece { vec![0u8; to.bytes] } else { Vec::new() };
        if to.in_one_piece {
            fill(0, &mut whole).map_err(FillError::Source)?;
        }
        let (row_bytes, _) = to.rows.unwrap_or((1, 1));
        let most = (HALF_BYTES / row_bytes).max(1) * row_bytes;
        assert!(most <= HALF_BYTES, "a row of {row_bytes} bytes is longer than the staging buffer");
        for (index, first) in (0..to.bytes).step_by(most).enumerate() {
            let bytes = most.min(to.bytes - first);
            let (pinned, event) = &mut self.halves[index % 2];
            event.wait().map_err(FillError::Device)?;
            let piece = pinned.slice_mut(0, bytes);
            if to.in_one_piece {
                piece.copy_from_slice(&whole[first..first + bytes])
            } else {
                fill(first, piece).map_err(FillError::Source)?
            }
            let from = pinned.pointer();
            // SAFETY: a half is reused only after its event; the destination is inside the reservation.
            let copied = unsafe {
                match to.rows {
                    None => driver::copy_to_device(gpu, arena + (to.at.offset + first) as u64, from, bytes),
                    Some((row, stride)) => {
                        let place = arena + (to.at.offset + first / row * stride) as u64;
                        let (from, to) = ((from as u64, row), (place, stride));
                        let copy = driver::RowCopy { from, to, row_bytes: row, rows: bytes / row };
                        driver::copy_rows(gpu.stream, &copy)
                    }
                }
            };
            copied.and_then(|()| event.record(gpu)).map_err(FillError::Device)?;
        }
        Ok(())
    }
}
