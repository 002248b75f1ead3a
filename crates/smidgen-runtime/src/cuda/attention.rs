//! Launches causal attention over packed segments, forward and backward.
//!
//! The host does not know the segment boundaries, which are on the device. So a small kernel first lists the tiles, and
//! the grids have room for the largest possible number of tiles. Kernels are compiled for five padded head sizes, two
//! files for each.
//! Rows that are not aligned to 16 bytes, head sizes that are not multiples of 8, and heads whose tiles do not fit the
//! shared memory of a GPU use plain kernels, which are correct and slow. Left out: attention over cached keys (`cached_attention.rs`).

use super::attention_hopper::{self, HopperHead};
use super::gpu_generation::Generation;
use super::modules::KernelFile;
use super::spans::{addresses_and_strides, stored_dtype};
use super::stage::{Arg, Stage};
use crate::device::{BoundStep, DeviceError, Operand};
use smidgen_ir::workspace_cuda::{
    AttentionTiles, attention_floats_bytes, attention_list_bytes, attention_parts, attention_tile_bound,
    attention_workspace_bytes,
};
use smidgen_ir::{AttentionShape, DType, Extent};

/// Two files per padded head size.
pub const FILES: [KernelFile; 10] = [
    HEADS[0].forward_file,
    HEADS[0].gradient_file,
    HEADS[1].forward_file,
    HEADS[1].gradient_file,
    HEADS[2].forward_file,
    HEADS[2].gradient_file,
    HEADS[3].forward_file,
    HEADS[3].gradient_file,
    HEADS[4].forward_file,
    HEADS[4].gradient_file,
];

/// The largest head size that kernels support.
pub const MOST_CHANNELS: usize = 512;

/// The files of one head size.
pub fn files(shape: &AttentionShape) -> Vec<KernelFile> {
    let head = Head::of(shape.head_dim);
    vec![head.forward_file, head.gradient_file]
}

/// Computes o and lse.
pub fn attention(stage: &Stage<'_>, step: &BoundStep, shape: &AttentionShape) -> Result<(), DeviceError> {
    let [q, k, v, boundaries] = first_operands(&step.inputs);
    let [o, lse] = first_operands(&step.outputs);
    let work = Work::of(stage, shape, q, boundaries);
    if work.tokens == 0 {
        return Ok(());
    }
    let list = work.scratch(stage, false).query_list;
    stage.launch(
        work.head.list_tiles,
        [1, 1, 1],
        THREADS,
        0,
        &[stage.address(boundaries), Arg::Int(work.segments), Arg::Int(work.tokens), Arg::Pointer(list)],
    )?;
    let mut args = addresses_and_strides(stage, &[q, k, v, o]);
    args.extend([stage.address(lse), Arg::Pointer(list)]);
    args.extend([Arg::Int(shape.heads as i32), Arg::Int(shape.kv_heads as i32)]);
    let blocks = work.tile_bound(work.head.tiles.queries) * shape.heads;
    let tile_bytes = work.head.forward_shared_bytes(stage.generation());
    let in_tiles = work.in_tiles(stage, &[q, k, v, o]) && tile_bytes <= stage.most_shared_bytes();
    if let Some(hopper) = HopperHead::of(stage, shape).filter(|_| in_tiles && !shape.sinks) {
        args.extend([Arg::Int(shape.head_dim as i32), Arg::Float(shape.scale)]);
        let shared_bytes = hopper.forward_shared_bytes();
        let grid = [blocks.min(stage.multiprocessors()) as u32, 1, 1];
        return stage.launch(hopper.forward, grid, attention_hopper::THREADS, shared_bytes, &args);
    }
    args.extend(score_args(shape));
    args.extend(if shape.sinks {
        [stage.address(&step.inputs[4]), stored_dtype(&step.inputs[4])]
    } else {
        [Arg::Pointer(0), Arg::Int(0)]
    });
    let (kernel, shared_bytes) =
        if in_tiles { (work.head.forward, tile_bytes) } else { (work.head.forward_plain, 0) };
    stage.launch(kernel, [blocks as u32, 1, 1], THREADS, shared_bytes, &args)
}

