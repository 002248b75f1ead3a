//! What a run takes in each phase of its life, measured, beside what was planned: `phases.json` in the run folder.
//!
//! The kernel keeps the highest resident memory of a process and lets the process reset it: it is read and reset where
//! one phase ends and the next begins. Where it cannot be reset, a phase has what was resident at its end.
//! A GPU's memory is looked at there too; it is reserved once, so that nothing happens in between.

use super::metrics::{HostMemory, read_rss};
use crate::plan::life::LifePhase;
use serde_json::{Map, Value, json};
use smidgen_runtime::device::DeviceMemory;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Everything before memory is reserved: data, the plan.
    Prepare,
    Load,
    /// Load, from a checkpoint.
    Resume,
    Train,
    Eval,
    Save,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Prepare => "prepare",
            Phase::Load => "load",
            Phase::Resume => "resume",
            Phase::Train => "train",
            Phase::Eval => "eval",
            Phase::Save => "save",
        }
    }
}

/// The most that a phase was seen to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    pub resident_bytes: Option<u64>,
    /// Of a device with memory of its own.
    pub device_bytes: Option<u64>,
    pub pinned_bytes: u64,
}

#[derive(Debug)]
pub struct PhaseMeter {
    now: Phase,
    /// Whether the kernel counts anew where it is asked to.
    resets: bool,
    taken: BTreeMap<Phase, Taken>,
    /// Of the whole process so far.
    highest_bytes: u64,
}

impl PhaseMeter {
    /// What was taken so far belongs to the preparation.
    pub fn begin() -> PhaseMeter {
        PhaseMeter { now: Phase::Prepare, resets: true, taken: BTreeMap::new(), highest_bytes: 0 }
    }

    /// Ends the phase that was, and begins another. `device` is what a device with memory of its own says.
    pub fn enter(&mut self, phase: Phase, device: Option<DeviceMemory>) {
        let host = read_rss();
        self.record(host, device);
        self.resets = self.resets && std::fs::write("/proc/self/clear_refs", "5").is_ok();
        self.now = phase;
    }

    fn record(&mut self, host: Option<HostMemory>, device: Option<DeviceMemory>) {
        let taken = self.taken.entry(self.now).or_default();
        if let Some(host) = host {
            self.highest_bytes = self.highest_bytes.max(host.peak_bytes);
            // What could not be reset would count for every later phase.
            let bytes = if self.resets { host.peak_bytes } else { host.rss_bytes };
            taken.resident_bytes = taken.resident_bytes.max(Some(bytes));
        }
        if let Some(device) = device {
            taken.device_bytes = taken.device_bytes.max(Some(device.bytes));
            taken.pinned_bytes = taken.pinned_bytes.max(device.pinned_bytes);
        }
    }

    /// The peak of the whole process, whatever was reset since.
    pub fn process_peak_bytes(&self, now: &HostMemory) -> u64 {
        self.highest_bytes.max(now.peak_bytes)
    }

    pub fn taken(&self, phase: Phase) -> Option<Taken> {
        self.taken.get(&phase).copied()
    }

    /// Each phase that the run went through, planned and measured; `disk_bytes` is what the run has on disk.
    pub fn render_json(&self, life: &[LifePhase], disk_bytes: u64) -> Value {
        let mut phases = Map::new();
        for (phase, taken) in &self.taken {
            // A device without memory of its own is the process.
            let (device, host) = match taken.device_bytes {
                Some(bytes) => (Some(bytes), taken.resident_bytes),
                None => (taken.resident_bytes, Some(0)),
            };
            let disk = if *phase == Phase::Save { disk_bytes } else { 0 };
            let measured =
                json!({"device": device, "pinned": taken.pinned_bytes, "host": host, "disk": disk});
            let planned = life.iter().find(|planned| planned.name == phase.name());
            let planned = planned.map(|planned| planned.needs.render_json());
            phases.insert(phase.name().into(), json!({"planned": planned, "measured": measured}));
        }
        Value::Object(phases)
    }
}

/// Bytes of all files below a folder.
pub fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let sizes = entries.flatten().map(|entry| match entry.metadata() {
        Ok(facts) if facts.is_dir() => folder_bytes(&entry.path()),
        Ok(facts) => facts.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::life::Spaces;

    fn host(rss: u64, peak: u64) -> Option<HostMemory> {
        Some(HostMemory { rss_bytes: rss, peak_bytes: peak, anonymous_bytes: rss })
    }

    #[test]
    fn each_phase_has_its_own_peak() {
        let mut meter = PhaseMeter::begin();
        meter.record(host(50, 90), None);
        meter.now = Phase::Load;
        meter.record(host(60, 80), None);
        meter.now = Phase::Save;
        meter.record(host(60, 61), None);
        meter.record(host(55, 70), None);
        let taken = |phase| meter.taken(phase).and_then(|taken| taken.resident_bytes);
        assert_eq!(
            [Phase::Prepare, Phase::Load, Phase::Save, Phase::Eval].map(taken),
            [Some(90), Some(80), Some(70), None]
        );
        assert_eq!(meter.process_peak_bytes(&host(1, 2).unwrap()), 90);
        assert_eq!(meter.process_peak_bytes(&host(1, 95).unwrap()), 95);
        let life = [LifePhase { name: "save", needs: Spaces { device: 75, disk: 9, ..Spaces::default() } }];
        let rendered = meter.render_json(&life, 8);
        assert_eq!(
            rendered["save"],
            json!({
                "planned": {"device": 75, "pinned": 0, "host": 0, "disk": 9},
                "measured": {"device": 70, "pinned": 0, "host": 0, "disk": 8},
            })
        );
        assert_eq!(rendered["prepare"]["planned"], Value::Null);
    }

    #[test]
    fn what_cannot_be_reset_is_sampled() {
        let mut meter = PhaseMeter { resets: false, ..PhaseMeter::begin() };
        meter.record(host(50, 90), None);
        assert_eq!(meter.taken(Phase::Prepare).unwrap().resident_bytes, Some(50));
        assert_eq!(meter.process_peak_bytes(&host(1, 2).unwrap()), 90);
    }

    #[test]
    fn a_device_with_memory_of_its_own_is_not_the_host() {
        let mut meter = PhaseMeter::begin();
        let memory = DeviceMemory { bytes: 700, peak_bytes: 700, free_bytes: 1, pinned_bytes: 40 };
        meter.record(host(50, 90), Some(memory));
        let measured = &meter.render_json(&[], 0)["prepare"]["measured"];
        assert_eq!(*measured, json!({"device": 700, "pinned": 40, "host": 90, "disk": 0}));
    }

    #[test]
    fn files_in_folders_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("inside")).unwrap();
        std::fs::write(folder.path().join("a"), "12345").unwrap();
        std::fs::write(folder.path().join("inside/b"), "123").unwrap();
        assert_eq!(folder_bytes(folder.path()), 8);
        assert_eq!(folder_bytes(&folder.path().join("gone")), 0);
    }
}
