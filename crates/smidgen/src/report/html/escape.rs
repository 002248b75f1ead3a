//! Escapes text for HTML and JSON for a script element, so that no content of a file is interpreted as markup.
//!
//! Names of models and tensors, messages and recipes are not trusted. All text of a page passes through here.

use serde_json::Value;

/// Escapes text for content and for attributes in double quotes.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for sign in text.chars() {
        match sign {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // Control characters are replaced; HTML does not allow most of them.
            '\u{0}'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{7f}' => escaped.push('\u{fffd}'),
            sign => escaped.push(sign),
        }
    }
    escaped
}

/// Text with names in backticks, as HTML.
pub fn marked(text: &str) -> String {
    let mut pieces = text.split('`');
    let mut marked = escape(pieces.next().unwrap_or(""));
    let rest: Vec<&str> = pieces.collect();
    for pair in rest.chunks(2) {
        match pair {
            [name, after] => marked += &format!("<code>{}</code>{}", escape(name), escape(after)),
            // A backtick without a partner stays as it is.
            alone => alone.iter().for_each(|text| marked += &format!("`{}", escape(text))),
        }
    }
    marked
}

/// Data for the page's script; `<` is escaped, so that the data cannot end the script element.
pub fn escape_data(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c").replace('\u{2028}', "\\u2028")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn names_in_backticks_are_code() {
        assert_eq!(marked("a `b<` c `d` `e"), "a <code>b&lt;</code> c <code>d</code> `e");
        assert_eq!(marked("<"), "&lt;");
    }

    #[test]
    fn markup_stays_text() {
        let text = "<b onclick='x'>a & \"b\"</b>\u{1}";
        assert_eq!(escape(text), "&lt;b onclick=&#39;x&#39;&gt;a &amp; &quot;b&quot;&lt;/b&gt;\u{fffd}");
        let data = escape_data(&json!(["</script><script>alert(1)</script>"]));
        assert_eq!(data, "[\"\\u003c/script>\\u003cscript>alert(1)\\u003c/script>\"]");
    }
}
