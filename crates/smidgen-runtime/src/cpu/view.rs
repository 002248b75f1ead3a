//! Raw views into the arena: the inputs and outputs of operations.
//!
//! Two views may cover the same memory (an operation in place), so neither `&` nor `&mut` over the
//! elements ever exists; every access goes through these types and is checked against their length.
//! The unsafe promise is made once, when a view is built; from there operations are safe calls, and
//! each asserts on entry which of its views may overlap.
//! Left out: ownership and lifetimes; the arena outlives every step.

use super::convert::{Element, StoredElement};
use super::footprint::Footprint;
use super::simd::{Block, LANES, Lanes};

/// `len` elements to read.
#[derive(Clone, Copy, Debug)]
pub struct Src<T> {
    pointer: *const T,
    len: usize,
}

/// `len` elements to write, or to read and write.
#[derive(Clone, Copy, Debug)]
pub struct Dst<T> {
    pointer: *mut T,
    len: usize,
}

/// A matrix to read: row `r` is `columns` floats from `r * stride` on.
#[derive(Clone, Copy, Debug)]
pub struct SrcRows {
    pointer: *const f32,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// A matrix to write, or to read and write.
#[derive(Clone, Copy, Debug)]
pub struct DstRows {
    pointer: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
}

/// Weights of a plain storage, flattened and read as f32. Matrices in any storage are `stored::Stored`.
#[derive(Clone, Copy, Debug)]
pub struct StoredVector {
    pointer: *const u8,
    element: Element,
    len: usize,
}

// SAFETY: a view is an address; the caller of `new` promised that its memory may be used from any
// thread for as long as the view is used.
unsafe impl<T: Send + Sync> Send for Src<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Src<T> {}
// SAFETY: as above; operations write disjoint parts from different threads.
unsafe impl<T: Send + Sync> Send for Dst<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Dst<T> {}
// SAFETY: as for `Src`.
unsafe impl Send for SrcRows {}
// SAFETY: as for `Src`.
unsafe impl Sync for SrcRows {}
// SAFETY: as for `Dst`.
unsafe impl Send for DstRows {}
// SAFETY: as for `Dst`.
unsafe impl Sync for DstRows {}
// SAFETY: as for `Src`.
unsafe impl Send for StoredVector {}
// SAFETY: as for `Src`.
unsafe impl Sync for StoredVector {}

impl<T: Copy> Src<T> {
    /// # Safety
    /// `pointer` is aligned and valid for reads of `len` initialised elements for as long as this view
    /// or a copy of it is used, and during a call that takes it nothing but that call writes them.
    pub const unsafe fn new(pointer: *const T, len: usize) -> Self {
        Src { pointer, len }
    }

    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    #[inline(always)]
    pub fn get(self, index: usize) -> T {
        assert!(index < self.len);
        // SAFETY: inside the view, which is valid for reads.
        unsafe { self.pointer.add(index).read() }
    }

    #[inline(always)]
    pub fn part(self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start);
        Src { pointer: self.pointer.wrapping_add(start), len }
    }
}

impl Src<f32> {
    /// The view as a matrix with `columns` columns and no gap between rows.
    pub fn rows(self, columns: usize) -> SrcRows {
        let rows = exact_rows(self.len, columns);
        SrcRows { pointer: self.pointer, rows, columns, stride: columns }
    }

    /// The block's elements, then zeros.
    #[inline(always)]
    pub fn lanes(self, block: Block) -> Lanes {
        self.lanes_or(block, 0.0)
    }

    /// The block's elements, then `fill`.
    #[inline(always)]
    pub fn lanes_or(self, block: Block, fill: f32) -> Lanes {
        check_block(block, self.len);
        // SAFETY: the block is inside the view.
        unsafe { load(self.pointer.add(block.start).cast(), block.count, fill) }
    }
}

impl<T: Copy> Dst<T> {
    /// # Safety
    /// `pointer` is aligned and valid for reads and writes of `len` initialised elements for as long
    /// as this view or a copy of it is used, and during a call that takes it nothing else uses them.
    pub const unsafe fn new(pointer: *mut T, len: usize) -> Self {
        Dst { pointer, len }
    }

    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The start of the view, for kernels that take addresses.
    pub fn address(self) -> *mut T {
        self.pointer
    }

    #[inline(always)]
    pub fn src(self) -> Src<T> {
        Src { pointer: self.pointer, len: self.len }
    }

