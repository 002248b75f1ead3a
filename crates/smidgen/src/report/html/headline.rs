//! The summary cards of a page: loss, speed, peak memory, leaks and stability.
//!
//! A plan without a run has cards for predicted memory and speed.

use super::charts::percent;
use super::escape::{escape, marked};
use crate::plan::budget::measurable_peak;
use crate::report::leak::Leak;
use crate::report::numbers::{duration, grouped, short};
use crate::report::plan_facts::PlanFacts;
use crate::report::run_folder::RunRecord;
use crate::report::run_summary::RunSummary;
use smidgen_ir::bytes::format_bytes;

/// The colour of a card.
#[derive(Clone, Copy, Default)]
enum Tone {
    Good,
    Bad,
    #[default]
    Plain,
}

#[derive(Default)]
struct Card {
    question: &'static str,
    answer: String,
    more: String,
    /// HTML between the answer and `more`.
    below: String,
    tone: Tone,
}

pub fn render_headline(run: &RunRecord, summary: &RunSummary) -> String {
    let cards = match run.folder.is_some() && summary.steps > 0 {
        true => vec![
            loss(summary),
            speed(summary),
            peak(summary, run.plan.policy.device == "cuda"),
            largest_rows(&run.plan),
            chosen(&run.plan),
            leak(summary),
            stable(summary),
        ],
        false => vec![
            planned_peak(run),
            largest_rows(&run.plan),
            chosen(&run.plan),
            planned_speed(run),
            planned_batch(run),
        ],
    };
    let cards: String = cards.iter().map(render_card).collect();
    format!("<div class=\"cards\">{cards}</div>")
}

fn render_card(card: &Card) -> String {
    let class = match card.tone {
        Tone::Good => " good",
        Tone::Bad => " bad",
        Tone::Plain => "",
    };
    format!(
        "<div class=\"card{class}\"><h3>{}</h3><p class=\"answer\">{}</p>{}<p>{}</p></div>",
        card.question,
        escape(&card.answer),
        card.below,
        marked(&card.more)
    )
}

/// A bar with measured and planned memory as fractions of the budget.
fn bar(measured: u64, planned: u64, budget: u64) -> String {
    let width = budget.max(planned).max(measured).max(1) as f64;
    let part = |bytes: u64| percent(bytes as f64 / width);
    format!(
        "<div class=\"gauge\" aria-hidden=\"true\"><b style=\"width:{}\"></b><i style=\"left:{}\"></i></div>",
        part(measured),
        part(planned)
    )
}

fn peak(summary: &RunSummary, is_gpu: bool) -> Card {
    let memory = &summary.memory;
    let (planned, budget) = (memory.planned_bytes, memory.budget_bytes);
    let Some(peak) = memory.peak_bytes else {
        let more = "not measured on this system".into();
        let answer = format!("{} planned", format_bytes(planned));
        return Card { question: "Peak memory", answer, more, ..Card::default() };
    };
    let mut more = format!("measured; planned {}, budget {}", format_bytes(planned), format_bytes(budget));
    if let Some(host_bytes) = memory.host_bytes.filter(|_| is_gpu) {
        let (host, pinned) = (format_bytes(host_bytes), format_bytes(memory.pinned_bytes));
        more += &format!("; system memory {host}, pinned {pinned}");
    }
    let tone = match peak {
        _ if peak <= planned => Tone::Good,
        // Within the measurement error.
        _ if peak <= measurable_peak(planned) => Tone::Plain,
        _ => Tone::Bad,
    };
    Card {
        question: "Peak memory",
        answer: format_bytes(peak),
        more,
        below: bar(peak, planned, budget),
        tone,
    }
}

/// The largest categories at the peak, and where the peak is.
fn largest_rows(plan: &PlanFacts) -> Card {
    let mut rows: Vec<(&str, u64)> = plan.rows.iter().map(|(row, bytes)| (row.as_str(), *bytes)).collect();
    rows.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let part = |bytes: u64| 100.0 * bytes as f64 / plan.peak_bytes.max(1) as f64;
    let name = |row: &str| match (row, plan.policy.device.as_str()) {
        ("context", "cpu") => "the program itself".to_owned(),
        ("context", _) => "the driver".to_owned(),
        (row, _) => plan.label(row).to_owned(),
    };
    let answer = match rows.first() {
        Some((row, bytes)) => format!("{}, {:.0} %", name(row), part(*bytes)),
        None => "unknown".into(),
    };
    let next: Vec<String> = rows
        .iter()
        .skip(1)
        .take(2)
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(row, bytes)| format!("{} {:.0} %", name(row), part(*bytes)))
        .collect();
    let then = if next.is_empty() { String::new() } else { format!("then {}; ", next.join(", ")) };
    let place = if plan.peak_at.is_empty() { "unknown" } else { &plan.peak_at };
    let more = format!("{then}the peak is at: {place}");
    Card { question: "What uses the memory at the peak?", answer, more, ..Card::default() }
}

/// The choices that save memory, in one line; a section below has the details.
fn chosen(plan: &PlanFacts) -> Card {
    const QUESTION: &str = "Which plan, and why?";
    let budget = format_bytes(plan.budget_bytes);
    let prices = &plan.policy.prices;
    let Some(largest) = prices.iter().max_by_key(|price| price.saved_bytes) else {
        let more = format!("everything fits {budget}: nothing is offloaded or recomputed");
        let answer = "everything is kept".into();
        return Card { question: QUESTION, answer, more, ..Card::default() };
    };
    let names: Vec<&str> = prices.iter().map(|price| price.choice.as_str()).collect();
    let fits = if plan.fits { "the fastest plan found that fits" } else { "the smallest plan found, for" };
    let more = format!(
        "{fits} {budget}; {} saves the most: {} for {} ms per step",
        largest.choice,
        format_bytes(largest.saved_bytes.max(0) as u64),
        short(largest.cost_ms.max(0.0))
    );
    Card { question: QUESTION, answer: names.join(", "), more, ..Card::default() }
}