/// Computes dq, dk and dv.
pub fn attention_grad(
    stage: &Stage<'_>,
    step: &BoundStep,
    shape: &AttentionShape,
) -> Result<(), DeviceError> {
    let [q, k, v, o, lse, o_gradient, boundaries] = first_operands(&step.inputs);
    let [dq, dk, dv] = first_operands(&step.outputs);
    let work = Work::of(stage, shape, q, boundaries);
    if work.tokens == 0 {
        return Ok(());
    }
    let Scratch { query_list, key_list, powers, deltas, parts: parts_at } = work.scratch(stage, true);
    let generation = stage.generation();
    let tile_bytes = work.head.gradient_shared_bytes(generation);
    let in_tiles =
        work.in_tiles(stage, &[q, k, v, o_gradient, dq, dk, dv]) && tile_bytes <= stage.most_shared_bytes();
    let hopper = HopperHead::of(stage, shape).filter(|_| in_tiles);
    let key_rows = if hopper.is_some() { attention_hopper::ITEM_ROWS } else { work.head.tiles.keys };
    let sums = (work.tokens as usize * shape.heads).div_ceil(work.head.sums_of_block());
    let sixteen = work.is_aligned(stage, &[o, o_gradient]);
    stage.launch(
        work.head.prepare,
        [2 + sums as u32, 1, 1],
        THREADS,
        0,
        &[
            stage.address(o),
            Arg::Long(o.stride as i64),
            stage.address(o_gradient),
            Arg::Long(o_gradient.stride as i64),
            stage.address(lse),
            stage.address(boundaries),
            Arg::Int(work.segments),
            Arg::Int(work.tokens),
            Arg::Int(shape.heads as i32),
            Arg::Int(shape.head_dim as i32),
            Arg::Int(i32::from(sixteen)),
            Arg::Int(key_rows as i32),
            Arg::Pointer(query_list),
            Arg::Pointer(key_list),
            Arg::Pointer(powers),
            Arg::Pointer(deltas),
        ],
    )?;
    let parts = if in_tiles { attention_parts(stage.planned.tokens, shape) } else { 1 };
    let key_columns = shape.kv_heads * shape.head_dim;
    let half = work.tokens as usize * key_columns;
    let cut = if in_tiles { work.head.tile_cut(generation) } else { 1 };
    let key_blocks = work.tile_bound(key_rows) * cut * shape.kv_heads * parts;
    let query_blocks = work.tile_bound(work.head.tiles.queries) * cut * shape.heads;
    let mut args = addresses_and_strides(stage, &[q, k, v, o_gradient, dq]);
    match parts {
        1 => args.extend(addresses_and_strides(stage, &[dk, dv])),
        _ => {
            for at in [parts_at, parts_at + 2 * half as u64] {
                args.extend([Arg::Pointer(at), Arg::Long(key_columns as i64)]);
            }
        }
    }
    args.extend([powers, deltas, query_list, key_list].map(Arg::Pointer));
    let blocks = key_blocks + query_blocks;
    if hopper.is_none() {
        args.push(Arg::Int(key_blocks as i32));
    }
    args.extend([work.tokens, shape.heads as i32, shape.kv_heads as i32].map(Arg::Int));
    if hopper.is_some() {
        args.push(Arg::Int(shape.head_dim as i32));
    }
    args.push(Arg::Int(parts as i32));
    args.push(Arg::Long(2 * half as i64));
    if let Some(hopper) = hopper {
        args.push(Arg::Float(shape.scale));
        let shared_bytes = hopper.gradient_shared_bytes();
        let grid = [blocks.min(stage.multiprocessors()) as u32, 1, 1];
        stage.launch(hopper.gradient, grid, attention_hopper::THREADS, shared_bytes, &args)?;
    } else {
        args.extend(score_args(shape));
        let (kernel, shared_bytes) =
            if in_tiles { (work.head.gradient, tile_bytes) } else { (work.head.gradient_plain, 0) };
        stage.launch(kernel, [blocks as u32, 1, 1], THREADS, shared_bytes, &args)?;
    }
    if parts == 1 {
        return Ok(());
    }
    let blocks = (2 * half / 8).div_ceil(THREADS as usize);
    let mut args = vec![Arg::Pointer(parts_at), Arg::Int(parts as i32), Arg::Int(work.tokens)];
    args.push(Arg::Int(key_columns as i32));
    args.extend(addresses_and_strides(stage, &[dk, dv]));
    stage.launch(work.head.sum, [blocks as u32, 1, 1], THREADS, 0, &args)
}

