//! Token embedding: rows of a stored table, scaled, and the gradient of that table.
//!
//! Several tokens may use the same row, so tasks of the gradient split channels and each goes through the tokens in
//! order: no two threads write the same element, and the order of additions is fixed.
//! Left out: checks of user data; an id outside the table panics here.

use super::chunk::{CHUNK_COLUMNS, Chunk, for_each_chunk, for_each_row_chunk};
use super::footprint::assert_disjoint;
use super::isa::{self, on_each_isa};
use super::simd::{Isa, LANES, for_each_block, kernel};
use super::stored::Stored;
use super::view::{Dst, DstRows, Src, SrcRows};

/// y[t] = table[ids[t]] * scale.
pub fn embed(
    ids: Src<i32>, // (T)
    table: Stored, // (V, C)
    scale: f32,
    y: DstRows, // (T, C)
) {
    assert_eq!(table.columns, y.columns(), "`embed`: columns of the table");
    check_shapes("embed", ids, table.rows * table.columns, y.rows(), y.columns());
    assert_disjoint("embed", y, [ids.into(), table.into()]);
    let isa = Isa::current();
    for_each_row_chunk(y.rows(), y.columns(), |chunk| {
        // SAFETY: an `Isa` exists only if the CPU supports it; ids are rows of the table, which is as
        // wide as y and readable while the step runs.
        unsafe { embed_rows(isa.level(), ids, table, scale, y, chunk) };
    });
}

/// dtable[ids[t]] += dy[t] * scale, t ascending, except in the row `padding`.
pub fn embed_grad(
    ids: Src<i32>, // (T)
    dy: SrcRows,   // (T, C)
    scale: f32,
    padding: Option<u32>,
    dtable: Dst<f32>, // (V, C)
) {
    check_shapes("embed_grad", ids, dtable.len(), dy.rows(), dy.columns());
    assert_disjoint("embed_grad", dtable, [ids.into(), dy.into()]);
    let (isa, padding) = (Isa::current(), padding.map_or(-1, |row| row as i32));
    for_each_chunk(dy.columns(), CHUNK_COLUMNS, |chunk| {
        add_columns(isa, ids, dy, scale, padding, dtable, chunk);
    });
}

fn check_shapes(operation: &str, ids: Src<i32>, table_len: usize, rows: usize, columns: usize) {
    assert_eq!(ids.len(), rows, "`{operation}`: number of ids and of rows");
    assert!(
        columns > 0 && table_len.is_multiple_of(columns),
        "`{operation}`: a table of {table_len} elements is not rows of {columns}"
    );
    let vocabulary = table_len / columns;
    for token in 0..ids.len() {
        let id = ids.get(token);
        assert!(
            usize::try_from(id).is_ok_and(|id| id < vocabulary),
            "`{operation}`: id {id} of token {token} is outside a vocabulary of {vocabulary}"
        );
    }
}

on_each_isa! {
    /// # Safety
    /// The machine supports the instruction set; every id is a row of the readable table, which is as
    /// wide as `y`.
    unsafe fn embed_rows(ids: Src<i32>, table: Stored, scale: f32, y: DstRows, chunk: Chunk) = embed_rows_with;
}

#[inline(always)]
unsafe fn embed_rows_with<V: isa::Lanes>(ids: Src<i32>, table: Stored, scale: f32, y: DstRows, chunk: Chunk) {
    let columns = y.columns();
    let whole = columns / V::WIDTH * V::WIDTH;
    for token in chunk.range() {
        let target = y.row(token).address();
        // SAFETY: the caller's promises; a row of y has as many floats as one of the table.
        unsafe {
            table.decode_span::<V>(ids.get(token) as usize, 0, columns, target);
            if scale == 1.0 {
                continue;
            }
            for at in (0..whole).step_by(V::WIDTH) {
                V::load(target.add(at)).mul(V::splat(scale)).store(target.add(at));
            }
            for at in whole..columns {
                *target.add(at) *= scale;
            }
        }
    }
}

