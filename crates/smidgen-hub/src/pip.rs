//! Downloads packages with the user's own pip, so that its index, login, proxy and settings apply.
//!
//! Only wheels are accepted (a source package would run code), and only the package itself, without dependencies. pip's
//! output goes to stderr; if it fails, its last lines are in the error.

use crate::error::HubError;
use smidgen_recipe::PypiName;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The commands that are tried, in order.
const PIP_COMMANDS: [&[&str]; 4] = [&["pip"], &["pip3"], &["python3", "-m", "pip"], &["python", "-m", "pip"]];
/// Lines of pip's output in an error.
const LINES_SHOWN: usize = 6;

/// Downloads one wheel into the empty `folder` and returns its path.
pub fn download_wheel(name: &PypiName, folder: &Path, quiet: bool) -> Result<PathBuf, HubError> {
    let pip = find_pip()?;
    let requirement = match &name.version {
        Some(version) => format!("{}=={version}", name.package),
        None => name.package.clone(),
    };
    let mut command = Command::new(pip[0]);
    command.args(&pip[1..]).args(["download", "--no-deps", "--only-binary", ":all:", "-d"]).arg(folder);
    command.arg(&requirement).stdin(Stdio::null()).stderr(Stdio::piped());
    command.stdout(if quiet { Stdio::null() } else { Stdio::from(std::io::stderr()) });
    let output = command
        .spawn()
        .and_then(|child| child.wait_with_output())
        .map_err(|error| HubError::network(error).context(format!("cannot run `{}`", pip.join(" "))))?;
    if !output.status.success() {
        return Err(pip_failed(name, &pip.join(" "), &String::from_utf8_lossy(&output.stderr)));
    }
    let entries = std::fs::read_dir(folder).map_err(|error| HubError::file("list", folder, error))?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let wheels: Vec<PathBuf> =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_wheel).collect();
    match <[PathBuf; 1]>::try_from(wheels) {
        Ok([wheel]) => Ok(wheel),
        Err(wheels) => Err(HubError::network(format!(
            "pip downloaded {} wheels for `{name}`, expected one",
            wheels.len()
        ))),
    }
}

fn find_pip() -> Result<&'static [&'static str], HubError> {
    let works = |pip: &&&[&str]| {
        let mut command = Command::new(pip[0]);
        command.args(&pip[1..]).arg("--version");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    PIP_COMMANDS.iter().find(works).copied().ok_or_else(|| {
        let tried: Vec<String> = PIP_COMMANDS.iter().map(|pip| format!("`{}`", pip.join(" "))).collect();
        HubError::network(format!("pip not found: tried {}", tried.join(", ")))
            .hint("pip downloads `pypi:` models; activate a Python environment that has it")
    })
}

/// The error for a pip that failed, with the last lines of its output.
fn pip_failed(name: &PypiName, pip: &str, output: &str) -> HubError {
    let errors: Vec<&str> = output.lines().filter(|line| line.starts_with("ERROR:")).collect();
    let lines = if errors.is_empty() {
        output.lines().filter(|line| !line.trim().is_empty()).collect()
    } else {
        errors
    };
    let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
    let mut message = format!("`{pip} download` failed for `{name}`");
    last.iter().for_each(|line| message.push_str(&format!("\n  {line}")));
    let error = HubError::network(message);
    if output.contains("No matching distribution") {
        error.hint("check the name and the version; only wheels are accepted, not source packages")
    } else {
        error
    }
}
