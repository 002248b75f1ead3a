//! Whether the memory of a run leaked: the slope of its measured memory over the steps of one process.
//!
//! A leak adds memory again and again; a late first use (the first checkpoint, the first evaluation) adds it once. So
//! the steps after the warm-up are cut into segments, and a line is fitted through each: memory leaked if nearly every
//! segment rises and they rise by more than noise. A few steps cannot show that, and the verdict says so.
//! Left out: parts are separate processes, so each has its own verdict, and the worst is the run's.

use super::run_folder::StepRow;
use serde::{Serialize, Serializer};
use serde_json::json;
use smidgen_ir::bytes::format_bytes;

/// The first eighth of a part is warm-up: caches fill, and code runs for the first time.
const WARM_UP: usize = 8;
const SEGMENTS: usize = 8;
/// Rows of a segment at least. With 8 segments and the warm-up, a part needs 74 rows.
const FEWEST_ROWS: usize = 8;
/// So many segments rise in a leak. By chance, where rising and falling are equally likely, 7 of 8 do in 3.5 % of runs.
const RISING: usize = 7;

/// The verdict on one part of a run. Bytes are the rise from the end of the warm-up to the end, by the fitted lines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Leak {
    /// The memory was not measured, or over too few steps.
    #[default]
    TooShort,
    None {
        drift_bytes: u64,
    },
    /// It rose by more than noise, but not steadily.
    Unclear {
        drift_bytes: u64,
    },
    Leaked {
        bytes: u64,
        bytes_per_step: f64,
    },
}

impl Leak {
    /// The verdict on rows of one process. A rise up to `noise_bytes` is not a leak.
    pub fn of(part: &[StepRow], noise_bytes: u64) -> Leak {
        let warm = &part[part.len().div_ceil(WARM_UP)..];
        let points: Vec<(f64, f64)> =
            warm.iter().filter_map(|row| Some((row.step as f64, row.device_bytes? as f64))).collect();
        if points.len() < SEGMENTS * FEWEST_ROWS {
            return Leak::TooShort;
        }
        let start = |segment: usize| segment * points.len() / SEGMENTS;
        let slopes: Vec<f64> =
            (0..SEGMENTS).map(|segment| slope(&points[start(segment)..start(segment + 1)])).collect();
        let rising = slopes.iter().filter(|slope| **slope > 0.0).count();
        let steps = points[points.len() - 1].0 - points[0].0;
        let bytes_per_step = slope(&points);
        let bytes = (bytes_per_step * steps).max(0.0) as u64;
        match (bytes > noise_bytes, rising) {
            (false, _) | (true, 0..=2) => Leak::None { drift_bytes: bytes },
            (true, RISING..) => Leak::Leaked { bytes, bytes_per_step },
            (true, _) => Leak::Unclear { drift_bytes: bytes },
        }
    }

    /// The worst of the verdicts on the parts of a run.
    pub fn worst(parts: impl IntoIterator<Item = Leak>) -> Leak {
        parts.into_iter().max_by_key(|leak| leak.weight()).unwrap_or(Leak::TooShort)
    }

    fn weight(&self) -> (u8, u64) {
        match self {
            Leak::TooShort => (0, 0),
            Leak::None { drift_bytes } => (1, *drift_bytes),
            Leak::Unclear { drift_bytes } => (2, *drift_bytes),
            Leak::Leaked { bytes, .. } => (3, *bytes),
        }
    }

    /// `None` if it cannot be told.
    pub fn has_leaked(&self) -> Option<bool> {
        match self {
            Leak::TooShort | Leak::Unclear { .. } => None,
            Leak::None { .. } => Some(false),
            Leak::Leaked { .. } => Some(true),
        }
    }

    pub fn bytes_per_step(&self) -> Option<f64> {
        if let Leak::Leaked { bytes_per_step, .. } = self { Some(*bytes_per_step) } else { None }
    }

    pub fn bytes(&self) -> Option<u64> {
        match self {
            Leak::TooShort => None,
            Leak::None { drift_bytes: bytes } | Leak::Unclear { drift_bytes: bytes } => Some(*bytes),
            Leak::Leaked { bytes, .. } => Some(*bytes),
        }
    }

    pub fn render(&self) -> String {
        match self {
            Leak::TooShort => "too few steps to detect a leak".into(),
            Leak::None { drift_bytes: 0 } => "no leak".into(),
            Leak::None { drift_bytes } => format!("no leak ({} drift)", format_bytes(*drift_bytes)),
            Leak::Unclear { drift_bytes } => format!(
                "cannot tell whether memory leaked: it rose by {}, not steadily",
                format_bytes(*drift_bytes)
            ),
            Leak::Leaked { bytes, bytes_per_step } => format!(
                "leaked {}, {} per step",
                format_bytes(*bytes),
                format_bytes(bytes_per_step.round() as u64)
            ),
        }
    }
}

