//! The arithmetic of a merge, on blocks of rows in f32.
//! LoRA: W + s·B·A. DoRA: (m/n)·(W + s·B·A), where n is the norm of each row of the sum.
//! The inner loop adds four rows of A at a time to a tile of a row, which stays in the L1 cache. It uses slices of
//! equal length, which the compiler vectorizes.
//! Left out: reading and writing.

use crate::failure::Failure;
use crate::model_files::numbers::read_f32;
use smidgen_formats::peft::AdapterModule;

/// Columns of a tile.
const TILE: usize = 1024;

/// One module's tensors in f32; the memory is reused for the next module.
#[derive(Default)]
pub struct Factors {
    rank: usize,
    columns: usize,
    scale: f32,
    /// (R, in)
    a: Vec<f32>,
    /// (out, R)
    b: Vec<f32>,
    /// (out); empty without DoRA.
    magnitude: Vec<f32>,
}

impl Factors {
    /// Reserves memory for the largest of these modules, so that loading allocates nothing.
    pub fn with_room_for(modules: &[AdapterModule]) -> Factors {
        let reserve = |elements: fn(&AdapterModule) -> usize| {
            Vec::with_capacity(modules.iter().map(elements).max().unwrap_or(0))
        };
        Factors {
            a: reserve(|module| module.rank * module.columns()),
            b: reserve(|module| module.rank * module.rows()),
            magnitude: reserve(|module| if module.magnitude.is_some() { module.rows() } else { 0 }),
            ..Factors::default()
        }
    }

    pub fn room_bytes(&self) -> u64 {
        let elements = self.a.capacity() + self.b.capacity() + self.magnitude.capacity();
        (elements * size_of::<f32>()) as u64
    }

    pub fn load(&mut self, module: &AdapterModule) -> Result<(), Failure> {
        (self.rank, self.columns, self.scale) = (module.rank, module.columns(), module.scale as f32);
        self.a.resize(module.rank * module.columns(), 0.0);
        read_f32(&module.a, 0, &mut self.a)?;
        self.b.resize(module.rank * module.rows(), 0.0);
        read_f32(&module.b, 0, &mut self.b)?;
        self.magnitude.clear();
        if let Some(magnitude) = &module.magnitude {
            self.magnitude.resize(module.rows(), 0.0);
            read_f32(magnitude, 0, &mut self.magnitude)?;
        }
        Ok(())
    }

    /// Turns rows of W, starting at row `first_row`, into rows of the merged weight.
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
        let mut sums = [0f32; TILE];
        for (tile, values) in row.chunks_mut(TILE).enumerate() {
            let width = values.len();
            let sums = &mut sums[..width];
            sums.fill(0.0);
            let a = |k: usize| &self.a[k * self.columns + tile * TILE..][..width];
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
            scale: 0.5,
            a: (0..rank * columns).map(number).collect(),
            b: (0..rows * rank).map(|i| number(i + 3)).collect(),
            magnitude: vec![],
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
