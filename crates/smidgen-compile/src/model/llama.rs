//! `model_type = "llama"`: Llama 2 and 3, SmolLM2, TinyLlama and all others of this type.
//!
//! Grouped heads, tied or untied head, an explicit `head_dim`, optional biases. Similar model types start from [`read_like_llama`] and change what differs.

use super::config::{Config, MOST_CHANNELS};
use super::family::Family;
use super::layer::{LayerSpec, NormForm};
use super::spec::{DecoderSpec, EmbeddingSpec, FINAL_NORM, HeadSpec};
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::storage::FP8_BLOCK;
use smidgen_ir::{Activation, Norm, RopeSpec};

pub fn read_spec(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let biases = config.flag("attention_bias", false)?;
    let mlp_biases = config.flag("mlp_bias", false)?;
    let spec = read_like_llama(config, family)?;
    Ok(spec.with_attention_biases(biases).with_gated(|gated| gated.bias = mlp_biases))
}

/// Dropout in the base model.
pub const DROPOUTS: [&str; 4] = ["attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"];

/// Reads the keys that all model types similar to Llama share. No biases in attention, no norms of queries, no window.
pub fn read_like_llama(config: &Config<'_>, family: &Family) -> Result<DecoderSpec, ModelError> {
    let hidden = config.required_dimension("hidden_size")?;
    let heads = config.required_dimension("num_attention_heads")?;
    let kv_heads = config.dimension("num_key_value_heads")?.unwrap_or(heads);
    let head_dim = match config.size("head_dim")? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let what =
                format!("hidden size {hidden} is not a multiple of {heads} heads, and `head_dim` is missing");
            return Err(ModelError::Contradiction { what });
        }
    };
    check_heads(heads, kv_heads, head_dim)?;
    let rope = config.rope(family.partial_rotary, head_dim)?;
    read_with_heads(config, family, rope, |width, eps| {
        LayerSpec::like_llama(heads, kv_heads, head_dim, width, eps)
    })
}

/// Reads what does not depend on the heads; `layer` makes a layer from the width of its feed-forward and the small number
/// of its norms.
pub fn read_with_heads(
    config: &Config<'_>,
    family: &Family,
    rope: RopeSpec,
    layer: impl Fn(usize, f32) -> LayerSpec,
) -> Result<DecoderSpec, ModelError> {
    config.refuse("pretraining_tp", &[json!(1)], "1")?;
    for dropout in DROPOUTS.into_iter().filter(|_| !family.has_dropout) {
        config.refuse(dropout, &[json!(0), json!(0.0)], "0")?;
    }
    let hidden = config.required_dimension("hidden_size")?;
    let layers = config.required_layers("num_hidden_layers")?;
    let vocabulary = config.required_dimension("vocab_size")?;
    let eps = config.float("rms_norm_eps")?.unwrap_or(1e-6);
    // Classes whose layers all have experts know only the width of those.
    let has_dense = family.defaults().contains_key("intermediate_size");
    let width =
        config.required_dimension(if has_dense { "intermediate_size" } else { "moe_intermediate_size" })?;
    // A class knows one of the two keys and ignores the other.
    let key =
        if family.defaults().contains_key("hidden_activation") { "hidden_activation" } else { "hidden_act" };
    let activation = activation(key, config.text(key)?.unwrap_or("silu"))?;
    let spec = DecoderSpec {
        model_type: family.name.into(),
        vocabulary,
        hidden,
        embedding: EmbeddingSpec { padding: Family::padding(config, vocabulary)?, ..EmbeddingSpec::plain() },
        ropes: vec![rope],
        layers: vec![layer(width, eps); layers],
        final_norm: NormForm::Rms(Norm { eps, plus_one: false }),
        final_norm_path: FINAL_NORM,
        head: HeadSpec { is_tied: config.flag("tie_word_embeddings", false)?, scale: 1.0, softcap: None },
        max_positions: config.required_size("max_position_embeddings")?,
        stored: config.stored_dtype()?,
        audio: None,
        unread_layers: 0,
    };
    Ok(spec.with_gated(|gated| gated.activation = activation))
}

/// Refuses heads that cannot share keys, or that no kernel takes.
pub fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<(), ModelError> {
    if !heads.is_multiple_of(kv_heads) {
        let what = format!("{heads} attention heads cannot share {kv_heads} key-value heads");
        return Err(ModelError::Contradiction { what });
    }
    if !head_dim.is_multiple_of(2) || head_dim > 512 {
        return Err(ModelError::unsupported("head_dim", head_dim.to_string(), "even sizes up to 512"));
    }
    if heads * head_dim > MOST_CHANNELS {
        let supported = "heads with up to 4194304 channels in all";
        return Err(ModelError::unsupported("num_attention_heads", heads.to_string(), supported));
    }
    Ok(())
}

