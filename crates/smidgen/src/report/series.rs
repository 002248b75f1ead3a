//! Reduces a series over steps to few points for a chart: extremes are kept, and a moving average shows the trend.
//!
//! A run of ten thousand steps has more points than a screen has columns. Each interval of steps keeps its lowest and
//! its highest value in their order, so no spike is lost; an interval without a finite value leaves a gap.

/// A point: step and value.
pub type Point = (f64, f64);

/// At most two points for each of `intervals` intervals, and the first and the last point.
pub fn keep_extremes(points: &[Point], intervals: usize) -> Vec<Point> {
    if points.len() <= 2 * intervals + 2 {
        return points.to_vec();
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    let inner = &points[1..points.len() - 1];
    let mut kept = vec![first];
    for interval in 0..intervals {
        let start = |interval: usize| interval * inner.len() / intervals;
        let part = &inner[start(interval)..start(interval + 1)];
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

/// As many points as `keep_extremes` gives, each the mean of an interval; the page's script smooths these.
pub fn keep_means(points: &[Point], intervals: usize) -> Vec<Point> {
    let count = 2 * intervals + 2;
    if points.len() <= count {
        return points.to_vec();
    }
    let mean_of = |part: &[Point]| {
        let finite = part.iter().filter(|point| point.1.is_finite());
        let (steps, sum, length) = finite.fold((0.0, 0.0, 0.0), |(steps, sum, length), point| {
            (steps + point.0, sum + point.1, length + 1.0)
        });
        if length > 0.0 { (steps / length, sum / length) } else { (part[0].0, f64::NAN) }
    };
    let start = |interval: usize| interval * points.len() / count;
    (0..count).map(|interval| mean_of(&points[start(interval)..start(interval + 1)])).collect()
}

/// The smoothing spans that the page offers, in steps.
const SPANS: [u64; 12] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

/// The smoothing spans for a run of this many steps: at most half of it.
pub fn spans(steps: u64) -> impl Iterator<Item = u64> {
    SPANS.into_iter().filter(move |span| *span == 1 || 2 * span <= steps)
}

/// The default smoothing span: at most a twenty-fifth of the run.
pub fn usual_span(steps: u64) -> u64 {
    SPANS.into_iter().filter(|span| 25 * span <= steps.max(125)).max().unwrap_or(1)
}

/// The exponential moving average over `span` steps (weight 2 / (span + 1) per step), with bias correction.
pub fn smooth(points: &[Point], span: u64) -> Vec<Point> {
    let decay = (span as f64 - 1.0) / (span as f64 + 1.0);
    let (mut sum, mut weight, mut last) = (0.0, 0.0, None);
    let mut next = |(step, value): Point| {
        if !value.is_finite() {
            return (step, f64::NAN);
        }
        let kept = decay.powf(last.map_or(1.0, |last| step - last));
        (sum, weight, last) = (kept * sum + (1.0 - kept) * value, kept * weight + (1.0 - kept), Some(step));
        (step, sum / weight)
    };
    points.iter().map(|point| next(*point)).collect()
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
        let line = smooth(&points, 5);
        assert!(line[1500].1.is_nan());
        assert!([999, 2000].iter().all(|step| (line[*step].1 - 1.0).abs() < 1e-12));
        let means = keep_means(&points, 100);
        assert!(means.len() == 202 && means[0].1 == 1.0 && means[60].1.is_nan(), "{:?}", means[60]);
        assert_eq!(median(points.iter().map(|point| point.1)), Some(1.0));
        assert_eq!(median([f64::NAN].into_iter()), None);
    }

    #[test]
    fn a_smooth_line_follows() {
        let points: Vec<Point> =
            (0..1000).map(|step| (step as f64, if step < 500 { 2.0 } else { 1.0 })).collect();
        let line = smooth(&points, 9);
        let near = |value: f64, wanted: f64| (value - wanted).abs() < 1e-9;
        assert!(near(line[0].1, 2.0) && near(line[499].1, 2.0) && near(line[999].1, 1.0));
        // A weight of a fifth for the new value.
        assert!(near(line[500].1, 1.8) && near(line[501].1, 1.64), "{:?}", &line[500..502]);
        assert!(line.is_sorted_by(|one, next| one.1 >= next.1 - 1e-12));
        assert_eq!(smooth(&points, 1), points);
    }

    /// The page's script smooths interval means; the result is close to smoothing all points.
    #[test]
    fn intervals_smooth_as_all_points_do() {
        let points: Vec<Point> = (0..10_000).map(|step| (step as f64, (step as f64 / 900.0).cos())).collect();
        let (all, means) = (smooth(&points, 200), smooth(&keep_means(&points, 300), 200));
        for (step, value) in &means[20..] {
            assert!((all[*step as usize].1 - value).abs() < 0.02, "{step}");
        }
    }

    #[test]
    fn spans_fit_the_run() {
        assert_eq!(spans(30).collect::<Vec<_>>(), [1, 2, 5, 10]);
        assert_eq!([30, 300, 10_000].map(usual_span), [5, 10, 200]);
        assert_eq!(spans(1).collect::<Vec<_>>(), [1]);
    }
}