/// Threads of every block.
const THREADS: u32 = 128;

/// The kernels of one padded head size.
struct Head {
    tiles: AttentionTiles,
    list_tiles: &'static str,
    forward: &'static str,
    forward_plain: &'static str,
    prepare: &'static str,
    gradient: &'static str,
    gradient_plain: &'static str,
    sum: &'static str,
    forward_file: KernelFile,
    gradient_file: KernelFile,
}

macro_rules! head {
    ($padded:literal) => {
        Head {
            tiles: AttentionTiles::of($padded),
            list_tiles: concat!("attention_tiles_", $padded),
            forward: concat!("attention_", $padded),
            forward_plain: concat!("attention_plain_", $padded),
            prepare: concat!("attention_grad_prepare_", $padded),
            gradient: concat!("attention_grad_", $padded),
            gradient_plain: concat!("attention_grad_plain_", $padded),
            sum: concat!("attention_grad_sum_", $padded),
            forward_file: KernelFile {
                name: concat!("attention_", $padded),
                source: concat!(
                    "#define HEAD ",
                    $padded,
                    "\n",
                    include_str!("../../kernels/matrix_unit.cuh"),
                    include_str!("../../kernels/attention_tiles.cuh"),
                    include_str!("../../kernels/attention.cu")
                ),
                kernels: &[
                    concat!("attention_tiles_", $padded),
                    concat!("attention_", $padded),
                    concat!("attention_plain_", $padded),
                ],
            },
            gradient_file: KernelFile {
                name: concat!("attention_grad_", $padded),
                source: concat!(
                    "#define HEAD ",
                    $padded,
                    "\n",
                    include_str!("../../kernels/matrix_unit.cuh"),
                    include_str!("../../kernels/attention_tiles.cuh"),
                    include_str!("../../kernels/attention_grad.cu")
                ),
                kernels: &[
                    concat!("attention_grad_prepare_", $padded),
                    concat!("attention_grad_", $padded),
                    concat!("attention_grad_plain_", $padded),
                    concat!("attention_grad_sum_", $padded),
                ],
            },
        }
    };
}

const HEADS: [Head; 5] = [head!(64), head!(96), head!(128), head!(256), head!(512)];

