//! What a plan says that it takes itself is what a copy of it takes: in a process of its own, whose allocations are
//! counted, and in one test, because tests of a process run side by side.

#[path = "it/shapes.rs"]
#[allow(dead_code, reason = "each test binary uses its part")]
mod shapes;

use smidgen_compile::adapter::{Layers, Targets};
use smidgen_compile::ladder::all_weights_away;
use smidgen_compile::{Context, Policy, Recompute, compile};
use smidgen_ir::Plan;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

static BYTES: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: every call goes to the system allocator unchanged; counting touches one atomic number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // As the GNU allocator hands it out.
        let bytes = (layout.size() + 8).next_multiple_of(16).max(32);
        BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn bytes_of_copy(plan: &Plan) -> u64 {
    let before = BYTES.load(Ordering::Relaxed);
    let copy = std::hint::black_box(plan.clone());
    let after = BYTES.load(Ordering::Relaxed);
    drop(copy);
    after - before
}

#[test]
fn a_plan_knows_what_it_takes_itself() {
    let spec = shapes::llama(64, 160, 7, (4, 2), 256, false);
    let request = shapes::request(spec, Targets::AllLinear, Layers::All, 512, 4);
    let away = Policy { away: all_weights_away(&request, 2), ..Policy::resident(Recompute::none(), 8) };
    let all = Policy::resident(Recompute::first(request.spec.layers), 8);
    for policy in [Policy::resident(Recompute::none(), 128), all, away] {
        let mut plan = compile(&request, &policy);
        let (own, bytes) = (plan.own_bytes() as u64, bytes_of_copy(&plan));
        assert!(own.abs_diff(bytes) < own / 20, "{own} with names of the usual length, {bytes} with its own");
        let with_steps = Context { bytes: 7, step_bytes: 100, operand_bytes: 10, ..Context::default() };
        let steps = || plan.entries.iter().flat_map(|entry| &entry.steps);
        let operands = steps().map(|step| step.inputs.len() + step.outputs.len() + step.updates.len());
        let bound = 7 + 100 * steps().count() as u64 + 10 * operands.sum::<usize>() as u64;
        assert_eq!(with_steps.bytes_for(&plan), bound);
        assert_eq!(Context { holds_plan: true, ..with_steps }.bytes_for(&plan), bound + own + own / 12);
        plan.values.iter_mut().for_each(|value| value.name.clear());
        assert_eq!(plan.own_bytes() as u64, own, "what is only looked at has no names");
        plan.values.iter_mut().for_each(|value| value.name = "name".repeat(8));
        // Its title, the list of entry points, and what a few operations have in lists of their own.
        let rest = bytes_of_copy(&plan) - own;
        assert!(rest < own / 50, "{rest} bytes of {own} are not counted");
    }
}
