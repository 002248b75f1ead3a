//! Families of models: the `model_type` that a model's name shows.
//!
//! A name shows the family in most cases, so an import can say at once that a model will not load, long before its
//! `config.json` is there. The first row with a matching part decides: exceptions stand above their family.
//! Which of the model types load is asked of the caller, who knows the compiler; a test of `smidgen` fails if one that
//! loads has no row. A name that matches no row is not judged here; loading it does that.

/// What a family is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Language models with this `model_type` in `config.json`.
    Type(&'static str),
    /// A form of weights that is not loaded, or models of several types, none of which loads.
    Unloaded,
    /// They read or make something other than text, or do not continue it.
    NotText,
}

#[derive(Debug)]
pub struct Family {
    /// Parts of a name in lower case, with `-` for `_`. `^` stands for the beginning, `*` for any text.
    parts: &'static [&'static str],
    pub name: &'static str,
    pub kind: Kind,
}

const fn family(parts: &'static [&'static str], name: &'static str, kind: Kind) -> Family {
    Family { parts, name, kind }
}

use Kind::{NotText, Type, Unloaded};

#[rustfmt::skip]
pub const FAMILIES: &[Family] = &[
    family(&["whisper", "wav2vec"], "speech recognition", NotText),
    family(&["embedding", "minilm", "^bge-", "^gte-", "^e5-", "-e5-", "sentence-t5"], "embedding", NotText),
    family(&["bert", "electra-", "^xlnet"], "encoder", NotText),
    family(&["stable-diffusion", "sdxl", "flux.1", "^flux-", "controlnet"], "image", NotText),
    family(&["-gptq", "-awq", "-aqlm", "-exl2", "-hqq", "nvfp4", "mxfp4"], "GPTQ, AWQ, AQLM, HQQ or FP4", Unloaded),
    family(&["phi-4-multimodal*-hf", "phi4-multimodal"], "Phi-4-multimodal", Type("phi4_multimodal")),
    family(&["phi-4-multimodal", "phi4mm"], "Phi-4-multimodal", Type("phi4mm")),
    family(&["-vl-", "-vl2", "vision", "llava", "pixtral", "internvl", "smolvlm", "idefics", "paligemma", "minicpm-v", "molmo",
             "-ocr", "ocr-", "glm-4.6v", "glm-4.5v", "glm-4v", "mossvl", "moss-vl", "florence"],
        "vision", NotText),
    family(&["voxtral", "-omni", "qwen2-audio", "csm-1b", "tts-", "ultravox"], "audio", NotText),
    // Distilled models have the architecture of the smaller one.
    family(&["deepseek-r1-distill-qwen", "deepseek-r1-qwen"], "Qwen 2", Type("qwen2")),
    family(&["deepseek-r1-distill-llama"], "Llama", Type("llama")),
    family(&["deepseek-r1-0528-qwen3"], "Qwen 3", Type("qwen3")),
    family(&["deepseek-v4"], "DeepSeek V4", Type("deepseek_v4")),
    family(&["deepseek-v3.2"], "DeepSeek V3.2", Type("deepseek_v32")),
    family(&["deepseek-v3", "deepseek-r1"], "DeepSeek V3 and R1", Type("deepseek_v3")),
    family(&["deepseek-v2", "deepseek-coder-v2"], "DeepSeek V2", Type("deepseek_v2")),
    family(&["deepseek-moe"], "DeepSeek MoE", Type("deepseek")),
    family(&["deepseek"], "Llama", Type("llama")),
    family(&["llama-3.1-nemotron-nano", "llama-3.1-nemotron-70b", "openreasoning-nemotron"], "Llama", Type("llama")),
    family(&["llama*nemotron-51b", "llama*nemotron-super", "llama*nemotron-ultra"], "Nemotron NAS", Type("nemotron-nas")),
    family(&["nemotron-h-", "nemotron-nano-9b", "nemotron-nano-12b", "nemotron-3-", "nemotron-cascade-2"],
        "Nemotron H", Type("nemotron_h")),
    family(&["nemotron", "minitron"], "Nemotron", Type("nemotron")),
    family(&["llama-4", "llama4"], "Llama 4", Type("llama4")),
    family(&["qwen3-next", "qwen3-coder-next"], "Qwen 3 Next", Type("qwen3_next")),
    family(&["qwen3-5-moe-text"], "Qwen 3.5 MoE without towers", Type("qwen3_5_moe_text")),
    family(&["qwen3.5*-a3b", "qwen3.5*-a10b", "qwen3.5*-a17b", "qwen3.6*-a3b", "qwen3-5-moe"],
        "Qwen 3.5 MoE", Type("qwen3_5_moe")),
    family(&["qwen3-5-text"], "Qwen 3.5 without towers", Type("qwen3_5_text")),
    family(&["qwen3.5", "qwen3.6", "qwen-3.5", "qwen3-5"], "Qwen 3.5", Type("qwen3_5")),
    family(&["qwen3*-a3b", "qwen3*-a22b", "qwen3*-a35b", "qwen3-moe"], "Qwen 3 MoE", Type("qwen3_moe")),
    family(&["qwen3"], "Qwen 3", Type("qwen3")),
    family(&["qwen*-a14b", "qwen*-a2.7b", "qwen2-moe"], "Qwen 2 MoE", Type("qwen2_moe")),
    family(&["qwen2", "qwen1.5", "codeqwen", "qwq-"], "Qwen 2", Type("qwen2")),
    family(&["qwen-7b", "qwen-14b", "qwen-72b", "qwen-1-8b", "qwen-1.8b"], "Qwen (first version)", Type("qwen")),
    family(&["recurrentgemma"], "RecurrentGemma", Type("recurrent_gemma")),
    family(&["t5gemma"], "T5Gemma", Type("t5gemma")),
    family(&["gemma-3n", "gemma3n"], "Gemma 3n", Type("gemma3n")),
    family(&["gemma-4*-a4b"], "Gemma 4 MoE", Unloaded),
    family(&["gemma4-unified-text"], "Gemma 4 without towers", Type("gemma4_unified_text")),
    family(&["gemma4-unified"], "Gemma 4", Type("gemma4_unified")),
    family(&["gemma4-text"], "Gemma 4 without towers", Type("gemma4_text")),
    family(&["gemma-4", "gemma4"], "Gemma 4", Type("gemma4")),
    family(&["gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "medgemma", "translategemma"], "Gemma 3 with vision", Type("gemma3")),
    family(&["gemma-3-", "gemma3", "functiongemma"], "Gemma 3", Type("gemma3_text")),
    family(&["gemma-2-", "gemma2"], "Gemma 2", Type("gemma2")),
    family(&["gemma"], "Gemma (first version)", Type("gemma")),
    family(&["phi-3-small"], "Phi-3 small", Type("phi3small")),
    family(&["phi-3.5-moe", "phimoe", "phi-mini-moe", "phi-tiny-moe"], "Phi-3.5 MoE", Type("phimoe")),
    family(&["phi-4-mini-flash"], "Phi-4 flash", Type("phi4flash")),
    family(&["phi-3", "phi-4", "phi3", "phi4"], "Phi-3 and Phi-4", Type("phi3")),
    family(&["phi-1", "phi-2", "phi1", "phi2"], "Phi-1 and Phi-2", Type("phi")),
    family(&["8x7b", "8x22b", "mixtral"], "Mixtral", Type("mixtral")),
    family(&["mistral-small-4", "mistral4"], "Mistral Small 4", Type("mistral4")),
    family(&["mistral-large-3"], "Mistral Large 3", Unloaded),
    family(&["ministral3"], "Ministral 3 without vision", Type("ministral3")),
    family(&["ministral-3-", "mistral-small-3.1", "mistral-small-3.2", "mistral-medium-3", "mistral3",
             "magistral-small-2509", "devstral-small-2-", "-24b-instruct-2503", "-24b-instruct-2506", "-24b-base-2503"],
        "Mistral 3 with vision", Type("mistral3")),
    family(&["devstral-2-"], "Ministral 3 without vision", Type("ministral3")),
    family(&["falcon-mamba"], "Falcon Mamba", Type("falcon_mamba")),
    family(&["codestral-mamba"], "Mamba 2", Type("mamba2")),
    family(&["mamba"], "Mamba", Type("mamba")),
    family(&["mistral", "ministral", "magistral", "devstral", "codestral", "zephyr-7b"], "Mistral", Type("mistral")),
    family(&["falcon-h1"], "Falcon H1", Type("falcon_h1")),
    family(&["falcon3", "falcon-3"], "Llama", Type("llama")),
    family(&["falcon"], "Falcon", Type("falcon")),
    family(&["glm-5"], "GLM 5", Type("glm_moe_dsa")),
    family(&["glm-4.7-flash"], "GLM 4.7 Flash", Type("glm4_moe_lite")),
    family(&["glm-4.5", "glm-4.6", "glm-4.7", "glm4-moe"], "GLM 4.5 to 4.7", Type("glm4_moe")),
    family(&["glm-4-9b-chat-hf", "glm-4-9b-hf", "glm-edge", "glm-4-9b-chat-1m-hf"], "GLM", Type("glm")),
    family(&["chatglm", "codegeex", "glm-4-9b-chat", "glm-10b"], "ChatGLM", Type("chatglm")),
    family(&["glm-4", "glm-z1", "glm4"], "GLM 4", Type("glm4")),
    family(&["gpt-oss"], "gpt-oss", Type("gpt_oss")),
    family(&["gpt-j"], "GPT-J", Type("gptj")),
    family(&["pythia", "gpt-neox", "redpajama-incite", "dolly-v2"], "GPT-NeoX", Type("gpt_neox")),
    family(&["gpt-neo"], "GPT-Neo", Type("gpt_neo")),
    family(&["gpt2", "cerebras-gpt", "btlm", "distilgpt"], "GPT-2", Type("gpt2")),
    family(&["^mpt-"], "MPT", Type("mpt")),
    family(&["^opt-"], "OPT", Type("opt")),
    family(&["bloom"], "BLOOM", Type("bloom")),
    family(&["stablelm", "stable-code"], "StableLM", Type("stablelm")),
    family(&["starcoder2"], "StarCoder 2", Type("starcoder2")),
    family(&["starcoder", "santacoder"], "StarCoder", Type("gpt_bigcode")),
    family(&["codegen"], "CodeGen", Type("codegen")),
    family(&["replit-code"], "Replit", Type("mpt")),
    family(&["jamba"], "Jamba", Type("jamba")),
    family(&["rwkv"], "RWKV", Type("rwkv")),
    family(&["dbrx"], "DBRX", Type("dbrx")),
    family(&["granite-4", "granitemoehybrid"], "Granite 4", Type("granitemoehybrid")),
    family(&["granite*-a400m", "granite*-a800m", "granitemoe"], "Granite 3 MoE", Type("granitemoe")),
    family(&["granite-3b-code", "granite-8b-code"], "Llama", Type("llama")),
    family(&["granite"], "Granite", Type("granite")),
    family(&["olmoe"], "OLMoE", Type("olmoe")),
    family(&["olmo-hybrid", "olmo3.5"], "OLMo Hybrid", Type("olmo_hybrid")),
    family(&["olmo-3", "olmo3"], "OLMo 3", Type("olmo3")),
    family(&["olmo-2", "olmo2"], "OLMo 2", Type("olmo2")),
    family(&["olmo"], "OLMo (first version)", Type("olmo")),
    family(&["apertus"], "Apertus", Type("apertus")),
    family(&["command-r7b", "command-a", "tiny-aya", "cohere2"], "Cohere 2", Type("cohere2")),
    family(&["c4ai", "command-r", "aya-", "cohere"], "Cohere", Type("cohere")),
    family(&["lfm2*-a1b", "lfm2*-a2b", "lfm2-moe"], "LFM2 MoE", Type("lfm2_moe")),
    family(&["lfm2"], "LFM2", Type("lfm2")),
    family(&["exaone-4", "exaone4"], "EXAONE 4", Type("exaone4")),
    family(&["exaone"], "EXAONE", Type("exaone")),
    family(&["hunyuan*-a13b", "hunyuan-v1-moe"], "Hunyuan MoE", Type("hunyuan_v1_moe")),
    family(&["hunyuan"], "Hunyuan", Type("hunyuan_v1_dense")),
    family(&["kimi-linear"], "Kimi Linear", Type("kimi_linear")),
    family(&["kimi-k2.5", "kimi-k2.6"], "Kimi K2.5", Type("kimi_k25")),
    family(&["kimi-k2"], "Kimi K2", Type("kimi_k2")),
    family(&["kimi", "moonlight"], "Kimi and Moonlight", Type("deepseek_v3")),
    family(&["minimax-m2"], "MiniMax M2", Type("minimax_m2")),
    family(&["minimax"], "MiniMax", Type("minimax")),
    family(&["muse-glimmer-text"], "Muse Glimmer without towers", Type("muse_glimmer_text")),
    family(&["muse-glimmer"], "Muse Glimmer", Type("muse_glimmer")),
    family(&["seed-oss"], "Seed-OSS", Type("seed_oss")),
    family(&["ernie*-a3b", "ernie*-a47b", "ernie4-5-moe"], "ERNIE 4.5 MoE", Type("ernie4_5_moe")),
    family(&["ernie-4.5", "ernie4-5"], "ERNIE 4.5", Type("ernie4_5")),
    family(&["internlm3"], "InternLM 3", Type("internlm3")),
    family(&["internlm"], "InternLM", Type("internlm2")),
    family(&["baichuan"], "Baichuan", Type("baichuan")),
    family(&["minicpm3"], "MiniCPM 3", Type("minicpm3")),
    family(&["minicpm"], "MiniCPM", Type("minicpm")),
    family(&["trinity-"], "Arcee Trinity", Type("afmoe")),
    family(&["afm-4.5b", "arcee"], "Arcee", Type("arcee")),
    family(&["mimo-v2"], "MiMo V2", Type("mimo_v2_flash")),
    family(&["mimo-"], "MiMo", Type("mimo")),
    family(&["^ling-", "^ring-"], "Ling", Type("bailing_moe")),
    family(&["smollm3"], "SmolLM3", Type("smollm3")),
    family(&["bitnet"], "BitNet", Type("bitnet")),
    family(&["flan-", "^t5-", "mt5-", "^ul2"], "T5", Type("t5")),
    family(&["bart-"], "BART", Type("bart")),
    family(&["-a3b", "-a22b", "-a10b", "-a14b", "-a17b", "-a1b", "-a12b", "-a4b", "-a35b", "-moe"],
        "mixture-of-experts", Unloaded),
    family(&["llama", "smollm", "vicuna", "^yi-"], "Llama", Type("llama")),
];

/// The family of a model, told from its name on the hub or from the last folder of its path.
pub fn family_of(name: &str) -> Option<&'static Family> {
    let name = name.trim_end_matches('/').rsplit('/').next().unwrap_or(name);
    let name = name.split('@').next().unwrap_or(name).to_lowercase().replace('_', "-");
    // A part such as `-vl-` also matches at the end of a name, and `^` at the beginning.
    let framed = format!("^{name}-");
    let has = |part: &&str| {
        let mut rest = framed.as_str();
        part.split('*').all(|piece| match rest.split_once(piece) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
    };
    FAMILIES.iter().find(|family| family.parts.iter().any(has))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_show_their_family() {
        for (name, kind) in [
            ("meta-llama/Llama-3.2-1B-Instruct", Type("llama")),
            ("unsloth/tinyllama-bnb-4bit", Type("llama")),
            ("meta-llama/Llama-4-Scout-17B-16E-Instruct", Type("llama4")),
            ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", Type("llama")),
            ("deepseek-ai/deepseek-coder-6.7b-instruct", Type("llama")),
            ("deepseek-ai/DeepSeek-V3.1", Type("deepseek_v3")),
            ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", Type("llama")),
            ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", Type("nemotron-nas")),
            ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", Type("nemotron_h")),
            ("Qwen/Qwen2.5-7B-Instruct@main", Type("qwen2")),
            ("models/Qwen3-8B/", Type("qwen3")),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", Type("qwen3_moe")),
            ("Qwen/Qwen3-Next-80B-A3B-Instruct", Type("qwen3_next")),
            ("Qwen/Qwen3.5-4B", Type("qwen3_5")),
            ("Qwen/Qwen3.5-397B-A17B", Type("qwen3_5_moe")),
            ("lora_qwen2_5_7b", Type("qwen2")),
            ("mistralai/Mistral-Small-24B-Instruct-2501", Type("mistral")),
            ("mistralai/Ministral-8B-Instruct-2410", Type("mistral")),
            ("mistralai/Ministral-3-8B-Instruct-2512", Type("mistral3")),
            ("mistralai/Mixtral-8x7B-v0.1", Type("mixtral")),
            ("microsoft/Phi-4", Type("phi3")),
            ("microsoft/phi-1_5", Type("phi")),
            ("google/gemma-2b", Type("gemma")),
            ("google/gemma-2-9b", Type("gemma2")),
            ("google/gemma-3-1b-it", Type("gemma3_text")),
            ("google/gemma-3-27b-it", Type("gemma3")),
            ("google/gemma-4-31B-it", Type("gemma4")),
            ("google/gemma-4-26B-A4B-it", Unloaded),
            ("openai/gpt-oss-20b", Type("gpt_oss")),
            ("zai-org/GLM-4-9B-0414", Type("glm4")),
            ("zai-org/GLM-4.5-Air", Type("glm4_moe")),
            ("HuggingFaceTB/SmolLM3-3B", Type("smollm3")),
            ("HuggingFaceTB/SmolLM2-135M", Type("llama")),
            ("allenai/OLMo-2-1124-7B-Instruct", Type("olmo2")),
            ("allenai/Olmo-3-7B-Think", Type("olmo3")),
            ("ibm-granite/granite-3.3-8b-instruct", Type("granite")),
            ("ibm-granite/granite-4.0-h-tiny", Type("granitemoehybrid")),
            ("ByteDance-Seed/Seed-OSS-36B-Instruct", Type("seed_oss")),
            ("LiquidAI/LFM2-1.2B", Type("lfm2")),
            ("LiquidAI/LFM2-8B-A1B", Type("lfm2_moe")),
            ("tiiuae/falcon-7b", Type("falcon")),
            ("tiiuae/Falcon3-7B-Base", Type("llama")),
            ("tiiuae/Falcon-H1-1.5B-Instruct", Type("falcon_h1")),
            ("MiniMaxAI/MiniMax-M2", Type("minimax_m2")),
            ("CohereLabs/c4ai-command-r7b-12-2024", Type("cohere2")),
            ("CohereLabs/aya-expanse-8b", Type("cohere")),
            ("TheBloke/Llama-2-7B-GPTQ", Unloaded),
            ("Qwen/Qwen2.5-VL-7B-Instruct", NotText),
            ("meta-llama/Llama-3.2-11B-Vision-Instruct", NotText),
            ("openai/whisper-large-v3", NotText),
            ("unsloth/Qwen3-Embedding-0.6B", NotText),
        ] {
            assert_eq!(family_of(name).map(|family| family.kind), Some(kind), "{name}");
        }
        for name in ["a/b", "mine", "", "runs/run-4", "org/my-model"] {
            assert!(family_of(name).is_none(), "{name}");
        }
    }
}
