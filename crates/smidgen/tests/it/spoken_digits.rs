//! Learning to transcribe, end to end: clips of three tones, each of which is a digit, and a small model with random weights.
//!
//! The audio encoder stays random; the projector, norms, the embedding and a LoRA of the decoder are trained. The clips that
//! are evaluated were not trained on, so the model has to hear which digits they are and in which order.

use crate::scratch::Scratch;
use crate::speech::{wav_of, write_tensors, write_words};
use serde_json::{Value, json};
use smidgen_compile::model::read_spec;
use smidgen_ir::Extent;
use std::f64::consts::TAU;

const AUDIO_TOKEN: i64 = 20;
const DIGITS: [&str; 10] = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"];
/// Samples of a digit: three audio rows.
const SAMPLES: usize = 3840;

fn config() -> Value {
    json!({
        "model_type": "phi4_multimodal", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 128,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "dtype": "float32",
        "audio_config": {
            "hidden_size": 24, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2,
            "nemo_conv_channels": 16, "bias_max_distance": 5, "audio_token_id": AUDIO_TOKEN, "kernel_size": 3,
        },
    })
}

/// Numbers between -1 and 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Weights that keep the size of what passes through them, norms of one, biases of zero.
fn write_model(scratch: &Scratch) {
    let spec = read_spec(&config()).unwrap();
    let all = spec.tensors().into_iter().chain(spec.audio.unwrap().tensors());
    let mut random = Random(7);
    let tensors = all.map(|tensor| {
        let shape: Vec<usize> = tensor.shape.0.iter().map(|dim| dim.at(&Extent::default())).collect();
        let (middle, size) = match tensor.name.as_str() {
            name if name.ends_with("global_mean") => (8.0, 0.0),
            name if name.ends_with("global_invstd") => (0.2, 0.0),
            name if name.ends_with("norm.weight") || name.ends_with("norm_att.weight") => (1.0, 0.0),
            name if shape.len() == 1 || name.contains("relative_attention_bias") => (0.0, 0.0),
            name if name.ends_with("embed_tokens.weight") => (0.0, 1.7),
            _ => (0.0, (3.0 / shape[1] as f32).sqrt()),
        };
        let numbers = (0..shape.iter().product()).map(|_| middle + size * random.next()).collect();
        (tensor.name, shape, numbers)
    });
    write_tensors(scratch, &config(), &tensors.collect::<Vec<_>>());
    write_words(scratch, &[&["<unk>", "</s>", "digits", "?"][..], &DIGITS].concat(), AUDIO_TOKEN);
}

fn write_rows(scratch: &Scratch, file: &str, numbers: impl Iterator<Item = usize>) {
    let mut random = Random(1);
    let mut rows = String::new();
    for number in numbers {
        let digits = [number / 100, number / 10 % 10, number % 10];
        let tone = |(index, digit): (usize, usize)| {
            let hertz = 300.0 * 1.25f64.powi(digit as i32);
            (0.4 * (TAU * hertz * index as f64 / 16_000.0).sin() * 32_767.0) as f32
        };
        let places = digits.into_iter().flat_map(|digit| (0..SAMPLES).map(move |index| (index, digit)));
        let samples = places.map(|place| (tone(place) + 400.0 * random.next()) as i16);
        scratch.write(&format!("clips/{number}.wav"), wav_of(samples));
        let said = digits.map(|digit| DIGITS[digit]).join(" ");
        let row = json!({"audio": format!("clips/{number}.wav"), "prompt": "digits ?", "completion": format!(" {said}")});
        rows += &format!("{row}\n");
    }
    scratch.write(file, rows);
}

#[test]
fn tones_that_spell_digits_are_transcribed() {
    let scratch = Scratch::new();
    std::fs::remove_dir_all(scratch.path("model")).unwrap();
    write_model(&scratch);
    // All numbers in an order without a pattern: 619 has no divisor in common with 1000.
    let shuffled = |range: std::ops::Range<usize>| range.map(|index| (index * 619 + 7) % 1000);
    write_rows(&scratch, "data.jsonl", shuffled(0..600));
    write_rows(&scratch, "test.jsonl", shuffled(600..640));
    let parts = "adapter.train=[\"projector\",\"norms\",\"embed_tokens\"]";
    let learning = ["adapter.rank=16", parts, "train.batch=20", "train.steps=1200", "train.lr=2e-3"];
    let rest = ["train.schedule=cosine", "train.warmup=20", "data.format=auto", "data.eval=test.jsonl"];
    scratch.train("digits", &[&learning[..], &rest].concat());
    let ended = scratch.run(&["eval", "digits", "--task", "wer", "--json"]);
    let found: Value = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{}", ended.stderr));
    let wer = |model: &str| found[model]["wer"].as_f64().unwrap();
    assert!(wer("base") > 0.9, "{}", found["base"]);
    assert!(wer("adapter") < 0.1, "{}", found["adapter"]);
}
