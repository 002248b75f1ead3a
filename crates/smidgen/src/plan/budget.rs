//! How much memory a run may be planned for: the stated budget, or free memory minus a reserve for other processes.
//!
//! A run with a budget above the memory of the machine is refused.
//! Left out: how free memory is read (`machine/`) and when it is read again (`train/memory_watch.rs`).

use crate::failure::Failure;
use crate::machine::host;
use crate::machine::host::HostRam;
use crate::plan::devices::JobDevice;
use crate::plan::profiles::ChosenProfile;
use smidgen_ir::DeviceKind;
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{Budget, Recipe};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobBudget {
    pub bytes: u64,
    /// Whether `memory.budget` states it; otherwise it follows from free memory.
    pub stated: bool,
    /// Free memory of the GPU if that is less than the stated budget.
    pub cut_to_free: Option<u64>,
    /// Free memory that is left to other processes.
    pub reserve_bytes: u64,
}

impl JobBudget {
    /// A stated budget.
    pub fn of_bytes(bytes: u64) -> JobBudget {
        JobBudget { bytes, stated: true, cut_to_free: None, reserve_bytes: 0 }
    }

    /// Limits an automatic budget to the memory of the card that the recipe names in `memory.profile`, so that the run
    /// gets the plan that `smidgen plan` printed.
    pub fn within(self, written: Budget, profile: &ChosenProfile) -> JobBudget {
        let has = profile.device.memory_bytes.filter(|_| profile.is_named() && written == Budget::Auto);
        match has {
            Some(has) => {
                JobBudget { bytes: self.bytes.min(free_budget(profile.device.device, has).bytes), ..self }
            }
            None => self,
        }
    }

    /// Divides an automatic budget among the ranks on a device. A stated budget is per rank.
    pub fn shared_by(self, ranks: usize) -> JobBudget {
        if self.stated { self } else { JobBudget { bytes: self.bytes / ranks as u64, ..self } }
    }

    /// A note for the user if the budget is not simply the stated one.
    pub fn note(&self) -> Option<String> {
        if self.reserve_bytes > 0 {
            let reserve = format_bytes(self.reserve_bytes);
            return Some(format!("`memory.budget = \"auto\"` keeps {reserve} free for other processes"));
        }
        let free = format_bytes(self.cut_to_free?);
        Some(format!("the GPU has only {free} free, less than `memory.budget`: planned with what is free"))
    }
}

/// Kept free on a GPU, for a display or another program.
const GPU_RESERVE_BYTES: u64 = 256 << 20;
/// Kept free in RAM: one part in this many of free memory, up to a maximum.
const RAM_RESERVE_SHARE: u64 = 32;
const MOST_RAM_RESERVE_BYTES: u64 = 512 << 20;

/// The part of this much free memory that `auto` keeps free for other processes.
pub fn reserve_bytes(device: DeviceKind, free_bytes: u64) -> u64 {
    let reserve = match device {
        DeviceKind::Cuda => GPU_RESERVE_BYTES,
        DeviceKind::Cpu => (free_bytes / RAM_RESERVE_SHARE).min(MOST_RAM_RESERVE_BYTES),
    };
    reserve.min(free_bytes)
}

/// The automatic budget with this much free memory.
pub fn free_budget(device: DeviceKind, free_bytes: u64) -> JobBudget {
    let reserve_bytes = reserve_bytes(device, free_bytes);
    JobBudget { bytes: free_bytes - reserve_bytes, stated: false, cut_to_free: None, reserve_bytes }
}

/// The budget of a run that replans with this much memory in reach. A stated budget is never exceeded.
pub fn budget_within(recipe: &Recipe, device: DeviceKind, reachable_bytes: u64) -> JobBudget {
    let free = free_budget(device, reachable_bytes);
    match recipe.memory.budget {
        Budget::Bytes(bytes) => JobBudget::of_bytes(bytes.min(free.bytes)),
        Budget::Auto => free,
    }
}

/// The largest measured memory that a run with this planned peak may show.
pub fn measurable_peak(planned_bytes: u64) -> u64 {
    const MEASURE_BYTES: u64 = 8 << 20;
    planned_bytes + planned_bytes / 100 + MEASURE_BYTES
}

