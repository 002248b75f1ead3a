//! Matrix products by cuBLASLt: D (M, N) = alpha · L (M, K) · R (K, N) + C, row by row in memory.
//!
//! The library knows several ways to form a product of a shape. They are timed once, before a run, and the fastest
//! is kept by the shape, in memory and on disk, so that a later run forms the same sums in the same order; those of a
//! plan can be told, and taken over by a run that continues it elsewhere. A micro-batch with fewer tokens than planned
//! uses the way of the planned shape.
//! Every way that the library offers repeats to the byte; another way may round otherwise.

use super::driver::{Event, Gpu, NAME};
use super::modules;
use crate::device::DeviceError;
use cudarc::cublaslt::{result, sys};
use smidgen_ir::DType;
use smidgen_ir::workspace_cuda::MATMUL_BYTES;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Ways of a product that are timed.
const CANDIDATES: usize = 8;
/// Timed runs of each.
const REPEATS: usize = 4;

/// A matrix in device memory, row by row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matrix {
    pub pointer: u64,
    /// Elements from one row to the next.
    pub stride: usize,
    pub element: DType,
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
    /// Added to every row, in the numbers of the output.
    pub bias: Option<u64>,
    pub alpha: f32,
    pub sizes: Sizes,
    /// The largest sizes that the plan knows for this product.
    pub planned: Sizes,
    /// Scratch of [`MATMUL_BYTES`].
    pub scratch: u64,
}

/// What a way is chosen by: nothing of it depends on where a plan puts things, so that other plans of the same math
/// form the same sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    sizes: Sizes,
    /// Bytes at whose multiples rows of left, right, C and D begin, at most 16.
    alignments: [u32; 4],
    input_bits: u32,
    output_bits: u32,
    left_transposed: bool,
    right_transposed: bool,
    added: bool,
    bias: bool,
}

/// A way to form a product, as the library writes it down.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    algorithm: sys::cublasLtMatmulAlgo_t,
}

#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    ways: RefCell<BTreeMap<Key, Way>>,
    /// Those that the plan at hand uses.
    of_plan: RefCell<BTreeSet<Key>>,
    descriptions: RefCell<HashMap<(Key, [usize; 4]), Description>>,
    /// Whether a product without a way is timed.
    timing: Cell<bool>,
    is_changed: Cell<bool>,
    /// Whose ways these are: the GPU's name, its multiprocessors and the library's version.
    owner: String,
    file: Option<PathBuf>,
}

// SAFETY: the handle may be used from any thread, one at a time; see `Gpu`.
unsafe impl Send for CublasLt {}

impl CublasLt {
    /// Opens the library, with the ways that earlier runs on such a GPU kept in `folder`.
    pub fn open(gpu: &Gpu, folder: Option<&Path>) -> Result<CublasLt, DeviceError> {
        let handle = result::create_handle().map_err(|error| failure("cublasLtCreate", error))?;
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        let owner = format!("{}, {} multiprocessors, cuBLASLt {version}", gpu.name, gpu.multiprocessors);
        let file =
            folder.map(|folder| folder.join(format!("products-{:016x}.txt", modules::hash(&[&owner]))));
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        let ways = text.lines().filter_map(read_line).collect();
        Ok(CublasLt {
            handle,
            ways: RefCell::new(ways),
            of_plan: RefCell::default(),
            descriptions: RefCell::default(),
            timing: Cell::new(false),
            is_changed: Cell::new(false),
            owner,
            file,
        })
    }

    /// While this is on, a product whose shape has no way yet tries them all, and nothing else is computed.
    pub fn set_timing(&self, on: bool) {
        self.timing.set(on);
    }

    pub fn is_timing(&self) -> bool {
        self.timing.get()
    }

    /// Writes down new ways; a disk that refuses them costs the next run some time, no more.
    pub fn keep(&self) {
        if let (true, Some(file)) = (self.is_changed.replace(false), &self.file) {
            let ways = self.ways.borrow();
            let text: String = ways.iter().map(|(key, way)| write_line(key, way)).collect();
            let _ = modules::write_whole(file, text.as_bytes());
        }
    }

    /// Forgets which ways the plan before used; see [`Products::chosen`].
    pub fn begin_plan(&self) {
        self.of_plan.borrow_mut().clear();
    }

    /// The ways of the plan at hand, behind a line that says whose they are.
    pub fn chosen(&self) -> String {
        let (ways, of_plan) = (self.ways.borrow(), self.of_plan.borrow());
        let lines = of_plan.iter().filter_map(|key| Some(write_line(key, ways.get(key)?)));
        format!("{}\n{}", self.owner, lines.collect::<String>())
    }

