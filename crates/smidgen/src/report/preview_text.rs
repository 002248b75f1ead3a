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
use std::fmt::{Display, Write};

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
    let wanted = job.recipe.data.loss_on;
    let auto = if wanted == LossOn::Auto { " (auto)" } else { "" };
    let mut lines = Vec::new();
    for Source { name, origin, samples, epoch_samples } in &rows.sources {
        if rows.sources.len() > 1 {
            let (all, share) = (Grouped(*samples as u64), Grouped(*epoch_samples as u64));
            lines.push(field("source", format!("{name}: {all} samples, {share} per epoch")));
        }
        lines.push(field("format", &origin.reason));
        lines.push(field("prompted", prompt_format(origin)));
        lines.push(field("loss on", format!("{}{auto}", origin.format.loss_on(wanted))));
    }
    lines.push(field("rows", format!("{}, {} kept", stats.rows, stats.rows.kept)));
    for shown in samples {
        lines.extend([String::new(), heading(&shown.place, shown)]);
        let clips = shown.clips.iter().enumerate();
        lines.extend(clips.map(|(number, (seconds, tokens))| {
            format!("  audio {}: {seconds:.2} s, {tokens} tokens", number + 1)
        }));
        lines.extend(marked_lines(shown, colour));
    }
    lines.extend(forms.iter().flat_map(|forms| form_lines(forms, colour)));
    lines.push(String::new());
    let [all, supervised, cut] =
        [stats.tokens, stats.supervised_tokens, stats.cut_tokens].map(|tokens| Grouped(tokens).to_string());
    let share = 100.0 * stats.supervised_tokens as f64 / stats.tokens as f64;
    lines.push(field(
        "tokens",
        match rows.prompts {
            Some(_) => format!("{all}, all of prompts"),
            None => format!("{all}, {supervised} supervised ({share:.1} %), {cut} cut off"),
        },
    ));
    let (shortest, longest, mean) = (stats.shortest_tokens, stats.longest_tokens, stats.mean_tokens);
    lines.push(field("lengths", format!("{shortest} to {longest}, {mean:.1} on average")));
    if let Some(clips) = set.clips() {
        let store = clips.store();
        let seconds: f64 = (0..store.len() as u32).map(|clip| seconds_of_frames(store.frames(clip))).sum();
        let (count, tokens) = (Grouped(store.len() as u64), Grouped(store.all_rows() as u64));
        let noun = if store.len() == 1 { "clip" } else { "clips" };
        lines.push(field("audio", format!("{count} {noun}, {seconds:.1} s, {tokens} tokens")));
    }
    lines.extend(histogram(set));
    let steps = rows.batches.first_epoch_steps();
    let (total, per_epoch) = (Grouped(rows.batches.total_steps()), Grouped(steps));
    lines.push(field("steps", format!("{total} total, {per_epoch} per epoch")));
    let demand = &planned.solution.demand;
    let what = if rows.prompts.is_some() { "prompts" } else { "samples" };
    let per_step = format!(
        "{:.1} {what}, {:.0} tokens, {:.1} micro-batches of up to {} tokens",
        set.len() as f64 / steps as f64,
        planned.step_tokens,
        demand.micro_steps.max(1.0),
        demand.micro_tokens
    );
    lines.extend([field("per step", per_step), field("packing", packing)]);
    if let Some(eval) = &rows.eval {
        let (samples, tokens) = (Grouped(eval.len() as u64), Grouped(eval.stats().tokens));
        lines.push(field("evaluation", format!("{samples} samples, {tokens} tokens")));
    }
    if !rows.warnings.is_empty() {
        lines.push(String::new());
    }
    lines.extend(rows.warnings.iter().map(|warning| fold(&format!("warning: {warning}"), columns())));
    lines.join("\n") + "\n"
}

fn field(name: &str, value: impl Display) -> String {
    fold(&format!("{name:<10} {value}"), columns())
}

/// The text of a sample, indented.
fn marked_lines(shown: &ShownSample, colour: bool) -> Vec<String> {
    marked(&shown.parts, colour).lines().map(|row| format!("  {row}").trim_end().to_owned()).collect()
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
        lines.extend(marked_lines(shown, colour));
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
