//! Generation: a model, with or without an adapter, continues token sequences.
//!
//! `session.rs` is the interface: it plans, loads and generates. Below it, `decoder.rs` feeds tokens to a plan's
//! entry point `decode`, and `slots.rs` manages the rows of the KV cache; `sampler.rs` and `beam.rs` choose tokens,
//! `stop.rs` finds the stop tokens, `stops.rs` texts that end an answer, and `stream.rs` turns tokens into text.
//! Left out: chat templates, the terminal (`commands`), and speculative decoding.

pub mod batch;
pub mod beam;
pub mod decoder;
pub mod sampler;
pub mod session;
pub mod slots;
pub mod stop;
pub mod stops;
pub mod stream;
