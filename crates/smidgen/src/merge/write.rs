//! Writes the merged tensors: two workers take blocks of rows in turn and write each at its offset in the file.
//! A worker reads, merges, rounds and writes a whole block, so that reading, arithmetic and writing of the two overlap
//! without a queue, and the bytes do not depend on which worker takes which block.
//! All memory is reserved before the first tensor.
//! Left out: what happens to each tensor (`fit`), and the file for it (`model_files/shards.rs`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::fold::Factors;
use crate::failure::Failure;
use crate::model_files::finite::{check_finite, check_size, refused_result, too_large_result};
use crate::model_files::numbers::{read_f32, round_into};
use crate::model_files::original::OriginalRows;
use crate::model_files::output::{Action, OutputTensor};
use crate::model_files::shards::{INDEX_FILE, render_index, shard_name};
use crate::plan::phases::MERGE_WORKERS;
use smidgen_formats::safetensors::write::{TensorSpec, lay_out_file, pytorch_metadata};
use smidgen_formats::whole_file::write_whole;

/// The memory of a merge.
pub struct Workspace {
    factors: Factors,
    /// The stored bytes of a tensor, if its rows cannot be decoded separately.
    held: Vec<u8>,
    workers: Vec<Worker>,
}

struct Worker {
    /// Rows in f32.
    values: Vec<f32>,
    /// Rows as written, or bytes to copy.
    bytes: Vec<u8>,
}

impl Workspace {
    pub fn new(outputs: &[OutputTensor], block_bytes: usize) -> Workspace {
        let half_bytes = (block_bytes / 2).max(size_of::<f32>());
        let worker =
            |_| Worker { values: vec![0.0; half_bytes / size_of::<f32>()], bytes: vec![0; half_bytes] };
        let held_bytes = outputs.iter().map(|output| output.original.held_bytes()).max().unwrap_or(0);
        let folds = outputs.iter().filter_map(|output| match &output.action {
            Action::Fold(fold) => Some(&**fold),
            Action::Replace(_) | Action::Convert | Action::Copy => None,
        });
        Workspace {
            factors: Factors::with_room_for(folds),
            held: Vec::with_capacity(held_bytes),
            workers: (0..MERGE_WORKERS).map(worker).collect(),
        }
    }

    pub fn memory_bytes(&self) -> u64 {
        let of = |worker: &Worker| worker.values.capacity() * size_of::<f32>() + worker.bytes.capacity();
        let workers: usize = self.workers.iter().map(of).sum();
        self.factors.room_bytes() + (self.held.capacity() + workers) as u64
    }
}

/// Writes the shards, and the index if there is more than one.
pub fn write_shards(
    folder: &Path,
    outputs: &[OutputTensor],
    shards: &[Range<usize>],
    workspace: &mut Workspace,
) -> Result<(), Failure> {
    for (number, range) in shards.iter().enumerate() {
        let path = folder.join(shard_name(number, shards.len()));
        write_shard(&path, &outputs[range.clone()], workspace)?;
    }
    if shards.len() > 1 {
        let named = outputs.iter().map(|output| (output.original.file_name(), output.bytes()));
        let text = render_index(&named.collect::<Vec<_>>(), shards);
        write_whole(&folder.join(INDEX_FILE), |out| out.write_all(text.as_bytes())).map_err(Failure::disk)?;
    }
    Ok(())
}

fn write_shard(path: &Path, outputs: &[OutputTensor], workspace: &mut Workspace) -> Result<(), Failure> {
    let specs: Vec<TensorSpec> = (outputs.iter())
        .map(|output| TensorSpec {
            name: output.original.file_name().to_string(),
            element: output.element,
            shape: output.original.shape().to_vec(),
        })
        .collect();
    let layout = lay_out_file(&pytorch_metadata(), &specs).map_err(Failure::disk)?;
    let failed = |error| Failure::file("write", path, error);
    let file = File::create_new(path).map_err(failed)?;
    file.set_len(layout.file_bytes).map_err(failed)?;
    file.write_all_at(&layout.beginning, 0).map_err(failed)?;
    for (output, &offset) in outputs.iter().zip(&layout.offsets) {
        let target = Target { file: &file, path, offset };
        write_tensor(output, &target, workspace)?;
    }
    file.sync_all().map_err(failed)
}

