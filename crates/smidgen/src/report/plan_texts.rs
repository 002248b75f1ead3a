//! A plan as text for the run folder: the table of `plan.txt` and the JSON of `plan.json`.
//!
//! Left out: the steps of the plan, which follow the table in `plan.txt`.

use super::{plan_json, plan_table};
use crate::plan::job::Job;
use crate::plan::planning::Planned;

#[derive(Clone, Debug)]
pub struct PlanTexts {
    pub table: String,
    pub json: String,
}

pub fn render_plan_texts(job: &Job, planned: &Planned) -> PlanTexts {
    PlanTexts {
        table: plan_table::render_table(job, planned),
        json: plan_json::render_text(&plan_json::render_json(planned)),
    }
}
