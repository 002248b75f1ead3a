//! Memory that comes and goes around a run, and devices that give less than they promised.
//!
//! What can be had is told by the test. Whatever happens, a run has the losses of one that was left alone, within the
//! rounding of sums that are cut elsewhere; to the bit where they are not.

use smidgen::internal::{
    Checkpoint, Contents, Ending, FreeMemory, Interrupt, Job, Journal, MemoryFacts, Progress, Purpose, Ready,
    Run, RunDir, RunOptions, RunResult, Trainer, find_checkpoint, plan_job,
};
use smidgen_ir::{Extent, Op};
use smidgen_recipe::read_recipe;
use smidgen_runtime::device::{Address, Destination, DeviceMemory, Fill, FillError, Reservation};
use smidgen_runtime::{BoundStep, Cpu, Device, DeviceError};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// What is asked for is told in this order; the last for ever.
#[derive(Debug)]
struct Told(VecDeque<u64>);

impl FreeMemory for Told {
    fn reachable_bytes(&mut self, _device: Option<DeviceMemory>, _held_bytes: u64) -> Option<u64> {
        if self.0.len() > 1 { self.0.pop_front() } else { self.0.front().copied() }
    }

    fn noise_bytes(&self) -> u64 {
        0
    }
}

/// The CPU, which reserves no more than `most` bytes and runs micro-batches of no more than `tokens`.
struct Stingy {
    cpu: Cpu,
    most: usize,
    tokens: usize,
    /// What it says it takes: the process has other tests in it.
    bytes: u64,
    /// What a reservation fails with.
    fails: Option<fn(usize) -> DeviceError>,
    /// Micro-batches that were run.
    micro_batches: Rc<Cell<usize>>,
}

impl Device for Stingy {
    fn name(&self) -> &'static str {
        "stingy"
    }

    fn reserve(&mut self, spaces: &Reservation) -> Result<(), DeviceError> {
        match self.fails {
            Some(fails) => Err(fails(spaces.device)),
            None if spaces.device > self.most => {
                Err(DeviceError::Reserve { device: "stingy", bytes: spaces.device })
            }
            None => self.cpu.reserve(spaces),
        }
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

    fn fill<E>(&mut self, to: Destination, fill: Fill<'_, E>) -> Result<(), FillError<E>> {
        self.cpu.fill(to, fill)
    }

    fn memory(&mut self) -> Option<DeviceMemory> {
        let bytes = self.bytes;
        Some(DeviceMemory { bytes, peak_bytes: bytes, free_bytes: 0, pinned_bytes: 0, mapped_bytes: 0 })
    }

    fn run(&mut self, step: &BoundStep, extent: &Extent) -> Result<(), DeviceError> {
        // What every micro-batch begins with, and nothing else has.
        if let Op::Embed { .. } = step.op {
            self.micro_batches.set(self.micro_batches.get() + 1);
            if extent.tokens > self.tokens {
                return Err(DeviceError::Violation("no memory for so many tokens".into()));
            }
        }
        self.cpu.run(step, extent)
    }
}

fn generous() -> Stingy {
    Stingy {
        cpu: Cpu::new(1).unwrap(),
        most: usize::MAX,
        tokens: usize::MAX,
        bytes: 10 << 20,
        fails: None,
        micro_batches: Rc::default(),
    }
}

struct Scene {
    folder: tempfile::TempDir,
}

/// How a run went, and what it said.
struct Account {
    result: Result<RunResult, String>,
    said: Vec<String>,
}

