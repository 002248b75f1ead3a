//! Chooses the device profile of a plan: the recipe's, the one measured on this machine, or a built-in one.
//!
//! A profile in the recipe also sets the kind of device, so that any GPU can be planned for on any machine. A run with
//! such a profile uses its rates and the memory of the real device, which must be of the same kind; the memory is
//! limited to that of the profile, so that the plan of the run is the one that was printed.
//! Left out: measuring (`doctor/measure.rs`) and the file format (`saved.rs`).

pub mod saved;

use crate::failure::Failure;
use crate::machine::host;
use crate::plan::devices::JobDevice;
use serde_json::{Value, json};
use smidgen_compile::{DeviceProfile, cards};
use smidgen_hub::own_cache;
use smidgen_ir::DeviceKind;
use smidgen_recipe::{Budget, DeviceChoice, Memory, ProfileChoice};
use smidgen_runtime::cpu::bf16_unit::F32Unit;
use smidgen_runtime::cuda::gpu_generation::LEAST_WITH_BF16;
use std::path::PathBuf;

/// A profile and its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenProfile {
    pub device: DeviceProfile,
    pub origin: Origin,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Measured on this machine by `smidgen doctor`.
    Measured,
    /// The built-in profile most similar to this machine.
    Nearest,
    /// A built-in profile that the recipe names.
    Named,
    /// A file that the recipe names.
    File(PathBuf),
    /// The profile of a built-in card with similar memory, because the GPU is unknown. Its rates predict no time.
    Assumed,
}

impl ChosenProfile {
    /// Whether the recipe names the profile.
    pub fn is_named(&self) -> bool {
        match self.origin {
            Origin::Named | Origin::File(_) => true,
            Origin::Measured | Origin::Nearest | Origin::Assumed => false,
        }
    }

    /// Whether its rates can predict times.
    pub fn has_rates(&self) -> bool {
        self.origin != Origin::Assumed
    }

    pub fn describe(&self) -> String {
        let name = &self.device.name;
        match &self.origin {
            Origin::Measured => "the profile measured on this machine".to_owned(),
            Origin::Nearest | Origin::Named if cards::find(name).is_some_and(|card| !card.is_measured()) => {
                format!("the built-in profile `{name}`, from its data sheet, not measured")
            }
            Origin::Nearest | Origin::Named => format!("the built-in profile `{name}`"),
            Origin::File(path) => format!("the profile in `{}`", path.display()),
            Origin::Assumed => format!("an unknown GPU, choices are made as for `{name}`"),
        }
    }

    pub fn render_json(&self) -> Value {
        let origin = match &self.origin {
            Origin::Measured => "measured",
            Origin::Nearest | Origin::Named => "built-in",
            Origin::File(_) => "file",
            Origin::Assumed => "assumed",
        };
        let mut value = saved::render(&self.device);
        value["origin"] = json!(origin);
        value
    }
}

/// The profile that the recipe names, if it names one.
pub fn named(memory: &Memory) -> Result<Option<ChosenProfile>, Failure> {
    Ok(match &memory.profile {
        ProfileChoice::Auto => None,
        ProfileChoice::File(path) => {
            let device = saved::read(&path.resolved).map_err(Failure::disk)?;
            Some(ChosenProfile { device, origin: Origin::File(path.resolved.clone()) })
        }
        ProfileChoice::Named(name) => {
            let threads = if memory.threads == 0 { host::processors() } else { memory.threads };
            Some(ChosenProfile { device: built_in(name, threads)?, origin: Origin::Named })
        }
    })
}

/// The built-in profile of this name.
fn built_in(name: &str, threads: usize) -> Result<DeviceProfile, Failure> {
    let processors = [DeviceProfile::cpu(threads), DeviceProfile::cpu_amx(threads)];
    let processor_names = processors.each_ref().map(|profile| profile.name.clone());
    if let Some(profile) = processors.into_iter().find(|profile| profile.name == name) {
        return Ok(profile);
    }
    cards::find(name).map(cards::Card::profile).ok_or_else(|| {
        let names: Vec<&str> = processor_names
            .iter()
            .map(String::as_str)
            .chain(cards::CARDS.iter().map(|card| card.name))
            .collect();
        let written = name.to_lowercase().replace([' ', '_'], "-");
        let hint = match smidgen_ir::words::nearest(&written, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "a profile that `smidgen doctor` wrote on another machine is a .json file".to_owned(),
        };
        let known = names.join(", ");
        Failure::recipe(format!("`memory.profile = {name}`: unknown profile\n  built in: {known}")).hint(hint)
    })
}

