//! Loads a model with an adapter, answers a prompt and streams the text.
//!
//! `cargo run --release --example load_and_generate -- MODEL ADAPTER "a prompt"`
//! The adapter is a PEFT folder or the folder of a run.

use smidgen::{
    Adapter, Answer, Failure, GenerateOptions, Sampling, Session, SessionOptions, StoppedBy, generate,
};
use std::io::Write;
use std::path::Path;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, adapter, prompt] = &arguments[..] else {
        eprintln!("usage: load_and_generate MODEL ADAPTER PROMPT");
        std::process::exit(2);
    };
    let answer = load_and_generate(model, Path::new(adapter), prompt, |piece| {
        print!("{piece}");
        let _ = std::io::stdout().flush();
    })?;
    println!();
    if answer.stopped_by == StoppedBy::MaxTokens {
        eprintln!("stopped after {} tokens", answer.token_ids.len());
    }
    Ok(())
}

/// Generates up to 32 tokens with a fixed seed, so the same call gives the same answer.
pub fn load_and_generate(
    model: &str,
    adapter: &Path,
    prompt: &str,
    on_text: impl FnMut(&str),
) -> Result<Answer, Failure> {
    let adapter = Adapter::open(adapter)?;
    let options = SessionOptions { context: Some(96), ..SessionOptions::default() };
    let mut session = Session::open(&model.parse()?, Some(&adapter), &options)?;
    eprintln!("{} bytes for a context of {} tokens", session.planned_bytes(), session.context());
    let sampling = Sampling { temperature: 0.7, top_p: 0.9, seed: 1, ..Sampling::default() };
    let options = GenerateOptions { sampling, max_new_tokens: 32, ..GenerateOptions::default() };
    generate(&mut session, prompt, &options, on_text)
}
