//! Log-likelihoods of samples, computed by the entry point `eval` of a plan with row losses.
//!
//! Samples are packed as in any evaluation. The losses of a sample's rows are summed in f64.

use crate::failure::Failure;
use crate::session::feed::Feed;
use smidgen_data::eval_batch::for_each_eval_batch;
use smidgen_data::micro_batch::MicroBatch;
use smidgen_data::tokens::TokenSet;
use smidgen_ir::{Entry, Rank};
use smidgen_runtime::{Device, Executor};
use std::ops::Range;

/// Σ log p of the supervised tokens of each of the first `limit` samples (0: all). A rank computes its part of the
/// batches and has 0 for all other samples. Calls `on_samples` with the number of samples that are done.
pub fn log_likelihoods<D: Device>(
    executor: &mut Executor<D>,
    feed: &Feed,
    micro_batch: &mut MicroBatch,
    set: &TokenSet,
    limit: usize,
    part: Rank,
    on_samples: &dyn Fn(usize),
) -> Result<Vec<f64>, Failure> {
    let mut sums = vec![0.0; evaluated_samples(set, limit)];
    let nothing = |_: &mut MicroBatch| {};
    run_eval_batches(
        executor,
        feed,
        micro_batch,
        set,
        limit,
        part,
        nothing,
        |executor, micro_batch, range| {
            let rows_of = |sample: usize| std::iter::repeat_n(sample, set.supervised(sample) as usize);
            on_samples(range.end as usize);
            let mut samples = range.flat_map(|sample| rows_of(sample as usize));
            feed.read_row_losses(executor, micro_batch.rows.len(), |loss| {
                sums[samples.next().expect("every supervised row belongs to a sample")] -= f64::from(loss);
            })?;
            assert_eq!(samples.next(), None, "every sample has its rows");
            Ok(())
        },
    )?;
    Ok(sums)
}

/// Runs `eval` on this rank's part of the evaluation batches. Calls `complete` with each batch before it runs, and `after`
/// with its samples after.
pub fn run_eval_batches<D: Device>(
    executor: &mut Executor<D>,
    feed: &Feed,
    micro_batch: &mut MicroBatch,
    set: &TokenSet,
    limit: usize,
    part: Rank,
    mut complete: impl FnMut(&mut MicroBatch),
    mut after: impl FnMut(&mut Executor<D>, &MicroBatch, Range<u32>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let micro_tokens = executor.plan().extent.tokens;
    feed.write_loss_weight(executor, 1.0);
    let mut index = 0;
    for_each_eval_batch(set, limit, micro_tokens, |range| {
        index += 1;
        if index % part.of != part.index {
            return Ok(());
        }
        micro_batch.fill(set, range.clone()).map_err(Failure::disk)?;
        complete(micro_batch);
        // Without dropout the step has no effect.
        feed.write_micro_batch(executor, micro_batch, 0)?;
        executor.run(Entry::Eval, &micro_batch.extent())?;
        after(executor, micro_batch, range)
    })
}

/// How many samples are evaluated with a limit (0: all).
pub fn evaluated_samples(set: &TokenSet, limit: usize) -> usize {
    if limit == 0 { set.len() } else { (limit * set.rows().sequences()).min(set.len()) }
}

/// Fails if a log-likelihood is not finite, and names the first such sample.
pub fn check_finite(set: &TokenSet, log_likelihoods: &[f64], when: &str) -> Result<(), Failure> {
    match log_likelihoods.iter().position(|sum| !sum.is_finite()) {
        None => Ok(()),
        Some(sample) => Err(Failure::training(format!(
            "{when} is not finite: the log-likelihood of {} is {}",
            set.place(sample),
            log_likelihoods[sample]
        ))
        .hint("look for NaN in the weights or the adapter")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::adapted::build_adapted_request;
    use smidgen_compile::names::state;
    use smidgen_compile::{Request, compile_eval};
    use smidgen_formats::model::Model;
    use smidgen_ir::{Extent, LayerSet, Policy};
    use smidgen_runtime::Cpu;
    use std::path::Path;

    #[test]
    fn losses_of_many_rows_are_read_in_order() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        let model = Model::open_folder(&fixtures.join("eval/model")).unwrap();
        let extent = Extent { tokens: 2600, rows: 2600, segments: 1, audio: 0 };
        let request = build_adapted_request(&model, None).unwrap();
        let request = Request { extent, row_losses: true, threads: 1, ..request };
        let mut executor = Executor::load(
            compile_eval(&request, &Policy::resident(LayerSet::none(), 64)),
            Cpu::new(1).unwrap(),
        )
        .unwrap();
        let leaf = executor.plan().leaf_named(state::ROW_LOSSES).unwrap();
        let bytes: Vec<u8> = (0..2600u16).flat_map(|row| f32::from(row).to_le_bytes()).collect();
        executor.write(leaf, &bytes);
        let feed = Feed::of(executor.plan(), 0);
        for rows in [0, 1, 1023, 1024, 1025, 2048, 2600] {
            let mut found = Vec::new();
            feed.read_row_losses(&mut executor, rows, |loss| found.push(loss)).unwrap();
            assert!(found.iter().copied().eq((0..rows as u16).map(f32::from)), "{rows} rows");
        }
    }
}
