//! Shapes of real models, as in their `config.json`, and small shapes of every model type.

use serde_json::{Value, json};
use smidgen_compile::adapter::{Layers, LoraModule, Targets, target_paths};
use smidgen_compile::model::read_spec;
use smidgen_compile::request::{Master, Moments, Optimizer};
use smidgen_compile::{AdapterForm, Context, DecoderSpec, Overhead, Request, TrainedBiases};
use smidgen_ir::{AdamW, DeviceKind, Extent, Precision, Rank, Workload};
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

/// A checkpoint in bf16 of another model type, with these keys in its config.
fn model(model_type: &str, keys: &Value) -> DecoderSpec {
    let mut config = json!({"model_type": model_type, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5});
    for (key, value) in keys.as_object().expect("keys are an object") {
        config[key] = value.clone();
    }
    read_spec(&config).expect("the shape is valid")
}

pub fn qwen2_7b() -> DecoderSpec {
    let keys = json!({
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": false, "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    });
    model("qwen2", &keys)
}

pub fn phi4_mini() -> DecoderSpec {
    let keys = json!({
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 200_064, "tie_word_embeddings": true,
        "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131_072, "sliding_window": 262_144,
        "rope_scaling": {"type": "longrope", "short_factor": vec![1.0; 48], "long_factor": vec![2.0; 48]},
    });
    model("phi3", &keys)
}

/// Rotates half of each head, with longrope and a window.
pub fn small_phi3(layers: usize) -> DecoderSpec {
    let keys = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "partial_rotary_factor": 0.5, "sliding_window": 7,
        "original_max_position_embeddings": 8, "max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [2.0, 4.0]},
    });
    model("phi3", &keys)
}

fn small_gemma(model_type: &str, layers: usize) -> DecoderSpec {
    let keys = json!({
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "sliding_window": 7,
        "sliding_window_pattern": 2,
    });
    model(model_type, &keys)
}

pub fn small_gemma2(layers: usize) -> DecoderSpec {
    small_gemma("gemma2", layers)
}

pub fn small_gemma3(layers: usize) -> DecoderSpec {
    small_gemma("gemma3_text", layers)
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
        form: AdapterForm::Lora,
        trained: Default::default(),
        biases: TrainedBiases::None,
        dropout: 0.0,
        optimizer: optimizer(),
        extent: Extent { tokens, rows: tokens - segments, segments, audio: 0 },
        step: Extent { tokens, rows: tokens - segments, segments, audio: 0 },
        device: DeviceKind::Cpu,
        precision: Precision::F32,
        workload: Workload { keys_per_query: tokens as f64 / segments as f64 / 2.0, supervised: 1.0 },
        audio: Default::default(),
        decode: None,
        objective: None,
        reference: None,
        row_losses: false,
        rank: Rank::ONLY,
        threads: 2,
        spec,
    }
}

pub fn optimizer() -> Optimizer {
    let adamw = AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 };
    Optimizer { adamw, moments: Moments::F32, master: Master::F32, clip: 1.0 }
}

/// The memory that a process needs outside the arena: in total, per step, and for values on disk.
pub const fn process(fixed_bytes: u64, step_bytes: u64, spill_bytes: u64) -> Context {
    let overhead = Overhead { fixed_bytes, thread_bytes: 0, step_bytes, margin_bytes: 0 };
    Context { device: DeviceKind::Cpu, overhead, threads: 1, data_bytes: 0, token_bytes: 0, spill_bytes }
}
