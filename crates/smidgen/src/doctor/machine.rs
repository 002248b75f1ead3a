//! Checks of the machine: CPU, memory, GPU, libraries, disk, and the device profile that plans use.
//!
//! Each check has two functions: one reads the machine, one turns the readings into a line, so that tests can describe
//! any machine.

use super::{Check, Verdict};
use crate::doctor::measure::{Effort, measure};
use crate::failure::FailureKind;
use crate::machine::host::{self, LockedLimit};
use crate::machine::processes::{self, Resident};
use crate::plan::devices::JobDevice;
use crate::plan::disk;
use crate::plan::profiles::{self, Origin, saved};
use serde_json::{Value, json};
use smidgen_compile::DeviceProfile;
use smidgen_hub::own_cache;
use smidgen_ir::DeviceKind;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::DeviceChoice;
use smidgen_runtime::cpu::bf16_unit::Bf16Unit;
use smidgen_runtime::cuda::compiler::Compiler;
use smidgen_runtime::cuda::libraries::{self, Library};
use smidgen_runtime::cuda::nvml::{GpuProcess, gpu_processes};
use smidgen_runtime::cuda::{self, GpuFacts};
use std::path::{Path, PathBuf};

const LITTLE_MEMORY_BYTES: u64 = 1 << 30;
const LITTLE_DISK_BYTES: u64 = 2 << 30;
/// Number of processes that are listed with their memory.
const NAMED_HOLDERS: usize = 3;

pub fn program() -> Check {
    let (system, architecture) = (std::env::consts::OS, std::env::consts::ARCH);
    Check::pass("program", format!("smidgen {}, {system} {architecture}", saved::VERSION))
}

pub fn processor(threads: usize) -> Check {
    let bf16 = match Bf16Unit::detect() {
        Some(unit) => format!("bf16 by {}", unit.name()),
        None => "no bf16 instructions, computes in f32".to_owned(),
    };
    processor_line(&host::processor_name(), threads, host::processors(), &bf16)
}

fn processor_line(name: &str, threads: usize, processors: usize, bf16: &str) -> Check {
    let is_more = threads > processors;
    let on = if is_more { format!(" on {processors} cores") } else { String::new() };
    let finding = format!("{name}, {threads} threads{on}, {bf16}");
    let remedy = format!("more threads than cores slow each other down: set `memory.threads = {processors}`");
    let facts = json!({ "threads": threads, "processors": processors });
    Check::warn_if(is_more, "processor", finding, &remedy).with(facts)
}

pub fn memory() -> Check {
    let ram = host::read_ram();
    memory_line(ram.free_bytes, ram.total_bytes, &processes::largest(NAMED_HOLDERS))
}

/// `largest`: the processes that use the most memory, largest first.
fn memory_line(free: Option<u64>, total: Option<u64>, largest: &[Resident]) -> Check {
    const NAME: &str = "memory";
    let Some(free) = free else {
        let remedy = "set a budget in the recipe: `memory.budget = \"8GiB\"`";
        return Check::warn(NAME, "cannot read free memory on this machine", remedy);
    };
    let of = total.map_or(String::new(), |total| format!(" of {}", format_bytes(total)));
    // Processes below 2 % of the memory are not listed.
    let is_listed = |it: &&Resident| it.bytes >= total.unwrap_or(free) / 50;
    let listed = largest.iter().filter(is_listed).map(|it| (it.process, Some(&*it.name), Some(it.bytes)));
    let by = render_holders(", most used by ", listed);
    let finding = format!("{} free{of}{by}", format_bytes(free));
    let holders = largest.iter().map(|it| json!({"process": it.process, "name": it.name, "bytes": it.bytes}));
    let facts = json!({ "free_bytes": free, "total_bytes": total, "held_by": holders.collect::<Vec<_>>() });
    let remedy = "stop those processes, or train a smaller model";
    Check::warn_if(free < LITTLE_MEMORY_BYTES, NAME, finding, remedy).with(facts)
}

/// Processes with the memory that they use, in words; nothing without a process.
fn render_holders<'a>(
    by: &str,
    holders: impl Iterator<Item = (u32, Option<&'a str>, Option<u64>)>,
) -> String {
    let holder = |(process, name, bytes): (u32, Option<&str>, Option<u64>)| {
        let name = name.map_or(String::new(), |name| format!(" ({name})"));
        let bytes = bytes.map_or(String::new(), |bytes| format!(" {}", format_bytes(bytes)));
        format!("process {process}{name}{bytes}")
    };
    let words: Vec<String> = holders.map(holder).collect();
    if words.is_empty() { String::new() } else { format!("{by}{}", words.join(", ")) }
}

