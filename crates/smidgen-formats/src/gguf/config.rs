//! The `config.json` that the metadata of a GGUF file means, with the keys of transformers 5.
//! Most of it follows from the row of the architecture. An export reads its own metadata back with this, so a model
//! that GGUF would describe wrongly is not written.

use serde_json::{Map, Value as Json, json};

use super::architecture::{
    ARCHITECTURES, Absent, Architecture, EMBEDDING, HEAD, PER_LAYER_EMBEDDING, QK_NORMS, ROPE_DIVISORS,
    ROPE_FACTORS, SHORT_CONVOLUTION_ROWS, SlidingTheta, Special, Windows,
};
use super::keys::Keys;
use super::model_problem::GgufModelProblem;
use super::rope_divisors::{UNROTATED, rope_parameters_of};
use super::value::{Metadata, required, shortest_decimal};

/// The base of the rotary frequencies if a file does not say.
const THETA: f64 = 10_000.0;

/// What a config is read from.
pub trait Parts {
    fn metadata(&self) -> &Metadata;

    /// The dimensions of a tensor, if the model has it.
    fn dims(&self, tensor: &str) -> Option<&[usize]>;

    /// The numbers of a small tensor, all of them above 0.
    fn small(&self, tensor: &str, expected: usize) -> Result<Vec<f32>, GgufModelProblem>;
}

/// What the metadata says.
#[derive(Clone, Debug)]
pub struct DescribedModel {
    pub architecture: &'static Architecture,
    pub config: Json,
    pub layers: usize,
    pub head_dim: usize,
}

pub fn described_model(parts: &dyn Parts) -> Result<DescribedModel, GgufModelProblem> {
    let metadata = parts.metadata();
    let architecture = architecture_of(metadata)?;
    let keys = Keys { metadata, architecture };
    keys.refuse_unknown()?;
    let sizes = Sizes::read(&keys, parts)?;
    let config = config_of(&keys, &sizes, parts)?;
    Ok(DescribedModel {
        architecture,
        config,
        layers: sizes.layers as usize,
        head_dim: sizes.head_dim as usize,
    })
}

fn architecture_of(metadata: &Metadata) -> Result<&'static Architecture, GgufModelProblem> {
    const KEY: &str = "general.architecture";
    let got = required(KEY, metadata.text(KEY))?;
    Architecture::named(got).ok_or_else(|| GgufModelProblem::UnknownArchitecture {
        got: got.to_string(),
        supported: ARCHITECTURES.each_ref().map(Architecture::name).join(", "),
    })
}

/// The sizes that several parts of a config need.
struct Sizes {
    layers: u64,
    hidden: u64,
    heads: u64,
    /// Of each layer.
    kv_heads: Vec<u64>,
    widths: Vec<u64>,
    /// Of layers with a window, if the others have heads of another size.
    head_dim: u64,
    /// Of layers without a window.
    full_head_dim: u64,
    rope_dim: u64,
    max_positions: u64,
    vocabulary: u64,
    window: Option<u64>,
    /// Whether each layer has the window.
    slides: Vec<bool>,
}

