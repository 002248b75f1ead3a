//! Tests of the builder of token sets: what is dropped, cut and counted, in memory and in a file.

use super::*;
use crate::row_place::RowUnit;
use crate::tokens::FileOfSamples;
use std::path::Path;

const LIMITS: TokenLimits = TokenLimits { vocab_size: 100, max_tokens: 8, overflow: Overflow::Truncate };

fn place(number: u64) -> RowPlace<'static> {
    RowPlace { file: Path::new("a.jsonl"), unit: RowUnit::Line, number }
}

fn build(limits: TokenLimits, rows: &[(&[i64], Option<&[i64]>)]) -> Result<TokenSet, TokensError> {
    let mut builder = TokenSetBuilder::new(limits);
    for (row, (ids, labels)) in rows.iter().enumerate() {
        builder.push(place(row as u64 + 1), ids, *labels)?;
    }
    builder.finish()
}

#[test]
fn samples_keep_ids_and_labels_whatever_the_order_of_masked_rows() {
    let plain: (&[i64], Option<&[i64]>) = (&[1, 2, 3], None);
    let masked: (&[i64], Option<&[i64]>) = (&[4, 5, 6, 7], Some(&[-100, -100, 6, 9]));
    for (rows, first_masked) in [([plain, masked], 1), ([masked, plain], 0)] {
        let set = build(LIMITS, &rows).unwrap();
        assert_eq!(set.len(), 2);
        let sample = set.sample(first_masked).unwrap();
        assert_eq!(sample.ids, [4, 5, 6, 7]);
        assert_eq!(sample.labels, [-100, -100, 6, 9]);
        assert_eq!(set.supervised(first_masked), 2);
        let sample = set.sample(1 - first_masked).unwrap();
        assert_eq!(sample.ids, [1, 2, 3]);
        assert_eq!(sample.labels, [1, 2, 3]);
        assert_eq!(set.supervised(1 - first_masked), 2);
        assert_eq!(set.length(first_masked), 4);
    }
}

#[test]
fn labels_that_are_tokens_take_a_bit() {
    let set = build(LIMITS, &[(&[1, 2, 3], None), (&[4, 5], Some(&[-100, 5]))]).unwrap();
    // 5 ids, 2 bytes of bits, 2 lengths, 2 counts, 2 row numbers, one block, one file with its name.
    let file_bytes = size_of::<FileOfSamples>() + size_of::<PathBuf>() + "a.jsonl".len();
    assert_eq!(set.heap_bytes(), 5 * 4 + 2 + 2 * 4 + 2 * 4 + 2 * 4 + 8 + file_bytes);
    assert_eq!(set.sample(1).unwrap().labels, [-100, 5]);
    let numbers = build(LIMITS, &[(&[1, 2, 3], None), (&[4, 5], Some(&[-100, 6]))]).unwrap();
    assert_eq!(numbers.heap_bytes(), set.heap_bytes() - 2 + 5 * 4);
    assert_eq!(numbers.sample(0).unwrap().labels, [1, 2, 3]);
    assert_eq!(numbers.sample(1).unwrap().labels, [-100, 6]);
}

/// Rows whose lengths and labels differ, of any number of blocks.
fn varied(rows: usize, numbers: bool) -> Vec<(Vec<i64>, Vec<i64>)> {
    (0..rows)
        .map(|row| {
            let ids: Vec<i64> = (0..2 + row % 7).map(|t| ((row * 31 + t * 7) % 100) as i64).collect();
            let mut labels = ids.clone();
            labels[..row % ids.len()].fill(-100);
            if numbers && row % 5 == 4 {
                let last = labels.len() - 1;
                labels[last] = 99 - labels[last];
            }
            (ids, labels)
        })
        .collect()
}

#[test]
fn a_large_set_is_the_same_in_its_file() {
    let folder = tempfile::tempdir().unwrap();
    for numbers in [false, true] {
        let rows = varied(300, numbers);
        for above_bytes in [0, 100, 1000, 1 << 20] {
            let path = folder.path().join(format!("{numbers}-{above_bytes}"));
            let form = if numbers { LabelForm::Numbers } else { LabelForm::Bits };
            let large = LargeSets { above_bytes, path: path.clone(), form };
            let mut builder = TokenSetBuilder::with_large_sets(LIMITS, large);
            for (row, (ids, labels)) in rows.iter().enumerate() {
                builder.push(place(row as u64 + 1), ids, Some(labels)).unwrap();
            }
            let set = builder.finish().unwrap();
            assert_eq!(set.is_on_disk(), above_bytes < 1 << 20);
            assert_eq!(path.exists(), set.is_on_disk());
            for (index, (ids, labels)) in rows.iter().enumerate() {
                let sample = set.sample(index).unwrap();
                assert!(sample.ids.iter().map(|&id| i64::from(id)).eq(ids.iter().copied()), "{index}");
                assert!(sample.labels.iter().map(|&l| i64::from(l)).eq(labels.iter().copied()), "{index}");
            }
            if set.is_on_disk() {
                // Lengths, counts, row numbers and blocks of 32, and the names of the two files.
                let names = size_of::<FileOfSamples>() + size_of::<PathBuf>() + "a.jsonl".len();
                let expected = 300 * 12 + 300_usize.div_ceil(32) * 8 + names + path.as_os_str().len();
                assert_eq!(set.heap_bytes(), expected);
            }
        }
    }
}