    /// Takes over such ways, if they are of such a GPU and library.
    pub fn adopt(&self, chosen: &str) -> bool {
        let (owner, lines) = chosen.split_once('\n').unwrap_or((chosen, ""));
        let is_ours = owner == self.owner;
        if is_ours {
            let mut ways = self.ways.borrow_mut();
            let before = ways.clone();
            ways.extend(lines.lines().filter_map(read_line));
            self.is_changed.set(self.is_changed.get() || *ways != before);
        }
        is_ours
    }

    pub fn run(&self, gpu: &Gpu, matmul: &Matmul) -> Result<(), DeviceError> {
        if matmul.sizes.rows == 0 || matmul.sizes.columns == 0 {
            return Ok(());
        }
        assert!(matmul.sizes.depth > 0, "a matmul without depth");
        let key = matmul.key(matmul.planned);
        if self.timing.get() {
            self.of_plan.borrow_mut().insert(key);
            return if self.ways.borrow().contains_key(&key) { Ok(()) } else { self.time(gpu, matmul, key) };
        }
        let known = self.ways.borrow().get(&key).copied();
        let way = match known {
            Some(way) => way,
            None => self.first_way(matmul, key)?,
        };
        match self.form(gpu, matmul, key, &way) {
            // A way of the planned shape need not serve another; the library's first for this one does.
            Err(DeviceError::Call { .. }) if matmul.sizes != matmul.planned => {
                let own = matmul.key(matmul.sizes);
                let found = self.ways.borrow().get(&own).copied();
                let way = match found {
                    Some(way) => way,
                    None => self.first_way(matmul, own)?,
                };
                self.form(gpu, matmul, own, &way)
            }
            result => result,
        }
    }

    fn first_way(&self, matmul: &Matmul, key: Key) -> Result<Way, DeviceError> {
        let ways = self.candidates(matmul, key, 1)?;
        self.ways.borrow_mut().insert(key, ways[0]);
        self.of_plan.borrow_mut().insert(key);
        self.is_changed.set(true);
        Ok(ways[0])
    }

    /// Times the library's candidates on the operands at hand and keeps the fastest.
    fn time(&self, gpu: &Gpu, matmul: &Matmul, key: Key) -> Result<(), DeviceError> {
        let whole = Matmul { sizes: matmul.planned, ..*matmul };
        let mut best: Option<(f32, Way)> = None;
        for way in self.candidates(&whole, key, CANDIDATES)? {
            let (begin, end) = (Event::timed()?, Event::timed()?);
            if self.form(gpu, &whole, key, &way).is_err() {
                continue;
            }
            begin.record(gpu)?;
            for _ in 0..REPEATS {
                self.form(gpu, &whole, key, &way)?;
            }
            end.record(gpu)?;
            end.wait()?;
            let took = begin.milliseconds_until(&end)?;
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, way));
            }
        }
        let (_, way) = best.ok_or_else(|| no_way(key))?;
        self.ways.borrow_mut().insert(key, way);
        self.is_changed.set(true);
        Ok(())
    }

    fn candidates(&self, matmul: &Matmul, key: Key, count: usize) -> Result<Vec<Way>, DeviceError> {
        let description = Description::new(matmul, &key)?;
        let [left, right, addend, output] = key.alignments;
        // SAFETY: every handle was just created, and attributes are given with their sizes.
        unsafe {
            let preference =
                result::create_matmul_pref().map_err(|error| failure("cublasLt preference", error))?;
            use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
            let scratch = MATMUL_BYTES as u64;
            let set = |which, value: *const c_void, bytes| {
                result::set_matmul_pref_attribute(preference, which, value, bytes)
                    .map_err(|error| failure("cublasLt preference", error))
            };
            set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const scratch).cast(), 8)?;
            // The library's first matrix is our right one: see `Description`.
            set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (&raw const right).cast(), 4)?;
            set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (&raw const left).cast(), 4)?;
            set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (&raw const addend).cast(), 4)?;
            set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (&raw const output).cast(), 4)?;
            let mut found = vec![std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>(); count];
            let mut number = 0;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.operation,
                description.right,
                description.left,
                description.addend,
                description.output,
                preference,
                count as i32,
                found.as_mut_ptr(),
                &mut number,
            );
            let _ = result::destroy_matmul_pref(preference);
            status.result().map_err(|error| failure("cublasLtMatmulAlgoGetHeuristic", error))?;
            found.truncate(number as usize);
            let good = |result: &sys::cublasLtMatmulHeuristicResult_t| {
                result.state.result().is_ok() && result.workspaceSize <= MATMUL_BYTES
            };
            let ways: Vec<Way> = found
                .iter()
                .filter(|result| good(result))
                .map(|result| Way { algorithm: result.algo })
                .collect();
            if ways.is_empty() { Err(no_way(key)) } else { Ok(ways) }
        }
    }

    fn form(&self, gpu: &Gpu, matmul: &Matmul, key: Key, way: &Way) -> Result<(), DeviceError> {
        let mut descriptions = self.descriptions.borrow_mut();
        let description = match descriptions.entry((key, matmul.strides())) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Description::new(matmul, &key)?),
        };
        description.resize(matmul)?;
        if let Some(bias) = matmul.bias {
            description.set_bias(bias)?;
        }
        let beta: f32 = if matmul.addend.is_some() { 1.0 } else { 0.0 };
        let addend = matmul.addend.map_or(matmul.output.pointer, |addend| addend.pointer);
        // SAFETY: the matrices lie in the reservation with the sizes and strides of their descriptions, the scratch
        // is planned for this step, and everything lives until the stream has passed the product.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                description.operation,
                (&raw const matmul.alpha).cast(),
                matmul.right.pointer as *const c_void,
                description.right,
                matmul.left.pointer as *const c_void,
                description.left,
                (&raw const beta).cast(),
                addend as *const c_void,
                description.addend,
                matmul.output.pointer as *mut c_void,
                description.output,
                &way.algorithm,
                matmul.scratch as *mut c_void,
                MATMUL_BYTES,
                gpu.stream.cast(),
            )
        };
        status.result().map_err(|error| failure("cublasLtMatmul", error))
    }
}

