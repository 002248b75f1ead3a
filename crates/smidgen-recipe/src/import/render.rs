//! The imported recipe as text, with the setting that each line came from, and the notes about the import.
//!
//! Keys are in the order of the reference; a required key that is still missing is a comment in its place.
//! Settings with the same reason are listed together, because nobody reads forty lines that say the same.
//! The caller (`commands/import.rs`) prints the texts and wraps the notes.

use super::Imported;
use super::draft::{LeftOut, Line, Source};
use crate::keys::KEYS;
use serde_json::{Value as Json, json};

/// Width of the rendered recipe.
const LINE: usize = 80;

/// The recipe; its first line names `file`.
pub fn render_recipe(imported: &Imported, file: &str) -> String {
    let title = format!(
        "Imported from `{file}`, {}. The comment at each key names the setting that it came from.",
        imported.origin.tool.file()
    );
    let mut text = String::new();
    text.push_str(&as_comment(&title));
    let mut section = "";
    for place in KEYS {
        let path = place.path();
        let missing = imported.missing.iter().find(|missing| missing.key == path);
        let rendered = match (imported.draft.line(&path), missing) {
            (_, Some(missing)) => {
                commented(&format!("# {} = \"...\"", place.name), &format!("required: {}", missing.what))
            }
            (Some(line), None) => render_line(place.name, line),
            (None, None) => continue,
        };
        if section != place.section {
            section = place.section;
            text.push_str(&format!("\n[{section}]\n"));
        }
        text.push_str(&rendered);
    }
    text
}

fn render_line(name: &str, line: &Line) -> String {
    let from = match &line.source {
        Source::Keys(keys) => keys.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>().join(", "),
        Source::DefaultOf(tool) => format!("default of {tool}"),
        Source::CommandLine => "from the command line".to_owned(),
    };
    let remark = match line.remark.as_str() {
        "" => String::new(),
        remark => format!(": {remark}"),
    };
    let mark = if line.active { "" } else { "# " };
    commented(&format!("{mark}{name} = {}", line.toml), &format!("{from}{remark}"))
}

/// The comment at the end of the line, or above it if both do not fit on one line.
fn commented(line: &str, comment: &str) -> String {
    // A line break in a name would end the comment.
    let comment = &comment.replace(char::is_control, " ");
    let both = format!("{line}  # {comment}\n");
    if both.chars().count() > LINE + 1 { format!("{}{line}\n", as_comment(comment)) } else { both }
}

fn as_comment(text: &str) -> String {
    textwrap::wrap(text, LINE - 2).iter().map(|line| format!("# {line}\n")).collect()
}

/// The notes about an import, as text.
pub fn render_notes(imported: &Imported, file: &str) -> String {
    let mut text =
        format!("reading `{file}` as {}: {}", imported.origin.tool.file(), imported.origin.because);
    for warning in &imported.draft.warnings {
        text.push_str(&format!("\n\nwarning: {warning}"));
    }
    let (known, unknown): (Vec<&LeftOut>, Vec<&LeftOut>) =
        imported.draft.left_out.iter().partition(|left| left.is_known);
    let mut group = |title: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text.push_str(&format!("\n\n{title}\n{}", lines.join("\n")));
        }
    };
    group("not carried over, and why:", by_reason(&known));
    group(
        "unknown, not carried over:",
        unknown.iter().map(|left| format!("  {}: {} (line {})", left.key, left.value, left.line)).collect(),
    );
    group("assumed:", imported.draft.assumed.iter().map(|line| format!("  {line}")).collect());
    let missing = imported.missing.iter();
    group(
        "missing (edit the recipe, or pass KEY=VALUE):",
        missing.map(|missing| format!("  {}: {}", missing.key, missing.what)).collect(),
    );
    text
}

/// Settings grouped by their reason, in the order of the first setting of each group.
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

/// The recipe and the notes, as JSON.
pub fn render_json(imported: &Imported, file: &str) -> Json {
    let lines = imported.draft.lines.iter().map(|line| {
        let (from, default_of) = match &line.source {
            Source::Keys(keys) => {
                let keys = keys.iter().map(|(key, line)| json!({ "key": key, "line": line }));
                (keys.collect::<Vec<_>>(), None)
            }
            Source::DefaultOf(tool) => (vec![], Some(*tool)),
            Source::CommandLine => (vec![], None),
        };
        json!({
            "key": line.key, "value": line.toml, "from": from, "default_of": default_of,
            "given": line.source == Source::CommandLine, "active": line.active, "remark": line.remark,
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
        "warnings": imported.draft.warnings,
        "missing": missing.map(|missing| json!({ "key": missing.key, "what": missing.what })).collect::<Vec<_>>(),
    })
}