#[test]
fn spans_are_cut_with_their_row() {
    let mut builder = TokenSetBuilder::new(LIMITS);
    let ids: Vec<i64> = (10..20).collect();
    builder.push_spans(place(1), &ids, &[0..2, 6..10]).unwrap();
    builder.push_spans(place(2), &ids, &[8..10]).unwrap();
    builder.push_spans(place(3), &ids[..3], &[]).unwrap();
    let set = builder.finish().unwrap();
    assert_eq!(set.sample(0).unwrap().labels, [10, 11, -100, -100, -100, -100, 16, 17]);
    assert_eq!(set.supervised(0), 3);
    let rows = set.stats().rows;
    assert_eq!((rows.kept, rows.unsupervised, rows.unsupervised_by_truncation), (1, 1, 1));
}

#[test]
fn the_first_label_never_counts() {
    let set = build(LIMITS, &[(&[1, 2, 3], Some(&[1, -100, 3])), (&[1, 2], Some(&[1, -100]))]).unwrap();
    assert_eq!(set.len(), 1);
    assert_eq!(set.supervised(0), 1);
    assert_eq!(set.stats().rows.unsupervised, 1);
}

#[test]
fn rows_are_dropped_and_counted_by_reason() {
    let long: Vec<i64> = (0..12).collect();
    let late: Vec<i64> = (0..12).map(|t| if t < 8 { -100 } else { t }).collect();
    let set = build(
        LIMITS,
        &[
            (&[], None),
            (&[1], None),
            (&[1, 2], Some(&[-100, -100])),
            (&long, None),
            (&long, Some(&late)),
            (&[5, 6, 7], None),
        ],
    )
    .unwrap();
    let stats = set.stats();
    assert_eq!(
        stats.rows,
        RowCounts {
            split_off: 0,
            read: 6,
            kept: 2,
            truncated: 1,
            too_long: 0,
            too_short: 2,
            unsupervised: 1,
            unsupervised_by_truncation: 1,
            ..RowCounts::default()
        }
    );
    assert_eq!((stats.tokens, stats.cut_tokens), (11, 4));
    assert_eq!(stats.supervised_tokens, 7 + 2);
    assert_eq!((stats.shortest_tokens, stats.longest_tokens), (3, 8));
    assert_eq!(stats.mean_tokens, 5.5);
    assert_eq!(set.sample(0).unwrap().ids, [0, 1, 2, 3, 4, 5, 6, 7]);
    // Dropped rows shift the samples, not their places.
    assert_eq!(set.place(0).to_string(), "`a.jsonl` line 4");
    assert_eq!(set.place(1).to_string(), "`a.jsonl` line 6");
    assert_eq!(
        stats.rows.warning().unwrap(),
        "6 rows read, 1 truncated, 2 dropped with fewer than two tokens, \
         1 dropped without a supervised token, \
         1 dropped because truncation left no supervised token, 2 kept"
    );
}

#[test]
fn a_clean_set_has_no_warning() {
    let set = build(LIMITS, &[(&[1, 2, 3, 4, 5, 6, 7, 8], None)]).unwrap();
    assert_eq!(set.stats().rows.warning(), None);
}

#[test]
fn overflow_can_drop_or_refuse() {
    let long: Vec<i64> = (0..9).collect();
    let longer: Vec<i64> = (0..11).collect();
    let rows: [(&[i64], Option<&[i64]>); 3] = [(&[1, 2], None), (&long, None), (&longer, None)];
    let drop = TokenLimits { overflow: Overflow::Drop, ..LIMITS };
    let set = build(drop, &rows).unwrap();
    assert_eq!((set.len(), set.stats().rows.too_long), (1, 2));
    let refuse = TokenLimits { overflow: Overflow::Error, ..LIMITS };
    let error = build(refuse, &rows).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`a.jsonl` line 2 has 9 tokens, `data.max_tokens` is 8; 2 of 3 rows are longer"
    );
    assert!(error.hint().unwrap().starts_with("`data.max_tokens = 11`"));
    let error = build(drop, &rows[1..]).unwrap_err();
    assert_eq!(error.to_string(), "no rows left: 2 rows read, 2 dropped as too long");
    assert_eq!(error.hint().unwrap(), "`data.max_tokens = 11` keeps every row whole");
}