impl Matmul {
    /// Left, right, C and D.
    fn matrices(&self) -> [Matrix; 4] {
        [self.left, self.right, self.addend.unwrap_or(self.output), self.output]
    }

    fn strides(&self) -> [usize; 4] {
        self.matrices().map(|matrix| matrix.stride)
    }

    fn key(&self, sizes: Sizes) -> Key {
        let alignment = |matrix: Matrix| {
            let stride_bytes = (matrix.stride * matrix.element.bytes()) as u64;
            1u32 << (matrix.pointer | stride_bytes).trailing_zeros().min(4)
        };
        Key {
            sizes,
            alignments: self.matrices().map(alignment),
            input_bits: element_code(self.left.element),
            output_bits: element_code(self.output.element),
            left_transposed: self.left_transposed,
            right_transposed: self.right_transposed,
            added: self.addend.is_some(),
            bias: self.bias.is_some(),
        }
    }
}

fn element_code(element: DType) -> u32 {
    match element {
        DType::F32 => 32,
        DType::Bf16 => 16,
        DType::F16 => 15,
        DType::F64 | DType::I32 | DType::U64 => unreachable!("products take floats"),
    }
}

/// The library's words for a product. It counts columns first: what is D row by row is Dᵀ to it, so it is told
/// Dᵀ = Rᵀ·Lᵀ, our right matrix first.
#[derive(Debug)]
struct Description {
    operation: sys::cublasLtMatmulDesc_t,
    left: sys::cublasLtMatrixLayout_t,
    right: sys::cublasLtMatrixLayout_t,
    addend: sys::cublasLtMatrixLayout_t,
    output: sys::cublasLtMatrixLayout_t,
    sizes: Sizes,
}

