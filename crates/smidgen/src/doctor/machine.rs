//! Lines about the machine: processor, memory, GPU, libraries, disk, and the profile that plans are made with.
//!
//! Each reads what it needs, and a function beside it makes the line out of what was read, so that machines that are
//! not here can be tested.

use super::{Check, Verdict};
use crate::bytes::format_bytes;
use crate::devices::Place;
use crate::host::{self, LockedLimit};
use crate::hub::environment;
use crate::profiles::measure::{Effort, measure};
use crate::profiles::{self, Origin, saved};
use crate::recipe::DeviceChoice;
use crate::train::disk;
use smidgen_compile::DeviceProfile;
use smidgen_ir::DeviceKind;
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;
use smidgen_runtime::cuda::facts::{Holder, holders};
use smidgen_runtime::cuda::libraries::{self, Library};
use smidgen_runtime::cuda::{self, GpuFacts};
use std::path::{Path, PathBuf};

const LITTLE_MEMORY_BYTES: u64 = 1 << 30;
const LITTLE_DISK_BYTES: u64 = 2 << 30;

pub fn program() -> Check {
    let (system, architecture) = (std::env::consts::OS, std::env::consts::ARCH);
    Check::pass("program", format!("smidgen {}, {system} {architecture}", saved::VERSION))
}

pub fn processor(threads: usize) -> Check {
    let bf16 = match Bf16Unit::detect() {
        Some(unit) => format!("bf16 by {}", unit.name()),
        None => "no bf16, products in f32".to_owned(),
    };
    Check::pass("processor", format!("{}, {threads} threads, {bf16}", host::processor_name()))
}

pub fn memory() -> Check {
    let ram = host::read_ram();
    memory_line(ram.free_bytes, ram.total_bytes)
}

fn memory_line(free: Option<u64>, total: Option<u64>) -> Check {
    const NAME: &str = "memory";
    let Some(free) = free else {
        let remedy = "name a budget in recipes: `memory.budget = \"8GiB\"`";
        return Check::warn(NAME, "what is free cannot be read on this machine", remedy);
    };
    let of = total.map_or(String::new(), |total| format!(" of {}", format_bytes(total)));
    let finding = format!("{} free{of}", format_bytes(free));
    match free < LITTLE_MEMORY_BYTES {
        true => Check::warn(NAME, finding, "end other programs, or train a smaller model"),
        false => Check::pass(NAME, finding),
    }
}

pub fn container() -> Check {
    let ram = host::read_ram();
    let finding = match ram.total_bytes.filter(|_| ram.is_limited) {
        Some(limit) => format!("may take {}, which plans respect", format_bytes(limit)),
        None => "no limit".to_owned(),
    };
    Check::pass("container", finding)
}

/// Pinned memory is taken by NVIDIA's driver, which this limit does not bind; it is shown for whoever looks for it.
pub fn locked_memory() -> Check {
    let finding = match host::locked_memory_limit() {
        Some(LockedLimit::Unlimited) => "no limit".to_owned(),
        Some(LockedLimit::Bytes(bytes)) => {
            format!("{} for programs; the GPU's driver pins memory beside that", format_bytes(bytes))
        }
        None => "the limit cannot be read on this machine".to_owned(),
    };
    Check::pass("locked memory", finding)
}

/// The GPU, its memory and the libraries for it.
pub fn gpu(choice: DeviceChoice) -> Vec<Check> {
    let ordinal = if let DeviceChoice::Cuda(ordinal) = choice { ordinal } else { 0 };
    let found = libraries::find();
    let looked = cuda::look(ordinal).map_err(|error| error.to_string());
    let held = looked.is_ok().then(|| holders(ordinal)).flatten().unwrap_or_default();
    let is_wanted = matches!(choice, DeviceChoice::Cuda(_));
    let mut lines = vec![gpu_line(&looked, &found, is_wanted), libraries_line(&found, is_wanted)];
    lines.extend(looked.ok().map(|facts| gpu_memory_line(&facts, &held)));
    lines
}

