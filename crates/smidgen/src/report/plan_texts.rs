//! A plan as text for the run folder: the table of `plan.txt` and the JSON of `plan.json`.
//!
//! Training gets this function as a parameter, because `train/` does not depend on `report/`.

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
