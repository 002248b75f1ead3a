//! The recipe as text, each line with the foreign key it came from, and what there is to say about it.
//!
//! Keys stand in the order of the reference; required ones that are open stand there as comments.
//! Settings with one reason are listed together: forty lines that say the same would be read by nobody.
//! Left out: what is said on which channel (`commands/import.rs`), and how wide a line may be.

use super::Imported;
use super::draft::{LeftOut, Line, Origin};
use crate::single::key_places;
use serde_json::{Value as Json, json};
use std::fmt::Write;

/// Width of the rendered recipe.
const LINE: usize = 80;

/// The recipe; `file` is named in its first line.
pub fn render_recipe(imported: &Imported, file: &str) -> String {
    let title = format!(
        "From `{file}`, {}: beside each key stands the one it came from.",
        imported.origin.tool.file()
    );
    let mut text = String::new();
    text.push_str(&as_comment(&title));
    let mut section = "";
    for place in key_places() {
        let path = place.path();
        let missing = imported.missing.iter().find(|missing| missing.key == path);
        let rendered = match (imported.draft.line(&path), missing) {
            (_, Some(missing)) => {
                commented(&format!("# {} = \"...\"", place.name), &format!("to fill in: {}", missing.what))
            }
            (Some(line), None) => render_line(place.name, line),
            (None, None) => continue,
        };
        if section != place.section {
            section = place.section;
            write!(text, "\n[{section}]\n").expect("a string can be written to");
        }
        text.push_str(&rendered);
    }
    text
}

fn render_line(name: &str, line: &Line) -> String {
    let from = match &line.origin {
        Origin::Keys(keys) => keys.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>().join(", "),
        Origin::DefaultOf(tool) => format!("default of {tool}"),
        Origin::CommandLine => "given".to_owned(),
    };
    let remark = match line.remark.as_str() {
        "" => String::new(),
        remark => format!(": {remark}"),
    };
    let mark = if line.active { "" } else { "# " };
    commented(&format!("{mark}{name} = {}", line.toml), &format!("{from}{remark}"))
}

/// The comment behind the line, or above it where both are too wide together.
fn commented(line: &str, comment: &str) -> String {
    // A line break in a name would end the comment.
    let comment = &comment.replace(char::is_control, " ");
    let both = format!("{line}  # {comment}\n");
    match both.chars().count() > LINE + 1 {
        true => format!("{}{line}\n", as_comment(comment)),
        false => both,
    }
}

fn as_comment(text: &str) -> String {
    textwrap::wrap(text, LINE - 2).iter().map(|line| format!("# {line}\n")).collect()
}

/// What to know, for people.
pub fn render_notes(imported: &Imported, file: &str) -> String {
    let mut text =
        format!("`{file}` is read as {}: {}", imported.origin.tool.file(), imported.origin.because);
    let (known, unknown): (Vec<&LeftOut>, Vec<&LeftOut>) =
        imported.draft.left_out.iter().partition(|left| left.is_known);
    let mut group = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            write!(text, "\n\n{title}").expect("a string can be written to");
            lines.iter().for_each(|line| write!(text, "\n{line}").expect("a string can be written to"));
        }
    };
    group("no counterpart, and why:", by_reason(&known));
    group(
        "not known here, and not taken over:",
        unknown.iter().map(|left| format!("  {}: {} (line {})", left.key, left.value, left.line)).collect(),
    );
    group("assumed:", imported.draft.assumed.iter().map(|line| format!("  {line}")).collect());
    let missing = imported.missing.iter();
    group(
        "to fill in, or to give as KEY=VALUE:",
        missing.map(|missing| format!("  {}: {}", missing.key, missing.what)).collect(),
    );
    text
}

/// Settings that have the same reason, in the order of the first of them.
fn by_reason(left_out: &[&LeftOut]) -> Vec<String> {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for left in left_out {
        let setting = format!("{} (line {})", left.key, left.line);
        match reasons.iter_mut().find(|(why, _)| *why == left.why) {
            Some((_, settings)) => settings.push(setting),
            None => reasons.push((&left.why, vec![setting])),
        }
    }
    let rendered = reasons.iter().map(|(why, settings)| format!("  {}\n      {why}", settings.join(", ")));
    rendered.collect()
}

/// Everything for programs.
pub fn render_json(imported: &Imported, file: &str) -> Json {
    let lines = imported.draft.lines.iter().map(|line| {
        let (from, default_of) = match &line.origin {
            Origin::Keys(keys) => {
                let keys = keys.iter().map(|(key, line)| json!({ "key": key, "line": line }));
                (keys.collect::<Vec<_>>(), None)
            }
            Origin::DefaultOf(tool) => (vec![], Some(*tool)),
            Origin::CommandLine => (vec![], None),
        };
        json!({
            "key": line.key, "value": line.toml, "from": from, "default_of": default_of,
            "given": line.origin == Origin::CommandLine, "active": line.active, "remark": line.remark,
        })
    });
    let left = |is_known: bool| -> Vec<Json> {
        let chosen = imported.draft.left_out.iter().filter(|left| left.is_known == is_known);
        chosen
            .map(|left| json!({ "key": left.key, "line": left.line, "value": left.value, "why": left.why }))
            .collect()
    };
    let missing = imported.missing.iter();
    json!({
        "file": file,
        "tool": imported.origin.tool.name(),
        "because": imported.origin.because,
        "recipe": render_recipe(imported, file),
        "lines": lines.collect::<Vec<_>>(),
        "no_counterpart": left(true),
        "unknown": left(false),
        "assumed": imported.draft.assumed,
        "missing": missing.map(|missing| json!({ "key": missing.key, "what": missing.what })).collect::<Vec<_>>(),
    })
}