impl Sizes {
    fn read(keys: &Keys<'_>, parts: &dyn Parts) -> Result<Sizes, GgufModelProblem> {
        const MOST_LAYERS: u64 = 4096;
        let layers = keys.size("block_count")?;
        if layers > MOST_LAYERS {
            return keys.unsupported("block_count", &layers.to_string(), "up to 4096 layers");
        }
        let hidden = keys.size("embedding_length")?;
        let heads = keys.size("attention.head_count")?;
        let differs = keys.architecture.special == Special::Gemma4;
        let of_layers = |key: &str| {
            if differs { keys.sizes(key, layers) } else { Ok(vec![keys.size(key)?; layers as usize]) }
        };
        let has_kv_heads = keys.metadata.get(&keys.full("attention.head_count_kv")).is_some();
        let is_mixed = keys.architecture.special == Special::ShortConvolutions;
        let kv_heads = match has_kv_heads {
            true if is_mixed => keys.counts("attention.head_count_kv", layers)?,
            true => of_layers("attention.head_count_kv")?,
            false => vec![heads; layers as usize],
        };
        let is_other = |kv_heads: &&u64| !(heads.is_multiple_of(**kv_heads) || (is_mixed && **kv_heads == 0));
        if let Some(other) = kv_heads.iter().find(is_other) {
            let supported = "divisors of `attention.head_count`";
            return keys.unsupported("attention.head_count_kv", &other.to_string(), supported);
        }
        let full_head_dim = full_head_dim(keys, hidden, heads)?;
        let rope_dim = keys.whole("rope.dimension_count")?.unwrap_or(full_head_dim);
        let sizes = ["attention.key_length", "attention.value_length", "rope.dimension_count"];
        check_heads(keys, sizes, full_head_dim)?;
        let head_dim = if differs { keys.size("attention.key_length_swa")? } else { full_head_dim };
        if differs {
            check_heads(
                keys,
                sizes.map(|key| format!("{key}_swa")).each_ref().map(String::as_str),
                head_dim,
            )?;
        }
        let missing = || GgufModelProblem::MissingTensor { tensor: EMBEDDING.to_string() };
        let vocabulary = *parts.dims(EMBEDDING).and_then(<[usize]>::first).ok_or_else(missing)? as u64;
        let window = keys.window()?;
        Ok(Sizes {
            layers,
            hidden,
            heads,
            kv_heads,
            widths: of_layers("feed_forward_length")?,
            head_dim,
            full_head_dim,
            rope_dim,
            max_positions: keys.size("context_length")?,
            vocabulary,
            window,
            slides: keys.slides(layers, window)?,
        })
    }
}

fn full_head_dim(keys: &Keys<'_>, hidden: u64, heads: u64) -> Result<u64, GgufModelProblem> {
    if let Some(head_dim) = keys.whole("attention.key_length")? {
        return Ok(head_dim);
    }
    match keys.whole("rope.dimension_count")? {
        // Converters write no head size for Llama; RoPE covers whole heads there.
        Some(rope_dim) if !keys.architecture.rotates_part => Ok(rope_dim),
        _ if hidden.is_multiple_of(heads) => Ok(hidden / heads),
        _ => {
            let what = format!(
                "hidden size {hidden} is not a multiple of {heads} heads, and the file has no head size"
            );
            Err(GgufModelProblem::Contradiction { what })
        }
    }
}

/// Refuses heads of other sizes than attention has, values of another size than keys, and other rotated channels than
/// the architecture may have.
fn check_heads(
    keys: &Keys<'_>,
    [key, value, rope]: [&str; 3],
    head_dim: u64,
) -> Result<(), GgufModelProblem> {
    const MOST_CHANNELS: u64 = 512;
    if !(2..=MOST_CHANNELS).contains(&head_dim) || !head_dim.is_multiple_of(2) {
        // Without the key, the head size follows from others.
        let key = if keys.whole(key)?.is_some() { key } else { "attention.head_count" };
        return keys.unsupported(key, &format!("heads of {head_dim} channels"), "even sizes up to 512");
    }
    if let Some(value_length) = keys.whole(value)?.filter(|length| *length != head_dim) {
        let what =
            format!("heads with keys of {head_dim} and values of {value_length} channels are not supported");
        return Err(GgufModelProblem::Contradiction { what });
    }
    let rope_dim = keys.whole(rope)?.unwrap_or(head_dim);
    let partial = keys.architecture.rotates_part && (2..head_dim).contains(&rope_dim);
    if !rope_dim.is_multiple_of(2) || (rope_dim != head_dim && !partial) {
        let what =
            format!("a rotary embedding of {rope_dim} channels in heads of {head_dim} is not supported");
        return Err(GgufModelProblem::Contradiction { what });
    }
    Ok(())
}

