//! Runs matmuls (`matmul.rs`) with cuBLASLt, and chooses its algorithms.
//!
//! The library has several algorithms for a shape. They are timed once, before a run, and the fastest is cached by
//! shape, in memory and on disk, so that later runs sum in the same order. A checkpoint stores the algorithms of its
//! plan, and a run that resumes on another machine adopts them. A micro-batch with fewer tokens than planned uses the
//! algorithm of the planned shape.
//! Every algorithm that the library offers is deterministic; different algorithms may round differently.

use super::driver::{Event, Gpu, NAME};
use super::kernel_cache;
use super::matmul::{Element, Matmul, Matrix, Sizes};
use crate::device::DeviceError;
use cudarc::cublaslt::{result, sys};
use smidgen_ir::workspace_cuda::MATMUL_BYTES;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Algorithms that are timed per shape.
const CANDIDATES: usize = 8;
/// Timed runs of each algorithm.
const REPEATS: usize = 4;

/// The key that an algorithm is cached under. Apart from alignment it does not depend on addresses, so that other plans
/// of the same math use the same algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    sizes: Sizes,
    /// Alignment of the rows of left, right, C and D in bytes, at most 16.
    alignments: [u32; 4],
    input_bits: u32,
    output_bits: u32,
    left_transposed: bool,
    right_transposed: bool,
    added: bool,
    bias: bool,
    fast_sums: bool,
}

type Algorithm = sys::cublasLtMatmulAlgo_t;

#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    algorithms: RefCell<BTreeMap<Key, Algorithm>>,
    /// The keys that the loaded plan uses.
    of_plan: RefCell<BTreeSet<Key>>,
    /// The library's descriptors of a matmul, by its key and strides.
    descriptions: RefCell<HashMap<(Key, [usize; 4]), Description>>,
    /// Whether `run` times algorithms instead of computing.
    timing: Cell<bool>,
    /// Whether `algorithms` has something that the file does not have.
    is_changed: Cell<bool>,
    /// The GPU's name and multiprocessors and the library's version: the algorithms are valid only for these.
    owner: String,
    file: Option<PathBuf>,
}

// SAFETY: the handle may be used from any thread, one at a time; see `Gpu`.
unsafe impl Send for CublasLt {}

impl CublasLt {
    /// Opens the library, with the algorithms that earlier runs on such a GPU cached in `folder`.
    pub fn open(gpu: &Gpu, folder: Option<&Path>) -> Result<CublasLt, DeviceError> {
        let handle = result::create_handle().map_err(|error| failure("cublasLtCreate", error))?;
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        let owner = format!("{}, {} multiprocessors, cuBLASLt {version}", gpu.name, gpu.multiprocessors);
        // The file name of earlier versions, so that an upgrade does not time every shape again.
        let file =
            folder.map(|folder| folder.join(format!("products-{:016x}.txt", kernel_cache::hash(&[&owner]))));
        let text = file.as_ref().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
        let algorithms = text.lines().filter_map(read_line).collect();
        Ok(CublasLt {
            handle,
            algorithms: RefCell::new(algorithms),
            of_plan: RefCell::default(),
            descriptions: RefCell::default(),
            timing: Cell::new(false),
            is_changed: Cell::new(false),
            owner,
            file,
        })
    }

    /// While this is on, `run` times the algorithms of every new shape, and computes nothing else.
    pub fn set_timing(&self, on: bool) {
        self.timing.set(on);
    }

    pub fn is_timing(&self) -> bool {
        self.timing.get()
    }

    /// Saves new algorithms. A failed write is ignored: the next run times them again.
    pub fn keep(&self) {
        if let (true, Some(file)) = (self.is_changed.replace(false), &self.file) {
            let algorithms = self.algorithms.borrow();
            let text: String = algorithms.iter().map(|(key, algorithm)| write_line(key, algorithm)).collect();
            let _ = kernel_cache::write_whole(file, text.as_bytes());
        }
    }

    /// Clears the list of algorithms that the plan uses; see [`CublasLt::chosen`].
    pub fn begin_plan(&self) {
        self.of_plan.borrow_mut().clear();
    }

    /// The algorithms of the loaded plan, after a line with the GPU and library version that they are valid for.
    pub fn chosen(&self) -> String {
        let (algorithms, of_plan) = (self.algorithms.borrow(), self.of_plan.borrow());
        let lines = of_plan.iter().filter_map(|key| Some(write_line(key, algorithms.get(key)?)));
        format!("{}\n{}", self.owner, lines.collect::<String>())
    }

