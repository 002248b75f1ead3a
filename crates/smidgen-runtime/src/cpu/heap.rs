//! Freed memory goes back to the system: plans count the arena and what is in use, not what an allocator keeps.
//!
//! Left alone, the GNU allocator raises its thresholds to the largest block that was freed: then every thread that
//! tokenized may keep 64 MiB that nobody uses while the arena is reserved next to it. Two calls prevent that, one when the
//! program starts and one before the arena is reserved. They change what the process takes, not how it is measured.
//! Left out: other allocators, which are left as they are.

/// For the start of a program: blocks from 128 KiB on are mapped one by one, and no thread keeps more than that free at
/// the end of its heap. These are the values that the allocator itself begins with; setting them keeps them.
pub fn return_freed_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: both only decide when memory is taken from the system and returned.
    unsafe {
        const BYTES: libc::c_int = 128 << 10;
        libc::mallopt(libc::M_MMAP_THRESHOLD, BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, BYTES);
    }
}

/// Returns the free pages between blocks that are in use.
pub fn return_free_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: only pages that no allocation uses are returned.
    unsafe {
        libc::malloc_trim(0)
    };
}
