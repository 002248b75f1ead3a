//! Descent: one choice after the other is varied, by schedules, as long as that lowers a score.
//!
//! The leanest policy is found like this, and so are the last gains in small models, where a kernel launch or a granule of
//! memory counts as much as a layer, so that the table only predicts roughly. Choices that must change together to gain
//! anything are left to the table.

use super::choices::Freedom;
use super::size::{Measured, Size};
use smidgen_ir::policy::Policy;

/// Descends from `start` to a policy from which no change of one choice lowers the score. A large model has everything
/// offloaded already, so only a few choices are varied.
pub fn descend(size: &Size, start: Policy, is_small: bool, score: impl Fn(&Policy) -> f64) {
    let freedom = &size.freedom;
    let mut least = score(&start);
    let mut policy = start;
    loop {
        let before = policy.clone();
        let mut try_policy = |other: Policy, policy: &mut Policy| {
            let needed = score(&other);
            let is_less = needed < least;
            if is_less {
                (*policy, least) = (other, needed);
            }
            is_less
        };
        for axis in 0..if is_small { Freedom::AXES } else { Freedom::AXES_OF_LARGE } {
            for other in freedom.variants(axis, &policy) {
                try_policy(other, &mut policy);
            }
        }
        for which in 0..if is_small { 2 } else { 1 } {
            for is_upwards in [false, true] {
                // The score is piecewise linear in the count, so the stride doubles as long as it falls.
                let mut stride = 1;
                loop {
                    let at = freedom.count(which, &policy);
                    let up = (at + stride).min(freedom.layers);
                    let next = if is_upwards { up } else { at.saturating_sub(stride) };
                    let other = freedom.with_count(which, &policy, next);
                    let is_less = next != at && try_policy(other, &mut policy);
                    match is_less {
                        true => stride *= 2,
                        false if stride > 1 => stride = 1,
                        false => break,
                    }
                }
            }
        }
        if policy == before {
            return;
        }
    }
}

/// Descends to fast policies that fit, at every size: from the fastest so far, the resident and the usually leanest one.
pub fn descend_to_fastest(sizes: &[Size], fits: impl Fn(&Size, &Measured) -> bool) {
    for size in sizes {
        let score = |policy: &Policy| {
            let measured = size.measure(policy);
            // What does not fit is worse than anything that does, and the fewer bytes the better.
            if fits(size, &measured) { -1.0 / measured.ms } else { measured.bytes as f64 }
        };
        let fastest = size.candidates().into_iter().find(|seen| fits(size, &seen.measured));
        let starts = [size.freedom.resident(), size.freedom.usually_leanest()];
        let starts = starts.into_iter().chain(fastest.map(|seen| seen.policy));
        starts.for_each(|start| descend_steeply(size, start, score));
    }
}

/// Descends from `start`, each time by the change of one choice that lowers the score most.
fn descend_steeply(size: &Size, start: Policy, score: impl Fn(&Policy) -> f64) {
    let freedom = &size.freedom;
    let (mut policy, mut least) = (start.clone(), score(&start));
    loop {
        let counts = [0, 1].into_iter().flat_map(|which| {
            let at = freedom.count(which, &policy);
            let next_to = [at.saturating_sub(1), (at + 1).min(freedom.layers)];
            next_to.map(|count| freedom.with_count(which, &policy, count))
        });
        let others = (0..Freedom::AXES).flat_map(|axis| freedom.variants(axis, &policy)).chain(counts);
        let scored = others.map(|other| (score(&other), other));
        let best = scored.min_by(|one, other| one.0.total_cmp(&other.0));
        match best.filter(|(score, _)| *score < least) {
            Some((score, other)) => (least, policy) = (score, other),
            None => return,
        }
    }
}
