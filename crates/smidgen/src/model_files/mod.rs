//! Files of models, read and written without a device: for merges, exports and the model of a run.
//!
//! `original.rs` reads the tensors of a base as f32 or byte for byte, `shards.rs` assigns tensors to files, and
//! `sidecar.rs` writes config and tokenizer.
//! Left out: what is written: merged weights (`merge/`), GGUF (`export/`), trained weights (`run_folder/`).

pub mod finite;
pub mod numbers;
pub mod original;
pub mod output;
pub mod shards;
pub mod sidecar;
