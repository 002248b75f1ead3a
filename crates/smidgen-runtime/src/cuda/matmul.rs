//! A matmul: D (M, N) = alpha · L (M, K) · R (K, N) + C, all row-major, with the element types and sizes of its
//! matrices.
//!
//! Launchers describe a matmul with these types; `cublas.rs` runs it.

use smidgen_ir::DType;

/// The element type of a matrix in a matmul.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    Bf16,
    F16,
    /// 8-bit floats; see [`Fp8`].
    E4m3,
}

impl Element {
    pub fn of(dtype: DType) -> Element {
        match dtype {
            DType::F32 => Element::F32,
            DType::Bf16 => Element::Bf16,
            DType::F16 => Element::F16,
            DType::F64 | DType::I32 | DType::U64 => unreachable!("a matmul of {dtype}"),
        }
    }

    pub fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
            Element::E4m3 => 1,
        }
    }

    /// The number that stands for the type in the file of algorithms.
    pub fn code(self) -> u32 {
        match self {
            Element::F32 => 32,
            Element::Bf16 => 16,
            Element::F16 => 15,
            Element::E4m3 => 8,
        }
    }
}

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    pub pointer: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    pub element: Element,
}

/// The additional settings of an fp8 matmul.
#[derive(Clone, Copy, Debug)]
pub struct Fp8 {
    /// Addresses of f32 scales: one for each row of L, and one for each column of R.
    pub left_scales: u64,
    pub right_scales: u64,
    /// Whether the tensor cores may accumulate with less than f32 precision, which is faster.
    pub fast_sums: bool,
}

impl Matrix {
    /// The part that begins at a row and a column.
    pub fn at(self, row: usize, column: usize) -> Matrix {
        let elements = row * self.stride + column;
        Matrix { pointer: self.pointer + (elements * self.element.bytes()) as u64, ..self }
    }
}

/// M, N and K.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sizes {
    pub rows: usize,
    pub columns: usize,
    pub depth: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    /// (M, K), or (K, M) if transposed.
    pub left: Matrix,
    pub left_transposed: bool,
    /// (K, N), or (N, K) if transposed.
    pub right: Matrix,
    pub right_transposed: bool,
    pub output: Matrix,
    /// C; it may be the output itself.
    pub addend: Option<Matrix>,
    /// Address of a bias that is added to every row, in the element type of the output.
    pub bias: Option<u64>,
    /// Set if both operands are [`Element::E4m3`]. Then the left operand is not transposed, and the right one is.
    pub fp8: Option<Fp8>,
    pub alpha: f32,
    pub sizes: Sizes,
    /// The largest sizes of this matmul in the plan.
    pub planned: Sizes,
    /// Address of a workspace of `MATMUL_BYTES`.
    pub scratch: u64,
}

/// Rows of a micro-batch, and the largest number of rows in the plan.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    pub rows: usize,
    pub planned: usize,
}

impl Matmul {
    /// output (M, N) = left (M, K) · right (K, N), whose rows are tokens of a micro-batch.
    pub fn of_tokens(
        [left, right, output]: [Matrix; 3],
        tokens: Tokens,
        columns: usize,
        depth: usize,
        scratch: u64,
    ) -> Matmul {
        Matmul {
            left,
            left_transposed: false,
            right,
            right_transposed: false,
            output,
            addend: None,
            bias: None,
            fp8: None,
            alpha: 1.0,
            sizes: Sizes { rows: tokens.rows, columns, depth },
            planned: Sizes { rows: tokens.planned, columns, depth },
            scratch,
        }
    }

    /// Left, right, C and D.
    pub fn matrices(&self) -> [Matrix; 4] {
        [self.left, self.right, self.addend.unwrap_or(self.output), self.output]
    }

    pub fn strides(&self) -> [usize; 4] {
        self.matrices().map(|matrix| matrix.stride)
    }
}
