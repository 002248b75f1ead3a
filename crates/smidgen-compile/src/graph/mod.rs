//! Builds the graph of a model: forward (`forward.rs`), backward (`autodiff.rs`) and the optimizer step (`update.rs`).
//!
//! `leaves.rs` adds the stored values that nodes read, `linear.rs` a linear layer with what its adapter adds, `latent.rs`
//! latent attention, `recurrent.rs` recurrent mixers, `encoder.rs` the audio encoder. Passes change the graph afterwards;
//! nothing here knows a memory choice.

pub mod autodiff;
mod encoder;
pub mod experts;
pub mod forward;
mod latent;
pub mod leaves;
mod linear;
mod recurrent;
pub mod update;
