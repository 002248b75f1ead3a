//! The preview as text: samples with their supervised parts marked, lengths, batches.
//!
//! Supervised parts are coloured on a terminal and in `⟦ ⟧` elsewhere; lines fit the terminal, except those of samples.
//! Left out: which samples are shown (`commands/preview.rs`).

use crate::console::colour::around_good;
use crate::console::wrap::{columns, fold};
use crate::plan::job::Job;
use crate::plan::planning::Planned;
use crate::rows::data::{Rows, Source};
use smidgen_data::prepare::Origin;
use smidgen_data::template::text_prompt;
use smidgen_data::tokens::{Sample, TokenSet};
use smidgen_formats::audio::{FRAME_SAMPLES, HOP_SAMPLES, SAMPLE_RATE};
use smidgen_ir::grouped_digits::Grouped;
use smidgen_ir::words::LossOn;
use std::fmt::Write;

/// Longer samples show only their beginning and their end.
const SHOWN_CHARACTERS: usize = 4000;
const BAR_COLUMNS: usize = 50;
const MOST_BARS: usize = 12;

/// A part of a sample that is either supervised or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub text: String,
    pub supervised: bool,
    pub tokens: usize,
}

#[derive(Clone, Debug)]
pub struct ShownSample {
    pub place: String,
    pub sample: Sample,
    pub supervised: u32,
    pub parts: Vec<Part>,
    /// Seconds and tokens of each audio clip.
    pub clips: Vec<(f64, usize)>,
}

/// A row whose prompt and completion are strings, as it is and in the model's chat template.
pub struct BothForms {
    pub plain: ShownSample,
    /// Or why the template refuses it.
    pub templated: Result<ShownSample, String>,
}

/// What a preview shows.
pub struct Preview<'a> {
    pub job: &'a Job,
    pub rows: &'a Rows,
    pub planned: &'a Planned,
    pub samples: Vec<ShownSample>,
    /// If `data.template` is undecided.
    pub forms: Option<BothForms>,
    pub packing: String,
}

pub fn render_preview(preview: &Preview<'_>, colour: bool) -> String {
    let Preview { job, rows, planned, samples, forms, packing } = preview;
    let set = &rows.train;
    let stats = set.stats();
    let mut text = String::new();
    let mut line = |content: &str| writeln!(text, "{content}").expect("a string can be written to");
    let wanted = job.recipe.data.loss_on;
    let auto = if wanted == LossOn::Auto { " (auto)" } else { "" };
    for Source { name, origin, samples, epoch_samples } in &rows.sources {
        if rows.sources.len() > 1 {
            let (all, share) = (Grouped(*samples as u64), Grouped(*epoch_samples as u64));
            line(&fold(&format!("source     {name}: {all} samples, {share} per epoch"), columns()));
        }
        line(&fold(&format!("format     {}", origin.reason), columns()));
        line(&fold(&format!("prompted   {}", prompt_format(origin)), columns()));
        line(&format!("loss on    {}{auto}", origin.format.loss_on(wanted)));
    }
    line(&format!("rows       {}, {} kept", stats.rows, stats.rows.kept));
    for shown in samples {
        line("");
        line(&heading(&shown.place, shown));
        for (number, (seconds, tokens)) in shown.clips.iter().enumerate() {
            line(&format!("  audio {}: {seconds:.2} s, {tokens} tokens", number + 1));
        }
        for row in marked(&shown.parts, colour).lines() {
            line(format!("  {row}").trim_end());
        }
    }
    for row in forms.iter().flat_map(|forms| form_lines(forms, colour)) {
        line(&row);
    }
    line("");
    let share = 100.0 * stats.supervised_tokens as f64 / stats.tokens as f64;
    line(&format!(
        "tokens     {}, {} supervised ({share:.1} %), {} cut off",
        Grouped(stats.tokens),
        Grouped(stats.supervised_tokens),
        Grouped(stats.cut_tokens)
    ));
    line(&format!(
        "lengths    {} to {}, {:.1} on average",
        stats.shortest_tokens, stats.longest_tokens, stats.mean_tokens
    ));
    if let Some(clips) = set.clips() {
        let store = clips.store();
        let seconds: f64 = (0..store.len() as u32).map(|clip| seconds_of_frames(store.frames(clip))).sum();
        let (count, tokens) = (Grouped(store.len() as u64), Grouped(store.all_rows() as u64));
        let noun = if store.len() == 1 { "clip" } else { "clips" };
        line(&format!("audio      {count} {noun}, {seconds:.1} s, {tokens} tokens"));
    }
    for bar in histogram(set) {
        line(&bar);
    }
    let steps = rows.batches.first_epoch_steps();
    line(&format!("steps      {} total, {} per epoch", Grouped(rows.batches.total_steps()), Grouped(steps)));
    let demand = &planned.solution.demand;
    line(&format!(
        "per step   {:.1} samples, {:.0} tokens, {:.1} micro-batches of up to {} tokens",
        set.len() as f64 / steps as f64,
        planned.step_tokens,
        demand.micro_steps.max(1.0),
        demand.micro_tokens
    ));
    line(&fold(&format!("packing    {packing}"), columns()));
    if let Some(eval) = &rows.eval {
        line(&format!(
            "evaluation {} samples, {} tokens",
            Grouped(eval.len() as u64),
            Grouped(eval.stats().tokens)
        ));
    }
    if !rows.warnings.is_empty() {
        line("");
    }
    for warning in &rows.warnings {
        line(&fold(&format!("warning: {warning}"), columns()));
    }
    text
}

