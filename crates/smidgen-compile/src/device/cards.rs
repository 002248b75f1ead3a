//! A table of GPUs, for planning on machines that do not have them.
//!
//! Peaks are NVIDIA's dense ones: bf16 tensor cores (f16 before Ampere) with f32 sums, plain f32 units, memory bandwidth,
//! the bus one way. Our steps sustain a share of them. On the H200 the shares are measured (of 989 TFLOP/s in bf16 our
//! matmuls sustain 690; of 67 in f32, 45; of 4.8 TB/s, 3.6; of 64 GB/s of PCIe 5, 50). Other cards use the same shares for
//! memory and bus. Their shares in bf16 follow from their power limits: higher on cards with headroom, half on the L4 with
//! its 72 W. Shares of cards before Ampere are assumed: a T4 has 70 W, and a GTX 16 has f16 units but no tensor cores.
//! Memory is the driver's total, which is a little below the advertised size.

use crate::context::Overhead;
use crate::links::{self, ETHERNET_100G, NamedLink};
use crate::profile::{DeviceProfile, Rates};
use smidgen_ir::DeviceKind;

/// A GPU that plans can be made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// The name in recipes.
    pub name: &'static str,
    /// The names that drivers report, without `NVIDIA` and `GeForce`.
    pub driver_names: &'static [&'static str],
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    pub memory_mib: u64,
    /// Peak TFLOP/s in bf16, or f16 before Ampere.
    pub half_tflops: f64,
    pub f32_tflops: f64,
    pub memory_gb_per_s: f64,
    /// Peak of the bus one way.
    pub bus_gb_per_s: f64,
    /// The share of `half_tflops` that our matmuls sustain.
    pub half_share: f64,
    /// The rate of attention as a share of the rate of matmuls.
    pub attention_share: f64,
}

const F32_SHARE: f64 = 0.67;
const MEMORY_SHARE: f64 = 0.75;
const BUS_SHARE: f64 = 0.78;
/// A typical disk; the disk of another machine is unknown.
const DISK_BYTES_PER_S: f64 = 2e9;
/// The driver's context with our kernels and cuBLASLt, on an H200; `doctor` measures other cards.
pub const CONTEXT_BYTES: u64 = 536 << 20;
/// A kernel launch.
const STEP_S: f64 = 4e-6;
/// Bytes moved per element of a quantized weight: its code is read, and a plain number is written for the matmul.
const DECODED_BYTES: f64 = 2.5;

const PCIE3_X16: f64 = 15.75;
const PCIE4_X8: f64 = 16.0;
const PCIE4_X16: f64 = 32.0;
const PCIE5_X16: f64 = 64.0;

const VOLTA: (u32, u32) = (7, 0);
const TURING: (u32, u32) = (7, 5);
const ADA: (u32, u32) = (8, 9);
const GEFORCE_AMPERE: (u32, u32) = (8, 6);
const AMPERE: (u32, u32) = (8, 0);
const HOPPER: (u32, u32) = (9, 0);

/// Attention rates as a share of the matmul rate: of the kernel for all architectures, and of the one for Hopper. Without
/// asynchronous copies (Turing) it is assumed to be slower; on Volta it multiplies in f32, at a rate that was computed from
/// its instructions.
const ATTENTION: f64 = 0.55;
const HOPPER_ATTENTION: f64 = 0.6;
const TURING_ATTENTION: f64 = 0.4;
const VOLTA_ATTENTION: f64 = 0.04;

