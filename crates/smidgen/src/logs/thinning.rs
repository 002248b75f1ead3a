//! Which steps of a very long run have a row in `metrics.jsonl` and in TensorBoard's event file.
//! Every step of the first 65,536 has one, then fewer and fewer, so that the files stay small.
//! Left out: the rows that are written in any case, such as that of the last step (`journal.rs`).

/// The steps that have a row each.
pub const DENSE_STEPS: u64 = 1 << 16;
const COARSER: u64 = 16;

/// Every this many steps, a step near `step` has a row: every step up to `dense`, then every 16th up to 16 times as
/// many, then every 256th, and so on. So 16 times as many steps add at most `dense` rows.
pub fn stride(step: u64, dense: u64) -> u64 {
    let mut stride = 1;
    while step / stride > dense {
        stride *= COARSER;
    }
    stride
}

/// Says that the rows of a run will be thinned, if it is that long.
pub fn describe_thinning(total_steps: u64) -> Option<String> {
    (total_steps > DENSE_STEPS).then(|| {
        format!(
            "metrics.jsonl and TensorBoard: every step up to {DENSE_STEPS}, then every {COARSER}th up to {}, and so on",
            DENSE_STEPS * COARSER
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_times_as_many_steps_add_few_rows() {
        let strides = [8, 9, 143, 144, 2303, 2304].map(|step| stride(step, 8));
        assert_eq!(strides, [1, 16, 16, 256, 256, 4096]);
        let rows = |total: u64| (1..=total).filter(|step| step.is_multiple_of(stride(*step, 8))).count();
        assert_eq!([8, 128, 2048, 32_768].map(rows), [8, 16, 24, 32]);
        assert_eq!((stride(DENSE_STEPS, DENSE_STEPS), stride(u64::MAX, DENSE_STEPS)), (1, 1 << 48));
        assert_eq!(describe_thinning(DENSE_STEPS), None);
        assert!(describe_thinning(DENSE_STEPS + 1).unwrap().contains("every 16th up to 1048576"));
    }
}
