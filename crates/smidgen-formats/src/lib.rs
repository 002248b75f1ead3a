//! Reads and writes files: Hugging Face model folders and GGUF files, PEFT adapters, tokenizers and chat templates.
//!
//! Weights are read by file offset and are never memory-mapped or held in full, so the caller decides how
//! much memory a load takes.
//! Everything in a file is checked before it is used, and errors name the file, the tensor and the numbers.
//! Files are written completely or not at all.
//! Left out: recipes, plans and devices, which this crate does not know, and pickled `.bin` files.

#![forbid(unsafe_code)]

pub mod at_once;
pub mod audio;
pub mod bnb;
pub mod content_hash;
pub mod copy_files;
pub mod digest;
pub mod element;
pub mod encode;
mod exact_writer;
pub mod experts;
pub mod finite;
pub mod folder;
pub mod folder_files;
#[cfg(test)]
#[path = "../tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
pub mod fp8;
pub mod gguf;
pub mod json_file;
pub mod links;
pub mod load;
pub mod model;
pub mod open_file;
pub mod packed;
pub mod peft;
pub mod phi4mm;
pub mod quantization_claim;
pub mod safetensors;
pub mod shard_index;
mod some_of;
pub mod tensor_ref;
pub mod text_names;
pub mod tokenizer;
pub mod weight;
pub mod whole_file;
