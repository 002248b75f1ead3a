//! Plans fine-tuning on a card that this machine need not have: no GPU, no weights, only the model's `config.json`.
//!
//! `cargo run --example plan_a_model -- hf:Qwen/Qwen2.5-7B-Instruct h200 6GiB`
//! `smidgen pull` downloads the model first. A folder with a `config.json`, or a `.gguf` file, works too.

use smidgen::{Failure, Job, Plan, ProfileChoice, Purpose, Recipe, plan};
use std::path::Path;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, card, budget] = &arguments[..] else {
        eprintln!("usage: plan_a_model MODEL CARD BUDGET");
        std::process::exit(2);
    };
    let plan = plan_a_model(model, card, budget)?;
    for (name, bytes) in &plan.rows {
        println!("{name:<14} {bytes:>14} bytes");
    }
    println!("{:<14} {:>14} bytes of {}", "peak", plan.peak_bytes, plan.budget_bytes);
    if plan.fits {
        println!("fits: {:.0} tokens/s", plan.tokens_per_s.unwrap_or(f64::NAN))
    } else {
        plan.advice.iter().for_each(|change| println!("does not fit; {change}"))
    }
    Ok(())
}

/// LoRA of rank 32 on every linear layer, 16 samples of up to 2048 tokens per step.
pub fn plan_a_model(model: &str, card: &str, budget: &str) -> Result<Plan, Failure> {
    let mut recipe = Recipe::new(model.parse()?);
    recipe.set_rank(32);
    recipe.data.max_tokens = 2048;
    recipe.memory.profile = ProfileChoice::Named(card.to_string());
    recipe.set("memory.budget", budget, Path::new("."))?;
    plan(&Job::prepare(recipe, Purpose::Plan)?)
}
