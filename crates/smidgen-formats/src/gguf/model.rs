//! A GGUF file as a Hugging Face model: its metadata becomes a `config.json` with the keys of transformers 5,
//! and its tensors get their Hugging Face names (`tensor_names`).
//! Nothing is guessed: an unknown architecture, key or tensor is refused with its name, because ignoring it
//! would silently compute another model.
//! Settings that GGUF does not store are lost, such as the sliding window of the first Mistral.
//! Left out: mixtures of experts, models in several files, and the tokenizer.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};
use smidgen_ir::Storage;

use super::GgufFile;
use super::architecture::Architecture;
use super::model_problem::{GgufModelError, GgufModelProblem};
use super::rope_divisors::rope_parameters_of;
use super::tensor_names::{EMBEDDING, HEAD, ROPE_DIVISORS, ROPE_FACTORS, TensorSource, map_tensors};
use super::value::{Array, Metadata, MetadataProblem, Value, required, shortest_decimal};
use crate::open_file::InFile;

/// The config and the tensors of the model in a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    pub architecture: Architecture,
    /// What `config.json` would contain.
    pub config: Json,
    sources: BTreeMap<String, TensorSource>,
}

impl GgufModel {
    /// Reads the metadata and the small tensors of rotary factors, if there are any.
    pub fn read(file: &GgufFile) -> Result<GgufModel, GgufModelError> {
        read_checked(file).map_err(|problem| InFile { path: file.path().to_path_buf(), problem })
    }

    /// Where the tensor with this Hugging Face name is in the file.
    pub fn source(&self, name: &str) -> Option<&TensorSource> {
        self.sources.get(name)
    }

    /// All tensors, sorted by their Hugging Face names.
    pub fn sources(&self) -> impl Iterator<Item = (&str, &TensorSource)> {
        self.sources.iter().map(|(name, source)| (name.as_str(), source))
    }
}

fn read_checked(file: &GgufFile) -> Result<GgufModel, GgufModelProblem> {
    let metadata = file.metadata();
    let architecture = architecture_of(metadata)?;
    if let Some(count) = metadata.whole("split.count")?.filter(|count| *count > 1) {
        let number = metadata.whole("split.no")?.unwrap_or(0) + 1;
        return Err(GgufModelProblem::Split { number, count });
    }
    let keys = Keys { metadata, architecture };
    keys.refuse_unknown()?;
    let sizes = Sizes::read(&keys, file)?;
    let config = config_of(&keys, &sizes, file)?;
    let sources = map_tensors(file, architecture, sizes.layers as usize, sizes.head_dim as usize)?;
    Ok(GgufModel { architecture, config, sources })
}

fn architecture_of(metadata: &Metadata) -> Result<Architecture, GgufModelProblem> {
    const KEY: &str = "general.architecture";
    let got = required(KEY, metadata.text(KEY))?;
    Architecture::ALL.into_iter().find(|known| known.name() == got).ok_or_else(|| {
        GgufModelProblem::UnknownArchitecture {
            got: got.to_string(),
            supported: Architecture::ALL.map(Architecture::name).join(", "),
        }
    })
}

/// Keys that are read below, without the architecture's prefix.
const READ: [&str; 21] = [
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attn_logit_softcapping",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "feed_forward_length",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
];
/// Keys that change nothing, or repeat what follows from the tensors.
const HARMLESS: [&str; 5] =
    ["expert_used_count", "rope.scaling.finetuned", "rope.scaling.type", "tensor_data_layout", "vocab_size"];

/// The metadata of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn whole(&self, key: &str) -> Result<Option<u64>, GgufModelProblem> {
        Ok(self.metadata.whole(&self.full(key))?)
    }

    /// A size: a whole number from 1 to 2^31.
    fn size(&self, key: &str) -> Result<u64, GgufModelProblem> {
        let key = self.full(key);
        let size = required(&key, self.metadata.whole(&key))?;
        if (1..=1 << 31).contains(&size) {
            return Ok(size);
        }
        Err(GgufModelProblem::Unsupported { key, got: size.to_string(), supported: "1 to 2^31" })
    }

    /// The size of the sliding window; 0 means none.
    fn window(&self) -> Result<Option<u64>, GgufModelProblem> {
        Ok(self.whole("attention.sliding_window")?.filter(|window| *window > 0))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, GgufModelProblem> {
        let key = self.full(key);
        match self.metadata.number(&key)? {
            Some(number) if !(number > 0.0 && number.is_finite()) => Err(GgufModelProblem::Unsupported {
                key,
                got: number.to_string(),
                supported: "numbers above 0",
            }),
            number => Ok(number),
        }
    }

    fn refuse_unknown(&self) -> Result<(), GgufModelProblem> {
        let prefix = self.full("");
        // Checked before the other keys: the settings of YaRN are unknown keys, and this message is clearer.
        let key = self.full("rope.scaling.type");
        if let Some(got @ "yarn") = self.metadata.text(&key)? {
            return Err(GgufModelProblem::Unsupported {
                key,
                got: got.into(),
                supported: "none, linear, longrope",
            });
        }
        for (key, value) in self.metadata.iter() {
            let Some(short) = key.strip_prefix(&prefix) else { continue };
            if !READ.contains(&short) && !HARMLESS.contains(&short) {
                return Err(GgufModelProblem::UnknownKey {
                    key: key.to_string(),
                    got: value.to_string(),
                    architecture: self.architecture.name(),
                });
            }
        }
        if let Some(experts) = self.whole("expert_count")?.filter(|experts| *experts > 0) {
            let key = self.full("expert_count");
            return Err(GgufModelProblem::Unsupported { key, got: experts.to_string(), supported: "0" });
        }
        let key = self.full("attention.causal");
        match self.metadata.flag(&key)? {
            Some(false) => Err(GgufModelProblem::Unsupported { key, got: "false".into(), supported: "true" }),
            _ => Ok(()),
        }
    }
}

