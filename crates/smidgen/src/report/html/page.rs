//! The page: the HTML frame, the sections in order, and tables without a chart.
//!
//! The page is one file with styles and script; its content security policy forbids loading anything else. The same
//! content is used for `report.html`, `plan --html` and the live page, which reloads it during a run.

use super::charts::percent;
use super::choices::render_choices;
use super::escape::escape;
use super::headline::render_headline;
use super::memory_timeline::render_memory;
use super::run_charts::{render_loss, render_run_charts};
use crate::report::numbers::{duration, grouped};
use crate::report::run_folder::{RunRecord, State};
use crate::report::run_summary::{RunSummary, summarize};
use crate::run_folder::history::PartEnd;
use smidgen_ir::bytes::format_bytes;
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const LIVE_SCRIPT: &str = include_str!("live.js");

/// A self-contained page of a run or a plan.
pub fn render_page(run: &RunRecord) -> String {
    render_frame(&title(run), &render_content(run), "")
}

/// A page that polls its server for updates.
pub fn render_live_page(run: &RunRecord) -> String {
    render_frame(&title(run), &render_content(run), &format!("<script>{LIVE_SCRIPT}</script>"))
}

/// A complete HTML file; `content` and `live` are HTML.
pub fn render_frame(title: &str, content: &str, live: &str) -> String {
    let connect = if live.is_empty() { "" } else { "; connect-src 'self'" };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'{connect}\">\n\
         <meta name=\"generator\" content=\"smidgen {}\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n\
         <main id=\"content\">\n{content}</main>\n<script>\n{SCRIPT}</script>\n{live}</body>\n</html>\n",
        env!("CARGO_PKG_VERSION"),
        escape(title)
    )
}

fn title(run: &RunRecord) -> String {
    let name = run.folder.as_ref().and_then(|folder| folder.file_name()).map(|name| name.to_string_lossy());
    match name {
        Some(name) => format!("{name} · smidgen report"),
        None => "smidgen plan".into(),
    }
}

/// Everything that changes during a run.
pub fn render_content(run: &RunRecord) -> String {
    let summary = summarize(run);
    let mut text = render_header(run, &summary);
    let mut section = |id: &str, heading: &str, body: String| {
        write!(text, "<section id=\"{id}\" aria-labelledby=\"{id}-h\"><h2 id=\"{id}-h\">{heading}</h2>\n{body}</section>\n")
            .expect("writing to a string");
    };
    if let Some(loss) = render_loss(run, &summary) {
        section("loss", "Loss", loss);
    }
    section("answers", "Summary", render_headline(run, &summary));
    if !run.rows.is_empty() {
        section("course", "Training curves", render_run_charts(run, &summary));
    }
    section("memory", "Memory", render_memory(&run.plan));
    section("choices", "Choices and reasons", render_choices(&run.plan));
    section("phases", "Memory by phase", render_phases(run));
    if !run.rank_bytes.is_empty() {
        section("ranks", "Memory by rank", render_ranks(run));
    }
    if let Some(history) = run.history.as_ref().filter(|history| history.parts.len() > 1) {
        section("parts", "Parts of the run", render_parts(&history.parts));
    }
    if let Some(job) = &run.job {
        let job = format!(
            "<details id=\"job-text\"><summary>Every key of the recipe, as resolved</summary><pre>{}</pre></details>",
            escape(job)
        );
        section("job", "The job", job);
    }
    text
}

fn render_header(run: &RunRecord, summary: &RunSummary) -> String {
    let title = if summary.title.is_empty() { "A run" } else { &summary.title };
    let class = match run.state() {
        State::Running => "running",
        State::Ended(PartEnd::Done | PartEnd::StoppedEarly) => "done",
        State::Planned | State::Unknown | State::Ended(PartEnd::PlanChanged) => "plain",
        State::Killed | State::Ended(PartEnd::Interrupted | PartEnd::AbovePlan | PartEnd::Failed) => {
            "stopped"
        }
    };
    let mut facts =
        vec![format!("<span class=\"state {class}\" id=\"state\">{}</span>", escape(&summary.status))];
    let policy = &run.plan.policy;
    facts.push(match policy.device.as_str() {
        "cpu" => format!("CPU, {} threads", policy.threads),
        device => escape(device),
    });
    if let Some(part) = run.history.as_ref().and_then(|history| history.parts.first()) {
        facts.push(format!("started {}", utc(part.began_unix_s)));
    }
    let mut notes = render_progress(run, summary);
    if run.folder.is_some() && run.rows.is_empty() {
        notes.push_str("<p class=\"lead\">No step has finished yet: this is the plan.</p>");
    }
    if run.has_torn_line && !run.is_running {
        notes.push_str(
            "<p class=\"lead\">The last line of <code>metrics.jsonl</code> is incomplete and was skipped.</p>",
        );
    }
    format!(
        "<header><h1>{}</h1><p class=\"facts\">{}</p>{notes}</header>\n",
        escape(title),
        facts.join(" · ")
    )
}

/// The progress of an unfinished run, and the time left.
fn render_progress(run: &RunRecord, summary: &RunSummary) -> String {
    let (done, total) = (summary.steps, summary.total_steps);
    let is_ended =
        matches!(run.state(), State::Planned | State::Ended(PartEnd::Done | PartEnd::StoppedEarly));
    if is_ended || total == 0 || done >= total {
        return String::new();
    }
    let part = percent(done as f64 / total as f64);
    let left = summary.left_s.map_or(String::new(), |seconds| format!(" · about {} left", duration(seconds)));
    format!(
        "<div class=\"progress\" role=\"progressbar\" aria-label=\"steps done\" aria-valuemin=\"0\" \
         aria-valuemax=\"{total}\" aria-valuenow=\"{done}\"><b style=\"width:{part}\"></b></div>\
         <p class=\"facts\">{} of {} steps{left}</p>",
        grouped(done as i64),
        grouped(total as i64)
    )
}

