//! `smidgen preview`: the samples as the model will see them, before anything is trained.
//!
//! Samples, counts and warnings come from the set that a run would train on; steps and micro-batches come from its
//! plan.
//! Left out: dropped rows, which are only counted.

use super::recipe_args::RecipeArgs;
use crate::console::colour;
use crate::console::downloads::hub_access;
use crate::console::stdout::print_report;
use crate::failure::Failure;
use crate::plan::demand::describe_packing;
use crate::plan::job::{Job, Purpose};
use crate::plan::planning::plan_without_advice;
use crate::report::preview_text::{BothForms, Part, Preview, ShownSample, render_preview, seconds_of_frames};
use crate::rows::data::{Data, Rows};
use crate::rows::forms::first_undecided;
use serde_json::{Value as Json, json};
use smidgen_data::prepare::read_tokenizer;
use smidgen_data::tokens::{NOT_SUPERVISED, Sample, TokenSet};
use smidgen_formats::tokenizer::Tokenizer;
use smidgen_ir::objective::RowsNeeded;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Number of samples to show
    #[arg(long, default_value_t = 3)]
    rows: usize,
    /// Print JSON, with token ids and labels
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, quiet: bool) -> Result<(), Failure> {
    let (_, recipe) = args.recipe.read()?;
    let job = &Job::prepare_with(recipe, Purpose::Preview, &hub_access(quiet))?;
    let Data::Rows(rows) = &job.data else { unreachable!("`preview` reads the data of a job") };
    // Rows of tokens can come with a model that has no tokenizer; then the ids are shown.
    let tokenizer = read_tokenizer(&job.model).ok();
    let planned = plan_without_advice(job)?;
    let tokenizer = tokenizer.as_ref();
    let shown = 0..args.rows.min(rows.train.len());
    let samples = shown.map(|index| shown_sample(&rows.train, index, tokenizer));
    let samples = samples.collect::<Result<Vec<_>, Failure>>()?;
    let forms = both_forms(job, rows, tokenizer, quiet)?;
    let packing = describe_packing(rows, &planned.solution.policy, job.request.rank.of)?;
    let preview = Preview { job, rows, planned: &planned, samples, forms, packing };
    let text = if args.json {
        format!("{:#}\n", preview_json(&preview))
    } else {
        render_preview(&preview, colour::is_shown(&std::io::stdout()))
    };
    print_report(&text, args.json)
}

fn shown_sample(set: &TokenSet, index: usize, tokenizer: Option<&Tokenizer>) -> Result<ShownSample, Failure> {
    let mut sample = set.sample(index).map_err(Failure::disk)?;
    // The answers to a prompt are trained, which are not known yet.
    let is_prompt = set.rows() == RowsNeeded::Prompts;
    if is_prompt {
        sample.labels.fill(NOT_SUPERVISED);
    }
    let parts = parts_of(&sample, tokenizer)?;
    let clips = set.clips().map_or_else(Vec::new, |clips| {
        let store = clips.store();
        let sounds = clips.of_sample(index).iter();
        sounds.map(|clip| (seconds_of_frames(store.frames(*clip)), store.rows(*clip))).collect()
    });
    let supervised = if is_prompt { 0 } else { set.supervised(index) };
    let place = set.place(index).to_string();
    Ok(ShownSample { place, sample, supervised, parts, clips })
}

/// Both forms of the first row that waits for a decision about `data.template`.
fn both_forms(
    job: &Job,
    rows: &Rows,
    tokenizer: Option<&Tokenizer>,
    quiet: bool,
) -> Result<Option<BothForms>, Failure> {
    let Some(tokenizer) = tokenizer else { return Ok(None) };
    let access = hub_access(quiet);
    let Some(found) = first_undecided(&job.recipe, (&job.model, &job.request), rows, tokenizer, &access)?
    else {
        return Ok(None);
    };
    let plain = shown_sample(&rows.train, found.sample, Some(tokenizer))?;
    let templated = match found.templated {
        Ok(prepared) => Ok(shown_sample(&prepared.set, 0, Some(tokenizer))?),
        Err(failure) => Err(failure.message),
    };
    Ok(Some(BothForms { plain, templated }))
}

