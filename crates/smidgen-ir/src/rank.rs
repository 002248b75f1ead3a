//! Ranks: the processes that train together, and how tensors are divided over them.
//!
//! Every rank computes the same division from the same shapes, so ranks exchange no messages about it. Parts are in the
//! order of the ranks and end at multiples of a unit: bytes of frozen weights are cut at aligned addresses, rows of trained
//! tensors where a block of 8-bit optimizer state ends. A small tensor therefore belongs to the first rank alone.

use crate::shape::{ALIGNMENT, Extent, Type};
use crate::storage::DYNAMIC8_BLOCK;
use std::ops::Range;

/// One of the processes that train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    pub index: usize,
    pub of: usize,
}

impl Rank {
    /// A process that trains alone.
    pub const ONLY: Rank = Rank { index: 0, of: 1 };

    pub fn is_only(self) -> bool {
        self.of == 1
    }

    /// Splits `count` items over the ranks, in order. Parts are equal multiples of `unit`, except at the end.
    pub fn parts(self, count: usize, unit: usize) -> Vec<Range<usize>> {
        let most = count.div_ceil(self.of).next_multiple_of(unit);
        (0..self.of).map(|rank| (rank * most).min(count)..((rank + 1) * most).min(count)).collect()
    }
}

/// Where a tensor may be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Between bytes, as they are stored.
    Bytes,
    /// Between rows.
    Rows,
}

/// A tensor of which each rank stores one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    pub rank: Rank,
    pub cut: Cut,
}

impl Shard {
    /// The rows of each rank. Rows that share a block of 8-bit optimizer state go to the same rank.
    pub fn rows(&self, ty: &Type) -> Vec<Range<usize>> {
        let (rows, columns) = ty.shape.at(&Extent::default());
        self.rank.parts(rows, DYNAMIC8_BLOCK / greatest_common_divisor(DYNAMIC8_BLOCK, columns))
    }

    pub fn own_rows(&self, ty: &Type) -> Range<usize> {
        self.rows(ty).swap_remove(self.rank.index)
    }

    /// The bytes of each rank, one part after the other. A part that is cut between rows is stored as a matrix.
    pub fn bytes(&self, ty: &Type) -> Vec<Range<usize>> {
        match self.cut {
            Cut::Bytes => self.rank.parts(ty.bytes(&Extent::default()), ALIGNMENT),
            Cut::Rows => {
                let (_, columns) = ty.shape.at(&Extent::default());
                let mut end = 0;
                let parts = self.rows(ty).into_iter().map(|rows| {
                    let first = end;
                    end += ty.storage.bytes(rows.len(), columns);
                    first..end
                });
                parts.collect()
            }
        }
    }

    pub fn own_bytes(&self, ty: &Type) -> Range<usize> {
        self.bytes(ty).swap_remove(self.rank.index)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::storage::Storage;

    fn shard(of: usize, cut: Cut) -> Shard {
        Shard { rank: Rank { index: 0, of }, cut }
    }

    #[test]
    fn parts_cover_everything_once_in_order() {
        for of in 1..6 {
            for count in [0, 1, 7, 64, 1000] {
                for unit in [1, 3, 16] {
                    let parts = Rank { index: 0, of }.parts(count, unit);
                    assert_eq!(parts.len(), of);
                    let mut end = 0;
                    for part in parts {
                        assert_eq!(part.start, end);
                        assert!(part.start.is_multiple_of(unit) || part.is_empty());
                        end = part.end;
                    }
                    assert_eq!(end, count);
                }
            }
        }
    }

    #[test]
    fn rows_are_cut_where_blocks_of_moments_end() {
        let rows = |rows, columns| shard(2, Cut::Rows).rows(&Type::f32(Shape::matrix(rows, columns)));
        assert_eq!(rows(16, 512), [0..8, 8..16]);
        assert_eq!(rows(96, 16), [0..48, 48..96]);
        assert_eq!(rows(100, 16), [0..64, 64..100]);
        assert_eq!(rows(7, 4), [0..7, 7..7], "too small to be divided");
        assert_eq!(shard(3, Cut::Rows).rows(&Type::f32(Shape::vector(600))), [0..256, 256..512, 512..600]);
    }

    #[test]
    fn bytes_of_parts_add_up_to_the_whole() {
        let signed = Storage::Dynamic8 { signed: true };
        for storage in [Storage::F32, signed] {
            let ty = Type::new(Shape::matrix(100, 48), storage);
            for cut in [Cut::Bytes, Cut::Rows] {
                let parts = shard(3, cut).bytes(&ty);
                assert_eq!(parts.last().unwrap().end, ty.bytes(&Extent::default()), "{storage} {cut:?}");
            }
        }
    }
}