pub fn container() -> Check {
    let ram = host::read_ram();
    let finding = match ram.total_bytes.filter(|_| ram.is_limited) {
        Some(limit) => format!("limited to {}; plans respect it", format_bytes(limit)),
        None => "no limit".to_owned(),
    };
    Check::pass("container", finding)
}

/// Readings of a GPU and its libraries.
struct GpuReadings {
    gpu: Result<GpuFacts, String>,
    libraries: Vec<Library>,
    /// NVRTC, if all libraries were found.
    compiler: Option<Compiler>,
    /// Version of the driver, such as 570.86.15.
    release: Option<String>,
    held: Vec<GpuProcess>,
    locked: Option<LockedLimit>,
    is_wsl: bool,
}

/// Checks of the limit on pinned memory, the GPU, its memory and its libraries.
pub fn gpu(choice: DeviceChoice) -> Vec<Check> {
    let ordinal = if let DeviceChoice::Cuda(ordinal) = choice { ordinal } else { 0 };
    let libraries = libraries::find();
    let is_whole = libraries.iter().all(|library| library.found.is_some());
    let compiler = if is_whole { Compiler::query().ok() } else { None };
    let gpu = cuda::query(ordinal).map_err(|error| error.to_string());
    let held = if gpu.is_ok() { gpu_holders(ordinal) } else { vec![] };
    let (locked, release, is_wsl) = (host::locked_memory_limit(), host::nvidia_release(), host::is_wsl());
    let readings = GpuReadings { gpu, libraries, compiler, release, held, locked, is_wsl };
    gpu_lines(&readings, matches!(choice, DeviceChoice::Cuda(_)))
}

fn gpu_lines(readings: &GpuReadings, is_wanted: bool) -> Vec<Check> {
    let mut lines = vec![locked_memory_line(readings), gpu_line(readings, is_wanted)];
    lines.push(libraries_line(&readings.libraries, is_wanted));
    lines.extend(readings.gpu.as_ref().ok().map(|facts| gpu_memory_line(facts, &readings.held)));
    lines
}

/// Processes that use memory of a GPU: from NVML, or else all processes that have its device file open.
fn gpu_holders(ordinal: usize) -> Vec<GpuProcess> {
    let known = gpu_processes(ordinal).unwrap_or_default();
    if !known.is_empty() {
        return known;
    }
    let open = processes::having_open(Path::new(&format!("/dev/nvidia{ordinal}")));
    open.into_iter().map(|process| GpuProcess { process, bytes: None }).collect()
}

/// The shell's limit is shown for information only: the driver pins memory, and the limit does not apply to it. In WSL
/// the driver has its own limit.
fn locked_memory_line(readings: &GpuReadings) -> Check {
    let is_limited = readings.is_wsl && readings.gpu.is_ok();
    let finding = match readings.locked {
        _ if is_limited => "WSL limits how much memory the GPU driver can pin".to_owned(),
        Some(LockedLimit::Unlimited) => "no limit".to_owned(),
        Some(LockedLimit::Bytes(bytes)) => {
            format!("{} per process; memory pinned by the GPU driver does not count", format_bytes(bytes))
        }
        None => "cannot read the limit on this machine".to_owned(),
    };
    let remedy = "if a run cannot pin its memory, set a smaller `memory.host_budget`";
    Check::warn_if(is_limited, "locked memory", finding, remedy)
}

fn gpu_line(readings: &GpuReadings, is_wanted: bool) -> Check {
    const NAME: &str = "gpu";
    let has_driver = readings.libraries.first().is_some_and(|driver| driver.found.is_some());
    match &readings.gpu {
        Ok(facts) => {
            let (major, minor) = facts.capability;
            let driver = facts.driver_version;
            let release = readings.release.as_ref().map_or(String::new(), |release| format!("{release} "));
            let of_driver = format!("{release}for CUDA {}.{}", driver / 1000, driver % 1000 / 10);
            let finding = format!("{}, compute capability {major}.{minor}, driver {of_driver}", facts.name);
            let numbers = if facts.has_bf16() { "bf16" } else { "f16 (bf16 needs 8.0)" };
            if facts.can_train() {
                return compiler_line(
                    NAME,
                    facts,
                    readings.compiler.as_ref(),
                    format!("{finding}, {numbers}"),
                );
            }
            let remedy = "runs use the CPU; training on a GPU needs Volta (2017) or newer";
            Check::warn(NAME, format!("{finding}: training needs 7.0"), remedy)
        }
        Err(error) if is_wanted => {
            let remedy = "`memory.device = \"cpu\"` trains without a GPU";
            Check::fail(NAME, FailureKind::Device, error.clone(), remedy)
        }
        Err(error) if has_driver => Check::warn(NAME, error.clone(), "runs use the CPU until the GPU works"),
        Err(_) => Check::pass(NAME, "none: runs use the CPU"),
    }
}

