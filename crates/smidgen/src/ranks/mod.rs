//! Ranks: several processes, one per device, that train together.
//!
//! `launch` reads from the environment which rank this process is, `spawn` starts the ranks of one machine, and `link`
//! is the control connection between them: rendezvous, agreement, small results, heartbeat and abort.
//! Left out: tensors, which are sent by the collectives of `smidgen-runtime`.

pub mod follow;
pub mod heartbeat;
pub mod join;
pub mod launch;
pub mod link;
#[cfg(test)]
mod link_tests;
pub mod node_list;
pub mod rendezvous;
pub mod shared_memory;
pub mod spawn;
#[cfg(test)]
mod spawn_tests;
pub mod standstill;
pub mod team;
pub mod wire;