kernel! {
    fn add_columns(ids: Src<i32>, dy: SrcRows, scale: f32, padding: i32, dtable: Dst<f32>, chunk: Chunk) {
        let columns = dy.columns();
        for token in (0..ids.len()).filter(|token| ids.get(*token) != padding) {
            let dy = dy.row(token).part(chunk.start, chunk.len);
            let start = ids.get(token) as usize * columns + chunk.start;
            let out = dtable.part(start, chunk.len);
            for_each_block!(block in chunk.len => {
                let dy = dy.lanes(block);
                let mut sum = out.lanes(block);
                for lane in 0..LANES {
                    sum[lane] += dy[lane] * scale;
                }
                out.set_lanes(block, sum);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::*;
    use super::*;
    use smidgen_ir::quant;

    const VOCABULARY: usize = 11;
    const SCALE: f32 = 1.75;

    fn ids(tokens: usize) -> Vec<i32> {
        (0..tokens).map(|token| (token * token % VOCABULARY) as i32).collect()
    }

    #[test]
    fn rows_are_read_from_every_storage() {
        let widths = COLUMNS.into_iter().chain([512]);
        for (storage, columns) in widths.flat_map(|columns| storages_with(columns).map(move |s| (s, columns)))
        {
            let bytes = sane_bytes(storage, VOCABULARY, columns);
            let mut table = vec![0.0; VOCABULARY * columns];
            quant::decode(storage, VOCABULARY, columns, &bytes, 0, &mut table);
            let ids = ids(61);
            for scale in [1.0, SCALE] {
                let y = on_every_isa(|| {
                    let mut y = vec![f32::NAN; 61 * columns];
                    let table = Stored::dense(bytes.as_ptr(), storage, VOCABULARY, columns);
                    embed(src(&ids), table, scale, dst(&mut y).rows(columns));
                    y
                });
                let want: Vec<f32> = ids
                    .iter()
                    .flat_map(|id| &table[*id as usize * columns..][..columns])
                    .map(|value| value * scale)
                    .collect();
                assert_same_bits(&format!("{storage} of {columns} columns"), &y, &want);
            }
        }
    }

    #[test]
    fn gradient_adds_repeated_tokens_to_the_present_value() {
        for columns in COLUMNS {
            let ids = ids(61);
            let dy = numbers(2, 61 * columns);
            let got = on_every_isa(|| {
                let mut dtable = vec![0.5; VOCABULARY * columns];
                embed_grad(src(&ids), src(&dy).rows(columns), SCALE, None, dst(&mut dtable));
                dtable
            });
            let mut want = vec![0.5_f64; VOCABULARY * columns];
            for (id, dy) in ids.iter().zip(dy.chunks(columns)) {
                for (channel, dy) in dy.iter().enumerate() {
                    want[*id as usize * columns + channel] += f64::from(dy * SCALE);
                }
            }
            assert_close("dtable", &got, &want, 10.0, 1e-6);
        }
    }

    #[test]
    fn gradient_matches_finite_differences() {
        let (tokens, columns) = (9, 7);
        let ids = ids(tokens);
        let (table, dy) = (numbers(1, VOCABULARY * columns), numbers(2, tokens * columns));
        let mut dtable = vec![0.0; table.len()];
        embed_grad(src(&ids), src(&dy).rows(columns), SCALE, None, dst(&mut dtable));
        let want = finite_difference(&widened(&table), |table| {
            (0..tokens * columns)
                .map(|i| {
                    let row = ids[i / columns] as usize;
                    f64::from(dy[i]) * table[row * columns + i % columns] * f64::from(SCALE)
                })
                .sum()
        });
        assert_close("dtable", &dtable, &want, 1.0, 1e-6);
    }

    /// As PyTorch's `padding_idx`: other rows get the bits that they get without it.
    #[test]
    fn the_padding_row_gets_no_gradient() {
        let (tokens, columns) = (23, 19);
        let (ids, dy) = (ids(tokens), numbers(2, tokens * columns));
        let gradient = |padding: Option<u32>| {
            let mut dtable = vec![0.0; VOCABULARY * columns];
            embed_grad(src(&ids), src(&dy).rows(columns), SCALE, padding, dst(&mut dtable));
            dtable
        };
        let padding = ids[3] as usize;
        let mut want = gradient(None);
        let row = &mut want[padding * columns..][..columns];
        assert!(row.iter().all(|value| *value != 0.0));
        row.fill(0.0);
        assert_same_bits("dtable", &gradient(Some(padding as u32)), &want);
    }

    #[test]
    #[should_panic(expected = "id 11 of token 1 is outside a vocabulary of 11")]
    fn an_id_outside_the_table_is_refused() {
        let values = numbers(1, VOCABULARY);
        let mut y = [0.0; 2];
        let table = Stored::dense_f32(values.as_ptr(), VOCABULARY, 1);
        embed(src(&[0, 11]), table, 1.0, dst(&mut y).rows(1));
    }
}
