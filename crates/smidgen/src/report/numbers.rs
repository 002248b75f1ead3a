//! Numbers formatted for people, and round ticks for an axis.
//!
//! Bytes have binary units; thousands are grouped. Ticks are multiples of 1, 2 or 5 times a power of ten, in the unit
//! of the largest value.

use smidgen_ir::bytes::format_bytes;
use smidgen_ir::grouped_digits::Grouped;

/// The unit of a chart's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Plain,
    Bytes,
    Milliseconds,
    Percent,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Unit::Plain => "plain",
            Unit::Bytes => "bytes",
            Unit::Milliseconds => "ms",
            Unit::Percent => "percent",
        }
    }

    pub fn render(self, value: f64) -> String {
        match self {
            _ if !value.is_finite() => "not finite".into(),
            Unit::Bytes => format_bytes(value.max(0.0) as u64),
            Unit::Milliseconds => format!("{} ms", short(value)),
            Unit::Percent => format!("{value:.0} %"),
            Unit::Plain => short(value),
        }
    }
}

/// Four significant digits with grouped thousands, or an exponent if the number is too small or too large.
pub fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".into(),
        _ if !value.is_finite() => value.to_string(),
        1000.0..1e7 => grouped(value.round() as i64),
        100.0..1000.0 => trimmed(format!("{value:.1}")),
        10.0..100.0 => trimmed(format!("{value:.2}")),
        1.0..10.0 => trimmed(format!("{value:.3}")),
        0.001..1.0 => trimmed(format!("{value:.4}")),
        _ => format!("{value:.2e}"),
    }
}

fn trimmed(text: String) -> String {
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

pub fn grouped(value: i64) -> String {
    format!("{}{}", if value < 0 { "-" } else { "" }, Grouped(value.unsigned_abs()))
}

/// A time in its two largest units of hours, minutes and seconds.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0).round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, _) if seconds < 10.0 => format!("{seconds:.1} s"),
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

/// A time of milliseconds, with this many decimals, or in seconds or minutes if it is long.
pub fn milliseconds(ms: f64, decimals: usize) -> String {
    if ms < 999.5 { format!("{ms:.decimals$} ms") } else { duration(ms / 1e3) }
}

/// The range of an axis, and its ticks.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    pub low: f64,
    pub high: f64,
    pub is_log: bool,
    /// Round numbers and their labels.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From zero to `high`.
    pub fn from_zero(high: f64, unit: Unit) -> Axis {
        let high = if high.is_finite() && high > 0.0 { high } else { 1.0 };
        Axis { low: 0.0, high, is_log: false, ticks: ticks(0.0, high, unit) }
    }

    /// A range around all values; not empty even if all values are equal.
    pub fn around(values: impl Iterator<Item = f64>) -> Axis {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| value.is_finite()) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            return Axis::from_zero(1.0, Unit::Plain);
        }
        let room = if high > low { 0.06 * (high - low) } else { (0.1 * high.abs()).max(1e-9) };
        // Values that are never negative need no range below zero.
        let low = if low >= 0.0 { (low - room).max(0.0) } else { low - room };
        Axis { low, high: high + room, is_log: false, ticks: ticks(low, high + room, Unit::Plain) }
    }

    /// A logarithmic range around all values above zero; `None` without any.
    pub fn log_around(values: impl Iterator<Item = f64>) -> Option<Axis> {
        let above = values.filter(|value| value.is_finite() && *value > 0.0);
        let (low, high) =
            above.fold((f64::INFINITY, 0.0f64), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return None;
        }
        let (low, high) = (low / 1.06, high * 1.06);
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let every = ((powers.clone().count() as i32 - 1) / 6).max(1);
        let within = |times: &'static [f64]| {
            let powers = powers.clone().filter(move |power| power % every == 0);
            let all = powers.flat_map(move |power| times.iter().map(move |times| times * 10f64.powi(power)));
            all.filter(|value| (low..=high).contains(value)).collect::<Vec<f64>>()
        };
        let round: &[f64] = if high / low < 1000.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        // A range that is too narrow for these ticks has linear ones.
        let ticks = match within(round) {
            values if values.len() > 2 => values.into_iter().map(|value| (value, short(value))).collect(),
            _ => ticks(low, high, Unit::Plain),
        };
        Some(Axis { low, high, is_log: true, ticks })
    }

    /// The position of a value: 0 at the low end, 1 at the high end.
    pub fn place(&self, value: f64) -> f64 {
        let part = if self.is_log {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        part.clamp(0.0, 1.0)
    }
}

