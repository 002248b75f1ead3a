//! Facts about this machine: memory, processors, limits of its container, and other processes.
//!
//! Everything is read from files of the operating system. Where a fact cannot be read, it is unknown, not an error.
//! Left out: GPUs (`smidgen-runtime`) and disk space (`plan/disk.rs`).

mod cgroup;
pub mod host;
pub mod process_memory;
pub mod processes;
