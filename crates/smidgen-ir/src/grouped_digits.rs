//! Numbers with thousands separators: `1234567` as `1,234,567`.
//!
//! Errors about wrong file sizes print them exactly, because they may differ by a few bytes only.
//! Left out: units and rounding.

use std::fmt;

pub struct Grouped(pub u64);

impl fmt::Display for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        for (position, digit) in digits.char_indices() {
            if position > 0 && (digits.len() - position).is_multiple_of(3) {
                f.write_str(",")?;
            }
            write!(f, "{digit}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Grouped;

    #[test]
    fn commas_separate_groups_of_three_digits_from_the_right() {
        let check = |n: u64, text: &str| assert_eq!(Grouped(n).to_string(), text);
        check(0, "0");
        check(999, "999");
        check(1_000, "1,000");
        check(123_456, "123,456");
        check(u64::MAX, "18,446,744,073,709,551,615");
    }
}
