//! The workspace that tasks run in.
//!
//! A task is a leaf: it starts no other task, so a thread is inside one task at a time and may use the
//! part of a workspace that has its number (`pool.rs`).

pub use super::pool::{current_thread, current_threads, run_tasks};
use smidgen_ir::workspace_cpu::LINE_FLOATS;

/// The workspace from its first whole cache line on: vectors that straddle lines cost the kernel speed.
/// Takes less than [`LINE_FLOATS`] floats away.
pub fn aligned_floats(workspace: &mut [f32]) -> &mut [f32] {
    let skipped = workspace.as_ptr().align_offset(4 * LINE_FLOATS);
    &mut workspace[skipped..]
}
