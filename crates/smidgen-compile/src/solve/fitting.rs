//! Whether a request fits into a budget at one size of micro-batch, without looking for its fastest plan.
//!
//! Searches for the largest size, rank or context that fits ask this many times. A yes is cheap: one policy is usually the
//! leanest, or the one that was at another size, and one schedule shows that it fits. A no is expensive, because every other policy must be ruled out. So
//! [`largest`] asks the quick question until it knows roughly where the answer is, and the thorough one only there.

use super::leanest::leanest;
use super::purposes::pins_for;
use super::question::{Demand, Question};
use super::size::{SearchState, Size};
use super::{sharded_pins, shardings};
use crate::request::Request;
use smidgen_ir::policy::{Pins, Policy};
use std::cell::RefCell;

/// How hard to look for a policy that fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Only at the policy that is usually the leanest, and at the one that the last thorough look found.
    Quick,
    /// At every policy that may be leaner.
    Thorough,
}

/// Answers for one request, and for requests that differ from it in what they adapt or train. The demands of the question
/// play no part.
pub struct Fitting<'a> {
    question: Question<'a>,
    alternatives: Vec<Alternative>,
}

/// One way to divide state over ranks.
struct Alternative {
    pins: Pins,
    /// The graphs of the request, which all sizes share.
    state: SearchState,
    /// What the last thorough look found to be the leanest: mostly it also is for the next size or request.
    learned: RefCell<Option<Policy>>,
}

impl<'a> Fitting<'a> {
    pub fn of(question: Question<'a>) -> Fitting<'a> {
        let shardings = shardings(question.purpose, question.request.rank, question.pins);
        let alternative = |sharding| {
            let pins = pins_for(question.purpose, &sharded_pins(&question, sharding));
            Alternative { pins, state: SearchState::default(), learned: RefCell::default() }
        };
        Fitting { question, alternatives: shardings.into_iter().map(alternative).collect() }
    }

    pub fn fits(&self, demand: &Demand, look: Look) -> bool {
        let mut alternatives = self.alternatives.iter();
        alternatives.any(|alternative| alternative.fits(&self.question, &alternative.state, demand, look))
    }

    /// Whether another request fits, which shares what was learned but no graphs.
    pub fn fits_with(&self, request: &Request, demand: &Demand, look: Look) -> bool {
        let question = Question { request, ..self.question };
        let mut alternatives = self.alternatives.iter();
        alternatives.any(|alternative| alternative.fits(&question, &SearchState::default(), demand, look))
    }

    /// The peak of the plan of the policy that is usually the leanest; `None` if it does not fit.
    pub fn usual_peak_bytes(&self, demand: &Demand) -> Option<u64> {
        self.alternatives.iter().find_map(|Alternative { pins, state, .. }| {
            let question = Question { pins, ..self.question };
            let size = Size::new(&question, demand, state);
            size.packed_peak_bytes(&size.freedom.usually_leanest(), question.budget)
        })
    }
}

impl Alternative {
    fn fits(&self, question: &Question, state: &SearchState, demand: &Demand, look: Look) -> bool {
        let question = Question { pins: &self.pins, ..*question };
        let size = Size::new(&question, demand, state);
        let learned = self.learned.borrow().clone().map(|policy| size.freedom.at_this_size(policy));
        let policies = [Some(size.freedom.usually_leanest()), learned];
        if policies.into_iter().flatten().any(|policy| size.packs(&policy)) {
            return true;
        }
        if look == Look::Quick || self.pins.is_complete() {
            return false;
        }
        let least = leanest(&size, question.budget.offload_bytes);
        let fitting = least.filter(|least| least.peak_bytes <= question.budget.device_bytes);
        if let Some(least) = &fitting {
            self.learned.replace(Some(least.policy.clone()));
        }
        fitting.is_some()
    }
}

/// The largest number from 1 to `most` that fits, if any does. If a number fits, all smaller ones must fit too, and a
/// quick yes must be a thorough yes. A thorough yes may make the quick looks after it better.
pub fn largest(most: usize, fits: impl Fn(usize, Look) -> bool) -> Option<usize> {
    // `low` fits, `high` does not; each thorough yes that teaches the quick look nothing doubles the stride.
    let (mut low, mut high, mut stride) = (0, most + 1, 1);
    while high - low > 1 {
        // Often not even the next number fits, and one look shows it.
        if fits(low + 1, Look::Quick) {
            (low, stride) = (last_that(low + 1, high, |number| fits(number, Look::Quick)), 1);
            continue;
        }
        // Mostly the next number does not fit at all, and one thorough look is enough.
        let next = (low + stride).min(low + (high - low).div_ceil(2)).min(high - 1);
        if fits(next, Look::Thorough) {
            (low, stride) = (next, 2 * stride);
        } else {
            high = next;
        }
    }
    (low > 0).then_some(low)
}

/// The last number for which `is_in` holds, if it holds for `low` and not for `high`.
fn last_that(mut low: usize, mut high: usize, is_in: impl Fn(usize) -> bool) -> usize {
    while high - low > 1 {
        let middle = low.midpoint(high);
        if is_in(middle) { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in 0..20 {
            for limit in 0..25 {
                for quick_limit in 0..=limit {
                    let fits = |number, look| match look {
                        Look::Quick => number <= quick_limit,
                        Look::Thorough => number <= limit,
                    };
                    let want = most.min(limit);
                    assert_eq!(
                        largest(most, fits),
                        (want > 0).then_some(want),
                        "{most} {limit} {quick_limit}"
                    );
                }
            }
        }
    }

    #[test]
    fn one_thorough_look_is_enough_where_the_quick_one_is_right() {
        let thorough = Cell::new(0);
        let fits = |number, look| {
            thorough.set(thorough.get() + usize::from(look == Look::Thorough));
            number <= 1234
        };
        assert_eq!(largest(4096, fits), Some(1234));
        assert_eq!(thorough.get(), 1);
    }

    #[test]
    fn where_the_quick_look_is_never_right_few_thorough_ones_are_needed() {
        for limit in 1..2000 {
            let thorough = Cell::new(0);
            let fits = |number, look| {
                thorough.set(thorough.get() + usize::from(look == Look::Thorough));
                look == Look::Thorough && number <= limit
            };
            assert_eq!(largest(4096, fits), Some(limit));
            assert!(thorough.get() <= 24, "{limit}: {}", thorough.get());
        }
    }
}