fn config_of(keys: &Keys<'_>, sizes: &Sizes, parts: &dyn Parts) -> Result<Json, GgufModelProblem> {
    let row = keys.architecture;
    let mut config = json!({
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.widths[0],
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads.iter().max(),
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": parts.dims(HEAD).is_none(),
    });
    let map = config.as_object_mut().expect("an object was made above");
    // Null if the file has none: without the key, transformers would use the ids of the family's first model.
    for (key, name) in [("bos", "bos"), ("eos", "eos"), ("padding", "pad")] {
        let id = keys.metadata.token_id(&format!("tokenizer.ggml.{key}_token_id"))?;
        map.insert(format!("{name}_token_id"), json!(id));
    }
    // A token that ends a turn stops generation too.
    if let Some(turn) = keys.metadata.token_id("tokenizer.ggml.eot_token_id")? {
        let end = map["eos_token_id"].as_u64();
        let ends: Vec<u64> =
            end.into_iter().chain([u64::from(turn)].into_iter().filter(|turn| end != Some(*turn))).collect();
        if ends.len() > 1 {
            map.insert("eos_token_id".into(), json!(ends));
        }
    }
    let [model_type, class] = if sizes.window.is_some() { row.windowed_class } else { row.class };
    add(map, json!({"model_type": model_type, "architectures": [class]}));
    add(map, serde_json::from_str(row.fixed).expect("the fixed keys of an architecture are JSON"));
    for (key, tensor) in row.biases {
        map.insert(key.to_string(), json!(parts.dims(tensor).is_some()));
    }
    for number in row.numbers {
        let is_absent = keys.metadata.get(&keys.full(number.key)).is_none();
        let value = match number.absent {
            Absent::Refused => Some(keys.required_number(number.key)?),
            Absent::Default(default) => Some(keys.number(number.key)?.unwrap_or(default)),
            Absent::DefaultOrNone(default) if is_absent => Some(default),
            Absent::Null | Absent::DefaultOrNone(_) => keys.number_or_none(number.key)?,
            Absent::ByHeadSize => {
                Some(keys.number(number.key)?.unwrap_or((sizes.head_dim as f64).powf(-0.5)))
            }
        };
        map.insert(number.config.into(), json!(value));
    }
    if let Windows::Periodic { .. } = row.windows {
        let kind = |slides: &bool| if *slides { "sliding_attention" } else { "full_attention" };
        add(
            map,
            json!({
                "sliding_window": sizes.window,
                "layer_types": sizes.slides.iter().map(kind).collect::<Vec<_>>(),
            }),
        );
    } else if let Some(window) = sizes.window {
        map.insert("sliding_window".into(), json!(window));
    }
    let mut rope = rope_of_metadata(keys, sizes)?;
    if row.rotates_part {
        rope["partial_rotary_factor"] = json!(sizes.rope_dim as f64 / sizes.full_head_dim as f64);
    }
    let has_divisors = row.rope_tensors.contains(&ROPE_DIVISORS) && parts.dims(ROPE_DIVISORS).is_some();
    if has_divisors {
        add_divisors(&mut rope, sizes, parts)?;
    }
    match row.special {
        Special::LongRope => add_factors(map, &mut rope, keys, sizes, parts)?,
        Special::GrowingQueries => {
            if let Some(beta) = keys.number_or_none("attention.temperature_scale")? {
                rope["llama_4_scaling_beta"] = json!(beta);
            }
        }
        Special::QueryScalar { largest_layers } => {
            // GGUF has no key for this scalar. It is the head size, except in the largest model of each generation.
            let is_largest = sizes.layers == largest_layers;
            let scalar = if is_largest { sizes.hidden / sizes.heads } else { sizes.head_dim };
            map.insert("query_pre_attn_scalar".into(), json!(scalar));
        }
        Special::QueryFactor => add_query_factor(map, &rope, sizes, parts)?,
        Special::Gemma4 => add_gemma4(map, keys, sizes, parts)?,
        Special::ShortConvolutions => {
            let kind = |kv_heads: &u64| if *kv_heads == 0 { "conv" } else { "full_attention" };
            let kinds: Vec<&str> = sizes.kv_heads.iter().map(kind).collect();
            add(map, json!({"conv_L_cache": keys.size(SHORT_CONVOLUTION_ROWS)?, "layer_types": kinds}));
        }
        Special::None | Special::RopeSwitch => {}
    }
    map.insert("rope_parameters".into(), rope_of_kinds(keys, sizes, rope)?);
    Ok(config)
}