impl Head {
    fn of(head_dim: usize) -> &'static Head {
        static ALL: [Head; 5] = HEADS;
        assert!((1..=MOST_CHANNELS).contains(&head_dim), "`check` refuses a head size of {head_dim}");
        let tiles = AttentionTiles::of(head_dim);
        ALL.iter().find(|head| head.tiles == tiles).expect("there is a file for every padded size")
    }

    /// A row of a tile in shared memory: 16-bit elements.
    fn row_bytes(&self) -> usize {
        2 * self.tiles.padded_head
    }

    /// Whether tiles are smaller than on later GPUs, because a block may use less shared memory.
    fn is_cramped(&self, generation: Generation) -> bool {
        (65..=256).contains(&self.tiles.padded_head) && generation < Generation::Ampere
    }

    /// Shared memory for the queries and two pipeline stages of keys and values.
    fn forward_shared_bytes(&self, generation: Generation) -> u32 {
        let keys = match self.tiles.padded_head {
            0..=128 => 64,
            129..=256 => 32,
            _ => 16,
        };
        let keys = if self.is_cramped(generation) { keys / 2 } else { keys };
        (self.row_bytes() * (self.tiles.queries + 4 * keys)) as u32
    }

    /// The number of tiles that the gradient kernel cuts each listed tile into. Tiles of heads over 128 channels cannot
    /// be cut further.
    fn tile_cut(&self, generation: Generation) -> usize {
        if self.is_cramped(generation) && self.tiles.padded_head <= 128 { 2 } else { 1 }
    }

    /// Shared memory of the gradient kernel: the larger requirement of its two kinds of blocks.
    fn gradient_shared_bytes(&self, generation: Generation) -> u32 {
        let AttentionTiles { padded_head, queries, keys } = self.tiles;
        let cut = self.tile_cut(generation);
        let (queries, keys) = (queries / cut, keys / cut);
        // A block of keys has keys, values, two stages of queries, do, p and ds that pairs of warps exchange, and two
        // stages of two floats per query. It reads as many queries at a time as it has keys, but at least 32.
        let query_step = keys.max(32);
        let exchanged = 2 * query_step * query_step * 2;
        let of_keys = self.row_bytes() * (2 * keys + 3 * query_step) + exchanged + 4 * 4 * query_step;
        // A block of queries has queries, do, and two stages of keys and values.
        let key_step = match padded_head {
            64 => 64,
            96 | 128 => 32,
            _ => 16,
        };
        let of_queries = self.row_bytes() * (2 * queries + 4 * key_step);
        of_keys.max(of_queries) as u32
    }

    /// Head sums that a block of `attention_grad_prepare` computes.
    fn sums_of_block(&self) -> usize {
        let lanes = match self.tiles.padded_head {
            64 => 8,
            96 | 128 => 16,
            _ => 32,
        };
        4 * THREADS as usize / lanes
    }
}

/// The sizes that forward and backward use.
struct Work<'a> {
    shape: &'a AttentionShape,
    head: &'static Head,
    tokens: i32,
    segments: i32,
}

/// Addresses in the step's workspace. The forward pass has only the list of tiles of queries.
struct Scratch {
    query_list: u64,
    key_list: u64,
    /// lse (in powers of two) and delta of each query and head.
    powers: u64,
    deltas: u64,
    /// Partial gradients of k and v.
    parts: u64,
}

impl<'a> Work<'a> {
    fn of(stage: &Stage<'_>, shape: &'a AttentionShape, q: &Operand, boundaries: &Operand) -> Work<'a> {
        let segments = stage.rows(boundaries).saturating_sub(1);
        Work {
            shape,
            head: Head::of(shape.head_dim),
            tokens: stage.rows(q) as i32,
            segments: segments as i32,
        }
    }

    /// The largest possible number of tiles of `rows` tokens.
    fn tile_bound(&self, rows: usize) -> usize {
        attention_tile_bound(self.tokens as usize, self.segments as usize, rows)
    }

    /// Divides the workspace by planned sizes, so that the layout is the same for every micro-batch.
    fn scratch(&self, stage: &Stage<'_>, gradient: bool) -> Scratch {
        let Extent { tokens, segments, .. } = *stage.planned;
        let query_list =
            stage.workspace_of(attention_workspace_bytes(tokens, segments, self.shape, gradient));
        let tiles = self.head.tiles;
        let key_list = query_list + attention_list_bytes(tokens, segments, tiles.queries) as u64;
        let powers = key_list + attention_list_bytes(tokens, segments, tiles.keys) as u64;
        let deltas = powers + attention_floats_bytes(tokens, self.shape) as u64;
        let parts = deltas + attention_floats_bytes(tokens, self.shape) as u64;
        Scratch { query_list, key_list, powers, deltas, parts }
    }

    /// Whether rows of heads can be read 16 bytes at a time.
    fn is_aligned(&self, stage: &Stage<'_>, operands: &[&Operand]) -> bool {
        let element_bytes = stage.activations.bytes();
        self.shape.head_dim.is_multiple_of(8)
            && operands.iter().all(|operand| {
                stage.pointer(operand).is_multiple_of(16)
                    && (operand.stride * element_bytes).is_multiple_of(16)
            })
    }

    /// Whether the kernels on tiles can process the operands.
    fn in_tiles(&self, stage: &Stage<'_>, operands: &[&Operand]) -> bool {
        stage.activations != DType::F32 && self.is_aligned(stage, operands)
    }
}