/// The sizes that several parts of a config need.
struct Sizes {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    rope_dim: u64,
    max_positions: u64,
    vocabulary: u64,
}

impl Sizes {
    fn read(keys: &Keys<'_>, file: &GgufFile) -> Result<Sizes, GgufModelProblem> {
        let hidden = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let kv_heads = match keys.whole("attention.head_count_kv")? {
            Some(_) => keys.size("attention.head_count_kv")?,
            None => heads,
        };
        let rope_dim = keys.whole("rope.dimension_count")?;
        let head_dim = match keys.whole("attention.key_length")? {
            Some(head_dim) => head_dim,
            // Converters write no head size for Llama; RoPE covers whole heads there.
            None if keys.architecture == Architecture::Llama && rope_dim.is_some() => rope_dim.unwrap_or(0),
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let what = format!(
                    "hidden size {hidden} is not a multiple of {heads} heads, and the file has no head size"
                );
                return Err(GgufModelProblem::Contradiction { what });
            }
        };
        let rope_dim = rope_dim.unwrap_or(head_dim);
        if let Some(value_length) = keys.whole("attention.value_length")?.filter(|length| *length != head_dim)
        {
            let what = format!(
                "heads with keys of {head_dim} and values of {value_length} channels are not supported"
            );
            return Err(GgufModelProblem::Contradiction { what });
        }
        let partial = keys.architecture == Architecture::Phi3 && (2..head_dim).contains(&rope_dim);
        if head_dim < 2 || head_dim % 2 != 0 || rope_dim % 2 != 0 || (rope_dim != head_dim && !partial) {
            let what =
                format!("a rotary embedding of {rope_dim} channels in heads of {head_dim} is not supported");
            return Err(GgufModelProblem::Contradiction { what });
        }
        let embedding =
            file.tensor(EMBEDDING).ok_or(GgufModelProblem::MissingTensor { tensor: EMBEDDING })?;
        Ok(Sizes {
            layers: keys.size("block_count")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            rope_dim,
            max_positions: keys.size("context_length")?,
            vocabulary: embedding.rows() as u64,
        })
    }
}

fn config_of(keys: &Keys<'_>, sizes: &Sizes, file: &GgufFile) -> Result<Json, GgufModelProblem> {
    let epsilon = "attention.layer_norm_rms_epsilon";
    let epsilon =
        keys.number(epsilon)?.ok_or_else(|| MetadataProblem::Missing { key: keys.full(epsilon) })?;
    let mut config = json!({
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": keys.size("feed_forward_length")?,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_positions,
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": file.tensor(HEAD).is_none(),
    });
    let map = config.as_object_mut().expect("an object was made above");
    // Null if the file has none: without the key, transformers would use the ids of the family's first model.
    for (key, name) in [("bos", "bos"), ("eos", "eos"), ("padding", "pad")] {
        let id = keys.metadata.token_id(&format!("tokenizer.ggml.{key}_token_id"))?;
        map.insert(format!("{name}_token_id"), json!(id));
    }
    match keys.architecture {
        Architecture::Llama => add_llama(map, keys, sizes, file)?,
        Architecture::Qwen2 | Architecture::Qwen3 => add_qwen(map, keys)?,
        Architecture::Phi3 => add_phi3(map, keys, sizes, file)?,
        Architecture::Gemma2 => add_gemma2(map, keys, sizes)?,
        Architecture::Gemma3 => add_gemma3(map, keys, sizes)?,
    }
    Ok(config)
}

fn add(map: &mut Map<String, Json>, more: Json) {
    match more {
        Json::Object(more) => map.extend(more),
        other => unreachable!("{other} is not an object"),
    }
}

