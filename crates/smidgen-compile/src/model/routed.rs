//! What configs with routed experts share: the number of experts under several names, layers that stay dense, and keys that
//! would add something to the loss or noise to the router.
//!
//! Left out: what a family adds, which its own file reads.

use super::config::{Config, MOST_CHANNELS};
use super::experts::{ExpertsSpec, SharedExpert};
use super::layer::{FeedForward, GatedNames, GatedSpec, LayerSpec};
use super::spec::DecoderSpec;
use crate::error::ModelError;
use serde_json::json;
use smidgen_ir::{Activation, Router, RouterGroups, RouterScores};

/// Most experts of a layer.
const MOST_EXPERTS: usize = 4096;

/// The activation that the config names for every feed-forward.
pub fn activation_of(spec: &DecoderSpec) -> Activation {
    let of = |layer: &LayerSpec| match &layer.feed_forward {
        FeedForward::Gated(gated) => gated.activation,
        FeedForward::Experts(experts) => experts.activation,
    };
    spec.layers.first().map_or(Activation::Silu, of)
}

/// A router that takes the softmax of all experts, whose number is at the first of `keys` that the config has.
pub fn read_router(config: &Config<'_>, keys: &[&'static str]) -> Result<Router, ModelError> {
    read_router_at(config, keys, "num_experts_per_tok", RouterScores::Softmax)
}

/// As [`read_router`], with other scores, and the key of how many experts a token chooses.
pub fn read_router_at(
    config: &Config<'_>,
    keys: &[&'static str],
    chosen_key: &'static str,
    scores: RouterScores,
) -> Result<Router, ModelError> {
    // A class has its default under one of the names.
    let own = keys.iter().find(|key| config.has_own(key));
    let key = own.or_else(|| keys.iter().find(|key| config.get(key).is_some())).unwrap_or(&keys[0]);
    let (experts, chosen) = (config.required_size(key)?, config.required_size(chosen_key)?);
    refuse_noise_and_loss(config)?;
    refuse_other_routers(config, scores)?;
    Router {
        experts,
        chosen,
        scores,
        is_corrected: false,
        groups: None,
        renormalizes: config.flag("norm_topk_prob", false)?,
        added_to_sum: 0.0,
        scale: 1.0,
        has_expert_scales: false,
    }
    .checked()
}

/// Refuses a loss of the router and noise in its input.
fn refuse_noise_and_loss(config: &Config<'_>) -> Result<(), ModelError> {
    if config.scale("router_aux_loss_coef")?.is_some_and(|coefficient| coefficient != 0.0) {
        let supported = "false, or `router_aux_loss_coef = 0`: the router has no loss of its own";
        config.refuse("output_router_logits", &[json!(false)], supported)?;
    }
    config.refuse("router_jitter_noise", &[json!(0), json!(0.0)], "0")
}

/// Refuses what only the code beside published checkpoints reads, unless it says what the class of transformers always does.
fn refuse_other_routers(config: &Config<'_>, scores: RouterScores) -> Result<(), ModelError> {
    let name = match scores {
        RouterScores::Softmax => "softmax",
        RouterScores::Sigmoid => "sigmoid",
    };
    config.refuse("scoring_func", &[json!(name)], name)?;
    config.refuse("moe_layer_freq", &[json!(1)], "1")
}

/// A router as in DeepSeek-V3 and GLM: sigmoid scores, which a stored number corrects for the choice, groups, and a factor.
pub fn read_sigmoid_router(config: &Config<'_>, keys: &[&'static str]) -> Result<Router, ModelError> {
    config.refuse("topk_method", &[json!("noaux_tc")], "noaux_tc")?;
    let router = Router {
        is_corrected: true,
        added_to_sum: 1e-20,
        groups: read_groups(config, 2)?,
        scale: config.float("routed_scaling_factor")?.unwrap_or(1.0),
        ..read_router_at(config, keys, "num_experts_per_tok", RouterScores::Sigmoid)?
    };
    router.checked()
}

/// Layers behind the last one that predict further tokens: published checkpoints have them, and they are not read.
pub fn further_layers(config: &Config<'_>) -> Result<usize, ModelError> {
    let own = config.count("num_nextn_predict_layers")?;
    Ok(own.or(config.count("num_mtp_layers")?).unwrap_or(0))
}

