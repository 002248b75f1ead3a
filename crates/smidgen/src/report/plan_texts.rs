//! A plan as the run folder has it: the table of `plan.txt` and the JSON of `plan.json`.
//!
//! Training writes them without knowing how they are made.

use super::{plan_json, plan_table};
use crate::plan::job::Job;
use crate::plan::planning::Planned;
use crate::train::course::PlanTexts;

pub fn render_plan_texts(job: &Job, planned: &Planned) -> PlanTexts {
    PlanTexts {
        table: plan_table::render_table(job, planned),
        json: plan_json::render_text(&plan_json::render_json(planned)),
    }
}
