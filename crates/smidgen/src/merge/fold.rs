//! The arithmetic of a merge, on blocks of rows in f32.
//! LoRA: W + s·B·A. DoRA: (m/n)·(W + s·B·A), where n is the norm of each row of the sum.
//! The inner loop adds four rows of A at a time to a tile of a row, which stays in the L1 cache. It uses slices of
//! equal length, which the compiler vectorizes.
//! Left out: reading and writing.

use crate::failure::Failure;
use crate::model_files::numbers::read_f32;
use crate::model_files::output::Fold;
use smidgen_formats::peft::AdapterModule;
use smidgen_formats::tensor_ref::TensorRef;

/// Columns of a tile.
const TILE: usize = 1024;

/// One module's tensors in f32; the memory is reused for the next module. A module of experts has A and B of each of them,
/// one after the other, and if their matrices are stored transposed, the two change places.
#[derive(Default)]
pub struct Factors {
    /// The module, and whether its factors have changed places.
    loaded: Option<(String, bool)>,
    rank: usize,
    columns: usize,
    /// Rows of one expert.
    rows: usize,
    scale: f32,
    /// (E·R, in)
    a: Vec<f32>,
    /// (E·out, R)
    b: Vec<f32>,
    /// (out); empty without DoRA.
    magnitude: Vec<f32>,
    /// A row of a factor as it is in the file.
    row: Vec<f32>,
}

impl Factors {
    /// Reserves memory for the largest of these modules, so that loading allocates nothing.
    pub fn with_room_for<'a>(folds: impl Iterator<Item = &'a Fold>) -> Factors {
        let [mut a, mut b, mut magnitude, mut row] = [0; 4];
        for Fold { module, experts, is_turned, .. } in folds {
            let (of_a, of_b) = (module.a.elements() as usize, module.b.elements() as usize);
            let turned = if *is_turned { [of_b, of_a] } else { [of_a, of_b] };
            (a, b) = (a.max(turned[0]), b.max(turned[1]));
            magnitude = magnitude.max(if module.magnitude.is_some() { module.rows() } else { 0 });
            row = row.max(if *experts > 1 { module.columns().max(experts * module.rank) } else { 0 });
        }
        let [a, b, magnitude, row] = [a, b, magnitude, row].map(Vec::with_capacity);
        Factors { a, b, magnitude, row, ..Factors::default() }
    }

    pub fn room_bytes(&self) -> u64 {
        let buffers = [&self.a, &self.b, &self.magnitude, &self.row];
        (buffers.map(Vec::capacity).into_iter().sum::<usize>() * size_of::<f32>()) as u64
    }

    pub fn load(&mut self, fold: &Fold) -> Result<(), Failure> {
        let Fold { module, experts, is_turned, .. } = fold;
        let key = (module.path.clone(), *is_turned);
        if self.loaded.as_ref() == Some(&key) {
            return Ok(());
        }
        self.loaded = None;
        (self.rank, self.scale) = (module.rank, module.scale as f32);
        (self.columns, self.rows) = match is_turned {
            true => (module.rows(), module.columns()),
            false => (module.columns(), module.rows()),
        };
        self.a.resize(experts * self.rank * self.columns, 0.0);
        self.b.resize(experts * self.rows * self.rank, 0.0);
        if *experts > 1 {
            self.load_experts(module, *experts, *is_turned)?;
        } else {
            read_f32(&module.a, 0, &mut self.a)?;
            read_f32(&module.b, 0, &mut self.b)?;
        }
        self.magnitude.clear();
        if let Some(magnitude) = &module.magnitude {
            self.magnitude.resize(module.rows(), 0.0);
            read_f32(magnitude, 0, &mut self.magnitude)?;
        }
        self.loaded = Some(key);
        Ok(())
    }

    /// A has the rows of an expert together, (E·R, in); B has the columns of a rank together, (out, R·E).
    fn load_experts(
        &mut self,
        module: &AdapterModule,
        experts: usize,
        is_turned: bool,
    ) -> Result<(), Failure> {
        let (rank, rows, columns) = (self.rank, self.rows, self.columns);
        let Factors { a, b, row, .. } = self;
        if is_turned {
            each_row(&module.a, row, |number, values| {
                let (expert, place) = (number / rank, number % rank);
                let target = b[expert * rows * rank + place..].iter_mut().step_by(rank);
                target.zip(values).for_each(|(target, value)| *target = *value);
            })?;
        } else {
            read_f32(&module.a, 0, a)?;
        }
        each_row(&module.b, row, |out, values| {
            for (at, value) in values.iter().enumerate() {
                let (place, expert) = (at / experts, at % experts);
                if is_turned {
                    a[(expert * rank + place) * columns + out] = *value;
                } else {
                    b[(expert * rows + out) * rank + place] = *value;
                }
            }
        })
    }

    /// Turns rows of W, starting at row `first_row` of all experts together, into rows of the merged weight.
    pub fn fold_rows(&self, first_row: usize, rows: &mut [f32]) {
        for (index, row) in rows.chunks_exact_mut(self.columns).enumerate() {
            let number = first_row + index;
            self.add_product(number, row);
            if let Some(&magnitude) = self.magnitude.get(number) {
                scale_to(row, magnitude);
            }
        }
    }

    /// Adds s times a row of B A.
    fn add_product(&self, number: usize, row: &mut [f32]) {
        let b = &self.b[number * self.rank..][..self.rank]; // (R)
        let of_expert = &self.a[number / self.rows * self.rank * self.columns..]; // (R, in)
        let mut sums = [0f32; TILE];
        for (tile, values) in row.chunks_mut(TILE).enumerate() {
            let width = values.len();
            let sums = &mut sums[..width];
            sums.fill(0.0);
            let a = |k: usize| &of_expert[k * self.columns + tile * TILE..][..width];
            let (fours, rest) = b.as_chunks::<4>();
            for (four, factors) in fours.iter().enumerate() {
                add_four(sums, factors, [a(4 * four), a(4 * four + 1), a(4 * four + 2), a(4 * four + 3)]);
            }
            for (k, &factor) in rest.iter().enumerate() {
                for (sum, a) in sums.iter_mut().zip(a(4 * fours.len() + k)) {
                    *sum += factor * a;
                }
            }
            for (value, sum) in values.iter_mut().zip(&*sums) {
                *value += self.scale * sum;
            }
        }
    }
}