#[rustfmt::skip]
pub const CARDS: [Card; 23] = [
    card("rtx-5090", &["RTX 5090"], (12, 0), 32_100, (209.5, 104.8), 1_792.0, PCIE5_X16, 0.85),
    card("rtx-4090", &["RTX 4090", "RTX 4090 D"], ADA, 24_210, (165.2, 82.6), 1_008.0, PCIE4_X16, 0.85),
    card("rtx-4080", &["RTX 4080", "RTX 4080 SUPER"], ADA, 16_070, (97.5, 48.7), 717.0, PCIE4_X16, 0.85),
    card("rtx-4070", &["RTX 4070"], ADA, 11_990, (58.3, 29.1), 504.0, PCIE4_X16, 0.85),
    card("rtx-4060-ti-16gb", &["RTX 4060 Ti"], ADA, 16_070, (44.1, 22.1), 288.0, PCIE4_X8, 0.85),
    card("rtx-4060", &["RTX 4060"], ADA, 7_930, (30.2, 15.1), 272.0, PCIE4_X8, 0.85),
    card("rtx-3090", &["RTX 3090", "RTX 3090 Ti"], GEFORCE_AMPERE, 24_250, (71.2, 35.6), 936.0, PCIE4_X16, 0.85),
    card("rtx-3080", &["RTX 3080"], GEFORCE_AMPERE, 10_000, (59.5, 29.8), 760.0, PCIE4_X16, 0.85),
    card("rtx-3060", &["RTX 3060"], GEFORCE_AMPERE, 12_040, (25.5, 12.7), 360.0, PCIE4_X16, 0.85),
    card("rtx-3060-laptop", &["RTX 3060 Laptop GPU"], GEFORCE_AMPERE, 5_930, (21.8, 10.9), 336.0, PCIE4_X8, 0.7),
    card("l4", &["L4"], ADA, 22_480, (121.0, 30.3), 300.0, PCIE4_X16, 0.5),
    card("a10g", &["A10G"], GEFORCE_AMPERE, 22_500, (70.0, 35.0), 600.0, PCIE4_X16, 0.75),
    card("a100-40gb", &["A100-SXM4-40GB", "A100-PCIE-40GB"], AMPERE, 40_300, (312.0, 19.5), 1_555.0, PCIE4_X16, 0.75),
    card("a100-80gb", &["A100-SXM4-80GB", "A100 80GB PCIe"], AMPERE, 81_050, (312.0, 19.5), 2_039.0, PCIE4_X16, 0.75),
    card("h100", &["H100 80GB HBM3", "H100 PCIe"], HOPPER, 80_990, (989.0, 67.0), 3_350.0, PCIE5_X16, 0.67),
    card("h200", &["H200"], HOPPER, 143_150, (989.0, 67.0), 4_800.0, PCIE5_X16, 0.7),
    card("t4", &["Tesla T4", "T4"], TURING, 15_100, (65.0, 8.1), 320.0, PCIE3_X16, 0.4),
    card("rtx-2080-ti", &["RTX 2080 Ti"], TURING, 11_010, (53.8, 13.4), 616.0, PCIE3_X16, 0.75),
    card("rtx-2070", &["RTX 2070", "RTX 2070 SUPER"], TURING, 7_970, (29.9, 7.5), 448.0, PCIE3_X16, 0.75),
    card("rtx-2060", &["RTX 2060"], TURING, 5_930, (25.8, 6.5), 336.0, PCIE3_X16, 0.75),
    card("gtx-1660", &["GTX 1660", "GTX 1660 SUPER", "GTX 1660 Ti"], TURING, 5_930, (10.0, 5.0), 192.0, PCIE3_X16, 0.5),
    card("v100-16gb", &["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB"], VOLTA, 16_150, (125.0, 15.7), 900.0, PCIE3_X16, 0.7),
    card("v100-32gb", &["Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"], VOLTA, 32_500, (125.0, 15.7), 900.0, PCIE3_X16, 0.7),
];

#[allow(clippy::too_many_arguments, reason = "a row of the table")]
const fn card(
    name: &'static str,
    driver_names: &'static [&'static str],
    capability: (u32, u32),
    memory_mib: u64,
    (half_tflops, f32_tflops): (f64, f64),
    memory_gb_per_s: f64,
    bus_gb_per_s: f64,
    half_share: f64,
) -> Card {
    let attention_share = match capability {
        HOPPER => HOPPER_ATTENTION,
        TURING => TURING_ATTENTION,
        VOLTA => VOLTA_ATTENTION,
        _ => ATTENTION,
    };
    Card {
        name,
        driver_names,
        capability,
        memory_mib,
        half_tflops,
        f32_tflops,
        memory_gb_per_s,
        bus_gb_per_s,
        half_share,
        attention_share,
    }
}

