//! `phases.json`: the memory of each phase of a run, planned and measured.
//!
//! A phase has the highest of its samples: the monitor samples after every step and at the end of a phase. A short
//! spike between two samples is missed here, but the kernel counts it: `host_peak_bytes` in the metrics is its peak for
//! the whole process. No kernel counter is reset. The memory of a GPU is reserved once, so a sample misses nothing.

use super::monitor::Looked;
use crate::plan::life::LifePhase;
use serde_json::{Map, Value, json};
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

/// The highest samples of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// RAM of the process.
    pub resident_bytes: Option<u64>,
    /// Memory of a device that has its own.
    pub device_bytes: Option<u64>,
    pub pinned_bytes: u64,
}

#[derive(Debug)]
pub struct PhaseMeter {
    now: Phase,
    taken: BTreeMap<Phase, Taken>,
}

impl PhaseMeter {
    /// Begins with the preparation.
    pub fn begin() -> PhaseMeter {
        PhaseMeter { now: Phase::Prepare, taken: BTreeMap::new() }
    }

    /// Counts a sample for the present phase.
    pub fn sample(&mut self, looked: &Looked) {
        let taken = self.taken.entry(self.now).or_default();
        taken.resident_bytes = taken.resident_bytes.max(looked.rss_bytes);
        taken.device_bytes = taken.device_bytes.max(looked.own_device_bytes());
        taken.pinned_bytes = taken.pinned_bytes.max(looked.pinned_bytes());
    }

    /// Ends the present phase with a last sample, and begins another.
    pub fn enter(&mut self, phase: Phase, looked: &Looked) {
        self.sample(looked);
        self.now = phase;
    }

    pub fn taken(&self, phase: Phase) -> Option<Taken> {
        self.taken.get(&phase).copied()
    }

    /// Each phase that the run went through, planned and measured; `disk_bytes` is what the run has on disk.
    pub fn render_json(&self, life: &[LifePhase], disk_bytes: u64) -> Value {
        let mut phases = Map::new();
        for (phase, taken) in &self.taken {
            // On a CPU the device's memory is the memory of the process.
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
    use smidgen_runtime::device::DeviceMemory;

    fn process(rss: u64) -> Looked {
        Looked { rss_bytes: Some(rss), rss_peak_bytes: Some(1000), ..Looked::default() }
    }

    #[test]
    fn a_phase_has_the_highest_of_its_samples() {
        let mut meter = PhaseMeter::begin();
        meter.enter(Phase::Load, &process(50));
        meter.enter(Phase::Train, &process(80));
        [70, 90, 75].iter().for_each(|rss| meter.sample(&process(*rss)));
        meter.enter(Phase::Save, &process(60));
        meter.enter(Phase::Train, &process(65));
        meter.enter(Phase::Save, &process(30));
        meter.enter(Phase::Prepare, &process(40));
        let taken = |phase| meter.taken(phase).and_then(|taken| taken.resident_bytes);
        assert_eq!(
            [Phase::Prepare, Phase::Load, Phase::Train, Phase::Save, Phase::Eval].map(taken),
            [Some(50), Some(80), Some(90), Some(65), None]
        );
        let life = [LifePhase { name: "save", needs: Spaces { device: 75, disk: 9, ..Spaces::default() } }];
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
        meter.sample(&Looked { device: Some(memory), ..process(90) });
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
