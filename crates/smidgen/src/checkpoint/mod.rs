//! Checkpoints on disk: Hugging Face model folders in, GGUF files in and out, PEFT adapters in and out.
//! Weights are read by file offset and never mapped or held whole, so a caller decides how much memory a load takes.
//! Everything a file claims is checked before it is believed, and errors carry the file, the tensor and the numbers.
//! Left out: pickled `.bin` files, and, but for the names in a GGUF file, any knowledge of architectures.

pub mod bnb;
pub mod element;
pub mod folder;
#[cfg(test)]
#[path = "../../tests/four_bit/mod.rs"]
pub(crate) mod four_bit;
pub mod gguf;
pub mod grouped_digits;
pub mod json_file;
pub mod load;
pub mod model;
pub mod peft;
pub mod safetensors;
pub mod safetensors_header;
pub mod safetensors_problem;
pub mod safetensors_write;
pub mod shard_index;
pub mod tensor_ref;
pub mod weight;
pub mod whole_file;
