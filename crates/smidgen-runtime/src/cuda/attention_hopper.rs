//! The attention kernels of Hopper GPUs: their files, which shapes they support, and their shared memory.
//!
//! Warpgroup matrix instructions (wgmma) exist only on compute capability 9.0, and code that uses them is compiled for
//! `sm_90a`. These kernels support head sizes up to 128 without window and softcap, padded to 64 or 128. `attention.rs`
//! launches them in place of its own, with the same lists of tiles, preparation and partial sums. The choice depends
//! only on the plan and the GPU.

use super::modules::KernelFile;
use super::stage::Stage;
use smidgen_ir::{AttentionShape, Extent};

/// A forward and a backward file per padded head size.
pub const FILES: [KernelFile; 4] =
    [HEADS[0].forward_file, HEADS[0].gradient_file, HEADS[1].forward_file, HEADS[1].gradient_file];

/// The files that an attention shape may use.
pub fn files(shape: &AttentionShape) -> Vec<KernelFile> {
    // The planned extent is not known here. An empty extent makes every window large enough, so no file is missing
    // later.
    let head = HopperHead::by_shape(shape, &Extent::default());
    head.map_or_else(Vec::new, |head| vec![head.forward_file, head.gradient_file])
}

/// Threads of a block: one warpgroup copies, two multiply.
pub const THREADS: u32 = 384;
/// Queries or keys of a work item, which one block processes at a time.
pub const ITEM_ROWS: usize = 128;

/// The kernels of one padded head size.
pub struct HopperHead {
    padded: usize,
    pub forward: &'static str,
    pub gradient: &'static str,
    forward_file: KernelFile,
    gradient_file: KernelFile,
}

macro_rules! head {
    ($padded:literal) => {
        HopperHead {
            padded: $padded,
            forward: concat!("attention_hopper_", $padded),
            gradient: concat!("attention_grad_hopper_", $padded),
            forward_file: KernelFile {
                name: concat!("attention_hopper_", $padded),
                source: concat!(
                    "#define HEAD ",
                    $padded,
                    "\n",
                    include_str!("../../kernels/matrix_unit.cuh"),
                    include_str!("../../kernels/warpgroup_unit.cuh"),
                    include_str!("../../kernels/attention_tiles.cuh"),
                    include_str!("../../kernels/attention_hopper.cuh"),
                    include_str!("../../kernels/attention_hopper.cu")
                ),
                kernels: &[concat!("attention_hopper_", $padded)],
            },
            gradient_file: KernelFile {
                name: concat!("attention_hopper_grad_", $padded),
                source: concat!(
                    "#define HEAD ",
                    $padded,
                    "\n",
                    include_str!("../../kernels/matrix_unit.cuh"),
                    include_str!("../../kernels/warpgroup_unit.cuh"),
                    include_str!("../../kernels/attention_tiles.cuh"),
                    include_str!("../../kernels/attention_hopper.cuh"),
                    include_str!("../../kernels/attention_hopper_grad.cu")
                ),
                kernels: &[concat!("attention_grad_hopper_", $padded)],
            },
        }
    };
}

const HEADS: [HopperHead; 2] = [head!(64), head!(128)];

/// Slots of the ring buffer of tiles.
const SLOTS: usize = 4;
/// Barriers of the ring and of the resident tile, and two items.
const CONTROL_BYTES: usize = 16 + 2 * 8 * SLOTS + 2 * 32;

impl HopperHead {
    /// The kernels for an attention shape with rows aligned to 16 bytes, if this GPU has them.
    pub fn of(stage: &Stage<'_>, shape: &AttentionShape) -> Option<&'static HopperHead> {
        if stage.has_hopper_kernels() { HopperHead::by_shape(shape, stage.planned) } else { None }
    }

    fn by_shape(shape: &AttentionShape, planned: &Extent) -> Option<&'static HopperHead> {
        static ALL: [HopperHead; 2] = HEADS;
        let sees_all = shape.window.is_none_or(|window| window >= planned.tokens);
        if !sees_all || shape.softcap.is_some() {
            return None;
        }
        ALL.iter().find(|head| shape.head_dim <= head.padded)
    }

    /// A row of a tile in shared memory: 16-bit elements.
    const fn row_bytes(&self) -> usize {
        2 * self.padded
    }

    /// Shared memory for queries, a ring buffer of keys and values, and a buffer for the result.
    pub const fn forward_shared_bytes(&self) -> u32 {
        (self.row_bytes() * ITEM_ROWS * (2 + SLOTS) + CONTROL_BYTES) as u32
    }

    /// Shared memory for two resident tiles, a ring buffer of pairs of tiles of 64 rows with two floats per row, and a
    /// buffer for the result.
    pub const fn gradient_shared_bytes(&self) -> u32 {
        (self.row_bytes() * ITEM_ROWS * (3 + SLOTS) + SLOTS * 2 * 64 * 4 + CONTROL_BYTES) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        heads: 8,
        kv_heads: 2,
        head_dim: 128,
        scale: 1.0,
        window: None,
        softcap: None,
        sinks: false,
    };

    /// The bytes follow from the definitions in the kernel files; a block may use 227 KiB.
    #[test]
    fn shared_memory_is_what_the_kernels_use_and_fits() {
        let bytes = HEADS.map(|head| (head.forward_shared_bytes(), head.gradient_shared_bytes()));
        assert_eq!(bytes, [(98_448, 116_880), (196_752, 231_568)]);
        assert!(bytes[1].1 <= 227 << 10);
    }

    #[test]
    fn windows_that_hide_something_and_caps_and_large_heads_use_the_kernels_for_all_gpus() {
        let planned = Extent { tokens: 2048, ..Extent::default() };
        let has = |shape: AttentionShape| HopperHead::by_shape(&shape, &planned).is_some();
        assert!(has(SHAPE) && !has(AttentionShape { head_dim: 256, ..SHAPE }));
        let padded =
            |head_dim| HopperHead::by_shape(&AttentionShape { head_dim, ..SHAPE }, &planned).unwrap().padded;
        assert_eq!([64, 40, 72, 96, 128].map(padded), [64, 64, 128, 128, 128]);
        assert!(has(AttentionShape { window: Some(2048), ..SHAPE }));
        assert!(!has(AttentionShape { window: Some(2047), ..SHAPE }));
        assert!(!has(AttentionShape { softcap: Some(30.0), ..SHAPE }));
    }
}