fn heading(what: &str, shown: &ShownSample) -> String {
    format!("{what}: {} tokens, {} supervised", shown.sample.ids.len(), shown.supervised)
}

/// Both forms of a row, one after the other.
fn form_lines(forms: &BothForms, colour: bool) -> Vec<String> {
    let BothForms { plain, templated } = forms;
    let with = "with `data.template = \"model\"`";
    let mut lines = vec![String::new()];
    let mut show = |title: String, shown: &ShownSample| {
        lines.push(title);
        let text = marked(&shown.parts, colour);
        lines.extend(text.lines().map(|row| format!("  {row}").trim_end().to_owned()));
    };
    show(heading(&format!("{} with `data.template = \"none\"`, as now", plain.place), plain), plain);
    match templated {
        Ok(shown) => show(heading(&format!("the same row {with}"), shown), shown),
        Err(reason) => lines.push(format!("the same row {with} is refused: {reason}")),
    }
    lines
}

/// Seconds of sound of this many mel frames.
pub fn seconds_of_frames(frames: usize) -> f64 {
    (frames.saturating_sub(1) * HOP_SAMPLES + FRAME_SAMPLES) as f64 / SAMPLE_RATE as f64
}

/// The format of prompts in training, which `generate` and `eval` use too.
fn prompt_format(origin: &Origin) -> String {
    match &origin.template {
        None => "without a template".to_owned(),
        Some(name) if text_prompt(name).is_some() => format!("with the prompt `{name}`"),
        Some(name) => format!("with the chat template: {name}"),
    }
}

fn marked(parts: &[Part], colour: bool) -> String {
    let (begin, end) = if colour { around_good() } else { ("⟦".to_owned(), "⟧".to_owned()) };
    let characters: usize = parts.iter().map(|part| part.text.chars().count()).sum();
    let left_out = characters.saturating_sub(SHOWN_CHARACTERS);
    // The omitted part is in the middle of the sample.
    let (from, to) = ((characters - left_out) / 2, (characters - left_out) / 2 + left_out);
    let mut text = String::new();
    let mut at = 0;
    for part in parts {
        if part.supervised {
            text.push_str(&begin);
        }
        for sign in part.text.chars() {
            if at == from && left_out > 0 {
                write!(text, "\n[{left_out} characters]\n").expect("a string can be written to");
            }
            if !(from..to).contains(&at) {
                match sign {
                    // Colour is reset at the end of a line, so that it does not fill the margin.
                    '\n' if colour && part.supervised => write!(text, "{end}\n{begin}"),
                    '\n' => writeln!(text),
                    sign if sign.is_control() && sign != '\t' => write!(text, "{}", sign.escape_default()),
                    sign => write!(text, "{sign}"),
                }
                .expect("a string can be written to");
            }
            at += 1;
        }
        if part.supervised {
            text.push_str(&end);
        }
    }
    text
}

/// Bars of equal width, a power of two.
fn histogram(set: &TokenSet) -> Vec<String> {
    let longest = set.longest();
    let mut width = 1;
    while longest / width >= MOST_BARS {
        width *= 2;
    }
    let first = set.stats().shortest_tokens / width;
    let mut counts = vec![0u64; longest / width + 1 - first];
    for sample in 0..set.len() {
        counts[set.length(sample) as usize / width - first] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(1).max(1);
    let bars = counts.iter().enumerate().map(|(index, &count)| {
        let start = (first + index) * width;
        let range = match width {
            1 => start.to_string(),
            _ => format!("{start}-{}", start + width - 1),
        };
        // Every nonempty bar is visible.
        let columns = (count as usize * BAR_COLUMNS).div_ceil(most as usize);
        let space = if columns > 0 { " " } else { "" };
        format!("{range:>15} {}{space}{}", "█".repeat(columns), Grouped(count))
    });
    bars.collect()
}
