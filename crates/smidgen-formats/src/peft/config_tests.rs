//! Tests of the adapter config: it reads what PEFT and other programs write, and writes what they read.
//! Texts are written out, because other programs depend on the exact format.

use std::fs;

use serde_json::json;

use super::config::{AdapterConfig, AdapterConfigError, Bias, FourierConfig};

fn read(text: &str) -> Result<AdapterConfig, AdapterConfigError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("adapter_config.json");
    fs::write(&path, text).unwrap();
    AdapterConfig::read(&path)
}

#[track_caller]
fn refused(text: &str, ending: &str) {
    let error = read(text).expect_err("refused").to_string();
    assert!(error.contains("adapter_config.json` "), "{error}");
    assert!(error.ends_with(ending), "{error}");
}

#[test]
fn the_type_alone_gives_the_defaults() {
    let config = read(r#"{"peft_type": "LORA"}"#).unwrap();
    assert_eq!(config, AdapterConfig::default());
    assert_eq!((config.r, config.lora_alpha, config.lora_dropout), (8, 8.0, 0.0));
    assert_eq!(config.init_lora_weights, json!(true));
    assert!(!config.inference_mode && !config.use_rslora && !config.use_dora);
}

#[test]
fn nulls_become_defaults_and_unknown_keys_are_kept() {
    let config = read(
        r#"{"peft_type": "LORA", "r": null, "rank_pattern": null, "bias": null, "peft_version": "0.21.2",
            "from_the_future": {"a": [1]}, "target_modules": "all-linear", "lora_alpha": 16.5}"#,
    )
    .unwrap();
    assert_eq!((config.r, config.lora_alpha, config.bias), (8, 16.5, Bias::None));
    assert_eq!(config.target_modules, json!("all-linear"));
    let other: Vec<&String> = config.other.keys().collect();
    assert_eq!(other, ["peft_version", "from_the_future"]);
}

