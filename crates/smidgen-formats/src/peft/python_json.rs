//! Writes JSON as Python's `json.dumps(value, indent=2)` does, so that configs are byte for byte what PEFT
//! would write. It differs from serde's JSON in two ways: characters beyond ASCII are escaped, and floats are
//! written as by `repr`.
//! Left out: sorting keys, which the caller does, and NaN and infinity, which are not JSON.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

/// The JSON text, without a final newline.
pub fn render_python_json(value: &impl Serialize) -> String {
    let mut text = Vec::new();
    let formatter = PythonFormatter { pretty: PrettyFormatter::with_indent(b"  ") };
    value
        .serialize(&mut serde_json::Serializer::with_formatter(&mut text, formatter))
        .expect("the value is JSON, and writing to memory does not fail");
    String::from_utf8(text).expect("JSON is text")
}

struct PythonFormatter {
    pretty: PrettyFormatter<'static>,
}

/// Declares methods that forward to the pretty formatter.
macro_rules! as_pretty {
    ($($name:ident($($argument:ident: $kind:ty)?),)*) => {$(
        fn $name<W: ?Sized + Write>(&mut self, writer: &mut W $(, $argument: $kind)?) -> io::Result<()> {
            self.pretty.$name(writer $(, $argument)?)
        }
    )*};
}

impl Formatter for PythonFormatter {
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python_float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        for sign in fragment.chars() {
            match sign {
                // Control characters and quotes are escaped elsewhere.
                '\0'..='~' => writer.write_all(&[sign as u8])?,
                _ => {
                    for unit in sign.encode_utf16(&mut [0; 2]) {
                        write!(writer, "\\u{unit:04x}")?;
                    }
                }
            }
        }
        Ok(())
    }

    fn write_char_escape<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        escape: serde_json::ser::CharEscape,
    ) -> io::Result<()> {
        CompactFormatter.write_char_escape(writer, escape)
    }

    as_pretty! {
        begin_array(), end_array(), begin_array_value(first: bool), end_array_value(),
        begin_object(), end_object(), begin_object_key(first: bool), begin_object_value(), end_object_value(),
    }
}

/// The shortest digits that read back to the value. Below 1e-4 and from 1e16 on, with an exponent of at least
/// two digits.
fn python_float(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').expect("the form has an exponent");
        let exponent: i32 = exponent.parse().expect("an exponent is an integer");
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The expected texts are from Python 3.
    #[test]
    fn floats_and_characters_are_written_as_in_python() {
        for (value, text) in [
            (0.05, "0.05"),
            (1.0, "1.0"),
            (0.0001, "0.0001"),
            (0.00005, "5e-05"),
            (1.5e-7, "1.5e-07"),
            (-0.0, "-0.0"),
            (123456789012345.0, "123456789012345.0"),
            (1e16, "1e+16"),
            (2.5e300, "2.5e+300"),
        ] {
            assert_eq!(python_float(value), text);
        }
        let text =
            render_python_json(&json!({"a": "é 😀 \"\\\n\t\u{1}\u{7f}", "b": [], "c": {}, "d": [1, null]}));
        let expected = concat!(
            "{\n  \"a\": \"\\u00e9 \\ud83d\\ude00 \\\"\\\\\\n\\t\\u0001\\u007f\",\n",
            "  \"b\": [],\n  \"c\": {},\n  \"d\": [\n    1,\n    null\n  ]\n}"
        );
        assert_eq!(text, expected);
    }
}