impl Card {
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib << 20
    }

    /// Whether the shares of its peaks were measured on one, and not taken from the H200.
    pub fn is_measured(&self) -> bool {
        self.name == "h200"
    }

    /// Host memory traffic of updates on a typical machine with this card.
    fn update_bytes_per_s(&self) -> f64 {
        match self.name {
            "a100-40gb" | "a100-80gb" | "h100" | "h200" => 100e9,
            _ => 40e9,
        }
    }

    /// The link between cards of one machine: NVLink for data center cards, the bus for all others.
    pub fn peers(&self) -> NamedLink {
        match (self.name, self.bus_gb_per_s) {
            ("h100" | "h200", _) => links::NVLINK4,
            ("a100-40gb" | "a100-80gb", _) => links::NVLINK3,
            (_, PCIE5_X16) => links::PCIE5,
            (_, PCIE4_X8) => links::PCIE4_X8,
            (_, PCIE3_X16) => links::PCIE3,
            _ => links::PCIE4,
        }
    }

    pub fn profile(&self) -> DeviceProfile {
        let bytes_per_s = MEMORY_SHARE * 1e9 * self.memory_gb_per_s;
        let rates = |product: f64, attention: f64| Rates {
            matmul_flops_per_s: product,
            bf16_matmul_flops_per_s: product,
            // Matmuls with thin results are bound by memory anyway.
            weight_gradient_flops_per_s: product,
            attention_flops_per_s: attention,
            bytes_per_s,
            step_s: STEP_S,
            plain_operand_s: 0.0,
            coded_operand_s: DECODED_BYTES / bytes_per_s,
        };
        let half = self.half_share * 1e12 * self.half_tflops;
        let full = F32_SHARE * 1e12 * self.f32_tflops;
        let bus_bytes_per_s = BUS_SHARE * 1e9 * self.bus_gb_per_s;
        DeviceProfile {
            name: self.name.to_owned(),
            device: DeviceKind::Cuda,
            memory_bytes: Some(self.memory_bytes()),
            overhead: Overhead::cuda(CONTEXT_BYTES),
            f32: rates(full, self.attention_share * full),
            half: rates(half, self.attention_share * half),
            fetch_bytes_per_s: bus_bytes_per_s,
            stow_bytes_per_s: bus_bytes_per_s,
            disk_bytes_per_s: DISK_BYTES_PER_S,
            update_bytes_per_s: self.update_bytes_per_s(),
            transfer_s_per_byte: 0.0,
            peers: self.peers().link(),
            network: ETHERNET_100G.link(),
        }
    }
}

/// The card with this name in recipes.
pub fn find(name: &str) -> Option<&'static Card> {
    CARDS.iter().find(|card| card.name == name)
}

/// The card for which a driver reports this name.
pub fn find_by_driver(driver_name: &str) -> Option<&'static Card> {
    let short = driver_name.replace("NVIDIA ", "").replace("GeForce ", "");
    CARDS.iter().find(|card| card.driver_names.contains(&short.as_str()))
}

/// The card for which a driver reports this name, or else the most similar one: nearest in generation, then in memory.
pub fn most_like(driver_name: &str, capability: (u32, u32), memory_bytes: u64) -> &'static Card {
    find_by_driver(driver_name).unwrap_or_else(|| {
        let distance = |card: &Card| {
            let (major, minor) = card.capability;
            let generation = 10.0 * (f64::from(major) - f64::from(capability.0)).abs()
                + (f64::from(minor) - f64::from(capability.1)).abs();
            let memory = (card.memory_bytes() as f64 / memory_bytes.max(1) as f64).ln().abs();
            generation + memory
        };
        CARDS.iter().min_by(|one, other| distance(one).total_cmp(&distance(other))).expect("there are cards")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_is_found_by_both_its_names() {
        for card in &CARDS {
            assert_eq!(find(card.name).map(|found| found.name), Some(card.name));
            for driver_name in card.driver_names {
                for prefix in ["NVIDIA ", "NVIDIA GeForce "] {
                    let found = most_like(&format!("{prefix}{driver_name}"), (0, 0), 1);
                    assert_eq!(found.name, card.name);
                }
            }
        }
        assert_eq!(find("rtx-1"), None);
    }

    #[test]
    fn an_unknown_card_is_taken_for_one_of_its_generation_and_size() {
        let like = |capability, gib: u64| most_like("NVIDIA Something", capability, gib << 30).name;
        assert_eq!(like((9, 0), 94), "h100");
        assert_eq!(like((9, 0), 130), "h200");
        assert_eq!(like((8, 9), 8), "rtx-4060");
        assert_eq!(like((8, 6), 6), "rtx-3060-laptop");
        assert_eq!(like((8, 0), 40), "a100-40gb");
        assert_eq!(like((12, 0), 16), "rtx-5090");
        assert_eq!([like((7, 5), 4), like((7, 5), 24), like((7, 0), 12)], ["rtx-2060", "t4", "v100-16gb"]);
    }

    #[test]
    fn the_h200_is_what_was_measured_on_one() {
        let profile = find("h200").unwrap().profile();
        let near = |value: f64, measured: f64| (value / measured - 1.0).abs() < 0.01;
        assert!(near(profile.half.matmul_flops_per_s, 690e12));
        assert!(near(profile.f32.matmul_flops_per_s, 45e12));
        assert!(near(profile.half.bytes_per_s, 3.6e12));
        assert!(near(profile.fetch_bytes_per_s, 50e9));
    }
}
