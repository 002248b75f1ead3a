//! The supported model architectures of GGUF files: a row for each name in `general.architecture`.
//! A row says which config of transformers a file has, where its tensors are, what converters changed in them, and
//! which metadata keys it has besides those of all architectures. `model` reads files by these rows, and an export
//! writes them.
//! Left out: all other architectures; their files are refused with the name.

/// Pairs of names in the file (without `blk.N.`) and in the checkpoint (without `model.layers.N.`).
pub type Names = &'static [(&'static str, &'static str)];

#[derive(Debug, PartialEq)]
pub struct Architecture {
    /// The name in `general.architecture`.
    pub name: &'static str,
    /// Every `model_type` that is written as this architecture.
    pub model_types: &'static [&'static str],
    /// `model_type` and class of the config that a file has.
    pub class: [&'static str; 2],
    /// The same if layers have a sliding window.
    pub windowed_class: [&'static str; 2],
    pub tensors: &'static [Names],
    /// Tensors that become keys of the config: divisors or factors of rotary frequencies.
    pub rope_tensors: &'static [&'static str],
    /// Whether rows of queries and keys are reordered, because llama.cpp rotates neighbouring channels.
    pub has_paired_rows: bool,
    /// Ends of the names in the file of tensors to which converters add 1.
    pub shifted: &'static [&'static str],
    pub head: Head,
    pub windows: Windows,
    pub sliding_theta: SlidingTheta,
    /// Whether only some channels of a head may be rotated.
    pub rotates_part: bool,
    pub numbers: &'static [Number],
    /// Keys of the config that say whether there are biases, and the tensors that show it.
    pub biases: &'static [(&'static str, &'static str)],
    /// Keys of the config that are the same in all files.
    pub fixed: &'static str,
    /// What else this architecture has.
    pub special: Special,
}

/// Where the head is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// Tied to the embedding if there is no tensor of its own.
    Either,
    /// llama.cpp uses the embedding.
    Tied,
    /// llama.cpp requires a tensor.
    Own,
}

/// Which layers have a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    Never,
    /// All, if the file has a window.
    EveryLayer,
    /// All but every n-th.
    Periodic {
        period: u64,
        absent: AbsentWindow,
        pattern: Pattern,
    },
}

/// What the absence of the size of the window means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsentWindow {
    /// No layer has a window.
    None,
    Default(u64),
    /// llama.cpp does not load the file, even if no layer has the window.
    Refused,
}

/// How a file says which layers have the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// llama.cpp reads the period only.
    Period,
    PeriodOrList,
    /// llama.cpp requires a list, and takes one number for the entry of every layer.
    List,
}

/// The base of the rotary frequencies of layers with a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SlidingTheta {
    /// Layers with a window rotate as the others.
    Common,
    /// That of the other layers, whatever a file says; they may be scaled, and layers with a window are not.
    LikeFull,
    Default(f64),
}

/// A number in the metadata and its key in the config.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number {
    pub key: &'static str,
    pub config: &'static str,
    pub absent: Absent,
}

/// What the absence of a number means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Absent {
    Refused,
    /// None, and so does 0.
    Null,
    Default(f64),
    /// This number; 0 means none.
    DefaultOrNone(f64),
    /// One divided by the root of the head size.
    ByHeadSize,
}

/// What only one or two architectures have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    None,
    /// Factors of rotary frequencies for long and short sequences.
    LongRope,
    /// The largest model of the generation, with this many layers, scales scores by other sizes.
    QueryScalar {
        largest_layers: u64,
    },
    /// YaRN with a second multiplier, and queries that grow with their position.
    GrowingQueries,
    /// Layers differ in their sizes, share keys and values, and may have embeddings of their own.
    Gemma4,
    /// Weights of the norms of queries are all one number; layers without a window are not rotated.
    QueryFactor,
    /// `rope.scaling.finetuned = false` turns the rotary embedding off.
    RopeSwitch,
    /// Layers without heads of keys have a gated short convolution.
    ShortConvolutions,
}

