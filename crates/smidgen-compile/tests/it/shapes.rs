//! Named shapes of real Llama models, as their `config.json` has them.

use serde_json::json;
use smidgen_compile::adapter::{Layers, LoraModule, Targets, target_paths};
use smidgen_compile::model::read_spec;
use smidgen_compile::options::Optimizer;
use smidgen_compile::{DecoderSpec, Request};
use smidgen_ir::{AdamW, Extent, Workload};
use std::collections::HashMap;

pub fn llama(
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: (usize, usize),
    vocabulary: usize,
    tied: bool,
) -> DecoderSpec {
    let config = json!({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads.0, "num_key_value_heads": heads.1,
        "vocab_size": vocabulary, "tie_word_embeddings": tied, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    });
    read_spec(&config).expect("the shape is valid")
}

pub fn llama_1b() -> DecoderSpec {
    llama(2048, 8192, 16, (32, 8), 128_256, true)
}

pub fn llama_8b() -> DecoderSpec {
    llama(4096, 14336, 32, (32, 8), 128_256, false)
}

pub fn llama_70b() -> DecoderSpec {
    llama(8192, 28672, 80, (64, 8), 128_256, false)
}

pub fn tiny() -> DecoderSpec {
    llama(32, 48, 2, (4, 2), 64, false)
}

/// LoRA of rank 16 on the given targets, `tokens` tokens in `segments` samples, all supervised.
pub fn request(
    spec: DecoderSpec,
    targets: Targets,
    layers: Layers,
    tokens: usize,
    segments: usize,
) -> Request {
    let paths = target_paths(&spec, &targets, &layers).expect("the targets exist");
    Request {
        title: "test".into(),
        storage: HashMap::new(),
        adapters: paths.into_iter().map(|path| LoraModule { path, rank: 16, scale: 2.0 }).collect(),
        dropout: 0.0,
        optimizer: optimizer(),
        extent: Extent { tokens, rows: tokens - segments, segments },
        workload: Workload { keys_per_query: tokens as f64 / segments as f64 / 2.0, supervised: 1.0 },
        threads: 2,
        spec,
    }
}

pub fn optimizer() -> Optimizer {
    Optimizer { adamw: AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }, clip: 1.0 }
}
