//! Checks of a recipe: whether its model can be read, its data exists and the run fits.
//!
//! They do what `smidgen plan` does, with one check for each thing that can go wrong, and read the weights as a run
//! would.

use super::Check;
use super::load::{self, Reach};
use crate::console::progress;
use crate::failure::FailureKind;
use crate::machine::host;
use crate::plan::context::pinned_bytes;
use crate::plan::disk::{self, Footprint};
use crate::plan::job::{Job, Purpose};
use crate::plan::model::open_model;
use crate::plan::planning::{Planned, plan_job};
use crate::rows::data::Data;
use serde_json::json;
use smidgen_hub::{Access, Want};
use smidgen_ir::bytes::format_bytes;
use smidgen_recipe::{Length, Recipe};

/// Checks everything that a run of the recipe needs, up to the first failure.
pub fn check(recipe: &Recipe, access: &Access, reach: Reach) -> Vec<Check> {
    let model = match open_model(&recipe.model.path, Want::Config, access) {
        Err(failure) if failure.hints.is_empty() => {
            return vec![Check::of_failure("model", &failure.hint(load::REMEDY))];
        }
        Err(failure) => return vec![Check::of_failure("model", &failure)],
        Ok(model) => model,
    };
    let has = if model.has_weights() { ", with its weights" } else { " has a config but no weights" };
    let finding = format!("`{}`{has}", model.path().display());
    let remedy = "`smidgen pull` downloads them; `smidgen plan` does not need them";
    let mut lines = vec![Check::warn_if(!model.has_weights(), "model", finding, remedy)];
    let job = match Job::prepare_with(recipe.clone(), Purpose::Plan, access) {
        Ok(job) => job,
        Err(failure) => {
            lines.push(Check::of_failure("run", &failure));
            return lines;
        }
    };
    lines.push(data_line(&job));
    if job.model.has_weights() {
        if !access.is_quiet() {
            progress::say("reading the weights of the model");
        }
        lines.push(load::check(&job, reach));
    }
    match plan_job(&job) {
        Ok(planned) => {
            lines.push(plan_line(&job, &planned));
            let pinned = pinned_bytes(&planned.solution.plan);
            lines.extend((pinned > 0).then(|| pinned_line(pinned, host::free_memory_bytes())));
            lines.push(room_line(&job, &planned));
        }
        Err(failure) => lines.push(Check::of_failure("plan", &failure)),
    }
    lines
}

fn data_line(job: &Job) -> Check {
    match &job.data {
        Data::Rows(rows) if rows.warnings.is_empty() => {
            let (samples, longest) = (rows.train.len(), rows.train.longest());
            Check::pass("data", format!("{samples} samples, the longest of {longest} tokens"))
        }
        Data::Rows(rows) => {
            let remedy = "`smidgen preview` shows rows as the model sees them";
            Check::warn("data", rows.warnings.join("; "), remedy)
        }
        Data::Assumed { reason } => {
            let remedy = "training needs the data; without it, plans assume that every sample has `data.max_tokens` tokens";
            Check::warn("data", reason.clone(), remedy)
        }
    }
}

fn plan_line(job: &Job, planned: &Planned) -> Check {
    if !planned.fits {
        return Check::of_failure("plan", &planned.refusal());
    }
    let solution = &planned.solution;
    let tokens_per_s = planned.speed().map(|speed| speed.tokens_per_s);
    let speed = tokens_per_s.map_or("speed unknown".to_owned(), |rate| format!("{rate:.0} tokens/s"));
    let (peak_bytes, budget_bytes) = (solution.peak_bytes, planned.budget_bytes);
    let finding = format!(
        "fits: {} of {} on {}, {speed} according to {}",
        format_bytes(peak_bytes),
        format_bytes(budget_bytes),
        job.place.describe(),
        planned.profile.describe()
    );
    let facts = json!({"peak_bytes": peak_bytes, "budget_bytes": budget_bytes, "tokens_per_s": tokens_per_s});
    Check::pass("plan", finding).with(facts)
}

