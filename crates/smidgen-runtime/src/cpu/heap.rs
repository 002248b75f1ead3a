//! Returns freed heap memory to the system: plans count the arena and memory in use, not what the allocator keeps.
//!
//! By default the GNU allocator raises its thresholds to the size of the largest freed block. Each thread that tokenized
//! may then keep 64 MiB of unused memory in addition to the arena. Two calls prevent that: one at the start of the
//! program, and one before the arena is reserved. They change the memory of the process, not how it is measured.
//! Left out: other allocators, whose settings are not changed.

/// Called at the start of a program that will reserve an arena: blocks of 128 KiB or more are mapped one by one, and no
/// thread keeps more than that free at the end of its heap. These are the allocator's initial values; setting them stops
/// it from raising them.
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