/// Planned and measured memory of each phase.
fn render_phases(run: &RunRecord) -> String {
    const SPACES: [&str; 4] = ["device", "pinned", "host", "disk"];
    let planned_of = |name: &str| {
        let own = run.phases.get(name).and_then(|phase| phase.planned.as_ref());
        own.or_else(|| run.plan.life.get(name))
    };
    let names = ["prepare", "load", "resume", "train", "eval", "save", "merge", "export", "generate"];
    let known: Vec<&str> = names
        .into_iter()
        .filter(|name| run.phases.contains_key(*name) || run.plan.life.contains_key(*name))
        .collect();
    let shown: Vec<&str> = SPACES
        .into_iter()
        .filter(|space| {
            let planned =
                known.iter().filter_map(|name| planned_of(name)?.get(*space)).any(|bytes| *bytes > 0);
            planned || *space == "device"
        })
        .collect();
    // A plan without a run has no measurements.
    let is_run = run.folder.is_some();
    let size = |bytes: Option<u64>| bytes.map_or("–".to_string(), format_bytes);
    let mut rows = String::new();
    for name in &known {
        let measured = run.phases.get(*name).map(|phase| &phase.measured);
        write!(rows, "<tr><th scope=\"row\">{name}</th>").expect("writing to a string");
        for space in &shown {
            let planned = planned_of(name).and_then(|spaces| spaces.get(*space).copied());
            let used = measured.and_then(|spaces| spaces.get(*space).copied().flatten());
            let above = matches!((planned, used), (Some(planned), Some(used)) if used > planned);
            let class = if above { " class=\"above\"" } else { "" };
            write!(rows, "<td>{}</td>", size(planned)).expect("writing to a string");
            if is_run {
                write!(rows, "<td{class}>{}</td>", size(used)).expect("writing to a string");
            }
        }
        rows.push_str("</tr>");
    }
    let heading = |space: &&str| match is_run {
        true => format!("<th scope=\"colgroup\" colspan=\"2\">{space}</th>"),
        false => format!("<th scope=\"col\">{space}</th>"),
    };
    let spaces: String = shown.iter().map(heading).collect();
    let kinds = match is_run {
        true => "<th scope=\"col\">planned</th><th scope=\"col\">measured</th>".repeat(shown.len()),
        false => "<th scope=\"col\">planned</th>".repeat(shown.len()),
    };
    format!(
        "<p class=\"lead\">Peak memory of each phase. \
         The phases merge, export and generate are separate commands after training.</p>\
         <div class=\"scroll\"><table><thead><tr><td></td>{spaces}</tr><tr><th scope=\"col\">phase</th>{kinds}</tr></thead>\
         <tbody>{rows}</tbody></table></div>"
    )
}

/// The measured peak of each rank, next to the plan, which is the same for all ranks.
fn render_ranks(run: &RunRecord) -> String {
    let planned = run.plan.peak_bytes;
    let mut rows = String::new();
    for (rank, bytes) in run.rank_bytes.iter().enumerate() {
        let class = if *bytes > planned { " class=\"above\"" } else { "" };
        let (planned, bytes) = (format_bytes(planned), format_bytes(*bytes));
        write!(rows, "<tr><th scope=\"row\">rank {rank}</th><td>{planned}</td><td{class}>{bytes}</td></tr>")
            .expect("writing to a string");
    }
    format!(
        "<div class=\"scroll\"><table><thead><tr><td></td><th scope=\"col\">planned</th>\
         <th scope=\"col\">measured</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
}

fn render_parts(parts: &[crate::run_folder::history::Part]) -> String {
    let mut rows = String::new();
    for part in parts {
        let how = match part.ended {
            None => "no end recorded: killed, or still running",
            Some(PartEnd::Done) => "done",
            Some(PartEnd::StoppedEarly) => "stopped early",
            Some(PartEnd::Interrupted) => "interrupted",
            Some(PartEnd::AbovePlan) => "stopped: used more memory than planned",
            Some(PartEnd::PlanChanged) => "continued with another plan",
            Some(PartEnd::Failed) => "failed",
        };
        let last = part.last_step.map_or("–".to_string(), |step| grouped(step as i64));
        let message =
            part.message.as_deref().map_or(String::new(), |message| format!(": {}", escape(message)));
        let accepted: String =
            part.accepted.iter().map(|change| format!("<br>accepted: {}", escape(change))).collect();
        write!(
            rows,
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{last}</td><td>{}</td><td>{how}{message}{accepted}</td></tr>",
            utc(part.began_unix_s),
            grouped(part.first_step as i64),
            format_bytes(part.planned_bytes)
        )
        .expect("writing to a string");
    }
    format!(
        "<div class=\"scroll\"><table class=\"words\"><thead><tr><th scope=\"col\">started</th>\
         <th scope=\"col\">after step</th>\
         <th scope=\"col\">to step</th><th scope=\"col\">planned</th><th scope=\"col\">how it ended</th></tr></thead>\
         <tbody>{rows}</tbody></table></div>"
    )
}

/// A time as text. Years are counted from March, so that the leap day is the last day of a year.
fn utc(unix_s: u64) -> String {
    let (days, seconds) = (unix_s / 86_400, unix_s % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn moments_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_826_154), "2000-02-29 12:09 UTC");
        assert_eq!(utc(1_735_689_599), "2024-12-31 23:59 UTC");
    }
}