/// The device of a job: of the kind of the profile that the recipe names, if it names one. `must_run`: the device must
/// exist on this machine.
pub fn place(memory: &Memory, named: Option<&ChosenProfile>, must_run: bool) -> Result<JobDevice, Failure> {
    let Some(profile) = named.map(|named| &named.device) else {
        return JobDevice::find(memory.device, must_run);
    };
    let differs = |chosen: DeviceChoice| {
        let (name, kind) = (&profile.name, if profile.device == DeviceKind::Cpu { "a CPU" } else { "a GPU" });
        Failure::recipe(format!(
            "`memory.profile` is for {kind} (`{name}`), but `memory.device` is `{chosen}`"
        ))
        .hint("remove one of the two keys")
    };
    match (profile.device, memory.device) {
        (DeviceKind::Cpu, chosen @ DeviceChoice::Cuda(_))
        | (DeviceKind::Cuda, chosen @ DeviceChoice::Cpu) => Err(differs(chosen)),
        (DeviceKind::Cpu, DeviceChoice::Auto | DeviceChoice::Cpu) => Ok(JobDevice::Cpu),
        (DeviceKind::Cuda, chosen @ (DeviceChoice::Auto | DeviceChoice::Cuda(_))) if must_run => {
            let ordinal = if let DeviceChoice::Cuda(ordinal) = chosen { ordinal } else { 0 };
            JobDevice::find(DeviceChoice::Cuda(ordinal), true).map_err(|failure| {
                let name = &profile.name;
                failure.hint(format!("`smidgen plan` plans for `{name}` on any machine; remove `memory.profile` to train on this one"))
            })
        }
        (DeviceKind::Cuda, DeviceChoice::Auto | DeviceChoice::Cuda(_)) => Ok(JobDevice::Elsewhere {
            name: profile.name.clone(),
            memory_bytes: profile.memory_bytes,
            overhead: profile.overhead,
        }),
    }
}

/// The profile for a recipe that names none. For a GPU that is not on this machine and a stated budget, it is that of
/// the built-in card whose memory is nearest to the budget; otherwise as [`of_place`].
pub fn of_place_within(place: &JobDevice, threads: usize, measured: bool, budget: Budget) -> ChosenProfile {
    match (place, budget) {
        (JobDevice::Cuda { facts: None, .. }, Budget::Bytes(bytes)) => {
            let distance = |card: &&cards::Card| card.memory_bytes().abs_diff(bytes);
            let newer = cards::CARDS.iter().filter(|card| card.capability >= LEAST_WITH_BF16);
            let card = newer.min_by_key(distance).expect("there are cards");
            ChosenProfile { device: card.profile(), origin: Origin::Assumed }
        }
        _ => of_place(place, threads, measured),
    }
}

/// The profile measured on this machine if `measured` allows it, or else the most similar built-in one. Without
/// `measured` the result does not depend on this machine's CPU.
pub fn of_place(place: &JobDevice, threads: usize, measured: bool) -> ChosenProfile {
    let found = measured.then(|| device_name(place, threads).and_then(|name| cached(&name))).flatten();
    if let Some(device) = found {
        return ChosenProfile { device, origin: Origin::Measured };
    }
    let device = match place {
        JobDevice::Cpu if measured && F32Unit::detect() == F32Unit::Amx => DeviceProfile::cpu_amx(threads),
        JobDevice::Cpu => DeviceProfile::cpu(threads),
        JobDevice::Cuda { facts: Some(facts), .. } => {
            cards::most_like(&facts.name, facts.capability, facts.total_bytes).profile()
        }
        JobDevice::Cuda { facts: None, .. } | JobDevice::Elsewhere { .. } => {
            let device = cards::find("rtx-4090").expect("a built-in card").profile();
            return ChosenProfile { device, origin: Origin::Assumed };
        }
    };
    ChosenProfile { device, origin: Origin::Nearest }
}