#[test]
fn nothing_to_train_on_is_an_error_with_its_reason() {
    assert_eq!(build(LIMITS, &[]).unwrap_err().to_string(), "no rows");
    let error = build(LIMITS, &[(&[1], None)]).unwrap_err();
    assert!(matches!(error, TokensError::NoRowsLeft { .. }));
    assert!(error.hint().unwrap().contains("two tokens"));
    let error = build(LIMITS, &[(&[1, 2], Some(&[1, -100]))]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no supervised token anywhere: 1 rows read, 1 dropped without a supervised token"
    );
    assert!(error.hint().unwrap().contains("leave `labels` out"));
    let ids: Vec<i64> = (0..9).collect();
    let mut labels = vec![-100; 9];
    labels[8] = 8;
    let error = build(LIMITS, &[(&ids, Some(&labels))]).unwrap_err();
    assert_eq!(error.hint().unwrap(), "the supervised tokens come after position 8: raise `data.max_tokens`");
}

#[test]
fn values_are_held_to_the_vocabulary() {
    let said = |ids: &[i64], labels: Option<&[i64]>| build(LIMITS, &[(ids, labels)]).unwrap_err().to_string();
    assert_eq!(
        said(&[1, 100], None),
        "`a.jsonl` line 1: `input_ids[1]` is 100, the model's vocabulary is 0 to 99"
    );
    assert_eq!(
        said(&[-1, 1], None),
        "`a.jsonl` line 1: `input_ids[0]` is -1, the model's vocabulary is 0 to 99"
    );
    assert_eq!(said(&[1, 2], Some(&[1])), "`a.jsonl` line 1: `input_ids` has 2 entries, `labels` has 1");
    for label in [-1, 100, -101, 1 << 40] {
        assert_eq!(
            said(&[1, 2], Some(&[-100, label])),
            format!(
                "`a.jsonl` line 1: `labels[1]` is {label}, neither -100 nor in the model's vocabulary 0 to 99"
            )
        );
    }
    assert!(build(LIMITS, &[(&[0, 99], Some(&[99, 0]))]).is_ok());
}

#[test]
fn pieces_hold_every_token_once_and_none_alone() {
    for max_tokens in 3..9_u32 {
        for tokens in 2..40_i64 {
            let limits = TokenLimits { max_tokens, overflow: Overflow::Chunk, ..LIMITS };
            let ids: Vec<i64> = (0..tokens).collect();
            let set = build(limits, &[(&ids, None)]).unwrap();
            let samples: Vec<Vec<i32>> = (0..set.len()).map(|index| set.sample(index).unwrap().ids).collect();
            assert_eq!(samples.concat(), (0..tokens as i32).collect::<Vec<_>>());
            let sound = |sample: &Vec<i32>| (2..=max_tokens as usize).contains(&sample.len());
            assert!(samples.iter().all(sound), "{samples:?}");
            let stats = set.stats();
            assert_eq!((stats.cut_tokens, stats.rows.kept, stats.rows.truncated), (0, 1, 0));
            let pieces = if tokens > i64::from(max_tokens) { set.len() as u64 } else { 0 };
            assert_eq!((stats.rows.chunked, stats.rows.pieces), (u64::from(pieces > 0), pieces));
            assert_eq!(stats.mean_tokens, tokens as f64 / set.len() as f64);
        }
    }
}

#[test]
fn pieces_keep_their_labels_and_those_without_any_are_left_out() {
    let limits = TokenLimits { max_tokens: 4, overflow: Overflow::Chunk, ..LIMITS };
    let mut builder = TokenSetBuilder::new(limits);
    let ids: Vec<i64> = (0..10).collect();
    builder.push_spans(place(1), &ids, &[3..6, 7..8]).unwrap();
    let mut labels = [-100; 10];
    labels[9] = 50;
    builder.push(place(2), &ids, Some(&labels)).unwrap();
    let set = builder.finish().unwrap();
    let labels: Vec<_> = (0..set.len()).map(|index| set.sample(index).unwrap().labels).collect();
    assert_eq!(labels[0], [-100, -100, -100, 3]);
    assert_eq!(labels[1], [4, 5, -100, 7]);
    assert_eq!(labels[2], [-100, 50]);
    assert_eq!((set.stats().rows.pieces, set.stats().cut_tokens), (3, 10));
}