fn add_class(map: &mut Map<String, Json>, model_type: &str, class: &str) {
    add(map, json!({"model_type": model_type, "architectures": [class]}));
}

/// `rope_parameters` from the metadata: the base frequency, and linear scaling if there is any.
fn rope_of_metadata(keys: &Keys<'_>) -> Result<Json, GgufModelProblem> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(10_000.0);
    let key = keys.full("rope.scaling.type");
    let factor = keys.number("rope.scaling.factor")?.filter(|factor| *factor != 1.0);
    match (keys.metadata.text(&key)?, factor) {
        (None | Some("none" | "longrope"), None) => Ok(json!({"rope_type": "default", "rope_theta": theta})),
        // A factor without a type is linear.
        (None | Some("linear"), Some(factor)) => {
            Ok(json!({"rope_type": "linear", "rope_theta": theta, "factor": factor}))
        }
        (Some(got), _) => Err(GgufModelProblem::Unsupported {
            key,
            got: got.to_string(),
            supported: "none, linear with a factor, longrope without one",
        }),
    }
}

fn add_llama(
    map: &mut Map<String, Json>,
    keys: &Keys<'_>,
    sizes: &Sizes,
    file: &GgufFile,
) -> Result<(), GgufModelProblem> {
    let mut rope = rope_of_metadata(keys)?;
    if file.tensor(ROPE_DIVISORS).is_some() {
        let divisors = read_rope_tensor(file, ROPE_DIVISORS, sizes.rope_dim as usize / 2)?;
        if rope["rope_type"] != "default" {
            let what = format!("the file has `{ROPE_DIVISORS}` and another scaling of RoPE in its metadata");
            return Err(GgufModelProblem::Contradiction { what });
        }
        let theta = rope["rope_theta"].as_f64().expect("`rope_of_metadata` writes a number");
        rope = rope_parameters_of(&divisors, theta, sizes.max_positions);
        rope["rope_theta"] = json!(theta);
    }
    let has = |name: &str| file.tensor(name).is_some();
    match keys.window()? {
        Some(window) => {
            add_class(map, "mistral", "MistralForCausalLM");
            add(map, json!({"sliding_window": window}));
        }
        None => {
            add_class(map, "llama", "LlamaForCausalLM");
            add(
                map,
                json!({"attention_bias": has("blk.0.attn_q.bias"), "mlp_bias": has("blk.0.ffn_gate.bias")}),
            );
        }
    }
    add(map, json!({"hidden_act": "silu", "rope_parameters": rope}));
    Ok(())
}

fn add_qwen(map: &mut Map<String, Json>, keys: &Keys<'_>) -> Result<(), GgufModelProblem> {
    if let Some(window) = keys.window()? {
        return Err(GgufModelProblem::Unsupported {
            key: keys.full("attention.sliding_window"),
            got: window.to_string(),
            supported: "0",
        });
    }
    match keys.architecture {
        Architecture::Qwen2 => add_class(map, "qwen2", "Qwen2ForCausalLM"),
        _ => {
            add_class(map, "qwen3", "Qwen3ForCausalLM");
            add(map, json!({"attention_bias": false}));
        }
    }
    add(
        map,
        json!({"hidden_act": "silu", "use_sliding_window": false, "rope_parameters": rope_of_metadata(keys)?}),
    );
    Ok(())
}

fn add_phi3(
    map: &mut Map<String, Json>,
    keys: &Keys<'_>,
    sizes: &Sizes,
    file: &GgufFile,
) -> Result<(), GgufModelProblem> {
    let original = keys.whole("rope.scaling.original_context_length")?.unwrap_or(sizes.max_positions);
    let mut rope = rope_of_metadata(keys)?;
    rope["partial_rotary_factor"] = json!(sizes.rope_dim as f64 / sizes.head_dim as f64);
    if ROPE_FACTORS.iter().any(|name| file.tensor(name).is_some()) {
        let [long, short] =
            ROPE_FACTORS.map(|name| read_rope_tensor(file, name, sizes.rope_dim as usize / 2));
        let decimals = |factors: Vec<f32>| factors.into_iter().map(shortest_decimal).collect::<Vec<f64>>();
        rope["rope_type"] = json!("longrope");
        rope["short_factor"] = json!(decimals(short?));
        rope["long_factor"] = json!(decimals(long?));
        rope["original_max_position_embeddings"] = json!(original);
        if let Some(factor) = keys.number("rope.scaling.attn_factor")? {
            rope["attention_factor"] = json!(factor);
        }
    }
    add_class(map, "phi3", "Phi3ForCausalLM");
    add(
        map,
        json!({
            "hidden_act": "silu",
            "original_max_position_embeddings": original,
            "sliding_window": keys.window()?,
            "rope_parameters": rope,
        }),
    );
    Ok(())
}