/// Experts of a router with the sizes of DeepSeek's configs: `n_shared_experts` are one feed-forward for every token.
pub fn read_with_shared(
    config: &Config<'_>,
    spec: &DecoderSpec,
    router: Router,
    shared_bias: bool,
) -> Result<ExpertsSpec, ModelError> {
    let width = config.dimension("moe_intermediate_size")?;
    let width = width.ok_or(ModelError::Missing { key: "moe_intermediate_size" })?;
    let (activation, shared) = (activation_of(spec), config.count("n_shared_experts")?.unwrap_or(0));
    if shared > MOST_EXPERTS || shared * width > MOST_CHANNELS {
        let supported = "shared experts with up to 4194304 channels in all";
        return Err(ModelError::unsupported("n_shared_experts", shared.to_string(), supported));
    }
    let gated = GatedSpec {
        module: "mlp.shared_experts",
        names: GatedNames::USUAL,
        width: shared * width,
        activation,
        is_fused: false,
        bias: shared_bias,
        scales: [1.0; 2],
    };
    Ok(ExpertsSpec {
        shared: (shared > 0).then_some(SharedExpert { gated, gate: None }),
        ..ExpertsSpec::like_qwen(router, width, activation)
    })
}

/// The groups of a router, if there is more than one; a group counts as much as so many of its best experts.
pub fn read_groups(config: &Config<'_>, best: usize) -> Result<Option<RouterGroups>, ModelError> {
    let count = config.size("n_group")?.unwrap_or(1);
    let chosen = config.size("topk_group")?.unwrap_or(1);
    if chosen > count {
        let what = format!("`topk_group = {chosen}` is more than `n_group = {count}`");
        return Err(ModelError::Contradiction { what });
    }
    Ok((count > 1).then_some(RouterGroups { count, chosen, best }))
}

/// What is checked after a router is complete.
pub trait Checked: Sized {
    fn checked(self) -> Result<Self, ModelError>;
}

impl Checked for Router {
    fn checked(self) -> Result<Router, ModelError> {
        let Router { experts, chosen, groups, .. } = self;
        let what = match groups {
            _ if experts > MOST_EXPERTS => {
                let supported = "up to 4096 experts in a layer";
                return Err(ModelError::unsupported("num_experts", experts.to_string(), supported));
            }
            _ if chosen > experts => format!("tokens choose {chosen} of {experts} experts"),
            Some(RouterGroups { count, .. }) if !experts.is_multiple_of(count) => {
                format!("{experts} experts cannot form {count} groups")
            }
            Some(RouterGroups { count, chosen: kept, .. }) if chosen > kept * (experts / count) => {
                format!("tokens choose {chosen} experts, and {kept} of {count} groups have fewer")
            }
            _ => return Ok(self),
        };
        Err(ModelError::Contradiction { what })
    }
}

impl DecoderSpec {
    /// Replaces the feed-forward of the layers for which the function says so.
    pub fn with_experts(self, experts: &ExpertsSpec, has_experts: impl Fn(usize) -> bool) -> DecoderSpec {
        self.with_layers(|index, layer| {
            if has_experts(index) {
                layer.feed_forward = FeedForward::Experts(Box::new(experts.clone()));
            }
        })
    }
}

/// Which layers have experts in Qwen's models: every `decoder_sparse_step`-th that `mlp_only_layers` does not name.
pub fn sparse_layers(config: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = config.size("decoder_sparse_step")?.unwrap_or(1);
    let dense = config.counts("mlp_only_layers")?.unwrap_or_default();
    Ok((0..layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step)).collect())
}

#[cfg(test)]
mod tests {
    use crate::model::{ignored_keys, read_spec};
    use serde_json::{Value, json};
    use smidgen_ir::RopeScaling;

    fn config(model_type: &str, more: &Value) -> Value {
        let mut config = json!({
            "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 257, "head_dim": 16,
            "max_position_embeddings": 256, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        });
        if model_type.starts_with("deepseek") || model_type == "glm4_moe_lite" {
            config.as_object_mut().unwrap().remove("head_dim");
        }
        if model_type == "qwen2_moe" {
            config["shared_expert_intermediate_size"] = json!(48);
        }
        for (key, value) in more.as_object().expect("an object") {
            config[key] = value.clone();
        }
        config
    }