fn gpu_line(looked: &Result<GpuFacts, String>, found: &[Library], is_wanted: bool) -> Check {
    const NAME: &str = "gpu";
    let has_driver = found.first().is_some_and(|driver| driver.found.is_some());
    match looked {
        Ok(facts) => {
            let (major, minor) = facts.capability;
            let driver = facts.driver_version;
            let finding = format!(
                "{}, compute capability {major}.{minor}, driver for CUDA {}.{}",
                facts.name,
                driver / 1000,
                driver % 1000 / 10
            );
            match facts.can_train() {
                true => Check::pass(NAME, format!("{finding}, bf16")),
                false => Check::warn(
                    NAME,
                    format!("{finding}: training needs 8.0"),
                    "runs go to the processor; a GPU of 2020 (Ampere) or newer trains",
                ),
            }
        }
        Err(error) if is_wanted => {
            Check::fail(NAME, error.clone(), "`memory.device = \"cpu\"` runs without a GPU")
        }
        Err(error) if has_driver => {
            Check::warn(NAME, error.clone(), "runs go to the processor until the GPU can be used")
        }
        Err(_) => Check::pass(NAME, "none: runs go to the processor"),
    }
}

fn libraries_line(found: &[Library], is_wanted: bool) -> Check {
    const NAME: &str = "libraries";
    let missing: Vec<&Library> = found.iter().filter(|library| library.found.is_none()).collect();
    let has_driver = found.first().is_some_and(|driver| driver.found.is_some());
    let there: Vec<String> = found
        .iter()
        .filter_map(|library| Some(format!("{} ({})", library.what, library.found.as_ref()?.display())))
        .collect();
    let there = if there.is_empty() { "none of NVIDIA's".to_owned() } else { there.join(", ") };
    if missing.is_empty() {
        return Check::pass(NAME, there);
    }
    if !has_driver && !is_wanted {
        return Check::pass(NAME, format!("{there}; the processor needs none"));
    }
    let names: Vec<&str> = missing.iter().map(|library| library.what).collect();
    let remedies = missing.iter().map(|library| library.remedy.to_owned()).collect();
    let verdict = if is_wanted { Verdict::Fail } else { Verdict::Warn };
    let finding = format!("{there}; missing: {}", names.join(", "));
    Check { remedies, ..Check::new(NAME, verdict, finding) }
}

fn gpu_memory_line(facts: &GpuFacts, held: &[Holder]) -> Check {
    const NAME: &str = "gpu memory";
    let total = format_bytes(facts.total_bytes);
    let Some(free) = facts.free_bytes else {
        let remedy =
            "NVIDIA's management library (libnvidia-ml.so.1) tells; until then name a `memory.budget`";
        return Check::warn(NAME, format!("{total}, of which an unknown part is free"), remedy);
    };
    let holder = |holder: &Holder| {
        let bytes = holder.bytes.map_or(String::new(), |bytes| format!(" {}", format_bytes(bytes)));
        format!("process {}{}{bytes}", holder.process, process_name(holder.process))
    };
    let held: Vec<String> = held.iter().map(holder).collect();
    let finding = match held.is_empty() {
        true => format!("{} free of {total}", format_bytes(free)),
        false => format!("{} free of {total}, held by {}", format_bytes(free), held.join(", ")),
    };
    match free < facts.total_bytes - facts.total_bytes / 10 {
        true => Check::warn(NAME, finding, "end what holds it, or plan for what is free"),
        false => Check::pass(NAME, finding),
    }
}

fn process_name(process: u32) -> String {
    let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    if name.is_empty() { String::new() } else { format!(" ({})", name.trim()) }
}

/// Room for checkpoints and for what a plan puts on disk.
pub fn disk_room(folder: &Path) -> Check {
    disk_line(folder, disk::free_bytes(folder))
}

fn disk_line(folder: &Path, free: Option<u64>) -> Check {
    const NAME: &str = "disk";
    let place = folder.display();
    match free {
        None => Check::warn(
            NAME,
            format!("how much room `{place}` has cannot be read"),
            "see to it that checkpoints have room",
        ),
        Some(free) => {
            let finding = format!("{} free in `{place}`", format_bytes(free));
            match free < LITTLE_DISK_BYTES {
                true => {
                    Check::warn(NAME, finding, "free some space, or choose an `output.dir` on another disk")
                }
                false => Check::pass(NAME, finding),
            }
        }
    }
}