/// Arguments of every kernel except those of Hopper: head size, window, scale and cap.
fn score_args(shape: &AttentionShape) -> [Arg; 4] {
    /// Stands for no window: larger than any segment, and small enough that sums with positions do not overflow.
    const ALL_KEYS: usize = 1 << 30;
    let window = shape.window.map_or(ALL_KEYS, |window| window.min(ALL_KEYS));
    [
        Arg::Int(shape.head_dim as i32),
        Arg::Int(window as i32),
        Arg::Float(shape.scale),
        Arg::Float(shape.softcap.unwrap_or(0.0)),
    ]
}

fn first_operands<const N: usize>(operands: &[Operand]) -> [&Operand; N] {
    std::array::from_fn(|index| &operands[index])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::gpu_generation::most_shared_bytes;

    /// The bytes follow from the definitions in the kernel files. The gradient of heads over 128 channels has no tiles before
    /// Ampere, and that of heads over 256 channels only on GPUs with more shared memory than most.
    #[test]
    fn shared_memory_is_what_the_kernels_use_and_fits_every_gpu() {
        let expected = [
            (64, 49_152, 65_536),
            (96, 73_728, 78_848),
            (128, 98_304, 99_328),
            (256, 98_304, 98_304),
            (512, 98_304, 135_680),
        ];
        let before = [
            (64, 49_152, 65_536),
            (96, 49_152, 49_152),
            (128, 65_536, 65_536),
            (256, 65_536, 98_304),
            (512, 98_304, 135_680),
        ];
        for (generation, expected) in [(Generation::Ampere, expected), (Generation::Turing, before)] {
            for (head_dim, forward, gradient) in expected {
                let head = Head::of(head_dim);
                assert_eq!(head.tiles.padded_head, head_dim);
                assert_eq!(head.forward_shared_bytes(generation), forward, "forward of {head_dim}");
                assert_eq!(head.gradient_shared_bytes(generation), gradient, "gradient of {head_dim}");
                let most = generation.most_shared_bytes();
                let is_ampere = generation == Generation::Ampere;
                assert_eq!(forward <= most, is_ampere || head_dim <= 256, "forward of {head_dim}");
                let fits = head_dim <= if is_ampere { 256 } else { 128 };
                assert_eq!(gradient <= most, fits, "gradient of {head_dim}");
                for large in [(8, 0), (9, 0), (10, 0)] {
                    assert!(
                        gradient <= most_shared_bytes(large, Generation::Ampere),
                        "gradient of {head_dim}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_head_size_has_kernels_of_a_padded_size() {
        for head_dim in 1..=MOST_CHANNELS {
            let head = Head::of(head_dim);
            assert!(head.tiles.padded_head >= head_dim);
            let kernels = [head.forward_file.kernels, head.gradient_file.kernels].concat();
            for kernel in [
                head.list_tiles,
                head.forward,
                head.forward_plain,
                head.prepare,
                head.gradient,
                head.gradient_plain,
                head.sum,
            ] {
                assert!(kernels.contains(&kernel), "`{kernel}` is in no file");
            }
        }
    }
}
