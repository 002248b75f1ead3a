//! Byte counts as people write them: `24GiB`, `1.5 GiB`, `8GB`, `512MiB`, `1048576`.
//!
//! `GB` is 10^9 and `GiB` is 2^30; a letter alone (`G`, `M`, `K`, `T`, either case) means the binary unit,
//! because memory is sold and reported in it. Case does not matter, and a space before the unit is allowed.
//! Parsing is exact integer arithmetic (a fraction of a byte is cut off), so a size never depends on float rounding.
//! Left out: signs, exponents, digit separators, bits.

/// Units by lower-case suffix.
const UNITS: &[(&str, u64)] = &[
    ("", 1),
    ("b", 1),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("k", 1 << 10),
    ("kib", 1 << 10),
    ("m", 1 << 20),
    ("mib", 1 << 20),
    ("g", 1 << 30),
    ("gib", 1 << 30),
    ("t", 1 << 40),
    ("tib", 1 << 40),
];

/// A readable form: two decimals of the largest binary unit that is not above the count.
///
/// ```text
/// 512 -> "512 B"      1536 -> "1.50 KiB"      15_236_396_154 -> "14.19 GiB"
/// ```
pub fn format_bytes(bytes: u64) -> String {
    let scale = match bytes {
        0..0x400 => return format!("{bytes} B"),
        0x400..0x10_0000 => (10, "KiB"),
        0x10_0000..0x4000_0000 => (20, "MiB"),
        0x4000_0000..0x100_0000_0000 => (30, "GiB"),
        _ => (40, "TiB"),
    };
    let (shift, unit) = scale;
    // Hundredths in integers, rounded half up; u128 because bytes * 100 may not fit u64.
    let hundredths = ((bytes as u128 * 100) + (1 << (shift - 1))) >> shift;
    format!("{}.{:02} {unit}", hundredths / 100, hundredths % 100)
}

/// The shortest form with a unit and at most three decimals that [`parse_bytes`] reads back to the same count.
pub fn format_bytes_exactly(bytes: u64) -> String {
    let units: [(&str, u64); 9] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KiB", 1 << 10),
        ("KB", 1_000),
        ("B", 1),
    ];
    let candidates = (0..=3).flat_map(|decimals| {
        units.iter().filter(move |(_, unit)| bytes >= *unit).map(move |(suffix, unit)| match decimals {
            0 => format!("{}{suffix}", bytes / unit),
            _ => format!("{:.decimals$}{suffix}", bytes as f64 / *unit as f64),
        })
    });
    let exact = candidates.filter(|text| parse_bytes(text) == Some(bytes));
    exact.min_by_key(String::len).unwrap_or_else(|| format!("{bytes}B"))
}

/// The count that `text` names, or `None` if it is not a size or does not fit 63 bits
/// (the range of a TOML integer).
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_end);
    let suffix = suffix.trim_start().to_ascii_lowercase();
    let unit = UNITS.iter().find(|(name, _)| *name == suffix)?.1;

    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => return None,
        None => (number, ""),
    };
    if whole.is_empty() || fraction.len() > 15 || (unit == 1 && !fraction.is_empty()) {
        return None;
    }
    let scale = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = match fraction {
        "" => 0,
        digits => digits.parse().ok()?,
    };
    let whole: u64 = whole.parse().ok()?;
    let bytes = (whole as u128 * scale + fraction) * unit as u128 / scale;
    u64::try_from(bytes).ok().filter(|bytes| *bytes <= i64::MAX as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("24 GiB", 24 << 30),
            ("24gib", 24 << 30),
            ("24G", 24 << 30),
            ("24g", 24 << 30),
            ("8GB", 8_000_000_000),
            ("1.5GiB", 3 << 29),
            ("512MiB", 512 << 20),
            ("512M", 512 << 20),
            ("64KiB", 64 << 10),
            ("2TiB", 2 << 40),
            ("2T", 2 << 40),
            ("0.1KiB", 102),
            ("100B", 100),
            ("1048576", 1 << 20),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_bytes(text), Some(bytes), "{text}");
        }
    }

    #[test]
    fn other_texts_are_not_sizes() {
        for text in [
            "",
            "GiB",
            "-1GiB",
            "1.GiB",
            ".5GiB",
            "1.5",
            "1..5GiB",
            "1e9",
            "24Gb2",
            "8 G iB",
            "24 gigs",
            "9223372036854775808",
            "99999999TiB",
            "1_000",
        ] {
            assert_eq!(parse_bytes(text), None, "{text}");
        }
    }

    #[test]
    fn readable_form() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (512 << 20, "512.00 MiB"),
            (15_236_396_154, "14.19 GiB"),
            (3 << 40, "3.00 TiB"),
            (u64::MAX, "16777216.00 TiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }

    #[test]
    fn exact_form_is_short_and_reads_back() {
        for text in ["24GiB", "1.5GiB", "22.42GiB", "8GB", "512MiB", "2TiB", "100B", "1025B"] {
            let bytes = parse_bytes(text).expect("a size");
            assert_eq!(format_bytes_exactly(bytes), text);
        }
        // A fixed odd stride visits counts of every magnitude and residue.
        for step in 0..64 {
            let bytes = (0x9e37_79b9_7f4a_7c15u64 >> 1) >> step;
            assert_eq!(parse_bytes(&format_bytes_exactly(bytes)), Some(bytes));
        }
    }
}
