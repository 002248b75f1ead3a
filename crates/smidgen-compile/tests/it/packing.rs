//! Properties of `pack` on random lifetimes: nothing overlaps, nothing is lost, and results are deterministic.
//!
//! Whole plans are tested in `random_graphs`.

use proptest::prelude::*;
use smidgen_compile::arena::{Life, pack, peak_live_bytes};

/// Up to 60 buffers in up to 40 steps; a few are empty.
fn lives() -> impl Strategy<Value = Vec<Life>> {
    let life = (0usize..20, 0usize..40, 0usize..40);
    prop::collection::vec(life, 0..60).prop_map(|lives| {
        let lives = lives.into_iter().enumerate();
        lives
            .map(|(buffer, (units, a, b))| Life {
                buffer,
                bytes: 256 * units,
                first: a.min(b),
                last: a.max(b),
            })
            .collect()
    })
}

/// Lifetimes that nest like parentheses, as those of activations that forward keeps and backward frees in reverse order.
fn nested_lives() -> impl Strategy<Value = Vec<Life>> {
    prop::collection::vec(1usize..50, 1..40).prop_map(|units| {
        let steps = 2 * units.len();
        let units = units.into_iter().enumerate();
        units.map(|(i, units)| Life { buffer: i, bytes: 256 * units, first: i, last: steps - i }).collect()
    })
}

fn meet(a: &Life, b: &Life) -> bool {
    a.first <= b.last && b.first <= a.last
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn live_buffers_never_overlap(lives in lives()) {
        let (offsets, span) = pack(&lives);
        prop_assert_eq!(offsets.len(), lives.len());
        for (i, a) in lives.iter().enumerate() {
            prop_assert!(offsets[i] + a.bytes <= span, "buffer {} leaves the span {}", i, span);
            prop_assert!(offsets[i] % 256 == 0);
            for (j, b) in lives.iter().enumerate().skip(i + 1) {
                let apart = offsets[i] + a.bytes <= offsets[j] || offsets[j] + b.bytes <= offsets[i];
                prop_assert!(!meet(a, b) || apart || a.bytes == 0 || b.bytes == 0, "{i} over {j}");
            }
        }
    }

    #[test]
    fn the_span_is_between_the_peak_and_the_sum(lives in lives()) {
        let (_, span) = pack(&lives);
        let live_at = |step| lives.iter().filter(move |life: &&Life| (life.first..=life.last).contains(&step));
        let most = (0..40).map(|step| live_at(step).map(|life| life.bytes).sum::<usize>()).max();
        prop_assert_eq!(peak_live_bytes(&lives), most.unwrap_or(0));
        prop_assert!(span >= peak_live_bytes(&lives));
        prop_assert!(span <= lives.iter().map(|life| life.bytes).sum::<usize>());
    }

    #[test]
    fn the_same_lives_get_the_same_offsets(lives in lives()) {
        prop_assert_eq!(pack(&lives), pack(&lives.clone()));
    }

    #[test]
    fn nested_lives_are_packed_without_a_gap(lives in nested_lives()) {
        prop_assert_eq!(pack(&lives).1, peak_live_bytes(&lives));
    }
}