fn ticks(low: f64, high: f64, unit: Unit) -> Vec<(f64, String)> {
    let (scale, suffix) = match unit {
        Unit::Bytes => byte_scale(high),
        Unit::Milliseconds => (1.0, "ms"),
        Unit::Percent => (1.0, "%"),
        Unit::Plain => (1.0, ""),
    };
    let step = round_step((high - low) / scale / 5.5);
    let first = (low / scale / step).ceil() as i64;
    let last = (high / scale / step).floor() as i64;
    let decimals = (-step.log10().floor()).clamp(0.0, 12.0) as usize;
    let is_wide = (high / scale).abs() >= 1e6 || (high / scale).abs() < 1e-3;
    let label = |value: f64| match value {
        0.0 => "0".to_string(),
        _ if is_wide => format!("{value:.1e}").replace(".0e", "e"),
        _ if step >= 1.0 => grouped(value.round() as i64),
        _ => format!("{value:.decimals$}"),
    };
    let with_unit = |index: i64| match (suffix, index as f64 * step) {
        ("", value) | (_, value @ 0.0) => label(value),
        // A time axis has little room for labels.
        ("ms", value) if index < last => label(value),
        (_, value) => format!("{} {suffix}", label(value)),
    };
    (first..=last).map(|index| (index as f64 * step * scale, with_unit(index))).collect()
}

fn byte_scale(high: f64) -> (f64, &'static str) {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (1..units.len()).rev().find(|unit| high >= 1024f64.powi(*unit as i32)).unwrap_or(0);
    (1024f64.powi(unit as i32), units[unit])
}

/// The smallest of 1, 2 and 5 times a power of ten that is at least this.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|times| times * power >= least * 0.999_999);
    step.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(
            labels(&Axis::from_zero(10_000.0, Unit::Plain)),
            ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]
        );
        assert_eq!(
            labels(&Axis::from_zero(7.3 * (1u64 << 30) as f64, Unit::Bytes)),
            ["0", "2 GiB", "4 GiB", "6 GiB"]
        );
        assert_eq!(labels(&Axis::from_zero(2e-4, Unit::Plain)), ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]);
        assert_eq!(labels(&Axis::around([0.9, 2.4].into_iter())), ["1.0", "1.5", "2.0"]);
        assert_eq!(
            labels(&Axis::from_zero(2396.0, Unit::Milliseconds)),
            ["0", "500", "1,000", "1,500", "2,000 ms"]
        );
        let log = |values: &[f64]| Axis::log_around(values.iter().copied()).unwrap();
        assert_eq!(labels(&log(&[0.02, 30.0])), ["0.1", "1", "10"]);
        assert_eq!(labels(&log(&[0.2, 1.8, f64::NAN, -3.0])), ["0.2", "0.5", "1"]);
        assert_eq!(labels(&log(&[2.1, 2.4])), ["2.0", "2.2", "2.4"]);
        assert_eq!(
            labels(&log(&[1e-9, 1e9])),
            ["1.00e-9", "1.00e-6", "0.001", "1", "1,000", "1,000,000", "1.00e9"]
        );
        assert_eq!(Axis::log_around([0.0, f64::NAN].into_iter()), None);
        let flat = Axis::around([3.0, 3.0].into_iter());
        assert!((flat.place(3.0) - 0.5).abs() < 1e-12);
        assert_eq!(labels(&Axis::around(std::iter::empty())), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
    }

    #[test]
    fn places_are_within_the_axis() {
        let axis = Axis::log_around([0.1, 1000.0].into_iter()).unwrap();
        assert!((axis.place(10.0) - 0.5).abs() < 0.2);
        assert_eq!((axis.place(0.0), axis.place(1e9)), (0.0, 1.0));
    }

    #[test]
    fn numbers_for_people() {
        for (value, text) in [
            (0.0, "0"),
            (1234.5, "1,235"),
            (0.012345, "0.0123"),
            (2.5, "2.5"),
            (100.0, "100"),
            (1e-9, "1.00e-9"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!(grouped(-1234567), "-1,234,567");
        for (seconds, text) in [(3.21, "3.2 s"), (42.0, "42 s"), (61.0, "1 min 1 s"), (7_260.0, "2 h 1 min")]
        {
            assert_eq!(duration(seconds), text);
        }
    }
}
