//! Between the first and the last step nothing large is allocated, saving included.
//!
//! The allocator of this binary counts allocations of 64 KiB and more, on all threads, so everything is
//! one test. A run of one step and a run of many have to count the same: what steps 2 to N and their
//! checkpoints allocate is the difference. Tensors, batches and epochs are all larger than what counts.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic, in functions beside it too")]

use smidgen::internal::{Interrupt, Job, Journal, Progress, Purpose, RunDir, Trainer, plan_job};
use smidgen_data::bad_rows::BadRows;
use smidgen_data::batch::{BatchOptions, BatchPlan, BatchSize, RunLength};
use smidgen_data::format::{RowFormat, RowReading};
use smidgen_data::token_builder::TokenSetBuilder;
use smidgen_data::tokenize::store_token_rows;
use smidgen_data::tokens::TokenLimits;
use smidgen_ir::words::Overflow;
use smidgen_recipe::read_recipe;
use smidgen_runtime::Cpu;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

const LARGE_BYTES: usize = 64 << 10;

static LARGE_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

fn count(size_bytes: usize) {
    if size_bytes >= LARGE_BYTES {
        LARGE_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system allocator unchanged; counting touches one atomic number.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HIDDEN: usize = 128;
const INNER: usize = 256;
const VOCABULARY: usize = 256;

/// A checkpoint whose every tensor is large, in random values.
fn write_model(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false, "torch_dtype": "float32",
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![VOCABULARY, HIDDEN])];
    for layer in 0..2 {
        for (name, shape) in [
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.v_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    shapes.push(("model.norm.weight".to_string(), vec![HIDDEN]));
    let mut random = 1u64;
    let mut values = |elements: usize| -> Vec<u8> {
        let next = || {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((random >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.2
        };
        std::iter::repeat_with(next).take(elements).flat_map(f32::to_le_bytes).collect()
    };
    let data: Vec<Vec<u8>> = shapes.iter().map(|(_, shape)| values(shape.iter().product())).collect();
    let views = shapes.iter().zip(&data).map(|((name, shape), bytes)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name.clone(), view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
}

fn write_rows(path: &Path, rows: usize, tokens: usize) {
    let mut text = String::new();
    for row in 0..rows {
        let ids: Vec<String> =
            (0..tokens).map(|token| ((row * 31 + token * 7 + 1) % VOCABULARY).to_string()).collect();
        writeln!(text, "{{\"input_ids\":[{}]}}", ids.join(",")).unwrap();
    }
    std::fs::write(path, text).unwrap();
}

/// Large allocations of a run after its memory is reserved and filled, as `train` runs it.
fn large_allocations_of_run(folder: &Path, overrides: &[&str], steps: u64) -> usize {
    let output = folder.join(format!("run-of-{steps}-{}", overrides.len()));
    let mut overrides: Vec<String> = overrides.iter().map(|text| text.to_string()).collect();
    overrides.push(format!("train.steps={steps}"));
    let job =
        Job::prepare(read_recipe(&folder.join("recipe.toml"), &overrides).unwrap(), Purpose::Train).unwrap();
    let planned = plan_job(&job).unwrap();
    assert!(planned.fits);
    assert_eq!(job.rows().batches.total_steps(), steps);
    let dir = RunDir::at(&output).unwrap();
    dir.make().unwrap();
    let mut journal = Journal::resume(dir.path(), 0).unwrap();
    let solution = planned.solution;
    let device = Cpu::new(job.request.threads).unwrap();
    let trainer = Trainer::load(&job, solution.plan, device, dir, solution.policy, None).unwrap();
    let before = LARGE_ALLOCATIONS.load(Ordering::Relaxed);
    let progress = Progress::new(steps, 0, 0, true);
    trainer
        .train(0, &mut journal, &progress, &Interrupt::never(), &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let count = LARGE_ALLOCATIONS.load(Ordering::Relaxed) - before;
    let saved = std::fs::metadata(output.join("adapter/adapter_model.safetensors")).unwrap().len();
    assert!(saved as usize > 8 * LARGE_BYTES, "the adapter is too small to show anything");
    assert!(output.join(format!("checkpoint-{steps}")).exists());
    count
}

/// Large allocations of walking through all epochs but the first.
fn large_allocations_of_epochs(path: &Path, batch: BatchSize) -> usize {
    let limits = TokenLimits { vocab_size: VOCABULARY as u32, max_tokens: 8, overflow: Overflow::Error };
    let mut builder = TokenSetBuilder::new(limits);
    let files = [path.to_path_buf()];
    let reading = RowReading { source: (&files).into(), format: RowFormat::Tokens, columns: &[], limit: 0 };
    store_token_rows(reading, 1, &mut builder, &mut BadRows::default(), |_| {}).unwrap();
    let set = builder.finish().unwrap();
    assert!(set.len() * size_of::<u32>() > LARGE_BYTES, "an epoch is too small to show anything");
    let options =
        BatchOptions { batch, run_length: RunLength::Epochs(4.0), seed: 1, shuffle: true, repeats: 1 };
    let batches = BatchPlan::new(&set, options).unwrap();
    let before = LARGE_ALLOCATIONS.load(Ordering::Relaxed);
    let mut samples = 0;
    for step in 0..batches.total_steps() {
        samples += batches.step_samples(step).samples.len();
    }
    assert_eq!(samples, 4 * set.len());
    LARGE_ALLOCATIONS.load(Ordering::Relaxed) - before
}

#[test]
fn nothing_large_is_allocated_between_the_first_and_the_last_step() {
    // The count counts: without this the rest would pass on a broken allocator.
    let before = LARGE_ALLOCATIONS.load(Ordering::Relaxed);
    drop(std::hint::black_box(vec![1u8; LARGE_BYTES]));
    drop(std::hint::black_box(vec![1u8; LARGE_BYTES - 1]));
    assert_eq!(LARGE_ALLOCATIONS.load(Ordering::Relaxed) - before, 1);

    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    write_model(&folder.join("model"));
    write_rows(&folder.join("data.jsonl"), 11, 160);
    let recipe = "[model]\npath = \"model\"\n[adapter]\nrank = 128\ndropout = 0.1\n\
                  [data]\ntrain = \"data.jsonl\"\neval = \"data.jsonl\"\nformat = \"tokens\"\nmax_tokens = 160\n\
                  [train]\nbatch = 4\nsave_every = 1\nkeep = 1\neval_every = 2\n\
                  [memory]\ndevice = \"cpu\"\nthreads = 2\nbudget = \"256MiB\"\n[output]\ndir = \"unused\"\n";
    std::fs::write(folder.join("recipe.toml"), recipe).unwrap();
    for overrides in [&[][..], &["memory.micro_tokens=200", "memory.recompute=all"]] {
        let one = large_allocations_of_run(folder, overrides, 1);
        let many = large_allocations_of_run(folder, overrides, 7);
        assert_eq!(many, one, "{overrides:?}: {} large allocations in steps 2 to 7", many - one);
    }

    write_rows(&folder.join("short.jsonl"), 20_000, 4);
    for batch in [BatchSize::Samples(64), BatchSize::Tokens(300)] {
        assert_eq!(large_allocations_of_epochs(&folder.join("short.jsonl"), batch), 0, "{batch:?}");
    }
}
