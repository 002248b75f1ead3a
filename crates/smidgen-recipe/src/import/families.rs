//! Families of models, told from a model's name, and whether smidgen loads them.
//!
//! A name shows the family in most cases, so an import can say at once that a model will not load, long before its
//! `config.json` is there. The first row with a matching part decides: exceptions stand above their family.
//! A name that matches no row is not judged here; loading it does that.

use super::draft::Draft;
use super::fields::Found;

/// What smidgen does with a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It loads models of this `model_type`.
    Loads(&'static str),
    NotLoaded,
    /// They read or make something other than text, or do not continue it.
    NotText,
}

pub struct Family {
    /// Parts of a name in lower case, with `-` for `_`. A part that begins with `^` stands at the beginning.
    parts: &'static [&'static str],
    pub name: &'static str,
    pub standing: Standing,
}

const fn family(parts: &'static [&'static str], name: &'static str, standing: Standing) -> Family {
    Family { parts, name, standing }
}

use Standing::{Loads, NotLoaded, NotText};

#[rustfmt::skip]
pub const FAMILIES: &[Family] = &[
    family(&["whisper", "wav2vec"], "speech recognition", NotText),
    family(&["embedding", "minilm", "^bge-", "^gte-", "^e5-", "-e5-", "sentence-t5"], "embedding", NotText),
    family(&["bert", "electra-", "^xlnet"], "encoder", NotText),
    family(&["stable-diffusion", "sdxl", "flux.1", "^flux-", "controlnet"], "image", NotText),
    family(&["-gptq", "-awq", "-aqlm", "-exl2", "-hqq", "nvfp4", "mxfp4"], "GPTQ, AWQ, AQLM, HQQ or FP4", NotLoaded),
    family(&["phi-4-multimodal"], "Phi-4-multimodal", Loads("phi4mm")),
    family(&["-vl-", "-vl2", "vision", "llava", "pixtral", "internvl", "smolvlm", "idefics", "paligemma", "minicpm-v", "molmo",
             "-ocr", "ocr-", "glm-4.6v", "glm-4.5v", "glm-4v", "mossvl", "moss-vl", "florence"],
        "vision", NotText),
    family(&["voxtral", "-omni", "qwen2-audio", "csm-1b", "tts-", "ultravox"], "audio", NotText),
    family(&["8x7b", "8x22b", "mixtral"], "Mixtral", NotLoaded),
    family(&["-a3b", "-a22b", "-a10b", "-a14b", "-a17b", "-a2.7b", "-a1b", "-a12b", "-a4b", "-a35b", "-moe"],
        "mixture-of-experts", NotLoaded),
    family(&["deepseek-v", "deepseek-moe", "deepseek-coder-v2"], "DeepSeek V2 to V4", NotLoaded),
    family(&["deepseek-r1-distill-qwen", "deepseek-r1-qwen"], "Qwen 2", Loads("qwen2")),
    family(&["deepseek-r1-distill-llama"], "Llama", Loads("llama")),
    family(&["deepseek-r1-0528-qwen3"], "Qwen 3", Loads("qwen3")),
    family(&["deepseek-r1"], "DeepSeek R1", NotLoaded),
    family(&["llama-3.1-nemotron-nano", "llama-3.1-nemotron-70b"], "Llama", Loads("llama")),
    family(&["nemotron"], "Nemotron", NotLoaded),
    family(&["llama-4", "llama4"], "Llama 4", NotLoaded),
    family(&["qwen3-next", "qwen3-coder-next"], "Qwen 3 Next", NotLoaded),
    family(&["qwen3.5", "qwen3.6", "qwen-3.5"], "Qwen 3.5", NotLoaded),
    family(&["qwen3"], "Qwen 3", Loads("qwen3")),
    family(&["qwen2", "qwen1.5", "codeqwen", "qwq-"], "Qwen 2", Loads("qwen2")),
    family(&["qwen-7b", "qwen-14b", "qwen-72b", "qwen-1-8b", "qwen-1.8b"], "Qwen (first version)", NotLoaded),
    family(&["gemma-3n", "gemma3n"], "Gemma 3n", NotLoaded),
    family(&["gemma-4", "gemma4"], "Gemma 4", NotLoaded),
    family(&["gemma-3-4b", "gemma-3-12b", "gemma-3-27b", "medgemma-4b", "medgemma-27b"], "vision Gemma 3", NotLoaded),
    family(&["gemma-3-", "functiongemma"], "Gemma 3", Loads("gemma3_text")),
    family(&["recurrentgemma", "t5gemma"], "other Gemma", NotLoaded),
    family(&["gemma-2-", "gemma2"], "Gemma 2", Loads("gemma2")),
    family(&["codegemma", "gemma-2b", "gemma-7b", "gemma-1.1"], "Gemma (first version)", NotLoaded),
    family(&["phi-3-small", "phi-3.5-moe"], "Phi-3 small and MoE", NotLoaded),
    family(&["phi-3", "phi-4", "phi3", "phi4"], "Phi-3 and Phi-4", Loads("phi3")),
    family(&["phi-1", "phi-2", "phi1", "phi2"], "Phi-1 and Phi-2", NotLoaded),
    family(&["ministral-3-", "mistral-small-3.1", "mistral-small-3.2", "mistral-small-4", "mistral-medium-3", "mistral-large-3",
             "magistral-small-2509", "devstral-small-2-", "devstral-2-", "-24b-instruct-2503", "-24b-instruct-2506",
             "-24b-base-2503"],
        "vision Mistral", NotLoaded),
    family(&["codestral-mamba", "mamba"], "Mamba", NotLoaded),
    family(&["mistral", "ministral", "magistral", "devstral", "codestral", "zephyr-7b"], "Mistral", Loads("mistral")),
    family(&["falcon"], "Falcon", NotLoaded),
    family(&["^mpt-"], "MPT", NotLoaded),
    family(&["gpt-j"], "GPT-J", NotLoaded),
    family(&["pythia", "gpt-neox", "redpajama-incite", "dolly-v2"], "GPT-NeoX", NotLoaded),
    family(&["gpt-neo"], "GPT-Neo", NotLoaded),
    family(&["gpt-oss"], "gpt-oss", NotLoaded),
    family(&["gpt2", "cerebras-gpt", "btlm", "distilgpt"], "GPT-2", NotLoaded),
    family(&["^opt-"], "OPT", NotLoaded),
    family(&["bloom"], "BLOOM", NotLoaded),
    family(&["stablelm", "stable-code"], "StableLM", NotLoaded),
    family(&["starcoder", "santacoder"], "StarCoder", NotLoaded),
    family(&["codegen"], "CodeGen", NotLoaded),
    family(&["replit-code"], "Replit", NotLoaded),
    family(&["jamba"], "Jamba", NotLoaded),
    family(&["rwkv"], "RWKV", NotLoaded),
    family(&["dbrx"], "DBRX", NotLoaded),
    family(&["glm-", "chatglm", "codegeex"], "GLM", NotLoaded),
    family(&["granite"], "Granite", NotLoaded),
    family(&["olmo"], "OLMo", NotLoaded),
    family(&["apertus"], "Apertus", NotLoaded),
    family(&["c4ai", "command-r", "command-a", "aya-"], "Cohere", NotLoaded),
    family(&["lfm2"], "LFM2", NotLoaded),
    family(&["exaone"], "EXAONE", NotLoaded),
    family(&["hunyuan"], "Hunyuan", NotLoaded),
    family(&["kimi", "moonlight"], "Kimi", NotLoaded),
    family(&["minimax"], "MiniMax", NotLoaded),
    family(&["seed-oss"], "Seed-OSS", NotLoaded),
    family(&["ernie"], "ERNIE", NotLoaded),
    family(&["internlm"], "InternLM", NotLoaded),
    family(&["baichuan"], "Baichuan", NotLoaded),
    family(&["minicpm"], "MiniCPM", NotLoaded),
    family(&["trinity-", "afm-4.5b"], "Arcee", NotLoaded),
    family(&["mimo-"], "MiMo", NotLoaded),
    family(&["smollm3"], "SmolLM3", NotLoaded),
    family(&["bitnet"], "BitNet", NotLoaded),
    family(&["flan-", "^t5-", "mt5-", "bart-", "^ul2"], "encoder-decoder", NotLoaded),
    family(&["llama", "smollm", "vicuna", "^yi-"], "Llama", Loads("llama")),
];