/// NVRTC must support the GPU, and the driver must be able to load its output.
fn compiler_line(
    name: &'static str,
    facts: &GpuFacts,
    compiler: Option<&Compiler>,
    finding: String,
) -> Check {
    let Some(compiler) = compiler else { return Check::pass(name, finding) };
    let (major, minor) = compiler.version;
    if let Some(remedy) = compiler.remedy(facts.capability) {
        return Check::warn(
            name,
            format!("{finding}: NVRTC {major}.{minor} does not compile for it"),
            remedy,
        );
    }
    let of_driver = facts.driver_version / 1000;
    if major > of_driver {
        let packages = match of_driver {
            ..=12 => format!("nvidia-cuda-nvrtc-cu{of_driver} nvidia-cublas-cu{of_driver}"),
            _ => format!("'nvidia-cuda-nvrtc=={of_driver}.*' 'nvidia-cublas=={of_driver}.*'"),
        };
        let remedy = format!("update the driver, or `pip install {packages}`");
        return Check::warn(
            name,
            format!("{finding}: NVRTC {major}.{minor} is newer than the driver"),
            remedy,
        );
    }
    Check::pass(name, finding)
}

fn libraries_line(found: &[Library], is_wanted: bool) -> Check {
    const NAME: &str = "libraries";
    let missing: Vec<&Library> = found.iter().filter(|library| library.found.is_none()).collect();
    let has_driver = found.first().is_some_and(|driver| driver.found.is_some());
    let loaded: Vec<String> = found
        .iter()
        .filter_map(|library| Some(format!("{} ({})", library.what, library.found.as_ref()?.display())))
        .collect();
    let loaded = if loaded.is_empty() { "no NVIDIA libraries".to_owned() } else { loaded.join(", ") };
    if missing.is_empty() {
        return Check::pass(NAME, loaded);
    }
    if !has_driver && !is_wanted {
        return Check::pass(NAME, format!("{loaded}; the CPU needs none"));
    }
    let names: Vec<&str> = missing.iter().map(|library| library.what).collect();
    let remedies = missing.iter().map(|library| library.remedy.to_owned()).collect();
    let verdict = if is_wanted { Verdict::Fail } else { Verdict::Warn };
    let finding = format!("{loaded}; missing: {}", names.join(", "));
    Check { remedies, ..Check::new(NAME, verdict, finding) }
}

fn gpu_memory_line(facts: &GpuFacts, held: &[GpuProcess]) -> Check {
    const NAME: &str = "gpu memory";
    let total = format_bytes(facts.total_bytes);
    let Some(free) = facts.free_bytes else {
        let remedy = "install NVIDIA's management library (libnvidia-ml.so.1), or set `memory.budget`";
        return Check::warn(NAME, format!("{total}, free memory unknown"), remedy);
    };
    let is_taken = free < facts.total_bytes - facts.total_bytes / 10;
    let held: Vec<(u32, Option<String>, Option<u64>)> =
        held.iter().map(|it| (it.process, processes::name_of(it.process), it.bytes)).collect();
    let by = match &held[..] {
        [] if is_taken => ", used by processes outside this container".to_owned(),
        held => {
            render_holders(", used by ", held.iter().map(|(id, name, bytes)| (*id, name.as_deref(), *bytes)))
        }
    };
    let finding = format!("{} free of {total}{by}", format_bytes(free));
    let holders = held.iter().map(|(id, name, bytes)| json!({"process": id, "name": name, "bytes": bytes}));
    let holders: Vec<Value> = holders.collect();
    let facts = json!({ "free_bytes": free, "total_bytes": facts.total_bytes, "held_by": holders });
    let remedy = "stop those processes, or plan with what is free";
    Check::warn_if(is_taken, NAME, finding, remedy).with(facts)
}

