//! Properties of the packer on random lives: nothing overlaps, nothing is lost, nothing is by chance.
//!
//! Lives are laid out by `pack` alone; what whole plans make of it is in `random_graphs`.

use proptest::prelude::*;
use smidgen_compile::arena::{Life, most_alive, pack};

/// Up to 60 buffers, a few of them empty, over up to 40 steps.
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

/// Lives that nest like parentheses: what forward keeps and backward frees in reverse.
fn nested_lives() -> impl Strategy<Value = Vec<Life>> {
    prop::collection::vec(1usize..50, 1..40).prop_map(|units| {
        let steps = 2 * units.len();
        let units = units.into_iter().enumerate();
        units.map(|(i, units)| Life { buffer: i, bytes: 256 * units, first: i, last: steps - i }).collect()
    })
}

fn alive_together(a: &Life, b: &Life) -> bool {
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
                prop_assert!(!alive_together(a, b) || apart || a.bytes == 0 || b.bytes == 0, "{i} over {j}");
            }
        }
    }

    #[test]
    fn the_span_lies_between_the_most_alive_and_the_sum(lives in lives()) {
        let (_, span) = pack(&lives);
        let alive_at = |step| lives.iter().filter(move |life: &&Life| (life.first..=life.last).contains(&step));
        let most = (0..40).map(|step| alive_at(step).map(|life| life.bytes).sum::<usize>()).max();
        prop_assert_eq!(most_alive(&lives), most.unwrap_or(0));
        prop_assert!(span >= most_alive(&lives));
        prop_assert!(span <= lives.iter().map(|life| life.bytes).sum::<usize>());
    }

    #[test]
    fn the_same_lives_get_the_same_offsets(lives in lives()) {
        prop_assert_eq!(pack(&lives), pack(&lives.clone()));
    }

    #[test]
    fn nested_lives_are_packed_without_a_gap(lives in nested_lives()) {
        prop_assert_eq!(pack(&lives).1, most_alive(&lives));
    }
}