fn leak(summary: &RunSummary) -> Card {
    let memory = &summary.memory;
    let (answer, tone) = match memory.leak {
        Leak::TooShort => ("too few steps to tell".to_string(), Tone::Plain),
        Leak::Unclear { .. } => ("cannot tell".to_string(), Tone::Plain),
        Leak::None { .. } => ("no".to_string(), Tone::Good),
        Leak::Leaked { bytes, .. } => (format!("yes, {}", format_bytes(bytes)), Tone::Bad),
    };
    let noise = match memory.leak {
        Leak::None { drift_bytes: 0 } | Leak::TooShort => String::new(),
        Leak::None { drift_bytes } => format!("{} drift; ", format_bytes(drift_bytes)),
        Leak::Unclear { drift_bytes } => {
            format!("it rose by {}, not steadily; ", format_bytes(drift_bytes))
        }
        Leak::Leaked { bytes_per_step, .. } => {
            format!("{} per step; ", format_bytes(bytes_per_step.round() as u64))
        }
    };
    let mean = memory.mean_bytes.map_or(String::new(), |bytes| format!("mean {}, ", format_bytes(bytes)));
    let more = format!("{noise}{mean}{}", memory.render_efficiency());
    Card { question: "Did memory leak?", answer, more, tone, ..Card::default() }
}

fn speed(summary: &RunSummary) -> Card {
    let speed = &summary.speed;
    let answer = speed.tokens_per_s.map_or("unknown".into(), |rate| format!("{} tok/s", short(rate)));
    let step = speed.step_ms.map_or(String::new(), |ms| format!("{} ms per step", short(ms)));
    let monitor = match speed.monitor_part > 0.0 {
        true => format!("; {:.2} % of it measuring memory", 100.0 * speed.monitor_part),
        false => String::new(),
    };
    let busy = speed.gpu_util.map_or(String::new(), |percent| format!("; GPU {percent:.0} % busy"));
    let more = format!(
        "{step}, predicted {} ms{busy}; {} tokens in {}{monitor}",
        short(speed.planned_step_ms),
        grouped(speed.tokens as i64),
        duration(speed.seconds)
    );
    Card { question: "Speed", answer, more, ..Card::default() }
}

fn loss(summary: &RunSummary) -> Card {
    let loss = &summary.loss;
    let answer = match (loss.first, loss.last) {
        (Some(first), Some(last)) => format!("{} → {}", short(first), short(last)),
        _ => "not finite".into(),
    };
    let more = match (loss.best_eval, loss.last_eval) {
        (Some((step, best)), Some(last)) => {
            let step = grouped(step as i64);
            format!("evaluated: best {} after step {step}; last {}", short(best), short(last))
        }
        _ => "never evaluated".into(),
    };
    Card { question: "Loss", answer, more, ..Card::default() }
}

fn stable(summary: &RunSummary) -> Card {
    let stability = &summary.stability;
    let (answer, tone) = match stability.is_stable() {
        true => ("yes".to_string(), Tone::Good),
        false => ("no".to_string(), Tone::Bad),
    };
    let more = match &stability.failure {
        Some(message) => format!("{}: {message}", stability.render()),
        None => stability.render(),
    };
    Card { question: "Was it stable?", answer, more, tone, ..Card::default() }
}

fn planned_peak(run: &RunRecord) -> Card {
    let plan = &run.plan;
    let budget = format_bytes(plan.budget_bytes);
    let spare = plan.budget_bytes.abs_diff(plan.peak_bytes);
    let (more, tone) = match plan.fits {
        true => (format!("fits the budget of {budget}, {} to spare", format_bytes(spare)), Tone::Good),
        false => (format!("does not fit the budget of {budget}"), Tone::Bad),
    };
    let below = bar(plan.peak_bytes, plan.peak_bytes, plan.budget_bytes);
    Card { question: "Peak memory, planned", answer: format_bytes(plan.peak_bytes), more, below, tone }
}

fn planned_speed(run: &RunRecord) -> Card {
    let plan = &run.plan;
    let by = match plan.profile.origin.as_str() {
        "measured" => "the profile measured on this machine".to_string(),
        _ => format!("the profile `{}`", plan.profile.name),
    };
    let (answer, more) = match (plan.tokens_per_s, plan.step_ms) {
        (Some(tokens_per_s), Some(step_ms)) => (
            format!("{} tok/s", short(tokens_per_s)),
            format!("{} ms per step, according to {by}", short(step_ms)),
        ),
        _ => ("unknown".into(), "no profile for this GPU: set `memory.profile`".into()),
    };
    Card { question: "Speed, predicted", answer, more, ..Card::default() }
}

fn planned_batch(run: &RunRecord) -> Card {
    let plan = &run.plan;
    let answer = format!("{} tokens", grouped(plan.extent.tokens as i64));
    let more = match plan.micro_steps {
        count if count > 1.05 => format!("about {} micro-batches per step", short(count)),
        _ => "one micro-batch per step".into(),
    };
    Card { question: "Largest micro-batch", answer, more, ..Card::default() }
}