    /// What the code beside published checkpoints reads and transformers ignores is refused, unless it says what
    /// transformers does.
    #[test]
    fn routers_and_layers_of_other_kinds_are_refused_by_name() {
        for (model_type, key, harmless, other) in [
            ("deepseek_v2", "scoring_func", json!("softmax"), json!("sigmoid")),
            ("deepseek_v2", "topk_method", json!("greedy"), json!("noaux_tc")),
            ("deepseek_v2", "moe_layer_freq", json!(1), json!(2)),
            ("deepseek_v2", "norm_topk_prob", json!(false), json!(true)),
            ("deepseek_v3", "scoring_func", json!("sigmoid"), json!("softmax")),
            ("deepseek_v3", "topk_method", json!("noaux_tc"), json!("group_limited_greedy")),
            ("deepseek_v3", "moe_layer_freq", json!(1), json!([0, 1])),
            ("glm4_moe", "scoring_func", json!("sigmoid"), json!("softmax")),
            ("glm4_moe_lite", "topk_method", json!("noaux_tc"), json!("greedy")),
            ("minimax_m2", "scoring_func", json!("sigmoid"), json!("softmax")),
            ("minimax_m2", "use_routing_bias", json!(true), json!(false)),
            ("minimax_m2", "use_qk_norm", json!(true), json!(false)),
            ("minimax_m2", "qk_norm_type", json!("per_layer"), json!("per_head")),
            ("minimax_m2", "shared_intermediate_size", json!(0), json!(64)),
            ("minimax_m2", "attn_type_list", json!([1, 1]), json!([0, 1])),
            ("qwen3_moe", "scoring_func", json!("softmax"), json!("sigmoid")),
            ("mixtral", "router_jitter_noise", json!(0.0), json!(0.1)),
            ("olmoe", "clip_qkv", Value::Null, json!(8.0)),
            ("qwen2_moe", "output_router_logits", json!(false), json!(true)),
            ("gpt_oss", "hidden_act", json!("silu"), json!("relu")),
        ] {
            let of = |value: &Value| {
                let mut more = json!({});
                more[key] = value.clone();
                read_spec(&config(model_type, &more))
            };
            let plain =
                read_spec(&config(model_type, &json!({}))).unwrap_or_else(|e| panic!("{model_type}: {e}"));
            assert_eq!(of(&harmless).as_ref(), Ok(&plain), "{model_type}: `{key}`");
            let message = of(&other).unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{key} = ")), "{model_type}: {message}");
        }
    }

    #[test]
    fn numbers_of_experts_that_contradict_each_other_are_named() {
        let message = |more: Value| read_spec(&config("deepseek_v3", &more)).unwrap_err().to_string();
        let groups = json!({"n_routed_experts": 6, "n_group": 4, "topk_group": 2});
        assert!(message(groups).ends_with("6 experts cannot form 4 groups"));
        let few = json!({"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3});
        assert!(message(few).ends_with("tokens choose 3 experts, and 1 of 4 groups have fewer"));
        let kept = json!({"n_routed_experts": 8, "n_group": 2, "topk_group": 3});
        assert!(message(kept).ends_with("`topk_group = 3` is more than `n_group = 2`"));
        let many = json!({"n_routed_experts": 5000});
        assert!(message(many).contains("up to 4096 experts in a layer"));
        // All experts of all groups may be chosen.
        let all = json!({"n_routed_experts": 8, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 8});
        assert!(read_spec(&config("deepseek_v3", &all)).is_ok());
    }

    #[test]
    fn a_loss_of_the_router_that_transformers_ignores_is_told() {
        let notes = ignored_keys(&config("deepseek_v2", &json!({"aux_loss_alpha": 0.001}))).unwrap();
        assert_eq!(
            notes,
            [
                "`aux_loss_alpha = 0.001` in config.json is ignored, as in transformers: the router has no loss of its own"
            ]
        );
    }

    /// The class of transformers has YaRN if its config says nothing.
    #[test]
    fn gpt_oss_rotates_by_yarn_if_its_config_says_nothing() {
        let spec = read_spec(&config("gpt_oss", &json!({}))).unwrap();
        let rope = &spec.ropes[0];
        assert!((rope.attention_scale - 1.346_573_6).abs() < 1e-6, "{}", rope.attention_scale);
        assert_eq!(rope.theta, 150_000.0);
        let RopeScaling::Yarn { factor, original_max_positions, truncate, .. } = rope.scaling else {
            panic!("{rope:?}")
        };
        assert_eq!((factor, original_max_positions, truncate), (32.0, 4096, false));
        let plain = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}});
        assert_eq!(read_spec(&config("gpt_oss", &plain)).unwrap().ropes[0].scaling, RopeScaling::Default);
    }
}
