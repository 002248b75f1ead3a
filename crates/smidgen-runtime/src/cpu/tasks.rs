//! Work cut into numbered tasks, and the workspace they run in.
//!
//! A task is a leaf: it starts no other task, so a thread is inside one task at a time and may use the
//! part of a workspace that has its number.
//! Which thread runs a task must not matter to the result; callers cut work by shape alone.
//! Left out: pools. The current rayon pool is used, and with one thread or one task, none.

use rayon::prelude::*;
use smidgen_ir::workspace::LINE_FLOATS;

/// Runs tasks `0..count`, in the current pool if there is more than one of them and of its threads.
pub fn run_tasks(count: usize, task: impl Fn(usize) + Sync + Send) {
    if count <= 1 || rayon::current_num_threads() == 1 {
        (0..count).for_each(task);
    } else {
        (0..count).into_par_iter().with_max_len(1).for_each(task);
    }
}

/// The number of the calling thread in the current pool; 0 outside, where tasks run one by one.
pub fn current_thread() -> usize {
    rayon::current_thread_index().unwrap_or(0)
}

/// The workspace from its first whole cache line on: vectors that straddle lines cost the kernel speed.
/// Takes less than [`LINE_FLOATS`] floats away.
pub fn aligned_floats(workspace: &mut [f32]) -> &mut [f32] {
    let skipped = workspace.as_ptr().align_offset(4 * LINE_FLOATS);
    &mut workspace[skipped..]
}
