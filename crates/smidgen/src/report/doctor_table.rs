//! The checks of `smidgen doctor` as a table: verdict, name and finding, with remedies below.
//!
//! Left out: the checks themselves (`doctor/`).

use crate::console::colour::{REMEDY, bad, caution, good};
use crate::doctor::{Check, Verdict};

pub fn render_table(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        let mut lines = check.finding.lines();
        let first = lines.next().unwrap_or_default();
        let word = match check.verdict {
            Verdict::Pass => good,
            Verdict::Warn => caution,
            Verdict::Fail => bad,
        }(check.verdict.name());
        text += &format!("  {word}  {:<14} {first}\n", check.name);
        for line in lines {
            text += &format!("{:23}{}\n", "", line.trim_end());
        }
        if check.verdict != Verdict::Pass {
            for remedy in &check.remedies {
                text += &format!("{:23}{REMEDY} {remedy}\n", "");
            }
        }
    }
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let (warned, failed) = (count(Verdict::Warn), count(Verdict::Fail));
    let plural = if warned == 1 { "" } else { "s" };
    text + &format!(
        "{} checks: {} passed, {warned} warning{plural}, {failed} failed\n",
        checks.len(),
        count(Verdict::Pass)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::colour::plain;
    use crate::failure::FailureKind;

    #[test]
    fn remedies_stand_below_what_they_are_for() {
        let checks = [
            Check::pass("memory", "7.00 GiB free"),
            Check::warn("disk", "little\nvery little", "make room"),
            Check::fail("gpu", FailureKind::Device, "none", "buy one"),
        ];
        expect_test::expect![[r#"
              pass  memory         7.00 GiB free
              warn  disk           little
                                   very little
                                   remedy: make room
              fail  gpu            none
                                   remedy: buy one
            3 checks: 1 passed, 1 warning, 1 failed
        "#]]
        .assert_eq(&plain(&render_table(&checks)));
    }
}