/// Calls `work` with each row of a matrix of the adapter.
fn each_row(
    tensor: &TensorRef,
    row: &mut Vec<f32>,
    mut work: impl FnMut(usize, &[f32]),
) -> Result<(), Failure> {
    let [rows, columns] = *tensor.shape() else { unreachable!("factors are matrices") };
    row.resize(columns, 0.0);
    for number in 0..rows {
        read_f32(tensor, (number * columns) as u64, row)?;
        work(number, row);
    }
    Ok(())
}

#[inline(always)]
fn add_four(sums: &mut [f32], factors: &[f32; 4], rows: [&[f32]; 4]) {
    let [p, q, r, s] = rows;
    for ((((sum, p), q), r), s) in sums.iter_mut().zip(p).zip(q).zip(r).zip(s) {
        *sum += (factors[0] * p + factors[1] * q) + (factors[2] * r + factors[3] * s);
    }
}

/// Scales a row to the norm `magnitude`. A row of zeros stays zero.
fn scale_to(row: &mut [f32], magnitude: f32) {
    let norm = row_norm(row);
    if norm > 0.0 {
        let factor = (f64::from(magnitude) / norm) as f32;
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

/// The norm of a row, summed in f64.
pub fn row_norm(row: &[f32]) -> f64 {
    // Eight independent sums, because each addition of a single sum would wait for the one before.
    let (eights, rest) = row.as_chunks::<8>();
    let mut sums = [0f64; 8];
    for eight in eights {
        for (sum, value) in sums.iter_mut().zip(eight) {
            *sum += f64::from(*value) * f64::from(*value);
        }
    }
    let rest: f64 = rest.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers and halves, so that every sum is exact and the expected value has no rounding.
    fn factors(rank: usize, columns: usize, rows: usize) -> Factors {
        let number = |i: usize| (i * 7 % 11) as f32 - 5.0;
        Factors {
            rank,
            columns,
            rows,
            scale: 0.5,
            a: (0..rank * columns).map(number).collect(),
            b: (0..rows * rank).map(|i| number(i + 3)).collect(),
            ..Factors::default()
        }
    }

    #[test]
    fn rows_gain_the_scaled_product_at_any_rank_and_width() {
        for (rank, columns) in [(1, 3), (2, 1024), (3, 1025), (4, 7), (5, 2050), (9, 1)] {
            let factors = factors(rank, columns, 3);
            let mut rows: Vec<f32> = (0..2 * columns).map(|i| i as f32).collect();
            factors.fold_rows(1, &mut rows);
            for (i, row) in rows.chunks(columns).enumerate() {
                for (column, value) in row.iter().enumerate() {
                    let product: f32 = (0..rank)
                        .map(|k| factors.b[(1 + i) * rank + k] * factors.a[k * columns + column])
                        .sum();
                    assert_eq!(*value, (i * columns + column) as f32 + 0.5 * product, "{rank} {columns}");
                }
            }
        }
    }

    #[test]
    fn a_magnitude_is_the_length_of_its_row() {
        let mut factors = factors(2, 2, 2);
        (factors.a, factors.b) = (vec![0.0; 4], vec![0.0; 4]);
        factors.magnitude = vec![10.0, 2.0];
        let mut rows = [3.0, -4.0, 0.0, 0.0];
        factors.fold_rows(0, &mut rows);
        assert_eq!(rows, [6.0, -8.0, 0.0, 0.0]);
        let row: Vec<f32> = (1..=19).map(|i| i as f32).collect();
        assert_eq!(row_norm(&row), 2470f64.sqrt());
    }
}
