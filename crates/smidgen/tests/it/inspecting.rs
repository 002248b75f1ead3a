//! `inspect` from outside: adapters of every kind, a run and a model, whole as they are printed.
//!
//! Snapshots are of committed fixtures and of adapters made from them; `UPDATE_EXPECT=1 cargo test` rewrites them.

use crate::scratch::Scratch;
use expect_test::{Expect, expect};
use smidgen_formats::element::Element;
use smidgen_formats::peft::{
    AdapterConfig, AdapterFile, AdapterKey, AdapterTensor, FourierConfig, write_adapter,
};

#[track_caller]
fn check(scratch: &Scratch, arguments: &[&str], expected: Expect) {
    let ended = scratch.run(&[&["inspect"][..], arguments].concat());
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    assert!(ended.stdout.lines().all(|line| line.chars().count() <= 80), "{}", ended.stdout);
    expected.assert_eq(&ended.stdout);
}

/// The fixture's adapter with more tensors beside A and B, as another kind.
fn write_kind(
    scratch: &Scratch,
    name: &str,
    change: impl FnOnce(&mut AdapterConfig),
    more: impl Fn(&str, usize) -> Vec<(AdapterKey, Vec<usize>, Vec<f32>)>,
) {
    let file = AdapterFile::open(&scratch.path("adapter")).unwrap();
    let mut config = file.config().clone();
    change(&mut config);
    let mut tensors: Vec<(AdapterTensor, Vec<u8>)> = Vec::new();
    for (key, tensor) in file.tensors() {
        let mut bytes = vec![0; tensor.bytes() as usize];
        tensor.read_at(0, &mut bytes).unwrap();
        if let AdapterKey::LoraB(path) = &key {
            for (key, shape, values) in more(path, tensor.shape()[0]) {
                let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                tensors.push((AdapterTensor { key, element: Element::F32, shape }, bytes));
            }
        }
        let (element, shape) = (tensor.element(), tensor.shape().to_vec());
        tensors.push((AdapterTensor { key, element, shape }, bytes));
    }
    let listed: Vec<AdapterTensor> = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    write_adapter(&scratch.path(name), &config, &listed, |i, out| out.write_all(&tensors[i].1)).unwrap();
}