fn add(map: &mut Map<String, Json>, more: Json) {
    match more {
        Json::Object(more) => map.extend(more),
        other => unreachable!("{other} is not an object"),
    }
}

/// The scaling of a rotary embedding whose cosines and sines llama.cpp scales by 1 + 0.1·ln(factor).
pub fn yarn_scale(factor: f64, multiplier: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * multiplier * factor.ln() + 1.0 }
}

/// `rope_parameters` from the metadata: the base frequency and its scaling.
fn rope_of_metadata(keys: &Keys<'_>, sizes: &Sizes) -> Result<Json, GgufModelProblem> {
    let theta = keys.number("rope.freq_base")?.unwrap_or(THETA);
    let factor = keys.number("rope.scaling.factor")?.filter(|factor| *factor != 1.0);
    let attention_factor = keys.number("rope.scaling.attn_factor")?.filter(|factor| *factor != 1.0);
    let kind = keys.text("rope.scaling.type")?;
    if let (Some(attention), false) = (attention_factor, kind == Some("yarn"))
        && keys.architecture.special != Special::LongRope
    {
        return keys.unsupported("rope.scaling.attn_factor", &attention.to_string(), "1, without YaRN");
    }
    match (kind, factor) {
        (None | Some("none" | "longrope" | "yarn"), None) => {
            Ok(json!({"rope_type": "default", "rope_theta": theta}))
        }
        // A factor without a type is linear.
        (None | Some("linear"), Some(factor)) => {
            Ok(json!({"rope_type": "linear", "rope_theta": theta, "factor": factor}))
        }
        (Some("yarn"), Some(factor)) => yarn_of_metadata(keys, sizes, theta, factor, attention_factor),
        (Some(got), _) => keys.unsupported(
            "rope.scaling.type",
            got,
            "none, linear and yarn with a factor, longrope without one",
        ),
    }
}

fn yarn_of_metadata(
    keys: &Keys<'_>,
    sizes: &Sizes,
    theta: f64,
    factor: f64,
    attention_factor: Option<f64>,
) -> Result<Json, GgufModelProblem> {
    if let Some(share) = keys.number("rope.scaling.yarn_ext_factor")?.filter(|share| *share != 1.0) {
        return keys.unsupported("rope.scaling.yarn_ext_factor", &share.to_string(), "1");
    }
    let original = keys.whole("rope.scaling.original_context_length")?.unwrap_or(sizes.max_positions);
    let mut rope = json!({
        "rope_type": "yarn", "rope_theta": theta, "factor": factor,
        "original_max_position_embeddings": original,
    });
    for name in ["beta_fast", "beta_slow"] {
        if let Some(beta) = keys.number(&format!("rope.scaling.yarn_{name}"))? {
            rope[name] = json!(beta);
        }
    }
    let multiplier = match keys.architecture.special {
        Special::GrowingQueries => keys.number_or_none("rope.scaling.yarn_log_multiplier")?,
        _ => None,
    };
    let common = yarn_scale(factor, 1.0) / multiplier.map_or(1.0, |all| yarn_scale(factor, all));
    match (attention_factor, multiplier, keys.number("rope.scaling.yarn_attn_factor")?) {
        (Some(attention), _, _) => rope["attention_factor"] = json!(common * attention),
        (None, Some(all), _) => {
            rope["mscale"] = json!(1.0);
            rope["mscale_all_dim"] = json!(all);
        }
        (None, None, Some(attention)) => rope["attention_factor"] = json!(attention),
        (None, None, None) => {}
    }
    Ok(rope)
}