/// Adds the settings that Gemma 2 and 3 share. Every `period`-th layer has full attention.
fn add_gemma(map: &mut Map<String, Json>, sizes: &Sizes, period: u64, largest_layers: u64) {
    let layer_type =
        |layer: u64| if (layer + 1).is_multiple_of(period) { "full_attention" } else { "sliding_attention" };
    // GGUF has no key for this scalar. It is the head size, except in the largest model of each generation.
    let scalar = if sizes.layers == largest_layers { sizes.hidden / sizes.heads } else { sizes.head_dim };
    add(
        map,
        json!({
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": false,
            "query_pre_attn_scalar": scalar,
            "layer_types": (0..sizes.layers).map(layer_type).collect::<Vec<_>>(),
        }),
    );
}

/// Every n-th layer has full attention, the others have a sliding window. Returns n.
fn period_of(keys: &Keys<'_>, default: u64) -> Result<u64, GgufModelProblem> {
    let key = keys.full("attention.sliding_window_pattern");
    match keys.metadata.get(&key) {
        // One entry per layer: whether it has a sliding window.
        Some(Value::Array(Array::Bool(slides))) => {
            let period = slides.iter().position(|slides| !slides).map_or(u64::MAX, |first| first as u64 + 1);
            let regular =
                slides.iter().zip(1..).all(|(slides, layer)| *slides != u64::is_multiple_of(layer, period));
            if regular {
                return Ok(period);
            }
            let (got, supported) = ("irregular".to_string(), "every n-th layer full");
            Err(GgufModelProblem::Unsupported { key, got, supported })
        }
        _ => Ok(keys
            .whole("attention.sliding_window_pattern")?
            .filter(|period| *period > 0)
            .unwrap_or(default)),
    }
}

fn add_gemma2(map: &mut Map<String, Json>, keys: &Keys<'_>, sizes: &Sizes) -> Result<(), GgufModelProblem> {
    const LAYERS_OF_27B: u64 = 46;
    add_class(map, "gemma2", "Gemma2ForCausalLM");
    add_gemma(map, sizes, period_of(keys, 2)?, LAYERS_OF_27B);
    add(
        map,
        json!({
            "sliding_window": keys.whole("attention.sliding_window")?.unwrap_or(4096),
            "attn_logit_softcapping": keys.number("attn_logit_softcapping")?.unwrap_or(50.0),
            "final_logit_softcapping": keys.number("final_logit_softcapping")?.unwrap_or(30.0),
            "rope_parameters": rope_of_metadata(keys)?,
        }),
    );
    Ok(())
}

fn add_gemma3(map: &mut Map<String, Json>, keys: &Keys<'_>, sizes: &Sizes) -> Result<(), GgufModelProblem> {
    const LAYERS_OF_27B: u64 = 62;
    add_class(map, "gemma3_text", "Gemma3ForCausalLM");
    let window = keys.window()?;
    // Without a window every layer has full attention.
    let period = if window.is_some() { period_of(keys, 6)? } else { 1 };
    add_gemma(map, sizes, period, LAYERS_OF_27B);
    let mut full = rope_of_metadata(keys)?;
    if keys.number("rope.freq_base")?.is_none() {
        full["rope_theta"] = json!(1_000_000.0);
    }
    let local = keys.number("rope.freq_base_swa")?.unwrap_or(10_000.0);
    add(
        map,
        json!({
            "sliding_window": window,
            "attn_logit_softcapping": keys.number("attn_logit_softcapping")?,
            "final_logit_softcapping": keys.number("final_logit_softcapping")?,
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }),
    );
    Ok(())
}

fn read_rope_tensor(
    file: &GgufFile,
    name: &'static str,
    expected: usize,
) -> Result<Vec<f32>, GgufModelProblem> {
    let tensor = file.tensor(name).ok_or(GgufModelProblem::MissingTensor { tensor: name })?;
    if tensor.dims != [expected] || tensor.storage != Storage::F32 {
        let (dims, storage) = (tensor.dims.clone(), tensor.storage);
        return Err(GgufModelProblem::RopeTensor { tensor: name, expected, dims, storage });
    }
    let mut bytes = vec![0; tensor.bytes as usize];
    file.read_at(tensor, 0, &mut bytes)?;
    let (numbers, _) = bytes.as_chunks();
    let factors: Vec<f32> = numbers.iter().map(|number| f32::from_le_bytes(*number)).collect();
    match factors.iter().find(|factor| !(**factor > 0.0 && factor.is_finite())) {
        Some(&got) => Err(GgufModelProblem::RopeFactor { tensor: name, got }),
        None => Ok(factors),
    }
}
