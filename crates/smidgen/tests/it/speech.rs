//! Runs on sound, through the program: a tiny Phi-4-multimodal with random weights, in both layouts of its checkpoint.
//!
//! What the encoder computes is held against transformers elsewhere; here it is that every way to the same math gives the
//! same losses, that what is encoded once is read back, and that wrong rows are refused by name.

use crate::scratch::{Scratch, fixture};
use serde_json::{Value, json};
use smidgen_compile::model::read_spec;
use smidgen_formats::element::Element;
use smidgen_formats::safetensors::write::{TensorSpec, pytorch_metadata, write_safetensors};
use smidgen_ir::Extent;

const AUDIO_TOKEN: i64 = 300;
pub const ENCODER: &str = "adapter.targets=[\"qkv_proj\",\"o_proj\",\"encoders.0.self_attn.q_proj\",\"feed_forward_out.down_proj\"]";

fn config() -> Value {
    json!({
        "model_type": "phi4_multimodal", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "dtype": "float32",
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2,
            "nemo_conv_channels": 8, "bias_max_distance": 5, "audio_token_id": AUDIO_TOKEN, "kernel_size": 3,
        },
    })
}

/// The published spelling of the same config.
fn published_config() -> Value {
    let mut config = config();
    config["model_type"] = json!("phi4mm");
    let object = config.as_object_mut().unwrap();
    object.remove("audio_config");
    config["audio_token_id"] = json!(AUDIO_TOKEN);
    config["speech_lora"] = json!({"r": 3, "lora_alpha": 6});
    config["audio_processor"] = json!({"config": {
        "attention_dim": 16, "linear_units": 24, "num_blocks": 2, "attention_heads": 2, "kernel_size": 3,
        "nemo_conv_settings": {"conv_channels": 8},
        "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 5},
    }});
    config
}

/// A number for each element of a tensor, the same for the same name.
fn numbers(name: &str, elements: usize) -> Vec<f32> {
    let mut state = name.bytes().fold(7u32, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
    let center = match name {
        name if name.ends_with("norm.weight") || name.ends_with("norm_att.weight") => 1.0,
        name if name.ends_with("global_invstd") => 0.2,
        _ => 0.0,
    };
    // The head is the embedding: with small numbers no token could be likely.
    let width = if name.ends_with("embed_tokens.weight") { 1.0 } else { 0.2 };
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * width
    };
    (0..elements).map(|_| if center == 0.2 { center } else { center + next() }).collect()
}

/// Names, sizes and numbers of all tensors that the config describes.
fn tensors(config: &Value) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let spec = read_spec(config).unwrap();
    let all = spec.tensors().into_iter().chain(spec.audio.unwrap().tensors());
    let sized = all.map(|tensor| {
        let shape: Vec<usize> = tensor.shape.0.iter().map(|dim| dim.at(&Extent::default())).collect();
        let numbers = numbers(&tensor.name, shape.iter().product());
        (tensor.name, shape, numbers)
    });
    sized.collect()
}

pub fn write_tensors(scratch: &Scratch, config: &Value, tensors: &[(String, Vec<usize>, Vec<f32>)]) {
    scratch.write("model/config.json", config.to_string());
    let element = Element::F32;
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, shape, _)| TensorSpec { name: name.clone(), element, shape: shape.clone() })
        .collect();
    write_safetensors(&scratch.path("model/model.safetensors"), &pytorch_metadata(), &specs, |index, out| {
        tensors[index].2.iter().try_for_each(|number| out.write_all(&number.to_le_bytes()))
    })
    .unwrap();
}

/// The encoder is part of the checkpoint, under the names of either layout.
#[test]
fn a_checkpoint_of_random_weights_has_its_encoder() {
    for config in [config(), published_config()] {
        let scratch = Scratch::of("llama-gqa-tied");
        scratch.write("shape/config.json", config.to_string());
        let ended = scratch.run(&["bench", "--model", "shape", "--write-model", "written"]);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
        let planned = scratch.run(&["plan", "recipe.toml", "model.path=written"]);
        assert_eq!(planned.code, Some(0), "{}: {}", config["model_type"], planned.stderr);
    }
}

