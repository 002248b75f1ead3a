//! Reduces a series over steps to what can be drawn: extremes are kept, and a smooth line shows the trend.
//!
//! A run of ten thousand steps has more points than a screen has columns. Each interval keeps its lowest and its highest
//! value, in their order, so that no spike is lost; a value that is not finite leaves a gap.

/// A point: step and value.
pub type Point = (f64, f64);

/// At most two points for each of `stretches` intervals, and the first and the last point.
pub fn keep_extremes(points: &[Point], stretches: usize) -> Vec<Point> {
    if points.len() <= 2 * stretches + 2 {
        return points.to_vec();
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    let inner = &points[1..points.len() - 1];
    let mut kept = vec![first];
    for stretch in 0..stretches {
        let at = |part: usize| part * inner.len() / stretches;
        let part = &inner[at(stretch)..at(stretch + 1)];
        let finite = || part.iter().enumerate().filter(|(_, point)| point.1.is_finite());
        let low = finite().min_by(|a, b| a.1.1.total_cmp(&b.1.1));
        let high = finite().max_by(|a, b| a.1.1.total_cmp(&b.1.1));
        match (low, high) {
            (Some((low, _)), Some((high, _))) if low == high => kept.push(part[low]),
            (Some((low, _)), Some((high, _))) => kept.extend([part[low.min(high)], part[low.max(high)]]),
            // Nothing finite: a gap.
            _ => kept.extend(part.first()),
        }
    }
    kept.push(last);
    kept
}

/// The moving average over a fiftieth of the run.
pub fn smooth(points: &[Point]) -> Vec<Point> {
    let reach = (points.len() / 100).clamp(2, 250);
    // Prefix sums and counts, so that a window costs as much as a point.
    let mut before = vec![(0.0, 0usize)];
    for (_, value) in points {
        let (sum, count) = before[before.len() - 1];
        before.push(if value.is_finite() { (sum + value, count + 1) } else { (sum, count) });
    }
    let mean = |index: usize| {
        let (low, high) =
            (before[index.saturating_sub(reach)], before[(index + reach + 1).min(points.len())]);
        (high.0 - low.0) / (high.1 - low.1) as f64
    };
    points.iter().enumerate().map(|(index, point)| (point.0, mean(index))).collect()
}

/// The median of the finite values.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    let middle = values.len() / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(middle, f64::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_spike_is_lost() {
        let mut points: Vec<Point> = (0..10_000).map(|step| (step as f64, (step % 7) as f64)).collect();
        points[4321].1 = 99.0;
        points[8765].1 = -99.0;
        let kept = keep_extremes(&points, 300);
        assert!(kept.len() <= 602, "{}", kept.len());
        assert!(kept.contains(&(4321.0, 99.0)) && kept.contains(&(8765.0, -99.0)));
        assert_eq!((kept[0], kept[kept.len() - 1]), (points[0], points[9999]));
        assert!(kept.is_sorted_by(|one, next| one.0 < next.0));
        assert_eq!(keep_extremes(&points[..50], 300), points[..50]);
    }

    #[test]
    fn what_is_not_finite_leaves_a_gap() {
        let values = |step: usize| if (1000..2000).contains(&step) { f64::NAN } else { 1.0 };
        let points: Vec<Point> = (0..5000).map(|step| (step as f64, values(step))).collect();
        let kept = keep_extremes(&points, 100);
        assert!(kept.iter().any(|point| point.1.is_nan()));
        assert!(
            kept.iter().filter(|point| point.1.is_nan()).all(|point| (1000.0..2000.0).contains(&point.0))
        );
        let line = smooth(&points);
        assert!(line[999].1 == 1.0 && line[1500].1.is_nan() && line[2000].1 == 1.0);
        assert_eq!(median(points.iter().map(|point| point.1)), Some(1.0));
        assert_eq!(median([f64::NAN].into_iter()), None);
    }

    #[test]
    fn a_smooth_line_follows() {
        let points: Vec<Point> =
            (0..1000).map(|step| (step as f64, if step < 500 { 2.0 } else { 1.0 })).collect();
        let line = smooth(&points);
        assert_eq!((line[0].1, line[489].1, line[510].1, line[999].1), (2.0, 2.0, 1.0, 1.0));
        assert!(line.is_sorted_by(|one, next| one.1 >= next.1 - 1e-12));
    }
}
