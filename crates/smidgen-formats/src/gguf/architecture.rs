//! The supported model architectures of GGUF files, by their names in `general.architecture`.
//! `tensor_names` has the tensors of each architecture, `model` has its metadata keys.
//! Left out: all other architectures; their files are refused with the name.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Also the name in files of Mistral and SmolLM2.
    Llama,
    Qwen2,
    Qwen3,
    Phi3,
    Gemma2,
    Gemma3,
}

impl Architecture {
    pub const ALL: [Architecture; 6] = [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Phi3,
        Architecture::Gemma2,
        Architecture::Gemma3,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Phi3 => "phi3",
            Architecture::Gemma2 => "gemma2",
            Architecture::Gemma3 => "gemma3",
        }
    }
}