/// What of the machine's speed is to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measuring {
    Now(Effort),
    /// What was measured before.
    Never,
}

/// The profile that plans for this machine are made with, measured and kept.
pub fn profile(
    place: &mut Place,
    threads: usize,
    measuring: Measuring,
    folder: &Path,
) -> (Check, Option<(PathBuf, DeviceProfile)>) {
    const NAME: &str = "profile";
    let kept = profiles::device_name(place, threads)
        .ok_or_else(|| "there is no device here to measure".to_owned())
        .and_then(|name| profiles::cache_file(&name).map_err(|failure| failure.message));
    let path = match kept {
        Ok(path) => path,
        Err(reason) => {
            let remedy = format!("plans go by {}", profiles::of_place(place, threads, false).describe());
            return (Check::warn(NAME, reason, remedy), None);
        }
    };
    let effort = match measuring {
        Measuring::Now(effort) => effort,
        Measuring::Never => {
            let chosen = profiles::of_place(place, threads, true);
            if chosen.origin == Origin::Measured {
                let finding = format!("{}, in `{}`", figures(&chosen.device), path.display());
                return (Check::pass(NAME, finding), Some((path, chosen.device)));
            }
            let finding = format!("not measured: plans go by {}", chosen.describe());
            return (Check::warn(NAME, finding, "`smidgen doctor` measures in a few seconds"), None);
        }
    };
    let measured = match measure(place, threads, effort, folder) {
        Ok(measured) => measured,
        Err(failure) => return (Check { verdict: Verdict::Warn, ..Check::of_failure(NAME, &failure) }, None),
    };
    let figures = figures(&measured);
    let check = match saved::write(&path, &measured) {
        Ok(()) => Check::pass(NAME, format!("{figures}, kept in `{}`", path.display())),
        Err(error) => Check::warn(
            NAME,
            format!("{figures}; {error}"),
            "set `SMIDGEN_CACHE` to a folder that can be written, or plans go by built-in figures",
        ),
    };
    (check, Some((path, measured)))
}

fn figures(profile: &DeviceProfile) -> String {
    let (bf16, f32) = (profile.half.product_flops_per_s, profile.f32.product_flops_per_s);
    let elsewhere = match profile.device {
        DeviceKind::Cpu => "disk",
        DeviceKind::Cuda => "pinned memory",
    };
    let context =
        profile.context_bytes.map_or(String::new(), |bytes| format!(", context {}", format_bytes(bytes)));
    format!(
        "{} bf16, {} f32, memory {}, {elsewhere} {} in and {} out, {:.1} us a step{context}",
        flops(bf16),
        flops(f32),
        rate(profile.half.bytes_per_s),
        rate(profile.fetch_bytes_per_s),
        rate(profile.stow_bytes_per_s),
        1e6 * profile.half.step_s,
    )
}

fn flops(per_s: f64) -> String {
    match per_s >= 1e12 {
        true => format!("{:.0} TFLOP/s", per_s / 1e12),
        false => format!("{:.0} GFLOP/s", per_s / 1e9),
    }
}

fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s >= 1e12 {
        true => format!("{:.1} TB/s", bytes_per_s / 1e12),
        false => format!("{:.1} GB/s", bytes_per_s / 1e9),
    }
}