/// One table, or one for each kind of layer.
fn rope_of_kinds(keys: &Keys<'_>, sizes: &Sizes, full: Json) -> Result<Json, GgufModelProblem> {
    let key = "rope.freq_base_swa";
    let given = keys.number(key)?;
    let theta = match (keys.architecture.sliding_theta, given) {
        (SlidingTheta::Common, _) => return Ok(full),
        (SlidingTheta::LikeFull, Some(other)) if full["rope_theta"].as_f64() != Some(other) => {
            return keys.unsupported(key, &other.to_string(), "the number of `rope.freq_base`");
        }
        (SlidingTheta::LikeFull, _) if sizes.window.is_none() => return Ok(full),
        (SlidingTheta::LikeFull, _) => full["rope_theta"].clone(),
        (SlidingTheta::Default(default), given) => json!(given.unwrap_or(default)),
    };
    let sliding = json!({"rope_type": "default", "rope_theta": theta});
    Ok(json!({"full_attention": full, "sliding_attention": sliding}))
}

/// Divisors of the frequencies, as settings of Llama 3 or as factors; in Gemma 4, of pairs that are not rotated.
fn add_divisors(rope: &mut Json, sizes: &Sizes, parts: &dyn Parts) -> Result<(), GgufModelProblem> {
    let divisors = parts.small(ROPE_DIVISORS, sizes.rope_dim as usize / 2)?;
    if rope["rope_type"] != "default" && divisors.iter().all(|divisor| *divisor == 1.0) {
        return Ok(());
    }
    if rope["rope_type"] != "default" {
        let what = format!("the file has `{ROPE_DIVISORS}` and another scaling of RoPE in its metadata");
        return Err(GgufModelProblem::Contradiction { what });
    }
    let theta = rope["rope_theta"].as_f64().expect("`rope_of_metadata` writes a number");
    let rotated = divisors.iter().take_while(|divisor| **divisor == 1.0).count();
    *rope = if rotated < divisors.len() && divisors[rotated..].iter().all(|divisor| *divisor == UNROTATED) {
        json!({
            "rope_type": "proportional",
            "partial_rotary_factor": (2 * rotated) as f64 / sizes.rope_dim as f64,
        })
    } else {
        rope_parameters_of(&divisors, theta, sizes.max_positions)
    };
    rope["rope_theta"] = json!(theta);
    Ok(())
}

/// Factors of the frequencies of Phi 3.
fn add_factors(
    map: &mut Map<String, Json>,
    rope: &mut Json,
    keys: &Keys<'_>,
    sizes: &Sizes,
    parts: &dyn Parts,
) -> Result<(), GgufModelProblem> {
    let original = keys.whole("rope.scaling.original_context_length")?.unwrap_or(sizes.max_positions);
    map.insert("original_max_position_embeddings".into(), json!(original));
    if ROPE_FACTORS.iter().all(|name| parts.dims(name).is_none()) {
        return Ok(());
    }
    let [long, short] = ROPE_FACTORS.map(|name| parts.small(name, sizes.rope_dim as usize / 2));
    let decimals = |factors: Vec<f32>| factors.into_iter().map(shortest_decimal).collect::<Vec<f64>>();
    rope["rope_type"] = json!("longrope");
    rope["short_factor"] = json!(decimals(short?));
    rope["long_factor"] = json!(decimals(long?));
    rope["original_max_position_embeddings"] = json!(original);
    if let Some(factor) = keys.number("rope.scaling.attn_factor")? {
        rope["attention_factor"] = json!(factor);
    }
    Ok(())
}