impl Scene {
    /// Twelve samples of 200 to 300 tokens, the longest in the second of two steps.
    fn new() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let mut rows = String::new();
        for row in 0..12 {
            let length = if row == 10 { LONGEST } else { 200 + 10 * (row % 5) };
            let ids: Vec<String> =
                (0..length).map(|token| ((row * 7 + token * 3) % 30 + 1).to_string()).collect();
            rows += &format!("{{\"input_ids\":[{}]}}\n", ids.join(","));
        }
        std::fs::write(folder.path().join("rows.jsonl"), rows).unwrap();
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/llama-gqa-tied/model");
        let text = format!(
            "[model]\npath = {:?}\ncompute = \"f32\"\n[adapter]\nrank = 2\ndropout = 0.1\n\
             [data]\ntrain = \"rows.jsonl\"\nformat = \"tokens\"\nmax_tokens = 512\nshuffle = false\n\
             [train]\nbatch = 6\nsteps = 12\nlr = 1e-2\nwarmup = 0\nsave_every = 4\n\
             [memory]\ndevice = \"cpu\"\nthreads = 1\nbudget = \"512MiB\"\n[output]\ndir = \"run\"\n",
            model.display().to_string()
        );
        std::fs::write(folder.path().join("recipe.toml"), text).unwrap();
        Scene { folder }
    }

    fn job(&self, overrides: &[&str]) -> Job {
        let overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
        let recipe = read_recipe(&self.folder.path().join("recipe.toml"), &overrides).unwrap();
        Job::prepare(recipe, Purpose::Train).unwrap()
    }

    fn run_folder(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Peaks of the plan that has all it wants and of the leanest.
    fn peaks(&self) -> (u64, u64) {
        let planned = plan_job(&self.job(&[])).unwrap();
        assert!(planned.fits);
        let leanest = plan_job(&self.job(&["memory.budget=1B"])).unwrap();
        assert!(!leanest.fits);
        (planned.solution.peak_bytes, leanest.solution.peak_bytes)
    }

    fn run(&self, name: &str, overrides: &[&str], device: impl Device, reachable: &[u64]) -> Account {
        self.run_from(name, overrides, device, reachable, None)
    }

    fn run_from(
        &self,
        name: &str,
        overrides: &[&str],
        device: impl Device,
        reachable: &[u64],
        start: Option<Checkpoint>,
    ) -> Account {
        let job = self.job(overrides);
        let (planned, dir) = (plan_job(&job).unwrap(), RunDir::at(&self.run_folder(name)).unwrap());
        let said = RefCell::new(Vec::new());
        let options = RunOptions {
            recipe_text: "",
            resumes: start.is_some(),
            accepts_changes: false,
            quiet: true,
            is_monitored: true,
            owns_process: true,
            say: &|line| said.borrow_mut().push(line.to_string()),
            on_step: &mut |_| ControlFlow::Continue(()),
        };
        let free_memory = &mut Told(reachable.iter().copied().collect());
        let run = Run { job: &job, dir: &dir, free_memory, team: None, options };
        let ready =
            Ready { start, facts: MemoryFacts::of(&job), planned, device, contents: Contents::default() };
        let result = run.run(ready).map_err(|failure| failure.to_string());
        Account { result, said: said.into_inner() }
    }

    fn plan(&self, name: &str) -> serde_json::Value {
        let text = std::fs::read(self.run_folder(name).join("plan.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn losses(&self, name: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.run_folder(name).join("metrics.jsonl")).unwrap_or_default();
        let rows: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let steps: Vec<u64> = rows.iter().map(|row| row["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, (1..=rows.len() as u64).collect::<Vec<u64>>(), "{name}");
        rows.iter().map(|row| row["loss"].as_f64().unwrap()).collect()
    }

    fn adapter(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.run_folder(name).join("adapter/adapter_model.safetensors")).unwrap()
    }

    fn assert_close(&self, name: &str, other: &str) {
        let (one, other) = (self.losses(name), self.losses(other));
        assert_eq!((one.len(), other.len()), (12, 12));
        for (one, other) in one.iter().zip(&other) {
            assert!((one - other).abs() <= 1e-4 * other, "{name}: {one} {other}");
        }
    }
}

const LONGEST: usize = 300;
const PLENTY: u64 = 1 << 30;

fn micro_tokens(plan: &serde_json::Value) -> u64 {
    plan["policy"]["micro_tokens"].as_u64().unwrap()
}

fn peak(plan: &serde_json::Value) -> u64 {
    plan["peak_bytes"].as_u64().unwrap()
}

#[test]
fn memory_that_was_taken_since_the_plan_was_made() {
    let scene = Scene::new();
    let (full, leanest) = scene.peaks();
    let budget = ["memory.budget=auto"];
    assert_eq!(scene.run("alone", &budget, generous(), &[PLENTY]).result.unwrap().plans, 1);
    let reachable = (full + leanest) / 2;
    let account = scene.run("squeezed", &budget, generous(), &[reachable]);
    let went = account.result.unwrap();
    assert_eq!((went.outcome.ending, went.outcome.steps), (Ending::Done, 12));
    let (before, after) = (scene.plan("alone"), scene.plan("squeezed"));
    assert!(peak(&after) <= reachable - reachable / 32 && peak(&before) > reachable);
    assert!(micro_tokens(&after) < micro_tokens(&before));
    scene.assert_close("squeezed", "alone");
    let said = account.said.join("\n");
    assert!(said.starts_with("free memory shrank since the plan was made: it needs "), "{said}");
    let words = format!("micro-batches of {} tokens (were {})", micro_tokens(&after), micro_tokens(&before));
    assert!(said.contains(&words) && said.contains("results equal within rounding"), "{said}");
    // A budget that was stated is cut to what there is, too.
    let budget = [format!("memory.budget={full}")];
    let account = scene.run("stated", &[&budget[0]], generous(), &[reachable]);
    assert!(account.result.is_ok() && peak(&scene.plan("stated")) <= reachable - reachable / 32);
    // Where nothing fits the run is refused, and nothing is written.
    let account = scene.run("nothing", &[], generous(), &[leanest]);
    assert!(account.result.unwrap_err().starts_with("error: the smallest plan needs "));
    assert!(!scene.run_folder("nothing").exists());
}

#[test]
fn a_reservation_that_is_refused_gives_way_to_a_smaller_one() {
    let scene = Scene::new();
    assert_eq!(scene.run("alone", &[], generous(), &[PLENTY]).result.unwrap().plans, 1);
    let arena = |plan: &serde_json::Value| plan["arena"]["reserved_bytes"].as_u64().unwrap() as usize;
    let before = scene.plan("alone");
    let account = scene.run("refused", &[], Stingy { most: arena(&before) - 1, ..generous() }, &[PLENTY]);
    let went = account.result.unwrap();
    assert_eq!((went.outcome.ending, went.outcome.steps), (Ending::Done, 12));
    // The files of the run are those of the plan that it went by.
    let after = scene.plan("refused");
    assert!(arena(&after) < arena(&before) && micro_tokens(&after) < micro_tokens(&before));
    assert_eq!(went.planned_bytes, peak(&after));
    scene.assert_close("refused", "alone");
    let said = account.said.join("\n");
    assert!(said.contains("could not reserve ") && said.contains("results equal within rounding"), "{said}");
    // Where nothing can be had the run is refused, and nothing is left of it.
    let account = scene.run("nothing", &[], Stingy { most: 1000, ..generous() }, &[PLENTY]);
    assert!(account.result.unwrap_err().starts_with("error: "));
    assert!(!scene.run_folder("nothing").exists());
}

#[test]
fn memory_that_cannot_be_pinned_is_told_with_the_numbers() {
    let scene = Scene::new();
    let fails: fn(usize) -> DeviceError =
        |bytes| DeviceError::Pinned { device: "stingy", bytes, what: "out of memory".into() };
    let device = Stingy { fails: Some(fails), ..generous() };
    let said = scene.run("run", &["memory.host_budget=1GiB"], device, &[PLENTY]).result.unwrap_err();
    assert!(
        said.starts_with("error: could not pin ") && said.contains(" for stingy: out of memory\n"),
        "{said}"
    );
    assert!(said.contains("`memory.host_budget` is 1.00 GiB") && said.contains(" is free, "), "{said}");
    assert!(said.contains("hint: `memory.host_budget` below "), "{said}");
    assert!(!scene.run_folder("run").exists());
}

/// With micro-batches that are pinned only what is computed again can change, and so no bit does.
#[test]
fn a_run_shrinks_and_grows_at_its_checkpoints() {
    let scene = Scene::new();
    let pinned = ["memory.budget=auto", "memory.adapt=true", "memory.micro_tokens=1400"];
    // Nothing moves: nothing changes.
    let still = scene.run("still", &pinned, generous(), &[PLENTY]);
    assert_eq!(still.result.unwrap().plans, 1);
    let full = peak(&scene.plan("still"));
    let less = full - (448 << 10);
    // Looks: before the reservation; after step 4; before the next reservation; after step 8; before the last.
    let account = scene.run("moving", &pinned, generous(), &[PLENTY, less, less, PLENTY]);
    let went = account.result.unwrap();
    assert_eq!((went.plans, went.outcome.ending, went.outcome.steps), (3, Ending::Done, 12));
    assert_eq!(went.outcome.first_loss, scene.losses("still")[0]);
    assert!(scene.losses("moving") == scene.losses("still"));
    assert!(scene.adapter("moving") == scene.adapter("still"));
    let until = |step: u64| {
        let path = scene.run_folder("moving").join(format!("plan-until-{step}.json"));
        serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap()
    };
    assert_eq!(peak(&until(4)), full);
    assert!(peak(&until(8)) <= less - less / 32);
    assert_eq!(peak(&scene.plan("moving")), full);
    // A checkpoint holds the plan that was there when it was written.
    let recomputed = |step: u64| {
        let path = scene.run_folder("moving").join(format!("checkpoint-{step}/smidgen_state.json"));
        let state: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        state["recompute"].as_array().unwrap().len()
    };
    assert_eq!((recomputed(4), recomputed(12)), (0, 0));
    assert!(recomputed(8) > 0);
    // Without `memory.adapt` nobody looks.
    let account = scene.run("fixed", &[pinned[0], pinned[2]], generous(), &[PLENTY, less]);
    assert_eq!(account.result.unwrap().plans, 1);
}

#[test]
fn a_run_that_no_longer_fits_at_all_ends_with_its_state_saved() {
    let scene = Scene::new();
    let adapt = ["memory.budget=auto", "memory.adapt=true"];
    assert!(scene.run("alone", &adapt[..1], generous(), &[PLENTY]).result.is_ok());
    let account = scene.run("run", &adapt, generous(), &[PLENTY, 1 << 20]);
    assert!(account.result.unwrap_err().starts_with("error: the smallest plan needs "));
    let start = find_checkpoint(&RunDir::at(&scene.run_folder("run")).unwrap()).unwrap();
    assert_eq!(start.as_ref().map(|checkpoint| checkpoint.state.step), Some(4));
    let account = scene.run_from("run", &adapt, generous(), &[PLENTY], start);
    assert_eq!(account.result.unwrap().outcome.steps, 12);
    assert!(scene.losses("run") == scene.losses("alone") && scene.adapter("run") == scene.adapter("alone"));
}

#[test]
fn the_largest_micro_batch_fails_before_the_first_step_and_changes_nothing() {
    let scene = Scene::new();
    let pinned = [format!("memory.micro_tokens={LONGEST}")];
    let pinned = [pinned[0].as_str()];
    let account = scene.run("short", &pinned, Stingy { tokens: LONGEST - 1, ..generous() }, &[PLENTY]);
    assert!(account.result.unwrap_err().contains("no memory for so many tokens"));
    assert!(scene.losses("short").is_empty() && !scene.run_folder("short/checkpoint-4").exists());

    let device = generous();
    let count = Rc::clone(&device.micro_batches);
    assert!(scene.run("whole", &pinned, device, &[PLENTY]).result.is_ok());
    // Twelve steps of six samples, and one that was dry.
    assert_eq!(count.get(), 73);
    // Where all micro-batches are as large as the first, there is none.
    let device = generous();
    let count = Rc::clone(&device.micro_batches);
    let first = ["memory.micro_tokens=3000", "train.batch=12"];
    assert!(scene.run("first", &first, device, &[PLENTY]).result.is_ok());
    assert_eq!(count.get(), 12);
    // A resumed run has a dry step of its own, and ends the same.
    for gone in ["checkpoint-8", "checkpoint-12", "adapter"] {
        std::fs::remove_dir_all(scene.run_folder("whole").join(gone)).unwrap();
    }
    std::fs::rename(scene.run_folder("whole"), scene.run_folder("resumed")).unwrap();
    assert!(scene.run("whole", &pinned, generous(), &[PLENTY]).result.is_ok());
    let start = find_checkpoint(&RunDir::at(&scene.run_folder("resumed")).unwrap()).unwrap();
    let device = generous();
    let count = Rc::clone(&device.micro_batches);
    assert!(scene.run_from("resumed", &pinned, device, &[PLENTY], start).result.is_ok());
    assert_eq!(count.get(), 8 * 6 + 1);
    assert!(scene.adapter("resumed") == scene.adapter("whole"));
}

#[test]
fn what_is_measured_above_the_plan_stops_before_the_first_step() {
    let scene = Scene::new();
    let job = scene.job(&[]);
    let solution = plan_job(&job).unwrap().solution;
    let dir = RunDir::at(&scene.run_folder("run")).unwrap();
    dir.make().unwrap();
    let mut journal = Journal::resume(dir.path(), 0).unwrap();
    let policy = solution.policy;
    let device = Stingy { bytes: 60 << 20, ..generous() };
    let trainer = Trainer::load(&job, solution.plan, device, dir, policy, None).unwrap();
    let trainer = trainer.with_planned_peak(41 << 20);
    let progress = Progress::new(12, 0, 0, true);
    let result =
        trainer.train(0, &mut journal, &progress, &Interrupt::never(), &mut |_| ControlFlow::Continue(()));
    let said = result.map(|_| ()).unwrap_err().to_string();
    assert!(said.contains("the largest micro-batch takes 60.00 MiB"), "{said}");
    assert!(scene.losses("run").is_empty());
}

#[test]
fn each_phase_is_measured_against_its_plan() {
    let scene = Scene::new();
    let rows = format!("data.eval={}", scene.run_folder("rows.jsonl").display());
    assert!(scene.run("run", &[&rows, "train.eval_every=6"], generous(), &[PLENTY]).result.is_ok());
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(scene.run_folder("run").join(name)).unwrap()).unwrap()
    };
    let (plan, phases) = (read("plan.json"), read("phases.json"));
    for phase in ["load", "train", "eval", "save"] {
        assert_eq!(phases[phase]["planned"], plan["life"][phase], "{phase}");
        let measured = &phases[phase]["measured"];
        assert_eq!(measured["device"], 10 << 20, "{phase}");
        assert!(measured["host"].is_u64() || cfg!(not(target_os = "linux")), "{phase}: {measured}");
    }
    let (planned, measured) = (&phases["save"]["planned"]["disk"], &phases["save"]["measured"]["disk"]);
    assert!(
        measured.as_u64() <= planned.as_u64() && measured.as_u64() > Some(10_000),
        "{measured} {planned}"
    );
    assert_eq!(phases.get("resume"), None);
}
