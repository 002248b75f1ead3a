//! What the trainer does on devices that are not like the CPU, on the CPU behind a coat.
//!
//! A coat of lateness: a read that was begun has the bytes of that moment, as on a GPU whose stream went on. Rows,
//! checkpoints and adapter must be those of the plain CPU, and a step that is not finite must be named although another
//! has been lined up behind it. A narrow coat: gradients overflow where the loss is scaled by more than it bears, as in
//! f16; the step is done again with less, and nothing of that may be seen in the results.

use smidgen::internal::{
    Ending, Interrupt, Job, Journal, Progress, Purpose, RunDir, Trainer, find_checkpoint, plan_job,
    use_stored_algorithms,
};
use smidgen_ir::{Extent, Op, Precision, Space};
use smidgen_recipe::read_recipe;
use smidgen_runtime::device::{Address, Destination, DeviceMemory, Fill, FillError, READ_SLOTS, Reservation};
use smidgen_runtime::{BoundStep, Cpu, Device, DeviceError};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The CPU, whose begun reads keep what was there.
struct Late {
    cpu: Cpu,
    slots: [Vec<u8>; READ_SLOTS],
    /// How it says that it forms products.
    way: String,
}

impl Device for Late {
    fn name(&self) -> &'static str {
        "late"
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        self.cpu.reserve(spaces)
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.cpu.check(step, extent)
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        self.cpu.write(at, from);
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.read(at, into)
    }

    fn begin_read(&mut self, slot: usize, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        assert!(self.slots[slot].is_empty(), "slot {slot} is begun again before it was read");
        self.slots[slot] = vec![0; bytes];
        self.cpu.read(Address { space: Space::Device, offset }, &mut self.slots[slot])
    }

    fn finish_read(&mut self, slot: usize, _offset: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        into.copy_from_slice(&std::mem::take(&mut self.slots[slot]));
        Ok(())
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn chosen_algorithms(&self) -> Option<String> {
        Some(format!("a late device\n{}", self.way))
    }

    fn adopt_algorithms(&mut self, chosen: &str) -> bool {
        let way = chosen.strip_prefix("a late device\n").map(str::to_owned);
        self.way = way.clone().unwrap_or(std::mem::take(&mut self.way));
        way.is_some()
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.cpu.fill(to, fill)
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.cpu.run(step, extent)
    }
}

/// A device whose memory grows by a mebibyte each time that somebody looks.
struct Greedy {
    late: Late,
    bytes: u64,
}

impl Device for Greedy {
    fn name(&self) -> &'static str {
        "greedy"
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        self.late.reserve(spaces)
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.late.check(step, extent)
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        self.late.write(at, from);
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        self.late.read(at, into)
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.late.fill(to, fill)
    }

    fn memory(&mut self) -> Option<DeviceMemory> {
        self.bytes += 1 << 20;
        let bytes = self.bytes;
        Some(DeviceMemory { bytes, peak_bytes: bytes, free_bytes: 0, pinned_bytes: 0, mapped_bytes: 0 })
    }

    fn busy_percent(&mut self) -> Option<u32> {
        Some(87)
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.late.run(step, extent)
    }
}

/// The CPU, on which gradients of a loss that is scaled by more than `bears` overflow.
struct Narrow {
    cpu: Cpu,
    bears: f64,
}

impl Device for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        self.cpu.reserve(spaces)
    }

    fn check(&self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        self.cpu.check(&in_f32(step), extent)
    }

    fn write(&mut self, at: Address, from: &[u8]) {
        self.cpu.write(at, from);
    }

    fn read(&mut self, at: Address, into: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.read(at, into)
    }

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.cpu.fill(to, fill)
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        if let Op::GradNorm { .. } = step.op {
            let mut hyper = [0u8; 24];
            self.cpu.read(step.inputs[1].address(), &mut hyper)?;
            let scale = f64::from_le_bytes(hyper[16..].try_into().unwrap());
            if scale > self.bears {
                self.cpu.write(step.inputs[2].address(), &f32::INFINITY.to_le_bytes());
            }
        }
        self.cpu.run(&in_f32(step), extent)
    }
}