/// The factor of queries that converters write as weights of norms, and which layers are rotated.
fn add_query_factor(
    map: &mut Map<String, Json>,
    rope: &Json,
    sizes: &Sizes,
    parts: &dyn Parts,
) -> Result<(), GgufModelProblem> {
    let mut factor = None;
    for layer in 0..sizes.layers {
        for (norm, expected) in QK_NORMS.into_iter().zip([factor, Some(1.0)]) {
            let name = format!("blk.{layer}.{norm}");
            let weights = parts.small(&name, sizes.head_dim as usize)?;
            let expected = expected.unwrap_or(weights[0]);
            if let Some(other) = weights.iter().find(|weight| **weight != expected) {
                let what = format!("`{name}` has the weights {expected} and {other}; all must be alike");
                return Err(GgufModelProblem::Contradiction { what });
            }
            if norm == QK_NORMS[0] {
                factor = Some(expected);
            }
        }
    }
    map.insert("qk_scale_factor".into(), json!(factor.map(shortest_decimal)));
    let theta = |slides: &bool| if *slides { rope["rope_theta"].clone() } else { json!(0) };
    map.insert("layer_rope_theta".into(), sizes.slides.iter().map(theta).collect());
    Ok(())
}

/// Sizes of layers, shared keys and values, and embeddings of layers.
fn add_gemma4(
    map: &mut Map<String, Json>,
    keys: &Keys<'_>,
    sizes: &Sizes,
    parts: &dyn Parts,
) -> Result<(), GgufModelProblem> {
    let shared = keys.whole("attention.shared_kv_layers")?.unwrap_or(0).min(sizes.layers);
    let first_shared = (sizes.layers - shared) as usize;
    // llama.cpp takes the keys and values of these two layers, whatever their kinds are.
    let is_sound = first_shared >= 2 && sizes.slides[first_shared - 2] && !sizes.slides[first_shared - 1];
    if shared > 0 && !is_sound {
        let supported =
            "numbers that leave layers of which the last but one has a window, and the last has none";
        return keys.unsupported("attention.shared_kv_layers", &shared.to_string(), supported);
    }
    let full = (0..first_shared).find(|layer| !sizes.slides[*layer]);
    let has_values = |layer: usize| parts.dims(&format!("blk.{layer}.attn_v.weight")).is_some();
    let kinds = sizes.slides.iter().zip(&sizes.kv_heads).enumerate();
    let per_layer: Map<String, Json> = kinds
        .map(|(layer, (slides, kv_heads))| {
            let head_dim = if *slides { sizes.head_dim } else { sizes.full_head_dim };
            (format!("{layer:02}"), json!({"head_dim": head_dim, "num_key_value_heads": kv_heads}))
        })
        .collect();
    let width = sizes.widths[0];
    let is_wide = shared > 0 && first_shared > 0 && sizes.widths[first_shared] == 2 * width;
    let expected = |layer: usize| if is_wide && layer >= first_shared { 2 * width } else { width };
    if let Some(layer) = (0..sizes.widths.len()).find(|layer| sizes.widths[*layer] != expected(*layer)) {
        let got = format!("{} in layer {layer}", sizes.widths[layer]);
        let supported = "one size, or twice that size in the layers that share keys and values";
        return keys.unsupported("feed_forward_length", &got, supported);
    }
    let input_width = keys.whole("embedding_length_per_layer_input")?.unwrap_or(0);
    let rows = parts.dims(PER_LAYER_EMBEDDING).and_then(<[usize]>::first).copied();
    add(
        map,
        json!({
            "num_kv_shared_layers": shared,
            "attention_k_eq_v": full.is_some_and(|layer| !has_values(layer)),
            "per_layer_config": per_layer,
            "use_double_wide_mlp": is_wide,
            "hidden_size_per_layer_input": input_width,
            "vocab_size_per_layer_input": rows.unwrap_or(sizes.vocabulary as usize),
        }),
    );
    Ok(())
}