/// The budget in bytes on a device.
pub fn budget_on(place: &JobDevice, budget: Budget) -> Result<JobBudget, Failure> {
    match (budget, place.kind(), place.free_bytes()) {
        (Budget::Bytes(bytes), _, free) => {
            let cut_to_free = free.filter(|free| *free < bytes);
            Ok(JobBudget { cut_to_free, ..JobBudget::of_bytes(cut_to_free.unwrap_or(bytes)) })
        }
        (Budget::Auto, kind, Some(free)) => Ok(free_budget(kind, free)),
        (Budget::Auto, DeviceKind::Cuda, None) => {
            Err(Failure::memory("cannot read the free memory of the GPU")
                .hint("set a budget: `memory.budget = \"24GiB\"`; `memory.profile = \"rtx-4090\"` plans for a card that is not here"))
        }
        (Budget::Auto, DeviceKind::Cpu, None) => match host::free_memory_bytes() {
            Some(free) => Ok(free_budget(DeviceKind::Cpu, free)),
            None => Err(Failure::memory("cannot read free memory on this machine")
                .hint("set a budget: `memory.budget = \"8GiB\"`")),
        },
    }
}

/// Refuses a budget above the total memory of the machine. Memory that other processes use now may become free.
pub fn refuse_above_machine(recipe: &Recipe, place: &JobDevice, ram: &HostRam) -> Result<(), Failure> {
    let (total, owner) = match place {
        JobDevice::Cpu if ram.is_limited => (ram.total_bytes, "this container may use"),
        JobDevice::Cpu => (ram.total_bytes, "this machine has"),
        JobDevice::Cuda { facts, .. } => (facts.as_ref().map(|facts| facts.total_bytes), "the GPU has"),
        JobDevice::Elsewhere { memory_bytes, .. } => (*memory_bytes, "that GPU has"),
    };
    let ram_owner = if ram.is_limited { "this container may use" } else { "this machine has" };
    let host_total = (place.kind() == DeviceKind::Cuda).then_some(ram.total_bytes).flatten();
    let budgets = [
        ("memory.budget", recipe.memory.budget, total, owner),
        ("memory.host_budget", recipe.memory.host_budget, host_total, ram_owner),
    ];
    for (key, budget, total, owner) in budgets {
        let (Budget::Bytes(bytes), Some(total)) = (budget, total) else { continue };
        if bytes > total {
            return Err(Failure::memory(format!(
                "`{key}` is {}, and {owner} {}",
                format_bytes(bytes),
                format_bytes(total)
            ))
            .hint(format!(
                "`{key} = \"auto\"` takes what is free; `smidgen plan` plans for any budget, on any machine"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use smidgen_recipe::read_recipe;

    fn recipe(budget: &str) -> Recipe {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("recipe.toml");
        let text = format!(
            "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n[output]\ndir = \"o\"\n[memory]\nbudget = \"{budget}\"\n"
        );
        std::fs::write(&path, text).unwrap();
        read_recipe(&path, &[]).unwrap()
    }

    #[test]
    fn a_share_is_kept_free() {
        let budget = |device, free: u64| {
            let JobBudget { bytes, reserve_bytes, stated, .. } = free_budget(device, free << 20);
            assert!(!stated && bytes + reserve_bytes == free << 20);
            bytes >> 20
        };
        assert_eq!(budget(DeviceKind::Cpu, 3200), 3100);
        assert_eq!(budget(DeviceKind::Cpu, 64), 62);
        assert_eq!(budget(DeviceKind::Cpu, 0), 0);
        assert_eq!(budget(DeviceKind::Cpu, 1 << 20), (1 << 20) - 512);
        assert_eq!(budget(DeviceKind::Cuda, 1024), 768);
        assert_eq!(budget(DeviceKind::Cuda, 100), 0);
    }

    #[test]
    fn a_stated_budget_is_an_upper_bound() {
        let within = |budget: &str, reachable: u64| {
            budget_within(&recipe(budget), DeviceKind::Cpu, reachable << 20).bytes >> 20
        };
        assert_eq!(within("auto", 3200), 3100);
        assert_eq!(within("1GiB", 3200), 1024);
        assert_eq!(within("1GiB", 64), 62);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_with_the_numbers() {
        let ram = HostRam { free_bytes: Some(1 << 30), total_bytes: Some(2 << 30), is_limited: false };
        let check = |budget: &str, ram: &HostRam| refuse_above_machine(&recipe(budget), &JobDevice::Cpu, ram);
        assert!(check("2GiB", &ram).is_ok() && check("auto", &ram).is_ok());
        let said = check("3GiB", &ram).unwrap_err().to_string();
        assert!(
            said.contains("`memory.budget` is 3.00 GiB, and this machine has 2.00 GiB\n\nhint: "),
            "{said}"
        );
        let said = check("3GiB", &HostRam { is_limited: true, ..ram }).unwrap_err().to_string();
        assert!(said.contains("and this container may use 2.00 GiB"), "{said}");
        assert!(check("3GiB", &HostRam::default()).is_ok());
    }
}
