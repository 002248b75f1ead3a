//! Which experts a token chooses and how much each counts, with its gradient; and the rows of all tokens sorted by expert.
//!
//! With scores s of the logits, chosen scores v, and weights w = scale · v / Σv (or scale · v):
//! dv = (dw - Σ dw·w/scale) · scale / Σv (or scale · dw), and dlogits is that of the softmax or sigmoid, with dv = 0 for
//! experts that were not chosen.
//! Left out: the rows themselves (`spread.rs`) and their matmuls (`run_experts.rs`).

use super::chunk::{Chunk, for_each_row_chunk};
use super::view::{Dst, DstRows, Src, SrcRows, StoredVector};
use smidgen_ir::{Router, RouterGroups, RouterScores};

/// The weights and the numbers of the chosen experts of each token.
pub fn route(
    router: &Router,
    logits: SrcRows, // (T, E)
    correction: Option<StoredVector>,
    expert_scales: Option<StoredVector>,
    weights: DstRows,  // (T, J)
    choices: Dst<i32>, // (T, J)
) {
    let numbers = |vector: Option<StoredVector>, other: f32| -> Vec<f32> {
        (0..router.experts).map(|expert| vector.map_or(other, |vector| vector.get(expert))).collect()
    };
    let (correction, expert_scales) = (numbers(correction, 0.0), numbers(expert_scales, 1.0));
    for_each_row_chunk(logits.rows(), router.experts, |Chunk { start, len, .. }| {
        let (mut scores, mut ranked) = (vec![0.0; router.experts], vec![0.0; router.experts]);
        for token in start..start + len {
            score(router.scores, logits.row(token), &mut scores);
            ranked
                .iter_mut()
                .zip(&scores)
                .zip(&correction)
                .for_each(|((rank, score), add)| *rank = score + add);
            if let Some(groups) = &router.groups {
                keep_groups(groups, &mut ranked);
            }
            let chosen: Vec<usize> = (0..router.chosen).map(|_| take_largest(&mut ranked)).collect();
            let factor = router.scale / sum_of(router, chosen.iter().map(|expert| scores[*expert]));
            for (column, expert) in chosen.into_iter().enumerate() {
                choices.set(token * router.chosen + column, expert as i32);
                weights.row(token).set(column, scores[expert] * factor * expert_scales[expert]);
            }
        }
    });
}

/// The gradient of the logits, and that of the expert scales added to `dscales`.
pub fn route_grad(
    router: &Router,
    logits: SrcRows,   // (T, E)
    choices: Src<i32>, // (T, J)
    dweights: SrcRows, // (T, J)
    expert_scales: Option<StoredVector>,
    dlogits: DstRows, // (T, E)
    dscales: Option<Dst<f32>>,
) {
    let scales: Vec<f32> =
        (0..router.experts).map(|expert| expert_scales.map_or(1.0, |scales| scales.get(expert))).collect();
    let expert_of = |token: usize, column: usize| choices.get(token * router.chosen + column) as usize;
    for_each_row_chunk(logits.rows(), router.experts, |Chunk { start, len, .. }| {
        let mut scores = vec![0.0; router.experts];
        for token in start..start + len {
            score(router.scores, logits.row(token), &mut scores);
            let (chosen, dw) = (0..router.chosen, dweights.row(token));
            let sum = sum_of(router, chosen.clone().map(|column| scores[expert_of(token, column)]));
            let du = |column: usize| dw.get(column) * router.scale * scales[expert_of(token, column)];
            let shared: f32 = if router.renormalizes {
                chosen.clone().map(|column| du(column) * scores[expert_of(token, column)] / sum).sum()
            } else {
                0.0
            };
            let dscore = |column: usize| (du(column) - shared) / sum;
            let mean: f32 = match router.scores {
                RouterScores::Softmax => {
                    chosen.clone().map(|column| dscore(column) * scores[expert_of(token, column)]).sum()
                }
                RouterScores::Sigmoid => 0.0,
            };
            let row = dlogits.row(token);
            (0..router.experts).for_each(|expert| row.set(expert, -mean * scores[expert]));
            for column in chosen {
                let expert = expert_of(token, column);
                let score = scores[expert];
                row.set(
                    expert,
                    match router.scores {
                        RouterScores::Softmax => (dscore(column) - mean) * score,
                        RouterScores::Sigmoid => dscore(column) * score * (1.0 - score),
                    },
                );
            }
        }
    });
    let Some(dscales) = dscales else { return };
    let mut scores = vec![0.0; router.experts];
    for token in 0..logits.rows() {
        score(router.scores, logits.row(token), &mut scores);
        let sum = sum_of(router, (0..router.chosen).map(|column| scores[expert_of(token, column)]));
        for column in 0..router.chosen {
            let expert = expert_of(token, column);
            let change = dweights.row(token).get(column) * router.scale * scores[expert] / sum;
            dscales.set(expert, dscales.src().get(expert) + change);
        }
    }
}

/// The sorted row of each choice, and the expert of each sorted row.
pub fn dispatch(choices: Src<i32>, experts: usize, places: Dst<i32>, sorted: Dst<i32>) {
    let mut next = vec![0usize; experts + 1];
    (0..choices.len()).for_each(|index| next[choices.get(index) as usize + 1] += 1);
    (0..experts).for_each(|expert| next[expert + 1] += next[expert]);
    for index in 0..choices.len() {
        let expert = choices.get(index);
        let place = &mut next[expert as usize];
        places.set(index, *place as i32);
        sorted.set(*place, expert);
        *place += 1;
    }
}

fn score(kind: RouterScores, logits: Src<f32>, scores: &mut [f32]) {
    scores.iter_mut().enumerate().for_each(|(expert, score)| *score = logits.get(expert));
    match kind {
        RouterScores::Sigmoid => scores.iter_mut().for_each(|score| *score = 1.0 / (1.0 + (-*score).exp())),
        RouterScores::Softmax => {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        }
    }
}

/// The sum by which chosen scores are divided; 1 if they are used as they are.
fn sum_of(router: &Router, chosen: impl Iterator<Item = f32>) -> f32 {
    if router.renormalizes { chosen.sum::<f32>() + router.added_to_sum } else { 1.0 }
}

/// Rules out the experts of all groups but the best.
fn keep_groups(groups: &RouterGroups, ranked: &mut [f32]) {
    let size = ranked.len() / groups.count;
    let rank_of = |group: &[f32]| {
        let mut rest = group.to_vec();
        let best = (0..groups.best.min(size)).map(|_| {
            let index = take_largest(&mut rest);
            group[index]
        });
        best.sum::<f32>()
    };
    let mut ranks: Vec<f32> = ranked.chunks_exact(size).map(rank_of).collect();
    let kept: Vec<usize> = (0..groups.chosen).map(|_| take_largest(&mut ranks)).collect();
    for (group, ranked) in ranked.chunks_exact_mut(size).enumerate() {
        if !kept.contains(&group) {
            ranked.fill(f32::NEG_INFINITY);
        }
    }
}

/// The first index of the largest number, which is then taken out. A number that was taken out is NaN, and is only chosen
/// again if there is no other.
fn take_largest(numbers: &mut [f32]) -> usize {
    let mut largest: Option<usize> = None;
    for (index, number) in numbers.iter().enumerate() {
        if !number.is_nan() && largest.is_none_or(|largest| *number > numbers[largest]) {
            largest = Some(index);
        }
    }
    let largest = largest.unwrap_or(0);
    numbers[largest] = f32::NAN;
    largest
}