/// The position of a tensor in its file.
struct Target<'a> {
    file: &'a File,
    path: &'a Path,
    offset: u64,
}

impl Target<'_> {
    fn write(&self, byte_offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        (self.file.write_all_at(bytes, self.offset + byte_offset))
            .map_err(|error| Failure::file("write", self.path, error))
    }
}

fn write_tensor(output: &OutputTensor, target: &Target, workspace: &mut Workspace) -> Result<(), Failure> {
    let Workspace { factors, held, workers } = workspace;
    match &output.action {
        Action::Fold(fold) => {
            factors.load(fold)?;
            let folded = |first_row, rows: &mut [f32]| factors.fold_rows(fold.first_row + first_row, rows);
            write_rows(output, target, held, workers, folded)
        }
        Action::Convert => write_rows(output, target, held, workers, |_, _| {}),
        Action::Replace(tensor) => in_blocks(workers, tensor.elements(), 1, |worker, range| {
            let values = &mut worker.values[..(range.end - range.start) as usize];
            read_f32(tensor, range.start, values)?;
            write_rounded(values, &mut worker.bytes, output, target, range.start)
        }),
        Action::Copy => in_blocks(workers, output.bytes(), 1, |worker, range| {
            // The range counts bytes; the buffer has four bytes per value of the block.
            let bytes = &mut worker.bytes[..(range.end - range.start) as usize];
            output.original.read_bytes(range.start, bytes)?;
            target.write(range.start, bytes)
        }),
    }
}

fn write_rows(
    output: &OutputTensor,
    target: &Target,
    held: &mut Vec<u8>,
    workers: &mut [Worker],
    fold: impl Fn(usize, &mut [f32]) + Sync,
) -> Result<(), Failure> {
    let (original, width) = (&output.original, output.original.row_elements());
    // A single row may be larger than the block.
    for worker in workers.iter_mut().filter(|worker| worker.values.len() < width) {
        worker.values.resize(width, 0.0);
        worker.bytes.resize(width * size_of::<f32>(), 0);
    }
    let stored = OriginalRows::open(original, held)?;
    in_blocks(workers, original.rows() as u64, width.max(1), |worker, range| {
        let (first_row, rows) = (range.start as usize, (range.end - range.start) as usize);
        let values = &mut worker.values[..rows * width];
        stored.read(first_row, rows, values)?;
        fold(first_row, values);
        write_rounded(values, &mut worker.bytes, output, target, range.start * width as u64)
    })
}

fn write_rounded(
    values: &[f32],
    bytes: &mut [u8],
    output: &OutputTensor,
    target: &Target,
    first_element: u64,
) -> Result<(), Failure> {
    let element = output.element;
    let bytes = &mut bytes[..values.len() * element.size_bytes()];
    round_into(values, element, bytes);
    check_finite(output.original.name(), element, first_element, bytes)
        .map_err(|error| refused_result(error, element))?;
    check_size(output.original.name(), first_element, values).map_err(too_large_result)?;
    target.write(first_element * element.size_bytes() as u64, bytes)
}

/// Splits `count` items of `width` values into blocks that fit a worker's memory, and runs `work` on them with all
/// workers.
/// The first failure ends the work.
fn in_blocks(
    workers: &mut [Worker],
    count: u64,
    width: usize,
    work: impl Fn(&mut Worker, Range<u64>) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let at_a_time = workers[0].values.len() / width;
    let blocks = count.div_ceil(at_a_time as u64) as usize;
    let next = AtomicUsize::new(0);
    let run = |worker: &mut Worker| -> Result<(), Failure> {
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return Ok(());
            }
            let first = (block * at_a_time) as u64;
            let outcome = work(worker, first..(first + at_a_time as u64).min(count));
            if outcome.is_err() {
                next.store(blocks, Ordering::Relaxed);
                return outcome;
            }
        }
    };
    // One block is not worth a second thread.
    let (here, others) = workers.split_first_mut().expect("there are workers");
    std::thread::scope(|scope| {
        let needed = others.iter_mut().take(blocks.saturating_sub(1));
        let threads: Vec<_> = needed.map(|worker| scope.spawn(|| run(worker))).collect();
        let mut outcome = run(here);
        for thread in threads {
            let other = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(other);
        }
        outcome
    })
}
