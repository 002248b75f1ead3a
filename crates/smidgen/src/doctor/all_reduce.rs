//! Times an all-reduce of CPU ranks over MPI: one tensor, summed as a run would do it.
//!
//! The plan is written by hand: one buffer, one step. Every rank runs it. The slowest rank determines the time, because
//! no rank can finish before all have started.
//! Left out: GPU ranks, whose bandwidth NCCL's own tests measure.

use super::Check;
use crate::failure::Failure;
use serde_json::{Value, json};
use smidgen_ir::bytes::format_bytes;
use smidgen_ir::{
    Buffer, BufferId, Category, Cost, DeviceKind, Entry, EntryPlan, Extent, LeafKind, Lifetime, Op, Phase,
    Plan, PlannedValue, Precision, Rank, Shape, Space, SpaceSize, Step, Type, ValueId, ValueRole,
    graph::Leaf,
};
use smidgen_runtime::comm::{Comm, Mpi};
use smidgen_runtime::{Cpu, Executor};
use std::time::Instant;

const SIZES: [usize; 2] = [1 << 20, 16 << 20];
const ROUNDS: usize = 10;
/// The first exchanges set up connections.
const WARM_UP: usize = 3;

/// Measures; all ranks have to call this at the same time.
pub fn measure(rank: usize, size: usize) -> Result<Check, Failure> {
    let mpi = Mpi::start(rank, size).map_err(Failure::from)?;
    let name = mpi.name();
    let mut device = Cpu::new(1).map_err(Failure::device)?.with_comm(Box::new(mpi));
    let (mut words, mut facts) = (Vec::new(), Vec::new());
    for bytes in SIZES {
        let mut executor = Executor::load(all_reduce_plan(Rank { index: rank, of: size }, bytes), device)
            .map_err(Failure::from)?;
        let mut best_s = f64::INFINITY;
        for round in 0..WARM_UP + ROUNDS {
            let begin = Instant::now();
            executor.run(Entry::Update, &Extent::default()).map_err(Failure::from)?;
            // Waits until the all-reduce is done.
            executor.read_at(ValueId(0), 0, &mut [0; 4]).map_err(Failure::from)?;
            if round >= WARM_UP {
                best_s = best_s.min(begin.elapsed().as_secs_f64());
            }
        }
        device = executor.into_device();
        let gb_per_s = bytes as f64 / best_s / 1e9;
        words.push(format!("{} in {:.2} ms ({gb_per_s:.2} GB/s)", format_bytes(bytes as u64), 1e3 * best_s));
        facts.push(json!({ "bytes": bytes, "ms": 1e3 * best_s, "bytes_per_s": bytes as f64 / best_s }));
    }
    let finding = format!("{size} ranks over {name}, all-reduce of {}", words.join(", of "));
    Ok(Check::pass("all-reduce", finding).with(json!({ "ranks": size, "sizes": Value::Array(facts) })))
}

/// A plan with a single all-reduce.
fn all_reduce_plan(rank: Rank, bytes: usize) -> Plan {
    let ty = Type::f32(Shape::vector(bytes / size_of::<f32>()));
    Plan {
        title: "all-reduce".into(),
        extent: Extent::default(),
        device: DeviceKind::Cpu,
        precision: Precision::F32,
        decode_extent: None,
        threads: 1,
        encoder_layers: 0,
        persistent_bytes: bytes,
        transient_bytes: 0,
        has_ranks: true,
        host: SpaceSize::default(),
        disk: SpaceSize::default(),
        values: vec![PlannedValue {
            name: "sum".into(),
            ty,
            role: ValueRole::Leaf(Leaf::new(LeafKind::State)),
            buffer: Some(BufferId(0)),
            first_byte: 0,
            stride: None,
        }],
        buffers: vec![Buffer {
            space: Space::Device,
            offset: 0,
            bytes,
            category: Category::Workspace,
            lifetime: Lifetime::Run,
        }],
        entries: vec![EntryPlan {
            entry: Entry::Update,
            steps: vec![Step {
                op: Op::AllReduce(rank),
                inputs: vec![],
                outputs: vec![],
                updates: vec![ValueId(0)],
                workspace: None,
                awaits: vec![],
                phase: Phase::Update,
                layer: None,
                cost: Cost::default(),
            }],
            laps: vec![],
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_ir::verify;

    #[test]
    fn the_plan_is_sound() {
        let plan = all_reduce_plan(Rank { index: 1, of: 2 }, 1 << 20);
        verify::expect_sound("all_reduce_plan", &verify::plan(&plan));
        assert_eq!(plan.reserved_bytes(), 1 << 20);
    }
}