impl Description {
    fn new(matmul: &Matmul, key: &Key) -> Result<Description, DeviceError> {
        let sizes = key.sizes;
        let operation = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )
        .map_err(|error| failure("cublasLtMatmulDescCreate", error))?;
        let layout = |element: DType, (rows, columns): (usize, usize), stride: usize| {
            let kind = match element {
                DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
                DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
                DType::F32 | DType::F64 | DType::I32 | DType::U64 => sys::cudaDataType_t::CUDA_R_32F,
            };
            result::create_matrix_layout(kind, rows as u64, columns as u64, stride as i64)
                .map_err(|error| failure("cublasLtMatrixLayoutCreate", error))
        };
        let shapes = Shapes::of(matmul, sizes);
        let output = matmul.output.element;
        let description = Description {
            operation,
            left: layout(matmul.left.element, shapes.left, matmul.left.stride)?,
            right: layout(matmul.right.element, shapes.right, matmul.right.stride)?,
            addend: layout(output, shapes.output, matmul.addend.unwrap_or(matmul.output).stride)?,
            output: layout(output, shapes.output, matmul.output.stride)?,
            sizes,
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let transposed = |is: bool| -> i32 { i32::from(is) };
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed(matmul.right_transposed))?;
        description.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transposed(matmul.left_transposed))?;
        if key.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        Ok(description)
    }

    fn set<T>(&self, which: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), DeviceError> {
        // SAFETY: the description exists, and the value has the size that is given.
        let set = unsafe {
            result::set_matmul_desc_attribute(
                self.operation,
                which,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        };
        set.map_err(|error| failure("cublasLtMatmulDescSetAttribute", error))
    }

    fn set_bias(&self, pointer: u64) -> Result<(), DeviceError> {
        self.set(sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &pointer)
    }

    /// Takes on the sizes of a product.
    fn resize(&mut self, matmul: &Matmul) -> Result<(), DeviceError> {
        if self.sizes == matmul.sizes {
            return Ok(());
        }
        let shapes = Shapes::of(matmul, matmul.sizes);
        let layouts = [
            (self.left, shapes.left),
            (self.right, shapes.right),
            (self.addend, shapes.output),
            (self.output, shapes.output),
        ];
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        for (layout, (rows, columns)) in layouts {
            for (which, size) in [
                (Attribute::CUBLASLT_MATRIX_LAYOUT_ROWS, rows as u64),
                (Attribute::CUBLASLT_MATRIX_LAYOUT_COLS, columns as u64),
            ] {
                // SAFETY: the layout exists, and the attribute is a u64.
                let set = unsafe {
                    result::set_matrix_layout_attribute(layout, which, (&raw const size).cast(), 8)
                };
                set.map_err(|error| failure("cublasLtMatrixLayoutSetAttribute", error))?;
            }
        }
        self.sizes = matmul.sizes;
        Ok(())
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once; what was launched does not refer to them.
        unsafe {
            for layout in [self.left, self.right, self.addend, self.output] {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

/// Rows and columns as the library counts them: a row of ours is a column.
struct Shapes {
    left: (usize, usize),
    right: (usize, usize),
    output: (usize, usize),
}

impl Shapes {
    fn of(matmul: &Matmul, Sizes { rows, columns, depth }: Sizes) -> Shapes {
        Shapes {
            left: if matmul.left_transposed { (rows, depth) } else { (depth, rows) },
            right: if matmul.right_transposed { (depth, columns) } else { (columns, depth) },
            output: (columns, rows),
        }
    }
}

fn failure(call: &'static str, error: result::CublasError) -> DeviceError {
    DeviceError::Call { device: NAME, call, what: format!("{:?}", error.0) }
}

fn no_way(key: Key) -> DeviceError {
    let Sizes { rows, columns, depth } = key.sizes;
    let what = format!("cuBLASLt has no way to multiply ({rows}, {depth}) by ({depth}, {columns})");
    DeviceError::Call { device: NAME, call: "cublasLtMatmulAlgoGetHeuristic", what }
}

/// A line of the file: the numbers of the key, a colon, the eight words of the way.
fn write_line(key: &Key, way: &Way) -> String {
    let Sizes { rows, columns, depth } = key.sizes;
    let mut numbers = vec![rows as u64, columns as u64, depth as u64];
    numbers.extend(key.alignments.map(u64::from));
    numbers.extend([key.input_bits, key.output_bits].map(u64::from));
    let flags = [key.left_transposed, key.right_transposed, key.added, key.bias];
    numbers.extend(flags.map(u64::from));
    let mut line: String = numbers.iter().map(|number| format!("{number} ")).collect();
    line.push(':');
    for word in way.algorithm.data {
        write!(line, " {word:016x}").expect("writing to a string cannot fail");
    }
    line.push('\n');
    line
}

fn read_line(line: &str) -> Option<(Key, Way)> {
    let (key, way) = line.split_once(':')?;
    let numbers: Vec<u64> = key.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let numbers: [u64; 13] = numbers.try_into().ok()?;
    let words: Vec<u64> =
        way.split_whitespace().map(|word| u64::from_str_radix(word, 16).ok()).collect::<Option<_>>()?;
    let data: [u64; 8] = words.try_into().ok()?;
    let size = |index: usize| numbers[index] as usize;
    let key = Key {
        sizes: Sizes { rows: size(0), columns: size(1), depth: size(2) },
        alignments: [3, 4, 5, 6].map(|index| numbers[index] as u32),
        input_bits: numbers[7] as u32,
        output_bits: numbers[8] as u32,
        left_transposed: numbers[9] == 1,
        right_transposed: numbers[10] == 1,
        added: numbers[11] == 1,
        bias: numbers[12] == 1,
    };
    Some((key, Way { algorithm: sys::cublasLtMatmulAlgo_t { data } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_reads_back() {
        let key = Key {
            sizes: Sizes { rows: 8192, columns: 3584, depth: 18960 },
            alignments: [16, 16, 8, 16],
            input_bits: 16,
            output_bits: 32,
            left_transposed: false,
            right_transposed: true,
            added: true,
            bias: false,
        };
        let way = Way { algorithm: sys::cublasLtMatmulAlgo_t { data: [1, 2, 3, u64::MAX, 5, 6, 7, 8] } };
        assert_eq!(read_line(write_line(&key, &way).trim_end()), Some((key, way)));
        assert_eq!(read_line("1 2 3 : 4"), None);
        assert_eq!(read_line(""), None);
    }
}