/// Checkpoints that are read as stored: 4 bits of bitsandbytes, GPTQ and AWQ, MXFP4, and fp8 with scales of squares, rows
/// or tensors. Any other quantization is refused by name.
pub fn refuse_quantization(config: &Config<'_>) -> Result<(), ModelError> {
    let Some(table) = config.table("quantization_config", "quantization_config.")? else { return Ok(()) };
    let refused = |key: &str, got: &str, supported| {
        Err(ModelError::unsupported(format!("quantization_config.{key}"), got, supported))
    };
    match table.text("quant_method")? {
        Some("bitsandbytes") if table.flag("load_in_4bit", false)? => Ok(()),
        Some("bitsandbytes") => refused("load_in_4bit", "false", "true"),
        Some("fp8") => match table.get("weight_block_size") {
            Some(size) if *size == json!([FP8_BLOCK, FP8_BLOCK]) => Ok(()),
            Some(other) => refused("weight_block_size", &other.to_string(), "[128,128]"),
            None => refused("weight_block_size", "none", "[128,128]"),
        },
        Some("mxfp4") => Ok(()),
        Some("gptq") => {
            table.refuse("bits", &[json!(4)], "4")?;
            table.refuse("desc_act", &[json!(false)], "false")?;
            table.refuse("checkpoint_format", &[json!("gptq"), json!("gptq_v2")], "gptq, gptq_v2")
        }
        Some("awq") => {
            table.refuse("bits", &[json!(4)], "4")?;
            table.refuse("w_bit", &[json!(4)], "4")?;
            table.refuse("version", &[json!("gemm"), json!("GEMM")], "gemm")?;
            table.refuse("zero_point", &[json!(true)], "true")
        }
        Some("compressed-tensors") => {
            let formats = [json!("float-quantized"), json!("naive-quantized")];
            table.refuse("format", &formats, "float-quantized, naive-quantized")?;
            match table.table("sparsity_config", "quantization_config.sparsity_config.")? {
                Some(sparsity) => sparsity.refuse("format", &[json!("dense")], "dense"),
                None => Ok(()),
            }
        }
        other => refused(
            "quant_method",
            other.unwrap_or("unknown"),
            "bitsandbytes, fp8, mxfp4, gptq, awq, compressed-tensors",
        ),
    }
}

pub fn activation(key: &str, name: &str) -> Result<Activation, ModelError> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        other => Err(ModelError::unsupported(key, other, "silu, gelu, gelu_pytorch_tanh")),
    }
}

#[cfg(test)]
mod tests {
    use crate::error::ModelError;
    use crate::model::layer::LayerSpec;
    use crate::model::{read_spec, supported};
    use serde_json::{Value, json};
    use smidgen_ir::{DType, RopeScaling, RopeSpec};

    fn config(change: impl Fn(&mut Value)) -> Value {
        let mut config = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 257, "max_position_embeddings": 256,
        });
        change(&mut config);
        config
    }

    #[test]
    fn defaults() {
        let spec = read_spec(&config(|_| ())).unwrap();
        assert_eq!(spec.layers, vec![LayerSpec::like_llama(4, 4, 16, 96, 1e-6); 2]);
        assert_eq!((spec.stored, &spec.ropes), (DType::F32, &vec![RopeSpec::plain(1e4, 16)]));
        assert!(!spec.head.is_tied);
    }

    #[test]
    fn both_spellings_of_rope_and_dtype() {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_positions: 8192,
        };
        let scaling = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let older = read_spec(&config(|c| {
            c["rope_theta"] = json!(5e5);
            c["rope_scaling"] = scaling.clone();
            c["torch_dtype"] = json!("bfloat16");
        }));
        let newer = read_spec(&config(|c| {
            c["rope_parameters"] = scaling.clone();
            c["rope_parameters"]["rope_theta"] = json!(5e5);
            c["dtype"] = json!("bfloat16");
        }));
        assert_eq!(older, newer);
        let spec = older.unwrap();
        assert_eq!(spec.ropes, [RopeSpec { scaling: llama3, ..RopeSpec::plain(5e5, 16) }]);
        assert_eq!(spec.stored, DType::Bf16);
        let linear = read_spec(&config(|c| c["rope_scaling"] = json!({"type": "linear", "factor": 2})));
        assert_eq!(linear.unwrap().ropes[0].scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn what_cannot_be_compiled_is_named() {
        let message = |change: &dyn Fn(&mut Value)| read_spec(&config(change)).unwrap_err().to_string();
        assert_eq!(message(&|c| c["hidden_size"] = Value::Null), "`hidden_size` is missing in config.json");
        assert_eq!(
            message(&|c| c["hidden_size"] = json!("64")),
            "`hidden_size` in config.json must be a whole number above 0, got \"64\""
        );
        assert_eq!(
            message(&|c| c["num_hidden_layers"] = json!(2_000_000_000)),
            "`num_hidden_layers = 2000000000` in config.json is not supported (supported: up to 4096 layers)"
        );
        assert!(message(&|c| c["vocab_size"] = json!(1u32 << 31)).contains("sizes up to 4194304"));
        for (key, value) in [("rms_norm_eps", 1e-300), ("rope_theta", 1e300)] {
            assert!(message(&|c| c[key] = json!(value)).contains("a number above 0 that f32 can hold"));
        }
        let long = "x".repeat(1_000_000);
        assert!(message(&|c| c["pretraining_tp"] = json!(long)).len() < 300);
        assert_eq!(
            message(&|c| c["model_type"] = json!("mamba")),
            format!("the architecture `mamba` is not supported (supported: {})", supported().join(", "))
        );
        assert_eq!(
            message(&|c| c["rope_scaling"] = json!({"type": "axial", "factor": 2.0})),
            "`rope_scaling.type = axial` in config.json is not supported (supported: default, linear, llama3, longrope, yarn, dynamic, proportional)"
        );
        assert!(
            message(&|c| c["num_key_value_heads"] = json!(3)).contains("4 attention heads cannot share 3")
        );
        assert!(matches!(
            read_spec(&config(|c| c["quantization_config"] = json!({"quant_method": "hqq"}))),
            Err(ModelError::Unsupported { .. })
        ));
    }
}