/// Whether the host memory that the plan pins is free; pinned memory cannot be swapped out.
fn pinned_line(pinned: u64, free: Option<u64>) -> Check {
    const NAME: &str = "pinned memory";
    let finding = format!("the plan pins {}", format_bytes(pinned));
    let facts = json!({ "needed_bytes": pinned, "free_bytes": free });
    match free {
        Some(free) if free < pinned => Check::fail(
            NAME,
            FailureKind::Memory,
            format!("{finding}, but only {} is free", format_bytes(free)),
            "stop other programs, or set a smaller `memory.host_budget`",
        ),
        Some(free) => Check::pass(NAME, format!("{finding}, {} is free", format_bytes(free))),
        None => Check::pass(NAME, finding),
    }
    .with(facts)
}

/// Disk space for what the run will write.
fn room_line(job: &Job, planned: &Planned) -> Check {
    const NAME: &str = "checkpoints";
    let folder = &job.recipe.output.dir.resolved;
    let steps = match (&job.data, job.recipe.train.length) {
        (Data::Rows(rows), _) => rows.batches.total_steps(),
        (Data::Assumed { .. }, Length::Steps(steps)) => steps,
        // Without data the number of steps is unknown: enough steps for all checkpoints that are kept.
        (Data::Assumed { .. }, Length::Epochs(_)) => {
            job.recipe.train.save_every.saturating_mul(1 + job.recipe.train.keep as u64).max(1)
        }
    };
    let footprint = Footprint::of(&planned.solution.plan, job, steps);
    let needed = footprint.total_bytes() + planned.solution.plan.disk.bytes() as u64;
    room(needed, disk::free_bytes(folder), &folder.display().to_string(), NAME)
}

fn room(needed: u64, free: Option<u64>, folder: &str, name: &'static str) -> Check {
    let needs = format!("{} on the disk of `{folder}`", format_bytes(needed));
    let facts = json!({ "needed_bytes": needed, "free_bytes": free });
    match free {
        Some(free) if free < needed => Check::fail(
            name,
            FailureKind::Disk,
            format!("needs {needs}, only {} is free", format_bytes(free)),
            "free some space, lower `train.keep`, or choose an `output.dir` on another disk",
        ),
        _ => Check::pass(name, needs),
    }
    .with(facts)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn room_is_needed_to_the_byte() {
        let line = |free| room(1 << 20, free, "runs/x", "checkpoints");
        assert_eq!(line(Some(1 << 20)).verdict, Verdict::Pass);
        let unknown = line(None);
        assert_eq!((unknown.verdict, &*unknown.finding), (Verdict::Pass, "1.00 MiB on the disk of `runs/x`"));
        let short = line(Some((1 << 20) - 1));
        assert_eq!(short.verdict, Verdict::Fail);
        assert!(!short.remedies.is_empty());
        assert_eq!(short.facts, json!({"needed_bytes": 1 << 20, "free_bytes": (1 << 20) - 1}));
        let full = line(Some(0));
        let words = "needs 1.00 MiB on the disk of `runs/x`, only 0 B is free";
        assert_eq!((full.verdict, &*full.finding), (Verdict::Fail, words));
        assert_eq!(full.kind, FailureKind::Disk);
    }

    #[test]
    fn what_is_pinned_has_to_be_free() {
        let line = |free| pinned_line(2 << 30, free);
        assert_eq!([line(Some(2 << 30)), line(None)].map(|line| line.verdict), [Verdict::Pass; 2]);
        let short = line(Some(1 << 30));
        let words = "the plan pins 2.00 GiB, but only 1.00 GiB is free";
        assert_eq!((short.verdict, &*short.finding), (Verdict::Fail, words));
        assert_eq!(short.kind, FailureKind::Memory);
        assert!(short.remedies[0].contains("`memory.host_budget`"));
    }
}
