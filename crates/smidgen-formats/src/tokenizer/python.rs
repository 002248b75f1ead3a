//! What chat templates expect of Python: how values print, `json.dumps`, and `strftime`.
//! Templates are written against Python's Jinja, and a model was trained on what came out there, to the letter.
//! Left out: the local time zone. A moment is given in UTC, so that the same one prints the same everywhere.

use std::fmt::Write;
use std::io;
use std::time::{Duration, SystemTime};

use minijinja::value::ValueKind;
use minijinja::{Error, Value};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// As `str(value)`: a string as it is, everything else as `repr` has it.
pub(super) fn print(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.to_string()),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("None".into()),
        ValueKind::Bool => Ok(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::String => Ok(quoted(value.as_str().unwrap_or_default())),
        ValueKind::Seq => {
            let items: Vec<String> = value.try_iter()?.map(|item| repr(&item)).collect::<Result<_, _>>()?;
            Ok(format!("[{}]", items.join(", ")))
        }
        // A namespace or a loop is a map too, and prints by itself; what comes from JSON has only strings as keys.
        ValueKind::Map => {
            let pair = |key: Value| Ok(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            let pairs: Vec<String> = value.try_iter()?.map(pair).collect::<Result<_, Error>>()?;
            Ok(format!("{{{}}}", pairs.join(", ")))
        }
        _ => Ok(value.to_string()),
    }
}

/// Single quotes, unless the text has them and no double ones.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for sign in text.chars() {
        match sign {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            sign if sign == quote => {
                out.push('\\');
                out.push(sign);
            }
            sign if (sign as u32) < 0x20 || sign as u32 == 0x7f => {
                write!(out, "\\x{:02x}", sign as u32).expect("a string can be written to");
            }
            sign => out.push(sign),
        }
    }
    out.push(quote);
    out
}

/// As `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub(super) fn json_dumps(value: &Value, indent: Option<usize>) -> Result<String, serde_json::Error> {
    let json = serde_json::to_value(value)?;
    let mut out = Vec::new();
    match indent {
        Some(indent) => {
            let spaces = vec![b' '; indent];
            json.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))?;
        }
        None => json.serialize(&mut Serializer::with_formatter(&mut out, Spaced(CompactFormatter)))?,
    }
    Ok(String::from_utf8(out).expect("JSON of strings is UTF-8"))
}

/// A space behind every comma and colon.
struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// As `datetime.strftime` with English names, in UTC; an error names the sign that is not understood.
pub(super) fn strftime(moment: SystemTime, format: &str) -> Result<String, char> {
    let since = moment.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, second_of_day) = ((since / 86_400) as i64, since % 86_400);
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let hour_of_half = if hour % 12 == 0 { 12 } else { hour % 12 };
    // 1970-01-01 was a Thursday.
    let weekday = WEEKDAYS[((days + 3) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let day_of_year = days - days_from_civil_january(year) + 1;
    let mut out = String::new();
    let mut signs = format.chars();
    while let Some(sign) = signs.next() {
        if sign != '%' {
            out.push(sign);
            continue;
        }
        let code = signs.next().unwrap_or('%');
        let written = match code {
            'Y' => write!(out, "{year:04}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'e' => write!(out, "{day:2}"),
            'B' => write!(out, "{month_name}"),
            'b' | 'h' => write!(out, "{}", &month_name[..3]),
            'A' => write!(out, "{weekday}"),
            'a' => write!(out, "{}", &weekday[..3]),
            'j' => write!(out, "{day_of_year:03}"),
            'H' => write!(out, "{hour:02}"),
            'I' => write!(out, "{hour_of_half:02}"),
            'M' => write!(out, "{minute:02}"),
            'S' => write!(out, "{second:02}"),
            'p' => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            'F' => write!(out, "{year:04}-{month:02}-{day:02}"),
            'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            'Z' => write!(out, "UTC"),
            'z' => write!(out, "+0000"),
            '%' => write!(out, "%"),
            other => return Err(other),
        };
        written.expect("a string can be written to");
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
///
/// Years are counted from March, so that the leap day is the last of a year and the months before it have
/// the lengths 31, 30, 31, 30, 31 over and over: day `d` of such a year lies in month `(5 d + 2) / 153`.
fn civil_from_days(days: i64) -> (i64, i64, i64) {
    const DAYS_OF_400_YEARS: i64 = 146_097;
    let from_march_of_0 = days + 719_468;
    let era = from_march_of_0.div_euclid(DAYS_OF_400_YEARS);
    let day = from_march_of_0.rem_euclid(DAYS_OF_400_YEARS);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, january) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + january, month, day_of_month)
}

/// Days from 1970-01-01 to January 1st of a year.
fn days_from_civil_january(year: i64) -> i64 {
    let before = year - 1;
    before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::json;

    use super::*;

    /// Expected texts are from Python: `datetime.fromtimestamp(s, timezone.utc).strftime(f)`.
    #[test]
    fn moments_print_as_in_python() {
        let check = |seconds: u64, format: &str, expected: &str| {
            let moment = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(moment, format).as_deref(), Ok(expected));
        };
        check(0, "%d %b %Y", "01 Jan 1970");
        check(1_721_952_000, "%d %b %Y", "26 Jul 2024");
        check(1_709_208_000, "%A, %B %d, %Y %H:%M:%S %j", "Thursday, February 29, 2024 12:00:00 060");
        check(1_735_689_599, "%a %y-%m-%d %I:%M %p %j %%", "Tue 24-12-31 11:59 PM 366 %");
        check(951_782_400, "%F %T", "2000-02-29 00:00:00");
        check(4_107_542_400, "%Y-%m-%d %a", "2100-03-01 Mon");
        assert_eq!(strftime(SystemTime::UNIX_EPOCH, "%Q"), Err('Q'));
    }

    /// Expected texts are from Python's `str` and `json.dumps(.., ensure_ascii=False)`.
    #[test]
    fn values_print_as_in_python() {
        let value = Value::from(Serde(json!({"a": [1, 2.5, null, true], "b": "it's\n\"ü\"", "c": {}})));
        assert_eq!(print(&value).unwrap(), r#"{'a': [1, 2.5, None, True], 'b': 'it\'s\n"ü"', 'c': {}}"#);
        assert_eq!(print(&Value::from("it's")).unwrap(), "it's");
        assert_eq!(print(&Value::from(vec!["it's"])).unwrap(), r#"["it's"]"#);
        assert_eq!(
            json_dumps(&value, None).unwrap(),
            r#"{"a": [1, 2.5, null, true], "b": "it's\n\"ü\"", "c": {}}"#
        );
        let indented = Value::from(Serde(json!({"a": [1], "b": []})));
        assert_eq!(json_dumps(&indented, Some(2)).unwrap(), "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}");
    }
}