    #[inline(always)]
    pub fn part(self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start);
        Dst { pointer: self.pointer.wrapping_add(start), len }
    }

    #[inline(always)]
    pub fn set(self, index: usize, value: T) {
        assert!(index < self.len);
        // SAFETY: inside the view, which is valid for writes.
        unsafe { self.pointer.add(index).write(value) }
    }

    /// Copies `src` here; the two may be the same memory.
    #[inline(always)]
    pub fn copy_from(self, src: Src<T>) {
        assert_eq!(self.len, src.len);
        // SAFETY: both views hold `len` elements; `copy` allows overlap.
        unsafe { std::ptr::copy(src.pointer, self.pointer, self.len) }
    }
}

impl Dst<f32> {
    /// The view as a matrix with `columns` columns and no gap between rows.
    pub fn rows(self, columns: usize) -> DstRows {
        let rows = exact_rows(self.len, columns);
        DstRows { pointer: self.pointer, rows, columns, stride: columns }
    }

    #[inline(always)]
    pub fn lanes(self, block: Block) -> Lanes {
        self.src().lanes(block)
    }

    /// Writes the first `block.count` lanes.
    #[inline(always)]
    pub fn set_lanes(self, block: Block, lanes: Lanes) {
        check_block(block, self.len);
        let start = self.pointer.wrapping_add(block.start);
        if block.count == LANES {
            // SAFETY: the block is inside the view.
            unsafe { start.cast::<Lanes>().write_unaligned(lanes) };
        } else {
            // SAFETY: the block is inside the view and is shorter than `LANES`.
            unsafe { store_short(start, block.count, &lanes) };
        }
    }

    pub fn fill_zero(self) {
        // SAFETY: the view is valid for writes; all bits zero is 0.0.
        unsafe { std::ptr::write_bytes(self.pointer, 0, self.len) }
    }
}

impl SrcRows {
    /// # Safety
    /// As for `Src::new`, for the `columns` floats at every `row * stride` with `row < rows`.
    pub const unsafe fn new(pointer: *const f32, rows: usize, columns: usize, stride: usize) -> Self {
        assert!(columns <= stride);
        SrcRows { pointer, rows, columns, stride }
    }

    #[inline(always)]
    pub fn rows(self) -> usize {
        self.rows
    }

    #[inline(always)]
    pub fn columns(self) -> usize {
        self.columns
    }

    #[inline(always)]
    pub fn row(self, row: usize) -> Src<f32> {
        assert!(row < self.rows);
        Src { pointer: self.pointer.wrapping_add(row * self.stride), len: self.columns }
    }

    /// Columns `start..start + len` of every row.
    pub fn column_part(self, start: usize, len: usize) -> SrcRows {
        assert!(start <= self.columns && len <= self.columns - start);
        SrcRows { pointer: self.pointer.wrapping_add(start), columns: len, ..self }
    }
}

impl DstRows {
    /// # Safety
    /// As for `Dst::new`, for the `columns` floats at every `row * stride` with `row < rows`.
    pub const unsafe fn new(pointer: *mut f32, rows: usize, columns: usize, stride: usize) -> Self {
        assert!(columns <= stride);
        DstRows { pointer, rows, columns, stride }
    }

    #[inline(always)]
    pub fn rows(self) -> usize {
        self.rows
    }

    #[inline(always)]
    pub fn columns(self) -> usize {
        self.columns
    }

    #[inline(always)]
    pub fn row(self, row: usize) -> Dst<f32> {
        assert!(row < self.rows);
        Dst { pointer: self.pointer.wrapping_add(row * self.stride), len: self.columns }
    }

    #[inline(always)]
    pub fn src(self) -> SrcRows {
        SrcRows { pointer: self.pointer, rows: self.rows, columns: self.columns, stride: self.stride }
    }

    /// Columns `start..start + len` of every row.
    pub fn column_part(self, start: usize, len: usize) -> DstRows {
        assert!(start <= self.columns && len <= self.columns - start);
        DstRows { pointer: self.pointer.wrapping_add(start), columns: len, ..self }
    }
}

impl StoredVector {
    /// # Safety
    /// `pointer` is valid for reads of `len * element.bytes()` initialised bytes for as long as this
    /// view or a copy of it is used, and nothing writes them during that time. It need not be aligned.
    pub const unsafe fn new(pointer: *const u8, element: Element, len: usize) -> Self {
        StoredVector { pointer, element, len }
    }

    #[inline(always)]
    pub fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// One element as f32. Slow; kernels use `lanes`.
    pub fn get(self, index: usize) -> f32 {
        let one = self.part(index, 1);
        // SAFETY: the part is inside the view, which is valid for reads.
        unsafe {
            match self.element {
                Element::F32 => one.pointer.cast::<f32>().read_unaligned(),
                Element::Bf16 => super::convert::bf16_to_f32(one.pointer.cast::<u16>().read_unaligned()),
                Element::F16 => super::convert::f16_to_f32(one.pointer.cast::<u16>().read_unaligned()),
            }
        }
    }

