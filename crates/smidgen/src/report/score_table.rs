//! The scores of base and adapter side by side: one metric per line, and how many rows the adapter changed.
//!
//! Left out: the results of single rows, which are in the JSON.

use crate::console::columns::{Side, render_columns};
use crate::eval::results::{Metric, Results};

pub fn render_score_table(results: &Results) -> String {
    let mut headings = vec![("", Side::Left), ("base", Side::Right)];
    if results.adapter.is_some() {
        headings.extend([("adapter", Side::Right), ("difference", Side::Right)]);
    }
    let lines = results.base.metrics.iter().enumerate().map(|(index, base)| {
        let mut cells = vec![base.name.replace('_', " "), cell(base)];
        if let Some(adapter) = &results.adapter {
            let adapter = &adapter.metrics[index];
            cells.extend([cell(adapter), format!("{:+.4}", adapter.value - base.value)]);
        }
        cells
    });
    let lines: Vec<Vec<String>> = lines.collect();
    let mut text = render_columns(&headings, &lines);
    let rows = results.questions.len();
    text += &match results.flips() {
        Some(flips) => format!(
            "  {rows} rows: the adapter turns {} from wrong to right, {} from right to wrong\n",
            flips.to_right, flips.to_wrong
        ),
        None => format!("  {rows} rows\n"),
    };
    text
}

fn cell(metric: &Metric) -> String {
    match metric.stderr {
        Some(stderr) => format!("{:.4} ± {stderr:.4}", metric.value),
        None => format!("{:.4}", metric.value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::results::Measured;
    use serde_json::{Map, json};

    #[test]
    fn both_models_and_their_difference() {
        let measured = |loss: f64, acc: f64, right: &[bool]| Measured {
            metrics: vec![
                Metric { name: "loss", value: loss, stderr: None },
                Metric { name: "acc", value: acc, stderr: Some(0.25) },
            ],
            right: right.to_vec(),
            records: vec![json!(1), json!(2)],
        };
        let mut results = Results {
            about: Map::new(),
            questions: vec![json!({"gold": 0}), json!({"gold": 1})],
            base: measured(2.0, 0.5, &[true, false]),
            adapter: Some(measured(1.5, 1.0, &[true, true])),
        };
        assert_eq!(
            render_score_table(&results),
            "                   base          adapter  difference\n\
             \x20 loss           2.0000           1.5000     -0.5000\n\
             \x20 acc   0.5000 ± 0.2500  1.0000 ± 0.2500     +0.5000\n\
             \x20 2 rows: the adapter turns 1 from wrong to right, 0 from right to wrong\n"
        );
        let json = results.render_json();
        assert_eq!(json["samples"][1], json!({"gold": 1, "base": 2, "adapter": 2}));
        assert_eq!((&json["to_right"], &json["adapter"]["acc_stderr"]), (&json!(1), &json!(0.25)));
        results.adapter = None;
        assert!(render_score_table(&results).ends_with("± 0.2500\n  2 rows\n"));
    }
}
