//! What a user sees of a plan: a table for people, JSON for programs.
//!
//! Both read the plan's own buffer table, so neither can say anything else than what the run takes.
//! Left out: HTML, and anything about a run that is under way.

pub mod plan_json;
pub mod plan_table;