fn in_f32(step: &BoundStep) -> BoundStep {
    BoundStep { precision: Precision::F32, ..step.clone() }
}

fn late() -> Late {
    Late { cpu: Cpu::new(1).unwrap(), slots: Default::default(), way: "one by one".into() }
}

fn recipe(folder: &Path, lr: f64) -> PathBuf {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-gqa-tied/model");
    let mut rows = String::new();
    for row in 0..12 {
        let ids: Vec<String> =
            (0..9 + row % 5).map(|token| ((row * 7 + token * 3) % 30 + 1).to_string()).collect();
        rows += &format!("{{\"input_ids\":[{}]}}\n", ids.join(","));
    }
    std::fs::write(folder.join("rows.jsonl"), rows).unwrap();
    let text = format!(
        "[model]\npath = {:?}\ncompute = \"f32\"\n[adapter]\nrank = 2\n\
         [data]\ntrain = \"rows.jsonl\"\nformat = \"tokens\"\nmax_tokens = 32\n\
         [train]\nbatch = 3\nsteps = 11\nlr = {lr:e}\nwarmup = 0\nsave_every = 4\n\
         [memory]\ndevice = \"cpu\"\nthreads = 1\nbudget = \"64MiB\"\n[output]\ndir = \"unused\"\n",
        model.display().to_string()
    );
    let path = folder.join("recipe.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// Trains; the error if there was one, and the run folder.
fn train<D: Device>(recipe: &Path, name: &str, device: D) -> (Option<String>, PathBuf) {
    train_in(Precision::F32, recipe, name, device)
}

fn train_in<D: Device>(
    precision: Precision,
    recipe: &Path,
    name: &str,
    device: D,
) -> (Option<String>, PathBuf) {
    let mut job = Job::prepare(read_recipe(recipe, &[]).unwrap(), Purpose::Train).unwrap();
    job.request.precision = precision;
    let planned = plan_job(&job).unwrap();
    let output = recipe.with_file_name(name);
    let dir = RunDir::at(&output).unwrap();
    dir.make().unwrap();
    let mut journal = Journal::resume(dir.path(), 0).unwrap();
    let solution = planned.solution;
    let policy = solution.policy;
    let trainer = Trainer::load(&job, solution.plan, device, dir, policy, None).unwrap();
    let progress = Progress::new(11, 0, 0, true);
    let outcome =
        trainer.train(0, &mut journal, &progress, &Interrupt::never(), &mut |_| ControlFlow::Continue(()));
    (outcome.err().map(|failure| failure.message), output)
}

/// A run whose device takes more than was planned stops behind the step in which it is seen, and has saved it.
#[test]
fn a_run_above_its_plan_stops_and_saves() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), 1e-2);
    let job = Job::prepare(read_recipe(&recipe, &[]).unwrap(), Purpose::Train).unwrap();
    let solution = plan_job(&job).unwrap().solution;
    let dir = RunDir::at(&folder.path().join("run")).unwrap();
    dir.make().unwrap();
    let mut journal = Journal::resume(dir.path(), 0).unwrap();
    let policy = solution.policy;
    let device = Greedy { late: late(), bytes: 45 << 20 };
    let trainer = Trainer::load(&job, solution.plan, device, dir, policy, None).unwrap();
    let trainer = trainer.with_planned_peak(41 << 20);
    let progress = Progress::new(11, 0, 0, true);
    let trained =
        trainer.train(0, &mut journal, &progress, &Interrupt::never(), &mut |_| ControlFlow::Continue(()));
    let (outcome, _) = trained.unwrap();
    let Ending::Exceeded { bytes } = outcome.ending else { panic!("{:?}", outcome.ending) };
    assert!(bytes > 49 << 20, "{bytes}");
    let saved = folder.path().join("run").join(format!("checkpoint-{}", outcome.steps));
    assert!((2..11).contains(&outcome.steps) && saved.exists(), "{}", outcome.steps);
    let rows = std::fs::read_to_string(folder.path().join("run/metrics.jsonl")).unwrap();
    assert!(rows.lines().all(|row| row.contains("\"gpu_util\":87,")), "{rows}");
}

