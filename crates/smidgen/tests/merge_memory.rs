//! A merge takes the memory it states, whatever the size of the model.
//!
//! The allocator of this binary adds up what is allocated and not yet freed, on all threads, so everything is one
//! test. The model is many times larger than the blocks.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic, in functions beside it too")]

use smidgen::internal::{MergeOptions, OriginalModel, merge};
use smidgen_formats::element::Element;
use smidgen_formats::peft::{AdapterConfig, AdapterFile, AdapterKey, AdapterTensor, write_adapter};
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

struct Adding;

fn add(bytes: usize) {
    let live = LIVE_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK_BYTES.fetch_max(live, Ordering::Relaxed);
}

// SAFETY: every call goes to the system allocator unchanged; adding up touches two atomic numbers.
unsafe impl GlobalAlloc for Adding {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Adding = Adding;

const BLOCK_BYTES: usize = 256 << 10;
/// Headers, names and paths.
const SLACK_BYTES: usize = 256 << 10;
const SIDE: usize = 512;
const RANK: usize = 16;

fn write_model(folder: &Path, layers: usize) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    let mut specs = vec![TensorSpec {
        name: "embed.weight".to_string(),
        element: Element::Bf16,
        shape: vec![8 * SIDE, SIDE],
    }];
    specs.extend((0..layers).map(|layer| TensorSpec {
        name: format!("layers.{layer}.up.weight"),
        element: Element::Bf16,
        shape: vec![2 * SIDE, SIDE],
    }));
    let zeros = vec![0u8; 2 * SIDE];
    let path = folder.join("model.safetensors");
    write_safetensors(&path, &pytorch_metadata(), &specs, |position, out| {
        (0..specs[position].shape[0]).try_for_each(|_| out.write_all(&zeros))
    })
    .unwrap();
}

fn write_dora(folder: &Path, layers: usize) {
    let mut tensors = Vec::new();
    for layer in 0..layers {
        let path = format!("layers.{layer}.up");
        for (key, shape) in [
            (AdapterKey::LoraA(path.clone()), vec![RANK, SIDE]),
            (AdapterKey::LoraB(path.clone()), vec![2 * SIDE, RANK]),
            (AdapterKey::LoraMagnitude(path.clone()), vec![2 * SIDE]),
        ] {
            tensors.push(AdapterTensor { key, element: Element::F32, shape });
        }
    }
    let config = AdapterConfig { use_dora: true, ..AdapterConfig::new(RANK, 16.0, &["up".to_string()]) };
    write_adapter(folder, &config, &tensors, |position, out| {
        let bytes = Element::F32.tensor_bytes(&tensors[position].shape).unwrap();
        out.write_all(&vec![0; bytes as usize])
    })
    .unwrap();
}

/// The most that was allocated at a time during a merge, and what the merge says it takes.
fn peak_of_merge(folder: &Path, layers: usize, element: Option<Element>) -> (usize, usize) {
    write_model(&folder.join("model"), layers);
    write_dora(&folder.join("adapter"), layers);
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    PEAK_BYTES.store(before, Ordering::Relaxed);
    let adapter = AdapterFile::open(&folder.join("adapter")).unwrap();
    let original = OriginalModel::open(&folder.join("model")).unwrap();
    let options = MergeOptions { element, block_bytes: BLOCK_BYTES, ..MergeOptions::default() };
    let merged = merge(&adapter, &original, &folder.join("merged"), options).unwrap();
    let peak = PEAK_BYTES.load(Ordering::Relaxed) - before;
    let written = std::fs::metadata(folder.join("merged/model.safetensors")).unwrap().len() as usize;
    assert!(written > 8 * peak, "the model of {written} bytes is too small to show anything");
    (peak, merged.memory_bytes as usize)
}

#[test]
fn a_merge_takes_two_blocks_and_one_module() {
    // The sum adds up: without this the rest would pass on a broken allocator.
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    let held = std::hint::black_box(vec![1u8; 1 << 20]);
    assert!(LIVE_BYTES.load(Ordering::Relaxed) >= before + (1 << 20));
    drop(held);

    let module_bytes = 4 * (RANK * (SIDE + 2 * SIDE) + 2 * SIDE);
    for (layers, element) in [(8, None), (16, None), (8, Some(Element::F32))] {
        let folder = tempfile::tempdir().unwrap();
        let (peak, stated) = peak_of_merge(folder.path(), layers, element);
        assert_eq!(stated, 2 * BLOCK_BYTES + module_bytes);
        assert!(peak >= stated, "{peak} bytes at the peak, {stated} are stated");
        assert!(peak <= stated + SLACK_BYTES, "{peak} bytes at the peak, {stated} are stated");
    }
}
