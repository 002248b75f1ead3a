//! Published checkpoints of each supported `model_type`, for documents and hints, and what is left out of them.
//!
//! Each `model_type` of the lists in `mod.rs` has a row here. Nothing is decided by these names.

use super::supported;

#[derive(Clone, Copy, Debug)]
pub struct Checkpoints {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Names on the Hugging Face hub.
    pub names: &'static [&'static str],
    /// What the checkpoints have, and this version does not train or read.
    pub left_out: &'static str,
}

const TOWER: &str = "images: towers stay as stored, text is trained";
const TOWERS: &str = "images and sound: towers stay as stored, text is trained";
const MTP: &str = "layers that predict further tokens stay as stored";
const TOWER_AND_MTP: &str =
    "images: towers and layers that predict further tokens stay as stored, text is trained";
const DROPOUT: &str = "dropout of the base model";

#[rustfmt::skip]
const CHECKPOINTS: &[Checkpoints] = &[
    row("llama", &["meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"], ""),
    row("qwen2", &["Qwen/Qwen2-7B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-7B"], ""),
    row("qwen3", &["Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"], ""),
    row("qwen3_5_text", &["the text model of Qwen/Qwen3.5-9B"], MTP),
    row("qwen3_5_moe_text", &["the text model of Qwen/Qwen3.5-35B-A3B"], MTP),
    row("qwen3_next", &["Qwen/Qwen3-Next-80B-A3B-Instruct"], MTP),
    row("mistral", &["mistralai/Mistral-7B-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"], ""),
    row("phi3", &["microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-3.5-mini-instruct", "microsoft/phi-4", "microsoft/Phi-4-mini-instruct"], ""),
    row("phi4_multimodal", &["microsoft/Phi-4-multimodal-instruct, converted"], "images"),
    row("phi4mm", &["microsoft/Phi-4-multimodal-instruct"], "images"),
    row("gemma", &["google/gemma-2b", "google/gemma-7b"], ""),
    row("gemma2", &["google/gemma-2-2b", "google/gemma-2-9b-it"], ""),
    row("gemma3_text", &["google/gemma-3-270m", "google/gemma-3-1b-it"], ""),
    row("smollm3", &["HuggingFaceTB/SmolLM3-3B"], ""),
    row("granite", &["ibm-granite/granite-3.0-8b-base", "ibm-granite/granite-3.3-8b-instruct"], ""),
    row("granitemoehybrid", &["ibm-granite/granite-4.0-h-micro", "ibm-granite/granite-4.0-h-350m", "ibm-granite/granite-4.0-h-1b", "ibm-granite/granite-4.0-h-tiny"], ""),
    row("lfm2", &["LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-2.6B"], ""),
    row("lfm2_moe", &["LiquidAI/LFM2-8B-A1B", "LiquidAI/LFM2-24B-A2B"], ""),
    row("falcon_h1", &["tiiuae/Falcon-H1-0.5B-Instruct", "tiiuae/Falcon-H1-1.5B-Deep-Instruct", "tiiuae/Falcon-H1-34B-Instruct"], "adapters on `mamba.out_proj`, which PEFT refuses"),
    row("olmo2", &["allenai/OLMo-2-1124-7B"], ""),
    row("olmo3", &["allenai/Olmo-3-7B-Instruct"], ""),
    row("olmo_hybrid", &["allenai/Olmo-Hybrid-7B"], ""),
    row("glm4", &["zai-org/GLM-4-9B-0414", "zai-org/GLM-4-32B-0414"], ""),
    row("cohere2", &["CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"], ""),
    row("ministral3", &["the text model of mistralai/Ministral-3-8B-Base-2512"], ""),
    row("gemma4_text", &["the text model of google/gemma-4-26B-A4B-it"], ""),
    row("gemma4_unified_text", &["the text model of google/gemma-4-12B-it"], ""),
    row("muse_glimmer_text", &["the text model of meta-models/Muse-Glimmer-30B"], ""),
    row("seed_oss", &["ByteDance-Seed/Seed-OSS-36B-Instruct"], DROPOUT),
    row("qwen3_moe", &["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"], ""),
    row("qwen2_moe", &["Qwen/Qwen1.5-MoE-A2.7B", "Qwen/Qwen2-57B-A14B"], ""),
    row("mixtral", &["mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"], ""),
    row("olmoe", &["allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125-Instruct"], ""),
    row("granitemoe", &["ibm-granite/granite-3.1-1b-a400m-instruct", "ibm-granite/granite-3.1-3b-a800m-base"], ""),
    row("gpt_oss", &["openai/gpt-oss-20b", "openai/gpt-oss-120b"], ""),
    row("glm4_moe", &["zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"], "layers that predict further tokens"),
    row("minimax_m2", &["MiniMaxAI/MiniMax-M2, converted to bf16"], ""),
    row("deepseek_v2", &["deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Chat"], ""),
    row("deepseek_v3", &["moonshotai/Moonlight-16B-A3B", "deepseek-ai/DeepSeek-V3 and R1, converted to bf16"], "layers that predict further tokens"),
    row("glm4_moe_lite", &["zai-org/GLM-4.7-Flash"], "layers that predict further tokens"),
    row("mistral4", &["the text model of mistralai/Mistral-Small-4-119B-2603, converted to bf16"], ""),
    row("gemma3", &["google/gemma-3-4b-it", "google/gemma-3-27b-it"], TOWER),
    row("gemma4", &["google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it"], TOWERS),
    row("gemma4_unified", &["google/gemma-4-12B-it"], TOWERS),
    row("mistral3", &["mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistralai/Ministral-3-8B-Base-2512"], TOWER),
    row("muse_glimmer", &["meta-models/Muse-Glimmer-30B"], TOWER),
    row("qwen3_5", &["Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B"], TOWER_AND_MTP),
    row("qwen3_5_moe", &["Qwen/Qwen3.5-35B-A3B"], TOWER_AND_MTP),
];

const fn row(
    model_type: &'static str,
    names: &'static [&'static str],
    left_out: &'static str,
) -> Checkpoints {
    Checkpoints { model_type, names, left_out }
}

/// The checkpoints of every supported `model_type`, in the order of [`supported`].
pub fn checkpoints() -> Vec<&'static Checkpoints> {
    let of = |model_type: &str| {
        let row = CHECKPOINTS.iter().find(|row| row.model_type == model_type);
        row.unwrap_or_else(|| panic!("`{model_type}` has no row of checkpoints"))
    };
    supported().into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_type_has_one_row() {
        assert_eq!(checkpoints().len(), CHECKPOINTS.len());
    }
}
