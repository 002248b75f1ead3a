//! Small tables in 80 columns: names left-aligned, numbers right-aligned, one or two spaces between columns.
//! A column is as wide as its widest cell.
//! Left out: colour, and truncation.

/// Width of a line, in characters.
pub const LINE: usize = 80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// The lines of a table, indented by two spaces. Every row has one cell per heading.
pub fn render_columns(headings: &[(&str, Side)], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0).max(headings[column].0.chars().count())
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let wide = 2 + widths.iter().sum::<usize>() + 2 * (widths.len() - 1);
    let gap = if wide > LINE { " " } else { "  " };
    let line = |cells: Vec<&str>| {
        let padded = cells.iter().enumerate().map(|(column, cell)| match headings[column].1 {
            Side::Left => format!("{cell:<width$}", width = widths[column]),
            Side::Right => format!("{cell:>width$}", width = widths[column]),
        });
        let joined: Vec<String> = padded.collect();
        format!("  {}", joined.join(gap)).trim_end().to_string() + "\n"
    };
    let mut text = line(headings.iter().map(|(heading, _)| *heading).collect());
    rows.iter().for_each(|row| text.push_str(&line(row.iter().map(String::as_str).collect())));
    text
}

/// A line `  name         value`; a long value continues below in the same column.
pub fn render_field(name: &str, value: &str) -> String {
    const INDENT: usize = 15;
    let mut text = format!("  {name:<12} ");
    let mut column = INDENT;
    for (number, word) in value.split(' ').enumerate() {
        let length = word.chars().count();
        if number > 0 && column + 1 + length > LINE {
            text.push('\n');
            text.push_str(&" ".repeat(INDENT));
            column = INDENT;
        } else if number > 0 {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
    text
}

/// Four significant digits, or an exponent if the number is too small or too large for them.
pub fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        0.0 => "0".to_string(),
        _ if !value.is_finite() => value.to_string(),
        0.001..1.0 => format!("{value:.4}"),
        1.0..10.0 => format!("{value:.3}"),
        10.0..100.0 => format!("{value:.2}"),
        100.0..10_000.0 => format!("{value:.1}"),
        _ => format!("{value:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_right_aligned() {
        let rows = [vec!["q".to_string(), "1".to_string()], vec!["down".to_string(), "20".to_string()]];
        let text = render_columns(&[("name", Side::Left), ("‖A‖", Side::Right)], &rows);
        assert_eq!(text, "  name  ‖A‖\n  q       1\n  down   20\n");
    }

    #[test]
    fn long_fields_continue_below() {
        let words = ["module"; 12].join(" ");
        let text = render_field("modules", &words);
        assert_eq!(
            text,
            format!(
                "  modules      {}\n{}{}\n",
                ["module"; 9].join(" "),
                " ".repeat(15),
                ["module"; 3].join(" ")
            )
        );
    }

    #[test]
    fn four_digits_of_a_number() {
        for (value, text) in [
            (0.0, "0"),
            (0.00012345, "1.23e-4"),
            (0.012345, "0.0123"),
            (1.23456, "1.235"),
            (-12.3456, "-12.35"),
            (1234.56, "1234.6"),
            (123456.0, "1.23e5"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
