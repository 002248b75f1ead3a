//! Generation: a model, perhaps with an adapter, that continues token sequences.
//!
//! `session.rs` is what others use: it plans, loads and generates. Below it, `decoder.rs` feeds tokens to a plan's
//! entry point `decode`, on any device, and `slots.rs` keeps the books of the cache; `sampler.rs` and `beam.rs` choose
//! tokens, `stop.rs` says when a text ends, `stream.rs` turns tokens into text as they come, `memory.rs` says what it
//! all takes before anything is loaded.
//! Left out: templates (`tokenizer`), the terminal (`commands`), and drafts by a smaller model.

pub mod beam;
pub mod decoder;
pub mod sampler;
pub mod session;
pub mod slots;
pub mod stop;
pub mod stream;