/// Step and loss of every row.
fn losses(run: &Path) -> Vec<(u64, f64)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let rows = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    rows.map(|row| (row["step"].as_u64().unwrap(), row["loss"].as_f64().unwrap())).collect()
}

fn assert_same(run: &Path, other: &Path) {
    assert_eq!(losses(run), losses(other));
    for part in ["adapter", "checkpoint-4", "checkpoint-8"] {
        let read = |run: &Path| std::fs::read(run.join(part).join("adapter_model.safetensors")).unwrap();
        assert_eq!(read(run), read(other), "{part}");
    }
}

#[test]
fn reports_that_come_late_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), 1e-2);
    let (failed, plain) = train(&recipe, "plain", Cpu::new(1).unwrap());
    assert_eq!(failed, None);
    let (failed, coated) = train(&recipe, "late", late());
    assert_eq!(failed, None);
    assert_eq!(losses(&plain).len(), 11);
    assert_same(&coated, &plain);
}

/// A checkpoint holds how its products were formed; a device that goes on from it takes that over, another says no.
#[test]
fn products_are_formed_as_the_checkpoint_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), 1e-2);
    let (failed, run) = train(&recipe, "late", late());
    assert_eq!(failed, None);
    let checkpoint = run.join("checkpoint-8");
    let mut other = Late { way: "all at once".into(), ..late() };
    assert_eq!(use_stored_algorithms(&mut other, &checkpoint), None);
    assert_eq!(other.way, "one by one");
    let obstacle = use_stored_algorithms(&mut Cpu::new(1).unwrap(), &checkpoint);
    assert_eq!(obstacle.unwrap(), "the matmul algorithms of this run were chosen on a late device");
    assert_eq!(use_stored_algorithms(&mut other, folder.path()), None, "nothing was kept");
}

#[test]
fn a_late_report_that_is_not_finite_is_named_as_an_early_one_is() {
    let folder = tempfile::tempdir().unwrap();
    // A rate at which numbers overflow after some updates.
    let recipe = recipe(folder.path(), 1e25);
    let (plain_failed, plain) = train(&recipe, "plain", Cpu::new(1).unwrap());
    let (late_failed, coated) = train(&recipe, "late", late());
    assert!(plain_failed.as_ref().is_some_and(|message| message.contains("not finite")), "{plain_failed:?}");
    assert_eq!(late_failed, plain_failed);
    assert_eq!(losses(&coated), losses(&plain), "rows before it");
}

#[test]
fn a_loss_that_is_scaled_too_much_is_scaled_less_and_gives_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), 1e-2);
    let (failed, plain) = train(&recipe, "plain", Cpu::new(1).unwrap());
    assert_eq!(failed, None);
    let narrow = Narrow { cpu: Cpu::new(1).unwrap(), bears: 1024.0 };
    let (failed, scaled) = train_in(Precision::F16, &recipe, "scaled", narrow);
    assert_eq!(failed, None);
    assert_same(&scaled, &plain);
    let start = find_checkpoint(&RunDir::at(&scaled).unwrap()).unwrap().unwrap();
    assert_eq!(start.state.loss_scale.map(|loss_scale| loss_scale.scale()), Some(1024.0));
    let start = find_checkpoint(&RunDir::at(&plain).unwrap()).unwrap().unwrap();
    assert_eq!(start.state.loss_scale, None);
}

#[test]
fn gradients_that_overflow_without_a_scale_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(folder.path(), 1e-2);
    let narrow = Narrow { cpu: Cpu::new(1).unwrap(), bears: 0.5 };
    let (failed, run) = train_in(Precision::F16, &recipe, "scaled", narrow);
    assert!(failed.as_ref().is_some_and(|message| message.contains("step 1 is not finite")), "{failed:?}");
    assert_eq!(losses(&run), []);
}
