//! The bf16 instructions of this processor: AMX tiles, AVX-512 dot products, or none.
//!
//! Both work on the same tiles in memory (`bf16_packing.rs`): a left tile is 16 rows of 16 pairs, a right
//! tile 16 pairs of 16 columns, a pair being two neighbours along depth. Sums are f32.
//! The units sum in different orders, so a run uses only one of them.
//! AMX is written as assembly because its intrinsics are not stable. The operating system has to grant access to
//! its registers once; the permission then holds for all threads of the process.
//! AMX also multiplies f32, split into planes of bf16; AVX-512 would gain nothing from that.
//! Left out: cutting a matmul into tiles (`bf16_matmul.rs`, `split_matmul.rs`).

use std::sync::OnceLock;

/// Rows of a left tile, columns of a right tile.
pub const TILE: usize = 16;
/// Depth of a tile.
pub const TILE_DEPTH: usize = 32;
/// Elements of a tile; 1 KiB of bf16.
pub const TILE_ELEMENTS: usize = TILE * TILE_DEPTH;
/// Maximum rows and columns of C that one call computes: two tiles in each direction.
pub const SQUARE: usize = 2 * TILE;

/// A unit that multiplies bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bf16Unit {
    /// `tdpbf16ps`: 16 × 16 sums of 32 products per instruction.
    Amx,
    /// `vdpbf16ps`: 16 sums of 2 products per instruction.
    Avx512,
}

impl Bf16Unit {
    /// Every unit, best first.
    pub const ALL: [Bf16Unit; 2] = [Bf16Unit::Amx, Bf16Unit::Avx512];

    /// The best unit of this machine.
    pub fn detect() -> Option<Bf16Unit> {
        Bf16Unit::ALL.into_iter().find(|unit| unit.is_supported())
    }

    /// Whether this machine has the unit and the operating system allows its use.
    pub fn is_supported(self) -> bool {
        static AMX: OnceLock<bool> = OnceLock::new();
        // Packing into tiles needs AVX-512 for either unit.
        super::isa::Isa::Avx512.is_supported()
            && match self {
                Bf16Unit::Amx => *AMX.get_or_init(platform::request_amx),
                Bf16Unit::Avx512 => platform::has_dot_product(),
            }
    }

    pub fn name(self) -> &'static str {
        match self {
            Bf16Unit::Amx => "AMX",
            Bf16Unit::Avx512 => "AVX-512",
        }
    }
}

/// The unit that computes f32 matmuls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum F32Unit {
    /// Fused multiply-adds on the widest vectors of the machine.
    Vectors,
    /// AMX, with each f32 split into three bf16: `split_matmul.rs`.
    Amx,
}

impl F32Unit {
    /// The best unit of this machine.
    pub fn detect() -> F32Unit {
        if Bf16Unit::Amx.is_supported() { F32Unit::Amx } else { F32Unit::Vectors }
    }
}

/// How many bf16 numbers add up to one element of each operand. The tiles of all planes are adjacent in a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planes {
    /// One: elements are rounded to bf16.
    One,
    /// Three, which add up to an f32. Of the nine products of planes, three are too small to matter.
    Three,
    /// Three on the left, one on the right: the right operand is stored as bf16.
    ThreeByOne,
}

impl Planes {
    pub const fn left(self) -> usize {
        match self {
            Planes::One => 1,
            Planes::Three | Planes::ThreeByOne => 3,
        }
    }

    pub const fn right(self) -> usize {
        match self {
            Planes::One | Planes::ThreeByOne => 1,
            Planes::Three => 3,
        }
    }
}

/// A matmul of strips of tiles: C (up to 32, up to 32) = L · R, or C + L · R.
#[derive(Clone, Copy)]
pub struct TileSquare {
    pub planes: Planes,
    /// Tiles of the first 16 rows, one per plane and 32 of depth, and of the next 16 rows.
    pub left: [*const u16; 2],
    /// Tiles of the first 16 columns, and of the next 16; the second is null if there are only 16 columns.
    pub right: [*const u16; 2],
    pub depth_tiles: usize,
    /// Whether sums start from the value of C.
    pub accumulate: bool,
    /// C, row-major.
    pub output: *mut f32,
    /// Rows of C, with the same stride, to prefetch while the tiles are multiplied: C is mostly not in the caches,
    /// and waiting for it when it is written takes as long as the matmul.
    pub prefetch: *const f32,
    pub output_stride: usize,
}

