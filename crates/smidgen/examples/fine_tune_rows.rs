//! Fine-tunes a model on rows in memory, and reads the loss after each step.
//!
//! `cargo run --release --example fine_tune_rows -- MODEL OUTPUT`
//! It writes a PEFT adapter, which `load_and_generate` can load.

use serde_json::json;
use smidgen::{
    Batch, Budget, Failure, Job, Length, MemoryRows, MetricsRow, Purpose, Recipe, RecipePath, Run,
    TrainOptions, train,
};
use std::ops::ControlFlow;
use std::path::Path;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, output] = &arguments[..] else {
        eprintln!("usage: fine_tune_rows MODEL OUTPUT");
        std::process::exit(2);
    };
    let run = fine_tune_rows(model, Path::new(output), Budget::Auto, |row| {
        println!("step {:>3}  loss {:.4}  {:.0} tokens/s", row.step, row.loss, row.tokens_per_s);
        // At this loss the model has memorized the rows.
        if row.loss < 0.01 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    println!("{} of {} steps, {:?}: {}", run.steps, run.total_steps, run.ending, run.product.display());
    Ok(())
}

/// Trains LoRA for 30 steps on 24 generated additions.
pub fn fine_tune_rows(
    model: &str,
    output: &Path,
    budget: Budget,
    on_step: impl FnMut(&MetricsRow) -> ControlFlow<()>,
) -> Result<Run, Failure> {
    let mut recipe = Recipe::new(model.parse()?);
    recipe.set_rank(8);
    recipe.data.max_tokens = 64;
    recipe.train.batch = Batch::Samples(8);
    recipe.train.length = Length::Steps(30);
    recipe.train.lr = 1e-3;
    recipe.memory.budget = budget;
    recipe.output.dir = RecipePath::at(output);
    let addition = |a: u32| json!({"prompt": format!("{a} + 3 = "), "completion": (a + 3).to_string()});
    let rows = MemoryRows { train: (0..24).map(addition).collect(), eval: vec![] };
    let job = Job::prepare_rows(recipe, &rows, Purpose::Train)?;
    train(job, TrainOptions::default().on_step(on_step).on_message(|line| eprintln!("{line}")))
}