/// A sample as text, in parts that are supervised or not.
fn parts_of(sample: &Sample, tokenizer: Option<&Tokenizer>) -> Result<Vec<Part>, Failure> {
    let ids: Vec<u32> = sample.ids.iter().map(|&id| id as u32).collect();
    let supervised = |position: usize| sample.labels[position] != NOT_SUPERVISED;
    let mut parts = Vec::new();
    let (mut start, mut before) = (0, String::new());
    for end in 1..=ids.len() {
        if end < ids.len() && supervised(end) == supervised(start) {
            continue;
        }
        let text = match tokenizer {
            None => format!("{:?}", &ids[start..end]),
            Some(tokenizer) => {
                // Decoded from the beginning: decoders treat the first token of a text differently.
                let whole = tokenizer.decode(&ids[..end], false).map_err(Failure::model)?;
                let text = match whole.strip_prefix(before.as_str()) {
                    Some(text) => text.to_owned(),
                    // The bytes of one character can be on both sides of the cut.
                    None => tokenizer.decode(&ids[start..end], false).map_err(Failure::model)?,
                };
                before = whole;
                text
            }
        };
        parts.push(Part { text, supervised: supervised(start), tokens: end - start });
        start = end;
    }
    Ok(parts)
}

fn parts_json(parts: &[Part]) -> Json {
    parts.iter().map(|part| json!({"text": part.text, "supervised": part.supervised})).collect()
}

fn preview_json(preview: &Preview<'_>) -> Json {
    let Preview { job, rows, planned, samples, forms, packing } = preview;
    let stats = rows.train.stats();
    let forms = forms.as_ref().map(|BothForms { plain, templated }| {
        let templated = match templated {
            Ok(shown) => parts_json(&shown.parts),
            Err(reason) => json!({"refused": reason}),
        };
        json!({"place": plain.place, "none": parts_json(&plain.parts), "model": templated})
    });
    let samples = samples.iter().map(|shown| {
        let clips = shown.clips.iter();
        let clips = clips.map(|(seconds, tokens)| json!({"seconds": seconds, "tokens": tokens}));
        json!({
            "place": shown.place,
            "parts": parts_json(&shown.parts),
            "ids": shown.sample.ids,
            "labels": shown.sample.labels,
            "audio": clips.collect::<Vec<_>>(),
        })
    });
    let demand = &planned.solution.demand;
    let sources = rows.sources.iter().map(|source| {
        json!({
            "name": source.name,
            "format": source.origin.format.to_string(),
            "reason": source.origin.reason,
            "template": source.origin.template,
            "samples": source.samples,
            "samples_per_epoch": source.epoch_samples,
        })
    });
    let origin = &rows.sources[0].origin;
    json!({
        "format": origin.format.to_string(),
        "reason": origin.reason,
        "template": origin.template,
        "sources": sources.collect::<Vec<_>>(),
        "loss_on": origin.format.loss_on(job.recipe.data.loss_on).to_string(),
        "max_tokens": job.recipe.data.max_tokens,
        "rows": stats.rows,
        "tokens": stats.tokens,
        "supervised_tokens": stats.supervised_tokens,
        "cut_tokens": stats.cut_tokens,
        "lengths": {
            "shortest": stats.shortest_tokens, "mean": stats.mean_tokens, "longest": stats.longest_tokens,
        },
        "eval_samples": rows.eval.as_ref().map(|set| set.len()),
        "batches": {
            "steps": rows.batches.total_steps(),
            "steps_per_epoch": rows.batches.first_epoch_steps(),
            "samples_per_step": rows.train.len() as f64 / rows.batches.first_epoch_steps() as f64,
            "tokens_per_step": planned.step_tokens,
            "micro_tokens": demand.micro_tokens,
            "micro_batches_per_step": demand.micro_steps,
        },
        "packing": packing,
        "samples": samples.collect::<Vec<_>>(),
        "forms": forms,
        "warnings": rows.warnings,
    })
}
