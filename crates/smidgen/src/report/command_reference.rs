//! Every command and option in Markdown, generated from the definitions of the command line.
//!
//! `docs/commands.md` is this text; a test compares them.
//! Left out: `--help` and `--version`.

use clap::{Arg, Command};
use std::fmt::Write;

/// The reference of all commands, in the order of `--help`.
pub fn render_command_reference(command: &Command) -> String {
    let mut text = String::new();
    for option in command.get_arguments().filter(|arg| arg.is_global_set()) {
        writeln!(text, "{} is an option of every command: {}.", syntax(option), sentence(option))
            .expect("a string can be written to");
    }
    for command in command.get_subcommands().filter(|command| command.get_name() != "help") {
        let (name, about) =
            (command.get_name(), command.get_about().map(ToString::to_string).unwrap_or_default());
        write!(text, "\n## smidgen {name}\n\n{about}.\n\n").expect("a string can be written to");
        writeln!(text, "```\n{}\n```\n", usage(command)).expect("a string can be written to");
        text.push_str("| | |\n|---|---|\n");
        let own = command.get_arguments().filter(|arg| !arg.is_global_set() && arg.get_id() != "help");
        for arg in own.filter(|arg| !arg.is_hide_set()) {
            writeln!(text, "| {} | {} |", syntax(arg), meaning(arg)).expect("a string can be written to");
        }
    }
    text
}

/// `smidgen plan [OPTIONS] <RECIPE> [KEY=VALUE]...`
fn usage(command: &Command) -> String {
    let usage =
        command.clone().bin_name(format!("smidgen {}", command.get_name())).render_usage().to_string();
    usage.trim_start_matches("Usage:").trim().to_owned()
}

fn value_name(arg: &Arg) -> Option<String> {
    let takes = arg.get_action().takes_values();
    let named = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    takes.then(|| named.unwrap_or_else(|| arg.get_id().as_str().to_uppercase()))
}

fn syntax(arg: &Arg) -> String {
    let value = value_name(arg);
    match (arg.get_long(), value) {
        (Some(long), Some(value)) => format!("`--{long} {value}`"),
        (Some(long), None) => format!("`--{long}`"),
        (None, value) => format!("`{}`", value.unwrap_or_default()),
    }
}

fn meaning(arg: &Arg) -> String {
    let mut text = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let words: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|_| arg.get_action().takes_values())
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !words.is_empty() {
        text += &format!(": {}", words.join(", "));
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    if !defaults.is_empty() && arg.get_action().takes_values() {
        text += &format!(" (default: {})", defaults.join(", "));
    }
    text.replace('|', "\\|").replace('\n', " ")
}

fn sentence(arg: &Arg) -> String {
    let text = meaning(arg);
    let mut signs = text.chars();
    match signs.next() {
        Some(first) => first.to_lowercase().chain(signs).collect(),
        None => text,
    }
}
