//! The checklist before a run: each check passes, warns or fails, and names a remedy if it does not pass.
//!
//! Checks of the machine come first, then those of a recipe. A warning means that some runs may be slow or stop; a
//! failure means that this recipe, or any run on the device, cannot start. The checks change nothing.

pub mod all_reduce;
pub mod disk_rates;
pub mod environment;
pub mod load;
pub mod machine;
pub mod measure;
pub mod ranks;
pub mod run;

use crate::failure::{Failure, FailureKind};
use serde::Serialize;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Pass,
    Warn,
    Fail,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub verdict: Verdict,
    pub finding: String,
    /// What to do about it.
    pub remedies: Vec<String>,
    /// The kind of the failure, if it fails.
    #[serde(skip)]
    pub kind: FailureKind,
    /// The numbers of the finding, for the JSON; null if it has none.
    pub facts: Value,
}

impl Check {
    pub fn pass(name: &'static str, finding: impl Into<String>) -> Check {
        Check::new(name, Verdict::Pass, finding)
    }

    pub fn warn(name: &'static str, finding: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { remedies: vec![remedy.into()], ..Check::new(name, Verdict::Warn, finding) }
    }

    /// A warning if it is one, else a pass.
    pub fn warn_if(is_warning: bool, name: &'static str, finding: impl Into<String>, remedy: &str) -> Check {
        if is_warning { Check::warn(name, finding, remedy) } else { Check::pass(name, finding) }
    }

    pub fn fail(
        name: &'static str,
        kind: FailureKind,
        finding: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Check {
        Check { kind, remedies: vec![remedy.into()], ..Check::new(name, Verdict::Fail, finding) }
    }

    /// Turns a failure into a failed check.
    pub fn of_failure(name: &'static str, failure: &Failure) -> Check {
        let remedies = match failure.hints.as_slice() {
            [] => vec!["fix what the message names, then run `smidgen doctor` again".to_owned()],
            hints => hints.to_vec(),
        };
        Check { remedies, kind: failure.kind, ..Check::new(name, Verdict::Fail, failure.message.clone()) }
    }

    pub fn with(self, facts: Value) -> Check {
        Check { facts, ..self }
    }

    fn new(name: &'static str, verdict: Verdict, finding: impl Into<String>) -> Check {
        let finding = finding.into();
        Check { name, verdict, finding, remedies: vec![], kind: FailureKind::Device, facts: Value::Null }
    }
}

/// The result of the command: a failure if any check failed.
pub fn ending(checks: &[Check]) -> Result<(), Failure> {
    let failed: Vec<&Check> = checks.iter().filter(|check| check.verdict == Verdict::Fail).collect();
    let Some(first) = failed.first() else { return Ok(()) };
    let names: Vec<String> = failed.iter().map(|check| format!("`{}`", check.name)).collect();
    let message = format!("{} of {} checks failed: {}", failed.len(), checks.len(), names.join(", "));
    Err(Failure::new(first.kind, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_fails_the_command() {
        let fine = Check::pass("memory", "enough");
        let odd = Check::warn("disk", "little", "make room");
        assert!(ending(&[fine.clone(), odd.clone()]).is_ok());
        let wrong = Check::of_failure("recipe", &Failure::recipe("no such key"));
        assert!(!wrong.remedies.is_empty());
        let failure = ending(&[fine, odd, wrong]).unwrap_err();
        assert_eq!((failure.exit_code(), &*failure.message), (2, "1 of 3 checks failed: `recipe`"));
    }
}
