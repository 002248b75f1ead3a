//! Freed memory of this process given back to the operating system.
//!
//! An allocator keeps what was freed; a plan that counts resident memory would have to count that too. What was read
//! and dropped before the reservation (a vocabulary, a parsed config) is returned by one call here.

/// Returns what the allocator can spare. Does nothing where the allocator has no such call.
pub fn return_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call takes no pointer, and may be made at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