pub const EMBEDDING: &str = "token_embd.weight";
pub const HEAD: &str = "output.weight";
/// Divisors of rotary frequencies. They become keys of the config.
pub const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// Factors of Phi 3's rotary frequencies for long and for short sequences. They become keys of the config.
pub const ROPE_FACTORS: [&str; 2] = ["rope_factors_long.weight", "rope_factors_short.weight"];
/// Weights of the norms of queries and of keys.
pub const QK_NORMS: [&str; 2] = ["attn_q_norm.weight", "attn_k_norm.weight"];

/// Tensors outside the layers, with their names in the checkpoint.
pub const OUTSIDE_LAYERS: Names = &[
    (EMBEDDING, "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    (HEAD, "lm_head.weight"),
];
/// Those of LFM 2, whose final norm has the name of a norm of embeddings.
const OUTSIDE_OF_LFM2: Names = &[
    (EMBEDDING, "model.embed_tokens.weight"),
    ("token_embd_norm.weight", "model.embedding_norm.weight"),
    (HEAD, "lm_head.weight"),
];
/// Those of embeddings that each layer has.
pub const PER_LAYER: Names = &[
    (PER_LAYER_EMBEDDING, "model.embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
];
pub const PER_LAYER_EMBEDDING: &str = "per_layer_token_embd.weight";

const OUTPUTS: Names =
    &[("attn_output.weight", "self_attn.o_proj.weight"), ("ffn_down.weight", "mlp.down_proj.weight")];
const QKV: Names = &[
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
];
const GATE_UP: Names =
    &[("ffn_gate.weight", "mlp.gate_proj.weight"), ("ffn_up.weight", "mlp.up_proj.weight")];
const FUSED_QKV: Names = &[("attn_qkv.weight", "self_attn.qkv_proj.weight")];
const FUSED_GATE_UP: Names = &[("ffn_up.weight", "mlp.gate_up_proj.weight")];
const INPUT_NORM: Names = &[("attn_norm.weight", "input_layernorm.weight")];
const MLP_NORM: Names = &[("ffn_norm.weight", "post_attention_layernorm.weight")];
const MLP_NORM_OF_SEED: Names = &[("post_attention_norm.weight", "post_attention_layernorm.weight")];
const NORMS_AFTER: Names = &[
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
];
const MLP_NORM_OF_GEMMA: Names = &[("ffn_norm.weight", "pre_feedforward_layernorm.weight")];
const NORMS_OF_GLM: Names = &[
    ("post_attention_norm.weight", "post_self_attn_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("post_ffw_norm.weight", "post_mlp_layernorm.weight"),
];
const HEAD_NORMS: Names =
    &[(QK_NORMS[0], "self_attn.q_norm.weight"), (QK_NORMS[1], "self_attn.k_norm.weight")];
const QKV_BIASES: Names = &[
    ("attn_q.bias", "self_attn.q_proj.bias"),
    ("attn_k.bias", "self_attn.k_proj.bias"),
    ("attn_v.bias", "self_attn.v_proj.bias"),
];
const OTHER_BIASES: Names = &[
    ("attn_output.bias", "self_attn.o_proj.bias"),
    ("ffn_gate.bias", "mlp.gate_proj.bias"),
    ("ffn_up.bias", "mlp.up_proj.bias"),
    ("ffn_down.bias", "mlp.down_proj.bias"),
];
const OF_LFM2: Names = &[
    ("attn_norm.weight", "operator_norm.weight"),
    ("attn_output.weight", "self_attn.out_proj.weight"),
    (QK_NORMS[0], "self_attn.q_layernorm.weight"),
    (QK_NORMS[1], "self_attn.k_layernorm.weight"),
    (SHORT_CONVOLUTION, "conv.conv.weight"),
    ("shortconv.in_proj.weight", "conv.in_proj.weight"),
    ("shortconv.out_proj.weight", "conv.out_proj.weight"),
    ("ffn_norm.weight", "ffn_norm.weight"),
    ("ffn_gate.weight", "feed_forward.w1.weight"),
    ("ffn_up.weight", "feed_forward.w3.weight"),
    ("ffn_down.weight", "feed_forward.w2.weight"),
];
/// The weight of a short convolution, which llama.cpp computes in f32 only.
pub const SHORT_CONVOLUTION: &str = "shortconv.conv.weight";
/// Rows that it sees, in the metadata.
pub const SHORT_CONVOLUTION_ROWS: &str = "shortconv.l_cache";
const OUTPUT_GATE: Names = &[("attn_gate.weight", "self_attn.gate_proj.weight")];
const TOKEN_INPUTS: Names = &[
    ("inp_gate.weight", "per_layer_input_gate.weight"),
    ("proj.weight", "per_layer_projection.weight"),
    ("post_norm.weight", "post_per_layer_input_norm.weight"),
    ("layer_output_scale.weight", "layer_scalar"),
];

const ATTENTION_BIAS: (&str, &str) = ("attention_bias", "blk.0.attn_q.bias");

const fn number(key: &'static str, config: &'static str, absent: Absent) -> Number {
    Number { key, config, absent }
}
const RMS: Number = number("attention.layer_norm_rms_epsilon", "rms_norm_eps", Absent::Refused);
const SCORE_CAP: &str = "attn_logit_softcapping";
const LOGIT_CAP: &str = "final_logit_softcapping";

const LLAMA: Architecture = Architecture {
    name: "llama",
    model_types: &["llama", "mistral"],
    class: ["llama", "LlamaForCausalLM"],
    windowed_class: ["mistral", "MistralForCausalLM"],
    tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM, QKV_BIASES, OTHER_BIASES],
    rope_tensors: &[ROPE_DIVISORS],
    has_paired_rows: true,
    shifted: &[],
    head: Head::Either,
    windows: Windows::EveryLayer,
    sliding_theta: SlidingTheta::Common,
    rotates_part: false,
    numbers: &[RMS],
    biases: &[ATTENTION_BIAS, ("mlp_bias", "blk.0.ffn_gate.bias")],
    fixed: r#"{"hidden_act": "silu"}"#,
    special: Special::None,
};
const QWEN2: Architecture = Architecture {
    name: "qwen2",
    model_types: &["qwen2"],
    class: ["qwen2", "Qwen2ForCausalLM"],
    tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM, QKV_BIASES],
    rope_tensors: &[],
    has_paired_rows: false,
    windows: Windows::Never,
    biases: &[],
    fixed: r#"{"hidden_act": "silu", "use_sliding_window": false}"#,
    ..LLAMA
};
const GEMMA: Architecture = Architecture {
    name: "gemma",
    model_types: &["gemma"],
    class: ["gemma", "GemmaForCausalLM"],
    tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM],
    shifted: &["norm.weight"],
    head: Head::Tied,
    fixed: r#"{"hidden_act": "gelu_pytorch_tanh", "attention_bias": false}"#,
    ..QWEN2
};
const GEMMA2: Architecture = Architecture {
    name: "gemma2",
    model_types: &["gemma2"],
    class: ["gemma2", "Gemma2ForCausalLM"],
    windowed_class: ["gemma2", "Gemma2ForCausalLM"],
    tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM_OF_GEMMA, NORMS_AFTER],
    windows: Windows::Periodic { period: 2, absent: AbsentWindow::Default(4096), pattern: Pattern::Period },
    numbers: &[
        RMS,
        number(SCORE_CAP, SCORE_CAP, Absent::Default(50.0)),
        number(LOGIT_CAP, LOGIT_CAP, Absent::Default(30.0)),
    ],
    fixed: r#"{"hidden_activation": "gelu_pytorch_tanh", "attention_bias": false}"#,
    special: Special::QueryScalar { largest_layers: 46 },
    ..GEMMA
};
const GEMMA3: Architecture = Architecture {
    name: "gemma3",
    model_types: &["gemma3_text"],
    class: ["gemma3_text", "Gemma3ForCausalLM"],
    windowed_class: ["gemma3_text", "Gemma3ForCausalLM"],
    tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM_OF_GEMMA, NORMS_AFTER, HEAD_NORMS],
    head: Head::Either,
    windows: Windows::Periodic { period: 6, absent: AbsentWindow::None, pattern: Pattern::Period },
    sliding_theta: SlidingTheta::Default(10_000.0),
    numbers: &[RMS, number(LOGIT_CAP, LOGIT_CAP, Absent::Null)],
    special: Special::QueryScalar { largest_layers: 62 },
    ..GEMMA2
};