/// The name under which the profile of a device is saved. It has the number of threads of a CPU, on which rates depend.
pub fn device_name(place: &JobDevice, threads: usize) -> Option<String> {
    match place {
        JobDevice::Cpu => Some(format!("{}, {threads} threads", host::processor_name())),
        JobDevice::Cuda { facts, .. } => facts.as_ref().map(|facts| facts.name.clone()),
        JobDevice::Elsewhere { .. } => None,
    }
}

/// The saved profile of a device, if this version of smidgen measured it.
fn cached(name: &str) -> Option<DeviceProfile> {
    let path = cache_file(name).ok()?;
    saved::read_of(&path, name).ok()
}

/// Where the profile of a device is saved.
pub fn cache_file(name: &str) -> Result<PathBuf, Failure> {
    let letters = name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { ' ' });
    let words: String = letters.collect::<String>().to_lowercase();
    let slug: Vec<&str> = words.split_whitespace().collect();
    Ok(own_cache()?.join("profiles").join(format!("{}.json", slug.join("-"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(device: DeviceChoice) -> Memory {
        let text = "[model]\npath = \"m\"\n[data]\ntrain = \"t\"\n[output]\ndir = \"o\"\n";
        let source =
            smidgen_recipe::RecipeSource { file: "r".into(), folder: "/".into(), text: text.to_owned() };
        let recipe = smidgen_recipe::parse_recipe(&source, &[], std::path::Path::new("/")).unwrap();
        Memory { device, ..recipe.memory }
    }

    fn with_profile(name: &str) -> Memory {
        Memory { profile: ProfileChoice::Named(name.to_owned()), threads: 3, ..memory(DeviceChoice::Auto) }
    }

    fn chosen(name: &str) -> ChosenProfile {
        named(&with_profile(name)).unwrap().unwrap()
    }

    #[test]
    fn a_named_card_is_planned_for_on_any_machine() {
        let card = chosen("rtx-4090");
        for device in [DeviceChoice::Auto, DeviceChoice::Cuda(1)] {
            let place = place(&memory(device), Some(&card), false).unwrap();
            assert_eq!((place.kind(), place.describe()), (DeviceKind::Cuda, "rtx-4090".to_owned()));
            assert_eq!(place.free_bytes(), Some(24_210 << 20));
        }
        let refused = place(&memory(DeviceChoice::Cpu), Some(&card), false).unwrap_err();
        assert!(refused.message.contains("is for a GPU (`rtx-4090`), but `memory.device` is `cpu`"));
    }

    #[test]
    fn a_named_cpu_profile_chooses_the_cpu() {
        let cpu = chosen("cpu");
        assert_eq!(cpu.device, DeviceProfile::cpu(3));
        assert_eq!(chosen("cpu-amx").device, DeviceProfile::cpu_amx(3));
        for must_run in [false, true] {
            assert_eq!(place(&memory(DeviceChoice::Auto), Some(&cpu), must_run).unwrap(), JobDevice::Cpu);
        }
        assert!(place(&memory(DeviceChoice::Cuda(0)), Some(&cpu), false).is_err());
    }

    #[test]
    fn the_nearest_name_is_suggested_for_an_unknown_one() {
        let refused = |name: &str| named(&with_profile(name)).unwrap_err().to_string();
        let said = refused("RTX 4090");
        assert!(said.contains("`memory.profile = RTX 4090`: unknown profile"), "{said}");
        assert!(said.contains("built in: cpu, cpu-amx, rtx-5090, rtx-4090"), "{said}");
        assert!(said.contains("hint: did you mean `rtx-4090`?"), "{said}");
        assert!(refused("banana").contains("is a .json file"));
    }

    #[test]
    fn the_most_similar_built_in_profile_is_the_fallback() {
        let chosen = of_place(&JobDevice::Cpu, 3, false);
        assert_eq!((chosen.device, chosen.origin), (DeviceProfile::cpu(3), Origin::Nearest));
        let unknown = JobDevice::Cuda { ordinal: 0, facts: None, context_bytes: None };
        assert!(!of_place(&unknown, 1, false).has_rates());
        let within = |gib: u64| of_place_within(&unknown, 1, false, Budget::Bytes(gib << 30));
        assert_eq!((within(8).device.name, within(8).origin), ("rtx-4060".to_owned(), Origin::Assumed));
        assert_eq!(within(130).device.name, "h200");
    }
}