/// Serialized, it is two fields of a run's summary.
impl Serialize for Leak {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        json!({"growth_bytes": self.bytes(), "grew": self.has_leaked()}).serialize(out)
    }
}

/// The slope of the line with the least squared error.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let (over, under) = points.iter().fold((0.0, 0.0), |(over, under), point| {
        (over + (point.0 - x) * (point.1 - y), under + (point.0 - x).powi(2))
    });
    if under > 0.0 { over / under } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOISE: u64 = 256 << 10;

    fn verdict(steps: u64, bytes: impl Fn(u64) -> u64) -> Leak {
        let rows: Vec<StepRow> = (1..=steps)
            .map(|step| StepRow { step, device_bytes: Some((100 << 20) + bytes(step)), ..StepRow::default() })
            .collect();
        Leak::of(&rows, NOISE)
    }

    /// What a healthy run on a CPU showed: 280 KiB at its first checkpoint, halfway.
    #[test]
    fn a_late_first_use_is_not_a_leak() {
        for steps in [80, 200, 5000] {
            let leak = verdict(steps, |step| if step > steps / 2 { 280 << 10 } else { 0 });
            assert_eq!(leak.has_leaked(), Some(false), "{steps}: {leak:?}");
            assert!(leak.bytes() > Some(NOISE), "{steps}: {leak:?}");
        }
        let twice =
            verdict(1000, |step| u64::from(step > 300) * (5 << 20) + u64::from(step > 700) * (3 << 20));
        assert_eq!(twice.has_leaked(), Some(false), "{twice:?}");
    }

    #[test]
    fn steady_growth_is_a_leak_with_its_rate() {
        let leak = verdict(1000, |step| 2048 * step);
        let Leak::Leaked { bytes, bytes_per_step } = leak else { panic!("{leak:?}") };
        assert!((bytes_per_step - 2048.0).abs() < 1e-6);
        assert_eq!(bytes, 2048 * 874);
        assert_eq!(leak.render(), "leaked 1.71 MiB, 2.00 KiB per step");
        // A heap grows in pieces, and an evaluation takes memory and gives it back.
        for piece in [4 << 10, 128 << 10, 1 << 20] {
            let leak = verdict(3000, |step| 8192 * step / piece * piece + (step % 50 / 49) * (3 << 20));
            assert_eq!(leak.has_leaked(), Some(true), "{piece}: {leak:?}");
        }
        // The steps of a long run are thinned.
        let rows: Vec<StepRow> = (1..=100)
            .map(|row| StepRow { step: 16 * row, device_bytes: Some(4096 * 16 * row), ..StepRow::default() })
            .collect();
        let Leak::Leaked { bytes_per_step, .. } = Leak::of(&rows, NOISE) else { panic!() };
        assert!((bytes_per_step - 4096.0).abs() < 1e-6);
    }

    #[test]
    fn what_cannot_be_told_is_not_told() {
        assert_eq!(verdict(70, |step| step << 20), Leak::TooShort);
        assert_eq!(verdict(70, |_| 0).render(), "too few steps to detect a leak");
        assert_eq!(verdict(80, |_| 0).has_leaked(), Some(false));
        assert_eq!(verdict(80, |_| 0).render(), "no leak");
        let rows: Vec<StepRow> = (1..=500).map(|step| StepRow { step, ..StepRow::default() }).collect();
        assert_eq!(Leak::of(&rows, NOISE), Leak::TooShort, "not measured");
        // It rises for half of the run and then stays.
        let half = verdict(1000, |step| 4096 * step.min(560));
        assert_eq!(half.has_leaked(), None, "{half:?}");
        assert!(half.render().starts_with("cannot tell whether memory leaked: it rose by "), "{half:?}");
    }

    #[test]
    fn little_growth_is_drift_and_the_worst_part_counts() {
        let drift = verdict(1000, |step| 100 * step);
        assert_eq!((drift.has_leaked(), drift.render()), (Some(false), "no leak (85.35 KiB drift)".into()));
        let worst = Leak::worst([Leak::TooShort, drift, verdict(1000, |step| 9000 * step), drift]);
        assert_eq!(worst.has_leaked(), Some(true));
        assert_eq!(Leak::worst([Leak::TooShort, drift]), drift);
        assert_eq!(Leak::worst([]), Leak::TooShort);
    }
}
