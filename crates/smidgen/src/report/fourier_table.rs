//! The coefficients that LS-LoRA learned, by module, and their distance from the start.
//! With u = tanh(z/sigma) a module adds a0 + a1·u + a2·sin(πu) + a3·cos(πu); it starts at (0, 1, 0, 0).
//! `train` prints this table at the end of a run, and `inspect` at any time.
//! Left out: A and B.

use crate::console::columns::{Side, render_columns};
use serde_json::{Value, json};
use smidgen_formats::peft::split_layer;

/// Above this value of |a2| + |a3| a module counts as non-linear.
pub const NOTICEABLE: f32 = 0.01;
const START: [f32; 4] = [0.0, 1.0, 0.0, 0.0];
const STRONGEST: usize = 3;

#[derive(Clone, Debug, PartialEq)]
pub struct FourierRow {
    /// The module's path.
    pub module: String,
    /// a0 to a3.
    pub coefficients: [f32; 4],
    pub sigma: f32,
}

impl FourierRow {
    /// The mean square distance of the coefficients from their start.
    pub fn deviation(&self) -> f32 {
        let squares = self.coefficients.iter().zip(START).map(|(now, start)| (now - start) * (now - start));
        squares.sum::<f32>() / 4.0
    }

    /// |a2| + |a3|: the non-linear part.
    pub fn non_linearity(&self) -> f32 {
        self.coefficients[2].abs() + self.coefficients[3].abs()
    }

    fn place(&self) -> String {
        match split_layer(&self.module) {
            (Some(layer), name) => format!("{layer} {}", last_name(name)),
            (None, name) => last_name(name).to_string(),
        }
    }
}

/// The table, sorted by layer, and below it the number of non-linear modules and the strongest ones.
pub fn render_fourier_table(rows: &[FourierRow]) -> String {
    let headings = [
        ("layer", Side::Right),
        ("module", Side::Left),
        ("a0", Side::Right),
        ("a1", Side::Right),
        ("a2", Side::Right),
        ("a3", Side::Right),
        ("sigma", Side::Right),
        ("deviation", Side::Right),
        ("non-lin", Side::Right),
    ];
    let cells: Vec<Vec<String>> = sorted(rows).into_iter().map(cells).collect();
    format!("{}\n{}", render_columns(&headings, &cells), render_summary(rows))
}

/// One object per module, in the order of the table.
pub fn fourier_json(rows: &[FourierRow]) -> Value {
    let object = |row: &FourierRow| {
        json!({
            "module": row.module,
            "coefficients": row.coefficients,
            "sigma": row.sigma,
            "deviation": row.deviation(),
            "non_linearity": row.non_linearity(),
        })
    };
    sorted(rows).into_iter().map(object).collect()
}

fn sorted(rows: &[FourierRow]) -> Vec<&FourierRow> {
    let mut sorted: Vec<&FourierRow> = rows.iter().collect();
    sorted.sort_by_key(|row| {
        let (layer, name) = split_layer(&row.module);
        (layer.is_none(), layer, name)
    });
    sorted
}

fn cells(row: &FourierRow) -> Vec<String> {
    let (layer, name) = split_layer(&row.module);
    let mut cells = vec![layer.map_or(String::new(), |layer| layer.to_string()), last_name(name).to_string()];
    cells.extend(row.coefficients.iter().map(|coefficient| format!("{coefficient:.4}")));
    cells.push(format!("{:.3}", row.sigma));
    cells.push(match row.deviation() {
        0.0 => "0".to_string(),
        deviation => format!("{deviation:.2e}"),
    });
    cells.push(format!("{:.4}", row.non_linearity()));
    cells
}

fn render_summary(rows: &[FourierRow]) -> String {
    let above = rows.iter().filter(|row| row.non_linearity() > NOTICEABLE).count();
    let mut strongest = sorted(rows);
    strongest.sort_by(|left, right| right.non_linearity().total_cmp(&left.non_linearity()));
    let strongest: Vec<String> = (strongest.iter().take(STRONGEST))
        .map(|row| format!("{} {:.4}", row.place(), row.non_linearity()))
        .collect();
    let strongest =
        if strongest.is_empty() { String::new() } else { format!("\n  strongest: {}", strongest.join(", ")) };
    format!("  {above} of {} modules above {NOTICEABLE} in non-linearity, |a2|+|a3|{strongest}\n", rows.len())
}

/// The last part of a module path, such as `q_proj`.
pub fn last_name(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::columns::LINE;
    use expect_test::expect;

    fn row(module: &str, coefficients: [f32; 4], sigma: f32) -> FourierRow {
        FourierRow { module: module.to_string(), coefficients, sigma }
    }

    #[test]
    fn modules_stand_by_layer_with_the_strongest_below() {
        let rows = [
            row("model.layers.10.mlp.gate_up_proj", [-0.0123, 0.9876, -0.0152, 0.0121], 1.0525),
            row("model.layers.2.self_attn.q_proj", [0.0, 1.0, 0.0, 0.0], 1.0),
            row("model.layers.2.mlp.down_proj", [0.001, 1.002, 0.004, -0.0061], 0.998),
            row("model.layers.31.mlp.down_proj", [0.0, 1.0, 0.5, -0.5], 12.5),
        ];
        let text = render_fourier_table(&rows);
        expect![[r#"
            table
              layer module            a0     a1      a2      a3  sigma deviation non-lin
                  2 down_proj     0.0010 1.0020  0.0040 -0.0061  0.998   1.46e-5  0.0101
                  2 q_proj        0.0000 1.0000  0.0000  0.0000  1.000         0  0.0000
                 10 gate_up_proj -0.0123 0.9876 -0.0152  0.0121  1.053   1.71e-4  0.0273
                 31 down_proj     0.0000 1.0000  0.5000 -0.5000 12.500   1.25e-1  1.0000

              3 of 4 modules above 0.01 in non-linearity, |a2|+|a3|
              strongest: 31 down_proj 1.0000, 10 gate_up_proj 0.0273, 2 down_proj 0.0101
        "#]]
        // Below a line of its own, because a snapshot loses the indentation that all its lines share.
        .assert_eq(&format!("table\n{text}"));
        assert!(text.lines().all(|line| line.chars().count() <= LINE));
        let page = include_str!("../../../../docs/ls-lora.md");
        assert!(page.contains(&format!("```\n{text}```\n")), "`docs/ls-lora.md` shows this table");
        assert_eq!(rows[3].deviation(), 0.125);
        assert_eq!(rows[3].non_linearity(), 1.0);
        assert_eq!(fourier_json(&rows)[3]["deviation"], 0.125);
    }

    #[test]
    fn no_modules_make_an_empty_table() {
        let text = render_fourier_table(&[]);
        assert!(text.ends_with("\n\n  0 of 0 modules above 0.01 in non-linearity, |a2|+|a3|\n"), "{text}");
    }
}