/// The family of a model, told from its name on the hub or from the last folder of its path.
pub fn family_of(name: &str) -> Option<&'static Family> {
    let name = name.trim_end_matches('/').rsplit('/').next().unwrap_or(name);
    let name = name.split('@').next().unwrap_or(name).to_lowercase().replace('_', "-");
    // A part such as `-vl-` also matches at the end of a name.
    let ended = format!("{name}-");
    let has = |part: &&str| match part.strip_prefix('^') {
        Some(beginning) => name.starts_with(beginning),
        None => ended.contains(*part),
    };
    FAMILIES.iter().find(|family| family.parts.iter().any(&has))
}

/// Says that a model will not load; what is no language model is a mistake at `found`.
pub fn judge_family(draft: &mut Draft, found: &Found<'_>, name: &str) {
    let Some(family) = family_of(name) else { return };
    match family.standing {
        Loads(_) => {}
        NotLoaded => draft.warn(format!(
            "`{name}`: smidgen does not load {} models (docs/supported.md lists those that it loads)",
            family.name
        )),
        NotText => found.mistake(format!(
            "`{}`: `{name}` is one of the {} models; smidgen fine-tunes language models",
            found.key, family.name
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_show_their_family() {
        for (name, standing) in [
            ("meta-llama/Llama-3.2-1B-Instruct", Loads("llama")),
            ("unsloth/tinyllama-bnb-4bit", Loads("llama")),
            ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", Loads("llama")),
            ("Qwen/Qwen2.5-7B-Instruct@main", Loads("qwen2")),
            ("models/Qwen3-8B/", Loads("qwen3")),
            ("mistralai/Mistral-Small-24B-Instruct-2501", Loads("mistral")),
            ("microsoft/Phi-4", Loads("phi3")),
            ("google/gemma-2-9b", Loads("gemma2")),
            ("google/gemma-3-1b-it", Loads("gemma3_text")),
            ("TheBloke/Llama-2-7B-GPTQ", NotLoaded),
            ("google/gemma-2b", NotLoaded),
            ("google/gemma-3-27b-it", NotLoaded),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", NotLoaded),
            ("Qwen/Qwen2.5-VL-7B-Instruct", NotText),
            ("meta-llama/Llama-3.2-11B-Vision-Instruct", NotText),
            ("mistralai/Mixtral-8x7B-v0.1", NotLoaded),
            ("microsoft/phi-1_5", NotLoaded),
            ("tiiuae/falcon-7b", NotLoaded),
            ("openai/whisper-large-v3", NotText),
            ("unsloth/Qwen3-Embedding-0.6B", NotText),
        ] {
            assert_eq!(family_of(name).map(|family| family.standing), Some(standing), "{name}");
        }
        for name in ["a/b", "mine", "", "runs/run-4", "org/my-model"] {
            assert!(family_of(name).is_none(), "{name}");
        }
    }
}
