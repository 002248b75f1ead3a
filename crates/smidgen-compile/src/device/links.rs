//! Links between ranks, by name: one table.
//!
//! Peaks are one way, as stated by the makers. An exchange sustains a share of them: NCCL's published figures for large
//! messages are near 0.8 of NVLink and 0.85 of a network card. GPUs that cannot access each other's memory pass everything
//! through the host, which uses the bus twice. A ring of ranks is as fast as its slowest link, so ranks on several machines
//! exchange at the speed of the network.

/// The speed of a link between two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes per second in each direction at the same time.
    pub bytes_per_s: f64,
    /// The least time of an exchange, per other rank.
    pub latency_s: f64,
}

impl Link {
    /// The speed of an exchange that passes both links.
    pub fn slower(self, other: Link) -> Link {
        Link {
            bytes_per_s: self.bytes_per_s.min(other.bytes_per_s),
            latency_s: self.latency_s.max(other.latency_s),
        }
    }
}

/// A link that has a name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedLink {
    pub name: &'static str,
    /// Peak in GB/s one way.
    pub peak_gb_per_s: f64,
    /// The share of the peak that exchanges sustain.
    pub share: f64,
    pub latency_s: f64,
}

impl NamedLink {
    pub const fn link(&self) -> Link {
        Link { bytes_per_s: self.share * 1e9 * self.peak_gb_per_s, latency_s: self.latency_s }
    }
}

const fn row(name: &'static str, peak_gb_per_s: f64, share: f64, latency_s: f64) -> NamedLink {
    NamedLink { name, peak_gb_per_s, share, latency_s }
}

const NVLINK_S: f64 = 3e-6;
const HOST_S: f64 = 10e-6;
const NETWORK_S: f64 = 15e-6;

pub const NVLINK4: NamedLink = row("nvlink-4", 450.0, 0.8, NVLINK_S);
pub const NVLINK3: NamedLink = row("nvlink-3", 300.0, 0.8, NVLINK_S);
pub const PCIE5: NamedLink = row("pcie-5", 64.0, 0.4, HOST_S);
pub const PCIE4: NamedLink = row("pcie-4", 32.0, 0.4, HOST_S);
pub const PCIE4_X8: NamedLink = row("pcie-4-x8", 16.0, 0.4, HOST_S);
pub const PCIE3: NamedLink = row("pcie-3", 15.75, 0.4, HOST_S);
/// Processes on one machine that exchange by MPI: the cores that compute also copy and add the bytes.
pub const SHARED_MEMORY: NamedLink = row("shared-memory", 4.0, 0.5, HOST_S);
pub const ETHERNET_100G: NamedLink = row("ethernet-100g", 12.5, 0.85, NETWORK_S);

pub const LINKS: [NamedLink; 11] = [
    NVLINK4,
    NVLINK3,
    PCIE5,
    PCIE4,
    PCIE4_X8,
    PCIE3,
    SHARED_MEMORY,
    row("ethernet-25g", 3.125, 0.85, NETWORK_S),
    ETHERNET_100G,
    row("ethernet-200g", 25.0, 0.85, NETWORK_S),
    row("ethernet-400g", 50.0, 0.85, NETWORK_S),
];

/// The link with this name.
pub fn find(name: &str) -> Option<&'static NamedLink> {
    LINKS.iter().find(|link| link.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_is_found_and_a_ring_is_as_fast_as_its_slowest() {
        for link in &LINKS {
            assert_eq!(find(link.name), Some(link));
        }
        assert_eq!(find("carrier-pigeon"), None);
        let both = NVLINK4.link().slower(ETHERNET_100G.link());
        assert_eq!(both, ETHERNET_100G.link());
    }
}