    /// Uses algorithms that [`CublasLt::chosen`] returned earlier. Returns false, and uses none, if they are for
    /// another GPU or library version.
    pub fn adopt(&self, chosen: &str) -> bool {
        let (owner, lines) = chosen.split_once('\n').unwrap_or((chosen, ""));
        let is_ours = owner == self.owner;
        if is_ours {
            let mut algorithms = self.algorithms.borrow_mut();
            let before = algorithms.clone();
            algorithms.extend(lines.lines().filter_map(read_line));
            self.is_changed.set(self.is_changed.get() || *algorithms != before);
        }
        is_ours
    }

    pub fn run(&self, gpu: &Gpu, matmul: &Matmul) -> Result<(), DeviceError> {
        if matmul.sizes.rows == 0 || matmul.sizes.columns == 0 {
            return Ok(());
        }
        assert!(matmul.sizes.depth > 0, "a matmul of depth 0");
        let key = Key::of(matmul, matmul.planned);
        if self.timing.get() {
            self.of_plan.borrow_mut().insert(key);
            return if self.algorithms.borrow().contains_key(&key) {
                Ok(())
            } else {
                self.time(gpu, matmul, key)
            };
        }
        match self.enqueue(gpu, matmul, key, &self.algorithm(matmul, key)?) {
            // The algorithm of the planned shape may not support this one; then the library's first choice is used.
            Err(DeviceError::Call { .. }) if matmul.sizes != matmul.planned => {
                let own = Key::of(matmul, matmul.sizes);
                self.enqueue(gpu, matmul, own, &self.algorithm(matmul, own)?)
            }
            result => result,
        }
    }

    /// The cached algorithm of a key, or else the library's first choice.
    fn algorithm(&self, matmul: &Matmul, key: Key) -> Result<Algorithm, DeviceError> {
        if let Some(known) = self.algorithms.borrow().get(&key) {
            return Ok(*known);
        }
        let algorithms = self.candidates(matmul, key, 1)?;
        self.algorithms.borrow_mut().insert(key, algorithms[0]);
        self.of_plan.borrow_mut().insert(key);
        self.is_changed.set(true);
        Ok(algorithms[0])
    }

    /// Times the library's candidates on the operands at the planned sizes and keeps the fastest.
    fn time(&self, gpu: &Gpu, matmul: &Matmul, key: Key) -> Result<(), DeviceError> {
        let whole = Matmul { sizes: matmul.planned, ..*matmul };
        let mut best: Option<(f32, Algorithm)> = None;
        for algorithm in self.candidates(&whole, key, CANDIDATES)? {
            let (begin, end) = (Event::timed()?, Event::timed()?);
            if self.enqueue(gpu, &whole, key, &algorithm).is_err() {
                continue;
            }
            begin.record(gpu)?;
            for _ in 0..REPEATS {
                self.enqueue(gpu, &whole, key, &algorithm)?;
            }
            end.record(gpu)?;
            end.wait()?;
            let took = begin.milliseconds_until(&end)?;
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, algorithm));
            }
        }
        let (_, algorithm) = best.ok_or_else(|| no_algorithm(key))?;
        self.algorithms.borrow_mut().insert(key, algorithm);
        self.is_changed.set(true);
        Ok(())
    }

    fn candidates(&self, matmul: &Matmul, key: Key, count: usize) -> Result<Vec<Algorithm>, DeviceError> {
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
            // The library's A is our right operand: see `Description`.
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
            let algorithms: Vec<Algorithm> =
                found.iter().filter(|result| good(result)).map(|result| result.algo).collect();
            if algorithms.is_empty() { Err(no_algorithm(key)) } else { Ok(algorithms) }
        }
    }

    fn enqueue(
        &self,
        gpu: &Gpu,
        matmul: &Matmul,
        key: Key,
        algorithm: &Algorithm,
    ) -> Result<(), DeviceError> {
        let mut descriptions = self.descriptions.borrow_mut();
        let description = match descriptions.entry((key, matmul.strides())) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Description::new(matmul, &key)?),
        };
        description.resize(matmul)?;
        description.set_addresses(matmul)?;
        let beta: f32 = if matmul.addend.is_some() { 1.0 } else { 0.0 };
        let addend = matmul.addend.map_or(matmul.output.pointer, |addend| addend.pointer);
        // SAFETY: the matrices are inside the reservation with the sizes and strides of their descriptions, the
        // workspace is planned for this step, and all of it lives until the stream has run the matmul.
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
                algorithm,
                matmul.scratch as *mut c_void,
                MATMUL_BYTES,
                gpu.stream.cast(),
            )
        };
        status.result().map_err(|error| failure("cublasLtMatmul", error))
    }
}