/// A clip of a saw tooth.
fn wav(samples: usize, pitch: usize) -> Vec<u8> {
    wav_of((0..samples).map(|index| ((index * pitch % 400) as i16 - 200) * 40 + (index % 7) as i16))
}

/// A WAV file of 16 kHz.
pub fn wav_of(samples: impl Iterator<Item = i16>) -> Vec<u8> {
    let data: Vec<u8> = samples.flat_map(i16::to_le_bytes).collect();
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + data.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    bytes.extend(16_000u32.to_le_bytes());
    bytes.extend(32_000u32.to_le_bytes());
    bytes.extend(b"\x02\0\x10\0data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}

/// Embeddings of a clip.
fn embeddings(samples: usize) -> usize {
    ((samples - 400) / 160 + 1).div_ceil(8)
}

fn row(samples: usize, clip: &str, words: i64) -> Value {
    let mut ids = vec![5, 6];
    ids.extend(std::iter::repeat_n(AUDIO_TOKEN, embeddings(samples)));
    let heard = ids.len();
    ids.extend((0..6).map(|index| 10 + (words * 7 + index * 3) % 200));
    let labels: Vec<i64> =
        ids.iter().enumerate().map(|(at, id)| if at < heard { -100 } else { *id }).collect();
    json!({"input_ids": ids, "labels": labels, "audio": clip})
}

const CLIPS: [usize; 4] = [4_000, 9_130, 5_555, 12_000];

/// A small model that hears, and four rows with a clip each.
pub fn scratch() -> Scratch {
    let scratch = Scratch::new();
    std::fs::remove_dir_all(scratch.path("model")).unwrap();
    write_tensors(&scratch, &config(), &tensors(&config()));
    let mut rows = String::new();
    for (index, samples) in CLIPS.into_iter().enumerate() {
        let clip = format!("clips/{index}.wav");
        scratch.write(&clip, wav(samples, 3 + 5 * index));
        rows += &format!("{}\n", row(samples, &clip, index as i64));
    }
    scratch.write("data.jsonl", rows);
    scratch
}

fn assert_close(one: &[f64], other: &[f64], apart: f64) {
    assert_eq!(one.len(), other.len());
    for (one, other) in one.iter().zip(other) {
        assert!((one - other).abs() < apart * one.abs(), "{one} against {other}");
    }
}

#[test]
fn the_encoder_in_the_graph_hears_what_was_encoded_once() {
    let scratch = scratch();
    let once = scratch.train("once", &["train.steps=1"]);
    assert!(once.stderr.contains("encoding 4 clips once"), "{}", once.stderr);
    scratch.train("graph", &["train.steps=1", ENCODER]);
    // Fresh adapters change nothing before the first update.
    assert_close(&scratch.losses("once"), &scratch.losses("graph"), 1e-6);
    let config = scratch.json("graph/adapter/adapter_config.json");
    let targets = config["target_modules"].to_string();
    assert!(targets.contains("encoders.0.self_attn.q_proj") && targets.contains("qkv_proj"), "{targets}");
    assert!(
        !scratch.json("once/adapter/adapter_config.json")["target_modules"]
            .to_string()
            .contains("\"o_proj\"")
    );
}

#[test]
fn memory_changes_nothing_that_is_heard() {
    let scratch = scratch();
    scratch.train("plain", &[ENCODER]);
    scratch.train("recomputed", &[ENCODER, "memory.recompute=all", "memory.threads=1"]);
    assert_eq!(scratch.adapter("plain"), scratch.adapter("recomputed"));
    scratch.train("split", &[ENCODER, "memory.micro_tokens=32"]);
    assert_close(&scratch.losses("plain"), &scratch.losses("split"), 1e-5);
    scratch.train("deep", &["memory.order=depth", "memory.micro_tokens=32"]);
    scratch.train("broad", &["memory.order=breadth", "memory.micro_tokens=32"]);
    assert_eq!(scratch.adapter("deep"), scratch.adapter("broad"));
    for (part, own) in [("encoder", ENCODER), ("projector", "adapter.train=[\"projector\"]")] {
        let [deep, broad] = ["depth", "breadth"].map(|order| {
            let output = format!("{part}-{order}");
            scratch.train(&output, &[own, &format!("memory.order={order}"), "memory.micro_tokens=32"]);
            scratch.adapter(&output)
        });
        assert!(deep == broad, "{part}");
    }
    scratch.train("dropped", &[ENCODER, "adapter.dropout=0.1"]);
    assert!(scratch.losses("dropped").iter().all(|loss| loss.is_finite()));
}

/// Quantized decoders hear the same: the encoder is not quantized.
#[test]
fn a_decoder_in_4_bits_hears() {
    let scratch = scratch();
    scratch.train("plain", &["train.steps=2"]);
    scratch.train("once", &["train.steps=2", "model.base=nf4"]);
    scratch.train("graph", &["train.steps=2", "model.base=nf4", ENCODER]);
    assert_close(&scratch.losses("once")[..1], &scratch.losses("graph")[..1], 1e-6);
    assert_close(&scratch.losses("plain"), &scratch.losses("once"), 0.2);
    assert_ne!(scratch.losses("plain"), scratch.losses("once"));
}

#[test]
fn encoded_clips_are_read_back() {
    let scratch = scratch();
    scratch.train("one", &["data.eval=data.jsonl", "train.eval_every=3"]);
    let again = scratch.train("two", &["data.eval=data.jsonl", "train.eval_every=3"]);
    assert!(!again.stderr.contains("encoding"), "{}", again.stderr);
    assert_eq!(scratch.adapter("one"), scratch.adapter("two"));
    // The program that evaluates hears the same.
    let in_training = scratch.metrics("one").iter().rev().find_map(|row| row.get("eval_loss")?.as_f64());
    let ended = scratch.run(&["eval", "one", "--json"]);
    let found: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
    let adapter = found["adapter"]["eval_loss"].as_f64().or(found["adapter"]["loss"].as_f64());
    assert_close(&[in_training.unwrap()], &[adapter.unwrap_or_else(|| panic!("{found}"))], 1e-6);
    // A damaged file of the cache is written again.
    let folder = scratch.cache().join("audio");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[40] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let mended = scratch.train("three", &[]);
    assert!(mended.stderr.contains("encoding 4 clips once"), "{}", mended.stderr);
    assert_eq!(scratch.losses("one"), scratch.losses("three"));
}

/// The published layout with the adapter for speech inside: merged into the base by default, or trained further.
#[test]
fn the_published_layout_is_the_same_model() {
    let scratch = scratch();
    scratch.train("own", &[]);
    let mut stored = Vec::new();
    let audio = "model.embed_tokens_extend.audio_embed.";
    for (name, shape, numbers) in tensors(&config()) {
        let Some(module) = name.strip_suffix("_proj.weight").filter(|name| name.starts_with("model.layers."))
        else {
            let name = match name.strip_prefix(audio) {
                None => name,
                Some(rest) => {
                    let rest = rest
                        .replace(".gate_up_proj.", ".net.0.linear.")
                        .replace("encoder.encoders", "encoders");
                    let rest = if rest.starts_with("encoders.") {
                        rest.replace(".down_proj.", ".net.2.").replace("o_proj", "linear_out")
                    } else {
                        rest
                    };
                    let rest = ["q", "k", "v"].iter().fold(rest, |rest, part| {
                        rest.replace(&format!("self_attn.{part}_proj"), &format!("self_attn.linear_{part}"))
                    });
                    let rest = rest.replace("up_proj_for_speech", "audio_projection.speech.0");
                    let rest = rest.replace("down_proj_for_speech", "audio_projection.speech.2");
                    format!(
                        "{audio}{}",
                        rest.replacen("encoders", "encoder.encoders", 1)
                            .replace("encoder.encoder.", "encoder.")
                    )
                }
            };
            stored.push((name, shape, numbers));
            continue;
        };
        let module = format!("{module}_proj");
        for (which, sizes) in [("A", vec![3, shape[1]]), ("B", vec![shape[0], 3])] {
            let name = format!("{module}.lora_{which}.speech.weight");
            let factor =
                if which == "B" { vec![0.0; shape[0] * 3] } else { self::numbers(&name, 3 * shape[1]) };
            stored.push((name, sizes, factor));
        }
        stored.push((format!("{module}.base_layer.weight"), shape, numbers));
    }
    write_tensors(&scratch, &published_config(), &stored);
    scratch.train("published", &[]);
    assert_eq!(scratch.losses("own"), scratch.losses("published"));
    for (name, _, numbers) in &mut stored {
        if name.contains("lora_B.speech") {
            *numbers = self::numbers(name, numbers.len());
        }
    }
    write_tensors(&scratch, &published_config(), &stored);
    scratch.train("merged", &["train.steps=1"]);
    let further = ["train.steps=1", "adapter.init=builtin:speech", "adapter.rank=16", "adapter.alpha=32"];
    scratch.train("further", &further);
    assert_close(&scratch.losses("merged"), &scratch.losses("further"), 1e-5);
    let apart = (scratch.losses("merged")[0] - scratch.losses("published")[0]).abs();
    assert!(apart > 1e-3, "the adapter for speech changes the loss by {apart}");
    assert_eq!(scratch.json("further/adapter/adapter_config.json")["r"], 3);
    let rank = "`adapter.init = builtin:speech` is a LoRA of rank 3";
    scratch.train_refused(2, &["adapter.init=builtin:speech", "adapter.rank=5"], &[rank]);
    // Merged into what the adapter inside is added to, or in place of it.
    for run in ["merged", "further"] {
        let arguments = ["merge", run, "--base", "model", "--check", "--json", "--output"];
        let whole = format!("whole-{run}");
        let ended = scratch.run(&[&arguments[..], &[&whole]].concat());
        let told: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
        let apart = told["logits_difference"]["relative"].as_f64().unwrap();
        assert!(apart < 1e-5, "{run}: {apart}");
        let eval = |model: &str| {
            let model = format!("model.path={model}");
            let ended = scratch.run(&["eval", run, "--json", "--base", "data.eval=data.jsonl", &model]);
            let found: Value =
                serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
            found["base"]["loss"].as_f64().unwrap()
        };
        let ended = scratch.run(&["eval", run, "--json", "data.eval=data.jsonl"]);
        let found: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
        // The base of a run that continues the adapter inside is without it; a merged model is with it.
        if run == "merged" {
            assert_close(&[eval(&whole)], &[found["adapter"]["loss"].as_f64().unwrap()], 1e-5);
        }
    }
}

/// Norms, embedding, head and projector are trained next to the adapter, saved with it, and used with it.
#[test]
fn parts_of_the_base_are_trained_next_to_an_adapter() {
    let scratch = scratch();
    let parts = "adapter.train=[\"projector\",\"norms\",\"embed_tokens\"]";
    let constant = ["train.schedule=constant", "train.warmup=0", "train.lr=1e-3", parts];
    let with = |more: &[&'static str]| [&constant[..], more].concat();
    let ended = scratch.train("run", &with(&["train.steps=4", "train.save_every=2", "data.eval=data.jsonl"]));
    assert!(ended.stderr.contains("encoding 4 clips once"), "{}", ended.stderr);
    scratch.train("plain", &["train.schedule=constant", "train.warmup=0", "train.lr=1e-3", "train.steps=4"]);
    assert_close(&scratch.losses("run")[..1], &scratch.losses("plain")[..1], 1e-6);
    assert!(scratch.losses("run")[3] < scratch.losses("plain")[3], "more is trained, and more is learned");

    let config = scratch.json("run/adapter/adapter_config.json");
    let saved: Vec<&str> =
        config["modules_to_save"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    for module in ["lm_head", "model.embed_tokens", "model.norm", "model.layers.1.input_layernorm"] {
        assert!(saved.contains(&module), "{module}: {saved:?}");
    }
    assert!(saved.contains(&"model.embed_tokens_extend.audio_embed.up_proj_for_speech"), "{saved:?}");
    let shown = scratch.run(&["inspect", "run"]);
    assert_eq!(shown.code, Some(0), "{}", shown.stderr);

    // A run that was stopped and resumed has the same bytes.
    scratch.train("long", &with(&["train.steps=6", "data.eval=data.jsonl"]));
    let resume =
        ["train", "recipe.toml", "--resume", "output.dir=run", "train.steps=6", "train.save_every=2"];
    let ended = scratch.run(&[&resume[..], &["data.eval=data.jsonl"], &constant].concat());
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    assert_eq!(scratch.adapter("run"), scratch.adapter("long"));

    // Evaluated, merged and started from, it is the model that was trained.
    let loss = |arguments: &[&str]| {
        let ended = scratch.run(&[&["eval", "long", "--json"][..], arguments].concat());
        let found: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
        found
    };
    let trained = loss(&[])["adapter"]["loss"].as_f64().unwrap();
    let merged = scratch.run(&["merge", "long", "--base", "model", "--check", "--output", "whole"]);
    assert_eq!(merged.code, Some(0), "{}", merged.stderr);
    assert!(merged.stdout.contains("of them trained in full"), "{}", merged.stdout);
    let whole = loss(&["--base", "model.path=whole"])["base"]["loss"].as_f64().unwrap();
    assert_close(&[whole], &[trained], 1e-5);
    let begun = scratch.train("begun", &with(&["train.steps=1", "adapter.init=long/adapter"]));
    assert_eq!(begun.code, Some(0));
    let first = scratch.losses("begun")[0];
    assert!((first - trained).abs() < (first - scratch.losses("run")[0]).abs(), "{first} {trained}");

    let refused = |part: &str, words: &[&str]| {
        scratch.train_refused(2, &["output.dir=new", &format!("adapter.train=[\"{part}\"]")], words);
    };
    refused("qkv_proj", &["`adapter.train` and adapted"]);
    refused("nothing", &["`adapter.train`", "nothing", "projector"]);
    let full = ["output.dir=new", "adapter.kind=full", parts];
    scratch.train_refused(2, &full, &["`adapter.train` has no effect"]);
}

#[test]
fn a_preview_and_a_plan_say_how_much_is_heard() {
    let scratch = scratch();
    let shown = scratch.run(&["preview", "recipe.toml"]).stdout;
    assert!(shown.contains("audio 1: 0.2"), "{shown}");
    assert!(shown.contains("audio      4 clips, "), "{shown}");
    let plan = scratch.plan(&[]);
    assert!(plan["life"]["encode"]["disk"].as_u64().unwrap() > 0, "{}", plan["life"]);
}

#[test]
fn rows_that_cannot_be_heard_are_refused_by_name() {
    let scratch = scratch();
    let refused = |rows: &[Value], words: &[&str]| {
        let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
        scratch.write("bad.jsonl", lines);
        scratch.train_refused(1, &["data.train=bad.jsonl"], words);
    };
    let sound = row(CLIPS[0], "clips/0.wav", 1);
    refused(
        &[row(CLIPS[1], "clips/0.wav", 1)],
        &["bad.jsonl` line 1", "7 audio tokens", "its 1 clip needs 3"],
    );
    let mut silent = sound.clone();
    silent.as_object_mut().unwrap().remove("audio");
    refused(&[sound.clone(), silent], &["line 2", "3 audio tokens and no `audio`"]);
    refused(&[row(CLIPS[0], "clips/none.wav", 1)], &["line 1", "clips/none.wav", "cannot be read"]);
    scratch.write("clips/text.wav", "no sound at all ".repeat(99));
    refused(&[row(CLIPS[0], "clips/text.wav", 1)], &["clips/text.wav", "is not a sound file"]);
    scratch.write("clips/cut.wav", &wav(CLIPS[0], 3)[..5000]);
    refused(&[row(CLIPS[0], "clips/cut.wav", 1)], &["clips/cut.wav", "is cut off"]);
    refused(&[json!({"input_ids": [1, 2, 3], "audio": 5})], &["line 1", "`audio` must be a path"]);
    // A clip above the limit drops its row.
    let dropped = scratch.train("dropped", &["data.max_audio_seconds=0.5", "train.steps=1"]);
    assert!(dropped.stderr.contains("2 dropped because their audio is too long"), "{}", dropped.stderr);
    scratch.train_refused(1, &[ENCODER, "data.train=words.jsonl"], &["words.jsonl"]);
    scratch.write("words.jsonl", format!("{}\n", json!({"input_ids": [1, 2, 3, 4]})));
    scratch.train_refused(
        1,
        &[ENCODER, "data.train=words.jsonl"],
        &["a part of the audio encoder or projector", "no row has `audio`"],
    );
    let deaf = Scratch::new();
    deaf.write("data.jsonl", format!("{}\n", json!({"input_ids": [1, 2, 3], "audio": "a.wav"})));
    deaf.train_refused(1, &[], &["line 1", "the model's config has no audio encoder"]);
}

fn write_tokenizer(scratch: &Scratch) {
    let words =
        ["<unk>", "</s>", "what", "is", "said", "before", "after", "tone", "one", "two", "three", "?"];
    write_words(scratch, &words, AUDIO_TOKEN);
}

/// Words of a vocabulary with an audio token; ids of words are their places.
pub fn write_words(scratch: &Scratch, words: &[&str], audio_token: i64) {
    // An added token has the id behind the vocabulary.
    let fillers = (words.len() as i64..audio_token).map(|id| format!("filler{id}"));
    let words = words.iter().map(ToString::to_string).chain(fillers);
    let vocabulary: Value = words.enumerate().map(|(id, word)| (word, json!(id))).collect();
    let special = |id: i64, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false})
    };
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "decoder": null, "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [special(0, "<unk>"), special(1, "</s>"), special(audio_token, "<|sound|>")],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    });
    scratch.write("model/tokenizer.json", tokenizer.to_string());
    scratch
        .write("model/tokenizer_config.json", json!({"eos_token": "</s>", "unk_token": "<unk>"}).to_string());
}

#[test]
fn texts_have_their_clips_where_they_name_them() {
    let scratch = scratch();
    write_tokenizer(&scratch);
    let rows = [
        json!({"audio": "clips/0.wav", "prompt": "what is said ?", "completion": "tone one"}),
        json!({"audio": ["clips/0.wav", "clips/2.wav"], "prompt": "before <|audio_2|> after <|audio_1|>",
               "completion": "two"}),
        json!({"prompt": "what is said ?", "completion": "three"}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    scratch.write("rows.jsonl", lines);
    let overrides = ["data.train=rows.jsonl", "data.format=auto"];
    let shown = scratch.run(&[&["preview", "recipe.toml", "--json"][..], &overrides].concat());
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap_or_else(|_| panic!("{}", shown.stderr));
    let ids = |sample: usize| -> Vec<i64> {
        serde_json::from_value(shown["samples"][sample]["ids"].clone()).unwrap()
    };
    let sound = |tokens: usize| vec![AUDIO_TOKEN; tokens];
    let (first, second) = (embeddings(CLIPS[0]), embeddings(CLIPS[2]));
    assert_eq!(ids(0), [sound(first), vec![2, 3, 4, 11, 7, 8, 1]].concat());
    assert_eq!(ids(1), [vec![5], sound(second), vec![6], sound(first), vec![9, 1]].concat());
    assert_eq!(ids(2), [2, 3, 4, 11, 10, 1]);
    assert_eq!(shown["samples"][1]["audio"][0]["tokens"], second);
    scratch.train("heard", &overrides);
    scratch.write("wrong.jsonl", format!("{}\n", json!({"prompt": "<|audio_1|>", "completion": "one"})));
    let wrong = ["data.train=wrong.jsonl", "data.format=auto"];
    scratch.train_refused(1, &wrong, &["line 1", "`<|audio_1|>`", "has 0 clips"]);
}

/// The clips of a row are its prompt, so that its text may be empty.
#[test]
fn clips_are_in_the_turn_of_the_user() {
    let scratch = scratch();
    write_tokenizer(&scratch);
    scratch.write(
        "model/chat_template.jinja",
        "{% for m in messages %}{{ 'before ' if m.role == 'user' else 'after ' }}{{ m.content }} \
         {{ '</s>' if m.role == 'assistant' }}{% endfor %}{{ 'after ' if add_generation_prompt }}",
    );
    let row = |prompt: &str| {
        json!({"audio": "clips/0.wav", "prompt": prompt, "completion": "one"}).to_string() + "\n"
    };
    scratch.write("rows.jsonl", row("what is said ?") + &row(""));
    let overrides = ["data.train=rows.jsonl", "data.format=auto", "data.template=model"];
    let shown = scratch.run(&[&["preview", "recipe.toml", "--json"][..], &overrides].concat());
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap_or_else(|_| panic!("{}", shown.stderr));
    let sound = || vec![AUDIO_TOKEN; embeddings(CLIPS[0])];
    assert_eq!(shown["samples"][0]["ids"], json!([vec![5], sound(), vec![2, 3, 4, 11, 6, 8, 1]].concat()));
    assert_eq!(shown["samples"][1]["ids"], json!([vec![5], sound(), vec![6, 8, 1]].concat()));
}

/// Sound inside a table, as the hub stores it; a clip that two rows have is encoded once.
#[test]
fn tables_may_hold_the_sound_itself() {
    let scratch = scratch();
    write_tokenizer(&scratch);
    scratch.write("rows.parquet", std::fs::read(fixture("audio/rows.parquet")).unwrap());
    let ended = scratch.train("run", &["data.train=rows.parquet", "data.format=auto"]);
    assert!(ended.stderr.contains("encoding 1 clip once"), "{}", ended.stderr);
}

/// Four clips, the same question, and an answer for each: the decoder learns to tell them apart by what it hears.
#[test]
fn what_was_heard_in_training_is_transcribed() {
    let scratch = scratch();
    write_tokenizer(&scratch);
    let answers = ["tone one", "two before", "three", "after tone two"];
    let row = |(clip, answer): (usize, &&str)| json!({"audio": format!("clips/{clip}.wav"), "prompt": "what is said ?", "completion": format!(" {answer}")});
    let rows: Vec<Value> = answers.iter().enumerate().map(row).collect();
    scratch.write("rows.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let learning = ["adapter.rank=16", "train.steps=150", "train.lr=1e-2", "train.schedule=cosine"];
    scratch.train("run", &[&["data.train=rows.jsonl", "data.format=auto"][..], &learning].concat());
    let losses = scratch.losses("run");
    assert!(losses[losses.len() - 1] < 0.05, "{losses:?}");
    for (clip, answer) in answers.iter().enumerate() {
        let file = format!("clips/{clip}.wav");
        let arguments =
            ["generate", "run", "--raw", "--prompt", "what is said ?", "--audio", &file, "--json"];
        let ended = scratch.run(&[&arguments[..], &["--max-new", "8", "--threads", "2"]].concat());
        let said: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
        assert_eq!(said["text"].as_str().unwrap().trim(), *answer, "{said}");
        assert_eq!(said["prompt_ids"].as_array().unwrap().len(), embeddings(CLIPS[clip]) + 4);
    }
    let words = |run: &str, rows: &str| {
        let rows = format!("data.eval={rows}");
        let ended = scratch.run(&["eval", run, "--task", "wer", "--json", &rows]);
        let found: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
        found
    };
    let found = words("run", "rows.jsonl");
    assert_eq!(found["adapter"]["wer"], 0.0, "{found}");
    assert!(found["base"]["wer"].as_f64().unwrap() > 0.5, "{found}");
    assert_eq!(found["samples"][3]["adapter"]["text"], "after tone two");
    // Two of eight words are wrong.
    let wrong = scratch.read("rows.jsonl");
    let wrong = String::from_utf8(wrong).unwrap().replace("two before", "two after").replace("three", "one");
    scratch.write("wrong.jsonl", wrong);
    assert_eq!(words("run", "wrong.jsonl")["adapter"]["wer"], 0.25);
    let task = ["output.dir=new", "eval.task=wer", "data.train=rows.jsonl", "data.format=auto"];
    scratch.train_refused(2, &task, &["`eval.task = wer`"]);
    // An adapter of the encoder is heard through.
    let heard = [&["data.train=rows.jsonl", "data.format=auto", ENCODER][..], &learning].concat();
    scratch.train("encoder", &heard);
    assert_eq!(words("encoder", "rows.jsonl")["adapter"]["wer"], 0.0);
    let arguments = ["generate", "encoder", "--raw", "--prompt", "what is said ?", "--audio", "clips/1.wav"];
    let said = scratch.run(&[&arguments[..], &["--max-new", "8", "--threads", "2"]].concat());
    assert_eq!(said.stdout.trim(), "two before", "{}", said.stderr);
    let twice = ["generate", "run", "--raw", "--prompt", "<|audio_1|> <|audio_1|>", "--audio", "clips/0.wav"];
    scratch.refused(2, &twice, &["`<|audio_1|>` and 1 clip"]);
}

#[test]
fn a_run_continues_with_the_sound_that_it_began_with() {
    let scratch = scratch();
    scratch
        .train("run", &["train.steps=4", "train.save_every=2", "train.schedule=constant", "train.warmup=0"]);
    let resume =
        ["train", "recipe.toml", "--resume", "output.dir=run", "train.steps=6", "train.save_every=2"];
    let resume = [&resume[..], &["train.schedule=constant", "train.warmup=0"]].concat();
    // Weights that only encode, and are not in memory while training.
    let weights = scratch.read("model/model.safetensors");
    let mut others = tensors(&config());
    let conv = others.iter_mut().find(|(name, ..)| name.ends_with("embed.conv.2.weight")).unwrap();
    conv.2[3] += 0.1;
    write_tensors(&scratch, &config(), &others);
    let ended = scratch.run(&resume);
    assert!(ended.code == Some(1) && ended.stderr.contains("embed.conv.2.weight`"), "{}", ended.stderr);
    scratch.write("model/model.safetensors", weights);
    let kept = scratch.read("clips/1.wav");
    scratch.write("clips/1.wav", wav(CLIPS[1], 77));
    let ended = scratch.run(&resume);
    assert!(ended.code == Some(1) && ended.stderr.contains("`data.train`"), "{}", ended.stderr);
    scratch.write("clips/1.wav", kept);
    let ended = scratch.run(&resume);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    scratch.train("straight", &["train.steps=6", "train.schedule=constant", "train.warmup=0"]);
    assert_eq!(scratch.adapter("run"), scratch.adapter("straight"));
}