    #[inline(always)]
    pub fn part(self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start);
        StoredVector { pointer: self.pointer.wrapping_add(start * self.element.bytes()), len, ..self }
    }

    #[inline(always)]
    pub fn element(self) -> Element {
        self.element
    }

    /// The block's elements as f32, then zeros. `E` must be the view's element type; kernels choose it
    /// once, outside their loops, because a match per block would keep lanes out of registers.
    #[inline(always)]
    pub fn lanes<E: StoredElement>(self, block: Block) -> Lanes {
        assert!(self.element == E::ELEMENT);
        check_block(block, self.len);
        let start = self.pointer.wrapping_add(block.start * size_of::<E::Bits>());
        // SAFETY: the block is inside the view, which holds elements of this size.
        let bits = unsafe { load(start, block.count, E::ZERO) };
        let mut lanes = [0.0; LANES];
        for lane in 0..LANES {
            lanes[lane] = E::widen(bits[lane]);
        }
        lanes
    }
}

impl<T> From<Src<T>> for Footprint {
    fn from(view: Src<T>) -> Footprint {
        let bytes = view.len * size_of::<T>();
        Footprint::flat(view.pointer.addr(), bytes)
    }
}

impl<T: Copy> From<Dst<T>> for Footprint {
    fn from(view: Dst<T>) -> Footprint {
        view.src().into()
    }
}

impl From<SrcRows> for Footprint {
    fn from(view: SrcRows) -> Footprint {
        Footprint::rows(
            view.pointer.addr(),
            view.rows,
            view.columns * size_of::<f32>(),
            view.stride * size_of::<f32>(),
        )
    }
}

impl From<DstRows> for Footprint {
    fn from(view: DstRows) -> Footprint {
        view.src().into()
    }
}

impl From<StoredVector> for Footprint {
    fn from(view: StoredVector) -> Footprint {
        let bytes = view.len * view.element.bytes();
        Footprint::flat(view.pointer.addr(), bytes)
    }
}

fn exact_rows(len: usize, columns: usize) -> usize {
    assert!(columns > 0 && len.is_multiple_of(columns), "{len} elements are not rows of {columns}");
    len / columns
}

#[inline(always)]
fn check_block(block: Block, len: usize) {
    assert!(block.count <= LANES && block.count <= len && block.start <= len - block.count);
}

/// Short blocks have separate functions that are never inlined: otherwise LLVM merges both branches into
/// one `memcpy` of unknown length, which is a call per block.
///
/// # Safety
/// `from` is readable for `count <= LANES` elements; it need not be aligned.
#[inline(always)]
unsafe fn load<T: Copy>(from: *const u8, count: usize, fill: T) -> [T; LANES] {
    if count == LANES {
        // SAFETY: given.
        unsafe { from.cast::<[T; LANES]>().read_unaligned() }
    } else {
        // SAFETY: given.
        unsafe { load_short(from, count, fill) }
    }
}

/// # Safety
/// As `load`.
#[cold]
#[inline(never)]
unsafe fn load_short<T: Copy>(from: *const u8, count: usize, fill: T) -> [T; LANES] {
    let mut lanes = [fill; LANES];
    // SAFETY: given; `lanes` is local and bytes have no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr().cast(), count * size_of::<T>());
    }
    lanes
}

/// # Safety
/// `to` is writable for `count <= LANES` floats and is outside `lanes`.
#[cold]
#[inline(never)]
unsafe fn store_short(to: *mut f32, count: usize, lanes: &Lanes) {
    // SAFETY: given.
    unsafe { std::ptr::copy_nonoverlapping(lanes.as_ptr(), to, count) }
}

#[cfg(test)]
mod tests {
    use super::super::convert::StoredF16;
    use super::*;

    #[test]
    fn stored_lanes_are_read_unaligned_and_padded() {
        let values = [1.0_f32, -2.5, 0.15625];
        let halves: Vec<u8> =
            values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect();
        let mut shifted = vec![0_u8];
        shifted.extend(&halves);
        // SAFETY: `shifted` outlives the view and holds three f16 after its first byte.
        let stored = unsafe { StoredVector::new(shifted.as_ptr().add(1), Element::F16, 3) };
        let lanes = stored.lanes::<StoredF16>(Block { start: 0, count: 3 });
        assert_eq!(&lanes[..4], &[1.0, -2.5, 0.15625, 0.0]);
        let lanes = stored.part(1, 2).lanes::<StoredF16>(Block { start: 1, count: 1 });
        assert_eq!(&lanes[..2], &[0.15625, 0.0]);
    }
}
