//! Shapes: a dimension is a constant or follows from one of four numbers that vary from micro-batch to micro-batch.
//!
//! Letters are fixed for the whole project: T tokens of a micro-batch, S rows that carry a loss ("supervised"),
//! G segments (samples) packed into it, A audio rows (80 ms of sound each). A plan fixes the maximum of each ([`Extent`]);
//! at run time the same type holds the actual numbers.

use crate::storage::Storage;
use std::fmt;

/// Values start at multiples of this many bytes: whole cache lines, aligned for vector loads and CUDA copies.
pub const ALIGNMENT: usize = 256;

pub const fn align_up(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// One dimension of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    Const(usize),
    /// T: packed tokens.
    Tokens,
    /// T times this many: a row for each expert that a token chose.
    Routed(usize),
    /// A tile of the T tokens: up to `most` of them, starting at `first`. A short micro-batch leaves the last tiles empty.
    Tile {
        first: usize,
        most: usize,
    },
    /// S: rows that carry a loss.
    Rows,
    /// G + 1: the boundaries of segments.
    Boundaries,
    /// A times this many: rows of audio, or finer rows inside them, such as mel frames.
    Audio(usize),
}

/// The numbers behind the letters: planned maxima, or the actual ones of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Extent {
    pub tokens: usize,
    pub rows: usize,
    pub segments: usize,
    /// Audio rows of all clips, chunk padding included.
    pub audio: usize,
}

impl Extent {
    pub fn contains(&self, other: &Extent) -> bool {
        other.tokens <= self.tokens
            && other.rows <= self.rows
            && other.segments <= self.segments
            && other.audio <= self.audio
    }

    /// The smallest extent that contains both.
    pub fn union(&self, other: &Extent) -> Extent {
        Extent {
            tokens: self.tokens.max(other.tokens),
            rows: self.rows.max(other.rows),
            segments: self.segments.max(other.segments),
            audio: self.audio.max(other.audio),
        }
    }

    /// The sizes of both together.
    pub fn plus(&self, other: &Extent) -> Extent {
        Extent {
            tokens: self.tokens + other.tokens,
            rows: self.rows + other.rows,
            segments: self.segments + other.segments,
            audio: self.audio + other.audio,
        }
    }
}

impl Dim {
    pub fn at(self, extent: &Extent) -> usize {
        match self {
            Dim::Const(n) => n,
            Dim::Tokens => extent.tokens,
            Dim::Routed(times) => times * extent.tokens,
            Dim::Tile { first, most } => extent.tokens.saturating_sub(first).min(most),
            Dim::Rows => extent.rows,
            Dim::Boundaries => extent.segments + 1,
            Dim::Audio(times) => times * extent.audio,
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Const(n) => write!(f, "{n}"),
            Dim::Tokens => f.write_str("T"),
            Dim::Routed(times) => write!(f, "{times}T"),
            Dim::Tile { first, most } => write!(f, "T[{first}..{}]", first + most),
            Dim::Rows => f.write_str("S"),
            Dim::Boundaries => f.write_str("G+1"),
            Dim::Audio(1) => f.write_str("A"),
            Dim::Audio(times) => write!(f, "{times}A"),
        }
    }
}

/// Dimensions, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape(pub Dims);

/// At most two dimensions, rows and channels. Stored inline because graphs are copied often.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Dims {
    count: usize,
    /// Unused entries are always `Const(0)`, so that the derived equality holds.
    dims: [Dim; 2],
}

impl Dims {
    fn one(dim: Dim) -> Dims {
        Dims { count: 1, dims: [dim, Dim::Const(0)] }
    }

    fn two(rows: Dim, columns: Dim) -> Dims {
        Dims { count: 2, dims: [rows, columns] }
    }

    pub fn as_slice(&self) -> &[Dim] {
        &self.dims[..self.count]
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl std::ops::Deref for Dims {
    type Target = [Dim];

    fn deref(&self) -> &[Dim] {
        self.as_slice()
    }
}

impl std::ops::DerefMut for Dims {
    fn deref_mut(&mut self) -> &mut [Dim] {
        &mut self.dims[..self.count]
    }
}

impl Shape {
    pub fn vector(n: usize) -> Shape {
        Shape(Dims::one(Dim::Const(n)))
    }

    pub fn matrix(rows: usize, columns: usize) -> Shape {
        Shape(Dims::two(Dim::Const(rows), Dim::Const(columns)))
    }

    pub fn of(rows: Dim, columns: usize) -> Shape {
        Shape(Dims::two(rows, Dim::Const(columns)))
    }

    pub fn rows_of(dim: Dim) -> Shape {
        Shape(Dims::one(dim))
    }

    /// Rows and columns; a vector is one column.
    pub fn at(&self, extent: &Extent) -> (usize, usize) {
        match self.0.as_slice() {
            [] => (1, 1),
            [n] => (n.at(extent), 1),
            [rows, rest @ ..] => (rows.at(extent), rest.iter().map(|d| d.at(extent)).product()),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(")?;
        for (i, dim) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            dim.fmt(f)?;
        }
        f.write_str(")")
    }
}

/// A shape and the format that its elements are stored in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    pub shape: Shape,
    pub storage: Storage,
}

impl Type {
    pub fn new(shape: Shape, storage: Storage) -> Type {
        Type { shape, storage }
    }

    pub fn f32(shape: Shape) -> Type {
        Type { shape, storage: Storage::F32 }
    }

    pub fn bytes(&self, extent: &Extent) -> usize {
        let (rows, columns) = self.shape.at(extent);
        self.storage.bytes(rows, columns)
    }

    pub fn elements(&self, extent: &Extent) -> usize {
        let (rows, columns) = self.shape.at(extent);
        rows * columns
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.storage, self.shape)
    }
}