#[test]
fn a_lora() {
    let scratch = Scratch::new();
    check(
        &scratch,
        &["adapter"],
        expect![[r#"
            lora adapter in `adapter`
              base         model
              rank         6
              alpha        9
              scale        1.5
              modules      14 in 2 layers: mlp.down_proj, mlp.gate_proj, mlp.up_proj,
                           self_attn.k_proj, self_attn.o_proj, self_attn.q_proj,
                           self_attn.v_proj
              parameters   8,640
              tensors      33.75 KiB, f32

              layer  module       ‖A‖     ‖B‖  ‖s·B·A‖
                  0  down_proj  1.436  0.8591   0.7443
                  0  gate_proj  1.476   1.005   0.8914
                  0  up_proj    1.395   1.015   0.8690
                  0  k_proj     1.420  0.6728   0.5888
                  0  o_proj     1.428  0.8873   0.7570
                  0  q_proj     1.429   1.012   0.8894
                  0  v_proj     1.359  0.6887   0.5699
                  1  down_proj  1.394  0.8456   0.7128
                  1  gate_proj  1.403   1.026   0.8773
                  1  up_proj    1.439   1.001   0.8821
                  1  k_proj     1.378  0.6739   0.5585
                  1  o_proj     1.379  0.8471   0.7160
                  1  q_proj     1.431  0.9804   0.8580
                  1  v_proj     1.508  0.6946   0.6162
        "#]],
    );
    scratch.write("run/adapter/adapter_config.json", scratch.read("adapter/adapter_config.json"));
    scratch.write("run/adapter/adapter_model.safetensors", scratch.read("adapter/adapter_model.safetensors"));
    let of_run = scratch.run(&["inspect", "run"]).stdout;
    assert_eq!(of_run.replace("run/adapter", "adapter"), scratch.run(&["inspect", "adapter"]).stdout);
}

#[test]
fn a_dora_beside_its_base() {
    let scratch = Scratch::new();
    write_kind(
        &scratch,
        "dora",
        |config| config.use_dora = true,
        |path, rows| vec![(AdapterKey::LoraMagnitude(path.to_string()), vec![rows], vec![0.7; rows])],
    );
    check(
        &scratch,
        &["dora", "--base", "model"],
        expect![[r#"
            dora adapter in `dora`
              base         model
              rank         6
              alpha        9
              scale        1.5
              modules      14 in 2 layers: mlp.down_proj, mlp.gate_proj, mlp.up_proj,
                           self_attn.k_proj, self_attn.o_proj, self_attn.q_proj,
                           self_attn.v_proj
              parameters   9,344
              tensors      36.50 KiB, f32

              layer  module       ‖A‖     ‖B‖  ‖s·B·A‖  mean Δm   max Δm
                  0  down_proj  1.436  0.8591   0.7443  44.59 %  53.23 %
                  0  gate_proj  1.476   1.005   0.8914  45.60 %  56.40 %
                  0  up_proj    1.395   1.015   0.8690  44.81 %  55.12 %
                  0  k_proj     1.420  0.6728   0.5888  46.63 %  52.70 %
                  0  o_proj     1.428  0.8873   0.7570  44.67 %  53.85 %
                  0  q_proj     1.429   1.012   0.8894  45.36 %  57.15 %
                  0  v_proj     1.359  0.6887   0.5699  45.62 %  58.82 %
                  1  down_proj  1.394  0.8456   0.7128  46.22 %  52.45 %
                  1  gate_proj  1.403   1.026   0.8773  45.94 %  56.56 %
                  1  up_proj    1.439   1.001   0.8821  45.49 %  55.07 %
                  1  k_proj     1.378  0.6739   0.5585  46.40 %  54.11 %
                  1  o_proj     1.379  0.8471   0.7160  45.63 %  54.80 %
                  1  q_proj     1.431  0.9804   0.8580  45.54 %  55.01 %
                  1  v_proj     1.508  0.6946   0.6162  44.25 %  53.52 %
        "#]],
    );
    let alone = scratch.run(&["inspect", "dora"]).stdout;
    let heading = alone.lines().find(|line| line.contains("‖A‖")).unwrap();
    assert!(heading.ends_with("‖m‖"), "{heading}");
    let said = scratch.refused(1, &["inspect", "dora", "--base", "adapter"], &["holds an adapter"]);
    assert!(said.contains("give the folder of the base model"), "{said}");
}

#[test]
fn an_ls_lora_with_its_coefficients() {
    let scratch = Scratch::new();
    write_kind(
        &scratch,
        "ls",
        |config| config.fourier = Some(FourierConfig::default()),
        |path, rows| {
            let step = rows as f32 / 4096.0;
            let coefficients = vec![step, 1.0 - step, -step / 2.0, 0.001];
            vec![
                (AdapterKey::FourierWeight(path.to_string()), vec![4], coefficients),
                (AdapterKey::FourierSigma(path.to_string()), vec![], vec![1.0 + step]),
            ]
        },
    );
    check(
        &scratch,
        &["ls"],
        expect![[r#"
            ls-lora adapter in `ls`
              base         model
              rank         6
              alpha        9
              scale        1.5
              modules      14 in 2 layers: mlp.down_proj, mlp.gate_proj, mlp.up_proj,
                           self_attn.k_proj, self_attn.o_proj, self_attn.q_proj,
                           self_attn.v_proj
              parameters   8,710
              tensors      34.02 KiB, f32

              layer  module       ‖A‖     ‖B‖  ‖s·B·A‖
                  0  down_proj  1.436  0.8591   0.7443
                  0  gate_proj  1.476   1.005   0.8914
                  0  up_proj    1.395   1.015   0.8690
                  0  k_proj     1.420  0.6728   0.5888
                  0  o_proj     1.428  0.8873   0.7570
                  0  q_proj     1.429   1.012   0.8894
                  0  v_proj     1.359  0.6887   0.5699
                  1  down_proj  1.394  0.8456   0.7128
                  1  gate_proj  1.403   1.026   0.8773
                  1  up_proj    1.439   1.001   0.8821
                  1  k_proj     1.378  0.6739   0.5585
                  1  o_proj     1.379  0.8471   0.7160
                  1  q_proj     1.431  0.9804   0.8580
                  1  v_proj     1.508  0.6946   0.6162

              layer  module         a0      a1       a2      a3  sigma  deviation  non-lin
                  0  down_proj  0.0117  0.9883  -0.0059  0.0010  1.012    7.75e-5   0.0069
                  0  gate_proj  0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  0  up_proj    0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  0  k_proj     0.0078  0.9922  -0.0039  0.0010  1.008    3.46e-5   0.0049
                  0  o_proj     0.0117  0.9883  -0.0059  0.0010  1.012    7.75e-5   0.0069
                  0  q_proj     0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  0  v_proj     0.0078  0.9922  -0.0039  0.0010  1.008    3.46e-5   0.0049
                  1  down_proj  0.0117  0.9883  -0.0059  0.0010  1.012    7.75e-5   0.0069
                  1  gate_proj  0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  1  up_proj    0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  1  k_proj     0.0078  0.9922  -0.0039  0.0010  1.008    3.46e-5   0.0049
                  1  o_proj     0.0117  0.9883  -0.0059  0.0010  1.012    7.75e-5   0.0069
                  1  q_proj     0.0156  0.9844  -0.0078  0.0010  1.016    1.38e-4   0.0088
                  1  v_proj     0.0078  0.9922  -0.0039  0.0010  1.008    3.46e-5   0.0049

              0 of 14 modules above 0.01 in non-linearity, |a2|+|a3|
              strongest: 0 gate_proj 0.0088, 0 up_proj 0.0088, 0 q_proj 0.0088
        "#]],
    );
    let ended = scratch.run(&["inspect", "ls", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["kind"], "ls-lora");
    assert_eq!(report["fourier"].as_array().unwrap().len(), 14);
    assert_eq!(report["fourier"][0]["coefficients"].as_array().unwrap().len(), 4);
}

#[test]
fn an_adapter_as_json() {
    let scratch = Scratch::new();
    let ended = scratch.run(&["inspect", "adapter", "--json"]);
    let mut report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let modules = report["modules"].as_array_mut().unwrap();
    modules.truncate(1);
    for norm in ["a_norm", "b_norm", "product_norm"] {
        // Four digits: the last ones depend on the order of sums.
        modules[0][norm] = format!("{:.4}", modules[0][norm].as_f64().unwrap()).into();
    }
    expect![[r#"
        {
          "path": "adapter",
          "kind": "lora",
          "base": "model",
          "bias": "none",
          "parameters": 8640,
          "bytes": 34560,
          "elements": {
            "F32": 28
          },
          "biases": 0,
          "modules": [
            {
              "module": "model.layers.0.mlp.down_proj",
              "layer": 0,
              "rank": 6,
              "alpha": 9.0,
              "scale": 1.5,
              "shape": [
                48,
                64
              ],
              "parameters": 672,
              "a_norm": "1.4364",
              "b_norm": "0.8591",
              "product_norm": "0.7443"
            }
          ]
        }"#]]
    .assert_eq(&format!("{report:#}"));
}

#[test]
fn a_gguf_file() {
    let scratch = Scratch::of("gguf-llama");
    check(
        &scratch,
        &["model.gguf"],
        expect![[r#"
        model in `model.gguf`
          architecture LlamaForCausalLM (llama)
          layers       2
          hidden       64
          inner        96
          heads        4
          kv heads     2
          head size    16
          vocabulary   105
          positions    128
          files        1

          type   tensors  elements       bytes
          bf16         2    10,240   20.00 KiB
          f16          3    14,912   29.13 KiB
          f32          6     4,416   17.25 KiB
          q4_0         2    10,240    5.63 KiB
          q4_1         2     8,192    5.00 KiB
          q5_0         2     8,192    5.50 KiB
          q5_1         1     4,096    3.00 KiB
          q8_0         3    14,912   15.47 KiB
          total       21    75,200  100.97 KiB
    "#]],
    );
}

#[test]
fn a_model() {
    let scratch = Scratch::of("llama-f16-some-layers");
    check(
        &scratch,
        &["model"],
        expect![[r#"
        model in `model`
          architecture LlamaForCausalLM (llama)
          layers       3
          hidden       48
          inner        72
          heads        6
          kv heads     3
          head size    8
          vocabulary   173
          positions    128
          files        1

          type   tensors  elements       bytes
          f16         30    68,784  134.34 KiB
          total       30    68,784  134.34 KiB
    "#]],
    );
    let ended = scratch.run(&["inspect", "model", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    expect![[r#"
        {
          "path": "model",
          "architecture": "LlamaForCausalLM (llama)",
          "sizes": {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 173,
            "max_position_embeddings": 128
          },
          "files": 1,
          "elements": {
            "f16": {
              "tensors": 30,
              "elements": 68784,
              "bytes": 137568
            }
          },
          "total": {
            "tensors": 30,
            "elements": 68784,
            "bytes": 137568
          }
        }"#]]
    .assert_eq(&format!("{report:#}"));
    scratch.write("bare/config.json", "{}");
    check(
        &scratch,
        &["bare"],
        expect![[r#"
        model in `bare`
          architecture not named
          weights      none
    "#]],
    );
}

#[test]
fn what_is_none_of_them() {
    let scratch = Scratch::new();
    scratch.write("empty/notes.txt", "");
    scratch.refused(1, &["inspect", "empty"], &["`empty` is not the folder of an adapter, a run or a model"]);
    scratch.refused(1, &["inspect", "absent"], &["`absent` does not exist"]);
    scratch.refused(1, &["inspect", "data.jsonl"], &["`data.jsonl` is not a folder"]);
}

/// A title, a colour, a deletion in 8 bits, reversed text, a bell, DEL and an isolate, as a name could have them.
const HOSTILE: &str = "\u{1b}]0;t\u{7}\u{1b}[1;31mx\u{9b}2J\u{202e}txt\u{7f}\u{2066}\u{8}y";

/// Runs a command whose names come from hostile files: it prints none of their control characters, escapes them, and
/// its JSON stays JSON. Returns what it printed.
#[track_caller]
fn escaped(scratch: &Scratch, arguments: &[&str]) -> String {
    let ended = scratch.run(arguments);
    let both = ended.stdout.clone() + &ended.stderr;
    let is_hidden = |c: char| {
        (c.is_control() && c != '\n') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!both.contains(is_hidden), "{arguments:?}: {both:?}");
    let is_escaped = both.contains("u{202e}") || both.contains("u202e");
    assert!(is_escaped, "{arguments:?} does not show the name: {both}");
    if arguments.contains(&"--json") && !ended.stdout.is_empty() {
        let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        assert!(json.to_string().contains('\u{202e}'), "{json}");
    }
    both
}

#[test]
fn no_field_of_a_model_reaches_the_terminal_raw() {
    for (key, value) in [
        ("architectures", serde_json::json!([HOSTILE])),
        ("model_type", HOSTILE.into()),
        ("quantization_config", serde_json::json!({"quant_method": HOSTILE})),
    ] {
        let scratch = Scratch::new();
        let mut config = scratch.json("model/config.json");
        config[key] = value;
        scratch.write("model/config.json", config.to_string());
        escaped(&scratch, &["inspect", "model"]);
        if key != "quantization_config" {
            escaped(&scratch, &["inspect", "model", "--json"]);
        }
        if key != "architectures" {
            escaped(&scratch, &["plan", "recipe.toml"]);
        }
    }
    // The folder, a tensor's name, a shard's name and a broken file.
    let scratch = Scratch::new();
    std::fs::rename(scratch.path("model"), scratch.path(HOSTILE)).unwrap();
    let folder: &str = HOSTILE;
    for arguments in [&["inspect", folder][..], &["inspect", folder, "--json"]] {
        escaped(&scratch, arguments);
    }
    let index = |tensor: &str, shard: &str| {
        let map = serde_json::json!({"weight_map": {tensor: shard}});
        scratch.write("model/model.safetensors.index.json", map.to_string());
        scratch.write("model/config.json", "{}");
    };
    for (tensor, shard) in [(HOSTILE, "../x"), ("a", HOSTILE), ("a", &format!("../{HOSTILE}"))] {
        index(tensor, shard);
        escaped(&scratch, &["inspect", "model"]);
    }
    std::os::unix::fs::symlink(format!("../{HOSTILE}"), scratch.path("model/tokenizer.json")).unwrap();
    escaped(&scratch, &["inspect", "model"]);
}

#[test]
fn no_field_of_an_adapter_reaches_the_terminal_raw() {
    let config = "adapter/adapter_config.json";
    for (key, is_refused) in [
        ("base_model_name_or_path", false),
        ("peft_type", true),
        ("bias", true),
        ("target_modules", true),
        ("task_type", true),
    ] {
        let scratch = Scratch::new();
        let mut json = scratch.json(config);
        json[key] = HOSTILE.into();
        scratch.write(config, json.to_string());
        let commands: &[&[&str]] = if is_refused {
            &[&["inspect", "adapter"]]
        } else {
            &[&["inspect", "adapter"], &["inspect", "adapter", "--json"], &["merge", "adapter", "-o", "m"]]
        };
        for arguments in commands {
            // `inspect` may have no use for the key.
            if !(scratch.run(arguments).stdout.contains("lora adapter") && is_refused) {
                drop(escaped(&scratch, arguments));
            }
        }
    }
    // A tensor of a module that has such a name.
    let scratch = Scratch::new();
    write_kind(
        &scratch,
        "renamed",
        |_| {},
        |path, _| vec![(AdapterKey::Foreign(format!("{path}.{HOSTILE}")), vec![1], vec![0.0])],
    );
    escaped(&scratch, &["inspect", "renamed"]);
}
