//! The reservation of the CPU device: one block of RAM, page-aligned, touched before use.
//!
//! Large pages are requested if the system has them: matmuls read more memory than the TLB covers with small pages.

use super::heap;
use super::pool::run_tasks;
use smidgen_ir::workspace_cpu::LINE_FLOATS;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

/// Size and alignment of a large page.
const LARGE_PAGE_BYTES: usize = 2 << 20;
/// Bytes that one task touches.
const TOUCH_BYTES: usize = 8 << 20;

#[derive(Debug)]
pub struct Arena {
    memory: Option<(NonNull<u8>, Layout)>,
}

// SAFETY: the block is plain memory that belongs to the arena; steps write disjoint or planned parts.
unsafe impl Send for Arena {}
// SAFETY: as above; shared access is through raw pointers whose users promise not to race.
unsafe impl Sync for Arena {}

impl Arena {
    pub fn empty() -> Arena {
        Arena { memory: None }
    }

    /// `None` if the system refuses. First returns the heap memory that tokenizing and planning have freed to the system,
    /// because the plan does not count it in addition to the arena.
    pub fn reserve(bytes: usize) -> Option<Arena> {
        heap::return_free_pages();
        if bytes == 0 {
            return Some(Arena::empty());
        }
        let alignment = if bytes >= LARGE_PAGE_BYTES { LARGE_PAGE_BYTES } else { 4096 };
        let layout = Layout::from_size_align(bytes, alignment).ok()?;
        // SAFETY: the layout has a size above zero.
        let pointer = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        if bytes >= LARGE_PAGE_BYTES {
            // SAFETY: the range is the block just allocated; the advice changes no content, and its
            // refusal only costs speed.
            unsafe { libc::madvise(pointer.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Some(Arena { memory: Some((pointer, layout)) })
    }

    /// Writes zeros everywhere, using all threads, so that every page is resident.
    pub fn touch(&self) {
        let bytes = self.len();
        let touch = |piece| {
            let start = piece * TOUCH_BYTES;
            let length = TOUCH_BYTES.min(bytes - start);
            // SAFETY: pieces are disjoint and inside the block.
            unsafe { self.pointer(start, length).write_bytes(0, length) };
        };
        run_tasks(bytes.div_ceil(TOUCH_BYTES), touch);
    }

    pub fn len(&self) -> usize {
        self.memory.map_or(0, |(_, layout)| layout.size())
    }

    /// The address of a range, which must be inside the reservation.
    pub fn pointer(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "{offset}+{bytes} leaves the reservation of {} bytes",
            self.len()
        );
        match self.memory {
            // SAFETY: the offset is at most the size of the block.
            Some((pointer, _)) => unsafe { pointer.as_ptr().add(offset) },
            None => NonNull::<u64>::dangling().as_ptr().cast(),
        }
    }

    /// Copies bytes between two ranges that do not overlap.
    pub fn copy(&mut self, from: usize, to: usize, bytes: usize) {
        assert!(
            from + bytes <= to || to + bytes <= from,
            "a copy of {bytes} bytes from {from} to {to} overlaps"
        );
        let (from, to) = (self.pointer(from, bytes), self.pointer(to, bytes));
        // SAFETY: both ranges are inside the block, to which `&mut self` has exclusive access, and they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }

    pub fn bytes_mut(&mut self, offset: usize, bytes: usize) -> &mut [u8] {
        let pointer = self.pointer(offset, bytes);
        // SAFETY: the range is inside the block, is initialised since `touch`, and `&mut self` excludes
        // every other user.
        unsafe { std::slice::from_raw_parts_mut(pointer, bytes) }
    }
}

/// The workspace from its first cache line boundary on, because vectors that straddle cache lines are slow. Skips fewer
/// than [`LINE_FLOATS`] floats.
pub fn aligned_floats(workspace: &mut [f32]) -> &mut [f32] {
    let skipped = workspace.as_ptr().align_offset(4 * LINE_FLOATS);
    &mut workspace[skipped..]
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some((pointer, layout)) = self.memory.take() {
            // SAFETY: the block came from `alloc` with this layout and is freed once.
            unsafe { dealloc(pointer.as_ptr(), layout) };
        }
    }
}