/// Where kernels, tokens, models and profiles are kept.
pub fn cache() -> Check {
    const NAME: &str = "cache";
    let remedy = "set `SMIDGEN_CACHE` to a folder that can be written";
    let folder = match environment::own_cache() {
        Ok(folder) => folder,
        Err(failure) => return Check::warn(NAME, failure.message, remedy),
    };
    let place = folder.display();
    let probe = folder.join(format!(".doctor-{}", std::process::id()));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&probe, b""));
    let _ = std::fs::remove_file(&probe);
    match written {
        Ok(()) => Check::pass(NAME, format!("`{place}`")),
        Err(error) => Check::warn(NAME, format!("`{place}` cannot be written: {error}"), remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(capability: (u32, u32), free_gib: u64) -> GpuFacts {
        GpuFacts {
            ordinal: 0,
            name: "NVIDIA Example".into(),
            capability,
            total_bytes: 24 << 30,
            free_bytes: Some(free_gib << 30),
            driver_version: 13_010,
        }
    }

    fn library(what: &'static str, is_there: bool) -> Library {
        let found = is_there.then(|| PathBuf::from("lib.so"));
        Library { what, file: "lib.so", found, remedy: "install it" }
    }

    #[test]
    fn memory_is_little_below_a_gibibyte() {
        let line = |free| memory_line(Some(free), Some(8 << 30));
        assert_eq!(line(1 << 30), Check::pass("memory", "1.00 GiB free of 8.00 GiB"));
        assert_eq!(line((1 << 30) - 1).verdict, Verdict::Warn);
        assert_eq!(memory_line(None, None).verdict, Verdict::Warn);
        let disk = |free| disk_line(Path::new("runs"), free).verdict;
        assert_eq!(
            [disk(Some(2 << 30)), disk(Some(5)), disk(None)],
            [Verdict::Pass, Verdict::Warn, Verdict::Warn]
        );
    }

    #[test]
    fn a_gpu_that_is_wanted_has_to_be_there() {
        let none = || Err("the driver was not found".to_owned());
        let (with, without) = ([library("driver", true)], [library("driver", false)]);
        assert_eq!(gpu_line(&none(), &without, false).verdict, Verdict::Pass);
        assert_eq!(gpu_line(&none(), &with, false).verdict, Verdict::Warn);
        assert_eq!(gpu_line(&none(), &without, true).verdict, Verdict::Fail);
        let fine = gpu_line(&Ok(facts((8, 9), 24)), &with, true);
        assert_eq!(
            fine,
            Check::pass("gpu", "NVIDIA Example, compute capability 8.9, driver for CUDA 13.1, bf16")
        );
        assert_eq!(gpu_line(&Ok(facts((7, 5), 24)), &with, false).verdict, Verdict::Warn);
    }

    #[test]
    fn libraries_matter_where_there_is_a_driver() {
        let all = [library("driver", true), library("NVRTC", true)];
        assert_eq!(libraries_line(&all, true), Check::pass("libraries", "driver (lib.so), NVRTC (lib.so)"));
        let some = [library("driver", true), library("NVRTC", false)];
        let line = libraries_line(&some, false);
        assert_eq!((line.verdict, &*line.finding), (Verdict::Warn, "driver (lib.so); missing: NVRTC"));
        assert_eq!(line.remedies, ["install it"]);
        assert_eq!(libraries_line(&some, true).verdict, Verdict::Fail);
        let none = [library("driver", false), library("NVRTC", false)];
        assert_eq!(libraries_line(&none, false).verdict, Verdict::Pass);
    }

    #[test]
    fn who_holds_a_gpu_is_named() {
        let holder = Holder { process: u32::MAX, bytes: Some(4 << 30) };
        let line = gpu_memory_line(&facts((8, 9), 20), &[holder]);
        let words = "20.00 GiB free of 24.00 GiB, held by process 4294967295 4.00 GiB";
        assert_eq!((line.verdict, &*line.finding), (Verdict::Warn, words));
        assert_eq!(gpu_memory_line(&facts((8, 9), 23), &[]).verdict, Verdict::Pass);
        let unknown = GpuFacts { free_bytes: None, ..facts((8, 9), 0) };
        assert_eq!(gpu_memory_line(&unknown, &[]).verdict, Verdict::Warn);
    }

    #[test]
    fn rates_have_units_for_people() {
        assert_eq!([flops(95.4e9), flops(660e12)], ["95 GFLOP/s", "660 TFLOP/s"]);
        assert_eq!([rate(0.84e9), rate(3.6e12)], ["0.8 GB/s", "3.6 TB/s"]);
    }
}
