//! `phases.json`: the memory of each phase of a run, planned and measured.
//!
//! The monitor measures after every step and at the end of a phase; a phase keeps the highest values. A short spike
//! between two measurements is missed here, but the kernel counts it: `host_peak_bytes` in the metrics is its peak
//! for the whole process. No kernel counter is reset. The memory of a GPU is reserved once, so nothing is missed
//! there.

use super::monitor::Measurement;
use crate::plan::phases::PhaseMemory;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Before memory is reserved: data and plan.
    Prepare,
    Load,
    /// Loading from a checkpoint.
    Resume,
    /// Generating answers to train on.
    Rollout,
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
            Phase::Rollout => "rollout",
            Phase::Train => "train",
            Phase::Eval => "eval",
            Phase::Save => "save",
        }
    }
}

/// The highest measurements of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peak {
    /// Resident memory of the process.
    pub resident_bytes: Option<u64>,
    /// Memory of a device that has its own.
    pub device_bytes: Option<u64>,
    pub pinned_bytes: u64,
}

#[derive(Debug)]
pub struct PhaseMeter {
    current: Phase,
    peaks: BTreeMap<Phase, Peak>,
}

impl PhaseMeter {
    /// Begins with the phase `Prepare`.
    pub fn begin() -> PhaseMeter {
        PhaseMeter { current: Phase::Prepare, peaks: BTreeMap::new() }
    }

    /// Adds a measurement to the current phase.
    pub fn sample(&mut self, measured: &Measurement) {
        let peak = self.peaks.entry(self.current).or_default();
        peak.resident_bytes = peak.resident_bytes.max(measured.rss_bytes);
        peak.device_bytes = peak.device_bytes.max(measured.own_device_bytes());
        peak.pinned_bytes = peak.pinned_bytes.max(measured.pinned_bytes());
    }

    /// Ends the current phase with a last measurement, and begins another.
    pub fn enter(&mut self, phase: Phase, measured: &Measurement) {
        self.sample(measured);
        self.current = phase;
    }

    /// The planned and measured memory of each phase so far; `disk_bytes` is the size of the run's files.
    pub fn render_json(&self, life: &[PhaseMemory], disk_bytes: u64) -> Value {
        let mut phases = Map::new();
        for (phase, peak) in &self.peaks {
            // On a CPU the device's memory is the memory of the process.
            let (device, host) = match peak.device_bytes {
                Some(bytes) => (Some(bytes), peak.resident_bytes),
                None => (peak.resident_bytes, Some(0)),
            };
            let disk = if *phase == Phase::Save { disk_bytes } else { 0 };
            let measured = json!({"device": device, "pinned": peak.pinned_bytes, "host": host, "disk": disk});
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
    use crate::plan::phases::Spaces;
    use smidgen_runtime::device::DeviceMemory;

    fn process(rss: u64) -> Measurement {
        Measurement { rss_bytes: Some(rss), rss_peak_bytes: Some(1000), ..Measurement::default() }
    }

    #[test]
    fn a_phase_keeps_its_highest_measurements() {
        let mut meter = PhaseMeter::begin();
        meter.enter(Phase::Load, &process(50));
        meter.enter(Phase::Train, &process(80));
        [70, 90, 75].iter().for_each(|rss| meter.sample(&process(*rss)));
        meter.enter(Phase::Save, &process(60));
        meter.enter(Phase::Train, &process(65));
        meter.enter(Phase::Save, &process(30));
        meter.enter(Phase::Prepare, &process(40));
        let peak = |phase| meter.peaks.get(&phase).and_then(|peak| peak.resident_bytes);
        assert_eq!(
            [Phase::Prepare, Phase::Load, Phase::Train, Phase::Save, Phase::Eval].map(peak),
            [Some(50), Some(80), Some(90), Some(65), None]
        );
        let life = [PhaseMemory { name: "save", needs: Spaces { device: 75, disk: 9, ..Spaces::default() } }];
        let rendered = meter.render_json(&life, 8);
        assert_eq!(
            rendered["save"],
            json!({
                "planned": {"device": 75, "pinned": 0, "host": 0, "disk": 9},
                "measured": {"device": 65, "pinned": 0, "host": 0, "disk": 8},
            })
        );
        assert_eq!(rendered["prepare"]["planned"], Value::Null);
    }

    #[test]
    fn a_device_with_memory_of_its_own_is_not_the_host() {
        let mut meter = PhaseMeter::begin();
        let memory =
            DeviceMemory { bytes: 700, peak_bytes: 700, free_bytes: 1, pinned_bytes: 40, mapped_bytes: 0 };
        meter.sample(&Measurement { device: Some(memory), ..process(90) });
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