/// Disk space for checkpoints and offloaded tensors.
pub fn disk_room(folder: &Path) -> Check {
    disk_line(folder, disk::free_bytes(folder))
}

fn disk_line(folder: &Path, free: Option<u64>) -> Check {
    let place = folder.display();
    let (finding, remedy) = match free {
        None => (
            format!("cannot read the free space of `{place}`"),
            "make sure that checkpoints fit on this disk",
        ),
        Some(free) => {
            let remedy = "free some space, or choose an `output.dir` on another disk";
            (format!("{} free in `{place}`", format_bytes(free)), remedy)
        }
    };
    let is_little = free.is_none_or(|free| free < LITTLE_DISK_BYTES);
    Check::warn_if(is_little, "disk", finding, remedy).with(json!({ "free_bytes": free }))
}

/// Where the profile of the machine comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measuring {
    /// A new measurement.
    Now(Effort),
    /// The saved measurement.
    Never,
}

/// The device profile that plans use. `Measuring::Now` measures it and saves it.
pub fn profile(
    place: &mut JobDevice,
    threads: usize,
    measuring: Measuring,
    folder: &Path,
) -> (Check, Option<(PathBuf, DeviceProfile)>) {
    const NAME: &str = "profile";
    let path = profiles::device_name(place, threads)
        .ok_or_else(|| "no device to measure".to_owned())
        .and_then(|name| profiles::cache_file(&name).map_err(|failure| failure.message));
    let path = match path {
        Ok(path) => path,
        Err(reason) => {
            let remedy = format!("plans use {}", profiles::of_place(place, threads, false).describe());
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
            let finding = format!("not measured: plans use {}", chosen.describe());
            return (Check::warn(NAME, finding, "`smidgen doctor` measures in half a minute"), None);
        }
    };
    let measured = match measure(place, threads, effort, folder) {
        Ok(measured) => measured,
        Err(failure) => return (Check { verdict: Verdict::Warn, ..Check::of_failure(NAME, &failure) }, None),
    };
    let figures = figures(&measured);
    let check = match saved::write(&path, &measured) {
        Ok(()) => Check::pass(NAME, format!("{figures}, saved in `{}`", path.display())),
        Err(error) => Check::warn(
            NAME,
            format!("{figures}; {error}"),
            "set `SMIDGEN_CACHE` to a writable folder; otherwise plans use a built-in profile",
        ),
    };
    (check, Some((path, measured)))
}

fn figures(profile: &DeviceProfile) -> String {
    let (offload, context) = match profile.device {
        DeviceKind::Cpu => ("disk", String::new()),
        DeviceKind::Cuda => {
            ("pinned memory", format!(", context {}", format_bytes(profile.overhead.fixed_bytes)))
        }
    };
    format!(
        "{} bf16, {} f32, memory {}, {offload} {} in and {} out, {:.1} us per operation{context}",
        rate(profile.half.bf16_matmul_flops_per_s, 0, "FLOP/s"),
        rate(profile.f32.matmul_flops_per_s, 0, "FLOP/s"),
        rate(profile.half.bytes_per_s, 1, "B/s"),
        rate(profile.fetch_bytes_per_s, 1, "B/s"),
        rate(profile.stow_bytes_per_s, 1, "B/s"),
        1e6 * profile.half.step_s,
    )
}

fn rate(per_s: f64, digits: usize, unit: &str) -> String {
    let (size, prefix) = if per_s >= 1e12 { (1e12, "T") } else { (1e9, "G") };
    format!("{:.digits$} {prefix}{unit}", per_s / size)
}

/// The folder for compiled kernels, tokenized data, models and profiles.
pub fn cache() -> Check {
    const NAME: &str = "cache";
    let remedy = "set `SMIDGEN_CACHE` to a writable folder";
    let folder = match own_cache() {
        Ok(folder) => folder,
        Err(failure) => return Check::warn(NAME, failure.message, remedy),
    };
    let place = folder.display();
    let probe = folder.join(format!(".doctor-{}", std::process::id()));
    // Not an empty file, which even a full disk accepts.
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&probe, [0; 64 << 10]));
    let _ = std::fs::remove_file(&probe);
    match written {
        Ok(()) => Check::pass(NAME, format!("`{place}`")),
        Err(error) => Check::warn(NAME, format!("cannot write to `{place}`: {error}"), remedy),
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