impl Key {
    /// The key of a matmul, with its own sizes or the planned ones.
    fn of(matmul: &Matmul, sizes: Sizes) -> Key {
        let alignment = |matrix: Matrix| {
            let stride_bytes = (matrix.stride * matrix.element.bytes()) as u64;
            1u32 << (matrix.pointer | stride_bytes).trailing_zeros().min(4)
        };
        Key {
            sizes,
            alignments: matmul.matrices().map(alignment),
            input_bits: matmul.left.element.code(),
            output_bits: matmul.output.element.code(),
            left_transposed: matmul.left_transposed,
            right_transposed: matmul.right_transposed,
            added: matmul.addend.is_some(),
            bias: matmul.bias.is_some(),
            fast_sums: matmul.fp8.is_some_and(|fp8| fp8.fast_sums),
        }
    }
}

/// A matmul in the library's terms. The library is column-major: a row-major D is Dᵀ to it, so it computes
/// Dᵀ = Rᵀ·Lᵀ, with our right matrix first.
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
        let layout = |element: Element, (rows, columns): (usize, usize), stride: usize| {
            result::create_matrix_layout(kind(element), rows as u64, columns as u64, stride as i64)
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
        if let Some(fp8) = matmul.fp8 {
            let by_row = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F as u32;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &by_row)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &by_row)?;
            description.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(fp8.fast_sums))?;
            // The search for algorithms needs these to be set.
            description.set_addresses(matmul)?;
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

    /// Sets the addresses in the description: the bias, and the scales of fp8.
    fn set_addresses(&self, matmul: &Matmul) -> Result<(), DeviceError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some(bias) = matmul.bias {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        if let Some(fp8) = matmul.fp8 {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &fp8.right_scales)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &fp8.left_scales)?;
        }
        Ok(())
    }

    /// Sets the sizes in the layouts.
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
        // SAFETY: created in `new`, destroyed once; launched work does not refer to them.
        unsafe {
            for layout in [self.left, self.right, self.addend, self.output] {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.operation);
        }
    }
}

fn kind(element: Element) -> sys::cudaDataType_t {
    match element {
        Element::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Element::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        Element::F16 => sys::cudaDataType_t::CUDA_R_16F,
        Element::E4m3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
    }
}

/// Rows and columns in the column-major terms of the library.
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

fn no_algorithm(key: Key) -> DeviceError {
    let Sizes { rows, columns, depth } = key.sizes;
    let what = format!("cuBLASLt has no algorithm for ({rows}, {depth}) by ({depth}, {columns})");
    DeviceError::Call { device: NAME, call: "cublasLtMatmulAlgoGetHeuristic", what }
}

/// A line of the file: the numbers of the key, a colon, the eight words of the algorithm.
fn write_line(key: &Key, algorithm: &Algorithm) -> String {
    let Sizes { rows, columns, depth } = key.sizes;
    let mut numbers = vec![rows as u64, columns as u64, depth as u64];
    numbers.extend(key.alignments.map(u64::from));
    numbers.extend([key.input_bits, key.output_bits].map(u64::from));
    let flags = [key.left_transposed, key.right_transposed, key.added, key.bias];
    numbers.extend(flags.map(u64::from));
    numbers.extend(key.fast_sums.then_some(1));
    let mut line: String = numbers.iter().map(|number| format!("{number} ")).collect();
    line.push(':');
    for word in algorithm.data {
        write!(line, " {word:016x}").expect("writing to a string cannot fail");
    }
    line.push('\n');
    line
}

fn read_line(line: &str) -> Option<(Key, Algorithm)> {
    let (key, algorithm) = line.split_once(':')?;
    let numbers: Vec<u64> = key.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    // Only fp8 lines may have this last number.
    let fast_sums = numbers.get(13) == Some(&1);
    let numbers: [u64; 13] = numbers.get(..13)?.try_into().ok()?;
    let words: Vec<u64> =
        algorithm.split_whitespace().map(|word| u64::from_str_radix(word, 16).ok()).collect::<Option<_>>()?;
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
        fast_sums,
    };
    Some((key, Algorithm { data }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_reads_back() {
        let key = Key {
            sizes: Sizes { rows: 8192, columns: 3584, depth: 18960 },
            alignments: [16, 16, 8, 16],
            input_bits: 16,
            output_bits: 32,
            left_transposed: false,
            right_transposed: true,
            added: true,
            bias: false,
            fast_sums: false,
        };
        let algorithm = Algorithm { data: [1, 2, 3, u64::MAX, 5, 6, 7, 8] };
        for key in [key, Key { input_bits: 8, fast_sums: true, ..key }] {
            assert_eq!(read_line(write_line(&key, &algorithm).trim_end()), Some((key, algorithm)));
        }
        assert_eq!(read_line("1 2 3 : 4"), None);
        assert_eq!(read_line(""), None);
    }
}