#[test]
fn errors_in_a_config_name_the_place() {
    refused("{}", "missing field `peft_type` at line 1 column 2");
    refused("7", "invalid type: integer `7`, expected an object of settings at line 1 column 1");
    refused(r#"{"peft_type":"IA3"}"#, "is of type `IA3`; only `LORA` and `LSLORA` adapters are supported");
    refused(
        "{\"peft_type\":\"LORA\",\n\"r\":\"8\"}",
        "invalid type: string \"8\", expected usize at line 2 column 7",
    );
    refused(
        r#"{"peft_type":"LORA","bias":"some"}"#,
        "unknown variant `some`, expected one of `none`, `all`, `lora_only` at line 1 column 33",
    );
    refused(
        r#"{"peft_type":"LORA","rank_pattern":[]}"#,
        "invalid type: sequence, expected an object at line 1 column 35",
    );
    let range = "an alpha must be a number from -1000000 to 1000000";
    refused(
        r#"{"peft_type":"LORA","lora_alpha":2e6}"#,
        &format!("sets alpha 2000000 in `lora_alpha`; {range}"),
    );
    let pattern = r#"{"peft_type":"LORA","alpha_pattern":{"q_proj":-1e7}}"#;
    refused(pattern, &format!("sets alpha -10000000 in `q_proj`; {range}"));
    refused(r#"{"peft_type":"LORA","r":0}"#, "sets rank 0 in `r`; a rank must be at least 1");
    refused(
        r#"{"peft_type":"LORA","rank_pattern":{"q_proj":0}}"#,
        "sets rank 0 in `q_proj`; a rank must be at least 1",
    );
}

#[test]
fn the_first_matching_pattern_in_file_order_wins() {
    let config = read(
        r#"{"peft_type": "LORA", "r": 4, "lora_alpha": 8,
            "rank_pattern": {"layers.1.q_proj": 32, "q_proj": 16, "a_proj": 2},
            "alpha_pattern": {"z.*": 1, "q_proj": 64}}"#,
    )
    .unwrap();
    let scales = config.module_scales().unwrap();
    assert_eq!(scales.rank_for("model.layers.1.q_proj"), 32);
    assert_eq!(scales.rank_for("model.layers.11.q_proj"), 16);
    assert_eq!(scales.rank_for("model.layers.1.v_proj"), 4);
    assert_eq!(scales.alpha_for("model.layers.1.q_proj"), 64.0);
    assert_eq!(scales.scaling_for("model.layers.1.q_proj"), 2.0);
    assert_eq!(scales.scaling_for("v_proj"), 2.0);
    let rank_stabilized = AdapterConfig { use_rslora: true, ..config };
    assert_eq!(rank_stabilized.module_scales().unwrap().scaling_for("v_proj"), 4.0);
}

#[test]
fn a_pattern_that_is_not_a_regex_is_refused_when_it_is_used() {
    let config = read(r#"{"peft_type": "LORA", "rank_pattern": {"(": 4}}"#).unwrap();
    assert_eq!(config.module_scales().unwrap_err().key, "(");
}

#[test]
fn the_written_text_is_the_minimal_set_as_peft_lays_it_out() {
    let mut config = AdapterConfig::new(16, 32.0, &["q_proj".to_string(), "v_proj".to_string()]);
    config.base_model_name_or_path = Some("some/model".to_string());
    config.rank_pattern = vec![("v_proj".to_string(), 4), ("q_proj".to_string(), 2)];
    config.alpha_pattern = vec![("v_proj".to_string(), 0.5)];
    config.other.insert("peft_version".to_string(), json!("0.21.2"));
    let expected = r#"{
  "alpha_pattern": {
    "v_proj": 0.5
  },
  "base_model_name_or_path": "some/model",
  "bias": "none",
  "fan_in_fan_out": false,
  "inference_mode": true,
  "init_lora_weights": true,
  "layers_pattern": null,
  "layers_to_transform": null,
  "lora_alpha": 32,
  "lora_dropout": 0.0,
  "modules_to_save": null,
  "peft_type": "LORA",
  "r": 16,
  "rank_pattern": {
    "q_proj": 2,
    "v_proj": 4
  },
  "revision": null,
  "target_modules": [
    "q_proj",
    "v_proj"
  ],
  "task_type": "CAUSAL_LM",
  "use_dora": false,
  "use_rslora": false
}"#;
    assert_eq!(config.to_json(), expected);
}

#[test]
fn what_is_written_reads_back() {
    let config = AdapterConfig {
        bias: Bias::LoraOnly,
        lora_dropout: 0.05,
        lora_alpha: 12.25,
        modules_to_save: Some(vec!["lm_head".to_string()]),
        use_dora: true,
        use_rslora: true,
        revision: Some("main".to_string()),
        rank_pattern: vec![("a".to_string(), 1), ("b".to_string(), 2)],
        init_lora_weights: json!("gaussian"),
        ..AdapterConfig::new(3, 1.0, &["model.layers.0.q_proj".to_string()])
    };
    assert_eq!(read(&config.to_json()).unwrap(), config);
}

#[test]
fn ls_lora_has_fields_of_its_own() {
    let config = read(r#"{"peft_type": "LSLORA", "r": 16}"#).unwrap();
    assert_eq!(config.fourier, Some(FourierConfig { reg_weight: 0.01, init_sigma: 1.0 }));
    let config = AdapterConfig {
        fourier: Some(FourierConfig { reg_weight: 0.00005, init_sigma: 0.5 }),
        ..AdapterConfig::new(16, 32.0, &["q_proj".to_string()])
    };
    let text = config.to_json();
    let expected = "  \"fourier_position\": \"after_scaling\",\n  \"fourier_reg_weight\": 5e-05,\n  \
                    \"inference_mode\": true,\n  \"init_lora_weights\": true,\n  \"init_sigma\": 0.5,\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("\"peft_type\": \"LSLORA\""), "{text}");
    assert_eq!(read(&text).unwrap(), config);
    // In the config of a LoRA these are unknown keys.
    let config = read(r#"{"peft_type": "LORA", "init_sigma": 2}"#).unwrap();
    assert_eq!((config.fourier, config.other.len()), (None, 1));
}

#[test]
fn a_fourier_function_at_another_place_is_refused() {
    refused(
        r#"{"peft_type":"LSLORA","fourier_position":"between"}"#,
        "applies its Fourier function at `between`; only `after_scaling` is supported",
    );
}

#[test]
fn settings_that_change_the_computation_are_listed() {
    let variants = |text: &str| -> Vec<String> {
        let config = read(text).unwrap();
        config.unsupported().iter().map(|found| found.key.to_string()).collect()
    };
    assert!(
        variants(
            r#"{"peft_type":"LORA","use_qalora":false,"qalora_group_size":16,"lora_bias":false,"loftq_config":{},
                "alora_invocation_tokens":null,"target_parameters":[],"init_lora_weights":"gaussian"}"#
        )
        .is_empty()
    );
    assert_eq!(
        variants(
            r#"{"peft_type":"LORA","use_qalora":true,"lora_bias":true,"trainable_token_indices":[1],
                "init_lora_weights":"pissa_niter_4"}"#
        ),
        ["lora_bias", "trainable_token_indices", "use_qalora", "init_lora_weights"]
    );
    assert_eq!(
        variants(
            r#"{"peft_type":"LSLORA","use_dora":true,"modules_to_save":["lm_head"],"fan_in_fan_out":true,
                "megatron_config":{"a":1}}"#
        ),
        ["megatron_config", "fan_in_fan_out", "use_dora"]
    );
    assert!(
        variants(r#"{"peft_type":"LORA","use_dora":true,"use_rslora":true,"modules_to_save":[]}"#).is_empty()
    );
}