/// Runs `work` on the calling thread with the unit ready for [`multiply_square`].
///
/// # Safety
/// The unit is supported.
pub unsafe fn with_unit<R>(unit: Bf16Unit, work: impl FnOnce() -> R) -> R {
    match unit {
        Bf16Unit::Amx => {
            // SAFETY: the caller's promise.
            unsafe { platform::configure_tiles() };
            let result = work();
            // SAFETY: as above. Released tiles need not be saved at a context switch.
            unsafe { platform::release_tiles() };
            result
        }
        Bf16Unit::Avx512 => work(),
    }
}

/// Computes a square of C: 32 rows, and 32 columns, or 16 without a second right tile.
///
/// # Safety
/// Called inside [`with_unit`] of the same unit; the tiles are readable, and C is writable for these rows and columns.
pub unsafe fn multiply_square(unit: Bf16Unit, square: &TileSquare) {
    // SAFETY: the caller's promises are passed on.
    unsafe {
        match (unit, square.right[1].is_null()) {
            (Bf16Unit::Amx, false) => platform::amx_square(square),
            (Bf16Unit::Amx, true) => platform::amx_column(square),
            (Bf16Unit::Avx512, false) => platform::dot_square::<2>(square),
            (Bf16Unit::Avx512, true) => platform::dot_square::<1>(square),
        }
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod platform {
    use super::{Planes, TILE, TILE_DEPTH, TILE_ELEMENTS, TileSquare};
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Bytes from one row of a tile to the next, and of a whole tile.
    const ROW_BYTES: usize = 2 * TILE_DEPTH;
    const TILE_BYTES: usize = 2 * TILE_ELEMENTS;

    pub fn request_amx() -> bool {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        /// Requests a state component that is off by default; component 18 is tile data.
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const TILE_DATA: libc::c_long = 18;
        if __cpuid(0).eax < 7 {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        // SAFETY: the system call only changes the permission.
        features & AMX_BF16 != 0
            && features & AMX_TILE != 0
            && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) } == 0
    }

    pub fn has_dot_product() -> bool {
        is_x86_feature_detected!("avx512bf16")
    }

    /// Palette 1, all eight tiles of 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIG: TileConfig = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    pub unsafe fn configure_tiles() {
        // SAFETY: the machine has AMX, and the configuration is 64 bytes that it accepts.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack)) }
    }

    pub unsafe fn release_tiles() {
        // SAFETY: the machine has AMX.
        unsafe { asm!("tilerelease", options(nostack)) }
    }

    /// A square of C with AMX: sums in tmm0 to tmm3, left tiles in tmm4 and tmm5, right tiles in tmm6 and tmm7.
    /// `$step` holds the instructions for 32 of depth, which has `$left_tiles` and `$right_tiles` per strip.
    macro_rules! amx_square {
        ($square:expr, $left_tiles:expr, $right_tiles:expr, $($step:literal)*) => {
            asm!(
                "test {accumulate:e}, {accumulate:e}",
                "jnz 4f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 5f",
                "4:",
                "tileloadd tmm0, [{output} + {stride}]",
                "tileloadd tmm1, [{output} + {stride} + 64]",
                "tileloadd tmm2, [{output_next} + {stride}]",
                "tileloadd tmm3, [{output_next} + {stride} + 64]",
                "5:",
                "test {count}, {count}",
                "jz 3f",
                "2:",
                "prefetchw [{prefetch}]",
                "prefetchw [{prefetch} + 64]",
                "prefetchw [{prefetch} + {stride}]",
                "prefetchw [{prefetch} + {stride} + 64]",
                "lea {prefetch}, [{prefetch} + 2 * {stride}]",
                $($step,)*
                "add {left}, {left_bytes}",
                "add {next_left}, {left_bytes}",
                "add {right}, {right_bytes}",
                "add {next_right}, {right_bytes}",
                "dec {count}",
                "jnz 2b",
                "3:",
                "tilestored [{output} + {stride}], tmm0",
                "tilestored [{output} + {stride} + 64], tmm1",
                "tilestored [{output_next} + {stride}], tmm2",
                "tilestored [{output_next} + {stride} + 64], tmm3",
                left = inout(reg) $square.left[0] => _,
                next_left = inout(reg) $square.left[1] => _,
                right = inout(reg) $square.right[0] => _,
                next_right = inout(reg) $square.right[1] => _,
                count = inout(reg) $square.depth_tiles => _,
                accumulate = in(reg) u32::from($square.accumulate),
                prefetch = inout(reg) $square.prefetch => _,
                row = in(reg) ROW_BYTES,
                left_bytes = const $left_tiles * TILE_BYTES,
                right_bytes = const $right_tiles * TILE_BYTES,
                output = in(reg) $square.output,
                output_next = in(reg) $square.output.add(TILE * $square.output_stride),
                stride = in(reg) 4 * $square.output_stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }

    /// Like `amx_square`, without a second right tile: 32 rows of 16 columns.
    macro_rules! amx_column {
        ($square:expr, $left_tiles:expr, $right_tiles:expr, $($step:literal)*) => {
            asm!(
                "test {accumulate:e}, {accumulate:e}",
                "jnz 4f",
                "tilezero tmm0",
                "tilezero tmm2",
                "jmp 5f",
                "4:",
                "tileloadd tmm0, [{output} + {stride}]",
                "tileloadd tmm2, [{output_next} + {stride}]",
                "5:",
                "test {count}, {count}",
                "jz 3f",
                "2:",
                "prefetchw [{prefetch}]",
                "prefetchw [{prefetch} + {stride}]",
                "lea {prefetch}, [{prefetch} + 2 * {stride}]",
                $($step,)*
                "add {left}, {left_bytes}",
                "add {next_left}, {left_bytes}",
                "add {right}, {right_bytes}",
                "dec {count}",
                "jnz 2b",
                "3:",
                "tilestored [{output} + {stride}], tmm0",
                "tilestored [{output_next} + {stride}], tmm2",
                left = inout(reg) $square.left[0] => _,
                next_left = inout(reg) $square.left[1] => _,
                right = inout(reg) $square.right[0] => _,
                count = inout(reg) $square.depth_tiles => _,
                accumulate = in(reg) u32::from($square.accumulate),
                prefetch = inout(reg) $square.prefetch => _,
                row = in(reg) ROW_BYTES,
                left_bytes = const $left_tiles * TILE_BYTES,
                right_bytes = const $right_tiles * TILE_BYTES,
                output = in(reg) $square.output,
                output_next = in(reg) $square.output.add(TILE * $square.output_stride),
                stride = in(reg) 4 * $square.output_stride,
                out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack),
            )
        };
    }

    pub unsafe fn amx_square(square: &TileSquare) {
        // SAFETY: every strip holds its tiles of 1 KiB for `depth_tiles` steps, and C 32 rows of 32 floats.
        unsafe {
            match square.planes {
                Planes::One => amx_square!(square, 1, 1,
                    "tileloadd tmm4, [{left} + {row}]"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{next_right} + {row}]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ),
                Planes::ThreeByOne => amx_square!(square, 3, 1,
                    "prefetchw [{prefetch}]"
                    "prefetchw [{prefetch} + 64]"
                    "prefetchw [{prefetch} + {stride}]"
                    "prefetchw [{prefetch} + {stride} + 64]"
                    "lea {prefetch}, [{prefetch} + 2 * {stride}]"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tileloadd tmm4, [{left} + {row} + 2048]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{next_right} + {row}]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row} + 2048]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm4, [{left} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row} + 1024]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm4, [{left} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ),
                // Pairs of planes in an order in which each pair shares an operand with the one before: (2, 0),
                // (1, 0), (1, 1), (0, 1), (0, 2), (0, 0). Chunks are less deep, so each step prefetches twice the
                // rows of C.
                Planes::Three => amx_square!(square, 3, 3,
                    "prefetchw [{prefetch}]"
                    "prefetchw [{prefetch} + 64]"
                    "prefetchw [{prefetch} + {stride}]"
                    "prefetchw [{prefetch} + {stride} + 64]"
                    "lea {prefetch}, [{prefetch} + 2 * {stride}]"
                    "tileloadd tmm4, [{left} + {row} + 2048]"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{next_right} + {row}]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row} + 2048]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm4, [{left} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row} + 1024]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm6, [{right} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm7, [{next_right} + {row} + 1024]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm4, [{left} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm6, [{right} + {row} + 2048]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm7, [{next_right} + {row} + 2048]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm7, [{next_right} + {row}]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ),
            }
        }
    }

    pub unsafe fn amx_column(square: &TileSquare) {
        // SAFETY: every strip holds its tiles of 1 KiB for `depth_tiles` steps, and C 32 rows of 16 floats.
        unsafe {
            match square.planes {
                Planes::One => amx_column!(square, 1, 1,
                    "tileloadd tmm6, [{right} + {row}]"
                    "tileloadd tmm4, [{left} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ),
                Planes::ThreeByOne => amx_column!(square, 3, 1,
                    "tileloadd tmm6, [{right} + {row}]"
                    "tileloadd tmm4, [{left} + {row} + 2048]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row} + 2048]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm4, [{left} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row} + 1024]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm4, [{left} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ),
                Planes::Three => amx_column!(square, 3, 3,
                    "tileloadd tmm4, [{left} + {row} + 2048]"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row} + 2048]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm4, [{left} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row} + 1024]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm6, [{right} + {row} + 1024]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm4, [{left} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{next_left} + {row}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm6, [{right} + {row} + 2048]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tileloadd tmm6, [{right} + {row}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ),
            }
        }
    }

    /// Rows whose sums are held in registers at the same time.
    const ROWS: usize = 8;

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn dot_square<const COLUMNS: usize>(square: &TileSquare) {
        assert_eq!(square.planes, Planes::One, "only AMX multiplies planes");
        for first in (0..2 * TILE).step_by(ROWS) {
            let strip = square.left[first / TILE].wrapping_add(first % TILE * TILE_DEPTH);
            let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
            if square.accumulate {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: C has 32 rows of this many columns.
                        *sum = unsafe {
                            _mm512_loadu_ps(
                                square.output.add((first + row) * square.output_stride + column * TILE),
                            )
                        };
                    }
                }
            }
            for tile in 0..square.depth_tiles {
                let left = strip.wrapping_add(tile * TILE_ELEMENTS);
                for pair in 0..TILE {
                    let at = tile * TILE_ELEMENTS + pair * TILE_DEPTH;
                    // SAFETY: the pair is in the tiles.
                    let columns: [__m512i; COLUMNS] = std::array::from_fn(|column| unsafe {
                        _mm512_loadu_si512(square.right[column].add(at).cast())
                    });
                    for (row, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: the pair is in the tile of this row.
                        let factor =
                            unsafe { left.add(row * TILE_DEPTH + 2 * pair).cast::<i32>().read_unaligned() };
                        for (sum, column) in sums.iter_mut().zip(columns) {
                            *sum =
                                _mm512_dpbf16_ps(*sum, as_bf16(_mm512_set1_epi32(factor)), as_bf16(column));
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (column, sum) in sums.iter().enumerate() {
                    // SAFETY: C has 32 rows of this many columns.
                    unsafe {
                        let target = square.output.add((first + row) * square.output_stride + column * TILE);
                        _mm512_storeu_ps(target, *sum);
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn as_bf16(register: __m512i) -> __m512bh {
        // SAFETY: both types are 512 bits and accept any value.
        unsafe { std::mem::transmute(register) }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod platform {
    use super::TileSquare;

    pub fn request_amx() -> bool {
        false
    }

    pub fn has_dot_product() -> bool {
        false
    }

    pub unsafe fn configure_tiles() {}

    pub unsafe fn release_tiles() {}

    pub unsafe fn amx_square(_: &TileSquare) {
        unreachable!("this machine has no AMX");
    }

    pub unsafe fn amx_column(_: &TileSquare) {
        unreachable!("this machine has no AMX");
    }

    pub unsafe fn dot_square<const COLUMNS: usize>(_: &TileSquare) {
        unreachable!("this machine has no AVX-512");
    }
}
