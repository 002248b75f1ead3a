//! Device profiles: what a device does in a second, so that costs become milliseconds.
//!
//! A profile is an input of the compiler; nothing here measures anything.

use smidgen_ir::{Cost, Entry, Op, Plan, Precision};

#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    pub name: String,
    pub flops_per_s: f64,
    pub bytes_per_s: f64,
    /// Time that every step costs at least: dispatch to threads, or a launch.
    pub step_s: f64,
    /// Between the device and where its values lie else: pinned memory beside a GPU, a disk beside a CPU.
    pub fetch_bytes_per_s: f64,
    pub stow_bytes_per_s: f64,
}

impl Profile {
    /// A server core with AVX-512 sustains about 90 GFLOP/s in our f32 products, one with AMX about 400 in those
    /// of bf16; two share memory.
    pub fn cpu(threads: usize, precision: Precision) -> Profile {
        let threads = threads.max(1) as f64;
        Profile {
            name: "cpu".into(),
            flops_per_s: threads
                * match precision {
                    Precision::F32 => 90e9,
                    Precision::Bf16 | Precision::F16 => 400e9,
                },
            bytes_per_s: 8e9 * threads.min(4.0),
            step_s: 5e-6,
            fetch_bytes_per_s: 1.5e9,
            stow_bytes_per_s: 0.8e9,
        }
    }

    /// A data centre GPU of the Hopper kind in our products, or the plain units for f32.
    pub fn cuda(precision: Precision) -> Profile {
        Profile {
            name: "cuda".into(),
            flops_per_s: match precision {
                Precision::F32 => 45e12,
                Precision::Bf16 | Precision::F16 => 620e12,
            },
            bytes_per_s: 3.6e12,
            step_s: 4e-6,
            fetch_bytes_per_s: 50e9,
            stow_bytes_per_s: 50e9,
        }
    }

    pub fn seconds(&self, cost: Cost) -> f64 {
        self.step_s + (cost.flops / self.flops_per_s).max(cost.bytes / self.bytes_per_s)
    }

    /// One run of an entry point at the planned extent. What travels does so beside the work, one value in each
    /// direction at a time; a step that needs it waits.
    pub fn entry_seconds(&self, plan: &Plan, entry: Entry) -> f64 {
        let steps = &plan.entry(entry).steps;
        let (mut now, mut inward, mut outward) = (0.0f64, 0.0f64, 0.0f64);
        let mut over = vec![0.0; steps.len()];
        for (index, step) in steps.iter().enumerate() {
            let awaited = step.awaits.iter().map(|transfer| over[*transfer]).fold(now, f64::max);
            match step.op {
                Op::Fetch => {
                    inward = inward.max(awaited) + step.cost.bytes / self.fetch_bytes_per_s;
                    over[index] = inward;
                }
                Op::Stow => {
                    outward = outward.max(awaited) + step.cost.bytes / self.stow_bytes_per_s;
                    over[index] = outward;
                }
                Op::Stowed => now = awaited,
                _ => now = awaited + self.seconds(step.cost),
            }
        }
        now.max(inward).max(outward)
    }
}