pub static ARCHITECTURES: [Architecture; 17] = [
    LLAMA,
    QWEN2,
    Architecture {
        name: "qwen3",
        model_types: &["qwen3"],
        class: ["qwen3", "Qwen3ForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM, HEAD_NORMS],
        fixed: r#"{"hidden_act": "silu", "use_sliding_window": false, "attention_bias": false}"#,
        ..QWEN2
    },
    Architecture {
        name: "phi3",
        model_types: &["phi3"],
        class: ["phi3", "Phi3ForCausalLM"],
        windowed_class: ["phi3", "Phi3ForCausalLM"],
        tensors: &[OUTPUTS, FUSED_QKV, FUSED_GATE_UP, INPUT_NORM, MLP_NORM],
        rope_tensors: &ROPE_FACTORS,
        has_paired_rows: false,
        rotates_part: true,
        biases: &[],
        fixed: r#"{"hidden_act": "silu", "sliding_window": null}"#,
        special: Special::LongRope,
        ..LLAMA
    },
    GEMMA,
    GEMMA2,
    GEMMA3,
    Architecture {
        name: "gemma4",
        model_types: &["gemma4_text", "gemma4_unified_text"],
        class: ["gemma4_text", "Gemma4ForCausalLM"],
        windowed_class: ["gemma4_text", "Gemma4ForCausalLM"],
        tensors: &[
            OUTPUTS,
            QKV,
            GATE_UP,
            INPUT_NORM,
            MLP_NORM_OF_GEMMA,
            NORMS_AFTER,
            HEAD_NORMS,
            TOKEN_INPUTS,
        ],
        rope_tensors: &[ROPE_DIVISORS],
        shifted: &[],
        windows: Windows::Periodic { period: 6, absent: AbsentWindow::Refused, pattern: Pattern::List },
        numbers: &[RMS, number(LOGIT_CAP, LOGIT_CAP, Absent::DefaultOrNone(30.0))],
        special: Special::Gemma4,
        ..GEMMA3
    },
    Architecture {
        name: "smollm3",
        model_types: &["smollm3"],
        class: ["smollm3", "SmolLM3ForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM],
        rope_tensors: &[],
        windows: Windows::Never,
        biases: &[],
        fixed: r#"{"hidden_act": "silu", "no_rope_layer_interval": 4, "use_sliding_window": false,
                   "attention_bias": false, "mlp_bias": false}"#,
        ..LLAMA
    },
    Architecture {
        name: "granite",
        model_types: &["granite"],
        class: ["granite", "GraniteForCausalLM"],
        windows: Windows::Never,
        numbers: &[
            RMS,
            number("logit_scale", "logits_scaling", Absent::Refused),
            number("residual_scale", "residual_multiplier", Absent::Default(1.0)),
            number("embedding_scale", "embedding_multiplier", Absent::Default(1.0)),
            number("attention.scale", "attention_multiplier", Absent::ByHeadSize),
        ],
        special: Special::RopeSwitch,
        ..LLAMA
    },
    Architecture {
        name: "lfm2",
        model_types: &["lfm2"],
        class: ["lfm2", "Lfm2ForCausalLM"],
        tensors: &[QKV, OF_LFM2],
        numbers: &[number("attention.layer_norm_rms_epsilon", "norm_eps", Absent::Refused)],
        fixed: r#"{"block_auto_adjust_ff_dim": false, "conv_bias": false}"#,
        special: Special::ShortConvolutions,
        ..QWEN2
    },
    Architecture {
        name: "olmo2",
        model_types: &["olmo2", "olmo3"],
        class: ["olmo2", "Olmo2ForCausalLM"],
        windowed_class: ["olmo3", "Olmo3ForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, NORMS_AFTER, HEAD_NORMS],
        head: Head::Own,
        windows: Windows::Periodic { period: 4, absent: AbsentWindow::None, pattern: Pattern::Period },
        sliding_theta: SlidingTheta::LikeFull,
        fixed: r#"{"hidden_act": "silu", "attention_bias": false}"#,
        ..QWEN2
    },
    Architecture {
        name: "seed_oss",
        model_types: &["seed_oss"],
        class: ["seed_oss", "SeedOssForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM_OF_SEED, QKV_BIASES],
        biases: &[ATTENTION_BIAS],
        fixed: r#"{"hidden_act": "silu", "attention_out_bias": false, "mlp_bias": false,
                   "attention_dropout": null, "residual_dropout": null}"#,
        ..QWEN2
    },
    Architecture {
        name: "glm4",
        model_types: &["glm4"],
        class: ["glm4", "Glm4ForCausalLM"],
        tensors: &[OUTPUTS, QKV, FUSED_GATE_UP, INPUT_NORM, NORMS_OF_GLM, QKV_BIASES],
        rotates_part: true,
        biases: &[ATTENTION_BIAS],
        fixed: r#"{"hidden_act": "silu"}"#,
        ..QWEN2
    },
    Architecture {
        name: "cohere2",
        model_types: &["cohere2"],
        class: ["cohere2", "Cohere2ForCausalLM"],
        windowed_class: ["cohere2", "Cohere2ForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM],
        head: Head::Tied,
        windows: Windows::Periodic { period: 4, absent: AbsentWindow::Refused, pattern: Pattern::Period },
        numbers: &[
            number("attention.layer_norm_epsilon", "layer_norm_eps", Absent::Refused),
            number("logit_scale", "logit_scale", Absent::Refused),
        ],
        fixed: r#"{"hidden_act": "silu", "attention_bias": false}"#,
        ..QWEN2
    },
    Architecture {
        name: "mistral3",
        model_types: &["ministral3"],
        class: ["ministral3", "Ministral3ForCausalLM"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM],
        windows: Windows::Never,
        biases: &[],
        fixed: r#"{"hidden_act": "silu", "sliding_window": null}"#,
        special: Special::GrowingQueries,
        ..LLAMA
    },
    Architecture {
        name: "muse-glimmer",
        model_types: &["muse_glimmer_text"],
        class: ["muse_glimmer_text", "MuseGlimmerTextModel"],
        windowed_class: ["muse_glimmer_text", "MuseGlimmerTextModel"],
        tensors: &[OUTPUTS, QKV, GATE_UP, INPUT_NORM, MLP_NORM_OF_GEMMA, NORMS_AFTER, OUTPUT_GATE],
        rope_tensors: &[],
        // Not the final norm.
        shifted: &["attn_norm.weight", "attention_norm.weight", "ffn_norm.weight", "ffw_norm.weight"],
        head: Head::Own,
        windows: Windows::Periodic {
            period: 4,
            absent: AbsentWindow::Refused,
            pattern: Pattern::PeriodOrList,
        },
        numbers: &[
            RMS,
            number(LOGIT_CAP, LOGIT_CAP, Absent::DefaultOrNone(30.0)),
            number("logit_scale", "output_multiplier", Absent::Refused),
        ],
        biases: &[],
        fixed: r#"{"hidden_activation": "silu", "attention_bias": false, "post_norm_eps": 1e-8}"#,
        special: Special::QueryFactor,
        ..LLAMA
    },
];

impl Architecture {
    pub fn named(name: &str) -> Option<&'static Architecture> {
        ARCHITECTURES.iter().find(|row| row.name == name)
    }

    /// The architecture as which a model of this type is written.
    pub fn of_model_type(model_type: &str) -> Option<&'static Architecture> {
        ARCHITECTURES.iter().find(|row| row.model_types.contains(&model_type))
    }

    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The names of all tensors of layers.
    pub fn layer_tensors(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        self.tensors.iter().copied().flatten()
    }

    /// The names of all tensors outside the layers.
    pub fn outer_tensors(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        let per_layer = if self.special == Special::Gemma4 { PER_LAYER } else { &[] };
        let own = if self.special == Special::ShortConvolutions { OUTSIDE_OF_LFM2 } else { OUTSIDE_LAYERS };
        own.iter().chain(per_layer)
    }
}
